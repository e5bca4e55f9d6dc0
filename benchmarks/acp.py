"""The cost of the ACP proxy: a message through it and the same message without it, taking turns.

The agent answers each request at once. `pass` is a request the proxy knows nothing of; `tool` is a prompt in which a
tool call begins and ends, so that files are looked at; then a diff of 5 MB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import quantile, show

ROUNDS = 400
FILES = 500
LIMIT_MS = 3.0
DIFF_BYTES = 5 * 2**20

AGENT = """
import json, sys
for line in sys.stdin.buffer:
    frame = json.loads(line)
    method, params = frame.get("method"), frame.get("params", {})
    update = {"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": "s"}}
    for one in params.get("updates", []):
        sys.stdout.write(json.dumps({**update, "params": {"sessionId": "s", "update": one}}) + "\\n")
    result = {"sessionId": "s", "agentCapabilities": {}, "stopReason": "end_turn"}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": frame["id"], "result": result}) + "\\n")
    sys.stdout.flush()
"""


class Peer:
    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.number = 0

    def ask(self, method: str, **params: Any) -> float:
        """How long it took to the answer, in milliseconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.number += 1
        line = json.dumps({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}).encode() + b"\n"
        answer = f'"id": {self.number}'.encode()
        started = time.perf_counter()
        self.process.stdin.write(line)
        self.process.stdin.flush()
        for heard in self.process.stdout:
            if answer in heard or (b'"method"' not in heard and self.number == 1):
                return (time.perf_counter() - started) * 1e3
        raise RuntimeError("the agent has gone")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def updates(id: int) -> list[dict[str, Any]]:
    head = {"toolCallId": f"t{id}", "kind": "execute"}
    begun = {**head, "sessionUpdate": "tool_call", "status": "in_progress"}
    return [begun, {**head, "sessionUpdate": "tool_call_update", "status": "completed"}]


def chunk(text: str) -> dict[str, Any]:
    return {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "project"
        root.mkdir()
        for number in range(FILES):
            (root / f"f{number}.txt").write_text(f"line {number}\n" * 20)
        env = {**os.environ, "MULLIGAN_HOME": str(Path(folder) / "store")}
        plain = [sys.executable, "-c", AGENT]
        peers = {
            "without": Peer(plain, env),
            "through": Peer([sys.executable, "-m", "mulligan", "acp", "--", *plain], env),
        }
        for peer in peers.values():
            peer.ask("initialize")
            peer.ask("session/new", cwd=str(root), mcpServers=[])
        measure(peers)
        for peer in peers.values():
            peer.end()


def measure(peers: dict[str, Peer]) -> None:
    diff = {"type": "diff", "path": "/elsewhere/big", "oldText": "x" * DIFF_BYTES, "newText": "y"}
    big = [{**one, "content": [diff]} for one in updates(-1)]
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS):
        for name, peer in peers.items():
            found.setdefault("pass", {}).setdefault(name, []).append(peer.ask("x/any", updates=[chunk("word")]))
            if number % 8 == 0:
                prompt = {"sessionId": "s", "prompt": [{"type": "text", "text": "go"}], "updates": updates(number)}
                found.setdefault("tool", {}).setdefault(name, []).append(peer.ask("session/prompt", **prompt))
            if number % 80 == 0:
                prompt = {"sessionId": "s", "prompt": [{"type": "text", "text": "go"}], "updates": big}
                found.setdefault("5 MB diff, twice", {}).setdefault(name, []).append(
                    peer.ask("session/prompt", **prompt)
                )
    for what, both in found.items():
        for name, values in both.items():
            show(f"{what}, {name}", sorted(values), "ms")
    both = found["pass"]
    # A request, a notification and an answer.
    added = (quantile(sorted(both["through"]), 0.5) - quantile(sorted(both["without"]), 0.5)) / 3
    print(f"added to each message: {added:.2f} ms at p50{'' if added <= LIMIT_MS else '  OVER'}")


if __name__ == "__main__":
    main()
