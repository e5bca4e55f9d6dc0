"""`mulligan acp -- COMMAND…`: another agent, with us between it and its client.

To both of them we are as good as not there. The agent's exit code is ours, and so are the signals we get; its error
output goes where ours would; it ends when the client hangs up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO, Any

from mulligan.servers.acp.between import Between
from mulligan.servers.acp.following import Follower
from mulligan.servers.acp.wire import METHOD_NOT_FOUND, AcpError, LongLine, Params, Wire, lines_of
from mulligan.servers.acp.workspaces import Workspaces

NOT_FOUND_CODE, NOT_RUNNABLE_CODE = 127, 126
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_GRACE_S = 5.0
_LAST_WORDS_S = 2.0


def run_proxy(command: Sequence[str], *, workspaces: Workspaces, root: str | None = None) -> int:
    """Until the agent ends; its exit code. With a `root`, every session is on record there, whatever its folder."""
    try:
        agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        print(f"mulligan: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND_CODE if isinstance(error, FileNotFoundError) else NOT_RUNNABLE_CODE
    for number in _SIGNALS:
        signal.signal(number, _passing_on(agent))
    assert agent.stdin is not None and agent.stdout is not None
    # Names of our own for the pipes: a thread that still reads when we end must not hold the interpreter's.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    client = Wire(incoming, outgoing, _nobody)
    follower = Follower(workspaces, pid=agent.pid, root=root)
    between = Between(client, Wire(agent.stdout, agent.stdin, _nobody), follower)
    _pump(incoming, between.from_client, between.long_from_client, lambda: _end(agent))
    heard = _pump(agent.stdout, between.from_agent, between.long_from_agent, lambda: None)
    code = agent.wait()
    # Children of the agent's may hold its pipe open for as long as they like.
    heard.join(_LAST_WORDS_S)
    between.end("agent_died" if code else "session_ended", _GRACE_S)
    return code if code >= 0 else 128 - code


def _nobody(method: str, params: Params) -> Any:
    raise AcpError(METHOD_NOT_FOUND, "Method not found", {"method": method})


def _passing_on(agent: subprocess.Popen[bytes]) -> Callable[[int, FrameType | None], None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        agent.send_signal(number)

    return pass_on


def _pump(
    source: IO[bytes],
    take: Callable[[bytes], None],
    take_long: Callable[[LongLine], None],
    at_end: Callable[[], None],
) -> threading.Thread:
    def run() -> None:
        for line in lines_of(source):
            if isinstance(line, LongLine):
                take_long(line)
            else:
                take(line)
        at_end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _end(agent: subprocess.Popen[bytes]) -> None:
    """The client has hung up: the agent hears it, is asked to go, and is made to."""
    assert agent.stdin is not None
    for act in (agent.stdin.close, agent.terminate, agent.kill):
        try:
            act()
            agent.wait(_GRACE_S)
            return
        except (subprocess.TimeoutExpired, BrokenPipeError):
            continue
