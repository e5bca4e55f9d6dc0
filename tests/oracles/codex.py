"""The Codex program as a judge of V4A patches: `codex --codex-run-as-apply-patch PATCH` edits the current folder."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = _ROOT / ".tools/node/node_modules/.bin/codex"

Tree = dict[str, bytes]


@cache
def codex_program() -> Path:
    """The native program behind the npm package's script, which would only start it, thirty times slower."""
    if not _SCRIPT.exists():
        raise FileNotFoundError(
            f"{_SCRIPT} is missing. These tests need the Codex program: make test-hosts installs it"
        )
    scope = _SCRIPT.resolve().parents[2]
    natives = [path for path in scope.glob("codex*/**/vendor/*/bin/codex") if os.access(path, os.X_OK)]
    return natives[0] if natives else _SCRIPT


def codex_apply(tree: Mapping[str, bytes], patch: str) -> Tree | None:
    """The tree after the patch; None if Codex refuses it."""
    program = codex_program()
    with tempfile.TemporaryDirectory(prefix="codex-") as folder:
        root = Path(folder)
        write_tree(root, tree)
        command = [str(program), "--codex-run-as-apply-patch", patch]
        done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"codex ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
        return read_tree(root) if done.returncode == 0 else None


def write_tree(root: Path, tree: Mapping[str, bytes]) -> None:
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_tree(root: Path) -> Tree:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
