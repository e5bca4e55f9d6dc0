"""The files below a directory, in byte order of their paths, without those that are ignored.

 * Regular files only. Symlinks are neither listed nor followed, to files or to directories; special files are left out.
 * `.git`, directory or file, is never entered or listed. Other hidden files are.
 * A directory that cannot be read, or lies deeper than `DEPTH_MAX`, is skipped and named in `unreadable`.
 * The base itself is asked for by name and so is never ignored; what is below it may be.

A walk goes only as far as somebody asks. One that went to its end can be the start of the next: its listings are taken
over where `stamps` says that they can be trusted, and ignore files are read anew every time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType

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

DEPTH_MAX = 128

_GIT = ".git"
_MARKS = frozenset({_GIT, GIT_IGNORE, OWN_IGNORE})
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

    prefix: str
    fd: int
    rules: IgnoreRules
    rest: Iterator[str]
    is_leaf: bool = False


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
    memo: dict[object, object] = field(default_factory=dict)
    """What somebody made of the files of a complete walk and may ask for again."""
    complete: bool = False
    _steps: Generator[None] | None = None

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
        if self._steps is not None:
            self._steps.close()

    def finish(self) -> Walk:
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
            chain.append(read_sources(handles.directory(directory), tuple(_MARKS)))
            inside = rules if directory == ROOT else rules.child(name_of(directory))
            rules = inside.with_sources(chain[-1])
    return WalkPlan(base, tuple(chain), rules)


def start_walk(
    root_fd: int,
    plan: WalkPlan,
    clock: Clock,
    *,
    known: Mapping[str, Place] = MappingProxyType({}),
    enters: Enters | None = None,
) -> Walk:
    """A walk that has entered its base. `known` are the places of an earlier walk with the same plan.

    Raises OSError when the base is no directory that can be opened.
    """
    walk = Walk(plan)
    now_ns = int(clock.now().timestamp() * 1e9)
    walk._steps = _Walker(root_fd, walk, known=known, now_ns=now_ns, enters=enters).steps()
    next(walk._steps)
    return walk


def still_holds(root_fd: int, walk: Walk) -> bool:
    """Whether walking again would find the very same, asked of every directory and ignore file but not of listings."""
    if walk.unreadable:
        return False
    for path, place in walk.places.items():
        if not place.listing.trusted or _stamp_at(root_fd, path) != place.listing.stamp:
            return False
    return walk.plan.include_ignored or _same_sources(root_fd, walk)


def _stamp_at(root_fd: int, path: str) -> Stamp | None:
    """By path and so perhaps through a symlink, but the inode it leads to is compared, and its parent's stamp too."""
    try:
        return stamp_of(os.stat(path, dir_fd=root_fd, follow_symlinks=False))
    except OSError:
        return None


def _same_sources(root_fd: int, walk: Walk) -> bool:
    marked = [(path, place) for path, place in walk.places.items() if place.listing.marks]
    with Handles(root_fd) as handles:
        try:
            return all(
                read_sources(handles.directory(path), place.listing.marks) == place.sources for path, place in marked
            )
        except OSError:
            return False


class _Walker:
    def __init__(
        self, root_fd: int, walk: Walk, *, known: Mapping[str, Place], now_ns: int, enters: Enters | None
    ) -> None:
        self.root_fd = root_fd
        self.walk = walk
        self.known = known
        self.now_ns = now_ns
        self.enters = enters
        self.local_devices: dict[int, bool] = {}

    def steps(self) -> Generator[None]:
        """Walk on, pausing after each directory's files, so that a caller who has enough can stop."""
        frames: list[_Frame] = []
        try:
            frames.append(self._enter_base())
            yield
            while frames:
                child = self._go_on(frames[-1], len(frames))
                if child is not None:
                    frames.append(child)
                else:
                    os.close(frames.pop().fd)
                yield
        finally:
            for frame in frames:
                os.close(frame.fd)

    def _enter_base(self) -> _Frame:
        plan = self.walk.plan
        with Handles(self.root_fd) as handles:
            fd = os.dup(handles.directory(plan.base))
        inside = plan.rules if plan.base == ROOT else plan.rules.child(name_of(plan.base))
        return self._enter(fd, plan.base, plan.rules, inside)

    def _go_on(self, frame: _Frame, depth: int) -> _Frame | None:
        """Take entries up to the next directory that can be entered; None when the frame has no more."""
        prefix, files = frame.prefix, self.walk.files
        if frame.is_leaf:
            files += [RepoPath(prefix + entry) for entry in frame.rest]
            return None
        for entry in frame.rest:
            if entry[-1] != "/":
                files.append(RepoPath(prefix + entry))
                continue
            child = self._try_child(frame, entry[:-1], depth)
            if child is not None:
                return child
        return None

    def _try_child(self, frame: _Frame, name: str, depth: int) -> _Frame | None:
        path = RepoPath(frame.prefix + name)
        if self.enters is not None and not self.enters(path):
            return None
        try:
            if depth >= DEPTH_MAX:
                raise OSError(errno.ENAMETOOLONG, "too deep", path)
            fd = os.open(name, OPEN_DIRECTORY, dir_fd=frame.fd)
        except OSError as error:
            self._skip(path, error)
            return None
        return self._enter(fd, path, frame.rules, None)

    def _skip(self, path: RepoPath, error: OSError) -> None:
        if error.errno in _EXHAUSTED:
            raise error
        if error.errno not in _GONE:
            self.walk.unreadable.append(path)

    def _enter(self, fd: int, path: RepoPath, above: IgnoreRules, inside: IgnoreRules | None) -> _Frame:
        """A frame that owns `fd`. `inside`: the rules within before its ignore files; None means a child of `above`."""
        try:
            place = self._place(fd, path, above, inside)
        except OSError as error:
            self._skip(path, error)
            return _Frame("", fd, above, iter(()))
        prefix = "" if path == ROOT else path + "/"
        self._note(prefix, place)
        self.walk.places[path] = place
        return _Frame(prefix, fd, place.rules, iter(place.kept), is_leaf=place.is_leaf)

    def _place(self, fd: int, path: RepoPath, above: IgnoreRules, inside: IgnoreRules | None) -> Place:
        old = self.known.get(path)
        stamp = stamp_of(os.fstat(fd))
        trusted = old is not None and old.listing.trusted and old.listing.stamp == stamp
        listing = old.listing if old is not None and trusted else self._list(fd, stamp)
        heeds = listing.marks and not self.walk.plan.include_ignored
        sources = read_sources(fd, listing.marks) if heeds else NO_SOURCES
        if old is not None and old.listing is listing and old.above is above and old.sources == sources:
            return old
        rules = (above.child(name_of(path)) if inside is None else inside).with_sources(sources)
        kept, ignored = rules.divide(listing.entries)
        return Place(listing, above, sources, rules, kept, ignored, is_leaf="/" not in "".join(kept))

    def _note(self, prefix: str, place: Place) -> None:
        for entry in place.ignored:
            if entry[-1] == "/":
                self.walk.pruned.append(RepoPath(prefix + entry[:-1]))
            else:
                self.walk.ignored_files += 1

    def _list(self, fd: int, stamp: Stamp) -> Listing:
        with os.scandir(fd) as entries:
            names = {
                entry.name if entry.is_file(follow_symlinks=False) else entry.name + "/"
                for entry in entries
                if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            }
        marks = tuple(mark for mark in _MARKS if mark in names or mark + "/" in names)
        trusted = was_at_rest(stamp, self.now_ns) and self._is_local(fd, stamp) and stamp_of(os.fstat(fd)) == stamp
        return Listing(stamp, trusted, tuple(_in_byte_order(names - {_GIT, _GIT + "/"})), marks)

    def _is_local(self, fd: int, stamp: Stamp) -> bool:
        if stamp.device not in self.local_devices:
            self.local_devices[stamp.device] = is_local(fd)
        return self.local_devices[stamp.device]


def _in_byte_order(names: set[str]) -> list[str]:
    """Code points sort as their UTF-8 does, except for the surrogates that stand for other bytes."""
    if "".join(names).isascii():
        return sorted(names)
    return sorted(names, key=lambda name: name.encode("utf-8", "surrogateescape"))
