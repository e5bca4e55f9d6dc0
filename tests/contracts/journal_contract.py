"""The contract of journals on every store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.store.journal import (
    GENESIS,
    HEADS,
    RECORDS,
    REFS,
    SEAL_RECORDS,
    SEALS,
    HeadRow,
    Journal,
    Record,
    RecordRow,
    RefRow,
    break_in_chain,
    chain_hash,
    records_of,
)
from mulligan.store.protocol import Store, Tx
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of, raw_digest
from mulligan.values.errors import MulliganError
from tests.contracts.store_under_test import StoreContractBase, contract_settings
from tests.contracts.tables import CONTRACT_SCHEMA, SUMS, Sum

AT = "2026-01-01T00:00:00.000000Z"
LATER = "2026-01-01T00:00:01.000000Z"


def broken_journals(tx: Tx) -> list[str]:
    """All faults in any journal of the store, and in the order of records across journals."""
    found = [break_in_chain(tx.select(RECORDS, {"journal": head.journal}), head) for head in tx.select(HEADS)]
    ordinals = [row.ordinal for row in tx.select(RECORDS)]
    if len(set(ordinals)) != len(ordinals):
        found.append("two records have the same ordinal")
    return [words for words in found if words is not None]


class JournalContract(StoreContractBase):
    """Append-only, contiguous, hash-chained; projected in the same transaction."""

    def append(self, store: Store, journal: str = "j", amount: int = 1, *, refs: tuple[Digest, ...] = ()) -> Record:
        with store.write() as tx:
            return Journal(CONTRACT_SCHEMA).append(tx, journal, "added", {"amount": amount}, at=AT, refs=refs)

    def records(self, store: Store, journal: str = "j", *, after: int = 0, limit: int | None = None) -> list[Record]:
        with store.read() as tx:
            return list(records_of(tx, journal, after=after, limit=limit))

    def test_a_record_is_its_canonical_bytes_chained_to_the_one_before(self, store: Store) -> None:
        digest = digest_of(b"x")
        first, second = self.append(store), self.append(store, amount=2, refs=(digest, digest))
        bodies = [
            encode({"seq": 1, "kind": "added", "at": AT, "payload": {"amount": 1}, "prev": GENESIS}),
            encode(
                {"seq": 2, "kind": "added", "at": AT, "payload": {"amount": 2}, "prev": first.hash, "refs": [digest]}
            ),
        ]
        hashes = [chain_hash(GENESIS, bodies[0]), chain_hash(first.hash, bodies[1])]
        with store.read() as tx:
            assert tx.select(RECORDS) == [
                RecordRow("j", 1, hashes[0], bodies[0], 1),
                RecordRow("j", 2, hashes[1], bodies[1], 2),
            ]
            assert tx.get(HEADS, "j") == HeadRow("j", 2, hashes[1], AT, 2)
            assert tx.select(REFS) == [RefRow(raw_digest(digest), "j", 2)]
        assert self.records(store) == [first, second]

    def test_time_never_runs_backwards_within_a_journal(self, store: Store) -> None:
        with store.write() as tx:
            journal = Journal(CONTRACT_SCHEMA)
            times = [journal.append(tx, "j", "noted", {}, at=at).at for at in (AT, LATER, AT)]
        assert times == [AT, LATER, LATER]

    def test_each_journal_has_its_own_sequence_and_all_share_one_order(self, store: Store) -> None:
        for journal in ("a", "b", "a", "é"):
            self.append(store, journal)
        with store.read() as tx:
            assert {head.journal: head.seq for head in tx.select(HEADS)} == {"a": 2, "b": 1, "é": 1}
            assert [(row.journal, row.ordinal) for row in tx.select(RECORDS)] == [
                ("a", 1),
                ("a", 3),
                ("b", 2),
                ("é", 4),
            ]
            assert broken_journals(tx) == []

    @pytest.mark.req("D4.ordinals")
    def test_a_record_has_a_higher_ordinal_than_all_that_its_writer_saw(self, store: Store) -> None:
        for journal in ("a", "b", "a"):
            with store.write(about=(journal,)) as tx:
                seen = [row.ordinal for row in tx.select(RECORDS)]
                Journal(CONTRACT_SCHEMA).append(tx, journal, "noted", {}, at=AT)
                assert [
                    row.ordinal > max(seen, default=0) for row in tx.select(RECORDS) if row.ordinal not in seen
                ] == [True]

    def test_an_aborted_writer_leaves_the_order_as_it_was(self, store: Store) -> None:
        self.append(store)
        with pytest.raises(LookupError), store.write() as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {"amount": 5}, at=AT)
            raise LookupError
        self.append(store, "k")
        with store.read() as tx:
            assert [(row.journal, row.ordinal) for row in tx.select(RECORDS)] == [("j", 1), ("k", 2)]

    @pytest.mark.req("D4.write_subjects")
    def test_a_writer_with_subjects_appends_to_no_other_journal(self, store: Store) -> None:
        with store.write(about=("j", "k")) as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "noted", {}, at=AT)
            with pytest.raises(MulliganError) as refused:
                Journal(CONTRACT_SCHEMA).append(tx, "other", "noted", {}, at=AT)
        assert refused.value.code == "internal"
        with store.read() as tx:
            assert [row.journal for row in tx.select(RECORDS)] == ["j"]

    @pytest.mark.req("D4.seals")
    def test_writing_seals_what_has_changed_every_five_seconds(self, store: Store) -> None:
        journal = Journal(CONTRACT_SCHEMA)
        seconds = {"a": (0, 3, 12), "b": (1, 4), "c": (6, 13, 19)}
        for second, name in sorted((second, name) for name, all_of_it in seconds.items() for second in all_of_it):
            with store.write(about=(name,)) as tx:
                journal.append(tx, name, "noted", {}, at=f"2026-01-01T00:00:{second:02}.000000Z")
        assert [
            (seal.at[17:19], {name: head["seq"] for name, head in seal.payload["heads"].items()})
            for seal in self.records(store, SEALS)
        ] == [("06", {"a": 2, "b": 2, "c": 1}), ("12", {"a": 3}), ("19", {"c": 3})]

    @pytest.mark.req("D4.seals")
    def test_writing_seals_what_has_changed_every_ten_thousand_records(self, store: Store) -> None:
        with store.write() as tx:
            journal = Journal(CONTRACT_SCHEMA)
            for _ in range(SEAL_RECORDS + 5):
                journal.append(tx, "j", "noted", {}, at=AT)
        assert [record.payload["heads"]["j"]["seq"] for record in self.records(store, SEALS)] == [SEAL_RECORDS]

    def test_a_failed_append_leaves_neither_record_nor_projection(self, store: Store) -> None:
        self.append(store)
        with pytest.raises(LookupError), store.write() as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {"amount": 5}, at=AT)
            raise LookupError
        assert [record.payload for record in self.records(store)] == [{"amount": 1}]
        with store.read() as tx:
            assert tx.select(SUMS) == [Sum("j", 1)]
            assert broken_journals(tx) == []

    def test_a_failing_projection_also_undoes_its_record(self, store: Store) -> None:
        with pytest.raises(KeyError), store.write() as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {}, at=AT)
        assert self.records(store) == []

    def test_a_payload_without_canonical_form_is_refused(self, store: Store) -> None:
        with pytest.raises(MulliganError) as refused, store.write() as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "noted", {"x": float("nan")}, at=AT)
        assert refused.value.code == "invalid_json"
        assert self.records(store) == []

    def test_records_come_in_pages_from_any_point(self, store: Store) -> None:
        with store.write() as tx:
            for amount in range(1, 2_302):
                Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {"amount": amount}, at=AT)
        assert [record.seq for record in self.records(store)] == list(range(1, 2_302))
        assert [record.seq for record in self.records(store, after=1_990, limit=20)] == list(range(1_991, 2_011))
        assert [record.seq for record in self.records(store, limit=1_500)] == list(range(1, 1_501))
        assert self.records(store, after=2_301) == self.records(store, limit=0) == self.records(store, "k") == []

    def test_many_threads_append_without_gap_or_fork(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: self.append(store, f"j{n % 3}", n), range(120)))
        with store.read() as tx:
            assert broken_journals(tx) == []
            assert sum(row.total for row in tx.select(SUMS)) == sum(range(120))

    @pytest.mark.parametrize("harm", ["body", "hash", "gap", "head", "swapped", "garbage"])
    def test_every_kind_of_damage_is_found(self, store: Store, harm: str) -> None:
        for amount in range(4):
            self.append(store, amount=amount)
        with store.write() as tx:
            _harm_journal(tx, harm)
        with store.read() as tx:
            assert len(broken_journals(tx)) >= 1

    @contract_settings
    @given(st.integers(0, 10_000), st.integers(0, 7))
    def test_any_flipped_bit_of_a_record_is_found(self, position: int, bit: int) -> None:
        with self.fresh() as store:
            self.append(store)
            with store.write() as tx:
                row = tx.select(RECORDS)[0]
                body = bytearray(row.body)
                body[position % len(body)] ^= 1 << bit
                tx.put(RECORDS, replace(row, body=bytes(body)))
            with store.read() as tx:
                assert len(broken_journals(tx)) == 1


def _harm_journal(tx: Tx, harm: str) -> None:
    first, second, third, fourth = tx.select(RECORDS)
    if harm == "body":
        tx.put(RECORDS, replace(second, body=second.body.replace(b'"amount":1', b'"amount":9')))
    elif harm == "hash":
        tx.put(RECORDS, replace(second, hash=third.hash))
    elif harm == "gap":
        tx.delete(RECORDS, "j", 2)
    elif harm == "head":
        tx.delete(RECORDS, "j", fourth.seq)
    elif harm == "swapped":
        tx.put(RECORDS, replace(second, hash=third.hash, body=third.body))
        tx.put(RECORDS, replace(third, hash=second.hash, body=second.body))
    else:
        tx.put(RECORDS, replace(first, body=b"\xff", hash=chain_hash(GENESIS, b"\xff")))
