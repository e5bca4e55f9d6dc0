"""Tables as values. A table is declared once; every engine keeps it in its own idiom.

A row is a frozen dataclass whose fields are columns. Columns hold `str`, `int`, `bytes` or None, nothing else, so that
every engine agrees on equality and order: text by its UTF-8 bytes, numbers by value, None first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

from mulligan.values.faults import fault
from mulligan.values.plain import values_getter

Value: TypeAlias = str | int | bytes | None
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Table(Generic[R]):
    """`projected` tables are folds of the journals and are rebuilt and compared by `verify`."""

    name: str
    row: type[R]
    key: tuple[str, ...]
    indexes: tuple[tuple[str, ...], ...] = ()
    projected: bool = False

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.row))  # type: ignore[arg-type]  # rows are dataclasses

    @cached_property
    def column_types(self) -> dict[str, str]:
        """Column name to `str`, `int` or `bytes`, as annotated, with `| None` removed."""
        return {f.name: str(f.type).replace(" | None", "") for f in fields(self.row)}  # type: ignore[arg-type]

    def is_nullable(self, column: str) -> bool:
        return any(f.name == column and "None" in str(f.type) for f in fields(self.row))  # type: ignore[arg-type]

    @cached_property
    def values_of(self) -> Callable[[R], tuple[Value, ...]]:
        return values_getter(self.columns)

    @cached_property
    def key_of(self) -> Callable[[R], tuple[Value, ...]]:
        return values_getter(self.key)

    def make(self, values: tuple[Any, ...]) -> R:
        return self.row(*values)


def check_update(table: Table[Any], columns: Collection[str]) -> None:
    """Refuse to change what is no column, or the key, by which others know the row."""
    wrong = set(columns) - set(table.columns) | set(columns) & set(table.key)
    if wrong or not columns:
        raise fault("internal", f"{table.name} cannot change {sorted(wrong) or 'nothing'}.")


def sort_key(value: Value) -> tuple[int, Any]:
    """The one order of column values."""
    if value is None:
        return (0, 0)
    if isinstance(value, int):
        return (1, value)
    return (2, value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else (3, value)
