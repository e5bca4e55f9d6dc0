"""The part of a call that ends it: what it did is published, or put back.

Whatever comes in between, an interrupt, a fork, a store that fails, the store is asked how the call stands before
anything is done about it.

Which of a call's changes are moves, judged by all of them together once they are known. Pure.

1. A move is told only of what has left one path and is at another, when the call is over: what went back, or went on
   to a third path, counts by where it came from first and where it is last.
2. What a tool of ours says that it moved is believed as long as its source is gone, whatever was made of it since.
3. A command says nothing: a file that left one path and came to another with the same bytes was moved. Where several
   have the same bytes, or there are none, nobody can say, and nothing is told.
4. A folder that is gone was moved to where all those of its files went that are known to have moved, if that is new.

What the record of a call says besides files: its effects with their receipts, and the blobs it answered with.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

from mulligan.history.abort import Trace, discard_original, drafts_of, put_back, rescue_note, sync_paths
from mulligan.history.ledger import STORE_FULL, Ending, Held, digests_of
from mulligan.history.live_changes import CommandChanges
from mulligan.history.undo_log import Block
from mulligan.session.state.orphan_calls import WatchedBlock, warn_of_orphan, watch
from mulligan.store.blobs import SMALL_BYTES, Blobs, Prepared
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import Absent, Change, DirEntry, Entry, FileEntry, same_state
from mulligan.values.errors import (
    ConflictError,
    ForbiddenError,
    InternalError,
    MulliganError,
    Refused,
    fault,
    fault_of_os_error,
)
from mulligan.values.paths import RepoPath, join, name_of, parent_of, path_bytes, to_wire
from mulligan.values.scoped_var import Holder, block_exit


def with_moves(changes: Sequence[Change], *, guessed: bool) -> list[Change]:
    """The same changes, each with the path it was moved from. `guessed`: a command may have moved any of them.

    If a tool named a source that the call itself had moved there, the first source counts.
    """
    gone = {change.path: change.before for change in changes if isinstance(change.after, Absent)}
    origins = {one.path: one.renamed_from for one in changes if one.renamed_from in gone and one.path not in gone}
    left = _by_digest((was, path) for path, was in gone.items() if path not in set(origins.values()))
    came = _by_digest((one.after, one.path) for one in changes if _is_new(one) and one.path not in origins)
    asked = {change.path for change in changes if guessed or change.renamed_from is not None}
    found = {path: left[digest] for digest, path in came.items() if digest in left and path in asked} | origins
    if guessed:
        found = _folders(changes, found) | found
    return [replace(one, renamed_from=found.get(one.path)) for one in changes]


def _folders(changes: Iterable[Change], moved: Mapping[RepoPath, RepoPath]) -> dict[RepoPath, RepoPath]:
    """New folders, each with the removed one from which all its files were moved under their names."""
    gone = {one.path for one in changes if isinstance(one.before, DirEntry) and isinstance(one.after, Absent)}
    new = {one.path for one in changes if isinstance(one.after, DirEntry) and _is_new(one)}
    sources: dict[RepoPath, set[RepoPath]] = {}
    for path, origin in moved.items():
        while name_of(path) == name_of(origin):
            path, origin = parent_of(path), parent_of(origin)
            if path not in new or origin not in gone:
                break
            sources.setdefault(path, set()).add(origin)
    times = Counter(origin for origins in sources.values() for origin in origins)
    found = {path: origin for path, (origin, *others) in sources.items() if not others and times[origin] == 1}
    for path in sorted(new - found.keys() - moved.keys()):
        above = found.get(parent_of(path))
        if above is not None and join(above, name_of(path)) in gone:
            found[path] = join(above, name_of(path))  # it had nothing in it that could tell
    return found


def _is_new(change: Change) -> bool:
    return isinstance(change.before, Absent)


def _by_digest(entries: Iterable[tuple[Entry, RepoPath]]) -> dict[Digest, RepoPath]:
    """Paths by digest, without digests that several files share, and without empty files: those cannot tell a move."""
    files = [(entry.digest, path) for entry, path in entries if isinstance(entry, FileEntry) and entry.size]
    times = Counter(digest for digest, _ in files)
    return {digest: path for digest, path in files if times[digest] == 1}


@dataclass(slots=True)
class Account:
    """What the record of a call says besides files."""

    _blobs: Blobs
    effects: list[dict[str, Any]] = field(default_factory=list)
    handed_out: set[Digest] = field(default_factory=set)
    rescued: dict[tuple[RepoPath, Digest], None] = field(default_factory=dict)
    """the bytes that an abort removes from the disk although another process may have written them, in order"""
    to_store: list[Prepared] = field(default_factory=list)

    def note_effect(self, name: str, params: Mapping[str, Any], receipt: Mapping[str, Any]) -> None:
        """Add an effect with its receipt to the record, for replay and for `log`."""
        self.effects.append({"effect": name, "params": params, "receipt": receipt})

    def hand_out(self, digest: Digest) -> None:
        """Note a blob in an answer: the session may read it from now on, and the record keeps it reachable."""
        self.handed_out.add(digest)

    def rescue(self, path: RepoPath, digest: Digest) -> None:
        """Note bytes that are in the store and will go from the disk, so that the record names them."""
        self.rescued[path, digest] = None
        self.hand_out(digest)

    def keep(self, data: bytes) -> Digest:
        """Store bytes that the record names. Small ones are stored in the transaction of the record."""
        if len(data) > SMALL_BYTES:
            digest = self._blobs.store(data)
        else:
            digest = digest_of(data)
            self.to_store.append(self._blobs.prepare_scanned(data, digest))
        self.hand_out(digest)
        return digest


"""Part of the coverage of each call during which the store had no room."""

AtEnd = Callable[[Tx, str], bool]
"""A function that runs in the transaction that ends a call.

It gets the status, and answers whether it changed the session's state.
"""


class Closing(CommandChanges):
    """What `Call` inherits, besides what it watches."""

    status: Literal["open", "committed", "aborted", "in_doubt"]
    strict: bool
    account: Account
    at_end: list[AtEnd]
    parts: Mapping[str, Closing]
    _pid: int
    _stuck: bool
    _reason: str
    _watched: WatchedBlock | None
    exit_held: Holder | None

    @property
    def id(self) -> str:
        return self.facts.id

    def _whole(self) -> list[Closing]:
        """With its parts, which come first."""
        return [*self.parts.values(), self]

    def savepoint(self) -> Savepoint:
        """A block of the call that is rolled back if it raises. The call goes on."""
        return Savepoint(_call=self)

    def changes(self) -> list[Change]:
        """What this call has changed so far, in path order."""
        changes: list[Change] = []
        may_have_moved = self._has_commands
        # In byte order of the paths, so that records of the same changes have the same bytes.
        for path in sorted(self._touched, key=path_bytes):
            one = self._touched[path]
            if one.acted and not same_state(one.before, one.after):
                changes.append(Change(path, one.before, one.after, one.origin))
                may_have_moved |= one.origin is not None
        return with_moves(changes, guessed=self._has_commands) if may_have_moved else changes

    def commit(self, *, reason: str | None = None) -> list[Change]:
        """Publish the changes.

        If another process has ended this call (`call_lost`), publish nothing: that process restored the files.
        """
        with self._lock:
            # Everything that can raise runs before the transaction, which then only writes.
            whole = self._whole()
            endings: list[tuple[Closing, Ending]] = []
            for call in whole:
                if call is self or call._begun:
                    endings.append((call, call._ending(reason)))
            try:
                with self.ledger.store.write() as tx:
                    for call, ending in endings:
                        call._end(tx, ending, held=call._held())
            except InternalError as broken:
                self._resolve_doubt(broken)
            for call in whole:
                call.status = "committed"
                if call._originals:
                    call._discard_originals()
            # Measuring the store is slow and usually evicts nothing, so only the growth is counted here.
            grown = 0
            for _, ending in endings:
                for change in ending.changes:
                    for entry in (change.before, change.after):
                        grown += entry.size if isinstance(entry, FileEntry) else 0
            self.ledger.note_growth(self.facts.session, grown)
            return list(endings[-1][1].changes)

    def _ending(self, reason: str | None) -> Ending:
        """The end record and its data, ready to be written."""
        self._check_open()
        if self._stuck:
            raise fault("restore_failed", f"Call {self.id} could not put back a part that failed.", call=self.id)
        changes = self.changes()
        if self.ledger.store.durability == "power":
            self._sync()
        for one in self._touched.values():
            if one.bare:
                words = (
                    f"The store did not take the bytes that call {self.id} left at {one.path}; they are not on record."
                )
                raise fault("io_error", words, call=self.id)
        coverage = [*self.coverage]
        if self.conflicts:
            coverage += self._conflicted()
        if self._traits.had:
            coverage += self._lost_with(change.path for change in changes)
        if self.account.rescued:
            coverage += self._rescued(standing=digests_of(changes))
        effects, handed_out = self.account.effects, self.account.handed_out
        return Ending("committed", changes, reason, coverage, effects, handed_out, strict=self.strict)

    def __enter__(self) -> Self:
        self._watched = watch(self, self) if self.exit_held is not None and self.exit_held() is not None else None
        return self

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.leave(error)
        finally:
            if self._watched is not None and self.status != "open":
                self._watched.forget()

    def leave(self, error: BaseException | None) -> None:
        """Commit if the block ended normally and did not abort; else, or if the commit fails, abort.

        A commit in doubt leaves the files. If another process ended the call, that process has restored them.
        """
        lost = False
        if error is not None:
            self.note_if_store_was_full(error)
        try:
            if error is None and self.status == "open":
                self.commit()
        except ConflictError:
            lost = True
            raise
        except ForbiddenError as refused:
            error = refused
            raise
        except InternalError as broken:
            self.note_if_store_was_full(broken)
            raise
        finally:
            if self.status == "open" and not lost:
                self.abort(reason_of(error))

    def note_git(self, note: dict[str, str]) -> None:
        """Note a change of git's files outside the root. It alone gives the call a place in history."""
        self.coverage.append(note)
        if "blob_ref" in note:
            self.account.hand_out(Digest(note["blob_ref"]))
        self.at_end.append(lambda _, status: status == "committed")

    def note_if_store_was_full(self, error: BaseException) -> None:
        """If the error says that the store was full, note it for the record."""
        if isinstance(error, InternalError) and error.code == "no_space" and STORE_FULL not in self.coverage:
            self.coverage.append(STORE_FULL)

    def _resolve_doubt(self, broken: InternalError) -> None:
        """Find out after a failed commit whether it took effect. Files stay as they are until the store answers."""
        try:
            published = self.ledger.has_ended(self.facts.id)
        except MulliganError:
            self._ask_later()
            words = f"It is not known whether call {self.facts.id} was committed: the store cannot be read."
            raise fault("in_doubt", words, call=self.facts.id) from broken
        if not published:
            raise broken

    def _ask_later(self) -> None:
        self.status = "in_doubt"
        if self._settle not in self.ledger.doubts:
            self.ledger.doubts.append(self._settle)

    def abort_orphan(self) -> str | None:
        """Abort a call whose block was interrupted.

        Files that cannot be restored now are tried again before the next call.
        """
        was_open = self.status == "open"
        try:
            self.abort("interrupted")
        except MulliganError:
            self._ask_later()
        return self.id if was_open and self.status == "aborted" else None

    def _settle(self) -> bool:
        """Ask the store again.

        If the call was committed, its files stay; else abort. False: the store still cannot answer.
        """
        with self._lock:
            self.status = "open"
            try:
                self.abort(self._reason)
            except MulliganError:
                self.status = "in_doubt"
        return self.status != "in_doubt"

    def abort(self, reason: str) -> list[RepoPath]:
        """Restore all files and record the abort.

        Answers the conflicts: paths that another process changed, left as they are.
        """
        with self._lock:
            if self.status != "open":
                return []
            self._reason = reason
            ours = [call for call in self._whole() if call.status == "open" and not call._was_ended()]
            for call in ours:
                call._put_back(None)
            self._record_abort(ours)
            return self.conflicts

    def _record_abort(self, calls: Sequence[Closing]) -> None:
        """Record the abort, after all files are restored. If the store fails, try again later."""
        try:
            with self.ledger.store.write() as tx:
                for call in calls:
                    call._end(tx, call._aborted(self._reason), held=None)
        except InternalError:
            self._ask_later()
            raise
        for call in calls:
            call.status = "aborted"
            call._discard_originals()

    def _discard_originals(self) -> None:
        """Remove the copies of uncaptured paths, after the call has ended.

        The next process that opens the root removes the rest.
        """
        for name, path in self._originals.items():
            with suppress(OSError):
                discard_original(self.disk, path, name)

    def _aborted(self, reason: str) -> Ending:
        left = [{"path": to_wire(path), "reason": "not_captured"} for path in sorted(self._not_captured)]
        coverage = [*self.coverage, *left, *self._conflicted(), *self._lost_with(self._traits.had), *self._rescued()]
        return Ending("aborted", (), reason, coverage, self.account.effects, self.account.handed_out)

    def _conflicted(self) -> list[dict[str, str]]:
        return [{"path": to_wire(path), "reason": "conflicted"} for path in self.conflicts]

    def _rescued(self, *, standing: Container[Digest] = ()) -> list[dict[str, str]]:
        named = sorted(self.account.rescued, key=lambda one: path_bytes(one[0]))
        return [rescue_note(path, digest) for path, digest in named if digest not in standing]

    def resolve(self) -> None:
        """Ask the store for the call's status, because an interrupt may have come right after the commit."""
        if self.status == "open":
            self._was_ended()

    def _was_ended(self) -> bool:
        """Whether the call has ended in the store: by another process, or by this one, and an interrupt kept it from
        noticing.

        A child of the process that made the call must not end it.
        """
        if self._is_elsewhere:
            self.status = "aborted"
            return True
        stands = self.ledger.how_it_stands(self.facts.id, self._owner)
        if stands == "ours" or (stands == "unknown" and not self._begun):
            self._begun = stands == "ours"
            return False
        self.status = "committed" if stands == "committed" else "aborted"
        self.ledger.acting.pop(self.facts.id, None)
        return True

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid

    @property
    def is_open_here(self) -> bool:
        """Whether this process may still work in the call."""
        return self.status == "open" and not self._is_elsewhere

    def __del__(self) -> None:
        """Python collects a call that never ended, because an interrupt came. It is aborted before the next call."""
        if getattr(self, "_begun", False) and self.is_open_here:
            self.ledger.doubts.append(self._settle_orphan)

    def _settle_orphan(self) -> bool:
        settled = self._settle()
        if self.status == "aborted":
            warn_of_orphan(self.id)
        return settled

    def _end(self, tx: Tx, ending: Ending, *, held: Held | None) -> None:
        if self._begun:
            self.ledger.check_ours(tx, self.facts.id, self._owner)
        else:
            self.ledger.record_begin(tx, self.facts)
        for prepared in self.account.to_store:
            self.ledger.blobs.put(tx, prepared)
        moved = False
        for act in self.at_end:
            # Run all of them, because each one writes; so no short-circuiting `or`.
            moved = act(tx, ending.status) or moved
        self.ledger.end(tx, self.facts, replace(ending, placed=True) if moved else ending, held=held)

    def _held(self) -> Held:
        """The rows of this call in the store, as this process remembers them; complete unless an interrupt came."""
        paths, places = list[bytes](), list[bytes]()
        for one in self._touched.values():
            paths.append(one.row.path)
        for claim in self._claimed:
            places.append(claim.place)
        return Held(paths, places, self._begun)

    def _put_back(self, block: Block | None) -> None:
        """Restore everything that a block changed. What another process changed since stays as it is."""
        with self._lock:
            undoing = self._done.undoing(block)
            self._leave_shared(reversed(undoing.before))
            earlier = {path: was for path, was in undoing.before.items() if path not in self._shared}
            try:
                report = put_back(self, [self._trace(*one) for one in earlier.items()], self._note_lift)
            except OSError as error:
                self._stuck = True
                words = f"Not everything could be put back: {error.strerror}. Opening the store again tries once more."
                raise fault("restore_failed", words, call=self.id) from error
            for rescued in report.rescued:
                self.account.rescue(*rescued)
            self._name_anybodys(earlier)
            in_the_way = [*report.conflicts, *report.lost, *sorted(undoing.overtaken)]
            self.conflicts += [path for path in in_the_way if path not in self.conflicts]
            # Of the folders in conflict, those in which the call itself made later changes; of files, another process
            # did.
            full = {path for path in report.conflicts if isinstance(self._touched[path].after, DirEntry)}
            self._done.leave(undoing, but=full)
            self._not_captured.update(report.not_captured)
            for path in earlier.keys() - {*report.conflicts, *report.lost, *report.not_captured}:
                self._touched[path].becomes(earlier[path])

    def _name_anybodys(self, gone: Container[RepoPath]) -> None:
        """Store what another process may have written, and count it like other stored bytes."""
        found = {key: size for key, size in self._anybodys.items() if key[0] in gone}
        for path, digest in found:
            self.account.rescue(path, digest)
            del self._anybodys[path, digest]
        self.ledger.note_growth(self.facts.session, sum(found.values()))

    def _trace(self, path: RepoPath, before: Entry) -> Trace:
        touched = self._touched[path]
        in_place = bool(touched.row.in_place) and touched.unsure
        drafts, seen = drafts_of(touched.row), touched.take_seen()
        return Trace(path, before, drafts, in_place, touched.row.intended, touched.after, seen)

    def _sync(self) -> None:
        """Sync every file that this call wrote, even one with its old content, because it is another inode."""
        try:
            sync_paths(self.disk, [path for path, one in self._touched.items() if one.acted or one.unsure])
        except OSError as error:
            raise fault_of_os_error(error, f"Syncing what call {self.id} changed") from error


@dataclass(slots=True, eq=False)
class Savepoint(Block):
    """A block of an open call and its parts that is rolled back if it raises."""

    _call: Closing = field(kw_only=True)

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if error is not None:
            self.put_back()

    def put_back(self) -> None:
        """Roll back the changes of the block. It can be called again."""
        if os.getpid() == self._call._pid:
            for call in self._call._whole():
                call._put_back(self)


def reason_of(error: BaseException | None) -> str:
    """The abort reason in the record for a call that an exception ended."""
    if error is None:
        return "commit_failed"
    return error.code if isinstance(error, MulliganError | Refused) else type(error).__name__
