"""Which changes of a call are told as moves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mulligan.history.undo_log import with_moves
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, Absent, Change, DirEntry, Entry, FileEntry
from mulligan.values.paths import RepoPath

NAMES = [RepoPath(name) for name in ("a", "b", "c", "a/d", "b/d", "c/d", "a/d/e", "b/d/e")]


def file(content: str) -> FileEntry:
    data = content.encode()
    return FileEntry(digest_of(data), len(data), 0o644, 0)


def change(path: str, before: Entry, after: Entry, origin: str | None = None) -> Change:
    return Change(RepoPath(path), before, after, None if origin is None else RepoPath(origin))


def origins(*changes: Change, guessed: bool = True) -> dict[str, str]:
    told = with_moves(changes, guessed=guessed)
    return {str(one.path): str(one.renamed_from) for one in told if one.renamed_from is not None}


ONE, TWO, EMPTY = file("one"), file("two"), file("")
GONE = change("a", ONE, ABSENT)

_entries = st.sampled_from([ABSENT, ONE, TWO, EMPTY, DirEntry(0o755, 0)])
_changes = st.lists(
    st.builds(Change, st.sampled_from(NAMES), _entries, _entries, st.none() | st.sampled_from(NAMES)),
    unique_by=lambda one: one.path,
)


def test_a_file_that_left_one_path_and_came_to_another_was_moved() -> None:
    assert origins(GONE, change("c", ABSENT, ONE)) == {"c": "a"}


def test_without_a_command_nothing_is_guessed() -> None:
    assert origins(GONE, change("c", ABSENT, ONE), guessed=False) == {}


def test_what_several_have_in_common_and_what_is_empty_says_nothing() -> None:
    assert origins(GONE, change("b", ABSENT, ONE), change("c", ABSENT, ONE)) == {}
    assert origins(change("a", EMPTY, ABSENT), change("c", ABSENT, EMPTY)) == {}


def test_what_a_tool_moved_and_another_writer_edited_was_moved_still() -> None:
    assert origins(GONE, change("b", ABSENT, TWO, "a"), guessed=False) == {"b": "a"}
    assert origins(GONE, change("b", TWO, ONE, "a"), guessed=False) == {"b": "a"}


def test_what_a_tool_moved_by_way_of_another_path_came_from_the_first() -> None:
    assert origins(GONE, change("c", ABSENT, ONE, "b"), guessed=False) == {"c": "a"}


def test_a_source_that_is_there_again_is_none() -> None:
    assert origins(change("a", ONE, TWO), change("b", ABSENT, ONE, "a")) == {}
    assert origins(change("b", ABSENT, ONE, "a")) == {}


def test_what_a_tool_moved_is_not_a_commands_too() -> None:
    assert origins(GONE, change("b", ABSENT, TWO, "a"), change("c", ABSENT, ONE)) == {"b": "a"}


DIR = DirEntry(0o755, 0)
LEFT = [change("old", DIR, ABSENT), change("old/x", ONE, ABSENT), change("old/in", DIR, ABSENT)]
CAME = [change("new", ABSENT, DIR), change("new/x", ABSENT, ONE), change("new/in", ABSENT, DIR)]


def test_a_folder_was_moved_to_where_its_files_went_with_what_is_empty_in_it() -> None:
    assert origins(*LEFT, *CAME) == {"new": "old", "new/x": "old/x", "new/in": "old/in"}
    assert origins(*LEFT, *CAME, guessed=False) == {}


def test_a_folder_that_is_still_there_or_whose_files_went_apart_was_not_moved() -> None:
    assert origins(*LEFT[1:], *CAME) == {"new/x": "old/x"}
    apart = [change("old/y", TWO, ABSENT), change("other", ABSENT, DIR), change("other/y", ABSENT, TWO)]
    assert origins(*LEFT[:2], *CAME[:2], *apart) == {"new/x": "old/x", "other/y": "old/y"}


def test_a_file_that_was_given_another_name_says_nothing_of_its_folder() -> None:
    assert origins(*LEFT, CAME[0], change("new/z", ABSENT, ONE)) == {"new/z": "old/x"}


@given(_changes, st.booleans())
def test_a_move_is_from_where_something_went_and_nothing_else_is_changed(changes: list[Change], guessed: bool) -> None:
    told = with_moves(changes, guessed=guessed)
    gone = {one.path for one in changes if isinstance(one.after, Absent)}
    assert [replace(one, renamed_from=None) for one in told] == [replace(one, renamed_from=None) for one in changes]
    assert {one.renamed_from for one in told if one.renamed_from is not None} <= gone
    assert not [one for one in told if one.renamed_from is not None and one.path in gone]


@given(_changes, st.booleans())
def test_to_tell_moves_twice_is_to_tell_them_once(changes: list[Change], guessed: bool) -> None:
    told = with_moves(changes, guessed=guessed)
    assert with_moves(told, guessed=guessed) == told
