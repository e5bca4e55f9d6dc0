"""What a way back is given: which call, which paths, whose session, and when it may be asked for at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mulligan.effects.session import DurableSession
from mulligan.files.disk import HostDisk
from mulligan.history.log import log_view
from mulligan.history.open_root import OpenRoot
from mulligan.history.undo import UndoOptions, restore, rewind, undo
from mulligan.testing import contents_of
from mulligan.values.errors import MulliganError
from tests.temp_workspace import TempWorkspace, open_temp_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path)
    yield workspace
    workspace.close()


def write(session: DurableSession, path: str, content: str) -> str:
    with session.call() as call:
        assert call.write_file(path, content).ok
    return call.id


@pytest.mark.parametrize("verb", ["undo", "restore"])
@pytest.mark.parametrize("paths", ["one.txt", Path("one.txt"), ["one.txt"]])
def test_one_path_is_one_path_and_a_call_can_be_named_by_itself(
    workspace: TempWorkspace, verb: str, paths: object
) -> None:
    session = workspace.session()
    with session.call() as call:
        call.write_file("one.txt", "1")
        call.write_file("two.txt", "2")
    done = getattr(session, verb)(call, paths=paths)
    assert [(one.path, one.outcome) for one in done.outcomes] == [("one.txt", "restored")]
    assert contents_of(workspace.root) == {"two.txt": b"2"}


def test_what_cannot_be_a_call_is_refused(workspace: TempWorkspace) -> None:
    session = workspace.session()
    write(session, "a", "1")
    for given in (3, 1.5, b"x", ["x"], object()):
        for going in (session.undo, session.restore, session.rewind, session.fork):
            if given == 3 and going in (session.rewind, session.fork):
                continue  # how many messages
            with pytest.raises(MulliganError) as caught:
                going(given)  # type: ignore[arg-type]  # what a program may do all the same
            assert caught.value.code == "invalid_params"
    with pytest.raises(MulliganError) as caught:
        session.undo(paths=3)  # type: ignore[arg-type]  # so too
    assert caught.value.code == "invalid_params"
    assert contents_of(workspace.root) == {"a": b"1"}


def test_a_session_is_rewound_to_a_call_of_its_own(workspace: TempWorkspace) -> None:
    theirs, ours = workspace.session("theirs"), workspace.session("ours")
    with theirs.call() as call:
        call.write_file("a", "1")
    write(ours, "b", "2")
    with pytest.raises(MulliganError) as caught:
        ours.rewind(call)
    assert (caught.value.code, contents_of(workspace.root)) == ("unknown_call", {"a": b"1", "b": b"2"})
    assert theirs.rewind(call).ok
    assert contents_of(workspace.root) == {"b": b"2"}


@pytest.mark.parametrize("verb", ["undo", "restore", "rewind"])
def test_what_another_session_did_is_meant_by_its_whole_id_only(workspace: TempWorkspace, verb: str) -> None:
    theirs, ours = write(workspace.session("theirs"), "a", "1"), workspace.session("ours")
    write(ours, "b", "2")
    for name in (theirs[-12:], theirs) if verb == "rewind" else (theirs[-12:],):
        with pytest.raises(MulliganError) as caught:
            getattr(ours, verb)(name)
        assert (caught.value.code, contents_of(workspace.root)) == ("unknown_call", {"a": b"1", "b": b"2"})
    assert verb == "rewind" or (getattr(ours, verb)(theirs).ok and contents_of(workspace.root) == {"b": b"2"})


def test_no_session_is_rewound_to_what_a_person_did(workspace: TempWorkspace) -> None:
    session = workspace.session()
    write(session, "a", "1")
    (workspace.root / "a").write_text("2")
    write(session, "a", "3")
    outside = next(row["id"] for row in log_view(workspace.open_root) if row["external"])
    with pytest.raises(MulliganError) as caught:
        session.rewind(outside)
    assert (caught.value.code, contents_of(workspace.root)) == ("unknown_call", {"a": b"3"})


def test_without_a_session_a_call_of_this_workspace_is_meant(workspace: TempWorkspace, tmp_path: Path) -> None:
    call = write(workspace.session(), "a", "1")
    (tmp_path / "beside").mkdir()
    beside = OpenRoot(workspace.open_root.ledger, HostDisk(str(tmp_path / "beside")))
    for going in (undo, restore, rewind):
        with pytest.raises(MulliganError) as caught:
            going(beside, call, how=UndoOptions())
        assert (caught.value.code, contents_of(workspace.root)) == ("unknown_call", {"a": b"1"})
    beside.close()
    assert undo(workspace.open_root, call, how=UndoOptions()).ok
    assert contents_of(workspace.root) == {}


@pytest.mark.parametrize("verb", ["undo", "restore", "rewind", "redo"])
def test_inside_a_call_of_its_session_there_is_no_undo_operation(workspace: TempWorkspace, verb: str) -> None:
    session = workspace.session()
    first = write(session, "a", "1")
    if verb == "redo":
        session.undo()
    named = (first,) if verb in ("restore", "rewind") else ()
    before = contents_of(workspace.root)
    with session.call() as call:
        assert getattr(session, verb)(*named, dry_run=True).ok
        with pytest.raises(MulliganError) as caught:
            getattr(session, verb)(*named)
        assert (caught.value.code, call.id in caught.value.message) == ("call_open", True)
        write(workspace.session("other"), "b", "2")
        assert workspace.session("other").undo().ok
    assert contents_of(workspace.root) == before
    assert getattr(session, verb)(*named).ok
