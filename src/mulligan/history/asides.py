"""Copies of sandboxed roots: made at the first write, merged back on demand, or dropped.

Until then the original has seen nothing. What the session did in the copy are calls like any others, in a root of
their own; merging is one call in the original, which can be undone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mulligan.history.beside_store import fresh_place, sync_copy
from mulligan.history.branches import CopyMerge, as_told
from mulligan.history.desk import Desk
from mulligan.history.going_back import MayWrite, WayBack
from mulligan.history.plans import OnConflict
from mulligan.history.sites import Site, as_seen_from
from mulligan.session.roots import ASIDES, AsideRow
from mulligan.session.tables import session_journal
from mulligan.store.protocol import Tx
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.workspace.copies import Copied, copy_tree, remove_copy


def aside_of(tx: Tx, session: SessionId, path: str) -> AsideRow | None:
    return tx.get(ASIDES, session, path)


def set_aside(desk: Desk, session: SessionId, path: str) -> AsideRow:
    """The copy of a mounted root in which a session writes, made now if there is none yet."""
    with desk.ledger.store.read() as tx:
        known = aside_of(tx, session, path)
    if known is not None:
        return known
    target = fresh_place(desk, "aside")
    told = list(copy_tree(os.fsencode(path), target))
    sync_copy(desk, target)
    manifest = desk.ledger.blobs.store(encode([as_told(one) for one in told if isinstance(one, Copied)]))
    body = {
        "session": session,
        "path": path,
        "directory": os.fsdecode(target),
        "source": desk.elsewhere(os.fsencode(path), record=True).root.id,
        "root": desk.elsewhere(target, record=True).root.id,
        "manifest": manifest,
    }
    made = _published(desk, session, body, manifest)
    if made.directory != body["directory"]:
        # Somebody else was quicker; one session writes in one copy.
        remove_copy(target)
    return made


def _published(desk: Desk, session: SessionId, body: Mapping[str, Any], manifest: Digest) -> AsideRow:
    ledger = desk.ledger
    with ledger.store.write() as tx:
        if aside_of(tx, session, body["path"]) is None:
            journal = session_journal(session)
            ledger.journal.append(tx, journal, "root.set_aside", body, at=ledger.now(), refs=[manifest])
        found = aside_of(tx, session, body["path"])
    assert found is not None, "it was just put there"
    return found


def merge_aside(
    desk: Desk,
    session: SessionId,
    path: str,
    *,
    on_conflict: OnConflict = "merge",
    dry_run: bool = False,
    may_write: MayWrite | None = None,
) -> WayBack:
    """Bring what was written aside into the root itself, as one call. The copy goes once nothing is left to merge."""
    row = _waiting(desk, session, path)
    source = desk.at(row.source)
    merge = CopyMerge(source, desk.at(row.root), session, row.manifest, on_conflict)
    way = merge.bring_in({"root": path}, dry_run=dry_run, may_write=may_write)
    assert way.plan is not None, "a merge has one"
    shown = as_seen_from(desk, Site(source, ()), way.plan)
    if way.ok and not dry_run:
        _end(desk, row, "merged")
    return replace(way, outcomes=shown.outcomes, overwrote_external=shown.overwrote_external, plan=shown)


def drop_aside(desk: Desk, session: SessionId, path: str) -> None:
    """Forget what was written aside. What the calls there replaced stays in the store like any history."""
    _end(desk, _waiting(desk, session, path), "dropped")


def _waiting(desk: Desk, session: SessionId, path: str) -> AsideRow:
    with desk.ledger.store.read() as tx:
        row = aside_of(tx, session, path)
    if row is None:
        raise fault("unknown_root", f"Nothing was written aside for {path} in session {session!r}.", path=path)
    return row


def _end(desk: Desk, row: AsideRow, status: str) -> None:
    ledger = desk.ledger
    with ledger.store.write() as tx:
        body = {"session": row.session, "path": row.path, "status": status}
        journal = session_journal(SessionId(row.session))
        ledger.journal.append(tx, journal, "root.aside_ended", body, at=ledger.now())
    # On record first: a copy that nobody knows of any more does no harm.
    with suppress(FileNotFoundError):
        remove_copy(os.fsencode(row.directory))
