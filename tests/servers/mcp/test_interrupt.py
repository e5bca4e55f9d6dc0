"""SIGINT ends `mulligan mcp`, and what it was doing leaves no trace."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.servers.mcp.server_process import CLIENT, SERVER, environment, listening, on_stdio

ENDS_WITHIN_S = 300
"""Long for a busy machine: a server that does not end is found all the same."""


@pytest.mark.req("D14.mcp.interrupt")
@pytest.mark.parametrize("progress", ["greeted", "listed", "called", "running"])
def test_an_interrupt_ends_the_server_on_stdio(root: Path, tmp_path: Path, progress: str) -> None:
    with on_stdio(root, tmp_path / "home") as peer:
        peer.greet()
        if progress != "greeted":
            peer.result("tools/list")
        if progress == "called":
            assert not peer.call("write_file", path="done", content="x")["isError"]
        if progress == "running":
            command = {"command": "echo half > half; echo begun; exec sleep 600"}
            peer.ask("tools/call", {"name": "shell", "arguments": command, "_meta": {"progressToken": 1}})
            assert peer.read()["method"] == "notifications/progress"
        peer.process.send_signal(signal.SIGINT)
        assert peer.process.wait(ENDS_WITHIN_S) == 130
        assert peer.process.stderr is not None
        assert b"Traceback" not in peer.process.stderr.read()
    assert not (root / "half").exists()
    assert (root / "done").exists() is (progress == "called")


@pytest.mark.req("D14.mcp.interrupt")
def test_an_interrupt_ends_the_server_on_http_while_a_client_listens(root: Path, tmp_path: Path) -> None:
    command = [*SERVER, "--root", str(root), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(tmp_path / "home")) as process:
        server = listening(process)
        headers = {
            "authorization": f"Bearer {server.keys[0]}",
            "accept": "application/json, text/event-stream",
        }
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT}
        begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        with httpx.Client(timeout=None) as client:
            session = client.post(server.address, json=begin, headers=headers).headers["mcp-session-id"]
            listens = {**headers, "mcp-session-id": session, "mcp-protocol-version": "2025-11-25"}
            with client.stream("GET", server.address, headers=listens) as stream:
                assert stream.status_code == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(ENDS_WITHIN_S) in (0, 130)
