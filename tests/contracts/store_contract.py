"""The contract of every store engine: what the docstrings of the protocol promise, as tests.

`StoreContract` is the whole of it. Its parts can also be bound one by one: transactions and life are here, tables,
journals, blobs and claims in files of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mulligan.store.protocol import Store, Tx
from mulligan.values.errors import MulliganError
from mulligan.values.ids import OwnerId
from tests.contracts.blob_contract import BlobContract
from tests.contracts.claim_contract import ClaimContract
from tests.contracts.journal_contract import JournalContract
from tests.contracts.store_under_test import BOX, TIMEOUT_S, StoreContractBase
from tests.contracts.table_contract import TableContract
from tests.contracts.tables import CONTRACT_SCHEMA, PARCELS, THINGS, Parcel, Thing


class TransactionContract(StoreContractBase):
    """A transaction is atomic and isolated, belongs to one thread, and ends."""

    def test_a_committed_write_is_visible(self, store: Store) -> None:
        with store.write() as tx:
            tx.put(THINGS, BOX)
        with store.read() as tx:
            assert tx.get(THINGS, "a", 1) == BOX

    def test_a_transaction_sees_its_own_writes(self, store: Store) -> None:
        with store.write() as tx:
            tx.put(THINGS, BOX)
            assert (tx.get(THINGS, "a", 1), tx.count(THINGS), tx.select(THINGS)) == (BOX, 1, [BOX])
            tx.delete(THINGS, "a", 1)
            assert (tx.get(THINGS, "a", 1), tx.count(THINGS), tx.select(THINGS)) == (None, 0, [])

    def test_every_verb_sees_the_rows_that_were_just_put(self, store: Store) -> None:
        rows = [Thing("a", number, "box", number) for number in range(150)]
        self.fill(store, Thing("a", 0), Thing("old", 1))
        with store.write() as tx:
            for row in rows:
                tx.put(THINGS, row)
            assert (tx.get(THINGS, "a", 149), tx.has(THINGS, "a", 148), tx.has(THINGS, "a", 150)) == (
                rows[149],
                True,
                False,
            )
            tx.put(THINGS, Thing("b", 1))
            assert (tx.delete(THINGS, "b", 1), tx.delete(THINGS, "b", 1), tx.get(THINGS, "b", 1)) == (True, False, None)
            tx.put(THINGS, Thing("b", 2))
            assert (tx.update(THINGS, "b", 2, label="new"), tx.update(THINGS, "b", 3, label="new")) == (True, False)
            assert tx.get(THINGS, "b", 2) == Thing("b", 2, "new")
            tx.put(THINGS, Thing("b", 2, "newer"))
            assert tx.select(THINGS, {"label": "newer"}) == [Thing("b", 2, "newer")]
            tx.put(PARCELS, Parcel("p", b"x"))
            assert (tx.get(PARCELS, "p"), tx.has(PARCELS, "p"), tx.count(PARCELS)) == (Parcel("p", b"x"), True, 1)
            tx.put(PARCELS, Parcel("p", b"y"))
            assert (tx.get(PARCELS, "p"), tx.count(THINGS)) == (Parcel("p", b"y"), 152)
        assert self.things(store) == [*rows, Thing("b", 2, "newer"), Thing("old", 1)]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    def test_an_exception_undoes_every_write_and_propagates(self, store: Store, error: type[BaseException]) -> None:
        self.fill(store, BOX, Thing("a", 2))
        with pytest.raises(error), store.write() as tx:
            tx.put(THINGS, Thing("a", 1, "changed"))
            tx.put(THINGS, Thing("b", 9))
            tx.put(PARCELS, Parcel("p", b"x"))
            tx.delete(THINGS, "a", 2)
            raise error
        assert self.things(store) == [BOX, Thing("a", 2)]
        with store.read() as tx:
            assert tx.count(PARCELS) == 0

    def test_a_nested_write_transaction_is_refused_and_harms_nothing(self, store: Store) -> None:
        with store.write() as tx:
            tx.put(THINGS, BOX)
            with pytest.raises(MulliganError) as refused, store.write():
                pass
            tx.put(THINGS, Thing("a", 2))
        assert refused.value.code == "nested_transaction"
        assert self.things(store) == [BOX, Thing("a", 2)]

    def test_a_read_inside_a_write_sees_only_committed_rows(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.write() as tx:
            tx.put(THINGS, Thing("a", 2))
            assert self.things(store) == [BOX]
        assert self.things(store) == [BOX, Thing("a", 2)]

    def test_several_reads_may_be_open_at_once(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.read() as one, store.read() as other:
            assert one.get(THINGS, "a", 1) == other.get(THINGS, "a", 1) == BOX

    @pytest.mark.parametrize("use", ["get", "has", "put", "delete", "select", "count"])
    @pytest.mark.parametrize("kind", ["read", "write", "failed"])
    def test_using_an_ended_transaction_raises(self, store: Store, kind: str, use: str) -> None:
        ended: list[Tx] = []
        if kind == "failed":
            with pytest.raises(LookupError), store.write() as tx:
                ended.append(tx)
                tx.put(PARCELS, Parcel("p", b"x"))
                tx.put(THINGS, BOX)
                raise LookupError
        else:
            with store.read() if kind == "read" else store.write() as tx:
                ended.append(tx)
        with pytest.raises(MulliganError):
            _USES[use](ended[0])
        assert self.things(store) == []

    @pytest.mark.parametrize("use", ["put", "delete"])
    def test_a_read_transaction_cannot_write(self, store: Store, use: str) -> None:
        self.fill(store, BOX)
        with store.read() as tx:
            with pytest.raises(MulliganError):
                _USES[use](tx)
            assert tx.get(THINGS, "a", 1) == BOX
        assert self.things(store) == [BOX]

    def test_a_read_sees_one_snapshot_while_others_write(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.read() as tx:
            assert tx.count(THINGS) == 1
            self.in_other_thread(lambda: self.fill(store, Thing("a", 2)))
            assert (tx.count(THINGS), tx.get(THINGS, "a", 2), tx.select(THINGS)) == (1, None, [BOX])
        assert len(self.things(store)) == 2

    def test_a_read_neither_waits_for_a_writer_nor_sees_uncommitted_rows(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.write() as tx:
            tx.put(THINGS, Thing("a", 2))
            assert self.in_other_thread(lambda: self.things(store)) == [BOX]

    def test_a_writer_waits_for_the_one_before_it(self, store: Store) -> None:
        order: list[str] = []
        asking = threading.Event()

        def second() -> None:
            asking.set()
            with store.write() as tx:
                order.append("second")
                assert tx.get(THINGS, "a", 1) == BOX

        thread = threading.Thread(target=second)
        with store.write() as tx:
            thread.start()
            assert asking.wait(TIMEOUT_S)
            tx.put(THINGS, BOX)
            order.append("first")
        thread.join(TIMEOUT_S)
        assert order == ["first", "second"]

    @pytest.mark.req("D4.write_subjects")
    @pytest.mark.parametrize(
        ("one", "other"),
        [(("s:a", "w:x"), ("s:b", "w:x")), (("w:x", "s:a"), ("s:a",)), (None, ("s:a",)), (("s:a",), None)],
    )
    def test_writers_with_a_common_subject_and_writers_without_subjects_run_one_after_another(
        self, store: Store, one: tuple[str, ...] | None, other: tuple[str, ...] | None
    ) -> None:
        seen: list[Thing | None] = []
        asking = threading.Event()

        def second() -> None:
            asking.set()
            with store.write(about=other) as tx:
                seen.append(tx.get(THINGS, "a", 1))

        thread = threading.Thread(target=second)
        with store.write(about=one) as tx:
            thread.start()
            assert asking.wait(TIMEOUT_S)
            tx.put(THINGS, BOX)
        thread.join(TIMEOUT_S)
        assert seen == [BOX]

    @pytest.mark.req("D4.write_subjects")
    def test_writers_without_a_common_subject_lose_nothing(self, store: Store) -> None:
        def add(name: str) -> None:
            for number in range(20):
                with store.write(about=(f"s:{name}",)) as tx:
                    assert tx.about == (f"s:{name}",)
                    tx.put(THINGS, Thing(name, number))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, "abcd"))
        assert self.things(store) == [Thing(name, number) for name in "abcd" for number in range(20)]

    def test_many_threads_that_read_and_then_write_lose_nothing(self, store: Store) -> None:
        threads, rounds = 8, 25

        def add(_: int) -> None:
            for _ in range(rounds):
                with store.write() as tx:
                    now = tx.get(THINGS, "sum", 0) or Thing("sum", 0, weight=0)
                    tx.put(THINGS, Thing("sum", 0, weight=(now.weight or 0) + 1))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(add, range(threads)))
        assert self.things(store) == [Thing("sum", 0, weight=threads * rounds)]

    def test_readers_beside_writers_never_see_half_a_transaction(self, store: Store) -> None:
        done = threading.Event()

        def look() -> int:
            looks = 0
            while not done.is_set() or looks == 0:
                with store.read() as tx:
                    pair = [tx.get(THINGS, "pair", number) for number in (1, 2)]
                assert {row and row.weight for row in pair} in ({None}, {pair[0] and pair[0].weight})
                looks += 1
            return looks

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(look) for _ in range(3)]
            for weight in range(100):
                self.fill(store, Thing("pair", 1, weight=weight), Thing("pair", 2, weight=weight))
            done.set()
            assert all(reader.result(TIMEOUT_S) > 0 for reader in readers)

    def test_a_waiting_writer_succeeds_when_the_one_before_fails(self, store: Store) -> None:
        def fail() -> None:
            with pytest.raises(LookupError), store.write() as tx:
                tx.put(THINGS, Thing("bad", 1))
                raise LookupError

        def succeed(number: int) -> None:
            self.fill(store, Thing("good", number))

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(fail) if n % 2 else pool.submit(succeed, n) for n in range(20)]
            for job in jobs:
                job.result(TIMEOUT_S)
        assert {row.group for row in self.things(store)} == {"good"}
        assert len(self.things(store)) == 10


_USES: dict[str, Callable[[Tx], object]] = {
    "get": lambda tx: tx.get(THINGS, "a", 1),
    "has": lambda tx: tx.has(THINGS, "a", 1),
    "put": lambda tx: tx.put(THINGS, BOX),
    "delete": lambda tx: tx.delete(THINGS, "a", 1),
    "select": lambda tx: tx.select(THINGS),
    "count": lambda tx: tx.count(THINGS),
}


class LifecycleContract(StoreContractBase):
    """Opening, closing, owners, and what the store says about itself."""

    def test_this_process_is_one_living_owner(self, store: Store) -> None:
        owner = store.owner()
        assert store.owner() == owner
        assert self.in_other_thread(store.owner) == owner
        assert store.is_alive(owner) is True

    def test_an_unknown_owner_is_not_alive(self, store: Store) -> None:
        assert store.is_alive(OwnerId(store.owner() + 1_000)) is False

    def test_close_runs_each_on_close_function_once_while_the_store_works(self, store: Store) -> None:
        ran: list[str] = []

        def act(name: str) -> None:
            self.fill(store, Thing(name, 1))
            ran.append(name)

        store.on_close(lambda: act("one"))
        store.on_close(lambda: act("two"))
        store.close()
        store.close()
        assert sorted(ran) == ["one", "two"]

    def test_a_sound_store_has_no_problems_and_a_size(self, store: Store) -> None:
        self.fill(store, BOX)
        store.sync()
        assert store.check() == []
        assert store.size_bytes() > 0

    def test_a_durable_store_keeps_its_rows_when_opened_again(self, directory: str) -> None:
        store = self.open_store(directory, CONTRACT_SCHEMA)
        self.fill(store, BOX)
        store.close()
        again = self.open_store(directory, CONTRACT_SCHEMA)
        assert self.things(again) == ([BOX] if self.lasts else [])
        again.close()

    def test_two_openings_of_one_durable_store_see_each_others_rows(self, directory: str) -> None:
        one, other = (self.open_store(directory, CONTRACT_SCHEMA) for _ in range(2))
        self.fill(one, BOX)
        self.fill(other, Thing("a", 2))
        seen = self.things(one)
        assert seen == ([BOX, Thing("a", 2)] if self.lasts else [BOX])
        assert (self.things(other) == seen) is self.lasts
        one.close()
        other.close()


class StoreContract(
    TransactionContract, TableContract, LifecycleContract, JournalContract, BlobContract, ClaimContract
):
    """Everything a store promises. Implement `open_store`; set `lasts` to False if nothing survives closing."""


__all__ = ["CONTRACT_SCHEMA", "LifecycleContract", "StoreContract", "TableContract", "TransactionContract"]
