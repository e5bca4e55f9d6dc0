"""The process behind the hooks: quick with it, right without it, and never in an agent's way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mulligan.agents.hooks import client
from mulligan.agents.hooks.background import take_lock
from mulligan.agents.hooks.recorder import parse_message
from mulligan.agents.hooks.socket import Spool
from mulligan.hosts.settings import CLIENT, command_for
from tests.agents.hooks.hooked_workspace import HookedWorkspace, event, gone
from tests.state_search import files_holding

AGENT_PATIENCE_S = 2.0


def ruin(workspace: HookedWorkspace) -> None:
    (workspace.root / ".env").write_text("KEY=2\n")
    (workspace.root / "gone.txt").unlink()


def bash(workspace: HookedWorkspace, label: str, act: Any) -> None:
    workspace.tool("Bash", {"command": "ruin"}, label, act)


def changes(workspace: HookedWorkspace) -> list[tuple[str | None, dict[str, str]]]:
    rows = workspace.log()[::-1]
    return [(row["label"], {one["path"]: one["kind"] for one in row["changes"]}) for row in rows]


RUINED = {".env": "modified", "gone.txt": "deleted"}


@pytest.mark.req("D14.hooks.edits_and_shell", "D7.hook_observes_command")
def test_a_command_that_hooks_reported_is_undone(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    workspace.hook("UserPromptSubmit", prompt="ruin it")
    bash(workspace, "toolu_1", lambda: ruin(workspace))
    workspace.hook("Stop")
    assert changes(workspace) == [("toolu_1", RUINED)]
    shown = json.loads(workspace.mulligan("show", "toolu_1", "--json").stdout)
    assert shown["prompt"] == "ruin it"
    workspace.undo()
    assert (workspace.root / ".env").read_text() == "KEY=1\n"
    assert (workspace.root / "gone.txt").read_text() == "stay\n"


@pytest.mark.req("D18.capture_never", "D18.capture_config")
@pytest.mark.parametrize("process", ["on", "off"])
def test_hooks_obey_the_settings_below_xdg_config_home(
    workspace: HookedWorkspace, tmp_path: Path, process: str
) -> None:
    """Also if a background process with other settings serves the store already."""
    workspace.hook("SessionStart")
    write_settings(tmp_path / "config")
    workspace.extra |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "MULLIGAN_HOOKS_PROCESS": process}
    secret = os.urandom(24).hex()
    bash(workspace, "toolu_1", lambda: (workspace.root / ".env").write_text(secret))
    assert changes(workspace) == [("toolu_1", {})]
    assert workspace.log()[0]["coverage"] == [{"path": ".env", "reason": "not_captured"}]
    workspace.stop()
    # The fixture stops the process with other settings.
    workspace.extra.clear()
    assert files_holding(workspace.store, secret.encode()) == []


@pytest.mark.req("D18.capture_never")
@pytest.mark.parametrize("tool", ["Write", "apply_patch", "mcp__files__save"])
def test_an_event_that_cannot_be_delivered_is_kept_without_the_contents_of_files(
    workspace: HookedWorkspace, tool: str
) -> None:
    workspace.hook("SessionStart")
    workspace.stop()
    sound = (workspace.store / "store.db").read_bytes()
    (workspace.store / "store.db").write_bytes(b"this is no database at all" * 100)
    secret, path = os.urandom(24).hex(), str(workspace.root / ".env")
    patch = f"*** Begin Patch\n*** Update File: {path}\n@@\n-KEY=1\n+{secret}\n*** End Patch"
    given = {"apply_patch": {"command": patch, "input": patch}}.get(tool, {"file_path": path, "content": secret})
    about: dict[str, Any] = {"tool_name": tool, "tool_input": given, "tool_use_id": "toolu_1"}
    workspace.hook("PreToolUse", **about)
    (workspace.root / ".env").write_text(secret)
    workspace.hook("PostToolUse", **about, tool_response={"content": secret})
    workspace.hook("PostToolUseFailure", **about, error=f"It is not {secret}")
    spool = Spool(workspace.folder)
    assert len(spool.names()) == 3
    kept = b"".join(map(spool.read, spool.names()))
    assert secret.encode() not in kept and path.encode() in kept
    workspace.stop()
    (workspace.store / "store.db").write_bytes(sound)
    workspace.hook("Stop")
    assert changes(workspace) == [("toolu_1", {".env": "modified"})]
    workspace.undo()
    assert (workspace.root / ".env").read_text() == "KEY=1\n"


@pytest.mark.req("D18.capture_never")
def test_the_error_of_a_tool_on_a_path_that_is_not_captured_is_not_stored(workspace: HookedWorkspace) -> None:
    (workspace.root / ".mulligan.toml").write_text('[capture]\nnever = [".env"]\n')
    secret = os.urandom(24).hex()
    for name, error in ((".env", f"{secret} is not there"), ("gone.txt", "nothing is there")):
        about: dict[str, Any] = {
            "tool_input": {"file_path": str(workspace.root / name)},
            "tool_use_id": name,
            "tool_name": "Edit",
        }
        workspace.hook("PreToolUse", **about)
        workspace.hook("PostToolUseFailure", **about, error=error)
    assert "nothing is there" in workspace.mulligan("show", "gone.txt").stdout
    workspace.stop()
    assert files_holding(workspace.store, secret.encode()) == []


def write_settings(config: Path) -> None:
    (config / "mulligan").mkdir(parents=True)
    (config / "mulligan" / "config.toml").write_text('[capture]\nnever = [".env"]\n')


def test_the_prompt_is_read_from_the_agents_own_transcript_file(workspace: HookedWorkspace, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    lines = [
        {"type": "user", "message": {"role": "user", "content": "an older wish"}},
        {"type": "user", "message": {"role": "user", "content": "the wish"}},
        {"type": "assistant", "message": {"content": [{"type": "tool_use", "id": "toolu_1", "name": "Bash"}]}},
        {"type": "user", "message": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}},
        {"type": "user", "message": {"role": "user", "content": "a later wish"}},
    ]
    talk.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: dict[str, Any] = {
        "tool_name": "Bash",
        "tool_input": {},
        "tool_use_id": "toolu_1",
        "transcript_path": str(talk),
    }
    workspace.hook("PreToolUse", **told)
    ruin(workspace)
    workspace.hook("PostToolUse", **told)
    shown = json.loads(workspace.mulligan("show", "toolu_1", "--json").stdout)
    assert (shown["prompt"], shown["transcript"]) == ("the wish", str(talk))


def test_only_the_owner_can_connect_to_the_background_process(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    folder = Path(workspace.folder)
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (workspace.store, folder.parent, folder, folder / "keeper.sock")
    ]
    assert modes == [0o700, 0o700, 0o700, 0o600]


def test_the_background_process_does_not_inherit_the_agents_secrets(workspace: HookedWorkspace) -> None:
    workspace.extra["ANTHROPIC_API_KEY"] = "secret"
    workspace.hook("SessionStart")
    pid = workspace.keeper_pid()
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.readlink(f"/proc/{pid}/fd/1") == os.devnull
    assert os.getsid(pid or 0) != os.getsid(0)


def test_two_background_processes_started_at_once_end_as_one(workspace: HookedWorkspace) -> None:
    threads = [threading.Thread(target=workspace.hook, args=("SessionStart",)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workspace.hook("SessionStart")
    assert take_lock(workspace.folder, wait=False) is None
    one = workspace.keeper_pid()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        if pid != one and _works_in(pid, workspace.folder):
            with gone(pid):
                """It lost, and is on its way out."""
    assert workspace.keeper_pid() == one


def _works_in(pid: int, folder: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == folder
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_background_process_that_dies_inside_a_call_loses_nothing(
    workspace: HookedWorkspace, number: signal.Signals
) -> None:
    workspace.hook("SessionStart")
    bash(workspace, "warm", lambda: None)

    def die_and_ruin() -> None:
        pid = workspace.keeper_pid()
        assert pid is not None
        with gone(pid):
            os.kill(pid, number)
        ruin(workspace)

    bash(workspace, "toolu_1", die_and_ruin)
    workspace.hook("Stop")
    assert changes(workspace)[-1] == ("toolu_1", RUINED)
    workspace.undo("toolu_1")
    assert (workspace.root / "gone.txt").read_text() == "stay\n"


def test_a_background_process_ends_when_its_folder_is_deleted(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    pid = workspace.keeper_pid()
    assert pid is not None
    with gone(pid):
        os.rename(workspace.store, workspace.store.parent / "elsewhere")


@pytest.mark.req("D14.hooks.without_background")
def test_hooks_record_calls_without_a_background_process(workspace: HookedWorkspace) -> None:
    workspace.extra["MULLIGAN_HOOKS_PROCESS"] = "off"
    workspace.hook("UserPromptSubmit", prompt="ruin it")
    bash(workspace, "toolu_1", lambda: ruin(workspace))
    workspace.tool(
        "Edit",
        {"file_path": str(workspace.root / "a.txt")},
        "toolu_2",
        lambda: (workspace.root / "a.txt").write_text("x"),
    )
    workspace.hook("Stop")
    # Whoever is still at work on an event holds the lock.
    lock = take_lock(workspace.folder, wait=True)
    assert lock is not None
    os.close(lock)
    assert workspace.keeper_pid() is None
    assert changes(workspace) == [("toolu_1", RUINED), ("toolu_2", {"a.txt": "modified"})]
    workspace.undo()
    workspace.undo()
    assert (workspace.root / "gone.txt").read_text() == "stay\n"


@pytest.mark.req("D14.hooks.never_break_agent")
def test_with_a_broken_store_the_tool_still_runs_and_the_gap_is_reported_later(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    bash(workspace, "warm", lambda: None)
    workspace.stop()
    sound = (workspace.store / "store.db").read_bytes()
    (workspace.store / "store.db").write_bytes(b"this is no database at all" * 100)
    bash(workspace, "toolu_1", lambda: ruin(workspace))
    assert len(Spool(workspace.folder).names()) == 2
    trouble = json.loads(workspace.mulligan("hooks", "status", "--json").stdout)
    assert trouble["undelivered"] == 2 and trouble["trouble"]
    workspace.stop()
    (workspace.store / "store.db").write_bytes(sound)
    workspace.hook("Stop")
    assert Spool(workspace.folder).names() == []
    row = next(row for row in workspace.log() if row["label"] == "toolu_1")
    assert {"path": ".", "reason": "hook_missed"} in row["coverage"]


@pytest.mark.req("D14.hooks.never_break_agent")
def test_with_a_hanging_process_the_tool_still_runs_and_the_gap_is_reported_later(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    bash(workspace, "warm", lambda: None)
    pid = workspace.keeper_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    workspace.extra["MULLIGAN_HOOKS_WAIT_S"] = "0.1"
    try:
        bash(workspace, "toolu_1", lambda: ruin(workspace))
    finally:
        os.kill(pid, signal.SIGCONT)
    del workspace.extra["MULLIGAN_HOOKS_WAIT_S"]
    workspace.hook("Stop")
    (row,) = [row for row in workspace.log() if row["label"] == "toolu_1"]
    assert {one["path"]: one["kind"] for one in row["changes"]} == RUINED
    assert row["coverage"] == [{"path": ".", "reason": "hook_missed"}]


def test_a_hook_gives_up_before_the_agents_timeout() -> None:
    assert client.WAIT_S < AGENT_PATIENCE_S


@pytest.mark.req("D14.hooks.never_break_agent")
@pytest.mark.parametrize("given", [b"", b"{}", b"\xff\x00", b"[" * 10_000, b'{"hook_event_name": "PreToolUse"}'])
def test_invalid_hook_input_does_not_stop_the_agent(workspace: HookedWorkspace, given: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", CLIENT, "claude"], input=given, env=workspace.env, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert Spool(workspace.folder).names() == []


@pytest.mark.req("D14.hooks.never_break_agent")
def test_an_unusable_state_directory_does_not_stop_the_agent(workspace: HookedWorkspace) -> None:
    workspace.store.write_text("a file where the directory should be")
    bash(workspace, "toolu_1", lambda: ruin(workspace))
    assert workspace.store.read_text() == "a file where the directory should be"
    workspace.store.unlink()


def test_hooks_record_nothing_in_a_folder_that_contains_the_store(workspace: HookedWorkspace) -> None:
    workspace.store = workspace.root / "store"
    bash(workspace, "toolu_1", lambda: ruin(workspace))
    assert Spool(workspace.folder).names() == []


def test_modules_of_the_project_are_not_imported_as_ours(workspace: HookedWorkspace) -> None:
    """A folder with a module of our name, or of the library's, is not where our code comes from."""
    for name in ("mulligan", "json", "os", "click"):
        (workspace.root / f"{name}.py").write_text("raise SystemExit(2)")
    command = command_for("claude")
    words = shlex.split(command.partition(" 2>")[0])
    told = {"tool_name": "Bash", "tool_input": {}, "tool_use_id": "toolu_1"}
    for name in ("PreToolUse", "PostToolUse"):
        given = json.dumps(event(workspace.root, name, **told)).encode()
        done = subprocess.run(words, input=given, env=workspace.env, cwd=workspace.root, capture_output=True)
        assert done.returncode == 0
    assert [label for label, _ in changes_of_store(workspace)] == ["toolu_1"]


def changes_of_store(workspace: HookedWorkspace) -> list[tuple[str, Any]]:
    command = [sys.executable, "-P", "-m", "mulligan", "log", "--json", "--root", str(workspace.root)]
    done = subprocess.run(command, cwd=workspace.home, env=workspace.env, capture_output=True, check=True)
    return [(row["label"], row["changes"]) for row in json.loads(done.stdout)]


@pytest.mark.parametrize(
    "data", [b"", b"1 claude - x 1 1\n{}", b"2 claude - 1 1 1\n{}", b"1 claude zz 1 1 1\n{}", b"\xff"]
)
def test_an_invalid_message_is_parsed_as_none(data: bytes) -> None:
    assert parse_message(data) is None


def test_a_large_event_arrives_whole(workspace: HookedWorkspace) -> None:
    content = "x" * (5 << 20)
    target = workspace.root / "large.txt"
    workspace.tool(
        "Write", {"file_path": str(target), "content": content}, "toolu_1", lambda: target.write_text(content)
    )
    assert changes(workspace) == [("toolu_1", {"large.txt": "created"})]


def test_many_hooks_at_once_are_all_recorded(workspace: HookedWorkspace) -> None:
    workspace.hook("SessionStart")
    names = [f"f{number}.txt" for number in range(8)]

    def work(name: str) -> None:
        target = workspace.root / name
        workspace.tool("Write", {"file_path": str(target)}, name, lambda: target.write_text(name))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(changes(workspace), key=str) == [(name, {name: "created"}) for name in names]
