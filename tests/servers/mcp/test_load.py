"""Many clients at once over HTTP: every call is answered, and the server is afterwards what it was before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from mcp.client.client import Client

from mulligan.servers.mcp.http import WORKERS
from tests.servers.mcp.server_process import SERVER, HttpServer, environment, listening

CLIENTS = 64
WARM_UP_S = 10.0
STORM_S = 50.0
"""A minute in all: ten minutes of a host's day, scaled."""
GROWTH_MAX = 1.25


def mixed(number: int, turn: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("read_file", {"path": "README.md"}),
        ("write_file", {"path": f"own/{number}", "content": f"{turn}", "create_parents": True}),
        ("snapshot_file", {"path": "src/main.rs"}),
        ("snapshot_create", {"paths": ["src"]}),
        ("grep", {"pattern": "main"}),
        ("history_log", {"limit": 3}),
    ]


class Held(NamedTuple):
    """What a process holds. Its files without the store's connections: there are as many as calls ever met."""

    files: int
    threads: int
    memory_kib: int


def held(pid: int) -> Held:
    folder = f"/proc/{pid}/fd"
    names = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    status = Path(f"/proc/{pid}/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    files = len([name for name in names if "/store.db" not in name])
    return Held(files, len(os.listdir(f"/proc/{pid}/task")), memory)


async def storm(server: HttpServer, last_s: float) -> tuple[list[str], list[int]]:
    """What went wrong, and how many rounds each client made. Each makes at least one."""
    wrong: list[str] = []
    rounds = [0] * CLIENTS
    ends = anyio.current_time() + last_s

    async def one(number: int) -> None:
        async with Client(server.transport(), mode="2026-07-28") as client:
            while rounds[number] == 0 or anyio.current_time() < ends:
                rounds[number] += 1
                for name, arguments in mixed(number, rounds[number]):
                    result = await client.call_tool(name, arguments)
                    if result.is_error:
                        wrong.append(f"{name}: {result.structured_content}")

    async with anyio.create_task_group() as group:
        for number in range(CLIENTS):
            group.start_soon(one, number)
    return wrong, rounds


@pytest.mark.slow
def test_sixty_four_clients_are_served_and_nothing_is_left_behind(root: Path, tmp_path: Path) -> None:
    command = [*SERVER, "--root", str(root), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(tmp_path / "home")) as process:
        try:
            server = listening(process)
            assert anyio.run(storm, server, WARM_UP_S)[0] == []
            before = held(process.pid)
            wrong, rounds = anyio.run(storm, server, STORM_S)
            after = held(process.pid)
        finally:
            process.terminate()
    assert wrong == []
    assert after.files <= before.files + 4
    assert after.threads <= WORKERS + 4
    assert after.memory_kib <= before.memory_kib * GROWTH_MAX
    assert [(root / f"own/{number}").read_text() for number in range(CLIENTS)] == [f"{turns}" for turns in rounds]
