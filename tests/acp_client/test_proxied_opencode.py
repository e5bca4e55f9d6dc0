"""A real agent that somebody else wrote, behind the proxy: opencode with a model on loopback."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from acp_client.client import Body, Client, connected

BINARIES = Path(__file__).parent.parent.parent / ".tools/mcp/node_modules/.bin"
INSTALL = "npm i --prefix .tools/mcp node@24 opencode-ai@1.18.33"
BEFORE = {".env": "KEY=1\n", "a.txt": "one\n", "gone.txt": "here\n"}


class Model(ThreadingHTTPServer):
    """Asks for the tools of its script, one after another, and is done."""

    daemon_threads = True

    def __init__(self, script: list[tuple[str, Body]]) -> None:
        super().__init__(("127.0.0.1", 0), Speaking)
        self.script = script
        self.told: list[str] = []


class Speaking(BaseHTTPRequestHandler):
    server: Model

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.told.append(json.dumps(asked["messages"]))
        done = sum(message["role"] == "tool" for message in asked["messages"])
        delta: Body = {"role": "assistant", "content": "done"}
        if asked.get("tools") and done < len(self.server.script):
            name, arguments = self.server.script[done]
            called = {"name": name, "arguments": json.dumps(arguments)}
            tool = {"index": 0, "id": f"call_{done}", "type": "function", "function": called}
            delta = {"role": "assistant", "tool_calls": [tool]}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
        reason = "stop" if "content" in delta else "tool_calls"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        for choice, more in (
            ({"delta": delta, "finish_reason": None}, {}),
            ({"delta": {}, "finish_reason": reason}, usage),
        ):
            body = {**head, "choices": [{"index": 0, **choice}], **({"usage": more} if more else {})}
            self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def model_with(script: list[tuple[str, Body]]) -> Iterator[Model]:
    server = Model(script)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def prepared(root: Path, model: Model) -> None:
    for name, content in BEFORE.items():
        (root / name).write_text(content)
    provider: Body = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"http://127.0.0.1:{model.server_port}/v1", "apiKey": "none"},
        "models": {"mock": {"name": "mock", "tool_call": True}},
    }
    config = {"provider": {"mock": provider}, "model": "mock/mock", "permission": {"*": "allow"}}
    (root / "opencode.json").write_text(json.dumps(config))


def files(root: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(root.iterdir()) if file.name != "opencode.json"}


def opencode(base: Path, *before: str) -> Any:
    assert (BINARIES / "opencode").exists(), f"opencode is missing: {INSTALL}"
    command = [*before, str(BINARIES / "opencode"), "acp", "--cwd", str(base / "work")]
    path = os.pathsep.join([str(BINARIES), os.environ["PATH"]])
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return connected(base / "store", command=command, PATH=path, HOME=str(base / "user"), **quiet)


def told(client: Client, session: str) -> list[Body]:
    """The updates of tools and words, without what differs from run to run; told twice is told once."""
    found: list[Body] = []
    for frame in client.frames:
        update = frame.get("params", {}).get("update", {})
        if update.get("sessionUpdate") not in ("tool_call", "tool_call_update", "agent_message_chunk"):
            continue
        assert frame["params"]["sessionId"] == session
        shown = {name: value for name, value in update.items() if name != "messageId"}
        found += [] if shown in found[-1:] else [shown]
    return found


def worked(client: Client, root: Path) -> str:
    session: str = client.ask("session/new", cwd=str(root), mcpServers=[])["sessionId"]
    answer = client.ask("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "do it"}])
    assert answer["stopReason"] == "end_turn"
    return session


@pytest.mark.req("D14.acp.proxy", "D14.acp.proxy_tells_model", "D14.cli.acp", "D19.foreign_programs")
def test_opencode_edits_and_runs_and_both_are_undone_and_redone(tmp_path: Path) -> None:
    base = Path(os.path.realpath(tmp_path))
    root = base / "work"
    for folder in (root, base / "user"):
        folder.mkdir()
    write = {"filePath": str(root / "a.txt"), "content": "two\n"}
    read = {"filePath": str(root / "a.txt")}
    shell = {"command": "rm gone.txt; echo KEY=2 > .env", "description": "tidy"}
    with model_with([("read", read), ("write", write), ("bash", shell)]) as model:
        prepared(root, model)
        with opencode(base) as client:
            plain = told(client, worked(client, root))
        assert files(root) == {".env": "KEY=2\n", "a.txt": "two\n"}
        prepared(root, model)
        with opencode(base, sys.executable, "-m", "mulligan", "acp", "--") as client:
            session = worked(client, root)
            assert told(client, session) == plain
            after = files(root)
            back = client.ask("_mulligan/session/rollback", sessionId=session)
            assert (back["status"], files(root)) == ("rolled_back", BEFORE)
            assert client.ask("_mulligan/session/redo", sessionId=session)["status"] == "redone"
            assert files(root) == after
            restored = client.ask("session/restore_tool_call", sessionId=session, toolCallId="call_2")
            assert sorted(restored["restoredPaths"]) == [str(root / name) for name in (".env", "gone.txt")]
            assert files(root) == {**BEFORE, "a.txt": "two\n"}
            client.ask("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "go on"}])
        assert "- gone.txt (is there again)" in model.told[-1]
