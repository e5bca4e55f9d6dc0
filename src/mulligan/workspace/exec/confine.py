"""What the warden does to itself before the command starts: namespaces, mounts, capabilities, Landlock.

Runs in the launcher's bare interpreter. Each step that the machine refuses is named, so that the caller can say why.
"""

from __future__ import annotations

import socket
from typing import Any


class StepFailed(Exception):
    """The machine refused `step` with `errno`; nothing was run."""

    def __init__(self, step: str, errno: int) -> None:
        super().__init__(step)
        self.step = step
        self.errno = errno


class Rules:
    """What the command's own process must still do to itself just before it becomes the program."""

    def apply_to_self(self) -> None:
        """Give up what the sandbox takes away. Irreversible."""


def enter(confinement: dict[str, Any], channel: socket.socket) -> Rules:
    return Rules()
