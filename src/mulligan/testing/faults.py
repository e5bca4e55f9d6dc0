"""Faults for tests: `FaultPlan` for the disk of files, `FaultyVfs` for the disk under SQLite.

A disk takes a `FaultPlan` as its `steps` and calls it with the name of each step just before the step. The plan records
the name; at the chosen steps it fails the step, ends the process, or lets another writer act first.

`FaultyVfs` registers with SQLite under a name; a store opened with `vfs=<name>` uses it. It can also lose power. Every
write, sync and truncation of the database and its log has a position, counted from 1, so that a test can try a fault at
each of them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import field
from typing import Literal, TypeAlias

import apsw

from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath

Act: TypeAlias = Callable[[str, RepoPath], None]


class Crash(BaseException):
    """The process ended here. Mulligan catches it nowhere, so no clean-up code runs."""


@fast_dataclass(slots=True)
class _Rule:
    """Fires at the `at`-th step with this name, or with any name; with `lasting`, also at every later one."""

    act: Act
    at: int
    step: str | None
    lasting: bool
    met: int = 0

    def matches(self, step: str) -> bool:
        if self.step is not None and step != self.step:
            return False
        self.met += 1
        return self.met >= self.at if self.lasting else self.met == self.at


class FaultPlan:
    """Implements `files.disk.Steps`. Positions count from 1; without a step's name they count all steps.

    The methods return the plan, so that a plan reads as one expression.
    """

    def __init__(self) -> None:
        self.reached: list[tuple[str, RepoPath]] = []
        self.crashed = False
        self._rules: list[_Rule] = []

    def act(self, what: Act, *, at: int = 1, step: str | None = None, lasting: bool = False) -> FaultPlan:
        """Call `what` with the step and its path just before the step, for a slow disk or another writer."""
        self._rules.append(_Rule(what, at, step, lasting))
        return self

    def fail(self, number: int, *, at: int = 1, step: str | None = None, lasting: bool = False) -> FaultPlan:
        """The step fails with this errno instead of happening."""

        def refuse(_: str, path: RepoPath) -> None:
            raise OSError(number, os.strerror(number), path)

        return self.act(refuse, at=at, step=step, lasting=lasting)

    def crash_before(self, *, at: int = 1, step: str | None = None) -> FaultPlan:
        """The process ends just before the step. A dead process takes no further one."""
        return self.act(self._end, at=at, step=step)

    def crash_after(self, *, at: int = 1, step: str | None = None) -> FaultPlan:
        """The process ends after the step, just before the next one."""

        def arm(_: str, __: RepoPath) -> None:
            self._rules.append(_Rule(self._end, 1, None, lasting=True))

        return self.act(arm, at=at, step=step)

    def _end(self, step: str, path: RepoPath) -> None:
        self.crashed = True
        raise Crash(f"at {step} of {path}")

    def reach(self, step: str, path: RepoPath) -> None:
        if self.crashed:
            raise Crash(f"already, before {step} of {path}")
        self.reached.append((step, path))
        for rule in [rule for rule in self._rules if rule.matches(step)]:
            rule.act(step, path)


def steps_of(run: Callable[[FaultPlan], object]) -> list[str]:
    """The steps of a run without faults, at each of which a test can then try a fault."""
    plan = FaultPlan()
    run(plan)
    return [step for step, _ in plan.reached]


Operation = Literal["write", "sync", "truncate"]
Injury = Literal["no_space", "io_error", "short", "torn", "lost"]
"""`no_space`, `io_error`: refused. `short`: half is written, then the disk is full. `torn`: half is written and success
reported. `lost`: nothing is written and success reported."""

_serial = itertools.count(1)


@fast_dataclass(slots=True)
class _Fault:
    injury: Injury
    at: int
    lasting: bool
    operation: Operation | None

    def strikes(self, position: int, operation: Operation) -> bool:
        if self.operation not in (None, operation):
            return False
        return position >= self.at if self.lasting else position == self.at


@fast_dataclass(slots=True)
class _UnsyncedWrites:
    """How to set one file back to its last sync."""

    undo: list[tuple[int, bytes, int]] = field(default_factory=list)


class FaultyVfs(apsw.VFS):
    """An ordinary disk until a test injects a fault. Use it in a `with`, so that SQLite forgets it afterwards."""

    def __init__(self, *, remember: bool = False) -> None:
        """With `remember`, it tracks writes that are not synced, so that `cut_power` can revert them."""
        self.name = f"mulligan-faulty-{next(_serial)}"
        self.operations: list[tuple[Operation, str]] = []
        self.powered = True
        self._remember = remember
        self._off_at = 0
        self._unsynced: dict[str, _UnsyncedWrites] = {}
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
        """Fail the `at`-th operation from now; with `lasting` also the later ones. `operation`: count only these."""
        with self._lock:
            self._faults.append(_Fault(injury, len(self.operations) + at, lasting, operation))
        return self

    def heal(self) -> None:
        """Remove all faults, so that the disk works again."""
        with self._lock:
            self._faults.clear()

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _FaultyFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.synced(filename)

    def reach(self, operation: Operation, file: str) -> Injury | None:
        """The injury for the next operation, if any. Raises if the operation must fail."""
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
                self._unsynced.setdefault(file, _UnsyncedWrites()).undo.append((offset, before, size_before))

    def synced(self, file: str) -> None:
        with self._lock:
            self._unsynced.pop(file, None)

    def power_off_at(self, at: int) -> None:
        """Cut the power just before the `at`-th operation from now."""
        self._off_at = len(self.operations) + at

    def cut_power(self) -> None:
        """Fail every operation from now on. `restore` then sets the files to what the next boot finds."""
        self.powered = False

    def restore(self) -> None:
        """Revert every write that was not synced. All connections through this disk must be closed."""
        for file, unsynced in self._unsynced.items():
            with open(file, "r+b") as handle:
                for offset, before, size_before in reversed(unsynced.undo):
                    handle.seek(offset)
                    handle.write(before)
                    handle.truncate(size_before)
        self._unsynced.clear()


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
        self._remember_bytes(offset, len(whole))
        super().xWrite(whole if injury is None else whole[: len(whole) // 2], offset)
        if injury == "short":
            raise apsw.FullError("no space for the second half, by plan")

    def xTruncate(self, newsize: int) -> None:
        if self._disk.reach("truncate", self._name) is None:
            size = self.xFileSize()
            self._remember_bytes(newsize, max(size - newsize, 0))
            super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        if self._disk.reach("sync", self._name) is None:
            super().xSync(flags)
            self._disk.synced(self._name)

    def _remember_bytes(self, offset: int, length: int) -> None:
        size = self.xFileSize()
        before = self.xRead(min(length, size - offset), offset) if offset < size and length else b""
        self._disk.wrote(self._name, offset, before, size)
