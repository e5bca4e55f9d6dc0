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
from mulligan.effects.handle import CallHandle
from mulligan.effects.running_commands import running_commands_of
from mulligan.testing import contents_of
from mulligan.values.errors import MulliganError
from tests.session.mounted_roots import CHANGING, LOOKING, Json, MountedRoots, at


class TestReading:
    @pytest.mark.req("D11.mount_paths_absolute", "D11.mount_read_only")
    @pytest.mark.parametrize(("tool", "params"), LOOKING)
    @pytest.mark.parametrize("name", ["lib", "ext", "box"])
    def test_every_mounted_root_can_be_read(self, mounted: MountedRoots, tool: str, params: Json, name: str) -> None:
        assert mounted.perform(tool, **at(params, mounted.at(name)))["status"] == "ok"

    @pytest.mark.parametrize(("tool", "params"), LOOKING)
    @pytest.mark.parametrize("name", ["outside", "external", "extra", "lib/../outside", "home"])
    def test_a_directory_that_is_not_mounted_cannot_be_read(
        self, mounted: MountedRoots, tool: str, params: Json, name: str
    ) -> None:
        assert mounted.denied(tool, **at(params, f"{mounted.base}/{name}"))

    @pytest.mark.req("D11.mount_paths_absolute")
    def test_results_in_a_mounted_root_have_absolute_paths(self, mounted: MountedRoots) -> None:
        found = mounted.perform("grep", pattern="two", path=mounted.at("lib"))
        assert found["matches"] == {"inline_text": {"text": f"{mounted.at('lib')}/a.txt:2:lib two"}}
        found = mounted.perform("glob", pattern="**/*", path=mounted.at("box"))
        assert found["paths"] == {"inline_text": {"text": f"{mounted.at('box')}/a.txt"}}
        ran = mounted.perform("exec", argv=["sh", "-c", "echo x > n"], cwd=mounted.at("ext"))
        assert ran["changes"] == [{"path": f"{mounted.at('ext')}/n", "kind": "created"}]

    @pytest.mark.req("D11.mount_paths_absolute")
    def test_a_relative_path_never_leads_into_a_mounted_root(self, mounted: MountedRoots) -> None:
        assert mounted.denied("read_file", path="../lib/a.txt")
        assert mounted.denied("write_file", path="../ext/a.txt", content="x")

    def test_links_do_not_lead_from_root_to_root(self, mounted: MountedRoots) -> None:
        for root in ("work", "lib", "ext"):
            os.symlink(mounted.at("outside/a.txt"), mounted.at(f"{root}/out"))
            os.symlink(mounted.at("lib"), mounted.at(f"{root}/inner"))
        for root in ("work", "lib", "ext"):
            assert mounted.perform("read_file", path=mounted.at(f"{root}/out"))["status"] == "forbidden"
        for root in ("work", "ext"):
            assert (
                mounted.perform("write_file", path=mounted.at(f"{root}/inner/a.txt"), content="x")["status"]
                == "forbidden"
            )
        assert mounted.text("lib/a.txt") == "lib one\nlib two\n"

    def test_a_root_that_went_away_is_not_found_and_one_that_came_back_is(self, mounted: MountedRoots) -> None:
        assert mounted.read(mounted.at("lib/a.txt")) == "lib one\nlib two\n"
        os.rename(mounted.at("lib"), mounted.at("away"))
        assert mounted.perform("read_file", path=mounted.at("lib/a.txt"))["status"] == "not_found"
        (mounted.base / "lib").mkdir()
        (mounted.base / "lib" / "a.txt").write_text("another\n")
        assert mounted.read(mounted.at("lib/a.txt")) == "another\n"
        os.remove(mounted.at("lib/a.txt"))
        os.rmdir(mounted.at("lib"))
        os.rename(mounted.at("away"), mounted.at("lib"))


class TestReadOnly:
    @pytest.mark.req("D11.mount_read_only", "D11.mount_modes")
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_a_read_only_root_cannot_be_changed(self, mounted: MountedRoots, tool: str, params: Json) -> None:
        assert mounted.denied(tool, **at(params, mounted.at("lib")))

    @pytest.mark.req("D11.mount_modes", "S3.policy.default_mount_mode")
    def test_it_is_the_mode_of_a_root_that_says_none(self, mounted: MountedRoots) -> None:
        mounted.session.add_root(mounted.at("outside"))
        assert mounted.read(mounted.at("outside/a.txt")) == "outside one\noutside two\n"
        assert mounted.denied("write_file", path=mounted.at("outside/a.txt"), content="x")

    @pytest.mark.parametrize("name", ["outside", "external"])
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_neither_does_anything_that_is_not_mounted(
        self, mounted: MountedRoots, tool: str, params: Json, name: str
    ) -> None:
        assert mounted.denied(tool, **at(params, mounted.at(name)))

    @pytest.mark.req("S3.roots.remove")
    def test_unmounting_takes_the_right_to_look_away(self, mounted: MountedRoots) -> None:
        mounted.session.remove_root(mounted.at("lib"))
        assert mounted.denied("read_file", path=mounted.at("lib/a.txt"))


class TestExtend:
    @pytest.mark.req("D11.mount_modes")
    @pytest.mark.parametrize(("tool", "params"), CHANGING)
    def test_an_effect_in_a_mounted_root_is_undone_and_redone_as_one_call(
        self, mounted: MountedRoots, tool: str, params: Json
    ) -> None:
        before = mounted.tree()
        receipt, call = mounted.session.perform(tool, at(params, mounted.at("ext")))
        assert receipt.status == "ok"
        after = mounted.tree()
        assert after != before or tool == "mkdir"
        undone = mounted.session.undo()
        assert (undone.ok, undone.of, mounted.tree()) == (True, (call,), before)
        assert all(one.path.startswith(mounted.at("ext")) for one in undone.outcomes)
        assert mounted.session.redo().ok and mounted.tree() == after
        assert mounted.session.restore(call).ok and mounted.tree() == before

    def test_a_failed_effect_leaves_nothing(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        failing = mounted.perform(
            "exec", argv=["sh", "-c", "echo x > n; exit 3"], cwd=mounted.at("ext"), rollback_on="nonzero"
        )
        assert (failing["status"], mounted.tree()) == ("error", before)

    def test_another_writers_edit_is_kept_on_the_undo_operation(self, mounted: MountedRoots) -> None:
        (mounted.base / "ext/long.txt").write_text("one\n-\n-\ntwo\n")
        mounted.perform("edit_file", path=mounted.at("ext/long.txt"), old_string="one", new_string="agent")
        (mounted.base / "ext/long.txt").write_text("agent\n-\n-\nperson\n")
        assert mounted.session.undo().ok
        assert mounted.text("ext/long.txt") == "one\n-\n-\nperson\n"

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
    def test_one_effect_takes_place_in_one_root(self, mounted: MountedRoots, tool: str, params: Json) -> None:
        real = {
            name: v.replace("EXT", mounted.at("ext")).replace("BOX", mounted.at("box")) for name, v in params.items()
        }
        assert mounted.denied(tool, **real)

    def test_a_command_in_the_background_is_found_from_everywhere(self, mounted: MountedRoots) -> None:
        started = mounted.perform(
            "host.exec", argv=["sh", "-c", "echo done > n; echo out"], cwd=mounted.at("ext"), background=True
        )
        posted = running_commands_of(mounted.opened.open_root).find(started["exec_id"])
        assert posted is not None and posted.ended.wait(600)
        seen = mounted.perform("exec_output", exec_id=started["exec_id"])
        assert (seen["running"], seen["content"]) == (False, {"inline_text": {"text": "out\n"}})
        assert mounted.text("ext/n") == "done\n"


class TestOneCallInSeveralRoots:
    def test_a_call_in_several_roots_commits_and_is_undone_as_one(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        call = mounted.work_in_two_roots()
        after = mounted.tree()
        assert (after["work/a.txt"], after["ext/a.txt"], after["ext/new.txt"]) == ("W\n", "E\next two\n", "N\n")
        plan = mounted.session.undo(dry_run=True)
        assert sorted(one.path for one in plan.outcomes) == sorted(
            ["a.txt", "b.txt", mounted.at("ext/a.txt"), mounted.at("ext/new.txt")]
        )
        undone = mounted.session.undo()
        assert undone.ok and call in undone.of and mounted.tree() == before
        assert mounted.session.redo().ok and mounted.tree() == after
        with pytest.raises(MulliganError):
            mounted.session.redo()
        assert mounted.session.restore(call).ok and mounted.tree() == before
        assert mounted.session.redo().ok and mounted.tree() == after
        assert mounted.session.rewind(call, "after").ok and mounted.tree() == after
        assert mounted.session.rewind(call, "before").ok and mounted.tree() == before

    def test_whatever_ends_it_badly_puts_all_roots_back(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        with pytest.raises(KeyError), mounted.session.call() as call:
            call.write_file("a.txt", "W\n")
            call.write_file(mounted.at("ext/a.txt"), "E\n")
            call.exec(["sh", "-c", "echo x > y"], cwd=mounted.at("ext"))
            raise KeyError
        assert mounted.tree() == before
        with mounted.session.call() as call:
            call.write_file(mounted.at("ext/a.txt"), "E\n")
            call.write_file("a.txt", "W\n")
            call.fail("no")
        assert (call.status, mounted.tree()) == ("aborted", before)

    def test_whatever_runs_in_it_is_stopped_in_whichever_root(self, mounted: MountedRoots) -> None:
        os.mkfifo(mounted.base / "begun")
        command = ["sh", "-c", f"echo half > half; echo > {mounted.at('begun')}; exec sleep 600"]
        found: list[tuple[str, str]] = []

        def run(root: str) -> None:
            done = call.exec(command, cwd=mounted.at(root))
            found.append((done.status, done.error_code))

        with mounted.session.call() as call:
            assert call.write_file("a.txt", "W\n").ok
            # One after the other, as each command claims its root while it begins.
            threads = [threading.Thread(target=run, args=(root,)) for root in ("ext", "work")]
            for thread in threads:
                thread.start()
                (mounted.base / "begun").read_text()
            call.stop()
            for thread in threads:
                thread.join()
        assert found == [("error", "cancelled")] * 2
        assert mounted.text("work/a.txt") == "W\n"
        assert not os.path.exists(mounted.at("ext/half")) and not os.path.exists(mounted.at("work/half"))

    def test_a_nested_call_can_fail_alone(self, mounted: MountedRoots) -> None:
        with mounted.session.call("outer") as outer:
            outer.write_file(mounted.at("ext/a.txt"), "kept\n")
            with mounted.session.call("inner") as inner:
                inner.write_file(mounted.at("ext/a.txt"), "lost\n")
                inner.write_file("a.txt", "lost\n")
                inner.fail("no")
            outer.write_file(mounted.at("ext/b.txt"), "kept\n")
        tree = mounted.tree()
        assert (tree["ext/a.txt"], tree["ext/b.txt"], tree["work/a.txt"]) == (
            "kept\n",
            "kept\n",
            "work one\nwork two\n",
        )
        assert mounted.session.undo().ok
        assert mounted.tree()["ext/a.txt"] == "ext one\next two\n"

    @pytest.mark.req("D11.mount_modes")
    def test_a_call_that_began_in_a_mounted_root_works_in_the_primary_one_by_relative_paths(
        self, mounted: MountedRoots
    ) -> None:
        before = mounted.tree()
        with mounted.session.call() as call:
            assert (
                call.write_file(mounted.at("ext/b.txt"), "B\n").ok
                and call.write_file(mounted.at("ext/c.txt"), "C\n").ok
            )
            assert call.edit_file("a.txt", "work one", "W").ok
            assert call.read_file("a.txt").text == "W\nwork two\n"
            assert call.delete("a.txt").ok
            assert call.exec(["sh", "-c", "echo x > n"]).changes == [{"path": "n", "kind": "created"}]
        after = {**before, "ext/b.txt": "B\n", "ext/c.txt": "C\n", "work/n": "x\n"}
        del after["work/a.txt"]
        assert mounted.tree() == after
        assert mounted.session.undo().ok and mounted.tree() == before

    def test_a_call_may_use_a_blob_of_one_root_in_another(self, mounted: MountedRoots) -> None:
        with mounted.session.call() as call:
            assert call.write_file("b.txt", "B\n").ok
            told = call.exec(["sh", "-c", "yes | head -c 200000"], cwd=mounted.at("ext")).to_dict()
            reference = told["stdout"]["blob"]["blob_ref"]
            for root in ("ext", "work"):
                assert call.exec(["sh", "-c", "cat > big"], cwd=mounted.at(root), stdin_ref=reference).ok
        assert mounted.text("ext/big") == mounted.text("work/big") == "y\n" * 100_000

    def test_a_turn_over_several_roots_is_rolled_back_whole(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        with mounted.session.turn("everywhere"):
            mounted.perform("write_file", path="a.txt", content="W\n")
            mounted.perform("write_file", path=mounted.at("ext/a.txt"), content="E\n")
            self.work_more(mounted)
            mounted.perform("write_file", path=mounted.at("box/a.txt"), content="B\n")
        after = mounted.tree()
        rolled = mounted.session.rollback()
        assert rolled.ok and mounted.tree() == before and mounted.read(mounted.at("box/a.txt")) == "box one\nbox two\n"
        assert mounted.session.redo().ok and mounted.tree() == after and mounted.read(mounted.at("box/a.txt")) == "B\n"

    def test_and_the_turn_before_it_after_that(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        with mounted.session.turn("one"):
            mounted.perform("write_file", path="a.txt", content="W\n")
        with mounted.session.turn("two"):
            self.work_more(mounted)
        assert mounted.session.rollback().ok and mounted.session.rollback().ok
        assert mounted.tree() == before

    def work_more(self, mounted: MountedRoots) -> None:
        with mounted.session.call() as call:
            call.write_file("c.txt", "C\n")
            call.write_file(mounted.at("ext/c.txt"), "C\n")

    def test_with_refuse_a_conflict_in_one_root_leaves_all_alone(self, mounted: MountedRoots) -> None:
        mounted.work_in_two_roots()
        (mounted.base / "ext/a.txt").write_text("a person\n")
        before = mounted.tree()
        assert not mounted.session.undo(on_conflict="refuse").ok and mounted.tree() == before
        merged = mounted.session.undo()
        assert (
            not merged.ok
            and mounted.text("ext/a.txt") == "a person\n"
            and mounted.text("work/a.txt").startswith("work")
        )

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

    def test_kill_9_in_the_middle_puts_all_roots_back(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        command = [sys.executable, "-c", self.CHILD, mounted.at("work"), mounted.at("home"), mounted.at("ext")]
        child = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == "written\n"
        assert mounted.tree() != before
        child.kill()
        child.communicate()
        with mulligan.open(mounted.at("work"), store=mounted.at("home")) as again:
            assert mounted.tree() == before
            assert len(again.recovered) == 2


class TestNesting:
    """Roots inside roots: the innermost one decides, however a path is written."""

    def nest(self, mounted: MountedRoots, mode: str) -> str:
        (mounted.base / "work/vendor").mkdir()
        (mounted.base / "work/vendor/v.txt").write_text("vendor\n")
        assert mounted.session.add_root(mounted.at("work/vendor"), mount_mode=mode)["ok"]
        return mounted.at("work/vendor/v.txt")

    @pytest.mark.req("D11.mount_read_only")
    def test_a_read_only_root_inside_the_primary_is_read_only(self, mounted: MountedRoots) -> None:
        inside = self.nest(mounted, "read_only")
        os.symlink("vendor", mounted.at("work/alias"))
        for path in (inside, "vendor/v.txt", "./vendor/../vendor/v.txt"):
            assert mounted.read(path) == "vendor\n"
        for path in (inside, "vendor/v.txt", "alias/v.txt", "vendor/new.txt", "alias/new.txt"):
            assert mounted.denied("write_file", path=path, content="x")
        for tool, params in (
            ("delete", {"path": "vendor", "recursive": True}),
            ("delete", {"path": "alias/v.txt"}),
            ("move", {"path": "vendor", "to": "elsewhere"}),
            ("move", {"path": "a.txt", "to": "alias/a.txt"}),
        ):
            assert mounted.denied(tool, **params)
        assert mounted.perform("write_file", path="vendored.txt", content="x")["status"] == "ok"

    @pytest.mark.req("D11.mount_sandboxed")
    def test_a_sandboxed_root_inside_the_primary_is_written_to_a_copy(self, mounted: MountedRoots) -> None:
        inside = self.nest(mounted, "sandboxed")
        assert mounted.perform("write_file", path="vendor/v.txt", content="aside\n")["status"] == "ok"
        assert (mounted.text("work/vendor/v.txt"), mounted.read(inside), mounted.read("vendor/v.txt")) == (
            "vendor\n",
            "aside\n",
            "aside\n",
        )
        assert mounted.session.merge_root(mounted.at("work/vendor")).ok
        assert mounted.text("work/vendor/v.txt") == "aside\n"

    def test_an_extended_root_inside_the_primary_is_as_before(self, mounted: MountedRoots) -> None:
        self.nest(mounted, "extend")
        before = mounted.tree()
        with mounted.session.call() as call:
            assert call.write_file("vendor/v.txt", "one\n").ok
            assert call.write_file("a.txt", "two\n").ok
        assert mounted.session.undo().ok and mounted.tree() == before

    def test_a_root_around_the_primary(self, mounted: MountedRoots) -> None:
        (mounted.base / "outside/inner").mkdir()
        mounted.session.set_workspace_anchor(
            {"primary": mounted.at("outside/inner"), "additional_roots": [mounted.at("outside")]}
        )
        assert mounted.perform("write_file", path="x.txt", content="mine\n")["status"] == "ok"
        assert mounted.perform("write_file", path=mounted.at("outside/inner/y.txt"), content="mine\n")["status"] == "ok"
        assert mounted.read(mounted.at("outside/a.txt")) == "outside one\noutside two\n"
        assert mounted.denied("write_file", path=mounted.at("outside/a.txt"), content="x")


class TestAnchored:
    @pytest.mark.req("S3.anchor.read_and_replace")
    def test_relative_paths_begin_at_the_primary_root(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        mounted.session.set_workspace_anchor(
            {"primary": mounted.at("outside"), "additional_roots": [mounted.at("work")]}
        )
        assert mounted.read("a.txt") == "outside one\noutside two\n"
        assert mounted.perform("write_file", path="a.txt", content="anchored\n")["status"] == "ok"
        ran = mounted.perform("shell", command="cat a.txt; echo x > n")
        assert ran["stdout"] == {"inline_text": {"text": "anchored\n"}}
        assert (mounted.text("outside/a.txt"), mounted.text("outside/n")) == ("anchored\n", "x\n")
        assert mounted.denied("write_file", path=mounted.at("work/a.txt"), content="x")
        assert mounted.denied("read_file", path=mounted.at("ext/a.txt"))
        mounted.session.undo()
        mounted.session.undo()
        assert mounted.tree() == before
        assert mounted.session.redo().ok and mounted.text("outside/a.txt") == "anchored\n"
        mounted.session.set_workspace_anchor(None)
        assert mounted.read("a.txt") == "work one\nwork two\n"


class TestForkedWithFiles:
    """A fork with files of its own works in them, wherever its parent works."""

    def test_of_a_session_with_mounted_roots(self, mounted: MountedRoots) -> None:
        before = mounted.tree()
        child = mounted.session.fork(files="copy", to=mounted.at("copy"))
        with child.call() as call:
            assert call.write_file("a.txt", "child\n").ok
            ran = call.exec(["sh", "-c", "pwd; echo x > n"])
            assert ran.stdout == {"inline_text": {"text": f"{mounted.at('copy')}\n"}}
            assert call.read_file(mounted.at("lib/a.txt")).ok
            assert call.write_file(mounted.at("lib/a.txt"), "x").status == "forbidden"
        assert (mounted.tree(), contents_of(mounted.base / "copy")) == (before, {"a.txt": b"child\n", "n": b"x\n"})
        parent, roots = mounted.session.list_roots(), child.list_roots()
        assert roots == {"primary": mounted.at("copy"), "additional": parent["additional"]}
        assert child.merge().ok
        assert mounted.tree() == {**before, "work/a.txt": "child\n", "work/n": "x\n"}

    def test_of_a_session_that_was_anchored_elsewhere(self, mounted: MountedRoots) -> None:
        mounted.session.set_workspace_anchor(mounted.at("outside"))
        before = mounted.tree()
        child = mounted.session.fork(files="copy", to=mounted.at("copy"))
        assert contents_of(mounted.base / "copy") == {"a.txt": b"outside one\noutside two\n"}
        assert child.perform("write_file", {"path": "a.txt", "content": "child\n"})[0].ok
        assert (mounted.tree(), mounted.text("copy/a.txt")) == (before, "child\n")
        assert child.merge().ok
        assert mounted.tree() == {**before, "outside/a.txt": "child\n"}

    def test_a_root_mounted_inside_is_mounted_inside_the_copy(self, mounted: MountedRoots) -> None:
        (mounted.base / "work/vendor").mkdir()
        (mounted.base / "work/vendor/v.txt").write_text("vendor\n")
        mounted.session.add_root(mounted.at("work/vendor"), mount_mode="read_only")
        child = mounted.session.fork(files="copy", to=mounted.at("copy"))
        for path in ("vendor/v.txt", mounted.at("copy/vendor/v.txt")):
            receipt, _ = child.perform("write_file", {"path": path, "content": "x"})
            assert (receipt.status, receipt.error_code) == ("forbidden", "path_not_allowed")
        assert mounted.at("copy/vendor") in [one["path"] for one in child.list_roots()["additional"]]

    def test_from_an_earlier_point_only_what_was_done_to_those_files_is_undone(self, mounted: MountedRoots) -> None:
        with mounted.session.call("both") as call:
            assert call.write_file(mounted.at("ext/a.txt"), "later\n").ok
            assert call.write_file(mounted.at("ext/b.txt"), "later\n").ok
            assert call.write_file("c.txt", "later\n").ok
        after = mounted.tree()
        mounted.session.fork(call.id, files="copy", to=mounted.at("copy"))
        assert (mounted.tree(), contents_of(mounted.base / "copy")) == (after, {"a.txt": b"work one\nwork two\n"})


class TestBoundary:
    """A mount never gives more than the capability and the policy allow."""

    def open(self, base: Path, **how: Any) -> MountedRoots:
        return MountedRoots(base, **how)

    def test_roots_of_the_capability_still_hold(self, tmp_path: Path) -> None:
        mounted = self.open(tmp_path, capability={"fs_roots": ["src", str(tmp_path / "lib")]})
        assert mounted.read(mounted.at("lib/a.txt")) == "lib one\nlib two\n"
        (tmp_path / "ext/src").mkdir()
        for path in ("ext/a.txt", "ext/src/a.txt", "box/a.txt"):
            assert mounted.denied("write_file", path=mounted.at(path), content="x")
        mounted.opened.close()

    def test_operations_and_limits_still_hold(self, tmp_path: Path) -> None:
        mounted = self.open(tmp_path, capability={"allowed_fs_ops": ["read", "write"], "max_write_bytes": 3})
        found = mounted.perform("grep", pattern="one", path=mounted.at("lib"))
        assert (found["status"], found["error_code"]) == ("forbidden", "fs_op_not_allowed")
        found = mounted.perform("write_file", path=mounted.at("ext/a.txt"), content="long")
        assert (found["status"], found["error_code"]) == ("forbidden", "max_write_bytes_exceeded")
        assert mounted.perform("write_file", path=mounted.at("ext/a.txt"), content="ok")["status"] == "ok"
        mounted.opened.close()

    def test_a_policy_holds_by_whole_and_relative_names(self, tmp_path: Path) -> None:
        rules = [
            {"ops": ["read"], "paths": [f"{tmp_path}/ext/secret/**"], "verdict": "deny"},
            {"ops": ["write"], "paths": [f"{tmp_path}/box/**"], "verdict": "deny"},
        ]
        mounted = self.open(tmp_path, policy=rules)
        (tmp_path / "ext/secret").mkdir()
        (tmp_path / "ext/secret/key").write_text("k")
        assert mounted.denied("read_file", path=mounted.at("ext/secret/key"))
        assert mounted.denied("write_file", path=mounted.at("box/a.txt"), content="x")
        mounted.opened.close()

    def test_git_is_not_for_file_tools_anywhere(self, tmp_path: Path) -> None:
        mounted = self.open(tmp_path)
        (tmp_path / "ext/.git").mkdir()
        assert mounted.denied("write_file", path=mounted.at("ext/.git/config"), content="x")
        assert mounted.denied("delete", path=mounted.at("ext"), recursive=True)
        mounted.opened.close()


ROOTS = ("work", "ext", "box")
DEEDS = st.lists(
    st.tuples(st.sampled_from(ROOTS), st.sampled_from(["write", "edit", "delete", "exec"]), st.booleans()),
    min_size=1,
    max_size=7,
)


@given(DEEDS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_one_call_does_in_each_root_what_it_was_asked_to_do_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[tuple[str, str, bool]], ends_well: bool
) -> None:
    mounted = MountedRoots(tmp_path_factory.mktemp("mounted"))
    before = mounted.tree()
    expected = {name: {"a.txt": mounted.text(f"{name}/a.txt")} for name in ROOTS}
    with mounted.session.call() as call:
        for number, (root, deed, other) in enumerate(deeds):
            name = "b.txt" if other else "a.txt"
            _do(mounted, call, deed, root, name, str(number))
            _model(expected[root], deed, name, str(number))
        seen = {root: _seen(mounted, call, root) for root in ROOTS}
        if not ends_well:
            call.fail("no")
    assert seen == expected
    if ends_well:
        here = {path: text for path, text in mounted.tree().items() if path.startswith(("work/", "ext/"))}
        assert here == {f"{root}/{name}": text for root in ("work", "ext") for name, text in expected[root].items()}
        assert mounted.tree() == before or mounted.session.undo().ok
    assert mounted.tree() == before
    mounted.opened.close()


def _do(mounted: MountedRoots, call: CallHandle, deed: str, root: str, name: str, text: str) -> None:
    folder = "." if root == "work" else mounted.at(root)
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


def _seen(mounted: MountedRoots, call: CallHandle, root: str) -> dict[str, str]:
    folder = "." if root == "work" else mounted.at(root)
    found = {name: call.read_file(f"{folder}/{name}") for name in ("a.txt", "b.txt")}
    return {name: one.text or "" for name, one in found.items() if one.ok}


PATHS = st.lists(st.sampled_from(["..", ".", "work", "lib", "ext", "box", "outside", "a.txt", "n", ""]), max_size=6)


@given(PATHS, st.booleans())
@settings(max_examples=120)
def test_no_spelling_of_a_path_writes_where_it_may_not(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], absolute: bool
) -> None:
    mounted = _shared(tmp_path_factory)
    frozen = {
        path: text for path, text in mounted.tree().items() if path.startswith(("lib", "outside", "external", "box"))
    }
    path = "/".join([str(mounted.base), *names] if absolute else names) or "."
    mounted.session.perform("write_file", {"path": path, "content": "written\n", "create_parents": True})
    now = {
        path: text for path, text in mounted.tree().items() if path.startswith(("lib", "outside", "external", "box"))
    }
    assert now == frozen
    assert sorted(os.listdir(mounted.base)) == ["box", "ext", "external", "home", "lib", "outside", "work"]


_mounted_roots: list[MountedRoots] = []


def _shared(factory: pytest.TempPathFactory) -> MountedRoots:
    """One for all examples: what they write where they may is no matter here."""
    if not _mounted_roots:
        _mounted_roots.append(MountedRoots(factory.mktemp("mounted")))
    return _mounted_roots[0]
