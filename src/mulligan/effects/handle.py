"""Calls in Python: `with session.call() as call: call.write_file(…)`, or `async with` and `await call.write_file(…)`.

Leaving the block normally commits. An exception, or `call.fail()`, aborts and restores the files. A call inside another
call of the same session is a savepoint: it can fail alone, and it commits with the outer call. `Effects` has one method
per effect; real calls and replayed calls share it.

The code below the effects is synchronous. In the async form each effect runs in its own thread, with a copy of the
task's context, and the event loop continues. We use no thread pool, because twenty parallel commands must not keep a
twenty-first call from ending.

Python cannot stop a thread. When a task is cancelled during an effect, Mulligan kills the call's commands and waits for
the thread; only then does the task get `CancelledError`. So nothing changes the files after the abort restored them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from datetime import datetime
from functools import partial, update_wrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from mulligan.boundary.verdict import Boundary
from mulligan.effects.perform import perform
from mulligan.effects.receipt import Receipt, inline_bytes
from mulligan.history.call import Call, current_call, making
from mulligan.history.open_root import OpenRoot
from mulligan.history.undo_log import Savepoint
from mulligan.session.state.orphan_calls import WatchedBlock, watch
from mulligan.session.state.session import Session as State
from mulligan.session.state.slice_store import StoredSlices, WrittenSlices
from mulligan.session.state.slices import NO_ITEMS, PendingChanges, changes_block, pending_in
from mulligan.session.subscribers import active
from mulligan.store.protocol import Tx
from mulligan.values.entries import Change
from mulligan.values.errors import ExecutionStateError, MulliganError, PromptEvaluationError, Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, as_text
from mulligan.values.scoped_var import Holder, ScopedBlock, block_exit, forget_ended_blocks, holder_of

if TYPE_CHECKING:
    # The functions that need asyncio import it: that takes longer than starting Python, and most programs use no task.
    import asyncio

StrPath = str | os.PathLike[str]

_PATHS = frozenset({"path", "file_path", "to", "cwd"})


class Effects(ABC):
    """Each method performs one effect and returns its Receipt. `AsyncEffects` has the same methods, to be awaited."""

    @abstractmethod
    def perform(self, effect: str, /, **params: Any) -> Receipt:
        """Any effect or tool by its name."""

    def read_file(self, /, path: StrPath, **params: Any) -> Receipt:
        """A file, its text in `receipt.text`; or a part: `offset_bytes`, `max_bytes`, `offset_lines`, `max_lines`."""
        return self.perform("read_file", path=path, **params)

    def write_file(
        self,
        path: StrPath,
        content: str | bytes | dict[str, Any],
        *,
        create_parents: bool = False,
        mode: str = "overwrite",
        expected_digest: str | None = None,
    ) -> Receipt:
        """Write a whole file: text, bytes, or a payload such as `{"blob_ref": {"blob_ref": …}}`.

        `create_new` never replaces; `expected_digest` replaces only what has that digest.
        """
        return self.perform(
            "write_file",
            path=path,
            content=_payload(content),
            create_parents=create_parents,
            mode=mode,
            expected_digest=expected_digest,
        )

    def edit_file(self, path: StrPath, old_string: str, new_string: str, *, replace_all: bool = False) -> Receipt:
        """Replace text that occurs once, or with `replace_all` each occurrence; white space and quotes may differ."""
        return self.perform(
            "edit_file", path=path, old_string=old_string, new_string=new_string, replace_all=replace_all
        )

    def apply_patch(
        self, patch: str | bytes | dict[str, Any], *, patch_format: str = "v4a", dry_run: bool = False
    ) -> Receipt:
        """Change several files, all or none: `v4a` (`*** Begin Patch`) or `unified`."""
        return self.perform("apply_patch", patch=_payload(patch), patch_format=patch_format, dry_run=dry_run)

    def grep(self, /, pattern: str, **params: Any) -> Receipt:
        """Lines that match a regular expression, as `path:line:text`.

        Further parameters: `path`, `glob_filter`, `case_insensitive`, `max_results`.
        """
        return self.perform("grep", pattern=pattern, **params)

    def glob(self, /, pattern: str, **params: Any) -> Receipt:
        """Files that match a pattern such as `**/*.py`, newest first; `path`, `max_results`, `include_ignored`."""
        return self.perform("glob", pattern=pattern, **params)

    def stat(self, path: StrPath) -> Receipt:
        """Whether a path is a file or a directory, its size and its time."""
        return self.perform("stat", path=path)

    def exists(self, path: StrPath) -> Receipt:
        """Whether the path exists, in `receipt.exists`."""
        return self.perform("exists", path=path)

    def list_dir(self, /, path: StrPath = ".", **params: Any) -> Receipt:
        """The names in a directory, directories with a trailing slash."""
        return self.perform("list_dir", path=path, **params)

    def delete(self, path: StrPath, *, recursive: bool = False) -> Receipt:
        """Delete a file, a link or a directory. A directory that is not empty needs `recursive`."""
        return self.perform("delete", path=path, recursive=recursive)

    def move(self, path: StrPath, to: StrPath, *, overwrite: bool = False) -> Receipt:
        """Move a file, a link or a directory. Replaces an existing target only with `overwrite`."""
        return self.perform("move", path=path, to=to, overwrite=overwrite)

    def mkdir(self, path: StrPath, *, parents: bool = False) -> Receipt:
        """Create a directory; with `parents` also the missing ones above it."""
        return self.perform("mkdir", path=path, parents=parents)

    def exec(
        self,
        /,
        argv: Sequence[str],
        *,
        cwd: StrPath | None = None,
        timeout_ms: int | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        **how: Any,
    ) -> Receipt:
        """Run a program; `how` takes rollback_on, isolate, sandbox, network and strategy."""
        given = {"cwd": cwd, "timeout_ms": timeout_ms, "env": _plain(env), "stdin": stdin}
        return self.perform("host.exec", argv=_plain(argv), **given, **how)

    def read_blob(self, blob_ref: str, *, offset_bytes: int = 0, max_bytes: int | None = None) -> Receipt:
        """Page through an answer that was too large to be inline."""
        return self.perform("blob.read", blob_ref=blob_ref, offset_bytes=offset_bytes, max_bytes=max_bytes)


class CallWithId(ABC):
    """A call of a `with` block. Methods that take a call's id accept it too."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The call's own id, which `undo` and `restore` take."""


def asked(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with each path as text."""
    given: dict[str, Any] = {}
    for name, value in params.items():
        if value is not None:
            given[name] = as_text(value) if name in _PATHS and type(value) is not str else value
    return given


def _payload(content: str | bytes | dict[str, Any]) -> str | dict[str, Any]:
    return inline_bytes(content) if isinstance(content, bytes | bytearray | memoryview) else content


def _plain(given: object) -> object:
    """A mapping as a dict, other sequences except text as a list. The effect refuses values of other types."""
    if isinstance(given, Mapping):
        return dict(given)
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else given


class _CallFailedError(Refused):
    """Raised inside Mulligan after `call.fail()`. It aborts the call like an exception; the caller never sees it."""

    def __init__(self, reason: str) -> None:
        super().__init__("error", reason, reason)


@fast_dataclass(slots=True, eq=False)
class _CallEnding:
    """Begins and ends a call's block. Separate from the handle, so that Mulligan can abort a call whose handle is gone.

    The block's changes to slices (`pending`) are published in the transaction that commits the call, or dropped if it
    aborts. In a call inside another one they join the outer call's changes, unless the block fails.
    """

    call: Call
    savepoint: Savepoint | None
    state: State
    storage: StoredSlices
    pending: PendingChanges
    watched: WatchedBlock | None = None
    _blocks: tuple[ScopedBlock[Any], ...] = ()
    _is_put_back: bool = False
    _written: WrittenSlices | None = None

    def enter(self, holder: Holder | None) -> None:
        if self.savepoint is None:
            self.call.at_end.append(self._end_slices)
        else:
            self.savepoint.enter(holder)
        self._blocks = (making(self.call), active(self.call.session), changes_block(self.pending))
        for block in self._blocks:
            block.enter(holder)

    def watch_until_left(self, handle: CallHandle) -> None:
        """An `async with` no longer holds its block while the event loop leaves it; the coroutine holds the handle."""
        before, handle.exit_held = self.watched, None
        self.watched = watch(handle, self)
        if before is not None:
            before.forget()

    @property
    def is_committed(self) -> bool:
        if self.savepoint is None:
            return self.call.status == "committed"
        return self.pending.published == "all"

    @property
    def is_over(self) -> bool:
        if self.savepoint is None:
            return self.call.status != "open"
        return self.is_committed or self._is_put_back

    def leave(self, error: BaseException | None) -> None:
        """End the block: roll back or keep a savepoint, or commit or abort a call."""
        try:
            if self.savepoint is None:
                self.call.leave(error)
            else:
                self._leave_part(self.savepoint, error)
        finally:
            self._forget()
        if self.pending.events is not NO_ITEMS:
            # Listeners run last, so that an error of a listener does not change how the call ends.
            self.state.tell(self.pending, only_logs=self.call.status != "committed")

    def _end_slices(self, tx: Tx, status: str) -> bool:
        """Write the changes to slices. Changes to logs are kept even if the call aborts."""
        pending, only_logs = self.pending, status != "committed"
        pending.close(failed=only_logs)
        if not pending.now:
            return False
        try:
            self._written = self.storage.write(
                tx, lambda read: pending.merged_into(read, only_logs=only_logs), pending.policy_of, call=self.call.id
            )
        except ExecutionStateError:
            # This error refuses the commit. The abort that follows must not fail for the same reason.
            if not only_logs:
                raise
            return False
        return self._written.changes_state

    def _leave_part(self, savepoint: Savepoint, error: BaseException | None) -> None:
        try:
            if error is None:
                self.pending.publish()
        finally:
            if not self.is_committed:
                self._put_back(savepoint)

    def _put_back(self, savepoint: Savepoint) -> None:
        """Roll back the files first. If that fails, the outer call cannot be committed."""
        try:
            savepoint.put_back()
            self._is_put_back = True
        finally:
            self.pending.publish(only_logs=True)

    def _forget(self) -> None:
        """Stop watching the block, because the call has ended or another thread will end it. May be called again."""
        for block in reversed(self._blocks):
            block.end()
        if self.savepoint is not None:
            self.savepoint.end()
        elif self._written is not None and self.call.status in ("committed", "aborted"):
            self._written.adopt()
        if self.watched is not None and self.is_over:
            self.watched.forget()

    def abort_orphan(self) -> str | None:
        aborted = None
        if self.savepoint is None:
            aborted = self.call.abort_orphan()
        elif not self.is_over:
            aborted = self.call.id
            try:
                self._put_back(self.savepoint)
            except MulliganError:
                # The outer call cannot be committed then; the code that ends it gets the error.
                self._is_put_back = True
        self._forget()
        return aborted


class CallHandle(Effects, CallWithId):
    """One call. Each method performs one effect and returns its Receipt."""

    def __init__(
        self,
        open_root: OpenRoot,
        call: Call,
        boundary: Boundary,
        *,
        state: State,
        storage: StoredSlices,
        deadline: datetime | None = None,
    ) -> None:
        if deadline is not None and (not isinstance(deadline, datetime) or deadline.utcoffset() is None):
            raise fault("invalid_params", "A deadline must be a datetime with a time zone.", field="deadline")
        outer = current_call()
        self._joins = outer is not None and outer.session == call.session and outer.home == call.home
        self._call = outer if outer is not None and self._joins else call
        self._open_root = open_root
        self._boundary = boundary
        self._deadline = deadline
        self._failed: str | None = None
        self._savepoint = self._call.savepoint() if self._joins else None
        self._ending = _CallEnding(self._call, self._savepoint, state, storage, pending_in(storage, state.policy_of))
        self.exit_held: Holder | None = None
        self._block: Literal["ahead", "inside", "over"] = "ahead"
        self._async_form: AsyncCallHandle | None = None

    # The transaction.

    @property
    def id(self) -> str:
        """The call's own id, which `undo` and `restore` take."""
        return self._call.id

    @property
    def status(self) -> str:
        """open, committed or aborted."""
        return self._call.status

    @property
    def changes(self) -> list[Change]:
        """The changes of the call so far."""
        return self._call.changes()

    @property
    def conflicts(self) -> list[RepoPath]:
        """After an abort: the paths that someone else had changed; they are left as they are."""
        return self._call.conflicts

    @property
    def pending(self) -> PendingChanges:
        """The call's changes to slices."""
        return self._ending.pending

    @property
    def is_committed(self) -> bool:
        """Whether the call is committed; for a call inside another one, whether it will commit with that one."""
        return self._ending.is_committed

    @property
    def is_over(self) -> bool:
        """Whether the call is committed or aborted."""
        return self._ending.is_over

    def resolve(self) -> None:
        """After an interrupt, find out whether the call was committed."""
        if not self._joins:
            self._call.resolve()

    def finish(self) -> str | None:
        """End the call if an interrupt prevented that, and abort it unless it is committed. Returns its id if so."""
        self._block = "over"
        return self._ending.abort_orphan()

    def __enter__(self) -> Self:
        if self._block != "ahead":
            raise fault("call_not_open", f"Call {self.id} has already been used in a `with`; begin another call.")
        self._block = "inside"
        ending = self._ending
        ending.watched = watch(self, ending)
        inside = False
        try:
            ending.enter(holder_of(self))
            inside = True
        finally:
            if not inside:
                self._leave(_CallFailedError("interrupted"))
        return self

    @block_exit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._failed is not None:
            self._leave(_CallFailedError(self._failed))
            return
        try:
            if error is None:
                if self._deadline is not None:
                    self._check_deadline(self._deadline)
                if self._call.status == "aborted":
                    # The code that leaves the block must learn that another thread has cancelled the call meanwhile.
                    words = f"Another thread or process ended call {self.id}; Mulligan rolled its changes back."
                    raise fault("call_not_open", words)
        except (MulliganError, KeyboardInterrupt, SystemExit) as late:
            self._leave(late)
            raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        self._block = "over"
        self._ending.leave(error)

    async def __aenter__(self) -> AsyncCallHandle:
        self._async_form = AsyncCallHandle(self)
        self.__enter__()
        return self._async_form

    @block_exit
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        assert self._async_form is not None, "__aenter__ made it"
        self._ending.watch_until_left(self)
        return self._async_form.leave(error)

    def fail(self, reason: str) -> None:
        """Mark the call as failed: when its block ends, Mulligan rolls its changes back."""
        self._failed = reason

    def stop(self) -> None:
        """For other threads: kill the command that runs in this call, if one does; it fails as `cancelled`."""
        # Imported here, because few calls run a command that is stopped.
        from mulligan.effects.running_commands import running_commands_of

        running_commands_of(self._open_root).stop(self.id)

    def _check_deadline(self, deadline: datetime) -> None:
        if self._open_root.ledger.clock.now() > deadline:
            raise PromptEvaluationError(f"Call {self.id} ran past its deadline; Mulligan rolled its changes back.")

    def perform(self, effect: str, /, **params: Any) -> Receipt:
        """Any effect or tool by its name."""
        if self._block == "ahead":
            raise fault("call_not_open", f"Call {self.id} has not begun; use it inside its `with`.")
        if self._block == "over" or self._call.status != "open":
            raise fault("call_not_open", f"Call {self.id} has ended; begin another call.")
        if self._deadline is not None:
            self._check_deadline(self._deadline)
        savepoint = self._savepoint
        # A thread does not inherit the context, so it must set here that its work belongs to the block.
        with nullcontext() if savepoint is None or savepoint.is_around else savepoint.again():
            return perform(
                self._open_root, self._call, effect, asked(params), boundary=self._boundary, deadline=self._deadline
            )


P = ParamSpec("P")
T = TypeVar("T")

_STOP_EVERY_S = 0.05


async def run_in_thread(work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Run `work` in a thread. When the task is cancelled, call `stop`, wait for the thread to end, then raise."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor, wait

    with ThreadPoolExecutor(1, "mulligan-effect") as pool:
        begun = pool.submit(copy_context().run, work)
        try:
            running = asyncio.wrap_future(begun)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await wait_until_done(running, stop)
                raise
        finally:
            # After an interrupt no event loop runs, so we wait here: the thread must end before the call is aborted.
            while not begun.done():
                stop()
                wait([begun], timeout=_STOP_EVERY_S)


async def wait_until_done(running: asyncio.Future[Any], stop: Callable[[], object]) -> None:
    """Call `stop` repeatedly until the work ends, because it may start one command after another."""
    import asyncio

    while not running.done():
        stop()
        try:
            await asyncio.wait([running], timeout=_STOP_EVERY_S)
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()


def _awaitable(
    effect: Callable[Concatenate[Effects, P], Receipt],
) -> Callable[Concatenate[AsyncEffects, P], Coroutine[Any, Any, Receipt]]:
    async def run(self: AsyncEffects, /, *args: P.args, **params: P.kwargs) -> Receipt:
        return await self._run(partial(effect, self._effects, *args, **params))

    update_wrapper(run, effect)
    run.__annotations__["return"] = "Receipt"
    return run


class AsyncEffects:
    """Each method is the effect of the same name in `Effects`, to be awaited."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    async def perform(self, effect: str, /, **params: Any) -> Receipt:
        """Any effect or tool by its name."""
        return await self._run(partial(self._effects.perform, effect, **params))

    read_file = _awaitable(Effects.read_file)
    write_file = _awaitable(Effects.write_file)
    edit_file = _awaitable(Effects.edit_file)
    apply_patch = _awaitable(Effects.apply_patch)
    grep = _awaitable(Effects.grep)
    glob = _awaitable(Effects.glob)
    stat = _awaitable(Effects.stat)
    exists = _awaitable(Effects.exists)
    list_dir = _awaitable(Effects.list_dir)
    delete = _awaitable(Effects.delete)
    move = _awaitable(Effects.move)
    mkdir = _awaitable(Effects.mkdir)
    exec = _awaitable(Effects.exec)
    read_blob = _awaitable(Effects.read_blob)

    async def _run(self, effect: Callable[[], Receipt]) -> Receipt:
        return effect()


class AsyncCallHandle(AsyncEffects, CallWithId):
    """A call from `async with session.call()`. Each method performs one effect; its Receipt is awaited.

    Cancelling a task during an effect kills the call's commands and aborts the call, even if the block catches the
    `CancelledError`: then further effects and the end of the block raise `call_not_open`.
    """

    def __init__(self, handle: CallHandle) -> None:
        super().__init__(handle)
        self._handle = handle
        self._is_cancelled = False
        self._running: set[asyncio.Task[Receipt]] = set()

    @property
    def id(self) -> str:
        """The call's own id, which `undo` and `restore` take."""
        return self._handle.id

    @property
    def status(self) -> str:
        """open, committed or aborted."""
        return self._handle.status

    @property
    def is_committed(self) -> bool:
        """Whether the call is committed; for a call inside another one, whether it will commit with that one."""
        return self._handle.is_committed

    @property
    def changes(self) -> list[Change]:
        """The changes of the call so far."""
        return self._handle.changes

    @property
    def conflicts(self) -> list[RepoPath]:
        """After an abort: the paths that someone else had changed; they are left as they are."""
        return self._handle.conflicts

    def fail(self, reason: str) -> None:
        """Mark the call as failed: when its block ends, Mulligan rolls its changes back."""
        self._handle.fail(reason)

    def stop(self) -> None:
        """Kill the command that runs in this call; it fails as `cancelled`."""
        self._handle.stop()

    async def _run(self, effect: Callable[[], Receipt]) -> Receipt:
        import asyncio

        if self._is_cancelled:
            raise self._cancelled_fault()
        # A task, so that the end of the block can wait for an effect that the block did not await.
        running = asyncio.ensure_future(run_in_thread(effect, self._handle.stop))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            return await running
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise

    def _cancelled_fault(self) -> MulliganError:
        return fault("call_not_open", f"Call {self.id} was cancelled during an effect and is rolled back.")

    async def leave(self, error: BaseException | None) -> None:
        """End the call: wait for its effects, which are stopped if the block failed, then commit or abort.

        A task that is cancelled while the call commits gets `CancelledError` after the commit.
        """
        late: BaseException | None = None
        if not isinstance(error, GeneratorExit):
            late = await self._finish_effects(stop=error is not None)
        if error is None and late is None and self._is_cancelled:
            late = self._cancelled_fault()
        end = partial(_end, self._handle, late or error)
        if isinstance(error, GeneratorExit):
            # The event loop that ran this coroutine is gone.
            end()
        else:
            await run_in_thread(end, _nothing)
        forget_ended_blocks()
        if late is not None:
            raise late

    async def _finish_effects(self, *, stop: bool) -> asyncio.CancelledError | None:
        """Wait for the effects that the block did not await. Returns a cancellation that came meanwhile."""
        import asyncio

        cancelled: asyncio.CancelledError | None = None
        for running in list(self._running):
            try:
                if not stop:
                    await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled, stop = error, True
            if stop:
                await wait_until_done(running, self._handle.stop)
        return cancelled


def _end(handle: CallHandle, error: BaseException | None) -> None:
    type(handle).__exit__(handle, None if error is None else type(error), error, None)


def _nothing() -> None:
    """Passed as `stop` at the end of a call, which must not be stopped."""
