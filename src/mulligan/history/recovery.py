"""Ending the calls that dead processes left open, by the rules of `putting_back`.

Calls that were only observed are never put back: they end by recording what changed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from mulligan.history.dead_windows import Left, forget, left_by, of_window
from mulligan.history.kept import Ground
from mulligan.history.kept_rows import draft_name
from mulligan.history.ledger import Ending, Facts, intending, touch_row
from mulligan.history.lifting import NoteLift
from mulligan.history.originals import discard_abandoned
from mulligan.history.putting_back import Trace, everything_below, put_back, trace_of
from mulligan.history.rescues import rescue_note
from mulligan.history.tables import AGENT, CALLS, OPEN, ROOTS, TOUCHES, OpenRow, TouchRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.entries import Change, DirEntry, Entry, entry_from_json, same_state
from mulligan.values.faults import AskedWrongly, MulliganError
from mulligan.values.ids import CallId, OwnerId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import RepoPath, from_wire, path_bytes, path_from_bytes, to_wire


class Reach(Ground, Protocol):
    """A root, and from it every other one of the store."""

    def at(self, root: str) -> Reach: ...


@dataclass(slots=True)
class Recovered:
    """One dead call, ended: the paths put back, and the ones somebody had changed. An observed one stands instead.

    `stuck` says why it could not be ended yet; whoever opens the store next tries again.
    """

    call: str
    put_back: list[RepoPath] = field(default_factory=list)
    conflicts: list[RepoPath] = field(default_factory=list)
    stands: bool = False
    stuck: str | None = None


def recover(desk: Reach) -> list[Recovered]:
    """End every open call whose owner is dead and whose root can be reached from here."""
    found = [one for row in _dead_calls(desk) if (one := _recover(desk, row)) is not None]
    if found and desk.disk.capture.any:
        discard_copies(desk)
    return found


def discard_copies(desk: Reach) -> None:
    """Remove copies of paths that are not captured, where the process died after its call had ended."""
    with desk.ledger.store.read() as tx:
        open_calls = [row.call for row in tx.select(OPEN)]
    # A root that is gone has no copies.
    with suppress(OSError):
        discard_abandoned(desk.disk, lambda end: any(call.endswith(end) for call in open_calls))


def _dead_calls(desk: Reach) -> list[OpenRow]:
    store = desk.ledger.store
    with store.read() as tx:
        rows = tx.select(OPEN)
    return [row for row in rows if row.owner != AGENT and store.is_alive(OwnerId(row.owner)) is False]


def _recover(desk: Reach, row: OpenRow) -> Recovered | None:
    try:
        there = desk.at(row.root)
    except AskedWrongly:
        return None
    try:
        return _ended(there, row)
    except (OSError, MulliganError) as error:
        # A disk that fails now must not keep anybody from working or looking.
        with suppress(MulliganError), desk.ledger.store.write() as tx:
            tx.put(OPEN, row)
        why = error.message if isinstance(error, MulliganError) else f"{error.strerror or error}"
        return Recovered(row.call, stuck=why)


def _ended(desk: Reach, row: OpenRow) -> Recovered | None:
    store, owner = desk.ledger.store, desk.ledger.store.owner()
    with store.write() as tx:
        # Whoever takes the row over first does the work; a second process sees a living owner.
        if tx.get(OPEN, row.call) != row:
            return None
        tx.put(OPEN, replace(row, owner=owner))
        touches = tx.select(TOUCHES, {"call": row.call})
        facts = _facts(tx, row)
    return _observe(desk, facts, touches) if row.observed else _put_back_all(desk, facts, touches)


def _facts(tx: Tx, row: OpenRow) -> Facts:
    call, root = tx.get(CALLS, row.call), tx.get(ROOTS, row.root)
    assert call is not None and root is not None
    return Facts(
        id=CallId(call.id),
        session=SessionId(row.session),
        turn=TurnId(call.turn),
        root=RootId(root.id),
        workspace=WorkspaceId(call.workspace),
        label=call.label,
        observed=bool(row.observed),
    )


def _put_back_all(desk: Reach, facts: Facts, touches: list[TouchRow]) -> Recovered:
    kept = of_window(touches)
    newest_first = sorted(touches, key=lambda touch: touch.ordinal, reverse=True)
    traces = [trace_of(touch) for touch in newest_first if touch not in kept]
    left = left_by(desk, facts.id, kept)
    all_of_it = [*traces, *everything_below(desk, traces), *_beside(traces, left, facts.id)]
    report = put_back(desk, all_of_it, _noting_lifts(desk, facts.id))
    notes = [{"path": to_wire(path), "reason": "conflicted"} for path in report.conflicts]
    notes += [{"path": to_wire(path), "reason": "not_captured"} for path in report.not_captured]
    notes += [{"path": to_wire(path), "reason": "lost"} for path in report.lost]
    with desk.ledger.store.write() as tx:
        rescued = sorted(report.rescued, key=lambda one: path_bytes(one[0]))
        coverage = [*left.notes, *notes, *(rescue_note(*one) for one in rescued)]
        digests = {digest for _, digest in rescued}
        ending = Ending("aborted", reason="process_died", coverage=coverage, handed_out=digests)
        desk.ledger.end(tx, facts, ending)
    forget(desk, facts.id)
    stays = [*report.conflicts, *report.lost, *(from_wire(note["path"]) for note in left.notes)]
    return Recovered(facts.id, report.put_back, stays)


def _noting_lifts(desk: Reach, call: CallId) -> NoteLift:
    """As one more thing that the dead call meant, should we die too."""

    def note(path: RepoPath, now: DirEntry, lifted: DirEntry) -> None:
        key = path_bytes(path)
        with desk.ledger.store.write() as tx:
            known = tx.select(TOUCHES, {"call": call, "path": key})
            row = known[0] if known else touch_row(call, key, desk.root, ordinal=0, before=now)
            desk.ledger.touch(tx, intending(row, lifted, draft_name(call, key), in_place=False), ())

    return note


def _beside(traces: list[Trace], left: Left, call: CallId) -> list[Trace]:
    known = {one.path for one in traces}
    return [one for one in left.traces(call) if one.path not in known]


def _observe(desk: Reach, facts: Facts, touches: list[TouchRow]) -> Recovered:
    """The agent's own work: what it changed is recorded, nothing is undone."""
    kept = of_window(touches)
    left = left_by(desk, facts.id, kept)
    befores = left.befores | {path_from_bytes(one.path): _before(one) for one in touches if one not in kept}
    changes = []
    for path, before in sorted(befores.items(), key=lambda item: path_bytes(item[0])):
        image = desk.image(path)
        if image.content is not None:
            desk.ledger.blobs.store(image.content)
        if not image.special and not same_state(before, image.entry):
            changes.append(Change(path, before, image.entry))
    with desk.ledger.store.write() as tx:
        desk.ledger.end(tx, facts, Ending("committed", changes, reason="process_died", coverage=left.notes))
    forget(desk, facts.id)
    return Recovered(facts.id, stands=True)


def _before(touch: TouchRow) -> Entry:
    return entry_from_json(decode(touch.before))
