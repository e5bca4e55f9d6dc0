"""Session files of Gemini CLI: lines that add a message, replace one, set a field of the whole, or rewind. Pure.

Older versions wrote one JSON document with the same fields. A message of the model lists its tool calls with their
results; newer files give the results again as a message of their own, which then counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mulligan.session.seed_records import Message, Record, Seed, is_said
from mulligan.values.canonical import encode

AGENT = "gemini"


def is_gemini_file(records: Sequence[Record]) -> bool:
    return any("sessionId" in one and "projectHash" in one for one in records[:1])


def seed_of_gemini(records: Sequence[Record]) -> Seed:
    seed = Seed(records=len(records), provider="google", agent=AGENT)
    said = _said(records, seed)
    answered = {one["id"] for message in said for one in _responses(message)}
    found = [message for one in said for message in _messages(one, answered, seed)]
    seed.messages = [message for message in _answered_once(found) if is_said(message)]
    return seed


def _answered_once(messages: Sequence[Message]) -> Iterator[Message]:
    """A resumed session writes results again: only the first answer to a call counts."""
    answered: set[Any] = set()
    for message in messages:
        identifier = message.get("tool_call_id")
        if identifier is None or identifier not in answered:
            yield message
        answered.add(identifier)


def _said(records: Sequence[Record], seed: Seed) -> list[Record]:
    """The messages that stand, after all replacements and rewinds."""
    standing: dict[str, Record] = {}
    for record in records:
        change = record.get("$set")
        if isinstance(record.get("$rewindTo"), str):
            standing = _before(standing, record["$rewindTo"])
        elif isinstance(change, Mapping):
            if isinstance(change.get("messages"), list):
                standing = _by_id(change["messages"])
            _take_metadata(seed, change)
        elif isinstance(record.get("id"), str):
            standing[record["id"]] = record
        else:
            _take_metadata(seed, record)
            standing |= _by_id(record.get("messages"))
    return list(standing.values())


def _before(standing: dict[str, Record], point: str) -> dict[str, Record]:
    """What was said before a message; nothing, if that message is not there."""
    ids = list(standing)
    return {one: standing[one] for one in ids[: ids.index(point)]} if point in standing else {}


def _by_id(messages: object) -> dict[str, Record]:
    listed = messages if isinstance(messages, list) else []
    return {one["id"]: one for one in listed if isinstance(one, Mapping) and isinstance(one.get("id"), str)}


def _take_metadata(seed: Seed, body: Record) -> None:
    if isinstance(body.get("sessionId"), str):
        seed.agent_session_id = body["sessionId"]
    for name in ("projectHash", "startTime", "kind"):
        if isinstance(body.get(name), str):
            seed.provenance[name] = body[name]


def _messages(record: Record, answered: set[Any], seed: Seed) -> Iterator[Message]:
    if record.get("type") == "user":
        text = _text(record.get("content"))
        if text:
            yield {"role": "user", "content": text}
        yield from (_tool_message(one["id"], one.get("name"), one.get("response")) for one in _responses(record))
    elif record.get("type") == "gemini":
        seed.model = record["model"] if isinstance(record.get("model"), str) else seed.model
        calls = [one for one in _items(record.get("toolCalls")) if _has_id(one)]
        yield _answer(record, calls)
        yield from (_inline_result(one) for one in calls if one["id"] not in answered and one.get("result") is not None)


def _answer(record: Record, calls: Sequence[Record]) -> Message:
    message: Message = {"role": "assistant", "content": _text(record.get("content"))}
    thoughts = [
        f"{one.get('subject', '')}\n{one.get('description', '')}".strip() for one in _items(record.get("thoughts"))
    ]
    if any(thoughts):
        message["reasoning"] = "\n\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = [
            {
                "id": one["id"],
                "type": "function",
                "function": {"name": one.get("name"), "arguments": _json(one.get("args"))},
            }
            for one in calls
        ]
    return message


def _inline_result(call: Record) -> Message:
    parts = _items(call.get("result"))
    responses = [one["functionResponse"] for one in parts if isinstance(one.get("functionResponse"), Mapping)]
    response = responses[0].get("response") if responses else call.get("result")
    return _tool_message(call["id"], call.get("name"), response)


def _tool_message(identifier: str, name: object, response: object) -> Message:
    body: Record = response if isinstance(response, Mapping) else {}
    text = next((body[key] for key in ("output", "error") if isinstance(body.get(key), str)), None)
    content = text if text is not None else response if isinstance(response, str) else _json(response)
    named = {"name": name} if isinstance(name, str) else {}
    return {"role": "tool", "tool_call_id": identifier, **named, "content": content}


def _responses(record: Record) -> list[Record]:
    if record.get("type") != "user":
        return []
    parts = (one.get("functionResponse") for one in _items(record.get("content")))
    return [one for one in parts if isinstance(one, Mapping) and _has_id(one)]


def _has_id(body: Record) -> bool:
    return isinstance(body.get("id"), str) and body["id"] != ""


def _items(value: object) -> list[Record]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    texts = [one["text"] for one in _items(content) if isinstance(one.get("text"), str) and not one.get("thought")]
    return "\n".join(texts)


def _json(value: object) -> str:
    return encode({} if value is None else value).decode("utf-8")
