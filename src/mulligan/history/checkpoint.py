"""The state of a run as one value, and checkpoints of it around each tool call.

`ExecutionState` captures slices, resources and randomness together, and restores all of them or none.
`CheckpointStore` holds the state just before and just after each tool call. `StoreArchive` keeps checkpoints in the
store; it does not copy the slices of a durable session, but the position in its journal, from which it folds them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime, timedelta
from random import Random
from types import MappingProxyType
from typing import Any, Protocol
from uuid import UUID

from mulligan.files.filesystems import Filesystem, FilesystemSnapshot, MemorySnapshot
from mulligan.history.ledger import Ledger
from mulligan.session.state.resources import RandomResource, ResourceRegistry, Snapshotable
from mulligan.session.state.session import (
    PHASES,
    Session,
    Slices,
    Snapshot,
    SnapshotMetadata,
    check_version,
    parsed,
    snapshot_json_errors,
)
from mulligan.session.state.slice_rows import CHANGED, CHECKPOINTS, RECORDED, CheckpointRow
from mulligan.session.state.slices import Items, SlicePolicy, ToolResult
from mulligan.session.state.types import TYPES
from mulligan.session.subscribers import CollectErrors
from mulligan.session.tables import session_journal
from mulligan.store.fork_locks import shared_lock
from mulligan.store.journal import records_of
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, SystemClock, parse_timestamp
from mulligan.values.digest import parse_digest
from mulligan.values.errors import RestoreFailedError, SnapshotMismatchError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId, SystemIds
from mulligan.values.limits import RECORD_INLINE_BYTES

VERSION = "1"
RING_CHECKPOINTS = 100
POSITION = "position"
"""The tag of a durable session's snapshot that says where its journal was."""

_SUMMARY_CHARACTERS = 200
_NOT_STATE = frozenset({"snapshot_id", "created_at", "tag", "manifest"})
_ids = SystemIds()

for _kind in (FilesystemSnapshot, MemorySnapshot):
    TYPES.register(_kind, f"mulligan:{_kind.__name__}")
TYPES.name(Filesystem, "mulligan:Filesystem")


@dataclass(slots=True, frozen=True)
class CompositeSnapshot:
    """The whole state of a run: its slices, and a snapshot of each resource by the resource's type."""

    snapshot_id: UUID
    created_at: datetime
    session: Snapshot
    resources: Mapping[type[Any], Any]
    metadata: SnapshotMetadata = field(default_factory=SnapshotMetadata)

    def __post_init__(self) -> None:
        # Frozen, so that a caller who changes its own mapping does not change the snapshot.
        object.__setattr__(self, "resources", MappingProxyType(dict(self.resources)))

    def to_json(self) -> str:
        """Raises SnapshotMismatchError if a resource's snapshot has no JSON form."""
        return encode(self.to_body()).decode("utf-8")

    def to_body(self) -> dict[str, Any]:
        """A value for JSON. Raises SnapshotMismatchError."""
        return {"session": self.session.to_body(), **self.to_body_without_session()}

    def to_body_without_session(self) -> dict[str, Any]:
        """The same for a session whose slices are in its journal."""
        named = {TYPES.name(kind): _as_json(kind, one) for kind, one in self.resources.items()}
        metadata = self.metadata
        return {
            "version": VERSION,
            "snapshot_id": str(self.snapshot_id),
            "created_at": self.created_at.isoformat(),
            "resources": [{"resource_type": name, "snapshot": named[name]} for name in sorted(named)],
            "metadata": {name: getattr(metadata, name) for name in SnapshotMetadata.__slots__},
        }

    @classmethod
    def from_json(cls, raw: str) -> CompositeSnapshot:
        """Raises SnapshotMismatchError for JSON that is no snapshot, or names a type this process does not know."""
        body = parsed(raw)
        with snapshot_json_errors("composite snapshot"):
            return cls.from_body(body, Snapshot.from_body(body["session"]))

    @classmethod
    def from_body(cls, body: Mapping[str, Any], session: Snapshot) -> CompositeSnapshot:
        """The inverse of `to_body_without_session`, with the slices given. Raises SnapshotMismatchError."""
        with snapshot_json_errors("composite snapshot"):
            check_version(body)
            return cls(
                snapshot_id=UUID(body["snapshot_id"]),
                created_at=parse_timestamp(body["created_at"]),
                session=session,
                resources={
                    TYPES.named(one["resource_type"]): TYPES.from_json(one["snapshot"])
                    for one in body.get("resources", ())
                },
                metadata=_metadata(body.get("metadata") or {}),
            )


def _as_json(kind: type[Any], snapshot: object) -> Any:
    try:
        return TYPES.to_json(snapshot)
    except TypeError as error:
        raise SnapshotMismatchError(f"The snapshot of {kind.__name__} has no JSON form: {error}") from None


def _metadata(body: Mapping[str, Any]) -> SnapshotMetadata:
    metadata = SnapshotMetadata(**body)
    texts = (metadata.tag, metadata.tool_call_id, metadata.tool_name)
    if metadata.phase not in PHASES or not all(one is None or isinstance(one, str) for one in texts):
        raise ValueError(f"{dict(body)!r} is no metadata")
    return metadata


@fast_dataclass(slots=True)
class ExecutionState:
    """Everything that can change during an evaluation."""

    session: Session
    resources: ResourceRegistry = field(default_factory=ResourceRegistry)
    clock: Clock = field(default_factory=SystemClock)
    rng: Random | None = None
    checkpoints: CheckpointStore | None = None
    gate: object = field(default=None, init=False, repr=False, compare=False)
    """The runner's lock, which makes tools wait for each other."""

    def __post_init__(self) -> None:
        # Callers without a type checker pass the name of a session here.
        given: object = self.session
        if not isinstance(given, Session):
            words = f"The session of a run is a Session object, such as Session(), not {given!r}."
            raise fault("invalid_params", words)

    def snapshot(self, *, tag: str | None = None, metadata: SnapshotMetadata | None = None) -> CompositeSnapshot:
        """All STATE slices, resources and the state of the randomness, as they are now."""
        metadata = metadata or SnapshotMetadata()
        if tag is not None:
            metadata = replace(metadata, tag=tag)
        return CompositeSnapshot(
            snapshot_id=UUID(_ids.new()),
            created_at=self.clock.now(),
            resources={kind: one.snapshot(tag=metadata.tag) for kind, one in self.participants().items()},
            session=self.session.snapshot(tag=metadata.tag),
            metadata=metadata,
        )

    def checkpoint(self, tag: str) -> CompositeSnapshot:
        """Take a snapshot under a name; with a store of checkpoints, `get_pre_snapshot(tag)` finds it again."""
        taken = self.snapshot(metadata=SnapshotMetadata(tag, phase="checkpoint"))
        if self.checkpoints is not None:
            self.checkpoints.record(tag, pre=taken)
        return taken

    def restore(self, snapshot: CompositeSnapshot) -> None:
        """Restore everything, or, if one participant cannot be restored, leave all of them as they are.

        A resource that this state does not have is skipped. Raises SnapshotMismatchError before anything changes,
        RestoreFailedError after everything is as it was again.
        """
        self.check_restore(snapshot)
        with restoring_together(self.participants(), snapshot.resources):
            Session.rollback(self.session, snapshot.session)

    def check_restore(self, snapshot: CompositeSnapshot) -> None:
        """The first phase of a restore: ask every participant. Changes nothing."""
        if not isinstance(snapshot, CompositeSnapshot):
            raise SnapshotMismatchError(f"A run is restored to a CompositeSnapshot, not a {type(snapshot).__name__}.")
        # Raises if a slice of the snapshot cannot be restored here.
        self.session.planned_rollback(snapshot.session)
        for kind, resource in self.participants().items():
            check = getattr(resource, "check_restore", None)
            if kind in snapshot.resources and check is not None:
                check(snapshot.resources[kind])

    def participants(self) -> dict[type[Any], Snapshotable[Any]]:
        """What a snapshot captures besides the session: snapshotable resources, and the randomness."""
        found = dict(self.resources.snapshotable_resources())
        if self.rng is not None:
            found[Random] = RandomResource(self.rng)
        return found

    def captured_whole(self) -> dict[type[Any], Snapshotable[Any]]:
        """Participants that a failed tool restores as a whole; an abort of the call restores the session's files."""
        return {kind: one for kind, one in self.participants().items() if not getattr(one, "goes_with_call", False)}


class restoring_together:
    """The second phase of a restore: restore resources, then run the block. If anything fails, revert all of them."""

    def __init__(self, resources: Mapping[type[Any], Snapshotable[Any]], snapshots: Mapping[type[Any], Any]) -> None:
        self._wanted = [(kind, resources[kind], one) for kind, one in snapshots.items() if kind in resources]
        self._before: list[tuple[type[Any], Snapshotable[Any], Any]] = []

    def __enter__(self) -> None:
        # All preimages first: a resource that cannot be captured must not leave others half restored.
        before = {kind: resource.snapshot(tag="before restore") for kind, resource, _ in self._wanted}
        finished = False
        try:
            for kind, resource, wanted in self._wanted:
                self._before.append((kind, resource, before[kind]))
                _restore(kind, resource, wanted)
            finished = True
        finally:
            # An interrupt between two resources must not leave half of them.
            if not finished:
                self._revert()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._revert()

    def _revert(self) -> None:
        stuck: list[str] = []
        # Backwards, because a resource may depend on one that was restored before it.
        for kind, resource, before in reversed(self._before):
            errors: list[Exception] = []
            with CollectErrors(errors):
                resource.restore(before)
            # A resource may raise although it has restored itself; only its state counts.
            if errors and not equivalent(resource.snapshot(), before):
                stuck.append(kind.__name__)
        if stuck:
            raise RestoreFailedError(
                f"Mulligan could neither restore these resources nor reset them: {', '.join(stuck)}.", stuck=stuck
            )


def _restore(kind: type[Any], resource: Snapshotable[Any], snapshot: Any) -> None:
    errors: list[Exception] = []
    with CollectErrors(errors):
        resource.restore(snapshot)
    for error in errors:
        if isinstance(error, RestoreFailedError | SnapshotMismatchError):
            raise error
        words = f"{kind.__name__} could not be restored: {error!r}"
        raise RestoreFailedError(words, resource=kind.__name__) from error


def equivalent(one: object, other: object) -> bool:
    """Whether two snapshots of a resource hold the same state; ids, times and tags may differ."""
    if type(one) is not type(other):
        return False
    if not is_dataclass(one) or isinstance(one, type):
        return one == other
    names = [one.name for one in fields(one) if one.name not in _NOT_STATE]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def snapshots_equivalent(one: CompositeSnapshot, other: CompositeSnapshot) -> bool:
    """Whether two runs are in the same state: slices, resources and randomness, not ids, times and tags."""
    same = one.session.slices == other.session.slices and one.resources.keys() == other.resources.keys()
    return same and all(equivalent(held, other.resources[kind]) for kind, held in one.resources.items())


# Checkpoints.


@dataclass(slots=True, frozen=True)
class ToolCheckpoint:
    """One tool call and the state around it. `post_snapshot` is None if the call failed."""

    tool_call_id: str
    tool_name: str
    pre_snapshot: CompositeSnapshot
    post_snapshot: CompositeSnapshot | None
    result_summary: str | None
    success: bool
    elapsed: timedelta | None
    recorded_at: datetime


class CheckpointArchive(Protocol):
    """Stores checkpoints durably. A repeated id means the newest."""

    def put(self, checkpoint: ToolCheckpoint) -> bool:
        """Store it. False if it can only be held in memory."""
        ...

    def get(self, tool_call_id: str) -> ToolCheckpoint | None: ...
    def newest(self, count: int) -> Sequence[ToolCheckpoint]:
        """Oldest first."""
        ...


@fast_dataclass(slots=True)
class CheckpointStore:
    """Lists the newest hundred checkpoints and holds them in memory; gets older ones from the archive, if it has one.

    Safe to use from many threads.
    """

    _checkpoints: dict[str, ToolCheckpoint] = field(default_factory=dict)
    _ring_buffer: deque[str] = field(default_factory=lambda: deque(maxlen=RING_CHECKPOINTS))
    archive: CheckpointArchive | None = None
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
        """Record the state before a call and, if it succeeded, after it. A repeated id replaces the older one."""
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
            self._add(checkpoint, archived=archived)

    def _add(self, checkpoint: ToolCheckpoint, *, archived: bool) -> None:
        ring = self._ring_buffer
        if checkpoint.tool_call_id in self._checkpoints and checkpoint.tool_call_id in ring:
            ring.remove(checkpoint.tool_call_id)
        # The deque would drop its oldest id by itself, but not the checkpoint in the dictionary.
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
        """The state before a call; None if there is no checkpoint of it."""
        found = self.get(tool_call_id)
        return None if found is None else found.pre_snapshot

    def get_post_snapshot(self, tool_call_id: str) -> CompositeSnapshot | None:
        """The state after a call; None if there is no checkpoint of it, or the call failed."""
        found = self.get(tool_call_id)
        return None if found is None else found.post_snapshot

    def list_checkpoints(self) -> Sequence[ToolCheckpoint]:
        """The newest hundred, in the order they were recorded."""
        with self._lock:
            self._fill()
            return tuple(self._checkpoints[call] for call in self._ring_buffer)

    def _fill(self) -> None:
        """Read the checkpoints of earlier processes from the archive, once."""
        if self.archive is None or self._is_filled:
            return
        self._is_filled = True
        own = [self._checkpoints[call] for call in self._ring_buffer]
        earlier = [one for one in self.archive.newest(RING_CHECKPOINTS) if one.tool_call_id not in self._checkpoints]
        self._ring_buffer.clear()
        for checkpoint in earlier:
            self._add(checkpoint, archived=True)
        for checkpoint in own:
            self._add(checkpoint, archived=checkpoint.tool_call_id in self._archived)


def rollback_to_tool(execution_state: ExecutionState, checkpoints: CheckpointStore, tool_call_id: str) -> None:
    """Restore everything to just before a tool call. Raises ValueError for a call without a checkpoint."""
    snapshot = checkpoints.get_pre_snapshot(tool_call_id)
    if snapshot is None:
        raise ValueError(f"No checkpoint for tool call: {tool_call_id}")
    execution_state.restore(snapshot)


# Checkpoints in the store.


class StoreArchive:
    """The checkpoints of one durable session. An `CheckpointArchive`."""

    def __init__(self, ledger: Ledger, session: SessionId) -> None:
        self._ledger = ledger
        self._session = session

    def put(self, checkpoint: ToolCheckpoint) -> bool:
        """False if the snapshot of a resource has no JSON form."""
        try:
            text = encode(_to_json(checkpoint)).decode("utf-8")
        except SnapshotMismatchError:
            return False
        ledger, refs = self._ledger, []
        # A long checkpoint is a blob, which the record names.
        if len(text) > RECORD_INLINE_BYTES:
            text = ledger.blobs.store(text.encode("utf-8"))
            refs = [parse_digest(text)]
        body = {"session": self._session, "name": checkpoint.tool_call_id, "body": text}
        journal = session_journal(self._session)
        with ledger.store.write(about=(journal,)) as tx:
            ledger.journal.append(tx, journal, RECORDED, body, at=ledger.now(), refs=refs)
        return True

    def get(self, tool_call_id: str) -> ToolCheckpoint | None:
        with self._ledger.store.read() as tx:
            row = tx.get(CHECKPOINTS, self._session, tool_call_id)
            return None if row is None else self._read(tx, [row])[0]

    def newest(self, count: int) -> Sequence[ToolCheckpoint]:
        with self._ledger.store.read() as tx:
            rows = tx.select(CHECKPOINTS, {"session": self._session}, order=("seq",), descending=True, limit=count)
            return self._read(tx, rows[::-1])

    def _read(self, tx: Tx, rows: Sequence[CheckpointRow]) -> list[ToolCheckpoint]:
        # A row has the JSON itself, or the digest of a blob.
        texts = [
            row.body if row.body.startswith("{") else self._ledger.blobs.read_in(tx, parse_digest(row.body))
            for row in rows
        ]
        bodies = [decode(text) for text in texts]
        snapshots = [one for body in bodies for one in (body["pre"], body["post"]) if one is not None]
        positions = {one[POSITION] for one in snapshots if POSITION in one}
        # One reading of the journal serves all checkpoints.
        slices = slices_at(tx, self._session, positions)
        return [_from_json(body, slices) for body in bodies]


def _to_json(checkpoint: ToolCheckpoint) -> dict[str, Any]:
    elapsed, post = checkpoint.elapsed, checkpoint.post_snapshot
    return {
        "tool_call_id": checkpoint.tool_call_id,
        "tool_name": checkpoint.tool_name,
        "pre": _snapshot_to_json(checkpoint.pre_snapshot),
        "post": None if post is None else _snapshot_to_json(post),
        "result_summary": checkpoint.result_summary,
        "success": checkpoint.success,
        "elapsed_us": None if elapsed is None else elapsed // timedelta(microseconds=1),
        "recorded_at": checkpoint.recorded_at.isoformat(),
    }


def _snapshot_to_json(snapshot: CompositeSnapshot) -> dict[str, Any]:
    position = snapshot.session.tags.get(POSITION)
    if position is None:
        return snapshot.to_body()
    session = {"created_at": snapshot.session.created_at.isoformat(), "tags": dict(snapshot.session.tags)}
    return {**snapshot.to_body_without_session(), POSITION: int(position), "session": session}


def _from_json(body: Mapping[str, Any], slices: Mapping[int, SlicesAt]) -> ToolCheckpoint:
    post, elapsed = body["post"], body["elapsed_us"]
    return ToolCheckpoint(
        tool_call_id=body["tool_call_id"],
        tool_name=body["tool_name"],
        pre_snapshot=_snapshot_from_json(body["pre"], slices),
        post_snapshot=None if post is None else _snapshot_from_json(post, slices),
        result_summary=body["result_summary"],
        success=body["success"],
        elapsed=None if elapsed is None else timedelta(microseconds=elapsed),
        recorded_at=parse_timestamp(body["recorded_at"]),
    )


def _snapshot_from_json(body: Mapping[str, Any], slices: Mapping[int, SlicesAt]) -> CompositeSnapshot:
    session = body["session"]
    if POSITION not in body:
        return CompositeSnapshot.from_body(body, Snapshot.from_body(session))
    at = slices[body[POSITION]]
    taken = Snapshot(parse_timestamp(session["created_at"]), Slices(at.items), at.policies, tags=session["tags"])
    return CompositeSnapshot.from_body(body, taken)


@fast_dataclass(slots=True, frozen=True)
class SlicesAt:
    """The STATE slices at one position of a journal, and the policies of all slices."""

    items: Mapping[type[Any], Items[Any]]
    policies: Mapping[type[Any], SlicePolicy]


def slices_at(tx: Tx, session: SessionId, positions: Iterable[int]) -> dict[int, SlicesAt]:
    """The STATE slices at each of these positions of the session's journal, in one reading of it."""
    found: dict[int, SlicesAt] = {}
    fold = _SliceFold({}, {})
    waiting = sorted(positions)
    for record in records_of(tx, session_journal(session)) if waiting else ():
        # A position is the number of the last record before the snapshot.
        while waiting and waiting[0] < record.seq:
            found[waiting.pop(0)] = fold.slices()
        if not waiting:
            break
        if record.kind == CHANGED:
            fold.add(record.payload)
    return found | {position: fold.slices() for position in waiting}


@fast_dataclass(slots=True)
class _SliceFold:
    """Items of each slice by place, and policies, both by the name of the slice's type."""

    bodies: dict[str, dict[int, Any]]
    policies: dict[str, str]

    def add(self, payload: Mapping[str, Any]) -> None:
        for change in payload["changes"]:
            items = self.bodies.setdefault(change["slice"], {})
            self.policies[change["slice"]] = change["policy"]
            for place in change["drop"]:
                items.pop(place, None)
            # Only STATE slices are restored, and only they need types that this process knows.
            if change["policy"] == SlicePolicy.STATE.value:
                items |= {place: TYPES.from_json(item) for place, item in change["add"]}

    def slices(self) -> SlicesAt:
        state = {name: one for name, one in self.bodies.items() if self.policies[name] == SlicePolicy.STATE.value}
        return SlicesAt(
            {TYPES.named(name): Items.of(items[place] for place in sorted(items)) for name, items in state.items()},
            {TYPES.named(name): SlicePolicy(policy) for name, policy in self.policies.items() if TYPES.knows(name)},
        )
