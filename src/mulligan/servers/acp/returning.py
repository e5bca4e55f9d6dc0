"""The ways back over the protocol: S0's three methods with S0's frames, and the same for clients that are strict.

`session/…` are S0's own names: files are overwritten as S0 says, the update says `restored` and `_meta.harn`. The
`_mulligan/session/…` forms keep to the protocol's own words, merge by default, and have `rewind` besides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mulligan.effects.session import Session
from mulligan.history.going_back import WayBack
from mulligan.history.plans import OnConflict
from mulligan.servers.acp.wire import BACKEND, INVALID_PARAMS, AcpError, Later, Params
from mulligan.values.faults import MulliganError

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


@dataclass(slots=True, frozen=True)
class WaysBack:
    """The ways back of one session. `strict`: for the `_mulligan` forms."""

    session: Session
    tell: Tell
    strict: bool

    def restore_tool_call(self, params: Params) -> Later:
        """The answer first, then the update, as S0 has it."""
        call = param(params, "toolCallId")
        paths = params.get("paths")
        done = self._went(lambda: self.session.restore(call, paths, on_conflict=self._on_conflict(params)))
        restored, skipped = self._paths(done)
        kind: dict[str, Any] = {"kind": "tool_call_restored", "restoredPaths": restored}
        kind |= {"skippedPathsWithReasons": skipped} if skipped else {}
        update = {
            "sessionUpdate": "tool_call_update",
            "toolCallId": call,
            "status": "completed" if self.strict else "restored",
            "_meta": {"mulligan" if self.strict else "harn": kind},
        }
        body = {"toolCallId": call, "restoredPaths": restored, "skippedPathsWithReasons": skipped}
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

    def _on_conflict(self, params: Params) -> OnConflict:
        given = param(params, "onConflict", required=False) or ("merge" if self.strict else "overwrite")
        known: dict[str, OnConflict] = {"merge": "merge", "overwrite": "overwrite", "refuse": "refuse"}
        if given not in known:
            raise AcpError(INVALID_PARAMS, "onConflict is merge, overwrite or refuse.", {"status": "invalid_params"})
        return known[given]

    def _went(self, act: Callable[[], WayBack]) -> WayBack:
        try:
            return act()
        except MulliganError as error:
            status = _NONE_LEFT.get(error.code, error.code if self.strict else "fs_restore_error")
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

    def _moved(self, status: str, kind: str, done: WayBack, before: int) -> Mapping[str, Any]:
        """The update first, then the answer, as S0 has it."""
        restored, skipped = self._paths(done)
        point = f"turn_{(done.call_id or '').replace('-', '')}"
        about = {"kind": kind, "checkpointId": point, "status": status, "restoredPaths": restored}
        if self.strict:
            self.tell({"sessionUpdate": "session_info_update", "_meta": {"mulligan": about}})
        else:
            self.tell({"sessionUpdate": kind, "checkpointId": point, "status": status, "_meta": {"harn": about}})
        snapshot = done.call_id or ""
        restore = {"snapshotId": snapshot, "restoredPaths": restored, "skippedPathsWithReasons": skipped}
        return {
            "status": status,
            "checkpointId": point,
            "beforeMessageCount": before,
            "afterMessageCount": self.session.length(),
            "fsSnapshotIds": [snapshot] if snapshot else [],
            "redoFsSnapshotIds": [f"{point}:redo:{snapshot}"] if snapshot else [],
            "fsRestores": [restore] if snapshot else [],
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
