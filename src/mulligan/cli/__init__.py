"""The command line: one module for each group of verbs.

Read `VERBS` first: it names the module of each verb. `options` has the options that all verbs share and turns errors
into exit codes, `open_root` opens the store and the root, and `format` prints. Importing this package loads click and
nothing heavy; a verb's module is imported when the user calls the verb.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from mulligan.values import VERSION
from mulligan.values.errors import MulliganError


class Verb(NamedTuple):
    """The module and function of a verb, and its line in `mulligan --help`, which does not import the module."""

    module: str
    attribute: str
    summary: str


VERBS: dict[str, Verb] = {
    "status": Verb("mulligan.cli.inspect", "status", "Show the current state."),
    "log": Verb("mulligan.cli.inspect", "log", "List calls and outside edits, newest first."),
    "show": Verb("mulligan.cli.inspect", "show", "Show one call: its cause, its changes, what was not captured."),
    "diff": Verb("mulligan.cli.inspect", "diff", "Show what a call changed, as a diff."),
    "undo": Verb("mulligan.cli.undo", "undo", "Undo one call and keep later work."),
    "redo": Verb("mulligan.cli.undo", "redo", "Redo the last undo."),
    "restore": Verb("mulligan.cli.undo", "restore", "Put a call's files back to what they were before it."),
    "rollback": Verb("mulligan.cli.undo", "rollback", "Undo the last completed turn."),
    "rewind": Verb("mulligan.cli.undo", "rewind", "Undo everything from a call or a message on."),
    "fork": Verb("mulligan.cli.fork", "fork", "Start a child session, with --files copy on a copy of the files."),
    "merge": Verb("mulligan.cli.fork", "merge", "Apply a fork's changes to the files it was forked from."),
    "drop": Verb("mulligan.cli.fork", "drop", "Delete a fork's files."),
    "branches": Verb("mulligan.cli.fork", "branches", "List forks that have their own files."),
    "pin": Verb("mulligan.cli.store", "pin", "Protect a call from eviction."),
    "blame": Verb("mulligan.cli.inspect", "blame", "Show which call and prompt wrote each line."),
    "cat": Verb("mulligan.cli.inspect", "cat", "Print a file as it was before or after a call."),
    "coverage": Verb("mulligan.cli.inspect", "coverage", "List what Mulligan could not capture."),
    "exec": Verb("mulligan.cli.exec", "exec_verb", "Run a command as a call that can be undone."),
    "run": Verb("mulligan.cli.exec", "run_verb", "Run any program; its changes are one call that can be undone."),
    "call": Verb("mulligan.cli.exec", "call", "Perform any tool or effect as a transaction."),
    "sessions": Verb("mulligan.cli.sessions", "sessions_verb", "List sessions; show, close or reset one."),
    "compact": Verb("mulligan.cli.sessions", "compact_verb", "Summarize the older part of a session's transcript."),
    "export": Verb("mulligan.cli.sessions", "export_verb", "Write a session as one portable document."),
    "import": Verb("mulligan.cli.sessions", "import_verb", "Create a session from a bundle or an agent's file."),
    "demo": Verb(
        "mulligan.cli.demo", "demo_verb", "Watch Mulligan undo, merge, redo and fork a scripted agent's work."
    ),
    "install": Verb(
        "mulligan.cli.hooks", "install_host", "Set a host up: undo typed into its prompt, hooks, commands."
    ),
    "uninstall": Verb("mulligan.cli.hooks", "uninstall_host", "Remove what `install` added to a host."),
    "hooks": Verb("mulligan.cli.hooks", "hooks", "Make the tool calls of Claude Code, Gemini CLI or Codex undoable."),
    "acp": Verb("mulligan.cli.servers", "acp_verb", "Serve an agent to an editor, or make another agent undoable."),
    "mcp": Verb("mulligan.cli.servers", "mcp", "Serve the tools to an agent host over MCP."),
    "serve": Verb("mulligan.cli.serve", "serve_verb", "Serve the web timeline, the JSON API and MCP over HTTP."),
    "attach": Verb("mulligan.cli.sessions", "attach_verb", "Follow a session's events as they happen."),
    "takeover": Verb("mulligan.cli.sessions", "takeover_verb", "Take control of a session."),
    "token": Verb("mulligan.cli.servers", "token_verb", "Create, show and revoke bearer tokens for clients."),
    "forget": Verb("mulligan.cli.store", "forget_verb", "Erase the stored bytes of a path or a call."),
    "gc": Verb("mulligan.cli.store", "gc", "Delete stored bytes that nothing needs."),
    "replay": Verb("mulligan.cli.store", "replay_verb", "Rebuild a session from its journal and compare."),
    "verify": Verb("mulligan.cli.store", "verify_verb", "Check every stored byte."),
    "doctor": Verb("mulligan.cli.store", "doctor_verb", "Show what this machine offers and what is missing."),
    "store": Verb("mulligan.cli.store", "store_verb", "Show where the store is, and set how large it may grow."),
    "completions": Verb("mulligan.cli.store", "completions_verb", "Print the completions of a shell."),
    "du": Verb("mulligan.cli.store", "du_verb", "Show how much space the store uses, and what for."),
}


class LazyGroup(click.Group):
    """A group whose verbs are the rows of `VERBS`."""

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            # Imported here, because only a mistyped verb needs it.
            from difflib import get_close_matches

            from mulligan.values.text import visible

            near = get_close_matches(args[0], VERBS, n=3, cutoff=0.5)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"There is no verb {visible(args[0])!r}.{meant}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"mulligan {VERSION}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Everything a coding agent does to files, as a transaction: atomic, recorded, undoable."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command: 0 done, 1 conflicts or partly done, 2 bad usage, 3 integrity failure."""
    from mulligan.cli.options import exit_code_of

    try:
        answer = cli.main(list(arguments), prog_name="mulligan", standalone_mode=False)
        sys.stdout.flush()
    except (MulliganError, click.ClickException, click.Abort, BrokenPipeError) as error:
        return exit_code_of(error, as_json="--json" in arguments)
    return answer if isinstance(answer, int) else 0


def main() -> None:
    # Nearly all that a verb creates at first are modules, which stay. With Python's own threshold of 700 objects, the
    # collector would look at them dozens of times.
    gc.set_threshold(50_000)
    code = run(sys.argv[1:])
    # Python collects twice when it ends: a fifth of the time of a quick verb, and it frees nothing that matters.
    gc.disable()
    gc.freeze()
    sys.exit(code)
