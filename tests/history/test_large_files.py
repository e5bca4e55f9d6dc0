"""Files too large to hold: they go to the store and come back piece by piece, whoever changes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mulligan.history.projection import SCHEMA
from mulligan.store.verify import verify
from mulligan.values import limits
from mulligan.values.limits import MIB_BYTES
from tests.temp_workspace import TempWorkspace, open_temp_workspace

SIZE = 80 * MIB_BYTES
ALLOWED_BYTES = 40 * MIB_BYTES
"""A few pieces of four MiB, packed and not."""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TempWorkspace]:
    monkeypatch.setattr(limits, "WHOLE_MAX_BYTES", MIB_BYTES)
    workspace = open_temp_workspace(tmp_path)
    with open(workspace.root / "large.bin", "wb") as file:
        for number in range(SIZE // MIB_BYTES):
            file.write(f"{number:08d}".encode() * (MIB_BYTES // 8))
    yield workspace
    assert [one for one in verify(workspace.open_root.ledger.store, SCHEMA) if one.severity == "broken"] == []
    workspace.close()


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        whole = sha256()
        while piece := file.read(MIB_BYTES):
            whole.update(piece)
        return whole.hexdigest()


@pytest.fixture
def measured() -> Iterator[None]:
    """Nothing that happens in the test may hold the file whole."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ALLOWED_BYTES, peak


@pytest.mark.req("H17.streams_large_files")
@pytest.mark.usefixtures("measured")
class TestInPieces:
    def test_deleted_and_undone(self, workspace: TempWorkspace) -> None:
        before = digest(workspace.root / "large.bin")
        with workspace.session().call() as call:
            assert call.delete("large.bin").ok
        assert workspace.session().undo().ok
        assert digest(workspace.root / "large.bin") == before

    def test_moved_and_aborted(self, workspace: TempWorkspace) -> None:
        before = os.listdir(workspace.root), digest(workspace.root / "large.bin")
        with workspace.session().call() as call:
            assert call.move("large.bin", "elsewhere.bin").ok
            call.fail("changed its mind")
        assert (os.listdir(workspace.root), digest(workspace.root / "large.bin")) == before

    @pytest.mark.parametrize("way", ["notify", "overlay"])
    @pytest.mark.parametrize(
        "script", ["rm large.bin", "echo more >> large.bin", "mv large.bin other; echo x > large.bin"]
    )
    def test_changed_by_a_command_and_undone_and_redone(self, workspace: TempWorkspace, way: str, script: str) -> None:
        before = digest(workspace.root / "large.bin")
        with workspace.session().call() as call:
            assert call.exec(["sh", "-c", script], strategy=way, isolate=way == "overlay").ok
        after = {name: digest(workspace.root / name) for name in os.listdir(workspace.root)}
        assert after != {"large.bin": before}
        assert workspace.session().undo().ok
        assert {name: digest(workspace.root / name) for name in os.listdir(workspace.root)} == {"large.bin": before}
        assert workspace.session().redo().ok
        assert {name: digest(workspace.root / name) for name in os.listdir(workspace.root)} == after

    def test_rolled_back_with_a_command_that_fails(self, workspace: TempWorkspace) -> None:
        before = digest(workspace.root / "large.bin")
        with workspace.session().call() as call:
            call.exec(["sh", "-c", "truncate -s 5M large.bin; exit 1"], strategy="notify", rollback_on="nonzero")
        assert digest(workspace.root / "large.bin") == before

    def test_with_another_name_of_the_same_file(self, workspace: TempWorkspace) -> None:
        """It stays one file, so it is written in place."""
        os.link(workspace.root / "large.bin", workspace.root / "twin.bin")
        before = digest(workspace.root / "large.bin")
        with workspace.session().call() as call:
            assert call.write_file("large.bin", "small").ok
        assert (workspace.root / "twin.bin").read_text() == "small"
        assert workspace.session().undo().ok
        assert digest(workspace.root / "twin.bin") == before
        assert os.path.samefile(workspace.root / "large.bin", workspace.root / "twin.bin")


@pytest.mark.req("H17.streams_large_files")
def test_a_persons_save_of_one_is_a_named_conflict_and_stays(workspace: TempWorkspace) -> None:
    with workspace.session().call() as call:
        assert call.exec(["sh", "-c", "echo agent >> large.bin"]).ok
    with open(workspace.root / "large.bin", "ab") as file:
        file.write(b"person\n")
    saved = digest(workspace.root / "large.bin")
    done = workspace.session().undo()
    assert not done.ok and [(one.path, one.outcome) for one in done.outcomes] == [("large.bin", "conflicted")]
    assert digest(workspace.root / "large.bin") == saved


class TestWithAFullStore:
    """Putting back takes no room, so a call ends even if the store is full; what has to be kept first waits for it."""

    def play(self, tmp_path: Path, scene: str) -> Any:
        script = str(Path(__file__).with_name("full_store.py"))
        command = ["unshare", "--mount", "--map-root-user", sys.executable, script, str(tmp_path), scene]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_what_a_command_made_is_taken_away_and_the_call_ends(self, tmp_path: Path) -> None:
        seen = self.play(tmp_path, "made_by_a_command")
        ended = {"files": {}, "calls": ["aborted"], "stuck": []}
        assert seen == {"told": "no_space", "full": ended, "room": ended, "broken": [], "store_full": [True]}

    def test_the_many_files_that_a_command_removed_are_there_again_and_the_call_ends(self, tmp_path: Path) -> None:
        seen = self.play(tmp_path, "removed_by_a_command")
        for moment in ("full", "room"):
            assert (seen[moment]["calls"], seen[moment]["stuck"]) == (["aborted"], [])
        assert (seen["told"], seen["broken"], seen["store_full"]) == ("no_space True", [], [True])

    def test_what_a_person_saved_beside_a_command_is_not_lost(self, tmp_path: Path) -> None:
        seen = self.play(tmp_path, "saved_beside_a_command")
        assert (seen["told"], seen["full"]["calls"], seen["room"]["calls"]) == ("True", ["open"], ["aborted"])
        assert seen["broken"] == []
        (found,) = (one for one in seen["coverage"] if one["path"] == "d/0")
        assert found["reason"] == "rescued"

    def test_what_another_writer_saved_stays_and_the_call_ends(self, tmp_path: Path) -> None:
        seen = self.play(tmp_path, "saved_by_somebody")
        ended = {"files": {"large.bin": 8 * MIB_BYTES}, "calls": ["aborted"], "stuck": []}
        assert seen == {"told": "", "full": ended, "room": ended, "broken": [], "store_full": [False]}

    @pytest.mark.req("D6.coverage.store_full")
    def test_what_a_program_did_stays_and_is_on_record_once_there_is_space(self, tmp_path: Path) -> None:
        seen = self.play(tmp_path, "left_by_a_program")
        files = {"large.bin": 8 * MIB_BYTES, "small.txt": 2}
        waits = {"files": files, "calls": ["open"], "stuck": [True]}
        ended = {"files": files, "calls": ["committed"], "stuck": [False]}
        assert "No space left" in seen["told"] and seen["told"].startswith("125 ")
        assert "the store was full" in seen["told"] and "Everything was captured" not in seen["told"]
        assert (seen["full"], seen["room"], seen["broken"], seen["store_full"]) == (waits, ended, [], [True])

    @pytest.mark.req("D6.coverage.store_full")
    @pytest.mark.parametrize(
        "scene",
        ["exec_notify", "exec_watch", "exec_scan", "exec_overlay", "run_by_a_person", "written_by_a_tool"],
    )
    def test_a_call_during_which_the_store_was_full_says_so(self, tmp_path: Path, scene: str) -> None:
        told = self.play(tmp_path, scene)["told"]
        assert ".: the store was full while this happened" in told
        assert "Everything was captured" not in told

    @pytest.mark.req("D5.recovery_on_open")
    def test_what_a_dead_call_left_half_done_is_rolled_back_once_there_is_space(self, tmp_path: Path) -> None:
        seen = self.play(tmp_path, "died_with_its_command")
        waits = {"files": {"large.bin": 8 * MIB_BYTES}, "calls": ["open"], "stuck": [True]}
        ended = {"files": {}, "calls": ["aborted"], "stuck": [False]}
        assert seen == {"told": "SIGKILL", "full": waits, "room": ended, "broken": [], "store_full": [False]}
