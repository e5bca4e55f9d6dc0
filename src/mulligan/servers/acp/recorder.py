"""Records what an agent behind the proxy does: prompts as turns, tool calls as observed calls.

An agent announces a tool call and goes on at once, so there is no time to read files then. Instead, the recorder reads
the tree before the prompt reaches the agent; when a call ends, all differences since the last scan belong to that call,
except those that another call has recorded. It scans the tree when a prompt begins, when a call ends, when the prompt
is answered, and while the agent is idle. The functions at the top read frames; an agent may send anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from mulligan.effects.session import DurableSession
from mulligan.history import observe
from mulligan.history.baseline import Baseline
from mulligan.history.ledger import STORE_FULL
from mulligan.history.log import calls_of
from mulligan.history.observe import EarlierScan, Note, Observed
from mulligan.history.open_root import OpenRoot
from mulligan.history.tables import CALLS, TURNS, changes_of
from mulligan.servers.acp.undo import (
    STRICT_CAPABILITIES,
    AcpWorkspace,
    Workspaces,
    close_for_client,
)
from mulligan.values.clock import monotonic_s
from mulligan.values.entries import Absent, Change, DirEntry, same_state
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import CallId, TurnId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import RepoPath

Frame = dict[str, Any]

ADDED_CAPABILITIES = {
    "session/rollback": "rollback",
    "session/redo": "redo",
    "session/restore_tool_call": "restoreToolCall",
    "session/fork": "fork",
}
"""Capabilities that the proxy adds to an agent that does not have them."""
READ_ONLY_KINDS = ("read", "search", "switch_mode")
OVER = ("completed", "failed")
_SHOWN_PATHS = 40


@fast_dataclass(slots=True, frozen=True)
class AnnouncedCall:
    """A tool call, as far as the agent has announced it."""

    id: str
    kind: str = "other"
    title: str = ""
    status: str = "pending"
    paths: tuple[str, ...] = ()

    def updated(self, update: Mapping[str, Any]) -> AnnouncedCall:
        """The call with the changes of one more frame."""
        named = {name: value for name in ("kind", "title", "status") if isinstance(value := update.get(name), str)}
        paths = dict.fromkeys((*self.paths, *_paths_in(update.get("locations")), *_paths_in(update.get("content"))))
        return replace(self, paths=tuple(paths), **named)

    @property
    def is_read_only(self) -> bool:
        return self.kind in READ_ONLY_KINDS

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def may_run(self) -> bool:
        """A pending edit without paths has not begun: a later frame will name its paths."""
        return self.status != "pending" or self.kind != "edit" or bool(self.paths)


def _paths_in(items: object) -> list[str]:
    """The paths in a list of locations or of content."""
    found = [item.get("path") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return [path for path in found if isinstance(path, str) and path and "\0" not in path]


def text_of_prompt(params: Mapping[str, Any]) -> str:
    blocks = params.get("prompt")
    texts = [block.get("text") for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def with_preface(frame: Mapping[str, Any], text: str) -> Frame:
    """The prompt with one block of text in front."""
    params = dict(frame["params"])
    return {**frame, "params": {**params, "prompt": [{"type": "text", "text": text}, *params["prompt"]]}}


def capabilities_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The session capabilities that the agent declares."""
    found = _object(_object(_object(answer, "result"), "agentCapabilities"), "sessionCapabilities")
    return {name: value for name, value in found.items() if value is not None and value is not False}


def with_our_capabilities(answer: Mapping[str, Any]) -> Frame:
    """The answer to `initialize` with Mulligan's capabilities added; the agent's own values do not change."""
    result = _object(answer, "result")
    able = _object(result, "agentCapabilities")
    theirs, meta = _object(able, "sessionCapabilities"), _object(able, "_meta")
    sessions = {**{name: {} for name in ADDED_CAPABILITIES.values()}, **theirs}
    ours = {**{name: {} for name in STRICT_CAPABILITIES}, **_object(meta, "mulligan")}
    able = {**able, "sessionCapabilities": sessions, "_meta": {**meta, "mulligan": ours}}
    return {**answer, "result": {**result, "agentCapabilities": able}}


def _object(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def folder_of(params: Mapping[str, Any]) -> str | None:
    """The session's folder, if it exists."""
    folder = params.get("cwd")
    return folder if isinstance(folder, str) and os.path.isabs(folder) and os.path.isdir(folder) else None


def undo_notice(changes: Iterable[Change]) -> str | None:
    """The text that tells the model which files were undone or redone since its last turn; None if there are none."""
    lines = [f"- {change.path} ({_change_word(change)})" for change in changes]
    if not lines:
        return None
    more = [f"- and {len(lines) - _SHOWN_PATHS} more"] if len(lines) > _SHOWN_PATHS else []
    return "\n".join(
        [
            "[Mulligan] Since your last turn, some of your work was undone or redone. This changed these files:",
            *lines[:_SHOWN_PATHS],
            *more,
            "Read them again before you go on; what you remember of them may be wrong.",
        ]
    )


def _change_word(change: Change) -> str:
    if isinstance(change.after, Absent):
        return "removed"
    return "restored" if isinstance(change.before, Absent) else "changed back"


def fork_notice(prompts: Sequence[str]) -> str:
    """The text that tells the model of a forked session the parent's prompts: the agent cannot copy transcripts."""
    said = [f"{number}. {prompt}" for number, prompt in enumerate(prompts, 1)]
    head = "[Mulligan] This session continues another one in the same folder. You do not see that conversation"
    return "\n".join([f"{head}; its prompts were:", *said]) if said else f"{head}."


NOT_RECORDED: Note = {"path": ".", "reason": "not_recorded"}
_FIRST_READING_S = 2.0
_FILE_MAX_BYTES = 16 * MIB_BYTES
_PROMPTS_MAX = 20


class RecordedFolder:
    """A folder in which the agent's sessions work, and the last known state of its files."""

    def __init__(self, workspace: AcpWorkspace) -> None:
        self.workspace = workspace
        self.open_root: OpenRoot = workspace.open_root
        self.tree = Baseline(self.open_root, file_max_bytes=_FILE_MAX_BYTES)
        self._since = 0

    def scan(self, call: CallId | None = None, *, whole: bool = False, until_ns: int | None = None) -> list[Note]:
        """Scans the tree. Differences belong to the call; without a call they are external changes."""
        # Read first: what another process records during the scan must count as its own.
        since = observe.workspace_seq(self.open_root)
        notes = observe.record_changes(self.open_root, self.tree, call, full=whole, until_ns=until_ns)
        self._since = since
        return notes

    def scan_of(self, paths: list[RepoPath]) -> EarlierScan:
        return observe.earlier_scan_of(self.tree, paths, since=self._since)

    def finish(self, call: CallId, *, reason: str | None, notes: list[Note], until_ns: int | None) -> None:
        observe.finish(self.open_root, call, self.tree, reason=reason, notes=notes, until_ns=until_ns)
        with self.open_root.ledger.store.read() as tx:
            row = tx.get(CALLS, call)
        # The tree already contains this call's changes, so they are part of the next call's baseline.
        self._since = max(self._since, (row.wseq if row is not None else None) or 0)

    def settle(self, paths: list[RepoPath]) -> None:
        self.tree.refresh(paths)
        with self.open_root.ledger.store.write() as tx:
            self.tree.publish(tx)
        self.tree.mark_published()


@fast_dataclass(slots=True)
class RecordedCall:
    """A tool call that the agent has announced. `call` is Mulligan's call for it, once it may run."""

    announced: AnnouncedCall
    call: CallId | None = None
    paths: list[RepoPath] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


@fast_dataclass(slots=True)
class ProxiedSession:
    session: DurableSession
    files: RecordedFolder
    turn: TurnId | None = None
    calls: dict[str, RecordedCall] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    preface: str | None = None


class ProxyRecorder:
    """Records sessions of the agent. Use it from one thread at a time."""

    def __init__(self, workspaces: Workspaces, *, pid: int, root: str | None = None) -> None:
        self._workspaces, self._pid, self._root = workspaces, pid, root
        self._folders: dict[str, RecordedFolder] = {}
        self.open_sessions: dict[str, ProxiedSession] = {}
        self._missed: list[Note] = []
        self.is_more_announced: Callable[[], bool] = lambda: False
        """Whether the agent has announced further calls that have not ended and that this recorder has not seen yet."""

    # Sessions.

    def attach(self, session: str, folder: str) -> None:
        """Opens the session and scans its folder."""
        if session not in self.open_sessions:
            files = self._folder_at(self._root or folder)
            opened = files.workspace.sessions.open(session)
            observe.end_open_turns(files.open_root, opened.id)
            self.open_sessions[session] = ProxiedSession(opened, files)

    def is_recorded(self, session: str) -> bool:
        return session in self.open_sessions

    def find(self, session: str) -> ProxiedSession | None:
        """An attached session, or a recorded one: undo of its files does not need the agent."""
        if session in self.open_sessions:
            return self.open_sessions[session]
        home = self._workspaces.home_of(session)
        if home is None:
            return None
        files = self._folder_at(home)
        return ProxiedSession(files.workspace.sessions.get(session), files)

    def _folder_at(self, folder: str) -> RecordedFolder:
        found = self._folders.get(folder)
        if found is None:
            found = self._folders[folder] = RecordedFolder(self._workspaces.at(folder))
            found.scan()
        return found

    def fork(self, parent: str, child: str, folder: str | None, *, transcript_is_known: bool = True) -> None:
        """Records that the agent has forked a session."""
        live = self.find(parent)
        if live is None:
            return self.attach(child, folder) if folder is not None else None
        made = ProxiedSession(live.session.fork(dst=child), live.files)
        made.preface = None if transcript_is_known else fork_notice(_prompts(live))
        self.open_sessions[child] = made
        return None

    def close(self, session: str) -> None:
        live = self.open_sessions.pop(session, None)
        if live is not None:
            self._end_turn(live, "session_ended")
            close_for_client(live.files.workspace, live.session)

    def end(self, reason: str) -> None:
        """Ends all calls and turns: the agent has ended."""
        for live in self.open_sessions.values():
            self._end_turn(live, reason)
        for files in self._folders.values():
            files.tree.close()

    # Prompts.

    def prompt(self, session: str, text: str) -> str | None:
        """Begins a turn. Returns the text that the model must get before the prompt, if any."""
        live = self.open_sessions.get(session)
        if live is None:
            return None
        self._end_turn(live, "interrupted")
        live.files.scan()
        live.files.tree.read_contents(monotonic_s() + _FIRST_READING_S)
        told = [one for one in (live.preface, undo_notice(_undone_changes(live))) if one is not None]
        live.preface = None
        live.turn = TurnId(live.files.open_root.ledger.ids.new())
        observe.open_turn(live.files.open_root, live.session.id, live.turn, text)
        return "\n\n".join(told) or None

    def end_prompt(self, session: str) -> None:
        """Ends the turn. Differences that belong to no call become external changes."""
        live = self.open_sessions.get(session)
        if live is not None:
            self._end_turn(live, "stopped")
            if self._missed:
                observe.finish_session(live.files.open_root, live.session.id, live.files.tree, reason="stopped")
            live.files.scan(whole=True)

    def _end_turn(self, live: ProxiedSession, reason: str) -> None:
        for recorded in list(live.calls.values()):
            self._finish(live, recorded, reason=reason)
        live.over.clear()
        turn, live.turn = live.turn, None
        if turn is not None:
            observe.end_turn(live.files.open_root, live.session.id, turn)

    # Tool calls.

    def tool(self, session: str, update: dict[str, Any], at_ns: int | None = None) -> None:
        """Records an update of a tool call; `at_ns` is when it arrived.

        Outside a turn an agent only repeats old calls, for example when it loads a session.
        """
        live, id = self.open_sessions.get(session), update.get("toolCallId")
        if live is None or live.turn is None or not isinstance(id, str) or not id or id in live.over:
            return
        recorded = live.calls.setdefault(id, RecordedCall(AnnouncedCall(id)))
        recorded.announced = recorded.announced.updated(update)
        over = recorded.announced.is_over
        if (
            recorded.call is None
            and not recorded.announced.is_read_only
            and (over or _may_begin(live, recorded.announced))
        ):
            self._begin(live, recorded)
        if over:
            reason = "failed" if recorded.announced.status == "failed" else None
            self._finish(live, recorded, reason=reason, at_ns=at_ns)

    def _begin(self, live: ProxiedSession, recorded: RecordedCall) -> None:
        said, files = recorded.announced, live.files
        named = [(path, files.open_root.disk.root.find(path)) for path in said.paths] if said.kind == "edit" else []
        recorded.notes = [{"path": path, "reason": "outside_root"} for path, below in named if below is None]
        inside = [below for _, below in named if below is not None]
        scan_of = files.scan_of(inside)
        is_window = not named or any(isinstance(entry, DirEntry) for entry in scan_of.befores.values())
        if is_window:
            inside, scan_of = [], files.scan_of([])
        recorded.paths = inside
        recorded.notes += scan_of.gaps
        observed = Observed(
            session=live.session.id,
            tool=said.title[:200] or said.kind,
            turn=live.turn,
            label=said.id if len(said.id) <= 256 and said.id.isprintable() else None,
            paths=None if is_window else inside,
            pid=self._pid,
            about={"agent": "acp", "kind": said.kind},
        )
        recorded.call = observe.begin(files.open_root, observed, earlier_scan=scan_of)

    def _finish(
        self, live: ProxiedSession, recorded: RecordedCall, *, reason: str | None, at_ns: int | None = None
    ) -> None:
        """Ends a call. If it ran alone, all differences belong to it; otherwise only those at the paths it named.

        A call that named no paths gets all differences until its end; later ones belong to calls that still run.
        """
        live.calls.pop(recorded.announced.id, None)
        live.over.add(recorded.announced.id)
        if recorded.call is None:
            return
        files = live.files
        alone = not self.is_more_announced() and not any(live.calls for live in self.open_sessions.values())
        until_ns = None if alone else at_ns
        gaps = files.scan(recorded.call, until_ns=until_ns) if alone or not recorded.paths else []
        missed, self._missed = self._missed, []
        notes = [*recorded.notes, *gaps, *missed]
        files.finish(recorded.call, reason=reason, notes=notes, until_ns=until_ns)
        if not alone:
            files.settle(recorded.paths)

    # Between calls.

    def note_failure(self, error: Exception) -> None:
        """Recording failed; the coverage of the next recorded call says so."""
        is_full = isinstance(error, MulliganError) and error.code == "no_space"
        note = STORE_FULL if is_full else NOT_RECORDED
        self._missed += [] if note in self._missed else [note]

    def scan_idle_folders(self, *, until_ns: int) -> None:
        """Scans folders with a running prompt and no running call: what changed there is external."""
        busy = {id(live.files) for live in self.open_sessions.values() if live.calls}
        folders = {id(live.files): live.files for live in self.open_sessions.values() if live.turn is not None}
        for files in (files for key, files in folders.items() if key not in busy):
            files.scan(until_ns=until_ns)

    def read_more_files(self, for_s: float) -> bool:
        """Reads files that Mulligan has not read yet. Whether there are more."""
        for files in self._folders.values():
            if not files.tree.is_complete:
                files.tree.read_contents(monotonic_s() + for_s)
        return any(not files.tree.is_complete for files in self._folders.values())


def _may_begin(live: ProxiedSession, said: AnnouncedCall) -> bool:
    """Whether a call may begin: an edit waits until another edit of the same file has ended."""
    taken = {path for other in live.calls.values() if other.call is not None for path in other.announced.paths}
    return said.may_run and (said.kind != "edit" or taken.isdisjoint(said.paths))


def _undone_changes(live: ProxiedSession) -> list[Change]:
    """The changes by undo operations since the last prompt, as one change for each path."""
    open_root, found = live.files.open_root, dict[RepoPath, Change]()
    with open_root.ledger.store.read() as tx:
        turns = tx.select(
            TURNS, {"session": live.session.id}, order=("session", "started_at"), descending=True, limit=1
        )
        if not turns:
            return []
        for row in calls_of(tx, open_root, live.session.id):
            if row.started_at < turns[0].started_at:
                break
            if row.status == "committed" and row.way_back is not None:
                for change in changes_of(tx, row.id):
                    last = found.get(change.path, change)
                    found[change.path] = Change(change.path, change.before, last.after)
    return sorted((one for one in found.values() if not same_state(one.before, one.after)), key=lambda one: one.path)


def _prompts(live: ProxiedSession) -> list[str]:
    with live.files.open_root.ledger.store.read() as tx:
        turns = tx.select(TURNS, {"session": live.session.id}, order=("session", "started_at"))
    return [turn.prompt for turn in turns if turn.prompt][-_PROMPTS_MAX:]
