"""What a proxy can tell from the frames that pass it. Pure, and wary: an agent may send anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mulligan.servers.acp.returning import STRICT_CAPABILITIES
from mulligan.values.entries import Absent, Change
from mulligan.values.plain import plain

Frame = dict[str, Any]

ADDED_CAPABILITIES = {
    "session/rollback": "rollback",
    "session/redo": "redo",
    "session/restore_tool_call": "restoreToolCall",
    "session/fork": "fork",
}
"""What an agent that does not say so itself can do through us."""
ONLY_LOOK = ("read", "search", "switch_mode")
OVER = ("completed", "failed")
_SHOWN_PATHS = 40


@plain(slots=True, frozen=True)
class Announced:
    """A tool call, as far as its agent has told of it."""

    id: str
    kind: str = "other"
    title: str = ""
    status: str = "pending"
    paths: tuple[str, ...] = ()

    def updated(self, update: Mapping[str, Any]) -> Announced:
        """Every frame about a call says only what is new."""
        named = {name: value for name in ("kind", "title", "status") if isinstance(value := update.get(name), str)}
        paths = dict.fromkeys((*self.paths, *_paths_in(update.get("locations")), *_paths_in(update.get("content"))))
        return replace(self, paths=tuple(paths), **named)

    @property
    def only_looks(self) -> bool:
        return self.kind in ONLY_LOOK

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def may_run(self) -> bool:
        """An edit that has not begun yet is going to say what it edits."""
        return self.status != "pending" or self.kind != "edit" or bool(self.paths)


def _paths_in(items: object) -> list[str]:
    """Of locations, and of content that is a diff."""
    found = [item.get("path") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return [path for path in found if isinstance(path, str) and path and "\0" not in path]


def text_of_prompt(params: Mapping[str, Any]) -> str:
    blocks = params.get("prompt")
    texts = [block.get("text") for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def with_preface(frame: Mapping[str, Any], text: str) -> Frame:
    """The prompt with one block of text before its own."""
    params = dict(frame["params"])
    return {**frame, "params": {**params, "prompt": [{"type": "text", "text": text}, *params["prompt"]]}}


def capabilities_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent says it can do with sessions."""
    found = _object(_object(_object(answer, "result"), "agentCapabilities"), "sessionCapabilities")
    return {name: value for name, value in found.items() if value is not None and value is not False}


def with_ours(answer: Mapping[str, Any]) -> Frame:
    """The answer to `initialize` with our ways back; nothing that the agent says of itself is changed."""
    result = _object(answer, "result")
    able = _object(result, "agentCapabilities")
    theirs, meta = _object(able, "sessionCapabilities"), _object(able, "_meta")
    sessions = {**{name: {} for name in ADDED_CAPABILITIES.values()}, **theirs}
    ours = {**{name: {} for name in STRICT_CAPABILITIES}, **_object(meta, "mulligan")}
    able = {**able, "sessionCapabilities": sessions, "_meta": {**meta, "mulligan": ours}}
    return {**answer, "result": {**result, "agentCapabilities": able}}


def _object(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def folder_of(params: Mapping[str, Any]) -> str | None:
    """The folder a session works in, if it is one."""
    folder = params.get("cwd")
    return folder if isinstance(folder, str) and os.path.isabs(folder) and os.path.isdir(folder) else None


def told_of(changes: Iterable[Change]) -> str | None:
    """What a model is told of files that were put back since it last worked on them; None if there are none."""
    lines = [f"- {change.path} ({_how(change)})" for change in changes]
    if not lines:
        return None
    more = [f"- and {len(lines) - _SHOWN_PATHS} more"] if len(lines) > _SHOWN_PATHS else []
    return "\n".join(
        [
            "[Mulligan] Since your last turn, work of yours was undone or redone. These files have changed by that:",
            *lines[:_SHOWN_PATHS],
            *more,
            "What you remember of them may be wrong: read them again before you go on.",
        ]
    )


def _how(change: Change) -> str:
    if isinstance(change.after, Absent):
        return "removed"
    return "is there again" if isinstance(change.before, Absent) else "put back"


def told_of_fork(prompts: Sequence[str]) -> str:
    """What a model is told in a session that goes on from another one whose talk its agent cannot give it."""
    said = [f"{number}. {prompt}" for number, prompt in enumerate(prompts, 1)]
    head = "[Mulligan] This session goes on from another one in the same folder. You do not see that conversation"
    return "\n".join([f"{head}; there you were asked:", *said]) if said else f"{head}."
