"""Three stores of format 4, made once by verbs: plain work, undo operations, and sessions with forks and snapshots.

`python -m tests.frozen.stores` makes them anew. Do that only for a store format that was never released.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent.parent / "fixtures" / "format"
BASE = Path("/tmp/mulligan-format-4")
"""Where they were made; their roots are not there any more."""

Run = Callable[..., Any]


def verbs(home: Path, folder: Path) -> Run:
    """Runs a verb in a folder, with a store; what it printed as JSON."""

    def run(*words: str, code: int = 0) -> Any:
        env = {"PATH": os.environ["PATH"], "HOME": str(home.parent), "MULLIGAN_HOME": str(home)}
        command = [sys.executable, "-m", "mulligan", words[0], "--json", *words[1:]]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    return run


def _write(run: Run, path: str, content: str, *options: str) -> str:
    done = run("call", "write_file", "--args", json.dumps({"path": path, "content": content}), *options)
    return str(done["call_id"])


def _work(run: Run) -> None:
    _write(run, "a.txt", "one\n")
    run("exec", "--", "sh", "-c", "head -c 70000 /dev/urandom > large; mkdir folder; mv a.txt folder")
    run("exec", "--", "sh", "-c", "ln folder/a.txt b.txt; ln -s b.txt c.txt; chmod 600 b.txt; rm large")
    run("run", "--", "sh", "-c", "rm -r folder; echo more >> b.txt")


def _undo(run: Run) -> None:
    first = _write(run, "a.txt", "one\n", "--turn", "t1")
    second = _write(run, "b.txt", "two\n", "--turn", "t2")
    run("undo", first)
    run("redo")
    run("rollback")
    run("redo")
    run("restore", second)
    run("undo")
    _write(run, "a.txt", "three\n", "--turn", "t3")
    run("rewind", second)


def _sessions(run: Run) -> None:
    _write(run, "a.txt", "one\n", "--session", "one")
    _write(run, "a.txt", "two\n", "--session", "two")
    run("fork", "--session", "one")
    run("pin", run("log", "--session", "two")[0]["id"])
    run("call", "snapshot.list", "--args", "{}", "--session", "two")
    run("compact", "one")


STORES: dict[str, Callable[[Run], None]] = {"work": _work, "undo": _undo, "sessions": _sessions}


def unpack(name: str, home: Path) -> None:
    with tarfile.open(FIXTURES / f"store-4-{name}.tar.gz") as packed:
        packed.extractall(home, filter="data")
    home.chmod(0o700)


def log_of(name: str) -> Any:
    return json.loads((FIXTURES / f"store-4-{name}-log.json").read_text("utf-8"))


def _make(name: str, work: Callable[[Run], None]) -> None:
    root, home = BASE / name, BASE / "home" / name
    shutil.rmtree(BASE, ignore_errors=True)
    root.mkdir(parents=True)
    home.parent.mkdir()
    run = verbs(home, root)
    work(run)
    (FIXTURES / f"store-4-{name}-log.json").write_text(json.dumps(run("log"), indent=1) + "\n", "utf-8")
    with tarfile.open(FIXTURES / f"store-4-{name}.tar.gz", "w:gz") as packed:
        for path in sorted(home.rglob("*")):
            packed.add(path, str(path.relative_to(home)), recursive=False, filter=_anonymous)
    shutil.rmtree(BASE)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    for name, work in STORES.items():
        _make(name, work)
