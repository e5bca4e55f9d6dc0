"""The command line. Importing this loads click and nothing heavy; a verb's module is loaded when the verb is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from mulligan.values.faults import MulliganError


class Verb(NamedTuple):
    """Where a verb lives, and what `mulligan --help` says of it without loading it."""

    module: str
    attribute: str
    summary: str


VERBS: dict[str, Verb] = {
    "status": Verb("mulligan.cli.looking", "status", "Say where things stand."),
    "log": Verb("mulligan.cli.looking", "log", "List calls and outside edits, newest first."),
    "show": Verb("mulligan.cli.looking", "show", "Show one call: its cause, its changes, its gaps."),
    "diff": Verb("mulligan.cli.looking", "diff", "Show what a call changed, as a diff."),
    "undo": Verb("mulligan.cli.returning", "undo", "Take back one call; later work stays."),
    "redo": Verb("mulligan.cli.returning", "redo", "Bring back what the last way back took away."),
    "restore": Verb("mulligan.cli.returning", "restore", "Put a call's files back to what they were before it."),
    "rollback": Verb("mulligan.cli.returning", "rollback", "Take back the last completed turn."),
    "rewind": Verb("mulligan.cli.returning", "rewind", "Take back everything from a call or a message on."),
    "fork": Verb("mulligan.cli.forking", "fork", "Start a child session, with a copy of the files if wanted."),
    "merge": Verb("mulligan.cli.forking", "merge", "Bring a fork's changes back."),
    "drop": Verb("mulligan.cli.forking", "drop", "Delete a fork's files."),
    "branches": Verb("mulligan.cli.forking", "branches", "List forks that have files of their own."),
    "pin": Verb("mulligan.cli.forking", "pin", "Never evict what a call needs."),
    "blame": Verb("mulligan.cli.looking", "blame", "Say which call and prompt wrote each line."),
    "cat": Verb("mulligan.cli.looking", "cat", "Print a file as it was before or after a call."),
    "coverage": Verb("mulligan.cli.looking", "coverage", "List what could not be captured."),
    "exec": Verb("mulligan.cli.executing", "exec_verb", "Run a command as a call; undo takes back what it did."),
    "run": Verb("mulligan.cli.executing", "run_verb", "Run any program; what it changes is one undoable call."),
    "call": Verb("mulligan.cli.calling", "call", "Perform any tool or effect as a transaction."),
    "sessions": Verb("mulligan.cli.sessions", "sessions_verb", "List sessions; show, close or reset one."),
    "compact": Verb(
        "mulligan.cli.sessions", "compact_verb", "Replace the older part of a session's talk by a summary."
    ),
    "export": Verb("mulligan.cli.bundles", "export_verb", "Write a session as one portable document."),
    "import": Verb("mulligan.cli.bundles", "import_verb", "Make a session from a bundle or another agent's file."),
    "demo": Verb("mulligan.cli.demo", "demo_verb", "Watch a scripted agent be undone, merged, redone and forked."),
    "hooks": Verb("mulligan.cli.hooks", "hooks", "Make the tools of Claude Code, Gemini CLI or Codex undoable."),
    "acp": Verb("mulligan.cli.acp", "acp_verb", "Be an agent for editors, or make another agent undoable."),
    "mcp": Verb("mulligan.cli.mcp", "mcp", "Serve the tools to an agent host over MCP."),
    "attach": Verb("mulligan.cli.clients", "attach_verb", "Follow a session's events as they happen."),
    "takeover": Verb("mulligan.cli.clients", "takeover_verb", "Take control of a session."),
    "token": Verb("mulligan.cli.token", "token_verb", "Make and end bearer tokens for clients."),
    "forget": Verb("mulligan.cli.forget", "forget_verb", "Erase the stored bytes of a path or a call."),
    "gc": Verb("mulligan.cli.forking", "gc", "Delete stored bytes that nothing needs."),
    "replay": Verb("mulligan.cli.replaying", "replay_verb", "Rebuild a session from its journal, and compare."),
    "verify": Verb("mulligan.cli.store", "verify_verb", "Check that every stored byte is what was written."),
    "doctor": Verb("mulligan.cli.doctor", "doctor_verb", "Say what this machine offers and what is missing."),
    "store": Verb("mulligan.cli.store", "store_verb", "Say where the store is and how large it may grow."),
    "du": Verb("mulligan.cli.store", "du_verb", "Show what the store takes, and what for."),
}


class LazyGroup(click.Group):
    """A group whose verbs are rows of a table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from importlib import import_module

        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command = getattr(import_module(verb.module), verb.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"mulligan {version('mulligan')}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version)
@click.pass_context
def cli(context: click.Context) -> None:
    """Everything a coding agent does to files, as a transaction: atomic, recorded, undoable."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command: 0 done, 1 conflicts or partly done, 2 bad usage, 3 integrity failure."""
    from mulligan.cli.errors import exit_code_of

    try:
        answer = cli.main(list(arguments), prog_name="mulligan", standalone_mode=False)
        sys.stdout.flush()
    except (MulliganError, click.ClickException, click.Abort, BrokenPipeError) as error:
        return exit_code_of(error, as_json="--json" in arguments)
    return answer if isinstance(answer, int) else 0


def main() -> None:
    sys.exit(run(sys.argv[1:]))
