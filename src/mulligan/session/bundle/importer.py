"""Creates a session from a bundle: checks all of it first, then creates the session in one transaction.

The transcript becomes records of the new session with their original times and ids, so it reads as it did there. Calls
and file changes stay with the bundle as evidence and never become part of this machine's history. An import takes no
roots or permissions from a bundle. The bodies in the bundle go into the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mulligan.session.bundle.export import CARRIED_FACTS, IMPORTED
from mulligan.session.bundle.format import Document, body_of, is_message_event, parse_bundle, wrong_bundle
from mulligan.session.lifecycle import fresh_id, set_facts_in
from mulligan.session.tables import APPENDED, INSERTED, MessageSpan, normal, session_journal, spans_to_json
from mulligan.session.transcript_log import Archive, PackedMessage, pack_message
from mulligan.store.blobs import BLOBS, BlobVanishedError
from mulligan.store.protocol import Tx
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, parse_user_id


def import_bundle(
    archive: Archive, root: str, data: bytes | str | Mapping[str, Any], *, name: str | None = None
) -> SessionId:
    """Create the session of a bundle, with its id or as `name`. Raises `session_exists` if that id is in use."""
    document = parse_bundle(data, now=archive.clock.now())
    section = document["transcript"]["sections"][0]
    session = parse_user_id(name if name is not None else document["source"]["session_id"], "session")
    _check_known_sizes(archive, document)
    needed = _store_bodies(archive, document)
    while True:
        new_session = _NewSession(archive, root, SessionId(session), document, _written_events(archive, section))
        pairs = zip(section["places"], section["messages"], strict=True)
        inserted = [pack_message(archive, one, id=place["id"]) for place, one in pairs if place["event"] is None]
        origin = archive.blobs.store(encode(_origin(document)))
        # gc may delete a large body between its packing and our transaction; then we pack it again.
        with suppress(BlobVanishedError), archive.store.write() as tx:
            fresh_id(tx, archive, session)
            new_session.write(tx, inserted, [*needed, origin], origin)
            return SessionId(session)


def _check_known_sizes(archive: Archive, document: Document) -> None:
    """Check bodies that are in this store but not in the bundle: they must have the size that the bundle gives."""
    blobs = (document.get("content") or {}).get("blobs", [])
    with archive.store.read() as tx:
        for index, one in enumerate(blobs):
            row = tx.get(BLOBS, raw_digest(one["digest"]))
            if row is not None and one.get("size") not in (None, row.size):
                raise wrong_bundle("size_mismatch", f"$.content.blobs[{index}]", "a body does not have its size")


def _store_bodies(archive: Archive, document: Document) -> list[Digest]:
    blobs = (document.get("content") or {}).get("blobs", [])
    bodies = [body for one in blobs if (body := body_of(one)) is not None]
    return archive.blobs.store_all(bodies)


def _origin(document: Document) -> Document:
    """The parts that a later export cannot compute: all except the transcript and the bodies."""
    blobs = (document.get("content") or {}).get("blobs", [])
    named = [{**one, "body": True} if "body" in one else one for one in blobs]
    rest = {key: value for key, value in document.items() if key != "transcript"}
    return rest | {"content": {"encoding": "base64", "blobs": named}}


def _written_events(archive: Archive, section: Document) -> dict[int, PackedMessage]:
    """The packed messages, by the index of their event."""
    in_window = {place["event"]: message for place, message in zip(section["places"], section["messages"], strict=True)}
    found = {}
    for index, event in enumerate(section["events"]):
        if is_message_event(event):
            message = event.get("message", in_window.get(index))
            if message is None:
                raise fault("invalid_bundle", "This bundle cannot be imported: a message is missing.", event=index)
            found[index] = pack_message(archive, message, id=event["id"])
    return found


@fast_dataclass(slots=True, frozen=True)
class _NewSession:
    """Writes the records of the new session."""

    archive: Archive
    root: str
    session: SessionId
    document: Document
    messages: Mapping[int, PackedMessage]

    def write(self, tx: Tx, inserted: Sequence[PackedMessage], refs: Sequence[Digest], origin: Digest) -> None:
        section, source = self.document["transcript"]["sections"][0], self.document["source"]
        self._append(tx, "session.opened", {"session": self.session, "root": self.root}, at=source["started_at"])
        for index, event in enumerate(section["events"]):
            if index in self.messages:
                self._append_message(tx, APPENDED, self.messages[index], at=event["at"])
            else:
                self._append(tx, "event.appended", {"id": event["id"], "event": _event_body(event)}, at=event["at"])
        for message in inserted:
            self._append_message(tx, INSERTED, message, at=source["started_at"])
        self._write_window(tx, section)
        facts = _facts(section.get("metadata"))
        if facts:
            set_facts_in(tx, self.archive, self.session, facts)
        body = {
            "bundle_id": self.document["bundle_id"],
            "mode": self.document["redaction"]["mode"],
            "from": source["session_id"],
            "origin": origin,
        }
        journal = session_journal(self.session)
        self.archive.journal.append(tx, journal, IMPORTED, body, at=self.archive.now(), refs=refs)

    def _append(self, tx: Tx, kind: str, body: Mapping[str, Any], *, at: str) -> None:
        self.archive.journal.append(tx, session_journal(self.session), kind, body, at=at)

    def _append_message(self, tx: Tx, kind: str, message: PackedMessage, *, at: str) -> None:
        if message.blob is not None:
            self.archive.blobs.put(tx, message.blob)
        journal = session_journal(self.session)
        self.archive.journal.append(tx, journal, kind, message.body, at=at, refs=message.refs)

    def _write_window(self, tx: Tx, section: Document) -> None:
        """Write the context window, unless it is simply all messages in order."""
        numbers = {event: number for number, event in enumerate(self.messages)}
        free = len(numbers)
        wanted = []
        for place in section["places"]:
            number = free if place["event"] is None else numbers[place["event"]]
            free += place["event"] is None
            wanted.append(MessageSpan(self.session, number, number + 1))
        window = normal(wanted)
        if window != normal([MessageSpan(self.session, 0, len(numbers))]):
            body = {"verb": "import", "spans": spans_to_json(window), "was": 0}
            self._append(tx, "window.changed", body, at=self.document["source"]["started_at"])


def _event_body(event: Document) -> Document:
    body = {"kind": event["kind"], "visibility": event["visibility"]}
    return body | {name: event[name] for name in ("text", "metadata") if event.get(name) is not None}


_FACT_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "scratchpad": dict,
    "scratchpad_version": int,
    "pinned_reasoning_policy": (dict, str),
    "source": dict,
}


def _facts(given: object) -> dict[str, Any]:
    """The facts that belong to the transcript, if they have the right type. An import sets no other facts."""
    if not isinstance(given, Mapping):
        return {}
    return {
        name: given[name]
        for name in CARRIED_FACTS
        if given.get(name) is not None and isinstance(given[name], _FACT_TYPES.get(name, str))
    }
