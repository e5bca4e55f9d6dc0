"""Several tries from one point, each with its own files: side by side, compared, the best brought back."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pytest

import mulligan
from mulligan import Plan, agent_loop
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession
from mulligan.history.branches import branches, fork_files
from mulligan.history.retention import evict_over
from mulligan.history.tables import CALLS
from mulligan.history.undo import UndoResult
from mulligan.session.roots import SANDBOXED_ROOTS
from mulligan.testing import contents_of
from mulligan.values.canonical import decode
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SystemIds
from tests.temp_workspace import open_temp_workspace

Merge: TypeAlias = Callable[..., UndoResult]
LINES = "".join(f"{number}\n" for number in range(30))


@pytest.fixture(params=["memory:", "directory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    store = str(tmp_path / "home") if request.param == "directory" else request.param
    with mulligan.open(str(tmp_path / "work"), store=store) as found:
        yield found


def wrote(session: DurableSession, path: str, content: str) -> None:
    with session.call("write") as call:
        assert call.write_file(path, content).ok


def test_parallel_forks_see_their_own_files_and_the_best_is_merged(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", LINES)
    session[Plan].seed(Plan("before"))
    branches = [session.fork(files="copy") for _ in range(3)]

    def explore(branch: DurableSession) -> dict[str, bytes]:
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


def test_a_merge_conflict_is_named_and_the_rest_is_merged(opened: Mulligan, tmp_path: Path) -> None:
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


def test_a_merge_belongs_to_the_turn_in_which_it_runs(opened: Mulligan, tmp_path: Path) -> None:
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


def test_a_merge_in_a_turn_of_the_fork_is_its_own_turn_in_the_parent(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy")
    with branch.turn("theirs"):
        wrote(branch, "b.txt", "theirs\n")
        assert branch.merge().ok
    assert session.rollback().ok
    assert contents_of(tmp_path / "work") == {"a.txt": b"one\n"}


class TestSecondMerge:
    """What a fork brought in is common ground for what it brings in next."""

    @pytest.fixture
    def session(self, opened: Mulligan) -> DurableSession:
        session = opened.session("main")
        wrote(session, "a.txt", LINES)
        return session

    def test_brings_later_changes_of_the_fork(self, session: DurableSession, tmp_path: Path) -> None:
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

    def test_keeps_changes_of_the_parent_in_the_same_file(self, session: DurableSession, tmp_path: Path) -> None:
        branch = session.fork(files="copy")
        ours = LINES.replace("\n20\n", "\nours\n")
        wrote(session, "a.txt", ours)
        for line in ("first", "second", "third"):
            wrote(branch, "a.txt", LINES.replace("\n7\n", f"\n{line}\n"))
            assert branch.merge().ok
            assert contents_of(tmp_path / "work") == {"a.txt": ours.replace("\n7\n", f"\n{line}\n").encode()}

    def test_an_undone_merge_does_not_count(self, session: DurableSession, tmp_path: Path) -> None:
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

    def test_a_merge_into_a_dropped_fork_is_refused(self, session: DurableSession) -> None:
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


def test_a_fork_without_copied_files_cannot_be_merged_or_dropped(opened: Mulligan, tmp_path: Path) -> None:
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


class TestForkOfAnEarlierCall:
    """What a fork begins with is not what its parent has now, and is no change of the fork's."""

    @pytest.fixture
    def session(self, opened: Mulligan) -> DurableSession:
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

    def test_an_unchanged_fork_merges_nothing(self, session: DurableSession, tmp_path: Path) -> None:
        branch = session.fork(at="point", files="copy")
        assert contents_of(Path(branch.root)) == {"a.txt": LINES.encode(), "gone.txt": b"gone\n"}
        before = contents_of(tmp_path / "work")
        merged = branch.merge()
        assert (merged.ok, merged.outcomes, contents_of(tmp_path / "work")) == (True, (), before)

    def test_its_changes_are_merged_with_later_changes_of_the_parent(
        self, session: DurableSession, tmp_path: Path
    ) -> None:
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

    def test_it_contains_changes_that_were_undone_later(self, session: DurableSession, tmp_path: Path) -> None:
        then = contents_of(tmp_path / "work")
        with session.call("last", tool_call_id="last") as call:
            assert call.edit_file("a.txt", "\n7\n", "\nlast\n").ok
        for way in (session.undo("first", on_conflict="overwrite"), session.rollback(), session.undo("gone")):
            assert way.call_id is not None
        branch = session.fork(at="last", files="copy")
        assert contents_of(Path(branch.root)) == then
        assert session.rewind("last").ok
        assert contents_of(tmp_path / "work") == then

    def test_later_changes_of_a_person_stay_in_the_parent(self, session: DurableSession, tmp_path: Path) -> None:
        (tmp_path / "work/a.txt").write_text((tmp_path / "work/a.txt").read_text().replace("\n7\n", "\nmine\n"))
        branch = session.fork(at="point", files="copy")
        assert (Path(branch.root) / "a.txt").read_text() == LINES.replace("\n7\n", "\nmine\n")

    def test_files_that_cannot_be_restored_are_listed(
        self, opened: Mulligan, session: DurableSession, tmp_path: Path
    ) -> None:
        (tmp_path / "work/a.txt").write_text("mine\n")
        made = fork_files(opened.open_root, session.id, str(tmp_path / "then"), at="point")
        left = {"path": "a.txt", "reason": "same_lines"}
        assert (made.coverage, (tmp_path / "then/a.txt").read_text()) == ((left,), "mine\n")
        with opened.store.read() as tx:
            assert [decode(row.coverage) for row in tx.select(CALLS, {"session": made.session})] == [[left]]

    def test_files_whose_bytes_were_evicted_are_listed(
        self, opened: Mulligan, session: DurableSession, tmp_path: Path
    ) -> None:
        evict_over(opened.open_root.ledger, session.id, 0)
        made = fork_files(opened.open_root, session.id, str(tmp_path / "then"), at="point")
        assert made.coverage == ({"path": "a.txt", "reason": "evicted"},)
        now = LINES.replace("\n20\n", "\nlater\n").encode()
        assert contents_of(tmp_path / "then") == {"a.txt": now, "gone.txt": b"gone\n"}


def _move_and_link(folder: Path) -> None:
    (folder / "d").rename(folder / "z")
    (folder / "d").symlink_to("z")


def _file_to_directory(folder: Path) -> None:
    (folder / "d/a").unlink()
    (folder / "d/a").mkdir()
    (folder / "d/a/in").write_text("theirs\n")


def _link_to_itself(folder: Path) -> None:
    shutil.rmtree(folder / "d")
    (folder / "d").symlink_to("d")


class TestMergeOfDirectories:
    """One that is gone, full or something else stops only what needs it otherwise; a dry run says the same."""

    CASES: ClassVar[dict[str, tuple[Any, ...]]] = {
        # What the fork does, what a person does, and which outcomes that has: with merge, and with overwrite.
        "adds to one that is gone": (
            lambda fork: (fork / "d/new").write_text("theirs\n"),
            lambda root: shutil.rmtree(root / "d"),
            {"d/new": "conflicted"},
            {"d": "restored", "d/new": "restored"},
        ),
        "edits in one that was renamed": (
            lambda fork: (fork / "d/a").write_text("theirs\n"),
            lambda root: (root / "d").rename(root / "moved"),
            {"d/a": "conflicted"},
            {"d": "restored", "d/a": "restored"},
        ),
        "removes one that was added to": (
            lambda fork: shutil.rmtree(fork / "d"),
            lambda root: (root / "d/extra").write_text("mine\n"),
            {"d": "skipped", "d/a": "restored"},
            {"d": "skipped", "d/a": "restored"},
        ),
        "moves one in which a file was edited": (
            lambda fork: (fork / "d").rename(fork / "z"),
            lambda root: (root / "d/a").write_text("mine\n"),
            {"d": "skipped", "d/a": "conflicted", "z": "restored", "z/a": "restored"},
            {"d": "restored", "d/a": "restored", "z": "restored", "z/a": "restored"},
        ),
        "makes one of a file that was edited": (
            _file_to_directory,
            lambda root: (root / "d/a").write_text("mine\n"),
            {"d/a": "conflicted", "d/a/in": "conflicted"},
            {"d/a": "restored", "d/a/in": "restored"},
        ),
        "edits in one that became a link": (
            lambda fork: (fork / "d/a").write_text("theirs\n"),
            _move_and_link,
            {"d/a": "conflicted"},
            {"d/a": "conflicted"},
        ),
        "makes a link of one": (
            _move_and_link,
            lambda root: None,
            {"d": "restored", "d/a": "restored", "z": "restored", "z/a": "restored"},
            {"d": "restored", "d/a": "restored", "z": "restored", "z/a": "restored"},
        ),
        "makes a link to itself of one": (
            _link_to_itself,
            lambda root: None,
            {"d": "restored", "d/a": "restored"},
            {"d": "restored", "d/a": "restored"},
        ),
    }

    @pytest.fixture(params=["fork", "aside"])
    def merging(self, request: pytest.FixtureRequest, opened: Mulligan, tmp_path: Path) -> tuple[Path, Path, Merge]:
        """The original, the copy, and how the one is merged into the other."""
        session, root = opened.session("main"), tmp_path / ("work" if request.param == "fork" else "box")
        (root / "d").mkdir(parents=True)
        (root / "d").chmod(0o750)
        (root / "d/a").write_text("begin\n")
        if request.param == "fork":
            branch = session.fork(files="copy")
            return root, Path(branch.root), branch.merge
        session.add_root(str(root), mount_mode="sandboxed")
        wrote(session, str(root / "first"), "theirs\n")
        with opened.store.read() as tx:
            copy = tx.select(SANDBOXED_ROOTS)[0].directory
        return root, Path(copy), partial(session.merge_root, str(root))

    @pytest.mark.parametrize("on_conflict", ["merge", "overwrite"])
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_a_conflict_in_a_directory_leaves_the_rest_merged(
        self, merging: tuple[Path, Path, Merge], case: tuple[Any, ...], on_conflict: str
    ) -> None:
        (root, copy, merge), (theirs, mine, merged, overwritten) = merging, case
        theirs(copy)
        mine(root)
        (copy / "y").write_text("theirs\n")
        dry, done = merge(on_conflict=on_conflict, dry_run=True), merge(on_conflict=on_conflict)
        assert (dry.ok, dry.outcomes, dry.overwrote_external) == (done.ok, done.outcomes, done.overwrote_external)
        found = {one.path.removeprefix(f"{root}/"): one.outcome for one in done.outcomes}
        found.pop("first", None)
        assert found == {**(merged if on_conflict == "merge" else overwritten), "y": "restored"}
        assert (root / "y").read_text() == "theirs\n"

    def test_a_deleted_directory_is_created_again_with_the_mode_of_the_copy(
        self, merging: tuple[Path, Path, Merge]
    ) -> None:
        root, copy, merge = merging
        (copy / "d/new").write_text("theirs\n")
        shutil.rmtree(root / "d")
        assert merge(on_conflict="overwrite").ok
        assert (stat.S_IMODE((root / "d").stat().st_mode), os.listdir(root / "d")) == (0o750, ["new"])


def test_a_file_without_a_common_base_does_not_stop_the_merge(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    (tmp_path / "work/a.txt").write_text(LINES)
    branch = session.fork(files="copy")
    wrote(session, "a.txt", LINES.replace("\n7\n", "\nours\n"))
    (Path(branch.root) / "a.txt").write_text(LINES.replace("\n20\n", "\ntheirs\n"))
    wrote(branch, "b.txt", "new\n")
    wrote(session, "c.txt", "the newest keeps its bytes\n")
    evict_over(opened.open_root.ledger, session.id, 0)
    merged = branch.merge()
    assert [one.to_json() for one in merged.outcomes] == [
        {"path": "a.txt", "outcome": "conflicted", "reason": "not_captured"},
        {"path": "b.txt", "outcome": "restored"},
    ]
    assert (tmp_path / "work/b.txt").read_text() == "new\n"


@pytest.mark.parametrize("place", ["inside", "deep/er/inside", "../link/inside", "."])
def test_a_copy_inside_the_original_is_refused(opened: Mulligan, tmp_path: Path, place: str) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    (tmp_path / "link").symlink_to("work")
    with pytest.raises(MulliganError) as caught:
        session.fork(files="copy", to=str(tmp_path / "work" / place))
    assert caught.value.code == ("file_exists" if place == "." else "invalid_params")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["a.txt"]


def test_a_copy_path_may_begin_with_the_name_of_the_original(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy", to=str(tmp_path / "work-too" / "work"))
    assert contents_of(Path(branch.root)) == {"a.txt": b"one\n"}


def test_a_merge_without_changes_makes_no_call(opened: Mulligan, tmp_path: Path) -> None:
    session, box = opened.session("main"), tmp_path / "box"
    box.mkdir()
    (box / "b.txt").write_text("theirs\n")
    session.add_root(str(box), mount_mode="sandboxed")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy", dst="idea")
    wrote(session, str(box / "b.txt"), "ours\n")
    wrote(session, str(box / "b.txt"), "theirs\n")
    with opened.store.read() as tx:
        calls = tx.count(CALLS)
    nothing = (branch.merge(), session.merge_root(str(box)))
    assert [(way.ok, way.call_id) for way in nothing] == [(True, None)] * 2
    with opened.store.read() as tx:
        assert tx.count(CALLS) == calls
    assert [one.status for one in branches(opened.open_root)] == ["merged"]


def test_on_conflict_refuse_refuses_the_whole_merge(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("main")
    wrote(session, "a.txt", "one\n")
    branch = session.fork(files="copy")
    wrote(branch, "a.txt", "two\n")
    os.mkfifo(Path(branch.root) / "pipe")
    way = branch.merge(on_conflict="refuse")
    assert (way.ok, way.call_id, contents_of(tmp_path / "work")) == (False, None, {"a.txt": b"one\n"})
    assert [(one.path, one.outcome, one.reason) for one in way.outcomes] == [
        ("a.txt", "skipped", None),
        ("pipe", "skipped", "not_captured"),
    ]


class TestForkCopy:
    class Failing(SystemIds):
        """The disk of the store is full from a moment on."""

        def __init__(self, copy: Path, after: int) -> None:
            self.copy, self.left = copy, after

        def new(self) -> str:
            self.left -= self.copy.exists()
            if self.left < 0:
                raise OSError(errno.ENOSPC, "full")
            return super().new()

    @pytest.mark.parametrize("after", range(4))
    def test_a_failed_copy_is_removed_and_leaves_no_open_file(self, tmp_path: Path, after: int) -> None:
        ids = self.Failing(tmp_path / "copy", after)
        workspace = open_temp_workspace(tmp_path, ids=ids)
        session = workspace.session()
        with session.call() as call:
            call.write_file("a.txt", b"one\n")
        handles = set(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError) as caught:
            session.fork(at=call.id, files="copy", to=str(ids.copy))
        assert caught.value.errno == errno.ENOSPC
        gc.collect()
        assert (ids.copy.exists(), set(os.listdir("/proc/self/fd")) - handles) == (False, set())
        assert branches(workspace.open_root) == []
        workspace.close()

    def test_a_tree_deeper_than_the_longest_path_is_copied(self, opened: Mulligan, tmp_path: Path) -> None:
        (tmp_path / "work" / "/".join(["n" * 250] * 12)).mkdir(parents=True)
        far = tmp_path / "/".join(["f" * 250] * 5) / "copy"
        opened.session("main").fork(files="copy", to=str(far))
        names = [name for _, folders, _, _ in os.fwalk(far) for name in folders]
        assert names == ["n" * 250] * 12

    def test_a_copy_of_a_dead_process_is_removed_by_the_next_fork(self, tmp_path: Path) -> None:
        (tmp_path / "work").mkdir()
        code = "import mulligan, sys; print(mulligan.open(sys.argv[1], store=sys.argv[2]).store.owner())"
        places = [str(tmp_path / "work"), str(tmp_path / "home")]
        dead = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, check=True).stdout
        with mulligan.open(places[0], store=places[1]) as opened:
            kept = [Path(opened.session("main").fork(files="copy").root).name, f"{opened.store.owner()}-half", "others"]
            for name in (f"{dead.strip()}-half", *kept[1:]):
                (tmp_path / "home/forks" / name).mkdir()
            newest = Path(opened.session("main").fork(files="copy").root).name
        assert sorted(os.listdir(tmp_path / "home/forks")) == sorted([*kept, newest])
