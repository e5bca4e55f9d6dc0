"""Undo, restore, rollback, redo, rewind: what comes back, what stays, and what is said about it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import DurableSession
from mulligan.files.disk import HostDisk
from mulligan.history.log import calls_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CALLS, CallRow
from mulligan.history.undo import UndoResult
from mulligan.store.blobs import EVICTED
from mulligan.store.verify import verify
from mulligan.testing import FaultPlan, Link, contents_of, plant, tree_of
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SessionId
from tests.temp_workspace import TempWorkspace, open_temp_workspace

LINES = [f"line {i}\n" for i in range(12)]
TEXT = "".join(LINES)


def text(**changed: str) -> str:
    """TEXT with some lines replaced: `l3="x"` replaces line 3."""
    return "".join(changed.get(f"l{i}", line.rstrip("\n")) + "\n" for i, line in enumerate(LINES))


def write(session: DurableSession, path: str, content: str | bytes, *, label: str | None = None) -> str:
    with session.call(tool_call_id=label) as call:
        receipt = call.write_file(path, content, create_parents=True)
        assert receipt.ok, receipt
    return call.id


def outcomes(done: UndoResult) -> dict[str, str | tuple[str, str]]:
    return {one.path: one.outcome if one.reason is None else (one.outcome, one.reason) for one in done.outcomes}


def status_of(workspace: TempWorkspace, call: str) -> str | None:
    with workspace.open_root.ledger.store.read() as tx:
        row = tx.get(CALLS, call)
    assert row is not None
    return row.undone_by


class TestUndo:
    @pytest.mark.req("D6.undo_three_way", "D6.undo_keeps_later", "D6.outcome.merged", "D6.outcome.restored")
    @pytest.mark.req("D6.outcome_per_path", "D6.applying_is_a_call")
    def test_an_older_call_is_taken_out_from_under_later_ones(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT})
        first = write(session, "a.txt", text(l1="first"))
        write(session, "a.txt", text(l1="first", l6="second"))
        done = session.undo(first)
        assert outcomes(done) == {"a.txt": "merged"}
        assert contents_of(workspace.root) == {"a.txt": text(l6="second").encode()}
        assert done.ok and status_of(workspace, first) == done.call_id

    def test_every_order_of_undoing_three_calls_ends_where_they_began(self, workspace: TempWorkspace) -> None:
        from itertools import permutations

        for number, order in enumerate(permutations(range(3))):
            path = f"{number}.txt"
            plant(workspace.root, {path: TEXT})
            session = workspace.session(f"s{number}")
            calls, content = [], {}
            for i in range(3):
                content[f"l{3 * i + 1}"] = f"call {i}"
                calls.append(write(session, path, text(**content)))
            for i in order:
                assert session.undo(calls[i]).ok
            assert contents_of(workspace.root)[path] == TEXT.encode()

    @pytest.mark.req("D6.undo_three_way", "H1.restore_compares_first")
    def test_a_persons_edit_elsewhere_in_the_file_stays(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT})
        write(session, "a.txt", text(l1="agent"))
        (workspace.root / "a.txt").write_text(text(l1="agent", l8="person"))
        assert outcomes(session.undo()) == {"a.txt": "merged"}
        assert contents_of(workspace.root) == {"a.txt": text(l8="person").encode()}

    @pytest.mark.req("D6.undo_default_newest", "D6.undo_repeats_further")
    def test_repeating_goes_further_back_until_there_is_nothing(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        seen = []
        for i in range(3):
            write(session, "a.txt", f"{i}")
        for _ in range(3):
            assert session.undo().ok
            seen.append(contents_of(workspace.root).get("a.txt"))
        assert seen == [b"1", b"0", None]
        with pytest.raises(MulliganError) as caught:
            session.undo()
        assert caught.value.code == "nothing_to_undo"

    @pytest.mark.req("D6.applying_is_a_call")
    def test_an_undo_can_be_undone_and_its_call_counts_again(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        first = write(session, "a.txt", "1")
        undone = session.undo().call_id
        assert undone is not None
        again = session.undo(undone)
        assert contents_of(workspace.root) == {"a.txt": b"1"}
        assert status_of(workspace, first) is None
        assert again.call_id is not None and session.undo(again.call_id).ok
        assert contents_of(workspace.root) == {}
        assert status_of(workspace, first) == undone

    def test_what_is_undone_cannot_be_undone_again(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        first = write(session, "a.txt", "1")
        session.undo(first)
        with pytest.raises(MulliganError) as caught:
            session.undo(first)
        assert caught.value.code == "nothing_to_undo"

    @pytest.mark.req("D6.undo_paths", "H21.unknown_paths_reported", "D6.reason.not_captured")
    def test_some_paths_of_a_call(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a", "d/b.txt": "b", "d/c.txt": "c"})
        with session.call() as call:
            for path in ("a.txt", "d/b.txt", "d/c.txt"):
                call.write_file(path, "new")
        done = session.undo(call.id, ["d", "never/seen"])
        assert outcomes(done) == {
            "d/b.txt": "restored",
            "d/c.txt": "restored",
            "never/seen": ("skipped", "not_captured"),
        }
        assert contents_of(workspace.root) == {"a.txt": b"new", "d/b.txt": b"b", "d/c.txt": b"c"}
        assert not done.ok and status_of(workspace, call.id) is None
        assert session.undo(call.id).ok
        assert contents_of(workspace.root) == {"a.txt": b"a", "d/b.txt": b"b", "d/c.txt": b"c"}

    @pytest.mark.req("H9.repeated_call_ids", "D2.repeated_label_newest")
    def test_a_repeated_label_means_the_newest_call_with_it_in_that_session(self, workspace: TempWorkspace) -> None:
        one, two = workspace.session("one"), workspace.session("two")
        for i in range(3):
            write(one, "a.txt", f"{i}", label="call_1")
        write(two, "b.txt", "b", label="call_1")
        assert one.undo("call_1").ok
        assert contents_of(workspace.root) == {"a.txt": b"1", "b.txt": b"b"}

    def test_what_a_person_did_can_be_undone_too(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        write(session, "a.txt", TEXT)
        (workspace.root / "a.txt").write_text(text(l2="person"))
        write(session, "a.txt", text(l2="person", l9="agent"))
        with workspace.open_root.ledger.store.read() as tx:
            external = next(row for row in calls_of(tx, workspace.open_root, None) if row.external)
        assert outcomes(session.undo(external.id)) == {"a.txt": "merged"}
        assert contents_of(workspace.root) == {"a.txt": text(l9="agent").encode()}

    @pytest.mark.req("H4.history_survives_restart")
    def test_undo_works_after_a_restart(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        write(workspace.session(), "a.txt", "1")
        workspace.close()
        again = open_temp_workspace(tmp_path)
        assert again.session().undo().ok
        assert contents_of(again.root) == {}
        again.close()


class TestConflicts:
    @pytest.mark.req("D6.outcome.conflicted", "D6.reason.same_lines", "D6.conflict_not_ok", "D6.conflicted_left_as_is")
    @pytest.mark.req("D6.nobodys_bytes_dropped", "D6.on_conflict_default_merge", "D6.reasons_are_codes")
    def test_the_same_lines_are_left_and_the_rest_is_applied(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT, "b.txt": "b"})
        with session.call() as call:
            call.write_file("a.txt", text(l1="agent"))
            call.write_file("b.txt", "agent")
        (workspace.root / "a.txt").write_text(text(l1="person"))
        stamp = os.stat(workspace.root / "a.txt")
        done = session.undo()
        assert outcomes(done) == {"a.txt": ("conflicted", "same_lines"), "b.txt": "restored"}
        assert not done.ok
        assert contents_of(workspace.root) == {"a.txt": text(l1="person").encode(), "b.txt": b"b"}
        after = os.stat(workspace.root / "a.txt")
        assert (after.st_ino, after.st_mtime_ns) == (stamp.st_ino, stamp.st_mtime_ns)

    @pytest.mark.req("D6.reason.binary", "D6.undo_binary_conflicts")
    def test_binary(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.bin": b"\0old"})
        write(session, "a.bin", b"\0agent")
        (workspace.root / "a.bin").write_bytes(b"\0person")
        assert outcomes(session.undo()) == {"a.bin": ("conflicted", "binary")}

    @pytest.mark.req("D6.reason.deleted_externally")
    def test_deleted_by_another_writer(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a"})
        write(session, "a.txt", "agent")
        os.unlink(workspace.root / "a.txt")
        assert outcomes(session.undo()) == {"a.txt": ("conflicted", "deleted_externally")}
        assert contents_of(workspace.root) == {}

    @pytest.mark.req("D6.reason.type_changed")
    @pytest.mark.parametrize("kind", ["dir", "link", "fifo"])
    def test_became_another_kind(self, workspace: TempWorkspace, kind: str) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a", "b.txt": "b"})
        with session.call() as call:
            call.write_file("a.txt", "agent")
            call.write_file("b.txt", "agent")
        os.unlink(workspace.root / "a.txt")
        make = {"dir": os.mkdir, "link": lambda path: os.symlink("b.txt", path), "fifo": os.mkfifo}
        make[kind](workspace.root / "a.txt")
        assert outcomes(session.undo()) == {"a.txt": ("conflicted", "type_changed"), "b.txt": "restored"}
        assert (workspace.root / "b.txt").read_text() == "b"

    @pytest.mark.req("D6.reason.mode")
    def test_a_mode_set_on_what_the_call_made(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        write(session, "a.txt", "agent")
        os.chmod(workspace.root / "a.txt", 0o600)
        assert outcomes(session.undo()) == {"a.txt": ("conflicted", "mode")}
        assert contents_of(workspace.root) == {"a.txt": b"agent"}

    def test_a_mode_set_on_what_the_call_edited_stays(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a"})
        write(session, "a.txt", "agent")
        os.chmod(workspace.root / "a.txt", 0o600)
        assert outcomes(session.undo()) == {"a.txt": "merged"}
        assert os.stat(workspace.root / "a.txt").st_mode & 0o7777 == 0o600
        assert contents_of(workspace.root) == {"a.txt": b"a"}

    @pytest.mark.req("D5.content_and_mode_apart")
    @pytest.mark.parametrize("verb", ["undo", "restore", "rollback"])
    def test_a_mode_the_call_set_goes_and_the_bytes_a_person_wrote_since_stay(
        self, workspace: TempWorkspace, verb: str
    ) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a"})
        with session.call() as call:
            patch = "diff --git a/a.txt b/a.txt\nold mode 100644\nnew mode 100755\n"
            assert call.apply_patch(patch, patch_format="unified").ok
        (workspace.root / "a.txt").write_text("person")
        assert outcomes(self.go(session, verb, call.id, "merge")) == {"a.txt": "merged"}
        assert os.stat(workspace.root / "a.txt").st_mode & 0o7777 == 0o644
        assert contents_of(workspace.root) == {"a.txt": b"person"}

    def test_a_directory_that_another_writer_removed_is_not_made_again(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"d/x.txt": "x", "a.txt": "a"})
        with session.call() as call:
            call.delete("d/x.txt")
            call.write_file("a.txt", "agent")
        os.rmdir(workspace.root / "d")
        done = session.undo()
        assert outcomes(done) == {"a.txt": "restored", "d/x.txt": ("conflicted", "deleted_externally")}
        assert contents_of(workspace.root) == {"a.txt": b"a"}

    @pytest.mark.req("D6.on_conflict.overwrite")
    def test_overwrite_makes_it_again(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"d/e/x.txt": "x"})
        write(session, "d/e/x.txt", "agent")
        shutil.rmtree(workspace.root / "d")
        done = session.undo(on_conflict="overwrite")
        assert done.ok and outcomes(done) == {"d": "restored", "d/e": "restored", "d/e/x.txt": "restored"}
        assert contents_of(workspace.root) == {"d/e/x.txt": b"x"}

    def test_a_directory_on_the_way_that_became_a_link_is_not_followed(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"d/x.txt": "x", "other/x.txt": "other"})
        write(session, "d/x.txt", "agent")
        os.rename(workspace.root / "d", workspace.root / "moved")
        os.symlink("other", workspace.root / "d")
        assert outcomes(session.undo()) == {"d/x.txt": ("conflicted", "type_changed")}
        assert contents_of(workspace.root)["other/x.txt"] == b"other"

    def test_a_directory_of_the_call_that_holds_a_persons_file_stays(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        write(session, "d/sub/x.txt", "agent")
        plant(workspace.root, {"d/mine.txt": "person"})
        done = session.undo()
        assert outcomes(done) == {"d": "skipped", "d/sub": "restored", "d/sub/x.txt": "restored"}
        assert done.ok
        assert contents_of(workspace.root) == {"d/mine.txt": b"person"}

    def test_a_directory_in_the_way_of_a_file_stays_while_another_writers_file_is_in_it(
        self, workspace: TempWorkspace
    ) -> None:
        session = workspace.session()
        plant(workspace.root, {"a": "a file"})
        with session.call() as call:
            call.delete("a")
            call.write_file("a/x.txt", "agent", create_parents=True)
        plant(workspace.root, {"a/mine.txt": "person"})
        assert outcomes(session.undo()) == {"a": ("conflicted", "type_changed"), "a/x.txt": "restored"}
        assert contents_of(workspace.root) == {"a/mine.txt": b"person"}

    @pytest.mark.req("D6.on_conflict.refuse", "D6.refuse_applies_nothing", "D6.on_conflict.everywhere")
    @pytest.mark.parametrize("verb", ["undo", "restore", "rollback", "rewind"])
    def test_refuse_applies_nothing(self, workspace: TempWorkspace, verb: str) -> None:
        done, _, before = self.conflicted(workspace, verb, "refuse")
        assert (done.ok, done.call_id) == (False, None)
        assert contents_of(workspace.root) == before
        assert outcomes(done) == {"a.txt": ("conflicted", "same_lines"), "b.txt": "skipped"}

    @pytest.mark.req("D6.on_conflict.overwrite", "D6.overwrote_external", "D6.overwritten_is_rescued")
    @pytest.mark.parametrize("verb", ["undo", "restore", "rollback", "rewind"])
    def test_overwrite_takes_the_old_bytes_and_keeps_the_present_ones(
        self, workspace: TempWorkspace, verb: str
    ) -> None:
        done, session, before = self.conflicted(workspace, verb, "overwrite")
        assert done.ok and list(done.overwrote_external) == ["a.txt"]
        assert contents_of(workspace.root) == {"a.txt": TEXT.encode(), "b.txt": b"b"}
        assert done.call_id is not None and session.undo(done.call_id).ok
        assert contents_of(workspace.root) == before

    def test_what_overwriting_has_to_leave_alone_it_does_not_claim_to_have_overwritten(
        self, workspace: TempWorkspace
    ) -> None:
        session = workspace.session()
        plant(workspace.root, {"d/b": "0", "e/c": "0", "x": "0"})
        with session.call() as call:
            assert call.write_file("d/b", "1").ok and call.write_file("x", "1").ok
        (workspace.root / "d").rename(workspace.root / "kept")
        (workspace.root / "d").symlink_to("e")
        done = session.undo(on_conflict="overwrite")
        assert outcomes(done) == {"d/b": ("conflicted", "type_changed"), "x": "restored"}
        assert done.overwrote_external == ()

    @pytest.mark.req("D6.dry_run", "D6.plan_first")
    @pytest.mark.parametrize("verb", ["undo", "restore", "rollback", "rewind", "redo"])
    def test_a_dry_run_says_it_all_and_touches_nothing(self, workspace: TempWorkspace, verb: str) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a"})
        call = write(session, "a.txt", "agent")
        if verb == "redo":
            session.undo()
        before, rows = tree_of(workspace.root, times=True), self.rows(workspace)
        done = self.go(session, verb, call, "merge", dry_run=True)
        assert (done.ok, done.call_id, outcomes(done)) == (True, None, {"a.txt": "restored"})
        assert (tree_of(workspace.root, times=True), self.rows(workspace)) == (before, rows)

    def rows(self, workspace: TempWorkspace) -> int:
        with workspace.open_root.ledger.store.read() as tx:
            return tx.count(CALLS)

    def conflicted(
        self, workspace: TempWorkspace, verb: str, mode: str
    ) -> tuple[UndoResult, DurableSession, dict[str, bytes]]:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT, "b.txt": "b"})
        with session.call() as call:
            call.write_file("a.txt", text(l1="agent"))
            call.write_file("b.txt", "agent")
        (workspace.root / "a.txt").write_text(text(l1="person"))
        before = contents_of(workspace.root)
        return self.go(session, verb, call.id, mode), session, before

    def go(self, session: DurableSession, verb: str, call: str, mode: str, *, dry_run: bool = False) -> UndoResult:
        named = (call,) if verb in ("restore", "rewind") else ()
        done = getattr(session, verb)(*named, on_conflict=mode, dry_run=dry_run)
        assert isinstance(done, UndoResult)
        return done

    @pytest.mark.req("D6.reason.evicted")
    def test_a_body_that_was_dropped_is_said_and_its_path_left(self, workspace: TempWorkspace) -> None:
        from dataclasses import replace

        from mulligan.store.blobs import BLOBS, BODIES
        from mulligan.values.digest import digest_of, raw_digest

        session = workspace.session()
        plant(workspace.root, {"a.txt": "a", "b.txt": "b"})
        with session.call() as call:
            call.write_file("a.txt", "agent")
            call.write_file("b.txt", "agent")
        raw = raw_digest(digest_of(b"a"))
        ledger = workspace.open_root.ledger
        with ledger.store.write() as tx:
            row = tx.get(BLOBS, raw)
            assert row is not None
            tx.put(BLOBS, replace(row, place=EVICTED, stored=0))
            tx.delete(BODIES, raw)
            body = {"call": call.id, "digests": [digest_of(b"a")]}
            ledger.journal.append(tx, "s:default", "call.evicted", body, at=ledger.now())
        done = session.undo(call.id)
        assert outcomes(done) == {"a.txt": ("skipped", "evicted"), "b.txt": "restored"}
        assert not done.ok and contents_of(workspace.root) == {"a.txt": b"agent", "b.txt": b"b"}


def test_what_was_changed_later_is_restored_first_whichever_call_began_first(workspace: TempWorkspace) -> None:
    plant(workspace.root, {"a.txt": "0"})
    with workspace.session("older").call() as older:
        younger = write(workspace.session("younger"), "a.txt", "1")
        assert older.write_file("a.txt", "2").ok
    assert older.id < younger
    assert outcomes(workspace.session("younger").restore(younger)) == {"a.txt": "restored"}
    assert contents_of(workspace.root) == {"a.txt": b"0"}


class TestFailingDisk:
    @pytest.mark.req("D6.failed_puts_all_back", "D6.outcome.failed", "D6.reason.io_error", "H6.rollback_atomic")
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    def test_an_undo_operation_happens_whole_or_not_at_all(self, tmp_path: Path, number: int) -> None:
        plan = self.prepared(tmp_path / "dry", FaultPlan())[1]
        for at in range(1, len(plan.reached) + 1):
            workspace, plan = self.prepared(tmp_path / str(at), FaultPlan().fail(number, at=at))
            changed, done = contents_of(workspace.root), workspace.session().undo()
            moved = {one.outcome for one in done.outcomes}
            if done.ok:
                assert contents_of(workspace.root) == {"a.txt": b"a", "d/x": b"x", "d/y": b"y"}, f"step {at}"
            else:
                assert moved == {"failed"} and done.call_id is None
                assert contents_of(workspace.root) == changed, f"step {at}"
                assert workspace.session().undo().ok
                assert contents_of(workspace.root) == {"a.txt": b"a", "d/x": b"x", "d/y": b"y"}
            assert not [path for path in tree_of(workspace.root) if ".mulligan" in path]
            workspace.close()

    def prepared(self, base: Path, plan: FaultPlan) -> tuple[TempWorkspace, FaultPlan]:
        workspace = open_temp_workspace(base)
        plant(workspace.root, {"a.txt": "a", "d/x": "x", "d/y": "y"})
        with workspace.session().call() as call:
            call.write_file("a.txt", "agent")
            call.delete("d", recursive=True)
            call.write_file("n/new.txt", "new", create_parents=True)
        workspace.close()
        workspace = open_temp_workspace(base, steps=plan)
        if not plan._rules:
            assert workspace.session().undo().ok
        return workspace, plan


class TestRestore:
    @pytest.mark.req("D6.restore")
    def test_preimages_come_back_from_under_later_calls_and_what_was_absent_goes(
        self, workspace: TempWorkspace
    ) -> None:
        session, other = workspace.session("one"), workspace.session("two")
        plant(workspace.root, {"a.txt": "a", "b.txt": "b"})
        with session.call() as call:
            call.write_file("a.txt", "1")
            call.write_file("new.txt", "1")
        write(other, "a.txt", "2")
        write(other, "b.txt", "2")
        write(session, "new.txt", "3")
        done = session.restore(call.id)
        assert outcomes(done) == {"a.txt": "restored", "new.txt": "restored"}
        assert contents_of(workspace.root) == {"a.txt": b"a", "b.txt": b"2"}
        assert session.redo().ok
        assert contents_of(workspace.root) == {"a.txt": b"2", "b.txt": b"2", "new.txt": b"3"}

    @pytest.mark.req("D6.restore_paths")
    def test_some_of_its_paths(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": "a", "b.txt": "b"})
        with session.call() as call:
            call.write_file("a.txt", "1")
            call.write_file("b.txt", "1")
        done = session.restore(call.id, ["b.txt", "no.txt"])
        assert outcomes(done) == {"b.txt": "restored", "no.txt": ("skipped", "not_captured")}
        assert contents_of(workspace.root) == {"a.txt": b"1", "b.txt": b"b"}

    def test_a_persons_lines_survive_a_restore_through_later_calls(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT})
        first = write(session, "a.txt", text(l1="first"))
        (workspace.root / "a.txt").write_text(text(l1="first", l5="person"))
        write(session, "a.txt", text(l1="first", l5="person", l9="second"))
        assert outcomes(session.restore(first)) == {"a.txt": "merged"}
        assert contents_of(workspace.root) == {"a.txt": text(l5="person").encode()}

    def test_later_calls_that_were_undone_do_not_count_twice(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": TEXT})
        first = write(session, "a.txt", text(l1="first"))
        second = write(session, "a.txt", text(l1="first", l6="second"))
        session.undo(second)
        assert session.restore(first).ok
        assert contents_of(workspace.root) == {"a.txt": TEXT.encode()}
        assert session.redo().ok
        assert contents_of(workspace.root) == {"a.txt": text(l1="first").encode()}
        assert (status_of(workspace, first), status_of(workspace, second) is None) == (None, False)


class TestRoots:
    def test_nested_and_symlinked_roots_are_one_workspace(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        plant(workspace.root, {"sub/a.txt": TEXT, "link": Link("sub")})
        inner = OpenRoot(workspace.open_root.ledger, HostDisk(str(workspace.root / "link")))
        assert inner.root.workspace == workspace.open_root.root.workspace
        nested = DurableSession(inner, SessionId("inner"), Boundary(str(workspace.root / "sub")))
        first = write(nested, "a.txt", text(l1="inner"))
        second = write(workspace.session("outer"), "sub/a.txt", text(l1="inner", l8="outer"))
        assert [row.external for row in self.rows(workspace.open_root)] == [0, 0]
        assert workspace.session("inner").undo(first).ok
        assert contents_of(workspace.root)["sub/a.txt"] == text(l8="outer").encode()
        assert nested.restore(first).ok
        assert contents_of(workspace.root)["sub/a.txt"] == TEXT.encode()
        assert status_of(workspace, second) is not None
        inner.close()
        workspace.close()

    def test_a_root_opened_around_two_others_joins_their_histories(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        plant(tmp_path / "work", {"one/a.txt": "a", "two/b.txt": "b"})
        ledger = workspace.open_root.ledger
        workspace.open_root.close()
        open_roots = [OpenRoot(ledger, HostDisk(str(tmp_path / "work" / name))) for name in ("one", "two")]
        sessions = [
            DurableSession(open_root, SessionId(f"s{i}"), Boundary("/")) for i, open_root in enumerate(open_roots)
        ]
        for i in range(5):
            write(sessions[1], "b.txt", f"b{i}")
        last = write(sessions[0], "a.txt", "a0")
        around = OpenRoot(ledger, HostDisk(str(tmp_path)))
        write(sessions[0], "a.txt", "a1")
        write(sessions[1], "b.txt", "b5")
        told = self.rows(around)
        assert [row.external for row in told] == [0] * 8
        assert DurableSession(around, SessionId("s0"), Boundary("/")).undo(last, on_conflict="overwrite").ok
        assert contents_of(tmp_path / "work") == {"one/a.txt": b"a", "two/b.txt": b"b5"}
        assert list(verify(ledger.store, SCHEMA)) == []
        for open_root in (*open_roots, around):
            open_root.close()
        ledger.store.close()

    def test_a_root_that_was_moved_keeps_its_history_and_one_with_its_old_inode_does_not(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        write(workspace.session(), "a.txt", "1")
        workspace.open_root.close()
        os.rename(workspace.root, tmp_path / "moved")
        moved = OpenRoot(workspace.open_root.ledger, HostDisk(str(tmp_path / "moved")))
        assert moved.root.id == workspace.open_root.root.id
        moved.close()
        shutil.rmtree(tmp_path / "moved")
        for number in range(20):
            os.mkdir(tmp_path / f"new{number}")
            fresh = OpenRoot(workspace.open_root.ledger, HostDisk(str(tmp_path / f"new{number}")))
            assert fresh.root.id != moved.root.id
            fresh.close()
        workspace.open_root.ledger.store.close()

    def rows(self, open_root: OpenRoot) -> list[CallRow]:
        with open_root.ledger.store.read() as tx:
            return list(calls_of(tx, open_root, None))
