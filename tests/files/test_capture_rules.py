"""`capture.never` and `capture.digest_only`: the state directory has no byte of such a path, and aborts restore it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.agents.hooks.recorder import HookEvent, Kind, Recorder
from mulligan.servers.acp.recorder import ProxyRecorder
from mulligan.servers.acp.undo import Workspaces
from mulligan.store.journal import RECORDS
from mulligan.values.clock import monotonic_s
from tests.state_search import files_holding

OLD = b"OLD=" + os.urandom(24).hex().encode() + b"\n"
NEW = b"NEW=" + os.urandom(24).hex().encode() + b"\n"
SETTINGS = ("never", "digest_only")
KINDS: tuple[Kind, ...] = ("pre", "post")


class Place:
    """A root with a secret file, a state directory and a configuration of its own."""

    def __init__(self, base: Path) -> None:
        self.root, self.home, self.config = base / "work", base / "home", base / "config" / "mulligan"
        self.root.mkdir()
        self.config.mkdir(parents=True)
        self.env = self.root / ".env"
        self.env.write_bytes(OLD)
        self.env.chmod(0o640)
        self.new = base / "new"
        self.new.write_bytes(NEW)

    def configure(self, setting: str, *patterns: str) -> None:
        (self.config / "config.toml").write_text(f"[capture]\n{setting} = {json.dumps(patterns or ['.env'])}\n")

    def open(self) -> mulligan.Mulligan:
        return mulligan.open(self.root)

    def leaks(self, setting: str) -> list[str]:
        """Where the state directory has bytes of the secret; of a path that is `never` captured, its digests too."""
        needles = [OLD.strip(), NEW.strip()]
        if setting == "never":
            raw = [hashlib.sha256(data).digest() for data in (OLD, NEW)]
            needles += [*raw, *(one.hex().encode() for one in raw)]
        return [name for needle in needles for name in files_holding(self.home, needle)]

    def strays(self) -> list[str]:
        return [path.name for path in self.root.rglob(".mulligan-*")]

    def verify(self) -> None:
        run("verify", root=self.root)


def run(*words: str, root: Path, code: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "mulligan", words[0], "--root", str(root), *words[1:]], capture_output=True, text=True
    )
    assert done.returncode == code, done
    return done


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Place(tmp_path)


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest, place: Place) -> Iterator[str]:
    place.configure(request.param)
    yield request.param
    assert place.leaks(request.param) == []
    assert place.strays() == []
    place.verify()


def outcome(way: Any, path: str = ".env") -> tuple[str, str | None]:
    return next((one.outcome, one.reason) for one in way.outcomes if one.path == path)


def coverage(m: mulligan.Mulligan, call: str) -> list[dict[str, str]]:
    shown = run("show", "--json", call, root=Path(m.root))
    found: list[dict[str, str]] = json.loads(shown.stdout)["coverage"]
    return found


NOT_CAPTURED = {"path": ".env", "reason": "not_captured"}
WRITES = [
    ("write_file", {"path": ".env", "content": NEW.decode()}),
    ("edit_file", {"path": ".env", "old_string": OLD.decode(), "new_string": NEW.decode()}),
    (
        "apply_patch",
        {"patch": f"*** Begin Patch\n*** Update File: .env\n@@\n-{OLD.decode()}+{NEW.decode()}*** End Patch\n"},
    ),
    ("delete", {"path": ".env"}),
    ("move", {"path": ".env", "to": "sub/.env"}),
]


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only", "D18.capture_undo_skips")
@pytest.mark.parametrize(("tool", "params"), WRITES, ids=[tool for tool, _ in WRITES])
def test_a_file_tool_writes_a_path_that_is_not_captured(
    place: Place, setting: str, tool: str, params: dict[str, Any]
) -> None:
    (place.root / "sub").mkdir()
    (place.root / "other").write_text("one\n")
    with place.open() as m:
        session = m.session("s")
        with session.call() as call:
            receipt = call.perform(tool, **params)
            assert receipt.status in ("ok", "applied"), receipt.to_dict()
            assert place.leaks(setting) == []
            call.write_file("other", "two\n")
        written = {path.name: path.read_bytes() for path in place.root.rglob("*") if path.is_file()}
        assert NOT_CAPTURED in coverage(m, call.id)
        way = session.undo(call.id)
        assert outcome(way) == ("skipped", "not_captured")
        assert outcome(way, "other") == ("restored", None)
        assert {**written, "other": b"one\n"} == {
            path.name: path.read_bytes() for path in place.root.rglob("*") if path.is_file()
        }


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"path": ".env", "content": NEW.decode(), "unknown": 1}),
    ("write_file", {"path": "../.env", "content": NEW.decode()}),
    ("write_file", {"file_path": "/elsewhere/.env", "content": NEW.decode()}),
    ("write_file", {"path": "vault", "content": NEW.decode()}),
    ("edit_file", {"path": ".env", "old_string": "", "new_string": NEW.decode()}),
    ("apply_patch", {"patch": f"*** Begin Patch\n*** Updte File: .env\n+{NEW.decode()}*** End Patch\n"}),
    ("apply_patch", {"patch": f"--- a/.env\n+++ b/.env\n+{NEW.decode()}", "patch_format": "unified"}),
]


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
@pytest.mark.parametrize(("tool", "given"), REFUSED, ids=[f"{tool}-{index}" for index, (tool, _) in enumerate(REFUSED)])
def test_a_refused_request_stores_no_byte_that_it_came_with(
    place: Place, setting: str, tool: str, given: dict[str, Any]
) -> None:
    """The fixture looks for the bytes in the state directory."""
    (place.root / "vault").mkdir()
    place.configure(setting, ".env", "vault/")
    with place.open() as m:
        receipt, _ = m.session("s").perform(tool, given)
    assert receipt.status != "ok"
    assert place.env.read_bytes() == OLD


@pytest.mark.req("D18.capture_undo_skips")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("effect", ["host.fs.write_file", "host.exec"])
def test_undo_of_a_call_that_changed_nothing_else_skips_the_path_and_no_earlier_call_is_undone(
    place: Place, setting: str, effect: str, named: bool
) -> None:
    with place.open() as m:
        session = m.session("s")
        session.perform("host.fs.write_file", {"path": "beside", "content": "1"})
        changing = {"argv": ["sh", "-c", f"cat {place.new} > .env"]}
        writing = {"path": ".env", "content": NEW.decode()}
        _, call = session.perform(effect, writing if effect == "host.fs.write_file" else changing)
        way = session.undo(call if named else None)
        assert [(one.path, one.outcome, one.reason) for one in way.outcomes] == [(".env", "skipped", "not_captured")]
        assert (place.env.read_bytes(), (place.root / "beside").read_text()) == (NEW, "1")


@pytest.mark.req("D18.capture_abort")
@pytest.mark.parametrize(("tool", "params"), WRITES, ids=[tool for tool, _ in WRITES])
def test_an_aborted_call_restores_a_path_that_is_not_captured(
    place: Place, setting: str, tool: str, params: dict[str, Any]
) -> None:
    (place.root / "sub").mkdir()
    before = place.env.stat()
    with place.open() as m, pytest.raises(ZeroDivisionError), m.session("s").call() as call:
        assert call.perform(tool, **params).status in ("ok", "applied")
        assert call.write_file(".env", "third\n").status == "ok"
        raise ZeroDivisionError
    after = place.env.stat()
    assert place.env.read_bytes() == OLD
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert list((place.root / "sub").iterdir()) == []


@pytest.mark.req("D18.capture_abort")
@pytest.mark.parametrize("other", ["inside", "outside"])
@pytest.mark.parametrize("ends", ["aborted", "committed"])
def test_a_file_with_several_names_that_are_not_captured(place: Place, setting: str, other: str, ends: str) -> None:
    (place.root / "sub").mkdir()
    inside, outside = place.root / "sub" / ".env", place.root.parent / "outside"
    os.link(place.env, inside)
    if other == "outside":
        os.link(place.env, outside)
    with place.open() as m, m.session("s").call() as call:
        assert call.write_file(".env", NEW.decode()).status == "ok"
        assert (place.env.read_bytes(), inside.read_bytes()) == (NEW, NEW)
        if ends == "aborted":
            call.fail("on purpose")
    expected = OLD if ends == "aborted" else NEW
    assert (place.env.read_bytes(), inside.read_bytes()) == (expected, expected)
    assert place.env.samefile(inside)
    assert other == "inside" or outside.read_bytes() == OLD


@pytest.mark.req("D18.capture_abort")
def test_a_failing_effect_restores_what_the_effect_before_it_wrote(place: Place, setting: str) -> None:
    with place.open() as m, m.session("s").call() as call:
        assert call.write_file(".env", NEW.decode()).status == "ok"
        patch = "*** Begin Patch\n*** Delete File: .env\n*** Delete File: missing\n*** End Patch\n"
        assert call.apply_patch(patch).status != "ok"
        assert place.env.read_bytes() == NEW
        (place.root / "folder").mkdir()
        (place.root / "folder" / ".env").write_bytes(OLD)
        assert call.delete("folder", recursive=True).status == "ok"
        call.fail("on purpose")
    assert place.env.read_bytes() == OLD
    assert (place.root / "folder" / ".env").read_bytes() == OLD


_DIES = """
import os, signal, sys, mulligan
from mulligan.testing import FaultPlan
with mulligan.open(sys.argv[1]) as m:
    with m.session("s").call() as call:
        call.write_file("other", "mine")
        assert call.write_file(".env", sys.argv[2]).status == "ok"
        call.write_file("sub/.env", sys.argv[2], create_parents=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.req("D18.capture_abort")
def test_recovery_restores_a_path_that_is_not_captured(place: Place, setting: str) -> None:
    words = [sys.executable, "-c", _DIES.replace("from mulligan.testing import FaultPlan\n", ""), str(place.root)]
    assert subprocess.run([*words, NEW.decode()]).returncode == -signal.SIGKILL
    assert place.env.read_bytes() == NEW
    with place.open() as m:
        assert [one.put_back for one in m.recovered] == [["sub/.env", "sub", ".env", "other"]]
    assert place.env.read_bytes() == OLD
    assert sorted(path.name for path in place.root.iterdir()) == [".env"]


@pytest.mark.req("D18.capture_command")
@pytest.mark.parametrize("strategy", ["notify", "watch", "scan", "overlay"])
@pytest.mark.parametrize("change", ["write", "delete", "create"])
def test_a_commands_change_of_an_uncaptured_path_is_reported_without_bytes(
    place: Place, setting: str, strategy: str, change: str
) -> None:
    commands = {"write": f"cat {place.new} > .env", "delete": "rm .env", "create": "cp .env deep/.env"}
    (place.root / "deep").mkdir()
    path = "deep/.env" if change == "create" else ".env"
    with place.open() as m:
        argv = ["sh", "-c", commands[change] + "; echo 1 > beside"]
        receipt, call = m.session("s").perform("host.exec", {"argv": argv, "strategy": strategy})
        assert receipt.status == "ok", receipt.to_dict()
        assert {"path": path, "reason": "not_captured"} in receipt.coverage
        assert {"path": path, "reason": "not_captured"} in coverage(m, call)
        names = [one["path"] for one in receipt.changes]
        assert names == (["beside"] if setting == "never" else sorted([path, "beside"]))
        now = place.env.read_bytes() if place.env.exists() else None
        way = m.session("s").undo(call)
        assert (outcome(way, path), outcome(way, "beside")) == (("skipped", "not_captured"), ("restored", None))
        assert now == (place.env.read_bytes() if place.env.exists() else None)


@pytest.mark.req("D18.capture_command")
@pytest.mark.parametrize("strategy", ["notify", "watch", "scan"])
def test_an_aborted_command_reports_what_it_changed_and_was_not_captured(
    place: Place, setting: str, strategy: str
) -> None:
    argv = ["sh", "-c", f"cat {place.new} > .env; echo 1 > beside; exit 3"]
    with place.open() as m:
        asked = {"argv": argv, "strategy": strategy, "rollback_on": "nonzero"}
        receipt, call = m.session("s").perform("host.exec", asked)
        assert receipt.error_code == "nonzero_exit"
        assert NOT_CAPTURED in receipt.coverage
        assert NOT_CAPTURED in coverage(m, call)
    assert place.env.read_bytes() == NEW
    assert not (place.root / "beside").exists()
    place.env.write_bytes(OLD)
    said = run("exec", "--strategy", strategy, "--rollback-on", "nonzero", "--", *argv, root=place.root, code=3).stderr
    assert ".env" in said and "beside" not in said


@pytest.mark.req("D18.capture_undo_skips", "D18.capture_command")
@pytest.mark.parametrize("strategy", ["tool", "notify", "watch", "scan", "overlay"])
@pytest.mark.parametrize("to", ["public", "new/public"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_undo_leaves_a_file_that_was_moved_away_from_an_uncaptured_path(
    setting: str, to: str, strategy: str, place: Place
) -> None:
    """Its bytes are nowhere else: nothing can come back at the old path."""
    place.configure(setting)
    (place.root / "new").mkdir()
    with place.open() as m:
        how: tuple[str, dict[str, Any]] = ("host.fs.move", {"path": ".env", "to": to})
        if strategy != "tool":
            how = ("host.exec", {"argv": ["sh", "-c", f"mv .env {to}; echo 1 > beside"], "strategy": strategy})
        receipt, call = m.session("s").perform(*how)
        assert receipt.status == "ok", receipt.to_dict()
        for paths in ([to], None):
            way = m.session("s").undo(call, paths=paths)
            assert outcome(way, to) == ("skipped", "not_captured")
            assert (place.root / to).read_bytes() == OLD
        assert not (place.root / "beside").exists()


@pytest.mark.req("D18.capture_abort", "D18.capture_command")
@pytest.mark.parametrize("strategy", ["notify", "watch", "scan"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_aborted_command_leaves_a_file_that_it_moved_away_from_an_uncaptured_path(
    setting: str, strategy: str, place: Place
) -> None:
    place.configure(setting)
    argv = ["sh", "-c", "mkdir new; mv .env new/public; echo 1 > beside; exit 3"]
    with place.open() as m:
        asked = {"argv": argv, "strategy": strategy, "rollback_on": "nonzero"}
        receipt, call = m.session("s").perform("host.exec", asked)
        assert receipt.error_code == "nonzero_exit"
        assert NOT_CAPTURED in receipt.coverage
        assert {"path": "new/public", "reason": "not_captured"} in coverage(m, call)
    assert (place.root / "new/public").read_bytes() == OLD
    assert not (place.root / "beside").exists()


@pytest.mark.req("D18.capture_command")
def test_an_isolated_command_that_fails_leaves_it_as_it_was(place: Place, setting: str) -> None:
    argv = ["sh", "-c", f"cat {place.new} > .env; exit 3"]
    with place.open() as m:
        m.session("s").perform("host.exec", {"argv": argv, "isolate": True, "rollback_on": "nonzero"})
    assert place.env.read_bytes() == OLD


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
def test_reads_searches_and_snapshots_store_no_byte(place: Place, setting: str) -> None:
    (place.root / "link").symlink_to(".env")
    (place.root / "other").write_text("x\n")
    with place.open() as m:
        session = m.session("s")
        with session.call() as call:
            for path in (".env", "link"):
                assert call.read_file(path).content == {"inline_text": {"text": OLD.decode()}}
            assert OLD.decode().strip() in call.grep("OLD=").matches["inline_text"]["text"]
            call.stat(".env")
            call.edit_file(".env", "not there " + NEW.decode(), "x")
        from mulligan.builtins import hostlib_fs_restore, hostlib_fs_snapshot

        hostlib_fs_snapshot(session_id="s", scope_id="scope", paths=[str(place.env), str(place.root / "other")])
        place.env.write_bytes(NEW)
        (place.root / "other").write_text("y\n")
        restored = hostlib_fs_restore(session_id="s", snapshot_id="scope")
        assert str(place.env) not in restored["restored_paths"]
        assert (place.root / "other").read_text() == "x\n"
        assert place.env.read_bytes() == NEW


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
def test_more_than_fits_inline_is_refused_because_it_would_become_a_blob(place: Place, setting: str) -> None:
    place.env.write_bytes(OLD * 2_000)
    with place.open() as m, m.session("s").call() as call:
        receipt = call.read_file(".env")
        assert (receipt.status, receipt.error_code) == ("error", "not_captured")
        assert call.read_file(".env", max_bytes=1_000).status == "ok"


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
def test_mcp_snapshots_and_leases_store_no_byte(place: Place, setting: str) -> None:
    (place.root / "other").write_text("x\n")
    created = _mcp(place, "snapshot_create", {"paths": ["."]})
    assert created["skipped"] == [{"path": ".env", "reason": "not_captured"}]
    assert _mcp(place, "snapshot_file", {"path": ".env"})["content"] == OLD.decode()
    assert len(_mcp(place, "snapshot_list", {})["entries"]) == 2
    assert len(_mcp(place, "snapshot_grep", {"pattern": "OLD"})["matches"]) == 1
    assert _mcp(place, "workspace_write_file", {"path": ".env", "content": NEW.decode()})["written_bytes"] == len(NEW)
    patch = f"--- /dev/null\n+++ b/sub/.env\n@@ -0,0 +1 @@\n+{NEW.decode()}"
    asked = {"mode": "snapshot", "snapshot_id": created["snapshot_id"], "patch": patch}
    assert [one["path"] for one in _mcp(place, "workspace_apply_patch", asked)["rejects"]] == ["sub/.env"]
    assert place.env.read_bytes() == NEW


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only", "D18.capture_undo_skips")
@pytest.mark.parametrize("change", ["write", "create", "mode", "move", "delete"])
def test_what_a_fork_did_to_a_path_that_is_not_captured_is_merged(place: Place, setting: str, change: str) -> None:
    place.configure(setting, ".env", "new.env")
    (place.root / "other").write_text("x\n")
    with place.open() as m:
        session = m.session("s")
        fork = session.fork(files="copy", to=str(place.root.parent / "fork"))
        with fork.call("works") as call:
            call.write_file("other", "y\n")
            if change in ("write", "create"):
                call.write_file(".env" if change == "write" else "new.env", NEW.decode())
            elif change == "mode":
                call.exec(["chmod", "600", ".env"])
            elif change == "move":
                call.move(".env", "new.env")
            else:
                call.delete(".env")
        merged = fork.merge()
        assert merged.ok and not place.strays()
        found = {path.name: (path.read_bytes(), path.stat().st_mode & 0o777) for path in place.root.iterdir()}
        wanted: dict[str, dict[str, tuple[bytes, int]]] = {
            "write": {".env": (NEW, 0o640)},
            "create": {".env": (OLD, 0o640), "new.env": (NEW, 0o644)},
            "mode": {".env": (OLD, 0o600)},
            "move": {"new.env": (OLD, 0o640)},
            "delete": {},
        }
        assert found == wanted[change] | {"other": (b"y\n", 0o644)}
        undone = session.undo()
        skipped = {"write": {".env"}, "create": {"new.env"}, "mode": {".env"}, "move": {".env", "new.env"}}
        outcomes = {one.path: (one.outcome, one.reason) for one in undone.outcomes}
        left = dict.fromkeys(skipped.get(change, {".env"}), ("skipped", "not_captured"))
        assert outcomes == {"other": ("restored", None)} | left


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
@pytest.mark.parametrize("on_conflict", ["merge", "overwrite"])
def test_a_merge_overwrites_no_bytes_that_it_cannot_store(place: Place, setting: str, on_conflict: Any) -> None:
    with place.open() as m:
        session = m.session("s")
        fork = session.fork(files="copy", to=str(place.root.parent / "fork"))
        with fork.call("works") as call:
            call.write_file(".env", NEW.decode())
        place.env.write_text("a person's\n")
        merged = fork.merge(on_conflict=on_conflict)
        assert not merged.ok and outcome(merged) == ("conflicted", "not_captured")
        assert place.env.read_text() == "a person's\n"


def _mcp(place: Place, tool: str, arguments: dict[str, Any]) -> Any:
    frames = [
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": _HELLO},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
    ]
    words = [sys.executable, "-m", "mulligan", "mcp", "--root", str(place.root)]
    text = "".join(json.dumps(frame) + "\n" for frame in frames)
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    answers = {one["id"]: one["result"] for one in map(json.loads, done.stdout.splitlines()) if "id" in one}
    return answers[1]["structuredContent"]


_HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
def test_a_persons_save_is_noticed_and_not_stored(place: Place, setting: str) -> None:
    with place.open() as m:
        session = m.session("s")
        for content in ("one\n", "two\n"):
            with session.call() as call:
                assert call.write_file(".env", content).status == "ok"
            place.env.write_bytes(NEW)
        with session.call() as call:
            assert call.write_file(".env", "three\n").status == "ok"
            place.env.write_bytes(OLD)
            assert call.write_file(".env", "four\n").status == "ok"
            call.fail("on purpose")
    assert place.env.read_bytes() == OLD


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only")
def test_a_save_between_two_writes_of_a_call_is_on_record_only_where_its_digest_may_be(
    place: Place, setting: str
) -> None:
    with place.open() as m:
        with m.session("s").call() as call:
            assert call.write_file(".env", "one\n").status == "ok"
            place.env.write_bytes(NEW)
            assert call.write_file(".env", "two\n").status == "ok"
        with m.store.read() as tx:
            recorded = [row.body for row in tx.select(RECORDS) if b'"kind":"external"' in row.body]
    assert len(recorded) == (0 if setting == "never" else 1)


@pytest.mark.req("D18.capture_config")
def test_the_projects_file_adds_patterns_and_takes_none_back(place: Place) -> None:
    place.configure("never", ".env")
    project = place.root / ".mulligan.toml"
    project.write_text('[capture]\nnever = ["!.env", "keys/"]\ndigest_only = [".env", "*.pem", "!a.pem"]\n')
    (place.root / "keys").mkdir()
    with place.open() as m:
        paths = (".env", "keys/a", "sub/b.pem", "a.pem", "plain")
        found = {}
        for path in paths:
            with m.session("s").call() as call:
                assert call.write_file(path, NEW.decode(), create_parents=True).status == "ok"
            shown = json.loads(run("show", "--json", call.id, root=place.root).stdout)
            named = [one["path"] for one in shown["changes"] if one["path"] == path]
            found[path] = (bool(named), {"path": path, "reason": "not_captured"} in shown["coverage"])
    assert found == {
        ".env": (False, True),
        "keys/a": (False, True),
        "sub/b.pem": (True, True),
        "a.pem": (True, False),
        "plain": (True, False),
    }


@pytest.mark.req("D18.capture_config")
@pytest.mark.parametrize(
    "text",
    [
        "[capture\n",
        'capture = "x"\n',
        '[capture]\nnever = ".env"\n',
        "[capture]\nnever = [1]\n",
        "[capture]\nno = []\n",
    ],
)
def test_a_broken_file_is_refused_by_name_and_changes_nothing(place: Place, text: str) -> None:
    (place.root / ".mulligan.toml").write_text(text)
    with pytest.raises(mulligan.MulliganError) as refused:
        place.open()
    assert refused.value.code == "invalid_config"
    assert ".mulligan.toml" in refused.value.message


@pytest.mark.req("D18.capture_config")
def test_a_pattern_that_is_added_later_is_obeyed_by_a_process_that_runs(place: Place) -> None:
    with place.open() as m:
        (place.root / ".mulligan.toml").write_text('[capture]\nnever = [".env"]\n')
        with m.session("s").call() as call:
            assert call.write_file(".env", NEW.decode()).status == "ok"
    assert place.leaks("never") == []


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only", "D18.capture_command")
@pytest.mark.parametrize("tool", ["Bash", "Write"])
def test_hooks_report_a_change_of_an_uncaptured_path_without_bytes(place: Place, setting: str, tool: str) -> None:
    told = {"Bash": {"command": "make env"}, "Write": {"file_path": str(place.env), "content": NEW.decode()}}[tool]
    with place.open() as m:
        recorder = Recorder(m.open_root)
        for kind in KINDS:
            event = HookEvent(
                kind=kind, agent="claude", session="s", cwd=str(place.root), turn="t", label="1", tool=tool, input=told
            )
            recorder.handle(event, until=monotonic_s() + 60)
            if kind == "pre":
                place.env.write_bytes(NEW)
                if tool == "Bash":  # `Write` changes only the file that it names
                    (place.root / "beside").write_text("1")
        recorder.close()
        check_observed(m, place)


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only", "D18.capture_command")
@pytest.mark.parametrize("kind", ["execute", "edit"])
def test_the_acp_proxy_reports_a_change_of_an_uncaptured_path_without_bytes(
    place: Place, setting: str, kind: str
) -> None:
    with place.open() as m:
        follower = ProxyRecorder(Workspaces(lambda folder: m, lambda: m.store), pid=os.getpid())
        follower.attach("s", str(place.root))
        follower.prompt("s", "change it")
        locations = [{"path": str(place.env)}] if kind == "edit" else []
        diff = {"type": "diff", "path": str(place.env), "oldText": OLD.decode(), "newText": NEW.decode()}
        told = {"toolCallId": "1", "kind": kind, "locations": locations, "content": [diff] if kind == "edit" else []}
        follower.tool("s", {**told, "status": "in_progress"}, None)
        place.env.write_bytes(NEW)
        (place.root / "beside").write_text("1")
        follower.tool("s", {**told, "status": "completed"}, None)
        follower.end_prompt("s")
        follower.end("session_ended")
        check_observed(m, place)


@pytest.mark.req("D18.capture_never", "D18.capture_digest_only", "D18.capture_command")
@pytest.mark.parametrize("strategy", ["notify", "watch", "scan"])
def test_run_reports_a_change_of_an_uncaptured_path_without_bytes(place: Place, setting: str, strategy: str) -> None:
    line = f"cat {place.new} > .env; printf 1 > beside"
    words = ["--strategy", strategy, "--", "sh", "-c", line]
    done = subprocess.run([sys.executable, "-m", "mulligan", "run", *words], cwd=place.root, capture_output=True)
    assert done.returncode == 0, done
    with place.open() as m:
        check_observed(m, place)


def check_observed(m: mulligan.Mulligan, place: Place) -> None:
    """One call of an agent has changed `.env`, and made `beside` if that is there: only `beside` goes back."""
    made = [("restored", None)] if (place.root / "beside").exists() else []
    (row,) = [one for one in json.loads(run("log", "--json", root=place.root).stdout) if not one["external"]]
    assert row["coverage"] == [NOT_CAPTURED]
    way = m.session(row["session_id"]).undo(row["id"])
    assert outcome(way) == ("skipped", "not_captured")
    assert [(one.outcome, one.reason) for one in way.outcomes if one.path == "beside"] == made
    assert place.env.read_bytes() == NEW and not (place.root / "beside").exists()
