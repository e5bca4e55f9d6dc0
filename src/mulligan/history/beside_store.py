"""Where copies of whole roots are put unless somebody says otherwise: beside the store, where no workspace is.

A copy's name says which process makes it, so that what a dead one left unfinished can be told and is removed.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

from mulligan.history.desk import Desk
from mulligan.history.tables import BRANCHES
from mulligan.session.roots import ASIDES
from mulligan.store.bodies import sync_file_system
from mulligan.values.faults import fault_of_os_error
from mulligan.values.ids import OwnerId
from mulligan.workspace.copies import remove_copy


def fresh_place(desk: Desk, kind: str) -> bytes:
    """A folder that is not there yet; among temporary things, if the store is nowhere."""
    home, ledger = desk.ledger.store.directory, desk.ledger
    folder = os.path.join(home, kind) if home is not None else tempfile.mkdtemp(prefix=f"mulligan-{kind}-")
    if home is not None and os.path.isdir(folder):
        _sweep(desk, folder)
    return os.fsencode(os.path.join(folder, f"{ledger.store.owner()}-{ledger.ids.new()}"))


def sync_copy(desk: Desk, copy: bytes) -> None:
    """In `power` mode a whole copy is on its disk before the store names it. Syncs its file system at once."""
    if desk.ledger.store.durability != "power":
        return
    try:
        handle = os.open(copy, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file_system(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise fault_of_os_error(error, f"Syncing the copy in {os.fsdecode(copy)}") from error


def _sweep(desk: Desk, folder: str) -> None:
    """Remove copies that nobody knows and whose makers are dead."""
    store = desk.ledger.store
    with store.read() as tx:
        known = {os.path.basename(row.directory) for row in tx.select(ASIDES)}
        known |= {os.path.basename(os.fsdecode(row.directory)) for row in tx.select(BRANCHES)}
    for name in os.listdir(folder):
        maker = name.partition("-")[0]
        if name not in known and maker.isdigit() and store.is_alive(OwnerId(int(maker))) is False:
            with suppress(FileNotFoundError):
                remove_copy(os.fsencode(os.path.join(folder, name)))
