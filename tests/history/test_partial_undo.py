"""What a way back left of a call, because of a conflict or by request, is not lost to going back."""

from __future__ import annotations

import pytest

from benches import Bench
from history.test_going_back import outcomes, status_of
from mulligan.effects.session import Session
from mulligan.testing import contents_of, plant
from mulligan.values.faults import MulliganError

LINES = [f"line {i}\n" for i in range(12)]
TEXT = "".join(LINES)


def text(**changed: str) -> str:
    """TEXT with some lines replaced: `l3="x"` replaces line 3."""
    return "".join(changed.get(f"l{i}", line.rstrip("\n")) + "\n" for i, line in enumerate(LINES))


def write(session: Session, path: str, content: str) -> str:
    with session.call() as call:
        receipt = call.write_file(path, content)
        assert receipt.ok, receipt
    return call.id


class TestLeftovers:
    """What a conflict kept from going back is not lost to going back."""

    def undone_in_part(self, bench: Bench) -> tuple[Session, str, str]:
        """A call of which one path is back and the other is somebody's; and the way back that did it."""
        session = bench.session()
        plant(bench.root, {"a.txt": TEXT, "b.txt": "b"})
        write(session, "older.txt", "older")
        with session.call() as call:
            call.write_file("a.txt", text(l1="agent"))
            call.write_file("b.txt", "agent")
        (bench.root / "a.txt").write_text(text(l1="person"))
        done = session.undo()
        assert outcomes(done) == {"a.txt": ("conflicted", "same_lines"), "b.txt": "restored"}
        assert done.call_id is not None and status_of(bench, call.id) is None
        return session, call.id, done.call_id

    @pytest.mark.parametrize("paths", [None, ["a.txt"]])
    def test_it_is_taken_back_once_it_may_be(self, bench: Bench, paths: list[str] | None) -> None:
        session, call, first = self.undone_in_part(bench)
        assert outcomes(session.undo(call, paths)) == {"a.txt": ("conflicted", "same_lines")}
        done = session.undo(call, paths, on_conflict="overwrite")
        assert (outcomes(done), done.overwrote_external) == ({"a.txt": "restored"}, ("a.txt",))
        assert contents_of(bench.root) == {"a.txt": TEXT.encode(), "b.txt": b"b", "older.txt": b"older"}
        assert status_of(bench, call) == done.call_id
        assert session.redo().ok
        assert (status_of(bench, call), status_of(bench, first)) == (None, None)
        assert (bench.root / "a.txt").read_text() == text(l1="person")
        assert session.redo().ok
        assert status_of(bench, call) is None and (bench.root / "b.txt").read_text() == "agent"

    @pytest.mark.parametrize("way", ["undo", "rollback"])
    def test_whoever_names_nothing_goes_on_to_what_is_older(self, bench: Bench, way: str) -> None:
        session = bench.session()
        plant(bench.root, {"a.txt": TEXT})
        with session.turn("one"):
            write(session, "older.txt", "older")
        with session.turn("two"):
            newer = write(session, "a.txt", text(l1="agent"))
        (bench.root / "a.txt").write_text(text(l1="person"))
        assert outcomes(getattr(session, way)()) == {"a.txt": ("conflicted", "same_lines")}
        assert outcomes(getattr(session, way)()) == {"older.txt": "restored"}
        assert outcomes(session.undo(newer, on_conflict="overwrite")) == {"a.txt": "restored"}

    def test_what_one_way_back_holds_another_does_not_bring_back(self, bench: Bench) -> None:
        session = bench.session()
        plant(bench.root, {"a.txt": "0", "b.txt": "0"})
        older, newer = write(session, "b.txt", "1"), write(session, "a.txt", "1")
        (bench.root / "a.txt").write_text("0")
        held = session.undo(newer).call_id
        assert session.rewind(older).ok and session.redo().ok
        assert (status_of(bench, newer), status_of(bench, older)) == (held, None)
        (bench.root / "a.txt").write_text("1")
        assert outcomes(session.undo()) == {"b.txt": "restored"}

    def test_a_way_back_that_had_nothing_to_move_can_be_undone(self, bench: Bench) -> None:
        session = bench.session()
        plant(bench.root, {"a.txt": "0"})
        call = write(session, "a.txt", "1")
        (bench.root / "a.txt").write_text("0")
        rescue = session.undo(call).to_json()["rescue"]
        assert status_of(bench, call) == rescue
        undone = session.undo(rescue)
        assert undone.ok and undone.call_id is not None and status_of(bench, call) is None

    def test_it_merges_once_nobody_is_in_the_way_any_more(self, bench: Bench) -> None:
        session, call, _ = self.undone_in_part(bench)
        (bench.root / "a.txt").write_text(text(l1="agent", l8="person"))
        assert outcomes(session.undo(call)) == {"a.txt": "merged"}
        assert (bench.root / "a.txt").read_text() == text(l8="person")

    def test_what_is_back_already_is_not_taken_back_twice(self, bench: Bench) -> None:
        session, call, _ = self.undone_in_part(bench)
        write(session, "b.txt", "later")
        assert session.undo(call, ["b.txt"]).outcomes == ()
        assert outcomes(session.undo(call, on_conflict="overwrite")) == {"a.txt": "restored"}
        assert (bench.root / "b.txt").read_text() == "later"

    @pytest.mark.req("D6.undo_repeats_further")
    @pytest.mark.parametrize("verb", ["undo", "rollback"])
    def test_repeating_goes_on_to_older_work_and_overwriting_comes_back_to_it(self, bench: Bench, verb: str) -> None:
        session, call, _ = self.undone_in_part(bench)
        assert outcomes(getattr(session, verb)()) == {"older.txt": "restored"}
        with pytest.raises(MulliganError) as caught:
            getattr(session, verb)()
        assert caught.value.code == "nothing_to_undo"
        assert outcomes(getattr(session, verb)(on_conflict="overwrite")) == {"a.txt": "restored"}
        assert contents_of(bench.root) == {"a.txt": TEXT.encode(), "b.txt": b"b"}
        assert status_of(bench, call) is not None

    def test_a_rollback_in_part_leaves_the_rest_to_the_next_who_overwrites(self, bench: Bench) -> None:
        session = bench.session()
        plant(bench.root, {"a.txt": TEXT})
        with session.turn():
            write(session, "a.txt", text(l1="agent"))
            write(session, "b.txt", "agent")
        (bench.root / "a.txt").write_text(text(l1="person"))
        assert not session.rollback().ok
        assert contents_of(bench.root) == {"a.txt": text(l1="person").encode()}
        assert session.rollback(on_conflict="overwrite").ok
        assert contents_of(bench.root) == {"a.txt": TEXT.encode()}
        for _ in range(2):
            session.redo()
        assert contents_of(bench.root) == {"a.txt": text(l1="person").encode(), "b.txt": b"agent"}
