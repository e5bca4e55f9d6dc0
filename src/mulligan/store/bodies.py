"""Bodies of large blobs: in memory, and in a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from mulligan.values.digest import Digest, parse_digest
from mulligan.values.faults import MulliganError, fault, fault_of_os_error


class MemoryBodies:
    def __init__(self) -> None:
        self._bodies: dict[Digest, bytes] = {}

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None:
        self._bodies.setdefault(digest, bytes(body))

    def get(self, digest: Digest) -> bytes:
        try:
            return self._bodies[digest]
        except KeyError:
            raise fault("missing_cas_dependency", f"The body of {digest} is gone.", digest=digest) from None

    def delete(self, digest: Digest) -> None:
        self._bodies.pop(digest, None)

    def sync(self) -> None:
        return None

    def digests(self) -> Iterator[Digest]:
        return iter(sorted(self._bodies))


class DirectoryBodies:
    """`<dir>/<2 hex>/<62 hex>`: written under a name of their own, then linked into place, so never half there."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._unsynced: set[str] = set()
        self._serial = 0

    def put(self, digest: Digest, body: bytes, *, durable: bool = False) -> None:
        path = self._path_of(digest)
        if os.path.exists(path) and not (durable and path in self._unsynced):
            return
        try:
            self._write(path, body, durable=durable)
        except OSError as error:
            raise fault_of_os_error(error, f"Writing blob {digest[:19]}…") from error
        if durable:
            self._unsynced.discard(path)
        else:
            self._unsynced.add(path)

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
            _sync_directory(folder)
            if fresh:
                _sync_directory(self._directory)

    def get(self, digest: Digest) -> bytes:
        try:
            with open(self._path_of(digest), "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise fault("missing_cas_dependency", f"The body of {digest} is gone.", digest=digest) from None
        except OSError as error:
            raise fault_of_os_error(error, f"Reading blob {digest[:19]}…") from error

    def delete(self, digest: Digest) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path_of(digest))

    def sync(self) -> None:
        pending, self._unsynced = self._unsynced, set()
        for path in pending:
            with suppress(FileNotFoundError):
                _sync_file(path)
        for folder in {os.path.dirname(path) for path in pending} | ({self._directory} if pending else set()):
            _sync_directory(folder)

    def digests(self) -> Iterator[Digest]:
        for shard in sorted(os.listdir(self._directory)) if os.path.isdir(self._directory) else ():
            folder = os.path.join(self._directory, shard)
            for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
                with suppress(MulliganError):
                    yield parse_digest(f"sha256:{shard}{name}")

    def _path_of(self, digest: Digest) -> str:
        return os.path.join(self._directory, digest[7:9], digest[9:])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_file(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_sync_directory = _sync_file
