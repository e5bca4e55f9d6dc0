"""Scopes: preimages under an id that the caller chose. A scope is a snapshot in the terms of S0.

The first capture of a path in a scope wins. A scope holds its bodies until the caller drops it, or until Mulligan
evicts it because the scopes of its session hold more than the cap; either way a record says so. `scope_snapshots` has
the operations on open roots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from mulligan.history.retention import cap_of, drop_body, droppable, holder_of_scope
from mulligan.history.tables import CAPTURES, SCOPES, CaptureRow
from mulligan.session.tables import session_journal
from mulligan.store.journal import Journal
from mulligan.store.protocol import Tx
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    Entry,
    FileEntry,
    entry_from_bytes,
    entry_to_json,
)
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, path_bytes, to_wire

_CAPTURES_PER_RECORD = 200


@fast_dataclass(slots=True, frozen=True)
class Scopes:
    """The scopes of one session, inside a transaction."""

    tx: Tx
    journal: Journal
    session: SessionId
    at: str

    def capture(self, scope: str, root: str, befores: Mapping[RepoPath, Entry]) -> dict[RepoPath, Entry]:
        """Open the scope, or add to it. Returns what it took: the paths that it did not have yet.

        The store has the bodies already.
        """
        tx, session = self.tx, self.session
        fresh = {
            path: one
            for path, one in befores.items()
            if one.withheld is None and not tx.has(CAPTURES, session, scope, path_bytes(path))
        }
        # In several records, so that none grows without a limit.
        rest = iter(fresh.items())
        some = list(islice(rest, _CAPTURES_PER_RECORD))
        # An empty scope, too, needs a record that opens it.
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
        """Drop a scope and the bodies that nothing else needs; the record names them."""
        captures = self.tx.select(CAPTURES, {"session": self.session, "scope": scope})
        named = {entry.digest for entry in map(before_of, captures) if isinstance(entry, FileEntry)}
        gone = droppable(self.tx, named, holder=holder_of_scope(self.session, scope))
        body = {"session": self.session, "scope": scope, "why": why} | ({"digests": gone} if gone else {})
        self.journal.append(self.tx, session_journal(self.session), "scope.dropped", body, at=self.at)
        for digest in gone:
            drop_body(self.tx, digest)

    def evict_over_cap(self, *, keep: str | None) -> None:
        """Evict scopes in order of insertion, but not `keep`, which is being written. Shared bytes count once."""
        cap = cap_of(self.tx, self.session)
        rows = sorted(self.tx.select(SCOPES, {"session": self.session}), key=lambda row: row.seq)
        bodies = {row.scope: self._bodies_of(row.scope) for row in rows}
        # A body that several scopes hold becomes free with the last of them.
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
    return entry_from_bytes(capture.before)


def size_of(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries if isinstance(entry, FileEntry))
