"""A file that changes during every read has no earlier content that could be put back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mulligan

SIZE_BYTES = 24 * 1024 * 1024
WRITER = """
import os, sys
handle = os.open(sys.argv[1], os.O_WRONLY)
print("writing", flush=True)
number = 0
while os.getppid() == int(sys.argv[2]):
    os.pwrite(handle, number.to_bytes(8, "big"), 0)
    number += 1
"""


@contextmanager
def written_all_the_time(path: Path) -> Iterator[None]:
    """Another process writes into the file for as long as the block lasts."""
    words = [sys.executable, "-c", WRITER, str(path), str(os.getpid())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        try:
            yield
        finally:
            writer.kill()


@contextmanager
def grown_by_each_read(path: Path, *, until: Path | None = None) -> Iterator[None]:
    """The file gets one byte more right after each read in this process, until that other file exists."""
    really = os.pread

    def grown_after(handle: int, size: int, at: int) -> bytes:
        data = really(handle, size, at)
        if os.readlink(f"/proc/self/fd/{handle}") == str(path) and not (until and until.exists()):
            with open(path, "ab") as file:
                file.write(b".")
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", grown_after)
        yield


@pytest.mark.req("D5.unstable_read")
def test_a_file_tool_refuses_to_write_a_file_that_changes_during_every_read(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    busy = work / "busy.bin"
    with mulligan.open(work, store=tmp_path / "home") as opened:
        code = None
        # A machine that is busy enough may let one whole read pass between two writes; then the write is sound.
        while code is None:
            busy.write_bytes(bytes(SIZE_BYTES))
            with written_all_the_time(busy):
                receipt, _ = opened.session().perform("write_file", {"path": "busy.bin", "content": "ours"})
                code = receipt.error_code
        assert (receipt.status, code) == ("conflict", "path_busy")
        assert busy.stat().st_size == SIZE_BYTES


@pytest.mark.req("D5.unstable_read")
def test_a_file_tool_refuses_to_write_a_file_that_grows_after_each_read(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    busy = work / "busy.bin"
    busy.write_bytes(b"theirs")
    with mulligan.open(work, store=tmp_path / "home") as opened:
        with grown_by_each_read(busy):
            receipt, _ = opened.session().perform("write_file", {"path": "busy.bin", "content": "ours"})
        assert (receipt.status, receipt.error_code) == ("conflict", "path_busy")
        assert busy.read_bytes().rstrip(b".") == b"theirs"


@pytest.mark.req("D5.unstable_read")
def test_a_command_that_changes_such_a_file_lists_it_as_unstable(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    busy = work / "busy.bin"
    with mulligan.open(work, store=tmp_path / "home") as opened:
        reasons: set[str] = set()
        while "unstable" not in reasons:
            busy.write_bytes(bytes(SIZE_BYTES))
            with written_all_the_time(busy), opened.session().call() as call:
                receipt = call.exec(["sh", "-c", "printf x >> busy.bin"])
            reasons = {note["reason"] for note in receipt.coverage or () if note["path"] == "busy.bin"}


@pytest.mark.req("D5.unstable_read")
def test_a_program_under_run_that_changes_such_a_file_lists_it_as_unstable(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    busy = work / "busy.bin"
    environ = {**os.environ, "MULLIGAN_HOME": str(tmp_path / "home")}

    def by_cli(*words: str) -> str:
        command = [sys.executable, "-m", "mulligan", *words]
        return subprocess.run(command, cwd=work, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout

    reasons: set[str] = set()
    while "unstable" not in reasons:
        busy.write_bytes(bytes(SIZE_BYTES))
        with written_all_the_time(busy):
            by_cli("run", "--", "sh", "-c", "printf x >> busy.bin")
        coverage = json.loads(by_cli("log", "--json", "--limit", "1"))[0]["coverage"]
        reasons = {note["reason"] for note in coverage if note["path"] == "busy.bin"}


@pytest.mark.req("D5.unstable_read")
def test_a_command_lists_a_file_that_was_unstable_before_it_and_does_not_restore_it(tmp_path: Path) -> None:
    """The scan before the command read bytes that nobody ever wrote together."""
    work = tmp_path / "work"
    work.mkdir()
    busy = work / "busy.bin"
    busy.write_bytes(b"theirs")
    with mulligan.open(work, store=tmp_path / "home") as opened:
        session = opened.session()
        with session.call() as call:
            call.exec(["true"], strategy="scan")
        os.utime(busy, ns=(1, 1))
        command = "touch new.txt; printf after > busy.bin"
        with grown_by_each_read(busy, until=work / "new.txt"), session.call() as call:
            receipt = call.exec(["sh", "-c", command], strategy="scan")
        assert {note["path"]: note["reason"] for note in receipt.coverage or ()} == {"busy.bin": "unstable"}
        session.undo()
        assert sorted(os.listdir(work)) == ["busy.bin"] and busy.read_bytes() == b"after"


@pytest.mark.req("D5.unstable_read")
@pytest.mark.parametrize("strategy", ["notify", "watch", "scan"])
def test_a_command_may_write_a_file_that_another_program_changes_all_the_time(tmp_path: Path, strategy: Any) -> None:
    """The file differs from its record, and no read of it is whole, but the command does its work."""
    work = tmp_path / "work"
    work.mkdir()
    busy = work / "busy.bin"
    with mulligan.open(work, store=tmp_path / "home") as opened:
        session = opened.session()
        assert session.perform("write_file", {"path": "busy.bin", "content": "theirs"})[0].ok
        busy.write_bytes(b"theirs, later")
        with grown_by_each_read(busy), session.call() as call:
            receipt = call.exec(["sh", "-c", "printf after >> busy.bin"], strategy=strategy)
        assert receipt.exit_code == 0
        assert {"path": "busy.bin", "reason": "unstable"} in (receipt.coverage or ())
        assert b"after" in busy.read_bytes()
