"""A small ACP agent: it asks for permission before it writes a file, and writes down which option it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

folder = Path()
prompt: Any = None


def say(**frame: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **frame}), flush=True)


for line in sys.stdin:
    frame = json.loads(line)
    method, params = frame.get("method"), frame.get("params", {})
    if method == "initialize":
        say(id=frame["id"], result={"protocolVersion": 1, "agentCapabilities": {}})
    elif method == "session/new":
        folder = Path(params["cwd"])
        say(id=frame["id"], result={"sessionId": "asking"})
    elif method == "session/prompt":
        prompt = frame["id"]
        options = [
            {"optionId": "yes", "name": "Allow", "kind": "allow_once"},
            {"optionId": "no", "name": "Reject", "kind": "reject_once"},
        ]
        call = {"toolCallId": "c1", "title": "Write answer.txt", "rawInput": {"command": "echo > answer.txt"}}
        asked = {"sessionId": "asking", "toolCall": call, "options": options}
        say(id=99, method="session/request_permission", params=asked)
    elif frame.get("id") == 99:
        (folder / "answer.txt").write_text(frame["result"]["outcome"]["optionId"])
        say(id=prompt, result={"stopReason": "end_turn"})
