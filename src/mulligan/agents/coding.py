"""The coding tools of a profile as tools of the loop: each acts on the files of one session."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from mulligan.agents.profiles import ToolSpec
from mulligan.agents.profiles import tools as specs
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import Tool
from mulligan.effects.receipt import Receipt, text_of
from mulligan.effects.session import Session
from mulligan.history.composite import ExecutionState
from mulligan.session.known import ToolResult
from mulligan.values.canonical import encode


def coding_tools(
    session: Session, profile: str = "anthropic", *, cancelled: threading.Event | None = None
) -> list[Tool[Any, Any]]:
    """Reading, writing, editing, searching and running commands, described as models of that profile know them.

    A tool whose receipt is not ok fails, so its call leaves nothing behind; so does one during which `cancelled` was
    set.
    """
    return [_tool(session, spec, cancelled or threading.Event()) for spec in specs(profile)]


def runner_of(session: Session, tools: Iterable[Tool[Any, Any]], *, adapter: str) -> ToolRunner:
    """Runs tools as calls of a session, for somebody else's loop."""
    state = ExecutionState(session, clock=session.clock)
    return ToolRunner(state, {tool.name: tool for tool in tools}, adapter=adapter)


def _tool(session: Session, spec: ToolSpec, cancelled: threading.Event) -> Tool[Any, Any]:
    def act(**params: Any) -> ToolResult[dict[str, Any]]:
        # Part of the runner's own call, which carries the provider's id.
        with session.call(spec.name) as call:
            receipt = call.perform(spec.effect, **params)
        return ToolResult(said(receipt), receipt.to_dict(), receipt.ok and not cancelled.is_set())

    return Tool(spec.name, spec.description, act, read_only=spec.read_only, schema=spec.parameters)


def said(receipt: Receipt) -> str:
    """What a model is told: the content where there is nothing but content, else the whole receipt."""
    body = receipt.to_dict()
    if receipt.ok and isinstance(content := body.get("content"), dict) and not body.get("truncated"):
        text = text_of(content)
        if text is not None:
            return text
    return encode(body).decode("utf-8")
