"""The verdict: may a session do this operation on this resolved path? Each refusal has a code."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from unicodedata import normalize

from mulligan.boundary.capability import UNLIMITED, Capability, FsOp, both
from mulligan.boundary.policy import NO_POLICY, Policy, PolicyRule
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import INLINE_LIMIT_BYTES
from mulligan.values.paths import ROOT, RepoPath, is_below, is_within, parse_repo_path

# HFS+ ignores these characters in names.
_UNSEEN = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
# Names that case-folding file systems treat as `.git`. Git refuses the same names on every file system.
_GIT_ELSEWHERE = re.compile(r"(\.git|git~1)[ .]*(:.*)?\Z", re.DOTALL)


def path_denied(message: str, **fields: object) -> Refused:
    """The refusal of a path that the session may not use."""
    return Refused("forbidden", "path_not_allowed", message, **fields)


@fast_dataclass(slots=True, frozen=True)
class Boundary:
    """What one session may do below one root.

    `root` is the absolute path of the root; absolute `fs_roots` and patterns are compared with it. Each of the further
    `policies` must allow an operation too. `folds_case`: the file system ignores case. `mounted` are directories below
    this root that are mounted as roots of their own; only those roots may write there.
    """

    root: str
    capability: Capability = UNLIMITED
    policy: Policy = NO_POLICY
    policies: tuple[Policy, ...] = ()
    folds_case: bool = False
    mounted: tuple[RepoPath, ...] = ()

    def moved_to(self, root: str, mounted: tuple[RepoPath, ...] = ()) -> Boundary:
        """The same capability and policy for another root. Absolute paths in them keep their meaning."""
        named = self.capability.fs_roots
        whole = None if named is None else tuple(os.path.normpath(os.path.join(self.root, one)) for one in named)
        return replace(self, root=root, capability=replace(self.capability, fs_roots=whole), mounted=mounted)

    def narrowed(self, capability: Capability, policy: Policy) -> Boundary:
        """What this boundary and another one over the same root both allow."""
        other = replace(self, capability=capability)
        unbounded = self.capability.fs_roots is None and capability.fs_roots is None
        roots = None if unbounded else tuple(_overlap(self.allowed_roots, other.allowed_roots))
        limits = replace(both(self.capability, capability), fs_roots=roots)
        return replace(self, capability=limits, policies=(*self.policies, policy))

    def check_op(self, op: FsOp) -> None:
        allowed = self.capability.allowed_fs_ops
        if allowed is not None and op not in allowed:
            raise Refused("forbidden", "fs_op_not_allowed", f"This session may not {op}.")

    def allows(self, op: FsOp, path: RepoPath) -> bool:
        """Whether the operation is allowed. `path` must be resolved: no symbolic link is left to follow."""
        return self._within_roots(path) and all(rule.verdict == "allow" for rule in self._rules(op, path))

    def check_path(self, op: FsOp, path: RepoPath) -> None:
        if self.capability.fs_roots is not None and not self._within_roots(path):
            raise path_denied(f"{path} is outside what this session may touch.")
        if (self.policy.rules or self.policies) and not self.allows(op, path):
            raise path_denied(f"The policy does not let this session {op} {path}.")

    def check_write(self, op: FsOp, path: RepoPath) -> None:
        """Check a write. File tools never write into git's own directory, whatever the capability allows."""
        self.check_path(op, path)
        # Most paths have no "git" in them, so the check of each name is rarely needed.
        names = [] if path.isascii() and "git" not in path.lower() else _UNSEEN.sub("", path).casefold().split("/")
        if path == ROOT or (names and any(_GIT_ELSEWHERE.match(name) for name in names)):
            raise path_denied(f"File tools may not change {path}, because it belongs to git.")
        if self.mounted and any(is_within(path, root) or is_below(root, path) for root in self.mounted):
            raise path_denied(f"{path} is in a mounted root, which does not allow this.")

    def check_transfer(self, source: RepoPath, target: RepoPath) -> None:
        """Check a move or copy. Content that the session may not see stays where the policy hides it."""
        if not self.may_transfer(source, target):
            raise path_denied(f"The policy hides {source}, and would show it at {target}.")

    def may_transfer(self, source: RepoPath, target: RepoPath) -> bool:
        return not self.has_policy or self._shows(source) or not self._shows(target)

    def _shows(self, path: RepoPath) -> bool:
        return self.allows("read", path) and not self.keeps_out_of_answers("read", path)

    def allows_everywhere(self, op: FsOp) -> bool:
        """Whether this operation is allowed on every path below the root."""
        allowed = self.capability.allowed_fs_ops
        if (allowed is not None and op not in allowed) or not self._within_roots(ROOT):
            return False
        rules = (rule for policy in (self.policy, *self.policies) for rule in policy.rules)
        return not any(rule.verdict == "deny" and (rule.ops is None or op in rule.ops) for rule in rules)

    @property
    def is_unlimited(self) -> bool:
        """Whether every operation is allowed on every path, in this root and in all others."""
        limits = self.capability
        has_policy = bool(self.policy.rules or self.policies)
        return limits.fs_roots is None and limits.allowed_fs_ops is None and not has_policy

    @property
    def has_policy(self) -> bool:
        """Whether a policy may deny a path below an allowed one."""
        return any(policy.rules for policy in (self.policy, *self.policies))

    def _within_roots(self, path: RepoPath) -> bool:
        if self.capability.fs_roots is None:
            return True
        folded = RepoPath(self._folded(path))
        bases = [RepoPath(self._folded(base)) for base in self.allowed_roots]
        return any(is_within(folded, base) for base in bases)

    def _folded(self, name: str) -> str:
        return normalize("NFC", name.casefold()) if self.folds_case else name

    def _rules(self, op: FsOp, path: RepoPath) -> list[PolicyRule]:
        """For each policy with a matching rule, the rule that decides."""
        policies = [policy for policy in (self.policy, *self.policies) if policy.rules]
        if not policies:
            return []
        whole = self.root.rstrip("/") + ("" if path == ROOT else f"/{path}")
        names = [self._folded(path), self._folded(whole)]
        found = [policy.decide(op, *names, fold=self._folded) for policy in policies]
        return [rule for rule in found if rule is not None]

    @property
    def allowed_roots(self) -> tuple[RepoPath, ...]:
        """The parts of this root that `fs_roots` allow."""
        roots = self.capability.fs_roots
        return (ROOT,) if roots is None else tuple(base for one in roots if (base := self._base(one)) is not None)

    def _base(self, one: str) -> RepoPath | None:
        """A path of `fs_roots`, made relative to our root; None if it is outside. Whole names are compared."""
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

    def keeps_out_of_answers(self, op: FsOp, path: RepoPath) -> bool:
        """Whether a policy allows this content only as a blob. Results of a search count as content that is read."""
        ops: tuple[FsOp, ...] = ("search", "read") if op == "search" else (op,)
        return any(rule.output == "blob" for one in ops for rule in self._rules(one, path))

    @property
    def inline_limit(self) -> int:
        """The largest number of bytes that an answer may contain inline."""
        cap = self.capability.max_inline_bytes
        return INLINE_LIMIT_BYTES if cap is None else min(INLINE_LIMIT_BYTES, cap)


def _overlap(ones: tuple[RepoPath, ...], others: tuple[RepoPath, ...]) -> list[RepoPath]:
    """The parts of the tree that are in both."""
    pairs = [(one, other) for one in ones for other in others]
    inner = [(one, other) if is_within(one, other) else (other, one) for one, other in pairs]
    return list(dict.fromkeys(below for below, above in inner if is_within(below, above)))
