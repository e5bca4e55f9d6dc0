"""Commands in the background: a handle, pages of output, signals, and changes that count when the command ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mulligan.effects.receipt import Receipt
from mulligan.effects.running_commands import RunningCommands, TrackedCommand, running_commands_of
from mulligan.exec.pump import CommandHandle
from mulligan.history.log import calls_of
from mulligan.values.ids import SessionId
from tests.exec.commands import sh, text, told
from tests.temp_workspace import TempWorkspace, open_temp_workspace


def output(workspace: TempWorkspace, exec_id: str, **params: Any) -> Receipt:
    return workspace.session().perform("host.exec.output", {"exec_id": exec_id, **params})[0]


def send(workspace: TempWorkspace, exec_id: str, name: str) -> Receipt:
    return workspace.session().perform("host.exec.signal", {"exec_id": exec_id, "signal": name})[0]


def wait(workspace: TempWorkspace, exec_id: str) -> None:
    posted = running_commands_of(workspace.open_root).find(exec_id)
    assert posted is not None and posted.ended.wait(600)


@pytest.mark.req("D7.background")
class TestBackground:
    def test_a_command_goes_on_after_its_answer_and_its_changes_are_a_call_when_it_ends(
        self, workspace: TempWorkspace
    ) -> None:
        os.mkfifo(workspace.root / "gate")
        started = sh(workspace, "echo early; echo 1 > a; read x < gate; echo late; echo 2 > b", background=True)
        assert (started.status, started.exit_code, started.changes) == ("ok", None, None)
        (workspace.root / "gate").write_text("\n")
        wait(workspace, started.exec_id)
        done = output(workspace, started.exec_id)
        assert (done.content, done.running, done.size_bytes) == (text("early\nlate\n"), False, 11)
        assert (done.result["status"], done.result["exit_code"]) == ("ok", 0)
        assert done.result["changes"] == [{"path": "a", "kind": "created"}, {"path": "b", "kind": "created"}]
        assert None not in done.result.values()
        assert workspace.session().undo().of == (started.exec_id,)
        assert os.listdir(workspace.root) == ["gate"]

    def test_output_is_paged_while_it_runs(self, workspace: TempWorkspace) -> None:
        os.mkfifo(workspace.root / "gate")
        started = sh(workspace, "printf 0123456789; echo > gate; sleep 1000", background=True)
        (workspace.root / "gate").read_text()
        page = output(workspace, started.exec_id, offset_bytes=4, max_bytes=3)
        assert (page.running, page.result) == (True, None)
        while output(workspace, started.exec_id).size_bytes < 10:
            pass
        assert output(workspace, started.exec_id, offset_bytes=4, max_bytes=3).content == text("456")
        assert output(workspace, started.exec_id, stream="stderr").size_bytes == 0
        assert send(workspace, started.exec_id, "kill").status == "signaled"
        wait(workspace, started.exec_id)

    def test_signals_reach_it_until_it_has_ended(self, workspace: TempWorkspace) -> None:
        os.mkfifo(workspace.root / "gate")
        script = "trap 'echo bye > bye; exit 6' TERM; echo > gate; while :; do sleep 0.01; done"
        started = sh(workspace, script, background=True)
        (workspace.root / "gate").read_text()
        assert send(workspace, started.exec_id, "term").status == "signaled"
        wait(workspace, started.exec_id)
        assert output(workspace, started.exec_id).result["exit_code"] == 6
        assert (workspace.root / "bye").exists()
        assert told(send(workspace, started.exec_id, "term")) == ("already_exited", "already_exited")

    def test_an_unknown_background_command_is_not_found(self, workspace: TempWorkspace) -> None:
        assert told(output(workspace, "nothing")) == ("not_found", "exec_not_found")
        assert told(send(workspace, "nothing", "term")) == ("not_found", "exec_not_found")
        assert told(send(workspace, "nothing", "dance")) == ("error", "invalid_params")

    def test_another_session_cannot_reach_it(self, workspace: TempWorkspace) -> None:
        started = sh(workspace, "true", background=True)
        other, _ = workspace.session("other").perform("host.exec.output", {"exec_id": started.exec_id})
        assert told(other) == ("not_found", "exec_not_found")
        wait(workspace, started.exec_id)

    def test_a_timeout_puts_it_back(self, workspace: TempWorkspace) -> None:
        started = sh(workspace, "echo 1 > a; sleep 1000", background=True, timeout_ms=200)
        wait(workspace, started.exec_id)
        assert output(workspace, started.exec_id).result["status"] == "timeout"
        assert os.listdir(workspace.root) == []

    def test_a_program_that_cannot_start_is_reported_when_its_output_is_read(self, workspace: TempWorkspace) -> None:
        started, _ = workspace.session().perform("host.exec", {"argv": ["no-such-program"], "background": True})
        wait(workspace, started.exec_id)
        assert output(workspace, started.exec_id).result["error_code"] == "spawn_failed"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_one_that_breaks_has_a_receipt_like_every_failure(self) -> None:
        def broken(handle: CommandHandle) -> dict[str, Any]:
            raise OSError("the disk is gone")

        board, posted = RunningCommands(), TrackedCommand("c", SessionId("s"), CommandHandle())
        board.start(posted, broken)
        board.close()
        assert board.find("c") is posted and posted.receipt is not None
        assert posted.receipt.keys() == {"status", "error_code", "error_message"}
        assert (posted.receipt["status"], posted.receipt["error_code"]) == ("error", "internal")

    def test_descendants_may_outlive_the_first_process(self, workspace: TempWorkspace) -> None:
        started = sh(workspace, "(sleep 0.5; echo late > late) &", background=True)
        wait(workspace, started.exec_id)
        assert (workspace.root / "late").read_text() == "late\n"

    def test_closing_the_workspace_stops_it_and_puts_it_back(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        os.mkfifo(workspace.root / "gate")
        sh(workspace, "echo 1 > a; mkdir d; echo 2 > d/b; echo > gate; sleep 1000", background=True)
        (workspace.root / "gate").read_text()
        workspace.close()
        assert os.listdir(workspace.root) == ["gate"]
        again = open_temp_workspace(tmp_path)
        with again.open_root.ledger.store.read() as tx:
            assert [row.status for row in calls_of(tx, again.open_root, None)][-1:] != ["open"]
        assert again.recovered == []
        again.close()
