"""Forks: fork, branches, merge, drop; and pin, gc for what is kept."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from mulligan.cli.asking import make_sure
from mulligan.cli.doors import look, work
from mulligan.cli.options import DEFAULT_SESSION, Common, common_options, options_saying, text
from mulligan.cli.output import counted, paint, print_json, visible
from mulligan.cli.returning import go
from mulligan.cli.words import ago, gap_lines, short
from mulligan.session.tables import SESSIONS
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId

if TYPE_CHECKING:
    from mulligan.history.desk import Desk
    from mulligan.history.going_back import How, WayBack
    from mulligan.opening import Mulligan


@click.command()
@click.option(
    "--at", callback=text, metavar="POINT", help="Before this call, or after this message: talk, and copied files."
)
@click.option("--files", type=click.Choice(["share", "copy"]), default="share", show_default=True)
@click.option("--to", metavar="DIR", help="Where the copy goes. Default: beside the store.")
@click.option("--name", callback=text, metavar="ID", help="The new session's id.")
@options_saying(f"The session to fork. Default: the one that worked here last, else '{DEFAULT_SESSION}'.")
def fork(common: Common, *, at: str | None, files: str, to: str | None, name: str | None) -> None:
    """A child session; with --files copy it gets every file, uncommitted and ignored ones too."""
    from mulligan.history import branches as forks

    if to is not None and files == "share":
        raise click.UsageError("--to is where a copy of the files goes; ask for one with --files copy.")
    with work(common) as opened:
        parent = SessionId(common.session or _session_at_work(opened.desk, at))
        if common.session is not None:
            _check_known(opened.desk, parent)
        if files == "share":
            made = forks.fork(opened.desk, parent, at=at, child=name)
        else:
            made = forks.fork_files(opened.desk, parent, to, at=at, child=name)
    if common.as_json:
        body = {"session_id": made.session, "parent_id": made.parent, "directory": made.directory}
        print_json({**body, "coverage": list(made.coverage)})
        return
    click.echo(f"session {visible(made.session)}, forked from {visible(made.parent)}")
    if made.directory is not None:
        click.echo(f"its files are in {visible(made.directory)}")
        for line in gap_lines(made.coverage):
            click.echo(line)
        click.echo(paint(f"(`mulligan merge {visible(made.session)}` brings its changes back)", "dim"))


def _session_at_work(desk: Desk, at: str | None) -> str:
    """The session of the call to fork at, else of the newest call in this root: that is whose work a person sees."""
    from mulligan.history.log import calls_of, find_call

    if at is not None:
        with suppress(MulliganError):  # a message, or a point that nothing knows; the fork itself says so
            return find_call(desk, at).session or DEFAULT_SESSION
    with desk.ledger.store.read() as tx:
        newest = (row.session for row in calls_of(tx, desk, None) if row.wseq is not None and row.session is not None)
        return next(newest, DEFAULT_SESSION)


def _check_known(desk: Desk, session: SessionId) -> None:
    """A name with a slip in it must not become a parent that never was."""
    with desk.ledger.store.read() as tx:
        if not tx.has(SESSIONS, session):
            raise fault("unknown_session", f"There is no session {session!r}; see `mulligan sessions`.")


def _check_fork_of(desk: Desk, fork: str, parent: str | None) -> None:
    """Where a parent is named, another session's fork is not meant."""
    from mulligan.history.branches import branch_of

    if parent is not None and branch_of(desk, fork).parent != parent:
        words = f"{fork!r} is not a fork of session {parent!r}; `mulligan branches` lists the forks."
        raise fault("unknown_session", words)


_forks_options = options_saying("Only forks of this session.")


@click.command()
@_forks_options
def branches(common: Common) -> None:
    """Forks of this root that have files of their own."""
    from mulligan.history import branches as forks

    with look(common) as opened:
        rows = [row for row in forks.branches(opened.desk) if common.session in (None, row.parent)]
    if common.as_json:
        print_json(
            [
                {
                    "session_id": row.session,
                    "parent_id": row.parent,
                    "directory": os.fsdecode(row.directory),
                    "created_at": row.created_at,
                    "status": row.status,
                }
                for row in rows
            ]
        )
        return
    for row in rows:
        click.echo(f"{visible(row.session)}  {row.status:<8} {ago(row.created_at):>12}  {os.fsdecode(row.directory)}")
    if not rows:
        click.echo("No forks with files of their own.")


@click.command()
@click.argument("fork_session", callback=text, metavar="FORK")
@click.option("--dry-run", is_flag=True, help="Show what would happen, and do nothing.")
@click.option("--on-conflict", type=click.Choice(["merge", "overwrite", "refuse"]), default="merge", show_default=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_forks_options
def merge(common: Common, *, fork_session: str, dry_run: bool, on_conflict: str, yes: bool) -> None:
    """Bring what a fork changed back into the files it was forked from. One call, so it can be undone."""
    from mulligan.history import branches as forks

    def act(opened: Mulligan, how: How) -> WayBack:
        _check_fork_of(opened.desk, fork_session, how.session)
        return forks.merge_branch(opened.desk, fork_session, on_conflict=how.on_conflict, dry_run=how.dry_run)

    go(common, act, dry_run=dry_run, on_conflict=on_conflict, yes=yes, came="brought in")


@click.command()
@click.argument("fork_session", callback=text, metavar="FORK")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_forks_options
def drop(common: Common, fork_session: str, yes: bool) -> None:
    """Delete a fork's files."""
    from mulligan.history import branches as forks

    with work(common) as opened:
        _check_fork_of(opened.desk, fork_session, common.session)
        forks.branch_of(opened.desk, fork_session)
        otherwise = "drop deletes files; say --yes if you mean it."
        make_sure(common, f"Delete the files of {visible(fork_session)}?", yes=yes, otherwise=otherwise)
        directory = forks.drop_branch(opened.desk, fork_session)
    if common.as_json:
        print_json({"session_id": fork_session, "dropped": directory})
    else:
        click.echo(f"deleted {visible(directory)}")


@click.command()
@click.argument("call", callback=text)
@click.option("--off", is_flag=True, help="Unpin it.")
@common_options
def pin(common: Common, call: str, off: bool) -> None:
    """Never evict what a call needs to be undone."""
    from mulligan.history.bounds import pin_call
    from mulligan.history.log import find_call

    with work(common) as opened:
        row = find_call(opened.desk, call, None if common.session is None else SessionId(common.session))
        pin_call(opened.desk.ledger, row, off=off)
    if common.as_json:
        print_json({"id": row.id, "pinned": not off})
    else:
        click.echo(f"{'unpinned' if off else 'pinned'} {short(row.id)}")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--snapshots",
    "days",
    metavar="DAYS",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Give up snapshots not created again for so long, unless another derives from them.",
)
@options_saying("Not used: stored bytes may belong to several sessions.")
def gc(common: Common, yes: bool, days: int) -> None:
    """Delete stored bytes that nothing needs any more, and give the space back."""
    from datetime import timedelta

    from mulligan.effects.substrate.collecting import collect_snapshots
    from mulligan.history.bounds import collect_garbage, keep_all_bounds

    otherwise = "gc deletes stored bytes; say --yes if you mean it."
    make_sure(common, "Delete what nothing needs any more?", yes=yes, otherwise=otherwise)
    with work(common) as opened:
        store = opened.desk.ledger.store
        before = store.size_bytes()
        keep_all_bounds(opened.desk.ledger)
        given_up = collect_snapshots(opened.desk.ledger, timedelta(days=days))
        blobs, size = collect_garbage(opened.desk.ledger)
        store.give_back_space()
        freed = max(0, before - store.size_bytes())
    if common.as_json:
        told = {"snapshots": given_up.snapshots, "blobs": blobs, "bytes": size + given_up.bytes, "freed_bytes": freed}
        print_json(told)
    else:
        gone = f"{counted(given_up.snapshots, 'snapshot')} and {counted(blobs, 'blob')}"
        click.echo(f"deleted {gone} ({size + given_up.bytes} bytes)")
