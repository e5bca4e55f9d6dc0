"""The state of a root as one value: HEAD, index, and the differences of the working tree from them.

The public fingerprint is three strings. Leases compare more: the status of every path that git reports, each by its own
name, so that two files in one untracked directory are two facts. Both come from git as `files.git` reads it; without a
repository every file counts as untracked.

`ChangeCounter` tells whether anything below a root has changed since the last query. The first query sets no watch, so
that a process that asks once pays nothing. From the second on, inotify reports every change below the root; until it
reports one, the answer is the same number. Without inotify (another system, no watches left) every answer is a new
number. `.git` is left out, because the stamps of git's own files are cheaper to compare. Writes through memory maps and
through other names of hard links are not reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from mulligan.files.disk import DRAFT_PREFIX
from mulligan.files.git import GitError, GitReader, Repository, find_repository, read_small
from mulligan.files.read import list_below
from mulligan.files.resolve import Root
from mulligan.files.tree.directories import stamp_of, was_at_rest
from mulligan.files.tree.watcher import Watcher
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.canonical import encode
from mulligan.values.clock import Clock, now_ns
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes


class ChangeCounter:
    """For any thread. Close it."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._lock = fork_safe_lock()
        self._watcher: Watcher | None = None
        self._asked = self._refused = False
        self._epoch = 0

    @property
    def is_watching(self) -> bool:
        return self._watcher is not None

    def epoch(self) -> int:
        """A number that stays the same while nothing below the root changes."""
        with self._lock:
            if self._watcher is None:
                self._epoch += 1
                self._start()
            elif self._has_moved(self._watcher):
                self._epoch += 1
            return self._epoch

    def _start(self) -> None:
        """Set the watches. Changes during this count as before the number that the caller is about to get."""
        if self._asked and not self._refused:
            try:
                self._watcher = Watcher(self._root, frozenset({os.path.join(self._root, b".git")}))
            except (MulliganError, OSError):
                self._refused = True
        self._asked = True

    @staticmethod
    def _has_moved(watcher: Watcher) -> bool:
        dirty = watcher.take()
        return bool(dirty.paths or dirty.moved_away or dirty.overflowed)

    def close(self) -> None:
        with self._lock:
            if self._watcher is not None:
                self._watcher.close()
                self._watcher, self._refused = None, True


_REF = re.compile(rb"refs/[^\x00-\x20\x7f~^:?*\[\\]+\Z")
_OID = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_REF_HOPS_MAX = 5
_REF_MAX_BYTES = 4_096
_UNTRACKED = b"??"

Stamp = tuple[int, ...]


@fast_dataclass(slots=True, frozen=True)
class Fingerprint:
    head_oid: str
    index_oid: str
    status_hash: str

    def to_json(self) -> dict[str, str]:
        return {"head_oid": self.head_oid, "index_oid": self.index_oid, "status_hash": self.status_hash}

    def canonical(self) -> bytes:
        return encode(self.to_json())


@dataclass(frozen=True)
class TreeState:
    """A fingerprint and its facts: the two letters of git's status for each path that differs from the commit.

    If two states have one `epoch`, nothing changed between them; equal states of different epochs may have differed in
    between.
    """

    fingerprint: Fingerprint
    facts: Mapping[bytes, bytes]
    epoch: tuple[object, ...]

    @cached_property
    def facts_hash(self) -> str:
        return hash_of_facts(self.facts)

    def facts_hash_without(self, own: Iterable[RepoPath]) -> str:
        """The hash of the facts without those of some paths."""
        left_out = {path_bytes(path) for path in own}
        if not left_out & self.facts.keys():
            return self.facts_hash
        return hash_of_facts({path: fact for path, fact in self.facts.items() if path not in left_out})


def hash_of_facts(facts: Mapping[bytes, bytes]) -> str:
    return sha256(b"".join(facts[path] + b" " + path + b"\0" for path in sorted(facts))).hexdigest()


def parse_status(status: bytes) -> dict[bytes, bytes]:
    """The two letters of git's status by path, from `git status --porcelain=v1 -z`.

    A rename's old name is a path of its own.
    """
    facts: dict[bytes, bytes] = {}
    rows = iter(status.split(b"\0")[:-1])
    for row in rows:
        facts[row[3:]] = row[:2]
        if row[:1] in b"RC":
            facts[next(rows)] = row[:2]
    return facts


class Fingerprints:
    """Computes fingerprints of one root, and skips work where nothing can have changed. For any thread. Close it."""

    def __init__(self, root: Root, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = fork_safe_lock()
        self._changes = ChangeCounter(root.path)
        self._reader: GitReader | None = None
        self._last: TreeState | None = None
        self._index: tuple[Stamp, str] | None = None

    def close(self) -> None:
        with self._lock:
            self._changes.close()
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def epoch(self) -> tuple[object, ...]:
        """A value that equals an earlier one only if nothing that determines the fingerprint changed in between."""
        repository = find_repository(self._root.path)
        stamps = () if repository is None else _git_stamps(repository)
        return (self._changes.epoch(), repository, stamps)

    def state(self) -> TreeState:
        with self._lock:
            epoch = self.epoch()
            if self._last is not None and self._last.epoch == epoch:
                return self._last
            self._last = self._taken(epoch)
            return self._last

    def _taken(self, epoch: tuple[object, ...]) -> TreeState:
        reader = self.reader()
        if reader is not None:
            try:
                status = reader.status()
                facts = parse_status(status if _is_exact(status) else reader.status(exact=True))
                print_ = Fingerprint(self._head_oid(reader), self._index_oid(reader), sha256(status).hexdigest())
                return TreeState(print_, _without_drafts(facts), epoch)
            except GitError:
                pass  # A repository that git cannot read counts as an ordinary directory.
        return self._without_git(epoch)

    def _without_git(self, epoch: tuple[object, ...]) -> TreeState:
        listed = list_below(self._root.handle, ROOT)
        facts = {path_bytes(one.path): _UNTRACKED for one in listed if one.kind in ("file", "symlink")}
        return TreeState(Fingerprint("", "", hash_of_facts(facts)), facts, epoch)

    def reader(self) -> GitReader | None:
        """A reader of the repository at the root; None if there is none that git can read."""
        with self._lock:
            repository = find_repository(self._root.path)
            if self._reader is not None and self._reader.repository != repository:
                self._reader.close()
                self._reader = None
            if self._reader is None and repository is not None:
                try:
                    self._reader = GitReader(repository)
                except GitError:
                    return None
            return self._reader

    def _head_oid(self, reader: GitReader) -> str:
        oid = read_head(reader.repository)
        return reader.head_oid() if oid is None else oid

    def _index_oid(self, reader: GitReader) -> str:
        """The tree of the index.

        It is cached by the stamp of the index, if that is old enough to show a later change.
        """
        path = os.path.join(reader.repository.git_dir, b"index")
        try:
            status = os.stat(path)
        except OSError:
            return reader.index_oid()
        stamp = (*stamp_of(status), status.st_size)
        if self._index is not None and self._index[0] == stamp:
            return self._index[1]
        now = now_ns(self._clock)
        oid = reader.index_oid()
        self._index = (stamp, oid) if was_at_rest(stamp_of(status), now) else None
        return oid


def _without_drafts(facts: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The facts without our draft files, which an open call is about to move into place."""
    return {path: fact for path, fact in facts.items() if not path.rpartition(b"/")[2].startswith(DRAFT_PREFIX)}


def _is_exact(status: bytes) -> bool:
    """Whether the status has neither a rename nor an untracked directory, so that it names every path."""
    rows = status.split(b"\0")
    return not any(row[:1] in (b"R", b"C") or row.endswith(b"/") for row in rows)


def _git_stamps(repository: Repository) -> tuple[Stamp | bytes | None, ...]:
    """The stamps of git's own files; of the ref that HEAD names, its bytes."""
    own = [os.path.join(repository.git_dir, name) for name in (b"HEAD", b"index")]
    shared = [os.path.join(repository.common_dir, name) for name in (b"packed-refs", b"config", b"info/exclude")]
    shared += [os.path.join(repository.common_dir, name) for name in (b"info/attributes", b"info/sparse-checkout")]
    head = read_head(repository)
    return (*map(_stamp_at, [*own, *shared]), None if head is None else head.encode("ascii"))


def _stamp_at(path: bytes) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (*stamp_of(status), status.st_size)


def read_head(repository: Repository) -> str | None:
    """The commit of HEAD, read without git: empty before the first commit, None if only git can tell."""
    text = read_small(os.path.join(repository.git_dir, b"HEAD"), _REF_MAX_BYTES)
    for _ in range(_REF_HOPS_MAX):
        if text is None:
            return None
        value = text.strip()
        if _OID.match(value):
            return value.decode("ascii")
        name = value.removeprefix(b"ref: ").strip()
        if name == value or not _REF.match(name) or b".." in name or b"//" in name:
            return None
        text = _loose_ref(repository, name)
        if text is None:
            return _packed_ref(repository, name)
    return None


def _loose_ref(repository: Repository, name: bytes) -> bytes | None:
    own = name.startswith((b"refs/bisect/", b"refs/worktree/", b"refs/rewritten/"))
    return read_small(os.path.join(repository.git_dir if own else repository.common_dir, name), _REF_MAX_BYTES)


def _packed_ref(repository: Repository, name: bytes) -> str | None:
    if os.path.isdir(os.path.join(repository.common_dir, b"reftable")):
        return None
    try:
        with open(os.path.join(repository.common_dir, b"packed-refs"), "rb") as lines:
            found = [line.split(b" ")[0] for line in lines if line.rstrip(b"\n").endswith(b" " + name)]
    except OSError:
        return ""
    return found[0].decode("ascii") if found and _OID.match(found[0]) else ""


def changed_facts(before: Mapping[bytes, bytes], after: Mapping[bytes, bytes]) -> list[RepoPath]:
    """The paths whose status differs, in byte order."""
    return [
        path_from_bytes(path.rstrip(b"/"))
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path) and path.strip(b"/")
    ]
