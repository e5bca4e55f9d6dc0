"""Finds tool calls and results in messages, says where a transcript can be cut, and writes prompts. Pure.

A session stores messages in the shape in which their provider gave them. This module reads the common shapes: OpenAI's
`tool_calls` and role `tool`, Anthropic's `tool_use` and `tool_result` blocks, and plain ones.

`for_model` writes the prompt for a model. Services refuse a tool call without a result, so each call in a prompt is
followed by its result. If the context window lacks the result, `for_model` adds one that says so; if the window lacks
the call, the result becomes plain text. So a window that was cut anywhere can be sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from mulligan.session.transcript_log import Message, text_of
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass

RESULT_ROLES = ("tool", "tool_result", "function")


@fast_dataclass(slots=True, frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: Any


@dataclass(slots=True, frozen=True)
class ToolAnswer:
    id: str
    content: Any
    failed: bool = False


def calls_in(message: Mapping[str, Any]) -> list[ToolCall]:
    """The tool calls of an assistant message, in order."""
    if message.get("role") != "assistant":
        return []
    listed = [*_items(message.get("tool_calls")), *_items(message.get("native_tool_calls"))]
    blocks = [block for block in _items(message.get("content")) if block.get("type") == "tool_use"]
    return [_call(one) for one in (*listed, *blocks)]


def _items(value: object) -> list[Mapping[str, Any]]:
    # A str is a sequence too, but its characters are not items.
    if isinstance(value, str) or not isinstance(value, Sequence):
        return []
    return [one for one in value if isinstance(one, Mapping)]


def _call(body: Mapping[str, Any]) -> ToolCall:
    function = body.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else body
    arguments: Any = next((inner[key] for key in ("arguments", "input", "args") if inner.get(key) is not None), {})
    return ToolCall(_id(body, "id", "call_id", "tool_use_id"), str(inner.get("name") or "tool"), arguments)


def results_in(message: Mapping[str, Any]) -> list[ToolAnswer]:
    """The tool results in a message, in order."""
    if message.get("role") in RESULT_ROLES:
        failed = bool(message.get("is_error"))
        return [ToolAnswer(_id(message, "tool_call_id", "tool_use_id", "call_id"), message.get("content"), failed)]
    blocks = (block for block in _items(message.get("content")) if block.get("type") == "tool_result")
    return [ToolAnswer(_id(one, "tool_use_id"), one.get("content"), bool(one.get("is_error"))) for one in blocks]


def _id(body: Mapping[str, Any], *names: str) -> str:
    return next((str(body[name]) for name in names if body.get(name)), "")


def is_result(message: Mapping[str, Any]) -> bool:
    return bool(results_in(message))


def is_prompt(message: Mapping[str, Any]) -> bool:
    """Whether a user wrote it. Anthropic's tool results have the role user too, and are not prompts."""
    return message.get("role") == "user" and not is_result(message)


def estimated_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """A rough estimate for thresholds: a quarter of the characters, tool calls included."""
    return sum(len(text_of(one)) + sum(len(as_text(call.arguments)) for call in calls_in(one)) for one in messages) // 4


def as_text(value: object) -> str:
    return value if isinstance(value, str) else encode(value).decode("utf-8")


# Where a transcript can be cut.


def is_continuable(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a model can continue after `before`: every tool exchange in it is complete.

    An unanswered exchange counts as complete if other messages follow it in `before` and its result is not in `after`.
    """
    start = next((at for at in range(len(before) - 1, -1, -1) if before[at].get("role") == "assistant"), None)
    if start is None:
        return True
    open_ids = [call.id for call in calls_in(before[start])]
    for message in before[start + 1 :]:
        _answer(open_ids, message)
    if not open_ids:
        return True
    is_interrupted = any(not is_result(message) for message in before[start + 1 :])
    before_next = takewhile(lambda message: message.get("role") != "assistant", after)
    return is_interrupted and not any(one.id in open_ids for message in before_next for one in results_in(message))


def _answer(open_ids: list[str], message: Mapping[str, Any]) -> None:
    for result in results_in(message):
        if result.id in open_ids:
            open_ids.remove(result.id)


def sound_cuts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places where a list can be split without separating a result from its call, in order."""
    pairs = paired(messages)
    exchanges = [(at, found[0]) for at, answers in pairs.answers.items() for found in answers if found]
    blocked = {place for call, result in exchanges for place in range(call + 1, result + 1)}
    return [place for place in range(len(messages) + 1) if place not in blocked]


@fast_dataclass(slots=True)
class Pairs:
    """Which result answers which call. `answers` has, for each message with calls, one (message, result) or None per
    call; `orphans` has results without a call."""

    answers: dict[int, list[tuple[int, ToolAnswer] | None]] = field(default_factory=dict)
    orphans: dict[int, list[ToolAnswer]] = field(default_factory=dict)


def paired(messages: Sequence[Mapping[str, Any]]) -> Pairs:
    """Match results with calls. Providers repeat ids, so a result answers the newest unanswered call with its id."""
    found = Pairs()
    waiting: dict[str, list[tuple[int, int]]] = {}
    for at, message in enumerate(messages):
        for result in results_in(message):
            asked = waiting.get(result.id)
            if asked:
                place, number = asked.pop()
                found.answers[place][number] = (at, result)
            else:
                found.orphans.setdefault(at, []).append(result)
        calls = calls_in(message)
        if calls:
            found.answers[at] = [None] * len(calls)
        for number, call in enumerate(calls):
            waiting.setdefault(call.id, []).append((at, number))
    return found


Shape = Literal["openai", "anthropic"]

NO_RESULT = "There is no result: this call was cut off."
OMITTED = "(Earlier messages are not shown.)"
_SYSTEM_ROLES = ("system", "developer")
_ODD = re.compile("[^a-zA-Z0-9_-]")
_NAME_CHARS = 56


@fast_dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt for a model. For OpenAI the system text is also the first message; for Anthropic it is separate."""

    system: str | None
    messages: list[dict[str, Any]]


@fast_dataclass(slots=True, frozen=True)
class _Exchange:
    """An assistant message and one result for each of its calls."""

    message: Mapping[str, Any]
    calls: list[ToolCall]
    results: list[ToolAnswer]


@fast_dataclass(slots=True, frozen=True)
class _PlainMessage:
    role: str
    content: Any
    name: str | None = None


_Step = _PlainMessage | _Exchange


def for_model(messages: Sequence[Message], shape: Shape = "openai", *, system: str | None = None) -> Prompt:
    """The messages in the shape of a service: no call without its result, no result without its call."""
    if shape not in _WRITERS:
        raise fault("invalid_params", f"shape must be one of {', '.join(_WRITERS)}, not {shape!r}.", field="shape")
    return _WRITERS[shape](list(_steps(messages)), system)


def _steps(messages: Sequence[Message]) -> Iterator[_Step]:
    pairs, taken = paired(messages), set[str]()
    for at, message in enumerate(messages):
        calls = calls_in(message)
        if calls:
            yield _exchange(message, calls, pairs.answers[at], taken)
            continue
        for orphan in pairs.orphans.get(at, ()):
            yield _PlainMessage("user", f"Result of an earlier tool call: {_plain(orphan.content)}")
        if message["role"] not in RESULT_ROLES:
            yield _plain_message(message)


def _plain_message(message: Message) -> _PlainMessage:
    """A message without its tool results, which the exchange holds."""
    content, name = _without(message.get("content"), "tool_result"), message.get("name")
    role = message["role"]
    known = role if role in ("user", "assistant", *_SYSTEM_ROLES) else "user"
    return _PlainMessage(known, content, name if isinstance(name, str) and name else None)


def _exchange(
    message: Message, calls: list[ToolCall], answers: list[tuple[int, ToolAnswer] | None], taken: set[str]
) -> _Exchange:
    named = [ToolCall(_fresh_id(call.id, taken), _clean(call.name), call.arguments) for call in calls]
    results = [
        ToolAnswer(call.id, answer[1].content, answer[1].failed) if answer else ToolAnswer(call.id, NO_RESULT, True)
        for call, answer in zip(named, answers, strict=True)
    ]
    return _Exchange(message, named, results)


def _fresh_id(wanted: str, taken: set[str]) -> str:
    """An id that no other call of the prompt has. Some services match results by id alone and refuse repeated ids."""
    plain = found = _clean(wanted)
    number = 1
    while found in taken:
        number += 1
        found = f"{plain}_{number}"
    taken.add(found)
    return found


def _clean(name: str) -> str:
    """A name made of the characters that all services accept."""
    return _ODD.sub("_", name)[:_NAME_CHARS] or "call"


def _plain(content: object) -> str:
    """Content as text, never empty."""
    text = text_of({"content": content})
    return text or (as_text(content) if content not in (None, "", [], {}) else "(empty)")


# OpenAI's shape.


def _to_openai(steps: list[_Step], system: str | None) -> Prompt:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for step in steps:
        messages += _openai_exchange(step) if isinstance(step, _Exchange) else _openai_message(step)
    return Prompt(system, messages)


def _openai_exchange(step: _Exchange) -> list[dict[str, Any]]:
    hidden = ("tool_use", "tool_result", "thinking", "redacted_thinking")
    text = text_of({"content": _without(step.message.get("content"), *hidden)})
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": as_text(call.arguments)}}
        for call in step.calls
    ]
    asked = {"role": "assistant", "content": text or None, "tool_calls": calls}
    return [asked, *({"role": "tool", "tool_call_id": one.id, "content": _plain(one.content)} for one in step.results)]


def _openai_message(step: _PlainMessage) -> list[dict[str, Any]]:
    if step.role == "user" and isinstance(step.content, list):
        parts = [_openai_part(one) for one in step.content]
        return [_named({"role": "user", "content": parts}, step)] if parts else []
    text = text_of({"content": step.content})
    return [_named({"role": step.role, "content": text}, step)] if text else []


def _named(message: dict[str, Any], step: _PlainMessage) -> dict[str, Any]:
    return message | ({"name": step.name} if step.name else {})


def _openai_part(block: object) -> dict[str, Any]:
    if isinstance(block, Mapping):
        if block.get("type") == "image_url" and isinstance(block.get("image_url"), Mapping):
            return {"type": "image_url", "image_url": dict(block["image_url"])}
        source = block.get("source")
        if block.get("type") == "image" and isinstance(source, Mapping):
            return {"type": "image_url", "image_url": {"url": _image_url(source)}}
    return {"type": "text", "text": _plain(block)}


def _image_url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url"))
    return f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"


def _without(content: Any, *types: str) -> Any:
    """The content without its blocks of these types."""
    if not isinstance(content, list):
        return content
    return [one for one in content if not (isinstance(one, Mapping) and one.get("type") in types)]


# As Anthropic takes it.


def _to_anthropic(steps: list[_Step], system: str | None) -> Prompt:
    said = [text_of({"content": s.content}) for s in steps if isinstance(s, _PlainMessage) and s.role in _SYSTEM_ROLES]
    messages: list[dict[str, Any]] = []
    for step in steps:
        for message in _anthropic(step):
            _join(messages, message)
    if messages and messages[0]["role"] != "user":
        messages.insert(0, {"role": "user", "content": [{"type": "text", "text": OMITTED}]})
    return Prompt("\n\n".join(text for text in (system, *said) if text) or None, messages)


def _join(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """User and assistant take turns: what the same one says in a row is one message."""
    if messages and messages[-1]["role"] == message["role"]:
        messages[-1]["content"] += message["content"]
    elif message["content"]:
        messages.append(message)


def _anthropic(step: _Step) -> list[dict[str, Any]]:
    if isinstance(step, _Exchange):
        said = _anthropic_blocks(_without(step.message.get("content"), "tool_use", "tool_result"))
        uses = [{"type": "tool_use", "id": c.id, "name": c.name, "input": _object(c.arguments)} for c in step.calls]
        results = [_anthropic_result(one) for one in step.results]
        return [{"role": "assistant", "content": [*said, *uses]}, {"role": "user", "content": results}]
    if step.role in _SYSTEM_ROLES:
        return []
    return [{"role": step.role, "content": _anthropic_blocks(step.content)}]


def _anthropic_result(result: ToolAnswer) -> dict[str, Any]:
    body = {"type": "tool_result", "tool_use_id": result.id, "content": _plain(result.content)}
    return body | ({"is_error": True} if result.failed else {})


def _anthropic_blocks(content: Any) -> list[dict[str, Any]]:
    blocks = content if isinstance(content, list) else [content]
    return [made for block in blocks if (made := _anthropic_block(block)) is not None]


def _anthropic_block(block: Any) -> dict[str, Any] | None:
    """A block in a form that Anthropic accepts, else as text; None for an empty one, which Anthropic refuses."""
    if isinstance(block, Mapping):
        kind = block.get("type")
        if kind == "thinking" and isinstance(block.get("signature"), str):
            return {"type": kind, "thinking": str(block.get("thinking", "")), "signature": block["signature"]}
        if kind == "redacted_thinking" and isinstance(block.get("data"), str):
            return {"type": kind, "data": block["data"]}
        if kind == "image" and isinstance(block.get("source"), Mapping):
            return {"type": kind, "source": dict(block["source"])}
        if kind == "image_url" and isinstance(block.get("image_url"), Mapping):
            return {"type": "image", "source": _image_source(str(block["image_url"].get("url", "")))}
    text = text_of({"content": block})
    return {"type": "text", "text": text} if text.strip() else None


def _image_source(url: str) -> dict[str, Any]:
    head, comma, data = url.partition(";base64,")
    if head.startswith("data:") and comma:
        return {"type": "base64", "media_type": head[5:] or "image/png", "data": data}
    return {"type": "url", "url": url}


def _object(arguments: Any) -> dict[str, Any]:
    """Arguments as the object they are, also when they came as its text."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    try:
        read = decode(arguments) if isinstance(arguments, str) else arguments
    except MulliganError:
        read = arguments
    return read if isinstance(read, dict) else {"arguments": read}


_WRITERS = {"openai": _to_openai, "anthropic": _to_anthropic}
