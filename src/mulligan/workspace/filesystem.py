"""File systems as resources of an agent: one small protocol, and what all of them have in common.

Paths are relative to the root; `..` and absolute paths are PermissionError. What is not there is FileNotFoundError, and
so on, as everywhere in Python. Text is what the bytes say: no newline is added, dropped or translated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, runtime_checkable
from uuid import UUID

from mulligan.values.call_scope import check_call_open
from mulligan.values.faults import MulliganError
from mulligan.values.globs import parse_glob
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, join, name_of, parse_repo_path
from mulligan.values.plain import plain

WriteMode = Literal["create", "overwrite", "append"]
FileKind = Literal["file", "dir"]


@plain(slots=True, frozen=True)
class ReadResult:
    """Some lines of a file. `limit` is how many; `truncated`: there are more after them."""

    content: str
    path: str
    total_lines: int
    offset: int = 0
    limit: int = 0
    truncated: bool = False


@plain(slots=True, frozen=True)
class ReadBytesResult:
    content: bytes
    path: str
    size_bytes: int
    offset: int = 0
    limit: int = 0
    truncated: bool = False


@plain(slots=True, frozen=True)
class WriteResult:
    path: str
    bytes_written: int
    mode: WriteMode


@plain(slots=True, frozen=True)
class FileEntryShown:
    """One name in a directory."""

    name: str
    path: str
    is_file: bool
    is_directory: bool


@dataclass(slots=True, frozen=True)
class FilesystemSnapshot:
    """The files below a root at one moment. Two with the same `commit_ref` hold the same files, times aside."""

    snapshot_id: UUID
    created_at: datetime
    commit_ref: str
    root_path: str
    tag: str | None = None
    manifest: str | None = None


@runtime_checkable
class Filesystem(Protocol):
    """What a tool needs of files."""

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Lines of a text, from `offset` on. Raises FileNotFoundError, ValueError if it is no text."""
        ...

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Bytes of a file, from `offset` on. Raises FileNotFoundError, IsADirectoryError."""
        ...

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The text, as UTF-8 and whole: instead of what is there, at its end, or only if nothing is there."""
        ...

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The same for bytes. Raises FileExistsError in the mode `create`."""
        ...

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """A file, a link or an empty directory; one with something in it only if `recursive`."""
        ...

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory. Raises FileExistsError for a file, or, unless `exist_ok`, for a directory."""
        ...

    def exists(self, path: str) -> bool:
        """Whether anything is there."""
        ...

    def list(self, path: str = ".") -> tuple[FileEntryShown, ...]:
        """What is in a directory, sorted by name. Raises FileNotFoundError, NotADirectoryError."""
        ...

    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Files below `path` that match, sorted: `*` within a name, `**` across directories."""
        ...


@runtime_checkable
class SnapshotableFilesystem(Filesystem, Protocol):
    """A file system whose whole state can be captured and put back."""

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """Everything as it is now."""
        ...

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Everything as at the snapshot, or, if that fails, as it is now."""
        ...


def repo_path(path: str) -> RepoPath:
    """A path inside the root. Raises PermissionError for one that leads out, ValueError for one that means nothing."""
    try:
        return parse_repo_path(path)
    except MulliganError as error:
        leads_out = error.details.get("absolute") or error.details.get("climbs")
        raise (PermissionError if leads_out else ValueError)(error.message) from None


class PlainFilesystem(ABC):
    """The protocol, out of a handful of steps on parsed paths."""

    @abstractmethod
    def _kind(self, path: RepoPath) -> FileKind | None:
        """What is there; None for nothing. A link is what it leads to."""

    @abstractmethod
    def _load(self, path: RepoPath) -> bytes:
        """Of a file that is there."""

    @abstractmethod
    def _put(self, path: RepoPath, content: bytes) -> None:
        """Whole or not at all. The directory is there."""

    @abstractmethod
    def _make_dir(self, path: RepoPath) -> None:
        """The directory around it is there, and nothing by this name."""

    @abstractmethod
    def _remove(self, path: RepoPath) -> None:
        """With everything below it; a link itself, never what it leads to."""

    @abstractmethod
    def _names(self, path: RepoPath) -> Sequence[str]:
        """In the directory, sorted."""

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        """Lines from `offset` on. Raises ValueError for a file that is no text in that encoding."""
        _check_window(offset, limit)
        found = repo_path(path)
        lines = self._text(found, encoding).splitlines(keepends=True)
        part = lines[offset : None if limit is None else offset + limit]
        more = offset + len(part) < len(lines)
        return ReadResult("".join(part), found, len(lines), offset, len(part), truncated=more)

    def _text(self, path: RepoPath, encoding: str) -> str:
        try:
            return self._load_file(path).decode(encoding)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no {encoding} text; use read_bytes.") from None

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        """Bytes of a file, from `offset` on. Raises FileNotFoundError, IsADirectoryError."""
        _check_window(offset, limit)
        found = repo_path(path)
        whole = self._load_file(found)
        part = whole[offset : None if limit is None else offset + limit]
        more = offset + len(part) < len(whole)
        return ReadBytesResult(part, found, len(whole), offset, len(part), truncated=more)

    def _load_file(self, path: RepoPath) -> bytes:
        kind = self._kind(path)
        if kind is None:
            raise FileNotFoundError(f"{path} does not exist.")
        if kind == "dir":
            raise IsADirectoryError(f"{path} is a directory.")
        return self._load(path)

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The text, as UTF-8 and whole. `create` never replaces, `append` adds to what is there."""
        return self.write_bytes(path, content.encode("utf-8"), mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The whole of it or nothing, in one step. `create` never replaces, `append` adds to what is there."""
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"There is no mode {mode!r}; there are create, overwrite and append.")
        found = repo_path(path)
        check_call_open()
        with self._changing():
            kind = self._kind(found)
            if found == ROOT or kind == "dir":
                raise IsADirectoryError(f"{path} is a directory.")
            if kind is not None and mode == "create":
                raise FileExistsError(f"{path} is there already.")
            self._make_parents(found, create=create_parents)
            before = self._load(found) if mode == "append" and kind is not None else b""
            self._put(found, before + content)
        return WriteResult(found, len(content), mode)

    def _changing(self) -> AbstractContextManager[object]:
        """One change after the other."""
        return nullcontext()

    def _make_parents(self, path: RepoPath, *, create: bool) -> None:
        for parent in reversed(ancestors_of(path)[:-1]):
            kind = self._kind(parent)
            if kind == "file":
                raise NotADirectoryError(f"{parent} is not a directory.")
            if kind is None and not create:
                raise FileNotFoundError(f"There is no directory {parent}.")
            if kind is None:
                self._make_dir(parent)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a directory. Raises FileExistsError for a file, or, unless `exist_ok`, for a directory."""
        found = repo_path(path)
        kind = ROOT if found == ROOT else self._kind(found)
        if kind == "file" or (kind is not None and not exist_ok):
            raise FileExistsError(f"{path} is there already.")
        if kind is None:
            check_call_open()
            self._make_parents(found, create=parents)
            self._make_dir(found)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Of a link, the link. A directory with something in it only if `recursive`; the root never."""
        found = repo_path(path)
        if found == ROOT:
            raise PermissionError("The root itself is not deleted.")
        if not self._is_there(found):
            raise FileNotFoundError(f"{path} does not exist.")
        if not recursive and not self._is_link(found) and self._kind(found) == "dir" and self._names(found):
            raise IsADirectoryError(f"{path} is a directory with something in it.")
        check_call_open()
        self._remove(found)

    def _is_there(self, path: RepoPath) -> bool:
        return self._kind(path) is not None

    def _is_link(self, path: RepoPath) -> bool:
        return False

    def exists(self, path: str) -> bool:
        """Whether anything is there; a link that leads nowhere is nothing."""
        found = repo_path(path)
        return found == ROOT or self._kind(found) is not None

    def list(self, path: str = ".") -> tuple[FileEntryShown, ...]:
        """What is in a directory, sorted by name. Raises FileNotFoundError, NotADirectoryError."""
        base = repo_path(path)
        kind: str | None = "dir" if base == ROOT else self._kind(base)
        if kind is None:
            raise FileNotFoundError(f"{path} does not exist.")
        if kind == "file":
            raise NotADirectoryError(f"{path} is not a directory.")
        return tuple(self._shown(join(base, name)) for name in self._names(base))

    def _shown(self, path: RepoPath) -> FileEntryShown:
        kind = self._kind(path)
        return FileEntryShown(name_of(path), path, is_file=kind == "file", is_directory=kind == "dir")

    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Files below `path` whose path from there matches: `*` within a name, `**` across directories; sorted."""
        base, shape = repo_path(path), parse_glob(pattern)
        below = 0 if base == ROOT else len(base) + 1
        return tuple(found for found in self._files_below(base) if shape.matches(found[below:]))

    @abstractmethod
    def _files_below(self, base: RepoPath) -> Sequence[RepoPath]:
        """Every file at any depth, sorted."""


def _check_window(offset: int, limit: int | None) -> None:
    if offset < 0 or (limit is not None and limit < 0):
        raise ValueError("offset and limit are not negative.")
