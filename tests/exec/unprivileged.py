"""A whole session of a user without privileges: what each way of running does and undoes, printed as JSON.

With `--no-namespaces` the machine gives no namespaces either, as in many containers.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches import Bench, open_bench
from exec.commands import plant, sh
from mulligan.values.refusal import Refused
from mulligan.workspace.exec import kernel
from mulligan.workspace.exec.command import command
from mulligan.workspace.exec.overlay import Overlay
from workspace.exec.trees import tree

WAYS = ("notify", "watch", "scan", "overlay")
SCRIPT = """
rm -rf docs; sed -i s/1/2/ src/a.py; mv src/b.py c.py; mkdir -p node_modules/x; echo y > node_modules/x/y
chmod 600 .env; echo more >> .env; ln -s a.py src/link; : > empty
"""
FILES = {"docs/guide": "g\n", "src/a.py": "a = 1\n", "src/b.py": "b = 1\n", ".env": "KEY=1\n"}
_REFUSED = {"x86_64": (165, 272), "aarch64": (40, 97)}
"""mount and unshare"""


def refuse_namespaces() -> None:
    code = [(0x20, 0, 0, 0)]
    for number in _REFUSED[kernel.MACHINE]:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1)]
    code.append((0x06, 0, 0, 0x7FFF0000))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.install_filter(b"".join(struct.pack("=HBBI", *one) for one in code), 0)


def there_and_back(bench: Bench, **params: Any) -> str:
    """`back` if undo gives the tree as it was; else what went wrong."""
    before = tree(os.fsencode(bench.root))
    receipt = sh(bench, SCRIPT, **params)
    if not receipt.ok:
        return str(receipt.error_code)
    if tree(os.fsencode(bench.root)) == before:
        return "nothing happened"
    undone = bench.session().undo()
    return "back" if undone.ok and tree(os.fsencode(bench.root)) == before else f"{undone} {receipt}"


def rolled_back(bench: Bench, way: str) -> str:
    before = tree(os.fsencode(bench.root))
    receipt = sh(bench, f"{SCRIPT}\nexit 3", strategy=way, rollback_on="nonzero")
    return str(receipt.error_code) if tree(os.fsencode(bench.root)) == before else f"not put back: {receipt}"


def left_unreadable(bench: Bench, way: str) -> str:
    """A command that takes our right to read what it wrote is refused, and put back."""
    before = tree(os.fsencode(bench.root))
    receipt = sh(bench, "echo 2 > src/a.py; chmod 000 src/a.py; echo n > n", strategy=way)
    return str(receipt.error_code) if tree(os.fsencode(bench.root)) == before else f"not put back: {receipt}"


def foreign() -> str:
    """Why an overlay over somebody else's folder is refused."""
    try:
        Overlay().begin(command(["true"], "/usr"))
    except Refused as refused:
        return str(refused.fields["reason"])
    return "not refused"


def session(base: Path) -> dict[str, Any]:
    bench = open_bench(base)
    plant(bench.root, FILES)
    found = {
        "user": os.geteuid(),
        "undo": {way: there_and_back(bench, strategy=way) for way in WAYS},
        "rollback": {way: rolled_back(bench, way) for way in WAYS},
        "unreadable": {way: left_unreadable(bench, way) for way in WAYS},
        "isolate": there_and_back(bench, isolate=True),
        "sandbox": there_and_back(bench, sandbox="workspace"),
        "network": there_and_back(bench, network="none"),
        "foreign": foreign(),
        "default": sh(bench, ":").strategy,
    }
    bench.close()
    return found


def main() -> None:
    if "--no-namespaces" in sys.argv:
        refuse_namespaces()
    base = Path(os.path.realpath(tempfile.mkdtemp()))
    try:
        print(json.dumps(session(base)))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
