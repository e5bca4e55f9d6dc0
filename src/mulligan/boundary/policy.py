"""Policies: rules that narrow a capability.

The last rule that matches decides; if no rule matches, the path is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from mulligan.boundary.capability import FS_OPS, fields_to_json
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.globs import GlobError, parse_glob

# Maps the spellings of a name that a file system treats as equal to one spelling.
Fold = Callable[[str], str]


@fast_dataclass(slots=True, frozen=True)
class PolicyRule:
    """A rule for some operations on some paths; None for `ops` or `paths` matches all of them.

    `output` "blob" means that matching content is answered as a blob and never inline.
    """

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
    """A function that tells whether the pattern matches a path, or a directory above it.

    A pattern that begins with a slash may be anchored at the root of the workspace or at the root of the file system.
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


@fast_dataclass(slots=True, frozen=True)
class Policy:
    rules: tuple[PolicyRule, ...] = ()

    def decide(self, op: str, *names: str, fold: Fold = str) -> PolicyRule | None:
        """The rule that decides, or None if no rule matches this path.

        `names` are the path relative to the root and the absolute path, both already folded.
        """
        return next((rule for rule in reversed(self.rules) if rule.matches(op, names, fold)), None)

    def to_json(self) -> list[dict[str, Any]]:
        return [fields_to_json(rule) for rule in self.rules]


NO_POLICY = Policy()


def parse_policy(body: object) -> Policy:
    """Parse a policy. Raises `invalid_params`."""
    if not isinstance(body, Sequence) or isinstance(body, str | bytes):
        raise fault("invalid_params", "A policy is a list of rules.")
    return Policy(tuple(_rule(one) for one in body))


def _rule(body: object) -> PolicyRule:
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
    return PolicyRule(verdict, ops, paths, output)


def _strings(body: Mapping[str, object], name: str) -> tuple[str, ...] | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise fault("invalid_params", f"A rule's {name} are a list of strings.")
    return tuple(value)


def _check_pattern(pattern: str) -> None:
    """Refuse a pattern that can never match, because its author believes that it does something."""
    try:
        if not pattern.strip():
            raise GlobError("it is empty")
        parse_glob(_bare(pattern) or "*")
    except GlobError as error:
        raise fault("invalid_params", f"{pattern!r} is not a pattern for paths: {error}.") from None
