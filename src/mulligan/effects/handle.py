"""The Python face of calls: `with session.call() as call: call.write_file(…)`.

Leaving the block normally commits; leaving it any other way, or after `call.fail()`, puts everything back. A call made
inside another one of the same session is a savepoint of it: it can fail alone, and it commits with the outer one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import datetime
from typing import Any, Literal, Self

from mulligan.boundary.verdict import Boundary
from mulligan.effects.perform import perform
from mulligan.effects.receipt import Receipt
from mulligan.effects.verbs import Effects, asked
from mulligan.history.call import Call
from mulligan.history.closing import Savepoint
from mulligan.history.current import current_call, making
from mulligan.history.desk import Desk
from mulligan.session.active import active
from mulligan.values.entries import Change
from mulligan.values.faults import MulliganError, fault
from mulligan.values.paths import RepoPath
from mulligan.values.refusal import Refused
from mulligan.values.state_faults import PromptEvaluationError

Beside = Callable[[Call, bool], AbstractContextManager[object]]
"""What goes on around a call's block besides files. Told the call, and whether it is another one's part."""


class _Failed(Refused):
    """`call.fail()` was called: leave as if by an exception that nobody sees."""

    def __init__(self, reason: str) -> None:
        super().__init__("error", reason, reason)


class CallHandle(Effects, AbstractContextManager["CallHandle"]):
    """One call. Each method performs one effect and answers with its Receipt."""

    def __init__(
        self,
        desk: Desk,
        call: Call,
        boundary: Boundary,
        *,
        deadline: datetime | None = None,
        beside: Beside | None = None,
    ) -> None:
        if deadline is not None and (not isinstance(deadline, datetime) or deadline.utcoffset() is None):
            raise fault("invalid_params", "A deadline is a datetime that says its time zone.", field="deadline")
        outer = current_call()
        self._joins = outer is not None and outer.facts.session == call.facts.session and outer.home == call.home
        self._call = outer if outer is not None and self._joins else call
        self._desk = desk
        self._boundary = boundary
        self._deadline = deadline
        self._failed: str | None = None
        self._beside = beside
        self._savepoint: Savepoint | None = None
        self._stack = ExitStack()
        self._block: Literal["ahead", "inside", "over"] = "ahead"

    # The transaction.

    @property
    def id(self) -> str:
        """The call's own id, which `undo` and `restore` take."""
        return self._call.id

    @property
    def status(self) -> str:
        """open, committed or aborted."""
        return self._call.status

    @property
    def changes(self) -> list[Change]:
        """What the call has changed so far."""
        return self._call.changes()

    @property
    def conflicts(self) -> list[RepoPath]:
        """After an abort: the paths somebody else had changed, left as they are."""
        return self._call.conflicts

    def __enter__(self) -> Self:
        if self._block != "ahead":
            raise fault("call_not_open", f"Call {self.id} has had its `with`; make another one.")
        self._block = "inside"
        inside = False
        try:
            if self._joins:
                self._savepoint = self._call.savepoint()
                self._stack.enter_context(self._savepoint)
            self._stack.enter_context(making(self._call))
            self._stack.enter_context(active(self._call.facts.session))
            if self._beside is not None:
                self._stack.enter_context(self._beside(self._call, self._joins))
            inside = True
        finally:
            if not inside:
                self._leave(_Failed("interrupted"))
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None and self._failed is not None:
            self._leave(_Failed(self._failed))
            return
        try:
            if error is None:
                self._check_deadline()
                self._check_not_ended()
        except (MulliganError, KeyboardInterrupt, SystemExit) as late:
            self._leave(late)
            raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Out of the block: a savepoint of the outer call goes back or stays, a call of its own ends."""
        self._block = "over"
        with suppress(_Failed), self._stack:
            if not self._joins:
                self._call.__exit__(None, error, None)
            elif error is not None:
                raise error

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.__exit__(None, error, None)

    def fail(self, reason: str) -> None:
        """This call shall not stand: when its block ends, everything in it is put back."""
        self._failed = reason

    def stop(self) -> None:
        """For other threads: kill the command that runs in this call, if one does; it fails as `cancelled`."""
        # Loaded here: hardly any call runs a command that somebody stops.
        from mulligan.effects.board import board_of

        board_of(self._desk).stop(self.id)

    def _check_deadline(self) -> None:
        if self._deadline is not None and self._desk.ledger.clock.now() > self._deadline:
            raise PromptEvaluationError(f"Call {self.id} ran past its deadline; nothing of it was kept.")

    def _check_not_ended(self) -> None:
        """Whoever leaves the block must learn that somebody has cancelled the call meanwhile."""
        if self.status == "aborted":
            raise fault("call_not_open", f"Call {self.id} was ended by somebody else; nothing of it was kept.")

    def perform(self, effect: str, /, **params: Any) -> Receipt:
        """Any effect or tool by its name."""
        if self._block == "ahead":
            raise fault("call_not_open", f"Call {self.id} has not begun; work in it inside its `with`.")
        if self._block == "over" or self.status != "open":
            raise fault("call_not_open", f"Call {self.id} is over; make another one for what is left to do.")
        self._check_deadline()
        with self._as_part():
            return perform(
                self._desk, self._call, effect, asked(params), boundary=self._boundary, deadline=self._deadline
            )

    def _as_part(self) -> AbstractContextManager[None]:
        """A thread that was started by hand does not know that what it does is part of the block."""
        savepoint = self._savepoint
        return nullcontext() if savepoint is None or savepoint.is_around else savepoint.again()
