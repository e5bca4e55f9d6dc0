"""Bundles on the command line."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.values.canonical import encode
from tests.session.bundle.example_secrets import secrets

FIXTURES = Path(__file__).parents[1] / "importers" / "fixtures"
SECRET = next(one for one in secrets(5) if one.kind == "github_classic").secret


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace in which session `s` was told a secret."""
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as opened:
        opened.session("s").inject({"role": "user", "content": f"use {SECRET}"})
    return tmp_path


def run(place: Path, *arguments: str, home: str = "home", given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [
        sys.executable,
        "-m",
        "mulligan",
        *arguments,
        "--root",
        str(place / "work"),
        "--store",
        str(place / home),
    ]
    return subprocess.run(command, capture_output=True, input=given, check=False)


def answer(done: subprocess.CompletedProcess[bytes]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.req("D14.cli.export")
def test_export_prints_one_canonical_document(place: Path) -> None:
    done = run(place, "export", "s")
    bundle = answer(done)
    assert bundle["redaction"]["mode"] == "sanitized"
    assert done.stdout == encode(bundle) + b"\n"
    assert SECRET.encode() not in done.stdout
    assert answer(run(place, "export", "s", "--mode", "replay_only"))["redaction"]["mode"] == "replay_only"


@pytest.mark.req("D14.cli.export", "D14.cli.import")
@pytest.mark.parametrize("mode", ["sanitized", "local", "replay_only"])
def test_a_bundle_goes_to_another_store_and_comes_back_the_same(place: Path, mode: str) -> None:
    first = answer(run(place, "export", "s", "--mode", mode, "-o", str(place / "b.json"), "--json"))
    assert (first["mode"], first["messages"]) == (mode, 1)
    assert stat.S_IMODE(os.stat(place / "b.json").st_mode) == 0o600
    made = answer(run(place, "import", str(place / "b.json"), "--json", home="other"))
    assert made == {"ok": True, "session_id": "s", "messages_loaded": 1}
    assert answer(run(place, "export", "s", "--mode", mode, home="other"))["bundle_id"] == first["bundle_id"]
    assert run(place, "verify", home="other").returncode == 0


@pytest.mark.req("D14.cli.import")
def test_import_takes_standard_input_and_another_name(place: Path) -> None:
    bundle = run(place, "export", "s").stdout
    assert answer(run(place, "import", "-", "--as", "copy", "--json", given=bundle))["session_id"] == "copy"
    again = run(place, "import", "-", "--as", "copy", given=bundle)
    assert (again.returncode, b"already" in again.stderr) == (2, True)


@pytest.mark.req("D14.cli.import", "D11.seed_other_agents")
@pytest.mark.parametrize(("agent", "said"), [("claude", 6), ("codex", 8), ("gemini", 7)])
def test_import_takes_other_agents_files(place: Path, agent: str, said: int) -> None:
    file = str(FIXTURES / f"{agent}_session.jsonl")
    made = answer(run(place, "import", "--from", agent, file, "--as", agent, "--json"))
    assert (made["ok"], made["session_id"], made["messages_loaded"]) == (True, agent, said)
    last = answer(run(place, "import", "--from", agent, file, "--last", "1", "--drop-tool-calls", "--json"))
    assert (last["messages_loaded"], last["truncated"]) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "nobody"), b"there is no session"),
        (("export", "s", "--mode", "open"), b"open"),
        (("export", "s", "--with-content"), b"Only a local bundle"),
        (("export", "s", "-o", "/nowhere/b.json"), b"Writing /nowhere/b.json"),
        (("import", "/nowhere.json"), b"not a file"),
        (("import", "/nowhere.json", "--last", "3"), b"--from"),
        (("import", "--from", "claude", "/nowhere.jsonl"), b"cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_make_nothing(place: Path, arguments: tuple[str, ...], words: bytes) -> None:
    done = run(place, *arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_bundle_is_refused(place: Path) -> None:
    done = run(place, "import", "-", given=b'{"_type": "mulligan_session_bundle"}')
    assert (done.returncode, b"schema_version" in done.stderr) == (2, True)


def test_an_export_that_fails_leaves_no_draft_behind(place: Path) -> None:
    (place / "taken").mkdir()
    before = sorted(os.listdir(place))
    assert run(place, "export", "s", "--mode", "local", "-o", str(place / "taken")).returncode in (1, 2)
    assert sorted(os.listdir(place)) == before
