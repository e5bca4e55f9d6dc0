"""One conversation, byte for byte: a change in any frame is seen by somebody before a host sees it.

`python -m tests.servers.mcp.test_frames` writes the golden anew, for a change that is meant.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.effects.snapshot_tools.snapshot_workspace import known_repository
from tests.servers.mcp.server_process import CLIENT, Peer, on_stdio

GOLDEN = Path(__file__).parents[2] / "golden" / "mcp_frames.jsonl"
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT}
REQUESTS: tuple[tuple[str, object], ...] = (
    ("initialize", HELLO),
    ("ping", {}),
    ("tools/call", {"name": "read_file", "arguments": {"path": "README.md"}}),
    ("tools/call", {"name": "write_file", "arguments": {"path": "new.txt", "content": "one\n"}}),
    ("tools/call", {"name": "edit_file", "arguments": {"path": "new.txt", "old_string": "two", "new_string": "x"}}),
    ("tools/call", {"name": "read_file", "arguments": {"path": "../out"}}),
    ("tools/call", {"name": "snapshot.list", "arguments": {"path": "."}}),
    ("tools/call", {"name": "snapshot_file", "arguments": {"path": "none"}}),
    ("tools/call", {"name": "history_undo", "arguments": {}}),
    ("tools/call", {"name": "nonsense", "arguments": {}}),
    ("nonsense", {}),
)
# What differs from run to run: ids, times, and the version that is running.
CHANCE = (
    (rb"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", b"<id>"),
    (rb"\d{4}-\d\d-\d\dT[0-9:.]+Z", b"<time>"),
    (rb'"version":"[^"]+"', b'"version":"<version>"'),
    (rb'((?:new_)?mtime_ns\\*":)\d+', rb"\g<1>0"),
)


def frames(root: Path, home: Path) -> bytes:
    with on_stdio(root, home) as peer:
        return b"".join(_raw_answer(peer, number, *asked) for number, asked in enumerate(REQUESTS, 1))


def _raw_answer(peer: Peer, number: int, method: str, params: object) -> bytes:
    peer.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
    assert peer.process.stdout is not None
    line: bytes = peer.process.stdout.readline()
    for pattern, stands_for in CHANCE:
        line = re.sub(pattern, stands_for, line)
    return line


@pytest.mark.req("D19.goldens")
def test_the_frames_are_the_golden_ones(root: Path, tmp_path: Path) -> None:
    assert frames(root, tmp_path / "home").splitlines() == GOLDEN.read_bytes().splitlines()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        GOLDEN.write_bytes(frames(known_repository(Path(directory) / "repo"), Path(directory) / "home"))
