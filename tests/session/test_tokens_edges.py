"""Tokens at the edges: the command line, the middleware, and MCP over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mulligan.cli.servers import token_verb
from mulligan.history.projection import SCHEMA
from mulligan.servers.auth import BearerAuth, StaticKeys, read_keys
from mulligan.session.tokens import Token, Tokens
from mulligan.store.journal import Journal
from mulligan.store.memory import MemoryStore
from mulligan.store.sqlite import SqliteStore
from mulligan.values.clock import SystemClock
from mulligan.values.errors import MulliganError
from tests.servers.mcp.server_process import MODERN, HttpServer, on_http
from tests.session.manual_clock import HandClock

UNKNOWN = "mlg_" + "A" * 43


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run(home: Path, *arguments: str, given: str = "") -> Done:
    command = [sys.executable, "-m", "mulligan.cli", "token", *arguments]
    environ = {**os.environ, "MULLIGAN_HOME": str(home)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environ, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


class TestCommandLine:
    @pytest.mark.req("D14.cli.token", "S3.token.raw_only_from_create")
    def test_a_token_from_its_making_to_its_end(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        made = run(home, "create", "--principal", "ci", "--ttl", "1d12h", "--attributes", '{"role":"x"}')
        token = made.out.strip()
        assert (made.code, token[:4], len(token)) == (0, "mlg_", 47)
        found = json.loads(run(home, "get", "--json", given=token).out)
        assert (found["principal"], found["attributes"]) == ("ci", {"role": "x"})
        life = datetime.fromisoformat(found["expires_at"]) - datetime.fromisoformat(found["created_at"])
        assert timedelta(hours=35.9) < life <= timedelta(hours=36)
        seen = json.loads(run(home, "touch", "--json", "--ttl", "7d", given=f"{token}\n").out)
        assert seen["last_seen_at"] > found["last_seen_at"] and seen["expires_at"] > found["expires_at"]
        (listed,) = json.loads(run(home, "list", "--json").out)
        assert listed == {**seen, "expired": False}
        (tmp_path / "token").write_text(token)
        assert run(home, "expire", "--token-file", str(tmp_path / "token")).code == 0
        assert [run(home, verb, given=token).code for verb in ("get", "touch")] == [1, 1]
        assert json.loads(run(home, "list", "--json").out) == []
        assert json.loads(run(home, "list", "--json", "--all").out)[0]["expired"] is True

    @pytest.mark.req("S3.token.raw_only_from_create", "D18.token_theft")
    def test_no_other_verb_shows_or_takes_a_raw_token(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        token = json.loads(run(home, "create", "--principal", "p", "--ttl", "60", "--json").out)["id"]
        told = [run(home, verb, *how, given=token) for verb in ("get", "touch", "list") for how in ((), ("--json",))]
        told += [run(home, verb, token) for verb in ("get", "expire", "touch")]
        assert [one for one in told if token in one.out + one.err] == []
        assert [one.code for one in told[-3:]] == [2, 2, 2]
        handle = json.loads(run(home, "list", "--json").out)[0]["handle"]
        assert [run(home, verb, handle).code for verb in ("get", "touch")] == [0, 0]
        assert run(home, "expire", handle).code == 0
        assert (run(home, "get", handle).code, run(home, "get", given=token).code) == (1, 1)

    @pytest.mark.parametrize("ttl", ["", "0", "-1", "1y", "1.5h", "9" * 30, "d7", "101d5y"])
    def test_a_life_that_is_none_is_bad_usage(self, tmp_path: Path, ttl: str) -> None:
        assert run(tmp_path / "home", "create", "--principal", "p", "--ttl", ttl).code == 2
        assert not (tmp_path / "home" / "store.db").exists()

    def test_a_missing_argument_is_bad_usage(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        assert run(home, "create", "--ttl", "1h").code == 2
        assert run(home, "create", "--principal", "p").code == 2
        assert run(home, "create", "--principal", "p", "--ttl", "1h", "--attributes", "{").code == 2
        assert run(home, "get", given=UNKNOWN).code == 2  # there is no store
        run(home, "create", "--principal", "p", "--ttl", "1h")
        assert run(home, "get", given="").code == 2
        assert run(home, "get", given=UNKNOWN).code == 1
        assert run(home, "get", "sha256:v1:" + "0" * 64).code == 1

    def test_every_verb_takes_the_common_options(self) -> None:
        assert sorted(token_verb.commands) == ["create", "expire", "get", "list", "touch"]
        for command in token_verb.commands.values():
            options = {name for one in command.params for name in one.opts}
            assert {"--json", "--store", "--session", "--root"} <= options


class TokenServer:
    """A Starlette application behind the middleware."""

    def __init__(self, *keys: str) -> None:
        self.clock = HandClock()
        self.tokens = Tokens(MemoryStore(SCHEMA), Journal(SCHEMA), clock=self.clock)
        middleware = Middleware(BearerAuth, keys=StaticKeys(keys), tokens=self.tokens, open_paths=["/healthz"])
        routes = [Route("/who", self.who), Route("/healthz", self.health)]
        self.app = Starlette(routes=routes, middleware=[middleware])

    async def who(self, request: Request) -> JSONResponse:
        session: Token | None = request.state.session
        return JSONResponse([request.state.principal, None if session is None else session.to_dict()])

    async def health(self, _: Request) -> JSONResponse:
        return JSONResponse("ok")

    def ask(self, *headers: tuple[str, str], path: str = "/who") -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.get(path, headers=list(headers))

        return asyncio.run(asked())

    def bearing(self, token: str, *, scheme: str = "Bearer") -> httpx.Response:
        return self.ask(("authorization", f"{scheme} {token}"))


@pytest.fixture
def hall() -> TokenServer:
    return TokenServer("static-one", "static-two")


class TestMiddleware:
    def test_without_the_extra_it_says_what_to_install(
        self, hall: TokenServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("anyio", "anyio.to_thread"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MulliganError) as caught:
            BearerAuth(hall.app)
        assert (caught.value.code, caught.value.details["missing_extra"]) == ("bad_usage", "serve")

    def make(self, hall: TokenServer) -> Token:
        return hall.tokens.create(principal="ann", expires_at=hall.clock.time + timedelta(hours=1))

    @pytest.mark.req("S3.auth.principal_passed_on", "S3.auth.static_then_token")
    def test_a_request_knows_who_makes_it(self, hall: TokenServer) -> None:
        made = self.make(hall)
        hall.clock.pass_by(minutes=1)
        answer = hall.bearing(made.id or "")
        assert answer.json() == ["ann", {**made.to_dict(), "last_seen_at": hall.clock.text}]
        assert hall.bearing("static-two", scheme="bearer").json() == ["api-key", None]

    @pytest.mark.req("S3.auth.static_then_token", "S3.token.touch_updates_last_seen")
    def test_a_static_key_is_tried_first_and_touches_nothing(self) -> None:
        both = "A-Key-That-Is-Also-A-Token-0123456789-ABCDEFGH"
        hall = TokenServer(both)
        made = hall.tokens.create(id=both, principal="ann", expires_at=hall.clock.time + timedelta(hours=1))
        hall.clock.pass_by(minutes=1)
        assert hall.bearing(both).json() == ["api-key", None]
        assert hall.tokens.get(both) == made

    @pytest.mark.req("S3.auth.maps_to_401", "S3.token.expired_not_extended")
    def test_everything_else_is_401(self, hall: TokenServer) -> None:
        made = self.make(hall)
        hall.clock.pass_by(hours=1)
        assert hall.bearing(made.id or "").status_code == 401
        assert hall.tokens.listed()[0].expires_at == made.expires_at
        revoked = self.make(hall)
        hall.tokens.expire(revoked.id or "")
        assert hall.bearing(revoked.id or "").status_code == 401

    @pytest.mark.req("S3.auth.maps_to_401")
    @pytest.mark.parametrize(
        "header",
        [
            *("", "Bearer", "Bearer ", "Basic static-one", "static-one", "Bearer static-on", "Bearerstatic-one"),
            *("Bearer static-one static-two", f"Bearer {UNKNOWN}", "Bearer " + "x" * 100_000),
        ],
    )
    def test_a_header_without_a_valid_token_is_401(self, hall: TokenServer, header: str) -> None:
        answer = hall.ask(("authorization", header))
        assert (answer.status_code, answer.json()) == (401, {"error": "unauthorized"})
        assert answer.headers["www-authenticate"].startswith("Bearer")

    def test_no_header_and_two_headers_are_401(self, hall: TokenServer) -> None:
        good = ("authorization", "Bearer static-one")
        assert hall.ask().status_code == 401
        assert hall.ask(good, good).status_code == 401
        assert hall.ask(good).status_code == 200

    def test_a_handle_is_no_token(self, hall: TokenServer) -> None:
        assert hall.bearing(self.make(hall).handle).status_code == 401

    def test_open_paths_need_no_token(self, hall: TokenServer) -> None:
        assert hall.ask(path="/healthz").json() == "ok"
        assert hall.ask(path="/healthz/").status_code == 401

    def test_a_socket_is_closed_before_it_is_accepted(self, hall: TokenServer) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("nobody listens to a stranger")

        asyncio.run(hall.app({"type": "websocket", "path": "/who", "headers": []}, receive, send))
        assert sent == [{"type": "websocket.close", "code": 1008}]

    @pytest.mark.req("D11.token_handle")
    def test_static_keys_are_compared_in_constant_time_all_of_them(self) -> None:
        source = inspect.getsource(StaticKeys.admits)
        assert "sum(hmac.compare_digest(" in source and "any(" not in source and "==" not in source

    def test_a_file_of_keys_is_one_a_line(self) -> None:
        keys = read_keys("# ours\none\n\n  two  \n")
        assert [keys.admits(key) for key in ("one", "two", "# ours", "", "three")] == [True, True, False, False, False]
        assert not read_keys("#\n\n")


class TestMcpOverHttp:
    @pytest.fixture
    def places(self, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
        (tmp_path / "work").mkdir()
        yield tmp_path / "work", tmp_path / "home"

    def post(self, server: HttpServer, token: str | None) -> int:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": MODERN}}
        headers = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": "2026-07-28",
            "mcp-method": "tools/list",
            **({} if token is None else {"authorization": f"Bearer {token}"}),
        }
        return httpx.post(server.address, json=body, headers=headers).status_code

    def make(self, home: Path) -> tuple[Tokens, Token]:
        tokens = Tokens(SqliteStore(str(home), SCHEMA), Journal(SCHEMA), clock=SystemClock())
        return tokens, tokens.create(principal="host", expires_at=datetime.now(UTC) + timedelta(hours=1))

    @pytest.mark.req("S3.auth.static_then_token", "S3.auth.maps_to_401")
    def test_a_durable_token_is_as_good_as_a_key_of_the_file(self, places: tuple[Path, Path]) -> None:
        root, home = places
        tokens, made = self.make(home)
        keys = home.parent / "keys"
        keys.write_text("static\n")
        with on_http(root, home, "--token-file", str(keys)) as server:
            assert [self.post(server, one) for one in (None, UNKNOWN, "static", made.id)] == [401, 401, 200, 200]
            seen = tokens.get(made.id or "")
            assert seen is not None and seen.last_seen_at > made.last_seen_at
            tokens.expire(made.id or "")
            assert self.post(server, made.id) == 401

    def test_the_token_alone_can_be_printed_and_nothing_else_shows_it(self, places: tuple[Path, Path]) -> None:
        root, home = places
        _, made = self.make(home)
        with on_http(root, home, "--require-token") as server:
            assert [self.post(server, one) for one in (None, made.id)] == [401, 200]
            secret = (made.id or "").encode()
            shown = [file.read_bytes() for file in _commands_and_environments()]
            assert [one for one in shown if secret in one] == []
        assert [file for file in home.rglob("*") if file.is_file() and secret in file.read_bytes()] == []

    def test_an_empty_file_of_keys_is_refused(self, places: tuple[Path, Path]) -> None:
        root, home = places
        empty = home.parent / "keys"
        empty.write_text("# none\n")
        command = [sys.executable, "-m", "mulligan.cli", "mcp", "--root", str(root), "--store", str(home), "--http"]
        for address in ("0.0.0.0:0", "127.0.0.1:0"):
            how = [address, "--token-file", str(empty)]
            assert subprocess.run([*command, *how], capture_output=True, check=False).returncode == 2


def _commands_and_environments() -> Iterator[Path]:
    """What any process of this user can read of the others, but for ourselves, who made the token."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            for name in ("cmdline", "environ"):
                try:
                    (process / name).read_bytes()
                except OSError:
                    continue
                yield process / name
