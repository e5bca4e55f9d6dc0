"""A fork copies what is inside the root and nothing else, whatever is renamed while it copies."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

import mulligan
from mulligan.testing import plant

SECRET = "outside the root"


class Swapper:
    """Exchanges a folder and a symbolic link that leads out of the root, just before the process opens something."""

    def __init__(self, root: Path, outside: Path) -> None:
        self._root, self._outside = root, outside
        self._random: random.Random | None = None
        self._is_link = False
        self.swaps = 0
        sys.addaudithook(self._hear)

    def begin(self, seed: int) -> None:
        self._random = random.Random(seed)

    def end(self) -> None:
        self._random = None
        if self._is_link:
            self._swap()

    def _hear(self, event: str, _: object) -> None:
        if self._random is None or event not in ("os.listdir", "os.scandir", "open", "os.mkdir"):
            return
        if self._random.random() < (0.7 if event != "open" else 0.2):
            self._swap()

    def _swap(self) -> None:
        self.swaps += 1
        if self._is_link:
            os.unlink(self._root / "d")
            os.rename(self._root / "aside", self._root / "d")
        else:
            os.rename(self._root / "d", self._root / "aside")
            os.symlink(self._outside, self._root / "d")
        self._is_link = not self._is_link


@pytest.mark.req("D6.fork_stays_inside")
def test_a_folder_that_becomes_a_link_to_the_outside_is_not_copied_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "work", tmp_path / "outside"
    inside = {f"d/{name}": f"inside {name}" for name in ("a", "b", "e/c", "e/f/g")}
    plant(root, {**inside, "z": "z"})
    plant(outside, dict.fromkeys(("a", "b", "secret", "e/c", "e/f/g", "e/f/secret"), SECRET))
    with mulligan.open(str(root), store=str(tmp_path / "home")) as m:
        swapper = Swapper(root, outside)
        for seed in range(15):
            swapper.begin(seed)
            try:
                child = m.session().fork(files="copy", to=str(tmp_path / f"copy {seed}"))
            finally:
                swapper.end()
            copy = tmp_path / f"copy {seed}"
            files = [Path(folder) / name for folder, _, names in os.walk(copy) for name in names]
            assert [path for path in files if not path.is_symlink() and path.read_text() == SECRET] == [], seed
            assert (copy / "z").read_text() == "z"
            child.drop()
        assert swapper.swaps > 100


@pytest.mark.req("D6.fork_stays_inside")
def test_a_link_is_copied_as_a_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "work", tmp_path / "outside"
    plant(root, {"a": "a", "d/b": "b"})
    plant(outside, {"secret": SECRET})
    os.symlink(outside, root / "folder")
    os.symlink(outside / "secret", root / "d" / "file")
    with mulligan.open(str(root), store=str(tmp_path / "home")) as m:
        m.session().fork(files="copy", to=str(tmp_path / "copy"))
    assert os.readlink(tmp_path / "copy" / "folder") == str(outside)
    assert os.readlink(tmp_path / "copy" / "d" / "file") == str(outside / "secret")
