"""Looks for some bytes in every byte of a state directory: in files, database, log and free pages, and in blobs."""

from __future__ import annotations

from pathlib import Path

from mulligan.history.projection import SCHEMA
from mulligan.store.blobs import BLOBS, READABLE, Blobs
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import SystemClock
from mulligan.values.digest import digest_from_raw


def files_holding(directory: Path, needle: bytes) -> list[str]:
    """Names of the files below a directory that hold the bytes somewhere, with those of packed blobs that do."""
    assert len(needle) >= 16, "a short needle is found by chance"
    found = [
        str(path.relative_to(directory))
        for path in sorted(directory.rglob("*"))
        if path.is_file() and needle in path.read_bytes()
    ]
    return found + blobs_holding(directory, needle)


def blobs_holding(directory: Path, needle: bytes) -> list[str]:
    """Blobs may be compressed, so their plain bytes are searched as well."""
    store = SqliteStore(str(directory), SCHEMA, durability="process", create=False)
    try:
        blobs = Blobs(store, SystemClock())
        with store.read() as tx:
            rows = [row for row in tx.select(BLOBS) if row.place in READABLE]
        digests = [digest_from_raw(row.digest) for row in rows]
        return [f"blob {digest}" for digest in digests if needle in blobs.read(digest)]
    finally:
        store.close()
