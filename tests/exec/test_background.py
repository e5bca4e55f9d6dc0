"""Commands in the background: a handle, pages of output, signals, and changes that count when the command ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benches import Bench, open_bench
from exec.commands import sh, text, told
from mulligan.effects.board import Board, Posted, board_of
from mulligan.effects.receipt import Receipt
from mulligan.history.log import calls_of
from mulligan.values.ids import SessionId
from mulligan.workspace.exec.pump import Handle


def output(bench: Bench, exec_id: str, **params: Any) -> Receipt:
    return bench.session().perform("host.exec.output", {"exec_id": exec_id, **params})[0]


def send(bench: Bench, exec_id: str, name: str) -> Receipt:
    return bench.session().perform("host.exec.signal", {"exec_id": exec_id, "signal": name})[0]


def wait(bench: Bench, exec_id: str) -> None:
    posted = board_of(bench.desk).find(exec_id)
    assert posted is not None and posted.ended.wait(20)


@pytest.mark.req("D7.background")
class TestBackground:
    def test_a_command_goes_on_after_its_answer_and_its_changes_are_a_call_when_it_ends(self, bench: Bench) -> None:
        os.mkfifo(bench.root / "gate")
        started = sh(bench, "echo early; echo 1 > a; read x < gate; echo late; echo 2 > b", background=True)
        assert (started.status, started.exit_code, started.changes) == ("ok", None, None)
        (bench.root / "gate").write_text("\n")
        wait(bench, started.exec_id)
        done = output(bench, started.exec_id)
        assert (done.content, done.running, done.size_bytes) == (text("early\nlate\n"), False, 11)
        assert (done.result["status"], done.result["exit_code"]) == ("ok", 0)
        assert done.result["changes"] == [{"path": "a", "kind": "created"}, {"path": "b", "kind": "created"}]
        assert None not in done.result.values()
        assert bench.session().undo().of == (started.exec_id,)
        assert os.listdir(bench.root) == ["gate"]

    def test_output_is_paged_while_it_runs(self, bench: Bench) -> None:
        os.mkfifo(bench.root / "gate")
        started = sh(bench, "printf 0123456789; echo > gate; sleep 1000", background=True)
        (bench.root / "gate").read_text()
        page = output(bench, started.exec_id, offset_bytes=4, max_bytes=3)
        assert (page.running, page.result) == (True, None)
        while output(bench, started.exec_id).size_bytes < 10:
            pass
        assert output(bench, started.exec_id, offset_bytes=4, max_bytes=3).content == text("456")
        assert output(bench, started.exec_id, stream="stderr").size_bytes == 0
        assert send(bench, started.exec_id, "kill").status == "signaled"
        wait(bench, started.exec_id)

    def test_signals_reach_it_until_it_has_ended(self, bench: Bench) -> None:
        os.mkfifo(bench.root / "gate")
        script = "trap 'echo bye > bye; exit 6' TERM; echo > gate; while :; do sleep 0.01; done"
        started = sh(bench, script, background=True)
        (bench.root / "gate").read_text()
        assert send(bench, started.exec_id, "term").status == "signaled"
        wait(bench, started.exec_id)
        assert output(bench, started.exec_id).result["exit_code"] == 6
        assert (bench.root / "bye").exists()
        assert told(send(bench, started.exec_id, "term")) == ("already_exited", "already_exited")

    def test_what_is_not_there_is_not_found(self, bench: Bench) -> None:
        assert told(output(bench, "nothing")) == ("not_found", "exec_not_found")
        assert told(send(bench, "nothing", "term")) == ("not_found", "exec_not_found")
        assert told(send(bench, "nothing", "dance")) == ("error", "invalid_params")

    def test_another_session_cannot_reach_it(self, bench: Bench) -> None:
        started = sh(bench, "true", background=True)
        other, _ = bench.session("other").perform("host.exec.output", {"exec_id": started.exec_id})
        assert told(other) == ("not_found", "exec_not_found")
        wait(bench, started.exec_id)

    def test_a_timeout_puts_it_back(self, bench: Bench) -> None:
        started = sh(bench, "echo 1 > a; sleep 1000", background=True, timeout_ms=200)
        wait(bench, started.exec_id)
        assert output(bench, started.exec_id).result["status"] == "timeout"
        assert os.listdir(bench.root) == []

    def test_a_program_that_cannot_start_is_told_when_asked(self, bench: Bench) -> None:
        started, _ = bench.session().perform("host.exec", {"argv": ["no-such-program"], "background": True})
        wait(bench, started.exec_id)
        assert output(bench, started.exec_id).result["error_code"] == "spawn_failed"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_one_that_breaks_has_a_receipt_like_every_failure(self) -> None:
        def broken(handle: Handle) -> dict[str, Any]:
            raise OSError("the disk is gone")

        board, posted = Board(), Posted("c", SessionId("s"), Handle())
        board.start(posted, broken)
        board.close()
        assert board.find("c") is posted and posted.receipt is not None
        assert posted.receipt.keys() == {"status", "error_code", "error_message"}
        assert (posted.receipt["status"], posted.receipt["error_code"]) == ("error", "internal")

    def test_descendants_may_outlive_the_first_process(self, bench: Bench) -> None:
        started = sh(bench, "(sleep 0.5; echo late > late) &", background=True)
        wait(bench, started.exec_id)
        assert (bench.root / "late").read_text() == "late\n"

    def test_closing_the_workspace_stops_it_and_puts_it_back(self, tmp_path: Path) -> None:
        bench = open_bench(tmp_path)
        os.mkfifo(bench.root / "gate")
        sh(bench, "echo 1 > a; mkdir d; echo 2 > d/b; echo > gate; sleep 1000", background=True)
        (bench.root / "gate").read_text()
        bench.close()
        assert os.listdir(bench.root) == ["gate"]
        again = open_bench(tmp_path)
        with again.desk.ledger.store.read() as tx:
            assert [row.status for row in calls_of(tx, again.desk, None)][-1:] != ["open"]
        assert again.recovered == []
        again.close()
