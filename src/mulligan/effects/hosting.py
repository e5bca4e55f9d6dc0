"""host.session.open and host.session.signal: a boundary is attached to a session, and ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from mulligan.boundary.capability import UNLIMITED, parse_capability
from mulligan.boundary.policy import NO_POLICY, parse_policy
from mulligan.boundary.verdict import Boundary
from mulligan.effects import params
from mulligan.history.desk import Desk
from mulligan.session.tables import BOUNDARIES, SESSIONS, BoundaryRow, session_journal
from mulligan.values.canonical import decode
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.paths import ROOT, RepoPath
from mulligan.values.refusal import Refused

SIGNALS = ("term", "kill", "int", "hup")

Fields = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Hosted:
    """A session as effects find it: its boundary and where relative paths begin."""

    boundary: Boundary
    workdir: RepoPath = ROOT


def now_ns(desk: Desk) -> int:
    return int(desk.ledger.clock.now().timestamp() * 1_000_000) * 1_000


def open_session(desk: Desk, asked: params.OpenSession, *, default: Boundary) -> Fields:
    """A new session id, or the given one, with what it may do from now on."""
    if asked.target.sandbox is not None or asked.target.local is None:
        raise Refused("error", "unsupported_target", "Only local targets can be opened.")
    capability = default.capability if asked.capability is None else _parsed(parse_capability, asked.capability)
    policy = default.policy if asked.policy is None else _parsed(parse_policy, asked.policy)
    workdir = _workdir(desk, asked.target.local.workdir)
    session = SessionId(asked.session_id or desk.ledger.ids.new())
    started = now_ns(desk)
    expires = None if asked.session_ttl_ns is None else started + asked.session_ttl_ns
    boundary = {
        "capability": capability.to_json(),
        "policy": policy.to_json(),
        "workdir": workdir,
        "env": asked.target.local.env or {},
        "network_mode": asked.target.local.network_mode or "full",
        "labels": asked.labels or {},
    }
    body = {"session": session, "boundary": boundary, "started_at_ns": started, "expires_at_ns": expires}
    desk.ledger.session(session, desk.root)
    with desk.ledger.store.write() as tx:
        journal = session_journal(session)
        desk.ledger.journal.append(tx, journal, "boundary.attached", body, at=desk.ledger.now())
    return {"session_id": session, "started_at_ns": started, "expires_at_ns": expires}


def _parsed(parse: Any, body: object) -> Any:
    try:
        return parse(body)
    except MulliganError as error:
        raise Refused("error", "invalid_params", error.message) from None


def _workdir(desk: Desk, text: str | None) -> RepoPath:
    if text is None:
        return ROOT
    own = os.fsdecode(desk.disk.root.path)
    real = os.path.realpath(os.path.join(own, text))
    if not os.path.isdir(real) or not (real == own or real.startswith(own.rstrip("/") + "/")):
        raise Refused("error", "invalid_workdir", f"{text!r} is not a directory below the root.")
    return RepoPath(os.path.relpath(real, own))


def hosted(desk: Desk, session: SessionId, *, default: Boundary, must_exist: bool) -> Hosted:
    """The boundary in force. Refuses an unknown, closed or expired session, in that order of words."""
    with desk.ledger.store.read() as tx:
        row, known = tx.get(BOUNDARIES, session), tx.get(SESSIONS, session)
    if row is None:
        if known is None and must_exist:
            raise Refused("error", "session_not_found", f"There is no session {session!r}.")
        if known is not None and known.closed_at is not None:
            raise Refused("error", "session_closed", f"Session {session!r} is closed.")
        return Hosted(default)
    if row.ended_at_ns is not None:
        raise Refused("error", "session_closed", f"Session {session!r} is closed.")
    if row.expires_at_ns is not None and now_ns(desk) > row.expires_at_ns:
        _end(desk, session)
        raise Refused("error", "session_expired", f"Session {session!r} has expired.")
    return _as_hosted(row, default)


def _as_hosted(row: BoundaryRow, default: Boundary) -> Hosted:
    body = decode(row.body)
    capability = parse_capability(body["capability"]) if body["capability"] else UNLIMITED
    policy = parse_policy(body["policy"]) if body["policy"] else NO_POLICY
    return Hosted(Boundary(default.root, capability, policy), RepoPath(body["workdir"]))


def signal_session(desk: Desk, asked: params.SignalSession) -> Fields:
    if asked.signal not in SIGNALS:
        raise Refused("error", "invalid_params", f"signal is one of {', '.join(SIGNALS)}.")
    session = SessionId(asked.session_id or "")
    with desk.ledger.store.read() as tx:
        row = tx.get(BOUNDARIES, session)
    if row is None:
        raise Refused("not_found", "session_not_found", f"There is no open session {session!r}.")
    if row.ended_at_ns is not None:
        words = f"Session {session!r} has ended already."
        raise Refused("already_exited", "session_closed", words, ended_at_ns=row.ended_at_ns)
    return {"ended_at_ns": _end(desk, session)}


def _end(desk: Desk, session: SessionId) -> int:
    ended = now_ns(desk)
    with desk.ledger.store.write() as tx:
        body = {"session": session, "ended_at_ns": ended}
        desk.ledger.journal.append(tx, session_journal(session), "boundary.ended", body, at=desk.ledger.now())
    return ended
