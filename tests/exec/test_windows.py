"""The ways that see a window of time, not a writer: what they keep beforehand, and what they say they cannot know."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from benches import Bench
from exec.commands import git, plant, repository, sh
from mulligan.history.baseline import WorkspaceBaseline
from mulligan.store.blobs import BLOBS
from mulligan.values.digest import digest_of, raw_digest
from mulligan.values.entries import ABSENT, FileEntry


def path_of(bench: Bench, name: str) -> bytes:
    return os.fsencode(bench.root / name)


def is_stored(bench: Bench, data: bytes) -> bool:
    with bench.desk.ledger.store.read() as tx:
        return tx.get(BLOBS, raw_digest(digest_of(data))) is not None


@pytest.mark.req("D7.scan_baseline_git")
class TestGitHasIt:
    def test_a_clean_tracked_file_is_read_from_git_only_when_it_changed(self, bench: Bench) -> None:
        repository(bench.root, {"a": "clean\n", "b": "clean too\n"})
        os.chmod(bench.root / "a", 0o640)
        git(bench.root, "update-index", "-q", "--refresh")
        baseline = WorkspaceBaseline(bench.desk)
        baseline.take()
        assert not is_stored(bench, b"clean\n")
        mtime = (bench.root / "a").stat().st_mtime_ns
        plant(bench.root, {"a": "changed\n"})
        entry = FileEntry(digest_of(b"clean\n"), 6, 0o640, mtime)
        assert baseline.before_of(path_of(bench, "a")) == entry
        assert is_stored(bench, b"clean\n") and not is_stored(bench, b"clean too\n")

    def test_a_file_that_is_not_clean_is_copied(self, bench: Bench) -> None:
        repository(bench.root, {"a": "committed\n"})
        plant(bench.root, {"a": "dirty\n", "new": "untracked\n"})
        WorkspaceBaseline(bench.desk).take()
        assert is_stored(bench, b"dirty\n") and is_stored(bench, b"untracked\n")

    def test_a_file_that_attributes_made_different_from_gits_bytes_is_copied(self, bench: Bench) -> None:
        repository(bench.root, {".gitattributes": "* text eol=crlf\n", "a": "x\n"})
        (bench.root / "a").unlink()
        git(bench.root, "checkout", "-q", "--", "a")
        assert (bench.root / "a").read_bytes() == b"x\r\n"
        sh(bench, "echo y > a", strategy="scan")
        assert bench.session().undo().ok
        assert (bench.root / "a").read_bytes() == b"x\r\n"

    def test_what_git_has_lost_meanwhile_is_named_and_left(self, bench: Bench) -> None:
        repository(bench.root, {"a": "1\n"})
        receipt = sh(bench, "echo 2 > a; rm -rf .git", strategy="scan")
        assert {"path": "a", "reason": "no_baseline"} in receipt.coverage
        bench.session().undo()
        assert (bench.root / "a").read_text() == "2\n"


@pytest.mark.req("D7.scan_baseline_caps", "D7.scan_no_baseline", "D6.coverage.no_baseline")
class TestCaps:
    def test_keep_large_files_out(self, bench: Bench) -> None:
        plant(bench.root, {"small": "s", "large": "l" * 11, "other": "o" * 6})
        baseline = WorkspaceBaseline(bench.desk, file_max_bytes=10, workspace_max_bytes=7)
        baseline.take()
        known = {name: baseline.before_of(path_of(bench, name)) for name in ("small", "large", "other", "absent")}
        assert known["large"] is None and known["absent"] == ABSENT
        assert known["small"] is not None and known["other"] is not None

    def test_keep_the_whole_bounded(self, bench: Bench) -> None:
        plant(bench.root, {str(number): "x" * 10 for number in range(5)})
        baseline = WorkspaceBaseline(bench.desk, workspace_max_bytes=25)
        baseline.take()
        kept = [number for number in range(5) if baseline.before_of(path_of(bench, str(number))) is not None]
        assert len(kept) == 2

    @pytest.mark.parametrize("way", ["scan", "watch"])
    def test_what_they_left_out_is_named_when_it_changed_and_never_harmed(self, bench: Bench, way: str) -> None:
        plant(bench.root, {"huge": "h" * (3 << 20), "small": "1\n"})
        receipt = sh(bench, "echo x >> huge; echo 2 > small", strategy=way)
        assert receipt.coverage == [{"path": "huge", "reason": "no_baseline"}]
        assert receipt.changes == [{"path": "small", "kind": "modified"}]
        assert bench.session().undo().ok
        assert (bench.root / "small").read_text() == "1\n" and (bench.root / "huge").stat().st_size == (3 << 20) + 2


@pytest.mark.req("D7.window_ambiguous", "D7.window_attribution")
@pytest.mark.parametrize("way", ["scan", "watch"])
def test_a_path_somebody_else_changed_in_the_window_is_ambiguous(bench: Bench, tmp_path: Path, way: str) -> None:
    plant(bench.root, {"shared": "1\n", "own": "1\n"})
    reached, go = tmp_path / "reached", tmp_path / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    found: list[Any] = []
    script = f"echo 2 > own; echo > {reached}; read x < {go}; echo agent >> shared"
    work = threading.Thread(target=lambda: found.append(sh(bench, script, strategy=way)))
    work.start()
    reached.read_text()
    with bench.session("person").call() as call:
        call.write_file("shared", "person\n")
    go.write_text("\n")
    work.join()
    assert found[0].attribution == "window"
    assert found[0].coverage == [{"path": "shared", "reason": "ambiguous"}]
    back = bench.session().undo()
    assert not back.ok
    assert [one.to_json() for one in back.outcomes] == [
        {"path": "own", "outcome": "restored"},
        {"path": "shared", "outcome": "conflicted", "reason": "ambiguous"},
    ]
    assert (bench.root / "own").read_text() == "1\n" and (bench.root / "shared").read_text() == "person\nagent\n"
