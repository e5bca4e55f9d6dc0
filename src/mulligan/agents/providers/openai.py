"""OpenAI's API, for OpenAI and servers that speak it (Responses by default, Chat on request), and LiteLLM's models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import openai

from mulligan.agents.providers import Ask, Message, Reply, Said
from mulligan.agents.tools import ProviderToolCall, Tool
from mulligan.values.errors import fault


def tool_of(tool: Tool[Any, Any]) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def read_chunks(chunks: Iterable[Any]) -> Iterator[Said | Reply]:
    """Yields text as it arrives, and at the end the whole reply with its tool calls."""
    text: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    stop, usage = "stop", (0, 0)
    for chunk in chunks:
        usage = _usage_of(chunk) or usage
        for choice in getattr(chunk, "choices", None) or ():
            stop = choice.finish_reason or stop
            delta = choice.delta
            if delta is not None and delta.content:
                text.append(delta.content)
                yield Said(delta.content)
            for piece in getattr(delta, "tool_calls", None) or ():
                _add(calls.setdefault(piece.index or 0, {"id": "", "name": "", "arguments": ""}), piece)
    yield Reply("".join(text), tuple(_call(one) for _, one in sorted(calls.items())), stop, *usage)


def _add(call: dict[str, str], piece: Any) -> None:
    """Adds a piece of a call: names and ids arrive whole, arguments in pieces."""
    call["id"] = piece.id or call["id"]
    if piece.function is not None:
        call["name"] = piece.function.name or call["name"]
        call["arguments"] += piece.function.arguments or ""


def _call(body: Mapping[str, str]) -> ProviderToolCall:
    return ProviderToolCall(body["id"], body["name"], body["arguments"])


def _usage_of(chunk: Any) -> tuple[int, int] | None:
    usage = getattr(chunk, "usage", None)
    return None if usage is None else (usage.prompt_tokens or 0, usage.completion_tokens or 0)


def as_items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Messages as items of the Responses API: texts, calls and results are separate items."""
    for message in messages:
        if message["role"] == "tool":
            yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        elif message["role"] != "system":
            yield from _message_items(message)


def _message_items(message: Message) -> Iterator[dict[str, Any]]:
    if message.get("content"):
        yield {"role": message["role"], "content": _content(message["content"])}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(one) for one in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "image_url":
        return {"type": "input_image", "image_url": part["image_url"]["url"]}
    return {"type": "input_text", "text": part["text"]}


Api = Literal["responses", "chat"]


class OpenAI:
    """OpenAI's models. The SDK takes `base_url` and `api_key` from its environment variables if they are missing."""

    name = "openai"
    profile = "openai"

    def __init__(
        self,
        model: str = "gpt-5.1",
        *,
        api: Api = "responses",
        base_url: str | None = None,
        api_key: str | None = None,
        client: openai.OpenAI | None = None,
    ) -> None:
        if api not in ("responses", "chat"):
            raise fault("invalid_params", f"api is responses or chat, not {api!r}.", field="api")
        self._model, self._api = model, api
        try:
            self._client = client or openai.OpenAI(base_url=base_url, api_key=api_key)
        except openai.OpenAIError as error:
            raise fault("no_provider", f"OpenAI's client cannot be made: {error}") from error

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """Sends one request and streams the reply. Raises `provider_failed`."""
        try:
            yield from self._chat(ask) if self._api == "chat" else self._responses(ask)
        except openai.OpenAIError as error:
            raise fault("provider_failed", f"The model did not answer: {error}", provider=self.name) from error

    def _chat(self, ask: Ask) -> Iterator[Said | Reply]:
        request: dict[str, Any] = {"messages": list(ask.messages), "tools": [tool_of(tool) for tool in ask.tools]}
        stream: Any = self._client.chat.completions.create(
            model=ask.model or self._model,
            stream=True,
            stream_options={"include_usage": True},
            **{key: value for key, value in request.items() if value},
            **ask.options,
        )
        with closing(stream):
            yield from read_chunks(stream)

    def _responses(self, ask: Ask) -> Iterator[Said | Reply]:
        request: dict[str, Any] = {
            "instructions": ask.system,
            "input": list(as_items(ask.messages)),
            "tools": [_tool(tool) for tool in ask.tools],
        }
        stream: Any = self._client.responses.create(
            model=ask.model or self._model,
            stream=True,
            store=False,
            **{key: value for key, value in request.items() if value},
            **ask.options,
        )
        with closing(stream):
            yield from read_events(stream)


def _tool(tool: Tool[Any, Any]) -> dict[str, Any]:
    # Strict schemas require every property, and Mulligan's tools have optional ones.
    return {"type": "function", "strict": False, **tool_of(tool)["function"]}


def read_events(events: Iterable[Any]) -> Iterator[Said | Reply]:
    """Reads the stream of one response. Raises `provider_failed` if it fails or is cut off."""
    text: list[str] = []
    calls: list[ProviderToolCall] = []
    for event in events:
        if event.type == "response.output_text.delta":
            text.append(event.delta)
            yield Said(event.delta)
        elif event.type == "response.output_item.done":
            _read_item(event.item, text, calls)
        elif event.type in ("response.completed", "response.incomplete"):
            yield _ended(event.response, "".join(text), calls)
            return
        elif event.type in ("response.failed", "error"):
            raise fault("provider_failed", f"The model failed: {_reason(event)}", provider="openai")
    raise fault("provider_failed", "The model's answer was cut off.", provider="openai")


def _read_item(item: Any, text: list[str], calls: list[ProviderToolCall]) -> None:
    if item.type == "function_call":
        calls.append(ProviderToolCall(item.call_id, item.name, item.arguments))
    elif item.type == "message" and not text:
        # Some servers send only the whole text.
        text += [part.text for part in item.content if part.type == "output_text"]


def _ended(response: Any, text: str, calls: list[ProviderToolCall]) -> Reply:
    usage = response.usage
    spent = (0, 0) if usage is None else (usage.input_tokens or 0, usage.output_tokens or 0)
    details = getattr(response, "incomplete_details", None)
    stop = getattr(details, "reason", None) or ("tool_calls" if calls else "stop")
    return Reply(text, tuple(calls), stop, *spent)


def _reason(event: Any) -> str:
    response = getattr(event, "response", None)
    error = getattr(response, "error", None) or event
    return str(getattr(error, "message", error))


class LiteLLM:
    """LiteLLM's models. `model` is LiteLLM's name, such as `anthropic/claude-sonnet-4-5`; it finds its own keys."""

    name = "litellm"

    def __init__(
        self, model: str, *, api_base: str | None = None, api_key: str | None = None, profile: str = "openai"
    ) -> None:
        # LiteLLM's price list is of no use here, and fetching it would make the import wait for the network.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm  # here, because the OpenAI provider works without it

        self._complete: Any = litellm.completion
        self.profile = profile
        self._settings = {"model": model, "api_base": api_base, "api_key": api_key}

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """Sends one request and streams the reply. Raises `provider_failed`."""
        request: dict[str, Any] = {**self._settings, **ask.options}
        request |= {"model": ask.model} if ask.model else {}
        request |= {"tools": [tool_of(tool) for tool in ask.tools]} if ask.tools else {}
        messages = [dict(message) for message in ask.messages]
        try:
            stream = self._complete(messages=messages, stream=True, stream_options={"include_usage": True}, **request)
            yield from read_chunks(stream)
        except openai.OpenAIError as error:
            # LiteLLM's own errors are all children of OpenAI's.
            raise fault("provider_failed", f"The model did not answer: {error}", provider=self.name) from error
