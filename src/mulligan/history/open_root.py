"""`OpenRoot` is one root that is open for work. It starts the calls and the undo operations of that root."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary, ref

from mulligan.files.capture_rules import PROJECT_FILE, CaptureRules, user_file
from mulligan.files.disk import NOTHING, Disk, HostDisk, Image
from mulligan.files.identity import identity_of, is_simulated, same_directory, simulated_identity
from mulligan.history.call import Call
from mulligan.history.cause import WORK, Cause, PartOfCall
from mulligan.history.ledger import Facts, Ledger
from mulligan.history.roots import FoundRoot, root_elsewhere, unrecorded
from mulligan.history.tables import ROOTS, RootRow
from mulligan.session.state.orphan_calls import abort_orphans
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.entries import ABSENT, Entry
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.ids import CallId, RootId, SessionId, TurnId, WorkspaceId
from mulligan.values.paths import RepoPath, join

OpenDisk = Callable[[bytes], Disk]


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
        disk.keep_large = ledger.blobs.store_large
        disk.durability = ledger.store.durability
        disk.sync_preimages = ledger.blobs.sync
        disk.originals = ledger.store.originals
        disk.capture = _capture_rules(disk, ledger)
        self._open_disk = open_disk
        self.root = self._root_row(record=record) if row is None else row
        disk.root = disk.root.with_key(self.root.key)
        self._opener = None if opener is None else ref(opener)
        self._others: dict[str, OpenRoot] = {}
        self._views: dict[tuple[bytes, bool], OpenRoot] = {}
        self._closing: list[Callable[[], None]] = []
        self._seen: set[RootRow] = set()
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
        self.ledger.adopt_root(self.root, chosen)
        return chosen

    def _root_row(self, *, record: bool) -> RootRow:
        found = self._found()
        known = self.ledger.known_root(found)
        if not record:
            return unrecorded(found) if known is None else replace(known, place=found.place)
        if known is not None and (known.place, known.identity, known.host) == (
            found.place,
            found.identity,
            found.host,
        ):
            return known
        self.disk.settle_birth()
        return self.ledger.record_root(replace(found, identity=identity_of(self.disk)))

    def _found(self) -> FoundRoot:
        return FoundRoot(self.ledger.host(), self.disk.root.place, identity_of(self.disk), self._identity_at)

    def _identity_at(self, place: bytes) -> str | None:
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
        self.disk.capture.refresh()
        if self.ledger.doubts:
            self.ledger.settle_doubts()
        if session not in self.ledger.sessions:
            self.ledger.session(session, self.root)
        facts = self._facts(session, turn=turn, label=label, tool=tool, cause=cause, observed=observed)
        return self._made(facts, strict=strict)

    def _facts(
        self,
        session: SessionId,
        *,
        turn: TurnId | None,
        label: str | None,
        tool: str | None,
        cause: Cause,
        observed: bool = False,
    ) -> Facts:
        identifier = CallId(self.ledger.ids.new())
        return Facts(
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

    def part_of_way_back(self, call: Call, verb: str) -> Call:
        """The part of an undo operation in this root, when the operation itself works in another one."""
        part = self._part(call, verb)
        call.add_part(self.root, part)
        return part

    def _part(self, call: Call, verb: str | None = None) -> Call:
        facts = call.facts
        self.check_open()
        self.ledger.session(facts.session, self.root)
        # Not by `call`, which aborts interrupted calls: the caller holds the lock of a call that goes on.
        return self._made(
            self._facts(
                facts.session, turn=facts.turn, label=facts.label, tool=facts.tool, cause=PartOfCall(facts.id, verb)
            )
        )

    def cancel(self, call: str) -> None:
        """Abort a call that is open on this open root, even if another thread works in it."""
        found = self._call_here(call)
        if found is not None:
            found.abort("cancelled")

    def can_cancel(self, call: str) -> bool:
        """False: the call belongs to another process."""
        return self._call_here(call) is not None

    def _call_here(self, call: str) -> Call | None:
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
        while self._closing:
            self._closing.pop()()
        for other in (*self._others.values(), *self._views.values()):
            other.close()
        self.disk.close()


def _capture_rules(disk: Disk, ledger: Ledger) -> CaptureRules:
    """The capture rules of the user's settings and of the root's own. Raises `invalid_config`."""
    project = os.path.join(os.fsdecode(disk.root.path), PROJECT_FILE)
    rules = CaptureRules((user_file(os.environ), project), ledger.store.secret_key)
    rules.load()
    return rules
