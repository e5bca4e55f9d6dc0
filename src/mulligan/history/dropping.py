"""Which bodies may go when what named them is given up, and letting them go.

A body stays while a record of something kept names it, while a later version is packed against it, while it is a part
of a stream, while a watched file holds it, and while an open call could need it to put a file back. What is given up is
a call that was evicted, with the outside edits that it came upon, a scope that was dropped, or a snapshot that is gone;
a snapshot that never came to be counts as gone after a day.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import takewhile

from mulligan.history.tables import CALLS, CHANGES, KEPT, SCOPES, TOUCHES, WSEQ_END, ChangeRow, TouchRow
from mulligan.store.blobs import BESIDE, BLOBS, BODIES, EVICTED, IN_DATABASE, PARTS, READABLE, BlobRow
from mulligan.store.journal import HEADS, RECORDS, REFS, STORE_HEAD, Record, RefRow, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest, digest_from_raw, raw_digest
from mulligan.values.plain import plain
from mulligan.workspace.snapshots import SNAPSHOTS

_STILL_COMING = timedelta(days=1)
"""The records of a snapshot that is being made come before the snapshot."""

_EDITS_LOOKED_AT = 50
"""Outside edits of one path, one after the other, that are looked through for the call that came upon them."""


Keepers = dict[bytes, RefRow]
"""For a blob, somebody who was found to need it: asked first when the same is asked of many calls, one by one."""


def droppable(tx: Tx, digests: Iterable[Digest], *, but_for: str, keepers: Keepers | None = None) -> list[Digest]:
    """Those that only what is given up needs; a version goes before the one it is packed against."""
    left, doomed = set(digests), set[Digest]()
    left -= _held_by_open_calls(tx, but_for=but_for)
    needs = _Needs(tx, but_for, {} if keepers is None else keepers)
    while more := {digest for digest in left if not needs.hold(digest, doomed)}:
        doomed |= more
        left -= more
    return sorted(doomed)


def drop_body(tx: Tx, digest: Digest) -> int:
    """The bytes given back. A record that says so must be in the same transaction."""
    row = tx.get(BLOBS, raw_digest(digest))
    if row is None or row.place not in READABLE:
        return 0
    delete_body(tx, row)
    tx.put(BLOBS, replace(row, place=EVICTED, stored=0, base=None, depth=0))
    return row.stored


def delete_body(tx: Tx, row: BlobRow) -> None:
    if row.place == IN_DATABASE:
        tx.delete(BODIES, row.digest)
    elif row.place == BESIDE:
        tx.drop_body(digest_from_raw(row.digest))
    for part in tx.select(PARTS, {"digest": row.digest}):
        tx.delete(PARTS, part.digest, part.ordinal)


def _held_by_open_calls(tx: Tx, *, but_for: str) -> set[Digest]:
    """What calls in progress have found or mean to put at a path: nothing on record names it yet."""
    return {digest for row in tx.select(TOUCHES) if row.call != but_for for digest in _digests_in(row)}


def _digests_in(row: TouchRow) -> Iterable[Digest]:
    entries = [decode(row.before), *decode(row.intended)]
    return (Digest(entry["digest"]) for entry in entries if "digest" in entry)


@plain(slots=True, frozen=True)
class _Needs:
    """What is still needed once `but_for` is given up."""

    tx: Tx
    but_for: str
    keepers: Keepers

    def hold(self, digest: Digest, doomed: set[Digest]) -> bool:
        """Named by a record of something kept, or by a part or a later version that is."""
        raw = raw_digest(digest)
        later = [row for row in self.tx.select(BLOBS, {"base": raw}) if digest_from_raw(row.digest) not in doomed]
        if any(row.place in READABLE for row in later) or is_part(self.tx, raw) or is_watched(self.tx, raw):
            return True
        return self._is_named(raw)

    def _is_named(self, raw: bytes) -> bool:
        known = self.keepers.get(raw)
        if known is not None and not _is_given_up(self.tx, known, self.but_for):
            return True
        # The newest first: what is given up is mostly old.
        refs = self.tx.select(REFS, {"digest": raw}, descending=True)
        found = next((ref for ref in refs if not _is_given_up(self.tx, ref, self.but_for)), None)
        if found is not None:
            self.keepers[raw] = found
        return found is not None


def _is_given_up(tx: Tx, ref: RefRow, but_for: str) -> bool:
    """Whether a reference is of something that was given up, or is about to be."""
    row = tx.get(RECORDS, ref.journal, ref.seq)
    if row is None:
        return False
    record = parse_record(row)
    if "snapshot" in record.payload:
        return _is_of_no_snapshot(tx, record, but_for)
    if "scope" in record.payload:
        session, scope = record.payload["session"], record.payload["scope"]
        return holder_of_scope(session, scope) == but_for or not tx.has(SCOPES, session, scope)
    if record.kind == "external":
        calls = _next_calls(tx, record)
        return bool(calls) and all(_is_call_given_up(tx, call, but_for) for call in calls)
    return _is_call_given_up(tx, record.payload.get("call"), but_for)


def _is_call_given_up(tx: Tx, call: object, but_for: str) -> bool:
    found = tx.get(CALLS, call) if isinstance(call, str) else None
    return call == but_for or (found is not None and bool(found.evicted))


def _next_calls(tx: Tx, external: Record) -> list[str]:
    """The calls that came upon an outside edit, which is needed no longer than they are. Empty: somewhere, none has."""
    found: list[str] = []
    for change in tx.select(CHANGES, {"call": external.payload["id"]}):
        later = tx.select(
            CHANGES,
            {"place": change.place},
            between=("wseq", change.wseq + 1, WSEQ_END),
            order=("wseq",),
            limit=_EDITS_LOOKED_AT,
        )
        first = next((row.call for row in later if not _is_external(tx, row)), None)
        if first is None:
            return []
        found.append(first)
    return found


def came_upon(tx: Tx, call: str) -> set[Digest]:
    """The bodies of outside edits that a call was the first to find: they are given up with it."""
    found = set[Digest]()
    for change in tx.select(CHANGES, {"call": call}):
        earlier = tx.select(
            CHANGES,
            {"place": change.place},
            between=("wseq", 0, change.wseq),
            order=("wseq",),
            descending=True,
            limit=_EDITS_LOOKED_AT,
        )
        for row in takewhile(partial(_is_external, tx), earlier):
            found |= {Digest(one["digest"]) for one in (decode(row.before), decode(row.after)) if "digest" in one}
    return found


def _is_external(tx: Tx, change: ChangeRow) -> bool:
    call = tx.get(CALLS, change.call)
    return call is not None and bool(call.external)


def holder_of_snapshot(root: str, snapshot: str) -> str:
    """A snapshot as one that needs bodies. The same content is a snapshot of its own in each root."""
    return f"{root}/{snapshot}"


def holder_of_scope(session: str, scope: str) -> str:
    """A scope as one that needs bodies. No call has such a name, and no snapshot."""
    return f"{session}//{scope}"


def _is_of_no_snapshot(tx: Tx, record: Record, but_for: str) -> bool:
    root, snapshot = record.payload["root"], record.payload["snapshot"]
    if holder_of_snapshot(root, snapshot) == but_for:
        return True
    head = tx.get(HEADS, STORE_HEAD)
    newest = parse_timestamp(record.at if head is None else head.at)
    return not tx.has(SNAPSHOTS, root, snapshot) and newest - parse_timestamp(record.at) > _STILL_COMING


def is_part(tx: Tx, raw: bytes) -> bool:
    return bool(tx.select(PARTS, {"part": raw}, order=("part",), limit=1))


def is_watched(tx: Tx, raw: bytes) -> bool:
    """Whether a watched file holds it now, so that the next change of that file will need it."""
    return bool(tx.select(KEPT, {"digest": raw}, limit=1))
