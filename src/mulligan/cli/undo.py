"""The ways back: undo, redo, restore, rollback, rewind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mulligan.cli.asking import ask, can_ask
from mulligan.cli.doors import path_in_any_root, work
from mulligan.cli.options import Common, common_options, text
from mulligan.cli.output import paint, print_json, visible
from mulligan.cli.words import outcome_lines, short

if TYPE_CHECKING:
    from mulligan.history.going_back import How, WayBack
    from mulligan.opening import Mulligan
    from mulligan.values.paths import RepoPath

F = TypeVar("F", bound=Callable[..., Any])


def way_back_options(function: F) -> F:
    for option in (
        click.option("--dry-run", is_flag=True, help="Show what would happen, and do nothing."),
        click.option(
            "--on-conflict",
            type=click.Choice(["merge", "overwrite", "refuse"]),
            default="merge",
            show_default=True,
            help="When somebody changed the same file: merge, overwrite, or refuse.",
        ),
        click.option(
            "--git",
            type=click.Choice(["leave", "restore"]),
            default="leave",
            show_default=True,
            help="Whether commits, branches and the index go back too.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask."),
    ):
        function = option(function)
    return function


def go(
    common: Common,
    act: Callable[[Any, How], WayBack],
    *,
    dry_run: bool,
    on_conflict: str,
    yes: bool,
    git: str = "leave",
    came: str = "restored",
) -> None:
    """Plan, ask where a person is there to answer, apply, and say what happened. `came`: see `outcome_lines`."""
    from mulligan.history.going_back import How
    from mulligan.values.ids import SessionId

    asks = not (dry_run or yes) and can_ask(common)
    if on_conflict == "overwrite" and not (dry_run or yes or asks):
        raise click.UsageError("--on-conflict overwrite replaces somebody's work; say --yes if you mean it.")
    session = None if common.session is None else SessionId(common.session)
    with work(common) as opened:
        if asks:
            _ask(act(opened, How(on_conflict, True, session, git)), came)  # type: ignore[arg-type]  # click checked both
        done = act(opened, How(on_conflict, dry_run, session, git))  # type: ignore[arg-type]  # click checked both
    report(common, done, dry_run=dry_run, came=came)


def _ask(planned: WayBack, came: str) -> None:
    """Show what would happen and go on if the answer is yes; a plan that changes nothing needs no answer."""
    if not (_changes_something(planned) or planned.cancelled):
        return
    stops = ["would stop the turn that is still running"] if planned.cancelled else []
    for line in (*stops, *outcome_lines(planned, dry_run=True, came=came), *_replaced_lines(planned, dry_run=True)):
        click.echo(f"  {line}")
    ask("Go ahead?", default=not planned.overwrote_external)


def _changes_something(way: WayBack) -> bool:
    return way.talk is not None or (way.plan is not None and bool(way.plan.moves))


def _replaced_lines(way: WayBack, *, dry_run: bool) -> list[str]:
    done = "would replace" if dry_run else "replaced"
    return [paint(f"{done} your version of {visible(path)}; it is kept", "yellow") for path in way.overwrote_external]


def report(common: Common, done: WayBack, *, dry_run: bool, came: str = "restored") -> None:
    if common.as_json:
        print_json(done.to_json())
    else:
        lines = outcome_lines(done, dry_run=dry_run, came=came)
        for line in lines or ["Nothing had to change."]:
            click.echo(paint(line, "yellow") if line.startswith("left") else line)
        for line in _replaced_lines(done, dry_run=dry_run):
            click.echo(line)
        if done.call_id is not None and _changes_something(done):
            click.echo(paint(f"(`mulligan undo {short(done.call_id)}` takes this back)", "dim"))
    if not done.ok:
        raise click.exceptions.Exit(1)


def _meant(opened: Mulligan, paths: Sequence[str]) -> list[RepoPath] | None:
    return [path_in_any_root(opened, path) for path in paths] or None


@click.command()
@click.argument("call", callback=text, required=False)
@click.option("--path", "paths", multiple=True, metavar="P", help="Only this path; can be given again.")
@way_back_options
@common_options
def undo(common: Common, call: str | None, paths: tuple[str, ...], **options: Any) -> None:
    """Take back one call (default: the newest that stands), keeping everything that came after it."""
    from mulligan.history.going_back import undo as going

    go(common, lambda opened, how: going(opened.desk, call, paths=_meant(opened, paths), how=how), **options)


@click.command()
@way_back_options
@common_options
def redo(common: Common, **options: Any) -> None:
    """Bring back what the last undo, restore, rollback or rewind took away."""
    from mulligan.history.going_back import redo as going

    go(common, lambda opened, how: going(opened.desk, how=how), **options)


@click.command()
@click.argument("call", callback=text)
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@way_back_options
@common_options
def restore(common: Common, call: str, paths: tuple[str, ...], **options: Any) -> None:
    """Put a call's files back to what they were before it."""
    from mulligan.history.going_back import restore as going

    go(common, lambda opened, how: going(opened.desk, call, paths=_meant(opened, paths), how=how), **options)


@click.command()
@click.option("--cancel-open", is_flag=True, help="Even if the newest turn is still running.")
@way_back_options
@common_options
def rollback(common: Common, cancel_open: bool, **options: Any) -> None:
    """Take back the last completed turn."""
    from mulligan.history.going_back import rollback as going

    go(common, lambda opened, how: going(opened.desk, how=how, cancel_open=cancel_open), **options)


@click.command()
@click.argument("point", callback=text)
@click.option("--before", is_flag=True, help="To just before it (default).")
@click.option("--after", is_flag=True, help="To just after it.")
@click.option("--no-files", is_flag=True, help="Leave the files as they are.")
@click.option("--no-talk", is_flag=True, help="Leave the talk as it is.")
@way_back_options
@common_options
def rewind(
    common: Common, point: str, *, before: bool, after: bool, no_files: bool, no_talk: bool, **options: Any
) -> None:
    """Take back everything of a session from a call on, or (with --session) from a message on."""
    from mulligan.history.going_back import rewind as going

    if before and after:
        raise click.UsageError("A rewind goes to before a point or to after it, not both.")
    side = "after" if after else "before"

    def act(opened: Mulligan, how: How) -> WayBack:
        return going(opened.desk, point, side=side, files=not no_files, talk=not no_talk, how=how)

    go(common, act, **options)
