"""Forks: fork, branches, merge, drop."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.format import paint, print_json
from mulligan.cli.open_root import open_for_changes, open_for_reading
from mulligan.cli.options import DEFAULT_SESSION, Common, confirm, options_saying, text, yes_option
from mulligan.cli.undo import if_match_option, run_undo_operation
from mulligan.history.outcome_text import ago, gap_lines
from mulligan.session.tables import SESSIONS
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.history.open_root import OpenRoot
    from mulligan.history.undo import UndoOptions, UndoResult


@click.command()
@click.option("--at", callback=text, metavar="POINT", help="Fork before this call, or after this message.")
@click.option(
    "--files",
    type=click.Choice(["share", "copy"]),
    default="share",
    show_default=True,
    help="Share the files with the parent, or copy them.",
)
@click.option("--to", metavar="DIR", help="Where to put the copy. Default: beside the store.")
@click.option("--name", callback=text, metavar="ID", help="The new session's id.")
@options_saying(f"The session to fork. Default: the one that worked here last, else '{DEFAULT_SESSION}'.")
def fork(common: Common, *, at: str | None, files: str, to: str | None, name: str | None) -> None:
    """Start a child session. With --files copy it gets a copy of every file, uncommitted and ignored ones too."""
    from mulligan.history import branches as forks

    if to is not None and files == "share":
        raise click.UsageError("--to needs --files copy: it says where to put the copy.")
    with open_for_changes(common) as opened:
        parent = SessionId(common.session or _session_at_work(opened.open_root, at))
        if common.session is not None:
            _check_known(opened.open_root, parent)
        if files == "share":
            made = forks.fork(opened.open_root, parent, at=at, child=name)
        else:
            made = forks.fork_files(opened.open_root, parent, to, at=at, child=name)
    if common.as_json:
        body = {"session_id": made.session, "parent_id": made.parent, "directory": made.directory}
        print_json({**body, "coverage": list(made.coverage)})
        return
    click.echo(f"session {visible(made.session)}, forked from {visible(made.parent)}")
    if made.directory is not None:
        click.echo(f"its files are in {visible(made.directory)}")
        for line in gap_lines(made.coverage):
            click.echo(line)
        click.echo(paint(f"(`mulligan merge {visible(made.session)}` applies its changes here)", "dim"))


def _session_at_work(open_root: OpenRoot, at: str | None) -> str:
    """The session of the call to fork at, else of the newest call in this root: the user sees that session's work."""
    from mulligan.history.log import calls_of, find_call

    if at is not None:
        with suppress(MulliganError):  # a message, or an unknown point, which the fork itself refuses
            return find_call(open_root, at).session or DEFAULT_SESSION
    with open_root.ledger.store.read() as tx:
        newest = (
            row.session for row in calls_of(tx, open_root, None) if row.wseq is not None and row.session is not None
        )
        return next(newest, DEFAULT_SESSION)


def _check_known(open_root: OpenRoot, session: SessionId) -> None:
    """Raises for a mistyped session: a fork must not create its parent."""
    with open_root.ledger.store.read() as tx:
        if not tx.has(SESSIONS, session):
            raise fault("unknown_session", f"There is no session {session!r}; see `mulligan sessions`.")


def _check_fork_of(open_root: OpenRoot, fork: str, parent: str | None) -> None:
    """Raises if the user names a parent and the fork has another one."""
    from mulligan.history.branches import branch_of

    if parent is not None and branch_of(open_root, fork).parent != parent:
        words = f"{fork!r} is not a fork of session {parent!r}; `mulligan branches` lists the forks."
        raise fault("unknown_session", words)


_forks_options = options_saying("Only forks of this session.")


@click.command()
@_forks_options
def branches(common: Common) -> None:
    """List the forks of this root that have their own files."""
    from mulligan.history import branches as forks

    with open_for_reading(common) as opened:
        rows = [row for row in forks.branches(opened.open_root) if common.session in (None, row.parent)]
    if common.as_json:
        names = ("session_id", "parent_id", "directory", "created_at", "status")
        facts = [(row.session, row.parent, os.fsdecode(row.directory), row.created_at, row.status) for row in rows]
        print_json([dict(zip(names, one, strict=True)) for one in facts])
        return
    for row in rows:
        click.echo(
            f"{visible(row.session)}  {row.status:<8} {ago(row.created_at):>12}  {visible(os.fsdecode(row.directory))}"
        )
    if not rows:
        click.echo("No forks have their own files.")


@click.command()
@click.argument("fork_session", callback=text, metavar="FORK")
@click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing.")
@click.option(
    "--on-conflict",
    type=click.Choice(["merge", "overwrite", "refuse"]),
    default="merge",
    show_default=True,
    help="If somebody else changed the same file: merge, overwrite, or refuse.",
)
@if_match_option
@yes_option
@_forks_options
def merge(common: Common, *, fork_session: str, **options: Any) -> None:
    """Apply a fork's changes to the files it was forked from, as one call that can be undone."""
    from mulligan.history import branches as forks

    def act(opened: Mulligan, how: UndoOptions) -> UndoResult:
        _check_fork_of(opened.open_root, fork_session, how.session)
        return forks.merge_branch(
            opened.open_root, fork_session, on_conflict=how.on_conflict, dry_run=how.dry_run, if_match=how.if_match
        )

    run_undo_operation(common, act, came="brought in", **options)


@click.command()
@click.argument("fork_session", callback=text, metavar="FORK")
@yes_option
@_forks_options
def drop(common: Common, fork_session: str, yes: bool) -> None:
    """Delete a fork's files."""
    from mulligan.history import branches as forks

    with open_for_changes(common) as opened:
        _check_fork_of(opened.open_root, fork_session, common.session)
        forks.branch_of(opened.open_root, fork_session)
        otherwise = "drop deletes files; confirm with --yes."
        confirm(common, f"Delete the files of {visible(fork_session)}?", yes=yes, otherwise=otherwise)
        directory = forks.drop_branch(opened.open_root, fork_session)
    common.answer({"session_id": fork_session, "dropped": directory}, f"deleted {visible(directory)}")
