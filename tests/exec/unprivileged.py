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

from mulligan.exec.capture.overlay import Overlay
from mulligan.exec.command import command
from mulligan.files import kernel
from mulligan.values.errors import Refused
from tests.exec.commands import plant, sh
from tests.exec.trees import tree
from tests.temp_workspace import TempWorkspace, open_temp_workspace

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


def there_and_back(workspace: TempWorkspace, **params: Any) -> str:
    """`back` if undo gives the tree as it was; else what went wrong."""
    before = tree(os.fsencode(workspace.root))
    receipt = sh(workspace, SCRIPT, **params)
    if not receipt.ok:
        return str(receipt.error_code)
    if tree(os.fsencode(workspace.root)) == before:
        return "nothing happened"
    undone = workspace.session().undo()
    return "back" if undone.ok and tree(os.fsencode(workspace.root)) == before else f"{undone} {receipt}"


def rolled_back(workspace: TempWorkspace, way: str) -> str:
    before = tree(os.fsencode(workspace.root))
    receipt = sh(workspace, f"{SCRIPT}\nexit 3", strategy=way, rollback_on="nonzero")
    return str(receipt.error_code) if tree(os.fsencode(workspace.root)) == before else f"not put back: {receipt}"


def left_unreadable(workspace: TempWorkspace, way: str) -> str:
    """A command that takes our right to read what it wrote is refused, and put back."""
    before = tree(os.fsencode(workspace.root))
    receipt = sh(workspace, "echo 2 > src/a.py; chmod 000 src/a.py; echo n > n", strategy=way)
    return str(receipt.error_code) if tree(os.fsencode(workspace.root)) == before else f"not put back: {receipt}"


def foreign() -> str:
    """Why an overlay over somebody else's folder is refused."""
    try:
        Overlay().begin(command(["true"], "/usr"))
    except Refused as refused:
        return str(refused.fields["reason"])
    return "not refused"


def session(base: Path) -> dict[str, Any]:
    workspace = open_temp_workspace(base)
    plant(workspace.root, FILES)
    found = {
        "user": os.geteuid(),
        "undo": {way: there_and_back(workspace, strategy=way) for way in WAYS},
        "rollback": {way: rolled_back(workspace, way) for way in WAYS},
        "unreadable": {way: left_unreadable(workspace, way) for way in WAYS},
        "isolate": there_and_back(workspace, isolate=True),
        "sandbox": there_and_back(workspace, sandbox="workspace"),
        "network": there_and_back(workspace, network="none"),
        "foreign": foreign(),
        "default": sh(workspace, ":").strategy,
    }
    workspace.close()
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
