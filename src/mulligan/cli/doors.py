"""How a verb reaches its workspace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mulligan.cli.options import Common

if TYPE_CHECKING:
    from mulligan.opening import Mulligan

DEFAULT_SESSION = "default"
"""The session of `call`, `exec` and `run` when none is named."""


def work(common: Common, *, capability: Any = None, policy: Any = None) -> Mulligan:
    """Open for work: the store and the root are made known if they are new."""
    import mulligan.opening as opening

    return opening.open(root_folder(common), store=common.store, capability=capability, policy=policy)


def look(common: Common) -> Mulligan:
    """Open for looking: nothing is made. A store that is not there yet is a clear refusal."""
    import mulligan.opening as opening

    return opening.look(root_folder(common), store=common.store)


def root_folder(common: Common) -> str:
    """The root asked for, else the nearest known one above the current folder, else that folder."""
    if common.root is not None:
        return common.root
    here = os.path.realpath(os.getcwd())
    above = [root for root in known_roots(common.store) if here == root or here.startswith(root.rstrip("/") + "/")]
    return max(above, key=len, default=here)


def known_roots(store: str | None) -> list[str]:
    """Every root the store knows; none, if there is no store yet."""
    from mulligan.history.schema import SCHEMA
    from mulligan.history.tables import ROOTS
    from mulligan.opening import open_store, store_directory
    from mulligan.store.sqlite import DATABASE
    from mulligan.values.clock import SystemClock

    directory = store_directory(store, os.environ)
    if directory is None or not os.path.exists(os.path.join(directory, DATABASE)):
        return []
    opened = open_store(store, SCHEMA, durability="process", clock=SystemClock(), create=False)
    try:
        with opened.read() as tx:
            return [os.fsdecode(row.place) or "/" for row in tx.select(ROOTS)]
    finally:
        opened.close()
