"""The context of the snapshot tools (S2): the leases and snapshots of one root, and the request of a session.

`SnapshotContext` belongs to one open root; `ToolRequest` is one request, with its boundary and its lease.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from weakref import WeakKeyDictionary

from mulligan.boundary.capability import Capability, FsOp
from mulligan.boundary.verdict import Boundary
from mulligan.effects.context import EffectContext, session_boundary
from mulligan.effects.snapshot_tools.store import SnapshotStore, SnapshotToolError, StoredSnapshot
from mulligan.files.read import Kind, Listed, list_below
from mulligan.files.snapshot.fingerprint import Fingerprint, TreeState
from mulligan.files.snapshot.lease import Lease, Leases
from mulligan.files.snapshot.manifest import CapturedFile, Manifest
from mulligan.files.tree.directories import Handles
from mulligan.files.tree.index import GONE, PathState, bytes_at, link_state
from mulligan.history.call import Call
from mulligan.history.open_root import OpenRoot
from mulligan.values.digest import Digest
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, TurnId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, parse_repo_path, path_bytes, text_from_wire

CONTENT_MAX_BYTES = 10 * MIB_BYTES
SEARCHED_MAX_BYTES = 64 * MIB_BYTES

_KINDS: Mapping[str, Kind] = {"file": "file", "symlink": "symlink"}


@fast_dataclass(slots=True, frozen=True)
class CapturedTree:
    """The state of files at one moment. `bytes_of` gives the captured bytes, or raises REPO_CHANGED."""

    manifest: Manifest
    fingerprint: Fingerprint
    seen: Mapping[RepoPath, PathState]
    skipped: tuple[tuple[RepoPath, str], ...]
    bytes_of: Callable[[CapturedFile], bytes]

    def by_blob(self) -> dict[Digest, CapturedFile]:
        return {entry.blob: entry for entry in self.manifest.entries}


class SnapshotContext:
    """The leases and snapshots of one open root. For any thread. Close it."""

    def __init__(self, open_root: OpenRoot, boundary: Boundary) -> None:
        self.open_root = open_root
        self.boundary = boundary
        ledger = open_root.ledger
        self.leases = Leases(ledger.store, open_root.root.id, open_root.disk.root, clock=ledger.clock, ids=ledger.ids)
        self.snapshots = SnapshotStore(ledger, open_root.root.id)
        self.leases.digests.capture = open_root.disk.capture
        self.last_capture: tuple[object, CapturedTree] | None = None

    def close(self) -> None:
        self.leases.close()


_CONTEXTS: WeakKeyDictionary[OpenRoot, SnapshotContext] = WeakKeyDictionary()
_CONTEXTS_LOCK = threading.Lock()


def snapshot_context_of(open_root: OpenRoot, boundary: Boundary) -> SnapshotContext:
    """The context of an open root. The first tool creates it, and it closes with the open root."""
    with _CONTEXTS_LOCK:
        if open_root not in _CONTEXTS:
            _CONTEXTS[open_root] = context = SnapshotContext(open_root, boundary)
            open_root.at_close(context.close)
        return _CONTEXTS[open_root]


@fast_dataclass(slots=True, frozen=True)
class RequestInfo:
    """The session of a request, and what its caller says about it.

    Mulligan calls `began` with the request's call as soon as that exists, and `may_commit` just before the commit; if
    that answers False, nothing happened. `within` limits the request further than the context does.
    """

    session: SessionId
    label: str | None = None
    turn: TurnId | None = None
    began: Callable[[Call], None] = field(default=lambda call: None)
    may_commit: Callable[[], bool] = field(default=lambda: True)
    within: Boundary | None = None


def parse_path(text: str) -> RepoPath:
    """Parse a path of S2: relative, without `..`, without a leading `~`."""
    try:
        plain = text_from_wire(text)
        if plain.startswith(("/", "~")) or ".." in plain.split("/"):
            raise SnapshotToolError("PERMISSION_DENIED", f"{plain!r} is not a path below the root.")
        return parse_repo_path(plain)
    except MulliganError as error:
        raise SnapshotToolError("INVALID_ARGUMENT", error.message) from None


@fast_dataclass(slots=True)
class ToolRequest:
    """One request of a session, whose boundary allows the operation `op`."""

    context: SnapshotContext
    tool: str
    named: RequestInfo
    boundary: Boundary
    op: FsOp
    call_id: str | None = None
    # The symbolic links on the way to the requested paths.
    followed: dict[RepoPath, PathState] = field(default_factory=dict)

    @property
    def open_root(self) -> OpenRoot:
        return self.context.open_root

    @staticmethod
    def of(context: SnapshotContext, tool: str, named: RequestInfo, *, op: FsOp) -> ToolRequest:
        """Refuses a closed or expired session, and a session that may not do this operation at all."""
        context.open_root.ledger.session(named.session, context.open_root.root)
        boundary = session_boundary(context.open_root, named.session, default=named.within or context.boundary).boundary
        boundary.check_op(op)
        return ToolRequest(context, tool, named, boundary, op)

    @property
    def capability(self) -> Capability:
        return self.boundary.capability

    @property
    def answer_limit(self) -> int:
        """The largest content of an answer."""
        limits = (CONTENT_MAX_BYTES, self.capability.max_read_bytes, self.capability.max_inline_bytes)
        return min(limit for limit in limits if limit is not None)

    def check_fits(self, size: int) -> None:
        """Refuse content that does not fit whole: half a file would not have the digest of the answer."""
        limit = self.answer_limit
        if size > limit:
            raise SnapshotToolError("TOO_LARGE", f"{size} bytes are more than the {limit} that fit in an answer.")

    def may_show(self, path: RepoPath) -> bool:
        """Whether an answer may have the content of this resolved path."""
        return self.boundary.allows(self.op, path) and not self.boundary.keeps_out_of_answers(self.op, path)

    def check_shown(self, path: RepoPath) -> None:
        """Refuse a path whose content no answer may have; see `may_show`."""
        self.boundary.check_path(self.op, path)
        if self.boundary.keeps_out_of_answers(self.op, path):
            raise SnapshotToolError(
                "PERMISSION_DENIED", f"The policy keeps {path} out of answers.", reason="path_not_allowed"
            )

    def snapshot(self, identifier: str) -> StoredSnapshot:
        """A snapshot without the paths that the session may not see."""
        found = self.context.snapshots.get(identifier)
        if not self.boundary.has_policy and self.capability.fs_roots is None:
            return found
        manifest = found.manifest
        entries = [one for one in manifest.entries if self.boundary.allows(self.op, one.path)]
        empty_dirs = [one for one in manifest.empty_dirs if self.boundary.allows(self.op, one[0])]
        return replace(found, manifest=Manifest.of(entries, empty_dirs, manifest.scope))

    # Leases.

    def lease(self, lease_id: str | None) -> tuple[Lease, TreeState]:
        """The given lease, if it is valid, or a new one; and the state of the tree."""
        leases = self.context.leases
        if lease_id is not None:
            return leases.check(lease_id)
        state = leases.fingerprints.state()
        return leases.issue(state), state

    def add_read_paths(self, lease: Lease, seen: Mapping[RepoPath, PathState]) -> None:
        """Add to the lease what this request saw, and the links it followed: their targets are part of the answer."""
        self.context.leases.add_read_paths(lease, {**self.followed, **seen})

    # Reading.

    def real_path(self, op: FsOp, path: RepoPath, *, final: bool = True) -> RepoPath:
        """The real path. It must be below the root, and the session must be allowed to see it."""
        boundary = self.boundary
        boundary.check_op(op)
        try:
            found = self.open_root.disk.resolve(path, follow=boundary.capability.follow_symlinks, final=final)
        except (FileNotFoundError, NotADirectoryError):
            raise SnapshotToolError("NOT_FOUND", f"{path} does not exist.") from None
        with found:
            if found.outside:
                raise SnapshotToolError("PERMISSION_DENIED", f"{path} leads out of the root.")
            boundary.check_path(op, found.path)
            self.followed |= {link: link_state(to) for link, to in found.links if boundary.allows(op, link)}
            return found.path

    def handles(self) -> Handles:
        return Handles(self.open_root.disk.root.handle)

    def seen(self, handles: Handles, path: RepoPath) -> PathState:
        return self.context.leases.digests.look(handles, path)

    def read(self, handles: Handles, path: RepoPath, seen: PathState) -> bytes:
        """The bytes of a path whose state was read a moment ago. Raises REPO_CHANGED if the path has changed since."""
        try:
            data = bytes_at(handles, path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise changed_meanwhile(path) from None
        if self.context.leases.digests.digest_at(path, data) != seen.digest:
            raise changed_meanwhile(path)
        return data

    def below(self, op: FsOp, path: RepoPath) -> Iterator[Listed]:
        """Everything below a real directory that the session may see; for another path, the path itself."""
        with self.handles() as handles:
            seen = self.seen(handles, path)
        if seen.kind != "dir":
            if seen == GONE:
                raise SnapshotToolError("NOT_FOUND", f"{path} does not exist.")
            yield Listed(path, _KINDS.get(seen.kind, "special"))
            return
        admits = self.boundary.allows
        found = list_below(self.open_root.disk.root.handle, path)
        yield from (one for one in found if admits(op, one.path))

    # Changing.

    @contextmanager
    def call(self) -> Iterator[EffectContext]:
        """The call of this request. It commits when the block ends normally, and is rolled back otherwise."""
        named = self.named
        call = self.open_root.call(named.session, turn=named.turn, label=named.label, tool=self.tool.replace(".", "_"))
        self.call_id = call.id
        named.began(call)
        with call:
            yield EffectContext(self.open_root, named.session, self.boundary, call, call)
            if not named.may_commit():
                raise SnapshotToolError(
                    "CONFLICT", "The request was cancelled; nothing was changed.", reason="cancelled"
                )


def changed_meanwhile(path: RepoPath) -> SnapshotToolError:
    return SnapshotToolError("REPO_CHANGED", f"{path} changed while it was being read; try again.")


def unique_paths(texts: Iterable[str]) -> list[RepoPath]:
    return sorted({parse_path(text) for text in texts}, key=path_bytes)


def parents_seen(paths: Iterable[RepoPath], look: Callable[[RepoPath], PathState]) -> Mapping[RepoPath, PathState]:
    """The state of the directories above these paths, without the root."""
    above = {parent for path in paths for parent in ancestors_of(path) if parent != ROOT}
    return {path: look(path) for path in sorted(above, key=os.fsencode)}
