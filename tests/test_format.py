"""The bytes of a store as `docs/format.md` says them, read from fixtures that were written once.

A change that breaks one of these breaks every store there is: it needs a new format version and a migration.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from base64 import b64decode
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import pytest

import mulligan
from mulligan.history.projection import SCHEMA as HISTORY
from mulligan.store.blobs import BODIES, RAW, ZSTD, ZSTD_PREFIX, Blobs, BodyRow, unpack
from mulligan.store.journal import (
    GENESIS,
    OWN_TABLES,
    RECORDS,
    SEALS,
    HeadRow,
    Journal,
    RecordRow,
    Schema,
    break_in_chain,
    parse_record,
    records_of,
    seal,
)
from mulligan.store.memory import MemoryStore
from mulligan.store.migrations import SCHEMA_VERSION
from mulligan.store.sqlite import SqliteStore
from mulligan.store.sqlite_file import create_statements
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import SystemClock
from mulligan.values.digest import Digest, digest_of, raw_digest
from mulligan.values.errors import MulliganError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

KIND = re.compile("`([a-z_.]+)`")
FIXTURES = Path(__file__).parent / "fixtures" / "format"
SCHEMA = Schema((), {})


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / "journal.jsonl").read_text("utf-8").strip("\n").split("\n")]


def rows() -> list[RecordRow]:
    return [
        RecordRow(line["journal"], line["seq"], bytes.fromhex(line["hash"]), line["body"].encode(), line["ordinal"])
        for line in lines()
    ]


def journal(name: str) -> list[RecordRow]:
    return [row for row in rows() if row.journal == name]


class TestJournals:
    @pytest.mark.req("D4.record_shape")
    def test_a_record_is_its_canonical_bytes(self) -> None:
        assert [encode(decode(row.body)) for row in rows()] == [row.body for row in rows()]

    @pytest.mark.req("D4.record_hash_chain")
    def test_a_hash_is_over_the_one_before_and_the_bytes(self) -> None:
        prev = GENESIS
        for row in journal("s:golden"):
            assert row.hash == sha256(prev.encode("ascii") + b"\n" + row.body).digest()
            prev = row.hash.hex()

    @pytest.mark.parametrize("name", ["s:golden", "w:golden"])
    def test_the_golden_chains_hold(self, name: str) -> None:
        last = journal(name)[-1]
        head = HeadRow(name, last.seq, last.hash, parse_record(last).at, last.ordinal)
        assert break_in_chain(journal(name), head) is None

    @pytest.mark.req("D4.record_shape", "D4.record_hash_chain")
    def test_writing_the_same_records_again_gives_the_same_bytes(self) -> None:
        store = MemoryStore(SCHEMA)
        with store.write() as tx:
            for line in lines():
                body = json.loads(line["body"])
                refs = [Digest(ref) for ref in body.get("refs", ())]
                Journal(SCHEMA).append(tx, line["journal"], body["kind"], body["payload"], at=body["at"], refs=refs)
        with store.read() as tx:
            assert sorted(tx.select(RECORDS), key=lambda row: row.ordinal) == rows()

    @pytest.mark.req("D4.seals")
    def test_a_seal_names_the_newest_record_of_each_journal_that_changed(self) -> None:
        store = MemoryStore(SCHEMA)
        with store.write() as tx:
            for written in rows():
                record = parse_record(written)
                Journal(SCHEMA).append(tx, record.journal, record.kind, record.payload, at=record.at, refs=record.refs)
            seal(tx, at="2026-01-01T00:00:00.000000Z")
            (sealed,) = records_of(tx, SEALS)
        newest = {row.journal: {"seq": row.seq, "hash": row.hash.hex()} for row in rows()}
        assert (sealed.kind, sealed.payload) == ("store.sealed", {"heads": newest})


class TestBlobs:
    @pytest.mark.req("D4.blob_address")
    @pytest.mark.parametrize("blob", json.loads((FIXTURES / "blobs.json").read_text("utf-8")), ids=lambda b: b["form"])
    def test_each_form_unpacks_to_the_bytes_of_its_name(self, blob: dict[str, Any]) -> None:
        forms = {"raw": RAW, "zstd": ZSTD, "zstd_prefix": ZSTD_PREFIX}
        body = b64decode(blob["body"])
        earlier = b64decode(blob["earlier"]) if "earlier" in blob else None
        assert body[:1] == forms[blob["form"]]
        assert digest_of(unpack(body, blob["size"], earlier=earlier)) == blob["digest"]

    @pytest.mark.req("S0.storage.bodies_by_sha256", "D4.blob_large_in_files")
    @pytest.mark.req("D4.blob_zstd")
    def test_what_packs_is_kept_as_a_zstd_frame(self, tmp_path: Path) -> None:
        store, data = SqliteStore(str(tmp_path), SCHEMA), b"the same again\n" * 1_000
        Blobs(store, SystemClock()).store(data)
        with store.read() as tx:
            (row,) = tx.select(BODIES)
        assert (row.body[:5], len(row.body) < 100) == (ZSTD + b"\x28\xb5\x2f\xfd", True)
        assert zstd.decompress(row.body[1:]) == data

    @pytest.mark.req("D4.blob_small_in_database", "D4.blob_large_in_files")
    def test_up_to_64_kib_as_stored_is_in_the_database_and_more_is_a_file(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), SCHEMA)
        # Noise does not pack, and one byte says so.
        small, large = (Blobs(store, SystemClock()).store(os.urandom(65_535 + more)) for more in (0, 1))
        with store.read() as tx:
            assert [row.digest for row in tx.select(BODIES)] == [raw_digest(small)]
        assert list(store.bodies.digests()) == [large]

    @pytest.mark.req("D18.decompression_bomb")
    @pytest.mark.parametrize("form", [ZSTD, ZSTD_PREFIX])
    def test_a_body_that_unpacks_to_more_than_its_blob_is_stopped_there(self, form: bytes) -> None:
        bomb = form + zstd.compress(bytes(100_000_000))
        assert len(bomb) < 20_000
        tracemalloc.start()
        try:
            with pytest.raises(MulliganError) as refused:
                unpack(bomb, 1_000, earlier=b"earlier")
            assert (refused.value.code, tracemalloc.get_traced_memory()[1] < 5_000_000) == ("blob_corrupt", True)
        finally:
            tracemalloc.stop()

    @pytest.mark.req("D4.blob_work_outside_transactions")
    def test_preparing_needs_no_transaction_to_write_and_putting_neither_hashes_nor_packs(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), SCHEMA)
        blobs, other = Blobs(store, SystemClock()), digest_of(b"other")
        with store.write() as tx:
            prepared = blobs.prepare(b"some text " * 1_000)
            assert prepared.body is not None and len(prepared.body) < 200
            # Bytes that are not those of the name: only somebody who hashed them again would mind.
            blobs.put(tx, replace(prepared, digest=other))
        with store.read() as tx:
            assert tx.select(BODIES) == [BodyRow(raw_digest(other), prepared.body)]

    def test_a_large_body_is_a_file_named_by_its_digest(self, tmp_path: Path) -> None:
        data = os.urandom(100_000)
        store = SqliteStore(str(tmp_path), SCHEMA)
        digest = Blobs(store, SystemClock()).store(data)
        assert (tmp_path / "blobs" / digest[7:9] / digest[9:]).read_bytes() == RAW + data


def test_the_page_names_everything_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as opened:
        with opened.session().call() as call:
            call.write_file("large", os.urandom(100_000))
            call.exec(["true"])
        opened.session().fork(files="copy").close()
    page = (Path(__file__).parents[1] / "docs" / "format.md").read_text("utf-8")
    table = page.partition("## The directory")[2].partition("\n## ")[0]
    named = {name.partition("/")[0] for name in re.findall("`([^`]+)`", table)}
    assert {"blobs", "forks", "store.db"} <= {one.name for one in (tmp_path / "home").iterdir()} <= named


class TestTheDatabase:
    def test_its_own_tables_are_those_of_the_page(self) -> None:
        assert create_statements(OWN_TABLES) == (FIXTURES / "tables.sql").read_text("utf-8").splitlines()

    @pytest.mark.req("D4.schema_version")
    def test_its_header_names_us_and_the_format(self, tmp_path: Path) -> None:
        SqliteStore(str(tmp_path), SCHEMA).close()
        connection = apsw.Connection(str(tmp_path / "store.db"))
        assert connection.pragma("application_id") == int.from_bytes(b"MLG!", "big")
        assert connection.pragma("user_version") == SCHEMA_VERSION
        assert connection.pragma("journal_mode") == "wal"
        assert connection.pragma("auto_vacuum") == 2

    @pytest.mark.req("D5.owner_lock_per_process")
    def test_a_living_owner_holds_the_byte_of_its_number(self, tmp_path: Path) -> None:
        store = SqliteStore(str(tmp_path), SCHEMA)
        owner = store.owner()
        script = (
            "import fcntl, os, sys\n"
            "handle = os.open(sys.argv[1], os.O_RDWR)\n"
            "try: fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))\n"
            "except OSError: print('held')\n"
            "else: print('free')\n"
        )
        asked = [
            subprocess.run(
                [sys.executable, "-c", script, str(tmp_path / "owners.lock"), str(number)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for number in (owner, owner + 1)
        ]
        assert asked == ["held", "free"]


def test_the_page_names_every_kind_of_record() -> None:
    """Those that fold into tables, those that are only read, and no others."""
    page = (Path(__file__).parents[1] / "docs" / "format.md").read_text("utf-8")
    kinds = page.partition("## Kinds of records")[2].partition("\n## ")[0]
    named = {
        kind for line in kinds.splitlines() if line.startswith("| `") for kind in KIND.findall(line.split(" | ")[0])
    }
    assert named == {*HISTORY.projectors, *(HISTORY.unfolded or ())}


def test_a_kind_that_nothing_names_is_never_written() -> None:
    """Otherwise the page could lack one, and nobody would know."""
    store = MemoryStore(HISTORY)
    with store.write() as tx:
        Journal(HISTORY).append(tx, "store", "store.lost", {"digests": [], "mark": None}, at="2026-01-01T00:00:00Z")
        with pytest.raises(MulliganError) as refused:
            Journal(HISTORY).append(tx, "store", "snapshot.forgotten", {}, at="2026-01-01T00:00:00Z")
        assert (refused.value.code, tx.count(RECORDS)) == ("internal", 1)
