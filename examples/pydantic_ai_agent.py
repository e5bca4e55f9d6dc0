"""Pydantic AI with tools that are transactions: the coding tools, or functions of your own, as here.

Needs `pip install pydantic-ai-slim`. The model is Pydantic AI's own TestModel, so this runs offline.
"""

from __future__ import annotations

import tempfile

from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

import mulligan
from mulligan import ToolContext
from mulligan.agents.pydantic_ai import tools_for


def remember(fact: str, context: ToolContext) -> str:
    """Write down a fact."""
    context.filesystem.write("facts.txt", f"{fact}\n", mode="append")
    return "written down"


def forget(context: ToolContext) -> str:
    """Forget everything."""
    context.filesystem.delete("facts.txt")
    raise RuntimeError("on second thoughts, no")  # so the file is there as before


with tempfile.TemporaryDirectory() as folder, mulligan.open(folder, store="memory:") as m:
    session = m.session("review")
    agent = Agent(TestModel(), tools=tools_for(session, [remember, forget]))
    with session.turn("remember, then forget"):
        print("the agent:  ", agent.run_sync("Remember this, then forget it.").output)
    print("the file:   ", session.files.read("facts.txt").content.split())
    session.rollback()
    print("rolled back:", session.files.glob("*"))
