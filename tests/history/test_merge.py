"""Three-way merge: the laws it keeps, the cases that name its conflicts, and git as a second opinion."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mulligan.files.diff import split_lines
from mulligan.history.merge import (
    Conflict,
    KeepOurs,
    Merged,
    MergedEntry,
    TakeTheirs,
    WriteMerged,
    merge_entry,
    merge_mode,
    merge_text,
)
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, SymlinkEntry, same_state

SAME_LINES = Conflict("same_lines")
GIT_ENV = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}


def text(letters: str) -> bytes:
    """One line for each letter; a final dot takes the last newline away."""
    return "".join(f"{letter}\n" for letter in letters).encode().removesuffix(b"\n.\n")


LETTERS = st.text("abcde", max_size=12)
TEXTS = st.builds(text, LETTERS | LETTERS.map(lambda letters: letters + "."))
CONTENTS = TEXTS | st.binary(max_size=6)


class TestText:
    @pytest.mark.parametrize(
        ("base", "ours", "theirs", "merged"),
        [
            ("abcdef", "aXcdef", "abcdYf", "aXcdYf"),
            ("abcdef", "abcdefX", "Yabcdef", "YabcdefX"),
            ("abcdef", "abef", "abcdefX", "abefX"),
            ("abc", "aXc", "aXc", "aXc"),
            ("abcdef", "aXcdef", "aXcdYf", "aXcdYf"),
            ("abcde", "aXcde", "abcYe", "aXcYe"),
            ("abc", "abXc", "abXc", "abXc"),
            ("abcde", "abcde.", "Xbcde", "Xbcde."),
        ],
    )
    def test_changes_apart_or_alike_are_both_kept(self, base: str, ours: str, theirs: str, merged: str) -> None:
        assert merge_text(text(base), text(ours), text(theirs)) == Merged(text(merged))

    @pytest.mark.parametrize(
        ("base", "ours", "theirs"),
        [
            pytest.param("abc", "aXc", "aYc", id="the same line"),
            pytest.param("abcd", "aXcd", "abYd", id="lines that touch"),
            pytest.param("abc", "abXc", "abYc", id="insertions at one place"),
            pytest.param("abc", "aXbc", "aYc", id="an insertion before a changed line"),
            pytest.param("abc", "ac", "aYc", id="deleted and changed"),
            pytest.param("abcd", "aXYd", "aXcd", id="one change holds the other"),
            pytest.param("abc", "abc.", "abX", id="the last newline and the last line"),
            pytest.param("", "a", "b", id="two texts from nothing"),
        ],
    )
    def test_changes_in_one_place_conflict(self, base: str, ours: str, theirs: str) -> None:
        assert merge_text(text(base), text(ours), text(theirs)) == SAME_LINES

    def test_line_ends_are_content(self) -> None:
        assert merge_text(b"a\nb\nc\nd\n", b"a\r\nb\nc\nd\n", b"a\nb\nc\nD\r\n") == Merged(b"a\r\nb\nc\nD\r\n")
        assert merge_text(b"a\n", b"a\r\n", b"a") == SAME_LINES

    def test_binaries_are_taken_whole_or_not_at_all(self) -> None:
        assert merge_text(b"\0a", b"\0b", b"\0c") == Conflict("binary")
        assert merge_text(b"a\nb\nc\n", b"x\nb\nc\n", b"a\nb\n\0\n") == Conflict("binary")
        assert merge_text(b"\0a", b"\0b", b"\0a") == Merged(b"\0b")
        assert merge_text(b"\0a", b"\0a", b"\0b") == merge_text(b"\0a", b"\0b", b"\0b") == Merged(b"\0b")

    def test_a_nul_far_in_is_text(self) -> None:
        far = b"x\n" * 5000
        assert merge_text(far + b"\0\n", b"y\n" + far[2:] + b"\0\n", far + b"\0\nz\n") == Merged(
            b"y\n" + far[2:] + b"\0\nz\n"
        )

    @given(CONTENTS, CONTENTS)
    def test_a_side_that_changed_nothing_leaves_the_other(self, base: bytes, side: bytes) -> None:
        assert merge_text(base, base, side) == merge_text(base, side, base) == Merged(side)

    @given(CONTENTS, CONTENTS)
    def test_the_same_change_on_both_sides_is_that_change(self, base: bytes, side: bytes) -> None:
        assert merge_text(base, side, side) == Merged(side)

    @given(CONTENTS, CONTENTS, CONTENTS)
    def test_the_sides_may_be_swapped(self, base: bytes, ours: bytes, theirs: bytes) -> None:
        assert merge_text(base, ours, theirs) == merge_text(base, theirs, ours)

    @given(TEXTS, TEXTS, TEXTS)
    def test_no_line_is_made_up_and_none_that_was_added_is_lost(self, base: bytes, ours: bytes, theirs: bytes) -> None:
        merged = merge_text(base, ours, theirs)
        assume(isinstance(merged, Merged))
        assert isinstance(merged, Merged)
        was, one, other, now = (Counter(split_lines(side)) for side in (base, ours, theirs, merged.content))
        assert set(now) <= set(one) | set(other)
        assert all(now[line] >= max(one[line], other[line]) for line in set(one) | set(other) if line not in was)

    def test_large_texts_merge(self) -> None:
        base = [b"line %d\n" % number for number in range(50_000)]
        ours = [b"ours\n" if number % 100 == 0 else line for number, line in enumerate(base)]
        theirs = [b"theirs\n" if number % 100 == 50 else line for number, line in enumerate(base)]
        both = [theirs[number] if number % 100 == 50 else line for number, line in enumerate(ours)]
        assert merge_text(b"".join(base), b"".join(ours), b"".join(theirs)) == Merged(b"".join(both))


def git_merge(folder: Path, base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """What git makes of it, None for a conflict."""
    for name, content in (("base", base), ("ours", ours), ("theirs", theirs)):
        (folder / name).write_bytes(content)
    command = ["git", "merge-file", "-p", "ours", "base", "theirs"]
    done = subprocess.run(command, cwd=folder, env=GIT_ENV, capture_output=True)
    assert done.returncode < 128
    return done.stdout if done.returncode == 0 else None


def ours_merge(base: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    merged = merge_text(base, ours, theirs)
    return merged.content if isinstance(merged, Merged) else None


class Writer:
    """Writes and edits texts that look like programs: some lines are unique, some are everywhere."""

    def __init__(self, seed: int, unique_share: float) -> None:
        self.random = Random(seed)
        self.unique_share = unique_share
        self.count = 0

    def line(self) -> bytes:
        self.count += 1
        if self.random.random() < self.unique_share:
            return b"    value_%d = %d\n" % (self.count, self.random.randrange(10**9))
        return self.random.choice([b"\n", b"    }\n", b"    return None\n", b"    else:\n"])

    def lines(self, most: int) -> list[bytes]:
        return [self.line() for _ in range(self.random.randrange(most))]

    def edited(self, base: list[bytes]) -> bytes:
        after = list(base)
        for _ in range(self.random.randrange(1, 4)):
            place = self.random.randrange(len(after) + 1)
            after[place : place + self.random.randrange(3)] = self.lines(3)
        return self.ended(after)

    def ended(self, lines: list[bytes]) -> bytes:
        whole = b"".join(lines)
        return whole.removesuffix(b"\n") if self.random.random() < 0.1 else whole

    def case(self) -> tuple[bytes, bytes, bytes]:
        base = self.lines(25)
        return self.ended(base), self.edited(base), self.edited(base)


class TestAgainstGit:
    def test_where_lines_are_unique_we_agree_with_git_in_everything(self, tmp_path: Path) -> None:
        for seed in range(250):
            case = Writer(seed, unique_share=1.0).case()
            assert ours_merge(*case) == git_merge(tmp_path, *case), seed

    def test_in_programs_we_merge_as_git_does(self, tmp_path: Path) -> None:
        """True of these cases, not a law: where equal lines can be aligned in two ways, either may see a conflict."""
        cases = [Writer(seed, unique_share=0.7).case() for seed in range(250)]
        answers = [(ours_merge(*case), git_merge(tmp_path, *case)) for case in cases]
        clean = [(ours, git) for ours, git in answers if git is not None]
        assert [pair for pair in answers if pair[0] is not None and pair[0] != pair[1]] == []
        assert len([ours for ours, _ in clean if ours is None]) <= len(clean) // 50 and len(clean) >= 80


class TestMode:
    def test_one_change_is_taken_two_unlike_ones_conflict(self) -> None:
        assert merge_mode(0o644, 0o600, 0o644) == merge_mode(0o644, 0o644, 0o600) == 0o600
        assert merge_mode(0o644, 0o755, 0o755) == 0o755
        assert merge_mode(0o644, 0o755, 0o600) == Conflict("mode")


class Blobs(dict[Digest, bytes]):
    def file(self, content: bytes, mode: int = 0o644, **more: object) -> FileEntry:
        digest = digest_of(content)
        self[digest] = content
        return replace(FileEntry(digest, len(content), mode), **more)  # type: ignore[arg-type]  # fields by name

    def merge(self, base: Entry, ours: Entry, theirs: Entry) -> MergedEntry:
        return merge_entry(base, ours, theirs, self.__getitem__)


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


class TestUndoOfAnEdit:
    """base: after the call; theirs: before it; ours: now."""

    def test_untouched_since_it_is_undone(self, blobs: Blobs) -> None:
        before, after = blobs.file(b"a\n", mtime_ns=1), blobs.file(b"b\n", mtime_ns=2)
        assert blobs.merge(after, replace(after, mtime_ns=9), before) == TakeTheirs(before)

    def test_already_back_there_is_nothing_to_do(self, blobs: Blobs) -> None:
        before, after = blobs.file(b"a\n"), blobs.file(b"b\n")
        assert blobs.merge(after, before, before) == KeepOurs("already")

    def test_a_call_that_changed_nothing_leaves_what_is_there(self, blobs: Blobs) -> None:
        same, now = blobs.file(b"a\n"), blobs.file(b"b\n")
        assert blobs.merge(same, now, same) == KeepOurs("unchanged")

    def test_later_edits_elsewhere_stay(self, blobs: Blobs) -> None:
        before, after = blobs.file(text("abcdef")), blobs.file(text("aXcdef"))
        assert blobs.merge(after, blobs.file(text("aXcdeY")), before) == WriteMerged(
            blobs.file(text("abcdeY")), text("abcdeY")
        )

    def test_later_edits_of_the_same_lines_conflict(self, blobs: Blobs) -> None:
        assert blobs.merge(blobs.file(b"b\n"), blobs.file(b"c\n"), blobs.file(b"a\n")) == SAME_LINES
        assert blobs.merge(blobs.file(b"\0b"), blobs.file(b"\0c"), blobs.file(b"\0a")) == Conflict("binary")

    def test_a_persons_chmod_survives_and_no_content_is_read_for_it(self) -> None:
        before, after = FileEntry(digest_of(b"a"), 1, 0o644), FileEntry(digest_of(b"bb"), 2, 0o644)
        undone = Blobs().merge(after, replace(after, mode=0o600), before)
        assert undone == WriteMerged(replace(before, mode=0o600), None)

    def test_a_chmod_is_undone_under_a_persons_edit(self) -> None:
        before, after = FileEntry(digest_of(b"a"), 1, 0o644), FileEntry(digest_of(b"a"), 1, 0o755)
        now = FileEntry(digest_of(b"edited"), 6, 0o755)
        assert Blobs().merge(after, now, before) == WriteMerged(replace(now, mode=0o644), None)

    def test_two_chmods_conflict(self) -> None:
        modes = [FileEntry(digest_of(b"a"), 1, mode) for mode in (0o755, 0o600, 0o644)]
        assert Blobs().merge(*modes) == Conflict("mode")

    def test_attributes_are_merged_like_the_mode(self) -> None:
        before, after = FileEntry(digest_of(b"a"), 1, 0o644), FileEntry(digest_of(b"b"), 1, 0o644)
        marked = replace(after, xattrs=(("user.x", "eA=="),))
        assert Blobs().merge(after, marked, before) == WriteMerged(replace(marked, digest=before.digest), None)
        other = replace(before, xattrs=(("user.y", "eA=="),))
        assert Blobs().merge(after, marked, other) == Conflict("mode")

    def test_a_merge_that_comes_to_one_side_is_that_side(self, blobs: Blobs) -> None:
        base, ours, theirs = (blobs.file(text(letters)) for letters in ("abcde", "aXcdY", "aXcde"))
        assert blobs.merge(base, ours, theirs) == KeepOurs("already")
        assert blobs.merge(base, theirs, ours) == TakeTheirs(ours)

    def test_a_file_that_is_gone_now_is_not_brought_back_changed(self, blobs: Blobs) -> None:
        assert blobs.merge(blobs.file(b"b"), ABSENT, blobs.file(b"a")) == Conflict("deleted_externally")


class TestUndoOfComingAndGoing:
    def test_a_created_file_goes_unless_another_writer_worked_on_it(self, blobs: Blobs) -> None:
        after = blobs.file(b"a\n")
        assert blobs.merge(after, after, ABSENT) == TakeTheirs(ABSENT)
        assert blobs.merge(after, ABSENT, ABSENT) == KeepOurs("already")
        assert blobs.merge(after, blobs.file(b"edited\n"), ABSENT) == SAME_LINES
        assert blobs.merge(after, blobs.file(b"\0"), ABSENT) == Conflict("binary")
        assert blobs.merge(after, replace(after, mode=0o755), ABSENT) == Conflict("mode")

    def test_a_deleted_file_comes_back_unless_another_took_its_place(self, blobs: Blobs) -> None:
        before = blobs.file(b"a\n")
        assert blobs.merge(ABSENT, ABSENT, before) == TakeTheirs(before)
        assert blobs.merge(ABSENT, before, before) == KeepOurs("already")
        assert blobs.merge(ABSENT, blobs.file(b"new\n"), before) == SAME_LINES
        assert blobs.merge(ABSENT, blobs.file(b"\0"), before) == Conflict("binary")
        assert blobs.merge(ABSENT, DirEntry(0o755), before) == Conflict("type_changed")

    def test_another_kind_of_thing_is_a_conflict(self, blobs: Blobs) -> None:
        before, after = blobs.file(b"a\n"), blobs.file(b"b\n")
        assert blobs.merge(after, SymlinkEntry("x"), before) == Conflict("type_changed")
        assert blobs.merge(SymlinkEntry("x"), after, before) == Conflict("type_changed")
        assert blobs.merge(after, blobs.file(b"c\n"), SymlinkEntry("x")) == Conflict("type_changed")
        assert blobs.merge(after, after, SymlinkEntry("x")) == TakeTheirs(SymlinkEntry("x"))

    def test_links_are_taken_whole(self, blobs: Blobs) -> None:
        one, two, three = SymlinkEntry("1"), SymlinkEntry("2"), SymlinkEntry("3")
        assert blobs.merge(one, one, two) == TakeTheirs(two)
        assert blobs.merge(one, three, two) == SAME_LINES

    def test_directories_have_modes(self, blobs: Blobs) -> None:
        assert blobs.merge(DirEntry(0o755), DirEntry(0o755), DirEntry(0o700)) == TakeTheirs(DirEntry(0o700))
        assert blobs.merge(DirEntry(0o755), DirEntry(0o750), DirEntry(0o700)) == Conflict("mode")
        marked = DirEntry(0o755, xattrs=(("user.x", "eA=="),))
        both = WriteMerged(replace(marked, mode=0o700), None)
        assert blobs.merge(DirEntry(0o755), marked, DirEntry(0o700)) == both


POOL = Blobs()
SAMPLES: list[Entry] = [
    ABSENT,
    SymlinkEntry("a"),
    SymlinkEntry("b"),
    DirEntry(0o755),
    DirEntry(0o700, xattrs=(("user.x", "eA=="),)),
    *(
        POOL.file(text(letters), mode)
        for letters in ("abcdef", "aXcdef", "abcdYf", "aXcdYf")
        for mode in (0o644, 0o755)
    ),
    POOL.file(b"\0one", 0o600),
    POOL.file(b"\0two"),
]
TRIPLES = list(product(SAMPLES, repeat=3))


def outcome(merged: MergedEntry, ours: Entry) -> Entry | None:
    """What the path is in the end; None when the merge is a conflict."""
    if isinstance(merged, Conflict):
        return None
    return ours if isinstance(merged, KeepOurs) else merged.entry


class TestEveryTripleOfEntries:
    def test_which_side_is_ours_does_not_matter(self) -> None:
        for base, ours, theirs in TRIPLES:
            one = outcome(POOL.merge(base, ours, theirs), ours)
            other = outcome(POOL.merge(base, theirs, ours), theirs)
            assert (one is None) == (other is None)
            assert one is None or other is None or same_state(one, other)

    def test_one_side_unchanged_or_both_alike_never_conflict(self) -> None:
        for one, other in product(SAMPLES, repeat=2):
            assert outcome(POOL.merge(one, one, other), one) == other
            assert outcome(POOL.merge(one, other, one), other) == other
            assert outcome(POOL.merge(one, other, other), other) == other

    def test_fresh_bytes_are_those_of_the_digest(self) -> None:
        fresh = [
            merged for triple in TRIPLES if isinstance(merged := POOL.merge(*triple), WriteMerged) and merged.content
        ]
        assert fresh
        for merged in fresh:
            assert isinstance(merged.entry, FileEntry) and merged.content is not None
            assert (merged.entry.digest, merged.entry.size) == (digest_of(merged.content), len(merged.content))

    def test_nothing_of_ours_is_deleted_or_replaced_by_another_kind_once_it_changed(self) -> None:
        for base, ours, theirs in TRIPLES:
            after = outcome(POOL.merge(base, ours, theirs), ours)
            if after is not None and not same_state(base, ours) and not same_state(ours, theirs):
                assert type(after) is type(ours)
