"""edit_file's text algorithm: what matches, what is replaced, and what stays."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mulligan.files.edit import LOOK_ALIKES, SPACES, WHITE_SPACE, Edited, edit_text, fold, is_blank
from mulligan.values.errors import Refused

SENTINEL = "\u27e6new\u27e7"
NASTY = st.text(alphabet="ab \t\n\r\xa0\u2028“”’–-\"'", max_size=40)
OLD = st.text(alphabet="ab \t\n\r\xa0“–", min_size=1, max_size=8)


def refusal(text: str, old: str, new: str, *, replace_all: bool = False) -> tuple[str, str, dict[str, object]]:
    with pytest.raises(Refused) as caught:
        edit_text(text, old, new, replace_all=replace_all)
    return caught.value.status, caught.value.code, caught.value.fields


@pytest.mark.req("S1.edit_file.exact_first", "S1.edit_file.fuzzy_fallback", "D9.edit_match_field")
class TestExact:
    def test_the_only_occurrence_is_replaced(self) -> None:
        assert edit_text("one two three\n", "two", "2") == Edited("one 2 three\n", 1, "exact")

    def test_an_exact_match_beats_a_fuzzy_one(self) -> None:
        assert edit_text("a  b\na b\n", "a b", "X") == Edited("a  b\nX\n", 1, "exact")

    def test_new_text_is_literal(self) -> None:
        assert edit_text("a", "a", r"\1$&\g<0>").text == r"\1$&\g<0>"

    def test_old_equal_to_new_counts_as_one_replacement(self) -> None:
        assert edit_text("abc", "b", "b") == Edited("abc", 1, "exact")

    def test_overlapping_occurrences_are_counted_once_from_the_left(self) -> None:
        assert edit_text("aaa", "aa", "b") == Edited("ba", 1, "exact")

    def test_everything_can_be_deleted(self) -> None:
        assert edit_text("x", "x", "") == Edited("", 1, "exact")

    @given(NASTY, OLD, st.text(alphabet="xyz", max_size=5))
    def test_an_exact_edit_equals_str_replace(self, text: str, old: str, new: str) -> None:
        if old in text and "\r" not in text + old:
            expected = Edited(text.replace(old, new), text.count(old), "exact")
            assert edit_text(text, old, new, replace_all=True) == expected


@pytest.mark.req("S1.verify.edit_file_paths")
class TestRefusals:
    @pytest.mark.req("S1.edit_file.ambiguous", "D9.edit_ambiguous_code")
    def test_several_exact_candidates_are_ambiguous_with_their_number(self) -> None:
        fields: dict[str, object] = {"replacements": 3, "applied": False}
        assert refusal("x\nx\nx\n", "x", "y") == ("ambiguous", "ambiguous_matches", fields)

    @pytest.mark.req("D9.edit_ambiguous_code")
    def test_several_fuzzy_candidates_are_ambiguous_with_their_number(self) -> None:
        fields: dict[str, object] = {"replacements": 2, "applied": False}
        assert refusal("a  b\nx\na\tb\n", "a   b", "z") == ("ambiguous", "ambiguous_matches", fields)
        assert refusal("a\r\nb; a  b\r\n", "a\nb", "z") == ("ambiguous", "ambiguous_matches", fields)

    @pytest.mark.req("S1.edit_file.not_found", "S1.edit_file.error_code")
    def test_no_candidate_is_not_found(self) -> None:
        fields: dict[str, object] = {"replacements": 0, "applied": False}
        assert refusal("beta\n", "alpha", "x") == ("not_found", "edit_target_not_found", fields)

    @pytest.mark.req("S1.edit_file.empty_old_string")
    def test_an_empty_old_string_is_an_error(self) -> None:
        assert refusal("beta\n", "", "x") == ("error", "invalid_input_empty_old_string", {})

    def test_a_new_string_that_no_file_can_hold_is_an_error(self) -> None:
        assert refusal("a", "a", "\ud800") == ("error", "invalid_params", {})

    def test_an_old_string_that_no_file_can_hold_is_not_found(self) -> None:
        assert refusal("a", "\ud800", "x")[1] == "edit_target_not_found"

    @pytest.mark.req("D9.edit_unicode_table")
    @pytest.mark.parametrize(
        ("text", "old"),
        [
            ("Hello", "hello"),
            ("cafe\u0301", "caf\u00e9"),
            ("a\u200bb", "a b"),
            ("'a'", '"a"'),
            ("a_b", "a-b"),
            ("ab", "a b"),
        ],
    )
    def test_case_forms_and_other_characters_stay_distinct(self, text: str, old: str) -> None:
        assert refusal(text, old, "x")[1] == "edit_target_not_found"


@pytest.mark.req("S1.edit_file.replace_all_exact", "S1.edit_file.replace_all_fuzzy")
class TestReplaceAll:
    def test_every_exact_match_is_replaced_and_no_fuzzy_one(self) -> None:
        assert edit_text("a  b\na b\na b\n", "a b", "X", replace_all=True) == Edited("a  b\nX\nX\n", 2, "exact")

    def test_without_an_exact_match_every_fuzzy_match_is_replaced(self) -> None:
        assert edit_text("a  b\na\tb\na \n b\n", "a   b", "X", replace_all=True) == Edited("X\nX\nX\n", 3, "fuzzy")


@pytest.mark.req("S1.edit_file.fuzzy_whitespace", "S1.edit_file.fuzzy_quotes_dashes", "D9.edit_whitespace_runs")
class TestFuzzy:
    @pytest.mark.req("D9.edit_unicode_table")
    @pytest.mark.parametrize(("plain", "alike"), [(p, a) for p, alikes in LOOK_ALIKES.items() for a in alikes])
    def test_every_look_alike_of_the_table_matches_its_plain_form(self, plain: str, alike: str) -> None:
        edited = edit_text(f"«x{alike}y»", f"x{plain}y", "Z")
        assert edited == Edited("«Z»", 1, "exact" if plain == alike else "fuzzy")

    @pytest.mark.req("A13.fuzzy_span")
    def test_line_breaks_inside_match_blanks_and_the_rest_stays(self) -> None:
        text = "x = foo(\n    a,\n    b)\ny\n"
        assert edit_text(text, "foo( a, b)", "bar()") == Edited("x = bar()\ny\n", 1, "fuzzy")

    def test_offsets_behind_wide_characters_are_right(self) -> None:
        assert edit_text("😀😀  “q” tail\n", '"q"', "z").text == "😀😀  z tail\n"

    @given(NASTY, OLD)
    @example("x a\n\nb y", "a b")
    @example("\r\n\ra", "\na")
    def test_candidates_are_those_of_a_naive_pattern(self, text: str, old: str) -> None:
        try:
            found = edit_text(text, old, SENTINEL, replace_all=True)
        except Refused:
            assert is_blank(old) or not naive_pattern(old).search(text)
            return
        if found.match == "fuzzy":
            assert not is_blank(old)
            assert found.replacements == len(naive_pattern(old).findall(text))

    @given(NASTY, OLD)
    @example(" a\n\n", "a ")
    @example("\n\n  a", " a")
    @pytest.mark.req("D9.edit_span_line_breaks")
    def test_only_what_equals_old_is_taken_and_no_line_break_too_many(self, text: str, old: str) -> None:
        try:
            found = edit_text(text, old, SENTINEL)
        except Refused:
            return
        taken = taken_from(text, found.text)
        assert squeezed(taken).strip(" ") == squeezed(old).strip(" ")
        assert breaks(head_of(taken)) <= breaks(head_of(old))
        assert breaks(tail_of(taken)) <= breaks(tail_of(old))


def naive_pattern(old: str) -> re.Pattern[str]:
    alikes = {plain: f"[{re.escape(plain + alikes)}]" for plain, alikes in LOOK_ALIKES.items()}
    alikes[" "] += "+"
    return re.compile("".join(alikes.get(char, re.escape(char)) for char in squeezed(old)))


def squeezed(text: str) -> str:
    return SPACES.sub(" ", fold(text))


def head_of(text: str) -> str:
    return text[: len(text) - len(text.lstrip(WHITE_SPACE))]


def tail_of(text: str) -> str:
    return text[len(text.rstrip(WHITE_SPACE)) :]


def breaks(run: str) -> int:
    return len(re.findall("\r\n|\n|\r", run))


def taken_from(before: str, after: str) -> str:
    """What the sentinel stands for, if all around it is as it was."""
    start, end = after.split(SENTINEL)
    taken = before[len(start) : len(before) - len(end)]
    assert start + taken + end == before
    return taken


@pytest.mark.req("D9.edit_span_line_breaks", "A13.fuzzy_span")
class TestEndsOfTheSpan:
    @pytest.mark.parametrize(
        ("text", "old", "expected"),
        [
            ("foo  bar\nnext\n", "foo bar ", "X\nnext\n"),
            ("a\n\tfoo  bar\n", " foo bar", "a\nX\n"),
            ("    one\n    two\n    three\n", "one\ntwo\n", "    X    three\n"),
            ("one  1\n\n\nthree\n", "one 1\n", "X\n\nthree\n"),
            ("a\n\n  two  2\n", "\n two 2", "a\nX\n"),
            ("a\r\n\r\n  two  2\r\n", "\n two 2", "a\r\nX\r\n"),
            ("one  1 \t\r\n\r\nz", "one 1\n", "X\r\nz"),
            ("one  1 two", "one 1\n", "Xtwo"),
        ],
    )
    def test_a_line_break_is_replaced_only_if_old_string_has_one_there(
        self, text: str, old: str, expected: str
    ) -> None:
        assert edit_text(text, old, "X") == Edited(expected, 1, "fuzzy")


@pytest.mark.req("D9.edit_whitespace_only", "A12.whitespace_only_edit")
class TestOnlyWhiteSpace:
    def test_it_matches_exactly(self) -> None:
        assert edit_text("a   b c", "   ", "_") == Edited("a_b c", 1, "exact")

    def test_white_space_alone_has_no_fuzzy_match(self) -> None:
        fields: dict[str, object] = {"replacements": 0, "applied": False}
        for replace_all in (False, True):
            outcome = refusal("a b\nc d\n", "\t ", "_", replace_all=replace_all)
            assert outcome == ("not_found", "edit_target_not_found", fields)

    @pytest.mark.parametrize("old", ["\n", "\n\n", "\r", "\r\n\n", "\n  "])
    def test_so_lf_does_not_find_crlf(self, old: str) -> None:
        for text, wanted in (("a\r\n\r\n  b\r\n", old), ("a\n\n  b\n", old.replace("\n", "\r\n"))):
            assert refusal(text, wanted, "_", replace_all=True)[1] == "edit_target_not_found"


@pytest.mark.req("D9.edit_keeps_bytes", "A11.crlf_not_mixed")
class TestBytesKept:
    def test_a_crlf_file_edited_with_lf_strings_keeps_crlf(self) -> None:
        edited = edit_text("alpha\r\nbeta\r\ngamma\r\n", "alpha\nbeta", "alpha\nnew\nbeta")
        assert edited == Edited("alpha\r\nnew\r\nbeta\r\ngamma\r\n", 1, "fuzzy")

    def test_new_lines_in_a_crlf_file_end_with_crlf_even_if_old_had_none(self) -> None:
        assert edit_text("a\r\nb\r\n", "b", "b\nc").text == "a\r\nb\r\nc\r\n"

    def test_an_lf_file_edited_with_crlf_strings_keeps_lf(self) -> None:
        assert edit_text("a\nb\nc\n", "a\r\nb", "a\r\nB").text == "a\nB\nc\n"

    def test_a_cr_file_keeps_cr(self) -> None:
        assert edit_text("a\rb\rc\r", "b", "b\nB").text == "a\rb\rB\rc\r"

    def test_a_mixed_file_keeps_the_endings_of_the_lines_around(self) -> None:
        assert edit_text("a\r\nb\nc\nd\r\n", "b\nc", "B\nC").text == "a\r\nB\nC\nd\r\n"

    def test_a_file_of_one_line_keeps_the_line_ends_of_the_new_text(self) -> None:
        assert edit_text("a", "a", "b\r\nc\nd").text == "b\r\nc\nd"

    def test_half_a_crlf_is_never_replaced(self) -> None:
        assert edit_text("a\r\nb", "\nb", "c") == Edited("ac", 1, "fuzzy")
        assert edit_text("a\r\nb", "a\r", "c") == Edited("cb", 1, "fuzzy")
        assert edit_text("\r\n\n\n", "\n\n", "x") == Edited("\r\nx", 1, "exact")
        assert edit_text("a\r\na\rb", "a\r", "x") == Edited("a\r\nxb", 1, "exact")
        assert refusal("\r\n", "\n\ud800", "x")[1] == "edit_target_not_found"

    @given(st.text(alphabet="a\r\n", max_size=12), st.text(alphabet="a\r\n", min_size=1, max_size=4))
    def test_every_other_exact_match_is_found(self, text: str, old: str) -> None:
        halves = {found.start() + 1 for found in re.finditer("\r\n", text)}
        spans: list[tuple[int, int]] = []
        for start, end in ((at, at + len(old)) for at in range(len(text))):
            if text[start:end] == old and not halves & {start, end} and (not spans or spans[-1][1] <= start):
                spans.append((start, end))
        pieces = [text[end:start] for (_, end), (start, _) in pairwise([(0, 0), *spans, (len(text), 0)])]
        if spans:
            expected = Edited(SENTINEL.join(pieces), len(spans), "exact")
            assert edit_text(text, old, SENTINEL, replace_all=True) == expected

    def test_the_byte_order_mark_stays(self) -> None:
        assert edit_text("\ufeffusing System;\n", "using System;", "using Up;").text == "\ufeffusing Up;\n"

    @pytest.mark.parametrize("text", ["a\nlast", "a\nlast\n", "a\nlast\n\n"])
    def test_the_final_newline_is_as_it_was(self, text: str) -> None:
        assert edit_text(text, "last", "end").text == text.replace("last", "end")

    @given(
        st.lists(st.text(alphabet="ab  ", max_size=4), min_size=1, max_size=6),
        OLD,
        st.text(alphabet="x\n\r", max_size=4),
    )
    def test_a_crlf_file_never_becomes_mixed(self, lines: list[str], old: str, new: str) -> None:
        text = "\r\n".join(lines) + "\r\n"
        old, new = old.replace("\r", ""), new.replace("\r", "")
        try:
            edited = edit_text(text, old or "a", new, replace_all=True).text
        except Refused:
            return
        assert not re.search("\r(?!\n)|(?<!\r)\n", edited)


@given(NASTY, OLD, NASTY, st.booleans())
def test_any_input_is_edited_or_refused_and_always_the_same_way(
    text: str, old: str, new: str, everywhere: bool
) -> None:
    def outcome() -> object:
        try:
            return edit_text(text, old, new, replace_all=everywhere)
        except Refused as refused:
            return refused.status, refused.code, refused.fields

    assert outcome() == outcome()


MEGA = 1_000_000


@pytest.mark.req("D9.edit_linear")
@pytest.mark.parametrize(
    ("text", "old"),
    [
        pytest.param("a" * MEGA, "a" * (MEGA // 2) + "b", id="one letter"),
        pytest.param("ab" * (MEGA // 2), "ab" * 5000 + "c", id="two letters"),
        pytest.param(" " * MEGA, " x", id="one run"),
        pytest.param(" \n" * (MEGA // 2), "\n" * 500 + "x", id="mixed run"),
        pytest.param("a  " * (MEGA // 3), "a " * 5000 + "b", id="many runs"),
        pytest.param("a \t\n" * (MEGA // 4), ("a\n" * 3000) + "b", id="lines"),
        pytest.param("\r\n" * (MEGA // 2), "\n" * 1000 + "x", id="line breaks"),
        pytest.param("\r" * MEGA + "\n", "\r" * 1000 + "x", id="carriage returns"),
        pytest.param("“" * MEGA, '"' * 1000 + "x", id="quotes"),
        pytest.param("\r\n" * (MEGA // 2), "\n" + "\r\n" * (MEGA // 4), id="cut at the front"),
        pytest.param("\r\n" * (MEGA // 2), "\r\n" * (MEGA // 4) + "\r", id="cut at the back"),
    ],
)
def test_a_megabyte_of_the_worst_text_is_searched_through(text: str, old: str) -> None:
    """A quadratic search would not come back."""
    assert refusal(text, old, "y")[1] == "edit_target_not_found"


@pytest.mark.req("D9.edit_linear")
@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        pytest.param("a" * MEGA, "a", "b\n", id="everywhere in one line"),
        pytest.param("a  b" * (MEGA // 4), "a b", "c\nd", id="fuzzy everywhere"),
        pytest.param("a\r\n" * (MEGA // 3), "a\n", "b\n", id="every line"),
        pytest.param("a\r\n" * (MEGA // 3), "\r\n", " ", id="every line break"),
        pytest.param("a " * (MEGA // 2), "\n" * (MEGA // 2) + "a", "b", id="a run in old"),
        pytest.param("a " + "\n" * MEGA + " a", "a ", "b", id="a run at the end"),
    ],
)
def test_a_megabyte_of_matches_is_replaced(text: str, old: str, new: str) -> None:
    assert edit_text(text, old, new, replace_all=True).replacements >= 1
