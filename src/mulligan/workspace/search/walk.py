"""The files below a directory, in byte order of their paths, without those that are ignored.

 * Regular files only. Symlinks are neither listed nor followed, to files or to directories; special files are left out.
 * `.git`, directory or file, is never entered or listed. Other hidden files are.
 * A directory that cannot be read, or lies deeper than `DEPTH_MAX`, is skipped and named in `unreadable`.
 * The base itself is asked for by name and so is never ignored; what is below it may be.

A walk goes only as far as somebody asks. One that went to its end can be the start of the next: a directory is not even
opened when a watch vouches for it, and not listed again where `stamps` says that the old listing can be trusted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Protocol

from mulligan.values.clock import Clock
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, name_of
from mulligan.workspace.search.handles import OPEN_DIRECTORY, Handles
from mulligan.workspace.search.ignore import (
    GIT_IGNORE,
    NO_SOURCES,
    OWN_IGNORE,
    IgnoreRules,
    IgnoreSources,
    read_sources,
)
from mulligan.workspace.search.stamps import Stamp, is_local, stamp_of, was_at_rest
from mulligan.workspace.search.watching import Changes, Watch

DEPTH_MAX = 128

_GIT = ".git"
MARKS = (_GIT, GIT_IGNORE, OWN_IGNORE)
"""Entries that say something about the others."""
_MARKS_AS_LISTED = frozenset([*MARKS, *(mark + "/" for mark in MARKS)])
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

Enters = Callable[[str], bool]
"""Whether a walk has any business inside a directory, given its path from the root."""


@dataclass(slots=True, frozen=True, eq=False)
class Listing:
    """What a directory held: entries in walking order, directories with a slash; and which marks were among them."""

    stamp: Stamp
    trusted: bool
    entries: tuple[str, ...]
    marks: tuple[str, ...]


@dataclass(slots=True, frozen=True, eq=False)
class Place:
    """A directory as walked. `above`: the rules in force around it; `rules`: with what its own ignore files say."""

    listing: Listing
    above: IgnoreRules
    sources: IgnoreSources
    rules: IgnoreRules
    kept: tuple[str, ...]
    ignored: tuple[str, ...]
    is_leaf: bool
    """Whether no directory was kept."""


class Visitor(Protocol):
    """Somebody who looks into every directory while it is open."""

    def visit(self, walk: Walk, path: str, kept: tuple[str, ...], opened: Callable[[], int]) -> None:
        """`opened` gives a descriptor of the directory; it may raise OSError."""


@dataclass(slots=True, frozen=True)
class WalkPlan:
    """What is walked: `chain` are the ignore files around the base, the root's first, and `rules` what they say."""

    base: RepoPath
    chain: tuple[IgnoreSources, ...]
    rules: IgnoreRules
    include_ignored: bool = False


@dataclass(slots=True)
class _Frame:
    """A directory being walked: its path with a slash, its descriptor, its rules and the entries still to come."""

    path: RepoPath
    prefix: str
    fd: int
    """-1 while nobody needed it."""
    rules: IgnoreRules
    rest: Iterator[str]
    is_leaf: bool = False
    is_same: bool = False
    """Whether this is the directory that was known by this path before, so that a watch on it counts."""


@dataclass(slots=True)
class Walk:
    """A walk under way, or at its end when `complete`. Iterating goes on as far as needed; leaving `with` stops it."""

    plan: WalkPlan
    files: list[RepoPath] = field(default_factory=list)
    unreadable: list[RepoPath] = field(default_factory=list)
    pruned: list[RepoPath] = field(default_factory=list)
    """Directories left out as ignored."""
    ignored_files: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    times: dict[str, dict[str, int]] = field(default_factory=dict)
    """When files were modified, as far as somebody asked, by directory and name. Holds for as long as the walk does."""
    memo: dict[object, object] = field(default_factory=dict)
    """What somebody made of a complete walk and may ask for again."""
    watch: Watch | None = None
    number: int = 0
    """The time at which the watch was last asked before this walk began."""
    complete: bool = False
    _steps: Generator[None] | None = None
    _in_haste: bool = False

    def __iter__(self) -> Iterator[RepoPath]:
        at = 0
        going = True
        while going:
            going = at < len(self.files) or self._advance()
            for path in self.files[at:]:
                at += 1
                yield path

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
        """One directory more; False at the end."""
        if self._steps is None:
            return False
        try:
            next(self._steps)
        except StopIteration:
            self.complete, self._steps = True, None
        return not self.complete


def plan_walk(root_fd: int, base: RepoPath, *, include_ignored: bool = False) -> WalkPlan:
    """Read the ignore files around the base. Raises OSError when a directory above the base cannot be opened."""
    chain: list[IgnoreSources] = []
    rules = IgnoreRules()
    if base == ROOT or include_ignored:
        return WalkPlan(base, (), rules, include_ignored)
    with Handles(root_fd) as handles:
        for directory in reversed(ancestors_of(base)):
            chain.append(read_sources(handles.directory(directory), MARKS))
            inside = rules if directory == ROOT else rules.child(name_of(directory))
            rules = inside.with_sources(chain[-1])
    return WalkPlan(base, tuple(chain), rules)


@dataclass(slots=True, frozen=True)
class Known:
    """What an earlier walk with the same plan found. With `changes`, what is not among them is as it was."""

    places: Mapping[str, Place] = field(default_factory=lambda: MappingProxyType({}))
    changes: Changes | None = None


@dataclass(slots=True, frozen=True)
class Ways:
    """How a walk goes: into which directories, and who looks into them. A tree that is looked into is watched too."""

    enters: Enters | None = None
    visitor: Visitor | None = None

    @property
    def goes_everywhere(self) -> bool:
        return self.enters is None


ALL_WAYS = Ways()
UNKNOWN = Known()


def start_walk(root_fd: int, walk: Walk, clock: Clock, *, known: Known = UNKNOWN, ways: Ways = ALL_WAYS) -> Walk:
    """Enter the base of a walk that has not begun.

    Raises OSError when the base is no directory that can be opened.
    """
    now_ns = int(clock.now().timestamp() * 1e9)
    walk._steps = _Walker(root_fd, walk, known=known, now_ns=now_ns, ways=ways).steps()
    next(walk._steps)
    return walk


def still_holds(root_fd: int, walk: Walk) -> bool:
    """Whether walking again would find the very same, asked of every directory and ignore file but not of listings."""
    if walk.unreadable:
        return False
    for path, place in walk.places.items():
        if not place.listing.trusted or _stamp_at(root_fd, path) != place.listing.stamp:
            return False
    return not changed_sources(root_fd, walk)


def _stamp_at(root_fd: int, path: str) -> Stamp | None:
    """By path and so perhaps through a symlink, but the inode it leads to is compared, and its parent's stamp too."""
    try:
        return stamp_of(os.stat(path, dir_fd=root_fd, follow_symlinks=False))
    except OSError:
        return None


def changed_sources(root_fd: int, walk: Walk) -> list[str]:
    """The directories whose ignore files say something else by now. They are read: no stamp or watch is trusted."""
    if walk.plan.include_ignored:
        return []
    changed = []
    with Handles(root_fd) as handles:
        for path, place in walk.places.items():
            if place.listing.marks and not _has_sources(handles, path, place):
                changed.append(path)
    return changed


def _has_sources(handles: Handles, path: str, place: Place) -> bool:
    try:
        return read_sources(handles.directory(path), place.listing.marks) == place.sources
    except OSError:
        return False


class _Walker:
    def __init__(self, root_fd: int, walk: Walk, *, known: Known, now_ns: int, ways: Ways) -> None:
        self.root_fd = root_fd
        self.walk = walk
        self.known = known.places
        self.changes = known.changes
        self.now_ns = now_ns
        self.enters = ways.enters
        self.visitor = ways.visitor
        self.frames: list[_Frame] = []
        self.local_devices: dict[int, bool] = {}

    def steps(self) -> Generator[None]:
        """Walk on, pausing after each directory's files, so that a caller who has enough can stop."""
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

    def _enter_base(self) -> None:
        plan = self.walk.plan
        with Handles(self.root_fd) as handles:
            fd = handles.open_directory(plan.base)
        inside = plan.rules if plan.base == ROOT else plan.rules.child(name_of(plan.base))
        prefix = "" if plan.base == ROOT else plan.base + "/"
        frame = _Frame(plan.base, prefix, fd, plan.rules, iter(()), is_same=self._is_same(plan.base))
        self._enter(frame, inside)

    def _go_on(self, frame: _Frame) -> bool:
        """Take entries up to the next directory that can be entered; False when the frame has no more."""
        prefix, files = frame.prefix, self.walk.files
        if frame.is_leaf:
            files += [RepoPath(prefix + entry) for entry in frame.rest]
            return False
        for entry in frame.rest:
            if entry[-1] != "/":
                files.append(RepoPath(prefix + entry))
            elif self._try_child(frame, entry):
                return True
        return False

    def _try_child(self, frame: _Frame, entry: str) -> bool:
        prefix = frame.prefix + entry
        path = RepoPath(prefix[:-1])
        if self.enters is not None and not self.enters(path):
            return False
        if self._take_leaf(frame, path, prefix):
            return False
        if len(self.frames) >= DEPTH_MAX:
            self.walk.unreadable.append(path)
            return False
        is_same = frame.is_same and self._is_same(path)
        child = _Frame(path, prefix, -1, frame.rules, iter(()), is_same=is_same)
        return self._enter(child, None)

    def _take_leaf(self, frame: _Frame, path: RepoPath, prefix: str) -> bool:
        """Take the files of a directory that is as it was and has no other in it: most have none."""
        place = self.known.get(path)
        if place is None or not place.is_leaf or place.above is not frame.rules or not frame.is_same:
            return False
        if not self._is_same(path) or self._is_listed_anew(path):
            return False
        self._write_down(path, prefix, place)
        self.walk.files += [RepoPath(prefix + entry) for entry in place.kept]
        if self.visitor is not None:
            self.frames.append(_Frame(path, prefix, -1, frame.rules, iter(())))
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
        frame.rules, frame.rest, frame.is_leaf = place.rules, iter(place.kept), place.is_leaf
        if self.visitor is not None:
            self.visitor.visit(self.walk, frame.path, place.kept, self._opened)
        return True

    def _opened(self) -> int:
        """A descriptor of the directory on top of the stack, opened name by name from the last one that is open."""
        frames = self.frames
        at = len(frames) - 1
        while frames[at].fd < 0:
            at -= 1
        for above, frame in zip(frames[at:], frames[at + 1 :], strict=False):
            frame.fd = os.open(name_of(frame.path), OPEN_DIRECTORY, dir_fd=above.fd)
        return frames[-1].fd

    def _place(self, frame: _Frame, inside: IgnoreRules | None) -> Place:
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
        return Place(listing, above, sources, rules, kept, ignored, is_leaf="/" not in "".join(kept))

    def _listed(self, path: RepoPath, old: Place | None) -> Listing:
        """As it was, if its stamp can be trusted to say so, else read anew. Watched from before that on."""
        fd = self._opened()
        if self.walk.watch is not None:
            self.walk.watch.add(fd, path)
        stamp = stamp_of(os.fstat(fd))
        if old is not None and old.listing.trusted and old.listing.stamp == stamp:
            return old.listing
        return self._list(fd, stamp)

    def _write_down(self, path: RepoPath, prefix: str, place: Place) -> None:
        self.walk.places[path] = place
        for entry in place.ignored:
            if entry[-1] == "/":
                self.walk.pruned.append(RepoPath(prefix + entry[:-1]))
            else:
                self.walk.ignored_files += 1

    def _list(self, fd: int, stamp: Stamp) -> Listing:
        """A change since the stamp was taken makes the next one differ, whether this listing has seen it or not."""
        names: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    names.append(entry.name + "/")
        found = _MARKS_AS_LISTED.intersection(names)
        marks = tuple(sorted({mark.rstrip("/") for mark in found})) if found else ()
        if _GIT in marks:
            names = [name for name in names if name not in (_GIT, _GIT + "/")]
        trusted = was_at_rest(stamp, self.now_ns) and self._is_local(fd, stamp)
        return Listing(stamp, trusted, _in_byte_order(names), marks)

    def _is_local(self, fd: int, stamp: Stamp) -> bool:
        if stamp.device not in self.local_devices:
            self.local_devices[stamp.device] = is_local(fd)
        return self.local_devices[stamp.device]


def _in_byte_order(names: list[str]) -> tuple[str, ...]:
    """Code points sort as their UTF-8 does, except for the surrogates that stand for other bytes."""
    if "".join(names).isascii():
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: name.encode("utf-8", "surrogateescape")))
