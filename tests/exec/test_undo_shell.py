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

from mulligan.history.blame import blame
from mulligan.history.command import CallWitness
from mulligan.history.log import log_view
from mulligan.testing import contents_of
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from tests.exec.change_kinds import KINDS, Kind, make
from tests.exec.commands import git, plant, repository, seen, sh, text, told
from tests.exec.lanes import lane
from tests.temp_workspace import TempWorkspace, open_temp_workspace

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


def perform(workspace: TempWorkspace, kind: Kind, way: str, *, ending: str = "", **params: Any) -> Any:
    env = {"HOME": str(workspace.root), "GIT_CONFIG_NOSYSTEM": "1"}
    return sh(workspace, kind.does + ending, strategy=way, env=env, **params)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[Kind], TempWorkspace]]:
    opened: list[TempWorkspace] = []

    def prepare(kind: Kind) -> TempWorkspace:
        (tmp_path / "work").mkdir()
        make(kind, os.fsencode(tmp_path / "work"))
        opened.append(open_temp_workspace(tmp_path))
        return opened[0]

    yield prepare
    for workspace in opened:
        workspace.close()
    subprocess.run(["chmod", "-R", "u+w", str(tmp_path)], check=True)


CASES = [(way, kind) for way in WAYS for kind in KINDS if kind.name not in BLIND_SPOTS[way]]
BLIND = [(way, kind) for way in WAYS for kind in KINDS if kind.name in BLIND_SPOTS[way] and "link" not in kind.name]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Kind) else str(value)


@pytest.mark.req("D1.undo_shell_too", "H2.exec_captured", "D3.exec_returns_changes", "D7.overlay_success_one_plan")
@pytest.mark.req("D7.overlay_whiteouts_expanded", "D7.scan_everywhere", "D7.notify_stops_before_mutation")
@pytest.mark.req("D7.notify_descendants", "D7.notify_ignored_files", "D6.git_restore_option")
@pytest.mark.parametrize(("way", "kind"), [lane(*case, *case) for case in CASES], ids=name_of)
def test_undo_brings_back_the_tree_and_redo_what_was_done(
    scene: Callable[[Kind], TempWorkspace], way: str, kind: Kind
) -> None:
    workspace = scene(kind)
    session, before = workspace.session(), seen(workspace)
    receipt = perform(workspace, kind, way)
    assert told(receipt) == ("ok", None), receipt
    after = seen(workspace)
    if receipt.changes:
        assert session.undo(git="restore").ok
    assert seen(workspace) == before
    if receipt.changes:
        assert session.redo().ok
    assert seen(workspace) == after


@pytest.mark.req("D14.json.log_change_kinds")
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_a_command_moved_is_reported_and_keeps_its_past(workspace: TempWorkspace, way: str) -> None:
    with workspace.session().call() as author:
        assert author.write_file("a", "1\n").ok
    plant(workspace.root, {"same": "s\n", "again": "s\n", "empty": ""})
    before = contents_of(workspace.root)
    receipt = sh(workspace, "mkdir d; mv a d/b; mv same d/same; mv again d/again; mv empty d/empty", strategy=way)
    gone = [{"kind": "deleted", "path": path} for path in ("a", "again", "empty", "same")]
    made = [{"kind": "created", "path": path} for path in ("d", "d/again", "d/empty", "d/same")]
    moved = {"kind": "renamed", "path": "d/b", "from": "a"}
    changes = sorted([*gone, *made, moved], key=lambda change: change["path"])
    shown = log_view(workspace.open_root, None, limit=1)[0]["changes"]
    lines = {"added", "removed"}
    assert receipt.changes == changes
    assert [{key: value for key, value in one.items() if key not in lines} for one in shown] == changes
    assert [line.origin for line in blame(workspace.open_root, RepoPath("d/b"))] == [author.id]
    after = contents_of(workspace.root)
    assert workspace.session().undo().ok and contents_of(workspace.root) == before
    assert workspace.session().redo().ok and contents_of(workspace.root) == after
    assert [line.origin for line in blame(workspace.open_root, RepoPath("d/b"))] == [author.id]


def kinds_told(workspace: TempWorkspace) -> dict[str, str]:
    return {one["path"]: one["kind"] for one in log_view(workspace.open_root, None, limit=1)[0]["changes"]}


@pytest.mark.parametrize("way", WAYS)
def test_a_move_is_reported_for_where_the_call_left_a_file(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, {"a": "1\n"})
    with workspace.session().call() as call:
        call.exec(["mv", "a", "b"], strategy=way)
        moved = call.exec(["mv", "b", "c"], strategy=way)
    assert moved.changes == [{"path": "c", "kind": "renamed", "from": "a"}]
    assert kinds_told(workspace) == {"a": "deleted", "c": "renamed"}


def test_a_new_file_at_the_target_of_an_earlier_move_counts_as_created(workspace: TempWorkspace) -> None:
    plant(workspace.root, {"a": "1\n"})
    with workspace.session().call() as call:
        call.exec(["mv", "a", "b"])
        call.delete("b")
        call.write_file("b", "another\n")
    assert kinds_told(workspace) == {"a": "deleted", "b": "created"}


@pytest.mark.parametrize("by_command", [True, False])
def test_a_move_that_was_rolled_back_is_not_reported(workspace: TempWorkspace, by_command: bool) -> None:
    plant(workspace.root, {"a": "1\n"})
    session = workspace.session()
    with session.call() as call:
        with pytest.raises(ValueError), session.call() as inner:
            assert (inner.exec(["mv", "a", "b"]) if by_command else inner.move("a", "b")).ok
            raise ValueError
        call.delete("a")
        call.write_file("b", "nothing to do with a\n")
    assert kinds_told(workspace) == {"a": "deleted", "b": "created"}


@pytest.mark.req("D6.git_abort_puts_back", "D6.git_control_captured", "D7.overlay_failure_discarded")
@pytest.mark.parametrize(
    ("way", "kind"), [lane(*case, *case) for case in CASES if case[0] in ("notify", "scan")], ids=name_of
)
def test_a_failure_that_is_rolled_back_leaves_the_tree_as_it_was(
    scene: Callable[[Kind], TempWorkspace], way: str, kind: Kind
) -> None:
    workspace = scene(kind)
    before = seen(workspace)
    receipt = perform(workspace, kind, way, ending="\nexit 3", rollback_on="nonzero")
    assert told(receipt) == ("error", "nonzero_exit")
    assert seen(workspace) == before


@pytest.mark.req("D6.coverage.special_file", "D6.coverage.no_baseline", "D7.scan_no_baseline", "D6.coverage.over_cap")
@pytest.mark.parametrize(("way", "kind"), BLIND, ids=name_of)
def test_a_change_that_cannot_be_undone_is_in_the_coverage(
    scene: Callable[[Kind], TempWorkspace], way: str, kind: Kind
) -> None:
    workspace = scene(kind)
    before = seen(workspace)
    receipt = perform(workspace, kind, way)
    named = {os.fsencode(one["path"]) for one in receipt.coverage}
    after = seen(workspace)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} - {b"."}
    assert changed and changed <= named
    assert {one["reason"] for one in receipt.coverage} <= {"special_file", "no_baseline"}
    if receipt.changes:
        workspace.session().undo()
    assert seen(workspace) == after


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
def mixed(workspace: TempWorkspace) -> TempWorkspace:
    """Tracked, changed, staged, untracked and ignored files, and an empty folder."""
    repository(workspace.root, MIXED)
    plant(workspace.root, {"dirty.txt": "the person's own\n", "untracked.txt": "u\n", "staged.txt": "s\n"})
    git(workspace.root, "add", "staged.txt")
    (workspace.root / "hollow").mkdir()
    return workspace


@pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
def test_a_turn_of_shell_commands_and_edits_is_rolled_back_whole(mixed: TempWorkspace, way: str) -> None:
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
        with mixed.open_root.ledger.store.read() as tx:
            from mulligan.history.log import calls_of

            first = list(calls_of(tx, mixed.open_root, None))[-1].id
        assert session.rewind(first).ok
    else:
        assert session.rollback().ok
    assert {path: one for path, one in seen(mixed).items() if path != b".git/index"} == {
        path: one for path, one in before.items() if path != b".git/index"
    }
    assert session.redo().ok
    assert len(os.listdir(mixed.root / "node_modules")) == 51
    assert (mixed.root / "lib/c.py").exists() and not (mixed.root / "docs").exists()


def during(
    workspace: TempWorkspace, script: str, edit: Callable[[], object], *, call: Any = None, **params: Any
) -> Any:
    """Run a script that waits at `gate` until somebody has made an edit. Without `call` as a call of its own."""
    gates = workspace.root.parent / "gates"
    gates.mkdir()
    os.mkfifo(gates / "reached")
    os.mkfifo(gates / "go")
    found: list[Any] = []
    wait = f"echo > {gates}/reached; read x < {gates}/go"
    whole = script.replace("GATE", wait)

    def run() -> None:
        found.append(sh(workspace, whole, **params) if call is None else call.exec(["sh", "-c", whole], **params))

    work = threading.Thread(target=run)
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
    def test_edits_of_other_files_survive_undo_and_abort(self, workspace: TempWorkspace, way: str) -> None:
        plant(workspace.root, {"agents": "1\n", "persons": "1\n", "d/x": "x\n"})

        def edit() -> None:
            plant(workspace.root, {"persons": "2\n", "fresh": "f\n", "d/y": "y\n"})

        script = "echo 2 > agents; rm d/x; mkdir n; GATE; echo 3 > n/new"
        assert during(workspace, script, edit, strategy=way).ok
        assert workspace.session().undo().ok
        found = {path: (workspace.root / path).read_text() for path in ("agents", "persons", "fresh", "d/x", "d/y")}
        assert found == {"agents": "1\n", "persons": "2\n", "fresh": "f\n", "d/x": "x\n", "d/y": "y\n"}
        assert not (workspace.root / "n").exists()

    @pytest.mark.parametrize("way", ["notify", "overlay"])
    def test_edits_of_other_files_survive_a_rollback(self, workspace: TempWorkspace, way: str) -> None:
        plant(workspace.root, {"agents": "1\n", "persons": "1\n"})
        script = "echo 2 > agents; GATE; exit 1"
        receipt = during(
            workspace, script, lambda: plant(workspace.root, {"persons": "2\n"}), strategy=way, rollback_on="nonzero"
        )
        assert told(receipt) == ("error", "nonzero_exit")
        assert (workspace.root / "agents").read_text() == "1\n" and (workspace.root / "persons").read_text() == "2\n"

    @pytest.mark.parametrize("elsewhere", ["", "echo x > x; "], ids=["first", "after_another_file_beside_it"])
    def test_an_edit_before_the_command_gets_to_the_file_is_part_of_what_comes_back(
        self, workspace: TempWorkspace, elsewhere: str
    ) -> None:
        plant(workspace.root, {"f": self.LINES})
        edited = self.LINES.replace("line 2\n", "the person's 2\n")
        script = f"{elsewhere}GATE; sed -i 's/line 17/agent 17/' f"
        receipt = during(workspace, script, lambda: plant(workspace.root, {"f": edited}))
        assert receipt.coverage == []
        assert workspace.session().undo().ok
        assert (workspace.root / "f").read_text() == edited

    def test_an_edit_of_another_call_before_the_command_gets_to_the_file_is_that_calls(
        self, workspace: TempWorkspace
    ) -> None:
        plant(workspace.root, {"f": self.LINES})
        edited = self.LINES.replace("line 2\n", "another's 2\n")

        def edit() -> None:
            with workspace.session("other").call() as call:
                call.edit_file("f", "line 2\n", "another's 2\n")

        script = "echo x > x; GATE; echo agent >> f; exit 1"
        receipt = during(workspace, script, edit, rollback_on="nonzero")
        assert (receipt.error_code, receipt.coverage) == ("nonzero_exit", [])
        assert contents_of(workspace.root) == {"f": edited.encode()}
        assert [one["external"] for one in log_view(workspace.open_root, None)] == [False, False]

    @pytest.mark.req("D7.overlay_changed_lower")
    def test_an_edit_of_the_same_file_is_merged_with_an_isolated_command(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            call.write_file("f", self.LINES)
        edited = self.LINES.replace("line 2\n", "the person's 2\n")
        script = "sed -i 's/line 17/agent 17/' f; GATE"
        receipt = during(workspace, script, lambda: plant(workspace.root, {"f": edited}), isolate=True)
        assert receipt.ok and receipt.coverage == []
        assert (workspace.root / "f").read_text() == edited.replace("line 17", "agent 17")
        assert workspace.session().undo().ok
        assert (workspace.root / "f").read_text() == edited

    @pytest.mark.parametrize("known", [True, False], ids=["on record", "new to us"])
    def test_another_sessions_commit_is_merged_with_an_isolated_command(
        self, workspace: TempWorkspace, known: bool
    ) -> None:
        plant(workspace.root, {"f": self.LINES, "same": "1\n"})
        edited = self.LINES.replace("line 2\n", "theirs 2\n")

        def write(text: str, same: str) -> None:
            with workspace.session("other").call() as call:
                assert call.write_file("f", text).ok and call.write_file("same", same).ok

        if known:
            write(self.LINES, "1\n")
        script = "sed -i 's/line 17/agent 17/' f; echo 3 > same; GATE"
        receipt = during(workspace, script, lambda: write(edited, "2\n"), isolate=True)
        assert receipt.coverage == [{"path": "same", "reason": "conflicted"}]
        assert (workspace.root / "same").read_text() == "2\n"
        assert (workspace.root / "f").read_text() == edited.replace("line 17", "agent 17")

    def test_a_directory_removed_earlier_does_not_conflict_with_an_isolated_command(
        self, workspace: TempWorkspace
    ) -> None:
        script = "mkdir -p copy/d; echo 1 > copy/d/f; echo 2 > copy/g"
        assert sh(workspace, script, isolate=True).ok
        shutil.rmtree(workspace.root / "copy")
        receipt = sh(workspace, script, isolate=True)
        assert receipt.ok and receipt.coverage == []
        assert (workspace.root / "copy/d/f").read_text() == "1\n" and (workspace.root / "copy/g").read_text() == "2\n"

    def test_an_edit_before_an_isolated_command_began_is_what_it_works_on(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            call.write_file("f", self.LINES)
        plant(workspace.root, {"f": "person\n"})
        receipt = sh(workspace, "echo agent >> f", isolate=True)
        assert receipt.ok and receipt.coverage == []
        assert (workspace.root / "f").read_text() == "person\nagent\n"
        assert workspace.session().undo().ok and (workspace.root / "f").read_text() == "person\n"

    @pytest.mark.req("D7.overlay_changed_lower")
    @pytest.mark.parametrize("same_call", [False, True])
    def test_an_isolated_command_that_reverts_an_edit_is_merged_with_another_edit(
        self, workspace: TempWorkspace, same_call: bool
    ) -> None:
        """The command makes the file what the record says it was: seen from the record it has changed nothing."""
        edited = self.LINES.replace("line 17\n", "the person's 17\n")
        beside = edited.replace("line 2\n", "the person's 2\n")
        script = 'sed -i "s/the person\'s 17/line 17/" f; GATE'

        def run(call: Any) -> Any:
            plant(workspace.root, {"f": edited})
            return during(workspace, script, lambda: plant(workspace.root, {"f": beside}), call=call, isolate=True)

        with workspace.session().call() as call:
            assert call.write_file("f", self.LINES).ok
            receipt = run(call) if same_call else None
        receipt = receipt or run(None)
        assert receipt.ok and receipt.coverage == []
        assert (workspace.root / "f").read_text() == self.LINES.replace("line 2\n", "the person's 2\n")

    def test_the_mode_that_an_isolated_command_gave_a_folder_is_not_taken_for_the_one_it_had(
        self, workspace: TempWorkspace
    ) -> None:
        assert sh(workspace, "mkdir -m 755 d", isolate=True).ok
        (workspace.root / "d").chmod(0o700)
        assert sh(workspace, "chmod 755 d", isolate=True).ok
        assert (workspace.root / "d").stat().st_mode & 0o777 == 0o755

    @pytest.mark.req("D7.overlay_changed_lower")
    def test_an_edit_of_a_long_recorded_file_is_a_reported_conflict(self, workspace: TempWorkspace) -> None:
        for number in range(60):
            with workspace.session().call() as call:
                assert call.write_file("f" if number == 0 else "g", f"{number}\n").ok
        plant(workspace.root, {"f": "1\n"})
        receipt = during(workspace, "echo 0 > f; GATE", lambda: plant(workspace.root, {"f": "2\n"}), isolate=True)
        assert receipt.coverage == [{"path": "f", "reason": "conflicted"}]
        assert [one["path"] for one in receipt.rescued] == ["f"] and (workspace.root / "f").read_text() == "2\n"

    @pytest.mark.req("D7.overlay_changed_lower")
    def test_the_bytes_of_an_isolated_command_that_had_to_give_way_are_kept(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"f": "line\n"})
        receipt = during(
            workspace, "echo agent > f; GATE", lambda: plant(workspace.root, {"f": "person\n"}), isolate=True
        )
        assert receipt.coverage == [{"path": "f", "reason": "conflicted"}]
        [rescued] = receipt.rescued
        assert rescued["path"] == "f"
        with workspace.session().call() as call:
            assert call.perform("read_blob", blob_ref=rescued["blob_ref"]).content == text("agent\n")

    @pytest.mark.req("D7.overlay_changed_lower")
    @pytest.mark.parametrize("known", [True, False])
    def test_an_edit_of_the_same_line_is_a_reported_conflict_and_stays(
        self, workspace: TempWorkspace, known: bool
    ) -> None:
        if known:
            with workspace.session().call() as call:
                call.write_file("f", "line\n")
        else:
            plant(workspace.root, {"f": "line\n"})
        receipt = during(
            workspace,
            "echo agent > f; echo o > other; GATE",
            lambda: plant(workspace.root, {"f": "person\n"}),
            isolate=True,
        )
        assert receipt.coverage == [{"path": "f", "reason": "conflicted"}]
        assert (workspace.root / "f").read_text() == "person\n" and (workspace.root / "other").read_text() == "o\n"

    @pytest.mark.req("D7.overlay_changed_lower")
    @pytest.mark.parametrize("then", ["", "; echo now a file > dir"])
    def test_a_folder_that_an_isolated_command_removed_stays_with_what_a_person_put_in_it(
        self, workspace: TempWorkspace, then: str
    ) -> None:
        plant(workspace.root, {"dir/deep/x": "1\n", "dir/y": "1\n", "other": "1\n"})
        script = f"rm -r dir{then}; echo 2 > other; GATE"
        receipt = during(workspace, script, lambda: plant(workspace.root, {"dir/deep/mine": "mine\n"}), isolate=True)
        assert receipt.ok
        named = {one["path"] for one in receipt.coverage if one["reason"] == "conflicted"}
        assert {"dir", "dir/deep"} <= named <= {"dir", "dir/deep", "dir/deep/mine"}
        assert contents_of(workspace.root) == {"dir/deep/mine": b"mine\n", "other": b"2\n"}
        assert workspace.session().undo().ok
        assert contents_of(workspace.root) == {
            "dir/deep/mine": b"mine\n",
            "dir/deep/x": b"1\n",
            "dir/y": b"1\n",
            "other": b"1\n",
        }

    def test_a_folder_with_a_device_that_an_isolated_command_removed_stays(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"dir/x": "1\n"})
        os.mkfifo(workspace.root / "dir" / "fifo")
        receipt = sh(workspace, "rm -r dir; echo 2 > other", isolate=True)
        assert receipt.ok and sorted(os.listdir(workspace.root / "dir")) == ["fifo"]
        assert receipt.coverage == [
            {"path": "dir/fifo", "reason": "special_file"},
            {"path": "dir", "reason": "conflicted"},
        ]


class TestSameFile:
    """With `notify` the command works on the file that a person is saving."""

    @pytest.mark.parametrize("atomic", [False, True])
    def test_a_save_into_a_file_that_the_command_changed_is_a_reported_conflict_and_stays(
        self, workspace: TempWorkspace, atomic: bool
    ) -> None:
        plant(workspace.root, {"f": "1\n", "own": "1\n"})
        script = "echo 2 > own; echo agent > f; GATE"
        receipt = during(workspace, script, lambda: save(workspace.root / "f", atomic=atomic), strategy="notify")
        assert receipt.coverage == [{"path": "f", "reason": "ambiguous"}]
        back = workspace.session().undo()
        assert [one.to_json() for one in back.outcomes] == [
            {"path": "f", "outcome": "conflicted", "reason": "ambiguous"},
            {"path": "own", "outcome": "restored"},
        ]
        assert (workspace.root / "f").read_text() == "person\n" and (workspace.root / "own").read_text() == "1\n"

    @pytest.mark.parametrize("atomic", [False, True])
    def test_a_rollback_leaves_it_and_puts_the_rest_back(self, workspace: TempWorkspace, atomic: bool) -> None:
        plant(workspace.root, {"f": "1\n", "own": "1\n"})
        script = "echo 2 > own; echo agent > f; GATE; exit 1"
        receipt = during(
            workspace,
            script,
            lambda: save(workspace.root / "f", atomic=atomic),
            strategy="notify",
            rollback_on="nonzero",
        )
        assert told(receipt) == ("error", "nonzero_exit")
        assert {"path": "f", "reason": "ambiguous"} in receipt.coverage
        assert (workspace.root / "f").read_text() == "person\n" and (workspace.root / "own").read_text() == "1\n"

    def test_the_preimage_keeper_knows_whether_a_path_still_has_its_preimage(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"f": "1\n"})
        root = os.fsencode(workspace.root)
        with workspace.open_root.call(SessionId("default")) as call:
            witness = CallWitness(workspace.open_root, call, root)
            witness.about_to_change([root, root + b"/f", root + b"/new"])
            assert all(witness.has(path) for path in (root, root + b"/f", root + b"/new"))
            plant(workspace.root, {"f": "2\n", "new": ""})
            assert [witness.has(path) for path in (root, root + b"/f", root + b"/new")] == [True, False, False]

    def test_another_writers_change_of_an_unchanged_file_is_not_the_commands(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"f": "1\n"})
        receipt = during(workspace, "cat f; GATE", lambda: save(workspace.root / "f", atomic=False), strategy="notify")
        assert receipt.coverage == [] and receipt.changes == []


def save(path: Path, *, atomic: bool) -> None:
    if not atomic:
        path.write_text("person\n")
        return
    draft = path.with_name(".draft")
    draft.write_text("person\n")
    draft.rename(path)
