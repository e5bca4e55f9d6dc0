"""Verbs about the store and the machine: store, verify, du, pin, gc, forget, replay, doctor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import click

from mulligan.api import has_store, open_store, store_directory
from mulligan.cli.format import ProgressLine, paint, print_json, print_rows, size_words
from mulligan.cli.open_root import known_roots, open_for_changes, opened_store, path_meant, usual_stores
from mulligan.cli.options import (
    INTEGRITY,
    PARTLY,
    THIS_SESSION,
    Common,
    ask,
    can_ask,
    common_options,
    confirm,
    exit_code_of_fault,
    options_saying,
    text,
    yes_option,
)
from mulligan.files.kernel import (
    LINUX,
    RESOLVE_BENEATH,
    SYS_LANDLOCK_CREATE_RULESET,
    exchange,
    nobody_writes,
    open_beneath,
    syscall,
)
from mulligan.history.ledger import Ledger
from mulligan.history.outcome_text import counted, short
from mulligan.history.projection import SCHEMA, key_to_wire
from mulligan.history.retention import set_store_cap, store_cap_of
from mulligan.history.tables import CALLS, ROOTS
from mulligan.session.tables import SESSIONS, SessionRow, session_journal
from mulligan.store.journal import Journal
from mulligan.store.maintenance import JournalUsage, StoreUsage, store_usage, sync_failure
from mulligan.store.migrations import SCHEMA_VERSION
from mulligan.store.protocol import Store
from mulligan.store.verify import Problem, verify, verify_journal
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, SystemIds
from mulligan.values.text import visible

_WHOLE = "Not used: it is about the store as a whole."


@click.group("store", invoke_without_command=True)
@click.option("--cap", metavar="BYTES", type=click.IntRange(min=1), help="Set how large the store may grow.")
@options_saying(_WHOLE, root=_WHOLE)
@click.pass_context
def store_verb(context: click.Context, common: Common, cap: int | None) -> int:
    """Show where the store is, what it holds and how large it may grow.

    A new cap applies at once: Mulligan evicts the contents of the oldest calls until the store fits. Undo of an
    evicted call says so.
    """
    if context.invoked_subcommand is not None:
        return 0
    with opened_store(common.store) as store:
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
    """Join the history of a replaced folder with the history of the folder that has its path now.

    A new clone, or a folder that was deleted and created again, has its own history. ROOT is the path, or the id of the
    earlier root, which `mulligan store` lists.
    """
    with opened_store(common.store) as store, store.read() as tx:
        earlier = tx.get(ROOTS, named)
    folder = common.root or (named if earlier is None else os.fsdecode(earlier.place) or "/")
    with open_for_changes(replace(common, root=folder)) as now:
        joined = now.open_root.adopt(earlier)
    common.answer(
        {"root": now.open_root.root.id, "adopted": joined.id},
        f"{visible(now.root)} now has the history of {joined.id} too.",
    )
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
        rows.append(("unsafe", f"a power cut may destroy what was written since {about.sync_failure}"))
    print_rows([*rows, *(("root", f"{root['path']} ({root['id']})") for root in about.known_roots)])


@click.command("verify")
@click.option("--quick", is_flag=True, help="Do not read the contents of blobs.")
@options_saying("Only this session's journal, and what it needs.", root=_WHOLE)
def verify_verb(common: Common, quick: bool) -> int:
    """Check that every stored byte is what Mulligan wrote. Exit code 3 if one is not."""
    line = ProgressLine()
    with opened_store(common.store) as store:
        if common.session is None:
            found = list(verify(store, SCHEMA, deep=not quick, progress=line))
        else:
            found = list(verify_journal(store, session_journal(_known(store, common.session)), deep=not quick))
    line.clear()
    broken = [problem for problem in found if problem.severity == "broken"]
    if common.as_json:
        print_json({"ok": not broken, "problems": [asdict(problem) for problem in found]})
    else:
        _print_problems(found, broken)
    return INTEGRITY if broken else 0


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
        click.echo(f"{len(broken)} broken. Restore the store from a backup; do not trust what is listed above.")
    else:
        click.echo("Every stored byte is what Mulligan wrote.")


@click.command("du")
@options_saying(THIS_SESSION, root="Only the sessions of this root. Default: those of every root.")
def du_verb(common: Common) -> int:
    """Show how much space the store uses, and what for."""
    with opened_store(common.store) as store:
        usage = store_usage(store)
        sessions = _sessions(store, common)
    directory = store_directory(common.store, os.environ) or "memory:"
    if common.as_json:
        print_json(_document(directory, usage, sessions))
    else:
        _print_usage(directory, usage, sessions)
    return 0


def _sessions(store: Store, common: Common) -> list[SessionRow]:
    """The session with the given id, the sessions of a root, or all."""
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


def _by_session(usage: StoreUsage, sessions: list[SessionRow]) -> list[tuple[SessionRow, JournalUsage]]:
    journals = {journal.journal: journal for journal in usage.journals}
    return [
        (session, journals.get(name, JournalUsage(name, 0, 0, 0, 0)))
        for session in sessions
        for name in (session_journal(SessionId(session.id)),)
    ]


def _document(directory: str, usage: StoreUsage, sessions: list[SessionRow]) -> dict[str, object]:
    counts = ("records", "record_bytes", "blobs", "blob_bytes")
    return {
        "store": directory,
        "total_bytes": usage.total_bytes,
        "journal": {
            "records": sum(journal.records for journal in usage.journals),
            "bytes": sum(journal.record_bytes for journal in usage.journals),
        },
        "blobs": [asdict(place) for place in usage.blobs],
        "sessions": [
            {"id": session.id, **{name: getattr(journal, name) for name in counts}}
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


def _print_usage(directory: str, usage: StoreUsage, sessions: list[SessionRow]) -> None:
    records = sum(journal.records for journal in usage.journals)
    journal_bytes = sum(journal.record_bytes for journal in usage.journals)
    click.echo(f"{visible(directory)}: {size_words(usage.total_bytes)}")
    rows = [("journal", counted(records, "record"), size_words(journal_bytes))]
    for one in usage.blobs:
        rows.append((f"blobs {_PLACES.get(one.place, one.place)}", f"{one.blobs}", size_words(one.stored_bytes)))
    for session, journal in _by_session(usage, sessions):
        rows.append((f"session {session.id}", counted(journal.blobs, "blob"), size_words(journal.blob_bytes)))
    print_rows(rows)


@click.command()
@click.argument("call", callback=text)
@click.option("--off", is_flag=True, help="Unpin it.")
@common_options
def pin(common: Common, call: str, off: bool) -> None:
    """Protect the stored bytes that undo of a call needs from eviction."""
    from mulligan.history.log import find_call
    from mulligan.history.retention import pin_call

    with open_for_changes(common) as opened:
        row = find_call(opened.open_root, call, common.session_id)
        pin_call(opened.open_root.ledger, row, off=off)
    common.answer({"id": row.id, "pinned": not off}, f"{'unpinned' if off else 'pinned'} {short(row.id)}")


@click.command()
@yes_option
@click.option(
    "--snapshots",
    "days",
    metavar="DAYS",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Delete snapshots that are older than this, unless a newer snapshot needs them.",
)
@options_saying("Not used: stored bytes may belong to several sessions.")
def gc(common: Common, yes: bool, days: int) -> None:
    """Delete stored bytes that nothing needs any more, and give the space back to the file system."""
    from datetime import timedelta

    from mulligan.effects.snapshot_tools.store import collect_snapshots
    from mulligan.history.retention import collect_garbage, enforce_all_caps

    otherwise = "gc deletes stored bytes; confirm with --yes."
    confirm(common, "Delete the stored bytes that nothing needs any more?", yes=yes, otherwise=otherwise)
    with open_for_changes(common) as opened:
        store = opened.open_root.ledger.store
        before = store.size_bytes()
        enforce_all_caps(opened.open_root.ledger)
        given_up = collect_snapshots(opened.open_root.ledger, timedelta(days=days))
        line = ProgressLine()
        blobs, size = collect_garbage(opened.open_root.ledger, line)
        line.clear()
        store.reclaim_space()
        freed = max(0, before - store.size_bytes())
    if common.as_json:
        body = {"snapshots": given_up.snapshots, "blobs": blobs, "bytes": size + given_up.bytes, "freed_bytes": freed}
        print_json(body)
    else:
        gone = f"{counted(given_up.snapshots, 'snapshot')} and {counted(blobs, 'blob')}"
        click.echo(f"deleted {gone} ({size + given_up.bytes} bytes)")


@click.command("forget")
@click.argument("path_or_call", metavar="PATH|CALL", callback=text)
@yes_option
@common_options
def forget_verb(common: Common, path_or_call: str, yes: bool) -> None:
    """Erase the bytes that the store has of a PATH and everything below it, or of a CALL. This cannot be undone.

    Mulligan erases the bytes from the database, its free pages, its log and the files beside it, and erases recorded
    parameters and answers of tools. Content that another call or path shares is erased there too; Mulligan names it.
    Mulligan also deletes the copy of the store from before a migration. The file itself does not change. Undo then
    skips what was erased, with the reason `evicted`, and `verify` accepts the gap. The settings `capture.never` and
    `capture.digest_only` keep Mulligan from storing such bytes at all.
    """
    from mulligan.history.forget import forget_call, forget_path
    from mulligan.history.log import find_call

    with open_for_changes(common) as opened:
        try:
            call = None if os.path.lexists(path_or_call) else find_call(opened.open_root, path_or_call, None)
        except MulliganError:
            call = None
        if can_ask(common) and not yes:
            ask(f"Erase what the store has of {visible(path_or_call)}? This cannot be undone.")
        if call is not None:
            told = forget_call(opened.open_root, call)
        else:
            told = forget_path(opened.open_root, path_meant(opened, path_or_call))
    if common.as_json:
        print_json({"ok": True, "call": None if call is None else call.id, **told.to_json()})
        return
    if call is None and not told.digests and not told.records:
        click.echo(f"The store has nothing of {visible(path_or_call)}: no call has this id or changed such a path.")
        return
    erased, rewritten = counted(len(told.digests), "stored content"), counted(len(told.records), "record")
    click.echo(f"Mulligan erased {erased} and rewrote {rewritten}.")
    for name in told.copies:
        click.echo(f"  deleted {visible(name)}: the copy of the store from before a migration")
    for owner, path in told.shared:
        click.echo(f"  also erased the same content of call {visible(owner)}: {visible(path)}")


@click.command("replay")
@click.argument("words", nargs=-1, metavar="SESSION | diff A B")
@click.option("--verify", is_flag=True, help="Also check the hash chain and every blob that the state needs.")
@options_saying("The session, if none is named.", root="Not used: sessions are found in the store.")
def replay_verb(common: Common, words: tuple[str, ...], verify: bool) -> int:
    """Rebuild a session's state from the journal alone, and compare it with the current state. Changes nothing.

    `mulligan replay diff A B` shows the first step at which two sessions differ. Exit code 3 if something is missing or
    damaged, 1 if two sessions differ.
    """
    given = words or ((common.session,) if common.session else ())
    if given[:1] == ("diff",) and len(given) == 3:
        return _diff(common, given[1], given[2])
    if len(given) != 1:
        raise click.UsageError("Give one session, or `diff` and two sessions.")
    return _replay(common, given[0], verify=verify)


def _replay(common: Common, session: str, *, verify: bool) -> int:
    from mulligan.history.replay import check_needs, replay
    from mulligan.session.transcript_log import Archive

    with opened_store(common.store) as store:
        if verify:
            check_needs(store, SessionId(session))
        fresh = open_store("memory:", SCHEMA, durability="process", clock=SystemClock())
        done = replay(Archive(store, Journal(SCHEMA), SystemClock(), SystemIds()), SessionId(session), fresh)
    if common.as_json:
        print_json({**asdict(done), "same": done.same, "verified": verify})
    else:
        words = paint("same as the current state", "green") if done.same else paint("NOT the current state", "red")
        click.echo(f"{visible(session)}: {words}")
        print_rows([(name, str(getattr(done, name))) for name in ("digest", "records", "messages", "calls")])
    return 0 if done.same else INTEGRITY


def _diff(common: Common, ours: str, theirs: str) -> int:
    from mulligan.history.replay import first_difference

    with opened_store(common.store) as store, store.read() as tx:
        found = first_difference(tx, SessionId(ours), SessionId(theirs))
    if common.as_json:
        print_json({"same": found is None, "divergence": None if found is None else asdict(found)})
    elif found is None:
        click.echo("The two sessions are the same.")
    else:
        click.echo(f"The sessions differ from step {found.step} on.")
        for name, step in ((ours, found.ours), (theirs, found.theirs)):
            click.echo(f"{visible(name)}: {visible(str(step)) if step is not None else 'nothing more'}")
    return 0 if found is None else PARTLY


_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_GET_NOTIF_SIZES = 3
_LANDLOCK_VERSION = 1
_PROGRAM_TIMEOUT_S = 10.0
_NOT_USED = "Not used: it is about the machine and the store."


@fast_dataclass(slots=True, frozen=True)
class Finding:
    """One line of `mulligan doctor`. `ok` is None for plain information; `code` is the error code, if any."""

    name: str
    value: str
    ok: bool | None = None
    code: str | None = None


@click.command("doctor")
@options_saying(_NOT_USED, root=_NOT_USED)
def doctor_verb(common: Common) -> int:
    """Show what this machine offers and what is missing. Missing parts cost speed or features, never correctness.

    If the store does not open, the exit code is that of every verb: 3 for a damaged store.
    """
    found = [*_python_and_sqlite(), *_store(common), *_stores(common), *_hosts(common)]
    found += [*_capture(common), *_kernel(), *_programs()]
    if common.as_json:
        print_json({"findings": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            click.echo(f"{_mark(finding)} {finding.name}: {visible(finding.value)}")
    return max(exit_code_of_fault(fault(finding.code, finding.value)) if finding.code else 0 for finding in found)


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return "     "
    return paint("  ok ", "green") if finding.ok else paint("none ", "yellow")


def _python_and_sqlite() -> list[Finding]:
    import apsw

    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        Finding("sqlite", str(apsw.sqlite_lib_version()), True),
    ]


def _capture(common: Common) -> list[Finding]:
    """The capture rules in force; without any, an example to copy."""
    from mulligan.files.capture_rules import EXAMPLE, PROJECT_FILE, CaptureRules, user_file

    files = (user_file(os.environ), os.path.join(os.path.abspath(common.root or "."), PROJECT_FILE))
    rules = CaptureRules(files)
    try:
        rules.load()
    except MulliganError as error:
        return [Finding("capture", error.message, False, error.code)]
    there = [name for name in files if os.path.exists(name)]
    if rules.any:
        return [Finding("capture", f"some paths are not captured: {', '.join(there)}", True)]
    return [Finding("capture", f"every path; to leave some out, write into {files[0]}: {' '.join(EXAMPLE.split())}")]


def _store(common: Common) -> list[Finding]:
    from mulligan.store.sqlite_file import TRUST_OWNER, refuse_untrusted

    directory = store_directory(common.store, os.environ)
    if directory is None:
        return [Finding("store", "in memory")]
    try:
        refuse_untrusted(directory)
    except MulliganError as error:
        return [Finding("state directory", error.message, False, error.code)]
    found = [Finding("state directory", directory, os.path.isdir(directory))]
    if os.path.isdir(directory):
        from mulligan.store.sqlite_file import file_system_of

        found.append(Finding("file system", file_system_of(directory) or "unknown"))
    if os.environ.get(TRUST_OWNER) == "1":
        found.append(Finding("owner", f"{TRUST_OWNER}=1: a state directory of another user is trusted", False))
    if has_store(common.store):
        found += _check_opens(common)
    return found


def _stores(common: Common) -> list[Finding]:
    """The other stores that this user's settings may mean, and that exist."""
    found: list[Finding] = []
    for directory in usual_stores(common)[1:]:
        try:
            if has_store(directory):
                count = len(known_roots(directory))
                found.append(Finding("other store", f"{directory}: knows {counted(count, 'folder')}", True))
        except MulliganError as error:
            found.append(Finding("other store", f"{directory}: {error.message}", False))
    return found


def _hosts(common: Common) -> list[Finding]:
    """The hosts on this machine, what is installed in them, and the line that mends what is missing."""
    from mulligan.cli.hooks import hook_states, host_states

    if store_directory(common.store, os.environ) is None:
        return []
    found: list[Finding] = []
    try:
        hosts, hooks = host_states(common), hook_states(common)
    except MulliganError as error:
        # The finding about the state directory says this already.
        return [] if error.code == "untrusted_owner" else [Finding("hosts", error.message, False)]
    for name, rows in hosts.items():
        scopes = [f"{one['state']} for the {one['scope']}" for one in rows if one["state"] != "no"]
        version = rows[0]["version"]
        if version is None and not scopes:
            continue
        is_whole = bool(scopes) and all(one["state"] != "partly" for one in rows)
        mend = "" if is_whole else f"; `mulligan install {name}` sets it up"
        found.append(
            Finding(f"host {name}", f"{version or 'not found'}: {', '.join(scopes) or 'no undo'}{mend}", is_whole)
        )
    for one in hooks:
        if one["state"] != "no":
            is_whole = one["state"] == "installed"
            scope = f"`mulligan hooks install {one['agent']} --{one['scope']}`"
            mend = "" if is_whole else f"; {one.get('reason') or scope + ' mends them'}"
            found.append(Finding(f"hooks of {one['agent']}", f"{one['state']} in {one['path']}{mend}", is_whole))
    return found


def _check_opens(common: Common) -> list[Finding]:
    from mulligan.store.host import older_processes

    try:
        with opened_store(common.store) as store, store.read() as tx:
            failed, older = sync_failure(tx), older_processes(tx, store.is_alive)
    except MulliganError as error:
        return [Finding("store", error.message, False, error.code)]
    unsafe = [Finding("sync", f"a power cut may destroy what was written since {failed}", False)] if failed else []
    outdated = [Finding("older process", f"{words}; restart it", False) for words in older]
    return [Finding("store", "opens", True), *unsafe, *outdated]


def _kernel() -> list[Finding]:
    return [
        _try("openat2", "Mulligan resolves paths beneath a handle", _try_openat2),
        _try("exchange", "Mulligan replaces files atomically", _try_exchange),
        _try("leases", "Mulligan sees who else writes a file", _try_lease),
        _try("seccomp notify", "Mulligan sees each system call of a command", _try_notify),
        _try("overlay", "commands can run on a copy", _try_overlay),
        _try("landlock", "commands can run in a sandbox", _try_landlock),
        *(_inotify(name) for name in ("max_user_watches", "max_user_instances")),
    ]


def _try(name: str, good: str, attempt: Callable[[], bool]) -> Finding:
    try:
        works = attempt()
    except OSError as error:
        return Finding(name, f"not available ({error.strerror or error})", False)
    return Finding(name, good if works else "not available", works)


def _try_openat2() -> bool:
    directory = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(open_beneath(directory, b".", os.O_RDONLY | os.O_DIRECTORY, resolve=RESOLVE_BENEATH))
    finally:
        os.close(directory)
    return True


def _try_exchange() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "other"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(name.encode())
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            exchange(directory, b"one", b"other")
        finally:
            os.close(directory)
        with open(os.path.join(folder, "one"), "rb") as file:
            return file.read() == b"other"


def _try_lease() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        handle = os.open(path, os.O_RDONLY)
        try:
            return nobody_writes(handle) is True
        finally:
            os.close(handle)


def _try_notify() -> bool:
    import ctypes

    number = _SYS_SECCOMP.get(platform.machine())
    if not LINUX or number is None:
        return False
    sizes = (ctypes.c_uint16 * 3)()
    return syscall(number, _SECCOMP_GET_NOTIF_SIZES, 0, ctypes.byref(sizes)) == 0


def _try_overlay() -> bool:
    with open("/proc/filesystems", encoding="ascii") as file:
        return any(line.split()[-1] == "overlay" for line in file)


def _try_landlock() -> bool:
    return LINUX and syscall(SYS_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION) >= 1


def _inotify(name: str) -> Finding:
    try:
        with open(f"/proc/sys/fs/inotify/{name}", encoding="ascii") as file:
            return Finding(f"inotify {name}", file.read().strip())
    except OSError:
        return Finding(f"inotify {name}", "unknown")


def _programs() -> list[Finding]:
    beside = os.path.dirname(sys.executable)
    return [
        _program("git", shutil.which("git")),
        _program("rg", shutil.which("rg") or shutil.which("rg", path=beside)),
    ]


def _program(name: str, path: str | None) -> Finding:
    if path is None:
        return Finding(name, "not installed", False)
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=_PROGRAM_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, f"{path} does not run: {error}", False)
    return Finding(name, done.stdout.decode("utf-8", "replace").splitlines()[0], done.returncode == 0)


@click.command("completions")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@options_saying(_NOT_USED, root=_NOT_USED, as_json="Print the script as JSON text.")
def completions_verb(common: Common, shell: str) -> None:
    """Print a script that completes verbs and options in a shell, for example `eval "$(mulligan completions bash)"`.

    For fish: `mulligan completions fish > ~/.config/fish/completions/mulligan.fish`.
    """
    from click.shell_completion import get_completion_class

    from mulligan.cli import cli

    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    # The shell calls `mulligan` with this variable when the user presses the tab key.
    script = found(cli, {}, "mulligan", "_MULLIGAN_COMPLETE").source_vars()
    text = found.source_template % script
    common.answer({"shell": shell, "script": text}, text.strip())
