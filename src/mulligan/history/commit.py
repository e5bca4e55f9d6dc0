"""The part of a call that ends it: what it did is published, or put back.

Whatever comes in between, an interrupt, a fork, a store that fails, the store is asked how the call stands before
anything is done about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from mulligan.history.account import Account
from mulligan.history.deeds import Block
from mulligan.history.ledger import Ending, Held, digests_of
from mulligan.history.live import Watching
from mulligan.history.moves import with_moves
from mulligan.history.originals import discard_original
from mulligan.history.putting_back import Trace, drafts_of, put_back, sync_paths
from mulligan.history.rescues import rescue_note
from mulligan.session.orphans import Watched, warn_of_orphan, watch
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest
from mulligan.values.entries import Change, DirEntry, Entry, FileEntry, same_state
from mulligan.values.faults import Broken, MayNot, MulliganError, WorldChanged, fault, fault_of_os_error
from mulligan.values.here import Holder, block_exit, holder_of
from mulligan.values.paths import RepoPath, path_bytes, to_wire
from mulligan.values.refusal import Refused

STORE_FULL = {"path": ".", "reason": "store_full"}
"""Part of the coverage of each call during which the store had no room."""

AtEnd = Callable[[Tx, str], bool]
"""Part of how a call ends, in the same transaction: told the status, says whether it has moved the session's state."""


class Closing(Watching):
    """What `Call` inherits, besides what it watches."""

    status: Literal["open", "committed", "aborted", "in_doubt"]
    strict: bool
    account: Account
    at_end: list[AtEnd]
    parts: Mapping[str, Closing]
    _pid: int
    _stuck: bool
    _reason: str
    _watched: Watched | None
    exit_held: Holder | None

    @property
    def id(self) -> str:
        return self.facts.id

    def _whole(self) -> list[Closing]:
        """With its parts, which come first."""
        return [*self.parts.values(), self]

    def savepoint(self) -> Savepoint:
        """What happens inside is put back if it does not end well. The call goes on."""
        return Savepoint(self)

    def changes(self) -> list[Change]:
        """What this call has changed so far, in path order."""
        changes = [
            one.change
            for _, one in sorted(self._touched.items(), key=lambda item: path_bytes(item[0]))
            if one.acted and not same_state(one.before, one.after)
        ]
        return with_moves(changes, guessed=self._has_commands)

    def commit(self, *, reason: str | None = None) -> list[Change]:
        """Publish. If somebody ended this call for us (`call_lost`), nothing is; putting back was theirs to do."""
        with self._lock:
            endings = [(call, call._ending(reason)) for call in self._whole() if call is self or call._begun]
            try:
                with self.ledger.store.write() as tx:
                    for call, ending in endings:
                        call._end(tx, ending, held=call._held())
            except Broken as broken:
                self._resolve_doubt(broken)
            for call in self._whole():
                call.status = "committed"
                call._discard_originals()
            changes = [change for _, ending in endings for change in ending.changes]
            self.ledger.note_growth(self.facts.session, sum(_size(one.before) + _size(one.after) for one in changes))
            return list(endings[-1][1].changes)

    def _ending(self, reason: str | None) -> Ending:
        """What is going to be published."""
        self._check_open()
        if self._stuck:
            raise fault("restore_failed", f"Call {self.id} could not put back a part that failed.", call=self.id)
        changes = self.changes()
        if self.ledger.store.durability == "power":
            self._sync()
        bare = [one.path for one in self._touched.values() if one.bare]
        if bare:
            words = f"The store did not take the bytes that call {self.id} left at {bare[0]}; it is not on record yet."
            raise fault("io_error", words, call=self.id)
        coverage = [*self.coverage, *self._conflicted(), *self._lost_with(change.path for change in changes)]
        coverage += self._rescued(standing=digests_of(changes))
        effects, handed_out = self.account.effects, self.account.handed_out
        return Ending("committed", changes, reason, coverage, effects, handed_out, strict=self.strict)

    def __enter__(self) -> Self:
        self._watched = watch(self, self) if holder_of(self) is not None else None
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
        """Left normally, commit, unless aborted inside. Left any other way, or if the commit fails, put all back.

        A commit in doubt leaves the files; whoever ended a lost call for us has put it back.
        """
        lost = False
        self.note_if_store_was_full(error)
        try:
            if error is None and self.status == "open":
                self.commit()
        except WorldChanged:
            lost = True
            raise
        except MayNot as refused:
            error = refused
            raise
        except Broken as broken:
            self.note_if_store_was_full(broken)
            raise
        finally:
            if self.status == "open" and not lost:
                self.abort(reason_of(error))

    def note_if_store_was_full(self, error: BaseException | None) -> None:
        """The record of a call during which the store was full says so."""
        if isinstance(error, Broken) and error.code == "no_space" and STORE_FULL not in self.coverage:
            self.coverage.append(STORE_FULL)

    def _resolve_doubt(self, broken: Broken) -> None:
        """The store failed while we published. Files stay as they are until it says whether we did."""
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
        """Its block is gone. What cannot be put back now is tried again before the next call."""
        was_open = self.status == "open"
        try:
            self.abort("interrupted")
        except MulliganError:
            self._ask_later()
        return self.id if was_open and self.status == "aborted" else None

    def _settle(self) -> bool:
        """Ask again. Published, the files stay; not published, they go back. False: the store cannot say yet."""
        with self._lock:
            self.status = "open"
            try:
                self.abort(self._reason)
            except MulliganError:
                self.status = "in_doubt"
        return self.status != "in_doubt"

    def abort(self, reason: str) -> list[RepoPath]:
        """Put everything back and say so on record. The paths somebody else changed meanwhile, left as they are."""
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
        """All is as it was; should the store not take that down now, it will be asked to later."""
        try:
            with self.ledger.store.write() as tx:
                for call in calls:
                    call._end(tx, call._aborted(self._reason), held=None)
        except Broken:
            self._ask_later()
            raise
        for call in calls:
            call.status = "aborted"
            call._discard_originals()

    def _discard_originals(self) -> None:
        """The call has ended, so nobody needs the copies. One that cannot go now, the next to open the root removes."""
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
        """An interrupt may have come between the commit and our noticing it: ask the store."""
        if self.status == "open":
            self._was_ended()

    def _was_ended(self) -> bool:
        """By somebody else, or by us: an interrupt may have kept us from noticing what the store knows.

        In a child of the process that made the call, it is not ours to end.
        """
        if self._is_elsewhere:
            self.status = "aborted"
            return True
        stands = self.ledger.how_it_stands(self.facts.id, self._owner)
        if stands == "ours" or (stands == "unknown" and not self._begun):
            self._begun = stands == "ours"
            return False
        self.status = "committed" if stands == "committed" else "aborted"
        self.ledger.has_acted(self.facts.id)
        return True

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid

    @property
    def is_open_here(self) -> bool:
        """Whether somebody in this process may still act in it."""
        return self.status == "open" and not self._is_elsewhere

    def __del__(self) -> None:
        """Nothing refers to it any more, and it never ended: an interrupt came. It is aborted before the next call."""
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
        self.account.store_kept(tx)
        moved = [act(tx, ending.status) for act in self.at_end]
        self.ledger.end(tx, self.facts, replace(ending, placed=True) if any(moved) else ending, held=held)

    def _held(self) -> Held:
        """As far as we know, which is all there is unless something came in between."""
        paths = [one.row.path for one in self._touched.values()]
        return Held(paths, [claim.place for claim in self._claimed], self._begun)

    def _put_back(self, block: Block | None) -> None:
        """Everything that was changed in a block, as it was before. What somebody changed since stays as it is."""
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
            # A folder in which the call itself has done more since; of files, somebody else has.
            full = {path for path in report.conflicts if isinstance(self._touched[path].after, DirEntry)}
            self._done.leave(undoing, but=full)
            self._not_captured.update(report.not_captured)
            for path in earlier.keys() - {*report.conflicts, *report.lost, *report.not_captured}:
                self._touched[path].becomes(earlier[path])

    def _name_anybodys(self, gone: Container[RepoPath]) -> None:
        """What anybody may have written is kept, and counts like everything that is."""
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
        """All that this call has put anywhere, though it be the same as before: it is another file."""
        try:
            sync_paths(self.disk, [path for path, one in self._touched.items() if one.acted or one.unsure])
        except OSError as error:
            raise fault_of_os_error(error, f"Syncing what call {self.id} changed") from error


class Savepoint(Block):
    """A block of an open call and its parts: put back, if it does not end well."""

    __slots__ = ("_call",)

    def __init__(self, call: Closing) -> None:
        super().__init__()
        self._call = call

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if error is not None:
            self.put_back()

    def put_back(self) -> None:
        """Undo what was done in the block. Any number of times."""
        if not self._call._is_elsewhere:
            for call in self._call._whole():
                call._put_back(self)


def reason_of(error: BaseException | None) -> str:
    """What the record says of a call that was left by an exception."""
    if error is None:
        return "commit_failed"
    return error.code if isinstance(error, MulliganError | Refused) else type(error).__name__


def _size(entry: Entry) -> int:
    return entry.size if isinstance(entry, FileEntry) else 0
