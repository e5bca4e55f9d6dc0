"""Sessions: list, show, close, reset; and compact."""

from __future__ import annotations

from typing import Any

import click

from mulligan.cli.asking import make_sure
from mulligan.cli.doors import look, work
from mulligan.cli.options import DEFAULT_SESSION, Common, common_options, options_saying, working_options
from mulligan.cli.output import counted, paint, print_json, print_rows, visible
from mulligan.cli.words import ago

_SHOWN_CHARS = 200
_named_options = options_saying("Not used: SESSION says which.")
_STRATEGIES = click.Choice(["llm", "truncate", "observation_mask"])


@click.group(invoke_without_command=True)
@click.option("--all", "closed", is_flag=True, help="Closed ones too.")
@click.option("--everywhere", is_flag=True, help="Those of every root in the store.")
@common_options
@click.pass_context
def sessions_verb(context: click.Context, common: Common, *, closed: bool, everywhere: bool) -> None:
    """List the sessions of this root, oldest first."""
    if context.invoked_subcommand is not None:
        return
    with look(common) as opened:
        rows = opened.sessions.list(closed=closed, everywhere=everywhere)
    rows = [row for row in rows if common.session in (None, row["id"])]
    if common.as_json:
        print_json(rows)
    elif not rows:
        click.echo("No sessions." if closed else "No open sessions.")
    else:
        print_rows([_row(row) for row in rows])


def _row(row: dict[str, Any]) -> list[str]:
    state = "closed" if row["closed_at"] else "open"
    came = f"forked from {row['parent_id']}" if row["parent_id"] else ""
    return [row["id"], state, counted(row["length"], "message"), ago(row["created_at"]), came]


@sessions_verb.command("show")
@click.argument("session_id", metavar="SESSION")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="How many of the last messages.",
)
@_named_options
def show(common: Common, *, session_id: str, limit: int) -> None:
    """Show a session: where it comes from, and the end of its talk."""
    with look(common) as opened:
        view = opened.sessions.get(session_id, "show").view()
    if common.as_json:
        print_json(view)
        return
    click.echo(f"session {visible(view['id'])}, {counted(view['length'], 'message')}, opened {ago(view['created_at'])}")
    for name, value in (("forked from", view["parent_id"]), ("forks", ", ".join(view["child_ids"]))):
        if value:
            click.echo(f"{name} {visible(value)}")
    for message in view["messages"][-limit:] if limit else []:
        click.echo(f"{paint(visible(message['role']), 'bold')}: {_shown(message)}")


def _shown(message: dict[str, Any]) -> str:
    from mulligan.session.messages import calls_in
    from mulligan.session.transcript import text_of

    calls = "".join(f" [calls {call.name}]" for call in calls_in(message))
    text = visible(" ".join(text_of(message).split()))
    return (text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…") + visible(calls)


@sessions_verb.command("close")
@click.argument("session_id", metavar="SESSION")
@click.option("--reason", metavar="WORDS", help="Why, for the record.")
@_named_options
def close(common: Common, *, session_id: str, reason: str | None) -> None:
    """End a live session. Its history stays and can be undone; opening it again goes on with it."""
    with work(common) as opened:
        opened.sessions.close(session_id, reason)
    _said(common, {"session_id": session_id, "closed": True}, f"closed {visible(session_id)}")


@sessions_verb.command("reset")
@click.argument("session_id", metavar="SESSION")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_named_options
def reset(common: Common, *, session_id: str, yes: bool) -> None:
    """Forget a session's talk. Its id, forks and files stay."""
    otherwise = "reset forgets the talk of a session; say --yes if you mean it."
    make_sure(common, f"Forget the talk of {visible(session_id)}?", yes=yes, otherwise=otherwise)
    with work(common) as opened:
        opened.sessions.get(session_id, "reset").reset()
    _said(common, {"session_id": session_id, "reset": True}, f"reset {visible(session_id)}")


@click.command()
@click.argument("session_id", metavar="[SESSION]", required=False)
@click.option(
    "--keep-last", metavar="N", type=int, help="How many of the last messages stay as they are.  [default: 12]"
)
@click.option("--strategy", "compact_strategy", type=_STRATEGIES, help="[default: observation_mask]")
@click.option("--token-threshold", metavar="N", type=int, help="Only if there are more tokens than this.")
@click.option("--tool-output-max-chars", metavar="N", type=int, help="Cut kept tool outputs to this.  [default: 16000]")
@click.option("--hard-limit-tokens", metavar="N", type=int, help="No more than this in the end.")
@click.option("--hard-limit-strategy", type=_STRATEGIES, help="How to get there.  [default: llm]")
@working_options
def compact_verb(common: Common, *, session_id: str | None, **given: Any) -> None:
    """Replace the older part of a session's talk by a summary. The journal keeps all of it."""
    name = session_id or common.session or DEFAULT_SESSION
    options = {key: value for key, value in given.items() if value is not None}
    with work(common) as opened:
        session = opened.sessions.get(name, "compact")
        before = session.length()
        after = session.compact(options)
    told = {"session_id": name, "messages_before": before, "messages": after}
    _said(common, told, f"{visible(name)}: {counted(before, 'message')} before, {after} now")


def _said(common: Common, body: dict[str, Any], text: str) -> None:
    if common.as_json:
        print_json(body)
    else:
        click.echo(text)
