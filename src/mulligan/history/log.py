"""Looking at history: which calls there are, what each changed, and which one a person means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from mulligan.history.desk import Desk
from mulligan.history.leftovers import left_of
from mulligan.history.plans import OnConflict
from mulligan.history.roots import root_elsewhere
from mulligan.history.sites import main_of, with_parts
from mulligan.history.tables import CALLS, CHANGES, OPEN, ROOTS, TURNS, WSEQ_END, CallRow, ChangeRow, TurnRow
from mulligan.session.roots import ENDED_ASIDES
from mulligan.store.blobs import BLOBS, LOST
from mulligan.store.housekeeping import STORE_JOURNAL
from mulligan.store.journal import HEADS
from mulligan.store.machine import known_host
from mulligan.store.protocol import Tx
from mulligan.store.tables import Value
from mulligan.values.canonical import decode
from mulligan.values.digest import raw_digest
from mulligan.values.entries import Change, FileEntry, entry_from_json
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import path_from_bytes, to_wire

LOG_LIMIT = 100
_FIRST_PAGE, _PAGE = 8, 200
_SHORT_ID_MIN = 4
_NEXT_CHANGES = 8
"""So many changes of a file are looked at after an outside edit: other such edits may have come before the call's."""
_STANDS: Mapping[str, Value] = MappingProxyType({"status": "committed", "undone_by": None, "way_back": None})


def coverage_of_call(tx: Tx, call: CallRow) -> list[dict[str, str]]:
    """What the call could not capture, and what a power cut has taken of it since."""
    gaps: list[dict[str, str]] = decode(call.coverage)
    return [*gaps, *_lost_of(tx, call)] if has_lost_bodies(tx) else gaps


def has_lost_bodies(tx: Tx) -> bool:
    """Whether a power cut ever took anything from this store: then a record says so."""
    return tx.has(HEADS, STORE_JOURNAL)


def _lost_of(tx: Tx, call: CallRow) -> Iterator[dict[str, str]]:
    for change in changes_of(tx, call.id):
        files = [entry for entry in (change.before, change.after) if isinstance(entry, FileEntry)]
        rows = [tx.get(BLOBS, raw_digest(entry.digest)) for entry in files]
        if any(row is not None and row.place == LOST for row in rows):
            yield {"path": to_wire(change.path), "reason": "lost"}


def workspace_of(tx: Tx, desk: Desk) -> str:
    """The workspace a root belongs to now: somebody may have opened a root around it meanwhile."""
    row = tx.get(ROOTS, desk.root.id)
    return desk.root.workspace if row is None else row.workspace


def calls_of(
    tx: Tx,
    desk: Desk,
    session: SessionId | None,
    *,
    before: str | None = None,
    after: str = "",
    only: Mapping[str, Value] = MappingProxyType({}),
) -> Iterator[CallRow]:
    """Calls and external changes of a session, or of the whole workspace, newest first, read in pages.

    `only`: columns and the values they must have.
    """
    whose = {"session": session} if session is not None else {"workspace": workspace_of(tx, desk)}
    where: dict[str, Value] = {**whose, **only}
    hidden = _hidden_roots(tx, desk) if session is None else frozenset()
    upper, lower = before or "\U0010ffff", after + "\0" if after else ""
    limit = _FIRST_PAGE
    while True:
        page = tx.select(CALLS, where, between=("id", lower, upper), order=("id",), descending=True, limit=limit)
        yield from (row for row in page if row.root not in hidden) if hidden else page
        if len(page) < limit:
            return
        upper, limit = page[-1].id, _PAGE


def _hidden_roots(tx: Tx, desk: Desk) -> frozenset[str]:
    """Roots of this workspace whose directory is not the one at their path any more."""
    own = tx.get(ROOTS, desk.root.id) or desk.root
    return frozenset(row.id for row in tx.select(ROOTS, {"workspace": own.workspace}) if row.tree != own.tree)


def as_it_happened(tx: Tx, rows: Iterable[CallRow]) -> Iterator[CallRow]:
    """Of calls by their birth, newest first: outside edits moved below the calls that found them.

    Such an edit is on record only since a call looked at the file, so its id is younger than that call's.
    """
    found: dict[str, list[CallRow]] = {}
    for row in rows:
        finder = _found_by(tx, row) if row.external else None
        if finder is None:
            yield row
            yield from found.pop(row.id, ())
        else:
            found.setdefault(finder, []).append(row)
    for left in found.values():
        yield from left


def _found_by(tx: Tx, edit: CallRow) -> str | None:
    """The call that was at work when an outside edit was recorded, and then changed the same file."""
    later = ("wseq", (edit.wseq or 0) + 1, WSEQ_END)
    for change in tx.select(CHANGES, {"call": edit.id}):
        upon = tx.select(CHANGES, {"place": change.place}, between=later, order=("wseq",), limit=_NEXT_CHANGES)
        for row in upon:
            if row.call < edit.id:
                return row.call
    return None


def newest_standing(
    tx: Tx, desk: Desk, session: SessionId | None, *, on_conflict: OnConflict = "merge"
) -> CallRow | None:
    """What `undo` without a name is about. What a conflict left of a call is met again only by who overwrites.

    A call of which nothing can come back any more is meant only if there is no other.
    """
    dropped: CallRow | None = None
    for row in calls_of(tx, desk, session, only=_STANDS):
        is_meant = can_be_undone(row) and is_reachable(tx, desk, row)
        if is_meant and (on_conflict == "overwrite" or not left_of(tx, [row])):
            if not row.evicted or _is_left(tx, desk, row):
                return row
            dropped = dropped or row
    return dropped


def _is_left(tx: Tx, desk: Desk, evicted: CallRow) -> bool:
    """Whether anything that an evicted call replaced is still there, or was nothing."""
    changes = (change for one in with_parts(tx, [evicted]) for change in changes_of(tx, one.id))
    was = (change.before for change in changes)
    return any(not isinstance(entry, FileEntry) or desk.ledger.blobs.has(tx, entry.digest) for entry in was)


def is_reachable(tx: Tx, desk: Desk, row: CallRow) -> bool:
    """Whether the files are still where the call changed them: a sandboxed root's copy goes once it is merged.

    What a session did in a root of another host, or in a directory that is not there, is not.
    """
    if row.root == desk.root.id:
        return True
    root, own = tx.get(ROOTS, row.root), tx.get(ROOTS, desk.root.id) or desk.root
    if root is None or tx.has(ENDED_ASIDES, row.root):
        return False
    return (root.workspace, root.tree) == (own.workspace, own.tree) or desk.sees(root)


def open_calls_of(tx: Tx, session: SessionId) -> list[CallRow]:
    rows = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.session == session]
    return [row for row in rows if row is not None]


def changes_of(tx: Tx, call: str) -> list[Change]:
    return [change_from_row(row) for row in tx.select(CHANGES, {"call": call})]


def change_from_row(row: ChangeRow) -> Change:
    return Change(
        path=path_from_bytes(row.path),
        before=entry_from_json(decode(row.before)),
        after=entry_from_json(decode(row.after)),
        renamed_from=None if row.origin is None else path_from_bytes(row.origin),
    )


def find_call(desk: Desk, name: str, session: SessionId | None = None, *, anyones: bool = False) -> CallRow:
    """The call a person means: its id, the newest with that label, or a unique beginning or end of an id.

    Only a call of that session is meant, or without one, of this workspace. An outside edit, which is nobody's, is
    meant by its whole id; with `anyones`, so is every call of this workspace.
    """
    if not isinstance(name, str):
        raise fault("invalid_params", "A call is named by its id or its label.", field="call")
    name = name.encode("utf-8", "backslashreplace").decode("utf-8")  # no store holds, or looks for, lone surrogates
    with desk.ledger.store.read() as tx:
        own: Mapping[str, Value] = {"id": name}
        others = own if anyones else {**own, "external": 1}
        for whose, only in ((session, own), (None, others), (session, {"label": name})):
            for row in calls_of(tx, desk, whose, only=only):
                # A part has the label of its call; in a root beside that one it is all there is of it.
                return row if session is None or row.id == name else tx.get(CALLS, main_of(row)) or row
        ends = len(name) >= _SHORT_ID_MIN
        short = [r for r in calls_of(tx, desk, session) if ends and (r.id.endswith(name) or r.id.startswith(name))]
        if not short:
            _refuse_elsewhere(tx, desk, name)
    if len(short) == 1:
        return short[0]
    here = "here" if session is None else f"of session {session!r}"
    words = f"is not a call {here}" if not short else f"could be any of {len(short)} calls; write more of it"
    raise fault("unknown_call", f"{name!r} {words}. `mulligan log` lists the calls.", call=name)


def _refuse_elsewhere(tx: Tx, desk: Desk, name: str) -> None:
    """A call is known by its whole id in every root, and only the process that sees its directory can work on it."""
    call = tx.get(CALLS, name)
    root = None if call is None else tx.get(ROOTS, call.root)
    if root is not None and not desk.sees(root):
        raise root_elsewhere(root, known_host(tx, os.environ))


def verb_of(row: CallRow) -> str | None:
    """What made a call that is not work of its own: a way back, a merge, a fork."""
    return decode(row.cause).get("verb") if row.cause else None


def can_be_undone(row: CallRow) -> bool:
    """What `undo` without a name looks for: work of a call that still stands."""
    stands = row.status == "committed" and row.undone_by is None and row.wseq is not None
    return stands and not row.external and row.way_back is None


def is_open_turn(tx: Tx, session: str, turn: str) -> bool:
    """Opened by hand and not ended, or with a call still in progress."""
    row: TurnRow | None = tx.get(TURNS, session, turn)
    if row is not None and row.is_open:
        return True
    rows = tx.select(CALLS, {"session": session, "turn": turn}, order=("id",))
    return any(call.status == "open" for call in rows)


def status_shown(row: CallRow) -> str:
    if row.status != "committed":
        return row.status
    return "evicted" if row.evicted else "undone" if row.undone_by is not None else row.status
