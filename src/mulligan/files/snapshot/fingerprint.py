"""The state of a root as one value: HEAD, index, and what of the working tree differs from them.

The public fingerprint is three strings. Beside it stands what leases compare: every path git has something to say
about, each by its own name, so that two files in one untracked directory are two facts. Both come from git as
`workspace.git` reads it; without a repository every file counts as untracked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from mulligan.store.fork_locks import fork_safe_lock
from mulligan.values.canonical import encode
from mulligan.values.clock import Clock
from mulligan.values.paths import ROOT, RepoPath, path_bytes, path_from_bytes
from mulligan.values.plain import plain
from mulligan.workspace.disk import DRAFT_PREFIX
from mulligan.workspace.git import GitFailed, GitReader, Repository, find_repository, read_small
from mulligan.workspace.listing import list_below
from mulligan.workspace.places import Root
from mulligan.workspace.search.stamps import stamp_of, was_at_rest
from mulligan.workspace.stillness import Stillness

_REF = re.compile(rb"refs/[^\x00-\x20\x7f~^:?*\[\\]+\Z")
_OID = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_REF_HOPS_MAX = 5
_REF_MAX_BYTES = 4_096
_UNTRACKED = b"??"

Stamp = tuple[int, ...]


@plain(slots=True, frozen=True)
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
    """A fingerprint and the facts behind it: what git's two letters say of each path that is not as committed.

    Two states of one `epoch` were not merely found equal: nothing moved between them.
    """

    fingerprint: Fingerprint
    facts: Mapping[bytes, bytes]
    epoch: tuple[object, ...]

    @cached_property
    def facts_hash(self) -> str:
        return hash_of_facts(self.facts)

    def facts_hash_without(self, own: Iterable[RepoPath]) -> str:
        """The same, had the paths never been touched."""
        left_out = {path_bytes(path) for path in own}
        if not left_out & self.facts.keys():
            return self.facts_hash
        return hash_of_facts({path: fact for path, fact in self.facts.items() if path not in left_out})


def hash_of_facts(facts: Mapping[bytes, bytes]) -> str:
    return sha256(b"".join(facts[path] + b" " + path + b"\0" for path in sorted(facts))).hexdigest()


def parse_status(status: bytes) -> dict[bytes, bytes]:
    """Two letters by path, from `git status --porcelain=v1 -z`. A rename's old name is a path of its own."""
    facts: dict[bytes, bytes] = {}
    rows = iter(status.split(b"\0")[:-1])
    for row in rows:
        facts[row[3:]] = row[:2]
        if row[:1] in b"RC":
            facts[next(rows)] = row[:2]
    return facts


class Fingerprints:
    """Takes fingerprints of one root, as cheaply as is sure. For any thread. Close it."""

    def __init__(self, root: Root, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = fork_safe_lock()
        self._stillness = Stillness(root.path)
        self._reader: GitReader | None = None
        self._last: TreeState | None = None
        self._index: tuple[Stamp, str] | None = None

    def close(self) -> None:
        with self._lock:
            self._stillness.close()
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def epoch(self) -> tuple[object, ...]:
        """Equal to an earlier one only if nothing that a fingerprint is made of moved in between."""
        repository = find_repository(self._root.path)
        stamps = () if repository is None else _git_stamps(repository)
        return (self._stillness.epoch(), repository, stamps)

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
            except GitFailed:
                pass  # a repository git cannot read is a directory like any other
        return self._without_git(epoch)

    def _without_git(self, epoch: tuple[object, ...]) -> TreeState:
        listed = list_below(self._root.handle, ROOT)
        facts = {path_bytes(one.path): _UNTRACKED for one in listed if one.kind in ("file", "symlink")}
        return TreeState(Fingerprint("", "", hash_of_facts(facts)), facts, epoch)

    def reader(self) -> GitReader | None:
        """Of the repository that is at the root now; None when there is none that can be read."""
        with self._lock:
            repository = find_repository(self._root.path)
            if self._reader is not None and self._reader.repository != repository:
                self._reader.close()
                self._reader = None
            if self._reader is None and repository is not None:
                try:
                    self._reader = GitReader(repository)
                except GitFailed:
                    return None
            return self._reader

    def _head_oid(self, reader: GitReader) -> str:
        oid = read_head(reader.repository)
        return reader.head_oid() if oid is None else oid

    def _index_oid(self, reader: GitReader) -> str:
        """Remembered by the stamp of the index, once that is old enough to tell a change."""
        path = os.path.join(reader.repository.git_dir, b"index")
        try:
            status = os.stat(path)
        except OSError:
            return reader.index_oid()
        stamp = (*stamp_of(status), status.st_size)
        if self._index is not None and self._index[0] == stamp:
            return self._index[1]
        now_ns = int(self._clock.now().timestamp() * 1e9)
        oid = reader.index_oid()
        self._index = (stamp, oid) if was_at_rest(stamp_of(status), now_ns) else None
        return oid


def _without_drafts(facts: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Files that a call of ours is about to put in their place are nobody's news."""
    return {path: fact for path, fact in facts.items() if not path.rpartition(b"/")[2].startswith(DRAFT_PREFIX)}


def _is_exact(status: bytes) -> bool:
    """Whether every path in it stands for itself: no rename, no untracked directory."""
    rows = status.split(b"\0")
    return not any(row[:1] in (b"R", b"C") or row.endswith(b"/") for row in rows)


def _git_stamps(repository: Repository) -> tuple[Stamp | bytes | None, ...]:
    """What git's own files look like from outside; the ref HEAD names by its very bytes."""
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
    """The commit HEAD names, read by hand: empty before the first commit, None when only git can tell."""
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
    """Paths that git says something else of now, in byte order."""
    return [
        path_from_bytes(path.rstrip(b"/"))
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path) and path.strip(b"/")
    ]
