"""The Python face of a session: calls, turns, and every way back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from mulligan.boundary.verdict import Boundary
from mulligan.effects.handle import CallHandle
from mulligan.effects.hosting import is_known, once_hosted
from mulligan.effects.judging import Judge
from mulligan.effects.perform import SESSION_EFFECTS, effect_named, perform, perform_session_effect, unknown_effect
from mulligan.effects.portable import Portable
from mulligan.effects.receipt import Receipt, snapshot_tool_receipt
from mulligan.effects.slices import CallSlices
from mulligan.effects.turn import TurnBlock
from mulligan.effects.verbs import CallWithId, StrPath
from mulligan.history import asides, branches, going_back
from mulligan.history.call import Call
from mulligan.history.current import current_turn
from mulligan.history.desk import Desk
from mulligan.history.going_back import Git, How, MayWrite, WayBack
from mulligan.history.plans import OnConflict
from mulligan.history.points import archive_of
from mulligan.history.tables import REDO, TURNS
from mulligan.session.clients import Clients, clients_in, controller_in, release_all_in
from mulligan.session.kept import home_of
from mulligan.session.pending import pending_here
from mulligan.session.roots import Roots
from mulligan.session.slices_back import copy_slices_in
from mulligan.session.snapshot import Snapshot, SnapshotMetadata
from mulligan.session.state import Session as State
from mulligan.session.tables import SESSIONS, SessionRow
from mulligan.session.talk import Talk
from mulligan.session.transcript import Archive
from mulligan.store.protocol import Tx
from mulligan.values.call_scope import check_call_open
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId, TurnId, parse_user_id, uuid_of
from mulligan.values.paths import RepoPath, paths_from_wire
from mulligan.workspace.exec.output import Sink

if TYPE_CHECKING:
    from mulligan.effects.filesystem import SessionFilesystem
    from mulligan.history.composite import ExecutionState

T = TypeVar("T")
_SNAPSHOT_FAMILIES = ("snapshot", "workspace")


class Session(Talk, Clients, Roots, Portable, State):
    """One agent run on one root. Safe to use from many threads; calls made in parallel do not disturb each other."""

    def __init__(self, desk: Desk, session: SessionId, boundary: Boundary) -> None:
        Talk.__init__(self, archive_of(desk.ledger), session, desk.root.id)
        ledger = desk.ledger
        self._slices = home_of(ledger.store, ledger.journal, session, ledger.now)
        State.__init__(self, session_id=uuid_of(session), clock=ledger.clock, home=self._slices)
        self._desk = desk
        self._boundary = boundary

    @property
    def archive(self) -> Archive:
        """The store, as sessions see it."""
        return self._archive

    @property
    def root(self) -> str:
        """The folder this session works in."""
        return os.fsdecode(self._desk.disk.root.path)

    def call(
        self,
        label: str | None = None,
        *,
        tool_call_id: str | None = None,
        turn: str | None = None,
        deadline: datetime | None = None,
        tool: str | None = None,
        strict: bool = False,
    ) -> CallHandle:
        """A transaction. `tool_call_id` is the provider's id: a label, and the newest call with it is meant by it.

        A `strict` one that changes more bytes than the session may keep is refused with `not_undoable` at its end.
        """
        check_call_open(self._slices)
        found = TurnId(parse_user_id(turn, "turn")) if turn is not None else current_turn()
        call = self._desk.call(self.id, turn=found, label=tool_call_id or label, tool=tool or label, strict=strict)
        with self._archive.store.read() as tx:
            self._check_open(tx, "call")
        return CallHandle(self._desk, call, self._boundary, deadline=deadline, beside=self._beside)

    def _check_open(self, tx: Tx, verb: str) -> SessionRow:
        self._desk.check_open()
        return super()._check_open(tx, verb)

    def _beside(self, call: Call, joins: bool) -> CallSlices:
        return CallSlices(self, self._slices, call, joins=joins)

    def attempt(self, tool: str, call_id: str) -> CallHandle:
        """A tool's transaction is a call: its files and its slices are published, or put back, together."""
        return self.call(tool, tool_call_id=call_id or None)

    @property
    def files(self) -> SessionFilesystem:
        """The workspace as a `Filesystem`: what is written through it belongs to the call it is written in."""
        from mulligan.effects.filesystem import SessionFilesystem

        return SessionFilesystem(self, self._desk, self._boundary)

    def execution_state(
        self, resources: Mapping[type[Any], object] | None = None, *, rng: Random | None = None
    ) -> ExecutionState:
        """This session as the root of an agent's state, with its files, and checkpoints that outlive the process."""
        # Loaded here, so that whoever only undoes something need not wait for it.
        from mulligan.history.checkpoint import CheckpointStore
        from mulligan.history.checkpoint_archive import StoreArchive
        from mulligan.history.composite import ExecutionState
        from mulligan.session.resources import ResourceRegistry
        from mulligan.workspace.filesystem import Filesystem

        ledger = self._desk.ledger
        registry = ResourceRegistry.build({Filesystem: self.files, **(resources or {})})
        checkpoints = CheckpointStore(archive=StoreArchive(ledger, self.id))
        return ExecutionState(self, registry, ledger.clock, rng, checkpoints)

    def _snapshot_tags(self, tag: str | None, metadata: SnapshotMetadata | None) -> dict[str, str]:
        """Where the journal stands, unless a call has changed slices that it does not know of yet."""
        here = pending_here(self._slices)
        at = {} if here is not None and here.has_changes else {"position": str(self._slices.position())}
        return {**super()._snapshot_tags(tag, metadata), **at}

    def perform(
        self,
        effect: str,
        params: Mapping[str, Any],
        *,
        label: str | None = None,
        turn: str | None = None,
        sink: Sink | None = None,
        stdin_fd: int | None = None,
    ) -> tuple[Receipt, str]:
        """One effect as a call of its own: not ok means it never happened. Its receipt and the call's id.

        The snapshot and workspace tools (`snapshot.list`) are performed too. What is no call has an empty id:
        host.session.open, host.session.signal, and tools that only read.
        `sink` receives a command's output as it comes, besides the receipt; a command given no `stdin` of its own
        reads `stdin_fd`, a descriptor of this process.
        """
        if not isinstance(effect, str) or not isinstance(params, Mapping):
            raise fault("invalid_params", "Give the name of an effect, and its parameters by their names.")
        if effect in SESSION_EFFECTS:
            return perform_session_effect(self._desk, effect, params, boundary=self._boundary), ""
        check_call_open(self._slices)
        found = TurnId(parse_user_id(turn, "turn")) if turn is not None else current_turn()
        if effect.partition(".")[0] in _SNAPSHOT_FAMILIES:
            return self._perform_snapshot_tool(effect, params, label=label, turn=found)
        session = self._meant(effect, params)
        call = self._desk.call(session, turn=found, label=label, tool=effect.rpartition(".")[2])
        with call:
            receipt = perform(self._desk, call, effect, params, boundary=self._boundary, sink=sink, stdin_fd=stdin_fd)
            if not receipt.ok:
                call.abort(receipt.error_code or receipt.status)
        return receipt, call.id

    def _perform_snapshot_tool(
        self, effect: str, params: Mapping[str, Any], *, label: str | None, turn: TurnId | None
    ) -> tuple[Receipt, str]:
        # Loaded here, because few programs use these tools and they take a while to import.
        from mulligan.effects.substrate.bench import Named, bench_of
        from mulligan.effects.substrate.tools import BY_NAME, run_tool

        tool = BY_NAME.get(effect)
        if tool is None:
            raise unknown_effect(effect, (name for name in BY_NAME if "." in name))
        self._desk.check_open()
        named = Named(self.id, label=label, turn=turn, within=self._boundary)
        outcome = run_tool(bench_of(self._desk, self._boundary), tool, params, named)
        return snapshot_tool_receipt(tool.name, outcome.body, failed=outcome.is_error), outcome.call_id or ""

    def _meant(self, effect: str, params: Mapping[str, Any]) -> SessionId:
        """The session an effect names by `session_id`, if there is one; tools always act in this one."""
        named = params.get("session_id")
        if not isinstance(named, str) or effect != effect_named(effect).name:
            return self.id
        return SessionId(named) if is_known(self._desk, SessionId(named)) else self.id

    def turn(self, prompt: str | None = None, id: str | None = None) -> AbstractContextManager[str]:
        """A prompt and all that follows until the block ends; what `rollback` takes back in one step."""
        ledger = self._desk.ledger
        turn = TurnId(parse_user_id(id, "turn") if id is not None else ledger.ids.new())
        return TurnBlock(self._desk, self.id, turn, prompt=prompt, check=partial(self._check_open, verb="turn"))

    def undo(
        self,
        call: str | CallWithId | None = None,
        paths: StrPath | Sequence[StrPath] | None = None,
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        """Take back one call, by its id or label, else the newest that stands. `redo` takes that back again.

        What came later stays: lines are merged, and what clashes is left alone and named, unless `on_conflict` says
        otherwise. `paths` takes back only those; `dry_run` only says what would happen. Raises `unknown_call`,
        `nothing_to_undo`; like every way back `call_open` inside a call of this session, `fs_op_not_allowed` and
        `path_not_allowed`, where the session may not write.
        """
        how = self._how(on_conflict, dry_run, git)
        return going_back.undo(self._desk, _named(call), paths=paths_from_wire(paths), how=how)

    def _how(self, on_conflict: OnConflict, dry_run: bool = False, git: Git = "leave") -> How:
        self._desk.check_open()
        check_call_open(self._slices)
        may_write = self._judge(self._desk, self.id).may_write
        return How(on_conflict, dry_run, self.id, git, may_write, anyones=True)

    def _judge(self, desk: Desk, session: SessionId) -> Judge:
        return Judge.of(desk, session, once_hosted(desk, session, default=self._boundary))

    def redo(self, *, on_conflict: OnConflict = "merge", dry_run: bool = False) -> WayBack:
        """Take back the newest way back of this session. Raises `nothing_to_redo`."""
        return going_back.redo(self._desk, how=self._how(on_conflict, dry_run))

    def restore(
        self,
        call: str | CallWithId,
        paths: StrPath | Sequence[StrPath] | None = None,
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        """Put the paths a call changed back to what they were before it, whatever came later.

        Like every way back it is a call itself and can be undone. Raises `unknown_call`.
        """
        how = self._how(on_conflict, dry_run, git)
        return going_back.restore(self._desk, _named(call), paths=paths_from_wire(paths), how=how)

    @overload
    def rollback(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None: ...
    @overload
    def rollback(
        self,
        snapshot: None = None,
        *,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        cancel_open: bool = False,
        git: Git = "leave",
    ) -> WayBack: ...
    def rollback(
        self,
        snapshot: Snapshot | None = None,
        *,
        preserve_logs: bool = True,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        cancel_open: bool = False,
        git: Git = "leave",
    ) -> WayBack | None:
        """Take back the last turn: files, talk and STATE slices. With a snapshot, put the slices back to it."""
        if snapshot is not None:
            State.rollback(self, snapshot, preserve_logs=preserve_logs)
            return None
        return going_back.rollback(self._desk, how=self._how(on_conflict, dry_run, git), cancel_open=cancel_open)

    def rewind(
        self,
        to: str | int | CallWithId,
        side: str = "before",
        *,
        files: bool = True,
        talk: bool = True,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
    ) -> WayBack:
        """Move files, talk or both to a call or a message, by id or by how many messages there are up to it."""
        how = self._how(on_conflict, dry_run, git)
        return going_back.rewind(self._desk, _named(to), side=side, files=files, talk=talk, how=how)

    def fork(
        self,
        at: str | int | CallWithId | None = None,
        *,
        files: Literal["share", "copy"] = "share",
        dst: str | None = None,
        to: str | None = None,
    ) -> Session:
        """A child with this talk, or with it up to a point: before a call, or after a message by id or by count.

        With `copy` it has every file for itself, ignored ones too, as of that point: in the new folder `to`, else in
        one beside the store. `merge()` brings back what it changes there, `drop()` deletes it.
        """
        with self._archive.store.read() as tx:
            self._check_open(tx, "fork")
        point = _named(at)
        if files == "share":
            if to is not None:
                raise fault("invalid_params", "to is where a copy goes; ask for it with files='copy'.", field="to")
            made = branches.fork(self._desk, self.id, at=point, child=dst)
            return Session(self._desk, SessionId(made.session), self._boundary)
        if files != "copy":
            raise fault("invalid_params", "files is 'share' or 'copy'.", field="files")
        made = branches.fork_files(self._desk, self.id, to, at=point, child=dst)
        return Session(self._desk.at(_root_of(self._desk, made.session)), SessionId(made.session), self._boundary)

    def merge(self, *, on_conflict: OnConflict = "merge", dry_run: bool = False) -> WayBack:
        """Bring what this fork changed into the files it was forked from, as one call of its parent.

        Where both sides have changed a file, lines are merged. Raises `unknown_session` if it has no files of its own,
        `fs_op_not_allowed` and `path_not_allowed` where it or its parent may not write.
        """
        may_write = self._may_merge()
        return branches.merge_branch(self._desk, self.id, on_conflict=on_conflict, dry_run=dry_run, may_write=may_write)

    def _may_merge(self) -> MayWrite:
        """What this fork may write in its files and its parent, whose call it will be, in the ones it came from."""
        parent = SessionId(branches.branch_of(self._desk, self.id).parent)
        own = self._judge(self._desk, self.id)
        parents = self._judge(self._desk.at(_root_of(self._desk, parent)), parent)

        def check(source: Desk, path: RepoPath) -> None:
            own.may_write(self._desk, path)
            parents.may_write(source, path)

        return check

    def drop(self) -> None:
        """Delete the files of this fork, merged or not. What it said and did stays in the history.

        Raises `unknown_session` if it has no files of its own.
        """
        branches.drop_branch(self._desk, self.id)

    def _more_view(self, tx: Tx, facts: Mapping[str, Any]) -> dict[str, Any]:
        turns = tx.select(TURNS, {"session": self.id})
        since = self._check_open(tx, "snapshot").created_at
        return {
            **super()._more_view(tx, facts),
            "workspace_anchor": self._anchor(tx, since).to_json(),
            "workspace_policy": self._policy(tx),
            "live_clients": clients_in(tx, self._archive, self.id),
            "live_controller_id": controller_in(tx, self.id),
            "completed_turn_checkpoint_count": sum(row.ended_at is not None for row in turns),
            "redo_checkpoint_count": tx.count(REDO, {"session": self.id}),
        }

    def _forked_in(self, tx: Tx, child: SessionId) -> None:
        copy_slices_in(tx, self._archive.journal, self.id, child, at=self._archive.now())

    def _closed_in(self, tx: Tx) -> None:
        release_all_in(tx, self.id)

    # Roots beside the primary one.

    def merge_root(self, root: str, *, on_conflict: OnConflict = "merge", dry_run: bool = False) -> WayBack:
        """Bring what was written aside for a sandboxed root into the root itself, as one call.

        Raises `fs_op_not_allowed` and `path_not_allowed` where the session may not write.
        """
        path, may_write = self._mounted_path(root, "merge_root"), self._judge(self._desk, self.id).may_write
        return asides.merge_aside(
            self._desk, self.id, path, on_conflict=on_conflict, dry_run=dry_run, may_write=may_write
        )

    def drop_root(self, root: str) -> None:
        """Forget what was written aside for a sandboxed root. It stays mounted."""
        asides.drop_aside(self._desk, self.id, self._mounted_path(root, "drop_root"))

    def _opened_at(self) -> str:
        return self.root

    def _state_place(self) -> str | None:
        place = self._archive.store.directory
        return None if place is None else os.path.realpath(place)


DurableSession = Session
"""What `m.session()` gives, under the name it has beside `mulligan.Session`, which lives in memory."""


def _named(point: T | CallWithId) -> T | str:
    """A call by its id."""
    return point.id if isinstance(point, CallWithId) else point


def _root_of(desk: Desk, session: str) -> str:
    with desk.ledger.store.read() as tx:
        row = tx.get(SESSIONS, session)
    assert row is not None, "it was opened a moment ago"
    return row.root
