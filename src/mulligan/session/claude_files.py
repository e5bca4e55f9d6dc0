"""Session files of Claude Code: one JSON object a line, each naming the line it follows. Pure.

A file is a tree, because a rewind or a retry starts another branch from an earlier line. What the model saw is the way
from the newest line back to the beginning, or to the last compaction. One answer of the model is spread over several
lines with one message id; results of tools that ran side by side hang beside that way and belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mulligan.session.seed_records import Message, Record, Seed, is_said

AGENT = "claude"


def is_claude_file(records: Sequence[Record]) -> bool:
    return any("sessionId" in one and "uuid" in one and one.get("type") in ("user", "assistant") for one in records)


def seed_of_claude(records: Sequence[Record]) -> Seed:
    lines = [one for one in records if isinstance(one.get("uuid"), str) and one.get("isSidechain") is not True]
    chain = _chain(lines)
    spoken = [line for line in _with_siblings(chain, lines) if _is_spoken(line)]
    seed = Seed(records=len(records), provider="anthropic", agent=AGENT)
    seed.messages = [message for message in _merged(spoken) if is_said(message)]
    for line in chain:
        _take_metadata(seed, line)
    return seed


def _chain(lines: Sequence[Record]) -> list[Record]:
    """From the newest line back by parents; a compaction has none, and so begins what counts."""
    by_id = {line["uuid"]: line for line in lines}
    at = next((line for line in reversed(lines) if line.get("type") in ("user", "assistant")), None)
    found: dict[str, Record] = {}
    while at is not None and at["uuid"] not in found:
        found[at["uuid"]] = at
        at = by_id.get(str(at.get("parentUuid")))
    return list(found.values())[::-1]


def _with_siblings(chain: Sequence[Record], lines: Sequence[Record]) -> list[Record]:
    """The way, with the lines beside it that belong to it, each where it was written."""
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
    """Lines of one answer become one message, and so do the results that follow it."""
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
    """A line may hold a bare text, or nothing at all."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [one for one in content if isinstance(one, Mapping)] if isinstance(content, list) else []


def _message(line: Record) -> Message:
    message = line["message"]
    return {"role": message.get("role") or line["type"], "content": message.get("content")}


def _take_metadata(seed: Seed, line: Record) -> None:
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
