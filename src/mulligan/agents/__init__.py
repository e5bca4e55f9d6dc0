"""Agents: tools as transactions, the loop that runs them, and adapters for other frameworks.

`tools.Tool` is a tool, `runner.ToolRunner` runs each call as a transaction, `loop.Loop` asks the model and runs the
tools it wants. Read `runner` first. `providers` has the models, `coding_tools` the file and shell tools. `hooks`
records agents of other vendors; `langgraph`, `openai_agents` and `pydantic_ai` offer the tools to those frameworks.
"""
