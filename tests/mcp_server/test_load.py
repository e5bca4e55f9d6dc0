"""Many clients at once over HTTP: every call is answered, and the server is afterwards what it was before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client

from mcp_server.wire import SERVER, _address, environment

CLIENTS = 64
ROUNDS = 6


def mixed(number: int, turn: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("read_file", {"path": "README.md"}),
        ("write_file", {"path": f"own/{number}", "content": f"{turn}", "create_parents": True}),
        ("snapshot_file", {"path": "src/main.rs"}),
        ("snapshot_create", {"paths": ["src"]}),
        ("grep", {"pattern": "main"}),
        ("history_log", {"limit": 3}),
    ]


def held(pid: int) -> tuple[int, int]:
    """Open files and threads of a process, without the store's connections: there are as many as calls ever met."""
    folder = f"/proc/{pid}/fd"
    names = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    return len([name for name in names if "/store.db" not in name]), len(os.listdir(f"/proc/{pid}/task"))


async def storm(address: str, turns: int) -> list[str]:
    """What went wrong."""
    wrong: list[str] = []

    async def one(number: int) -> None:
        async with Client(address, mode="2026-07-28") as client:
            for turn in range(turns):
                for name, arguments in mixed(number, turn):
                    result = await client.call_tool(name, arguments)
                    if result.is_error:
                        wrong.append(f"{name}: {result.structured_content}")

    async with anyio.create_task_group() as group:
        for number in range(CLIENTS):
            group.start_soon(one, number)
    return wrong


@pytest.mark.slow
def test_sixty_four_clients_are_served_and_nothing_is_left_behind(root: Path, tmp_path: Path) -> None:
    command = [*SERVER, "--root", str(root), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(tmp_path / "home")) as process:
        try:
            address = f"{_address(process)}/mcp"
            assert anyio.run(storm, address, 1) == []
            files, threads = held(process.pid)
            assert anyio.run(storm, address, ROUNDS) == []
            after_files, after_threads = held(process.pid)
        finally:
            process.terminate()
    assert after_files <= files + 4
    assert after_threads <= threads + 4
    assert all((root / f"own/{number}").read_text() == f"{ROUNDS - 1}" for number in range(CLIENTS))
