"""The supervisor: what it tells, what it leaves alone, and how it fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mulligan.exec.capture import seccomp
from mulligan.exec.capture.notify import Notify
from mulligan.exec.capture.touched_paths import PreimageKeeper
from mulligan.exec.command import Spools, command
from mulligan.exec.run import CommandResult, run
from mulligan.values.errors import Refused
from tests.exec.change_kinds import Kind, not_brought_back
from tests.exec.trees import Recorder

PYTHON = [sys.executable, "-S", "-c"]


def under(witness: PreimageKeeper, words: Sequence[str], root: Path) -> tuple[CommandResult, bytes]:
    spools = Spools()
    ran = run(command(list(words), str(root)), capture=Notify(witness), sink=spools)
    return ran, spools.stderr.inline() or b""


def real(path: Path) -> bytes:
    return os.fsencode(os.path.realpath(path))


class Raising:
    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        raise self._error()

    def has(self, path: bytes) -> bool:
        raise AssertionError("he was never told")


class TestTelling:
    def test_the_bytes_are_still_there_when_it_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("before")
        witness = Recorder()
        under(witness, ["sh", "-c", "echo after > a"], tmp_path)
        assert witness.preimages[real(tmp_path / "a")].data == b"before"
        assert (tmp_path / "a").read_text() == "after\n"

    def test_reading_stops_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("a")
        ran, _ = under(Recorder(), ["grep", "-r", "a", "."], tmp_path)
        assert (ran.stops, ran.touched) == (0, frozenset())

    @pytest.mark.parametrize(
        "words",
        ["mkdir -p d", "rm -f none", "set -C; echo x > f", "rmdir none", "ln f f", "mv none n", "chmod 600 none"],
    )
    def test_a_system_call_that_must_fail_touches_nothing(self, tmp_path: Path, words: str) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "f").write_text("f")
        witness = Recorder()
        ran, _ = under(witness, ["sh", "-c", f"{words}; true"], tmp_path)
        assert set(witness.preimages) <= {real(tmp_path / "f")}
        assert ran.touched <= {real(tmp_path / "f")}

    def test_paths_outside_the_root_are_left_alone(self, tmp_path: Path) -> None:
        root, outside = tmp_path / "root", tmp_path / "root-evil"
        root.mkdir()
        outside.mkdir()
        witness = Recorder()
        text = f"echo x > {outside}/a; echo y > ../root-evil/b; mkdir {outside}/d; rm {outside}/a; ln -s {outside} out"
        ran, _ = under(witness, ["sh", "-c", f"{text}; echo z > out/c"], root)
        assert ran.touched == {real(root) + b"/out"}
        assert (outside / "c").read_text() == "z\n"

    def test_moving_in_and_out_touches_the_inner_names(self, tmp_path: Path) -> None:
        root, outside = tmp_path / "root", tmp_path / "outside"
        (root / "d").mkdir(parents=True)
        (root / "d" / "x").write_text("x")
        (outside / "e").mkdir(parents=True)
        (outside / "e" / "y").write_text("y")
        witness = Recorder()
        ran, _ = under(witness, ["sh", "-c", f"mv d {outside}/; mv {outside}/e ."], root)
        names = {os.path.relpath(path, real(root)) for path in ran.touched}
        assert names == {b"d", b"d/x", b"e", b"e/y"}
        assert {os.path.relpath(path, real(root)) for path in witness.preimages} == {b"d", b"d/x", b"e"}

    def test_a_folder_that_is_only_chmodded_is_reported_alone(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "x").write_text("x")
        witness = Recorder()
        under(witness, ["chmod", "700", "d"], tmp_path)
        assert set(witness.preimages) == {real(tmp_path / "d")}

    def test_a_root_reached_through_a_symlink_is_the_real_one(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        ran, _ = under(Recorder(), ["sh", "-c", f"echo x > {tmp_path}/link/a"], tmp_path / "link")
        assert ran.touched == {real(tmp_path / "real") + b"/a"}

    def test_openat2_is_read_from_memory(self, tmp_path: Path) -> None:
        code = (
            "import ctypes, os\n"
            "how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o600, 0)\n"
            "libc = ctypes.CDLL(None)\n"
            "assert libc.syscall(437, -100, b'made', how, ctypes.sizeof(how)) >= 0\n"
            "how = (ctypes.c_uint64 * 3)(os.O_RDONLY, 0, 0)\n"
            "assert libc.syscall(437, -100, b'made', how, ctypes.sizeof(how)) >= 0\n"
        )
        ran, error = under(Recorder(), [*PYTHON, code], tmp_path)
        assert (ran.touched, error) == (frozenset({real(tmp_path) + b"/made"}), b"")

    def test_a_path_at_the_end_of_a_page_is_read(self, tmp_path: Path) -> None:
        code = (
            "import ctypes, mmap\n"
            "page = mmap.PAGESIZE\n"
            "libc = ctypes.CDLL(None)\n"
            "libc.mmap.restype = ctypes.c_void_p\n"
            "base = libc.mmap(None, 2 * page, 3, 0x22, -1, 0)\n"
            "libc.munmap(ctypes.c_void_p(base + page), page)\n"
            "ctypes.memmove(base + page - 6, b'edge!\\0', 6)\n"
            "assert libc.mkdir(ctypes.c_void_p(base + page - 6), 0o700) == 0\n"
            "assert libc.mkdir(None, 0o700) == -1\n"
        )
        ran, error = under(Recorder(), [*PYTHON, code], tmp_path)
        assert (ran.touched, error) == (frozenset({real(tmp_path) + b"/edge!"}), b"")

    def test_folders_that_many_threads_make_at_once_are_all_touched(self, tmp_path: Path) -> None:
        """Each tries its own first and makes the one above when that fails, which another may just have made."""
        code = (
            "import os, threading\n"
            "def make(path):\n"
            "    for one in (path, os.path.dirname(path), path):\n"
            "        try: os.mkdir(one)\n"
            "        except OSError: pass\n"
            "for turn in range(20):\n"
            "    work = [threading.Thread(target=make, args=(f'n{turn}/p{i}',)) for i in range(8)]\n"
            "    [one.start() for one in work]; [one.join() for one in work]\n"
        )
        ran, _ = under(Recorder(), [*PYTHON, code], tmp_path)
        made = {real(tmp_path / f"n{turn}") for turn in range(20)}
        made |= {real(tmp_path / f"n{turn}" / f"p{i}") for turn in range(20) for i in range(8)}
        assert ran.touched == made and not ran.shared

    def test_a_file_with_a_hard_link_outside_is_in_the_coverage(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        root.mkdir()
        (root / "a").write_text("a")
        os.link(root / "a", tmp_path / "alias")
        ran, _ = under(Recorder(), ["sh", "-c", f"echo x >> {tmp_path}/alias"], root)
        assert ran.coverage == ((real(tmp_path / "alias"), "hard_link"),)


class TestRefusing:
    @pytest.mark.parametrize("error", [lambda: OSError(28, "full"), lambda: Refused("conflict", "path_claimed", "no")])
    def test_a_keeper_that_cannot_store_the_preimage_refuses_the_change(
        self, tmp_path: Path, error: Callable[[], Exception]
    ) -> None:
        (tmp_path / "a").write_text("before")
        code = (
            "import errno\ntry: open('a', 'w')\nexcept OSError as e: assert e.errno == errno.EIO; raise SystemExit(7)"
        )
        ran, _ = under(Raising(error), [*PYTHON, code], tmp_path)
        assert (ran.exit_code, ran.touched, (tmp_path / "a").read_text()) == (7, frozenset(), "before")

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_supervisor_that_breaks_fails_the_command_closed(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("before")
        with pytest.raises(ZeroDivisionError):
            under(Raising(ZeroDivisionError), ["sh", "-c", "echo x > a; echo y > b; rm a"], tmp_path)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "before"}

    @pytest.mark.req("D7.notify_io_uring_denied")
    def test_io_uring_is_denied(self, tmp_path: Path) -> None:
        code = (
            "import ctypes, errno\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) == -1\n"
            "assert ctypes.get_errno() == errno.ENOSYS\n"
        )
        assert under(Recorder(), [*PYTHON, code], tmp_path) == (under(Recorder(), ["true"], tmp_path)[0], b"")

    def test_a_command_inside_another_is_refused_with_a_reason(self, tmp_path: Path) -> None:
        code = (
            "import sys; sys.path[:0] = sys.argv[1:]\n"
            "from tests.exec.test_notify import *\n"
            "try: under(Recorder(), ['true'], Path('.'))\n"
            "except Refused as e: assert (e.code, e.fields['step']) == ('unsupported_strategy', 'seccomp')\n"
            "else: raise SystemExit(9)\n"
        )
        ran, error = under(Recorder(), [sys.executable, "-c", code, *sys.path], tmp_path)
        assert (ran.exit_code, error) == (0, b"")


class TestFilter:
    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_each_machine_has_a_program_of_whole_instructions(self, machine: str) -> None:
        program = seccomp.program(machine, notify=True)
        assert program is not None
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096

    def test_a_machine_without_a_table_has_none(self) -> None:
        assert seccomp.program("riscv64", notify=True) is None

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_no_two_calls_share_a_number(self, machine: str) -> None:
        numbers = [call.number(machine) for call in seccomp.CALLS if call.number(machine)]
        assert len(numbers) == len(set(numbers))


NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "f"])
STEPS = st.one_of(
    st.builds("echo {0} >> {1} 2>/dev/null".format, st.integers(0, 9), NAMES),
    st.builds("mv -T {0} {1} 2>/dev/null".format, NAMES, NAMES),
    st.builds("rm -rf {0} 2>/dev/null".format, NAMES),
    st.builds("mkdir -p {0} 2>/dev/null".format, NAMES),
    st.builds("rmdir {0} 2>/dev/null".format, NAMES),
    st.builds("ln {0} {1} 2>/dev/null".format, NAMES, NAMES),
    st.builds("ln -sfn {0} {1} 2>/dev/null".format, NAMES, NAMES),
    st.builds("chmod {0} {1} 2>/dev/null".format, st.sampled_from(["700", "755", "u+x"]), NAMES),
    st.builds("cp -a {0} {1} 2>/dev/null".format, NAMES, NAMES),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_steps=st.lists(STEPS, max_size=6), does=st.lists(STEPS, max_size=8))
def test_any_sequence_of_changes_comes_back(
    given_steps: list[str], does: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = real(tmp_path_factory.mktemp("any"))
    kind = Kind(
        "any",
        "; ".join([*given_steps, "true"]).replace("2>/dev/null", "2>/dev/null || true"),
        "; ".join([*does, "true"]),
    )
    assert not_brought_back(kind, root) == {}
