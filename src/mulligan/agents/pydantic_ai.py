"""Pydantic AI: Mulligan's tools for its agents.

```python
with mulligan.open(".") as m:
    agent = Agent("openai:gpt-5.1", tools=tools_for(m.session("review")))
    agent.run_sync("tidy up")
```
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mulligan.agents.tools import needs_extra

try:
    from pydantic_ai import RunContext
    from pydantic_ai import Tool as AgentTool
except ModuleNotFoundError as error:
    raise needs_extra("The Pydantic AI adapter", "pydantic-ai", error) from error

from mulligan.agents.coding_tools import runner_of
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool
from mulligan.effects.session import DurableSession
from mulligan.history.checkpoint import ExecutionState


def tools_for(
    session: DurableSession | ExecutionState, tools: Iterable[AnyTool] | None = None, *, profile: str = "anthropic"
) -> list[AgentTool[Any]]:
    """The coding tools of a profile, or your own tools and functions; each call is a transaction of the session."""
    runner = runner_of(session, tools, adapter="pydantic_ai", profile=profile)
    return [_agent_tool(runner, tool) for tool in runner.tool_registry.values()]


def _agent_tool(runner: ToolRunner, tool: Tool[Any, Any]) -> AgentTool[Any]:
    async def invoke(context: RunContext[Any], **arguments: Any) -> str:
        result = await runner.aexecute(ProviderToolCall(context.tool_call_id or "", tool.name, arguments))
        return result.message

    schema = dict(tool.parameters)
    # Read-only tools may overlap; others run one at a time, so that each has its own position in the history.
    sequential = not tool.read_only
    return AgentTool.from_schema(
        invoke, tool.name, tool.description, json_schema=schema, takes_ctx=True, sequential=sequential
    )
