"""The sync mark, the look back after a power cut, the format's steps forward, and space given back."""

from __future__ import annotations

import inspect
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.history.retention import collect_garbage
from mulligan.store.blobs import BLOBS, LOST, PARTS, UNSYNCED, Blobs
from mulligan.store.journal import Journal, records_of
from mulligan.store.maintenance import (
    LOST_KIND,
    STORE_JOURNAL,
    BackgroundSync,
    boot_id,
    check_after_reboot,
    sync_failure,
)
from mulligan.store.migrations import SCHEMA_VERSION, WRITTEN_BY, Step, migrate
from mulligan.store.protocol import META, MetaRow, Store
from mulligan.store.sqlite import SqliteStore
from mulligan.store.sqlite_file import APPLICATION_ID, connect, create_statements, prepare_file
from mulligan.store.verify import verify
from mulligan.testing.world import SteppingClock
from mulligan.values.clock import FixedClock
from mulligan.values.digest import Digest, digest_from_raw, digest_of, raw_digest
from mulligan.values.errors import MulliganError
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing

NOON = FixedClock(datetime(2026, 1, 1, 12, tzinfo=UTC))
LATER = FixedClock(datetime(2026, 1, 1, 13, tzinfo=UTC))
JOURNAL = Journal(CONTRACT_SCHEMA)
NEVER_S = 3_600.0


def big(number: int) -> bytes:
    """A body that stays beside the database: it does not pack."""
    return random.Random(number).randbytes(80_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(str(tmp_path / "store"), CONTRACT_SCHEMA, clock=NOON)
    yield made
    made.close()


def put(store: Store, data: bytes) -> Digest:
    return Blobs(store, NOON).store(data)


def waiting(store: Store) -> int:
    with store.read() as tx:
        return tx.count(UNSYNCED)


def meta(store: Store) -> dict[str, str]:
    """What housekeeping keeps; which version wrote the store last is not its business."""
    with store.read() as tx:
        return {row.key: row.value for row in tx.select(META) if row.key != WRITTEN_BY}


def body_path(store: SqliteStore, digest: Digest) -> Path:
    return Path(store.directory, "blobs", digest[7:9], digest[9:])


def reboot(store: Store, boot: str = "second") -> tuple[Digest, ...]:
    return check_after_reboot(store, JOURNAL, LATER, boot=boot)


class TestTheMark:
    def test_bodies_beside_the_database_wait_for_it(self, store: SqliteStore) -> None:
        put(store, b"small")
        assert waiting(store) == 0
        put(store, big(1))
        assert waiting(store) == 1

    @pytest.mark.req("D5.sync_mark")
    def test_moving_it_syncs_what_waits_and_says_when(self, store: SqliteStore) -> None:
        put(store, big(1))
        BackgroundSync(store, NOON, interval_s=NEVER_S).move()
        assert (waiting(store), meta(store)) == (0, {"mark": "2026-01-01T12:00:00.000000Z"})

    @pytest.mark.req("D5.sync_mark")
    def test_it_moves_every_five_seconds_unless_reported_otherwise(self) -> None:
        assert inspect.signature(BackgroundSync).parameters["interval_s"].default == 5.0

    def test_it_syncs_for_a_process_that_is_gone(self, tmp_path: Path) -> None:
        writer = SqliteStore(str(tmp_path), CONTRACT_SCHEMA, clock=NOON)
        put(writer, big(1))
        other = SqliteStore(str(tmp_path), CONTRACT_SCHEMA, clock=NOON)
        BackgroundSync(other, NOON, interval_s=NEVER_S).move()
        assert waiting(writer) == 0

    def test_power_mode_waits_for_nothing(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA, durability="power", clock=NOON)
        put(store, big(1))
        assert waiting(store) == 0

    @pytest.mark.req("D5.durability_power")
    def test_power_mode_syncs_a_body_and_the_directories_that_name_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced, really = list[str](), os.fsync

        def noted(handle: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{handle}"))
            really(handle)

        monkeypatch.setattr(os, "fsync", noted)
        store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA, durability="power", clock=NOON)
        body = body_path(store, Blobs(store, NOON).prepare(big(1)).digest)
        assert body.exists() and {str(body.parent), str(body.parent.parent), str(tmp_path)} < set(synced)
        assert synced[0].startswith(str(body))

    def test_power_mode_does_not_rely_on_a_body_that_another_has_not_synced(self, tmp_path: Path) -> None:
        put(SqliteStore(str(tmp_path), CONTRACT_SCHEMA, clock=NOON), big(1))
        careful = SqliteStore(str(tmp_path), CONTRACT_SCHEMA, durability="power", clock=NOON)
        put(careful, big(1))
        assert waiting(careful) == 0

    @pytest.mark.req("D5.sync_mark")
    def test_its_thread_starts_with_the_first_write_and_moves_it(self, store: SqliteStore) -> None:
        moved = threading.Event()
        others = threads()
        mark = BackgroundSync(store, NOON, interval_s=0.001)
        assert threads() == others
        told = store.after_write

        def watched() -> None:
            told()
            if "mark" in meta(store):
                moved.set()

        store.after_write = watched
        put(store, big(1))
        assert moved.wait(600)
        assert threads() > others
        store.close()
        assert (threads(), mark.failure) == (others, None)

    def test_its_own_writing_does_not_start_it_again(self, store: SqliteStore) -> None:
        others = threads()
        BackgroundSync(store, NOON, interval_s=NEVER_S).move()
        assert threads() == others

    def test_closing_moves_it_unless_that_was_done_lately(self, tmp_path: Path) -> None:
        def once(clock: FixedClock) -> dict[str, str]:
            store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA, clock=clock)
            BackgroundSync(store, clock, interval_s=NEVER_S)
            put(store, big(clock.now().hour))
            store.close()
            return meta(store)

        assert once(NOON) == {"mark": "2026-01-01T12:00:00.000000Z"}
        assert once(FixedClock(datetime(2026, 1, 1, 12, 30, tzinfo=UTC)))["mark"] == "2026-01-01T12:00:00.000000Z"
        assert once(LATER)["mark"] == "2026-01-01T13:00:00.000000Z"

    def test_a_reader_who_only_reads_starts_and_moves_nothing(self, store: SqliteStore) -> None:
        others = threads()
        BackgroundSync(store, LATER, interval_s=0.001)
        assert (threads(), meta(store)) == (others, {})
        store.close()
        assert meta(store) == {}

    @pytest.mark.req("D5.fsync_error_is_fault")
    def test_after_a_failed_sync_it_stays_for_good_and_that_is_reported(
        self, store: SqliteStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        digest = put(store, big(1))
        mark = BackgroundSync(store, NOON, interval_s=NEVER_S)
        put(store, b"more")
        # A name that loops cannot be opened, which is as good as a disk that does not answer.
        body_path(store, digest).unlink()
        body_path(store, digest).symlink_to(body_path(store, digest))
        store.close()
        assert mark.failure is not None and mark.failure.code == "sync_failed"
        why = "2026-01-01T12:00:00.000000Z Syncing blobs: Too many levels of symbolic links"
        assert (waiting(store), meta(store)) == (1, {"sync_failed": why})
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        assert "may not survive a power cut from now on. Syncing blobs" in caplog.text

    def test_a_sync_that_works_again_takes_the_failure_back(self, store: SqliteStore) -> None:
        with store.write() as tx:
            tx.put(META, MetaRow("sync_failed", "then"))
            assert sync_failure(tx) == "then"
        BackgroundSync(store, NOON, interval_s=NEVER_S).move()
        with store.read() as tx:
            assert sync_failure(tx) is None

    def test_a_process_that_forgets_to_close_still_ends(self, tmp_path: Path) -> None:
        done = subprocess.run([sys.executable, "-c", FORGETFUL, str(tmp_path)], timeout=600, check=False)
        assert done.returncode == 0

    def test_a_forked_child_has_no_thread_until_it_writes(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-c", FORKING, str(tmp_path)], timeout=600, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.split()) == (0, ["1", "2", "parent"])


FORGETFUL = """
import sys
from mulligan.api import open_store
from mulligan.store.blobs import Blobs
from mulligan.history.projection import SCHEMA
from mulligan.values.clock import SystemClock
store = open_store(sys.argv[1], SCHEMA, durability="process", clock=SystemClock())
Blobs(store, SystemClock()).store(b"x")
"""

FORKING = (
    FORGETFUL
    + """
import os, threading
child = os.fork()
if child == 0:
    print(threading.active_count())
    Blobs(store, SystemClock()).store(b"y")
    print(threading.active_count(), flush=True)
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.close()
print("parent")
"""
)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mulligan-sync-mark"}


class TestAfterAPowerCut:
    def test_this_boot_has_a_name_that_stays(self) -> None:
        assert boot_id() == boot_id() != ""

    def test_a_new_store_remembers_its_boot(self, store: SqliteStore) -> None:
        assert reboot(store, "first") == ()
        assert meta(store) == {"boot": "first"}

    def test_the_same_boot_is_not_searched(self, store: SqliteStore) -> None:
        reboot(store, "first")
        digest = put(store, big(1))
        body_path(store, digest).unlink()
        assert reboot(store, "first") == ()
        assert waiting(store) == 1

    def test_bodies_that_survived_are_no_longer_waited_for(self, store: SqliteStore) -> None:
        reboot(store, "first")
        digest = put(store, big(1))
        assert reboot(store) == ()
        assert (waiting(store), Blobs(store, NOON).read(digest)) == (0, big(1))

    @pytest.mark.req("D5.power_cut_is_lost_record")
    @pytest.mark.parametrize("harm", ["gone", "empty", "torn", "zeros"])
    def test_bodies_it_took_become_one_record_and_no_corruption(self, store: SqliteStore, harm: str) -> None:
        reboot(store, "first")
        kept, lost = put(store, big(1)), put(store, big(2))
        body = body_path(store, lost)
        raw = body.read_bytes()
        body.write_bytes({"gone": raw, "empty": b"", "torn": raw[:4096], "zeros": bytes(len(raw))}[harm])
        if harm == "gone":
            body.unlink()
        assert reboot(store) == (lost,)
        with store.read() as tx:
            records = list(records_of(tx, STORE_JOURNAL))
        assert [(record.kind, record.payload) for record in records] == [(LOST_KIND, {"digests": [lost], "mark": None})]
        assert list(verify(store, CONTRACT_SCHEMA)) == []
        assert Blobs(store, NOON).read(kept) == big(1)
        with pytest.raises(MulliganError) as caught:
            Blobs(store, NOON).read(lost)
        assert caught.value.code == "evicted"

    def test_what_was_lost_can_be_put_again(self, store: SqliteStore) -> None:
        lost = put(store, big(2))
        body_path(store, lost).write_bytes(bytes(100))
        assert reboot(store) == (lost,)
        assert put(store, big(2)) == lost
        assert Blobs(store, NOON).read(lost) == big(2)
        assert list(verify(store, CONTRACT_SCHEMA)) == []

    @pytest.mark.req("D5.power_cut_tester")
    def test_a_body_whose_row_the_cut_took_is_not_taken_for_whole(self, store: SqliteStore) -> None:
        digest = put(store, big(3))
        with store.write() as tx:
            tx.delete(BLOBS, raw_digest(digest))
            tx.delete(UNSYNCED, raw_digest(digest))
        body_path(store, digest).write_bytes(bytes(100))
        assert reboot(store) == ()
        assert put(store, big(3)) == digest
        assert Blobs(store, NOON).read(digest) == big(3)

    def test_later_versions_of_what_was_lost_are_lost_with_it(self, store: SqliteStore) -> None:
        blobs = Blobs(store, NOON)
        first = put(store, big(1))
        blobs.put_all([blobs.prepare(big(1) + b"more", after=big(1))])
        body_path(store, first).unlink()
        later = digest_of(big(1) + b"more")
        assert reboot(store) == tuple(sorted([first, later]))
        with store.read() as tx:
            rows = [tx.get(BLOBS, raw_digest(digest)) for digest in (first, later)]
        assert [row.place for row in rows if row is not None] == [LOST, LOST]
        assert list(verify(store, CONTRACT_SCHEMA)) == []

    def test_a_blob_in_parts_is_lost_with_any_of_them(self, store: SqliteStore) -> None:
        blobs = Blobs(store, NOON)
        whole, _ = blobs.store_stream(random.Random(5).randbytes(1_000_000) for _ in range(9))
        with store.read() as tx:
            part = digest_from_raw(tx.select(PARTS)[1].part)
        body_path(store, part).unlink()
        assert reboot(store) == tuple(sorted([part, whole]))
        assert [problem.severity for problem in verify(store, CONTRACT_SCHEMA)].count("broken") == 0

    def test_what_was_marked_before_is_not_excused(self, store: SqliteStore) -> None:
        reboot(store, "first")
        digest = put(store, big(1))
        BackgroundSync(store, NOON, interval_s=NEVER_S).move()
        body_path(store, digest).unlink()
        assert reboot(store) == ()
        assert [problem.kind for problem in verify(store, CONTRACT_SCHEMA)] == ["blob"]

    def test_a_body_collected_meanwhile_is_not_lost(self, store: SqliteStore) -> None:
        digest = put(store, big(1))
        store.bodies.delete(digest)
        with store.write() as tx:
            tx.delete(BLOBS, raw_digest(digest))
        assert (reboot(store), waiting(store)) == ((), 0)


@pytest.mark.req("D6.database_gives_space_back")
class TestSpace:
    def test_a_store_gives_back_what_it_no_longer_needs(self, store: SqliteStore) -> None:
        with store.write() as tx:
            for number in range(4_000):
                tx.put(THINGS, Thing("s", number, label="x" * 400))
        store.reclaim_space()
        full = store.size_bytes()
        with store.write() as tx:
            for number in range(4_000):
                tx.delete(THINGS, "s", number)
        assert store.free_bytes() > 1_000_000
        store.reclaim_space(10)
        assert store.free_bytes() > 1_000_000
        store.reclaim_space()
        assert (store.free_bytes(), store.size_bytes() < full / 4) == (0, True)

    def test_its_log_shrinks_again(self, store: SqliteStore) -> None:
        with store.write() as tx:
            for number in range(4_000):
                tx.put(THINGS, Thing("s", number, label="x" * 400))
        store.reclaim_space()
        assert os.path.getsize(os.path.join(store.directory, "store.db-wal")) == 0


class TestGarbage:
    """Through the whole product, because only there is it known which call is alive."""

    @pytest.fixture
    def clock(self) -> SteppingClock:
        return SteppingClock()

    @pytest.fixture
    def opened(self, tmp_path: Path, clock: SteppingClock) -> Iterator[Mulligan]:
        (tmp_path / "root").mkdir()
        with mulligan.open(str(tmp_path / "root"), store=str(tmp_path / "home"), clock=clock) as opened:
            yield opened

    @pytest.mark.req("D4.blob_base_is_edge")
    def test_what_a_named_version_builds_on_stays(self, opened: Mulligan, clock: SteppingClock) -> None:
        ledger, page = opened.open_root.ledger, random.Random(1).randbytes(1_000).hex().encode()
        first = ledger.blobs.store(page)
        ledger.blobs.put_all([ledger.blobs.prepare(page + b"more", after=page)])
        with ledger.store.write() as tx:
            later = digest_of(page + b"more")
            row = tx.get(BLOBS, raw_digest(later))
            assert row is not None and row.base == raw_digest(first)
            ledger.journal.append(tx, STORE_JOURNAL, "committed", {}, at=ledger.now(), refs=[later])
        ledger.blobs.store(b"nobody needs this")
        clock.advance(timedelta(hours=1))
        assert collect_garbage(ledger)[0] == 1
        assert ledger.blobs.read(later) == page + b"more"

    @pytest.mark.req("D4.blob_put_touches")
    def test_what_was_put_again_lately_stays(self, opened: Mulligan, clock: SteppingClock) -> None:
        ledger = opened.open_root.ledger
        ledger.blobs.store(b"about to be named")
        clock.advance(timedelta(hours=1))
        ledger.blobs.store(b"about to be named")
        assert collect_garbage(ledger)[0] == 0
        clock.advance(timedelta(hours=1))
        assert collect_garbage(ledger)[0] == 1

    @pytest.mark.req("D4.gc_spares_live_calls")
    def test_what_came_since_a_live_call_began_stays(self, opened: Mulligan, clock: SteppingClock) -> None:
        ledger = opened.open_root.ledger
        with opened.session("s").call() as call:
            call.write_file("a", "a")
            ledger.blobs.store(b"this call may be about to name it")
            clock.advance(timedelta(hours=5))
            assert collect_garbage(ledger)[0] == 0
        assert collect_garbage(ledger)[0] == 1


def _add_colour(connection: apsw.Connection) -> None:
    connection.execute('ALTER TABLE "things" ADD COLUMN "colour" TEXT')


def _fail(connection: apsw.Connection) -> None:
    connection.execute('DROP TABLE "things"')
    raise MulliganError("internal", "this step fails")


COPYING = """
import fcntl, sys
index = open(sys.argv[1], "r+b")
fcntl.lockf(index, fcntl.LOCK_EX, 1, 121)  # the byte by which SQLite knows that somebody copies the log
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.req("D15.sqlite_many_processes")
def test_a_sync_beside_a_process_that_copies_the_log_waits_for_no_one(store: SqliteStore) -> None:
    put(store, b"written")
    arguments = [sys.executable, "-c", COPYING, os.path.join(store.directory, "store.db-shm")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        store.sync()
        other.communicate()


@pytest.mark.req("D4.schema_version")
class TestMigrations:
    def file(self, tmp_path: Path) -> tuple[apsw.Connection, str]:
        SqliteStore(str(tmp_path), CONTRACT_SCHEMA).close()
        return connect(str(tmp_path / "store.db"), durability="process"), str(tmp_path)

    def prepare(self, connection: apsw.Connection, directory: str, version: int, steps: Mapping[int, Step]) -> None:
        create = create_statements(CONTRACT_SCHEMA.tables)
        prepare_file(connection, lambda: create, directory=directory, version=version, steps=steps)

    def test_an_older_store_is_brought_forward_step_by_step(self, tmp_path: Path) -> None:
        connection, directory = self.file(tmp_path)
        ran: list[int] = []
        steps = {SCHEMA_VERSION + n: lambda _, n=n: ran.append(n) for n in range(3)}
        self.prepare(connection, directory, SCHEMA_VERSION + 3, steps)
        assert (ran, connection.pragma("user_version")) == ([0, 1, 2], SCHEMA_VERSION + 3)
        self.prepare(connection, directory, SCHEMA_VERSION + 3, {})
        assert ran == [0, 1, 2]

    def test_a_step_that_fails_leaves_the_store_as_it_was(self, tmp_path: Path) -> None:
        connection, directory = self.file(tmp_path)
        before = connection.execute("SELECT sql FROM sqlite_schema ORDER BY name").fetchall()
        with pytest.raises(MulliganError):
            self.prepare(
                connection, directory, SCHEMA_VERSION + 2, {SCHEMA_VERSION: _add_colour, SCHEMA_VERSION + 1: _fail}
            )
        assert connection.pragma("user_version") == SCHEMA_VERSION
        assert connection.execute("SELECT sql FROM sqlite_schema ORDER BY name").fetchall() == before

    def test_a_step_that_is_no_longer_known_is_refused(self, tmp_path: Path) -> None:
        connection, _ = self.file(tmp_path)
        with pytest.raises(MulliganError) as caught:
            migrate(connection, to=SCHEMA_VERSION + 1, steps={})
        assert caught.value.code == "store_unreadable"

    def test_a_new_file_gets_the_newest_format_without_any_step(self, tmp_path: Path) -> None:
        connection = connect(str(tmp_path / "new.db"), durability="process")
        self.prepare(connection, str(tmp_path), SCHEMA_VERSION + 5, {})
        assert connection.pragma("application_id") == APPLICATION_ID
        assert connection.pragma("user_version") == SCHEMA_VERSION + 5


def test_meta_rows_are_plain_text(store: SqliteStore) -> None:
    with store.write() as tx:
        tx.put(META, MetaRow("key", "value"))
    assert meta(store) == {"key": "value"}
