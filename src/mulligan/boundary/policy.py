"""Policies: rules that narrow a capability further. The last rule that matches decides; none matching allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from mulligan.boundary.capability import FS_OPS
from mulligan.values.faults import fault
from mulligan.values.globs import GlobError, parse_glob
from mulligan.values.plain import plain

Fold = Callable[[str], str]
"""What makes two spellings of one name equal, where a file system takes them for one."""


@plain(slots=True, frozen=True)
class Rule:
    """`ops` and `paths` None match everything. `output` "blob" keeps matching content out of inline answers."""

    verdict: Literal["allow", "deny"]
    ops: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    output: Literal["blob"] | None = None

    def matches(self, op: str, names: Sequence[str], fold: Fold) -> bool:
        if self.ops is not None and op not in self.ops:
            return False
        return self.paths is None or any(_matches(fold(pattern), names) for pattern in self.paths)


def _matches(pattern: str, names: Sequence[str]) -> bool:
    matcher = _matcher(pattern)
    return any(matcher(name) for name in names if pattern.startswith("/") or not name.startswith("/"))


@lru_cache(maxsize=512)
def _matcher(pattern: str) -> Callable[[str], bool]:
    """A pattern matches the paths it describes, and everything below a directory it describes.

    One that begins with a slash is anchored at the root of the workspace or that of the file system, as it happens.
    """
    bare = _bare(pattern)
    if not bare:
        return lambda path: not path.startswith("/")
    matches = parse_glob(bare).matches

    def found(path: str) -> bool:
        parts = path.lstrip("/").split("/")
        return any(matches("/".join(parts[: end + 1])) for end in range(len(parts)))

    return found


def _bare(pattern: str) -> str:
    return "/".join(name for name in pattern.split("/") if name not in ("", "."))


@plain(slots=True, frozen=True)
class Policy:
    rules: tuple[Rule, ...] = ()

    def decide(self, op: str, *names: str, fold: Fold = str) -> Rule | None:
        """The rule that decides, or None when no rule speaks of this path.

        `names` are what it is called below the root and from the top of the file system, both already folded.
        """
        return next((rule for rule in reversed(self.rules) if rule.matches(op, names, fold)), None)

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
    ops, paths = _strings(body, "ops"), _strings(body, "paths")
    for op in ops or ():
        if op not in FS_OPS:
            raise fault("invalid_params", f"There is no operation {op!r}.")
    for pattern in paths or ():
        _check_pattern(pattern)
    return Rule(verdict, ops, paths, output)


def _strings(body: Mapping[str, object], name: str) -> tuple[str, ...] | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise fault("invalid_params", f"A rule's {name} are a list of strings.")
    return tuple(value)


def _check_pattern(pattern: str) -> None:
    """A pattern that can never match is a rule that does not do what somebody thinks it does."""
    try:
        if not pattern.strip():
            raise GlobError("it is empty")
        parse_glob(_bare(pattern) or "*")
    except GlobError as error:
        raise fault("invalid_params", f"{pattern!r} is not a pattern for paths: {error}.") from None
