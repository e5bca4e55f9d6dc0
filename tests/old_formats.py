"""Stores as earlier formats had them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw

from mulligan.history.projection import SCHEMA
from mulligan.store.blobs import BLOBS, BODIES
from mulligan.store.journal import RECORDS, SEALS, Journal, parse_record
from mulligan.store.sqlite import SqliteStore


def as_format_2(home: Path, into: Path) -> None:
    """The same store as format 2 had it: a head of the whole store and no seals; roots without host and key, known by
    device, inode and generation.
    """
    now, old = SqliteStore(str(home), SCHEMA), SqliteStore(str(into), SCHEMA)
    with now.read() as source, old.write() as tx:
        for blob in source.select(BLOBS):
            tx.put(BLOBS, blob)
        for body in source.select(BODIES):
            tx.put(BODIES, body)
        for written in sorted(source.select(RECORDS), key=lambda row: row.ordinal):
            record, payload = parse_record(written), dict(parse_record(written).payload)
            if record.journal == SEALS:
                continue
            if record.kind == "root.opened":
                _, inode, generation, _, device, _ = payload["identity"].split(":")
                payload = {name: payload[name] for name in ("root", "workspace", "place", "joins")}
                payload["identity"] = f"{device}:{inode}:{generation}"
            Journal(SCHEMA).append(tx, record.journal, record.kind, payload, at=record.at, refs=record.refs)
    now.close()
    old.close()
    connection = apsw.Connection(str(into / "store.db"))
    connection.execute("DELETE FROM records WHERE journal = 'seals'; DELETE FROM heads WHERE journal = 'seals'")
    connection.execute("DELETE FROM meta WHERE key = 'seals'; DROP INDEX heads_by_ordinal")
    connection.execute("ALTER TABLE heads DROP COLUMN ordinal")
    count, line = 0, bytes(32)
    hashes: list[Any] = connection.execute("SELECT hash FROM records ORDER BY ordinal").fetchall()
    for (digest,) in hashes:
        count, line = count + 1, sha256(line + digest).digest()
    connection.execute("INSERT INTO heads VALUES ('', ?, ?, (SELECT max(at) FROM heads))", (count, line))
    for table, column in (("roots", "host"), ("roots", "key"), ("sessions", "anonymous")):
        connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    connection.pragma("user_version", 2)
    connection.close()
