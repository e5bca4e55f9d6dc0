"""Where the hunks of a V4A update go, and which bytes come out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mulligan.files.patch.v4a import HunkLine, V4aHunk, apply_hunks
from mulligan.values.errors import Refused
from tests.oracles.v4a_files import staged, update_refusal, updated

REJECTED = ("reject", "hunk_rejected")
AMBIGUOUS = ("reject", "ambiguous_matches")

LINE = st.text(alphabet="ab é\t“", max_size=4)
ENDING = st.sampled_from(["\n", "\r\n", "\r"])

Marked: TypeAlias = tuple[list[str], list[str]]
"""The anchors of a hunk and the lines it removes."""


class TestPlacing:
    @pytest.mark.req("D9.v4a_first_anchor_missing", "A15.model_dialects")
    def test_the_first_hunk_needs_no_marker(self) -> None:
        assert updated("a\nb\n", " a", "-b", "+B") == "a\nB\n"

    @pytest.mark.req("D9.v4a_hint_guides", "A9.hint_selects_place")
    def test_the_anchor_selects_among_equal_places(self) -> None:
        text = "def a():\n  pass\ndef b():\n  pass\ndef c():\n  pass\n"
        assert updated(text, "@@ def b():", "-  pass", "+  run()") == text.replace("b():\n  pass", "b():\n  run()")

    @pytest.mark.req("D9.v4a_several_anchors")
    def test_several_anchors_narrow_down_in_turn(self) -> None:
        text = "class A:\n  def f():\n    x\nclass B:\n  def g():\n    x\n  def f():\n    x\n"
        expected = text.removesuffix("    x\n") + "    y\n"
        assert updated(text, "@@ class B:", "@@ def f():", "-    x", "+    y") == expected

    @pytest.mark.req("D9.v4a_hint_nowhere", "S1.apply_patch.reject")
    @pytest.mark.parametrize("anchors", [("@@ nowhere",), ("@@ a", "@@ nowhere"), ("@@ c", "@@ a")])
    def test_an_anchor_that_is_nowhere_rejects_the_hunk(self, anchors: tuple[str, ...]) -> None:
        assert update_refusal("a\nb\nc\n", *anchors, "-b", "+B") == REJECTED

    def test_an_anchor_is_a_whole_line(self) -> None:
        assert update_refusal("class FooBar:\n  x\n", "@@ class Foo", "-  x", "+  y") == REJECTED

    @pytest.mark.req("A15.model_dialects")
    def test_an_anchor_repeated_for_a_second_hunk_in_the_same_place_is_met(self) -> None:
        text = "def f():\n  a\n  b\n  c\n"
        assert (
            updated(text, "@@ def f():", "-  a", "+  A", "@@ def f():", "-  c", "+  C") == "def f():\n  A\n  b\n  C\n"
        )

    @pytest.mark.req("A15.model_dialects")
    def test_an_anchor_repeated_as_the_first_line_of_its_hunk_is_met(self) -> None:
        assert updated("x\ndef f():\n  a\n", "@@ def f():", " def f():", "-  a", "+  A") == "x\ndef f():\n  A\n"

    @pytest.mark.req("D9.v4a_hint_guides")
    def test_the_end_marker_selects_the_end(self) -> None:
        assert updated("x\ny\nx\n", "@@", "-x", "+z", "*** End of File") == "x\ny\nz\n"

    @pytest.mark.req("D9.v4a_hint_guides")
    def test_the_end_marker_is_ignored_if_the_lines_are_not_at_the_end(self) -> None:
        assert updated("x\ny\nz\n", "@@", "-x", "+X", "*** End of File") == "X\ny\nz\n"

    @pytest.mark.req("D9.v4a_ambiguous")
    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            pytest.param("x\nx\n", ("@@", "-x"), id="twice"),
            pytest.param("x \n x\n", ("@@", "-\tx"), id="twice but for white space"),
            pytest.param("f\nx\nf\nx\n", ("@@ f", "-x"), id="below two anchors"),
            pytest.param("c\nf\nx\nc\nf\nx\n", ("@@ c", "@@ f", "-x"), id="below two pairs of anchors"),
            pytest.param("x\nx\ny\n", ("@@", "-x", "@@", "-y"), id="the first of two hunks"),
            pytest.param("y\nx\nx\n", ("@@", "-y", "@@", "-x"), id="the second of two hunks"),
            pytest.param("x\nx\ny\n", ("@@", "-x", "*** End of File"), id="not at the end, and twice"),
            pytest.param("x\nf\nx\nf\ny\n", ("@@", "-x", "@@ f", "-y"), id="before two anchors of one place"),
        ],
    )
    def test_several_equally_good_places_are_refused(self, text: str, lines: tuple[str, ...]) -> None:
        assert update_refusal(text, *lines) == AMBIGUOUS

    @pytest.mark.parametrize(
        ("text", "lines", "expected"),
        [
            pytest.param("x\nx\n", ("@@", "-x", "+1", "@@", "-x", "+2"), "1\n2\n", id="as many hunks as places"),
            pytest.param("x\ny\nx\n", ("@@", "-x", "@@", "-y"), "x\n", id="the next hunk leaves one place"),
            pytest.param("y\nx\ny\nx\n", ("@@", " x", " y", "@@", "-x"), "y\nx\ny\n", id="after lines that only guide"),
            pytest.param("f\nx\nf\ny\n", ("@@ f", "-y"), "f\nx\nf\n", id="two anchors of one place"),
            pytest.param("f\nx\nx\ng\n", ("@@ f", "-x"), "f\nx\ng\n", id="the nearest below the anchor"),
            pytest.param("x\nf\nx\ny\n", ("@@", "-x", "@@ f", "-y"), "f\nx\n", id="the next hunk's anchor leaves one"),
        ],
    )
    def test_a_single_way_to_place_all_hunks_is_taken(self, text: str, lines: tuple[str, ...], expected: str) -> None:
        assert updated(text, *lines) == expected

    @pytest.mark.req("S1.apply_patch.reject")
    @pytest.mark.parametrize(
        "lines",
        [
            ("@@", "-nope"),
            ("@@", " a", " c"),
            ("@@", "-b", "@@", "-a"),
            ("@@", " a", "-a"),
            ("@@", "-A"),
            ("@@", "-c", " d"),
        ],
    )
    def test_old_lines_that_are_not_there_in_order_reject_the_hunk(self, lines: tuple[str, ...]) -> None:
        assert update_refusal("a\nb\nc\n", *lines) == REJECTED

    @pytest.mark.req("D9.v4a_insert_at_end", "A10.adds_only_hunk")
    @pytest.mark.parametrize("marks", [(), ("@@",), ("@@ 2",)])
    def test_an_insertion_without_context_goes_to_the_end(self, marks: tuple[str, ...]) -> None:
        assert updated("1\n2\n3\n", *marks, "+4") == "1\n2\n3\n4\n"

    @pytest.mark.req("D9.v4a_blank_context", "A15.model_dialects")
    def test_a_bare_blank_line_is_a_blank_kept_line(self) -> None:
        assert updated("a\n\nb\n", "@@", " a", "", "-b", "+B") == "a\n\nB\n"

    @pytest.mark.req("A15.model_dialects")
    def test_blank_lines_too_many_at_the_end_of_a_hunk_are_forgiven(self) -> None:
        assert updated("a\nb\n", "@@", "-a", "+A", "", "", "@@", "-b", "+B", "") == "A\nB\n"

    @pytest.mark.req("S1.apply_patch.errors_bounded")
    def test_a_refusal_does_not_repeat_a_huge_hunk(self) -> None:
        with pytest.raises(Refused) as caught:
            updated("a\n", "@@", *["-" + "x" * 10_000] * 100)
        assert len(caught.value.message) < 1000


class TestBytes:
    @pytest.mark.req("D9.v4a_context_bytes_kept", "D9.edit_one_table")
    def test_kept_lines_found_by_the_table_keep_their_bytes(self) -> None:
        text = "\tsay  “hi”\u00a0– ok \nold\n"
        assert updated(text, "@@", ' say "hi" - ok', "-old", "+new") == "\tsay  “hi”\u00a0– ok \nnew\n"

    @pytest.mark.req("D9.v4a_crlf_and_modes", "A11.crlf_not_mixed")
    @pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
    def test_new_lines_end_as_the_file_does(self, ending: str) -> None:
        assert updated(ending.join(["a", "b", "c", ""]), "@@", " a", "-b", "+x", "+y") == ending.join(
            ["a", "x", "y", "c", ""]
        )

    @pytest.mark.req("D9.v4a_crlf_and_modes")
    def test_lines_of_a_mixed_file_keep_their_own_endings(self) -> None:
        assert updated("a\r\nb\nc\rd\n", "@@", " b", "-c", "+C") == "a\r\nb\nC\r\nd\n"

    @pytest.mark.req("A14.last_line_deleted")
    @pytest.mark.parametrize("text", ["x\n", "x", "x\r\n"])
    def test_without_its_only_line_a_file_is_empty(self, text: str) -> None:
        assert updated(text, "@@", "-x") == ""

    @pytest.mark.req("D9.v4a_add_ends_with_newline", "A14.last_line_deleted")
    def test_a_new_file_ends_with_a_newline_unless_it_is_empty(self) -> None:
        assert staged({}, "*** Add File: a", "+x", "*** Add File: b").files == {"a": b"x\n", "b": b""}

    @pytest.mark.parametrize("text", ["a\nb", "a\nb\n"])
    def test_an_updated_file_ends_with_a_newline(self, text: str) -> None:
        assert updated(text, "@@", "-a", "+A") == "A\nb\n"

    @pytest.mark.parametrize("lines", [("-a", "+A"), ("+0", " a"), ("-a",)])
    def test_the_byte_order_mark_stays_in_front(self, lines: tuple[str, ...]) -> None:
        assert updated("\ufeffa\nb\n", "@@", *lines) == "\ufeff" + updated("a\nb\n", "@@", *lines)

    @pytest.mark.req("A8.non_ascii_hunk_line")
    def test_non_ascii_lines_are_lines_like_others(self) -> None:
        assert updated("é\n字\n", "@@", " é", "-字", "+漢") == "é\n漢\n"


def hunks_of(before: Sequence[str], after: Sequence[str], context: int) -> Iterator[list[str]]:
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(context):
        hunk = ["@@"]
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                hunk += [" " + line for line in before[i1:i2]]
            else:
                hunk += ["-" + line for line in before[i1:i2]] + ["+" + line for line in after[j1:j2]]
        yield hunk


class TestRoundTrip:
    @given(
        st.lists(st.text(alphabet="abcdef", min_size=1, max_size=3), unique=True, min_size=1, max_size=12),
        st.data(),
        ENDING,
        st.integers(1, 4),
    )
    def test_a_diff_of_distinct_lines_gives_the_other_text(
        self, before: list[str], data: st.DataObject, ending: str, context: int
    ) -> None:
        after = data.draw(st.lists(st.one_of(st.sampled_from(before), st.sampled_from(["new", ""])), max_size=12))
        hunks = [*hunks_of(before, after, context)]
        assume(hunks)
        result = updated("".join(line + ending for line in before), *(line for hunk in hunks for line in hunk))
        assert result == "".join(line + ending for line in after)

    @given(st.lists(LINE, min_size=1, max_size=8), st.data())
    def test_kept_lines_keep_their_bytes_even_if_the_patch_has_other_white_space(
        self, lines: list[str], data: st.DataObject
    ) -> None:
        at = data.draw(st.integers(0, len(lines) - 1))
        padding = st.sampled_from(["", " ", "\t", "  "])
        marked = [*lines[:at], "target", *lines[at:]]
        kept = [" " + data.draw(padding) + line.replace("“", '"') + data.draw(padding) for line in lines]
        result = updated("".join(line + "\n" for line in marked), "@@", *kept[:at], "-target", "+done", *kept[at:])
        assert result == "".join(line + "\n" for line in [*lines[:at], "done", *lines[at:]])


FILLER = st.lists(st.sampled_from("abf"), max_size=2)
BLOCK = st.lists(st.sampled_from("ab"), min_size=1, max_size=2)
MARKED = st.tuples(FILLER, BLOCK)
PLACEABLE = st.lists(st.tuples(MARKED, FILLER, FILLER), min_size=1, max_size=3)
"""Hunks, and what lies above their anchors and above their lines in a text where they can be placed."""


def all_placings(lines: Sequence[str], hunks: Sequence[Marked], start: int) -> set[tuple[int, ...]]:
    """Every way to place all hunks in order, by trying them all: any first anchor, and the nearest below from there."""
    if not hunks:
        return {()}
    (anchors, block), rest = hunks[0], hunks[1:]
    places = set()
    for first in range(start, len(lines)):
        place = nearest(lines, [*([anchor] for anchor in anchors), block], first)
        if place is not None:
            places |= {(place, *others) for others in all_placings(lines, rest, place + len(block))}
    return places


def nearest(lines: Sequence[str], blocks: Sequence[list[str]], first: int) -> int | None:
    """The place of the last block, if the first one is at `first` and each is the nearest below the one before."""
    if [*lines[first : first + len(blocks[0])]] != blocks[0]:
        return None
    at = first
    for block in blocks[1:]:
        below = [start for start in range(at + 1, len(lines)) if [*lines[start : start + len(block)]] == block]
        if not below:
            return None
        at = below[0]
    return at


@pytest.mark.req("D9.v4a_ambiguous", "A9.hint_selects_place")
@given(PLACEABLE, FILLER)
def test_a_patch_is_applied_when_there_is_one_way_to_place_it_and_refused_when_there_are_more(
    parts: list[tuple[Marked, list[str], list[str]]], end: list[str]
) -> None:
    hunks = [hunk for hunk, _, _ in parts]
    lines = [line for (anchors, block), above, below in parts for line in (*above, *anchors, *below, *block)] + end
    ways = all_placings(lines, hunks, 0)
    assert ways
    wanted = [V4aHunk(tuple(HunkLine("-", line) for line in block), tuple(anchors)) for anchors, block in hunks]
    text = "".join(line + "\n" for line in lines)
    if len(ways) > 1:
        with pytest.raises(Refused) as caught:
            apply_hunks(text, wanted, name="f")
        assert caught.value.code == "ambiguous_matches"
        return
    gone = {place + step for place, (_, block) in zip(*ways, hunks, strict=True) for step in range(len(block))}
    kept = "".join(line + "\n" for number, line in enumerate(lines) if number not in gone)
    assert apply_hunks(text, wanted, name="f") == kept


class TestSize:
    """A quadratic search would not come back."""

    def test_a_big_repetitive_file_is_searched_through(self) -> None:
        hunk = [f"-{'a' if number else 'b'}" for number in range(20_000)][::-1]
        assert update_refusal("a\n" * 200_000, "@@", *hunk) == REJECTED

    def test_many_hunks_in_a_big_file(self) -> None:
        text = "".join(f"  line {number}\n" for number in range(50_000))
        hunks = [line for number in range(0, 50_000, 10) for line in ("@@", f"-line {number}", f"+LINE {number}")]
        assert updated(text, *hunks) == re.sub(r"  line (\d*0)\n", r"LINE \1\n", text)

    def test_many_anchors_of_one_place(self) -> None:
        text = "f\ng\n" * 100_000 + "x\n"
        assert updated(text, "@@ f", "@@ g", "-x", "+y") == text.replace("x", "y")

    def test_many_blank_lines_at_the_end_of_a_hunk(self) -> None:
        assert update_refusal("x\n" * 10, "@@", "-y", *[""] * 20_000, *["+z"] * 20_000) == REJECTED
