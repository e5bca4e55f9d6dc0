"""A session as a bundle: gathered in one look at the store, redacted, put together, and refused if a secret is left.

What depends on the whole (tool calls, permissions, spans, fixtures) is worked out from what is already redacted, so no
digest in a shared bundle confirms a guess at what was taken out. A session that was imported and not touched since
carries those parts as they came; that is why exporting it again gives the same bundle.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mulligan.session.bundle import (
    BUNDLE_MAX_BYTES,
    BUNDLE_TYPE,
    SCHEMA_ID,
    SCHEMA_VERSION,
    Document,
    Mode,
    is_message_event,
    sealed,
)
from mulligan.session.evidence import permissions_in, replay_of, tool_calls_in
from mulligan.session.export_check import check_export
from mulligan.session.facts import BRANCHED_AT, facts_of
from mulligan.session.lineage import ancestry_in
from mulligan.session.private_names import PrivateNames
from mulligan.session.projection import APPENDED, INSERTED, window_row
from mulligan.session.redaction import Policy, Redactor, refuse_survivors, strings_in
from mulligan.session.seeding import MODEL, PROVIDER, SOURCE
from mulligan.session.standing import session_in
from mulligan.session.tables import SessionRow, session_journal
from mulligan.session.transcript import Archive, Message, entries_in, event_in, head_of, message_in, text_of
from mulligan.session.withholding import BUNDLE, FORM_KEYS, Withholder
from mulligan.store.blobs import BLOBS
from mulligan.store.journal import Record, records_of
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.limits import MIB_BYTES

IMPORTED = "session.imported"
CARRIED_FACTS = (
    *("system_prompt", "tool_format", "summary", "scratchpad", "scratchpad_version", "pinned_model"),
    *("pinned_reasoning_policy", PROVIDER, MODEL, SOURCE),
)
"""What belongs to the talk and goes with it. Where a session may work is never taken from a bundle."""

SECTION = "$.transcript.sections[0]"
_TALK = frozenset(
    {APPENDED, INSERTED, "event.appended", "facts.set", "window.changed", IMPORTED}
    | {"session.opened", "session.closed", "session.forked", "session.reopened"}
)
_END = 2**62


@dataclass(frozen=True, slots=True)
class Wish:
    """How to export. `content`: with the bodies of files, which only a local bundle may have."""

    mode: Mode = "sanitized"
    content: bool | None = None
    policy: Policy = field(default_factory=Policy)
    version: str = "0"
    place: str = ""


@dataclass(slots=True)
class Material:
    """A session as the store has it. `origin`: the bundle it was imported from, without talk and bodies."""

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


def export_session(archive: Archive, session: SessionId, wish: Wish) -> Document:
    """The bundle. Raises `unredacted_secret` rather than give out what looks like a secret."""
    if wish.content and wish.mode != "local":
        raise fault("invalid_params", "Only a local bundle carries the bodies of files.", field="content")
    with archive.store.read() as tx:
        material = _gathered(tx, archive, session)
        content = _content(tx, archive, material, wish)
    redactor = Redactor(_policy(material, wish), FORM_KEYS)
    document = _composed(material, wish, redactor) | {"content": content}
    if wish.mode == "replay_only":
        document = Withholder(redactor).apply(document, BUNDLE)
    entries = _manifest(redactor, document, material, wish.mode)
    document |= {"redaction": _redaction(wish.mode, entries)}
    if wish.mode != "local":
        refuse_survivors(document, doing=f"The {wish.mode} export")
        check_export(document, doing=f"The {wish.mode} export")
    _check_size(len(encode(document)))
    return sealed(document)


# Gathering.


def _gathered(tx: Tx, archive: Archive, session: SessionId) -> Material:
    row = session_in(tx, session)
    ancestry = None if row is None else ancestry_in(tx, session)
    if row is None or ancestry is None:
        raise fault("session_not_found", f"export: there is no session {session!r}.", session=session, verb="export")
    facts = facts_of(tx, session)
    entries = list(entries_in(tx, archive, session))
    in_force = {(entry.session, entry.seq) for entry in entries}
    events, index = _events(tx, archive, session, in_force)
    origin, came_at = _origin(tx, archive, session)
    own = [record for record in records_of(tx, session_journal(session)) if record.kind not in _TALK]
    return Material(
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
    tx: Tx, archive: Archive, session: SessionId, in_force: set[Key]
) -> tuple[list[dict[str, Any]], dict[Key, int]]:
    """All events, and which of them each message is. What a message in force says is said once, with the messages."""
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
            body |= {} if key in in_force else {"message": message_in(tx, archive, record)}
        else:
            body |= {"text": event["text"]} if event["text"] else {}
            body |= {"metadata": event["metadata"]} if "metadata" in event else {}
        found.append(body)
    return found, index


def _event_records(tx: Tx, session: SessionId) -> Iterator[tuple[str, Record]]:
    """The inherited ones first, as the session's window says, then its own."""
    newest = window_row(tx, session)
    parts = [(str(one[0]), int(one[1]), int(one[2])) for one in decode(newest.log)]
    for source, after, upto in [*parts, (str(session), newest.log_after, _END)]:
        for record in records_of(tx, session_journal(SessionId(source)), after=after):
            if record.seq > upto:
                break
            yield source, record


def _origin(tx: Tx, archive: Archive, session: SessionId) -> tuple[Document | None, int]:
    for record in records_of(tx, session_journal(session)):
        if record.kind == IMPORTED:
            return decode(archive.blobs.read_in(tx, record.payload["origin"])), record.seq
    return None, 0


def _content(tx: Tx, archive: Archive, material: Material, wish: Wish) -> Document:
    """Which bodies the session needs; with `content`, the bodies themselves, but for those the store has dropped."""
    before = [] if material.origin is None else material.origin["content"]["blobs"]
    carried = any("body" in one for one in before) and material.is_untouched and wish.mode == "local"
    wanted = carried if wish.content is None else wish.content
    digests = sorted({one["digest"] for one in before} | set(material.needs))
    sizes = {one["digest"]: one.get("size") for one in before}
    rows = {one: tx.get(BLOBS, raw_digest(Digest(one))) for one in digests}
    if wanted:
        # Before the bodies are read: four bytes of base64 for three of each.
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
        limit = f"{BUNDLE_MAX_BYTES // MIB_BYTES} MiB"
        words = (
            f"A bundle has at most {limit}, and this one would have more; leave out the bodies of files, if it has any."
        )
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


# Putting together.


def _policy(material: Material, wish: Wish) -> Policy | None:
    """Where the session worked is private. What came redacted knows nothing of this machine and is left as it is."""
    if wish.mode == "local":
        return None
    if material.is_untouched and _mode_of(material.origin) != "local":
        return replace(wish.policy, names=PrivateNames())
    primary, others = _roots(material, wish)
    roots = tuple(dict.fromkeys([primary, *(one["path"] for one in others), *wish.policy.names.roots]))
    return replace(wish.policy, names=replace(wish.policy.names, roots=tuple(filter(None, roots))))


def _mode_of(origin: Document | None) -> str | None:
    return None if origin is None else str(origin["redaction"]["mode"])


def _roots(material: Material, wish: Wish) -> tuple[str, list[Mapping[str, Any]]]:
    if material.origin is not None:
        workspace = material.origin.get("workspace") or {}
        return str(workspace.get("primary") or ""), list(workspace.get("additional_roots") or ())
    anchor = material.facts.get("workspace_anchor") or {}
    return str(anchor.get("primary") or wish.place), list(anchor.get("additional_roots") or ())


def _composed(material: Material, wish: Wish, redactor: Redactor) -> Document:
    clean = _clean(material, redactor)
    carried = material.origin if material.is_untouched and _mode_of(material.origin) == wish.mode else None
    rest = {key: value for key, value in (carried or {}).items() if key not in ("bundle_id", "redaction", "content")}
    document = rest or redactor.document(_derived(clean, wish))
    document["source"] = {**document["source"], "session_id": redactor.document(material.row.id, "$.source.session_id")}
    return document | {"transcript": {"sections": [_section(clean)]}}


def _clean(material: Material, redactor: Redactor) -> Material:
    """The parts that hold what was said and done, redacted where they will stand."""
    before = [] if material.origin is None else material.origin["replay"]["deterministic_events"]
    facts = {name: value for name, value in material.facts.items() if name in CARRIED_FACTS}
    return replace(
        material,
        messages=redactor.document(material.messages, f"{SECTION}.messages"),
        events=redactor.document(material.events, f"{SECTION}.events"),
        places=redactor.document(material.places, f"{SECTION}.places"),
        records=redactor.document([*before, *material.records], "$.replay.deterministic_events"),
        facts=redactor.document(facts, f"{SECTION}.metadata") | _kept_apart(material),
    )


def _kept_apart(material: Material) -> dict[str, Any]:
    anchor = material.facts.get("workspace_anchor")
    return {} if anchor is None else {"workspace_anchor": anchor}


def _section(clean: Material) -> Document:
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


def _derived(clean: Material, wish: Wish) -> Document:
    """All but the talk itself."""
    source = _source(clean)
    calls = tool_calls_in(clean.messages, clean.records)
    return {
        "_type": BUNDLE_TYPE,
        "schema_version": SCHEMA_VERSION,
        "created_at": source["finished_at"],
        "producer": {"name": "mulligan", "version": wish.version, "schema_id": SCHEMA_ID},
        "source": source,
        "runtime": _runtime(clean, wish),
        "workspace": _workspace(clean, wish),
        "tools": {"schemas": [], "calls": calls},
        "permissions": permissions_in(clean.events),
        "replay": replay_of(clean.messages, clean.events, records=clean.records, calls=calls, source=source),
        "attachments": [],
        "metadata": {},
    }


def _source(clean: Material) -> Document:
    times = [event["at"] for event in clean.events] + [record["at"] for record in clean.records]
    lineage = (
        clean.lineage if clean.origin is None else {name: clean.origin["source"].get(name) for name in clean.lineage}
    )
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


def _runtime(clean: Material, wish: Wish) -> Document:
    pair = {"provider": clean.facts.get(PROVIDER), "model": clean.facts.get(MODEL) or clean.facts.get("pinned_model")}
    known = any(value is not None for value in pair.values())
    return {"mulligan_version": wish.version, "provider_models": [pair] if known else [], "usage": {}, "metadata": {}}


def _workspace(clean: Material, wish: Wish) -> Document:
    primary, others = _roots(clean, wish)
    anchor = clean.facts.get("workspace_anchor") or (clean.origin or {}).get("workspace") or {}
    kept = ("path", "mount_mode", "mounted_at")
    return {
        "primary": primary or None,
        "additional_roots": [{name: one.get(name) for name in kept} for one in others],
        "anchored_at": anchor.get("anchored_at"),
        "policy": "safe_identity_only",
    }


# The report.


def _manifest(redactor: Redactor, document: Document, material: Material, mode: Mode) -> list[dict[str, str]]:
    """What was done, earlier exports included. Of what was withheld afterwards only that is told."""
    before = [] if material.origin is None else material.origin["redaction"]["entries"]
    entries = [entry.to_json() for entry in redactor.entries]
    if mode == "replay_only":
        standing = dict(strings_in(document))
        entries = [one for one in entries if one["action"] == "withheld" or _stands(one, standing)]
    known = {tuple(sorted(one.items())) for one in before}
    return [*before, *(one for one in entries if tuple(sorted(one.items())) not in known)]


def _stands(entry: Mapping[str, str], standing: Mapping[str, str]) -> bool:
    return entry["replacement"] in standing.get(entry["path"], "")


def _redaction(mode: Mode, entries: Sequence[Mapping[str, str]]) -> Document:
    return {
        "mode": mode,
        "policy": "none" if mode == "local" else "mulligan.redaction.v1",
        "placeholder": "[redacted]",
        "entries": list(entries),
        "unsafe_secret_markers_rejected": mode != "local",
    }
