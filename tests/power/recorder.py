"""Records every operation on the disk that this process makes below one folder, in the order in which they happen.

The recorder replaces the functions of `os`, `open`, the system calls that `ctypes` reaches, and SQLite's access to
files. It is installed before Mulligan is imported, so it needs no name from inside Mulligan. Each operation is one
line of a log file that several processes append to, and a killed process has written all that it did.

A command that Mulligan runs is another program, which the recorder does not see. `observing` compares the files before
and after every operation of ours while a command runs, and records the differences as operations of the command.

Unless told otherwise, no operation waits for the real disk: what a power cut would leave is computed from the log, so a
sync is only recorded.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import os
import pickle
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

import apsw

Event = tuple[Any, ...]
Functions = dict[str, Callable[..., Any]]
CallSite = tuple[str, str, int]
"""A line of Mulligan's code: the file, the function, the number of the line."""

_EXCHANGE = 2
_CLONE = 0x40049409
_NOT_BY_NUMBER = frozenset({74, 75, 277, 306, 316})
"""fsync, fdatasync, sync_file_range, syncfs, renameat2: recorded under their names only."""
_LENGTH = struct.Struct("<I")
BOOT_FILE = "/proc/sys/kernel/random/boot_id"


def read_log(path: str) -> list[Event]:
    """All events of a log, in order."""
    events: list[Event] = []
    with open(path, "rb") as file:
        while header := file.read(_LENGTH.size):
            events.append(pickle.loads(file.read(_LENGTH.unpack(header)[0])))
    return events


class Recorder:
    """One log of what happens below `base`."""

    def __init__(self, base: str, log: str, *, syncs: bool = False) -> None:
        self.base = os.path.realpath(base)
        self.syncs = syncs
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()
        self._observed: dict[str, tuple[Any, ...]] | None = None
        self._touched: set[str] = set()

    def mark(self, *event: Any) -> None:
        """One operation, or a note of the history between two."""
        self._touched.update(one for one in event[1:3] if isinstance(one, str))
        self._append(event)

    def _append(self, event: Event) -> None:
        body = pickle.dumps(event, protocol=pickle.HIGHEST_PROTOCOL)
        _real["write"](self._log, _LENGTH.pack(len(body)) + body)

    def where(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The place below `base` that a path or descriptor names, or None if it is elsewhere."""
        if isinstance(path, int):
            try:
                found = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
            if found.endswith(" (deleted)"):
                return None
        else:
            found = os.fsdecode(path)
            if not os.path.isabs(found):
                parent = os.getcwd() if dir_fd in (None, -100) else os.readlink(f"/proc/self/fd/{dir_fd}")
                found = os.path.join(parent, found)
            found = os.path.normpath(found)
        if found != self.base and not found.startswith(self.base + "/"):
            return None
        place = os.path.relpath(found, self.base)
        return None if place.endswith("-shm") else place

    @contextmanager
    def operation(self) -> Iterator[None]:
        """One operation of ours. While a command runs, what the command did before it is recorded first."""
        with self._lock:
            if self._observed is not None:
                self._record_differences()
            self._touched.clear()
            yield
            if self._observed is not None:
                self._note_own(self._observed, self._look())

    @contextmanager
    def observing(self) -> Iterator[None]:
        """While a command runs."""
        with self._lock:
            self._observed = self._look()
        try:
            yield
        finally:
            with self._lock:
                self._record_differences()
                self._observed = None

    def _note_own(self, known: dict[str, tuple[Any, ...]], now: dict[str, tuple[Any, ...]]) -> None:
        """Only what this operation did: what the command did at the same time is recorded before the next one."""
        for place in known.keys() | now.keys():
            if not any(place == own or place.startswith(f"{own}/") for own in self._touched):
                continue
            if place in now:
                known[place] = now[place]
            else:
                known.pop(place, None)

    def _look(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        for folder, folders, files in os.walk(self.base):
            for name in [*folders, *files]:
                full = os.path.join(folder, name)
                place = os.path.relpath(full, self.base)
                if name.startswith("store.db"):
                    continue
                try:
                    found[place] = _signature(os.lstat(full))
                except OSError:
                    continue
        return found

    def _record_differences(self) -> None:
        before, now = self._observed or {}, self._look()
        for place in sorted(before.keys() - now.keys(), reverse=True):
            self._append(("command.remove", place))
        for place in sorted(place for place in now if before.get(place) != now[place]):
            try:
                node = node_at(os.path.join(self.base, place))
            except FileNotFoundError:
                # The command removed it after the look: the next look compares with what was there before.
                now.pop(place)
                now |= {place: before[place]} if place in before else {}
            else:
                self._append(("command.set", place, *node))
        self._observed = now

    def sync_sites(self) -> tuple[CallSite, ...]:
        """The lines of Mulligan that lead to this operation, innermost first."""
        found: list[CallSite] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if "/mulligan/" in name:
                found.append((name.rsplit("/mulligan/", 1)[1], frame.f_code.co_qualname, frame.f_lineno))
            frame = frame.f_back
        return tuple(found)

    def synced(self, place: str | None) -> None:
        if place is not None:
            self._append(("sync", place, self.sync_sites()))


def _signature(status: os.stat_result) -> tuple[Any, ...]:
    if stat.S_ISDIR(status.st_mode):
        return (status.st_ino, status.st_mode)
    return (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def node_at(path: str) -> tuple[str, int, bytes, int, int]:
    """Kind, mode, content, inode and time of change of what is there."""
    status = os.lstat(path)
    mode, rest = stat.S_IMODE(status.st_mode), (status.st_ino, status.st_mtime_ns)
    if stat.S_ISLNK(status.st_mode):
        return ("link", mode, os.fsencode(os.readlink(path)), *rest)
    if stat.S_ISDIR(status.st_mode):
        return ("dir", mode, b"", *rest)
    with io.FileIO(path) as file:
        return ("file", mode, file.readall(), *rest)


_REPLACED = (
    *("open", "write", "pwrite", "writev", "truncate", "ftruncate", "sendfile", "copy_file_range"),
    *("link", "symlink", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"),
    *("chmod", "fchmod", "utime", "setxattr", "removexattr", "fsync", "fdatasync", "sync"),
)
_real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _REPLACED}
_real_open = builtins.open
_real_library = ctypes.CDLL


def install(recorder: Recorder) -> None:
    """Replace what changes files in this process, for good. To be called before Mulligan is imported."""
    for name, made in _os_functions(recorder).items():
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if getattr(os, name) in supported:
                supported.add(made)
        setattr(os, name, made)
    builtins.open = io.open = _recording_open(recorder)
    fcntl.ioctl = _recording_ioctl(recorder)
    ctypes.CDLL = _recording_library(recorder)  # type: ignore[misc]
    _kept.append(_RecordingVfs(recorder))


_kept: list[object] = []


def _os_functions(recorder: Recorder) -> Functions:
    return {**_content_functions(recorder), **_name_functions(recorder), **_other_functions(recorder)}


def _content_functions(recorder: Recorder) -> Functions:
    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with recorder.operation():
            changing = flags & (os.O_CREAT | os.O_TRUNC) and flags & os.O_TMPFILE != os.O_TMPFILE
            place = recorder.where(path, dir_fd) if changing else None
            there = place is not None and os.path.lexists(os.path.join(recorder.base, place))
            handle: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
            if place is not None:
                _note_opened(recorder, place, there=there, truncates=bool(flags & os.O_TRUNC))
            return handle

    def write(handle: int, data: Any) -> int:
        place = recorder.where(handle)
        if place is None:
            return int(_real["write"](handle, data))
        with recorder.operation():
            offset = _position(handle)
            done = int(_real["write"](handle, data))
            recorder.mark("write", place, offset, bytes(memoryview(data)[:done]), os.fstat(handle).st_mtime_ns)
            return done

    def pwrite(handle: int, data: Any, offset: int) -> int:
        with recorder.operation():
            done = int(_real["pwrite"](handle, data, offset))
            place = recorder.where(handle)
            if place is not None:
                recorder.mark("write", place, offset, bytes(memoryview(data)[:done]), os.fstat(handle).st_mtime_ns)
            return done

    def truncate(path: Any, length: int) -> None:
        with recorder.operation():
            _real["truncate"](path, length)
            place = recorder.where(path)
            if place is not None:
                recorder.mark("truncate", place, length, os.stat(path).st_mtime_ns)

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(38, "the recorder has no such system call")

    refusing: Functions = dict.fromkeys(("writev", "sendfile", "copy_file_range"), refused)
    return {"open": open_, "write": write, "pwrite": pwrite, "truncate": truncate, "ftruncate": truncate, **refusing}


def _position(handle: int) -> int:
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_APPEND:
        return os.fstat(handle).st_size
    return os.lseek(handle, 0, os.SEEK_CUR)


def _note_opened(recorder: Recorder, place: str, *, there: bool, truncates: bool) -> None:
    status = os.lstat(os.path.join(recorder.base, place))
    if not there:
        recorder.mark("create", place, "file", stat.S_IMODE(status.st_mode), b"", status.st_ino)
    elif truncates:
        recorder.mark("truncate", place, 0, status.st_mtime_ns)


def _name_functions(recorder: Recorder) -> Functions:
    def symlink(target: Any, path: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        with recorder.operation():
            _real["symlink"](target, path, target_is_directory, dir_fd=dir_fd)
            if (place := recorder.where(path, dir_fd)) is not None:
                status = os.lstat(os.path.join(recorder.base, place))
                recorder.mark("create", place, "link", 0o777, os.fsencode(target), status.st_ino)

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with recorder.operation():
            _real["mkdir"](path, mode, dir_fd=dir_fd)
            if (place := recorder.where(path, dir_fd)) is not None:
                status = os.lstat(os.path.join(recorder.base, place))
                recorder.mark("create", place, "dir", stat.S_IMODE(status.st_mode), b"", status.st_ino)

    def removing(real: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            with recorder.operation():
                real(path, dir_fd=dir_fd)
                if (place := recorder.where(path, dir_fd)) is not None:
                    recorder.mark("remove", place)

        return remove

    def rename(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with recorder.operation():
            source, target = recorder.where(old, src_dir_fd), recorder.where(new, dst_dir_fd)
            _real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if source is not None or target is not None:
                recorder.mark("rename", source, target)

    def link(
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        with recorder.operation():
            fds = {"src_dir_fd": src_dir_fd, "dst_dir_fd": dst_dir_fd}
            _real["link"](old, new, follow_symlinks=follow_symlinks, **fds)
            recorder.mark("link", recorder.where(old, src_dir_fd), recorder.where(new, dst_dir_fd))

    removers = {name: removing(_real[name]) for name in ("unlink", "remove", "rmdir")}
    return {"symlink": symlink, "mkdir": mkdir, "rename": rename, "replace": rename, "link": link, **removers}


def _other_functions(recorder: Recorder) -> Functions:
    def setting(real: Callable[..., Any]) -> Callable[..., Any]:
        """Mode, time or extended attributes: what the file has afterwards is recorded."""

        def change(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> None:
            with recorder.operation():
                with_dir = {} if dir_fd is None else {"dir_fd": dir_fd}
                real(path, *rest, **with_dir, **more)
                if (place := recorder.where(path, dir_fd)) is not None:
                    recorder.mark("meta", place, _metadata(os.path.join(recorder.base, place)))

        return change

    def sync_handle(handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        with recorder.operation():
            if recorder.syncs:
                _real["fsync"](number)
            recorder.synced(recorder.where(number))

    def sync_all() -> None:
        with recorder.operation():
            if recorder.syncs:
                _real["sync"]()
            recorder.synced("*")

    setters = {name: setting(_real[name]) for name in ("chmod", "fchmod", "utime", "setxattr", "removexattr")}
    return {"fsync": sync_handle, "fdatasync": sync_handle, "sync": sync_all, **setters}


def _metadata(path: str) -> tuple[int, int, tuple[tuple[str, bytes], ...]]:
    """Mode, time of change, and the user's extended attributes."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return (0o777, status.st_mtime_ns, ())
    names = [name for name in os.listxattr(path) if name.startswith("user.")]
    return (stat.S_IMODE(status.st_mode), status.st_mtime_ns, tuple((name, os.getxattr(path, name)) for name in names))


def _recording_open(recorder: Recorder) -> Callable[..., Any]:
    def open_(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> IO[Any]:
        writes = set(mode) & set("wxa+")
        if not writes or recorder.where(file) is None:
            return _real_open(file, mode, buffering, *rest, **more)
        if "b" not in mode:
            raise NotImplementedError("text files below the recorded folder")
        closes = more.get("closefd", True)
        raw = _RecordingFile(recorder, file, mode.replace("b", ""), opener=more.get("opener"), closefd=closes)
        return raw if buffering == 0 else io.BufferedWriter(raw)

    return open_


class _RecordingFile(io.FileIO):
    def __init__(self, recorder: Recorder, file: Any, mode: str, *, opener: Any, closefd: bool) -> None:
        self._recorder = recorder
        super().__init__(file, mode, closefd, opener=opener or (lambda path, flags: os.open(path, flags, 0o666)))

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)


def _recording_ioctl(recorder: Recorder) -> Callable[..., Any]:
    """A clone shares the bytes of another file: it is recorded as a write of them."""
    real = fcntl.ioctl

    def ioctl(handle: Any, request: int, *rest: Any) -> Any:
        place = recorder.where(handle) if request == _CLONE else None
        if place is None:
            return real(handle, request, *rest)
        with recorder.operation():
            answer = real(handle, request, *rest)
            status = os.fstat(handle)
            recorder.mark("write", place, 0, os.pread(rest[0], status.st_size, 0), status.st_mtime_ns)
            return answer

    return ioctl


def _recording_library(recorder: Recorder) -> type[ctypes.CDLL]:
    class Library(_real_library):
        def __getattr__(self, name: str) -> Any:
            found: Any = super().__getattr__(name)
            wrap = _WRAPPED.get(name)
            if wrap is not None:
                found = wrap(recorder, found)
                setattr(self, name, found)
            return found

    return Library


def _wrapped_rename(recorder: Recorder, real: Any) -> Callable[..., int]:
    def renameat2(old_dir: Any, old: Any, new_dir: Any, new: Any, flags: Any) -> int:
        with recorder.operation():
            source = recorder.where(_plain(old), _plain(old_dir))
            target = recorder.where(_plain(new), _plain(new_dir))
            done: int = real(old_dir, old, new_dir, new, flags)
            if done == 0 and (source is not None or target is not None):
                recorder.mark("exchange" if _plain(flags) & _EXCHANGE else "rename", source, target)
            return done

    return renameat2


def _wrapped_sync(recorder: Recorder, real: Any) -> Callable[..., int]:
    def sync(handle: Any, *rest: Any) -> int:
        with recorder.operation():
            done = int(real(handle, *rest)) if recorder.syncs else 0
            if done == 0:
                recorder.synced(recorder.where(_plain(handle)))
            return done

    return sync


def _wrapped_syncfs(recorder: Recorder, real: Any) -> Callable[..., int]:
    def syncfs(handle: Any) -> int:
        with recorder.operation():
            done = int(real(handle)) if recorder.syncs else 0
            if done == 0:
                recorder.synced("*")
            return done

    return syncfs


def _wrapped_syscall(_: Recorder, real: Any) -> Callable[..., int]:
    def syscall(number: Any, *arguments: Any) -> int:
        if _plain(number) in _NOT_BY_NUMBER:
            raise NotImplementedError(f"system call {_plain(number)} by its number")
        return int(real(number, *arguments))

    return syscall


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


_WRAPPED: dict[str, Callable[[Recorder, Any], Callable[..., int]]] = {
    "renameat2": _wrapped_rename,
    "fsync": _wrapped_sync,
    "fdatasync": _wrapped_sync,
    "sync_file_range": _wrapped_sync,
    "syncfs": _wrapped_syncfs,
    "syscall": _wrapped_syscall,
}


class _RecordingVfs(apsw.VFS):
    """SQLite's files, as the default for every connection."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        super().__init__("mulligan-recording", "unix", makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _RecordingDatabase(self.recorder, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        with self.recorder.operation():
            super().xDelete(filename, False)
            place = self.recorder.where(filename)
            if place is not None:
                self.recorder.mark("remove", place)
                if syncdir:
                    self.recorder.synced(os.path.dirname(place))


class _RecordingDatabase(apsw.VFSFile):
    def __init__(self, recorder: Recorder, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._recorder = recorder
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._place = None if not path else recorder.where(path)
        # SQLite syncs the folder of a new log with the first sync of the log.
        self._is_new_log = False
        there = path and os.path.exists(path)
        super().__init__("unix", name, flags)
        if self._place is not None and not there:
            self._is_new_log = not self._place.endswith(".db")
            _note_opened(recorder, self._place, there=False, truncates=False)

    def xWrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        with self._recorder.operation():
            super().xWrite(data, offset)
            if self._place is not None:
                self._recorder.mark("write", self._place, offset, bytes(data), 0)

    def xTruncate(self, newsize: int) -> None:
        with self._recorder.operation():
            super().xTruncate(newsize)
            if self._place is not None:
                self._recorder.mark("truncate", self._place, newsize, 0)

    def xSync(self, flags: int) -> None:
        with self._recorder.operation():
            if self._recorder.syncs:
                super().xSync(flags)
            self._recorder.synced(self._place)
            if self._is_new_log and self._place is not None:
                self._is_new_log = False
                self._recorder.synced(os.path.dirname(self._place))
