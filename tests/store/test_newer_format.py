"""What happens to a process whose store a newer version of Mulligan has migrated."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import apsw
import pytest

import mulligan
from mulligan.agents.hooks import client
from mulligan.cli import run
from mulligan.store.protocol import META, MetaRow
from mulligan.values.errors import MulliganError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "format"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def migrate_to_the_future(home: Path) -> None:
    """As a newer version would leave it."""
    connection = apsw.Connection(str(home / "store.db"))
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('written_by', '99.1')")
    connection.pragma("user_version", 9_000)
    connection.close()


def says_it_all(words: str) -> bool:
    return "\n" not in words.strip() and all(part in words for part in ("99.1", version("mulligan"), "Restart"))


@pytest.mark.req("D4.older_process")
def test_an_old_process_fails_with_one_line_that_names_both_versions_and_what_to_restart(
    work: Path, tmp_path: Path
) -> None:
    m = mulligan.open(work, store=tmp_path / "home")
    session = m.session("s")
    with session.call() as call:
        call.write_file("f", "1")
    migrate_to_the_future(tmp_path / "home")
    with pytest.raises(MulliganError) as writing, session.call() as later:
        later.write_file("f", "2")
    with pytest.raises(MulliganError) as reading:
        session.undo(dry_run=True)
    with suppress(MulliganError):
        m.close()
    with pytest.raises(MulliganError) as opening:
        mulligan.open(work, store=tmp_path / "home")
    for caught in (writing, reading, opening):
        assert caught.value.code == "store_newer" and says_it_all(caught.value.message)
        assert str(os.getpid()) in caught.value.message
    assert (work / "f").read_text() == "1"


@pytest.mark.req("D4.older_process")
def test_a_server_that_ends_says_it_in_one_line(work: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "mulligan", "mcp", "--root", str(work), "--store", str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None and server.stderr is not None
        asked = {"name": "write_file", "arguments": {"path": "f", "content": "1"}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": asked}
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["id"] == 1
        migrate_to_the_future(home)
        server.stdin.close()
        said = server.stderr.read().decode()
    assert says_it_all(said)


@pytest.mark.req("D4.older_process")
def test_a_hook_says_the_same_inside_the_host(work: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    mulligan.open(work, store=home).close()
    migrate_to_the_future(home)
    event = {
        "hook_event_name": "PreToolUse",
        "session_id": "s",
        "cwd": str(work),
        "tool_name": "Write",
        "tool_use_id": "t",
        "tool_input": {"file_path": str(work / "f"), "content": "1"},
    }
    hook = [sys.executable, "-I", "-S", client.__file__, "claude", str(home)]
    environ = {**os.environ, "MULLIGAN_HOOKS_PROCESS": "off", "MULLIGAN_HOOKS_WAIT_S": "60"}
    done = subprocess.run(hook, input=json.dumps(event), capture_output=True, text=True, env=environ)
    assert done.returncode == 0
    assert says_it_all(json.loads(done.stdout)["systemMessage"])


@pytest.mark.req("D4.copied_before_migration")
def test_before_a_migration_the_store_is_copied(work: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    before = gzip.decompress((FIXTURES / "store-2.db.gz").read_bytes())
    (home / "store.db").write_bytes(before)
    mulligan.open(work, store=home).close()
    copied = home / "store.db.format-2"
    (tmp_path / "before.db").write_bytes(before)
    kept, original = (apsw.Connection(str(path)) for path in (copied, tmp_path / "before.db"))
    records = "SELECT journal, seq, hash, body FROM records ORDER BY ordinal"
    assert kept.execute(records).fetchall() == original.execute(records).fetchall()
    assert (kept.pragma("user_version"), copied.stat().st_mode & 0o777) == (2, 0o600)


@pytest.mark.req("D4.older_process")
def test_doctor_lists_the_processes_that_still_run_an_older_version(
    work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mulligan.open(work, store=tmp_path / "home") as m:
        with m.session("s").call() as call:
            call.write_file("f", "1")
        owner = m.store.owner()
        with m.store.write() as tx:
            tx.put(META, MetaRow(f"process:{owner}", "2 4711 mulligan mcp"))
            tx.put(META, MetaRow("process:999999", "2 4712 mulligan acp"))
        assert run(["doctor", "--json", "--store", str(tmp_path / "home")]) == 0
        findings = json.loads(capfd.readouterr().out)["findings"]
    (older,) = [one["value"] for one in findings if one["name"] == "older process"]
    assert "mulligan mcp (process 4711)" in older
