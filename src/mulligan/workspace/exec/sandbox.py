"""What a command may reach, as the caller asked; how it is done is in `confine`.

`sandbox="workspace"`: writes only inside the root and in temporary folders of its own; `.git/hooks` and `.git/config`
read-only, and `.git` cannot be moved away from under them. By mount namespace and Landlock together, because neither
covers what the other does: without both it is `sandbox_unavailable`.
`network="none"`: a network namespace with a loopback of its own, or, where there is none, no sockets at all; Unix
sockets are refused in both, since a path reaches through any network namespace. Pairs of connected sockets always work.
"""

from __future__ import annotations

import os

from mulligan.values.paths import is_inside
from mulligan.workspace.exec import bpf, kernel
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.spawn import Extras

_TEMPORARY = (b"/tmp", b"/var/tmp", b"/dev/shm")


def confined(command: Command, extras: Extras) -> Extras:
    """The extras of a way of catching, with the sandbox that the command asked for added."""
    if command.sandbox == "workspace":
        extras.confinement["cage"] = _cage(command)
    if command.network == "none":
        extras.confinement["no_network"] = True
        extras.program = bpf.program(kernel.MACHINE, notify=extras.listens, sockets="inet")
        extras.program_without_sockets = bpf.program(kernel.MACHINE, notify=extras.listens, sockets="none")
    return extras


def describe(command: Command) -> str:
    """How the receipt names it."""
    network = "" if command.network == "full" else ", network none"
    return command.sandbox + network


def _cage(command: Command) -> dict[str, list[bytes]]:
    own = os.path.realpath(command.env.get(b"TMPDIR", b"/tmp"))
    temporary = {path for path in (*_TEMPORARY, own) if os.path.isdir(path) and not os.path.islink(path)}
    outside = sorted(path for path in temporary if not is_inside(path, command.root))
    git = command.root + b"/.git"
    return {
        "writable": [command.root],
        "temporary": [path for path in outside if [other for other in outside if is_inside(path, other)] == [path]],
        "guarded_folders": [git] if not os.path.islink(git) else [],
        "guarded": [git + b"/hooks", git + b"/config"],
    }
