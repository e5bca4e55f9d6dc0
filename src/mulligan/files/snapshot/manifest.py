"""Manifests: the files of a snapshot, and the snapshot's id.

The id depends on fingerprint and manifest alone. An entry is a path and the digest of its bytes, for a link of its
target. Size, mode and kind, empty directories, and the requested scope are stored beside it and do not change the id.

`tar_of` makes a tar archive whose bytes depend on nothing but the snapshot.

The tables have one row for each snapshot, folded from `snapshot.created`. A snapshot that is created again has a second
record, and its creation time is that of the last one. `snapshot.evicted` names the dropped bodies; the last of those
records deletes the row. The content of a snapshot determines its id, but not its parent, so lineage is a table of its
own: the first recorded parent stays, and no snapshot is its own parent.

The tables of leases are here too, because opening a store needs them, but not the code of `lease`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from mulligan.files.snapshot.fingerprint import Fingerprint
from mulligan.store.journal import Record
from mulligan.store.protocol import Table, Tx
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import (
    ROOT,
    RepoPath,
    ancestors_of,
    from_wire,
    is_below,
    is_within,
    parent_of,
    path_bytes,
    to_wire,
)

if TYPE_CHECKING:
    from tarfile import TarFile, TarInfo

CapturedKind = Literal["file", "symlink"]


@fast_dataclass(slots=True, frozen=True)
class CapturedFile:
    """One file or link of a snapshot."""

    path: RepoPath
    blob: Digest
    size: int
    mode: int = 0o644
    kind: CapturedKind = "file"


@dataclass(frozen=True)
class Manifest:
    """The captured entries in byte order of their paths.

    `empty_dirs` have a mode; `scope` is the requested paths, directories included.
    """

    entries: tuple[CapturedFile, ...]
    empty_dirs: tuple[tuple[RepoPath, int], ...] = ()
    scope: tuple[RepoPath, ...] = ()

    @staticmethod
    def of(
        entries: Iterable[CapturedFile],
        empty_dirs: Iterable[tuple[RepoPath, int]] = (),
        scope: Iterable[RepoPath] = (),
    ) -> Manifest:
        """A manifest of these entries, sorted, each path once."""
        unique = {entry.path: entry for entry in entries}
        return Manifest(
            tuple(unique[path] for path in sorted(unique, key=path_bytes)),
            tuple(sorted(set(empty_dirs), key=lambda one: path_bytes(one[0]))),
            tuple(sorted(set(scope), key=path_bytes)),
        )

    @cached_property
    def by_path(self) -> Mapping[RepoPath, CapturedFile]:
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
        """Whether the manifest would have the path if it had existed."""
        return any(is_within(path, one) for one in self.scope)

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
                CapturedFile(from_wire(path), parse_digest(blob), size, mode, kind)
                for path, blob, size, mode, kind in body["entries"]
            ),
            tuple((from_wire(path), mode) for path, mode in body["empty_dirs"]),
            tuple(from_wire(path) for path in body["scope"]),
        )


def snapshot_id(fingerprint: Fingerprint, manifest: Manifest) -> str:
    return "sha256:" + sha256(fingerprint.canonical() + b"\n" + manifest.canonical()).hexdigest()


@fast_dataclass(slots=True, frozen=True)
class Row:
    """A row in the listing of a snapshot: a captured entry, or a directory above some."""

    path: RepoPath
    entry: CapturedFile | None


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
    """The end of a chain of captured links; None if it leads to a path that was not captured."""
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
    """The differences of two manifests in content, by path; a rename is a deletion and an addition."""
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


LINK_MODE = 0o777
_EXECUTABLE = 0o100
_LINK_TYPE, _DIRECTORY_TYPE = b"2", b"5"
"""The types of entries in a tar archive, as POSIX numbers them."""


def tar_of(manifest: Manifest, read: Callable[[Digest], bytes]) -> bytes:
    """A tar archive in path order, with times 0, owner 0, and modes 0644 or 0755; empty directories and links keep
    their type.
    """
    import tarfile  # Few programs export a snapshot.

    made = io.BytesIO()
    rows: list[tuple[bytes, CapturedFile | None]] = [(path_bytes(one.path), one) for one in manifest.entries]
    rows += [(path_bytes(path), None) for path, _ in manifest.empty_dirs]
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
        for name, entry in sorted(rows, key=lambda row: row[0]):
            _add(archive, tarfile.TarInfo(name.decode("utf-8", "surrogateescape")), entry, read)
    return made.getvalue()


def _add(archive: TarFile, info: TarInfo, entry: CapturedFile | None, read: Callable[[Digest], bytes]) -> None:
    if entry is None:
        info.type, info.mode = _DIRECTORY_TYPE, 0o755
        archive.addfile(info)
        return
    data = read(entry.blob)
    if entry.kind == "symlink":
        info.type, info.mode, info.linkname = _LINK_TYPE, LINK_MODE, data.decode("utf-8", "surrogateescape")
        archive.addfile(info)
        return
    info.mode = 0o755 if entry.mode & _EXECUTABLE else 0o644
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


@fast_dataclass(slots=True, frozen=True)
class SnapshotRow:
    """A snapshot.

    `manifest` is the digest of the blob with the manifest and its side data. `created_at` is the last creation.
    """

    root: str
    id: str
    fingerprint: str
    manifest: str
    created_at: str


@fast_dataclass(slots=True, frozen=True)
class LineageRow:
    root: str
    child: str
    parent: str


SNAPSHOTS: Table[SnapshotRow] = Table("snapshots", SnapshotRow, key=("root", "id"), projected=True)
LINEAGE: Table[LineageRow] = Table("lineage", LineageRow, key=("root", "child"), projected=True)


def project_snapshot_created(tx: Tx, record: Record) -> None:
    body = record.payload
    text = encode(body["fingerprint"]).decode("utf-8")
    tx.put(SNAPSHOTS, SnapshotRow(body["root"], body["snapshot"], text, body["manifest"], record.at))


def project_snapshot_evicted(tx: Tx, record: Record) -> None:
    body = record.payload
    if body["is_last"]:
        tx.delete(SNAPSHOTS, body["root"], body["snapshot"])
        tx.delete(LINEAGE, body["root"], body["snapshot"])


def project_snapshot_derived(tx: Tx, record: Record) -> None:
    body = record.payload
    if body["snapshot"] != body["from"] and not tx.has(LINEAGE, body["root"], body["snapshot"]):
        tx.put(LINEAGE, LineageRow(body["root"], body["snapshot"], body["from"]))


@fast_dataclass(slots=True, frozen=True)
class LeaseRow:
    """A lease.

    `facts_hash` and `facts` (packed, unless there are too many) are git's status of all paths but the holder's own.
    """

    id: str
    root: str
    fingerprint: str
    facts_hash: str
    facts: bytes | None
    used_at: str
    version: int


@fast_dataclass(slots=True, frozen=True)
class LeasePathRow:
    """A path that the holder of a lease has read, and what it held; `own` if the holder wrote it."""

    lease: str
    path: bytes
    seen: bytes
    own: int


LEASES: Table[LeaseRow] = Table("leases", LeaseRow, key=("id",), indexes=(("used_at",),))
LEASE_PATHS: Table[LeasePathRow] = Table("lease_paths", LeasePathRow, key=("lease", "path"))
