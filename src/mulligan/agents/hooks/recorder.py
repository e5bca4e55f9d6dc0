"""Records what hooked agents do in one root: their tools as observed calls, their prompts as turns.

`parse_event` turns what an agent's hook got into a `HookEvent`; the tables below are all that this module knows about
each agent. A tool that no table names may change anything. `Dispatcher` gives each event to the recorder of its root,
which has one thread and handles events in order.

An event that arrives twice changes nothing: a hook may be installed for a user and for a project, and a lost event may
still arrive. A `late` event says only that something happened: the changes since then go to the first call that ends,
and that call's coverage says that its beginning was missed.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal

from mulligan.agents.hooks.client import COMMANDS, TYPED_WAIT_S, recorded_input
from mulligan.agents.hooks.socket import Spool
from mulligan.history import observe
from mulligan.history.baseline import Baseline
from mulligan.history.ledger import STORE_FULL
from mulligan.history.observe import LeftRunning, Note, Observed
from mulligan.history.open_root import OpenRoot
from mulligan.history.tables import AGENT, CALLS, OPEN, TURNS, CallRow
from mulligan.hosts.news import News
from mulligan.hosts.settings import READ_ONLY_TOOLS
from mulligan.hosts.typed import TypedCommand, answer, parse_typed, still_running
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import monotonic_s
from mulligan.values.errors import InternalError, MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId, SessionId, TurnId

Kind = Literal["pre", "post", "failure", "prompt", "stop", "session_start", "session_end", "reverted"]

KIND_OF: Mapping[str, Kind] = MappingProxyType(
    {
        "PreToolUse": "pre",
        "PostToolUse": "post",
        "PostToolUseFailure": "failure",
        "UserPromptSubmit": "prompt",
        "Stop": "stop",
        "StopFailure": "stop",
        "Interrupt": "stop",
        "SessionStart": "session_start",
        "SessionEnd": "session_end",
        "BeforeTool": "pre",
        "AfterTool": "post",
        "BeforeAgent": "prompt",
        "AfterAgent": "stop",
        "HostReverted": "reverted",
    }
)

_PATH_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Edit": ("file_path",),
        "MultiEdit": ("file_path",),
        "Write": ("file_path",),
        "NotebookEdit": ("notebook_path",),
        "replace": ("file_path",),
        "write_file": ("file_path",),
    }
)
_PATCH_TARGET = re.compile(r"^\*\*\* (?:Add File|Update File|Delete File|Move to): (.+?)\s*$", re.MULTILINE)
_PROMPT_MAX = 100_000


@fast_dataclass(slots=True, frozen=True)
class HookEvent:
    """What a hook reports. `worker` is the id of the subagent that works, if it is not the main agent."""

    agent: str
    kind: Kind
    session: str
    cwd: str
    turn: str | None = None
    label: str | None = None
    tool: str | None = None
    input: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    transcript: str | None = None
    worker: str | None = None
    failed: str | None = None
    answers: bool = False
    """The hook may answer prompts: `mulligan install` installed it together with the host's commands."""

    @property
    def typed(self) -> TypedCommand | None:
        """The command in the prompt, if the person typed one."""
        return None if self.kind != "prompt" or self.prompt is None else parse_typed(self.agent, self.prompt)

    @property
    def is_read_only(self) -> bool:
        return self.tool in READ_ONLY_TOOLS

    def paths(self) -> list[str] | None:
        """The absolute paths of the files that the tool will change; None if Mulligan cannot tell."""
        if self.tool == "apply_patch":
            named = _PATCH_TARGET.findall(_text(self.input.get("command")) or _text(self.input.get("input")) or "")
            return [self._absolute(name) for name in named] or None
        keys = _PATH_KEYS.get(self.tool or "")
        found = [path for key in keys or () if (path := _text(self.input.get(key)))]
        return [self._absolute(path) for path in found] or None

    def _absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.cwd, path))

    @property
    def command(self) -> str | None:
        """The shell command, for `mulligan show`."""
        text = _text(self.input.get("command")) or _text(self.input.get("cmd"))
        return None if text is None or self.tool == "apply_patch" else text


_NOT_TYPED_PROMPTS = ("<task-notification>",)
"""How prompts begin that the host itself sends to its model."""


def parse_event(hook: str, raw: bytes) -> HookEvent | None:
    """The event in a hook's input; None for an event that Mulligan does not record. Raises `invalid_params`.

    `hook` is the agent, and `:commands` if the hook may answer prompts.
    """
    agent, _, extra = hook.partition(":")
    try:
        body = decode(raw)
    except MulliganError:
        raise fault("invalid_params", f"The input of the hook of {agent} is not JSON.") from None
    kind = KIND_OF.get(body.get("hook_event_name", "")) if isinstance(body, dict) else None
    session = _text(body.get("session_id")) if kind is not None else None
    cwd = _text(body.get("cwd")) if kind is not None else None
    if kind is None or session is None or cwd is None or not os.path.isabs(cwd):
        return None
    prompt = _text(body.get("prompt"))
    if kind == "prompt" and (body.get("agent_id") or (prompt or "").startswith(_NOT_TYPED_PROMPTS)):
        # A subagent's task, or the end of a background command: no person has typed, so no turn begins.
        return None
    return HookEvent(
        agent=agent,
        kind=kind,
        session=_id(session),
        cwd=cwd,
        turn=_optional_id(body.get("prompt_id") or body.get("turn_id")),
        label=_optional_id(body.get("tool_use_id")),
        tool=_optional_id(body.get("tool_name")),
        input=recorded_input(body.get("tool_name"), body.get("tool_input")),
        prompt=None if prompt is None else prompt[:_PROMPT_MAX],
        transcript=_text(body.get("transcript_path")),
        worker=_optional_id(body.get("agent_id")),
        failed=(_text(body.get("error")) or "failed")[:200] if kind == "failure" else None,
        answers=extra == COMMANDS,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _optional_id(value: object) -> str | None:
    return None if _text(value) is None else _id(str(value))


def _id(text: str) -> str:
    """An agent's id as one that Mulligan accepts: agents choose their ids freely."""
    return "".join(char if char.isprintable() else "?" for char in text)[:256].strip() or "?"


_LATER_WAITS_S = 0.02
TYPED_ANSWER_S = 4.0
"""When the person gets an answer to a typed command, be it that Mulligan still works on it."""
_BLOCKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "claude": {"decision": "block", "hookSpecificOutput": {"suppressOriginalPrompt": True}},
        "codex": {"decision": "block"},
        "gemini": {"decision": "deny"},
        "opencode": {"decision": "block"},
    }
)
"""What each host takes as the answer of its prompt hook that stops the prompt before the model."""


def prompt_event_of(agent: str) -> str:
    return "BeforeAgent" if agent == "gemini" else "UserPromptSubmit"


def stop_prompt(agent: str, text: str) -> bytes:
    """The hook's answer that shows the text to the person and sends nothing to the model."""
    body = {**_BLOCKS[agent], "reason": text}
    if "hookSpecificOutput" in body:
        body["hookSpecificOutput"] = {**body["hookSpecificOutput"], "hookEventName": prompt_event_of(agent)}
    return encode(body)


def tell_model(agent: str, text: str) -> bytes:
    """The hook's answer that adds the text to the prompt, for the model alone."""
    return encode({"hookSpecificOutput": {"hookEventName": prompt_event_of(agent), "additionalContext": text}})


MISSED: Note = {"path": ".", "reason": "hook_missed"}
LATE: Note = {"path": ".", "reason": "hook_late"}
END_MISSED: Note = {"path": ".", "reason": "end_missed"}
_SILENT_AGENTS = frozenset({"codex"})
"""Agents that report no end of some calls: of a command in the background, of a patch that is written as a command."""


class Recorder:
    """Records the events of one root. Use it from one thread at a time, and close it; the caller owns the root.

    `told` is the folder that remembers what models have been told; None: Mulligan tells them nothing.
    """

    def __init__(self, open_root: OpenRoot, told: str | None = None) -> None:
        self._open_root = open_root
        self._news = None if told is None else News(open_root, told)
        self._tree = Baseline(open_root)
        self._left = LeftRunning(open_root)
        self._notes: dict[CallId, list[Note]] = {}
        self._patience_s = float("inf")
        self._was_full = False
        self._typed: tuple[str, str | None, str | None] | None = None
        self._typed_answer = b""

    def handle(self, event: HookEvent, *, until: float, pid: int = 0, late: bool = False) -> bytes:
        """Records an event. On return, all that must be durable before the agent goes on is, if `until` allows.

        Returns what the hook answers to its host; empty: nothing.
        """
        try:
            if (typed := event.typed) is not None:
                # The host has sent a late command to the model already. A hook that may not answer leaves a command
                # to the hook that may: both can be installed.
                return self._run_typed(event, typed) if event.answers and not late else b""
            _HANDLERS[event.kind](self, event, until, pid if not late else -1)
            return self._tell_news(event, until) if event.kind == "prompt" and not late else b""
        except MulliganError as error:
            # The coverage of the next recorded call says so.
            self._was_full |= error.code == "no_space"
            raise

    @property
    def is_settled(self) -> bool:
        return self._tree.is_complete

    def go_on(self, until: float) -> None:
        """Continues to read the tree while no agent waits."""
        self._tree.read_contents(until)

    @property
    def is_waiting(self) -> bool:
        """Whether a process of a command still runs."""
        return self._left.is_any

    def watch(self) -> None:
        """Records the last changes of processes that have ended: what changes later is another one's doing."""
        if self._left.ended():
            self._record_changes()

    def _record_changes(self, *, full: bool = False, by_host: bool = False) -> None:
        """Records what changed outside of every call."""
        ended = self._left.ended()
        observe.record_changes(self._open_root, self._tree, full=full, left=self._left, by_host=by_host)
        self._left.drop(ended)

    def has_open_calls(self) -> bool:
        with self._open_root.ledger.store.read() as tx:
            return any(row.owner == AGENT and row.root == self._open_root.root.id for row in tx.select(OPEN))

    def sweep(self) -> None:
        """Ends the calls of agents that have died."""
        with self._open_root.ledger.store.read() as tx:
            here = [row.call for row in tx.select(OPEN) if row.owner == AGENT and row.root == self._open_root.root.id]
            gone = [call for call in here if (row := tx.get(CALLS, call)) and not observe.is_agent_alive(row)]
        for call in gone:
            self._finish(CallId(call), reason="agent_died")

    def close(self) -> None:
        self._tree.close()

    # Tools.

    def _before_tool(self, event: HookEvent, until: float, pid: int) -> None:
        if event.is_read_only or pid < 0 or (event.label is not None and self._open_call(event) is not None):
            return
        if event.agent in _SILENT_AGENTS:
            self._end_silent_calls(event)
        observed, notes = self._observed(event, pid)
        ended = self._left.ended()
        call = observe.begin(self._open_root, observed, self._tree, left=self._left)
        self._left.drop(ended)
        if monotonic_s() > until:
            notes.append(LATE)
        self._notes[call] = notes
        if observed.paths is None:
            self._tree.read_contents(min(until, monotonic_s() + self._patience_s))
            # The agent waits long only once, for the first read of the tree; later reads happen while it works.
            self._patience_s = _LATER_WAITS_S

    def _end_silent_calls(self, event: HookEvent) -> None:
        """Ends the calls of the same agent whose command does not run any more."""
        with self._open_root.ledger.store.read() as tx:
            rows = [row for row in _open_calls(tx, event.session) if row.root == self._open_root.root.id]
        for row in rows:
            tool = observe.tool_of(row)
            is_own = tool.about.get("worker") == event.worker and tool.pid is not None
            if is_own and not observe.left_by(self._open_root, row):
                self._notes.setdefault(CallId(row.id), []).append(END_MISSED)
                self._finish(CallId(row.id), reason=None)

    def _has_ended(self, event: HookEvent) -> bool:
        """Whether a hook has already reported the end of this call. An agent may reuse an id in another turn."""
        where = {"session": event.session, "label": event.label}
        with self._open_root.ledger.store.read() as tx:
            rows = [] if event.label is None else tx.select(CALLS, where, order=("id",), descending=True, limit=1)
        return any(row.observed and row.turn == event.turn for row in rows)

    def _observed(self, event: HookEvent, pid: int) -> tuple[Observed, list[Note]]:
        named = event.paths()
        found = {one: self._open_root.disk.root.find(one) for one in named or ()}
        inside = None if named is None else [path for path in found.values() if path is not None]
        outside = [one for one, path in found.items() if path is None]
        notes: list[Note] = [{"path": one, "reason": "outside_root"} for one in outside]
        about = {
            "agent": event.agent,
            "key": _key(event),
            "transcript": event.transcript,
            "worker": event.worker,
            "command": event.command,
        }
        with self._open_root.ledger.store.read() as tx:
            turn = event.turn or _open_turn(tx, event.session)
        observed = Observed(
            session=SessionId(event.session),
            tool=event.tool or "tool",
            turn=None if turn is None else TurnId(turn),
            label=event.label,
            paths=inside,
            pid=max(0, pid),
            about={name: value for name, value in about.items() if value is not None},
        )
        return observed, notes

    def _after_tool(self, event: HookEvent, until: float, pid: int) -> None:
        if event.is_read_only:
            return
        call = self._open_call(event)
        if call is None and self._has_ended(event):
            return
        if call is None:
            # The tool has already changed its files, so only a scan of the tree can find the changes.
            observed, notes = self._observed(event, pid)
            call = observe.begin(self._open_root, replace(observed, paths=None), earlier_scan=observe.UNANNOUNCED)
            self._notes[call] = [*notes, MISSED]
        self._finish(call, reason=self._reason(event))

    def _reason(self, event: HookEvent) -> str | None:
        """Why the tool failed. An error about a path that is not captured may quote its contents."""
        capture = self._open_root.disk.capture
        inside = [self._open_root.disk.root.find(path) for path in event.paths() or ()] if capture.any else []
        withheld = any(path is not None and capture.withheld(path) for path in inside)
        return "failed" if withheld and event.failed else event.failed

    def _open_call(self, event: HookEvent) -> CallId | None:
        """The open call with the agent's id; without an id, the oldest one of the same tool, paths and command."""
        with self._open_root.ledger.store.read() as tx:
            rows = [row for row in _open_calls(tx, event.session) if row.label == event.label]
        same = [row for row in rows if event.label is not None or observe.tool_of(row).about.get("key") == _key(event)]
        return CallId(min(row.id for row in same)) if same else None

    def _finish(self, call: CallId, *, reason: str | None) -> None:
        notes = [*self._notes.get(call, []), *([STORE_FULL] if self._was_full else [])]
        observe.finish(self._open_root, call, self._tree, reason=reason, notes=notes, left=self._left)
        self._notes.pop(call, None)
        self._was_full = False

    # Turns and sessions.

    def _prompt(self, event: HookEvent, until: float, pid: int) -> None:
        """A new prompt ends all earlier calls and turns of the session, even if no hook reported their end."""
        session = SessionId(event.session)
        with self._open_root.ledger.store.read() as tx:
            known = tx.get(TURNS, event.session, event.turn) if event.turn is not None else None
        if known is not None and known.opened:
            return
        self._over(event, reason="interrupted")
        turn = TurnId(event.turn or self._open_root.ledger.ids.new())
        observe.open_turn(self._open_root, session, turn, event.prompt, pid=max(0, pid))

    def _run_typed(self, event: HookEvent, command: TypedCommand) -> bytes:
        """Runs a command that the person typed. It begins no turn, but it ends a turn that the person interrupted.

        Two hooks may report the same prompt: both get the same answer.
        """
        prompt = (event.session, event.turn, event.prompt)
        if event.turn is None or self._typed != prompt:
            self._over(event, reason="interrupted")
            self._record_changes()
            text = answer(self._open_root, event.session, command, event.cwd)
            self._typed, self._typed_answer = prompt, stop_prompt(event.agent, text)
        return self._typed_answer

    def _tell_news(self, event: HookEvent, until: float) -> bytes:
        """The news for the model. If the host may no longer wait, the next prompt has them."""
        if self._news is None or not event.answers or monotonic_s() > until:
            return b""
        if self._tree.is_complete:
            self._record_changes()
        text = self._news.tell(SessionId(event.session))
        return b"" if text is None else tell_model(event.agent, text)

    def _stop(self, event: HookEvent, until: float, pid: int) -> None:
        self._over(event, reason="stopped")
        self._record_changes(full=True)

    def _session_end(self, event: HookEvent, until: float, pid: int) -> None:
        self._over(event, reason="session_ended", workers=True)

    def _over(self, event: HookEvent, *, reason: str, workers: bool = False) -> None:
        """Ends open calls, then open turns. Calls of subagents, which may still work, end only with `workers`."""
        with self._open_root.ledger.store.read() as tx:
            rows = [row for row in _open_calls(tx, event.session) if row.root == self._open_root.root.id]
            turns = [row.id for row in tx.select(TURNS, {"session": event.session}) if row.opened and not row.ended_at]
        for row in rows:
            if workers or not observe.tool_of(row).about.get("worker"):
                self._notes.setdefault(CallId(row.id), []).append(END_MISSED)
                self._finish(CallId(row.id), reason=reason)
        for turn in turns:
            observe.end_turn(self._open_root, SessionId(event.session), TurnId(turn))

    def _reverted(self, event: HookEvent, until: float, pid: int) -> None:
        """The host says that its own undo has changed files."""
        self._record_changes(full=True, by_host=True)

    def _session_start(self, event: HookEvent, until: float, pid: int) -> None:
        """Begins to scan the tree before the first tool call needs it."""
        self._record_changes()


_HANDLERS: Mapping[Kind, Callable[[Recorder, HookEvent, float, int], None]] = MappingProxyType(
    {
        "pre": Recorder._before_tool,
        "post": Recorder._after_tool,
        "failure": Recorder._after_tool,
        "prompt": Recorder._prompt,
        "stop": Recorder._stop,
        "session_start": Recorder._session_start,
        "session_end": Recorder._session_end,
        "reverted": Recorder._reverted,
    }
)


def _open_calls(tx: Tx, session: str) -> list[CallRow]:
    rows = [tx.get(CALLS, row.call) for row in tx.select(OPEN) if row.owner == AGENT and row.session == session]
    return [row for row in rows if row is not None]


def _open_turn(tx: Tx, session: str) -> str | None:
    rows = [row for row in tx.select(TURNS, {"session": session}) if row.is_open]
    return max(rows, key=lambda row: row.started_at).id if rows else None


def _key(event: HookEvent) -> str | None:
    """Identifies a tool call to which the agent gives no id, by tool, paths and command."""
    if event.label is not None:
        return None
    return sha256(encode([event.tool, event.input])).hexdigest()[:32]


TROUBLE = "trouble.txt"
TOLD = "told"
"""The folder beside the store that remembers what models have been told."""
_ON_THE_WAY_S = 0.6
"""The part of a hook's waiting time that is reserved for starting the hook and for its answer."""

_TICK_S = 1.0
_SLICE_S = 0.05
_REMEMBERED_MAX = 1000
_SHELLS = frozenset({b"sh", b"bash", b"dash", b"zsh", b"ash", b"busybox"})

DONE, FAILED = b"0", b"1"

OpenRecorder = Callable[[HookEvent, str], Recorder]
"""Finds the recorder for an event and the agent's project folder, and opens the root if needed."""


@fast_dataclass(slots=True, frozen=True)
class Message:
    """What a hook sends: the agent, its project, the process, the time, how long the hook waits, and its raw input."""

    identity: bytes
    agent: str
    project: str
    pid: int
    sent_ns: int
    wait_s: float
    raw: bytes

    @property
    def is_late(self) -> bool:
        """Whether the agent has stopped waiting."""
        return self.age_s > self.wait_s

    @property
    def answer_s(self) -> float:
        return max(0.05, self.wait_s - _ON_THE_WAY_S)

    @property
    def typed_answer_s(self) -> float:
        """How long a person waits from now on for the answer to a command. The user may have chosen more patience."""
        return self.answer_s if self.wait_s > TYPED_WAIT_S else max(0.05, TYPED_ANSWER_S - _ON_THE_WAY_S - self.age_s)

    @property
    def age_s(self) -> float:
        return (time.clock_gettime_ns(time.CLOCK_REALTIME) - self.sent_ns) / 1e9


def parse_message(data: bytes) -> Message | None:
    head, _, raw = data.partition(b"\n")
    fields = head.split(b" ")
    if len(fields) != 6 or fields[0] != b"1":
        return None
    try:
        project = b"" if fields[2] == b"-" else bytes.fromhex(fields[2].decode("ascii"))
        pid, sent_ns, wait_ms = map(int, fields[3:])
        return Message(head, fields[1].decode("ascii"), os.fsdecode(project), pid, sent_ns, wait_ms / 1000, raw)
    except ValueError:
        return None


@fast_dataclass(slots=True)
class QueuedEvent:
    """One event in the queue of its recorder."""

    event: HookEvent
    until: float
    pid: int = 0
    late: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    answer: bytes = b""


class RecorderThread:
    """A recorder and its thread. It handles events in order and reads the tree in between."""

    def __init__(self, recorder: Recorder, tell: Callable[[Exception], None]) -> None:
        self.recorder = recorder
        self._tell = tell
        self.busy = False
        self.broken = False
        self._jobs: queue.SimpleQueue[QueuedEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mulligan-hooks", daemon=True)
        self._thread.start()

    def give(self, job: QueuedEvent) -> None:
        self._jobs.put(job)

    def close(self, wait_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(wait_s)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._do(job)
        finally:
            self.recorder.close()

    def _next(self) -> QueuedEvent | None:
        """The next job. While there is none, the thread reads the tree and looks for dead agents."""
        while True:
            try:
                return self._jobs.get(timeout=_TICK_S if self.recorder.is_settled or self.broken else 0)
            except queue.Empty:
                self._meanwhile()

    def _meanwhile(self) -> None:
        try:
            if not self.recorder.is_settled:
                self.recorder.go_on(monotonic_s() + _SLICE_S)
            elif self.busy:
                self.recorder.sweep()
                self.recorder.watch()
                self.busy = self.recorder.has_open_calls() or self.recorder.is_waiting
        except (MulliganError, OSError) as error:
            self._tell(error)
            self.broken = True

    def _do(self, job: QueuedEvent) -> None:
        try:
            job.answer = self.recorder.handle(job.event, until=job.until, pid=job.pid, late=job.late)
            self.busy = True
        except Exception as error:  # noqa: BLE001  # the top of a server: after any error, the next event is handled
            job.error, self.broken = error, isinstance(error, InternalError | OSError) or self.broken
        job.done.set()


class Dispatcher:
    """Gives messages to recorders. Thread-safe."""

    def __init__(self, folder: str, open_recorder: OpenRecorder) -> None:
        self.folder = folder
        self.spool = Spool(folder)
        self._open_recorder = open_recorder
        self._threads: dict[int, RecorderThread] = {}
        self._handled: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._spooling = threading.Lock()
        self._outdated = False

    def take(self, data: bytes) -> bytes:
        """Delivers a message. FAILED means that the hook should store it in the spool."""
        message = parse_message(data)
        if message is None:
            return DONE
        self.take_up_spool()
        return self._deliver(message, message.answer_s)

    def take_up_spool(self) -> None:
        """Delivers the messages in the spool, in order; stops at the first that fails."""
        with self._spooling:
            for name in self.spool.names():
                try:
                    message = parse_message(self.spool.read(name))
                except OSError:
                    continue
                if message is not None and self._deliver(message, None) != DONE:
                    return
                self.spool.remove(name)

    def _deliver(self, message: Message, wait_s: float | None) -> bytes:
        """Gives the message to its recorder and waits `wait_s` seconds for it; None waits to the end."""
        try:
            if self._is_repeated(message):
                return DONE
            event = parse_event(message.agent, message.raw)
            if event is None:
                return DONE
            late = wait_s is None or message.is_late
            typed = event.typed if event.answers else None
            if typed is not None and wait_s is not None:
                wait_s = message.typed_answer_s
            until = monotonic_s() + (wait_s or _SLICE_S)
            job = QueuedEvent(event, until, 0 if late else agent_above(message.pid), late)
            with self._lock:
                thread = self._thread_of(event, message.project)
            thread.give(job)
            if not job.done.wait(wait_s):
                return DONE if typed is None else DONE + stop_prompt(event.agent, still_running(typed))
            if typed is not None and job.error is not None:
                self._tell(job.error)
                return DONE + stop_prompt(event.agent, f"Mulligan failed: {job.error}")
            return self._outcome(job.error, message) + job.answer
        except (MulliganError, OSError) as error:
            return self._outcome(error, message)

    def _is_repeated(self, message: Message) -> bool:
        with self._lock:
            known = message.identity in self._handled
            self._handled[message.identity] = None
            while len(self._handled) > _REMEMBERED_MAX:
                self._handled.popitem(last=False)
        return known

    def _thread_of(self, event: HookEvent, project: str) -> RecorderThread:
        recorder = self._open_recorder(event, project)
        thread = self._threads.get(id(recorder))
        if thread is None:
            thread = self._threads[id(recorder)] = RecorderThread(recorder, self._tell)
        return thread

    def _outcome(self, error: Exception | None, message: Message) -> bytes:
        if error is None:
            return DONE
        self._tell(error)
        if isinstance(error, InternalError | OSError):
            with self._lock:
                self._handled.pop(message.identity, None)
            return FAILED + self._message_for_user(error)
        return DONE

    def _message_for_user(self, error: Exception) -> bytes:
        """The message that the agent shows to the user if this version is too old for the store.

        This process then ends, and the next hook starts the version that is installed by then.
        """
        if not isinstance(error, MulliganError) or error.code != "store_newer":
            return b""
        self._outdated = True
        return encode({"systemMessage": f"mulligan: {error.message}"})

    def _tell(self, error: Exception) -> None:
        """Stores the last error for `mulligan hooks status`."""
        words = "".join(traceback.format_exception(error))
        if isinstance(error, MulliganError):
            words = f"{error.code}: {error.message}\n"
        with suppress(OSError):
            handle = os.open(os.path.join(self.folder, TROUBLE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(words)

    @property
    def is_busy(self) -> bool:
        return any(thread.busy and not thread.broken for thread in self._threads.values())

    @property
    def is_broken(self) -> bool:
        return self._outdated or any(thread.broken for thread in self._threads.values())

    def settle(self) -> None:
        """Waits until all trees are read; for a process that handles one event only."""
        for thread in self._threads.values():
            while not thread.recorder.is_settled and not thread.broken:
                threading.Event().wait(_SLICE_S)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close(wait_s=5.0)


def agent_above(pid: int) -> int:
    """The agent's process: the parent of the hook, or above it if a shell started the hook."""
    for _ in range(3):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, rest = file.read().rpartition(b")")
        except OSError:
            return pid if _exists(pid) else 0
        if head.partition(b"(")[2] not in _SHELLS:
            return pid
        pid = int(rest.split()[1])
    return pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0 and not os.path.exists("/proc/self")
