"""Each kind of change under `overlay`: the real tree must not see it, and applying the upper layer must give what the
command would have given. Run as a program it tries them all as whoever it runs as."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from mulligan.exec.capture.overlay import IsolatedChange, Overlay, attributes_of
from tests.exec.change_kinds import KINDS, Kind, make, perform
from tests.exec.trees import Seen, tree
from tests.exec.window_captures import NoCapture

NOT_AS_BARE = {"another hard link", "another hard link, then removed", "chmod of another hard link"}
"""An overlay copies up one name of an inode; the other names keep the lower bytes."""

REFUSED_WITHOUT_REDIRECTS = {"exchanged"}
"""Folders of the lower layer cannot be renamed in a user namespace (EXDEV); `mv` copies, a bare rename fails."""


@dataclass
class Loaded:
    """A change with everything that must be read before anything is written: sources may be in the real tree."""

    change: IsolatedChange
    data: bytes = b""
    attributes: dict[str, bytes] = field(default_factory=dict)
    raw_mode: int = 0


def apply(changes: Sequence[IsolatedChange]) -> None:
    """As plainly as can be: read all, remove, make, dress."""
    loaded = [_load(change) for change in changes]
    closed = _open_up({os.path.dirname(change.path) for change in changes})
    for item in reversed(loaded):
        _remove_what_is_in_the_way(item.change)
    for item in loaded:
        _make(item)
    for path, mode in closed.items():
        os.chmod(path, mode)
    for item in reversed(loaded):
        _dress(item)


def _open_up(folders: set[bytes]) -> dict[bytes, int]:
    """Folders of ours that refuse writing, made to accept it; what they were."""
    closed = {path for path in folders if os.path.isdir(path) and not os.access(path, os.W_OK)}
    modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in closed}
    for path in closed:
        os.chmod(path, 0o700)
    return modes


def _load(change: IsolatedChange) -> Loaded:
    if change.source is None:
        return Loaded(change)
    raw_mode = os.lstat(change.source).st_mode
    if change.kind == "symlink":
        return Loaded(change, os.readlink(change.source))
    data = b""
    if change.kind == "file":
        if not os.access(change.source, os.R_OK):
            os.chmod(change.source, 0o600)
        with open(change.source, "rb") as file:
            data = file.read()
    attributes = attributes_of(change.source) if change.kind != "special" else {}
    return Loaded(change, data, attributes, raw_mode)


def _remove_what_is_in_the_way(change: IsolatedChange) -> None:
    if os.path.islink(os.path.dirname(change.path)):
        return  # what is behind the link is something else
    if os.path.isdir(change.path) and not os.path.islink(change.path):
        if not os.access(change.path, os.W_OK):
            os.chmod(change.path, 0o700)
        if change.kind != "dir":
            os.rmdir(change.path)
    elif os.path.lexists(change.path):
        os.unlink(change.path)


def _make(item: Loaded) -> None:
    path, kind = item.change.path, item.change.kind
    if kind == "dir":
        os.makedirs(path, exist_ok=True)
    elif kind == "file":
        with open(path, "wb") as file:
            file.write(item.data)
    elif kind == "symlink":
        os.symlink(item.data, path)
    elif kind == "special":
        os.mknod(path, stat.S_IFMT(item.raw_mode) | 0o600)


def _dress(item: Loaded) -> None:
    path, kind = item.change.path, item.change.kind
    if kind in ("file", "dir"):
        for name in attributes_of(path).keys() - item.attributes.keys():
            os.removexattr(path, name)
        for name, value in item.attributes.items():
            os.setxattr(path, name, value)
    if kind in ("file", "dir", "special"):
        os.chmod(path, item.change.mode)


def not_isolated(kind: Kind, root: bytes, twin: bytes) -> list[str]:
    """What went wrong: the real tree changed, or the applied layer is not what a bare run gives in a twin tree."""
    before = make(kind, root)
    capture = Overlay()
    perform(kind, root, capture)
    wrong = [] if tree(root) == before else ["the real tree changed"]
    apply(capture.changes)
    capture.close()
    make(kind, twin)
    perform(kind, twin, NoCapture())
    here, there = comparable(tree(root)), comparable(tree(twin))
    if kind.name in NOT_AS_BARE:
        return wrong
    return wrong + [f"{path!r}: {here.get(path)} != {there.get(path)}" for path in _unlike(here, there)]


def comparable(whole: dict[bytes, Seen]) -> dict[bytes, Seen]:
    """Without what depends on the clock and on inode numbers."""
    return {path: seen for path, seen in whole.items() if b".git" not in path.split(b"/")}


def _unlike(here: dict[bytes, Seen], there: dict[bytes, Seen]) -> list[bytes]:
    return sorted(path for path in here.keys() | there.keys() if here.get(path) != there.get(path))


def main() -> None:
    refused = REFUSED_WITHOUT_REDIRECTS if os.geteuid() != 0 else set()
    for kind in KINDS:
        folder = os.fsencode(os.path.realpath(tempfile.mkdtemp()))
        root, twin = folder + b"/root", folder + b"/twin"
        os.mkdir(root)
        os.mkdir(twin)
        wrong = [] if kind.name in refused else not_isolated(kind, root, twin)
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)
        shutil.rmtree(folder)
        if wrong:
            print(kind.name, wrong)
    print(len(KINDS), "kinds as", os.geteuid())


if __name__ == "__main__":
    main()
