"""The MCP server, compared with a plain script, with `git status`, and with its own first request.

python benchmarks/mcp.py [--files 100000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import show

import mulligan
from mulligan.effects.snapshot_tools.context import RequestInfo, SnapshotContext
from mulligan.effects.snapshot_tools.tools import BY_NAME, run_tool
from mulligan.values.ids import SessionId

BARE = """
import json, sys
for line in sys.stdin:
    frame = json.loads(line)
    if "id" in frame:
        print(json.dumps({"jsonrpc": "2.0", "id": frame["id"], "result": {"tools": []}}), flush=True)
"""
STARTS, CALLS, CHECKS = 15, 500, 50
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}


class Host:
    def __init__(self, command: list[str], home: str) -> None:
        env = {**os.environ, "MULLIGAN_HOME": home}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._next = 0

    def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._next += 1
        frame = {"jsonrpc": "2.0", "id": self._next, "method": method, "params": params or {}}
        self.process.stdin.write(json.dumps(frame).encode() + b"\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def timed_ms(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3


def start_up(root: str, home: str) -> None:
    """The ways take turns, so that a busy machine slows all alike."""
    script = os.path.join(sys.prefix, "bin", "mulligan")
    ways = {
        "bare script": [sys.executable, "-c", BARE],
        "mulligan mcp": [script, "mcp", "--root", root],
        "mulligan mcp --profile": [script, "mcp", "--root", root, "--profile", "anthropic"],
        "python -m mulligan mcp": [sys.executable, "-m", "mulligan", "mcp", "--root", root],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(STARTS):
        for name, command in ways.items():
            times[name].append(timed_ms(lambda command=command: _listed(command, home)))  # type: ignore[misc]
    for name, found in times.items():
        show(f"  spawn to tools/list, {name}", sorted(found), "ms")


def _listed(command: list[str], home: str) -> None:
    host = Host(command, home)
    host.ask("initialize", HELLO)
    host.ask("tools/list")
    host.process.kill()
    host.process.wait()


def calls(root: str, home: str) -> None:
    Path(root, "four_kilobytes").write_text("x" * 4096)
    host = Host([sys.executable, "-m", "mulligan", "mcp", "--root", root], home)
    host.ask("initialize", HELLO)
    for tool in ("read_file", "snapshot_file"):
        params = {"name": tool, "arguments": {"path": "four_kilobytes"}}
        host.ask("tools/call", params)
        times = [timed_ms(lambda asked=params: host.ask("tools/call", asked)) for _ in range(CALLS)]  # type: ignore[misc]
        show(f"  {tool} of 4 KB over stdio", sorted(times), "ms")
    host.leave()


def plant(root: Path, count: int) -> None:
    for number in range(count):
        folder = root / f"d{number // 100:05}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number % 100:02}.txt").write_text(f"{number}\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=b", "-c", "user.email=b@b", "commit", "-qm", "b"]):
        subprocess.run(["git", "-c", "gc.auto=0", "-c", "maintenance.auto=false", *words], cwd=root, check=True)


def leases(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        plant(root, count)
        with mulligan.open(str(root), store=str(Path(folder, "store"))) as opened:
            context = SnapshotContext(opened.open_root, opened.boundary)
            named = RequestInfo(SessionId("bench"))
            ask = BY_NAME["snapshot.file"]
            args: dict[str, Any] = {"path": "d00000/f00.txt"}
            args["lease_id"] = run_tool(context, ask, args, named).body["lease_id"]
            for _ in range(3):
                run_tool(context, ask, args, named)
            lease = args["lease_id"]
            show(
                f"  lease check, {count} files",
                sorted(timed_ms(lambda: context.leases.check(lease)) for _ in range(CHECKS)),
                "ms",
            )
            context.close()
        status = ["git", "status", "--porcelain=v1", "-z"]
        times = [timed_ms(lambda: subprocess.run(status, cwd=root, check=True, capture_output=True)) for _ in range(5)]
        show(f"  git status, {count} files", sorted(times), "ms")


def snapshots(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        plant(root, count)
        with mulligan.open(str(root), store=str(Path(folder, "store"))) as opened:
            context = SnapshotContext(opened.open_root, opened.boundary)
            create, args, named = BY_NAME["snapshot.create"], {"paths": ["."]}, RequestInfo(SessionId("bench"))
            first = timed_ms(lambda: run_tool(context, create, args, named))
            again = sorted(timed_ms(lambda: run_tool(context, create, args, named)) for _ in range(10))
            show(f"  snapshot_create of {count} files, first", [first], "ms")
            show(f"  snapshot_create of {count} files, again", again, "ms")
            context.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=100_000)
    files = parser.parse_args().files
    with tempfile.TemporaryDirectory() as folder:
        root = os.path.join(folder, "root")
        os.mkdir(root)
        print("Start-up")
        start_up(root, os.path.join(folder, "home"))
        print("Calls")
        calls(root, os.path.join(folder, "home"))
    print("Trees")
    snapshots(10_000)
    leases(files)


if __name__ == "__main__":
    main()
