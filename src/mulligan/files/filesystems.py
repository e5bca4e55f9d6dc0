"""The files below a folder as a resource. Needs no git, and treats what git ignores or owns like any other file."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self
from uuid import UUID

from mulligan.store.fork_locks import shared_lock
from mulligan.values.clock import Clock, SystemClock
from mulligan.values.digest import digest_of, parse_digest
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, group_of, same_state
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SystemIds
from mulligan.values.paths import RepoPath, ancestors_of, join, path_bytes
from mulligan.values.refusal import Refused
from mulligan.values.state_faults import RestoreFailedError, SnapshotMismatchError
from mulligan.workspace.disk import DRAFT_PREFIX, HostDisk, Image, Steps
from mulligan.workspace.filesystem import FileKind, FilesystemSnapshot, PlainFilesystem
from mulligan.workspace.hard_links import HardLinks, staying_that_file
from mulligan.workspace.keeping import Bodies, Folder, Pack, Tree, Trees, files_below, tree_from_bytes, tree_to_bytes
from mulligan.workspace.places import Spot
from mulligan.workspace.writing import Found, Swap, Wanted, creation_mode


class HostFilesystem(PlainFilesystem):
    """A folder on disk. Safe to use from many threads.

    A snapshot keeps the bytes of every file in `bodies`: by default a file without a name that is gone with the
    process. Give a folder outside the root to restore in a later process what an earlier one has written down as
    JSON; it grows until you delete it. Later snapshots read only what has changed.
    """

    def __init__(
        self,
        _root: str | os.PathLike[str],
        *,
        bodies: Bodies | str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._disk = HostDisk(os.fspath(_root), steps=steps)
        self._end = weakref.finalize(self, self._disk.close)
        self._bodies = self._kept_in(bodies)
        self._clock = clock or SystemClock()
        self._ids = SystemIds()
        self._trees = Trees(self._disk.root.handle, self._bodies, self._clock)
        self._lock = shared_lock()
        self._taken: tuple[Tree, str, str] | None = None
        self._drafts = 0
        self._unfinished: dict[bytes, tuple[RepoPath, Entry]] = {}

    def _kept_in(self, given: Bodies | str | os.PathLike[str] | None) -> Bodies:
        if not isinstance(given, str | os.PathLike):
            return Pack() if given is None else given
        place = os.path.realpath(given)
        if os.path.commonpath([place, self.root]) == self.root:
            raise fault("store_inside_workspace", f"{place} is below {self.root}: snapshots would hold each other.")
        return Folder(place)

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return os.fsdecode(self._disk.root.path)

    def close(self) -> None:
        """Any number of times; also done when nobody holds it any more."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Snapshots.

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Every file below the root as it is now, ignored ones too."""
        with self._lock:
            tree = self._trees.look()
            if self._taken is None or self._taken[0] != tree:
                manifest = self._bodies.store(tree_to_bytes(tree))
                self._taken = (tree, digest_of(tree_to_bytes(tree, times=False)), manifest)
            _, ref, kept = self._taken
        return FilesystemSnapshot(UUID(self._ids.new()), self._clock.now(), ref, self.root, tag, kept)

    def check_restore(self, snapshot: object) -> None:
        """Raises SnapshotMismatchError for a snapshot of another root or kind, RestoreFailedError for one not kept."""
        if not isinstance(snapshot, FilesystemSnapshot) or snapshot.manifest is None:
            raise SnapshotMismatchError(f"A folder is not restored from a {type(snapshot).__name__}.")
        if os.path.realpath(snapshot.root_path) != os.path.realpath(self.root):
            words = f"This is a snapshot of {snapshot.root_path}; this file system is {self.root}."
            raise SnapshotMismatchError(words, root=self.root)
        self._tree_of(snapshot)

    def _tree_of(self, snapshot: FilesystemSnapshot) -> Tree:
        try:
            return tree_from_bytes(self._bodies.read(parse_digest(snapshot.manifest)))
        except RestoreFailedError:
            raise
        except MulliganError as error:
            raise RestoreFailedError(f"This snapshot's files are not kept here: {error.message}") from error

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Every path below the root as it was, and no others; or, if that fails, everything as it is now."""
        self.check_restore(snapshot)
        with self._lock:
            self._tidy_unfinished()
            wanted, now = self._tree_of(snapshot), self._trees.look()
            moves = list(_moves(now, wanted))
            try:
                links = self._links(moves, now, wanted)
                with self._all_or_none(now) as done:
                    for path, target in moves:
                        done.append(path)
                        self._swap(path, now.get(path) or ABSENT, target, links)
                    self._settle_times(done, wanted)
            except (OSError, Refused) as error:
                raise RestoreFailedError(f"The files of {self.root} could not be put back: {error}") from error

    @contextmanager
    def _all_or_none(self, now: Tree) -> Iterator[list[RepoPath]]:
        done: list[RepoPath] = []
        finished = False
        try:
            yield done
            finished = True
        finally:
            stuck = [] if finished else [path for path in reversed(done) if not self._returned(path, now)]
            if stuck:
                raise RestoreFailedError(f"Neither restored nor as they were: {', '.join(stuck)}.", paths=stuck)

    def _returned(self, path: RepoPath, now: Tree) -> bool:
        try:
            self._swap(path, self._entry(path), now.get(path) or ABSENT, HardLinks(self._disk, {}))
        except (OSError, Refused):
            return False
        return True

    def _settle_times(self, done: list[RepoPath], wanted: Tree) -> None:
        """Putting files back has changed the times of the directories they are in."""
        touched = {parent for path in done for parent in ancestors_of(path)} | set(done)
        for path in sorted(touched, key=path_bytes, reverse=True):
            entry = wanted.get(path)
            if isinstance(entry, DirEntry):
                with self._disk.resolve_exactly(path) as spot:
                    self._disk.set_mtime(spot, entry.mtime_ns)

    def _entry(self, path: RepoPath) -> Entry:
        with self._disk.resolve_exactly(path) as spot:
            return self._disk.image(spot).entry

    def _links(self, moves: Sequence[tuple[RepoPath, Entry]], now: Tree, wanted: Tree) -> HardLinks:
        """Of the files that change and have several names: which of the names shall change with them."""
        linked = {path: image for path, _ in moves if (image := self._linked_image(path)) is not None}
        if linked:
            linked |= {path: image for path in now if (image := self._linked_image(path)) is not None}
        aims = {path: (image, staying_that_file(wanted.get(path) or ABSENT, image)) for path, image in linked.items()}
        return HardLinks(self._disk, aims)

    def _linked_image(self, path: RepoPath) -> Image | None:
        """What is there, if it is a file with several names."""
        try:
            with self._disk.resolve_exactly(path) as spot:
                status = os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False)
                several = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
                return self._disk.image(spot, kept=False) if several else None
        except (FileNotFoundError, NotADirectoryError, Refused):
            return None

    def _swap(self, path: RepoPath, now: Entry, target: Entry, links: HardLinks) -> None:
        if same_state(now, target):
            return
        content = self._bodies.read(target.digest) if isinstance(target, FileEntry) else None
        with self._disk.resolve_exactly(path) as spot:
            self._place(spot, now, Wanted(target, content), links)

    def _place(self, spot: Spot, now: Entry, wanted: Wanted, links: HardLinks) -> None:
        draft, finished, inside = self._draft(), False, links.inside(spot.path)
        with links.same_file(spot.path) as same_as:
            swap = Swap(self._disk, spot, draft, now, wanted, self._rescue, insist=True, inside=inside, same_as=same_as)
            self._unfinished[draft] = (spot.path, now)
            try:
                found = swap.run()
                finished = True
            finally:
                if not finished:
                    self._tidy(spot, draft, now)
                self._unfinished.pop(draft, None)
        if isinstance(found, Found):
            raise FileExistsError(f"{spot.path} was changed by somebody else meanwhile.")
        links.was_placed(spot.path)

    def _tidy(self, spot: Spot, draft: bytes, before: Entry) -> None:
        """A step failed. What was set aside returns if its place is empty; other drafts are ours, or kept already."""
        aside = self._disk.image(spot, draft=draft)
        if aside.holds(ABSENT):
            return
        if aside.holds(before):
            with suppress(OSError):
                self._disk.place(spot, draft)
                return
        self._rescue(aside)
        self._disk.discard(spot, draft)

    def _tidy_unfinished(self) -> None:
        """A second interrupt may come while the first one is tidied up after."""
        for draft, (path, before) in list(self._unfinished.items()):
            with suppress(FileNotFoundError, NotADirectoryError, Refused), self._disk.resolve_exactly(path) as spot:
                self._tidy(spot, draft, before)
            self._unfinished.pop(draft, None)

    def _rescue(self, theirs: Image) -> None:
        if theirs.content is not None:
            self._bodies.store(theirs.data)

    def _draft(self) -> bytes:
        self._drafts += 1
        return DRAFT_PREFIX + f"{os.getpid()}-{id(self):x}-{self._drafts}".encode("ascii")

    # The steps.

    def _changing(self) -> threading.RLock:
        return self._lock

    def _kind(self, path: RepoPath) -> FileKind | None:
        try:
            with self._spot(path) as spot:
                mode = os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        return "dir" if stat.S_ISDIR(mode) else "file"

    @contextmanager
    def _spot(self, path: RepoPath, *, final: bool = True) -> Iterator[Spot]:
        """Links are followed inside the root. Raises PermissionError where one leads out."""
        try:
            spot = self._disk.resolve(path, final=final)
        except Refused as refused:
            raise PermissionError(refused.message) from None
        with spot:
            yield spot

    def _load(self, path: RepoPath) -> bytes:
        with self._spot(path) as spot:
            image = self._disk.image(spot)
        if image.content is None:
            raise OSError(f"{path} is a device, FIFO or socket.")
        return image.data

    def _put(self, path: RepoPath, content: bytes) -> None:
        with self._spot(path) as spot:
            image = self._disk.image(spot)
            now = image.entry
            mode = now.mode if isinstance(now, FileEntry) else creation_mode(0o666)
            xattrs = now.xattrs if isinstance(now, FileEntry) else ()
            entry = FileEntry(digest_of(content), len(content), mode, 0, xattrs, group_of(now))
            links = HardLinks(self._disk, {spot.path: (image, entry)})
            self._place(spot, now, Wanted(entry, content), links)
            for name in links.followers(spot.path):
                self._follow(name, now, Wanted(entry, content), spot)

    def _follow(self, name: RepoPath, before: Entry, wanted: Wanted, placed: Spot) -> None:
        """A new file is where the one was that has this name too: the name becomes one of the new."""
        with self._disk.resolve_exactly(name) as spot:
            if self._disk.image(spot, kept=False).holds(before):
                Swap(self._disk, spot, self._draft(), before, wanted, self._rescue, same_as=placed).run()

    def _make_dir(self, path: RepoPath) -> None:
        with self._spot(path) as spot:
            self._disk.make_dir(spot, creation_mode(0o777))

    def _remove(self, path: RepoPath) -> None:
        with self._lock, self._spot(path, final=False) as spot:
            entry = self._disk.image(spot).entry
            if isinstance(entry, DirEntry):
                for name in self._disk.children(spot):
                    self._remove(join(path, name.decode("utf-8", "surrogateescape")))
            self._place(spot, entry, Wanted(ABSENT), HardLinks(self._disk, {}))

    def _is_there(self, path: RepoPath) -> bool:
        try:
            with self._spot(path, final=False) as spot:
                return self._disk.image(spot).entry != ABSENT
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _is_link(self, path: RepoPath) -> bool:
        with self._spot(path, final=False) as spot:
            return stat.S_ISLNK(os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False).st_mode)

    def _names(self, path: RepoPath) -> list[str]:
        with self._spot(path) as spot:
            return [name.decode("utf-8", "surrogateescape") for name in self._disk.children(spot)]

    def _files_below(self, base: RepoPath) -> list[RepoPath]:
        found = files_below(self._disk.root.handle, path_bytes(base))
        return sorted((RepoPath(os.fsdecode(path)) for path in found), key=path_bytes)


def _moves(now: Tree, wanted: Tree) -> Iterator[tuple[RepoPath, Entry]]:
    """What has to become what: first away with what is not wanted, deepest first, then the rest, parents first."""
    for path in sorted(now, key=path_bytes, reverse=True):
        if now[path] is not None and path not in wanted:
            yield path, ABSENT
    for path, target in wanted.items():
        present = now.get(path, ABSENT)
        if target is not None and present is not None and not same_state(present, target):
            yield path, target
