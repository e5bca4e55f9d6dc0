"""OpenAI's API, and every server that speaks it: Responses by default, Chat where that is all there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Literal

import openai

from mulligan.agents.providers.chat import read_chunks, tool_of
from mulligan.agents.providers.items import as_items
from mulligan.agents.speech import Ask, Reply, Said
from mulligan.agents.tools import ProviderToolCall, Tool
from mulligan.values.faults import fault

Api = Literal["responses", "chat"]


class OpenAI:
    """`base_url` and `api_key` as the SDK takes them, from its environment variables if left out."""

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
        """Ask once and stream. Raises `provider_failed`."""
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
    # Strict schemas demand every property, and ours have optional ones.
    return {"type": "function", "strict": False, **tool_of(tool)["function"]}


def read_events(events: Iterable[Any]) -> Iterator[Said | Reply]:
    """The stream of one response. Raises `provider_failed` for one that failed or was cut off without an end."""
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
        # Some servers send no pieces, only the whole.
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
