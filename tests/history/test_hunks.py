"""Undo and restore of single hunks of a call's diff."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mulligan
from mulligan.files.diff import hunks_of, split_lines, without_hunks
from mulligan.history.undo import UndoOptions, restore, undo
from mulligan.values.errors import MulliganError
from mulligan.values.paths import RepoPath

LINES = [f"line {number}\n" for number in range(40)]
TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "d\n"]), max_size=60).map("".join).map(str.encode)
FILE = RepoPath("f")


def text(**changed: str) -> str:
    """Forty lines, some of which say something else."""
    return "".join(changed.get(f"l{number}", line) for number, line in enumerate(LINES))


@given(TEXTS, TEXTS)
def test_without_any_hunk_it_is_the_text_after_and_without_all_the_text_before(before: bytes, after: bytes) -> None:
    every = range(len(hunks_of(split_lines(before), split_lines(after))))
    assert (without_hunks(before, after, ()), without_hunks(before, after, every)) == (after, before)


@given(TEXTS, TEXTS, st.data())
def test_hunks_that_stay_are_the_hunks_of_what_is_left(before: bytes, after: bytes, data: st.DataObject) -> None:
    every = hunks_of(split_lines(before), split_lines(after))
    chosen = data.draw(st.sets(st.integers(0, max(0, len(every) - 1)))) if every else set()
    left = without_hunks(before, after, chosen)
    stays = [hunk for number, hunk in enumerate(every) if number not in chosen]
    assert len(split_lines(left)) == len(split_lines(before)) + sum(
        (edit.b_hi - edit.b_lo) - (edit.a_hi - edit.a_lo) for hunk in stays for edit in hunk.edits
    )


@pytest.fixture
def history(tmp_path: Path) -> tuple[mulligan.Mulligan, Path]:
    (tmp_path / "root").mkdir()
    opened = mulligan.open(tmp_path / "root", store=tmp_path / "home")
    session = opened.session("s")
    with session.call("first") as call:
        call.write_file("f", text())
    with session.call("three") as call:
        call.write_file("f", text(l3="THREE\n", l20="TWENTY\n", l35=""))
    return opened, tmp_path / "root" / "f"


def test_undo_of_one_hunk_leaves_the_others(history: tuple[mulligan.Mulligan, Path]) -> None:
    opened, file = history
    with opened:
        done = undo(opened.open_root, "three", hunks={FILE: [1]}, how=UndoOptions())
        assert (done.ok, file.read_text()) == (True, text(l3="THREE\n", l35=""))


def test_undo_of_the_call_takes_the_hunks_that_are_left(history: tuple[mulligan.Mulligan, Path]) -> None:
    opened, file = history
    with opened:
        undo(opened.open_root, "three", hunks={FILE: [0]}, how=UndoOptions())
        undo(opened.open_root, "three", how=UndoOptions())
        assert file.read_text() == text()
        for expected in (text(l20="TWENTY\n", l35=""), text(l3="THREE\n", l20="TWENTY\n", l35="")):
            opened.session("s").redo()
            assert file.read_text() == expected


def test_undo_of_a_hunk_keeps_a_later_edit_of_a_person(history: tuple[mulligan.Mulligan, Path]) -> None:
    opened, file = history
    with opened:
        file.write_text(text(l3="THREE\n", l10="mine\n", l20="TWENTY\n", l35=""))
        undo(opened.open_root, "three", hunks={FILE: [0]}, how=UndoOptions())
        assert file.read_text() == text(l10="mine\n", l20="TWENTY\n", l35="")


def test_undo_of_a_hunk_that_another_writer_edited_is_a_conflict(history: tuple[mulligan.Mulligan, Path]) -> None:
    opened, file = history
    with opened:
        edited = text(l3="mine\n", l20="TWENTY\n", l35="")
        file.write_text(edited)
        done = undo(opened.open_root, "three", hunks={FILE: [0]}, how=UndoOptions())
        assert [(one.outcome, one.reason) for one in done.outcomes] == [("conflicted", "same_lines")]
        assert file.read_text() == edited


def test_restore_of_a_hunk_takes_later_calls_along_only_on_its_lines(history: tuple[mulligan.Mulligan, Path]) -> None:
    opened, file = history
    with opened:
        with opened.session("s").call("later") as call:
            call.write_file("f", text(l0="zero\nand more\n", l3="THREE\n", l20="TWENTY-ONE\n", l30="thirty\n", l35=""))
        done = restore(opened.open_root, "three", hunks={FILE: [1]}, how=UndoOptions())
        assert done.ok
        assert file.read_text() == text(l0="zero\nand more\n", l3="THREE\n", l30="thirty\n", l35="")


def test_a_whole_path_and_a_hunk_of_another_go_together(history: tuple[mulligan.Mulligan, Path]) -> None:
    opened, file = history
    with opened:
        with opened.session("s").call("both") as call:
            call.write_file("g", "new\n")
            call.write_file("f", text(l2="two\n", l22="more\n"))
        undo(opened.open_root, "both", paths=[RepoPath("g")], hunks={FILE: [0]}, how=UndoOptions())
        assert (file.parent / "g").exists() is False
        assert file.read_text() == text(l3="THREE\n", l22="more\n")


@pytest.mark.parametrize("hunks", [{FILE: [3]}, {FILE: [-1]}, {RepoPath("bin"): [0]}], ids=["high", "low", "binary"])
def test_hunks_that_are_not_there_are_refused(
    history: tuple[mulligan.Mulligan, Path], hunks: dict[RepoPath, list[int]]
) -> None:
    opened, file = history
    with opened:
        with opened.session("s").call("three") as call:
            call.write_file("f", text(l3="THREE\n", l20="TWENTY\n", l25="more\n"))
            call.write_file("bin", b"\0\1\2")
        with pytest.raises(MulliganError) as refused:
            undo(opened.open_root, "three", hunks=hunks, how=UndoOptions())
        assert refused.value.code == "invalid_params"
        assert (file.parent / "bin").exists()
