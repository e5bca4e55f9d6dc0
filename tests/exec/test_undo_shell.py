"""What a command did comes back: by undo, redo, rollback and abort, whichever way its changes were caught."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benches import Bench, open_bench
from exec.commands import git, plant, repository, sh, told
from mulligan.testing import contents_of
from workspace.exec.kinds import KINDS, Kind, make
from workspace.exec.trees import Seen, tree

WAYS = ("notify", "overlay", "scan", "watch")
BLIND_SPOTS = {
    "notify": {"fifo", "socket"},
    "overlay": set[str](),
    "scan": {"fifo", "socket", "sparse file"},
    # The kernel tells nobody that the other names of a file have changed.
    "watch": {
        "fifo",
        "socket",
        "sparse file",
        "new hard link, changed through it",
    },
}


def seen(bench: Bench) -> dict[bytes, Seen]:
    """Everything but git's objects, of which new ones may always stay."""
    found = tree(os.fsencode(bench.root))
    return {path: one for path, one in found.items() if b".git/objects/" not in path}


def perform(bench: Bench, kind: Kind, way: str, *, ending: str = "", **params: Any) -> Any:
    env = {"HOME": str(bench.root), "GIT_CONFIG_NOSYSTEM": "1"}
    return sh(bench, kind.does + ending, strategy=way, env=env, **params)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[Kind], Bench]]:
    opened: list[Bench] = []

    def prepare(kind: Kind) -> Bench:
        (tmp_path / "work").mkdir()
        make(kind, os.fsencode(tmp_path / "work"))
        opened.append(open_bench(tmp_path))
        return opened[0]

    yield prepare
    for bench in opened:
        bench.close()
    subprocess.run(["chmod", "-R", "u+w", str(tmp_path)], check=True)


CASES = [(way, kind) for way in WAYS for kind in KINDS if kind.name not in BLIND_SPOTS[way]]
BLIND = [(way, kind) for way in WAYS for kind in KINDS if kind.name in BLIND_SPOTS[way] and "link" not in kind.name]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Kind) else str(value)


@pytest.mark.req("D1.undo_shell_too", "H2.exec_captured", "D3.exec_returns_changes", "D7.overlay_success_one_plan")
@pytest.mark.req("D7.overlay_whiteouts_expanded", "D7.scan_everywhere", "D7.notify_stops_before_mutation")
@pytest.mark.req("D7.notify_descendants", "D7.notify_ignored_files", "D6.git_restore_option")
@pytest.mark.parametrize(("way", "kind"), CASES, ids=name_of)
def test_undo_brings_back_the_tree_and_redo_what_was_done(scene: Callable[[Kind], Bench], way: str, kind: Kind) -> None:
    bench = scene(kind)
    session, before = bench.session(), seen(bench)
    receipt = perform(bench, kind, way)
    assert told(receipt) == ("ok", None), receipt
    after = seen(bench)
    if receipt.changes:
        assert session.undo(git="restore").ok
    assert seen(bench) == before
    if receipt.changes:
        assert session.redo().ok
    assert seen(bench) == after


@pytest.mark.req("D6.git_abort_puts_back", "D6.git_control_captured", "D7.overlay_failure_discarded")
@pytest.mark.parametrize(("way", "kind"), [one for one in CASES if one[0] in ("notify", "scan")], ids=name_of)
def test_a_failure_that_is_rolled_back_leaves_the_tree_as_it_was(
    scene: Callable[[Kind], Bench], way: str, kind: Kind
) -> None:
    bench = scene(kind)
    before = seen(bench)
    receipt = perform(bench, kind, way, ending="\nexit 3", rollback_on="nonzero")
    assert told(receipt) == ("error", "nonzero_exit")
    assert seen(bench) == before


@pytest.mark.req("D6.coverage.special_file", "D6.coverage.no_baseline", "D7.scan_no_baseline", "D6.coverage.over_cap")
@pytest.mark.parametrize(("way", "kind"), BLIND, ids=name_of)
def test_what_cannot_come_back_is_named(scene: Callable[[Kind], Bench], way: str, kind: Kind) -> None:
    bench = scene(kind)
    before = seen(bench)
    receipt = perform(bench, kind, way)
    named = {os.fsencode(one["path"]) for one in receipt.coverage}
    after = seen(bench)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} - {b"."}
    assert changed and changed <= named
    assert {one["reason"] for one in receipt.coverage} <= {"special_file", "no_baseline"}
    if receipt.changes:
        bench.session().undo()
    assert seen(bench) == after


MIXED = {
    ".gitignore": "node_modules/\n.env\n*.log\n",
    ".env": "KEY=secret\n",
    "debug.log": "log\n",
    "src/a.py": "a = 1\n",
    "src/b.py": "b = 1\n",
    "src/deep/c.py": "c = 1\n",
    "docs/guide.md": "# Guide\n",
    "dirty.txt": "committed\n",
}
SHELL = (
    "rm -rf docs",
    "sed -i s/1/2/ src/a.py",
    "git checkout -- dirty.txt",
    "mv src/deep lib",
    "mkdir -p node_modules/.bin && for d in $(seq 50); do mkdir node_modules/$d; "
    "for f in $(seq 100); do echo $d > node_modules/$d/$f; done; done; ln -s ../1/1 node_modules/.bin/one",
    "printf 'KEY=\\n' > .env; rm debug.log; chmod 600 src/b.py; mkdir empty",
)


@pytest.fixture
def mixed(bench: Bench) -> Bench:
    """Tracked, changed, staged, untracked and ignored files, and an empty folder."""
    repository(bench.root, MIXED)
    plant(bench.root, {"dirty.txt": "the person's own\n", "untracked.txt": "u\n", "staged.txt": "s\n"})
    git(bench.root, "add", "staged.txt")
    (bench.root / "hollow").mkdir()
    return bench


@pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
def test_a_turn_of_shell_commands_and_edits_is_rolled_back_whole(mixed: Bench, way: str) -> None:
    before = seen(mixed)
    session = mixed.session()
    with session.turn("do it"):
        for number, script in enumerate(SHELL):
            receipt, _ = (
                session.perform("shell", {"command": script})
                if way == "notify"
                else (
                    sh(mixed, script, strategy=way),
                    "",
                )
            )
            assert (receipt.status, receipt.exit_code) == ("ok", 0), receipt
            with session.call() as call:
                call.write_file(f"made/{number}.txt", "x\n", create_parents=True)
    if way != "notify":
        # Each command was a turn of its own: the shortest way back is to the first of them.
        with mixed.desk.ledger.store.read() as tx:
            from mulligan.history.log import calls_of

            first = list(calls_of(tx, mixed.desk, None))[-1].id
        assert session.rewind(first).ok
    else:
        assert session.rollback().ok
    assert {path: one for path, one in seen(mixed).items() if path != b".git/index"} == {
        path: one for path, one in before.items() if path != b".git/index"
    }
    assert session.redo().ok
    assert len(os.listdir(mixed.root / "node_modules")) == 51
    assert (mixed.root / "lib/c.py").exists() and not (mixed.root / "docs").exists()


class TestGit:
    @pytest.mark.req("D6.git_undo_leaves_alone", "D6.git_objects_kept")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_commit_inside_a_command_outlives_its_undo(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        old, session = git(bench.root, "rev-parse", "HEAD"), bench.session()
        commit = "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two"
        assert sh(bench, commit, strategy=way).exit_code == 0
        new = git(bench.root, "rev-parse", "HEAD")
        planned = session.undo(dry_run=True).to_json()
        assert planned["git"] == [{"repository": ".git", "head": {"before": old, "after": new}}]
        assert planned["outcomes"] == [
            {"path": ".git", "outcome": "skipped", "reason": "git"},
            {"path": "a", "outcome": "restored"},
        ]
        assert session.undo().ok
        assert git(bench.root, "rev-parse", "HEAD") == new != old
        assert git(bench.root, "show", "HEAD:a") == "2"
        assert (bench.root / "a").read_text() == "1\n"

    @pytest.mark.req("D6.git_restore_option")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_commit_goes_back_when_that_is_asked_for_and_its_objects_stay(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        old, session = git(bench.root, "rev-parse", "HEAD"), bench.session()
        sh(bench, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam two", strategy=way)
        new = git(bench.root, "rev-parse", "HEAD")
        assert session.undo(git="restore").ok
        assert git(bench.root, "rev-parse", "HEAD") == old
        assert git(bench.root, "status", "--short") == ""
        assert git(bench.root, "cat-file", "-t", new) == "commit"
        git(bench.root, "fsck", "--strict")
        assert session.redo().ok
        assert git(bench.root, "rev-parse", "HEAD") == new

    def test_undoing_a_call_that_only_committed_moves_on_to_the_one_before(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        session = bench.session()
        sh(bench, "echo 2 > a")
        sh(bench, "git -c user.name=u -c user.email=e commit -qam two")
        assert session.undo().ok and (bench.root / "a").read_text() == "2\n"
        assert session.undo().ok and (bench.root / "a").read_text() == "1\n"

    @pytest.mark.req("D6.git_abort_puts_back")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_an_aborted_checkout_leaves_head_index_and_files(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n", "gone": "g\n"})
        git(bench.root, "checkout", "-qb", "other")
        plant(bench.root, {"a": "2\n"})
        git(bench.root, "rm", "-q", "gone")
        git(bench.root, "commit", "-qam", "two")
        git(bench.root, "checkout", "-q", "main")
        plant(bench.root, {"staged": "s\n"})
        git(bench.root, "add", "staged")
        before = seen(bench)
        receipt = sh(bench, "git checkout -q other && false", strategy=way, rollback_on="nonzero")
        assert told(receipt) == ("error", "nonzero_exit")
        assert seen(bench) == before
        assert git(bench.root, "status", "--short") == "A  staged"
        assert git(bench.root, "symbolic-ref", "HEAD") == "refs/heads/main"

    @pytest.mark.req("D6.git_created_is_files", "W6.cloned_repo_removed")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    def test_a_repository_made_by_a_call_is_ordinary_files(self, bench: Bench, tmp_path: Path, way: str) -> None:
        repository(tmp_path / "origin", {"x": "x\n"})
        before = tree(os.fsencode(bench.root))
        failed = sh(bench, f"git clone -q {tmp_path}/origin c && false", strategy=way, rollback_on="nonzero")
        assert told(failed) == ("error", "nonzero_exit") and tree(os.fsencode(bench.root)) == before
        assert sh(bench, f"git clone -q {tmp_path}/origin c", strategy=way).exit_code == 0
        after = tree(os.fsencode(bench.root))
        assert bench.session().undo().ok
        assert tree(os.fsencode(bench.root)) == before
        assert bench.session().redo().ok
        assert tree(os.fsencode(bench.root)) == after

    @pytest.mark.req("D6.git_created_is_files")
    @pytest.mark.parametrize("way", ["notify", "overlay"])
    def test_a_repository_removed_by_a_call_comes_back_with_its_objects(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        before = tree(os.fsencode(bench.root))
        sh(bench, "rm -rf .git", strategy=way)
        assert not (bench.root / ".git").exists()
        assert bench.session().undo().ok
        assert tree(os.fsencode(bench.root)) == before
        git(bench.root, "fsck", "--strict")

    def test_a_scan_says_that_it_does_not_keep_objects(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        receipt = sh(bench, "rm -rf .git", strategy="scan")
        lost = {one["path"] for one in receipt.coverage if one["reason"] == "no_baseline"}
        assert lost and all(path.startswith(".git/objects") for path in lost)

    def test_a_persons_commit_made_meanwhile_is_never_overwritten(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n", "b": "1\n"})
        sh(bench, "echo 2 > a; git -c user.name=u -c user.email=e commit -qam agent")
        plant(bench.root, {"b": "person\n"})
        git(bench.root, "commit", "-qam", "person")
        head = git(bench.root, "rev-parse", "HEAD")
        assert bench.session().undo().ok
        assert git(bench.root, "rev-parse", "HEAD") == head
        assert (bench.root / "b").read_text() == "person\n" and (bench.root / "a").read_text() == "1\n"

    def test_a_git_that_runs_meanwhile_holds_the_abort_up_until_it_is_done(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        index = (bench.root / ".git/index").read_bytes()
        with bench.session().call() as call:
            call.exec(["sh", "-c", "echo 2 > a; git add a"])
            lock = bench.root / ".git/index.lock"
            lock.touch()
            release = threading.Timer(0.1, lock.unlink)
            release.start()
            call.fail("no")
        release.join()
        assert (bench.root / ".git/index").read_bytes() == index and not lock.exists()


def during(bench: Bench, script: str, edit: Callable[[], object], **params: Any) -> Any:
    """Run a script that waits at `gate` until somebody has made an edit."""
    gates = bench.root.parent / "gates"
    gates.mkdir()
    os.mkfifo(gates / "reached")
    os.mkfifo(gates / "go")
    found: list[Any] = []
    wait = f"echo > {gates}/reached; read x < {gates}/go"
    work = threading.Thread(target=lambda: found.append(sh(bench, script.replace("GATE", wait), **params)))
    work.start()
    (gates / "reached").read_text()
    edit()
    (gates / "go").write_text("\n")
    work.join()
    shutil.rmtree(gates)
    return found[0]


class TestPeople:
    LINES = "".join(f"line {number}\n" for number in range(20))

    @pytest.mark.parametrize("way", ["notify", "overlay"])
    def test_edits_of_other_files_survive_undo_and_abort(self, bench: Bench, way: str) -> None:
        plant(bench.root, {"agents": "1\n", "persons": "1\n", "d/x": "x\n"})

        def edit() -> None:
            plant(bench.root, {"persons": "2\n", "fresh": "f\n", "d/y": "y\n"})

        script = "echo 2 > agents; rm d/x; mkdir n; GATE; echo 3 > n/new"
        assert during(bench, script, edit, strategy=way).ok
        assert bench.session().undo().ok
        found = {path: (bench.root / path).read_text() for path in ("agents", "persons", "fresh", "d/x", "d/y")}
        assert found == {"agents": "1\n", "persons": "2\n", "fresh": "f\n", "d/x": "x\n", "d/y": "y\n"}
        assert not (bench.root / "n").exists()

    @pytest.mark.parametrize("way", ["notify", "overlay"])
    def test_edits_of_other_files_survive_a_rollback(self, bench: Bench, way: str) -> None:
        plant(bench.root, {"agents": "1\n", "persons": "1\n"})
        script = "echo 2 > agents; GATE; exit 1"
        receipt = during(
            bench, script, lambda: plant(bench.root, {"persons": "2\n"}), strategy=way, rollback_on="nonzero"
        )
        assert told(receipt) == ("error", "nonzero_exit")
        assert (bench.root / "agents").read_text() == "1\n" and (bench.root / "persons").read_text() == "2\n"

    def test_an_edit_before_the_command_gets_to_the_file_is_part_of_what_comes_back(self, bench: Bench) -> None:
        plant(bench.root, {"f": self.LINES})
        edited = self.LINES.replace("line 2\n", "the person's 2\n")
        during(bench, "GATE; sed -i 's/line 17/agent 17/' f", lambda: plant(bench.root, {"f": edited}))
        assert bench.session().undo().ok
        assert (bench.root / "f").read_text() == edited

    @pytest.mark.req("D7.overlay_changed_lower")
    def test_an_edit_of_the_same_file_is_merged_with_an_isolated_command(self, bench: Bench) -> None:
        with bench.session().call() as call:
            call.write_file("f", self.LINES)
        edited = self.LINES.replace("line 2\n", "the person's 2\n")
        script = "sed -i 's/line 17/agent 17/' f; GATE"
        receipt = during(bench, script, lambda: plant(bench.root, {"f": edited}), isolate=True)
        assert receipt.ok and receipt.coverage == []
        assert (bench.root / "f").read_text() == edited.replace("line 17", "agent 17")
        assert bench.session().undo().ok
        assert (bench.root / "f").read_text() == edited

    @pytest.mark.parametrize("known", [True, False], ids=["on record", "new to us"])
    def test_what_another_session_commits_meanwhile_is_merged_with_an_isolated_command(
        self, bench: Bench, known: bool
    ) -> None:
        plant(bench.root, {"f": self.LINES, "same": "1\n"})
        edited = self.LINES.replace("line 2\n", "theirs 2\n")

        def write(text: str, same: str) -> None:
            with bench.session("other").call() as call:
                assert call.write_file("f", text).ok and call.write_file("same", same).ok

        if known:
            write(self.LINES, "1\n")
        script = "sed -i 's/line 17/agent 17/' f; echo 3 > same; GATE"
        receipt = during(bench, script, lambda: write(edited, "2\n"), isolate=True)
        assert receipt.coverage == [{"path": "same", "reason": "conflicted"}]
        assert (bench.root / "same").read_text() == "2\n"
        assert (bench.root / "f").read_text() == edited.replace("line 17", "agent 17")

    def test_what_was_removed_before_an_isolated_command_began_is_not_in_its_way(self, bench: Bench) -> None:
        script = "mkdir -p copy/d; echo 1 > copy/d/f; echo 2 > copy/g"
        assert sh(bench, script, isolate=True).ok
        shutil.rmtree(bench.root / "copy")
        receipt = sh(bench, script, isolate=True)
        assert receipt.ok and receipt.coverage == []
        assert (bench.root / "copy/d/f").read_text() == "1\n" and (bench.root / "copy/g").read_text() == "2\n"

    def test_an_edit_before_an_isolated_command_began_is_what_it_works_on(self, bench: Bench) -> None:
        with bench.session().call() as call:
            call.write_file("f", self.LINES)
        plant(bench.root, {"f": "person\n"})
        receipt = sh(bench, "echo agent >> f", isolate=True)
        assert receipt.ok and receipt.coverage == []
        assert (bench.root / "f").read_text() == "person\nagent\n"
        assert bench.session().undo().ok and (bench.root / "f").read_text() == "person\n"

    @pytest.mark.req("D7.overlay_changed_lower")
    @pytest.mark.parametrize("known", [True, False])
    def test_an_edit_of_the_same_line_is_a_named_conflict_and_stays(self, bench: Bench, known: bool) -> None:
        if known:
            with bench.session().call() as call:
                call.write_file("f", "line\n")
        else:
            plant(bench.root, {"f": "line\n"})
        receipt = during(
            bench, "echo agent > f; echo o > other; GATE", lambda: plant(bench.root, {"f": "person\n"}), isolate=True
        )
        assert receipt.coverage == [{"path": "f", "reason": "conflicted"}]
        assert (bench.root / "f").read_text() == "person\n" and (bench.root / "other").read_text() == "o\n"

    @pytest.mark.req("D7.overlay_changed_lower")
    @pytest.mark.parametrize("then", ["", "; echo now a file > dir"])
    def test_a_folder_that_an_isolated_command_removed_stays_with_what_a_person_put_in_it(
        self, bench: Bench, then: str
    ) -> None:
        plant(bench.root, {"dir/deep/x": "1\n", "dir/y": "1\n", "other": "1\n"})
        script = f"rm -r dir{then}; echo 2 > other; GATE"
        receipt = during(bench, script, lambda: plant(bench.root, {"dir/deep/mine": "mine\n"}), isolate=True)
        assert receipt.ok
        named = {one["path"] for one in receipt.coverage if one["reason"] == "conflicted"}
        assert {"dir", "dir/deep"} <= named <= {"dir", "dir/deep", "dir/deep/mine"}
        assert contents_of(bench.root) == {"dir/deep/mine": b"mine\n", "other": b"2\n"}
        assert bench.session().undo().ok
        assert contents_of(bench.root) == {
            "dir/deep/mine": b"mine\n",
            "dir/deep/x": b"1\n",
            "dir/y": b"1\n",
            "other": b"1\n",
        }

    def test_a_folder_with_a_device_that_an_isolated_command_removed_stays(self, bench: Bench) -> None:
        plant(bench.root, {"dir/x": "1\n"})
        os.mkfifo(bench.root / "dir" / "fifo")
        receipt = sh(bench, "rm -r dir; echo 2 > other", isolate=True)
        assert receipt.ok and sorted(os.listdir(bench.root / "dir")) == ["fifo"]
        assert receipt.coverage == [
            {"path": "dir/fifo", "reason": "special_file"},
            {"path": "dir", "reason": "conflicted"},
        ]


class TestSameFile:
    """With `notify` the command works on the file that a person is saving."""

    @pytest.mark.parametrize("atomic", [False, True])
    def test_a_save_into_a_file_the_command_changed_is_a_named_conflict_and_stays(
        self, bench: Bench, atomic: bool
    ) -> None:
        plant(bench.root, {"f": "1\n", "own": "1\n"})
        script = "echo 2 > own; echo agent > f; GATE"
        receipt = during(bench, script, lambda: save(bench.root / "f", atomic=atomic), strategy="notify")
        assert receipt.coverage == [{"path": "f", "reason": "ambiguous"}]
        back = bench.session().undo()
        assert [one.to_json() for one in back.outcomes] == [
            {"path": "f", "outcome": "conflicted", "reason": "ambiguous"},
            {"path": "own", "outcome": "restored"},
        ]
        assert (bench.root / "f").read_text() == "person\n" and (bench.root / "own").read_text() == "1\n"

    @pytest.mark.parametrize("atomic", [False, True])
    def test_a_rollback_leaves_it_and_puts_the_rest_back(self, bench: Bench, atomic: bool) -> None:
        plant(bench.root, {"f": "1\n", "own": "1\n"})
        script = "echo 2 > own; echo agent > f; GATE; exit 1"
        receipt = during(
            bench, script, lambda: save(bench.root / "f", atomic=atomic), strategy="notify", rollback_on="nonzero"
        )
        assert told(receipt) == ("error", "nonzero_exit")
        assert {"path": "f", "reason": "ambiguous"} in receipt.coverage
        assert (bench.root / "f").read_text() == "person\n" and (bench.root / "own").read_text() == "1\n"

    def test_what_others_do_to_a_file_that_the_command_left_as_it_was_is_not_the_commands(self, bench: Bench) -> None:
        plant(bench.root, {"f": "1\n"})
        receipt = during(bench, "cat f; GATE", lambda: save(bench.root / "f", atomic=False), strategy="notify")
        assert receipt.coverage == [] and receipt.changes == []


def save(path: Path, *, atomic: bool) -> None:
    if not atomic:
        path.write_text("person\n")
        return
    draft = path.with_name(".draft")
    draft.write_text("person\n")
    draft.rename(path)
