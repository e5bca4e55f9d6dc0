"""The agents whose hooks we know: where their settings are, which moments they tell, how an entry looks. Tables."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from mulligan.agents.hooks.events import LOOKS_ONLY
from mulligan.values.plain import plain

Scope = Literal["user", "project"]

CLIENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "client.py")
MARK = "mulligan/agents/hooks/client.py"
"""What every command of ours contains, wherever it was installed."""


@plain(slots=True, frozen=True)
class Host:
    """An agent. `home_variable` moves its folder in the home directory; `timeout` is in the unit it counts in."""

    name: str
    folder: str
    home_variable: str | None
    user_file: str
    project_file: str
    tool_events: tuple[str, ...]
    other_events: tuple[str, ...]
    timeout: int
    matcher: str | None = None
    named: bool = False

    @property
    def events(self) -> tuple[str, ...]:
        return (*self.tool_events, *self.other_events)

    def settings_path(self, scope: Scope, *, root: str, environ: Mapping[str, str]) -> str:
        if scope == "project":
            return os.path.join(os.path.abspath(root), self.folder, self.project_file)
        moved = environ.get(self.home_variable) if self.home_variable else None
        home = environ.get("HOME") or os.path.expanduser("~")
        return os.path.join(moved or os.path.join(home, self.folder), self.user_file)

    def entry(self, event: str, command: str) -> dict[str, Any]:
        """One item of the list of an event."""
        hook: dict[str, Any] = {"name": "mulligan"} if self.named else {}
        hook |= {"type": "command", "command": command, "timeout": self.timeout}
        matched = self.matcher is not None and event in self.tool_events
        return {"matcher": self.matcher, "hooks": [hook]} if matched else {"hooks": [hook]}


_NOT_LOOKING = "^(?!(?:" + "|".join(sorted(name for name in LOOKS_ONLY if name[0].isupper())) + ")$)"

HOSTS: Mapping[str, Host] = MappingProxyType(
    {
        "claude": Host(
            name="claude",
            folder=".claude",
            home_variable="CLAUDE_CONFIG_DIR",
            user_file="settings.json",
            project_file="settings.local.json",
            tool_events=("PreToolUse", "PostToolUse", "PostToolUseFailure"),
            other_events=("UserPromptSubmit", "Stop", "SessionStart", "SessionEnd"),
            timeout=5,
            matcher=_NOT_LOOKING,
        ),
        "gemini": Host(
            name="gemini",
            folder=".gemini",
            home_variable=None,
            user_file="settings.json",
            project_file="settings.json",
            tool_events=("BeforeTool", "AfterTool"),
            other_events=("BeforeAgent", "AfterAgent", "SessionStart", "SessionEnd"),
            timeout=5_000,
            named=True,
        ),
        "codex": Host(
            name="codex",
            folder=".codex",
            home_variable="CODEX_HOME",
            user_file="hooks.json",
            project_file="hooks.json",
            tool_events=("PreToolUse", "PostToolUse"),
            other_events=("UserPromptSubmit", "Stop", "SessionStart", "SessionEnd"),
            timeout=5,
        ),
    }
)


def command_for(host: str, store: str | None = None) -> str:
    """What the agent runs. Always ends with 0: an agent takes a missing program, or a code of 2, for a refusal."""
    words = [sys.executable, "-I", "-S", CLIENT, host, *([] if store is None else [store])]
    return " ".join(shlex.quote(word) for word in words) + " 2>/dev/null || true"
