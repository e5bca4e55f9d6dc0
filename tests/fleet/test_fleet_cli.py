"""Verbs and Python on a PostgreSQL store: the same answers as on SQLite, hosts kept apart, no password anywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

import mulligan
from tests.fleet.servers import PASSWORD, Postgres, wait_for

pytestmark = pytest.mark.fleet


class Host:
    """A machine: a state directory, a host id, and a workspace."""

    def __init__(self, folder: Path, store: str | None, name: str = "one") -> None:
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MULLIGAN_STORE")},
            "MULLIGAN_HOME": str(folder / "home"),
            "MULLIGAN_HOST": name,
            **({} if store is None else {"MULLIGAN_STORE": store}),
        }

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mulligan", *words]
        environment = {**self.environ, **environ}
        return subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True)

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def write(self, path: str, content: str) -> None:
        self.json("call", "write_file", "--args", json.dumps({"path": path, "content": content}))


@pytest.fixture
def url(postgres: Postgres, tmp_path: Path) -> Iterator[str]:
    name = "c" + re.sub(r"\W", "_", tmp_path.name).lower()
    yield postgres.url(schema=name)
    postgres.run(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


def story(host: Host) -> list[Any]:
    """What a person does, and what every verb answers, without ids and times."""
    host.write("a.txt", "one\n")
    host.write("a.txt", "two\n")
    host.write("b.txt", "".join(map(str, range(20_000))))
    ran = host.run("exec", "--", "sh", "-c", "echo three > a.txt; rm b.txt")
    assert ran.returncode == 0, ran.stderr
    answers = [
        host.json("undo", "--dry-run", "--yes"),
        host.json("undo", "--yes"),
        host.json("undo", "--yes"),
        host.json("redo", "--yes"),
        host.json("log"),
        host.json("status"),
        host.json("verify"),
    ]
    files = {str(path.relative_to(host.work)): path.read_text() for path in host.work.rglob("*") if path.is_file()}
    return [_without_ids(answers), files]


def _without_ids(answer: Any) -> Any:
    if isinstance(answer, Mapping):
        return {name: _without_ids(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_without_ids(value) for value in answer]
    if isinstance(answer, str):
        return re.sub(r"[0-9a-f]{64}|[0-9a-f]{8}-[0-9a-f-]{27}|\d{4}-\d\d-\d\dT[\d:.]+Z|/\S*/(one|two)\b", "…", answer)
    return answer


def test_a_day_of_verbs_gives_the_same_json_as_on_sqlite(url: str, tmp_path: Path) -> None:
    on_postgres, on_sqlite = story(Host(tmp_path / "one", url)), story(Host(tmp_path / "two", None))
    assert on_postgres == on_sqlite


def test_python_works_in_a_store_on_postgresql(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    with mulligan.open(work, store=url) as opened:
        session = opened.session("s")
        with session.call() as call:
            assert call.write_file("a.txt", "one\n").status == "ok"
        with pytest.raises(LookupError), session.call() as call:
            call.write_file("a.txt", "two\n")
            call.exec(["sh", "-c", "echo more > b.txt"])
            raise LookupError
        assert sorted(path.name for path in work.iterdir()) == ["a.txt"]
        assert (work / "a.txt").read_text() == "one\n"
        big = Random(1).randbytes(300_000).hex()
        with session.call() as call:
            assert call.write_file("a.txt", big).status == "ok"
        assert len(list(opened.store.bodies.digests())) == 1
        with session.call() as call:
            assert call.delete("a.txt").status == "ok"
        session.undo()
        assert (work / "a.txt").read_text() == big
        session.rollback()
        session.rollback()
    assert list(work.iterdir()) == []


def test_the_call_of_a_killed_process_is_rolled_back_by_the_next_one_on_its_host(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "one", url)
    host.write("a.txt", "before\n")
    words = (
        "import mulligan, os, signal\n"
        "with mulligan.open('.') as opened, opened.session('s').call() as call:\n"
        "    call.write_file('a.txt', 'during\\n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", words], cwd=host.work, env=host.environ)
    assert killed.returncode == -signal.SIGKILL
    assert (host.work / "a.txt").read_text() == "during\n"
    # Another machine sees the open call, and leaves it alone.
    other = Host(tmp_path / "two", url, "two")
    other.write("a.txt", "of the other host\n")
    assert (host.work / "a.txt").read_text() == "during\n"
    assert "call" in host.run("status").stderr
    assert (host.work / "a.txt").read_text() == "before\n"
    assert (other.work / "a.txt").read_text() == "of the other host\n"


def test_a_root_of_another_host_is_never_opened(url: str, tmp_path: Path) -> None:
    """The same path on two machines: two histories, and no undo of one reaches the files of the other."""
    one = Host(tmp_path / "one", url)
    one.write("a.txt", "one\n")
    two = Host(tmp_path / "two", url, "two")
    two.work.rmdir()
    two.work = one.work
    assert two.json("log") == []
    refused = two.run("undo", "--yes", "--json")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (2, "nothing_to_undo")
    (call,) = one.json("log")
    refused = two.run("undo", call["id"], "--yes", "--json")
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (2, "root_elsewhere")
    assert (one.work / "a.txt").read_text() == "one\n"


def test_the_password_is_in_no_argument_no_child_no_answer_and_no_file(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "one", url)
    asked = "tr '\\0' '\\n' < /proc/$PPID/cmdline; env; cat > /dev/null"
    for verb in (["run"], ["exec"]):
        done = host.run(*verb, "--", "sh", "-c", asked, PGPASSWORD=PASSWORD)
        assert done.returncode == 0, done.stderr
        assert "MULLIGAN_CALL" in done.stdout and PASSWORD not in done.stdout + done.stderr
    host.write("a.txt", "one\n")
    wrong = host.run("status", MULLIGAN_STORE=url.replace("mulligan:", "nobody:"))
    assert wrong.returncode != 0 and PASSWORD not in wrong.stdout + wrong.stderr
    held = [path for path in (tmp_path / "one").rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert held == []


@pytest.mark.parametrize("verb", [["log"], ["mcp"], ["serve"], ["call", "exists", "--args", "{}"]])
def test_a_password_on_the_command_line_is_refused_with_one_line(url: str, tmp_path: Path, verb: list[str]) -> None:
    done = Host(tmp_path / "one", None).run(*verb, "--store", url)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert all(name in done.stderr for name in ("MULLIGAN_STORE", "MULLIGAN_BLOBS", "PGPASSFILE", "AWS credential"))
    assert PASSWORD not in done.stderr


def test_a_verb_inside_a_call_joins_it(url: str, tmp_path: Path, postgres: Postgres) -> None:
    host = Host(tmp_path / "one", url)
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:{postgres.port}:*:mulligan:{PASSWORD}\n")
    passwords.chmod(0o600)
    inner = f'{sys.executable} -m mulligan call write_file --args \'{{"path": "a.txt", "content": "one"}}\''
    done = host.run("run", "--", "sh", "-c", inner, PGPASSFILE=str(passwords))
    assert done.returncode == 0, done.stderr
    (call,) = host.json("log")
    assert ([one["path"] for one in call["changes"]], call["tool"]) == (["a.txt"], "run")


def test_doctor_opens_the_store(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "one", url)
    host.write("a.txt", "one\n")
    findings = {finding["name"]: finding["value"] for finding in host.json("doctor")["findings"]}
    assert findings["store"] == "opens"


def test_four_processes_write_one_history(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "one", url)
    words = [sys.executable, "-m", "mulligan", "call", "write_file", "--session", "s", "--args"]
    started = [
        subprocess.Popen(
            [*words, json.dumps({"path": f"{number}.txt", "content": str(number)})],
            cwd=host.work,
            env=host.environ,
            stdout=subprocess.DEVNULL,
        )
        for number in range(4)
    ]
    wait_for(lambda: all(one.poll() is not None for one in started), "the processes")
    assert [one.returncode for one in started] == [0, 0, 0, 0]
    assert len(host.json("log")) == 4
    assert host.run("verify").returncode == 0
