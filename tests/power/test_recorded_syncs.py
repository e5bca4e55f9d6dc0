"""Syncs that the tester of power cuts does not reach: each test hears which files and file systems are synced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import api
from mulligan.files import kernel
from mulligan.store import blob_files as body_files
from mulligan.store.blob_files import DirectoryBodies
from mulligan.store.blobs import BLOBS, Blobs, delete_unnamed_bodies
from mulligan.store.journal import Journal
from mulligan.store.maintenance import check_after_reboot
from mulligan.store.memory import MemoryStore
from mulligan.store.sqlite import SqliteStore
from mulligan.testing import SteppingClock
from mulligan.values.digest import digest_of, raw_digest
from tests.contracts.tables import CONTRACT_SCHEMA
from tests.exec.unprivileged_user import run_as_nobody
from tests.history.killed_process import KILLED, in_child
from tests.mount_namespaces import Shell, covering

LARGE = os.urandom(80_000)
"""Too large for the database."""


class Heard:
    """Files that this process synced one by one, and file systems that it synced whole, by a path in each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        self.file_systems: list[str] = []
        self._fsync, self._libc = os.fsync, body_files._libc
        patch.setattr(os, "fsync", self._hear_file)
        patch.setattr(body_files, "_libc", self)

    def _hear_file(self, handle: int) -> None:
        self.files.append(os.readlink(f"/proc/self/fd/{handle}"))
        self._fsync(handle)

    def syncfs(self, handle: int) -> Any:
        self.file_systems.append(os.readlink(f"/proc/self/fd/{handle}"))
        return self._libc.syncfs(handle)

    def forget(self) -> None:
        self.files, self.file_systems = [], []


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    return Heard(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.txt").write_text("old")
    return root


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(str(tmp_path / "home"), CONTRACT_SCHEMA)
    yield store
    store.close()


def write(product: mulligan.Mulligan) -> None:
    with product.session("s").call() as call:
        assert call.write_file("a.txt", "new").ok


def names_of_body(directory: Path) -> set[str]:
    """The one body that is there, and each directory that leads to its name."""
    (path,) = (one for one in directory.rglob("*") if one.is_file())
    return {str(one) for one in (path, path.parent, directory, directory.parent)}


def test_a_sync_of_the_store_syncs_its_large_bodies_and_their_names(store: SqliteStore, heard: Heard) -> None:
    Blobs(store, SteppingClock()).store(LARGE)
    heard.forget()
    store.sync()
    assert names_of_body(Path(store.directory, "blobs")) <= set(heard.files)


def test_a_sync_of_a_store_in_memory_syncs_bodies_that_are_files(tmp_path: Path, heard: Heard) -> None:
    store = MemoryStore(CONTRACT_SCHEMA, bodies=DirectoryBodies(str(tmp_path / "blobs")))
    Blobs(store, SteppingClock()).store(LARGE)
    heard.forget()
    store.sync()
    assert names_of_body(tmp_path / "blobs") <= set(heard.files)


def test_the_first_look_after_a_boot_syncs_the_bodies_that_are_there(store: SqliteStore, heard: Heard) -> None:
    Blobs(store, SteppingClock()).store(LARGE)
    store.bodies = DirectoryBodies(str(Path(store.directory, "blobs")))
    heard.forget()
    assert check_after_reboot(store, Journal(CONTRACT_SCHEMA), SteppingClock(), boot="another") == ()
    assert names_of_body(Path(store.directory, "blobs")) <= set(heard.files)


def test_a_new_key_is_synced_before_it_has_its_name(root: Path, tmp_path: Path, heard: Heard) -> None:
    with mulligan.open(root, store=tmp_path / "home") as product, product.session("s").call() as call:
        assert call.exec(["true"], env={"TOKEN": "1"}).ok
    assert [name for name in heard.files if name.endswith(".part")] != []


def test_what_is_synced_in_another_process_stead_is_the_file_its_directory_and_the_store(
    root: Path, tmp_path: Path, heard: Heard
) -> None:
    home = tmp_path / "home"

    def run() -> int:
        write(mulligan.open(root, store=home))
        return KILLED

    assert in_child(run) == KILLED
    (process,) = os.listdir(home / "originals")
    heard.forget()
    api.sync_left(str(home), process)
    assert {str(root / "a.txt"), str(root), str(home / "store.db-wal")} <= set(heard.files)
    assert os.listdir(home / "originals") == []


def test_forgetting_bytes_syncs_what_replaced_them_before_their_originals_go(
    root: Path, tmp_path: Path, heard: Heard
) -> None:
    with mulligan.open(root, store=tmp_path / "home") as product:
        write(product)
        heard.forget()
        product.open_root.ledger.store.erase_deleted()
        assert {str(root / "a.txt"), str(root), str(tmp_path / "home" / "store.db-wal")} <= set(heard.files)


def test_in_power_mode_the_copy_of_a_sandboxed_root_is_synced(root: Path, tmp_path: Path, heard: Heard) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "b.txt").write_text("one")
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        session = product.session("s")
        assert session.add_root(str(library), mount_mode="sandboxed")["ok"]
        heard.forget()
        receipt, _ = session.perform("write_file", {"path": str(library / "b.txt"), "content": "two"})
        assert receipt.ok, receipt
    assert [name for name in heard.file_systems if name.startswith(str(tmp_path / "home"))] != []


def test_without_syncfs_everything_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(body_files, "_libc", object())
    monkeypatch.setattr(os, "sync", lambda: synced.append("all"))
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        body_files.sync_file_system(handle)
    finally:
        os.close(handle)
    assert synced == ["all"]


def test_in_power_mode_a_file_that_its_owner_may_not_read_is_synced_with_its_file_system() -> None:
    assert json.loads(run_as_nobody("tests.files.unreadable_syncs")) is True


BEHIND_A_MOUNT = """
import os, sys
import mulligan
work, home = sys.argv[1:]
synced, fsync = [], os.fsync
def heard(handle):
    synced.append(os.readlink(f"/proc/self/fd/{handle}"))
    fsync(handle)
with mulligan.open(work, store=home) as product:
    os.fsync = heard
    with product.session("s").call() as call:
        assert call.write_file("inner/a.txt", "new").ok
    os.fsync = fsync
print("\\n".join(synced))
"""


def test_a_file_that_cannot_be_moved_to_the_originals_is_synced_before_its_original_goes(root: Path) -> None:
    """The same file system is mounted twice, and one rename cannot go from one mount to the other."""
    inner, home = root / "inner", root.parent / "home"
    inner.mkdir()
    (inner / "a.txt").write_text("old")
    shell = Shell(root, home, around=covering(str(inner), inner))
    process = shell.start(sys.executable, "-c", BEHIND_A_MOUNT, str(root), str(home))
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.splitlines()[0] == str(inner / "a.txt")
    assert (inner / "a.txt").read_text() == "new"


def test_power_mode_syncs_a_body_that_another_process_stored_without_syncing(store: SqliteStore, heard: Heard) -> None:
    Blobs(store, SteppingClock()).store(LARGE)
    careful = SqliteStore(store.directory, CONTRACT_SCHEMA, durability="power")
    heard.forget()
    Blobs(careful, SteppingClock()).store(LARGE)
    careful.close()
    assert names_of_body(Path(store.directory, "blobs")) <= set(heard.files)


def test_power_mode_syncs_a_body_that_is_there_already_without_a_row(store: SqliteStore, heard: Heard) -> None:
    digest = digest_of(LARGE)
    store.bodies.put(digest, LARGE)
    heard.forget()
    store.bodies.put(digest, LARGE, durable=True)
    assert names_of_body(Path(store.directory, "blobs")) <= set(heard.files)


# File systems without a journal: the disk may still have an old name when a new file is given its inode.


def test_in_power_mode_without_a_journal_the_directory_is_synced_before_and_after_an_original_goes(
    root: Path, tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        for is_ordered in (True, False):
            monkeypatch.setattr(kernel, "keeps_order", lambda _, is_ordered=is_ordered: is_ordered)
            write(product)
            (root / "a.txt").write_text("of a person")
            heard.forget()
            write(product)
            counts.append(heard.files.count(str(root)))
    assert counts[1] == counts[0] + 2


def test_in_power_mode_the_name_of_a_deleted_log_is_synced(tmp_path: Path, heard: Heard) -> None:
    store = SqliteStore(str(tmp_path / "home"), CONTRACT_SCHEMA, durability="power")
    heard.forget()
    store.close()
    assert heard.files[-1] == str(tmp_path / "home")


def test_the_name_of_a_deleted_body_is_synced(store: SqliteStore, heard: Heard) -> None:
    digest = Blobs(store, SteppingClock()).store(LARGE)
    (path,) = (one for one in Path(store.directory, "blobs").rglob("*") if one.is_file())
    with store.write() as tx:
        tx.delete(BLOBS, raw_digest(digest))
    store.sync()
    heard.forget()
    delete_unnamed_bodies(store, [digest])
    assert not path.exists()
    assert heard.files[-1] in {str(path.parent), str(path.parent.parent), str(path.parent.parent.parent)}


def test_each_file_of_git_in_a_linked_working_tree_is_synced_before_it_has_its_name(
    tmp_path: Path, heard: Heard
) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=u", "-c", "user.email=e", *words], check=True)

    main, root = tmp_path / "main", tmp_path / "tree"
    git("init", "-q", str(main))
    git("-C", str(main), "commit", "-q", "--allow-empty", "-m", "0")
    git("-C", str(main), "worktree", "add", "-q", "-b", "topic", str(root))
    with mulligan.open(str(root), store=str(tmp_path / "store")) as product:
        session = product.session("s")
        with session.call() as call:
            commit = "echo 1 > a && git add a && git -c user.name=u -c user.email=e commit -q -m 1"
            assert call.exec(["sh", "-c", commit]).ok
        heard.forget()
        assert session.undo(call.id, git="restore").ok
    locks = {str(main / ".git/worktrees/tree/index.lock"), str(main / ".git/refs/heads/topic.lock")}
    assert locks <= set(heard.files)
