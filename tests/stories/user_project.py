"""A small project of a user, and the `mulligan` command as that user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MULLIGAN = (sys.executable, "-m", "mulligan")


@dataclass(frozen=True)
class UserProject:
    """`root` is the project, `state` the state directory beside it."""

    root: Path
    state: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "MULLIGAN_HOME": str(self.state)}

    def files(self) -> dict[str, str]:
        found = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_text() for path in found}

    def mulligan(self, *words: str, code: int = 0) -> str:
        """Run one command in the project, check its exit code, and return its output."""
        done = subprocess.run([*MULLIGAN, *words], cwd=self.root, env=self.env, capture_output=True, text=True)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.mulligan(*words, "--json", code=code))


def make_project(base: Path) -> UserProject:
    project = UserProject(base / "project", base / "state")
    (project.root / "src").mkdir(parents=True)
    (project.root / "src/app.py").write_text("first = 1\nsecond = 2\nthird = 3\nfourth = 4\nfifth = 5\n")
    (project.root / "notes.txt").write_text("do not lose me\n")
    (project.root / ".gitignore").write_text(".env\n")
    (project.root / ".env").write_text("KEY=1\n")
    return project
