"""The verb `forget`: erase stored bytes for good."""

from __future__ import annotations

import os

import click

from mulligan.cli.asking import ask, can_ask
from mulligan.cli.doors import path_meant, work
from mulligan.cli.options import Common, common_options, text
from mulligan.cli.output import counted, print_json, visible
from mulligan.values.faults import MulliganError


@click.command("forget")
@click.argument("path_or_call", metavar="PATH|CALL", callback=text)
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
def forget_verb(common: Common, path_or_call: str, yes: bool) -> None:
    """Erase the bytes that the store has of a PATH, with all below it, or because of a CALL. This cannot be undone.

    The bytes go from the database, its free pages and its log, and from large bodies beside it; so do the parameters
    and answers of tools on record. Content that another call or path shares is erased there too, and those are named.
    The copy of the store that was made before a migration is deleted. The file itself is not touched. Undo then skips
    what was erased, with the reason `evicted`, and `verify` accepts the gap. Settings `capture.never` and
    `capture.digest_only` keep such bytes from being stored at all.
    """
    from mulligan.history.forget import forget_call, forget_path
    from mulligan.history.log import find_call

    with work(common) as opened:
        try:
            call = None if os.path.lexists(path_or_call) else find_call(opened.desk, path_or_call, None)
        except MulliganError:
            call = None
        if can_ask(common) and not yes:
            ask(f"Erase what the store has of {visible(path_or_call)} for good?")
        if call is not None:
            told = forget_call(opened.desk, call)
        else:
            told = forget_path(opened.desk, path_meant(opened, path_or_call))
    if common.as_json:
        print_json({"ok": True, "call": None if call is None else call.id, **told.to_json()})
        return
    click.echo(
        f"Erased {counted(len(told.digests), 'stored content')}; {counted(len(told.records), 'record')} rewritten."
    )
    for name in told.copies:
        click.echo(f"  deleted {visible(name)}: the store as it was before a migration held the same bytes")
    for owner, path in told.shared:
        click.echo(f"  the same content is gone from call {visible(owner)}: {visible(path)}")
