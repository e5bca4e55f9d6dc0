"""Matching lines, and the diffs made from it: right for git, for our own applier, and on time for anything."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mulligan.files.diff import MatchingBlock, edits, line_counts, match_blocks, split_lines, unified_diff
from mulligan.files.patch.unified import PatchedFile, parse_unified, stage_unified
from mulligan.values.paths import RepoPath, path_bytes

GIT_ENV = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
K = RepoPath("k")


def longest_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common subsequence, the slow and sure way."""
    row = [0] * (len(b) + 1)
    for item in a:
        above, row = row, [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if item == other else max(row[-1], above[j + 1]))
    return row[-1]


def check_blocks(a: Sequence[int], b: Sequence[int], blocks: list[MatchingBlock]) -> None:
    """Blocks are equal, in order, not empty, and never touch on both sides."""
    a_end = b_end = -1
    for a_start, b_start, length in blocks:
        assert length > 0 and a[a_start : a_start + length] == b[b_start : b_start + length]
        assert a_start >= max(a_end, 0) and b_start >= max(b_end, 0) and (a_start, b_start) != (a_end, b_end)
        a_end, b_end = a_start + length, b_start + length


SMALL = st.integers(2, 12).flatmap(lambda top: st.lists(st.integers(0, top), max_size=30))


class TestMatchBlocks:
    @given(SMALL, SMALL)
    def test_small_texts_share_as_much_as_they_can(self, a: list[int], b: list[int]) -> None:
        blocks = match_blocks(a, b)
        check_blocks(a, b, blocks)
        assert sum(block.length for block in blocks) == longest_common(a, b)

    @given(SMALL)
    def test_a_text_matches_itself_whole(self, a: list[int]) -> None:
        assert match_blocks(a, a) == ([MatchingBlock(0, 0, len(a))] if a else [])

    @pytest.mark.parametrize(
        ("a", "b", "blocks"),
        [
            ("abc", "abXc", [(0, 0, 2), (2, 3, 1)]),
            ("f}g}", "f}h}g}", [(0, 0, 2), (2, 4, 2)]),
            ("xx", "xxx", [(0, 0, 2)]),
            ("xxx", "xx", [(0, 0, 2)]),
            ("abcd", "dcba", [(0, 3, 1)]),
            ("ab", "XaabX", [(0, 2, 2)]),
            ("", "a", []),
        ],
    )
    def test_a_change_that_fits_several_places_is_shown_at_the_last(
        self, a: str, b: str, blocks: list[tuple[int, int, int]]
    ) -> None:
        assert match_blocks(a, b) == blocks

    def test_an_edit_joins_the_one_it_can_slide_to(self) -> None:
        assert edits([b"a", b"b", b"c"], [b"X", b"b", b"b", b"c"]) == [(0, 1, 0, 2)]

    @pytest.mark.parametrize("alphabet", [2, 10, 1000, 100_000])
    def test_large_unlike_texts_give_right_blocks_within_the_work_bound(self, alphabet: int) -> None:
        random = Random(alphabet)
        a = [random.randrange(alphabet) for _ in range(30_000)]
        b = [random.randrange(alphabet) for _ in range(30_000)]
        check_blocks(a, b, match_blocks(a, b))

    def test_many_edits_in_a_large_text_are_all_found(self) -> None:
        random = Random(7)
        a = list(range(100_000))
        b = [item for item in a if random.random() < 0.9]
        blocks = match_blocks(a, b)
        check_blocks(a, b, blocks)
        assert sum(block.length for block in blocks) == len(b)

    def test_a_moved_half_and_a_reversed_text_are_matched_in_part(self) -> None:
        a = list(range(100_000))
        moved = a[50_000:] + a[:50_000]
        assert [block.length for block in match_blocks(a, moved)] == [50_000]
        assert [block.length for block in match_blocks(a, a[::-1])] == [1]

    @pytest.mark.parametrize("period", [1, 2, 3, 7])
    def test_periodic_texts_are_matched(self, period: int) -> None:
        a = [item % period for item in range(20_000)]
        random = Random(period)
        b = [item if random.random() < 0.99 else -1 for item in a]
        check_blocks(a, b, match_blocks(a, b))


class TestSplitLines:
    def test_only_a_line_feed_ends_a_line(self) -> None:
        assert split_lines(b"a\r\nb\rc\x0bd\x0ce\xc2\x85f\n\ng") == [
            b"a\r\n",
            b"b\rc\x0bd\x0ce\xc2\x85f\n",
            b"\n",
            b"g",
        ]

    @given(st.binary())
    def test_lines_make_the_text_again(self, data: bytes) -> None:
        assert b"".join(split_lines(data)) == data


def diff(before: bytes, after: bytes, context: int = 3) -> str:
    return unified_diff(before, after, path_before=K, path_after=K, context=context)


class TestForm:
    def test_a_diff_reads_as_git_writes_it(self) -> None:
        before = b"".join(b"%d\n" % number for number in range(1, 21))
        after = before.replace(b"2\n3\n", b"2\nthree\n", 1).replace(b"\n19\n20\n", b"\n19\n20")
        assert diff(before, after) == (
            "diff --git a/k b/k\n--- a/k\n+++ b/k\n"
            "@@ -1,6 +1,6 @@\n 1\n 2\n-3\n+three\n 4\n 5\n 6\n"
            "@@ -17,4 +17,4 @@\n 17\n 18\n 19\n-20\n+20\n\\ No newline at end of file\n"
        )

    def test_edits_near_each_other_share_a_hunk(self) -> None:
        before = b"".join(b"%d\n" % number for number in range(20))
        assert diff(before, before.replace(b"5\n", b"x\n", 1).replace(b"\n12\n", b"\ny\n")).count("\n@@ ") == 1
        assert diff(before, before.replace(b"5\n", b"x\n", 1).replace(b"\n13\n", b"\ny\n")).count("\n@@ ") == 2

    def test_files_that_come_and_go_name_dev_null(self) -> None:
        created = unified_diff(b"", b"x\n", path_before=None, path_after=K, mode_after=0o755)
        assert created == "diff --git a/k b/k\nnew file mode 100755\n--- /dev/null\n+++ b/k\n@@ -0,0 +1 @@\n+x\n"
        deleted = unified_diff(b"x\n", b"", path_before=K, path_after=None)
        assert deleted == "diff --git a/k b/k\ndeleted file mode 100644\n--- a/k\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        assert unified_diff(b"", b"", path_before=None, path_after=K) == "diff --git a/k b/k\nnew file mode 100644\n"

    def test_equal_texts_have_an_empty_diff(self) -> None:
        assert diff(b"a\n", b"a\n") == ""
        assert line_counts(b"a\n", b"a\n") == (0, 0)

    def test_modes_and_renames_are_reported(self) -> None:
        n = RepoPath("n")
        moved = unified_diff(b"a", b"a", path_before=K, path_after=n, mode_after=0o755)
        assert moved == "diff --git a/k b/n\nold mode 100644\nnew mode 100755\nrename from k\nrename to n\n"

    def test_binaries_are_reported_not_shown(self) -> None:
        assert diff(b"\0", b"\1\0") == "diff --git a/k b/k\nBinary files a/k and b/k differ\n"
        assert line_counts(b"\0\n", b"a\n") == (0, 0)

    def test_for_readers_of_utf8_alone_other_bytes_are_binary(self) -> None:
        told = unified_diff(b"caf\xe9\n", b"caf\n", path_before=K, path_after=K, only_utf8=True)
        assert told == "diff --git a/k b/k\nBinary files a/k and b/k differ\n"
        assert unified_diff(b"\xe9", b"\xe9", path_before=K, path_after=K, only_utf8=True) == ""

    def test_names_are_quoted_only_when_they_must_be(self) -> None:
        def name(path: bytes) -> str:
            text = RepoPath(os.fsdecode(path))
            return unified_diff(b"", b"x\n", path_before=None, path_after=text).splitlines()[3]

        assert name("naïve.txt".encode()) == "+++ b/naïve.txt"
        assert name(b"my file") == "+++ b/my file\t"
        assert name(b"caf\xe9") == '+++ "b/caf\\351"'
        assert name(b'a"\t\\\x01') == '+++ "b/a\\"\\t\\\\\\001"'

    def test_counts_are_of_lines_added_and_removed(self) -> None:
        assert line_counts(b"a\nb\nc\n", b"a\nX\nY\nc\nd\n") == (3, 1)

    def test_a_file_that_becomes_a_link_is_reported_in_two_diffs(self) -> None:
        link_mode = 0o120000
        text = unified_diff(b"x\n", b"k2", path_before=K, path_after=K, mode_after=link_mode)
        staged = stage_unified(parse_unified(text.encode()), {K: PatchedFile(b"x\n", 0o644)}.get)
        assert staged.files == {K: PatchedFile(b"k2", 0o777, "symlink")}


LINES = st.sampled_from(
    [b"a\n", b"b\n", b"c\r\n", b"\n", b"--- a/k\n", b"+++ b/k\n", b"@@ -1 +1 @@\n", b"\\ x\n", b"\xff\n"]
)
TEXTS = st.tuples(st.lists(LINES, max_size=25), st.sampled_from([b"", b"end", b"\r"])).map(
    lambda t: b"".join(t[0]) + t[1]
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6).map(os.fsencode)
ODD_NAMES = NAMES | st.binary(min_size=1, max_size=6).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))
STATES = st.none() | TEXTS


def told(before: bytes | None, after: bytes | None, path: RepoPath, context: int = 3) -> bytes:
    text = unified_diff(
        before or b"",
        after or b"",
        path_before=None if before is None else path,
        path_after=None if after is None else path,
        context=context,
    )
    return text.encode("utf-8", "surrogateescape")


class TestItApplies:
    @given(TEXTS, TEXTS, st.integers(0, 4))
    def test_our_own_applier_applies_a_diff_and_its_inverse(self, before: bytes, after: bytes, context: int) -> None:
        for one, other in ((before, after), (after, before)):
            if one != other:
                staged = stage_unified(parse_unified(told(one, other, K, context)), {K: PatchedFile(one, 0o640)}.get)
                assert staged.files == {K: PatchedFile(other, 0o640)}

    @given(STATES, STATES, ODD_NAMES)
    def test_our_own_applier_creates_and_deletes_under_any_name(
        self, before: bytes | None, after: bytes | None, name: bytes
    ) -> None:
        path = RepoPath("d/x" + os.fsdecode(name))
        if before == after:
            return
        tree = {} if before is None else {path: PatchedFile(before, 0o644)}
        staged = stage_unified(parse_unified(told(before, after, path)), tree.get)
        assert staged.files == {path: None if after is None else PatchedFile(after, 0o644)}
        assert staged.applied == (path,)

    @settings(max_examples=60)
    @given(st.lists(st.tuples(STATES, STATES, ODD_NAMES, st.integers(1, 4)), min_size=1, max_size=12))
    def test_git_applies_it_exactly(self, changes: list[tuple[bytes | None, bytes | None, bytes, int]]) -> None:
        """Many files in one patch, so that one run of git judges them all."""
        paths = [RepoPath(f"{index}/x{os.fsdecode(change[2])}") for index, change in enumerate(changes)]
        rows = [(path, *change) for path, change in zip(paths, changes, strict=True)]
        patch = b"".join(told(before, after, path, context) for path, before, after, _, context in rows)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for path, before, *_ in rows:
                write(root, path, before)
            if patch:
                apply_with_git(root, patch)
            assert [read(root, path) for path in paths] == [after for _, _, after, _, _ in rows]


def write(root: Path, path: RepoPath, content: bytes | None) -> None:
    if content is not None:
        place = Path(os.fsdecode(os.fsencode(root) + b"/" + path_bytes(path)))
        place.parent.mkdir()
        place.write_bytes(content)


def read(root: Path, path: RepoPath) -> bytes | None:
    place = Path(os.fsdecode(os.fsencode(root) + b"/" + path_bytes(path)))
    return place.read_bytes() if place.exists() else None


def apply_with_git(root: Path, patch: bytes) -> None:
    env = GIT_ENV | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    subprocess.run(["git", "apply", "-"], cwd=root, env=env, input=patch, check=True, capture_output=True)
