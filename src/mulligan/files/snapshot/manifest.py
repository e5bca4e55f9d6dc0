"""Manifests: which files a snapshot holds, and the id that follows from it. Pure.

The id is made of fingerprint and manifest alone. An entry is a path and the digest of its bytes, for a link those
of its target. Size, mode and kind, empty directories, and what was asked for are kept beside it and do not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, from_wire, is_below, parent_of, path_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.fingerprint import Fingerprint

CapturedKind = Literal["file", "symlink"]


@plain(slots=True, frozen=True)
class Captured:
    """One file or link of a snapshot."""

    path: RepoPath
    blob: Digest
    size: int
    mode: int = 0o644
    kind: CapturedKind = "file"


@dataclass(frozen=True)
class Manifest:
    """Captured entries by path bytes. `empty_dirs` have a mode; `scope` is what was asked for, directories and all."""

    entries: tuple[Captured, ...]
    empty_dirs: tuple[tuple[RepoPath, int], ...] = ()
    scope: tuple[RepoPath, ...] = ()

    @staticmethod
    def of(
        entries: Iterable[Captured],
        empty_dirs: Iterable[tuple[RepoPath, int]] = (),
        scope: Iterable[RepoPath] = (),
    ) -> Manifest:
        """In order, each path once."""
        unique = {entry.path: entry for entry in entries}
        return Manifest(
            tuple(unique[path] for path in sorted(unique, key=path_bytes)),
            tuple(sorted(set(empty_dirs), key=lambda one: path_bytes(one[0]))),
            tuple(sorted(set(scope), key=path_bytes)),
        )

    @cached_property
    def by_path(self) -> Mapping[RepoPath, Captured]:
        return {entry.path: entry for entry in self.entries}

    @cached_property
    def directories(self) -> frozenset[RepoPath]:
        """The parents of everything captured, and the empty ones."""
        found = {parent for entry in self.entries for parent in ancestors_of(entry.path)}
        for path, _ in self.empty_dirs:
            found |= {path, *ancestors_of(path)}
        return frozenset(found | {ROOT})

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)

    def stats(self) -> dict[str, int]:
        return {"files": len(self.entries), "total_bytes": self.total_bytes}

    def covers(self, path: RepoPath) -> bool:
        """Whether the path would be here, had it existed."""
        return any(path == one or is_below(path, one) for one in self.scope)

    def canonical(self) -> bytes:
        return encode({"entries": [{"path": to_wire(one.path), "blob": one.blob} for one in self.entries]})

    def to_json(self) -> dict[str, Any]:
        return {
            "entries": [[to_wire(one.path), one.blob, one.size, one.mode, one.kind] for one in self.entries],
            "empty_dirs": [[to_wire(path), mode] for path, mode in self.empty_dirs],
            "scope": [to_wire(path) for path in self.scope],
        }

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Manifest:
        return Manifest(
            tuple(
                Captured(from_wire(path), parse_digest(blob), size, mode, kind)
                for path, blob, size, mode, kind in body["entries"]
            ),
            tuple((from_wire(path), mode) for path, mode in body["empty_dirs"]),
            tuple(from_wire(path) for path in body["scope"]),
        )


def snapshot_id(fingerprint: Fingerprint, manifest: Manifest) -> str:
    return "sha256:" + sha256(fingerprint.canonical() + b"\n" + manifest.canonical()).hexdigest()


@plain(slots=True, frozen=True)
class Row:
    """What a listing shows of a snapshot: a captured entry, or a directory that leads to some."""

    path: RepoPath
    entry: Captured | None


def rows_below(manifest: Manifest, base: RepoPath, *, depth: int) -> list[Row]:
    """Captured entries and implied directories at most `depth` levels below the base, by path bytes.

    A path that was not captured has none; a file lists itself.
    """
    if base in manifest.by_path:
        return [Row(base, manifest.by_path[base])]
    level = _level(base) + depth
    files = [Row(one.path, one) for one in manifest.entries if is_below(one.path, base) and _level(one.path) <= level]
    folders = [
        Row(path, None)
        for path in manifest.directories
        if path != ROOT and is_below(path, base) and _level(path) <= level
    ]
    return sorted([*files, *folders], key=lambda row: path_bytes(row.path))


def _level(path: RepoPath) -> int:
    return 0 if path == ROOT else path.count("/") + 1


def follow_link(manifest: Manifest, path: RepoPath, target_of: Mapping[RepoPath, str]) -> RepoPath | None:
    """Where a chain of captured links ends; None if it leaves what was captured."""
    for _ in range(40):
        if path not in target_of:
            return path if path in manifest.by_path else None
        target = target_of[path]
        names = [] if parent_of(path) == ROOT else parent_of(path).split("/")
        for name in target.split("/"):
            if name == ".." and names:
                names.pop()
            elif name == ".." or (name == "" and target.startswith("/")):
                return None
            elif name not in ("", "."):
                names.append(name)
        path = RepoPath("/".join(names) or ".")
    return None


Status = Literal["added", "modified", "deleted"]


def changes_between(before: Manifest, after: Manifest) -> list[tuple[RepoPath, Status]]:
    """By path, content against content; a rename is a deletion and an addition."""
    found: list[tuple[RepoPath, Status]] = []
    for path in sorted({*before.by_path, *after.by_path}, key=path_bytes):
        old, new = before.by_path.get(path), after.by_path.get(path)
        if old is None:
            found.append((path, "added"))
        elif new is None:
            found.append((path, "deleted"))
        elif (old.blob, old.kind) != (new.blob, new.kind):
            found.append((path, "modified"))
    return found
