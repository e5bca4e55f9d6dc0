"""One process of `compare.py`: warms one kind of request up, then measures it in one of three ways.

    compare_worker.py SCENARIO time|count|trace BASE TIMES
    compare_worker.py serve COUNTERS ARGUMENT...        a `mulligan` that counts into a shared file

`time` measures processor time and wall time with nothing else in the way. `count` counts statements, written pages and
calls of functions. `trace` brackets each request with two marked system calls, for `strace`.
It uses public names only (`mulligan.open`, the command line, the wire), so that it runs on checkouts whose modules have
other names.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import runpy
import socket
import stat
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import apsw

import mulligan

SOURCE = str(Path(mulligan.__file__).parent) + os.sep
WARM = 10
BEGIN, END = "/mulligan-compare-begin", "/mulligan-compare-end"
COUNTS = ("statements", "pages", "call_events", "call_files")


def nothing(_: int) -> None:
    """Most requests need no preparation."""


@dataclass(frozen=True)
class Scenario:
    """A request that can be made again and again, and what must be there before each one."""

    request: Callable[[int], object]
    prepare: Callable[[int], object] = nothing
    server: subprocess.Popen[bytes] | None = None
    """The process that does the work, if it is not this one."""


class Counters:
    """Four numbers in a file that a server and the process that asks it share, and the number of the request."""

    def __init__(self, path: str) -> None:
        with open(path, "a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._numbers = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
        self._files: set[str] = set()
        self._files_of = 0
        self._pages: WeakKeyDictionary[apsw.Connection, int] = WeakKeyDictionary()

    def begin(self) -> None:
        """The functions that are called from now on are those of a new request."""
        self._numbers[4] += 1
        self._numbers[3] = 0

    def read(self) -> list[int]:
        return list(self._numbers[:4])

    def start(self) -> None:
        """Counts what this process does from now on."""
        apsw.connection_hooks.append(self._watch)
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _watch(self, connection: apsw.Connection) -> None:
        connection.trace_v2(apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE, self._statement)

    def _statement(self, event: dict[str, Any]) -> None:
        if event["code"] == apsw.SQLITE_TRACE_STMT:
            self._numbers[0] += 1
            return
        # After each statement, because a connection that is closed answers no more.
        connection = event["connection"]
        written, _ = connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE)
        self._numbers[1] += written - self._pages.get(connection, 0)
        self._pages[connection] = written

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            self._numbers[2] += 1
            if self._files_of != self._numbers[4]:
                self._files_of = self._numbers[4]
                self._files.clear()
            self._files.add(frame.f_code.co_filename)
            self._numbers[3] = len(self._files)


class TempProject:
    """Where the requests of this process work."""

    def __init__(self, base: str, *, counting: bool) -> None:
        self.root = Path(base, "work")
        self.home = os.environ["MULLIGAN_HOME"]
        self.counters_path = str(Path(base, "counters"))
        self.counting = counting
        self.root.mkdir()
        for number in range(10):
            (self.root / f"{number}.txt").write_text("one\ntwo\nthree\n" * 20)

    def session(self) -> Any:
        return mulligan.open(self.root, store=self.home).session("bench")

    def command(self, *arguments: str) -> list[str]:
        """What starts `mulligan`, counting if counts are wanted."""
        if self.counting:
            return [sys.executable, __file__, "serve", self.counters_path, *arguments]
        return [sys.executable, "-m", "mulligan", *arguments]


def write_file(project: TempProject) -> Scenario:
    session = project.session()

    def request(number: int) -> None:
        with session.call() as call:
            assert call.write_file("a.txt", f"{number}\n" * 200).ok

    return Scenario(request)


def edit_file(project: TempProject) -> Scenario:
    session = project.session()

    def prepare(number: int) -> None:
        (project.root / "0.txt").write_text(f"before {number}\n" * 3 + "here\n")

    def request(_: int) -> None:
        with session.call() as call:
            assert call.edit_file("0.txt", "here", "there").ok

    return Scenario(request, prepare)


def patch_ten_files(project: TempProject) -> Scenario:
    session = project.session()
    for one in range(10):
        (project.root / f"{one}.txt").write_text("-1\n")

    def request(number: int) -> None:
        parts = [f"*** Update File: {one}.txt\n@@\n-{number - 1}\n+{number}\n" for one in range(10)]
        with session.call() as call:
            receipt = call.apply_patch("*** Begin Patch\n" + "".join(parts) + "*** End Patch\n")
            assert receipt.ok, receipt

    return Scenario(request)


def exec_one_file(project: TempProject) -> Scenario:
    session = project.session()

    def request(number: int) -> None:
        with session.call() as call:
            assert call.exec(["sh", "-c", f"echo {number} > made.txt"]).ok

    return Scenario(request)


def undo(project: TempProject) -> Scenario:
    session = project.session()

    def prepare(number: int) -> None:
        with session.call() as call:
            assert call.write_file("a.txt", f"{number}\n" * 200).ok

    def request(_: int) -> None:
        assert session.undo().ok

    return Scenario(request, prepare)


def read_file(project: TempProject) -> Scenario:
    session = project.session()

    def request(_: int) -> None:
        with session.call() as call:
            assert call.read_file("0.txt").ok

    return Scenario(request)


def message(project: TempProject) -> Scenario:
    session = project.session()
    return Scenario(lambda number: session.inject({"role": "user", "content": f"message {number}"}))


def verb(project: TempProject, *arguments: str) -> None:
    """The command line, in this process, so that starting Python is not measured."""
    from mulligan.__main__ import main

    sys.argv = ["mulligan", *arguments, "--json", "--root", str(project.root)]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)


def status(project: TempProject) -> Scenario:
    verb(project, "call", "write_file", "--args", '{"path": "a.txt", "content": "one"}')
    return Scenario(lambda _: verb(project, "status"))


def cli_undo(project: TempProject) -> Scenario:
    def prepare(number: int) -> None:
        verb(project, "call", "write_file", "--args", json.dumps({"path": "a.txt", "content": str(number)}))

    return Scenario(lambda _: verb(project, "undo"), prepare)


def mcp(project: TempProject, tool: str, arguments: Callable[[int], dict[str, object]]) -> Scenario:
    """Over standard input, with a server of its own."""
    pipe = subprocess.PIPE
    command = project.command("mcp", "--root", str(project.root))
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    ids = iter(range(1_000_000))

    def ask(method: str, params: object) -> Any:
        assert server.stdin is not None and server.stdout is not None
        frame = {"jsonrpc": "2.0", "id": next(ids), "method": method, "params": params}
        server.stdin.write(json.dumps(frame).encode() + b"\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    client = {"name": "bench", "version": "1"}
    ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})

    def request(number: int) -> None:
        answer = ask("tools/call", {"name": tool, "arguments": arguments(number)})
        assert not answer["result"].get("isError"), answer

    return Scenario(request, server=server)


def mcp_read_file(project: TempProject) -> Scenario:
    return mcp(project, "read_file", lambda _: {"path": "0.txt"})


def mcp_workspace_write_file(project: TempProject) -> Scenario:
    return mcp(project, "workspace_write_file", lambda number: {"path": f"new-{number}.txt", "content": f"{number}\n"})


def listening_below(folder: str) -> str | None:
    """The socket below a folder on which a process answers by now."""
    for file in Path(folder).rglob("*"):
        with suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as speaker:
            if stat.S_ISSOCK(file.stat().st_mode):
                speaker.connect(str(file))
                return str(file)
    return None


def hook_pair(project: TempProject) -> Scenario:
    """What the two hooks of one tool call send, to a background process that is there already."""
    command = project.command("hooks", "keep", "--store", project.home)
    keeper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while (address := listening_below(project.home)) is None:
        with suppress(subprocess.TimeoutExpired):
            raise SystemExit(f"the background process ended with {keeper.wait(timeout=0.01)}")

    def send(event: dict[str, object]) -> None:
        fields = f"1 claude - {os.getpid()} {time.time_ns()} 60000\n"
        data = fields.encode() + json.dumps(event).encode()
        with socket.socket(socket.AF_UNIX) as speaker:
            speaker.connect(address)
            speaker.sendall(len(data).to_bytes(8, "big") + data)
            answer = speaker.recv(1 << 16)
        assert answer[:1] == b"0", answer

    root = str(project.root)

    def request(number: int) -> None:
        given = {"file_path": f"{root}/0.txt", "content": str(number)}
        told = {"session_id": "s", "cwd": root, "tool_name": "Write", "tool_use_id": f"t{number}", "tool_input": given}
        send({**told, "hook_event_name": "PreToolUse"})
        Path(root, "0.txt").write_text(str(number))
        send({**told, "hook_event_name": "PostToolUse"})

    return Scenario(request, server=keeper)


SCENARIOS: dict[str, Callable[[TempProject], Scenario]] = {
    make.__name__: make
    for make in (
        *(write_file, edit_file, patch_ten_files, exec_one_file, undo, read_file, status, cli_undo),
        *(mcp_read_file, mcp_workspace_write_file, hook_pair, message),
    )
}


@contextmanager
def silent() -> Iterator[None]:
    """What a verb prints does not belong into our answer."""
    kept = os.dup(1)
    hole = os.open(os.devnull, os.O_WRONLY)
    os.dup2(hole, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(hole)


def cpu_us(server: subprocess.Popen[bytes] | None) -> float:
    """Processor time of the server; or of this process and of the children that it has waited for."""
    if server is not None:
        # The number of the clock of another process, as the kernel's <linux/posix-timers.h> makes it.
        return time.clock_gettime_ns(~server.pid << 3 | 2) / 1000
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() / 1000 + (children.ru_utime + children.ru_stime) * 1e6


def timed(scenario: Scenario, numbers: range) -> dict[str, float]:
    cpu, wall = [], []
    for number in numbers:
        scenario.prepare(number)
        began_cpu, began = cpu_us(scenario.server), time.perf_counter_ns()
        scenario.request(number)
        wall.append((time.perf_counter_ns() - began) / 1000)
        cpu.append(cpu_us(scenario.server) - began_cpu)
    return {"cpu_us": statistics.median(cpu), "wall_us": statistics.median(wall)}


def counted(scenario: Scenario, counters: Counters, numbers: range) -> dict[str, float]:
    found: dict[str, list[int]] = {name: [] for name in COUNTS}
    for number in numbers:
        scenario.prepare(number)
        counters.begin()
        before = counters.read()
        scenario.request(number)
        for name, old, new in zip(COUNTS, before, counters.read(), strict=True):
            found[name].append(new - old)
    return {name: statistics.median(values) for name, values in found.items()}


def traced(scenario: Scenario, numbers: range) -> dict[str, float]:
    for number in numbers:
        scenario.prepare(number)
        os.access(BEGIN, os.F_OK)
        scenario.request(number)
        os.access(END, os.F_OK)
    return {}


def serve(counters: str, *arguments: str) -> None:
    Counters(counters).start()
    sys.argv = ["mulligan", *arguments]
    runpy.run_module("mulligan", run_name="__main__")


def main() -> None:
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
        return
    name, mode, base, times = sys.argv[1:]
    project = TempProject(base, counting=mode == "count")
    counters = Counters(project.counters_path)
    if project.counting:
        counters.start()
    with silent():
        scenario = SCENARIOS[name](project)
        for number in range(WARM):
            scenario.prepare(number)
            scenario.request(number)
        numbers = range(WARM, WARM + int(times))
        if mode == "time":
            found = timed(scenario, numbers)
        elif mode == "trace":
            found = traced(scenario, numbers)
        else:
            found = counted(scenario, counters, numbers)
    print(json.dumps({"source": SOURCE, **found}))
    sys.stdout.flush()
    if scenario.server is not None:
        scenario.server.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
