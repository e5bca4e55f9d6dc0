"""A session's typed state in its calls: what a call does to slices is published with it, or never was."""

from __future__ import annotations

from mulligan.history.call import Call
from mulligan.session.kept import StoreHome, Written
from mulligan.session.pending import doing
from mulligan.session.state import Session as State
from mulligan.store.protocol import Tx
from mulligan.values.here import Holder
from mulligan.values.state_faults import ExecutionStateError


class CallSlices:
    """The block's changes to slices end with the call: in the same transaction, or, if it is aborted, not at all.

    In a call that is part of another one they go to that one's, unless the block fails.
    """

    def __init__(self, state: State, home: StoreHome, call: Call, *, joins: bool) -> None:
        self.pending = state.pending()
        self._state = state
        self._home = home
        self._call = call
        self._joins = joins
        self._scope = doing(self.pending)
        self._written: Written | None = None

    def enter(self, holder: Holder | None) -> None:
        if not self._joins:
            self._call.at_end.append(self._end)
        self._scope.enter(holder)

    def _end(self, tx: Tx, status: str) -> bool:
        """Logs are kept however the call ends."""
        pending, only_logs = self.pending, status != "committed"
        pending.close(failed=only_logs)
        if not pending.now:
            return False
        try:
            self._written = self._home.write(
                tx, lambda read: pending.settle(read, only_logs=only_logs), pending.policy_of, call=self._call.id
            )
        except ExecutionStateError:
            # A commit is refused, and its caller learns why. The abort that follows must not fail for the same reason.
            if not only_logs:
                raise
            return False
        return self._written.moved

    def leave(self) -> None:
        """The call has ended, or another thread will end it. Any number of times."""
        self._scope.end()
        if not self._joins and self._written is not None and self._call.status in ("committed", "aborted"):
            self._written.adopt()

    def tell(self) -> None:
        """Listeners come last of all: whatever one of them raises, the call has ended as it has."""
        self._state.tell(self.pending, only_logs=self._call.status != "committed")
