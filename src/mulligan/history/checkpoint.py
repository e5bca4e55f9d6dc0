"""Checkpoints: the state of a run just before and just after each tool call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from mulligan.history.composite import CompositeSnapshot, ExecutionState
from mulligan.session.known import ToolResult
from mulligan.store.fork_locks import shared_lock

RING_CHECKPOINTS = 100
_SUMMARY_CHARACTERS = 200


@dataclass(slots=True, frozen=True)
class ToolCheckpoint:
    """One tool call and the state around it. `post_snapshot` is None if nothing came of it."""

    tool_call_id: str
    tool_name: str
    pre_snapshot: CompositeSnapshot
    post_snapshot: CompositeSnapshot | None
    result_summary: str | None
    success: bool
    elapsed: timedelta | None
    recorded_at: datetime


class Archive(Protocol):
    """Where checkpoints are kept for good. A repeated id means the newest."""

    def put(self, checkpoint: ToolCheckpoint) -> bool:
        """Keep it; False if that cannot be, and only memory can."""
        ...

    def get(self, tool_call_id: str) -> ToolCheckpoint | None: ...
    def newest(self, count: int) -> Sequence[ToolCheckpoint]:
        """Oldest first."""
        ...


@dataclass(slots=True)
class CheckpointStore:
    """The newest hundred are listed and held in memory. Older ones can be got from the archive, if there is one. Safe
    to use from many threads."""

    _checkpoints: dict[str, ToolCheckpoint] = field(default_factory=dict)
    _ring_buffer: deque[str] = field(default_factory=lambda: deque(maxlen=RING_CHECKPOINTS))
    archive: Archive | None = None
    _archived: set[str] = field(default_factory=set, repr=False, compare=False)
    _is_filled: bool = field(default=False, repr=False, compare=False)
    _lock: threading.RLock = field(default_factory=shared_lock, repr=False, compare=False)

    def record(
        self,
        tool_call_id: str,
        *,
        pre: CompositeSnapshot,
        post: CompositeSnapshot | None = None,
        result: ToolResult[Any] | None = None,
        elapsed: timedelta | None = None,
    ) -> None:
        """Keep what a call began from and, if it succeeded, what it led to. A repeated id means the newest."""
        checkpoint = ToolCheckpoint(
            tool_call_id=tool_call_id,
            tool_name=pre.metadata.tool_name or "",
            pre_snapshot=pre,
            post_snapshot=post,
            result_summary=None if result is None else result.message[:_SUMMARY_CHARACTERS],
            success=post is not None if result is None else result.success,
            elapsed=elapsed,
            recorded_at=(post or pre).created_at,
        )
        archived = self.archive is not None and self.archive.put(checkpoint)
        with self._lock:
            self._keep(checkpoint, archived=archived)

    def _keep(self, checkpoint: ToolCheckpoint, *, archived: bool) -> None:
        ring = self._ring_buffer
        if checkpoint.tool_call_id in self._checkpoints and checkpoint.tool_call_id in ring:
            ring.remove(checkpoint.tool_call_id)
        if len(ring) == ring.maxlen:
            self._archived.discard(ring[0])
            self._checkpoints.pop(ring[0], None)
        ring.append(checkpoint.tool_call_id)
        if archived:
            self._archived.add(checkpoint.tool_call_id)
        self._checkpoints[checkpoint.tool_call_id] = checkpoint

    def get(self, tool_call_id: str) -> ToolCheckpoint | None:
        """The newest checkpoint with that id: of the newest hundred, or, with an archive, however old."""
        found = self._checkpoints.get(tool_call_id)
        return found if found is not None or self.archive is None else self.archive.get(tool_call_id)

    def get_pre_snapshot(self, tool_call_id: str) -> CompositeSnapshot | None:
        """The state before a call; None if nobody recorded it."""
        found = self.get(tool_call_id)
        return None if found is None else found.pre_snapshot

    def get_post_snapshot(self, tool_call_id: str) -> CompositeSnapshot | None:
        """The state after a call; None if nobody recorded it, or the call came to nothing."""
        found = self.get(tool_call_id)
        return None if found is None else found.post_snapshot

    def list_checkpoints(self) -> Sequence[ToolCheckpoint]:
        """The newest hundred, in the order they were recorded."""
        with self._lock:
            self._fill()
            return tuple(self._checkpoints[call] for call in self._ring_buffer)

    def _fill(self) -> None:
        """What earlier processes recorded, read when it is first asked for."""
        if self.archive is None or self._is_filled:
            return
        self._is_filled = True
        own = [self._checkpoints[call] for call in self._ring_buffer]
        earlier = [one for one in self.archive.newest(RING_CHECKPOINTS) if one.tool_call_id not in self._checkpoints]
        self._ring_buffer.clear()
        for checkpoint in earlier:
            self._keep(checkpoint, archived=True)
        for checkpoint in own:
            self._keep(checkpoint, archived=checkpoint.tool_call_id in self._archived)


def rollback_to_tool(execution_state: ExecutionState, checkpoints: CheckpointStore, tool_call_id: str) -> None:
    """Put everything back to just before a tool call. Raises ValueError for a call that nobody recorded."""
    snapshot = checkpoints.get_pre_snapshot(tool_call_id)
    if snapshot is None:
        raise ValueError(f"No checkpoint for tool call: {tool_call_id}")
    execution_state.restore(snapshot)
