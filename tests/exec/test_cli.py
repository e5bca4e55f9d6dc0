"""`mulligan exec` and `mulligan run`, as a shell and a person use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exec.commands import plant, text

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
MULLIGAN = [sys.executable, "-m", "mulligan.cli"]


def heed_interrupts() -> None:
    """Whoever runs the tests may ignore interrupts (a background job does), and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MULLIGAN_CALL", raising=False)
    return folder


@pytest.fixture
def run(work: Path) -> Run:
    def run_it(*words: str, **options: Any) -> Done:
        return subprocess.run([*MULLIGAN, *words], capture_output=True, text=True, check=False, **options)

    return run_it


def log(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("log", "--json").stdout)
    return found


class TestExec:
    @pytest.mark.req("D14.cli.exec")
    def test_passes_output_and_exit_code_through_and_can_be_undone(self, run: Run, work: Path) -> None:
        plant(work, {"a": "1\n"})
        done = run("exec", "--", "sh", "-c", "echo out; echo err >&2; echo 2 > a; exit 7")
        assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
        assert run("undo").returncode == 0
        assert (work / "a").read_text() == "1\n"

    def test_answers_with_the_receipt_as_json(self, run: Run) -> None:
        done = run("exec", "--json", "--strategy", "scan", "--", "sh", "-c", "echo out; echo 1 > n")
        receipt = json.loads(done.stdout)
        assert (done.returncode, receipt["stdout"], receipt["strategy"]) == (0, text("out\n"), "scan")
        assert receipt["changes"] == [{"path": "n", "kind": "created"}]
        assert [one["id"] for one in log(run)] == [receipt["call_id"]]

    def test_puts_a_failure_back_when_told_to(self, run: Run, work: Path) -> None:
        done = run("exec", "--rollback-on", "nonzero", "--", "sh", "-c", "echo 1 > n; exit 4")
        assert done.returncode == 4 and "put back" in done.stderr
        assert os.listdir(work) == []

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["--", "no-such-program-anywhere"], 125),
            (["--cwd", "/", "--", "true"], 125),
            (["--timeout", "0.1", "--", "sleep", "1000"], 124),
            (["--", "sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
            ([], 2),
            (["--strategy", "magic", "--", "true"], 2),
        ],
    )
    def test_has_codes_of_its_own_for_what_is_no_exit(self, run: Run, words: list[str], code: int) -> None:
        assert run("exec", *words).returncode == code

    def test_cannot_use_its_store_is_125(self, run: Run, work: Path) -> None:
        done = run("exec", "--store", str(work / "inside"), "--", "touch", "x")
        assert done.returncode == 125 and "mulligan:" in done.stderr
        assert os.listdir(work) == []

    def test_runs_where_the_person_is(self, run: Run, work: Path) -> None:
        (work / "sub").mkdir()
        run("exec", "--", "true")
        assert run("exec", "--", "pwd", cwd=work / "sub").stdout == f"{work}/sub\n"

    def test_streams_as_the_command_prints(self, work: Path) -> None:
        os.mkfifo(work / "gate")
        words = [*MULLIGAN, "exec", "--", "sh", "-c", "echo one; read x < gate; echo two"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "one\n"
            (work / "gate").write_text("\n")
            assert process.stdout.readline() == "two\n"

    @pytest.mark.parametrize("way", ["notify", "watch", "scan", "overlay"])
    def test_ctrl_c_ends_it_and_puts_everything_back(self, work: Path, way: str) -> None:
        # Outside: a FIFO seen through an overlay is another one, and nobody would come to the gate.
        gate = work.parent / "gate"
        os.mkfifo(gate)
        script = f"echo 1 > n; mkdir d; echo 2 > d/m; echo $$ > {gate}; sleep 1000"
        words = [*MULLIGAN, "exec", "--strategy", way, "--", "sh", "-c", script]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts) as process:
            shell = int(gate.read_text())
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
        assert os.listdir(work) == [] and not os.path.exists(f"/proc/{shell}")

    @pytest.mark.req("D7.mulligan_call_joins")
    def test_inside_another_joins_it(self, run: Run, work: Path) -> None:
        inner = " ".join(MULLIGAN)
        done = run("exec", "--", "sh", "-c", f"echo 1 > a; {inner} exec -- sh -c 'echo 2 > b; exit 3'")
        assert done.returncode == 3
        (call,) = log(run)
        assert [change["path"] for change in call["changes"]] == ["a", "b"]
        run("undo")
        assert os.listdir(work) == []

    @pytest.mark.req("D14.cli.turn_option")
    def test_calls_with_the_same_turn_are_rolled_back_together(self, run: Run, work: Path) -> None:
        for name in ("a", "b"):
            run("exec", "--turn", "t1", "--", "touch", name)
        run("call", "write_file", "--turn", "t1", "--args", json.dumps({"path": "c", "content": "x"}))
        assert sorted(os.listdir(work)) == ["a", "b", "c"]
        assert run("rollback").returncode == 0
        assert os.listdir(work) == []


class TestRun:
    @pytest.mark.req("D14.cli.run", "D7.env_run_passes_all")
    def test_makes_everything_a_program_does_one_call_with_a_summary(self, run: Run, work: Path) -> None:
        plant(work, {"a": "1\n"})
        script = "echo $SECRET > a; mkdir d; echo x > d/x; exit 5"
        done = run("run", "--", "sh", "-c", script, env={**os.environ, "SECRET": "s3"})
        assert done.returncode == 5
        assert (work / "a").read_text() == "s3\n"
        assert "3 paths changed" in done.stderr and "mulligan undo" in done.stderr
        (call,) = log(run)
        assert (call["tool"], call["label"], len(call["changes"])) == ("run", "sh", 3)
        assert run("undo").returncode == 0
        assert (work / "a").read_text() == "1\n" and os.listdir(work) == ["a"]

    def test_gives_the_program_its_own_standard_streams(self, run: Run) -> None:
        done = run("run", "--", "cat", input="typed\n")
        assert (done.returncode, done.stdout) == (0, "typed\n")
        assert "nothing changed" in done.stderr

    def test_leaves_an_interrupt_to_the_program(self, work: Path) -> None:
        os.mkfifo(work / "gate")
        script = "trap 'echo caught > got; exit 9' INT; echo > gate; while :; do sleep 0.01; done"
        words = [*MULLIGAN, "run", "--", "sh", "-c", script]
        with subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, process_group=0, preexec_fn=heed_interrupts
        ) as process:
            (work / "gate").read_text()
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait() == 9
        assert (work / "got").read_text() == "caught\n"

    def test_keeps_what_a_program_that_failed_has_done(self, run: Run, work: Path) -> None:
        assert run("run", "--", "sh", "-c", "echo 1 > a; kill -KILL $$").returncode == 128 + signal.SIGKILL
        assert (work / "a").exists()

    def test_a_program_that_is_not_there_is_125(self, run: Run) -> None:
        assert run("run", "--", "no-such-program-anywhere").returncode == 125
