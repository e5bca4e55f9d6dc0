"""Everything a coding agent does to files and to its own state, as a transaction: atomic, recorded, undoable.

The public Python API. Importing this loads nothing else; each name is fetched from its room when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing it would cost more than all the rest here

if TYPE_CHECKING:
    from mulligan.opening import open as open
    from mulligan.values.clock import Clock as Clock
    from mulligan.values.clock import FixedClock as FixedClock
    from mulligan.values.clock import SystemClock as SystemClock
    from mulligan.values.faults import AskedWrongly as AskedWrongly
    from mulligan.values.faults import Broken as Broken
    from mulligan.values.faults import Family as Family
    from mulligan.values.faults import MayNot as MayNot
    from mulligan.values.faults import MulliganError as MulliganError
    from mulligan.values.faults import WorldChanged as WorldChanged

_ROOMS = {
    "mulligan.opening": ("open",),
    "mulligan.values.clock": ("Clock", "FixedClock", "SystemClock"),
    "mulligan.values.faults": ("AskedWrongly", "Broken", "Family", "MayNot", "MulliganError", "WorldChanged"),
}
_HOME_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    room = _HOME_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'mulligan' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
