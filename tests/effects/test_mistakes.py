"""Mistakes that others made with the same effects, turned round: each must not happen here."""

from __future__ import annotations

import pytest

from mulligan.testing import File, as_tree
from tests.effects.effect_session import EffectSession, denied, failed, text
from tests.effects.test_patch import patched, v4a


@pytest.mark.req("A1.denied_op_code")
def test_a1_a_reader_cannot_write(effects: EffectSession) -> None:
    effects.plant({"a": "x"})
    reader = effects.within({"allowed_fs_ops": ["read"]})
    patch = v4a("*** Delete File: a")
    for effect, params in (
        ("write_file", {"path": "a", "content": text("y")}),
        ("edit_file", {"path": "a", "old_string": "x", "new_string": "y"}),
        ("apply_patch", {"patch": text(patch)}),
    ):
        assert reader.refused(effect, **params) == denied("fs_op_not_allowed")
    assert effects.bytes_of("a") == b"x"


@pytest.mark.req("A2.root_by_component")
def test_a2_a_sibling_and_a_path_with_dots_are_outside(effects: EffectSession) -> None:
    limited = effects.within({"fs_roots": [str(effects.root / "src")]})
    for path in (
        "src-evil/x",
        "src/../x",
        f"{effects.root}/src-evil/x",
        f"{effects.root}/src/../x",
        f"{effects.root}-evil/x",
    ):
        assert limited.refused("write_file", path=path, content="x") == denied("path_not_allowed")
        found = limited.refused("apply_patch", patch=v4a(f"*** Add File: {path}", "+x"))
        assert found.pop("errors") and found == denied("path_not_allowed")
    assert effects.tree() == {}


@pytest.mark.req("A8.non_ascii_hunk_line")
def test_a8_a_line_may_begin_with_any_character(effects: EffectSession) -> None:
    effects.plant({"a": "émile\nüber\n"})
    patch = v4a("*** Update File: a", "@@", " émile", "-über", "+über alles", "+日本")
    assert effects.perform("apply_patch", patch=patch) == patched("a", update=1)
    assert effects.bytes_of("a") == "émile\nüber alles\n日本\n".encode()
    found = effects.refused("apply_patch", patch=v4a("*** Update File: a", "@@", "étrange"))
    assert found.pop("errors") and found == failed("patch_parse_error", "parse_error")


@pytest.mark.req("A9.hint_selects_place", "D9.v4a_hint_guides")
def test_a9_the_anchor_chooses_among_equal_places(effects: EffectSession) -> None:
    effects.plant({"a": "def a():\n  pass\n\ndef b():\n  pass\n"})
    patch = v4a("*** Update File: a", "@@ def b():", "-  pass", "+  return 1")
    assert effects.perform("apply_patch", patch=patch) == patched("a", update=1)
    assert effects.bytes_of("a") == b"def a():\n  pass\n\ndef b():\n  return 1\n"


@pytest.mark.req("D9.v4a_ambiguous")
def test_a9_without_an_anchor_two_places_are_ambiguous(effects: EffectSession) -> None:
    effects.plant({"a": "def a():\n  pass\n\ndef b():\n  pass\n"})
    found = effects.refused("apply_patch", patch=v4a("*** Update File: a", "@@", "-  pass", "+  return 1"))
    assert found.pop("errors") and found == failed("ambiguous_matches", "reject")


@pytest.mark.req("A10.adds_only_hunk", "D9.v4a_insert_at_end")
def test_a10_lines_without_context_are_appended(effects: EffectSession) -> None:
    effects.plant({"a": "1\n2\n"})
    assert effects.perform("apply_patch", patch=v4a("*** Update File: a", "@@", "+3"))["status"] == "ok"
    assert effects.bytes_of("a") == b"1\n2\n3\n"


@pytest.mark.req("A11.crlf_not_mixed", "D9.v4a_crlf_and_modes")
def test_a11_a_file_keeps_its_line_endings(effects: EffectSession) -> None:
    effects.plant({"a": b"1\r\n2\r\n3\r\n"})
    effects.perform("apply_patch", patch=v4a("*** Update File: a", "@@", " 1", "-2", "+two", "+more", " 3"))
    assert effects.bytes_of("a") == b"1\r\ntwo\r\nmore\r\n3\r\n"
    effects.perform("edit_file", path="a", old_string="two\nmore", new_string="2\nand\nmore")
    assert effects.bytes_of("a") == b"1\r\n2\r\nand\r\nmore\r\n3\r\n"


@pytest.mark.req("A14.last_line_deleted")
def test_a14_first_and_last_lines_can_be_patched(effects: EffectSession) -> None:
    effects.plant({"only": "x\n", "empty": ""})
    effects.perform("apply_patch", patch=v4a("*** Update File: only", "@@", "-x"))
    effects.perform("apply_patch", patch=v4a("*** Update File: empty", "@@", "+x"))
    effects.perform("apply_patch", patch=v4a("*** Add File: new", "+x"))
    assert effects.tree() == as_tree({"only": "", "empty": "x\n", "new": "x\n"})


DIALECTS = {
    "heredoc": "apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: a\n@@\n-2\n+two\n*** End Patch\nEOF",
    "blank context line": v4a("*** Update File: a", "@@", " 1", "", "-2", "+two"),
    "no first anchor": v4a("*** Update File: a", "-2", "+two"),
    "nested anchors": v4a("*** Update File: a", "@@ 1", "@@", "-2", "+two"),
    "trailing blank line": v4a("*** Update File: a", "@@", "-2", "+two") + "\n\n",
    "leading blank line": "\n" + v4a("*** Update File: a", "@@", "-2", "+two"),
    "crlf patch": v4a("*** Update File: a", "@@", "-2", "+two").replace("\n", "\r\n"),
}


@pytest.mark.req("A15.model_dialects", "D9.v4a_heredoc", "D9.v4a_blank_context", "D9.v4a_first_anchor_missing")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a15_patches_as_models_write_them_are_parsed(effects: EffectSession, dialect: str) -> None:
    effects.plant({"a": "1\n\n2\n"})
    assert effects.perform("apply_patch", patch=DIALECTS[dialect]) == patched("a", update=1)
    assert effects.bytes_of("a") == b"1\n\ntwo\n"


@pytest.mark.req("A15.model_dialects", "D9.v4a_rename_only")
def test_a15_a_rename_and_a_new_file_with_a_blank_line_apply(effects: EffectSession) -> None:
    effects.plant({"a": File(b"x\n", 0o700)})
    patch = v4a("*** Update File: a", "*** Move to: b", "*** Add File: n", "+1", "", "+2")
    assert effects.perform("apply_patch", patch=patch) == patched("a", "b", "n", add=1, update=1, move=1)
    assert effects.tree() == as_tree({"b": File(b"x\n", 0o700), "n": "1\n\n2\n"})
