"""The ways that see a window of time, not a writer: what they keep beforehand, and what they say they cannot know."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from benches import Bench, open_bench
from exec.commands import at_rest, git, plant, repository, sh
from mulligan.history.kept import KeptTree
from mulligan.history.tables import TOUCHES
from mulligan.history.windows import lookout_of
from mulligan.store.blobs import BLOBS
from mulligan.values.digest import digest_of, raw_digest
from mulligan.values.entries import ABSENT, FileEntry
from mulligan.values.paths import RepoPath
from workspace.exec.trees import tree


def path_of(bench: Bench, name: str) -> bytes:
    return os.fsencode(bench.root / name)


def is_stored(bench: Bench, data: bytes) -> bool:
    with bench.desk.ledger.store.read() as tx:
        return tx.get(BLOBS, raw_digest(digest_of(data))) is not None


def looked_at(bench: Bench, **caps: int) -> KeptTree:
    """Everything below the root, read and saved."""
    tree = KeptTree(bench.desk, **caps)
    tree.look()
    while not tree.is_settled:
        tree.go_on(math.inf)
    return tree


@pytest.mark.req("D7.scan_baseline_git")
class TestGitHasIt:
    def test_a_clean_tracked_file_is_read_from_git_only_when_it_changed(self, bench: Bench) -> None:
        repository(bench.root, {"a": "clean\n", "b": "clean too\n"})
        os.chmod(bench.root / "a", 0o640)
        git(bench.root, "update-index", "-q", "--refresh")
        tree = looked_at(bench)
        assert not is_stored(bench, b"clean\n")
        mtime = (bench.root / "a").stat().st_mtime_ns
        plant(bench.root, {"a": "changed\n"})
        drifts = {one.path: one.before for one in tree.settle([path_of(bench, "a")])}
        assert drifts == {"a": FileEntry(digest_of(b"clean\n"), 6, 0o640, mtime)}
        assert is_stored(bench, b"clean\n") and not is_stored(bench, b"clean too\n")

    def test_a_file_that_is_not_clean_is_copied(self, bench: Bench) -> None:
        repository(bench.root, {"a": "committed\n"})
        plant(bench.root, {"a": "dirty\n", "new": "untracked\n"})
        looked_at(bench)
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

    @pytest.mark.parametrize("way", ["scan", "watch"])
    @pytest.mark.parametrize("command", ["rm -rf .git", "rm -rf .git; git init -q"])
    def test_objects_that_are_gone_are_named_whatever_came_after(self, bench: Bench, way: str, command: str) -> None:
        repository(bench.root, {"a": "1\n"})
        receipt = sh(bench, f"{command}; exit 1", strategy=way, rollback_on="nonzero")
        assert {"path": ".git/objects", "reason": "no_baseline"} in receipt.coverage
        assert git(bench.root, "symbolic-ref", "HEAD") == "refs/heads/main"

    @pytest.mark.parametrize("way", ["scan", "watch"])
    def test_objects_that_git_has_packed_are_not_gone(self, bench: Bench, way: str) -> None:
        repository(bench.root, {"a": "1\n"})
        assert sh(bench, "git repack -adq", strategy=way).coverage == []


@pytest.mark.req("D7.scan_baseline_caps", "D7.scan_no_baseline", "D6.coverage.no_baseline")
class TestCaps:
    def test_keep_large_files_out(self, bench: Bench) -> None:
        plant(bench.root, {"small": "s", "large": "l" * 11, "other": "o" * 6})
        tree = looked_at(bench, file_max_bytes=10, workspace_max_bytes=7)
        known = {name: tree.entry(RepoPath(name)) for name in ("small", "large", "other", "absent")}
        assert known["large"] is None and known["absent"] == ABSENT
        assert known["small"] is not None and known["other"] is not None

    def test_keep_the_whole_bounded(self, bench: Bench) -> None:
        plant(bench.root, {str(number): "x" * 10 for number in range(5)})
        tree = looked_at(bench, workspace_max_bytes=25)
        kept = [number for number in range(5) if tree.entry(RepoPath(str(number))) is not None]
        assert len(kept) == 2

    @pytest.mark.parametrize("way", ["scan", "watch"])
    def test_what_they_left_out_is_named_when_it_changed_and_never_harmed(self, bench: Bench, way: str) -> None:
        plant(bench.root, {"huge": "h" * (3 << 20), "small": "1\n"})
        receipt = sh(bench, "echo x >> huge; echo 2 > small", strategy=way)
        assert receipt.coverage == [{"path": "huge", "reason": "no_baseline"}]
        assert receipt.changes == [{"path": "small", "kind": "modified"}]
        assert bench.session().undo().ok
        assert (bench.root / "small").read_text() == "1\n" and (bench.root / "huge").stat().st_size == (3 << 20) + 2


@pytest.mark.parametrize("way", ["scan", "watch"])
def test_a_command_that_removes_its_root_has_removed_everything(tmp_path: Path, way: str) -> None:
    bench = open_bench(tmp_path)
    plant(bench.root, {"a": "1\n", "d/x": "x\n"})
    before = tree(os.fsencode(bench.root))
    receipt = sh(bench, f"rm -rf {bench.root}", strategy=way)
    assert receipt.changes == [{"path": name, "kind": "deleted"} for name in ("a", "d", "d/x")]
    bench.close()
    again = open_bench(tmp_path)
    # A new folder at the old path begins a history of its own, until a person says that it continues the earlier one.
    again.desk.adopt(None)
    again.close()
    adopted = open_bench(tmp_path)
    assert adopted.session().undo().ok
    assert tree(os.fsencode(adopted.root)) == before
    adopted.close()


@pytest.mark.req("D7.window_ambiguous", "D7.window_attribution", "D6.reason.ambiguous")
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


def test_what_a_failed_transaction_took_along_goes_with_the_next(bench: Bench) -> None:
    plant(bench.root, {"a": "1\n"})
    tree = looked_at(bench)
    plant(bench.root, {"a": "2\n"})
    assert [one.path for one in tree.look(whole=True)] == ["a"]
    with pytest.raises(LookupError), bench.desk.ledger.store.write() as tx:
        tree.publish(tx)
        raise LookupError
    assert not is_stored(bench, b"2\n") and tree.has_news
    with bench.desk.ledger.store.write() as tx:
        tree.publish(tx)
    tree.has_published()
    assert is_stored(bench, b"2\n") and not tree.has_news


@pytest.mark.parametrize("way", ["scan", "watch"])
class TestWarm:
    """What was looked at stays known between commands."""

    def test_nothing_is_read_twice(self, bench: Bench, way: str) -> None:
        plant(bench.root, {str(number): f"{number}\n" for number in range(50)})
        at_rest(bench.root.iterdir())
        sh(bench, "echo x > new", strategy=way)
        with bench.desk.ledger.store.read() as tx:
            touched = {row.digest: row.touched_ms for row in tx.select(BLOBS)}
        receipt = sh(bench, "echo changed > 7", strategy=way)
        assert receipt.changes == [{"path": "7", "kind": "modified"}]
        with bench.desk.ledger.store.read() as tx:
            again = [row for row in tx.select(BLOBS) if touched.get(row.digest) not in (None, row.touched_ms)]
        assert len(again) < 10

    def test_what_a_person_changes_in_between_is_theirs(self, bench: Bench, way: str) -> None:
        plant(bench.root, {"a": "1\n", "b": "1\n"})
        sh(bench, "echo 2 > a", strategy=way)
        plant(bench.root, {"a": "person\n", "b": "person\n"})
        receipt = sh(bench, "echo 3 > a", strategy=way)
        assert (receipt.changes, receipt.coverage) == ([{"path": "a", "kind": "modified"}], [])
        assert bench.session().undo().ok
        assert (bench.root / "a").read_text() == (bench.root / "b").read_text() == "person\n"

    def test_what_an_undo_puts_back_is_known_to_the_next(self, bench: Bench, way: str) -> None:
        plant(bench.root, {"a": "1\n", "d/x": "x\n"})
        before = tree(os.fsencode(bench.root))
        for _ in range(3):
            assert sh(bench, "echo 2 >> a; rm -r d; mkdir n; echo n > n/n", strategy=way).ok
            assert bench.session().undo().ok
            assert tree(os.fsencode(bench.root)) == before

    def test_another_process_goes_on_from_what_this_one_knew(self, bench: Bench, tmp_path: Path, way: str) -> None:
        plant(bench.root, {"a": "1\n", "b": "1\n"})
        sh(bench, "echo 2 > a", strategy=way)
        bench.close()
        plant(bench.root, {"b": "person\n"})
        again = open_bench(tmp_path)
        assert sh(again, "echo 3 > b", strategy=way).changes == [{"path": "b", "kind": "modified"}]
        assert again.session().undo().ok and (again.root / "b").read_text() == "person\n"
        again.close()

    def test_two_commands_at_once_each_have_a_window(self, bench: Bench, tmp_path: Path, way: str) -> None:
        plant(bench.root, {"a": "1\n", "b": "1\n"})
        reached, go = tmp_path / "reached", tmp_path / "go"
        os.mkfifo(reached)
        os.mkfifo(go)
        found: list[Any] = []
        script = f"echo 2 > a; echo > {reached}; read x < {go}"
        work = threading.Thread(target=lambda: found.append(sh(bench, script, strategy=way)))
        work.start()
        reached.read_text()
        inner = sh(bench, "echo 2 > b", strategy=way)
        go.write_text("\n")
        work.join()
        assert inner.changes == [{"path": "b", "kind": "modified"}]
        assert {"path": "a", "kind": "modified"} in found[0].changes
        assert {"path": "b", "reason": "ambiguous"} in found[0].coverage
        bench.session().undo()
        bench.session().undo()
        assert (bench.root / "a").read_text() == (bench.root / "b").read_text() == "1\n"


@pytest.mark.parametrize("way", ["scan", "watch"])
def test_what_was_kept_for_a_window_goes_with_it(bench: Bench, tmp_path: Path, way: str) -> None:
    """What others did while it was open, and took back again."""
    plant(bench.root, {"a": "1\n", "b": "1\n"})
    reached, go = tmp_path / "reached", tmp_path / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    work = threading.Thread(target=lambda: sh(bench, f"echo 2 > a; echo > {reached}; read x < {go}", strategy=way))
    work.start()
    reached.read_text()
    sh(bench, "echo 2 > b; echo new > c", strategy=way)
    sh(bench, "echo 1 > b; rm c", strategy=way)
    go.write_text("\n")
    work.join()
    with bench.desk.ledger.store.read() as tx:
        assert tx.select(TOUCHES) == []


def test_a_kept_watcher_is_taken_where_notify_cannot_be_had(bench: Bench) -> None:
    assert not lookout_of(bench.desk).is_watching
    sh(bench, "echo 1 > a", strategy="watch")
    assert lookout_of(bench.desk).is_watching
    bench.close()
    assert not lookout_of(bench.desk).is_watching
