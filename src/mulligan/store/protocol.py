"""The port every engine implements. The docstrings are the contract; `mulligan.testing.store_contract` is the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeVar

from mulligan.store.originals import Originals
from mulligan.store.secret_key import SecretKey
from mulligan.store.tables import Table, Value
from mulligan.values.digest import Digest
from mulligan.values.ids import OwnerId
from mulligan.values.plain import plain

R = TypeVar("R")
Durability = Literal["process", "power"]


class Tx(Protocol):
    """One transaction. Its reads see its own writes and one consistent past of everyone else's.

    A transaction is used by one thread and ends with its `with` block: normally, everything is published at once;
    by an exception, nothing ever happened. Using it after its end, or writing in a read transaction, raises.
    """

    def get(self, table: Table[R], *key: Value) -> R | None:
        """The row with this key, or None. In a write transaction nobody else can change it before our end."""
        ...

    def put(self, table: Table[R], row: R) -> None:
        """Insert the row, or replace the one with its key."""
        ...

    def update(self, table: Table[R], /, *key: Value, **columns: Value) -> bool:
        """Give some columns of the row with this key other values; False if there is none.

        What is kept for the other columns, such as their indexes, is left alone. The key itself cannot change.
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
        """Rows whose columns equal `where`, in `order` (then by the key; `descending` turns all of it round).

        `between` is (column, low, high) and keeps low ≤ x < high, never None. Without an index that begins with
        the columns of `where`, this is a scan of the table.
        """
        ...

    def has(self, table: Table[R], *key: Value) -> bool: ...

    def count(self, table: Table[R], where: Mapping[str, Value] | None = None) -> int: ...

    def drop_body(self, digest: Digest) -> None:
        """Delete a body beside the tables once this transaction survives a power cut, unless a row names it by then.

        Deleted any earlier, the body would be missed by rows that a failed commit or a power cut brings back.
        """
        ...


class BlobStore(Protocol):
    """Bodies too large for a database row: a directory, or an object store. Keys are digests, bodies are immutable.

    `put` of an existing digest is a no-op that leaves the first body. A body is whole or absent, never half.
    With `durable`, `put` returns only when the body survives a power cut.
    """

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None: ...

    def replace(self, digest: Digest, body: bytes) -> None:
        """The same bytes, packed in another way, in place of the body that is there or not. It is durable."""
        ...

    def get(self, digest: Digest) -> bytes:
        """The stored body. Raises `missing_cas_dependency` if it is not there."""
        ...

    def has(self, digest: Digest) -> bool: ...

    def delete(self, digest: Digest) -> None:
        """Remove it; a body that is not there is fine. Only for bodies that no row names: see `Tx.drop_body`."""
        ...

    def sync(self, digests: Iterable[Digest] | None = None) -> None:
        """Make these bodies, or every one put so far through this object, survive a power cut.

        Raises `sync_failed`, after which nothing may be taken for granted about them.
        """
        ...

    def digests(self) -> Iterator[Digest]: ...

    def sweep(self, is_named: Callable[[Digest], bool], *, before_s: float) -> tuple[int, int]:
        """Remove what nobody names: bodies put before that time whose writer died, and halves of bodies.

        How many, and how many bytes. Putting a body that is there already counts as putting it now.
        """
        ...


@plain(slots=True, frozen=True)
class OwnerRow:
    """A process that may hold open calls. `id` is never reused; `host` says where its life can be checked."""

    id: int
    host: str
    started_at: str


@plain(slots=True, frozen=True)
class MetaRow:
    """What a store knows about itself, by name."""

    key: str
    value: str


OWNERS: Table[OwnerRow] = Table("owners", OwnerRow, key=("id",))
META: Table[MetaRow] = Table("meta", MetaRow, key=("key",))


class Store(Protocol):
    """Tables in transactions, bodies beside them, and the knowledge of who is alive.

    Thread-safe. Every engine isolates fully: transactions happen one after the other, as if alone.
    """

    bodies: BlobStore
    durability: Durability
    secret_key: SecretKey

    originals: Originals | None
    """Where files that gave way are kept until what replaced them is synced. None: nothing waits for a later sync."""

    @property
    def directory(self) -> str | None:
        """Where this host keeps what only it can know of; None: nowhere."""
        ...

    def write(self) -> AbstractContextManager[Tx]:
        """A transaction that may write. Waits for other writers; `store_busy` if that takes too long.

        A second `write` inside one on the same thread raises `nested_transaction`.
        """
        ...

    def read(self) -> AbstractContextManager[Tx]:
        """A transaction that only looks. Never waits for writers and never changes a byte of the store."""
        ...

    def owner(self) -> OwnerId:
        """This process as an owner of calls. Registered on first use; a forked child is another owner."""
        ...

    def is_alive(self, owner: OwnerId) -> bool | None:
        """Is that process running? None: it lives on a host we cannot see from here."""
        ...

    def on_close(self, act: Callable[[], None]) -> None:
        """Run `act` once when the store closes, before its engine does."""
        ...

    def sync(self) -> None:
        """Make everything acknowledged so far survive a power cut."""
        ...

    def size_bytes(self) -> int:
        """What the store keeps: its tables and the bodies beside them.

        Neither room that deletions left free, nor what others keep in its directory.
        """
        ...

    def give_back_space(self) -> None:
        """Return what deletions freed to the medium, as far as the engine can."""
        ...

    def older_copies(self) -> list[str]:
        """The files with the store as it was before a migration, each as a path."""
        ...

    def erase_deleted(self) -> None:
        """Leave no byte of deleted rows: not in the tables, not in free room, not in a log, not in an older copy,
        not among the originals of files that were replaced.

        Raises `store_busy` while another process is looking; then asking again does the rest.
        """
        ...

    def check(self) -> list[str]:
        """The engine's own complaints about its medium, in a person's words; empty when sound."""
        ...

    def close(self) -> None: ...
