"""A root with the substrate's tools at hand, with or without git, and the little git that tests do themselves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mulligan
from mulligan.api import Mulligan
from mulligan.effects.snapshot_tools.context import RequestInfo, SnapshotContext
from mulligan.effects.snapshot_tools.tools import BY_NAME, run_tool
from mulligan.values.ids import SessionId

GIT_ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "Test User",
    "GIT_AUTHOR_EMAIL": "test@example.com",
    "GIT_COMMITTER_NAME": "Test User",
    "GIT_COMMITTER_EMAIL": "test@example.com",
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
}


@dataclass
class MovingClock:
    """Real enough to sort by, and movable by hand."""

    ahead: timedelta = field(default_factory=timedelta)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


def git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=root, env=GIT_ENV, capture_output=True, check=True)
    return done.stdout


def known_repository(root: Path) -> Path:
    """The repository of the known vectors."""
    (root / "src").mkdir(parents=True)
    (root / "src/main.rs").write_text("fn main() {}")
    (root / "README.md").write_text("# Toy Repo")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Initial commit")
    return root


@dataclass
class SnapshotWorkspace:
    root: Path
    opened: Mulligan
    context: SnapshotContext
    clock: MovingClock
    session: str = "tests"

    def ask(self, tool: str, /, **args: Any) -> dict[str, Any]:
        return run_tool(self.context, BY_NAME[tool], args, RequestInfo(SessionId(self.session))).body

    def ok(self, tool: str, /, **args: Any) -> dict[str, Any]:
        body = self.ask(tool, **args)
        assert "error" not in body, body
        return body

    def code(self, tool: str, /, **args: Any) -> str:
        body = self.ask(tool, **args)
        assert "error" in body, body
        return str(body["error"]["code"])

    def write(self, path: str, text: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def snapshot(self, *paths: str) -> str:
        return str(self.ok("snapshot.create", paths=list(paths))["snapshot_id"])


@contextmanager
def open_snapshot_workspace(root: Path, store: Path, clock: MovingClock | None = None) -> Iterator[SnapshotWorkspace]:
    clock = clock or MovingClock()
    with mulligan.open(str(root), store=str(store), clock=clock) as opened:
        context = SnapshotContext(opened.open_root, opened.boundary)
        try:
            yield SnapshotWorkspace(root, opened, context, clock)
        finally:
            context.close()
