"""`mulligan acp`: our own agent for editors that speak the Agent Client Protocol, or a proxy around another agent."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from mulligan.cli.options import Common, options_saying
from mulligan.values.clock import SystemClock
from mulligan.values.faults import MulliganError

if TYPE_CHECKING:
    from mulligan.opening import Mulligan
    from mulligan.servers.acp.workspaces import Workspaces
    from mulligan.store.protocol import Store


@click.command("acp", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--provider", metavar="NAME[:MODEL]", help="Our own agent: openai, litellm, claude or mock.")
@click.option("--mode", type=click.Choice(["ask", "auto", "read"]), default="auto", show_default=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@options_saying(
    "Not used: the client names its sessions.",
    root="With a command: the folder to keep every session's record at. Default: the one its client works in.",
)
def acp_verb(common: Common, provider: str | None, mode: str, command: tuple[str, ...]) -> int:
    """Be an agent on stdio for an editor or client that speaks the Agent Client Protocol.

    With `-- COMMAND…`, run that agent instead and stand between it and the client: what it does to files is recorded,
    and the client can roll it back.
    """
    if command:
        return _stand_between(common, list(command))
    _serve(common, provider, mode)
    return 0


def _serve(common: Common, provider: str | None, mode: str) -> None:
    from importlib.metadata import version

    from mulligan.looping import PromptWork, chosen_provider
    from mulligan.servers.acp.agent import AcpAgent, Means
    from mulligan.servers.acp.wire import Wire

    with ExitStack() as opened:
        agent = AcpAgent(
            Means(_workspaces(common, opened), PromptWork(chosen_provider(provider)), version("mulligan"), mode)
        )
        agent.wire = Wire(sys.stdin.buffer, sys.stdout.buffer, agent.handle)
        agent.wire.serve()


def _stand_between(common: Common, command: list[str]) -> int:
    from mulligan.servers.acp.proxy import run_proxy

    opened = ExitStack()
    code = run_proxy(command, workspaces=_workspaces(common, opened), root=common.root)
    try:
        opened.close()
    except MulliganError as error:
        # The agent has ended as it has, whatever became of our store meanwhile.
        click.echo(f"mulligan: {error.message}", err=True)
    return code


def _workspaces(common: Common, opened: ExitStack) -> Workspaces:
    """Folders and their store, which are closed in the end."""
    from mulligan.servers.acp.workspaces import Workspaces

    def folder(path: str) -> Mulligan:
        from mulligan.opening import open as open_folder

        return opened.enter_context(open_folder(path, store=common.store))

    def store() -> Store:
        from mulligan.history.schema import SCHEMA
        from mulligan.opening import open_store

        found = open_store(common.store, SCHEMA, durability="process", clock=SystemClock())
        opened.callback(found.close)
        return found

    return Workspaces(folder, store)
