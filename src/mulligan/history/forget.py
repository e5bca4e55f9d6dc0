"""Forget: erase bytes that are stored already, of a path or of a call, wherever the store has them.

`forget` also erases bodies that another call or path shares: the user wants the bytes nowhere. It writes the records
that hold parameters and receipts of such effects anew without them. Their hashes stay, and one record in the journal of
the store names all bodies and records that were changed, so that `verify` accepts both. Then the engine erases what
deletions left in its file, its free pages and its log, and deletes the copy that a migration made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from mulligan.files.capture_rules import PATCH_HEADERS
from mulligan.files.snapshot.manifest import SNAPSHOTS, Manifest
from mulligan.history.ledger import Ledger
from mulligan.history.open_root import OpenRoot
from mulligan.history.retention import drop_body, is_in_baseline, is_stored, oldest_begin_ms, sweep_files
from mulligan.history.tables import CALLS, CAPTURES, CHANGES, KEPT, ROOTS, SCOPES, TOUCHES, CallRow, ChangeRow
from mulligan.store.blobs import BLOBS, PARTS, Blobs, delete_unnamed_bodies
from mulligan.store.journal import FORGOTTEN, RECORDS, REFS, STORE_JOURNAL, RecordRow, parse_record
from mulligan.store.protocol import CLAIMS, SPOOL, Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.digest import Digest, digest_from_raw, parse_digest, raw_digest
from mulligan.values.entries import FileEntry, entry_from_bytes
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, is_inside, path_bytes, path_from_bytes, to_wire

_ERASED = {"forgotten": True}
_PATH_PARAMS = ("path", "file_path", "to", "cwd")


@fast_dataclass(slots=True, frozen=True)
class Forgotten:
    """The result of `forget`: erased bodies by digest, records by journal and number, and changes that had the same
    content.
    """

    digests: tuple[Digest, ...]
    records: tuple[tuple[str, int], ...]
    shared: tuple[tuple[str, str], ...]
    """call and path of other changes that have lost their bytes too"""
    copies: tuple[str, ...]
    """names of files that were deleted: the whole store as it was before a migration"""

    def to_json(self) -> dict[str, Any]:
        return {
            "digests": list(self.digests),
            "records": [{"journal": journal, "seq": seq} for journal, seq in self.records],
            "shared": [{"call": call, "path": path} for call, path in self.shared],
            "copies": list(self.copies),
        }


def forget_path(open_root: OpenRoot, path: RepoPath) -> Forgotten:
    """Erase what the store has of a path and of everything below it."""
    place = open_root.disk.root.place_of(path)
    with open_root.ledger.store.read() as tx:
        rows = [row for row in tx.select(CHANGES) if is_inside(row.place, place)]
        digests = {digest for row in rows for digest in _digests_of_change(row)} | _captured_at(tx, open_root, path)
        ended = list(_ended_calls(tx))
        digests |= {digest for row in ended for digest in _rescued_at(row, open_root, path)}
        # A call that only read the path may have its bytes in a receipt.
        calls = {row.call for row in rows}
        mentions = _mentions_by_root(tx, open_root, path)
        records = [row for row in ended if _is_about(row, calls, mentions)]
    return _forget(open_root, digests, records, about={"path": to_wire(path), "root": open_root.root.id}, changes=rows)


def forget_call(open_root: OpenRoot, call: CallRow) -> Forgotten:
    """Erase what the store has because of one call: preimages, what it wrote, parameters and receipts."""
    if call.status == "open":
        raise fault(
            "call_open",
            f"Call {call.id} is open, and an abort needs its earlier contents; try again when it has ended.",
            call=call.id,
        )
    with open_root.ledger.store.read() as tx:
        rows = tx.select(CHANGES, {"call": call.id})
        records = [row for row in _ended_calls(tx) if parse_record(row).payload.get("call") == call.id]
        named = {digest for row in records for digest in parse_record(row).refs}
        digests = named | {digest for row in rows for digest in _digests_of_change(row)}
    return _forget(open_root, digests, records, about={"call": call.id}, changes=rows)


def _forget(
    open_root: OpenRoot,
    digests: set[Digest],
    records: list[RecordRow],
    *,
    about: Mapping[str, str],
    changes: Iterable[ChangeRow],
) -> Forgotten:
    ledger = open_root.ledger
    with ledger.store.write() as tx:
        # An abort of an open call would need these bytes.
        _refuse_open(tx, digests)
        erased = {(row.journal, row.seq): body for row in records if (body := _without_effects(row)) is not None}
        digests = {*digests, *(digest for row in records for digest in _digests_in_receipts(row))}
        if digests or records:
            # An aborted call may have stored the same secret under a digest that no record names.
            digests |= _unnamed(ledger, tx)
        dropped = sorted(_with_parts(tx, {one for one in digests if is_stored(tx, one)}))
        own = {(row.call, row.path) for row in changes}
        shared = tuple(
            (row.call, to_wire(path_from_bytes(row.path)))
            for row in tx.select(CHANGES)
            if (row.call, row.path) not in own and not _digests_of_change(row).isdisjoint(dropped)
        )
        # Blobs that are packed against a dropped one must be readable without it.
        for digest in dropped:
            ledger.blobs.repack_dependents(tx, digest, but=dropped)
        for digest in dropped:
            drop_body(tx, digest)
        for row in records:
            if (row.journal, row.seq) in erased:
                tx.put(RECORDS, replace(row, body=erased[row.journal, row.seq]))
        copies = tuple(map(os.path.basename, ledger.store.older_copies()))
        forgotten = Forgotten(tuple(dropped), tuple(sorted(erased)), shared, copies)
        hashes = [
            {"journal": journal, "seq": seq, "sha256": sha256(erased[journal, seq]).hexdigest()}
            for journal, seq in forgotten.records
        ]
        record = {**about, **forgotten.to_json(), "records": hashes}
        ledger.journal.append(tx, STORE_JOURNAL, FORGOTTEN, record, at=ledger.now())
    # Delete the files again, now raising errors: after a transaction, a body that cannot be deleted is left to `gc`.
    delete_unnamed_bodies(ledger.store, sorted({*digests, *dropped}))
    ledger.store.erase_deleted()
    return forgotten


def _refuse_open(tx: Tx, digests: set[Digest]) -> None:
    for row in tx.select(TOUCHES):
        entries = [decode(row.before), *decode(row.intended)]
        if not digests.isdisjoint(entry["digest"] for entry in entries if "digest" in entry):
            raise _open_call_fault(row.call)
    for claim in tx.select(CLAIMS, {"deep": 1}):
        if claim.place.startswith(SPOOL):
            # Which bytes are in a spool, only its process knows; it stores them when its command ends.
            raise _open_call_fault(claim.call)


def _open_call_fault(call: str) -> MulliganError:
    return fault("call_open", f"Call {call} is open and may need these bytes; try again when it has ended.")


def _digests_of_change(row: ChangeRow) -> set[Digest]:
    entries = (entry_from_bytes(one) for one in (row.before, row.after))
    return {entry.digest for entry in entries if isinstance(entry, FileEntry)}


def _captured_at(tx: Tx, open_root: OpenRoot, path: RepoPath) -> set[Digest]:
    """What scopes, the baseline and snapshots have of the path and of what is below it."""
    key, root = path_bytes(path), open_root.root.id
    scopes = {(row.session, row.scope) for row in tx.select(SCOPES) if row.root == root}
    found = {
        Digest(entry["digest"])
        for row in tx.select(CAPTURES)
        if (row.session, row.scope) in scopes and _is_at(row.path, key) and "digest" in (entry := decode(row.before))
    }
    baseline = [row.digest for row in tx.select(KEPT, {"root": root}) if _is_at(row.path, key)]
    found |= {digest_from_raw(digest) for digest in baseline if digest is not None}
    for row in tx.select(SNAPSHOTS):
        if row.root == root:
            body = open_root.ledger.blobs.read_in(tx, parse_digest(row.manifest))
            entries = Manifest.from_json(decode(body)).entries
            found |= {one.blob for one in entries if _is_at(path_bytes(one.path), key)}
    return found


def _is_at(path: bytes, key: bytes) -> bool:
    """Whether the path is `key`, or below it."""
    return key == path_bytes(ROOT) or is_inside(path, key)


def _with_parts(tx: Tx, digests: set[Digest]) -> set[Digest]:
    rows = (row for digest in digests for row in tx.select(PARTS, {"digest": raw_digest(digest)}))
    return digests | {digest_from_raw(row.part) for row in rows}


def _ended_calls(tx: Tx) -> Iterator[RecordRow]:
    """The records of the ends of calls, which hold parameters and receipts."""
    journals = {f"s:{row.session}" for row in tx.select(CALLS) if row.session is not None}
    for journal in sorted(journals):
        yield from (row for row in tx.select(RECORDS, {"journal": journal}) if b'"kind":"call.ended"' in row.body)


def _unnamed(ledger: Ledger, tx: Tx) -> set[Digest]:
    """Bodies that no record names: what an aborted call wrote, for example. No row says which path they belong to.

    Bodies that an open call may be about to name stay. Another process that stores the same content at this moment
    stores it again, because the row says that the body is gone.
    """
    cutoff = oldest_begin_ms(tx)
    found = set[bytes]()
    for row in tx.select(BLOBS):
        is_old = cutoff is None or row.touched_ms < cutoff
        # A body that an open call stored a moment ago has no reference yet either.
        if is_old and not tx.select(REFS, {"digest": row.digest}, limit=1) and not is_in_baseline(tx, row.digest):
            found.add(row.digest)
    # A part may belong to several contents, and stays with the last of them.
    while needed := {one for one in found if any(row.digest not in found for row in tx.select(PARTS, {"part": one}))}:
        found -= needed
    if cutoff is None:
        sweep_files(ledger, tx, before_s=ledger.clock.now().timestamp())
    return {digest_from_raw(raw) for raw in found}


def _rescued_at(row: RecordRow, open_root: OpenRoot, path: RepoPath) -> Iterator[Digest]:
    """What a command wrote at the path before Mulligan put the path back."""
    payload = parse_record(row).payload
    for one in payload.get("coverage", ()) if payload.get("root") == open_root.root.id else ():
        if "blob_ref" in one and _is_named(one["path"], to_wire(path)):
            yield parse_digest(one["blob_ref"])


def _is_named(text: str, wire: str) -> bool:
    """Whether a text is the path, or one below it."""
    if wire == ROOT or f"/{text.removeprefix('./')}/".startswith(f"/{wire}/"):
        return True
    return (text[:1] == "/" or ".." in text) and f"/{wire}/" in f"{text}/"


def _mentions_by_root(tx: Tx, open_root: OpenRoot, path: RepoPath) -> dict[str, _Mentions]:
    """How records of this root name the path, and those of the roots that overlap with it."""
    place, blobs = open_root.disk.root.place_of(path), open_root.ledger.blobs
    rows = [row for row in tx.select(ROOTS) if row.workspace == open_root.root.workspace]
    wires = {row.id: ROOT if is_inside(row.key, place) else _wire_below(row.key, place) for row in rows}
    wires[open_root.root.id] = to_wire(path)
    return {root: _Mentions(tx, blobs, wire) for root, wire in wires.items() if wire is not None}


def _wire_below(key: bytes, place: bytes) -> str | None:
    return to_wire(path_from_bytes(place[len(key) :].lstrip(b"/"))) if is_inside(place, key) else None


def _is_about(row: RecordRow, calls: set[str], mentions: Mapping[str, _Mentions]) -> bool:
    """Whether a call changed the path, or one of its effects named it or returned lines of it."""
    payload = parse_record(row).payload
    if payload.get("call") in calls:
        return True
    found = mentions.get(payload.get("root", ""))
    return found is not None and any(map(found.are_in, payload.get("effects", ())))


class _Mentions:
    """Finds the effects that may have bytes of a path, or of what is below it, in their parameters and receipts."""

    def __init__(self, tx: Tx, blobs: Blobs, wire: str) -> None:
        self._tx = tx
        self._blobs = blobs
        self._wire = wire
        # A command may name the file from another folder, in quotes or in an argument, so only its name is searched.
        name = re.escape(wire.rpartition("/")[2])
        self._word = re.compile(rf"(?<![\w.-]){name}(?![\w-]|\.\w)")

    def are_in(self, effect: Mapping[str, Any]) -> bool:
        params = effect["params"]
        named = [text for name in _PATH_PARAMS if isinstance(text := params.get(name), str)]
        if any(_is_named(one, self._wire) for one in named):
            return True
        if any(self._in_command(params.get(name)) for name in ("argv", "command")):
            return True
        # A search returns lines of files that its parameters do not name.
        lines = self._text(effect["receipt"].get("matches")).splitlines()
        return self._in_patch(self._text(params.get("patch"))) or any(map(self._begins, lines))

    def _in_command(self, given: object) -> bool:
        """Whether a command names the file. It may have been in another folder, so only the name counts."""
        words = given if isinstance(given, list) else [given]
        return any(isinstance(word, str) and self._word.search(word) is not None for word in words)

    def _in_patch(self, patch: str) -> bool:
        """Whether a line names the path as a file of the patch, also in a patch that Mulligan could not parse."""
        for line in patch.splitlines():
            if line.startswith(PATCH_HEADERS):
                words = [
                    word.removeprefix("a/").removeprefix("b/") for word in (*line.split(), line.partition(": ")[2])
                ]
                if any(_is_named(word, self._wire) for word in words if word):
                    return True
        return False

    def _begins(self, line: str) -> bool:
        return self._wire == ROOT or line.startswith((f"{self._wire}:", f"{self._wire}/"))

    def _text(self, value: object) -> str:
        """A text in parameters or a receipt: inline, a blob, or long, so that the record has only its digest."""
        if isinstance(value, str):
            return value
        found: Any = value if isinstance(value, Mapping) else {}
        for name in ("inline_text", "text", "blob"):
            if name in found:
                return self._text(found[name])
        reference = found.get("blob_ref", found.get("digest"))
        digest = parse_digest(reference) if isinstance(reference, str) else None
        if digest is None or not is_stored(self._tx, digest):
            return ""
        return self._blobs.read_in(self._tx, digest).decode("utf-8", "replace")


def _without_effects(row: RecordRow) -> bytes | None:
    """The record without parameters and receipts; None if it has no effects."""
    document = decode(row.body)
    effects = document["payload"].get("effects")
    if not effects:
        return None
    document["payload"]["effects"] = [
        {"effect": one["effect"], "params": _ERASED, "receipt": {"status": one["receipt"].get("status"), **_ERASED}}
        for one in effects
    ]
    return encode(document)


def _digests_in_receipts(row: RecordRow) -> Iterator[Digest]:
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
