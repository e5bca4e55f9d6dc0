"""Everything a path can be: kept by a call that changes it, and brought back by one that fails or is undone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CALLS
from mulligan.history.undo import UndoResult
from mulligan.store.verify import verify
from mulligan.testing import Dir, File, HostPerson, Link, Tree, contents_of, plant, tree_of
from mulligan.values.clock import SystemClock
from tests.temp_workspace import TempWorkspace, open_temp_workspace

NAME = os.fsdecode(b"caf\xe9.txt")
MANY: dict[str, File | Link | Dir | str | bytes | None] = {
    "text.txt": File(b"text\n", 0o640, 1_600_000_000_123_456_789),
    "crlf.txt": File(b"one\r\ntwo\r\n", mtime_ns=1_600_000_001_000_000_000),
    "binary.bin": File(bytes(range(256)) * 40, mtime_ns=1_600_000_002_000_000_000),
    "run.sh": File(b"#!/bin/sh\n", 0o750),
    "private": File(b"secret", 0o600),
    "empty.txt": File(b""),
    NAME: File(b"latin-1 name"),
    "link": Link("text.txt"),
    "dangling": Link("nowhere/at all"),
    "d/empty": Dir(0o700),
    "d/sub/x.txt": File(b"x", 0o444),
    ".gitignore": File(b"ignored.log\n"),
    "ignored.log": File(b"ignored", mtime_ns=1_600_000_003_000_000_000),
}


class Leaving(Exception):
    """What a tool raises."""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path)
    plant(workspace.root, MANY)
    yield workspace
    assert list(verify(workspace.open_root.ledger.store, SCHEMA)) == []
    workspace.close()


def wire(path: str) -> str:
    from mulligan.values.paths import RepoPath, to_wire

    return to_wire(RepoPath(path))


def file_times(tree: Tree) -> dict[str, int]:
    return {path: node.mtime_ns for path, node in tree.items() if isinstance(node, File)}


class TestComingBack:
    @pytest.mark.req("D6.mtime_on_abort", "W3.empty_dir_survives", "W10.mtime_handled", "H3.capture_fails_closed")
    def test_a_failed_call_that_deleted_everything_brings_everything_back_times_included(
        self, workspace: TempWorkspace
    ) -> None:
        before = tree_of(workspace.root, times=True)
        with pytest.raises(Leaving), workspace.session().call() as call:
            for path in sorted(os.listdir(workspace.root)):
                assert call.delete(wire(path), recursive=True).ok
            assert os.listdir(workspace.root) == []
            raise Leaving
        after = tree_of(workspace.root, times=True)
        assert tree_of(workspace.root) == {path: _timeless(node) for path, node in before.items()}
        assert file_times(after) == file_times(before)
        assert after["d/empty"] == before["d/empty"]

    @pytest.mark.req("D6.modes_restored", "D6.symlinks_restored", "D6.empty_dirs_restored", "D6.ignored_restored")
    @pytest.mark.req("D6.binary_restored", "W1.ignored_files_survive", "W2.ignored_edit_restored", "W9.modes_exact")
    @pytest.mark.req("W7.crlf_kept_with_attributes", "H16.created_parents_removed", "D6.mtime_on_undo")
    def test_undo_of_a_call_that_deleted_everything_brings_everything_back(self, workspace: TempWorkspace) -> None:
        before = tree_of(workspace.root, times=True)
        with workspace.session().call() as call:
            for path in sorted(os.listdir(workspace.root)):
                assert call.delete(wire(path), recursive=True).ok
        done = workspace.session().undo()
        assert {outcome.outcome for outcome in done.outcomes} == {"restored"}
        assert tree_of(workspace.root) == {path: _timeless(node) for path, node in before.items()}
        assert file_times(tree_of(workspace.root, times=True)) == file_times(before)

    def test_undo_of_writes_and_moves_brings_the_old_back(self, workspace: TempWorkspace) -> None:
        before = tree_of(workspace.root)
        with workspace.session().call() as call:
            assert call.write_file("text.txt", "new").ok
            assert call.write_file(wire(NAME), b"\xff\xfe").ok
            assert call.move("binary.bin", "moved/there.bin").error_code == "parent_not_found"
            assert call.mkdir("moved").ok
            assert call.move("binary.bin", "moved/there.bin").ok
            assert call.move("d", "moved/d").ok
            assert call.move("link", "moved/link").ok
            assert call.delete("dangling").ok
        changed = tree_of(workspace.root)
        assert changed["moved/link"] == Link("text.txt") and changed["moved/d/sub/x.txt"] == File(b"x", 0o444)
        assert workspace.session().undo().ok
        assert tree_of(workspace.root) == before
        assert workspace.session().redo().ok
        assert tree_of(workspace.root) == changed

    @pytest.mark.req("D6.untouched_mtimes_kept")
    def test_nothing_but_the_changed_paths_is_touched(self, workspace: TempWorkspace) -> None:
        before = tree_of(workspace.root, times=True)
        with workspace.session().call() as call:
            call.write_file("text.txt", "new")
        workspace.session().undo()
        after = tree_of(workspace.root, times=True)
        assert [path for path in before if after[path] != before[path]] == []

    @pytest.mark.req("D6.mtime_on_undo")
    def test_times_return_on_undo_only_if_nothing_else_was_recorded_since(self, workspace: TempWorkspace) -> None:
        old = os.stat(workspace.root / "text.txt").st_mtime_ns
        session = workspace.session()
        with session.call() as first:
            first.write_file("text.txt", "new")
        with session.call() as second:
            second.write_file("private", "new")
        session.undo(first.id)
        assert os.stat(workspace.root / "text.txt").st_mtime_ns > old
        assert contents_of(workspace.root)["text.txt"] == b"text\n"

    @pytest.mark.req("D6.mtime_on_undo")
    @pytest.mark.parametrize(
        ("path", "returns"), [("out", False), ("private", False), ("d/new/out", False), (".git/index", True)]
    )
    def test_times_return_on_undo_only_if_nothing_else_was_built_since(
        self, workspace: TempWorkspace, path: str, returns: bool
    ) -> None:
        """Else a build tool would take what was built of the undone content for up to date."""
        (workspace.root / path).parent.mkdir(exist_ok=True)
        old = os.stat(workspace.root / "text.txt").st_mtime_ns
        with workspace.session().call() as call:
            call.write_file("text.txt", "new")
        built, ended_ns = workspace.root / path, SystemClock().now().timestamp() * 1e9
        while not built.exists() or os.stat(built).st_ctime_ns <= ended_ns:
            built.write_text("built")
        assert workspace.session().undo().ok
        assert (os.stat(workspace.root / "text.txt").st_mtime_ns == old) is returns

    @pytest.mark.req("D6.mtime_on_undo")
    def test_times_do_not_return_where_a_short_look_cannot_tell(self, workspace: TempWorkspace) -> None:
        old = os.stat(workspace.root / "text.txt").st_mtime_ns
        plant(workspace.root, {f"many/{number}": "" for number in range(1_000)})
        with workspace.session().call() as call:
            call.write_file("text.txt", "new")
        assert workspace.session().undo().ok
        assert os.stat(workspace.root / "text.txt").st_mtime_ns > old

    @pytest.mark.req("D6.mtime_on_undo")
    def test_times_return_when_a_whole_turn_is_undone(self, workspace: TempWorkspace) -> None:
        before = file_times(tree_of(workspace.root, times=True))
        session = workspace.session()
        with session.turn():
            with session.call() as call:
                call.write_file("text.txt", "new")
            with session.call() as call:
                call.write_file("binary.bin", "new")
            with session.call() as call:
                call.write_file("text.txt", "newer")
        assert session.rollback().ok
        assert file_times(tree_of(workspace.root, times=True)) == before


class TestWriting:
    @pytest.mark.req("D5.mode_kept", "H14.modes_after_commit")
    @pytest.mark.parametrize("path", ["text.txt", "run.sh", "private"])
    def test_a_write_keeps_the_mode(self, workspace: TempWorkspace, path: str) -> None:
        mode = os.stat(workspace.root / path).st_mode
        with workspace.session().call() as call:
            call.write_file(path, "new")
        assert os.stat(workspace.root / path).st_mode == mode

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65])
    def test_a_tiny_file_that_becomes_large_comes_back(self, workspace: TempWorkspace, size: int) -> None:
        """Larger bodies are packed as changes of what was there, which may be too little for that."""
        (workspace.root / "text.txt").write_bytes(b"x" * size)
        with workspace.session().call() as call:
            assert call.write_file("text.txt", os.urandom(40_000)).ok
        assert workspace.session().undo().ok
        assert contents_of(workspace.root)["text.txt"] == b"x" * size

    def test_a_write_and_its_undo_keep_extended_attributes(self, workspace: TempWorkspace) -> None:
        os.setxattr(workspace.root / "text.txt", "user.note", b"mine")
        with workspace.session().call() as call:
            call.write_file("text.txt", "new")
        assert os.getxattr(workspace.root / "text.txt", "user.note") == b"mine"
        with workspace.session().call() as call:
            call.delete("text.txt")
        workspace.session().undo()
        assert os.getxattr(workspace.root / "text.txt", "user.note") == b"mine"

    @pytest.mark.req("D5.hard_links_in_place", "D5.race_window_said")
    def test_a_file_with_other_names_is_written_in_place_and_said_so(self, workspace: TempWorkspace) -> None:
        os.link(workspace.root / "text.txt", workspace.root / "other.txt")
        inode = os.stat(workspace.root / "text.txt").st_ino
        session = workspace.session()
        with session.call() as call:
            assert call.write_file("text.txt", "new").race_window is True
        assert contents_of(workspace.root)["other.txt"] == b"new"
        assert session.undo().ok
        assert contents_of(workspace.root)["other.txt"] == b"text\n"
        with pytest.raises(Leaving), session.call() as call:
            call.write_file("text.txt", "new")
            raise Leaving
        status = os.stat(workspace.root / "other.txt")
        assert (status.st_ino, status.st_nlink, stat.S_IMODE(status.st_mode)) == (inode, 2, 0o640)
        assert contents_of(workspace.root)["other.txt"] == b"text\n"

    @pytest.mark.req("D5.foreign_owner_in_place")
    def test_another_writers_file_keeps_its_owner(self, workspace: TempWorkspace) -> None:
        owned = workspace.root / "text.txt"
        if os.geteuid() == 0:
            os.chown(owned, 12_345, 12_345)
        owner = os.stat(owned).st_uid
        with workspace.session().call() as call:
            assert call.write_file("text.txt", "new").ok
        workspace.session().undo()
        assert os.stat(owned).st_uid == owner

    def test_a_link_is_followed_by_a_write_and_itself_deleted(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            assert call.write_file("link", "through").ok
        assert contents_of(workspace.root)["text.txt"] == b"through"
        with workspace.session().call() as call:
            assert call.delete("link").ok
        assert contents_of(workspace.root)["text.txt"] == b"through"
        assert workspace.session().undo().ok
        assert tree_of(workspace.root)["link"] == Link("text.txt")

    @pytest.mark.req("W4.nested_repo_undone", "W5.nested_repo_without_commits", "D6.nested_repos_restored")
    @pytest.mark.req("W12.git_not_needed", "W11.git_hooks_do_not_run", "W8.autocrlf_ignored")
    def test_files_of_a_nested_repository_are_files(
        self, workspace: TempWorkspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No git program is on the path, and git's own files are a bare beginning: nothing of git is ever run."""
        monkeypatch.setenv("PATH", "/nonexistent")
        plant(workspace.root, {"vendor/.git/HEAD": "ref: refs/heads/main\n", "vendor/a.c": b"int a;\r\n"})
        before = tree_of(workspace.root)
        with workspace.session().call() as call:
            assert call.write_file("vendor/a.c", "int b;\n").ok
            assert call.write_file("vendor/new.c", "int c;\n").ok
        assert workspace.session().undo().ok
        assert tree_of(workspace.root) == before


class TestRaces:
    """Somebody saves at the worst moment: between our look and our write."""

    def racing(self, base: Path, step: str, act: object) -> TempWorkspace:
        from mulligan.testing import FaultPlan

        def once(_: str, __: str) -> None:
            assert callable(act)
            act(HostPerson(str(base / "work")))

        workspace = open_temp_workspace(base, steps=FaultPlan().act(once, step=step))
        plant(workspace.root, {"a.txt": "1\n2\n3\n4\n5\n"})
        return workspace

    def externals(self, workspace: TempWorkspace) -> int:
        with workspace.open_root.ledger.store.read() as tx:
            return len([row for row in tx.select(CALLS) if row.external])

    @pytest.mark.req("D5.replace_by_exchange", "D5.someones_save_is_external", "D5.effect_planned_again")
    def test_an_edit_is_planned_again_on_top_of_the_save(self, tmp_path: Path) -> None:
        workspace = self.racing(tmp_path, "exchange", lambda person: person.save("a.txt", b"1\n2\n3\n4\ntheirs\n"))
        with workspace.session().call() as call:
            assert call.edit_file("a.txt", "1\n", "ours\n").ok
        assert contents_of(workspace.root) == {"a.txt": b"ours\n2\n3\n4\ntheirs\n"}
        assert self.externals(workspace) == 1
        assert workspace.session().undo().ok
        assert contents_of(workspace.root) == {"a.txt": b"1\n2\n3\n4\ntheirs\n"}
        workspace.close()

    @pytest.mark.req("D5.someones_save_is_rescued")
    def test_a_blind_write_replaces_the_save_which_is_kept_and_comes_back_on_undo(self, tmp_path: Path) -> None:
        workspace = self.racing(tmp_path, "exchange", lambda person: person.save("a.txt", b"theirs\n"))
        with workspace.session().call() as call:
            assert call.write_file("a.txt", "ours\n").ok
        assert contents_of(workspace.root) == {"a.txt": b"ours\n"}
        assert self.externals(workspace) == 1
        workspace.session().undo()
        assert contents_of(workspace.root) == {"a.txt": b"theirs\n"}
        workspace.close()

    @pytest.mark.req("D5.create_noreplace")
    def test_a_create_never_replaces_what_appeared_meanwhile(self, tmp_path: Path) -> None:
        workspace = self.racing(tmp_path, "place", lambda person: person.save("n.txt", b"theirs\n"))
        with workspace.session().call() as call:
            receipt = call.write_file("n.txt", "ours\n", mode="create_new")
            assert (receipt.status, receipt.error_code) == ("conflict", "file_exists")
        assert contents_of(workspace.root)["n.txt"] == b"theirs\n"
        workspace.close()

    @pytest.mark.req("D5.delete_aside_then_compare")
    def test_a_delete_looks_at_what_it_took_away(self, tmp_path: Path) -> None:
        workspace = self.racing(tmp_path, "set_aside", lambda person: person.save("a.txt", b"theirs\n"))
        with workspace.session().call() as call:
            call.delete("a.txt")
        assert self.externals(workspace) == 1
        workspace.session().undo()
        assert contents_of(workspace.root) == {"a.txt": b"theirs\n"}
        workspace.close()

    def test_a_directory_another_writer_makes_first_is_theirs(self, tmp_path: Path) -> None:
        workspace = self.racing(tmp_path, "make_dir", lambda person: person.make_dir("d"))
        with pytest.raises(Leaving), workspace.session().call() as call:
            assert call.write_file("d/x.txt", "x", create_parents=True).ok
            raise Leaving
        assert "d" in tree_of(workspace.root) and "d/x.txt" not in tree_of(workspace.root)
        workspace.close()


def test_what_undo_answers_is_json(workspace: TempWorkspace) -> None:
    with workspace.session().call() as call:
        call.write_file(wire(NAME), "x")
    done = workspace.session().undo()
    assert isinstance(done, UndoResult)
    assert done.to_json() == {
        "ok": True,
        "call_id": done.call_id,
        "outcomes": [{"path": wire(NAME), "outcome": "restored"}],
        "overwrote_external": [],
        "rescue": done.call_id,
    }


def _timeless(node: File | Link | Dir) -> File | Link | Dir:
    if isinstance(node, File):
        return File(node.content, node.mode)
    return Dir(node.mode) if isinstance(node, Dir) else node
