"""`verify` finds what is wrong, says nothing when all is well, and never changes a byte."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mulligan.store.blobs import BLOBS, BODIES, EVICTED, LOST, PARTS, Blobs, PartRow
from mulligan.store.journal import HEADS, RECORDS, REFS, SEALS, Journal, RefRow, seal
from mulligan.store.maintenance import store_usage
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import Store
from mulligan.store.sqlite import SqliteStore
from mulligan.store.verify import Problem, verify, verify_journal
from mulligan.values.clock import SystemClock
from mulligan.values.digest import Digest, digest_of, raw_digest
from mulligan.values.errors import MulliganError
from tests.contracts.tables import CONTRACT_SCHEMA, SUMS, Sum

AT = "2026-01-01T00:00:00.000000Z"
JOURNAL = Journal(CONTRACT_SCHEMA)


def texts() -> list[bytes]:
    """One blob of each form: raw, packed, packed as a change, and beside the database."""
    rng = random.Random(7)
    page = b"\n".join(b"line %d of a file" % rng.randrange(10**9) for _ in range(120))
    return [b"tiny", page, page + b"one more\n", rng.randbytes(90_000)]


def fill(store: Store, *, journals: tuple[str, ...] = ("a", "b"), rounds: int = 3) -> list[Digest]:
    blobs = Blobs(store, SystemClock())
    data = texts()
    digests = [blobs.store(one) for one in data[:2]]
    blobs.put_all([blobs.prepare(data[2], after=data[1])])
    digests += [digest_of(data[2]), blobs.store(data[3])]
    for number in range(rounds):
        for place, journal in enumerate(journals):
            with store.write() as tx:
                refs = [digests[number % len(digests)]]
                JOURNAL.append(tx, journal, "added", {"amount": 10 * number + place}, at=AT, refs=refs)
    return digests


def seal_all(store: Store) -> None:
    with store.write() as tx:
        seal(tx, at=AT)


def found_in(store: Store, *, deep: bool = True) -> list[Problem]:
    return list(verify(store, CONTRACT_SCHEMA, deep=deep))


def kinds(problems: list[Problem]) -> set[str]:
    return {problem.kind for problem in problems if problem.severity == "broken"}


def places(problems: list[Problem]) -> list[tuple[str, str]]:
    return [(problem.kind, problem.where) for problem in problems if problem.severity == "broken"]


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = (
        MemoryStore(CONTRACT_SCHEMA) if request.param == "memory" else SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    )
    yield made
    made.close()


class TestASoundStore:
    def test_an_empty_one_has_no_problem(self, store: Store) -> None:
        assert found_in(store) == []

    def test_a_full_one_has_no_problem(self, store: Store) -> None:
        fill(store, rounds=600)
        assert found_in(store) == []

    def test_one_blob_that_very_many_records_need_is_no_problem(self, store: Store) -> None:
        digest = Blobs(store, SystemClock()).store(b"popular")
        with store.write() as tx:
            for number in range(1_100):
                JOURNAL.append(tx, "a", "added", {"amount": number}, at=AT, refs=[digest])
        assert found_in(store) == []

    def test_progress_ends_where_it_should(self, store: Store) -> None:
        fill(store)
        seen: dict[str, tuple[int, int]] = {}
        assert list(verify(store, CONTRACT_SCHEMA, progress=lambda what, *far: seen.update({what: far}))) == []
        assert seen == {"database file": (1, 1), "records": (6, 6), "blobs": (4, 4), "projections": (6, 6)}

    def test_one_journal_alone_has_no_problem(self, store: Store) -> None:
        fill(store)
        assert list(verify_journal(store, "a")) == []

    def test_it_takes_what_its_journals_and_blobs_take(self, store: Store) -> None:
        fill(store)
        usage = store_usage(store)
        assert [(journal.journal, journal.records, journal.blobs) for journal in usage.journals] == [
            ("a", 3, 3),
            ("b", 3, 3),
        ]
        assert {(place.place, place.blobs) for place in usage.blobs} == {("db", 3), ("out", 1)}
        assert sum(place.plain_bytes for place in usage.blobs) == sum(map(len, texts()))


class TestBlobsInParts:
    def whole(self, store: Store) -> Digest:
        rng = random.Random(3)
        digest, _ = Blobs(store, SystemClock()).store_stream(rng.randbytes(1_000_000) for _ in range(9))
        with store.write() as tx:
            JOURNAL.append(tx, "a", "added", {"amount": 1}, at=AT, refs=[digest])
        return digest

    def test_sound_ones_are_sound_and_counted_by_what_their_parts_take(self, store: Store) -> None:
        self.whole(store)
        assert found_in(store) == []
        assert store_usage(store).journals[0].blob_bytes == 9_000_003

    def test_a_missing_part_and_a_part_in_the_wrong_place_are_found(self, store: Store) -> None:
        whole = self.whole(store)
        with store.write() as tx:
            parts = tx.select(PARTS)
            tx.put(PARTS, replace(parts[0], part=parts[1].part))
        assert [problem.where for problem in found_in(store)] == [whole]
        with store.write() as tx:
            tx.delete(PARTS, parts[0].digest, 0)
        assert [problem.where for problem in found_in(store)] == [whole]

    def test_parts_of_nothing_are_harmless(self, store: Store) -> None:
        with store.write() as tx:
            tx.put(PARTS, PartRow(bytes(32), 0, bytes(32), 1))
        assert [problem.severity for problem in found_in(store)] == ["harmless"]


class TestDamagedRows:
    @pytest.mark.req("D18.journal_tampering", "D4.record_seq_contiguous")
    def test_a_missing_record_is_found(self, store: Store) -> None:
        fill(store)
        with store.write() as tx:
            tx.delete(RECORDS, "a", 2)
        assert kinds(found_in(store)) == {"journal"}
        assert kinds(list(verify_journal(store, "a"))) == {"journal"}

    @pytest.mark.req("D4.seals")
    @pytest.mark.parametrize("name", ["a", SEALS])
    def test_a_sealed_journal_that_vanished_whole_is_found(self, store: Store, name: str) -> None:
        fill(store)
        seal_all(store)
        with store.write() as tx:
            for row in tx.select(RECORDS, {"journal": name}):
                tx.delete(RECORDS, name, row.seq)
            for edge in tx.select(REFS):
                if edge.journal == name:
                    tx.delete(REFS, edge.digest, name, edge.seq)
            tx.delete(HEADS, name)
            tx.delete(SUMS, name)
        assert places(found_in(store)) == [("journal", name)]

    @pytest.mark.req("D4.seals")
    def test_a_sealed_journal_cut_short_with_its_head_is_found(self, store: Store) -> None:
        fill(store)
        seal_all(store)
        with store.write() as tx:
            last, before = tx.get(RECORDS, "a", 3), tx.get(RECORDS, "a", 2)
            assert last is not None and before is not None
            head = tx.get(HEADS, "a")
            assert head is not None
            tx.delete(RECORDS, "a", 3)
            tx.put(HEADS, replace(head, seq=2, hash=before.hash, ordinal=before.ordinal))
        assert "journal" in kinds(found_in(store))

    @pytest.mark.req("D4.seals")
    def test_a_sealed_journal_that_was_replaced_by_another_one_is_found(self, store: Store) -> None:
        fill(store, rounds=1)
        seal_all(store)
        with store.write() as tx:
            tx.delete(RECORDS, "b", 1)
            tx.delete(HEADS, "b")
            tx.delete(SUMS, "b")
            JOURNAL.append(tx, "b", "added", {"amount": 7}, at=AT, refs=[digest_of(b"tiny")])
        assert places(found_in(store)) == [("journal", "b")]

    def test_records_of_a_journal_without_a_head_are_found(self, store: Store) -> None:
        fill(store)
        with store.write() as tx:
            tx.delete(HEADS, "a")
        assert "journal" in kinds(found_in(store))

    def test_an_ordinal_below_that_of_the_record_before_is_found(self, store: Store) -> None:
        fill(store)
        with store.write() as tx:
            one, other = tx.get(RECORDS, "a", 1), tx.get(RECORDS, "a", 2)
            assert one is not None and other is not None
            tx.put(RECORDS, replace(one, ordinal=other.ordinal))
            tx.put(RECORDS, replace(other, ordinal=one.ordinal))
        assert kinds(found_in(store)) == {"journal"}

    def test_an_edge_too_many_and_one_too_few_are_found(self, store: Store) -> None:
        digests = fill(store)
        with store.write() as tx:
            tx.put(REFS, RefRow(raw_digest(digests[3]), "a", 1))
        assert kinds(found_in(store)) == {"ref"}
        with store.write() as tx:
            tx.delete(REFS, raw_digest(digests[0]), "a", 1)
        assert kinds(found_in(store)) == {"ref"}

    def test_a_blob_that_is_needed_and_gone_is_found(self, store: Store) -> None:
        digests = fill(store)
        with store.write() as tx:
            tx.delete(BLOBS, raw_digest(digests[0]))
            tx.delete(BODIES, raw_digest(digests[0]))
        assert found_in(store) == [
            Problem("ref", digests[0], "a record refers to this blob, and it is not there"),
        ]
        assert kinds(list(verify_journal(store, "a"))) == {"ref"}

    def test_a_missing_earlier_version_is_found_even_without_reading_bodies(self, store: Store) -> None:
        digests = fill(store, rounds=0)
        with store.write() as tx:
            tx.delete(BLOBS, raw_digest(digests[1]))
            tx.delete(BODIES, raw_digest(digests[1]))
        assert [problem.where for problem in found_in(store, deep=False)] == [digests[2]]
        assert [problem.where for problem in found_in(store)] == [digests[2], digests[2]]

    @pytest.mark.parametrize("place", [EVICTED, LOST])
    def test_a_body_that_is_gone_is_sound_only_if_a_record_says_so(self, store: Store, place: str) -> None:
        digest = fill(store)[0]
        with store.write() as tx:
            row = tx.get(BLOBS, raw_digest(digest))
            assert row is not None
            tx.put(BLOBS, replace(row, place=place))
            tx.delete(BODIES, raw_digest(digest))
        assert [(problem.kind, problem.where) for problem in found_in(store)] == [("blob", digest)]
        with store.write() as tx:
            JOURNAL.append(tx, "store", f"store.{place}", {"digests": [digest]}, at=AT)
        assert found_in(store) == []

    @pytest.mark.req("D4.verify_rebuilds")
    def test_a_projection_that_the_journals_do_not_give_is_found(self, store: Store) -> None:
        fill(store)
        with store.write() as tx:
            tx.put(SUMS, Sum("a", -1))
            tx.put(SUMS, Sum("z", 1))
            tx.delete(SUMS, "b")
        found = [problem for problem in found_in(store) if problem.kind == "projection"]
        assert sorted(problem.where for problem in found) == ["sums a", "sums b", "sums z"]

    def test_a_record_that_does_not_fold_is_found(self, store: Store) -> None:
        with store.write() as tx:
            JOURNAL.append(tx, "a", "added", {"amount": 1}, at=AT)
            Journal(replace(CONTRACT_SCHEMA, projectors={})).append(tx, "a", "added", {"sum": 1}, at=AT)
        assert kinds(found_in(store)) == {"projection"}

    def test_a_body_without_a_row_is_harmless(self, store: Store) -> None:
        fill(store)
        store.bodies.put(digest_of(b"nobody"), b"nobody")
        assert [(problem.kind, problem.severity) for problem in found_in(store)] == [("orphan", "harmless")]

    def test_looking_changes_nothing(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
        fill(store)
        before = files_of(tmp_path)
        assert found_in(store) == []
        assert files_of(tmp_path) == before
        store.close()


def files_of(directory: Path) -> dict[str, bytes]:
    """Everything but the engine's scratch file for readers."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path): path.read_bytes() for path in files}


def settled(directory: str) -> str:
    """A store with everything in its main file, nothing in its log."""
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    fill(store)
    store.reclaim_space()
    store.close()
    for leftover in ("store.db-wal", "store.db-shm"):
        if os.path.exists(os.path.join(directory, leftover)):
            os.unlink(os.path.join(directory, leftover))
    return directory


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> str:
    return settled(str(tmp_path_factory.mktemp("sound")))


def flipped(sound: str, directory: Path, file: str, offset: int, bit: int) -> str:
    shutil.copytree(sound, directory, dirs_exist_ok=True)
    path = directory / file
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)
    return str(directory)


def judged(directory: str) -> set[str]:
    """The codes or kinds of what is wrong, however early that is noticed."""
    try:
        store = SqliteStore(directory, CONTRACT_SCHEMA)
        try:
            return kinds(found_in(store))
        finally:
            store.close()
    except MulliganError as error:
        return {error.code}


def content_of(directory: str) -> list[object]:
    """Every record and every blob, as anyone can read them."""
    store = SqliteStore(directory, CONTRACT_SCHEMA)
    try:
        with store.read() as tx:
            rows = tx.select(RECORDS)
        blobs = Blobs(store, SystemClock())
        return [*rows, *(blobs.read(digest_of(data)) for data in texts())]
    finally:
        store.close()


def payload_spans(directory: str) -> list[tuple[int, int]]:
    """Where in the file the bytes of records, hashes and bodies are, as far as they are in one piece."""
    raw = Path(directory, "store.db").read_bytes()
    connection = apsw.Connection(os.path.join(directory, "store.db"), flags=apsw.SQLITE_OPEN_READONLY)
    pieces = [piece for row in connection.execute("SELECT hash, body FROM records") for piece in row]
    pieces += [piece for row in connection.execute("SELECT digest, body FROM bodies") for piece in row]
    connection.close()
    spans = [(raw.find(piece[:512]), min(len(piece), 512)) for piece in pieces]
    assert all(start >= 0 for start, _ in spans)
    return spans


class TestFlippedBits:
    @pytest.mark.req("D4.blob_verified_on_read")
    @settings(max_examples=60)
    @given(data=st.data())
    def test_one_in_any_record_or_blob_is_found_or_changes_no_byte_of_it(
        self, sound: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        start, length = data.draw(st.sampled_from(payload_spans(sound)))
        offset = start + data.draw(st.integers(0, length - 1))
        directory = tmp_path_factory.mktemp("flipped")
        # A packed body has a few bits that unpacking does not look at.
        found = judged(flipped(sound, directory, "store.db", offset, data.draw(st.integers(0, 7))))
        assert found != set() or content_of(str(directory)) == content_of(sound)
        shutil.rmtree(directory)

    @settings(max_examples=80)
    @given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def test_one_anywhere_in_the_file_is_found_or_hurts_no_record_and_no_blob(
        self, sound: str, tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
    ) -> None:
        offset = int(where * os.path.getsize(os.path.join(sound, "store.db")))
        directory = tmp_path_factory.mktemp("flipped")
        harmed = flipped(sound, directory, "store.db", offset, bit)
        if judged(harmed) == set():
            assert content_of(harmed) == content_of(sound)
        shutil.rmtree(directory)

    @settings(max_examples=20)
    @given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def test_one_in_a_body_beside_the_database_is_found(
        self, sound: str, tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
    ) -> None:
        (body,) = [path for path in Path(sound, "blobs").rglob("*") if path.is_file()]
        directory = tmp_path_factory.mktemp("flipped")
        file = str(body.relative_to(sound))
        assert judged(flipped(sound, directory, file, int(where * body.stat().st_size), bit)) == {"blob"}
        shutil.rmtree(directory)


def with_a_log(directory: Path) -> bytes:
    store = SqliteStore(str(directory), CONTRACT_SCHEMA)
    fill(store)
    assert found_in(store) == []
    store.close()
    return Path(directory, "store.db-wal").read_bytes()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("logged")
    with_a_log(directory)
    return str(directory)


class TestTheLog:
    """A page of SQLite's log that does not check out hides every commit after it, and what is left looks sound."""

    def frames(self, log: bytes) -> list[int]:
        return list(range(32, len(log), 24 + int.from_bytes(log[8:12], "big")))

    @settings(max_examples=60)
    @given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def test_a_flipped_bit_anywhere_in_it_is_found(
        self, logged: str, tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
    ) -> None:
        directory = tmp_path_factory.mktemp("flipped")
        last = self.frames(Path(logged, "store.db-wal").read_bytes())[-1]
        size = os.path.getsize(os.path.join(logged, "store.db-wal"))
        offset = int(where * size)
        # Of the last page, a salt that differs is what the log before this one would have left; and a serial number
        # that is one too high is what a writer leaves who fails to begin the log anew.
        if not last <= offset < last + 24 and offset != 15:
            harmed = flipped(logged, directory, "store.db-wal", offset, bit)
            assert judged(harmed) != set()
        shutil.rmtree(directory)

    def test_what_a_killed_writer_left_is_no_damage(self, tmp_path: Path) -> None:
        log = with_a_log(tmp_path)
        last = self.frames(log)[-1]
        begun = log[last : last + 4] + bytes(4) + log[last + 8 :]
        Path(tmp_path, "store.db-wal").write_bytes(log + begun + begun[:1_000])
        assert judged(str(tmp_path)) == set()

    def test_a_commit_that_a_writer_did_not_finish_over_an_older_log_is_no_damage(self, tmp_path: Path) -> None:
        log = with_a_log(tmp_path)
        last = self.frames(log)[-1]
        older = log[last : last + 8] + bytes(8) + log[last + 16 :]
        begun = log[last : last + 24] + older[24:][::-1]
        Path(tmp_path, "store.db-wal").write_bytes(log + begun + older)
        assert judged(str(tmp_path)) == set()

    def test_the_end_of_the_log_before_is_no_damage(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
        fill(store, rounds=20)
        store.sync()
        with store.write() as tx:
            JOURNAL.append(tx, "a", "added", {"amount": 1}, at=AT)
        assert found_in(store) == []
        store.close()
        assert judged(str(tmp_path)) == set()

    def test_a_log_that_was_set_back_and_not_begun_is_no_damage(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
        fill(store)
        other = apsw.Connection(os.path.join(str(tmp_path), "store.db"))
        other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        other.close()
        assert found_in(store) == []
        store.close()

    def test_writers_beside_it_are_no_damage(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
        digests = fill(store)
        ended = threading.Event()

        def write() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                with store.write() as tx:
                    JOURNAL.append(tx, "a", "added", {"amount": number}, at=AT, refs=digests[:1])

        with ThreadPoolExecutor(2) as pool:
            writing = [pool.submit(write) for _ in range(2)]
            complaints = [store.check() for _ in range(30)]
            ended.set()
            assert [future.result() for future in writing] == [None, None]
        assert complaints == [[]] * 30
        store.close()


class TestADamagedSchema:
    def test_a_column_that_is_gone_is_damage_and_no_mistake_of_ours(self, tmp_path: Path) -> None:
        settled(str(tmp_path))
        path = tmp_path / "store.db"
        assert b'"total"' in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(b'"total"', b'"tatal"'))
        assert judged(str(tmp_path)) == {"projection"}
