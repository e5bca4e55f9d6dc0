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

from agent_room.hooks.people import Site, event, gone
from mulligan.agents.hooks import client
from mulligan.agents.hooks.dispatch import parse_message
from mulligan.agents.hooks.hosts import CLIENT, command_for
from mulligan.agents.hooks.keeper import take_lock
from mulligan.agents.hooks.spool import Spool

AGENT_PATIENCE_S = 2.0


def ruin(site: Site) -> None:
    (site.root / ".env").write_text("KEY=2\n")
    (site.root / "gone.txt").unlink()


def bash(site: Site, label: str, act: Any) -> None:
    site.tool("Bash", {"command": "ruin"}, label, act)


def changes(site: Site) -> list[tuple[str | None, dict[str, str]]]:
    rows = site.log()[::-1]
    return [(row["label"], {one["path"]: one["kind"] for one in row["changes"]}) for row in rows]


RUINED = {".env": "modified", "gone.txt": "deleted"}


@pytest.mark.req("D14.hooks.edits_and_shell")
def test_a_command_told_by_real_hooks_is_undone(site: Site) -> None:
    site.hook("SessionStart")
    site.hook("UserPromptSubmit", prompt="ruin it")
    bash(site, "toolu_1", lambda: ruin(site))
    site.hook("Stop")
    assert changes(site) == [("toolu_1", RUINED)]
    shown = json.loads(site.mulligan("show", "toolu_1", "--json").stdout)
    assert shown["prompt"] == "ruin it"
    site.undo()
    assert (site.root / ".env").read_text() == "KEY=1\n"
    assert (site.root / "gone.txt").read_text() == "stay\n"


def test_the_prompt_is_found_in_the_agents_own_record_of_the_talk(site: Site, tmp_path: Path) -> None:
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
    site.hook("PreToolUse", **told)
    ruin(site)
    site.hook("PostToolUse", **told)
    shown = json.loads(site.mulligan("show", "toolu_1", "--json").stdout)
    assert (shown["prompt"], shown["transcript"]) == ("the wish", str(talk))


def test_only_its_owner_reaches_the_process(site: Site) -> None:
    site.hook("SessionStart")
    folder = Path(site.folder)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (site.store, folder.parent, folder, folder / "keeper.sock")]
    assert modes == [0o700, 0o700, 0o700, 0o600]


def test_the_process_has_none_of_the_agents_secrets(site: Site) -> None:
    site.extra["ANTHROPIC_API_KEY"] = "secret"
    site.hook("SessionStart")
    pid = site.keeper_pid()
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.readlink(f"/proc/{pid}/fd/1") == os.devnull
    assert os.getsid(pid or 0) != os.getsid(0)


def test_two_that_start_at_once_are_one(site: Site) -> None:
    threads = [threading.Thread(target=site.hook, args=("SessionStart",)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    site.hook("SessionStart")
    assert take_lock(site.folder, wait=False) is None
    one = site.keeper_pid()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        if pid != one and _works_in(pid, site.folder):
            with gone(pid):
                """It lost, and is on its way out."""
    assert site.keeper_pid() == one


def _works_in(pid: int, folder: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == folder
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_inside_a_call_loses_nothing(site: Site, number: signal.Signals) -> None:
    site.hook("SessionStart")
    bash(site, "warm", lambda: None)

    def die_and_ruin() -> None:
        pid = site.keeper_pid()
        assert pid is not None
        with gone(pid):
            os.kill(pid, number)
        ruin(site)

    bash(site, "toolu_1", die_and_ruin)
    site.hook("Stop")
    assert changes(site)[-1] == ("toolu_1", RUINED)
    site.undo("toolu_1")
    assert (site.root / "gone.txt").read_text() == "stay\n"


def test_a_process_whose_folder_is_gone_ends(site: Site) -> None:
    site.hook("SessionStart")
    pid = site.keeper_pid()
    assert pid is not None
    with gone(pid):
        os.rename(site.store, site.store.parent / "elsewhere")


@pytest.mark.req("D14.hooks.without_background")
def test_it_works_without_a_process(site: Site) -> None:
    site.extra["MULLIGAN_HOOKS_PROCESS"] = "off"
    site.hook("UserPromptSubmit", prompt="ruin it")
    bash(site, "toolu_1", lambda: ruin(site))
    site.tool("Edit", {"file_path": str(site.root / "a.txt")}, "toolu_2", lambda: (site.root / "a.txt").write_text("x"))
    site.hook("Stop")
    # Whoever is still at work on an event holds the lock.
    lock = take_lock(site.folder, wait=True)
    assert lock is not None
    os.close(lock)
    assert site.keeper_pid() is None
    assert changes(site) == [("toolu_1", RUINED), ("toolu_2", {"a.txt": "modified"})]
    site.undo()
    site.undo()
    assert (site.root / "gone.txt").read_text() == "stay\n"


@pytest.mark.req("D14.hooks.never_break_agent")
def test_when_the_store_is_broken_the_tool_runs_and_the_gap_is_told_later(site: Site) -> None:
    site.hook("SessionStart")
    bash(site, "warm", lambda: None)
    site.stop()
    sound = (site.store / "store.db").read_bytes()
    (site.store / "store.db").write_bytes(b"this is no database at all" * 100)
    bash(site, "toolu_1", lambda: ruin(site))
    assert len(Spool(site.folder).names()) == 2
    trouble = json.loads(site.mulligan("hooks", "status", "--json").stdout)
    assert trouble["undelivered"] == 2 and trouble["trouble"]
    site.stop()
    (site.store / "store.db").write_bytes(sound)
    site.hook("Stop")
    assert Spool(site.folder).names() == []
    row = next(row for row in site.log() if row["label"] == "toolu_1")
    assert {"path": ".", "reason": "hook_missed"} in row["coverage"]


@pytest.mark.req("D14.hooks.never_break_agent")
def test_when_the_process_hangs_the_tool_runs_and_the_gap_is_told_later(site: Site) -> None:
    site.hook("SessionStart")
    bash(site, "warm", lambda: None)
    pid = site.keeper_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    site.extra["MULLIGAN_HOOKS_WAIT_S"] = "0.1"
    try:
        bash(site, "toolu_1", lambda: ruin(site))
    finally:
        os.kill(pid, signal.SIGCONT)
    del site.extra["MULLIGAN_HOOKS_WAIT_S"]
    site.hook("Stop")
    (row,) = [row for row in site.log() if row["label"] == "toolu_1"]
    assert {one["path"]: one["kind"] for one in row["changes"]} == RUINED
    assert row["coverage"] == [{"path": ".", "reason": "hook_missed"}]


def test_a_hook_gives_up_before_an_agent_would_mind() -> None:
    assert client.WAIT_S < AGENT_PATIENCE_S


@pytest.mark.req("D14.hooks.never_break_agent")
@pytest.mark.parametrize("given", [b"", b"{}", b"\xff\x00", b"[" * 10_000, b'{"hook_event_name": "PreToolUse"}'])
def test_nonsense_is_no_reason_to_stop_anybody(site: Site, given: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", CLIENT, "claude"], input=given, env=site.env, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert Spool(site.folder).names() == []


@pytest.mark.req("D14.hooks.never_break_agent")
def test_a_state_directory_that_cannot_be_is_no_reason_either(site: Site) -> None:
    site.store.write_text("a file where the directory should be")
    bash(site, "toolu_1", lambda: ruin(site))
    assert site.store.read_text() == "a file where the directory should be"
    site.store.unlink()


def test_a_folder_that_holds_the_store_itself_is_left_alone(site: Site) -> None:
    site.store = site.root / "store"
    bash(site, "toolu_1", lambda: ruin(site))
    assert Spool(site.folder).names() == []


def test_the_words_of_a_project_cannot_be_run_as_ours(site: Site) -> None:
    """A folder with a module of our name, or of the library's, is not where our code comes from."""
    for name in ("mulligan", "json", "os", "click"):
        (site.root / f"{name}.py").write_text("raise SystemExit(2)")
    command = command_for("claude")
    words = shlex.split(command.partition(" 2>")[0])
    told = {"tool_name": "Bash", "tool_input": {}, "tool_use_id": "toolu_1"}
    for name in ("PreToolUse", "PostToolUse"):
        given = json.dumps(event(site.root, name, **told)).encode()
        done = subprocess.run(words, input=given, env=site.env, cwd=site.root, capture_output=True)
        assert done.returncode == 0
    assert [label for label, _ in changes_of_store(site)] == ["toolu_1"]


def changes_of_store(site: Site) -> list[tuple[str, Any]]:
    command = [sys.executable, "-P", "-m", "mulligan", "log", "--json", "--root", str(site.root)]
    done = subprocess.run(command, cwd=site.home, env=site.env, capture_output=True, check=True)
    return [(row["label"], row["changes"]) for row in json.loads(done.stdout)]


@pytest.mark.parametrize(
    "data", [b"", b"1 claude - x 1 1\n{}", b"2 claude - 1 1 1\n{}", b"1 claude zz 1 1 1\n{}", b"\xff"]
)
def test_a_message_that_is_none(data: bytes) -> None:
    assert parse_message(data) is None


def test_a_large_event_arrives_whole(site: Site) -> None:
    content = "x" * (5 << 20)
    target = site.root / "large.txt"
    site.tool("Write", {"file_path": str(target), "content": content}, "toolu_1", lambda: target.write_text(content))
    assert changes(site) == [("toolu_1", {"large.txt": "created"})]


def test_many_hooks_at_once_are_all_heard(site: Site) -> None:
    site.hook("SessionStart")
    names = [f"f{number}.txt" for number in range(8)]

    def work(name: str) -> None:
        target = site.root / name
        site.tool("Write", {"file_path": str(target)}, name, lambda: target.write_text(name))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(changes(site), key=str) == [(name, {name: "created"}) for name in names]
