"""One process of `compare.py`: warms one kind of request up, then measures it. It uses public names only.

compare_worker.py SCENARIO measure|only BASE TIMES
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import apsw

import mulligan

SOURCE = str(Path(mulligan.__file__).parent)
Request = Callable[[int], object]
_WARM = 10
_servers: list[subprocess.Popen[bytes]] = []


class Counted:
    """Statements that SQLite runs in this process."""

    def __init__(self) -> None:
        self.statements = 0
        apsw.connection_hooks.append(self._watch)

    def _watch(self, connection: apsw.Connection) -> None:
        connection.trace_v2(apsw.SQLITE_TRACE_STMT, self._note)

    def _note(self, _: object) -> None:
        self.statements += 1


def workspace(base: str) -> tuple[mulligan.Mulligan, Any]:
    root = Path(base, "work")
    root.mkdir(exist_ok=True)
    for number in range(10):
        (root / f"{number}.txt").write_text("one\ntwo\nthree\n" * 20)
    product = mulligan.open(root, store=os.environ["MULLIGAN_HOME"])
    return product, product.session("bench")


def write_file(base: str) -> Request:
    _, session = workspace(base)

    def request(number: int) -> None:
        with session.call() as call:
            assert call.write_file("a.txt", f"{number}\n" * 200).ok

    return request


def edit_file(base: str) -> Request:
    _, session = workspace(base)

    def request(number: int) -> None:
        Path(base, "work", "0.txt").write_text(f"before {number}\n" * 3 + "here\n")
        with session.call() as call:
            assert call.edit_file("0.txt", "here", "there").ok

    return request


def patch_ten_files(base: str) -> Request:
    _, session = workspace(base)

    def request(number: int) -> None:
        parts = [f"*** Update File: {one}.txt\n@@\n-{number - 1}\n+{number}\n" for one in range(10)]
        if number == 0:
            for one in range(10):
                Path(base, "work", f"{one}.txt").write_text("-1\n")
        with session.call() as call:
            receipt = call.apply_patch("*** Begin Patch\n" + "".join(parts) + "*** End Patch\n")
            assert receipt.ok, receipt

    return request


def exec_one_file(base: str) -> Request:
    _, session = workspace(base)

    def request(number: int) -> None:
        with session.call() as call:
            assert call.exec(["sh", "-c", f"echo {number} > made.txt"]).ok

    return request


def undo(base: str) -> Request:
    _, session = workspace(base)

    def request(number: int) -> None:
        with session.call() as call:
            assert call.write_file("a.txt", f"{number}\n" * 200).ok
        assert session.undo().ok

    return request


def read_file(base: str) -> Request:
    _, session = workspace(base)

    def request(_: int) -> None:
        with session.call() as call:
            assert call.read_file("0.txt").ok

    return request


def status(base: str) -> Request:
    product, session = workspace(base)
    with session.call() as call:
        assert call.write_file("a.txt", "one\n").ok
    product.close()
    from mulligan.cli import cli

    def request(_: int) -> None:
        cli.main(["status", "--json", "--root", str(Path(base, "work"))], standalone_mode=False)

    return request


def mcp(base: str, tool: str, arguments: Callable[[int], dict[str, object]]) -> Request:
    """Over standard input, against a server of its own."""
    workspace(base)[0].close()
    command = [sys.executable, "-m", "mulligan", "mcp", "--root", str(Path(base, "work"))]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    _servers.append(server)
    ids = iter(range(1_000_000))

    def ask(method: str, params: object) -> Any:
        assert server.stdin is not None and server.stdout is not None
        frame = {"jsonrpc": "2.0", "id": next(ids), "method": method, "params": params}
        server.stdin.write(json.dumps(frame).encode() + b"\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    ask(
        "initialize",
        {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}},
    )

    def request(number: int) -> None:
        answer = ask("tools/call", {"name": tool, "arguments": arguments(number)})
        assert not answer["result"].get("isError"), answer

    return request


def mcp_read_file(base: str) -> Request:
    return mcp(base, "read_file", lambda _: {"path": "0.txt"})


def mcp_workspace_write_file(base: str) -> Request:
    return mcp(base, "workspace_write_file", lambda number: {"path": f"new-{number}.txt", "content": f"{number}\n"})


def hook_pair(base: str) -> Request:
    """What two hooks of one tool call send, to a background process that is there."""
    workspace(base)[0].close()
    home = os.environ["MULLIGAN_HOME"]
    command = [sys.executable, "-m", "mulligan", "hooks", "keep", "--store", home]
    keeper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _servers.append(keeper)
    while not (found := list(Path(home, "hooks").glob("**/keeper.sock"))):
        with suppress(subprocess.TimeoutExpired):
            raise SystemExit(f"the background process ended with {keeper.wait(timeout=0.01)}")
    root = str(Path(base, "work"))

    def send(event: dict[str, object]) -> None:
        fields = f"1 claude - {os.getpid()} {time.time_ns()} 60000\n"
        data = fields.encode() + json.dumps(event).encode()
        with socket.socket(socket.AF_UNIX) as speaker:
            speaker.connect(str(found[0]))
            speaker.sendall(len(data).to_bytes(8, "big") + data)
            answer = speaker.recv(1 << 16)
        assert answer[:1] == b"0", answer

    def request(number: int) -> None:
        given = {"file_path": f"{root}/0.txt", "content": str(number)}
        told = {"session_id": "s", "cwd": root, "tool_name": "Write", "tool_use_id": f"t{number}", "tool_input": given}
        send({**told, "hook_event_name": "PreToolUse"})
        Path(root, "0.txt").write_text(str(number))
        send({**told, "hook_event_name": "PostToolUse"})

    return request


def message(base: str) -> Request:
    _, session = workspace(base)
    return lambda number: session.inject({"role": "user", "content": f"message {number}"})


SCENARIOS: dict[str, Callable[[str], Request]] = {
    act.__name__: act
    for act in (
        write_file,
        edit_file,
        patch_ten_files,
        exec_one_file,
        undo,
        read_file,
        status,
        mcp_read_file,
        mcp_workspace_write_file,
        hook_pair,
        message,
    )
}


@contextmanager
def silent() -> Iterator[None]:
    """What a verb prints is not ours to print."""
    kept = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def changed_pages(home: str) -> int:
    """Pages in the write-ahead log, each 4 096 bytes and a header."""
    try:
        return os.path.getsize(os.path.join(home, "store.db-wal")) // (4096 + 24)
    except FileNotFoundError:
        return 0


def measured(request: Request, counted: Counted, times: int) -> dict[str, float]:
    numbers = iter(range(1_000_000))
    with silent():
        for _ in range(_WARM):
            request(next(numbers))
        pages = changed_pages(os.environ["MULLIGAN_HOME"])
        statements, cpu, wall = counted.statements, [], []
        for _ in range(times):
            began_cpu, began = time.process_time_ns(), time.perf_counter_ns()
            request(next(numbers))
            wall.append((time.perf_counter_ns() - began) / 1000)
            cpu.append((time.process_time_ns() - began_cpu) / 1000)
        return {
            "statements": (counted.statements - statements) / times,
            "pages": max(0, changed_pages(os.environ["MULLIGAN_HOME"]) - pages) / times,
            "cpu_us": sorted(cpu)[times // 2],
            "wall_us": sorted(wall)[times // 2],
            "call_events": call_events(request, next(numbers)),
        }


def call_events(request: Request, number: int) -> int:
    found = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            found += 1

    sys.setprofile(count)
    try:
        request(number)
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    scenario, mode, base, times = sys.argv[1:]
    counted = Counted()
    request = SCENARIOS[scenario](base)
    if mode == "measure":
        print(json.dumps(measured(request, counted, int(times))))
    else:
        with silent():
            for number in range(int(times)):
                request(number)
        print("{}")
    sys.stdout.flush()
    for server in _servers:
        server.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
