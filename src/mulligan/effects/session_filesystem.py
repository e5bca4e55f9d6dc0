"""A durable session's files as a resource. Each change belongs to the current call, or is a call of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, get_args
from uuid import UUID

from mulligan.boundary.verdict import Boundary
from mulligan.effects.context import past_session_boundary, session_boundary
from mulligan.effects.receipt import Receipt
from mulligan.effects.session_boundary import HistoryAccess
from mulligan.files.copy import files_below
from mulligan.files.filesystems import FileKind, FilesystemSnapshot, PlainFilesystem, WriteMode, WriteResult, repo_path
from mulligan.history import undo
from mulligan.history.call import current_call
from mulligan.history.cause import UndoOperation
from mulligan.history.log import calls_of
from mulligan.history.tables import CALLS, WSEQ_END, CallRow
from mulligan.history.undo import UndoOptions
from mulligan.store.protocol import Tx
from mulligan.values.digest import parse_digest
from mulligan.values.errors import MulliganError, Refused, RestoreFailedError, SnapshotMismatchError
from mulligan.values.paths import ROOT, RepoPath, join, path_bytes, to_wire
from mulligan.values.text import from_base64

if TYPE_CHECKING:
    from mulligan.effects.handle import CallHandle
    from mulligan.effects.session import DurableSession
    from mulligan.history.open_root import OpenRoot

_REF = "call:"
_FIRST_PAGE = 8
_UNDO_OPERATIONS = ("undo", "rollback", "rewind", "redo")
_ERRORS: Mapping[str, type[OSError]] = {
    "path_not_found": FileNotFoundError,
    "parent_not_found": FileNotFoundError,
    "is_directory": IsADirectoryError,
    "not_a_directory": NotADirectoryError,
    "not_directory": NotADirectoryError,
    "file_exists": FileExistsError,
}


class SessionFilesystem(PlainFilesystem):
    """Reads and writes through a session, so its boundary applies and every change can be undone.

    A snapshot is a point in the session's history and costs nothing. A restore undoes the session's later calls, as one
    more call. If it conflicts with someone else's changes, it changes nothing.
    """

    goes_with_call: ClassVar[bool] = True

    def __init__(self, session: DurableSession, open_root: OpenRoot, boundary: Boundary) -> None:
        self._session = session
        self._open_root = open_root
        self._boundary = boundary

    @property
    def root(self) -> str:
        """The folder the session works in."""
        return os.fsdecode(self._open_root.disk.root.path)

    # Snapshots.

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """The current point in the session's history."""
        ledger = self._open_root.ledger
        with ledger.store.read() as tx:
            newest = _newest_not_undone(self._changing_calls(tx))
        return FilesystemSnapshot(UUID(ledger.ids.new()), ledger.clock.now(), _REF + newest, self.root, tag)

    def _changing_calls(self, tx: Tx) -> Iterator[CallRow]:
        """Calls that changed something, newest first. The store skips calls that only read, which may be many."""

        def found(limit: int | None = None) -> list[CallRow]:
            whose = {"session": self._session.id, "status": "committed"}
            order = ("id",)
            return tx.select(CALLS, whose, between=("wseq", 0, WSEQ_END), order=order, descending=True, limit=limit)

        yield from (few := found(_FIRST_PAGE))
        if len(few) == _FIRST_PAGE:
            yield from found()[_FIRST_PAGE:]

    def check_restore(self, snapshot: object) -> None:
        """Raises SnapshotMismatchError for a snapshot of something else, RestoreFailedError inside a call."""
        if not isinstance(snapshot, FilesystemSnapshot) or not snapshot.commit_ref.startswith(_REF):
            raise SnapshotMismatchError(f"A session's files cannot be restored from a {type(snapshot).__name__}.")
        if os.path.realpath(snapshot.root_path) != os.path.realpath(self.root):
            raise SnapshotMismatchError(f"This is a snapshot of {snapshot.root_path}, not of {self.root}.")
        if current_call() is not None:
            raise RestoreFailedError("Files cannot be restored inside a call; let the call fail instead.")

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Undo the session's later calls. Raises RestoreFailedError if someone else changed the same files."""
        self.check_restore(snapshot)
        point = snapshot.commit_ref.removeprefix(_REF)
        first = self._first_after(point)
        if first is None:
            return
        found = past_session_boundary(self._open_root, self._session.id, default=self._boundary)
        may_write = HistoryAccess.of(self._open_root, self._session.id, found).may_write
        how = UndoOptions("refuse", session=self._session.id, may_write=may_write)
        try:
            done = undo.rewind(self._open_root, first, side="before", transcript=False, how=how)
        except MulliganError as error:
            raise RestoreFailedError(f"Mulligan could not restore the files: {error.message}") from error
        if not done.ok:
            stuck = [outcome.path for outcome in done.outcomes if outcome.outcome in ("conflicted", "failed")]
            raise RestoreFailedError(f"Someone else has changed {', '.join(stuck)} since.", paths=stuck)

    def _first_after(self, point: str) -> str | None:
        with self._open_root.ledger.store.read() as tx:
            later = [
                row for row in calls_of(tx, self._open_root, self._session.id, after=point) if row.wseq is not None
            ]
        return later[-1].id if later else None

    # The steps.

    def _changing(self) -> CallHandle:
        return self._session.call("files")

    def _perform(self, act: Callable[[CallHandle], Receipt]) -> Receipt:
        with self._session.call("files") as call:
            receipt = act(call)
            if not receipt.ok:
                call.fail(receipt.error_code or receipt.status)
        return receipt

    def _perform_or_raise(self, act: Callable[[CallHandle], Receipt]) -> Receipt:
        receipt = self._perform(act)
        if receipt.ok:
            return receipt
        if receipt.status == "forbidden":
            raise PermissionError(receipt.error_message)
        raise _ERRORS.get(receipt.error_code, OSError)(receipt.error_message)

    def _kind(self, path: RepoPath) -> FileKind | None:
        if path == ROOT:
            return "dir"
        receipt = self._perform(lambda call: call.stat(to_wire(path)))
        if receipt.status == "not_found":
            return None
        if not receipt.ok:
            raise PermissionError(receipt.error_message)
        return "dir" if receipt.is_dir else "file"

    # Read and write without asking `stat` first: a session may read or write without being allowed to stat.

    def _load_file(self, path: RepoPath) -> bytes:
        return self._load(path)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write a file in one step, all or nothing. `create` never replaces; `append` adds to the file."""
        if mode not in get_args(WriteMode):
            raise ValueError(f"There is no mode {mode!r}; use create, overwrite or append.")
        found = repo_path(path)
        if found == ROOT:
            raise IsADirectoryError(f"{path} is a directory.")
        how = {"mode": "create_new" if mode == "create" else "overwrite"}
        with self._changing():
            whole = self._before(found) + content if mode == "append" else content
            self._perform_or_raise(
                lambda call: call.write_file(to_wire(found), whole, create_parents=create_parents, **how)
            )
        return WriteResult(found, len(content), mode)

    def _before(self, path: RepoPath) -> bytes:
        try:
            return self._load(path)
        except FileNotFoundError:
            return b""

    def _load(self, path: RepoPath) -> bytes:
        receipt = self._perform_or_raise(lambda call: call.read_file(to_wire(path), encoding="bytes"))
        return _bytes_of(receipt.content, self._open_root)

    def _put(self, path: RepoPath, content: bytes) -> None:
        self._perform_or_raise(lambda call: call.write_file(to_wire(path), content))

    def _make_dir(self, path: RepoPath) -> None:
        self._perform_or_raise(lambda call: call.mkdir(to_wire(path)))

    def _remove(self, path: RepoPath) -> None:
        self._perform_or_raise(lambda call: call.delete(to_wire(path), recursive=True))

    def _is_there(self, path: RepoPath) -> bool:
        """Always true: delete itself finds out whether the path exists."""
        return True

    def _is_link(self, path: RepoPath) -> bool:
        return os.path.islink(os.path.join(self.root, path))

    def _names(self, path: RepoPath) -> list[str]:
        boundary = self._listing()
        with self._open_root.disk.resolve(path) as resolved:
            shown = [name.decode("utf-8", "surrogateescape") for name in self._open_root.disk.children(resolved)]
        return [name for name in shown if boundary.allows("list", join(path, name))]

    def _files_below(self, base: RepoPath) -> list[RepoPath]:
        boundary = self._listing()
        found = [
            RepoPath(os.fsdecode(path)) for path in files_below(self._open_root.disk.root.handle, path_bytes(base))
        ]
        return sorted((path for path in found if boundary.allows("list", path)), key=path_bytes)

    def _listing(self) -> Boundary:
        """The session's boundary. Refuses a session that may not list."""
        try:
            found = session_boundary(self._open_root, self._session.id, default=self._boundary).boundary
            found.check_op("list")
        except Refused as refused:
            raise (PermissionError if refused.status == "forbidden" else OSError)(refused.message) from None
        return found


def _newest_not_undone(rows: Iterable[CallRow]) -> str:
    """The newest call; if everything after an older call was undone, that older call."""
    newest: str | None = None
    taken_back: set[str] = set()
    for row in rows:
        newest = row.id if newest is None else newest
        if row.id in taken_back:
            taken_back.remove(row.id)
        elif isinstance(cause := row.why, UndoOperation) and cause.verb in _UNDO_OPERATIONS and not cause.part:
            taken_back |= set(cause.of)
        else:
            return newest if taken_back else row.id
    return newest or "" if taken_back else ""


def _bytes_of(payload: Mapping[str, Any], open_root: OpenRoot) -> bytes:
    if "inline_text" in payload:
        return str(payload["inline_text"]["text"]).encode("utf-8")
    if "inline_bytes" in payload:
        return from_base64(payload["inline_bytes"]["bytes"])
    return open_root.ledger.blobs.read(parse_digest(payload["blob"]["blob_ref"]))
