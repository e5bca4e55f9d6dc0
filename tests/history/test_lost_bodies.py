"""A power cut took a body from the store: coverage and undo say `lost`, and `verify` does not call it damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

import mulligan

DELETE_AND_DIE = """
import os, sys, mulligan
opened = mulligan.open(sys.argv[1], store=sys.argv[2])
with opened.session("s").call("remove") as call:
    assert call.delete("large.bin").ok
os._exit(0)
"""


@pytest.mark.req("D5.lost_is_said")
def test_undo_and_coverage_say_that_a_power_cut_took_the_content(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    (work / "large.bin").write_bytes(os.urandom(300_000))
    subprocess.run([sys.executable, "-c", DELETE_AND_DIE, str(work), str(home)], check=True)
    # What a disk may leave: the names are there, the bytes of the body are not, and the machine was started again.
    shutil.rmtree(home / "originals")
    for body in (path for path in (home / "blobs").rglob("*") if path.is_file()):
        body.write_bytes(b"")
    apsw.Connection(str(home / "store.db")).execute("UPDATE meta SET value = 'an earlier boot' WHERE key = 'boot'")

    with mulligan.open(work, store=home) as opened:
        undo = opened.session("s").undo()
        assert [(one.path, one.outcome, one.reason) for one in undo.outcomes] == [("large.bin", "skipped", "lost")]
    shown = _mulligan(work, home, "coverage", "--json")
    assert [note for call in json.loads(shown.stdout) for note in call["coverage"]] == [
        {"path": "large.bin", "reason": "lost"}
    ]
    assert _mulligan(work, home, "verify").returncode == 0


CHANGE_AND_DIE = """
import os, sys, mulligan
opened = mulligan.open(sys.argv[1], store=sys.argv[2])
with opened.session("s").call("change") as call:
    assert call.exec(["sh", "-c", "echo more >> large.bin; echo more >> small.txt"], strategy="watch").ok
    os._exit(0)
"""


@pytest.mark.req("D5.lost_is_said")
def test_recovery_puts_back_the_rest_if_a_power_cut_took_a_preimage(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    large = os.urandom(300_000)
    (work / "large.bin").write_bytes(large)
    (work / "small.txt").write_text("small\n")
    subprocess.run([sys.executable, "-c", CHANGE_AND_DIE, str(work), str(home)], check=True)
    for body in (path for path in (home / "blobs").rglob("*") if path.is_file()):
        body.write_bytes(b"")
    apsw.Connection(str(home / "store.db")).execute("UPDATE meta SET value = 'an earlier boot' WHERE key = 'boot'")

    ran = _mulligan(work, home, "log")
    assert "large.bin" in ran.stderr
    assert ((work / "small.txt").read_text(), (work / "large.bin").read_bytes()) == ("small\n", large + b"more\n")
    shown = _mulligan(work, home, "coverage", "--json")
    assert [note for call in json.loads(shown.stdout) for note in call["coverage"]] == [
        {"path": "large.bin", "reason": "lost"}
    ]
    assert _mulligan(work, home, "verify").returncode == 0


def _mulligan(work: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mulligan", *words, "--store", str(home)]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
