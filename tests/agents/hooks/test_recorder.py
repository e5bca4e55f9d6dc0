"""What agents do becomes calls and turns: whole, once, and told apart from what others do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import mulligan.api as api
from mulligan.agents.hooks.recorder import DONE, TROUBLE, Dispatcher, HookEvent, Kind, Recorder
from mulligan.api import Mulligan
from mulligan.history import observe
from mulligan.history.log import log_view
from mulligan.history.retention import collect_garbage
from mulligan.history.tables import KEPT, OPEN
from mulligan.values.clock import monotonic_s, since_boot_s
from mulligan.values.errors import MulliganError, fault
from tests.history.test_unstable_reads import SIZE_BYTES, grown_by_each_read, written_all_the_time

ENV = b"KEY=1\n"


class Agent:
    """Hooks in this process."""

    def __init__(self, root: Path, store: Path) -> None:
        self.root = root
        self._store = store
        self.opened: Mulligan = api.open(str(root), store=str(store))
        self.recorder = Recorder(self.opened.open_root)

    def say(self, kind: Kind, *, late: bool = False, pid: int = 0, **fields: Any) -> None:
        told: dict[str, Any] = {"agent": "claude", "session": "s1", "cwd": str(self.root), "turn": "p1", **fields}
        self.recorder.handle(HookEvent(kind=kind, **told), until=monotonic_s() + 60, late=late, pid=pid)

    def shell(self, label: str, command: str, **fields: Any) -> None:
        told: dict[str, Any] = {"label": label, "tool": "Bash", "input": {"command": command}, **fields}
        self.say("pre", **told)
        done = subprocess.run(["sh", "-c", command], cwd=self.root)
        self.say("post" if done.returncode == 0 else "failure", **told)

    def restart(self) -> None:
        """As if the process behind the hooks had been killed: nothing is saved, nothing is said."""
        self.recorder.close()
        self.opened.close()
        self.opened = api.open(str(self.root), store=str(self._store))
        self.recorder = Recorder(self.opened.open_root)

    def log(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return log_view(self.opened.open_root)[::-1]

    def changes(self) -> list[tuple[str | None, dict[str, str]]]:
        """Of each call its label and what became of which path."""
        return [(row["label"], {one["path"]: one["kind"] for one in row["changes"]}) for row in self.log()]

    def coverage(self) -> list[tuple[str, str]]:
        return [(note["path"], note["reason"]) for row in self.log() for note in row["coverage"]]

    def undo(self, call: str | None = None) -> Any:
        return self.opened.session("s1").undo(call)

    def close(self) -> None:
        self.recorder.close()
        self.opened.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text("one\ntwo\n")
    (root / ".env").write_bytes(ENV)
    (root / ".gitignore").write_text(".env\n")
    found = Agent(root, tmp_path / "store")
    yield found
    found.close()


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def test_an_error_between_two_events_is_reported(agent: Agent, tmp_path: Path) -> None:
    told = {"session_id": "s1", "cwd": str(agent.root), "hook_event_name": "PreToolUse", "tool_name": "Bash"}
    dispatcher = Dispatcher(str(tmp_path), lambda event, project: agent.recorder)
    sent = f"1 claude - {os.getpid()} {time.time_ns()} 60000\n".encode()
    assert dispatcher.take(sent + json.dumps({**told, "tool_input": {}, "tool_use_id": "c1"}).encode()) == DONE
    agent.opened.store.close()
    (tmp_path / "store" / "store.db").write_bytes(b"this is no database at all" * 100)
    while not dispatcher.is_broken:
        os.sched_yield()
    assert (tmp_path / TROUBLE).read_text()
    dispatcher.close()


@pytest.mark.req("D14.hooks.edits_and_shell")
def test_a_command_that_rewrites_an_ignored_file_and_deletes_another_is_one_call(agent: Agent) -> None:
    before = tree(agent.root)
    agent.shell("c1", "echo KEY=2 > .env; rm a.txt; mkdir -p d/e; echo x > d/e/f; ln -s f d/e/l")
    assert agent.changes() == [
        ("c1", {".env": "modified", "a.txt": "deleted", "d": "created", "d/e": "created", "d/e/f": "created",
                "d/e/l": "created"})
    ]  # fmt: skip
    assert agent.coverage() == []
    agent.undo()
    assert tree(agent.root) == before


@pytest.mark.req("D14.hooks.edits_and_shell")
def test_an_edit_is_one_call_with_the_agents_own_ids(agent: Agent) -> None:
    told: dict[str, Any] = {
        "label": "toolu_1",
        "tool": "Write",
        "input": {"file_path": str(agent.root / "new/deep.txt")},
    }
    agent.say("pre", **told)
    (agent.root / "new").mkdir()
    (agent.root / "new/deep.txt").write_text("x")
    agent.say("post", **told)
    (row,) = agent.log()
    assert (row["label"], row["session_id"], row["turn_id"], row["tool"]) == ("toolu_1", "s1", "p1", "Write")
    assert agent.changes() == [("toolu_1", {"new": "created", "new/deep.txt": "created"})]
    agent.undo("toolu_1")
    assert not (agent.root / "new").exists()


def test_a_failed_tool_is_recorded_and_its_changes_are_kept(agent: Agent) -> None:
    agent.shell("c1", "echo changed > a.txt; false", failed="Exit code 1")
    assert (agent.root / "a.txt").read_text() == "changed\n"
    assert [(row["status"], len(row["changes"])) for row in agent.log()] == [("committed", 1)]


def test_a_tool_that_only_reads_is_not_recorded(agent: Agent) -> None:
    agent.say("pre", label="c1", tool="Read")
    agent.say("post", label="c1", tool="Read")
    assert agent.log() == []


def test_each_prompt_is_a_turn_and_a_turn_is_rolled_back_whole(agent: Agent) -> None:
    before = tree(agent.root)
    for turn in ("p1", "p2"):
        agent.say("prompt", turn=turn, prompt=f"do {turn}")
        agent.shell(f"{turn}a", f"echo {turn} >> a.txt", turn=turn)
        agent.shell(f"{turn}b", f"echo {turn} >> .env", turn=turn)
        agent.say("stop", turn=turn)
    agent.opened.session("s1").rollback()
    assert (agent.root / "a.txt").read_text() == "one\ntwo\np1\n"
    agent.opened.session("s1").rollback()
    assert tree(agent.root) == before


def test_a_persons_edit_between_two_calls_survives_undo(agent: Agent) -> None:
    agent.shell("c1", "echo three >> a.txt")
    (agent.root / "a.txt").write_text("zero\none\ntwo\nthree\n")
    agent.shell("c2", "echo x > b.txt")
    assert [row["external"] for row in agent.log()] == [False, True, False]
    agent.undo("c1")
    assert (agent.root / "a.txt").read_text() == "zero\none\ntwo\n"


def test_undo_restores_a_persons_edit_that_a_command_deleted(agent: Agent) -> None:
    agent.shell("c1", "true")
    (agent.root / "notes.txt").write_text("never seen by anybody")
    agent.shell("c2", "rm notes.txt")
    agent.undo("c2")
    assert (agent.root / "notes.txt").read_text() == "never seen by anybody"


def test_overlapping_capture_windows_lose_no_change(agent: Agent) -> None:
    before = tree(agent.root)
    one: dict[str, Any] = {"label": "one", "tool": "Bash", "input": {"command": "1"}}
    two: dict[str, Any] = {"label": "two", "tool": "Bash", "input": {"command": "2"}}
    agent.say("pre", **one)
    (agent.root / "a.txt").write_text("by one")
    agent.say("pre", **two)
    (agent.root / ".env").write_text("by somebody")
    agent.say("post", **one)
    (agent.root / "b.txt").write_text("by two")
    agent.say("post", **two)
    assert agent.changes() == [
        ("one", {".env": "modified", "a.txt": "modified"}),
        ("two", {"b.txt": "created"}),
    ]
    agent.undo()
    agent.undo()
    assert tree(agent.root) == before


def test_an_edit_inside_a_capture_window_is_recorded_as_the_edits_own(agent: Agent) -> None:
    window: dict[str, Any] = {"label": "w", "tool": "Bash", "input": {"command": "x"}}
    edit: dict[str, Any] = {"label": "e", "tool": "Edit", "input": {"file_path": str(agent.root / "a.txt")}}
    agent.say("pre", **window)
    agent.say("pre", **edit)
    (agent.root / "a.txt").write_text("edited")
    agent.say("post", **edit)
    (agent.root / ".env").write_text("windowed")
    agent.say("post", **window)
    assert agent.changes() == [("w", {".env": "modified"}), ("e", {"a.txt": "modified"})]


def test_a_mulligan_call_inside_a_capture_window_is_not_recorded_twice(agent: Agent) -> None:
    told: dict[str, Any] = {"label": "w", "tool": "mcp__mulligan__write", "input": {}}
    agent.say("pre", **told)
    with agent.opened.session("mcp").call("ours") as call:
        call.write_file("a.txt", "by a tool of ours")
    agent.say("post", **told)
    assert agent.changes() == [("w", {}), ("ours", {"a.txt": "modified"})]


@pytest.mark.parametrize("restarts", ["before", "inside", "after"])
def test_no_change_is_lost_when_the_background_process_dies(agent: Agent, restarts: str) -> None:
    agent.shell("c0", "true")
    agent.recorder.go_on(float("inf"))
    before = tree(agent.root)
    told: dict[str, Any] = {"label": "c1", "tool": "Bash", "input": {"command": "x"}}
    if restarts == "before":
        agent.restart()
    agent.say("pre", **told)
    (agent.root / ".env").unlink()
    if restarts == "inside":
        agent.restart()
    (agent.root / "a.txt").write_text("changed")
    agent.say("post", **told)
    if restarts == "after":
        agent.restart()
    assert agent.changes()[1:] == [("c1", {".env": "deleted", "a.txt": "modified"})]
    assert agent.coverage() == []
    agent.undo("c1")
    assert tree(agent.root) == before


def test_gc_keeps_the_bytes_that_the_next_change_needs(agent: Agent) -> None:
    agent.shell("c0", "true")
    agent.recorder.go_on(float("inf"))
    with agent.opened.open_root.ledger.store.read() as tx:
        assert tx.count(KEPT) > 0
    collect_garbage(agent.opened.open_root.ledger)
    agent.shell("c1", "rm .env")
    agent.undo("c1")
    assert (agent.root / ".env").read_bytes() == ENV


def test_a_call_whose_start_event_was_missed_says_so(agent: Agent) -> None:
    agent.say("session_start")
    agent.recorder.go_on(float("inf"))
    (agent.root / ".env").write_text("KEY=3\n")
    agent.say("post", label="c1", tool="Bash", input={"command": "x"})
    assert agent.changes() == [("c1", {".env": "modified"})]
    assert agent.coverage() == [(".", "hook_missed")]
    agent.undo("c1")
    assert (agent.root / ".env").read_bytes() == ENV


@pytest.mark.parametrize("restarts", [False, True])
def test_a_call_whose_start_event_was_missed_does_not_contain_an_earlier_undo(agent: Agent, restarts: bool) -> None:
    (agent.root / "gone.txt").write_text("1\n")
    agent.say("session_start")
    agent.shell("t1", "echo KEY=3 > .env; rm a.txt; echo 1 > kept.txt")
    assert agent.undo().ok
    if restarts:
        agent.restart()
    (agent.root / "gone.txt").unlink()
    agent.say("post", label="t2", tool="Bash", input={"command": "rm gone.txt"})
    assert agent.changes()[2:] == [("t2", {"gone.txt": "deleted"})]
    assert agent.undo("t2").ok
    assert (agent.root / "a.txt").exists() and (agent.root / "gone.txt").exists()


def test_calls_whose_start_events_were_missed_are_recorded_one_after_another(agent: Agent) -> None:
    agent.shell("t1", "echo KEY=2 > .env")
    for label, value in (("t2", b"KEY=3\n"), ("t3", b"KEY=4\n")):
        (agent.root / ".env").write_bytes(value)
        agent.say("post", label=label, tool="Bash", input={"command": value.decode()})
    assert agent.changes() == [(label, {".env": "modified"}) for label in ("t1", "t2", "t3")]
    assert agent.coverage() == [(".", "hook_missed")] * 2
    assert agent.undo("t3").ok and (agent.root / ".env").read_bytes() == b"KEY=3\n"


def test_a_late_event_starts_no_call(agent: Agent) -> None:
    agent.say("session_start")
    agent.recorder.go_on(float("inf"))
    (agent.root / ".env").write_text("KEY=3\n")
    agent.say("pre", label="c1", tool="Bash", input={"command": "x"}, late=True)
    agent.say("post", label="c1", tool="Bash", input={"command": "x"}, late=True)
    assert (agent.changes(), agent.coverage()) == ([("c1", {".env": "modified"})], [(".", "hook_missed")])


def test_the_same_event_twice_is_one_call(agent: Agent) -> None:
    told: dict[str, Any] = {"label": "c1", "tool": "Bash", "input": {"command": "x"}}
    agent.say("prompt", prompt="hello")
    agent.say("prompt", prompt="hello")
    agent.say("pre", **told)
    agent.say("pre", **told)
    (agent.root / "a.txt").write_text("x")
    agent.say("post", **told)
    agent.say("post", **told)
    assert agent.changes() == [("c1", {"a.txt": "modified"})]


def test_the_same_tool_id_in_another_turn_is_another_call(agent: Agent) -> None:
    agent.shell("call_1", "echo 1 > a.txt", turn="p1")
    agent.shell("call_1", "echo 2 > a.txt", turn="p2")
    assert [label for label, _ in agent.changes()] == ["call_1", "call_1"]
    agent.undo("call_1")
    assert (agent.root / "a.txt").read_text() == "1\n"


def test_calls_of_an_agent_without_ids_are_matched_by_their_input(agent: Agent) -> None:
    one: dict[str, Any] = {"agent": "gemini", "turn": None, "tool": "run_shell_command", "input": {"command": "1"}}
    two = {**one, "input": {"command": "2"}}
    agent.say("prompt", agent="gemini", turn=None, prompt="both")
    agent.say("pre", **one)
    agent.say("pre", **two)
    (agent.root / "b.txt").write_text("x")
    agent.say("post", **two)
    (agent.root / "c.txt").write_text("x")
    agent.say("post", **one)
    agent.say("stop", agent="gemini", turn=None)
    assert agent.changes() == [(None, {"c.txt": "created"}), (None, {"b.txt": "created"})]
    assert len({row["turn_id"] for row in agent.log()}) == 1


@pytest.mark.parametrize("kind", ["stop", "prompt", "session_end"])
def test_a_stop_event_ends_open_calls(agent: Agent, kind: Kind) -> None:
    agent.say("pre", label="c1", tool="Bash", input={"command": "x"})
    (agent.root / "a.txt").write_text("half done")
    agent.say(kind, turn="p2" if kind == "prompt" else "p1")
    assert [(row["label"], row["status"], len(row["changes"])) for row in agent.log()] == [("c1", "committed", 1)]
    assert (agent.root / "a.txt").read_text() == "half done"


def test_a_stop_event_does_not_end_calls_of_running_subagents(agent: Agent) -> None:
    told: dict[str, Any] = {"label": "c1", "tool": "Bash", "input": {"command": "x"}, "worker": "sub"}
    agent.say("pre", **told)
    agent.say("stop")
    (agent.root / "a.txt").write_text("later")
    agent.say("post", **told)
    assert agent.changes() == [("c1", {"a.txt": "modified"})]


def _dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


@pytest.mark.parametrize("who", ["recorder", "opener"])
def test_a_call_of_a_dead_agent_ends_and_its_changes_are_recorded(agent: Agent, who: str) -> None:
    agent.shell("c0", "true")
    agent.recorder.go_on(float("inf"))
    child = subprocess.Popen(["sleep", "1000"])
    agent.say("pre", label="c1", tool="Bash", input={"command": "x"}, pid=child.pid)
    (agent.root / ".env").write_text("half")
    agent.recorder.sweep()
    assert agent.log()[-1]["status"] == "open"
    child.kill()
    child.wait()
    if who == "recorder":
        agent.recorder.sweep()
    else:
        agent.restart()
    assert agent.changes()[-1] == ("c1", {".env": "modified"})
    with agent.opened.open_root.ledger.store.read() as tx:
        assert tx.select(OPEN) == []
    agent.undo("c1")
    assert (agent.root / ".env").read_bytes() == ENV


def test_opening_the_store_does_not_end_a_call_of_a_living_agent(agent: Agent) -> None:
    agent.say("pre", label="c1", tool="Bash", input={"command": "x"}, pid=os.getpid())
    agent.restart()
    assert [row["status"] for row in agent.log()] == ["open"]


def test_files_outside_the_root_are_listed_and_not_touched(agent: Agent, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.txt"
    told: dict[str, Any] = {"label": "c1", "tool": "Write", "input": {"file_path": str(elsewhere)}}
    agent.say("pre", **told)
    elsewhere.write_text("x")
    agent.say("post", **told)
    assert (agent.changes(), agent.coverage()) == ([("c1", {})], [(str(elsewhere), "outside_root")])


def test_a_path_through_a_link_is_the_file_behind_it(agent: Agent) -> None:
    (agent.root / "real").mkdir()
    (agent.root / "real/f").write_text("1")
    (agent.root / "link").symlink_to("real")
    told: dict[str, Any] = {"label": "c1", "tool": "Edit", "input": {"file_path": str(agent.root / "link/f")}}
    agent.say("pre", **told)
    (agent.root / "real/f").write_text("2")
    agent.say("post", **told)
    assert agent.changes() == [("c1", {"real/f": "modified"})]


@pytest.mark.req("D5.unstable_read")
def test_a_file_that_changes_during_every_read_is_listed_as_unstable(agent: Agent) -> None:
    busy, number = agent.root / "busy.bin", 0
    while ("busy.bin", "unstable") not in agent.coverage():
        busy.write_bytes(bytes(SIZE_BYTES))
        told: dict[str, Any] = {"label": f"c{number}", "tool": "Edit", "input": {"file_path": str(busy)}}
        with written_all_the_time(busy):
            agent.say("pre", **told)
            with busy.open("ab") as file:
                file.write(b"x")
            agent.say("post", **told)
        number += 1


@pytest.mark.req("D5.unstable_read")
@pytest.mark.parametrize("tool", ["Edit", "Bash"])
def test_a_file_that_is_unstable_only_before_the_tool_is_listed_and_not_restored(agent: Agent, tool: str) -> None:
    """The bytes that Mulligan read were never there together, so they are nobody's earlier content."""
    busy = agent.root / "busy.bin"
    busy.write_text("theirs")
    agent.shell("c0", "true")
    os.utime(busy, ns=(1, 1))
    given = {"file_path": str(busy)} if tool == "Edit" else {"command": "printf after > busy.bin"}
    told: dict[str, Any] = {"label": "c1", "tool": tool, "input": given}
    with grown_by_each_read(busy):
        agent.say("pre", **told)
    if tool == "Edit":
        agent.restart()
    busy.write_text("after")
    agent.say("post", **told)
    assert [note for note in agent.coverage() if note[0] == "busy.bin"] == [("busy.bin", "unstable")]
    assert agent.changes()[-1] == ("c1", {})
    assert busy.read_text() == "after"


def test_a_file_too_large_to_capture_is_reported(agent: Agent) -> None:
    (agent.root / "big.bin").write_bytes(os.urandom(3 << 20))
    agent.shell("c1", "echo x >> big.bin; echo y > a.txt")
    assert agent.changes() == [("c1", {"a.txt": "modified"})]
    assert agent.coverage() == [("big.bin", "no_baseline")]
    agent.shell("c2", "echo z >> big.bin")
    assert agent.changes()[1:] == [("c2", {"big.bin": "modified"})]


def test_a_git_repository_is_captured_by_reference_and_its_files_are_restored(agent: Agent) -> None:
    git = ["git", "-C", str(agent.root), "-c", "user.name=T", "-c", "user.email=t@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    before = {name: data for name, data in tree(agent.root).items() if not name.startswith(".git/")}
    agent.shell(
        "c1", "rm a.txt .gitignore; echo KEY=9 > .env; git add -A; git -c user.name=T -c user.email=t@e commit -qm y"
    )
    assert {"a.txt": "deleted", ".gitignore": "deleted", ".env": "modified"}.items() <= agent.changes()[0][1].items()
    assert not any(path.startswith(".git/objects") for path in agent.changes()[0][1])
    agent.undo("c1")
    assert {name: data for name, data in tree(agent.root).items() if not name.startswith(".git/")} == before


def test_undo_restores_a_moved_and_a_removed_folder(agent: Agent) -> None:
    (agent.root / "pkg/inner").mkdir(parents=True)
    (agent.root / "pkg/inner/f.py").write_text("f")
    (agent.root / "pkg/g.py").write_text("g")
    os.chmod(agent.root / "pkg/g.py", 0o640)
    shutil.copytree(agent.root / "pkg", agent.root / "other")
    before = tree(agent.root)
    agent.shell("c1", "mv pkg moved; rm -r other; chmod 600 a.txt")
    assert agent.coverage() == []
    agent.undo("c1")
    assert tree(agent.root) == before
    assert (agent.root / "pkg/g.py").stat().st_mode & 0o777 == 0o640


def coverage_of(agent: Agent, label: str) -> list[tuple[str, str]]:
    row = next(row for row in agent.log() if row["label"] == label)
    return [(note["path"], note["reason"]) for note in row["coverage"]]


@contextmanager
def cat(folder: Path, **how: Any) -> Iterator[None]:
    """A process that works in a folder as long as the block lasts."""
    with subprocess.Popen(**{"args": ["cat"], "stdin": subprocess.PIPE, "cwd": folder, **how}) as running:
        yield
        running.communicate()


@pytest.mark.req("D6.coverage.background")
def test_a_process_that_a_command_leaves_running_is_named_in_its_coverage(agent: Agent) -> None:
    with cat(agent.root):
        # The kernel says only by ticks of its clock when a process began.
        next_ticks_s = since_boot_s() + 0.05
        while since_boot_s() < next_ticks_s:
            pass
        agent.shell("earlier", "echo 1 > b.txt")
        told: dict[str, Any] = {"label": "leaves", "tool": "Bash", "input": {"command": "cat &"}}
        agent.say("pre", **told)
        with cat(agent.root):
            agent.say("post", **told)
    agent.shell("later", "echo 2 > b.txt")
    found = [coverage_of(agent, label) for label in ("earlier", "leaves", "later")]
    assert found == [[], [(".", "background")], []]


@pytest.mark.req("D6.coverage.background")
@pytest.mark.parametrize("kind", ["left the folder", "has a file open", "is in a folder called mulligan", "elsewhere"])
def test_a_daemon_counts_although_it_works_in_another_folder(agent: Agent, kind: str) -> None:
    told: dict[str, Any] = {"label": "leaves", "tool": "Bash", "input": {"command": "daemon"}}
    inner = agent.root / "mulligan"
    inner.mkdir()
    agent.say("pre", **told)
    with ExitStack() as stack:
        if kind == "left the folder":
            stack.enter_context(cat(Path("/"), env={**os.environ, "PWD": str(agent.root)}))
        elif kind == "has a file open":
            stack.enter_context(cat(Path("/"), stdout=stack.enter_context(open(agent.root / "out", "wb"))))
        elif kind == "is in a folder called mulligan":
            stack.enter_context(cat(inner, args=["cat", "-", str(inner / "none")]))
        else:
            stack.enter_context(cat(Path("/")))
        agent.say("post", **told)
    expected = [] if kind == "elsewhere" else [(".", "background")]
    assert [note for note in coverage_of(agent, "leaves") if note[1] == "background"] == expected


@pytest.mark.req("D6.coverage.store_full")
def test_a_call_during_which_the_store_was_full_says_so(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"label": "full", "tool": "Bash", "input": {"command": "echo"}}
    with monkeypatch.context() as disk, pytest.raises(MulliganError):
        disk.setattr(agent.opened.store, "write", _full_disk)
        agent.say("pre", **told)
    agent.say("post", **told)
    agent.shell("later", "echo 2 > b.txt")
    assert (".", "store_full") in coverage_of(agent, "full") and coverage_of(agent, "later") == []


@pytest.mark.req("D6.coverage.store_full")
def test_a_call_that_the_store_could_not_take_says_so_when_another_process_ends_it(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {"label": "full", "tool": "Bash", "input": {"command": "echo"}}
    agent.say("pre", **told)
    (agent.root / "b.txt").write_text("1")
    with monkeypatch.context() as disk, pytest.raises(MulliganError):
        disk.setattr(observe, "record_changes", _full_disk)
        agent.say("post", **told)
    agent.restart()
    agent.say("post", **told)
    assert (".", "store_full") in coverage_of(agent, "full")


def _full_disk(*_: object, **__: object) -> None:
    raise fault("no_space", "The disk is full; free some space and try again.")


@pytest.mark.req("D6.coverage.hooked_moves")
def test_a_file_that_a_hooked_command_moved_is_a_move(agent: Agent) -> None:
    agent.shell("c1", "mv a.txt moved.txt")
    changes = {change["path"]: change for change in agent.log()[-1]["changes"]}
    assert changes["moved.txt"]["kind"] == "renamed" and changes["moved.txt"]["from"] == "a.txt"
    agent.undo("c1")
    assert (agent.root / "a.txt").exists() and not (agent.root / "moved.txt").exists()


@pytest.mark.req("D6.git_outside_restore")
def test_a_commit_in_a_linked_working_tree_is_recorded_and_undone_with_git_restore(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=u", "-c", "user.email=e", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    main, root = str(tmp_path / "main"), tmp_path / "tree"
    git("init", "-q", main)
    git("-C", main, "commit", "-q", "--allow-empty", "-m", "0")
    git("-C", main, "worktree", "add", "-q", str(root))
    old, agent = git("-C", str(root), "rev-parse", "HEAD"), Agent(root, tmp_path / "store")
    try:
        commit = "git -c user.name=u -c user.email=e commit -q"
        agent.shell("1", "echo one > a")
        agent.shell("2", f"git add a && {commit} -m 1")
        assert [note for note in agent.coverage() if note[0] == ".git"] == [(".git", "commit_outside")]
        call = agent.log()[-1]["id"]
        assert agent.opened.session("s1").undo(call, git="restore").ok
        assert git("-C", str(root), "rev-parse", "HEAD") == old
        assert git("-C", str(root), "status", "--short") == "?? a"
    finally:
        agent.close()
