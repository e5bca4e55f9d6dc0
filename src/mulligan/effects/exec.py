"""host.exec: a command inside the transaction."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mulligan.boundary.verdict import clamped
from mulligan.effects import params
from mulligan.effects.board import SIGNALS, Posted, board_of
from mulligan.effects.changes import check_changed, check_size
from mulligan.effects.receipt import Receipt, inline, refusal_receipt
from mulligan.effects.scene import Scene, too_large
from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.history.running import How, run_in_call
from mulligan.values.clock import monotonic_s
from mulligan.values.digest import Digest, parse_digest
from mulligan.values.entries import Change, FileEntry, is_never_recorded, kind_of_change
from mulligan.values.faults import MulliganError
from mulligan.values.paths import ROOT, RepoPath, path_from_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.command import Command, command
from mulligan.workspace.exec.output import Sink, Spool, Spools, Stream
from mulligan.workspace.exec.pump import Handle
from mulligan.workspace.exec.run import Ran

CALL_VARIABLE = "MULLIGAN_CALL"
HOME_VARIABLE = "MULLIGAN_HOME"
_PAGE_BYTES = 1024 * 1024
_TIMEOUT_MAX_MS = 366 * 24 * 3_600_000
"""Longer than anybody waits, and short enough for every clock that is asked to."""

Fields = dict[str, Any]


def execute(scene: Scene, asked: params.Exec) -> Fields:
    """Run to the end of the last descendant. A non-zero exit is `ok`, unless `rollback_on` says otherwise."""
    if asked.background:
        return _start(scene, asked)
    asked_command = _command(scene, asked)
    spools = _Told(scene)
    try:
        return run(scene, asked_command, asked, sink=spools, answer=lambda: _outputs(scene, asked, spools))
    finally:
        spools.close()


class _Told(Spools):
    """Keeps what a command prints, and tells whoever listens as it comes."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(inline_bytes=scene.boundary.inline_limit)
        self._listener = scene.sink

    def write(self, stream: Stream, data: bytes) -> None:
        super().write(stream, data)
        if self._listener is not None:
            self._listener.write(stream, data)


def _start(scene: Scene, asked: params.Exec) -> Fields:
    """A call of its own, which ends when the last of the command's processes does."""
    facts = scene.whole.facts
    call = scene.desk.call(scene.session, turn=facts.turn, label=facts.label, tool="exec")
    own = replace(scene, whole=call, deadline=None)
    what = replace(_command(own, asked), background=True)
    spools = _Told(own)
    posted = Posted(call.id, scene.session, Handle(), spools)

    def work(handle: Handle) -> Fields:
        return _to_the_end(own, lambda: _run(own, what, asked, sink=spools, handle=handle, answer=dict))

    board_of(scene.desk).start(posted, work)
    return {"exec_id": call.id, "started_at_ns": _now_ns(scene)}


def _to_the_end(scene: Scene, run_it: Callable[[], Fields]) -> Fields:
    with scene.call:
        try:
            fields = run_it()
            answer = Receipt("host.exec", fields.pop("status", "ok"), fields).to_dict()
        except Refused as refused:
            answer = refusal_receipt("host.exec", refused).to_dict()
            scene.call.account.note_effect("host.exec", {"background": True}, answer)
            scene.call.abort(refused.code)
            return answer
        scene.call.account.note_effect("host.exec", {"background": True}, answer)
        return answer


def output(scene: Scene, asked: params.ExecOutput) -> Fields:
    """A page of what a command in the background has printed so far, and how it ended, if it did."""
    posted = _posted(scene, asked.exec_id)
    assert posted.spools is not None
    ended, spool = posted.receipt, posted.spools.stdout if asked.stream == "stdout" else posted.spools.stderr
    most = clamped(clamped(asked.max_bytes, scene.capability.max_read_bytes), scene.boundary.inline_limit) or 0
    page = spool.read(asked.offset_bytes, most)
    return {
        "content": inline(page),
        "offset_bytes": asked.offset_bytes,
        "size_bytes": spool.size_bytes,
        "running": ended is None,
        "result": ended,
    }


def send_signal(scene: Scene, asked: params.ExecSignal) -> Fields:
    if asked.signal not in SIGNALS:
        raise Refused("error", "invalid_params", f"signal is one of {', '.join(SIGNALS)}.")
    posted = _posted(scene, asked.exec_id)
    if not board_of(scene.desk).signal(posted, SIGNALS[asked.signal]):
        raise Refused("already_exited", "already_exited", f"Command {asked.exec_id} has ended.")
    return {"status": "signaled"}


def _posted(scene: Scene, exec_id: str) -> Posted:
    posted = board_of(scene.desk).find(exec_id)
    if posted is None or posted.session != scene.session or posted.spools is None:
        raise Refused("not_found", "exec_not_found", f"This session has no command {exec_id!r} in the background.")
    return posted


def shell(scene: Scene, asked: params.Shell) -> Fields:
    words = ["sh", "-c", asked.command]
    return execute(scene, params.Exec(argv=words, cwd=asked.cwd, timeout_ms=asked.timeout_ms))


def run(scene: Scene, what: Command, asked: params.Exec, *, sink: Sink, answer: Callable[[], Fields]) -> Fields:
    with board_of(scene.desk).running(scene.whole.id, scene.session) as handle:
        return _run(scene, what, asked, sink=sink, handle=handle, answer=answer)


def _run(
    scene: Scene, what: Command, asked: params.Exec, *, sink: Sink, handle: Handle, answer: Callable[[], Fields]
) -> Fields:
    limit_ms = _limit_ms(scene, asked)
    how = _how(asked, handle, limit_ms)
    before = {change.path: (change.before, change.after) for change in scene.call.changes()}
    started = _now_ns(scene)
    ran = run_in_call(scene.desk, scene.call, what, sink=sink, how=how)
    changes = [one for one in scene.call.changes() if before.get(one.path) != (one.before, one.after)]
    fields = {
        "exit_code": ran.exit_code,
        "signal": ran.signal,
        "started_at_ns": started,
        "ended_at_ns": _now_ns(scene),
        "strategy": ran.strategy,
        "strategy_reason": ran.strategy_reason,
        "attribution": ran.attribution,
        "sandbox": ran.sandbox,
        "changes": [_change(scene, change) for change in changes if not is_never_recorded(change)],
        "coverage": scene.call.gaps(),
        **({"rescued": [_rescued(scene, *one) for one in ran.given_way]} if ran.given_way else {}),
    }
    try:
        fields |= answer()
        _check_changes(scene, changes)
    except Refused as refused:
        refused.fields.update(fields)
        raise
    _judge(asked, ran, fields, limit_ms)
    return fields | {"coverage": scene.call.gaps()}


def _limit_ms(scene: Scene, asked: params.Exec) -> int | None:
    """How long it may run: what was asked for, and no longer than the call has time left."""
    if scene.deadline is None:
        return asked.limit_ms
    left = int((scene.deadline - scene.desk.ledger.clock.now()).total_seconds() * 1000)
    return max(1, left if asked.limit_ms is None else min(left, asked.limit_ms))


def _how(asked: params.Exec, handle: Handle, limit_ms: int | None) -> How:
    deadline = None if limit_ms is None else monotonic_s() + min(limit_ms, _TIMEOUT_MAX_MS) / 1000
    return How(asked.strategy, asked.isolate, deadline, handle, only_success=asked.rollback_on == "nonzero")


def _change(scene: Scene, change: Change) -> Fields:
    origin = {} if change.renamed_from is None else {"from": _shown(scene, change.renamed_from)}
    return {"path": _shown(scene, change.path), "kind": kind_of_change(change), **origin}


def _rescued(scene: Scene, path: bytes, digest: Digest) -> Fields:
    """What the command had there; somebody else's is there instead."""
    inner = path_from_bytes(os.path.relpath(path, scene.desk.disk.root.path))
    return {"path": _shown(scene, inner), "blob_ref": digest}


def _shown(scene: Scene, path: RepoPath) -> str:
    return to_wire(path) if scene.mount is None else scene.shown(path)


def _check_changes(scene: Scene, changes: Sequence[Change]) -> None:
    """What a session may not write it may not have a command write: then nothing stands of what the command did."""
    check_changed(scene.capability, len(changes))
    for change in changes:
        scene.boundary.check_path("write", change.path)
        if isinstance(change.after, FileEntry):
            check_size(scene.capability, change.after.size)


def _judge(asked: params.Exec, ran: Ran, fields: Fields, limit_ms: int | None) -> None:
    """What does not stand: a timeout, a cancel, and what `rollback_on` names. The receipt still says what happened."""
    if ran.timed_out:
        raise Refused("timeout", "timeout", f"The command ran longer than {limit_ms} ms.", **fields)
    if ran.cancelled:
        raise Refused("error", "cancelled", "The command was cancelled.", **fields)
    if asked.rollback_on == "nonzero" and ran.exit_code != 0:
        words = f"The command failed with exit code {ran.exit_code}; what it changed was put back."
        raise Refused("error", "nonzero_exit", words, **fields)
    if ran.signal is not None:
        fields["status"] = "signaled"


def _command(scene: Scene, asked: params.Exec) -> Command:
    """The session's environment and network rule hold for its commands as its boundary does for its files."""
    if not asked.argv:
        raise Refused("error", "argv_empty", "A command needs at least a program name.")
    cwd = _cwd(scene, asked.cwd)
    told = call_environment(scene.desk, scene.call)
    env = {**told, **scene.env.values(), **(asked.env or {}), CALL_VARIABLE: told[CALL_VARIABLE]}
    _check_words(asked.argv, env)
    stdin = _stdin(scene, asked)
    made = command(asked.argv, scene.desk.disk.root.path, cwd=cwd, env=env, stdin=stdin)
    network = "none" if scene.network == "none" else asked.network
    return replace(made, sandbox=asked.sandbox, network=network, stdin_fd=scene.stdin_fd if stdin is None else None)


def _cwd(scene: Scene, asked: str | None) -> RepoPath:
    """The folder by its real name, judged like a path to look at. Whether it is still there, who enters it will see."""
    with scene.spot("exec", scene.shown(scene.workdir) if asked is None else asked) as spot:
        if spot.outside:
            raise Refused("forbidden", "path_not_allowed", "A command runs inside the root.", path=asked)
        return spot.path


def call_environment(desk: Desk, call: Call) -> dict[str, str]:
    """What tells a Mulligan that a command starts which call it is part of, and where that is on record."""
    around, directory = desk.ledger.joins or (call.id, desk.ledger.store.directory)
    return {CALL_VARIABLE: around} | ({} if directory is None else {HOME_VARIABLE: directory})


def _check_words(argv: list[str], env: Mapping[str, str]) -> None:
    """What the kernel could not be given."""
    for word in (*argv, *env, *env.values()):
        try:
            data = os.fsencode(word)
        except UnicodeEncodeError:
            raise Refused("error", "invalid_params", "A word holds surrogates that are no byte.") from None
        if b"\0" in data:
            raise Refused("error", "invalid_params", "A command's words and variables cannot contain NUL.")
    if any(not name or "=" in name for name in env):
        raise Refused("error", "invalid_params", "env: a variable has a name, without '='.")


def _stdin(scene: Scene, asked: params.Exec) -> bytes | None:
    if asked.stdin is not None and asked.stdin_ref is not None:
        raise Refused("error", "invalid_params", "Give stdin or stdin_ref, not both.")
    if asked.stdin_ref is not None:
        return scene.blob(_reference(asked.stdin_ref), "stdin_ref_not_found")
    try:
        return None if asked.stdin is None else asked.stdin.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("error", "invalid_params", "stdin holds lone surrogates, which no UTF-8 text can.") from None


def _reference(text: str) -> str:
    try:
        return parse_digest(text)
    except MulliganError as error:
        raise Refused("error", "invalid_stdin_ref", error.message) from None


def _outputs(scene: Scene, asked: params.Exec, spools: Spools) -> Fields:
    """What fits is answered even if the other stream does not."""
    stdout = _output(scene, asked, spools.stdout)
    try:
        return {"stdout": stdout, "stderr": _output(scene, asked, spools.stderr)}
    except Refused as refused:
        refused.fields["stdout"] = stdout
        raise


def _output(scene: Scene, asked: params.Exec, spool: Spool) -> Fields | None:
    if spool.size_bytes == 0:
        return None
    whole = spool.inline()
    if whole is not None or scene.boundary.keeps_out_of_answers("exec", ROOT):
        whole = b"".join(_pages(spool)) if whole is None else whole
        return scene.answer(whole, op="exec", path=ROOT, mode=asked.output_mode)
    if asked.output_mode == "require_inline":
        raise too_large(scene.boundary.inline_limit)
    digest, kept = scene.desk.ledger.blobs.store_stream(_pages(spool))
    scene.whole.account.hand_out(digest)
    payload = {"blob_ref": digest, "size_bytes": kept, "preview_bytes": _base64(spool.head)}
    payload |= {"tail_bytes": _base64(spool.tail)}
    return {"blob": payload | ({"dropped_bytes": spool.dropped_bytes} if spool.dropped_bytes else {})}


def _pages(spool: Spool) -> Iterator[bytes]:
    """What was kept, a page at a time."""
    at = 0
    while page := spool.read(at, _PAGE_BYTES):
        yield page
        at += len(page)


def _base64(data: bytes) -> str:
    return "base64:" + b64encode(data).decode("ascii")


def _now_ns(scene: Scene) -> int:
    return int(scene.desk.ledger.clock.now().timestamp() * 1_000_000) * 1_000
