"""edit_file at the level of its receipt; how text is found is in `tests/files/test_edit.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mulligan.testing import File, Link, as_tree
from mulligan.testing.faults import FaultPlan
from tests.effects.effect_session import EffectSession, Fields, denied, failed, open_effect_session


def edited(path: str, count: int, match: str = "exact") -> Fields:
    words = f"Updated {path} ({count} replacement{'' if count == 1 else 's'})"
    return {"status": "ok", "replacements": count, "applied": True, "match": match, "summary_text": words}


@pytest.mark.req("S1.effects.edit_file", "S1.verify.edit_file_paths", "D12.call.edit_file")
class TestEditFile:
    @pytest.mark.req(
        "S1.edit_file.ok",
        "S1.edit_file.replacements",
        "S1.edit_file.applied",
        "S1.edit_file.summary_text",
        "S1.edit_file.path",
        "S1.edit_file.replace_all_default_false",
        "D9.edit_match_field",
    )
    @pytest.mark.parametrize("name", ["path", "file_path"])
    def test_one_exact_match(self, effects: EffectSession, name: str) -> None:
        effects.plant({"d/a.py": File(b"x = 1\ny = 2\n", 0o755)})
        found = effects.perform("host.fs.edit_file", **{name: "d/a.py"}, old_string="y = 2", new_string="y = 3")
        assert found == edited("d/a.py", 1)
        assert effects.tree() == as_tree({"d/a.py": File(b"x = 1\ny = 3\n", 0o755)})

    @pytest.mark.req("S1.edit_file.replace_all_exact", "S1.edit_file.replacements_stable")
    def test_all_exact_matches(self, effects: EffectSession) -> None:
        effects.plant({"a": "x x  x"})
        assert effects.perform("edit_file", path="a", old_string="x", new_string="y", replace_all=True) == edited(
            "a", 3
        )
        assert effects.bytes_of("a") == b"y y  y"

    @pytest.mark.req("S1.edit_file.fuzzy_fallback", "S1.edit_file.fuzzy_quotes_dashes", "S1.edit_file.fuzzy_whitespace")
    def test_a_fuzzy_match(self, effects: EffectSession) -> None:
        effects.plant({"a": "say(“hi”)  —  now\n"})
        found = effects.perform("edit_file", path="a", old_string='say("hi") - now', new_string="ok")
        assert found == edited("a", 1, "fuzzy")
        assert effects.bytes_of("a") == b"ok\n"

    @pytest.mark.req("S1.edit_file.replace_all_fuzzy")
    def test_all_fuzzy_matches(self, effects: EffectSession) -> None:
        effects.plant({"a": "a  b, a\tb\n"})
        found = effects.perform("edit_file", path="a", old_string="a b", new_string="c", replace_all=True)
        assert found == edited("a", 2, "fuzzy")
        assert effects.bytes_of("a") == b"c, c\n"

    @pytest.mark.req("S1.edit_file.ambiguous", "S1.edit_file.error_code", "D9.edit_ambiguous_code")
    def test_several_matches_are_ambiguous(self, effects: EffectSession) -> None:
        effects.plant({"a": "x x x"})
        refusal = effects.refused("edit_file", path="a", old_string="x", new_string="y")
        assert refusal == failed("ambiguous_matches", "ambiguous", replacements=3, applied=False)
        assert effects.bytes_of("a") == b"x x x"

    @pytest.mark.req("S1.edit_file.not_found")
    def test_no_match_and_no_file_are_errors(self, effects: EffectSession) -> None:
        effects.plant({"a": "x"})
        refusal = effects.refused("edit_file", path="a", old_string="z", new_string="y")
        assert refusal == failed("edit_target_not_found", "not_found", replacements=0, applied=False)
        for path in ("no", "no/no", "a/no"):
            refusal = effects.refused("edit_file", path=path, old_string="z", new_string="y")
            assert refusal == failed("path_not_found", "not_found")

    @pytest.mark.req("S1.edit_file.old_string_required", "S1.edit_file.empty_old_string", "D9.check_order")
    def test_an_empty_old_string_is_refused_before_the_file_is_read(self, effects: EffectSession) -> None:
        for path in ("a", "/etc/passwd"):
            refusal = effects.refused("edit_file", path=path, old_string="", new_string="x")
            assert refusal == failed("invalid_input_empty_old_string")

    @pytest.mark.req("S1.edit_file.new_string_required")
    def test_missing_strings_are_refused(self, effects: EffectSession) -> None:
        assert effects.refused("edit_file", path="a", new_string="x") == failed("invalid_params")
        assert effects.refused("edit_file", path="a", old_string="x") == failed("invalid_params")

    @pytest.mark.req("S1.edit_file.error")
    def test_a_binary_file_is_refused(self, effects: EffectSession) -> None:
        effects.plant({"bin": b"a\xff", "d": None})
        assert effects.refused("edit_file", path="bin", old_string="a", new_string="b") == failed("invalid_utf8")
        assert effects.refused("edit_file", path="d", old_string="a", new_string="b") == failed("is_directory")

    @pytest.mark.req("S1.edit_file.forbidden")
    def test_a_path_outside_the_root_is_refused(self, effects: EffectSession) -> None:
        refusal = effects.refused("edit_file", path="../x", old_string="a", new_string="b")
        assert refusal == denied("path_not_allowed")

    @pytest.mark.req("D9.edit_keeps_bytes", "D5.line_endings_kept", "A11.crlf_not_mixed")
    def test_line_endings_and_byte_order_mark_stay(self, effects: EffectSession) -> None:
        effects.plant({"a": b"\xef\xbb\xbfone\r\ntwo\r\nthree"})
        effects.perform("edit_file", path="a", old_string="two\n", new_string="2\nand\n")
        assert effects.bytes_of("a") == b"\xef\xbb\xbfone\r\n2\r\nand\r\nthree"

    def test_an_edit_through_a_link_changes_the_target(self, effects: EffectSession) -> None:
        effects.plant({"a": "x", "link": Link("a")})
        assert effects.perform("edit_file", path="link", old_string="x", new_string="y") == edited("a", 1)
        assert effects.tree() == as_tree({"a": "y", "link": Link("a")})

    @pytest.mark.req("A12.whitespace_only_edit", "D9.edit_whitespace_only")
    def test_white_space_alone_is_never_matched_fuzzily(self, effects: EffectSession) -> None:
        effects.plant({"a": "a b\nc d\n"})
        refusal = effects.refused("edit_file", path="a", old_string="   ", new_string="_", replace_all=True)
        assert refusal == failed("edit_target_not_found", "not_found", replacements=0, applied=False)
        assert effects.bytes_of("a") == b"a b\nc d\n"

    @pytest.mark.req("A13.fuzzy_span", "D9.edit_span_line_breaks")
    def test_a_fuzzy_match_over_lines_replaces_only_the_match(self, effects: EffectSession) -> None:
        effects.plant({"a": "x = foo(\n    a,\n    b)\nrest\n"})
        found = effects.perform("edit_file", path="a", old_string="foo( a, b)", new_string="bar()")
        assert found == edited("a", 1, "fuzzy")
        assert effects.bytes_of("a") == b"x = bar()\nrest\n"


@pytest.mark.req("S1.edit_file.whole_file_rewrite", "S1.edit_file.deterministic")
class TestWholeFile:
    def test_an_edit_that_does_not_apply_does_not_touch_the_file(self, effects: EffectSession) -> None:
        effects.plant({"a": "x x\n"})
        before = (effects.root / "a").stat()
        for old in ("x", "nope"):
            effects.refused("edit_file", path="a", old_string=old, new_string="y")
        after = (effects.root / "a").stat()
        assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
            before.st_ino,
            before.st_mtime_ns,
            before.st_ctime_ns,
        )

    def test_the_same_file_and_params_give_the_same_result(self, effects: EffectSession) -> None:
        results = set()
        for path in ("one", "two"):
            effects.plant({path: "a  b\na\tb\nc\n"})
            found = effects.perform("edit_file", path=path, old_string="a b", new_string="d", replace_all=True)
            results.add((found["replacements"], found["match"], effects.bytes_of(path)))
        assert results == {(2, "fuzzy", b"d\nd\nc\n")}

    @pytest.mark.req("S1.edit_file.atomic_write")
    def test_a_reader_never_sees_half_of_an_edit(self, tmp_path: Path) -> None:
        """Somebody looks just before every step of an edit: it is the old file or the new one, whole."""
        old, new = b"old" * 50_000, b"new" * 90_000
        seen: list[bytes] = []

        def look(step: str, path: str) -> None:
            seen.append((tmp_path / "work" / "a").read_bytes())

        effects = open_effect_session(tmp_path, steps=FaultPlan().act(look, lasting=True))
        effects.plant({"a": old})
        effects.perform("edit_file", path="a", old_string=old.decode(), new_string=new.decode())
        assert set(seen) == {old, new}
        effects.workspace.close()
