"""What a command prints, in bounded memory: streamed on, kept up to a limit, the rest on disk."""

from __future__ import annotations

import os
import tempfile
from typing import IO, Literal, Protocol, TypeAlias

from mulligan.values.limits import GIB_BYTES, INLINE_LIMIT_BYTES, PREVIEW_BYTES

Stream: TypeAlias = Literal["stdout", "stderr"]


class Sink(Protocol):
    """Takes output as it comes, in order for each stream. A slow sink slows the command down; it never piles up.

    One that raises BrokenPipeError is given no more of that stream.
    """

    def write(self, stream: Stream, data: bytes) -> None: ...


class Spool:
    """One stream's bytes: all in memory up to `inline_bytes`, else in an unnamed file up to `file_bytes`.

    Beyond that only the head (in the file) and the tail (`tail_bytes`) are kept, and `dropped_bytes` says so.
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
        if len(self.head) < PREVIEW_BYTES:
            self.head += data[: PREVIEW_BYTES - len(self.head)]
        self._tail = (
            (self._tail + data)[-self._tail_bytes :]
            if len(data) < self._tail_bytes
            else (data[len(data) - self._tail_bytes :])
        )
        self.size_bytes += len(data)
        if self._file is None and self.size_bytes <= self._inline_bytes:
            self._memory += data
        else:
            self._spill(data)

    def inline(self) -> bytes | None:
        """All the bytes, if they fitted in memory."""
        return bytes(self._memory) if self._file is None else None

    def file(self) -> IO[bytes] | None:
        """The file that holds the bytes when they did not fit, at its start."""
        if self._file is not None:
            self._file.seek(0)
        return self._file

    def read(self, offset: int, size: int) -> bytes:
        """A page of what was kept, also while the command still runs."""
        if self._file is None:
            return bytes(self._memory[offset : offset + size])
        return os.pread(self._file.fileno(), size, offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _spill(self, data: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # closed by close()
            self._file.write(self._memory)
            self._memory.clear()
        room = max(0, self._file_bytes - (self.size_bytes - self.dropped_bytes - len(data)))
        kept = data[:room]
        self.dropped_bytes += len(data) - len(kept)
        os.pwrite(self._file.fileno(), kept, self._file.seek(0, os.SEEK_END))


class Spools:
    """The usual sink: a spool for each stream."""

    def __init__(self, folder: str | None = None, *, inline_bytes: int = INLINE_LIMIT_BYTES) -> None:
        self.stdout = Spool(folder, inline_bytes=inline_bytes)
        self.stderr = Spool(folder, inline_bytes=inline_bytes)

    def write(self, stream: Stream, data: bytes) -> None:
        (self.stdout if stream == "stdout" else self.stderr).append(data)

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()
