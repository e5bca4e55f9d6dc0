"""The fixtures of the tests of our own servers and hooks, used here with other people's programs."""

from tests.agents.hooks.conftest import workspace
from tests.servers.mcp.conftest import root

__all__ = ["root", "workspace"]
