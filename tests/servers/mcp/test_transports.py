"""One suite for both transports, with the SDK's own client in both of its eras."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2 as httpx
import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError

import mulligan
from mulligan.servers.mcp.protocol import TOOLSETS, read_table
from mulligan.values.clock import SystemClock
from tests.servers.mcp.server_process import MODERN, SERVER, HttpServer, environment, on_http

Act = Callable[[Client], Awaitable[Any]]


@contextmanager
def served(transport: str, root: Path, home: Path, *options: str) -> Iterator[Any]:
    if transport == "http":
        with on_http(root, home, *options) as listening:
            yield listening
    else:
        rest = [*SERVER[1:], "--root", str(root), *options]
        yield StdioServerParameters(command=SERVER[0], args=rest, env=environment(home))


def talk(server: Any, mode: str, act: Act) -> Any:
    async def run() -> Any:
        connection = server.transport() if isinstance(server, HttpServer) else server
        async with Client(connection, mode=mode) as client:
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

    @pytest.mark.req("D14.mcp.prompts")
    def test_the_verbs_are_prompts_that_tell_the_model_which_tool_to_call(self, server: Any, mode: str) -> None:
        async def act(client: Client) -> tuple[dict[str, list[str]], str, list[int]]:
            listed = (await client.list_prompts()).prompts
            names = {one.name: [each.name for each in one.arguments or ()] for one in listed}
            got = await client.get_prompt("restore", {"call": "5dcd820b", "path": "a.txt"})
            (message,) = got.messages
            refused = []
            for name, given in (("no_such", {}), ("restore", {"call": "5dcd820b"}), ("redo", {"call": "5dcd820b"})):
                with pytest.raises(MCPError) as caught:
                    await client.get_prompt(name, given)
                refused.append(caught.value.error.code)
            assert isinstance(message.content, types.TextContent) and message.role == "user"
            return names, message.content.text, refused

        names, text, refused = talk(server, mode, act)
        assert names == {
            "undo": ["call"],
            "redo": [],
            "rollback": [],
            "rewind": ["to"],
            "restore": ["call", "path"],
            "log": [],
            "status": [],
            "diff": ["call"],
        }
        assert text == (
            'Call the tool history_restore once, with these arguments: {"call":"5dcd820b","paths":["a.txt"]}. '
            "Show me what it answers: which files changed, which it left alone and why. Do nothing else."
        )
        assert refused == [-32602] * 3

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
    def post(self, server: HttpServer, *, key: str | None = None, **headers: str) -> int:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": MODERN}}
        sent = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": "2026-07-28",
            "mcp-method": "tools/list",
            **({} if key is None else {"authorization": f"Bearer {key}"}),
            **headers,
        }
        return httpx.post(server.address, json=body, headers=sent).status_code

    @pytest.mark.req("D14.mcp.http", "D14.cli.mcp", "D14.mcp.own_origin", "D18.dns_rebinding")
    def test_foreign_hosts_and_origins_are_refused(self, root: Path, tmp_path: Path) -> None:
        with on_http(root, tmp_path / "home") as server:
            (key,) = server.keys
            assert self.post(server, key=key) == 200
            for host in ("evil.example", "localhost.evil.example", "localhost:80.evil.example", "127.0.0.1:x", ""):
                assert self.post(server, key=key, host=host) == 421, host
            for origin in (
                *("http://evil.example", "null", "http://localhost.evil.example", "http://127.0.0.1.evil:1"),
                *("http://localhost:80.evil.example", "http://localhost:@evil.example", "http://localhost:80@evil"),
                *(
                    "http://127.0.0.1:",
                    "http://127.0.0.1:80/",
                    "http://localhost:x",
                    "ftp://localhost",
                    "http://[::1]:a",
                ),
            ):
                assert self.post(server, key=key, origin=origin) == 403, origin
            for origin in ("http://localhost", "https://localhost:3000", "http://127.0.0.1:8080", "http://[::1]"):
                assert self.post(server, key=key, origin=origin) == 200, origin

    @pytest.mark.req("D14.mcp.token_always")
    @pytest.mark.parametrize("options", [(), ("--require-token",)])
    def test_without_a_token_file_one_printed_key_is_asked_for(
        self, root: Path, tmp_path: Path, options: tuple[str, ...]
    ) -> None:
        with on_http(root, tmp_path / "home", *options) as server:
            (key,) = server.keys
            assert self.post(server, key=key) == 200
            for wrong in (None, "nope", key[:-1], key.upper()):
                assert self.post(server, key=wrong) == 401
            methods = ("GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD")
            assert [httpx.request(one, server.address).status_code for one in methods] == [401] * len(methods)
        with on_http(root, tmp_path / "home", *options) as server:
            assert server.keys != [key]
            assert self.post(server, key=key) == 401

    @pytest.mark.req("D14.mcp.token_always")
    def test_the_keys_of_a_token_file_are_asked_for(self, root: Path, tmp_path: Path) -> None:
        tokens = tmp_path / "tokens"
        tokens.write_text("mlg_one\nmlg_two\n")
        with on_http(root, tmp_path / "home", "--token-file", str(tokens)) as server:
            assert server.keys == []
            assert self.post(server) == 401
            assert self.post(server, key="nope") == 401
            assert self.post(server, authorization="Basic mlg_one") == 401
            assert self.post(server, key="mlg_two") == 200

    @pytest.mark.req("D14.mcp.token_always", "D14.mcp.own_origin")
    def test_a_server_on_every_address_asks_for_a_key_and_for_an_origin_like_its_host(
        self, root: Path, tmp_path: Path
    ) -> None:
        with on_http(root, tmp_path / "home", "--http", "0.0.0.0:0") as server:
            (key,) = server.keys
            assert [self.post(server, key=one) for one in (None, key)] == [401, 200]
            origins = ("http://box", "https://box:8443", "http://box.evil.example", "http://box:80.evil", "null")
            found = [self.post(server, key=key, host="box:80", origin=origin) for origin in origins]
            assert found == [200, 200, 403, 403, 403]

    @pytest.mark.req("D14.mcp.token_always")
    def test_the_token_of_an_observer_reaches_no_tool(self, root: Path, tmp_path: Path) -> None:
        ends = SystemClock().now() + timedelta(hours=1)
        with mulligan.open(root, store=str(tmp_path / "home")) as opened:
            create = partial(opened.tokens.create, principal="ci", expires_at=ends)
            controllers = [create(attributes=None), create(attributes={"role": "controller"})]
            observer = create(attributes={"role": "observer"})
        with on_http(root, tmp_path / "home") as server:
            assert [self.post(server, key=one.id) for one in controllers] == [200, 200]
            assert self.post(server, key=observer.id) == 403

    @pytest.mark.req("D14.mcp.token_file_created")
    def test_a_missing_token_file_is_made_with_one_key_for_the_owner_alone(self, root: Path, tmp_path: Path) -> None:
        tokens = tmp_path / "tokens"
        with on_http(root, tmp_path / "home", "--token-file", str(tokens)) as server:
            (key,) = tokens.read_text().splitlines()
            assert (tokens.stat().st_mode & 0o777, server.keys) == (0o600, [])
            assert [self.post(server, key=one) for one in (None, key)] == [401, 200]
        with on_http(root, tmp_path / "home", "--token-file", str(tokens)) as server:
            assert self.post(server, key=key) == 200

    @pytest.mark.req("D14.mcp.token_file_created")
    def test_a_token_file_that_cannot_be_made_is_bad_usage(self, root: Path, tmp_path: Path) -> None:
        command = [*SERVER, "--root", str(root), "--http", "127.0.0.1:0", "--token-file"]
        for file in (tmp_path / "no/such/folder/tokens", tmp_path):
            done = subprocess.run(
                [*command, str(file)], capture_output=True, env=environment(tmp_path / "home"), check=False
            )
            assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)

    def test_an_address_that_cannot_be_had_is_bad_usage_and_makes_no_key(self, root: Path, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            for address in (f"127.0.0.1:{taken.getsockname()[1]}", "no-such-host.invalid:80"):
                command = [*SERVER, "--root", str(root), "--http", address, "--token-file", str(keys)]
                done = subprocess.run(command, capture_output=True, env=environment(tmp_path / "home"), check=False)
                assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
        assert not keys.exists()

    def test_without_the_extra_one_line_says_what_to_install(self, root: Path, tmp_path: Path) -> None:
        begin = "import sys; sys.modules['anyio'] = None; from mulligan.__main__ import main; main()"
        command = [sys.executable, "-c", begin, "mcp", "--http", "127.0.0.1:0", "--root", str(root)]
        done = subprocess.run(command, capture_output=True, env=environment(tmp_path / "home"), check=False)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
        assert b"mulligan[serve]" in done.stderr
