"""The same tool asked for through every provider's path leaves the same state. The SDKs are real, models are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import (
    ExecutionState,
    Filesystem,
    HostFilesystem,
    Plan,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
    VisibilityExpansionRequired,
)
from mulligan.testing import (
    contents_of,
    create_execution_state,
    execute_tool,
    execute_via_claude_sdk,
    execute_via_litellm,
    execute_via_openai,
    snapshots_equivalent,
)

AnyTool = Tool[Any, Any]
Path_ = Callable[[AnyTool, ExecutionState, dict[str, Any]], ToolResult[Any]]

PATHS: dict[str, Path_] = {
    "in-process": execute_tool,
    "responses": execute_via_openai,
    "chat": lambda tool, state, params: execute_via_openai(tool, state, params, api="chat"),
    "litellm": execute_via_litellm,
    "claude": execute_via_claude_sdk,
}
# The Claude Agent SDK brings the program Claude Code, and runs it.
NAMES = [pytest.param(path, marks=pytest.mark.hosts) if path == "claude" else pytest.param(path) for path in PATHS]
ENDINGS = ("success", "value", "raises", "fails", "validation", "wrong arguments", "visibility", "async")


@pytest.fixture(autouse=True)
def _no_event_loop_is_left() -> Iterator[None]:
    """LiteLLM takes the thread's event loop, which makes one, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def tool_that(ending: str) -> AnyTool:
    def handler(text: str, *, context: ToolContext) -> Any:
        assert context.filesystem is not None
        context.filesystem.write("a.txt", text)
        context.filesystem.delete("gone.txt")
        context.session.broadcast(Plan(text))
        if ending == "raises":
            raise RuntimeError("boom")
        if ending == "validation":
            raise mulligan.ToolValidationError("no")
        if ending == "visibility":
            raise VisibilityExpansionRequired("more")
        return ToolResult("told", Plan("value") if ending == "value" else None, success=ending != "fails")

    async def later(text: str, *, context: ToolContext) -> Any:
        await asyncio.sleep(0)
        return handler(text, context=context)

    return Tool("write_it", "Writes it.", later if ending == "async" else handler)


@dataclass
class Ended:
    result: ToolResult[Any] | str
    state: ExecutionState


def ended(path: str, ending: str, state: ExecutionState) -> Ended:
    files = state.resources.get(Filesystem)
    assert files is not None
    files.write("gone.txt", "there")
    state.session[Plan].seed(Plan("before"))
    params = {"text": 3} if ending == "wrong arguments" else {"text": "new"}
    try:
        return Ended(PATHS[path](tool_that(ending), state, params), state)
    except VisibilityExpansionRequired:
        return Ended("visibility", state)


@pytest.mark.req(
    "S4.accept.adapter_parity",
    "D12.adapter_parity",
    "S4.principle.same_across_adapters",
    "S4.tx.runner_used_by_openai_litellm",
    "S4.tx.runner_used_by_claude_sdk",
    "D12.testing.execute_via_openai",
    "D12.testing.execute_via_claude_sdk",
)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("path", NAMES[1:])
def test_a_tool_call_through_every_provider_leaves_the_same_state(path: str, ending: str) -> None:
    here, there = (ended(one, ending, create_execution_state()) for one in ("in-process", path))
    assert snapshots_equivalent(here.state.snapshot(), there.state.snapshot())
    if (path, ending) == ("claude", "wrong arguments"):
        # Claude's SDK looks at the arguments itself, so the call never was.
        assert isinstance(there.result, ToolResult) and not there.result.success
        return
    assert there.result == here.result
    logs = [[entry.result for entry in one.state.session[ToolInvoked].all()] for one in (here, there)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("ending", ["success", "raises"])
@pytest.mark.parametrize("path", NAMES)
def test_a_tool_call_through_every_provider_leaves_the_same_files(path: str, ending: str, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "durable").mkdir()
    with (
        HostFilesystem(tmp_path / "host") as files,
        mulligan.open(str(tmp_path / "durable"), store=str(tmp_path / "store")) as m,
    ):
        ended(path, ending, create_execution_state({Filesystem: files}))
        ended(path, ending, m.session().execution_state())
    expected = {"a.txt": b"new"} if ending == "success" else {"gone.txt": b"there"}
    assert contents_of(tmp_path / "host") == contents_of(tmp_path / "durable") == expected
