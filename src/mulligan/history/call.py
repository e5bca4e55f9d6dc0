"""The call: one transaction over files.

Invariants, in the order they are kept:
1. Before a path changes, its claim, its preimage and what we mean to put there are in the store.
2. Each effect inside a call happens wholly or not at all; so does the call.
3. What another process saved meanwhile is recorded as its change before ours takes its place, or ours is not made.
4. A call has exactly one begin and one end on record, whatever happened, even if it only read.
5. Abort puts back only what this call changed, newest first. A path that another process changed after us stays.

`Call` begins, commits and aborts. Its parts each have a module: `undo_log` has the state that they share and rolls it
back, `file_changes` changes files, `command_changes` takes the changes of commands.

An interrupt, a fork or a failing store can come between any two lines. So a call asks the store for its status before
it decides what to do with its files.

`current_call` answers which call this code runs in. It is a context variable: asyncio tasks and `asyncio.to_thread`
carry it along, and two calls that interleave on one thread each see their own. A thread started by hand carries it with
`contextvars.copy_context().run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from mulligan.files.disk import Disk
from mulligan.history.abort import discard_original, rescue_note
from mulligan.history.cause import PartOfCall
from mulligan.history.command_changes import CommandChanges
from mulligan.history.file_changes import FileChanges, Heal
from mulligan.history.ledger import STORE_FULL, Ending, Facts, Held, Ledger, withheld_notes
from mulligan.history.retention import changes_over_cap, coverage_of, digests_of
from mulligan.history.tables import RootRow
from mulligan.history.undo_log import CallState, Savepoint
from mulligan.session.state.orphan_calls import WatchedBlock, warn_of_orphan, watch
from mulligan.session.tables import session_journal
from mulligan.store.journal import REFS
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.entries import Change, FileEntry
from mulligan.values.errors import ConflictError, ForbiddenError, InternalError, MulliganError, Refused, fault
from mulligan.values.ids import RootId, TurnId, WorkspaceId
from mulligan.values.paths import RepoPath, path_bytes, to_wire
from mulligan.values.scoped_var import Holder, ScopedVar, block_exit

AtEnd = Callable[[Tx, str], bool]
"""A function that runs in the transaction that ends a call.

It gets the status, and answers whether it changed the session's state.
"""


class Call:
    """One transaction over files, open until `commit` or `abort`. A lock lets one thread at a time work in it.

    `parts` are its changes in other roots: calls of their own that commit in one transaction with it, and abort with
    it.
    """

    def __init__(
        self, ledger: Ledger, disk: Disk, root: RootRow, facts: Facts, *, heal: Heal = bool, strict: bool = False
    ) -> None:
        self.ledger = ledger
        self.session = facts.session
        self.state = state = CallState(ledger, disk, root, facts)
        self._files = FileChanges(state, heal)
        # Bound once, because a method that only forwards would cost every effect one more function call.
        self.change = self._files.change
        self.changes = state.changes
        self.account = state.account
        self.coverage = state.coverage
        self.conflicts = state.conflicts
        self.strict = strict
        self.at_end: list[AtEnd] = []
        self.parts: dict[str, Call] = {}
        self.home = root.id
        """the root that it was made for; it may work in another one (`part_at`)"""
        self.exit_held: Holder | None = None
        self._commands: CommandChanges | None = None
        self._watched: WatchedBlock | None = None
        self._reason = "in_doubt"

    @property
    def id(self) -> str:
        return self.state.facts.id

    @property
    def facts(self) -> Facts:
        return self.state.facts

    @property
    def disk(self) -> Disk:
        return self.state.disk

    @property
    def root(self) -> RootRow:
        return self.state.root

    @property
    def status(self) -> Literal["open", "committed", "aborted", "in_doubt"]:
        return self.state.status

    @property
    def race_window(self) -> bool:
        """Whether a file was written in place, so that another process's save at that moment may be lost."""
        return self.state.race_window

    @property
    def commands(self) -> CommandChanges:
        """Takes the changes of commands that run in the call."""
        # Made only when needed, because most calls run no command. Not a `cached_property`: in Python 3.11 that takes a
        # lock, which a forked child could inherit locked.
        if self._commands is None:
            self._commands = CommandChanges(self.state, self._files)
        return self._commands

    # In other roots.

    def part_at(self, disk: Disk, root: RootRow, make: Callable[[], Call]) -> Call:
        """The call or part that works in a root: the call itself, if it has done nothing in another root yet, else a
        part.
        """
        state = self.state
        assert not isinstance(state.facts.cause, PartOfCall), "a part stays in the root it was made for"
        with state.lock:
            # A call that has touched nothing is not on record, so it can still begin in this root. Then a call that
            # works in one root only needs no part, wherever that root is.
            if not (state.has_begun or state.touched or self.parts):
                state.disk, state.root = disk, root
                state.facts = replace(state.facts, root=RootId(root.id), workspace=WorkspaceId(root.workspace))
            if state.root.id == root.id:
                return self
            if root.id not in self.parts:
                self.add_part(root, make())
            return self.parts[root.id]

    def add_part(self, root: RootRow, part: Call) -> None:
        """The call commits and aborts the part from now on."""
        self.parts[root.id] = part
        self.state.parts.append(part.state)

    # The changes.

    def savepoint(self) -> Savepoint:
        """A block of the call that is rolled back if it raises. The call goes on."""
        return Savepoint(_state=self.state)

    def gaps(self, changes: Sequence[Change]) -> list[dict[str, str]]:
        """The coverage if the call ended now with these changes: what was not captured, what could not be undone."""
        with self.ledger.store.read() as tx:
            given_up = changes_over_cap(tx, self.session, changes)
        withheld = [note for note in withheld_notes(changes) if note not in self.coverage]
        lost = self.state.lost_with(change.path for change in changes)
        return [*self.coverage, *withheld, *lost, *coverage_of(given_up)]

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

    def may_read_blob(self, digest: Digest) -> bool:
        """Whether the session may read a blob: only one that it got in an answer or wrote itself.

        A digest alone gives no access.
        """
        if digest in self.account.handed_out:
            return True
        with self.ledger.store.read() as tx:
            journal = session_journal(self.session)
            return bool(tx.select(REFS, {"digest": raw_digest(digest), "journal": journal}, limit=1))

    # Commit.

    def commit(self, *, reason: str | None = None) -> list[Change]:
        """Publish the changes.

        If another process has ended this call (`call_lost`), publish nothing: that process restored the files.
        """
        with self.state.lock:
            # Everything that can raise runs before the transaction, which then only writes.
            endings: list[tuple[Call, Ending]] = []
            for call in (*self.parts.values(), self):
                if call is self or call.state.has_begun:
                    if call.state.spool is not None:
                        call.state.store_spooled()
                    endings.append((call, call._ending(reason)))
            try:
                with self.ledger.store.write() as tx:
                    for call, ending in endings:
                        call._end(tx, ending, knows_rows=True)
            except InternalError as broken:
                self._resolve_doubt(broken)
            for call in (*self.parts.values(), self):
                call.state.status = "committed"
                if call.state.originals:
                    call._discard_originals()
                if call.state.spool is not None:
                    call.state.close_spool()
            # Measuring the store is slow and usually evicts nothing, so only the growth is counted here.
            grown = 0
            for _, ending in endings:
                for change in ending.changes:
                    for entry in (change.before, change.after):
                        grown += entry.size if isinstance(entry, FileEntry) else 0
            self.ledger.note_growth(self.session, grown)
            return list(endings[-1][1].changes)

    def _ending(self, reason: str | None) -> Ending:
        """The end record and its data, ready to be written."""
        state = self.state
        state.check_open()
        if state.is_stuck:
            raise fault("restore_failed", f"Call {self.id} could not roll back an effect that failed.", call=self.id)
        changes = state.changes()
        if self.ledger.store.durability == "power":
            state.sync()
        for one in state.touched.values():
            if one.bare:
                words = (
                    f"The store did not take the bytes that call {self.id} left at {one.path}; they are not on record."
                )
                raise fault("io_error", words, call=self.id)
        coverage = [*state.coverage]
        if state.conflicts:
            coverage += self._conflicted()
        if state.lost_metadata.had:
            coverage += state.lost_with(change.path for change in changes)
        if state.account.rescued:
            coverage += self._rescued(without=digests_of(changes))
        effects, handed_out = state.account.effects, state.account.handed_out
        return Ending("committed", changes, reason, coverage, effects, handed_out, strict=self.strict)

    def _end(self, tx: Tx, ending: Ending, *, knows_rows: bool) -> None:
        """`knows_rows`: this process remembers all rows of the call in the store; after an interrupt it may not.

        Then `Ledger.end` looks them up.
        """
        state = self.state
        if state.has_begun:
            self.ledger.check_ours(tx, state.facts.id, state.owner)
        else:
            self.ledger.record_begin(tx, state.facts)
        for prepared in state.account.to_store:
            self.ledger.blobs.put(tx, prepared)
        moved = False
        for act in self.at_end:
            # Run all of them, because each one writes; so no short-circuiting `or`.
            moved = act(tx, ending.status) or moved
        held: Held | None = None
        if knows_rows:
            held = Held([], [], state.has_begun)
            for one in state.touched.values():
                held.paths.append(one.row.path)
            for claim in state.claimed:
                held.places.append(claim.place)
        self.ledger.end(tx, state.facts, replace(ending, placed=True) if moved else ending, held=held)

    def _resolve_doubt(self, broken: InternalError) -> None:
        """Find out after a failed commit whether it took effect. Files stay as they are until the store answers."""
        try:
            published = self.ledger.has_ended(self.state.facts.id)
        except MulliganError:
            self._ask_later()
            words = f"It is not known whether call {self.id} was committed: the store cannot be read."
            raise fault("in_doubt", words, call=self.id) from broken
        if not published:
            raise broken

    def _ask_later(self) -> None:
        self.state.status = "in_doubt"
        if self._settle not in self.ledger.doubts:
            self.ledger.doubts.append(self._settle)

    def _settle(self) -> bool:
        """Ask the store again.

        If the call was committed, its files stay; else abort. False: the store still cannot answer.
        """
        with self.state.lock:
            self.state.status = "open"
            try:
                self.abort(self._reason)
            except MulliganError:
                self.state.status = "in_doubt"
        return self.state.status != "in_doubt"

    # Abort.

    def abort(self, reason: str) -> list[RepoPath]:
        """Restore all files and record the abort.

        Answers the conflicts: paths that another process changed, left as they are.
        """
        with self.state.lock:
            if self.state.status != "open":
                return []
            self._reason = reason
            whole = (*self.parts.values(), self)
            ours = [call for call in whole if call.state.status == "open" and not call._was_ended()]
            for call in ours:
                call.state.roll_back(None)
            # Everything is as it was, so nothing needs the spool; a full store needs its room for the record.
            for call in ours:
                call.state.close_spool()
            self._record_abort(ours)
            return self.conflicts

    def _record_abort(self, calls: Sequence[Call]) -> None:
        """Record the abort, after all files are restored. If the store fails, try again later."""
        try:
            with self.ledger.store.write() as tx:
                for call in calls:
                    call._end(tx, call._aborted(self._reason), knows_rows=False)
        except InternalError:
            self._ask_later()
            raise
        for call in calls:
            call.state.status = "aborted"
            call._discard_originals()

    def _discard_originals(self) -> None:
        """Remove the copies of uncaptured paths, after the call has ended.

        The next process that opens the root removes the rest.
        """
        for name, path in self.state.originals.items():
            with suppress(OSError):
                discard_original(self.state.disk, path, name)

    def _aborted(self, reason: str) -> Ending:
        state = self.state
        left = [{"path": to_wire(path), "reason": "not_captured"} for path in sorted(state.not_captured)]
        lost = state.lost_with(state.lost_metadata.had)
        coverage = [*state.coverage, *left, *self._conflicted(), *lost, *self._rescued()]
        return Ending("aborted", (), reason, coverage, state.account.effects, state.account.handed_out)

    def _conflicted(self) -> list[dict[str, str]]:
        return [{"path": to_wire(path), "reason": "conflicted"} for path in self.conflicts]

    def _rescued(self, *, without: Container[Digest] = ()) -> list[dict[str, str]]:
        named = sorted(self.account.rescued, key=lambda one: path_bytes(one[0]))
        return [rescue_note(path, digest) for path, digest in named if digest not in without]

    # The block of the call, and interrupts.

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
            if self._watched is not None and self.state.status != "open":
                self._watched.forget()

    def leave(self, error: BaseException | None) -> None:
        """Commit if the block ended normally and did not abort; else, or if the commit fails, abort.

        A commit in doubt leaves the files. If another process ended the call, that process has restored them.
        """
        lost = False
        if error is not None:
            self.note_if_store_was_full(error)
        try:
            if error is None and self.state.status == "open":
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
            if self.state.status == "open" and not lost:
                self.abort(_reason_of(error))

    def abort_orphan(self) -> str | None:
        """Abort a call whose block was interrupted.

        Files that cannot be restored now are tried again before the next call.
        """
        was_open = self.state.status == "open"
        try:
            self.abort("interrupted")
        except MulliganError:
            self._ask_later()
        return self.id if was_open and self.state.status == "aborted" else None

    def resolve(self) -> None:
        """Ask the store for the call's status, because an interrupt may have come right after the commit."""
        if self.state.status == "open":
            self._was_ended()

    def _was_ended(self) -> bool:
        """Whether the call has ended in the store: by another process, or by this one, and an interrupt kept it from
        noticing.

        A child of the process that made the call must not end it.
        """
        state = self.state
        if os.getpid() != state.pid:
            state.status = "aborted"
            return True
        found = self.ledger.status_of(state.facts.id, state.owner)
        if found == "ours" or (found == "unknown" and not state.has_begun):
            state.has_begun = found == "ours"
            return False
        state.status = "committed" if found == "committed" else "aborted"
        self.ledger.acting.pop(state.facts.id, None)
        return True

    @property
    def is_open_here(self) -> bool:
        """Whether this process may still work in the call."""
        return self.state.status == "open" and os.getpid() == self.state.pid

    def __del__(self) -> None:
        """Python collects a call that never ended, because an interrupt came. It is aborted before the next call."""
        # An interrupt in `__init__` leaves a call without a state.
        state = self.__dict__.get("state")
        if state is not None and state.has_begun and self.is_open_here:
            self.ledger.doubts.append(self._settle_orphan)

    def _settle_orphan(self) -> bool:
        settled = self._settle()
        if self.state.status == "aborted":
            warn_of_orphan(self.id)
        return settled


def _reason_of(error: BaseException | None) -> str:
    """The abort reason in the record for a call that an exception ended."""
    if error is None:
        return "commit_failed"
    return error.code if isinstance(error, MulliganError | Refused) else type(error).__name__


_call: ScopedVar[Call] = ScopedVar("mulligan_call")
_turn: ScopedVar[TurnId] = ScopedVar("mulligan_turn")


def current_call() -> Call | None:
    """The innermost open call of this context, or None."""
    call = _call.now()
    return call if call is not None and call.is_open_here else None


def current_turn() -> TurnId | None:
    return _turn.now()


making = _call.block
"""Enters a block that runs as part of the call."""

during = _turn.block
"""Enters a block that runs as part of the turn."""
