"""Sandboxed roots: what is written there stays aside until it is merged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mulligan
from mulligan.values.faults import MulliganError
from session.yards import CHANGING, Json, Yard, at


class TestSandboxed:
    @pytest.mark.req("D11.mount_sandboxed", "D11.mount_modes")
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_what_is_written_stays_aside_until_merged(self, yard: Yard, tool: str, params: Json) -> None:
        before = yard.tree()
        assert yard.perform(tool, **at(params, yard.at("box")))["status"] == "ok"
        assert yard.tree() == before
        merged = yard.session.merge_root(yard.at("box"))
        assert merged.ok
        if tool != "mkdir":
            assert yard.tree() != before
        assert os.listdir(yard.at("home/aside")) == []
        if merged.call_id is not None:
            assert yard.session.undo(merged.call_id).ok and yard.tree() == before

    @pytest.mark.req("D11.mount_sandboxed")
    def test_the_session_sees_what_it_wrote_and_others_do_not(self, yard: Yard) -> None:
        yard.perform("write_file", path=yard.at("box/a.txt"), content="mine\n")
        assert yard.read(yard.at("box/a.txt")) == "mine\n"
        found = yard.perform("grep", pattern="mine", path=yard.at("box"))
        assert found["matches"] == {"inline_text": {"text": f"{yard.at('box')}/a.txt:1:mine"}}
        other = yard.opened.session("t")
        other.add_root(yard.at("box"), mount_mode="sandboxed")
        receipt, _ = other.perform("read_file", {"path": yard.at("box/a.txt")})
        assert receipt.to_dict()["content"] == {"inline_text": {"text": "box one\nbox two\n"}}
        child = yard.session.fork()
        receipt, _ = child.perform("read_file", {"path": yard.at("box/a.txt")})
        assert receipt.to_dict()["content"] == {"inline_text": {"text": "box one\nbox two\n"}}

    @pytest.mark.req("D11.mount_sandboxed")
    def test_calls_there_are_undone_there(self, yard: Yard) -> None:
        yard.perform("write_file", path=yard.at("box/a.txt"), content="first\n")
        yard.perform("write_file", path=yard.at("box/a.txt"), content="second\n")
        undone = yard.session.undo()
        assert [one.path for one in undone.outcomes] == [yard.at("box/a.txt")]
        assert yard.read(yard.at("box/a.txt")) == "first\n"
        yard.session.undo()
        assert yard.session.merge_root(yard.at("box")).ok
        assert yard.text("box/a.txt") == "box one\nbox two\n"

    @pytest.mark.parametrize("ending", ["merge_root", "drop_root"])
    def test_once_the_copy_is_gone_undo_and_rollback_step_over_it(self, yard: Yard, ending: str) -> None:
        before = yard.tree()
        with yard.session.turn("first"):
            yard.perform("write_file", path="own.txt", content="own\n")
        with yard.session.turn("second"):
            yard.perform("write_file", path="later.txt", content="later\n")
            yard.perform("write_file", path=yard.at("box/a.txt"), content="mine\n")
        getattr(yard.session, ending)(yard.at("box"))
        if ending == "merge_root":
            assert yard.session.undo().ok
        assert yard.session.rollback().ok
        assert yard.session.undo().ok
        assert yard.tree() == before
        with pytest.raises(MulliganError) as caught:
            yard.session.undo()
        assert caught.value.code == "nothing_to_undo"

    def test_and_so_does_rewind(self, yard: Yard) -> None:
        before = yard.tree()
        _, first = yard.session.perform("write_file", {"path": "own.txt", "content": "own\n"})
        yard.perform("write_file", path=yard.at("box/a.txt"), content="mine\n")
        yard.session.drop_root(yard.at("box"))
        assert yard.session.rewind(first).ok
        assert yard.tree() == before

    def test_what_others_did_meanwhile_is_merged_or_named(self, yard: Yard) -> None:
        (yard.base / "box/long.txt").write_text("one\n-\n-\ntwo\n")
        yard.perform("edit_file", path=yard.at("box/long.txt"), old_string="one", new_string="agent")
        (yard.base / "box/long.txt").write_text("one\n-\n-\nperson\n")
        plan = yard.session.merge_root(yard.at("box"), dry_run=True)
        assert [(one.path, one.outcome) for one in plan.outcomes] == [(yard.at("box/long.txt"), "merged")]
        assert yard.session.merge_root(yard.at("box")).ok
        assert yard.text("box/long.txt") == "agent\n-\n-\nperson\n"
        yard.perform("write_file", path=yard.at("box/a.txt"), content="agent again\n")
        (yard.base / "box/a.txt").write_text("person again\n")
        refused = yard.session.merge_root(yard.at("box"))
        assert not refused.ok and yard.text("box/a.txt") == "person again\n"
        assert yard.read(yard.at("box/a.txt")) == "agent again\n"
        merged = yard.session.merge_root(yard.at("box"), on_conflict="overwrite")
        assert (merged.ok, merged.overwrote_external) == (True, (yard.at("box/a.txt"),))
        assert yard.text("box/a.txt") == "agent again\n"

    def test_nothing_aside_is_lost_by_accident(self, yard: Yard) -> None:
        yard.perform("write_file", path=yard.at("box/a.txt"), content="mine\n")
        assert yard.session.remove_root(yard.at("box"))["ok"] is False
        assert yard.session.add_root(yard.at("box"), mount_mode="extend")["ok"] is False
        assert yard.session.add_root(yard.at("box"), mount_mode="sandboxed")["ok"] is True
        with pytest.raises(MulliganError) as caught:
            yard.session.set_workspace_anchor(yard.at("work"))
        assert caught.value.code == "conflict"
        yard.session.drop_root(yard.at("box"))
        assert (yard.read(yard.at("box/a.txt")), os.listdir(yard.at("home/aside"))) == ("box one\nbox two\n", [])
        assert yard.session.remove_root(yard.at("box")) == {"ok": True}
        for verb in (yard.session.merge_root, yard.session.drop_root):
            with pytest.raises(MulliganError) as caught:
                verb(yard.at("box"))
            assert caught.value.code == "unknown_root"

    @pytest.mark.req("D11.mount_sandboxed")
    def test_it_goes_on_after_the_store_was_opened_again(self, yard: Yard) -> None:
        yard.perform("write_file", path=yard.at("box/a.txt"), content="mine\n")
        with mulligan.open(yard.at("work"), store=yard.at("home")) as again:
            session = again.session("s")
            receipt, _ = session.perform("read_file", {"path": yard.at("box/a.txt")})
            assert receipt.to_dict()["content"] == {"inline_text": {"text": "mine\n"}}
            assert session.merge_root(yard.at("box")).ok
        assert yard.text("box/a.txt") == "mine\n"

    def test_many_threads_write_in_one_copy(self, yard: Yard) -> None:
        def write(number: int) -> None:
            yard.perform("write_file", path=yard.at(f"box/{number}.txt"), content=f"{number}\n")

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(os.listdir(yard.at("home/aside"))) == 1
        assert yard.session.merge_root(yard.at("box")).ok
        assert {yard.text(f"box/{number}.txt") for number in range(8)} == {f"{number}\n" for number in range(8)}

    def test_what_a_dead_process_left_half_copied_is_swept_up(self, yard: Yard) -> None:
        code = "import mulligan, sys; print(mulligan.open(sys.argv[1], store=sys.argv[2]).store.owner())"
        dead = subprocess.run(
            [sys.executable, "-c", code, yard.at("work"), yard.at("home")], capture_output=True, text=True, check=True
        ).stdout.strip()
        mine = yard.opened.store.owner()
        for name in (f"{dead}-half", f"{mine}-half", "not-ours"):
            (yard.base / "home/aside" / name).mkdir(parents=True)
        yard.perform("write_file", path=yard.at("box/a.txt"), content="mine\n")
        left = sorted(os.listdir(yard.at("home/aside")))
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
