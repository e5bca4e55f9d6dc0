"""Where a path really leads: our two ways of resolving agree with the system's own, inside the root."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mulligan.files.disk import HostDisk
from mulligan.files.resolve import ResolvedPath, resolve, resolve_exactly
from mulligan.testing import Link, plant
from mulligan.testing.builders import Sketch
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath, parse_repo_path

NAMES = st.sampled_from(["a", "b", "d", "l", "m", "n"])
TARGETS = st.lists(NAMES | st.sampled_from(["..", "."]), min_size=1, max_size=4).map("/".join)
LINKS = st.dictionaries(
    st.sampled_from(["l", "m", "n", "d/l", "d/m", "d/d/l"]), TARGETS | TARGETS.map("{root}/".__add__), max_size=6
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
ENGINES = (True, False)


@contextmanager
def opened(base: str, links: dict[str, str]) -> Iterator[HostDisk]:
    root = os.path.join(base, "work")
    sketch: Sketch = {"a": "a", "d/a": "da", "d/d/a": "dda", "d/b/a": "dba"}
    plant(root, {**sketch, **{path: Link(target.replace("{root}", root)) for path, target in links.items()}})
    plant(base, {"a": "outside", "d/a": "outside"})
    disk = HostDisk(root)
    try:
        yield disk
    finally:
        disk.close()


def truth(root: str, path: str) -> str | None:
    """What the kernel makes of it: an absolute path, or None if there is nothing."""
    try:
        handle = os.open(os.path.join(root, path), os.O_PATH)
    except OSError:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def found(disk: HostDisk, path: str, *, beneath: bool) -> str | None:
    root = replace(disk.root, resolves_beneath=beneath)
    try:
        with resolve(root, parse_repo_path(path)) as spot:
            os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False)
            return os.path.normpath(os.path.join(os.fsdecode(root.path), spot.path))
    except OSError:
        return None
    except Refused as refused:
        assert (refused.status, refused.code) == ("forbidden", "symlink_not_allowed")
        return "refused"


@settings(max_examples=300)
@given(LINKS, PATHS)
@example({"l": "d/d", "m": "l/../a"}, "m")
@example({"l": "..", "m": "l/work/a"}, "m")
@example({"l": "."}, "l/l/l/a")
@example({"l": "d/.."}, "l")
@example({"l": "{root}/d"}, "l/a")
def test_a_path_inside_resolves_as_in_the_kernel(links: dict[str, str], path: str) -> None:
    with tempfile.TemporaryDirectory() as base, opened(base, links) as disk:
        root = os.fsdecode(disk.root.path)
        real = truth(root, path)
        for beneath in ENGINES:
            got = found(disk, path, beneath=beneath)
            if real is None:
                assert got in (None, "refused")
            elif real == root or real.startswith(root + "/"):
                assert got == real
            else:
                assert got == "refused"


@pytest.mark.parametrize("beneath", ENGINES)
def test_a_recorded_path_contains_no_link(tmp_path: Path, beneath: bool) -> None:
    with opened(str(tmp_path), {"l": "d", "m": "a"}) as disk:
        root = replace(disk.root, resolves_beneath=beneath)
        with pytest.raises(Refused):
            resolve_exactly(root, RepoPath("l/a"))
        for path in ("m", "d/a", "a", "d/no", "."):
            with resolve_exactly(root, RepoPath(path)) as spot:
                assert spot.path == path
        for path in ("no/a", "a/a"):
            with pytest.raises((FileNotFoundError, NotADirectoryError)):
                resolve_exactly(root, RepoPath(path))


@pytest.mark.parametrize("beneath", ENGINES)
def test_a_permitted_path_outside_is_marked(tmp_path: Path, beneath: bool) -> None:
    with opened(str(tmp_path), {"l": "..", "d/m": "../l/d", "n": "/"}) as disk:
        root = replace(disk.root, resolves_beneath=beneath)
        expected = {"l/a": ("l/a", b"a"), "d/m/a": ("l/d/a", b"a"), "l": ("l", None), "n": ("n", b".")}
        for path, (shown, name) in expected.items():
            spot: ResolvedPath = resolve(root, RepoPath(path), follow="allow")
            with spot:
                assert (spot.path, spot.outside) == (shown, True)
                assert name is None or spot.name == name
        with resolve(root, RepoPath("d/a"), follow="allow") as inside:
            assert not inside.outside


def test_no_handle_is_left_open(tmp_path: Path) -> None:
    with opened(str(tmp_path), {"l": "..", "m": "d", "n": "n"}) as disk:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for beneath in ENGINES:
            root = replace(disk.root, resolves_beneath=beneath)
            for path in ("l/a", "m/a", "n", "n/a", "no/no", "a/a", "d/d/a", "m", "x" * 300 + "/a"):
                try:
                    resolve(root, RepoPath(path)).close()
                except (Refused, OSError):
                    continue
        assert len(os.listdir("/proc/self/fd")) == before
