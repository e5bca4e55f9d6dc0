"""Bringing a store from an older format to ours: forward only, one step a version, all steps in one transaction.

A step is written once, when the format changes, and never edited after its release. It speaks SQL of its own: the
tables declared in the code are those of today, not those it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import apsw

from mulligan.values.faults import fault

Step: TypeAlias = Callable[[apsw.Connection], None]

SCHEMA_VERSION = 4


def _to_2(connection: apsw.Connection) -> None:
    """Calls say whether they are a way back, and what was taken back only in part is looked up, not searched for."""
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
    """Sessions of an agent loop that keeps no transcript are marked, so that no list shows them."""
    connection.execute('ALTER TABLE "sessions" ADD COLUMN "anonymous" INTEGER; UPDATE "sessions" SET "anonymous" = 0')


def _to_4(connection: apsw.Connection) -> None:
    """Roots say on which host they are, and what begins the keys of their files: until now, their path."""
    connection.execute(
        """
        ALTER TABLE "roots" ADD COLUMN "host" TEXT NOT NULL DEFAULT '';
        ALTER TABLE "roots" ADD COLUMN "key" BLOB NOT NULL DEFAULT x'';
        UPDATE "roots" SET "key" = "place";
        """
    )


STEPS: Mapping[int, Step] = MappingProxyType({1: _to_2, 2: _to_3, 3: _to_4})
"""For each older version, the step that leads to the next one."""


def migrate(connection: apsw.Connection, *, to: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    """Run what is missing, in the caller's transaction. Raises `store_unreadable` if a step no longer exists."""
    version = int(connection.pragma("user_version"))
    for stage in range(version, to):
        step = steps.get(stage)
        if step is None:
            raise fault("store_unreadable", f"This store has format {version}, which this Mulligan no longer reads.")
        step(connection)
    if version < to:
        connection.pragma("user_version", to)
