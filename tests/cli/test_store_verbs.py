"""`verify`, `du` and `doctor` as a person and a script see them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

import mulligan
from mulligan.cli import VERBS, LazyGroup, cli
from mulligan.cli.format import size_words
from mulligan.files.snapshot.manifest import LEASES, SNAPSHOTS, LeaseRow, SnapshotRow
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CALLS, CHANGES
from mulligan.session.tables import SESSIONS
from mulligan.store.blobs import BODIES
from mulligan.store.journal import RECORDS
from mulligan.store.protocol import CLAIMS, META, OWNERS, ClaimRow, MetaRow, OwnerRow, Table, Tx
from mulligan.store.sqlite import SqliteStore
from mulligan.values.text import visible
from tests.cli.cli_result import Done
from tests.contracts.tables import CONTRACT_SCHEMA


def run(*arguments: str, home: Path | None = None) -> Done:
    environ = {**os.environ, "MULLIGAN_HOME": str(home)} if home is not None else dict(os.environ)
    command: Sequence[str] = [sys.executable, "-m", "mulligan.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def _loaded_by(*arguments: str) -> set[str]:
    """The modules that a fresh process has loaded after the verb."""
    script = f"import sys; from mulligan.cli import run; run({list(arguments)}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with two sessions in it, each with a file of its own."""
    directory, root = tmp_path / "home", tmp_path / "root"
    root.mkdir()
    with mulligan.open(str(root), store=str(directory)) as opened:
        for name in ("one", "two"):
            with opened.session(name).call() as call:
                call.write_file(f"{name}.txt", f"{name}\n" * 200)
    return directory


def _change_rows(home: Path, act: Callable[[Tx], object]) -> None:
    store = SqliteStore(str(home), SCHEMA)
    with store.write() as tx:
        act(tx)
    store.close()


def _one_too_many_or_too_few(tx: Tx, table: Table[Any]) -> None:
    if table is SNAPSHOTS:
        tx.put(SNAPSHOTS, SnapshotRow("root", "id", "", "", ""))
    else:
        tx.delete(table, *table.key_of(tx.select(table)[0]))


class TestVerify:
    @pytest.mark.req("D14.cli.verify", "D14.cli.exit_0")
    def test_reports_a_sound_store(self, home: Path) -> None:
        done = run("verify", home=home)
        assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 1)
        assert run("verify", "--json", home=home).json == {"ok": True, "problems": []}

    def test_checks_one_session(self, home: Path) -> None:
        assert run("verify", "--session", "one", "--json", home=home).json == {"ok": True, "problems": []}
        assert run("verify", "--session", "none", home=home).code == 2

    @pytest.mark.req("D14.cli.verify", "D14.cli.exit_3", "D4.blob_verified_on_read")
    def test_exits_with_3_when_a_byte_changed(self, home: Path) -> None:
        store = SqliteStore(str(home), CONTRACT_SCHEMA)
        with store.write() as tx:
            body = tx.select(BODIES)[0]
            tx.put(BODIES, type(body)(body.digest, body.body[:-1] + bytes([body.body[-1] ^ 1])))
        store.close()
        done = run("verify", "--json", home=home)
        assert (done.code, done.json["ok"], done.json["problems"][0]["kind"]) == (3, False, "blob")
        assert run("verify", home=home).code == 3
        assert run("verify", "--quick", home=home).code == 0

    @pytest.mark.req("D14.cli.exit_3", "D18.journal_tampering", "D4.record_seq_contiguous")
    @pytest.mark.parametrize("harm", ["it is gone", "it has another number"])
    def test_of_one_session_exits_with_3_when_its_last_record_is_misplaced(self, home: Path, harm: str) -> None:
        def change(tx: Tx) -> None:
            last = tx.select(RECORDS, {"journal": "s:one"}, order=("seq",))[-1]
            tx.delete(RECORDS, last.journal, last.seq)
            if harm == "it has another number":
                tx.put(RECORDS, replace(last, seq=last.seq + 1))

        _change_rows(home, change)
        done = run("verify", "--session", "one", "--json", home=home)
        assert (done.code, [problem["kind"] for problem in done.json["problems"]]) == (3, ["journal"])

    @pytest.mark.req("D14.cli.exit_3")
    @pytest.mark.req("D4.verify_rebuilds", "D4.projections_same_transaction")
    @pytest.mark.parametrize("table", [SESSIONS, CALLS, CHANGES, SNAPSHOTS], ids=lambda table: table.name)
    def test_exits_with_3_when_a_row_contradicts_the_journal(self, home: Path, table: Table[Any]) -> None:
        _change_rows(home, lambda tx: _one_too_many_or_too_few(tx, table))
        done = run("verify", "--quick", "--json", home=home)
        assert (done.code, {problem["kind"] for problem in done.json["problems"]}) == (3, {"projection"})

    @pytest.mark.req("D4.coordination_not_projection")
    def test_ignores_rows_that_only_coordinate_processes(self, home: Path) -> None:
        _change_rows(home, lambda tx: tx.put(OWNERS, OwnerRow(1_000, "elsewhere", "")))
        _change_rows(home, lambda tx: tx.put(CLAIMS, ClaimRow(b"/somewhere", "call", 1)))
        _change_rows(home, lambda tx: tx.put(LEASES, LeaseRow("l", "r", "f", "h", None, "", 1)))
        assert run("verify", "--json", home=home).json == {"ok": True, "problems": []}

    def test_exits_with_3_when_the_file_is_no_store(self, tmp_path: Path) -> None:
        (tmp_path / "store.db").write_bytes(b"nothing of ours" * 100)
        done = run("verify", home=tmp_path)
        assert (done.code, done.out, len(done.err.splitlines())) == (3, "", 1)
        assert "MULLIGAN_HOME" in done.err and "mulligan verify" not in done.err

    @pytest.mark.parametrize("verb", ["verify", "status", "log", "du"])
    @pytest.mark.parametrize("cut", ["empty", "gone"])
    def test_a_store_without_its_main_file_is_damaged_and_not_a_new_one(self, home: Path, verb: str, cut: str) -> None:
        (home / "store.db").write_bytes(b"")
        if cut == "gone":
            (home / "store.db").unlink()
        before = {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()}
        done = run(verb, home=home)
        assert (done.code, done.out, len(done.err.splitlines())) == (3, "", 1)
        assert {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()} == before

    @pytest.mark.parametrize("verb", ["verify", "status", "log", "du"])
    def test_an_unreadable_directory_is_not_taken_for_an_empty_store(self, tmp_path: Path, verb: str) -> None:
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        done = run(verb, home=loop)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)

    def test_a_file_in_place_of_the_directory_is_not_taken_for_an_empty_store(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run("log", "--root", str(tmp_path), home=tmp_path / "file")
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)

    @pytest.mark.parametrize("url", ["foo://x", "postgresql://host:port/db", "/dev/null/below", "missing"])
    def test_exits_with_2_and_one_line_when_there_is_no_store(self, tmp_path: Path, url: str) -> None:
        place = str(tmp_path / url) if url == "missing" else url
        done = run("verify", "--store", place)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
        assert list(tmp_path.iterdir()) == []

    def test_prints_the_error_code_as_json(self) -> None:
        done = run("verify", "--store", "foo://x", "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "invalid_store_url")


class TestStore:
    @pytest.mark.req("D14.cli.store")
    def test_shows_path_and_content_of_the_store(self, home: Path) -> None:
        about = run("store", "--json", home=home).json
        assert (about["store"], about["sessions"], about["calls"]) == (str(home), 2, 2)
        assert about["roots"] == [str(home.parent / "root")]
        assert 0 < about["size_bytes"] < about["cap_bytes"] == 10 * 1024**3
        assert str(home) in run("store", home=home).out

    @pytest.mark.req("D14.cli.store", "D6.cap_store", "D6.caps_settable")
    def test_a_lower_cap_evicts_the_oldest_bodies_at_once(self, home: Path) -> None:
        root = str(home.parent / "root")
        with mulligan.open(root, store=str(home)) as opened, opened.session("one").call() as call:
            call.write_file("one.txt", "newer\n" * 200)
        assert run("store", "--cap", "0", home=home).code == 2
        assert run("store", "--cap", "1", "--json", home=home).json["cap_bytes"] == 1
        status = [call["status"] for call in run("log", "--json", "--root", root, home=home).json]
        assert status == ["committed", "committed", "evicted"]

    @pytest.mark.req("D14.cli.errors_say_next")
    def test_a_read_only_disk_is_reported_with_advice(self, home: Path, tmp_path: Path) -> None:
        """Seen from a mount namespace of its own, in which the disk really is read-only."""
        undo = '"$2" -m mulligan.cli undo --session one --root "$3"'
        script = f'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec {undo}'
        words = ["sh", "-c", script, "sh", str(home), sys.executable, str(tmp_path / "root")]
        apart = ["unshare", "--user", "--map-root-user", "--mount", *words]
        environ = {**os.environ, "MULLIGAN_HOME": str(home)}
        done = subprocess.run(apart, capture_output=True, text=True, env=environ, check=False)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert "MULLIGAN_HOME" in done.stderr

    def test_a_failed_sync_is_reported_by_store_and_doctor(self, home: Path) -> None:
        assert run("store", "--json", home=home).json["sync_failure"] is None
        assert [one for one in run("doctor", "--json", home=home).json["findings"] if one["name"] == "sync"] == []
        why = "2026-01-01T12:00:00.000000Z Syncing blobs: Input/output error"
        store = SqliteStore(str(home), SCHEMA)
        with store.write() as tx:
            tx.put(META, MetaRow("sync_failed", why))
        store.close()
        assert run("store", "--json", home=home).json["sync_failure"] == why
        words = f"a power cut may destroy what was written since {why}"
        assert words in run("store", home=home).out and words in run("doctor", home=home).out

    def test_a_missing_store_is_not_created(self, tmp_path: Path) -> None:
        assert run("store", home=tmp_path / "none").code == 2
        assert not (tmp_path / "none").exists()


class TestDu:
    @pytest.mark.req("D14.cli.du", "D6.du")
    def test_shows_sessions_blobs_and_journal(self, home: Path) -> None:
        shown = run("du", "--json", home=home).json
        assert [session["id"] for session in shown["sessions"]] == ["one", "two"]
        assert all(session["blobs"] == 1 and session["blob_bytes"] > 0 for session in shown["sessions"])
        assert shown["journal"]["records"] > 4
        assert shown["total_bytes"] > shown["journal"]["bytes"] > 0
        assert [place["place"] for place in shown["blobs"]] == ["db"]
        assert run("du", home=home).code == 0

    @pytest.mark.req("H18.dedup_is_real", "S0.storage.dedup_across_snapshots")
    def test_counts_equal_bytes_once(self, home: Path) -> None:
        before = run("du", "--json", home=home).json["blobs"]
        with mulligan.open(str(home.parent / "root"), store=str(home)) as opened:
            for name in ("three", "four"):
                with opened.session(name).call() as call:
                    call.write_file(f"{name}.txt", "one\n" * 200)
        after = run("du", "--json", home=home).json
        assert after["blobs"] == before
        assert [(session["id"], session["blobs"]) for session in after["sessions"]][:2] == [("four", 1), ("one", 1)]

    @pytest.mark.req("H19.state_outside_tree")
    def test_no_state_is_in_the_workspace(self, home: Path) -> None:
        assert sorted(path.name for path in (home.parent / "root").rglob("*")) == ["one.txt", "two.txt"]

    def test_shows_one_session_or_root(self, home: Path) -> None:
        one = run("du", "--session", "one", "--json", home=home).json
        assert [session["id"] for session in one["sessions"]] == ["one"]
        here = run("du", "--root", str(home.parent / "root"), "--json", home=home).json
        assert [session["id"] for session in here["sessions"]] == ["one", "two"]
        assert run("du", "--root", str(home), "--json", home=home).json["sessions"] == []
        assert run("du", "--session", "none", home=home).code == 2


@pytest.mark.req("D14.cli.doctor")
class TestDoctor:
    WANTED = (
        *("python", "sqlite", "state directory", "openat2", "exchange", "leases", "seccomp notify", "overlay"),
        *("landlock", "git", "rg"),
    )

    def test_reports_without_creating_anything(self, tmp_path: Path) -> None:
        done = run("doctor", "--json", home=tmp_path / "none")
        names = [finding["name"] for finding in done.json["findings"]]
        assert (done.code, set(self.WANTED) - set(names), list(tmp_path.iterdir())) == (0, set(), [])

    def test_reports_whether_the_store_opens(self, home: Path, tmp_path: Path) -> None:
        good = run("doctor", "--json", home=home)
        assert (good.code, _finding(good, "store")["ok"]) == (0, True)
        bad = tmp_path / "bad"
        bad.mkdir()
        (bad / "store.db").write_bytes(b"nothing of ours" * 100)
        done = run("doctor", "--json", home=bad)
        found = _finding(done, "store")
        assert (done.code, found["ok"], found["code"]) == (3, False, "store_corrupt")
        assert run("doctor", home=bad).code == 3


def _finding(done: Done, name: str) -> dict[str, Any]:
    (found,) = [finding for finding in done.json["findings"] if finding["name"] == name]
    assert isinstance(found, dict)
    return found


class TestProgram:
    def test_without_arguments_it_lists_the_verbs(self) -> None:
        done = run()
        assert done.code == 0
        assert all(verb in done.out for verb in VERBS)

    @pytest.mark.req("D14.cli.exit_2")
    @pytest.mark.parametrize("arguments", [["nope"], ["verify", "--nope"], ["--nope"], ["verify", "extra"]])
    def test_bad_usage_exits_with_2_and_one_line(self, arguments: list[str]) -> None:
        done = run(*arguments)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)

    @pytest.mark.req("D14.cli.root_option", "D14.cli.session_option", "D14.cli.store_option", "D14.cli.json_option")
    def test_every_verb_of_the_table_can_be_loaded_and_takes_the_common_options(self) -> None:
        assert isinstance(cli, LazyGroup)
        context = cli.make_context("mulligan", ["verify"])
        # The demo works in a folder and a store of its own.
        for name in set(cli.list_commands(context)) - {"demo"}:
            verb = cli.get_command(context, name)
            assert verb is not None
            for leaf in verb.commands.values() if isinstance(verb, click.Group) else [verb]:
                options = {option for parameter in leaf.params for option in parameter.opts}
                assert {"--root", "--session", "--store", "--json"} <= options, (name, leaf.name)

    def test_showing_help_loads_no_verb_and_nothing_heavy(self) -> None:
        assert _loaded_by("--help") & {"mulligan.cli.store", "mulligan.store", "apsw", "orjson", "pydantic"} == set()

    def test_the_version_loads_nothing_that_help_does_not_load(self) -> None:
        assert _loaded_by("--version") - _loaded_by("--help") == set()

    @pytest.mark.req("D17.cold_verbs")
    @pytest.mark.parametrize("verb", ["status", "log", "diff", "undo", "redo", "rollback"])
    def test_log_and_undo_load_no_tools_and_no_exec(self, home: Path, verb: str) -> None:
        loaded = _loaded_by(verb, "--store", str(home), "--root", str(home.parent / "root"))
        heavy = {"pydantic", "mulligan.effects", "mulligan.files.search", "mulligan.exec.capture.notify"}
        slow = {"asyncio", "logging", "subprocess", "tarfile", "importlib.metadata", "mulligan.session.state.slices"}
        assert (loaded & (heavy | slow), "mulligan.history.log" in loaded) == (set(), True)

    @pytest.mark.req("D17.cold_verbs", "D17.heavy_imports_local")
    @pytest.mark.parametrize("words", [["exec", "--", "true"], ["call", "read_file", "--args", '{"path": "one.txt"}']])
    def test_a_command_and_a_call_load_only_what_they_need(self, home: Path, words: list[str]) -> None:
        loaded = _loaded_by(words[0], "--store", str(home), "--root", str(home.parent / "root"), *words[1:])
        others = {"mulligan.effects.read", "mulligan.files.search"} if words[0] == "exec" else {"mulligan.effects.exec"}
        slow = {"pydantic", "asyncio", "tarfile", "mulligan.effects.patch", "mulligan.session.bundle.redaction"}
        assert (loaded & (others | slow), "mulligan.effects.perform" in loaded) == (set(), True)

    def test_a_closed_output_pipe_is_no_crash(self, home: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        environ = {**os.environ, "MULLIGAN_HOME": str(home)}
        command = [sys.executable, "-m", "mulligan.cli", "du"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environ, timeout=600, check=False)
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, b"")


class TestOutput:
    @pytest.mark.req("D14.cli.progress_and_colour")
    @pytest.mark.parametrize(("verb", "sign"), [("verify", " %"), ("log", "\x1b[")], ids=["progress", "colour"])
    def test_progress_and_colour_are_for_terminals(self, home: Path, verb: str, sign: str) -> None:
        options = ["--store", str(home), "--root", str(home.parent / "root")]
        piped = run(verb, *options)
        assert (piped.code, "\x1b" in piped.out + piped.err, piped.err) == (0, False, "")
        controller, terminal = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
        command = [sys.executable, "-m", "mulligan.cli", verb, *options]
        subprocess.run(command, stdout=terminal, stderr=terminal, env=environ, timeout=600, check=True)
        shown = os.read(controller, 100_000).decode()
        os.close(controller)
        os.close(terminal)
        assert sign in shown

    @pytest.mark.req("D18.terminal_escapes")
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("plain é 日本", "plain é 日本"),
            ("\x1b[31mred", "\\x1b[31mred"),
            ("a\r\nb\t", "a\\x0d\\x0ab\\x09"),
            ("\x9b31m", "\\x9b31m"),
            ("\u202etxt.exe", "\\u202etxt.exe"),
            ("\udcff", "\\xff"),
            ("\ud800", "\\ud800"),
            ("\U000e0041", "\\U000e0041"),
        ],
    )
    def test_file_names_are_escaped_for_the_terminal(self, text: str, shown: str) -> None:
        assert visible(text) == shown

    @pytest.mark.parametrize(
        ("size", "shown"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_572_864, "1.5 MiB"), (2**31, "2.0 GiB")],
    )
    def test_sizes_are_in_words(self, size: int, shown: str) -> None:
        assert size_words(size) == shown

    @pytest.mark.req("D18.terminal_escapes")
    def test_file_names_in_errors_are_escaped_for_the_terminal(self) -> None:
        assert "\x1b" not in run("verify", "--store", "foo://\x1b[2J").err
