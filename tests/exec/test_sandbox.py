"""What a sandboxed command cannot do, tried from the inside."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mulligan.exec.capture.notify import Capture, Notify
from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.command import Spools, command
from mulligan.exec.run import CommandResult, run
from tests.exec.sandboxed_breakout import found_out
from tests.exec.trees import Recorder
from tests.exec.unprivileged_user import NOBODY, run_as_nobody
from tests.exec.window_captures import NoCapture


@pytest.fixture
def outside() -> Iterator[Path]:
    """Not below /tmp, which the sandbox replaces: somewhere that the command can see and would have rights to."""
    folder = Path(tempfile.mkdtemp(dir="/var/lib" if os.geteuid() == 0 else Path.home()))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.req("D7.sandbox_git_read_only")
@pytest.mark.parametrize("capture", [NoCapture, lambda: Notify(Recorder()), Overlay], ids=["bare", "notify", "overlay"])
def test_a_sandboxed_command_changes_nothing_outside(capture: type[NoCapture], tmp_path: Path, outside: Path) -> None:
    assert found_out(tmp_path, outside, capture()) == ["done"]


def test_a_sandboxed_command_of_an_unprivileged_user_changes_nothing_outside(outside: Path) -> None:
    if os.geteuid() == 0:
        os.chown(outside, NOBODY, NOBODY)
    assert run_as_nobody("tests.exec.sandboxed_breakout", str(outside)).splitlines() == ["done"]


def test_without_a_sandbox_most_of_it_works_so_the_attempts_are_real(outside: Path) -> None:
    if os.geteuid() == 0:
        os.chown(outside, NOBODY, NOBODY)
    worked = set(run_as_nobody("tests.exec.sandboxed_breakout", str(outside), "free").splitlines())
    assert worked >= {
        *("append outside", "create outside", "climb out", "through a symlink", "through a hard link"),
        *("truncate outside", "remove outside", "chmod outside", "times outside", "attribute outside", "mkdir outside"),
        *("hook", "git config", "move .git", "parent's root", "loopback", "unix socket", "abstract socket"),
    }


def caged(text: str, root: Path, capture: Capture, *, network: bool = True) -> tuple[CommandResult, bytes]:
    spools = Spools()
    asked = command(["sh", "-c", text], str(root))
    asked = replace(asked, sandbox="workspace", network="full" if network else "none")
    ran = run(asked, capture=capture, sink=spools)
    return ran, (spools.stdout.inline() or b"") + (spools.stderr.inline() or b"")


def test_changes_inside_are_still_caught(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    witness = Recorder()
    ran, _ = caged("echo after > a; mkdir d; mv a d/; echo x > /tmp/elsewhere", tmp_path, Notify(witness))
    root = os.fsencode(os.path.realpath(tmp_path))
    assert ran.touched == {root + b"/a", root + b"/d", root + b"/d/a"}
    assert witness.preimages[root + b"/a"].data == b"before"
    assert ran.coverage == ()
    assert ran.sandbox == "workspace"


def test_git_works_inside(tmp_path: Path) -> None:
    text = "git add . && git -c user.name=u -c user.email=e commit -qm m && git log --oneline | wc -l"
    os.system(f"cd {tmp_path} && git init -q && echo a > a")
    assert caged(text, tmp_path, NoCapture())[1].strip() == b"1"


def test_without_network_a_loopback_of_its_own_works(tmp_path: Path) -> None:
    code = (
        "import socket, threading\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname())\n"
        "s.accept()[0].sendall(b'hello')\n"
        "print(c.recv(5).decode())\n"
    )
    asked = replace(command([sys.executable, "-S", "-c", code], str(tmp_path)), network="none")
    spools = Spools()
    run(asked, capture=Notify(Recorder()), sink=spools)
    assert (spools.stdout.inline(), spools.stderr.inline()) == (b"hello\n", b"")
