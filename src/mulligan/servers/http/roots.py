"""The roots of a store that this process can reach, each opened when it is first needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mulligan.files.disk import HostDisk
from mulligan.files.identity import identity_of, same_directory
from mulligan.history.ledger import Ledger
from mulligan.history.open_root import OpenRoot
from mulligan.history.tables import BRANCHES, CALLS, ROOTS, BranchRow, CallRow, RootRow
from mulligan.session.tables import SESSIONS, SessionRow
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.protocol import Tx
from mulligan.values.errors import MulliganError, fault
from mulligan.values.paths import is_inside


class ServedRoots:
    """`only`: absolute folders; a root outside all of them is not served. Without any, every root is."""

    def __init__(self, ledger: Ledger, only: Sequence[str] = ()) -> None:
        self.ledger = ledger
        self._only = [os.fsencode(os.path.realpath(one)) for one in only]
        self._open: dict[str, OpenRoot] = {}
        self._lock = fork_safe_lock()

    def rows(self) -> list[RootRow]:
        """The roots that can be reached, in order of path. Copies of forks are among them."""
        return sorted((row for row in self.known() if self._is_there(row)), key=lambda row: (row.place, row.id))

    def known(self) -> list[RootRow]:
        """The roots of this host that are served, also those whose directory is gone."""
        with self.ledger.store.read() as tx:
            rows, host = tx.select(ROOTS), self.ledger.host()
        return [row for row in rows if row.host in ("", host) and self.admits(row)]

    def admits(self, row: RootRow) -> bool:
        return not self._only or any(is_inside(row.place, one) for one in self._only)

    @property
    def serves_all(self) -> bool:
        return not self._only

    def admits_event(self, session: str | None, workspace: str | None) -> bool:
        """Whether something that happened in a session or a workspace happened in a root that is served."""
        with self.ledger.store.read() as tx:
            row = None if session is None else tx.get(SESSIONS, session)
            roots = [tx.get(ROOTS, row.root)] if row is not None else tx.select(ROOTS, {"workspace": workspace})
        return any(root is not None and self.admits(root) for root in roots)

    def _is_there(self, row: RootRow) -> bool:
        if row.id in self._open:
            return os.path.isdir(row.place or b"/")
        try:
            disk = HostDisk(row.place or b"/")
        except MulliganError:
            return False
        try:
            return same_directory(row.identity, identity_of(disk))
        finally:
            disk.close()

    def get(self, root: str) -> OpenRoot:
        """Raises `unknown_root` for a root that the store does not know or that this server does not serve."""
        with self._lock:
            found = self._open.get(root)
            if found is not None:
                return found
            with self.ledger.store.read() as tx:
                row = tx.get(ROOTS, root)
            if row is None or not self.admits(row) or not self._is_there(row):
                raise fault("unknown_root", "This server does not serve such a root.", root=root)
            made = self._open[root] = OpenRoot(self.ledger, HostDisk(row.place or b"/"))
            return made

    def of_session(self, session: str) -> tuple[OpenRoot, SessionRow]:
        """Raises `session_not_found`, also for a session of a root that is not served."""
        with self.ledger.store.read() as tx:
            row = tx.get(SESSIONS, session)
        if row is None or row.root not in {one.id for one in self.rows()}:
            raise fault("session_not_found", "There is no such session here.", session=session)
        return self.get(row.root), row

    def of_call(self, call: str) -> tuple[OpenRoot, CallRow]:
        """By the whole id. Raises `unknown_call`, also for a call of a root that is not served."""
        with self.ledger.store.read() as tx:
            row = tx.get(CALLS, call)
            root = None if row is None else tx.get(ROOTS, row.root)
        if row is None or root is None or not self.admits(root):
            raise fault("unknown_call", "There is no such call here.", call=call)
        return self.get(row.root), row

    def close(self) -> None:
        for one in self._open.values():
            one.close()


def branch_at(tx: Tx, row: RootRow) -> BranchRow | None:
    """The fork whose files this root is."""
    return next((one for one in tx.select(BRANCHES) if one.root == row.id), None)


def root_view(tx: Tx, row: RootRow) -> dict[str, Any]:
    """A root as the page shows it: its folder, and of which session's fork it is the copy."""
    branch = branch_at(tx, row)
    path = row.place.decode("utf-8", "replace") or "/"
    name = os.path.basename(path) or path
    return {"id": row.id, "path": path, "name": name, "fork_of": None if branch is None else branch.source}
