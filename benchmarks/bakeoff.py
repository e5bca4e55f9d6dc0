"""The strategies that capture a command's changes, compared: what undo restores, what is only named, what it costs.

    python benchmarks/bakeoff.py [--ways notify,watch,scan,overlay] [--only NAME]

Each row is a real command, or an event during one, in a fresh workspace with its own store. `back`: undo restored the
tree byte for byte and mode for mode. `named`: the receipt's coverage names what undo did not restore. `LOST`: neither.
The milliseconds are those of the command as a whole call, and of the same command without Mulligan.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import mulligan
from tests.exec.change_kinds import KINDS, make
from tests.exec.trees import Seen, tree

WAYS = ("notify", "watch", "scan", "overlay")
GIT = "git -c user.name=u -c user.email=e -c commit.gpgsign=false"
PACKAGES = 40
FILES_A_PACKAGE = 25


@dataclass
class Place:
    """A workspace under test."""

    base: Path
    way: str
    opened: mulligan.Mulligan

    @property
    def root(self) -> Path:
        return self.base / "work"

    def run(self, text: str, **params: Any) -> Any:
        words = {"argv": ["sh", "-c", text], "strategy": self.way, "env": {"HOME": str(self.base)}}
        return self.opened.session("bake").perform("host.exec", {**words, **params})[0]

    def undo(self) -> None:
        with suppress(mulligan.MulliganError):  # nothing to undo: nothing was applied
            self.opened.session("bake").undo(git="restore")

    def seen(self) -> dict[bytes, Seen]:
        found = tree(os.fsencode(self.root))
        return {path: one for path, one in found.items() if b".git/objects/" not in path}


@contextmanager
def place(way: str, given: str = ":") -> Iterator[Place]:
    base = Path(os.path.realpath(tempfile.mkdtemp()))
    (base / "work").mkdir()
    subprocess.run(["sh", "-ec", given], cwd=base / "work", check=True, capture_output=True)
    with mulligan.open(str(base / "work"), store=str(base / "store")) as opened:
        yield Place(base, way, opened)
    subprocess.run(["chmod", "-R", "u+w", str(base)], check=True)
    shutil.rmtree(base)


def verdict(there: Place, before: dict[bytes, Seen], receipt: Any) -> str:
    """After undo: is everything back, and if not, was it said?"""
    if not receipt.ok:
        return str(receipt.error_code)
    if receipt.changes:
        there.undo()
    now = there.seen()
    wrong = {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)} - {b"."}
    named = {os.fsencode(one["path"]) for one in receipt.coverage}
    reasons = {one["reason"] for one in receipt.coverage}
    if not wrong:
        return "back"
    if wrong <= named or "other_daemon" in reasons:
        return f"named ({len(wrong)}: {', '.join(sorted(reasons))})"
    return f"LOST {sorted(wrong)[:3]}"


# Real commands.


def bare_ms(given: str, text: str) -> float:
    base = Path(tempfile.mkdtemp())
    subprocess.run(["sh", "-ec", given], cwd=base, check=True, capture_output=True)
    started = time.perf_counter()
    subprocess.run(["sh", "-c", text], cwd=base, capture_output=True, env={**os.environ, "HOME": str(base)})
    spent = (time.perf_counter() - started) * 1000
    shutil.rmtree(base)
    return spent


def command_row(given: str, text: str) -> Callable[[str], str]:
    def row(way: str) -> str:
        with place(way, given) as there:
            there.run(":")  # what is to be kept warm is warm
            before = there.seen()
            started = time.perf_counter()
            receipt = there.run(text)
            spent = (time.perf_counter() - started) * 1000
            return f"{verdict(there, before, receipt)} {spent:.0f} ms (bare {bare_ms(given, text):.0f})"

    return row


REPOSITORY = f"""
git init -q -b main; mkdir -p src docs; for i in $(seq 200); do echo "$i" > src/f$i.txt; done
echo 'ignored/' > .gitignore; mkdir ignored; echo keep > ignored/x; git add -A; {GIT} commit -qm one
git checkout -qb other; for i in $(seq 100); do echo other >> src/f$i.txt; done; git rm -q src/f150.txt
{GIT} commit -qam two; git checkout -q main; echo dirty >> src/f200.txt
"""
LOCAL_PACKAGES = f"""
for p in $(seq {PACKAGES}); do mkdir -p ../packages/p$p/lib
  for f in $(seq {FILES_A_PACKAGE}); do echo "module.exports = $f" > ../packages/p$p/lib/f$f.js; done
  echo '{{"name": "p'$p'", "version": "1.0.0"}}' > ../packages/p$p/package.json
  deps="$deps,\\"p$p\\": \\"file:../packages/p$p\\""
done
echo "{{\\"name\\": \\"app\\", \\"dependencies\\": {{${{deps#,}}}}}}" > package.json
"""
NPM = "npm install --install-links --no-audit --no-fund --offline --loglevel=error --cache ../npm-cache"

# Things that happen around a command.

DAEMON = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    with open("built.txt", "a") as out: out.write(peer.recv(100).decode())
    peer.sendall(b"done"); peer.close()
"""
ASK = 'import socket; s = socket.socket(socket.AF_UNIX); s.connect("{path}"); s.sendall(b"x"); s.recv(9)'


def daemon_used_twice(way: str) -> str:
    """A build daemon that runs already writes into the workspace when a command asks it to; two commands do."""
    with place(way, "echo 0 > built.txt") as there:
        path = there.base / "daemon"
        words = [sys.executable, "-S", "-c", DAEMON, str(path)]
        with subprocess.Popen(words, cwd=there.root, stdout=subprocess.PIPE) as daemon:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            ask = f"{sys.executable} -S -c '{ASK.format(path=path)}'"
            answers = []
            for _ in range(2):
                before = there.seen()
                answers.append(verdict(there, before, there.run(ask)))
            daemon.kill()
        return ", then ".join(answers)


def daemon_left_behind(way: str) -> str:
    """A daemon that the command itself starts and leaves: it must not go on writing after the end."""
    with place(way, "echo 0 > a") as there:
        before = there.seen()
        receipt = there.run("(setsid sh -c 'while :; do echo x >> log; done' > /dev/null 2>&1 &) ; sleep 0.1")
        return verdict(there, before, receipt)


def gated(there: Place, text: str, edit: Callable[[], object]) -> Any:
    """A command that waits at GATE until another process has made an edit."""
    reached, go = there.base / "reached", there.base / "go"
    os.mkfifo(reached)
    os.mkfifo(go)
    found: list[Any] = []
    wait = f"echo > {reached}; read x < {go}"
    work = threading.Thread(target=lambda: found.append(there.run(text.replace("GATE", wait))))
    work.start()
    reached.read_text()
    edit()
    go.write_text("\n")
    work.join()
    return found[0]


def person_elsewhere(way: str) -> str:
    with place(way, "echo 1 > agents; echo 1 > persons") as there:
        gated(there, "echo 2 > agents; GATE", lambda: (there.root / "persons").write_text("mine\n"))
        there.undo()
        kept = (there.root / "persons").read_text() == "mine\n"
        back = (there.root / "agents").read_text() == "1\n"
        person, agent = "kept" if kept else "UNDONE", "back" if back else "LOST"
        return f"person's {person}, command's {agent}"


def person_in_the_same_file(way: str) -> str:
    lines = "".join(f"line {number}\n" for number in range(20))
    with place(way) as there:
        (there.root / "f").write_text(lines)
        edited = lines.replace("line 2\n", "mine 2\n")

        def save() -> None:
            now = (there.root / "f").read_text()
            (there.root / "f").write_text(now.replace("line 2\n", "mine 2\n"))

        receipt = gated(there, "sed -i 's/line 17/agent 17/' f; GATE; true", save)
        there.undo()
        now = (there.root / "f").read_text()
        said = ", ".join(sorted({one["reason"] for one in receipt.coverage}))
        if now == edited:
            return "merged"
        return f"person kept, {said}" if "mine 2" in now and said else f"LOST ({said})"


WORKER = """
import json, sys, mulligan
opened = mulligan.open(sys.argv[1], store=sys.argv[2])
opened.session("bake").perform("host.exec", json.loads(sys.argv[3]))
"""


def killed(way: str) -> str:
    """kill -9 of mulligan during a command; the next process that opens the store restores the tree."""
    base = Path(os.path.realpath(tempfile.mkdtemp()))
    root, gate = base / "work", base / "gate"
    root.mkdir()
    subprocess.run(["sh", "-ec", "echo 1 > a; mkdir -p d/e; echo x > d/e/x; echo gone > g"], cwd=root, check=True)
    os.mkfifo(gate)
    before = tree(os.fsencode(root))
    text = f"echo 2 > a; mv d f; echo y >> f/e/x; rm g; mkdir n; echo n > n/n; echo $$ > {gate}; sleep 100"
    asked = json.dumps({"argv": ["sh", "-c", text], "strategy": way})
    with subprocess.Popen([sys.executable, "-c", WORKER, str(root), str(base / "store"), asked]) as worker:
        shell = os.pidfd_open(int(gate.read_text()))
        worker.send_signal(signal.SIGKILL)
    _wait_for(shell)
    with mulligan.open(str(root), store=str(base / "store")) as opened:
        conflicts = [path for one in opened.recovered for path in one.conflicts]
    found = "back" if tree(os.fsencode(root)) == before else f"LOST {conflicts}"
    shutil.rmtree(base)
    return found


def _wait_for(handle: int) -> None:
    import select

    assert select.select([handle], [], [], 30)[0], "the command outlived mulligan"
    os.close(handle)


def every_kind(way: str) -> str:
    results: dict[str, list[str]] = {}
    for kind in KINDS:
        base = Path(os.path.realpath(tempfile.mkdtemp()))
        (base / "work").mkdir()
        make(kind, os.fsencode(base / "work"))
        with mulligan.open(str(base / "work"), store=str(base / "store")) as opened:
            there = Place(base, way, opened)
            before = there.seen()
            env = {"HOME": str(there.root), "GIT_CONFIG_NOSYSTEM": "1"}
            found = verdict(there, before, there.run(kind.does, env=env))
            results.setdefault(found.split(" ")[0], []).append(kind.name)
        subprocess.run(["chmod", "-R", "u+w", str(base)], check=True)
        shutil.rmtree(base)
    rest = "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in results.items() if name != "back")
    return f"{len(results.get('back', []))} of {len(KINDS)} back" + (f" ({rest})" if rest else "")


ROWS: dict[str, Callable[[str], str]] = {
    "66 kinds of change": every_kind,
    "npm install": command_row(LOCAL_PACKAGES, NPM),
    "npm install again": command_row(LOCAL_PACKAGES + NPM, "rm -rf node_modules/p1; " + NPM),
    "git commit": command_row(REPOSITORY, f"git add -A; {GIT} commit -qm three"),
    "git checkout": command_row(REPOSITORY, "git stash -q; git checkout -q other"),
    "git mv": command_row(REPOSITORY, "git mv src lib; git mv lib/f1.txt one.txt"),
    "rm -rf of 200": command_row(REPOSITORY, "rm -rf src"),
    "sed -i on 200": command_row(REPOSITORY, "sed -i s/1/one/ src/*"),
    "a daemon, used twice": daemon_used_twice,
    "a daemon left behind": daemon_left_behind,
    "a person elsewhere": person_elsewhere,
    "a person in the same file": person_in_the_same_file,
    "kill -9": killed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--only", default="")
    wanted = parser.parse_args()
    for name, row in ROWS.items():
        if wanted.only in name:
            print(f"{name}", flush=True)
            for way in wanted.ways.split(","):
                print(f"  {way:8s} {row(way)}", flush=True)


if __name__ == "__main__":
    main()
