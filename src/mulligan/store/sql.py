"""SQL from table values. Names come from declarations in this code base only; values are always bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

from mulligan.store.tables import Table, Value, check_update

_TYPES = {"str": "TEXT", "int": "INTEGER", "bytes": "BLOB"}
_NONE: frozenset[str] = frozenset()


def create_statements(tables: Iterable[Table[Any]]) -> list[str]:
    return [statement for table in tables for statement in _create(table)]


def _create(table: Table[Any]) -> list[str]:
    columns = ", ".join(f'"{name}" {_type_of(table, name)}' for name in table.columns)
    kept = "STRICT" if _is_wide(table) else "STRICT, WITHOUT ROWID"
    made = [f'CREATE TABLE IF NOT EXISTS "{table.name}" ({columns}, PRIMARY KEY ({_names(table.key)})) {kept}']
    for index in table.indexes:
        label = f"{table.name}_by_{'_'.join(index)}"
        made.append(f'CREATE INDEX IF NOT EXISTS "{label}" ON "{table.name}" ({_names(index)}){_partly(table, index)}')
    return made


def _type_of(table: Table[Any], column: str) -> str:
    return _TYPES[table.column_types[column]] + (" NOT NULL" if column in table.key else "")


def _partly(table: Table[Any], index: tuple[str, ...]) -> str:
    """An index on one column that is mostly empty holds only the rows that have it."""
    return f' WHERE "{index[0]}" IS NOT NULL' if len(index) == 1 and table.is_nullable(index[0]) else ""


def _is_wide(table: Table[Any]) -> bool:
    """Rows with a body live in a rowid table, so that large values never sit in the inner pages of a tree."""
    return "body" in table.columns


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


@cache
def get_sql(table: Table[Any]) -> str:
    return f'SELECT {_names(table.columns)} FROM "{table.name}" WHERE {_key_is(table)}'


@cache
def has_sql(table: Table[Any]) -> str:
    return f'SELECT 1 FROM "{table.name}" WHERE {_key_is(table)}'


@cache
def put_sql(table: Table[Any]) -> str:
    """An upsert, not a replace, which would count as a delete. It writes every index; `update_sql` does not."""
    marks = ", ".join("?" * len(table.columns))
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name in table.columns if name not in table.key)
    action = f"UPDATE SET {changed}" if changed else "NOTHING"
    insert = f'INSERT INTO "{table.name}" ({_names(table.columns)}) VALUES ({marks})'
    return f"{insert} ON CONFLICT ({_names(table.key)}) DO {action}"


@cache
def delete_sql(table: Table[Any]) -> str:
    return f'DELETE FROM "{table.name}" WHERE {_key_is(table)}'


@cache
def update_sql(table: Table[Any], columns: tuple[str, ...]) -> str:
    """Only indexes of the named columns are written."""
    check_update(table, columns)
    changed = ", ".join(f'"{name}" = ?' for name in columns)
    return f'UPDATE "{table.name}" SET {changed} WHERE {_key_is(table)}'


def _key_is(table: Table[Any]) -> str:
    return " AND ".join(f'"{name}" = ?' for name in table.key)


def select_sql(
    table: Table[Any],
    where: Mapping[str, Value],
    *,
    between: tuple[str, Value, Value] | None = None,
    order: tuple[str, ...] | None = None,
    descending: bool = False,
    counting: bool = False,
) -> tuple[str, tuple[Value, ...]]:
    """The statement and its values, without the value of LIMIT."""
    nulls = frozenset(name for name, value in where.items() if value is None) if None in where.values() else _NONE
    sql = _select(
        table,
        tuple(where),
        nulls=nulls,
        ranged=between and between[0],
        order=order or table.key,
        descending=descending,
        counting=counting,
    )
    values = tuple(value for value in where.values() if value is not None) if nulls else tuple(where.values())
    return sql, values if between is None else (*values, between[1], between[2])


@lru_cache(maxsize=1024)
def _select(
    table: Table[Any],
    equal: tuple[str, ...],
    *,
    nulls: frozenset[str],
    ranged: str | None,
    order: tuple[str, ...],
    descending: bool,
    counting: bool,
) -> str:
    terms = [f'"{name}" IS NULL' if name in nulls else f'"{name}" = ?' for name in equal]
    if ranged:
        terms.append(f'"{ranged}" >= ? AND "{ranged}" < ?')
    condition = f" WHERE {' AND '.join(terms)}" if terms else ""
    if counting:
        return f'SELECT count(*) FROM "{table.name}"{condition} LIMIT ?'
    direction = " DESC" if descending else ""
    ordered = ", ".join(f'"{name}"{direction}' for name in dict.fromkeys((*order, *table.key)))
    return f'SELECT {_names(table.columns)} FROM "{table.name}"{condition} ORDER BY {ordered} LIMIT ?'
