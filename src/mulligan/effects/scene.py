"""Where an effect takes place: a call on a desk, under a session's boundary.

Paths enter here as text and leave as spots: resolved, judged, and held by the handle that was judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mulligan.boundary.capability import Capability, FsOp
from mulligan.boundary.verdict import Boundary
from mulligan.effects.receipt import blob_payload, inline_bytes, inline_text
from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.faults import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, from_wire, is_below, parse_repo_path
from mulligan.values.refusal import Refused
from mulligan.workspace.places import Spot
from mulligan.workspace.reading import refusal_of

OUTPUT_MODES = ("auto", "require_inline")


@dataclass(slots=True)
class Scene:
    desk: Desk
    session: SessionId
    boundary: Boundary
    call: Call
    workdir: RepoPath = ROOT

    @property
    def capability(self) -> Capability:
        return self.boundary.capability

    # Paths.

    def path(self, text: str) -> RepoPath:
        """The path a text means: relative to the working directory, or absolute inside the root."""
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise Refused("error", "invalid_path", "A path is non-empty text without NUL.")
        try:
            if text.startswith("base64:"):
                return from_wire(text)
            return self._normal(text)
        except MulliganError as error:
            raise Refused("error", "invalid_path", error.message) from None

    def _normal(self, text: str) -> RepoPath:
        names: list[str] = []
        relative = self._below_root(text) if text.startswith("/") else f"{self.workdir}/{text}"
        for name in relative.split("/"):
            if name == "..":
                if not names:
                    raise Refused("forbidden", "path_not_allowed", f"{text!r} leads out of the root.")
                names.pop()
            elif name not in ("", "."):
                names.append(name)
        return parse_repo_path("/".join(names) or ".")

    def _below_root(self, text: str) -> str:
        """An absolute path relative to the root, by whole names: `/repo-evil` is not in `/repo`."""
        clean = os.path.normpath(text)
        for root in {os.fsdecode(self.desk.disk.root.path), self.boundary.root.rstrip("/")}:
            if clean == root:
                return "."
            if clean.startswith(root + "/"):
                return clean[len(root) + 1 :]
        raise Refused("forbidden", "path_not_allowed", f"{text!r} is outside the root.")

    @contextmanager
    def spot(self, op: FsOp, text: str, *, final: bool = True, writing: bool = False) -> Iterator[Spot]:
        """The judged spot of a path. `final`: a link at its end is followed too."""
        spot = self._resolved(self.path(text), final=final)
        with spot:
            (self.boundary.check_write if writing else self.boundary.check_path)(op, spot.path)
            yield spot

    def _resolved(self, path: RepoPath, *, final: bool) -> Spot:
        try:
            return self.desk.disk.resolve(path, follow=self.capability.follow_symlinks, final=final)
        except OSError as error:
            raise refusal_of(error, path) from None

    def real(self, op: FsOp, text: str, *, final: bool = True) -> tuple[RepoPath, list[RepoPath]]:
        """The real path a write to `text` would go to, and the directories above it that do not exist yet."""
        asked = self.path(text)
        try:
            with self.spot(op, text, final=final, writing=True) as spot:
                return spot.path, []
        except Refused as refused:
            if refused.code != "path_not_found":
                raise
        for base in ancestors_of(asked):
            with self._resolved(base, final=True) as spot:
                if not self._is_directory(spot):
                    continue
                return self._beyond(op, asked, base, spot.path)
        raise Refused("error", "parent_not_found", f"The directory of {asked} does not exist.")

    def _is_directory(self, spot: Spot) -> bool:
        from stat import S_ISDIR

        try:
            return S_ISDIR(os.lstat(spot.name, dir_fd=spot.parent).st_mode)
        except OSError:
            return False

    def _beyond(self, op: FsOp, asked: RepoPath, base: RepoPath, real: RepoPath) -> tuple[RepoPath, list[RepoPath]]:
        rest = asked if base == ROOT else asked[len(base) + 1 :]
        target = parse_repo_path(f"{real}/{rest}")
        self.boundary.check_write(op, target)
        missing = [path for path in reversed(ancestors_of(target)) if path != ROOT and is_below(path, real)]
        return target, missing

    # Blobs and answers.

    def blob(self, reference: str, code: str = "invalid_content") -> bytes:
        """The bytes of a blob this session has been handed; others' blobs do not exist for it."""
        try:
            digest = parse_digest(reference)
        except MulliganError as error:
            raise Refused("error", code, error.message) from None
        if not self.call.may_read_blob(digest):
            raise Refused("error", code, f"This session has no blob {digest}.")
        try:
            return self.desk.ledger.blobs.read(digest)
        except MulliganError as error:
            raise Refused("error", error.code, error.message) from None

    def answer(self, data: bytes, *, limit: int, mode: str, text: bool | None = None) -> dict[str, Any]:
        """Inline when it is small enough; else a blob, or with `require_inline` a refusal. `text` None: find out."""
        if mode not in OUTPUT_MODES:
            raise Refused("error", "invalid_output_mode", "output_mode is 'auto' or 'require_inline'.")
        if len(data) > limit:
            if mode == "require_inline":
                words = f"{len(data)} bytes do not fit inline (limit {limit})."
                raise Refused("error", "inline_required_too_large", words, size_bytes=len(data))
            return blob_payload(self.keep(data), data)
        if text is False:
            return inline_bytes(data)
        try:
            return inline_text(data.decode("utf-8"))
        except UnicodeDecodeError:
            return inline_bytes(data)

    def keep(self, data: bytes) -> Digest:
        try:
            digest = self.desk.ledger.blobs.store(data)
        except MulliganError as error:
            raise Refused("error", "output_store_failed", error.message) from None
        self.call.hand_out(digest)
        return digest
