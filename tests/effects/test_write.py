"""write_file, delete, move, mkdir: receipts, and what they leave on the disk."""

from __future__ import annotations

import os
import stat
from base64 import b64encode
from typing import Any

import pytest

from effects.stage import Fields, Stage, failed, text
from mulligan.testing import Dir, File, Link, as_tree
from mulligan.testing.builders import Sketch
from mulligan.values.digest import digest_of


def mode_of(stage: Stage, path: str) -> int:
    return stat.S_IMODE((stage.root / path).lstat().st_mode)


def written(stage: Stage, path: str, size: int, *, created: bool, **more: Any) -> Fields:
    mtime_ns = (stage.root / path).stat().st_mtime_ns
    return {"status": "ok", "written_bytes": size, "created": created, "new_mtime_ns": mtime_ns, **more}


@pytest.mark.req("S1.effects.write_file", "S1.verify.write_file_paths", "S1.goal.host_paths_not_workspace")
class TestWriteFile:
    @pytest.mark.req(
        "S1.write_file.ok",
        "S1.write_file.path",
        "S1.write_file.content_text",
        "S1.write_file.written_bytes",
        "S1.write_file.created",
        "S1.write_file.new_mtime_ns",
    )
    @pytest.mark.parametrize("content", ["é\n", text("é\n")])
    def test_text(self, stage: Stage, content: str | Fields) -> None:
        found = stage.perform("host.fs.write_file", path="a.txt", content=content)
        assert found == written(stage, "a.txt", 3, created=True)
        assert stage.tree() == as_tree({"a.txt": "é\n"})

    @pytest.mark.req("S1.write_file.content_bytes")
    @pytest.mark.parametrize("prefix", ["base64:", ""])
    def test_bytes(self, stage: Stage, prefix: str) -> None:
        content = {"inline_bytes": {"bytes": prefix + b64encode(b"\xff\0").decode()}}
        assert stage.perform("write_file", path="a", content=content) == written(stage, "a", 2, created=True)
        assert stage.bytes_of("a") == b"\xff\0"

    @pytest.mark.req("S1.write_file.content_blob_ref")
    def test_a_blob_this_session_was_given(self, stage: Stage) -> None:
        data = os.urandom(20_000)
        stage.plant({"a": data})
        ref = stage.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        found = stage.perform("write_file", path="b", content={"blob_ref": {"blob_ref": ref}})
        assert found == written(stage, "b", 20_000, created=True)
        assert stage.bytes_of("b") == data

    @pytest.mark.req("S1.write_file.mode_overwrite", "D9.write_mode_kept", "AR.exec_bit_kept")
    def test_overwriting_keeps_the_mode(self, stage: Stage) -> None:
        stage.plant({"a": File(b"old", 0o751)})
        assert stage.perform("write_file", path="a", content="new") == written(stage, "a", 3, created=False)
        assert stage.tree() == {"a": File(b"new", 0o751)}

    @pytest.mark.req("AR.symlink_not_replaced")
    def test_writing_through_a_link_leaves_the_link(self, stage: Stage) -> None:
        stage.plant({"d/real": "old", "link": Link("d/real"), "to-d": Link("d"), "hangs": Link("d/new")})
        for path, real in (("link", "d/real"), ("to-d/real", "d/real"), ("hangs", "d/new")):
            assert stage.perform("write_file", path=path, content=path)["status"] == "ok"
            assert stage.bytes_of(real) == path.encode() and (stage.root / "link").is_symlink()
        assert (stage.root / "hangs").is_symlink()

    @pytest.mark.req("S1.write_file.mode_create_new", "S1.write_file.conflict", "D9.write_file_exists")
    @pytest.mark.parametrize("path", ["f", "d", "link", "dangling"])
    def test_create_new_takes_no_name_that_is_taken(self, stage: Stage, path: str) -> None:
        sketch = {"f": "x", "d": None, "link": Link("f"), "dangling": Link("gone")}
        stage.plant(sketch)
        refusal = stage.refused("write_file", path=path, content="new", mode="create_new")
        assert refusal == failed("file_exists", "conflict")
        assert stage.tree() == as_tree(sketch)

    def test_create_new_makes_a_new_file(self, stage: Stage) -> None:
        found = stage.perform("write_file", path="a", content="x", mode="create_new")
        assert found == written(stage, "a", 1, created=True)

    @pytest.mark.req("S1.write_file.create_parents", "D9.write_parent_not_found")
    def test_parents_are_made_only_when_asked_for(self, stage: Stage) -> None:
        for path in ("x/a", "x/y/z/a"):
            assert stage.refused("write_file", path=path, content="1") == failed("parent_not_found")
        assert stage.tree() == {}
        found = stage.perform("write_file", path="x/y/z/a", content="1", create_parents=True)
        assert found == written(stage, "x/y/z/a", 1, created=True)
        assert stage.tree() == as_tree({"x/y/z/a": "1"})

    @pytest.mark.req("S1.write_file.error", "S1.write_file.error_code")
    def test_a_file_in_the_way_of_a_directory(self, stage: Stage) -> None:
        stage.plant({"f": "x", "dangling": Link("gone")})
        before = stage.tree()
        for path in ("f/a", "f/b/a", "dangling/a"):
            refusal = stage.refused("write_file", path=path, content="1", create_parents=True)
            assert refusal == failed("not_directory")
            assert stage.refused("write_file", path=path, content="1") == failed("parent_not_found")
        assert stage.tree() == before

    def test_a_directory_is_not_written(self, stage: Stage) -> None:
        stage.plant({"d": None})
        assert stage.refused("write_file", path="d", content="1") == failed("is_directory")

    @pytest.mark.req("D9.write_expected_digest")
    def test_compare_and_swap(self, stage: Stage) -> None:
        stage.plant({"a": "one"})
        one, two = digest_of(b"one"), digest_of(b"two")
        found = stage.perform("write_file", path="a", content="two", expected_digest=one)
        assert found == written(stage, "a", 3, created=False)
        refusal = stage.refused("write_file", path="a", content="three", expected_digest=one)
        assert refusal == failed("stale_base", "conflict", current_digest=two)
        refusal = stage.refused("write_file", path="new", content="x", expected_digest=one)
        assert refusal == failed("stale_base", "conflict")
        assert stage.tree() == as_tree({"a": "two"})

    @pytest.mark.parametrize(
        ("params", "code"),
        [
            ({"path": "a"}, "invalid_params"),
            ({"path": "a", "content": 3}, "invalid_params"),
            ({"path": "a", "content": {"text": "x"}}, "invalid_params"),
            ({"path": "a", "content": {"inline_text": "x"}}, "invalid_params"),
            ({"path": "a", "content": "x", "create_parents": "yes"}, "invalid_params"),
            ({"path": "a", "content": "x", "expected_digest": "x"}, "invalid_params"),
            ({"path": "a", "content": "x", "mode": "append"}, "invalid_mode"),
            ({"path": "a", "content": {}}, "invalid_content"),
            ({"path": "a", "content": {"inline_text": {"text": ""}, "blob_ref": {"blob_ref": ""}}}, "invalid_content"),
            ({"path": "a", "content": {"inline_bytes": {"bytes": "base64:@"}}}, "invalid_content"),
            ({"path": "a", "content": {"blob_ref": {"blob_ref": "nonsense"}}}, "invalid_content"),
            ({"path": "a", "content": {"blob_ref": {"blob_ref": "sha256:" + "0" * 64}}}, "invalid_content"),
            ({"path": "a", "content": "\ud800"}, "invalid_content"),
            ({"path": "", "content": "x"}, "invalid_path"),
        ],
    )
    def test_what_cannot_be_meant(self, stage: Stage, params: Fields, code: str) -> None:
        assert stage.refused("write_file", **params) == failed(code)
        assert stage.tree() == {}

    @pytest.mark.req("AR.no_leftover_temp")
    def test_nothing_is_left_beside_a_file(self, stage: Stage) -> None:
        for number in range(3):
            stage.perform("write_file", path="a", content=str(number))
        stage.perform("write_file", path="a", content="x", mode="create_new")
        assert stage.tree() == as_tree({"a": "2"})

    def test_a_claimed_path_is_a_conflict_here_and_an_error_elsewhere(self, stage: Stage) -> None:
        stage.plant({"a": "one"})
        with stage.session.call() as call:
            call.write_file("a", "two")
            younger = Stage(stage.bench, stage.bench.session("younger"))
            refusal = younger.refused("write_file", path="a", content="x")
            assert refusal == failed("path_claimed", "conflict", claimed_by=[call.id])
            refusal = younger.refused("edit_file", path="a", old_string="two", new_string="x")
            assert refusal == failed("path_claimed", claimed_by=[call.id])
            hunk = "@@ -1 +1 @@\n-one\n\\ No newline at end of file\n+x\n"
            for patch, kind in (
                ("*** Begin Patch\n*** Delete File: a\n*** End Patch", "v4a"),
                ("*** Begin Patch\n*** Update File: a\n@@\n-one\n+x\n*** End Patch", "v4a"),
                (f"--- a/a\n+++ b/a\n{hunk}", "unified"),
            ):
                refusal = younger.refused("apply_patch", patch=patch, patch_format=kind)
                assert refusal == failed("path_claimed", claimed_by=[call.id])
            for effect, more in (("delete", {}), ("move", {"to": "b"})):
                assert younger.refused(effect, path="a", **more) == failed("path_claimed", claimed_by=[call.id])
        assert stage.tree() == as_tree({"a": "two"})


@pytest.mark.req("D9.effect_delete")
class TestDelete:
    def test_a_file(self, stage: Stage) -> None:
        stage.plant({"d/a": "x"})
        expected = {"status": "ok", "deleted": True, "removed_paths": 1, "summary_text": "Deleted d/a"}
        assert stage.perform("host.fs.delete", path="d/a") == expected
        assert stage.tree() == as_tree({"d": None})

    @pytest.mark.req("W25.delete_symlink_itself")
    def test_a_link_and_not_what_it_leads_to(self, stage: Stage) -> None:
        stage.plant({"d/a": "x", "to-d": Link("d"), "to-a": Link("d/a"), "out": Link("/etc"), "loop": Link("loop")})
        for path in ("to-d", "to-a", "out", "loop/"):
            assert stage.perform("delete", path=path, recursive=True)["removed_paths"] == 1
        assert stage.tree() == as_tree({"d/a": "x"})

    def test_a_directory_only_as_a_whole_and_when_asked_for(self, stage: Stage) -> None:
        stage.plant({"d/e/f": "x", "d/g": "", "empty": None})
        assert stage.refused("delete", path="d") == failed("directory_not_empty")
        expected = {"status": "ok", "deleted": True, "removed_paths": 4, "summary_text": "Deleted d"}
        assert stage.perform("delete", path="d", recursive=True) == expected
        assert stage.perform("delete", path="empty")["removed_paths"] == 1
        assert stage.tree() == {}

    def test_a_very_deep_directory(self, stage: Stage) -> None:
        deep = "/".join(["d"] * 1_200)
        here = os.open(stage.root, os.O_RDONLY)
        for _ in range(1_200):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        assert stage.perform("exists", path=deep)["exists"] is True
        assert stage.perform("delete", path="d", recursive=True)["removed_paths"] == 1_200
        assert stage.tree() == {}

    def test_nothing(self, stage: Stage) -> None:
        for path in ("no", "no/no"):
            assert stage.refused("delete", path=path) == failed("path_not_found", "not_found")

    def test_it_can_be_undone(self, stage: Stage) -> None:
        sketch: Sketch = {"d/a": File(b"x", 0o600), "d/l": Link("a"), "d/e": Dir(0o700)}
        stage.plant(sketch)
        before = stage.tree()
        stage.perform("delete", path="d", recursive=True)
        assert stage.session.undo().ok
        assert stage.tree() == before


@pytest.mark.req("D9.effect_move")
class TestMove:
    def test_a_file_with_its_mode_and_time(self, stage: Stage) -> None:
        stage.plant({"a": File(b"x", 0o750, 1_000_000_000), "d": None})
        expected = {"status": "ok", "moved": True, "moved_paths": 1, "summary_text": "Moved a to d/b"}
        assert stage.perform("host.fs.move", path="a", to="d/b") == expected
        assert stage.tree() == as_tree({"d/b": File(b"x", 0o750)})
        assert (stage.root / "d/b").stat().st_mtime_ns == 1_000_000_000

    def test_a_directory_and_all_that_is_in_it(self, stage: Stage) -> None:
        stage.plant({"d/e/f": File(b"x", 0o600), "d/l": Link("e/f"), "d/empty": None})
        assert stage.perform("move", path="d", to="z")["moved_paths"] == 5
        assert stage.tree() == as_tree({"z/e/f": File(b"x", 0o600), "z/l": Link("e/f"), "z/empty": None})

    def test_a_link_moves_and_not_what_it_leads_to(self, stage: Stage) -> None:
        stage.plant({"a": "x", "link": Link("a")})
        stage.perform("move", path="link", to="other")
        assert stage.tree() == as_tree({"a": "x", "other": Link("a")})

    def test_onto_something(self, stage: Stage) -> None:
        stage.plant({"a": "new", "b": "old", "d": None})
        before = stage.tree()
        assert stage.refused("move", path="a", to="b") == failed("file_exists", "conflict")
        assert stage.refused("move", path="a", to="d", overwrite=True) == failed("file_exists", "conflict")
        assert stage.tree() == before
        assert stage.perform("move", path="a", to="b", overwrite=True)["moved"] is True
        assert stage.tree() == as_tree({"b": "new", "d": None})
        assert stage.session.undo().ok
        assert stage.tree() == before

    def test_nowhere_and_into_itself(self, stage: Stage) -> None:
        stage.plant({"d/a": "x"})
        before = stage.tree()
        assert stage.refused("move", path="d/a", to="no/a") == failed("parent_not_found")
        assert stage.refused("move", path="no", to="b") == failed("path_not_found", "not_found")
        assert stage.refused("move", path="d", to="d/e") == failed("invalid_path")
        expected = {"status": "ok", "moved": False, "summary_text": "d/a stays where it is"}
        assert stage.perform("move", path="d/a", to="d/../d/a") == expected
        assert stage.tree() == before


@pytest.mark.req("D9.effect_mkdir")
class TestMakeDir:
    def test_one_and_many(self, stage: Stage) -> None:
        expected = {"status": "ok", "created": True, "summary_text": "Made directory a"}
        assert stage.perform("host.fs.mkdir", path="a") == expected
        assert stage.refused("mkdir", path="b/c") == failed("parent_not_found")
        assert stage.perform("mkdir", path="b/c", parents=True)["created"] is True
        expected = {"status": "ok", "created": False, "summary_text": "Directory b/c was there already"}
        assert stage.perform("mkdir", path="b/c", parents=True) == expected
        assert stage.tree() == as_tree({"a": None, "b/c": None})

    @pytest.mark.parametrize("path", ["f", "d", "link"])
    def test_a_name_that_is_taken(self, stage: Stage, path: str) -> None:
        stage.plant({"f": "", "d": None, "link": Link("gone")})
        assert stage.refused("mkdir", path=path) == failed("file_exists", "conflict")
