"""The effects host.session.open and host.session.signal, which attach a boundary to a session and end it.

`HistoryAccess` applies a session's boundary to history: what it may read, and what its undo operations may change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mulligan.boundary.capability import FsOp, parse_capability
from mulligan.boundary.policy import parse_policy
from mulligan.boundary.verdict import Boundary
from mulligan.effects.context import SessionBoundary, end_boundary, has_expired, refusing
from mulligan.effects.running_commands import SIGNALS, running_commands_of, sealed_env
from mulligan.history.open_root import OpenRoot
from mulligan.session.roots import SANDBOXED_ROOTS
from mulligan.session.tables import BOUNDARIES, SESSIONS, session_journal
from mulligan.values.clock import now_ns
from mulligan.values.entries import DirEntry
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, parse_user_id
from mulligan.values.paths import ROOT, RepoPath, is_inside, parse_repo_path, to_wire

if TYPE_CHECKING:
    from mulligan.effects import params

Fields = dict[str, Any]


def open_session(open_root: OpenRoot, asked: params.OpenSession, *, default: Boundary) -> Fields:
    """Attach a boundary to a new session or to the given one, and return its id."""
    if asked.target.sandbox is not None or asked.target.local is None:
        raise Refused("error", "unsupported_target", "Only local targets can be opened.")
    if asked.target.local.mounts:
        raise Refused("error", "unsupported_target", "mounts: a local target uses the paths of the host.")
    with refusing("invalid_params"):
        capability = default.capability if asked.capability is None else parse_capability(asked.capability)
        policy = default.policy if asked.policy is None else parse_policy(asked.policy)
    workdir = _workdir(open_root, asked.target.local.workdir)
    session = _session(open_root, asked.session_id)
    started = now_ns(open_root.ledger.clock)
    expires = None if asked.session_ttl_ns is None else started + asked.session_ttl_ns
    boundary = {
        "capability": capability.to_json(),
        "policy": policy.to_json(),
        "workdir": to_wire(workdir),
        **sealed_env(open_root.ledger.store.secret_key, asked.target.local.env or {}),
        "network_mode": asked.target.local.network_mode or "full",
        "labels": asked.labels or {},
    }
    body = {"session": session, "boundary": boundary, "started_at_ns": started, "expires_at_ns": expires}
    open_root.ledger.session(session, open_root.root)
    journal = session_journal(session)
    with open_root.ledger.store.write(about=(journal,)) as tx:
        open_root.ledger.journal.append(tx, journal, "boundary.attached", body, at=open_root.ledger.now())
    return {"session_id": session, "started_at_ns": started, "expires_at_ns": expires}


def _session(open_root: OpenRoot, asked: str | None) -> SessionId:
    """A new session, or the given one if it has no open boundary: a boundary must not change while it is in use."""
    if asked is None:
        return SessionId(open_root.ledger.ids.new())
    with refusing("invalid_params"):
        session = SessionId(parse_user_id(asked))
    with open_root.ledger.store.read() as tx:
        row = tx.get(BOUNDARIES, session)
    if row is not None and row.ended_at_ns is None and not has_expired(open_root, row):
        raise Refused("error", "session_exists", f"Session {session!r} is already open.")
    return session


def _workdir(open_root: OpenRoot, text: str | None) -> RepoPath:
    """The directory where relative paths begin: below the root, by its real path."""
    if text is None:
        return ROOT
    own = os.fsdecode(open_root.disk.root.path)
    clean = os.path.normpath(text) if text else text
    relative = os.path.relpath(clean, own) if is_inside(clean, own) else clean
    try:
        with open_root.disk.resolve(parse_repo_path(relative)) as resolved:
            if isinstance(open_root.disk.image(resolved).entry, DirEntry):
                return resolved.path
    except (OSError, MulliganError, Refused):
        pass
    raise Refused("error", "invalid_workdir", f"{text!r} is not a directory below the root.")


def is_known(open_root: OpenRoot, session: SessionId) -> bool:
    with open_root.ledger.store.read() as tx:
        return tx.has(SESSIONS, session)


def signal_session(open_root: OpenRoot, asked: params.SignalSession) -> Fields:
    if asked.signal not in SIGNALS:
        raise Refused("error", "invalid_params", f"signal must be one of {', '.join(SIGNALS)}.")
    if asked.session_id is None:
        raise Refused("error", "invalid_params", "session_id: name the session to signal.")
    session = SessionId(asked.session_id)
    with open_root.ledger.store.read() as tx:
        row = tx.get(BOUNDARIES, session)
    if row is None:
        raise Refused("not_found", "session_not_found", f"There is no open session {session!r}.")
    if row.ended_at_ns is not None:
        words = f"Session {session!r} has ended already."
        raise Refused("already_exited", "session_closed", words, ended_at_ns=row.ended_at_ns)
    running_commands_of(open_root).signal_session(session, SIGNALS[asked.signal])
    return {"ended_at_ns": end_boundary(open_root, session)}


@fast_dataclass(slots=True, frozen=True)
class HistoryAccess:
    """A session's boundary over the history of its roots. `others` maps the other roots' folders to their names."""

    open_root: OpenRoot
    boundary: Boundary
    home: Boundary
    """over the session's primary root"""
    others: Mapping[str, str]

    @staticmethod
    def of(open_root: OpenRoot, session: SessionId, found: SessionBoundary) -> HistoryAccess:
        boundary = replace(found.boundary, folds_case=True) if open_root.disk.root.folds_case else found.boundary
        if found.anchor is None:
            return HistoryAccess(open_root, boundary, boundary, {})
        with open_root.ledger.store.read() as tx:
            copies = {row.directory: row.path for row in tx.select(SANDBOXED_ROOTS, {"session": session})}
        primary = found.anchor.primary
        roots = (primary, *(mount.path for mount in found.anchor.mounts))
        others = {path: path for path in roots if path != _own(open_root)} | copies
        return HistoryAccess(open_root, boundary, boundary.moved_to(primary) if primary in others else boundary, others)

    def may_write(self, open_root: OpenRoot, path: RepoPath) -> None:
        """Check that the session may write this path. Undo operations check every path before the first write.

        Raises `fs_op_not_allowed`, `path_not_allowed`.
        """
        self.check("write", os.path.normpath(os.path.join(_own(open_root), path)))

    def check(self, op: FsOp, whole: str) -> None:
        boundary, path = self._as_known(op, whole)
        try:
            boundary.check_op(op)
            boundary.check_path(op, path)
        except Refused as refused:
            raise fault(refused.code, refused.message) from None

    def may_tell(self, shown: str, *, content: bool = False) -> bool:
        """Whether the session may read a path that history shows. `content`: whether an answer may have its content."""
        boundary, path = self._as_known("read", os.path.join(_own(self.open_root), shown))
        allowed = boundary.capability.allowed_fs_ops
        if (allowed is not None and "read" not in allowed) or not boundary.allows("read", path):
            return False
        return not (content and boundary.keeps_out_of_answers("read", path))

    def _as_known(self, op: FsOp, whole: str) -> tuple[Boundary, RepoPath]:
        """The boundary of the root that contains a path, and the path in it. Unknown roots need no limits at all."""
        own = _own(self.open_root)
        if is_inside(whole, own):
            return self.boundary, _below(whole, own)
        folder = max((one for one in self.others if is_inside(whole, one)), key=len, default=None)
        if folder is not None:
            return self.boundary.moved_to(self.others[folder]), _below(whole, folder)
        unbounded = self.boundary.capability.fs_roots is None and self.boundary.allows_everywhere(op)
        nothing = replace(self.boundary.capability, fs_roots=())
        return self.boundary if unbounded else replace(self.boundary, capability=nothing), RepoPath(whole)


def _own(open_root: OpenRoot) -> str:
    return os.fsdecode(open_root.disk.root.path)


def _below(whole: str, root: str) -> RepoPath:
    return RepoPath(whole[len(root.rstrip("/")) + 1 :] or ROOT)
