"""What the client is shown of a run: text, tool calls with the files they touch, and how they ended. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mulligan.session.known import UPDATE_PLAN, Plan
from mulligan.session.messages import as_text, calls_in, results_in
from mulligan.session.transcript import text_of

Update = dict[str, Any]

_KINDS = {
    "read_file": "read",
    "read_blob": "read",
    "list_dir": "read",
    "grep": "search",
    "glob": "search",
    "write_file": "edit",
    "edit_file": "edit",
    "apply_patch": "edit",
    "mkdir": "edit",
    "delete": "delete",
    "move": "move",
    "shell": "execute",
    "exec": "execute",
}


_STATUSES = {"pending": "pending", "blocked": "pending", "in_progress": "in_progress", "done": "completed"}


def kind_of(tool: str) -> str:
    return _KINDS.get(tool, "other")


def title_of(tool: str, arguments: Mapping[str, Any]) -> str:
    """`write_file a.py`, `shell make test`: the tool and what it is about."""
    about = arguments.get("path") or arguments.get("pattern") or arguments.get("command") or arguments.get("argv") or ""
    text = " ".join(map(str, about)) if isinstance(about, list) else str(about)
    return f"{tool} {text.splitlines()[0] if text else ''}".strip()[:200]


def said(text: str, role: str = "agent") -> Update:
    return {"sessionUpdate": f"{role}_message_chunk", "content": {"type": "text", "text": text}}


def plan(plan: Plan) -> Update:
    entries = [{"content": one.title, "priority": "medium", "status": _STATUSES[one.status]} for one in plan.steps]
    return {"sessionUpdate": "plan", "entries": entries}


def tool_call(id: str, tool: str, arguments: Mapping[str, Any], *, root: str, status: str = "in_progress") -> Update:
    update: Update = {
        "sessionUpdate": "tool_call",
        "toolCallId": id,
        "title": title_of(tool, arguments),
        "kind": kind_of(tool),
        "status": status,
        "rawInput": dict(arguments),
    }
    path = arguments.get("path")
    return update | ({"locations": [{"path": os.path.join(root, path)}]} if isinstance(path, str) and path else {})


def tool_ended(id: str, text: str, *, ok: bool, diffs: Sequence[Update] = ()) -> Update:
    return {
        "sessionUpdate": "tool_call_update",
        "toolCallId": id,
        "status": "completed" if ok else "failed",
        "content": [*diffs, {"type": "content", "content": {"type": "text", "text": text}}],
    }


def diff(path: str, before: str | None, after: str) -> Update:
    """A whole file before and after; without a before it is new."""
    return {"type": "diff", "path": path, "oldText": before, "newText": after}


def replayed(messages: Sequence[Mapping[str, Any]], root: str) -> Iterator[Update]:
    """A transcript as the updates that a client would have seen of it; how the plan stands is shown apart."""
    planning = {call.id for message in messages for call in calls_in(message) if call.name == UPDATE_PLAN}
    for message in messages:
        text = text_of(message)
        results = results_in(message)
        if message["role"] in ("user", "assistant") and text and not results:
            yield said(text, "user" if message["role"] == "user" else "agent")
        for call in (one for one in calls_in(message) if one.id not in planning):
            arguments = call.arguments if isinstance(call.arguments, Mapping) else _read(call.arguments)
            yield tool_call(call.id, call.name, arguments, root=root)
        for result in (one for one in results if one.id not in planning):
            yield tool_ended(result.id, as_text(result.content), ok=not result.failed)


def _read(arguments: object) -> Mapping[str, Any]:
    from mulligan.values.canonical import decode
    from mulligan.values.faults import MulliganError

    try:
        found = decode(arguments) if isinstance(arguments, str) else {}
    except MulliganError:
        return {}
    return found if isinstance(found, dict) else {}
