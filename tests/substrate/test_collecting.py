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
from mulligan.effects.substrate.collecting import KEPT_BY_DEFAULT, Collected, collect_snapshots
from mulligan.history.bounds import collect_garbage
from mulligan.history.schema import SCHEMA
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.housekeeping import STORE_JOURNAL
from mulligan.store.journal import records_of
from mulligan.store.protocol import Tx
from mulligan.store.verify import verify
from mulligan.testing.faults import Crash
from mulligan.values.digest import digest_of, raw_digest
from substrate.site import Site, open_site

LONG = KEPT_BY_DEFAULT + timedelta(days=1)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "root").mkdir()
    with open_site(tmp_path / "root", tmp_path / "store") as opened:
        yield opened


def is_kept(site: Site, text: str) -> bool:
    with site.opened.desk.ledger.store.read() as tx:
        row = tx.get(BLOBS, raw_digest(digest_of(text.encode())))
    return row is not None and row.place in READABLE


def collect(site: Site, older_than: timedelta = KEPT_BY_DEFAULT) -> Collected:
    return collect_snapshots(site.opened.desk.ledger, older_than)


def is_sound(site: Site) -> bool:
    return list(verify(site.opened.desk.ledger.store, SCHEMA)) == []


def content(site: Site, snapshot: str, path: str = "f") -> str:
    return str(site.ok("snapshot.file", mode="snapshot", snapshot_id=snapshot, path=path)["content"])


@pytest.mark.req("C13.ids_of_raw_bytes")
def test_an_old_snapshot_goes_with_its_bytes_and_leaves_a_record(site: Site) -> None:
    site.write("f", "captured")
    old = site.snapshot("f")
    assert collect(site) == Collected(0, 0)
    site.clock.ahead += LONG
    given_up = collect(site)
    assert given_up.snapshots == 1 and given_up.bytes > 0
    assert site.code("snapshot.info", snapshot_id=old) == "NOT_FOUND"
    assert site.code("snapshot.file", mode="snapshot", snapshot_id=old, path="f") == "NOT_FOUND"
    assert not is_kept(site, "captured")
    with site.opened.desk.ledger.store.read() as tx:
        told = [record.payload for record in records_of(tx, STORE_JOURNAL) if record.kind == "snapshot.evicted"]
    assert [(one["snapshot"], one["is_last"]) for one in told] == [(old, False), (old, True)]
    assert str(digest_of(b"captured")) in told[0]["digests"]
    assert is_sound(site)
    assert collect(site) == Collected(0, 0)


def test_what_another_snapshot_or_a_call_needs_stays(site: Site) -> None:
    site.write("f", "shared by two")
    site.write("g", "in the old one alone")
    site.snapshot("f", "g")
    site.clock.ahead += LONG
    young = site.snapshot("f")
    receipt, call = site.opened.session("tests").perform("write_file", {"path": "g", "content": "rewritten"})
    assert receipt.ok
    assert collect(site).snapshots == 1
    assert content(site, young) == "shared by two"
    assert is_kept(site, "in the old one alone"), "the call's preimage"
    assert site.opened.session("tests").undo(call).ok
    assert (site.root / "g").read_text() == "in the old one alone"
    assert is_sound(site)


def test_the_same_content_in_another_root_is_another_snapshot(site: Site, tmp_path: Path) -> None:
    site.write("f", "twice")
    mine = site.snapshot("f")
    site.clock.ahead += LONG
    (tmp_path / "other").mkdir()
    (tmp_path / "other/f").write_text("twice")
    with open_site(tmp_path / "other", tmp_path / "store") as other:
        other.clock.ahead = site.clock.ahead
        theirs = other.snapshot("f")
        assert (mine == theirs, collect(site).snapshots) == (True, 1)
        assert content(other, theirs) == "twice"
    assert site.code("snapshot.info", snapshot_id=mine) == "NOT_FOUND"


def test_bodies_that_two_old_ones_shared_go_with_the_last(site: Site) -> None:
    site.write("f", "shared")
    site.write("g", "own")
    site.snapshot("f")
    site.clock.ahead += timedelta(days=20)
    site.snapshot("f", "g")
    site.clock.ahead += timedelta(days=20)
    assert (collect(site).snapshots, is_kept(site, "shared")) == (1, True)
    site.clock.ahead += timedelta(days=20)
    assert (collect(site).snapshots, is_kept(site, "shared"), is_kept(site, "own")) == (1, False, False)
    assert is_sound(site)


def test_what_others_derive_from_goes_after_them(site: Site) -> None:
    site.write("f", "one\n")
    parent = site.snapshot("f")
    patch = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-one\n+two\n"
    made = site.ok("workspace.apply_patch", mode="snapshot", snapshot_id=parent, patch=patch)
    site.clock.ahead += LONG
    child = site.ok("workspace.apply_patch", mode="snapshot", snapshot_id=parent, patch=patch)["snapshot_id"]
    assert child == made["snapshot_id"]
    assert collect(site).snapshots == 0
    assert [one["path"] for one in site.ok("snapshot.changes", snapshot_id=child)["changes"]] == ["f"]
    site.clock.ahead += LONG
    assert collect(site).snapshots == 2


def test_creating_it_again_keeps_it_and_brings_it_back(site: Site) -> None:
    site.write("f", "again")
    first = site.snapshot("f")
    site.clock.ahead += LONG
    assert site.snapshot("f") == first
    assert collect(site).snapshots == 0
    site.clock.ahead += LONG
    assert collect(site).snapshots == 1
    assert site.snapshot("f") == first
    assert content(site, first) == "again"
    assert is_sound(site)


def test_no_snapshot_goes_within_a_day_whoever_asks(site: Site) -> None:
    site.write("f", "young")
    site.snapshot("f")
    site.clock.ahead += timedelta(hours=23)
    assert collect(site, timedelta(0)).snapshots == 0
    site.clock.ahead += timedelta(hours=2)
    assert collect(site, timedelta(0)).snapshots == 1


@pytest.mark.parametrize("deaths", range(1, 5))
def test_one_who_dies_half_way_is_followed_by_one_who_finishes(
    site: Site, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends as a transaction is about to begin: the first, the second and so on."""
    monkeypatch.setattr("mulligan.effects.substrate.collecting._BODIES_PER_RECORD", 2)
    for number in range(7):
        site.write(f"d/{number}", f"body {number}")
    kept = site.snapshot("d")
    site.clock.ahead += LONG
    store = site.opened.desk.ledger.store
    real, left = store.write, [deaths]

    def dying() -> AbstractContextManager[Tx]:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return real()

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(store, "write", dying)
        collect(site)
    assert is_sound(site)
    assert site.snapshot("d") == kept
    assert content(site, kept, "d/0") == "body 0"
    site.clock.ahead += LONG
    assert collect(site).snapshots == 1
    assert not any(is_kept(site, f"body {number}") for number in range(7))
    assert is_sound(site)


def test_readers_and_makers_beside_it_see_the_truth_or_nothing(site: Site) -> None:
    """Makers create old snapshots again while they are given up; whoever got an id can read all of it."""
    for number in range(30):
        site.write(f"d{number}/f", f"text {number}")
    ids = [site.snapshot(f"d{number}") for number in range(30)]
    site.clock.ahead += LONG
    wrong: list[str] = []

    def read() -> None:
        for number, one in enumerate(ids * 3):
            body = site.ask("snapshot.file", mode="snapshot", snapshot_id=one, path=f"d{number % 30}/f")
            if body.get("content", f"text {number % 30}") != f"text {number % 30}":
                wrong.append(f"read {body}")
            elif "error" in body and body["error"]["code"] != "NOT_FOUND":
                wrong.append(f"refused {body}")

    def make() -> None:
        for number in range(0, 30, 2):
            one = site.snapshot(f"d{number}")
            if content(site, one, f"d{number}/f") != f"text {number}":
                wrong.append(f"made {number}")

    threads = [Thread(target=read), Thread(target=make), Thread(target=lambda: collect(site))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(content(site, ids[number], f"d{number}/f") == f"text {number}" for number in range(0, 30, 2))
    collect_garbage(site.opened.desk.ledger)
    assert is_sound(site)


def test_gc_gives_up_old_snapshots(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with open_site(tmp_path / "root", tmp_path / "store") as site:
        site.clock.ahead = -LONG
        site.write("f", "long ago")
        old = site.snapshot("f")
    words = ["--root", str(tmp_path / "root"), "--store", str(tmp_path / "store"), "--json"]
    done = CliRunner().invoke(cli, ["gc", "--yes", *words])
    assert json.loads(done.stdout)["snapshots"] == 1
    with open_site(tmp_path / "root", tmp_path / "store") as site:
        assert site.code("snapshot.info", snapshot_id=old) == "NOT_FOUND"
