"""Where an effect takes place: a call on a desk, under a session's boundary.

Paths enter here as text and leave as spots: resolved, judged, and held by the handle that was judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mulligan.boundary.capability import Capability, FsOp
from mulligan.boundary.verdict import Boundary
from mulligan.effects.env import NO_ENV, SessionEnv
from mulligan.effects.receipt import blob_payload, inline
from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.session.roots import Anchor, Mount, mount_holding
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.entries import DirEntry
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import (
    ROOT,
    RepoPath,
    ancestors_of,
    is_below,
    is_inside,
    parse_below,
    parse_repo_path,
    text_from_wire,
    to_wire,
)
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.places import Spot
from mulligan.workspace.reading import refusal_of


class Elsewhere(Exception):
    """The effect is about a path in a mounted root, so it takes place there. Nothing has happened yet."""

    def __init__(self, mount: Mount) -> None:
        super().__init__(mount.path)
        self.mount = mount


@dataclass(slots=True)
class Scene:
    desk: Desk
    session: SessionId
    boundary: Boundary
    whole: Call
    workdir: RepoPath = ROOT
    sink: Sink | None = None
    env: SessionEnv = NO_ENV
    network: str = "full"
    anchor: Anchor | None = None
    mount: Mount | None = None
    writes: bool = False
    deadline: datetime | None = None
    stdin_fd: int | None = None
    """A descriptor of ours that a command reads as its standard input, unless the effect gives it other input."""
    withheld: set[RepoPath] = field(default_factory=set)
    """the paths this effect has to do with whose bytes are not captured: its record holds none of them"""

    @property
    def call(self) -> Call:
        """What the whole call does in this root. Not to be asked for before the effect's paths have chosen the root."""
        return self.desk.part_of(self.whole) if self.writes else self.whole

    @property
    def capability(self) -> Capability:
        return self.boundary.capability

    # Paths.

    def path(self, text: str) -> RepoPath:
        """The path a text means: relative to the working directory, or absolute inside the root."""
        try:
            plain = text_from_wire(text)
            if not plain:
                raise fault("invalid_path", "A path is not empty.")
            return self._normal(plain)
        except MulliganError as error:
            if error.details.get("climbs"):
                raise Refused("forbidden", "path_not_allowed", error.message) from None
            raise Refused("error", "invalid_path", error.message) from None

    def _normal(self, text: str) -> RepoPath:
        if self.anchor is not None and self.anchor.mounts:
            return self._in_our_root(text, self.anchor)
        return parse_below(ROOT, self._below_root(text)) if text.startswith("/") else parse_below(self.workdir, text)

    def _in_our_root(self, text: str, anchor: Anchor) -> RepoPath:
        """Where several roots are mounted, a path is in the innermost one that holds it, however it is written."""
        inner = self._below_primary(text, anchor)
        whole = os.path.normpath(text) if inner is None else os.path.normpath(f"{anchor.primary}/{inner}")
        mount = mount_holding(anchor, whole)
        if mount is not None and inner is not None and len(mount.path) < len(anchor.primary):
            mount = None
        if mount is None and inner is None:
            raise Refused("forbidden", "path_not_allowed", f"{text!r} is outside the roots.")
        if mount == self.mount:
            return parse_below(ROOT, whole[len(anchor.primary if mount is None else mount.path) :])
        if self.mount is None and mount is not None:
            raise Elsewhere(mount)
        words = f"{text!r} is in another root than the rest; one effect takes place in one root."
        raise Refused("forbidden", "path_not_allowed", words)

    def _below_primary(self, text: str, anchor: Anchor) -> RepoPath | None:
        """The path in the primary root, for one that is there by its name."""
        if not text.startswith("/"):
            return parse_below(self.workdir, text)
        own = (anchor.primary, *(() if self.mount is not None else (self.boundary.root,)))
        clean = os.path.normpath("/" + text.lstrip("/"))
        return next((parse_below(ROOT, clean[len(root.rstrip("/")) :]) for root in own if is_inside(clean, root)), None)

    def _below_root(self, text: str) -> str:
        """An absolute path relative to the root, by whole names: `/repo-evil` is not in `/repo`."""
        clean = os.path.normpath("/" + text.lstrip("/"))
        for root in (os.fsdecode(self.desk.disk.root.path), self.boundary.root):
            if is_inside(clean, root):
                return clean[len(root) :].lstrip("/")
        raise Refused("forbidden", "path_not_allowed", f"{text!r} is outside the root.")

    def shown(self, path: RepoPath) -> str:
        """The text by which this session would name a path: from its working directory, and always one line.

        In a mounted root the whole path, even of what is kept aside for now.
        """
        if self.mount is not None:
            return self.one_line(RepoPath(os.path.normpath(f"{self.mount.path}/{path}")))
        return self.one_line(path if self.workdir == ROOT else RepoPath(os.path.relpath(path, self.workdir)))

    @staticmethod
    def one_line(path: RepoPath) -> str:
        return to_wire(path, one_line=True)

    def judge(self, text: str) -> None:
        """Refuse a path that cannot be one, or that leads out of the root. Nothing is asked about what is there."""
        spot = self._found(self.path(text), final=True)
        if spot is not None:
            spot.close()

    @contextmanager
    def spot(self, op: FsOp, text: str) -> Iterator[Spot]:
        """The judged spot of a path to look at; a link at its end is followed."""
        path = self.path(text)
        try:
            spot = self.desk.disk.resolve(path, follow=self.capability.follow_symlinks)
        except OSError as error:
            self.boundary.check_path(op, path)
            raise refusal_of(error, self.shown(path)) from None
        with spot:
            self.boundary.check_path(op, spot.path)
            self.note_withheld(spot.path)
            yield spot

    def note_withheld(self, path: RepoPath) -> None:
        if self.desk.disk.capture.withheld(path) is not None:
            self.withheld.add(path)

    def _found(self, path: RepoPath, *, final: bool) -> Spot | None:
        """The spot, or None when a directory on the way is not there."""
        try:
            return self.desk.disk.resolve(path, follow=self.capability.follow_symlinks, final=final)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise refusal_of(error, self.shown(path)) from None

    def real(self, op: FsOp, text: str, *, final: bool = True) -> tuple[RepoPath, list[RepoPath]]:
        """The real path a write to `text` would go to, and the directories above it that do not exist yet."""
        asked = self.path(text)
        spot = self._found(asked, final=final)
        if spot is not None:
            with spot:
                self._check_write(op, spot)
                self.note_withheld(spot.path)
                return spot.path, []
        base, real = self._nearest_directory(asked)
        rest = asked if base == ROOT else asked[len(base) + 1 :]
        target = parse_repo_path(f"{real}/{rest}")
        self.boundary.check_write(op, target)
        self.note_withheld(target)
        return target, [path for path in reversed(ancestors_of(target)) if path != ROOT and is_below(path, real)]

    def _check_write(self, op: FsOp, spot: Spot) -> None:
        if spot.outside:
            raise Refused("forbidden", "path_not_allowed", f"{spot.path} leads out of the root, where nothing changes.")
        self.boundary.check_write(op, spot.path)

    def _nearest_directory(self, path: RepoPath) -> tuple[RepoPath, RepoPath]:
        """The lowest directory above a path that is there: by the name that was given, and by its real one."""
        for base in ancestors_of(path):
            spot = self._found(base, final=True)
            if spot is None:
                continue
            with spot:
                if spot.outside:
                    words = f"{path} leads out of the root, where nothing changes."
                    raise Refused("forbidden", "path_not_allowed", words)
                if isinstance(self.desk.disk.image(spot).entry, DirEntry):
                    return base, spot.path
        raise Refused("error", "parent_not_found", f"The directory of {self.shown(path)} does not exist.")

    # Blobs and answers.

    def blob(self, reference: str, code: str = "invalid_content") -> bytes:
        """The bytes of a blob this session has been handed; others' blobs do not exist for it."""
        digest = self.blob_named(reference, code)
        try:
            return self.desk.ledger.blobs.read(digest)
        except MulliganError as error:
            raise Refused("error", error.code, error.message) from None

    def blob_page(self, digest: Digest, offset: int, most: int) -> bytes:
        """Some bytes of a blob, without reading what is not asked for."""
        try:
            return self.desk.ledger.blobs.read_range(digest, offset, most)
        except MulliganError as error:
            raise Refused("error", error.code, error.message) from None

    def blob_named(self, reference: str, code: str) -> Digest:
        """The digest, if this session has been handed it."""
        try:
            digest = parse_digest(reference)
        except MulliganError as error:
            raise Refused("error", code, error.message) from None
        if not self.whole.may_read_blob(digest):
            raise Refused("error", code, f"This session has no blob {digest}.")
        return digest

    def answer(self, data: bytes, *, op: FsOp, path: RepoPath, mode: str, text: bool | None = None) -> dict[str, Any]:
        """Inline when it is small enough; else a blob, or with `require_inline` a refusal. `text` None: find out.

        What a policy keeps out of answers is a blob without even a preview.
        """
        hidden = self.boundary.keeps_out_of_answers(op, path)
        limit = 0 if hidden else self.boundary.inline_limit
        if len(data) > limit:
            if mode == "require_inline":
                raise too_large(limit)
            if self.withheld:
                words = f"More than {limit} bytes of a path that is not captured: they may not be stored as a blob."
                raise Refused("error", "not_captured", f"{words} Ask for less at a time.")
            return blob_payload(self.keep(data), data, preview=not hidden)
        return inline(data, text=text)

    def keep(self, data: bytes) -> Digest:
        try:
            digest = self.desk.ledger.blobs.store(data)
        except MulliganError as error:
            raise Refused("error", "output_store_failed", error.message) from None
        self.whole.account.hand_out(digest)
        return digest


def too_large(limit: int) -> Refused:
    return Refused("error", "inline_required_too_large", f"It is longer than the {limit} bytes that fit inline.")
