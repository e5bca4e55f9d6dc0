"""apply_patch through the effect: receipts, links, modes, directories, and the unified form."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mulligan.testing import File, Link, as_tree
from mulligan.testing.builders import Sketch
from tests.effects.effect_session import EffectSession, Fields, denied, failed, text


def v4a(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def patched(*paths: str, dry_run: bool = False, **ops: int) -> Fields:
    counts = {name: ops.get(name, 0) for name in ("add", "update", "delete", "move")}
    files = f"{len(paths)} file{'' if len(paths) == 1 else 's'}"
    words = f"Patch dry-run: {files} would change" if dry_run else f"Applied patch: {files} changed"
    shown = " ".join(f"{name}={count}" for name, count in counts.items())
    body = {"status": "ok", "files_changed": len(paths), "changed_paths": list(paths), "ops": counts}
    return {**body, "summary_text": f"{words} ({shown})"}


def rejected(effects: EffectSession, patch: str, **params: Any) -> Fields:
    """The refusal of a patch, which must have changed nothing; its diagnostics are bounded and checked here."""
    before = effects.tree()
    found = effects.refused("apply_patch", patch=patch, **params)
    assert effects.tree() == before
    errors = found.pop("errors")
    assert 1 <= len(errors) <= 20 and all(isinstance(error, str) and error for error in errors)
    return found


@pytest.mark.req("S1.effects.apply_patch", "S1.verify.apply_patch_paths", "S1.apply_patch.native")
class TestV4a:
    @pytest.mark.req(
        "S1.apply_patch.ok",
        "S1.apply_patch.patch_text",
        "S1.apply_patch.files_changed",
        "S1.apply_patch.changed_paths",
        "S1.apply_patch.ops",
        "S1.apply_patch.summary_text",
        "S1.apply_patch.format_default_v4a",
        "S1.apply_patch.dry_run_default_false",
        "D9.v4a_add_ends_with_newline",
        "D9.tool_aliases",
    )
    @pytest.mark.parametrize("wrap", [str, text])
    def test_add_update_delete_and_move_apply(self, effects: EffectSession, wrap: Any) -> None:
        effects.plant({"u": "a\nb\n", "d": "x", "m": File(b"1\n2\n", 0o755)})
        patch = v4a(
            "*** Update File: u", "@@", " a", "-b", "+B",
            "*** Delete File: d",
            "*** Add File: n/e/w", "+new",
            "*** Update File: m", "*** Move to: k/m", "@@", "-2", "+two",
        )  # fmt: skip
        found = effects.perform("host.fs.apply_patch", patch=wrap(patch))
        assert found == patched("d", "k/m", "m", "n/e/w", "u", add=1, update=2, delete=1, move=1)
        expected: Sketch = {"u": "a\nB\n", "n/e/w": "new\n", "k/m": File(b"1\ntwo\n", 0o755)}
        assert effects.tree() == as_tree(expected)

    @pytest.mark.req("S1.apply_patch.patch_blob_ref")
    def test_a_patch_can_be_a_blob(self, effects: EffectSession) -> None:
        patch = v4a("*** Add File: a", "+" + "x" * 20_000)
        effects.plant({"the.patch": patch})
        ref = effects.perform("read_file", path="the.patch")["content"]["blob"]["blob_ref"]
        assert effects.perform("apply_patch", patch={"blob_ref": {"blob_ref": ref}}) == patched("a", add=1)

    @pytest.mark.req("S1.apply_patch.dry_run_no_writes")
    def test_a_dry_run_returns_the_same_receipt_and_changes_nothing(self, effects: EffectSession) -> None:
        effects.plant({"a": "1\n"})
        before = effects.tree()
        patch = v4a("*** Update File: a", "@@", "-1", "+2", "*** Add File: b", "+x")
        assert effects.perform("apply_patch", patch=patch, dry_run=True) == patched(
            "a", "b", dry_run=True, add=1, update=1
        )
        assert effects.tree() == before

    @pytest.mark.req("S1.apply_patch.error", "S1.apply_patch.patch_not_empty", "S1.apply_patch.error_code")
    @pytest.mark.parametrize(
        ("params", "code"),
        [
            ({"patch": ""}, "invalid_patch_empty"),
            ({"patch": " \n\t\n"}, "invalid_patch_empty"),
            ({"patch": text(" ")}, "invalid_patch_empty"),
            ({"patch": {}}, "invalid_patch"),
            ({"patch": {"blob_ref": {"blob_ref": "x"}}}, "invalid_patch"),
            ({"patch": {"inline_bytes": {"bytes": "base64:/w=="}}}, "invalid_patch"),
            ({"patch": "x", "patch_format": "ed"}, "unsupported_patch_format"),
            ({"patch": 3}, "invalid_params"),
            ({}, "invalid_params"),
        ],
    )
    def test_invalid_patch_arguments_are_refused(self, effects: EffectSession, params: Fields, code: str) -> None:
        assert effects.refused("apply_patch", **params) == failed(code)

    @pytest.mark.req("S1.apply_patch.parse_error", "S1.apply_patch.errors_bounded")
    @pytest.mark.parametrize("patch", ["nonsense", "*** Begin Patch\n*** Frob File: a\n*** End Patch"])
    def test_an_unparsable_patch_is_refused(self, effects: EffectSession, patch: str) -> None:
        assert rejected(effects, patch) == failed("patch_parse_error", "parse_error")

    @pytest.mark.req("S1.apply_patch.reject", "S1.apply_patch.no_partial_writes")
    @pytest.mark.parametrize(
        ("lines", "code"),
        [
            (["*** Update File: a", "@@", "-nope", "+x"], "hunk_rejected"),
            (["*** Update File: a", "@@ class Nowhere", "-1", "+x"], "hunk_rejected"),
            (["*** Update File: twice", "@@", "-x", "+y"], "ambiguous_matches"),
            (["*** Update File: bin", "@@", "-x", "+y"], "update_target_non_utf8"),
            (["*** Add File: d", "+x"], "not_a_file"),
            (["*** Update File: link", "*** Move to: b", "@@", "-1", "+x"], "not_a_file"),
            (["*** Add File: ", "+x"], "patch_parse_error"),
            (["*** Add File: a/below", "+x"], "invalid_path"),
            (["*** Add File: n", "+x", "*** Add File: n/below", "+x"], "invalid_path"),
        ],
    )
    def test_rejected_hunks_are_listed(self, effects: EffectSession, lines: list[str], code: str) -> None:
        effects.plant({"a": "1\n", "twice": "x\ny\nx\n", "bin": b"\xff", "d/f": "", "link": Link("a")})
        patch = v4a("*** Add File: first", "+x", *lines)
        before = effects.tree()
        found = effects.refused("apply_patch", patch=patch)
        status = "parse_error" if code == "patch_parse_error" else "reject"
        assert (found["status"], found["error_code"]) == (status, code)
        assert effects.tree() == before

    @pytest.mark.req("S1.apply_patch.not_found")
    def test_missing_targets_are_refused(self, effects: EffectSession) -> None:
        for verb, lines in (("update", ["@@", "-x", "+y"]), ("delete", [])):
            patch = v4a("*** Add File: first", "+x", f"*** {verb.title()} File: no", *lines)
            assert rejected(effects, patch) == failed(f"{verb}_target_not_found", "not_found")

    @pytest.mark.req("S1.apply_patch.forbidden", "D8.patch_targets_checked", "A2.root_by_component")
    @pytest.mark.parametrize("name", ["../x", "/etc/x", ".git/config", "sub/.git/hooks/x", ".GIT/x", "out/x"])
    def test_targets_outside_the_root_or_in_git_are_refused(self, effects: EffectSession, name: str) -> None:
        effects.plant({"out": Link("/tmp"), ".git/config": "", "m": "x\n"})
        code = "symlink_not_allowed" if name == "out/x" else "path_not_allowed"
        for lines in ([f"*** Add File: {name}", "+x"], ["*** Update File: m", f"*** Move to: {name}"]):
            assert rejected(effects, v4a("*** Add File: first", "+x", *lines)) == denied(code)

    def test_deleting_a_link_deletes_the_link_itself(self, effects: EffectSession) -> None:
        effects.plant({"a": "x", "link": Link("a"), "out": Link("/etc/passwd"), "hangs": Link("gone")})
        patch = v4a(*(f"*** Delete File: {name}" for name in ("link", "out", "hangs")))
        assert effects.perform("apply_patch", patch=patch) == patched("hangs", "link", "out", delete=3)
        assert effects.tree() == as_tree({"a": "x"})
        assert effects.session.undo().ok
        assert effects.tree() == as_tree(
            {"a": "x", "link": Link("a"), "out": Link("/etc/passwd"), "hangs": Link("gone")}
        )

    def test_updating_a_link_changes_its_target(self, effects: EffectSession) -> None:
        effects.plant({"a": "1\n", "link": Link("a")})
        patch = v4a("*** Update File: link", "@@", "-1", "+2")
        assert effects.perform("apply_patch", patch=patch) == patched("a", update=1)
        assert effects.tree() == as_tree({"a": "2\n", "link": Link("a")})

    @pytest.mark.req("D9.v4a_replaces_existing")
    def test_add_and_move_onto_a_file_replace_it_and_can_be_undone(self, effects: EffectSession) -> None:
        effects.plant({"a": File(b"old\n", 0o700), "m": File(b"moved\n", 0o600), "t": "gone\n"})
        before = effects.tree()
        patch = v4a("*** Add File: a", "+new", "*** Update File: m", "*** Move to: t")
        assert effects.perform("apply_patch", patch=patch) == patched("a", "m", "t", add=1, update=1, move=1)
        assert effects.tree() == as_tree({"a": File(b"new\n", 0o700), "t": File(b"moved\n", 0o600)})
        assert effects.session.undo().ok
        assert effects.tree() == before

    def test_a_file_takes_the_place_of_a_directory_that_loses_its_last_file(self, effects: EffectSession) -> None:
        effects.plant({"a/b/c": "x", "a/e": None})
        before = effects.tree()
        patch = v4a("*** Delete File: a/b/c", "*** Add File: a", "+file")
        assert effects.perform("apply_patch", patch=patch) == patched("a", "a/b/c", add=1, delete=1)
        assert effects.tree() == as_tree({"a": "file\n"})
        back = v4a("*** Delete File: a", "*** Add File: a/b", "+again")
        assert effects.perform("apply_patch", patch=back) == patched("a", "a/b", add=1, delete=1)
        assert effects.tree() == as_tree({"a/b": "again\n"})
        assert effects.session.undo().ok and effects.session.undo().ok
        assert effects.tree() == before

    def test_a_file_does_not_take_the_place_of_a_directory_with_other_files(self, effects: EffectSession) -> None:
        effects.plant({"a/b": "x", "a/kept": "x"})
        patch = v4a("*** Delete File: a/b", "*** Add File: a", "+file")
        assert rejected(effects, patch) == failed("not_a_file", "reject")

    @pytest.mark.req("D9.v4a_crlf_and_modes")
    def test_crlf_and_modes_are_kept(self, effects: EffectSession) -> None:
        effects.plant({"a": File(b"1\r\n2\r\n", 0o750)})
        patch = v4a("*** Update File: a", "@@", " 1", "-2", "+two", "+three")
        effects.perform("apply_patch", patch=patch)
        assert effects.tree() == {"a": File(b"1\r\ntwo\r\nthree\r\n", 0o750)}

    def test_a_patch_without_changes_is_ok(self, effects: EffectSession) -> None:
        effects.plant({"a": "1\n"})
        patch = v4a("*** Update File: a", "@@", "-1", "+1")
        assert effects.perform("apply_patch", patch=patch) == patched(update=1)

    @pytest.mark.parametrize("kind", ["v4a", "unified"])
    def test_paths_begin_at_the_working_directory(self, effects: EffectSession, kind: str) -> None:
        effects.plant({"w/a": "1\n", "a": "1\n"})
        opened = effects.perform("host.session.open", target={"local": {"workdir": "w"}})
        unified = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n"
        patch = unified if kind == "unified" else v4a("*** Update File: a", "@@", "-1", "+2")
        params = {"patch": patch, "patch_format": kind, "session_id": opened["session_id"]}
        assert effects.perform("host.fs.apply_patch", **params) == patched("a", update=1)
        assert effects.tree() == as_tree({"w/a": "2\n", "a": "1\n"})


UNIFIED = """\
diff --git a/exec b/exec
old mode 100644
new mode 100755
diff --git a/link b/link
new file mode 120000
--- /dev/null
+++ b/link
@@ -0,0 +1 @@
+dir/a
\\ No newline at end of file
diff --git a/dir/a b/dir/a
--- a/dir/a
+++ b/dir/a
@@ -1,2 +1,2 @@
 1
-2\r
+two\r
diff --git a/old b/new/name
similarity index 50%
rename from old
rename to new/name
--- a/old
+++ b/new/name
@@ -1 +1 @@
-x
+y
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-bye
diff --git a/made b/made
new file mode 100755
--- /dev/null
+++ b/made
@@ -0,0 +1 @@
+#!/bin/sh
"""


@pytest.mark.req("D9.patch_unified")
class TestUnified:
    def test_modes_links_renames_creations_and_deletions(self, effects: EffectSession) -> None:
        effects.plant({"exec": "", "dir/a": "1\n2\r\n", "old": File(b"x\n", 0o640), "gone": "bye\n"})
        before = effects.tree()
        found = effects.perform("apply_patch", patch=UNIFIED, patch_format="unified")
        paths = ("dir/a", "exec", "gone", "link", "made", "new/name", "old")
        assert found == patched(*paths, add=2, update=3, delete=1, move=1)
        after: Sketch = {
            "exec": File(b"", 0o755),
            "dir/a": "1\ntwo\r\n",
            "link": Link("dir/a"),
            "new/name": File(b"y\n", 0o640),
            "made": File(b"#!/bin/sh\n", 0o755),
        }
        assert effects.tree() == as_tree(after)
        assert effects.session.undo().ok
        assert effects.tree() == before

    @pytest.mark.parametrize("verb", ["rename", "copy"])
    def test_a_link_is_moved_without_a_mode_line(self, effects: EffectSession, verb: str) -> None:
        effects.plant({"a": Link("f"), "f": "1\n"})
        patch = f"diff --git a/a b/b\nsimilarity index 100%\n{verb} from a\n{verb} to b\n"
        assert effects.perform("apply_patch", patch=patch, patch_format="unified")["status"] == "ok"
        stayed: Sketch = {"a": Link("f")} if verb == "copy" else {}
        assert effects.tree() == as_tree({**stayed, "b": Link("f"), "f": "1\n"})

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_a_file_with_the_same_final_content_is_not_listed_as_changed(
        self, effects: EffectSession, dry_run: bool
    ) -> None:
        effects.plant({"a": "1\n"})
        made = "--- /dev/null\n+++ b/d/x\n@@ -0,0 +1 @@\n+x\n--- a/d/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        back = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-2\n+1\n"
        found = effects.perform("apply_patch", patch=made + back, patch_format="unified", dry_run=dry_run)
        assert (found["status"], found["files_changed"], found["changed_paths"]) == ("ok", 0, [])
        assert effects.tree() == as_tree({"a": "1\n"})

    def test_every_rejected_hunk_is_listed(self, effects: EffectSession) -> None:
        effects.plant({"a": "1\n", "b": "2\n"})
        patch = (
            "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+y\n"
            "--- a/b\n+++ b/b\n@@ -1 +1 @@\n-2\n+3\n"
            "--- a/c\n+++ b/c\n@@ -1 +1 @@\n-2\n+3\n"
        )
        rejects = [
            {"path": "a", "hunks": [{"index": 0, "reason": "context_mismatch"}]},
            {"path": "c", "hunks": [{"index": 0, "reason": "target_missing"}]},
        ]
        assert rejected(effects, patch, patch_format="unified") == failed("hunk_rejected", "reject", rejects=rejects)

    @pytest.mark.req("D8.patch_targets_checked")
    @pytest.mark.parametrize("name", ["../x", "d/../../x", "/etc/x", "//etc/passwd", ".git/config", "d/.GIT/x", "."])
    def test_targets_outside_the_root_or_in_git_are_refused(self, effects: EffectSession, name: str) -> None:
        effects.plant({".git/config": "x\n", "m": "x\n"})
        first = "--- /dev/null\n+++ b/first\n@@ -0,0 +1 @@\n+x\n"
        edit = f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-x\n+y\n"
        made = f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n"
        moved = f"diff --git a/m b/{name}\nsimilarity index 100%\nrename from m\nrename to {name}\n"
        for patch in (edit, made, moved):
            assert rejected(effects, first + patch, patch_format="unified") == denied("path_not_allowed")

    @pytest.mark.parametrize("name", ["~/x", "d/", "base64:Li4veA==/"])
    def test_invalid_file_names_are_refused(self, effects: EffectSession, name: str) -> None:
        patch = f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n"
        found = rejected(effects, patch, patch_format="unified")
        assert (found["status"], found["rejects"][0]["hunks"]) == ("reject", [{"index": 0, "reason": "path_rejected"}])

    @pytest.mark.parametrize("name", ["d", "fifo"])
    def test_a_target_that_is_no_file_is_listed_as_rejected(self, effects: EffectSession, name: str) -> None:
        effects.plant({"d/f": ""})
        os.mkfifo(effects.root / "fifo")
        patch = f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n"
        found = effects.refused("apply_patch", patch=patch, patch_format="unified")
        assert found.pop("errors")
        rejects = [{"path": name, "hunks": [{"index": 0, "reason": "target_exists"}]}]
        assert found == failed("not_a_file", "reject", rejects=rejects)

    def test_a_name_with_a_line_break_is_listed_in_its_wire_form(self, effects: EffectSession) -> None:
        effects.plant({"a\nb": "1\n"})
        patch = '--- "a/a\\nb"\n+++ "b/a\\nb"\n@@ -1 +1 @@\n-{}\n+2\n'
        found = rejected(effects, patch.format("x"), patch_format="unified")
        changed = effects.perform("apply_patch", patch=patch.format("1"), patch_format="unified")["changed_paths"]
        assert [one["path"] for one in found["rejects"]] == changed == ["base64:YQpi"]

    def test_a_patch_through_a_link_changes_the_target(self, effects: EffectSession) -> None:
        effects.plant({"d/a": "1\n", "in": Link("d"), "out": Link("/tmp")})
        patch = "--- a/{0}/a\n+++ b/{0}/a\n@@ -1 +1 @@\n-1\n+2\n"
        found = rejected(effects, patch.format("in"), patch_format="unified")
        assert (found["status"], found["error_code"]) == ("reject", "hunk_rejected")
        assert rejected(effects, patch.format("out"), patch_format="unified") == denied("symlink_not_allowed")

    def test_a_boundary_is_checked_for_files_not_for_their_parents(self, effects: EffectSession) -> None:
        effects.plant({"src/app/a": "1\n"})
        limited = effects.within({"fs_roots": ["src/app"]})
        patch = "--- a/src/app/a\n+++ b/src/app/a\n@@ -1 +1 @@\n-1\n+2\n"
        assert limited.perform("apply_patch", patch=patch, patch_format="unified")["status"] == "ok"
        other = "--- /dev/null\n+++ b/src/b\n@@ -0,0 +1 @@\n+x\n"
        assert rejected(limited, other, patch_format="unified") == denied("path_not_allowed")

    @pytest.mark.req("S1.apply_patch.parse_error")
    def test_text_without_a_diff_is_refused(self, effects: EffectSession) -> None:
        assert rejected(effects, "hello", patch_format="unified") == failed("patch_parse_error", "parse_error")


class TestHardLinks:
    V4A = v4a("*** Update File: a", "@@", "-1", "+2", "*** Update File: b", "@@", "-1", "+{}")
    UNIFIED = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n--- a/b\n+++ b/b\n@@ -1 +1 @@\n-1\n+{}\n"

    @pytest.mark.parametrize("dry_run", [False, True])
    @pytest.mark.parametrize("kind", ["v4a", "unified"])
    def test_one_file_with_two_names_cannot_become_two_files(
        self, effects: EffectSession, kind: str, dry_run: bool
    ) -> None:
        effects.plant({"a": "1\n"})
        os.link(effects.root / "a", effects.root / "b")
        patch = (self.V4A if kind == "v4a" else self.UNIFIED).format("3")
        found = rejected(effects, patch, patch_format=kind, dry_run=dry_run)
        rejects = {"rejects": [{"path": "b", "hunks": [{"index": 0, "reason": "context_mismatch"}]}]}
        assert found == failed("hunk_rejected", "reject", **(rejects if kind == "unified" else {}))

    @pytest.mark.parametrize("kind", ["v4a", "unified"])
    def test_one_file_may_get_the_same_change_under_both_names(self, effects: EffectSession, kind: str) -> None:
        effects.plant({"a": "1\n"})
        os.link(effects.root / "a", effects.root / "b")
        patch = (self.V4A if kind == "v4a" else self.UNIFIED).format("2")
        assert effects.perform("apply_patch", patch=patch, patch_format=kind) == {
            **patched("a", "b", update=2),
            "race_window": True,
        }
        assert effects.tree() == as_tree({"a": "2\n", "b": "2\n"})
