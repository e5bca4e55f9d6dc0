"""Bodies of large blobs: in memory, and in a directory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

from mulligan.values.digest import Digest, parse_digest
from mulligan.values.errors import MulliganError, fault, fault_of_os_error


class MemoryBodies:
    def __init__(self) -> None:
        self._bodies: dict[Digest, bytes] = {}

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None:
        self._bodies.setdefault(digest, bytes(body))

    def replace(self, digest: Digest, body: bytes) -> None:
        self._bodies[digest] = bytes(body)

    def get(self, digest: Digest) -> bytes:
        try:
            return self._bodies[digest]
        except KeyError:
            raise fault("missing_cas_dependency", f"The body of {digest} is gone.", digest=digest) from None

    def has(self, digest: Digest) -> bool:
        return digest in self._bodies

    def delete(self, digest: Digest) -> None:
        self._bodies.pop(digest, None)

    def sync(self, digests: Iterable[Digest] | None = None) -> None:
        return None

    def digests(self) -> Iterator[Digest]:
        return iter(sorted(self._bodies))

    def sweep(self, is_named: Callable[[Digest], bool], *, before_s: float) -> tuple[int, int]:
        """Removes nothing: the bodies of a dead process are gone with its memory."""
        return 0, 0


class DirectoryBodies:
    """Files `<dir>/<2 hex>/<62 hex>`. A body is written under a draft name and renamed, so it is never half there."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._unsynced: set[str] = set()
        self._serial = 0

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None:
        path = self._path_of(digest)
        try:
            if not os.path.exists(path):
                self._write(path, body, durable=durable)
            elif durable:
                # The process that wrote it may not have synced it.
                self._sync([path])
            else:
                # The caller is about to write a row that names it; the new time keeps `sweep` from removing it before.
                os.utime(path)
                return
        except OSError as error:
            raise fault_of_os_error(error, f"Writing blob {digest[:19]}…") from error
        if durable:
            self._unsynced.discard(path)
        else:
            self._unsynced.add(path)

    def replace(self, digest: Digest, body: bytes) -> None:
        try:
            self._write(self._path_of(digest), body, durable=True)
        except OSError as error:
            raise fault_of_os_error(error, f"Writing blob {digest[:19]}…") from error

    def _write(self, path: str, body: bytes, *, durable: bool) -> None:
        folder = os.path.dirname(path)
        fresh = not os.path.isdir(folder)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._serial += 1
        draft = f"{path}.{os.getpid()}-{id(self)}-{self._serial}.part"
        try:
            with open(draft, "xb", opener=_private) as file:
                file.write(body)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(draft)
            raise
        if durable:
            sync_path(folder)
            if fresh:
                self._sync_directory()

    def get(self, digest: Digest) -> bytes:
        try:
            with open(self._path_of(digest), "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise fault("missing_cas_dependency", f"The body of {digest} is gone.", digest=digest) from None
        except OSError as error:
            raise fault_of_os_error(error, f"Reading blob {digest[:19]}…") from error

    def has(self, digest: Digest) -> bool:
        return os.path.exists(self._path_of(digest))

    def delete(self, digest: Digest) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path_of(digest))

    def sync(self, digests: Iterable[Digest] | None = None) -> None:
        """A body that was deleted meanwhile needs no sync and is passed over."""
        pending = set(self._unsynced) if digests is None else {self._path_of(digest) for digest in digests}
        try:
            self._sync(pending)
        except OSError as error:
            raise fault("sync_failed", f"Syncing blobs: {error.strerror}", errno=error.errno) from error
        self._unsynced -= pending

    def _sync(self, paths: Collection[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                sync_path(path)
        for folder in sorted({os.path.dirname(path) for path in paths}, reverse=True):
            with suppress(FileNotFoundError):
                sync_path(folder)
        if paths and os.path.isdir(self._directory):
            self._sync_directory()

    def _sync_directory(self) -> None:
        """Sync the names of the shards, and the name of the directory that holds them."""
        sync_path(self._directory)
        sync_path(os.path.dirname(self._directory) or ".")

    def digests(self) -> Iterator[Digest]:
        for shard in sorted(os.listdir(self._directory)) if os.path.isdir(self._directory) else ():
            folder = os.path.join(self._directory, shard)
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
                with suppress(MulliganError):
                    yield parse_digest(f"sha256:{shard}{name}")

    def sweep(self, is_named: Callable[[Digest], bool], *, before_s: float) -> tuple[int, int]:
        count = size = 0
        for shard in sorted(os.listdir(self._directory)) if os.path.isdir(self._directory) else ():
            with os.scandir(os.path.join(self._directory, shard)) as entries:
                for entry in entries:
                    status = entry.stat()
                    if status.st_mtime < before_s and not _is_body(shard + entry.name, is_named):
                        os.unlink(entry.path)
                        count, size = count + 1, size + status.st_size
        return count, size

    def _path_of(self, digest: Digest) -> str:
        return os.path.join(self._directory, digest[7:9], digest[9:])


def _is_body(name: str, is_named: Callable[[Digest], bool]) -> bool:
    """Whether a row names this body. The name of a half-written body is not a digest."""
    try:
        return is_named(parse_digest(f"sha256:{name}"))
    except MulliganError:
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_path(path: str) -> None:
    """Make a file, or the names in a directory, survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file_system(handle: int) -> None:
    """Make everything on the file system of an open file or directory survive a power cut. Raises OSError."""
    if not hasattr(_libc, "syncfs"):
        os.sync()
    elif _libc.syncfs(handle) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)
