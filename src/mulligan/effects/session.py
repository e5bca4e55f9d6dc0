"""The Python face of a session: calls, turns, and every way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects.handle import CallHandle, paths_of
from mulligan.effects.hosting import is_known
from mulligan.effects.perform import SESSION_EFFECTS, effect_named, perform, perform_session_effect
from mulligan.effects.receipt import Receipt
from mulligan.history import going_back
from mulligan.history.current import current_turn, during
from mulligan.history.desk import Desk
from mulligan.history.going_back import Git, How, WayBack
from mulligan.history.plans import OnConflict
from mulligan.session.tables import session_journal
from mulligan.values.ids import SessionId, TurnId, parse_user_id
from mulligan.workspace.exec.output import Sink


class Session:
    """One agent run on one root. Safe to use from many threads; calls made in parallel do not disturb each other."""

    def __init__(self, desk: Desk, session: SessionId, boundary: Boundary) -> None:
        self.id = session
        self._desk = desk
        self._boundary = boundary

    def call(
        self,
        label: str | None = None,
        *,
        tool_call_id: str | None = None,
        turn: str | None = None,
        deadline: datetime | None = None,
        tool: str | None = None,
    ) -> CallHandle:
        """A transaction. `tool_call_id` is the provider's id: a label, and the newest call with it is meant by it."""
        found = TurnId(parse_user_id(turn, "turn")) if turn is not None else current_turn()
        call = self._desk.call(self.id, turn=found, label=tool_call_id or label, tool=tool or label)
        return CallHandle(self._desk, call, self._boundary, deadline=deadline)

    def perform(
        self,
        effect: str,
        params: Mapping[str, Any],
        *,
        label: str | None = None,
        turn: str | None = None,
        sink: Sink | None = None,
    ) -> tuple[Receipt, str]:
        """One effect as a call of its own: not ok means it never happened. Its receipt and the call's id.

        host.session.open and host.session.signal are no calls and have an empty id.
        `sink` is told a command's output as it comes, besides the receipt.
        """
        if effect in SESSION_EFFECTS:
            return perform_session_effect(self._desk, effect, params, boundary=self._boundary), ""
        found = TurnId(parse_user_id(turn, "turn")) if turn is not None else current_turn()
        session = self._meant(effect, params)
        call = self._desk.call(session, turn=found, label=label, tool=effect.rpartition(".")[2])
        with call:
            receipt = perform(self._desk, call, effect, params, boundary=self._boundary, sink=sink)
            if not receipt.ok:
                call.abort(receipt.error_code or receipt.status)
        return receipt, call.id

    def _meant(self, effect: str, params: Mapping[str, Any]) -> SessionId:
        """The session an effect names by `session_id`, if there is one; tools always act in this one."""
        named = params.get("session_id")
        if not isinstance(named, str) or effect != effect_named(effect).name:
            return self.id
        return SessionId(named) if is_known(self._desk, SessionId(named)) else self.id

    @contextmanager
    def turn(self, prompt: str | None = None, id: str | None = None) -> Iterator[str]:
        """A prompt and all that follows until the block ends; what `rollback` takes back in one step."""
        ledger = self._desk.ledger
        turn = TurnId(parse_user_id(id, "turn") if id is not None else ledger.ids.new())
        ledger.session(self.id, self._desk.root)
        body = {"session": self.id, "turn": turn}
        with ledger.store.write() as tx:
            journal = session_journal(self.id)
            ledger.journal.append(tx, journal, "turn.opened", {**body, "prompt": prompt}, at=ledger.now())
        try:
            with during(turn):
                yield turn
        finally:
            with ledger.store.write() as tx:
                ledger.journal.append(tx, journal, "turn.ended", body, at=ledger.now())

    def undo(
        self,
        call: str | None = None,
        paths: Sequence[str] | None = None,
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        how = How(on_conflict, dry_run, self.id, git)
        return going_back.undo(self._desk, call, paths=paths_of(paths), how=how)

    def redo(self, *, on_conflict: OnConflict = "merge", dry_run: bool = False) -> WayBack:
        return going_back.redo(self._desk, how=How(on_conflict, dry_run, self.id))

    def restore(
        self,
        call: str,
        paths: Sequence[str] | None = None,
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        how = How(on_conflict, dry_run, self.id, git)
        return going_back.restore(self._desk, call, paths=paths_of(paths), how=how)

    def rollback(
        self,
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        cancel_open: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        return going_back.rollback(self._desk, how=How(on_conflict, dry_run, self.id, git), cancel_open=cancel_open)

    def rewind(
        self,
        to: str,
        side: str = "before",
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        return going_back.rewind(self._desk, to, side=side, how=How(on_conflict, dry_run, self.id, git))
