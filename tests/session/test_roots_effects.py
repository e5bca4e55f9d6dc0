"""What mounted roots let effects do, and what they do not: looked at through tools, calls, commands and ways back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mulligan
from mulligan.effects.board import board_of
from mulligan.effects.handle import CallHandle
from mulligan.testing import contents_of
from mulligan.values.faults import MulliganError
from session.yards import CHANGING, LOOKING, Json, Yard, at


class TestLooking:
    @pytest.mark.req("D11.mount_paths_absolute", "D11.mount_read_only")
    @pytest.mark.parametrize(("tool", "params"), LOOKING)
    @pytest.mark.parametrize("name", ["lib", "ext", "box"])
    def test_every_mounted_root_can_be_looked_at(self, yard: Yard, tool: str, params: Json, name: str) -> None:
        assert yard.perform(tool, **at(params, yard.at(name)))["status"] == "ok"

    @pytest.mark.parametrize(("tool", "params"), LOOKING)
    @pytest.mark.parametrize("name", ["outside", "external", "extra", "lib/../outside", "home"])
    def test_what_is_not_mounted_cannot(self, yard: Yard, tool: str, params: Json, name: str) -> None:
        assert yard.denied(tool, **at(params, f"{yard.base}/{name}"))

    @pytest.mark.req("D11.mount_paths_absolute")
    def test_what_is_found_there_is_told_by_its_whole_path(self, yard: Yard) -> None:
        found = yard.perform("grep", pattern="two", path=yard.at("lib"))
        assert found["matches"] == {"inline_text": {"text": f"{yard.at('lib')}/a.txt:2:lib two"}}
        found = yard.perform("glob", pattern="**/*", path=yard.at("box"))
        assert found["paths"] == {"inline_text": {"text": f"{yard.at('box')}/a.txt"}}
        ran = yard.perform("exec", argv=["sh", "-c", "echo x > n"], cwd=yard.at("ext"))
        assert ran["changes"] == [{"path": f"{yard.at('ext')}/n", "kind": "created"}]

    @pytest.mark.req("D11.mount_paths_absolute")
    def test_a_relative_path_never_leads_there(self, yard: Yard) -> None:
        assert yard.denied("read_file", path="../lib/a.txt")
        assert yard.denied("write_file", path="../ext/a.txt", content="x")

    def test_links_do_not_lead_from_root_to_root(self, yard: Yard) -> None:
        for root in ("work", "lib", "ext"):
            os.symlink(yard.at("outside/a.txt"), yard.at(f"{root}/out"))
            os.symlink(yard.at("lib"), yard.at(f"{root}/inner"))
        for root in ("work", "lib", "ext"):
            assert yard.perform("read_file", path=yard.at(f"{root}/out"))["status"] == "forbidden"
        for root in ("work", "ext"):
            assert yard.perform("write_file", path=yard.at(f"{root}/inner/a.txt"), content="x")["status"] == "forbidden"
        assert yard.text("lib/a.txt") == "lib one\nlib two\n"

    def test_a_root_that_went_away_is_not_found_and_one_that_came_back_is(self, yard: Yard) -> None:
        assert yard.read(yard.at("lib/a.txt")) == "lib one\nlib two\n"
        os.rename(yard.at("lib"), yard.at("away"))
        assert yard.perform("read_file", path=yard.at("lib/a.txt"))["status"] == "not_found"
        (yard.base / "lib").mkdir()
        (yard.base / "lib" / "a.txt").write_text("another\n")
        assert yard.read(yard.at("lib/a.txt")) == "another\n"
        os.remove(yard.at("lib/a.txt"))
        os.rmdir(yard.at("lib"))
        os.rename(yard.at("away"), yard.at("lib"))


class TestReadOnly:
    @pytest.mark.req("D11.mount_read_only", "D11.mount_modes")
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_nothing_changes_there(self, yard: Yard, tool: str, params: Json) -> None:
        assert yard.denied(tool, **at(params, yard.at("lib")))

    @pytest.mark.req("D11.mount_modes", "S3.policy.default_mount_mode")
    def test_it_is_the_mode_of_a_root_that_says_none(self, yard: Yard) -> None:
        yard.session.add_root(yard.at("outside"))
        assert yard.read(yard.at("outside/a.txt")) == "outside one\noutside two\n"
        assert yard.denied("write_file", path=yard.at("outside/a.txt"), content="x")

    @pytest.mark.parametrize("name", ["outside", "external"])
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_neither_does_anything_that_is_not_mounted(self, yard: Yard, tool: str, params: Json, name: str) -> None:
        assert yard.denied(tool, **at(params, yard.at(name)))

    @pytest.mark.req("S3.roots.remove")
    def test_unmounting_takes_the_right_to_look_away(self, yard: Yard) -> None:
        yard.session.remove_root(yard.at("lib"))
        assert yard.denied("read_file", path=yard.at("lib/a.txt"))


class TestExtend:
    @pytest.mark.req("D11.mount_modes")
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_what_is_done_there_is_one_call_that_goes_back_and_forth(self, yard: Yard, tool: str, params: Json) -> None:
        before = yard.tree()
        receipt, call = yard.session.perform(tool, at(params, yard.at("ext")))
        assert receipt.status == "ok"
        after = yard.tree()
        assert after != before or tool == "mkdir"
        undone = yard.session.undo()
        assert (undone.ok, undone.of, yard.tree()) == (True, (call,), before)
        assert all(one.path.startswith(yard.at("ext")) for one in undone.outcomes)
        assert yard.session.redo().ok and yard.tree() == after
        assert yard.session.restore(call).ok and yard.tree() == before

    def test_a_failed_effect_leaves_nothing(self, yard: Yard) -> None:
        before = yard.tree()
        failing = yard.perform(
            "exec", argv=["sh", "-c", "echo x > n; exit 3"], cwd=yard.at("ext"), rollback_on="nonzero"
        )
        assert (failing["status"], yard.tree()) == ("error", before)

    def test_somebody_elses_edit_is_kept_on_the_way_back(self, yard: Yard) -> None:
        (yard.base / "ext/long.txt").write_text("one\n-\n-\ntwo\n")
        yard.perform("edit_file", path=yard.at("ext/long.txt"), old_string="one", new_string="agent")
        (yard.base / "ext/long.txt").write_text("agent\n-\n-\nperson\n")
        assert yard.session.undo().ok
        assert yard.text("ext/long.txt") == "one\n-\n-\nperson\n"

    @pytest.mark.parametrize(
        ("tool", "params"),
        [
            ("move", {"path": "EXT/a.txt", "to": "b.txt"}),
            ("move", {"path": "a.txt", "to": "EXT/b.txt"}),
            ("move", {"path": "EXT/a.txt", "to": "BOX/b.txt"}),
            (
                "apply_patch",
                {"patch": "*** Begin Patch\n*** Add File: EXT/n\n+x\n*** Add File: n\n+x\n*** End Patch\n"},
            ),
            (
                "apply_patch",
                {"patch": "*** Begin Patch\n*** Add File: n\n+x\n*** Add File: EXT/n\n+x\n*** End Patch\n"},
            ),
        ],
    )
    def test_one_effect_takes_place_in_one_root(self, yard: Yard, tool: str, params: Json) -> None:
        real = {name: v.replace("EXT", yard.at("ext")).replace("BOX", yard.at("box")) for name, v in params.items()}
        assert yard.denied(tool, **real)

    def test_a_command_in_the_background_is_found_from_everywhere(self, yard: Yard) -> None:
        started = yard.perform(
            "host.exec", argv=["sh", "-c", "echo done > n; echo out"], cwd=yard.at("ext"), background=True
        )
        posted = board_of(yard.opened.desk).find(started["exec_id"])
        assert posted is not None and posted.ended.wait(60)
        seen = yard.perform("exec_output", exec_id=started["exec_id"])
        assert (seen["running"], seen["content"]) == (False, {"inline_text": {"text": "out\n"}})
        assert yard.text("ext/n") == "done\n"


class TestOneCallInSeveralRoots:
    def test_it_commits_as_one_and_goes_back_as_one(self, yard: Yard) -> None:
        before = yard.tree()
        call = yard.work_in_two_roots()
        after = yard.tree()
        assert (after["work/a.txt"], after["ext/a.txt"], after["ext/new.txt"]) == ("W\n", "E\next two\n", "N\n")
        plan = yard.session.undo(dry_run=True)
        assert sorted(one.path for one in plan.outcomes) == sorted(
            ["a.txt", "b.txt", yard.at("ext/a.txt"), yard.at("ext/new.txt")]
        )
        undone = yard.session.undo()
        assert undone.ok and call in undone.of and yard.tree() == before
        assert yard.session.redo().ok and yard.tree() == after
        with pytest.raises(MulliganError):
            yard.session.redo()
        assert yard.session.restore(call).ok and yard.tree() == before
        assert yard.session.redo().ok and yard.tree() == after
        assert yard.session.rewind(call, "after").ok and yard.tree() == after
        assert yard.session.rewind(call, "before").ok and yard.tree() == before

    def test_whatever_ends_it_badly_puts_all_roots_back(self, yard: Yard) -> None:
        before = yard.tree()
        with pytest.raises(KeyError), yard.session.call() as call:
            call.write_file("a.txt", "W\n")
            call.write_file(yard.at("ext/a.txt"), "E\n")
            call.exec(["sh", "-c", "echo x > y"], cwd=yard.at("ext"))
            raise KeyError
        assert yard.tree() == before
        with yard.session.call() as call:
            call.write_file(yard.at("ext/a.txt"), "E\n")
            call.write_file("a.txt", "W\n")
            call.fail("no")
        assert (call.status, yard.tree()) == ("aborted", before)

    def test_whatever_runs_in_it_is_stopped_in_whichever_root(self, yard: Yard) -> None:
        os.mkfifo(yard.base / "begun")
        command = ["sh", "-c", f"echo half > half; echo > {yard.at('begun')}; exec sleep 600"]
        found: list[tuple[str, str]] = []

        def run(root: str) -> None:
            done = call.exec(command, cwd=yard.at(root))
            found.append((done.status, done.error_code))

        with yard.session.call() as call:
            assert call.write_file("a.txt", "W\n").ok
            # One after the other, as each command claims its root while it begins.
            threads = [threading.Thread(target=run, args=(root,)) for root in ("ext", "work")]
            for thread in threads:
                thread.start()
                (yard.base / "begun").read_text()
            call.stop()
            for thread in threads:
                thread.join()
        assert found == [("error", "cancelled")] * 2
        assert yard.text("work/a.txt") == "W\n"
        assert not os.path.exists(yard.at("ext/half")) and not os.path.exists(yard.at("work/half"))

    def test_a_nested_call_can_fail_alone(self, yard: Yard) -> None:
        with yard.session.call("outer") as outer:
            outer.write_file(yard.at("ext/a.txt"), "kept\n")
            with yard.session.call("inner") as inner:
                inner.write_file(yard.at("ext/a.txt"), "lost\n")
                inner.write_file("a.txt", "lost\n")
                inner.fail("no")
            outer.write_file(yard.at("ext/b.txt"), "kept\n")
        tree = yard.tree()
        assert (tree["ext/a.txt"], tree["ext/b.txt"], tree["work/a.txt"]) == (
            "kept\n",
            "kept\n",
            "work one\nwork two\n",
        )
        assert yard.session.undo().ok
        assert yard.tree()["ext/a.txt"] == "ext one\next two\n"

    @pytest.mark.req("D11.mount_modes")
    def test_a_call_that_began_in_a_mounted_root_works_in_the_primary_one_by_relative_paths(self, yard: Yard) -> None:
        before = yard.tree()
        with yard.session.call() as call:
            assert call.write_file(yard.at("ext/b.txt"), "B\n").ok and call.write_file(yard.at("ext/c.txt"), "C\n").ok
            assert call.edit_file("a.txt", "work one", "W").ok
            assert call.read_file("a.txt").text == "W\nwork two\n"
            assert call.delete("a.txt").ok
            assert call.exec(["sh", "-c", "echo x > n"]).changes == [{"path": "n", "kind": "created"}]
        after = {**before, "ext/b.txt": "B\n", "ext/c.txt": "C\n", "work/n": "x\n"}
        del after["work/a.txt"]
        assert yard.tree() == after
        assert yard.session.undo().ok and yard.tree() == before

    def test_what_a_call_was_answered_in_one_root_it_may_use_in_another(self, yard: Yard) -> None:
        with yard.session.call() as call:
            assert call.write_file("b.txt", "B\n").ok
            told = call.exec(["sh", "-c", "yes | head -c 200000"], cwd=yard.at("ext")).to_dict()
            reference = told["stdout"]["blob"]["blob_ref"]
            for root in ("ext", "work"):
                assert call.exec(["sh", "-c", "cat > big"], cwd=yard.at(root), stdin_ref=reference).ok
        assert yard.text("ext/big") == yard.text("work/big") == "y\n" * 100_000

    def test_a_turn_over_several_roots_is_rolled_back_whole(self, yard: Yard) -> None:
        before = yard.tree()
        with yard.session.turn("everywhere"):
            yard.perform("write_file", path="a.txt", content="W\n")
            yard.perform("write_file", path=yard.at("ext/a.txt"), content="E\n")
            self.work_more(yard)
            yard.perform("write_file", path=yard.at("box/a.txt"), content="B\n")
        after = yard.tree()
        rolled = yard.session.rollback()
        assert rolled.ok and yard.tree() == before and yard.read(yard.at("box/a.txt")) == "box one\nbox two\n"
        assert yard.session.redo().ok and yard.tree() == after and yard.read(yard.at("box/a.txt")) == "B\n"

    def test_and_the_turn_before_it_after_that(self, yard: Yard) -> None:
        before = yard.tree()
        with yard.session.turn("one"):
            yard.perform("write_file", path="a.txt", content="W\n")
        with yard.session.turn("two"):
            self.work_more(yard)
        assert yard.session.rollback().ok and yard.session.rollback().ok
        assert yard.tree() == before

    def work_more(self, yard: Yard) -> None:
        with yard.session.call() as call:
            call.write_file("c.txt", "C\n")
            call.write_file(yard.at("ext/c.txt"), "C\n")

    def test_with_refuse_a_conflict_in_one_root_leaves_all_alone(self, yard: Yard) -> None:
        yard.work_in_two_roots()
        (yard.base / "ext/a.txt").write_text("a person\n")
        before = yard.tree()
        assert not yard.session.undo(on_conflict="refuse").ok and yard.tree() == before
        merged = yard.session.undo()
        assert not merged.ok and yard.text("ext/a.txt") == "a person\n" and yard.text("work/a.txt").startswith("work")

    CHILD = """
import sys, mulligan
root, home, ext = sys.argv[1:]
with mulligan.open(root, store=home) as m:
    with m.session("s").call("dying") as call:
        call.write_file("a.txt", "dying\\n")
        call.write_file(ext + "/a.txt", "dying\\n")
        call.write_file(ext + "/new.txt", "dying\\n")
        print("written", flush=True)
        sys.stdin.readline()
"""

    def test_kill_9_in_the_middle_puts_all_roots_back(self, yard: Yard) -> None:
        before = yard.tree()
        command = [sys.executable, "-c", self.CHILD, yard.at("work"), yard.at("home"), yard.at("ext")]
        child = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == "written\n"
        assert yard.tree() != before
        child.kill()
        child.communicate()
        with mulligan.open(yard.at("work"), store=yard.at("home")) as again:
            assert yard.tree() == before
            assert len(again.recovered) == 2


class TestNesting:
    """Roots inside roots: the innermost one decides, however a path is written."""

    def nest(self, yard: Yard, mode: str) -> str:
        (yard.base / "work/vendor").mkdir()
        (yard.base / "work/vendor/v.txt").write_text("vendor\n")
        assert yard.session.add_root(yard.at("work/vendor"), mount_mode=mode)["ok"]
        return yard.at("work/vendor/v.txt")

    @pytest.mark.req("D11.mount_read_only")
    def test_a_read_only_root_inside_the_primary_is_read_only(self, yard: Yard) -> None:
        inside = self.nest(yard, "read_only")
        os.symlink("vendor", yard.at("work/alias"))
        for path in (inside, "vendor/v.txt", "./vendor/../vendor/v.txt"):
            assert yard.read(path) == "vendor\n"
        for path in (inside, "vendor/v.txt", "alias/v.txt", "vendor/new.txt", "alias/new.txt"):
            assert yard.denied("write_file", path=path, content="x")
        for tool, params in (
            ("delete", {"path": "vendor", "recursive": True}),
            ("delete", {"path": "alias/v.txt"}),
            ("move", {"path": "vendor", "to": "elsewhere"}),
            ("move", {"path": "a.txt", "to": "alias/a.txt"}),
        ):
            assert yard.denied(tool, **params)
        assert yard.perform("write_file", path="vendored.txt", content="x")["status"] == "ok"

    @pytest.mark.req("D11.mount_sandboxed")
    def test_a_sandboxed_root_inside_the_primary_is_written_aside(self, yard: Yard) -> None:
        inside = self.nest(yard, "sandboxed")
        assert yard.perform("write_file", path="vendor/v.txt", content="aside\n")["status"] == "ok"
        assert (yard.text("work/vendor/v.txt"), yard.read(inside), yard.read("vendor/v.txt")) == (
            "vendor\n",
            "aside\n",
            "aside\n",
        )
        assert yard.session.merge_root(yard.at("work/vendor")).ok
        assert yard.text("work/vendor/v.txt") == "aside\n"

    def test_an_extended_root_inside_the_primary_is_as_before(self, yard: Yard) -> None:
        self.nest(yard, "extend")
        before = yard.tree()
        with yard.session.call() as call:
            assert call.write_file("vendor/v.txt", "one\n").ok
            assert call.write_file("a.txt", "two\n").ok
        assert yard.session.undo().ok and yard.tree() == before

    def test_a_root_around_the_primary(self, yard: Yard) -> None:
        (yard.base / "outside/inner").mkdir()
        yard.session.set_workspace_anchor(
            {"primary": yard.at("outside/inner"), "additional_roots": [yard.at("outside")]}
        )
        assert yard.perform("write_file", path="x.txt", content="mine\n")["status"] == "ok"
        assert yard.perform("write_file", path=yard.at("outside/inner/y.txt"), content="mine\n")["status"] == "ok"
        assert yard.read(yard.at("outside/a.txt")) == "outside one\noutside two\n"
        assert yard.denied("write_file", path=yard.at("outside/a.txt"), content="x")


class TestAnchored:
    @pytest.mark.req("S3.anchor.read_and_replace")
    def test_relative_paths_begin_at_the_primary_root(self, yard: Yard) -> None:
        before = yard.tree()
        yard.session.set_workspace_anchor({"primary": yard.at("outside"), "additional_roots": [yard.at("work")]})
        assert yard.read("a.txt") == "outside one\noutside two\n"
        assert yard.perform("write_file", path="a.txt", content="anchored\n")["status"] == "ok"
        ran = yard.perform("shell", command="cat a.txt; echo x > n")
        assert ran["stdout"] == {"inline_text": {"text": "anchored\n"}}
        assert (yard.text("outside/a.txt"), yard.text("outside/n")) == ("anchored\n", "x\n")
        assert yard.denied("write_file", path=yard.at("work/a.txt"), content="x")
        assert yard.denied("read_file", path=yard.at("ext/a.txt"))
        yard.session.undo()
        yard.session.undo()
        assert yard.tree() == before
        assert yard.session.redo().ok and yard.text("outside/a.txt") == "anchored\n"
        yard.session.set_workspace_anchor(None)
        assert yard.read("a.txt") == "work one\nwork two\n"


class TestForkedWithFiles:
    """A fork with files of its own works in them, wherever its parent works."""

    def test_of_a_session_with_mounted_roots(self, yard: Yard) -> None:
        before = yard.tree()
        child = yard.session.fork(files="copy", to=yard.at("copy"))
        with child.call() as call:
            assert call.write_file("a.txt", "child\n").ok
            ran = call.exec(["sh", "-c", "pwd; echo x > n"])
            assert ran.stdout == {"inline_text": {"text": f"{yard.at('copy')}\n"}}
            assert call.read_file(yard.at("lib/a.txt")).ok
            assert call.write_file(yard.at("lib/a.txt"), "x").status == "forbidden"
        assert (yard.tree(), contents_of(yard.base / "copy")) == (before, {"a.txt": b"child\n", "n": b"x\n"})
        parent, roots = yard.session.list_roots(), child.list_roots()
        assert roots == {"primary": yard.at("copy"), "additional": parent["additional"]}
        assert child.merge().ok
        assert yard.tree() == {**before, "work/a.txt": "child\n", "work/n": "x\n"}

    def test_of_a_session_that_was_anchored_elsewhere(self, yard: Yard) -> None:
        yard.session.set_workspace_anchor(yard.at("outside"))
        before = yard.tree()
        child = yard.session.fork(files="copy", to=yard.at("copy"))
        assert contents_of(yard.base / "copy") == {"a.txt": b"outside one\noutside two\n"}
        assert child.perform("write_file", {"path": "a.txt", "content": "child\n"})[0].ok
        assert (yard.tree(), yard.text("copy/a.txt")) == (before, "child\n")
        assert child.merge().ok
        assert yard.tree() == {**before, "outside/a.txt": "child\n"}

    def test_what_is_mounted_inside_is_mounted_inside_the_copy(self, yard: Yard) -> None:
        (yard.base / "work/vendor").mkdir()
        (yard.base / "work/vendor/v.txt").write_text("vendor\n")
        yard.session.add_root(yard.at("work/vendor"), mount_mode="read_only")
        child = yard.session.fork(files="copy", to=yard.at("copy"))
        for path in ("vendor/v.txt", yard.at("copy/vendor/v.txt")):
            receipt, _ = child.perform("write_file", {"path": path, "content": "x"})
            assert (receipt.status, receipt.error_code) == ("forbidden", "path_not_allowed")
        assert yard.at("copy/vendor") in [one["path"] for one in child.list_roots()["additional"]]

    def test_from_an_earlier_point_only_what_was_done_to_those_files_goes_back(self, yard: Yard) -> None:
        with yard.session.call("both") as call:
            assert call.write_file(yard.at("ext/a.txt"), "later\n").ok
            assert call.write_file(yard.at("ext/b.txt"), "later\n").ok
            assert call.write_file("c.txt", "later\n").ok
        after = yard.tree()
        yard.session.fork(call.id, files="copy", to=yard.at("copy"))
        assert (yard.tree(), contents_of(yard.base / "copy")) == (after, {"a.txt": b"work one\nwork two\n"})


class TestBoundary:
    """A mount never gives more than the capability and the policy allow."""

    def open(self, base: Path, **how: Any) -> Yard:
        return Yard(base, **how)

    def test_roots_of_the_capability_still_hold(self, tmp_path: Path) -> None:
        yard = self.open(tmp_path, capability={"fs_roots": ["src", str(tmp_path / "lib")]})
        assert yard.read(yard.at("lib/a.txt")) == "lib one\nlib two\n"
        (tmp_path / "ext/src").mkdir()
        for path in ("ext/a.txt", "ext/src/a.txt", "box/a.txt"):
            assert yard.denied("write_file", path=yard.at(path), content="x")
        yard.opened.close()

    def test_operations_and_limits_still_hold(self, tmp_path: Path) -> None:
        yard = self.open(tmp_path, capability={"allowed_fs_ops": ["read", "write"], "max_write_bytes": 3})
        found = yard.perform("grep", pattern="one", path=yard.at("lib"))
        assert (found["status"], found["error_code"]) == ("forbidden", "fs_op_not_allowed")
        found = yard.perform("write_file", path=yard.at("ext/a.txt"), content="long")
        assert (found["status"], found["error_code"]) == ("forbidden", "max_write_bytes_exceeded")
        assert yard.perform("write_file", path=yard.at("ext/a.txt"), content="ok")["status"] == "ok"
        yard.opened.close()

    def test_a_policy_holds_by_whole_and_relative_names(self, tmp_path: Path) -> None:
        rules = [
            {"ops": ["read"], "paths": [f"{tmp_path}/ext/secret/**"], "verdict": "deny"},
            {"ops": ["write"], "paths": [f"{tmp_path}/box/**"], "verdict": "deny"},
        ]
        yard = self.open(tmp_path, policy=rules)
        (tmp_path / "ext/secret").mkdir()
        (tmp_path / "ext/secret/key").write_text("k")
        assert yard.denied("read_file", path=yard.at("ext/secret/key"))
        assert yard.denied("write_file", path=yard.at("box/a.txt"), content="x")
        yard.opened.close()

    def test_git_is_not_for_file_tools_anywhere(self, tmp_path: Path) -> None:
        yard = self.open(tmp_path)
        (tmp_path / "ext/.git").mkdir()
        assert yard.denied("write_file", path=yard.at("ext/.git/config"), content="x")
        assert yard.denied("delete", path=yard.at("ext"), recursive=True)
        yard.opened.close()


ROOTS = ("work", "ext", "box")
DEEDS = st.lists(
    st.tuples(st.sampled_from(ROOTS), st.sampled_from(["write", "edit", "delete", "exec"]), st.booleans()),
    min_size=1,
    max_size=7,
)


@given(DEEDS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_one_call_does_in_each_root_what_it_was_told_to_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[str, str, bool]], ends_well: bool
) -> None:
    yard = Yard(tmp_path_factory.mktemp("yard"))
    before = yard.tree()
    expected = {name: {"a.txt": yard.text(f"{name}/a.txt")} for name in ROOTS}
    with yard.session.call() as call:
        for number, (root, deed, other) in enumerate(deeds):
            name = "b.txt" if other else "a.txt"
            _do(yard, call, deed, root, name, str(number))
            _model(expected[root], deed, name, str(number))
        seen = {root: _seen(yard, call, root) for root in ROOTS}
        if not ends_well:
            call.fail("no")
    assert seen == expected
    if ends_well:
        here = {path: text for path, text in yard.tree().items() if path.startswith(("work/", "ext/"))}
        assert here == {f"{root}/{name}": text for root in ("work", "ext") for name, text in expected[root].items()}
        assert yard.tree() == before or yard.session.undo().ok
    assert yard.tree() == before
    yard.opened.close()


def _do(yard: Yard, call: CallHandle, deed: str, root: str, name: str, text: str) -> None:
    folder = "." if root == "work" else yard.at(root)
    path = f"{folder}/{name}"
    if deed == "write":
        assert call.write_file(path, text).ok
    elif deed == "edit":
        old = call.read_file(path)
        assert not old.ok or call.write_file(path, (old.text or "") + text, expected_digest=old.digest).ok
    elif deed == "delete":
        assert call.delete(path).status in ("ok", "not_found")
    else:
        ran = call.exec(["sh", "-c", f"printf {text} > {name}"], cwd=folder)
        assert (ran.status, ran.exit_code) == ("ok", 0)


def _model(files: dict[str, str], deed: str, name: str, text: str) -> None:
    if deed == "delete":
        files.pop(name, None)
    elif deed != "edit" or name in files:
        files[name] = files[name] + text if deed == "edit" else text


def _seen(yard: Yard, call: CallHandle, root: str) -> dict[str, str]:
    folder = "." if root == "work" else yard.at(root)
    found = {name: call.read_file(f"{folder}/{name}") for name in ("a.txt", "b.txt")}
    return {name: one.text or "" for name, one in found.items() if one.ok}


PATHS = st.lists(st.sampled_from(["..", ".", "work", "lib", "ext", "box", "outside", "a.txt", "n", ""]), max_size=6)


@given(PATHS, st.booleans())
@settings(max_examples=120)
def test_no_spelling_of_a_path_writes_where_it_may_not(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], absolute: bool
) -> None:
    yard = _shared(tmp_path_factory)
    frozen = {
        path: text for path, text in yard.tree().items() if path.startswith(("lib", "outside", "external", "box"))
    }
    path = "/".join([str(yard.base), *names] if absolute else names) or "."
    yard.session.perform("write_file", {"path": path, "content": "written\n", "create_parents": True})
    now = {path: text for path, text in yard.tree().items() if path.startswith(("lib", "outside", "external", "box"))}
    assert now == frozen
    assert sorted(os.listdir(yard.base)) == ["box", "ext", "external", "home", "lib", "outside", "work"]


_yards: list[Yard] = []


def _shared(factory: pytest.TempPathFactory) -> Yard:
    """One for all examples: what they write where they may is no matter here."""
    if not _yards:
        _yards.append(Yard(factory.mktemp("yard")))
    return _yards[0]
