"""The guide to boundaries: its table is complete, and everything in it that can be run does what it says."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import mulligan
from mulligan.boundary.capability import Capability
from mulligan.testing import plant
from tests.cli.cli_result import Run

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "boundaries.md").read_text("utf-8")


def pieces(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def planted(work: Path) -> Path:
    plant(work, {"README.md": "v1\n", "src/app.py": "VERSION = 'v1'\n", "src/poetry.lock": "", "docs/a.txt": "v1\n"})
    plant(work, {".env": "TOKEN=1\n", "keys/server.pem": "secret\n"})
    return work


def test_the_guides_table_has_every_field() -> None:
    told = re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE)
    assert sorted(told) == sorted(field.name for field in fields(Capability))


def test_the_guides_python_runs(work: Path) -> None:
    names: dict[str, object] = {}
    for number, piece in enumerate(pieces("python")):
        exec(compile(piece, f"boundaries.md piece {number}", "exec", dont_inherit=True), names)
    assert (work / "play/src/app.py").read_text("utf-8") == "VERSION = 'v2'\n"


def test_the_guides_commands_are_refused_as_described(planted: Path, run: Run) -> None:
    (planted / "docs-only.json").write_text(pieces("json")[0])
    (commands,) = pieces("sh")
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        done = run(*arguments)
        assert (program, done.code, done.json["error_code"]) == ("mulligan", 1, "path_not_allowed")


def test_the_guides_policies_work_as_described(planted: Path) -> None:
    docs_only, no_secrets = (json.loads(piece) for piece in pieces("json"))
    with mulligan.open(".", policy=docs_only) as m, m.session().call() as call:
        assert call.edit_file("docs/a.txt", "v1", "v2").ok and call.edit_file("README.md", "v1", "v2").ok
        assert call.read_file("src/app.py").ok
        assert call.edit_file("src/app.py", "v1", "v2").error_code == "path_not_allowed"
        assert call.exec(["touch", "src/new"]).status == "forbidden"
    assert not (planted / "src/new").exists()
    with mulligan.open(".", policy=no_secrets) as m, m.session().call() as call:
        assert call.read_file("keys/server.pem").error_code == "path_not_allowed"
        assert call.list_dir("keys").text == ""
        assert call.grep("secret").match_count == 0
        assert list(call.read_file(".env").content["blob"]) == ["blob_ref", "size_bytes"]
        assert list(call.grep("TOKEN").matches) == ["blob"]
        assert call.read_file("README.md").text == "v2\n"
