"""LangGraph with tools that are transactions, and its checkpoints in the same store: messages and files together.

Needs `pip install langgraph`. The model is LangChain's own fake, so this runs offline.
"""

from __future__ import annotations

import tempfile

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import mulligan
from mulligan.agents.langgraph import MulliganSaver, tools_for

WRITE = {"name": "write_file", "args": {"path": "notes.txt", "content": "by a graph\n"}, "id": "call_1"}
MODEL = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=[WRITE]), AIMessage("Noted.")]))

with tempfile.TemporaryDirectory() as folder, mulligan.open(folder, store="memory:") as m:
    session = m.session("review")
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [MODEL.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode(tools_for(session)))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    graph = builder.compile(checkpointer=MulliganSaver(m.store))

    thread: RunnableConfig = {"configurable": {"thread_id": "review"}}
    ended = graph.invoke({"messages": [HumanMessage("Take a note.")]}, thread)
    print("it says:     ", ended["messages"][-1].content)
    print("its file:    ", session.files.read("notes.txt").content.strip())
    print("checkpoints: ", len(list(graph.get_state_history(thread))))
    session.undo("call_1")  # by LangGraph's own id of the call
    print("undone:      ", session.files.glob("*"))
