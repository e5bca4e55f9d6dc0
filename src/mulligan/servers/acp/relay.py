"""Stands between a client and its agent: every line is passed on as it came, and what it means to us is noted.

Two frames are changed: the answer to `initialize` gets our capabilities, and a prompt gets a block in front when the
model has to know of files that were put back. Requests for our ways back are answered here and never reach the agent.
Lines are held back only until what they depend on is on record, and never longer than `HELD_S`.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mulligan.history.kept import kernel_time_ns
from mulligan.servers.acp import sightings
from mulligan.servers.acp.errands import Errands
from mulligan.servers.acp.following import Follower, Live
from mulligan.servers.acp.returning import METHODS, PREFIX, STRICT_METHODS, WaysBack, param
from mulligan.servers.acp.sightings import Frame, folder_of
from mulligan.servers.acp.wire import BACKEND, INVALID_PARAMS, LINE_MAX_BYTES, AcpError, Later, LongLine, Params, Wire
from mulligan.values.canonical import decode, encode
from mulligan.values.faults import MulliganError
from mulligan.values.limits import MIB_BYTES
from mulligan.values.plain import plain

HELD_S = 2.0
QUIET_S = 1.0
_READ_S = 0.05
_MATTERS = re.compile(rb'tool_call|"id"')
_WAITS = ("session/request_permission", "fs/write_text_file", "terminal/create")
_LEARNT = ("session/new", "session/load", "session/resume", "session/fork")
_OUR_ID = "mulligan:fork:"


@plain(slots=True, frozen=True)
class Asked:
    """A request of the client that the agent has not answered yet."""

    method: str
    params: Params


class Between:
    def __init__(self, client: Wire, agent: Wire, follower: Follower) -> None:
        self._client, self._agent, self._follower = client, agent, follower
        self._errands = Errands(self._idle, follower.note_failure)
        self._asked: dict[object, Asked] = {}
        self._prompting: dict[str, int] = {}
        self._counting = threading.Lock()
        self._forks: dict[str, tuple[object, Params]] = {}
        self._fork_numbers = itertools.count(1)
        self._able: dict[str, Any] = {}
        self._announced: set[tuple[object, str]] = set()
        follower.is_more_announced = lambda: bool(self._announced)

    def end(self, reason: str, at_most_s: float) -> bool:
        """The agent is gone. Whether everything is on record."""
        self._errands.do(lambda: self._follower.end(reason))
        return self._errands.end(at_most_s)

    def _idle(self, rested: bool) -> float | None:
        """Reading goes on in small pieces; a look is due after a while without any word of a tool."""
        if self._follower.read_on(_READ_S):
            return 0.0
        if rested and self._prompting:
            self._follower.look_around()
        return QUIET_S if self._prompting else None

    # From the client.

    def from_client(self, line: bytes) -> None:
        passed = _guarded(self._client_said, line)
        if passed is not None:
            self._agent.pass_on(passed)

    def long_from_client(self, line: LongLine) -> None:
        _say_unread("client")
        self._agent.pass_on_long(line)

    def _client_said(self, line: bytes) -> bytes | None:
        """What the agent is to get of it."""
        frame = _read(line)
        method = frame.get("method")
        if not isinstance(method, str) or "id" not in frame:
            return line
        if self._is_ours(method):
            self._answer(frame)
            return None
        self._asked[_key(frame)] = Asked(method, _params(frame))
        return self._with_preface(frame, line) if method == "session/prompt" else line

    def _is_ours(self, method: str) -> bool:
        added = sightings.ADDED_CAPABILITIES.get(method)
        return method in STRICT_METHODS or (added is not None and added not in self._able)

    def _with_preface(self, frame: Frame, line: bytes) -> bytes:
        """Sent on when the files are known and the turn is on record."""
        params = _params(frame)
        session = str(params.get("sessionId"))
        self._count(session, +1)
        text = sightings.text_of_prompt(params)
        told = self._errands.do(lambda: self._follower.prompt(session, text)).wait(2 * HELD_S)
        if told is None or not isinstance(params.get("prompt"), list):
            return line
        try:
            return encode(sightings.with_preface(frame, told)) + b"\n"
        except MulliganError:
            return line

    def _count(self, session: str, by: int) -> None:
        with self._counting:
            left = self._prompting.get(session, 0) + by
            self._prompting = {**self._prompting, session: left}
            if left <= 0:
                self._prompting.pop(session)

    # Ways back.

    def _answer(self, frame: Frame) -> None:
        """In its turn: after everything that was told before."""
        method, params = frame["method"], _params(frame)
        busy = str(param(params, "sessionId", required=False)) in self._prompting
        if method == "session/fork":
            self._errands.do(lambda: self._fork(frame))
            return
        back, strict = (STRICT_METHODS[method], True) if method.startswith(PREFIX) else (METHODS[method], False)
        self._errands.do(
            lambda: self._client.answer(frame, lambda *_: self._go_back(back, params, strict=strict, busy=busy))
        )

    def _go_back(self, back: Callable[[WaysBack, Params], Any], params: Params, *, strict: bool, busy: bool) -> Any:
        live = self._live(params)
        if busy:
            raise AcpError(BACKEND, "prompt_active", {"status": "prompt_active"})
        session = param(params, "sessionId")
        ways = WaysBack(live.session, lambda update: self._tell(session, update), strict)
        try:
            # The talk is the agent's, and stays.
            done = back(ways, {**params, "talk": False})
            return done if isinstance(done, Later) else dict(done)
        finally:
            live.ground.look()

    def _live(self, params: Params) -> Live:
        live = self._follower.find(param(params, "sessionId"))
        if live is None:
            raise AcpError(INVALID_PARAMS, "Unknown session.", {"status": "unknown_session"})
        return live

    def _tell(self, session: str, update: Mapping[str, Any]) -> None:
        meta = {name: {**about, "talk": "kept"} for name, about in update["_meta"].items()}
        self._client.notify("session/update", {"sessionId": session, "update": {**update, "_meta": meta}})

    # Forks, for agents that cannot: a new session of the agent's that is told what the other one was about.

    def _fork(self, frame: Frame) -> None:
        params = _params(frame)
        try:
            parent = self._live(params)
        except (AcpError, MulliganError) as error:
            self._client.refuse(frame, error)
            return
        name = f"{_OUR_ID}{next(self._fork_numbers)}"
        self._forks[name] = (frame["id"], params)
        wanted = {"cwd": params.get("cwd") or parent.session.root, "mcpServers": params.get("mcpServers", [])}
        self._agent.pass_on(encode({"jsonrpc": "2.0", "id": name, "method": "session/new", "params": wanted}) + b"\n")

    def _forked(self, frame: Frame) -> bytes:
        id, params = self._forks.pop(frame["id"])
        result = frame.get("result")
        if not isinstance(result, dict):
            return encode({**frame, "id": id}) + b"\n"
        parent, child = param(params, "sessionId", required=False), str(result.get("sessionId"))
        follow = partial(self._follower.fork, str(parent), child, folder_of(params), talk_is_known=False)
        self._errands.do(follow).wait(HELD_S)
        answer = {**result, "parent_id": parent, "state": "forked"}
        return encode({"jsonrpc": "2.0", "id": id, "result": answer}) + b"\n"

    # From the agent.

    def from_agent(self, line: bytes) -> None:
        passed = _guarded(self._agent_said, line)
        self._client.pass_on(passed if passed is not None else line)

    def long_from_agent(self, line: LongLine) -> None:
        _say_unread("agent")
        self._client.pass_on_long(line)

    def _agent_said(self, line: bytes) -> bytes:
        """What the client is to get of it."""
        frame = _read(line) if _MATTERS.search(line) else {}
        method = frame.get("method")
        if method == "session/update":
            self._updated(_params(frame), "update")
        elif method in _WAITS:
            self._updated(_params(frame), "toolCall")
            self._errands.wait(HELD_S)
        elif method is None and isinstance(frame.get("id"), str) and frame["id"] in self._forks:
            return self._forked(frame)
        elif method is None and "id" in frame and (asked := self._asked.pop(_key(frame), None)) is not None:
            return self._answered(asked, frame, line)
        return line

    def _updated(self, params: Params, where: str) -> None:
        update, session = params.get(where), params.get("sessionId")
        if isinstance(update, dict) and isinstance(session, str) and "toolCallId" in update:
            self._note(session, update)
            heard_ns = kernel_time_ns()
            self._errands.do(lambda: self._follower.tool(session, update, heard_ns))

    def _note(self, session: str, update: Frame) -> None:
        """At once, and not in its turn: who looks at files now has to know who may be changing them."""
        key = (session, str(update["toolCallId"]))
        if update.get("status") in sightings.OVER:
            self._announced.discard(key)
        elif update.get("kind") in sightings.ONLY_LOOK:
            return
        elif update.get("sessionUpdate") != "tool_call_update" and session in self._prompting:
            self._announced.add(key)

    def _answered(self, asked: Asked, frame: Frame, line: bytes) -> bytes:
        """The line to pass on, when what it tells is on record."""
        session = asked.params.get("sessionId")
        if asked.method == "session/prompt":
            self._count(str(session), -1)
            self._announced = {one for one in self._announced if one[0] != session}
            self._errands.do(lambda: self._follower.answered(str(session))).wait(HELD_S)
        elif asked.method == "initialize" and isinstance(frame.get("result"), dict):
            return self._introduced(frame, line)
        elif asked.method in _LEARNT and "error" not in frame:
            self._learn(asked, frame)
        elif asked.method in ("session/close", "session/delete") and "error" not in frame:
            self._errands.do(lambda: self._follower.close(str(session))).wait(HELD_S)
        return line

    def _introduced(self, frame: Frame, line: bytes) -> bytes:
        self._able = sightings.capabilities_of(frame)
        try:
            return encode(sightings.with_ours(frame)) + b"\n"
        except MulliganError:
            return line

    def _learn(self, asked: Asked, frame: Frame) -> None:
        result = frame.get("result")
        given = result.get("sessionId") if isinstance(result, dict) else None
        folder, known = folder_of(asked.params), asked.params.get("sessionId")
        if asked.method == "session/fork" and isinstance(given, str):
            self._errands.do(lambda: self._follower.fork(str(known), given, folder)).wait(HELD_S)
            return
        session = given if isinstance(given, str) else known
        if folder is not None and isinstance(session, str):
            self._errands.do(lambda: self._follower.attach(session, folder)).wait(HELD_S)


def _say_unread(sender: str) -> None:
    limit = f"{LINE_MAX_BYTES // MIB_BYTES} MiB"
    words = f"mulligan: a line of the {sender} has more than {limit}; it was passed on unread, and is not on record."
    print(words, file=sys.stderr, flush=True)


def _guarded(said: Callable[[bytes], bytes | None], line: bytes) -> bytes | None:
    """Whatever is wrong with us, the line is passed on."""
    try:
        return said(line)
    except Exception:  # noqa: BLE001  # the top of a server: an agent must not stop because we cannot follow it
        traceback.print_exc()
        return line


def _read(line: bytes) -> Frame:
    """A frame; nothing, if the line is none."""
    try:
        found = decode(line)
    except MulliganError:
        return {}
    return found if isinstance(found, dict) else {}


def _params(frame: Frame) -> Params:
    found = frame.get("params")
    return found if isinstance(found, dict) else {}


def _key(frame: Frame) -> object:
    id = frame.get("id")
    return (type(id).__name__, id) if isinstance(id, str | int | float) else None
