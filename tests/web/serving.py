"""A real `mulligan serve` in a process of its own, and clients of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import mulligan

_ADDRESS = re.compile(r"(http://\S+?)/\?code=(\S+)")


@dataclass
class Served:
    """A running server. `key` is a controller's static key."""

    process: subprocess.Popen[str]
    base: str
    code: str
    home: Path
    key: str

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    @property
    def page(self) -> str:
        """The address that was printed; it works once."""
        return f"{self.base}/?code={self.code}"

    def client(self, secret: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key if secret is None else secret}"}
        return httpx.Client(base_url=self.base, headers=headers, timeout=60)

    def get(self, path: str, /, **query: Any) -> Any:
        with self.client() as client:
            answer = client.get(f"/api/v1{path}", params=query)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def post(
        self, path: str, /, body: Any = None, *, status: int = 200, if_match: str | None = None, **query: Any
    ) -> Any:
        headers = {} if if_match is None else {"if-match": if_match}
        with self.client() as client:
            answer = client.post(f"/api/v1{path}", json=body or {}, params=query, headers=headers)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.json()


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "MULLIGAN_HOME": str(home)}


@contextmanager
def serving(home: Path, *more: str, port: int = 0, background: str = "off") -> Iterator[Served]:
    """Until the block ends; what the server wrote to stderr must be nothing."""
    home.mkdir(exist_ok=True)
    keys = home.parent / "keys"
    if not keys.exists():
        keys.write_text("a-static-key-of-the-tests\n")
    command = [sys.executable, "-m", "mulligan", "serve", "--port", str(port), "--api-key-file", str(keys), *more]
    environ = environment(home) | {"MULLIGAN_BACKGROUND": background}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home.parent
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = _ADDRESS.search(line)
        assert found is not None, (line, process.stderr.read() if process.stderr else "")
        yield Served(process, found[1], found[2], home, keys.read_text().strip())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors


def record(root: Path, home: Path) -> dict[str, str]:
    """A small history: two prompts, an edit of a person, a failed call. The ids of the calls by what they did."""
    root.mkdir(exist_ok=True)
    lines = [f"line {number}" for number in range(1, 41)]
    (root / "notes.txt").write_text("\n".join(lines) + "\n")
    ids: dict[str, str] = {}
    with mulligan.open(root, store=home) as opened:
        session = opened.session("work")
        with session.turn("Number the important lines"):
            with session.call("edit") as call:
                call.edit_file("notes.txt", "line 3\n", "line three\n")
                call.edit_file("notes.txt", "line 30\n", "line thirty\n")
            ids["edit"] = call.id
            with session.call("write") as call:
                call.write_file("src/app.py", "def main():\n    return 1\n", create_parents=True)
            ids["write"] = call.id
        text = (root / "notes.txt").read_text()
        (root / "notes.txt").write_text(text.replace("line 15\n", "line 15, by hand\n"))
        with session.turn("Clean up"):
            with session.call("exec") as call:
                call.exec(["sh", "-c", "echo cleaned >> notes.txt"])
            ids["exec"] = call.id
        try:
            with session.call("broken") as call:
                call.write_file("half.txt", "half")
                raise RuntimeError
        except RuntimeError:
            ids["broken"] = call.id
    return ids


def run(home: Path, root: Path, *words: str) -> str:
    """Another process at work: the command line."""
    command = [sys.executable, "-m", "mulligan", *words, "--root", str(root)]
    return subprocess.run(command, env=environment(home), check=True, capture_output=True, text=True).stdout


def write_call(home: Path, root: Path, path: str, content: str, **named: str) -> str:
    """A call of another process; its id."""
    more = [word for name, value in named.items() for word in (f"--{name}", value)]
    told = run(home, root, "call", "write_file", "--args", json.dumps({"path": path, "content": content}), *more)
    return str(json.loads(told)["call_id"])
