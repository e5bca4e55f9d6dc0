"""All fourteen fields of a capability and every kind of policy, enforced inside the operations, each with its code."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from mulligan.boundary.capability import FS_OPS
from mulligan.testing import Link, as_tree
from mulligan.testing.builders import Sketch
from tests.effects.effect_session import EffectSession, Fields, denied, failed, text

PATCH = "*** Begin Patch\n*** Update File: src/a\n@@\n-one\n+two\n*** End Patch"

EVERY_EFFECT: dict[str, tuple[str, Fields]] = {
    "read_file": ("read", {"path": "src/a"}),
    "write_file": ("write", {"path": "src/a", "content": "two\n"}),
    "edit_file": ("edit", {"path": "src/a", "old_string": "one", "new_string": "two"}),
    "apply_patch": ("patch", {"patch": PATCH}),
    "grep": ("search", {"pattern": "one", "path": "src"}),
    "glob": ("list", {"pattern": "*", "path": "src"}),
    "stat": ("stat", {"path": "src/a"}),
    "exists": ("stat", {"path": "src/a"}),
    "list_dir": ("list", {"path": "src"}),
    "delete": ("write", {"path": "src/a"}),
    "move": ("write", {"path": "src/a", "to": "src/b"}),
    "mkdir": ("write", {"path": "src/d"}),
    "shell": ("exec", {"command": "true"}),
}
LINKS: Sketch = {"d/a": "one\n", "link": Link("d/a"), "to-d": Link("d"), "back": Link("../work/d/a")}
BEFORE: Sketch = {"src/a": "one\n", "src-evil/a": "one\n", "other/a": "one\n"}


@pytest.mark.req(
    "S1.verify.limits_set_and_omitted", "D8.zero_ceremony", "S1.cap.omitted_is_unbounded", "S1.cap.limits_only_when_set"
)
@pytest.mark.parametrize("effect", EVERY_EFFECT)
def test_without_a_capability_everything_is_allowed(effects: EffectSession, effect: str) -> None:
    effects.plant(BEFORE)
    assert effects.perform(effect, **EVERY_EFFECT[effect][1])["status"] == "ok"
    assert effects.within({}).session is not None


@pytest.mark.req(
    "S1.cap.allowed_fs_ops",
    "S1.cap.op_checked",
    "A1.denied_op_code",
    "D8.code_fs_op",
    "D8.ops_write",
    "D8.ops_list",
    "D8.ops_stat",
    "S1.done.roots_and_ops_constrained",
)
@pytest.mark.parametrize("effect", EVERY_EFFECT)
def test_allowed_fs_ops_limit_the_operations(effects: EffectSession, effect: str) -> None:
    op, params = EVERY_EFFECT[effect]
    effects.plant(BEFORE)
    others = effects.within({"allowed_fs_ops": [one for one in FS_OPS if one != op]})
    assert others.refused(effect, **params) == denied("fs_op_not_allowed")
    assert effects.tree() == as_tree(BEFORE)
    assert effects.within({"allowed_fs_ops": [op]}).perform(effect, **params)["status"] == "ok"


@pytest.mark.req("D8.empty_list_denies")
@pytest.mark.parametrize("effect", EVERY_EFFECT)
def test_an_empty_list_denies_every_operation(effects: EffectSession, effect: str) -> None:
    effects.plant(BEFORE)
    params = EVERY_EFFECT[effect][1]
    assert effects.within({"allowed_fs_ops": []}).refused(effect, **params) == denied("fs_op_not_allowed")
    if effect == "apply_patch":
        formats = effects.within({"allowed_patch_formats": []})
        assert formats.refused(effect, **params) == denied("patch_format_not_allowed")
    if effect != "shell":
        found = effects.within({"fs_roots": []}).refused(effect, **params)
        assert found.pop("errors", [""]) and found == denied("path_not_allowed")
    assert effects.tree() == as_tree(BEFORE)


def elsewhere(params: Fields, path: str) -> Fields:
    """The same request for another place."""
    moved = {name: value.replace("src", path) if name in ("path", "to") else value for name, value in params.items()}
    return {**moved, "patch": PATCH.replace("src", path)} if "patch" in params else moved


@pytest.mark.req(
    "S1.cap.fs_roots", "D8.code_path", "D8.contained_by_component", "D8.sibling_prefix", "D8.enforced_inside"
)
@pytest.mark.parametrize("effect", [effect for effect in EVERY_EFFECT if effect != "shell"])
@pytest.mark.parametrize("place", ["src-evil", "other", "src/../other", "link-to-other"])
def test_fs_roots_hold_for_every_effect(effects: EffectSession, effect: str, place: str) -> None:
    effects.plant({**BEFORE, "link-to-other": Link("other"), "link-to-src": Link("src")})
    params = EVERY_EFFECT[effect][1]
    for roots in (["src"], ["./src/"], [str(effects.root / "src")], ["src/a/..", "src"]):
        limited = effects.within({"fs_roots": roots})
        found = limited.refused(effect, **elsewhere(params, place))
        assert found.pop("errors", [""]) and found == denied("path_not_allowed")
    assert effects.within({"fs_roots": ["src"]}).perform(effect, **elsewhere(params, "link-to-src"))["status"] == "ok"


def test_a_path_outside_the_roots_looks_like_a_missing_one(effects: EffectSession) -> None:
    effects.plant(BEFORE)
    limited = effects.within({"fs_roots": ["src"]})
    for path in ("other/a", "other/no", "no/no"):
        assert limited.refused("exists", path=path) == denied("path_not_allowed")
        assert limited.refused("read_file", path=path) == denied("path_not_allowed")


@pytest.mark.req("S1.cap.max_read_bytes", "A3.limit_clamps", "S1.cap.clamped", "D9.blob_read")
def test_reads_are_truncated_at_the_limit(effects: EffectSession) -> None:
    effects.plant({"a": "0123456789", "é": "éééé", "big": "x" * 20_000})
    ref = effects.within().perform("read_file", path="big")["content"]["blob"]["blob_ref"]
    limited = effects.within({"max_read_bytes": 3})
    body = {"status": "ok", "content": text("012"), "truncated": True, "size_bytes": 10}
    body |= {"mtime_ns": (effects.root / "a").stat().st_mtime_ns, "range": {"offset_bytes": 0, "length_bytes": 3}}
    for asked in (None, 4, 10, 2**62):
        assert limited.perform("read_file", path="a", **({} if asked is None else {"max_bytes": asked})) == body
    assert limited.perform("read_file", path="a", max_bytes=2)["content"] == text("01")
    assert limited.perform("read_file", path="a", max_lines=9)["content"] == text("012")
    assert limited.perform("read_file", path="é")["content"] == text("é")
    assert limited.perform("read_file", path="é", offset_bytes=1)["content"] == text("é")
    assert limited.perform("blob.read", blob_ref=ref)["content"] == text("xxx")
    assert effects.within({"max_read_bytes": 0}).perform("read_file", path="a")["content"] == text("")


@pytest.mark.req("S1.cap.max_write_bytes", "D8.code_write_bytes", "A4.blob_ref_limits", "D8.blob_refs_checked")
def test_writes_over_the_limit_are_refused_in_every_form(effects: EffectSession) -> None:
    effects.plant({"a": "12345\n", "big": "x" * 20_000})
    limited = effects.within({"max_write_bytes": 6})
    ref = limited.perform("read_file", path="big")["content"]["blob"]["blob_ref"]
    before = effects.tree()
    seven = b64encode(b"1234567").decode()
    adds = "*** Begin Patch\n*** Add File: n\n+123456\n*** End Patch"
    unified = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-12345\n+123456\n"
    for effect, params in (
        ("write_file", {"path": "n", "content": "1234567"}),
        ("write_file", {"path": "n", "content": {"inline_bytes": {"bytes": seven}}}),
        ("write_file", {"path": "n", "content": {"blob_ref": {"blob_ref": ref}}}),
        ("write_file", {"path": "no/n", "content": "1234567"}),
        ("edit_file", {"path": "a", "old_string": "5", "new_string": "56"}),
        ("apply_patch", {"patch": adds}),
        ("apply_patch", {"patch": unified, "patch_format": "unified"}),
    ):
        assert limited.refused(effect, **params) == denied("max_write_bytes_exceeded")
    assert effects.tree() == before
    assert limited.perform("write_file", path="n", content="123456")["status"] == "ok"


@pytest.mark.req("S1.cap.max_patch_bytes", "D8.code_patch_bytes", "A4.blob_ref_limits")
def test_patches_over_the_limit_are_refused(effects: EffectSession) -> None:
    effects.plant({"src/a": "one\n", "p": PATCH + " " * 20_000})
    size = len(PATCH.encode())
    limited = effects.within({"max_patch_bytes": size - 1})
    ref = limited.perform("read_file", path="p")["content"]["blob"]["blob_ref"]
    assert limited.refused("apply_patch", patch=PATCH) == denied("max_patch_bytes_exceeded")
    found = limited.refused("apply_patch", patch={"blob_ref": {"blob_ref": ref}})
    assert found == denied("max_patch_bytes_exceeded")
    assert effects.within({"max_patch_bytes": size}).perform("apply_patch", patch=PATCH)["status"] == "ok"


@pytest.mark.req("S1.cap.max_inline_bytes", "S1.cap.require_inline_over_max", "D9.inline_limit")
def test_max_inline_bytes_limits_inline_answers(effects: EffectSession) -> None:
    effects.plant({"a": "hit 1\nhit 2\n", "b": "hit"})
    limited = effects.within({"max_inline_bytes": 3})
    assert limited.perform("read_file", path="b")["content"] == text("hit")
    answers = {"read_file": {"path": "a"}, "grep": {"pattern": "hit"}, "glob": {"pattern": "*"}, "list_dir": {}}
    fields = {"read_file": "content", "grep": "matches", "glob": "paths", "list_dir": "entries"}
    for effect, params in answers.items():
        blob = limited.perform(effect, **params).get(fields[effect], {}).get("blob")
        if effect in ("glob", "list_dir"):
            assert blob is None
            continue
        assert blob["size_bytes"] > 3
        assert limited.perform("blob.read", blob_ref=blob["blob_ref"])["content"]["inline_text"]["text"] in (
            "hit",
            "a:1",
        )
        for _ in range(2):
            found = limited.refused(effect, output_mode="require_inline", **params)
            assert (found["status"], found["error_code"]) == ("error", "inline_required_too_large")
    assert effects.within({"max_inline_bytes": 99_999_999}).perform("read_file", path="a")["status"] == "ok"
    nothing = effects.within({"max_inline_bytes": 0})
    ref = nothing.perform("read_file", path="a")["content"]["blob"]["blob_ref"]
    assert nothing.refused("blob.read", blob_ref=ref) == failed("inline_required_too_large")


@pytest.mark.req("S1.cap.max_grep_results", "S1.cap.max_glob_results", "S1.cap.clamped")
def test_results_are_truncated_at_the_limit(effects: EffectSession) -> None:
    effects.plant({f"f{number}": "hit\n" for number in range(5)})
    limited = effects.within({"max_grep_results": 2, "max_glob_results": 3})
    for asked in ({}, {"max_results": 4}, {"max_results": 2**62}):
        found = limited.perform("grep", pattern="hit", **asked)
        assert (found["match_count"], found["truncated"]) == (2, True)
        found = limited.perform("glob", pattern="*", **asked)
        assert (found["count"], found["truncated"]) == (3, True)
    assert limited.perform("grep", pattern="hit", max_results=1)["match_count"] == 1


@pytest.mark.req(
    "S1.cap.max_scan_files", "S1.cap.max_scan_bytes", "AR.search_stops_at_limit", "A5.every_limit_enforced"
)
def test_searches_stop_at_the_scan_limits(effects: EffectSession) -> None:
    effects.plant({f"f{number}": "hit\n" for number in range(5)})
    found = effects.within({"max_scan_files": 2}).perform("grep", pattern="hit")
    assert (found["matches"], found["truncated"]) == (text("f0:1:hit\nf1:1:hit"), True)
    found = effects.within({"max_scan_files": 2}).perform("glob", pattern="*")
    assert (found["count"], found["truncated"]) == (2, True)
    found = effects.within({"max_scan_bytes": 11}).perform("grep", pattern="hit")
    assert (found["matches"], found["truncated"]) == (text("f0:1:hit\nf1:1:hit"), True)
    found = effects.within({"max_scan_files": 5, "max_scan_bytes": 20}).perform("grep", pattern="hit")
    assert (found["match_count"], found["truncated"]) == (5, False)


@pytest.mark.req("S1.cap.allowed_patch_formats", "D8.code_patch_format")
def test_allowed_patch_formats_limit_the_formats(effects: EffectSession) -> None:
    effects.plant({"src/a": "one\n"})
    unified = "--- a/src/a\n+++ b/src/a\n@@ -1 +1 @@\n-one\n+two\n"
    only_v4a, only_unified = (effects.within({"allowed_patch_formats": [one]}) for one in ("v4a", "unified"))
    assert only_unified.refused("apply_patch", patch=PATCH) == denied("patch_format_not_allowed")
    found = only_v4a.refused("apply_patch", patch=unified, patch_format="unified")
    assert found == denied("patch_format_not_allowed")
    assert only_v4a.perform("apply_patch", patch=PATCH)["status"] == "ok"


@pytest.mark.req("S1.cap.max_changed_files", "D8.code_changed_files")
def test_the_number_of_changed_files_is_limited(effects: EffectSession) -> None:
    effects.plant({"a": "1\n", "b": "2\n", "d/x": "", "d/y": ""})
    before = effects.tree()
    limited = effects.within({"max_changed_files": 2})
    three = "*** Begin Patch\n*** Delete File: a\n*** Add File: n\n+x\n*** Add File: m\n+x\n*** End Patch"
    rename = "*** Begin Patch\n*** Update File: a\n*** Move to: n\n*** Delete File: b\n*** End Patch"
    unified = "".join(f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n" for name in "xyz")
    for effect, params in (
        ("apply_patch", {"patch": three}),
        ("apply_patch", {"patch": three, "dry_run": True}),
        ("apply_patch", {"patch": rename}),
        ("apply_patch", {"patch": unified, "patch_format": "unified"}),
        ("delete", {"path": "d", "recursive": True}),
        ("move", {"path": "d", "to": "e"}),
    ):
        assert limited.refused(effect, **params) == denied("max_changed_files_exceeded")
    assert effects.tree() == before
    two = "*** Begin Patch\n*** Delete File: a\n*** Add File: n\n+x\n*** End Patch"
    assert limited.perform("apply_patch", patch=two)["files_changed"] == 2


@pytest.mark.req("S1.cap.max_edit_replacements", "D8.code_edit_replacements")
def test_the_number_of_replacements_is_limited(effects: EffectSession) -> None:
    effects.plant({"a": "x x x"})
    limited = effects.within({"max_edit_replacements": 2})
    params = {"path": "a", "old_string": "x", "new_string": "y", "replace_all": True}
    assert limited.refused("edit_file", **params) == denied("max_edit_replacements_exceeded")
    assert effects.bytes_of("a") == b"x x x"
    assert effects.within({"max_edit_replacements": 3}).perform("edit_file", **params)["replacements"] == 3


@pytest.mark.req("S1.cap.follow_symlinks", "D8.code_symlink", "A5.every_limit_enforced")
class TestFollowSymlinks:
    @pytest.mark.parametrize("path", ["link", "to-d/a", "back"])
    def test_deny_follows_nothing(self, effects: EffectSession, path: str) -> None:
        effects.plant(LINKS)
        limited = effects.within({"follow_symlinks": "deny"})
        patch = PATCH.replace("src/a", path)
        for effect, params in (
            ("read_file", {"path": path}),
            ("stat", {"path": path}),
            ("exists", {"path": path}),
            ("grep", {"path": path, "pattern": "x"}),
            ("write_file", {"path": path, "content": "x"}),
            ("edit_file", {"path": path, "old_string": "one", "new_string": "x"}),
            ("apply_patch", {"patch": patch}),
        ):
            found = limited.refused(effect, **params)
            assert found.pop("errors", [""]) and found == denied("symlink_not_allowed")
        assert effects.bytes_of("d/a") == b"one\n"
        assert limited.perform("read_file", path="d/a")["content"] == text("one\n")

    def test_a_link_itself_can_be_deleted_without_following_it(self, effects: EffectSession) -> None:
        effects.plant(LINKS)
        assert effects.within({"follow_symlinks": "deny"}).perform("delete", path="link")["deleted"] is True

    @pytest.mark.parametrize("path", ["link", "to-d/a", "back"])
    def test_by_default_links_are_followed_within_the_root(self, effects: EffectSession, path: str) -> None:
        effects.plant(LINKS)
        for limited in (effects, effects.within({"follow_symlinks": "within_root_only"})):
            assert limited.perform("read_file", path=path)["content"] == text("one\n")

    def test_allow_lets_reads_out_and_no_write(self, effects: EffectSession) -> None:
        outside = effects.root.parent / "outside"
        outside.mkdir()
        (outside / "secret").write_text("one\n")
        effects.plant({"out": Link("../outside"), "file": Link(str(outside / "secret")), "up": Link("..")})
        allowed = effects.within({"follow_symlinks": "allow"})
        for path in ("out/secret", "file", "up/outside/secret"):
            assert effects.refused("read_file", path=path) == denied("symlink_not_allowed")
            assert allowed.perform("read_file", path=path)["content"] == text("one\n")
            assert allowed.perform("stat", path=path)["size_bytes"] == 4
            patch = PATCH.replace("src/a", path)
            for effect, params in (
                ("write_file", {"path": path, "content": "x"}),
                ("edit_file", {"path": path, "old_string": "one", "new_string": "x"}),
                ("apply_patch", {"patch": patch}),
            ):
                found = allowed.refused(effect, **params)
                assert found.pop("errors", [""]) and found == denied("path_not_allowed")
        assert allowed.perform("list_dir", path="out")["entries"] == text("secret")
        for effect in ("write_file", "mkdir", "delete", "move"):
            more: Fields = {"write_file": {"content": "x"}, "move": {"to": "here"}}.get(effect, {})
            assert allowed.refused(effect, path="out/new", **more) == denied("path_not_allowed")
        assert allowed.refused("write_file", path="out/a/b", content="x", create_parents=True) == denied(
            "path_not_allowed"
        )
        assert allowed.refused("move", path="out/secret", to="here") == denied("path_not_allowed")
        assert allowed.refused("grep", pattern="x", path="out") == denied("symlink_not_allowed")
        assert (outside / "secret").read_text() == "one\n" and sorted(outside.iterdir()) == [outside / "secret"]

    def test_a_target_outside_is_judged_by_the_path_of_the_link(self, effects: EffectSession) -> None:
        effects.plant({"out": Link("/etc"), "d/link": Link("../out")})
        allowed = effects.within({"follow_symlinks": "allow", "fs_roots": ["d"]})
        assert allowed.refused("stat", path="d/link/hostname") == denied("path_not_allowed")
        policy: Any = [{"paths": ["out/**"], "verdict": "deny"}]
        narrowed = effects.within({"follow_symlinks": "allow"}, policy)
        assert narrowed.refused("list_dir", path="d/link/apt") == denied("path_not_allowed")
