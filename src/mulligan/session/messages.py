"""What a message means: the tool calls it makes and the results it brings, and where talk can be cut. Pure.

Messages are kept as they came, in whatever shape their provider gave them. Here they are read in all of the common
shapes: OpenAI's `tool_calls` and role `tool`, Anthropic's `tool_use` and `tool_result` blocks, and plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mulligan.session.transcript import text_of
from mulligan.values.canonical import encode
from mulligan.values.plain import plain

RESULT_ROLES = ("tool", "tool_result", "function")


@plain(slots=True, frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: Any


@dataclass(slots=True, frozen=True)
class ToolResult:
    id: str
    content: Any
    failed: bool = False


def calls_in(message: Mapping[str, Any]) -> list[ToolCall]:
    """The tool calls an assistant message makes, in order."""
    if message.get("role") != "assistant":
        return []
    listed = [*_items(message.get("tool_calls")), *_items(message.get("native_tool_calls"))]
    blocks = [block for block in _items(message.get("content")) if block.get("type") == "tool_use"]
    return [_call(one) for one in (*listed, *blocks)]


def _items(value: object) -> list[Mapping[str, Any]]:
    # A text is a sequence too, of characters that nobody wants to look at one by one.
    if isinstance(value, str) or not isinstance(value, Sequence):
        return []
    return [one for one in value if isinstance(one, Mapping)]


def _call(body: Mapping[str, Any]) -> ToolCall:
    function = body.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else body
    arguments: Any = next((inner[key] for key in ("arguments", "input", "args") if inner.get(key) is not None), {})
    return ToolCall(_id(body, "id", "call_id", "tool_use_id"), str(inner.get("name") or "tool"), arguments)


def results_in(message: Mapping[str, Any]) -> list[ToolResult]:
    """The tool results a message brings, in order."""
    if message.get("role") in RESULT_ROLES:
        failed = bool(message.get("is_error"))
        return [ToolResult(_id(message, "tool_call_id", "tool_use_id", "call_id"), message.get("content"), failed)]
    blocks = (block for block in _items(message.get("content")) if block.get("type") == "tool_result")
    return [ToolResult(_id(one, "tool_use_id"), one.get("content"), bool(one.get("is_error"))) for one in blocks]


def _id(body: Mapping[str, Any], *names: str) -> str:
    return next((str(body[name]) for name in names if body.get(name)), "")


def is_result(message: Mapping[str, Any]) -> bool:
    return bool(results_in(message))


def is_prompt(message: Mapping[str, Any]) -> bool:
    """Said by a user, and not a tool's answer in a user's clothes."""
    return message.get("role") == "user" and not is_result(message)


def estimated_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """A quarter of the characters, tool calls included. For thresholds, not for bills."""
    return sum(len(text_of(one)) + sum(len(as_text(call.arguments)) for call in calls_in(one)) for one in messages) // 4


def as_text(value: object) -> str:
    return value if isinstance(value, str) else encode(value).decode("utf-8")


# Where talk can go on.


def is_continuable(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> bool:
    """Whether talk can be cut here: no tool exchange that `before` began is still waiting for its results.

    An exchange that somebody talked over without ever answering it is over; one whose result comes in `after` is not.
    """
    start = next((at for at in range(len(before) - 1, -1, -1) if before[at].get("role") == "assistant"), None)
    if start is None:
        return True
    open_ids = [call.id for call in calls_in(before[start])]
    for message in before[start + 1 :]:
        _answer(open_ids, message)
    if not open_ids:
        return True
    talked_over = any(not is_result(message) for message in before[start + 1 :])
    return talked_over and not any(result.id in open_ids for result in _results_before_next(after))


def _answer(open_ids: list[str], message: Mapping[str, Any]) -> None:
    for result in results_in(message):
        if result.id in open_ids:
            open_ids.remove(result.id)


def _results_before_next(after: Sequence[Mapping[str, Any]]) -> Iterator[ToolResult]:
    for message in after:
        if message.get("role") == "assistant":
            return
        yield from results_in(message)


def sound_cuts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places at which a list can be divided without parting a result from its call, in order."""
    pairs = paired(messages)
    blocked = {
        place
        for at, answers in pairs.answers.items()
        for found in answers
        if found
        for place in range(at + 1, found[0] + 1)
    }
    return [place for place in range(len(messages) + 1) if place not in blocked]


@dataclass(slots=True)
class Pairs:
    """Which result answers which call: for each message with calls, (message, result) for each call, or None."""

    answers: dict[int, list[tuple[int, ToolResult] | None]] = field(default_factory=dict)
    orphans: dict[int, list[ToolResult]] = field(default_factory=dict)


def paired(messages: Sequence[Mapping[str, Any]]) -> Pairs:
    """Providers repeat ids, so a result answers the newest unanswered call with its id."""
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
