"""Servers: MCP, ACP and HTTP. Each translates its protocol to effects and undo operations.

`mcp` serves the tools to agent hosts; read `mcp/dispatch.py` first. `acp` serves Mulligan's own agent to editors, and
is a proxy around other agents; read `acp/agent.py` and `acp/relay.py` first. `http` serves the web timeline; read
`http/app.py` first. `auth` checks bearer tokens for HTTP.
"""
