"""Short ways to run a command on a workspace and to say what it should answer."""

from __future__ import annotations

import os
import time
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mulligan.effects.receipt import Receipt
from mulligan.exec.capture.scan import RACY_NS
from tests.exec.trees import Seen, tree
from tests.temp_workspace import TempWorkspace


def execute(workspace: TempWorkspace, *argv: str, **params: Any) -> Receipt:
    """host.exec as a call of its own."""
    receipt, _ = workspace.session().perform("host.exec", {"argv": list(argv), **params})
    return receipt


def sh(workspace: TempWorkspace, text: str, **params: Any) -> Receipt:
    return execute(workspace, "sh", "-c", text, **params)


def told(receipt: Receipt) -> tuple[str, str | None]:
    return receipt.status, receipt.error_code


def text(content: str) -> dict[str, Any]:
    return {"inline_text": {"text": content}}


def bytes_of(text: str) -> bytes:
    return b64decode(text.removeprefix("base64:"))


def plant(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def at_rest(paths: Iterable[Path]) -> None:
    """Wait until what was just written is so old that its stamp can be trusted."""
    old_ns = max((path.lstat().st_ctime_ns for path in paths), default=0) + RACY_NS
    while time.clock_gettime_ns(time.CLOCK_REALTIME) <= old_ns:
        os.sched_yield()


def repository(root: Path, files: dict[str, str]) -> None:
    """A git repository with one commit of these files, all of which git knows to be clean."""
    import subprocess

    plant(root, files)
    at_rest(root / name for name in files)
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*GIT, *words], cwd=root, check=True)


GIT = ["git", "-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]


def git(root: Path, *words: str) -> str:
    import subprocess

    # Without taking the chance to rewrite the index.
    command = [*GIT, "--no-optional-locks", *words]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def seen(workspace: TempWorkspace) -> dict[bytes, Seen]:
    """Everything but git's objects, of which new ones may always stay."""
    found = tree(os.fsencode(workspace.root))
    return {path: one for path, one in found.items() if b".git/objects/" not in path}
