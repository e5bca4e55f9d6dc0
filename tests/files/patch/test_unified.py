"""Unified diffs: what the grammar reads, and what strict applying makes of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.files.diff import named, quote, unquote
from mulligan.files.patch.unified import (
    FilePatch,
    HunkReject,
    MalformedHunk,
    PatchedFile,
    PatchHunk,
    Reject,
    UnifiedStaged,
    parse_unified,
    stage_unified,
)
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.paths import RepoPath

TEN = b"".join(b"line %d\n" % number for number in range(1, 11))
Tree = Mapping[str, bytes | PatchedFile]


def looker(tree: Tree) -> dict[RepoPath, PatchedFile]:
    return {
        RepoPath(path): now if isinstance(now, PatchedFile) else PatchedFile(now, 0o644) for path, now in tree.items()
    }


def stage(patch: bytes, tree: Tree, strip: int = 1) -> UnifiedStaged:
    return stage_unified(parse_unified(patch, strip=strip), looker(tree).get)


def files(patch: bytes, tree: Tree, strip: int = 1) -> dict[str, bytes | None]:
    """The bytes a patch leaves behind, when it applies."""
    staged = stage(patch, tree, strip)
    assert staged.rejects == ()
    return {path: None if now is None else now.content for path, now in staged.files.items()}


def reasons(patch: bytes, tree: Tree, strip: int = 1) -> list[tuple[str, int, str]]:
    """Why a patch does not apply, hunk by hunk."""
    staged = stage(patch, tree, strip)
    assert (staged.files, staged.applied) == ({}, ())
    return [(reject.path, hunk.index, hunk.reason) for reject in staged.rejects for hunk in reject.hunks]


def edit_of(name: bytes, hunks: bytes) -> bytes:
    return b"--- a/%s\n+++ b/%s\n%s" % (name, name, hunks)


SECOND_LINE = b"@@ -1,3 +1,3 @@\n line 1\n-line 2\n+L2\n line 3\n"


class TestPlaces:
    def test_a_hunk_applies_at_its_stated_line(self) -> None:
        assert files(edit_of(b"k", SECOND_LINE), {"k": TEN}) == {"k": TEN.replace(b"line 2\n", b"L2\n")}

    def test_a_hunk_that_would_need_an_offset_is_rejected(self) -> None:
        assert reasons(edit_of(b"k", SECOND_LINE), {"k": b"new\n" + TEN}) == [("k", 0, "context_mismatch")]

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(TEN.replace(b"line 1\n", b"line 1 \n"), id="trailing blank"),
            pytest.param(TEN.replace(b"\n", b"\r\n"), id="CRLF"),
            pytest.param(b"\xef\xbb\xbf" + TEN, id="BOM"),
            pytest.param(b"line 1\nline 2\n", id="too short"),
            pytest.param(b"", id="empty"),
        ],
    )
    def test_context_is_compared_byte_for_byte(self, content: bytes) -> None:
        assert reasons(edit_of(b"k", SECOND_LINE), {"k": content}) == [("k", 0, "context_mismatch")]

    def test_every_bad_hunk_of_every_file_is_reported_sorted_by_path_then_hunk(self) -> None:
        bad = b"@@ -1,2 +1,2 @@\n lineX 1\n-line 2\n+L2\n@@ -8,2 +8,2 @@\n lineX 8\n-line 9\n+L9\n"
        good = b"@@ -1 +1 @@\n-line 1\n+L1\n"
        patch = b"".join([edit_of(b"b", bad), edit_of(b"a/z", bad), edit_of(b"a-b", bad), edit_of(b"ok", good)])
        tree = {"b": TEN, "a/z": TEN, "a-b": TEN, "ok": TEN}
        both = (HunkReject(0, "context_mismatch"), HunkReject(1, "context_mismatch"))
        assert stage(patch, tree).rejects == tuple(Reject(RepoPath(path), both) for path in ("a-b", "a/z", "b"))

    def test_only_the_hunks_that_do_not_fit_are_rejected(self) -> None:
        hunks = SECOND_LINE + b"@@ -5 +5 @@\n-nope\n+x\n" + b"@@ -10 +10 @@\n-line 10\n+ten\n"
        assert reasons(edit_of(b"k", hunks), {"k": TEN}) == [("k", 1, "context_mismatch")]

    @pytest.mark.parametrize("second", [b"@@ -1 +1 @@\n-line 1\n+L1\n", b"@@ -3 +3 @@\n-line 3\n+L3\n"])
    def test_hunks_out_of_order_or_overlapping_are_rejected(self, second: bytes) -> None:
        assert reasons(edit_of(b"k", SECOND_LINE + second), {"k": TEN}) == [("k", 1, "context_mismatch")]

    def test_hunks_may_touch(self) -> None:
        hunks = b"@@ -1 +1 @@\n-line 1\n+L1\n@@ -2 +2 @@\n-line 2\n+L2\n"
        assert files(edit_of(b"k", hunks), {"k": b"line 1\nline 2\n"}) == {"k": b"L1\nL2\n"}

    def test_a_hunk_alone_out_of_a_longer_diff_applies_by_its_old_line(self) -> None:
        hunk = b"@@ -8,3 +28,3 @@\n line 8\n-line 9\n+L9\n line 10\n"
        assert files(edit_of(b"k", hunk), {"k": TEN}) == {"k": TEN.replace(b"line 9", b"L9")}

    @pytest.mark.parametrize(
        ("hunk", "after"),
        [
            (b"@@ -0,0 +1 @@\n+top\n", b"top\na\nb\n"),
            (b"@@ -1,0 +2 @@\n+mid\n", b"a\nmid\nb\n"),
            (b"@@ -2,0 +3 @@\n+end\n", b"a\nb\nend\n"),
            (b"@@ -1 +0,0 @@\n-a\n", b"b\n"),
            (b"@@ -1,2 +0,0 @@\n-a\n-b\n", b""),
        ],
    )
    def test_hunks_without_context_apply_at_their_stated_line(self, hunk: bytes, after: bytes) -> None:
        assert files(edit_of(b"k", hunk), {"k": b"a\nb\n"}) == {"k": after}

    def test_an_insertion_beyond_the_end_is_rejected(self) -> None:
        assert reasons(edit_of(b"k", b"@@ -3,0 +4 @@\n+x\n"), {"k": b"a\nb\n"}) == [("k", 0, "context_mismatch")]

    def test_a_line_number_beyond_any_file_is_rejected(self) -> None:
        hunk = b"@@ -9223372036854775808 +1 @@\n-a\n+b\n"
        assert reasons(edit_of(b"k", hunk), {"k": b"a\n"}) == [("k", 0, "context_mismatch")]


class TestLineEnds:
    NONE = b"\\ No newline at end of file\n"

    @pytest.mark.parametrize(
        ("before", "hunk", "after"),
        [
            (b"a\nb", b" a\n-b\n" + NONE + b"+b\n", b"a\nb\n"),
            (b"a\nb\n", b" a\n-b\n+b\n" + NONE, b"a\nb"),
            (b"a\nb", b"-a\n+A\n b\n" + NONE, b"A\nb"),
            (b"a\nb", b" a\n-b\n" + NONE + b"+c\n" + NONE, b"a\nc"),
            (b"a\r\nb\n", b" a\r\n-b\n+B\r\n", b"a\r\nB\r\n"),
            (b"\nb\n", b"\n-b\n+B\n", b"\nB\n"),
        ],
    )
    def test_line_ends_are_content(self, before: bytes, hunk: bytes, after: bytes) -> None:
        assert files(edit_of(b"k", b"@@ -1,2 +1,2 @@\n" + hunk), {"k": before}) == {"k": after}

    @pytest.mark.parametrize(
        ("content", "hunk"),
        [
            pytest.param(b"a\nb\n", b"@@ -2 +2 @@\n-b\n" + NONE + b"+x\n", id="the file has a last newline"),
            pytest.param(b"a\nb", b"@@ -2 +2 @@\n-b\n+x\n", id="the file has none"),
            pytest.param(b"a\nb\n", b"@@ -1 +1 @@\n-a\n+x\n" + NONE, id="an end in the middle of the file"),
            pytest.param(b"a\nb", b"@@ -2,0 +3 @@\n+c\n", id="a line after one without end"),
        ],
    )
    def test_lines_are_never_glued(self, content: bytes, hunk: bytes) -> None:
        assert reasons(edit_of(b"k", hunk), {"k": content}) == [("k", 0, "context_mismatch")]

    def test_a_patch_without_its_last_newline_is_read(self) -> None:
        assert files(edit_of(b"k", b"@@ -1 +1 @@\n-a\n+b"), {"k": b"a\n"}) == {"k": b"b\n"}

    def test_a_patch_converted_to_crlf_fits_only_a_crlf_file(self) -> None:
        patch = edit_of(b"k", b"@@ -1 +1 @@\n-a\n+b\n").replace(b"\n", b"\r\n")
        assert files(patch, {"k": b"a\r\n"}) == {"k": b"b\r\n"}
        assert reasons(patch, {"k": b"a\n"}) == [("k", 0, "context_mismatch")]


class TestMalformedHunks:
    @pytest.mark.parametrize(
        "hunk",
        [
            pytest.param(b"@@ -0,0 +0,0 @@\n", id="empty"),
            pytest.param(b"@@ --1,1 +1,1 @@\n-line 1\n+x\n", id="negative"),
            pytest.param(b"@@ -1,1000000000 +1,1000000000 @@\n-line 1\n+x\n", id="truncated"),
            pytest.param(b"@@ -1,2 +1 @@\n-line 1\n+x\n+y\n", id="counts of the other side"),
            pytest.param(b"@@ -1 +1 @@\n-line 1\n+x\n+y\n", id="one line more than counted"),
            pytest.param(b"@@ -1 +1 @@\n line 1\n", id="only context"),
            pytest.param(b"@@ -0,1 +1 @@\n-line 1\n+x\n", id="line 0"),
            pytest.param(b"@@\n-line 1\n+x\n", id="no numbers"),
            pytest.param(b"@@ -1" + b"0" * 5000 + b" +1 @@\n-line 1\n+x\n", id="a number too long"),
            pytest.param(b"@@ -1,2 +1,2 @@\n-line 1\n*line 2\n+x\n", id="no such mark"),
            pytest.param(b"@@ -1 +1,2 @@\n line 1\n\\ No newline\n+x\n", id="a line after the last"),
            pytest.param(b"@@@ -1 -1 +1 @@@\n--line 1\n++x\n", id="combined diff"),
            pytest.param(b"", id="no hunk at all"),
        ],
    )
    def test_a_hunk_that_is_not_well_formed_is_reported_as_such(self, hunk: bytes) -> None:
        assert reasons(edit_of(b"k", hunk), {"k": TEN}) == [("k", 0, "malformed_hunk")]

    @pytest.mark.parametrize(
        "header",
        [
            pytest.param(b"diff --git a/k b/k\n", id="nothing said"),
            pytest.param(b"diff --git a/k b/k\nold mode 100644\n", id="only the old mode"),
            pytest.param(b"diff --git a/k b/k\nold mode 100644\nnew mode 100644\n", id="the same mode"),
            pytest.param(b"diff --git a/k b/k\nnew file mode 100644\n--- /dev/null\n+++ b/k\n", id="cut off"),
        ],
    )
    def test_a_header_that_changes_nothing_or_lost_its_hunks_is_malformed(self, header: bytes) -> None:
        tree = {} if b"new file" in header else {"k": TEN}
        assert reasons(header, tree) == [("k", 0, "malformed_hunk")]

    def test_the_hunks_after_it_are_still_judged(self) -> None:
        hunks = b"@@ -1,9 +1 @@\n-x\n@@ -5 +5 @@\n-nope\n+x\n@@ -6 +6 @@\n-line 6\n+6\n"
        patch = edit_of(b"k", hunks) + edit_of(b"missing", SECOND_LINE)
        told = [("k", 0, "malformed_hunk"), ("k", 1, "context_mismatch"), ("missing", 0, "target_missing")]
        assert reasons(patch, {"k": TEN}) == told

    def test_a_mail_signature_is_no_hunk_line(self) -> None:
        patch = edit_of(b"k", b"@@ -1 +1 @@\n-a\n+b\n")
        assert files(patch + b"-- \n2.39.5\n\n", {"k": b"a\n"}) == {"k": b"b\n"}
        assert files(patch + b"--\n2.39.5\n\n", {"k": b"a\n"}) == {"k": b"b\n"}

    def test_content_may_look_like_headers(self) -> None:
        hunk = b"@@ -1,3 +1,2 @@\n--- comment\n-++ plus\n x\n+++ new\n"
        assert files(edit_of(b"k", hunk), {"k": b"-- comment\n++ plus\nx\n"}) == {"k": b"x\n++ new\n"}


class TestFilesThatComeAndGo:
    def test_a_new_file_has_the_stated_mode(self) -> None:
        patch = b"diff --git a/r.sh b/r.sh\nnew file mode 100755\n--- /dev/null\n+++ b/r.sh\n@@ -0,0 +1 @@\n+x\n"
        assert stage(patch, {}).files == {"r.sh": PatchedFile(b"x\n", 0o755)}

    def test_an_empty_file_is_created_and_deleted_by_its_header_alone(self) -> None:
        assert files(b"diff --git a/e b/e\nnew file mode 100644\nindex 0000000..e69de29\n", {}) == {"e": b""}
        assert files(b"diff --git a/e b/e\ndeleted file mode 100644\n", {"e": b""}) == {"e": None}

    def test_a_new_file_must_not_exist(self) -> None:
        assert reasons(b"--- /dev/null\n+++ b/k\n@@ -0,0 +1 @@\n+x\n", {"k": b""}) == [("k", 0, "target_exists")]

    def test_a_deleted_file_must_be_there_and_be_what_is_deleted(self) -> None:
        patch = b"--- a/k\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-a\n-b\n"
        assert files(patch, {"k": b"a\nb\n"}) == {"k": None}
        assert reasons(patch, {}) == [("k", 0, "target_missing")]
        assert reasons(patch, {"k": b"a\nX\n"}) == [("k", 0, "context_mismatch")]
        assert reasons(patch, {"k": b"a\nb\nc\n"}) == [("k", 0, "content_remains")]

    def test_a_new_file_has_no_old_lines_and_a_deleted_one_no_new_lines(self) -> None:
        assert reasons(b"--- /dev/null\n+++ b/k\n@@ -1 +1 @@\n-a\n+x\n", {}) == [("k", 0, "malformed_hunk")]
        assert reasons(b"--- a/k\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+x\n", {"k": b"a\n"}) == [("k", 0, "malformed_hunk")]

    def test_every_hunk_of_a_missing_file_is_reported(self) -> None:
        hunks = SECOND_LINE + b"@@ -9 +9 @@\n-line 9\n+L9\n"
        assert reasons(edit_of(b"k", hunks), {}) == [("k", 0, "target_missing"), ("k", 1, "target_missing")]

    def test_diff_n_writes_a_missing_file_as_one_of_the_epoch(self) -> None:
        old, new = b"--- a/k\t1970-01-01 01:00:00.000000000 +0100\n", b"+++ b/k\t2024-05-01 10:00:00.5 +0200\n"
        assert files(old + new + b"@@ -0,0 +1 @@\n+x\n", {}) == {"k": b"x\n"}
        swapped = new.replace(b"+++ b", b"--- a") + old.replace(b"--- a", b"+++ b")
        assert files(swapped + b"@@ -1 +0,0 @@\n-x\n", {"k": b"x\n"}) == {"k": None}

    def test_a_real_file_may_be_of_the_epoch(self) -> None:
        header = b"--- a/k\t1970-01-01 00:00:00 +0000\n+++ b/k\t1970-01-01 00:00:00 +0000\n"
        assert files(header + b"@@ -1 +1 @@\n-a\n+b\n", {"k": b"a\n"}) == {"k": b"b\n"}


class TestRenamesAndCopies:
    def moved(self, verb: bytes, old: bytes, new: bytes, hunks: bytes = b"") -> bytes:
        head = b"diff --git a/%s b/%s\nsimilarity index 90%%\n%s from %s\n%s to %s\n" % (old, new, verb, old, verb, new)
        return head + (b"--- a/%s\n+++ b/%s\n%s" % (old, new, hunks) if hunks else b"")

    def test_a_rename_keeps_the_mode_and_takes_the_edit(self) -> None:
        staged = stage(self.moved(b"rename", b"a", b"d/b", SECOND_LINE), {"a": PatchedFile(TEN, 0o640)})
        assert staged.files == {"a": None, "d/b": PatchedFile(TEN.replace(b"line 2\n", b"L2\n"), 0o640)}
        assert staged.applied == ("d/b",)

    def test_a_copy_reads_the_file_before_the_patch(self) -> None:
        patch = edit_of(b"a", b"@@ -9 +9 @@\n-line 9\n+L9\n") + self.moved(b"copy", b"a", b"c", SECOND_LINE)
        after = {"a": TEN.replace(b"line 9", b"L9"), "c": TEN.replace(b"line 2\n", b"L2\n")}
        assert files(patch, {"a": TEN}) == after

    def test_two_files_swap_names(self) -> None:
        patch = self.moved(b"rename", b"a", b"b") + self.moved(b"rename", b"b", b"a")
        assert files(patch, {"a": b"A", "b": b"B"}) == {"a": b"B", "b": b"A"}

    def test_a_chain_of_renames_moves_each_file_one_step(self) -> None:
        patch = self.moved(b"rename", b"a", b"b") + self.moved(b"rename", b"b", b"c")
        assert files(patch, {"a": b"A", "b": b"B"}) == {"a": None, "b": b"A", "c": b"B"}

    @pytest.mark.parametrize("verb", [b"rename", b"copy"])
    def test_a_link_is_moved_as_it_is_but_takes_no_text(self, verb: bytes) -> None:
        link = PatchedFile(b"f", 0o777, "symlink")
        gone = {"a": None} if verb == b"rename" else {}
        assert stage(self.moved(verb, b"a", b"b"), {"a": link}).files == {**gone, "b": link}
        text = self.moved(verb, b"a", b"b", b"@@ -1 +1 @@\n-f\n+g\n")
        assert reasons(text, {"a": link}) == [("b", 0, "context_mismatch")]
        outside = self.moved(verb, b"d/a", b"b")
        assert reasons(outside, {"d/a": PatchedFile(b"../f", 0o777, "symlink")}) == [("b", 0, "path_rejected")]

    def test_a_rename_needs_a_free_target_and_an_existing_source(self) -> None:
        patch = self.moved(b"rename", b"a", b"b")
        assert reasons(patch, {"a": b"A", "b": b"B"}) == [("b", 0, "target_exists")]
        assert reasons(patch, {}) == [("b", 0, "target_missing")]
        twice = patch + self.moved(b"copy", b"a", b"b")
        assert reasons(twice, {"a": b"A"}) == [("b", 1, "target_exists")]

    def test_a_file_edited_in_place_and_renamed_away_is_a_contradiction(self) -> None:
        patch = edit_of(b"a", SECOND_LINE) + self.moved(b"rename", b"a", b"b")
        assert reasons(patch, {"a": TEN}) == [("b", 0, "malformed_hunk")]

    def test_a_second_section_sees_the_first(self) -> None:
        patch = edit_of(b"k", SECOND_LINE) + edit_of(b"k", b"@@ -2 +2 @@\n-L2\n+two\n")
        staged = stage(patch, {"k": TEN})
        assert staged.files == {"k": PatchedFile(TEN.replace(b"line 2\n", b"two\n"), 0o644)}
        assert staged.applied == ("k",)

    def test_a_file_that_ends_as_it_was_is_no_change(self) -> None:
        made = b"--- /dev/null\n+++ b/d/x\n@@ -0,0 +1 @@\n+x\n--- a/d/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        there_and_back = edit_of(b"k", SECOND_LINE) + edit_of(b"k", b"@@ -2 +2 @@\n-L2\n+line 2\n")
        staged = stage(made + there_and_back, {"k": TEN})
        assert staged == UnifiedStaged(applied=(RepoPath("d/x"), RepoPath("k")))

    def test_hunks_of_a_path_are_counted_through_its_sections(self) -> None:
        patch = edit_of(b"k", SECOND_LINE) + edit_of(b"k", b"@@ -2 +2 @@\n-line 2\n+two\n")
        assert reasons(patch, {"k": TEN}) == [("k", 1, "context_mismatch")]


class TestModes:
    CHMOD = b"diff --git a/r b/r\nold mode %s\nnew mode %s\n"

    @pytest.mark.parametrize(
        ("before", "wanted", "after"),
        [(0o644, b"100755", 0o755), (0o640, b"100755", 0o750), (0o755, b"100644", 0o644), (0o700, b"100644", 0o600)],
    )
    def test_a_diff_turns_execution_on_or_off_and_keeps_the_other_bits(
        self, before: int, wanted: bytes, after: int
    ) -> None:
        old = b"100644" if wanted == b"100755" else b"100755"
        assert stage(self.CHMOD % (old, wanted), {"r": PatchedFile(b"x", before)}).files == {
            "r": PatchedFile(b"x", after)
        }

    def test_an_edit_keeps_the_mode(self) -> None:
        patch = b"diff --git a/r b/r\nindex 587be6b..975fbec 100644\n--- a/r\n+++ b/r\n@@ -1 +1 @@\n-x\n+y\n"
        assert stage(patch, {"r": PatchedFile(b"x\n", 0o600)}).files == {"r": PatchedFile(b"y\n", 0o600)}

    def test_a_link_is_created_with_its_target_as_content(self) -> None:
        patch = b"diff --git a/d/l b/d/l\nnew file mode 120000\n--- /dev/null\n+++ b/d/l\n@@ -0,0 +1 @@\n+../k\n"
        staged = stage(patch + TestLineEnds.NONE, {"k": b""})
        assert staged.files == {"d/l": PatchedFile(b"../k", 0o777, "symlink")}

    @pytest.mark.parametrize("target", [b"/etc/passwd", b"../../x", b"x/../../../y"])
    def test_a_link_that_leaves_the_root_is_rejected(self, target: bytes) -> None:
        patch = b"diff --git a/d/l b/d/l\nnew file mode 120000\n--- /dev/null\n+++ b/d/l\n@@ -0,0 +1 @@\n+%s\n" % target
        assert reasons(patch + TestLineEnds.NONE, {}) == [("d/l", 0, "path_rejected")]

    def test_a_file_becomes_a_link_in_two_sections(self) -> None:
        patch = (
            b"diff --git a/l b/l\ndeleted file mode 100644\n--- a/l\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
            b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+k\n"
        )
        assert stage(patch + TestLineEnds.NONE, {"l": b"x\n"}).files == {"l": PatchedFile(b"k", 0o777, "symlink")}
        assert reasons(self.CHMOD % (b"100644", b"120000"), {"r": b"x"}) == [("r", 0, "malformed_hunk")]

    def test_a_text_diff_does_not_touch_a_link_nor_a_link_diff_a_text(self) -> None:
        link = PatchedFile(b"line 1", 0o777, "symlink")
        assert reasons(edit_of(b"k", b"@@ -1 +1 @@\n-a\n+b\n"), {"k": link}) == [("k", 0, "context_mismatch")]
        patch = b"diff --git a/k b/k\nindex 1..2 120000\n" + edit_of(b"k", b"@@ -1 +1 @@\n-a\n+b\n")
        assert reasons(patch, {"k": b"a\n"}) == [("k", 0, "context_mismatch")]

    def test_nothing_is_written_below_a_link_or_a_file(self) -> None:
        link = b"diff --git a/ln b/ln\nnew file mode 120000\n--- /dev/null\n+++ b/ln\n@@ -0,0 +1 @@\n+k\n"
        below = b"diff --git a/ln/x b/ln/x\nnew file mode 100644\n--- /dev/null\n+++ b/ln/x\n@@ -0,0 +1 @@\n+x\n"
        assert reasons(link + TestLineEnds.NONE + below, {}) == [("ln/x", 0, "path_rejected")]
        assert reasons(below, {"ln": b"a file"}) == [("ln/x", 0, "path_rejected")]

    def test_a_directory_takes_the_place_of_a_deleted_file(self) -> None:
        gone = b"--- a/d\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        assert files(gone + b"--- /dev/null\n+++ b/d/x\n@@ -0,0 +1 @@\n+x\n", {"d": b"x\n"}) == {
            "d": None,
            "d/x": b"x\n",
        }


class TestUnsupported:
    @pytest.mark.parametrize(
        "patch",
        [
            b"diff --git a/k b/k\nindex bdc955b..8835708 100644\nBinary files a/k and b/k differ\n",
            b"diff --git a/k b/k\nindex 1..2 100644\nGIT binary patch\nliteral 3\nKcmZQzU|?WiU|?VX00310\n\n",
            b"Binary files a/k and b/k differ\n",
            b"diff --git a/k b/k\nnew file mode 160000\n--- /dev/null\n+++ b/k\n@@ -0,0 +1 @@\n+Subproject commit 12\n",
        ],
    )
    def test_a_binary_file_is_reported_and_stops_the_rest(self, patch: bytes) -> None:
        assert reasons(patch + edit_of(b"t", SECOND_LINE), {"t": TEN}) == [("k", 0, "binary_unsupported")]


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "../e",
            "a/../../e",
            "/abs",
            ".git/config",
            "s/.git/hooks/x",
            ".GIT/x",
            "./../x",
            "~/x",
            "~root",
            "..",
            ".",
            "d/",
        ],
    )
    def test_names_outside_the_root_or_inside_git_are_rejected(self, name: str) -> None:
        patch = b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n" % name.encode()
        assert reasons(patch, {}) == [(name, 0, "path_rejected")]

    def test_both_ends_of_a_move_are_checked(self) -> None:
        out = b"diff --git a/k b/../out\nsimilarity index 100%\nrename from k\nrename to ../out\n"
        stolen = b"diff --git a/../../etc/passwd b/s\ncopy from ../../etc/passwd\ncopy to s\n"
        assert reasons(out, {"k": b""}) == [("../out", 0, "path_rejected")]
        assert reasons(stolen, {}) == [("../../etc/passwd", 0, "path_rejected")]

    @pytest.mark.parametrize(
        ("name", "quoted"),
        [
            (b"caf\xc3\xa9.txt", b"caf\\303\\251.txt"),
            (b"caf\xe9.txt", b"caf\\351.txt"),
            (b"a\tb", b"a\\tb"),
            (b"a\nb", b"a\\nb"),
            (b'a"b', b'a\\"b'),
            (b"a\\b", b"a\\\\b"),
        ],
    )
    def test_quoted_names_are_read(self, name: bytes, quoted: bytes) -> None:
        path = name.decode("utf-8", "surrogateescape")
        hunk = b"@@ -1 +1 @@\n-a\n+b\n"
        header = b'diff --git "a/%s" "b/%s"\n' % (quoted, quoted)
        edited = header + b'--- "a/%s"\n+++ "b/%s"\n' % (quoted, quoted) + hunk
        assert files(edited, {path: b"a\n"}) == {path: b"b\n"}
        assert files(header + b"deleted file mode 100644\n", {path: b""}) == {path: None}
        renamed = b'diff --git "a/%s" b/n\nrename from "%s"\nrename to n\n' % (quoted, quoted)
        assert files(renamed, {path: b"a\n"}) == {path: None, "n": b"a\n"}

    def test_a_name_with_spaces_that_a_header_has_twice_is_found(self) -> None:
        assert files(b"diff --git a/x b/x b/x b/x\ndeleted file mode 100644\n", {"x b/x": b""}) == {"x b/x": None}
        patch = b"diff --git a/my f b/my f\n--- a/my f\t\n+++ b/my f\t\n@@ -1 +1 @@\n-a\n+b\n"
        assert files(patch, {"my f": b"a\n"}) == {"my f": b"b\n"}

    def test_a_name_ends_at_the_tab_before_a_time_stamp(self) -> None:
        patch = b"--- old/k\t2024-01-01 00:00:00 +0000\n+++ new/k\t2024-01-02 00:00:00 +0000\n@@ -1 +1 @@\n-a\n+b\n"
        assert files(patch, {"k": b"a\n"}) == {"k": b"b\n"}

    def test_a_backup_name_on_one_side_is_not_the_file(self) -> None:
        hunk = b"@@ -1 +1 @@\n-a\n+b\n"
        assert files(b"--- a/k.orig\n+++ b/k\n" + hunk, {"k": b"a\n"}) == {"k": b"b\n"}
        assert files(b"--- a/k\n+++ b/k.new\n" + hunk, {"k": b"a\n"}) == {"k": b"b\n"}

    @pytest.mark.parametrize(("strip", "path"), [(0, "a/s/k"), (1, "s/k"), (2, "k")])
    def test_strip_drops_leading_directories(self, strip: int, path: str) -> None:
        patch = b"--- a/s/k\n+++ a/s/k\n@@ -1 +1 @@\n-a\n+b\n"
        assert files(patch, {path: b"a\n"}, strip) == {path: b"b\n"}

    def test_strip_counts_the_prefix_that_renames_do_not_have(self) -> None:
        patch = b"diff --git a/s/k b/s/n\nrename from s/k\nrename to s/n\n"
        assert files(patch, {"k": b"a\n"}, 2) == {"k": None, "n": b"a\n"}

    def test_a_name_with_fewer_directories_than_strip_is_rejected(self) -> None:
        patch = b"--- a/k\n+++ a/k\n@@ -1 +1 @@\n-a\n+b\n"
        assert reasons(patch, {"k": b"a\n"}, 3) == [("a/k", 0, "path_rejected")]

    @given(st.binary(min_size=1, max_size=20))
    def test_quoting_is_undone_by_unquoting(self, name: bytes) -> None:
        quoted = quote(name).encode("utf-8", "surrogateescape")
        assert (unquote(quoted) == (name, b"")) if quoted.startswith(b'"') else quoted == name


class TestUnreadable:
    @pytest.mark.parametrize(
        "patch",
        [
            b"",
            b"hello\nworld\n",
            b"*** Begin Patch\n*** Update File: k\n@@\n-line 1\n+x\n*** End Patch\n",
            b"@@ -1 +1 @@\n-a\n+b\n",
            b"--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n",
            b"diff --git a/x b/y\nold mode 100644\nnew mode 100755\n",
            b"diff --git a/x b/x\n--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
            b"diff --git a/x b/x\nnew file mode 100644\ndeleted file mode 100644\n",
            b"diff --git a/x b/x\nnew file mode 100644\n--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+b\n",
            b"diff --git a/x b/x\nold mode rwx\nnew mode 100755\n",
            b"diff --git a/x b/y\nrename from x\n",
            b"diff --git a/x b/y\nrename from x\nrename to y\n--- a/x\n+++ b/z\n@@ -1 +1 @@\n-a\n+b\n",
            b'--- "a/\\q"\n+++ "b/\\q"\n@@ -1 +1 @@\n-a\n+b\n',
        ],
    )
    def test_a_text_that_names_no_change_is_refused_whole(self, patch: bytes) -> None:
        with pytest.raises(Refused) as refused:
            parse_unified(patch)
        assert (refused.value.status, refused.value.code) == ("parse_error", "patch_parse_error")

    def test_a_negative_strip_is_a_mistake_of_the_caller(self) -> None:
        with pytest.raises(MulliganError) as fault:
            parse_unified(b"", strip=-1)
        assert fault.value.code == "invalid_params"

    def test_text_around_the_diffs_is_skipped(self) -> None:
        mail = b"From 1234\nSubject: x\n---\n k | 2 +-\n\n" + edit_of(b"k", SECOND_LINE)
        assert parse_unified(mail) == (
            FilePatch(
                path=RepoPath("k"),
                action="modify",
                source=RepoPath("k"),
                target=RepoPath("k"),
                mode_before=None,
                mode_after=None,
                hunks=(PatchHunk(1, (b"line 1\n", b"line 2\n", b"line 3\n"), (b"line 1\n", b"L2\n", b"line 3\n")),),
            ),
        )


PIECES = st.sampled_from(
    [
        *(b"diff --git a/k b/k\n", b"--- a/k\n", b"+++ b/k\n", b"--- /dev/null\n", b"+++ /dev/null\n", b"diff --git "),
        *(b"@@ -1 +1 @@\n", b"@@ -1,2 +1,2 @@\n", b"@@ -0,0 +1 @@\n", b"@@ -", b"@@\n", b"\\ No newline\n"),
        *(
            b"-a\n",
            b"+b\n",
            b" a\n",
            b"\n",
            b"\r",
            b"\x00",
            b"\xff",
            b" /",
            b'"a/\\303',
            b'--- "a/k"\n',
            b'+++ "b/k"\n',
        ),
        *(b"rename from k\n", b"rename to n\n", b"copy from k\n", b"copy to c\n", b"new file mode 100644\n"),
        *(b"deleted file mode 120000\n", b"old mode 100644\n", b"new mode 100755\n", b"index 1..2 100644\n"),
        *(b"GIT binary patch\n", b"Binary files a/k and b/k differ\n"),
    ]
)
TEXTS = st.lists(PIECES | st.binary(max_size=8), max_size=14).map(b"".join)


class TestAnyBytes:
    @given(TEXTS, st.integers(0, 3))
    def test_any_bytes_are_staged_rejected_or_refused(self, patch: bytes, strip: int) -> None:
        tree = looker({"k": b"a\n", "c": b"a\nb", "n/x": b""})
        try:
            staged = stage_unified(parse_unified(patch, strip=strip), tree.get)
        except Refused as refused:
            assert refused.code == "patch_parse_error"
            return
        assert not (staged.rejects and (staged.files or staged.applied))
        order = [
            (reject.path.encode("utf-8", "surrogateescape"), [h.index for h in reject.hunks])
            for reject in staged.rejects
        ]
        assert order == sorted(order) and all(indexes == sorted(set(indexes)) for _, indexes in order)

    @given(TEXTS)
    def test_every_hunk_line_is_accounted_for(self, body: bytes) -> None:
        """A well-formed hunk has as many lines as it says; everything else is malformed, never shortened."""
        patch = edit_of(b"k", b"@@ -1,2 +1,2 @@\n" + body)
        try:
            hunk = parse_unified(patch)[0].hunks[0]
        except Refused:
            return
        assert isinstance(hunk, MalformedHunk) or (len(hunk.old), len(hunk.new)) == (2, 2)

    @given(st.binary(max_size=12), st.integers(0, 2))
    def test_no_name_leads_outside(self, name: bytes, strip: int) -> None:
        path = named(name, strip).path
        assert path is None or not {"..", ".git", "", "."} & set(path.split("/"))

    @pytest.mark.parametrize(
        "patch",
        [
            (b"diff --git a/" + b" /" * 8000 + b"\nold mode 100644\nnew mode 100755\n") * 3,
            b"Binary files " + b" and " * 100_000 + b" differ in\n",
            b'--- "' + b"\\303" * 200_000 + b'\n+++ "\n',
        ],
        ids=["names", "notice", "quotes"],
    )
    def test_hostile_header_lines_are_read_in_bounded_time(self, patch: bytes) -> None:
        with pytest.raises(Refused):
            parse_unified(patch)
