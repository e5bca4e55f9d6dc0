"""A session's boundary over the past: what it may be told of, and what a way back may change for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from mulligan.boundary.capability import FsOp
from mulligan.boundary.verdict import Boundary
from mulligan.effects.hosting import Hosted
from mulligan.history.desk import Desk
from mulligan.session.roots import ASIDES
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import ROOT, RepoPath, is_inside
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused


@plain(slots=True, frozen=True)
class Judge:
    """History speaks of several roots. `others` are those beside the desk's own, each with the name it goes by."""

    desk: Desk
    boundary: Boundary
    home: Boundary
    """over the session's primary root"""
    others: Mapping[str, str]

    @staticmethod
    def of(desk: Desk, session: SessionId, found: Hosted) -> Judge:
        boundary = replace(found.boundary, folds_case=True) if desk.disk.root.folds_case else found.boundary
        if found.anchor is None:
            return Judge(desk, boundary, boundary, {})
        with desk.ledger.store.read() as tx:
            aside = {row.directory: row.path for row in tx.select(ASIDES, {"session": session})}
        primary = found.anchor.primary
        roots = (primary, *(mount.path for mount in found.anchor.mounts))
        others = {path: path for path in roots if path != _own(desk)} | aside
        return Judge(desk, boundary, boundary.moved_to(primary) if primary in others else boundary, others)

    def may_write(self, desk: Desk, path: RepoPath) -> None:
        """What ways back ask of every path before they touch any. Raises `fs_op_not_allowed`, `path_not_allowed`."""
        self.check("write", os.path.normpath(os.path.join(_own(desk), path)))

    def check(self, op: FsOp, whole: str) -> None:
        boundary, path = self._as_known(op, whole)
        try:
            boundary.check_op(op)
            boundary.check_path(op, path)
        except Refused as refused:
            raise fault(refused.code, refused.message) from None

    def may_tell(self, shown: str, *, content: bool = False) -> bool:
        """Whether a path, as the desk shows it, is one the session may read; `content`: and have in an answer."""
        boundary, path = self._as_known("read", os.path.join(_own(self.desk), shown))
        allowed = boundary.capability.allowed_fs_ops
        if (allowed is not None and "read" not in allowed) or not boundary.admits("read", path):
            return False
        return not (content and boundary.keeps_out_of_answers("read", path))

    def _as_known(self, op: FsOp, whole: str) -> tuple[Boundary, RepoPath]:
        """The boundary over the root that a path is in, and the path below it. Other roots are for the unbounded."""
        own = _own(self.desk)
        if is_inside(whole, own):
            return self.boundary, _below(whole, own)
        folder = max((one for one in self.others if is_inside(whole, one)), key=len, default=None)
        if folder is not None:
            return self.boundary.moved_to(self.others[folder]), _below(whole, folder)
        unbounded = self.boundary.capability.fs_roots is None and self.boundary.admits_everywhere(op)
        nothing = replace(self.boundary.capability, fs_roots=())
        return self.boundary if unbounded else replace(self.boundary, capability=nothing), RepoPath(whole)


def _own(desk: Desk) -> str:
    return os.fsdecode(desk.disk.root.path)


def _below(whole: str, root: str) -> RepoPath:
    return RepoPath(whole[len(root.rstrip("/")) + 1 :] or ROOT)
