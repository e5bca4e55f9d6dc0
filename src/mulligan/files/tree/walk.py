"""The files below a directory, in byte order of their paths, without those that are ignored.
* Regular files only. Symlinks are neither listed nor followed, to files or to directories; special files are left out.
* `.git`, directory or file, is never entered or listed. Other hidden files are.
* A directory that cannot be read, or whose path is too long, is skipped and named in `unreadable`.
* The caller names the base itself, so it is never ignored; what is below it may be.

A walk goes only as far as its caller iterates. A complete one can be the start of the next: the next does not open a
directory that a watch reports as unchanged, and does not list it again if its stamp shows that the old listing is
valid.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType, TracebackType
from typing import Protocol

from mulligan.files.tree.directories import OPEN_DIRECTORY, OPEN_MAX, Handles, Stamp, is_local, stamp_of, was_at_rest
from mulligan.files.tree.ignore import (
    GIT_IGNORE,
    NO_SOURCES,
    OWN_IGNORE,
    Above,
    IgnoreRules,
    IgnoreSources,
    read_above,
    read_sources,
    rules_inside,
)
from mulligan.files.tree.watcher import Changes, Watch
from mulligan.values.clock import Clock, now_ns
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MAX_PATH_BYTES
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, name_of, path_bytes

_GIT = ".git"
# Entries that change how a walk treats the others.
MARKS = (_GIT, GIT_IGNORE, OWN_IGNORE)


@fast_dataclass(slots=True, frozen=True)
class Listing:
    """The entries of a directory in walking order, directories with a slash; and which marks were among them."""

    stamp: Stamp
    trusted: bool
    entries: tuple[str, ...]
    marks: tuple[str, ...]


class Lister:
    """Lists directories, `now_ns` being the time before the first of them."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._local_devices: dict[int, bool] = {}

    def list(self, fd: int, stamp: Stamp) -> Listing:
        """List an open directory.

        A change after the stamp was read gives another stamp next time, whether or not this listing has it.
        """
        names: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    names.append(entry.name + "/")
        text = "".join(names)
        may_have_marks = _GIT in text or OWN_IGNORE in text
        marks = tuple(mark for mark in MARKS if mark in names or mark + "/" in names) if may_have_marks else ()
        if _GIT in marks:
            names = [name for name in names if name not in (_GIT, _GIT + "/")]
        if text.isascii():
            names.sort()
        else:  # Code points sort as their UTF-8 does, except for the surrogates that stand for other bytes.
            names.sort(key=lambda name: name.encode("utf-8", "surrogateescape"))
        trusted = was_at_rest(stamp, self._now_ns) and self._is_local(fd, stamp)
        return Listing(stamp, trusted, tuple(names), marks)

    def _is_local(self, fd: int, stamp: Stamp) -> bool:
        if stamp.device not in self._local_devices:
            self._local_devices[stamp.device] = is_local(fd)
        return self._local_devices[stamp.device]


_NO_ENTRIES: Iterator[str] = iter(())
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# Tells whether a walk needs to enter a directory, given its path from the root.
Enters = Callable[[str], bool]


@fast_dataclass(slots=True, frozen=True)
class WalkedDirectory:
    """A directory as walked. `above`: the rules that apply around it; `rules`: those with its own ignore files."""

    listing: Listing
    above: IgnoreRules
    sources: IgnoreSources
    rules: IgnoreRules
    kept: tuple[str, ...]
    ignored: tuple[str, ...]
    # Whether it has no subdirectory that is not ignored.
    is_leaf: bool


class Visitor(Protocol):
    """A function object that gets every directory while it is open."""

    def visit(self, walk: Walk, path: str, kept: tuple[str, ...], opened: Callable[[], int]) -> None:
        """`opened` gives a descriptor of the directory; it may raise OSError."""


@fast_dataclass(slots=True, frozen=True)
class WalkPlan:
    """What a walk follows: `chain` are the ignore files around the base, outermost first; `rules` are their rules."""

    base: RepoPath
    chain: Above
    rules: IgnoreRules
    include_ignored: bool = False


@fast_dataclass(slots=True)
class _Frame:
    """A directory being walked: its path with a slash, its descriptor, its rules and the entries still to come."""

    path: RepoPath
    prefix: str
    # -1 until it is needed.
    fd: int
    rules: IgnoreRules
    # Whether this is the same directory as in the earlier walk, so that its watch counts.
    is_same: bool = False
    rest: Iterator[str] = _NO_ENTRIES


@fast_dataclass(slots=True)
class Walk:
    """A walk, finished when `complete`. Iterating continues as far as needed; leaving `with` stops it."""

    plan: WalkPlan
    # The files so far, in order: names that follow each other in one directory, behind its path with a slash.
    runs: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    file_count: int = 0
    unreadable: list[RepoPath] = field(default_factory=list)
    # Directories left out as ignored.
    pruned: list[RepoPath] = field(default_factory=list)
    ignored_files: int = 0
    places: dict[str, WalkedDirectory] = field(default_factory=dict)
    # The modification times that were read, by directory and name. They are valid as long as the walk.
    times: dict[str, dict[str, int]] = field(default_factory=dict)
    # Results that callers computed from a complete walk and want to reuse.
    memo: dict[object, object] = field(default_factory=dict)
    watch: Watch | None = None
    # The number of the last query of the watch before this walk began.
    number: int = 0
    complete: bool = False
    _steps: Generator[None] | None = None
    _in_haste: bool = False

    @property
    def files(self) -> list[RepoPath]:
        """The files so far with their whole paths.

        They are built on request, because there may be a hundred thousand.
        """
        return [RepoPath(prefix + name) for prefix, names in self.runs for name in names]

    def __iter__(self) -> Iterator[RepoPath]:
        at, going = 0, True
        while going:
            going = at < len(self.runs) or self._advance()
            for prefix, names in self.runs[at:]:
                at += 1
                for name in names:
                    yield RepoPath(prefix + name)

    def add(self, prefix: str, names: Sequence[str]) -> None:
        """Files of one directory that come next."""
        self.runs.append((prefix, names))
        self.file_count += len(names)

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.watch = None
        if self._steps is not None:
            self._steps.close()

    def finish(self) -> Walk:
        self._in_haste = True
        while self._advance():
            pass
        return self

    def _advance(self) -> bool:
        """Walk one more directory; False at the end."""
        if self._steps is None:
            return False
        try:
            next(self._steps)
        except StopIteration:
            self.complete, self._steps = True, None
        return not self.complete


def plan_walk(root_fd: int, base: RepoPath, *, include_ignored: bool = False) -> WalkPlan:
    """Read the ignore files around the base. Raises OSError when a directory above the base cannot be opened."""
    above = () if include_ignored else read_above(root_fd)
    rules = rules_inside(above)
    if base == ROOT or include_ignored:
        return WalkPlan(base, above, rules, include_ignored)
    chain = list(above)
    with Handles(root_fd) as handles:
        for directory in reversed(ancestors_of(base)):
            sources = read_sources(handles.directory(directory), MARKS)
            chain.append((directory, sources))
            rules = rules.inside(directory).with_sources(sources)
    return WalkPlan(base, tuple(chain), rules)


@fast_dataclass(slots=True, frozen=True)
class Known:
    """The result of an earlier walk with the same plan.

    With `changes`, everything that they do not name is unchanged.
    """

    places: Mapping[str, WalkedDirectory] = field(default_factory=lambda: MappingProxyType({}))
    changes: Changes | None = None


@fast_dataclass(slots=True, frozen=True)
class WalkScope:
    """The scope of a walk: the directories that it enters, and its visitor. A tree with a visitor is watched too."""

    enters: Enters | None = None
    visitor: Visitor | None = None

    @property
    def goes_everywhere(self) -> bool:
        return self.enters is None


ALL_WAYS = WalkScope()
UNKNOWN = Known()


def start_walk(root_fd: int, walk: Walk, clock: Clock, *, known: Known = UNKNOWN, ways: WalkScope = ALL_WAYS) -> Walk:
    """Enter the base of a walk that has not begun.

    Raises OSError when the base is no directory that can be opened.
    """
    walk._steps = _Walker(root_fd, walk, known=known, now_ns=now_ns(clock), ways=ways).steps()
    next(walk._steps)
    return walk


def still_holds(root_fd: int, walk: Walk) -> bool:
    """Whether a new walk would find the same. It checks every directory and ignore file, but lists nothing."""
    if walk.unreadable:
        return False
    for path, place in walk.places.items():
        if not place.listing.trusted or _stamp_at(root_fd, path) != place.listing.stamp:
            return False
    return not changed_sources(root_fd, walk)


def _stamp_at(root_fd: int, path: str) -> Stamp | None:
    """The stamp of a path. It may follow a symlink, but the caller compares the inode, and the parent's stamp too."""
    try:
        return stamp_of(os.stat(path, dir_fd=root_fd, follow_symlinks=False))
    except OSError:
        return None


def changed_sources(root_fd: int, walk: Walk) -> list[str]:
    """The directories whose ignore files changed.

    They are read, because a stamp or watch may miss an edit through another name.
    """
    if walk.plan.include_ignored:
        return []
    changed = []
    with Handles(root_fd) as handles:
        for path, place in walk.places.items():
            if place.listing.marks and not _has_sources(handles, path, place):
                changed.append(path)
    return changed


def _has_sources(handles: Handles, path: str, place: WalkedDirectory) -> bool:
    try:
        return read_sources(handles.directory(path), place.listing.marks) == place.sources
    except OSError:
        return False


class _Walker:
    def __init__(self, root_fd: int, walk: Walk, *, known: Known, now_ns: int, ways: WalkScope) -> None:
        self.root_fd = root_fd
        self.walk = walk
        self.known = known.places
        self.changes = known.changes
        self.lister = Lister(now_ns)
        self.enters = ways.enters
        self.visitor = ways.visitor
        self.frames: list[_Frame] = []

    def steps(self) -> Generator[None]:
        """Continue the walk, and pause after each directory's files, so that the caller can stop."""
        frames = self.frames
        try:
            self._enter_base()
            yield
            while frames:
                if not self._go_on(frames[-1]):
                    self._close(frames.pop())
                if not self.walk._in_haste:
                    yield
        finally:
            for frame in frames:
                self._close(frame)

    @staticmethod
    def _close(frame: _Frame) -> None:
        if frame.fd >= 0:
            os.close(frame.fd)
            frame.fd = -1

    def _enter_base(self) -> None:
        plan = self.walk.plan
        with Handles(self.root_fd) as handles:
            fd = handles.open_directory(plan.base)
        inside = plan.rules.inside(plan.base)
        prefix = "" if plan.base == ROOT else plan.base + "/"
        frame = _Frame(plan.base, prefix, fd, plan.rules, self._is_same(plan.base))
        self._enter(frame, inside)

    def _go_on(self, frame: _Frame) -> bool:
        """Take entries up to the next directory that can be entered; False when the frame has no more."""
        run: list[str] = []
        for entry in frame.rest:
            if entry[-1] != "/":
                run.append(entry)
                continue
            if run:
                self.walk.add(frame.prefix, run)
                run = []
            if self._try_child(frame, entry):
                return True
        if run:
            self.walk.add(frame.prefix, run)
        return False

    def _try_child(self, frame: _Frame, entry: str) -> bool:
        prefix = frame.prefix + entry
        path = RepoPath(prefix[:-1])
        if self.enters is not None and not self.enters(path):
            return False
        if self.known and self._take_leaf(frame, path, prefix):
            return False
        if len(path_bytes(path)) > MAX_PATH_BYTES:
            self.walk.unreadable.append(path)
            return False
        is_same = frame.is_same and self._is_same(path)
        return self._enter(_Frame(path, prefix, -1, frame.rules, is_same), None)

    def _take_leaf(self, frame: _Frame, path: RepoPath, prefix: str) -> bool:
        """Take the files of an unchanged directory without subdirectories, which most directories are."""
        place = self.known.get(path)
        if place is None or not place.is_leaf or place.above is not frame.rules or not frame.is_same:
            return False
        if not self._is_same(path) or self._is_listed_anew(path):
            return False
        self._write_down(path, prefix, place)
        self.walk.add(prefix, place.kept)
        if self.visitor is not None:
            self.frames.append(_Frame(path, prefix, -1, frame.rules))
            self.visitor.visit(self.walk, path, place.kept, self._opened)
            self._close(self.frames.pop())
        return True

    def _is_same(self, path: RepoPath) -> bool:
        return self.changes is not None and path not in self.changes.trees

    def _is_listed_anew(self, path: RepoPath) -> bool:
        return self.changes is None or path in self.changes.listings

    def _skip(self, path: RepoPath, error: OSError) -> None:
        if error.errno in _EXHAUSTED:
            raise error
        if error.errno not in _GONE:
            self.walk.unreadable.append(path)

    def _enter(self, frame: _Frame, inside: IgnoreRules | None) -> bool:
        """Put the frame on the stack. `inside`: its rules before its own ignore files; None: a child of `frame.rules`.

        False for a directory that cannot be read: the frame is closed then, and it is skipped.
        """
        self.frames.append(frame)
        try:
            place = self._place(frame, inside)
        except OSError as error:
            self._close(self.frames.pop())
            self._skip(frame.path, error)
            return False
        self._write_down(frame.path, frame.prefix, place)
        frame.rules = place.rules
        if place.is_leaf:
            self.walk.add(frame.prefix, place.kept)
        else:
            frame.rest = iter(place.kept)
        if self.visitor is not None:
            self.visitor.visit(self.walk, frame.path, place.kept, self._opened)
        return True

    def _opened(self) -> int:
        """A descriptor of the directory on top of the stack, opened name by name from the last one that is open."""
        frames = self.frames
        last_open = len(frames) - 1
        while frames[last_open].fd < 0:
            last_open -= 1
        for at in range(last_open + 1, len(frames)):
            frames[at].fd = os.open(name_of(frames[at].path), OPEN_DIRECTORY, dir_fd=frames[at - 1].fd)
            if at > OPEN_MAX:
                self._close(frames[at - 1])
        return frames[-1].fd

    def _place(self, frame: _Frame, inside: IgnoreRules | None) -> WalkedDirectory:
        above, path = frame.rules, frame.path
        old = self.known.get(path)
        if old is not None and frame.is_same and not self._is_listed_anew(path):
            listing, sources = old.listing, old.sources
        else:
            if not frame.is_same:
                self.walk.times.pop(path, None)
            listing = self._listed(path, old)
            heeds = listing.marks and not self.walk.plan.include_ignored
            sources = read_sources(frame.fd, listing.marks) if heeds else NO_SOURCES
        if old is not None and old.listing is listing and old.above is above and old.sources == sources:
            return old
        rules = (above.child(name_of(path)) if inside is None else inside).with_sources(sources)
        kept, ignored = rules.divide(listing.entries)
        return WalkedDirectory(listing, above, sources, rules, kept, ignored, is_leaf="/" not in "".join(kept))

    def _listed(self, path: RepoPath, old: WalkedDirectory | None) -> Listing:
        """The listing of a directory: the old one if its stamp shows that it is valid, else a new one.

        The watch is set before.
        """
        fd = self._opened()
        if self.walk.watch is not None:
            self.walk.watch.add(fd, path)
        stamp = stamp_of(os.fstat(fd))
        if old is not None and old.listing.trusted and old.listing.stamp == stamp:
            return old.listing
        return self.lister.list(fd, stamp)

    def _write_down(self, path: RepoPath, prefix: str, place: WalkedDirectory) -> None:
        self.walk.places[path] = place
        for entry in place.ignored:
            if entry[-1] == "/":
                self.walk.pruned.append(RepoPath(prefix + entry[:-1]))
            else:
                self.walk.ignored_files += 1
