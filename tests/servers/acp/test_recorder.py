"""What a proxy makes of what it is told: whatever an agent does and says in whatever order, a turn goes back whole."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mulligan
from mulligan.api import Mulligan
from mulligan.history.baseline import kernel_time_ns
from mulligan.history.log import log_view
from mulligan.history.tables import CALLS, changes_of
from mulligan.servers.acp.recorder import (
    AnnouncedCall,
    ProxyRecorder,
    capabilities_of,
    text_of_prompt,
    with_our_capabilities,
)
from mulligan.servers.acp.relay import Worker
from mulligan.servers.acp.undo import Workspaces
from mulligan.values.canonical import decode
from mulligan.values.errors import MulliganError, fault
from tests.history.test_unstable_reads import grown_by_each_read

STEPS_MAX = 50
NAMES = ("a", "b", "deep/c", "deep/er/d")
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=12,
)


class Agent:
    def __init__(self, base: Path, opened: Mulligan) -> None:
        self.root = base / "work"
        self.opened = opened
        self.follower = ProxyRecorder(Workspaces(lambda folder: opened, lambda: opened.store), pid=os.getpid())
        self.follower.attach("s", str(self.root))

    def files(self) -> dict[str, bytes | None]:
        paths = list(self.root.rglob("*"))
        return {str(path.relative_to(self.root)): path.read_bytes() if path.is_file() else None for path in paths}

    def write(self, name: str, content: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(content)

    def write_later(self, name: str, content: str, than_ns: int) -> None:
        """The kernel stamps files by ticks of its clock; until it has ticked, nobody could tell."""
        self.write(name, content)
        while (self.root / name).stat().st_ctime_ns <= than_ns:
            self.write(name, content)

    def say(self, id: str, status: str, at_ns: int | None = None, **more: Any) -> None:
        self.follower.tool("s", {"toolCallId": id, "status": status, **more}, at_ns)

    def log(self) -> dict[str | None, list[str]]:
        """The calls by the agent's ids, and the paths that each has changed."""
        with self.opened.store.read() as tx:
            rows = [row for row in tx.select(CALLS) if not row.external]
            return {row.label: [change.path for change in changes_of(tx, row.id)] for row in rows}

    def coverage(self) -> dict[str | None, list[tuple[str, str]]]:
        """The calls by the agent's ids, and what Mulligan could not capture of each."""
        rows = [row for row in log_view(self.opened.open_root) if not row["external"]]
        return {row["label"]: [(note["path"], note["reason"]) for note in row["coverage"]] for row in rows}


@contextmanager
def agent_in(base: Path) -> Iterator[Agent]:
    (base / "work").mkdir()
    (base / "work/a").write_text("first\n")
    with mulligan.open(str(base / "work"), store=str(base / "store")) as opened:
        agent = Agent(base, opened)
        yield agent
        agent.follower.end("session_ended")


step = st.tuples(
    st.sampled_from(["edit", "execute", "other", "delete"]),
    st.sampled_from(NAMES),
    st.sampled_from(["1\n", "2\n", None]),
    st.sampled_from(["pending", "in_progress", "untold"]),
    st.sampled_from(["completed", "failed", "untold"]),
    st.booleans(),
)


def act(agent: Agent, id: str, one: tuple[str, str, str | None, str, str, bool]) -> None:
    kind, name, content, begin, end, early = one
    about: dict[str, Any] = {"kind": kind, "locations": [{"path": str(agent.root / name)}]}
    if early and begin != "untold":
        agent.say(id, begin, **about)
    if content is not None:
        agent.write(name, content)
    else:
        (agent.root / name).unlink(missing_ok=True)
    if not early and begin != "untold":
        agent.say(id, begin, **about)
    if end != "untold" or begin == "untold":
        agent.say(id, end if end != "untold" else "completed", **about)


@pytest.mark.req("D14.acp.proxy")
@settings(max_examples=25)
@given(turns=st.lists(st.lists(step, min_size=1, max_size=4), min_size=1, max_size=3))
@example(turns=[[("edit", "b", text, "pending", "completed", False) for text in ("1\n", None)]])
def test_turns_are_restored_whole_and_come_again(turns: list[list[Any]]) -> None:
    with TemporaryDirectory() as folder, agent_in(Path(os.path.realpath(folder))) as agent:
        states = [agent.files()]
        for number, turn in enumerate(turns):
            assert agent.follower.prompt("s", "go") is None
            for place, one in enumerate(turn):
                act(agent, f"{number}-{place}", one)
            agent.follower.end_prompt("s")
            states.append(agent.files())
        session = agent.follower.open_sessions["s"].session
        back = [agent.files(), *moved(agent, lambda: session.rollback(on_conflict="overwrite"))]
        assert distinct(back) == distinct(states[::-1])
        forth = [agent.files(), *moved(agent, lambda: session.redo(on_conflict="overwrite"))]
        assert distinct(forth) == distinct(states)


def moved(agent: Agent, step: Callable[[], object]) -> Iterator[dict[str, bytes | None]]:
    """The files after each step, until there is none left."""
    with suppress(MulliganError):
        for _ in range(STEPS_MAX):
            step()
            yield agent.files()
        pytest.fail("there is no end to it")


def distinct(states: list[Any]) -> list[Any]:
    """Without those that are as the one before: a turn may do and undo."""
    return [one for one, before in zip(states, [None, *states], strict=False) if one != before]


def test_calls_one_after_another_are_no_riddle(tmp_path: Path) -> None:
    """Nothing in them is in doubt, so a merge puts all of it back."""
    with agent_in(tmp_path) as agent:
        agent.follower.prompt("s", "go")
        for number, kind in enumerate(["edit", "execute", "edit", "execute"]):
            agent.say(f"c{number}", "in_progress", kind=kind, locations=[{"path": str(agent.root / "a")}])
            agent.write("a", f"{number}\n")
            agent.say(f"c{number}", "completed")
        agent.follower.end_prompt("s")
        session = agent.follower.open_sessions["s"].session
        assert session.rollback().to_json()["outcomes"] == [{"path": "a", "outcome": "restored"}]
        assert (agent.root / "a").read_text() == "first\n"


class TestWithoutPause:
    """An agent begins its next tool at once: what that has changed before we look is its own."""

    def test_what_came_after_the_end_of_a_command_is_the_next_ones(self, tmp_path: Path) -> None:
        with agent_in(tmp_path) as agent:
            agent.follower.prompt("s", "go")
            agent.say("c1", "in_progress", kind="execute")
            agent.write("deep/one", "1\n")
            over_ns = kernel_time_ns()
            agent.write_later("deep/two", "2\n", over_ns)
            agent.write_later("a", "2\n", over_ns)
            agent.follower.is_more_announced = lambda: True
            agent.say("c1", "completed", over_ns)
            agent.say("c2", "in_progress", kind="execute")
            agent.follower.is_more_announced = lambda: False
            agent.say("c2", "completed", kernel_time_ns())
            agent.follower.end_prompt("s")
            assert agent.log() == {"c1": ["deep", "deep/one"], "c2": ["a", "deep/two"]}
            session = agent.follower.open_sessions["s"].session
            session.restore("c2")
            assert set(agent.files()) == {"a", "deep", "deep/one"}
            session.undo("c1")
            assert agent.files() == {"a": b"first\n"}

    def test_without_a_call_to_follow_all_of_it_is_the_last_ones(self, tmp_path: Path) -> None:
        with agent_in(tmp_path) as agent:
            agent.follower.prompt("s", "go")
            agent.say("c1", "in_progress", kind="execute")
            over_ns = kernel_time_ns()
            agent.write_later("late", "1\n", over_ns)
            agent.say("c1", "completed", over_ns)
            agent.follower.end_prompt("s")
            assert agent.log() == {"c1": ["late"]}


def test_what_changes_while_no_call_is_in_progress_is_no_ones(tmp_path: Path) -> None:
    with agent_in(tmp_path) as agent:
        agent.follower.prompt("s", "go")
        agent.write("mine", "mine\n")
        agent.follower.scan_idle_folders(until_ns=kernel_time_ns())
        agent.say("c", "in_progress", kind="execute")
        agent.write("theirs", "x\n")
        agent.say("c", "completed")
        agent.follower.end_prompt("s")
        agent.follower.open_sessions["s"].session.rollback()
        assert set(agent.files()) == {"a", "mine"}


@pytest.mark.req("D5.unstable_read")
@pytest.mark.parametrize("kind", ["edit", "execute"])
@pytest.mark.parametrize("busy_at", ["prompt", "end"])
def test_a_file_that_changes_during_every_read_is_listed_as_unstable(tmp_path: Path, kind: str, busy_at: str) -> None:
    with agent_in(tmp_path) as agent:
        busy = agent.root / "busy.bin"
        busy.write_text("theirs")
        agent.follower.prompt("s", "one")
        agent.follower.end_prompt("s")
        busy.write_text("theirs, later")
        with grown_by_each_read(busy) if busy_at == "prompt" else nullcontext():
            agent.follower.prompt("s", "two")
        agent.say("c", "in_progress", kind=kind, locations=[{"path": str(busy)}])
        busy.write_text("after")
        with grown_by_each_read(busy) if busy_at == "end" else nullcontext():
            agent.say("c", "completed")
        agent.follower.end_prompt("s")
        assert agent.coverage() == {"c": [("busy.bin", "unstable")]}
        if busy_at == "prompt":
            assert agent.log() == {"c": []}
        else:
            session = agent.follower.open_sessions["s"].session
            assert session.rollback(on_conflict="overwrite").ok
            assert busy.read_text() == "theirs, later"


def test_a_path_elsewhere_is_said_in_coverage(tmp_path: Path) -> None:
    with agent_in(tmp_path) as agent:
        agent.follower.prompt("s", "go")
        agent.say("c", "in_progress", kind="edit", locations=[{"path": "/etc/hosts"}, {"path": "../x"}])
        agent.say("c", "completed")
        agent.follower.end_prompt("s")
        (row,) = mulligan_log(agent)
        assert [(one["path"], one["reason"]) for one in row] == [
            ("/etc/hosts", "outside_root"),
            ("../x", "outside_root"),
        ]


@pytest.mark.req("D6.coverage.store_full")
@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("broken"), "not_recorded"), (fault("no_space", "The disk is full."), "store_full")]
)
def test_what_could_not_be_written_down_is_said_by_the_next_call(tmp_path: Path, error: Exception, reason: str) -> None:
    with agent_in(tmp_path) as agent:
        agent.follower.prompt("s", "go")
        agent.follower.note_failure(error)
        agent.follower.note_failure(error)
        agent.say("c", "completed", kind="execute")
        agent.say("d", "completed", kind="execute")
        agent.follower.end_prompt("s")
        assert mulligan_log(agent) == [[{"path": ".", "reason": reason}], []]


def mulligan_log(agent: Agent) -> list[Any]:
    with agent.opened.store.read() as tx:
        return [decode(row.coverage) for row in tx.select(CALLS) if not row.external]


@given(update=st.dictionaries(st.sampled_from(["kind", "title", "status", "locations", "content", "x"]), JSON))
def test_an_agent_may_send_anything(update: dict[str, Any]) -> None:
    said = AnnouncedCall("x").updated(update)
    assert all(isinstance(one, str) for one in (said.kind, said.title, said.status, *said.paths))
    text_of_prompt({"prompt": update.get("content")})


@given(able=JSON, more=st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_nothing_an_agent_says_of_itself_is_lost(able: Any, more: dict[str, Any]) -> None:
    answer = {"id": 1, "result": {**more, "agentCapabilities": able}}
    changed = with_our_capabilities(answer)
    capabilities_of(answer)
    known = able if isinstance(able, dict) else {}
    found = changed["result"]["agentCapabilities"]
    assert {**changed["result"], "agentCapabilities": able} == answer["result"]
    for name, value in known.items():
        assert name in ("sessionCapabilities", "_meta") or found[name] == value


def test_an_errand_that_fails_is_the_last_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    failures: list[Exception] = []
    errands = Worker(lambda rested: None, failures.append)
    broken = [errands.do(lambda: 1 // 0) for _ in range(3)]
    assert [one.wait(600) for one in broken] == [None, None, None]
    assert errands.do(lambda: "fine").wait(600) == "fine"
    assert errands.end(60)
    assert len(failures) == 3
    assert capfd.readouterr().err == "mulligan: not recorded: ZeroDivisionError: integer division or modulo by zero\n"


@pytest.mark.req("D6.git_outside_restore")
def test_a_commit_in_a_linked_working_tree_is_noted_and_is_undone_with_git_restore(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=u", "-c", "user.email=e", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    main, root = str(tmp_path / "main"), str(tmp_path / "work")
    git("init", "-q", main)
    git("-C", main, "commit", "-q", "--allow-empty", "-m", "0")
    git("-C", main, "worktree", "add", "-q", root)
    old = git("-C", root, "rev-parse", "HEAD")
    with mulligan.open(root, store=str(tmp_path / "store")) as opened:
        agent = Agent(tmp_path, opened)
        agent.follower.prompt("s", "commit it")
        agent.say("1", "in_progress", kind="execute", title="git commit")
        agent.write("a", "one")
        git("-C", root, "add", "a")
        git("-C", root, "commit", "-q", "-m", "1")
        agent.say("1", "completed")
        with opened.store.read() as tx:
            row = next(row for row in tx.select(CALLS) if row.label == "1")
        assert [note["reason"] for note in decode(row.coverage) if note["path"] == ".git"] == ["commit_outside"]
        assert opened.session(row.session).undo(row.id, git="restore").ok
        agent.follower.end("session_ended")
    assert (git("-C", root, "rev-parse", "HEAD"), git("-C", root, "status", "--short")) == (old, "")
