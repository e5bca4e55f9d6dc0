"""Our tools under other people's loops: the real frameworks, a model on loopback, and every call a transaction."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, set_tracing_disabled
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import mulligan
from mulligan.agents import langgraph, openai_agents, pydantic_ai
from mulligan.agents.openai_agents import AgentsSession
from mulligan.agents.tools import AnyTool, Tool, ToolContext
from mulligan.api import Mulligan
from mulligan.testing.agents import mock_model

WRITE = {"path": "a.txt", "content": "by a framework\n"}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


def undone(opened: Mulligan, tmp_path: Path, call: str) -> bool:
    """The file is there, and `undo` by the framework's own id of the call takes it away."""
    file = tmp_path / "work" / "a.txt"
    assert file.read_text() == WRITE["content"]
    assert opened.session("s").undo(call).ok
    return not file.exists()


def test_openai_agents_runs_our_tools_as_calls(opened: Mulligan, tmp_path: Path) -> None:
    set_tracing_disabled(True)
    session = opened.session("s")

    async def go() -> str:
        with mock_model("write_file", WRITE) as model:
            client = AsyncOpenAI(base_url=f"{model.address}/v1", api_key="k")
            spoken = OpenAIChatCompletionsModel("mock", client)
            agent = Agent("coder", model=spoken, tools=list(openai_agents.tools_for(session)))
            config = RunConfig(model_settings=ModelSettings(), tracing_disabled=True)
            done = Runner.run_streamed(agent, "go", session=AgentsSession(session), run_config=config)
            async for _ in done.stream_events():
                pass
            await client.close()
            return str(done.final_output)

    assert asyncio.run(go()) == "done"
    roles = [message["role"] for message in session.messages()]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert undone(opened, tmp_path, "call_1")


class TestAgentsSession:
    def test_items_are_returned_unchanged_and_pop_removes_the_newest(self, opened: Mulligan) -> None:
        kept = AgentsSession(opened.session("s"))
        items: list[Any] = [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
        ]

        async def go() -> None:
            await kept.add_items(items)
            assert await kept.get_items() == items
            assert await kept.get_items(limit=2) == items[2:]
            assert await kept.pop_item() == items[-1]
            assert await kept.get_items() == items[:-1]
            await kept.clear_session()
            assert (await kept.get_items(), await kept.pop_item()) == ([], None)

        asyncio.run(go())

    def test_pop_removes_one_item_of_a_message_with_several(self, opened: Mulligan) -> None:
        session = opened.session("s")
        calls = [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("one", "two")
        ]
        session.inject({"role": "assistant", "content": "both", "tool_calls": calls})
        kept = AgentsSession(session)

        async def go() -> None:
            items = await kept.get_items()
            assert len(items) > 1
            assert await kept.pop_item() == items[-1]
            assert await kept.get_items() == items[:-1]

        asyncio.run(go())

    def test_messages_of_other_interfaces_are_in_the_session(self, opened: Mulligan) -> None:
        session = opened.session("s")
        session.inject({"role": "user", "content": "said before"})
        assert asyncio.run(AgentsSession(session).get_items()) == [{"role": "user", "content": "said before"}]


def test_pydantic_ai_runs_our_tools_as_calls(opened: Mulligan, tmp_path: Path) -> None:
    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(messages) > 1:
            return ModelResponse(parts=[TextPart("done")])
        assert {"write_file", "edit_file", "shell"} <= {tool.name for tool in info.function_tools}
        return ModelResponse(parts=[ToolCallPart("write_file", WRITE, tool_call_id="call_1")])

    agent = PydanticAgent(FunctionModel(model), tools=pydantic_ai.tools_for(opened.session("s")))
    assert asyncio.run(agent.run("go")).output == "done"
    assert undone(opened, tmp_path, "call_1")


def test_langgraph_runs_our_tools_as_calls(opened: Mulligan, tmp_path: Path) -> None:
    node = ToolNode(langgraph.tools_for(opened.session("s")))
    call = {"name": "write_file", "args": WRITE, "id": "call_1", "type": "tool_call"}
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=[call])]))
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("tools", node)
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    builder.add_edge("tools", END)
    graph = builder.compile(checkpointer=langgraph.MulliganSaver(opened.store))
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    ended = graph.invoke({"messages": [HumanMessage("go")]}, config)
    assert isinstance(ended["messages"][-1], ToolMessage)
    assert undone(opened, tmp_path, "call_1")


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_langgraph_gets_the_error_of_a_failed_tool_and_continues(opened: Mulligan, tmp_path: Path, how: str) -> None:
    def half(context: ToolContext) -> None:
        """Break in the middle."""
        context.filesystem.write("a.txt", "half")
        raise ValueError("broke")

    (tool,) = langgraph.tools_for(opened.session("s"), [half])
    call = {"name": "half", "args": {}, "id": "call_1", "type": "tool_call"}
    said = asyncio.run(tool.ainvoke(call)) if how == "ainvoke" else tool.invoke(call)
    assert (said.status, said.content) == ("error", "half failed: broke")
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("tools_for", [openai_agents.tools_for, pydantic_ai.tools_for, langgraph.tools_for])
def test_custom_tools_are_offered_with_their_own_descriptions(opened: Mulligan, tools_for: Any) -> None:
    def add(left: int, right: int) -> str:
        """Adds."""
        return str(left + right)

    offered: tuple[AnyTool, ...] = (add, Tool("add", "Adds.", add))
    for given in offered:
        (tool,) = tools_for(opened.session("s"), [given])
        assert (tool.name, tool.description) == ("add", "Adds.")


@pytest.mark.req("D12.adapter_names_its_extra")
@pytest.mark.parametrize(
    ("adapter", "framework", "extra"),
    [
        ("langgraph", "langgraph", "langgraph"),
        ("openai_agents", "agents", "openai-agents"),
        ("pydantic_ai", "pydantic_ai", "pydantic-ai"),
    ],
)
def test_an_adapter_whose_framework_is_missing_names_the_extra_to_install(
    adapter: str, framework: str, extra: str
) -> None:
    # None in sys.modules makes Python say that the module does not exist.
    program = f"import sys; sys.modules[{framework!r}] = None; import mulligan.agents.{adapter}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install 'mulligan[{extra}]'" in done.stderr.splitlines()[-1]
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        assert extra in tomllib.load(file)["project"]["optional-dependencies"]
