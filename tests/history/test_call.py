"""The call as a transaction: every way in, every way out, and what is on record afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mulligan import VisibilityExpansionRequired
from mulligan.effects.handle import CallHandle
from mulligan.files.disk import DRAFT_PREFIX
from mulligan.history.log import calls_of
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import OPEN, TOUCHES, CallRow, changes_of
from mulligan.store.blobs import BLOBS
from mulligan.store.journal import Record, records_of
from mulligan.store.protocol import CLAIMS
from mulligan.store.verify import verify
from mulligan.testing import FaultPlan, contents_of, plant, tree_of
from mulligan.values.canonical import decode
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, DirEntry, FileEntry, kind_of_change
from mulligan.values.errors import MulliganError, PromptEvaluationError
from mulligan.values.paths import RepoPath
from tests.temp_workspace import TempWorkspace, open_temp_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path)
    yield workspace
    assert list(verify(workspace.open_root.ledger.store, SCHEMA)) == []
    assert_no_litter(workspace)
    workspace.close()


def assert_no_litter(workspace: TempWorkspace) -> None:
    """No draft on disk, and nothing in the store that only an open call needs."""
    assert [path for path in tree_of(workspace.root) if Path(path).name.startswith(DRAFT_PREFIX.decode())] == []
    with workspace.open_root.ledger.store.read() as tx:
        assert (tx.select(OPEN), tx.select(TOUCHES), tx.select(CLAIMS)) == ([], [], [])


def history(workspace: TempWorkspace) -> list[CallRow]:
    with workspace.open_root.ledger.store.read() as tx:
        return list(reversed(list(calls_of(tx, workspace.open_root, None))))


def records(workspace: TempWorkspace, session: str = "default") -> list[Record]:
    with workspace.open_root.ledger.store.read() as tx:
        return [record for record in records_of(tx, f"s:{session}") if record.kind != "session.opened"]


def steps_of_disk(workspace: TempWorkspace) -> list[tuple[str, str]]:
    """(path, kind) of every change anybody made, in order, with a mark for those that were not ours."""
    told = []
    with workspace.open_root.ledger.store.read() as tx:
        for row in sorted(history(workspace), key=lambda row: row.wseq or 0):
            told += [(row.tool or "external", f"{one.path} {kind_of_change(one)}") for one in changes_of(tx, row.id)]
    return told


class TestOpening:
    @pytest.mark.req("D5.open_lazily", "D5.read_only_no_preimage")
    def test_a_call_that_only_reads_is_on_record_only_at_its_end_and_takes_no_preimage(
        self, workspace: TempWorkspace
    ) -> None:
        plant(workspace.root, {"a.txt": "hello\n"})
        with workspace.session().call() as call:
            assert call.read_file("a.txt").ok
            assert history(workspace) == []
        assert [record.kind for record in records(workspace)] == ["call.begun", "call.ended"]
        with workspace.open_root.ledger.store.read() as tx:
            assert tx.count(BLOBS) == 0

    def test_a_call_that_does_nothing_still_has_its_two_records(self, workspace: TempWorkspace) -> None:
        with workspace.session().call("nothing"):
            pass
        (row,) = history(workspace)
        assert (row.status, row.tool, row.wseq) == ("committed", "nothing", None)

    @pytest.mark.req("D5.preimage_before_mutation", "D5.intended_digest_recorded", "D5.temporary_name_recorded")
    @pytest.mark.req("D5.claim_on_first_touch", "D13.intent_before_effect")
    def test_everything_needed_for_an_abort_is_in_the_store_before_the_first_step_on_disk(self, tmp_path: Path) -> None:
        told: list[dict[str, Any]] = []
        here: list[TempWorkspace] = []

        def look(step: str, path: RepoPath) -> None:
            with here[0].open_root.ledger.store.read() as tx:
                (touch,) = tx.select(TOUCHES)
                before = decode(touch.before)
                told.append(
                    {
                        "before": here[0].open_root.ledger.blobs.read_in(tx, before["digest"]),
                        "intended": [entry["digest"] for entry in decode(touch.intended)],
                        "drafts": decode(touch.drafts),
                        "claimed": [claim.place for claim in tx.select(CLAIMS)],
                    }
                )

        workspace = open_temp_workspace(tmp_path, steps=FaultPlan().act(look))
        here.append(workspace)
        plant(workspace.root, {"a.txt": "old"})
        with workspace.session().call() as call:
            call.write_file("a.txt", "one")
            call.write_file("a.txt", "two")
        (first,) = told
        draft = f".mulligan-{call.id[-12:]}-0"
        place = os.fsencode(os.path.realpath(workspace.root / "a.txt"))
        expected = {"before": b"old", "intended": [digest_of(b"one")], "drafts": [draft], "claimed": [place]}
        assert first == expected
        workspace.close()

    @pytest.mark.req("D5.intended_digest_recorded")
    def test_every_digest_a_call_ever_intended_is_kept(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            for content in ("one", "two", "one", "three"):
                call.write_file("a.txt", content)
            with workspace.open_root.ledger.store.read() as tx:
                (touch,) = tx.select(TOUCHES)
        intended = [entry["digest"] for entry in decode(touch.intended)]
        assert intended == [digest_of(content) for content in (b"one", b"two", b"three")]

    @pytest.mark.req("D5.capture_failure_refuses")
    def test_what_cannot_be_captured_is_not_changed(self, workspace: TempWorkspace) -> None:
        os.mkfifo(workspace.root / "pipe")
        with workspace.session().call() as call:
            receipt = call.write_file("pipe", "text")
            assert (receipt.ok, receipt.error_code) == (False, "special_file")
            refused = call.delete("pipe")
            assert (refused.ok, refused.error_code) == (False, "special_file")
        assert os.listdir(workspace.root) == ["pipe"]
        os.unlink(workspace.root / "pipe")


class Leaving(Exception):
    """What a tool raises."""


def leave_by_exception(call: CallHandle) -> None:
    raise Leaving


def leave_by_interrupt(call: CallHandle) -> None:
    raise KeyboardInterrupt


def leave_by_cancellation(call: CallHandle) -> None:
    raise asyncio.CancelledError


def leave_by_exit(call: CallHandle) -> None:
    raise SystemExit(3)


def leave_by_wishing(call: CallHandle) -> None:
    raise VisibilityExpansionRequired("more", requested_overrides={"section": "full"})


def leave_by_failing(call: CallHandle) -> None:
    call.fail("the tool said so")


BAD_ENDS = [
    pytest.param(leave_by_exception, Leaving, "Leaving", id="exception"),
    pytest.param(leave_by_interrupt, KeyboardInterrupt, "KeyboardInterrupt", id="interrupt"),
    pytest.param(leave_by_cancellation, asyncio.CancelledError, "CancelledError", id="cancellation"),
    pytest.param(leave_by_exit, SystemExit, "SystemExit", id="exit"),
    pytest.param(leave_by_wishing, VisibilityExpansionRequired, "visibility_expansion_required", id="wish"),
    pytest.param(leave_by_failing, None, "the tool said so", id="fail"),
]


class TestEnding:
    @pytest.mark.req("D5.abort_on_exception", "D5.abort_on_keyboard_interrupt", "D5.abort_on_cancellation")
    @pytest.mark.req("D5.abort_on_success_false", "D12.fail_aborts", "D12.with_reraises", "W15.cancel_and_interrupt")
    @pytest.mark.req("D5.one_begin_one_end", "S4.principle.call_is_atomic", "D12.call_signature")
    @pytest.mark.req("D1.failed_calls_leave_no_trace", "D5.abort_on_visibility_expansion")
    @pytest.mark.parametrize(("leave", "raised", "reason"), BAD_ENDS)
    def test_every_bad_end_leaves_no_trace_on_disk_and_one_on_record(
        self, workspace: TempWorkspace, leave: Any, raised: type[BaseException] | None, reason: str
    ) -> None:
        plant(workspace.root, {"a.txt": "a", "b.txt": "b", "d/c.txt": "c", "d/empty": None})
        before = tree_of(workspace.root)
        files = {path: os.stat(workspace.root / path).st_mtime_ns for path in ("a.txt", "b.txt", "d/c.txt")}
        expected: AbstractContextManager[object] = nullcontext() if raised is None else pytest.raises(raised)
        with expected, workspace.session().call() as call:
            call.write_file("a.txt", "changed")
            call.write_file("new/deep/x.txt", "x", create_parents=True)
            call.delete("d", recursive=True)
            call.move("b.txt", "moved.txt")
            call.write_file("d", "a file where a directory was")
            leave(call)
        assert tree_of(workspace.root) == before
        assert {path: os.stat(workspace.root / path).st_mtime_ns for path in files} == files
        (row,) = history(workspace)
        assert (row.status, row.reason, row.wseq) == ("aborted", reason, None)
        assert Counter(record.kind for record in records(workspace)) == {"call.begun": 1, "call.ended": 1}

    @pytest.mark.req("D5.abort_on_deadline")
    def test_a_deadline_aborts_at_the_next_effect_and_at_the_end(self, workspace: TempWorkspace) -> None:
        past = datetime.now(UTC) - timedelta(seconds=1)
        for act in (lambda call: call.read_file("a.txt"), lambda call: None):
            plant(workspace.root, {"a.txt": "a"})
            call = workspace.session().call(deadline=past + timedelta(hours=1))
            with pytest.raises(PromptEvaluationError), call:
                call.write_file("a.txt", "changed")
                call._deadline = past
                act(call)
            assert contents_of(workspace.root) == {"a.txt": b"a"}
        assert [row.status for row in history(workspace)] == ["aborted", "aborted"]

    @pytest.mark.req("D5.abort_on_cancellation")
    def test_cancelling_a_task_aborts_its_call(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "a"})

        async def main() -> None:
            written = asyncio.Event()

            async def tool() -> None:
                async with workspace.session().call() as call:
                    await call.write_file("a.txt", "changed")
                    written.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(tool())
            await written.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert contents_of(workspace.root) == {"a.txt": b"a"}
        assert [row.status for row in history(workspace)] == ["aborted"]

    @pytest.mark.req("D5.commit_one_transaction", "D5.created_parents_recorded")
    def test_a_good_end_records_every_change_with_its_created_parents(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"old.txt": "old"})
        with workspace.session().call() as call:
            call.write_file("new/deep/x.txt", "x", create_parents=True)
            call.delete("old.txt")
        (row,) = history(workspace)
        with workspace.open_root.ledger.store.read() as tx:
            changes = changes_of(tx, row.id)
        assert [(one.path, kind_of_change(one)) for one in changes] == [
            ("new", "created"),
            ("new/deep", "created"),
            ("new/deep/x.txt", "created"),
            ("old.txt", "deleted"),
        ]
        assert isinstance(changes[0].after, DirEntry) and changes[3].after == ABSENT
        (ended,) = [record for record in records(workspace) if record.kind == "call.ended"]
        assert [one["effect"] for one in ended.payload["effects"]] == ["host.fs.write_file", "host.fs.delete"]
        assert row.status == "committed" and row.wseq is not None

    def test_what_comes_to_the_same_in_the_end_is_no_change(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "a"})
        with workspace.session().call() as call:
            call.write_file("a.txt", "b")
            call.write_file("a.txt", "a")
            call.write_file("b.txt", "b")
            call.delete("b.txt")
        (row,) = history(workspace)
        assert (row.status, row.wseq) == ("committed", None)

    def test_an_ended_call_does_nothing_more(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            call.write_file("a.txt", "a")
        with pytest.raises(MulliganError) as caught:
            call.write_file("a.txt", "b")
        assert caught.value.code == "call_not_open"
        assert contents_of(workspace.root) == {"a.txt": b"a"}

    @pytest.mark.req("D5.commit_only_if_ours_and_open")
    def test_a_call_that_another_writer_ended_is_not_committed_and_not_rolled_back_twice(
        self, workspace: TempWorkspace
    ) -> None:
        plant(workspace.root, {"a.txt": "a"})
        with pytest.raises(MulliganError) as caught, workspace.session().call() as call:
            call.write_file("a.txt", "ours")
            with workspace.open_root.ledger.store.write() as tx:
                workspace.open_root.ledger._let_go(tx, call._call.facts.id)
            (workspace.root / "a.txt").write_text("ours")
        assert caught.value.code == "call_lost"
        assert contents_of(workspace.root) == {"a.txt": b"ours"}

    @pytest.mark.req("D12.one_effect_call_aborts", "D5.abort_on_validation_error")
    def test_a_one_effect_call_that_is_not_ok_aborts(self, workspace: TempWorkspace) -> None:
        receipt, _ = workspace.session().perform("edit_file", {"path": "none", "old_string": "a", "new_string": "b"})
        assert (receipt.status, receipt.error_code) == ("not_found", "path_not_found")
        receipt, _ = workspace.session().perform("edit_file", {"path": 3})
        assert (receipt.status, receipt.error_code) == ("error", "invalid_params")
        assert [(row.status, row.reason) for row in history(workspace)] == [
            ("aborted", "path_not_found"),
            ("aborted", "invalid_params"),
        ]

    @pytest.mark.req("D5.call_without_turn", "D5.turn_complete", "D12.turn")
    def test_a_call_belongs_to_the_turn_around_it_or_is_one_of_its_own(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        with session.call() as alone:
            pass
        with session.turn("do it") as turn:
            with session.call() as first:
                pass
            with session.call() as second:
                pass
        turns = {row.id: row.turn for row in history(workspace)}
        assert turns == {alone.id: alone.id, first.id: turn, second.id: turn}


class TestAtomicEffects:
    @pytest.mark.req("D12.not_ok_discards_effect")
    def test_an_effect_that_fails_leaves_the_rest_of_the_call_alone(self, workspace: TempWorkspace) -> None:
        patch = "*** Begin Patch\n*** Add File: n.txt\n+n\n*** Update File: a.txt\n@@\n-not there\n+x\n*** End Patch\n"
        plant(workspace.root, {"a.txt": "a\n"})
        with workspace.session().call() as call:
            assert call.write_file("b.txt", "b").ok
            assert not call.apply_patch(patch).ok
            assert not call.edit_file("a.txt", "missing", "x").ok
            assert call.write_file("c.txt", "c").ok
        assert contents_of(workspace.root) == {"a.txt": b"a\n", "b.txt": b"b", "c.txt": b"c"}
        assert [row.status for row in history(workspace)] == ["committed"]

    def test_an_effect_of_many_paths_that_fails_at_the_last_leaves_none(self, tmp_path: Path) -> None:
        plan = FaultPlan().fail(errno.ENOSPC, step="place", at=2)
        workspace = open_temp_workspace(tmp_path, steps=plan)
        plant(workspace.root, {"src/a": "a", "src/b": "b"})
        before = tree_of(workspace.root)
        with workspace.session().call() as call:
            receipt = call.move("src", "dst")
            assert not receipt.ok
            assert tree_of(workspace.root) == before
            assert call.write_file("src/a", "changed").ok
        assert contents_of(workspace.root) == {"src/a": b"changed", "src/b": b"b"}
        assert_no_litter(workspace)
        workspace.close()

    @pytest.mark.req("D5.nested_is_savepoint")
    def test_a_nested_call_is_a_savepoint(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "0"})
        session = workspace.session()
        with session.call() as outer:
            outer.write_file("a.txt", "1")
            with pytest.raises(Leaving), session.call() as inner:
                assert inner.id == outer.id
                inner.write_file("a.txt", "2")
                inner.write_file("b.txt", "b")
                raise Leaving
            assert contents_of(workspace.root) == {"a.txt": b"1"}
            with session.call() as failing:
                failing.write_file("a.txt", "3")
                failing.fail("no")
            assert contents_of(workspace.root) == {"a.txt": b"1"}
            with session.call() as good:
                good.write_file("c.txt", "c")
        assert contents_of(workspace.root) == {"a.txt": b"1", "c.txt": b"c"}
        assert len(history(workspace)) == 1

    @pytest.mark.req("D5.nested_is_savepoint")
    def test_when_the_outer_call_fails_so_does_what_was_nested(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        with pytest.raises(Leaving), session.call() as outer:
            with session.call() as inner:
                inner.write_file("a.txt", "1")
            outer.write_file("b.txt", "1")
            raise Leaving
        assert contents_of(workspace.root) == {}

    def test_a_call_of_another_session_inside_is_a_call_of_its_own(self, workspace: TempWorkspace) -> None:
        with pytest.raises(Leaving), workspace.session("one").call() as outer:
            outer.write_file("a.txt", "1")
            with workspace.session("two").call() as inner:
                inner.write_file("b.txt", "1")
            raise Leaving
        assert contents_of(workspace.root) == {"b.txt": b"1"}


class TestFailingDisk:
    """Any step may fail with any error: the call then leaves what was there, or all of what it did."""

    SCENE: ClassVar[dict[str, str | None]] = {
        "a.txt": "a\n" * 50,
        "d/x.txt": "x",
        "d/y.txt": "y",
        "e": None,
        "link": "l",
    }

    @staticmethod
    def act(call: CallHandle) -> bool:
        receipts = [
            call.write_file("a.txt", "changed\n" * 60),
            call.write_file("n/m/new.txt", "new", create_parents=True),
            call.delete("d", recursive=True),
            call.move("e", "f"),
            call.write_file("hard", "other bytes"),
            call.delete("link"),
        ]
        return all(receipt.ok for receipt in receipts)

    def scene(self, base: Path, plan: FaultPlan) -> TempWorkspace:
        workspace = open_temp_workspace(base, steps=plan)
        plant(workspace.root, {**self.SCENE, "hard": "hard"})
        os.link(workspace.root / "hard", workspace.root / "hard2")
        return workspace

    def steps(self, base: Path) -> int:
        plan = FaultPlan()
        workspace = self.scene(base, plan)
        with workspace.session().call() as call:
            assert self.act(call)
        workspace.close()
        return len(plan.reached)

    @pytest.mark.req("S4.principle.call_is_atomic")
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
    def test_one_failing_step_undoes_the_effect_and_then_the_call(self, tmp_path: Path, number: int) -> None:
        count = self.steps(tmp_path / "dry")
        assert count > 20
        for at in range(1, count + 1):
            workspace = self.scene(tmp_path / str(at), FaultPlan().fail(number, at=at))
            before = tree_of(workspace.root)
            with workspace.session().call() as call:
                if not self.act(call):
                    call.fail("the disk failed")
            after = tree_of(workspace.root)
            assert after == before or call.status == "committed", f"step {at}"
            assert call.conflicts == [], f"step {at}"
            assert os.stat(workspace.root / "hard").st_nlink == 2
            assert_no_litter(workspace)
            workspace.close()

    def test_an_effect_whose_disk_failed_is_gone_while_the_call_goes_on(self, tmp_path: Path) -> None:
        for at in range(1, 6):
            workspace = self.scene(tmp_path / str(at), FaultPlan().fail(errno.EIO, at=at))
            with workspace.session().call() as call:
                first = call.write_file("a.txt", "changed")
                assert contents_of(workspace.root)["a.txt"] == (b"changed" if first.ok else b"a\n" * 50)
                assert call.write_file("a.txt", "again").ok
            assert contents_of(workspace.root)["a.txt"] == b"again"
            assert_no_litter(workspace)
            workspace.close()

    @pytest.mark.req("D5.recovery_on_open")
    def test_a_disk_that_goes_on_failing_is_put_right_when_the_store_is_opened_again(self, tmp_path: Path) -> None:
        plan = FaultPlan()
        workspace = self.scene(tmp_path, plan)
        before = tree_of(workspace.root)
        handle = workspace.session().call()
        with pytest.raises(MulliganError) as caught, handle:
            handle.write_file("a.txt", "changed")
            plan.fail(errno.EIO, lasting=True)
            raise Leaving
        assert caught.value.code == "restore_failed"
        with workspace.open_root.ledger.store.write() as tx:
            (row,) = tx.select(OPEN)
            tx.put(OPEN, type(row)(row.call, 10_000, row.session, row.root, row.observed))
        again = open_temp_workspace(tmp_path)
        assert [found.put_back for found in again.recovered] == [["a.txt"]]
        assert tree_of(again.root) == before
        assert_no_litter(again)
        again.close()


class TestSomebodyElse:
    @pytest.mark.req("D5.external_recorded_first", "D5.external_in_history", "D2.change_has_author")
    def test_an_edit_between_two_calls_is_recorded_as_external_before_ours(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        with session.call("one") as call:
            call.write_file("a.txt", "ours\n")
        (workspace.root / "a.txt").write_text("theirs\n")
        with session.call("two") as call:
            call.write_file("a.txt", "ours again\n")
        told = steps_of_disk(workspace)
        assert told == [("one", "a.txt created"), ("external", "a.txt modified"), ("two", "a.txt modified")]
        external = next(row for row in history(workspace) if row.external)
        assert (external.session, external.tool) == (None, None)
        with workspace.open_root.ledger.store.read() as tx:
            (change,) = changes_of(tx, external.id)
            assert isinstance(change.after, FileEntry)
            assert workspace.open_root.ledger.blobs.read_in(tx, change.after.digest) == b"theirs\n"

    @pytest.mark.req("D5.abort_leaves_others_changes")
    def test_what_another_writer_changed_after_us_stays_when_the_call_fails(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "a", "b.txt": "b"})
        with pytest.raises(Leaving), workspace.session().call() as call:
            call.write_file("a.txt", "ours")
            call.write_file("b.txt", "ours")
            (workspace.root / "a.txt").write_text("theirs")
            raise Leaving
        assert contents_of(workspace.root) == {"a.txt": b"theirs", "b.txt": b"b"}
        assert call.conflicts == ["a.txt"]
        row = history(workspace)[0]
        assert decode(row.coverage) == [{"path": "a.txt", "reason": "conflicted"}]

    @pytest.mark.req("D5.content_and_mode_apart")
    def test_a_mode_another_writer_set_on_our_content_survives_the_abort(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": "a"})
        with pytest.raises(Leaving), workspace.session().call() as call:
            call.write_file("a.txt", "ours")
            os.chmod(workspace.root / "a.txt", 0o600)
            raise Leaving
        assert contents_of(workspace.root) == {"a.txt": b"a"}
        assert os.stat(workspace.root / "a.txt").st_mode & 0o7777 == 0o600
        assert call.conflicts == []

    def test_a_directory_of_ours_in_which_another_writer_put_a_file_stays_with_it(
        self, workspace: TempWorkspace
    ) -> None:
        with pytest.raises(Leaving), workspace.session().call() as call:
            call.write_file("d/x.txt", "x", create_parents=True)
            (workspace.root / "d/theirs.txt").write_text("theirs")
            raise Leaving
        assert contents_of(workspace.root) == {"d/theirs.txt": b"theirs"}
        assert call.conflicts == ["d"]

    def test_a_directory_removed_meanwhile_does_not_break_the_abort(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"d/x.txt": "x", "a.txt": "a"})
        with pytest.raises(Leaving), workspace.session().call() as call:
            call.write_file("d/x.txt", "ours")
            call.write_file("a.txt", "ours")
            os.unlink(workspace.root / "d/x.txt")
            os.rmdir(workspace.root / "d")
            raise Leaving
        assert contents_of(workspace.root) == {"a.txt": b"a"}
        assert call.conflicts == ["d/x.txt"]

    def test_a_directory_another_writer_turned_into_a_link_does_not_break_the_abort(
        self, workspace: TempWorkspace
    ) -> None:
        plant(workspace.root, {"d/x.txt": "x", "other/x.txt": "other"})
        with pytest.raises(Leaving), workspace.session().call() as call:
            call.write_file("d/x.txt", "ours")
            os.rename(workspace.root / "d", workspace.root / "moved")
            os.symlink("other", workspace.root / "d")
            raise Leaving
        assert contents_of(workspace.root)["other/x.txt"] == b"other"
        assert call.conflicts == ["d/x.txt"]

    def test_an_edit_between_two_writes_of_one_call_outlives_the_call(self, workspace: TempWorkspace) -> None:
        lines = [f"{i}\n" for i in range(20)]
        plant(workspace.root, {"a.txt": "".join(lines)})
        person = "".join([*lines[:-1], "theirs\n"])
        with pytest.raises(Leaving), workspace.session().call() as call:
            call.edit_file("a.txt", "0\n1\n", "first\n1\n")
            text = (workspace.root / "a.txt").read_text()
            (workspace.root / "a.txt").write_text(text.replace("19\n", "theirs\n"))
            assert call.edit_file("a.txt", "5\n6\n", "second\n6\n").ok
            raise Leaving
        assert contents_of(workspace.root) == {"a.txt": person.encode()}
        with workspace.session().call("stays") as call:
            call.edit_file("a.txt", "0\n1\n", "first\n1\n")
            text = (workspace.root / "a.txt").read_text()
            (workspace.root / "a.txt").write_text(text.replace("10\n", "theirs too\n"))
            call.edit_file("a.txt", "5\n6\n", "second\n6\n")
        workspace.session().undo()
        assert contents_of(workspace.root) == {"a.txt": person.replace("10\n", "theirs too\n").encode()}
