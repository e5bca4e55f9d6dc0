"""A program that has a file open for writing goes on writing into it after an undo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.history.tables import changes_of
from mulligan.testing import FaultPlan
from mulligan.values.entries import FileEntry
from tests.temp_workspace import TempWorkspace, open_temp_workspace

PROGRAM = """
import os, sys
handle = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
print("open", flush=True)
for line in sys.stdin:
    verb, _, text = line.rstrip("\\n").partition(" ")
    if verb == "truncate":
        os.ftruncate(handle, 0)
    elif verb == "replace":
        with open(sys.argv[1] + ".new", "w") as new:
            new.write("replaced\\n")
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        handle = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    if text:
        os.write(handle, text.encode() + b"\\n")
    print("done", flush=True)
"""


class Program:
    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "open"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, verb: str, text: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {text}\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def end(self) -> None:
        self._process.communicate()


class Scene:
    def __init__(self, base: Path) -> None:
        self.root = base / "work"
        self.root.mkdir()
        self.log = self.root / "log"
        self.log.write_text("start\n")
        self.m = mulligan.open(str(self.root), store=str(base / "home"))
        self.session = self.m.session("s")
        self.programs: list[Program] = []

    def program(self) -> Program:
        self.programs.append(Program(self.log))
        return self.programs[-1]

    def command(self) -> None:
        with self.session.call("command") as call:
            assert call.exec(["sh", "-c", "echo by the call >> log"]).ok


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for program in scene.programs:
        program.end()
    scene.m.close()


def reasons(done: Any) -> list[tuple[str, str, str | None]]:
    return [(one.path, one.outcome, one.reason) for one in done.outcomes]


@pytest.mark.req("D5.open_file_in_place")
@pytest.mark.parametrize("verb", ["undo", "restore", "rollback"])
def test_what_a_program_writes_after_the_undo_is_in_the_file(scene: Scene, verb: str) -> None:
    program = scene.program()
    scene.command()
    inode = os.stat(scene.log).st_ino
    done = scene.session.restore("command") if verb == "restore" else getattr(scene.session, verb)()
    assert reasons(done) == [("log", "restored", None)]
    assert done.to_json()["race_window"] is True
    program.do("write", "after the undo")
    assert (scene.log.read_text(), os.stat(scene.log).st_ino) == ("start\nafter the undo\n", inode)
    assert scene.session.redo().ok
    program.do("write", "after the redo")
    assert scene.log.read_text() == "start\nby the call\nafter the undo\nafter the redo\n"


@pytest.mark.req("D5.open_file_in_place")
def test_what_it_wrote_before_the_undo_stays_too(scene: Scene) -> None:
    program = scene.program()
    scene.command()
    program.do("write", "before the undo")
    assert reasons(scene.session.undo()) == [("log", "merged", None)]
    program.do("write", "after the undo")
    assert scene.log.read_text() == "start\nbefore the undo\nafter the undo\n"


@pytest.mark.req("D5.open_file_in_place")
def test_what_it_writes_in_the_middle_of_the_undo_stays_too(tmp_path: Path) -> None:
    plan = FaultPlan()
    workspace = open_temp_workspace(tmp_path, steps=plan)
    (workspace.root / "log").write_text("start\n")
    program = Program(workspace.root / "log")
    with workspace.session().call() as call:
        assert call.exec(["sh", "-c", "echo by the call >> log"]).ok
    plan.act(lambda step, _: program.do("write", "meanwhile") if step == "in_place.open" else None, lasting=True)
    done = workspace.session().undo()
    assert done.ok and done.race_window
    assert (workspace.root / "log").read_text() == "start\nmeanwhile\n"
    assert contents_on_record(workspace, done.call_id) == b"start\nmeanwhile\n"
    program.end()
    workspace.close()


def contents_on_record(workspace: TempWorkspace, call: str | None) -> bytes:
    """What the record says that a call has left in its first file."""
    with workspace.open_root.ledger.store.read() as tx:
        entry = changes_of(tx, str(call))[0].after
    assert isinstance(entry, FileEntry)
    return workspace.open_root.ledger.blobs.read(entry.digest)


@pytest.mark.req("D6.reason_file_in_use")
@pytest.mark.parametrize("verb", ["truncate", "replace"])
def test_a_file_that_it_truncated_or_replaced_stays_as_it_is(scene: Scene, verb: str) -> None:
    (scene.root / "other").write_text("other\n")
    program = scene.program()
    with scene.session.call() as call:
        assert call.exec(["sh", "-c", "echo by the call >> log; echo by the call >> other"]).ok
    program.do(verb, "its own")
    before = scene.log.read_bytes()
    done = scene.session.undo()
    assert not done.ok
    assert reasons(done) == [("log", "conflicted", "file_in_use"), ("other", "restored", None)]
    program.do("write", "more")
    assert scene.log.read_bytes() == before + b"more\n"


@pytest.mark.req("D5.open_file_in_place")
def test_a_file_that_is_not_open_is_exchanged(scene: Scene) -> None:
    scene.command()
    inode = os.stat(scene.log).st_ino
    done = scene.session.undo()
    assert done.ok and "race_window" not in done.to_json()
    assert os.stat(scene.log).st_ino != inode
