"""Where sessions come from: forks share what was said before them, and the line can be walked back to its root."""

from __future__ import annotations

from typing import Any

from mulligan.session.facts import BRANCHED_AT, OF_THE_FORK, facts_of
from mulligan.session.projection import talk_row, window_row
from mulligan.session.standing import is_deleted
from mulligan.session.tables import BOUNDARIES, SESSIONS, session_journal
from mulligan.session.transcript import Archive, head_of, run_holding, window_of
from mulligan.session.windows import Window, to_json
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.paths import is_inside
from mulligan.values.plain import plain

LogEntry = list[Any]
"""[session, after, upto, events, events before `after`]: events that a session inherited."""


@plain(slots=True, frozen=True)
class Ancestry:
    parent_id: str | None
    child_ids: tuple[str, ...]
    root_id: str

    def to_json(self) -> dict[str, Any]:
        return {"parent_id": self.parent_id, "child_ids": list(self.child_ids), "root_id": self.root_id}


def ancestry_in(tx: Tx, session: SessionId) -> Ancestry | None:
    """None for a session nobody ever opened."""
    row = tx.get(SESSIONS, session)
    if row is None:
        return None
    root, seen = row, {row.id}
    while root.parent is not None and root.parent not in seen:
        above = tx.get(SESSIONS, root.parent)
        if above is None:
            return Ancestry(row.parent, children_in(tx, session), root.parent)
        root = above
        seen.add(root.id)
    return Ancestry(row.parent, children_in(tx, session), root.id)


def children_in(tx: Tx, session: SessionId) -> tuple[str, ...]:
    """Forks of a session that were not deleted, oldest first."""
    rows = [row for row in tx.select(SESSIONS, {"parent": session}) if not is_deleted(tx, SessionId(row.id))]
    return tuple(row.id for row in sorted(rows, key=lambda row: (row.created_at, row.id)))


def fresh_id(tx: Tx, archive: Archive, wanted: str | None) -> SessionId:
    """An id for a new session. Raises `session_exists`: nobody's session is ever written over, closed or not."""
    session = SessionId(archive.ids.new() if wanted is None else parse_user_id(wanted, "session"))
    if tx.has(SESSIONS, session):
        raise fault("session_exists", f"There is a session {session!r} already; choose another id.", session=session)
    return session


def fork_in(
    tx: Tx,
    archive: Archive,
    parent: SessionId,
    child: SessionId,
    *,
    root: str,
    kept: Window | None = None,
    copied: tuple[str, str] | None = None,
) -> None:
    """Open a child that has its parent's talk in force, or what is `kept` of it. Nothing is copied.

    It may do what its parent may, and no longer. `copied`: where its files were copied from, and where they are.
    """
    log = inherited_log(tx, parent)
    facts = {name: value for name, value in facts_of(tx, parent).items() if name not in OF_THE_FORK}
    if kept is not None:
        log = _upto_last(tx, log, kept)
        facts[BRANCHED_AT] = sum(entry[3] for entry in log)
    window = window_of(tx, parent) if kept is None else kept
    journal, at = session_journal(child), archive.now()
    opened = {"session": child, "root": root, "parent": parent}
    archive.journal.append(tx, journal, "session.opened", opened, at=at)
    body = {"verb": "fork", "spans": to_json(window), "log": log, "log_after": 0, "was": 0, "facts": facts}
    archive.journal.append(tx, journal, "window.changed", body, at=at)
    archive.journal.append(tx, session_journal(parent), "session.forked", {"session": parent, "child": child}, at=at)
    bounds = tx.get(BOUNDARIES, parent)
    if bounds is not None:
        inherited = decode(bounds.body) if copied is None else _as_in_copy(decode(bounds.body), *copied)
        times = {"started_at_ns": bounds.started_at_ns, "expires_at_ns": bounds.expires_at_ns}
        attached = {"session": child, "boundary": inherited, **times}
        archive.journal.append(tx, journal, "boundary.attached", attached, at=at)


def _as_in_copy(boundary: dict[str, Any], source: str, copy: str) -> dict[str, Any]:
    """What a boundary says of paths by their whole names, it says of those in the copy too."""

    def with_copies(body: dict[str, Any], field: str) -> dict[str, Any]:
        names = body.get(field) or []
        there = [copy + name[len(source) :] for name in names if is_inside(name, source)]
        return {**body, field: [*names, *there]} if there else body

    capability = with_copies(boundary["capability"], "fs_roots")
    return {**boundary, "capability": capability, "policy": [with_copies(one, "paths") for one in boundary["policy"]]}


def inherited_log(tx: Tx, session: SessionId) -> list[LogEntry]:
    """All events of a session so far, as a child inherits them."""
    row, newest = talk_row(tx, session), window_row(tx, session)
    own = [session, newest.log_after, head_of(tx, session), row.events - row.log_from, row.log_from]
    return [*decode(newest.log), *([own] if own[3] else [])]


def _upto_last(tx: Tx, log: list[LogEntry], kept: Window) -> list[LogEntry]:
    """The log up to the last kept message."""
    if not kept:
        return []
    session, number = kept[-1].session, kept[-1].stop - 1
    seq, events = _event_number(tx, session, number)
    upto: list[LogEntry] = []
    for entry in log:
        if entry[0] == session and entry[1] < seq <= entry[2]:
            return [*upto, [session, entry[1], seq, events - entry[4], entry[4]]]
        upto.append(entry)
    return upto


def _event_number(tx: Tx, session: str, number: int) -> tuple[int, int]:
    """A message's record, and how many events its journal has up to it."""
    run = run_holding(tx, talk_row(tx, session), number)
    into = number - run.first
    return run.seq + into, run.events + (0 if run.inserted else into + 1)
