"""The OpenAI Agents SDK with tools that are transactions, and its conversation kept in a session.

Needs `pip install openai-agents`. The model is a stand-in on loopback, so this runs offline; leave `model=` out and it
is OpenAI's.
"""

from __future__ import annotations

import asyncio
import tempfile

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

import mulligan
from mulligan.agents.openai_agents import AgentsSession, tools_for
from mulligan.testing.agents import mock_model


async def ask(prompt: str, session: mulligan.DurableSession, address: str) -> str:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        model = OpenAIChatCompletionsModel("stand-in", client)
        agent = Agent("coder", tools=[*tools_for(session)], model=model)
        run = Runner.run_streamed(agent, prompt, session=AgentsSession(session))
        async for _ in run.stream_events():
            pass
        return str(run.final_output)


set_tracing_disabled(True)
wanted = {"path": "notes.txt", "content": "by an agent of the SDK\n"}
with tempfile.TemporaryDirectory() as folder, mulligan.open(folder, store="memory:") as m:
    session = m.session("review")
    with mock_model("write_file", wanted) as model:
        said = asyncio.run(ask("Take a note.", session, model.address))
    print("it says:  ", said)
    print("messages: ", [message["role"] for message in session.messages()])
    print("its file: ", session.files.read("notes.txt").content.strip())
    session.undo("call_1")  # by the SDK's own id of the call
    print("undone:   ", session.files.glob("*"))
