"""Who may ask the server, and what a stranger, an observer, another site and a hostile name get."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

import mulligan
from mulligan.servers.auth import StaticKeys
from mulligan.servers.http import access
from mulligan.values.clock import SystemClock, monotonic_s
from tests.web.serving import Served, environment, record, serving, write_call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def calls(folder: Path) -> dict[str, str]:
    return record(folder / "project", folder / "home")


@pytest.fixture(scope="module")
def server(folder: Path, calls: dict[str, str]) -> Iterator[Served]:
    with serving(folder / "home") as found:
        yield found


def token(home: Path, *, role: str | None = None, life: timedelta = timedelta(hours=1)) -> str:
    """A durable token, as `mulligan token create` makes it."""
    words = ["--role", role] if role is not None else []
    seconds = str(int(life.total_seconds()))
    command = [sys.executable, "-m", "mulligan", "token", "create", "--principal", "p", "--ttl", seconds, *words]
    done = subprocess.run(command, env=environment(home), check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextmanager
def cookie_of(server: Served) -> Iterator[httpx.Client]:
    """A browser that has opened the printed address."""
    with httpx.Client(base_url=server.base, timeout=60) as client:
        answer = client.get(f"/?code={server.code}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        yield client


READS = ["/api/v1/roots", "/api/v1/calls", "/api/v1/sessions", "/metrics", "/openapi.json", "/", "/static/app.js"]


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("given", [None, "Bearer", "Basic eDp5", "Bearer wrong"])
def test_without_a_good_token_there_is_nothing_to_read(server: Served, path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    assert httpx.get(server.base + path, headers=headers).status_code == 401


@pytest.mark.req("D14.http.healthz_open", "D14.cli.serve")
@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_token(server: Served, path: str) -> None:
    answer = httpx.get(server.base + path)
    assert (answer.status_code, answer.json()) == (200, {"ok": True})


def test_a_revoked_and_an_expired_token_open_nothing(server: Served, folder: Path, calls: dict[str, str]) -> None:
    good = token(server.home)
    with server.client(good) as client:
        assert client.get("/api/v1/roots").status_code == 200
        with mulligan.open(folder / "project", store=server.home) as opened:
            opened.tokens.expire(good)
            created = SystemClock().now() - timedelta(hours=2)
            late = opened.tokens.create(principal="p", created_at=created, expires_at=created + timedelta(hours=1))
        assert client.get("/api/v1/roots").status_code == 401
    assert late.id is not None
    with server.client(late.id) as client:
        assert client.get("/api/v1/roots").status_code == 401


def test_a_stream_ends_with_its_token(server: Served, folder: Path, calls: dict[str, str]) -> None:
    good = token(server.home)
    with server.client(good) as client, client.stream("GET", "/api/v1/events") as live:
        assert live.status_code == 200
        with mulligan.open(folder / "project", store=server.home) as opened:
            opened.tokens.expire(good)
        # The stream gets at most the comment that is due.
        assert sum(line.startswith(":") for line, _ in zip(live.iter_lines(), range(20), strict=False)) <= 1


def test_an_observer_reads_and_changes_nothing(server: Served, folder: Path, calls: dict[str, str]) -> None:
    before = (folder / "project" / "notes.txt").read_bytes()
    with server.client(token(server.home, role="observer")) as client:
        assert client.get("/api/v1/calls").status_code == 200
        assert client.get("/api/v1/me").json()["role"] == "observer"
        for path in (
            f"/calls/{calls['edit']}/undo",
            "/sessions/work/redo",
            "/sessions/work/fork",
            "/storage/gc",
            "/demo",
        ):
            assert client.post(f"/api/v1{path}", json={}).status_code == 403
        refused = client.post("/mcp", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_controller")
    assert (folder / "project" / "notes.txt").read_bytes() == before


def test_a_token_without_a_role_is_a_controllers(server: Served, calls: dict[str, str]) -> None:
    with server.client(token(server.home)) as client:
        answer = client.post(f"/api/v1/calls/{calls['edit']}/undo", params={"dry_run": "1"}, json={})
        assert (answer.status_code, answer.json()["dry_run"]) == (200, True)


@pytest.mark.req("D11.serve_api_key_file")
def test_static_keys_are_controllers_and_are_tried_before_tokens(tmp_path: Path) -> None:
    observer = token(tmp_path / "home", role="observer")
    (tmp_path / "keys").write_text(f"one-key-of-the-file\n{observer}\n")
    with serving(tmp_path / "home") as server:
        for secret in ("one-key-of-the-file", observer):
            with server.client(secret) as client:
                told = client.get("/api/v1/me").json()
                assert (told["principal"], told["role"]) == ("api-key", "controller")


@pytest.mark.parametrize("life", [None, timedelta(hours=-1), timedelta(hours=1)])
def test_other_machines_need_a_durable_token_that_has_not_expired(tmp_path: Path, life: timedelta | None) -> None:
    (tmp_path / "root").mkdir()
    with mulligan.open(tmp_path / "root", store=tmp_path / "home") as opened:
        if life is not None:
            created = SystemClock().now() - timedelta(hours=2)
            opened.tokens.create(principal="p", created_at=created, expires_at=SystemClock().now() + life)
    command = [sys.executable, "-m", "mulligan", "serve", "--host", "0.0.0.0", "--port", "0"]
    environ = environment(tmp_path / "home") | {"MULLIGAN_BACKGROUND": "off"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        if life is None or life < timedelta(0):
            assert "mulligan token create" in process.stderr.read()
            assert process.wait() == 2
        else:
            assert "/?code=" in process.stdout.readline()
            process.terminate()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:1@evil.example", ""])
def test_a_foreign_host_is_refused(server: Served, host: str) -> None:
    for path in ("/healthz", "/api/v1/roots"):
        with server.client() as client:
            assert client.get(path, headers={"host": host}).status_code in (400, 421)


@pytest.mark.req("D14.http.origin_checked")
def test_a_foreign_origin_is_refused(server: Served, calls: dict[str, str]) -> None:
    with server.client() as client:
        for origin in ("https://evil.example", "null", f"{server.base}.evil.example"):
            answer = client.post(f"/api/v1/calls/{calls['edit']}/undo", json={}, headers={"origin": origin})
            assert answer.status_code == 403


class TestTheCode:
    @pytest.fixture
    def server(self, folder: Path, calls: dict[str, str]) -> Iterator[Served]:
        with serving(folder / "home") as found:
            yield found

    @pytest.mark.req("D14.http.token_to_cookie")
    def test_it_buys_a_cookie_once(self, server: Served) -> None:
        assert httpx.get(f"{server.base}/?code=wrong").status_code == 401
        answer = httpx.get(server.page)
        cookie = answer.headers["set-cookie"]
        assert answer.status_code == 303
        assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", "Path=/"))
        assert (answer.headers["cache-control"], answer.headers["referrer-policy"]) == ("no-store", "no-referrer")
        assert httpx.get(server.page).status_code == 401

    def test_a_cookie_alone_changes_nothing(self, server: Served, calls: dict[str, str]) -> None:
        path, query = f"/api/v1/calls/{calls['edit']}/undo", {"dry_run": "1"}
        with cookie_of(server) as page:
            csrf = page.get("/api/v1/me").json()["csrf"]
            assert page.post(path, params=query, json={}).status_code == 403
            assert page.post(path, params=query, json={}, headers={"x-mulligan-csrf": "x"}).status_code == 403
            good = {"x-mulligan-csrf": csrf}
            assert page.post(path, params=query, json={}, headers=good).status_code == 200
            cross = {**good, "sec-fetch-site": "cross-site"}
            assert page.post(path, params=query, json={}, headers=cross).status_code == 403
            assert page.post("/mcp", json={}, headers=good).status_code == 403

    def test_a_cookie_outlives_the_server(self, server: Served, folder: Path) -> None:
        with cookie_of(server) as page:
            server.process.kill()
            server.process.wait()
            with serving(folder / "home", port=server.port):
                assert page.get("/api/v1/roots").status_code == 200


def test_every_answer_forbids_what_the_page_does_not_need(server: Served) -> None:
    with server.client() as client:
        for path in ("/", "/api/v1/roots", "/nowhere"):
            headers = client.get(path).headers
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
            assert "unsafe" not in headers["content-security-policy"]
            assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize("path", ["../../etc/passwd", "..", "/etc/passwd", "a/../../b", "a\0b", "base64:Li4v"])
@pytest.mark.parametrize("route", ["file", "tree", "file/bytes", "blame"])
def test_a_path_that_climbs_or_holds_nul_is_refused(server: Served, route: str, path: str) -> None:
    root = server.get("/roots")["roots"][0]["id"]
    with server.client() as client:
        answer = client.get(f"/api/v1/{route}", params={"root": root, "path": path})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_path", "invalid_params")


@pytest.mark.parametrize("path", ["/search?q=a%00b", "/calls?session=%00", "/sessions/a%00b"])
def test_nul_is_no_part_of_any_parameter(server: Served, path: str) -> None:
    with server.client() as client:
        answer = client.get(f"/api/v1{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_params")


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "..", "/etc/passwd", "a/../../b", "a\0b", "%2e%2e/x", "~root/x", "base64:Li4v"]
)
@pytest.mark.parametrize("route", ["file", "tree", "file/bytes", "blame"])
def test_a_path_never_leads_out_of_the_root(server: Served, route: str, path: str) -> None:
    root = server.get("/roots")["roots"][0]["id"]
    with server.client() as client:
        answer = client.get(f"/api/v1/{route}", params={"root": root, "path": path})
    assert answer.status_code in (200, 400, 404)
    assert "root:" not in answer.text
    if answer.status_code == 200:
        body = answer.json()
        assert body.get("state") == "absent" or body.get("entries") == []


@pytest.mark.parametrize(
    "path", ["/static/..%2f..%2fapp.py", "/static/../app.py", "/static/%2e%2e/app.py", "/static/a%00"]
)
def test_static_files_are_only_those_of_the_page(server: Served, path: str) -> None:
    with server.client() as client:
        assert client.get(path).status_code == 404


def test_an_encoded_slash_stays_in_its_name(server: Served, folder: Path) -> None:
    with mulligan.open(folder / "project", store=server.home) as opened:
        opened.session("a/b")
    with server.client() as client:
        assert client.get("/api/v1/sessions/a%2Fb").json()["id"] == "a/b"
        assert client.get("/api/v1/sessions/a/b").status_code == 404


def test_no_blob_is_to_be_had_by_its_digest(server: Served) -> None:
    digest = "sha256:" + "0" * 64
    with server.client() as client:
        assert client.get(f"/api/v1/blobs/{digest}").status_code == 404


def test_only_the_roots_that_were_asked_for_are_served(folder: Path, server: Served, calls: dict[str, str]) -> None:
    other = folder / "other"
    other.mkdir()
    hidden = write_call(server.home, other, "secret.txt", "secret\n")
    with serving(server.home, "--root", str(folder / "project")) as limited:
        assert [one["name"] for one in limited.get("/roots")["roots"]] == ["project"]
        assert hidden not in [one["id"] for one in limited.get("/calls", limit=500)["calls"]]
        with limited.client() as client:
            for path in (
                f"/calls/{hidden}",
                f"/calls/{hidden}/diff",
                f"/calls/{hidden}/bytes?path=secret.txt&side=after",
            ):
                assert client.get(f"/api/v1{path}").status_code == 404
            assert client.get("/api/v1/search", params={"q": "secret"}).json()["results"] == []


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused(server: Served, calls: dict[str, str], chunked: bool) -> None:
    size = 100 * 1024 * 1024
    pieces = (b" " * 65_536 for _ in range(size // 65_536))
    with server.client() as client:
        try:
            answer = client.post(f"/api/v1/calls/{calls['edit']}/undo", content=pieces if chunked else b" " * size)
        except httpx.TransportError:
            return  # The server hung up while we were still sending, which is a refusal too.
    assert answer.status_code == 413


def test_a_huge_body_is_refused_before_it_is_sent(server: Served, calls: dict[str, str]) -> None:
    head = f"POST /api/v1/calls/{calls['edit']}/undo HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.key}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\nContent-Length: {100 * 1024 * 1024}\r\n\r\n".encode())
        assert connection.recv(4_096).startswith(b"HTTP/1.1 413 ")


def test_a_download_has_a_harmless_name_and_no_page_is_made_of_it(server: Served, folder: Path) -> None:
    name = 'a"\r\nset-cookie: x=1;<script>.html'
    with (
        mulligan.open(folder / "project", store=server.home) as opened,
        opened.session("hostile").call("page") as call,
    ):
        call.write_file(name, "<script>alert(1)</script>")
    with server.client() as client:
        query = {"path": name, "side": "after"}
        answer = client.get(f"/api/v1/calls/{call.id}/bytes", params=query)
    assert answer.status_code == 200
    assert answer.headers["content-disposition"] == 'attachment; filename="a___set-cookie: x=1;<script>.html"'
    assert "set-cookie" not in answer.headers
    assert (answer.headers["content-type"], answer.headers["content-security-policy"]) == (
        "application/octet-stream",
        "sandbox",
    )


def test_a_code_is_too_old_after_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    with mulligan.open(store="memory:") as opened:
        guard = access.Access(StaticKeys(), opened.tokens, SystemClock(), "cookie")
        now = monotonic_s()
        for age_s, works in ((299.0, True), (301.0, False)):
            code = guard.new_code()
            monkeypatch.setattr(access, "monotonic_s", lambda age_s=age_s: now + age_s)
            assert (guard.exchange(code) is not None) is works
            monkeypatch.setattr(access, "monotonic_s", lambda: now)


async def _hold_streams(server: Served, secrets: list[str], each: int) -> tuple[int, bytes, int]:
    """Opens streams for each secret, and one more: how many were let in, the answer to the last, that of `/healthz`."""

    async def open_stream(secret: str) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            f"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
        )
        return await reader.readuntil(b"\r\n\r\n"), writer

    held = []
    for secret in secrets[:-1]:
        held += await asyncio.gather(*(open_stream(secret) for _ in range(each)))
    over, last = await open_stream(secrets[-1])
    async with httpx.AsyncClient() as client:
        healthy = await client.get(f"{server.base}/healthz")
    for _, writer in [*held, (over, last)]:
        writer.close()
    return sum(head.startswith(b"HTTP/1.1 200 ") for head, _ in held), over, healthy.status_code


def test_the_server_has_a_limit_of_streams_too(server: Served) -> None:
    secrets = [token(server.home, role="observer") for _ in range(6)]
    let_in, over, healthy = asyncio.run(_hold_streams(server, secrets, 200))
    assert (let_in, over.split(b"\r\n")[0], healthy) == (1_000, b"HTTP/1.1 503 Service Unavailable", 200)
    assert b"retry-after: 5" in over.lower()


def test_more_streams_than_allowed_get_503_and_health_still_answers(server: Served) -> None:
    with server.client() as client:
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=server.base, headers=client.headers, timeout=60, limits=limits) as many:
            held = []
            try:
                for _ in range(200):
                    held.append(many.send(many.build_request("GET", "/api/v1/events"), stream=True))
                assert {one.status_code for one in held} == {200}
                with client.stream("GET", "/api/v1/events") as over:
                    assert (over.status_code, over.headers.get("retry-after")) == (503, "5")
                assert client.get("/healthz").status_code == 200
            finally:
                for one in held:
                    one.close()


@pytest.mark.req("D14.http.loopback_default")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--store", "{tmp}/none"], "no store"),
        (["--root", "{tmp}/none"], "no folder"),
        (["--api-key-file", "{tmp}"], "--api-key-file"),
        (["--host", "0.0.0.0"], "mulligan token create"),
        (["--api-key-file", "{tmp}/not-text"], "--api-key-file"),
        (["--port", "{port}"], "--port"),
    ],
)
def test_what_cannot_be_served_is_one_line(server: Served, tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "not-text").write_bytes(b"\xff\xfe\n")
    given = [word.format(tmp=tmp_path, port=server.port) for word in words]
    home = environment(tmp_path / "fresh")
    command = [sys.executable, "-m", "mulligan", "serve", *(["--port", "0"] if "--port" not in given else []), *given]
    # A server that is served all the same would never end.
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert told in done.stderr


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['uvicorn'] = None\nfrom mulligan.cli import run; sys.exit(run(['serve', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'mulligan[serve]'" in json.dumps(done.stderr + done.stdout)
