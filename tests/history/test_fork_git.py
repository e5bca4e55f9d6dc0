"""A fork of files whose `.git` is only a pointer: the copy has a git directory of its own, and the original is safe."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mulligan import api as opening
from mulligan.effects.session import DurableSession
from mulligan.history.branches import merge_branch
from mulligan.testing import tree_of
from tests.exec.commands import git, repository


@pytest.fixture
def main(tmp_path: Path) -> Path:
    root = tmp_path / "main"
    root.mkdir()
    repository(root, {"a": "1\n"})
    return root


@pytest.fixture
def worktree(main: Path, tmp_path: Path) -> Path:
    """A second worktree on a branch of its own, with something stashed, staged and not staged."""
    (main / "a").write_text("stashed\n")
    git(main, "stash", "-q")
    git(main, "worktree", "add", "-q", "-b", "worktrees/side", str(tmp_path / "side"))
    root = tmp_path / "side"
    (root / "staged").write_text("staged\n")
    git(root, "add", "staged")
    (root / "a").write_text("dirty\n")
    return root


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[list[opening.Mulligan]]:
    found: list[opening.Mulligan] = []
    yield found
    for opened in found:
        opened.close()


def forked(forks: list[opening.Mulligan], root: Path, tmp_path: Path) -> tuple[DurableSession, Path]:
    opened = opening.open(str(root), store=str(tmp_path / "home"))
    forks.append(opened)
    copy = tmp_path / "copy"
    opened.session("s").fork(files="copy", to=str(copy), dst="kid")
    return opened.session("s"), copy


def state(root: Path) -> list[str]:
    questions = (
        "rev-parse HEAD",
        "branch --show-current",
        "status --porcelain",
        "stash list",
        "log --all --format=%H%d",
    )
    return [git(root, *question.split()) for question in questions]


@pytest.mark.req("D6.fork_copy_git_file")
class TestOfAWorktree:
    def test_it_is_a_repository_in_the_same_state(
        self, forks: list[opening.Mulligan], worktree: Path, tmp_path: Path
    ) -> None:
        before = state(worktree)
        _, copy = forked(forks, worktree, tmp_path)
        assert (worktree / ".git").is_file() and (copy / ".git").is_dir()
        assert state(copy) == before
        assert git(copy, "rev-parse", "--git-common-dir").strip() == ".git"
        git(copy, "fsck", "--strict")

    def test_what_is_done_there_reaches_nothing_of_the_original(
        self, forks: list[opening.Mulligan], main: Path, worktree: Path, tmp_path: Path
    ) -> None:
        session, copy = forked(forks, worktree, tmp_path)
        before = tree_of(main / ".git")
        (copy / "a").write_text("in the copy\n")
        git(copy, "commit", "-qam", "in the copy")
        git(copy, "tag", "here")
        git(copy, "gc", "-q")
        assert tree_of(main / ".git") == before
        assert merge_branch(session._open_root, "kid").ok
        assert (worktree / "a").read_text() == "in the copy\n"
        assert (worktree / ".git").is_file() and tree_of(main / ".git") == before

    def test_what_the_first_worktree_is_in_the_middle_of_is_not_taken_along(
        self, forks: list[opening.Mulligan], main: Path, worktree: Path, tmp_path: Path
    ) -> None:
        (main / ".git" / "MERGE_HEAD").write_text(git(main, "rev-parse", "HEAD"))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(main / ".git" / "info" / "ipc"))
            _, copy = forked(forks, worktree, tmp_path)
        assert not (copy / ".git" / "MERGE_HEAD").exists() and not (copy / ".git" / "worktrees").exists()
        assert not (copy / ".git" / "info" / "ipc").exists()


@pytest.mark.req("D6.fork_copy_git_file")
def test_of_a_submodule(forks: list[opening.Mulligan], main: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    repository(outer, {"o": "1\n"})
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(main), "sub")
    git(outer, "commit", "-qm", "with a submodule")
    before = state(outer / "sub")
    _, copy = forked(forks, outer, tmp_path)
    assert (outer / "sub" / ".git").is_file() and (copy / "sub" / ".git").is_dir()
    assert state(copy / "sub") == before
    assert git(copy / "sub", "rev-parse", "--show-toplevel").strip() == str(copy / "sub")
    git(copy / "sub", "commit", "-q", "--allow-empty", "-m", "in the copy")
    assert state(outer / "sub") == before


@pytest.mark.parametrize("text", ["gitdir: /", "gitdir: ../secrets", "gitdir: nowhere", "anything", ""])
def test_a_pointer_to_what_is_no_repository_is_copied_as_it_is(
    forks: list[opening.Mulligan], tmp_path: Path, text: str
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    (tmp_path / "work" / ".git").write_text(text)
    _, copy = forked(forks, tmp_path / "work", tmp_path)
    assert (copy / ".git").read_text() == text
