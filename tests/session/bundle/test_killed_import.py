"""A session that arrives is there whole or not at all, whoever dies and whoever else brings it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mulligan.api as api
from mulligan.effects.session import DurableSession
from mulligan.store.verify import verify
from mulligan.values.canonical import encode
from mulligan.values.errors import MulliganError
from tests.session.bundle.example_sessions import elsewhere, full, talk

CHILD = Path(__file__).with_name("killed_import.py")


@pytest.mark.parametrize("verb", ["import", "seed"])
def test_kill_at_any_moment_leaves_a_whole_session_or_none(session: DurableSession, tmp_path: Path, verb: str) -> None:
    full(session)
    talk(session, [f"prompt {number} " + "x" * 70_000 * (number == 5) for number in range(8)])
    file = tmp_path / "file"
    if verb == "import":
        file.write_bytes(encode(session.export("local", content=True)))
    else:
        file.write_text("".join(json.dumps({"type": "message", "message": one}) + "\n" for one in session.messages()))
    found = []
    for asked_max in (0, 1, 2, 3, 5, 8, 13, 21, 34, 35, 36, 37, 38, 40, 10_000):
        (tmp_path / f"w{asked_max}").mkdir()
        root, store = str(tmp_path / f"w{asked_max}"), str(tmp_path / f"h{asked_max}")
        child = [sys.executable, str(CHILD), verb, str(file), root, store, str(asked_max)]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        with api.open(root, store=store) as opened:
            lengths = [one["length"] for one in opened.sessions.list()]
            assert list(verify(opened.open_root.ledger.store, opened.open_root.ledger.journal.schema)) == []
        assert lengths in ([], [session.length()]), done.stderr
        found.append((done.stdout.strip() == "done", len(lengths)))
    assert (found[0], found[-1]) == ((False, 0), (True, 1))
    assert all(there for acknowledged, there in found if acknowledged)


def test_of_many_parallel_imports_of_a_session_one_succeeds(session: DurableSession, tmp_path: Path) -> None:
    full(session)
    bundle = encode(session.export("local"))

    def bring(_: int) -> str:
        try:
            return str(other.sessions.import_bundle(bundle))
        except MulliganError as error:
            return error.code

    with elsewhere(tmp_path) as other:
        with ThreadPoolExecutor(8) as pool:
            answers = sorted(pool.map(bring, range(8)))
        assert answers == ["s"] + ["session_exists"] * 7
        assert other.sessions.get("s").messages() == session.messages()


def test_a_session_that_is_transcripting_can_be_exported_meanwhile(session: DurableSession) -> None:
    with ThreadPoolExecutor(2) as pool:
        saying = pool.submit(talk, session, [f"prompt {number}" for number in range(60)])
        bundles = [session.export("local") for _ in range(10)]
        saying.result()
    counts = [len(one["transcript"]["sections"][0]["messages"]) for one in bundles]
    assert counts == sorted(counts)
    whole = session.messages()
    assert all(
        one["transcript"]["sections"][0]["messages"] == whole[:count]
        for one, count in zip(bundles, counts, strict=True)
    )
