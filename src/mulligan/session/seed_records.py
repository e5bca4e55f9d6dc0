"""From the lines of a transcript file to the messages a model saw. Pure.

A file is one of three formats: lines that are messages; requests that each hold the whole list so far; or nothing but
what a provider answered. Files of other agents have readers of their own (`claude_files`, `codex_files`,
`gemini_files`), which give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mulligan.values.canonical import decode
from mulligan.values.faults import MulliganError

Record = Mapping[str, Any]
Message = dict[str, Any]
SourceFormat = Literal["message_events", "request_snapshots", "provider_responses_only"]

_MESSAGE_TYPES = ("message", "tool_result", "tool_results")
_MESSAGE_KEYS = ("name", "tool_call_id", "tool_use_id", "tool_calls", "native_tool_calls", "reasoning")


class Unreadable(Exception):
    """The file is no transcript. The message is for a person, says where, and never shows what stands there."""


@dataclass(slots=True)
class Seed:
    """What a file gives: messages in order, and what it says about where they come from."""

    source_format: SourceFormat = "message_events"
    messages: list[Message] = field(default_factory=list)
    records: int = 0
    system_prompt: str | None = None
    provider: str | None = None
    model: str | None = None
    tool_format: str | None = None
    partial: bool = False
    agent: str | None = None
    agent_session_id: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


def records_in(data: bytes, *, may_be_cut: bool = False) -> tuple[list[Record], bool]:
    """The objects of a file, one a line, and whether a last line that was still being written was left out."""
    found: list[Record] = []
    lines = data.split(b"\n")
    last = max((number for number, line in enumerate(lines) if line.strip()), default=0)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = decode(line)
        except MulliganError:
            if may_be_cut and number == last and found:
                return found, True
            raise Unreadable(f"Line {number + 1} is not valid JSON.") from None
        if not isinstance(value, dict):
            raise Unreadable(f"Line {number + 1} is not a JSON object.")
        found.append(value)
    return found, False


def seed_of(records: Sequence[Record]) -> Seed:
    """The messages of a transcript in one of the three formats."""
    seed = Seed(source_format=format_of(records), records=len(records))
    for record in records:
        _take_metadata(seed, record)
    taken = _TAKERS[seed.source_format](records)
    seed.messages = [message for message in taken if is_said(message)]
    seed.partial = seed.source_format == "provider_responses_only"
    return seed


def format_of(records: Sequence[Record]) -> SourceFormat:
    if any(type_of(record) in _MESSAGE_TYPES for record in records):
        return "message_events"
    if any(snapshot_in(record) is not None for record in records):
        return "request_snapshots"
    return "provider_responses_only"


def type_of(record: Record) -> str:
    found = record.get("type") or record.get("kind")
    return found if isinstance(found, str) else ""


def snapshot_in(record: Record) -> list[Any] | None:
    """The whole list of messages that a request carried."""
    for place in (record.get("request_snapshot"), record):
        if isinstance(place, Mapping) and isinstance(place.get("messages"), list):
            return list(place["messages"])
    return None


def is_said(message: object) -> bool:
    """Whether a model would see it: it has a role, and content or tool calls."""
    if not isinstance(message, Mapping):
        return False
    role = message.get("role")
    said = any(message.get(key) not in (None, "", []) for key in ("content", "tool_calls", "native_tool_calls"))
    return isinstance(role, str) and bool(role.strip()) and said


def _from_events(records: Sequence[Record]) -> list[Message]:
    return [message for record in records for message in _messages_of(record)]


def _messages_of(record: Record) -> Iterator[Message]:
    kind = type_of(record)
    if kind == "tool_results":
        yield from _tool_results(record)
    elif kind in ("message", "tool_result"):
        given = record.get("message")
        yield dict(given) if isinstance(given, Mapping) else _built(record, "tool_result" if kind != "message" else "")


def _built(record: Record, role: str) -> Message:
    """A message whose parts lie in the record itself."""
    body: Message = {"role": record.get("role") or role, "content": _first(record, "content", "text")}
    return body | {key: record[key] for key in _MESSAGE_KEYS if record.get(key) is not None}


def _tool_results(record: Record) -> Iterator[Message]:
    listed = record.get("messages")
    if isinstance(listed, list):
        yield from (dict(one) for one in listed if isinstance(one, Mapping))
        return
    results = record.get("results")
    for one in results if isinstance(results, list) else ():
        if isinstance(one, Mapping):
            body = {
                "name": _first(one, "tool_name", "name"),
                "content": _first(one, "observation", "rendered_result", "output", "content"),
                "tool_call_id": _first(one, "tool_call_id", "tool_use_id", "id"),
            }
            yield {"role": "tool", **{key: value for key, value in body.items() if value is not None}}


def _first(body: Record, *names: str) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), None)


def _from_snapshots(records: Sequence[Record]) -> list[Message]:
    """Each request says the whole list anew; each answer is one message more."""
    found: list[Message] = []
    for record in records:
        snapshot = snapshot_in(record)
        if snapshot is not None:
            found = [dict(one) for one in snapshot if isinstance(one, Mapping)]
        else:
            found += _answers([record])
    return found


def _answers(records: Sequence[Record]) -> list[Message]:
    return [_answer(record) for record in records if _is_response(record)]


def _answer(record: Record) -> Message:
    inner = record.get("response")
    body: Record = {**record, **inner} if isinstance(inner, Mapping) else record
    given = body.get("message")
    if isinstance(given, Mapping):
        return {"role": "assistant", **given}
    content = inner if isinstance(inner, str) else _first(body, "content", "text", "response_text", "visible_text")
    message: Message = {"role": "assistant", "content": content}
    return message | {key: body[key] for key in _MESSAGE_KEYS if body.get(key) is not None}


def _is_response(record: Record) -> bool:
    return "response" in type_of(record) or "response" in record


_TAKERS = {
    "message_events": _from_events,
    "request_snapshots": _from_snapshots,
    "provider_responses_only": _answers,
}


def _take_metadata(seed: Seed, record: Record) -> None:
    """Requests say what was asked of whom, and the last one counts; answers only fill what nobody has said."""
    if type_of(record) == "system_prompt":
        seed.system_prompt = _text(record, "content", "text", "system_prompt") or seed.system_prompt
    elif snapshot_in(record) is not None or "request" in type_of(record):
        inner = record.get("request_snapshot")
        body: Record = {**record, **inner} if isinstance(inner, Mapping) else record
        seed.system_prompt = _text(body, "system", "system_prompt") or seed.system_prompt
        seed.provider = _text(body, "provider") or seed.provider
        seed.model = _text(body, "model") or seed.model
        seed.tool_format = _text(body, "tool_format") or seed.tool_format
    elif _is_response(record):
        seed.provider = seed.provider or _text(record, "provider")
        seed.model = seed.model or _text(record, "model")


def _text(body: Record, *names: str) -> str | None:
    found = _first(body, *names)
    return found if isinstance(found, str) and found else None
