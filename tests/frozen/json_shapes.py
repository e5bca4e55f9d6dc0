"""The shape of what each verb prints with `--json`: names of fields and types, over one scripted session of work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Shape = Any
"""A type's name, names joined by `|`, `[shape]` of a list, or shapes by names of fields (`name?`: not always there)."""


class Shell:
    """Runs verbs in one workspace, and keeps the shape of what each printed."""

    def __init__(self, base: Path) -> None:
        self.root, self._home = base / "work", base / "home"
        self.root.mkdir()
        self._home.mkdir()
        self.shapes: dict[str, Shape] = {}

    def run(self, *words: str) -> Any:
        command = [sys.executable, "-m", "mulligan", *words]
        env = {"PATH": os.environ["PATH"], "HOME": str(self._home), "MULLIGAN_HOME": str(self._home / "state")}
        done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def json(self, name: str, *words: str) -> Any:
        """Run a verb with `--json`, and keep the shape under a name."""
        value = json.loads(self.run(*name.split(), "--json", *words))
        self.shapes[name] = merged([self.shapes[name], shape_of(value)]) if name in self.shapes else shape_of(value)
        return value


def json_shapes(base: Path) -> dict[str, Shape]:
    shell = Shell(base)
    _work(shell)
    _look(shell)
    _undo(shell)
    _fork(shell)
    _sessions(shell)
    _store(shell)
    return shell.shapes


def _work(shell: Shell) -> None:
    def call(effect: str, **given: object) -> None:
        shell.json("call", effect, "--args", json.dumps(given))

    call("write_file", path="a.txt", content="one\ntwo\n")
    call("edit_file", path="a.txt", old_string="two", new_string="three")
    call("read_file", path="a.txt")
    call("move", path="a.txt", to="b.txt")
    shell.json("exec", "--", "sh", "-c", "echo made > made.txt; mkdir folder; echo more >> b.txt")
    shell.json("run", "--", "sh", "-c", "rm made.txt")


def _look(shell: Shell) -> None:
    shell.json("status")
    last = shell.json("log")[0]["id"]
    for verb in ("show", "diff", "coverage"):
        shell.json(verb, last)
    shell.json("blame", "b.txt")


def _undo(shell: Shell) -> None:
    shell.json("undo", "--dry-run")
    shell.json("undo")
    shell.json("redo")
    last = shell.json("log")[0]["id"]
    shell.json("pin", last)
    shell.json("restore", last, "--dry-run")
    shell.json("rollback", "--dry-run")
    shell.json("rewind", last, "--dry-run")


def _fork(shell: Shell) -> None:
    forked = shell.json("fork", "--files", "copy")
    shell.json("branches")
    shell.json("merge", forked["session_id"], "--dry-run")
    shell.json("drop", forked["session_id"], "--yes")


def _sessions(shell: Shell) -> None:
    shell.json("sessions")
    shell.json("sessions show", "default")
    shell.json("replay", "default")
    shell.json("compact", "default")


def _store(shell: Shell) -> None:
    shell.json("token create", "--principal", "one", "--ttl", "1h")
    shell.json("token list")
    shell.json("forget", "made.txt", "--yes")
    shell.json("gc", "--yes")
    for verb in ("verify", "store", "du"):
        shell.json(verb)
    # What it finds depends on the machine.
    findings = shell.json("doctor")["findings"]
    shell.shapes["doctor"] = {"findings": [sorted({name for one in findings for name in one})]}


def shape_of(value: Any) -> Shape:
    if isinstance(value, dict):
        return {name: shape_of(one) for name, one in value.items()}
    if isinstance(value, list):
        return [merged(map(shape_of, value))] if value else []
    return {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}[type(value)]


def is_same(one: Shape, other: Shape) -> bool:
    """Whether they agree. What a list that was empty would hold is not known."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return not (one and other) or is_same(one[0], other[0])
    return bool(one == other)


def merged(shapes: Iterable[Shape]) -> Shape:
    """One shape that all have."""
    several = list(shapes)
    if all(isinstance(one, dict) for one in several):
        names = {name.removesuffix("?") for one in several for name in one}
        return dict(_field(name, several) for name in sorted(names))
    if all(isinstance(one, list) for one in several):
        inner = [element for one in several for element in one]
        return [merged(inner)] if inner else []
    options = {json.dumps(one, sort_keys=True): one for one in several}
    flat = {
        part for one in options.values() for part in (one.split("|") if isinstance(one, str) else [json.dumps(one)])
    }
    return next(iter(options.values())) if len(options) == 1 else "|".join(sorted(flat))


def _field(name: str, several: list[dict[str, Shape]]) -> tuple[str, Shape]:
    found = [one[key] for one in several for key in (name, f"{name}?") if key in one]
    always = all(name in one for one in several)
    return (name if always else f"{name}?"), merged(found)
