"""`attach` and `takeover`: following a session live, and taking control of it."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from typing import Any

import click

from mulligan.cli.doors import work
from mulligan.cli.options import Common, common_options
from mulligan.cli.output import paint, print_json, visible
from mulligan.effects.session import Session
from mulligan.session.subscribers import CLOSED_EVENT, Subscription
from mulligan.values.faults import MulliganError

HEARTBEAT_EVERY_S = 10.0
DEFAULT_CLIENT = "cli"

LAST_LINES_S = 1.0

Event = dict[str, Any]
Over = queue.SimpleQueue[None]


@click.command("attach")
@click.argument("named", metavar="SESSION", required=False)
@click.option("--client", metavar="ID", help="The client's name; by default one of its own.")
@click.option("--mode", type=click.Choice(["observer", "controller"]), default="observer", show_default=True)
@click.option("--takeover", is_flag=True, help="Take control from whoever has it.")
@click.option("--after", type=click.IntRange(min=0), metavar="SEQ", help="Begin after that event; 0 for all of them.")
@common_options
def attach_verb(
    common: Common, *, named: str | None, client: str | None, mode: str, takeover: bool, after: int | None
) -> None:
    """Follow a session's events as they happen, one a line, until Ctrl-C or the session's end."""
    # A queue, because nothing else may be used by a signal handler while the same thread waits for it.
    over: Over = queue.SimpleQueue()
    for leaving in (signal.SIGINT, signal.SIGTERM):
        signal.signal(leaving, lambda *_: over.put(None))
    name = f"{DEFAULT_CLIENT}-{os.getpid()}" if client is None else client
    with work(common) as opened:
        found = opened.sessions.get(_meant(common, named), "attach")
        following = found.subscribe(_printing(over, as_json=common.as_json), after=after)
        try:
            found.attach(name, mode=None if takeover else mode, takeover=takeover or None)
            _follow(found, name, following, over)
        finally:
            following.close()
            _detach(found, name)


def _meant(common: Common, named: str | None) -> str:
    session = named or common.session
    if session is None:
        raise click.UsageError("Name the session; `mulligan sessions` lists them.")
    return session


def _follow(session: Session, client: str, following: Subscription, over: Over) -> None:
    """The lines come from the subscription's own thread; here the heart beats, until it is over."""
    while not following.ended:
        try:
            over.get(timeout=HEARTBEAT_EVERY_S)
        except queue.Empty:
            session.heartbeat(client)
            continue
        following.wait(timeout_s=LAST_LINES_S)
        return


def _detach(session: Session, client: str) -> None:
    try:
        session.detach(client, reason="client_exit")
    except MulliganError as error:
        # It was closed, or somebody has detached us already: either way we are gone.
        if error.code not in ("session_closed", "client_not_attached"):
            raise


def _printing(over: Over, *, as_json: bool) -> Callable[[Event], None]:
    """One line an event, at once. It is over with the session, and when the reader has gone."""

    def tell(event: Event) -> None:
        try:
            print_json(event) if as_json else click.echo(_line(event))
        except BrokenPipeError:
            over.put(None)
        if event["kind"] == CLOSED_EVENT:
            over.put(None)

    return tell


def _line(event: Event) -> str:
    return f"{event['at'][11:19]}  {paint(event['kind'], 'bold')}  {visible(_said(event))}".rstrip()


def _said(event: Event) -> str:
    """What an event comes to, on one line."""
    if event["text"]:
        first, *more = event["text"].splitlines() or [""]
        return f"{event['role']}: {first}{' …' if more else ''}"
    told = event.get("metadata", {})
    who = told.get("client_id") or told.get("client", {}).get("client_id", "")
    words = [str(told[name]) for name in ("action", "reason", "request_id", "path") if name in told]
    return " ".join([*words, who]).strip()


@click.command("takeover")
@click.argument("named", metavar="SESSION", required=False)
@click.option("--client", metavar="ID", default=DEFAULT_CLIENT, show_default=True, help="Who shall be in control.")
@common_options
def takeover_verb(common: Common, named: str | None, client: str) -> None:
    """Put a client in control of a session; whoever was in control goes on as an observer."""
    session = _meant(common, named)
    with work(common) as opened:
        done = opened.sessions.get(session, "takeover").takeover(client)
    if common.as_json:
        print_json(done)
        return
    before = done["previous_controller_id"]
    was = f"; {before} is an observer now" if before not in (None, done["active_controller_id"]) else ""
    click.echo(visible(f"{done['active_controller_id']} is in control of {session}{was}."))
