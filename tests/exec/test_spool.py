"""A command that changes many paths: from the seventeenth on, a preimage is appended to a spool (decision 28)."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.history.command_changes import SPOOLED_AFTER
from mulligan.history.forget import forget_call
from mulligan.history.log import calls_of
from mulligan.history.tables import (
    OPEN,
    TOUCHES,
    CallRow,
    OtherSpools,
    PreimageSpool,
    TouchRow,
    spool_path,
    spooled_calls,
    standing_in,
)
from mulligan.store.protocol import CLAIMS
from mulligan.values.errors import MulliganError
from tests.exec.commands import plant, sh, told
from tests.exec.test_killed_mulligan import wait_for_death, worker
from tests.exec.trees import tree
from tests.history.killed_process import in_child
from tests.temp_workspace import TempWorkspace, open_temp_workspace

MANY = {f"d{number % 7}/e/f{number}": f"text {number}\n" * (1 + number) for number in range(4 * SPOOLED_AFTER)}
KINDS = """
rm -r d0 d1; for f in d2/e/*; do echo more >> $f; done; mv d3 moved
chmod 700 d4/e; for f in d4/e/*; do chmod 600 $f; done; rm big; echo y > big
ln -s nowhere d5/link; rm d5/e/f5; ln d5/e/f12 d5/hard; echo x > d5/e/f12
mkdir -p new/n; for i in 1 2 3; do echo $i > new/n/$i; done; mkfifo d6/fifo; rm d6/fifo
head -c 200000 /dev/zero > d6/large; for f in d6/e/*; do sed -i s/text/changed/ $f; done
"""


def planted(workspace: TempWorkspace) -> dict[bytes, object]:
    plant(workspace.root, MANY)
    (workspace.root / "big").write_bytes(os.urandom(300_000))
    return dict(tree(os.fsencode(workspace.root)))


def now(workspace: TempWorkspace) -> dict[bytes, object]:
    return dict(tree(os.fsencode(workspace.root)))


@contextmanager
def waiting_command(workspace: TempWorkspace, base: Path, script: str) -> Iterator[list[object]]:
    """A command that has run the script and then waits until the block ends; its receipt is in the list afterwards."""
    reached, go = base / "reached", base / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    receipts: list[object] = []
    command = f"{script}; echo > {reached}; read line < {go}; echo end >> big"
    thread = threading.Thread(target=lambda: receipts.append(sh(workspace, command)))
    thread.start()
    reached.read_text()
    try:
        yield receipts
    finally:
        go.write_text("\n")
        thread.join()


class TestWholeCommands:
    @pytest.mark.req("D7.notify_stops_before_mutation")
    def test_undo_restores_every_kind_of_change(self, workspace: TempWorkspace) -> None:
        before = planted(workspace)
        assert told(sh(workspace, KINDS)) == ("ok", None)
        assert now(workspace) != before
        assert workspace.session().undo().ok
        assert now(workspace) == before

    @pytest.mark.req("D7.rollback_on_nonzero")
    def test_a_failing_command_leaves_no_trace(self, workspace: TempWorkspace) -> None:
        before = planted(workspace)
        assert told(sh(workspace, f"{KINDS}; exit 1", rollback_on="nonzero")) == ("error", "nonzero_exit")
        assert now(workspace) == before

    def test_nothing_of_the_spool_remains_when_the_call_has_ended(self, workspace: TempWorkspace) -> None:
        planted(workspace)
        sh(workspace, "rm -r d*")
        sh(workspace, "rm -r d*; exit 1", rollback_on="nonzero")
        with workspace.open_root.ledger.store.read() as tx:
            assert [tx.select(table) for table in (OPEN, CLAIMS, TOUCHES)] == [[], [], []]
        assert spooled_calls(str(workspace.home)) == []

    def test_an_edit_from_outside_is_recorded_before_the_command_changes_the_file(
        self, workspace: TempWorkspace
    ) -> None:
        planted(workspace)
        assert told(sh(workspace, "for f in d*/e/*; do echo recorded >> $f; done")) == ("ok", None)
        edited = workspace.root / "d6/e/f6"
        edited.write_text("a person's\n")
        assert told(sh(workspace, "rm -r d0 d1 d2 d3 d4 d5 d6")) == ("ok", None)
        assert workspace.session().undo().ok
        assert edited.read_text() == "a person's\n"
        assert [row.external for row in calls(workspace)].count(1) == 1


def calls(workspace: TempWorkspace) -> list[CallRow]:
    """Newest first."""
    with workspace.open_root.ledger.store.read() as tx:
        return list(calls_of(tx, workspace.open_root, None))


class TestOtherCalls:
    @pytest.mark.req("D5.claims_sorted_one_transaction")
    def test_a_path_in_the_spool_is_claimed(self, workspace: TempWorkspace, tmp_path: Path) -> None:
        planted(workspace)
        with waiting_command(workspace, tmp_path, "rm -r d0 d1 d2 d3; echo more >> d4/e/f4"):
            receipt, _ = workspace.session("other").perform("host.fs.write_file", write("d4/e/f4"))
            assert receipt.error_code == "path_claimed"
            for path in ("d2", "d3"):
                made, _ = workspace.session("other").perform("host.fs.mkdir", {"path": path})
                assert made.error_code == "path_claimed"
            free, _ = workspace.session("other").perform("host.fs.write_file", write("d6/e/f6"))
            assert told(free) == ("ok", None)
        assert workspace.session().undo().ok

    def test_another_calls_write_is_restored_by_undo(self, workspace: TempWorkspace, tmp_path: Path) -> None:
        planted(workspace)
        with waiting_command(workspace, tmp_path, "rm -r d0 d1 d2 d3") as receipts:
            written, _ = workspace.session("other").perform("host.fs.write_file", write("big"))
            assert told(written) == ("ok", None)
        assert len(receipts) == 1
        assert (workspace.root / "big").read_text() == "other'send\n"
        assert workspace.session().undo(calls(workspace)[-1].id).ok
        assert (workspace.root / "big").read_text() == "other's"
        assert (workspace.root / "d3/e/f3").read_text() == MANY["d3/e/f3"]

    def test_bytes_that_a_spool_may_hold_are_not_forgotten(self, workspace: TempWorkspace, tmp_path: Path) -> None:
        planted(workspace)
        workspace.session().perform("host.fs.write_file", write("first"))
        (recorded,) = calls(workspace)
        with waiting_command(workspace, tmp_path, "rm -r d0 d1 d2 d3"), pytest.raises(MulliganError) as refused:
            forget_call(workspace.open_root, recorded)
        assert refused.value.code == "call_open"


def write(path: str) -> dict[str, object]:
    return {"path": path, "content": {"inline_text": {"text": "other's"}}}


class TestKilled:
    @pytest.mark.req("D5.kill_9_anywhere")
    @pytest.mark.parametrize(
        "tail",
        [b"", b"\1\2", struct.pack("<IIIIIII", 9, 99, 5, 5, 5, 5, 5) + b"torn", bytes(64)],
        ids=["whole", "short", "torn", "zeros"],
    )
    def test_recovery_restores_what_is_in_the_spool(self, tmp_path: Path, tail: bytes) -> None:
        workspace = open_temp_workspace(tmp_path)
        before = planted(workspace)
        workspace.close()
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        with worker(tmp_path, f"{KINDS}\necho $$ > {gate}; exec sleep 1000") as process:
            shell = int(gate.read_text())
            os.kill(process.pid, signal.SIGKILL)
            wait_for_death(shell)
        (call,) = spooled_calls(str(tmp_path / "home"))
        assert len(list(standing_in(spool_path(str(tmp_path / "home"), call)))) > 2 * SPOOLED_AFTER
        with open(spool_path(str(tmp_path / "home"), call), "ab") as spool:
            spool.write(tail)
        again = open_temp_workspace(tmp_path)
        assert [(one.conflicts, one.stuck) for one in again.recovered] == [([], None)]
        assert now(again) == before
        assert spooled_calls(str(tmp_path / "home")) == []
        again.close()

    @pytest.mark.req("D18.forget")
    def test_the_next_process_removes_the_spool_of_a_call_that_was_committed(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        planted(workspace)
        workspace.close()
        killed_after_its_commit(tmp_path)
        assert len(spooled_calls(str(tmp_path / "home"))) == 1
        with mulligan.open(workspace.root, store=str(tmp_path / "home")) as m:
            assert spooled_calls(str(tmp_path / "home")) == []
            assert m.session("default").undo().ok


def killed_after_its_commit(base: Path) -> None:
    """A process that dies between the commit of a call and the removal of its spool."""

    def run() -> int:
        workspace = open_temp_workspace(base)
        remove = os.unlink

        def killed(path: Any, *rest: Any, **more: Any) -> None:
            if os.fsdecode(path).startswith(os.path.join(str(base), "home", "spools")):
                os.kill(os.getpid(), signal.SIGKILL)
            remove(path, *rest, **more)

        os.unlink = killed
        with workspace.session().call() as call:
            call.exec(["sh", "-c", "rm -r d0 d1 d2 d3"])
        return 0

    assert in_child(run) == -signal.SIGKILL


class TestSpool:
    def row(self, name: bytes) -> TouchRow:
        return TouchRow("call", name, 7, b"/root/" + name, b'{"kind":"absent"}', b'[{"kind":"absent"}]', b'["x"]', 1)

    def test_it_gives_back_what_was_appended(self, tmp_path: Path) -> None:
        spool = PreimageSpool(str(tmp_path), "call")
        rows = {self.row(b"a"): b"bytes", self.row(b"b"): None, self.row(b"c"): b""}
        assert [spool.append(*one) for one in rows.items()] == [True] * 3
        assert {one.row: one.content for one in spool.unstored()} == rows
        spool.set_stored()
        assert list(spool.unstored()) == []
        assert [one.row for one in standing_in(spool.path)] == list(rows)
        spool.close()
        assert spooled_calls(str(tmp_path)) == []

    def test_after_another_process_has_claimed_a_preimage_does_not_count_until_renewed(self, tmp_path: Path) -> None:
        spool, other = PreimageSpool(str(tmp_path), "call"), OtherSpools(str(tmp_path))
        assert spool.append(self.row(b"a"), None)
        assert other.claims_of("call") == {b"/root/a"}
        assert not spool.append(self.row(b"b"), b"bytes")
        assert [one.row.path for one in spool.unstored()] == [b"a"]
        spool.renew()
        assert spool.append(self.row(b"c"), None)
        assert other.claims_of("call") == {b"/root/a", b"/root/c"}
        spool.close()

    def test_a_full_disk_leaves_no_half_record(self, tmp_path: Path) -> None:
        script = (
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "from mulligan.history.tables import PreimageSpool, TouchRow, standing_in\n"
            "spool = PreimageSpool(sys.argv[1], 'call')\n"
            "row = lambda n: TouchRow('call', n, 1, n, b'{}', b'[{}]', b'[]', 1)\n"
            "spool.append(row(b'a'), b'fits')\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "try: spool.append(row(b'b'), bytes(2000))\n"
            "except OSError as error: print(error.errno)\n"
            "spool.append(row(b'c'), b'fits')\n"
            "print([one.row.path for one in standing_in(spool.path)])\n"
        )
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
        assert (done.stdout.splitlines(), done.stderr) == (["28", "[b'a', b'c']"], "")
