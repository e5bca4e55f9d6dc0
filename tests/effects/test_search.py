"""grep and glob at the level of their receipts; the engines themselves are judged in `tests/workspace/search`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benches import open_bench
from effects.stage import Fields, Stage, denied, failed, text
from mulligan.testing import File, Link, plant
from mulligan.values.canonical import encode
from mulligan.workspace.search.ripgrep import find_ripgrep


@pytest.fixture(params=["ripgrep", "native"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both engines; where ripgrep is not installed, the first asks the native one too."""
    if request.param == "native":
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setenv("PATH", "")
    return "native" if find_ripgrep() is None else "ripgrep"


CUT_SHORT = "The search was cut short before it found anything"


def matched(engine: str, *lines: str, truncated: bool = False) -> Fields:
    none = CUT_SHORT if truncated else "No matches found"
    words = {0: none, 1: "1 match"}.get(len(lines), f"{len(lines)} matches")
    body = {"status": "ok", "matches": text("\n".join(lines)), "match_count": len(lines), "truncated": truncated}
    return {**body, "engine": engine, "summary_text": words}


def globbed(*paths: str, truncated: bool = False) -> Fields:
    words = {0: "No files matched", 1: "1 path matched"}.get(len(paths), f"{len(paths)} paths matched")
    body = {"status": "ok", "paths": text("\n".join(paths)), "count": len(paths), "truncated": truncated}
    return {**body, "summary_text": words}


@pytest.mark.req("S1.effects.grep", "S1.verify.grep_paths", "A7.rg_equals_native", "D17.results_without_git_or_rg")
class TestGrep:
    @pytest.mark.req(
        "S1.grep.ok",
        "S1.grep.pattern",
        "S1.grep.match_count",
        "S1.grep.lines_with_path_and_number",
        "S1.grep.summary_text",
        "S1.grep.path_default",
        "S1.grep.case_insensitive_default_false",
        "S1.grep.native_fallback",
        "S1.grep.ripgrep_when_present",
        "D9.grep_order",
    )
    def test_lines_by_path_and_number(self, stage: Stage, engine: str) -> None:
        stage.plant({"b/x": "one\nhit é\n", "a": "hit 1\nmiss\nhit 2\n", "B": "HIT\n", "empty": ""})
        lines = ["a:1:hit 1", "a:3:hit 2", "b/x:2:hit é"]
        assert stage.perform("host.fs.grep", pattern="hit") == matched(engine, *lines)
        assert stage.perform("grep", pattern="hit", case_insensitive=True) == matched(engine, "B:1:HIT", *lines)

    @pytest.mark.req("W27.grep_on_a_file", "S1.grep.glob_filter")
    def test_where_to_look(self, stage: Stage, engine: str) -> None:
        stage.plant({"d/a.py": "hit", "d/b.rs": "hit", "a.py": "hit", "link": Link("d")})
        assert stage.perform("grep", pattern="hit", path="d/a.py") == matched(engine, "d/a.py:1:hit")
        for path in ("d", "link", str(stage.root / "d")):
            assert stage.perform("grep", pattern="hit", path=path, glob_filter="*.rs") == matched(
                engine, "d/b.rs:1:hit"
            )

    @pytest.mark.req("S1.grep.empty_is_ok")
    def test_no_match(self, stage: Stage, engine: str) -> None:
        assert stage.perform("grep", pattern="x") == matched(engine)

    @pytest.mark.req("S1.grep.invalid_regex", "S1.grep.error_code", "D9.grep_dialect")
    @pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(?=x)", r"(a)\1", "(?<!x)y", "[z-a]"])
    def test_a_bad_pattern(self, stage: Stage, engine: str, pattern: str) -> None:
        assert stage.refused("grep", pattern=pattern) == failed("invalid_regex", "invalid_regex")

    @pytest.mark.req("S1.grep.not_found", "S1.grep.forbidden", "S1.grep.error")
    def test_bad_places_and_filters(self, stage: Stage, engine: str) -> None:
        stage.plant({"a": "x", "out": Link("/etc")})
        assert stage.refused("grep", pattern="x", path="no") == failed("path_not_found", "not_found")
        assert stage.refused("grep", pattern="x", path="../..") == denied("path_not_allowed")
        assert stage.refused("grep", pattern="x", path="out") == denied("symlink_not_allowed")
        assert stage.refused("grep", pattern="x", glob_filter="[") == failed("invalid_glob_filter")
        assert stage.refused("grep", pattern="x", output_mode="no") == failed("invalid_output_mode")
        assert stage.refused("grep") == failed("invalid_params")

    @pytest.mark.req("A6.rg_option_injection", "D18.option_injection")
    def test_a_pattern_that_looks_like_an_option_is_a_pattern(self, stage: Stage, engine: str) -> None:
        script = stage.root / "run.sh"
        stage.plant({"run.sh": File(b"#!/bin/sh\ntouch ran\ncat\n", 0o755), "a": "--pre=x\n-e\n--files\n"})
        for pattern in (f"--pre={script}", "--pre=x", "-e", "--files", "-"):
            found = stage.perform("grep", pattern=pattern, path="a")
            hits = [f"a:{at}:{line}" for at, line in enumerate(["--pre=x", "-e", "--files"], 1) if pattern in line]
            assert found == matched(engine, *hits)
        assert stage.perform("grep", pattern="x", path="a", glob_filter="--pre=x")["match_count"] == 0
        assert not (stage.root / "ran").exists()

    @pytest.mark.req("S1.grep.max_results_default_100", "S1.grep.truncated", "D9.grep_count")
    def test_limits(self, stage: Stage, engine: str) -> None:
        stage.plant({"a": "x\n" * 101})
        found = stage.perform("grep", pattern="x")
        assert (found["match_count"], found["truncated"]) == (100, True)
        assert stage.perform("grep", pattern="x", max_results=1) == matched(engine, "a:1:x", truncated=True)
        assert stage.perform("grep", pattern="x", max_results=101)["truncated"] is False
        assert stage.perform("grep", pattern="x", max_results=0) == matched(engine, truncated=True)
        assert stage.perform("grep", pattern="x", max_results=2**63 - 1)["match_count"] == 101

    @pytest.mark.req("S1.grep.matches_variants", "S1.grep.output_mode", "S1.grep.deterministic")
    def test_large_results_are_blobs(self, stage: Stage, engine: str) -> None:
        stage.plant({"a": ("x" * 400 + "\n") * 60})
        one, two = (stage.perform("grep", pattern="x") for _ in range(2))
        assert one == two and one["matches"]["blob"]["size_bytes"] > 16_384
        refusal = stage.refused("grep", pattern="x", output_mode="require_inline")
        assert refusal == failed("inline_required_too_large")

    @pytest.mark.req("D18.regex_bomb")
    @pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a*)*b", "^(a|a?)+$", "(.*)(.*)(.*)(.*)(.*)[^a]$"])
    def test_a_bomb_does_not_go_off(self, stage: Stage, engine: str, pattern: str) -> None:
        stage.plant({"a": "a" * 5_000 + "b\n"})
        found = stage.perform("grep", pattern=pattern)
        assert found["status"] == "ok" or found["error_code"] == "regex_timeout"

    @pytest.mark.req("S1.adapter.receipt_encoding")
    def test_the_same_question_is_answered_with_the_same_bytes(self, stage: Stage, engine: str) -> None:
        stage.plant({"a": "hit", "b/c": "hit"})
        for effect, params in (("grep", {"pattern": "hit"}), ("glob", {"pattern": "**"}), ("read_file", {"path": "a"})):
            one, two = (encode(stage.perform(effect, **params)) for _ in range(2))
            assert one == two

    @pytest.mark.req("S1.grep.truncated")
    def test_a_line_that_is_cut_says_so(self, stage: Stage, engine: str) -> None:
        stage.plant({"a": "n" * 3000 + "needle\nneedle\n"})
        lines = ["a:1:" + "n" * 2000 + "…", "a:2:needle"]
        assert stage.perform("grep", pattern="needle") == matched(engine, *lines, truncated=True)

    def test_odd_names_are_one_line_each(self, stage: Stage, engine: str) -> None:
        stage.plant({"a\nb": "hit", "\udcff": "hit"})
        lines = stage.perform("grep", pattern="hit")["matches"]["inline_text"]["text"].split("\n")
        assert lines == ["base64:YQpi:1:hit", "base64:/w==:1:hit"]


@pytest.mark.req("S1.effects.glob", "S1.verify.glob_paths", "S1.glob.native_walk")
class TestGlob:
    @pytest.mark.req(
        "S1.glob.ok",
        "S1.glob.pattern",
        "S1.glob.count",
        "S1.glob.newest_first",
        "S1.glob.tie_by_path",
        "S1.glob.summary_text",
        "S1.glob.path_default",
        "D9.glob_files_only",
        "W27.glob_top_level",
        "D9.glob_star",
    )
    def test_newest_first_then_by_path(self, stage: Stage) -> None:
        times = {"old.py": 1, "d/new.py": 3, "b.py": 2, "a.py": 2, "x.rs": 9, "d.py/x": 9}
        stage.plant({path: File(b"", 0o644, at * 1_000_000_000) for path, at in times.items()})
        assert stage.perform("host.fs.glob", pattern="**/*.py") == globbed("d/new.py", "a.py", "b.py", "old.py")
        assert stage.perform("glob", pattern="*.py") == globbed("a.py", "b.py", "old.py")
        assert stage.perform("glob", pattern="*.py", path="d") == globbed("d/new.py")

    @pytest.mark.req("S1.glob.empty_is_ok")
    def test_nothing(self, stage: Stage) -> None:
        assert stage.perform("glob", pattern="*") == globbed()

    @pytest.mark.req("S1.glob.invalid_pattern", "S1.glob.error_code")
    @pytest.mark.parametrize("pattern", ["", "[", "{a", "/etc/*", "../*", "a\\"])
    def test_a_bad_pattern(self, stage: Stage, pattern: str) -> None:
        assert stage.refused("glob", pattern=pattern) == failed("invalid_pattern", "invalid_pattern")

    @pytest.mark.req("S1.glob.not_found", "S1.glob.forbidden", "S1.glob.error")
    def test_bad_places(self, stage: Stage) -> None:
        stage.plant({"a": "", "out": Link("/etc")})
        assert stage.refused("glob", pattern="*", path="no") == failed("path_not_found", "not_found")
        assert stage.refused("glob", pattern="*", path="a") == failed("not_directory")
        assert stage.refused("glob", pattern="*", path="..") == denied("path_not_allowed")
        assert stage.refused("glob", pattern="*", path="out") == denied("symlink_not_allowed")
        assert stage.refused("glob", pattern="*", output_mode="x") == failed("invalid_output_mode")

    @pytest.mark.req("D9.glob_ignore")
    def test_ignored_files_only_when_asked_for(self, stage: Stage) -> None:
        stage.plant({".gitignore": "*.log\n", "a.log": "", ".h": "", ".git/x": ""})
        found = stage.perform("glob", pattern="**")["paths"]["inline_text"]["text"].split("\n")
        assert sorted(found) == [".gitignore", ".h"]
        found = stage.perform("glob", pattern="**", include_ignored=True)["paths"]["inline_text"]["text"].split("\n")
        assert sorted(found) == [".gitignore", ".h", "a.log"]
        assert stage.perform("glob", pattern="**", path=".git", include_ignored=True) == globbed()

    @pytest.mark.req("D9.glob_default_100", "S1.glob.max_results_default", "S1.glob.truncated")
    def test_limits(self, stage: Stage) -> None:
        stage.plant({f"{number:03}": File(b"", 0o644, 10**9) for number in range(101)})
        found = stage.perform("glob", pattern="*")
        assert (found["count"], found["truncated"]) == (100, True)
        assert stage.perform("glob", pattern="*", max_results=101)["truncated"] is False
        limited = stage.within({"max_glob_results": 2**63 - 1, "max_scan_files": 2**63 - 1})
        for session in (stage, limited):
            assert session.perform("glob", pattern="*", max_results=2**63 - 1)["count"] == 101
        assert stage.perform("glob", pattern="*", max_results=1) == globbed("000", truncated=True)

    @pytest.mark.req("S1.glob.paths_variants", "S1.glob.output_mode")
    def test_large_results_are_blobs(self, stage: Stage) -> None:
        stage.plant({"n" * 200 + str(number): "" for number in range(100)})
        assert stage.perform("glob", pattern="*")["paths"]["blob"]["size_bytes"] > 16_384
        refusal = stage.refused("glob", pattern="*", output_mode="require_inline")
        assert refusal == failed("inline_required_too_large")


@pytest.mark.req("W26.symlinked_or_relative_root")
@pytest.mark.parametrize("kind", ["symlinked", "relative"])
def test_a_symlinked_or_relative_root(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "real", {"d/a.py": "hit\n"})
    os.symlink("real", tmp_path / "work")
    monkeypatch.chdir(tmp_path)
    bench = open_bench(tmp_path if kind == "symlinked" else Path())
    stage = Stage(bench, bench.session())
    assert stage.perform("glob", pattern="**/*.py")["paths"] == text("d/a.py")
    assert stage.perform("grep", pattern="hit")["matches"] == text("d/a.py:1:hit")
    for root in (tmp_path / "work", tmp_path / "real"):
        found = stage.perform("read_file", path=str(root / "d/a.py"))
        expected = "ok" if kind == "symlinked" or root.name == "real" else "forbidden"
        assert found["status"] == expected


@pytest.mark.req("AR.unreadable_entry")
def test_one_odd_entry_does_not_end_a_walk(stage: Stage) -> None:
    stage.plant({"a": "hit", "z": "hit", "loop": Link("loop"), "bad": Link("gone")})
    os.mkfifo(stage.root / "fifo")
    assert stage.perform("grep", pattern="hit")["matches"] == text("a:1:hit\nz:1:hit")
    assert stage.perform("glob", pattern="*")["count"] == 2


def test_no_file_lies_too_deep(stage: Stage, engine: str) -> None:
    deep = "/".join("d" * 200)
    stage.plant({f"{deep}/g.py": "hit\n", **{f"f{number}": "miss\n" for number in range(300)}})
    assert stage.perform("glob", pattern="**/g.py") == globbed(f"{deep}/g.py")
    assert stage.perform("grep", pattern="hit") == matched(engine, f"{deep}/g.py:1:hit")


def test_a_blank_name_is_answered_and_can_be_asked_for(stage: Stage) -> None:
    stage.plant({" ": "hit"})
    assert stage.perform("glob", pattern="*")["paths"] == text(" ")
    for path in (" ", "base64:IA=="):
        assert stage.perform("read_file", path=path)["content"] == text("hit")
    assert stage.refused("read_file", path="") == failed("invalid_path")


def test_paths_begin_at_the_working_directory(stage: Stage) -> None:
    stage.plant({"w/d/a": File(b"hit", 0o644, 10**9), "b": File(b"hit", 0o644, 10**9)})
    session = stage.perform("host.session.open", target={"local": {"workdir": "w"}})["session_id"]
    assert stage.perform("host.fs.grep", pattern="hit", session_id=session)["matches"] == text("d/a:1:hit")
    assert stage.perform("host.fs.glob", pattern="**", session_id=session)["paths"] == text("d/a")
    outside = stage.perform("host.fs.glob", pattern="**", path="..", session_id=session)["paths"]
    assert outside == text("../b\nd/a")
    assert stage.perform("host.fs.read_file", path="../b", session_id=session)["content"] == text("hit")


@pytest.mark.req("D8.search_without_path")
@pytest.mark.parametrize(
    ("roots", "found"),
    [
        (["src"], ["src/a"]),
        (["src", "docs"], ["docs/b", "src/a"]),
        (["src", "docs/b", "no such folder"], ["docs/b", "src/a"]),
        (["deep/er/one", "deep/er/two"], ["deep/er/one/d", "deep/er/two/e"]),
    ],
)
def test_a_search_without_a_path_searches_what_fs_roots_allow(stage: Stage, roots: list[str], found: list[str]) -> None:
    stage.plant(dict.fromkeys(("src/a", "docs/b", "other/c", "deep/er/one/d", "deep/er/two/e", "deep/f"), "hit\n"))
    limited = stage.within({"fs_roots": roots})
    matches = limited.perform("grep", pattern="hit")
    assert matches["matches"] == text("\n".join(f"{name}:1:hit" for name in found))
    paths = limited.perform("glob", pattern="**")["paths"]["inline_text"]["text"]
    assert sorted(paths.split("\n")) == found
    for outside in (".", "other"):
        assert limited.refused("grep", pattern="hit", path=outside) == denied("path_not_allowed")
        assert limited.refused("glob", pattern="**", path=outside) == denied("path_not_allowed")
    assert stage.within({"fs_roots": []}).refused("grep", pattern="hit") == denied("path_not_allowed")


@pytest.mark.req("D9.cut_short_is_said")
def test_a_search_that_was_cut_short_does_not_say_that_there_is_nothing(stage: Stage) -> None:
    stage.plant({"a": "one\n", "b": "two\n", "c": "hit\n"})
    for capability in ({"max_scan_files": 1}, {"max_scan_bytes": 5}, {"max_grep_results": 0}):
        found = stage.within(capability).perform("grep", pattern="hit")
        assert (found["match_count"], found["truncated"]) == (0, True)
        assert found["summary_text"] == CUT_SHORT
    found = stage.within({"max_scan_files": 1}).perform("glob", pattern="c")
    assert (found["count"], found["truncated"]) == (0, True)
    assert found["summary_text"] == CUT_SHORT
    assert stage.perform("grep", pattern="absent")["summary_text"] == "No matches found"
