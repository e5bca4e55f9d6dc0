"""Scopes: preimages filed under an id that somebody chose. A scope is S0's snapshot.

The first capture of a path in a scope wins. A scope holds its bodies until it is dropped, or evicted because the scopes
of its session hold more than the cap; either way a record says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from mulligan.history.dropping import drop_body, droppable, holder_of_scope
from mulligan.history.over_cap import cap_of
from mulligan.history.tables import CAPTURES, SCOPES, CaptureRow
from mulligan.session.tables import session_journal
from mulligan.store.journal import Journal
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest
from mulligan.values.entries import Change, Entry, FileEntry, entry_from_json, entry_to_json, is_withheld
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, path_bytes, to_wire
from mulligan.values.plain import plain

_CAPTURES_PER_RECORD = 200


@plain(slots=True, frozen=True)
class Scopes:
    """The scopes of one session, inside a transaction."""

    tx: Tx
    journal: Journal
    session: SessionId
    at: str

    def capture_of_call(self, label: str, root: str, changes: Iterable[Change]) -> None:
        """A call's label is the id of its scope: if there is one in this root, it takes what the call changed."""
        row = self.tx.get(SCOPES, self.session, label)
        if row is not None and row.root == root:
            self.capture(label, root, {change.path: change.before for change in changes})

    def capture(self, scope: str, root: str, befores: Mapping[RepoPath, Entry]) -> dict[RepoPath, Entry]:
        """Open the scope, or add to it. What was not in it yet, which is what it takes; the bodies are stored."""
        tx, session = self.tx, self.session
        kept = {path: one for path, one in befores.items() if not is_withheld(one)}
        fresh = {path: one for path, one in kept.items() if not tx.has(CAPTURES, session, scope, path_bytes(path))}
        rest = iter(fresh.items())
        some = list(islice(rest, _CAPTURES_PER_RECORD))
        while some or not tx.has(SCOPES, session, scope):
            self._record(scope, root, some)
            some = list(islice(rest, _CAPTURES_PER_RECORD))
        self.evict_over_cap(keep=scope)
        return fresh

    def _record(self, scope: str, root: str, befores: Sequence[tuple[RepoPath, Entry]]) -> None:
        body = {
            "session": self.session,
            "scope": scope,
            "root": root,
            "captured": [{"path": to_wire(path), "before": entry_to_json(entry)} for path, entry in befores],
            "taken_at_ms": int(parse_timestamp(self.at).timestamp() * 1000),
        }
        refs = {entry.digest for _, entry in befores if isinstance(entry, FileEntry)}
        self.journal.append(self.tx, session_journal(self.session), "scope.captured", body, at=self.at, refs=refs)

    def drop(self, scope: str, *, why: str) -> None:
        """The bodies that nothing else needs go with it, and the record names them."""
        captures = self.tx.select(CAPTURES, {"session": self.session, "scope": scope})
        named = {entry.digest for entry in map(before_of, captures) if isinstance(entry, FileEntry)}
        gone = droppable(self.tx, named, but_for=holder_of_scope(self.session, scope))
        body = {"session": self.session, "scope": scope, "why": why} | ({"digests": gone} if gone else {})
        self.journal.append(self.tx, session_journal(self.session), "scope.dropped", body, at=self.at)
        for digest in gone:
            drop_body(self.tx, digest)

    def evict_over_cap(self, *, keep: str | None) -> None:
        """Oldest first, in order of insertion, never the one being written. Bytes that two scopes share count once."""
        cap = cap_of(self.tx, self.session)
        rows = sorted(self.tx.select(SCOPES, {"session": self.session}), key=lambda row: row.seq)
        bodies = {row.scope: self._bodies_of(row.scope) for row in rows}
        holders = Counter(digest for held in bodies.values() for digest in held)
        total = sum({digest: size for held in bodies.values() for digest, size in held.items()}.values())
        for row in rows:
            if total <= cap:
                return
            if row.scope != keep:
                self.drop(row.scope, why="evicted")
                holders.subtract(bodies[row.scope].keys())
                total -= sum(size for digest, size in bodies[row.scope].items() if not holders[digest])

    def _bodies_of(self, scope: str) -> dict[Digest, int]:
        """The size of each distinct body that a scope holds."""
        captures = self.tx.select(CAPTURES, {"session": self.session, "scope": scope})
        return {entry.digest: entry.size for entry in map(before_of, captures) if isinstance(entry, FileEntry)}


def before_of(capture: CaptureRow) -> Entry:
    return entry_from_json(decode(capture.before))


def size_of(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries if isinstance(entry, FileEntry))
