"""What a command may reach: stub."""

from __future__ import annotations

from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.spawn import Extras


def confined(command: Command, extras: Extras) -> Extras:
    return extras


def describe(command: Command) -> str:
    return "none"
