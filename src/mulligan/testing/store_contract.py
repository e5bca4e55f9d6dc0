"""The judge of every store engine: what the protocol's docstrings promise, as tests.

`StoreContract` is the whole of it. Its parts can also be bound one by one: `TransactionContract`, `TableContract` here,
`JournalContract`, `BlobContract` and `ClaimContract` in `store_rules_contract`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.store.protocol import Store, Tx
from mulligan.store.tables import Value, sort_key
from mulligan.testing.contract_tables import CONTRACT_SCHEMA, PARCELS, PRINTS, THINGS, Parcel, Thing
from mulligan.testing.store_bench import PATIENCE_S, StoreBench, judged
from mulligan.testing.store_rules_contract import BlobContract, ClaimContract, JournalContract
from mulligan.values.faults import MulliganError
from mulligan.values.ids import OwnerId

BOX = Thing("a", 1, "box", 5, b"\x00\xff")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
things = st.builds(
    Thing,
    shelf=st.sampled_from(["", "a", "b", "é", "\U0001f600", "\uffff", "a\0b"]),
    number=st.integers(-2, 2) | st.sampled_from([-(2**63), 2**63 - 1]),
    label=st.none() | texts,
    weight=st.none() | numbers,
    print=st.none() | st.binary(max_size=4),
)


class TransactionContract(StoreBench):
    """All or nothing, alone in the world, one thread, and an end."""

    def test_what_a_transaction_wrote_is_there_afterwards(self, store: Store) -> None:
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

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    def test_an_exception_undoes_every_write_and_goes_on(self, store: Store, error: type[BaseException]) -> None:
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

    def test_a_write_inside_a_write_of_the_same_thread_is_refused_and_harms_nothing(self, store: Store) -> None:
        with store.write() as tx:
            tx.put(THINGS, BOX)
            with pytest.raises(MulliganError) as refused, store.write():
                pass
            tx.put(THINGS, Thing("a", 2))
        assert refused.value.code == "nested_transaction"
        assert self.things(store) == [BOX, Thing("a", 2)]

    def test_a_read_inside_a_write_sees_only_what_is_published(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.write() as tx:
            tx.put(THINGS, Thing("a", 2))
            assert self.things(store) == [BOX]
        assert self.things(store) == [BOX, Thing("a", 2)]

    def test_reads_may_be_open_beside_each_other(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.read() as one, store.read() as other:
            assert one.get(THINGS, "a", 1) == other.get(THINGS, "a", 1) == BOX

    @pytest.mark.parametrize("use", ["get", "has", "put", "delete", "select", "count"])
    @pytest.mark.parametrize("kind", ["read", "write", "failed"])
    def test_use_after_the_end_raises(self, store: Store, kind: str, use: str) -> None:
        ended: list[Tx] = []
        if kind == "failed":
            with pytest.raises(LookupError), store.write() as tx:
                ended.append(tx)
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

    def test_a_read_sees_one_past_while_others_write(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.read() as tx:
            assert tx.count(THINGS) == 1
            self.elsewhere(lambda: self.fill(store, Thing("a", 2)))
            assert (tx.count(THINGS), tx.get(THINGS, "a", 2), tx.select(THINGS)) == (1, None, [BOX])
        assert len(self.things(store)) == 2

    def test_a_read_never_waits_for_a_writer_nor_sees_its_half(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.write() as tx:
            tx.put(THINGS, Thing("a", 2))
            assert self.elsewhere(lambda: self.things(store)) == [BOX]

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
            assert asking.wait(PATIENCE_S)
            tx.put(THINGS, BOX)
            order.append("first")
        thread.join(PATIENCE_S)
        assert order == ["first", "second"]

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
            assert all(reader.result(PATIENCE_S) > 0 for reader in readers)

    def test_a_waiting_writer_is_not_hurt_by_the_failure_of_the_one_before(self, store: Store) -> None:
        def fail() -> None:
            with pytest.raises(LookupError), store.write() as tx:
                tx.put(THINGS, Thing("bad", 1))
                raise LookupError

        def succeed(number: int) -> None:
            self.fill(store, Thing("good", number))

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(fail) if n % 2 else pool.submit(succeed, n) for n in range(20)]
            for job in jobs:
                job.result(PATIENCE_S)
        assert {row.shelf for row in self.things(store)} == {"good"}
        assert len(self.things(store)) == 10


_USES: dict[str, Callable[[Tx], object]] = {
    "get": lambda tx: tx.get(THINGS, "a", 1),
    "has": lambda tx: tx.has(THINGS, "a", 1),
    "put": lambda tx: tx.put(THINGS, BOX),
    "delete": lambda tx: tx.delete(THINGS, "a", 1),
    "select": lambda tx: tx.select(THINGS),
    "count": lambda tx: tx.count(THINGS),
}


class TableContract(StoreBench):
    """Rows by key, by column and in order: the same answer from every engine."""

    def test_put_replaces_the_row_of_its_key(self, store: Store) -> None:
        self.fill(store, BOX, Thing("a", 1, "other"))
        assert self.things(store) == [Thing("a", 1, "other")]

    def test_delete_says_whether_there_was_one(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.write() as tx:
            assert (tx.delete(THINGS, "a", 1), tx.delete(THINGS, "a", 1), tx.has(THINGS, "a", 1)) == (
                True,
                False,
                False,
            )

    def test_every_value_comes_back_as_it_was(self, store: Store) -> None:
        rows = [
            Thing("", -(2**63), "", 2**63 - 1, b""),
            Thing("nul", 0, "a\0b", 0, b"\0"),
            Thing("wide", 2**63 - 1, "é\U0001f600\uffff\u202e", -1, bytes(range(256))),
        ]
        self.fill(store, *rows)
        with store.read() as tx:
            assert [tx.get(THINGS, row.shelf, row.number) for row in rows] == rows

    @pytest.mark.parametrize("size", [0, 1, 5_000, 300_000])
    def test_a_body_of_any_size_comes_back(self, store: Store, size: int) -> None:
        with store.write() as tx:
            tx.put(PARCELS, Parcel("p", b"\xa5" * size))
        with store.read() as tx:
            assert tx.get(PARCELS, "p") == Parcel("p", b"\xa5" * size)

    @pytest.mark.parametrize(
        "row",
        [
            Thing(None, 1),  # type: ignore[arg-type]  # the point
            Thing("a", None),  # type: ignore[arg-type]
            Thing("a", 2**63),
            Thing("a", 1, "\ud800"),
            Thing("a", 1, weight=[]),  # type: ignore[arg-type]
        ],
        ids=["no text key", "no number key", "integer too large", "lone surrogate", "a list"],
    )
    def test_a_row_no_engine_could_keep_is_refused(self, store: Store, row: Thing) -> None:
        with pytest.raises(MulliganError), store.write() as tx:
            tx.put(THINGS, BOX)
            tx.put(THINGS, row)
        assert self.things(store) == []

    def test_a_body_without_its_key_is_refused(self, store: Store) -> None:
        with pytest.raises(MulliganError), store.write() as tx:
            tx.put(PARCELS, Parcel(None, b""))  # type: ignore[arg-type]  # the point

    def test_order_is_that_of_values_none_first_and_text_by_its_bytes(self, store: Store) -> None:
        labels = [None, "", "A", "Z", "a", "z", "é", "\uffff", "\U0001f600"]
        self.fill(store, *(Thing("a", number, label) for number, label in enumerate(reversed(labels))))
        with store.read() as tx:
            assert [row.label for row in tx.select(THINGS, order=("label",))] == labels
            assert [row.label for row in tx.select(THINGS, order=("label",), descending=True)] == labels[::-1]

    def test_bytes_order_by_byte_in_keys_too(self, store: Store) -> None:
        bodies = [b"", b"\0", b"\0\0", b"/", b"0", b"\x7f", b"\x80", b"\xff", b"\xff\0"]
        with store.write() as tx:
            for body in reversed(bodies):
                tx.put(PRINTS, Parcel("", body))
        with store.read() as tx:
            assert [row.body for row in tx.select(PRINTS)] == bodies
            assert [row.body for row in tx.select(PRINTS, between=("body", b"\0", b"\x80"))] == bodies[1:6]

    def test_none_is_found_by_asking_for_it(self, store: Store) -> None:
        self.fill(store, BOX, Thing("a", 2), Thing("b", 3, ""))
        with store.read() as tx:
            assert tx.select(THINGS, {"label": None}) == [Thing("a", 2)]
            assert tx.count(THINGS, {"label": None, "shelf": "a"}) == 1

    def test_unknown_columns_and_tables_are_refused(self, store: Store) -> None:
        with store.read() as tx:
            with pytest.raises(MulliganError):
                tx.select(THINGS, {"nonsense": 1})
            assert tx.select(THINGS) == []

    def test_equal_rows_in_an_order_follow_their_key(self, store: Store) -> None:
        self.fill(store, *(Thing("a", number, "same", number % 2) for number in range(6)))
        with store.read() as tx:
            rising = [row.number for row in tx.select(THINGS, {"label": "same"}, order=("weight",))]
            falling = [row.number for row in tx.select(THINGS, order=("weight",), descending=True)]
        assert (rising, falling) == ([0, 2, 4, 1, 3, 5], [5, 3, 1, 4, 2, 0])

    @judged
    @given(rows=st.lists(things, max_size=12), data=st.data())
    def test_every_select_is_what_a_plain_list_gives(self, rows: list[Thing], data: st.DataObject) -> None:
        with self.fresh() as store:
            self.fill(store, *rows)
            where = data.draw(_wheres(rows))
            between = data.draw(_ranges(rows))
            order = data.draw(st.none() | st.permutations(["label", "weight", "print"]).map(lambda p: tuple(p[:2])))
            descending, limit = data.draw(st.booleans()), data.draw(st.none() | st.integers(0, 5))
            kept = {(row.shelf, row.number): row for row in rows}.values()
            expected = _plain_select(list(kept), where, between, order, descending)
            with store.read() as tx:
                options: dict[str, Any] = {"between": between, "order": order, "descending": descending}
                assert tx.select(THINGS, where, limit=limit, **options) == expected[:limit]
                assert tx.count(THINGS, where) == len(_plain_select(list(kept), where, None, None, False))

    @judged
    @given(st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.booleans(), things), max_size=6)), max_size=6))
    def test_any_sequence_of_transactions_leaves_what_a_dict_would(
        self, transactions: list[tuple[bool, list[tuple[bool, Thing]]]]
    ) -> None:
        model: dict[tuple[str, int], Thing] = {}
        with self.fresh() as store:
            for kept, changes in transactions:
                model = _applied(store, changes, kept=kept, model=model)
                assert self.things(store) == sorted(
                    model.values(), key=lambda row: (sort_key(row.shelf), sort_key(row.number))
                )


def _applied(
    store: Store, changes: list[tuple[bool, Thing]], *, kept: bool, model: dict[tuple[str, int], Thing]
) -> dict[tuple[str, int], Thing]:
    """Do the same to both; without `kept`, the transaction fails at its end."""
    after = dict(model)
    try:
        with store.write() as tx:
            for putting, row in changes:
                key = (row.shelf, row.number)
                assert tx.get(THINGS, *key) == after.get(key)
                if putting:
                    tx.put(THINGS, row)
                    after[key] = row
                else:
                    assert tx.delete(THINGS, *key) == (after.pop(key, None) is not None)
            if not kept:
                raise LookupError
    except LookupError:
        return model
    return after


def _wheres(rows: list[Thing]) -> st.SearchStrategy[dict[str, Value] | None]:
    """Columns with values that rows have, mostly."""
    columns = st.sampled_from(["shelf", "number", "label", "weight", "print"])
    row = st.sampled_from(rows) if rows else things
    return st.none() | st.builds(lambda one, names: {name: getattr(one, name) for name in names}, row, st.sets(columns))


def _ranges(rows: list[Thing]) -> st.SearchStrategy[tuple[str, Value, Value] | None]:
    low_high: dict[str, st.SearchStrategy[Any]] = {"number": numbers, "label": texts, "print": st.binary(max_size=3)}
    return st.none() | st.one_of(*(st.tuples(st.just(column), values, values) for column, values in low_high.items()))


def _plain_select(
    rows: list[Thing],
    where: dict[str, Value] | None,
    between: tuple[str, Value, Value] | None,
    order: tuple[str, ...] | None,
    descending: bool,
) -> list[Thing]:
    def fits(row: Thing) -> bool:
        if any(getattr(row, column) != value for column, value in (where or {}).items()):
            return False
        if between is None:
            return True
        value = getattr(row, between[0])
        return value is not None and sort_key(between[1]) <= sort_key(value) < sort_key(between[2])

    def rank(row: Thing) -> list[tuple[int, Any]]:
        return [sort_key(getattr(row, column)) for column in (*(order or ()), "shelf", "number")]

    return sorted(filter(fits, rows), key=rank, reverse=descending)


class LifeContract(StoreBench):
    """Opening, closing, owners, and the state of the medium."""

    def test_this_process_is_one_living_owner(self, store: Store) -> None:
        owner = store.owner()
        assert store.owner() == owner
        assert self.elsewhere(store.owner) == owner
        assert store.is_alive(owner) is True

    def test_an_owner_nobody_has_heard_of_is_not_alive(self, store: Store) -> None:
        assert store.is_alive(OwnerId(store.owner() + 1_000)) is False

    def test_closing_runs_each_act_once_while_the_store_still_works(self, store: Store) -> None:
        ran: list[str] = []

        def act(name: str) -> None:
            self.fill(store, Thing(name, 1))
            ran.append(name)

        store.on_close(lambda: act("one"))
        store.on_close(lambda: act("two"))
        store.close()
        store.close()
        assert sorted(ran) == ["one", "two"]

    def test_a_sound_store_has_no_complaints_and_a_size(self, store: Store) -> None:
        self.fill(store, BOX)
        store.sync()
        assert store.check() == []
        assert store.size_bytes() > 0

    def test_what_was_written_is_there_when_opened_again_if_the_engine_lasts(self, directory: str) -> None:
        store = self.open_store(directory, CONTRACT_SCHEMA)
        self.fill(store, BOX)
        store.close()
        again = self.open_store(directory, CONTRACT_SCHEMA)
        assert self.things(again) == ([BOX] if self.lasts else [])
        again.close()

    def test_two_openings_of_one_store_see_each_other_if_the_engine_lasts(self, directory: str) -> None:
        one, other = (self.open_store(directory, CONTRACT_SCHEMA) for _ in range(2))
        self.fill(one, BOX)
        self.fill(other, Thing("a", 2))
        seen = self.things(one)
        assert seen == ([BOX, Thing("a", 2)] if self.lasts else [BOX])
        assert (self.things(other) == seen) is self.lasts
        one.close()
        other.close()

    @pytest.fixture
    def directory(self) -> Iterator[str]:
        with self.scratch() as directory:
            yield directory


class StoreContract(TransactionContract, TableContract, LifeContract, JournalContract, BlobContract, ClaimContract):
    """Everything a store promises. Implement `open_store`; set `lasts` to False if nothing survives closing."""


__all__ = ["CONTRACT_SCHEMA", "LifeContract", "StoreContract", "TableContract", "TransactionContract"]
