"""Writes down what agents do below one root: their tools as observed calls, their prompts as turns.

The same event twice changes nothing: a hook may be installed for a person and for a project, and what was thought lost
may still arrive. An event that comes `late` says only that something happened: what changed meanwhile is put to the
call whose end is told first, and the call says that its beginning was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from types import MappingProxyType

from mulligan.agents.hooks.events import HookEvent, Kind
from mulligan.history import observing
from mulligan.history.closing import STORE_FULL
from mulligan.history.desk import Desk
from mulligan.history.kept import KeptTree
from mulligan.history.observing import Note, Observed
from mulligan.history.tables import AGENT, CALLS, OPEN, TURNS, CallRow
from mulligan.store.protocol import Tx
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import MulliganError
from mulligan.values.ids import CallId, SessionId, TurnId

_LATER_WAITS_S = 0.02

MISSED: Note = {"path": ".", "reason": "hook_missed"}
LATE: Note = {"path": ".", "reason": "hook_late"}


class Recorder:
    """For one thread at a time. Close it; the desk is somebody else's."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tree = KeptTree(desk)
        self._notes: dict[CallId, list[Note]] = {}
        self._patience_s = float("inf")
        self._was_full = False

    def handle(self, event: HookEvent, *, until: float, pid: int = 0, late: bool = False) -> None:
        """Whatever must be safe before the agent goes on is safe when this returns, if `until` leaves the time."""
        try:
            _HANDLERS[event.kind](self, event, until, pid if not late else -1)
        except MulliganError as error:
            # The next call that the store takes says so in its coverage.
            self._was_full |= error.code == "no_space"
            raise

    @property
    def is_settled(self) -> bool:
        return self._tree.is_settled

    def go_on(self, until: float) -> None:
        """Read on in the tree, while nobody waits."""
        self._tree.go_on(until)

    def has_open_calls(self) -> bool:
        with self._desk.ledger.store.read() as tx:
            return any(row.owner == AGENT and row.root == self._desk.root.id for row in tx.select(OPEN))

    def sweep(self) -> None:
        """End the calls of agents that are gone."""
        with self._desk.ledger.store.read() as tx:
            here = [row.call for row in tx.select(OPEN) if row.owner == AGENT and row.root == self._desk.root.id]
            gone = [call for call in here if (row := tx.get(CALLS, call)) and not observing.is_agent_alive(row)]
        for call in gone:
            self._finish(CallId(call), reason="agent_died")

    def close(self) -> None:
        self._tree.close()

    # Tools.

    def _before_tool(self, event: HookEvent, until: float, pid: int) -> None:
        if event.looks_only or pid < 0 or (event.label is not None and self._open_call(event) is not None):
            return
        observed, notes = self._observed(event, pid)
        call = observing.begin(self._desk, observed, self._tree)
        if monotonic_s() > until:
            notes.append(LATE)
        self._notes[call] = notes
        if observed.paths is None:
            self._tree.go_on(min(until, monotonic_s() + self._patience_s))
            # One long wait is worth what it reads; after that the tree is read while the agent works.
            self._patience_s = _LATER_WAITS_S

    def _was_told(self, event: HookEvent) -> bool:
        """That it ended: by another hook, or by this one. An id may come again in another turn."""
        where = {"session": event.session, "label": event.label}
        with self._desk.ledger.store.read() as tx:
            rows = [] if event.label is None else tx.select(CALLS, where, order=("id",), descending=True, limit=1)
        return any(row.observed and row.turn == event.turn for row in rows)

    def _observed(self, event: HookEvent, pid: int) -> tuple[Observed, list[Note]]:
        named = event.paths()
        found = {one: self._desk.disk.root.find(one) for one in named or ()}
        inside = None if named is None else [path for path in found.values() if path is not None]
        outside = [one for one, path in found.items() if path is None]
        notes: list[Note] = [{"path": one, "reason": "outside_root"} for one in outside]
        about = {
            "agent": event.agent,
            "key": _key(event),
            "transcript": event.transcript,
            "worker": event.worker,
            "command": event.command,
        }
        with self._desk.ledger.store.read() as tx:
            turn = event.turn or _open_turn(tx, event.session)
        observed = Observed(
            session=SessionId(event.session),
            tool=event.tool or "tool",
            turn=None if turn is None else TurnId(turn),
            label=event.label,
            paths=inside,
            pid=max(0, pid),
            about={name: value for name, value in about.items() if value is not None},
        )
        return observed, notes

    def _after_tool(self, event: HookEvent, until: float, pid: int) -> None:
        if event.looks_only:
            return
        call = self._open_call(event)
        if call is None and self._was_told(event):
            return
        if call is None:
            # What it was going to touch has changed already: all that is left to see is the tree.
            observed, notes = self._observed(event, pid)
            call = observing.begin(self._desk, replace(observed, paths=None), looked=observing.UNTOLD)
            self._notes[call] = [*notes, MISSED]
        self._finish(call, reason=event.failed)

    def _open_call(self, event: HookEvent) -> CallId | None:
        """By the agent's own id for it; else the oldest one that asked for the same."""
        with self._desk.ledger.store.read() as tx:
            rows = [row for row in _open_calls(tx, event.session) if row.label == event.label]
        same = [row for row in rows if event.label is not None or row.why.get("key") == _key(event)]
        return CallId(min(row.id for row in same)) if same else None

    def _finish(self, call: CallId, *, reason: str | None) -> None:
        notes = [*self._notes.get(call, []), *([STORE_FULL] if self._was_full else [])]
        observing.finish(self._desk, call, self._tree, reason=reason, notes=notes)
        self._notes.pop(call, None)
        self._was_full = False

    # Turns and sessions.

    def _prompt(self, event: HookEvent, until: float, pid: int) -> None:
        """A new prompt means that whatever came before it is over, said or not."""
        session = SessionId(event.session)
        with self._desk.ledger.store.read() as tx:
            known = tx.get(TURNS, event.session, event.turn) if event.turn is not None else None
        if known is not None and known.opened:
            return
        self._over(event, reason="interrupted")
        turn = TurnId(event.turn or self._desk.ledger.ids.new())
        observing.open_turn(self._desk, session, turn, event.prompt, pid=max(0, pid))

    def _stop(self, event: HookEvent, until: float, pid: int) -> None:
        self._over(event, reason="stopped")
        observing.take_stock(self._desk, self._tree, whole=True)

    def _session_end(self, event: HookEvent, until: float, pid: int) -> None:
        self._over(event, reason="session_ended", workers=True)

    def _over(self, event: HookEvent, *, reason: str, workers: bool = False) -> None:
        """Open calls end, but for those of parts of the agent that work on by themselves; then its turns."""
        with self._desk.ledger.store.read() as tx:
            rows = [row for row in _open_calls(tx, event.session) if row.root == self._desk.root.id]
            turns = [row.id for row in tx.select(TURNS, {"session": event.session}) if row.opened and not row.ended_at]
        for row in rows:
            if workers or not row.why.get("worker"):
                self._finish(CallId(row.id), reason=reason)
        for turn in turns:
            observing.end_turn(self._desk, SessionId(event.session), TurnId(turn))

    def _session_start(self, event: HookEvent, until: float, pid: int) -> None:
        """The tree is looked at before the first tool asks for it; it is read while nobody waits."""
        observing.take_stock(self._desk, self._tree)


_HANDLERS: Mapping[Kind, Callable[[Recorder, HookEvent, float, int], None]] = MappingProxyType(
    {
        "pre": Recorder._before_tool,
        "post": Recorder._after_tool,
        "failure": Recorder._after_tool,
        "prompt": Recorder._prompt,
        "stop": Recorder._stop,
        "session_start": Recorder._session_start,
        "session_end": Recorder._session_end,
    }
)


def _open_calls(tx: Tx, session: str) -> list[CallRow]:
    rows = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.owner == AGENT and row.session == session]
    return [row for row in rows if row is not None]


def _open_turn(tx: Tx, session: str) -> str | None:
    rows = [row for row in tx.select(TURNS, {"session": session}) if row.is_open]
    return max(rows, key=lambda row: row.started_at).id if rows else None


def _key(event: HookEvent) -> str | None:
    """What tells two tool calls apart that their agent gives no ids."""
    if event.label is not None:
        return None
    return sha256(encode([event.tool, event.input])).hexdigest()[:32]
