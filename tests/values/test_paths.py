"""Repo-relative paths: one parser, one wire form."""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mulligan
from mulligan.values.canonical import encode
from mulligan.values.errors import MulliganError
from mulligan.values.limits import MAX_PATH_BYTES
from mulligan.values.paths import (
    ROOT,
    RepoPath,
    ancestors_of,
    from_wire,
    is_below,
    join,
    name_of,
    parent_of,
    parse_below,
    parse_repo_path,
    path_bytes,
    path_from_bytes,
    paths_from_wire,
    to_wire,
)

raw_names = st.binary(min_size=1, max_size=8).filter(lambda b: b not in (b".", b"..") and not set(b) & {0, 0x2F})
raw_paths = st.lists(raw_names, min_size=1, max_size=4).map(b"/".join)


@pytest.mark.req("D4.paths_surrogateescape", "D4.paths_on_the_wire")
@given(raw_paths)
def test_any_bytes_a_file_system_knows_survive_every_form(raw: bytes) -> None:
    path = path_from_bytes(raw)
    assert path_bytes(path) == raw
    assert from_wire(to_wire(path)) == path
    assert encode(to_wire(path))


@pytest.mark.req("D4.paths_on_the_wire")
@given(raw_paths)
def test_the_two_wire_forms_never_meet(raw: bytes) -> None:
    path = path_from_bytes(raw)
    assert (to_wire(path) == path) is (_is_utf8(raw) and not raw.startswith(b"base64:"))


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.req("S2.paths.repo_relative_posix", "S2.paths.trailing_slash_same", "S2.paths.dot_is_root")
@pytest.mark.parametrize(
    ("text", "path"),
    [
        *(("a", "a"), ("a//b/./c/", "a/b/c"), (".", "."), ("./", "."), ("./a", "a"), ("...", "...")),
        *(("a/..b", "a/..b"), (" ", " "), ("~", "~"), ("a\\b", "a\\b"), ("é/\udcff", "é/\udcff")),
    ],
)
def test_relative_paths_are_parsed_to_their_normal_form(text: str, path: str) -> None:
    assert parse_repo_path(text) == path


@pytest.mark.req("S2.paths.no_dotdot", "S2.paths.no_absolute")
@pytest.mark.parametrize(
    "text",
    ["", "/", "/a", "..", "../a", "a/..", "a/../b", "a\0b", None, 1, b"a", "\ud800", "x/" * MAX_PATH_BYTES + "x"],
)
def test_text_that_is_no_relative_path_is_refused(text: object) -> None:
    with pytest.raises(MulliganError) as refused:
        parse_repo_path(text)
    assert refused.value.code == "invalid_path"


@pytest.mark.parametrize(
    "text", ["base64:", "base64:!", "base64:Li4=", "base64:L2E=", "base64:AA==", "base64:YQ", None]
)
def test_wire_text_that_is_no_path_is_refused(text: object) -> None:
    with pytest.raises(MulliganError) as refused:
        from_wire(text)
    assert refused.value.code == "invalid_path"


@given(raw_paths)
def test_a_slash_behind_a_path_changes_nothing_in_any_form(raw: bytes) -> None:
    path = path_from_bytes(raw)
    for wire in (to_wire(path), to_wire(path, one_line=True), "base64:" + b64encode(raw).decode()):
        assert from_wire(wire + "/") == from_wire(wire) == path


def test_paths_given_together_or_one_alone_are_never_taken_letter_by_letter() -> None:
    assert paths_from_wire(None) is None
    assert paths_from_wire("one.txt") == paths_from_wire(["one.txt"]) == paths_from_wire(Path("one.txt")) == ["one.txt"]
    assert paths_from_wire(("a", Path("b/c"))) == ["a", "b/c"]
    assert paths_from_wire(["/other//root/./b/", "base64:L/8="]) == ["/other/root/b", "/\udcff"]
    with pytest.raises(MulliganError) as caught:
        paths_from_wire(3)
    assert caught.value.code == "invalid_params"


@given(raw_paths)
def test_parents_names_and_ancestors_agree(raw: bytes) -> None:
    path = path_from_bytes(raw)
    assert join(parent_of(path), name_of(path)) == path
    above = ancestors_of(path)
    assert (above[0], above[-1], len(above)) == (parent_of(path), ROOT, raw.count(b"/") + 1)
    assert all(is_below(path, folder) and not is_below(folder, path) for folder in above)


def test_below_is_by_whole_names() -> None:
    one, other = RepoPath("repo"), RepoPath("repo-evil/a")
    assert (is_below(other, one), is_below(one, one), is_below(ROOT, ROOT), is_below(one, ROOT)) == (
        False,
        False,
        False,
        True,
    )


@pytest.mark.req("D4.paths_one_parser")
class TestTypedInADirectory:
    @given(st.lists(st.sampled_from(["a", "b", "..", ".", ""]), max_size=8))
    def test_climbs_by_name_as_the_library_does_but_never_out(self, names: list[str]) -> None:
        text = "/".join(["x", *names])
        wanted = os.path.normpath("w/" + text)
        if wanted == ".." or wanted.startswith("../"):
            with pytest.raises(MulliganError) as caught:
                parse_below(RepoPath("w"), text)
            assert caught.value.code == "invalid_path"
        else:
            assert parse_below(RepoPath("w"), text) == wanted

    def test_no_other_package_reads_paths_in_base64(self) -> None:
        sources = Path(mulligan.__file__).parent
        knowing = [file for file in sources.rglob("*.py") if "begins with 'base64:'" in file.read_text("utf-8")]
        assert [str(file.relative_to(sources)) for file in knowing] == ["values/paths.py"]
