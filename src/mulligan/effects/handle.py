"""The Python face of calls: `with session.call() as call: call.write_file(…)`, or `async with` and `await`.

Leaving the block normally commits; leaving it any other way, or after `call.fail()`, puts everything back. A call made
inside another one of the same session is a savepoint of it: it can fail alone, and it commits with the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from mulligan.boundary.verdict import Boundary
from mulligan.effects.perform import perform
from mulligan.effects.receipt import Receipt
from mulligan.effects.slices import CallSlices
from mulligan.effects.verbs import CallWithId, Effects, asked
from mulligan.history.call import Call
from mulligan.history.closing import Savepoint
from mulligan.history.current import current_call, making
from mulligan.history.desk import Desk
from mulligan.session.active import active
from mulligan.session.orphans import Watched, watch
from mulligan.session.pending import Pending
from mulligan.values.entries import Change
from mulligan.values.faults import MulliganError, fault
from mulligan.values.here import Holder, block_exit, holder_of
from mulligan.values.paths import RepoPath
from mulligan.values.refusal import Refused
from mulligan.values.state_faults import PromptEvaluationError

if TYPE_CHECKING:
    from mulligan.effects.async_call import AsyncCallHandle

Beside = Callable[[Call, bool], CallSlices]
"""The slices of a call. Told the call, and whether this block is only a part of it."""


class _Failed(Refused):
    """`call.fail()` was called: leave as if by an exception that nobody sees."""

    def __init__(self, reason: str) -> None:
        super().__init__("error", reason, reason)


class _CallEnding:
    """What a call's block sets, and how it ends. Apart from the handle, so that a call can be aborted whose handle
    nothing refers to any more."""

    def __init__(self, call: Call, slices: CallSlices, savepoint: Savepoint | None) -> None:
        self.watched: Watched | None = None
        self.slices = slices
        self._call = call
        self._savepoint = savepoint
        self._blocks = (making(call), active(call.facts.session))
        self._is_put_back = False

    def enter(self, holder: Holder | None) -> None:
        if self._savepoint is not None:
            self._savepoint.enter(holder)
        for block in self._blocks:
            block.enter(holder)
        self.slices.enter(holder)

    def watch_until_left(self, handle: CallHandle) -> None:
        """An `async with` no longer holds its block while the event loop leaves it; the coroutine holds the handle."""
        before, handle.exit_held = self.watched, None
        self.watched = watch(handle, self)
        if before is not None:
            before.forget()

    @property
    def is_committed(self) -> bool:
        if self._savepoint is None:
            return self._call.status == "committed"
        return self.slices.pending.published == "all"

    @property
    def is_over(self) -> bool:
        if self._savepoint is None:
            return self._call.status != "open"
        return self.is_committed or self._is_put_back

    def leave(self, error: BaseException | None) -> None:
        """A savepoint of the outer call goes back or stays, a call of its own ends."""
        try:
            if self._savepoint is None:
                self._call.leave(error)
            else:
                self._leave_part(self._savepoint, error)
        finally:
            self._forget()
        self.slices.tell()

    def _leave_part(self, savepoint: Savepoint, error: BaseException | None) -> None:
        try:
            if error is None:
                self.slices.pending.publish()
        finally:
            if not self.is_committed:
                self._put_back(savepoint)

    def _put_back(self, savepoint: Savepoint) -> None:
        """Files first. If they cannot be put back, the call around this part cannot be committed."""
        try:
            savepoint.put_back()
            self._is_put_back = True
        finally:
            self.slices.pending.publish(only_logs=True)

    def _forget(self) -> None:
        self.slices.leave()
        for block in reversed(self._blocks):
            block.end()
        if self._savepoint is not None:
            self._savepoint.end()
        if self.watched is not None and self.is_over:
            self.watched.forget()

    def abort_orphan(self) -> str | None:
        aborted = None
        if self._savepoint is None:
            aborted = self._call.abort_orphan()
        elif not self.is_over:
            aborted = self._call.id
            try:
                self._put_back(self._savepoint)
            except MulliganError:
                # The call around this part is stuck then; the code that ends it sees the error.
                self._is_put_back = True
        self._forget()
        return aborted


class CallHandle(Effects, CallWithId):
    """One call. Each method performs one effect and answers with its Receipt."""

    def __init__(
        self, desk: Desk, call: Call, boundary: Boundary, *, beside: Beside, deadline: datetime | None = None
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
        self._savepoint = self._call.savepoint() if self._joins else None
        self._ending = _CallEnding(self._call, beside(self._call, self._joins), self._savepoint)
        self.exit_held: Holder | None = None
        self._block: Literal["ahead", "inside", "over"] = "ahead"
        self._async_form: AsyncCallHandle | None = None

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

    @property
    def pending(self) -> Pending:
        """The changes to slices that are a part of it."""
        return self._ending.slices.pending

    @property
    def is_committed(self) -> bool:
        """Whether it is, or, for a call inside another one, whether it will be with that one."""
        return self._ending.is_committed

    @property
    def is_over(self) -> bool:
        """Whether it is committed, or nothing of it is left."""
        return self._ending.is_over

    def resolve(self) -> None:
        """After an interrupt: find out whether it was committed."""
        if not self._joins:
            self._call.resolve()

    def finish(self) -> str | None:
        """End it now, if an interrupt kept it from ending; without a commit, nothing of it stays. Its id if it did."""
        self._block = "over"
        return self._ending.abort_orphan()

    def __enter__(self) -> Self:
        if self._block != "ahead":
            raise fault("call_not_open", f"Call {self.id} has had its `with`; make another one.")
        self._block = "inside"
        ending = self._ending
        ending.watched = watch(self, ending)
        inside = False
        try:
            ending.enter(holder_of(self))
            inside = True
        finally:
            if not inside:
                self._leave(_Failed("interrupted"))
        return self

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._block = "over"
        self._ending.leave(error)

    async def __aenter__(self) -> AsyncCallHandle:
        # Loaded here: a program without an event loop does not need asyncio.
        from mulligan.effects.async_call import AsyncCallHandle

        self._async_form = AsyncCallHandle(self)
        self.__enter__()
        return self._async_form

    @block_exit
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        assert self._async_form is not None, "__aenter__ made it"
        self._ending.watch_until_left(self)
        return self._async_form.leave(error)

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
