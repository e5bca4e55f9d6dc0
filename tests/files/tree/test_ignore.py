"""The ignore rules by example, and against ripgrep where git has no say: `.ignore` files and nested repositories."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.files.search.ripgrep import find_ripgrep
from mulligan.files.tree.ignore import IGNORE_FILE_MAX_BYTES, IgnoreRules, IgnoreSources, parse_rules
from mulligan.files.tree.index import TreeCache
from mulligan.values.paths import ROOT
from tests.files.tree.ignored import is_ignored


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("utf-8", "surrogateescape"))


CASES = {
    "own ignore file beats git's": ({".gitignore": "a\n", ".ignore": "!a\n"}, "a", False),
    "even one further up": ({"d/.gitignore": "!a\n", ".ignore": "a\n"}, "d/a", True),
    "deeper own ignore file beats the upper": ({".ignore": "a\n", "d/.ignore": "!a\n"}, "d/a", False),
    "own ignore file takes a directory back": ({".gitignore": "d/\n", ".ignore": "!d/\n"}, "d/a", False),
    "gitignore beats exclude": ({".gitignore": "!a\n", ".git/info/exclude": "a\n"}, "a", False),
    "exclude counts": ({".git/info/exclude": "a\n"}, "d/a", True),
    "exclude of a nested repository counts within it": ({"n/.git/info/exclude": "a\n"}, "n/d/a", True),
    "and nowhere else": ({"n/.git/info/exclude": "a\n"}, "a", False),
    "outer rules hold in a nested repository": ({".gitignore": "a\n", "n/.git/HEAD": ""}, "n/a", True),
    "nothing below an ignored directory comes back": ({".gitignore": "d/\n!d/a\n"}, "d/a", True),
    "nor by a file inside it": ({".gitignore": "d/\n", "d/.gitignore": "!a\n"}, "d/a", True),
    "names that are not UTF-8": ({".gitignore": "\udce9*\n"}, "\udce9t", True),
    "no repository is needed": ({".gitignore": "a\n"}, "a", True),
    "braces are plain": ({".gitignore": "{a,b}\n"}, "a", False),
    "case counts": ({".gitignore": "A\n"}, "a", False),
}


@pytest.mark.req("D9.grep_ignore_files")
@pytest.mark.parametrize(("files", "path", "ignored"), CASES.values(), ids=CASES.keys())
def test_a_rule(tmp_path: Path, files: dict[str, str], path: str, ignored: bool) -> None:
    write(tmp_path, files)
    assert is_ignored(tmp_path, path, is_dir=False) is ignored


def test_rules_step_down_with_the_walk() -> None:
    rules = IgnoreRules().with_sources(IgnoreSources(git=b"/a/b\n*.o\n"))
    inside = rules.child("a").with_sources(IgnoreSources(own=b"!x.o\n"))
    assert [rules.ignores("b", True), inside.ignores("b", True)] == [False, True]
    assert [rules.ignores("x.o", False), inside.ignores("x.o", False), inside.ignores("y.o", False)] == [
        True,
        False,
        True,
    ]


def text_of(*pieces: bytes, max_size: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(pieces), min_size=1, max_size=max_size).map(b"".join)


LETTERS = (b"a", b"b", b".o", b"o", b"\xc3\xa9", b"\xc3", b"\xa9")
"""Characters of one byte and of two, and halves of those."""
RULE_FILES = st.lists(text_of(*LETTERS, b"*", b"?", b"/", b"[ab]", b"!", b"**/", max_size=5), max_size=5).map(
    b"\n".join
)
ENTRIES = st.dictionaries(text_of(*LETTERS, max_size=3), st.booleans(), max_size=6)


@given(RULE_FILES, RULE_FILES, ENTRIES)
def test_a_listing_is_divided_as_if_each_entry_were_checked_alone(
    above: bytes, inside: bytes, names: dict[bytes, bool]
) -> None:
    rules = IgnoreRules().with_sources(IgnoreSources(git=above)).child("a").with_sources(IgnoreSources(own=inside))
    entries = tuple(name.decode("utf-8", "surrogateescape") + "/" * is_dir for name, is_dir in names.items())
    ignored = tuple(entry for entry in entries if rules.ignores(entry.rstrip("/"), entry.endswith("/")))
    assert rules.divide(entries) == (tuple(entry for entry in entries if entry not in ignored), ignored)


def test_lines_are_read_as_git_reads_them() -> None:
    text = b"\xef\xbb\xbfa\r\n#c\n\\#c\n\n  \nb \\ \n!c/ \nd\0e\n/f/g"
    assert [(rule.pattern, rule.negated, rule.dirs_only, rule.anchored) for rule in parse_rules(text)] == [
        (b"a", False, False, False),
        (b"\\#c", False, False, False),
        (b"b \\ ", False, False, False),
        (b"c", True, True, False),
        (b"d", False, False, False),
        (b"f/g", False, False, True),
    ]


def test_an_ignore_file_that_is_no_small_regular_file_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("a\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    os.mkfifo(tmp_path / ".ignore")
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / ".gitignore").write_bytes(b"a\n" * IGNORE_FILE_MAX_BYTES)
    assert not is_ignored(tmp_path, "a", is_dir=False)
    assert not is_ignored(tmp_path, "big/a", is_dir=False)


def test_unreadable_ignore_files_above_the_root_are_skipped(tmp_path: Path) -> None:
    (tmp_path / ".git").write_bytes(b"gitdir: no\0where\n")
    (tmp_path / "rules").write_text("a\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    (tmp_path / "x/y/root").mkdir(parents=True)
    os.mkfifo(tmp_path / "x/.gitignore")
    (tmp_path / "x/.ignore").mkdir()
    (tmp_path / "x/y/.gitignore").write_bytes(b"a\n" * IGNORE_FILE_MAX_BYTES)
    assert not is_ignored(tmp_path / "x/y/root", "a", is_dir=False)


def test_directories_above_the_root_count_up_to_the_top_of_the_repository(tmp_path: Path) -> None:
    files = {".gitignore": "a\n", "top/.git/HEAD": "", "top/.gitignore": "/x/root/b\n/b\n", "top/x/.ignore": "!d\nc\n"}
    write(tmp_path, files | {"top/.git/info/exclude": "d\ne\n", "top/x/root/f": ""})
    ignored = [name for name in "abcdef" if is_ignored(tmp_path / "top/x/root", name, is_dir=False)]
    assert ignored == ["b", "c", "e"]


def test_hostile_rules_take_no_time(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*a" * 200 + "b\n/" + "**/a*/" * 100 + "b\n")
    assert not is_ignored(tmp_path, "a" * 250, is_dir=False)
    assert not is_ignored(tmp_path, "/".join(["a" * 20] * 90), is_dir=False)


RULES = ["*.o", "!a.o", "/b", "d/", "!d/", "d/*", "a*", "x/**", "**/y", "!x", "?.c", "/d/x", "!/d", "[ab].c"]


@pytest.mark.parametrize("seed", range(25))
def test_all_kinds_of_ignore_files_together_give_ripgreps_verdict(seed: int, tmp_path: Path) -> None:
    """Over rules that ripgrep and git read alike; it also sees the user's global rules, which are switched off."""
    rng = random.Random(seed)
    places = ["", "d/", "x/", "d/x/", "d/d/", "x/y/"]
    names = ["a.o", "b", "a.c", "c.o", "y", "z"]
    write(tmp_path, {place + name: "" for place in places for name in names if place + name != "x/y"})
    for place in ["", "d/", "x/"]:
        for name in (".gitignore", ".ignore", ".git/info/exclude"):
            if rng.random() < 0.5:
                write(tmp_path, {place + name: "".join(f"{rng.choice(RULES)}\n" for _ in range(3))})
    options = [
        "--no-config",
        "--hidden",
        "--no-ignore-global",
        "--no-ignore-parent",
        "--no-require-git",
        "--glob=!.git",
    ]
    command = [find_ripgrep() or "", "--files", "--null", *options]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout.decode().split("\0")[:-1]
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert TreeCache().walk(fd, ROOT).finish().files == sorted(listed)
    finally:
        os.close(fd)
