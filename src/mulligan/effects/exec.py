"""The effects host.exec, host.exec_output, host.exec_signal and host.shell: commands inside a call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mulligan.boundary.capability import clamped
from mulligan.boundary.verdict import path_denied
from mulligan.effects import arguments
from mulligan.effects.context import EffectContext, check_limit, refusing, too_large
from mulligan.effects.receipt import Receipt, inline, refusal_receipt
from mulligan.effects.running_commands import SIGNALS, TrackedCommand, running_commands_of
from mulligan.exec.command import Command, OutputSpool, Sink, Spools, Stream, command
from mulligan.exec.pump import CommandHandle
from mulligan.exec.run import CommandResult
from mulligan.history.call import Call
from mulligan.history.command import RunOptions, run_in_call
from mulligan.history.open_root import OpenRoot
from mulligan.values.clock import monotonic_s, now_ns
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.entries import Change, FileEntry, is_never_recorded, kind_of_change
from mulligan.values.errors import Refused
from mulligan.values.paths import ROOT, RepoPath, path_from_bytes, to_wire
from mulligan.values.text import in_base64

if TYPE_CHECKING:
    from mulligan.effects import params

CALL_VARIABLE = "MULLIGAN_CALL"
_PAGE_BYTES = 1024 * 1024
_TIMEOUT_MAX_MS = 366 * 24 * 3_600_000
"""A year: longer than any use, and short enough for every clock."""

Fields = dict[str, Any]


def execute(context: EffectContext, asked: params.Exec) -> Fields:
    """Run a command until its last descendant ends. A non-zero exit is `ok`, unless `rollback_on` says otherwise."""
    if asked.background:
        return _start(context, asked)
    asked_command = _command(context, asked)
    spools = _StreamingSpools(context)
    try:
        return run(context, asked_command, asked, sink=spools, answer=lambda: _outputs(context, asked, spools))
    finally:
        spools.close()


class _StreamingSpools(Spools):
    """Stores a command's output and passes it to the context's sink as it arrives."""

    def __init__(self, context: EffectContext) -> None:
        super().__init__(inline_bytes=context.boundary.inline_limit)
        self._listener = context.sink

    def write(self, stream: Stream, data: bytes) -> None:
        super().write(stream, data)
        if self._listener is not None:
            self._listener.write(stream, data)


def _start(context: EffectContext, asked: params.Exec) -> Fields:
    """Start a command in the background, in a call of its own that ends with the command's last process."""
    facts = context.whole.facts
    call = context.open_root.call(context.session, turn=facts.turn, label=facts.label, tool="exec")
    own = replace(context, whole=call, call=call, deadline=None)
    what = replace(_command(own, asked), background=True)
    spools = _StreamingSpools(own)
    command = TrackedCommand(call.id, context.session, CommandHandle(), spools)

    def work(handle: CommandHandle) -> Fields:
        return _to_the_end(own, lambda: _run(own, what, asked, sink=spools, handle=handle, answer=dict))

    running_commands_of(context.open_root).start(command, work)
    return {"exec_id": call.id, "started_at_ns": now_ns(context.open_root.ledger.clock)}


def _to_the_end(context: EffectContext, run_it: Callable[[], Fields]) -> Fields:
    with context.call:
        try:
            fields = run_it()
            answer = Receipt("host.exec", fields.pop("status", "ok"), fields).to_dict()
        except Refused as refused:
            answer = refusal_receipt("host.exec", refused).to_dict()
            context.call.account.note_effect("host.exec", {"background": True}, answer)
            context.call.abort(refused.code)
            return answer
        context.call.account.note_effect("host.exec", {"background": True}, answer)
        return answer


def output(context: EffectContext, asked: params.ExecOutput) -> Fields:
    """A page of a background command's output, and its receipt if it has ended."""
    command = _background_command(context, asked.exec_id)
    assert command.spools is not None
    ended, spool = command.receipt, command.spools.stdout if asked.stream == "stdout" else command.spools.stderr
    most = clamped(clamped(asked.max_bytes, context.capability.max_read_bytes), context.boundary.inline_limit) or 0
    page = spool.read(asked.offset_bytes, most)
    return {
        "content": inline(page),
        "offset_bytes": asked.offset_bytes,
        "size_bytes": spool.size_bytes,
        "running": ended is None,
        "result": ended,
    }


def send_signal(context: EffectContext, asked: params.ExecSignal) -> Fields:
    if asked.signal not in SIGNALS:
        raise Refused("error", "invalid_params", f"signal must be one of {', '.join(SIGNALS)}.")
    command = _background_command(context, asked.exec_id)
    if not running_commands_of(context.open_root).signal(command, SIGNALS[asked.signal]):
        raise Refused("already_exited", "already_exited", f"Command {asked.exec_id} has ended.")
    return {"status": "signaled"}


def _background_command(context: EffectContext, exec_id: str) -> TrackedCommand:
    command = running_commands_of(context.open_root).find(exec_id)
    if command is None or command.session != context.session or command.spools is None:
        raise Refused("not_found", "exec_not_found", f"This session has no background command {exec_id!r}.")
    return command


def shell(context: EffectContext, asked: params.Shell) -> Fields:
    words = ["sh", "-c", asked.command]
    return execute(context, arguments.parsed("Exec", {"argv": words, "cwd": asked.cwd, "timeout_ms": asked.timeout_ms}))


def run(
    context: EffectContext, what: Command, asked: params.Exec, *, sink: Sink, answer: Callable[[], Fields]
) -> Fields:
    with running_commands_of(context.open_root).running(context.whole.id, context.session) as handle:
        return _run(context, what, asked, sink=sink, handle=handle, answer=answer)


def _run(
    context: EffectContext,
    what: Command,
    asked: params.Exec,
    *,
    sink: Sink,
    handle: CommandHandle,
    answer: Callable[[], Fields],
) -> Fields:
    limit_ms = _limit_ms(context, asked)
    deadline = None if limit_ms is None else monotonic_s() + min(limit_ms, _TIMEOUT_MAX_MS) / 1000
    how = RunOptions(asked.strategy, asked.isolate, deadline, handle, only_success=asked.rollback_on == "nonzero")
    before = {change.path: (change.before, change.after) for change in context.call.changes()}
    started = now_ns(context.open_root.ledger.clock)
    ran = run_in_call(context.open_root, context.call, what, sink=sink, how=how)
    whole = context.call.changes()
    changes = [one for one in whole if before.get(one.path) != (one.before, one.after)]
    fields = {
        "exit_code": ran.exit_code,
        "signal": ran.signal,
        "started_at_ns": started,
        "ended_at_ns": now_ns(context.open_root.ledger.clock),
        "strategy": ran.strategy,
        "strategy_reason": ran.strategy_reason,
        "attribution": ran.attribution,
        "sandbox": ran.sandbox,
        "changes": [_change(context, change) for change in changes if not is_never_recorded(change)],
        "coverage": context.call.gaps(whole),
        **({"rescued": [_rescued(context, *one) for one in ran.given_way]} if ran.given_way else {}),
    }
    try:
        fields |= answer()
        # If the command changed a path that the session may not write, all its changes are rolled back.
        check_limit(context.capability, "max_changed_files", len(changes))
        for change in changes:
            context.boundary.check_path("write", change.path)
            if isinstance(change.after, FileEntry):
                check_limit(context.capability, "max_write_bytes", change.after.size)
    except Refused as refused:
        refused.fields.update(fields)
        raise
    _judge(asked, ran, fields, limit_ms)
    return fields | {"coverage": context.call.gaps(whole)}


def _limit_ms(context: EffectContext, asked: params.Exec) -> int | None:
    """The time limit: the caller's, or what is left until the call's deadline if that is shorter."""
    if context.deadline is None:
        return asked.limit_ms
    left = int((context.deadline - context.open_root.ledger.clock.now()).total_seconds() * 1000)
    return max(1, left if asked.limit_ms is None else min(left, asked.limit_ms))


def _change(context: EffectContext, change: Change) -> Fields:
    origin = {} if change.renamed_from is None else {"from": _shown(context, change.renamed_from)}
    return {"path": _shown(context, change.path), "kind": kind_of_change(change), **origin}


def _rescued(context: EffectContext, path: bytes, digest: Digest) -> Fields:
    """The command's version of a path, where another writer's version stays."""
    inner = path_from_bytes(os.path.relpath(path, context.open_root.disk.root.path))
    return {"path": _shown(context, inner), "blob_ref": digest}


def _shown(context: EffectContext, path: RepoPath) -> str:
    return to_wire(path) if context.mount is None else context.shown(path)


def _judge(asked: params.Exec, ran: CommandResult, fields: Fields, limit_ms: int | None) -> None:
    """Refuse after a timeout, a cancel, or an exit that `rollback_on` names, so that the changes are rolled back.

    The receipt still describes the run.
    """
    if ran.timed_out:
        raise Refused("timeout", "timeout", f"The command ran longer than {limit_ms} ms.", **fields)
    if ran.cancelled:
        raise Refused("error", "cancelled", "The command was cancelled.", **fields)
    if asked.rollback_on == "nonzero" and ran.exit_code != 0:
        but = ", except for what the coverage lists" if fields["coverage"] else ""
        words = f"The command failed with exit code {ran.exit_code}; Mulligan rolled back its changes{but}."
        raise Refused("error", "nonzero_exit", words, **fields)
    if ran.signal is not None:
        fields["status"] = "signaled"


def _command(context: EffectContext, asked: params.Exec) -> Command:
    """The command with the session's environment and network rule."""
    if not asked.argv:
        raise Refused("error", "argv_empty", "A command needs at least a program name.")
    # The folder is checked like a path to read. The command fails if it no longer exists when the command starts.
    with context.resolved("exec", context.shown(context.workdir) if asked.cwd is None else asked.cwd) as resolved:
        if resolved.outside:
            raise path_denied("A command must run inside the root.", path=asked.cwd)
        cwd = resolved.path
    of_call = call_environment(context.open_root, context.call)
    env = {**of_call, **context.env.values(), **(asked.env or {}), CALL_VARIABLE: of_call[CALL_VARIABLE]}
    _check_words(asked.argv, env)
    stdin = _stdin(context, asked)
    made = command(asked.argv, context.open_root.disk.root.path, cwd=cwd, env=env, stdin=stdin)
    network = "none" if context.network == "none" else asked.network
    return replace(made, sandbox=asked.sandbox, network=network, stdin_fd=context.stdin_fd if stdin is None else None)


def call_environment(open_root: OpenRoot, call: Call) -> dict[str, str]:
    """Environment variables that tell a Mulligan started by the command which call and which store it belongs to."""
    around, found_by = open_root.ledger.joins or (call.id, open_root.ledger.store.environment)
    return {CALL_VARIABLE: around, **found_by}


def _check_words(argv: list[str], env: Mapping[str, str]) -> None:
    """Refuse words and variables that the kernel does not accept."""
    for word in (*argv, *env, *env.values()):
        try:
            data = os.fsencode(word)
        except UnicodeEncodeError:
            raise Refused("error", "invalid_params", "A word has surrogates that do not represent a byte.") from None
        if b"\0" in data:
            raise Refused("error", "invalid_params", "A command's words and variables cannot contain NUL.")
    if any(not name or "=" in name for name in env):
        raise Refused("error", "invalid_params", "env: a variable needs a name without '='.")


def _stdin(context: EffectContext, asked: params.Exec) -> bytes | None:
    if asked.stdin is not None and asked.stdin_ref is not None:
        raise Refused("error", "invalid_params", "Give stdin or stdin_ref, not both.")
    if asked.stdin_ref is not None:
        with refusing("invalid_stdin_ref"):
            reference = parse_digest(asked.stdin_ref)
        return context.blob(reference, "stdin_ref_not_found")
    try:
        return None if asked.stdin is None else asked.stdin.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("error", "invalid_params", "stdin has lone surrogates, so it is not UTF-8 text.") from None


def _outputs(context: EffectContext, asked: params.Exec, spools: Spools) -> Fields:
    """Both streams. If one does not fit inline, the other is still in the answer."""
    stdout = _output(context, asked, spools.stdout)
    try:
        return {"stdout": stdout, "stderr": _output(context, asked, spools.stderr)}
    except Refused as refused:
        refused.fields["stdout"] = stdout
        raise


def _output(context: EffectContext, asked: params.Exec, spool: OutputSpool) -> Fields | None:
    if spool.size_bytes == 0:
        return None
    whole = spool.inline()
    if whole is not None or context.boundary.keeps_out_of_answers("exec", ROOT):
        whole = b"".join(_pages(spool)) if whole is None else whole
        return context.answer(whole, op="exec", path=ROOT, mode=asked.output_mode)
    if asked.output_mode == "require_inline":
        raise too_large(context.boundary.inline_limit)
    digest, kept = context.open_root.ledger.blobs.store_stream(_pages(spool))
    context.whole.account.hand_out(digest)
    payload = {"blob_ref": digest, "size_bytes": kept, "preview_bytes": in_base64(spool.head)}
    payload |= {"tail_bytes": in_base64(spool.tail)}
    return {"blob": payload | ({"dropped_bytes": spool.dropped_bytes} if spool.dropped_bytes else {})}


def _pages(spool: OutputSpool) -> Iterator[bytes]:
    """The stored output, page by page."""
    at = 0
    while page := spool.read(at, _PAGE_BYTES):
        yield page
        at += len(page)
