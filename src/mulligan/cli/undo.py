"""The undo operations: undo, redo, restore, rollback, rewind."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mulligan.cli.format import paint, print_json
from mulligan.cli.open_root import open_for_changes, path_in_any_root
from mulligan.cli.options import Common, ask, can_ask, common_options, text
from mulligan.history.outcome_text import outcome_lines, short
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.history.undo import UndoOptions, UndoResult
    from mulligan.values.paths import RepoPath

F = TypeVar("F", bound=Callable[..., Any])


def undo_options(function: F) -> F:
    for option in (
        click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing."),
        click.option(
            "--on-conflict",
            type=click.Choice(["merge", "overwrite", "refuse"]),
            default="merge",
            show_default=True,
            help="If somebody else changed the same file: merge, overwrite, or refuse.",
        ),
        click.option(
            "--git",
            type=click.Choice(["leave", "restore"]),
            default="leave",
            show_default=True,
            help="Whether to undo commits, branches and the index too.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask."),
    ):
        function = option(function)
    return function


def run_undo_operation(
    common: Common,
    act: Callable[[Any, UndoOptions], UndoResult],
    *,
    dry_run: bool,
    on_conflict: str,
    yes: bool,
    git: str = "leave",
    came: str = "restored",
) -> None:
    """Plans, asks on a terminal, applies, and prints the result. `came`: see `outcome_lines`."""
    from mulligan.history.undo import UndoOptions
    from mulligan.values.ids import SessionId

    asks = not (dry_run or yes) and can_ask(common)
    if on_conflict == "overwrite" and not (dry_run or yes or asks):
        raise click.UsageError("--on-conflict overwrite replaces other people's work; confirm with --yes.")
    session = None if common.session is None else SessionId(common.session)
    with open_for_changes(common) as opened:
        if asks:
            _ask(act(opened, UndoOptions(on_conflict, True, session, git)), came)  # type: ignore[arg-type]  # click checked both
        done = act(opened, UndoOptions(on_conflict, dry_run, session, git))  # type: ignore[arg-type]  # click checked both
    report(common, done, dry_run=dry_run, came=came)


def _ask(planned: UndoResult, came: str) -> None:
    """Shows the plan and asks; a plan that changes nothing needs no answer."""
    if not (_changes_something(planned) or planned.cancelled):
        return
    stops = ["would stop the turn that is still running"] if planned.cancelled else []
    for line in (*stops, *outcome_lines(planned, dry_run=True, came=came), *_replaced_lines(planned, dry_run=True)):
        click.echo(f"  {line}")
    ask("Go ahead?", default=not planned.overwrote_external)


def _changes_something(result: UndoResult) -> bool:
    plan = result.plan
    return result.talk is not None or (plan is not None and bool(plan.moves or plan.git_moves))


def _replaced_lines(result: UndoResult, *, dry_run: bool) -> list[str]:
    done = "would replace" if dry_run else "replaced"
    return [
        paint(f"{done} your version of {visible(path)}; the store keeps it", "yellow")
        for path in result.overwrote_external
    ]


def report(common: Common, done: UndoResult, *, dry_run: bool, came: str = "restored") -> None:
    if common.as_json:
        print_json(done.to_json())
    else:
        lines = outcome_lines(done, dry_run=dry_run, came=came)
        for line in lines or ["No files changed."]:
            click.echo(paint(line, "yellow") if line.startswith("left") else line)
        for line in _replaced_lines(done, dry_run=dry_run):
            click.echo(line)
        if done.call_id is not None and _changes_something(done):
            click.echo(paint(f"(`mulligan undo {short(done.call_id)}` undoes this)", "dim"))
    if not done.ok:
        raise click.exceptions.Exit(1)


_HUNK = re.compile(r"(.+):(\d{1,9})", re.DOTALL)
"""A path may contain colons; the number is after the last one."""


def _hunks(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for one in given:
        parts = _HUNK.fullmatch(one)
        if parts is None:
            raise click.BadParameter(f"{visible(one)} is not PATH:N; `mulligan diff CALL --json` lists the hunks.")
        found.setdefault(parts[1], []).append(int(parts[2]))
    return found


hunk_option = click.option(
    "--hunk",
    "hunks",
    multiple=True,
    callback=_hunks,
    metavar="PATH:N",
    help="Only hunk N of this path, counted from 0 as in `diff CALL --json`; may be repeated.",
)


def _parse_paths(opened: Mulligan, paths: Sequence[str]) -> list[RepoPath] | None:
    return [path_in_any_root(opened, path) for path in paths] or None


def _parse_hunks(opened: Mulligan, hunks: dict[str, list[int]]) -> dict[RepoPath, list[int]] | None:
    found: dict[RepoPath, list[int]] = {}
    for path, some in hunks.items():
        found.setdefault(path_in_any_root(opened, path), []).extend(some)
    return found or None


@click.command()
@click.argument("call", callback=text, required=False)
@click.option("--path", "paths", multiple=True, metavar="P", help="Only this path; may be repeated.")
@hunk_option
@undo_options
@common_options
def undo(common: Common, call: str | None, paths: tuple[str, ...], hunks: dict[str, list[int]], **options: Any) -> None:
    """Undo one call (default: the newest call that is not undone) and keep all later work."""
    from mulligan.history.undo import undo as going

    def act(opened: Mulligan, how: UndoOptions) -> UndoResult:
        some = _parse_hunks(opened, hunks)
        return going(opened.open_root, call, paths=_parse_paths(opened, paths), hunks=some, how=how)

    run_undo_operation(common, act, **options)


@click.command()
@undo_options
@common_options
def redo(common: Common, **options: Any) -> None:
    """Redo the last undo, restore, rollback or rewind."""
    from mulligan.history.undo import redo as going

    run_undo_operation(common, lambda opened, how: going(opened.open_root, how=how), **options)


@click.command()
@click.argument("call", callback=text)
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@hunk_option
@undo_options
@common_options
def restore(common: Common, call: str, paths: tuple[str, ...], hunks: dict[str, list[int]], **options: Any) -> None:
    """Put a call's files back to what they were before it."""
    from mulligan.history.undo import restore as going

    def act(opened: Mulligan, how: UndoOptions) -> UndoResult:
        some = _parse_hunks(opened, hunks)
        return going(opened.open_root, call, paths=_parse_paths(opened, paths), hunks=some, how=how)

    run_undo_operation(common, act, **options)


@click.command()
@click.option("--cancel-open", is_flag=True, help="Cancel the newest turn if it is still running.")
@undo_options
@common_options
def rollback(common: Common, cancel_open: bool, **options: Any) -> None:
    """Undo the last completed turn."""
    from mulligan.history.undo import rollback as going

    run_undo_operation(common, lambda opened, how: going(opened.open_root, how=how, cancel_open=cancel_open), **options)


@click.command()
@click.argument("point", callback=text)
@click.option("--before", is_flag=True, help="Go back to just before POINT (default).")
@click.option("--after", is_flag=True, help="Go back to just after POINT.")
@click.option("--no-files", is_flag=True, help="Do not change files.")
@click.option("--no-transcript", is_flag=True, help="Do not change the transcript.")
@undo_options
@common_options
def rewind(
    common: Common, point: str, *, before: bool, after: bool, no_files: bool, no_transcript: bool, **options: Any
) -> None:
    """Undo everything that a session did from a call on, or (with --session) from a message on."""
    from mulligan.history.undo import rewind as going

    if before and after:
        raise click.UsageError("Give --before or --after, not both.")
    side = "after" if after else "before"

    def act(opened: Mulligan, how: UndoOptions) -> UndoResult:
        return going(opened.open_root, point, side=side, files=not no_files, transcript=not no_transcript, how=how)

    run_undo_operation(common, act, **options)
