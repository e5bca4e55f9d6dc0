"""Replay: the same state from the journal alone, and the same program from the record alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.effects.replay_runner import ReplayDiverged, ReplaySession

CALLS = 200


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


def mixed(opened: Mulligan, name: str = "s", calls: int = CALLS) -> None:
    """Reads, writes, commands, failures, ways back, talk, scratchpads and slices."""
    random, session = Random(7), opened.session(name)
    session.set_scratchpad({"goals": ["replay"]})
    for number in range(calls):
        session.inject({"role": "user", "content": f"step {number} " + "x" * random.choice([0, 10, 100_000 // CALLS])})
        with session.turn(f"turn {number}"), session.call(f"c{number}") as call:
            call.write_file(f"f{number % 9}.txt", f"{number}\n" * random.randint(1, 2_000))
            call.read_file(f"f{random.randrange(9)}.txt")
            if number % 40 == 0:
                call.exec(["sh", "-c", f"echo {number} > out; rm -f f{number % 9}.txt"])
            if number % 7 == 0:
                call.fail("on purpose")
        if number % 10 == 3:
            session.undo()
        if number % 20 == 13:
            session.redo()
    session.compact({"keep_last": 5})


def cli(home: Path, *words: str) -> tuple[int, Any]:
    aside = home.parent / "aside"
    aside.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mulligan", *words, "--json"]
    environ = {**os.environ, "MULLIGAN_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=aside, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


@pytest.mark.req(
    "D13.replay_identical",
    "D14.cli.replay",
    "S1.verify.replay_or_die",
    "S1.replay.never_acts",
    "S3.live.replay_preserves",
)
def test_a_long_session_folds_to_the_same_bytes_elsewhere_and_without_its_files(
    opened: Mulligan, tmp_path: Path
) -> None:
    mixed(opened)
    opened.session("s").attach("tui", {"mode": "controller"})
    opened.session("s").client_inject_prompt("tui", "from a client")
    opened.close()
    code, here = cli(tmp_path / "home", "replay", "s", "--verify")
    assert (code, here["same"], here["calls"] >= CALLS) == (0, True, True)
    elsewhere = tmp_path / "other" / "place"
    shutil.copytree(tmp_path / "home", elsewhere)
    shutil.rmtree(tmp_path / "work")
    code, there = cli(elsewhere, "replay", "s", "--verify")
    assert (code, there["digest"]) == (0, here["digest"])
    code, named = cli(elsewhere, "replay", "s", "--verify", "--root", str(tmp_path / "work"))
    assert (code, named["digest"]) == (0, here["digest"])
    assert not (tmp_path / "work").exists()


@pytest.mark.req("D13.replay_verify_blobs", "S1.replay.missing_blob_fatal", "S1.replay.large_by_reference")
@pytest.mark.parametrize("tables", [("bodies",), ("bodies", "blobs")])
def test_a_blob_that_is_gone_is_fatal(opened: Mulligan, tmp_path: Path, tables: tuple[str, ...]) -> None:
    session = opened.session("s")
    session.inject({"role": "user", "content": Random(1).randbytes(90_000).hex()})
    opened.close()
    with apsw.Connection(str(tmp_path / "home" / "store.db")) as database:
        for table in tables:
            database.execute(f"DELETE FROM {table}")
    shutil.rmtree(tmp_path / "home" / "blobs", ignore_errors=True)
    for options in (("--verify",), ()):
        code, said = cli(tmp_path / "home", "replay", "s", *options)
        assert (code, said["error"]["code"]) == (3, "missing_cas_dependency")


@pytest.mark.req("D13.replay_verify_chain")
def test_a_changed_record_is_found(opened: Mulligan, tmp_path: Path) -> None:
    opened.session("s").inject({"role": "user", "content": "before"})
    opened.close()
    with apsw.Connection(str(tmp_path / "home" / "store.db")) as database:
        database.execute("UPDATE records SET body = CAST(replace(CAST(body AS TEXT), 'before', 'behind') AS BLOB)")
    assert cli(tmp_path / "home", "replay", "s", "--verify")[0] == 3


@pytest.mark.req("D13.replay_diff")
def test_two_sessions_are_compared_step_by_step(opened: Mulligan, tmp_path: Path) -> None:
    for name, last in (("a", "1"), ("b", "1"), ("c", "2")):
        session = opened.session(name)
        (tmp_path / "work" / "f").unlink(missing_ok=True)
        session.inject({"role": "user", "content": "go"})
        for content in ("0", last):
            with session.call() as call:
                call.write_file("f", content)
    opened.close()
    assert cli(tmp_path / "home", "replay", "diff", "a", "b") == (0, {"same": True, "divergence": None})
    code, found = cli(tmp_path / "home", "replay", "diff", "a", "c")
    sides = [found["divergence"][side]["params"]["content"] for side in ("ours", "theirs")]
    assert (code, found["divergence"]["step"], sides) == (1, 3, ["1", "2"])


@pytest.mark.req("D13.replay_diff")
def test_messages_too_large_for_a_record_are_compared_too(opened: Mulligan, tmp_path: Path) -> None:
    for name, letter in (("a", "x"), ("b", "x"), ("c", "y")):
        opened.session(name).inject({"role": "user", "content": letter * 100_000})
    opened.close()
    assert cli(tmp_path / "home", "replay", "diff", "a", "b") == (0, {"same": True, "divergence": None})
    code, found = cli(tmp_path / "home", "replay", "diff", "a", "c")
    ours, theirs = (found["divergence"][side]["said"] for side in ("ours", "theirs"))
    assert (code, found["divergence"]["step"], ours.startswith("sha256:"), ours == theirs) == (1, 1, True, False)


def program(session: Any, content: str = "one") -> str:
    with session.turn("go"), session.call("first") as call:
        call.write_file("a.txt", content)
        long = "y" * 10_000
        call.write_file("long.txt", long)
        text = call.read_file("long.txt").content["inline_text"]["text"]
        assert text == long
        return str(call.exec(["cat", "a.txt"]).stdout["inline_text"]["text"])


class TestRunner:
    @pytest.mark.req("D13.replay_runner", "S1.replay.consumes_receipts")
    def test_a_program_gets_the_recorded_receipts_and_touches_nothing(self, opened: Mulligan, tmp_path: Path) -> None:
        session = opened.session("s")
        assert program(session) == "one"
        for name in ("a.txt", "long.txt"):
            (tmp_path / "work" / name).unlink()
        heard: list[str] = []
        assert mulligan.ReplayRunner(session).run(lambda again: heard.append(program(again))) == 4
        assert (heard, list((tmp_path / "work").iterdir())) == (["one"], [])

    @pytest.mark.req("D13.replay_runner")
    def test_a_changed_argument_is_the_first_divergence_with_both_sides(self, opened: Mulligan) -> None:
        session = opened.session("s")
        program(session)
        with pytest.raises(ReplayDiverged) as caught:
            mulligan.ReplayRunner(session).run(lambda again: program(again, "two"))
        found = caught.value.divergence
        assert found.ours is not None
        assert found.theirs is not None
        assert (found.step, found.ours["params"]["content"], found.theirs["params"]["content"]) == (1, "one", "two")

    def test_a_whole_number_with_a_point_is_on_record_without(self, opened: Mulligan) -> None:
        session = opened.session("s")
        session.perform("glob", {"pattern": "**", "max_results": 1.0})
        for same in (1, 1.0):
            asked = {"pattern": "**", "max_results": same}
            assert mulligan.ReplayRunner(session).run(partial(ReplaySession.perform, effect="glob", params=asked)) == 1

    def test_a_program_that_ends_early_or_goes_on_diverges_too(self, opened: Mulligan) -> None:
        session = opened.session("s")
        program(session)

        def longer(again: ReplaySession) -> None:
            program(again)
            with again.call() as call:
                call.stat("a.txt")

        for wrong in (lambda again: None, longer):
            with pytest.raises(ReplayDiverged) as caught:
                mulligan.ReplayRunner(session).run(wrong)
            assert caught.value.code == "replay_diverged"
