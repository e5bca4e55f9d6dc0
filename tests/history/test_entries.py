"""Everything a path can be: kept by a call that changes it, and brought back by one that fails or is undone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from benches import Bench, open_bench
from mulligan.history.going_back import WayBack
from mulligan.history.schema import SCHEMA
from mulligan.history.tables import CALLS
from mulligan.store.verify import verify
from mulligan.testing import Dir, File, HostPerson, Link, Tree, contents_of, plant, tree_of
from mulligan.values.clock import SystemClock

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
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tmp_path)
    plant(bench.root, MANY)
    yield bench
    assert list(verify(bench.desk.ledger.store, SCHEMA)) == []
    bench.close()


def wire(path: str) -> str:
    from mulligan.values.paths import RepoPath, to_wire

    return to_wire(RepoPath(path))


def file_times(tree: Tree) -> dict[str, int]:
    return {path: node.mtime_ns for path, node in tree.items() if isinstance(node, File)}


class TestComingBack:
    @pytest.mark.req("D6.mtime_on_abort", "W3.empty_dir_survives", "W10.mtime_handled", "H3.capture_fails_closed")
    def test_a_failed_call_that_deleted_everything_brings_everything_back_times_included(self, bench: Bench) -> None:
        before = tree_of(bench.root, times=True)
        with pytest.raises(Leaving), bench.session().call() as call:
            for path in sorted(os.listdir(bench.root)):
                assert call.delete(wire(path), recursive=True).ok
            assert os.listdir(bench.root) == []
            raise Leaving
        after = tree_of(bench.root, times=True)
        assert tree_of(bench.root) == {path: _timeless(node) for path, node in before.items()}
        assert file_times(after) == file_times(before)
        assert after["d/empty"] == before["d/empty"]

    @pytest.mark.req("D6.modes_restored", "D6.symlinks_restored", "D6.empty_dirs_restored", "D6.ignored_restored")
    @pytest.mark.req("D6.binary_restored", "W1.ignored_files_survive", "W2.ignored_edit_restored", "W9.modes_exact")
    @pytest.mark.req("W7.crlf_kept_with_attributes", "H16.created_parents_removed", "D6.mtime_on_undo")
    def test_undo_of_a_call_that_deleted_everything_brings_everything_back(self, bench: Bench) -> None:
        before = tree_of(bench.root, times=True)
        with bench.session().call() as call:
            for path in sorted(os.listdir(bench.root)):
                assert call.delete(wire(path), recursive=True).ok
        done = bench.session().undo()
        assert {outcome.outcome for outcome in done.outcomes} == {"restored"}
        assert tree_of(bench.root) == {path: _timeless(node) for path, node in before.items()}
        assert file_times(tree_of(bench.root, times=True)) == file_times(before)

    def test_undo_of_writes_and_moves_brings_the_old_back(self, bench: Bench) -> None:
        before = tree_of(bench.root)
        with bench.session().call() as call:
            assert call.write_file("text.txt", "new").ok
            assert call.write_file(wire(NAME), b"\xff\xfe").ok
            assert call.move("binary.bin", "moved/there.bin").error_code == "parent_not_found"
            assert call.mkdir("moved").ok
            assert call.move("binary.bin", "moved/there.bin").ok
            assert call.move("d", "moved/d").ok
            assert call.move("link", "moved/link").ok
            assert call.delete("dangling").ok
        changed = tree_of(bench.root)
        assert changed["moved/link"] == Link("text.txt") and changed["moved/d/sub/x.txt"] == File(b"x", 0o444)
        assert bench.session().undo().ok
        assert tree_of(bench.root) == before
        assert bench.session().redo().ok
        assert tree_of(bench.root) == changed

    @pytest.mark.req("D6.untouched_mtimes_kept")
    def test_nothing_but_the_changed_paths_is_touched(self, bench: Bench) -> None:
        before = tree_of(bench.root, times=True)
        with bench.session().call() as call:
            call.write_file("text.txt", "new")
        bench.session().undo()
        after = tree_of(bench.root, times=True)
        assert [path for path in before if after[path] != before[path]] == []

    @pytest.mark.req("D6.mtime_on_undo")
    def test_times_return_on_undo_only_if_nothing_else_was_recorded_since(self, bench: Bench) -> None:
        old = os.stat(bench.root / "text.txt").st_mtime_ns
        session = bench.session()
        with session.call() as first:
            first.write_file("text.txt", "new")
        with session.call() as second:
            second.write_file("private", "new")
        session.undo(first.id)
        assert os.stat(bench.root / "text.txt").st_mtime_ns > old
        assert contents_of(bench.root)["text.txt"] == b"text\n"

    @pytest.mark.req("D6.mtime_on_undo")
    @pytest.mark.parametrize(
        ("path", "returns"), [("out", False), ("private", False), ("d/new/out", False), (".git/index", True)]
    )
    def test_times_return_on_undo_only_if_nothing_else_was_built_since(
        self, bench: Bench, path: str, returns: bool
    ) -> None:
        """Else a build tool would take what was built of the undone content for up to date."""
        (bench.root / path).parent.mkdir(exist_ok=True)
        old = os.stat(bench.root / "text.txt").st_mtime_ns
        with bench.session().call() as call:
            call.write_file("text.txt", "new")
        built, ended_ns = bench.root / path, SystemClock().now().timestamp() * 1e9
        while not built.exists() or os.stat(built).st_ctime_ns <= ended_ns:
            built.write_text("built")
        assert bench.session().undo().ok
        assert (os.stat(bench.root / "text.txt").st_mtime_ns == old) is returns

    @pytest.mark.req("D6.mtime_on_undo")
    def test_times_do_not_return_where_a_short_look_cannot_tell(self, bench: Bench) -> None:
        old = os.stat(bench.root / "text.txt").st_mtime_ns
        plant(bench.root, {f"many/{number}": "" for number in range(1_000)})
        with bench.session().call() as call:
            call.write_file("text.txt", "new")
        assert bench.session().undo().ok
        assert os.stat(bench.root / "text.txt").st_mtime_ns > old

    @pytest.mark.req("D6.mtime_on_undo")
    def test_times_return_when_a_whole_turn_goes_back(self, bench: Bench) -> None:
        before = file_times(tree_of(bench.root, times=True))
        session = bench.session()
        with session.turn():
            with session.call() as call:
                call.write_file("text.txt", "new")
            with session.call() as call:
                call.write_file("binary.bin", "new")
            with session.call() as call:
                call.write_file("text.txt", "newer")
        assert session.rollback().ok
        assert file_times(tree_of(bench.root, times=True)) == before


class TestWriting:
    @pytest.mark.req("D5.mode_kept", "H14.modes_after_commit")
    @pytest.mark.parametrize("path", ["text.txt", "run.sh", "private"])
    def test_a_write_keeps_the_mode(self, bench: Bench, path: str) -> None:
        mode = os.stat(bench.root / path).st_mode
        with bench.session().call() as call:
            call.write_file(path, "new")
        assert os.stat(bench.root / path).st_mode == mode

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65])
    def test_a_tiny_file_that_becomes_large_comes_back(self, bench: Bench, size: int) -> None:
        """Larger bodies are packed as changes of what was there, which may be too little for that."""
        (bench.root / "text.txt").write_bytes(b"x" * size)
        with bench.session().call() as call:
            assert call.write_file("text.txt", os.urandom(40_000)).ok
        assert bench.session().undo().ok
        assert contents_of(bench.root)["text.txt"] == b"x" * size

    def test_a_write_and_its_undo_keep_extended_attributes(self, bench: Bench) -> None:
        os.setxattr(bench.root / "text.txt", "user.note", b"mine")
        with bench.session().call() as call:
            call.write_file("text.txt", "new")
        assert os.getxattr(bench.root / "text.txt", "user.note") == b"mine"
        with bench.session().call() as call:
            call.delete("text.txt")
        bench.session().undo()
        assert os.getxattr(bench.root / "text.txt", "user.note") == b"mine"

    @pytest.mark.req("D5.hard_links_in_place", "D5.race_window_said")
    def test_a_file_with_other_names_is_written_in_place_and_said_so(self, bench: Bench) -> None:
        os.link(bench.root / "text.txt", bench.root / "other.txt")
        inode = os.stat(bench.root / "text.txt").st_ino
        session = bench.session()
        with session.call() as call:
            assert call.write_file("text.txt", "new").race_window is True
        assert contents_of(bench.root)["other.txt"] == b"new"
        assert session.undo().ok
        assert contents_of(bench.root)["other.txt"] == b"text\n"
        with pytest.raises(Leaving), session.call() as call:
            call.write_file("text.txt", "new")
            raise Leaving
        status = os.stat(bench.root / "other.txt")
        assert (status.st_ino, status.st_nlink, stat.S_IMODE(status.st_mode)) == (inode, 2, 0o640)
        assert contents_of(bench.root)["other.txt"] == b"text\n"

    @pytest.mark.req("D5.foreign_owner_in_place")
    def test_somebody_elses_file_keeps_its_owner(self, bench: Bench) -> None:
        owned = bench.root / "text.txt"
        if os.geteuid() == 0:
            os.chown(owned, 12_345, 12_345)
        owner = os.stat(owned).st_uid
        with bench.session().call() as call:
            assert call.write_file("text.txt", "new").ok
        bench.session().undo()
        assert os.stat(owned).st_uid == owner

    def test_a_link_is_followed_by_a_write_and_itself_deleted(self, bench: Bench) -> None:
        with bench.session().call() as call:
            assert call.write_file("link", "through").ok
        assert contents_of(bench.root)["text.txt"] == b"through"
        with bench.session().call() as call:
            assert call.delete("link").ok
        assert contents_of(bench.root)["text.txt"] == b"through"
        assert bench.session().undo().ok
        assert tree_of(bench.root)["link"] == Link("text.txt")

    @pytest.mark.req("W4.nested_repo_undone", "W5.nested_repo_without_commits", "D6.nested_repos_restored")
    @pytest.mark.req("W12.git_not_needed", "W11.git_hooks_do_not_run", "W8.autocrlf_ignored")
    def test_files_of_a_nested_repository_are_files(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """No git program is on the path, and git's own files are a bare beginning: nothing of git is ever run."""
        monkeypatch.setenv("PATH", "/nonexistent")
        plant(bench.root, {"vendor/.git/HEAD": "ref: refs/heads/main\n", "vendor/a.c": b"int a;\r\n"})
        before = tree_of(bench.root)
        with bench.session().call() as call:
            assert call.write_file("vendor/a.c", "int b;\n").ok
            assert call.write_file("vendor/new.c", "int c;\n").ok
        assert bench.session().undo().ok
        assert tree_of(bench.root) == before


class TestRaces:
    """Somebody saves at the worst moment: between our look and our write."""

    def racing(self, base: Path, step: str, act: object) -> Bench:
        from mulligan.testing import FaultPlan

        def once(_: str, __: str) -> None:
            assert callable(act)
            act(HostPerson(str(base / "work")))

        bench = open_bench(base, steps=FaultPlan().act(once, step=step))
        plant(bench.root, {"a.txt": "1\n2\n3\n4\n5\n"})
        return bench

    def externals(self, bench: Bench) -> int:
        with bench.desk.ledger.store.read() as tx:
            return len([row for row in tx.select(CALLS) if row.external])

    @pytest.mark.req("D5.replace_by_exchange", "D5.someones_save_is_external", "D5.effect_planned_again")
    def test_an_edit_is_planned_again_on_top_of_the_save(self, tmp_path: Path) -> None:
        bench = self.racing(tmp_path, "exchange", lambda person: person.save("a.txt", b"1\n2\n3\n4\ntheirs\n"))
        with bench.session().call() as call:
            assert call.edit_file("a.txt", "1\n", "ours\n").ok
        assert contents_of(bench.root) == {"a.txt": b"ours\n2\n3\n4\ntheirs\n"}
        assert self.externals(bench) == 1
        assert bench.session().undo().ok
        assert contents_of(bench.root) == {"a.txt": b"1\n2\n3\n4\ntheirs\n"}
        bench.close()

    @pytest.mark.req("D5.someones_save_is_rescued")
    def test_a_blind_write_replaces_the_save_which_is_kept_and_comes_back_on_undo(self, tmp_path: Path) -> None:
        bench = self.racing(tmp_path, "exchange", lambda person: person.save("a.txt", b"theirs\n"))
        with bench.session().call() as call:
            assert call.write_file("a.txt", "ours\n").ok
        assert contents_of(bench.root) == {"a.txt": b"ours\n"}
        assert self.externals(bench) == 1
        bench.session().undo()
        assert contents_of(bench.root) == {"a.txt": b"theirs\n"}
        bench.close()

    @pytest.mark.req("D5.create_noreplace")
    def test_a_create_never_replaces_what_appeared_meanwhile(self, tmp_path: Path) -> None:
        bench = self.racing(tmp_path, "place", lambda person: person.save("n.txt", b"theirs\n"))
        with bench.session().call() as call:
            receipt = call.write_file("n.txt", "ours\n", mode="create_new")
            assert (receipt.status, receipt.error_code) == ("conflict", "file_exists")
        assert contents_of(bench.root)["n.txt"] == b"theirs\n"
        bench.close()

    @pytest.mark.req("D5.delete_aside_then_compare")
    def test_a_delete_looks_at_what_it_took_away(self, tmp_path: Path) -> None:
        bench = self.racing(tmp_path, "set_aside", lambda person: person.save("a.txt", b"theirs\n"))
        with bench.session().call() as call:
            call.delete("a.txt")
        assert self.externals(bench) == 1
        bench.session().undo()
        assert contents_of(bench.root) == {"a.txt": b"theirs\n"}
        bench.close()

    def test_a_directory_somebody_makes_first_is_theirs(self, tmp_path: Path) -> None:
        bench = self.racing(tmp_path, "make_dir", lambda person: person.make_dir("d"))
        with pytest.raises(Leaving), bench.session().call() as call:
            assert call.write_file("d/x.txt", "x", create_parents=True).ok
            raise Leaving
        assert "d" in tree_of(bench.root) and "d/x.txt" not in tree_of(bench.root)
        bench.close()


def test_what_undo_answers_is_json(bench: Bench) -> None:
    with bench.session().call() as call:
        call.write_file(wire(NAME), "x")
    done = bench.session().undo()
    assert isinstance(done, WayBack)
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
