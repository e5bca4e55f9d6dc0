"""The verdict: capability and policy over a resolved path. Every refusal names its code."""

from __future__ import annotations

from dataclasses import dataclass

from mulligan.boundary.capability import UNLIMITED, Capability, FsOp
from mulligan.boundary.policy import NO_POLICY, Policy
from mulligan.values.faults import MulliganError
from mulligan.values.limits import INLINE_LIMIT_BYTES
from mulligan.values.paths import ROOT, RepoPath, is_below, parse_repo_path
from mulligan.values.refusal import Refused

GIT_NAME = ".git"


@dataclass(slots=True, frozen=True)
class Boundary:
    """What one session may do below one root. `root` is the root's absolute path, for absolute `fs_roots`."""

    root: str
    capability: Capability = UNLIMITED
    policy: Policy = NO_POLICY

    def check_op(self, op: FsOp) -> None:
        allowed = self.capability.allowed_fs_ops
        if allowed is not None and op not in allowed:
            raise Refused("forbidden", "fs_op_not_allowed", f"This session may not {op}.")

    def check_path(self, op: FsOp, path: RepoPath) -> None:
        """`path` is resolved: real names, no links left to follow."""
        if not any(path == base or is_below(path, base) for base in self._bases()):
            raise Refused("forbidden", "path_not_allowed", f"{path} is outside what this session may touch.")
        rule = self.policy.decide(op, path)
        if rule is not None and rule.verdict == "deny":
            raise Refused("forbidden", "path_not_allowed", f"The policy does not let this session {op} {path}.")

    def check_write(self, op: FsOp, path: RepoPath) -> None:
        """File tools never write into git's own directory, whoever asks."""
        self.check_path(op, path)
        if path == ROOT or any(name.casefold() == GIT_NAME for name in path.split("/")):
            raise Refused("forbidden", "path_not_allowed", f"{path} is not for file tools to change.")

    def _bases(self) -> tuple[RepoPath, ...]:
        roots = self.capability.fs_roots
        return (ROOT,) if roots is None else tuple(base for one in roots if (base := self._base(one)) is not None)

    def _base(self, one: str) -> RepoPath | None:
        """A root of the capability as a path below ours, by whole names; None if it lies elsewhere."""
        own = self.root.rstrip("/")
        if one.startswith("/"):
            if one.rstrip("/") == own or (own + "/").startswith(one.rstrip("/") + "/"):
                return ROOT
            if not one.startswith(own + "/"):
                return None
            one = one[len(own) + 1 :]
        try:
            return parse_repo_path(one or ".")
        except MulliganError:
            return None

    def inline_limit(self, op: FsOp, path: RepoPath) -> int:
        """How many bytes may be answered inline; 0 when the policy keeps this content out of answers."""
        rule = self.policy.decide(op, path)
        if rule is not None and rule.output == "blob":
            return 0
        cap = self.capability.max_inline_bytes
        return INLINE_LIMIT_BYTES if cap is None else min(INLINE_LIMIT_BYTES, cap)


def clamped(asked: int | None, ceiling: int | None) -> int | None:
    """The smaller of what was asked for and what is allowed: a request over the ceiling is cut, not refused."""
    if asked is None or ceiling is None:
        return ceiling if asked is None else asked
    return min(asked, ceiling)
