"""What every file below a root was when it was last looked at, kept between calls that we only observe.

An agent that is not our child changes files by itself: there is a moment before and a moment after, and what was there
before has to be known already. So the tree is looked at once as a whole, and from then on only what moved is read.

1. What a path is said to have been, it was: it was read while its stamp was the one that the look had found.
2. A difference is given once, by the look that finds it; whoever looks puts it to somebody's account.
3. What nobody could read in time, or what is too large to keep, is unknown (`before` None), never guessed.
4. The rows in the store follow in the transaction that puts the differences on record, so a process that dies between
   two looks loses none: the next one goes on from the rows.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from mulligan.history.baseline import FILE_MAX_BYTES, WORKSPACE_MAX_BYTES, clean_files, git_contents, lacks
from mulligan.history.kept_rows import KeptRows
from mulligan.history.lifting import is_shut, opened_up
from mulligan.history.putting_back import Site
from mulligan.history.repositories import is_object, repository_of
from mulligan.history.shut_folders import ShutFolders
from mulligan.store.blobs import SMALL_BYTES
from mulligan.store.protocol import Tx
from mulligan.values.clock import monotonic_s
from mulligan.values.content import Content
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, Entry, FileEntry, same_state
from mulligan.values.faults import MulliganError
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import RepoPath
from mulligan.values.plain import plain
from mulligan.workspace.disk import Image
from mulligan.workspace.exec.scan import Stamp, StatIndex, Statuses, stamp_now, stamp_of, status_of, statuses, twins
from mulligan.workspace.exec.watch import Watcher

TOUCHED_MAX_BYTES = 64 * MIB_BYTES
"""A file that changed inside a window is kept up to this size, though it would not have been before."""

WATCHED_FROM_PATHS = 4_000
"""Below this, looking at every stamp is quick enough that nothing has to be taken on the kernel's word."""

_GIT = b"/.git"
_OBJECTS = b"/.git/objects"
_BATCH = 200


@plain(slots=True, frozen=True)
class Drift:
    """A path that is not as it was. None: unknown before, or not to be captured now. `seen`: an image of `after`.

    `links`: how many names below the root it had before. `elsewhere`: what is there now has names outside, too; of
    several below the root, the first is told.
    """

    path: RepoPath
    before: Entry | None
    after: Entry | None
    seen: Image | None = None
    links: int = 1
    elsewhere: bool = False

    @property
    def is_none(self) -> bool:
        return self.before is not None and self.after is not None and same_state(self.before, self.after)


class Ground(Site, Protocol):
    """A root, and what its paths hold."""

    def image(self, path: RepoPath) -> Image: ...


class KeptTree:
    """For one thread at a time. Close it."""

    def __init__(
        self,
        desk: Ground,
        *,
        file_max_bytes: int = FILE_MAX_BYTES,
        workspace_max_bytes: int = WORKSPACE_MAX_BYTES,
        watched_from: int = WATCHED_FROM_PATHS,
    ) -> None:
        self._desk = desk
        self._watched_from = watched_from
        self._root = desk.disk.root.path
        self._below, self._absolute = desk.disk.root.below, desk.disk.root.absolute
        self._file_max_bytes = file_max_bytes
        self._room_bytes = workspace_max_bytes
        self._index: StatIndex | None = None
        self._rows = KeptRows(desk)
        self._shut = ShutFolders(self._rows.stamps)
        self._pending: list[bytes] = []
        self._asked_git = True
        self._watcher: Watcher | None = None
        self._watch_is_new = False
        self._left: frozenset[bytes] = frozenset()
        self._back: tuple[int, frozenset[bytes]] = (0, frozenset())
        self._twins: dict[int, list[bytes]] | None = None
        self._special: set[bytes] = set()
        self.looks = 0
        self.specials: set[bytes] = set()
        self.unstable: set[bytes] = set()
        """where a device, FIFO or socket has come or gone; whoever wants to know clears it"""
        self.closed = self._shut.closed

    @property
    def watcher(self) -> Watcher | None:
        """To be emptied by whoever waits long, so that its queue does not run over."""
        return self._watcher

    @property
    def has_news(self) -> bool:
        """Whether there is something to publish."""
        return bool(self._rows.fresh)

    @property
    def is_settled(self) -> bool:
        """Whether everything that is to be read has been read and saved."""
        return not self._pending and self._asked_git and not self._rows.unsaved

    def look(
        self, *, whole: bool = False, until_ns: int | None = None, keep: bool = True, opens: bool = True
    ) -> list[Drift]:
        """What is not as it was at the last look. `whole`: the kernel's word is not enough, look at every stamp.

        `until_ns`: what has changed since then is left for the next look. Without `keep` what is there now is not
        stored, for it will not stand; and what git has of before is unknown if the store cannot take it. `opens`: a
        folder of ours that was shut since the last look is opened for this one.
        """
        if self._index is None and not self.restore():
            self._begin()
            return []
        self.looks += 1
        touched = self._touched(whole=whole)
        self._left = frozenset() if until_ns is None else _changed_since(touched, until_ns)
        folders = {path: now for path, now in touched.items() if now is not None and stat.S_ISDIR(now.st_mode)}
        shut = {path for path in folders.keys() - self._left if is_shut(self._desk.disk, self._below(path))}
        hidden = tuple(path + b"/" for path in shut)
        seen = {path: touched[path] for path in touched.keys() - self._left if not path.startswith(hidden)}
        lost = [Drift(self._below(path), None, None) for path in self._shut.lost(seen)]
        news = {path for path in shut if stamp_of(folders[path]) != self._rows.stamps.get(path)}
        inside = {path for path in news if opens and not self._shut.is_unseen(path, folders[path].st_ino)}
        self._shut.close(news - inside)
        drifts = self._settle(seen, keep=keep) + lost
        return drifts + [one for path in inside for one in self._look_inside(path, keep=keep)]

    def _look_inside(self, folder: bytes, *, keep: bool) -> list[Drift]:
        """A folder that was shut since the last look. What nobody can see there is not taken for gone."""
        with opened_up(self._desk.disk, self._below(folder)):
            inner = StatIndex.of(folder)
            if folder in inner.unreadable:
                self._shut.close([folder])
                return []
            hidden = tuple(path + b"/" for path in inner.unreadable)
            known = {path for path in self._rows.stamps if path.startswith(folder + b"/")}
            found = statuses({path for path in known if not path.startswith(hidden)}.union(inner.paths()))
            inodes = {path: now.st_ino for path in inner.unreadable if (now := found[path])}
            unseen = {path for path, inode in inodes.items() if self._shut.is_unseen(path, inode)}
            self._shut.close(unseen)
            drifts = self._settle(found, keep=keep)
            drifts += [one for path in inner.unreadable - unseen for one in self._look_inside(path, keep=keep)]
        self._shut.was_opened(folder)
        stamp = stamp_now(folder)
        if stamp is not None:
            self._rows.stamps[folder] = stamp  # it was us who opened it and shut it again
        return drifts

    def take_back(self) -> None:
        """What the last look found will not stand: all is said to be as it was before, and looked at once more."""
        self._left |= self._rows.take_back()

    def were_put_back(self, paths: Iterable[RepoPath], *, since: int) -> None:
        """A call has put these back. If that look was the last, the next does not read what nobody else was at."""
        self._back = since, frozenset(self._absolute(path) for path in paths)

    def entry(self, path: RepoPath) -> Entry | None:
        """What the last look found, with its bytes in the store or in git's; None if nobody knows."""
        return self._rows.entry(self._absolute(path))

    def as_looked(self, paths: Iterable[RepoPath]) -> dict[RepoPath, Entry | None]:
        """What the last look found there, its bytes in the store. None: nobody had read it, and it is another now."""
        places = [self._absolute(path) for path in paths]
        unread = [place for place in places if self._rows.known.get(place, ABSENT) is None and self._is_small(place)]
        self._read(unread)
        return {self._below(place): was for place, was in self._befores(places).items()}

    def _is_small(self, path: bytes) -> bool:
        return path in self._rows.stamps and _size(self._rows.stamps[path]) <= TOUCHED_MAX_BYTES

    def settle_paths(self, paths: Iterable[RepoPath]) -> None:
        """These are on record as they are now; the next look has nothing to say of them."""
        self.settle([self._absolute(path) for path in paths])

    # The first look.

    def _begin(self) -> None:
        """Every stamp at once; what they stand for is read by and by, as long as the stamp is still the same."""
        self._index = StatIndex.take(self._root)
        self._rows.begin(dict(self._index.stamps()))
        self._asked_git = False
        self._watch()

    def _watch(self) -> None:
        """What changes until the watches are set is found by looking at every stamp once more."""
        if len(self._rows.stamps) < self._watched_from or self._watcher is not None:
            return
        try:
            self._watcher, self._watch_is_new = Watcher(self._root), True
        except (MulliganError, OSError):
            return

    def go_on(self, until: float) -> None:
        """Read what has not been read yet, smallest first, then save it; for as long as there is time."""
        if not self._asked_git:
            self._asked_git = True
            self._plan_reading()
        while self._pending and monotonic_s() < until:
            batch, self._pending = self._pending[-_BATCH:], self._pending[:-_BATCH]
            self._read(batch)
        while self._rows.unsaved and not self._pending and monotonic_s() < until:
            self._rows.save_some(self._taken_ns)

    def _plan_reading(self) -> None:
        for path, found in clean_files(self._root, self._rows.stamps.keys()).items():
            as_looked = self._rows.stamps[path]
            if self._desk.disk.capture.withheld(self._below(path)) is not None:
                continue
            if not found.xattrs and (found.ctime_ns, found.mtime_ns, found.size) == as_looked[:3]:
                self._rows.known[path] = found.oid
        unread = [path for path, known in self._rows.known.items() if known is None and self._may_keep(path)]
        self._pending = sorted(unread, key=lambda path: -_size(self._rows.stamps[path]))

    def _may_keep(self, path: bytes) -> bool:
        if _size(self._rows.stamps[path]) > self._file_max_bytes:
            return False
        return path.endswith(_OBJECTS) or not is_object(self._below(path))

    def _read(self, paths: Iterable[bytes]) -> None:
        """Only what still has the stamp of the look: then it is what it was then."""
        found: dict[bytes, Entry] = {}
        self._desk.ledger.blobs.store_all(self._contents(paths, found))
        for path, entry in found.items():
            if stamp_now(path) == self._rows.stamps.get(path):
                self._rows.known[path] = entry

    def _contents(self, paths: Iterable[bytes], found: dict[bytes, Entry]) -> Iterator[Content]:
        """Entries are put into `found` as their bytes are given."""
        for path in paths:
            size = _size(self._rows.stamps[path]) if path in self._rows.stamps else 0
            image = self._image(path) if size <= self._room_bytes else None
            if image is None or image.special:
                continue
            found[path] = image.entry
            if image.content is not None:
                self._room_bytes -= size
                yield image.content

    # Every other look.

    def _touched(self, *, whole: bool) -> Statuses:
        """What may not be as it was at the last look, and what is there now."""
        assert self._index is not None
        dirty = self._watcher.take() if self._watcher is not None else None
        since, back = self._back
        if dirty is None or dirty.overflowed or whole or self._watch_is_new:
            fresh = self._index.again()
            touched = fresh.touched_since(self._index)
            self._index, self._watch_is_new = fresh, False
            self._watch()
            return self._with_twins(statuses(self._left.union(touched, () if dirty is None else dirty.paths)))
        gone = tuple(folder + b"/" for folder in dirty.moved_away)
        inner = [path for path in self._rows.stamps if path.startswith(gone)] if gone else []
        found = statuses(self._left.union(dirty.paths, inner))
        for path in back & dirty.placed if since == self.looks - 1 else ():
            now = found[path]
            if now is not None and self._is_as_put_back(path, now):
                self._rows.stamps[path] = stamp_of(now)
                del found[path]
        return self._with_twins(found)

    def _is_as_put_back(self, path: bytes, now: os.stat_result) -> bool:
        """Of a path to which nothing was moved but what we put there ourselves, in place of what was there."""
        was = self._rows.known.get(path)
        if not isinstance(was, FileEntry) or not stat.S_ISREG(now.st_mode) or now.st_nlink > 1:
            return False
        return (now.st_size, now.st_mtime_ns, stat.S_IMODE(now.st_mode)) == (was.size, was.mtime_ns, was.mode)

    def _with_twins(self, touched: Statuses) -> Statuses:
        """The other names of the same files: the kernel tells only of the name that was used."""
        if self._twins is None:
            self._twins = twins(self._rows.stamps)
        linked = {now.st_ino for now in touched.values() if now and now.st_nlink > 1 and stat.S_ISREG(now.st_mode)}
        known = [name for path in touched for name in self._names_of(path)] if self._twins else []
        new = [path for path, stamp in self._rows.stamps.items() if stamp[3] in linked] if linked else []
        return touched | statuses({*known, *new} - touched.keys())

    def _names_of(self, path: bytes) -> list[bytes]:
        """All names that what was there had at the last look, if there were several."""
        stamp = self._rows.stamps.get(path)
        if stamp is None or self._twins is None:
            return []
        names = self._twins.get(stamp[3], ())
        return [name for name in names if name in self._rows.stamps and self._rows.stamps[name][3] == stamp[3]]

    def settle(self, touched: Iterable[bytes]) -> list[Drift]:
        """Read these paths again, and remember what they are now. The ones that differ from what they were."""
        return self._settle(statuses(touched))

    def _settle(self, touched: Statuses, *, keep: bool = True) -> list[Drift]:
        """What was below a directory that is a link by now is not there any more, whatever the link leads to."""
        links = tuple(path + b"/" for path, now in touched.items() if now is not None and stat.S_ISLNK(now.st_mode))
        stamps = {
            path: None if now is None or path.startswith(links) else stamp_of(now)
            for path, now in touched.items()
            if now is not None or path in self._rows.stamps or path in self._rows.known or path in self._special
        }
        ours = {path: now for path, now in stamps.items() if path != self._root and not self._is_gits_own(path, now)}
        gone = [path for path, now in stamps.items() if now is None and path not in ours]
        lost = self._lost_objects(gone)
        self._forget_gone(gone)
        before = self._befores(ours, keep=keep) | dict.fromkeys(self._shut.astray(ours))
        names = {path: len(self._names_of(path)) or 1 for path in ours} if self._twins else {}
        seen = self._afters(ours, keep=keep)
        elsewhere = self._elsewhere(seen)
        drifts = [
            Drift(self._below(path), was, self._entry_of(path), seen.get(path), names.get(path, 1), path in elsewhere)
            for path, was in before.items()
        ]
        self._rows.fresh = before | self._rows.fresh
        return [one for one in drifts if not one.is_none] + lost

    def _lost_objects(self, gone: Iterable[bytes]) -> list[Drift]:
        """Of object stores that lack something now, which nobody has kept. What git has packed is still there."""
        files: dict[bytes, list[bytes]] = {}
        for path in gone:
            if _OBJECTS + b"/" in path and path in self._rows.stamps and stat.S_ISREG(self._rows.stamps[path][4]):
                folder, _, name = path.rpartition(_OBJECTS + b"/")
                files.setdefault(folder, []).append(name)
        return [Drift(self._below(one + _OBJECTS), None, None) for one, names in files.items() if lacks(one, names)]

    def _elsewhere(self, seen: Mapping[bytes, Image]) -> frozenset[bytes]:
        """Those with names outside the root; of several names of one file, the first."""
        linked = {path: image for path, image in seen.items() if image.links > 1}
        if not linked:
            return frozenset()
        self._twins = twins(self._rows.stamps)
        names = {path: self._names_of(path) or [path] for path in linked}
        return frozenset(min(names[path]) for path, image in linked.items() if image.links > len(names[path]))

    def _entry_of(self, path: bytes) -> Entry | None:
        known = self._rows.known.get(path, ABSENT)
        assert not isinstance(known, str), "what was git's has been fetched"
        return known

    def _is_gits_own(self, path: bytes, now: Stamp | None) -> bool:
        """An object of a repository that was there at the last look: only that all of them went is worth a word."""
        if _GIT not in path:
            return False
        inner = self._below(path)
        repository = repository_of(inner) if is_object(inner) else None
        if repository is None or self._absolute(repository) not in self._rows.stamps:
            return False
        return inner != f"{repository}/objects" or now is not None

    def _forget_gone(self, paths: Iterable[bytes]) -> None:
        """What is nobody's business is not remembered either, lest it be taken for known when it comes again."""
        for path in paths:
            if path in self._rows.stamps:
                del self._rows.stamps[path]
                self._rows.known.pop(path, None)
                self._rows.fresh.setdefault(path, None)

    def _befores(self, paths: Collection[bytes], *, keep: bool = True) -> dict[bytes, Entry | None]:
        """What they were; what was git's own is fetched from it, all at once."""
        in_git = {path: known for path in paths if isinstance(known := self._rows.known.get(path), str)}
        contents = git_contents(self._root, in_git) if in_git else {}
        try:
            self._desk.ledger.blobs.store_all(contents.values())
        except MulliganError:
            if keep:
                raise
            contents = {}
        for path, data in contents.items():
            stamp = self._rows.stamps[path]
            self._rows.known[path] = FileEntry(digest_of(data), len(data), stat.S_IMODE(stamp[4]), stamp[1])
        unseen = tuple(path + b"/" for path in paths if self._shut.is_unseen(path))
        found = {path: None if path.startswith(unseen) else self._rows.known.get(path, ABSENT) for path in paths}
        return {path: None if isinstance(known, str) else known for path, known in found.items()}

    def _afters(self, stamps: Mapping[bytes, Stamp | None], *, keep: bool) -> dict[bytes, Image]:
        """Remember what is there now; images of what could be read, without the bytes."""
        seen: dict[bytes, Image] = {}
        changed = {path for path, stamp in stamps.items() if self._restamp(path, stamp)}
        contents = self._touched_contents(stamps, changed, seen)
        if keep:
            self._desk.ledger.blobs.store_all(contents)
        else:
            deque(contents, maxlen=0)
        for path in stamps:
            if path not in self._rows.stamps:
                self._rows.known.pop(path, None)
            elif path in seen:
                self._rows.known[path] = seen[path].entry
            elif path in changed:
                self._rows.known[path] = None
        return seen

    def _restamp(self, path: bytes, stamp: Stamp | None) -> bool:
        """Before it is read: if it changes meanwhile, the next look finds another stamp. Whether it has one now."""
        before = self._rows.stamps.get(path)
        is_special = stamp is not None and not _is_keepable(stamp[4])
        if is_special or path in self._special:
            self.specials.add(path)
            (self._special.add if is_special else self._special.discard)(path)
        if stamp is None or is_special:
            self._rows.stamps.pop(path, None)
        else:
            self._rows.stamps[path] = stamp
        return stamp != before

    def _touched_contents(
        self, paths: Iterable[bytes], changed: Collection[bytes], seen: dict[bytes, Image]
    ) -> Iterator[Content]:
        """What has to be stored at once: small ones can wait for the rows that name them, as long as they are few."""
        for path in paths:
            stamp = self._rows.stamps.get(path)
            if stamp is None or _size(stamp) > (TOUCHED_MAX_BYTES if path in changed else self._file_max_bytes):
                continue
            image = self._image(path)
            if image is None or image.special:
                continue
            seen[path] = image.without_content()
            if image.content is not None and len(image.content) > SMALL_BYTES:
                yield image.content
            elif image.content is not None:
                self._rows.small.append(image.content)
            if len(self._rows.small) == _BATCH:
                yield from self._rows.small
                self._rows.small.clear()

    # The rows.

    @property
    def _taken_ns(self) -> int | None:
        return None if self._index is None else self._index.taken_ns

    def publish(self, tx: Tx) -> None:
        """What looks have found since the last time, as part of the transaction that puts it on record.

        `has_published` when that is over.
        """
        self._rows.publish(tx, self._taken_ns)

    def has_published(self) -> None:
        self._rows.has_published()

    def keep_bytes(self, tx: Tx) -> None:
        """What the last look has read and nobody has stored yet, without the rows: they will not stand."""
        self._rows.put_small(tx)

    def restore(self) -> bool:
        """Go on from what another process left; False if there is nothing, or not all of it."""
        taken_ns = self._rows.restore()
        if taken_ns is None:
            return False
        stored = [path for path, known in self._rows.known.items() if isinstance(known, FileEntry)]
        self._room_bytes -= sum(_size(self._rows.stamps[path]) for path in stored)
        self._index = StatIndex.restored(self._root, self._rows.stamps, taken_ns)
        return True

    def _image(self, path: bytes) -> Image | None:
        """None: there, and not for us to read."""
        try:
            image = self._desk.image(self._below(path))
        except (PermissionError, MulliganError):
            return None
        (self.unstable.add if image.unstable else self.unstable.discard)(path)
        return image

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


def kernel_time_ns() -> int:
    """What files are stamped with: the world's clock, whatever a session takes for the time."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _changed_since(paths: Collection[bytes], when_ns: int) -> frozenset[bytes]:
    """Those, but for folders of others: a folder that came before what is in it changes with that.

    A file system whose clock is ahead of ours says nothing; there, none.
    """
    now_ns = kernel_time_ns()
    stamps = {path: status.st_ctime_ns for path in paths if (status := status_of(path)) is not None}
    late = {path for path, changed_ns in stamps.items() if when_ns < changed_ns <= now_ns}
    for path in set(paths) - late:
        while (path := os.path.dirname(path)) in late:
            late.discard(path)
    return frozenset(late)


def _size(stamp: Stamp) -> int:
    return stamp[2] if stat.S_ISREG(stamp[4]) else 0


def _is_keepable(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
