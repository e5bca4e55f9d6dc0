"""Wires: MCP and ACP, each a thin translation to effects and ways back."""
