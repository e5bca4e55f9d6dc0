"""A way back in S0's terms: a checkpoint is a turn, and its snapshots are the preimages of the turn's tool calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from mulligan.history.going_back import WayBack
from mulligan.history.log import verb_of
from mulligan.history.sites import main_of
from mulligan.history.tables import CALLS, CHANGES, ROOTS, CallRow
from mulligan.store.protocol import Store, Tx
from mulligan.values.ids import SessionId
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class Checkpoint:
    """What a way back and its redo have in common.

    `snapshots` are tool calls, oldest first; `owners`, for each path the first of them that touched it: after a
    rollback, the path is as that one found it.
    """

    id: str
    snapshots: tuple[str, ...]
    owners: Mapping[str, str]

    def holds(self, snapshot: str, path: str) -> bool:
        """What no tool call owns is told with the newest."""
        return self.owners.get(path, self.snapshots[-1]) == snapshot


def checkpoint_of(store: Store, session: SessionId, done: WayBack) -> Checkpoint:
    """Of a way back of a session. One that took back no call of the session's is a checkpoint by itself."""
    owners: dict[str, str] = {}
    with store.read() as tx:
        rows = sorted(_work(tx, done.of), key=lambda row: row.id)
        for row in rows:
            for path in _paths(tx, row):
                owners.setdefault(path, _snapshot(row))
        turns = [row.turn for row in rows if row.session == session]
        turn = turns[-1] if turns else _first_way_back(tx, done)
    snapshots = tuple(dict.fromkeys(map(_snapshot, rows))) or ((turn,) if done.outcomes else ())
    return Checkpoint(f"turn_{turn.replace('-', '')}", snapshots, owners)


def _work(tx: Tx, calls: Iterable[str]) -> list[CallRow]:
    """The calls but for ways back; if they are nothing else, what those took back."""
    rows = [row for call in calls if (row := tx.get(CALLS, call)) is not None]
    work = [row for row in rows if verb_of(row) is None]
    if work:
        return work
    causes = [row.why for row in rows if row.cause]
    taken = [call for cause in causes for call in (*cause.get("of", ()), *cause.get("part", ()))]
    return [row for call in taken if (row := tx.get(CALLS, call)) is not None and verb_of(row) is None]


def _snapshot(row: CallRow) -> str:
    return row.label or main_of(row)


def _paths(tx: Tx, row: CallRow) -> list[str]:
    root = tx.get(ROOTS, row.root)
    place = b"" if root is None else root.place
    return [os.fsdecode(place + b"/" + change.path) for change in tx.select(CHANGES, {"call": row.id})]


def _first_way_back(tx: Tx, done: WayBack) -> str:
    """Of a redo, what it takes back."""
    return next((call for call in done.of if tx.has(CALLS, call)), done.call_id or "")
