"""Policies at the level of receipts, the order of all checks, and what no input can do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mulligan.effects.registry import EFFECTS
from mulligan.testing import as_tree
from mulligan.values.canonical import encode
from tests.effects.effect_session import EffectSession, Fields, denied, failed, text
from tests.effects.test_boundary import BEFORE, EVERY_EFFECT

Rules = list[dict[str, object]]


@pytest.mark.req("S1.policy.narrows", "S1.policy.path_scope_per_op", "D8.code_path")
@pytest.mark.parametrize("effect", [effect for effect in EVERY_EFFECT if effect != "shell"])
def test_a_rule_denies_one_operation_below_one_path(effects: EffectSession, effect: str) -> None:
    effects.plant(BEFORE)
    op, params = EVERY_EFFECT[effect]
    allowed: list[Rules] = [
        [{"ops": [op], "paths": ["other/**"], "verdict": "deny"}],
        [{"ops": [other for other in ("read", "write", "edit") if other != op], "verdict": "deny"}],
        [{"ops": [], "verdict": "deny"}],
        [{"paths": [], "verdict": "deny"}],
    ]
    forbidden: list[Rules] = [
        [{"ops": [op], "paths": ["src"], "verdict": "deny"}],
        [{"paths": ["s*"], "verdict": "deny"}],
        [{"verdict": "deny"}],
        [{"paths": ["/"], "verdict": "deny"}],
        [{"paths": [str(effects.root)], "verdict": "deny"}],
        [{"paths": [f"{effects.root}/src"], "verdict": "deny"}],
        [{"paths": ["./src/"], "verdict": "deny"}],
    ]
    for rules in forbidden:
        found = effects.within(policy=rules).refused(effect, **params)
        assert found.pop("errors", [""]) and found == denied("path_not_allowed")
    assert effects.tree() == as_tree(BEFORE)
    for rules in allowed[1:] if effect in ("delete", "move") else allowed:
        assert effects.within(policy=rules).perform(effect, **params)["status"] in ("ok", "conflict", "not_found")
        effects.perform("write_file", path="src/a", content="one\n")


@pytest.mark.req("S1.policy.narrows")
def test_files_that_a_policy_hides_use_up_no_scan_limit(effects: EffectSession) -> None:
    effects.plant({f"hidden/h{number}": "hit\n" for number in range(9)} | {"s0": "hit\n", "s1": "hit\n", "s2": "hit\n"})
    rules: Rules = [{"paths": ["hidden"], "verdict": "deny"}]
    for limit, truncated in ((2, True), (3, False)):
        limited = effects.within({"max_scan_files": limit, "max_scan_bytes": 4 * limit}, policy=rules)
        shown = [f"s{number}" for number in range(limit)]
        found = limited.perform("grep", pattern="hit")
        assert (found["matches"], found["truncated"]) == (text("\n".join(f"{one}:1:hit" for one in shown)), truncated)
        found = limited.perform("glob", pattern="**")
        assert (found["count"], found["truncated"]) == (limit, truncated)
        assert set(found["paths"]["inline_text"]["text"].split()) == set(shown)


@pytest.mark.req("D8.policy_last_wins")
def test_the_last_rule_that_matches_decides(effects: EffectSession) -> None:
    effects.plant({"src/a": "x", "src/secret/b": "x", "src/secret/ok": "x", "c": "x"})
    limited = effects.within(
        policy=[
            {"verdict": "deny"},
            {"paths": ["src"], "verdict": "allow"},
            {"paths": ["src/secret"], "verdict": "deny"},
            {"paths": ["**/ok"], "verdict": "allow", "ops": ["read"]},
        ]
    )
    allowed = {path: limited.perform("read_file", path=path)["status"] for path in ("src/a", "src/secret/ok")}
    assert allowed == {"src/a": "ok", "src/secret/ok": "ok"}
    for path in ("c", "src/secret/b", "no"):
        assert limited.refused("read_file", path=path) == denied("path_not_allowed")
    assert limited.refused("stat", path="src/secret/ok") == denied("path_not_allowed")


@pytest.mark.req("S1.policy.path_scope_per_op")
def test_grep_everywhere_but_write_only_in_src(effects: EffectSession) -> None:
    effects.plant({"src/a": "hit\n", "b": "hit\n"})
    rules: Rules = [{"ops": ["write"], "verdict": "deny"}, {"ops": ["write"], "paths": ["src/**"], "verdict": "allow"}]
    limited = effects.within(policy=rules)
    assert limited.perform("grep", pattern="hit")["match_count"] == 2
    assert limited.refused("write_file", path="b", content="x") == denied("path_not_allowed")
    assert limited.perform("write_file", path="src/n", content="x")["status"] == "ok"
    assert limited.refused("move", path="src/a", to="a") == denied("path_not_allowed")
    assert limited.refused("move", path="b", to="src/b") == denied("path_not_allowed")


def test_whole_directories_are_judged_file_by_file(effects: EffectSession) -> None:
    effects.plant({"d/a": "x", "d/secret": "x", "e/.git/config": "x", "t": None})
    before = effects.tree()
    limited = effects.within(policy=[{"ops": ["write"], "paths": ["d/secret", "t/d/a"], "verdict": "deny"}])
    assert limited.refused("delete", path="d", recursive=True) == denied("path_not_allowed")
    assert limited.refused("move", path="d", to="z") == denied("path_not_allowed")
    other = effects.within(policy=[{"ops": ["write"], "paths": ["t/d/a"], "verdict": "deny"}])
    assert other.refused("move", path="d", to="t/d") == denied("path_not_allowed")
    for effect, params in (("delete", {"recursive": True}), ("move", {"to": "f"})):
        assert effects.refused(effect, path="e", **params) == denied("path_not_allowed")
    assert effects.tree() == before


def test_hidden_files_do_not_appear_in_searches_and_lists(effects: EffectSession) -> None:
    effects.plant({"a": "hit\n", "secret/b": "hit\n", "z": "hit\n"})
    rules: Rules = [{"ops": ["search", "list"], "paths": ["secret"], "verdict": "deny"}]
    limited = effects.within(policy=rules)
    found = limited.perform("grep", pattern="hit", max_results=2)
    assert (found["matches"], found["truncated"]) == (text("a:1:hit\nz:1:hit"), False)
    found = limited.perform("glob", pattern="**", max_results=2)
    assert (found["count"], found["truncated"]) == (2, False)
    assert limited.perform("list_dir")["entries"] == text("a\nz")
    assert limited.refused("grep", pattern="hit", path="secret") == denied("path_not_allowed")


@pytest.mark.req("D8.policy_blob_output", "S1.policy.output_posture")
def test_output_blob_returns_content_only_as_a_blob(effects: EffectSession) -> None:
    effects.plant({"keys/k": "secret", "a": "plain", "keys/empty": ""})
    limited = effects.within(policy=[{"paths": ["keys"], "verdict": "allow", "output": "blob"}])
    content = limited.perform("read_file", path="keys/k")["content"]
    assert sorted(content["blob"]) == ["blob_ref", "size_bytes"]
    assert limited.perform("blob.read", blob_ref=content["blob"]["blob_ref"])["content"] == text("secret")
    refusal = limited.refused("read_file", path="keys/k", output_mode="require_inline")
    assert refusal == failed("inline_required_too_large", size_bytes=6)
    assert limited.perform("read_file", path="keys/empty")["content"] == text("")
    assert limited.perform("read_file", path="a")["content"] == text("plain")
    assert "blob" in limited.perform("list_dir", path="keys")["entries"]
    assert "blob" in limited.perform("grep", pattern="secret", path="keys")["matches"]


COPY = "diff --git a/{0} b/{1}\nsimilarity index 100%\ncopy from {0}\ncopy to {1}\n"
MOVE = "*** Begin Patch\n*** Update File: {0}\n*** Move to: {1}\n@@\n-one\n+two\n*** End Patch\n"


@pytest.mark.req("D8.policy_blob_output", "D8.every_tool_every_byte")
@pytest.mark.parametrize("rule", [{"verdict": "deny"}, {"verdict": "allow", "output": "blob"}], ids=str)
def test_hidden_content_cannot_be_moved_or_copied_to_where_it_would_show(effects: EffectSession, rule: Fields) -> None:
    """The session may write everywhere, but not read in `keys`."""
    effects.plant({"keys/k": "one\n", "a": "one\n"})
    before = effects.tree()
    limited = effects.within(policy=[{"paths": ["keys"], "ops": ["read", "search"], **rule}])
    for found in (
        limited.refused("move", path="keys/k", to="z"),
        limited.refused("move", path="keys", to="z"),
        limited.refused("apply_patch", patch=MOVE.format("keys/k", "z")),
        limited.refused("apply_patch", patch=COPY.format("keys/k", "z"), patch_format="unified"),
        limited.refused(
            "apply_patch", patch=COPY.replace("copy", "rename").format("keys/k", "z"), patch_format="unified"
        ),
    ):
        assert {**found, "errors": None} == {**denied("path_not_allowed"), "errors": None}
    assert effects.tree() == before
    assert limited.perform("move", path="keys/k", to="keys/l")["status"] == "ok"
    assert limited.perform("move", path="a", to="keys/a")["status"] == "ok"


@pytest.mark.req("D8.policy_blob_output", "S1.policy.output_posture")
def test_one_matching_line_of_such_a_file_makes_the_search_a_blob(effects: EffectSession) -> None:
    effects.plant({"a": "hit\n", "keys/k": "hit secret\n", "z": "hit\n"})
    limited = effects.within(policy=[{"paths": ["keys"], "verdict": "allow", "output": "blob"}])
    found = limited.perform("grep", pattern="hit")["matches"]["blob"]
    assert sorted(found) == ["blob_ref", "size_bytes"]
    whole = limited.perform("blob.read", blob_ref=found["blob_ref"])["content"]
    assert whole == text("a:1:hit\nkeys/k:1:hit secret\nz:1:hit")
    assert limited.perform("grep", pattern="hit", path="z")["matches"] == text("z:1:hit")
    refusal = limited.refused("grep", pattern="hit", output_mode="require_inline")
    assert refusal == failed("inline_required_too_large")


@pytest.mark.req("D9.check_order", "S1.cap.fail_closed_on_escape")
class TestOrder:
    """Params, session, path, capability, effect: a request wrong in several ways is refused for the first."""

    def test_parameters_are_checked_before_the_session(self, effects: EffectSession) -> None:
        for effect, params, code in (
            ("host.fs.read_file", {}, "invalid_params"),
            ("host.fs.read_file", {"path": "", "encoding": "x"}, "invalid_encoding"),
            ("host.fs.grep", {"pattern": "(", "output_mode": "x"}, "invalid_output_mode"),
            ("host.fs.write_file", {"path": "", "content": "", "mode": "x"}, "invalid_mode"),
            ("host.fs.edit_file", {"path": "", "old_string": "", "new_string": ""}, "invalid_input_empty_old_string"),
            ("host.fs.apply_patch", {"patch": "", "patch_format": "x"}, "unsupported_patch_format"),
        ):
            assert effects.refused(effect, session_id="nobody", **params) == failed(code)

    def test_the_session_is_checked_before_the_path(self, effects: EffectSession) -> None:
        for path in ("", "/etc/passwd"):
            assert effects.refused("host.fs.stat", session_id="nobody", path=path) == failed("session_not_found")

    @pytest.mark.parametrize("effect", ["read_file", "write_file", "edit_file", "stat", "list_dir", "delete", "mkdir"])
    def test_the_path_is_checked_before_the_capability(self, effects: EffectSession, effect: str) -> None:
        params = {name: value for name, value in EVERY_EFFECT[effect][1].items() if name != "path"}
        nothing = effects.within({"allowed_fs_ops": [], "fs_roots": [], "max_write_bytes": 0})
        assert nothing.refused(effect, path="", **params) == failed("invalid_path")
        assert nothing.refused(effect, path="../x", **params) == denied("path_not_allowed")
        assert nothing.refused(effect, path="x", **params) == denied("fs_op_not_allowed")
        assert nothing.refused(effect, path="no/no", **params) == denied("fs_op_not_allowed")

    def test_the_capability_is_checked_before_the_effect_runs(self, effects: EffectSession) -> None:
        limited = effects.within({"max_write_bytes": 1, "fs_roots": ["d"], "max_changed_files": 1})
        content = {"content": "long", "mode": "create_new"}
        assert limited.refused("write_file", path="no/x", **content) == denied("path_not_allowed")
        assert limited.refused("write_file", path="d/no/x", **content) == denied("max_write_bytes_exceeded")
        assert limited.refused("read_file", path="no") == denied("path_not_allowed")
        two = "*** Begin Patch\n*** Delete File: d/no\n*** Delete File: d/nono\n*** End Patch"
        assert limited.refused("apply_patch", patch=two) == denied("max_changed_files_exceeded")


NAMES = sorted(
    {name for effect in EFFECTS if effect.op != "exec" for name in effect.model.model_fields} | {"file_path"}
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(
        ["a", "d/b", "..", "/", ".", "auto", "sha256:" + "0" * 64, "base64:YQ==", "\ud800", "\udcff/x", "\0"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.req("D16.outcomes_are_receipts", "D9.error_message_always", "D18.bad_input_changes_nothing")
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    effect=st.sampled_from([effect for effect in EFFECTS if effect.op != "exec"]),
    params=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), VALUES, max_size=5),
)
def test_any_parameters_are_answered_with_a_receipt(effects: EffectSession, effect: Any, params: Fields) -> None:
    with effects.session.call() as call:
        receipt = call.perform(effect.tool, **{name: value for name, value in params.items() if name != "effect"})
        body = receipt.to_dict()
        encode(body)
        assert receipt.status in ("ok", "forbidden", "error", *effect.statuses)
        assert receipt.ok is ("error_code" not in body) is ("error_message" not in body)
        call.fail("only looking")
    assert effects.tree() == {}


def test_deep_and_large_invalid_parameters_are_refused(effects: EffectSession) -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    for path in (deep, {"a": deep}, "x" * 3_000_000, 10**400, float("nan"), object(), {1: 2}, {"\ud800": 1}):
        found = effects.refused("read_file", path=path)
        assert found["error_code"] in ("invalid_params", "invalid_path")
    for path in (float("nan"), {"\ud800": deep}):
        assert effects.refused("read_file", path="a", odd=path) == failed("invalid_params")
