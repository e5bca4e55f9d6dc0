"""What all functions of the routes share: the store, the roots, and one parsed request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mulligan.history.ledger import Ledger
from mulligan.history.open_root import OpenRoot
from mulligan.history.rewind import archive_of
from mulligan.servers.http.access import AuthenticatedClient
from mulligan.servers.http.colours import Colours
from mulligan.servers.http.events import EventReader
from mulligan.servers.http.roots import ServedRoots
from mulligan.session.transcript_log import Archive
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, from_wire

T = TypeVar("T")
CACHED_CALLS = 20_000


class Cache(Generic[T]):
    """The values used last, by call id. For any thread. Only for what never changes."""

    def __init__(self, size_max: int = CACHED_CALLS) -> None:
        self._size_max = size_max
        self._known: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: str, value: T) -> None:
        with self._lock:
            self._known[key] = value
            while len(self._known) > self._size_max:
                self._known.popitem(last=False)


@fast_dataclass(slots=True)
class Service:
    """An open store, served. `try_demo` makes a small project with a history and answers with the id of its root."""

    ledger: Ledger
    roots: ServedRoots
    colours: Colours
    events: EventReader
    version: str
    try_demo: Callable[[], str] | None = None
    changes: Cache[dict[str, Any]] = field(default_factory=Cache)
    commands: Cache[str] = field(default_factory=Cache)
    gc: dict[str, Any] = field(
        default_factory=lambda: {"state": "idle", "stage": "", "done": 0, "total": 0, "blobs": 0, "bytes": 0}
    )
    gc_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def archive(self) -> Archive:
        return archive_of(self.ledger)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, its parameters and body as the table of routes declares them."""

    visitor: AuthenticatedClient
    values: Mapping[str, Any]
    if_match: str | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def path(self, name: str = "path") -> RepoPath:
        return from_wire(self.values[name])


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: JSON, or bytes of a file."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None


def root_asked(service: Service, asked: Asked) -> OpenRoot:
    """The root a request names; without a name, the only one that is served."""
    named = asked.get("root")
    if named is not None:
        return service.roots.get(named)
    rows = service.roots.rows()
    if len(rows) != 1:
        raise fault("invalid_params", "Name the root: there is not exactly one here.", field="root")
    return service.roots.get(rows[0].id)
