"""host.exec: a command inside the transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mulligan.effects import params
from mulligan.effects.scene import Scene, too_large
from mulligan.history.running import How, run_in_call
from mulligan.values.clock import monotonic_s
from mulligan.values.entries import Change, kind_of_change
from mulligan.values.paths import ROOT, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.command import Command, command
from mulligan.workspace.exec.output import Sink, Spool, Spools, Stream
from mulligan.workspace.exec.run import Ran

CALL_VARIABLE = "MULLIGAN_CALL"
_PAGE_BYTES = 1024 * 1024

Fields = dict[str, Any]


def execute(scene: Scene, asked: params.Exec) -> Fields:
    """Run to the end of the last descendant. A non-zero exit is `ok`, unless `rollback_on` says otherwise."""
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


def shell(scene: Scene, asked: params.Shell) -> Fields:
    words = ["sh", "-c", asked.command]
    return execute(scene, params.Exec(argv=words, cwd=asked.cwd, timeout_ms=asked.timeout_ms))


def run(scene: Scene, what: Command, asked: params.Exec, *, sink: Sink, answer: Callable[[], Fields]) -> Fields:
    deadline = None if asked.timeout_ms is None else monotonic_s() + asked.timeout_ms / 1000
    how = How(asked.strategy, asked.isolate, deadline)
    before = {change.path: change for change in scene.call.changes()}
    started = _now_ns(scene)
    ran = run_in_call(scene.desk, scene.call, what, sink=sink, how=how)
    changes = [change for change in scene.call.changes() if before.get(change.path) != change]
    fields = {
        "exit_code": ran.exit_code,
        "started_at_ns": started,
        "ended_at_ns": _now_ns(scene),
        "strategy": ran.strategy,
        "strategy_reason": ran.strategy_reason,
        "sandbox": ran.sandbox,
        "changes": [_change(change) for change in changes],
        "coverage": list(scene.call.coverage),
        **answer(),
    }
    _judge(asked, ran, fields)
    return fields


def _change(change: Change) -> Fields:
    return {"path": to_wire(change.path), "kind": kind_of_change(change)}


def _judge(asked: params.Exec, ran: Ran, fields: Fields) -> None:
    """What does not stand: a timeout, a cancel, and what `rollback_on` names. The receipt still says what happened."""
    if ran.timed_out:
        raise Refused("timeout", "timeout", f"The command ran longer than {asked.timeout_ms} ms.", **fields)
    if ran.cancelled:
        raise Refused("error", "cancelled", "The command was cancelled.", **fields)
    if asked.rollback_on == "nonzero" and ran.exit_code != 0:
        words = f"The command failed with exit code {ran.exit_code}; what it changed was put back."
        raise Refused("error", "nonzero_exit", words, **fields)
    if ran.signal is not None:
        fields["status"] = "signaled"


def _command(scene: Scene, asked: params.Exec) -> Command:
    from dataclasses import replace

    stdin = asked.stdin.encode("utf-8") if asked.stdin is not None else None
    if asked.stdin_ref is not None:
        stdin = scene.blob(asked.stdin_ref, "stdin_ref_not_found")
    env = {**(asked.env or {}), CALL_VARIABLE: scene.call.id}
    cwd = asked.cwd if asked.cwd is not None else str(scene.workdir)
    made = command(asked.argv, scene.desk.disk.root.path, cwd=cwd, env=env, stdin=stdin)
    return replace(made, sandbox=asked.sandbox, network=asked.network)


def _outputs(scene: Scene, asked: params.Exec, spools: Spools) -> Fields:
    return {
        "stdout": _output(scene, asked, spools.stdout),
        "stderr": _output(scene, asked, spools.stderr),
    }


def _output(scene: Scene, asked: params.Exec, spool: Spool) -> Fields | None:
    if spool.size_bytes == 0:
        return None
    whole = spool.inline()
    if whole is not None:
        return scene.answer(whole, op="exec", path=ROOT, mode=asked.output_mode)
    if asked.output_mode == "require_inline":
        raise too_large(spool.size_bytes, scene.boundary.inline_limit)
    digest, kept = scene.desk.ledger.blobs.store_stream(_pages(spool))
    scene.call.hand_out(digest)
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
    from base64 import b64encode

    return "base64:" + b64encode(data).decode("ascii")


def _now_ns(scene: Scene) -> int:
    return int(scene.desk.ledger.clock.now().timestamp() * 1_000_000) * 1_000
