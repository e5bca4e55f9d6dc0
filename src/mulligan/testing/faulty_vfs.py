"""A disk under SQLite that fails where a test says, and that can lose power.

Registered with SQLite under a name; a store opened with `vfs=<name>` lives on it. Every write, sync and truncation of
the database and its log has a position, counted from 1, so that a fault can be swept over all of them.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Literal

import apsw

Operation = Literal["write", "sync", "truncate"]
Injury = Literal["no_space", "io_error", "short", "torn", "lost"]
"""`no_space`, `io_error`: refused. `short`: half is written, then the disk is full. `torn`: half is written and success
reported. `lost`: nothing is written and success reported."""

_serial = itertools.count(1)


@dataclass(slots=True)
class _Fault:
    injury: Injury
    at: int
    lasting: bool
    operation: Operation | None

    def strikes(self, position: int, operation: Operation) -> bool:
        if self.operation not in (None, operation):
            return False
        return position >= self.at if self.lasting else position == self.at


@dataclass(slots=True)
class _Platter:
    """What one file held when it was last synced, as a way back from what it holds now."""

    undo: list[tuple[int, bytes, int]] = field(default_factory=list)


class FaultyVfs(apsw.VFS):
    """Until told otherwise, the ordinary disk. Use it as a context, so that SQLite forgets it afterwards."""

    def __init__(self, *, remember: bool = False) -> None:
        """With `remember`, what is not yet synced is kept track of, so that `cut_power` can take it back."""
        self.name = f"mulligan-faulty-{next(_serial)}"
        self.operations: list[tuple[Operation, str]] = []
        self.powered = True
        self._remember = remember
        self._off_at = 0
        self._platters: dict[str, _Platter] = {}
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()
        super().__init__(self.name, "")

    def __enter__(self) -> FaultyVfs:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    def inject(
        self, injury: Injury, *, at: int = 1, lasting: bool = False, operation: Operation | None = None
    ) -> FaultyVfs:
        """At the `at`-th operation from now; `lasting`: from there on. With `operation`, only if it is that one."""
        with self._lock:
            self._faults.append(_Fault(injury, len(self.operations) + at, lasting, operation))
        return self

    def heal(self) -> None:
        """The disk works again: there is space, the cable is back."""
        with self._lock:
            self._faults.clear()

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _FaultyFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.synced(filename)

    def reach(self, operation: Operation, file: str) -> Injury | None:
        """What shall happen to the operation about to be done. Raises if it shall fail outright."""
        with self._lock:
            if not self.powered:
                raise apsw.IOError("the power is out")
            self.operations.append((operation, file))
            position = len(self.operations)
            if position == self._off_at:
                self.powered = False
                raise apsw.IOError("the power goes out")
            struck = [fault.injury for fault in self._faults if fault.strikes(position, operation)]
        if "no_space" in struck:
            raise apsw.FullError("no space, by plan")
        if "io_error" in struck:
            raise apsw.IOError("input/output error, by plan")
        return struck[0] if struck else None

    def wrote(self, file: str, offset: int, before: bytes, size_before: int) -> None:
        if self._remember:
            with self._lock:
                self._platters.setdefault(file, _Platter()).undo.append((offset, before, size_before))

    def synced(self, file: str) -> None:
        with self._lock:
            self._platters.pop(file, None)

    def power_off_at(self, at: int) -> None:
        """Cut the power as the `at`-th operation from now is about to happen."""
        self._off_at = len(self.operations) + at

    def cut_power(self) -> None:
        """From now on nothing works. `restore` then gives the files as the next boot finds them."""
        self.powered = False

    def restore(self) -> None:
        """Take back every write that was not synced. All connections through this disk must be closed."""
        for file, platter in self._platters.items():
            with open(file, "r+b") as handle:
                for offset, before, size_before in reversed(platter.undo):
                    handle.seek(offset)
                    handle.write(before)
                    handle.truncate(size_before)
        self._platters.clear()


class _FaultyFile(apsw.VFSFile):
    def __init__(self, disk: FaultyVfs, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        super().__init__("", name, flags)

    def xWrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        injury = self._disk.reach("write", self._name)
        if injury == "lost":
            return
        whole = bytes(data)
        self._noted(offset, len(whole))
        super().xWrite(whole if injury is None else whole[: len(whole) // 2], offset)
        if injury == "short":
            raise apsw.FullError("no space for the second half, by plan")

    def xTruncate(self, newsize: int) -> None:
        if self._disk.reach("truncate", self._name) is None:
            size = self.xFileSize()
            self._noted(newsize, max(size - newsize, 0))
            super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        if self._disk.reach("sync", self._name) is None:
            super().xSync(flags)
            self._disk.synced(self._name)

    def _noted(self, offset: int, length: int) -> None:
        size = self.xFileSize()
        before = self.xRead(min(length, size - offset), offset) if offset < size and length else b""
        self._disk.wrote(self._name, offset, before, size)
