"""Copies of roots: forks with their own files, and the copies in which sessions write to sandboxed roots.

A fork is a child session. With its own files it works in a copy of the parent's root. A sandboxed root gets a copy at a
session's first write. In both, the session makes ordinary calls in a root of its own, and the original stays untouched
until a user merges. A merge is one call in the original, so it can be undone.

The manifest of a copy has, for every path, stamps of the original and of the copy. A path changed if its stamp in the
copy differs (`CopyMerge`). If the original changed too, a merge takes as its base what the copy held when it was last
merged, else what the path was when the copy was made, from the history of either side.

Copies are beside the store, in no workspace, unless the caller names a folder. The name of a copy includes its maker's
process, so that another process can remove what a dead one left unfinished.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

from mulligan.files.copy import Copied, Skipped, copy_tree, remove_copy, removed_unless_done, stamp
from mulligan.files.disk import HostDisk, Image
from mulligan.files.replace import TargetEntry
from mulligan.history.call import current_turn
from mulligan.history.cause import ForkedFiles, MergedCopy
from mulligan.history.log import calls_of
from mulligan.history.merge import Conflict, MergedEntry, TakeTheirs, WriteMerged, merge_entry
from mulligan.history.multi_root import CurrentTree, contains, content_for, plan_as_shown
from mulligan.history.open_root import OpenRoot
from mulligan.history.partial_undo import undone_parts_of
from mulligan.history.plan import OnConflict, PlannedChange, Planner, RestorePlan, check_choice, checked_digest
from mulligan.history.rewind import Point, archive_of, find_point
from mulligan.history.tables import BRANCHES, CHANGES, TURNS, BranchRow, CallRow, RootRow, change_from_row, changes_of
from mulligan.history.undo import MayWrite, UndoResult, check_moves
from mulligan.history.undo_log import Intent
from mulligan.session.lifecycle import DELETED, check_continuable, fork_in, fresh_id, set_facts_in
from mulligan.session.roots import ANCHOR, SANDBOXED_ROOTS, SandboxedRootRow, anchor_in
from mulligan.session.state.slice_rows import copy_slices_in
from mulligan.session.subscribers import CLOSED_EVENT
from mulligan.session.tables import length, session_journal
from mulligan.session.transcript_log import event_body, length_of
from mulligan.store.blob_files import sync_file_system
from mulligan.store.protocol import Tx, Value
from mulligan.values.canonical import decode, encode
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.entries import (
    ABSENT,
    Change,
    Content,
    Entry,
    FileEntry,
    entry_from_json,
    entry_to_json,
    same_state,
)
from mulligan.values.errors import MulliganError, Refused, fault, fault_of_os_error
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import OwnerId, SessionId, TurnId
from mulligan.values.paths import RepoPath, ancestors_of, from_wire, path_bytes, path_from_bytes, to_wire

Gap: TypeAlias = dict[str, str]

_MERGES: Mapping[str, Value] = MappingProxyType({"tool": "merge", "status": "committed", "undone_by": None})
_SOURCE_STAMP, _COPY_STAMP, _FIRST_ENTRY = 2, 3, 4
"""Fields of a row of a manifest. A row has a first entry if the copy began with another state than the original's."""


@fast_dataclass(slots=True, frozen=True)
class ForkResult:
    """A child session.

    `directory`: the folder of its own files. `coverage`: paths that the copy could not reproduce.
    """

    session: str
    parent: str
    directory: str | None = None
    coverage: tuple[Gap, ...] = ()


@fast_dataclass(slots=True, frozen=True)
class ForkPlan:
    """What a fork would begin with: how many messages, and how its files would differ from those of now."""

    messages: int
    files: RestorePlan


def plan_fork(open_root: OpenRoot, parent: SessionId, *, at: str | int | None = None) -> ForkPlan:
    """Changes nothing. Raises as `fork_files` does for a point that cannot be forked at."""
    point = _fork_point(open_root, parent, at)
    if point is None:
        with open_root.ledger.store.read() as tx:
            return ForkPlan(length_of(tx, parent), RestorePlan((), ()))
    source = _primary_root(open_root, parent)
    return ForkPlan(length(point.kept), _plan_as_of(source, source, point))


def fork(
    open_root: OpenRoot, parent: SessionId, *, at: str | int | None = None, child: str | None = None
) -> ForkResult:
    """Make a child session that shares the files and has the parent's messages: all of them, or up to a point.

    A message is included itself, a call is not. A point inside a tool exchange is `not_continuable`.
    """
    open_root.ledger.session(parent, open_root.root)
    point = _fork_point(open_root, parent, at)
    session = _open_child(open_root, parent, open_root.root.id, child=child, point=point)
    return ForkResult(session, parent)


def fork_files(
    open_root: OpenRoot,
    parent: SessionId,
    directory: str | None = None,
    *,
    at: str | int | None = None,
    child: str | None = None,
) -> ForkResult:
    """Make a child session with a copy of every file and the parent's messages, as of now or of a point.

    The copy goes to `directory`, or to a new one beside the store.
    """
    with open_root.ledger.store.read() as tx:
        # Refuse a used id before anything is copied.
        fresh_id(tx, archive_of(open_root.ledger), child)
    open_root.ledger.session(parent, open_root.root)
    point = _fork_point(open_root, parent, at)
    target = _new_copy_path(open_root, "forks") if directory is None else os.fsencode(os.path.abspath(directory))
    source = _primary_root(open_root, parent)
    # The copy comes first and the session last, so a failed copy leaves nothing in the store.
    try:
        copied = list(copy_tree(source.disk.root.path, target))
    except OSError as error:
        raise fault_of_os_error(error, f"Copying the files to {os.fsdecode(target)}") from error
    gaps: list[Gap] = []
    with (
        removed_unless_done(target),
        closing(HostDisk(target)) as disk,
        closing(OpenRoot(open_root.ledger, disk)) as there,
    ):
        session = _open_child(open_root, parent, there.root.id, child=child, point=point, copy=there.disk.root.path)
        with _closed_unless_done(open_root, session):
            manifest = {path_from_bytes(one.path): _manifest_row(one) for one in copied if isinstance(one, Copied)}
            if point is not None:
                changed, gaps = _rewind_copy(source, there, session, point=point, at=str(at))
                manifest |= {one.path: _rewound_row(target, one) for one in changed}
            _sync_copy(open_root, target)
            body = {
                "session": session,
                "parent": parent,
                "source": source.root.id,
                "root": there.root.id,
                "directory": "/" + to_wire(path_from_bytes(target.lstrip(b"/"))),
            }
            ledger, blob = open_root.ledger, open_root.ledger.blobs.store(encode(list(manifest.values())))
            with ledger.store.write() as tx:
                body["manifest"] = blob
                ledger.journal.append(tx, session_journal(session), "branch.opened", body, at=ledger.now(), refs=[blob])
    skipped = [
        {"path": to_wire(path_from_bytes(one.path)), "reason": one.reason} for one in copied if isinstance(one, Skipped)
    ]
    return ForkResult(session, parent, os.fsdecode(target), (*skipped, *gaps))


@contextmanager
def _closed_unless_done(open_root: OpenRoot, child: SessionId) -> Iterator[None]:
    """If the fork fails, close the child session as deleted, so that no list shows it."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            ledger = open_root.ledger
            event = event_body(CLOSED_EVENT, {"reason": "fork_failed", "status": DELETED}, visibility="public")
            # The store may be what failed; then the caller sees its first error.
            with suppress(MulliganError), ledger.store.write() as tx:
                ledger.journal.append(tx, session_journal(child), "session.closed", {"event": event}, at=ledger.now())


def _manifest_row(one: Copied) -> list[Any]:
    return [to_wire(path_from_bytes(one.path)), one.mode, one.source_stamp, one.copy_stamp]


def _rewound_row(directory: bytes, change: Change) -> list[Any]:
    """A path at which the copy never was like the original: the row has what the copy began with there."""
    shown, now = to_wire(change.path), stamp(os.path.join(directory, path_bytes(change.path)))
    return [shown, 0, "", now, entry_to_json(change.after)]


def _fork_point(open_root: OpenRoot, parent: SessionId, at: str | int | None) -> Point | None:
    if at is None:
        return None
    # Before a call, but after a message.
    point = find_point(open_root, at, parent, side="before")
    if point.call is None and isinstance(at, str):
        point = find_point(open_root, at, parent, side="after")
    with open_root.ledger.store.read() as tx:
        check_continuable(tx, archive_of(open_root.ledger), point.kept, point.rest)
    return point


def _primary_root(open_root: OpenRoot, session: SessionId) -> OpenRoot:
    """The open root of a session's primary root, which may be another one than it was opened on."""
    with open_root.ledger.store.read() as tx:
        anchor = anchor_in(tx, session)
    if anchor is None or os.fsencode(anchor.primary) == open_root.disk.root.path:
        return open_root
    try:
        return open_root.opener.elsewhere(os.fsencode(anchor.primary), record=True)
    except OSError as error:
        raise fault_of_os_error(error, f"Opening {anchor.primary}") from error


def _open_child(
    open_root: OpenRoot,
    parent: SessionId,
    root: str,
    *,
    child: str | None,
    point: Point | None,
    copy: bytes | None = None,
) -> SessionId:
    """`copy`: where the child works instead of in its parent's primary root."""
    archive = archive_of(open_root.ledger)
    with open_root.ledger.store.write() as tx:
        session, anchor = fresh_id(tx, archive, child), anchor_in(tx, parent)
        kept = None if point is None else point.kept
        primary = os.fsdecode(open_root.disk.root.path) if anchor is None else anchor.primary
        copied = None if copy is None else (primary, os.fsdecode(copy))
        fork_in(tx, archive, parent, session, root=root, kept=kept, copied=copied)
        if copy is not None and anchor is not None:
            set_facts_in(tx, archive, session, {ANCHOR: anchor.copied_to(os.fsdecode(copy)).to_json()})
        later = [] if point is None else [row.id for row in point.later]
        since = None if point is None or point.session != parent else point.since
        copy_slices_in(
            tx, archive.journal, parent, session, at=open_root.ledger.now(), without=later, journal_range=since
        )
    return session


def _rewind_copy(
    open_root: OpenRoot, there: OpenRoot, session: SessionId, *, point: Point, at: str
) -> tuple[list[Change], list[Gap]]:
    """Undo in the copy what the parent did to the original after a point, as a rewind would.

    Returns the changes, and the paths that differ from the point.
    """
    plan = _plan_as_of(open_root, there, point)
    if plan.stops("merge"):
        raise fault("io_error", "Mulligan cannot restore the files of that point, because it cannot read some of them.")
    gaps = _gaps(open_root.root, _newest_change_first(point), plan)
    call = _apply_moves(there, session, plan.moves, ForkedFiles(at), coverage=gaps)
    with open_root.ledger.store.read() as tx:
        return changes_of(tx, call), gaps


def _plan_as_of(open_root: OpenRoot, there: OpenRoot, point: Point) -> RestorePlan:
    """How the files of `there`, the root or a copy of it, become those of a point."""
    now, later = CurrentTree(there), _newest_change_first(point)
    with open_root.ledger.store.read() as tx:
        layers = [sorted(_changes_here(tx, open_root.root, one), key=lambda c: path_bytes(c.path)) for one in later]
        planner = Planner(now.entry, now.read, there.children, has=lambda digest: now.has(tx, digest))
        return planner.plan(layers)


def _newest_change_first(point: Point) -> list[CallRow]:
    """The calls after a point. There are undone calls and their undos; in this order, they cancel each other out."""
    return sorted(point.later, key=lambda row: row.wseq or 0, reverse=True)


def _gaps(root: RootRow, calls: Sequence[CallRow], plan: RestorePlan) -> list[Gap]:
    """The gaps of the calls and the paths that the plan leaves, each once."""
    missed = [gap for call in calls if call.root == root.id for gap in decode(call.coverage)]
    left = [{"path": to_wire(one.path), "reason": one.reason} for one in plan.outcomes if one.reason is not None]
    # An ambiguous change is undone like any other here, so the path is as it was.
    return list({tuple(gap.items()): gap for gap in (*missed, *left) if gap["reason"] != "ambiguous"}.values())


def _changes_here(tx: Tx, root: RootRow, call: CallRow) -> list[Change]:
    """What a call changed in this root, even if it worked through another root that contains this one."""
    if call.root == root.id:
        return changes_of(tx, call.id)
    below = len(root.place_of(b".")) + 1
    rows = [row for row in tx.select(CHANGES, {"call": call.id}) if contains(root, row.place)]
    return [replace(change_from_row(row), path=path_from_bytes(row.place[below:])) for row in rows]


def branches(open_root: OpenRoot) -> list[BranchRow]:
    """The forks of this root that have files of their own, oldest first."""
    with open_root.ledger.store.read() as tx:
        return sorted(tx.select(BRANCHES, {"source": open_root.root.id}), key=lambda row: row.created_at)


def branch_of(open_root: OpenRoot, session: str) -> BranchRow:
    """Raises `unknown_session` if the session has no files of its own, or no longer has them."""
    with open_root.ledger.store.read() as tx:
        row = tx.get(BRANCHES, session)
    if row is None or row.status == "dropped":
        raise fault("unknown_session", f"{session!r} is not a fork with files of its own; see `mulligan branches`.")
    return row


@fast_dataclass(slots=True)
class CopyMerge:
    """Merges a copy into its original, path by path, as a call of `session`. `manifest`: how the copy began."""

    open_root: OpenRoot
    there: OpenRoot
    session: SessionId
    manifest: str
    on_conflict: OnConflict
    _manifest: dict[RepoPath, list[Any]] = field(default_factory=dict)
    _merged_before: dict[RepoPath, Entry] = field(default_factory=dict)
    _mixed: dict[str, Any] = field(default_factory=dict)
    _contents: dict[RepoPath, Content | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("on_conflict", self.on_conflict, get_args(OnConflict))
        _check_exist(self.open_root, self.there)
        rows = decode(self.open_root.ledger.blobs.read(parse_digest(self.manifest)))
        self._manifest = {from_wire(one[0]): one for one in rows}
        self._merged_before = self._find_merged_before()

    def apply(
        self,
        *,
        fork: str | None = None,
        root: str | None = None,
        dry_run: bool,
        may_write: MayWrite | None,
        if_match: str | None = None,
    ) -> UndoResult:
        """Merge in one call that can be undone. There is no call if there is nothing to merge, or a conflict stops."""
        plan = self.plan()
        if self.on_conflict == "refuse" and not plan.ok:
            plan = plan.untouched()
        check_moves(self.open_root, plan, may_write)
        result = UndoResult(plan.ok, None, plan.outcomes, plan.overwrote_external, plan=plan)
        if dry_run or if_match is not None:
            digest = checked_digest(result, self.open_root.entry, if_match)
            result = replace(result, digest=digest if dry_run else None)
        if plan.moves and not dry_run:
            # A later merge reads this: which copy, and what the copy held where both sides were mixed.
            cause = MergedCopy(self.there.root.id, fork, root, self._mixed)
            result = replace(result, call_id=_apply_moves(self.open_root, self.session, plan.moves, cause))
        return result

    def plan(self) -> RestorePlan:
        now, again = CurrentTree(self.open_root), self.there.entry
        planner = Planner(now.entry, now.read, self.open_root.children, self.on_conflict, again=again)
        special = [path for path in self._changed() if not self._take(planner, path)]
        plan = planner.plan((), not_captured=special)
        moves = [
            move if move.content is not None else replace(move, content=self._contents.get(move.path))
            for move in plan.moves
        ]
        return replace(plan, moves=tuple(moves))

    def _changed(self) -> list[RepoPath]:
        """The paths of the copy that are not as they were copied, without git's own files."""
        found = {path for path, row in self._manifest.items() if stamp(self._file(path)) != row[_COPY_STAMP]}
        found |= {path for path in _walk(self.there.disk.root.path) if path not in self._manifest}
        found |= self._merged_before.keys()
        # Where a folder became a symlink, a stamp below it would be that of another file.
        links = {path for path in found if os.path.islink(self._file(path))}
        found |= {path for path in self._manifest if not links.isdisjoint(ancestors_of(path))}
        return sorted((path for path in found if ".git" not in path.split("/")), key=path_bytes)

    def _file(self, path: RepoPath) -> bytes:
        return os.path.join(self.there.disk.root.path, path_bytes(path))

    def _take(self, planner: Planner, path: RepoPath) -> bool:
        """Plan one path. False for a device, FIFO or socket on either side."""
        ours, theirs = self.open_root.image(path), self.there.image(path)
        if theirs.special or ours.special:
            return False
        merged = self._merged(path, ours, theirs)
        # Bytes that the store may not have cannot be rescued.
        may_overwrite = self.on_conflict == "overwrite" and ours.entry.withheld is None
        overwrites = isinstance(merged, Conflict) and may_overwrite
        if overwrites:
            merged = TakeTheirs(theirs.entry)
        # A later merge needs what the copy held here, which the merged file does not show.
        if isinstance(merged, WriteMerged):
            self._mixed[to_wire(path)] = entry_to_json(theirs.entry)
        if isinstance(merged, TakeTheirs | WriteMerged):
            self._contents[path] = _content_of(merged.entry, ours, theirs)
        planner.take(path, ours.entry, merged, overwrites=overwrites)
        return True

    def _merged(self, path: RepoPath, ours: Image, theirs: Image) -> MergedEntry:
        def read(digest: Digest) -> bytes:
            known = [i for i in (ours, theirs) if isinstance(i.entry, FileEntry) and i.entry.digest == digest]
            return known[0].data if known else self.open_root.ledger.blobs.read(digest)

        # The project's file of one side may name a path that the other side captures.
        if self.open_root.disk.capture.withheld(path) != self.there.disk.capture.withheld(path):
            return Conflict("not_captured")
        base = ours.entry if same_state(ours.entry, theirs.entry) else self._base(path, ours)
        try:
            return Conflict("not_captured") if base is None else merge_entry(base, ours.entry, theirs.entry, read)
        except MulliganError:
            # The base is recorded, but its bytes were evicted.
            return Conflict("not_captured")

    def _base(self, path: RepoPath, ours: Image) -> Entry | None:
        """The base of a merge: what both sides had at the last merge of the path, or when the copy was made.

        None if unknown.
        """
        if path in self._merged_before:
            return self._merged_before[path]
        row = self._manifest.get(path)
        if row is None:
            return ABSENT
        if len(row) > _FIRST_ENTRY:
            return entry_from_json(row[_FIRST_ENTRY])
        original = os.path.join(self.open_root.disk.root.path, path_bytes(path))
        if stamp(original) == row[_SOURCE_STAMP]:
            return ours.entry
        # Ids sort by time, so calls with a greater id than the copy's root came later. In the copy all did.
        first = self._first_before(self.there, path, since="")
        return first or self._first_before(self.open_root, path, since=self.there.root.id)

    def _find_merged_before(self) -> dict[RepoPath, Entry]:
        """What the copy held at each path that an earlier merge wrote, if that merge is not undone."""
        found: dict[RepoPath, Entry] = {}
        blobs, copy = self.open_root.ledger.blobs, self.there.root.id
        with self.open_root.ledger.store.read() as tx:
            rows = calls_of(tx, self.open_root, self.session, after=copy, only=_MERGES)
            merges = [row for row in rows if isinstance(cause := row.why, MergedCopy) and cause.copy == copy]
            undone = undone_parts_of(tx, merges)
            for row in reversed(merges):
                cause, back = row.why, undone.places.get(row.id, frozenset())
                mixed = cause.mixed if isinstance(cause, MergedCopy) else {}
                for one in tx.select(CHANGES, {"call": row.id}):
                    change = change_from_row(one)
                    # If the merge mixed both sides, it wrote something that the copy never held.
                    theirs = mixed.get(to_wire(change.path))
                    entry = change.after if theirs is None else entry_from_json(theirs)
                    if one.place not in back and (not isinstance(entry, FileEntry) or blobs.has(tx, entry.digest)):
                        found[change.path] = entry
        return found

    def _first_before(self, open_root: OpenRoot, path: RepoPath, *, since: str) -> Entry | None:
        """What the first recorded change of the path in this root replaced, by a call with a greater id."""
        with open_root.ledger.store.read() as tx:
            rows = tx.select(CHANGES, {"place": open_root.disk.root.place_of(path)}, order=("wseq",))
        return next((change_from_row(row).before for row in rows if row.call > since), None)


def _check_exist(*open_roots: OpenRoot) -> None:
    """Refuse a root that was deleted while it is open: it would look as if every file in it had been deleted."""
    for open_root in open_roots:
        if not os.path.isdir(open_root.disk.root.path):
            shown = os.fsdecode(open_root.disk.root.path)
            raise fault("unknown_root", f"{shown} is gone, so there is nothing to merge; `mulligan drop` ends a fork.")


def _content_of(entry: Entry, *images: Image) -> Content | None:
    """The bytes of a file entry that one of the images holds."""
    wanted = entry.digest if isinstance(entry, FileEntry) else None
    return next((i.any_content for i in images if isinstance(i.entry, FileEntry) and i.entry.digest == wanted), None)


def _walk(directory: bytes) -> Iterator[RepoPath]:
    for folder, names, files in os.walk(directory):
        names[:] = [name for name in names if name != b".git"]
        below = os.path.relpath(folder, directory)
        for name in [*names, *files]:
            yield path_from_bytes(name if below == b"." else os.path.join(below, name))


def merge_branch(
    open_root: OpenRoot,
    session: str,
    *,
    on_conflict: OnConflict = "merge",
    dry_run: bool = False,
    may_write: MayWrite | None = None,
    if_match: str | None = None,
) -> UndoResult:
    """Merge a fork's changes into the files that it was forked from, as one call that can be undone.

    With `if_match`, it does so only if the plan has this digest.
    """
    branch = branch_of(open_root, session)
    with closing(HostDisk(branch.directory)) as disk, closing(OpenRoot(open_root.ledger, disk)) as there:
        merge = CopyMerge(open_root.at(branch.source), there, SessionId(branch.parent), branch.manifest, on_conflict)
        result = merge.apply(fork=session, dry_run=dry_run, may_write=may_write, if_match=if_match)
    if result.ok and not dry_run:
        _end_branch(open_root, branch, "merged")
    return result


def _apply_moves(
    open_root: OpenRoot,
    session: SessionId,
    moves: Sequence[PlannedChange],
    cause: ForkedFiles | MergedCopy,
    *,
    coverage: Sequence[Gap] = (),
) -> str:
    """One call that makes all moves, or none. Returns its id."""
    call = open_root.call(session, turn=_turn_of(open_root, session), tool=cause.verb, cause=cause)
    call.coverage += coverage
    try:
        with call:
            call.change([Intent(move.path, _if_unchanged(open_root, move)) for move in moves])
    except Refused as refused:
        raise fault("path_busy", refused.message) from None
    return call.id


def _turn_of(open_root: OpenRoot, session: SessionId) -> TurnId | None:
    """The turn that runs in this thread, if it belongs to the session."""
    turn = current_turn()
    with open_root.ledger.store.read() as tx:
        return turn if turn is not None and tx.has(TURNS, session, turn) else None


def _if_unchanged(open_root: OpenRoot, move: PlannedChange) -> Callable[[Image], TargetEntry]:
    def plan(image: Image) -> TargetEntry:
        if image.special or not same_state(image.entry, move.now):
            raise Refused("conflict", "path_busy", f"{move.path} changed while it was being merged; try again.")
        return TargetEntry(move.target, content_for(open_root, move, image))

    return plan


def drop_branch(open_root: OpenRoot, session: str) -> str:
    """Delete a fork's files. The history of its calls stays in the store."""
    branch = branch_of(open_root, session)
    try:
        remove_copy(branch.directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        shown = os.fsdecode(branch.directory)
        raise fault("io_error", f"{shown} could not be deleted: {error.strerror}.") from error
    _end_branch(open_root, branch, "dropped")
    return os.fsdecode(branch.directory)


def _end_branch(open_root: OpenRoot, branch: BranchRow, status: str) -> None:
    with open_root.ledger.store.write() as tx:
        journal = session_journal(SessionId(branch.session))
        body = {"session": branch.session, "status": status}
        open_root.ledger.journal.append(tx, journal, "branch.ended", body, at=open_root.ledger.now())


# Copies of sandboxed roots.


def sandboxed_copy_of(tx: Tx, session: SessionId, path: str) -> SandboxedRootRow | None:
    return tx.get(SANDBOXED_ROOTS, session, path)


def copy_sandboxed_root(open_root: OpenRoot, session: SessionId, path: str) -> SandboxedRootRow:
    """The copy of a sandboxed root in which a session writes; makes it at the first write."""
    with open_root.ledger.store.read() as tx:
        known = sandboxed_copy_of(tx, session, path)
    if known is not None:
        return known
    target = _new_copy_path(open_root, "aside")
    rows = [_manifest_row(one) for one in copy_tree(os.fsencode(path), target) if isinstance(one, Copied)]
    _sync_copy(open_root, target)
    manifest = open_root.ledger.blobs.store(encode(rows))
    body = {
        "session": session,
        "path": path,
        "directory": os.fsdecode(target),
        "source": open_root.elsewhere(os.fsencode(path), record=True).root.id,
        "root": open_root.elsewhere(target, record=True).root.id,
        "manifest": manifest,
    }
    ledger = open_root.ledger
    with ledger.store.write() as tx:
        if sandboxed_copy_of(tx, session, path) is None:
            journal = session_journal(session)
            ledger.journal.append(tx, journal, "root.set_aside", body, at=ledger.now(), refs=[manifest])
        row = sandboxed_copy_of(tx, session, path)
    assert row is not None, "the record was just folded into the table"
    if row.directory != body["directory"]:
        # Another process recorded a copy first, and a session has only one.
        remove_copy(target)
    return row


def merge_sandboxed_root(
    open_root: OpenRoot,
    session: SessionId,
    path: str,
    *,
    on_conflict: OnConflict = "merge",
    dry_run: bool = False,
    may_write: MayWrite | None = None,
) -> UndoResult:
    """Merge the copy of a sandboxed root into the root itself, as one call. Without conflicts, the copy then goes."""
    row = _existing_copy(open_root, session, path)
    source = open_root.at(row.source)
    merge = CopyMerge(source, open_root.at(row.root), session, row.manifest, on_conflict)
    result = merge.apply(root=path, dry_run=dry_run, may_write=may_write)
    assert result.plan is not None, "a merge has a plan"
    shown = plan_as_shown(open_root, source, result.plan)
    if result.ok and not dry_run:
        _end_copy(open_root, row, "merged")
    return replace(result, outcomes=shown.outcomes, overwrote_external=shown.overwrote_external, plan=shown)


def drop_sandboxed_root(open_root: OpenRoot, session: SessionId, path: str) -> None:
    """Delete the copy of a sandboxed root. The history of the calls in it stays in the store."""
    _end_copy(open_root, _existing_copy(open_root, session, path), "dropped")


def _existing_copy(open_root: OpenRoot, session: SessionId, path: str) -> SandboxedRootRow:
    with open_root.ledger.store.read() as tx:
        row = sandboxed_copy_of(tx, session, path)
    if row is None:
        raise fault("unknown_root", f"Session {session!r} has written nothing in the sandboxed root {path}.", path=path)
    return row


def _end_copy(open_root: OpenRoot, row: SandboxedRootRow, status: str) -> None:
    ledger = open_root.ledger
    with ledger.store.write() as tx:
        body = {"session": row.session, "path": row.path, "status": status}
        journal = session_journal(SessionId(row.session))
        ledger.journal.append(tx, journal, "root.aside_ended", body, at=ledger.now())
    # The record comes first: a copy that the store does not know does no harm, and is removed some day.
    with suppress(FileNotFoundError):
        remove_copy(os.fsencode(row.directory))


# Where copies are.


def _new_copy_path(open_root: OpenRoot, kind: str) -> bytes:
    """A folder that does not exist yet: beside the store, or in the temporary folder if the store is in memory."""
    home, ledger = open_root.ledger.store.directory, open_root.ledger
    if home is None:
        import tempfile

        folder = tempfile.mkdtemp(prefix=f"mulligan-{kind}-")
    else:
        folder = os.path.join(home, kind)
        if os.path.isdir(folder):
            _remove_unfinished(open_root, folder)
    return os.fsencode(os.path.join(folder, f"{ledger.store.owner()}-{ledger.ids.new()}"))


def _sync_copy(open_root: OpenRoot, copy: bytes) -> None:
    """In `power` mode, a whole copy is on its disk before the store names it."""
    if open_root.ledger.store.durability != "power":
        return
    try:
        handle = os.open(copy, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One sync of the file system is cheaper than one of each file.
            sync_file_system(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise fault_of_os_error(error, f"Syncing the copy in {os.fsdecode(copy)}") from error


def _remove_unfinished(open_root: OpenRoot, folder: str) -> None:
    """Remove copies that the store does not know and whose makers are dead."""
    store = open_root.ledger.store
    with store.read() as tx:
        known = {os.path.basename(row.directory) for row in tx.select(SANDBOXED_ROOTS)}
        known |= {os.path.basename(os.fsdecode(row.directory)) for row in tx.select(BRANCHES)}
    for name in os.listdir(folder):
        maker = name.partition("-")[0]
        if name not in known and maker.isdigit() and store.is_alive(OwnerId(int(maker))) is False:
            with suppress(FileNotFoundError):
                remove_copy(os.fsencode(os.path.join(folder, name)))
