"""Plans of undo operations. Pure: from the changes to undo and the present entries, to what each path shall become.

A plan never touches a path that the undone calls did not change. A path that cannot be merged stays byte for byte as it
is; with `refuse`, one such path empties the whole plan; with `overwrite`, the earlier state wins, removed directories
above it are created again, and the caller learns whose work it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from hashlib import sha256
from typing import Any, Literal, Protocol, TypeVar

from mulligan.files.git import have_same_entries
from mulligan.history.git_changes import GitMove, LeftAlone, is_index
from mulligan.history.merge import Conflict, KeepOurs, MergedEntry, TakeTheirs, WriteMerged, merge_entry
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Change,
    Content,
    DirEntry,
    Entry,
    FileEntry,
    entry_to_json,
    same_state,
)
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MERGE_MAX_BYTES
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, parent_of, path_bytes, to_wire

OnConflict = Literal["merge", "overwrite", "refuse"]
OutcomeName = Literal["restored", "merged", "conflicted", "skipped", "failed"]

_STEPS_PER_EFFECT = 500
_DONE = ("restored", "merged")
_UNDONE_IN_PART = frozenset({"evicted", "lost", "not_captured", "ambiguous"})


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise `invalid_params` if the value is none of the known ones."""
    if value not in known:
        raise fault("invalid_params", f"{name} is {', '.join(known[:-1])} or {known[-1]}, not {value!r}.", field=name)


@fast_dataclass(slots=True, frozen=True)
class Outcome:
    """The outcome of an undo operation for one path, and its reason."""

    path: RepoPath
    outcome: OutcomeName
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON: path, outcome and reason."""
        body = {"path": to_wire(self.path), "outcome": self.outcome}
        return body if self.reason is None else body | {"reason": self.reason}

    @property
    def is_fine(self) -> bool:
        """Whether the path is as the caller wanted, or needed no change."""
        return self.outcome in _DONE or (self.outcome == "skipped" and self.reason not in _UNDONE_IN_PART)


@fast_dataclass(slots=True, frozen=True)
class PlannedChange:
    """The planned change of one path. `content` is set only if no blob has it yet."""

    path: RepoPath
    now: Entry
    target: Entry
    content: Content | None = None


@fast_dataclass(slots=True, frozen=True)
class RestorePlan:
    moves: tuple[PlannedChange, ...]
    outcomes: tuple[Outcome, ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    coverage: tuple[Mapping[str, str], ...] = ()
    """the gaps of the undone calls: these changes were not captured, so undo does not restore them"""
    git_moves: tuple[GitMove, ...] = ()
    """what happens to git's files outside the root"""

    def leaving(self, repositories: Sequence[LeftAlone]) -> RestorePlan:
        """The same plan with the repositories that it leaves alone."""
        told = [Outcome(one.repository, "skipped", "git") for one in repositories]
        outcomes = tuple(sorted((*self.outcomes, *told), key=lambda one: path_bytes(one.path)))
        return replace(self, outcomes=outcomes, left_alone=tuple(repositories))

    def moving_git(self, move: GitMove | None, outcome: Outcome) -> RestorePlan:
        """The same plan with a change of git's files outside the root."""
        outcomes = tuple(sorted((*self.outcomes, outcome), key=lambda one: path_bytes(one.path)))
        if move is None:
            return replace(self, outcomes=outcomes)
        replaced = (*self.overwrote_external, move.path) if move.overwrites else self.overwrote_external
        return replace(self, outcomes=outcomes, overwrote_external=replaced, git_moves=(*self.git_moves, move))

    def untouched(self) -> RestorePlan:
        """The same plan, marked as not carried out."""
        outcomes = (Outcome(one.path, "skipped") if one.outcome in _DONE else one for one in self.outcomes)
        return replace(self, moves=(), outcomes=tuple(outcomes), overwrote_external=(), git_moves=())

    @property
    def ok(self) -> bool:
        return not [one for one in self.outcomes if one.outcome not in _DONE and not one.is_fine]

    def stops(self, on_conflict: OnConflict) -> bool:
        """Whether the plan must not be carried out: a path cannot be read, or there is a conflict and `refuse`."""
        for one in self.outcomes:
            if one.outcome == "failed" or (on_conflict == "refuse" and one.outcome == "conflicted"):
                return True
        return False


class PlannedResult(Protocol):
    """The planned result of an undo operation (see `undo.UndoResult`)."""

    @property
    def of(self) -> tuple[str, ...]: ...
    @property
    def outcomes(self) -> tuple[Outcome, ...]: ...
    @property
    def plan(self) -> RestorePlan | None: ...
    @property
    def talk(self) -> Mapping[str, int] | None: ...
    @property
    def slices_left(self) -> tuple[str, ...]: ...


def checked_digest(result: PlannedResult, now: Callable[[RepoPath], Entry | None], expected: str | None) -> str:
    """The digest of the calls, the plan, and what its paths hold now, times aside; other paths do not matter.

    Raises `conflict` if it is not the expected one.
    """
    assert result.plan is not None, "the caller has planned"
    moved = {move.path: [_state(move.now), _state(move.target)] for move in result.plan.moves}
    paths = {}
    for one in result.outcomes:
        # What a path in another root holds counts only if the plan changes it.
        here = None if one.path in moved or one.path.startswith("/") else now(one.path)
        paths[to_wire(one.path)] = [one.outcome, one.reason or "", moved.get(one.path) or [_state(here)]]
    git = [to_wire(move.path) for move in result.plan.git_moves]
    rest = {"of": list(result.of), "talk": dict(result.talk or {}), "slices_left": list(result.slices_left)}
    digest = sha256(encode({"paths": paths, "git": git, **rest})).hexdigest()
    if expected not in (None, digest):
        words = "The plan is not the one that you have seen: files or calls have changed since. Look at the new plan."
        raise fault("conflict", words, digest=digest)
    return digest


def _state(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {name: value for name, value in entry_to_json(entry).items() if name in ("kind", "digest", "mode", "target")}


def _always(_: Digest) -> bool:
    return True


def _never(_: object) -> bool:
    return False


def _plain_directory(_: RepoPath) -> Entry:
    return DirEntry(0o755)


@fast_dataclass(slots=True)
class Planner:
    """Undoes layers of changes on a virtual tree, newest first.

    `now` answers the present entry, or None for a device, FIFO or socket. `has` answers whether bytes can be read, so
    that the plan promises nothing impossible. `again` answers the entry of a directory that has to be created again.
    """

    now: Callable[[RepoPath], Entry | None]
    read: Callable[[Digest], bytes]
    children: Callable[[RepoPath], Iterable[RepoPath]]
    on_conflict: OnConflict = "merge"
    keep_mtimes: bool = False
    has: Callable[[Digest], bool] = _always
    is_held_open: Callable[[RepoPath], bool] = _never
    is_lost: Callable[[Digest], bool] = _never
    again: Callable[[RepoPath], Entry] = _plain_directory
    has_root: bool = False
    """the directory of the root is open, so the plan does not check it"""
    withheld: Set[RepoPath] = frozenset()
    """paths that are not captured: a file that was moved away from one stays, because nothing could come back there"""
    _seen: dict[RepoPath, Entry] = field(default_factory=dict)
    _tree: dict[RepoPath, Entry] = field(default_factory=dict)
    _outcomes: dict[RepoPath, Outcome] = field(default_factory=dict)
    _fresh: dict[Digest, bytes] = field(default_factory=dict)
    _overwrote: list[RepoPath] = field(default_factory=list)

    def plan(
        self,
        layers: Iterable[Sequence[Change]],
        *,
        not_captured: Iterable[RepoPath] = (),
        ambiguous: Iterable[RepoPath] = (),
        in_use: Iterable[RepoPath] = (),
    ) -> RestorePlan:
        """Plan the undo of the layers. `not_captured`: requested paths that no layer has. `ambiguous`: paths whose
        writer is unknown; the plan leaves them.

        `in_use`: a program that has these paths open truncates or replaces them; the plan leaves them too.
        """
        # Outcomes that are set first win: `_step_back` leaves such a path alone.
        for path in ambiguous:
            self._outcomes[path] = Outcome(path, "conflicted", "ambiguous")
        for path in in_use:
            self._outcomes[path] = Outcome(path, "conflicted", "file_in_use")
        # On a virtual tree: an older layer finds what the newer ones would have left, not what is on the disk.
        for layer in layers:
            for change in layer:
                self._step_back(change)
        # The order matters: each step may leave a path as it is, and that decides whether a directory above it, or a
        # path below it, can change.
        self._leave_what_was_dropped()
        self._keep_full_directories()
        if self.on_conflict == "overwrite":
            self._make_directories()
        self._leave_what_has_no_directory()
        self._say_what_comes_of_it()
        for path in not_captured:
            self._outcomes[path] = Outcome(path, "skipped", "not_captured")
        outcomes = tuple([self._outcomes[path] for path in sorted(self._outcomes, key=path_bytes)])
        plan = RestorePlan(self._moves(), outcomes, tuple(sorted(self._overwrote, key=path_bytes)))
        return plan.untouched() if plan.stops(self.on_conflict) else plan

    def know(self, content: bytes) -> None:
        """Add a content that no blob has and that a path may get. Call it before `plan`."""
        self._fresh[digest_of(content)] = content

    def take(self, path: RepoPath, now: Entry, merged: MergedEntry, *, overwrites: bool = False) -> None:
        """Add a path that the caller has merged itself. Call it before `plan`."""
        self._seen[path] = self._tree[path] = now
        if overwrites:
            self._overwrote.append(path)
        self._take(path, merged)

    def _step_back(self, change: Change) -> None:
        path = change.path
        # A newer layer has given the path up; undoing older ones below that would mix two states.
        if path in self._outcomes and self._outcomes[path].reason is not None:
            return
        if path not in self._seen:
            try:
                now = self.now(path)
            except OSError:
                # A disk error is no conflict: it stops the whole plan.
                self._outcomes[path] = Outcome(path, "failed", "io_error")
                return
            if now is None:
                self._outcomes[path] = Outcome(path, "conflicted", "type_changed")
                return
            self._seen[path] = self._tree[path] = now
        ours, base, theirs = self._tree[path], change.after, change.before
        was_moved = change.renamed_from in self.withheld and isinstance(theirs, Absent)
        if was_moved or base.withheld is not None or theirs.withheld is not None or ours.withheld is not None:
            # Either the store does not have the earlier bytes, or the present ones would be lost.
            self._leave(path, Outcome(path, "skipped", "not_captured"))
            return
        if not same_state(ours, base) and is_index(path):
            # Git rewrites its index whenever it checks files, so other bytes may have the same meaning.
            base, theirs = (ours if self._say_the_same(ours, one) else one for one in (base, theirs))
        if self.on_conflict == "overwrite":
            self._overwrite(path, ours, base, theirs)
        else:
            self._merge(path, ours, base, theirs)

    def _say_the_same(self, one: Entry, other: Entry) -> bool:
        if not isinstance(one, FileEntry) or not isinstance(other, FileEntry) or one.mode != other.mode:
            return False
        if max(one.size, other.size) > MERGE_MAX_BYTES:
            return False
        try:
            return have_same_entries(self._content(one.digest), self._content(other.digest))
        except MulliganError:
            return False

    def _leave_what_was_dropped(self) -> None:
        """Leave paths whose target bytes are evicted.

        Only the last target needs bytes; the ones in between are read by the merge.
        """
        for path, target in self._tree.items():
            if not same_state(self._seen[path], target) and not self._can_have(target):
                self._leave(path, Outcome(path, "skipped", self._why_dropped(target)))

    def _why_dropped(self, entry: Entry) -> str:
        return "lost" if isinstance(entry, FileEntry) and self.is_lost(entry.digest) else "evicted"

    def _can_have(self, entry: Entry) -> bool:
        return not isinstance(entry, FileEntry) or entry.digest in self._fresh or self.has(entry.digest)

    def _leave(self, path: RepoPath, outcome: Outcome) -> None:
        """Leave the path as it is on disk, whatever newer layers have planned for it."""
        self._tree[path] = self._seen[path]
        self._outcomes[path] = outcome
        self._overwrote = [one for one in self._overwrote if one != path]

    def _merge(self, path: RepoPath, ours: Entry, base: Entry, theirs: Entry) -> None:
        try:
            merged = merge_entry(base, ours, theirs, self._content)
            # Asked only after a conflict, because it costs a lease on the file.
            if isinstance(merged, Conflict) and self.is_held_open(path):
                merged = self._beside_a_writer(base, ours, theirs)
        except MulliganError as error:
            dropped = "lost" if error.details.get("lost") else "evicted"
            self._leave(path, Outcome(path, "skipped", dropped if error.code == "evicted" else "not_captured"))
            return
        self._take(path, merged)
        self._tree[path] = _linked(self._tree[path], now=ours, before=theirs, after=base)

    def _beside_a_writer(self, base: Entry, ours: Entry, theirs: Entry) -> MergedEntry:
        """Merge beside a process that has the file open: what it appended stays; any other difference is a conflict."""
        if not (isinstance(base, FileEntry) and isinstance(ours, FileEntry) and isinstance(theirs, FileEntry)):
            return Conflict("file_in_use")
        if max(base.size, ours.size, theirs.size) > MERGE_MAX_BYTES:
            return Conflict("file_in_use")
        # If the text before the appended part is not what it was, the program rewrote the file.
        was, now = self._content(base.digest), self._content(ours.digest)
        if not now.startswith(was):
            return Conflict("file_in_use")
        content = self._content(theirs.digest) + now[len(was) :]
        return WriteMerged(replace(theirs, digest=digest_of(content), size=len(content), mode=ours.mode), content)

    def _take(self, path: RepoPath, merged: MergedEntry) -> None:
        before = self._outcomes.get(path)
        if isinstance(merged, Conflict):
            gone = merged.reason == "deleted_externally"
            self._leave(path, Outcome(path, "conflicted", self._why_gone(path) if gone else merged.reason))
        elif isinstance(merged, KeepOurs):
            self._outcomes.setdefault(path, Outcome(path, "skipped"))
        elif isinstance(merged, TakeTheirs):
            self._tree[path] = merged.entry
            # Once a layer was merged, the outcome stays "merged": the file has lines of both sides.
            self._outcomes[path] = before if before and before.outcome == "merged" else Outcome(path, "restored")
        else:
            if merged.content is not None:
                self._fresh[digest_of(merged.content)] = merged.content
            self._tree[path] = merged.entry
            self._outcomes[path] = Outcome(path, "merged")

    def _overwrite(self, path: RepoPath, ours: Entry, base: Entry, theirs: Entry) -> None:
        if same_state(base, theirs):
            # Later changes cancelled this one out, so nothing replaces the present entry.
            self._outcomes.setdefault(path, Outcome(path, "skipped"))
            return
        if not same_state(ours, base) and not same_state(ours, theirs) and path not in self._overwrote:
            self._overwrote.append(path)
        self._tree[path] = _linked(theirs, now=ours, before=theirs, after=base)
        self._outcomes[path] = Outcome(path, "skipped" if same_state(ours, theirs) else "restored")

    def _content(self, digest: Digest) -> bytes:
        return self._fresh[digest] if digest in self._fresh else self.read(digest)

    def _keep_full_directories(self) -> None:
        """Keep directories that have files which the undone calls did not create."""
        doomed: list[RepoPath] = []
        for path, entry in self._tree.items():
            if isinstance(self._seen[path], DirEntry) and not isinstance(entry, DirEntry):
                doomed.append(path)
        # Deepest first, so that a directory knows which of its own directories go.
        for path in sorted(doomed, key=path_bytes, reverse=True):
            try:
                stays = any(not isinstance(self._tree.get(child, _KEPT), Absent) for child in self.children(path))
            except OSError:
                self._leave(path, Outcome(path, "failed", "io_error"))
                continue
            if stays:
                gone = isinstance(self._tree[path], Absent)
                outcome = Outcome(path, "skipped") if gone else Outcome(path, "conflicted", "type_changed")
                self._leave(path, outcome)

    def _make_directories(self) -> None:
        """With `overwrite`, create the missing directories above restored paths."""
        for path in [path for path, entry in self._tree.items() if not isinstance(entry, Absent)]:
            # From the top, because a directory needs the one above it.
            for above in reversed(ancestors_of(path)):
                if isinstance(self._planned(above), Absent):
                    self._seen[above], self._tree[above] = ABSENT, self.again(above)
                    self._outcomes[above] = Outcome(above, "restored")

    def _leave_what_has_no_directory(self) -> None:
        """Leave paths whose directory another process removed: without `overwrite`, the plan must not create it."""
        for path in sorted(self._tree, key=path_bytes):
            if isinstance(self._tree[path], Absent) or same_state(self._seen[path], self._tree[path]):
                continue
            above = parent_of(path)
            if not (above == ROOT and self.has_root) and not isinstance(self._planned(above), DirEntry):
                self._leave(path, Outcome(path, "conflicted", self._why_gone(path)))

    def _why_gone(self, path: RepoPath) -> str:
        """The reason: the directory was removed, or a directory above it is something else now."""
        above = next((one for one in map(self._planned, ancestors_of(path)) if not isinstance(one, Absent)), None)
        return "deleted_externally" if isinstance(above, DirEntry) else "type_changed"

    def _planned(self, path: RepoPath) -> Entry | None:
        try:
            return self._tree[path] if path in self._tree else self.now(path)
        except OSError:
            return None

    def _say_what_comes_of_it(self) -> None:
        """Set the outcomes. Layers may cancel each other out, so only the last target tells what happens to a path."""
        for path, outcome in self._outcomes.items():
            if outcome.reason is None:
                stays = same_state(self._seen[path], self._tree[path])
                told: OutcomeName = "merged" if outcome.outcome == "merged" else "restored"
                self._outcomes[path] = Outcome(path, "skipped" if stays else told)

    def _moves(self) -> tuple[PlannedChange, ...]:
        moves: list[PlannedChange] = []
        for path, target in self._tree.items():
            if not same_state(self._seen[path], target):
                # Merged contents are in no blob yet; the effect that writes them stores them.
                fresh = self._fresh.get(target.digest) if isinstance(target, FileEntry) else None
                # Restore old times only if nothing else changed since; else a build tool would take outdated outputs
                # for current.
                if not self.keep_mtimes and isinstance(target, FileEntry | DirEntry):
                    target = replace(target, mtime_ns=0)
                moves.append(PlannedChange(path, self._seen[path], target, fresh))
        return tuple(in_order(moves) if len(moves) > 1 else moves)


_KEPT = DirEntry(0)


def _linked(entry: Entry, *, now: Entry, before: Entry, after: Entry) -> Entry:
    """The target entry, as a name of the file that it was a name of before the call, if the call changed that.

    Otherwise it stays a name of the present file.
    """
    if not isinstance(entry, FileEntry):
        return entry
    is_ours = before.link_group != after.link_group or not isinstance(now, FileEntry)
    group = before.link_group if is_ours else now.link_group
    return entry if entry.link_group == group else replace(entry, link_group=group)


class PathStep(Protocol):
    """A step that changes one path from its present entry to a target."""

    @property
    def path(self) -> RepoPath: ...
    @property
    def now(self) -> Entry: ...
    @property
    def target(self) -> Entry: ...


T = TypeVar("T")
AnyStep = TypeVar("AnyStep", bound=PathStep)


def in_order(steps: Iterable[AnyStep]) -> list[AnyStep]:
    """The steps in order: removals first, deepest first, so that directories are empty by then; then the rest, parents
    first.
    """
    # In byte order a directory comes before everything in it.
    by_path = sorted(steps, key=lambda step: path_bytes(step.path))
    return [s for s in reversed(by_path) if leaves(s)] + [s for s in by_path if not leaves(s)]


def in_batches(steps: Sequence[T]) -> Iterator[Sequence[T]]:
    """The steps in parts: an effect holds the bytes of all its paths in memory, so a large plan takes several."""
    for start in range(0, len(steps), _STEPS_PER_EFFECT):
        yield steps[start : start + _STEPS_PER_EFFECT]


def leaves(step: PathStep) -> bool:
    """Whether the step removes the path or its directory, so that everything below it must be gone before."""
    return isinstance(step.target, Absent) or (isinstance(step.now, DirEntry) and not isinstance(step.target, DirEntry))
