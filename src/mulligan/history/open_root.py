"""`OpenRoot` is one root that is open for work. It starts the calls and the undo operations of that root.

`FoundRoot` says which root a directory is, and `plan_opening` by which keys its files are known:

1. A root is a host, a path and the identity of a directory. The same directory under another path is the same root.
2. Another directory at a known path of the same host is a new root: a new clone, or another container's mount.
3. Roots share a workspace if one is inside the other *and* this process sees both directories where the paths say.
4. A file has one key, through whichever of these roots it is reached. Two files never have one key, on one host or two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary, ref

from mulligan.files.capture_rules import PROJECT_FILE, CaptureRules, user_file
from mulligan.files.disk import NOTHING, Disk, HostDisk, Image
from mulligan.files.identity import identity_of, is_simulated, same_directory, simulated_identity
from mulligan.history.call import Call
from mulligan.history.cause import WORK, Cause, PartOfCall
from mulligan.history.ledger import Facts, Ledger, newest_wseq
from mulligan.history.projection import key_to_wire
from mulligan.history.tables import ROOTS, RootRow, workspace_journal
from mulligan.session.state.orphan_calls import abort_orphans
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.host import current_host
from mulligan.store.protocol import Tx
from mulligan.values.entries import ABSENT, Entry
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import RepoPath, is_inside, join

OpenDisk = Callable[[bytes], Disk]
IdentityAt = Callable[[bytes], str | None]
"""The identity of the directory that this process sees at a path; None if it sees none there."""


@fast_dataclass(slots=True, frozen=True)
class FoundRoot:
    """A directory that a process has opened: host, path and identity, and a function that identifies other paths."""

    host: str
    place: bytes
    identity: str
    identity_at: IdentityAt

    def is_on_host(self, row: RootRow) -> bool:
        """Rows from before roots had hosts belong to the host that opens them first."""
        return row.host in ("", self.host)

    def sees(self, row: RootRow) -> bool:
        """Whether the row's directory is at the row's path, as this process sees it."""
        if not self.is_on_host(row):
            return False
        now = self.identity if row.place == self.place else self.identity_at(row.place)
        return now is not None and same_directory(row.identity, now)

    def known_in(self, rows: Iterable[RootRow]) -> RootRow | None:
        """The root of this directory, if the store knows it."""
        same = [row for row in rows if self.is_on_host(row) and same_directory(row.identity, self.identity)]
        here = [row for row in same if row.place == self.place]
        if here:
            return max(here, key=lambda row: row.id)
        moved = [row for row in same if same_directory(row.identity, self.identity, surely=True)]
        # Copies of a disk have equal identities. If the store knows two of them, this may be either.
        return moved[0] if len({row.workspace for row in moved}) == 1 else None

    def replaced_in(self, rows: Iterable[RootRow]) -> list[RootRow]:
        """The roots that had this path on this host and are other directories, oldest first."""
        others = (row for row in rows if self.is_on_host(row) and row.place == self.place)
        return [row for row in others if not same_directory(row.identity, self.identity)]


@fast_dataclass(slots=True, frozen=True)
class Opening:
    """The changes of the store's roots when a process opens a directory: its own row, and other roots that change."""

    row: RootRow
    joined: Sequence[str]
    """the workspaces that are one from now on"""
    keys: dict[str, bytes]
    """other roots that get another key"""


def plan_opening(found: FoundRoot, rows: Sequence[RootRow], new_id: Callable[[], str]) -> Opening:
    """Plan the opening.

    Pure, except that it reads the identities at other roots' paths. The caller chooses which workspace continues.
    """
    known = found.known_in(rows)
    others = [row for row in rows if known is None or row.id != known.id]
    shared = [row for row in others if _overlap(row.place, found.place) and found.sees(row)]
    joined = sorted({row.workspace for row in (*shared, *([known] if known else []))})
    workspace = joined[0] if joined else new_id()
    row = RootRow(
        id=new_id() if known is None else known.id,
        workspace=workspace,
        place=found.place,
        identity=found.identity,
        host=found.host,
        key=found.place if known is None else known.key,
    )
    strangers = [one for one in others if one not in shared]
    return _with_keys(Opening(row, joined, {}), shared, strangers, is_new=known is None)


def _with_keys(opening: Opening, shared: Sequence[RootRow], strangers: Sequence[RootRow], *, is_new: bool) -> Opening:
    row, keys = opening.row, dict[str, bytes]()
    around = [one for one in shared if is_inside(row.place, one.place)]
    if around:
        outer = max(around, key=lambda one: len(one.place))
        row = replace(row, key=outer.key + row.place[len(outer.place) :])
        # A missing directory, or one of another mount namespace, keeps its changes under its own key.
        keys = {one.id: _key_of_its_own(one) for one in strangers if is_inside(one.key, row.key)}
    elif is_new and any(_overlap(one.key, row.key) for one in strangers):
        row = replace(row, key=_key_of_its_own(row))
    for one in shared:
        wanted = row.key + one.place[len(row.place) :]
        if is_inside(one.place, row.place) and one.key != wanted:
            keys[one.id] = wanted
    return replace(opening, row=row, keys=keys)


def _key_of_its_own(row: RootRow) -> bytes:
    return row.id.encode("ascii") + b":" + row.place


def _overlap(one: bytes, other: bytes) -> bool:
    return is_inside(one, other) or is_inside(other, one)


def named_root(tx: Tx, name: str, host: str) -> RootRow | None:
    """The root with this id, or the newest one that had this path; one of this host, if there is one."""
    by_id = tx.get(ROOTS, name)
    if by_id is not None:
        return by_id
    rows = tx.select(ROOTS, {"place": os.fsencode(os.path.realpath(name)).rstrip(b"/")})
    return max(rows, key=lambda row: (row.host in ("", host), row.id), default=None)


def unrecorded(found: FoundRoot) -> RootRow:
    """A row for reading a directory that is no root. It has no history, not even that of its path."""
    return RootRow("", "", found.place, found.identity, found.host, b"unrecorded:" + found.place)


def root_elsewhere(row: RootRow, host: str) -> MulliganError:
    """The answer to a request for a root whose directory this process does not see."""
    path = row.place.decode("utf-8", "backslashreplace") or "/"
    details: dict[str, Any] = {"root": row.id, "path": path, "host": row.host}
    if row.host not in ("", host):
        words = f"Root {row.id} ({path}) belongs to host {row.host}, and this is host {host}. Ask there."
    else:
        words = (
            f"Root {row.id} had the path {path}, where another directory is now. If that one continues the first, "
            f"`mulligan store adopt {row.id}` joins their histories."
        )
    return fault("root_elsewhere", words, **details)


class OpenRoot:
    """A root with its disk and its ledger. `at` and `elsewhere` open other roots.

    `opener` is the open root that the user opened: this one, or the one that opened this one. `row` names the root if
    its directory is missing and cannot identify it.
    """

    def __init__(
        self,
        ledger: Ledger,
        disk: Disk,
        *,
        open_disk: OpenDisk = HostDisk,
        record: bool = True,
        opener: OpenRoot | None = None,
        row: RootRow | None = None,
    ) -> None:
        self.ledger = ledger
        self.disk = disk
        # The disk reads files in parts and gives the parts to the store, so that a large file is never whole in memory.
        disk.keep_large = ledger.blobs.store_large
        disk.durability = ledger.store.durability
        disk.sync_preimages = ledger.blobs.sync
        disk.originals = ledger.store.originals
        disk.capture = _capture_rules(disk, ledger)
        self._open_disk = open_disk
        self.root = self._root_row(record=record) if row is None else row
        # From here on the disk knows files by the keys under which the store has their history.
        disk.root = disk.root.with_key(self.root.key)
        self._opener = None if opener is None else ref(opener)
        self._others: dict[str, OpenRoot] = {}
        self._views: dict[tuple[bytes, bool], OpenRoot] = {}
        self._closing: list[Callable[[], None]] = []
        self._seen: set[RootRow] = set()
        # Weak, so that the list does not keep a call alive that no caller can end any more.
        self._calls: WeakValueDictionary[str, Call] = WeakValueDictionary()
        self._lock = fork_safe_lock()
        self._is_open = True

    def at(self, root: str) -> OpenRoot:
        """The open root of another root of the same store."""
        if root == self.root.id:
            return self
        with self._lock:
            if root not in self._others:
                self._others[root] = self._opened_again(self._row_of(root))
            return self._others[root]

    def _opened_again(self, row: RootRow) -> OpenRoot:
        """Open a known root.

        Raises `root_elsewhere` for a root of another host, or if another directory has its path.
        """
        if not self.sees(row) and (row.host not in ("", host := self.ledger.host()) or self._identity_at(row.place)):
            raise root_elsewhere(row, host)
        return self._opened(row.place or b"/", record=True)

    def sees(self, root: RootRow) -> bool:
        """Whether the root's directory is at the root's path, as this process sees it."""
        if root.id == self.root.id or root in self._seen:
            return True
        if not self._found().sees(root):
            return False
        self._seen.add(root)
        return True

    def adopt(self, earlier: RootRow | None) -> RootRow:
        """Join the history of an earlier root with this one's; of the newest that had this path, if none is given.

        Raises `unknown_root` if there is none, and `root_elsewhere` for one of another host.
        """
        found = self._found()
        with self.ledger.store.read() as tx:
            replaced = found.replaced_in(tx.select(ROOTS))
        chosen = earlier if earlier is not None else next(reversed(replaced), None)
        if chosen is None or same_directory(chosen.identity, self.root.identity):
            place = os.fsdecode(self.disk.root.path)
            raise fault("unknown_root", f"The store knows no other directory that had the path {place}.", root=place)
        if not found.is_on_host(chosen):
            raise root_elsewhere(chosen, found.host)
        with self.ledger.store.write() as tx:
            current = tx.get(ROOTS, self.root.id) or self.root
            joined = [current.workspace, chosen.workspace]
            _put_root(self.ledger, tx, Opening(replace(current, id=chosen.id), joined, {}))
        return chosen

    def _root_row(self, *, record: bool) -> RootRow:
        found = self._found()
        with self.ledger.store.read() as tx:
            known = found.known_in(tx.select(ROOTS))
        if not record:
            return unrecorded(found) if known is None else replace(known, place=found.place)
        if known is not None and (known.place, known.identity, known.host) == (
            found.place,
            found.identity,
            found.host,
        ):
            return known
        # A new identity is recorded only once, so it has to be complete by then.
        self.disk.settle_birth()
        return _record_root(self.ledger, replace(found, identity=identity_of(self.disk)))

    def _found(self) -> FoundRoot:
        return FoundRoot(self.ledger.host(), self.disk.root.place, identity_of(self.disk), self._identity_at)

    def _identity_at(self, place: bytes) -> str | None:
        # A simulated disk has no inodes.
        if is_simulated(self.disk):
            return simulated_identity(place)
        try:
            disk = self._open_disk(place or b"/")
        except MulliganError:
            return None
        try:
            return identity_of(disk)
        finally:
            disk.close()

    def elsewhere(self, directory: bytes, *, record: bool) -> OpenRoot:
        """The open root of any directory. Without `record`, it is only for reading, and the directory does not become a
        root.

        Raises OSError if it cannot be opened.
        """
        with self._lock:
            # A root that was opened only for reading has no row, so it cannot serve for a change.
            known = self._views.get((directory, record))
            if known is not None and os.path.samestat(os.stat(directory), os.fstat(known.disk.root.handle)):
                return known
            if known is not None:
                # Another directory has this path now. The old root stays open for the calls that still work in it.
                self._closing.append(known.close)
            known = self._views[directory, record] = self._opened(directory, record=record)
            return known

    def _opened(self, directory: bytes, *, record: bool) -> OpenRoot:
        return OpenRoot(
            self.ledger, self._open_disk(directory), open_disk=self._open_disk, record=record, opener=self.opener
        )

    @property
    def opener(self) -> OpenRoot:
        return self if self._opener is None else self._opener() or self

    def _row_of(self, root: str) -> RootRow:
        with self.ledger.store.read() as tx:
            row = tx.get(ROOTS, root)
        if row is None:
            raise fault("unknown_root", f"The store knows no root {root}.")
        return row

    def call(
        self,
        session: SessionId,
        *,
        turn: TurnId | None = None,
        label: str | None = None,
        tool: str | None = None,
        cause: Cause = WORK,
        observed: bool = False,
        strict: bool = False,
    ) -> Call:
        """A new call. It is recorded with its first change, or at its end.

        With `strict`, a call that changes more than its session may keep raises at its end, and is rolled back.
        """
        self.check_open()
        abort_orphans()
        # The user may have changed the settings since the last call.
        self.disk.capture.refresh()
        if self.ledger.doubts:
            self.ledger.settle_doubts()
        # Checked here, because the method call would cost every call of a known session.
        if session not in self.ledger.sessions:
            self.ledger.session(session, self.root)
        call = CallId(self.ledger.ids.new())
        root, workspace = RootId(self.root.id), WorkspaceId(self.root.workspace)
        # A call outside any turn is a turn of its own.
        facts = Facts(call, session, turn or TurnId(call), root, workspace, label, tool, cause, observed)
        return self._made(facts, strict=strict)

    def _made(self, facts: Facts, *, strict: bool = False) -> Call:
        call = Call(self.ledger, self.disk, self.root, facts, heal=self._heal, strict=strict)
        self._calls[facts.id] = call
        return call

    def _heal(self) -> bool:
        # Imported here, because a call rarely conflicts with a dead process's call.
        from mulligan.history.recovery import recover

        return any(one.stuck is None for one in recover(self))

    def part_of(self, call: Call) -> Call:
        """The call or part that works in this root: the call itself, if it has done nothing in another root, else a
        part.
        """
        if call.root.id == self.root.id:
            return call
        return call.part_at(self.disk, self.root, lambda: self._part(call))

    def part_of_undo(self, call: Call, verb: str) -> Call:
        """The part of an undo operation in this root, when the operation itself works in another one."""
        part = self._part(call, verb)
        call.add_part(self.root, part)
        return part

    def _part(self, call: Call, verb: str | None = None) -> Call:
        self.check_open()
        self.ledger.session(call.session, self.root)
        part, root, workspace = CallId(self.ledger.ids.new()), RootId(self.root.id), WorkspaceId(self.root.workspace)
        cause = PartOfCall(call.facts.id, verb)
        # Not by `call`, which aborts interrupted calls: the caller holds the lock of a call that goes on.
        return self._made(replace(call.facts, id=part, root=root, workspace=workspace, cause=cause, observed=False))

    def cancel(self, call: str) -> None:
        """Abort a call that is open on this open root, even if another thread works in it."""
        found = self._call_here(call)
        if found is not None:
            found.abort("cancelled")

    def can_cancel(self, call: str) -> bool:
        """False: the call belongs to another process."""
        return self._call_here(call) is not None

    def _call_here(self, call: str) -> Call | None:
        # A call may work in a root that this one has opened for it.
        others = (other._call_here(call) for other in (*self._others.values(), *self._views.values()))
        return self._calls.get(call) or next((found for found in others if found is not None), None)

    def image(self, path: RepoPath) -> Image:
        """The image of a real path; empty if its directory is missing, or is now a link that leads elsewhere."""
        try:
            spot = self.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING
        try:
            return self.disk.image(spot)
        # The directory became a file between the two lines.
        except NotADirectoryError:
            return NOTHING
        finally:
            spot.close()

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
        """A path of an overlapping root as this open root shows it: relative below our root, else absolute."""
        if root.id == self.root.id:
            return path
        whole = os.fsdecode(root.place) + ("" if path == "." else "/" + path)
        own = os.fsdecode(self.root.place) + "/"
        return whole[len(own) :] if whole.startswith(own) else whole

    def at_close(self, act: Callable[[], None]) -> None:
        """Call `act` before this open root closes."""
        self._closing.append(act)

    def check_open(self) -> None:
        if not self._is_open:
            place = os.fsdecode(self.disk.root.path)
            raise fault("workspace_closed", f"The workspace {place} was closed here; open it again.", root=place)

    def close(self) -> None:
        self._is_open = False
        # Popped one by one, so that one that fails does not run again.
        while self._closing:
            self._closing.pop()()
        for other in (*self._others.values(), *self._views.values()):
            other.close()
        self.disk.close()


def _record_root(ledger: Ledger, found: FoundRoot) -> RootRow:
    """The row of a root for a process that opens it; written if the store does not have it like this."""
    with ledger.store.write() as tx:
        found, rows = replace(found, host=current_host(tx, os.environ)), tx.select(ROOTS)
        row = _put_root(ledger, tx, plan_opening(found, rows, ledger.ids.new))
    if all(one.id != row.id for one in rows):
        _warn_of_replaced(row, found.replaced_in(rows))
    return row


def _put_root(ledger: Ledger, tx: Tx, opening: Opening) -> RootRow:
    # The workspace with the longest history continues, because new positions must come after all given ones.
    joined = set(opening.joined) or {opening.row.workspace}
    first, *joining = sorted(joined, key=lambda one: (-newest_wseq(tx, one), one))
    row = replace(opening.row, workspace=first)
    body: dict[str, Any] = {
        "root": row.id,
        "workspace": first,
        "place": key_to_wire(row.place),
        "key": key_to_wire(row.key),
        "identity": row.identity,
        "host": row.host,
        "joins": joining,
    }
    if opening.keys:
        body["keys"] = {one: key_to_wire(key) for one, key in opening.keys.items()}
    ledger.journal.append(tx, workspace_journal(first), "root.opened", body, at=ledger.now())
    return row


def _warn_of_replaced(row: RootRow, replaced: Sequence[RootRow]) -> None:
    for earlier in replaced[-1:]:
        import logging  # Hardly ever needed, and every process that opens a store would wait for it.

        words = "mulligan: %s is another directory than the one that had this path before, so it begins a history "
        words += "of its own. If it continues the earlier one, `mulligan store adopt %s` joins the two."
        path = row.place.decode("utf-8", "backslashreplace") or "/"
        logging.getLogger("mulligan.history").warning(words, path, earlier.id)


def _capture_rules(disk: Disk, ledger: Ledger) -> CaptureRules:
    """The capture rules of the user's settings and of the root's own. Raises `invalid_config`."""
    project = os.path.join(os.fsdecode(disk.root.path), PROJECT_FILE)
    rules = CaptureRules((user_file(os.environ), project), ledger.store.secret_key)
    rules.load()
    return rules
