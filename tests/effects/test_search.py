"""grep and glob at the level of their receipts; the engines themselves are judged in `tests/files/search`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mulligan.files.search.ripgrep import find_ripgrep
from mulligan.testing import File, Link, plant
from mulligan.values.canonical import encode
from tests.effects.effect_session import EffectSession, Fields, denied, failed, text
from tests.temp_workspace import open_temp_workspace


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
    def test_lines_by_path_and_number(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"b/x": "one\nhit é\n", "a": "hit 1\nmiss\nhit 2\n", "B": "HIT\n", "empty": ""})
        lines = ["a:1:hit 1", "a:3:hit 2", "b/x:2:hit é"]
        assert effects.perform("host.fs.grep", pattern="hit") == matched(engine, *lines)
        assert effects.perform("grep", pattern="hit", case_insensitive=True) == matched(engine, "B:1:HIT", *lines)

    @pytest.mark.req("W27.grep_on_a_file", "S1.grep.glob_filter")
    def test_the_search_is_limited_to_path_and_filter(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"d/a.py": "hit", "d/b.rs": "hit", "a.py": "hit", "link": Link("d")})
        assert effects.perform("grep", pattern="hit", path="d/a.py") == matched(engine, "d/a.py:1:hit")
        for path in ("d", "link", str(effects.root / "d")):
            assert effects.perform("grep", pattern="hit", path=path, glob_filter="*.rs") == matched(
                engine, "d/b.rs:1:hit"
            )

    @pytest.mark.req("S1.grep.empty_is_ok")
    def test_no_match_is_an_empty_answer(self, effects: EffectSession, engine: str) -> None:
        assert effects.perform("grep", pattern="x") == matched(engine)

    @pytest.mark.req("S1.grep.invalid_regex", "S1.grep.error_code", "D9.grep_dialect")
    @pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(?=x)", r"(a)\1", "(?<!x)y", "[z-a]"])
    def test_an_invalid_pattern_is_refused(self, effects: EffectSession, engine: str, pattern: str) -> None:
        assert effects.refused("grep", pattern=pattern) == failed("invalid_regex", "invalid_regex")

    @pytest.mark.req("S1.grep.not_found", "S1.grep.forbidden", "S1.grep.error")
    def test_invalid_paths_and_filters_are_refused(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"a": "x", "out": Link("/etc")})
        assert effects.refused("grep", pattern="x", path="no") == failed("path_not_found", "not_found")
        assert effects.refused("grep", pattern="x", path="../..") == denied("path_not_allowed")
        assert effects.refused("grep", pattern="x", path="out") == denied("symlink_not_allowed")
        assert effects.refused("grep", pattern="x", glob_filter="[") == failed("invalid_glob_filter")
        assert effects.refused("grep", pattern="x", output_mode="no") == failed("invalid_output_mode")
        assert effects.refused("grep") == failed("invalid_params")

    @pytest.mark.req("A6.rg_option_injection", "D18.option_injection")
    def test_a_pattern_that_looks_like_an_option_is_a_pattern(self, effects: EffectSession, engine: str) -> None:
        script = effects.root / "run.sh"
        effects.plant({"run.sh": File(b"#!/bin/sh\ntouch ran\ncat\n", 0o755), "a": "--pre=x\n-e\n--files\n"})
        for pattern in (f"--pre={script}", "--pre=x", "-e", "--files", "-"):
            found = effects.perform("grep", pattern=pattern, path="a")
            hits = [f"a:{at}:{line}" for at, line in enumerate(["--pre=x", "-e", "--files"], 1) if pattern in line]
            assert found == matched(engine, *hits)
        assert effects.perform("grep", pattern="x", path="a", glob_filter="--pre=x")["match_count"] == 0
        assert not (effects.root / "ran").exists()

    @pytest.mark.req("S1.grep.max_results_default_100", "S1.grep.truncated", "D9.grep_count")
    def test_limits_truncate_the_answer(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"a": "x\n" * 101})
        found = effects.perform("grep", pattern="x")
        assert (found["match_count"], found["truncated"]) == (100, True)
        assert effects.perform("grep", pattern="x", max_results=1) == matched(engine, "a:1:x", truncated=True)
        assert effects.perform("grep", pattern="x", max_results=101)["truncated"] is False
        assert effects.perform("grep", pattern="x", max_results=0) == matched(engine, truncated=True)
        assert effects.perform("grep", pattern="x", max_results=2**63 - 1)["match_count"] == 101

    @pytest.mark.req("S1.grep.matches_variants", "S1.grep.output_mode", "S1.grep.deterministic")
    def test_large_results_are_blobs(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"a": ("x" * 400 + "\n") * 60})
        one, two = (effects.perform("grep", pattern="x") for _ in range(2))
        assert one == two and one["matches"]["blob"]["size_bytes"] > 16_384
        refusal = effects.refused("grep", pattern="x", output_mode="require_inline")
        assert refusal == failed("inline_required_too_large")

    @pytest.mark.req("D18.regex_bomb")
    @pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a*)*b", "^(a|a?)+$", "(.*)(.*)(.*)(.*)(.*)[^a]$"])
    def test_an_exponential_pattern_ends(self, effects: EffectSession, engine: str, pattern: str) -> None:
        effects.plant({"a": "a" * 5_000 + "b\n"})
        found = effects.perform("grep", pattern=pattern)
        assert found["status"] == "ok" or found["error_code"] == "regex_timeout"

    @pytest.mark.req("S1.adapter.receipt_encoding")
    def test_the_same_search_gives_the_same_bytes(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"a": "hit", "b/c": "hit"})
        for effect, params in (("grep", {"pattern": "hit"}), ("glob", {"pattern": "**"}), ("read_file", {"path": "a"})):
            one, two = (encode(effects.perform(effect, **params)) for _ in range(2))
            assert one == two

    @pytest.mark.req("S1.grep.truncated")
    def test_a_truncated_line_says_so(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"a": "n" * 3000 + "needle\nneedle\n"})
        lines = ["a:1:" + "n" * 2000 + "…", "a:2:needle"]
        assert effects.perform("grep", pattern="needle") == matched(engine, *lines, truncated=True)

    def test_odd_names_are_one_line_each(self, effects: EffectSession, engine: str) -> None:
        effects.plant({"a\nb": "hit", "\udcff": "hit"})
        lines = effects.perform("grep", pattern="hit")["matches"]["inline_text"]["text"].split("\n")
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
    def test_newest_first_then_by_path(self, effects: EffectSession) -> None:
        times = {"old.py": 1, "d/new.py": 3, "b.py": 2, "a.py": 2, "x.rs": 9, "d.py/x": 9}
        effects.plant({path: File(b"", 0o644, at * 1_000_000_000) for path, at in times.items()})
        assert effects.perform("host.fs.glob", pattern="**/*.py") == globbed("d/new.py", "a.py", "b.py", "old.py")
        assert effects.perform("glob", pattern="*.py") == globbed("a.py", "b.py", "old.py")
        assert effects.perform("glob", pattern="*.py", path="d") == globbed("d/new.py")

    @pytest.mark.req("S1.glob.empty_is_ok")
    def test_no_file_is_an_empty_answer(self, effects: EffectSession) -> None:
        assert effects.perform("glob", pattern="*") == globbed()

    @pytest.mark.req("S1.glob.invalid_pattern", "S1.glob.error_code")
    @pytest.mark.parametrize("pattern", ["", "[", "{a", "/etc/*", "../*", "a\\"])
    def test_an_invalid_pattern_is_refused(self, effects: EffectSession, pattern: str) -> None:
        assert effects.refused("glob", pattern=pattern) == failed("invalid_pattern", "invalid_pattern")

    @pytest.mark.req("S1.glob.not_found", "S1.glob.forbidden", "S1.glob.error")
    def test_invalid_paths_are_refused(self, effects: EffectSession) -> None:
        effects.plant({"a": "", "out": Link("/etc")})
        assert effects.refused("glob", pattern="*", path="no") == failed("path_not_found", "not_found")
        assert effects.refused("glob", pattern="*", path="a") == failed("not_directory")
        assert effects.refused("glob", pattern="*", path="..") == denied("path_not_allowed")
        assert effects.refused("glob", pattern="*", path="out") == denied("symlink_not_allowed")
        assert effects.refused("glob", pattern="*", output_mode="x") == failed("invalid_output_mode")

    @pytest.mark.req("D9.glob_ignore")
    def test_ignored_files_only_when_asked_for(self, effects: EffectSession) -> None:
        effects.plant({".gitignore": "*.log\n", "a.log": "", ".h": "", ".git/x": ""})
        found = effects.perform("glob", pattern="**")["paths"]["inline_text"]["text"].split("\n")
        assert sorted(found) == [".gitignore", ".h"]
        found = effects.perform("glob", pattern="**", include_ignored=True)["paths"]["inline_text"]["text"].split("\n")
        assert sorted(found) == [".gitignore", ".h", "a.log"]
        assert effects.perform("glob", pattern="**", path=".git", include_ignored=True) == globbed()

    @pytest.mark.req("D9.glob_default_100", "S1.glob.max_results_default", "S1.glob.truncated")
    def test_limits_truncate_the_answer(self, effects: EffectSession) -> None:
        effects.plant({f"{number:03}": File(b"", 0o644, 10**9) for number in range(101)})
        found = effects.perform("glob", pattern="*")
        assert (found["count"], found["truncated"]) == (100, True)
        assert effects.perform("glob", pattern="*", max_results=101)["truncated"] is False
        limited = effects.within({"max_glob_results": 2**63 - 1, "max_scan_files": 2**63 - 1})
        for session in (effects, limited):
            assert session.perform("glob", pattern="*", max_results=2**63 - 1)["count"] == 101
        assert effects.perform("glob", pattern="*", max_results=1) == globbed("000", truncated=True)

    @pytest.mark.req("S1.glob.paths_variants", "S1.glob.output_mode")
    def test_large_results_are_blobs(self, effects: EffectSession) -> None:
        effects.plant({"n" * 200 + str(number): "" for number in range(100)})
        assert effects.perform("glob", pattern="*")["paths"]["blob"]["size_bytes"] > 16_384
        refusal = effects.refused("glob", pattern="*", output_mode="require_inline")
        assert refusal == failed("inline_required_too_large")


@pytest.mark.req("W26.symlinked_or_relative_root")
@pytest.mark.parametrize("kind", ["symlinked", "relative"])
def test_a_symlinked_or_relative_root(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "real", {"d/a.py": "hit\n"})
    os.symlink("real", tmp_path / "work")
    monkeypatch.chdir(tmp_path)
    workspace = open_temp_workspace(tmp_path if kind == "symlinked" else Path())
    effects = EffectSession(workspace, workspace.session())
    assert effects.perform("glob", pattern="**/*.py")["paths"] == text("d/a.py")
    assert effects.perform("grep", pattern="hit")["matches"] == text("d/a.py:1:hit")
    for root in (tmp_path / "work", tmp_path / "real"):
        found = effects.perform("read_file", path=str(root / "d/a.py"))
        expected = "ok" if kind == "symlinked" or root.name == "real" else "forbidden"
        assert found["status"] == expected


@pytest.mark.req("AR.unreadable_entry")
def test_one_unreadable_entry_does_not_end_the_search(effects: EffectSession) -> None:
    effects.plant({"a": "hit", "z": "hit", "loop": Link("loop"), "bad": Link("gone")})
    os.mkfifo(effects.root / "fifo")
    assert effects.perform("grep", pattern="hit")["matches"] == text("a:1:hit\nz:1:hit")
    assert effects.perform("glob", pattern="*")["count"] == 2


def test_a_very_deep_file_is_found(effects: EffectSession, engine: str) -> None:
    deep = "/".join("d" * 200)
    effects.plant({f"{deep}/g.py": "hit\n", **{f"f{number}": "miss\n" for number in range(300)}})
    assert effects.perform("glob", pattern="**/g.py") == globbed(f"{deep}/g.py")
    assert effects.perform("grep", pattern="hit") == matched(engine, f"{deep}/g.py:1:hit")


def test_a_file_named_by_a_blank_is_found_and_readable(effects: EffectSession) -> None:
    effects.plant({" ": "hit"})
    assert effects.perform("glob", pattern="*")["paths"] == text(" ")
    for path in (" ", "base64:IA=="):
        assert effects.perform("read_file", path=path)["content"] == text("hit")
    assert effects.refused("read_file", path="") == failed("invalid_path")


def test_paths_begin_at_the_working_directory(effects: EffectSession) -> None:
    effects.plant({"w/d/a": File(b"hit", 0o644, 10**9), "b": File(b"hit", 0o644, 10**9)})
    session = effects.perform("host.session.open", target={"local": {"workdir": "w"}})["session_id"]
    assert effects.perform("host.fs.grep", pattern="hit", session_id=session)["matches"] == text("d/a:1:hit")
    assert effects.perform("host.fs.glob", pattern="**", session_id=session)["paths"] == text("d/a")
    outside = effects.perform("host.fs.glob", pattern="**", path="..", session_id=session)["paths"]
    assert outside == text("../b\nd/a")
    assert effects.perform("host.fs.read_file", path="../b", session_id=session)["content"] == text("hit")


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
def test_a_search_without_a_path_searches_what_fs_roots_allow(
    effects: EffectSession, roots: list[str], found: list[str]
) -> None:
    effects.plant(dict.fromkeys(("src/a", "docs/b", "other/c", "deep/er/one/d", "deep/er/two/e", "deep/f"), "hit\n"))
    limited = effects.within({"fs_roots": roots})
    matches = limited.perform("grep", pattern="hit")
    assert matches["matches"] == text("\n".join(f"{name}:1:hit" for name in found))
    paths = limited.perform("glob", pattern="**")["paths"]["inline_text"]["text"]
    assert sorted(paths.split("\n")) == found
    for outside in (".", "other"):
        assert limited.refused("grep", pattern="hit", path=outside) == denied("path_not_allowed")
        assert limited.refused("glob", pattern="**", path=outside) == denied("path_not_allowed")
    assert effects.within({"fs_roots": []}).refused("grep", pattern="hit") == denied("path_not_allowed")


@pytest.mark.req("D9.cut_short_is_said")
def test_a_truncated_search_without_matches_says_that_it_is_incomplete(effects: EffectSession) -> None:
    effects.plant({"a": "one\n", "b": "two\n", "c": "hit\n"})
    for capability in ({"max_scan_files": 1}, {"max_scan_bytes": 5}, {"max_grep_results": 0}):
        found = effects.within(capability).perform("grep", pattern="hit")
        assert (found["match_count"], found["truncated"]) == (0, True)
        assert found["summary_text"] == CUT_SHORT
    found = effects.within({"max_scan_files": 1}).perform("glob", pattern="c")
    assert (found["count"], found["truncated"]) == (0, True)
    assert found["summary_text"] == CUT_SHORT
    assert effects.perform("grep", pattern="absent")["summary_text"] == "No matches found"
