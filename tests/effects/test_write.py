"""write_file, delete, move, mkdir: receipts, and what they leave on the disk."""

from __future__ import annotations

import os
import stat
from base64 import b64encode
from typing import Any

import pytest

from mulligan.testing import Dir, File, Link, as_tree
from mulligan.testing.builders import Sketch
from mulligan.values.digest import digest_of
from tests.effects.effect_session import EffectSession, Fields, failed, text


def mode_of(effects: EffectSession, path: str) -> int:
    return stat.S_IMODE((effects.root / path).lstat().st_mode)


def written(effects: EffectSession, path: str, size: int, *, created: bool, **more: Any) -> Fields:
    mtime_ns = (effects.root / path).stat().st_mtime_ns
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
    def test_text_is_written(self, effects: EffectSession, content: str | Fields) -> None:
        found = effects.perform("host.fs.write_file", path="a.txt", content=content)
        assert found == written(effects, "a.txt", 3, created=True)
        assert effects.tree() == as_tree({"a.txt": "é\n"})

    @pytest.mark.req("S1.write_file.content_bytes")
    @pytest.mark.parametrize("prefix", ["base64:", ""])
    def test_bytes_are_written(self, effects: EffectSession, prefix: str) -> None:
        content = {"inline_bytes": {"bytes": prefix + b64encode(b"\xff\0").decode()}}
        assert effects.perform("write_file", path="a", content=content) == written(effects, "a", 2, created=True)
        assert effects.bytes_of("a") == b"\xff\0"

    @pytest.mark.req("S1.write_file.content_blob_ref")
    def test_a_blob_of_this_session_is_written(self, effects: EffectSession) -> None:
        data = os.urandom(20_000)
        effects.plant({"a": data})
        ref = effects.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
        found = effects.perform("write_file", path="b", content={"blob_ref": {"blob_ref": ref}})
        assert found == written(effects, "b", 20_000, created=True)
        assert effects.bytes_of("b") == data

    @pytest.mark.req("S1.write_file.mode_overwrite", "D9.write_mode_kept", "AR.exec_bit_kept")
    def test_overwriting_keeps_the_mode(self, effects: EffectSession) -> None:
        effects.plant({"a": File(b"old", 0o751)})
        assert effects.perform("write_file", path="a", content="new") == written(effects, "a", 3, created=False)
        assert effects.tree() == {"a": File(b"new", 0o751)}

    @pytest.mark.req("AR.symlink_not_replaced")
    def test_writing_through_a_link_leaves_the_link(self, effects: EffectSession) -> None:
        effects.plant({"d/real": "old", "link": Link("d/real"), "to-d": Link("d"), "hangs": Link("d/new")})
        for path, real in (("link", "d/real"), ("to-d/real", "d/real"), ("hangs", "d/new")):
            assert effects.perform("write_file", path=path, content=path)["status"] == "ok"
            assert effects.bytes_of(real) == path.encode() and (effects.root / "link").is_symlink()
        assert (effects.root / "hangs").is_symlink()

    @pytest.mark.req("S1.write_file.mode_create_new", "S1.write_file.conflict", "D9.write_file_exists")
    @pytest.mark.parametrize("path", ["f", "d", "link", "dangling"])
    def test_create_new_refuses_an_existing_path(self, effects: EffectSession, path: str) -> None:
        sketch = {"f": "x", "d": None, "link": Link("f"), "dangling": Link("gone")}
        effects.plant(sketch)
        refusal = effects.refused("write_file", path=path, content="new", mode="create_new")
        assert refusal == failed("file_exists", "conflict")
        assert effects.tree() == as_tree(sketch)

    def test_create_new_makes_a_new_file(self, effects: EffectSession) -> None:
        found = effects.perform("write_file", path="a", content="x", mode="create_new")
        assert found == written(effects, "a", 1, created=True)

    @pytest.mark.req("S1.write_file.create_parents", "D9.write_parent_not_found")
    def test_parents_are_created_only_on_request(self, effects: EffectSession) -> None:
        for path in ("x/a", "x/y/z/a"):
            assert effects.refused("write_file", path=path, content="1") == failed("parent_not_found")
        assert effects.tree() == {}
        found = effects.perform("write_file", path="x/y/z/a", content="1", create_parents=True)
        assert found == written(effects, "x/y/z/a", 1, created=True)
        assert effects.tree() == as_tree({"x/y/z/a": "1"})

    @pytest.mark.req("S1.write_file.error", "S1.write_file.error_code")
    def test_a_file_in_place_of_a_parent_directory_is_an_error(self, effects: EffectSession) -> None:
        effects.plant({"f": "x", "dangling": Link("gone")})
        before = effects.tree()
        for path in ("f/a", "f/b/a", "dangling/a"):
            refusal = effects.refused("write_file", path=path, content="1", create_parents=True)
            assert refusal == failed("not_directory")
            assert effects.refused("write_file", path=path, content="1") == failed("parent_not_found")
        assert effects.tree() == before

    def test_writing_a_directory_is_an_error(self, effects: EffectSession) -> None:
        effects.plant({"d": None})
        assert effects.refused("write_file", path="d", content="1") == failed("is_directory")

    @pytest.mark.req("D9.write_expected_digest")
    def test_a_write_with_expected_digest_fails_if_the_file_changed(self, effects: EffectSession) -> None:
        effects.plant({"a": "one"})
        one, two = digest_of(b"one"), digest_of(b"two")
        found = effects.perform("write_file", path="a", content="two", expected_digest=one)
        assert found == written(effects, "a", 3, created=False)
        refusal = effects.refused("write_file", path="a", content="three", expected_digest=one)
        assert refusal == failed("stale_base", "conflict", current_digest=two)
        refusal = effects.refused("write_file", path="new", content="x", expected_digest=one)
        assert refusal == failed("stale_base", "conflict")
        assert effects.tree() == as_tree({"a": "two"})

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
    def test_invalid_parameters_are_refused(self, effects: EffectSession, params: Fields, code: str) -> None:
        assert effects.refused("write_file", **params) == failed(code)
        assert effects.tree() == {}

    @pytest.mark.req("AR.no_leftover_temp")
    def test_no_temporary_file_remains(self, effects: EffectSession) -> None:
        for number in range(3):
            effects.perform("write_file", path="a", content=str(number))
        effects.perform("write_file", path="a", content="x", mode="create_new")
        assert effects.tree() == as_tree({"a": "2"})

    def test_a_path_claimed_by_another_call_is_a_conflict(self, effects: EffectSession) -> None:
        effects.plant({"a": "one"})
        with effects.session.call() as call:
            call.write_file("a", "two")
            younger = EffectSession(effects.workspace, effects.workspace.session("younger"))
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
        assert effects.tree() == as_tree({"a": "two"})


@pytest.mark.req("D9.effect_delete")
class TestDelete:
    def test_a_file_is_deleted(self, effects: EffectSession) -> None:
        effects.plant({"d/a": "x"})
        expected = {"status": "ok", "deleted": True, "removed_paths": 1, "summary_text": "Deleted d/a"}
        assert effects.perform("host.fs.delete", path="d/a") == expected
        assert effects.tree() == as_tree({"d": None})

    @pytest.mark.req("W25.delete_symlink_itself")
    def test_a_link_is_deleted_and_not_its_target(self, effects: EffectSession) -> None:
        effects.plant({"d/a": "x", "to-d": Link("d"), "to-a": Link("d/a"), "out": Link("/etc"), "loop": Link("loop")})
        for path in ("to-d", "to-a", "out", "loop/"):
            assert effects.perform("delete", path=path, recursive=True)["removed_paths"] == 1
        assert effects.tree() == as_tree({"d/a": "x"})

    def test_a_directory_is_deleted_only_with_recursive(self, effects: EffectSession) -> None:
        effects.plant({"d/e/f": "x", "d/g": "", "empty": None})
        assert effects.refused("delete", path="d") == failed("directory_not_empty")
        expected = {"status": "ok", "deleted": True, "removed_paths": 4, "summary_text": "Deleted d"}
        assert effects.perform("delete", path="d", recursive=True) == expected
        assert effects.perform("delete", path="empty")["removed_paths"] == 1
        assert effects.tree() == {}

    def test_a_very_deep_directory_is_deleted(self, effects: EffectSession) -> None:
        deep = "/".join(["d"] * 1_200)
        here = os.open(effects.root, os.O_RDONLY)
        for _ in range(1_200):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        assert effects.perform("exists", path=deep)["exists"] is True
        assert effects.perform("delete", path="d", recursive=True)["removed_paths"] == 1_200
        assert effects.tree() == {}

    def test_deleting_a_missing_path_is_not_found(self, effects: EffectSession) -> None:
        for path in ("no", "no/no"):
            assert effects.refused("delete", path=path) == failed("path_not_found", "not_found")

    def test_a_delete_can_be_undone(self, effects: EffectSession) -> None:
        sketch: Sketch = {"d/a": File(b"x", 0o600), "d/l": Link("a"), "d/e": Dir(0o700)}
        effects.plant(sketch)
        before = effects.tree()
        effects.perform("delete", path="d", recursive=True)
        assert effects.session.undo().ok
        assert effects.tree() == before


@pytest.mark.req("D9.effect_move")
class TestMove:
    def test_a_file_keeps_its_mode_and_time(self, effects: EffectSession) -> None:
        effects.plant({"a": File(b"x", 0o750, 1_000_000_000), "d": None})
        expected = {"status": "ok", "moved": True, "moved_paths": 1, "summary_text": "Moved a to d/b"}
        assert effects.perform("host.fs.move", path="a", to="d/b") == expected
        assert effects.tree() == as_tree({"d/b": File(b"x", 0o750)})
        assert (effects.root / "d/b").stat().st_mtime_ns == 1_000_000_000

    def test_a_directory_is_moved_with_its_content(self, effects: EffectSession) -> None:
        effects.plant({"d/e/f": File(b"x", 0o600), "d/l": Link("e/f"), "d/empty": None})
        assert effects.perform("move", path="d", to="z")["moved_paths"] == 5
        assert effects.tree() == as_tree({"z/e/f": File(b"x", 0o600), "z/l": Link("e/f"), "z/empty": None})

    def test_a_link_is_moved_and_not_its_target(self, effects: EffectSession) -> None:
        effects.plant({"a": "x", "link": Link("a")})
        effects.perform("move", path="link", to="other")
        assert effects.tree() == as_tree({"a": "x", "other": Link("a")})

    def test_moving_onto_a_file_needs_overwrite(self, effects: EffectSession) -> None:
        effects.plant({"a": "new", "b": "old", "d": None})
        before = effects.tree()
        assert effects.refused("move", path="a", to="b") == failed("file_exists", "conflict")
        assert effects.refused("move", path="a", to="d", overwrite=True) == failed("file_exists", "conflict")
        assert effects.tree() == before
        assert effects.perform("move", path="a", to="b", overwrite=True)["moved"] is True
        assert effects.tree() == as_tree({"b": "new", "d": None})
        assert effects.session.undo().ok
        assert effects.tree() == before

    def test_moving_a_missing_path_or_into_itself_is_refused(self, effects: EffectSession) -> None:
        effects.plant({"d/a": "x"})
        before = effects.tree()
        assert effects.refused("move", path="d/a", to="no/a") == failed("parent_not_found")
        assert effects.refused("move", path="no", to="b") == failed("path_not_found", "not_found")
        assert effects.refused("move", path="d", to="d/e") == failed("invalid_path")
        expected = {"status": "ok", "moved": False, "summary_text": "d/a stays where it is"}
        assert effects.perform("move", path="d/a", to="d/../d/a") == expected
        assert effects.tree() == before


@pytest.mark.req("D9.effect_mkdir")
class TestMakeDir:
    def test_one_and_nested_directories_are_created(self, effects: EffectSession) -> None:
        expected = {"status": "ok", "created": True, "summary_text": "Made directory a"}
        assert effects.perform("host.fs.mkdir", path="a") == expected
        assert effects.refused("mkdir", path="b/c") == failed("parent_not_found")
        assert effects.perform("mkdir", path="b/c", parents=True)["created"] is True
        expected = {"status": "ok", "created": False, "summary_text": "Directory b/c was there already"}
        assert effects.perform("mkdir", path="b/c", parents=True) == expected
        assert effects.tree() == as_tree({"a": None, "b/c": None})

    @pytest.mark.parametrize("path", ["f", "d", "link"])
    def test_an_existing_path_is_refused(self, effects: EffectSession, path: str) -> None:
        effects.plant({"f": "", "d": None, "link": Link("gone")})
        assert effects.refused("mkdir", path=path) == failed("file_exists", "conflict")
