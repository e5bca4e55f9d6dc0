"""Ripgrep and the native engine give the same answer, on real trees and on one built to be difficult."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pydantic
import pytest

from mulligan.files.search import native, ripgrep
from mulligan.files.search import ripgrep as rg_process
from mulligan.files.search.grep import GrepOptions, GrepResult, grep
from mulligan.files.tree.index import TreeCache
from mulligan.values.limits import GIB_BYTES, MIB_BYTES, WHOLE_MAX_BYTES
from mulligan.values.paths import ROOT, RepoPath

Opens = Callable[[Path], int]
Engine = Literal["ripgrep", "native"]

PATTERNS = [
    "import os",
    r"^import \w+$",
    r"def __init__\(self",
    r"class \w+\(.*Error\):",
    r"\bTODO\b",
    r"(?i)deprecat",
    r"return None$",
    r"^\s*$",
    r"#.*[^\x00-\x7f]",
    r"[^\x00-\x7f]",
    r"0x[0-9a-fA-F]{8}",
    r"\"[^\"]{70,}\"",
    r"^(from|import) (typing|collections)",
    r"raise (Value|Type)Error",
    r"\.join\(",
    r"lambda \w+: \w+\[",
    r"self\.\w+ = \w+$",
    r"@(static|class)method",
    r"\d{4}-\d{2}-\d{2}",
    r"https?://[^\s\"')>]+",
    r"\t",
    r"\s+$",
    r"async def",
    r"(foo|bar|baz)+\d*",
    r"\\x[0-9a-f]{2}",
    r"^.{120,}$",
    r"__\w+__",
    r"\p{Greek}",
    r"\bé|é\b",
    r"zzz_not_there_zzz",
    r"(?i)UTF-?8",
    r"[[:upper:]]{12,}",
    r"if .* is not None and .* is None",
    r"->",
]
STDLIB_MODULES = (
    "/{*.py,{asyncio,concurrent,email,encodings,html,http,importlib,json,logging,sqlite3,unittest,xml}/**/*.py}"
)
TREES = {
    "stdlib": (Path(sysconfig.get_paths()["stdlib"]), STDLIB_MODULES),
    "hypothesis": (Path(hypothesis.__file__).parent, "*.{py,pyi,txt,typed}"),
    "pydantic": (Path(pydantic.__file__).parent, "!*.pyc"),
}


@pytest.fixture
def opens() -> Iterator[Opens]:
    opened: list[int] = []

    def opens(path: Path) -> int:
        opened.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        return opened[-1]

    yield opens
    for fd in opened:
        os.close(fd)


def both(fd: int, pattern: str, base: RepoPath = ROOT, **options: Any) -> tuple[GrepResult, GrepResult]:
    common = GrepOptions(**{"max_results": 500, "timeout_s": 60.0, "cache": TreeCache(), **options})
    one = grep(fd, base, pattern, replace(common, engine="ripgrep"))
    two = grep(fd, base, pattern, replace(common, engine="native"))
    assert (one.engine, two.engine) == ("ripgrep", "native")
    return one, two


@pytest.mark.req("D9.grep_engines_agree", "A7.rg_equals_native")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_on_real_trees(tree: tuple[Path, str], pattern: str, opens: Opens) -> None:
    folder, glob_filter = tree
    by_ripgrep, by_native = both(opens(folder), pattern, glob_filter=glob_filter)
    assert by_ripgrep.lines == by_native.lines
    assert by_ripgrep.truncated == by_native.truncated


ODD_FILES = {
    b"plain.txt": b"needle one\nother\nneedle two\n",
    b"no-newline": b"first\nneedle at the end",
    b"empty": b"",
    b"only-newlines": b"\n\n\n",
    b"crlf.txt": b"needle\r\n\r\nneedle end\r\n",
    b"mixed.txt": b"a\r\nneedle\nneedle\r\n\rneedle\r",
    b"bom.txt": b"\xef\xbb\xbfneedle after bom\r\nneedle\n",
    b"bom-only": b"\xef\xbb\xbf",
    b"bom-inside.txt": b"\xef\xbb\xbf\xef\xbb\xbfneedle\n\xef\xbb\xbfneedle\n\nneedle\n",
    b"utf16.txt": "needle utf16\n".encode("utf-16"),
    b"latin1.txt": b"caf\xe9 needle\nna\xefve\n",
    b"binary-early": b"needle\n" + b"\0" + b"needle\n",
    b"binary-edge": b"needle\n" + b"x" * 7991 + b"\0",
    b"text-edge": b"needle\n" + b"x" * 7993 + b"\0\nneedle late\n",
    b"huge-line": b"x" * 3_000_000 + b"needle" + b"y" * 3_000_000 + b"\nneedle\n",
    b"cut-in-a-character": "é".encode() * 1500 + b"needle\n",
    b"exactly-as-shown": b"needle" + b"z" * 1994 + b"\r\n",
    b"one-more": b"needle" + b"z" * 1995 + b"\n",
    b".hidden": b"needle\n",
    b".config/deep/.x": b"needle\n",
    b"-e": b"needle in a file named like an option\n",
    b"-": b"needle in a file named like stdin\n",
    b"--pre=sh": b"needle\n",
    b"new\nline": b"needle behind a newline\n",
    b"colon:12:x": b"needle\n",
    b"tab\there": b"needle\n",
    b"caf\xe9": b"needle in a name that is not UTF-8\n",
    "日本/語.txt".encode(): b"needle\n",
    b"a b/c d.txt": b"needle\n",
    b"a-b/x": b"needle\n",
    b"a/x": b"needle\n",
    b"a.b": b"needle\n",
    b"a0": b"needle\n",
    b"[z]/{y}.py": b"needle\n",
    b"back\\slash": b"needle\n",
    b".gitignore": b"*.log\nbuild/\n!keep.log\n/node_modules\nneedle-ignored\n",
    b".ignore": b"own-ignored\n!taken-back.log\n",
    b"a.log": b"needle ignored\n",
    b"keep.log": b"needle kept\n",
    b"taken-back.log": b"needle taken back\n",
    b"own-ignored": b"needle ignored\n",
    b"needle-ignored": b"needle ignored\n",
    b"build/out.txt": b"needle ignored\n",
    b"node_modules/p/index.js": b"needle ignored\n",
    b"odd {dir}/build/x": b"needle ignored\n",
    b"sub/.gitignore": b"secret*\n",
    b"sub/secret.txt": b"needle ignored\n",
    b"sub/open.txt": b"needle\n",
    b"sub/.git/config": b"needle in git\n",
    b".git/config": b"needle in git\n",
    b".git/info/exclude": b"excluded*\n",
    b"excluded.txt": b"needle ignored\n",
    b"worktree/.git": b"gitdir: needle\n",
    b"worktree/file": b"needle\n",
    b"many.txt": b"".join(b"needle %d\n" % n for n in range(300)),
    b"spoof\n./plain.txt": b"needle\n",
}


@pytest.fixture
def odd_tree(tmp_path: Path) -> Path:
    """One of everything that could make two engines differ."""
    for name, data in ODD_FILES.items():
        path = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("needle outside\n")
    (tmp_path / "link-to-file").symlink_to("plain.txt")
    (tmp_path / "link-to-dir").symlink_to("sub")
    (tmp_path / "link-out").symlink_to(outside)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


ODD_PATTERNS = [
    "needle",
    r"needle$",
    r"^needle",
    r"needle\s*$",
    r"é|\xe9",
    r"^$",
    "",
    r".",
    r"x{1000}needle",
    r"needle[^\x00]*$",
    r"\r",
    r"(?i)NEEDLE (IN|AT)",
    r"^\W",
    r"^[^n]",
    r"^.{7}$",
    r"\x{feff}",
    r"\b^n",
]


@pytest.mark.req("D9.grep_engines_agree", "C9.grep_is_tolerant")
@pytest.mark.parametrize("limit", [1, 7, 100, 10_000])
@pytest.mark.parametrize("pattern", [*ODD_PATTERNS, "-e", "--pre=sh", "(?i)ÉÉ", r"z\b", r"\bneedle\b"])
def test_on_a_tree_of_oddities(odd_tree: Path, pattern: str, limit: int, opens: Opens) -> None:
    by_ripgrep, by_native = both(opens(odd_tree), pattern, max_results=limit)
    assert by_ripgrep.lines == by_native.lines
    assert by_ripgrep.truncated == by_native.truncated


@pytest.mark.parametrize("pattern", ODD_PATTERNS)
@pytest.mark.parametrize("way", ["back soon", "back late", "batches", "too much output"])
@pytest.mark.parametrize("names", ["all names", "names it can say"])
def test_however_ripgrep_is_led_to_the_files(
    odd_tree: Path, pattern: str, way: str, names: str, opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree is too small for all but the first step, so the steps are made smaller."""
    monkeypatch.setattr(ripgrep, "FIRST_FILES", 3)
    monkeypatch.setattr(ripgrep, "BATCH_FILES", 4)
    monkeypatch.setattr(ripgrep, "PATIENCE_S", 0.0 if way == "back late" else 60.0)
    if way == "batches":
        monkeypatch.setattr(ripgrep, "PRUNED_MAX", 0)
    if way == "too much output":
        monkeypatch.setattr(rg_process, "OUTPUT_MAX_BYTES", 100)
    if names == "names it can say":
        for odd in [path for path in odd_tree.rglob("*") if "\n" in path.name]:
            odd.rename(odd.with_name(odd.name.replace("\n", "").replace("./", "")))
    for limit in (2, 20, 10_000):
        by_ripgrep, by_native = both(opens(odd_tree), pattern, max_results=limit)
        assert by_ripgrep.lines == by_native.lines
        assert by_ripgrep.truncated == by_native.truncated


@pytest.mark.req("D9.grep_engines_agree")
@pytest.mark.parametrize("pattern", ["needle", "needle$", "^needle", r"\r", "", r"x{200}"])
@pytest.mark.parametrize("first_files", [3, 128])
def test_where_many_files_are_large_and_lines_come_in_pieces(
    odd_tree: Path, pattern: str, first_files: int, opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ripgrep, "FIRST_FILES", first_files)
    monkeypatch.setattr(ripgrep, "PATIENCE_S", 0.0)
    for module in (native, ripgrep):
        monkeypatch.setattr(module, "WHOLE_MAX_BYTES", 1_000)
    monkeypatch.setattr(native, "BLOCK_BYTES", 300)
    for limit in (2, 10_000):
        by_ripgrep, by_native = both(opens(odd_tree), pattern, max_results=limit)
        assert by_ripgrep.lines == by_native.lines
        assert by_ripgrep.truncated == by_native.truncated
        assert len({(line.path, line.line_no) for line in by_native.lines}) == len(by_native.lines)


@pytest.mark.req("D9.grep_engines_agree", "D9.grep_excludes")
@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("ignored", ["", "*.img\n"])
def test_a_binary_file_of_any_size_is_passed_by(tmp_path: Path, count: int, ignored: str, opens: Opens) -> None:
    """Reading this one would take longer than there is time, and more memory than there is."""
    for number in range(count):
        (tmp_path / f"{number:03}").write_text("needle\n")
    (tmp_path / ".gitignore").write_text(ignored)
    (tmp_path / "disk.img").touch()
    os.truncate(tmp_path / "disk.img", 64 * GIB_BYTES)
    for pattern in ("needle", "need.e"):
        by_ripgrep, by_native = both(opens(tmp_path), pattern, timeout_s=10.0)
        assert by_ripgrep.lines == by_native.lines
        assert len(by_native.lines) == count


def test_a_line_longer_than_memory_allows_is_still_one_line(tmp_path: Path, opens: Opens) -> None:
    half = b"x" * (WHOLE_MAX_BYTES + MIB_BYTES)
    (tmp_path / "log").write_bytes(b"needle\n" + half + b"needle" + half + b"needle\nneedle\n")
    by_ripgrep, by_native = both(opens(tmp_path), "needle")
    assert by_ripgrep.lines == by_native.lines
    assert [line.line_no for line in by_native.lines] == [1, 2, 3]


@pytest.mark.parametrize("glob_filter", ["*.txt", "!*.txt", "sub/**", "a*", "/a/x", "{a,sub}/*", "日本/"])
def test_with_a_filter(odd_tree: Path, glob_filter: str, opens: Opens) -> None:
    by_ripgrep, by_native = both(opens(odd_tree), "needle", glob_filter=glob_filter)
    assert by_ripgrep.lines == by_native.lines != ()
    assert by_ripgrep.truncated == by_native.truncated


@pytest.mark.parametrize("limits", [{"max_scan_files": 9}, {"max_scan_bytes": 20_000}, {"max_scan_files": 0}])
def test_with_scan_limits(odd_tree: Path, limits: dict[str, Any], opens: Opens) -> None:
    by_ripgrep, by_native = both(opens(odd_tree), "needle", **limits)
    assert by_ripgrep.lines == by_native.lines
    assert by_ripgrep.truncated
    assert by_native.truncated


@pytest.mark.parametrize("base", ["sub", "a b/c d.txt", "node_modules", "build/out.txt", "日本", "-", "new\nline"])
def test_below_a_base(odd_tree: Path, base: str, opens: Opens) -> None:
    by_ripgrep, by_native = both(opens(odd_tree), "needle", base=RepoPath(base))
    assert by_ripgrep.lines == by_native.lines != ()


@pytest.mark.req("D9.grep_ignore_files", "D9.grep_hidden", "D9.grep_excludes", "D9.grep_order")
@pytest.mark.parametrize("engine", ["ripgrep", "native"])
def test_exactly_these_files_are_searched(odd_tree: Path, engine: Engine, opens: Opens) -> None:
    result = grep(opens(odd_tree), ROOT, "needle", GrepOptions(engine=engine, max_results=10_000))
    names = list(dict.fromkeys(os.fsencode(line.path) for line in result.lines))
    assert names == sorted(names)
    assert names == [
        *(
            b"-",
            b"--pre=sh",
            b"-e",
            b".config/deep/.x",
            b".gitignore",
            b".hidden",
            b"[z]/{y}.py",
            b"a b/c d.txt",
            b"a-b/x",
            b"a.b",
            b"a/x",
            b"a0",
        ),
        *(
            b"back\\slash",
            b"bom-inside.txt",
            b"bom.txt",
            b"caf\xe9",
            b"colon:12:x",
            b"crlf.txt",
            b"cut-in-a-character",
            b"exactly-as-shown",
            b"huge-line",
            b"keep.log",
        ),
        *(
            b"latin1.txt",
            b"many.txt",
            b"mixed.txt",
            b"new\nline",
            b"no-newline",
            b"one-more",
            b"plain.txt",
            b"spoof\n./plain.txt",
            b"sub/open.txt",
        ),
        *(b"tab\there", b"taken-back.log", b"text-edge", b"worktree/file", "日本/語.txt".encode()),
    ]


@pytest.mark.parametrize("engine", ["ripgrep", "native"])
def test_unreadable_files_are_skipped(tmp_path: Path, engine: Engine, opens: Opens) -> None:
    (tmp_path / "closed").mkdir()
    for name in ("a.txt", "b.txt", "closed/c.txt", "d.txt"):
        (tmp_path / name).write_text("needle\n")
    (tmp_path / "b.txt").chmod(0)
    (tmp_path / "closed").chmod(0)
    tmp_path.chmod(0o755)
    fd = opens(tmp_path)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        result = grep(fd, ROOT, "needle", GrepOptions(engine=engine))
    finally:
        if is_root:
            os.seteuid(0)
        (tmp_path / "closed").chmod(0o755)
    assert [line.path for line in result.lines] == ["a.txt", "d.txt"]
