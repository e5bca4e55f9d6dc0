"""Servers as hosts start them: a program on stdio that is spoken to line by line, and one that listens on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
from mcp.client.streamable_http import streamable_http_client

SERVER = [sys.executable, "-m", "mulligan", "mcp"]
CLIENT = {"name": "tests", "version": "1"}
MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}

Body = dict[str, Any]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "MULLIGAN_HOME": str(home)}


class Peer:
    """A host on the other end of the pipes. Answers come in any order and are found by their id."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.notices: list[Body] = []
        self._answers: dict[object, Body] = {}
        self._next = 0

    def send(self, frame: object) -> None:
        self.send_bytes(json.dumps(frame).encode())

    def send_bytes(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: object = None) -> int:
        """Send a request; its id."""
        self._next += 1
        self.send({"jsonrpc": "2.0", "id": self._next, "method": method, "params": {} if params is None else params})
        return self._next

    def answer(self, identifier: object) -> Body:
        while identifier not in self._answers:
            frame = self.read()
            if "method" in frame:
                self.notices.append(frame)
            else:
                self._answers[frame["id"]] = frame
        return self._answers.pop(identifier)

    def read(self) -> Body:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server has gone"
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def request(self, method: str, params: object = None) -> Body:
        return self.answer(self.ask(method, params))

    def result(self, method: str, params: object = None) -> Body:
        frame = self.request(method, params)
        assert "result" in frame, frame
        found: Body = frame["result"]
        return found

    def call(self, tool: str, /, meta: Body | None = None, **arguments: Any) -> Body:
        return self.result("tools/call", {"name": tool, "arguments": arguments, "_meta": meta or {}})

    def greet(self, revision: str = "2025-11-25") -> Body:
        found = self.result("initialize", {"protocolVersion": revision, "capabilities": {}, "clientInfo": CLIENT})
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return found

    def leave(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


@contextmanager
def on_stdio(root: Path, home: Path, *options: str) -> Iterator[Peer]:
    command = [*SERVER, "--root", str(root), *options]
    pipes = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipes, stdout=pipes, stderr=pipes, env=environment(home)) as process:
        peer = Peer(process)
        try:
            yield peer
        finally:
            assert process.stdin is not None
            if not process.stdin.closed:
                process.stdin.close()
            process.wait()


class HttpServer(NamedTuple):
    """A server that listens: its address, and the lines that it wrote to stderr before it listened."""

    address: str
    told: str

    @property
    def keys(self) -> list[str]:
        """Every key that the server printed."""
        return re.findall(r"mlg_[A-Za-z0-9_-]{43}", self.told)

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[Any]:
        """A connection of the SDK's client that sends the printed key."""
        headers = {"authorization": f"Bearer {self.keys[0]}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=None) as client,
            streamable_http_client(self.address, http_client=client) as streams,
        ):
            yield streams


@contextmanager
def on_http(root: Path, home: Path, *options: str) -> Iterator[HttpServer]:
    """A server that listens on a free port."""
    command = [*SERVER, "--root", str(root), "--http", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(home)) as process:
        try:
            yield listening(process)
        finally:
            process.terminate()


def listening(process: subprocess.Popen[bytes]) -> HttpServer:
    assert process.stderr is not None
    told: list[str] = []
    for line in process.stderr:
        told.append(line.decode())
        if "running on " in told[-1]:
            return HttpServer(told[-1].split("running on ")[1].split()[0] + "/mcp", "".join(told))
    raise AssertionError(f"the server did not start: {told}")
