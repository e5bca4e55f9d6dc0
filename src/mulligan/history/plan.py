"""Plans to go back. Pure: from changes to undo and what is there now, to what each path shall become.

A plan never touches a path that the undone calls did not change. A path that cannot be merged is left byte for byte as
it is; with `refuse`, one such path empties the whole plan; with `overwrite`, the earlier state wins, directories above
it that somebody removed are made again, and the caller is told whose work it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from mulligan.history.merge import Conflict, KeepOurs, MergedEntry, TakeTheirs, WriteMerged, merge_entry
from mulligan.history.repositories import LeftAlone, is_index
from mulligan.values.content import Content
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import (
    ABSENT,
    Absent,
    Change,
    DirEntry,
    Entry,
    FileEntry,
    group_of,
    is_change_withheld,
    is_withheld,
    same_state,
)
from mulligan.values.faults import MulliganError, fault
from mulligan.values.limits import MERGE_MAX_BYTES
from mulligan.values.paths import RepoPath, ancestors_of, parent_of, path_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.git_index import say_the_same

OnConflict = Literal["merge", "overwrite", "refuse"]
OutcomeName = Literal["restored", "merged", "conflicted", "skipped", "failed"]

_DONE = ("restored", "merged")
_UNDONE_IN_PART = frozenset({"evicted", "lost", "not_captured", "ambiguous"})


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Whoever writes it in Python has no menu to choose from. Raises `invalid_params`."""
    if value not in known:
        raise fault("invalid_params", f"{name} is {', '.join(known[:-1])} or {known[-1]}, not {value!r}.", field=name)


@plain(slots=True, frozen=True)
class Outcome:
    """What became of one path on a way back, and why."""

    path: RepoPath
    outcome: OutcomeName
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As ways back tell it: path, outcome and reason."""
        body = {"path": to_wire(self.path), "outcome": self.outcome}
        return body if self.reason is None else body | {"reason": self.reason}

    @property
    def is_fine(self) -> bool:
        """Whether the path is as was asked for, or did not have to be touched."""
        return self.outcome in _DONE or (self.outcome == "skipped" and self.reason not in _UNDONE_IN_PART)


@plain(slots=True, frozen=True)
class Move:
    """One path from what it holds now to what it shall hold. `content` is there only if no blob has it yet."""

    path: RepoPath
    now: Entry
    target: Entry
    content: Content | None = None


@plain(slots=True, frozen=True)
class RestorePlan:
    moves: tuple[Move, ...]
    outcomes: tuple[Outcome, ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    coverage: tuple[Mapping[str, str], ...] = ()
    """what the calls that are taken back could not capture, so it does not come back either"""

    def leaving(self, repositories: Sequence[LeftAlone]) -> RestorePlan:
        """The same plan, saying which repositories it does not touch."""
        told = [Outcome(one.repository, "skipped", "git") for one in repositories]
        outcomes = tuple(sorted((*self.outcomes, *told), key=lambda one: path_bytes(one.path)))
        return replace(self, outcomes=outcomes, left_alone=tuple(repositories))

    def untouched(self) -> RestorePlan:
        """The same plan, if nothing of it is done."""
        outcomes = (Outcome(one.path, "skipped") if one.outcome in _DONE else one for one in self.outcomes)
        return replace(self, moves=(), outcomes=tuple(outcomes), overwrote_external=())

    @property
    def ok(self) -> bool:
        return all(outcome.is_fine for outcome in self.outcomes)

    def stops(self, on_conflict: OnConflict) -> bool:
        """Whether nothing of it may be done: a path cannot even be looked at, or there is a conflict to refuse."""
        outcomes = {one.outcome for one in self.outcomes}
        return "failed" in outcomes or (on_conflict == "refuse" and "conflicted" in outcomes)


def _always(_: Digest) -> bool:
    return True


def _never(_: object) -> bool:
    return False


def _plain_directory(_: RepoPath) -> Entry:
    return DirEntry(0o755)


@dataclass(slots=True)
class Planner:
    """Undoes layers of changes on a virtual tree, newest first.

    `now` says None of what cannot be looked at: a device, FIFO or socket. `has` says whether a body can be read, so
    that nothing is promised that cannot be done. `again` says what a directory is that has to be made anew.
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
        """`not_captured`: asked for, and no layer knows them. `ambiguous`: changed by who knows whom, and left.

        `in_use`: a program that has them open truncates or replaces them, and they are left too.
        """
        for path in ambiguous:
            self._outcomes[path] = Outcome(path, "conflicted", "ambiguous")
        for path in in_use:
            self._outcomes[path] = Outcome(path, "conflicted", "file_in_use")
        for layer in layers:
            for change in layer:
                self._step_back(change)
        self._leave_what_was_dropped()
        self._keep_full_directories()
        if self.on_conflict == "overwrite":
            self._make_directories()
        self._leave_what_has_no_directory()
        self._say_what_comes_of_it()
        for path in not_captured:
            self._outcomes[path] = Outcome(path, "skipped", "not_captured")
        outcomes = tuple(self._outcomes[path] for path in sorted(self._outcomes, key=path_bytes))
        plan = RestorePlan(self._moves(), outcomes, tuple(sorted(self._overwrote, key=path_bytes)))
        return plan.untouched() if plan.stops(self.on_conflict) else plan

    def take(self, path: RepoPath, now: Entry, merged: MergedEntry, *, overwrites: bool = False) -> None:
        """A path that somebody else has merged, to be planned with the rest; before `plan`."""
        self._seen[path] = self._tree[path] = now
        if overwrites:
            self._overwrote.append(path)
        self._take(path, merged)

    def _step_back(self, change: Change) -> None:
        path = change.path
        if path in self._outcomes and self._outcomes[path].reason is not None:
            return
        if path not in self._seen:
            try:
                now = self.now(path)
            except OSError:
                self._outcomes[path] = Outcome(path, "failed", "io_error")
                return
            if now is None:
                self._outcomes[path] = Outcome(path, "conflicted", "type_changed")
                return
            self._seen[path] = self._tree[path] = now
        ours, base, theirs = self._tree[path], change.after, change.before
        if is_change_withheld(change) or is_withheld(ours):
            # Either what was there is not in the store, or what is there would be lost.
            self._leave(path, Outcome(path, "skipped", "not_captured"))
            return
        if is_index(path) and not same_state(ours, base):
            # Git writes it anew whenever it looks at files; nobody has changed what it says then.
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
            return say_the_same(self._content(one.digest), self._content(other.digest))
        except MulliganError:
            return False

    def _leave_what_was_dropped(self) -> None:
        """Only what a path shall become must be there. What it was in between is needed to merge, and read then."""
        for path, target in self._tree.items():
            if not same_state(self._seen[path], target) and not self._can_have(target):
                self._leave(path, Outcome(path, "skipped", self._why_dropped(target)))

    def _why_dropped(self, entry: Entry) -> str:
        return "lost" if isinstance(entry, FileEntry) and self.is_lost(entry.digest) else "evicted"

    def _can_have(self, entry: Entry) -> bool:
        return not isinstance(entry, FileEntry) or entry.digest in self._fresh or self.has(entry.digest)

    def _leave(self, path: RepoPath, outcome: Outcome) -> None:
        """The path stays as it is on disk, whatever newer layers had planned for it."""
        self._tree[path] = self._seen[path]
        self._outcomes[path] = outcome
        self._overwrote = [one for one in self._overwrote if one != path]

    def _merge(self, path: RepoPath, ours: Entry, base: Entry, theirs: Entry) -> None:
        try:
            merged = merge_entry(base, ours, theirs, self._content)
            if isinstance(merged, Conflict) and self.is_held_open(path):
                merged = self._beside_a_writer(base, ours, theirs)
        except MulliganError as error:
            dropped = "lost" if error.details.get("lost") else "evicted"
            self._leave(path, Outcome(path, "skipped", dropped if error.code == "evicted" else "not_captured"))
            return
        self._take(path, merged)
        self._tree[path] = _linked(self._tree[path], now=ours, before=theirs, after=base)

    def _beside_a_writer(self, base: Entry, ours: Entry, theirs: Entry) -> MergedEntry:
        """What a program that has the file open has written to its end stays there; all else is a conflict."""
        if not (isinstance(base, FileEntry) and isinstance(ours, FileEntry) and isinstance(theirs, FileEntry)):
            return Conflict("file_in_use")
        if max(base.size, ours.size, theirs.size) > MERGE_MAX_BYTES:
            return Conflict("file_in_use")
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
            self._outcomes[path] = before if before and before.outcome == "merged" else Outcome(path, "restored")
        else:
            if merged.content is not None:
                self._fresh[digest_of(merged.content)] = merged.content
            self._tree[path] = merged.entry
            self._outcomes[path] = Outcome(path, "merged")

    def _overwrite(self, path: RepoPath, ours: Entry, base: Entry, theirs: Entry) -> None:
        if not same_state(ours, base) and not same_state(ours, theirs) and path not in self._overwrote:
            self._overwrote.append(path)
        self._tree[path] = _linked(theirs, now=ours, before=theirs, after=base)
        self._outcomes[path] = Outcome(path, "skipped" if same_state(ours, theirs) else "restored")

    def _content(self, digest: Digest) -> bytes:
        return self._fresh[digest] if digest in self._fresh else self.read(digest)

    def _keep_full_directories(self) -> None:
        """A directory that holds something the undone calls did not make stays."""
        doomed = [
            path
            for path, entry in self._tree.items()
            if isinstance(self._seen[path], DirEntry) and not isinstance(entry, DirEntry)
        ]
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
        """Whoever overwrites wants what was there, also where somebody has removed the directories above it."""
        for path in [path for path, entry in self._tree.items() if not isinstance(entry, Absent)]:
            for above in reversed(ancestors_of(path)):
                if isinstance(self._planned(above), Absent):
                    self._seen[above], self._tree[above] = ABSENT, self.again(above)
                    self._outcomes[above] = Outcome(above, "restored")

    def _leave_what_has_no_directory(self) -> None:
        """What somebody removed the directory of cannot come back: making that directory is not ours to decide."""
        for path in sorted(self._tree, key=path_bytes):
            if isinstance(self._tree[path], Absent) or same_state(self._seen[path], self._tree[path]):
                continue
            if not isinstance(self._planned(parent_of(path)), DirEntry):
                self._leave(path, Outcome(path, "conflicted", self._why_gone(path)))

    def _why_gone(self, path: RepoPath) -> str:
        """Somebody removed it, or made something else of a directory above it."""
        above = next((one for one in map(self._planned, ancestors_of(path)) if not isinstance(one, Absent)), None)
        return "deleted_externally" if isinstance(above, DirEntry) else "type_changed"

    def _planned(self, path: RepoPath) -> Entry | None:
        try:
            return self._tree[path] if path in self._tree else self.now(path)
        except OSError:
            return None

    def _say_what_comes_of_it(self) -> None:
        """Layers may cancel each other out, so only the end says what happens to a path."""
        for path, outcome in self._outcomes.items():
            if outcome.reason is None:
                stays = same_state(self._seen[path], self._tree[path])
                told: OutcomeName = "merged" if outcome.outcome == "merged" else "restored"
                self._outcomes[path] = Outcome(path, "skipped" if stays else told)

    def _moves(self) -> tuple[Move, ...]:
        moves = [
            Move(path, self._seen[path], self._timed(target), self._fresh_bytes(target))
            for path, target in self._tree.items()
            if not same_state(self._seen[path], target)
        ]
        return tuple(in_order(moves))

    def _fresh_bytes(self, entry: Entry) -> bytes | None:
        return self._fresh.get(entry.digest) if isinstance(entry, FileEntry) else None

    def _timed(self, entry: Entry) -> Entry:
        """Old times only where nothing else moved since; else a build tool would believe stale outputs."""
        return entry if self.keep_mtimes or not isinstance(entry, FileEntry | DirEntry) else replace(entry, mtime_ns=0)


_KEPT = DirEntry(0)


def _linked(entry: Entry, *, now: Entry, before: Entry, after: Entry) -> Entry:
    """What a path shall hold, as a name of the file that it was a name of before the call, if the call changed that.

    Else it stays a name of the file that is there now.
    """
    if not isinstance(entry, FileEntry):
        return entry
    is_ours = group_of(before) != group_of(after) or not isinstance(now, FileEntry)
    return replace(entry, link_group=group_of(before if is_ours else now))


class Step(Protocol):
    """A path on its way from what it holds to what it shall hold."""

    @property
    def path(self) -> RepoPath: ...
    @property
    def now(self) -> Entry: ...
    @property
    def target(self) -> Entry: ...


AnyStep = TypeVar("AnyStep", bound=Step)


def in_order(steps: Iterable[AnyStep]) -> list[AnyStep]:
    """What goes away first, deepest first, so that directories are empty by then; then what comes, parents first."""
    by_path = sorted(steps, key=lambda step: path_bytes(step.path))
    return [s for s in reversed(by_path) if leaves(s)] + [s for s in by_path if not leaves(s)]


def leaves(step: Step) -> bool:
    """Whether it goes away, or stops being a directory: what is below it must be gone by then."""
    return isinstance(step.target, Absent) or (isinstance(step.now, DirEntry) and not isinstance(step.target, DirEntry))


def restricted(changes: Iterable[Change], paths: Sequence[RepoPath] | None) -> list[Change]:
    """Only the changes at or below the given paths."""
    if paths is None:
        return list(changes)
    wanted = set(paths)
    return [one for one in changes if one.path in wanted or not wanted.isdisjoint(ancestors_of(one.path))]
