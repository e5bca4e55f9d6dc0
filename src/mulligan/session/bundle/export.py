"""Exports a session as a bundle: reads it in one transaction, redacts it, builds the document, checks it for secrets.

The export computes derived parts (tool calls, permissions, spans, fixtures) from redacted text, so no digest in a
shared bundle confirms a guess at what was removed. A session that was imported and not changed keeps these parts as
they came, so exporting it again gives the same bundle.

Derived parts name arguments and results by digest, so that a replay elsewhere can be compared without their content.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mulligan.session.bundle.export_check import check_export
from mulligan.session.bundle.format import (
    BUNDLE_MAX_BYTES,
    BUNDLE_TYPE,
    SCHEMA_ID,
    SCHEMA_VERSION,
    Document,
    Mode,
    is_message_event,
    with_bundle_id,
)
from mulligan.session.bundle.redaction import (
    BUNDLE,
    FORM_KEYS,
    PrivateNames,
    RedactionPolicy,
    Redactor,
    ReplayFilter,
    refuse_secrets,
    strings_in,
)
from mulligan.session.importers import MODEL, PROVIDER, SOURCE
from mulligan.session.lifecycle import BRANCHED_AT, ancestry_in, facts_of, session_in
from mulligan.session.messages import ToolAnswer, as_text, calls_in, paired
from mulligan.session.tables import (
    APPENDED,
    INSERTED,
    InheritedEvents,
    SessionRow,
    inherited_from_json,
    session_journal,
    window_row,
)
from mulligan.session.transcript_log import Archive, Message, entries_in, event_in, head_of, message_in, text_of
from mulligan.store.blobs import BLOBS
from mulligan.store.journal import Record, records_of
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest, digest_of, raw_digest
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES

Json = dict[str, Any]
Listed = Sequence[Mapping[str, Any]]

_PERMISSION_KINDS = re.compile("permission|approval|^hitl_")
_LIFECYCLE = (
    "compaction",
    "agent_session_closed",
    "AnchorChanged",
    "RootMounted",
    "RootUnmounted",
    "transcript_budget",
)


def tool_calls_in(messages: Sequence[Message], records: Listed) -> list[Json]:
    """The tool calls of the transcript, in order, with their results; then calls that are not in the transcript."""
    by_label: dict[str, list[Json]] = {}
    for done in _calls_done(records):
        by_label.setdefault(str(done["tool_use_id"]), []).append(done)
    found = []
    pairs = paired(messages)
    for place, answers in pairs.answers.items():
        for call, answer in zip(calls_in(messages[place]), answers, strict=True):
            mine = by_label[call.id].pop(0) if call.id and by_label.get(call.id) else {}
            found.append(
                {
                    **mine,
                    "tool_name": call.name,
                    "tool_use_id": call.id or None,
                    "args_hash": digest_of(as_text(call.arguments).encode("utf-8", "surrogatepass")),
                    "iteration": place,
                    "result": None if answer is None else _result(*answer),
                    "is_rejected": (answer is not None and answer[1].failed) or bool(mine.get("is_rejected")),
                }
            )
    return found + [done for left in by_label.values() for done in left]


def _result(place: int, answer: ToolAnswer) -> Json:
    data = as_text(answer.content).encode("utf-8", "surrogatepass")
    return {"message": place, "digest": digest_of(data), "bytes": len(data)}


def _recorded_calls(records: Listed) -> list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """The record of each call's begin, and that of its end if it has ended."""
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {}
    for record in records:
        call = record["payload"].get("call")
        if record["kind"] == "call.begun" and isinstance(call, str):
            found[call] = record, None
        elif record["kind"] == "call.ended" and str(call) in found:
            found[call] = found[call][0], record
    return list(found.values())


def _calls_done(records: Listed) -> list[Json]:
    """The recorded calls: when they began and ended, and with which status."""
    return [
        {
            "tool_name": begun["payload"].get("tool"),
            "tool_use_id": begun["payload"].get("label"),
            "call_id": begun["payload"]["call"],
            "args_hash": None,
            "iteration": None,
            "timestamp": begun["at"],
            "duration_ms": None if ended is None else _milliseconds(begun["at"], ended["at"]),
            "status": "open" if ended is None else ended["payload"].get("status"),
            "is_rejected": ended is not None and ended["payload"].get("status") != "committed",
            "result": None,
        }
        for begun, ended in _recorded_calls(records)
    ]


def _milliseconds(start: str, end: str) -> int:
    return int((parse_timestamp(end) - parse_timestamp(start)).total_seconds() * 1000)


def permissions_in(events: Listed) -> list[Json]:
    """The events about permissions, approvals, and questions to a person."""
    return [_permission(event) for event in events if _PERMISSION_KINDS.search(str(event["kind"]))]


def _permission(event: Mapping[str, Any]) -> Json:
    metadata = event.get("metadata") or {}
    request = metadata.get("request")
    identifier = metadata.get("request_id") or (request.get("id") if isinstance(request, Mapping) else None)
    return {
        "kind": event["kind"],
        "source": "transcript_event",
        "request_id": identifier,
        "agent": metadata.get("client_id") or metadata.get("agent"),
        "payload": dict(metadata),
    }


def replay_of(
    messages: Sequence[Message], events: Listed, *, records: Listed, calls: Listed, source: Mapping[str, Any]
) -> Json:
    return {
        "replay_fixture": _fixture(messages, calls),
        "run_record": {
            **{name: source[name] for name in ("session_id", "status", "started_at", "finished_at")},
            "messages": len(messages),
            "events": len(events),
            "calls": len(calls),
        },
        "verification_outcomes": [],
        "event_log_pointers": [{"topic": f"s:{source['session_id']}", "events": len(events)}],
        "transitions": [
            {"kind": event["kind"], "at": event["at"], "event": index}
            for index, event in enumerate(events)
            if event["kind"] in _LIFECYCLE
        ],
        "checkpoints": _turns(records),
        "trace_spans": _spans(records),
        "deterministic_events": list(records),
    }


def _fixture(messages: Sequence[Message], calls: Listed) -> Json:
    return {
        "_type": "mulligan_replay_fixture",
        "message_digests": [digest_of(encode(message)) for message in messages],
        "tool_results": [
            {
                "tool_use_id": call["tool_use_id"],
                "args_hash": call["args_hash"],
                "result_digest": (call["result"] or {}).get("digest"),
            }
            for call in calls
            if call["args_hash"] is not None
        ],
    }


def _turns(records: Listed) -> list[Json]:
    found: dict[str, Json] = {}
    for record in records:
        turn = record["payload"].get("turn")
        if record["kind"] == "turn.opened" and isinstance(turn, str):
            found[turn] = {"turn": turn, "at": record["at"], "ended_at": None}
        elif record["kind"] == "turn.ended" and str(turn) in found:
            found[str(turn)]["ended_at"] = record["at"]
    return list(found.values())


def _spans(records: Listed) -> list[Json]:
    """Turns, and calls within them."""
    spans = [_span(one["turn"], None, "turn", "turn", one["at"], one["ended_at"]) for one in _turns(records)]
    for begun, ended in _recorded_calls(records):
        body = begun["payload"]
        span = _span(body["call"], body.get("turn"), "call", body.get("tool"), begun["at"], None)
        ending = {} if ended is None else {"end": ended["at"], "status": ended["payload"].get("status")}
        spans.append({**span, **ending})
    return spans


def _span(*facts: str | None) -> Json:
    return dict(zip(("span_id", "parent_id", "kind", "name", "start", "end"), facts, strict=True))


IMPORTED = "session.imported"
# The facts that belong to the transcript. An import never takes roots or permissions from a bundle.
CARRIED_FACTS = (
    *("system_prompt", "tool_format", "summary", "scratchpad", "scratchpad_version", "pinned_model"),
    *("pinned_reasoning_policy", PROVIDER, MODEL, SOURCE),
)

SECTION = "$.transcript.sections[0]"
_TRANSCRIPT_KINDS = frozenset(
    {APPENDED, INSERTED, "event.appended", "facts.set", "window.changed", IMPORTED}
    | {"session.opened", "session.closed", "session.forked", "session.reopened"}
)
_END = 2**62


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export. `content`: include the bodies of files, which only a local bundle may have."""

    mode: Mode = "sanitized"
    content: bool | None = None
    policy: RedactionPolicy = field(default_factory=RedactionPolicy)
    version: str = "0"
    place: str = ""


@fast_dataclass(slots=True)
class SessionContent:
    """A session as read from the store. `origin`: the bundle it was imported from, without transcript and bodies."""

    row: SessionRow
    facts: dict[str, Any]
    lineage: dict[str, Any]
    messages: list[Message]
    places: list[dict[str, Any]]
    events: list[dict[str, Any]]
    records: list[dict[str, Any]]
    needs: list[Digest]
    origin: Document | None
    is_untouched: bool


def export_session(archive: Archive, session: SessionId, options: ExportOptions) -> Document:
    """The bundle. Raises `unredacted_secret` if something in it still looks like a secret."""
    if options.content and options.mode != "local":
        raise fault("invalid_params", "Only a local bundle may contain the bodies of files.", field="content")
    with archive.store.read() as tx:
        material = _read_session(tx, archive, session)
        content = _content(tx, archive, material, options)
    redactor = Redactor(_policy(material, options), FORM_KEYS)
    document = _build_document(material, options, redactor) | {"content": content}
    if options.mode == "replay_only":
        document = ReplayFilter(redactor).apply(document, BUNDLE)
    entries = _manifest(redactor, document, material, options.mode)
    document |= {"redaction": _redaction(options.mode, entries)}
    if options.mode != "local":
        refuse_secrets(document, doing=f"The {options.mode} export")
        check_export(document, doing=f"The {options.mode} export")
    _check_size(len(encode(document)))
    return with_bundle_id(document)


# Read the session.


def _read_session(tx: Tx, archive: Archive, session: SessionId) -> SessionContent:
    row = session_in(tx, session)
    ancestry = None if row is None else ancestry_in(tx, session)
    if row is None or ancestry is None:
        raise fault("session_not_found", f"export: there is no session {session!r}.", session=session, verb="export")
    facts = facts_of(tx, session)
    entries = list(entries_in(tx, archive, session))
    in_window = {(entry.session, entry.seq) for entry in entries}
    events, index = _events(tx, archive, session, in_window)
    origin, came_at = _origin(tx, archive, session)
    own = [record for record in records_of(tx, session_journal(session)) if record.kind not in _TRANSCRIPT_KINDS]
    return SessionContent(
        row=row,
        facts=facts,
        lineage={
            "root_session_id": ancestry.root_id,
            "parent_session_id": ancestry.parent_id,
            "child_count": len(ancestry.child_ids),
            "branched_at_event_index": facts.get(BRANCHED_AT),
        },
        messages=[entry.message for entry in entries],
        places=[{"id": entry.id, "event": index.get((entry.session, entry.seq))} for entry in entries],
        events=events,
        records=[{"kind": record.kind, "at": record.at, "payload": dict(record.payload)} for record in own],
        needs=sorted({ref for record in own for ref in record.refs}),
        origin=origin,
        is_untouched=origin is not None and head_of(tx, session) == came_at,
    )


Key = tuple[str, int]


def _events(
    tx: Tx, archive: Archive, session: SessionId, in_window: set[Key]
) -> tuple[list[dict[str, Any]], dict[Key, int]]:
    """All events, and the event of each message. The text of a message in the window is only with the messages."""
    found: list[dict[str, Any]] = []
    index: dict[Key, int] = {}
    latest = ""
    for source, record in _event_records(tx, session):
        event = event_in(tx, archive, record)
        if event is None:
            continue
        latest = max(latest, event["at"])
        body = {key: event[key] for key in ("id", "kind", "role", "visibility")} | {"at": latest}
        key = (source, record.seq)
        if is_message_event(event):
            index[key] = len(found)
            body |= {} if key in in_window else {"message": message_in(tx, archive, record)}
        else:
            body |= {"text": event["text"]} if event["text"] else {}
            body |= {"metadata": event["metadata"]} if "metadata" in event else {}
        found.append(body)
    return found, index


def _event_records(tx: Tx, session: SessionId) -> Iterator[tuple[str, Record]]:
    """The records of inherited events, as the window row lists them, then of its own."""
    newest = window_row(tx, session)
    own = InheritedEvents(session, newest.log_after, _END, 0, 0)
    for part in [*inherited_from_json(decode(newest.log)), own]:
        for record in records_of(tx, session_journal(SessionId(part.session)), after=part.after):
            if record.seq > part.upto:
                break
            yield part.session, record


def _origin(tx: Tx, archive: Archive, session: SessionId) -> tuple[Document | None, int]:
    for record in records_of(tx, session_journal(session)):
        if record.kind == IMPORTED:
            return decode(archive.blobs.read_in(tx, record.payload["origin"])), record.seq
    return None, 0


def _content(tx: Tx, archive: Archive, material: SessionContent, options: ExportOptions) -> Document:
    """The digests that the session needs; with `content`, also the bodies that the store still has."""
    before = [] if material.origin is None else material.origin["content"]["blobs"]
    carried = any("body" in one for one in before) and material.is_untouched and options.mode == "local"
    wanted = carried if options.content is None else options.content
    digests = sorted({one["digest"] for one in before} | set(material.needs))
    sizes = {one["digest"]: one.get("size") for one in before}
    rows = {one: tx.get(BLOBS, raw_digest(Digest(one))) for one in digests}
    if wanted:
        # Checked before the bodies are read. Base64 needs four bytes for three.
        _check_size(sum(row.size * 4 // 3 for row in rows.values() if row is not None))
    return {
        "encoding": "base64",
        "blobs": [
            _blob(tx, archive, Digest(one), sizes.get(one) if row is None else row.size, body=wanted)
            for one, row in rows.items()
        ],
    }


def _check_size(size_bytes: int) -> None:
    if size_bytes > BUNDLE_MAX_BYTES:
        limit = f"A bundle may have at most {BUNDLE_MAX_BYTES // MIB_BYTES} MiB, and this one would have more."
        words = f"{limit} Export it without the bodies of files."
        raise fault("invalid_bundle", words, problem="too_large", path="$", limit_bytes=BUNDLE_MAX_BYTES)


def _blob(tx: Tx, archive: Archive, digest: Digest, size: int | None, *, body: bool) -> Document:
    found: Document = {"digest": digest, "size": size}
    if not body:
        return found
    try:
        return found | {"body": b64encode(archive.blobs.read_in(tx, digest)).decode("ascii")}
    except MulliganError as error:
        if error.code not in ("unknown_blob", "evicted", "missing_cas_dependency"):
            raise
        return found | {"missing": True}


# Build the document.


def _policy(material: SessionContent, options: ExportOptions) -> RedactionPolicy | None:
    """The policy that also hides the session's roots. None for imported content, which is redacted already."""
    if options.mode == "local":
        return None
    if material.is_untouched and _mode_of(material.origin) != "local":
        return replace(options.policy, names=PrivateNames())
    primary, others = _roots(material, options)
    roots = tuple(dict.fromkeys([primary, *(one["path"] for one in others), *options.policy.names.roots]))
    return replace(options.policy, names=replace(options.policy.names, roots=tuple(filter(None, roots))))


def _mode_of(origin: Document | None) -> str | None:
    return None if origin is None else str(origin["redaction"]["mode"])


def _roots(material: SessionContent, options: ExportOptions) -> tuple[str, list[Mapping[str, Any]]]:
    if material.origin is not None:
        workspace = material.origin.get("workspace") or {}
        return str(workspace.get("primary") or ""), list(workspace.get("additional_roots") or ())
    anchor = material.facts.get("workspace_anchor") or {}
    return str(anchor.get("primary") or options.place), list(anchor.get("additional_roots") or ())


def _build_document(material: SessionContent, options: ExportOptions, redactor: Redactor) -> Document:
    clean = _redacted_content(material, redactor)
    carried = material.origin if material.is_untouched and _mode_of(material.origin) == options.mode else None
    rest = {key: value for key, value in (carried or {}).items() if key not in ("bundle_id", "redaction", "content")}
    document = rest or redactor.document(_derived(clean, options))
    document["source"] = {**document["source"], "session_id": redactor.document(material.row.id, "$.source.session_id")}
    return document | {"transcript": {"sections": [_section(clean)]}}


def _redacted_content(material: SessionContent, redactor: Redactor) -> SessionContent:
    """The session's content, redacted under the paths that it has in the document."""
    before = [] if material.origin is None else material.origin["replay"]["deterministic_events"]
    facts = {name: value for name, value in material.facts.items() if name in CARRIED_FACTS}
    # `_workspace` takes only some parts of it, and the whole document is redacted after that.
    anchor = {name: value for name, value in material.facts.items() if name == "workspace_anchor"}
    return replace(
        material,
        messages=redactor.document(material.messages, f"{SECTION}.messages"),
        events=redactor.document(material.events, f"{SECTION}.events"),
        places=redactor.document(material.places, f"{SECTION}.places"),
        records=redactor.document([*before, *material.records], "$.replay.deterministic_events"),
        facts=redactor.document(facts, f"{SECTION}.metadata") | anchor,
    )


def _section(clean: SessionContent) -> Document:
    facts = {name: value for name, value in clean.facts.items() if name in CARRIED_FACTS}
    return {
        "id": "main",
        "label": "main",
        "scope": "session",
        "location": "session",
        "summary": clean.facts.get("summary"),
        "messages": clean.messages,
        "places": clean.places,
        "events": clean.events,
        "assets": [],
        "metadata": facts,
    }


def _derived(clean: SessionContent, options: ExportOptions) -> Document:
    """All parts except the transcript."""
    source = _source(clean)
    calls = tool_calls_in(clean.messages, clean.records)
    return {
        "_type": BUNDLE_TYPE,
        "schema_version": SCHEMA_VERSION,
        "created_at": source["finished_at"],
        "producer": {"name": "mulligan", "version": options.version, "schema_id": SCHEMA_ID},
        "source": source,
        "runtime": _runtime(clean, options),
        "workspace": _workspace(clean, options),
        "tools": {"schemas": [], "calls": calls},
        "permissions": permissions_in(clean.events),
        "replay": replay_of(clean.messages, clean.events, records=clean.records, calls=calls, source=source),
        "attachments": [],
        "metadata": {},
    }


def _source(clean: SessionContent) -> Document:
    times = [event["at"] for event in clean.events] + [record["at"] for record in clean.records]
    lineage = clean.lineage
    if clean.origin is not None:
        lineage = {name: clean.origin["source"].get(name) for name in lineage}
    prompt = next((text_of(one) for one in clean.messages if one.get("role") == "user" and text_of(one)), None)
    closed = bool(clean.events) and clean.events[-1]["kind"] == "agent_session_closed"
    return {
        "kind": "session",
        "session_id": clean.row.id,
        **lineage,
        "task": prompt,
        "status": "closed" if closed else "open",
        "started_at": min([clean.row.created_at, *times]),
        "finished_at": max(times, default=clean.row.created_at),
    }


def _runtime(clean: SessionContent, options: ExportOptions) -> Document:
    pair = {"provider": clean.facts.get(PROVIDER), "model": clean.facts.get(MODEL) or clean.facts.get("pinned_model")}
    known = any(value is not None for value in pair.values())
    return {
        "mulligan_version": options.version,
        "provider_models": [pair] if known else [],
        "usage": {},
        "metadata": {},
    }


def _workspace(clean: SessionContent, options: ExportOptions) -> Document:
    primary, others = _roots(clean, options)
    anchor = clean.facts.get("workspace_anchor") or (clean.origin or {}).get("workspace") or {}
    kept = ("path", "mount_mode", "mounted_at")
    return {
        "primary": primary or None,
        "additional_roots": [{name: one.get(name) for name in kept} for one in others],
        "anchored_at": anchor.get("anchored_at"),
        "policy": "safe_identity_only",
    }


# The report.


def _manifest(redactor: Redactor, document: Document, material: SessionContent, mode: Mode) -> list[dict[str, str]]:
    """The redactions, those of earlier exports included. A value that was withheld later has only that entry."""
    before = [] if material.origin is None else material.origin["redaction"]["entries"]
    entries = [entry.to_json() for entry in redactor.entries]
    if mode == "replay_only":
        texts = dict(strings_in(document))
        entries = [
            one for one in entries if one["action"] == "withheld" or one["replacement"] in texts.get(one["path"], "")
        ]
    known = {tuple(sorted(one.items())) for one in before}
    return [*before, *(one for one in entries if tuple(sorted(one.items())) not in known)]


def _redaction(mode: Mode, entries: Sequence[Mapping[str, str]]) -> Document:
    return {
        "mode": mode,
        "policy": "none" if mode == "local" else "mulligan.redaction.v1",
        "placeholder": "[redacted]",
        "entries": list(entries),
        "unsafe_secret_markers_rejected": mode != "local",
    }
