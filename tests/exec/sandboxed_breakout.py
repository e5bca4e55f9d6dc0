"""Puts `breakout` into a sandbox and says what got out. Run as a program it does so as whoever it runs as."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mulligan.exec.capture.notify import Capture, Notify
from mulligan.exec.command import Spools, command
from mulligan.exec.run import run
from tests.exec.trees import Recorder, tree


def found_out(root: Path, outside: Path, capture: Capture, *, free: bool = False) -> list[str]:
    """The ways that worked, as the inside says, and what changed outside, as we see. `done` when all ran to the end."""
    subprocess.run(["git", "init", "-q"], cwd=root, check=True, env=os.environ | {"HOME": str(root)})
    shutil.copy(Path(__file__).with_name("breakout.py"), root / "breakout.py")
    (root / "inside").write_text("inside")
    (outside / "kept").write_text("kept")
    before, hooks = tree(os.fsencode(outside)), tree(os.fsencode(root / ".git"))
    abstract = f"mulligan-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, _listener(str(outside / "socket")), _listener("\0" + abstract):
        before = tree(os.fsencode(outside))
        # The real one: a virtual environment may be below /tmp, which the sandbox replaces.
        words = [os.path.realpath(sys.executable), "-S", "breakout.py", str(outside), str(tcp.getsockname()[1])]
        asked = command([*words, str(outside / "socket"), abstract], str(root), env={"HOME": str(root)})
        spools = Spools()
        locked = replace(asked, sandbox="workspace", network="none")
        run(asked if free else locked, capture=capture, sink=spools)
    changed = [] if tree(os.fsencode(outside)) == before else ["the outside changed"]
    changed += [] if tree(os.fsencode(root / ".git")) == hooks else ["git changed"]
    changed += ["temp is shared"] if Path("/tmp", abstract).exists() else []
    Path("/tmp", abstract).unlink(missing_ok=True)
    errors = (spools.stderr.inline() or b"").decode()
    return (spools.stdout.inline() or b"").decode().splitlines() + changed + errors.splitlines()


def _listener(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen()
    return listener


def main() -> None:
    root = Path(os.path.realpath(tempfile.mkdtemp()))
    free = sys.argv[2:] == ["free"]
    print(*found_out(root, Path(sys.argv[1]), Notify(Recorder()), free=free), sep="\n")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
