"""Policies: rules that narrow a capability further. The last rule that matches decides; none matching allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mulligan.boundary.capability import FS_OPS
from mulligan.boundary.globs import compile_glob
from mulligan.values.faults import fault
from mulligan.values.paths import RepoPath


@dataclass(slots=True, frozen=True)
class Rule:
    """`ops` and `paths` None match everything. `output` "blob" keeps matching content out of inline answers."""

    verdict: Literal["allow", "deny"]
    ops: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    output: Literal["blob"] | None = None

    def matches(self, op: str, path: RepoPath) -> bool:
        if self.ops is not None and op not in self.ops:
            return False
        return self.paths is None or any(_pattern(pattern)(path) for pattern in self.paths)


@lru_cache(maxsize=512)
def _pattern(pattern: str) -> Any:
    """A pattern matches the paths it describes, and everything below a directory it describes."""
    matcher = compile_glob(pattern.strip("/"))

    def matches(path: RepoPath) -> bool:
        parts = path.split("/")
        return any(matcher("/".join(parts[: end + 1])) for end in range(len(parts)))

    return matches


@dataclass(slots=True, frozen=True)
class Policy:
    rules: tuple[Rule, ...] = ()

    def decide(self, op: str, path: RepoPath) -> Rule | None:
        """The rule that decides, or None when no rule speaks of this."""
        return next((rule for rule in reversed(self.rules) if rule.matches(op, path)), None)

    def to_json(self) -> list[dict[str, Any]]:
        return [_rule_to_json(rule) for rule in self.rules]


def _rule_to_json(rule: Rule) -> dict[str, Any]:
    body = {"verdict": rule.verdict, "ops": rule.ops, "paths": rule.paths, "output": rule.output}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in body.items() if value is not None
    }


NO_POLICY = Policy()


def parse_policy(body: object) -> Policy:
    """The one parser. Raises `invalid_params`."""
    if not isinstance(body, Sequence) or isinstance(body, str | bytes):
        raise fault("invalid_params", "A policy is a list of rules.")
    return Policy(tuple(_rule(one) for one in body))


def _rule(body: object) -> Rule:
    if not isinstance(body, Mapping) or set(body) - {"ops", "paths", "verdict", "output"}:
        raise fault("invalid_params", "A rule has the fields ops, paths, verdict and output.")
    verdict, output = body.get("verdict"), body.get("output")
    if verdict not in ("allow", "deny"):
        raise fault("invalid_params", "A rule's verdict is 'allow' or 'deny'.")
    if output not in (None, "blob"):
        raise fault("invalid_params", "A rule's output can only be 'blob'.")
    return Rule(verdict, _strings(body, "ops", FS_OPS), _strings(body, "paths", None), output)


def _strings(body: Mapping[str, object], name: str, allowed: tuple[str, ...] | None) -> tuple[str, ...] | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise fault("invalid_params", f"A rule's {name} are a list of strings.")
    wrong = [item for item in value if allowed is not None and item not in allowed]
    if wrong:
        raise fault("invalid_params", f"There is no operation {wrong[0]!r}.")
    return tuple(value)
