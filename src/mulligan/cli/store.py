"""Verbs about the store as a whole: `store`, `verify` and `du`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import click

from mulligan.cli.doors import work
from mulligan.cli.errors import INTEGRITY
from mulligan.cli.options import THIS_SESSION, Common, options_saying
from mulligan.cli.output import ProgressLine, counted, paint, print_json, print_rows, size_words, visible
from mulligan.history.bounds import set_store_cap, store_cap_of
from mulligan.history.ledger import Ledger
from mulligan.history.projection import key_to_wire
from mulligan.history.schema import SCHEMA
from mulligan.history.tables import CALLS, ROOTS
from mulligan.opening import open_store, store_directory
from mulligan.session.tables import SESSIONS, SessionRow, session_journal
from mulligan.store.housekeeping import sync_failure
from mulligan.store.journal import Journal
from mulligan.store.migrations import SCHEMA_VERSION
from mulligan.store.protocol import Store
from mulligan.store.usage import JournalUsage, Usage, usage_of
from mulligan.store.verify import Problem, verify, verify_journal
from mulligan.values.clock import SystemClock
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId, SystemIds

_WHOLE = "Not used: it is about the store as a whole."


@contextmanager
def opened(common: Common) -> Iterator[Store]:
    """The store as it is; a store that is not there is not made."""
    store = open_store(common.store, SCHEMA, durability="process", clock=SystemClock(), create=False)
    try:
        yield store
    finally:
        store.close()


@click.group("store", invoke_without_command=True)
@click.option("--cap", metavar="BYTES", type=click.IntRange(min=1), help="Set how large the store may grow.")
@options_saying(_WHOLE, root=_WHOLE)
@click.pass_context
def store_verb(context: click.Context, common: Common, cap: int | None) -> int:
    """Say where the store is, what is in it and how large it may grow.

    A new cap is in force at once: the oldest calls' bodies are dropped until the store fits, and undo says so.
    """
    if context.invoked_subcommand is not None:
        return 0
    with opened(common) as store:
        if cap is not None:
            set_store_cap(Ledger(store, Journal(SCHEMA), clock=SystemClock(), ids=SystemIds()), cap)
        about = _about(store, store_directory(common.store, os.environ) or "memory:")
    if common.as_json:
        print_json(asdict(about))
    else:
        _print_about(about)
    return 0


@store_verb.command("adopt")
@click.argument("named", metavar="ROOT")
@options_saying(_WHOLE, root="The folder that continues ROOT. Default: the path that ROOT had.")
def adopt_verb(common: Common, named: str) -> int:
    """Join the history of a folder that was replaced with that of the folder that has its path now.

    A new clone, or a folder that was deleted and made again, has a history of its own. ROOT is the path, or the id of
    the earlier root, which `mulligan store` lists.
    """
    with opened(common) as store, store.read() as tx:
        earlier = tx.get(ROOTS, named)
    folder = common.root or (named if earlier is None else os.fsdecode(earlier.place) or "/")
    with work(replace(common, root=folder)) as now:
        joined = now.desk.adopt(earlier)
    if common.as_json:
        print_json({"root": now.desk.root.id, "adopted": joined.id})
    else:
        click.echo(f"{visible(now.root)} has the history of {joined.id} too.")
    return 0


@dataclass(frozen=True)
class _About:
    store: str
    schema_version: int
    size_bytes: int
    cap_bytes: int
    sessions: int
    calls: int
    roots: list[str]
    known_roots: list[dict[str, str]]
    sync_failure: str | None


def _about(store: Store, directory: str) -> _About:
    with store.read() as tx:
        return _About(
            directory,
            SCHEMA_VERSION,
            store.size_bytes(),
            store_cap_of(tx),
            sessions=tx.count(SESSIONS),
            calls=tx.count(CALLS),
            roots=sorted({os.fsdecode(root.place) for root in tx.select(ROOTS)}),
            known_roots=[
                {"id": root.id, "path": key_to_wire(root.place), "host": root.host} for root in tx.select(ROOTS)
            ],
            sync_failure=sync_failure(tx),
        )


def _print_about(about: _About) -> None:
    rows = [
        ("store", about.store),
        ("format", str(about.schema_version)),
        ("size", f"{size_words(about.size_bytes)} of at most {size_words(about.cap_bytes)}"),
        ("holds", f"{counted(about.sessions, 'session')}, {counted(about.calls, 'call')}"),
    ]
    if about.sync_failure is not None:
        rows.append(("unsafe", f"a power cut may take what was written since {about.sync_failure}"))
    print_rows([*rows, *(("root", f"{root['path']} ({root['id']})") for root in about.known_roots)])


@click.command("verify")
@click.option("--quick", is_flag=True, help="Do not read the bodies of blobs.")
@options_saying("Only this session's journal, and what it needs.", root=_WHOLE)
def verify_verb(common: Common, quick: bool) -> int:
    """Check that every stored byte is what was written. Exit code 3 if one is not."""
    line = ProgressLine()
    with opened(common) as store:
        found = list(_problems(store, common, deep=not quick, line=line))
    line.clear()
    broken = [problem for problem in found if problem.severity == "broken"]
    if common.as_json:
        print_json({"ok": not broken, "problems": [asdict(problem) for problem in found]})
    else:
        _print_problems(found, broken)
    return INTEGRITY if broken else 0


def _problems(store: Store, common: Common, *, deep: bool, line: ProgressLine) -> Iterator[Problem]:
    if common.session is None:
        return verify(store, SCHEMA, deep=deep, progress=line)
    return verify_journal(store, session_journal(_known(store, common.session)), deep=deep)


def _known(store: Store, session: str) -> SessionId:
    with store.read() as tx:
        if not tx.has(SESSIONS, session):
            raise fault("unknown_session", f"This store has no session {session!r}.")
    return SessionId(session)


def _print_problems(found: list[Problem], broken: list[Problem]) -> None:
    for problem in found:
        mark = paint("broken", "red") if problem.severity == "broken" else paint("harmless", "yellow")
        click.echo(f"{mark}  {problem.kind}  {visible(problem.where)}: {visible(problem.message)}")
    if broken:
        click.echo(f"{len(broken)} broken. Restore the store from a backup; what is named above cannot be trusted.")
    else:
        click.echo("Every stored byte is what was written.")


@click.command("du")
@options_saying(THIS_SESSION, root="Only the sessions of this root. Default: those of every root.")
def du_verb(common: Common) -> int:
    """Show what the store takes, and what for."""
    with opened(common) as store:
        usage = usage_of(store)
        sessions = _sessions(store, common)
    directory = store_directory(common.store, os.environ) or "memory:"
    if common.as_json:
        print_json(_document(directory, usage, sessions))
    else:
        _print_usage(directory, usage, sessions)
    return 0


def _sessions(store: Store, common: Common) -> list[SessionRow]:
    """Those asked for: one by its id, those of a root, or all."""
    with store.read() as tx:
        rows = tx.select(SESSIONS)
        if common.root is not None:
            place = os.fsencode(os.path.realpath(common.root)).rstrip(b"/")
            roots = {root.id for root in tx.select(ROOTS, {"place": place})}
            rows = [row for row in rows if row.root in roots]
    if common.session is None:
        return rows
    found = [row for row in rows if row.id == common.session]
    if not found:
        raise fault("unknown_session", f"This store has no session {common.session!r}.")
    return found


def _by_session(usage: Usage, sessions: list[SessionRow]) -> list[tuple[SessionRow, JournalUsage]]:
    journals = {journal.journal: journal for journal in usage.journals}
    return [
        (session, journals.get(name, JournalUsage(name, 0, 0, 0, 0)))
        for session in sessions
        for name in (session_journal(SessionId(session.id)),)
    ]


def _document(directory: str, usage: Usage, sessions: list[SessionRow]) -> dict[str, object]:
    return {
        "store": directory,
        "total_bytes": usage.total_bytes,
        "journal": {
            "records": sum(journal.records for journal in usage.journals),
            "bytes": sum(journal.record_bytes for journal in usage.journals),
        },
        "blobs": [asdict(place) for place in usage.blobs],
        "sessions": [
            {
                "id": session.id,
                "records": journal.records,
                "record_bytes": journal.record_bytes,
                "blobs": journal.blobs,
                "blob_bytes": journal.blob_bytes,
            }
            for session, journal in _by_session(usage, sessions)
        ],
    }


_PLACES = {
    "db": "in the database",
    "out": "beside it",
    "parts": "in parts",
    "evicted": "evicted",
    "lost": "lost in a power cut",
}


def _print_usage(directory: str, usage: Usage, sessions: list[SessionRow]) -> None:
    records = sum(journal.records for journal in usage.journals)
    journal_bytes = sum(journal.record_bytes for journal in usage.journals)
    click.echo(f"{visible(directory)}: {size_words(usage.total_bytes)}")
    rows = [("journal", counted(records, "record"), size_words(journal_bytes))]
    for place in usage.blobs:
        rows.append(
            (f"blobs {_PLACES.get(place.place, place.place)}", f"{place.blobs}", size_words(place.stored_bytes))
        )
    for session, journal in _by_session(usage, sessions):
        rows.append((f"session {session.id}", counted(journal.blobs, "blob"), size_words(journal.blob_bytes)))
    print_rows(rows)
