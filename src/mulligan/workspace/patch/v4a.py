"""V4A patches: what the operations of a patch make of the files, decided in memory before anything is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mulligan.values.faults import AskedWrongly
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, parse_repo_path, path_bytes
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.patch.hunks import apply_hunks
from mulligan.workspace.patch.v4a_parse import Add, Delete, Operation, Update, parse_v4a

__all__ = ["Add", "Delete", "Operation", "Staged", "Update", "parse_v4a", "stage_v4a"]

Read: TypeAlias = Callable[[RepoPath], bytes | None]
"""The bytes of a file, None if there is none. May refuse."""


@plain(slots=True, frozen=True)
class Staged:
    """Every path a patch names, as it was and as it shall be; None is no file.

    `moves` says of a path which file of before it carries on, so that mode and the like go along. Removals come before
    writes: a patch may put a file where it removes a directory's last one, or the other way round.
    """

    files: Mapping[RepoPath, bytes | None]
    originals: Mapping[RepoPath, bytes | None]
    moves: Mapping[RepoPath, RepoPath]
    ops: Mapping[str, int]

    @property
    def changed_paths(self) -> tuple[RepoPath, ...]:
        changed = [path for path, content in self.files.items() if content != self.originals[path]]
        return tuple(sorted(changed, key=path_bytes))


def stage_v4a(
    operations: Sequence[Operation], read: Read, *, path_of: Callable[[str], RepoPath] = parse_repo_path
) -> Staged:
    """Carry out the operations in order, in memory: later ones see earlier ones, the first that fails refuses all."""
    targets = [(_resolved(operation.path, path_of), _destination(operation, path_of)) for operation in operations]
    desk = _Desk(read)
    for operation, (path, destination) in zip(operations, targets, strict=True):
        _carry_out(desk, operation, path, destination)
    _require_no_file_below_a_file(desk.files)
    return Staged(desk.files, desk.originals, desk.moves(), _counts(operations))


def _destination(operation: Operation, path_of: Callable[[str], RepoPath]) -> RepoPath | None:
    if isinstance(operation, Update) and operation.move_to is not None:
        return _resolved(operation.move_to, path_of)
    return None


def _resolved(text: str, path_of: Callable[[str], RepoPath]) -> RepoPath:
    try:
        path = path_of(text)
    except AskedWrongly as error:
        raise _refused("reject", "invalid_path", error.message) from None
    if path == ROOT:
        raise _refused("reject", "invalid_path", f"{text!r} is the root, not a file.")
    return path


@dataclass(slots=True)
class _Desk:
    """The files as the patch so far has them. `_homes` is where each file was before, None for a new one."""

    read: Read
    files: dict[RepoPath, bytes | None] = field(default_factory=dict)
    originals: dict[RepoPath, bytes | None] = field(default_factory=dict)
    _homes: dict[RepoPath, RepoPath | None] = field(default_factory=dict)

    def get(self, path: RepoPath) -> bytes | None:
        if path not in self.files:
            self.files[path] = self.originals[path] = self.read(path)
            self._homes[path] = path if self.files[path] is not None else None
        return self.files[path]

    def put(self, path: RepoPath, content: bytes) -> None:
        self.get(path)
        self.files[path] = content

    def remove(self, path: RepoPath) -> None:
        self.files[path] = self._homes[path] = None

    def move(self, path: RepoPath, to: RepoPath) -> None:
        content, home = self.files[path], self._homes[path]
        self.remove(path)
        self.get(to)
        self.files[to], self._homes[to] = content, home

    def moves(self) -> dict[RepoPath, RepoPath]:
        return {path: home for path, home in self._homes.items() if home is not None and home != path}


def _carry_out(desk: _Desk, operation: Operation, path: RepoPath, destination: RepoPath | None) -> None:
    if isinstance(operation, Add):
        desk.put(path, operation.content.encode("utf-8"))
        return
    content = desk.get(path)
    if content is None:
        verb = "delete" if isinstance(operation, Delete) else "update"
        raise _refused("not_found", f"{verb}_target_not_found", f"There is no file {operation.path!r} to {verb}.")
    if isinstance(operation, Delete):
        desk.remove(path)
        return
    if operation.hunks:
        desk.put(path, _updated(content, operation))
    if destination is not None and destination != path:
        desk.move(path, destination)


def _updated(content: bytes, operation: Update) -> bytes:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        message = f"{operation.path!r} is not UTF-8 text, so hunks cannot be applied to it."
        raise _refused("reject", "update_target_non_utf8", message) from None
    return apply_hunks(text, operation.hunks, name=operation.path).encode("utf-8")


def _require_no_file_below_a_file(files: Mapping[RepoPath, bytes | None]) -> None:
    present = {path for path, content in files.items() if content is not None}
    for path in sorted(present, key=path_bytes):
        for above in ancestors_of(path):
            if above in present:
                raise _refused("reject", "invalid_path", f"{path!r} is below {above!r}, which is a file.")


def _counts(operations: Sequence[Operation]) -> dict[str, int]:
    """A move is an update too."""
    kinds = Counter(type(operation) for operation in operations)
    moves = sum(isinstance(operation, Update) and operation.move_to is not None for operation in operations)
    return {"add": kinds[Add], "update": kinds[Update], "delete": kinds[Delete], "move": moves}


def _refused(status: str, code: str, message: str) -> Refused:
    return Refused(status, code, message, errors=[message])
