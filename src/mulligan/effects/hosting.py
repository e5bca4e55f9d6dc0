"""host.session.open and host.session.signal: a boundary is attached to a session, and ends."""

from __future__ import annotations

import os
from typing import Any

from mulligan.boundary.capability import UNLIMITED, parse_capability
from mulligan.boundary.policy import NO_POLICY, parse_policy
from mulligan.boundary.verdict import Boundary
from mulligan.effects import params
from mulligan.effects.board import SIGNALS, board_of
from mulligan.effects.env import NO_ENV, SessionEnv, sealed_env
from mulligan.history.desk import Desk
from mulligan.session.roots import Anchor, anchor_in
from mulligan.session.tables import BOUNDARIES, SESSIONS, BoundaryRow, session_journal
from mulligan.values.canonical import decode
from mulligan.values.entries import DirEntry
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.paths import ROOT, RepoPath, from_wire, is_inside, parse_repo_path, to_wire
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused

Fields = dict[str, Any]


@plain(slots=True, frozen=True)
class Hosted:
    """A session as effects find it: its boundary, where relative paths begin, and what its commands are given."""

    boundary: Boundary
    workdir: RepoPath = ROOT
    env: SessionEnv = NO_ENV
    network: str = "full"
    anchor: Anchor | None = None


def now_ns(desk: Desk) -> int:
    return int(desk.ledger.clock.now().timestamp() * 1_000_000) * 1_000


def open_session(desk: Desk, asked: params.OpenSession, *, default: Boundary) -> Fields:
    """A new session id, or the given one, with what it may do from now on."""
    if asked.target.sandbox is not None or asked.target.local is None:
        raise Refused("error", "unsupported_target", "Only local targets can be opened.")
    if asked.target.local.mounts:
        raise Refused("error", "unsupported_target", "mounts: paths of a local target are where they are on the host.")
    capability = default.capability if asked.capability is None else _parsed(parse_capability, asked.capability)
    policy = default.policy if asked.policy is None else _parsed(parse_policy, asked.policy)
    workdir = _workdir(desk, asked.target.local.workdir)
    session = _session(desk, asked.session_id)
    started = now_ns(desk)
    expires = None if asked.session_ttl_ns is None else started + asked.session_ttl_ns
    boundary = {
        "capability": capability.to_json(),
        "policy": policy.to_json(),
        "workdir": to_wire(workdir),
        **sealed_env(desk.ledger.store.secret_key, asked.target.local.env or {}),
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


def _session(desk: Desk, asked: str | None) -> SessionId:
    """A new session, or one whose boundary has not been set or has ended: nobody is given another one while at work."""
    if asked is None:
        return SessionId(desk.ledger.ids.new())
    session = SessionId(_parsed(parse_user_id, asked))
    with desk.ledger.store.read() as tx:
        row = tx.get(BOUNDARIES, session)
    if row is not None and row.ended_at_ns is None and not _has_expired(desk, row):
        raise Refused("error", "session_exists", f"Session {session!r} is open already.")
    return session


def _workdir(desk: Desk, text: str | None) -> RepoPath:
    """Where relative paths begin: a directory below the root, by its real name."""
    if text is None:
        return ROOT
    own = os.fsdecode(desk.disk.root.path)
    clean = os.path.normpath(text) if text else text
    relative = os.path.relpath(clean, own) if is_inside(clean, own) else clean
    try:
        with desk.disk.resolve(parse_repo_path(relative)) as spot:
            if isinstance(desk.disk.image(spot).entry, DirEntry):
                return spot.path
    except (OSError, MulliganError, Refused):
        pass
    raise Refused("error", "invalid_workdir", f"{text!r} is not a directory below the root.")


def is_known(desk: Desk, session: SessionId) -> bool:
    with desk.ledger.store.read() as tx:
        return tx.has(SESSIONS, session)


def hosted(desk: Desk, session: SessionId, *, default: Boundary) -> Hosted:
    """The boundary in force: what was attached to the session, within what whoever asks may do anyway.

    Refuses a closed or expired session.
    """
    with desk.ledger.store.read() as tx:
        row, known, anchor = tx.get(BOUNDARIES, session), tx.get(SESSIONS, session), anchor_in(tx, session)
    if (row is not None and row.ended_at_ns is not None) or (known is not None and known.closed_at is not None):
        raise Refused("error", "session_closed", f"Session {session!r} is closed.")
    if row is not None and _has_expired(desk, row):
        _end(desk, session)
        raise Refused("error", "session_expired", f"Session {session!r} has expired.")
    return _as_hosted(desk, row, default, anchor)


def once_hosted(desk: Desk, session: SessionId, *, default: Boundary) -> Hosted:
    """The same for whoever goes back: what a session did can be undone after its end, within what it might do."""
    with desk.ledger.store.read() as tx:
        return _as_hosted(desk, tx.get(BOUNDARIES, session), default, anchor_in(tx, session))


def _has_expired(desk: Desk, row: BoundaryRow) -> bool:
    return row.expires_at_ns is not None and now_ns(desk) > row.expires_at_ns


def _as_hosted(desk: Desk, row: BoundaryRow | None, default: Boundary, anchor: Anchor | None) -> Hosted:
    if row is None:
        return Hosted(default, anchor=anchor)
    body = decode(row.body)
    capability = parse_capability(body["capability"]) if body["capability"] else UNLIMITED
    policy = parse_policy(body["policy"]) if body["policy"] else NO_POLICY
    workdir = from_wire(body["workdir"])
    env = SessionEnv(session=row.session, body=body, key=desk.ledger.store.secret_key)
    return Hosted(default.narrowed(capability, policy), workdir, env, body["network_mode"], anchor)


def signal_session(desk: Desk, asked: params.SignalSession) -> Fields:
    if asked.signal not in SIGNALS:
        raise Refused("error", "invalid_params", f"signal is one of {', '.join(SIGNALS)}.")
    if asked.session_id is None:
        raise Refused("error", "invalid_params", "session_id: name the session to signal.")
    session = SessionId(asked.session_id)
    with desk.ledger.store.read() as tx:
        row = tx.get(BOUNDARIES, session)
    if row is None:
        raise Refused("not_found", "session_not_found", f"There is no open session {session!r}.")
    if row.ended_at_ns is not None:
        words = f"Session {session!r} has ended already."
        raise Refused("already_exited", "session_closed", words, ended_at_ns=row.ended_at_ns)
    board_of(desk).signal_session(session, SIGNALS[asked.signal])
    return {"ended_at_ns": _end(desk, session)}


def _end(desk: Desk, session: SessionId) -> int:
    ended = now_ns(desk)
    with desk.ledger.store.write() as tx:
        body = {"session": session, "ended_at_ns": ended}
        desk.ledger.journal.append(tx, session_journal(session), "boundary.ended", body, at=desk.ledger.now())
    return ended
