"""While `mulligan serve` runs, hooks, the command line and the page share its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mulligan.agents.hooks.socket import ask_background, background_folder
from mulligan.command_client import SOCKET
from tests.cli.test_command_server import Caller
from tests.web.serving import Served, serving


def background_process(home: Path) -> int | None:
    """The process that hooks reach."""
    answer = ask_background(background_folder(str(home)), b"status")
    return None if answer is None else int(json.loads(answer)["pid"])


def parent_of(process: int) -> int:
    stat = Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def command_servers_of(server: Served) -> list[int]:
    children = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
    return [one for one in children if _is_child(one, server.process.pid)]


def _is_child(process: int, parent: int) -> bool:
    try:
        return parent_of(process) == parent
    except FileNotFoundError:
        return False


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    made = Caller(tmp_path / "work", tmp_path / "home")
    made.folder.mkdir()
    code, _, said = made.cold("call", "write_file", "--args", '{"path": "a", "content": "one\\n"}')
    assert code == 0, said
    return made


def wait_until_background(home: Path, process: int | None) -> None:
    while background_process(home) != process:
        pass


def test_hooks_and_verbs_are_served_by_the_server_and_its_fork(caller: Caller) -> None:
    with serving(caller.home, background="on") as server:
        wait_until_background(caller.home, server.process.pid)
        caller.wait_until_served()
        assert len(command_servers_of(server)) == 1
        code, out, _ = caller.run("undo", "--json")
        assert (code, json.loads(out)["ok"], (caller.folder / "a").exists()) == (0, True, False)
        assert "undone" in [one["status"] for one in server.get("/calls")["calls"]]
    assert background_process(caller.home) is None
    assert not os.path.exists(os.path.join(background_folder(str(caller.home)), SOCKET))


def test_the_server_takes_over_from_a_background_process_that_runs(caller: Caller) -> None:
    caller.wait_until_served()
    before = background_process(caller.home)
    assert before is not None
    with serving(caller.home, background="on") as server:
        wait_until_background(caller.home, server.process.pid)
        caller.wait_until_served()
    assert background_process(caller.home) is None


def test_without_the_server_the_next_verb_starts_a_background_process_again(caller: Caller) -> None:
    with serving(caller.home, background="on") as server:
        wait_until_background(caller.home, server.process.pid)
        server.process.kill()
        server.process.wait()
    caller.wait_until_served()
    ask_background(background_folder(str(caller.home)), b"stop")


def test_a_server_that_cannot_start_leaves_no_process(caller: Caller, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mulligan", "serve", "--api-key-file", str(tmp_path)]
    done = subprocess.run(command, env=caller.environment(), capture_output=True, text=True)  # waits for the pipes' end
    assert done.returncode == 2
    assert background_process(caller.home) is None
