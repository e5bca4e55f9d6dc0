"""The tools over MCP: one table, a lean loop of our own on stdio, and the official SDK over HTTP."""
