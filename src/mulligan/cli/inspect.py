"""Verbs that only look: status, log, show, diff, coverage, cat, blame."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.doors import look, path_in_any_root
from mulligan.cli.options import THIS_SESSION, Common, common_options, options_saying, text
from mulligan.cli.output import counted, paint, print_json, visible
from mulligan.cli.words import aborted_words, ago, change_line, changes_words, gap_lines, gap_words, short
from mulligan.history.log import LOG_LIMIT
from mulligan.values.ids import SessionId

if TYPE_CHECKING:
    from mulligan.history.desk import Desk
    from mulligan.history.tables import CallRow

_LABEL_SHOWN = 12
_NO_GAPS = "[]"
_MARKS = {"committed": ("✓", "green"), "undone": ("↩", "yellow"), "aborted": ("✗", "red"), "open": ("…", "cyan")}


def _session(common: Common) -> SessionId | None:
    return None if common.session is None else SessionId(common.session)


@click.command()
@common_options
def status(common: Common) -> None:
    """Where things stand: the newest call, what is open, what can be undone and redone."""
    from mulligan.history.log import calls_of, newest_standing
    from mulligan.history.tables import OPEN, REDO

    with look(common) as opened, opened.desk.ledger.store.read() as tx:
        calls = {row.id for row in calls_of(tx, opened.desk, _session(common))}
        working = [one.call for one in tx.select(OPEN) if one.call in calls]
        redo = [one.call for one in tx.select(REDO) if one.call in calls]
        standing = newest_standing(tx, opened.desk, _session(common))
        body: dict[str, Any] = {
            "root": opened.root,
            "calls": len(calls),
            "open": working,
            "undo": None if standing is None else standing.id,
            "redo": max(redo, default=None),
            "recovered": [one.call for one in opened.recovered if one.stuck is None],
        }
    if common.as_json:
        print_json(body)
        return
    click.echo(f"{visible(str(body['root']))}: {counted(len(calls), 'call')} on record")
    click.echo(f"  undo would take back {short(body['undo'])}" if body["undo"] else "  nothing to undo")
    if body["redo"]:
        click.echo(f"  redo would bring back what {short(body['redo'])} took back")
    for call in working:
        click.echo(f"  {short(call)} is still running")


@click.command()
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), default=LOG_LIMIT, show_default=True, help="How many at most."
)
@common_options
def log(common: Common, limit: int) -> None:
    """Calls and outside edits, newest first."""
    from mulligan.history.views import log_view

    with look(common) as opened:
        rows = log_view(opened.desk, _session(common), limit=limit)
        reasons = _reasons(opened.desk, [row["id"] for row in rows if row["status"] == "aborted"])
    if common.as_json:
        print_json(rows)
        return
    if not rows:
        click.echo("Nothing has happened here yet.")
    for row in rows:
        click.echo(log_line(row, reasons.get(row["id"])))


def _reasons(desk: Desk, calls: Iterable[str]) -> dict[str, str | None]:
    from mulligan.history.tables import CALLS

    with desk.ledger.store.read() as tx:
        return {call: row.reason for call in calls if (row := tx.get(CALLS, call)) is not None}


def _named(row: dict[str, Any]) -> str:
    """The tool, and what the call is called besides: with agents that is an id, which nobody reads to its end."""
    tool, label = row["tool"], row["label"]
    if tool is None or label in (None, tool):
        return tool or label or "call"
    return f"{tool} {label}" if len(label) <= _LABEL_SHOWN else f"{tool} {label[: _LABEL_SHOWN - 1]}…"


def log_line(row: dict[str, Any], reason: str | None = None) -> str:
    """`reason`: why it does not stand, if it does not."""
    mark, colour = ("~", "magenta") if row["external"] else _MARKS.get(row["status"], ("·", "white"))
    who = "edited outside" if row["external"] else visible(_named(row))
    when = ago(row["started_at"])
    words = changes_words(row["changes"])
    changed, more = ", ".join(words[:4]), len(words) - 4
    done = aborted_words(reason) if row["status"] == "aborted" else changed
    tail = f"{done} and {more} more" if more > 0 else done
    return f"{paint(mark, colour)} {paint(short(row['id']), 'bold')}  {when:>12}  {who:<18} {tail}".rstrip()


@click.command()
@click.argument("call", callback=text)
@common_options
def show(common: Common, call: str) -> None:
    """One call: what caused it, what it changed, what could not be captured."""
    from mulligan.history.log import find_call
    from mulligan.history.views import call_view, diff_view, turn_of

    with look(common) as opened:
        row = find_call(opened.desk, call, _session(common))
        with opened.desk.ledger.store.read() as tx:
            view, turn = call_view(opened.desk, tx, row), turn_of(tx, row)
        view["transcript"], told = _conversation(row)
        view["prompt"] = (turn.prompt if turn else None) or told
        view["reason"] = row.reason
        view["cause"] = row.cause
        diff = diff_view(opened.desk, row)
    if common.as_json:
        print_json(view)
        return
    click.echo(log_line(view | {"changes": []}, view["reason"]))
    click.echo(f"  id       {view['id']}")
    click.echo(f"  session  {visible(view['session_id'] or '(none: edited outside)')}")
    if view["prompt"]:
        click.echo(f"  prompt   {visible(view['prompt'])}")
    if view["transcript"]:
        click.echo(f"  talk     {visible(view['transcript'])}")
    if view["reason"]:
        click.echo(f"  reason   {visible(view['reason'])}")
    for change in view["changes"]:
        click.echo("  " + change_line(change))
    for line in gap_lines(view["coverage"]):
        click.echo(paint(f"  {line}", "yellow"))
    print_diff(diff)


def _conversation(row: CallRow) -> tuple[str | None, str | None]:
    """Of an agent's own call: the agent's record of the talk, and the prompt in it that led to the call."""
    from mulligan.agents.hooks.transcript import prompt_before
    from mulligan.values.canonical import decode

    transcript = decode(row.cause).get("transcript") if row.cause else None
    if not isinstance(transcript, str):
        return None, None
    return transcript, None if row.label is None else prompt_before(transcript, row.label)


def print_diff(diff: str) -> None:
    if diff:
        click.echo()
    for line in diff.splitlines():
        colour = {"+": "green", "-": "red", "@": "cyan", "d": "bold"}.get(line[:1])
        click.echo(paint(visible(line), colour) if colour else visible(line))


@click.command()
@click.argument("call", callback=text, required=False)
@click.argument("other", callback=text, required=False)
@common_options
def diff(common: Common, call: str | None, other: str | None) -> None:
    """What a call changed (default: the newest), as a diff that `git apply` takes.

    Of files that are not text it says only that they differ.
    """
    from mulligan.history.log import as_it_happened, calls_of, find_call
    from mulligan.history.sites import main_of
    from mulligan.history.views import diff_view

    with look(common) as opened:
        desk, session = opened.desk, _session(common)
        with desk.ledger.store.read() as tx:
            rows = [row for row in as_it_happened(tx, calls_of(tx, desk, session)) if row.wseq is not None]
        # A part is told with its call, if that is told.
        whole = {row.id for row in rows if main_of(row) == row.id}
        rows = [row for row in rows if row.id in whole or main_of(row) not in whole]
        chosen = rows[:1] if call is None else [find_call(desk, call, session)]
        if call is not None and other is not None:
            last = find_call(desk, other, session)
            low, high = sorted((chosen[0].id, last.id))
            chosen = [row for row in reversed(rows) if low <= row.id <= high]
        text = "".join(diff_view(desk, row) for row in chosen)
    if common.as_json:
        print_json({"calls": [row.id for row in chosen], "diff": text})
    elif sys.stdout.isatty():
        print_diff(text)
    else:
        click.echo(text, nl=False)


@click.command()
@click.argument("call", callback=text, required=False)
@common_options
def coverage(common: Common, call: str | None) -> None:
    """What could not be captured, of one call or of all."""
    from mulligan.history.log import calls_of, coverage_of_call, find_call, has_lost_bodies

    with look(common) as opened:
        if call is None:
            with opened.desk.ledger.store.read() as tx:
                known = list(calls_of(tx, opened.desk, _session(common)))
                lost = has_lost_bodies(tx)
        else:
            known, lost = [find_call(opened.desk, call, _session(common))], True
        rows = [row for row in known if lost or row.coverage != _NO_GAPS]
        with opened.desk.ledger.store.read() as tx:
            found = [(row.id, coverage_of_call(tx, row)) for row in rows]
    found = [(id, gaps) for id, gaps in found if gaps or call is not None]
    running = sum(row.status == "open" for row in known)
    if common.as_json:
        print_json([{"id": one, "coverage": gaps} for one, gaps in found])
        return
    for one, gaps in found:
        for gap in gaps:
            click.echo(f"{short(one)}  {gap_words(gap['path'], gap['reason'])}")
    if not any(gaps for _, gaps in found):
        still = f" so far; {counted(running, 'call')} still running" if running else ""
        click.echo(f"Everything was captured{still}.")


@click.command()
@click.argument("call", callback=text)
@click.argument("path")
@click.option("--after", is_flag=True, help="As the call left it, instead of as it found it.")
@options_saying(THIS_SESSION, as_json="Errors as JSON; the file is printed as it is.")
def cat(common: Common, call: str, path: str, after: bool) -> None:
    """Print a file as it was before a call, or with --after as the call left it."""
    from mulligan.history.log import find_call
    from mulligan.history.sites import body_at
    from mulligan.values.faults import fault

    with look(common) as opened:
        row, meant = find_call(opened.desk, call, _session(common)), path_in_any_root(opened, path)
        with opened.desk.ledger.store.read() as tx:
            digest = body_at(tx, opened.desk, row, meant, after=after)
        if digest is None:
            raise fault("path_not_found", f"{meant} was not a file {'after' if after else 'before'} that call.")
        data = opened.desk.ledger.blobs.read(digest)
    sys.stdout.buffer.write(data)


@click.command()
@click.argument("file")
@options_saying("Only the lines that this session wrote.")
def blame(common: Common, file: str) -> None:
    """Which call, turn and prompt wrote each line of a file."""
    from mulligan.history.blame import blame as blamed
    from mulligan.history.sites import desk_and_path

    with look(common) as opened:
        # A link has no lines of its own.
        path = path_in_any_root(opened, os.path.realpath(file) if os.path.islink(file) else file)
        numbered = enumerate(blamed(*desk_and_path(opened.desk, path)), 1)
    wanted = [(number, line) for number, line in numbered if common.session in (None, line.call and line.call.session)]
    if common.as_json:
        print_json([_blame_view(number, line) for number, line in wanted])
        return
    for number, line in wanted:
        who = short(line.origin) if line.call is not None and not line.call.external else line.origin
        prompt = (line.turn.prompt if line.turn else None) or (line.call.label if line.call else None) or ""
        text = line.line.decode("utf-8", "replace").rstrip("\r\n")
        click.echo(f"{paint(f'{who:<8}', 'bold')} {visible(prompt)[:24]:<24} {number:>5}  {visible(text)}")


def _blame_view(number: int, line: Any) -> dict[str, Any]:
    return {
        "line": number,
        "text": line.line.decode("utf-8", "replace"),
        "origin": line.origin,
        "call_id": line.call.id if line.call else None,
        "turn_id": line.call.turn if line.call else None,
        "prompt": line.turn.prompt if line.turn else None,
    }
