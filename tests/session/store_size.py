"""What a store takes on disk once SQLite's log, which is a ring, is folded in."""

from __future__ import annotations

from pathlib import Path

import apsw


def settled_bytes(home: Path) -> int:
    """Of a closed store."""
    connection = apsw.Connection(str(home / "store.db"))
    connection.pragma("user_version")  # SQLite opens the file at the first look only
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.close()
    return sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
