"""Running a command: its words, streams, ending, deadline and descendants."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mulligan.exec.capture.notify import Notify
from mulligan.exec.command import Command, OutputSpool, Spools, Stream, allowed_environment, command
from mulligan.exec.pump import CommandHandle
from mulligan.exec.run import CommandResult, run
from mulligan.exec.start import LAUNCHER
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import Refused
from mulligan.values.limits import GIB_BYTES, MIB_BYTES
from tests.exec.trees import Recorder
from tests.exec.window_captures import NoCapture

NEVER_S = 600


def do(
    asked: Command, *, seconds: float | None = None, handle: CommandHandle | None = None
) -> tuple[CommandResult, bytes, bytes]:
    """Run under the usual way and give what was printed too."""
    spools = Spools()
    deadline = None if seconds is None else monotonic_s() + seconds
    ran = run(asked, capture=Notify(Recorder()), sink=spools, handle=handle, deadline=deadline)
    return ran, spools.stdout.inline() or b"", spools.stderr.inline() or b""


def shell(text: str, root: Path, **options: object) -> Command:
    return command(["sh", "-c", text], str(root), **options)  # type: ignore[arg-type]  # passed through


def wait_for_end_of(pid: int) -> bool:
    """True when the process ends before long."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(30_000))
    finally:
        os.close(fd)


class TestEnding:
    def test_an_exit_code_is_an_ordinary_answer(self, tmp_path: Path) -> None:
        ran, out, err = do(shell("echo out; echo err >&2; exit 3", tmp_path))
        assert (ran.exit_code, ran.signal, ran.timed_out, out, err) == (3, None, False, b"out\n", b"err\n")

    def test_a_signal_is_exit_code_minus_one(self, tmp_path: Path) -> None:
        ran, _, _ = do(shell("kill -TERM $$", tmp_path))
        assert (ran.exit_code, ran.signal) == (-1, signal.SIGTERM)

    def test_signals_are_as_a_fresh_shell_has_them(self, tmp_path: Path) -> None:
        _, out, _ = do(shell("grep -E 'Sig(Ign|Blk)' /proc/self/status", tmp_path))
        ignored_by_posix_spawn = 0b11 << 31  # the C library's own two
        assert {int(line.split()[1], 16) & ~ignored_by_posix_spawn for line in out.splitlines()} == {0}

    def test_only_the_standard_descriptors_are_inherited(self, tmp_path: Path) -> None:
        _, out, _ = do(command(["ls", "/proc/self/fd"], str(tmp_path)))
        assert out.split() == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself

    @pytest.mark.parametrize(("word", "number"), [("no-such-program", 2), ("./no-such", 2), ("./folder", 13)])
    def test_a_command_that_cannot_start_is_spawn_failed(self, tmp_path: Path, word: str, number: int) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(Refused) as refused:
            do(command([word], str(tmp_path)))
        assert (refused.value.code, refused.value.fields["errno"]) == ("spawn_failed", number)

    def test_the_program_is_found_on_the_commands_own_path(self, tmp_path: Path) -> None:
        tool = tmp_path / "bin" / "tool"
        tool.parent.mkdir()
        tool.write_text("#!/bin/sh\necho found\n")
        tool.chmod(0o755)
        _, out, _ = do(command(["tool"], str(tmp_path), env={"PATH": f"{tool.parent}:/usr/bin:/bin"}))
        assert out == b"found\n"


class TestWords:
    def test_no_words_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(Refused) as refused:
            command([], str(tmp_path))
        assert refused.value.code == "argv_empty"

    @pytest.mark.parametrize("cwd", ["..", "/", "out"])
    def test_a_folder_outside_the_root_is_refused(self, tmp_path: Path, cwd: str) -> None:
        root = tmp_path / "root"
        root.mkdir()
        (root / "out").symlink_to("..")
        with pytest.raises(Refused) as refused:
            command(["true"], str(root), cwd=cwd)
        assert (refused.value.status, refused.value.code) == ("forbidden", "path_not_allowed")

    def test_a_folder_that_became_a_link_out_of_the_root_is_not_entered(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        (root / "d").mkdir(parents=True)
        asked = command(["touch", "a"], str(root), cwd="d")
        (root / "d").rmdir()
        (root / "d").symlink_to("..")
        with pytest.raises(Refused) as refused:
            run(asked, capture=NoCapture(), sink=Spools())
        assert (refused.value.status, refused.value.code) == ("forbidden", "path_not_allowed")
        assert not (tmp_path / "a").exists()

    def test_a_name_that_only_begins_like_the_root_is_outside(self, tmp_path: Path) -> None:
        (tmp_path / "repo").mkdir()
        (tmp_path / "repo-evil").mkdir()
        with pytest.raises(Refused):
            command(["true"], str(tmp_path / "repo"), cwd="../repo-evil")

    def test_it_runs_in_the_folder_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        _, out, _ = do(command(["pwd"], str(tmp_path), cwd="a/b"))
        assert out.strip() == os.fsencode(tmp_path / "a" / "b")

    def test_the_environment_is_an_allowlist_and_what_was_given(self) -> None:
        whole = {b"PATH": b"p", b"LC_ALL": b"C", b"OPENAI_API_KEY": b"k", b"LD_PRELOAD": b"x", b"TMPDIR": b"t"}
        assert allowed_environment(whole) == {b"PATH": b"p", b"LC_ALL": b"C", b"TMPDIR": b"t"}

    def test_a_token_of_ours_does_not_reach_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET_TOKEN", "s3cret")
        _, out, _ = do(command(["env"], str(tmp_path), env={"GIVEN": "1"}))
        assert b"GIVEN=1" in out.splitlines()
        assert b"s3cret" not in out


class TestStreams:
    def test_input_arrives_whole(self, tmp_path: Path) -> None:
        sent = bytes(range(256)) * 8192
        _, out, _ = do(command(["sha256sum"], str(tmp_path), stdin=sent))
        expected = subprocess.run(["sha256sum"], input=sent, capture_output=True, check=True).stdout
        assert out == expected

    def test_without_input_it_reads_nothing(self, tmp_path: Path) -> None:
        assert do(command(["cat"], str(tmp_path)))[1] == b""

    def test_one_that_does_not_read_its_input_ends_all_the_same(self, tmp_path: Path) -> None:
        assert do(command(["true"], str(tmp_path), stdin=b"x" * MIB_BYTES))[0].exit_code == 0

    def test_a_deadline_covers_feeding_input(self, tmp_path: Path) -> None:
        ran, _, _ = do(command(["sleep", str(NEVER_S)], str(tmp_path), stdin=b"x" * MIB_BYTES), seconds=0.2)
        assert (ran.timed_out, ran.exit_code, ran.signal) == (True, -1, signal.SIGKILL)

    def test_a_gibibyte_of_output_costs_little_memory(self, tmp_path: Path) -> None:
        spools = Spools(str(tmp_path))
        before = _peak_bytes(reset=True)
        run(shell(f"head -c {GIB_BYTES} /dev/zero", tmp_path), capture=NoCapture(), sink=spools)
        used = _peak_bytes(reset=False) - before
        assert spools.stdout.size_bytes == GIB_BYTES
        assert used < 64 * MIB_BYTES
        spools.close()

    def test_a_sink_that_fails_kills_the_command_and_says_why(self, tmp_path: Path) -> None:
        class Full:
            def write(self, stream: Stream, data: bytes) -> None:
                raise OSError(28, "no space")

        pid_file = tmp_path / "pid"
        with pytest.raises(OSError) as caught:
            run(shell(f"echo $$ > pid; echo x; sleep {NEVER_S}", tmp_path), capture=NoCapture(), sink=Full())
        assert caught.value.errno == 28
        assert wait_for_end_of(int(pid_file.read_text()))


def _peak_bytes(*, reset: bool) -> int:
    """The most memory this process held since the last reset; what it holds now, just after one."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


class TestSpool:
    def test_small_output_stays_in_memory(self) -> None:
        spool = OutputSpool(inline_bytes=10)
        spool.append(b"0123456789")
        assert (spool.inline(), spool.file(), spool.size_bytes) == (b"0123456789", None, 10)

    def test_large_output_goes_to_a_file_whole(self, tmp_path: Path) -> None:
        spool = OutputSpool(str(tmp_path), inline_bytes=10, tail_bytes=4)
        spool.append(b"0123456789")
        spool.append(b"abcdef")
        file = spool.file()
        assert file is not None
        assert (spool.inline(), file.read(), spool.head, spool.tail) == (None, b"0123456789abcdef", spool.head, b"cdef")
        assert spool.read(8, 4) == b"89ab"
        spool.close()

    def test_beyond_the_limit_the_middle_is_dropped_and_counted(self, tmp_path: Path) -> None:
        spool = OutputSpool(str(tmp_path), inline_bytes=2, file_bytes=5, tail_bytes=3)
        for part in (b"abc", b"defgh", b"ijk"):
            spool.append(part)
        file = spool.file()
        assert file is not None
        assert (file.read(), spool.tail, spool.size_bytes, spool.dropped_bytes) == (b"abcde", b"ijk", 11, 6)
        spool.close()


class TestDescendants:
    def test_a_deadline_kills_one_that_left_its_session(self, tmp_path: Path) -> None:
        text = f"setsid sh -c 'echo $$ > pid; exec sleep {NEVER_S}' & while ! test -s pid; do :; done; sleep {NEVER_S}"
        ran, _, _ = do(shell(text, tmp_path), seconds=1.0)
        assert ran.timed_out
        assert wait_for_end_of(int((tmp_path / "pid").read_text()))

    def test_one_that_keeps_the_pipe_open_does_not_outlive_the_end(self, tmp_path: Path) -> None:
        text = f"(setsid setsid sh -c 'echo $$ > pid; sleep {NEVER_S}' &) ; while ! test -s pid; do :; done; echo done"
        ran, out, _ = do(shell(text, tmp_path))
        assert (ran.exit_code, out) == (0, b"done\n")
        assert ran.survivors_killed >= 1
        assert wait_for_end_of(int((tmp_path / "pid").read_text()))

    def test_one_that_ends_soon_after_is_waited_for(self, tmp_path: Path) -> None:
        ran, out, _ = do(shell("(cat /proc/self/stat > /dev/null; echo late) & exit 0", tmp_path))
        assert (out, ran.survivors_killed) == (b"late\n", 0)

    def test_a_fork_bomb_is_killed(self, tmp_path: Path) -> None:
        bomb = (
            "import os\n"
            "for _ in range(200):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        while True:\n"
            "            if os.fork() == 0: os._exit(0)\n"
            "            os.wait()\n"
            "os.wait()\n"
        )
        ran, _, _ = do(command([sys.executable, "-S", "-c", bomb, str(tmp_path)], str(tmp_path)), seconds=2.0)
        assert ran.timed_out
        assert ran.survivors_killed >= 100
        assert _processes_with(os.fsencode(tmp_path)) == []

    def test_in_the_background_the_run_ends_with_the_last(self, tmp_path: Path) -> None:
        asked = shell("mkfifo p; (read x < p; echo $x > after) & echo go > p; exit 0", tmp_path)
        ran = run(_in_background(asked), capture=Notify(Recorder()), sink=Spools())
        assert (tmp_path / "after").read_text() == "go\n"
        assert ran.survivors_killed == 0
        assert os.fsencode(os.path.realpath(tmp_path / "after")) in ran.touched


def _processes_with(word: bytes) -> list[str]:
    """Living processes that have this among their words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _in_background(asked: Command) -> Command:
    return Command(argv=asked.argv, root=asked.root, cwd=asked.cwd, env=asked.env, background=True)


class TestHandle:
    def test_cancel_from_another_thread_kills_it(self, tmp_path: Path) -> None:
        with CommandHandle() as handle:
            threading.Thread(target=handle.cancel).start()
            ran, _, _ = do(shell(f"sleep {NEVER_S}", tmp_path), handle=handle)
        assert (ran.cancelled, ran.signal) == (True, signal.SIGKILL)

    def test_a_signal_reaches_it(self, tmp_path: Path) -> None:
        with CommandHandle() as handle:

            class Signaller(Spools):
                def write(self, stream: Stream, data: bytes) -> None:
                    super().write(stream, data)
                    if data == b"ready\n":
                        handle.signal(signal.SIGUSR1)

            sink = Signaller()
            text = "trap 'echo got; exit 5' USR1; echo ready; while :; do read x < /dev/null; done"
            ran = run(shell(text, tmp_path), capture=NoCapture(), sink=sink, handle=handle)
        assert (ran.exit_code, sink.stdout.inline()) == (5, b"ready\ngot\n")


class TestLauncher:
    def test_one_that_was_killed_is_replaced(self, tmp_path: Path) -> None:
        do(shell("true", tmp_path))
        os.kill(LAUNCHER._pid, signal.SIGKILL)
        assert do(shell("echo again", tmp_path))[1] == b"again\n"

    def test_a_forked_child_starts_its_own(self, tmp_path: Path) -> None:
        do(shell("true", tmp_path))
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if do(shell("echo child", tmp_path))[1] == b"child\n" else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert do(shell("echo parent", tmp_path))[1] == b"parent\n"

    def test_many_threads_share_it(self, tmp_path: Path) -> None:
        answers: list[bytes] = []

        def work(number: int) -> None:
            answers.append(do(shell(f"echo {number} > f{number}; cat f{number}", tmp_path))[1])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [b"%d\n" % number for number in range(8)]

    def test_it_loads_nothing_heavy(self) -> None:
        code = "import sys; from mulligan.exec import init; print(*sorted(sys.modules))"
        source = str(Path(sys.modules["mulligan"].__file__ or "").parent.parent)
        found = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {source!r}); {code}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert not {"dataclasses", "inspect", "typing_extensions", "pydantic", "subprocess", "threading"} & set(found)

    def test_our_own_death_kills_the_command(self, tmp_path: Path) -> None:
        program = (
            "import sys\n"
            "from mulligan.exec.command import command\n"
            "from tests.exec.window_captures import NoCapture\n"
            "from mulligan.exec.run import run\n"
            "class Out:\n"
            "    def write(self, stream, data): print(data.decode(), end='', flush=True)\n"
            f"asked = command(['sh', '-c', 'setsid sh -c \"echo \\\\$\\\\$; exec sleep {NEVER_S}\"'], sys.argv[1])\n"
            "run(asked, capture=NoCapture(), sink=Out())\n"
        )
        source = str(Path(sys.modules["mulligan"].__file__ or "").parent.parent)
        owner = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": source},
        )
        with owner:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            owner.kill()
        assert wait_for_end_of(pid)
