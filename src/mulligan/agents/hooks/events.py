"""What an agent's hook says, as one value, whichever agent it is. Pure.

Each agent has its own names for the same few moments; the tables below are all that is known of them here. A tool that
no table names is one that may change anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any, Literal

from mulligan.values.canonical import decode
from mulligan.values.faults import MulliganError, fault
from mulligan.values.plain import plain

Kind = Literal["pre", "post", "failure", "prompt", "stop", "session_start", "session_end"]

KIND_OF: Mapping[str, Kind] = MappingProxyType(
    {
        "PreToolUse": "pre",
        "PostToolUse": "post",
        "PostToolUseFailure": "failure",
        "UserPromptSubmit": "prompt",
        "Stop": "stop",
        "StopFailure": "stop",
        "Interrupt": "stop",
        "SessionStart": "session_start",
        "SessionEnd": "session_end",
        "BeforeTool": "pre",
        "AfterTool": "post",
        "BeforeAgent": "prompt",
        "AfterAgent": "stop",
    }
)

_LOOKING = """
    Read Glob Grep LS NotebookRead WebFetch WebSearch TodoWrite TodoRead ToolSearch AskUserQuestion ListMcpResourcesTool
    ReadMcpResourceTool BashOutput TaskOutput TaskCreate TaskGet TaskList TaskUpdate
    read_file read_many_files list_directory glob grep_search search_file_content google_web_search web_fetch
    write_todos save_memory update_topic read_background_output list_background_processes
    view_image update_plan get_goal web_search request_user_input
"""
LOOKS_ONLY = frozenset(_LOOKING.split())
"""Tools that change no file: nothing is recorded for them."""

_PATH_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Edit": ("file_path",),
        "MultiEdit": ("file_path",),
        "Write": ("file_path",),
        "NotebookEdit": ("notebook_path",),
        "replace": ("file_path",),
        "write_file": ("file_path",),
    }
)
_PATCH_TARGET = re.compile(r"^\*\*\* (?:Add File|Update File|Delete File|Move to): (.+?)\s*$", re.MULTILINE)
_COMMAND_MAX = 4_000
_PROMPT_MAX = 100_000


@plain(slots=True, frozen=True)
class HookEvent:
    """One moment of an agent's work. `worker` names the part of the agent that works, if it is not the main one."""

    agent: str
    kind: Kind
    session: str
    cwd: str
    turn: str | None = None
    label: str | None = None
    tool: str | None = None
    input: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    transcript: str | None = None
    worker: str | None = None
    failed: str | None = None

    @property
    def looks_only(self) -> bool:
        return self.tool in LOOKS_ONLY

    def paths(self) -> list[str] | None:
        """The files that the tool will touch, absolute; None if that cannot be known."""
        if self.tool == "apply_patch":
            named = _PATCH_TARGET.findall(_text(self.input.get("command")) or _text(self.input.get("input")) or "")
            return [self._absolute(name) for name in named] or None
        keys = _PATH_KEYS.get(self.tool or "")
        found = [path for key in keys or () if (path := _text(self.input.get(key)))]
        return [self._absolute(path) for path in found] or None

    def _absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.cwd, path))

    @property
    def command(self) -> str | None:
        """What a shell was asked to run, for people to read."""
        text = _text(self.input.get("command")) or _text(self.input.get("cmd"))
        return None if text is None or self.tool == "apply_patch" else text[:_COMMAND_MAX]


def parse_event(agent: str, raw: bytes) -> HookEvent | None:
    """The event in what a hook was given. None for a moment that is of no interest; raises `invalid_params`."""
    try:
        body = decode(raw)
    except MulliganError:
        raise fault("invalid_params", f"The hook of {agent} was given no JSON.") from None
    kind = KIND_OF.get(body.get("hook_event_name", "")) if isinstance(body, dict) else None
    session = _text(body.get("session_id")) if kind is not None else None
    cwd = _text(body.get("cwd")) if kind is not None else None
    if kind is None or session is None or cwd is None or not os.path.isabs(cwd):
        return None
    tool_input = body.get("tool_input")
    prompt = _text(body.get("prompt"))
    return HookEvent(
        agent=agent,
        kind=kind,
        session=_id(session),
        cwd=cwd,
        turn=_optional_id(body.get("prompt_id") or body.get("turn_id")),
        label=_optional_id(body.get("tool_use_id")),
        tool=_optional_id(body.get("tool_name")),
        input=tool_input if isinstance(tool_input, dict) else {},
        prompt=None if prompt is None else prompt[:_PROMPT_MAX],
        transcript=_text(body.get("transcript_path")),
        worker=_optional_id(body.get("agent_id")),
        failed=(_text(body.get("error")) or "failed")[:200] if kind == "failure" else None,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _optional_id(value: object) -> str | None:
    return None if _text(value) is None else _id(str(value))


def _id(text: str) -> str:
    """Ids of others are theirs to choose; what could not be one of ours is made so that it can."""
    return "".join(char if char.isprintable() else "?" for char in text)[:256].strip() or "?"
