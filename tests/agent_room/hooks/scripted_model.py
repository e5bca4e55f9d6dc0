"""A model on loopback that asks for one tool after the other and then is done, in the words of three vendors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Step = tuple[str, Body]


class ScriptedModel(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._steps = list(steps)
        self.results: dict[int, str] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_step(self, answered: Sequence[Any], *, has_tools: bool) -> Step | None:
        """The step after the results the agent has told so far."""
        self.results |= {number: json.dumps(one) for number, one in enumerate(answered)}
        return self._steps[len(answered)] if has_tools and len(answered) < len(self._steps) else None


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedModel

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        speak = next((speak for path, speak in _VENDORS.items() if path in self.path), None)
        self.send_response(200 if speak else 404)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in speak(self.server, asked) if speak else ():
            self.wfile.write(event.encode())


def _anthropic(model: ScriptedModel, asked: Body) -> Iterator[str]:
    blocks = [part for one in asked["messages"] if isinstance(one["content"], list) for part in one["content"]]
    answered = [part["content"] for part in blocks if part.get("type") == "tool_result"]
    step = model.next_step(answered, has_tools=bool(asked.get("tools")))
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "mock", "content": [], "usage": usage}
    block: Body = {"type": "text", "text": ""}
    delta: Body = {"type": "text_delta", "text": "done"}
    if step is not None:
        block = {"type": "tool_use", "id": f"toolu_{len(answered)}", "name": step[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(step[1])}
    stop = {"stop_reason": "tool_use" if step else "end_turn", "stop_sequence": None}
    yield _event({"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}})
    yield _event({"type": "content_block_start", "index": 0, "content_block": block})
    yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _event({"type": "content_block_stop", "index": 0})
    yield _event({"type": "message_delta", "delta": stop, "usage": usage})
    yield _event({"type": "message_stop"})


def _responses(model: ScriptedModel, asked: Body) -> Iterator[str]:
    answered = [item["output"] for item in asked["input"] if str(item.get("type")).endswith("call_output")]
    step = model.next_step(answered, has_tools=True)
    said = [{"type": "output_text", "text": "done", "annotations": []}]
    item: Body = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": said}
    if step is not None:
        call_id, arguments = f"call_{len(answered)}", json.dumps(step[1])
        item = {"type": "function_call", "id": "fc", "call_id": call_id, "name": step[0], "arguments": arguments}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    yield _event({"type": "response.created", "response": {"id": "resp_1"}})
    yield _event({"type": "response.output_item.done", "output_index": 0, "item": item})
    yield _event({"type": "response.completed", "response": {"id": "resp_1", "usage": usage, "output": [item]}})


def _gemini(model: ScriptedModel, asked: Body) -> Iterator[str]:
    parts = [part for one in asked["contents"] for part in one["parts"]]
    answered = [part["functionResponse"]["response"] for part in parts if "functionResponse" in part]
    step = model.next_step(answered, has_tools=bool(asked.get("tools")))
    part: Body = {"text": "done"} if step is None else {"functionCall": {"name": step[0], "args": step[1]}}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    said = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    yield f"data: {json.dumps({'candidates': [said], 'usageMetadata': usage})}\n\n"


_VENDORS = {"/messages": _anthropic, "/responses": _responses, "GenerateContent": _gemini}


def _event(body: Body) -> str:
    return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n"


@contextmanager
def scripted_model(steps: Sequence[Step]) -> Iterator[ScriptedModel]:
    server = ScriptedModel(steps)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
