"""Verbs that only read: status, log, show, diff, coverage, cat, blame."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.format import paint, print_json
from mulligan.cli.open_root import open_for_reading, path_in_any_root
from mulligan.cli.options import THIS_SESSION, Common, common_options, options_saying, text
from mulligan.history.log import LOG_LIMIT
from mulligan.history.outcome_text import (
    aborted_words,
    ago,
    call_title,
    change_line,
    changes_words,
    counted,
    gap_lines,
    gap_words,
    short,
)
from mulligan.values.canonical import decode, object_in
from mulligan.values.errors import MulliganError
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.history.open_root import OpenRoot
    from mulligan.history.tables import CallRow
    from mulligan.values.ids import SessionId
    from mulligan.values.paths import RepoPath

_LABEL_SHOWN = 12
_TITLE_WIDTH, _TITLE_MAX = 18, 40
_NO_GAPS = "[]"
_MARKS = {"committed": ("✓", "green"), "undone": ("↩", "yellow"), "aborted": ("✗", "red"), "open": ("…", "cyan")}


@click.command()
@common_options
def status(common: Common) -> None:
    """Show the current state: the number of calls, what runs, what undo and redo would do."""
    from mulligan.history.log import calls_of, newest_to_undo
    from mulligan.history.tables import OPEN, REDO

    with open_for_reading(common) as opened, opened.open_root.ledger.store.read() as tx:
        calls = {row.id for row in calls_of(tx, opened.open_root, common.session_id)}
        working = [one.call for one in tx.select(OPEN) if one.call in calls]
        redo = [one.call for one in tx.select(REDO) if one.call in calls]
        newest = newest_to_undo(tx, opened.open_root, common.session_id)
        body: dict[str, Any] = {
            "root": opened.root,
            "calls": len(calls),
            "open": working,
            "undo": None if newest is None else newest.id,
            "redo": max(redo, default=None),
            "recovered": [one.call for one in opened.recovered if one.stuck is None],
        }
    if common.as_json:
        print_json(body)
        return
    click.echo(f"{visible(str(body['root']))}: {counted(len(calls), 'call')} on record")
    click.echo(f"  undo would undo {short(body['undo'])}" if body["undo"] else "  nothing to undo")
    if body["redo"]:
        click.echo(f"  redo would redo what {short(body['redo'])} undid")
    for call in working:
        click.echo(f"  {short(call)} is still running")


@click.command()
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), default=LOG_LIMIT, show_default=True, help="How many at most."
)
@common_options
def log(common: Common, limit: int) -> None:
    """List calls and outside edits, newest first."""
    from mulligan.history.log import log_view
    from mulligan.history.tables import CALLS

    with open_for_reading(common) as opened:
        rows = log_view(opened.open_root, common.session_id, limit=limit)
        with opened.open_root.ledger.store.read() as tx:
            found = [call for row in rows if (call := tx.get(CALLS, row["id"])) is not None]
        reasons = {call.id: call.reason for call in found}
        titles = {call.id: _title(call) for call in found}
    if common.as_json:
        print_json(rows)
        return
    if not rows:
        click.echo("No calls yet.")
    width = max(_TITLE_WIDTH, *map(len, titles.values())) if titles else _TITLE_WIDTH
    for row in rows:
        click.echo(log_line(row, reasons.get(row["id"]), title=f"{titles.get(row['id'], ''):<{width}}"))


def _title(call: CallRow) -> str:
    """The tool of a call and its command; without a command, the tool and the label, which may be a long id."""
    title, label = call_title(call), call.label or ""
    if title == call.tool and label not in ("", title):
        title = f"{title} {visible(_cut(label, _LABEL_SHOWN))}"
    return _cut(title, _TITLE_MAX)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def log_line(row: dict[str, Any], reason: str | None = None, *, title: str | None = None) -> str:
    """One line of `mulligan log`. `reason` says why an aborted call was rolled back. Default title: tool, label."""
    mark, colour = ("~", "magenta") if row["external"] else _MARKS.get(row["status"], ("·", "white"))
    names = " ".join(dict.fromkeys(name for name in (row["tool"], row["label"]) if name))
    who = "edited outside" if row["external"] else visible(_cut(names or "call", _TITLE_MAX))
    when = ago(row["started_at"])
    words = changes_words(row["changes"])
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    tail = (aborted_words(reason) if row["status"] == "aborted" else ", ".join(words[:4])) + more
    return f"{paint(mark, colour)} {paint(short(row['id']), 'bold')}  {when:>12}  {title or who:<18} {tail}".rstrip()


@click.command()
@click.argument("call", callback=text, required=False)
@common_options
def show(common: Common, call: str | None) -> None:
    """Show one call (default: the newest): its cause, what it changed, what Mulligan could not capture."""
    from mulligan.history.log import call_view, diff_view, turn_of

    with open_for_reading(common) as opened:
        row = _call_shown(opened.open_root, call, common.session_id)
        with opened.open_root.ledger.store.read() as tx:
            view, turn = call_view(opened.open_root, tx, row), turn_of(tx, row)
        view["transcript"], told = _conversation(row)
        view["prompt"] = (turn.prompt if turn else None) or told
        view["reason"] = row.reason
        view["cause"] = row.cause
        diff = diff_view(opened.open_root, row)
    if common.as_json:
        print_json(view)
        return
    click.echo(log_line(view | {"changes": []}, view["reason"], title=_title(row)))
    click.echo(f"  id       {view['id']}")
    click.echo(f"  session  {visible(view['session_id'] or '(none: edited outside)')}")
    if view["prompt"]:
        click.echo(f"  prompt   {visible(view['prompt'])}")
    if view["transcript"]:
        click.echo(f"  record   {visible(view['transcript'])}")
    if view["reason"]:
        click.echo(f"  reason   {visible(view['reason'])}")
    for change in view["changes"]:
        click.echo("  " + change_line(change))
    for line in gap_lines(view["coverage"]):
        click.echo(paint(f"  {line}", "yellow"))
    print_diff(diff)


def _call_shown(open_root: OpenRoot, call: str | None, session: SessionId | None) -> CallRow:
    from mulligan.history.log import calls_of, find_call
    from mulligan.values.errors import fault

    if call is not None:
        return find_call(open_root, call, session)
    with open_root.ledger.store.read() as tx:
        newest = next((row for row in calls_of(tx, open_root, session) if not row.external), None)
    if newest is None:
        raise fault("unknown_call", "There are no calls yet.")
    return newest


def _conversation(row: CallRow) -> tuple[str | None, str | None]:
    """For a call that a hook recorded: the file of the agent's conversation, and the prompt in it before the call."""
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
    """Show what a call changed (default: the newest), as a diff that `git apply` accepts.

    For files that are not text, the diff only says that they differ.
    """
    from mulligan.history.log import as_it_happened, calls_of, diff_view, find_call, hunks_view
    from mulligan.history.multi_root import main_of

    with open_for_reading(common) as opened:
        open_root, session = opened.open_root, common.session_id
        with open_root.ledger.store.read() as tx:
            rows = [row for row in as_it_happened(tx, calls_of(tx, open_root, session)) if row.wseq is not None]
        # `diff_view` of a call includes its parts in other roots, so a part is left out if its call is listed.
        whole = {row.id for row in rows if main_of(row) == row.id}
        rows = [row for row in rows if row.id in whole or main_of(row) not in whole]
        chosen = rows[:1] if call is None else [find_call(open_root, call, session)]
        if call is not None and other is not None:
            last = find_call(open_root, other, session)
            low, high = sorted((chosen[0].id, last.id))
            chosen = [row for row in reversed(rows) if low <= row.id <= high]
        text = "".join(diff_view(open_root, row) for row in chosen)
        files = hunks_view(open_root, chosen[0]) if common.as_json and len(chosen) == 1 else []
    if common.as_json:
        print_json({"calls": [row.id for row in chosen], "diff": text, "files": files})
    elif sys.stdout.isatty():
        print_diff(text)
    else:
        click.echo(text, nl=False)


@click.command()
@click.argument("call", callback=text, required=False)
@common_options
def coverage(common: Common, call: str | None) -> None:
    """List what Mulligan could not capture, for one call or for all."""
    from mulligan.history.log import calls_of, coverage_of_call, find_call, has_lost_bodies

    with open_for_reading(common) as opened:
        if call is None:
            with opened.open_root.ledger.store.read() as tx:
                known = list(calls_of(tx, opened.open_root, common.session_id))
                lost = has_lost_bodies(tx)
        else:
            known, lost = [find_call(opened.open_root, call, common.session_id)], True
        rows = [row for row in known if lost or row.coverage != _NO_GAPS or row.status == "open"]
        with opened.open_root.ledger.store.read() as tx:
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
@click.option("--after", is_flag=True, help="Print the file as it was after the call.")
@options_saying(THIS_SESSION, as_json="Errors as JSON; the file is printed as it is.")
def cat(common: Common, call: str, path: str, after: bool) -> None:
    """Print a file as it was before a call, or with --after as it was after the call."""
    from mulligan.history.multi_root import body_at
    from mulligan.values.errors import fault

    with open_for_reading(common) as opened:
        meant = path_in_any_root(opened, path)
        row = _call_of_file(opened, call, meant, common.session_id)
        with opened.open_root.ledger.store.read() as tx:
            digest = body_at(tx, opened.open_root, row, meant, after=after)
        if digest is None:
            raise fault("path_not_found", f"{meant} was not a file {'after' if after else 'before'} that call.")
        data = opened.open_root.ledger.blobs.read(digest)
    sys.stdout.buffer.write(data)


def _call_of_file(opened: Mulligan, call: str, path: RepoPath, session: SessionId | None) -> CallRow:
    """The call of that name in the current root, else in the mounted root that the file is in."""
    from mulligan.history.log import find_call
    from mulligan.history.multi_root import open_root_and_path

    try:
        return find_call(opened.open_root, call, session)
    except MulliganError as error:
        mounted, _ = open_root_and_path(opened.open_root, path)
        if error.code != "unknown_call" or mounted is opened.open_root:
            raise
        return find_call(mounted, call, session)


@click.command()
@click.argument("file")
@options_saying("Only the lines that this session wrote.")
def blame(common: Common, file: str) -> None:
    """Show which call, turn and prompt wrote each line of a file."""
    from mulligan.history.blame import blame as blamed
    from mulligan.history.multi_root import open_root_and_path

    with open_for_reading(common) as opened:
        # A link has no lines of its own.
        path = path_in_any_root(opened, os.path.realpath(file) if os.path.islink(file) else file)
        numbered = enumerate(blamed(*open_root_and_path(opened.open_root, path)), 1)
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


_LINE_MAX = 16 * 1024 * 1024


def prompt_before(path: str, label: str) -> str | None:
    """The user's last prompt before the call with that label, from the agent's file of the conversation.

    The file has one JSON document on each line, in the agent's own format, so lines that do not fit are skipped.
    """
    said: str | None = None
    try:
        with open(path, "rb") as file:
            while line := file.readline(_LINE_MAX):
                body = object_in(line)
                said = _prompt_in(body) or said
                if label.encode() in line and not _prompt_in(body):
                    return said
    except OSError:
        return None
    return None


def _prompt_in(body: Mapping[str, Any]) -> str | None:
    """The user's prompt in this line; None if the line is not a prompt."""
    payload = body.get("payload")
    if isinstance(payload, dict):
        said = _text(payload.get("content")) if payload.get("role") == "user" else None
        return None if said is None or said.startswith("<") else said
    message = body.get("message") if isinstance(body.get("message"), dict) else body
    is_theirs = body.get("type") == "user" and not body.get("isMeta")
    return _text(message.get("content")) if is_theirs and isinstance(message, dict) else None


def _text(content: object) -> str | None:
    if isinstance(content, str):
        return content or None
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) or None
