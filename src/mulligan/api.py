"""The composition root: `open()`, the class `Mulligan`, and `agent_loop()`.

`open_store` chooses the store engine and its directory and starts its maintenance. `_open_root` opens a root, and
`recover_from` runs recovery in it. `agent_loop` fills in the provider, tools and bounds that the caller left out.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.errors import MulliganError, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import is_inside
from mulligan.values.scoped_var import ScopedVar

if TYPE_CHECKING:
    from mulligan.agents.loop import Bounds, LoopEvent, LoopResult, May, Tell
    from mulligan.agents.providers import Driver, Model, Provider
    from mulligan.agents.tools import AnyTool, ProviderToolCall
    from mulligan.boundary.verdict import Boundary
    from mulligan.effects.session import DurableSession
    from mulligan.effects.sessions import Sessions
    from mulligan.history.checkpoint import ExecutionState
    from mulligan.history.ledger import Ledger
    from mulligan.history.open_root import OpenRoot
    from mulligan.history.power_cuts import CutReport
    from mulligan.history.recovery import Recovered
    from mulligan.servers.acp.agent import ProgressView, Prompt
    from mulligan.session.tokens import Tokens
    from mulligan.store.journal import Schema
    from mulligan.store.protocol import Durability, Store
    from mulligan.store.sqlite import SqliteStore
    from mulligan.values.ids import IdSource, SessionId

    _Opener = Callable[..., Store]
    """Opens a store, like `_open_sqlite`."""

_STORES = "a directory, sqlite:///absolute/directory, postgresql://user@host/database, or memory:"
_NO_BLOBS = "This version has no object stores for blobs: large bodies are in the store itself. Leave {} out."


def state_directory(environ: Mapping[str, str]) -> str:
    """The default directory of the store: $MULLIGAN_HOME, else below $XDG_STATE_HOME, else below the home."""
    chosen = environ.get("MULLIGAN_HOME")
    if chosen:
        return os.path.abspath(chosen)
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        # The XDG specification says to ignore a relative path.
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "mulligan")


def outer_call(environ: Mapping[str, str]) -> str | None:
    """The id of the call whose command started this process, from its environment."""
    call = environ.get("MULLIGAN_CALL", "")
    return call if call.isascii() and call else None


def store_directory(url: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> str | None:
    """The directory of a store; None for a store without one. Raises `invalid_store_url`."""
    return _engine_of(url, environ)[1]


def _engine_of(url: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> tuple[_Opener, str | None]:
    """The engine of a store URL, and the directory of the store if the engine has one."""
    if url is None:
        url = environ.get("MULLIGAN_STORE") or None
    if url is None:
        return _open_sqlite, state_directory(environ)
    if isinstance(url, os.PathLike):
        return _open_sqlite, os.path.abspath(os.fspath(url))
    if not isinstance(url, str):
        raise fault("invalid_store_url", f"{url!r} is not a store. Give {_STORES}.")
    scheme, colon, rest = url.partition(":")
    if colon and scheme in ("postgresql", "postgres"):
        return _postgres(url, environ)
    if colon and scheme in _ENGINES:
        return _ENGINES[scheme](rest)
    if not url.strip() or "\0" in url or (colon and rest.startswith("//")):
        raise fault("invalid_store_url", f"{url!r} is not a store. Give {_STORES}.")
    return _open_sqlite, os.path.abspath(url)


def _sqlite(rest: str) -> tuple[_Opener, str]:
    if not rest.startswith("///") or rest.startswith("////") or not rest.strip("/"):
        raise fault("invalid_store_url", "Write a SQLite store as sqlite:///absolute/directory, with three slashes.")
    return _open_sqlite, os.path.abspath(rest[2:])


def _memory(rest: str) -> tuple[_Opener, None]:
    if rest.strip("/"):
        raise fault("invalid_store_url", "Write a store in memory as memory: without anything after it.")
    return _open_memory, None


def _postgres(url: str, environ: Mapping[str, str]) -> tuple[_Opener, str]:
    try:
        from mulligan.store.postgres_server import parse_postgres_url
    except ImportError as error:
        words = "PostgreSQL needs the extra mulligan[postgres]; run: pip install 'mulligan[postgres]'"
        raise fault("invalid_store_url", f"{words}.", missing_extra="postgres") from error
    parse_postgres_url(url)
    if environ.get("MULLIGAN_BLOBS"):
        raise fault("invalid_store_url", _NO_BLOBS.format("MULLIGAN_BLOBS"))
    # This host's part of the store is below the state directory.
    return partial(_open_postgres, url), state_directory(environ)


def refuse_secret(url: str | None) -> str | None:
    """The store that a command line names. Raises `invalid_store_url` if it holds a password: `ps` shows it to all."""
    if url is not None and url.startswith(("postgres:", "postgresql:")):
        signed, at, _ = url.partition("://")[2].rpartition("@")
        if (at and signed.partition(":")[2]) or "password=" in url:
            words = (
                "A password on the command line is seen by every user of this machine. Put the URL into "
                "MULLIGAN_STORE and MULLIGAN_BLOBS, a password into PGPASSFILE, keys into the AWS credential files."
            )
            raise fault("invalid_store_url", words)
    return url


def hide_secrets() -> None:
    """Take the password of the store out of this process's environment, which its children get."""
    if os.environ.get("MULLIGAN_STORE", "").startswith(("postgres:", "postgresql:")):
        _postgres(os.environ["MULLIGAN_STORE"], os.environ)
        from mulligan.store.postgres_server import hide_password

        hide_password(os.environ)


_ENGINES: Mapping[str, Callable[[str], tuple[_Opener, str | None]]] = {
    "sqlite": _sqlite,
    "memory": _memory,
}
"""For each scheme of a store URL, a function that reads the rest of the URL. A new store engine adds a row."""


def open_store(
    url: str | os.PathLike[str] | None,
    schema: Schema,
    *,
    durability: Durability,
    clock: Clock,
    root: str | None = None,
    create: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Store:
    """Open the store of a URL, check it after a power cut, and start its background maintenance.

    A refusal changes nothing. With `create=False` a missing store raises `store_unreadable`.
    """
    open_engine, directory = _engine_of(url, os.environ if environ is None else environ)
    if directory is not None:
        _refuse_inside(directory, root)
    try:
        return open_engine(directory or "", schema, durability=durability, clock=clock, create=create)
    except MulliganError as error:
        if open_engine is not _open_sqlite or directory is None or directory in error.message:
            raise
        raise fault(error.code, f"{error.message} The store is in {directory}.", **error.details) from error
    except OSError as error:
        raise fault_of_os_error(error, f"Opening the store in {directory}") from error


def _open_memory(_: str, schema: Schema, *, durability: Durability, clock: Clock, create: bool) -> Store:
    from mulligan.store.memory import MemoryStore

    return MemoryStore(schema, durability=durability)


def _open_postgres(
    url: str, directory: str, schema: Schema, *, durability: Durability, clock: Clock, create: bool
) -> Store:
    from mulligan.store.maintenance import BackgroundSync
    from mulligan.store.postgres import PostgresStore

    store = PostgresStore(url, schema, local=directory, durability=durability, clock=clock, create=create)
    if durability == "process":
        # The originals of replaced files are this host's; the server has synced the rest.
        BackgroundSync(store, clock)
    return store


def _open_sqlite(directory: str, schema: Schema, *, durability: Durability, clock: Clock, create: bool) -> Store:
    # Imported here, because `mulligan --help` opens no store.
    from mulligan.store.journal import Journal
    from mulligan.store.maintenance import BackgroundSync, boot_id, check_after_reboot
    from mulligan.store.sqlite import SqliteStore

    store = SqliteStore(directory, schema, durability=durability, clock=clock, create=create)
    check_after_reboot(store, Journal(schema), clock, boot=boot_id())
    if durability == "process":
        BackgroundSync(store, clock, hand_over=partial(_hand_over_sync, store))
    return store


def _hand_over_sync(store: SqliteStore) -> bool:
    """Leave the remaining syncs to the background process of the hooks. False if there is none."""
    from mulligan.agents.hooks.socket import SOCKET, ask_background, background_folder

    folder, originals = background_folder(store.directory), store.originals
    if originals is None or not os.path.exists(os.path.join(folder, SOCKET)):
        return False
    is_closed = False

    def close_originals() -> None:
        nonlocal is_closed
        is_closed = True
        originals.close()

    # If it does not answer after that, the next process that opens the store does these syncs.
    answer = ask_background(folder, b"sync " + originals.process.encode(), before=close_originals)
    return answer is not None or is_closed


def sync_left(directory: str, process: str) -> None:
    """In the background process: sync what an ended process left to it (`originals`, bodies and rows)."""
    from mulligan.history.projection import SCHEMA
    from mulligan.store.maintenance import BackgroundSync
    from mulligan.store.sqlite import SqliteStore

    clock = SystemClock()
    store = SqliteStore(directory, SCHEMA, clock=clock, create=False)
    with ExitStack() as cleanup:
        cleanup.callback(store.close)
        left = None if store.originals is None else store.originals.of_process(os.path.basename(process))
        if left is not None:
            cleanup.callback(left.close)
            left.sync()
        BackgroundSync(store, clock).move()
        if left is not None:
            left.remove()


def _refuse_inside(directory: str, root: str | None) -> None:
    """Refuse a store inside the workspace: it would record itself, and an agent could edit it."""
    if root is None:
        return
    if (os.path.realpath(directory) + "/").startswith(os.path.realpath(root).rstrip("/") + "/"):
        raise fault(
            "store_inside_workspace",
            f"The store {directory} is inside the workspace {root}. Choose one outside, with MULLIGAN_HOME or --store.",
        )


_innermost_open: ScopedVar[Mulligan] = ScopedVar("mulligan_workspace")
_open_workspaces: list[Mulligan] = []
_folders: dict[tuple[str, int, str], Mulligan] = {}
_folders_lock = fork_safe_lock()


def innermost() -> Mulligan:
    """The workspace that this thread or task opened last and has open; else any thread's; else the current folder."""
    found = _innermost_open.now() or next(reversed(_open_workspaces), None)
    return _current_folder() if found is None else found


def _current_folder() -> Mulligan:
    """The current folder as a workspace, opened once per folder and store. It is not listed as an open workspace."""
    try:
        place = os.getcwd(), os.stat(".").st_ino, os.environ.get("MULLIGAN_STORE") or state_directory(os.environ)
    except OSError:
        return open(".")
    with _folders_lock:
        if place not in _folders:
            _folders[place] = open(".")
            _folders[place]._leave_open_workspaces()
        return _folders[place]


class Mulligan:
    """An open workspace: a root, its store, and the sessions on it. Close it, or use it in a `with`."""

    def __init__(
        self,
        desk: OpenRoot,
        boundary: Boundary,
        recovered: Sequence[Recovered],
        power_cut: Sequence[CutReport] = (),
    ) -> None:
        # The parameter keeps its earlier name because the public signature is frozen.
        self.open_root = desk
        self.boundary = boundary
        self.recovered = tuple(recovered)
        self.power_cut = tuple(power_cut)
        self._sessions: Sessions | None = None
        self._block = _innermost_open.block(self)
        self._block.__enter__()
        _open_workspaces.append(self)

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return os.fsdecode(self.open_root.disk.root.path)

    @property
    def store(self) -> Store:
        """The store. Several workspaces may share one."""
        return self.open_root.ledger.store

    def session(self, id: str | None = None) -> DurableSession:
        """A new session, or the session with this id; a closed one is reopened."""
        return self.sessions.open(id)

    @property
    def sessions(self) -> Sessions:
        """All sessions of this workspace."""
        from mulligan.effects.sessions import Sessions

        self.open_root.check_open()
        if self._sessions is None:
            self._sessions = Sessions(self.open_root, self.boundary)
        return self._sessions

    @property
    def tokens(self) -> Tokens:
        """The bearer tokens of this store."""
        from mulligan.session.tokens import Tokens

        ledger = self.open_root.ledger
        return Tokens(ledger.store, ledger.journal, clock=ledger.clock)

    def close(self) -> None:
        """Close the folder and the store. The history stays, and opening the folder again continues it.

        Aborts calls that an interrupt left open first.
        """
        from mulligan.session.state.orphan_calls import abort_orphans

        abort_orphans()
        self.open_root.ledger.settle_doubts()
        self._leave_open_workspaces()
        for place in [place for place, one in _folders.items() if one is self]:
            del _folders[place]
        self.open_root.close()
        self.open_root.ledger.store.close()

    def _leave_open_workspaces(self) -> None:
        """Remove this workspace from those that `innermost` returns."""
        self._block.__exit__()
        if self in _open_workspaces:
            _open_workspaces.remove(self)

    def __enter__(self) -> Mulligan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(
    root: str | os.PathLike[str] = ".",
    *,
    store: str | os.PathLike[str] | None = None,
    blobs: str | None = None,
    durability: Durability = "process",
    capability: Mapping[str, object] | None = None,
    policy: Sequence[Mapping[str, object]] | None = None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
) -> Mulligan:
    """Open a folder as a workspace, with its history in a store outside it.

    `store` is a directory, `sqlite:///absolute/directory`, `postgresql://user@host/database` or `memory:`; by default
    $MULLIGAN_STORE, else $MULLIGAN_HOME, else your state directory. With `durability="power"` every call waits for the
    disk. With `process` a call survives the end of the process, and a power cut may cost the last moments. `capability`
    limits what sessions may do; `policy` has rules that narrow it, and the last matching rule applies. `clock` and
    `ids` are for tests.

    Recovery runs first: it aborts the open calls of dead processes. Raises `unknown_root`, `invalid_store_url`,
    `store_inside_workspace`, `invalid_params`, and `invalid_encoding` if Python does not read names of files as UTF-8.
    """
    # Imported here, so that `import mulligan` stays fast.
    from mulligan.boundary.capability import parse_capability
    from mulligan.boundary.policy import parse_policy
    from mulligan.boundary.verdict import Boundary

    if blobs is not None:
        raise fault("invalid_store_url", _NO_BLOBS.format("`blobs`"))
    if durability not in ("process", "power"):
        raise fault("invalid_params", f"durability must be process or power, not {durability!r}.", field="durability")
    _check_has("clock", clock, "now")
    _check_has("ids", ids, "new")
    limits = parse_capability({} if capability is None else capability)
    rules = parse_policy([] if policy is None else policy)
    folder = _folder(root)
    open_root = _open_root(folder, store, durability=durability, clock=clock or SystemClock(), ids=ids)
    return _after_recovery(open_root, Boundary(os.path.abspath(folder), limits, rules))


def _check_has(name: str, given: object, method: str) -> None:
    if given is not None and not hasattr(given, method):
        raise fault("invalid_params", f"{name} needs a method {method}(); {given!r} has none.", field=name)


def _folder(root: object) -> str:
    """The root as text. Raises `unknown_root` if it cannot be the name of a folder."""
    try:
        raw = os.fsencode(root)  # type: ignore[arg-type]  # it raises TypeError for other types
    except (TypeError, UnicodeEncodeError):
        raw = b"\0"
    if b"\0" in raw:
        raise fault("unknown_root", f"{root!r} cannot be the name of a folder.")
    return os.fsdecode(raw)


def open_for_reading(root: str = ".", *, store: str | None = None) -> Mulligan:
    """Open for reading only: a missing store is refused, and a new root is not recorded.

    `root` may also be the path or the id of a root whose directory is gone. Then only its records can be read.
    """
    from mulligan.boundary.verdict import Boundary

    if not os.path.isdir(root):
        gone = _root_without_directory(root, store)
        if gone is not None:
            return Mulligan(gone, Boundary(os.fsdecode(gone.root.place) or "/"), ())
    open_root = _open_root(root, store, durability="process", clock=SystemClock(), create=False)
    return _after_recovery(open_root, Boundary(os.path.abspath(root)))


def open_nearest(
    folder: str,
    *,
    store: str | None,
    record: bool,
    capability: Mapping[str, object] | None = None,
    policy: Sequence[Mapping[str, object]] | None = None,
) -> Mulligan:
    """For commands: open the nearest known root that contains a folder, else the folder itself.

    Opens the store once, for the search and for the work. `record=False` is like `open_for_reading`.
    """
    from mulligan.boundary.capability import parse_capability
    from mulligan.boundary.policy import parse_policy
    from mulligan.boundary.verdict import Boundary

    limits = parse_capability({} if capability is None else capability)
    rules = parse_policy([] if policy is None else policy)
    open_root = _open_root(folder, store, durability="process", clock=SystemClock(), create=record, nearest=True)
    return _after_recovery(open_root, Boundary(os.fsdecode(open_root.disk.root.path), limits, rules))


def known_roots(store: Store) -> list[str]:
    """The paths of all roots of this host in a store."""
    from mulligan.history.tables import ROOTS
    from mulligan.store.host import known_host

    with store.read() as tx:
        here = ("", known_host(tx, os.environ))
        return [os.fsdecode(row.place) or "/" for row in tx.select(ROOTS) if row.host in here]


def has_store(store: str | None) -> bool:
    """Whether a store exists on disk.

    True also if the directory is not readable or contains something else: then opening it raises the exact error.
    Raises `untrusted_owner`: a directory that another user prepared is refused before there is a store in it, too.
    """
    from mulligan.store.sqlite import DATABASE
    from mulligan.store.sqlite_file import is_there, refuse_untrusted

    open_engine, directory = _engine_of(store, os.environ)
    if open_engine not in (_open_sqlite, _open_memory):
        return _has_postgres(store or os.environ["MULLIGAN_STORE"])
    try:
        if directory is not None and os.path.exists(directory) and not os.path.isdir(directory):
            return True
        if directory is not None:
            refuse_untrusted(directory)
        return directory is not None and any(is_there(os.path.join(directory, DATABASE + end)) for end in ("", "-wal"))
    except OSError:
        return True


def _has_postgres(url: str) -> bool:
    """Whether the schema has tables. True also if the server does not say: then opening it raises the exact error."""
    from mulligan.store.postgres_server import connect, parse_postgres_url, read_about

    place = parse_postgres_url(url)
    with suppress(MulliganError):
        link = connect(place)
        with link.raw:
            return read_about(link, place.schema) is not None
    return True


def _root_without_directory(root: str, store: str | None) -> OpenRoot | None:
    """The open root of a known root without its directory. Raises `root_elsewhere` for a root of another host."""
    from mulligan.files.disk import GoneDisk
    from mulligan.files.identity import FOLDS
    from mulligan.history.ledger import Ledger
    from mulligan.history.open_root import OpenRoot, named_root, root_elsewhere
    from mulligan.history.projection import SCHEMA
    from mulligan.store.journal import Journal
    from mulligan.values.ids import SystemIds

    clock = SystemClock()
    with ExitStack() as cleanup:
        opened = open_store(store, SCHEMA, durability="process", clock=clock, create=False)
        cleanup.callback(opened.close)
        ledger = Ledger(opened, Journal(SCHEMA), clock=clock, ids=SystemIds())
        with opened.read() as tx:
            row = named_root(tx, root, ledger.host())
        if row is None:
            return None
        if row.host not in ("", ledger.host()):
            raise root_elsewhere(row, ledger.host())
        cleanup.pop_all()
        return OpenRoot(ledger, GoneDisk(row.place, folds_case=row.identity.endswith(FOLDS)), record=False, row=row)


def _open_root(
    root: str,
    store: str | os.PathLike[str] | None,
    *,
    durability: Durability,
    clock: Clock,
    ids: IdSource | None = None,
    create: bool = True,
    nearest: bool = False,
) -> OpenRoot:
    """Open a root. With `nearest`, the nearest known root that contains the folder, if there is one."""
    from mulligan.files.disk import HostDisk
    from mulligan.history.open_root import OpenRoot
    from mulligan.history.projection import SCHEMA

    if sys.getfilesystemencoding() != "utf-8":
        message = f"This Python reads file names as {sys.getfilesystemencoding()}"
        raise fault("invalid_encoding", f"{message}, but they are UTF-8; start it with -X utf8 or PYTHONUTF8=1.")
    with ExitStack() as cleanup:
        opened: Store | None = None
        if nearest and has_store(None if store is None else os.fspath(store)):
            opened = open_store(store, SCHEMA, durability=durability, clock=clock, create=False)
            cleanup.callback(opened.close)
            root = max((one for one in known_roots(opened) if is_inside(root, one)), key=len, default=root)
        disk = HostDisk(root)
        cleanup.callback(disk.close)
        place = os.fsdecode(disk.root.path)
        if opened is None:
            opened = open_store(store, SCHEMA, durability=durability, clock=clock, root=place, create=create)
        elif (directory := store_directory(store, os.environ)) is not None:
            _refuse_inside(directory, place)
        ledger = _ledger_of(opened, clock, ids)
        open_root = OpenRoot(ledger, disk, record=create)
        open_root.at_close(ledger.tell_growth)
        cleanup.pop_all()
        return open_root


def open_ledger(store: str | os.PathLike[str] | None) -> Ledger:
    """The ledger of a store, without opening a root. Creates a missing store."""
    from mulligan.history.projection import SCHEMA

    clock = SystemClock()
    return _ledger_of(open_store(store, SCHEMA, durability="process", clock=clock), clock, None)


def _ledger_of(store: Store, clock: Clock, ids: IdSource | None) -> Ledger:
    from mulligan.history.ledger import Ledger
    from mulligan.history.projection import SCHEMA
    from mulligan.store.journal import Journal
    from mulligan.values.ids import SystemIds

    ledger = Ledger(store, Journal(SCHEMA), clock=clock, ids=ids or SystemIds())
    ledger.keep_bounds = partial(_enforce_caps, ledger)
    ledger.inside = outer_call(os.environ)
    return ledger


def _enforce_caps(ledger: Ledger, session: SessionId, grown_bytes: int) -> None:
    from mulligan.history.retention import enforce_caps

    enforce_caps(ledger, session, grown_bytes)


def _after_recovery(open_root: OpenRoot, boundary: Boundary) -> Mulligan:
    recovered, power_cut = recover_from(open_root)
    return Mulligan(open_root, boundary, recovered, power_cut)


def recover_from(open_root: OpenRoot) -> tuple[list[Recovered], list[CutReport]]:
    """Abort the open calls of dead processes, in this root and in the roots that its calls reach."""
    recovered: list[Recovered] = []
    power_cut = _recover_originals(open_root)
    # The process may have died between the commit of a call and the removal of its spool.
    if open_root.ledger.any_open() or open_root.ledger.any_spool():
        from mulligan.history.observe import finish_abandoned
        from mulligan.history.recovery import recover

        recovered = recover(open_root)
        finish_abandoned(open_root)
    if open_root.disk.capture.any:
        from mulligan.history.recovery import discard_copies

        discard_copies(open_root)
    return recovered, power_cut


def _recover_originals(open_root: OpenRoot) -> list[CutReport]:
    originals = open_root.ledger.store.originals
    if originals is None or not originals.others_exist():
        return []
    from mulligan.history.power_cuts import recover_originals

    return recover_originals(open_root)


def agent_loop(
    prompt: str,
    *,
    session: DurableSession | ExecutionState | str | None = None,
    provider: Model | None = None,
    system: str | None = None,
    tools: Sequence[AnyTool] | None = None,
    bounds: Bounds | None = None,
    permission: May | None = None,
    on_event: Tell | None = None,
) -> LoopResult:
    """Let a model work on a prompt until it is done, as one turn of a session: `session.rollback()` undoes it.

    `session` is one of `mulligan.open()`, its id, or its `execution_state()` if resources of your own take part.
    Without it Mulligan stores neither the prompt nor any message, but still records the model's changes of files, so
    that they can be undone.
    `provider` is a name (`openai`, `litellm`, `claude`, `mock`, or with a model, `openai:gpt-5.1`), an object, or a
    list of replies, for tests; default: $MULLIGAN_PROVIDER.
    `tools` are plain functions or Tools; by default the coding tools of the provider's profile (see `coding_tools`).
    Each call is a transaction: if a tool raises, Mulligan rolls its changes back, and the model gets the error.
    `permission(call, tool)` decides before a tool that may change something; `on_event` receives text and tool calls
    as they arrive. `bounds` are iterations, deadline, budget, and a way to cancel.

    Raises `no_provider`, `provider_failed`, PromptEvaluationError for a deadline, RestoreFailedError, and errors of
    `permission`. Messages and committed calls until then stay. Errors of `on_event` are only logged.
    """
    from mulligan.agents.loop import Loop

    if session is None:
        found: DurableSession | ExecutionState = innermost().sessions.anonymous()
    else:
        found = innermost().session(session) if isinstance(session, str) else session
    loop = Loop(
        found,
        chosen_provider(provider),
        tools=tools,
        bounds=bounds,
        may=permission,
        tell=None if on_event is None else _with_logged_errors(on_event),
        keeps_transcript=session is not None,
    )
    return loop.run(prompt, system=system)


def _with_logged_errors(listener: Tell) -> Tell:
    from mulligan.session.subscribers import EventBus, publish_quietly

    bus = EventBus()
    bus.subscribe(object, listener)
    return lambda event: publish_quietly(bus, event)


def chosen_provider(given: Model | None) -> Provider | Driver:
    """The given provider, or the one that $MULLIGAN_PROVIDER names. Raises `no_provider`."""
    from mulligan.agents.providers import provider_of

    chosen = os.environ.get("MULLIGAN_PROVIDER") if given is None or given == "" else given
    if chosen is None or chosen == "":
        words = "Name the model: provider='openai', 'litellm', 'claude' or 'mock', or set MULLIGAN_PROVIDER."
        raise fault("no_provider", words)
    return provider_of(chosen)


@fast_dataclass(slots=True, frozen=True)
class PromptWork:
    """Runs one prompt of a session for a server, and shows its progress to the client."""

    provider: Provider | Driver

    def __call__(
        self,
        session: DurableSession,
        prompt: Prompt,
        shown: ProgressView,
        *,
        read_only: bool,
        cancelled: threading.Event,
    ) -> str:
        from mulligan.agents.coding_tools import coding_tools
        from mulligan.agents.loop import PLANNING, Bounds, Loop
        from mulligan.agents.providers import profile_of

        tools = coding_tools(session, profile_of(self.provider), cancelled=cancelled)
        loop = Loop(
            session,
            self.provider,
            tools=[PLANNING, *(tool for tool in tools if tool.read_only or not read_only)],
            bounds=Bounds(cancelled=cancelled),
            may=lambda call, tool: tool is PLANNING or shown.may(call.id, call.name, _arguments(call)),
            tell=lambda event: _show(event, shown),
        )
        return _STOPS[loop.run(prompt).stop_reason]


_STOPS = {
    "done": "end_turn",
    "max_iterations": "max_turn_requests",
    "budget": "max_tokens",
    "cancelled": "cancelled",
}


def _show(event: LoopEvent, shown: ProgressView) -> None:
    from mulligan.agents.loop import PLANNING, ToolEnded, ToolStarted
    from mulligan.agents.providers import Said

    if isinstance(event, Said):
        shown.said(event.text)
    elif isinstance(event, ToolStarted | ToolEnded) and event.call.name == PLANNING.name:
        if isinstance(event, ToolEnded) and event.result.success:
            shown.planned()
    elif isinstance(event, ToolStarted):
        shown.began(event.call.id, event.call.name, _arguments(event.call))
    elif isinstance(event, ToolEnded):
        shown.ended(event.call.id, event.result.message, ok=event.result.success)


def _arguments(call: ProviderToolCall) -> Mapping[str, Any]:
    """The call's arguments; empty if they are not valid, because the tool refuses them itself."""
    try:
        return call.parsed()
    except MulliganError:
        return {}
