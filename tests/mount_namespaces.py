"""The command line in a folder, in this mount namespace or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_UNSHARE = ("unshare", "-m", "--propagation", "private") if os.getuid() == 0 else ("unshare", "-rm")
_CONTAINER = """
set -e
new=$1 source=$2 at=$3 home=$4 temporary=$5 seen=$6; shift 6
mount -t tmpfs tmpfs "$new"
for name in /*; do
    if [ -L "$name" ]; then cp -P "$name" "$new$name"
    elif [ "$name" = "$temporary" ]; then mkdir "$new$name"
    elif [ -d "$name" ]; then mkdir "$new$name"; mount --rbind "$name" "$new$name"; fi
done
for name in $seen; do mkdir -p "$new$name"; mount --rbind "$name" "$new$name"; done
mkdir -p "$new$at" "$new$home"
mount --bind "$source" "$new$at"
mount --bind "$home" "$new$home"
exec chroot "$new" env -C "$at" "$@"
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Shell:
    """`around` is the command that makes the namespace and runs ours in it."""

    folder: Path
    home: Path
    around: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str) -> Done:
        process = self.start(sys.executable, "-m", "mulligan", *arguments)
        out, err = process.communicate()
        return Done(process.returncode, out, err)

    def start(self, *command: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MULLIGAN_")}
        return subprocess.Popen(
            [*self.around, *command],
            cwd=self.folder,
            env={**kept, "MULLIGAN_HOME": str(self.home), **self.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def write(self, path: str, content: str) -> str:
        """The id of a call that wrote a file."""
        done = self("call", "write_file", "--args", json.dumps({"path": path, "content": content}))
        assert done.code == 0, done
        return str(done.json["call_id"])

    def log(self, *options: str) -> list[str]:
        """The ids of the calls, newest first."""
        return [call["id"] for call in self.logged(*options) if not call["external"]]

    def logged(self, *options: str) -> list[Any]:
        done = self("log", "--json", *options)
        assert done.code == 0, done
        return list(done.json)


def container(base: Path, source: Path, at: Path, home: Path) -> tuple[str, ...]:
    """A mount namespace like a container's: a path shows another directory, and only the state directory is shared.

    The file system that both directories are on is mounted nowhere else in it, so no path there leads to the first.
    """
    for folder in (base, home):
        folder.mkdir(exist_ok=True)
    temporary = "/" + at.parts[1]
    # Our own sources and Python may be below that folder, too; they stay visible.
    needed = {str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix}
    seen = " ".join(sorted(name for name in needed if name.startswith(temporary + "/")))
    return (*_UNSHARE, "sh", "-c", _CONTAINER, "sh", str(base), str(source), str(at), str(home), temporary, seen)


def covering(path: str, source: Path) -> tuple[str, ...]:
    """A mount namespace in which one file of the system shows another one. It is made if it is not there."""
    script = '[ -e "$2" ] || : > "$2"; mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return (*_UNSHARE, "sh", "-c", script, "sh", str(source), path)


def after_boot(disk: Path, boot: Path) -> tuple[str, ...]:
    """A mount namespace in which a folder has another device number, and the kernel the boot id in a file."""
    for name in ("upper", "scratch"):
        (disk.parent / name).mkdir(exist_ok=True)
    script = """
    set -e
    mount --bind "$2" /proc/sys/kernel/random/boot_id
    mount -t overlay overlay -o "lowerdir=$1,upperdir=$1/../upper,workdir=$1/../scratch" "$1"
    cd "$(pwd -P)"; shift 2; exec "$@"
    """
    return (*_UNSHARE, "sh", "-c", script, "sh", str(disk), str(boot))
