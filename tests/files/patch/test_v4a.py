"""V4A patches: what is accepted and what becomes of the files. Everything in memory."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mulligan.files.patch.v4a import AddFile, DeleteFile, HunkLine, Operation, UpdateFile, V4aHunk, parse_v4a, stage_v4a
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath, parse_repo_path
from tests.oracles.v4a_files import patch_of, refusal, staged

PARSE_ERROR = ("parse_error", "patch_parse_error")


def nothing(_: RepoPath) -> bytes | None:
    return None


class TestGrammar:
    def test_the_three_operations(self) -> None:
        patch = patch_of(
            "*** Add File: a", "+x", "*** Delete File: b", "*** Update File: c", "*** Move to: d", "@@ k", "-x", "+y"
        )
        hunk = V4aHunk((HunkLine("-", "x"), HunkLine("+", "y")), ("k",))
        assert parse_v4a(patch) == (AddFile("a", "x\n"), DeleteFile("b"), UpdateFile("c", "d", (hunk,)))

    @pytest.mark.req("D9.v4a_heredoc", "A15.model_dialects")
    @pytest.mark.parametrize("opening", ["<<EOF", "<<'EOF'", '<<"EOF"', "cat <<'EOF'", "apply_patch << EOF", "<<-EOF"])
    def test_a_heredoc_around_the_patch_is_taken_off(self, opening: str) -> None:
        wrapped = "\n".join([opening, patch_of("*** Delete File: a"), "EOF", ""])
        assert parse_v4a(wrapped) == (DeleteFile("a"),)

    @pytest.mark.req("A15.model_dialects")
    def test_blank_lines_between_operations_are_nothing(self) -> None:
        patch = patch_of("", "*** Delete File: a", "", "*** Add File: b", "+x", "", "*** Delete File: c", "  ")
        assert parse_v4a(f"\n{patch}\n\n") == (DeleteFile("a"), AddFile("b", "x\n"), DeleteFile("c"))

    @pytest.mark.req("A15.model_dialects")
    def test_blank_lines_inside_a_new_file_are_its_blank_lines(self) -> None:
        assert parse_v4a(patch_of("*** Add File: a", "+x", "", "+y", "")) == (AddFile("a", "x\n\ny\n"),)

    def test_a_patch_with_crlf_is_the_same_patch(self) -> None:
        patch = patch_of("*** Update File: f", "@@ a", " x", "", "-y", "+z", "*** End of File")
        assert parse_v4a(patch.replace("\n", "\r\n")) == parse_v4a(patch)

    @pytest.mark.req("D9.v4a_several_anchors", "A15.model_dialects")
    def test_several_anchors_belong_to_one_hunk(self) -> None:
        (update,) = parse_v4a(patch_of("*** Update File: f", "@@ class A", "@@   def f", "-x", "@@", "-y"))
        hunks = (V4aHunk((HunkLine("-", "x"),), ("class A", "  def f")), V4aHunk((HunkLine("-", "y"),)))
        assert update == UpdateFile("f", None, hunks)

    @pytest.mark.req("D9.v4a_rename_only", "A15.model_dialects")
    @pytest.mark.parametrize("rest", [(), ("",), ("", "*** Delete File: c")])
    def test_an_update_may_only_move(self, rest: tuple[str, ...]) -> None:
        assert parse_v4a(patch_of("*** Update File: a", "*** Move to: b", *rest))[0] == UpdateFile("a", "b", ())

    @pytest.mark.req("S1.apply_patch.parse_error", "A8.non_ascii_hunk_line")
    @pytest.mark.parametrize(
        "lines",
        [
            pytest.param((), id="no operations"),
            pytest.param(("*** Frobnicate File: a",), id="unknown operation"),
            pytest.param(("+x",), id="a line before any operation"),
            pytest.param(("*** Environment ID:  ",), id="an environment without a name"),
            pytest.param(("*** Add File:", "+x"), id="no path"),
            pytest.param(("*** Add File: a", "x"), id="a new line without plus"),
            pytest.param(("*** Delete File: a", "-x"), id="a removal with lines"),
            pytest.param(("*** Update File: a",), id="no hunks"),
            pytest.param(("*** Update File: a", "*** End of File"), id="an end without a hunk"),
            pytest.param(("*** Update File: a", "@@"), id="a hunk without lines"),
            pytest.param(("*** Update File: a", "@@", "-x", "@@ y"), id="anchors without lines"),
            pytest.param(("*** Update File: a", "@@", "*** End of File"), id="an end without lines"),
            pytest.param(("*** Update File: a", "@@", "-x", "*** End of File", "-y"), id="lines behind the end"),
            pytest.param(("*** Update File: a", "@@", "élan"), id="a line that begins with a letter"),
            pytest.param(("*** Update File: a", "@@", "-x", "*** Move to: b"), id="a move behind hunks"),
            pytest.param(("*** Update File: a", "*** Move to:"), id="a move to nowhere"),
            pytest.param(("*** Update File: a", "*** Move to:  ", "@@", "-x", "+y"), id="a move to white space"),
            pytest.param(("*** Delete File: a", "*** End Patch", "*** Begin Patch"), id="two patches"),
        ],
    )
    def test_text_that_is_no_patch_is_a_parse_error(self, lines: tuple[str, ...]) -> None:
        assert refusal({"a": b"x\n"}, *lines) == PARSE_ERROR

    @pytest.mark.req("S1.apply_patch.parse_error")
    @pytest.mark.parametrize(
        "patch",
        [
            "",
            " \n ",
            "*** Begin Patch",
            "*** End Patch",
            "*** Begin Patch\n*** Delete File: a\n",
            "x\n" + patch_of("*** Delete File: a"),
            patch_of("*** Delete File: a") + "\nx",
            "<<\"EOF'\n" + patch_of("*** Delete File: a") + "\nEOF",
            "<<EOF\n" + patch_of("*** Delete File: a") + "\nEND",
            patch_of("*** Add File: a", "+\ud800"),
        ],
    )
    def test_a_patch_begins_and_ends_with_its_markers(self, patch: str) -> None:
        with pytest.raises(Refused) as caught:
            parse_v4a(patch)
        assert (caught.value.status, caught.value.code) == PARSE_ERROR

    @pytest.mark.req("S1.apply_patch.errors_bounded")
    def test_a_message_does_not_repeat_a_huge_line(self) -> None:
        with pytest.raises(Refused) as caught:
            parse_v4a(patch_of("x" * 100_000))
        assert len(caught.value.message) < 400


class TestStaging:
    @pytest.mark.req("S1.apply_patch.ops", "S1.apply_patch.changed_paths")
    def test_later_operations_see_earlier_ones_and_all_is_counted(self) -> None:
        outcome = staged(
            {"b": b"x\n", "c": b"y\n", "same": b"s\n"},
            *("*** Add File: new/z", "+1", "*** Update File: new/z", "@@", "-1", "+2"),
            *("*** Update File: b", "*** Move to: a", "@@", "-x", "+X", "*** Delete File: c"),
            *("*** Update File: same", "@@", " s"),
        )
        assert outcome.files == {"new/z": b"2\n", "b": None, "a": b"X\n", "c": None, "same": b"s\n"}
        assert outcome.originals == {"new/z": None, "b": b"x\n", "a": None, "c": b"y\n", "same": b"s\n"}
        assert outcome.moves == {"a": "b"}
        assert outcome.ops == {"add": 1, "update": 3, "delete": 1, "move": 1}
        assert outcome.changed_paths == ("a", "b", "c", "new/z")

    @pytest.mark.req("D9.v4a_replaces_existing")
    def test_add_and_move_replace_an_existing_file(self) -> None:
        outcome = staged(
            {"a": b"1", "b": b"2", "c": b"3"}, "*** Add File: a", "+x", "*** Update File: b", "*** Move to: c"
        )
        assert outcome.files == {"a": b"x\n", "b": None, "c": b"2"}
        assert outcome.originals == {"a": b"1", "b": b"2", "c": b"3"}

    @pytest.mark.req("D9.v4a_rename_only")
    def test_a_move_alone_keeps_every_byte(self) -> None:
        outcome = staged({"a": b"\xff\x00\r\n"}, "*** Update File: a", "*** Move to: b")
        assert outcome.files == {"a": None, "b": b"\xff\x00\r\n"}

    def test_a_move_onto_itself_is_an_update(self) -> None:
        outcome = staged({"a": b"x\n"}, "*** Update File: a", "*** Move to: ./a", "@@", "-x", "+y")
        assert (outcome.files, outcome.moves) == ({"a": b"y\n"}, {})

    @pytest.mark.parametrize(
        ("steps", "moves"),
        [
            pytest.param([("a", "c"), ("b", "a"), ("c", "b")], {"a": "b", "b": "a"}, id="a swap"),
            pytest.param([("a", "c"), ("c", "d")], {"d": "a"}, id="in two steps"),
            pytest.param([("a", "c"), ("c", "a")], {}, id="there and back"),
            pytest.param([("a", "b"), ("b", "c")], {"c": "a"}, id="over another"),
        ],
    )
    def test_staged_moves_name_the_earlier_path_of_a_file(
        self, steps: list[tuple[str, str]], moves: dict[str, str]
    ) -> None:
        lines = [line for origin, to in steps for line in (f"*** Update File: {origin}", f"*** Move to: {to}")]
        assert staged({"a": b"1", "b": b"2"}, *lines).moves == moves

    def test_a_file_made_by_the_patch_was_nowhere_before(self) -> None:
        lines = (
            "*** Update File: a",
            "*** Move to: b",
            "*** Add File: a",
            "+x",
            "*** Update File: a",
            "*** Move to: c",
        )
        assert staged({"a": b"1"}, *lines).moves == {"b": "a"}

    def test_an_added_and_deleted_file_changes_nothing(self) -> None:
        assert staged({}, "*** Add File: a", "+x", "*** Delete File: a").changed_paths == ()

    @pytest.mark.req("S1.apply_patch.not_found", "S1.apply_patch.error_code")
    @pytest.mark.parametrize(
        ("lines", "outcome"),
        [
            (("*** Delete File: x",), ("not_found", "delete_target_not_found")),
            (("*** Update File: x", "@@", "-a"), ("not_found", "update_target_not_found")),
            (("*** Update File: x", "*** Move to: y"), ("not_found", "update_target_not_found")),
            (("*** Delete File: a", "*** Delete File: a"), ("not_found", "delete_target_not_found")),
            (("*** Delete File: a", "*** Update File: a", "@@", "-a"), ("not_found", "update_target_not_found")),
            (("*** Update File: bin", "@@", "-a"), ("reject", "update_target_non_utf8")),
            (("*** Add File: ../x", "+x"), ("reject", "invalid_path")),
            (("*** Add File: /x", "+x"), ("reject", "invalid_path")),
            (("*** Add File: .", "+x"), ("reject", "invalid_path")),
            (("*** Add File: a\0b", "+x"), ("reject", "invalid_path")),
            (("*** Update File: a", "*** Move to: x/../../y"), ("reject", "invalid_path")),
            (("*** Add File: d", "+x", "*** Add File: d/e/f", "+y"), ("reject", "invalid_path")),
            (("*** Delete File: x", "*** Delete File: ../y"), ("reject", "invalid_path")),
        ],
    )
    def test_the_first_failure_refuses_the_patch(self, lines: tuple[str, ...], outcome: tuple[str, str]) -> None:
        assert refusal({"a": b"a\n", "bin": b"\xff"}, *lines) == outcome

    def test_a_file_may_be_created_where_another_is_deleted(self) -> None:
        assert staged({"d": b"1"}, "*** Delete File: d", "*** Add File: d/e", "+x").files == {"d": None, "d/e": b"x\n"}

    def test_the_caller_decides_what_a_path_means(self) -> None:
        def inside_root(text: str) -> RepoPath:
            return parse_repo_path(text.removeprefix("/root/"))

        operations = parse_v4a(patch_of("*** Add File: /root/a/b", "+x"))
        assert stage_v4a(operations, nothing, path_of=inside_root).files == {"a/b": b"x\n"}

    def test_a_refusal_of_the_caller_passes_through(self) -> None:
        def outside(_: str) -> RepoPath:
            raise Refused("forbidden", "path_forbidden", "no")

        with pytest.raises(Refused) as caught:
            stage_v4a(parse_v4a(patch_of("*** Delete File: a")), nothing, path_of=outside)
        assert (caught.value.status, caught.value.code) == ("forbidden", "path_forbidden")


LINE = st.text(alphabet="ab é\t“", max_size=4)
ENDING = st.sampled_from(["\n", "\r\n", "\r"])
HEADS = ("*** Update File: a", "*** Update File: b", "*** Add File: b", "*** Delete File: a", "*** Move to: c")
MARKS = ("@@", "@@ a", "*** End of File", "", " ", "*** End Patch", "*** Begin Patch", "+", "-", "\x1f", "é", "+\r")
FRAGMENT = st.one_of(
    st.sampled_from((*HEADS, *MARKS)),
    st.builds(str.__add__, st.sampled_from(["+", "-", " ", "@@ ", ""]), LINE),
    st.text(max_size=6),
)
TEXT = st.lists(LINE, max_size=7).flatmap(
    lambda lines: st.lists(ENDING, min_size=len(lines), max_size=len(lines)).map(
        lambda endings: "".join(line + ending for line, ending in zip(lines, endings, strict=True))
    )
)


class TestAnyInput:
    @given(st.one_of(st.text(), st.lists(FRAGMENT).map("\n".join)))
    @example("*** Begin Patch\n*** Update File: \n*** End Patch")
    def test_any_text_is_operations_or_a_parse_error(self, patch: str) -> None:
        for text in (patch, patch_of(patch), patch_of("*** Update File: a", patch)):
            try:
                assert parse_v4a(text)
            except Refused as refused:
                assert (refused.status, refused.code) == PARSE_ERROR

    @given(st.lists(FRAGMENT), TEXT, st.binary(max_size=4))
    def test_any_patch_is_staged_or_refused(self, lines: list[str], a: str, b: bytes) -> None:
        try:
            outcome = staged({"a": a.encode(), "b": b}, "*** Update File: a", *lines)
        except Refused as refused:
            assert refused.status in ("parse_error", "reject", "not_found")
            return
        assert outcome.originals.keys() == outcome.files.keys()
        assert set(outcome.changed_paths) <= outcome.files.keys()
        assert all(outcome.files[path] is not None for path in outcome.moves)


def test_operations_are_values() -> None:
    operations: tuple[Operation, ...] = (AddFile("a", "x\n"), DeleteFile("b"))
    assert len({*operations, AddFile("a", "x\n")}) == 2
