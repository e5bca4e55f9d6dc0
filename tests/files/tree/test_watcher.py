"""A watched tree is asked nothing and still never answered wrongly."""

from __future__ import annotations

import gc
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from mulligan.files.kernel import exchange
from mulligan.files.search.glob import FileTimes, GlobResult, glob
from mulligan.files.search.grep import GrepOptions, grep
from mulligan.files.tree import index, watcher
from mulligan.files.tree.index import TreeCache
from mulligan.files.tree.walk import Walk, WalkScope
from mulligan.values.globs import parse_glob
from mulligan.values.paths import ROOT, RepoPath

MANY = 20_000
"""More events than the kernel queues."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """However small the tree, it is watched."""
    monkeypatch.setattr(index, "DIRECTORIES_MIN", 0)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def make(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
        os.utime(root / name, ns=(number, number))


def everything(fd: int, cache: TreeCache, pattern: str = "**") -> GlobResult:
    return glob(fd, ROOT, pattern, cache=cache, max_results=10_000)


class Looks:
    """How often files and directories were asked for anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("stat", "scandir"):
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, real: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            self.count += 1
            return real(*args, **options)

        return counted


def test_a_tree_in_which_nothing_happens_is_not_read_again(
    root: Path, root_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(root, *(f"d{number}/f{number}" for number in range(50)))
    cache = TreeCache()
    first = everything(root_fd, cache)
    looks = Looks(monkeypatch)
    assert everything(root_fd, cache) == first
    assert looks.count == 0
    os.utime(root / "d7" / "f7")
    assert everything(root_fd, cache).paths[0] == "d7/f7"
    assert looks.count == 1


def replace_file(root: Path) -> None:
    make(root, "d/t")
    (root / "d/t").rename(root / "d/a")


def replace_directory(root: Path) -> None:
    shutil.rmtree(root / "d")
    make(root, "d/a", "d/other")


def turn_into_a_directory(root: Path) -> None:
    (root / "d/a").unlink()
    make(root, "d/a/b")


def turn_into_a_link(root: Path) -> None:
    (root / "d/a").unlink()
    (root / "d/a").symlink_to("b")


def write_through_a_new_name(root: Path) -> None:
    os.link(root / "d/a", root / "e/also")
    os.utime(root / "e/also")


def write_through_a_passing_name(root: Path, *later: str) -> None:
    """Each of the later names takes over from the one before; the last is gone in the end."""
    os.link(root / "d/a", root / "e/also")
    os.utime(root / "e/also")
    last = root / "e/also"
    for name in later:
        last = last.rename(root / name)
    last.unlink()


def write_through_a_name_that_is_taken_over(root: Path) -> None:
    os.link(root / "d/a", root / "e/also")
    os.utime(root / "e/also")
    make(root, "e/other")
    (root / "e/other").rename(root / "e/also")


def write_through_a_name_that_is_exchanged(root: Path) -> None:
    os.link(root / "d/a", root / "e/also")
    os.utime(root / "e/also")
    make(root, "e/other")
    exchange(0, bytes(root / "e/also"), bytes(root / "e/other"))
    (root / "e/other").unlink()


def write_through_a_name_in_a_new_directory(root: Path) -> None:
    (root / "e/new").mkdir()
    os.link(root / "d/a", root / "e/new/also")
    os.utime(root / "e/new/also")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a new file": lambda root: (root / "d/new").touch(),
    "a file gone": lambda root: (root / "d/a").unlink(),
    "a file written": lambda root: (root / "d/a").write_text("more"),
    "a time set": lambda root: os.utime(root / "d/a"),
    "a file moved": lambda root: (root / "d/a").rename(root / "e/z"),
    "a file replaced": replace_file,
    "a directory moved": lambda root: (root / "d").rename(root / "m"),
    "a directory moved away": lambda root: (root / "d").rename(root.parent / "away"),
    "a directory replaced": replace_directory,
    "a file becomes a directory": turn_into_a_directory,
    "a link instead of a file": turn_into_a_link,
    "a new name of a file": write_through_a_new_name,
    "a name that passes": write_through_a_passing_name,
    "a name that passes and moves": lambda root: write_through_a_passing_name(root, "d/one", "two"),
    "a name that passes and moves to and fro": lambda root: write_through_a_passing_name(root, "e/t", "e/also"),
    "a name that passes outside": lambda root: write_through_a_passing_name(root, "../outside"),
    "a name that is taken over": write_through_a_name_that_is_taken_over,
    "a name that is exchanged": write_through_a_name_that_is_exchanged,
    "a name in a new directory": write_through_a_name_in_a_new_directory,
    "a file hidden by rules": lambda root: (root / "d/.gitignore").write_text("a\n"),
    "rules of git": lambda root: (root / ".git/info/exclude").write_text("a\n"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_seen_at_once(what: str, root: Path, root_fd: int) -> None:
    make(root, "d/a", "d/b", "d/s/c", "e/f", "top", ".git/info/x")
    cache = TreeCache()
    assert everything(root_fd, cache) == everything(root_fd, cache)
    CHANGES[what](root)
    seen = everything(root_fd, cache)
    assert seen == everything(root_fd, TreeCache())
    assert everything(root_fd, cache) == seen


@pytest.mark.parametrize("way", ["rename", "exchange"])
def test_a_save_through_a_draft_makes_no_other_file_be_checked(
    way: str, root: Path, root_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(root, "a", *(f"d/f{number}" for number in range(50)))
    cache = TreeCache()
    everything(root_fd, cache)
    (root / ".draft").write_text("new")
    if way == "rename":
        (root / ".draft").rename(root / "a")
    else:
        exchange(0, bytes(root / ".draft"), bytes(root / "a"))
        (root / ".draft").unlink()
    looks = Looks(monkeypatch)
    assert everything(root_fd, cache).paths[0] == "a"
    assert looks.count < 10


def test_a_new_file_in_a_moved_directory_is_found_at_its_new_path(root: Path, root_fd: int) -> None:
    make(root, "d/a", "d/s/c", "e/f")
    cache = TreeCache()
    everything(root_fd, cache)
    (root / "d").rename(root / "m")
    everything(root_fd, cache)
    for late in ("m/s/late", "d/again"):
        make(root, late)
        assert late in everything(root_fd, cache).paths


def test_a_change_through_another_name_of_a_file_is_seen(root: Path, root_fd: int) -> None:
    make(root, "a", "b", "c")
    os.link(root / "b", root.parent / "elsewhere")
    cache = TreeCache()
    everything(root_fd, cache)
    os.utime(root.parent / "elsewhere")
    assert everything(root_fd, cache).paths[0] == "b"


def test_a_write_through_a_memory_map_is_found_after_the_map_is_closed(root: Path, root_fd: int) -> None:
    make(root, "a", "b", "c")
    cache = TreeCache()
    fd = os.open(root / "b", os.O_RDWR)
    memory = mmap.mmap(fd, 1)
    os.close(fd)
    everything(root_fd, cache)
    memory[0] = 7
    memory.close()
    assert everything(root_fd, cache).paths[0] == "b"


def test_changes_beyond_the_kernels_queue_are_found(root: Path, root_fd: int) -> None:
    make(root, "a", "b", "d/c")
    cache = TreeCache()
    everything(root_fd, cache)
    for number in range(MANY):
        os.utime(root / ("a", "b")[number % 2])
    make(root, "d/unheard")
    for _ in range(2):
        assert everything(root_fd, cache) == everything(root_fd, TreeCache())
    make(root, "d/heard")
    assert "d/heard" in everything(root_fd, cache).paths


def test_where_there_are_no_watches_to_be_had_every_look_is_taken(
    root: Path, root_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "DIRECTORIES_MAX", 2)
    make(root, "a", "d/b", "e/c", "f/d")
    cache = TreeCache()
    for late in ("d/x", "f/y"):
        assert everything(root_fd, cache) == everything(root_fd, TreeCache())
        make(root, late)
        assert late in everything(root_fd, cache).paths


def test_a_forked_child_takes_no_events_of_its_parent(root: Path, root_fd: int) -> None:
    make(root, "a", "d/b")
    cache = TreeCache()
    everything(root_fd, cache)
    make(root, "d/late")
    child = os.fork()
    if child == 0:
        os._exit(0 if "d/late" in everything(root_fd, cache).paths else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "d/late" in everything(root_fd, cache).paths


def watch_descriptors() -> set[str]:
    """Those of inotify. Other descriptors of the process come and go with other tests' garbage."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "inotify" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


def test_descriptors_go_with_the_cache(root: Path, root_fd: int) -> None:
    make(root, "a", "d/b")
    gc.collect()
    before = watch_descriptors()
    caches = [TreeCache() for _ in range(5)]
    for cache in caches:
        everything(root_fd, cache)
    assert len(watch_descriptors()) == len(before) + 5
    for base in ("d", "e", "f", "g"):
        make(root, f"{base}/x")
        glob(root_fd, RepoPath(base), "**", cache=caches[0])
    assert len(watch_descriptors()) == len(before) + 5 - 1 + index.WATCHED_WALKS_MAX
    caches.clear()
    del cache
    assert watch_descriptors() == before


def change(root: Path, rng: random.Random) -> None:
    """Something somebody might do, to files, directories, links, modes or rules, at any depth."""
    folders = [root, *(path for path in sorted(root.rglob("*")) if path.is_dir() and not path.is_symlink())]
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    place = rng.choice(folders)
    target = place / rng.choice(["a", "b", "c.log", "d", ".gitignore", "e"])
    act = rng.randrange(9)
    if act == 0 and files:
        rng.choice(files).write_text("written")
    elif act == 1 and files:
        os.utime(rng.choice(files), ns=(rng.randrange(5), rng.randrange(5)))
    elif act == 2 and files:
        rng.choice(files).unlink()
    elif act == 3 and place != root:
        shutil.rmtree(place)
    elif act == 4 and place != root:
        place.rename(root / f"m{rng.randrange(100)}")
    elif act == 5 and files and not target.exists():
        os.link(rng.choice(files), target)
    elif not target.is_dir() and not target.is_symlink():
        target.write_text(rng.choice(["*.log", "a", "!a\n", "d/", ""]))
    else:
        make(place, f"n{rng.randrange(9)}/deep/er")


@pytest.mark.parametrize("seed", range(10))
def test_a_watched_tree_always_gives_the_answer_of_a_fresh_look(seed: int, root: Path, root_fd: int) -> None:
    rng = random.Random(seed)
    make(root, "a", "x/a", "x/y/c.log", "z/b")
    cache = TreeCache()
    for _ in range(60):
        pattern = rng.choice(["**", "**/*.log", "**/a", "x/**"])
        assert everything(root_fd, cache, pattern) == everything(root_fd, TreeCache(), pattern)
        if rng.random() < 0.2:
            assert (
                grep(root_fd, ROOT, "w", GrepOptions(cache=cache)).lines
                == grep(root_fd, ROOT, "w", GrepOptions(cache=TreeCache())).lines
            )
        for _ in range(rng.randrange(4)):
            change(root, rng)


def walked(fd: int, cache: TreeCache) -> Walk:
    """As far as somebody gets before others have their turn."""
    return cache.walk(fd, ROOT, ways=WalkScope(None, FileTimes(parse_glob("**"), 0)))


def test_a_walk_is_not_kept_when_what_was_heard_during_it_is_not(root: Path, root_fd: int) -> None:
    make(root, "d/f")
    cache = TreeCache()
    also_first = walked(root_fd, cache)
    everything(root_fd, cache)
    make(root, "d/gone")
    late = walked(root_fd, cache)
    late.finish()
    (root / "d" / "gone").unlink()
    walked(root_fd, cache)
    for walk in (also_first, late):
        walk.finish()
        cache.remember(root_fd, walk)
    assert everything(root_fd, cache).paths == ("d/f",)


def test_a_writer_finds_its_change_with_many_parallel_readers(root: Path, root_fd: int) -> None:
    make(root, *(f"d{number}/f" for number in range(20)))
    cache = TreeCache()

    def work(who: int) -> list[str]:
        missed = []
        for turn in range(40):
            name = f"d{(who * 5 + turn) % 20}/w{who}-{turn}"
            (root / name).write_text("x")
            if name not in everything(root_fd, cache).paths:
                missed.append(name)
            (root / name).unlink()
            if name in everything(root_fd, cache).paths:
                missed.append(f"not {name}")
        return missed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[], [], [], []]
