"""The states that a disk can leave after a power cut, rebuilt from a recorded history.

In `process` mode metadata operations reach the disk in order (a sync of anything brings all earlier ones there), and
the content of a file that was not synced may be lost. In `power` mode metadata operations that were not synced may also
be lost or change places; a rename from one folder to another may reach only the folder that was synced.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

from tests.power.recorder import CallSite, Event

Mode = Literal["process", "power"]
ROOT = 0
SECTOR_BYTES = 512


class Node(NamedTuple):
    """What a path holds."""

    kind: str
    mode: int
    content: bytes
    mtime_ns: int = 0
    xattrs: tuple[tuple[str, bytes], ...] = ()
    inode: int = 0


class Names(NamedTuple):
    """Names that one operation gave or took: the folder, the name, and the file or None."""

    at: int
    changes: tuple[tuple[int, str, int | None], ...]


class Data(NamedTuple):
    at: int
    offset: int
    data: bytes
    mtime_ns: int


class Size(NamedTuple):
    at: int
    size: int
    mtime_ns: int


class Meta(NamedTuple):
    at: int
    mode: int
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...]


class Sync(NamedTuple):
    """`file` None: everything."""

    at: int
    file: int | None
    sites: tuple[CallSite, ...]


@dataclass
class File:
    """A file, folder or link with all that was ever done to it."""

    kind: str
    mode: int
    target: bytes
    inode: int
    content: list[Data | Size] = field(default_factory=list)
    metadata: list[Meta] = field(default_factory=list)
    now: bytearray = field(default_factory=bytearray)
    mode_now: int = 0

    def apply(self, change: Data | Size) -> None:
        self.content.append(change)
        _apply(self.now, change)


class Version(NamedTuple):
    """From `at` on, a path held this content (None: nothing), in that file. `foreign`: a command put it there."""

    at: int
    file: int | None
    content: bytes | None
    foreign: bool


@dataclass
class Step:
    """One step of the history. `end` is None for a call that its process did not survive."""

    kind: str
    begin: int
    end: int | None = None
    calls: tuple[str, ...] = ()
    before: dict[str, Node] = field(default_factory=dict)
    after: dict[str, Node] | None = None
    forks: dict[str, Node] = field(default_factory=dict)


def _apply(content: bytearray, change: Data | Size) -> None:
    if isinstance(change, Size):
        if len(content) > change.size:
            del content[change.size :]
        else:
            content.extend(bytes(change.size - len(content)))
        return
    if len(content) < change.offset:
        content.extend(bytes(change.offset - len(content)))
    content[change.offset : change.offset + len(change.data)] = change.data


class Recording:
    """A history's operations by file instead of by path, with the versions of each path and the steps."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.files: list[File] = [File("dir", 0o700, b"", 0)]
        self.names: list[Names] = []
        self.syncs: list[Sync] = []
        self.steps: list[Step] = []
        self.versions: dict[str, list[Version]] = defaultdict(list)
        self.length = len(events)
        self._children: dict[int, dict[str, int]] = {ROOT: {}}
        self._foreign = False
        self._settled: dict[str, Node] = {}
        for at, event in enumerate(events):
            self._at = at
            getattr(self, "_" + event[0].replace(".", "_"))(*event[1:])

    # One method for each event.

    def _start(self, nodes: dict[str, tuple[str, int, bytes, int, int]]) -> None:
        self._at = -1
        for place, node in nodes.items():
            self._command_set(place, *node)
        self._at = 0
        self._sync("*", ())
        self._settled = self.tree()
        for versions in self.versions.values():
            versions[:] = [versions[-1]._replace(foreign=False)]

    def _begin(self, kind: str) -> None:
        self.steps.append(Step(kind, self._at, before=self._settled))

    def _end(self, kind: str, calls: tuple[str, ...]) -> None:
        step = self.steps[-1]
        assert step.kind == kind
        step.end, step.calls = self._at, calls
        for place in list(self.versions):
            self._note_if_changed(place)
        self._settled = step.after = self.tree()
        step.forks = self.tree("state/forks")

    def _create(self, place: str, kind: str, mode: int, target: bytes, inode: int) -> None:
        self.files.append(File(kind, mode, target, inode, mode_now=mode))
        made = len(self.files) - 1
        if kind == "dir":
            self._children[made] = {}
        self._name((place, made))

    def _write(self, place: str, offset: int, data: bytes, mtime_ns: int) -> None:
        self._file(place).apply(Data(self._at, offset, data, mtime_ns))
        if self._foreign:
            self._note(place)

    def _truncate(self, place: str, size: int, mtime_ns: int) -> None:
        self._file(place).apply(Size(self._at, size, mtime_ns))

    def _remove(self, place: str) -> None:
        self._name((place, None))

    def _rename(self, source: str | None, target: str | None) -> None:
        if source is None or target is None:
            raise AssertionError(f"a rename from or to outside: {source} {target}")
        if self._find(source) != self._find(target):
            self._name((source, None), (target, self._known(source)))

    def _exchange(self, one: str, other: str) -> None:
        self._name((one, self._known(other)), (other, self._known(one)))

    def _link(self, source: str, target: str) -> None:
        self._name((target, self._known(source)))

    def _meta(self, place: str, metadata: tuple[int, int, tuple[tuple[str, bytes], ...]]) -> None:
        file = self._file(place)
        file.metadata.append(Meta(self._at, *metadata))
        file.mode_now = metadata[0]
        self._note_if_changed(place)

    def _sync(self, place: str, sites: tuple[CallSite, ...]) -> None:
        self.syncs.append(Sync(self._at, None if place == "*" else self._known(place), sites))
        self._note_if_changed(place)

    def _command_set(self, place: str, kind: str, mode: int, content: bytes, inode: int, mtime_ns: int) -> None:
        known = self._find(place)
        self._foreign = True
        is_same = known is not None and (self.files[known].kind, self.files[known].inode) == (kind, inode)
        if not is_same and not (kind == "dir" and known is not None and self.files[known].kind == "dir"):
            self._create(place, kind, mode, content if kind == "link" else b"", inode)
        if kind == "file":
            self._write_new_bytes(place, content, mtime_ns)
        self._meta(place, (mode, 0 if kind == "dir" else mtime_ns, ()))
        self._foreign = False

    def _write_new_bytes(self, place: str, content: bytes, mtime_ns: int) -> None:
        """What a command wrote: at the end of the file, or all of it anew."""
        earlier = bytes(self._file(place).now)
        if not content.startswith(earlier):
            self._truncate(place, 0, mtime_ns)
            earlier = b""
        if content != earlier:
            self._write(place, len(earlier), content[len(earlier) :], mtime_ns)

    def _command_remove(self, place: str) -> None:
        self._foreign = True
        if self._find(place) is not None:
            self._remove(place)
        self._foreign = False

    # Names.

    def _name(self, *given: tuple[str, int | None]) -> None:
        changes = []
        for place, file in given:
            folder = self._known(os.path.dirname(place))
            name = os.path.basename(place)
            changes.append((folder, name, file))
            if file is None:
                self._children[folder].pop(name, None)
            else:
                self._children[folder][name] = file
        self.names.append(Names(self._at, tuple(changes)))
        for place, _ in given:
            self._note_all(place)

    def _note_all(self, place: str) -> None:
        """The versions of a path and of all below it."""
        self._note(place)
        found = self._find(place)
        for name in self._children.get(found, {}) if found is not None else ():
            self._note_all(f"{place}/{name}")

    def _note(self, place: str) -> None:
        if place.startswith("tree/"):
            found = self._find(place)
            self.versions[place].append(Version(self._at, found, self._content_of(found), self._foreign))

    def _content_of(self, number: int | None) -> bytes | None:
        if number is None:
            return None
        file = self.files[number]
        return bytes(file.now) if file.kind == "file" else file.kind.encode() + file.target

    def _note_if_changed(self, place: str) -> None:
        """A file that was written in place: its content counts once it is whole, which no single write tells."""
        known = self.versions.get(place)
        if known and (known[-1].file, known[-1].content) != (found := self._find(place), self._content_of(found)):
            self._note(place)

    def _find(self, place: str) -> int | None:
        found: int | None = ROOT
        for part in place.split("/") if place not in ("", ".") else ():
            found = self._children.get(found, {}).get(part) if found is not None else None
        return found

    def _known(self, place: str) -> int:
        found = self._find(place)
        if found is None:
            raise AssertionError(f"the recorder missed how {place} came to be (event {self._at})")
        return found

    def _file(self, place: str) -> File:
        return self.files[self._known(place)]

    def tree(self, top: str = "tree") -> dict[str, Node]:
        """What is below a folder now."""
        found: dict[str, Node] = {}
        folder = self._find(top)
        if folder is None:
            return found
        for place, number in _below(self._children, folder, top):
            file = self.files[number]
            found[place] = Node(file.kind, file.mode_now, bytes(file.now) if file.kind == "file" else file.target)
        return found

    def step_at(self, cut: int) -> tuple[int, Step] | None:
        """The step that was under way at a moment, or the last one before it."""
        found = [(number, step) for number, step in enumerate(self.steps) if step.begin < cut]
        return found[-1] if found else None


def _below(children: dict[int, dict[str, int]], folder: int, place: str) -> Iterator[tuple[str, int]]:
    for name, number in children.get(folder, {}).items():
        inner = f"{place}/{name}" if place else name
        yield inner, number
        yield from _below(children, number, inner)


Dropped = Callable[[Sync], bool]


@dataclass
class PowerCut:
    """One cut: when it comes, and by which randomness the disk loses what it may."""

    recording: Recording
    mode: Mode
    at: int
    random: Random
    dropped: Dropped = field(default=lambda _: False)
    is_worst: bool = False
    """The disk loses everything that it may lose."""

    def __post_init__(self) -> None:
        self._synced: dict[int, int] = {}
        self._all_synced = 0
        self.last_sync = 0
        for sync in self.recording.syncs:
            if sync.at >= self.at or self.dropped(sync):
                continue
            self.last_sync = sync.at
            if sync.file is None:
                self._all_synced = sync.at
            else:
                self._synced[sync.file] = sync.at
        # In process mode, how far the journal of the file system had come.
        is_behind = not self.is_worst and self.random.random() < 0.4
        self.metadata_until = self.random.randint(self.last_sync, self.at) if is_behind else self.at
        self._policy = "none" if self.is_worst else self.random.choice(("all", "none", "some", "some", "prefix"))

    def state(self) -> dict[str, Node]:
        """What the next boot finds."""
        children: dict[int, dict[str, int]] = defaultdict(dict)
        for names in self.recording.names:
            if names.at >= self.at:
                break
            for folder, name, file in self._kept(names):
                if file is None:
                    children[folder].pop(name, None)
                else:
                    children[folder][name] = file
        contents: dict[int, Node] = {}
        found: dict[str, Node] = {}
        for place, number in _reachable(children):
            if number not in contents:
                contents[number] = self._node(number)
            found[place] = contents[number]
        return found

    def synced_at(self, file: int) -> int:
        return max(self._synced.get(file, -1), self._all_synced)

    def _kept(self, names: Names) -> Iterable[tuple[int, str, int | None]]:
        if self.mode == "process":
            return names.changes if names.at < self.metadata_until else ()
        safe = [change for change in names.changes if self.synced_at(change[0]) > names.at]
        if len(safe) == len(names.changes) or self._is_lucky(names.at):
            return names.changes
        return safe

    def _is_lucky(self, at: int) -> bool:
        """Whether an operation that was not synced has reached the disk nevertheless."""
        if self._policy == "some":
            return self.random.random() < 0.5
        if self._policy == "prefix":
            return at < self.metadata_until
        return self._policy == "all"

    def _has_come(self, at: int, file: int) -> bool:
        """A change of a file's metadata."""
        if self.mode == "process":
            return at < self.metadata_until
        return at < self.synced_at(file) or self._is_lucky(at)

    def _node(self, number: int) -> Node:
        file = self.recording.files[number]
        mode, mtime_ns, xattrs = file.mode, 0, tuple[tuple[str, bytes], ...]()
        for change in sorted([*file.metadata, *file.content], key=lambda one: one.at):
            if change.at >= self.at or not self._has_come(change.at, number):
                continue
            mtime_ns = change.mtime_ns
            if isinstance(change, Meta):
                mode, xattrs = change.mode, change.xattrs
        content = self._content(number, file) if file.kind == "file" else file.target
        return Node(file.kind, mode, content, mtime_ns, xattrs, file.inode)

    def _content(self, number: int, file: File) -> bytes:
        """What was synced, and of what came later any part: a disk writes sectors, in any order."""
        synced = self.synced_at(number)
        content = bytearray()
        for change in (change for change in file.content if change.at < synced):
            _apply(content, change)
        waiting = [change for change in file.content if synced <= change.at < self.at]
        if not waiting:
            return bytes(content)
        policies = ("all", "none", "none", "prefix", "some", "zeros")
        policy = "none" if self.is_worst else self.random.choice(policies)
        for change in waiting if policy == "none" else ():
            # A truncation is an operation on metadata.
            if isinstance(change, Size) and self._has_come(change.at, number):
                _apply(content, change)
        if policy == "none":
            return bytes(content)
        later = bytearray(content)
        for change in waiting[: self.random.randint(1, len(waiting))] if policy in ("prefix", "some") else waiting:
            _apply(later, change)
        return _mixed(content, later, self._sectors(policy, len(later)))

    def _sectors(self, policy: str, size: int) -> Iterator[bool]:
        """Whether the disk has the new bytes of each sector."""
        end = self.random.randint(0, size) if policy == "prefix" else size
        for at in range(0, size, SECTOR_BYTES):
            yield policy != "zeros" and at <= end and (policy != "some" or self.random.random() < 0.5)


def _mixed(earlier: bytes | bytearray, later: bytes | bytearray, has_come: Iterable[bool]) -> bytes:
    """Of each sector the new bytes, or the old ones and then zeros."""
    old = bytes(earlier[: len(later)]).ljust(len(later), b"\0")
    sectors = (
        (later if new else old)[at : at + SECTOR_BYTES]
        for at, new in zip(range(0, len(later), SECTOR_BYTES), has_come, strict=True)
    )
    return b"".join(sectors)


def _reachable(children: dict[int, dict[str, int]]) -> Iterator[tuple[str, int]]:
    """Every path from the top; a folder that a lost rename left in two places or in itself is followed once."""
    seen = {ROOT}

    def walk(folder: int, place: str) -> Iterator[tuple[str, int]]:
        for name, number in children.get(folder, {}).items():
            inner = f"{place}/{name}" if place else name
            if number in children and number in seen:
                continue
            seen.add(number)
            yield inner, number
            yield from walk(number, inner)

    return walk(ROOT, "")


def materialise(base: str, nodes: dict[str, Node]) -> dict[int, int]:
    """Make the folder hold exactly these files. `base` and `base/tree` stay the directories that they are.

    Returns which inode each new file has in the recording: it may be known to the store by that.
    """
    tree = os.path.join(base, "tree")
    for folder in (base, tree):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if path == tree:
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    for place, node in nodes.items():
        _put(os.path.join(base, place), node)
    inodes = {}
    for place, node in reversed(nodes.items()):
        path = os.path.join(base, place)
        if node.mtime_ns:
            os.utime(path, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)
        if path != tree:
            inodes[os.lstat(path).st_ino] = node.inode
    return inodes


def _put(path: str, node: Node) -> None:
    if node.kind == "link":
        os.symlink(node.content, path)
        return
    if node.kind == "dir":
        os.makedirs(path, exist_ok=True)
    else:
        with open(path, "wb") as file:
            file.write(node.content)
    for name, value in node.xattrs:
        os.setxattr(path, name, value)
    os.chmod(path, node.mode)


def read_tree(base: str, top: str = "tree") -> dict[str, Node]:
    """What is below a folder on the real disk: kinds, modes and contents."""
    found: dict[str, Node] = {}
    for folder, folders, files in os.walk(os.path.join(base, top)):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            if not name.endswith("-shm"):
                found[os.path.relpath(path, base)] = _node_at(path)
    return found


def _node_at(path: str) -> Node:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return Node("link", 0o777, os.fsencode(os.readlink(path)))
    if stat.S_ISDIR(status.st_mode):
        return Node("dir", stat.S_IMODE(status.st_mode), b"")
    with open(path, "rb") as file:
        return Node("file", stat.S_IMODE(status.st_mode), file.read())


__all__: Sequence[Any] = ["Mode", "Node", "PowerCut", "Recording", "Step", "Sync", "materialise", "read_tree"]
