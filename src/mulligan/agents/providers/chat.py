"""The stream of chat completions, which OpenAI began and many others speak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mulligan.agents.speech import Reply, Said
from mulligan.agents.tools import ProviderToolCall, Tool


def tool_of(tool: Tool[Any, Any]) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def read_chunks(chunks: Iterable[Any]) -> Iterator[Said | Reply]:
    """Text as it comes, and at the end all of it with the tool calls put together from their pieces."""
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
    """Names and ids come whole, most often once; arguments come in pieces."""
    call["id"] = piece.id or call["id"]
    if piece.function is not None:
        call["name"] = piece.function.name or call["name"]
        call["arguments"] += piece.function.arguments or ""


def _call(body: Mapping[str, str]) -> ProviderToolCall:
    return ProviderToolCall(body["id"], body["name"], body["arguments"])


def _usage_of(chunk: Any) -> tuple[int, int] | None:
    usage = getattr(chunk, "usage", None)
    return None if usage is None else (usage.prompt_tokens or 0, usage.completion_tokens or 0)
