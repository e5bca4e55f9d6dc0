"""The command to run (words, folder, environment, input, sandbox), and the buffers for its output.

A command may print without end: Mulligan passes its output on as it comes, keeps it in memory up to a limit, in a file
up to another, and drops what is more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import IO, Literal, Protocol, TypeAlias

from mulligan.boundary.verdict import path_denied
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import GIB_BYTES, INLINE_LIMIT_BYTES, PREVIEW_BYTES
from mulligan.values.paths import is_inside

# How long a descendant may outlive the command before Mulligan kills it: long enough for a `tee` to finish.
SURVIVORS_LINGER_S = 0.2

# The variables that programs need to run. Tokens and keys have other names, so commands do not get them.
_ENV_NAMES = frozenset(b"PATH HOME USER SHELL LANG TERM TZ TMPDIR".split())
_ENV_PREFIX = b"LC_"


@fast_dataclass(slots=True, frozen=True)
class Command:
    """A program to run inside `root`; both paths are absolute and real. `env` is its whole environment.

    `background`: descendants may live on after the first process ended; the run ends with the last of them. `stdin_fd`:
    without `stdin`, the command reads this descriptor of the caller. `terminal`: the command uses the caller's standard
    streams and terminal, and Mulligan captures no output (`stdin` must be None).
    """

    argv: tuple[bytes, ...]
    root: bytes
    cwd: bytes
    env: Mapping[bytes, bytes] = field(default_factory=dict)
    stdin: bytes | None = None
    stdin_fd: int | None = None
    background: bool = False
    terminal: bool = False
    sandbox: Literal["none", "workspace"] = "none"
    network: Literal["full", "none"] = "full"
    linger_s: float = SURVIVORS_LINGER_S


def command(
    argv: list[str] | tuple[str, ...],
    root: str | bytes,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> Command:
    """A command with the allowed part of our environment. Refuses an empty argv and a cwd outside the root."""
    if not argv:
        raise Refused("error", "argv_empty", "A command needs at least a program name.")
    words = tuple(os.fsencode(word) for word in argv)
    if any(b"\0" in word for word in words):
        raise Refused("error", "invalid_params", "A command's words cannot contain NUL.")
    real_root = os.path.realpath(os.fsencode(root))
    return Command(
        argv=words,
        root=real_root,
        cwd=_folder_inside(real_root, cwd),
        env=allowed_environment(os.environb) | {os.fsencode(k): os.fsencode(v) for k, v in (env or {}).items()},
        stdin=stdin,
    )


def allowed_environment(whole: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables of an environment that a command gets by default: no tokens, no keys."""
    return {k: whole[k] for k in whole if k in _ENV_NAMES or k.startswith(_ENV_PREFIX)}


def _folder_inside(root: bytes, cwd: str | None) -> bytes:
    folder = os.path.realpath(os.path.join(root, os.fsencode(cwd or ".")))
    if not is_inside(folder, root):
        raise path_denied("A command runs inside the root.", path=cwd)
    if not os.path.isdir(folder):
        raise Refused("error", "not_a_directory", f"{cwd!r} is not a folder.", path=cwd)
    return folder


Stream: TypeAlias = Literal["stdout", "stderr"]


class Sink(Protocol):
    """Receives output as it comes, in order for each stream. While `write` runs, the command waits.

    If it raises BrokenPipeError, it gets no more output of that stream.
    """

    def write(self, stream: Stream, data: bytes) -> None: ...


class OutputSpool:
    """The output of one stream: in memory up to `inline_bytes`, else in an unnamed file up to `file_bytes`.

    Beyond that, only the head (in the file) and the tail (`tail_bytes`) are stored, and `dropped_bytes` counts the
    rest.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        inline_bytes: int = INLINE_LIMIT_BYTES,
        file_bytes: int = 2 * GIB_BYTES,
        tail_bytes: int = PREVIEW_BYTES,
    ) -> None:
        self._folder = folder
        self._inline_bytes = inline_bytes
        self._file_bytes = file_bytes
        self._tail_bytes = tail_bytes
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._tail = b""
        self.head = b""
        self.size_bytes = 0
        self.dropped_bytes = 0

    @property
    def tail(self) -> bytes:
        """The last bytes, at most `tail_bytes`."""
        return self._tail

    def append(self, data: bytes) -> None:
        # The preview shows the first and the last bytes, so they are stored even if the middle is dropped.
        if len(self.head) < PREVIEW_BYTES:
            self.head += data[: PREVIEW_BYTES - len(self.head)]
        tail = self._tail + data if len(data) < self._tail_bytes else data
        self._tail = tail[max(0, len(tail) - self._tail_bytes) :]
        self.size_bytes += len(data)
        if self._file is None and self.size_bytes <= self._inline_bytes:
            self._memory += data
        else:
            self._spill(data)

    def inline(self) -> bytes | None:
        """All bytes, if they fit in memory; else None."""
        return bytes(self._memory) if self._file is None else None

    def file(self) -> IO[bytes] | None:
        """The file with the bytes that did not fit in memory, at its start."""
        if self._file is not None:
            self._file.seek(0)
        return self._file

    def read(self, offset: int, size: int) -> bytes:
        """A page of the stored bytes. It works while the command still runs."""
        if self._file is None:
            return bytes(self._memory[offset : offset + size])
        return os.pread(self._file.fileno(), size, offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _spill(self, data: bytes) -> None:
        # The file has no name, so it disappears with this process even after kill -9.
        if self._file is None:
            import tempfile

            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # closed by close()
            self._file.write(self._memory)
            self._memory.clear()
        room = max(0, self._file_bytes - (self.size_bytes - self.dropped_bytes - len(data)))
        kept = data[:room]
        self.dropped_bytes += len(data) - len(kept)
        os.pwrite(self._file.fileno(), kept, self._file.seek(0, os.SEEK_END))


class Spools:
    """A sink with a spool for each stream."""

    def __init__(self, folder: str | None = None, *, inline_bytes: int = INLINE_LIMIT_BYTES) -> None:
        self.stdout = OutputSpool(folder, inline_bytes=inline_bytes)
        self.stderr = OutputSpool(folder, inline_bytes=inline_bytes)

    def write(self, stream: Stream, data: bytes) -> None:
        (self.stdout if stream == "stdout" else self.stderr).append(data)

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()
