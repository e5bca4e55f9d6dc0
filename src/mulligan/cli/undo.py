"""The undo operations: undo, redo, restore, rollback, rewind."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from mulligan.cli.format import Working, columns_shown, paint, print_json
from mulligan.cli.inspect import diff_lines
from mulligan.cli.open_root import open_for_changes, path_in_any_root, stores_elsewhere
from mulligan.cli.options import Common, ask, can_ask, common_options, text
from mulligan.history.outcome_text import ago, call_words, counted, outside_words, plan_lines, short
from mulligan.values.errors import MulliganError, fault
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.history.tables import CallRow
    from mulligan.history.undo import Hunks, UndoOptions, UndoResult
    from mulligan.values.ids import SessionId
    from mulligan.values.paths import RepoPath

F = TypeVar("F", bound=Callable[..., Any])
Act: TypeAlias = "Callable[[Mulligan, UndoOptions], UndoResult]"
Pick: TypeAlias = "Callable[[Mulligan, SessionId | None], Act]"


if_match_option = click.option(
    "--if-match", metavar="DIGEST", help="Apply the plan only if its digest, as --dry-run --json prints it, is this."
)


def undo_options(function: F) -> F:
    for option in (
        click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing."),
        if_match_option,
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
    act: Act,
    *,
    came: str = "restored",
    bare: str | None = None,
    pick: Pick | None = None,
    **options: Any,
) -> None:
    """Plans, asks on a terminal, applies, and prints the result. `options` are those of `undo_options`.

    `came`: see `outcome_lines`. `bare`: the verb, if the user named neither a call nor a session. `pick` asks for a
    part of the call and answers what to do instead of `act`.
    """
    from mulligan.history.undo import UndoOptions

    dry_run, yes, on_conflict = options["dry_run"], options["yes"], options["on_conflict"]
    asks = not (dry_run or yes) and can_ask(common)
    if on_conflict == "overwrite" and not (dry_run or yes or asks):
        raise click.UsageError("--on-conflict overwrite replaces other people's work; confirm with --yes.")
    with open_for_changes(common) as opened, _naming_other_stores(common, opened.root):
        session = common.session_id
        if bare is not None and session is None:
            session = _session_meant(common, opened, bare, on_conflict=on_conflict)
        if pick is not None:
            act = pick(opened, session)
        git, if_match = options.get("git", "leave"), options["if_match"]
        plans = UndoOptions(on_conflict, True, session, git, if_match=if_match)
        if asks:
            with Working("planning"):
                planned = act(opened, plans)
            _ask(opened, planned, came)
        with Working("planning" if dry_run else "changing files") as progress:
            done = act(opened, plans if dry_run else replace(plans, dry_run=False, progress=progress))
        named = _calls_named(opened, done) if common.as_json or dry_run else []
    report(common, done, dry_run=dry_run, came=came, named=named)


@contextmanager
def _naming_other_stores(common: Common, root: str) -> Iterator[None]:
    """If there is nothing to undo or redo, the error says which other store knows this folder."""
    try:
        yield
    except MulliganError as error:
        others = stores_elsewhere(common, root) if error.code in ("nothing_to_undo", "nothing_to_redo") else []
        if not others:
            raise
        known = ", ".join(f"--store {shlex.quote(one)}" for one in others)
        raise fault(error.code, f"{error.message} Another store knows this folder: {known}.") from None


def _ask(opened: Mulligan, planned: UndoResult, came: str) -> None:
    """Shows the plan and asks; a plan that changes nothing needs no answer."""
    if not (_changes_something(planned) or planned.cancelled):
        return
    stops = ["would stop the turn that is still running"] if planned.cancelled else []
    lines = plan_lines(planned, came=came)
    for line in (*_head_lines(_calls_named(opened, planned)), *stops, *lines, *_replaced_lines(planned, dry_run=True)):
        click.echo(f"  {line}")
    ask("Go ahead?", default=not planned.overwrote_external)


_CALLS_NAMED, _CALLS_SHOWN = 100, 5


def _calls_named(opened: Mulligan, result: UndoResult) -> list[dict[str, Any]]:
    """What the plan is for: the calls with their agents, sessions, commands and prompts, newest first."""
    from mulligan.history.call_about import call_named
    from mulligan.history.multi_root import main_of
    from mulligan.history.tables import CALLS

    with opened.open_root.ledger.store.read() as tx:
        rows = [row for call in result.of[:_CALLS_NAMED] if (row := tx.get(CALLS, call)) is not None]
        return [call_named(tx, row) for row in rows if main_of(row) == row.id]


def _head_lines(named: Sequence[dict[str, Any]]) -> list[str]:
    columns = columns_shown()
    lines = [f"for {call_words(one, columns and columns - _INDENT)}" for one in named[:_CALLS_SHOWN]]
    if len(named) > _CALLS_SHOWN:
        lines.append(f"and {len(named) - _CALLS_SHOWN} more calls")
    outside = tuple(dict.fromkeys(name for one in named for name in one["outside"]))
    return [*lines, *([paint(outside_words(outside), "yellow")] if outside else [])]


_INDENT = 6


def _changes_something(result: UndoResult) -> bool:
    plan = result.plan
    return result.talk is not None or (plan is not None and bool(plan.moves or plan.git_moves))


def _replaced_lines(result: UndoResult, *, dry_run: bool) -> list[str]:
    done = "would replace" if dry_run else "replaced"
    return [
        paint(f"{done} your version of {visible(path)}; the store keeps it", "yellow")
        for path in result.overwrote_external
    ]


def report(
    common: Common, done: UndoResult, *, dry_run: bool, came: str = "restored", named: Sequence[dict[str, Any]] = ()
) -> None:
    if common.as_json:
        print_json({**done.to_json(), "calls": list(named)})
    else:
        lines = plan_lines(done, dry_run=dry_run, came=came)
        for line in _head_lines(named) if dry_run else ():
            click.echo(line)
        for line in lines or ["No files changed."]:
            click.echo(paint(line, "yellow") if line.startswith("left") else line)
        for line in _replaced_lines(done, dry_run=dry_run):
            click.echo(line)
        if done.call_id is not None and _changes_something(done):
            click.echo(paint(f"(`mulligan undo {short(done.call_id)}` undoes this)", "dim"))
    if not done.ok:
        raise click.exceptions.Exit(1)


# The session that a verb without call and session means.

_RECENT = timedelta(minutes=10)
_CALLER = "MULLIGAN_CALLER_PID"
"""The process that asked the background process to run this verb; without it, this process is the caller."""


def _session_meant(common: Common, opened: Mulligan, verb: str, *, on_conflict: str) -> SessionId | None:
    """None for every session of the root, if only one has worked here of late; else the one that the user means.

    In a shell of an agent it is the agent's session. On a terminal the user chooses; without one, it is bad usage.
    """
    from mulligan.history.call_about import call_named
    from mulligan.history.log import newest_to_undo, sessions_at_work
    from mulligan.history.tables import CALLS, REDO
    from mulligan.values.clock import FixedClock, SystemClock, timestamp
    from mulligan.values.ids import SessionId

    since = timestamp(FixedClock(SystemClock().now() - _RECENT))
    with opened.open_root.ledger.store.read() as tx:
        found = sessions_at_work(tx, opened.open_root, since)
        if verb == "redo":
            stack = [row for one in tx.select(REDO) if (row := tx.get(CALLS, one.call)) is not None]
            stack = [row for row in stack if row.workspace == opened.open_root.root.workspace]
            target = max(stack, key=lambda row: row.id, default=None)
        else:
            target = newest_to_undo(tx, opened.open_root, None, on_conflict=on_conflict)  # type: ignore[arg-type]  # click checked it
        if target is not None and target.session is not None:
            found = {target.session: found.get(target.session, target), **found}
        if len(found) < 2 or target is None:
            return None
        own = next((name for name, row in found.items() if _is_inside_agent(row)), None)
        if own is not None:
            return SessionId(own)
        named = {name: (call_named(tx, row), ago(row.ended_at or row.started_at)) for name, row in found.items()}
    lines = [f"{when}: {call_words(one, (columns_shown() or 120) - 24)}" for one, when in named.values()]
    head = f"{counted(len(named), 'session')} changed files here in the last ten minutes."
    if not can_ask(common):
        choices = [
            f"mulligan {verb} --session {shlex.quote(visible(name))}  # {line}"
            for name, line in zip(named, lines, strict=True)
        ]
        raise fault("several_sessions", f"{head} Say which one you mean:", choices=choices, sessions=list(named))
    click.echo(head)
    for number, line in enumerate(lines, 1):
        click.echo(f"  {number}  {line}")
    chosen = click.prompt(f"Which session? [1-{len(named)}]", type=click.IntRange(1, len(named)))
    return SessionId(list(named)[chosen - 1])


def _is_inside_agent(row: CallRow) -> bool:
    """Whether the caller of this verb is a descendant of the agent that made the call."""
    from mulligan.history.cause import ObservedTool
    from mulligan.history.processes import descends_from, start_time_of

    why = row.why
    if not isinstance(why, ObservedTool) or why.pid is None or start_time_of(why.pid) != why.born:
        return False
    caller = os.environ.get(_CALLER, "")
    return descends_from(int(caller) if caller.isdigit() else os.getpid(), why.pid)


# Picking files and hunks.


def _picked(opened: Mulligan, call: str | None, session: SessionId | None) -> tuple[str, list[RepoPath], Hunks]:
    """Shows the changes of a call one by one, and asks which to undo."""
    from mulligan.history.log import file_diffs, find_call, newest_to_undo

    with opened.open_root.ledger.store.read() as tx:
        row = newest_to_undo(tx, opened.open_root, session) if call is None else None
    if row is None and call is None:
        raise fault("nothing_to_undo", "There is nothing to undo here.")
    row = row or find_call(opened.open_root, call or "", session)
    paths: list[RepoPath] = []
    hunks: dict[RepoPath, list[int]] = {}
    for path, diff in file_diffs(opened.open_root, row):
        head, *parts = re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)
        is_whole = len(parts) < 2 or "\n--- /dev/null" in head or "\n+++ /dev/null" in head
        answer, chosen = _pick_file(path, diff, parts=[] if is_whole else parts)
        if chosen is None:
            paths.append(path)
        elif chosen:
            hunks[path] = chosen
        if answer == "q":
            break
    if not paths and not hunks:
        click.echo("You chose nothing; nothing is changed.")
        raise click.exceptions.Exit(1)
    return row.id, paths, hunks


def _pick_file(path: RepoPath, diff: str, *, parts: Sequence[str]) -> tuple[str, list[int] | None]:
    """The last answer, and the chosen hunks of a file; None for the whole file."""
    shown = parts or [diff]
    chosen: list[int] = []
    for index, part in enumerate(shown):
        for line in diff_lines(part)[1 : _PICK_LINES + 1]:
            click.echo(line)
        what = f"this hunk ({index + 1} of {len(parts)})" if parts else "all changes"
        more = ", a: this and the rest of the file, d: no more of the file" if len(shown) > 1 else ""
        words = f"Undo {what} of {visible(path)}? y: yes, n: no{more}, q: no more"
        letters = click.Choice(["y", "n", "q", *("ad" if len(shown) > 1 else "")])
        answer = click.prompt(paint(words, "bold"), type=letters, show_choices=False)
        chosen += range(index, len(shown)) if answer == "a" else [index] if answer == "y" else []
        if answer in "adq":
            break
    else:
        answer = "n" if not chosen else "y"
    return answer, None if len(chosen) == len(shown) else chosen


_PICK_LINES = 60


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
@click.option("--interactive", is_flag=True, help="Choose on the terminal which files and hunks to undo.")
@undo_options
@common_options
def undo(
    common: Common, call: str | None, paths: tuple[str, ...], *, hunks: dict[str, list[int]], **options: Any
) -> None:
    """Undo one call (default: the newest call that is not undone) and keep all later work."""
    from mulligan.history.undo import undo as going

    interactive = options.pop("interactive")
    if interactive and (paths or hunks):
        raise click.UsageError("--interactive asks for paths and hunks; leave --path and --hunk out.")
    if interactive and not can_ask(common):
        raise click.UsageError("--interactive needs a terminal; --path and --hunk choose without one.")

    def act(opened: Mulligan, how: UndoOptions) -> UndoResult:
        some = _parse_hunks(opened, hunks)
        return going(opened.open_root, call, paths=_parse_paths(opened, paths), hunks=some, how=how)

    def pick(opened: Mulligan, session: SessionId | None) -> Act:
        row, files, parts = _picked(opened, call, session)
        return lambda opened, how: going(opened.open_root, row, paths=files, hunks=parts, how=how)

    bare = "undo" if call is None else None
    run_undo_operation(common, act, bare=bare, pick=pick if interactive else None, **options)


@click.command()
@undo_options
@common_options
def redo(common: Common, **options: Any) -> None:
    """Redo the last undo, restore, rollback or rewind."""
    from mulligan.history.undo import redo as going

    run_undo_operation(common, lambda opened, how: going(opened.open_root, how=how), bare="redo", **options)


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

    def act(opened: Mulligan, how: UndoOptions) -> UndoResult:
        return going(opened.open_root, how=how, cancel_open=cancel_open)

    run_undo_operation(common, act, bare="rollback", **options)


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
