"""What the substrate works with: one root's leases and snapshots, and one request at them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from mulligan.boundary.capability import Capability, FsOp
from mulligan.boundary.verdict import Boundary
from mulligan.effects.hosting import hosted
from mulligan.effects.scene import Scene
from mulligan.effects.substrate.failure import Failure
from mulligan.effects.substrate.shelf import Shelf, Snapshot
from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.values.digest import Digest
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId, TurnId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import ROOT, RepoPath, parse_repo_path, path_bytes, text_from_wire
from mulligan.values.plain import plain
from mulligan.workspace.census import GONE, Seen, bytes_at, link_seen
from mulligan.workspace.fingerprint import Fingerprint, TreeState
from mulligan.workspace.lease import Lease, Leases
from mulligan.workspace.listing import Kind, Listed, list_below
from mulligan.workspace.manifest import Captured, Manifest
from mulligan.workspace.search.handles import Handles

CONTENT_MAX_BYTES = 10 * MIB_BYTES
SEARCHED_MAX_BYTES = 64 * MIB_BYTES

_KINDS: Mapping[str, Kind] = {"file": "file", "symlink": "symlink"}


@plain(slots=True, frozen=True)
class Taken:
    """Files as they all were at one moment. `bytes_of` gives what was seen, or fails with REPO_CHANGED."""

    manifest: Manifest
    fingerprint: Fingerprint
    seen: Mapping[RepoPath, Seen]
    skipped: tuple[tuple[RepoPath, str], ...]
    bytes_of: Callable[[Captured], bytes]

    def by_blob(self) -> dict[Digest, Captured]:
        return {entry.blob: entry for entry in self.manifest.entries}


class Bench:
    """One root, open for the substrate's tools. For any thread. Close it."""

    def __init__(self, desk: Desk, boundary: Boundary) -> None:
        self.desk = desk
        self.boundary = boundary
        ledger = desk.ledger
        self.leases = Leases(ledger.store, desk.root.id, desk.disk.root, clock=ledger.clock, ids=ledger.ids)
        self.shelf = Shelf(ledger, desk.root.id)
        self.leases.census.capture = desk.disk.capture
        self.last_capture: tuple[object, Taken] | None = None

    def close(self) -> None:
        self.leases.close()


_BENCHES: WeakKeyDictionary[Desk, Bench] = WeakKeyDictionary()
_BENCHES_LOCK = threading.Lock()


def bench_of(desk: Desk, boundary: Boundary) -> Bench:
    """The one bench of a desk: it is made when the first tool asks for it, and closes with the desk."""
    with _BENCHES_LOCK:
        if desk not in _BENCHES:
            _BENCHES[desk] = bench = Bench(desk, boundary)
            desk.at_close(bench.close)
        return _BENCHES[desk]


@plain(slots=True, frozen=True)
class Named:
    """Whose request it is and what it is called, as far as the caller says.

    `began` is told of its call as soon as there is one; `may_commit` is asked last, and False means nothing happened.
    `within` is what it may do at most, if that is less than everybody at the bench may.
    """

    session: SessionId
    label: str | None = None
    turn: TurnId | None = None
    began: Callable[[Call], None] = field(default=lambda call: None)
    may_commit: Callable[[], bool] = field(default=lambda: True)
    within: Boundary | None = None


def parse_path(text: str) -> RepoPath:
    """S2's paths: relative, without `..`, without a leading `~`."""
    try:
        plain = text_from_wire(text)
        if plain.startswith(("/", "~")) or ".." in plain.split("/"):
            raise Failure("PERMISSION_DENIED", f"{plain!r} is not a path below the root.")
        return parse_repo_path(plain)
    except MulliganError as error:
        raise Failure("INVALID_ARGUMENT", error.message) from None


@dataclass(slots=True)
class Ask:
    """One request: the session it is for, under its boundary, which lets it do `op`."""

    bench: Bench
    tool: str
    named: Named
    boundary: Boundary
    op: FsOp
    call_id: str | None = None
    followed: dict[RepoPath, Seen] = field(default_factory=dict)
    """the links that led to what was asked for"""

    @property
    def desk(self) -> Desk:
        return self.bench.desk

    @staticmethod
    def of(bench: Bench, tool: str, named: Named, *, op: FsOp) -> Ask:
        """Refuses a session that is closed or has expired, and one that may not do such a thing at all."""
        bench.desk.ledger.session(named.session, bench.desk.root)
        boundary = hosted(bench.desk, named.session, default=named.within or bench.boundary).boundary
        boundary.check_op(op)
        return Ask(bench, tool, named, boundary, op)

    @property
    def capability(self) -> Capability:
        return self.boundary.capability

    @property
    def answer_limit(self) -> int:
        """How many bytes of content fit in an answer."""
        limits = (CONTENT_MAX_BYTES, self.capability.max_read_bytes, self.capability.max_inline_bytes)
        return min(limit for limit in limits if limit is not None)

    def check_fits(self, size: int) -> None:
        """Whole or not at all: half a file would not be what its digest says."""
        limit = self.answer_limit
        if size > limit:
            raise Failure("TOO_LARGE", f"{size} bytes are more than the {limit} that fit in an answer.")

    def may_show(self, path: RepoPath) -> bool:
        """Whether the content of a resolved path may be in an answer."""
        return self.boundary.admits(self.op, path) and not self.boundary.keeps_out_of_answers(self.op, path)

    def check_shown(self, path: RepoPath) -> None:
        """As `may_show`, with a refusal."""
        self.boundary.check_path(self.op, path)
        if self.boundary.keeps_out_of_answers(self.op, path):
            raise Failure("PERMISSION_DENIED", f"The policy keeps {path} out of answers.", reason="path_not_allowed")

    def snapshot(self, identifier: str) -> Snapshot:
        """A snapshot, of which the session sees what it may see of the tree."""
        found = self.bench.shelf.get(identifier)
        if not self.boundary.has_policy and self.capability.fs_roots is None:
            return found
        manifest = found.manifest
        entries = [one for one in manifest.entries if self.boundary.admits(self.op, one.path)]
        empty_dirs = [one for one in manifest.empty_dirs if self.boundary.admits(self.op, one[0])]
        return replace(found, manifest=Manifest.of(entries, empty_dirs, manifest.scope))

    # Leases.

    def lease(self, lease_id: str | None) -> tuple[Lease, TreeState]:
        """The given lease, found to hold, or a new one."""
        leases = self.bench.leases
        if lease_id is not None:
            return leases.check(lease_id)
        state = leases.fingerprints.state()
        return leases.issue(state), state

    def touch(self, lease: Lease, seen: Mapping[RepoPath, Seen]) -> None:
        """What this request saw, the links it was led by included: where they lead is part of the answer."""
        self.bench.leases.touch(lease, {**self.followed, **seen})

    # Looking.

    def real_path(self, op: FsOp, path: RepoPath, *, final: bool = True) -> RepoPath:
        """Where a path leads, below the root and within what the session may see."""
        boundary = self.boundary
        boundary.check_op(op)
        try:
            spot = self.desk.disk.resolve(path, follow=boundary.capability.follow_symlinks, final=final)
        except (FileNotFoundError, NotADirectoryError):
            raise Failure("NOT_FOUND", f"{path} does not exist.") from None
        with spot:
            if spot.outside:
                raise Failure("PERMISSION_DENIED", f"{path} leads out of the root.")
            boundary.check_path(op, spot.path)
            self.followed |= {link: link_seen(to) for link, to in spot.links if boundary.admits(op, link)}
            return spot.path

    @contextmanager
    def looking(self) -> Iterator[Handles]:
        with Handles(self.desk.disk.root.handle) as handles:
            yield handles

    def seen(self, handles: Handles, path: RepoPath) -> Seen:
        return self.bench.leases.census.look(handles, path)

    def read(self, handles: Handles, path: RepoPath, seen: Seen) -> bytes:
        """The bytes that were seen at a path a moment ago; REPO_CHANGED if they are others now."""
        try:
            data = bytes_at(handles, path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise moved(path) from None
        if self.bench.leases.census.digest_at(path, data) != seen.digest:
            raise moved(path)
        return data

    def below(self, op: FsOp, path: RepoPath) -> Iterator[Listed]:
        """Everything below a real directory that the session may see; the path itself if it is none."""
        with self.looking() as handles:
            seen = self.seen(handles, path)
        if seen.kind != "dir":
            if seen == GONE:
                raise Failure("NOT_FOUND", f"{path} does not exist.")
            yield Listed(path, _KINDS.get(seen.kind, "special"))
            return
        admits = self.boundary.admits
        found = list_below(self.desk.disk.root.handle, path)
        yield from (one for one in found if admits(op, one.path))

    # Acting.

    @contextmanager
    def call(self) -> Iterator[Scene]:
        """A call of this request: it commits when the block ends well, and never happened otherwise."""
        named = self.named
        call = self.desk.call(named.session, turn=named.turn, label=named.label, tool=self.tool.replace(".", "_"))
        self.call_id = call.id
        named.began(call)
        with call:
            yield Scene(self.desk, named.session, self.boundary, call)
            if not named.may_commit():
                raise Failure("CONFLICT", "The request was cancelled; nothing was changed.", reason="cancelled")


def moved(path: RepoPath) -> Failure:
    return Failure("REPO_CHANGED", f"{path} changed while it was being read; try again.")


def unique_paths(texts: Iterable[str]) -> list[RepoPath]:
    return sorted({parse_path(text) for text in texts}, key=path_bytes)


def parents_seen(paths: Iterable[RepoPath], look: Callable[[RepoPath], Seen]) -> Mapping[RepoPath, Seen]:
    """The directories that listed paths imply, without the root."""
    from mulligan.values.paths import ancestors_of

    above = {parent for path in paths for parent in ancestors_of(path) if parent != ROOT}
    return {path: look(path) for path in sorted(above, key=os.fsencode)}
