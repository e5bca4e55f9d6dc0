"""What a user without privileges gets with state directories of various owners, printed as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import mulligan
from mulligan.agents.hooks import client
from mulligan.values.errors import MulliganError


def opened(home: str, work: Path) -> str:
    try:
        with mulligan.open(work, store=home), open(os.path.join(home, "store.db"), "rb"):
            return "opened"
    except MulliganError as error:
        assert "\n" not in error.message and home in error.message
        return error.code


def hooked(home: str) -> list[object]:
    """How the hook ends, and the first word of what it says."""
    command = [sys.executable, "-I", "-S", client.__file__, "claude", home]
    done = subprocess.run(command, input="{}", capture_output=True, text=True, env={"PATH": os.defpath})
    return [done.returncode, done.stdout, done.stderr.partition(" ")[0]]


VERBS = ("status", "log", "sessions", "undo", "doctor", "hooks status claude", "hooks install claude")


def said(home: str, work: Path) -> list[str]:
    """The verbs that accept a state directory, or refuse it with more than a line about it."""
    wrong = []
    for verb in VERBS:
        env = {"PATH": os.defpath, "HOME": str(work), "MULLIGAN_HOME": home, "PYTHONPATH": os.environ["PYTHONPATH"]}
        command = [sys.executable, "-B", "-m", "mulligan", *verb.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=work, check=False)
        words = [line for line in (done.stdout + done.stderr).splitlines() if "MULLIGAN_TRUST_OWNER" in line]
        if done.returncode != 2 or len(words) != 1 or (verb != "doctor" and len(done.stderr.splitlines()) != 1):
            wrong.append(verb)
    return wrong


def main() -> None:
    base = Path(tempfile.mkdtemp())
    work, own, shared = (base / name for name in ("work", "own", "shared"))
    for folder, mode in ((work, 0o755), (own, 0o700), (shared, 0o770)):
        folder.mkdir()
        folder.chmod(mode)
    # Of the superuser: one that everybody can write, and one that only its owner can write.
    public, foreign = tempfile.gettempdir(), "/usr"
    homes = {"own": str(own), "shared": str(shared), "public": public, "foreign": foreign}
    found = {name: opened(home, work) for name, home in homes.items()}
    accepted = [said(home, work) for home in (str(shared), public, foreign)]
    left = [os.listdir(shared), os.path.exists(os.path.join(public, "store.db"))]
    hooks = [hooked(home) for home in (str(shared), public, foreign)]
    os.environ["MULLIGAN_TRUST_OWNER"] = "1"
    print(
        json.dumps({**found, "left": left, "hooks": hooks, "accepted": accepted, "trusted": opened(str(shared), work)})
    )


if __name__ == "__main__":
    main()
