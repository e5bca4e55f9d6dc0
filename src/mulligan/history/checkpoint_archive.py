"""Checkpoints in the store. A durable session's slices are not copied: where its journal stood says what they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mulligan.history.checkpoint import ToolCheckpoint
from mulligan.history.composite import CompositeSnapshot
from mulligan.history.ledger import Ledger
from mulligan.session.kept import CHANGED, CHECKPOINTS, RECORDED, CheckpointRow
from mulligan.session.slices import Items, SlicePolicy
from mulligan.session.snapshot import Slices, Snapshot
from mulligan.session.tables import session_journal
from mulligan.session.types import TYPES
from mulligan.store.journal import records_of
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import parse_digest
from mulligan.values.ids import SessionId
from mulligan.values.limits import RECORD_INLINE_BYTES
from mulligan.values.plain import plain
from mulligan.values.state_faults import SnapshotMismatchError

POSITION = "position"


class StoreArchive:
    """The checkpoints of one durable session."""

    def __init__(self, ledger: Ledger, session: SessionId) -> None:
        self._ledger = ledger
        self._session = session

    def put(self, checkpoint: ToolCheckpoint) -> bool:
        """False if a resource's snapshot has no JSON form: then it can only be kept in memory."""
        try:
            text = encode(_to_json(checkpoint)).decode("utf-8")
        except SnapshotMismatchError:
            return False
        ledger, refs = self._ledger, []
        if len(text) > RECORD_INLINE_BYTES:
            text = ledger.blobs.store(text.encode("utf-8"))
            refs = [parse_digest(text)]
        body = {"session": self._session, "name": checkpoint.tool_call_id, "body": text}
        with ledger.store.write() as tx:
            ledger.journal.append(tx, session_journal(self._session), RECORDED, body, at=ledger.now(), refs=refs)
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
        bodies = [decode(self._text(tx, row.body)) for row in rows]
        moments = [moment for body in bodies for moment in (body["pre"], body["post"]) if moment is not None]
        positions = {moment[POSITION] for moment in moments if POSITION in moment}
        slices = slices_at(tx, self._session, positions)
        return [_from_json(body, slices) for body in bodies]

    def _text(self, tx: Tx, body: str) -> bytes:
        return body.encode("utf-8") if body.startswith("{") else self._ledger.blobs.read_in(tx, parse_digest(body))


def _to_json(checkpoint: ToolCheckpoint) -> dict[str, Any]:
    elapsed, post = checkpoint.elapsed, checkpoint.post_snapshot
    return {
        "tool_call_id": checkpoint.tool_call_id,
        "tool_name": checkpoint.tool_name,
        "pre": _moment(checkpoint.pre_snapshot),
        "post": None if post is None else _moment(post),
        "result_summary": checkpoint.result_summary,
        "success": checkpoint.success,
        "elapsed_us": None if elapsed is None else elapsed // timedelta(microseconds=1),
        "recorded_at": checkpoint.recorded_at.isoformat(),
    }


def _moment(snapshot: CompositeSnapshot) -> dict[str, Any]:
    position = snapshot.session.tags.get(POSITION)
    if position is None:
        return snapshot.to_body()
    session = {"created_at": snapshot.session.created_at.isoformat(), "tags": dict(snapshot.session.tags)}
    return {**snapshot.to_body_without_session(), POSITION: int(position), "session": session}


def _from_json(body: Mapping[str, Any], slices: Mapping[int, SlicesThen]) -> ToolCheckpoint:
    post, elapsed = body["post"], body["elapsed_us"]
    return ToolCheckpoint(
        tool_call_id=body["tool_call_id"],
        tool_name=body["tool_name"],
        pre_snapshot=_composite(body["pre"], slices),
        post_snapshot=None if post is None else _composite(post, slices),
        result_summary=body["result_summary"],
        success=body["success"],
        elapsed=None if elapsed is None else timedelta(microseconds=elapsed),
        recorded_at=parse_timestamp(body["recorded_at"]),
    )


def _composite(moment: Mapping[str, Any], slices: Mapping[int, SlicesThen]) -> CompositeSnapshot:
    session = moment["session"]
    if POSITION not in moment:
        return CompositeSnapshot.from_body(moment, Snapshot.from_body(session))
    then = slices[moment[POSITION]]
    taken = Snapshot(parse_timestamp(session["created_at"]), Slices(then.items), then.policies, tags=session["tags"])
    return CompositeSnapshot.from_body(moment, taken)


@plain(slots=True, frozen=True)
class SlicesThen:
    items: Mapping[type[Any], Items[Any]]
    policies: Mapping[type[Any], SlicePolicy]


def slices_at(tx: Tx, session: SessionId, positions: Iterable[int]) -> dict[int, SlicesThen]:
    """The STATE slices as they were at places of the session's journal, in one reading of it."""
    found: dict[int, SlicesThen] = {}
    fold = _Fold({}, {})
    waiting = sorted(positions)
    for record in records_of(tx, session_journal(session)) if waiting else ():
        while waiting and waiting[0] < record.seq:
            found[waiting.pop(0)] = fold.seen()
        if not waiting:
            break
        if record.kind == CHANGED:
            fold.take(record.payload)
    return found | {position: fold.seen() for position in waiting}


@dataclass(slots=True)
class _Fold:
    bodies: dict[str, dict[int, Any]]
    policies: dict[str, str]

    def take(self, payload: Mapping[str, Any]) -> None:
        for change in payload["changes"]:
            items = self.bodies.setdefault(change["slice"], {})
            self.policies[change["slice"]] = change["policy"]
            for place in change["drop"]:
                items.pop(place, None)
            items |= {place: TYPES.from_json(item) for place, item in change["add"] if _is_state(change)}

    def seen(self) -> SlicesThen:
        state = {name: items for name, items in self.bodies.items() if _is_state({"policy": self.policies[name]})}
        return SlicesThen(
            {TYPES.named(name): Items.of(items[place] for place in sorted(items)) for name, items in state.items()},
            {TYPES.named(name): SlicePolicy(policy) for name, policy in self.policies.items() if TYPES.knows(name)},
        )


def _is_state(change: Mapping[str, Any]) -> bool:
    return bool(change["policy"] == SlicePolicy.STATE.value)
