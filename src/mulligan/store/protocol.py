"""The protocol that every engine implements. The docstrings are the contract; `tests/contracts` has its suite.

Tables. A table is declared once, as a value; every engine stores it in its own way. A row is a frozen dataclass whose
fields are columns. Columns hold `str`, `int`, `bytes` or None, nothing else, so that every engine agrees on equality
and order: text by its UTF-8 bytes, numbers by value, None first.

Claims. A claim says which open call may change a file right now. Its `place` is the real path of the file as bytes,
with bind mounts resolved (see `files.resolve`).
1. At most one open call claims a place.
2. A deep claim (deleting or renaming a directory) also claims everything below its place.
3. An effect claims all its places in one transaction, or none.
4. A call with a spool (decision 28) has further claims in that file; its row in the table says that there is one.
5. A call waits only for claims of younger calls; if an older call has the claim, it gives up at once (`wait-die`).
   Waits therefore always point from older to younger, and no circle of waiting calls can exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from mulligan.store.originals import Originals
from mulligan.store.secret_key import SecretKey
from mulligan.values.digest import Digest
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass, values_getter
from mulligan.values.ids import CallId, OwnerId

Value: TypeAlias = str | int | bytes | None

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Table(Generic[R]):
    """`projected` tables are folds of the journals and are rebuilt and compared by `verify`.

    An engine may cache rows in memory that it has read, unless the table is `large`. A selection of a `sparse` table is
    mostly empty, and an engine may remember that it was.
    """

    name: str
    row: type[R]
    key: tuple[str, ...]
    indexes: tuple[tuple[str, ...], ...] = ()
    projected: bool = False
    large: bool = False
    sparse: bool = False

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._hints)

    @cached_property
    def column_types(self) -> dict[str, str]:
        """Column name to `str`, `int` or `bytes`, as annotated, with `| None` removed."""
        return {name: hint.replace(" | None", "") for name, hint in self._hints.items()}

    def is_nullable(self, column: str) -> bool:
        return "None" in self._hints.get(column, "")

    @property
    def _hints(self) -> dict[str, str]:
        # Not `fields`, which makes the methods of a dataclass: most runs of the program use few of the tables.
        return self.row.__annotations__

    @cached_property
    def values_of(self) -> Callable[[R], tuple[Value, ...]]:
        return values_getter(self.columns)

    @cached_property
    def key_of(self) -> Callable[[R], tuple[Value, ...]]:
        return values_getter(self.key)

    @cached_property
    def key_in(self) -> Callable[[tuple[Value, ...]], tuple[Value, ...]]:
        """The key among the values of a row."""
        if self.columns[: len(self.key)] == self.key:
            return itemgetter(slice(len(self.key)))
        places = [self.columns.index(name) for name in self.key]
        return lambda values: tuple(values[place] for place in places)


def check_update(table: Table[Any], columns: Collection[str]) -> None:
    """Refuse to change an unknown column, or the key, because other rows refer to it."""
    wrong = set(columns) - set(table.columns) | set(columns) & set(table.key)
    if wrong or not columns:
        raise fault("internal", f"{table.name} cannot change {sorted(wrong) or 'nothing'}.")


_KINDS: dict[str, type] = {"str": str, "int": int, "bytes": bytes}


def check_row(table: Table[R], row: R) -> None:
    """Refuse a row of another table, or with a value that some engine cannot store."""
    if type(row) is not table.row:
        raise fault("internal", f"{table.name} holds {table.row.__name__}, not {type(row).__name__}.")
    for column, value in zip(table.columns, table.values_of(row), strict=True):
        if value is None and column in table.key:
            raise fault("internal", f"{table.name}.{column} is part of the key and cannot be None.")
        if value is not None and not _is_storable(value, _KINDS[table.column_types[column]]):
            raise fault("internal", f"{table.name}.{column} cannot hold {value!r:.40}.")


def _is_storable(value: Value, kind: type) -> bool:
    """Whether the value has exactly that type, and every engine can store it."""
    if isinstance(value, int):
        return type(value) is kind and -(2**63) <= value < 2**63
    if type(value) is not kind or not isinstance(value, str) or value.isascii():
        return type(value) is kind
    return not any("\ud800" <= c <= "\udfff" for c in value)


def check_columns(table: Table[R], columns: tuple[Any, ...]) -> None:
    """Refuse names that are no columns of the table."""
    unknown = set(columns) - set(table.columns)
    if unknown:
        raise fault("internal", f"{table.name} has no column {sorted(unknown)}.")


def sort_key(value: Value) -> tuple[int, Any]:
    """The one order of column values."""
    if value is None:
        return (0, 0)
    if isinstance(value, int):
        return (1, value)
    return (2, value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else (3, value)


Durability = Literal["process", "power"]

Subjects: TypeAlias = tuple[str, ...]
"""Names of journals: of sessions, of workspaces, or of the store itself."""


class Tx(Protocol):
    """One transaction. Its reads see its own writes, and everything that was committed before it began.

    One thread uses a transaction, and it ends with its `with` block: if the block ends normally, everything is
    published at once; if it raises, nothing is. Using it after its end, or writing in a read transaction, raises.
    """

    @property
    def about(self) -> Subjects | None:
        """The subjects of a write transaction; None: it may write about anything."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether no other transaction writes between the begin and the end of this one."""
        ...

    def next_ordinal(self) -> int:
        """The number of the next record: higher than that of every record that this transaction sees or has written.

        If the transaction is alone, it is higher than that of every record of the store. Numbers may be missing.
        """
        ...

    def get(self, table: Table[R], *key: Value) -> R | None:
        """The row with this key, or None. In a write transaction nothing else can change it before our end."""
        ...

    def put(self, table: Table[R], row: R) -> None:
        """Insert the row, or replace the one with its key."""
        ...

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        """Change some columns of the row with this key; False if there is none.

        The engine does not write the indexes of other columns. The key itself cannot change.
        """
        ...

    def delete(self, table: Table[R], *key: Value) -> bool:
        """Remove the row with this key; False if there was none."""
        ...

    def select(
        self,
        table: Table[R],
        where: Mapping[str, Value] | None = None,
        *,
        between: tuple[str, Value, Value] | None = None,
        order: tuple[str, ...] | None = None,
        descending: bool = False,
        limit: int | None = None,
    ) -> list[R]:
        """Rows whose columns equal `where`, in `order` and then by key; `descending` reverses both.

        `between` is (column, low, high) and keeps low ≤ x < high, never None. Without an index that begins with
        the columns of `where`, this is a scan of the table.
        """
        ...

    def has(self, table: Table[R], *key: Value) -> bool: ...

    def count(self, table: Table[R], where: Mapping[str, Value] | None = None) -> int: ...

    def drop_body(self, digest: Digest) -> None:
        """Delete a body beside the tables once this transaction survives a power cut, unless a row names it by then.

        Not earlier: a failed commit or a power cut brings rows back, and they would miss the body.
        """
        ...


class BlobStore(Protocol):
    """Bodies too large for a database row: a directory, or an object store. Keys are digests, bodies are immutable.

    `put` of an existing digest is a no-op that leaves the first body. A body is whole or absent, never half.
    With `durable`, `put` returns only when the body survives a power cut.
    """

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None: ...

    def replace(self, digest: Digest, body: bytes) -> None:
        """Store the same bytes, packed in another way, whether or not a body is there. Durable when it returns."""
        ...

    def get(self, digest: Digest) -> bytes:
        """The stored body. Raises `missing_cas_dependency` if it is not there."""
        ...

    def has(self, digest: Digest) -> bool: ...

    def delete(self, digest: Digest) -> None:
        """Remove a body if it exists. Only for bodies that no row names: see `Tx.drop_body`."""
        ...

    def sync(self, digests: Iterable[Digest] | None = None) -> None:
        """Make these bodies, or every one put so far through this object, survive a power cut.

        Raises `sync_failed`; afterwards the caller must assume that any of them may be lost.
        """
        ...

    def digests(self) -> Iterator[Digest]: ...

    def sweep(self, is_named: Callable[[Digest], bool], *, before_s: float) -> tuple[int, int]:
        """Remove bodies that no row names and that were put before that time, and half-written bodies.

        Answers how many it removed, and their bytes. Putting an existing body counts as putting it now.
        """
        ...


@fast_dataclass(slots=True, frozen=True)
class OwnerRow:
    """A process that may hold open calls. `id` is never reused; only processes on `host` can see whether it lives."""

    id: int
    host: str
    started_at: str


@fast_dataclass(slots=True, frozen=True)
class MetaRow:
    """A fact about the store itself, such as its boot id."""

    key: str
    value: str


OWNERS: Table[OwnerRow] = Table("owners", OwnerRow, key=("id",))
META: Table[MetaRow] = Table("meta", MetaRow, key=("key",))


class Store(Protocol):
    """Tables in transactions, bodies beside them, and a list of the living processes.

    Thread-safe. Transactions are serializable: their result is as if they ran one after the other.
    """

    bodies: BlobStore
    durability: Durability
    secret_key: SecretKey

    originals: Originals | None
    """Holds the originals of replaced files until their replacements are synced. None: nothing is synced later."""

    @property
    def directory(self) -> str | None:
        """The local directory for state of this host only, such as locks. None: the store has none."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which a child process finds this store. They hold no secret."""
        ...

    def write(self, *, about: Subjects | None = None) -> AbstractContextManager[Tx]:
        """A transaction that may write. Waits for other writers; raises `store_busy` if that takes too long.

        `about` names every journal that the block appends to or decides by: its subjects. Blocks with a common subject
        run one after another, in any process; an engine may run others side by side. Without `about` a block runs
        alone. A block never runs twice, so an engine raises no error that asks the caller to try again.

        A second `write` inside one on the same thread raises `nested_transaction`.
        """
        ...

    def rows(self, *wanted: tuple[Any, ...]) -> list[Any]:
        """Rows by table and key, all from the same moment; None for a row that does not exist.

        For rows that every request reads: an engine may cache them while it knows that they have not changed.
        """
        ...

    def read(self) -> AbstractContextManager[Tx]:
        """A read transaction. It never waits for writers and never changes a byte of the store."""
        ...

    def owner(self) -> OwnerId:
        """The id of this process as an owner of calls. It is registered on first use; a forked child gets its own."""
        ...

    def is_alive(self, owner: OwnerId) -> bool | None:
        """Whether that process is running. None: it is on another host, so this process cannot tell."""
        ...

    def on_close(self, act: Callable[[], None]) -> None:
        """Run `act` once when the store closes, before its engine does."""
        ...

    def sync(self) -> None:
        """Make everything committed so far survive a power cut."""
        ...

    def size_bytes(self) -> int:
        """The bytes of the tables and of the bodies beside them.

        Free pages and other files in the directory do not count.
        """
        ...

    def reclaim_space(self) -> None:
        """Return freed space to the operating system, as far as the engine can."""
        ...

    def older_copies(self) -> list[str]:
        """Paths of the copies that migrations made of the store before they changed it."""
        ...

    def erase_deleted(self) -> None:
        """Erase every byte of deleted rows: in tables, free pages, the log, copies made before migrations, and the
        originals of replaced files.

        Raises `store_busy` while another process reads; calling it again finishes the work.
        """
        ...

    def check(self) -> list[str]:
        """Damage that the engine finds in its own files, as sentences for a person; empty if there is none."""
        ...

    def close(self) -> None: ...


@fast_dataclass(slots=True, frozen=True)
class ClaimRow:
    """`deep` is 1 or None, because an index on a nullable column holds only the rows that are not None."""

    place: bytes
    call: str
    deep: int | None = None


SPOOL = b"\0spool/"
"""How the place of a claim begins that stands for all claims in the spool of its call (`history.tables`)."""

CLAIMS: Table[ClaimRow] = Table("claims", ClaimRow, key=("place",), indexes=(("deep",),), sparse=True)


@fast_dataclass(slots=True, frozen=True, order=True)
class Claim:
    place: bytes
    deep: bool = False


def blockers(tx: Tx, call: CallId, wanted: Iterable[Claim]) -> list[ClaimRow]:
    """Claims of other calls that conflict with these, in order of place.

    A spool of another call always conflicts: only its file says what else the call claims.
    """
    deep_claims = tx.select(CLAIMS, {"deep": 1})
    found: dict[bytes, ClaimRow] = {}
    for one in wanted:
        same = tx.get(CLAIMS, one.place)
        below = tx.select(CLAIMS, between=("place", one.place + b"/", one.place + b"0")) if one.deep else []
        above = [row for row in deep_claims if _is_above(row.place, one.place)] if deep_claims else []
        for row in [*below, *above, *([same] if same else [])]:
            if row.call != call:
                found[row.place] = row
    return [found[place] for place in sorted(found)] if found else []


def _is_above(place: bytes, wanted: bytes) -> bool:
    return place.startswith(SPOOL) or wanted.startswith(place + b"/")


def claim(tx: Tx, call: CallId, wanted: Collection[Claim]) -> None:
    """Claim the places. The caller has found no blockers in this transaction, and has no deep claim on them yet."""
    for one in sorted(wanted) if len(wanted) > 1 else wanted:
        tx.put(CLAIMS, ClaimRow(one.place, call, 1 if one.deep else None))


def release(tx: Tx, call: CallId) -> None:
    """Release all claims of a call by scanning the table: only for calls whose process died with its list of claims."""
    for mine in tx.select(CLAIMS, {"call": call}):
        tx.delete(CLAIMS, mine.place)


def may_wait(call: CallId, blocking: Iterable[ClaimRow]) -> bool:
    """Whether the call may wait: older calls wait, younger ones give up. Call ids sort by creation time."""
    return all(call < claim.call for claim in blocking)
