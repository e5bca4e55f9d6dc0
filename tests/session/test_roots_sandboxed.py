"""Sandboxed roots: what is written there stays aside until it is merged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mulligan
from mulligan.values.errors import MulliganError
from tests.session.mounted_roots import CHANGING, Json, MountedRoots, at


class TestSandboxed:
    @pytest.mark.req("D11.mount_sandboxed", "D11.mount_modes")
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_writes_stay_in_the_copy_until_it_is_merged(self, mounted: MountedRoots, tool: str, params: Json) -> None:
        before = mounted.tree()
        assert mounted.perform(tool, **at(params, mounted.at("box")))["status"] == "ok"
        assert mounted.tree() == before
        merged = mounted.session.merge_root(mounted.at("box"))
        assert merged.ok
        if tool != "mkdir":
            assert mounted.tree() != before
        assert os.listdir(mounted.at("home/aside")) == []
        if merged.call_id is not None:
            assert mounted.session.undo(merged.call_id).ok and mounted.tree() == before

    @pytest.mark.req("D11.mount_sandboxed")
    def test_the_session_sees_what_it_wrote_and_others_do_not(self, mounted: MountedRoots) -> None:
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="mine\n")
        assert mounted.read(mounted.at("box/a.txt")) == "mine\n"
        found = mounted.perform("grep", pattern="mine", path=mounted.at("box"))
        assert found["matches"] == {"inline_text": {"text": f"{mounted.at('box')}/a.txt:1:mine"}}
        other = mounted.opened.session("t")
        other.add_root(mounted.at("box"), mount_mode="sandboxed")
        receipt, _ = other.perform("read_file", {"path": mounted.at("box/a.txt")})
        assert receipt.to_dict()["content"] == {"inline_text": {"text": "box one\nbox two\n"}}
        child = mounted.session.fork()
        receipt, _ = child.perform("read_file", {"path": mounted.at("box/a.txt")})
        assert receipt.to_dict()["content"] == {"inline_text": {"text": "box one\nbox two\n"}}

    @pytest.mark.req("D11.mount_sandboxed")
    def test_calls_in_the_copy_are_undone_in_the_copy(self, mounted: MountedRoots) -> None:
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="first\n")
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="second\n")
        undone = mounted.session.undo()
        assert [one.path for one in undone.outcomes] == [mounted.at("box/a.txt")]
        assert mounted.read(mounted.at("box/a.txt")) == "first\n"
        mounted.session.undo()
        assert mounted.session.merge_root(mounted.at("box")).ok
        assert mounted.text("box/a.txt") == "box one\nbox two\n"

    @pytest.mark.parametrize("ending", ["merge_root", "drop_root"])
    def test_undo_and_rollback_skip_calls_in_a_removed_copy(self, mounted: MountedRoots, ending: str) -> None:
        before = mounted.tree()
        with mounted.session.turn("first"):
            mounted.perform("write_file", path="own.txt", content="own\n")
        with mounted.session.turn("second"):
            mounted.perform("write_file", path="later.txt", content="later\n")
            mounted.perform("write_file", path=mounted.at("box/a.txt"), content="mine\n")
        getattr(mounted.session, ending)(mounted.at("box"))
        if ending == "merge_root":
            assert mounted.session.undo().ok
        assert mounted.session.rollback().ok
        assert mounted.session.undo().ok
        assert mounted.tree() == before
        with pytest.raises(MulliganError) as caught:
            mounted.session.undo()
        assert caught.value.code == "nothing_to_undo"

    def test_and_so_does_rewind(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        _, first = mounted.session.perform("write_file", {"path": "own.txt", "content": "own\n"})
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="mine\n")
        mounted.session.drop_root(mounted.at("box"))
        assert mounted.session.rewind(first).ok
        assert mounted.tree() == before

    def test_other_writers_changes_are_merged_or_reported(self, mounted: MountedRoots) -> None:
        (mounted.base / "box/long.txt").write_text("one\n-\n-\ntwo\n")
        mounted.perform("edit_file", path=mounted.at("box/long.txt"), old_string="one", new_string="agent")
        (mounted.base / "box/long.txt").write_text("one\n-\n-\nperson\n")
        plan = mounted.session.merge_root(mounted.at("box"), dry_run=True)
        assert [(one.path, one.outcome) for one in plan.outcomes] == [(mounted.at("box/long.txt"), "merged")]
        assert mounted.session.merge_root(mounted.at("box")).ok
        assert mounted.text("box/long.txt") == "agent\n-\n-\nperson\n"
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="agent again\n")
        (mounted.base / "box/a.txt").write_text("person again\n")
        refused = mounted.session.merge_root(mounted.at("box"))
        assert not refused.ok and mounted.text("box/a.txt") == "person again\n"
        assert mounted.read(mounted.at("box/a.txt")) == "agent again\n"
        merged = mounted.session.merge_root(mounted.at("box"), on_conflict="overwrite")
        assert (merged.ok, merged.overwrote_external) == (True, (mounted.at("box/a.txt"),))
        assert mounted.text("box/a.txt") == "agent again\n"

    def test_a_root_with_unmerged_writes_cannot_be_unmounted(self, mounted: MountedRoots) -> None:
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="mine\n")
        assert mounted.session.remove_root(mounted.at("box"))["ok"] is False
        assert mounted.session.add_root(mounted.at("box"), mount_mode="extend")["ok"] is False
        assert mounted.session.add_root(mounted.at("box"), mount_mode="sandboxed")["ok"] is True
        with pytest.raises(MulliganError) as caught:
            mounted.session.set_workspace_anchor(mounted.at("work"))
        assert caught.value.code == "conflict"
        mounted.session.drop_root(mounted.at("box"))
        assert (mounted.read(mounted.at("box/a.txt")), os.listdir(mounted.at("home/aside"))) == (
            "box one\nbox two\n",
            [],
        )
        assert mounted.session.remove_root(mounted.at("box")) == {"ok": True}
        for verb in (mounted.session.merge_root, mounted.session.drop_root):
            with pytest.raises(MulliganError) as caught:
                verb(mounted.at("box"))
            assert caught.value.code == "unknown_root"

    @pytest.mark.req("D11.mount_sandboxed")
    def test_a_copy_is_used_again_after_the_store_was_reopened(self, mounted: MountedRoots) -> None:
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="mine\n")
        with mulligan.open(mounted.at("work"), store=mounted.at("home")) as again:
            session = again.session("s")
            receipt, _ = session.perform("read_file", {"path": mounted.at("box/a.txt")})
            assert receipt.to_dict()["content"] == {"inline_text": {"text": "mine\n"}}
            assert session.merge_root(mounted.at("box")).ok
        assert mounted.text("box/a.txt") == "mine\n"

    def test_many_threads_write_in_one_copy(self, mounted: MountedRoots) -> None:
        def write(number: int) -> None:
            mounted.perform("write_file", path=mounted.at(f"box/{number}.txt"), content=f"{number}\n")

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(os.listdir(mounted.at("home/aside"))) == 1
        assert mounted.session.merge_root(mounted.at("box")).ok
        assert {mounted.text(f"box/{number}.txt") for number in range(8)} == {f"{number}\n" for number in range(8)}

    def test_a_copy_that_a_dead_process_left_unfinished_is_removed(self, mounted: MountedRoots) -> None:
        code = "import mulligan, sys; print(mulligan.open(sys.argv[1], store=sys.argv[2]).store.owner())"
        dead = subprocess.run(
            [sys.executable, "-c", code, mounted.at("work"), mounted.at("home")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        mine = mounted.opened.store.owner()
        for name in (f"{dead}-half", f"{mine}-half", "not-ours"):
            (mounted.base / "home/aside" / name).mkdir(parents=True)
        mounted.perform("write_file", path=mounted.at("box/a.txt"), content="mine\n")
        left = sorted(os.listdir(mounted.at("home/aside")))
        assert len(left) == 3 and f"{dead}-half" not in left and {f"{mine}-half", "not-ours"} < set(left)

    def test_a_store_in_memory_keeps_its_copies_elsewhere(self, tmp_path: Path) -> None:
        for name in ("work", "box"):
            (tmp_path / name).mkdir()
        with mulligan.open(str(tmp_path / "work"), store="memory:") as opened:
            session = opened.session("s")
            session.add_root(str(tmp_path / "box"), mount_mode="sandboxed")
            session.perform("write_file", {"path": str(tmp_path / "box/n"), "content": "x"})
            assert list((tmp_path / "box").iterdir()) == []
            assert session.merge_root(str(tmp_path / "box")).ok
        assert (tmp_path / "box/n").read_text() == "x"
