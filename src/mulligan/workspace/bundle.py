"""A snapshot as a tar archive whose bytes depend on nothing but the snapshot. Pure."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable

from mulligan.values.digest import Digest
from mulligan.values.paths import path_bytes
from mulligan.workspace.manifest import Captured, Manifest

LINK_MODE = 0o777
_EXECUTABLE = 0o100


def tar_of(manifest: Manifest, read: Callable[[Digest], bytes]) -> bytes:
    """In path order, times 0, owner 0, modes 0644 or 0755; empty directories and links as what they are."""
    made = io.BytesIO()
    rows: list[tuple[bytes, Captured | None]] = [(path_bytes(one.path), one) for one in manifest.entries]
    rows += [(path_bytes(path), None) for path, _ in manifest.empty_dirs]
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
        for name, entry in sorted(rows, key=lambda row: row[0]):
            _add(archive, name.decode("utf-8", "surrogateescape"), entry, read)
    return made.getvalue()


def _add(archive: tarfile.TarFile, name: str, entry: Captured | None, read: Callable[[Digest], bytes]) -> None:
    info = tarfile.TarInfo(name)
    if entry is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(info)
        return
    data = read(entry.blob)
    if entry.kind == "symlink":
        info.type, info.mode, info.linkname = tarfile.SYMTYPE, LINK_MODE, data.decode("utf-8", "surrogateescape")
        archive.addfile(info)
        return
    info.mode = 0o755 if entry.mode & _EXECUTABLE else 0o644
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
