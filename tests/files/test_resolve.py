"""Resolving paths on the real file system, with `openat2` and without, compared with the kernel's own resolution."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mulligan.files.disk import Disk, HostDisk
from mulligan.files.resolve import ResolvedPath, Root, Spots, open_root, resolve
from mulligan.testing import FaultPlan, HostPerson, Link, SimulatedDisk, plant, tree_of
from mulligan.testing.builders import Node, Sketch
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath
from tests.contracts.disk_contract import ResolveContract
from tests.contracts.disk_under_test import DiskUnderTest


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def beneath(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@contextmanager
def opened(path: str, *, beneath: bool = True) -> Iterator[Root]:
    root = replace(open_root(path), resolves_beneath=beneath)
    try:
        yield root
    finally:
        os.close(root.handle)


def real_of(root: Root, path: str) -> str:
    with resolve(root, RepoPath(path)) as resolved:
        return resolved.path


class TestResolveWithoutOpenat2(ResolveContract):
    """The contract on a kernel without `openat2`."""

    @contextmanager
    def open_disk(self, sketch: Sketch, plan: FaultPlan | None = None) -> Iterator[DiskUnderTest]:
        plan = plan or FaultPlan()
        with tempfile.TemporaryDirectory() as directory:
            root = plant(directory + "/root", sketch)
            disk = HostDisk(root, steps=plan)
            disk.root = replace(disk.root, resolves_beneath=False)
            yield DiskUnderTest(disk, HostPerson(root), plan, lambda: tree_of(root))
            disk.close()


def test_an_absolute_link_into_the_root_is_followed(tmp_path: Path, beneath: bool) -> None:
    root_path = plant(tmp_path / "root", {"d/f": "x"})
    os.symlink(f"{root_path}/d", f"{root_path}/to-d")
    os.symlink(root_path, f"{root_path}/to-root")
    with opened(root_path, beneath=beneath) as root:
        assert [real_of(root, path) for path in ("to-d/f", "to-d", "to-root/d/f", "to-root")] == [
            "d/f",
            "d",
            "d/f",
            ".",
        ]


@pytest.mark.parametrize("target", ["{root}-evil/f", "{root}/../root-evil/f", "../root-evil/f", "/etc/passwd", "/"])
def test_no_link_leads_out_however_it_is_spelled(tmp_path: Path, target: str, beneath: bool) -> None:
    root_path = plant(tmp_path / "root", {"d": None})
    plant(tmp_path / "root-evil", {"f": "secret"})
    os.symlink(target.format(root=root_path), f"{root_path}/link")
    with opened(root_path, beneath=beneath) as root:
        for path in ("link", "link/x"):
            with pytest.raises(Refused) as refused:
                resolve(root, RepoPath(path))
            assert refused.value.code == "symlink_not_allowed"


def test_a_root_reached_through_a_link_is_the_root_itself(tmp_path: Path) -> None:
    real = plant(tmp_path / "real", {"f": "x"})
    os.symlink(real, tmp_path / "alias")
    with opened(real) as one, opened(str(tmp_path / "alias")) as other:
        assert (one.path, one.place) == (other.path, other.place)


def test_nested_roots_agree_on_a_place(tmp_path: Path, beneath: bool) -> None:
    outer_path = plant(tmp_path / "outer", {"in/ner/f": "x", "to-inner": Link("in/ner")})
    with opened(outer_path, beneath=beneath) as outer, opened(outer_path + "/in/ner", beneath=beneath) as inner:
        spots = [
            resolve(outer, RepoPath("in/ner/f")),
            resolve(outer, RepoPath("to-inner/f")),
            resolve(inner, RepoPath("f")),
        ]
        assert len({resolved.place for resolved in spots}) == 1
        for resolved in spots:
            resolved.close()


def test_a_directory_swapped_for_a_link_while_we_look_leads_nowhere_else(tmp_path: Path, beneath: bool) -> None:
    """Mulligan checks and acts on the same file handle."""
    root_path = plant(tmp_path / "root", {"d/f": "ours"})
    plant(tmp_path / "outside", {"f": "theirs"})
    with opened(root_path, beneath=beneath) as root, resolve(root, RepoPath("d/f")) as resolved:
        os.rename(f"{root_path}/d", f"{root_path}/moved")
        os.symlink(tmp_path / "outside", f"{root_path}/d")
        with open(os.open(resolved.name, os.O_RDONLY, dir_fd=resolved.parent), "rb") as file:
            assert file.read() == b"ours"


def test_a_directory_that_becomes_a_link_between_the_look_and_the_open_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root_path = plant(tmp_path / "root", {"d/f": "ours"})
    plant(tmp_path / "outside", {"f": "theirs"})
    really = os.readlink

    def swapped_after(name: bytes, *, dir_fd: int) -> bytes:
        try:
            return really(name, dir_fd=dir_fd)
        finally:
            if name == b"d" and not os.path.islink(f"{root_path}/d"):
                os.rename(f"{root_path}/d", f"{root_path}/moved")
                os.symlink(tmp_path / "outside", f"{root_path}/d")

    with opened(root_path, beneath=False) as root:
        monkeypatch.setattr(os, "readlink", swapped_after)
        with pytest.raises(Refused) as refused:
            resolve(root, RepoPath("d/f"))
        assert refused.value.code == "symlink_not_allowed"


def test_resolving_leaves_no_handle_open(tmp_path: Path, beneath: bool) -> None:
    root_path = plant(tmp_path / "root", {"d/f": "x", "l": Link("d/f"), "self": Link("self"), "out": Link("/etc")})
    with opened(root_path, beneath=beneath) as root:
        gc.collect()
        before = os.listdir("/proc/self/fd")
        for path in ("d/f", "l", "self", "out", "out/x", "none/x", "d/f/x", "self/x"):
            try:
                resolve(root, RepoPath(path)).close()
            except (OSError, Refused):
                continue
        assert os.listdir("/proc/self/fd") == before


names = st.sampled_from(["a", "b", "c"])
relative = st.lists(names | st.sampled_from(["..", "."]), min_size=1, max_size=4).map("/".join)
nodes: st.SearchStrategy[Node | str | None] = st.just("x") | st.none() | relative.map(Link)


@st.composite
def forests(draw: st.DrawFn) -> Sketch:
    """Files, directories and links at up to three levels; a path below a file or link is left out."""
    wanted = draw(st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), nodes, max_size=9))
    kept: dict[str, Node | str | None] = {}
    for path in sorted(wanted):
        above = [path.rsplit("/", count)[0] for count in range(1, path.count("/") + 1)]
        if all(kept.get(folder) is None for folder in above):
            kept[path] = wanted[path]
    return kept


@settings(max_examples=150)
@given(forests(), st.lists(names, min_size=1, max_size=4).map("/".join))
def test_both_ways_of_resolving_agree_with_the_kernel(sketch: Sketch, path: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root_path = plant(os.path.realpath(directory) + "/root", sketch)
        disks: list[Disk] = [HostDisk(root_path), HostDisk(root_path), SimulatedDisk(sketch)]
        disks[1].root = replace(disks[1].root, resolves_beneath=False)
        answers = [_answer(disk, path) for disk in disks]
        for disk in disks:
            disk.close()
        assert answers[0] == answers[1] == answers[2]
        assert answers[0] in (_kernels_answer(root_path, path), "symlink_not_allowed")


def _answer(disk: Disk, path: str) -> str:
    try:
        with disk.resolve(RepoPath(path)) as resolved:
            return resolved.path
    except OSError as error:
        return type(error).__name__
    except Refused as refused:
        return refused.code


def _kernels_answer(root_path: str, path: str) -> str:
    """`realpath` of the parent says where the kernel goes; opening says why it would not."""
    whole = os.path.join(root_path, path)
    try:
        with suppress(FileNotFoundError):
            os.stat(whole)  # `realpath` takes `file/..` for the folder of the file; the kernel does not
        return os.path.relpath(os.path.realpath(whole, strict=True), root_path)
    except FileNotFoundError:
        # Only the last name may be missing, wherever the links before it led.
        try:
            os.close(os.open(whole, os.O_CREAT | os.O_WRONLY))
        except OSError as error:
            return type(error).__name__
        return os.path.relpath(os.path.realpath(whole, strict=True), root_path)
    except OSError as error:
        return type(error).__name__


BIND = """
import os, subprocess, sys
from mulligan.values.paths import RepoPath
from mulligan.files.resolve import open_root, resolve
base = sys.argv[1]
subprocess.run(["mount", "--bind", base + "/real/deep", base + "/shown"], check=True)
subprocess.run(["mount", "--bind", base + "/real/deep", base + "/holder/inside"], check=True)
ways = [("/real", "deep/d/f"), ("/real/deep", "d/f"), ("/real/deep/d", "f"), ("/shown", "d/f"), ("/shown/d", "f"),
        ("/holder/inside", "d/f"), ("/holder", "inside/d/f")]
print(*[resolve(open_root(base + root), RepoPath(path)).place.decode() for root, path in ways], sep="\\n")
"""


def test_bind_mounts_of_one_directory_agree_on_a_place(tmp_path: Path) -> None:
    plant(tmp_path, {"real/deep/d/f": "x", "shown": None, "holder/inside": None})
    command = ["unshare", "--mount", "--map-root-user", sys.executable, "-c", BIND, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == {str(tmp_path / "real/deep/d/f")}


class TestResolvedPaths:
    """One after the other, they are what each would be by itself."""

    PATHS = ("a", "b", ".", "d/x", "d/y", "d/e/z", "d/é", "link/x", "none/x", "a/x", "d/x", "a")

    @staticmethod
    def told(resolved: ResolvedPath) -> tuple[object, ...]:
        parent = os.fstat(resolved.parent)
        return resolved.path, resolved.place, resolved.name, (parent.st_dev, parent.st_ino)

    @staticmethod
    def tried(find: Callable[[RepoPath], ResolvedPath], path: str) -> object:
        try:
            return TestResolvedPaths.told(find(RepoPath(path)))
        except (OSError, Refused) as error:
            return type(error)

    def test_are_the_same(self, tmp_path: Path) -> None:
        root = plant(str(tmp_path / "root"), {"a": "", "b": "", "d/x": "", "d/e/z": "", "link": Link("d")})
        disk = HostDisk(root)
        with Spots(disk) as spots:
            for path in self.PATHS:
                assert self.tried(spots.at, path) == self.tried(disk.resolve_exactly, path), path
        disk.close()

    def test_follow_a_directory_that_was_replaced_once_it_is_let_go(self, tmp_path: Path) -> None:
        root = plant(str(tmp_path / "root"), {"d/x": ""})
        disk = HostDisk(root)
        with Spots(disk) as spots:
            first = self.told(spots.at(RepoPath("d/x")))
            os.rename(tmp_path / "root/d", tmp_path / "root/old")
            os.mkdir(tmp_path / "root/d")
            assert self.told(spots.at(RepoPath("d/x"))) == first
            spots.let_go()
            assert self.told(spots.at(RepoPath("d/x"))) == self.told(disk.resolve_exactly(RepoPath("d/x"))) != first
        disk.close()
