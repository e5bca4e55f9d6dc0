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
    assert branch.merge(on_conflict="overwrite").ok
    assert contents_of(tmp_path / "work") == {"a.txt": b"theirs\n", "b.txt": b"new\n"}


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
