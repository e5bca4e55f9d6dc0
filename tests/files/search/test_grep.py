"""What grep promises, whichever engine answers."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from mulligan.files.search.grep import GrepOptions, GrepResult, grep
from mulligan.files.search.native import READ_AHEAD_BYTES, TEXT_MAX_BYTES, Line, shown_text
from mulligan.files.search.ripgrep import find_ripgrep
from mulligan.files.tree.index import TreeCache
from mulligan.values.errors import Refused
from mulligan.values.limits import KIB_BYTES
from mulligan.values.paths import ROOT, RepoPath, to_wire

Engine = Literal["ripgrep", "native"]

ENGINES = pytest.mark.parametrize("engine", ["ripgrep", "native"])


@pytest.fixture
def root_fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def root(tmp_path: Path, root_fd: int) -> Path:
    return tmp_path / "root"


@pytest.fixture
def without_cache() -> TreeCache:
    return TreeCache()


@pytest.fixture
def without_ripgrep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "relative:/nowhere")


def render(result: GrepResult) -> str:
    """One row `path:line:text` for each line."""
    return "\n".join(f"{to_wire(line.path)}:{line.line_no}:{line.shown}" for line in result.lines)


def refusal(root_fd: int, base: str, pattern: str, **options: Any) -> tuple[str, str]:
    with pytest.raises(Refused) as refused:
        grep(root_fd, RepoPath(base), pattern, GrepOptions(**options))
    return refused.value.status, refused.value.code


@pytest.mark.req("D9.grep_order", "D9.grep_count", "S1.grep.truncated")
@ENGINES
def test_lines_come_with_path_and_number_in_byte_order(root: Path, root_fd: int, engine: Engine) -> None:
    (root / "b").mkdir()
    (root / "b" / "x").write_text("hit\nno\nhit\n")
    (root / "b-c").write_text("hit\n")
    result = grep(root_fd, ROOT, "hit", GrepOptions(engine=engine))
    assert render(result) == "b-c:1:hit\nb/x:1:hit\nb/x:3:hit"
    assert (result.match_count, result.truncated) == (3, False)
    cut = grep(root_fd, ROOT, "hit", GrepOptions(engine=engine, max_results=2))
    assert (cut.lines, cut.match_count, cut.truncated) == (result.lines[:2], 2, True)
    exact = grep(root_fd, ROOT, "hit", GrepOptions(engine=engine, max_results=3))
    assert not exact.truncated


@pytest.mark.req("S1.grep.max_results_default_100")
@ENGINES
def test_by_default_at_most_a_hundred_lines_are_returned(root: Path, root_fd: int, engine: Engine) -> None:
    (root / "a").write_text("hit\n" * 101)
    result = grep(root_fd, ROOT, "hit", GrepOptions(engine=engine))
    assert (result.match_count, result.truncated) == (100, True)


@pytest.mark.req("D9.grep_rg_hardened")
@ENGINES
@pytest.mark.parametrize("pattern", ["-e", "--files", "--pre=./evil", "-f/etc/passwd", "--", "-"])
def test_a_pattern_is_never_an_option(root: Path, root_fd: int, engine: Engine, pattern: str) -> None:
    evil = root / "evil"
    evil.write_text("#!/bin/sh\ntouch ran\n")
    evil.chmod(0o755)
    (root / "text").write_text(f"say {pattern} please\n")
    result = grep(root_fd, ROOT, pattern, GrepOptions(engine=engine, glob_filter="text"))
    assert result.lines == (Line(RepoPath("text"), 1, f"say {pattern} please".encode()),)
    assert not (root / "ran").exists()


@pytest.mark.req("D9.grep_rg_hardened")
def test_the_users_configuration_changes_nothing(root: Path, root_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "rc").write_text("--ignore-case\n--max-count=1\n")
    (root / "text").write_text("hit\nHIT\nhit\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(root / "rc"))
    assert [line.line_no for line in grep(root_fd, RepoPath("text"), "hit", GrepOptions(engine="ripgrep")).lines] == [
        1,
        3,
    ]


@pytest.mark.req("W27.grep_on_a_file", "S1.grep.not_found")
@ENGINES
def test_a_base_is_a_file_a_directory_or_refused(root: Path, root_fd: int, engine: Engine) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_text("hit\n")
    (root / ".gitignore").write_text("f\n")
    (root / "link").symlink_to("d")
    os.mkfifo(root / "pipe")
    assert render(grep(root_fd, RepoPath("d/f"), "hit", GrepOptions(engine=engine))) == "d/f:1:hit"
    assert grep(root_fd, RepoPath("d"), "hit", GrepOptions(engine=engine)).lines == ()
    assert refusal(root_fd, "gone", "hit", engine=engine) == ("not_found", "path_not_found")
    assert refusal(root_fd, "gone/deeper", "hit", engine=engine) == ("not_found", "path_not_found")
    assert refusal(root_fd, "link", "hit", engine=engine) == ("forbidden", "symlink_not_allowed")
    assert refusal(root_fd, "link/f", "hit", engine=engine)[0] in ("forbidden", "error")
    assert refusal(root_fd, "pipe", "hit", engine=engine) == ("error", "not_directory")


@ENGINES
def test_a_bad_pattern_and_a_bad_filter_have_their_own_codes(root_fd: int, engine: Engine) -> None:
    assert refusal(root_fd, ".", "(", engine=engine) == ("invalid_regex", "invalid_regex")
    assert refusal(root_fd, ".", "a", engine=engine, glob_filter="[") == ("error", "invalid_glob_filter")
    assert refusal(root_fd, ".", "a", engine=engine, glob_filter="{a") == ("error", "invalid_glob_filter")


@ENGINES
def test_by_default_the_search_is_case_sensitive(root: Path, root_fd: int, engine: Engine) -> None:
    (root / "a").write_text("Straße\nSTRASSE\nSTRAẞE\n")
    numbers = [
        line.line_no for line in grep(root_fd, ROOT, "straße", GrepOptions(engine=engine, case_insensitive=True)).lines
    ]
    assert numbers == [1, 3]
    assert grep(root_fd, ROOT, "straße", GrepOptions(engine=engine)).lines == ()


@pytest.mark.req("S1.grep.glob_filter")
@ENGINES
def test_a_filter_is_about_names_or_paths_from_the_base(root: Path, root_fd: int, engine: Engine) -> None:
    for name in ("a.py", "a.txt", "src/b.py", "src/deep/c.py", "lib/src/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("hit\n")

    def found(glob_filter: str, base: str = ".") -> list[str]:
        result = grep(root_fd, RepoPath(base), "hit", GrepOptions(engine=engine, glob_filter=glob_filter))
        return [line.path for line in result.lines]

    assert found("*.py") == ["a.py", "lib/src/d.py", "src/b.py", "src/deep/c.py"]
    assert found("src/*.py") == ["src/b.py"]
    assert found("/src/**") == found("src/") == ["src/b.py", "src/deep/c.py"]
    assert found("!*.py") == ["a.txt"]
    assert found("*.{txt,md}") == ["a.txt"]
    assert found("src/*.py", base="lib") == ["lib/src/d.py"]


@ENGINES
def test_files_that_the_caller_may_not_see_are_not_found(
    root: Path, root_fd: int, engine: Engine, without_cache: TreeCache
) -> None:
    for name in ("a", "b", "c", "d"):
        (root / name).write_text("hit\nhit\n")
    (root / "e").write_text("miss\n")
    asked: list[str] = []

    def admits(path: RepoPath) -> bool:
        asked.append(path)
        return path not in ("a", "c")

    result = grep(root_fd, ROOT, "hit", GrepOptions(engine=engine, admits=admits, max_results=3, cache=without_cache))
    assert render(result) == "b:1:hit\nb:2:hit\nd:1:hit"
    assert result.truncated
    assert asked == ["a", "b", "c", "d"]


@pytest.mark.req("D9.grep_linear")
class TestTime:
    def test_a_wide_pattern_that_takes_too_long_is_abandoned(self, root: Path, root_fd: int) -> None:
        """RE2 needs a state for each of the last 900 characters here, and cannot be interrupted."""
        (root / "a").write_text("".join(random.Random(1).choices("ab", k=512 * KIB_BYTES)) + "\n")
        answer = refusal(root_fd, ".", "[ab]*b[ab]{900}c", engine="native", timeout_s=0.05)
        assert answer == ("error", "regex_timeout")

    @ENGINES
    def test_a_bomb_is_none_to_the_linear_engines(self, root: Path, root_fd: int, engine: Engine) -> None:
        (root / "a").write_text("x" * 5_000 + "\n")
        assert grep(root_fd, ROOT, "(x+x+)+y", GrepOptions(engine=engine)).lines == ()
        assert grep(root_fd, ROOT, "(?:x?){500}x{500}$", GrepOptions(engine=engine)).match_count == 1

    @ENGINES
    def test_no_time_is_too_little(self, root: Path, root_fd: int, engine: Engine) -> None:
        (root / "a").write_text("x\n")
        assert refusal(root_fd, ".", "x", engine=engine, timeout_s=0.0) == ("error", "regex_timeout")

    @ENGINES
    def test_a_pattern_too_wide_for_this_process_is_searched_all_the_same(
        self, root: Path, root_fd: int, engine: Engine
    ) -> None:
        (root / "a").write_text("b" + "a" * 899 + "\nb" + "a" * 901 + "c\n")
        result = grep(root_fd, ROOT, "[ab]*b[ab]{900}[^ab]?", GrepOptions(engine=engine))
        assert [line.line_no for line in result.lines] == [2]


@pytest.mark.req("S1.grep.native_fallback", "S1.grep.ripgrep_when_present")
class TestWhichEngine:
    def test_ripgrep_is_used_if_it_is_installed(self, root_fd: int) -> None:
        assert grep(root_fd, ROOT, "x").engine == "ripgrep"

    def test_native_when_it_is_not(self, root: Path, root_fd: int, without_ripgrep: None) -> None:
        (root / "a").write_text("x\n")
        result = grep(root_fd, ROOT, "x")
        assert (result.engine, result.match_count) == ("native", 1)
        assert refusal(root_fd, ".", "x", engine="ripgrep") == ("error", "ripgrep_not_found")

    def test_native_with_names_and_text_that_are_not_utf8(
        self, root: Path, root_fd: int, without_ripgrep: None
    ) -> None:
        (root / "a\udce9").write_bytes("näher\r\nno\nn\xe4her\n".encode("latin-1") + "näher\n".encode())
        result = grep(root_fd, ROOT, r"n.her$")
        assert result.engine == "native"
        assert result.lines == (Line(RepoPath("a\udce9"), 4, "näher".encode()),)


def test_lines_are_read_through_our_own_descriptors(
    root: Path, root_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that becomes a symlink after the walk, just before ripgrep reads it, gives nothing away."""
    (tmp_path / "secret").write_text("password hit\n")
    (root / "a").write_text("nothing\n")
    (root / "b").write_text("one hit\n")
    (tmp_path / "bin").mkdir()
    swapping = tmp_path / "bin" / "rg"
    swapping.write_text(f'#!/bin/sh\n/bin/ln -sf {tmp_path}/secret {root}/a\nexec {find_ripgrep()} "$@"\n')
    swapping.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert render(grep(root_fd, ROOT, "hit", GrepOptions(engine="ripgrep"))) == "b:1:one hit"
    assert (root / "a").is_symlink()


def test_a_file_that_changes_after_ripgrep_read_it_is_searched_again(
    root: Path, root_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a").write_text("hit old\nhit\n")
    (tmp_path / "bin").mkdir()
    changing = tmp_path / "bin" / "rg"
    script = f"#!/bin/sh\n{find_ripgrep()} \"$@\"\ncode=$?\nprintf 'new\\nhit new\\n' > {root}/a\nexit $code\n"
    changing.write_text(script)
    changing.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert render(grep(root_fd, ROOT, "hit", GrepOptions(engine="ripgrep"))) == "a:2:hit new"


@ENGINES
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^foo", [("a", 1)]),
        (r"^\W", [("b", 2)]),
        (r"^[^a-z]", [("b", 2)]),
        (r"^.{4}$", [("b", 2)]),
        (r"\x{feff}", [("b", 2)]),
        ("^$", [("c", 1)]),
        ("^.{3}$", [("a", 1)]),
    ],
)
def test_a_byte_order_mark_is_no_character_of_a_file_and_u_feff_elsewhere_is_one(
    root: Path, root_fd: int, engine: Engine, pattern: str, found: list[tuple[str, int]]
) -> None:
    for name, text in {"a": "\ufefffoo\n", "b": "x\n\ufefffoo\n", "c": "\ufeff"}.items():
        (root / name).write_text(text)
    lines = grep(root_fd, ROOT, pattern, GrepOptions(engine=engine)).lines
    assert [(line.path, line.line_no) for line in lines] == found


@ENGINES
def test_lines_that_are_read_again_stay_in_their_place(root: Path, root_fd: int, engine: Engine) -> None:
    for number in range(6):
        mark = "\ufeff" if number % 2 else ""
        (root / str(number)).write_text(f"{mark}hit\nhit\n")
    result = grep(root_fd, ROOT, "^h.t", GrepOptions(engine=engine, max_results=7))
    order = [(line.path, line.line_no) for line in result.lines]
    assert order == [(str(number // 2), 1 + number % 2) for number in range(7)]
    assert result.truncated


@ENGINES
class TestShownText:
    def test_long_lines_are_cut_between_characters(self, root: Path, root_fd: int, engine: Engine) -> None:
        (root / "a").write_text("x" + "é" * 5_000 + " hit\n")
        result = grep(root_fd, ROOT, "hit", GrepOptions(engine=engine))
        assert result.lines == (Line(RepoPath("a"), 1, ("x" + "é" * 999).encode(), cut=True),)
        assert (render(result), result.truncated) == ("a:1:x" + "é" * 999 + "…", True)

    def test_line_ends_and_byte_order_marks_are_not_shown(self, root: Path, root_fd: int, engine: Engine) -> None:
        (root / "a").write_bytes(b"\xef\xbb\xbfhit\r\n\xef\xbb\xbfhit\r\r\nhit")
        texts = [line.text for line in grep(root_fd, ROOT, "hit", GrepOptions(engine=engine)).lines]
        assert texts == [b"hit", b"\xef\xbb\xbfhit\r", b"hit"]

    def test_bytes_that_are_no_text_are_rendered_as_such(self, root: Path, root_fd: int, engine: Engine) -> None:
        (root / "n\udcff").write_bytes(b"hit \xff\n")
        assert render(grep(root_fd, ROOT, "hit", GrepOptions(engine=engine))) == "base64:bv8=:1:hit �"


@pytest.mark.parametrize("extra", range(-6, 8))
@pytest.mark.parametrize("ending", [b"", b"\r"])
def test_the_cut_does_not_depend_on_how_much_was_read(extra: int, ending: bytes) -> None:
    line = b"x" * (TEXT_MAX_BYTES + extra) + ending
    text, cut = shown_text(line[:READ_AHEAD_BYTES])
    visible = TEXT_MAX_BYTES + extra
    assert (len(text), cut) == (min(visible, TEXT_MAX_BYTES), visible > TEXT_MAX_BYTES)
