"""Undo across several roots, and the state of a root that undo starts from.

What a call did in other roots are its parts. They are published with the call, and undone with it. So an undo
operation splits its calls by workspace (`parts_by_root`), plans in each root, and shows one plan. People name paths as
their own root shows them; `places_of_paths` finds where such a path may be.

`CurrentTree` and the functions below it answer what a plan asks about the present files: what a path holds, whether
anything has changed since a call, whether a program has a file open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field, replace
from datetime import datetime

from mulligan.files.disk import Image
from mulligan.files.replace import is_held_open
from mulligan.history.abort import rescued_in
from mulligan.history.cause import PartOfCall
from mulligan.history.open_root import OpenRoot
from mulligan.history.permissions import is_shut, opened_up
from mulligan.history.plan import Outcome, PlannedChange, RestorePlan
from mulligan.history.tables import CALL_PARTS, CALLS, CHANGES, ROOTS, CallRow, RootRow
from mulligan.session.roots import SANDBOXED_ROOTS
from mulligan.store.protocol import Tx
from mulligan.values.digest import Digest
from mulligan.values.entries import (
    Change,
    Content,
    DirEntry,
    Entry,
    FileEntry,
    digest_of_beginning,
    entry_from_bytes,
    same_state,
)
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MERGE_MAX_BYTES
from mulligan.values.paths import RepoPath, is_inside, path_bytes, path_from_bytes, text_from_wire, to_wire

_GIT = b".git"
_LOOK_ENTRIES_MAX = 200

PlacesByPath = Mapping[RepoPath, frozenset[bytes]]
"""Paths as the caller names them, each with the places where it may be."""


@fast_dataclass(slots=True, frozen=True)
class RootPart:
    """The part of an undo operation in one root: the calls to undo there, newest first."""

    open_root: OpenRoot
    calls: tuple[CallRow, ...]


def main_of(row: CallRow) -> str:
    """The id of the call that a part belongs to; any other call's own id."""
    return cause.part_of if isinstance(cause := row.why, PartOfCall) else row.id


def with_parts(tx: Tx, rows: Iterable[CallRow]) -> tuple[CallRow, ...]:
    """The calls with all of their parts in other roots; each once, parts before their main call."""
    found: dict[str, CallRow] = {}
    for row in rows:
        main = row.id if row.cause is None else main_of(row)
        parts = tx.select(CALL_PARTS, {"call": main})
        # Ids sort by time, so reversed means newest first.
        for name in (*sorted([one.part for one in parts], reverse=True), main) if parts else (main,):
            one = tx.get(CALLS, name)
            if one is not None and one.status == "committed":
                found.setdefault(name, one)
        found.setdefault(row.id, row)
    return tuple(found.values())


def parts_by_root(open_root: OpenRoot, calls: Sequence[CallRow]) -> list[RootPart]:
    """One part for each workspace in which the calls worked: roots that overlap are one. At least one."""
    if len(calls) == 1 and calls[0].root == open_root.root.id:
        return [RootPart(open_root, tuple(calls))]
    by_workspace: dict[str, list[CallRow]] = {}
    with open_root.ledger.store.read() as tx:
        for call in calls:
            root = tx.get(ROOTS, call.root)
            by_workspace.setdefault(call.workspace if root is None else root.workspace, []).append(call)
    groups: list[list[CallRow]] = list(by_workspace.values()) or [[]]
    for group in groups:
        # By the order of the workspace: a call that began earlier may have changed a file later.
        group.sort(key=lambda row: row.wseq or 0, reverse=True)
    return [RootPart(_root_around(open_root, group), tuple(group)) for group in groups]


def _root_around(open_root: OpenRoot, calls: Sequence[CallRow]) -> OpenRoot:
    """The root of the calls; if they have several, the innermost root that contains all of them."""
    roots = {call.root for call in calls}
    if len(roots) <= 1:
        return open_root.at(roots.pop()) if roots else open_root
    with open_root.ledger.store.read() as tx:
        inner = [row for root in roots if (row := tx.get(ROOTS, root)) is not None]
        around = [row for row in tx.select(ROOTS) if all(contains(row, one.place_of(b".")) for one in inner)]
    if not around:
        raise fault("unknown_root", "These calls worked in roots that no known root contains.")
    return open_root.at(max(around, key=lambda row: len(row.place)).id)


def contains(root: RootRow, place: bytes) -> bool:
    return is_inside(place, root.place_of(b"."))


def places_of_paths(tx: Tx, open_root: OpenRoot, calls: Iterable[CallRow], paths: Iterable[RepoPath]) -> PlacesByPath:
    """The places of each path that the caller names, relative to this open root or absolute in another root.

    A sandboxed root and its copy have one name, so such a path has two places. Raises `invalid_path` for a path that is
    in no root in which the calls worked.
    """
    own = tx.get(ROOTS, open_root.root.id) or open_root.root
    rows = {call.root: tx.get(ROOTS, call.root) for call in calls}
    roots = [(row.place, row) for row in (own, *rows.values()) if row is not None]
    # A session names files of a sandboxed copy as files of the root itself.
    roots += [
        (os.fsencode(one.path), row) for one in tx.select(SANDBOXED_ROOTS) if (row := rows.get(one.root)) is not None
    ]
    found = {path: _places_of(os.path.join(own.place + b"/", path_bytes(path)), roots) for path in paths}
    if (path := next((path for path, places in found.items() if not places), None)) is not None:
        raise fault("invalid_path", f"{path!r} is not in a root in which the call worked.", path=path)
    return found


def _places_of(whole: bytes, roots: Iterable[tuple[bytes, RootRow]]) -> frozenset[bytes]:
    inside = ((root, whole[len(name) + 1 :] or b".") for name, root in roots if is_inside(whole, name))
    return frozenset(root.place_of(below) for root, below in inside)


def body_at(tx: Tx, open_root: OpenRoot, call: CallRow, path: RepoPath, *, after: bool) -> Digest | None:
    """The digest of a file before a call, or after it, in any root in which the call worked. None: it was no file."""
    parts = with_parts(tx, [call])
    places = places_of_paths(tx, open_root, parts, [path])[path]
    for part in parts:
        for row in tx.select(CHANGES, {"call": part.id}):
            entry = entry_from_bytes(row.after if after else row.before)
            if row.place in places and isinstance(entry, FileEntry):
                return entry.digest
        # An aborted call has no changes, but what it replaced may have been rescued.
        root = tx.get(ROOTS, part.root)
        rescued = rescued_in(part) if after and root is not None else []
        for name, digest in reversed(rescued):
            if root is not None and root.place_of(path_bytes(name)) in places:
                return digest
    return None


def open_root_and_path(open_root: OpenRoot, path: RepoPath) -> tuple[OpenRoot, RepoPath]:
    """The open root that a shown path is in, and the path there. Raises `invalid_path` if it is in no root."""
    if not path.startswith("/"):
        return open_root, path
    whole = os.fsencode(path)
    with open_root.ledger.store.read() as tx:
        around = [row.place for row in tx.select(ROOTS) if is_inside(whole, row.place or b"/")]
    if not around:
        raise fault("invalid_path", f"{path!r} is in no root that Mulligan knows.", path=path)
    # Roots may lie in each other; the innermost one has the history.
    root = max(around, key=len)
    return open_root.elsewhere(root or b"/", record=False), path_from_bytes(whole[len(root) + 1 :])


def is_at_or_below(place: bytes, places: frozenset[bytes] | None) -> bool:
    """Whether a place is one of the places, or below one; None means anywhere."""
    return places is None or not places.isdisjoint(place_and_above(place))


def place_and_above(place: bytes) -> Iterator[bytes]:
    """The place itself, and every folder above it."""
    return (place[:end] for end in (*(at for at, byte in enumerate(place) if byte == ord("/")), len(place)))


def path_in_root(root: RootRow, place: bytes, path: RepoPath) -> RepoPath:
    """A place as a path of this root; `path` if it is in another root."""
    return path_from_bytes(place[len(root.place_of(b".")) + 1 :] or b".") if contains(root, place) else path


def shown_by(tx: Tx, open_root: OpenRoot, root: RootRow) -> Callable[[RepoPath], RepoPath]:
    """How this open root shows the paths of another root: relative if they are below its own, else absolute."""
    if root.id == open_root.root.id:
        return lambda path: path
    # People know a sandboxed copy by the name of the root that it copies.
    aside = tx.select(SANDBOXED_ROOTS, {"root": root.id}, limit=1)
    if aside:
        return lambda path: RepoPath(os.path.normpath(os.path.join(aside[0].path, path)))
    return lambda path: RepoPath(open_root.shown(root, path))


def plan_as_shown(open_root: OpenRoot, planned_in: OpenRoot, plan: RestorePlan) -> RestorePlan:
    """A plan of one root with paths as another open root shows them."""
    if open_root is planned_in:
        return plan
    with open_root.ledger.store.read() as tx:
        whole = shown_by(tx, open_root, planned_in.root)
    return replace(
        plan,
        moves=tuple(replace(move, path=whole(move.path)) for move in plan.moves),
        outcomes=tuple(replace(one, path=whole(one.path)) for one in plan.outcomes),
        overwrote_external=tuple(whole(path) for path in plan.overwrote_external),
        coverage=tuple({**gap, "path": to_wire(whole(RepoPath(text_from_wire(gap["path"]))))} for gap in plan.coverage),
    )


def combined_plan(plans: Sequence[RestorePlan], unknown: Sequence[Outcome] = ()) -> RestorePlan:
    """The plans of several roots as one to show, with outcomes for paths that none of them knows."""
    if len(plans) == 1 and not unknown:
        return plans[0]
    outcomes = (*(one for plan in plans for one in plan.outcomes), *unknown)
    return RestorePlan(
        tuple(move for plan in plans for move in plan.moves),
        tuple(sorted(outcomes, key=lambda one: path_bytes(one.path))),
        tuple(path for plan in plans for path in plan.overwrote_external),
        tuple(one for plan in plans for one in plan.left_alone),
        tuple(gap for plan in plans for gap in plan.coverage),
        tuple(move for plan in plans for move in plan.git_moves),
    )


@fast_dataclass(slots=True)
class CurrentTree:
    """The present files of a root, for a planner.

    It keeps the bytes that it reads, because the store may not have them.
    """

    open_root: OpenRoot
    _contents: dict[Digest, bytes] = field(default_factory=dict)

    def entry(self, path: RepoPath) -> Entry | None:
        """None for what cannot be captured: a device, FIFO or socket."""
        image = self.open_root.image(path)
        # Large files are streams; the store has their bytes.
        if isinstance(image.content, bytes) and isinstance(image.entry, FileEntry):
            self._contents[image.entry.digest] = image.content
        return None if image.special else image.entry

    def is_held_open(self, path: RepoPath) -> bool:
        """Whether another process has the file open for writing."""
        with suppress(OSError, Refused), self.open_root.disk.resolve_exactly(path) as spot:
            return is_held_open(self.open_root.disk, spot, spot.name)
        return False

    def read(self, digest: Digest) -> bytes:
        return self._contents[digest] if digest in self._contents else self.open_root.ledger.blobs.read(digest)

    def has(self, tx: Tx, digest: Digest) -> bool:
        return digest in self._contents or self.open_root.ledger.blobs.has(tx, digest)


def nothing_seen_since(open_root: OpenRoot, calls: Sequence[CallRow], changed: Set[RepoPath]) -> bool:
    """Whether a short scan finds no change since, recorded or not: a build may have run in between."""
    # The call itself changed the times of the folders above its files.
    top = open_root.disk.root.path
    own = {top}
    for path in changed:
        whole = os.path.join(top, path_bytes(path))
        while whole not in own:
            own.add(whole)
            whole = os.path.dirname(whole)
    # Recorded times sort as text.
    return _is_quiet(
        top,
        since_ns=_ns(min([call.started_at for call in calls])),
        own=own,
        own_since_ns=_ns(max([call.ended_at or call.started_at for call in calls])),
        entries_max=_LOOK_ENTRIES_MAX,
    )


def _ns(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1_000_000) * 1_000


def _is_quiet(top: bytes, *, since_ns: int, own: Set[bytes], own_since_ns: int, entries_max: int) -> bool:
    """Whether nothing below `top` has changed since, and our `own` paths not since a later moment. Git's files do not
    count.

    It compares ctimes, which no program can set. False too for more than `entries_max` entries, or an unreadable
    folder.
    """
    ahead, left = [top], entries_max
    try:
        while ahead:
            with os.scandir(ahead.pop()) as found:
                for entry in found:
                    left -= 1
                    status = entry.stat(follow_symlinks=False)
                    since = own_since_ns if entry.path in own else since_ns
                    if left < 0 or (status.st_ctime_ns > since and entry.name != _GIT):
                        return False
                    if stat.S_ISDIR(status.st_mode) and entry.name != _GIT:
                        ahead.append(entry.path)
    except OSError:
        return False
    return True


def content_for(open_root: OpenRoot, move: PlannedChange, image: Image) -> Content | None:
    """The bytes that a move writes where `image` is."""
    if move.content is not None or not isinstance(move.target, FileEntry):
        return move.content
    # The bytes that stay may be a person's, and then the store does not have them.
    stays = isinstance(image.entry, FileEntry) and image.entry.digest == move.target.digest
    return image.any_content if stays else open_root.ledger.blobs.content(move.target.digest, move.target.size)


def written_since(open_root: OpenRoot, move: PlannedChange, image: Image) -> bytes | None:
    """The bytes that a program appended to its open file since the plan; None if it changed in another way."""
    now = move.now
    if not isinstance(now, FileEntry) or not isinstance(image.entry, FileEntry) or image.entry.mode != now.mode:
        return None
    if image.entry.size > MERGE_MAX_BYTES or digest_of_beginning(image.data, now.size) != now.digest:
        return None
    return image.data[now.size :] if CurrentTree(open_root).is_held_open(move.path) else None


NOTHING_SHUT: Mapping[RepoPath, Entry] = {}


@contextmanager
def opened_folders(open_root: OpenRoot, layers: Sequence[Sequence[Change]]) -> Iterator[Mapping[RepoPath, Entry]]:
    """Open folders that the calls have locked, so that the plan can read them. Yields their entries as locked."""
    # The newest layer is applied last here, so `left` has what the calls left at each path.
    left = {change.path: change.after for layer in reversed(layers) for change in layer}
    folders = [path for path, entry in left.items() if isinstance(entry, DirEntry)]
    shut: dict[RepoPath, Entry] = {}
    with ExitStack() as closing:
        for path in sorted(folders, key=path_bytes):
            if is_shut(open_root.disk, path) and same_state(now := open_root.entry(path), left[path]):
                shut[path] = now
                closing.enter_context(opened_up(open_root.disk, path))
        yield shut
