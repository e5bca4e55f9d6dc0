"""A verb inside another call's command: what it does in that call's root is part of that call.

The call around us sees every change and records it as its own, so we record none. The work is done as a call of a store
in memory that is gone when we are: what does not end well in it is put back, and the call around us goes on.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mulligan.cli.doors import has_store, root_folder, work
from mulligan.cli.options import Common
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import OwnerId
from mulligan.values.plain import plain

if TYPE_CHECKING:
    from mulligan.opening import Mulligan
    from mulligan.store.protocol import Store


@plain(slots=True, frozen=True)
class Around:
    """The call around us, and the folder below its root that we were asked to work in."""

    call: str
    session: str | None
    turn: str
    root: str
    directory: str

    @property
    def environment(self) -> dict[bytes, bytes]:
        """What tells whoever we start of that call."""
        told = {"MULLIGAN_CALL": self.call, "MULLIGAN_HOME": self.directory}
        return {os.fsencode(name): os.fsencode(value) for name, value in told.items()}

    def check_names(self, *, session: str | None, turn: str | None, label: str | None) -> None:
        """Whoever joins a call has no session, turn or label but that call's."""
        for name, given, own in (("session", session, self.session), ("turn", turn, self.turn), ("label", label, None)):
            if given is not None and given != own:
                words = f"This runs inside call {self.call} and joins it; it cannot have a --{name} of its own."
                raise fault("invalid_params", words, field=name, call=self.call)


def call_around(common: Common) -> Around | None:
    """The open call whose command started us, if the folder that is meant is in its root."""
    import mulligan.opening as opening
    from mulligan.history.schema import SCHEMA
    from mulligan.history.tables import CALLS, OPEN, ROOTS
    from mulligan.session.tables import BOUNDARIES
    from mulligan.values.clock import SystemClock
    from mulligan.values.paths import is_inside

    call = opening.call_around(os.environ)
    if call is None or not has_store(common.store):
        return None
    root = os.path.realpath(root_folder(common))
    store = opening.open_store(common.store, SCHEMA, durability="process", clock=SystemClock(), create=False)
    try:
        with store.read() as tx:
            row, shown = tx.get(OPEN, call), tx.get(CALLS, call)
            place = None if row is None else tx.get(ROOTS, row.root)
            is_bounded = row is not None and tx.has(BOUNDARIES, row.session)
        if row is None or shown is None or place is None or _is_gone(store, OwnerId(row.owner)):
            return None
        if not is_inside(os.fsencode(root), place.place or b"/"):
            return None
        # Nothing that we open knows the boundary of a session; what holds is that the call around us keeps it.
        return Around(call, None if is_bounded else row.session, shown.turn, root, store.directory or "")
    finally:
        store.close()


def _is_gone(store: Store, owner: OwnerId) -> bool:
    """Whether the process of that call has died before its command. In a sandbox nobody can ask, and none has."""
    try:
        return store.is_alive(owner) is False
    except MulliganError:
        return False


def join(common: Common, around: Around, *, capability: Any = None, policy: Any = None) -> Mulligan:
    """Open for work inside the call around us."""
    opened = work(replace(common, root=around.root, store="memory:"), capability=capability, policy=policy)
    opened.desk.ledger.joins = around.call, around.directory
    return opened
