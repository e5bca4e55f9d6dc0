"""Messages as the items of OpenAI's Responses API: what is said, calls and results are each one of their own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mulligan.agents.speech import Message


def as_items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Messages as the Responses API takes them: what is said, calls and results are items of their own."""
    for message in messages:
        if message["role"] == "tool":
            yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        elif message["role"] != "system":
            yield from _said(message)


def _said(message: Message) -> Iterator[dict[str, Any]]:
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
