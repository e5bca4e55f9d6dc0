"""A new session from the transcript file of an earlier one, ours or another agent's.

First a file becomes messages (pure, `seed_records` and the readers of other agents' files), then the options choose
among them, then what is left is judged, then one transaction makes the session: it is there whole, or not at all.
What is wrong with a file is an answer (`{ok: false, error}`); what is wrong with the options raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mulligan.session import claude_files, codex_files, gemini_files
from mulligan.session.facts import SYSTEM_PROMPT, TOOL_FORMAT, set_facts_in
from mulligan.session.lineage import fresh_id
from mulligan.session.messages import RESULT_ROLES, estimated_tokens
from mulligan.session.options import checked_count, checked_options
from mulligan.session.seed_records import Message, Record, Seed, Unreadable, is_said, records_in, seed_of
from mulligan.session.tables import session_journal
from mulligan.session.transcript import Archive, append_message_in, written
from mulligan.store.blobs import Vanished
from mulligan.values.canonical import decode, encode
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.limits import GIB_BYTES

SEED_MAX_BYTES = GIB_BYTES
COMPACTION_TOKENS = 48_000
SOURCE, PROVIDER, MODEL = "source", "provider", "model"
"""Facts of a session that was seeded: where it comes from, and who answered there."""

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
_READERS: Mapping[str, tuple[Callable[[Sequence[Record]], bool], Callable[[Sequence[Record]], Seed]]] = {
    claude_files.AGENT: (claude_files.is_claude_file, claude_files.seed_of_claude),
    codex_files.AGENT: (codex_files.is_codex_file, codex_files.seed_of_codex),
    gemini_files.AGENT: (gemini_files.is_gemini_file, gemini_files.seed_of_gemini),
}
AGENTS = tuple(_READERS)
_ALIASES = {"claude-code": "claude", "claude_code": "claude", "gemini-cli": "gemini", "gemini_cli": "gemini"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of a seeding, checked."""

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


def parse_wanted(given: object) -> Wanted:
    """Raises for a key that is not known and a value of the wrong kind."""
    options = checked_options("seed_from_jsonl", given, _KINDS)
    if "truncate_to_last" in options:
        checked_count("truncate_to_last", options["truncate_to_last"])
    if "rename_session" in options:
        parse_user_id(options["rename_session"], "rename_session")
    agent = options.get("source_agent")
    if agent is not None:
        options["source_agent"] = _ALIASES.get(agent.lower(), agent.lower())
        if options["source_agent"] not in AGENTS:
            raise fault("invalid_params", f"source_agent is one of {', '.join(AGENTS)}.", field="source_agent")
    return Wanted(**options)


# Pure: what a file gives.


def read_seed(data: bytes, agent: str | None = None) -> Seed:
    """The messages of a file. Without `agent` the file itself says whose it is. Raises `Unreadable`."""
    records, cut = _records(data)
    chosen = agent or next((name for name, (is_its, _) in _READERS.items() if is_its(records)), None)
    if chosen is None:
        if cut:
            records_in(data)
        return seed_of(records)
    seed = _READERS[chosen][1](records)
    seed.partial = cut
    return seed


def _records(data: bytes) -> tuple[list[Record], bool]:
    """Lines of objects; or the whole file as one object, as some agents write it."""
    try:
        return records_in(data, may_be_cut=True)
    except Unreadable:
        with suppress(MulliganError):
            whole = decode(data)
            if isinstance(whole, dict):
                return [whole], False
        raise


def chosen(seed: Seed, wanted: Wanted) -> list[Message]:
    """Without tool calls first, then the last ones, if asked for."""
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
    return kept if is_said(kept) else None


def _is_text(block: object) -> bool:
    return isinstance(block, str) or (isinstance(block, Mapping) and block.get("type") in ("text", "input_text", None))


def refusal(seed: Seed, messages: Sequence[Message], wanted: Wanted) -> str | None:
    """Why no session is made from this, if so. The first reason counts."""
    if not seed.messages:
        return "The file has no message that a model would see."
    if not messages and wanted.truncate_to_last != 0:
        return "Nothing is left of the file after dropping tool calls."
    if not wanted.validate:
        return None
    if seed.source_format == "provider_responses_only":
        return (
            "The file holds only what a provider answered; user and tool turns cannot be rebuilt from it. "
            "With validate: false its answers can be had as a best effort."
        )
    for name, asked, found in (("provider", wanted.provider, seed.provider), ("model", wanted.model, seed.model)):
        if asked is not None and asked != found:
            return f"The {name} on record is {found!r}, not {asked!r}."
    return None


def source_of(seed: Seed, wanted: Wanted) -> dict[str, Any]:
    """Where a seeded session comes from, as it is stored and told."""
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
    """Make a session from a file and say what was loaded."""
    wanted = parse_wanted(opts)
    try:
        seed = read_seed(_bytes_of(path), wanted.source_agent)
    except Unreadable as error:
        return _failed(str(error))
    messages = chosen(seed, wanted)
    why_not = refusal(seed, messages, wanted)
    if why_not is not None:
        return _failed(why_not)
    source = source_of(seed, wanted)
    try:
        session = _make(archive, root, messages, _facts(seed, source), name=wanted.rename_session)
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
        "truncated": wanted.truncate_to_last is not None and _count_before_cut(seed, wanted) > len(messages),
        "source": source,
    }
    if wanted.recommend_compaction:
        loaded["compaction_recommended"] = estimated_tokens(messages) >= COMPACTION_TOKENS
    told = {"provider": seed.provider, "model": seed.model, "tool_format": seed.tool_format}
    return loaded | {name: value for name, value in told.items() if value is not None}


def _failed(error: str) -> dict[str, Any]:
    return {"ok": False, "error": error}


def _count_before_cut(seed: Seed, wanted: Wanted) -> int:
    if not wanted.drop_tool_calls:
        return len(seed.messages)
    return sum(_without_tools(one) is not None for one in seed.messages)


def _bytes_of(path: str) -> bytes:
    if not isinstance(path, str) or not path or "\0" in path:
        raise fault("invalid_params", "The path of a transcript is a text.", field="path")
    try:
        with open(path, "rb") as file:
            too_large = os.fstat(file.fileno()).st_size > SEED_MAX_BYTES
            # A device or a pipe has no size beforehand, and may have no end.
            data = b"" if too_large else file.read(SEED_MAX_BYTES + 1)
    except UnicodeEncodeError:
        raise fault("invalid_params", "This is not the path of a file.", field="path") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}.") from None
    if too_large or len(data) > SEED_MAX_BYTES:
        raise Unreadable(f"{path} is larger than {SEED_MAX_BYTES} bytes.")
    return data


def _facts(seed: Seed, source: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        SYSTEM_PROMPT: seed.system_prompt,
        TOOL_FORMAT: seed.tool_format,
        PROVIDER: seed.provider,
        MODEL: seed.model,
        SOURCE: decode(encode(source)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _make(
    archive: Archive, root: str, messages: Sequence[Message], facts: Mapping[str, Any], *, name: str | None
) -> SessionId:
    while True:
        ready = [written(archive, message) for message in messages]
        # A large body may be collected between its packing and our transaction; then it is packed again.
        with suppress(Vanished), archive.store.write() as tx:
            session = fresh_id(tx, archive, name)
            opened = {"session": session, "root": root}
            archive.journal.append(tx, session_journal(session), "session.opened", opened, at=archive.now())
            for message in ready:
                append_message_in(tx, archive, session, message)
            set_facts_in(tx, archive, session, facts)
            return session
