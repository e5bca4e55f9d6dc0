"""`mulligan acp`: our own agent for editors that speak the Agent Client Protocol, or a proxy around another agent."""

from __future__ import annotations

import sys

import click

from mulligan.cli.options import Common, common_options


@click.command("acp", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--provider", metavar="NAME[:MODEL]", help="Our own agent: openai, litellm, claude or mock.")
@click.option("--mode", type=click.Choice(["ask", "auto", "read"]), default="auto", show_default=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@common_options
def acp_verb(common: Common, provider: str | None, mode: str, command: tuple[str, ...]) -> int:
    """Be an agent on stdio for an editor or client that speaks the Agent Client Protocol.

    With `-- COMMAND…`, run that agent instead and stand between it and the client: what it does to files is recorded,
    and the client can roll it back.
    """
    if command:
        from mulligan.servers.acp.proxy import run_proxy

        return run_proxy(list(command), root=common.root, store=common.store)
    _serve(common, provider, mode)
    return 0


def _serve(common: Common, provider: str | None, mode: str) -> None:
    from importlib.metadata import version

    from mulligan.looping import PromptWork, chosen_provider
    from mulligan.opening import Mulligan
    from mulligan.opening import open as open_folder
    from mulligan.servers.acp.agent import AcpAgent, Means
    from mulligan.servers.acp.wire import Wire

    opened: list[Mulligan] = []

    def opening(folder: str) -> Mulligan:
        opened.append(open_folder(folder, store=common.store))
        return opened[-1]

    agent = AcpAgent(Means(opening, PromptWork(chosen_provider(provider)), version("mulligan"), mode))
    agent.wire = Wire(sys.stdin.buffer, sys.stdout.buffer, agent.handle)
    try:
        agent.wire.serve()
    finally:
        for one in opened:
            one.close()
