"""Snapshots that nobody refers to any more are given up, and nothing else with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from mulligan.cli import cli
from mulligan.effects.snapshot_tools.store import KEPT_BY_DEFAULT, Collected, collect_snapshots
from mulligan.history.projection import SCHEMA
from mulligan.history.retention import collect_garbage
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.journal import STORE_JOURNAL, records_of
from mulligan.store.protocol import Tx
from mulligan.store.verify import verify
from mulligan.testing.faults import Crash
from mulligan.values.digest import digest_of, raw_digest
from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace, open_snapshot_workspace

LONG = KEPT_BY_DEFAULT + timedelta(days=1)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[SnapshotWorkspace]:
    (tmp_path / "root").mkdir()
    with open_snapshot_workspace(tmp_path / "root", tmp_path / "store") as opened:
        yield opened


def is_kept(workspace: SnapshotWorkspace, text: str) -> bool:
    with workspace.opened.open_root.ledger.store.read() as tx:
        row = tx.get(BLOBS, raw_digest(digest_of(text.encode())))
    return row is not None and row.place in READABLE


def collect(workspace: SnapshotWorkspace, older_than: timedelta = KEPT_BY_DEFAULT) -> Collected:
    return collect_snapshots(workspace.opened.open_root.ledger, older_than)


def is_sound(workspace: SnapshotWorkspace) -> bool:
    return list(verify(workspace.opened.open_root.ledger.store, SCHEMA)) == []


def content(workspace: SnapshotWorkspace, snapshot: str, path: str = "f") -> str:
    return str(workspace.ok("snapshot.file", mode="snapshot", snapshot_id=snapshot, path=path)["content"])


@pytest.mark.req("C13.ids_of_raw_bytes")
def test_an_old_snapshot_is_deleted_with_its_bytes_and_leaves_a_record(workspace: SnapshotWorkspace) -> None:
    workspace.write("f", "captured")
    old = workspace.snapshot("f")
    assert collect(workspace) == Collected(0, 0)
    workspace.clock.ahead += LONG
    given_up = collect(workspace)
    assert given_up.snapshots == 1 and given_up.bytes > 0
    assert workspace.code("snapshot.info", snapshot_id=old) == "NOT_FOUND"
    assert workspace.code("snapshot.file", mode="snapshot", snapshot_id=old, path="f") == "NOT_FOUND"
    assert not is_kept(workspace, "captured")
    with workspace.opened.open_root.ledger.store.read() as tx:
        told = [record.payload for record in records_of(tx, STORE_JOURNAL) if record.kind == "snapshot.evicted"]
    assert [(one["snapshot"], one["is_last"]) for one in told] == [(old, False), (old, True)]
    assert str(digest_of(b"captured")) in told[0]["digests"]
    assert is_sound(workspace)
    assert collect(workspace) == Collected(0, 0)


def test_bytes_that_another_snapshot_or_a_call_needs_stay(workspace: SnapshotWorkspace) -> None:
    workspace.write("f", "shared by two")
    workspace.write("g", "in the old one alone")
    workspace.snapshot("f", "g")
    workspace.clock.ahead += LONG
    young = workspace.snapshot("f")
    receipt, call = workspace.opened.session("tests").perform("write_file", {"path": "g", "content": "rewritten"})
    assert receipt.ok
    assert collect(workspace).snapshots == 1
    assert content(workspace, young) == "shared by two"
    assert is_kept(workspace, "in the old one alone"), "the call's preimage"
    assert workspace.opened.session("tests").undo(call).ok
    assert (workspace.root / "g").read_text() == "in the old one alone"
    assert is_sound(workspace)


def test_the_same_content_in_another_root_is_another_snapshot(workspace: SnapshotWorkspace, tmp_path: Path) -> None:
    workspace.write("f", "twice")
    mine = workspace.snapshot("f")
    workspace.clock.ahead += LONG
    (tmp_path / "other").mkdir()
    (tmp_path / "other/f").write_text("twice")
    with open_snapshot_workspace(tmp_path / "other", tmp_path / "store") as other:
        other.clock.ahead = workspace.clock.ahead
        theirs = other.snapshot("f")
        assert (mine == theirs, collect(workspace).snapshots) == (True, 1)
        assert content(other, theirs) == "twice"
    assert workspace.code("snapshot.info", snapshot_id=mine) == "NOT_FOUND"


def test_shared_bodies_are_deleted_with_the_last_snapshot(workspace: SnapshotWorkspace) -> None:
    workspace.write("f", "shared")
    workspace.write("g", "own")
    workspace.snapshot("f")
    workspace.clock.ahead += timedelta(days=20)
    workspace.snapshot("f", "g")
    workspace.clock.ahead += timedelta(days=20)
    assert (collect(workspace).snapshots, is_kept(workspace, "shared")) == (1, True)
    workspace.clock.ahead += timedelta(days=20)
    assert (collect(workspace).snapshots, is_kept(workspace, "shared"), is_kept(workspace, "own")) == (1, False, False)
    assert is_sound(workspace)


def test_a_parent_snapshot_is_deleted_after_its_children(workspace: SnapshotWorkspace) -> None:
    workspace.write("f", "one\n")
    parent = workspace.snapshot("f")
    patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-one\n+two\n"
    made = workspace.ok("workspace.apply_patch", mode="snapshot", snapshot_id=parent, patch=patch)
    workspace.clock.ahead += LONG
    child = workspace.ok("workspace.apply_patch", mode="snapshot", snapshot_id=parent, patch=patch)["snapshot_id"]
    assert child == made["snapshot_id"]
    assert collect(workspace).snapshots == 0
    assert [one["path"] for one in workspace.ok("snapshot.changes", snapshot_id=child)["changes"]] == ["f"]
    workspace.clock.ahead += LONG
    assert collect(workspace).snapshots == 2


def test_creating_a_snapshot_again_keeps_or_restores_it(workspace: SnapshotWorkspace) -> None:
    workspace.write("f", "again")
    first = workspace.snapshot("f")
    workspace.clock.ahead += LONG
    assert workspace.snapshot("f") == first
    assert collect(workspace).snapshots == 0
    workspace.clock.ahead += LONG
    assert collect(workspace).snapshots == 1
    assert workspace.snapshot("f") == first
    assert content(workspace, first) == "again"
    assert is_sound(workspace)


def test_no_snapshot_is_deleted_within_a_day(workspace: SnapshotWorkspace) -> None:
    workspace.write("f", "young")
    workspace.snapshot("f")
    workspace.clock.ahead += timedelta(hours=23)
    assert collect(workspace, timedelta(0)).snapshots == 0
    workspace.clock.ahead += timedelta(hours=2)
    assert collect(workspace, timedelta(0)).snapshots == 1


@pytest.mark.parametrize("deaths", range(1, 5))
def test_a_deletion_that_was_killed_is_finished_by_the_next_process(
    workspace: SnapshotWorkspace, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends as a transaction is about to begin: the first, the second and so on."""
    monkeypatch.setattr("mulligan.effects.snapshot_tools.store._BODIES_PER_REMOVAL", 2)
    for number in range(7):
        workspace.write(f"d/{number}", f"body {number}")
    kept = workspace.snapshot("d")
    workspace.clock.ahead += LONG
    store = workspace.opened.open_root.ledger.store
    real, left = store.write, [deaths]

    def dying() -> AbstractContextManager[Tx]:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return real()

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(store, "write", dying)
        collect(workspace)
    assert is_sound(workspace)
    assert workspace.snapshot("d") == kept
    assert content(workspace, kept, "d/0") == "body 0"
    workspace.clock.ahead += LONG
    assert collect(workspace).snapshots == 1
    assert not any(is_kept(workspace, f"body {number}") for number in range(7))
    assert is_sound(workspace)


def test_parallel_readers_and_creators_see_whole_snapshots_or_none(workspace: SnapshotWorkspace) -> None:
    """Makers create old snapshots again while they are given up; whoever got an id can read all of it."""
    for number in range(30):
        workspace.write(f"d{number}/f", f"text {number}")
    ids = [workspace.snapshot(f"d{number}") for number in range(30)]
    workspace.clock.ahead += LONG
    wrong: list[str] = []

    def read() -> None:
        for number, one in enumerate(ids * 3):
            body = workspace.ask("snapshot.file", mode="snapshot", snapshot_id=one, path=f"d{number % 30}/f")
            if body.get("content", f"text {number % 30}") != f"text {number % 30}":
                wrong.append(f"read {body}")
            elif "error" in body and body["error"]["code"] != "NOT_FOUND":
                wrong.append(f"refused {body}")

    def make() -> None:
        for number in range(0, 30, 2):
            one = workspace.snapshot(f"d{number}")
            if content(workspace, one, f"d{number}/f") != f"text {number}":
                wrong.append(f"made {number}")

    threads = [Thread(target=read), Thread(target=make), Thread(target=lambda: collect(workspace))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(content(workspace, ids[number], f"d{number}/f") == f"text {number}" for number in range(0, 30, 2))
    collect_garbage(workspace.opened.open_root.ledger)
    assert is_sound(workspace)


def test_gc_deletes_old_snapshots(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with open_snapshot_workspace(tmp_path / "root", tmp_path / "store") as workspace:
        workspace.clock.ahead = -LONG
        workspace.write("f", "long ago")
        old = workspace.snapshot("f")
    words = ["--root", str(tmp_path / "root"), "--store", str(tmp_path / "store"), "--json"]
    done = CliRunner().invoke(cli, ["gc", "--yes", *words])
    assert json.loads(done.stdout)["snapshots"] == 1
    with open_snapshot_workspace(tmp_path / "root", tmp_path / "store") as workspace:
        assert workspace.code("snapshot.info", snapshot_id=old) == "NOT_FOUND"
