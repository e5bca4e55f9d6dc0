"""External case files, run through our effects, where somebody has put them beside the checkout.

They are no part of the project: `MULLIGAN_CORPORA` names their directory, else `shared/corpora` beside the repository
is looked at. Where there are none, there is nothing to run.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mulligan.effects.receipt import inline_bytes
from tests.effects.effect_session import EffectSession, open_effect_session
from tests.files.tree.ignored import is_ignored

SETS = {
    "v4a_cases.json": "v4a",
    "udiff_cases.json": "udiff",
    "edit_cases.json": "edit",
    "gitignore_cases.json": "ignore",
}
SHOULD_PERCENT = 95
REPOSITORY = Path(__file__).parents[2]


def directory() -> Path:
    named = os.environ.get("MULLIGAN_CORPORA")
    return Path(named) if named else REPOSITORY.parent / "shared" / "corpora"


def sets() -> list[str]:
    return [name for file, name in SETS.items() if (directory() / file).exists() and (directory() / "run.py").exists()]


@contextmanager
def staged(root: str) -> Iterator[EffectSession]:
    """A effects on a root that is already there, its store elsewhere."""
    with tempfile.TemporaryDirectory() as home:
        os.symlink(root, os.path.join(home, "work"))
        effects = open_effect_session(Path(home))
        yield effects
        effects.workspace.close()


class Adapter:
    """What the runner asks for, each by one effect of a session."""

    def apply_v4a(self, root: str, patch: str) -> dict[str, Any]:
        with staged(root) as effects:
            status = effects.perform("apply_patch", patch=patch)["status"]
        return {"outcome": "ok" if status == "ok" else "fail", "status": status}

    def apply_udiff(self, root: str, patch: bytes) -> dict[str, Any]:
        with staged(root) as effects:
            found = effects.perform("apply_patch", patch=inline_bytes(patch), patch_format="unified")
        outcomes = {"ok": "ok", "reject": "rejects", "forbidden": "forbidden"}
        rejects = [
            {"path": one["path"], "hunk_index": hunk["index"]}
            for one in found.get("rejects", [])
            for hunk in one["hunks"]
        ]
        return {"outcome": outcomes.get(found["status"], "invalid"), "rejects": rejects}

    def edit(self, root: str, path: str, old: str, new: str, replace_all: bool) -> dict[str, Any]:
        with staged(root) as effects:
            return effects.perform("edit_file", path=path, old_string=old, new_string=new, replace_all=replace_all)

    def ignored(self, root: str, path: str, is_dir: bool) -> bool:
        """A file is ignored when a glob does not find it. What no effect lists is asked of the rules themselves."""
        if is_dir:
            return is_ignored(root, path, True)
        with staged(root) as effects:
            found = effects.perform("glob", pattern="**", max_results=10_000)["paths"]["inline_text"]["text"]
        return os.path.normpath(path) not in found.split("\n")


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpora_run", directory() / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestExternalCases:
    __test__ = bool(sets())

    # The runner is not ours, and leaves closing its files to the interpreter.
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("name", sets())
    def test_every_must_holds_and_nearly_every_should(self, name: str) -> None:
        runner = load_runner()
        tally = runner.Tally(name, 10)
        run: Callable[[Adapter, Any, int | None], None] = runner.SETS[name][1]
        run(Adapter(), tally, None)
        assert [case for case in tally.bad if case[0] == "must"] == []
        good, count = tally.tiers.get("should", (0, 0))
        assert good * 100 >= SHOULD_PERCENT * count, tally.bad
