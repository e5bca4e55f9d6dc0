"""Mulligan itself is killed while a command runs: the command dies, and whoever opens the store next puts it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.exec.commands import plant, repository, sh
from tests.exec.trees import tree
from tests.temp_workspace import open_temp_workspace

WORKER = """
import sys
from pathlib import Path
from tests.temp_workspace import open_temp_workspace
workspace = open_temp_workspace(Path(sys.argv[1]))
receipt, _ = workspace.session().perform("host.exec", {"argv": ["sh", "-c", sys.argv[2]], **eval(sys.argv[3])})
print(receipt.to_dict())
"""

_COARSE = 5
"""CLOCK_REALTIME_COARSE, by which the kernel stamps files; Python has no name for it."""

FILES = {
    "a": "1\n",
    "d/e/x": "x\n",
    "d/y": "y\n",
    "gone/deep/z": "z\n",
    "swap1/one": "1\n",
    "swap2/two": "2\n",
    "again/old": "old\n",
}
EVERYTHING = """
echo 2 > a; mkdir -p n/m/o; echo new > n/m/o/p; ln -s a n/l; mv d f; echo more >> f/e/x; rm -rf gone
mv swap1 t; mv swap2 swap1; mv t swap2; rm -rf again; mkdir again; echo fresh > again/new; chmod 700 hollow
mkdir n/q; mv f/y n/q/y
"""


@contextmanager
def worker(base: Path, script: str, params: str = "{}") -> Iterator[subprocess.Popen[str]]:
    """A process of its own that runs a command; it is dead at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", WORKER, str(base), script, params]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for_death(pid: int) -> None:
    """Returns when the process is gone: a pipe end or a process file cannot be waited for, its descriptor can."""
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        waiting = select.poll()  # `select.select` refuses descriptors over 1 023
        waiting.register(handle, select.POLLIN)
        assert waiting.poll(10_000), "the command outlived mulligan"
    finally:
        os.close(handle)


@pytest.mark.req("D7.notify_supervisor_death")
@pytest.mark.parametrize(
    "params",
    ["{'strategy': 'notify'}", "{'isolate': True}", "{'strategy': 'scan'}", "{'strategy': 'watch'}"],
    ids=["notify", "overlay", "scan", "watch"],
)
def test_killed_in_the_middle_of_a_command_the_tree_is_as_before(tmp_path: Path, params: str) -> None:
    root, gate = tmp_path / "work", tmp_path / "gate"
    plant(root, FILES)
    (root / "hollow").mkdir()
    repository(root, {"tracked": "t\n"})
    before = tree(os.fsencode(root))
    os.mkfifo(gate)
    git = "git -c user.name=u -c user.email=e commit -qm two --allow-empty; git checkout -qb other"
    script = f"{EVERYTHING}\n{git}\necho $$ > {gate}; sleep 1000; echo late > late"
    with worker(tmp_path, script, params) as process:
        shell = int(gate.read_text())
        os.kill(process.pid, signal.SIGKILL)
        wait_for_death(shell)
    workspace = open_temp_workspace(tmp_path)
    found = {path: one for path, one in tree(os.fsencode(root)).items() if b".git/objects/" not in path}
    assert found == {path: one for path, one in before.items() if b".git/objects/" not in path}
    assert [one.conflicts for one in workspace.recovered] in ([[]], [])
    workspace.close()


@pytest.mark.parametrize("way", ["scan", "watch"])
class TestWindows:
    """The ways that see a change only afterwards: the store knows what was there, the warden when it was over."""

    def killed(self, base: Path, script: str, way: str, *, warden_too: bool = False) -> None:
        gate = base / "gate"
        os.mkfifo(gate)
        with worker(base, f"{script}; echo $$ $PPID > {gate}; exec sleep 1000", f"{{'strategy': {way!r}}}") as process:
            shell, warden = (int(number) for number in gate.read_text().split())
            if warden_too:
                os.kill(process.pid, signal.SIGSTOP)  # else it would notice, and put everything back itself
                os.kill(warden, signal.SIGKILL)
                wait_for_death(warden)
                os.kill(shell, signal.SIGKILL)
            os.kill(process.pid, signal.SIGKILL)
            wait_for_death(shell)

    def test_a_persons_change_after_the_death_of_mulligan_stays_and_is_reported(self, tmp_path: Path, way: str) -> None:
        root = tmp_path / "work"
        plant(root, {"a": "1\n", "both": "1\n", "d/x": "x\n", "persons": "1\n"})
        self.killed(tmp_path, "echo 2 > a; echo 2 > both; rm d/x; mkdir n; echo n > n/n", way)
        wait_for_recorder(tmp_path)
        plant(root, {"both": "person\n", "persons": "2\n", "n/mine": "mine\n", "fresh": "f\n"})
        workspace = open_temp_workspace(tmp_path)
        (ended,) = workspace.recovered
        found = {path: (root / path).read_text() for path in ("a", "both", "d/x", "persons", "n/mine", "fresh")}
        assert found == {
            "a": "1\n",
            "both": "person\n",
            "d/x": "x\n",
            "persons": "2\n",
            "n/mine": "mine\n",
            "fresh": "f\n",
        }
        assert not (root / "n/n").exists()
        assert {"both", "persons", "fresh", "n/mine"} <= set(ended.conflicts)
        workspace.close()

    def test_if_the_init_process_was_killed_too_all_changes_stay_and_are_reported(
        self, tmp_path: Path, way: str
    ) -> None:
        root = tmp_path / "work"
        plant(root, {"a": "1\n"})
        self.killed(tmp_path, "echo 2 > a; echo n > n", way, warden_too=True)
        workspace = open_temp_workspace(tmp_path)
        (ended,) = workspace.recovered
        assert (root / "a").read_text() == "2\n" and (root / "n").exists()
        assert set(ended.conflicts) == {"a", "n"}
        workspace.close()

    @pytest.mark.req("D5.power_cut_tester")
    def test_an_earlier_windows_mark_that_a_power_cut_restores_does_not_close_this_window(
        self, tmp_path: Path, way: str
    ) -> None:
        """Windows share a file in the state directory, and nothing syncs it between them."""
        root, marks = tmp_path / "work", tmp_path / "home" / "windows"
        plant(root, {"a": "1\n"})
        workspace = open_temp_workspace(tmp_path)
        sh(workspace, "echo 1 > earlier", strategy=way)
        (mark,) = marks.iterdir()
        earlier = mark.read_bytes()
        workspace.close()
        self.killed(tmp_path, "echo 2 > a; echo n > n", way)
        wait_for_recorder(tmp_path)
        (mark,) = marks.iterdir()
        mark.write_bytes(earlier)
        workspace = open_temp_workspace(tmp_path)
        (ended,) = workspace.recovered
        assert {"a", "n"} <= set(ended.conflicts)
        workspace.close()

    def test_the_next_command_finds_everything_in_order(self, tmp_path: Path, way: str) -> None:
        root = tmp_path / "work"
        plant(root, {"a": "1\n"})
        self.killed(tmp_path, "echo 2 > a; echo n > n", way)
        workspace = open_temp_workspace(tmp_path)
        assert sh(workspace, "echo 3 > a", strategy=way).changes == [{"path": "a", "kind": "modified"}]
        assert workspace.session().undo().ok and (root / "a").read_text() == "1\n"
        assert list((tmp_path / "home" / "windows").iterdir()) != []
        workspace.close()
        assert list((tmp_path / "home" / "windows").iterdir()) == []


def wait_for_recorder(base: Path) -> None:
    """Returns when the warden has written when it was over and the clock of files is past that moment."""
    import fcntl
    import time

    for mark in (base / "home" / "windows").iterdir():
        with mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            ended_ns = int(file.read())
        while time.clock_gettime_ns(_COARSE) <= ended_ns + 1:
            pass


def test_every_command_of_a_call_is_rolled_back_when_it_dies(tmp_path: Path) -> None:
    root, gate = tmp_path / "work", tmp_path / "gate"
    plant(root, {"a": "1\n", "b": "1\n", "c": "1\n"})
    os.mkfifo(gate)
    code = f"""
import sys
from pathlib import Path
from tests.temp_workspace import open_temp_workspace
workspace = open_temp_workspace(Path(sys.argv[1]))
with workspace.session().call() as call:
    call.exec(["sh", "-c", "echo 2 > a"], strategy="scan")
    call.exec(["sh", "-c", "echo 2 > b; echo n > n"], strategy="watch")
    call.write_file("c", "2")
    call.exec(["true"], strategy="watch")
    Path({str(gate)!r}).write_text("here")
    sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE) as process:
        assert gate.read_text() == "here"
        process.kill()
    workspace = open_temp_workspace(tmp_path)
    assert [(root / name).read_text() for name in "abc"] == ["1\n"] * 3 and not (root / "n").exists()
    assert [one.conflicts for one in workspace.recovered] == [[]]
    workspace.close()


@pytest.mark.parametrize("way", ["scan", "watch"])
def test_a_persons_save_between_two_commands_stays_when_mulligan_dies(tmp_path: Path, way: str) -> None:
    root, gate = tmp_path / "work", tmp_path / "gate"
    plant(root, {"a": "1\n"})
    os.mkfifo(gate)
    code = f"""
import sys
from pathlib import Path
from tests.temp_workspace import open_temp_workspace
workspace = open_temp_workspace(Path(sys.argv[1]))
with workspace.session().call() as call:
    call.exec(["true"], strategy={way!r})
    (workspace.root / "a").write_text("person\\n")
    call.exec(["sh", "-c", "echo 2 > a; echo $$ > {gate}; exec sleep 1000"], strategy={way!r})
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment) as process:
        shell = int(gate.read_text())
        process.kill()
    wait_for_death(shell)
    workspace = open_temp_workspace(tmp_path)
    assert (root / "a").read_text() == "person\n"
    workspace.close()


def test_killed_while_an_observed_program_runs_nothing_is_rolled_back(tmp_path: Path) -> None:
    root, gate = tmp_path / "work", tmp_path / "gate"
    plant(root, {"a": "1\n"})
    os.mkfifo(gate)
    words = [sys.executable, "-m", "mulligan.cli", "run", "--root", str(root), "--store", str(tmp_path / "home")]
    script = f"echo 2 > a; echo $$ > {gate}; sleep 1000"
    process = subprocess.Popen([*words, "--", "sh", "-c", script], cwd=root, stderr=subprocess.DEVNULL)
    shell = int(gate.read_text())
    process.kill()
    process.wait()
    wait_for_death(shell)
    workspace = open_temp_workspace(tmp_path)
    assert (root / "a").read_text() == "2\n"
    assert workspace.session().undo().ok
    assert (root / "a").read_text() == "1\n"
    workspace.close()


def test_two_processes_run_commands_at_once(tmp_path: Path) -> None:
    root = tmp_path / "work"
    plant(root, {"one/a": "1\n", "two/a": "2\n"})
    before = tree(os.fsencode(root))
    script = "for i in $(seq 20); do echo $i > NAME/$i; echo $i >> NAME/a; done"
    with (
        worker(tmp_path, script.replace("NAME", "one")) as first,
        worker(tmp_path, script.replace("NAME", "two")) as second,
    ):
        answers = [process.communicate()[0] for process in (first, second)]
    assert all("'status': 'ok'" in answer for answer in answers), answers
    workspace = open_temp_workspace(tmp_path)
    assert workspace.session().undo().ok and workspace.session().undo().ok
    assert tree(os.fsencode(root)) == before
    workspace.close()


def test_a_path_that_another_call_is_changing_is_refused_to_the_command(tmp_path: Path) -> None:
    workspace = open_temp_workspace(tmp_path)
    plant(workspace.root, {"a": "1\n"})
    with workspace.session("one").call() as call:
        call.write_file("a", "2\n")
        receipt = sh(workspace, "echo 3 > a; echo 4 > b")
        assert receipt.ok and (workspace.root / "a").read_text() == "2\n"
    assert (workspace.root / "b").read_text() == "4\n"
    workspace.close()
