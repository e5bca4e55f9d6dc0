"""The OpenAI Agents SDK: Mulligan's tools for its agents, and its `Session` on a Mulligan transcript.

```python
with mulligan.open(".") as m:
    session = m.session("review")
    agent = Agent("coder", tools=tools_for(session))
    Runner.run_sync(agent, "tidy up", session=AgentsSession(session))
    session.rollback()
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from mulligan.agents.tools import needs_extra

try:
    from agents import FunctionTool
    from agents.items import TResponseInputItem
    from agents.memory import SessionSettings
    from agents.tool_context import ToolContext
except ModuleNotFoundError as error:
    raise needs_extra("The OpenAI Agents adapter", "openai-agents", error) from error

from mulligan.agents.coding_tools import runner_of
from mulligan.agents.providers.openai import as_items
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool
from mulligan.effects.session import DurableSession
from mulligan.history.checkpoint import ExecutionState
from mulligan.session.transcript_log import text_of

_VERBATIM = "openai_item"


def tools_for(
    session: DurableSession | ExecutionState, tools: Iterable[AnyTool] | None = None, *, profile: str = "openai"
) -> list[FunctionTool]:
    """The coding tools of a profile, or your own tools and functions; each call is a transaction of the session."""
    runner = runner_of(session, tools, adapter="openai_agents", profile=profile)
    return [_function_tool(runner, tool) for tool in runner.tool_registry.values()]


def _function_tool(runner: ToolRunner, tool: Tool[Any, Any]) -> FunctionTool:
    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        result = await runner.aexecute(ProviderToolCall(context.tool_call_id, tool.name, arguments))
        return result.message

    return FunctionTool(tool.name, tool.description, dict(tool.parameters), invoke, strict_json_schema=False)


class AgentsSession:
    """The SDK's items as messages of a session. A message holds the item unchanged, and its text for other readers."""

    session_settings: SessionSettings | None = None

    def __init__(self, session: DurableSession) -> None:
        self.session_id: str = session.id
        self._session = session

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """All items, or the newest `limit`, oldest first."""
        messages = await asyncio.to_thread(self._session.messages)
        items = [item for message in messages for item in _items_of(message)]
        return items if limit is None else items[max(0, len(items) - limit) :]

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Adds each item as one message."""
        for item in items:
            await asyncio.to_thread(self._session.inject, _message_of(item))

    async def pop_item(self) -> TResponseInputItem | None:
        """Removes and returns the newest item; None if there is none."""
        return await asyncio.to_thread(self._pop)

    def _pop(self) -> TResponseInputItem | None:
        messages = self._session.messages()
        items = _items_of(messages[-1]) if messages else []
        if messages:
            self._session.truncate(len(messages) - 1)
        # A message from another source may be several items, such as text and tool calls.
        for rest in items[:-1]:
            self._session.inject(_message_of(rest))
        return items[-1] if items else None

    async def clear_session(self) -> None:
        """Empties the transcript. The session's history keeps the messages."""
        await asyncio.to_thread(self._session.reset)


def _items_of(message: Mapping[str, Any]) -> list[TResponseInputItem]:
    kept = message.get(_VERBATIM)
    return [kept] if kept is not None else list(as_items([message]))  # type: ignore[arg-type]  # items are open objects


def _message_of(item: Any) -> dict[str, Any]:
    """An item as a message that other models and people can read."""
    kind = item.get("type")
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind == "function_call_output":
        said = {"role": "tool", "tool_call_id": item["call_id"], "content": text_of({"content": item["output"]})}
    else:
        said = {"role": item.get("role") or "assistant", "content": text_of({"content": item.get("content")})}
    return {**said, _VERBATIM: dict(item)}
