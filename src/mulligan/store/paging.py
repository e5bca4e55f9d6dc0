"""Whole tables, a page at a time, so that a large one never is in memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from mulligan.store.journal import RECORDS, RecordRow
from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.faults import fault

R = TypeVar("R")

PAGE_ROWS = 500
_BEYOND = b"\xff" * 33


def rows_by(tx: Tx, table: Table[R], column: str) -> Iterator[R]:
    """All rows in order of the first column of their key, which holds digests.

    A page ends before its last value, because the rows of that value may go on; unless it is the only value there.
    """
    low, limit = b"", PAGE_ROWS
    while rows := tx.select(table, between=(column, low, _BEYOND), limit=limit):
        last = getattr(rows[-1], column)
        whole = [row for row in rows if getattr(row, column) != last] if len(rows) == limit else rows
        if not whole:
            limit *= 2
            continue
        yield from whole
        _check_order(table, low, getattr(whole[-1], column))
        low, limit = getattr(whole[-1], column) + b"\0", PAGE_ROWS


def rows_of_journal(tx: Tx, journal: str, page_rows: int = PAGE_ROWS) -> Iterator[RecordRow]:
    """A journal's records as they are stored, oldest first."""
    after = 0
    while rows := tx.select(RECORDS, {"journal": journal}, between=("seq", after + 1, 2**62), limit=page_rows):
        yield from rows
        _check_order(RECORDS, after + 1, rows[-1].seq)
        after = rows[-1].seq


def _check_order(table: Table[R], low: Any, last: Any) -> None:
    """In a damaged table a search can come back with what it has passed, for ever."""
    if type(last) is not type(low) or last < low:
        raise fault("store_corrupt", f"The rows of {table.name} are out of order.")
