"""A session: one agent run on one root, with its calls, its turns and every undo operation.

`DurableSession` is the typed state of `session.state`, kept in a store. It has the parts `transcript`, `clients` and
`roots`; most of its methods about them only call the part (see `_part_of`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from mulligan.boundary.verdict import Boundary
from mulligan.effects.context import past_session_boundary
from mulligan.effects.handle import CallHandle, CallWithId, StrPath
from mulligan.effects.perform import SESSION_EFFECTS, perform, perform_session_effect
from mulligan.effects.receipt import Receipt, snapshot_tool_receipt
from mulligan.effects.registry import effect_named, unknown_effect
from mulligan.effects.session_boundary import HistoryAccess, is_known
from mulligan.exec.command import Sink
from mulligan.history import branches
from mulligan.history import undo as operations
from mulligan.history.call import current_turn, during
from mulligan.history.open_root import OpenRoot
from mulligan.history.plan import OnConflict
from mulligan.history.rewind import archive_of
from mulligan.history.tables import REDO, TURNS
from mulligan.history.undo import Git, MayWrite, UndoOptions, UndoResult
from mulligan.session.clients import Clients
from mulligan.session.compaction import Summarizer
from mulligan.session.lifecycle import SessionAccess, check_row_open
from mulligan.session.roots import Roots
from mulligan.session.state.orphan_calls import WatchedBlock, abort_orphans, watch
from mulligan.session.state.session import Session as State
from mulligan.session.state.session import Snapshot, SnapshotMetadata
from mulligan.session.state.slice_store import stored_slices_of
from mulligan.session.state.slices import current_changes
from mulligan.session.subscribers import active
from mulligan.session.tables import SESSIONS, session_journal
from mulligan.session.transcript import Transcript
from mulligan.session.transcript_log import Archive
from mulligan.store.protocol import Tx
from mulligan.values import VERSION
from mulligan.values.errors import fault
from mulligan.values.ids import SessionId, TurnId, parse_user_id, uuid_of
from mulligan.values.paths import RepoPath, hunks_from_wire, paths_from_wire
from mulligan.values.scoped_var import Holder, block_exit, check_call_open, holder_of

if TYPE_CHECKING:
    from random import Random

    from mulligan.effects.session_filesystem import SessionFilesystem
    from mulligan.history.checkpoint import ExecutionState
    from mulligan.session.bundle.format import Document
    from mulligan.session.bundle.redaction import RedactionPolicy


_HOME_VARIABLES = ("HOME", "USERPROFILE")
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")


def export_bundle(
    open_root: OpenRoot,
    session: SessionId,
    mode: str,
    *,
    content: bool | None = None,
    policy: RedactionPolicy | None = None,
) -> Document:
    # Only exports and imports load the modules of bundles: their patterns take longer to compile than a call takes.
    from mulligan.session.bundle.export import ExportOptions, export_session
    from mulligan.session.bundle.format import parse_mode

    place = os.fsdecode(open_root.disk.root.path)
    wish = ExportOptions(parse_mode(mode), content, policy or local_redaction_policy(), place=place, version=VERSION)
    return export_session(archive_of(open_root.ledger), session, wish)


def import_bundle_in(open_root: OpenRoot, bundle: bytes | str | Mapping[str, Any], *, name: str | None) -> SessionId:
    from mulligan.session.bundle.importer import import_bundle

    return import_bundle(archive_of(open_root.ledger), open_root.root.id, bundle, name=name)


def seed_session(
    open_root: OpenRoot, path: str, options: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise fault("invalid_params", "The options of seed_from_jsonl must be an object.", field="opts")
    from mulligan.session.importers import seed_from_jsonl

    return seed_from_jsonl(archive_of(open_root.ledger), open_root.root.id, path, {**(options or {}), **given})


def local_redaction_policy(environ: Mapping[str, str] | None = None) -> RedactionPolicy:
    """The default redaction policy with the names of this machine and its user."""
    import socket

    from mulligan.session.bundle.redaction import PrivateNames, RedactionPolicy

    known = os.environ if environ is None else environ
    homes = [known[name] for name in _HOME_VARIABLES if known.get(name)]
    users = [known[name] for name in _USER_VARIABLES if known.get(name)]
    with suppress(KeyError, ImportError):
        # Some systems lack this; the variables above are enough there.
        import pwd

        mine = pwd.getpwuid(os.getuid())
        homes.append(mine.pw_dir)
        users.append(mine.pw_name)
    real = [os.path.realpath(home) for home in homes]
    host = socket.gethostname()
    hosts = (host, host.partition(".")[0])
    return RedactionPolicy(
        names=PrivateNames(homes=_distinct(homes + real), users=_distinct(users), hosts=_distinct(hosts))
    )


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


Check = Callable[[Tx], object]


class TurnBlock:
    """A block for one turn; it gives the turn's id. The turn ends with the block, and its calls stay, even on error."""

    def __init__(
        self, open_root: OpenRoot, session: SessionId, turn: TurnId, *, prompt: str | None, check: Check
    ) -> None:
        self.exit_held: Holder | None = None
        self._turn = turn
        self._prompt = prompt
        self._check = check
        self._ending = _TurnEnding(open_root, session, turn)

    def __enter__(self) -> str:
        abort_orphans()
        ending = self._ending
        ending.watched = watch(self, ending)
        inside = False
        try:
            ending.begin(self._prompt, self._check, holder_of(self))
            inside = True
        finally:
            if not inside:
                ending.end()
        return self._turn

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.end()


class _TurnEnding:
    """Begins and ends a turn. Separate from the block, so that a turn ends even if nothing refers to its block."""

    def __init__(self, open_root: OpenRoot, session: SessionId, turn: TurnId) -> None:
        self.watched: WatchedBlock | None = None
        self._open_root = open_root
        self._session = session
        self._turn = turn
        self._blocks = (during(turn), active(session))
        self._has_begun = False

    def begin(self, prompt: str | None, check: Check, holder: Holder | None) -> None:
        ledger = self._open_root.ledger
        ledger.session(self._session, self._open_root.root)
        body = {"session": self._session, "turn": self._turn, "prompt": prompt, "owner": ledger.store.owner()}
        journal = session_journal(self._session)
        with ledger.store.write(about=(journal,)) as tx:
            check(tx)
            self._has_begun = True
            ledger.journal.append(tx, journal, "turn.opened", body, at=ledger.now())
        for block in self._blocks:
            block.enter(holder)

    def end(self) -> None:
        """May be called again, because an interrupt may come before or after the record of the end."""
        for block in reversed(self._blocks):
            block.end()
        if self._has_begun:
            self._record_end()
        if self.watched is not None:
            self.watched.forget()

    def _record_end(self) -> None:
        ledger = self._open_root.ledger
        journal = session_journal(self._session)
        with ledger.store.write(about=(journal,)) as tx:
            row = tx.get(TURNS, self._session, self._turn)
            if row is not None and row.is_open:
                body = {"session": self._session, "turn": self._turn}
                ledger.journal.append(tx, journal, "turn.ended", body, at=ledger.now())

    def abort_orphan(self) -> None:
        """End the turn. Its calls are aborted separately."""
        self.end()


T = TypeVar("T")
P = ParamSpec("P")
_SNAPSHOT_FAMILIES = ("snapshot", "workspace")


def _part_of(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of the session that calls the part's method of the same name and signature."""
    name = method.__name__

    @wraps(method)
    def perform_by_part(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = getattr(getattr(self, part), name)(*args, **kwargs)
        return found

    return perform_by_part


class DurableSession(State):
    """One agent run on one root. Safe to use from many threads, with calls in parallel."""

    when_closed: Callable[[], None] | None = None
    """Called when this object closes the session."""

    summarizer: Summarizer | None = None
    """The model that writes summaries for the compaction strategy `llm`, unless the caller passes another."""

    def __init__(self, desk: OpenRoot, session: SessionId, boundary: Boundary) -> None:
        # The parameter keeps its earlier name because the public signature is frozen.
        open_root = desk
        ledger = open_root.ledger
        self.id = session
        self._archive = archive_of(ledger)
        self._access = SessionAccess(self._archive, session, open_root.root.id, check_usable=open_root.check_open)
        self.transcript = Transcript(self._access)
        self.clients = Clients(self._access, self.transcript)
        self.roots = Roots(self._access, os.fsdecode(open_root.disk.root.path))
        self._slices = stored_slices_of(ledger.store, ledger.journal, session, ledger.now)
        super().__init__(session_id=uuid_of(session), clock=ledger.clock, home=self._slices)
        self._open_root = open_root
        self._boundary = boundary

    length = _part_of("transcript", Transcript.length)
    messages = _part_of("transcript", Transcript.messages)
    message_ids = _part_of("transcript", Transcript.message_ids)
    events = _part_of("transcript", Transcript.events)
    for_model = _part_of("transcript", Transcript.for_model)
    ancestry = _part_of("transcript", Transcript.ancestry)
    inject = _part_of("transcript", Transcript.inject)
    emit = _part_of("transcript", Transcript.emit)
    active = _part_of("transcript", Transcript.active)
    reset = _part_of("transcript", Transcript.reset)
    trim = _part_of("transcript", Transcript.trim)
    truncate = _part_of("transcript", Transcript.truncate)
    set_budget = _part_of("transcript", Transcript.set_budget)
    scratchpad = _part_of("transcript", Transcript.scratchpad)
    set_scratchpad = _part_of("transcript", Transcript.set_scratchpad)
    clear_scratchpad = _part_of("transcript", Transcript.clear_scratchpad)
    set_system_prompt = _part_of("transcript", Transcript.set_system_prompt)
    claim_tool_format = _part_of("transcript", Transcript.claim_tool_format)
    pin = _part_of("transcript", Transcript.pin)
    fork_at = _part_of("transcript", Transcript.fork_at)
    fork_talk = _part_of("transcript", Transcript.fork_talk)
    reopen = _part_of("transcript", Transcript.reopen)
    subscribe = _part_of("transcript", Transcript.subscribe)
    subscriptions = _part_of("transcript", Transcript.subscriptions)

    attach = _part_of("clients", Clients.attach)
    takeover = _part_of("clients", Clients.takeover)
    detach = _part_of("clients", Clients.detach)
    heartbeat = _part_of("clients", Clients.heartbeat)
    live_clients = _part_of("clients", Clients.live_clients)
    client_inject_prompt = _part_of("clients", Clients.client_inject_prompt)
    route_permission = _part_of("clients", Clients.route_permission)

    workspace_anchor = _part_of("roots", Roots.workspace_anchor)
    set_workspace_anchor = _part_of("roots", Roots.set_workspace_anchor)
    workspace_policy = _part_of("roots", Roots.workspace_policy)
    set_workspace_policy = _part_of("roots", Roots.set_workspace_policy)
    add_root = _part_of("roots", Roots.add_root)
    remove_root = _part_of("roots", Roots.remove_root)
    list_roots = _part_of("roots", Roots.list_roots)

    def compact(
        self, opts: Mapping[str, Any] | None = None, *, provider: Summarizer | None = None, **given: Any
    ) -> int:
        """Replace the older part of the context window by a summary. Returns how many messages it has afterwards."""
        return self.transcript.compact(opts, given, provider or self.summarizer)

    def close(self, status: str | Mapping[str, Any] | None = None) -> None:
        """End the session and record why. Its history stays and can be undone; opening it again continues it."""
        self.transcript.close(status)
        if self.when_closed is not None:
            self.when_closed()

    def view(self) -> dict[str, Any]:
        """The transcript, clients and roots of the session, as plain JSON values that the caller owns."""
        with self._archive.store.read() as tx:
            row = self._access.check_open(tx, "snapshot")
            turns = tx.select(TURNS, {"session": self.id})
            return {
                **self.transcript.view_in(tx, row),
                **self.roots.view_in(tx),
                **self.clients.view_in(tx),
                "completed_turn_checkpoint_count": sum(turn.ended_at is not None for turn in turns),
                "redo_checkpoint_count": tx.count(REDO, {"session": self.id}),
            }

    def export(
        self, mode: str = "sanitized", *, content: bool | None = None, policy: RedactionPolicy | None = None
    ) -> Document:
        """Export this session as a bundle: `sanitized` to share, `local` complete, `replay_only` without messages.

        `content` adds the contents of files to a local bundle. `policy` replaces the redaction rules. With any policy,
        a bundle that is not local never holds a secret of a known shape; Mulligan raises `unredacted_secret` instead.
        """
        return export_bundle(self._open_root, self.id, mode, content=content, policy=policy)

    @property
    def archive(self) -> Archive:
        """The store with its journal, blobs, clock and ids."""
        return self._archive

    @property
    def root(self) -> str:
        """The folder this session works in."""
        return os.fsdecode(self._open_root.disk.root.path)

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
        """Begin a call, one transaction. `tool_call_id` is the provider's id; it names the newest call that has it.

        A `strict` call that changes more bytes than the session may store fails with `not_undoable` at its end.
        """
        check_call_open(self._slices)
        found = TurnId(parse_user_id(turn, "turn")) if turn is not None else current_turn()
        call = self._open_root.call(self.id, turn=found, label=tool_call_id or label, tool=tool or label, strict=strict)
        (row,) = self._archive.store.rows((SESSIONS, self.id))
        if row is None or row.closed_at is not None:
            check_row_open(row, self.id, "call")
        return CallHandle(self._open_root, call, self._boundary, deadline=deadline, state=self, storage=self._slices)

    def attempt(self, tool: str, call_id: str) -> CallHandle:
        """A call as a tool's transaction: its changes of files and slices commit or abort together."""
        return self.call(tool, tool_call_id=call_id or None)

    @property
    def files(self) -> SessionFilesystem:
        """The workspace as a `Filesystem`. A write through it belongs to the current call."""
        from mulligan.effects.session_filesystem import SessionFilesystem

        return SessionFilesystem(self, self._open_root, self._boundary)

    def execution_state(
        self, resources: Mapping[type[Any], object] | None = None, *, rng: Random | None = None
    ) -> ExecutionState:
        """This session as the root of an agent's state, with its files, and checkpoints that outlive the process."""
        # Imported here, because an undo does not need it.
        from mulligan.files.filesystems import Filesystem
        from mulligan.history.checkpoint import CheckpointStore, ExecutionState, StoreArchive
        from mulligan.session.state.resources import ResourceRegistry

        ledger = self._open_root.ledger
        registry = ResourceRegistry.build({Filesystem: self.files, **(resources or {})})
        checkpoints = CheckpointStore(archive=StoreArchive(ledger, self.id))
        return ExecutionState(self, registry, ledger.clock, rng, checkpoints)

    def _snapshot_tags(self, tag: str | None, metadata: SnapshotMetadata | None) -> dict[str, str]:
        """The journal's position, unless the current call has changed slices that the journal does not have yet."""
        inner = current_changes(self._slices)
        at = {} if inner is not None and inner.has_changes else {"position": str(self._slices.position())}
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
        """Perform one effect as its own call. A receipt that is not ok means that nothing changed.

        Returns the receipt and the call's id. The snapshot and workspace tools (`snapshot.list`) work too. The id is
        empty for effects that are no calls: host.session.open, host.session.signal, and tools that only read.
        `sink` also receives a command's output as it arrives. A command without its own `stdin` reads `stdin_fd`, a
        descriptor of this process.
        """
        if not isinstance(effect, str) or not isinstance(params, Mapping):
            raise fault("invalid_params", "Pass the name of an effect, and its parameters as keywords.")
        if effect in SESSION_EFFECTS:
            return perform_session_effect(self._open_root, effect, params, boundary=self._boundary), ""
        check_call_open(self._slices)
        found = TurnId(parse_user_id(turn, "turn")) if turn is not None else current_turn()
        if effect.partition(".")[0] in _SNAPSHOT_FAMILIES:
            return self._perform_snapshot_tool(effect, params, label=label, turn=found)
        session = self._session_named(effect, params)
        call = self._open_root.call(session, turn=found, label=label, tool=effect.rpartition(".")[2])
        with call:
            receipt = perform(
                self._open_root, call, effect, params, boundary=self._boundary, sink=sink, stdin_fd=stdin_fd
            )
            if not receipt.ok:
                call.abort(receipt.error_code or receipt.status)
        return receipt, call.id

    def _perform_snapshot_tool(
        self, effect: str, params: Mapping[str, Any], *, label: str | None, turn: TurnId | None
    ) -> tuple[Receipt, str]:
        # Imported here, because few programs use these tools and their import is slow.
        from mulligan.effects.snapshot_tools.context import RequestInfo, snapshot_context_of
        from mulligan.effects.snapshot_tools.tools import BY_NAME, run_tool

        tool = BY_NAME.get(effect)
        if tool is None:
            raise unknown_effect(effect, (name for name in BY_NAME if "." in name))
        self._open_root.check_open()
        named = RequestInfo(self.id, label=label, turn=turn, within=self._boundary)
        outcome = run_tool(snapshot_context_of(self._open_root, self._boundary), tool, params, named)
        return snapshot_tool_receipt(tool.name, outcome.body, failed=outcome.is_error), outcome.call_id or ""

    def _session_named(self, effect: str, params: Mapping[str, Any]) -> SessionId:
        """The session that `session_id` names, if an effect has it. Tools always act in this session."""
        named = params.get("session_id")
        if not isinstance(named, str) or effect != effect_named(effect).name:
            return self.id
        return SessionId(named) if is_known(self._open_root, SessionId(named)) else self.id

    def turn(self, prompt: str | None = None, id: str | None = None) -> AbstractContextManager[str]:
        """A block for one turn: a prompt and everything until the block ends. `rollback` undoes it in one step."""
        ledger = self._open_root.ledger
        turn = TurnId(parse_user_id(id, "turn") if id is not None else ledger.ids.new())
        return TurnBlock(
            self._open_root, self.id, turn, prompt=prompt, check=partial(self._access.check_open, verb="turn")
        )

    def undo(
        self,
        call: str | CallWithId | None = None,
        paths: StrPath | Sequence[StrPath] | None = None,
        *,
        hunks: Mapping[str, Sequence[int]] | None = None,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
        if_match: str | None = None,
    ) -> UndoResult:
        """Undo one call, by id or label; default: the newest call that is not undone. `redo` undoes the undo.

        Later changes stay: Mulligan merges lines, and leaves and reports conflicting paths, unless `on_conflict` says
        otherwise. `paths` limits the undo to these paths, `hunks` to these hunks of the call's change, counted from 0.
        `dry_run` only returns what would happen, with a `digest`; with that as `if_match`, the undo raises `conflict`
        if the plan has changed. Raises `unknown_call` and `nothing_to_undo`. Like every undo operation it raises
        `call_open` inside a call of this session, and `fs_op_not_allowed` or `path_not_allowed` where the session may
        not write.
        """
        how = self._undo_options(on_conflict, dry_run, git, if_match)
        name = None if call is None else _named(call)
        wanted = None if paths is None else paths_from_wire(paths)
        return operations.undo(self._open_root, name, paths=wanted, hunks=hunks_from_wire(hunks), how=how)

    def _undo_options(
        self, on_conflict: OnConflict, dry_run: bool = False, git: Git = "leave", if_match: str | None = None
    ) -> UndoOptions:
        self._open_root.check_open()
        check_call_open(self._slices)
        found = past_session_boundary(self._open_root, self.id, default=self._boundary)
        # A session that may write everywhere needs no check of each path.
        may_write = None if found.boundary.is_unlimited else HistoryAccess.of(self._open_root, self.id, found).may_write
        return UndoOptions(on_conflict, dry_run, self.id, git, may_write, anyones=True, if_match=if_match)

    def _history_access(self, open_root: OpenRoot, session: SessionId) -> HistoryAccess:
        return HistoryAccess.of(open_root, session, past_session_boundary(open_root, session, default=self._boundary))

    def redo(
        self, *, on_conflict: OnConflict = "merge", dry_run: bool = False, if_match: str | None = None
    ) -> UndoResult:
        """Redo the last undo, restore, rollback or rewind of this session. Raises `nothing_to_redo`."""
        return operations.redo(self._open_root, how=self._undo_options(on_conflict, dry_run, if_match=if_match))

    def restore(
        self,
        call: str | CallWithId,
        paths: StrPath | Sequence[StrPath] | None = None,
        *,
        hunks: Mapping[str, Sequence[int]] | None = None,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
        if_match: str | None = None,
    ) -> UndoResult:
        """Set the paths that a call changed back to their state before the call, also those that changed later.

        Like every undo operation, this is a call itself and can be undone. Raises `unknown_call`.
        """
        how = self._undo_options(on_conflict, dry_run, git, if_match)
        return operations.restore(
            self._open_root, _named(call), paths=paths_from_wire(paths), hunks=hunks_from_wire(hunks), how=how
        )

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
        if_match: str | None = None,
    ) -> UndoResult: ...
    def rollback(
        self,
        snapshot: Snapshot | None = None,
        *,
        preserve_logs: bool = True,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        cancel_open: bool = False,
        git: Git = "leave",
        if_match: str | None = None,
    ) -> UndoResult | None:
        """Undo the last turn: files, transcript and STATE slices. With a snapshot, set the slices back to it."""
        if snapshot is not None:
            State.rollback(self, snapshot, preserve_logs=preserve_logs)
            return None
        return operations.rollback(
            self._open_root, how=self._undo_options(on_conflict, dry_run, git, if_match), cancel_open=cancel_open
        )

    def rewind(
        self,
        to: str | int | CallWithId,
        side: str = "before",
        *,
        files: bool = True,
        transcript: bool = True,
        on_conflict: OnConflict = "merge",
        dry_run: bool = False,
        git: Git = "leave",
        if_match: str | None = None,
    ) -> UndoResult:
        """Move files, transcript or both back to a call or a message. `to` is an id or a number of messages."""
        how = self._undo_options(on_conflict, dry_run, git, if_match)
        return operations.rewind(self._open_root, _named(to), side=side, files=files, transcript=transcript, how=how)

    def fork(
        self,
        at: str | int | CallWithId | None = None,
        *,
        files: Literal["share", "copy"] = "share",
        dst: str | None = None,
        to: str | None = None,
    ) -> DurableSession:
        """Create a child with this transcript, or with its part up to a point: before a call, or after a message.

        With `files="copy"` the child gets a copy of every file as of that point, ignored ones too, in the new folder
        `to` or beside the store. `merge()` applies its changes here; `drop()` deletes the copy.
        """
        with self._archive.store.read() as tx:
            self._access.check_open(tx, "fork")
        point = _named(at)
        if files == "share":
            if to is not None:
                raise fault("invalid_params", "to is the folder of the copy; it needs files='copy'.", field="to")
            made = branches.fork(self._open_root, self.id, at=point, child=dst)
            return DurableSession(self._open_root, SessionId(made.session), self._boundary)
        if files != "copy":
            raise fault("invalid_params", "files must be 'share' or 'copy'.", field="files")
        made = branches.fork_files(self._open_root, self.id, to, at=point, child=dst)
        return DurableSession(
            self._open_root.at(_root_of(self._open_root, made.session)), SessionId(made.session), self._boundary
        )

    def merge(self, *, on_conflict: OnConflict = "merge", dry_run: bool = False) -> UndoResult:
        """Apply this fork's changes to the files it was forked from, as one call of its parent.

        If both sides changed a file, Mulligan merges the lines. Raises `unknown_session` if the fork has no files of
        its own, and `fs_op_not_allowed` or `path_not_allowed` where the fork or its parent may not write.
        """
        may_write = self._may_merge()
        return branches.merge_branch(
            self._open_root, self.id, on_conflict=on_conflict, dry_run=dry_run, may_write=may_write
        )

    def _may_merge(self) -> MayWrite:
        """Checks a path of a merge: the fork must be allowed to write it in its copy, and the parent in its files."""
        parent = SessionId(branches.branch_of(self._open_root, self.id).parent)
        own = self._history_access(self._open_root, self.id)
        parents = self._history_access(self._open_root.at(_root_of(self._open_root, parent)), parent)

        def check(source: OpenRoot, path: RepoPath) -> None:
            own.may_write(self._open_root, path)
            parents.may_write(source, path)

        return check

    def drop(self) -> None:
        """Delete the files of this fork, merged or not. Its transcript and calls stay in the history.

        Raises `unknown_session` if it has no files of its own.
        """
        branches.drop_branch(self._open_root, self.id)

    # Roots beside the primary one.

    def merge_root(self, root: str, *, on_conflict: OnConflict = "merge", dry_run: bool = False) -> UndoResult:
        """Apply the changes in a sandboxed root's copy to the root itself, as one call.

        Raises `fs_op_not_allowed` and `path_not_allowed` where the session may not write.
        """
        path, may_write = (
            self.roots.mounted_path(root, "merge_root"),
            self._history_access(self._open_root, self.id).may_write,
        )
        return branches.merge_sandboxed_root(
            self._open_root, self.id, path, on_conflict=on_conflict, dry_run=dry_run, may_write=may_write
        )

    def drop_root(self, root: str) -> None:
        """Delete the changes in a sandboxed root's copy. The root stays mounted."""
        branches.drop_sandboxed_root(self._open_root, self.id, self.roots.mounted_path(root, "drop_root"))


def _named(point: T | CallWithId) -> T | str:
    """A call by its id."""
    return point.id if isinstance(point, CallWithId) else point


def _root_of(open_root: OpenRoot, session: str) -> str:
    with open_root.ledger.store.read() as tx:
        row = tx.get(SESSIONS, session)
    assert row is not None, "the caller has just opened the session"
    return row.root
