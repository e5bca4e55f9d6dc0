"""Sessions: list, show, close, reset, compact; attach and takeover for live clients; export and import of bundles."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.format import paint, print_json, print_rows, size_words
from mulligan.cli.open_root import open_for_changes, open_for_reading
from mulligan.cli.options import (
    DEFAULT_SESSION,
    Common,
    common_options,
    confirm,
    options_saying,
    working_options,
    yes_option,
)
from mulligan.effects.session import DurableSession
from mulligan.history.outcome_text import ago, counted
from mulligan.session.subscribers import CLOSED_EVENT, Subscription
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.session.bundle.format import Document

HEARTBEAT_EVERY_S = 10.0
DEFAULT_CLIENT = "cli"
LAST_LINES_S = 1.0
_PRIVATE = 0o600
_SHOWN_CHARS = 200

Event = dict[str, Any]
Over = queue.SimpleQueue[None]

_named_options = options_saying("Not used: SESSION says which.")
_STRATEGIES = click.Choice(["llm", "truncate", "observation_mask"])


@click.group(invoke_without_command=True)
@click.option("--all", "closed", is_flag=True, help="Also list closed sessions.")
@click.option("--everywhere", is_flag=True, help="List the sessions of every root in the store.")
@common_options
@click.pass_context
def sessions_verb(context: click.Context, common: Common, *, closed: bool, everywhere: bool) -> None:
    """List the sessions of this root, oldest first."""
    if context.invoked_subcommand is not None:
        return
    with open_for_reading(common) as opened:
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
    origin = f"forked from {row['parent_id']}" if row["parent_id"] else ""
    return [row["id"], state, counted(row["length"], "message"), ago(row["created_at"]), origin]


@sessions_verb.command("show")
@click.argument("session_id", metavar="SESSION")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="How many of the last messages to show.",
)
@_named_options
def show(common: Common, *, session_id: str, limit: int) -> None:
    """Show a session: its parent, its forks, and the last messages of its transcript."""
    with open_for_reading(common) as opened:
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
    from mulligan.session.transcript_log import text_of

    calls = "".join(f" [calls {call.name}]" for call in calls_in(message))
    text = visible(" ".join(text_of(message).split()))
    return (text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…") + visible(calls)


@sessions_verb.command("close")
@click.argument("session_id", metavar="SESSION")
@click.option("--reason", metavar="WORDS", help="The reason, for the record.")
@_named_options
def close(common: Common, *, session_id: str, reason: str | None) -> None:
    """Close a session. Its calls can still be undone; opening the session again continues it."""
    with open_for_changes(common) as opened:
        opened.sessions.close(session_id, reason)
    common.answer({"session_id": session_id, "closed": True}, f"closed {visible(session_id)}")


@sessions_verb.command("reset")
@click.argument("session_id", metavar="SESSION")
@yes_option
@_named_options
def reset(common: Common, *, session_id: str, yes: bool) -> None:
    """Empty a session's transcript. Its id, its forks and its files do not change."""
    otherwise = "reset empties the transcript of a session; confirm with --yes."
    confirm(common, f"Empty the transcript of {visible(session_id)}?", yes=yes, otherwise=otherwise)
    with open_for_changes(common) as opened:
        opened.sessions.get(session_id, "reset").reset()
    common.answer({"session_id": session_id, "reset": True}, f"reset {visible(session_id)}")


@click.command()
@click.argument("session_id", metavar="[SESSION]", required=False)
@click.option("--keep-last", metavar="N", type=int, help="How many of the last messages to keep.  [default: 12]")
@click.option("--strategy", "compact_strategy", type=_STRATEGIES, help="How to summarise.  [default: observation_mask]")
@click.option("--token-threshold", metavar="N", type=int, help="Compact only if there are more tokens than this.")
@click.option(
    "--tool-output-max-chars",
    metavar="N",
    type=int,
    help="Cut the tool outputs that are kept to this length.  [default: 16000]",
)
@click.option("--hard-limit-tokens", metavar="N", type=int, help="The result must not have more tokens than this.")
@click.option("--hard-limit-strategy", type=_STRATEGIES, help="How to reach the hard limit.  [default: llm]")
@working_options
def compact_verb(common: Common, *, session_id: str | None, **given: Any) -> None:
    """Replace the older part of a session's transcript by a summary. The journal keeps all messages."""
    name = session_id or common.session or DEFAULT_SESSION
    options = {key: value for key, value in given.items() if value is not None}
    with open_for_changes(common) as opened:
        session = opened.sessions.get(name, "compact")
        before = session.length()
        after = session.compact(options)
    body = {"session_id": name, "messages_before": before, "messages": after}
    common.answer(body, f"{visible(name)}: {counted(before, 'message')} before, {after} now")


@click.command("attach")
@click.argument("named", metavar="SESSION", required=False)
@click.option("--client", metavar="ID", help="The client's id. Default: a new one.")
@click.option(
    "--mode",
    type=click.Choice(["observer", "controller"]),
    default="observer",
    show_default=True,
    help="Only read, or control the session.",
)
@click.option("--takeover", is_flag=True, help="Take control of the session, even if another client has it.")
@click.option("--after", type=click.IntRange(min=0), metavar="SEQ", help="Begin after this event; 0 for all events.")
@common_options
def attach_verb(
    common: Common, *, named: str | None, client: str | None, mode: str, takeover: bool, after: int | None
) -> None:
    """Print a session's events as they happen, one on each line, until Ctrl-C or until the session is closed."""
    # A signal handler may use a SimpleQueue while the interrupted thread waits on it; locks would deadlock.
    over: Over = queue.SimpleQueue()
    for leaving in (signal.SIGINT, signal.SIGTERM):
        signal.signal(leaving, lambda *_: over.put(None))
    name = f"{DEFAULT_CLIENT}-{os.getpid()}" if client is None else client
    with open_for_changes(common) as opened:
        found = opened.sessions.get(_session_named(common, named), "attach")
        following = found.subscribe(_printing(over, as_json=common.as_json), after=after)
        try:
            found.attach(name, mode=None if takeover else mode, takeover=takeover or None)
            _follow(found, name, following, over)
        finally:
            following.close()
            _detach(found, name)


def _session_named(common: Common, named: str | None) -> str:
    session = named or common.session
    if session is None:
        raise click.UsageError("Name the session; `mulligan sessions` lists them.")
    return session


def _follow(session: DurableSession, client: str, following: Subscription, over: Over) -> None:
    """Sends heartbeats until the end. The subscription prints the events on its own thread."""
    while not following.ended:
        try:
            over.get(timeout=HEARTBEAT_EVERY_S)
        except queue.Empty:
            session.heartbeat(client)
            continue
        following.wait(timeout_s=LAST_LINES_S)
        return


def _detach(session: DurableSession, client: str) -> None:
    try:
        session.detach(client, reason="client_exit")
    except MulliganError as error:
        # The session was closed, or another client has detached us.
        if error.code not in ("session_closed", "client_not_attached"):
            raise


def _printing(over: Over, *, as_json: bool) -> Callable[[Event], None]:
    """Prints each event at once. Ends when the session is closed or the reader closes the pipe."""

    def print_event(event: Event) -> None:
        try:
            print_json(event) if as_json else click.echo(_line(event))
        except BrokenPipeError:
            over.put(None)
        if event["kind"] == CLOSED_EVENT:
            over.put(None)

    return print_event


def _line(event: Event) -> str:
    return f"{event['at'][11:19]}  {paint(event['kind'], 'bold')}  {visible(_event_text(event))}".rstrip()


def _event_text(event: Event) -> str:
    """An event as one line of text."""
    if event["text"]:
        first, *more = event["text"].splitlines() or [""]
        return f"{event['role']}: {first}{' …' if more else ''}"
    about = event.get("metadata", {})
    who = about.get("client_id") or about.get("client", {}).get("client_id", "")
    words = [str(about[name]) for name in ("action", "reason", "request_id", "path") if name in about]
    return " ".join([*words, who]).strip()


@click.command("takeover")
@click.argument("named", metavar="SESSION", required=False)
@click.option(
    "--client", metavar="ID", default=DEFAULT_CLIENT, show_default=True, help="The client that takes control."
)
@common_options
def takeover_verb(common: Common, named: str | None, client: str) -> None:
    """Give a client control of a session. The client that had control becomes an observer."""
    session = _session_named(common, named)
    with open_for_changes(common) as opened:
        done = opened.sessions.get(session, "takeover").takeover(client)
    if common.as_json:
        print_json(done)
        return
    before = done["previous_controller_id"]
    was = f"; {before} is an observer now" if before not in (None, done["active_controller_id"]) else ""
    click.echo(visible(f"{done['active_controller_id']} is in control of {session}{was}."))


@click.command("export")
@click.argument("wanted", metavar="SESSION", required=False)
@click.option(
    "--mode",
    type=click.Choice(["sanitized", "local", "replay_only"]),
    default="sanitized",
    show_default=True,
    help="What the document holds.",
)
@click.option("-o", "--output", metavar="FILE", help="Where to write it. Default: standard output.")
@click.option("--with-content", is_flag=True, help="Include the contents of files (only with --mode local).")
@common_options
def export_verb(common: Common, *, wanted: str | None, mode: str, output: str | None, with_content: bool) -> None:
    """Write a session as one portable JSON document.

    sanitized: without secrets, private paths and names, for sharing. local: everything, for your own machines.
    replay_only: what happened, without any messages. Mulligan refuses to write a document with a secret in it.
    """
    from mulligan.values.canonical import encode

    session = _session_named(common, wanted)
    with open_for_reading(common) as opened:
        bundle = opened.sessions.export(session, mode, content=True if with_content else None)
    data = encode(bundle) + b"\n"
    if output is None or output == "-":
        sys.stdout.buffer.write(data)
        return
    _write(output, data)
    _print_export(common, bundle, output, len(data))


def _write(path: str, data: bytes) -> None:
    """Writes a file that only its owner can read. An existing file is replaced as a whole, or not at all."""
    draft = f"{path}.{os.getpid()}.part"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(draft, path)
        finally:
            # After the replacement there is no draft.
            with suppress(FileNotFoundError):
                os.unlink(draft)
    except OSError as error:
        raise fault_of_os_error(error, f"Writing {path}") from None


def _print_export(common: Common, bundle: Document, path: str, size: int) -> None:
    facts = {
        "bundle_id": bundle["bundle_id"],
        "mode": bundle["redaction"]["mode"],
        "messages": len(bundle["transcript"]["sections"][0]["messages"]),
        "entries": len(bundle["redaction"]["entries"]),
    }
    if common.as_json:
        print_json({**facts, "path": path, "bytes": size})
        return
    words = f"{counted(facts['messages'], 'message')}, {counted(facts['entries'], 'redaction')}, {size_words(size)}"
    click.echo(f"{visible(path)}: {facts['mode']}, {words}")


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option("--as", "name", metavar="ID", help="The new session's id. Default: the one it had.")
@click.option(
    "--from", "agent", type=click.Choice(["claude", "codex", "gemini"]), help="FILE is a session file of this agent."
)
@click.option("--last", type=click.IntRange(min=0), metavar="N", help="With --from: only the last N messages.")
@click.option("--drop-tool-calls", is_flag=True, help="With --from: only messages, no tool calls.")
@options_saying("Not used: --as names the new session.")
def import_verb(
    common: Common, *, file: str, name: str | None, agent: str | None, last: int | None, drop_tool_calls: bool
) -> int:
    """Create a session from a bundle, or with --from from another agent's session file."""
    if agent is None and (last is not None or drop_tool_calls):
        raise click.UsageError("--last and --drop-tool-calls need --from.")
    if agent is not None:
        options = {"rename_session": name, "source_agent": agent, "truncate_to_last": last}
        return _seed(common, file, {**options, "drop_tool_calls": drop_tool_calls})
    data = _read(file)
    with open_for_changes(common) as opened:
        session = opened.sessions.import_bundle(data, name=name)
        count = opened.sessions.get(session, "import").length()
    common.answer(
        {"ok": True, "session_id": session, "messages_loaded": count},
        f"{visible(session)}: {counted(count, 'message')}",
    )
    return 0


def _seed(common: Common, file: str, options: dict[str, object]) -> int:
    with open_for_changes(common) as opened:
        done = opened.sessions.seed_from_jsonl(file, options)
    if common.as_json:
        print_json(done)
    elif done["ok"]:
        click.echo(f"{visible(done['session_id'])}: {counted(done['messages_loaded'], 'message')}")
    else:
        click.echo(f"mulligan: {visible(done['error'])}", err=True)
    return 0 if done["ok"] else 2


def _read(file: str) -> bytes:
    """Reads at most one byte more than a bundle may have, so that Mulligan refuses a large file without reading it."""
    from mulligan.session.bundle.format import BUNDLE_MAX_BYTES, check_bundle_size

    if file == "-":
        return sys.stdin.buffer.read(BUNDLE_MAX_BYTES + 1)
    try:
        with open(file, "rb") as bundle:
            check_bundle_size(os.fstat(bundle.fileno()).st_size)
            return bundle.read(BUNDLE_MAX_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            raise fault("bad_usage", f"{file} is not a file that Mulligan can read.") from None
        raise fault_of_os_error(error, f"Reading {file}") from None
