"""A desk: one root, open for work. What calls and ways back are made on."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary, ref

from mulligan.history.call import Call
from mulligan.history.ledger import Facts, Ledger
from mulligan.history.tables import FOLDS, ROOTS, RootRow
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.entries import ABSENT, Entry
from mulligan.values.faults import fault
from mulligan.values.ids import CallId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import RepoPath, join
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import NOTHING, Disk, HostDisk, Image

OpenDisk = Callable[[bytes], Disk]

_FS_IOC_GETVERSION = 0x80087601


class Desk:
    """A root with its disk and its ledger; other roots are reached through `at` and `elsewhere`.

    `opener` is the desk somebody opened: this one, or the one through which it was reached.
    """

    def __init__(
        self,
        ledger: Ledger,
        disk: Disk,
        *,
        open_disk: OpenDisk = HostDisk,
        record: bool = True,
        opener: Desk | None = None,
    ) -> None:
        self.ledger = ledger
        self.disk = disk
        disk.keep_large = ledger.blobs.store_large
        disk.durability = ledger.store.durability
        disk.sync_preimages = ledger.store.sync
        self.root = ledger.root(disk.root, identity_of(disk), record=record)
        self._open_disk = open_disk
        self._opener = None if opener is None else ref(opener)
        self._others: dict[str, Desk] = {}
        self._views: dict[tuple[bytes, bool], Desk] = {}
        self._closing: list[Callable[[], None]] = []
        self._calls: WeakValueDictionary[str, Call] = WeakValueDictionary()
        self._lock = fork_safe_lock()
        self._is_open = True

    def at(self, root: str) -> Desk:
        """The desk of another root of the same store."""
        if root == self.root.id:
            return self
        with self._lock:
            if root not in self._others:
                self._others[root] = self._opened(self._place_of(root) or b"/", record=True)
            return self._others[root]

    def elsewhere(self, directory: bytes, *, record: bool) -> Desk:
        """The desk of any directory, as it is there now. Without `record`, for looking only: it becomes no root.

        Raises OSError if it cannot be opened.
        """
        with self._lock:
            known = self._views.get((directory, record))
            if known is not None and os.path.samestat(os.stat(directory), os.fstat(known.disk.root.handle)):
                return known
            if known is not None:
                # Another directory has its name now; whoever still works in the old one is not disturbed.
                self._closing.append(known.close)
            known = self._views[directory, record] = self._opened(directory, record=record)
            return known

    def _opened(self, directory: bytes, *, record: bool) -> Desk:
        return Desk(
            self.ledger, self._open_disk(directory), open_disk=self._open_disk, record=record, opener=self.opener
        )

    @property
    def opener(self) -> Desk:
        return self if self._opener is None else self._opener() or self

    def _place_of(self, root: str) -> bytes:
        with self.ledger.store.read() as tx:
            row = tx.get(ROOTS, root)
        if row is None:
            raise fault("unknown_root", f"The store knows no root {root}.")
        return row.place

    def call(
        self,
        session: SessionId,
        *,
        turn: TurnId | None = None,
        label: str | None = None,
        tool: str | None = None,
        cause: Mapping[str, Any] | None = None,
        observed: bool = False,
        strict: bool = False,
    ) -> Call:
        """A new call, not yet on record: it begins with its first change, or at its end.

        With `strict`, one that changes more than its session may keep is refused at its end, and put back.
        """
        self.check_open()
        self.ledger.settle_doubts()
        self.ledger.session(session, self.root)
        identifier = CallId(self.ledger.ids.new())
        facts = Facts(
            id=identifier,
            session=session,
            turn=turn if turn is not None else TurnId(identifier),
            root=RootId(self.root.id),
            workspace=WorkspaceId(self.root.workspace),
            label=label,
            tool=tool,
            cause=cause,
            observed=observed,
        )
        call = Call(self.ledger, self.disk, self.root, facts, heal=self._heal)
        call.strict = strict
        self._calls[identifier] = call
        return call

    def _heal(self) -> bool:
        # Loaded here: hardly anybody finds a dead process in the way.
        from mulligan.history.recovery import recover

        return any(one.stuck is None for one in recover(self))

    def part_of(self, call: Call) -> Call:
        """What a call does in this root: itself, as long as it has done nothing elsewhere, else a part of it."""
        if call.root.id == self.root.id:
            return call
        return call.part_at(self.disk, self.root, lambda: self._part(call))

    def part_of_way_back(self, call: Call, verb: str) -> Call:
        """What a way back does in this root, which is not the one it is at work in itself."""
        part = call.parts[self.root.id] = self._part(call, verb=verb)
        return part

    def _part(self, call: Call, **cause: str) -> Call:
        facts = call.facts
        told = {**cause, "part_of": facts.id}
        return self.call(facts.session, turn=facts.turn, label=facts.label, tool=facts.tool, cause=told)

    def cancel(self, call: str) -> None:
        """Abort a call that is open on this desk, whoever is working in it."""
        found = self._call_here(call)
        if found is not None:
            found.abort("cancelled")

    def can_cancel(self, call: str) -> bool:
        """False: it is somebody else's."""
        return self._call_here(call) is not None

    def _call_here(self, call: str) -> Call | None:
        others = (other._call_here(call) for other in (*self._others.values(), *self._views.values()))
        return self._calls.get(call) or next((found for found in others if found is not None), None)

    def image(self, path: RepoPath) -> Image:
        """What a real path holds now; nothing, if its directory is not there, or is a link that leads elsewhere."""
        try:
            with self.disk.resolve_exactly(path) as spot:
                return self.disk.image(spot)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING

    def entry(self, path: RepoPath) -> Entry:
        image = self.image(path)
        return ABSENT if image.special else image.entry

    def children(self, directory: RepoPath) -> list[RepoPath]:
        """The paths in a directory, in byte order; none, if it is no directory."""
        try:
            with self.disk.resolve_exactly(directory) as spot:
                return [join(directory, name.decode("utf-8", "surrogateescape")) for name in self.disk.children(spot)]
        except (FileNotFoundError, NotADirectoryError, Refused):
            return []

    def shown(self, root: RootRow, path: RepoPath) -> str:
        """A path of an overlapping root as this desk shows it: relative below our root, else absolute."""
        if root.id == self.root.id:
            return path
        whole = os.fsdecode(root.place) + ("" if path == "." else "/" + path)
        own = os.fsdecode(self.root.place) + "/"
        return whole[len(own) :] if whole.startswith(own) else whole

    def at_close(self, act: Callable[[], None]) -> None:
        """Something to be done before this desk closes."""
        self._closing.append(act)

    def check_open(self) -> None:
        if not self._is_open:
            place = os.fsdecode(self.disk.root.path)
            raise fault("workspace_closed", f"The workspace {place} was closed here; open it again.", root=place)

    def close(self) -> None:
        self._is_open = False
        while self._closing:
            self._closing.pop()()
        for other in (*self._others.values(), *self._views.values()):
            other.close()
        self.disk.close()


def identity_of(disk: Disk) -> str:
    """Device, inode and generation of a root, to know it again after it was moved.

    An inode's number is given to the next directory as soon as one is deleted; its generation tells them apart.
    """
    try:
        status = os.fstat(disk.root.handle)
    except OSError:
        return f"simulated:{os.fsdecode(disk.root.place)}"
    folds = FOLDS if disk.root.folds_case else ""
    return f"{status.st_dev}:{status.st_ino}:{_generation(disk.root.handle)}{folds}"


def _generation(handle: int) -> int:
    """0 where the file system does not say."""
    try:
        return int.from_bytes(fcntl.ioctl(handle, _FS_IOC_GETVERSION, bytes(8))[:4], sys.byteorder)
    except OSError:
        return 0
