"""What is to be run: words, folder, environment, input, and how far it is trusted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from mulligan.values.paths import is_inside
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused

SURVIVORS_LINGER_S = 0.2
"""How long a descendant may outlive the command itself before it is killed: long enough for a `tee` to finish."""

_ENV_NAMES = frozenset(b"PATH HOME USER SHELL LANG TERM TZ TMPDIR".split())
_ENV_PREFIX = b"LC_"


@plain(slots=True, frozen=True)
class Command:
    """A program to run inside `root`, both absolute and real. `env` is the whole environment it will see.

    `background`: descendants may live on after the first process ended; the run ends with the last of them.
    `stdin_fd`: without `stdin`, the command reads this descriptor of ours.
    `terminal`: standard streams and controlling terminal are ours, nothing is captured (`stdin` must be None).
    """

    argv: tuple[bytes, ...]
    root: bytes
    cwd: bytes
    env: Mapping[bytes, bytes] = field(default_factory=dict)
    stdin: bytes | None = None
    stdin_fd: int | None = None
    background: bool = False
    terminal: bool = False
    sandbox: Literal["none", "workspace"] = "none"
    network: Literal["full", "none"] = "full"
    linger_s: float = SURVIVORS_LINGER_S


def command(
    argv: list[str] | tuple[str, ...],
    root: str | bytes,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Command:
    """A captured command with the allowed part of our environment. Refuses an empty argv and a cwd outside the root."""
    if not argv:
        raise Refused("error", "argv_empty", "A command needs at least a program name.")
    words = tuple(os.fsencode(word) for word in argv)
    if any(b"\0" in word for word in words):
        raise Refused("error", "invalid_params", "A command's words cannot contain NUL.")
    real_root = os.path.realpath(os.fsencode(root))
    return Command(
        argv=words,
        root=real_root,
        cwd=_folder_inside(real_root, cwd),
        env=allowed_environment(os.environb) | {os.fsencode(k): os.fsencode(v) for k, v in (env or {}).items()},
        stdin=stdin,
    )


def allowed_environment(whole: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The part of an environment that a command sees without being given it: no tokens, no keys."""
    return {k: whole[k] for k in whole if k in _ENV_NAMES or k.startswith(_ENV_PREFIX)}


def _folder_inside(root: bytes, cwd: str | None) -> bytes:
    folder = os.path.realpath(os.path.join(root, os.fsencode(cwd or ".")))
    if not is_inside(folder, root):
        raise Refused("forbidden", "path_not_allowed", "A command runs inside the root.", path=cwd)
    if not os.path.isdir(folder):
        raise Refused("error", "not_a_directory", f"{cwd!r} is not a folder.", path=cwd)
    return folder
