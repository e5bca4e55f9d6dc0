"""LangGraph on our store: judged by LangGraph's own published kit, and by a graph that is stopped and goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

import mulligan
from mulligan.agents.langgraph import MulliganSaver
from mulligan.session.tables import GRAPH_CHECKPOINTS, GRAPH_VALUES, GRAPH_WRITES
from mulligan.values.errors import MulliganError

CAPABILITIES = 8


@pytest.mark.parametrize("store", ["memory:", "directory"])
def test_langgraphs_conformance_kit_passes_for_every_capability(tmp_path: Path, store: str) -> None:
    @checkpointer_test(name=f"mulligan {store}")
    async def ours() -> AsyncGenerator[MulliganSaver, None]:
        where = store if store == "memory:" else str(tmp_path / os.urandom(4).hex())
        (tmp_path / "root").mkdir(exist_ok=True)
        with mulligan.open(str(tmp_path / "root"), store=where) as opened:
            yield MulliganSaver(opened.store)

    report = asyncio.run(validate(ours))
    assert {name: result.failures for name, result in report.results.items() if result.passed is not True} == {}
    assert len(report.results) == CAPABILITIES


class State(TypedDict):
    steps: Annotated[list[str], lambda left, right: left + right]


def graph(saver: MulliganSaver) -> Any:
    builder = StateGraph(State)
    builder.add_node("one", lambda state: {"steps": ["one"]})
    builder.add_node("ask", lambda state: {"steps": [interrupt("may I?")]})
    builder.add_edge(START, "one")
    builder.add_edge("one", "ask")
    builder.add_edge("ask", END)
    return builder.compile(checkpointer=saver)


CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}

FIRST_HALF = """
import sys
import mulligan
from tests.agents.test_langgraph import CONFIG, graph
from mulligan.agents.langgraph import MulliganSaver
opened = mulligan.open(sys.argv[1], store=sys.argv[2])
print(graph(MulliganSaver(opened.store)).invoke({"steps": ["zero"]}, CONFIG)["steps"], flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_graph_continues_after_its_process_was_killed(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    root.mkdir()
    command = [sys.executable, "-c", FIRST_HALF, str(root), str(home)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    died = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert (died.returncode, died.stdout.strip()) == (-9, "['zero', 'one']")
    with mulligan.open(str(root), store=str(home)) as opened:
        assert graph(MulliganSaver(opened.store)).invoke(Command(resume="yes"), CONFIG)["steps"] == [
            "zero",
            "one",
            "yes",
        ]


def test_values_are_stored_once_and_deleted_with_their_last_checkpoint(tmp_path: Path) -> None:
    with mulligan.open(str(tmp_path), store="memory:") as opened:
        saver = MulliganSaver(opened.store)
        made = graph(saver)
        made.invoke({"steps": ["x" * 10_000]}, CONFIG)
        assert len(list(made.get_state_history(CONFIG))) > 1
        saver.prune(["t"])
        assert len(list(saver.list(CONFIG))) == 1
        assert made.get_state(CONFIG).values["steps"] == ["x" * 10_000, "one"]
        saver.delete_thread("t")
        with opened.store.read() as tx:
            assert (tx.count(GRAPH_CHECKPOINTS), tx.count(GRAPH_VALUES), tx.count(GRAPH_WRITES)) == (0, 0, 0)


def test_an_unknown_pruning_strategy_is_refused(tmp_path: Path) -> None:
    with mulligan.open(str(tmp_path), store="memory:") as opened:
        with pytest.raises(MulliganError) as caught:
            MulliganSaver(opened.store).prune(["t"], strategy="newest")
        assert caught.value.code == "invalid_params"
