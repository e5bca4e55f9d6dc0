"""Runs tools in tests: a state, one call at a time, and the same call through the SDK of a provider.

`MockModel` is a model on loopback that asks for one tool after another and then is done. It speaks the APIs of four
vendors. It finds its position in the script from the results in each request, so one model can hold any number of
conversations, in parallel or in sequence, and each gets the whole script.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from mulligan.agents.loop import calls_wanted
from mulligan.agents.providers import Ask, Driver, Message, Provider, Reply, name_of
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import ProviderToolCall, Tool, ToolContext, as_tool
from mulligan.files.filesystems import Filesystem, InMemoryFilesystem
from mulligan.history.checkpoint import CheckpointStore, ExecutionState, snapshots_equivalent
from mulligan.session.state.resources import BudgetTracker, ResourceRegistry
from mulligan.session.state.session import Session
from mulligan.session.state.slices import ToolResult
from mulligan.session.subscribers import CollectErrors
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.fast_dataclass import fast_dataclass

Body = dict[str, Any]
Step = tuple[str, Body]
"""The end of a tool's name, because hosts add a prefix, and the arguments of the call."""


class MockModel(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.steps = list(steps)
        self.requests: list[str] = []
        self.results: list[str] = []
        """the result of each step, in the longest conversation"""
        self.first_requests: list[str] = []
        """the tools in the first request"""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def tool(self) -> str:
        return self.steps[0][0]

    def next_call(self, request: ModelRequest) -> ModelToolCall | None:
        """The model's next call; None if it is done, or if the request does not offer the tool."""
        done = len(request.results)
        if done >= len(self.results):
            self.results = list(request.results)
        if request.tools and not done:
            self.first_requests.append(_text([*request.tools]))
        if done >= len(self.steps):
            return None
        wanted, arguments = self.steps[done]
        found = (
            wanted if wanted in request.tools else next((one for one in request.tools if one.endswith(wanted)), None)
        )
        return None if found is None else ModelToolCall(done + 1, found, arguments, request.tools[found])


@fast_dataclass(slots=True, frozen=True)
class ModelRequest:
    """A request in a form independent of the vendor. `tools`: the offered tools, with extra fields for a call."""

    tools: Mapping[str, Body]
    results: Sequence[str]


@fast_dataclass(slots=True, frozen=True)
class ModelToolCall:
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
            next_call, speak = vendor
            for event in speak(self.server.next_call(next_call(decode(asked)))):
                self.wfile.write(event.encode())


# OpenAI's older API.


def _parse_chat(body: Body) -> ModelRequest:
    tools: dict[str, Body] = {tool["function"]["name"]: {} for tool in body.get("tools", [])}
    return ModelRequest(
        tools, [_result_text(message["content"]) for message in body["messages"] if message["role"] == "tool"]
    )


def _write_chat(call: ModelToolCall | None) -> Iterator[str]:
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


def _parse_responses(body: Body) -> ModelRequest:
    outputs = [item["output"] for item in body["input"] if str(item.get("type")).endswith("call_output")]
    return ModelRequest(dict(_in_namespaces(body.get("tools", []))), [_result_text(output) for output in outputs])


def _in_namespaces(tools: Sequence[Body], **besides: str) -> Iterator[tuple[str, Body]]:
    for tool in tools:
        if isinstance(tool.get("tools"), list):
            yield from _in_namespaces(tool["tools"], namespace=tool["name"])
        elif "name" in tool:
            yield tool["name"], dict(besides)


def _write_responses(call: ModelToolCall | None) -> Iterator[str]:
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


def _parse_messages(body: Body) -> ModelRequest:
    blocks = [part for one in body["messages"] if isinstance(one["content"], list) for part in one["content"]]
    results = [_result_text(part["content"]) for part in blocks if part.get("type") == "tool_result"]
    return ModelRequest({tool["name"]: {} for tool in body.get("tools", [])}, results)


def _write_messages(call: ModelToolCall | None) -> Iterator[str]:
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


def _parse_gemini(body: Body) -> ModelRequest:
    parts = [part for one in body["contents"] for part in one["parts"]]
    results = [_result_text(part["functionResponse"]["response"]) for part in parts if "functionResponse" in part]
    offered = [one for tool in body.get("tools", []) for one in tool.get("functionDeclarations", [])]
    return ModelRequest({one["name"]: {} for one in offered}, results)


def _write_gemini(call: ModelToolCall | None) -> Iterator[str]:
    part: Body = {"functionCall": {"name": call.name, "args": call.arguments}} if call else {"text": "done"}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    said = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    yield _data({"candidates": [said], "usageMetadata": usage})


_Vendor = tuple[Callable[[Body], ModelRequest], Callable[[ModelToolCall | None], Iterator[str]]]
_VENDORS: Mapping[str, _Vendor] = {
    "/messages": (_parse_messages, _write_messages),
    "/chat/completions": (_parse_chat, _write_chat),
    "/responses": (_parse_responses, _write_responses),
    "GenerateContent": (_parse_gemini, _write_gemini),
}


def _result_text(result: object) -> str:
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


__all__ = [
    "create_execution_state",
    "execute_tool",
    "execute_via_claude_sdk",
    "execute_via_litellm",
    "execute_via_openai",
    "snapshots_equivalent",
]

AnyTool = Tool[Any, Any] | Callable[..., Any]
Api = Literal["responses", "chat"]


def create_execution_state(
    resources: Mapping[type[Any], object] | None = None, *, session: Session | None = None, clock: Clock | None = None
) -> ExecutionState:
    """A run's state in memory: a session, files, a budget and checkpoints. You can pass each of them instead."""
    now = clock or SystemClock()
    ours: dict[type[Any], object] = {Filesystem: InMemoryFilesystem(clock=now), BudgetTracker: BudgetTracker()}
    registry = ResourceRegistry.build({**ours, **(resources or {})})
    return ExecutionState(session or Session(clock=now), registry, now, checkpoints=CheckpointStore())


def call_id_of(tool: Tool[Any, Any]) -> str:
    """`call_b` for a tool named `tool_b` or `b`."""
    return "call_" + tool.name.removeprefix("tool_")


def execute_tool(
    tool: AnyTool,
    execution_state: ExecutionState,
    params: Mapping[str, Any] | None = None,
    *,
    tool_call_id: str | None = None,
    context: ToolContext | None = None,
) -> ToolResult[Any]:
    """Run one call through the runner, as every provider does. The default id is `call_` and the tool's name."""
    known = as_tool(tool)
    call = ProviderToolCall(tool_call_id or call_id_of(known), known.name, params or {})
    return ToolRunner(execution_state, {known.name: known}, "test").execute(call, context=context)


def execute_via_openai(
    tool: AnyTool, execution_state: ExecutionState, params: Mapping[str, Any] | None = None, *, api: Api = "responses"
) -> ToolResult[Any]:
    """Like `execute_tool`, but a model on loopback asks for the tool through OpenAI's SDK (`responses` or `chat`)."""
    from mulligan.agents.providers.openai import OpenAI

    def made(url: str) -> OpenAI:
        return OpenAI("mock", api=api, base_url=f"{url}/v1", api_key="k")

    return _run_once(tool, execution_state, params, made)


def execute_via_litellm(
    tool: AnyTool, execution_state: ExecutionState, params: Mapping[str, Any] | None = None
) -> ToolResult[Any]:
    """Like `execute_tool`, through LiteLLM."""
    from mulligan.agents.providers.openai import LiteLLM

    return _run_once(
        tool, execution_state, params, lambda url: LiteLLM("openai/mock", api_base=f"{url}/v1", api_key="k")
    )


def execute_via_claude_sdk(
    tool: AnyTool, execution_state: ExecutionState, params: Mapping[str, Any] | None = None
) -> ToolResult[Any]:
    """Like `execute_tool`, through the Claude Agent SDK, whose own loop calls the tool in this process."""
    from tempfile import TemporaryDirectory

    from mulligan.agents.providers.claude import Claude

    with TemporaryDirectory(prefix="mulligan-claude-") as home:

        def made(url: str) -> Claude:
            env = {**_QUIET, "ANTHROPIC_BASE_URL": url, "CLAUDE_CONFIG_DIR": home, "HOME": home}
            return Claude("claude-sonnet-4-5", env=env, cwd=home)

        return _run_once(tool, execution_state, params, made)


_QUIET = {
    "ANTHROPIC_API_KEY": "k",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def _run_once(
    tool: AnyTool,
    state: ExecutionState,
    params: Mapping[str, Any] | None,
    made: Callable[[str], Provider | Driver],
) -> ToolResult[Any]:
    """Let a model ask for the tool once. Returns the result, or raises the runner's error."""
    known = as_tool(tool)
    with mock_model(known.name, dict(params or {})) as model:
        provider = made(model.address)
        asking = _ToolRun(ToolRunner(state, {known.name: known}, "test", name_of(provider)))
        ask = Ask(({"role": "user", "content": f"Use {known.name}."},), (known,))
        if isinstance(provider, Driver):
            list(provider.drive(ask, asking.act))
        else:
            asking.through(provider, ask)
    return asking.outcome()


class _ToolRun:
    def __init__(self, runner: ToolRunner) -> None:
        self._runner = runner
        self._results: list[ToolResult[Any]] = []
        self._errors: list[Exception] = []

    def act(self, call: ProviderToolCall) -> ToolResult[Any]:
        """Run the call. An SDK would hide an error of a tool, so we keep it and raise it at the end."""
        with CollectErrors(self._errors):
            result = self._runner.execute(call)
            self._results.append(result)
            return result
        return ToolResult(str(self._errors[-1]), success=False)

    def through(self, provider: Provider, ask: Ask) -> None:
        messages: list[Message] = list(ask.messages)
        for _ in range(2):
            (reply,) = [one for one in provider.reply(Ask(messages, ask.tools)) if isinstance(one, Reply)]
            messages.append({"role": "assistant", "content": reply.text, **calls_wanted(reply)})
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self.act(call).message})

    def outcome(self) -> ToolResult[Any]:
        if self._errors:
            raise self._errors[0]
        # Some SDKs validate the arguments themselves and never call the tool.
        return self._results[-1] if self._results else ToolResult("The call never reached the tool.", success=False)
