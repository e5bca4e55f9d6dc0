"""What an index says, judged by the git that wrote it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.files.git import have_same_entries

QUIET = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}


class Repo:
    def __init__(self, root: Path, *, version: int, format: str) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", f"--object-format={format}", "-b", "main")
        for path in ("a", "d/aa", "d/ab", "d/" + "n" * 200, "e"):
            self.write(path, path)
        self.git("add", ".")
        self.git("-c", "user.name=u", "-c", "user.email=e", "commit", "-qm", "one")
        self.git("update-index", "--index-version", str(version))

    def git(self, *words: str, input: str | None = None) -> str:
        command = ["git", "-C", str(self.root), *words]
        env = {**os.environ, **QUIET}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env, input=input).stdout.strip()

    def write(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(exist_ok=True)
        (self.root / path).write_text(content)

    def index(self) -> bytes:
        return (self.root / ".git/index").read_bytes()

    def refresh(self) -> None:
        """As any look of git's does where it finds other times."""
        for path in ("a", "d/ab"):
            os.utime(self.root / path, (1, 1))
        self.git("status")

    def conflict(self) -> None:
        oid = self.git("rev-parse", ":a")
        self.git("update-index", "--index-info", input=f"0 {'0' * len(oid)}\ta\n100644 {oid} 2\ta\n100644 {oid} 3\ta\n")

    def intend(self) -> None:
        self.write("intended", "x")
        self.git("add", "-N", "intended")

    def stage(self) -> None:
        self.write("e", "other")
        self.git("add", "e")


Do = Callable[[Repo], object]
SAYING_ANOTHER_THING: dict[str, Do] = {
    "content": Repo.stage,
    "a new path that is only intended": Repo.intend,
    "a path less": lambda repo: repo.git("rm", "-q", "--cached", "d/aa"),
    "another mode": lambda repo: repo.git("update-index", "--chmod=+x", "a"),
    "stages": Repo.conflict,
    "assumed unchanged": lambda repo: repo.git("update-index", "--assume-unchanged", "a"),
    "not in the working tree": lambda repo: repo.git("update-index", "--skip-worktree", "d/aa"),
}


@pytest.fixture(params=[(2, "sha1"), (4, "sha1"), (2, "sha256"), (4, "sha256")], ids=str)
def repo(request: pytest.FixtureRequest, tmp_path: Path) -> Repo:
    version, format = request.param
    return Repo(tmp_path / "repo", version=version, format=format)


@pytest.mark.parametrize("what", ["nothing", *SAYING_ANOTHER_THING])
def test_a_refreshed_index_has_the_same_entries_and_a_changed_one_has_not(repo: Repo, what: str) -> None:
    first = repo.index()
    SAYING_ANOTHER_THING.get(what, Repo.refresh)(repo)
    changed = repo.index()
    assert first != changed and have_same_entries(first, changed) == (what == "nothing")
    os.utime(repo.root / "d/ab", (9, 9))
    repo.git("status")
    assert repo.index() != changed and have_same_entries(changed, repo.index())


def test_an_index_in_another_version_has_the_same_entries(repo: Repo) -> None:
    first = repo.index()
    for version in ("4", "2"):
        repo.git("update-index", "--index-version", version)
        assert have_same_entries(first, repo.index())
    repo.git("update-index", "--split-index")
    assert not have_same_entries(first, repo.index()), "the entries are in another file now"


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: b"DIRC\0\0\0\x02\0\0\0\x01" + data))
def test_an_unreadable_index_equals_none(data: bytes) -> None:
    assert not have_same_entries(data, data[:-1])


def test_a_torn_index_equals_none(repo: Repo) -> None:
    whole = repo.index()
    assert not any(have_same_entries(whole, whole[:size]) for size in range(len(whole)))
