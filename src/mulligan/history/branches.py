"""Forks with files of their own: made, listed, merged back, dropped.

A fork remembers, for every path, stamps of the original and of the copy. What the copy changed is what has another
stamp now; where the original has changed too, the two are merged over what the copy held when it was last brought in,
else over what the path was when the fork began, as either side's history recorded it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

from mulligan.history.beside_store import fresh_place, sync_copy
from mulligan.history.current import current_turn
from mulligan.history.desk import Desk
from mulligan.history.going_back import MayWrite, WayBack, check_moves
from mulligan.history.intents import Intent
from mulligan.history.leftovers import taken_of
from mulligan.history.log import calls_of, change_from_row, changes_of
from mulligan.history.merge import Conflict, MergedEntry, TakeTheirs, WriteMerged, merge_entry
from mulligan.history.plans import Move, OnConflict, Planner, RestorePlan, check_choice
from mulligan.history.points import Point, archive_of, find_point
from mulligan.history.present import Present, content_for
from mulligan.history.sites import holds
from mulligan.history.tables import BRANCHES, CHANGES, TURNS, BranchRow, CallRow, RootRow
from mulligan.session.facts import set_facts_in
from mulligan.session.lineage import fork_in, fresh_id
from mulligan.session.positions import check_continuable
from mulligan.session.roots import ANCHOR, anchor_in
from mulligan.session.slices_back import copy_slices_in
from mulligan.session.standing import DELETED
from mulligan.session.subscribers import CLOSED_EVENT
from mulligan.session.tables import session_journal
from mulligan.session.transcript import event_body
from mulligan.store.protocol import Tx
from mulligan.store.tables import Value
from mulligan.values.canonical import decode, encode
from mulligan.values.content import Content
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.entries import ABSENT, Change, Entry, FileEntry, entry_from_json, entry_to_json, same_state
from mulligan.values.faults import MulliganError, fault, fault_of_os_error
from mulligan.values.ids import SessionId, TurnId
from mulligan.values.paths import RepoPath, ancestors_of, from_wire, path_bytes, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.copies import Copied, Skipped, copy_tree, remove_copy, removed_unless_done, stamp
from mulligan.workspace.disk import HostDisk, Image
from mulligan.workspace.writing import Wanted

_STANDING_MERGES: Mapping[str, Value] = MappingProxyType({"tool": "merge", "status": "committed", "undone_by": None})
Gap: TypeAlias = dict[str, str]
_TAKEN_BACK = 4
"""Where a manifest's line has what the copy began with, if that was not the original's."""


@plain(slots=True, frozen=True)
class Fork:
    session: str
    parent: str
    directory: str | None = None
    coverage: tuple[Gap, ...] = ()


def fork(desk: Desk, parent: SessionId, *, at: str | int | None = None, child: str | None = None) -> Fork:
    """A child session that shares the files and has the parent's talk: all of it, or up to a point.

    A message is kept itself, a call is not. A point inside a tool exchange is `not_continuable`.
    """
    desk.ledger.session(parent, desk.root)
    point = _forked_at(desk, parent, at)
    session = _open_child(desk, parent, desk.root.id, child=child, point=point)
    return Fork(session, parent)


def fork_files(
    desk: Desk,
    parent: SessionId,
    directory: str | None = None,
    *,
    at: str | int | None = None,
    child: str | None = None,
) -> Fork:
    """A child session with a copy of every file, as of now or of a point, and with the talk as there.

    The copy goes to `directory`, or to a new one beside the store.
    """
    _fresh(desk, child)
    desk.ledger.session(parent, desk.root)
    point = _forked_at(desk, parent, at)
    target = fresh_place(desk, "forks") if directory is None else os.fsencode(os.path.abspath(directory))
    source = _working_at(desk, parent)
    told = list(copy_tree(source.disk.root.path, target))
    gaps: list[Gap] = []
    with (
        removed_unless_done(target),
        closing(HostDisk(target)) as disk,
        closing(Desk(desk.ledger, disk)) as there,
    ):
        session = _open_child(desk, parent, there.root.id, child=child, point=point, copy=there.disk.root.path)
        with _forgotten_unless_done(desk, session):
            copied = {path_from_bytes(one.path): as_told(one) for one in told if isinstance(one, Copied)}
            if point is not None:
                changed, gaps = _take_back(source, there, session, point=point, at=str(at))
                copied |= {one.path: _as_taken_back(target, one) for one in changed}
            sync_copy(desk, target)
            body = {
                "session": session,
                "parent": parent,
                "source": source.root.id,
                "root": there.root.id,
                "directory": "/" + to_wire(path_from_bytes(target.lstrip(b"/"))),
            }
            _record_branch(desk, session, body, manifest=list(copied.values()))
    skipped = [{"path": to_wire(path_from_bytes(s.path)), "reason": s.reason} for s in told if isinstance(s, Skipped)]
    return Fork(session, parent, os.fsdecode(target), (*skipped, *gaps))


@contextmanager
def _forgotten_unless_done(desk: Desk, child: SessionId) -> Iterator[None]:
    """A fork that fails leaves no child session that a list shows."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            ledger = desk.ledger
            event = event_body(CLOSED_EVENT, {"reason": "fork_failed", "status": DELETED}, visibility="public")
            # The store may be what failed; then its error is the one to see.
            with suppress(MulliganError), ledger.store.write() as tx:
                ledger.journal.append(tx, session_journal(child), "session.closed", {"event": event}, at=ledger.now())


def _record_branch(desk: Desk, session: SessionId, body: dict[str, Any], *, manifest: list[Any]) -> None:
    ledger, told = desk.ledger, desk.ledger.blobs.store(encode(manifest))
    with ledger.store.write() as tx:
        journal, whole = session_journal(session), {**body, "manifest": told}
        ledger.journal.append(tx, journal, "branch.opened", whole, at=ledger.now(), refs=[told])


def as_told(one: Copied) -> list[Any]:
    return [to_wire(path_from_bytes(one.path)), one.mode, one.source_stamp, one.copy_stamp]


def _as_taken_back(directory: bytes, change: Change) -> list[Any]:
    """A path at which the copy never was like the original: what it began with there is told too."""
    shown, now = to_wire(change.path), stamp(os.path.join(directory, path_bytes(change.path)))
    return [shown, 0, "", now, entry_to_json(change.after)]


def _forked_at(desk: Desk, parent: SessionId, at: str | int | None) -> Point | None:
    if at is None:
        return None
    point = find_point(desk, at, parent, side="before")
    if point.call is None and isinstance(at, str):
        point = find_point(desk, at, parent, side="after")
    with desk.ledger.store.read() as tx:
        check_continuable(tx, archive_of(desk.ledger), point.kept, point.rest)
    return point


def _fresh(desk: Desk, child: str | None) -> None:
    """Refuse an id that is taken before anything is copied."""
    with desk.ledger.store.read() as tx:
        fresh_id(tx, archive_of(desk.ledger), child)


def _working_at(desk: Desk, session: SessionId) -> Desk:
    """The desk of a session's primary root, which may be another one than it was opened on."""
    with desk.ledger.store.read() as tx:
        anchor = anchor_in(tx, session)
    if anchor is None or os.fsencode(anchor.primary) == desk.disk.root.path:
        return desk
    try:
        return desk.opener.elsewhere(os.fsencode(anchor.primary), record=True)
    except OSError as error:
        raise fault_of_os_error(error, f"Opening {anchor.primary}") from error


def _open_child(
    desk: Desk, parent: SessionId, root: str, *, child: str | None, point: Point | None, copy: bytes | None = None
) -> SessionId:
    """`copy`: where the child works instead of in its parent's primary root."""
    archive = archive_of(desk.ledger)
    with desk.ledger.store.write() as tx:
        session, anchor = fresh_id(tx, archive, child), anchor_in(tx, parent)
        kept = None if point is None else point.kept
        primary = os.fsdecode(desk.disk.root.path) if anchor is None else anchor.primary
        copied = None if copy is None else (primary, os.fsdecode(copy))
        fork_in(tx, archive, parent, session, root=root, kept=kept, copied=copied)
        if copy is not None and anchor is not None:
            set_facts_in(tx, archive, session, {ANCHOR: anchor.copied_to(os.fsdecode(copy)).to_json()})
        later = [] if point is None else [row.id for row in point.later]
        since = None if point is None or point.session != parent else point.since
        copy_slices_in(tx, archive.journal, parent, session, at=desk.ledger.now(), without=later, stretch=since)
    return session


def _take_back(desk: Desk, there: Desk, session: SessionId, *, point: Point, at: str) -> tuple[list[Change], list[Gap]]:
    """In the copy, take back what the parent did to the original from a point on, as a rewind would.

    What that changed, and which paths are not as they were there.
    """
    now = Present(there)
    with desk.ledger.store.read() as tx:
        # Undone calls are among them, as their undoing is: taken back in order, they cancel each other out.
        later = sorted(point.later, key=lambda row: row.wseq or 0, reverse=True)
        layers = [sorted(_changes_here(tx, desk.root, one), key=lambda c: path_bytes(c.path)) for one in later]
        planner = Planner(now.entry, now.read, there.children, has=lambda digest: now.has(tx, digest))
        plan = planner.plan(layers)
    if plan.stops("merge"):
        raise fault("io_error", "The files cannot be as they were then, because some of them cannot be looked at.")
    gaps = _gaps(desk.root, later, plan)
    call = carry_out(there, session, plan.moves, {"verb": "fork", "at": at}, coverage=gaps)
    with desk.ledger.store.read() as tx:
        return changes_of(tx, call), gaps


def _gaps(root: RootRow, calls: Sequence[CallRow], plan: RestorePlan) -> list[Gap]:
    """What the calls could not capture and what the plan leaves, each once. What was ambiguous is as it was before."""
    told = [gap for call in calls if call.root == root.id for gap in decode(call.coverage)]
    left = [{"path": to_wire(one.path), "reason": one.reason} for one in plan.outcomes if one.reason is not None]
    return list({tuple(gap.items()): gap for gap in (*told, *left) if gap["reason"] != "ambiguous"}.values())


def _changes_here(tx: Tx, root: RootRow, call: CallRow) -> list[Change]:
    """What a call changed in this root, through whichever it was at work; what is beside it, the copy has not."""
    if call.root == root.id:
        return changes_of(tx, call.id)
    below = len(root.place_of(b".")) + 1
    rows = [row for row in tx.select(CHANGES, {"call": call.id}) if holds(root, row.place)]
    return [replace(change_from_row(row), path=path_from_bytes(row.place[below:])) for row in rows]


def branches(desk: Desk) -> list[BranchRow]:
    """Forks of this root that have files of their own, oldest first."""
    with desk.ledger.store.read() as tx:
        return sorted(tx.select(BRANCHES, {"source": desk.root.id}), key=lambda row: row.created_at)


def branch_of(desk: Desk, session: str) -> BranchRow:
    """Raises `unknown_session` if it has no files of its own, or has them no more."""
    with desk.ledger.store.read() as tx:
        row = tx.get(BRANCHES, session)
    if row is None or row.status == "dropped":
        raise fault("unknown_session", f"{session!r} is not a fork with files of its own; see `mulligan branches`.")
    return row


@dataclass(slots=True)
class CopyMerge:
    """What a copy's files mean for the original's, path by path. To bring them in is a call of `session`.

    `manifest` is the blob that says how the copy began.
    """

    desk: Desk
    there: Desk
    session: SessionId
    manifest: str
    on_conflict: OnConflict
    _manifest: dict[RepoPath, list[Any]] = field(default_factory=dict)
    _brought: dict[RepoPath, Entry] = field(default_factory=dict)
    _mixed: dict[str, Any] = field(default_factory=dict)
    _contents: dict[RepoPath, Content | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("on_conflict", self.on_conflict, get_args(OnConflict))
        _check_there(self.desk, self.there)
        told = decode(self.desk.ledger.blobs.read(parse_digest(self.manifest)))
        self._manifest = {from_wire(one[0]): one for one in told}
        self._brought = self._brought_before()

    def bring_in(self, cause: Mapping[str, str], *, dry_run: bool, may_write: MayWrite | None) -> WayBack:
        """As one call that can be undone; where there is nothing to bring in, or nothing may be, there is none."""
        plan = self.plan()
        if self.on_conflict == "refuse" and not plan.ok:
            plan = plan.untouched()
        check_moves(self.desk, plan, may_write)
        call = None
        if plan.moves and not dry_run:
            call = carry_out(self.desk, self.session, plan.moves, {"verb": "merge", **cause, **self._told()})
        return WayBack(plan.ok, call, plan.outcomes, plan.overwrote_external, plan=plan)

    def plan(self) -> RestorePlan:
        now, again = Present(self.desk), self.there.entry
        planner = Planner(now.entry, now.read, self.desk.children, self.on_conflict, again=again)
        special = [path for path in self._changed() if not self._take(planner, path)]
        plan = planner.plan((), not_captured=special)
        return replace(plan, moves=tuple(map(self._filled, plan.moves)))

    def _filled(self, move: Move) -> Move:
        return move if move.content is not None else replace(move, content=self._contents.get(move.path))

    def _changed(self) -> list[RepoPath]:
        """Paths of the copy that are not as they were copied, git's own files aside."""
        found = {path for path, told in self._manifest.items() if stamp(self._file(path)) != told[3]}
        found |= {path for path in _walk(self.there.disk.root.path) if path not in self._manifest}
        found |= self._brought.keys()
        # Through a link where a directory was, another file would be looked at.
        links = {path for path in found if os.path.islink(self._file(path))}
        found |= {path for path in self._manifest if not links.isdisjoint(ancestors_of(path))}
        return sorted((path for path in found if ".git" not in path.split("/")), key=path_bytes)

    def _file(self, path: RepoPath) -> bytes:
        return os.path.join(self.there.disk.root.path, path_bytes(path))

    def _take(self, planner: Planner, path: RepoPath) -> bool:
        """Plan what becomes of a path. False for what is special on either side: nothing can."""
        ours, theirs = self.desk.image(path), self.there.image(path)
        if theirs.special or ours.special:
            return False
        merged = self._merged(path, ours, theirs)
        overwrites = isinstance(merged, Conflict) and self.on_conflict == "overwrite"
        if overwrites:
            merged = TakeTheirs(theirs.entry)
        if isinstance(merged, WriteMerged):
            self._mixed[to_wire(path)] = entry_to_json(theirs.entry)
        if isinstance(merged, TakeTheirs | WriteMerged):
            self._contents[path] = _content_of(merged.entry, ours, theirs)
        planner.take(path, ours.entry, merged, overwrites=overwrites)
        return True

    def _merged(self, path: RepoPath, ours: Image, theirs: Image) -> MergedEntry:
        def read(digest: Digest) -> bytes:
            known = [i for i in (ours, theirs) if isinstance(i.entry, FileEntry) and i.entry.digest == digest]
            return known[0].data if known else self.desk.ledger.blobs.read(digest)

        base = ours.entry if same_state(ours.entry, theirs.entry) else self._base(path, ours)
        try:
            return Conflict("not_captured") if base is None else merge_entry(base, ours.entry, theirs.entry, read)
        except MulliganError:
            # What both sides had is on record, but its bytes were dropped.
            return Conflict("not_captured")

    def _base(self, path: RepoPath, ours: Image) -> Entry | None:
        """What both sides had last: when the path was brought in, or the fork began. None if nobody knows any more."""
        if path in self._brought:
            return self._brought[path]
        told = self._manifest.get(path)
        if told is None:
            return ABSENT
        if len(told) > _TAKEN_BACK:
            return entry_from_json(told[_TAKEN_BACK])
        original = os.path.join(self.desk.disk.root.path, path_bytes(path))
        if stamp(original) == told[2]:
            return ours.entry
        for desk in (self.there, self.desk):
            first = self._first_before(desk, path)
            if first is not None:
                return first
        return None

    def _brought_before(self) -> dict[RepoPath, Entry]:
        """What the copy held where merges that stand have brought it in. Not what they left, if that is a mixture."""
        found: dict[RepoPath, Entry] = {}
        blobs, copy = self.desk.ledger.blobs, self.there.root.id
        with self.desk.ledger.store.read() as tx:
            rows = calls_of(tx, self.desk, self.session, after=copy, only=_STANDING_MERGES)
            merges = [row for row in rows if decode(row.cause or "{}").get("copy") == copy]
            taken = taken_of(tx, merges)
            for row in reversed(merges):
                mixed, back = decode(row.cause or "{}").get("mixed", {}), taken.places.get(row.id, frozenset())
                for one in tx.select(CHANGES, {"call": row.id}):
                    change = change_from_row(one)
                    theirs = mixed.get(to_wire(change.path))
                    entry = change.after if theirs is None else entry_from_json(theirs)
                    if one.place not in back and (not isinstance(entry, FileEntry) or blobs.has(tx, entry.digest)):
                        found[change.path] = entry
        return found

    def _told(self) -> dict[str, Any]:
        """What the merge says of itself for later: of which copy, and what that held where both sides were mixed."""
        return {"copy": self.there.root.id} | ({"mixed": self._mixed} if self._mixed else {})

    def _first_before(self, desk: Desk, path: RepoPath) -> Entry | None:
        """What a side's first recorded change of the path since the fork replaced."""
        with desk.ledger.store.read() as tx:
            rows = tx.select(CHANGES, {"place": desk.disk.root.place_of(path)}, order=("wseq",))
            since = [row for row in rows if row.call > self._began(desk)]
        with suppress(IndexError):
            return change_from_row(since[0]).before
        return None

    def _began(self, desk: Desk) -> str:
        """Ids sort by birth: calls with a greater id came after the fork. In the copy, all did, as none was before."""
        return "" if desk is self.there else self.there.root.id


def _check_there(*desks: Desk) -> None:
    """A root that was deleted under an open desk would look as if everything in it had been."""
    for desk in desks:
        if not os.path.isdir(desk.disk.root.path):
            shown = os.fsdecode(desk.disk.root.path)
            raise fault("unknown_root", f"{shown} is gone, so there is nothing to merge; `mulligan drop` ends a fork.")


def _content_of(entry: Entry, *images: Image) -> Content | None:
    """The bytes of a file entry that one of the images holds."""
    wanted = entry.digest if isinstance(entry, FileEntry) else None
    return next((i.content for i in images if isinstance(i.entry, FileEntry) and i.entry.digest == wanted), None)


def _walk(directory: bytes) -> Iterator[RepoPath]:
    for folder, names, files in os.walk(directory):
        names[:] = [name for name in names if name != b".git"]
        below = os.path.relpath(folder, directory)
        for name in [*names, *files]:
            yield path_from_bytes(name if below == b"." else os.path.join(below, name))


def merge_branch(
    desk: Desk,
    session: str,
    *,
    on_conflict: OnConflict = "merge",
    dry_run: bool = False,
    may_write: MayWrite | None = None,
) -> WayBack:
    """Bring what a fork changed into the files it was forked from, as one call that can be undone."""
    branch = branch_of(desk, session)
    with closing(HostDisk(branch.directory)) as disk, closing(Desk(desk.ledger, disk)) as there:
        merge = CopyMerge(desk.at(branch.source), there, SessionId(branch.parent), branch.manifest, on_conflict)
        way = merge.bring_in({"session": session}, dry_run=dry_run, may_write=may_write)
    if way.ok and not dry_run:
        _end_branch(desk, branch, "merged")
    return way


def carry_out(
    desk: Desk, session: SessionId, moves: Sequence[Move], cause: dict[str, Any], *, coverage: Sequence[Gap] = ()
) -> str:
    call = desk.call(session, turn=_turn_of(desk, session), tool=str(cause["verb"]), cause=cause)
    call.coverage += coverage
    try:
        with call:
            call.change([Intent(move.path, _expecting(desk, move)) for move in moves])
    except Refused as refused:
        raise fault("path_busy", refused.message) from None
    return call.id


def _turn_of(desk: Desk, session: SessionId) -> TurnId | None:
    """The turn that is running here, if it is one of the session's."""
    turn = current_turn()
    with desk.ledger.store.read() as tx:
        return turn if turn is not None and tx.has(TURNS, session, turn) else None


def _expecting(desk: Desk, move: Move) -> Any:
    def plan(image: Image) -> Wanted:
        if image.special or not same_state(image.entry, move.now):
            raise Refused("conflict", "path_busy", f"{move.path} changed while it was being merged; try again.")
        return Wanted(move.target, content_for(desk, move, image))

    return plan


def drop_branch(desk: Desk, session: str) -> str:
    """Delete a fork's files. What it changed through calls stays in the store like any history."""
    branch = branch_of(desk, session)
    try:
        remove_copy(branch.directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        shown = os.fsdecode(branch.directory)
        raise fault("io_error", f"{shown} could not be deleted: {error.strerror}.") from error
    _end_branch(desk, branch, "dropped")
    return os.fsdecode(branch.directory)


def _end_branch(desk: Desk, branch: BranchRow, status: str) -> None:
    with desk.ledger.store.write() as tx:
        journal = session_journal(SessionId(branch.session))
        body = {"session": branch.session, "status": status}
        desk.ledger.journal.append(tx, journal, "branch.ended", body, at=desk.ledger.now())
