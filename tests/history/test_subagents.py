"""A parent owns what its sub-agents do: rolling its turn back takes their work of that turn along."""

from __future__ import annotations

import pytest

from mulligan.effects.session import DurableSession
from mulligan.history.branches import fork
from mulligan.session.tables import SESSIONS
from mulligan.testing import contents_of
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SessionId
from tests.temp_workspace import TempWorkspace


def write(session: DurableSession, path: str, content: str) -> str:
    with session.call() as call:
        assert call.write_file(path, content).ok
    return call.id


def child_of(workspace: TempWorkspace, parent: str, name: str) -> DurableSession:
    fork(workspace.open_root, SessionId(parent), child=name)
    return workspace.session(name)


def files(workspace: TempWorkspace) -> dict[str, bytes]:
    return contents_of(workspace.root)


@pytest.mark.req("H20.child_session_writes")
def test_a_parents_rollback_covers_what_its_sub_agents_wrote(workspace: TempWorkspace) -> None:
    parent = workspace.session("parent")
    write(parent, "kept", "an earlier turn")
    with parent.turn("do it"):
        write(parent, "own", "parent")
        child = child_of(workspace, "parent", "child")
        write(child, "childs", "child")
        write(child_of(workspace, "child", "grandchild"), "grandchilds", "grandchild")
        write(parent, "childs", "parent, over the child's")
    way = parent.rollback()
    assert (way.ok, len(way.of), files(workspace)) == (True, 4, {"kept": b"an earlier turn"})
    assert parent.redo().ok
    assert set(files(workspace)) == {"kept", "own", "childs", "grandchilds"}
    assert files(workspace)["childs"] == b"parent, over the child's"


@pytest.mark.req("H20.child_session_writes")
def test_a_turn_in_which_only_a_sub_agent_wrote_is_the_one_rolled_back(workspace: TempWorkspace) -> None:
    parent = workspace.session("parent")
    write(parent, "kept", "an earlier turn")
    with parent.turn("delegate"):
        write(child_of(workspace, "parent", "child"), "childs", "child")
    assert parent.rollback().ok
    assert files(workspace) == {"kept": b"an earlier turn"}
    assert parent.rollback().ok
    assert files(workspace) == {}


def test_a_call_that_delegates_is_a_turn_of_its_own(workspace: TempWorkspace) -> None:
    parent = workspace.session("parent")
    child = child_of(workspace, "parent", "child")
    with parent.call() as call:
        call.write_file("own", "parent")
        write(child, "childs", "child")
    assert parent.rollback().ok
    assert files(workspace) == {}


def test_what_a_child_does_outside_the_turn_is_its_own(workspace: TempWorkspace) -> None:
    parent = workspace.session("parent")
    child = child_of(workspace, "parent", "child")
    write(child, "before", "child")
    with parent.turn("do it"):
        write(parent, "own", "parent")
    write(child, "after", "child")
    assert parent.rollback().ok
    assert set(files(workspace)) == {"before", "after"}
    with pytest.raises(MulliganError) as nothing:
        parent.rollback()
    assert nothing.value.code == "nothing_to_undo"


def test_a_childs_rollback_leaves_the_parents_work(workspace: TempWorkspace) -> None:
    parent = workspace.session("parent")
    with parent.turn("do it"):
        write(parent, "own", "parent")
        child = child_of(workspace, "parent", "child")
        write(child, "childs", "child")
    assert child.rollback().ok
    assert files(workspace) == {"own": b"parent"}
    assert parent.rollback().ok
    assert files(workspace) == {}


def test_what_a_person_wrote_into_a_childs_file_stays(workspace: TempWorkspace) -> None:
    parent, lines = workspace.session("parent"), "".join(f"line {n}\n" for n in range(9))
    (workspace.root / "f").write_text(lines)
    with parent.turn("do it"):
        write(child_of(workspace, "parent", "child"), "f", lines.replace("line 1\n", "line one\n"))
    (workspace.root / "f").write_text((workspace.root / "f").read_text().replace("line 7\n", "line seven\n"))
    way = parent.rollback()
    assert [one.outcome for one in way.outcomes] == ["merged"]
    assert (workspace.root / "f").read_text() == lines.replace("line 7\n", "line seven\n")


@pytest.mark.req("D6.fork_share")
def test_a_fork_is_a_child_session_on_the_same_files(workspace: TempWorkspace) -> None:
    write(workspace.session("parent"), "f", "parent")
    child = child_of(workspace, "parent", "child")
    write(child, "f", "child")
    assert files(workspace) == {"f": b"child"}
    with workspace.open_root.ledger.store.read() as tx:
        row = tx.get(SESSIONS, "child")
    assert row is not None and (row.parent, row.root) == ("parent", workspace.open_root.root.id)
    assert child.undo().ok
    assert files(workspace) == {"f": b"parent"}
