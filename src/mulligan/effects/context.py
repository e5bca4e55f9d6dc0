"""The context of an effect: its call, its root, and its session's boundary.

`EffectContext` takes paths as text. It resolves each path to a `ResolvedPath`, checks the boundary, and lets the effect
act on the handle that was checked.

An effect acts in one root: the session's primary root, or the mounted root that contains its paths. An effect in a
mounted root belongs to the same call. If it writes there, the call moves to that root if it has done nothing yet;
otherwise it gets a part in that root, which commits and aborts with the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from datetime import datetime
from typing import Any, Literal

from mulligan.boundary.capability import UNLIMITED, Capability, FsOp, parse_capability
from mulligan.boundary.policy import NO_POLICY, parse_policy
from mulligan.boundary.verdict import Boundary, path_denied
from mulligan.effects.receipt import blob_payload, inline
from mulligan.effects.running_commands import NO_ENV, SessionEnv
from mulligan.exec.command import Sink
from mulligan.files.read import refusal_of
from mulligan.files.resolve import ResolvedPath
from mulligan.history.branches import copy_sandboxed_root, sandboxed_copy_of
from mulligan.history.call import Call
from mulligan.history.open_root import OpenRoot
from mulligan.history.undo_log import Intent
from mulligan.session.roots import ANCHOR, Mount, WorkspaceAnchor, anchor_of, mount_holding
from mulligan.session.tables import BOUNDARIES, FACTS, SESSIONS, BoundaryRow, session_journal
from mulligan.values.canonical import decode
from mulligan.values.clock import now_ns
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.entries import DirEntry, Entry
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import (
    ROOT,
    RepoPath,
    ancestors_of,
    from_wire,
    is_below,
    is_inside,
    parse_below,
    parse_repo_path,
    text_from_wire,
    to_wire,
)


@fast_dataclass(slots=True, frozen=True)
class SessionBoundary:
    """A session's boundary, the folder where its relative paths begin, and the settings for its commands."""

    boundary: Boundary
    workdir: RepoPath = ROOT
    env: SessionEnv = NO_ENV
    network: str = "full"
    anchor: WorkspaceAnchor | None = None


def session_boundary(open_root: OpenRoot, session: SessionId, *, default: Boundary) -> SessionBoundary:
    """The boundary attached to the session, limited by `default`, the caller's own boundary.

    Refuses a closed or expired session.
    """
    row, known, fact = open_root.ledger.store.rows((BOUNDARIES, session), (SESSIONS, session), (FACTS, session, ANCHOR))
    if (row is not None and row.ended_at_ns is not None) or (known is not None and known.closed_at is not None):
        raise Refused("error", "session_closed", f"Session {session!r} is closed.")
    if row is not None and has_expired(open_root, row):
        end_boundary(open_root, session)
        raise Refused("error", "session_expired", f"Session {session!r} has expired.")
    anchor = None if fact is None else anchor_of(fact)
    return SessionBoundary(default, anchor=anchor) if row is None else _read_boundary(open_root, row, default, anchor)


def past_session_boundary(open_root: OpenRoot, session: SessionId, *, default: Boundary) -> SessionBoundary:
    """As `session_boundary`, for undo operations: also for a closed session, because its calls can still be undone."""
    row, fact = open_root.ledger.store.rows((BOUNDARIES, session), (FACTS, session, ANCHOR))
    anchor = None if fact is None else anchor_of(fact)
    return SessionBoundary(default, anchor=anchor) if row is None else _read_boundary(open_root, row, default, anchor)


def has_expired(open_root: OpenRoot, row: BoundaryRow) -> bool:
    return row.expires_at_ns is not None and now_ns(open_root.ledger.clock) > row.expires_at_ns


def _read_boundary(
    open_root: OpenRoot, row: BoundaryRow, default: Boundary, anchor: WorkspaceAnchor | None
) -> SessionBoundary:
    body = decode(row.body)
    capability = parse_capability(body["capability"]) if body["capability"] else UNLIMITED
    policy = parse_policy(body["policy"]) if body["policy"] else NO_POLICY
    workdir = from_wire(body["workdir"])
    env = SessionEnv(session=row.session, body=body, key=open_root.ledger.store.secret_key)
    return SessionBoundary(default.narrowed(capability, policy), workdir, env, body["network_mode"], anchor)


def end_boundary(open_root: OpenRoot, session: SessionId) -> int:
    ended = now_ns(open_root.ledger.clock)
    journal = session_journal(session)
    with open_root.ledger.store.write(about=(journal,)) as tx:
        body = {"session": session, "ended_at_ns": ended}
        open_root.ledger.journal.append(tx, journal, "boundary.ended", body, at=open_root.ledger.now())
    return ended


LimitName = Literal["max_write_bytes", "max_patch_bytes", "max_changed_files", "max_edit_replacements"]
_OVER_LIMIT: dict[LimitName, str] = {
    "max_write_bytes": "The file has {} bytes; this session may write at most {}.",
    "max_patch_bytes": "The patch has {} bytes; this session may apply at most {}.",
    "max_changed_files": "This would change {} files; this session may change at most {} at once.",
    "max_edit_replacements": "The edit makes {} replacements; this session may make at most {}.",
}


def check_limit(capability: Capability, name: LimitName, count: int) -> None:
    """Refuse a change that goes over one of the session's limits on changes."""
    limit = getattr(capability, name)
    if limit is not None and count > limit:
        raise Refused("forbidden", f"{name}_exceeded", _OVER_LIMIT[name].format(count, limit))


@contextmanager
def refusing(code: str | None = None) -> Iterator[None]:
    """Turns an error in the block into a refusal of the effect, with this code or the error's own."""
    try:
        yield
    except MulliganError as error:
        raise Refused("error", code or error.code, error.message) from None


@fast_dataclass(slots=True)
class EffectContext:
    open_root: OpenRoot
    session: SessionId
    boundary: Boundary
    whole: Call
    call: Call
    """the part of `whole` in this root"""
    workdir: RepoPath = ROOT
    sink: Sink | None = None
    env: SessionEnv = NO_ENV
    network: str = "full"
    anchor: WorkspaceAnchor | None = None
    mount: Mount | None = None
    writes: bool = False
    deadline: datetime | None = None
    stdin_fd: int | None = None
    """A descriptor of this process for a command's standard input, unless the effect passes other input."""
    not_captured: set[RepoPath] = field(default_factory=set)
    """paths of this effect that a rule excludes from capture; its record has none of their bytes"""
    change_by: Callable[[Sequence[Intent]], list[Entry]] | None = None
    """makes the changes instead of the call: the snapshot tools check a lease for each path, or only plan"""

    @property
    def capability(self) -> Capability:
        return self.boundary.capability

    def change(self, intents: Sequence[Intent]) -> list[Entry]:
        """Change paths, all or none. The entries that they have then."""
        return (self.change_by or self.call.change)(intents)

    # Roots.

    def anchored(self, anchor: WorkspaceAnchor) -> EffectContext:
        """This context at the session's primary root, which may differ from the root it was opened on."""
        here, mounted = self.open_root, _mounted_inside(anchor, anchor.primary)
        if os.fsencode(anchor.primary) == here.disk.root.path:
            return replace(self, anchor=anchor, boundary=replace(self.boundary, mounted=mounted))
        return replace(self._at(_root_at(here, anchor.primary, record=self.writes), anchor, None), workdir=ROOT)

    def in_root_of(self, texts: Iterable[str]) -> EffectContext:
        """This context in the mounted root that contains one of the paths; itself if no root does.

        Runs before the effect acts. An invalid path, or one in another root than the rest, is refused where it is used.
        """
        if self.anchor is None or not self.anchor.mounts:
            return self
        for text in texts:
            mount = None
            with suppress(Refused, MulliganError):
                mount = self._mount_of(text_from_wire(text), self.anchor)[0]
            if mount is not None:
                return self._mounted(mount, self.anchor)
        return self

    def _mounted(self, mount: Mount, anchor: WorkspaceAnchor) -> EffectContext:
        """This context in a mounted root. Refuses to write in a root that is mounted read only."""
        if self.writes and mount.mode == "read_only":
            raise path_denied(f"{mount.path} is mounted read only.")
        return self._at(_open_root_of(self.open_root, self.session, mount, writes=self.writes), anchor, mount)

    def _at(self, open_root: OpenRoot, anchor: WorkspaceAnchor, mount: Mount | None) -> EffectContext:
        path = anchor.primary if mount is None else mount.path
        boundary = self.boundary.moved_to(path, _mounted_inside(anchor, path))
        boundary = replace(boundary, folds_case=open_root.disk.root.folds_case)
        call = open_root.part_of(self.whole) if self.writes else self.whole
        return replace(self, open_root=open_root, boundary=boundary, call=call, anchor=anchor, mount=mount)

    # Paths.

    def path(self, text: str) -> RepoPath:
        """Parses a path: relative to the working directory, or absolute inside the root."""
        try:
            plain = text_from_wire(text) if text.startswith("base64:") else text
            if not plain:
                raise fault("invalid_path", "A path must not be empty.")
            if self.anchor is not None and self.anchor.mounts:
                return self._in_our_root(plain, self.anchor)
            return parse_below(self.workdir, plain) if plain[0] != "/" else parse_below(ROOT, self._below_root(plain))
        except MulliganError as error:
            if error.details.get("climbs"):
                raise path_denied(error.message) from None
            raise Refused("error", "invalid_path", error.message) from None

    def _in_our_root(self, text: str, anchor: WorkspaceAnchor) -> RepoPath:
        mount, whole = self._mount_of(text, anchor)
        if mount != self.mount:
            raise path_denied(f"{text!r} is in another root than the other paths; one effect acts in one root.")
        return parse_below(ROOT, whole[len(anchor.primary if mount is None else mount.path) :])

    def _mount_of(self, text: str, anchor: WorkspaceAnchor) -> tuple[Mount | None, str]:
        """The innermost root that contains a path, and the absolute path. None means the primary root."""
        inner = self._below_primary(text, anchor)
        whole = os.path.normpath(text) if inner is None else os.path.normpath(f"{anchor.primary}/{inner}")
        mount = mount_holding(anchor, whole)
        if mount is not None and inner is not None and len(mount.path) < len(anchor.primary):
            mount = None
        if mount is None and inner is None:
            raise path_denied(f"{text!r} is outside the roots.")
        return mount, whole

    def _below_primary(self, text: str, anchor: WorkspaceAnchor) -> RepoPath | None:
        """The path in the primary root, if its name is below that root."""
        if not text.startswith("/"):
            return parse_below(self.workdir, text)
        own = (anchor.primary, *(() if self.mount is not None else (self.boundary.root,)))
        clean = os.path.normpath("/" + text.lstrip("/"))
        return next((parse_below(ROOT, clean[len(root.rstrip("/")) :]) for root in own if is_inside(clean, root)), None)

    def _below_root(self, text: str) -> str:
        """An absolute path relative to the root. Compares whole names: `/repo-evil` is not in `/repo`."""
        clean = os.path.normpath("/" + text.lstrip("/"))
        for root in (os.fsdecode(self.open_root.disk.root.path), self.boundary.root):
            if is_inside(clean, root):
                return clean[len(root) :].lstrip("/")
        raise path_denied(f"{text!r} is outside the root.")

    def shown(self, path: RepoPath) -> str:
        """A path as this session names it: relative to its working directory, on one line.

        In a mounted root it is the absolute path; for a sandboxed root, the path in the root and not in the copy.
        """
        if self.mount is not None:
            path = RepoPath(os.path.normpath(f"{self.mount.path}/{path}"))
        elif self.workdir != ROOT:
            path = RepoPath(os.path.relpath(path, self.workdir))
        return to_wire(path, one_line=True)

    def check_resolves(self, text: str) -> None:
        """Refuse an invalid path and a path that leads out of the root, without checking any permission."""
        resolved = self._resolve(self.path(text), final=True)
        if resolved is not None:
            resolved.close()

    @contextmanager
    def resolved(self, op: FsOp, text: str) -> Iterator[ResolvedPath]:
        """Resolve a path for reading and check the boundary. Follows a link at its end."""
        path = self.path(text)
        try:
            resolved = self.open_root.disk.resolve(path, follow=self.capability.follow_symlinks)
        except OSError as error:
            self.boundary.check_path(op, path)
            raise refusal_of(error, self.shown(path)) from None
        with resolved:
            self.boundary.check_path(op, resolved.path)
            self.note_not_captured(resolved.path)
            yield resolved

    def note_not_captured(self, path: RepoPath) -> None:
        if self.open_root.disk.capture.any and self.open_root.disk.capture.withheld(path) is not None:
            self.not_captured.add(path)

    def _resolve(self, path: RepoPath, *, final: bool) -> ResolvedPath | None:
        """The resolved path; None if a directory above it does not exist."""
        try:
            follow = self.boundary.capability.follow_symlinks
            return self.open_root.disk.resolve(path, follow=follow, final=final)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise refusal_of(error, self.shown(path)) from None

    def real(self, op: FsOp, text: str, *, final: bool = True) -> tuple[RepoPath, list[RepoPath]]:
        """The real path that a write to `text` would change, and the missing directories above it."""
        asked = self.path(text)
        resolved = self._resolve(asked, final=final)
        if resolved is not None:
            with resolved:
                if resolved.outside:
                    raise path_denied(f"{resolved.path} leads out of the root; effects change nothing there.")
                self.boundary.check_write(op, resolved.path)
                if self.open_root.disk.capture.any:
                    self.note_not_captured(resolved.path)
                return resolved.path, []
        base, real = self._nearest_directory(asked)
        rest = asked if base == ROOT else asked[len(base) + 1 :]
        target = parse_repo_path(f"{real}/{rest}")
        self.boundary.check_write(op, target)
        self.note_not_captured(target)
        return target, [path for path in reversed(ancestors_of(target)) if path != ROOT and is_below(path, real)]

    def _nearest_directory(self, path: RepoPath) -> tuple[RepoPath, RepoPath]:
        """The nearest existing directory above a path: its name as given, and its real path."""
        for base in ancestors_of(path):
            resolved = self._resolve(base, final=True)
            if resolved is None:
                continue
            with resolved:
                if resolved.outside:
                    raise path_denied(f"{path} leads out of the root; effects change nothing there.")
                if isinstance(self.open_root.disk.image(resolved).entry, DirEntry):
                    return base, resolved.path
        raise Refused("error", "parent_not_found", f"The directory of {self.shown(path)} does not exist.")

    # Blobs and answers.

    def blob(self, reference: str, code: str = "invalid_content") -> bytes:
        """The bytes of a blob that an answer to this session named. Other blobs do not exist for the session."""
        digest = self.blob_named(reference, code)
        with refusing():
            return self.open_root.ledger.blobs.read(digest)

    def blob_page(self, digest: Digest, offset: int, most: int) -> bytes:
        """A part of a blob, without reading the rest."""
        with refusing():
            return self.open_root.ledger.blobs.read_range(digest, offset, most)

    def blob_named(self, reference: str, code: str) -> Digest:
        """The digest, if an answer to this session named it."""
        with refusing(code):
            digest = parse_digest(reference)
        if not self.whole.may_read_blob(digest):
            raise Refused("error", code, f"This session has no blob {digest}.")
        return digest

    def answer(self, data: bytes, *, op: FsOp, path: RepoPath, mode: str, text: bool | None = None) -> dict[str, Any]:
        """The data inline if it is small enough; else as a blob, or refused with `require_inline`.

        `text` None means to detect UTF-8. If a policy keeps the content out of answers, the blob has no preview.
        """
        hidden = self.boundary.keeps_out_of_answers(op, path)
        limit = 0 if hidden else self.boundary.inline_limit
        if len(data) > limit:
            if mode == "require_inline":
                raise too_large(limit)
            if self.not_captured:
                words = f"The answer has more than {limit} bytes of a path that is not captured; it cannot be a blob."
                raise Refused("error", "not_captured", f"{words} Read smaller parts.")
            return blob_payload(self.keep(data), data, preview=not hidden)
        return inline(data, text=text)

    def keep(self, data: bytes) -> Digest:
        with refusing("output_store_failed"):
            digest = self.open_root.ledger.blobs.store(data)
        self.whole.account.hand_out(digest)
        return digest


def too_large(limit: int) -> Refused:
    words = f"The answer is longer than the {limit} bytes that fit inline."
    return Refused("error", "inline_required_too_large", words)


def _open_root_of(open_root: OpenRoot, session: SessionId, mount: Mount, *, writes: bool) -> OpenRoot:
    """The root itself; for a sandboxed root its copy, once something has been written."""
    if mount.mode != "sandboxed":
        return _root_at(open_root, mount.path, record=writes)
    if writes:
        return _root_at(open_root, copy_sandboxed_root(open_root.opener, session, mount.path).directory, record=True)
    with open_root.ledger.store.read() as tx:
        copy = sandboxed_copy_of(tx, session, mount.path)
    return _root_at(open_root, mount.path if copy is None else copy.directory, record=False)


def _root_at(open_root: OpenRoot, directory: str, *, record: bool) -> OpenRoot:
    try:
        return open_root.opener.elsewhere(os.fsencode(directory), record=record)
    except OSError as error:
        raise refusal_of(error, directory) from None


def _mounted_inside(anchor: WorkspaceAnchor, root: str) -> tuple[RepoPath, ...]:
    """Roots mounted inside this one. A write through this root must not reach them."""
    inner = [one for one in anchor.mounts if one.mode != "extend" and one.path != root and is_inside(one.path, root)]
    return tuple(parse_repo_path(one.path[len(root.rstrip("/")) + 1 :]) for one in inner)
