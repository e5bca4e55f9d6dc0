"""Putting back what dead processes left half done.

For every path an open call of a dead owner meant to touch, from what is there now:
| there is | then |
| --- | --- |
| the preimage | nothing: it never happened, or was put back already |
| something the call meant to put there | the preimage goes back |
| a torn file that was being written in place | kept in the store, then the preimage goes back |
| anything else | somebody's work: it stays, is kept in the store too, and is reported |
What lies under a draft name is ours to throw away, unless it is somebody's save that had just been displaced: then it
is that, not the preimage, which goes back. All of it is idempotent: recovery itself may die at any point.

Calls that were only observed are never put back: they end by recording what changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mulligan.history.desk import Desk
from mulligan.history.ledger import Ending, Facts
from mulligan.history.tables import CALLS, OPEN, ROOTS, TOUCHES, OpenRow, TouchRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.entries import Change, Entry, FileEntry, entry_from_json, same_content, same_state
from mulligan.values.faults import AskedWrongly
from mulligan.values.ids import CallId, OwnerId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import RepoPath, path_from_bytes, to_wire
from mulligan.workspace.disk import Image
from mulligan.workspace.places import Spot
from mulligan.workspace.writing import Found, Swap, Wanted


@dataclass(slots=True)
class Recovered:
    """One dead call, ended: the paths put back, and the ones somebody had changed."""

    call: str
    put_back: list[RepoPath] = field(default_factory=list)
    conflicts: list[RepoPath] = field(default_factory=list)


def recover(desk: Desk) -> list[Recovered]:
    """End every open call whose owner is dead and whose root can be reached from here."""
    return [found for row in _dead_calls(desk) if (found := _recover(desk, row)) is not None]


def _dead_calls(desk: Desk) -> list[OpenRow]:
    store = desk.ledger.store
    with store.read() as tx:
        rows = tx.select(OPEN)
    return [row for row in rows if store.is_alive(OwnerId(row.owner)) is False]


def _recover(desk: Desk, row: OpenRow) -> Recovered | None:
    owner = desk.ledger.store.owner()
    try:
        there = desk.at(row.root)
    except AskedWrongly:
        return None
    with desk.ledger.store.write() as tx:
        # Whoever takes the row over first does the work; a second process sees a living owner.
        if tx.get(OPEN, row.call) != row:
            return None
        tx.put(OPEN, replace(row, owner=owner))
        touches = sorted(tx.select(TOUCHES, {"call": row.call}), key=lambda touch: -touch.ordinal)
        facts = _facts(tx, row)
    return _observe(there, facts, touches) if row.observed else _put_back_all(there, facts, touches)


def _facts(tx: Tx, row: OpenRow) -> Facts:
    call, root = tx.get(CALLS, row.call), tx.get(ROOTS, row.root)
    assert call is not None and root is not None
    return Facts(
        id=CallId(call.id),
        session=SessionId(row.session),
        turn=TurnId(call.turn),
        root=RootId(root.id),
        workspace=WorkspaceId(call.workspace),
        observed=bool(row.observed),
    )


def _put_back_all(desk: Desk, facts: Facts, touches: list[TouchRow]) -> Recovered:
    found = Recovered(facts.id)
    for touch in touches:
        _PutBack(desk, touch, found).run()
    notes = [{"path": to_wire(path), "reason": "conflicted"} for path in found.conflicts]
    with desk.ledger.store.write() as tx:
        desk.ledger.end(tx, facts, Ending("aborted", reason="process_died", coverage=notes))
    return found


def _observe(desk: Desk, facts: Facts, touches: list[TouchRow]) -> Recovered:
    """The agent's own work: what it changed is recorded, nothing is undone."""
    changes = []
    for touch in sorted(touches, key=lambda touch: touch.path):
        path, before = path_from_bytes(touch.path), entry_from_json(decode(touch.before))
        image = desk.image(path)
        if image.content is not None:
            desk.ledger.blobs.store(image.content)
        if not image.special and not same_state(before, image.entry):
            changes.append(Change(path, before, image.entry))
    with desk.ledger.store.write() as tx:
        desk.ledger.end(tx, facts, Ending("committed", changes, reason="process_died"))
    return Recovered(facts.id)


@dataclass(slots=True)
class _PutBack:
    """One touched path of a dead call."""

    desk: Desk
    touch: TouchRow
    found: Recovered

    def run(self) -> None:
        path = path_from_bytes(self.touch.path)
        try:
            spot = self.desk.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        with spot:
            rightful = self._rightful(spot)
            self._settle(path, spot, rightful)
            for draft in self._drafts():
                self.desk.disk.discard(spot, draft)

    def _rightful(self, spot: Spot) -> Entry:
        """What belongs there: the preimage, or somebody's save that our exchange had just displaced."""
        before = entry_from_json(decode(self.touch.before))
        now = self.desk.disk.image(spot)
        if now.holds(before):
            return before
        for draft in self._drafts():
            image = self.desk.disk.image(spot, draft=draft)
            if image.replaceable and not same_content(image.entry, before) and not self._is_ours(image):
                self._keep(Change(spot.path, before, image.entry), image)
                return image.entry if self._is_ours(now) else before
        return before

    def _settle(self, path: RepoPath, spot: Spot, rightful: Entry) -> None:
        now = self.desk.disk.image(spot)
        if now.holds(rightful):
            return
        if not self._is_ours(now):
            self._keep(Change(path, rightful, now.entry), now)
            if not self.touch.in_place:
                self.found.conflicts.append(path)
                return
        content = self.desk.ledger.blobs.read(rightful.digest) if isinstance(rightful, FileEntry) else None
        draft = self._drafts()[-1] + b"-back"
        self.desk.disk.discard(spot, draft)
        swap = Swap(self.desk.disk, spot, draft, now.entry, Wanted(rightful, content), rescue=self._store)
        (self.found.conflicts if isinstance(swap.run(), Found) else self.found.put_back).append(path)

    def _is_ours(self, image: Image) -> bool:
        return not image.special and any(same_state(image.entry, entry) for entry in self._intended())

    def _intended(self) -> list[Entry]:
        return [entry_from_json(body) for body in decode(self.touch.intended)]

    def _drafts(self) -> list[bytes]:
        return [name.encode("ascii") for name in decode(self.touch.drafts)]

    def _store(self, theirs: Image) -> None:
        if theirs.content is not None:
            self.desk.ledger.blobs.store(theirs.content)

    def _keep(self, change: Change, theirs: Image) -> None:
        """Somebody's work goes on record, so that it can be found again whatever happens to the file."""
        if theirs.special or same_state(change.before, change.after):
            return
        self._store(theirs)
        with self.desk.ledger.store.write() as tx:
            self.desk.ledger.external(tx, self.desk.root, [change])
