"""A process that ends leaves its syncs to the background process; without one it syncs by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

import mulligan
from tests.agents.hooks.hooked_workspace import HookedWorkspace, gone

CHILD = """
import os, sys
import mulligan
synced, fsync = [], os.fsync
def heard(handle):
    synced.append(os.readlink(f"/proc/self/fd/{handle}"))
    fsync(handle)
os.fsync = heard
with mulligan.open(sys.argv[1], store=sys.argv[2]) as product:
    with product.session("s").call() as call:
        assert call.write_file("a.txt", "new").ok
print(len(synced))
"""


def files_synced_by_a_short_process(workspace: HookedWorkspace) -> int:
    command = [sys.executable, "-c", CHILD, str(workspace.root), str(workspace.store)]
    done = subprocess.run(command, capture_output=True, text=True, env=workspace.env)
    assert done.returncode == 0, done.stderr
    assert (workspace.root / "a.txt").read_text() == "new"
    return int(done.stdout)


def originals_left(workspace: HookedWorkspace) -> list[str]:
    found = (workspace.store / "originals").glob("*/*")
    return [path.name for path in found if not path.name.startswith(("folder-", "next-"))]


def stop_between_transactions(pid: int, store: Path) -> None:
    """Stop a process that writes to this store. A process that is stopped in a transaction would block all writers."""
    database = apsw.Connection(str(store / "store.db"))
    database.set_busy_timeout(600_000)
    database.execute("BEGIN IMMEDIATE")
    os.kill(pid, signal.SIGSTOP)
    database.execute("ROLLBACK")
    database.close()


@pytest.mark.req("D5.durability_process")
def test_a_process_that_ends_leaves_its_syncs_to_the_background_process(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    assert files_synced_by_a_short_process(workspace) == 0
    # It ends when it has synced what it was asked to.
    workspace.stop()
    assert originals_left(workspace) == []


@pytest.mark.req("D5.durability_process")
def test_without_a_background_process_it_syncs_before_it_ends(workspace: HookedWorkspace) -> None:
    assert files_synced_by_a_short_process(workspace) > 0
    assert originals_left(workspace) == []


@pytest.mark.req("D5.durability_process")
def test_a_socket_without_a_process_does_not_count_as_background_process(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    pid = workspace.keeper_pid()
    assert pid is not None
    with gone(pid):
        os.kill(pid, signal.SIGKILL)
    assert Path(workspace.folder, "keeper.sock").exists()
    assert files_synced_by_a_short_process(workspace) > 0
    assert originals_left(workspace) == []


@pytest.mark.req("D5.durability_process")
def test_what_a_background_process_did_not_sync_is_kept_for_the_next_process(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    pid = workspace.keeper_pid()
    assert pid is not None
    stop_between_transactions(pid, workspace.store)
    assert files_synced_by_a_short_process(workspace) == 0
    assert len(originals_left(workspace)) == 1
    with gone(pid):
        os.kill(pid, signal.SIGKILL)
    with mulligan.open(workspace.root, store=workspace.store) as product:
        assert product.session("s").undo().ok
    assert originals_left(workspace) == []
    assert (workspace.root / "a.txt").read_text() == "one\ntwo\n"
