"""Migrations of a store from an older format: forward only, one step for each version, all steps in one transaction.

A step is written once, when the format changes, and never edited after its release. It has its own SQL, because the
tables declared in the code are those of today, not those that it changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeAlias

import apsw

from mulligan.values import VERSION
from mulligan.values.canonical import encode
from mulligan.values.errors import MulliganError, fault

Step: TypeAlias = Callable[[apsw.Connection], None]

SCHEMA_VERSION = 5


WRITTEN_BY = "written_by"
"""The row of `meta` that names the version of Mulligan that made the store's format."""


def _to_2(connection: apsw.Connection) -> None:
    """Add a column for the verb of undo operations, and a table of partly undone calls, to avoid scanning the calls."""
    connection.execute(
        """
        ALTER TABLE "calls" ADD COLUMN "way_back" TEXT;
        UPDATE "calls" SET "way_back" = json_extract("cause", '$.verb')
            WHERE json_extract("cause", '$.verb') IN ('undo', 'restore', 'rollback', 'rewind', 'redo');
        CREATE TABLE IF NOT EXISTS "taken_in_part"
            ("call" TEXT NOT NULL, "by" TEXT NOT NULL, PRIMARY KEY ("call", "by")) STRICT, WITHOUT ROWID;
        INSERT OR IGNORE INTO "taken_in_part" SELECT "part"."value", "calls"."id"
            FROM "calls", json_each("calls"."cause", '$.part') AS "part"
            WHERE "calls"."status" = 'committed' AND "calls"."way_back" <> 'redo';
        """
    )


def _to_3(connection: apsw.Connection) -> None:
    """Mark sessions of an agent loop without a transcript, so that lists leave them out."""
    connection.execute('ALTER TABLE "sessions" ADD COLUMN "anonymous" INTEGER; UPDATE "sessions" SET "anonymous" = 0')


def _to_4(connection: apsw.Connection) -> None:
    """Add each root's host, and the prefix of the keys of its files, which was its path until now."""
    connection.execute(
        """
        ALTER TABLE "roots" ADD COLUMN "host" TEXT NOT NULL DEFAULT '';
        ALTER TABLE "roots" ADD COLUMN "key" BLOB NOT NULL DEFAULT x'';
        UPDATE "roots" SET "key" = "place";
        """
    )


def _to_5(connection: apsw.Connection) -> None:
    """Give each head the ordinal of its record, and replace the head of the whole store by a first seal."""
    connection.execute(
        """
        DELETE FROM "heads" WHERE "journal" = '';
        ALTER TABLE "heads" ADD COLUMN "ordinal" INTEGER;
        UPDATE "heads" SET "ordinal" = coalesce((SELECT "ordinal" FROM "records"
            WHERE "records"."journal" = "heads"."journal" AND "records"."seq" = "heads"."seq"), 0);
        CREATE INDEX "heads_by_ordinal" ON "heads" ("ordinal");
        """
    )
    heads: list[tuple[Any, ...]] = connection.execute('SELECT "journal", "seq", "hash", "at" FROM "heads"').fetchall()
    if not heads:
        return
    named = {journal: {"seq": seq, "hash": digest.hex()} for journal, seq, digest, _ in heads}
    at, prev = max(at for _, _, _, at in heads), "0" * 64
    record = {"seq": 1, "kind": "store.sealed", "at": at, "payload": {"heads": named}, "prev": prev}
    body = encode(record)
    digest = sha256(prev.encode("ascii") + b"\n" + body).digest()
    ordinal = connection.execute('SELECT max("ordinal") + 1 FROM "heads"').fetchall()[0][0]
    columns = '("journal", "seq", "hash", "body", "ordinal") VALUES (?, ?, ?, ?, ?)'
    connection.execute(f'INSERT INTO "records" {columns}', ("seals", 1, digest, body, ordinal))
    columns = columns.replace("body", "at")
    connection.execute(f'INSERT INTO "heads" {columns}', ("seals", 1, digest, at, ordinal))
    connection.execute('INSERT INTO "meta" ("key", "value") VALUES (?, ?)', ("seals", "1"))


STEPS: Mapping[int, Step] = MappingProxyType({1: _to_2, 2: _to_3, 3: _to_4, 4: _to_5})
"""For each older version, the step that leads to the next one."""


def newer_store(connection: apsw.Connection, found: int) -> MulliganError:
    """The error for a process that opens a store which a newer version has migrated."""
    try:
        rows = connection.execute("SELECT value FROM meta WHERE key = ?", (WRITTEN_BY,)).fetchall()
    except apsw.Error:
        rows = []
    newer = f"Mulligan {rows[0][0]}" if rows else "A newer Mulligan"
    words = (
        f"{newer} has migrated this store to format {found}; this process runs Mulligan {VERSION}, which "
        f"reads formats up to {SCHEMA_VERSION}. Restart {program_name()} (process {os.getpid()}) with the newer one."
    )
    return fault("store_newer", words, format=found, pid=os.getpid())


def note_version(connection: apsw.Connection) -> None:
    """Record which version made this format, for the error that older processes show."""
    connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (WRITTEN_BY, VERSION))


def program_name() -> str:
    """The program of this process, with its verb."""
    words = [os.path.basename(sys.argv[0]) or "python", *sys.argv[1:2]]
    return (
        " ".join("mulligan" if word == "__main__.py" else word for word in words if not word.startswith("-"))
        or "python"
    )


def migrate(connection: apsw.Connection, *, to: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    """Run the missing steps in the caller's transaction. Raises `store_unreadable` if a step no longer exists."""
    version = int(connection.pragma("user_version"))
    for stage in range(version, to):
        step = steps.get(stage)
        if step is None:
            raise fault("store_unreadable", f"This store has format {version}, which this Mulligan no longer reads.")
        step(connection)
    if version < to:
        connection.pragma("user_version", to)
