"""What an open call has done so far, so that all of it, or one block of it, can be rolled back.

`CallState` is what the parts of one open call share: where it works, the paths that it has touched, and its log of
changes. `FileChanges` and `CommandChanges` add to it; `Call` publishes it or rolls it back.

A block is a part of a call that can be rolled back alone. Blocks are nested, and two may be open side by side, in two
tasks or threads: a change belongs to the innermost block of the thread or task that makes it.

An intent is what an effect will do to one path; an `IntentStep` carries it out.

`with_moves` finds which changes of a call are moves, judged by all of them together once they are known:

1. A move is reported only if the file has left one path and is at another when the call is over. If the file went on to
   a third path, the move is from its first path to its last.
2. A move that one of our tools names counts as long as its source is gone, whatever happened to the file since.
3. A command names no moves: a file that left one path and came to another with the same bytes was moved. If several
   files have the same bytes, or none have any, that is no proof of a move, so none is reported.
4. A removed folder was moved to the new folder to which all those of its files went that are known to have moved.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

from mulligan.files.capture_rules import NO_RULES, CaptureRules
from mulligan.files.disk import DRAFT_PREFIX, NOTHING, Disk, Image
from mulligan.files.replace import TargetEntry
from mulligan.files.resolve import ResolvedPath, Spots
from mulligan.history.abort import Trace, drafts_of, put_back, source_among, sync_paths
from mulligan.history.ledger import Facts, Ledger, intending, touch_row
from mulligan.history.permissions import LostMetadata
from mulligan.history.tables import PreimageSpool, RootRow, TouchRow
from mulligan.store.blobs import SMALL_BYTES, Blobs, Prepared
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.protocol import Claim, Tx
from mulligan.values import scoped_var
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import ABSENT, Absent, Change, DirEntry, Entry, FileEntry, same_content, same_state
from mulligan.values.errors import InternalError, MulliganError, Refused, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, join, name_of, parent_of, path_bytes, to_wire
from mulligan.values.scoped_var import block_exit


@dataclass(slots=True, weakref_slot=True, eq=False)
class Block:
    _outer: Block | None = None
    _entered: scoped_var.ScopedBlock[Block] | None = None
    exit_held: scoped_var.Holder | None = None

    def __enter__(self) -> None:
        held = self.exit_held
        self._outer = _blocks.now()
        self._entered = _blocks.block(self)
        self._entered.enter(held if held is not None and held() is not None else None)

    def enter(self, holder: scoped_var.Holder | None) -> None:
        """Enter the block without `with`; see `scoped_var.ScopedBlock.enter`."""
        self._outer = _blocks.now()
        self._entered = _blocks.block(self)
        self._entered.enter(holder)

    def end(self) -> None:
        """End the block: later changes do not belong to it. It can be called again."""
        if self._entered is not None:
            self._entered.end()

    def again(self) -> scoped_var.ScopedBlock[Block]:
        """Enter the block in another thread, so that the thread's changes belong to it too."""
        return _blocks.block(self)

    @property
    def is_around(self) -> bool:
        return self.holds(_blocks.now())

    def holds(self, block: Block | None) -> bool:
        while block is not None and block is not self:
            block = block._outer
        return block is self


_blocks: scoped_var.ScopedVar[Block] = scoped_var.ScopedVar("mulligan_block")
_VOID = Block()
"""The block of changes whose rollback failed; every later rollback tries them again."""


@fast_dataclass(slots=True)
class Touched:
    """A path that this call has changed: its entry before the call, and the last one that the call knows.

    `unsure`: a change is under way, or it failed and may be there in part. `seen`: an image of `after` as it was read
    there, without its bytes. `bare`: the store does not have the bytes of `after`.
    """

    row: TouchRow
    path: RepoPath
    before: Entry
    after: Entry
    acted: bool = False
    unsure: bool = False
    origin: RepoPath | None = None
    seen: Image | None = None
    bare: bool = False

    def take_seen(self) -> Image | None:
        """The image, once, and only if it is of `after`: a second rollback of the path reads the disk again."""
        seen, self.seen = self.seen, None
        return seen if seen is not None and seen.entry is self.after and not self.unsure else None

    def becomes(self, after: Entry, *, bare: bool = False) -> None:
        """Set what the path holds now, for sure."""
        self.after, self.unsure = after, False
        # The store needs no bytes of a folder or a link, nor of what it has as the preimage already.
        has_bytes = isinstance(after, FileEntry) and after.withheld is None
        self.bare = bare and has_bytes and not same_content(self.before, after)
        # A path that is gone is no longer the target of a move.
        if isinstance(after, Absent):
            self.origin = None


@fast_dataclass(slots=True)
class LoggedChange:
    """One change of a path; `was` is what the path held before."""

    path: RepoPath
    was: Entry
    block: Block | None


@fast_dataclass(slots=True, frozen=True)
class Undoing:
    """The plan for rolling a block back: what paths shall hold again, last changed first.

    `overtaken` are paths that were changed outside the block since, which stay as they are. `rest` is the log after the
    rollback.
    """

    before: dict[RepoPath, Entry]
    overtaken: set[RepoPath]
    rest: list[LoggedChange]


@fast_dataclass(slots=True)
class ChangeLog:
    _all: list[LoggedChange] = field(default_factory=list)

    def add(self, path: RepoPath, was: Entry) -> None:
        self._all.append(LoggedChange(path, was, _blocks.now()))

    def drop_last(self) -> None:
        self._all.pop()

    def revise(self, path: RepoPath, revised: Callable[[Entry], Entry]) -> None:
        """Change what the log says that the path held before."""
        for logged in self._all:
            if logged.path == path:
                logged.was = revised(logged.was)

    def undoing(self, block: Block | None) -> Undoing:
        """The rollback of a block; None rolls back everything."""
        first: dict[RepoPath, Entry] = {}
        overtaken, rest = set[RepoPath](), list[LoggedChange]()
        for logged in self._all:
            if block is None or logged.block is _VOID or block.holds(logged.block):
                # The last change shall come first.
                first[logged.path] = first.pop(logged.path, logged.was)
                continue
            if logged.path in first:
                # Without the block, the next change would have found what the block found.
                logged = replace(logged, was=first.pop(logged.path))
                overtaken.add(logged.path)
            rest.append(logged)
        return Undoing(dict(reversed(first.items())), overtaken - first.keys(), rest)

    def leave(self, undoing: Undoing, *, but: Container[RepoPath]) -> None:
        """Remove the rolled-back changes from the log, except for paths that can only be restored after others."""
        left = [LoggedChange(path, was, _VOID) for path, was in undoing.before.items() if path in but]
        self._all = [*left, *undoing.rest]


Plan = Callable[[Image], TargetEntry]
"""A function from the present image of a path to its target. May raise Refused."""


@fast_dataclass(slots=True, frozen=True)
class Intent:
    """An effect's change of one path.

    `blind`: the plan does not depend on the present content, so it may replace any.
    """

    path: RepoPath
    plan: Plan
    blind: bool = False
    deep: bool = False
    origin: RepoPath | None = None
    lifts: bool = False
    """locked directories of ours are opened for the step, because the call that is undone could write there"""
    spares_writers: bool = False
    """a file that another process has open for writing is written in place, so that the process goes on writing into it
    """
    relinks: bool = False
    """the plan decides of which file the path becomes a name; else it stays a name of the present file"""


@fast_dataclass(slots=True)
class IntentStep:
    """An intent with the image that it was planned on."""

    intent: Intent
    image: Image
    wanted: TargetEntry
    bodies: list[Prepared]
    in_use: bool = False
    """another process has the file open for writing, so it must stay the same inode"""
    deep: bool = False
    """the step removes a directory with everything below it, so no other call may work there"""
    draft: bytes = b""
    """the name of the new file until it takes the path"""

    def passing(self) -> tuple[Entry, ...]:
        """The entries that the path holds in between: a directory and a file cannot be exchanged, so one is removed
        first.
        """
        entries = (self.image.entry, self.wanted.entry)
        changes_kind = isinstance(entries[0], DirEntry) != isinstance(entries[1], DirEntry)
        return (ABSENT, entries[1]) if changes_kind and ABSENT not in entries else entries[1:]


def as_it_is(image: Image) -> TargetEntry:
    """A plan for a path that a command will change: the present entry."""
    return TargetEntry(image.entry, image.any_content)


@fast_dataclass(slots=True)
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


class CallState:
    """What the parts of one open call share. `lock` lets one thread at a time work in the call.

    `parts` are the states of its changes in other roots, which are calls of their own.
    """

    def __init__(self, ledger: Ledger, disk: Disk, root: RootRow, facts: Facts) -> None:
        self.ledger = ledger
        self.disk = disk
        self.root = root
        self.facts = facts
        self.status: Literal["open", "committed", "aborted", "in_doubt"] = "open"
        self.account = Account(ledger.blobs)
        self.coverage: list[dict[str, str]] = []
        self.conflicts: list[RepoPath] = []
        self.parts: list[CallState] = []
        self.owner = ledger.store.owner()
        self.pid, self.thread = os.getpid(), threading.get_ident()
        self.has_begun = self.has_commands = self.race_window = False
        self.is_stuck = False
        """a rollback failed, so the call must not be committed"""
        self.claimed: set[Claim] = set()
        self.touched: dict[RepoPath, Touched] = {}
        self.log = ChangeLog()
        self.lost_metadata = LostMetadata()
        self.originals: dict[bytes, RepoPath] = {}
        """the copies of uncaptured paths beside them, by name"""
        self.not_captured: set[RepoPath] = set()
        self.shared: set[RepoPath] = set()
        """paths that another process wrote beside a command; a rollback leaves them"""
        self.unattributed: dict[tuple[RepoPath, Digest], int] = {}
        """the size of contents that may be from a command or from another process"""
        self.spool: PreimageSpool | None = None
        """further preimages of a command that changes many paths"""
        self.lock = fork_safe_lock()

    def check_open(self) -> None:
        if os.getpid() != self.pid:
            raise fault("call_not_open", f"Call {self.facts.id} belongs to the process that this one was forked from.")
        if self.status != "open":
            raise fault("call_not_open", f"Call {self.facts.id} is {self.status}.")

    def begin_in(self, tx: Tx) -> None:
        """Record the call in the caller's transaction. The caller sets `has_begun` after the commit."""
        self.check_open()
        if self.has_begun:
            self.ledger.check_ours(tx, self.facts.id, self.owner)
        else:
            self.ledger.begin(tx, self.facts, self.owner)

    def draft(self, row: TouchRow) -> bytes:
        """The name of the path's draft. It names the call and the path, so that recovery knows whose draft it is."""
        return DRAFT_PREFIX + f"{self.facts.id[-12:]}-{row.ordinal}".encode("ascii")

    # What paths hold.

    def resolved(self, path: RepoPath) -> ResolvedPath | nullcontext[None]:
        """The resolved path, or None if its directory is missing, or is now a link that leads elsewhere."""
        try:
            return self.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return nullcontext()

    def images(self, paths: Iterable[RepoPath], *, kept: bool = True) -> dict[RepoPath, Image]:
        """The images of real paths; without `kept`, the bytes of large files are not stored.

        An image is empty if the path's folder is missing or is a symlink.
        """
        images: dict[RepoPath, Image] = {}
        with Spots(self.disk) as spots:
            for path in paths:
                try:
                    images[path] = self.disk.image(spots.at(path), kept=kept)
                except (FileNotFoundError, NotADirectoryError, Refused):
                    images[path] = NOTHING
        return images

    def image(self, path: RepoPath) -> Image:
        """For a comparison: the bytes of a large file are not stored."""
        return self.images([path], kept=False)[path]

    def note_gaps(self, images: Mapping[RepoPath, Image]) -> None:
        """Note what cannot be captured in the coverage.

        These are devices, FIFOs and sockets, and files that another process wrote during every read: the stored bytes
        may mix several states.
        """
        self.coverage += [_gap(path, "special_file") for path, image in images.items() if image.special]
        unstable = [_gap(path, "unstable") for path, image in images.items() if image.unstable]
        self.coverage += [note for note in unstable if note not in self.coverage]

    def store_spooled(self) -> None:
        """Store what is in the spool. The file stays until the call has ended, because it holds claims."""
        if self.spool is not None:
            self.ledger.store_preimages(self.spool.unstored())
            self.spool.set_stored()

    def close_spool(self) -> None:
        """After the call has ended."""
        if self.spool is not None:
            spool, self.spool = self.spool, None
            spool.close()

    # Changes that are already on the disk become the call's.

    def absorb(self, paths: Sequence[RepoPath], *, keep: bool = True) -> None:
        """Take what is at these paths now as changes of the call: what a finished command left there, for example.

        Without `keep`, the bytes are not stored, because the caller will roll the command back. If the store does not
        take the bytes, this raises, and the call cannot be committed.
        """
        with self.lock:
            try:
                if keep and self.spool is not None:
                    self.store_spooled()
                images = self.images(paths, kept=keep)
                if keep:
                    self.ledger.blobs.store_all(image.content for image in images.values() if image.content is not None)
            except MulliganError:
                # A full store must not keep the call from knowing the paths: abort has to roll them back.
                if keep:
                    self.absorb(paths, keep=False)
                raise
            self.note_gaps(images)
            for path, image in images.items():
                if not image.special:
                    touched = self.touched.get(path) or self.unannounced(path, ABSENT)
                    self.set_after(touched, image.entry, image.without_content(), bare=not keep)

    def set_after(self, touched: Touched, after: Entry, seen: Image | None, *, bare: bool) -> None:
        """Log a change that has happened. `bare`: the store does not have the bytes of `after`."""
        self.touched[touched.path] = touched
        self.log.add(touched.path, touched.after)
        touched.becomes(after, bare=bare)
        touched.acted, touched.seen = True, seen

    def unannounced(self, path: RepoPath, before: Entry) -> Touched:
        """A path that changed without an announcement."""
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=len(self.touched), before=before)
        return Touched(intending(row, before, self.draft(row), in_place=False), path, before, before)

    def note_lift(self, path: RepoPath, now: DirEntry, lifted: DirEntry) -> None:
        """Record that Mulligan opens a folder for a step, so that recovery knows the mode as ours."""
        touched = self.touched.get(path) or self.unannounced(path, now)
        row = intending(touched.row, lifted, self.draft(touched.row), in_place=False)
        # Durable before the mode changes, in case the process dies while the folder is open.
        if row != touched.row:
            with self.ledger.store.write() as tx:
                self.begin_in(tx)
                self.ledger.touch(tx, row, ())
            self.has_begun = True
        touched.row, self.touched[path] = row, touched

    # What the call has changed.

    def changes(self) -> list[Change]:
        """What this call has changed so far, in path order."""
        changes: list[Change] = []
        may_have_moved = self.has_commands
        # In byte order of the paths, so that records of the same changes have the same bytes.
        for path in sorted(self.touched, key=path_bytes):
            one = self.touched[path]
            if one.acted and not same_state(one.before, one.after):
                changes.append(Change(path, one.before, one.after, one.origin))
                may_have_moved |= one.origin is not None
        guessed, rules = self.has_commands, self.disk.capture
        return with_moves(changes, guessed=guessed, rules=rules) if may_have_moved else changes

    def lost_with(self, paths: Iterable[RepoPath]) -> list[dict[str, str]]:
        """Notes for metadata of these paths that is gone and that no undo operation can restore."""
        if not self.lost_metadata.had:
            return []
        # A folder that the call replaced took the names below it along; one note for the folder is enough.
        folders = {path for path, one in self.touched.items() if one.acted and isinstance(one.before, DirEntry)}
        return self.lost_metadata.lost(paths, folders, self.image)

    def sync(self) -> None:
        """Sync every file that this call wrote, even one with its old content, because it is another inode."""
        try:
            sync_paths(self.disk, [path for path, one in self.touched.items() if one.acted or one.unsure])
        except OSError as error:
            raise fault_of_os_error(error, f"Syncing what call {self.facts.id} changed") from error

    # Rolling back.

    def roll_back(self, block: Block | None) -> None:
        """Restore everything that a block changed; None: that the call changed.

        What another process changed since stays as it is.
        """
        with self.lock:
            undoing = self.log.undoing(block)
            no_space: InternalError | None = None
            try:
                self.store_spooled()
            except InternalError as error:
                if error.code != "no_space":
                    raise
                no_space = error
            if no_space is not None and not self.shared.isdisjoint(undoing.before):
                # They stay as they are, and only the spool has their earlier bytes.
                raise no_space
            spooled = None if no_space is None or self.spool is None else self.spool.contents()
            self._record_shared(reversed(undoing.before))
            earlier = {path: was for path, was in undoing.before.items() if path not in self.shared}
            try:
                report = put_back(self, [self._trace(*one) for one in earlier.items()], self.note_lift, spooled)
            except OSError as error:
                self.is_stuck = True
                words = (
                    f"Mulligan could not restore all files: {error.strerror}. It tries again when the store is opened."
                )
                raise fault("restore_failed", words, call=self.facts.id) from error
            for rescued in report.rescued:
                self.account.rescue(*rescued)
            self._rescue_unattributed(earlier)
            if no_space is not None and (report.rescued or report.conflicts):
                # Only the spool has the earlier bytes of these paths.
                raise no_space
            in_the_way = [*report.conflicts, *report.lost, *sorted(undoing.overtaken)]
            self.conflicts += [path for path in in_the_way if path not in self.conflicts]
            # Of the folders in conflict, those in which the call itself made later changes; of files, another process
            # did.
            full = {path for path in report.conflicts if isinstance(self.touched[path].after, DirEntry)}
            self.log.leave(undoing, but=full)
            self.not_captured.update(report.not_captured)
            for path in earlier.keys() - {*report.conflicts, *report.lost, *report.not_captured}:
                self.touched[path].becomes(earlier[path])

    def _record_shared(self, paths: Iterable[RepoPath]) -> None:
        """Record as external changes what a rollback leaves because another process wrote there too."""
        shared = [self.touched[path] for path in paths if path in self.shared]
        changes = [
            Change(one.path, one.before, one.after, one.origin)
            for one in shared
            if not same_state(one.before, one.after)
        ]
        if changes:
            with self.ledger.store.write() as tx:
                self.ledger.external(tx, self.root, changes)
        self.conflicts += [one.path for one in changes if one.path not in self.conflicts]

    def _rescue_unattributed(self, gone: Container[RepoPath]) -> None:
        """Name the bytes that another process may have written, and count them like other stored bytes."""
        found = {key: size for key, size in self.unattributed.items() if key[0] in gone}
        for path, digest in found:
            self.account.rescue(path, digest)
            del self.unattributed[path, digest]
        self.ledger.note_growth(self.facts.session, sum(found.values()))

    def _trace(self, path: RepoPath, before: Entry) -> Trace:
        touched = self.touched[path]
        in_place = bool(touched.row.in_place) and touched.unsure
        drafts, seen = drafts_of(touched.row), touched.take_seen()
        return Trace(path, before, drafts, in_place, touched.row.intended, touched.after, seen)


def _gap(path: RepoPath, reason: str) -> dict[str, str]:
    return {"path": to_wire(path), "reason": reason}


@fast_dataclass(slots=True, eq=False)
class Savepoint(Block):
    """A block of an open call and its parts that is rolled back if it raises. The call goes on."""

    _state: CallState = field(kw_only=True)

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if error is not None:
            self.put_back()

    def put_back(self) -> None:
        """Roll back the changes of the block. It can be called again."""
        # A forked child has a copy of the block; the files belong to the parent's call.
        if os.getpid() == self._state.pid:
            for state in (*self._state.parts, self._state):
                state.roll_back(self)


def with_moves(changes: Sequence[Change], *, guessed: bool, rules: CaptureRules = NO_RULES) -> list[Change]:
    """The same changes, each with the path it was moved from. `guessed`: a command may have moved any of them.

    If a tool named a source that the call itself had moved there, the first source counts. `rules` are those under
    which the entries were read.
    """
    gone = {change.path: change.before for change in changes if isinstance(change.after, Absent)}
    origins = {one.path: one.renamed_from for one in changes if one.renamed_from in gone and one.path not in gone}
    named = set(origins.values())
    left = _by_digest((was, path) for path, was in gone.items() if path not in named)
    came = _by_digest((one.after, one.path) for one in changes if _is_new(one) and one.path not in origins)
    asked = {change.path for change in changes if guessed or change.renamed_from is not None}
    found = {path: left[digest] for digest, path in came.items() if digest in left and path in asked} | origins
    never = {path: was for path, was in gone.items() if was.withheld == "never"}
    for change in filter(_is_new, changes if never else ()):
        origin = source_among(never, change.after, rules) if change.path in asked else None
        found |= {} if origin is None else {change.path: origin}
    if guessed and found:
        found = _folders(changes, found) | found
    # A command may change very many paths, and mostly moves none.
    if not found and not any(one.renamed_from for one in changes):
        return list(changes)
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
