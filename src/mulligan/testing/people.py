"""Somebody else at the same files: an editor, a build, a person. Acts without asking us and without announced steps."""

from __future__ import annotations

import os
from typing import Protocol


class Writing(Protocol):
    def write(self, content: bytes, /) -> object: ...

    def close(self) -> None: ...


class Person(Protocol):
    """Paths are relative to the root. Whatever is in the way of a save gives way, as it does to an editor's."""

    def save(self, path: str, content: bytes) -> None:
        """As most editors do: a new file, renamed over the old one."""
        ...

    def save_in_place(self, path: str, content: bytes) -> None:
        """As the others do: the same file, emptied and written anew; made if it is not there."""
        ...

    def open_for_writing(self, path: str) -> Writing:
        """A file somebody has emptied and is still busy with."""
        ...

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None if there is no file."""
        ...

    def remove(self, path: str) -> None:
        """A file or link, if it is there."""
        ...

    def make_dir(self, path: str) -> None: ...

    def remove_dir(self, path: str) -> None: ...

    def make_link(self, path: str, target: str) -> None: ...

    def hard_link(self, path: str, other: str) -> None:
        """`other` becomes a second name of the file at `path`."""
        ...

    def names(self, path: str = ".") -> list[str]:
        """The names in a directory, in order."""
        ...


class HostPerson:
    """On the real file system."""

    def __init__(self, root: str) -> None:
        self._root = root

    def save(self, path: str, content: bytes) -> None:
        draft = self._at(path) + ".saving~"
        with open(draft, "wb") as file:
            file.write(content)
        os.replace(draft, self._at(path))

    def save_in_place(self, path: str, content: bytes) -> None:
        with open(self._at(path), "wb") as file:
            file.write(content)

    def open_for_writing(self, path: str) -> Writing:
        return open(self._at(path), "wb", buffering=0)

    def read(self, path: str) -> bytes | None:
        try:
            with open(self._at(path), "rb") as file:
                return file.read()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def remove(self, path: str) -> None:
        if os.path.lexists(self._at(path)):
            os.unlink(self._at(path))

    def make_dir(self, path: str) -> None:
        os.mkdir(self._at(path))

    def remove_dir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def make_link(self, path: str, target: str) -> None:
        os.symlink(target, self._at(path))

    def hard_link(self, path: str, other: str) -> None:
        os.link(self._at(path), self._at(other))

    def names(self, path: str = ".") -> list[str]:
        return sorted(os.listdir(self._at(path)))

    def _at(self, path: str) -> str:
        return os.path.join(self._root, path)
