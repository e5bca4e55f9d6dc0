"""One suite for both transports, with the SDK's own client in both of its eras."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2 as httpx
import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError

from mcp_server.wire import MODERN, SERVER, environment, on_http
from mulligan.servers.mcp.listing import TOOLSETS, read_table

Act = Callable[[Client], Awaitable[Any]]


@contextmanager
def served(transport: str, root: Path, home: Path, *options: str) -> Iterator[Any]:
    if transport == "http":
        with on_http(root, home, *options) as address:
            yield address
    else:
        rest = [*SERVER[1:], "--root", str(root), *options]
        yield StdioServerParameters(command=SERVER[0], args=rest, env=environment(home))


def talk(server: Any, mode: str, act: Act) -> Any:
    async def run() -> Any:
        async with Client(server, mode=mode) as client:
            return await act(client)

    return anyio.run(run)


@pytest.fixture(params=["stdio", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["legacy", "2026-07-28"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(transport: str, root: Path, tmp_path: Path) -> Iterator[Any]:
    with served(transport, root, tmp_path / "home") as found:
        yield found


@pytest.mark.req("D14.mcp.parity", "D14.mcp.http", "D19.foreign_programs", "D3.async_only_at_edge")
class TestBothTransports:
    def test_the_same_tools_are_listed(self, server: Any, mode: str) -> None:
        listed = talk(server, mode, lambda client: client.list_tools())
        found = {tool.name: tool.model_dump(by_alias=True, exclude_none=True) for tool in listed.tools}
        expected = {tool["name"]: tool for name in TOOLSETS for tool in read_table().tools[name]}
        assert found == expected

    def test_a_call_gives_the_same_result(self, server: Any, mode: str) -> None:
        async def act(client: Client) -> list[types.CallToolResult]:
            await client.list_tools()
            return [
                await client.call_tool("snapshot.create", {"paths": ["."]}),
                await client.call_tool("read_file", {"path": "README.md"}),
                await client.call_tool("snapshot_file", {"path": "nope"}),
                await client.call_tool("write_file", {"path": "n", "content": "1"}),
                await client.call_tool("shell", {"command": "cat n"}),
            ]

        created, read, missing, written, shell = talk(server, mode, act)
        assert created.structured_content["manifest_stats"] == {"files": 2, "total_bytes": 22}
        assert read.structured_content["content"] == {"inline_text": {"text": "# Toy Repo"}}
        assert (missing.is_error, missing.structured_content["error"]["code"]) == (True, "NOT_FOUND")
        assert written.meta["mulligan/callId"]
        assert shell.structured_content["stdout"]["inline_text"]["text"] == "1"

    def test_an_unknown_tool_is_invalid_params(self, server: Any, mode: str) -> None:
        async def act(client: Client) -> int:
            with pytest.raises(MCPError) as caught:
                await client.session.call_tool("no_such_tool", {})
            return caught.value.error.code

        assert talk(server, mode, act) == -32602

    def test_progress_and_parallel_calls(self, server: Any, mode: str) -> None:
        heard: list[str | None] = []

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.append(message)

        async def act(client: Client) -> list[int]:
            found: list[int] = []

            async def one(number: int) -> None:
                result = await client.call_tool("write_file", {"path": f"p{number}", "content": "x"})
                found.append(number if not result.is_error else -1)

            async with anyio.create_task_group() as group:
                for number in range(16):
                    group.start_soon(one, number)
            await client.call_tool("shell", {"command": "echo heard"}, progress_callback=hear)
            return sorted(found)

        assert talk(server, mode, act) == list(range(16))
        assert heard == ["heard"]

    def test_cancelling_aborts(self, server: Any, mode: str, root: Path, tmp_path: Path) -> None:
        async def act(client: Client) -> str:
            begun = anyio.Event()

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                begun.set()

            async with anyio.create_task_group() as group:
                command = {"command": "echo half > half; echo begun; exec sleep 600"}

                async def long() -> None:
                    await client.call_tool("shell", command, progress_callback=hear)

                group.start_soon(long)
                await begun.wait()
                group.cancel_scope.cancel()
            while True:
                log = await client.call_tool("history_log", {})
                calls = [call for call in (log.structured_content or {})["calls"] if call["tool"] == "shell"]
                if calls and calls[0]["status"] != "open":
                    return str(calls[0]["status"])

        assert talk(server, mode, act) == "aborted"
        assert not (root / "half").exists()


def test_a_profile_is_listed_and_its_tools_work_on_both(transport: str, root: Path, tmp_path: Path) -> None:
    async def act(client: Client) -> tuple[list[str], Any]:
        names = [tool.name for tool in (await client.list_tools()).tools]
        edit = {"path": "README.md", "old_string": "Toy", "new_string": "Real"}
        return names, await client.call_tool("edit_file", edit)

    with served(transport, root, tmp_path / "home", "--profile", "anthropic", "--tools", "coding") as server:
        names, edited = talk(server, "2026-07-28", act)
    assert names == [tool["name"] for tool in read_table().tools["anthropic"]]
    assert not edited.is_error
    assert (root / "README.md").read_text() == "# Real Repo"


class TestHttpOnly:
    def post(self, address: str, headers: dict[str, str]) -> int:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": MODERN}}
        sent = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": "2026-07-28",
            "mcp-method": "tools/list",
            **headers,
        }
        return httpx.post(address, json=body, headers=sent).status_code

    @pytest.mark.req("D14.mcp.http", "D14.cli.mcp")
    def test_foreign_hosts_and_origins_are_refused(self, root: Path, tmp_path: Path) -> None:
        with on_http(root, tmp_path / "home") as address:
            assert self.post(address, {}) == 200
            assert self.post(address, {"host": "evil.example"}) == 421
            for foreign in ("http://evil.example", "null", "http://localhost.evil.example", "http://127.0.0.1.evil:1"):
                assert self.post(address, {"origin": foreign}) == 403
            for own in ("http://localhost", "https://localhost:3000", "http://127.0.0.1:8080", "http://[::1]"):
                assert self.post(address, {"origin": own}) == 200

    def test_tokens_are_asked_for(self, root: Path, tmp_path: Path) -> None:
        tokens = tmp_path / "tokens"
        tokens.write_text("mlg_one\nmlg_two\n")
        with on_http(root, tmp_path / "home", "--token-file", str(tokens)) as address:
            assert self.post(address, {}) == 401
            assert self.post(address, {"authorization": "Bearer nope"}) == 401
            assert self.post(address, {"authorization": "Basic mlg_one"}) == 401
            assert self.post(address, {"authorization": "Bearer mlg_two"}) == 200

    def test_without_the_extra_one_line_says_what_to_install(self, root: Path, tmp_path: Path) -> None:
        begin = "import sys; sys.modules['anyio'] = None; from mulligan.__main__ import main; main()"
        command = [sys.executable, "-c", begin, "mcp", "--http", "127.0.0.1:0", "--root", str(root)]
        done = subprocess.run(command, capture_output=True, env=environment(tmp_path / "home"), check=False)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
        assert b"mulligan[serve]" in done.stderr
