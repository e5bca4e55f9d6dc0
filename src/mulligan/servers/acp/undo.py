"""Undo operations over ACP: S0's three methods with S0's frames, and the same methods for strict clients.

`session/…` are S0's names: the update has the status `restored` and `_meta.harn`. `_mulligan/session/…` use only words
of the protocol, and add `rewind`. Edits by others are merged, unless the client asks for something else; only S0's own
restore overwrites them, as S0 demands, and its answer lists the overwritten paths. In S0's terms a checkpoint is a
turn, and its snapshots are the preimages of the turn's tool calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from mulligan.effects.session import DurableSession
from mulligan.effects.sessions import Sessions
from mulligan.history.multi_root import main_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.plan import OnConflict
from mulligan.history.scopes import drop_scopes
from mulligan.history.tables import CALLS, CHANGES, ROOTS, CallRow
from mulligan.history.undo import UndoResult
from mulligan.servers.acp.wire import BACKEND, INVALID_PARAMS, AcpError, Later, Params, invalid_params
from mulligan.session.lifecycle import session_in
from mulligan.store.protocol import Store, Tx
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId


class AcpWorkspace(Protocol):
    """An open folder with its sessions, as `mulligan.open` gives it."""

    open_root: OpenRoot

    @property
    def sessions(self) -> Sessions: ...
    @property
    def root(self) -> str: ...
    @property
    def store(self) -> Store: ...


class Workspaces:
    """The folders that a client's sessions work in, each opened once, and the store that they share.

    Questions about recorded sessions go to the store alone: the current folder of this process need not be a root.
    """

    def __init__(self, open_folder: Callable[[str], AcpWorkspace], open_store: Callable[[], Store]) -> None:
        self._open_folder, self._open_store = open_folder, open_store
        self._opened: dict[str, AcpWorkspace] = {}
        self._store: Store | None = None
        self._opening = threading.Lock()

    def at(self, folder: str) -> AcpWorkspace:
        with self._opening:
            found = self._opened.get(folder)
            if found is None:
                found = self._opened[folder] = self._open_folder(folder)
                self._store = self._store or found.store
            return found

    def store(self) -> Store:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    def home_of(self, session: str, *, closed: bool = False) -> str | None:
        """The folder of an open session, or with `closed` of any session; None if there is no such session."""
        with self.store().read() as tx:
            row = session_in(tx, session)
            root = tx.get(ROOTS, row.root) if row is not None and (closed or row.closed_at is None) else None
        return None if root is None else os.fsdecode(root.place) or "/"


def close_for_client(workspace: AcpWorkspace, session: DurableSession) -> None:
    """Closes a session and drops its snapshots, as S0 demands. Its calls can still be undone, but are evicted first."""
    drop_scopes(workspace.open_root, session.id)
    workspace.sessions.close(session.id, "client_request")


@fast_dataclass(slots=True, frozen=True)
class Checkpoint:
    """A turn that was undone or redone.

    `snapshots` are tool calls, oldest first. `owners` has the first of them that changed each path: a rollback restores
    the path to its state before that call.
    """

    id: str
    snapshots: tuple[str, ...]
    owners: Mapping[str, str]

    def holds(self, snapshot: str, path: str) -> bool:
        """Whether the path belongs to the snapshot. A path without an owner belongs to the newest snapshot."""
        return self.owners.get(path, self.snapshots[-1]) == snapshot


def checkpoint_of(store: Store, session: SessionId, done: UndoResult) -> Checkpoint:
    """The checkpoint of an undo operation. One that undid no call of the session is its own checkpoint."""
    owners: dict[str, str] = {}
    with store.read() as tx:
        rows = sorted(_work_calls(tx, done.of), key=lambda row: row.id)
        for row in rows:
            for path in _paths(tx, row):
                owners.setdefault(path, _snapshot(row))
        turns = [row.turn for row in rows if row.session == session]
        turn = turns[-1] if turns else _first_undo(tx, done)
    snapshots = tuple(dict.fromkeys(map(_snapshot, rows))) or ((turn,) if done.outcomes else ())
    return Checkpoint(f"turn_{turn.replace('-', '')}", snapshots, owners)


def _work_calls(tx: Tx, calls: Iterable[str]) -> list[CallRow]:
    """The calls without undo operations; if there are only undo operations, the calls that those undid."""
    rows = [row for call in calls if (row := tx.get(CALLS, call)) is not None]
    work = [row for row in rows if row.why.verb is None]
    if work:
        return work
    causes = [row.undoes for row in rows]
    taken = [call for cause in causes for call in (*cause.of, *cause.part)]
    return [row for call in taken if (row := tx.get(CALLS, call)) is not None and row.why.verb is None]


def _snapshot(row: CallRow) -> str:
    return row.label or main_of(row)


def _paths(tx: Tx, row: CallRow) -> list[str]:
    root = tx.get(ROOTS, row.root)
    place = b"" if root is None else root.place
    return [os.fsdecode(place + b"/" + change.path) for change in tx.select(CHANGES, {"call": row.id})]


def _first_undo(tx: Tx, done: UndoResult) -> str:
    """For a redo, the undo operation that it undoes."""
    return next((call for call in done.of if tx.has(CALLS, call)), done.call_id or "")


S0_CAPABILITIES = ("close", "list", "resume", "rollback", "redo", "restoreToolCall")
STRICT_CAPABILITIES = ("rollback", "redo", "restoreToolCall", "rewind")
PREFIX = "_mulligan/"

Tell = Callable[[Mapping[str, Any]], None]
"""Sends one `session/update` of the session."""

_S0_STATUSES = {"nothing_to_undo": "no_checkpoint", "nothing_to_redo": "no_redo", "turn_open": "prompt_active"}
_SKIPPED = ("conflicted", "skipped", "failed")
_HUNK_MAX = 1_000_000


def param(params: Mapping[str, Any], name: str, *, required: bool = True) -> Any:
    """A parameter, in camel case or in snake case."""
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    found = params.get(name, params.get(snake))
    if required and (not isinstance(found, str) or not found):
        raise invalid_params(f"{name} is missing.")
    return found


@fast_dataclass(slots=True, frozen=True)
class UndoMethods:
    """The undo operations of one session. `strict`: for the `_mulligan` forms."""

    session: DurableSession
    tell: Tell
    strict: bool

    def restore_tool_call(self, params: Params) -> Later:
        """Sends the answer first, then the update, as S0 demands."""
        call = param(params, "toolCallId")
        how = self._on_conflict(params, default="merge" if self.strict else "overwrite")
        paths, elsewhere = self._parse_paths(params.get("paths"))
        hunks = self._parse_hunks(params.get("hunks"))
        done = self._try(lambda: self.session.restore(call, paths, hunks=hunks, on_conflict=how))
        restored, skipped = self._paths(done)
        skipped += [{"path": path, "reason": "not_captured"} for path in elsewhere]
        replaced = self._overwrote(done)
        kind: dict[str, Any] = {"kind": "tool_call_restored", "restoredPaths": restored, **replaced}
        kind |= {"skippedPathsWithReasons": skipped} if skipped else {}
        update = {
            "sessionUpdate": "tool_call_update",
            "toolCallId": call,
            "status": "completed" if self.strict else "restored",
            "_meta": {"mulligan" if self.strict else "harn": kind},
        }
        body = {"toolCallId": call, "restoredPaths": restored, "skippedPathsWithReasons": skipped, **replaced}
        return Later(body, lambda: self.tell(update))

    def rollback(self, params: Params) -> Mapping[str, Any]:
        how = self._on_conflict(params)
        return self._move("rolled_back", "session_rollback", lambda: self.session.rollback(on_conflict=how))

    def redo(self, params: Params) -> Mapping[str, Any]:
        how = self._on_conflict(params)
        return self._move("redone", "session_redo", lambda: self.session.redo(on_conflict=how))

    def rewind(self, params: Params) -> Mapping[str, Any]:
        to, side, how = param(params, "to"), params.get("side", "before"), self._on_conflict(params)
        parts = {
            "files": params.get("files", True),
            "transcript": params.get("transcript", bool(params.get("talk", True))),
        }
        return self._move("rewound", "session_rewind", lambda: self.session.rewind(to, side, on_conflict=how, **parts))

    def _parse_paths(self, paths: object) -> tuple[list[str] | None, list[str]]:
        """The paths below the root, relative to it, and the other paths. None means all paths."""
        if paths is None or paths == []:
            return None, []
        if not isinstance(paths, list) or not all(isinstance(path, str) and "\0" not in path for path in paths):
            raise invalid_params("paths is a list of paths.")
        below = {path: self._below(path) for path in paths}
        return [one for one in below.values() if one is not None], [path for path in below if below[path] is None]

    def _parse_hunks(self, hunks: Any) -> dict[str, list[int]] | None:
        """By path relative to the root. None means whole files."""
        if hunks is None or hunks == {}:
            return None
        lists: list[Any] = list(hunks.values()) if isinstance(hunks, dict) else [None]
        if not all(isinstance(one, list) and all(type(n) is int and 0 <= n <= _HUNK_MAX for n in one) for one in lists):
            raise invalid_params("hunks is {path: [index]}.")
        paths, elsewhere = self._parse_paths(list(hunks))
        if elsewhere:
            raise invalid_params("hunks names a path out of the folder.")
        return dict(zip(paths or [], lists, strict=True))

    def _below(self, path: str) -> str | None:
        """The path relative to the root. Links are followed only if the path as written is not below the root."""
        if not os.path.isabs(path):
            return path
        folder, name = os.path.split(os.path.normpath(path))
        start = self.session.root.rstrip("/") + "/"
        paths = (os.path.join(folder, name), os.path.join(os.path.realpath(folder), name))
        return next((path[len(start) :] for path in paths if path.startswith(start)), None)

    def _on_conflict(self, params: Params, *, default: OnConflict = "merge") -> OnConflict:
        given = param(params, "onConflict", required=False) or default
        known: dict[str, OnConflict] = {"merge": "merge", "overwrite": "overwrite", "refuse": "refuse"}
        if given not in known:
            raise invalid_params("onConflict is merge, overwrite or refuse.")
        return known[given]

    def _try(self, act: Callable[[], UndoResult]) -> UndoResult:
        try:
            return act()
        except MulliganError as error:
            if error.code == "invalid_params":
                raise AcpError(INVALID_PARAMS, error.message, {"status": error.code}) from error
            if self.strict and error.code not in _S0_STATUSES:
                # S0's methods have no other code; a strict client would take it for a request to authenticate.
                raise
            status = _S0_STATUSES.get(error.code, "fs_restore_error")
            words = status if error.code in _S0_STATUSES else error.message
            raise AcpError(BACKEND, words, {"status": status, "code": error.code}) from error

    def _paths(self, done: UndoResult) -> tuple[list[str], list[dict[str, str]]]:
        """The restored paths, and the others with the reason; absolute, as S0 demands."""
        root = self.session.root
        restored, skipped = [], []
        for outcome in done.to_json()["outcomes"]:
            path = os.path.join(root, outcome["path"])
            if outcome["outcome"] in _SKIPPED:
                skipped.append({"path": path, "reason": outcome.get("reason") or outcome["outcome"]})
            else:
                restored.append(path)
        return restored, skipped

    def _overwrote(self, done: UndoResult) -> dict[str, list[str]]:
        """The paths at which other people's edits were overwritten, if any. The store keeps those edits."""
        paths = [os.path.join(self.session.root, path) for path in done.to_json()["overwrote_external"]]
        return {"overwrote_external": paths} if paths else {}

    def _move(self, status: str, kind: str, act: Callable[[], UndoResult]) -> Mapping[str, Any]:
        """Sends the update first, then the answer, as S0 demands."""
        before, done = self.session.length(), self._try(act)
        restored, skipped = self._paths(done)
        point = checkpoint_of(self.session.archive.store, self.session.id, done)
        replaced = self._overwrote(done)
        about: dict[str, Any] = {"kind": kind, "checkpointId": point.id, "status": status, "restoredPaths": restored}
        about |= {**replaced, **({"skippedPathsWithReasons": skipped} if skipped else {})}
        if self.strict:
            self.tell({"sessionUpdate": "session_info_update", "_meta": {"mulligan": about}})
        else:
            self.tell({"sessionUpdate": kind, "checkpointId": point.id, "status": status, "_meta": {"harn": about}})
        return {
            "status": status,
            "checkpointId": point.id,
            "beforeMessageCount": before,
            "afterMessageCount": self.session.length(),
            "fsSnapshotIds": list(point.snapshots),
            "redoFsSnapshotIds": [f"{point.id}:redo:{snapshot}" for snapshot in point.snapshots],
            "fsRestores": [
                {
                    "snapshotId": snapshot,
                    "restoredPaths": [path for path in restored if point.holds(snapshot, path)],
                    "skippedPathsWithReasons": [one for one in skipped if point.holds(snapshot, one["path"])],
                }
                for snapshot in point.snapshots
            ],
            **replaced,
        }


METHODS: Mapping[str, Callable[[UndoMethods, Params], Any]] = {
    "session/restore_tool_call": UndoMethods.restore_tool_call,
    "session/rollback": UndoMethods.rollback,
    "session/redo": UndoMethods.redo,
}
STRICT_METHODS: Mapping[str, Callable[[UndoMethods, Params], Any]] = {
    **{PREFIX + name: method for name, method in METHODS.items()},
    f"{PREFIX}session/rewind": UndoMethods.rewind,
}
UNDO_METHODS = {**METHODS, **STRICT_METHODS}


def run_undo_method(method: str, session: DurableSession, params: Params, tell: Tell) -> Any:
    """Runs one of `UNDO_METHODS`. Returns its result, or a `Later`."""
    done = UNDO_METHODS[method](UndoMethods(session, tell, strict=method.startswith(PREFIX)), params)
    return done if isinstance(done, Later) else dict(done)
