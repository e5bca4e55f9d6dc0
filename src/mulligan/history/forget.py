"""`forget`: erase bytes that are stored already, of a path or of a call, wherever the store has them.

The bodies go, also where another call or path has the same content: the point is that the bytes are nowhere. Records
that hold parameters and receipts of such effects are written anew without them; their hashes stay, and one record in
the journal of the store names all bodies and all records that were changed, so that `verify` accepts both. Then the
engine erases what deletions left in its file, its free pages and its log, and deletes the copy that a migration made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from mulligan.history.desk import Desk
from mulligan.history.dropping import drop_body
from mulligan.history.tables import CALLS, CAPTURES, CHANGES, KEPT, SCOPES, TOUCHES, CallRow, ChangeRow
from mulligan.store.blobs import BLOBS, PARTS, READABLE, delete_unnamed_bodies
from mulligan.store.journal import FORGOTTEN, RECORDS, STORE_JOURNAL, RecordRow, parse_record
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.digest import Digest, digest_from_raw, parse_digest, raw_digest
from mulligan.values.entries import FileEntry, entry_from_json
from mulligan.values.faults import MulliganError, fault
from mulligan.values.paths import RepoPath, ancestors_of, is_inside, path_bytes, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.manifest import Manifest
from mulligan.workspace.snapshots import SNAPSHOTS

_ERASED = {"forgotten": True}
_NAMES_PATHS = ("path", "file_path", "to")


@plain(slots=True, frozen=True)
class Forgotten:
    """What was erased: bodies by digest, records by journal and number, and what else had the same content."""

    digests: tuple[Digest, ...]
    records: tuple[tuple[str, int], ...]
    shared: tuple[tuple[str, str], ...]
    """call and path of changes that were not asked about and have lost their bytes too"""
    copies: tuple[str, ...]
    """names of files that were deleted: the whole store as it was before a migration"""

    def to_json(self) -> dict[str, Any]:
        return {
            "digests": list(self.digests),
            "records": [{"journal": journal, "seq": seq} for journal, seq in self.records],
            "shared": [{"call": call, "path": path} for call, path in self.shared],
            "copies": list(self.copies),
        }


def forget_path(desk: Desk, path: RepoPath) -> Forgotten:
    """Erase what the store has of a path and of everything below it."""
    place = desk.disk.root.place_of(path)
    with desk.ledger.store.read() as tx:
        rows = [row for row in tx.select(CHANGES) if is_inside(row.place, place)]
        digests = {digest for row in rows for digest in _digests_in(row)} | _captured_at(tx, desk, path)
        calls = {row.call for row in rows}
        records = [row for row in _ended_calls(tx) if _is_about(row, calls, desk, path)]
    return _forget(desk, digests, records, about={"path": to_wire(path), "root": desk.root.id}, changes=rows)


def forget_call(desk: Desk, call: CallRow) -> Forgotten:
    """Erase what the store has because of one call: what was there, what it wrote, what it read and answered."""
    if call.status == "open":
        raise fault("call_open", f"Call {call.id} is open; its files could not be put back.", call=call.id)
    with desk.ledger.store.read() as tx:
        rows = tx.select(CHANGES, {"call": call.id})
        records = [row for row in _ended_calls(tx) if parse_record(row).payload.get("call") == call.id]
        named = {digest for row in records for digest in parse_record(row).refs}
        digests = named | {digest for row in rows for digest in _digests_in(row)}
    return _forget(desk, digests, records, about={"call": call.id}, changes=rows)


def _forget(
    desk: Desk,
    digests: set[Digest],
    records: list[RecordRow],
    *,
    about: Mapping[str, str],
    changes: Iterable[ChangeRow],
) -> Forgotten:
    ledger = desk.ledger
    with ledger.store.write() as tx:
        _refuse_open(tx, digests)
        erased = {(row.journal, row.seq): body for row in records if (body := _without_effects(row)) is not None}
        digests = {*digests, *(digest for row in records for digest in _handed_out(row))}
        doomed = sorted(_with_parts(tx, {one for one in digests if _is_stored(tx, one)}))
        own = {(row.call, row.path) for row in changes}
        shared = tuple(
            (row.call, to_wire(path_from_bytes(row.path)))
            for row in tx.select(CHANGES)
            if (row.call, row.path) not in own and not _digests_in(row).isdisjoint(doomed)
        )
        for digest in doomed:
            ledger.blobs.unpack_dependents(tx, digest, but=doomed)
        for digest in doomed:
            drop_body(tx, digest)
        for row in records:
            if (row.journal, row.seq) in erased:
                tx.put(RECORDS, replace(row, body=erased[row.journal, row.seq]))
        copies = tuple(map(os.path.basename, ledger.store.older_copies()))
        told = Forgotten(tuple(doomed), tuple(sorted(erased)), shared, copies)
        named = [
            {"journal": one, "seq": seq, "sha256": sha256(erased[one, seq]).hexdigest()} for one, seq in told.records
        ]
        ledger.journal.append(
            tx, STORE_JOURNAL, FORGOTTEN, {**about, **told.to_json(), "records": named}, at=ledger.now()
        )
    # Once more, and with its errors: after the transaction, a body that cannot be deleted is left to `gc`.
    delete_unnamed_bodies(ledger.store, sorted({*digests, *doomed}))
    ledger.store.erase_deleted()
    return told


def _refuse_open(tx: Tx, digests: set[Digest]) -> None:
    for row in tx.select(TOUCHES):
        entries = [decode(row.before), *decode(row.intended)]
        if not digests.isdisjoint(entry["digest"] for entry in entries if "digest" in entry):
            raise fault("call_open", f"Call {row.call} is open and may need these bytes; try again when it has ended.")


def _digests_in(row: ChangeRow) -> set[Digest]:
    entries = (entry_from_json(decode(one)) for one in (row.before, row.after))
    return {entry.digest for entry in entries if isinstance(entry, FileEntry)}


def _captured_at(tx: Tx, desk: Desk, path: RepoPath) -> set[Digest]:
    """What scopes, the baseline of watched roots and snapshots have of the path and of what is below it."""
    key, root = path_bytes(path), desk.root.id
    scopes = {(row.session, row.scope) for row in tx.select(SCOPES) if row.root == root}
    found = {
        Digest(entry["digest"])
        for row in tx.select(CAPTURES)
        if (row.session, row.scope) in scopes and is_inside(row.path, key) and "digest" in (entry := decode(row.before))
    }
    kept = [row for row in tx.select(KEPT, {"root": root}) if is_inside(row.path, key) and row.digest is not None]
    found |= {digest_from_raw(row.digest) for row in kept if row.digest is not None}
    for row in tx.select(SNAPSHOTS):
        if row.root == root:
            body = desk.ledger.blobs.read_in(tx, parse_digest(row.manifest))
            entries = Manifest.from_json(decode(body)).entries
            found |= {one.blob for one in entries if is_inside(path_bytes(one.path), key)}
    return found


def _is_stored(tx: Tx, digest: Digest) -> bool:
    row = tx.get(BLOBS, raw_digest(digest))
    return row is not None and row.place in READABLE


def _with_parts(tx: Tx, digests: set[Digest]) -> set[Digest]:
    rows = (row for digest in digests for row in tx.select(PARTS, {"digest": raw_digest(digest)}))
    return digests | {digest_from_raw(row.part) for row in rows}


# Records.


def _ended_calls(tx: Tx) -> Iterator[RecordRow]:
    journals = {f"s:{row.session}" for row in tx.select(CALLS) if row.session is not None}
    for journal in sorted(journals):
        yield from (row for row in tx.select(RECORDS, {"journal": journal}) if b'"kind":"call.ended"' in row.body)


def _is_about(row: RecordRow, calls: set[str], desk: Desk, path: RepoPath) -> bool:
    """Whether a call changed the path, or one of its effects named it or answered with lines of it."""
    payload = parse_record(row).payload
    if payload.get("root") != desk.root.id:
        return False
    return payload.get("call") in calls or any(_names(effect, path) for effect in payload.get("effects", ()))


def _names(effect: Mapping[str, Any], path: RepoPath) -> bool:
    texts = [effect["params"].get(name) for name in _NAMES_PATHS]
    named = [RepoPath(text.removeprefix("./")) for text in texts if isinstance(text, str)]
    if any(one == path or path in ancestors_of(one) or one.endswith("/" + path) for one in named):
        return True
    matches = effect["receipt"].get("matches")
    return isinstance(matches, Mapping) and f"{to_wire(path)}:" in str(matches)


def _without_effects(row: RecordRow) -> bytes | None:
    """The record without what its effects were given and answered; None if there was nothing."""
    document = decode(row.body)
    effects = document["payload"].get("effects")
    if not effects:
        return None
    document["payload"]["effects"] = [
        {"effect": one["effect"], "params": _ERASED, "receipt": {"status": one["receipt"].get("status"), **_ERASED}}
        for one in effects
    ]
    return encode(document)


def _handed_out(row: RecordRow) -> Iterator[Digest]:
    """Blobs that the receipts of a record name: output, long texts, pages of a file."""
    pending: list[Any] = [one["receipt"] for one in decode(row.body)["payload"].get("effects", ())]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
            for name in ("blob_ref", "digest"):
                if isinstance(text := value.get(name), str):
                    try:
                        yield parse_digest(text)
                    except MulliganError:
                        continue
        elif isinstance(value, list):
            pending += value
