"""Path globs for policies: `*` and `?` within a name, `**` across names, `[…]` one of a set."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache


@lru_cache(maxsize=512)
def compile_glob(pattern: str) -> Callable[[str], bool]:
    matcher = re.compile("".join(_parts(pattern)) + r"\Z", re.DOTALL)
    return lambda path: matcher.match(path) is not None


def _parts(pattern: str) -> list[str]:
    found, at = [], 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            found.append("(?:[^/]+/)*")
            at += 3
        elif rest.startswith("**"):
            found.append(".*")
            at += 2
        elif rest[0] in "*?":
            found.append("[^/]*" if rest[0] == "*" else "[^/]")
            at += 1
        else:
            token = _set(rest) if rest[0] == "[" else None
            found.append(token[0] if token else re.escape(rest[0]))
            at += token[1] if token else 1
    return found


def _set(rest: str) -> tuple[str, int] | None:
    """`[abc]`, `[!abc]`; None when the bracket is never closed and so stands for itself."""
    end = rest.find("]", 2)
    if end < 0:
        return None
    body = rest[1:end]
    negated = body.startswith(("!", "^"))
    chars = re.escape(body[1:] if negated else body).replace(r"\-", "-")
    return (f"[^/{chars}]" if negated else f"[{chars}]"), end + 1
