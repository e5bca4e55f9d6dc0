"""Whether the call that code was started in has failed meanwhile.

A task or thread may outlive its call. What it does then would be part of nothing, so it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mulligan.values.here import Here
from mulligan.values.state_faults import CallNotOpenError


@dataclass(slots=True, eq=False)
class CallScope:
    """One call as far as everything in it must know: it goes on, or it is over, and then it may have failed.

    `home` is the state that the call is made on, `outer` the call on the same state that it is a part of.
    """

    outer: CallScope | None = None
    is_open: bool = True
    has_failed: bool = False
    home: object = field(default=None, kw_only=True)

    @property
    def is_undone(self) -> bool:
        """Whether this call has failed, or one that it was a part of."""
        scope: CallScope | None = self
        while scope is not None and not scope.has_failed:
            scope = scope.outer
        return scope is not None

    def check_open(self) -> None:
        if not self.is_open:
            raise CallNotOpenError("The call this belongs to is over; what it does now changes nothing.")


scopes: Here[CallScope] = Here("mulligan_pending")


def check_call_open(home: object = None) -> None:
    """Raises `call_not_open` in a task or thread whose call has failed. For everything that a failed call restores.

    With `home`, only for a call on that state.
    """
    scopes.forget_ended()
    innermost = next((one for one in scopes.all(ended=True) if home is None or one.home is home), None)
    if innermost is not None and innermost.is_undone:
        raise CallNotOpenError("The call that this was started in has failed; what it does now changes nothing.")
