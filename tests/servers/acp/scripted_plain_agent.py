"""An agent that knows nothing of Mulligan: it does to files what the prompt says, and tells of it as the prompt says.

A prompt's last block is a JSON list of steps. Written for the proxy's tests, in nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

Body = dict[str, Any]


def send(body: Body) -> None:
    raw(json.dumps(body))


def raw(line: str, end: str = "\n") -> None:
    sys.stdout.buffer.write((line + end).encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


def update(session: str, body: Body) -> None:
    send({"jsonrpc": "2.0", "method": "session/update", "params": {"sessionId": session, "update": body}})


def until(method: str) -> Body:
    """The client's next frame of that name, or its next answer."""
    for line in sys.stdin.buffer:
        frame: Body = json.loads(line)
        if frame.get("method", "answer") == method:
            return frame
    sys.exit(0)


def step(session: str, prompt: list[Body], one: Body) -> None:
    (what, value), *_ = one.items()
    if what == "update":
        update(session, value)
    elif what == "write":
        with open(value[0], "w", encoding="utf-8") as file:
            file.write(value[1])
    elif what == "shell":
        subprocess.run(value, shell=True, check=True)
    elif what == "raw":
        raw(value)
    elif what == "part":
        raw(value, end="")
    elif what == "heard":
        update(
            session, {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": json.dumps(prompt)}}
        )
    elif what == "ask":
        send({"jsonrpc": "2.0", "id": "p", "method": "session/request_permission", "params": value})
        until("answer")
    elif what == "wait":
        until(value)
    elif what == "die":
        os._exit(value)


def result_of(method: str, params: Body) -> Body:
    if method == "initialize":
        known: Body = json.loads(os.environ.get("CAPABILITIES", "{}"))
        return {"protocolVersion": 1, "agentCapabilities": known, "agentInfo": {"name": "child", "x": [1.50]}}
    if method == "session/new":
        result_of.made = getattr(result_of, "made", 0) + 1  # type: ignore[attr-defined]  # a counter, and no more
        return {"sessionId": f"s{result_of.made}-{os.environ.get('RUN', '')}"}  # type: ignore[attr-defined]  # as above
    if method == "session/load":
        old = {"sessionUpdate": "tool_call", "toolCallId": "old", "kind": "execute", "status": "in_progress"}
        update(params["sessionId"], old)
        update(params["sessionId"], {**old, "sessionUpdate": "tool_call_update", "status": "completed"})
        return {}
    if method == "session/prompt":
        for one in json.loads(params["prompt"][-1]["text"]):
            step(params["sessionId"], params["prompt"], one)
        return {"stopReason": "end_turn"}
    return {"unknown": method, "params": params}


for line in sys.stdin.buffer:
    if line.startswith(b"##"):
        raw("heard " + line.hex())
        continue
    frame = json.loads(line)
    if "id" in frame and "method" in frame:
        send({"jsonrpc": "2.0", "id": frame["id"], "result": result_of(frame["method"], frame.get("params", {}))})
    elif frame.get("method") == "x/hex":
        raw(json.dumps({"method": "x/heard", "params": {"hex": line.hex()}}))
sys.exit(int(os.environ.get("CODE", "0")))
