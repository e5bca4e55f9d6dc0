"""Which store a URL means, and what refuses to be one: one clear fault, and nothing changed."""

from __future__ import annotations

import inspect
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import apsw
import pytest

import mulligan
from mulligan.api import Mulligan, open_store, state_directory, store_directory
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CHANGES
from mulligan.store import sqlite_file
from mulligan.store.blobs import BLOBS
from mulligan.store.journal import HEADS, REFS, SEALS, RefRow, records_of
from mulligan.store.memory import MemoryStore
from mulligan.store.protocol import Durability, Store
from mulligan.store.sqlite import SqliteStore
from mulligan.store.sqlite_file import APPLICATION_ID, file_system_of
from mulligan.store.verify import verify
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError
from tests.contracts.tables import CONTRACT_SCHEMA, THINGS, Thing
from tests.old_formats import as_format_2


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that anyone can reach, unlike those that tests usually get."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def opened(url: str | None, *, root: str | None = None, environ: Mapping[str, str] | None = None) -> Store:
    return open_store(url, CONTRACT_SCHEMA, durability="process", clock=SystemClock(), root=root, environ=environ)


def refused(url: str | None, *, root: str | None = None) -> MulliganError:
    with pytest.raises(MulliganError) as caught:
        opened(url, root=root)
    return caught.value


class TestTheStateDirectory:
    @pytest.mark.req("D4.state_dir_order")
    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"MULLIGAN_HOME": "/m", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/m"),
            ({"MULLIGAN_HOME": "", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/mulligan"),
            ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/mulligan"),
            ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/mulligan"),
            ({"XDG_STATE_HOME": "", "HOME": "/h"}, "/h/.local/state/mulligan"),
            ({"HOME": "/h"}, "/h/.local/state/mulligan"),
        ],
    )
    def test_is_chosen_by_the_environment(self, environ: Mapping[str, str], expected: str) -> None:
        assert state_directory(environ) == expected

    @pytest.mark.req("D4.state_mode_0700")
    def test_and_what_is_in_it_belong_to_one_person(self, tmp_path: Path) -> None:
        home = tmp_path / "deep" / "home"
        with opened(None, environ={"MULLIGAN_HOME": str(home)}).write() as tx:
            tx.put(THINGS, Thing("s", 1))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [home, *home.iterdir()]}
        assert set(modes.values()) == {0}


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "directory"),
        [
            ("sqlite:///abs/dir", "/abs/dir"),
            ("sqlite:///abs/dir/", "/abs/dir"),
            ("/abs/dir", "/abs/dir"),
            ("/odd:name/dir", "/odd:name/dir"),
            ("odd:name", os.path.abspath("odd:name")),
            ("memory:", None),
            ("memory://", None),
        ],
    )
    def test_name_a_directory_or_memory(self, url: str, directory: str | None) -> None:
        assert store_directory(url, {}) == directory

    @pytest.mark.parametrize(
        "url",
        [
            *("", " ", "a\0b", "mysql://host/db", "foo://x", "http://h/p"),
            *("sqlite:", "sqlite:relative", "sqlite://host/dir", "sqlite:///", "memory:x"),
            *("postgresql://host:port/db", "postgres://user:a@b@host/db"),
        ],
    )
    def test_that_name_nothing_are_refused(self, url: str) -> None:
        assert refused(url).code == "invalid_store_url"

    def test_open_the_engine_they_name(self, tmp_path: Path) -> None:
        stores = [opened("memory:"), opened(f"sqlite://{tmp_path}/a"), opened(str(tmp_path / "b"))]
        assert [type(store) for store in stores] == [MemoryStore, SqliteStore, SqliteStore]
        for store in stores:
            store.close()

    @pytest.mark.req("D15.sqlite_default")
    def test_without_any_it_is_sqlite_in_the_state_directory(self, tmp_path: Path) -> None:
        store = opened(None, environ={"MULLIGAN_HOME": str(tmp_path / "home")})
        assert (type(store), (tmp_path / "home" / "store.db").exists()) == (SqliteStore, True)
        store.close()

    def test_a_store_that_must_be_there_is_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(MulliganError) as caught:
            open_store(str(tmp_path / "none"), CONTRACT_SCHEMA, durability="process", clock=SystemClock(), create=False)
        assert (caught.value.code, list(tmp_path.iterdir())) == ("store_unreadable", [])


class TestTheWorkspace:
    @pytest.mark.req("D4.state_never_in_workspace", "H19.state_outside_tree")
    @pytest.mark.parametrize("inside", [".", "state", "a/b", "link"])
    def test_never_holds_the_store(self, tmp_path: Path, inside: str) -> None:
        root = tmp_path / "root"
        (root / "a").mkdir(parents=True)
        (tmp_path / "way").symlink_to(root)
        (root / "link").symlink_to(root / "a")
        for view in (root, tmp_path / "way"):
            assert refused(str(root / inside), root=str(view)).code == "store_inside_workspace"
        assert sorted(path.name for path in root.rglob("*")) == ["a", "link"]

    def test_may_stand_beside_a_store_with_a_longer_name(self, tmp_path: Path) -> None:
        opened(str(tmp_path / "root-store"), root=str(tmp_path / "root")).close()

    @pytest.mark.req("D4.user_ids_opaque")
    @pytest.mark.parametrize("name", ["needle", "../needle", "/needle", "a/needle", "..needle"])
    def test_an_id_that_a_user_chose_names_no_file(self, tmp_path: Path, name: str) -> None:
        root, home = tmp_path / "root", tmp_path / "home"
        root.mkdir()
        with mulligan.open(str(root), store=str(home)) as product:
            with product.session(name).call(tool_call_id=name) as call:
                call.write_file("file", os.urandom(80_000).hex())
            assert {path.name for path in tmp_path.rglob("*") if "needle" in path.name} == set()
            assert {path.name for path in tmp_path.iterdir()} == {"root", "home"}

    @pytest.mark.req("D4.journal_per_session", "D4.journal_per_workspace")
    def test_each_session_has_a_journal_and_the_workspace_one_with_what_others_did(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        root.mkdir()
        with mulligan.open(str(root), store=str(tmp_path / "home")) as product:
            for name in ("one", "two"):
                with product.session(name).call() as call:
                    call.write_file("file", name)
                (root / "file").write_text(f"{name} and a person")
            with product.session("one").call() as call:
                call.write_file("file", "again")
            with product.open_root.ledger.store.read() as tx:
                journals = {head.journal for head in tx.select(HEADS)} - {SEALS}
                (ours,) = journals - {"s:one", "s:two"}
                outside = {name for name in journals for record in records_of(tx, name) if record.kind == "external"}
                calls = {name for name in journals for record in records_of(tx, name) if "call" in record.payload}
        assert (ours[:2], outside, {"s:one", "s:two"} - calls) == ("w:", {ours}, set())

    @pytest.mark.req("D4.wseq")
    def test_every_change_has_a_place_among_all_sessions(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        with mulligan.open(str(tmp_path / "root"), store=str(tmp_path / "home")) as product:
            sessions = [product.session(name) for name in ("one", "two", "three")]
            for number in range(9):
                with sessions[number % 3].call() as call:
                    call.write_file("file", str(number))
            with product.open_root.ledger.store.read() as tx:
                by_birth = [row.wseq for row in sorted(tx.select(CHANGES), key=lambda row: row.call)]
        assert (by_birth, len(set(by_birth))) == (sorted(by_birth), 9)

    @pytest.mark.req("D4.roots_overlap_share")
    def test_roots_that_overlap_share_one(self, tmp_path: Path) -> None:
        for folder in ("real/inner", "shown", "other"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "link").symlink_to("real")
        command = ["unshare", "--mount", "--map-root-user", sys.executable, "-c", OVERLAPPING, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        *same, other = done.stdout.split()
        assert (len(same), len(set(same)), other in same) == (4, 1, False)

    @pytest.mark.req("D4.blob_before_record")
    def test_at_every_commit_what_records_name_is_there(self, tmp_path: Path) -> None:
        root, absent, commits = tmp_path / "root", list[RefRow](), list[int]()
        root.mkdir()
        with mulligan.open(str(root), store=str(tmp_path / "home"), durability="power") as product:
            store = product.open_root.ledger.store
            assert isinstance(store, SqliteStore)

            def watched() -> None:
                with store.read() as tx:
                    commits.append(tx.count(REFS))
                    absent.extend(ref for ref in tx.select(REFS) if not tx.has(BLOBS, ref.digest))

            store.after_write = watched
            for size in (10, 70_000):
                with product.session("s").call() as call:
                    call.write_file("file", os.urandom(size).hex())
        assert (absent, len(set(commits)) > 2) == ([], True)


def _not_a_database(directory: Path) -> None:
    (directory / "store.db").write_bytes(b"this is a letter to my aunt\n" * 300)


def _foreign(directory: Path) -> None:
    connection = apsw.Connection(str(directory / "store.db"))
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()


def _foreign_with_a_name(directory: Path) -> None:
    connection = apsw.Connection(str(directory / "store.db"))
    connection.pragma("application_id", 7)
    connection.close()


def _newer(directory: Path) -> None:
    SqliteStore(str(directory), CONTRACT_SCHEMA).close()
    connection = apsw.Connection(str(directory / "store.db"))
    assert connection.pragma("application_id") == APPLICATION_ID
    connection.pragma("user_version", 99)
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.close()


def _cut_short(directory: Path) -> None:
    store = SqliteStore(str(directory), CONTRACT_SCHEMA)
    store.reclaim_space()
    store.close()
    for leftover in ("store.db-wal", "store.db-shm"):
        (directory / leftover).unlink(missing_ok=True)
    os.truncate(directory / "store.db", 5_000)


def _a_directory_in_its_place(directory: Path) -> None:
    (directory / "store.db").mkdir()


OVERLAPPING = """
import subprocess, sys
import mulligan
base = sys.argv[1]
subprocess.run(["mount", "--bind", base + "/real/inner", base + "/shown"], check=True)
for root in ("/real", "/real/inner", "/link", "/shown", "/other"):
    with mulligan.open(base + root, store=base + "/home") as opened:
        print(opened.open_root.root.workspace)
"""


class TestOpen:
    @pytest.mark.req("D12.open_signature")
    def test_has_the_arguments_of_the_design_and_is_a_context(self, tmp_path: Path) -> None:
        root, *named = inspect.signature(mulligan.open).parameters.values()
        assert (root.name, root.default, {one.kind for one in named}) == ("root", ".", {inspect.Parameter.KEYWORD_ONLY})
        assert [(one.name, one.default) for one in named] == [
            *(("store", None), ("blobs", None), ("durability", "process"), ("capability", None)),
            *(("policy", None), ("clock", None), ("ids", None)),
        ]
        with mulligan.open(str(tmp_path), store="memory:") as product:
            assert isinstance(product, Mulligan)

    @pytest.mark.req("D12.session_new_or_resume")
    def test_a_session_is_new_or_the_one_of_that_name(self, tmp_path: Path) -> None:
        root, home = tmp_path / "root", str(tmp_path / "home")
        root.mkdir()
        with mulligan.open(str(root), store=home) as product:
            assert product.session().id != product.session().id
            with product.session("mine").call() as call:
                call.write_file("file", "x")
        with mulligan.open(str(root), store=home) as product:
            product.session("mine").undo()
        assert list(root.iterdir()) == []

    def test_what_is_closed_says_so_and_touches_nothing(self, tmp_path: Path) -> None:
        root, other = tmp_path / "root", tmp_path / "other"
        root.mkdir()
        other.mkdir()
        product = mulligan.open(root, store=tmp_path / "home")
        session = product.session("mine")
        with session.call() as call:
            call.write_file("file", "x")
        was = product.open_root.disk.root.handle
        product.close()
        taken = os.open(other, os.O_RDONLY)  # the next to be opened is given the number of the root's handle
        os.dup2(taken, was)
        for act in (
            lambda: session.call().__enter__().write_file("again", "x"),
            lambda: session.files.write("again", "x"),
            lambda: session.inject({"role": "user", "content": "hi"}),
            session.messages,
            session.undo,
            session.fork,
            lambda: product.session("another"),
        ):
            with pytest.raises(MulliganError) as caught:
                act()
            assert caught.value.code == "workspace_closed"
        product.close()
        assert (os.listdir(root), os.listdir(other)) == (["file"], [])
        for handle in {taken, was}:
            os.close(handle)

    @pytest.mark.parametrize(
        ("given", "code"),
        [
            ({"root": "a\0"}, "unknown_root"),
            ({"root": "\ud800"}, "unknown_root"),
            ({"root": 3}, "unknown_root"),
            ({"store": 3}, "invalid_store_url"),
            ({"clock": 3}, "invalid_params"),
            ({"ids": 3}, "invalid_params"),
        ],
    )
    def test_what_means_nothing_is_refused_by_name(self, tmp_path: Path, given: dict[str, Any], code: str) -> None:
        with pytest.raises(MulliganError) as caught:
            mulligan.open(**{"root": tmp_path, "store": "memory:", **given})
        assert caught.value.code == code

    @pytest.mark.req("D5.durability_power")
    @pytest.mark.parametrize("durability", ["process", "power"])
    def test_only_in_power_mode_a_call_waits_for_its_files_and_their_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
    ) -> None:
        synced, really = set[str](), os.fsync

        def noted(handle: int) -> None:
            name = os.readlink(f"/proc/self/fd/{handle}")
            synced.add("draft" if "/.mulligan-" in name else name)
            really(handle)

        monkeypatch.setattr(os, "fsync", noted)
        with mulligan.open(str(tmp_path), store="memory:", durability=durability) as product:
            with product.session("s").call() as call:
                call.write_file("file", "x")
            assert synced == ({"draft", str(tmp_path / "file"), str(tmp_path)} if durability == "power" else set())

    @pytest.mark.req("D2.call_id_uuid7")
    def test_a_calls_id_is_ours_and_the_providers_a_label(self, tmp_path: Path) -> None:
        with mulligan.open(str(tmp_path), store="memory:") as product:
            calls = []
            for _ in range(2):
                with product.session("s").call(tool_call_id="toolu_1") as call:
                    call.write_file("file", "x")
                calls.append(call.id)
        assert ([UUID(one).version for one in calls], len(set(calls))) == ([7, 7], 2)


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" -m mulligan.cli log --store "$3"
"""


def _as_format_1(home: Path, directory: Path) -> None:
    """What the first format had not got."""
    as_format_2(home, directory)
    connection = apsw.Connection(str(directory / "store.db"))
    connection.execute('ALTER TABLE "calls" DROP COLUMN "way_back"; DROP TABLE "taken_in_part"')
    connection.pragma("user_version", 1)
    connection.close()


@pytest.mark.req("D4.schema_version")
def test_a_store_of_the_first_format_is_brought_forward_with_all_it_holds(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    with mulligan.open(str(work), store=str(home)) as first:
        session = first.session("s")
        for name in ("kept.txt", "back.txt"):
            with session.call() as call:
                call.write_file(name, "agent\n")
        with session.call("both") as call:
            call.write_file("one.txt", "1\n")
            call.write_file("two.txt", "2\n")
        session.undo("both", paths=["one.txt"])
        session.undo("both")
        session.undo()
    _as_format_1(home, tmp_path / "old")
    with mulligan.open(str(work), store=str(tmp_path / "old")) as again:
        assert list(verify(again.open_root.ledger.store, SCHEMA)) == []
        again.session("s").redo()
        assert sorted(os.listdir(work)) == ["back.txt", "kept.txt"]
        again.session("s").undo()
        again.session("s").undo()
        assert os.listdir(work) == []


class TestBadStores:
    @pytest.mark.req("D4.newer_store_refused")
    @pytest.mark.parametrize(
        ("make", "codes"),
        [
            (_not_a_database, {"store_corrupt"}),
            (_foreign, {"store_corrupt"}),
            (_foreign_with_a_name, {"store_corrupt"}),
            (_newer, {"store_newer"}),
            (_cut_short, {"store_corrupt"}),
            (_a_directory_in_its_place, {"store_unreadable"}),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_are_refused_by_name_and_left_as_they_are(
        self, tmp_path: Path, make: Callable[[Path], None], codes: set[str]
    ) -> None:
        make(tmp_path)
        before = (tmp_path / "store.db").is_dir() or (tmp_path / "store.db").read_bytes()
        fault = refused(str(tmp_path))
        assert fault.code in codes
        assert str(tmp_path) in fault.message
        assert "\n" not in fault.message
        assert ((tmp_path / "store.db").is_dir() or (tmp_path / "store.db").read_bytes()) == before

    def test_a_file_where_a_directory_should_be_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for path in ("file", "file/below"):
            assert refused(str(tmp_path / path)).code == "store_unreadable"
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.req("D15.sqlite_network_refused")
    def test_a_network_file_system_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert {"nfs", "nfs4", "cifs", "smb3", "9p"} <= sqlite_file._NETWORK_FILE_SYSTEMS
        here = file_system_of(str(tmp_path))
        assert here != ""
        # Tests cannot mount one, so the kind of disk they are on counts as one.
        monkeypatch.setattr(sqlite_file, "_NETWORK_FILE_SYSTEMS", frozenset({here}))
        assert refused(str(tmp_path / "deep" / "store")).code == "network_store"
        assert list(tmp_path.iterdir()) == []

    def test_a_directory_one_may_not_enter_is_refused(self, open_to_all: Path) -> None:
        directory = open_to_all / "store"
        SqliteStore(str(directory), CONTRACT_SCHEMA).close()
        directory.chmod(0)
        os.chown(directory, *NOBODY)
        try:
            assert as_nobody(str(directory)) == "store_unreadable"
        finally:
            directory.chmod(0o700)

    def test_a_directory_one_may_only_read_is_refused(self, open_to_all: Path) -> None:
        directory = open_to_all / "store"
        directory.mkdir(mode=0o755)
        directory.chmod(0o555)
        os.chown(directory, *NOBODY)
        assert as_nobody(str(directory)) == "store_unreadable"
        assert list(directory.iterdir()) == []

    @pytest.mark.req("D14.cli.errors_say_next")
    def test_a_disk_that_is_read_only_is_refused_and_says_what_to_do(self, tmp_path: Path) -> None:
        """Seen from a mount namespace of its own, in which the disk really is read-only."""
        kept, fresh = tmp_path / "disk" / "kept", tmp_path / "disk" / "fresh"
        SqliteStore(str(kept), CONTRACT_SCHEMA).close()
        before = sorted(os.listdir(kept))
        for directory in (kept, fresh):
            words = ["sh", "-c", READ_ONLY, "sh", str(tmp_path / "disk"), sys.executable, str(directory)]
            apart = ["unshare", "--user", "--map-root-user", "--mount", *words]
            done = subprocess.run(apart, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
            assert "MULLIGAN_HOME" in done.stderr
        assert (sorted(os.listdir(kept)), fresh.exists()) == (before, False)

    def test_a_reader_of_a_good_store_sees_what_is_in_it(self, tmp_path: Path) -> None:
        store = opened(str(tmp_path))
        with store.read() as tx:
            assert tx.select(HEADS) == []
        store.close()


def as_nobody(directory: str) -> str:
    """The code that opening gives to a person without any rights of their own."""
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, directory], capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout.strip()


NOBODY = (65534, 65534) if os.getuid() == 0 else (-1, -1)
AS_NOBODY = """
import os, sys
from mulligan.api import Mulligan, open_store
import mulligan.store.maintenance, mulligan.store.sqlite, mulligan.store.memory
from mulligan.history.projection import SCHEMA
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    open_store(sys.argv[1], SCHEMA, durability="process", clock=SystemClock())
except MulliganError as error:
    print(error.code)
"""
