"""The contract of tables on every store."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.store.protocol import Store, Value, sort_key
from mulligan.values.errors import MulliganError
from tests.contracts.store_under_test import BOX, StoreContractBase, contract_settings
from tests.contracts.tables import PARCELS, PRINTS, THINGS, Parcel, Thing

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2)
things = st.builds(
    Thing,
    group=st.sampled_from(["", "a", "b", "é", "\U0001f600", "\uffff", "a\0b"]),
    number=st.integers(-2, 2) | st.sampled_from([-(2**63), 2**63 - 1]),
    label=st.none() | texts,
    weight=st.none() | numbers,
    print=st.none() | st.binary(max_size=4),
)


class TableContract(StoreContractBase):
    """Rows by key, by column and in order: every engine gives the same answer."""

    def test_put_replaces_the_row_of_its_key(self, store: Store) -> None:
        self.fill(store, BOX, Thing("a", 1, "other"))
        assert self.things(store) == [Thing("a", 1, "other")]

    def test_update_changes_the_named_columns_of_one_row(self, store: Store) -> None:
        self.fill(store, Thing("a", 1, "old", 5, b"p"), Thing("a", 2, "old"))
        with store.write() as tx:
            assert tx.update(THINGS, "a", 1, label=None, weight=6)
            assert not tx.update(THINGS, "b", 1, label="new")
        assert self.things(store) == [Thing("a", 1, None, 6, b"p"), Thing("a", 2, "old")]
        with store.read() as tx:
            assert tx.select(THINGS, {"label": "old"}) == [Thing("a", 2, "old")]
            assert tx.select(THINGS, {"group": "a", "weight": 6}) == [Thing("a", 1, None, 6, b"p")]

    @pytest.mark.parametrize("columns", [{"number": 2}, {"nothing": 2}, {}])
    def test_update_of_a_key_or_of_no_column_is_refused(self, store: Store, columns: dict[str, Value]) -> None:
        self.fill(store, BOX)
        with pytest.raises(MulliganError), store.write() as tx:
            tx.update(THINGS, "a", 1, **columns)
        assert self.things(store) == [BOX]

    def test_update_in_a_read_transaction_is_refused(self, store: Store) -> None:
        self.fill(store, BOX)
        with pytest.raises(MulliganError), store.read() as tx:
            tx.update(THINGS, "a", 1, label="other")
        assert self.things(store) == [BOX]

    def test_delete_returns_whether_a_row_existed(self, store: Store) -> None:
        self.fill(store, BOX)
        with store.write() as tx:
            assert (tx.delete(THINGS, "a", 1), tx.delete(THINGS, "a", 1), tx.has(THINGS, "a", 1)) == (
                True,
                False,
                False,
            )

    def test_every_value_is_read_back_unchanged(self, store: Store) -> None:
        rows = [
            Thing("", -(2**63), "", 2**63 - 1, b""),
            Thing("nul", 0, "a\0b", 0, b"\0"),
            Thing("wide", 2**63 - 1, "é\U0001f600\uffff\u202e", -1, bytes(range(256))),
        ]
        self.fill(store, *rows)
        with store.read() as tx:
            assert [tx.get(THINGS, row.group, row.number) for row in rows] == rows

    @pytest.mark.parametrize("size", [0, 1, 5_000, 300_000])
    def test_a_body_of_any_size_is_read_back(self, store: Store, size: int) -> None:
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
    def test_a_row_with_values_that_no_engine_can_store_is_refused(self, store: Store, row: Thing) -> None:
        with pytest.raises(MulliganError), store.write() as tx:
            tx.put(THINGS, BOX)
            tx.put(THINGS, row)
        assert self.things(store) == []

    def test_a_body_without_its_key_is_refused(self, store: Store) -> None:
        with pytest.raises(MulliganError), store.write() as tx:
            tx.put(PARCELS, Parcel(None, b""))  # type: ignore[arg-type]  # the point

    def test_rows_are_ordered_by_value_none_first_and_text_by_bytes(self, store: Store) -> None:
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

    def test_keys_of_any_length_are_found_and_ordered_by_their_whole_value(self, store: Store) -> None:
        """PostgreSQL refuses index entries over 2 704 bytes; a path has up to 4 096."""
        long = Random(1).randbytes(4_096)
        keys = sorted(
            [long, long[:-1], long + b"\0", long[:2_704], long[:400], long[:400] + b"\xff", b"", b"\xff" * 9_000]
        )
        with store.write() as tx:
            for body in reversed(keys):
                tx.put(PRINTS, Parcel("first", body))
                tx.put(PRINTS, Parcel("p", body))
        with store.write() as tx:
            assert all(tx.delete(PRINTS, body, "first") for body in keys)
        with store.read() as tx:
            assert [row.body for row in tx.select(PRINTS)] == keys
            assert [row.body for row in tx.select(PRINTS, descending=True, limit=7)] == keys[:0:-1]
            assert [tx.get(PRINTS, body, "p") for body in keys] == [Parcel("p", body) for body in keys]
            assert tx.get(PRINTS, long + b"\1", "p") is None
            for low in keys:
                for high in keys:
                    expected = [body for body in keys if low <= body < high]
                    assert [row.body for row in tx.select(PRINTS, between=("body", low, high))] == expected

    def test_text_of_any_length_is_found_by_an_index_and_can_change(self, store: Store) -> None:
        label = "é" * 3_000
        self.fill(store, Thing("g" * 5_000, 1, label), Thing("g" * 4_999, 1, label + "a", 2))
        with store.write() as tx:
            assert tx.update(THINGS, "g" * 4_999, 1, label="short")
            assert tx.update(THINGS, "g" * 5_000, 1, weight=3)
        with store.read() as tx:
            assert tx.select(THINGS, {"label": label}) == [Thing("g" * 5_000, 1, label, 3)]
            assert tx.select(THINGS, {"label": "short"}) == [Thing("g" * 4_999, 1, "short", 2)]
            assert tx.count(THINGS, {"label": label + "a"}) == 0

    def test_a_condition_may_be_none(self, store: Store) -> None:
        self.fill(store, BOX, Thing("a", 2), Thing("b", 3, ""))
        with store.read() as tx:
            assert tx.select(THINGS, {"label": None}) == [Thing("a", 2)]
            assert tx.count(THINGS, {"label": None, "group": "a"}) == 1

    def test_unknown_columns_and_tables_are_refused(self, store: Store) -> None:
        with store.read() as tx:
            with pytest.raises(MulliganError):
                tx.select(THINGS, {"nonsense": 1})
            assert tx.select(THINGS) == []

    def test_rows_equal_in_an_order_are_sorted_by_key(self, store: Store) -> None:
        self.fill(store, *(Thing("a", number, "same", number % 2) for number in range(6)))
        with store.read() as tx:
            rising = [row.number for row in tx.select(THINGS, {"label": "same"}, order=("weight",))]
            falling = [row.number for row in tx.select(THINGS, order=("weight",), descending=True)]
        assert (rising, falling) == ([0, 2, 4, 1, 3, 5], [5, 3, 1, 4, 2, 0])

    @contract_settings
    @given(rows=st.lists(things, max_size=12), data=st.data())
    def test_every_select_equals_the_same_query_on_a_list(self, rows: list[Thing], data: st.DataObject) -> None:
        with self.fresh() as store:
            self.fill(store, *rows)
            where = data.draw(_wheres(rows))
            between = data.draw(_ranges(rows))
            order = data.draw(st.none() | st.permutations(["label", "weight", "print"]).map(lambda p: tuple(p[:2])))
            descending, limit = data.draw(st.booleans()), data.draw(st.none() | st.integers(0, 5))
            kept = {(row.group, row.number): row for row in rows}.values()
            expected = _plain_select(list(kept), where, between=between, order=order, descending=descending)
            with store.read() as tx:
                options: dict[str, Any] = {"between": between, "order": order, "descending": descending}
                assert tx.select(THINGS, where, limit=limit, **options) == expected[:limit]
                assert tx.count(THINGS, where) == len(_plain_select(list(kept), where))

    @contract_settings
    @given(st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.booleans(), things), max_size=6)), max_size=6))
    def test_any_sequence_of_transactions_leaves_the_same_rows_as_a_dict(
        self, transactions: list[tuple[bool, list[tuple[bool, Thing]]]]
    ) -> None:
        model: dict[tuple[str, int], Thing] = {}
        with self.fresh() as store:
            for kept, changes in transactions:
                model = _applied(store, changes, kept=kept, model=model)
                assert self.things(store) == sorted(
                    model.values(), key=lambda row: (sort_key(row.group), sort_key(row.number))
                )


def _applied(
    store: Store, changes: list[tuple[bool, Thing]], *, kept: bool, model: dict[tuple[str, int], Thing]
) -> dict[tuple[str, int], Thing]:
    """Change the store and the model in the same way. Without `kept`, the transaction fails at its end."""
    after = dict(model)
    try:
        with store.write() as tx:
            for putting, row in changes:
                key = (row.group, row.number)
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
    """Conditions on columns, most of them with values that rows have."""
    columns = st.sampled_from(["group", "number", "label", "weight", "print"])
    row = st.sampled_from(rows) if rows else things
    return st.none() | st.builds(lambda one, names: {name: getattr(one, name) for name in names}, row, st.sets(columns))


def _ranges(rows: list[Thing]) -> st.SearchStrategy[tuple[str, Value, Value] | None]:
    low_high: dict[str, st.SearchStrategy[Any]] = {"number": numbers, "label": texts, "print": st.binary(max_size=3)}
    return st.none() | st.one_of(*(st.tuples(st.just(column), values, values) for column, values in low_high.items()))


def _plain_select(
    rows: list[Thing],
    where: dict[str, Value] | None,
    *,
    between: tuple[str, Value, Value] | None = None,
    order: tuple[str, ...] | None = None,
    descending: bool = False,
) -> list[Thing]:
    def fits(row: Thing) -> bool:
        if any(getattr(row, column) != value for column, value in (where or {}).items()):
            return False
        if between is None:
            return True
        value = getattr(row, between[0])
        return value is not None and sort_key(between[1]) <= sort_key(value) < sort_key(between[2])

    def rank(row: Thing) -> list[tuple[int, Any]]:
        return [sort_key(getattr(row, column)) for column in (*(order or ()), "group", "number")]

    return sorted(filter(fits, rows), key=rank, reverse=descending)
