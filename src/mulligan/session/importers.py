"""Creates a session from a transcript file of Mulligan or of another agent.

`seed_from_jsonl` reads the file into messages, lets the options select among them, checks the rest, and creates the
session in one transaction. A bad file is an answer (`{ok: false, error}`); bad options raise. Everything but
`seed_from_jsonl` and its helpers at the end is pure.

Mulligan's own formats are three: lines that are messages; requests that each hold the whole list so far; or only the
answers of a provider. The readers of other agents' files give the same `ImportedTranscript`:

- Claude Code writes one JSON object per line, and each names the line before it. A rewind or a retry starts another
  branch, so the file is a tree. The model saw the path from the newest line back to the first one or to the last
  compaction. One answer can have several lines with one message id. Results of tools that ran in parallel are on side
  branches and belong to the path.
- Codex writes items of the Responses API ("rollouts"), each in an envelope. Consecutive items of the model (reasoning,
  text, tool calls) become one assistant message; each output becomes a tool message. A compaction replaces everything
  before it; a rollback removes whole turns from the end.
- Gemini CLI writes lines that add a message, replace one, set a field of the session, or rewind. Older versions wrote
  one JSON document with the same fields. A model's message lists its tool calls with their results; newer files repeat
  the results in a message of their own, and then only that message counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mulligan.session.lifecycle import (
    SYSTEM_PROMPT,
    TOOL_FORMAT,
    checked_count,
    checked_options,
    fresh_id,
    set_facts_in,
)
from mulligan.session.messages import RESULT_ROLES, estimated_tokens
from mulligan.session.tables import session_journal
from mulligan.session.transcript_log import Archive, append_message_in, pack_message
from mulligan.store.blobs import BlobVanishedError
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.limits import GIB_BYTES

Record = Mapping[str, Any]
Message = dict[str, Any]
SourceFormat = Literal["message_events", "request_snapshots", "provider_responses_only"]

_MESSAGE_TYPES = ("message", "tool_result", "tool_results")
_MESSAGE_KEYS = ("name", "tool_call_id", "tool_use_id", "tool_calls", "native_tool_calls", "reasoning")


class UnreadableFileError(Exception):
    """The file is not a transcript. The message names the line for a person, and never shows its content."""


@fast_dataclass(slots=True)
class ImportedTranscript:
    """What a reader found in a file: the messages in order, and their origin."""

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
    """The objects of a file, one per line, and whether the last line was left out because it was incomplete."""
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
            raise UnreadableFileError(f"Line {number + 1} is not valid JSON.") from None
        if not isinstance(value, dict):
            raise UnreadableFileError(f"Line {number + 1} is not a JSON object.")
        found.append(value)
    return found, False


def seed_of(records: Sequence[Record]) -> ImportedTranscript:
    """The messages of a transcript in one of the three formats."""
    seed = ImportedTranscript(source_format=format_of(records), records=len(records))
    for record in records:
        _read_metadata(seed, record)
    taken = _METADATA_READERS[seed.source_format](records)
    seed.messages = [message for message in taken if is_message(message)]
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


def is_message(message: object) -> bool:
    """Whether a model would receive it: it has a role, and content or tool calls."""
    if not isinstance(message, Mapping):
        return False
    role = message.get("role")
    said = any(message.get(key) not in (None, "", []) for key in ("content", "tool_calls", "native_tool_calls"))
    return isinstance(role, str) and bool(role.strip()) and said


def _messages_of(record: Record) -> Iterator[Message]:
    kind = type_of(record)
    if kind == "tool_results":
        yield from _tool_results(record)
    elif kind in ("message", "tool_result"):
        given = record.get("message")
        yield dict(given) if isinstance(given, Mapping) else _built(record, "tool_result" if kind != "message" else "")


def _built(record: Record, role: str) -> Message:
    """A message whose fields are in the record itself."""
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
    """Each request repeats the whole list; each answer adds one message."""
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


_METADATA_READERS = {
    "message_events": lambda records: [message for record in records for message in _messages_of(record)],
    "request_snapshots": _from_snapshots,
    "provider_responses_only": _answers,
}


def _read_metadata(seed: ImportedTranscript, record: Record) -> None:
    """Read provider and model. The last request counts; answers only fill in what no request names."""
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


CLAUDE_CODE = "claude"


def is_claude_file(records: Sequence[Record]) -> bool:
    return any("sessionId" in one and "uuid" in one and one.get("type") in ("user", "assistant") for one in records)


def seed_of_claude(records: Sequence[Record]) -> ImportedTranscript:
    lines = [one for one in records if isinstance(one.get("uuid"), str) and one.get("isSidechain") is not True]
    chain = _chain(lines)
    spoken = [line for line in _with_siblings(chain, lines) if _is_spoken(line)]
    seed = ImportedTranscript(records=len(records), provider="anthropic", agent=CLAUDE_CODE)
    seed.messages = [message for message in _merged(spoken) if is_message(message)]
    for line in chain:
        _read_claude_metadata(seed, line)
    return seed


def _chain(lines: Sequence[Record]) -> list[Record]:
    """The path from the newest line back by parents. It ends at a compaction, which has no parent."""
    by_id = {line["uuid"]: line for line in lines}
    at = next((line for line in reversed(lines) if line.get("type") in ("user", "assistant")), None)
    found: dict[str, Record] = {}
    while at is not None and at["uuid"] not in found:
        found[at["uuid"]] = at
        at = by_id.get(str(at.get("parentUuid")))
    return list(found.values())[::-1]


def _with_siblings(chain: Sequence[Record], lines: Sequence[Record]) -> list[Record]:
    """The path with the side branches that belong to it, each at its place in the file."""
    on_way = {line["uuid"] for line in chain}
    answers = {_message_id(line) for line in chain if line.get("type") == "assistant"} - {None}
    parts = [line for line in lines if line["uuid"] in on_way or _message_id(line) in answers]
    asked = {str(block.get("id")) for line in parts for block in _blocks(line) if block.get("type") == "tool_use"}
    wanted = {line["uuid"] for line in parts}
    wanted |= {line["uuid"] for line in lines if _results(line) and _results(line) <= asked}
    return [line for line in lines if line["uuid"] in wanted]


def _message_id(line: Record) -> str | None:
    message = line.get("message")
    found = message.get("id") if isinstance(message, Mapping) and line.get("type") == "assistant" else None
    return found if isinstance(found, str) else None


def _blocks(line: Record) -> list[Mapping[str, Any]]:
    message = line.get("message")
    content = message.get("content") if isinstance(message, Mapping) else None
    return _as_blocks(content) if isinstance(content, list) else []


def _results(line: Record) -> set[Any]:
    if line.get("type") != "user":
        return set()
    return {str(block.get("tool_use_id")) for block in _blocks(line) if block.get("type") == "tool_result"}


def _is_spoken(line: Record) -> bool:
    message = line.get("message")
    if line.get("type") not in ("user", "assistant") or not isinstance(message, Mapping):
        return False
    hidden = line.get("isVisibleInTranscriptOnly") is True and line.get("isCompactSummary") is not True
    return not hidden and line.get("isApiErrorMessage") is not True and message.get("model") != "<synthetic>"


def _merged(lines: Sequence[Record]) -> Iterator[Message]:
    """The lines of one answer become one message, and so do the results that follow it."""
    open_message: Message | None = None
    open_key: object = None
    for line in lines:
        key = _message_id(line) or ("results" if _results(line) else line["uuid"])
        if open_message is not None and key == open_key:
            more = _as_blocks(line["message"].get("content"))
            open_message["content"] = [*_as_blocks(open_message["content"]), *more]
            continue
        if open_message is not None:
            yield open_message
        open_message, open_key = _message(line), key
    if open_message is not None:
        yield open_message


def _as_blocks(content: object) -> list[Any]:
    """The content as blocks. A line may have a plain text instead, or nothing."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [one for one in content if isinstance(one, Mapping)] if isinstance(content, list) else []


def _message(line: Record) -> Message:
    message = line["message"]
    return {"role": message.get("role") or line["type"], "content": message.get("content")}


def _read_claude_metadata(seed: ImportedTranscript, line: Record) -> None:
    if isinstance(line.get("sessionId"), str):
        seed.agent_session_id = line["sessionId"]
    for name in ("cwd", "version", "gitBranch"):
        if isinstance(line.get(name), str):
            seed.provenance[name] = line[name]
    message, attachment = line.get("message"), line.get("attachment")
    if _is_spoken(line) and isinstance(message, Mapping) and isinstance(message.get("model"), str):
        seed.model = message["model"]
    if isinstance(attachment, Mapping) and attachment.get("type") == "prompt_snapshot":
        parts = attachment.get("systemPrompt")
        texts = [one for one in parts if isinstance(one, str)] if isinstance(parts, list) else []
        seed.system_prompt = "\n\n".join(texts) or seed.system_prompt


CODEX = "codex"
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("local_shell_call", "local_shell_call_output", "web_search_call", "tool_search_call"),
)
# The first words of texts that Codex itself adds in the user's name.
_NOT_TYPED = ("<environment_context", "<user_instructions", "<turn_aborted", "<skill", "<user_shell", "# AGENTS.md")


def is_codex_file(records: Sequence[Record]) -> bool:
    first = records[0] if records else {}
    return first.get("type") == "session_meta" or ("instructions" in first and "timestamp" in first)


def seed_of_codex(records: Sequence[Record]) -> ImportedTranscript:
    seed = ImportedTranscript(records=len(records), agent=CODEX)
    items: list[Record] = []
    for record in records:
        payload = record.get("payload")
        body: Record = payload if isinstance(payload, Mapping) else record
        kind = record.get("type")
        if kind == "response_item" or (kind in _ITEMS and payload is None):
            items.append(body)
        elif kind == "compacted":
            items = _replacement(body)
        elif kind == "event_msg" and body.get("type") == "thread_rolled_back":
            items = _rolled_back(items, body.get("num_turns"))
        else:
            _read_codex_metadata(seed, kind, body)
    seed.messages = [message for message in _codex_messages(items) if is_message(message)]
    return seed


def _replacement(body: Record) -> list[Record]:
    history = body.get("replacement_history")
    if isinstance(history, list):
        return [one.get("item", one) if isinstance(one, Mapping) else {} for one in history]
    return [{"type": "message", "role": "user", "content": body.get("message")}]


def _rolled_back(items: list[Record], turns: object) -> list[Record]:
    from_user = [(at, _codex_text(item.get("content"))) for at, item in enumerate(items) if item.get("role") == "user"]
    starts = [at for at, text in from_user if not text.lstrip().startswith(_NOT_TYPED)]
    count = turns if isinstance(turns, int) else 1
    return items[: starts[-count]] if 0 < count <= len(starts) else items if count <= 0 else items[: starts[0]]


def _codex_messages(items: Sequence[Record]) -> list[Message]:
    found: list[Message] = []
    for item in items:
        kind = item.get("type")
        if kind == "message" and item.get("role") != "assistant":
            found.append({"role": item.get("role"), "content": _codex_text(item.get("content"))})
        elif str(kind).endswith("_output"):
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))})
        elif kind in _ITEMS:
            _add_item(_answer_at_end(found), item)
    return found


def _answer_at_end(found: list[Message]) -> Message:
    """The assistant message at the end, to which items are added; a new one if there is none."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _add_item(message: Message, item: Record) -> None:
    kind = item.get("type")
    if kind == "message":
        message["content"] = "\n\n".join(filter(None, [message["content"], _codex_text(item.get("content"))]))
    elif kind == "reasoning":
        text = _codex_text(item.get("summary")) or _codex_text(item.get("content"))
        if text:
            message["reasoning"] = "\n\n".join(filter(None, [message.get("reasoning", ""), text]))
    else:
        message.setdefault("tool_calls", []).append(_tool_call(item))


def _tool_call(item: Record) -> dict[str, Any]:
    given = _first(item, "arguments", "input", "action")
    arguments = given if isinstance(given, str) else _json(given)
    name = item.get("name") or str(item.get("type")).removesuffix("_call")
    return _function_call(item.get("call_id") or item.get("id"), name, arguments)


def _output(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("content", value)
    if isinstance(value, str):
        return value
    return _codex_text(value) or encode(value).decode("utf-8")


def _codex_text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(one["text"] for one in _items(content) if isinstance(one.get("text"), str))


def _read_codex_metadata(seed: ImportedTranscript, kind: object, body: Record) -> None:
    if kind == "session_meta" or (kind is None and "instructions" in body):
        seed.agent_session_id = _string(body.get("id")) or seed.agent_session_id
        seed.provider = _string(body.get("model_provider")) or seed.provider
        instructions = body.get("base_instructions")
        text = instructions.get("text") if isinstance(instructions, Mapping) else body.get("instructions")
        seed.system_prompt = _string(text) or seed.system_prompt
        for name in ("cwd", "cli_version", "originator"):
            if isinstance(body.get(name), str):
                seed.provenance[name] = body[name]
    elif kind == "turn_context":
        seed.model = _string(body.get("model")) or seed.model


def _string(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


GEMINI_CLI = "gemini"


def is_gemini_file(records: Sequence[Record]) -> bool:
    return any("sessionId" in one and "projectHash" in one for one in records[:1])


def seed_of_gemini(records: Sequence[Record]) -> ImportedTranscript:
    seed = ImportedTranscript(records=len(records), provider="google", agent=GEMINI_CLI)
    said = _messages_after_rewinds(records, seed)
    answered = {one["id"] for message in said for one in _responses(message)}
    found = [message for one in said for message in _gemini_messages(one, answered, seed)]
    seed.messages = [message for message in _answered_once(found) if is_message(message)]
    return seed


def _answered_once(messages: Sequence[Message]) -> Iterator[Message]:
    """Without repeated results. A resumed session writes results again; the first answer to a call counts."""
    answered: set[Any] = set()
    for message in messages:
        identifier = message.get("tool_call_id")
        if identifier is None or identifier not in answered:
            yield message
        answered.add(identifier)


def _messages_after_rewinds(records: Sequence[Record], seed: ImportedTranscript) -> list[Record]:
    """The messages after all replacements and rewinds."""
    current: dict[str, Record] = {}
    for record in records:
        change = record.get("$set")
        if isinstance(record.get("$rewindTo"), str):
            current = _before(current, record["$rewindTo"])
        elif isinstance(change, Mapping):
            if isinstance(change.get("messages"), list):
                current = _by_id(change["messages"])
            _read_gemini_metadata(seed, change)
        elif isinstance(record.get("id"), str):
            current[record["id"]] = record
        else:
            _read_gemini_metadata(seed, record)
            current |= _by_id(record.get("messages"))
    return list(current.values())


def _before(current: dict[str, Record], point: str) -> dict[str, Record]:
    """The messages before a message; none if it is missing."""
    ids = list(current)
    return {one: current[one] for one in ids[: ids.index(point)]} if point in current else {}


def _by_id(messages: object) -> dict[str, Record]:
    listed = messages if isinstance(messages, list) else []
    return {one["id"]: one for one in listed if isinstance(one, Mapping) and isinstance(one.get("id"), str)}


def _read_gemini_metadata(seed: ImportedTranscript, body: Record) -> None:
    if isinstance(body.get("sessionId"), str):
        seed.agent_session_id = body["sessionId"]
    for name in ("projectHash", "startTime", "kind"):
        if isinstance(body.get(name), str):
            seed.provenance[name] = body[name]


def _gemini_messages(record: Record, answered: set[Any], seed: ImportedTranscript) -> Iterator[Message]:
    if record.get("type") == "user":
        text = _gemini_text(record.get("content"))
        if text:
            yield {"role": "user", "content": text}
        yield from (_tool_message(one["id"], one.get("name"), one.get("response")) for one in _responses(record))
    elif record.get("type") == "gemini":
        seed.model = record["model"] if isinstance(record.get("model"), str) else seed.model
        calls = [one for one in _items(record.get("toolCalls")) if _has_id(one)]
        yield _answer_gemini_files(record, calls)
        yield from (_inline_result(one) for one in calls if one["id"] not in answered and one.get("result") is not None)


def _answer_gemini_files(record: Record, calls: Sequence[Record]) -> Message:
    message: Message = {"role": "assistant", "content": _gemini_text(record.get("content"))}
    parts = [(one.get("subject", ""), one.get("description", "")) for one in _items(record.get("thoughts"))]
    reasoning = "\n\n".join(filter(None, ("\n".join(map(str, part)).strip() for part in parts)))
    wanted = [_function_call(one["id"], one.get("name"), _json(one.get("args"))) for one in calls]
    return message | ({"reasoning": reasoning} if reasoning else {}) | ({"tool_calls": wanted} if wanted else {})


def _function_call(id: object, name: object, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


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


def _gemini_text(content: object) -> str:
    if isinstance(content, str):
        return content
    texts = [one["text"] for one in _items(content) if isinstance(one.get("text"), str) and not one.get("thought")]
    return "\n".join(texts)


def _json(value: object) -> str:
    return encode({} if value is None else value).decode("utf-8")


SEED_MAX_BYTES = GIB_BYTES
COMPACTION_TOKENS = 48_000
# Facts of an imported session: its source, and the provider and model there.
SOURCE, PROVIDER, MODEL = "source", "provider", "model"

_KINDS: Mapping[str, type] = {
    "truncate_to_last": int,
    "drop_tool_calls": bool,
    "rename_session": str,
    "validate": bool,
    "provider": str,
    "model": str,
    "source_agent": str,
    "source_session_id": str,
    "source_kind": str,
    "source_label": str,
    "source_provenance": dict,
    "recommend_compaction": bool,
}
_TOOL_KEYS = ("tool_calls", "native_tool_calls", "tool_call_id", "tool_use_id")
_READERS: Mapping[str, tuple[Callable[[Sequence[Record]], bool], Callable[[Sequence[Record]], ImportedTranscript]]] = {
    CLAUDE_CODE: (is_claude_file, seed_of_claude),
    CODEX: (is_codex_file, seed_of_codex),
    GEMINI_CLI: (is_gemini_file, seed_of_gemini),
}
AGENTS = tuple(_READERS)
_ALIASES = {"claude-code": "claude", "claude_code": "claude", "gemini-cli": "gemini", "gemini_cli": "gemini"}


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The checked options of an import."""

    truncate_to_last: int | None = None
    drop_tool_calls: bool = False
    rename_session: str | None = None
    validate: bool = True
    provider: str | None = None
    model: str | None = None
    source_agent: str | None = None
    source_session_id: str | None = None
    source_kind: str | None = None
    source_label: str | None = None
    source_provenance: Mapping[str, Any] | None = None
    recommend_compaction: bool = False


def parse_import_options(given: object) -> ImportOptions:
    """Raises for an unknown key and for a value of the wrong type."""
    options = checked_options("seed_from_jsonl", given, _KINDS)
    if "truncate_to_last" in options:
        checked_count("truncate_to_last", options["truncate_to_last"])
    if "rename_session" in options:
        parse_user_id(options["rename_session"], "rename_session")
    agent = options.get("source_agent")
    if agent is not None:
        options["source_agent"] = _ALIASES.get(agent.lower(), agent.lower())
        if options["source_agent"] not in AGENTS:
            raise fault("invalid_params", f"source_agent must be one of {', '.join(AGENTS)}.", field="source_agent")
    return ImportOptions(**options)


# Pure: read a file.


def read_seed(data: bytes, agent: str | None = None) -> ImportedTranscript:
    """The messages of a file. Without `agent`, the content decides the format. Raises `UnreadableFileError`."""
    records, cut = _records(data)
    file_format = agent or next((name for name, (is_its, _) in _READERS.items() if is_its(records)), None)
    if file_format is None:
        if cut:
            records_in(data)
        return seed_of(records)
    seed = _READERS[file_format][1](records)
    seed.partial = cut
    return seed


def _records(data: bytes) -> tuple[list[Record], bool]:
    """The objects of a file: one per line, or the whole file is one object."""
    try:
        return records_in(data, may_be_cut=True)
    except UnreadableFileError:
        with suppress(MulliganError):
            whole = decode(data)
            if isinstance(whole, dict):
                return [whole], False
        raise


def select_messages(seed: ImportedTranscript, wanted: ImportOptions) -> list[Message]:
    """Apply the options: first drop tool calls, then keep only the last messages."""
    messages = seed.messages
    if wanted.drop_tool_calls:
        messages = [text for one in messages if (text := _without_tools(one)) is not None]
    if wanted.truncate_to_last is not None:
        messages = messages[max(0, len(messages) - wanted.truncate_to_last) :]
    return messages


def _without_tools(message: Message) -> Message | None:
    if message.get("role") in RESULT_ROLES:
        return None
    kept = {key: value for key, value in message.items() if key not in _TOOL_KEYS}
    if isinstance(kept.get("content"), list):
        kept["content"] = [block for block in kept["content"] if _is_text(block)]
    return kept if is_message(kept) else None


def _is_text(block: object) -> bool:
    return isinstance(block, str) or (isinstance(block, Mapping) and block.get("type") in ("text", "input_text", None))


def reason_to_refuse(seed: ImportedTranscript, messages: Sequence[Message], wanted: ImportOptions) -> str | None:
    """Why the import is refused; None if it is not. The first reason counts."""
    if not seed.messages:
        return "The file has no message that a model would receive."
    if not messages and wanted.truncate_to_last != 0:
        return "Nothing is left of the file after dropping tool calls."
    if not wanted.validate:
        return None
    if seed.source_format == "provider_responses_only":
        words = "The file has only the answers of a provider; user and tool messages cannot be rebuilt from it."
        return f"{words} Set validate to false to import the answers alone."
    for name, asked, found in (("provider", wanted.provider, seed.provider), ("model", wanted.model, seed.model)):
        if asked is not None and asked != found:
            return f"The file names the {name} {found!r}, not {asked!r}."
    return None


def source_of(seed: ImportedTranscript, wanted: ImportOptions) -> dict[str, Any]:
    """The source of an imported session, as it is stored and shown."""
    agent = wanted.source_agent or seed.agent
    return {
        "schema": "mulligan.session_source.v1",
        "kind": wanted.source_kind or ("external_agent_session" if agent else "mulligan_jsonl"),
        "agent": agent,
        "session_id": wanted.source_session_id or seed.agent_session_id,
        "label": wanted.source_label,
        "provenance": dict(wanted.source_provenance or seed.provenance),
    }


# The session.


def seed_from_jsonl(archive: Archive, root: str, path: str, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Create a session from a file and return what was loaded."""
    wanted = parse_import_options(opts)
    try:
        seed = read_seed(_bytes_of(path), wanted.source_agent)
    except UnreadableFileError as error:
        return _failed(str(error))
    messages = select_messages(seed, wanted)
    why_not = reason_to_refuse(seed, messages, wanted)
    if why_not is not None:
        return _failed(why_not)
    source = source_of(seed, wanted)
    try:
        session = _create_session(archive, root, messages, _facts(seed, source), name=wanted.rename_session)
    except MulliganError as error:
        if error.code not in ("session_exists", "invalid_json", "invalid_params"):
            raise
        return _failed(error.message)
    loaded = {
        "ok": True,
        "session_id": session,
        "turns_loaded": len(messages),
        "messages_loaded": len(messages),
        "source_records": seed.records,
        "source_format": seed.source_format,
        "partial": seed.partial,
        "truncated": len(select_messages(seed, replace(wanted, truncate_to_last=None))) > len(messages),
        "source": source,
    }
    if wanted.recommend_compaction:
        loaded["compaction_recommended"] = estimated_tokens(messages) >= COMPACTION_TOKENS
    found = {"provider": seed.provider, "model": seed.model, "tool_format": seed.tool_format}
    return loaded | {name: value for name, value in found.items() if value is not None}


def _failed(error: str) -> dict[str, Any]:
    return {"ok": False, "error": error}


def _bytes_of(path: str) -> bytes:
    if not isinstance(path, str) or not path or "\0" in path:
        raise fault("invalid_params", "The path of a transcript must be a text.", field="path")
    try:
        with open(path, "rb") as file:
            too_large = os.fstat(file.fileno()).st_size > SEED_MAX_BYTES
            # A device or a pipe has no size in advance, and may never end.
            data = b"" if too_large else file.read(SEED_MAX_BYTES + 1)
    except UnicodeEncodeError:
        raise fault("invalid_params", "This is not the path of a file.", field="path") from None
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror or error}.") from None
    if too_large or len(data) > SEED_MAX_BYTES:
        raise UnreadableFileError(f"{path} is larger than {SEED_MAX_BYTES} bytes.")
    return data


def _facts(seed: ImportedTranscript, source: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        SYSTEM_PROMPT: seed.system_prompt,
        TOOL_FORMAT: seed.tool_format,
        PROVIDER: seed.provider,
        MODEL: seed.model,
        SOURCE: decode(encode(source)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _create_session(
    archive: Archive, root: str, messages: Sequence[Message], facts: Mapping[str, Any], *, name: str | None
) -> SessionId:
    while True:
        ready = [pack_message(archive, message) for message in messages]
        # gc may delete a large body between its packing and our transaction; then we pack it again.
        with suppress(BlobVanishedError), archive.store.write() as tx:
            session = fresh_id(tx, archive, name)
            opened = {"session": session, "root": root}
            archive.journal.append(tx, session_journal(session), "session.opened", opened, at=archive.now())
            for message in ready:
                append_message_in(tx, archive, session, message)
            set_facts_in(tx, archive, session, facts)
            return session
