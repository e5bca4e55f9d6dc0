"""Kill -9 at every point: afterwards each call is whole or without trace, and nothing of the person's is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from mulligan.history.abort import rescued_in
from mulligan.history.log import calls_of
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import OPEN, TOUCHES, CallRow
from mulligan.store.journal import records_of
from mulligan.store.protocol import CLAIMS
from mulligan.store.verify import verify
from mulligan.testing import Dir, File, Link, Seed, Tree, contents_of, plant, tree_of
from mulligan.values.digest import digest_of
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from tests.history.killed_process import KILLED, die_in, die_opening, killed_after
from tests.temp_workspace import TempWorkspace, open_temp_workspace

OLD_NS = 1_600_000_000_000_000_000
SCENE: dict[str, File | Link | Dir] = {
    "a.txt": File(b"a\n" * 400, 0o640, OLD_NS + 1),
    "d/x.txt": File(b"x", 0o600, OLD_NS + 2),
    "d/y.bin": File(bytes(range(256)) * 300, 0o644, OLD_NS + 3),
    "d/empty": Dir(0o700),
    "link": Link("a.txt"),
    "hard": File(b"hard" * 100, 0o644, OLD_NS + 4),
    "person.txt": File(b"the person's\n", 0o644, OLD_NS + 5),
}


def scene(base: Path) -> Path:
    root = base / "work"
    plant(root, SCENE)
    os.link(root / "hard", root / "hard2")
    return root


def one_of_everything(workspace: TempWorkspace) -> None:
    """A call with every kind of step, and two writes of one file."""
    with workspace.session().call("work") as call:
        receipts = [
            call.write_file("a.txt", "once\n" * 500),
            call.write_file("a.txt", "twice\n" * 600),
            call.write_file("n/m/new.txt", "new", create_parents=True),
            call.delete("d", recursive=True),
            call.write_file("hard", "softer" * 80),
            call.move("link", "moved"),
            call.write_file("d", "a file where a directory was"),
        ]
        assert all(receipt.ok for receipt in receipts), receipts


def staging(workspace: TempWorkspace) -> None:
    """What `git add` does to the index of a repository, under our eyes, and then the call fails."""
    with pytest.raises(LookupError), workspace.open_root.call(SessionId("default")) as call:
        call.commands.about_to_change([RepoPath(".git/index")])
        (workspace.root / ".git" / "index").write_bytes(b"staged")
        call.commands.absorb([RepoPath(".git/index")])
        raise LookupError


def dying_while_staging(workspace: TempWorkspace) -> None:
    workspace.open_root.call(SessionId("default")).commands.about_to_change([RepoPath(".git/index")])
    (workspace.root / ".git" / "index").write_bytes(b"staged")
    os._exit(KILLED)


def failing(workspace: TempWorkspace) -> None:
    """The same, and then the call fails: the points of its abort come after those of its work."""
    with workspace.session().call("work") as call:
        call.write_file("a.txt", "once\n" * 500)
        call.write_file("n/m/new.txt", "new", create_parents=True)
        call.delete("d", recursive=True)
        call.write_file("hard", "softer" * 80)
        call.fail("no")


def undoing(workspace: TempWorkspace) -> None:
    assert workspace.session().undo().ok


def restoring(workspace: TempWorkspace) -> None:
    with workspace.open_root.ledger.store.read() as tx:
        oldest = list(calls_of(tx, workspace.open_root, None))[-1]
    assert workspace.session().restore(oldest.id, on_conflict="overwrite").ok


def rows(workspace: TempWorkspace) -> list[CallRow]:
    with workspace.open_root.ledger.store.read() as tx:
        return list(reversed(list(calls_of(tx, workspace.open_root, None))))


def assert_sound(workspace: TempWorkspace) -> None:
    with workspace.open_root.ledger.store.read() as tx:
        assert (tx.select(OPEN), tx.select(TOUCHES), tx.select(CLAIMS)) == ([], [], [])
    assert [
        problem for problem in verify(workspace.open_root.ledger.store, SCHEMA) if problem.severity == "broken"
    ] == []
    assert [path for path in tree_of(workspace.root) if ".mulligan" in path] == []
    assert [row for row in rows(workspace) if row.external] == []


def points(base: Path, prepare: Callable[[Path], object], act: Callable[[TempWorkspace], object]) -> Iterator[Path]:
    """A fresh scene for each point of the act, in which a child has died there; ends when none dies any more."""
    at = 0
    while True:
        at += 1
        place = base / str(at)
        prepare(place)
        if not die_in(place, act, at=at):
            return
        yield place


def worked(base: Path) -> Path:
    """A scene in which a call has been made."""
    scene(base)
    workspace = open_temp_workspace(base)
    one_of_everything(workspace)
    workspace.close()
    return base


class TestEveryPoint:
    @pytest.mark.req("D5.kill_9_anywhere", "D5.abort_on_process_death", "D5.recovery_on_open")
    @pytest.mark.req("D5.recovery_intended_put_back", "D5.recovery_before_nothing", "D5.one_begin_one_end")
    def test_of_a_call(self, tmp_path: Path) -> None:
        before = tree_of(scene(tmp_path / "before"), times=True)
        after = tree_of(worked(tmp_path / "after") / "work")
        died = 0
        for place in points(tmp_path, scene, one_of_everything):
            died += 1
            workspace = open_temp_workspace(place)
            status = [row.status for row in rows(workspace)]
            if status == ["committed"]:
                assert tree_of(workspace.root) == after
            else:
                assert status in ([], ["aborted"])
                assert_same(tree_of(workspace.root, times=True), before)
            assert os.stat(workspace.root / "hard").st_nlink == 2
            assert_sound(workspace)
            workspace.close()
        assert died > 30

    @pytest.mark.req("D5.kill_9_anywhere")
    def test_of_an_abort(self, tmp_path: Path) -> None:
        before = tree_of(scene(tmp_path / "before"), times=True)
        for place in points(tmp_path, scene, failing):
            workspace = open_temp_workspace(place)
            assert [row.status for row in rows(workspace)] in ([], ["aborted"])
            assert_same(tree_of(workspace.root, times=True), before)
            assert_sound(workspace)
            workspace.close()

    @pytest.mark.req("D5.kill_9_anywhere")
    @pytest.mark.parametrize("way_back", [undoing, pytest.param(restoring, marks=pytest.mark.slow)])
    def test_of_an_undo_operation(self, tmp_path: Path, way_back: Callable[[TempWorkspace], object]) -> None:
        before = tree_of(scene(tmp_path / "before"))
        after = tree_of(worked(tmp_path / "after") / "work")
        for place in points(tmp_path, worked, way_back):
            workspace = open_temp_workspace(place)
            undone = rows(workspace)[0].undone_by is not None
            assert tree_of(workspace.root) == (before if undone else after)
            assert_sound(workspace)
            if undone:
                assert workspace.session().redo().ok
                assert tree_of(workspace.root) == after
            else:
                assert workspace.session().undo().ok
                assert tree_of(workspace.root) == before
            workspace.close()

    @pytest.mark.slow
    @pytest.mark.req("D5.recovery_idempotent")
    def test_of_recovery_itself(self, tmp_path: Path) -> None:
        before = tree_of(scene(tmp_path / "before"), times=True)
        total = 0
        for place in points(tmp_path, scene, one_of_everything):
            if int(place.name) % 5 == 0:
                total += 1
                at = 1
                while die_opening(place, at=at):
                    at += 2
                workspace = open_temp_workspace(place)
                if [row.status for row in rows(workspace)] != ["committed"]:
                    assert_same(tree_of(workspace.root, times=True), before)
                assert_sound(workspace)
                workspace.close()
        assert total > 5


def assert_same(tree: Tree, before: Tree) -> None:
    """Equal, but for the times of directories that had something put into them."""
    assert {path: _files_timed(node) for path, node in tree.items()} == {
        path: _files_timed(node) for path, node in before.items()
    }


def _files_timed(node: File | Link | Dir) -> File | Link | Dir:
    return Dir(node.mode) if isinstance(node, Dir) else node


class TestSomebodyElse:
    @pytest.mark.req("D5.recovery_unknown_kept", "D5.recovery_idempotent")
    def test_what_a_person_saved_after_the_death_stays_and_is_reported(self, tmp_path: Path) -> None:
        scene(tmp_path)
        for at in range(1, 200):
            place = tmp_path / str(at)
            root = scene(place)
            if not die_in(place, one_of_everything, at=at):
                break
            (root / "a.txt").write_text("the person's a\n")
            workspace = open_temp_workspace(place)
            assert contents_of(workspace.root)["a.txt"] == b"the person's a\n"
            recovered = workspace.recovered
            if recovered and recovered[0].conflicts:
                assert recovered[0].conflicts == ["a.txt"]
                assert workspace.open_root.ledger.blobs.read(digest_of(b"the person's a\n"))
            again = open_temp_workspace(place)
            assert again.recovered == []
            again.close()
            workspace.close()

    @pytest.mark.req("D5.observed_calls_not_put_back")
    def test_a_call_that_was_only_observed_ends_by_recording_what_changed(self, tmp_path: Path) -> None:
        scene(tmp_path)

        def observe(workspace: TempWorkspace) -> None:
            from mulligan.values.ids import SessionId
            from mulligan.values.paths import RepoPath

            call = workspace.open_root.call(SessionId("default"), tool="Bash", observed=True)
            call.commands.about_to_change([RepoPath("a.txt"), RepoPath("new.txt")])
            (workspace.root / "a.txt").write_text("the agent's\n")
            (workspace.root / "new.txt").write_text("the agent's\n")
            os._exit(9)

        assert die_in(tmp_path, observe, at=None)
        workspace = open_temp_workspace(tmp_path)
        assert contents_of(workspace.root)["a.txt"] == b"the agent's\n"
        assert [(row.status, row.reason) for row in rows(workspace)] == [("committed", "process_died")]
        assert workspace.session().undo().ok
        assert contents_of(workspace.root)["a.txt"] == b"a\n" * 400 and not (workspace.root / "new.txt").exists()
        workspace.close()

    def test_one_that_cannot_be_ended_yet_blocks_no_other_call_and_is_tried_again(self, tmp_path: Path) -> None:
        scene(tmp_path)

        def die(child: TempWorkspace) -> None:
            with child.session("dies").call() as call:
                call.write_file("a.txt", "half done")
                os._exit(9)

        assert die_in(tmp_path, die, at=None)
        theirs = Random(1).randbytes(200_000)
        (tmp_path / "work" / "a.txt").write_bytes(theirs)
        in_the_way = tmp_path / "home" / "blobs"
        in_the_way.touch()
        workspace = open_temp_workspace(tmp_path)
        assert [one.stuck is not None for one in workspace.recovered] == [True]
        with workspace.session("lives").call() as call:
            assert call.write_file("other.txt", "x").ok
        workspace.close()
        in_the_way.unlink()
        again = open_temp_workspace(tmp_path)
        assert [(one.stuck, one.conflicts) for one in again.recovered] == [(None, ["a.txt"])]
        assert contents_of(again.root)["a.txt"] == theirs
        again.close()

    def test_a_dead_calls_claims_do_not_stop_another_writer_who_has_the_store_open(self, tmp_path: Path) -> None:
        scene(tmp_path)
        workspace = open_temp_workspace(tmp_path)

        def die(child: TempWorkspace) -> None:
            with child.session("dies").call() as call:
                call.write_file("a.txt", "half done")
                os._exit(9)

        assert die_in(tmp_path, die, at=None)
        with workspace.session("lives").call() as call:
            assert call.edit_file("a.txt", "a\na\n", "b\n", replace_all=True).ok
        assert contents_of(workspace.root)["a.txt"] == b"b\n" * 200
        assert [row.status for row in rows(workspace)] == ["aborted", "committed"]
        workspace.close()


class TestAnyTime:
    LANES = 4

    @pytest.mark.req("D5.kill_9_anywhere")
    @pytest.mark.parametrize("deaths", [20, pytest.param(300, marks=pytest.mark.slow)])
    def test_random_deaths(self, tmp_path: Path, deaths: int) -> None:
        """Children work in a row until they are killed; each child's files must be as its last whole call left them."""
        with Seed.chosen(4) as seed:
            lanes = [(tmp_path / str(lane), Random(seed.random().random() + lane)) for lane in range(self.LANES)]
            with ThreadPoolExecutor(len(lanes)) as pool:
                list(pool.map(lambda lane: self.die_often(lane[0], lane[1], deaths // self.LANES), lanes))

    def die_often(self, base: Path, random: Random, deaths: int) -> None:
        base.mkdir()
        for _ in range(deaths):
            killed_after(lambda: self.work(base), random.uniform(0.002, 0.06))
            workspace = open_temp_workspace(base)
            files = {path: data for path, data in contents_of(workspace.root).items() if path != "mine.txt"}
            assert len(set(files.values())) <= 1, files
            committed = [row for row in rows(workspace) if row.status == "committed"]
            assert (len(committed) == 0) == (files == {})
            assert_sound(workspace)
            workspace.close()

    def work(self, base: Path) -> None:
        """Calls that each write the same new words into three files, every third of them failing or undone."""
        workspace = open_temp_workspace(base)
        for number in range(1_000):
            with workspace.session().call() as call:
                for path in ("one.txt", "d/two.txt", "d/e/three.txt"):
                    call.write_file(path, f"{call.id} {number}\n", create_parents=True)
                if number % 3 == 1:
                    call.fail("on purpose")
            if number % 5 == 4:
                workspace.session().undo()
                workspace.session().redo()


class TestTheLockOfGit:
    """While we put an index back we hold git's lock; dying then must not leave the repository locked."""

    def repository(self, base: Path) -> Path:
        index = base / "work" / ".git" / "index"
        index.parent.mkdir(parents=True)
        index.write_bytes(b"before")
        return index

    def test_dying_at_any_point_leaves_the_index_as_it_was_and_no_lock(self, tmp_path: Path) -> None:
        at, died = 0, True
        while died:
            at += 1
            base = tmp_path / str(at)
            index = self.repository(base)
            died = die_in(base, staging, at=at)
            open_temp_workspace(base).close()
            assert (index.read_bytes(), os.listdir(index.parent)) == (b"before", ["index"]), at
        assert at > 10

    def test_dying_again_while_recovering_does_not_either(self, tmp_path: Path) -> None:
        at, died = 0, True
        while died:
            at += 1
            base = tmp_path / str(at)
            index = self.repository(base)
            assert die_in(base, dying_while_staging, at=None)
            died = die_opening(base, at=at)
            open_temp_workspace(base).close()
            assert (index.read_bytes(), os.listdir(index.parent)) == (b"before", ["index"]), at

    @pytest.mark.req("D5.recovery_exec_rescued")
    def test_what_the_command_had_written_is_rescued_before_the_index_is_restored(self, tmp_path: Path) -> None:
        index = self.repository(tmp_path)
        assert die_in(tmp_path, dying_while_staging, at=None)
        workspace = open_temp_workspace(tmp_path)
        (row,) = rows(workspace)
        assert (index.read_bytes(), row.status, row.reason) == (b"before", "aborted", "process_died")
        with workspace.open_root.ledger.store.read() as tx:
            *_, ended = records_of(tx, "s:default")
        assert ended.refs == (digest_of(b"staged"),)
        assert rescued_in(row) == [(".git/index", digest_of(b"staged"))]
        assert workspace.open_root.ledger.blobs.read(digest_of(b"staged")) == b"staged"
        workspace.close()

    def test_another_writers_lock_stays(self, tmp_path: Path) -> None:
        index = self.repository(tmp_path)
        assert die_in(tmp_path, dying_while_staging, at=None)
        (index.parent / "index.lock").write_bytes(b"DIRC somebody's")
        workspace = open_temp_workspace(tmp_path)
        assert ([one.stuck is None for one in workspace.recovered], index.read_bytes()) == ([False], b"staged")
        workspace.close()
        assert (index.parent / "index.lock").read_bytes() == b"DIRC somebody's"
        (index.parent / "index.lock").unlink()
        open_temp_workspace(tmp_path).close()
        assert (index.read_bytes(), os.listdir(index.parent)) == (b"before", ["index"])
