"""A workspace with roots mounted beside it, and what can be done in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mulligan
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession

Json = dict[str, Any]


class MountedRoots:
    """A workspace `work` with three roots beside it, one of each mode, and one that is not mounted."""

    def __init__(self, base: Path, **how: Any) -> None:
        self.base = base
        for name in ("work", "lib", "ext", "box", "outside", "external"):
            (base / name).mkdir()
            (base / name / "a.txt").write_text(f"{name} one\n{name} two\n")
        self.opened: Mulligan = mulligan.open(str(base / "work"), store=str(base / "home"), **how)
        self.session: DurableSession = self.opened.session("s")
        for name, mode in (("lib", "read_only"), ("ext", "extend"), ("box", "sandboxed")):
            assert self.session.add_root(self.at(name), mount_mode=mode)["ok"]

    def at(self, path: str) -> str:
        return str(self.base / path)

    def perform(self, tool: str, **params: Any) -> Json:
        return self.session.perform(tool, params)[0].to_dict()

    def denied(self, tool: str, **params: Any) -> bool:
        """Refused, with nothing changed anywhere."""
        before = self.tree()
        found = self.perform(tool, **params)
        assert self.tree() == before
        return (found["status"], found.get("error_code")) == ("forbidden", "path_not_allowed")

    def work_in_two_roots(self) -> str:
        """One call in the primary root and the one that extends it."""
        with self.session.call("both") as call:
            assert call.write_file("a.txt", "W\n").ok
            assert call.edit_file(self.at("ext/a.txt"), "ext one", "E").ok
            assert call.write_file(self.at("ext/new.txt"), "N\n").ok
            assert call.write_file("b.txt", "B\n").ok
        return call.id

    def tree(self) -> dict[str, str]:
        places = ("work", "lib", "ext", "box", "outside", "external")
        files = [file for name in places for file in sorted((self.base / name).rglob("*")) if file.is_file()]
        return {str(file.relative_to(self.base)): file.read_text() for file in files}

    def text(self, path: str) -> str:
        return (self.base / path).read_text()

    def read(self, path: str) -> str:
        found: str = self.perform("read_file", path=path)["content"]["inline_text"]["text"]
        return found


LOOKING: list[tuple[str, Mapping[str, Any]]] = [
    ("read_file", {"path": "{}/a.txt"}),
    ("stat", {"path": "{}/a.txt"}),
    ("exists", {"path": "{}/a.txt"}),
    ("list_dir", {"path": "{}"}),
    ("grep", {"pattern": "one", "path": "{}"}),
    ("glob", {"pattern": "*.txt", "path": "{}"}),
]
CHANGING: list[tuple[str, Mapping[str, Any]]] = [
    ("write_file", {"path": "{}/new.txt", "content": "x"}),
    ("write_file", {"path": "{}/a.txt", "content": "x"}),
    ("edit_file", {"path": "{}/a.txt", "old_string": "one", "new_string": "1"}),
    ("apply_patch", {"patch": "*** Begin Patch\n*** Add File: {}/new.txt\n+x\n*** End Patch\n"}),
    ("delete", {"path": "{}/a.txt"}),
    ("move", {"path": "{}/a.txt", "to": "{}/b.txt"}),
    ("mkdir", {"path": "{}/dir"}),
    ("exec", {"argv": ["sh", "-c", "echo x > new.txt"], "cwd": "{}"}),
    ("shell", {"command": "rm a.txt", "cwd": "{}"}),
]


def at(params: Mapping[str, Any], place: str) -> Json:
    return {name: value.replace("{}", place) if isinstance(value, str) else value for name, value in params.items()}
