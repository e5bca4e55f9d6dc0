"""Verbs that only read: status, log, show, diff, coverage, cat, blame."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.format import columns_shown, paint, print_json, print_pages
from mulligan.cli.open_root import open_for_reading, path_in_any_root, stores_elsewhere
from mulligan.cli.options import THIS_SESSION, Common, common_options, options_saying, text
from mulligan.history.log import LOG_LIMIT
from mulligan.history.outcome_text import (
    EDITED_OUTSIDE,
    aborted_words,
    ago,
    call_words,
    change_line,
    changes_words,
    counted,
    gap_lines,
    gap_words,
    outside_words,
    short,
    title_text,
    who_text,
)
from mulligan.values.canonical import decode, object_in
from mulligan.values.errors import MulliganError
from mulligan.values.text import padded, shortened, visible, width_of

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.history.open_root import OpenRoot
    from mulligan.history.tables import CallRow
    from mulligan.store.protocol import Tx
    from mulligan.values.ids import SessionId
    from mulligan.values.paths import RepoPath

_TITLE_MAX, _PROMPT_SHOWN = 50, 100
_STATUS_WORDS = 20
_STAT_COLUMNS, _STAT_BAR = 100, 24
_WHO_MAX, _WHO_NARROW, _WIDE = 24, 15, 100
_MARKS = {"committed": ("✓", "green"), "undone": ("↩", "yellow"), "aborted": ("✗", "red"), "open": ("…", "cyan")}


@click.command()
@common_options
def status(common: Common) -> None:
    """Show the current state: the number of calls, what runs, what undo and redo would do."""
    from mulligan.history.call_about import call_named
    from mulligan.history.log import count_of_calls, listed, newest_to_undo
    from mulligan.history.tables import OPEN, REDO

    with open_for_reading(common) as opened, opened.open_root.ledger.store.read() as tx:
        calls = count_of_calls(tx, opened.open_root, common.session_id)
        running, redoable = [one.call for one in tx.select(OPEN)], [one.call for one in tx.select(REDO)]
        working = listed(tx, opened.open_root, common.session_id, running)
        redo = listed(tx, opened.open_root, common.session_id, redoable)
        newest = newest_to_undo(tx, opened.open_root, common.session_id)
        body: dict[str, Any] = {
            "root": opened.root,
            "calls": calls,
            "open": [row.id for row in working],
            "undo": None if newest is None else newest.id,
            "redo": max((row.id for row in redo), default=None),
            "recovered": [one.call for one in opened.recovered if one.stuck is None],
        }
        named = [newest, *working, *redo]
        body["other_stores"] = stores_elsewhere(common, opened.root)
        body["named"] = [call_named(tx, row) for row in named if row is not None]
    if common.as_json:
        print_json(body)
        return
    columns, known = columns_shown(), {one["id"]: one for one in body["named"]}

    def name(call: str) -> str:
        return call_words(known[call], columns and columns - _STATUS_WORDS)

    click.echo(f"{visible(str(body['root']))}: {counted(calls, 'call')} on record")
    click.echo(f"  undo would undo {name(body['undo'])}" if body["undo"] else "  nothing to undo")
    if body["redo"]:
        click.echo(f"  redo would reverse {name(body['redo'])}")
    for call in working:
        click.echo(f"  still running: {name(call.id)}")
    for store in body["other_stores"]:
        click.echo(f"  another store knows this folder: `mulligan status --store {shlex.quote(visible(store))}`")


_TIME = re.compile(r"(\d{1,6})\s*([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def _time(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
    """The time that the user means, as records have it."""
    from datetime import datetime, timedelta

    from mulligan.values.clock import FixedClock, SystemClock, timestamp

    if given is None:
        return None
    ago = _TIME.fullmatch(given.strip())
    try:
        if ago is not None:
            when = SystemClock().now() - timedelta(seconds=int(ago[1]) * _UNIT_S[ago[2]])
        else:
            when = datetime.fromisoformat(given.strip())
        return timestamp(FixedClock(when.astimezone(UTC)))
    except (ValueError, OverflowError):
        words = f"{visible(given)} is no time: write 30m, 2h, 3d, 2026-11-19 or '2026-11-19 08:00'."
        raise click.BadParameter(words) from None


@click.command()
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), default=LOG_LIMIT, show_default=True, help="How many at most."
)
@click.option("--by-prompt", is_flag=True, help="Group the calls by the prompt that caused them.")
@click.option("--path", "paths", multiple=True, metavar="P", help="Only calls that changed this path or below it.")
@click.option("--agent", metavar="NAME", callback=text, help="Only calls of this agent, for example claude.")
@click.option(
    "--since", metavar="TIME", callback=_time, help="Only calls since then: 30m, 2h, 3d, or 2026-11-19 08:00."
)
@click.option(
    "--grep", metavar="WORDS", callback=text, help="Only calls whose tool, command, prompt or paths have these words."
)
@common_options
def log(common: Common, limit: int, *, by_prompt: bool, paths: tuple[str, ...], **wanted: str | None) -> None:
    """List calls and outside edits, newest first."""
    from mulligan.history.log import log_view
    from mulligan.history.tables import CALLS

    with open_for_reading(common) as opened:
        only = _filter(opened, paths, **wanted) if paths or any(wanted.values()) else None
        rows = log_view(opened.open_root, common.session_id, limit=limit, only=only)
        with opened.open_root.ledger.store.read() as tx:
            found = [call for row in rows if (call := tx.get(CALLS, row["id"])) is not None]
        reasons = {call.id: call.reason for call in found}
    groups = _by_prompt(rows) if by_prompt else []
    if common.as_json:
        print_json(groups if by_prompt else rows)
        return
    if not rows:
        click.echo("No calls yet." if only is None else "No such calls.")
    lines = log_lines(rows, reasons)
    if not by_prompt:
        print_pages(lines)
        return
    line_of = {row["id"]: line for row, line in zip(rows, lines, strict=True)}
    print_pages(
        [line for group in groups for line in (_prompt_line(group), *(line_of[c["id"]] for c in group["calls"]))]
    )


def _by_prompt(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls by turn, the turn of the newest call first. Outside edits have no turn, and so a group each."""
    groups: dict[tuple[str | None, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["session_id"], row["id"] if row["external"] else row["turn_id"])
        head = {name: row[name] for name in ("turn_id", "session_id", "agent", "prompt")}
        groups.setdefault(key, {**head, "calls": []})["calls"].append(row)
    return list(groups.values())


def _prompt_line(group: dict[str, Any]) -> str:
    said = visible(" ".join((group["prompt"] or "").split()))
    words = said or (EDITED_OUTSIDE if group["session_id"] is None else "(no prompt on record)")
    return paint(shortened(words, columns_shown() or _PROMPT_SHOWN), "bold")


def _filter(
    opened: Mulligan, paths: Sequence[str], *, agent: str | None, since: str | None, grep: str | None
) -> Callable[[Tx, CallRow], bool]:
    """Whether a call is one that the user wants to see."""
    from mulligan.history.call_about import about_call, agent_of
    from mulligan.history.multi_root import is_at_or_below, with_parts
    from mulligan.history.tables import CHANGES, changes_of

    root, wanted = opened.open_root.disk.root, [path_in_any_root(opened, path) for path in paths]
    places = frozenset(os.fsencode(p) if p.startswith("/") else root.place_of(p) for p in wanted)
    needle = (grep or "").casefold()

    def only(tx: Tx, row: CallRow) -> bool:
        if (since is not None and row.started_at < since) or (agent is not None and agent_of(row) != agent):
            return False
        parts = with_parts(tx, [row]) if places or grep else ()
        if places and not any(
            is_at_or_below(one.place, places) for p in parts for one in tx.select(CHANGES, {"call": p.id})
        ):
            return False
        if not needle:
            return True
        about = about_call(tx, row)
        texts = [
            row.tool,
            row.label,
            about.command,
            about.prompt,
            *(str(c.path) for p in parts for c in changes_of(tx, p.id)),
        ]
        return any(needle in text.casefold() for text in texts if text)

    return only


def log_lines(rows: Sequence[dict[str, Any]], reasons: Mapping[str, str | None] = MappingProxyType({})) -> list[str]:
    """One line for each call of `mulligan log`, in columns that fit the terminal.

    `reasons` say why aborted calls were rolled back, and what reverted files from outside.
    """
    columns = columns_shown()
    is_narrow = columns is not None and columns < _WIDE
    whos = [who_text(row["agent"], row["session_id"]) for row in rows]
    who_max = min(max(map(width_of, whos), default=0), _WHO_NARROW if is_narrow else _WHO_MAX)
    whens = [ago(row["started_at"]) for row in rows]
    when_max = max(map(len, whens), default=0)
    titles = [
        visible(reasons.get(row["id"]) or EDITED_OUTSIDE)
        if row["external"]
        else title_text(row["tool"], row["label"], row["command"])
        for row in rows
    ]
    left = None if columns is None else max(20, columns - 16 - when_max - who_max)
    title_max = min(max(map(width_of, titles), default=0), _TITLE_MAX if left is None else left * 3 // 5)
    return [
        _log_line(
            row,
            reasons.get(row["id"]),
            cells=[when.rjust(when_max), *(padded(shortened(text, most), most) for text, most in cells if most)],
            columns=columns,
        )
        for row, when, *cells in zip(
            rows,
            whens,
            [(who, who_max) for who in whos],
            [(title, title_max) for title in titles],
            strict=True,
        )
    ]


def _log_line(row: dict[str, Any], reason: str | None, *, cells: Sequence[str], columns: int | None) -> str:
    mark, colour = ("~", "magenta") if row["external"] else _MARKS.get(row["status"], ("·", "white"))
    words = changes_words(row["changes"])
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    tail = (aborted_words(reason) if row["status"] == "aborted" else ", ".join(words[:4])) + more
    acted = f"[{', '.join(row['outside'])}] " if row["outside"] else ""
    head = f"  {'  '.join(cells)}  "
    rest = None if columns is None else columns - 10 - width_of(head) - len(acted)
    tail = tail if rest is None else shortened(tail, max(rest, 1))
    return f"{paint(mark, colour)} {paint(short(row['id']), 'bold')}{head}{paint(acted, 'yellow')}{tail}".rstrip()


@click.command()
@click.argument("call", callback=text, required=False)
@common_options
def show(common: Common, call: str | None) -> None:
    """Show one call (default: the newest): its cause, what it changed, what Mulligan could not capture."""
    from mulligan.history.call_about import redacted
    from mulligan.history.log import call_view, diff_view

    with open_for_reading(common) as opened:
        row = _call_shown(opened.open_root, call, common.session_id)
        with opened.open_root.ledger.store.read() as tx:
            view = call_view(opened.open_root, tx, row)
        view["transcript"], told = _conversation(row)
        view["prompt"] = view["prompt"] or (redacted(told) if told else None)
        view["reason"] = row.reason and redacted(row.reason)
        view["cause"] = row.cause and redacted(row.cause)
        diff = diff_view(opened.open_root, row)
    if common.as_json:
        print_json(view)
        return
    facts = {
        "id": view["id"],
        "agent": view["agent"],
        "session": view["session_id"] or "(none: edited outside)",
        "command": view["command"],
        "prompt": view["prompt"],
        "record": view["transcript"],
        "reason": view["reason"],
    }
    lines = log_lines([view | {"changes": [], "outside": []}], {view["id"]: view["reason"]})
    lines += [f"  {name:<7}  {visible(fact)}" for name, fact in facts.items() if fact]
    lines += [paint(f"  {outside_words(view['outside'])}", "yellow")] if view["outside"] else []
    lines += [f"  {change_line(change)}" for change in view["changes"]]
    lines += [paint(f"  {line}", "yellow") for line in gap_lines(view["coverage"])]
    print_pages([*lines, *diff_lines(diff)])


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


def diff_lines(diff: str) -> list[str]:
    """The lines of a diff in colours, after an empty line."""
    colours = {"+": "green", "-": "red", "@": "cyan", "d": "bold"}
    shown = [(visible(line), colours.get(line[:1])) for line in diff.splitlines()]
    return [*([""] if diff else []), *(paint(line, colour) if colour else line for line, colour in shown)]


@click.command()
@click.argument("call", callback=text, required=False)
@click.argument("other", callback=text, required=False)
@click.option("--stat", is_flag=True, help="Only how many lines of each file were added and removed.")
@common_options
def diff(common: Common, call: str | None, other: str | None, stat: bool) -> None:
    """Show what a call changed (default: the newest), as a diff that `git apply` accepts.

    For files that are not text, the diff only says that they differ.
    """
    from mulligan.history.log import as_it_happened, call_view, calls_of, diff_view, find_call, hunks_view
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
        with open_root.ledger.store.read() as tx:
            changes = [one for row in chosen for one in call_view(open_root, tx, row)["changes"]] if stat else []
    if common.as_json:
        stats = {"stat": _stat(changes)} if stat else {}
        print_json({"calls": [row.id for row in chosen], "diff": text, "files": files, **stats})
    elif stat:
        print_pages(_stat_lines(_stat(changes)))
    elif sys.stdout.isatty():
        print_pages(diff_lines(text))
    else:
        click.echo(text, nl=False)


def _stat(changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines added and removed in each file, over all changes."""
    found: dict[str, dict[str, Any]] = {}
    for one in changes:
        sums = found.setdefault(one["path"], {"path": one["path"], "added": 0, "removed": 0})
        sums["added"] += one["added"]
        sums["removed"] += one["removed"]
    return [found[path] for path in sorted(found)]


def _stat_lines(files: Sequence[dict[str, Any]]) -> list[str]:
    columns = columns_shown() or _STAT_COLUMNS
    names = [visible(one["path"]) for one in files]
    most = min(max(map(width_of, names), default=0), columns - _STAT_BAR - 20)
    digits = len(str(max((one["added"] + one["removed"] for one in files), default=0)))
    cells = [(padded(shortened(name, most), most), one) for name, one in zip(names, files, strict=True)]
    lines = [
        f"{name} | {one['added'] + one['removed']:>{digits}} {_stat_bar(one, files)}".rstrip() for name, one in cells
    ]
    added, removed = (sum(one[key] for one in files) for key in ("added", "removed"))
    return [*lines, f"{counted(len(files), 'file')} changed, +{added} -{removed}"]


def _stat_bar(one: dict[str, Any], files: Sequence[dict[str, Any]]) -> str:
    """Plus and minus signs; all bars have one scale."""
    widest = max(each["added"] + each["removed"] for each in files)
    scale = min(1.0, _STAT_BAR / widest) if widest else 0.0
    signs = [(sign, -(-int(one[key] * scale * 100) // 100)) for sign, key in (("+", "added"), ("-", "removed"))]
    return "".join(paint(sign * count, "green" if sign == "+" else "red") for sign, count in signs if count)


@click.command()
@click.argument("call", callback=text, required=False)
@common_options
def coverage(common: Common, call: str | None) -> None:
    """List what Mulligan could not capture, for one call or for all."""
    from mulligan.history.log import calls_with_gaps, coverage_of_call, find_call

    with open_for_reading(common) as opened:
        named = None if call is None else find_call(opened.open_root, call, common.session_id)
        with opened.open_root.ledger.store.read() as tx:
            rows = calls_with_gaps(tx, opened.open_root, common.session_id) if named is None else [named]
            found = [(row.id, coverage_of_call(tx, row)) for row in rows]
    found = [(id, gaps) for id, gaps in found if gaps or call is not None]
    running = sum(row.status == "open" for row in rows)
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
