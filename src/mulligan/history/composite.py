"""The state of a run as one thing: captured together, put back together or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mulligan.session.bus import Isolated
from mulligan.session.resources import RandomResource, ResourceRegistry, Snapshotable
from mulligan.session.snapshot import PHASES, Snapshot, SnapshotMetadata, check_version, parsed, reading
from mulligan.session.state import Session
from mulligan.session.types import TYPES
from mulligan.values.canonical import encode
from mulligan.values.clock import Clock, SystemClock, parse_timestamp
from mulligan.values.faults import fault
from mulligan.values.ids import SystemIds
from mulligan.values.state_faults import RestoreFailedError, SnapshotMismatchError
from mulligan.workspace.filesystem import Filesystem, FilesystemSnapshot
from mulligan.workspace.memory_filesystem import MemorySnapshot

if TYPE_CHECKING:
    from mulligan.history.checkpoint import CheckpointStore

VERSION = "1"
_ids = SystemIds()

for _kind in (FilesystemSnapshot, MemorySnapshot):
    TYPES.register(_kind, f"mulligan:{_kind.__name__}")
TYPES.name(Filesystem, "mulligan:Filesystem")


@dataclass(slots=True, frozen=True)
class CompositeSnapshot:
    """Everything a run can be put back to: its slices, and a snapshot of each resource by the resource's type."""

    snapshot_id: UUID
    created_at: datetime
    session: Snapshot
    resources: Mapping[type[Any], Any]
    metadata: SnapshotMetadata = field(default_factory=SnapshotMetadata)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resources", MappingProxyType(dict(self.resources)))

    def to_json(self) -> str:
        """Raises SnapshotMismatchError if a resource's snapshot has no JSON form."""
        return encode(self.to_body()).decode("utf-8")

    def to_body(self) -> dict[str, Any]:
        """As what JSON can hold. Raises SnapshotMismatchError."""
        return {"session": self.session.to_body(), **self.to_body_without_session()}

    def to_body_without_session(self) -> dict[str, Any]:
        """The same for a session whose slices are kept elsewhere."""
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
        with reading("composite snapshot"):
            return cls.from_body(body, Snapshot.from_body(body["session"]))

    @classmethod
    def from_body(cls, body: Mapping[str, Any], session: Snapshot) -> CompositeSnapshot:
        """The inverse of `to_body_without_session`, with the slices given. Raises SnapshotMismatchError."""
        with reading("composite snapshot"):
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
    told = (metadata.tag, metadata.tool_call_id, metadata.tool_name)
    if metadata.phase not in PHASES or not all(one is None or isinstance(one, str) for one in told):
        raise ValueError(f"{dict(body)!r} is no metadata")
    return metadata


@dataclass(slots=True)
class ExecutionState:
    """The one root of everything that can change during an evaluation."""

    session: Session
    resources: ResourceRegistry = field(default_factory=ResourceRegistry)
    clock: Clock = field(default_factory=SystemClock)
    rng: Random | None = None
    checkpoints: CheckpointStore | None = None
    gate: object = field(default=None, init=False, repr=False, compare=False)
    """Whoever runs tools keeps here what makes them wait for each other."""

    def __post_init__(self) -> None:
        given: object = self.session
        if not isinstance(given, Session):
            words = f"The session of a run is a Session object, such as Session(), not {given!r}."
            raise fault("invalid_params", words)

    def snapshot(self, *, tag: str | None = None, metadata: SnapshotMetadata | None = None) -> CompositeSnapshot:
        """All STATE slices, resources and the state of the randomness, as they are now."""
        told = metadata or SnapshotMetadata()
        if tag is not None:
            told = replace(told, tag=tag)
        return CompositeSnapshot(
            snapshot_id=UUID(_ids.new()),
            created_at=self.clock.now(),
            resources={kind: one.snapshot(tag=told.tag) for kind, one in self.participants().items()},
            session=self.session.snapshot(tag=told.tag),
            metadata=told,
        )

    def checkpoint(self, tag: str) -> CompositeSnapshot:
        """A snapshot under a name; with a store of checkpoints, `get_pre_snapshot(tag)` finds it again."""
        taken = self.snapshot(metadata=SnapshotMetadata(tag, phase="checkpoint"))
        if self.checkpoints is not None:
            self.checkpoints.record(tag, pre=taken)
        return taken

    def restore(self, snapshot: CompositeSnapshot) -> None:
        """Put everything back, or, if one participant cannot be, leave all of them as they are.

        A resource the snapshot knows and this state does not have is passed over. Raises SnapshotMismatchError before
        anything is touched, RestoreFailedError after everything is as it was again.
        """
        self.check_restore(snapshot)
        with restoring_together(self.participants(), snapshot.resources):
            Session.rollback(self.session, snapshot.session)

    def check_restore(self, snapshot: CompositeSnapshot) -> None:
        """The first phase: ask everybody. Changes nothing."""
        if not isinstance(snapshot, CompositeSnapshot):
            raise SnapshotMismatchError(f"A run is put back to a CompositeSnapshot, not a {type(snapshot).__name__}.")
        self.session.planned_rollback(snapshot.session)
        for kind, resource in self.participants().items():
            check = getattr(resource, "check_restore", None)
            if kind in snapshot.resources and check is not None:
                check(snapshot.resources[kind])

    def participants(self) -> dict[type[Any], Snapshotable[Any]]:
        """What is captured besides the session: resources that can be, and the randomness."""
        found = dict(self.resources.snapshotable_resources())
        if self.rng is not None:
            found[Random] = RandomResource(self.rng)
        return found

    def captured_whole(self) -> dict[type[Any], Snapshotable[Any]]:
        """Participants that a failed call puts back as a whole; the session's own files go back with its call."""
        return {kind: one for kind, one in self.participants().items() if not getattr(one, "goes_with_call", False)}


class restoring_together:
    """The second phase: restore resources, then let the block do its part. If anything fails, all of them return."""

    def __init__(self, resources: Mapping[type[Any], Snapshotable[Any]], snapshots: Mapping[type[Any], Any]) -> None:
        self._wanted = [(kind, resources[kind], one) for kind, one in snapshots.items() if kind in resources]
        self._before: list[tuple[type[Any], Snapshotable[Any], Any]] = []

    def __enter__(self) -> None:
        # All preimages first: what cannot even be captured must not be half-restored.
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
                self._go_back()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._go_back()

    def _go_back(self) -> None:
        stuck: list[str] = []
        for kind, resource, before in reversed(self._before):
            errors: list[Exception] = []
            with Isolated(errors):
                resource.restore(before)
            if errors and not equivalent(resource.snapshot(), before):
                stuck.append(kind.__name__)
        if stuck:
            raise RestoreFailedError(f"Neither restored nor as they were: {', '.join(stuck)}.", stuck=stuck)


def _restore(kind: type[Any], resource: Snapshotable[Any], snapshot: Any) -> None:
    errors: list[Exception] = []
    with Isolated(errors):
        resource.restore(snapshot)
    for error in errors:
        if isinstance(error, RestoreFailedError | SnapshotMismatchError):
            raise error
        words = f"{kind.__name__} could not be restored: {error!r}"
        raise RestoreFailedError(words, resource=kind.__name__) from error


_BESIDE_THE_POINT = frozenset({"snapshot_id", "created_at", "tag", "manifest"})


def equivalent(one: object, other: object) -> bool:
    """Whether two snapshots of a resource hold the same, whenever and under whatever name they were taken."""
    if type(one) is not type(other):
        return False
    if not is_dataclass(one) or isinstance(one, type):
        return one == other
    names = [one.name for one in fields(one) if one.name not in _BESIDE_THE_POINT]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def snapshots_equivalent(one: CompositeSnapshot, other: CompositeSnapshot) -> bool:
    """Whether two runs are in the same state: slices, resources and randomness, not ids, times and tags."""
    same = one.session.slices == other.session.slices and one.resources.keys() == other.resources.keys()
    return same and all(equivalent(held, other.resources[kind]) for kind, held in one.resources.items())
