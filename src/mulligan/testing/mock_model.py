"""A model on loopback that asks for one tool after another and then is done, in the words of four vendors' APIs.

How far it is, it knows from what it is told: each request holds the results so far. So any number of conversations
may be had with one model, at once or one after another, and each gets the whole script.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mulligan.values.canonical import decode, encode
from mulligan.values.plain import plain

Body = dict[str, Any]
Step = tuple[str, Body]
"""The end of a tool's name, which hosts put a prefix before, and what it is called with."""


class MockModel(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.steps = list(steps)
        self.requests: list[str] = []
        self.results: list[str] = []
        """what came of each step, in the conversation that has come furthest"""
        self.first_requests: list[str] = []
        """the tools that the model was offered before it was told any result"""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def tool(self) -> str:
        return self.steps[0][0]

    def hear(self, heard: Heard) -> Call | None:
        """What the model asks for next; None: it is done, or is not offered what it would ask for."""
        done = len(heard.results)
        if done >= len(self.results):
            self.results = list(heard.results)
        if heard.tools and not done:
            self.first_requests.append(_text([*heard.tools]))
        if done >= len(self.steps):
            return None
        wanted, arguments = self.steps[done]
        found = wanted if wanted in heard.tools else next((one for one in heard.tools if one.endswith(wanted)), None)
        return None if found is None else Call(done + 1, found, arguments, heard.tools[found])


@plain(slots=True, frozen=True)
class Heard:
    """A request, in no vendor's words. `tools`: those on offer, and what a call of each has to say besides its name."""

    tools: Mapping[str, Body]
    results: Sequence[str]


@plain(slots=True, frozen=True)
class Call:
    number: int
    name: str
    arguments: Body
    besides: Body


class _Handler(BaseHTTPRequestHandler):
    server: MockModel

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.requests.append(asked.decode())
        vendor = next((vendor for path, vendor in _VENDORS.items() if path in self.path), None)
        self.send_response(200 if vendor else 404)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if vendor is not None:
            hear, speak = vendor
            for event in speak(self.server.hear(hear(decode(asked)))):
                self.wfile.write(event.encode())


# OpenAI's older API.


def _hear_chat(body: Body) -> Heard:
    tools: dict[str, Body] = {tool["function"]["name"]: {} for tool in body.get("tools", [])}
    return Heard(tools, [_told(message["content"]) for message in body["messages"] if message["role"] == "tool"])


def _speak_chat(call: Call | None) -> Iterator[str]:
    delta: Body = {"role": "assistant", "content": "done"}
    if call is not None:
        function = {"name": call.name, "arguments": _text(call.arguments)}
        asked = {"index": 0, "id": f"call_{call.number}", "type": "function", "function": function}
        delta = {"role": "assistant", "tool_calls": [asked]}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    reason = "tool_calls" if call else "stop"
    yield _data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _data({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage})
    yield "data: [DONE]\n\n"


# OpenAI's newer API.


def _hear_responses(body: Body) -> Heard:
    outputs = [item["output"] for item in body["input"] if str(item.get("type")).endswith("call_output")]
    return Heard(dict(_in_namespaces(body.get("tools", []))), [_told(output) for output in outputs])


def _in_namespaces(tools: Sequence[Body], **besides: str) -> Iterator[tuple[str, Body]]:
    for tool in tools:
        if isinstance(tool.get("tools"), list):
            yield from _in_namespaces(tool["tools"], namespace=tool["name"])
        elif "name" in tool:
            yield tool["name"], dict(besides)


def _speak_responses(call: Call | None) -> Iterator[str]:
    said = [{"type": "output_text", "text": "done", "annotations": []}]
    item: Body = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": said}
    if call is not None:
        head = {"type": "function_call", "id": f"fc_{call.number}", "call_id": f"call_{call.number}"}
        asked = {"name": call.name, "arguments": _text(call.arguments), **call.besides}
        item = {**head, "status": "completed", **asked}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    yield _event({"type": "response.created", "response": {"id": "resp_1"}})
    yield _event({"type": "response.output_item.done", "output_index": 0, "item": item})
    yield _event({"type": "response.completed", "response": {"id": "resp_1", "usage": usage, "output": [item]}})


# Anthropic's.


def _hear_messages(body: Body) -> Heard:
    blocks = [part for one in body["messages"] if isinstance(one["content"], list) for part in one["content"]]
    results = [_told(part["content"]) for part in blocks if part.get("type") == "tool_result"]
    return Heard({tool["name"]: {} for tool in body.get("tools", [])}, results)


def _speak_messages(call: Call | None) -> Iterator[str]:
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "mock", "content": [], "usage": usage}
    block: Body = {"type": "text", "text": ""}
    delta: Body = {"type": "text_delta", "text": "done"}
    if call is not None:
        block = {"type": "tool_use", "id": f"toolu_{call.number}", "name": call.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": _text(call.arguments)}
    stop = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
    yield _event({"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}})
    yield _event({"type": "content_block_start", "index": 0, "content_block": block})
    yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _event({"type": "content_block_stop", "index": 0})
    yield _event({"type": "message_delta", "delta": stop, "usage": usage})
    yield _event({"type": "message_stop"})


# Google's.


def _hear_gemini(body: Body) -> Heard:
    parts = [part for one in body["contents"] for part in one["parts"]]
    results = [_told(part["functionResponse"]["response"]) for part in parts if "functionResponse" in part]
    offered = [one for tool in body.get("tools", []) for one in tool.get("functionDeclarations", [])]
    return Heard({one["name"]: {} for one in offered}, results)


def _speak_gemini(call: Call | None) -> Iterator[str]:
    part: Body = {"functionCall": {"name": call.name, "args": call.arguments}} if call else {"text": "done"}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    said = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    yield _data({"candidates": [said], "usageMetadata": usage})


_Vendor = tuple[Callable[[Body], Heard], Callable[[Call | None], Iterator[str]]]
_VENDORS: Mapping[str, _Vendor] = {
    "/messages": (_hear_messages, _speak_messages),
    "/chat/completions": (_hear_chat, _speak_chat),
    "/responses": (_hear_responses, _speak_responses),
    "GenerateContent": (_hear_gemini, _speak_gemini),
}


def _told(result: object) -> str:
    return result if isinstance(result, str) else _text(result)


def _text(value: object) -> str:
    return encode(value).decode("utf-8")


def _data(body: Body) -> str:
    return f"data: {_text(body)}\n\n"


def _event(body: Body) -> str:
    return f"event: {body['type']}\n{_data(body)}"


def mock_model(tool: str, arguments: Body) -> AbstractContextManager[MockModel]:
    """A model that asks for one tool."""
    return scripted_model([(tool, arguments)])


@contextmanager
def scripted_model(steps: Sequence[Step]) -> Iterator[MockModel]:
    server = MockModel(steps)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
