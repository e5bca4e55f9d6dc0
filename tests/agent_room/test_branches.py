"""Several tries from one point, each with its own files: side by side, compared, the best brought back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mulligan
from mulligan import Plan, agent_loop
from mulligan.effects.session import Session
from mulligan.opening import Mulligan
from mulligan.testing import contents_of
from mulligan.values.faults import MulliganError

LINES = "".join(f"{number}\n" for number in range(30))


@pytest.fixture(params=["memory:", "directory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    store = str(tmp_path / "home") if request.param == "directory" else request.param
    with mulligan.open(str(tmp_path / "work"), store=store) as found:
        yield found


def wrote(session: Session, path: str, content: str) -> None:
    with session.call("write") as call:
        assert call.write_file(path, content).ok


def test_agents_side_by_side_see_their_own_files_and_the_best_comes_back(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", LINES)
    session[Plan].seed(Plan("before"))
    branches = [session.fork(files="copy") for _ in range(3)]

    def explore(branch: Session) -> dict[str, bytes]:
        edit = {"path": "a.txt", "old_string": "\n7\n", "new_string": f"\n{branch.id}\n"}
        new = {"path": "new.txt", "content": branch.id}
        script = [{"tool": "edit_file", "args": edit}, {"tool": "write_file", "args": new}, "done"]
        agent_loop("try it", session=branch, provider=script)
        return contents_of(Path(branch.root))

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(explore, branches))
    changed = [LINES.replace("\n7\n", f"\n{branch.id}\n").encode() for branch in branches]
    assert found == [
        {"a.txt": text, "new.txt": branch.id.encode()} for text, branch in zip(changed, branches, strict=True)
    ]
    assert contents_of(tmp_path / "work") == {"a.txt": LINES.encode()}
    assert [branch[Plan].all() for branch in branches] == [(Plan("before"),)] * 3

    wrote(session, "a.txt", LINES.replace("\n20\n", "\nmeanwhile\n"))
    assert branches[1].merge().ok
    for branch in branches:
        branch.drop()
        assert not Path(branch.root).exists()
    merged = changed[1].replace(b"\n20\n", b"\nmeanwhile\n")
    assert contents_of(tmp_path / "work") == {"a.txt": merged, "new.txt": branches[1].id.encode()}
    assert session.undo().ok
    assert contents_of(tmp_path / "work") == {"a.txt": LINES.replace("\n20\n", "\nmeanwhile\n").encode()}


def test_a_clash_is_named_and_the_rest_comes(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy", to=str(tmp_path / "branch"))
    wrote(branch, "a.txt", "theirs\n")
    wrote(branch, "b.txt", "new\n")
    wrote(session, "a.txt", "ours\n")
    tried = branch.merge(dry_run=True)
    assert (tried.ok, tried.call_id) == (False, None)
    merged = branch.merge()
    assert {one.path: one.outcome for one in merged.outcomes} == {"a.txt": "conflicted", "b.txt": "restored"}
    assert contents_of(tmp_path / "work") == {"a.txt": b"ours\n", "b.txt": b"new\n"}
    refused = branch.merge(on_conflict="refuse")
    assert (refused.ok, {one.outcome for one in refused.outcomes}) == (False, {"conflicted", "skipped"})
    merged = branch.merge(on_conflict="overwrite")
    assert (merged.ok, merged.overwrote_external) == (True, ("a.txt",))
    assert contents_of(tmp_path / "work") == {"a.txt": b"theirs\n", "b.txt": b"new\n"}


def test_a_merge_is_part_of_the_turn_it_is_made_in(opened: Mulligan, tmp_path: Path) -> None:
    session, box = opened.session("main"), tmp_path / "box"
    box.mkdir()
    session.add_root(str(box), mount_mode="sandboxed")
    with session.turn("do it"):
        wrote(session, "before.txt", "one\n")
        wrote(session, str(box / "aside.txt"), "aside\n")
        branch = session.fork(files="copy")
        wrote(branch, "merged.txt", "theirs\n")
        assert branch.merge().ok
        wrote(session, "after.txt", "two\n")
        assert session.merge_root(str(box)).ok
    assert session.rollback().ok
    assert (contents_of(tmp_path / "work"), contents_of(box)) == ({}, {})
    assert session.redo().ok
    assert contents_of(tmp_path / "work").keys() == {"before.txt", "merged.txt", "after.txt"}
    assert contents_of(box).keys() == {"aside.txt"}


def test_a_merge_made_in_a_turn_of_the_fork_is_a_turn_of_its_own(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy")
    with branch.turn("theirs"):
        wrote(branch, "b.txt", "theirs\n")
        assert branch.merge().ok
    assert session.rollback().ok
    assert contents_of(tmp_path / "work") == {"a.txt": b"one\n"}


class TestMergedAgain:
    """What a fork brought in is common ground for what it brings in next."""

    @pytest.fixture
    def session(self, opened: Mulligan) -> Session:
        session = opened.session("main")
        wrote(session, "a.txt", LINES)
        return session

    def test_what_it_changed_anew_comes(self, session: Session, tmp_path: Path) -> None:
        branch = session.fork(files="copy")
        for version in ("v1\n", "v2\n", "v3\n"):
            wrote(branch, "a.txt", version)
            wrote(branch, "new.txt", version)
            assert branch.merge().ok
            assert contents_of(tmp_path / "work") == {"a.txt": version.encode(), "new.txt": version.encode()}
        with branch.call("delete") as call:
            assert call.delete("new.txt").ok
        assert branch.merge().ok
        assert contents_of(tmp_path / "work") == {"a.txt": b"v3\n"}

    def test_what_the_parent_did_in_the_same_file_stays(self, session: Session, tmp_path: Path) -> None:
        branch = session.fork(files="copy")
        ours = LINES.replace("\n20\n", "\nours\n")
        wrote(session, "a.txt", ours)
        for line in ("first", "second", "third"):
            wrote(branch, "a.txt", LINES.replace("\n7\n", f"\n{line}\n"))
            assert branch.merge().ok
            assert contents_of(tmp_path / "work") == {"a.txt": ours.replace("\n7\n", f"\n{line}\n").encode()}

    def test_a_merge_that_was_taken_back_does_not_count(self, session: Session, tmp_path: Path) -> None:
        branch = session.fork(files="copy")
        wrote(branch, "a.txt", "v1\n")
        wrote(branch, "b.txt", "v1\n")
        merged = branch.merge().call_id
        assert session.undo(merged, ["b.txt"]).ok and branch.merge().ok
        assert contents_of(tmp_path / "work") == {"a.txt": b"v1\n", "b.txt": b"v1\n"}
        assert session.undo().ok and session.undo(merged).ok
        assert contents_of(tmp_path / "work") == {"a.txt": LINES.encode()}
        wrote(session, "a.txt", "ours\n")
        assert [one.reason for one in branch.merge().outcomes] == ["same_lines", None]

    def test_into_files_that_are_gone_is_refused(self, session: Session) -> None:
        branch = session.fork(files="copy")
        further = branch.fork(files="copy")
        wrote(further, "b.txt", "new\n")
        assert further.merge().ok
        branch.drop()
        wrote(further, "b.txt", "newer\n")
        for dry_run in (True, False):
            with pytest.raises(MulliganError) as caught:
                further.merge(dry_run=dry_run)
            assert caught.value.code == "unknown_root"
        further.drop()


def test_what_shares_its_files_has_nothing_to_merge_or_drop(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    copied = session.fork(files="copy")
    copied.drop()
    for act in (session.merge, session.drop, session.fork().merge, session.fork().drop, copied.merge, copied.drop):
        with pytest.raises(MulliganError) as caught:
            act()
        assert caught.value.code == "unknown_session"
    assert contents_of(tmp_path / "work") == {"a.txt": b"one\n"}
    with pytest.raises(MulliganError) as caught:
        session.fork(files="both")  # type: ignore[arg-type]  # what somebody might try
    assert caught.value.code == "invalid_params"


class TestFromAnEarlierPoint:
    """What a fork begins with is not what its parent has now, and is no change of the fork's."""

    @pytest.fixture
    def session(self, opened: Mulligan) -> Session:
        session = opened.session("main")
        for label, effect, *given in (
            ("first", "write_file", "a.txt", LINES),
            ("gone", "write_file", "gone.txt", "gone\n"),
            ("point", "write_file", "late.txt", "late\n"),
            ("edited", "edit_file", "a.txt", "\n20\n", "\nlater\n"),
            ("removed", "delete", "gone.txt"),
        ):
            with session.call(label, tool_call_id=label) as call:
                assert getattr(call, effect)(*given).ok
        return session

    def test_one_that_changed_nothing_brings_nothing(self, session: Session, tmp_path: Path) -> None:
        branch = session.fork(at="point", files="copy")
        assert contents_of(Path(branch.root)) == {"a.txt": LINES.encode(), "gone.txt": b"gone\n"}
        before = contents_of(tmp_path / "work")
        merged = branch.merge()
        assert (merged.ok, merged.outcomes, contents_of(tmp_path / "work")) == (True, (), before)

    def test_what_it_changed_is_merged_with_what_the_parent_did_since(self, session: Session, tmp_path: Path) -> None:
        branch = session.fork(at="point", files="copy")
        (Path(branch.root) / "a.txt").write_text(LINES.replace("\n7\n", "\nseven\n"))
        wrote(branch, "late.txt", "another\n")
        wrote(branch, "gone.txt", "still here\n")
        merged = branch.merge()
        assert [(one.path, one.outcome) for one in merged.outcomes] == [
            ("a.txt", "merged"),
            ("gone.txt", "conflicted"),
            ("late.txt", "conflicted"),
        ]
        both = LINES.replace("\n7\n", "\nseven\n").replace("\n20\n", "\nlater\n")
        assert contents_of(tmp_path / "work") == {"a.txt": both.encode(), "late.txt": b"late\n"}


@pytest.mark.parametrize("place", ["inside", "deep/er/inside", "../link/inside", "."])
def test_a_copy_inside_the_original_is_refused_and_nothing_made(opened: Mulligan, tmp_path: Path, place: str) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    (tmp_path / "link").symlink_to("work")
    with pytest.raises(MulliganError) as caught:
        session.fork(files="copy", to=str(tmp_path / "work" / place))
    assert caught.value.code == ("file_exists" if place == "." else "invalid_params")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["a.txt"]


def test_a_copy_may_hold_the_folder_of_its_original_in_its_name(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy", to=str(tmp_path / "work-too" / "work"))
    assert contents_of(Path(branch.root)) == {"a.txt": b"one\n"}
