"""Writes down what an agent behind the proxy does: its prompts as turns, its tool calls as calls that we observe.

An agent tells of a tool call and goes on without waiting for anybody. So nothing is read when it tells: the tree was
read before the prompt reached it, and what differs from the last look when a call is over is the call's, up to what
somebody else has on record. The tree is looked at when a prompt begins, when a call is over, when the prompt is
answered, and while the agent is silent with no call in progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mulligan.effects.session import Session
from mulligan.history import observing
from mulligan.history.desk import Desk
from mulligan.history.kept import KeptTree
from mulligan.history.log import calls_of, changes_of
from mulligan.history.observing import Looked, Note, Observed
from mulligan.history.tables import CALLS, TURNS
from mulligan.servers.acp.sightings import Announced, told_of, told_of_fork
from mulligan.servers.acp.workspaces import Workspace, Workspaces, close_for_client
from mulligan.values.clock import monotonic_s
from mulligan.values.entries import Change, DirEntry, same_state
from mulligan.values.ids import CallId, TurnId
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import RepoPath

NOT_RECORDED: Note = {"path": ".", "reason": "not_recorded"}
_FIRST_READING_S = 2.0
_FILE_MAX_BYTES = 16 * MIB_BYTES
_PROMPTS_TOLD = 20


class Ground:
    """A folder that sessions of the agent work in, and what is known of its files."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.desk: Desk = workspace.desk
        self.tree = KeptTree(self.desk, file_max_bytes=_FILE_MAX_BYTES)
        self._since = 0

    def look(self, call: CallId | None = None, *, whole: bool = False, until_ns: int | None = None) -> list[Note]:
        """What differs is the call's; without one, nobody's."""
        # First: what gets on record during the look has to count as somebody else's.
        since = observing.workspace_seq(self.desk)
        notes = observing.take_stock(self.desk, self.tree, call, whole=whole, until_ns=until_ns)
        self._since = since
        return notes

    def looked(self, paths: list[RepoPath]) -> Looked:
        return observing.as_looked(self.tree, paths, since=self._since)

    def finish(self, call: CallId, *, reason: str | None, notes: list[Note], until_ns: int | None) -> None:
        observing.finish(self.desk, call, self.tree, reason=reason, notes=notes, until_ns=until_ns)
        with self.desk.ledger.store.read() as tx:
            row = tx.get(CALLS, call)
        # What this call did is in the tree already: for the next one it is what was there before.
        self._since = max(self._since, (row.wseq if row is not None else None) or 0)

    def settle(self, paths: list[RepoPath]) -> None:
        self.tree.settle_paths(paths)
        with self.desk.ledger.store.write() as tx:
            self.tree.publish(tx)
        self.tree.has_published()


@dataclass(slots=True)
class Followed:
    """A tool call that the agent has told of. `call`: ours for it, once it may run."""

    announced: Announced
    call: CallId | None = None
    paths: list[RepoPath] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


@dataclass(slots=True)
class Live:
    session: Session
    ground: Ground
    turn: TurnId | None = None
    calls: dict[str, Followed] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    preface: str | None = None


class Follower:
    """For one thread at a time: whoever keeps it runs one thing after another."""

    def __init__(self, workspaces: Workspaces, *, pid: int, root: str | None = None) -> None:
        self._workspaces, self._pid, self._root = workspaces, pid, root
        self._grounds: dict[str, Ground] = {}
        self.lives: dict[str, Live] = {}
        self._missed = False
        self.is_more_announced: Callable[[], bool] = lambda: False
        """Whether tool calls have been told of that are not over, though this has not heard of them yet."""

    # Sessions.

    def attach(self, session: str, folder: str) -> None:
        """From here on the folder's files are known."""
        if session not in self.lives:
            ground = self._ground(self._root or folder)
            opened = ground.workspace.sessions.open(session)
            observing.end_open_turns(ground.desk, opened.id)
            self.lives[session] = Live(opened, ground)

    def find(self, session: str) -> Live | None:
        """One that the agent has at hand, or that is on record from before: its files go back without the agent."""
        if session in self.lives:
            return self.lives[session]
        home = self._workspaces.home_of(session)
        if home is None:
            return None
        ground = self._ground(home)
        return Live(ground.workspace.sessions.get(session), ground)

    def _ground(self, folder: str) -> Ground:
        found = self._grounds.get(folder)
        if found is None:
            found = self._grounds[folder] = Ground(self._workspaces.at(folder))
            found.look()
        return found

    def fork(self, parent: str, child: str, folder: str | None, *, talk_is_known: bool = True) -> None:
        """The agent has a session that goes on from another one."""
        live = self.find(parent)
        if live is None:
            return self.attach(child, folder) if folder is not None else None
        made = Live(live.session.fork(dst=child), live.ground)
        made.preface = None if talk_is_known else told_of_fork(_prompts(live))
        self.lives[child] = made
        return None

    def close(self, session: str) -> None:
        live = self.lives.pop(session, None)
        if live is not None:
            self._over(live, "session_ended")
            close_for_client(live.ground.workspace, live.session)

    def end(self, reason: str) -> None:
        """The agent is no more."""
        for live in self.lives.values():
            self._over(live, reason)
        for ground in self._grounds.values():
            ground.tree.close()

    # Prompts.

    def prompt(self, session: str, text: str) -> str | None:
        """A turn begins. What the model has to be told first."""
        live = self.lives.get(session)
        if live is None:
            return None
        self._over(live, "interrupted")
        live.ground.look()
        live.ground.tree.go_on(monotonic_s() + _FIRST_READING_S)
        told = [one for one in (live.preface, told_of(_put_back(live))) if one is not None]
        live.preface = None
        live.turn = TurnId(live.ground.desk.ledger.ids.new())
        observing.open_turn(live.ground.desk, live.session.id, live.turn, text)
        return "\n\n".join(told) or None

    def answered(self, session: str) -> None:
        """The prompt is; what no call explains is nobody's."""
        live = self.lives.get(session)
        if live is not None:
            self._over(live, "stopped")
            if self._missed:
                observing.finish_session(live.ground.desk, live.session.id, live.ground.tree, reason="stopped")
            live.ground.look(whole=True)

    def _over(self, live: Live, reason: str) -> None:
        for followed in list(live.calls.values()):
            self._finish(live, followed, reason=reason)
        live.over.clear()
        turn, live.turn = live.turn, None
        if turn is not None:
            observing.end_turn(live.ground.desk, live.session.id, turn)

    # Tool calls.

    def tool(self, session: str, update: dict[str, Any], at_ns: int | None = None) -> None:
        """Outside a turn they are told again, as when a session is loaded. `at_ns`: when this was heard."""
        live, id = self.lives.get(session), update.get("toolCallId")
        if live is None or live.turn is None or not isinstance(id, str) or not id or id in live.over:
            return
        followed = live.calls.setdefault(id, Followed(Announced(id)))
        followed.announced = followed.announced.updated(update)
        over = followed.announced.is_over
        if (
            followed.call is None
            and not followed.announced.only_looks
            and (over or _may_begin(live, followed.announced))
        ):
            self._begin(live, followed)
        if over:
            reason = "failed" if followed.announced.status == "failed" else None
            self._finish(live, followed, reason=reason, at_ns=at_ns)

    def _begin(self, live: Live, followed: Followed) -> None:
        said, ground = followed.announced, live.ground
        named = [(path, ground.desk.disk.root.find(path)) for path in said.paths] if said.kind == "edit" else []
        followed.notes = [{"path": path, "reason": "outside_root"} for path, below in named if below is None]
        inside = [below for _, below in named if below is not None]
        looked = ground.looked(inside)
        is_window = not named or any(isinstance(entry, DirEntry) for entry in looked.befores.values())
        if is_window:
            inside, looked = [], ground.looked([])
        followed.paths = inside
        followed.notes += looked.gaps
        observed = Observed(
            session=live.session.id,
            tool=said.title[:200] or said.kind,
            turn=live.turn,
            label=said.id if len(said.id) <= 256 and said.id.isprintable() else None,
            paths=None if is_window else inside,
            pid=self._pid,
            about={"agent": "acp", "kind": said.kind},
        )
        followed.call = observing.begin(ground.desk, observed, looked=looked)

    def _finish(self, live: Live, followed: Followed, *, reason: str | None, at_ns: int | None = None) -> None:
        """Alone, a call answers for everything that differs, whatever it had named; else for what it had named.

        One that had named nothing answers for all until it was over; what came after is for those that still run.
        """
        live.calls.pop(followed.announced.id, None)
        live.over.add(followed.announced.id)
        if followed.call is None:
            return
        ground = live.ground
        alone = not self.is_more_announced() and not any(live.calls for live in self.lives.values())
        until_ns = None if alone else at_ns
        gaps = ground.look(followed.call, until_ns=until_ns) if alone or not followed.paths else []
        missed, self._missed = [NOT_RECORDED] if self._missed else [], False
        notes = [*followed.notes, *gaps, *missed]
        ground.finish(followed.call, reason=reason, notes=notes, until_ns=until_ns)
        if not alone:
            ground.settle(followed.paths)

    # Besides.

    def note_failure(self) -> None:
        """Something was not written down; the next call that is says so."""
        self._missed = True

    def look_around(self) -> None:
        """While a prompt is worked on and no call is in progress, what changes is nobody's."""
        busy = {id(live.ground) for live in self.lives.values() if live.calls}
        grounds = {id(live.ground): live.ground for live in self.lives.values() if live.turn is not None}
        for ground in (ground for key, ground in grounds.items() if key not in busy):
            ground.look()

    def read_on(self, for_s: float) -> bool:
        """Read what nobody has read yet. Whether there is more of it."""
        for ground in self._grounds.values():
            if not ground.tree.is_settled:
                ground.tree.go_on(monotonic_s() + for_s)
        return any(not ground.tree.is_settled for ground in self._grounds.values())


def _may_begin(live: Live, said: Announced) -> bool:
    """An edit of a file that another one is editing begins where that one ends."""
    taken = {path for other in live.calls.values() if other.call is not None for path in other.announced.paths}
    return said.may_run and (said.kind != "edit" or taken.isdisjoint(said.paths))


def _put_back(live: Live) -> list[Change]:
    """What ways back have changed since the last prompt, whoever asked for them, as one change for each path."""
    desk, found = live.ground.desk, dict[RepoPath, Change]()
    with desk.ledger.store.read() as tx:
        turns = tx.select(
            TURNS, {"session": live.session.id}, order=("session", "started_at"), descending=True, limit=1
        )
        if not turns:
            return []
        for row in calls_of(tx, desk, live.session.id):
            if row.started_at < turns[0].started_at:
                break
            if row.status == "committed" and row.way_back is not None:
                for change in changes_of(tx, row.id):
                    last = found.get(change.path, change)
                    found[change.path] = Change(change.path, change.before, last.after)
    return sorted((one for one in found.values() if not same_state(one.before, one.after)), key=lambda one: one.path)


def _prompts(live: Live) -> list[str]:
    with live.ground.desk.ledger.store.read() as tx:
        turns = tx.select(TURNS, {"session": live.session.id}, order=("session", "started_at"))
    return [turn.prompt for turn in turns if turn.prompt][-_PROMPTS_TOLD:]
