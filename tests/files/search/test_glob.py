"""Files by the shape of their paths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.files.search.glob import GlobResult, glob
from mulligan.files.tree.index import TreeCache
from mulligan.values.errors import Refused
from mulligan.values.globs import GlobError, parse_glob
from mulligan.values.paths import ROOT, RepoPath


@pytest.fixture
def root_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def make(root: Path, *names: str, mtime_ns: int = 1_000_000_000) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, ns=(mtime_ns, mtime_ns))


MATCHES = {
    ("*.py", "a.py"): True,
    ("*.py", "d/a.py"): False,
    ("**/*.py", "a.py"): True,
    ("**/*.py", "d/e/a.py"): True,
    ("**/*.py", ".h/.a.py"): True,
    ("**", "a"): True,
    ("**", "a/b"): True,
    ("a/**", "a/b/c"): True,
    ("a/**", "a"): False,
    ("a/**/b", "a/b"): True,
    ("a/**/b", "a/x/y/b"): True,
    ("a/**/b", "ab"): False,
    ("a/*/b", "a/b"): False,
    ("**/a/**/b", "x/a/y/a/b"): True,
    ("**/a/*/b", "a/a/a/b"): True,
    ("a**b", "axb"): True,
    ("a**b", "a/b"): False,
    ("?", "é"): True,
    ("??", "é"): False,
    ("?", "/"): False,
    ("[a-c].txt", "b.txt"): True,
    ("[!a-c].txt", "b.txt"): False,
    ("[^a-c].txt", "d.txt"): True,
    ("[]x]", "]"): True,
    ("[a-]", "-"): True,
    (r"[\]]", "]"): True,
    ("[!x]", "/"): False,
    ("[+--]", "."): False,
    ("a[.-0]b", "a/b"): False,
    ("{a,b}.c", "b.c"): True,
    ("{a,b/{c,d}}/*", "b/d/e"): True,
    ("x{,y}", "x"): True,
    ("{*.py,*.txt}", "a.txt"): True,
    (r"\{a\}", "{a}"): True,
    (r"\*", "*"): True,
    (r"\*", "a"): False,
    ("a}", "a}"): True,
    ("a,b", "a,b"): True,
    ("[{]a,b}", "{a,b}"): True,
    ("./a", "a"): True,
    ("A", "a"): False,
    ("*", "\udce9"): True,
    ("a\nb", "a\nb"): True,
    ("a$", "a"): False,
    ("*a*b*c", "xaybzc"): True,
    ("*a*b*c", "xaybzcd"): False,
    ("**/**/a", "a"): True,
}


@pytest.mark.req("D9.glob_star", "W27.glob_top_level")
@pytest.mark.parametrize(("pattern", "path"), MATCHES)
def test_a_pattern_matches_whole_paths(pattern: str, path: str) -> None:
    assert parse_glob(pattern).matches(path) is MATCHES[pattern, path]


INVALID = [
    "",
    "[",
    "[a",
    "[]",
    "[!]",
    "{a",
    "{a,{b}",
    "a\\",
    "[z-a]",
    "/a",
    "../a",
    "a/../b",
    "a//b",
    "a/",
    ".",
    "a\0b",
]
INVALID += ["x" * 5_000, "{a,b}" * 11, "{" * 40 + "}" * 40, "[a/b]"]


@pytest.mark.req("S1.glob.invalid_pattern")
@pytest.mark.parametrize("pattern", INVALID)
def test_a_pattern_that_means_nothing_is_refused(pattern: str, root_fd: int) -> None:
    with pytest.raises(Refused) as refused:
        glob(root_fd, ROOT, pattern)
    assert (refused.value.status, refused.value.code) == ("invalid_pattern", "invalid_pattern")


def matches_slowly(names: list[str], path: list[str]) -> bool:
    """The meaning of a pattern of names, as plainly as it can be said."""
    if not names:
        return not path
    if names[0] == "**":
        if len(names) == 1:
            return bool(path)
        return matches_slowly(names[1:], path) or (bool(path) and matches_slowly(names, path[1:]))
    return bool(path) and name_matches_slowly(names[0], path[0]) and matches_slowly(names[1:], path[1:])


def name_matches_slowly(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return name_matches_slowly(pattern[1:], name) or (bool(name) and name_matches_slowly(pattern, name[1:]))
    return bool(name) and pattern[0] in ("?", name[0]) and name_matches_slowly(pattern[1:], name[1:])


NAME_PATTERNS = st.one_of(st.just("**"), st.text("ab*?", min_size=1, max_size=6))
NAMES = st.text("ab", min_size=1, max_size=5)


@given(st.lists(NAME_PATTERNS, min_size=1, max_size=5), st.lists(NAMES, min_size=1, max_size=6))
def test_it_means_what_the_plain_words_mean(pattern: list[str], path: list[str]) -> None:
    shape = parse_glob("/".join(pattern))
    assert shape.matches("/".join(path)) is matches_slowly(pattern, path)


@given(st.lists(NAME_PATTERNS, min_size=1, max_size=5), st.lists(NAMES, min_size=2, max_size=6))
def test_no_directory_above_a_match_is_left_out_of_the_walk(pattern: list[str], path: list[str]) -> None:
    shape = parse_glob("/".join(pattern))
    if shape.matches("/".join(path)):
        assert all(shape.may_match_below("/".join(path[:depth])) for depth in range(1, len(path)))


@given(st.text("ab*?[]{},\\/!^-é.", max_size=12), st.text("abé/.-[]{}", max_size=10))
def test_any_text_is_a_pattern_or_an_error(pattern: str, path: str) -> None:
    with suppress(GlobError):
        parse_glob(pattern).matches(path)


def test_no_pattern_takes_long() -> None:
    assert not parse_glob("*a" * 500 + "b").matches("a" * 4_000)
    assert not parse_glob("**/a/" * 200 + "b").matches("a/" * 2_000 + "c")


@pytest.mark.req("D9.glob_files_only", "D9.glob_ignore")
def test_regular_files_that_are_not_ignored(tmp_path: Path, root_fd: int) -> None:
    make(tmp_path, "a.py", ".hidden/b.py", "build/c.py", "keep/d.py", ".git/e.py", "sub/.git")
    make(tmp_path, "package.py/inner")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "link.py").symlink_to("a.py")
    (tmp_path / "linked").symlink_to("keep")
    os.mkfifo(tmp_path / "pipe.py")
    assert glob(root_fd, ROOT, "**/*.py").paths == (".hidden/b.py", "a.py", "keep/d.py")
    assert glob(root_fd, ROOT, "**/*.py", include_ignored=True).paths == (
        ".hidden/b.py",
        "a.py",
        "build/c.py",
        "keep/d.py",
    )


@pytest.mark.req("S1.glob.newest_first", "S1.glob.tie_by_path")
def test_newest_first_then_by_path_bytes(tmp_path: Path, root_fd: int) -> None:
    make(tmp_path, "b", "a-b", "a/x", "a.b", "é", mtime_ns=5)
    make(tmp_path, "old", mtime_ns=4)
    make(tmp_path, "new", mtime_ns=6)
    assert glob(root_fd, ROOT, "**").paths == ("new", "a-b", "a.b", "a/x", "b", "é", "old")
    os.utime(tmp_path / "old", ns=(7, 7))
    assert glob(root_fd, ROOT, "**").paths == ("old", "new", "a-b", "a.b", "a/x", "b", "é")


@pytest.mark.req("D9.glob_default_100")
def test_by_default_at_most_a_hundred_paths_are_returned(tmp_path: Path, root_fd: int) -> None:
    make(tmp_path, *(f"f{n:03}" for n in range(101)))
    result = glob(root_fd, ROOT, "*")
    assert (result.count, result.truncated) == (100, True)
    assert glob(root_fd, ROOT, "*", max_results=101) == GlobResult(
        tuple(RepoPath(f"f{n:03}") for n in range(101)), False
    )


def test_a_scan_limit_cuts_in_order_of_paths(tmp_path: Path, root_fd: int) -> None:
    make(tmp_path, "a/1", "a/2", "b/1", "c")
    for _ in range(2):
        assert glob(root_fd, ROOT, "**", max_scan_files=3) == GlobResult(
            (RepoPath("a/1"), RepoPath("a/2"), RepoPath("b/1")), True
        )
        assert not glob(root_fd, ROOT, "**", max_scan_files=4).truncated


def test_below_a_base(tmp_path: Path, root_fd: int) -> None:
    make(tmp_path, "src/a.py", "src/deep/b.py", "other/c.py")
    (tmp_path / ".gitignore").write_text("/src/deep\n")
    assert glob(root_fd, RepoPath("src"), "*.py").paths == ("src/a.py",)
    assert glob(root_fd, RepoPath("src"), "**/*.py").paths == ("src/a.py",)
    assert glob(root_fd, RepoPath("src/deep"), "*.py").paths == ("src/deep/b.py",)
    assert glob(root_fd, ROOT, "{src,other}/*.py").paths == ("other/c.py", "src/a.py")


@pytest.mark.parametrize(
    ("base", "answer"),
    [
        ("gone", ("not_found", "path_not_found")),
        ("file", ("error", "not_directory")),
        ("link", ("forbidden", "symlink_not_allowed")),
        ("link/x", ("error", "not_directory")),
    ],
)
def test_a_base_that_cannot_be_walked_is_refused(
    tmp_path: Path, root_fd: int, base: str, answer: tuple[str, str]
) -> None:
    make(tmp_path, "file")
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(Refused) as refused:
        glob(root_fd, RepoPath(base), "*", cache=TreeCache())
    assert (refused.value.status, refused.value.code) == answer
