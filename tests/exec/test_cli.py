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

from mulligan.testing import contents_of
from tests.exec.commands import plant, text

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
MULLIGAN = [sys.executable, "-m", "mulligan.cli"]


def heed_interrupts() -> None:
    """The shell that runs the tests may ignore signals (`nohup`, a background job), and a child would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


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
    @pytest.mark.req("D14.cli.exec_stdin")
    @pytest.mark.parametrize("options", [(), ("--json",), ("--isolate",), ("--strategy", "scan")])
    def test_the_command_reads_our_standard_input(self, run: Run, work: Path, options: tuple[str, ...]) -> None:
        done = run("exec", *options, "--", "sh", "-c", "cat > got", input="typed\n")
        assert (done.returncode, (work / "got").read_text()) == (0, "typed\n")

    @pytest.mark.req("D14.cli.exec_stdin")
    def test_a_command_inside_another_calls_command_reads_our_standard_input(self, run: Run, work: Path) -> None:
        inner = [*MULLIGAN, "exec", "--", "sh", "-c", "cat > got"]
        assert run("exec", "--", *inner, input="typed\n").returncode == 0
        assert (work / "got").read_text() == "typed\n"

    @pytest.mark.req("D14.cli.exec_stdin")
    def test_without_any_standard_input_the_command_reads_nothing(self, run: Run, work: Path) -> None:
        script = 'exec "$@" <&-'
        words = ["sh", "-c", script, "sh", *MULLIGAN, "exec", "--", "sh", "-c", "cat > got"]
        assert subprocess.run(words, check=False, capture_output=True).returncode == 0
        assert (work / "got").read_text() == ""

    def test_rolled_back_bytes_of_a_capture_window_are_listed_and_can_be_printed(self, run: Run, work: Path) -> None:
        plant(work, {"a": "1\n"})
        script = "echo mine > new; echo 2 > a; exit 1"
        assert run("exec", "--strategy", "scan", "--rollback-on", "nonzero", "--", "sh", "-c", script).returncode == 1
        call = log(run)[0]["id"]
        assert [
            (run("cat", call, name, "--after").stdout, run("cat", call, name).returncode) for name in ("a", "new")
        ] == [
            ("2\n", 1),
            ("mine\n", 1),
        ]
        told = [
            f"restored {name}: the store keeps the version that Mulligan replaced (`mulligan cat --after`)"
            for name in ("a", "new")
        ]
        assert [line.strip() for line in run("show", call).stdout.splitlines() if "the store keeps" in line] == told

    @pytest.mark.req("D14.cli.exec")
    def test_passes_output_and_exit_code_through_and_can_be_undone(self, run: Run, work: Path) -> None:
        plant(work, {"a": "1\n"})
        done = run("exec", "--", "sh", "-c", "echo out; echo err >&2; echo 2 > a; exit 7")
        assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
        assert run("undo").returncode == 0
        assert (work / "a").read_text() == "1\n"

    @pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
    def test_closed_streams_are_no_error(self, run: Run, work: Path, closed: str) -> None:
        command = f'"{sys.executable}" -m mulligan exec -- sh -c "echo out; echo err >&2; echo 2 > a; exit 7" {closed}'
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, (work / "a").read_text(), len(log(run))) == (7, "2\n", 1)
        assert run("verify").returncode == 0

    def test_answers_with_the_receipt_as_json(self, run: Run) -> None:
        done = run("exec", "--json", "--strategy", "scan", "--", "sh", "-c", "echo out; echo 1 > n")
        receipt = json.loads(done.stdout)
        assert (done.returncode, receipt["stdout"], receipt["strategy"]) == (0, text("out\n"), "scan")
        assert receipt["changes"] == [{"path": "n", "kind": "created"}]
        assert [one["id"] for one in log(run)] == [receipt["call_id"]]

    def test_rolls_a_failure_back_if_requested(self, run: Run, work: Path) -> None:
        done = run("exec", "--rollback-on", "nonzero", "--", "sh", "-c", "echo 1 > n; exit 4")
        assert done.returncode == 4 and done.stderr != ""
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

    def test_when_its_reader_has_gone_its_pipe_breaks_as_without_us(self, run: Run, work: Path) -> None:
        words = [*MULLIGAN, "exec", "--", "sh", "-c", "echo 1 > early; yes"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "y\n"
            process.stdout.close()
            assert (process.wait(), process.stderr.read()) == (128 + signal.SIGPIPE, "")
        assert os.listdir(work) == ["early"]
        (call,) = log(run)
        assert (call["status"], call["changes"][0]["path"]) == ("committed", "early")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_to_end_puts_everything_back_at_once(self, run: Run, work: Path, number: signal.Signals) -> None:
        gate = work.parent / "gate"
        os.mkfifo(gate)
        words = [*MULLIGAN, "exec", "--", "sh", "-c", f"echo 1 > n; echo > {gate}; sleep 1000"]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts) as process:
            gate.read_text()
            process.send_signal(number)
            assert process.wait() == 128 + number
        assert os.listdir(work) == []
        assert [call["status"] for call in log(run)] == ["aborted"]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_persons_save_survives_a_signal_and_is_reported(
        self, run: Run, work: Path, number: signal.Signals
    ) -> None:
        plant(work, {"f": "old\n"})
        gate = work.parent / "gate"
        os.mkfifo(gate)
        script = f"echo 1 > own; echo 1 > n; echo c >> f; echo > {gate}; sleep 1000"
        words = [*MULLIGAN, "exec", "--strategy", "notify", "--", "sh", "-c", script]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts) as process:
            gate.read_text()
            plant(work, {"f": "person's f\n", "n": "person's n\n"})
            process.send_signal(number)
            assert process.wait() == 128 + number
        assert contents_of(work) == {"f": b"person's f\n", "n": b"person's n\n"}
        theirs, call = log(run)
        assert (theirs["external"], [change["path"] for change in theirs["changes"]]) == (True, ["f", "n"])
        named = [{"path": path, "reason": reason} for reason in ("ambiguous", "conflicted") for path in "fn"]
        assert (call["status"], call["coverage"]) == ("aborted", named)

    @pytest.mark.parametrize("verb", ["exec", "run"])
    @pytest.mark.parametrize("turn", ["", " ", "a\tb", "x" * 257])
    def test_a_turn_is_printable_text(self, run: Run, verb: str, turn: str) -> None:
        done = run(verb, "--json", "--turn", turn, "--", "touch", "a")
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (125, "invalid_id")
        assert log(run) == []

    @pytest.mark.req("D14.cli.turn_option")
    def test_calls_with_the_same_turn_are_rolled_back_together(self, run: Run, work: Path) -> None:
        for name in ("a", "b"):
            run("exec", "--turn", "t1", "--", "touch", name)
        run("call", "write_file", "--turn", "t1", "--args", json.dumps({"path": "c", "content": "x"}))
        assert sorted(os.listdir(work)) == ["a", "b", "c"]
        assert run("rollback").returncode == 0
        assert os.listdir(work) == []


INNER = " ".join(MULLIGAN)
WRITE = f"{INNER} call write_file --args '" + json.dumps({"path": "f", "content": "new"}) + "'"


@pytest.mark.req("D7.mulligan_call_joins")
class TestInsideAnotherCall:
    """What Mulligan does in a command of a call is part of that call, and on record once."""

    @pytest.mark.parametrize(("verb", "strategy"), [("run", "notify"), ("exec", "notify"), ("exec", "scan")])
    def test_a_tool_writes(self, run: Run, work: Path, verb: str, strategy: str) -> None:
        plant(work, {"f": "old\n"})
        done = run(verb, "--strategy", strategy, "--", "sh", "-c", f"{WRITE}; echo mine > f; {WRITE}")
        first, second = map(json.loads, done.stdout.splitlines())
        assert (done.returncode, first["status"], second["status"]) == (0, "ok", "ok")
        assert (work / "f").read_text() == "new"
        (call,) = log(run)
        assert [one["path"] for one in call["changes"]] == ["f"]
        assert {call["id"]} == {first["call_id"], second["call_id"]}
        assert run("undo").returncode == 0
        assert (work / "f").read_text() == "old\n"

    def test_a_command_that_fails_is_rolled_back_alone(self, run: Run, work: Path) -> None:
        plant(work, {"keep": "1\n"})
        inner = f"{INNER} exec --rollback-on nonzero -- sh -c 'rm keep; echo 1 > junk; exit 3'"
        done = run("exec", "--", "sh", "-c", f"echo 1 > mine; {inner}; echo $?")
        assert done.stdout == "3\n"
        assert sorted(os.listdir(work)) == ["keep", "mine"]
        (call,) = log(run)
        assert [one["path"] for one in call["changes"]] == ["mine"]

    def test_a_command_has_what_was_asked_for_it(self, run: Run, work: Path) -> None:
        outside = work.parent / "outside"
        caged = f"{INNER} exec --json --sandbox workspace --network none -- sh -c 'echo 1 > n; echo 1 > {outside}'"
        late = f"{INNER} exec --timeout 0.1 -- sh -c 'echo 1 > late; sleep 1000'"
        elsewhere = f"{INNER} exec --cwd d -- pwd"
        done = run("exec", "--", "sh", "-c", f"{caged}; {late}; echo $?; mkdir d; {elsewhere}")
        answer, code, folder = done.stdout.splitlines()
        (call,) = log(run)
        receipt = json.loads(answer)
        assert (receipt["sandbox"], receipt["call_id"]) == ("workspace, network none", call["id"])
        assert (code, folder) == ("124", f"{work}/d")
        assert sorted(os.listdir(work)) == ["d", "n"] and not outside.exists()

    @pytest.mark.parametrize(
        "words", ["exec --turn t --", "exec --label l --", "exec --session s --", "run --turn t --"]
    )
    def test_options_that_need_a_call_of_their_own_are_refused_inside_a_call(
        self, run: Run, work: Path, words: str
    ) -> None:
        done = run("exec", "--", "sh", "-c", f"{INNER} {words} touch n")
        assert done.returncode == 125 and "joins it" in done.stderr
        assert os.listdir(work) == []

    def test_a_program_runs_on_the_same_streams_and_is_on_record_once(self, run: Run, work: Path) -> None:
        done = run("run", "--", *MULLIGAN, "run", "--", "sh", "-c", "cat > got; exit 6", input="typed\n")
        assert (done.returncode, (work / "got").read_text()) == (6, "typed\n")
        told = run("run", "--", *MULLIGAN, "run", "--json", "--", "sh", "-c", "echo 2 > got")
        newest, oldest = log(run)
        assert json.loads(told.stdout)["call_id"] == newest["id"]
        assert [[one["path"] for one in call["changes"]] for call in (newest, oldest)] == [["got"], ["got"]]

    def test_three_deep_is_still_the_same_call(self, run: Run, work: Path) -> None:
        done = run("exec", "--", *MULLIGAN, "exec", "--json", "--", "sh", "-c", WRITE)
        assert (done.returncode, (work / "f").read_text()) == (0, "new")
        (call,) = log(run)
        assert call["id"] in done.stdout

    def test_a_program_that_is_not_there_is_125(self, run: Run) -> None:
        script = "; ".join(f"{INNER} {verb} -- no-such-program-anywhere; echo $?" for verb in ("exec", "run"))
        done = run("exec", "--", "sh", "-c", script)
        assert (done.stdout, "Traceback" in done.stderr) == ("125\n125\n", False)

    def test_a_call_that_has_ended_is_not_joined(self, run: Run, work: Path) -> None:
        run("exec", "--", "touch", "a")
        for stale in (log(run)[0]["id"], "xx", "\udc80"):
            run("exec", "--", "touch", "b", env={**os.environ, "MULLIGAN_CALL": stale})
            assert run("undo").returncode == 0 and os.listdir(work) == ["a"]

    def test_another_workspace_keeps_its_own_record(self, run: Run, work: Path) -> None:
        other = work.parent / "other"
        other.mkdir()
        done = run("exec", "--", "sh", "-c", f"echo 1 > a; {INNER} exec --root {other} -- touch {other}/b")
        assert done.returncode == 0
        assert run("undo", "--root", str(other)).returncode == 0
        assert os.listdir(other) == [] and os.listdir(work) == ["a"]

    def test_the_store_that_was_named_is_the_one_it_finds(self, run: Run, work: Path) -> None:
        store = str(work.parent / "named")
        done = run("exec", "--store", store, "--", "sh", "-c", WRITE)
        (call,) = json.loads(run("log", "--store", store, "--json").stdout)
        assert json.loads(done.stdout)["call_id"] == call["id"]

    def test_a_command_that_cannot_join_the_call_is_refused_at_once(self, run: Run, work: Path) -> None:
        program = (
            "import json, mulligan\n"
            "session = mulligan.open('.').session('s')\n"
            "asked = {'write_file': {'path': 'f', 'content': ''}, 'exec': {'argv': ['touch', 'f']}}\n"
            "for effect, params in asked.items():\n"
            "    print(json.dumps(session.perform(effect, params)[0].to_dict()))\n"
        )
        run("exec", "--", "touch", "a")
        done = run("exec", "--", "sh", "-c", f'{INNER} undo; echo $?; exec "$0" -c "$1"', sys.executable, program)
        code, *told = done.stdout.splitlines()
        outer = next(call["id"] for call in log(run) if call["tool"] == "exec" and call["status"] == "committed")
        assert (code, os.listdir(work)) == ("1", ["a"])
        assert [(one["error_code"], one["claimed_by"]) for one in map(json.loads, told)] == [
            ("path_claimed", [outer]),
            ("path_claimed", [outer]),
        ]


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

    @pytest.mark.req("D14.cli.json_option")
    def test_answers_with_the_call_as_json(self, run: Run) -> None:
        done = run("run", "--json", "--", "sh", "-c", "echo 1 > n; exit 3")
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["exit_code"], done.stderr) == (3, 3, "")
        assert answer["changes"] == [{"path": "n", "kind": "created", "added": 1, "removed": 0}]
        assert [call["id"] for call in log(run)] == [answer["call_id"]]
        failed = run("run", "--json", "--", "no-such-program-anywhere")
        assert (failed.returncode, json.loads(failed.stdout)["error"]["code"]) == (125, "spawn_failed")

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_passes_on_what_asks_it_to_end(self, run: Run, work: Path, number: int) -> None:
        script = f"trap 'echo told > told; exit 3' {number}; echo ready; while :; do sleep 0.05; done"
        words = [*MULLIGAN, "run", "--", "sh", "-c", script]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts) as ours:
            assert ours.stdout is not None and ours.stdout.readline() == "ready\n"
            ours.send_signal(number)
        assert (ours.returncode, (work / "told").read_text()) == (3, "told\n")
        assert [(call["tool"], len(call["changes"])) for call in log(run)] == [("run", 1)]

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

    def test_an_interrupt_of_the_whole_group_reaches_the_program_once(self, work: Path) -> None:
        told = (
            "import signal, sys; times = []; signal.signal(2, lambda *_: (times.append(1), print('got', flush=True)))"
        )
        told += "; signal.signal(15, lambda *_: sys.exit(len(times))); print('ready', flush=True)"
        # Never for long: a signal that comes just before it begins to wait ends no wait.
        told += "\nimport select\nwhile True: select.select([], [], [], 0.05)"
        words = [*MULLIGAN, "run", "--", sys.executable, "-c", told]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, process_group=0, preexec_fn=heed_interrupts
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "got\n"
            process.send_signal(signal.SIGTERM)  # comes after whatever else is passed on
            assert process.wait() == 1

    def test_keeps_what_a_program_that_failed_has_done(self, run: Run, work: Path) -> None:
        assert run("run", "--", "sh", "-c", "echo 1 > a; kill -KILL $$").returncode == 128 + signal.SIGKILL
        assert (work / "a").exists()

    def test_a_program_that_is_not_there_is_125(self, run: Run) -> None:
        assert run("run", "--", "no-such-program-anywhere").returncode == 125


@pytest.mark.parametrize(("verb", "left"), [("exec", "1\n"), ("run", "2\n")])
def test_the_verb_after_a_kill_reports_its_recovery(run: Run, work: Path, verb: str, left: str) -> None:
    plant(work, {"a": "1\n"})
    gate = work.parent / "gate"
    os.mkfifo(gate)
    with subprocess.Popen([*MULLIGAN, verb, "--", "sh", "-c", f"echo 2 > a; echo > {gate}; sleep 1000"]) as process:
        gate.read_text()
        process.kill()
    told = run("log")
    (call,) = log(run)
    assert call["id"][-8:] in told.stderr and told.stderr.count("\n") == 1
    assert (work / "a").read_text() == left
    assert run("log").stderr == ""
    assert run("undo", call["id"]).returncode == (0 if verb == "run" else 2)
    assert (work / "a").read_text() == "1\n"


def test_a_persons_save_before_a_kill_is_reported_and_can_be_printed(run: Run, work: Path) -> None:
    plant(work, {"f": "old\n"})
    gate = work.parent / "gate"
    os.mkfifo(gate)
    words = [*MULLIGAN, "exec", "--strategy", "notify", "--", "sh", "-c", f"echo c >> f; echo > {gate}; sleep 1000"]
    with subprocess.Popen(words) as process:
        gate.read_text()
        plant(work, {"f": "person's f\n"})
        process.kill()
    (call,) = log(run)
    assert (work / "f").read_text() == "old\n"
    assert [(gap["path"], gap["reason"]) for gap in call["coverage"]] == [("f", "rescued")]
    assert "f: the store keeps" in run("coverage").stdout and "restored f" in run("show", call["id"]).stdout
    assert run("cat", call["id"], "f", "--after").stdout == "person's f\n"
