"""`mulligan forget`: no byte of the content is in any file of the state directory, and `verify` accepts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

import mulligan
from mulligan.store.sqlite_file import copy_before_migration
from tests.state_search import files_holding

SECRET = os.urandom(24).hex()
LARGE = os.urandom(300_000)


def run(root: Path, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "mulligan", *words, "--root", str(root), "--json"], capture_output=True
    )
    assert done.returncode in (0, 1), done
    return json.loads(done.stdout)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def work_with_the_secret(root: Path) -> dict[str, str]:
    """Calls that write, change, read, search and copy a file with the secret, and leave deleted rows behind."""
    calls = {}
    (root / ".env").write_text(f"TOKEN={SECRET}\n")
    with mulligan.open(root) as m:
        session = m.session("s")
        with session.call() as call:
            call.edit_file(".env", "TOKEN", "KEY")
            call.write_file("other", "one\n")
        calls["edit"] = call.id
        with session.call() as call:
            call.read_file(".env")
            call.grep("KEY")
        calls["read"] = call.id
        with session.call() as call:
            call.write_file(".env", f"KEY={SECRET}\n" + "filler\n" * 4_000)
        with session.call() as call:
            call.write_file(".env", f"KEY={SECRET}\n" + "filler\n" * 4_001)
        calls["long"] = call.id
        with session.call() as call:
            call.write_file("large", {"inline_bytes": {"bytes": "base64:" + _base64(LARGE)}})
        calls["large"] = call.id
        session.perform("host.exec", {"argv": ["sh", "-c", "cp .env copy; rm copy"]})
        with session.call() as call:
            call.write_file(".env", "nothing\n")
        calls["last"] = call.id
    return calls


def _base64(data: bytes) -> str:
    from base64 import b64encode

    return b64encode(data).decode("ascii")


@pytest.mark.req("D18.forget")
def test_after_forgetting_a_path_no_byte_of_it_is_anywhere(root: Path, home: Path) -> None:
    calls = work_with_the_secret(root)
    assert files_holding(home, SECRET.encode()) != []
    told = run(root, "forget", ".env")
    assert {one["path"] for one in told["shared"]} <= {"copy"}
    assert files_holding(home, SECRET.encode()) == []
    assert run(root, "verify")["ok"] is True
    undone = run(root, "undo", calls["last"])["outcomes"]
    assert [(one["path"], one["outcome"], one["reason"]) for one in undone] == [(".env", "skipped", "evicted")]
    assert (root / ".env").read_text() == "nothing\n"


@pytest.mark.req("D18.forget")
@pytest.mark.parametrize("forgotten", ["sec/.env", "sec", "."])
def test_no_byte_stays_that_reached_the_store_in_another_way(root: Path, home: Path, forgotten: str) -> None:
    """By calls that failed, in patches, in the output of commands, in lines of a search, through another root."""
    (root / "sec").mkdir()
    (root / "sec" / ".env").write_text(f"TOKEN={SECRET}\n" * 60)
    patch = f"*** Begin Patch\n*** {{}} File: sec/.env\n@@\n-{SECRET}\n+x\n*** End Patch"
    with mulligan.open(root) as m:
        session = m.session("s")
        with pytest.raises(RuntimeError), session.call() as call:
            call.write_file("sec/.env", f"aborted {SECRET}\n")
            raise RuntimeError
        with session.call() as call:
            call.apply_patch(patch.format("Update"))
            call.apply_patch(patch.format("Updte"))
            # Of a long text, a record has only the digest.
            call.apply_patch(patch.format("Update").replace("+x", "+x\n" * 4_001))
        with session.call() as call:
            call.grep("TOKEN")
        with session.call() as call:
            call.exec(["cat", ".env"], cwd="sec")
            call.exec(["sh", "-c", "cd sec; cat ./.env; head -c 40000 /dev/zero"])
            call.exec(["sh", "-c", f"echo {SECRET} >> sec/.env; false"], strategy="scan", rollback_on="nonzero")
    with mulligan.open(root / "sec") as m, m.session("inner").call() as call:
        call.read_file(".env")
    assert files_holding(home, SECRET.encode()) != []
    run(root, "forget", forgotten)
    assert files_holding(home, SECRET.encode()) == []
    assert run(root, "verify")["ok"] is True


@pytest.mark.req("D18.forget")
def test_other_files_stay_when_a_path_is_forgotten(root: Path) -> None:
    calls = work_with_the_secret(root)
    with mulligan.open(root) as m:
        session = m.session("s")
        with pytest.raises(RuntimeError), session.call() as call:
            # The large file of an aborted call shares its first part with one that is on record.
            call.write_file("large", {"inline_bytes": {"bytes": "base64:" + _base64(LARGE + b"more")}})
            raise RuntimeError
        with session.call() as call:
            call.write_file("not.env", "kept\n")
            call.write_file(".env.local", "kept\n")
        kept = call.id
        run(root, "forget", ".env")
        assert {one.outcome for one in session.undo(kept).outcomes} == {"restored"}
        assert {one.outcome for one in session.undo(calls["large"]).outcomes} == {"restored"}
        session.redo()
        assert (root / "large").read_bytes() == LARGE


@pytest.mark.req("D18.forget")
def test_after_forgetting_a_call_no_byte_of_it_is_anywhere(root: Path, home: Path) -> None:
    calls = work_with_the_secret(root)
    needle = LARGE[100_000:100_064]
    assert files_holding(home, needle) != []
    told = run(root, "forget", calls["large"])
    assert told["call"] == calls["large"] and len(told["digests"]) >= 1
    assert files_holding(home, needle) == []
    assert run(root, "verify")["ok"] is True
    assert [(one["outcome"]) for one in run(root, "undo", calls["edit"], "--path", "other")["outcomes"]] == ["restored"]


@pytest.mark.req("D18.forget")
def test_a_record_names_what_was_erased_and_the_rest_can_still_be_undone(root: Path, home: Path) -> None:
    calls = work_with_the_secret(root)
    told = run(root, "forget", ".env")
    with mulligan.open(root) as m:
        from mulligan.store.journal import records_of

        with m.store.read() as tx:
            (record,) = [one for one in records_of(tx, "store") if one.kind == "store.forgotten"]
        assert record.payload["path"] == ".env"
        assert record.payload["digests"] == told["digests"]
        way = m.session("s").undo(calls["edit"])
        assert ("other", "restored") in [(one.path, one.outcome) for one in way.outcomes]
        assert (root / "other").exists() is False
        way = m.session("s").undo(calls["large"])
        assert not (root / "large").exists()
        m.session("s").redo()
        assert (root / "large").read_bytes() == LARGE


@pytest.mark.req("D18.forget")
@pytest.mark.parametrize("journal", ["= 'store'", "<> 'store'"], ids=["one that was not erased", "one that was"])
def test_a_record_that_is_changed_after_forget_is_still_found(root: Path, home: Path, journal: str) -> None:
    work_with_the_secret(root)
    run(root, "forget", ".env")
    connection = apsw.Connection(str(home / "store.db"))
    change = "replace(CAST(body AS TEXT), 'forgotten', 'forgetten')"
    connection.execute(f"UPDATE records SET body = CAST({change} AS BLOB) WHERE journal {journal}")
    connection.close()
    done = subprocess.run([sys.executable, "-m", "mulligan", "verify", "--root", str(root)], capture_output=True)
    assert done.returncode == 3


@pytest.mark.req("D18.forget")
def test_the_copy_that_was_made_before_a_migration_is_deleted_and_named(root: Path, home: Path) -> None:
    work_with_the_secret(root)
    connection = apsw.Connection(str(home / "store.db"))
    copy_before_migration(connection, 3)
    connection.close()
    assert home / "store.db.format-3" in [home / name for name in files_holding(home, SECRET.encode())]
    assert run(root, "forget", ".env")["copies"] == ["store.db.format-3"]
    assert files_holding(home, SECRET.encode()) == []
    assert not (home / "store.db.format-3").exists()
    assert run(root, "verify")["ok"] is True


@pytest.mark.req("D18.forget")
def test_originals_that_another_process_keeps_until_they_are_synced_are_gone_too(root: Path, home: Path) -> None:
    (root / ".env").write_text(f"TOKEN={SECRET}\n")
    with mulligan.open(root) as m:
        with m.session("s").call() as call:
            call.write_file(".env", "nothing\n")
        run(root, "forget", ".env")
        assert files_holding(home, SECRET.encode()) == []


@pytest.mark.req("D18.forget")
def test_a_call_that_is_open_is_not_forgotten(root: Path) -> None:
    with mulligan.open(root) as m, m.session("s").call() as call:
        call.write_file("a", SECRET)
        done = subprocess.run(
            [sys.executable, "-m", "mulligan", "forget", call.id, "--root", str(root)], capture_output=True, text=True
        )
        assert done.returncode == 2 and "open" in done.stderr


@pytest.mark.req("D18.forget")
def test_a_path_is_not_forgotten_while_an_open_call_needs_its_bytes(root: Path) -> None:
    with mulligan.open(root) as m:
        with m.session("s").call() as call:
            call.write_file("a", SECRET)
        with pytest.raises(LookupError), m.session("s").call() as call:
            call.write_file("a", "newer")
            done = subprocess.run(
                [sys.executable, "-m", "mulligan", "forget", "a", "--root", str(root)], capture_output=True, text=True
            )
            assert done.returncode == 2 and call.id in done.stderr
            raise LookupError
    assert (root / "a").read_text() == SECRET
