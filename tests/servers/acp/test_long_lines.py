"""Lines over 32 MiB: our agent refuses them, the proxy passes them on unread, and neither grows with them."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from tests.servers.acp.client import AGENT, Client, connected

MIB = 1024 * 1024
LIMIT = 32 * MIB

# Answers each line with its size and digest, and `large` with a line of the size that is asked for.
ECHO = """
import hashlib, json, sys
for line in sys.stdin.buffer:
    frame = json.loads(line) if len(line) < 1_000_000 else {"id": 1_000_000, "method": "long"}
    body = {"bytes": len(line), "digest": hashlib.sha256(line).hexdigest()}
    if frame["method"] == "large":
        body = {"text": "x" * frame["params"]["bytes"]}
    answer = {"jsonrpc": "2.0", "id": frame.get("id"), "result": body}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\\n")
    sys.stdout.buffer.flush()
"""


def _peak_bytes(client: Client) -> int:
    status = Path(f"/proc/{client.process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _line(size_bytes: int, start: bytes) -> bytes:
    """A request of exactly that size, without the end of its line."""
    end = b'"}}'
    return start + b"x" * (size_bytes - len(start) - len(end)) + end


def _send(client: Client, line: bytes) -> None:
    assert client.process.stdin is not None
    client.process.stdin.write(line + b"\n")
    client.process.stdin.flush()


@pytest.mark.req("D14.acp.long_line_refused")
@pytest.mark.parametrize("size", [LIMIT + 1, 100 * MIB])
def test_our_agent_refuses_a_line_over_32_mib_and_goes_on(tmp_path: Path, size: int) -> None:
    (tmp_path / "work").mkdir()
    with connected(tmp_path / "home", "--provider", "mock", cwd=str(tmp_path / "work")) as client:
        start = _peak_bytes(client)
        head = b'{"jsonrpc":"2.0","id":%d,"method":"session/prompt","params":{"text":"'
        _send(client, _line(size, head % 70))
        refused = client.answer(70)["error"]
        assert (refused["code"], refused["data"]) == (-32600, {"status": "line_too_long", "limit_bytes": LIMIT})
        _send(client, _line(size, b'{"params":{"text":"'))
        assert client.ask("session/list")["sessions"] == []
        assert [frame["error"]["code"] for frame in client.frames if frame.get("id", 0) is None] == [-32600]
        assert _peak_bytes(client) - start <= 3 * LIMIT


@pytest.mark.req("D14.acp.long_line_refused")
def test_our_agent_reads_a_line_of_32_mib(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with connected(tmp_path / "home", "--provider", "mock", cwd=str(tmp_path / "work")) as client:
        start = _peak_bytes(client)
        _send(client, _line(LIMIT, b'{"jsonrpc":"2.0","id":70,"method":"unknown","params":{"text":"'))
        assert client.answer(70)["error"]["code"] == -32601
        assert _peak_bytes(client) - start <= 3 * LIMIT + 8 * MIB


@pytest.mark.req("D14.acp.long_line_passed_on")
@pytest.mark.parametrize("size", [LIMIT + 1, 100 * MIB])
def test_the_proxy_passes_on_a_line_over_32_mib_in_both_directions(
    tmp_path: Path, size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    command = [*AGENT, "--", sys.executable, "-c", ECHO]
    with connected(tmp_path / "home", command=command, cwd=str(tmp_path / "work")) as client:
        start = _peak_bytes(client)
        line = _line(size, b'{"jsonrpc":"2.0","id":1000000,"method":"session/prompt","params":{"text":"')
        _send(client, line)
        assert client.answer(1_000_000)["result"] == {"bytes": size + 1, "digest": sha256(line + b"\n").hexdigest()}
        assert client.ask("large", bytes=size) == {"text": "x" * size}
        short = json.dumps({"jsonrpc": "2.0", "id": 71, "method": "after"}).encode()
        _send(client, short)
        assert client.answer(71)["result"]["bytes"] == len(short) + 1
        assert _peak_bytes(client) - start <= 3 * LIMIT
    said = capfd.readouterr().err
    assert said.count("a line of the client has more than 32 MiB") == 1
    assert said.count("a line of the agent has more than 32 MiB") == 1
