"""The files of a durable session as a resource: each change is part of the call it is made in, or a call of its own."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, get_args
from uuid import UUID

from mulligan.boundary.verdict import Boundary
from mulligan.effects.hosting import hosted, once_hosted
from mulligan.effects.judging import Judge
from mulligan.effects.receipt import Receipt
from mulligan.history import going_back
from mulligan.history.current import current_call
from mulligan.history.going_back import How
from mulligan.history.log import calls_of, verb_of
from mulligan.history.tables import CALLS, WSEQ_END, CallRow
from mulligan.store.protocol import Tx
from mulligan.values.digest import parse_digest
from mulligan.values.faults import MulliganError
from mulligan.values.paths import ROOT, RepoPath, join, path_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.values.state_faults import RestoreFailedError, SnapshotMismatchError
from mulligan.workspace.filesystem import (
    FileKind,
    FilesystemSnapshot,
    PlainFilesystem,
    WriteMode,
    WriteResult,
    repo_path,
)
from mulligan.workspace.keeping import files_below

if TYPE_CHECKING:
    from mulligan.effects.handle import CallHandle
    from mulligan.effects.session import Session
    from mulligan.history.desk import Desk

_REF = "call:"
_FEW = 8
_WHOLLY = ("undo", "rollback", "rewind", "redo")
_ERRORS: Mapping[str, type[OSError]] = {
    "path_not_found": FileNotFoundError,
    "parent_not_found": FileNotFoundError,
    "is_directory": IsADirectoryError,
    "not_a_directory": NotADirectoryError,
    "not_directory": NotADirectoryError,
    "file_exists": FileExistsError,
}


class SessionFilesystem(PlainFilesystem):
    """Looks and writes through a session, so its boundary holds and everything can be undone.

    A snapshot is a point in the session's history and costs nothing. Restoring one takes back what the session's calls
    have done since, as one more call; if somebody else's work is in the way, nothing is.
    """

    goes_with_call: ClassVar[bool] = True

    def __init__(self, session: Session, desk: Desk, boundary: Boundary) -> None:
        self._session = session
        self._desk = desk
        self._boundary = boundary

    @property
    def root(self) -> str:
        """The folder the session works in."""
        return os.fsdecode(self._desk.disk.root.path)

    # Snapshots.

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        """The point that the session's history has come to."""
        ledger = self._desk.ledger
        return FilesystemSnapshot(UUID(ledger.ids.new()), ledger.clock.now(), _REF + self._newest(), self.root, tag)

    def _newest(self) -> str:
        """The session's newest call that has done something; "" before the first."""
        with self._desk.ledger.store.read() as tx:
            return _standing(self._changing_calls(tx))

    def _changing_calls(self, tx: Tx) -> Iterator[CallRow]:
        """Newest first. The store passes over calls that only looked, of which there may be very many."""

        def found(limit: int | None = None) -> list[CallRow]:
            whose = {"session": self._session.id, "status": "committed"}
            order = ("id",)
            return tx.select(CALLS, whose, between=("wseq", 0, WSEQ_END), order=order, descending=True, limit=limit)

        yield from (few := found(_FEW))
        if len(few) == _FEW:
            yield from found()[_FEW:]

    def check_restore(self, snapshot: object) -> None:
        """Raises SnapshotMismatchError for a snapshot of something else, RestoreFailedError inside a call."""
        if not isinstance(snapshot, FilesystemSnapshot) or not snapshot.commit_ref.startswith(_REF):
            raise SnapshotMismatchError(f"A session's files are not restored from a {type(snapshot).__name__}.")
        if os.path.realpath(snapshot.root_path) != os.path.realpath(self.root):
            raise SnapshotMismatchError(f"This is a snapshot of {snapshot.root_path}, not of {self.root}.")
        if current_call() is not None:
            raise RestoreFailedError("Files go back between calls, not in the middle of one; let that call fail.")

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        """Take back what the session's calls have done since; raises RestoreFailedError if others have changed it."""
        self.check_restore(snapshot)
        point = snapshot.commit_ref.removeprefix(_REF)
        first = self._first_after(point)
        if first is None:
            return
        found = once_hosted(self._desk, self._session.id, default=self._boundary)
        may_write = Judge.of(self._desk, self._session.id, found).may_write
        how = How("refuse", session=self._session.id, may_write=may_write)
        try:
            done = going_back.rewind(self._desk, first, side="before", talk=False, how=how)
        except MulliganError as error:
            raise RestoreFailedError(f"The files could not be put back: {error.message}") from error
        if not done.ok:
            stuck = [outcome.path for outcome in done.outcomes if outcome.outcome in ("conflicted", "failed")]
            raise RestoreFailedError(f"Somebody else has changed {', '.join(stuck)} since.", paths=stuck)

    def _first_after(self, point: str) -> str | None:
        with self._desk.ledger.store.read() as tx:
            later = [row for row in calls_of(tx, self._desk, self._session.id, after=point) if row.wseq is not None]
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

    def _must(self, act: Callable[[CallHandle], Receipt]) -> Receipt:
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

    # Reading and writing find out by themselves what is there, also for those who may not ask.

    def _load_file(self, path: RepoPath) -> bytes:
        return self._load(path)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """The whole of it or nothing, in one step. `create` never replaces, `append` adds to what is there."""
        if mode not in get_args(WriteMode):
            raise ValueError(f"There is no mode {mode!r}; there are create, overwrite and append.")
        found = repo_path(path)
        if found == ROOT:
            raise IsADirectoryError(f"{path} is a directory.")
        how = {"mode": "create_new" if mode == "create" else "overwrite"}
        with self._changing():
            whole = self._before(found) + content if mode == "append" else content
            self._must(lambda call: call.write_file(to_wire(found), whole, create_parents=create_parents, **how))
        return WriteResult(found, len(content), mode)

    def _before(self, path: RepoPath) -> bytes:
        try:
            return self._load(path)
        except FileNotFoundError:
            return b""

    def _load(self, path: RepoPath) -> bytes:
        receipt = self._must(lambda call: call.read_file(to_wire(path), encoding="bytes"))
        return _bytes_of(receipt.content, self._desk)

    def _put(self, path: RepoPath, content: bytes) -> None:
        self._must(lambda call: call.write_file(to_wire(path), content))

    def _make_dir(self, path: RepoPath) -> None:
        self._must(lambda call: call.mkdir(to_wire(path)))

    def _remove(self, path: RepoPath) -> None:
        self._must(lambda call: call.delete(to_wire(path), recursive=True))

    def _is_there(self, path: RepoPath) -> bool:
        """Deleting finds out by itself."""
        return True

    def _is_link(self, path: RepoPath) -> bool:
        return os.path.islink(os.path.join(self.root, path))

    def _names(self, path: RepoPath) -> list[str]:
        boundary = self._listing()
        with self._desk.disk.resolve(path) as spot:
            shown = [name.decode("utf-8", "surrogateescape") for name in self._desk.disk.children(spot)]
        return [name for name in shown if boundary.admits("list", join(path, name))]

    def _files_below(self, base: RepoPath) -> list[RepoPath]:
        boundary = self._listing()
        found = [RepoPath(os.fsdecode(path)) for path in files_below(self._desk.disk.root.handle, path_bytes(base))]
        return sorted((path for path in found if boundary.admits("list", path)), key=path_bytes)

    def _listing(self) -> Boundary:
        """The boundary in force, which lets the session list."""
        try:
            found = hosted(self._desk, self._session.id, default=self._boundary).boundary
            found.check_op("list")
        except Refused as refused:
            raise (PermissionError if refused.status == "forbidden" else OSError)(refused.message) from None
        return found


def _standing(rows: Iterable[CallRow]) -> str:
    """The newest call there is; or, if everything since an older one was taken back again, that one."""
    newest: str | None = None
    taken_back: set[str] = set()
    for row in rows:
        newest = row.id if newest is None else newest
        if row.id in taken_back:
            taken_back.remove(row.id)
        elif verb_of(row) in _WHOLLY and "part" not in row.why:
            taken_back |= set(row.why["of"])
        else:
            return newest if taken_back else row.id
    return newest or "" if taken_back else ""


def _bytes_of(payload: Mapping[str, Any], desk: Desk) -> bytes:
    if "inline_text" in payload:
        return str(payload["inline_text"]["text"]).encode("utf-8")
    if "inline_bytes" in payload:
        return b64decode(payload["inline_bytes"]["bytes"].removeprefix("base64:"))
    return desk.ledger.blobs.read(parse_digest(payload["blob"]["blob_ref"]))
