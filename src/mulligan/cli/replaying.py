"""`mulligan replay`: fold a session again from its journal, and compare two of them."""

from __future__ import annotations

from dataclasses import asdict

import click

from mulligan.cli.errors import INTEGRITY, PARTLY
from mulligan.cli.options import Common, options_saying
from mulligan.cli.output import paint, print_json, print_rows, visible
from mulligan.cli.store import opened
from mulligan.values.ids import SessionId


@click.command("replay")
@click.argument("words", nargs=-1, metavar="SESSION | diff A B")
@click.option("--verify", is_flag=True, help="Also check the chain, and that every blob the state needs is there.")
@options_saying("The session, if none is named.", root="Not used: sessions are found in the store.")
def replay_verb(common: Common, words: tuple[str, ...], verify: bool) -> int:
    """Rebuild a session's state from the journal alone, and say whether it is what stands now. Touches nothing.

    `mulligan replay diff A B` shows the first step at which two sessions part. Exit code 3 if something is missing or
    does not fit, 1 if two sessions differ.
    """
    given = words or ((common.session,) if common.session else ())
    if given[:1] == ("diff",) and len(given) == 3:
        return _diff(common, given[1], given[2])
    if len(given) != 1:
        raise click.UsageError("Say one session, or `diff` and two.")
    return _replay(common, given[0], verify=verify)


def _replay(common: Common, session: str, *, verify: bool) -> int:
    from mulligan.history.replay import check_needs, replay
    from mulligan.history.schema import SCHEMA
    from mulligan.opening import open_store
    from mulligan.session.transcript import Archive
    from mulligan.store.journal import Journal
    from mulligan.values.clock import SystemClock
    from mulligan.values.ids import SystemIds

    with opened(common) as store:
        if verify:
            check_needs(store, SessionId(session))
        fresh = open_store("memory:", SCHEMA, durability="process", clock=SystemClock())
        done = replay(Archive(store, Journal(SCHEMA), SystemClock(), SystemIds()), SessionId(session), fresh)
    if common.as_json:
        print_json({**asdict(done), "same": done.same, "verified": verify})
    else:
        words = paint("the same as it stands now", "green") if done.same else paint("NOT what stands now", "red")
        click.echo(f"{visible(session)}: {words}")
        print_rows(
            [
                ("digest", done.digest),
                ("records", str(done.records)),
                ("messages", str(done.messages)),
                ("calls", str(done.calls)),
            ]
        )
    return 0 if done.same else INTEGRITY


def _diff(common: Common, ours: str, theirs: str) -> int:
    from mulligan.history.replay import first_difference

    with opened(common) as store, store.read() as tx:
        found = first_difference(tx, SessionId(ours), SessionId(theirs))
    if common.as_json:
        print_json({"same": found is None, "divergence": None if found is None else asdict(found)})
    elif found is None:
        click.echo("They did and said the same.")
    else:
        click.echo(f"They part at step {found.step}.")
        for name, step in ((ours, found.ours), (theirs, found.theirs)):
            click.echo(f"{visible(name)}: {visible(str(step)) if step is not None else 'nothing more'}")
    return 0 if found is None else PARTLY
