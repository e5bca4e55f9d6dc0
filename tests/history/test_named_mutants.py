"""Promises that depend on one line each: a sync, a lock of a process, a check before recovery, the times of a file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import mulligan
from mulligan.files.disk import HostDisk
from mulligan.history.ledger import Ledger
from mulligan.history.open_root import OpenRoot
from mulligan.history.projection import SCHEMA
from mulligan.history.recovery import recover
from mulligan.store.journal import Journal
from mulligan.store.maintenance import MARK, BackgroundSync
from mulligan.store.protocol import META
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import SystemClock
from mulligan.values.ids import OwnerId, SystemIds
from mulligan.values.paths import RepoPath
from tests.contracts.tables import CONTRACT_SCHEMA
from tests.history.killed_process import die_in
from tests.temp_workspace import open_temp_workspace

STORE_CHILD = str(Path(__file__).parent.parent / "store" / "store_process.py")


class Fsyncs:
    """The paths that this process syncs, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self._really = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def _note(self, handle: int) -> None:
        self.paths.append(os.readlink(f"/proc/self/fd/{handle}"))
        self._really(handle)


@pytest.mark.req("D5.durability_power")
def test_power_mode_syncs_the_bodies_of_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    fsyncs = Fsyncs(monkeypatch)
    with mulligan.open(tmp_path / "work", store=tmp_path / "home", durability="power") as m, m.session().call() as call:
        assert call.write_file("large", random.Random(1).randbytes(150_000).hex()).ok
    bodies = [path for path in (tmp_path / "home" / "blobs").rglob("*") if path.is_file()]
    synced = {path.partition(".")[0] for path in (str(Path(one)) for one in fsyncs.paths)}
    assert bodies and {str(path) for path in bodies} <= synced


@pytest.mark.req("D5.sync_mark")
def test_the_sync_mark_is_set_only_after_the_log_of_the_store_was_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    store.owner()
    marks: list[bool] = []

    def note(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}") == str(tmp_path / "store.db-wal"):
            with store.read() as tx:
                marks.append(tx.has(META, MARK))

    monkeypatch.setattr(os, "fsync", note)
    BackgroundSync(store, SystemClock(), interval_s=1e9).move()
    with store.read() as tx:
        assert (marks, tx.has(META, MARK)) == ([False], True)
    store.close()


@pytest.mark.req("D5.owner_after_fork")
def test_a_forked_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, STORE_CHILD, "orphan", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout) == {"parent_lives": False, "child_lives": True}


@pytest.mark.req("D5.recovery_on_open")
def test_opening_the_store_leaves_an_open_call_of_a_living_process_alone(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    look = f"import mulligan\nwith mulligan.open({str(work)!r}, store={str(home)!r}) as m: print(len(m.recovered))"
    with mulligan.open(work, store=home) as m, m.session().call() as call:
        call.write_file("f", "ours")
        other = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
        assert (other.stdout, (work / "f").read_text()) == ("0\n", "ours")
    assert (call.status, (work / "f").read_text()) == ("committed", "ours")


class SlowToAsk(SqliteStore):
    """Another process recovers everything between this one's look at the open calls and its answer who lives."""

    base: Path | None = None

    def is_alive(self, owner: OwnerId) -> bool | None:
        alive = super().is_alive(owner)
        if self.base is not None:
            base, self.base = self.base, None
            workspace = open_temp_workspace(base)
            assert len(workspace.recovered) == 1
            workspace.close()
        return alive


@pytest.mark.req("D5.recovery_idempotent")
def test_a_call_that_another_process_has_just_recovered_is_not_recovered_again(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "f").write_text("before")

    def die(workspace: object) -> None:
        with workspace.session().call() as call:  # type: ignore[attr-defined]
            call.write_file("f", "ours")
            os._exit(9)

    assert die_in(tmp_path, die, at=None)
    store = SlowToAsk(str(tmp_path / "home"), SCHEMA)
    open_root = OpenRoot(
        Ledger(store, Journal(SCHEMA), clock=SystemClock(), ids=SystemIds()), HostDisk(str(tmp_path / "work"))
    )
    store.base = tmp_path
    assert (recover(open_root), (tmp_path / "work" / "f").read_text()) == ([], "before")
    open_root.close()
    store.close()


def test_bytes_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_text("base")
    disk, really, reads = HostDisk(str(tmp_path)), os.pread, list[bytes]()

    def read_and_let_somebody_write(handle: int, size: int, at: int) -> bytes:
        reads.append(data := really(handle, size, at))
        if reads == [b"base"]:
            before = file.stat()
            # The file system's clock is coarse: write until the file carries another time.
            while file.stat().st_mtime_ns == before.st_mtime_ns:
                with open(file, "r+") as writing:
                    writing.write("mine")
        return data

    monkeypatch.setattr(os, "pread", read_and_let_somebody_write)
    with disk.resolve_exactly(RepoPath("f")) as spot:
        image = disk.image(spot)
    assert (image.content, reads[0]) == (b"mine", b"base")
