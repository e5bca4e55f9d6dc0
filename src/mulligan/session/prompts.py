"""What a model is sent. Pure.

It is always whole: every tool call is followed at once by its result. A result that is not in force is made up and says
so; a result whose call is not in force becomes plain text. So talk may be cut anywhere and can still be sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from mulligan.session.messages import RESULT_ROLES, ToolCall, ToolResult, as_text, calls_in, paired
from mulligan.session.transcript import Message, text_of
from mulligan.values.canonical import decode
from mulligan.values.faults import MulliganError, fault
from mulligan.values.plain import plain

Shape = Literal["openai", "anthropic"]

NO_RESULT = "There is no result: this call was cut off."
OMITTED = "(Earlier messages are not shown.)"
_SYSTEM_ROLES = ("system", "developer")
_ODD = re.compile("[^a-zA-Z0-9_-]")
_NAME_CHARS = 56


@plain(slots=True, frozen=True)
class Prompt:
    """What a model is sent. For OpenAI the system text is the first message as well; for Anthropic it is apart."""

    system: str | None
    messages: list[dict[str, Any]]


@plain(slots=True, frozen=True)
class _Exchange:
    """An assistant's calls with their results, all there."""

    message: Mapping[str, Any]
    calls: list[ToolCall]
    results: list[ToolResult]


@plain(slots=True, frozen=True)
class _Said:
    role: str
    content: Any
    name: str | None = None


_Step = _Said | _Exchange


def for_model(messages: Sequence[Message], shape: Shape = "openai", *, system: str | None = None) -> Prompt:
    """The messages as a model of that shape takes them: no call without its result, no result without its call."""
    if shape not in _WRITERS:
        raise fault("invalid_params", f"shape is one of {', '.join(_WRITERS)}, not {shape!r}.", field="shape")
    return _WRITERS[shape](list(_steps(messages)), system)


def _steps(messages: Sequence[Message]) -> Iterator[_Step]:
    pairs, taken = paired(messages), set[str]()
    for at, message in enumerate(messages):
        calls = calls_in(message)
        if calls:
            yield _exchange(message, calls, pairs.answers[at], taken)
            continue
        for orphan in pairs.orphans.get(at, ()):
            yield _Said("user", f"Result of an earlier tool call: {_plain(orphan.content)}")
        if message["role"] not in RESULT_ROLES:
            yield _said(message)


def _said(message: Message) -> _Said:
    """A message without the results in it, which stand elsewhere."""
    content, name = message.get("content"), message.get("name")
    if isinstance(content, list):
        content = [one for one in content if not (isinstance(one, Mapping) and one.get("type") == "tool_result")]
    role = message["role"]
    known = role if role in ("user", "assistant", *_SYSTEM_ROLES) else "user"
    return _Said(known, content, name if isinstance(name, str) and name else None)


def _exchange(
    message: Message, calls: list[ToolCall], answers: list[tuple[int, ToolResult] | None], taken: set[str]
) -> _Exchange:
    named = [ToolCall(_fresh_id(call.id, taken), _clean(call.name), call.arguments) for call in calls]
    results = [
        ToolResult(call.id, answer[1].content, answer[1].failed) if answer else ToolResult(call.id, NO_RESULT, True)
        for call, answer in zip(named, answers, strict=True)
    ]
    return _Exchange(message, named, results)


def _fresh_id(wanted: str, taken: set[str]) -> str:
    """Ids are distinct in all that is sent, as some services insist: what answers what must not depend on order."""
    plain = found = _clean(wanted)
    number = 1
    while found in taken:
        number += 1
        found = f"{plain}_{number}"
    taken.add(found)
    return found


def _clean(name: str) -> str:
    """A name of the letters that all services take."""
    return _ODD.sub("_", name)[:_NAME_CHARS] or "call"


def _plain(content: object) -> str:
    """Content as text: never empty, whatever it is."""
    text = text_of({"content": content})
    return text or (as_text(content) if content not in (None, "", [], {}) else "(empty)")


# As OpenAI takes it.


def _to_openai(steps: list[_Step], system: str | None) -> Prompt:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for step in steps:
        messages += _openai_exchange(step) if isinstance(step, _Exchange) else _openai_said(step)
    return Prompt(system, messages)


def _openai_exchange(step: _Exchange) -> list[dict[str, Any]]:
    text = text_of({"content": _without_tools(step.message.get("content"))})
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": as_text(call.arguments)}}
        for call in step.calls
    ]
    asked = {"role": "assistant", "content": text or None, "tool_calls": calls}
    return [asked, *({"role": "tool", "tool_call_id": one.id, "content": _plain(one.content)} for one in step.results)]


def _openai_said(step: _Said) -> list[dict[str, Any]]:
    if step.role == "user" and isinstance(step.content, list):
        parts = [_openai_part(one) for one in step.content]
        return [_named({"role": "user", "content": parts}, step)] if parts else []
    text = text_of({"content": step.content})
    return [_named({"role": step.role, "content": text}, step)] if text else []


def _named(message: dict[str, Any], step: _Said) -> dict[str, Any]:
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


def _without_tools(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    hidden = ("tool_use", "tool_result", "thinking", "redacted_thinking")
    return [one for one in content if not (isinstance(one, Mapping) and one.get("type") in hidden)]


# As Anthropic takes it.


def _to_anthropic(steps: list[_Step], system: str | None) -> Prompt:
    said = [text_of({"content": s.content}) for s in steps if isinstance(s, _Said) and s.role in _SYSTEM_ROLES]
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
        said = _anthropic_blocks(_without_calls(step.message.get("content")))
        uses = [{"type": "tool_use", "id": c.id, "name": c.name, "input": _object(c.arguments)} for c in step.calls]
        results = [_anthropic_result(one) for one in step.results]
        return [{"role": "assistant", "content": [*said, *uses]}, {"role": "user", "content": results}]
    if step.role in _SYSTEM_ROLES:
        return []
    return [{"role": step.role, "content": _anthropic_blocks(step.content)}]


def _anthropic_result(result: ToolResult) -> dict[str, Any]:
    body = {"type": "tool_result", "tool_use_id": result.id, "content": _plain(result.content)}
    return body | ({"is_error": True} if result.failed else {})


def _without_calls(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [one for one in content if not (isinstance(one, Mapping) and one.get("type") in ("tool_use", "tool_result"))]


def _anthropic_blocks(content: Any) -> list[dict[str, Any]]:
    blocks = content if isinstance(content, list) else [content]
    return [made for block in blocks if (made := _anthropic_block(block)) is not None]


def _anthropic_block(block: Any) -> dict[str, Any] | None:
    """A block as it is taken, or as text; None for nothing at all, which is refused."""
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
