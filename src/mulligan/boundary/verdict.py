"""The verdict: capability and policy over a resolved path. Every refusal names its code."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from unicodedata import normalize

from mulligan.boundary.capability import UNLIMITED, Capability, FsOp, both
from mulligan.boundary.policy import NO_POLICY, Policy, Rule
from mulligan.values.faults import MulliganError
from mulligan.values.limits import INLINE_LIMIT_BYTES
from mulligan.values.paths import ROOT, RepoPath, is_below, parse_repo_path
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused

_UNSEEN = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
"""Characters that HFS+ leaves out of a name."""
_GIT_ELSEWHERE = re.compile(r"(\.git|git~1)[ .]*(:.*)?\Z", re.DOTALL)
"""What file systems that fold names take for `.git`; git itself refuses the same ones everywhere."""


@plain(slots=True, frozen=True)
class Boundary:
    """What one session may do below one root. `root` is the root's absolute path, for absolute `fs_roots` and patterns.

    `policies` are further ones, each of which must allow too. `folds_case`: names differ only up to case here. `walls`
    are directories that may be written only as roots of their own, if at all.
    """

    root: str
    capability: Capability = UNLIMITED
    policy: Policy = NO_POLICY
    policies: tuple[Policy, ...] = ()
    folds_case: bool = False
    walls: tuple[RepoPath, ...] = ()

    def moved_to(self, root: str, walls: tuple[RepoPath, ...] = ()) -> Boundary:
        """The same powers over another root: what was named by its whole path stays where it is."""
        named = self.capability.fs_roots
        whole = None if named is None else tuple(os.path.normpath(os.path.join(self.root, one)) for one in named)
        return replace(self, root=root, capability=replace(self.capability, fs_roots=whole), walls=walls)

    def narrowed(self, capability: Capability, policy: Policy) -> Boundary:
        """What both this boundary and another one over the same root allow."""
        other = replace(self, capability=capability)
        roots = None if self._admits_all and other._admits_all else tuple(_overlap(self._bases(), other._bases()))
        limits = replace(both(self.capability, capability), fs_roots=roots)
        return replace(self, capability=limits, policies=(*self.policies, policy))

    @property
    def _admits_all(self) -> bool:
        return self.capability.fs_roots is None

    def check_op(self, op: FsOp) -> None:
        allowed = self.capability.allowed_fs_ops
        if allowed is not None and op not in allowed:
            raise Refused("forbidden", "fs_op_not_allowed", f"This session may not {op}.")

    def admits(self, op: FsOp, path: RepoPath) -> bool:
        """`path` is resolved: real names, no links left to follow."""
        return self._within_roots(path) and all(rule.verdict == "allow" for rule in self._rules(op, path))

    def check_path(self, op: FsOp, path: RepoPath) -> None:
        if not self._within_roots(path):
            raise Refused("forbidden", "path_not_allowed", f"{path} is outside what this session may touch.")
        if not self.admits(op, path):
            raise Refused("forbidden", "path_not_allowed", f"The policy does not let this session {op} {path}.")

    def check_write(self, op: FsOp, path: RepoPath) -> None:
        """File tools never write into git's own directory, whoever asks."""
        self.check_path(op, path)
        if path == ROOT or any(_is_git(name) for name in path.split("/")):
            raise Refused("forbidden", "path_not_allowed", f"{path} is not for file tools to change.")
        if any(path == wall or is_below(path, wall) or is_below(wall, path) for wall in self.walls):
            raise Refused("forbidden", "path_not_allowed", f"{path} is in a root mounted here that says otherwise.")

    def admits_everywhere(self, op: FsOp) -> bool:
        """Whether no path below the root is kept from this operation."""
        allowed = self.capability.allowed_fs_ops
        if (allowed is not None and op not in allowed) or not self._within_roots(ROOT):
            return False
        rules = (rule for policy in (self.policy, *self.policies) for rule in policy.rules)
        return not any(rule.verdict == "deny" and (rule.ops is None or op in rule.ops) for rule in rules)

    @property
    def has_policy(self) -> bool:
        """Whether paths below an admitted one may still be denied."""
        return any(policy.rules for policy in (self.policy, *self.policies))

    def _within_roots(self, path: RepoPath) -> bool:
        if self._admits_all:
            return True
        folded = RepoPath(self._folded(path))
        bases = [RepoPath(self._folded(base)) for base in self._bases()]
        return any(folded == base or is_below(folded, base) for base in bases)

    def _folded(self, name: str) -> str:
        return normalize("NFC", name.casefold()) if self.folds_case else name

    def _rules(self, op: FsOp, path: RepoPath) -> list[Rule]:
        """The deciding rule of each policy that has one."""
        policies = [policy for policy in (self.policy, *self.policies) if policy.rules]
        if not policies:
            return []
        whole = self.root.rstrip("/") + ("" if path == ROOT else f"/{path}")
        names = [self._folded(path), self._folded(whole)]
        found = [policy.decide(op, *names, fold=self._folded) for policy in policies]
        return [rule for rule in found if rule is not None]

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
            return parse_repo_path(one)
        except MulliganError:
            return None

    @property
    def allowed_roots(self) -> tuple[RepoPath, ...]:
        """The parts of this root that `fs_roots` allow."""
        return self._bases()

    def keeps_out_of_answers(self, op: FsOp, path: RepoPath) -> bool:
        """Whether a policy wants this content only as a blob. What a search finds is content that is read."""
        ops: tuple[FsOp, ...] = ("search", "read") if op == "search" else (op,)
        return any(rule.output == "blob" for one in ops for rule in self._rules(one, path))

    @property
    def inline_limit(self) -> int:
        """How many bytes may be answered inline."""
        cap = self.capability.max_inline_bytes
        return INLINE_LIMIT_BYTES if cap is None else min(INLINE_LIMIT_BYTES, cap)


def _is_git(name: str) -> bool:
    return _GIT_ELSEWHERE.match(_UNSEEN.sub("", name).casefold()) is not None


def _overlap(ones: tuple[RepoPath, ...], others: tuple[RepoPath, ...]) -> list[RepoPath]:
    """The parts of the tree that lie in both."""
    pairs = [(one, other) for one in ones for other in others]
    inner = [one if one == other or is_below(one, other) else other for one, other in pairs if _nested(one, other)]
    return list(dict.fromkeys(inner))


def _nested(one: RepoPath, other: RepoPath) -> bool:
    return one == other or is_below(one, other) or is_below(other, one)


def clamped(asked: int | None, ceiling: int | None) -> int | None:
    """The smaller of what was asked for and what is allowed: a request over the ceiling is cut, not refused."""
    if asked is None or ceiling is None:
        return ceiling if asked is None else asked
    return min(asked, ceiling)
