"""A repository that wishes us ill, and a user whose settings do: nothing runs, nothing is written, nothing changes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace, git, open_snapshot_workspace
from tests.effects.snapshot_tools.test_snapshot_ids import EMPTY_ID

HOSTILE_NAMES = ["evil", "a=b", "sp ace", 'qu"ote', "ünï"]


def trap(workspace: SnapshotWorkspace) -> tuple[Path, Path]:
    """A program that leaves a mark when it runs, and the mark."""
    mark, program = workspace.root.parent / "ran", workspace.root.parent / "trap"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    return program, mark


def append_config(workspace: SnapshotWorkspace, text: str) -> None:
    with open(workspace.root / ".git/config", "a", encoding="utf-8") as config:
        config.write(text)


def stamps_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino, path.lstat().st_size)
        for path in sorted(folder.rglob("*"))
    }


def look_at_everything(workspace: SnapshotWorkspace) -> None:
    workspace.write("README.md", "changed\n")
    workspace.write("new.txt", "1\n")
    for tool, args in (
        ("snapshot.list", {"depth": 9}),
        ("snapshot.file", {"path": "README.md"}),
        ("snapshot.grep", {"pattern": "."}),
        ("snapshot.diff", {}),
        ("snapshot.diff", {"against": "index"}),
        ("snapshot.export", {"paths": ["."]}),
        ("workspace.write_file", {"path": "w", "content": "1"}),
    ):
        workspace.ok(tool, **args)
    workspace.ok("snapshot.changes", snapshot_id=workspace.snapshot("."))


@pytest.mark.req("D10.git_hardened", "D18.hostile_git")
def test_programs_configured_by_a_repository_do_not_run(repo: SnapshotWorkspace) -> None:
    program, mark = trap(repo)
    append_config(
        repo, f"[core]\n fsmonitor = {program}\n sshCommand = {program}\n pager = {program}\n editor = {program}\n"
    )
    append_config(
        repo, f"[diff]\n external = {program}\n[credential]\n helper = !{program}\n[gpg]\n program = {program}\n"
    )
    append_config(repo, f"[alias]\n status = !{program}\n[core]\n hooksPath = {repo.root.parent / 'hooks'}\n")
    attributes = []
    for name in HOSTILE_NAMES:
        quoted = name.replace('"', '\\"')
        for kind in ("filter", "diff", "merge"):
            append_config(repo, f'[{kind} "{quoted}"]\n required = true\n')
            append_config(repo, "".join(f" {key} = {program}\n" for key in ("clean", "smudge", "process", "driver")))
            append_config(repo, "".join(f" {key} = {program}\n" for key in ("command", "textconv")))
        attributes.append(f"* filter={name} diff={name} merge={name}" if " " not in name else "")
    repo.write(".gitattributes", "\n".join([*attributes, "* filter=evil diff=evil merge=evil"]) + "\n")
    look_at_everything(repo)
    assert not mark.exists()


@pytest.mark.req("D10.git_hardened")
@pytest.mark.parametrize("folder", [".git/hooks", "hooks"])
def test_hooks_do_not_run(repo: SnapshotWorkspace, folder: str) -> None:
    program, mark = trap(repo)
    hooks = repo.root / folder
    hooks.mkdir(exist_ok=True)
    append_config(repo, f"[core]\n hooksPath = {hooks}\n")
    for name in ("post-index-change", "pre-commit", "post-checkout", "fsmonitor-watchman", "reference-transaction"):
        os.symlink(program, hooks / name)
    look_at_everything(repo)
    assert not mark.exists()


@pytest.mark.req("D10.git_hardened")
def test_a_missing_object_is_not_fetched_from_a_remote_that_is_a_program(repo: SnapshotWorkspace) -> None:
    program, mark = trap(repo)
    append_config(repo, f'[extensions]\n partialClone = o\n[remote "o"]\n url = ext::{program}\n promisor = true\n')
    append_config(repo, '[protocol]\n allow = always\n[protocol "ext"]\n allow = always\n')
    for found in (repo.root / ".git/objects").rglob("*"):
        if found.is_file() and stat.S_ISREG(found.lstat().st_mode):
            found.chmod(0o600)
            found.unlink()
    for tool in ("snapshot.list", "snapshot.diff"):
        repo.ask(tool)
    assert not mark.exists()


@pytest.mark.req("D10.git_hardened")
def test_a_repository_cannot_choose_another_working_tree(repo: SnapshotWorkspace, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("1")
    append_config(repo, f"[core]\n worktree = {elsewhere}\n bare = true\n")
    append_config(repo, f"[include]\n path = {elsewhere / 'secret'}\n")
    assert repo.ok("snapshot.create", paths=[])["snapshot_id"] == EMPTY_ID


@pytest.mark.parametrize("name", ["HEAD", "index", "packed-refs", "info/exclude", "objects/info/alternates", "config"])
def test_a_fifo_in_the_git_directory_does_not_block(repo: SnapshotWorkspace, name: str) -> None:
    (repo.root / ".git" / name).unlink(missing_ok=True)
    os.mkfifo(repo.root / ".git" / name)
    fingerprint = repo.ok("snapshot.list")["fingerprint"]
    assert (fingerprint["head_oid"] == "") == (name != "config")
    assert repo.ok("snapshot.create", paths=["."])["manifest_stats"]["files"] == 2


@pytest.mark.req("D10.git_read_only", "C3.no_writes_to_git", "C18.first_call_keeps_status_clean")
def test_nothing_below_dot_git_is_written(repo: SnapshotWorkspace) -> None:
    git(repo.root, "add", "-A")
    repo.write("staged.txt", "new content that has no object yet")
    git(repo.root, "add", "staged.txt")
    os.utime(repo.root / "README.md", (1, 1))
    before = stamps_of(repo.root / ".git")
    status = git(repo.root, "--no-optional-locks", "status", "--porcelain")
    repo.ok("snapshot.list")
    repo.ok("snapshot.create", paths=["."])
    repo.ok("snapshot.diff")
    assert stamps_of(repo.root / ".git") == before
    assert git(repo.root, "--no-optional-locks", "status", "--porcelain") == status


CONTRARY = """
[core]
    autocrlf = true
    quotePath = false
    excludesFile = {ignore}
    attributesFile = {attributes}
    fileMode = false
    ignoreCase = true
    safecrlf = true
[status]
    showUntrackedFiles = no
    renames = false
    relativePaths = true
    branch = true
    showStash = true
    short = true
    submoduleSummary = true
[diff]
    noprefix = true
    mnemonicPrefix = true
    renames = false
    context = 0
    orderFile = {ignore}
    ignoreSubmodules = all
[column]
    ui = always
[color]
    ui = always
[apply]
    whitespace = fix
    ignoreWhitespace = change
"""


def state_of(workspace: SnapshotWorkspace) -> tuple[object, ...]:
    workspace.write("crlf.txt", b"a\r\nb\r\n")
    workspace.write("skipped.log", "1")
    workspace.write("sub/ünï.txt", "2")
    os.chmod(workspace.root / "README.md", 0o755)
    snapshot = workspace.ok("snapshot.create", paths=["."])
    return (
        snapshot,
        workspace.ok("snapshot.diff")["diff"],
        workspace.ok("snapshot.export", mode="snapshot", snapshot_id=snapshot["snapshot_id"]),
        workspace.ok("snapshot.grep", pattern="a|1", mode="snapshot", snapshot_id=snapshot["snapshot_id"]),
    )


@pytest.mark.req("D10.git_config_pinned", "C4.git_config_independent", "S2.export.deterministic")
def test_git_settings_do_not_change_any_answer(
    repo: SnapshotWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = state_of(repo)
    home = tmp_path / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / "ignore").write_text("*.log\n*.txt\n")
    (home / ".config/git/ignore").write_text("*\n")
    (home / "attributes").write_text("* text eol=crlf\n")
    contrary = CONTRARY.format(ignore=home / "ignore", attributes=home / "attributes")
    (home / ".gitconfig").write_text(contrary)
    append_config(repo, contrary)
    for name, value in {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "LC_ALL": "tr_TR.UTF-8",
        "LANG": "tr_TR.UTF-8",
        "TZ": "Pacific/Apia",
        "GIT_DIR": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent",
        "GIT_WORK_TREE": "/",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "status.showUntrackedFiles",
        "GIT_CONFIG_VALUE_0": "no",
    }.items():
        monkeypatch.setenv(name, value)
    umask = os.umask(0o077)
    try:
        with open_snapshot_workspace(repo.root, tmp_path / "store2") as again:
            assert state_of(again) == plain
    finally:
        os.umask(umask)
