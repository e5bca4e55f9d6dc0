"""The Model Context Protocol (MCP): Mulligan's own loop on stdio, the official SDK over HTTP, one table of tools.

`dispatch.Toolbox` runs a tool call; read it first. `stdio.StdioServer` and `http.HttpTools` are the transports,
`protocol` has the differences between protocol revisions, and `table` makes `tools.json` from the tools themselves.
"""
