"""A history with every kind of call, run in processes of its own while its disk operations are recorded.

    python tests/power/history.py BASE LOG MODE SEED SEGMENT

BASE holds the user's files in `tree` and gets Mulligan's store in `state`. A segment is what one process does; the
first one ends by its own kill -9 in the middle of a call, so that the second begins with recovery.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, cast

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.power.disk_states import Mode, read_tree
from tests.power.recorder import Recorder, install, node_at

if TYPE_CHECKING:
    import mulligan

EXECS = ("exec notify", "exec overlay", "exec watch", "exec scan")
KINDS = (
    *("open", "write", "edit", "patch", "delete", "move"),
    *EXECS,
    *("abort", "recovery", "undo", "redo", "restore", "rollback", "rewind", "fork", "merge", "gc"),
)
SEGMENTS = 3
LARGE_BYTES = 150_000
_START = datetime(2026, 1, 1, tzinfo=UTC)


def plant(base: str, seed: int) -> None:
    """The files that the user has before Mulligan comes. They have been on the disk for a long time."""
    random = Random(seed)
    for path, content in starting_files(random).items():
        full = os.path.join(base, "tree", path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as file:
            file.write(content)


def starting_files(random: Random) -> dict[str, bytes]:
    files = {f"src/m{i}.py": _lines(f"m{i}", 6 + random.randrange(40)) for i in range(8)}
    files |= {f"docs/d{i}.md": _lines(f"d{i}", 3 + random.randrange(8)) for i in range(4)}
    files |= {f"data/large{i}.bin": random.randbytes(LARGE_BYTES) for i in range(2)}
    return files | {"notes.txt": b"one\ntwo\nthree\n", "old/gone.txt": b"to be deleted\n", "old/kept.txt": b"kept\n"}


def _lines(name: str, count: int) -> bytes:
    return "".join(f"{name} line {i}\n" for i in range(count)).encode()


class Planned(Exception):
    """The tool of this call fails on purpose."""


class Ids:
    """Ids that follow from the seed. Those of a later segment come later."""

    def __init__(self, random: Random, serial: int) -> None:
        self._random = random
        self._born_ms = int(_START.timestamp() * 1000) + serial * 3_600_000

    def new(self) -> str:
        self._born_ms += 1
        tail = f"{self._random.getrandbits(62) | 1 << 63:016x}"
        born = f"{self._born_ms:012x}"
        return f"{born[:8]}-{born[8:]}-7000-{tail[:4]}-{tail[4:]}"


@dataclass
class History:
    """The steps, and what they are done with."""

    base: str
    mode: str
    random: Random
    recorder: Recorder
    opened: mulligan.Mulligan = field(init=False)
    serial: int = 0
    last: Any = None

    def open(self) -> None:
        import mulligan
        from mulligan.testing import SteppingClock

        tree, state = os.path.join(self.base, "tree"), os.path.join(self.base, "state")
        clock, ids = SteppingClock(_START + timedelta(hours=self.serial)), Ids(self.random, self.serial)
        durability = cast(Mode, self.mode)
        self.opened = mulligan.open(tree, store=state, durability=durability, clock=clock, ids=ids)
        self.session = self.opened.session("agent")

    @contextmanager
    def step(self, kind: str) -> Iterator[list[str]]:
        """One step of the history. The ids of the calls that it has made are acknowledged at its end."""
        self.serial += 1
        self.recorder.mark("begin", kind)
        acknowledged: list[str] = []
        yield acknowledged
        self.recorder.mark("end", kind, tuple(acknowledged))

    def text(self) -> str:
        return f"version {self.serial}.{self.random.randrange(1000)}\n" * (1 + self.random.randrange(60))

    @contextmanager
    def call(self, kind: str) -> Iterator[Any]:
        with self.step(kind) as acknowledged:
            with self.session.call(kind) as call:
                yield call
            acknowledged.append(call.id)
        self.last = call.id

    # One method for each kind of call.

    def write(self) -> None:
        with self.call("write") as call:
            _ok(call.write_file("notes.txt", self.text()))
            _ok(call.write_file(f"new/deep{self.serial}/made.txt", self.text(), create_parents=True))
        with self.call("write") as call:
            _ok(call.write_file("data/large0.bin", self.random.randbytes(LARGE_BYTES)))
        with self.call("write") as call:
            _ok(call.write_file("notes.txt", self.text()))

    def edit(self) -> None:
        with self.call("edit") as call:
            _ok(call.edit_file("src/m0.py", "m0 line 1\n", f"m0 edited in {self.serial}\nm0 line 1\n"))
            _ok(call.edit_file("docs/d0.md", "d0 line 0\n", f"d0 line 0\nd0 edited in {self.serial}\n"))

    def patch(self) -> None:
        added, moved = f"patched/p{self.serial}.txt", f"src/moved{self.serial}.py"
        patch = (
            "*** Begin Patch\n"
            f"*** Add File: {added}\n+added by a patch\n"
            f"*** Update File: src/m1.py\n@@\n-m1 line 2\n+m1 line 2\n+m1 patched in {self.serial}\n"
            f"*** Update File: src/m2.py\n*** Move to: {moved}\n@@\n-m2 line 0\n+m2 moved\n"
            "*** Delete File: docs/d1.md\n"
            "*** End Patch\n"
        )
        with self.call("patch") as call:
            _ok(call.apply_patch(patch))
        with self.call("patch") as call:
            again = f"*** Begin Patch\n*** Update File: {moved}\n*** Move to: src/m2.py\n"
            again += "@@\n-m2 moved\n+m2 line 0\n*** Add File: docs/d1.md\n+d1 again\n*** End Patch\n"
            _ok(call.apply_patch(again))

    def delete(self) -> None:
        with self.call("delete") as call:
            _ok(call.delete("old", recursive=True))
        with self.call("delete") as call:
            _ok(call.delete("src/m3.py"))
        with self.call("write") as call:
            _ok(call.write_file("src/m3.py", self.text()))
            _ok(call.write_file("old/gone.txt", self.text(), create_parents=True))

    def move(self) -> None:
        with self.call("move") as call:
            _ok(call.move("docs/d2.md", "src/d2.md"))
            _ok(call.move("src/m4.py", "src/m5.py", overwrite=True))
        with self.call("move") as call:
            _ok(call.move("src/d2.md", "docs/d2.md"))
            _ok(call.move("src/m5.py", "src/m4.py"))
            _ok(call.write_file("src/m5.py", self.text()))

    def exec(self, kind: str) -> None:
        strategy = kind.partition(" ")[2]
        script = (
            f"echo {strategy} {self.serial} >> src/m6.py; echo new > built.{strategy}.tmp;"
            f" mv built.{strategy}.tmp built.{strategy}; mkdir -p out; echo {self.serial} > out/{strategy};"
            f" echo replaced {self.serial} > t && mv t docs/d3.md"
        )
        with self.call(kind) as call, self.recorder.observing():
            _ok(call.exec(["sh", "-c", script], strategy=strategy))
        script = f"rm -f built.{strategy}; echo again {self.serial} > src/m6.py"
        with self.call(kind) as call, self.recorder.observing():
            _ok(call.exec(["sh", "-c", script], strategy=strategy))

    def abort(self) -> None:
        with self.step("abort"):
            _fails(lambda: self._failing(self._change_a_lot))
        with self.step("abort"):
            _fails(lambda: self._failing(self._run_a_command))

    def _failing(self, act: Callable[[Any], None]) -> None:
        with self.session.call("fails") as call:
            act(call)
            raise Planned

    def _change_a_lot(self, call: Any) -> None:
        _ok(call.write_file("notes.txt", self.text()))
        _ok(call.edit_file("src/m0.py", "m0 line 1\n", "m0 never\n"))
        _ok(call.delete("src/m1.py"))
        _ok(call.move("docs/d0.md", "docs/elsewhere.md"))
        _ok(call.write_file(f"never{self.serial}/made.txt", self.text(), create_parents=True))
        _ok(call.write_file("data/large1.bin", self.random.randbytes(LARGE_BYTES)))

    def _run_a_command(self, call: Any) -> None:
        with self.recorder.observing():
            _ok(call.exec(["sh", "-c", "echo by a failing call > src/m7.py; rm docs/d0.md; echo x > stray"]))

    def undo_operations(self) -> None:
        with self.call("write") as call:
            _ok(call.write_file("notes.txt", self.text()))
            _ok(call.write_file("data/large1.bin", self.random.randbytes(LARGE_BYTES)))
            _ok(call.delete("docs/d2.md"))
        written = self.last
        self._back("undo", self.session.undo)
        self._back("redo", self.session.redo)
        with self.call("write") as call:
            _ok(call.write_file("notes.txt", self.text()))
        self._back("restore", lambda: self.session.restore(written, on_conflict="overwrite"))
        self._back("undo", self.session.undo)
        with self.session.turn("one turn"):
            with self.call("edit") as call:
                _ok(call.edit_file("src/m0.py", "m0 line 1\n", f"m0 turned {self.serial}\nm0 line 1\n"))
            with self.call("write") as call:
                _ok(call.write_file("src/m7.py", self.text()))
        self._back("rollback", self.session.rollback)
        self._back("redo", self.session.redo)
        with self.call("write") as call:
            _ok(call.write_file("src/m7.py", self.text()))
        self._back("rewind", lambda: self.session.rewind(written))

    def undo_a_command(self) -> None:
        with self.call("exec notify") as call, self.recorder.observing():
            _ok(call.exec(["sh", "-c", f"echo {self.serial} >> src/m7.py; rm src/m4.py; echo y > made_by_command"]))
        self._back("undo", self.session.undo)
        self._back("redo", self.session.redo)
        self._back("restore", lambda: self.session.restore(self.last))

    def _back(self, kind: str, act: Callable[[], Any]) -> None:
        with self.step(kind) as acknowledged:
            result = act()
            assert result.ok, result
            acknowledged.append(result.call_id)

    def fork(self) -> None:
        with self.step("fork"):
            shared = self.session.fork()
            assert shared.id
        with self.step("fork"):
            child = self.session.fork(files="copy")
        # The copy of a fork in a rebuilt state is another directory, so its log is not that of the fork.
        with self.step("write"), child.call("in a fork") as call:
            _ok(call.write_file("notes.txt", self.text()))
            _ok(call.write_file(f"forked{self.serial}/made.txt", self.text(), create_parents=True))
            _ok(call.delete("src/m3.py"))
        self._back("merge", child.merge)

    def gc(self) -> None:
        from mulligan.cli import run

        with self.step("gc"):
            options = ["--store", os.path.join(self.base, "state"), "--root", os.path.join(self.base, "tree")]
            assert run(["gc", "--yes", *options]) == 0

    def die(self) -> None:
        """A call that the process does not survive."""
        self.recorder.mark("begin", "recovery")
        with self.session.call("dies") as call:
            self._change_a_lot(call)
            if self.random.random() < 0.5:
                self._run_a_command(call)
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self) -> None:
        with self.step("open"):
            self.open()

    def reopen(self) -> None:
        """Closing syncs, in `process` mode too, and lets originals go."""
        with self.step("open"):
            self.opened.close()
            self.open()

    def recover(self) -> None:
        with self.step("recovery"):
            self.open()


def _ok(receipt: Any) -> None:
    assert receipt.status == "ok", receipt


def _fails(act: Callable[[], None]) -> None:
    try:
        act()
    except Planned:
        return
    raise AssertionError("the call did not fail")


def run_segment(history: History, segment: int) -> None:
    """What one process does. The first two end in kill -9, the last one closes its store."""
    history.recover() if segment else history.begin()
    files = [history.write, history.edit, history.patch, history.delete, history.move]
    commands = [lambda kind=kind: history.exec(kind) for kind in EXECS]
    steps = {
        0: [*files, history.reopen, history.abort, history.die],
        1: [*commands, history.reopen, history.abort, history.undo_a_command, history.die],
        2: [history.undo_operations, history.reopen, history.fork, history.gc, history.write],
    }
    for step in steps[segment]:
        step()
    history.opened.close()


def start_recording(base: str, log: str, *, seed: int) -> None:
    """Make the user's files, and a log that begins with them."""
    os.makedirs(os.path.join(base, "tree"))
    plant(base, seed)
    start = {place: node_at(os.path.join(base, place)) for place in read_tree(base, ".")}
    Recorder(base, log).mark("start", start)


def start_segment(
    base: str, log: str, *, mode: str, seed: int, segment: int, syncs: bool = False
) -> subprocess.Popen[str]:
    """A process for one segment. With `syncs`, what it syncs is really synced and not only recorded."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MULLIGAN", "XDG"))}
    argv = [sys.executable, __file__, base, log, mode, str(seed), str(segment), *(["syncs"] if syncs else [])]
    out, err = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(argv, env=environment, text=True, start_new_session=True, stdout=out, stderr=err)


def record(base: str, log: str, *, mode: str, seed: int) -> None:
    """Run the whole history in processes of its own and leave its log."""
    start_recording(base, log, seed=seed)
    for segment in range(SEGMENTS):
        process = start_segment(base, log, mode=mode, seed=seed, segment=segment)
        printed, _ = process.communicate()
        expected = 0 if segment == SEGMENTS - 1 else -signal.SIGKILL
        if process.returncode != expected:
            raise AssertionError(f"segment {segment} ended with {process.returncode}: {printed}")


def main(base: str, log: str, mode: str, seed: str, segment: str, syncs: str = "") -> None:
    recorder = Recorder(base, log, syncs=bool(syncs))
    install(recorder)
    random = Random(f"{seed}.{segment}")
    run_segment(History(base, mode, random, recorder, serial=100 * int(segment)), int(segment))


if __name__ == "__main__":
    main(*sys.argv[1:])
