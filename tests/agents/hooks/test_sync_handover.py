"""A process that ends leaves its syncs to the background process; without one it syncs by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mulligan
from agent_room.hooks.people import Site, gone

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


def files_synced_by_a_short_process(site: Site) -> int:
    command = [sys.executable, "-c", CHILD, str(site.root), str(site.store)]
    done = subprocess.run(command, capture_output=True, text=True, env=site.env)
    assert done.returncode == 0, done.stderr
    assert (site.root / "a.txt").read_text() == "new"
    return int(done.stdout)


def originals_left(site: Site) -> list[str]:
    found = (site.store / "originals").glob("*/*")
    return [path.name for path in found if not path.name.startswith(("folder-", "next-"))]


@pytest.mark.req("D5.durability_process")
def test_a_process_that_ends_leaves_its_syncs_to_the_background_process(site: Site) -> None:
    site.hook("SessionStart")
    assert files_synced_by_a_short_process(site) == 0
    # It ends when it has synced what it was asked to.
    site.stop()
    assert originals_left(site) == []


@pytest.mark.req("D5.durability_process")
def test_without_a_background_process_it_syncs_before_it_ends(site: Site) -> None:
    assert files_synced_by_a_short_process(site) > 0
    assert originals_left(site) == []


@pytest.mark.req("D5.durability_process")
def test_a_socket_without_its_process_is_no_background_process(site: Site) -> None:
    site.hook("SessionStart")
    pid = site.keeper_pid()
    assert pid is not None
    with gone(pid):
        os.kill(pid, signal.SIGKILL)
    assert Path(site.folder, "keeper.sock").exists()
    assert files_synced_by_a_short_process(site) > 0
    assert originals_left(site) == []


@pytest.mark.req("D5.durability_process")
def test_what_a_background_process_did_not_sync_is_kept_for_the_next_process(site: Site) -> None:
    site.hook("SessionStart")
    pid = site.keeper_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert files_synced_by_a_short_process(site) == 0
    assert len(originals_left(site)) == 1
    with gone(pid):
        os.kill(pid, signal.SIGKILL)
    with mulligan.open(site.root, store=site.store) as product:
        assert product.session("s").undo().ok
    assert originals_left(site) == []
    assert (site.root / "a.txt").read_text() == "one\ntwo\n"
