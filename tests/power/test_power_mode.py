"""`power` mode: when a call has ended, however it ended, no power cut can change what it left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mulligan
from mulligan.testing import FaultPlan
from tests.history.killed_process import KILLED, die_in, in_child
from tests.sync_watch import SyncWatch
from tests.temp_workspace import TempWorkspace, open_temp_workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    (root / "d").mkdir(parents=True)
    (root / "a.txt").write_text("old a\n")
    (root / "d" / "b.txt").write_text("old b\n")
    return root


@pytest.fixture
def product(tmp_path: Path, root: Path) -> Iterator[mulligan.Mulligan]:
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        yield product


def work(product: mulligan.Mulligan) -> None:
    with product.session("s").call("work") as call:
        assert call.write_file("a.txt", "new a\n").ok
        assert call.delete("d/b.txt").ok
        assert call.write_file("e/f/c.txt", "new c\n", create_parents=True).ok


def aborted(product: mulligan.Mulligan) -> None:
    with pytest.raises(LookupError), product.session("s").call("fails") as call:
        call.write_file("a.txt", "newer a\n")
        call.delete("d", recursive=True)
        call.write_file("g/h.txt", "h", create_parents=True)
        raise LookupError


def part_failed(product: mulligan.Mulligan) -> None:
    """The outer call goes on after an inner one failed: what that one changed is as it was, under new inodes."""
    with product.session("s").call("outer") as outer:
        with pytest.raises(LookupError), product.session("s").call("inner") as inner:
            inner.write_file("a.txt", "inner\n")
            raise LookupError
        outer.write_file("d/b.txt", "outer\n")


def undone(product: mulligan.Mulligan) -> None:
    work(product)
    assert product.session("s").undo().ok


def redone(product: mulligan.Mulligan) -> None:
    undone(product)
    assert product.session("s").redo().ok


def restored(product: mulligan.Mulligan) -> None:
    work(product)
    assert product.session("s").restore("work").ok


def rolled_back(product: mulligan.Mulligan) -> None:
    work(product)
    assert product.session("s").rollback().ok


def rewound(product: mulligan.Mulligan) -> None:
    work(product)
    assert product.session("s").rewind("work").ok


@pytest.mark.req("D5.power_syncs_putting_back")
@pytest.mark.parametrize("act", [work, aborted, part_failed, undone, redone, restored, rolled_back, rewound])
def test_when_it_is_over_nothing_is_left_to_a_power_cut(
    act: Callable[[mulligan.Mulligan], None],
    product: mulligan.Mulligan,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = SyncWatch(root, monkeypatch)
    act(product)
    assert watch.at_risk() == []


@pytest.mark.req("D5.power_syncs_putting_back")
@pytest.mark.parametrize("strategy", ["notify", "scan", "overlay"])
def test_what_a_command_wrote_is_synced_when_its_call_ends(
    product: mulligan.Mulligan, root: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SyncWatch(root, monkeypatch)
    with product.session("s").call() as call:
        assert call.exec(["sh", "-c", "echo new > a.txt; mkdir n; echo made > n/m.txt"], strategy=strategy).ok
    assert watch.at_risk() == []


@pytest.mark.req("D5.power_syncs_putting_back")
def test_recovery_syncs_what_it_puts_back(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_late(workspace: TempWorkspace) -> None:
        with workspace.session().call("dies") as call:
            call.write_file("a.txt", "new a\n")
            call.delete("d", recursive=True)
            os._exit(KILLED)

    die_in(tmp_path, die_late, at=None)
    assert (root / "a.txt").read_text() == "new a\n" and not (root / "d").exists()
    watch = SyncWatch(root, monkeypatch)
    with mulligan.open(root, store=tmp_path / "home", durability="power"):
        assert ((root / "a.txt").read_text(), (root / "d" / "b.txt").read_text()) == ("old a\n", "old b\n")
        assert watch.at_risk() == []


@pytest.mark.req("D5.power_syncs_before_exchange")
def test_a_new_file_is_synced_before_it_takes_its_place(
    product: mulligan.Mulligan, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SyncWatch(root, monkeypatch)
    with product.session("s").call() as call:
        call.write_file("a.txt", "new a\n")
        drafts = [name for name in watch.names if "/.mulligan-" in name]
        assert [os.path.dirname(name) for name in drafts] == [str(root)]


def die_after_exchange(base: Path) -> None:
    def run() -> int:
        steps = FaultPlan().act(lambda *_: os._exit(KILLED), step="discard")
        with open_temp_workspace(base, steps=steps).session().call("dies") as call:
            call.write_file("a.txt", "new a\n")
        return 0

    assert in_child(run) == KILLED


@pytest.mark.req("D5.recovery_half_exchange")
@pytest.mark.parametrize("left", [b"", b"new", b"\0" * 6], ids=["empty", "torn", "zeros"])
def test_recovery_knows_its_own_half_done_exchange(tmp_path: Path, root: Path, left: bytes) -> None:
    """The process died between the exchange and the end of it, and the power cut took bytes of the new file."""

    die_after_exchange(tmp_path)
    assert (root / "a.txt").read_bytes() == b"new a\n"
    (root / "a.txt").write_bytes(left)
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        assert [one.conflicts for one in product.recovered] == [[]]
        assert (root / "a.txt").read_bytes() == b"old a\n"
        assert sorted(os.listdir(root)) == ["a.txt", "d"]


@pytest.mark.req("D5.recovery_half_exchange")
def test_recovery_leaves_what_another_writer_saved_over_a_half_done_exchange(tmp_path: Path, root: Path) -> None:
    die_after_exchange(tmp_path)
    (root / "a.txt").write_bytes(b"a person's\n")
    with mulligan.open(root, store=tmp_path / "home", durability="power"):
        assert (root / "a.txt").read_bytes() == b"a person's\n"
        assert sorted(os.listdir(root)) == ["a.txt", "d"]


@pytest.mark.req("D5.fsync_error_is_fault")
def test_a_draft_that_cannot_be_synced_never_takes_its_place(
    product: mulligan.Mulligan, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, really = list[str](), os.fsync

    def failing_once(handle: int) -> None:
        tried.append(os.readlink(f"/proc/self/fd/{handle}"))
        if len(tried) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(handle)

    monkeypatch.setattr(os, "fsync", failing_once)
    with product.session("s").call() as call:
        receipt = call.write_file("a.txt", "new a\n")
    assert (receipt.status, receipt.error_code) == ("error", "io_error")
    assert (root / "a.txt").read_text() == "old a\n"
    assert "/.mulligan-" in tried[0] and tried[0] not in tried[1:]


def before_boot(path: Path) -> None:
    """Nothing has written to the file since the machine was started."""
    os.utime(path, ns=(0, 0))


@pytest.mark.req("D5.recovery_knows_torn_files")
@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("left", [b"", b"\0" * 700, b"newer a\n" * 64 + b"\0" * 10], ids=["empty", "zeros", "torn"])
def test_recovery_takes_no_torn_draft_for_a_persons_save(tmp_path: Path, root: Path, mode: int, left: bytes) -> None:
    """The call had written the file once and was writing it again when the power was cut."""

    def run() -> int:
        steps = FaultPlan().act(lambda *_: os._exit(KILLED), step="stage.half", at=2)
        with open_temp_workspace(tmp_path, steps=steps).session().call("dies") as call:
            call.write_file("a.txt", "new a\n")
            call.write_file("a.txt", "newer a\n" * 100)
        return 0

    assert in_child(run) == KILLED
    (draft,) = root.glob(".mulligan-*")
    draft.write_bytes(left)
    draft.chmod(mode)
    before_boot(draft)
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        assert [one.conflicts for one in product.recovered] == [[]]
    assert (root / "a.txt").read_bytes() == b"old a\n"
    assert sorted(os.listdir(root)) == ["a.txt", "d"]


def die_after_command(base: Path, script: str, strategy: str = "watch") -> None:
    def run() -> int:
        with mulligan.open(base / "work", store=base / "home").session("s").call("dies") as call:
            assert call.exec(["sh", "-c", script], strategy=strategy).ok
            os._exit(KILLED)

    assert in_child(run) == KILLED


@pytest.mark.req("D5.recovery_knows_torn_files")
@pytest.mark.parametrize("left", [b"", b"old a\n\0\0\0\0", b"old a\nn"], ids=["empty", "zeros", "torn"])
def test_recovery_puts_back_what_a_power_cut_left_of_a_commands_work(tmp_path: Path, root: Path, left: bytes) -> None:
    die_after_command(tmp_path, "echo new >> a.txt; echo new > c.txt")
    (root / "a.txt").write_bytes(left)
    (root / "c.txt").write_bytes(b"")
    before_boot(root / "a.txt")
    before_boot(root / "c.txt")
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        assert [one.conflicts for one in product.recovered] == [[]]
    assert (root / "a.txt").read_bytes() == b"old a\n"
    assert sorted(os.listdir(root)) == ["a.txt", "d"]


@pytest.mark.req("D5.recovery_knows_torn_files")
def test_recovery_leaves_a_file_that_a_person_made_shorter_since_the_machine_was_started(
    tmp_path: Path, root: Path
) -> None:
    die_after_command(tmp_path, "echo new >> a.txt")
    (root / "a.txt").write_bytes(b"old")
    with mulligan.open(root, store=tmp_path / "home", durability="power") as product:
        assert [one.conflicts for one in product.recovered] == [["a.txt"]]
    assert (root / "a.txt").read_bytes() == b"old"
