"""What a way back left of a call, because of a conflict or by request, is not lost to going back."""

from __future__ import annotations

import pytest

from mulligan.effects.session import DurableSession
from mulligan.testing import contents_of, plant
from mulligan.values.errors import MulliganError
from tests.history.test_undo import outcomes, status_of
from tests.temp_workspace import TempWorkspace

LINES = [f"line {i}\n" for i in range(12)]
TEXT = "".join(LINES)


def text(**changed: str) -> str:
    """TEXT with some lines replaced: `l3="x"` replaces line 3."""
    return "".join(changed.get(f"l{i}", line.rstrip("\n")) + "\n" for i, line in enumerate(LINES))


def write(session: DurableSession, path: str, content: str) -> str:
    with session.call() as call:
        receipt = call.write_file(path, content)
        assert receipt.ok, receipt
    return call.id


class TestLeftovers:
    """What a conflict kept from going back is not lost to going back."""

    def undone_in_part(self, workspace: TempWorkspace) -> tuple[DurableSession, str, str]:
        """A call of which one path is back and the other is somebody's; and the way back that did it."""
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT, "b.txt": "b"})
        write(session, "older.txt", "older")
        with session.call() as call:
            call.write_file("a.txt", text(l1="agent"))
            call.write_file("b.txt", "agent")
        (workspace.root / "a.txt").write_text(text(l1="person"))
        done = session.undo()
        assert outcomes(done) == {"a.txt": ("conflicted", "same_lines"), "b.txt": "restored"}
        assert done.call_id is not None and status_of(workspace, call.id) is None
        return session, call.id, done.call_id

    @pytest.mark.parametrize("paths", [None, ["a.txt"]])
    def test_it_is_undone_once_it_may_be(self, workspace: TempWorkspace, paths: list[str] | None) -> None:
        session, call, first = self.undone_in_part(workspace)
        assert outcomes(session.undo(call, paths)) == {"a.txt": ("conflicted", "same_lines")}
        done = session.undo(call, paths, on_conflict="overwrite")
        assert (outcomes(done), done.overwrote_external) == ({"a.txt": "restored"}, ("a.txt",))
        assert contents_of(workspace.root) == {"a.txt": TEXT.encode(), "b.txt": b"b", "older.txt": b"older"}
        assert status_of(workspace, call) == done.call_id
        assert session.redo().ok
        assert (status_of(workspace, call), status_of(workspace, first)) == (None, None)
        assert (workspace.root / "a.txt").read_text() == text(l1="person")
        assert session.redo().ok
        assert status_of(workspace, call) is None and (workspace.root / "b.txt").read_text() == "agent"

    @pytest.mark.parametrize("way", ["undo", "rollback"])
    def test_without_a_call_named_it_undoes_the_next_older_one(self, workspace: TempWorkspace, way: str) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT})
        with session.turn("one"):
            write(session, "older.txt", "older")
        with session.turn("two"):
            newer = write(session, "a.txt", text(l1="agent"))
        (workspace.root / "a.txt").write_text(text(l1="person"))
        assert outcomes(getattr(session, way)()) == {"a.txt": ("conflicted", "same_lines")}
        assert outcomes(getattr(session, way)()) == {"older.txt": "restored"}
        assert outcomes(session.undo(newer, on_conflict="overwrite")) == {"a.txt": "restored"}

    def test_what_one_undo_operation_holds_another_does_not_bring_back(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "0", "b.txt": "0"})
        older, newer = write(session, "b.txt", "1"), write(session, "a.txt", "1")
        (workspace.root / "a.txt").write_text("0")
        held = session.undo(newer).call_id
        assert session.rewind(older).ok and session.redo().ok
        assert (status_of(workspace, newer), status_of(workspace, older)) == (held, None)
        (workspace.root / "a.txt").write_text("1")
        assert outcomes(session.undo()) == {"b.txt": "restored"}

    def test_an_undo_operation_that_had_nothing_to_move_can_be_undone(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "0"})
        call = write(session, "a.txt", "1")
        (workspace.root / "a.txt").write_text("0")
        rescue = session.undo(call).to_json()["rescue"]
        assert status_of(workspace, call) == rescue
        undone = session.undo(rescue)
        assert undone.ok and undone.call_id is not None and status_of(workspace, call) is None

    def test_it_merges_once_the_conflict_is_gone(self, workspace: TempWorkspace) -> None:
        session, call, _ = self.undone_in_part(workspace)
        (workspace.root / "a.txt").write_text(text(l1="agent", l8="person"))
        assert outcomes(session.undo(call)) == {"a.txt": "merged"}
        assert (workspace.root / "a.txt").read_text() == text(l8="person")

    def test_what_is_back_already_is_not_undone_twice(self, workspace: TempWorkspace) -> None:
        session, call, _ = self.undone_in_part(workspace)
        write(session, "b.txt", "later")
        assert session.undo(call, ["b.txt"]).outcomes == ()
        assert outcomes(session.undo(call, on_conflict="overwrite")) == {"a.txt": "restored"}
        assert (workspace.root / "b.txt").read_text() == "later"

    @pytest.mark.req("D6.undo_repeats_further")
    @pytest.mark.parametrize("verb", ["undo", "rollback"])
    def test_repeating_goes_on_to_older_work_and_overwriting_comes_back_to_it(
        self, workspace: TempWorkspace, verb: str
    ) -> None:
        session, call, _ = self.undone_in_part(workspace)
        assert outcomes(getattr(session, verb)()) == {"older.txt": "restored"}
        with pytest.raises(MulliganError) as caught:
            getattr(session, verb)()
        assert caught.value.code == "nothing_to_undo"
        assert outcomes(getattr(session, verb)(on_conflict="overwrite")) == {"a.txt": "restored"}
        assert contents_of(workspace.root) == {"a.txt": TEXT.encode(), "b.txt": b"b"}
        assert status_of(workspace, call) is not None

    def test_a_rollback_in_part_leaves_the_rest_to_the_next_who_overwrites(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT})
        with session.turn():
            write(session, "a.txt", text(l1="agent"))
            write(session, "b.txt", "agent")
        (workspace.root / "a.txt").write_text(text(l1="person"))
        assert not session.rollback().ok
        assert contents_of(workspace.root) == {"a.txt": text(l1="person").encode()}
        assert session.rollback(on_conflict="overwrite").ok
        assert contents_of(workspace.root) == {"a.txt": TEXT.encode()}
        for _ in range(2):
            session.redo()
        assert contents_of(workspace.root) == {"a.txt": text(l1="person").encode(), "b.txt": b"agent"}
