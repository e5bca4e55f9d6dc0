"""What is built on every store and must hold on every engine: journals, blobs and claims."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.store.blobs import BESIDE, BLOBS, BODIES, EVICTED, IN_DATABASE, Blobs, BodyRow, Vanished
from mulligan.store.claims import CLAIMS, ClaimRow, Wanted, blockers, claim, may_wait, release
from mulligan.store.journal import (
    GENESIS,
    HEADS,
    RECORDS,
    REFS,
    STORE_HEAD,
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
from mulligan.testing.contract_tables import CONTRACT_SCHEMA, SUMS, THINGS, Sum, Thing
from mulligan.testing.store_bench import PATIENCE_S, StoreBench, judged
from mulligan.testing.world import Actor, Seed, SeededIds, SteppingClock, World
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of, raw_digest
from mulligan.values.faults import MulliganError
from mulligan.values.ids import CallId
from mulligan.values.limits import BLOB_CHAIN_MAX, BLOB_IN_DATABASE_BYTES

AT = "2026-01-01T00:00:00.000000Z"
LATER = "2026-01-01T00:00:01.000000Z"


def broken_journals(tx: Tx) -> list[str]:
    """Everything wrong with any journal of the store, and with the line they form together."""
    heads = [head for head in tx.select(HEADS) if head.journal != STORE_HEAD]
    found = [break_in_chain(tx.select(RECORDS, {"journal": head.journal}), head) for head in heads]
    ordinals = sorted(row.ordinal for row in tx.select(RECORDS))
    whole = tx.get(HEADS, STORE_HEAD)
    if ordinals != list(range(1, (whole.seq if whole else 0) + 1)):
        found.append("the records do not form one line")
    return [words for words in found if words is not None]


class JournalContract(StoreBench):
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
            assert tx.get(HEADS, "j") == HeadRow("j", 2, hashes[1], AT)
            assert tx.select(REFS) == [RefRow(raw_digest(digest), "j", 2)]
        assert self.records(store) == [first, second]

    def test_time_never_runs_backwards_within_a_journal(self, store: Store) -> None:
        with store.write() as tx:
            journal = Journal(CONTRACT_SCHEMA)
            times = [journal.append(tx, "j", "noted", {}, at=at).at for at in (AT, LATER, AT)]
        assert times == [AT, LATER, LATER]

    def test_journals_count_apart_and_form_one_line(self, store: Store) -> None:
        for journal in ("a", "b", "a", "é"):
            self.append(store, journal)
        with store.read() as tx:
            assert {head.journal: head.seq for head in tx.select(HEADS)} == {"": 4, "a": 2, "b": 1, "é": 1}
            assert [(row.journal, row.ordinal) for row in tx.select(RECORDS)] == [
                ("a", 1),
                ("a", 3),
                ("b", 2),
                ("é", 4),
            ]
            assert broken_journals(tx) == []

    def test_a_failed_append_leaves_neither_record_nor_projection(self, store: Store) -> None:
        self.append(store)
        with pytest.raises(LookupError), store.write() as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {"amount": 5}, at=AT)
            raise LookupError
        assert [record.payload for record in self.records(store)] == [{"amount": 1}]
        with store.read() as tx:
            assert tx.select(SUMS) == [Sum("j", 1)]
            assert broken_journals(tx) == []

    def test_a_projection_that_fails_takes_its_record_with_it(self, store: Store) -> None:
        with pytest.raises(KeyError), store.write() as tx:
            Journal(CONTRACT_SCHEMA).append(tx, "j", "added", {}, at=AT)
        assert self.records(store) == []

    def test_what_has_no_canonical_form_is_refused(self, store: Store) -> None:
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

    @judged
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


class BlobContract(StoreBench):
    """Immutable bytes by digest: kept once, packed, verified on every read."""

    def blobs(self, store: Store) -> Blobs:
        return Blobs(store, SteppingClock())

    @pytest.mark.parametrize("size", [0, 1, 127, 128, 4_096, BLOB_IN_DATABASE_BYTES + 1, 300_000])
    @pytest.mark.parametrize("kind", ["plain", "noise"])
    def test_bytes_come_back(self, store: Store, size: int, kind: str) -> None:
        data = Random(size).randbytes(size) if kind == "noise" else b"a" * size
        digest = self.blobs(store).store(data)
        assert (digest, self.blobs(store).read(digest)) == (digest_of(data), data)

    def test_large_bodies_live_beside_the_database_and_small_ones_in_it(self, store: Store) -> None:
        large, small = Random(1).randbytes(BLOB_IN_DATABASE_BYTES + 1), b"small"
        digests = self.blobs(store).store_all([large, small])
        with store.read() as tx:
            rows = [tx.get(BLOBS, raw_digest(digest)) for digest in digests]
            assert [row and row.place for row in rows] == [BESIDE, IN_DATABASE]
            assert tx.count(BODIES) == 1
        assert list(store.bodies.digests()) == digests[:1]

    def test_the_same_bytes_are_kept_once_and_touched(self, store: Store) -> None:
        blobs = self.blobs(store)
        digest = blobs.store(b"same")
        with store.read() as tx:
            before = tx.select(BLOBS)
        assert blobs.store(b"same") == digest
        with store.read() as tx:
            after = tx.select(BLOBS)
        assert after == [replace(before[0], touched_ms=after[0].touched_ms)]
        assert after[0].touched_ms > before[0].touched_ms

    def test_a_failed_transaction_names_no_blob(self, store: Store) -> None:
        blobs = self.blobs(store)
        prepared = blobs.prepare(b"never")
        with pytest.raises(LookupError), store.write() as tx:
            blobs.put(tx, prepared)
            raise LookupError
        assert self.code_of(store, prepared.digest) == "unknown_blob"

    def test_versions_of_a_file_build_on_each_other_in_short_chains(self, store: Store) -> None:
        versions = list(_versions(3 * BLOB_CHAIN_MAX))
        digests = self.put_versions(store, versions)
        assert [self.blobs(store).read(digest) for digest in digests] == versions
        assert max(self.chain_lengths(store)) == BLOB_CHAIN_MAX
        with store.read() as tx:
            keyframes = tx.count(BLOBS, {"base": None})
            assert keyframes == 3
            assert sum(row.stored for row in tx.select(BLOBS)) < sum(map(len, versions)) / 4

    def test_chains_stay_short_when_all_versions_are_prepared_before_any_is_put(self, store: Store) -> None:
        versions = list(_versions(2 * BLOB_CHAIN_MAX + 3))
        blobs = self.blobs(store)
        prepared = [
            blobs.prepare(data, after=earlier) for earlier, data in zip([None, *versions], versions, strict=False)
        ]
        for one, data in zip(prepared, versions, strict=True):
            try:
                blobs.put_all([one])
            except Vanished:
                blobs.store(data)
        assert [blobs.read(digest_of(data)) for data in versions] == versions
        assert max(self.chain_lengths(store)) <= BLOB_CHAIN_MAX

    def put_versions(self, store: Store, versions: list[bytes]) -> list[Digest]:
        blobs, earlier, digests = self.blobs(store), None, []
        for data in versions:
            prepared = blobs.prepare(data, after=earlier)
            blobs.put_all([prepared])
            digests.append(prepared.digest)
            earlier = data
        return digests

    def chain_lengths(self, store: Store) -> list[int]:
        with store.read() as tx:
            bases = {row.digest: row.base for row in tx.select(BLOBS)}
        lengths = []
        for start in bases:
            length, at = 1, start
            while (at := bases[at] or b"") != b"":
                length += 1
            lengths.append(length)
        return lengths

    @pytest.mark.parametrize("gone", ["row", "evicted"])
    def test_a_base_that_went_away_since_is_noticed_when_putting(self, store: Store, gone: str) -> None:
        one, two = _versions(2)
        blobs = self.blobs(store)
        digest = blobs.store(one)
        prepared = blobs.prepare(two, after=one)
        with store.write() as tx:
            self.harm_blob(tx, digest, gone)
        with pytest.raises(Vanished):
            blobs.put_all([prepared])
        assert blobs.read(blobs.store(two)) == two

    def test_an_evicted_blob_can_be_stored_again(self, store: Store) -> None:
        blobs = self.blobs(store)
        digest = blobs.store(b"come back")
        with store.write() as tx:
            self.harm_blob(tx, digest, "evicted")
        assert self.code_of(store, digest) == "evicted"
        assert blobs.read(blobs.store(b"come back")) == b"come back"

    def test_a_blob_known_when_prepared_and_collected_since_is_noticed(self, store: Store) -> None:
        blobs = self.blobs(store)
        digest = blobs.store(b"collected")
        prepared = blobs.prepare(b"collected")
        with store.write() as tx:
            self.harm_blob(tx, digest, "row")
        with pytest.raises(Vanished):
            blobs.put_all([prepared])

    @pytest.mark.parametrize(
        ("harm", "code"),
        [
            ("flipped", "blob_corrupt"),
            ("cut", "blob_corrupt"),
            ("empty", "blob_corrupt"),
            ("other", "blob_corrupt"),
            ("body", "missing_cas_dependency"),
            ("evicted", "evicted"),
            ("row", "unknown_blob"),
            ("circle", "blob_corrupt"),
        ],
    )
    def test_damage_is_told_apart_and_never_returned(self, store: Store, harm: str, code: str) -> None:
        digest = self.blobs(store).store(b"some text " * 50)
        with store.write() as tx:
            self.harm_blob(tx, digest, harm)
        assert self.code_of(store, digest) == code

    def test_a_lost_body_beside_the_database_is_missing(self, store: Store) -> None:
        digest = self.blobs(store).store(Random(2).randbytes(BLOB_IN_DATABASE_BYTES + 1))
        store.bodies.delete(digest)
        assert self.code_of(store, digest) == "missing_cas_dependency"

    def test_damage_of_an_earlier_version_is_found_when_a_later_one_is_read(self, store: Store) -> None:
        one, two = self.put_versions(store, list(_versions(2)))
        with store.write() as tx:
            self.harm_blob(tx, one, "flipped")
        assert self.code_of(store, two) == "blob_corrupt"
        with store.write() as tx:
            self.harm_blob(tx, one, "row")
        assert self.code_of(store, two) == "missing_cas_dependency"

    @judged
    @given(st.integers(0, 10_000), st.integers(0, 7), st.booleans())
    def test_any_flipped_bit_of_a_body_is_found_or_harmless(self, position: int, bit: int, packed: bool) -> None:
        data = b"the same again and again " * 20 if packed else b"short"
        with self.fresh() as store:
            digest = self.blobs(store).store(data)
            with store.write() as tx:
                body = bytearray(tx.select(BODIES)[0].body)
                body[position % len(body)] ^= 1 << bit
                tx.put(BODIES, BodyRow(raw_digest(digest), bytes(body)))
            with suppress(MulliganError):
                assert self.blobs(store).read(digest) == data

    def harm_blob(self, tx: Tx, digest: Digest, harm: str) -> None:
        raw = raw_digest(digest)
        row, kept = tx.get(BLOBS, raw), tx.get(BODIES, raw)
        assert row is not None and kept is not None
        middle = len(kept.body) // 2
        bodies = {
            "flipped": kept.body[:middle] + bytes([kept.body[middle] ^ 1]) + kept.body[middle + 1 :],
            "cut": kept.body[:-1],
            "empty": b"",
            "other": b"\0" + b"x" * row.size,
        }
        if harm in bodies:
            tx.put(BODIES, BodyRow(raw, bodies[harm]))
        elif harm == "evicted":
            tx.put(BLOBS, replace(row, place=EVICTED))
        elif harm == "circle":
            tx.put(BLOBS, replace(row, base=raw))
        else:
            tx.delete(BODIES, raw)
        if harm in ("evicted", "row"):
            tx.delete(BODIES, raw)
        if harm == "row":
            tx.delete(BLOBS, raw)

    def code_of(self, store: Store, digest: Digest) -> str:
        with pytest.raises(MulliganError) as found:
            self.blobs(store).read(digest)
        return found.value.code


def _versions(count: int) -> Iterator[bytes]:
    """A file of noise in which one more line changes each time: only its predecessor makes it small."""
    random = Random(7)
    lines = [random.randbytes(60).hex() for _ in range(60)]
    for _ in range(count):
        lines[random.randrange(len(lines))] = random.randbytes(60).hex()
        yield "\n".join(lines).encode()


places = st.sampled_from([b"/r", b"/r/a", b"/r/a/b", b"/r/a/b/c", b"/r/a-", b"/r/a0", b"/r/a/b\xff", b"/s"])
wants = st.lists(st.builds(Wanted, places, st.booleans()), min_size=1, max_size=3)


def _clash(mine: Wanted | ClaimRow, theirs: Wanted | ClaimRow) -> bool:
    """The rule in one line: the same place, or one deep claim above the other place."""
    above = [(mine, theirs), (theirs, mine)]
    return mine.place == theirs.place or any(bool(a.deep) and b.place.startswith(a.place + b"/") for a, b in above)


class ClaimContract(StoreBench):
    """Who may change a place: hierarchy, all or none, and waits that never form a circle."""

    @judged
    @given(st.lists(st.tuples(st.sampled_from(["1", "2", "3"]), wants), max_size=6), wants)
    def test_blockers_are_exactly_the_clashing_claims_of_others(
        self, taken: list[tuple[str, list[Wanted]]], wanted: list[Wanted]
    ) -> None:
        with self.fresh() as store, store.write() as tx:
            for call, places_wanted in taken:
                if not blockers(tx, CallId(call), places_wanted):
                    claim(tx, CallId(call), places_wanted)
            others = [row for row in tx.select(CLAIMS) if row.call != "2"]
            expected = [row for row in others if any(_clash(one, row) for one in wanted)]
            assert blockers(tx, CallId("2"), wanted) == expected

    def test_a_claim_of_ones_own_is_kept_and_only_deepened(self, store: Store) -> None:
        with store.write() as tx:
            for deep in (False, True, False):
                claim(tx, CallId("1"), [Wanted(b"/r/a", deep)])
            assert tx.select(CLAIMS) == [ClaimRow(b"/r/a", "1", 1)]
            assert blockers(tx, CallId("1"), [Wanted(b"/r", True)]) == []

    def test_release_frees_ones_own_and_nothing_else(self, store: Store) -> None:
        with store.write() as tx:
            claim(tx, CallId("1"), [Wanted(b"/r/a"), Wanted(b"/r/b")])
            claim(tx, CallId("2"), [Wanted(b"/s")])
            release(tx, CallId("1"))
            assert tx.select(CLAIMS) == [ClaimRow(b"/s", "2", 0)]

    def test_the_older_waits_and_the_younger_gives_up(self, store: Store) -> None:
        ids = SeededIds()
        older, younger = CallId(ids.new()), CallId(ids.new())
        held = [ClaimRow(b"/r", younger, 0)]
        assert (may_wait(older, held), may_wait(younger, [ClaimRow(b"/r", older, 0)])) == (True, False)
        assert may_wait(older, [*held, ClaimRow(b"/s", "", 0)]) is False

    @judged
    @given(st.integers(0, 2**32), st.lists(st.lists(wants, min_size=1, max_size=3), min_size=2, max_size=5))
    def test_calls_that_wait_or_die_all_end_and_never_clash(self, number: int, calls: list[list[list[Wanted]]]) -> None:
        world = World(Seed(number))
        ended: dict[str, str] = {}
        with world.seed, self.fresh() as store:
            names = [world.ids.new() for _ in calls]
            actors = {
                name: _calling(store, CallId(name), steps, ended) for name, steps in zip(names, calls, strict=True)
            }
            world.scheduler.run(actors, after_each=lambda: _nobody_clashes(store))
            assert sorted(ended) == names
            assert ended[names[0]] == "done"

    def test_threads_that_claim_at_once_never_share_a_place(self, store: Store) -> None:
        ids = SeededIds()
        names = [ids.new() for _ in range(40)]

        def attempt(name: str) -> bool:
            with store.write() as tx:
                if blockers(tx, CallId(name), [Wanted(b"/r/a"), Wanted(b"/r/b", True)]):
                    return False
                claim(tx, CallId(name), [Wanted(b"/r/a"), Wanted(b"/r/b", True)])
                tx.put(THINGS, Thing(name, 1))
                return True

        with ThreadPoolExecutor(8) as pool:
            won = [job.result(PATIENCE_S) for job in [pool.submit(attempt, name) for name in names]]
        assert won.count(True) == 1
        assert [row.shelf for row in self.things(store)] == [names[won.index(True)]]


def _calling(store: Store, call: CallId, steps: list[list[Wanted]], ended: dict[str, str]) -> Actor:
    """One call: takes what each step wants, waits for younger calls, dies for older ones, releases at its end."""

    def standing(wanted: list[Wanted]) -> list[ClaimRow]:
        with store.read() as tx:
            return blockers(tx, call, wanted)

    outcome = "done"
    for wanted in steps:
        yield None
        while outcome == "done":
            with store.write() as tx:
                inway = blockers(tx, call, wanted)
                if not inway:
                    claim(tx, call, wanted)
                    break
            if may_wait(call, inway):
                yield lambda wanted=wanted: not standing(wanted) or not may_wait(call, standing(wanted))  # type: ignore[misc]
            else:
                outcome = "died"
    yield None
    with store.write() as tx:
        release(tx, call)
    ended[call] = outcome


def _nobody_clashes(store: Store) -> None:
    with store.read() as tx:
        held = tx.select(CLAIMS)
    assert [(a, b) for a in held for b in held if a.call < b.call and _clash(a, b)] == []
