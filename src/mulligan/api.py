"""The composition root: which engine, in which directory, kept in order by whom."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.faults import MulliganError, fault, fault_of_os_error
from mulligan.values.here import Here

if TYPE_CHECKING:
    from mulligan.boundary.verdict import Boundary
    from mulligan.effects.session import Session
    from mulligan.effects.sessions import Sessions
    from mulligan.history.desk import Desk
    from mulligan.history.ledger import Ledger
    from mulligan.history.power_cuts import Found
    from mulligan.history.recovery import Recovered
    from mulligan.session.tokens import Tokens
    from mulligan.store.journal import Schema
    from mulligan.store.protocol import Durability, Store
    from mulligan.store.sqlite import SqliteStore
    from mulligan.values.ids import IdSource, SessionId

_ENGINES = "a directory, sqlite:///absolute/directory, or memory:"


def state_directory(environ: Mapping[str, str]) -> str:
    """Where a store lives unless told otherwise: $MULLIGAN_HOME, else below $XDG_STATE_HOME, else below the home."""
    chosen = environ.get("MULLIGAN_HOME")
    if chosen:
        return os.path.abspath(chosen)
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):
        # The rule for XDG variables: a relative one is to be ignored.
        state = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "mulligan")


def call_around(environ: Mapping[str, str]) -> str | None:
    """The call whose command started us, if we are told of one."""
    call = environ.get("MULLIGAN_CALL", "")
    return call if call.isascii() and call else None


def store_directory(url: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> str | None:
    """The directory a store URL means; None for a store that is not on a disk. Raises `invalid_store_url`."""
    if url is None:
        return state_directory(environ)
    if isinstance(url, os.PathLike):
        return os.path.abspath(os.fspath(url))
    if not isinstance(url, str):
        raise fault("invalid_store_url", f"{url!r} is no store. Give {_ENGINES}.")
    scheme, colon, rest = url.partition(":")
    reader = _SCHEMES.get(scheme) if colon and "/" not in scheme else None
    if reader is not None:
        return reader(rest)
    if not url.strip() or "\0" in url or (colon and rest.startswith("//")):
        raise fault("invalid_store_url", f"{url!r} is no store. Give {_ENGINES}.")
    return os.path.abspath(url)


def _sqlite(rest: str) -> str:
    if not rest.startswith("///") or rest.startswith("////") or not rest.strip("/"):
        raise fault("invalid_store_url", "A SQLite store is named sqlite:///absolute/directory, with three slashes.")
    return os.path.abspath(rest[2:])


def _memory(rest: str) -> None:
    if rest.strip("/"):
        raise fault("invalid_store_url", "A store in memory is named memory: and nothing more.")


def _postgres(rest: str) -> None:
    words = f"PostgreSQL stores are not part of this version yet. Give {_ENGINES}."
    raise fault("invalid_store_url", words, missing_extra="postgres")


_SCHEMES: Mapping[str, Callable[[str], str | None]] = {
    "sqlite": _sqlite,
    "memory": _memory,
    "postgresql": _postgres,
    "postgres": _postgres,
}


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
    """The store of that URL, checked after a power cut and tended in the background. Refusals change nothing.

    With `create=False` a store that is not there is `store_unreadable` instead of made.
    """
    directory = store_directory(url, os.environ if environ is None else environ)
    if directory is None:
        from mulligan.store.memory import MemoryStore

        return MemoryStore(schema, durability=durability)
    _refuse_inside(directory, root)
    try:
        return _open_sqlite(directory, schema, durability=durability, clock=clock, create=create)
    except MulliganError as error:
        if directory in error.message:
            raise
        raise fault(error.code, f"{error.message} The store is in {directory}.", **error.details) from error
    except OSError as error:
        raise fault_of_os_error(error, f"Opening the store in {directory}") from error


def _open_sqlite(directory: str, schema: Schema, *, durability: Durability, clock: Clock, create: bool) -> Store:
    # Loaded only when a store is opened: `mulligan --help` needs none.
    from mulligan.store.housekeeping import SyncMark, boot_id, look_back
    from mulligan.store.journal import Journal
    from mulligan.store.sqlite import SqliteStore

    store = SqliteStore(directory, schema, durability=durability, clock=clock, create=create)
    look_back(store, Journal(schema), clock, boot=boot_id())
    if durability == "process":
        SyncMark(store, clock, hand_over=partial(_hand_over_sync, store))
    return store


def _hand_over_sync(store: SqliteStore) -> bool:
    """Leave what is not synced to the background process; False: there is none."""
    from mulligan.agents.hooks.keeper_socket import SOCKET, ask_keeper, keeper_folder

    folder, originals = keeper_folder(store.directory), store.originals
    if originals is None or not os.path.exists(os.path.join(folder, SOCKET)):
        return False
    has_let_go = False

    def let_go() -> None:
        nonlocal has_let_go
        has_let_go = True
        originals.close()

    # If it does not answer after that, the next process that opens the store looks after what we left.
    return ask_keeper(folder, b"sync " + originals.process.encode(), before=let_go) is not None or has_let_go


def sync_left(directory: str, process: str) -> None:
    """Sync what a process that has ended left to us, the background process (`originals`, bodies and rows)."""
    from mulligan.history.schema import SCHEMA
    from mulligan.store.housekeeping import SyncMark
    from mulligan.store.sqlite import SqliteStore

    clock = SystemClock()
    store = SqliteStore(directory, SCHEMA, clock=clock, create=False)
    with ExitStack() as closing:
        closing.callback(store.close)
        left = None if store.originals is None else store.originals.left_by(os.path.basename(process))
        if left is not None:
            closing.callback(left.close)
            left.sync()
        SyncMark(store, clock).move()
        if left is not None:
            left.remove()


def _refuse_inside(directory: str, root: str | None) -> None:
    """A store inside the workspace would record itself, and an agent could edit it."""
    if root is None:
        return
    inner, outer = os.path.realpath(directory), os.path.realpath(root)
    if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
        raise fault(
            "store_inside_workspace",
            f"The store {directory} is inside the workspace {root}. Choose one outside, with MULLIGAN_HOME or --store.",
        )


_here: Here[Mulligan] = Here("mulligan_workspace")
_open: list[Mulligan] = []
_folders: dict[tuple[str, int, str], Mulligan] = {}
_opening_folders = fork_safe_lock()


def innermost() -> Mulligan:
    """The workspace opened last and not closed yet: by this thread or task, else by any; else the current folder."""
    found = _here.now() or next(reversed(_open), None)
    return _current_folder() if found is None else found


def _current_folder() -> Mulligan:
    """Opened once for each folder and store. It counts nowhere else: nobody has asked for it to be open."""
    try:
        place = os.getcwd(), os.stat(".").st_ino, state_directory(os.environ)
    except OSError:
        return open(".")
    with _opening_folders:
        if place not in _folders:
            _folders[place] = open(".")
            _folders[place]._stand_back()
        return _folders[place]


class Mulligan:
    """An open workspace: a root, its store, and the sessions on it. Close it, or use it in a `with`."""

    def __init__(
        self, desk: Desk, boundary: Boundary, recovered: Sequence[Recovered], power_cut: Sequence[Found] = ()
    ) -> None:
        self.desk = desk
        self.boundary = boundary
        self.recovered = tuple(recovered)
        self.power_cut = tuple(power_cut)
        self._sessions: Sessions | None = None
        self._block = _here.block(self)
        self._block.__enter__()
        _open.append(self)

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return os.fsdecode(self.desk.disk.root.path)

    @property
    def store(self) -> Store:
        """Where everything durable lives; several workspaces may share one."""
        return self.desk.ledger.store

    def session(self, id: str | None = None) -> Session:
        """A new session, or the one with this id, which is opened or resumed."""
        return self.sessions.open(id)

    @property
    def sessions(self) -> Sessions:
        """All sessions of this workspace."""
        from mulligan.effects.sessions import Sessions

        self.desk.check_open()
        if self._sessions is None:
            self._sessions = Sessions(self.desk, self.boundary)
        return self._sessions

    @property
    def tokens(self) -> Tokens:
        """The bearer tokens of this store."""
        from mulligan.session.tokens import Tokens

        ledger = self.desk.ledger
        return Tokens(ledger.store, ledger.journal, clock=ledger.clock)

    def close(self) -> None:
        """Let go of the folder and the store. What is recorded stays; opening again goes on with it.

        A call that an interrupt has left open is aborted first.
        """
        from mulligan.session.orphans import abort_orphans

        abort_orphans()
        self.desk.ledger.settle_doubts()
        self._stand_back()
        for place in [place for place, one in _folders.items() if one is self]:
            del _folders[place]
        self.desk.close()
        self.desk.ledger.store.close()

    def _stand_back(self) -> None:
        """From here on this is not the workspace meant by whoever names none."""
        self._block.__exit__()
        if self in _open:
            _open.remove(self)

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

    `store` is a directory, `sqlite:///absolute/directory` or `memory:`; by default $MULLIGAN_HOME, else your state
    directory. With `durability="power"` every call waits for the disk; with `process` it survives the end of the
    process, and a power cut costs at most the last moments. `capability` says what sessions may do and how much of it,
    and `policy` narrows that, the last matching rule deciding; `clock` and `ids` are for tests.

    What processes that died left half done is put back first. Raises `unknown_root`, `invalid_store_url`,
    `store_inside_workspace`, `invalid_params`, and `invalid_encoding` if Python does not read names of files as UTF-8.
    """
    # Loaded here, so that `import mulligan` stays quick.
    from mulligan.boundary.capability import parse_capability
    from mulligan.boundary.policy import parse_policy
    from mulligan.boundary.verdict import Boundary

    if blobs is not None:
        raise fault("invalid_store_url", "Object stores for blobs are not part of this version yet; leave `blobs` out.")
    if durability not in ("process", "power"):
        raise fault("invalid_params", f"durability is process or power, not {durability!r}.", field="durability")
    _check_has("clock", clock, "now")
    _check_has("ids", ids, "new")
    limits = parse_capability({} if capability is None else capability)
    rules = parse_policy([] if policy is None else policy)
    folder = _folder(root)
    desk = _desk(folder, store, durability=durability, clock=clock or SystemClock(), ids=ids)
    return _recovered(desk, Boundary(os.path.abspath(folder), limits, rules))


def _check_has(name: str, given: object, method: str) -> None:
    if given is not None and not hasattr(given, method):
        raise fault("invalid_params", f"{name} has a method {method}(), and {given!r} has none.", field=name)


def _folder(root: object) -> str:
    """What was given, as text, if it can be the name of a folder at all."""
    try:
        raw = os.fsencode(root)  # type: ignore[arg-type]  # it raises for what it does not take
    except (TypeError, UnicodeEncodeError):
        raw = b"\0"
    if b"\0" in raw:
        raise fault("unknown_root", f"{root!r} cannot be the name of a folder.")
    return os.fsdecode(raw)


def look(root: str = ".", *, store: str | None = None) -> Mulligan:
    """Open only to look: a store that is not there is refused, and a new root is not recorded.

    `root` may also be the path, or the id, of a root whose directory is not there. Only its records can be read then.
    """
    from mulligan.boundary.verdict import Boundary

    if not os.path.isdir(root):
        gone = _gone(root, store)
        if gone is not None:
            return Mulligan(gone, Boundary(os.fsdecode(gone.root.place) or "/"), ())
    desk = _desk(root, store, durability="process", clock=SystemClock(), create=False)
    return _recovered(desk, Boundary(os.path.abspath(root)))


def _gone(root: str, store: str | None) -> Desk | None:
    """The desk of a known root without its directory. Raises `root_elsewhere` for a root of another host."""
    from mulligan.history.desk import Desk
    from mulligan.history.ledger import Ledger
    from mulligan.history.roots import named_root, root_elsewhere
    from mulligan.history.schema import SCHEMA
    from mulligan.store.journal import Journal
    from mulligan.values.ids import SystemIds
    from mulligan.workspace.disk import GoneDisk
    from mulligan.workspace.identity import FOLDS

    clock = SystemClock()
    with ExitStack() as closing:
        opened = open_store(store, SCHEMA, durability="process", clock=clock, create=False)
        closing.callback(opened.close)
        ledger = Ledger(opened, Journal(SCHEMA), clock=clock, ids=SystemIds())
        with opened.read() as tx:
            row = named_root(tx, root, ledger.host())
        if row is None:
            return None
        if row.host not in ("", ledger.host()):
            raise root_elsewhere(row, ledger.host())
        closing.pop_all()
        return Desk(ledger, GoneDisk(row.place, folds_case=row.identity.endswith(FOLDS)), record=False, row=row)


def _desk(
    root: str,
    store: str | os.PathLike[str] | None,
    *,
    durability: Durability,
    clock: Clock,
    ids: IdSource | None = None,
    create: bool = True,
) -> Desk:
    from mulligan.history.desk import Desk
    from mulligan.history.ledger import Ledger
    from mulligan.history.schema import SCHEMA
    from mulligan.store.journal import Journal
    from mulligan.values.ids import SystemIds
    from mulligan.workspace.disk import HostDisk

    if sys.getfilesystemencoding() != "utf-8":
        taken = f"This Python takes names of files for {sys.getfilesystemencoding()}"
        raise fault("invalid_encoding", f"{taken}, and they are UTF-8 here; start it with -X utf8 or PYTHONUTF8=1.")
    with ExitStack() as closing:
        disk = HostDisk(root)
        closing.callback(disk.close)
        place = os.fsdecode(disk.root.path)
        opened = open_store(store, SCHEMA, durability=durability, clock=clock, root=place, create=create)
        ledger = Ledger(opened, Journal(SCHEMA), clock=clock, ids=ids or SystemIds())
        ledger.keep_bounds = partial(_keep_bounds, ledger)
        ledger.inside = call_around(os.environ)
        desk = Desk(ledger, disk, record=create)
        desk.at_close(ledger.tell_growth)
        closing.pop_all()
        return desk


def _keep_bounds(ledger: Ledger, session: SessionId, grown_bytes: int) -> None:
    from mulligan.history.bounds import keep_bounds

    keep_bounds(ledger, session, grown_bytes)


def _recovered(desk: Desk, boundary: Boundary) -> Mulligan:
    recovered: list[Recovered] = []
    power_cut = _recover_originals(desk)
    if desk.ledger.any_open():
        from mulligan.history.observing import finish_abandoned
        from mulligan.history.recovery import recover

        recovered = recover(desk)
        finish_abandoned(desk)
    if desk.disk.capture.any:
        from mulligan.history.recovery import discard_copies

        discard_copies(desk)
    return Mulligan(desk, boundary, recovered, power_cut)


def _recover_originals(desk: Desk) -> list[Found]:
    originals = desk.ledger.store.originals
    if originals is None or not originals.any_left():
        return []
    from mulligan.history.power_cuts import recover_originals

    return recover_originals(desk)
