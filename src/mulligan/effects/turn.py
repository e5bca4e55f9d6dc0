"""A turn as a block: a prompt and all that follows until the block ends."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from mulligan.history.current import during
from mulligan.history.desk import Desk
from mulligan.history.tables import TURNS
from mulligan.session.active import active
from mulligan.session.orphans import Watched, abort_orphans, watch
from mulligan.session.tables import session_journal
from mulligan.store.protocol import Tx
from mulligan.values.here import Holder, block_exit, holder_of
from mulligan.values.ids import SessionId, TurnId

Check = Callable[[Tx], object]


class TurnBlock:
    """Gives the turn's id. However the block is left, the turn has ended then, and what was done in it stays."""

    def __init__(self, desk: Desk, session: SessionId, turn: TurnId, *, prompt: str | None, check: Check) -> None:
        self.exit_held: Holder | None = None
        self._turn = turn
        self._prompt = prompt
        self._check = check
        self._ending = _TurnEnding(desk, session, turn)

    def __enter__(self) -> str:
        abort_orphans()
        ending = self._ending
        ending.watched = watch(self, ending)
        inside = False
        try:
            ending.begin(self._prompt, self._check, holder_of(self))
            inside = True
        finally:
            if not inside:
                ending.end()
        return self._turn

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.end()


class _TurnEnding:
    """Apart from the block, so that a turn ends whose block nothing refers to any more."""

    def __init__(self, desk: Desk, session: SessionId, turn: TurnId) -> None:
        self.watched: Watched | None = None
        self._desk = desk
        self._session = session
        self._turn = turn
        self._blocks = (during(turn), active(session))
        self._has_begun = False

    def begin(self, prompt: str | None, check: Check, holder: Holder | None) -> None:
        ledger = self._desk.ledger
        ledger.session(self._session, self._desk.root)
        body = {"session": self._session, "turn": self._turn, "prompt": prompt, "owner": ledger.store.owner()}
        with ledger.store.write() as tx:
            check(tx)
            self._has_begun = True
            ledger.journal.append(tx, session_journal(self._session), "turn.opened", body, at=ledger.now())
        for block in self._blocks:
            block.enter(holder)

    def end(self) -> None:
        """Any number of times: an interrupt may come before the record of the end, or after it."""
        for block in reversed(self._blocks):
            block.end()
        if self._has_begun:
            self._record_end()
        if self.watched is not None:
            self.watched.forget()

    def _record_end(self) -> None:
        ledger = self._desk.ledger
        with ledger.store.write() as tx:
            row = tx.get(TURNS, self._session, self._turn)
            if row is not None and row.is_open:
                body = {"session": self._session, "turn": self._turn}
                ledger.journal.append(tx, session_journal(self._session), "turn.ended", body, at=ledger.now())

    def abort_orphan(self) -> None:
        """A turn is never undone by itself: its calls are."""
        self.end()
