"""A model on loopback that asks for one tool and then is done: enough of two vendors' APIs for a host to work with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mulligan.values.canonical import decode, encode

Body = dict[str, Any]


class MockModel(ThreadingHTTPServer):
    """`tool` ends the name of the tool it asks for, which hosts put a prefix before."""

    daemon_threads = True

    def __init__(self, tool: str, arguments: Body) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tool = tool
        self.arguments = arguments
        self.results: list[str] = []
        self.first_requests: list[str] = []
        """what the model was sent before it was told any result"""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: MockModel

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        asked = decode(self.rfile.read(int(self.headers["content-length"])))
        speak = next(speak for path, speak in _VENDORS.items() if path in self.path)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in speak(self.server, asked):
            self.wfile.write(event.encode())


def _openai(model: MockModel, asked: Body) -> Iterator[str]:
    names = [tool["function"]["name"] for tool in asked.get("tools", [])]
    wanted = next((name for name in names if name.endswith(model.tool)), None)
    answered = [message["content"] for message in asked["messages"] if message["role"] == "tool"]
    delta: Body = {"role": "assistant", "content": "done"}
    if wanted is not None and not answered:
        called = {"name": wanted, "arguments": _text(model.arguments)}
        delta = {
            "role": "assistant",
            "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": called}],
        }
    model.results += [str(one) for one in answered]
    reason = "stop" if "content" in delta else "tool_calls"
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    yield _data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _data({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage})
    yield "data: [DONE]\n\n"


def _anthropic(model: MockModel, asked: Body) -> Iterator[str]:
    wanted = next((tool["name"] for tool in asked.get("tools", []) if tool["name"].endswith(model.tool)), None)
    blocks = [part for one in asked["messages"] if isinstance(one["content"], list) for part in one["content"]]
    answered = [_text(part["content"]) for part in blocks if part.get("type") == "tool_result"]
    model.results += answered
    calls = wanted is not None and not answered
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "mock", "content": [], "usage": usage}
    block: Body = (
        {"type": "tool_use", "id": "toolu_1", "name": wanted, "input": {}} if calls else {"type": "text", "text": ""}
    )
    delta: Body = (
        {"type": "input_json_delta", "partial_json": _text(model.arguments)}
        if calls
        else {"type": "text_delta", "text": "done"}
    )
    stop = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    yield _event({"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}})
    yield _event({"type": "content_block_start", "index": 0, "content_block": block})
    yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _event({"type": "content_block_stop", "index": 0})
    yield _event({"type": "message_delta", "delta": stop, "usage": usage})
    yield _event({"type": "message_stop"})


def _responses(model: MockModel, asked: Body) -> Iterator[str]:
    answered = [item["output"] for item in asked["input"] if item.get("type") == "function_call_output"]
    model.results += [_text(one) for one in answered]
    item: Body = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "done", "annotations": []}],
    }
    if not answered:
        model.first_requests.append(_text(asked.get("tools", [])))
        item = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "status": "completed",
            "name": model.tool,
            "namespace": "mcp__mulligan",
            "arguments": _text(model.arguments),
        }
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    yield _event({"type": "response.created", "response": {"id": "resp_1"}})
    yield _event({"type": "response.output_item.done", "output_index": 0, "item": item})
    yield _event({"type": "response.completed", "response": {"id": "resp_1", "usage": usage, "output": [item]}})


_VENDORS = {"/messages": _anthropic, "/chat/completions": _openai, "/responses": _responses}


def _text(value: object) -> str:
    return encode(value).decode("utf-8")


def _data(body: Body) -> str:
    return f"data: {_text(body)}\n\n"


def _event(body: Body) -> str:
    return f"event: {body['type']}\n{_data(body)}"


@contextmanager
def mock_model(tool: str, arguments: Body) -> Iterator[MockModel]:
    server = MockModel(tool, arguments)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
