"""Walking, and remembering a walk without ever telling what is no longer so."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest

from mulligan.files.tree.directories import Handles, Stamp, is_local, was_at_rest
from mulligan.files.tree.index import TreeCache
from mulligan.files.tree.walk import Walk
from mulligan.values.clock import FixedClock, SystemClock
from mulligan.values.paths import ROOT, RepoPath

LONG_AFTER = FixedClock(datetime(2999, 1, 1, tzinfo=UTC))
"""To this clock every directory has been at rest for ages, so that every listing is trusted."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def next_tick(root: Path) -> None:
    """Until the file system's clock has moved on, so that what was stamped before and after differs."""
    probe = root.parent / "probe"
    probe.touch()
    first = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == first:
        os.utime(probe)


def files(cache: TreeCache, fd: int, base: RepoPath = ROOT, include_ignored: bool = False) -> list[RepoPath]:
    walk = cache.walk(fd, base, include_ignored=include_ignored).finish()
    cache.remember(fd, walk)
    return walk.files


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def test_files_come_in_byte_order_of_whole_paths(root: Path, root_fd: int) -> None:
    names = ["a-b", "a.b", "a/x", "a/y/z", "a0", "b", "é", "\udce9", "\U0001f600", "\ue000", "Z/q", ".h/i"]
    make(root, *names)
    assert files(TreeCache(), root_fd) == sorted(names, key=os.fsencode)


def test_a_walk_leaves_out_git_ignored_files_links_and_special_files(root: Path, root_fd: int, tmp_path: Path) -> None:
    make(root, "a", ".git/config", "sub/.git", "sub/b", "ignored/c", "ignored/d", "x.log", "y.log")
    (root / ".gitignore").write_text("ignored/\n*.log\n")
    (root / "file-link").symlink_to("a")
    (root / "dir-link").symlink_to("sub")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    walk = TreeCache().walk(root_fd, ROOT).finish()
    assert walk.files == [".gitignore", "a", "sub/b"]
    assert (walk.pruned, walk.ignored_files) == (["ignored"], 2)
    assert files(TreeCache(), root_fd, include_ignored=True) == [
        *(".gitignore", "a", "ignored/c", "ignored/d", "sub/b", "x.log", "y.log")
    ]


def test_a_walk_reads_no_more_directories_than_needed(root: Path, root_fd: int) -> None:
    make(root, *(f"d{n}/f" for n in range(50)))
    gc.collect()
    open_before = os.listdir("/proc/self/fd")
    with TreeCache().walk(root_fd, ROOT) as walk:
        assert next(iter(walk)) == "d0/f"
        assert len(walk.files) == 1
        assert not walk.complete
    assert os.listdir("/proc/self/fd") == open_before


def test_a_walk_that_continues_stays_in_order(root: Path, root_fd: int) -> None:
    names = ["a", "b/c", "b/d/e", "b/f", "b/g/h", "b/i", "j"]
    make(root, *names)
    for count in range(len(names)):
        with TreeCache().walk(root_fd, ROOT) as walk:
            assert list(islice(walk, count)) == names[:count]
            assert walk.finish().files == list(walk) == names
            assert walk.file_count == len(names)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Fewer than a deep tree has directories, above those that this process has open already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 300), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_tree_is_walked_however_deep(root: Path, root_fd: int, few_descriptors: None) -> None:
    for depth in (150, 300, 450):
        folder = "/".join("d" * depth)
        make(root, f"{folder}/c/g", f"{folder}/e/g", f"{folder}/f")
    walk = TreeCache().walk(root_fd, ROOT).finish()
    assert [(path.count("/"), path[-3:]) for path in walk.files] == [
        *((151, "c/g"), (301, "c/g"), (451, "c/g"), (451, "e/g"), (450, "d/f")),
        *((301, "e/g"), (300, "d/f"), (151, "e/g"), (150, "d/f")),
    ]
    with Handles(root_fd) as handles:
        for path in walk.files:
            os.close(handles.open_file(path))
    assert walk.unreadable == []


def test_a_tree_is_walked_as_far_as_paths_go(root: Path, root_fd: int) -> None:
    fd = os.dup(root_fd)
    for _ in range(20):
        os.mkdir("d" * 255, dir_fd=fd)
        fd, above = os.open("d" * 255, os.O_RDONLY, dir_fd=fd), fd
        os.close(above)
    os.close(fd)
    assert TreeCache().walk(root_fd, ROOT).finish().unreadable == ["/".join(["d" * 255] * 17)]


def test_a_directory_that_is_gone_is_not_taken_for_one_above_it(root: Path, root_fd: int) -> None:
    make(root, "a/f", "f")
    with Handles(root_fd) as handles:
        with pytest.raises(FileNotFoundError):
            handles.directory("a/gone")
        assert os.path.samestat(os.fstat(handles.directory(ROOT)), root.stat())


@pytest.mark.parametrize("base", [".", "d"])
def test_ignore_files_above_the_root_are_read_every_time(root: Path, root_fd: int, base: str) -> None:
    make(root, "d/a", "d/b")
    make(root.parent, ".git/info/exclude")
    cache = TreeCache(LONG_AFTER)
    seen = []
    for name, rule in ((".gitignore", "a"), (".gitignore", "b"), (".git/info/exclude", "/root/d/a"), (".ignore", "!a")):
        (root.parent / name).write_text(rule)
        seen.append(files(cache, root_fd, RepoPath(base)))
    assert seen == [["d/b"], ["d/a"], [], ["d/a"]]
    (root.parent / ".gitignore").write_text("/root/d/b")
    (root.parent / ".ignore").unlink()
    assert files(cache, root_fd, RepoPath(base)) == []
    root.rename(root.with_name("moved"))
    assert files(cache, root_fd, RepoPath(base)) == ["d/a", "d/b"]
    shutil.rmtree(root.parent / ".git")
    assert files(cache, root_fd, RepoPath(base)) == ["d/a", "d/b"]


@pytest.mark.parametrize("name", [".gitignore", ".ignore", ".git/info/exclude"])
class TestIgnoreFilesAreReadEveryTime:
    def test_a_change_in_place_with_the_old_times(self, root: Path, root_fd: int, name: str) -> None:
        make(root, "a.log", "b.txt", name)
        (root / name).write_text("*.log")
        os.utime(root / name, ns=(1, 1))
        cache = TreeCache(LONG_AFTER)
        assert "a.log" not in files(cache, root_fd)
        (root / name).write_text("*.txt")
        os.utime(root / name, ns=(1, 1))
        seen = files(cache, root_fd)
        assert "a.log" in seen
        assert "b.txt" not in seen

    def test_a_new_or_a_removed_ignore_file_is_noticed(self, root: Path, root_fd: int, name: str) -> None:
        make(root, "a.log", "sub/b.log", ".git/info/x")
        cache = TreeCache(LONG_AFTER)
        assert "sub/b.log" in files(cache, root_fd)
        next_tick(root)
        (root / name).write_text("*.log")
        assert "sub/b.log" not in files(cache, root_fd)
        next_tick(root)
        (root / name).unlink()
        assert "sub/b.log" in files(cache, root_fd)

    def test_an_ignore_file_above_the_base_is_noticed(self, root: Path, root_fd: int, name: str) -> None:
        make(root, "sub/b.log", name)
        (root / name).write_text("*.log")
        cache = TreeCache(LONG_AFTER)
        assert files(cache, root_fd, RepoPath("sub")) == []
        (root / name).write_text("*.xyz")
        assert files(cache, root_fd, RepoPath("sub")) == ["sub/b.log"]


def test_an_unchanged_tree_is_not_listed_again(root: Path, root_fd: int) -> None:
    make(root, "a", "d/b", "d/e/c")
    cache = TreeCache(LONG_AFTER)
    first = files(cache, root_fd)
    next_tick(root)
    again = cache.walk(root_fd, ROOT)
    assert again.complete
    assert again.files == first
    make(root, "d/new")
    changed = cache.walk(root_fd, ROOT).finish()
    assert changed.files == ["a", "d/b", "d/e/c", "d/new"]
    assert listing(changed, "d/e") is listing(again, "d/e")
    assert listing(changed, "d") is not listing(again, "d")


def listing(walk: Walk, path: str) -> object:
    return walk.places[path].listing


def change(root: Path, rng: random.Random) -> None:
    """One change somebody might make: to files, directories, links or ignore files, at any depth."""
    folders = [root, *(path for path in sorted(root.rglob("*")) if path.is_dir() and not path.is_symlink())]
    place = rng.choice(folders)
    target = place / rng.choice(["a", "b", "c.log", "d", ".gitignore", ".ignore"])
    act = rng.randrange(6)
    if target.is_symlink() or (act == 0 and target.is_file()):
        target.unlink()
    elif target.is_dir():
        if act < 2:
            shutil.rmtree(target)
        else:
            target.rename(target.parent / f"m{rng.randrange(100)}") if act == 2 else make(target, "deep/er")
    elif act == 1 and target.name in "abd" and not target.exists():
        target.mkdir()
    elif act == 2 and not target.exists():
        target.symlink_to(rng.choice(folders))
    else:
        target.write_text(rng.choice(["*.log", "a", "!a\n", "d/", "/b", "deep", ""]))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("clock", [LONG_AFTER, SystemClock()], ids=["trusting", "real"])
def test_a_remembered_walk_always_equals_a_fresh_one(
    seed: int, clock: FixedClock | SystemClock, root: Path, root_fd: int
) -> None:
    """With the real clock changes follow each other within one tick; with the trusting one a tick is awaited."""
    rng = random.Random(seed)
    make(root, "a", "x/a", "x/y/c.log", "z/b")
    cache = TreeCache(clock)
    for _ in range(40):
        assert files(cache, root_fd) == files(TreeCache(), root_fd)
        assert files(cache, root_fd, include_ignored=True) == files(TreeCache(), root_fd, include_ignored=True)
        if clock is LONG_AFTER:
            next_tick(root)
        change(root, rng)


def test_the_cache_forgets_the_oldest(root: Path, root_fd: int) -> None:
    make(root, *(f"d{n}/f" for n in range(12)))
    cache = TreeCache(LONG_AFTER)
    for n in range(12):
        files(cache, root_fd, RepoPath(f"d{n}"))
    next_tick(root)
    assert not cache.walk(root_fd, RepoPath("d0")).complete
    assert cache.walk(root_fd, RepoPath("d11")).complete


class TestTrust:
    def test_a_directory_must_have_been_at_rest(self) -> None:
        changed_ns = 1_000_000_000_123_456_789
        stamp = Stamp(1, 2, changed_ns, changed_ns)
        assert not was_at_rest(stamp, changed_ns + 50_000_000)
        assert was_at_rest(stamp, changed_ns + 200_000_000)
        assert not was_at_rest(stamp, changed_ns - 1)

    def test_coarse_times_need_a_longer_rest(self) -> None:
        changed_ns = 1_000_000_000_000_000_000
        stamp = Stamp(1, 2, changed_ns, changed_ns)
        assert not was_at_rest(stamp, changed_ns + 2_000_000_000)
        assert was_at_rest(stamp, changed_ns + 3_000_000_000)

    def test_only_known_file_systems_are_trusted(self) -> None:
        proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert not is_local(proc)
        finally:
            os.close(proc)


def test_handles_never_pass_a_symlink(root: Path, root_fd: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    make(root, "d/e/f")
    (root / "out").symlink_to(tmp_path)
    (root / "d" / "up").symlink_to(tmp_path / "secret")
    with Handles(root_fd) as handles:
        os.close(handles.open_file("d/e/f"))
        for path in ("out/secret", "d/up", "d/e", "d/e/f/g", "nothing"):
            with pytest.raises(OSError):
                handles.open_file(path)
        os.close(handles.open_file("d/e/f"))
