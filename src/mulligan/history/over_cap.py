"""A call that alone changes more bytes than its session may keep.

It runs all the same, with every preimage durable while it is open. When it ends, its largest paths are given up until
the rest fits: their bodies go, a record says so, and the call's coverage lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mulligan.history.dropping import drop_body, droppable
from mulligan.session.tables import session_journal
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.journal import Journal
from mulligan.store.protocol import META, MetaRow, Tx
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.entries import Change, FileEntry
from mulligan.values.ids import SessionId
from mulligan.values.limits import SESSION_CAP_BYTES
from mulligan.values.paths import to_wire
from mulligan.values.plain import plain


def cap_of(tx: Tx, session: SessionId) -> int:
    """What an earlier version may have stored and is no whole number counts as nothing said."""
    row = tx.get(META, _cap_name(session))
    return int(row.value) if row is not None and row.value.isdecimal() else SESSION_CAP_BYTES


def put_cap(tx: Tx, session: SessionId, cap_bytes: int) -> None:
    tx.put(META, MetaRow(_cap_name(session), str(max(1, cap_bytes))))


def _cap_name(session: SessionId) -> str:
    return f"cap:{session}"


def changes_over_cap(tx: Tx, session: SessionId, changes: Sequence[Change]) -> list[Change]:
    """The largest, without which the others fit."""
    most = sum({entry.digest: entry.size for entry in _files_of(changes)}.values())
    if not most or most <= (cap := cap_of(tx, session)):
        return []
    stored = {entry.digest: _stored(tx, entry.digest) for entry in _files_of(changes)}
    over, found = sum(stored.values()) - cap, list[Change]()
    for change in sorted(changes, key=lambda one: sum(stored[digest] for digest in _digests_of(one)), reverse=True):
        if over <= 0:
            break
        over -= sum(stored.pop(digest, 0) for digest in _digests_of(change))
        found.append(change)
    return found


def coverage_of(given_up: Iterable[Change]) -> list[dict[str, str]]:
    """What cannot be undone, and of a new file, which can, that its bytes are not kept."""
    return [
        {
            "path": to_wire(change.path),
            "reason": "not_undoable" if isinstance(change.before, FileEntry) else "evicted",
        }
        for change in given_up
    ]


@plain(slots=True, frozen=True)
class GivingUp:
    """An ended call that lets go of some of its changes' bodies, in the transaction of its end."""

    call: str
    session: SessionId
    changes: Sequence[Change]
    given_up: Sequence[Change]

    def apply_in(self, tx: Tx, journal: Journal, *, at: str) -> None:
        kept = {digest for one in self.changes if one not in self.given_up for digest in _digests_of(one)}
        named = {digest for one in self.given_up for digest in _digests_of(one)}
        doomed = droppable(tx, named - kept, but_for=self.call)
        body = {"call": self.call, "paths": [to_wire(one.path) for one in self.given_up], "digests": doomed}
        journal.append(tx, session_journal(self.session), "paths.evicted", body, at=at)
        for digest in doomed:
            drop_body(tx, digest)


def _files_of(changes: Iterable[Change]) -> Iterable[FileEntry]:
    entries = (entry for one in changes for entry in (one.before, one.after))
    return (entry for entry in entries if isinstance(entry, FileEntry) and entry.withheld is None)


def _digests_of(change: Change) -> set[Digest]:
    return {entry.digest for entry in _files_of([change])}


def _stored(tx: Tx, digest: Digest) -> int:
    row = tx.get(BLOBS, raw_digest(digest))
    return row.stored if row is not None and row.place in READABLE else 0
