"""`process` mode and power cuts: a path that Mulligan replaced or deleted has its old or its new content afterwards.

A child process works and ends at once, without syncing. Then the test does what a power cut does: it takes the bytes
of the new files, whose inodes and times stay, and where it says so all that the store has not synced.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mulligan
from mulligan.testing import FaultPlan
from tests.history.killed_process import KILLED, in_child
from tests.sync_watch import SyncWatch
from tests.temp_workspace import open_temp_workspace

OLD = "old\n" * 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    for name in ("a", "b"):
        (root / name).write_text(OLD)
    return root


def open_here(root: Path) -> mulligan.Mulligan:
    return mulligan.open(root, store=root.parent / "home")


def die_after(root: Path, act: Callable[[mulligan.Mulligan], object]) -> None:
    def run() -> int:
        act(open_here(root))
        return KILLED

    assert in_child(run) == KILLED


def write(content: str, name: str = "a") -> Callable[[mulligan.Mulligan], object]:
    def act(product: mulligan.Mulligan) -> None:
        with product.session("s").call() as call:
            assert call.write_file(name, content).ok

    return act


def delete(product: mulligan.Mulligan) -> None:
    with product.session("s").call() as call:
        assert call.delete("a").ok


def take_bytes(path: Path, left: bytes = b"") -> None:
    """What a power cut leaves of a file that was not synced."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(left)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class StoreBefore:
    """The store's files as they were synced last; the originals are names, and names come through."""

    def __init__(self, root: Path) -> None:
        with open_here(root):
            pass
        self._home, self._copy = root.parent / "home", root.parent / "before"
        shutil.copytree(self._home, self._copy)

    def come_back(self) -> None:
        for old in self._home.glob("store.db*"):
            old.unlink()
        for name in self._copy.glob("store.db*"):
            shutil.copy(name, self._home)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def originals(root: Path) -> list[str]:
    return os.listdir(root.parent / "home" / "originals")


@pytest.mark.req("D5.process_power_cut")
@pytest.mark.parametrize("left", [b"", b"new\n", b"\0" * 600])
def test_a_damaged_file_gets_its_original_back(root: Path, left: bytes) -> None:
    die_after(root, write("new\n" * 300))
    take_bytes(root / "a", left)
    with open_here(root) as product:
        assert [(one.path, one.outcome) for one in product.power_cut] == [(str(root / "a"), "put_back")]
    assert ((root / "a").read_text(), (root / "b").read_text()) == (OLD, OLD)
    assert (names(root), originals(root)) == (["a", "b"], [])


@pytest.mark.req("D5.process_power_cut")
def test_a_complete_file_stays_and_a_killed_process_leaves_nothing_behind(root: Path) -> None:
    die_after(root, write("new\n" * 300))
    with open_here(root) as product:
        assert product.power_cut == ()
    assert (root / "a").read_text() == "new\n" * 300
    assert (names(root), originals(root)) == (["a", "b"], [])


@pytest.mark.req("D5.process_power_cut")
@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
def test_of_several_versions_the_newest_complete_one_is_back(root: Path, damaged: int) -> None:
    def act(product: mulligan.Mulligan) -> None:
        for count in range(3):
            write(f"new {count}\n" * 300)(product)

    die_after(root, act)
    home = root.parent / "home" / "originals"
    kept = sorted((one for one in home.glob("*/*~a") if not one.name.startswith("next-")), key=lambda one: one.name)
    versions = [*kept, root / "a"]
    assert [one.read_text()[:5] for one in versions] == ["old\no", "new 0", "new 1", "new 2"]
    for path in versions[4 - damaged :]:
        take_bytes(path)
    with open_here(root) as product:
        assert [one.outcome for one in product.power_cut] == (["put_back"] if damaged else [])
    expected = ["new 2\n", "new 1\n", "new 0\n", "old\n"][damaged] * 300
    assert (root / "a").read_text() == expected
    assert (names(root), originals(root)) == (["a", "b"], [])


@pytest.mark.req("D5.process_power_cut")
def test_the_original_of_a_killed_process_goes_only_when_the_new_file_is_synced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after(root, write("new\n" * 300))
    watch = SyncWatch(root, monkeypatch)
    watch.forget(root / "a")
    with open_here(root):
        assert originals(root) == []
        assert watch.at_risk() == []


@pytest.mark.req("D5.process_power_cut")
def test_a_deleted_file_is_back_if_the_store_lost_the_call(root: Path) -> None:
    before = StoreBefore(root)
    die_after(root, delete)
    assert names(root) == ["b"]
    before.come_back()
    with open_here(root) as product:
        assert [one.outcome for one in product.power_cut] == ["put_back"]
    assert (root / "a").read_text() == OLD
    assert originals(root) == []


@pytest.mark.req("D5.process_power_cut")
def test_a_deleted_file_stays_deleted_if_the_store_knows_it(root: Path) -> None:
    die_after(root, delete)
    with open_here(root) as product:
        assert product.power_cut == ()
        assert names(root) == ["b"]
        assert product.session("s").undo().ok
    assert (root / "a").read_text() == OLD


@pytest.mark.req("D5.process_power_cut")
def test_what_a_person_wrote_since_stays_and_the_original_is_in_the_store(root: Path) -> None:
    before = StoreBefore(root)
    die_after(root, write("new\n" * 300))
    with open(root / "a", "r+b") as file:
        file.truncate(0)
        file.write(b"a person's\n")
    before.come_back()
    with open_here(root) as product:
        (found,) = product.power_cut
        assert (found.outcome, found.path) == ("rescued", str(root / "a"))
        assert found.digest is not None and product.open_root.ledger.blobs.read(found.digest).decode() == OLD
    assert (root / "a").read_text() == "a person's\n"


@pytest.mark.req("D5.process_power_cut")
def test_a_path_removed_since_is_left_alone_and_its_original_is_in_the_store(root: Path) -> None:
    before = StoreBefore(root)
    die_after(root, write("new\n" * 300))
    (root / "a").unlink()
    before.come_back()
    with open_here(root) as product:
        assert [one.outcome for one in product.power_cut] == ["rescued"]
    assert names(root) == ["b"]


@pytest.mark.req("D5.process_power_cut")
def test_rescued_bytes_are_synced_before_their_original_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = StoreBefore(root)
    die_after(root, write("new\n" * 300))
    (root / "a").unlink()
    before.come_back()
    originals_at_sync, really = list[int](), os.fsync

    def noted(handle: int) -> None:
        really(handle)
        if os.readlink(f"/proc/self/fd/{handle}").endswith("store.db-wal"):
            originals_at_sync.append(len(originals(root)))

    monkeypatch.setattr(os, "fsync", noted)
    with open_here(root) as product:
        assert [one.outcome for one in product.power_cut] == ["rescued"]
        assert (originals_at_sync[:1], originals(root)) == ([1], [])


@pytest.mark.req("D5.process_power_cut")
def test_a_file_that_was_deleted_and_made_again_gets_its_original_back(root: Path) -> None:
    def act(product: mulligan.Mulligan) -> None:
        delete(product)
        write("new\n" * 300)(product)

    die_after(root, act)
    take_bytes(root / "a")
    with open_here(root) as product:
        assert [one.outcome for one in product.power_cut] == ["put_back"]
    assert ((root / "a").read_text(), originals(root)) == (OLD, [])


@pytest.mark.req("D5.process_power_cut")
@pytest.mark.parametrize("step", ["stage.half", "stage.write", "exchange", "discard", "set_aside"])
@pytest.mark.parametrize("store", ["lost", "there"])
def test_in_the_middle_of_a_change_the_old_content_is_back_without_drafts(root: Path, step: str, store: str) -> None:
    before = StoreBefore(root)

    def run() -> int:
        steps = FaultPlan().act(lambda *_: os._exit(KILLED), step=step)
        with open_temp_workspace(root.parent, steps=steps).session().call("dies") as call:
            call.write_file("a", "new\n" * 300) if step != "set_aside" else call.delete("a")
        return 0

    assert in_child(run) == KILLED
    if step == "discard":
        take_bytes(root / "a")
    if store == "lost":
        before.come_back()
    with open_here(root):
        assert (root / "a").read_text() == OLD
    assert (names(root), originals(root)) == (["a", "b"], [])


@pytest.mark.req("D5.process_power_cut")
def test_a_power_cut_after_an_abort_leaves_a_complete_file(root: Path) -> None:
    def act(product: mulligan.Mulligan) -> None:
        with pytest.raises(LookupError), product.session("s").call() as call:
            call.write_file("a", "new\n" * 300)
            raise LookupError

    before = StoreBefore(root)
    die_after(root, act)
    take_bytes(root / "a")
    for path in (root.parent / "home" / "originals").glob("*/*~a"):
        if path.stat().st_size and path.read_text().startswith("new"):
            take_bytes(path)
    before.come_back()
    with open_here(root):
        assert (root / "a").read_text() == OLD


@pytest.mark.req("D5.process_syncs_at_exit")
@pytest.mark.parametrize("ending", ["product.close()", "pass", "raise SystemExit(0)"])
def test_a_short_process_syncs_before_it_ends(root: Path, tmp_path: Path, ending: str) -> None:
    code = (
        "import mulligan, os, sys\n"
        "synced, really = [], os.fsync\n"
        "os.fsync = lambda handle: (synced.append(os.readlink(f'/proc/self/fd/{handle}')), really(handle))\n"
        "import atexit; atexit.register(lambda: print(*synced, sep='\\n'))\n"
        f"product = mulligan.open({str(root)!r}, store={str(tmp_path / 'home')!r})\n"
        "synced.clear()\n"
        "with product.session('s').call() as call: call.write_file('a', 'new')\n"
        f"{ending}\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    home = tmp_path / "home"
    assert set(ran.stdout.split()) == {str(root / "a"), str(root), str(home / "store.db-wal")}
    assert originals(root) == []


@pytest.mark.req("D5.process_power_cut")
def test_a_root_on_another_file_system_is_synced_before_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path("/dev/shm") / f"mulligan-test-{os.getpid()}"
    root.mkdir()
    try:
        (root / "a").write_text(OLD)
        assert root.stat().st_dev != tmp_path.stat().st_dev, "the test needs two file systems"
        synced, really = list[str](), os.fsync

        def noted(handle: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{handle}"))
            really(handle)

        monkeypatch.setattr(os, "fsync", noted)
        with mulligan.open(root, store=tmp_path / "home") as product:
            synced.clear()
            with product.session("s").call() as call:
                assert call.write_file("a", "new").ok
            assert [os.path.basename(name).partition("-")[0] for name in synced] == [".mulligan"]
            synced.clear()
            with product.session("s").call() as call:
                assert call.delete("a").ok
            assert [os.path.basename(name) for name in synced] == ["store.db-wal"]
            assert product.session("s").undo().ok
            assert names(root) == ["a"]
    finally:
        shutil.rmtree(root)


@pytest.mark.req("D5.process_power_cut")
def test_a_long_name_is_replaced_all_the_same(root: Path) -> None:
    name = "n" * 250
    (root / name).write_text(OLD)
    with open_here(root) as product:
        write("new", name)(product)
        assert ((root / name).read_text(), names(root)) == ("new", ["a", "b", name])


@pytest.mark.req("D5.process_power_cut")
def test_a_process_keeps_its_originals_while_another_one_opens_the_store(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mulligan", "log", "--root", str(root), "--store", str(tmp_path / "home")]
    with open_here(root) as product:
        write("new\n")(product)
        mine = originals(root)
        assert len(mine) == 1
        subprocess.run(command, capture_output=True, check=True)
        assert originals(root) == mine
        write("newer\n")(product)
    assert (root / "a").read_text() == "newer\n"


@pytest.mark.req("D5.process_power_cut")
def test_the_command_line_names_the_path(root: Path, tmp_path: Path) -> None:
    die_after(root, write("new\n" * 300))
    take_bytes(root / "a")
    command = [sys.executable, "-m", "mulligan", "log", "--root", str(root), "--store", str(tmp_path / "home")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert str(root / "a") in ran.stderr
    assert (root / "a").read_text() == OLD


@pytest.mark.req("D5.in_place_preimage_synced")
def test_the_preimage_is_synced_before_a_file_is_written_in_place(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(root / "a", root / "also")
    synced, really = list[tuple[str, str]](), os.fsync

    def noted(handle: int) -> None:
        really(handle)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((name, (root / "a").read_text()[:3]))

    with open_here(root) as product:
        monkeypatch.setattr(os, "fsync", noted)
        write("new\n" * 300)(product)
        assert synced == [("store.db-wal", "old"), ("a", "new")]


@pytest.mark.req("D5.process_power_cut")
def test_all_names_of_a_file_have_their_original_content_back(root: Path, tmp_path: Path) -> None:
    """The file has a name outside the root, so that the names inside become another file together."""
    os.link(root / "a", root / "also")
    os.link(root / "a", tmp_path / "outside")
    die_after(root, write("new\n" * 300))
    assert (root / "a").samefile(root / "also") and not (root / "a").samefile(tmp_path / "outside")
    take_bytes(root / "a")
    with open_here(root) as product:
        assert sorted(one.path for one in product.power_cut) == [str(root / "a"), str(root / "also")]
    assert ((root / "a").read_text(), (root / "also").read_text()) == (OLD, OLD)
    assert (names(root), originals(root)) == (["a", "also", "b"], [])


@pytest.mark.req("D5.process_power_cut")
def test_a_deleted_file_stays_deleted_in_a_folder_that_was_made_again(root: Path) -> None:
    """The store knows the files of the second folder by another key than those of the first."""
    with open_here(root) as product:
        write("of the first folder")(product)
    shutil.rmtree(root)
    root.mkdir()
    (root / "a").write_text(OLD)
    die_after(root, delete)
    with open_here(root) as product:
        assert product.power_cut == ()
    assert names(root) == []


@pytest.mark.req("D5.process_power_cut")
def test_a_preimage_that_a_killed_process_stored_is_synced_before_its_original_goes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "large").write_bytes(os.urandom(300_000))
    die_after(root, delete_large)
    (body,) = (path for path in (tmp_path / "home" / "blobs").rglob("*") if path.is_file())
    synced, really = list[str](), os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        really(handle)

    monkeypatch.setattr(os, "fsync", noted)
    with open_here(root):
        assert originals(root) == []
        assert str(body) in synced


def delete_large(product: mulligan.Mulligan) -> None:
    with product.session("s").call() as call:
        assert call.delete("large").ok
