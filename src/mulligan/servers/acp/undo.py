"""The ways back over the protocol: S0's three methods with S0's frames, and the same for clients that are strict.

`session/…` are S0's own names: the update says `restored` and `_meta.harn`. The `_mulligan/session/…` forms keep to
the protocol's own words, and have `rewind` besides. What somebody changed meanwhile is merged, unless the client says
otherwise; only S0's own restore overwrites, as S0 has it, and says whose work it replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from mulligan.effects.session import Session
from mulligan.history.going_back import WayBack
from mulligan.history.plans import OnConflict
from mulligan.servers.acp.checkpoints import checkpoint_of
from mulligan.servers.acp.wire import BACKEND, INVALID_PARAMS, AcpError, Later, Params
from mulligan.values.faults import MulliganError
from mulligan.values.plain import plain

S0_CAPABILITIES = ("close", "list", "resume", "rollback", "redo", "restoreToolCall")
STRICT_CAPABILITIES = ("rollback", "redo", "restoreToolCall", "rewind")
PREFIX = "_mulligan/"

Tell = Callable[[Mapping[str, Any]], None]
"""Sends one `session/update` of the session."""

_NONE_LEFT = {"nothing_to_undo": "no_checkpoint", "nothing_to_redo": "no_redo", "turn_open": "prompt_active"}
_SKIPPED = ("conflicted", "skipped", "failed")


def param(params: Mapping[str, Any], name: str, *, required: bool = True) -> Any:
    """A parameter by its name, in camel or in snake case."""
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    found = params.get(name, params.get(snake))
    if required and (not isinstance(found, str) or not found):
        raise AcpError(INVALID_PARAMS, f"{name} is missing.", {"status": "invalid_params"})
    return found


@plain(slots=True, frozen=True)
class WaysBack:
    """The ways back of one session. `strict`: for the `_mulligan` forms."""

    session: Session
    tell: Tell
    strict: bool

    def restore_tool_call(self, params: Params) -> Later:
        """The answer first, then the update, as S0 has it."""
        call = param(params, "toolCallId")
        how = self._on_conflict(params, default="merge" if self.strict else "overwrite")
        paths, elsewhere = self._asked_for(params.get("paths"))
        done = self._went(lambda: self.session.restore(call, paths, on_conflict=how))
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
        before = self.session.length()
        how = self._on_conflict(params)
        done = self._went(lambda: self.session.rollback(on_conflict=how))
        return self._moved("rolled_back", "session_rollback", done, before)

    def redo(self, params: Params) -> Mapping[str, Any]:
        before = self.session.length()
        how = self._on_conflict(params)
        done = self._went(lambda: self.session.redo(on_conflict=how))
        return self._moved("redone", "session_redo", done, before)

    def rewind(self, params: Params) -> Mapping[str, Any]:
        before = self.session.length()
        to, side = param(params, "to"), params.get("side", "before")
        wanted = {name: params.get(name, True) for name in ("files", "talk")}
        how = self._on_conflict(params)
        done = self._went(lambda: self.session.rewind(to, side, on_conflict=how, **wanted))
        return self._moved("rewound", "session_rewind", done, before)

    def _asked_for(self, paths: object) -> tuple[list[str] | None, list[str]]:
        """Those below the root, as `restoredPaths` has them or relative to it, and the others. None means all."""
        if paths is None or paths == []:
            return None, []
        if not isinstance(paths, list) or not all(isinstance(path, str) and "\0" not in path for path in paths):
            raise AcpError(INVALID_PARAMS, "paths is a list of paths.", {"status": "invalid_params"})
        below = {path: self._below(path) for path in paths}
        return [one for one in below.values() if one is not None], [path for path in below if below[path] is None]

    def _below(self, path: str) -> str | None:
        """Links on the way to it are followed only if it is not below the root as it is written."""
        if not os.path.isabs(path):
            return path
        folder, name = os.path.split(os.path.normpath(path))
        start = self.session.root.rstrip("/") + "/"
        ways = (os.path.join(folder, name), os.path.join(os.path.realpath(folder), name))
        return next((way[len(start) :] for way in ways if way.startswith(start)), None)

    def _on_conflict(self, params: Params, *, default: OnConflict = "merge") -> OnConflict:
        given = param(params, "onConflict", required=False) or default
        known: dict[str, OnConflict] = {"merge": "merge", "overwrite": "overwrite", "refuse": "refuse"}
        if given not in known:
            raise AcpError(INVALID_PARAMS, "onConflict is merge, overwrite or refuse.", {"status": "invalid_params"})
        return known[given]

    def _went(self, act: Callable[[], WayBack]) -> WayBack:
        try:
            return act()
        except MulliganError as error:
            if error.code == "invalid_params":
                raise AcpError(INVALID_PARAMS, error.message, {"status": error.code}) from error
            if self.strict and error.code not in _NONE_LEFT:
                # S0 gives its own methods no other code. A strict client takes it for a request to authenticate.
                raise
            status = _NONE_LEFT.get(error.code, "fs_restore_error")
            words = status if error.code in _NONE_LEFT else error.message
            raise AcpError(BACKEND, words, {"status": status, "code": error.code}) from error

    def _paths(self, done: WayBack) -> tuple[list[str], list[dict[str, str]]]:
        """Absolute, as S0 has them: what went back, and what did not with the reason."""
        root = self.session.root
        restored, skipped = [], []
        for outcome in done.to_json()["outcomes"]:
            path = os.path.join(root, outcome["path"])
            if outcome["outcome"] in _SKIPPED:
                skipped.append({"path": path, "reason": outcome.get("reason") or outcome["outcome"]})
            else:
                restored.append(path)
        return restored, skipped

    def _overwrote(self, done: WayBack) -> dict[str, list[str]]:
        """Where somebody else's work was replaced, if anywhere. It is kept, as all that a way back replaces."""
        paths = [os.path.join(self.session.root, path) for path in done.to_json()["overwrote_external"]]
        return {"overwrote_external": paths} if paths else {}

    def _moved(self, status: str, kind: str, done: WayBack, before: int) -> Mapping[str, Any]:
        """The update first, then the answer, as S0 has it."""
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


METHODS: Mapping[str, Callable[[WaysBack, Params], Any]] = {
    "session/restore_tool_call": WaysBack.restore_tool_call,
    "session/rollback": WaysBack.rollback,
    "session/redo": WaysBack.redo,
}
STRICT_METHODS: Mapping[str, Callable[[WaysBack, Params], Any]] = {
    **{PREFIX + name: method for name, method in METHODS.items()},
    f"{PREFIX}session/rewind": WaysBack.rewind,
}
