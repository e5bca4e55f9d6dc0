"""Anything, in any order: agents, a person, failures, ways back and deaths on one real tree and one real store.

What must hold after every step:
1. Bytes that anyone wrote are on disk or in the store, unless the one who wrote them replaced them unseen.
2. A failed call, and one whose process died, leaves no trace on what nobody else changed meanwhile.
3. A way back changes only paths it names, and none that it says it left.
4. Undo, then redo, is where it began.
5. At the end, the journals give the tables, and nothing is left over.
"""

from __future__ import annotations

import contextvars
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mulligan.boundary.verdict import Boundary
from mulligan.effects.handle import CallHandle
from mulligan.effects.session import DurableSession
from mulligan.files.disk import HostDisk
from mulligan.history.branches import drop_branch, fork_files, merge_branch
from mulligan.history.log import calls_of
from mulligan.history.open_root import OpenRoot
from mulligan.history.projection import SCHEMA
from mulligan.history.tables import CALLS, OPEN, TOUCHES
from mulligan.history.undo import UndoResult
from mulligan.store.protocol import CLAIMS
from mulligan.store.verify import verify
from mulligan.testing import Crash, contents_of, tree_of
from mulligan.values.digest import digest_of
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from tests.temp_workspace import TempWorkspace, open_temp_workspace

PATHS = ("a.txt", "b.txt", "d/c.txt", "d/e/f.txt", "g")
FOLDERS = ("d", "d/e", "g")
EXPECTED = {"nothing_to_undo", "nothing_to_redo", "path_claimed", "path_busy", "turn_open", "call_open"}

paths = st.sampled_from(PATHS)
places = st.sampled_from((*PATHS, *FOLDERS))
lines = st.lists(st.sampled_from("abcde"), min_size=3, max_size=7)
contents = st.one_of(
    lines.map(lambda letters: "".join(f"{letter}{i}\n" for i, letter in enumerate(letters)).encode()),
    st.sampled_from([b"", b"\0binary\xff", b"\0other\xfe", b"no newline", b"crlf\r\nlines\r\n"]),
)
writes = st.tuples(st.just("write"), paths, contents)
edits = st.tuples(st.just("edit"), paths, st.sampled_from("abcde"))
patches = st.tuples(st.just("patch"), paths, contents)
deletes = st.tuples(st.just("delete"), places, st.none())
moves = st.tuples(st.just("move"), places, places)
mkdirs = st.tuples(st.just("mkdir"), st.sampled_from(FOLDERS), st.none())
effects = st.one_of(writes, writes, edits, patches, deletes, moves, mkdirs)
sessions = st.sampled_from(("one", "two"))
modes = st.sampled_from(("merge", "merge", "overwrite", "refuse"))
picks = st.integers(0, 30)


class Breakable:
    """The steps of a disk that can be told to lose its process at the n-th from now."""

    def __init__(self) -> None:
        self.left: int | None = None

    def reach(self, step: str, path: RepoPath) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                raise Crash(step)


@dataclass
class OpenCall:
    """A call in progress: what its paths held before it, and which of them somebody else touched since."""

    handle: CallHandle
    context: contextvars.Context = field(default_factory=contextvars.Context)
    before: dict[str, bytes | None] = field(default_factory=dict)
    disturbed: set[str] = field(default_factory=set)


def perform(call: CallHandle, effect: tuple[str, str, Any]) -> bool:
    """Whether it was done. Every refusal is a receipt."""
    kind, path, what = effect
    if kind == "write":
        return call.write_file(path, what, create_parents=True).ok
    if kind == "edit":
        return call.edit_file(path, f"{what}1\n", f"{what}{what}\n").ok
    if kind == "patch":
        added = "".join(f"+{line}\n" for line in what.decode("latin-1").splitlines()) or "+x\n"
        return call.apply_patch(f"*** Begin Patch\n*** Add File: {path}\n{added}*** End Patch\n").ok
    if kind == "delete":
        return call.delete(path, recursive=True).ok
    return call.move(path, what, overwrite=True).ok if kind == "move" else call.mkdir(path, parents=True).ok


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def touches(path: str, other: str) -> bool:
    return path == other or path.startswith(other + "/") or other.startswith(path + "/")


class Machine(RuleBasedStateMachine):
    blank: Path

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="machine-"))
        shutil.copytree(self.blank, self.base / "home")
        self.steps = Breakable()
        self.workspace: TempWorkspace = open_temp_workspace(self.base, steps=self.steps)
        self.open: list[OpenCall] = []
        self.unkept: set[bytes] = set()
        self.forks: dict[str, Path] = {}
        self.forked = 0
        (self.base / "forks").mkdir()

    @property
    def root(self) -> Path:
        return self.workspace.root

    def session(self, name: str) -> DurableSession:
        return self.workspace.session(name)

    def files(self) -> dict[str, bytes]:
        return contents_of(self.root)

    # The person.

    @rule(path=paths, content=contents, in_place=st.booleans())
    def person_saves(self, path: str, content: bytes, in_place: bool) -> None:
        target = self.root / path
        if target.is_dir() or any(parent.is_file() for parent in target.parents):
            return
        self.lose(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if in_place or not target.exists():
            target.write_bytes(content)
        else:
            target.with_suffix(".swp").write_bytes(content)
            os.replace(target.with_suffix(".swp"), target)
        self.unkept.add(content)

    @rule(path=places)
    def person_deletes(self, path: str) -> None:
        target = self.root / path
        for below in [one for one in self.files() if touches(one, path)]:
            if target.is_dir() or below == path:
                self.lose(below)
        self.disturb(path)
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()

    @rule(path=paths, mode=st.sampled_from([0o600, 0o644, 0o755]))
    def person_changes_the_mode(self, path: str, mode: int) -> None:
        if (self.root / path).is_file():
            self.disturb(path)
            os.chmod(self.root / path, mode)

    def lose(self, path: str) -> None:
        """The person replaces what is there, which nobody but they may have seen."""
        self.disturb(path)
        if (self.root / path).is_file():
            self.unkept.discard((self.root / path).read_bytes())

    def disturb(self, path: str) -> None:
        for call in self.open:
            call.disturbed.add(path)

    # Calls.

    @rule(session=sessions, wanted=st.lists(effects, min_size=1, max_size=3))
    def call(self, session: str, wanted: list[tuple[str, str, Any]]) -> None:
        with self.session(session).call() as call:
            for effect in wanted:
                before = tree_of(self.root)
                if not perform(call, effect):
                    assert tree_of(self.root) == before

    @rule(session=sessions, wanted=st.lists(effects, min_size=1, max_size=4), how=st.sampled_from(["fail", "raise"]))
    def failing_call(self, session: str, wanted: list[tuple[str, str, Any]], how: str) -> None:
        before = tree_of(self.root)
        try:
            with self.session(session).call() as call:
                for effect in wanted:
                    perform(call, effect)
                if how == "raise":
                    raise KeyboardInterrupt
                call.fail("on purpose")
        except KeyboardInterrupt:
            pass
        assert call.conflicts == []
        assert tree_of(self.root) == before

    @rule(session=sessions, path=paths, other=places, good=st.booleans())
    def shell(self, session: str, path: str, other: str, good: bool) -> None:
        """A command that writes one file and removes another; one that fails leaves no trace."""
        before = tree_of(self.root)
        script = 'mkdir -p "$(dirname "$0")" && echo shell >> "$0"; rm -rf "$1"'
        with self.session(session).call() as call:
            call.exec(["sh", "-c", script, path, other])
            if not good:
                call.fail("on purpose")
        assert call.conflicts == []
        assert good or tree_of(self.root) == before

    @precondition(lambda self: len(self.open) < 3)
    @rule(session=sessions)
    def begin(self, session: str) -> None:
        call = OpenCall(self.session(session).call())
        call.context.run(call.handle.__enter__)
        self.open.append(call)

    @precondition(lambda self: self.open)
    @rule(pick=picks, effect=effects)
    def go_on(self, pick: int, effect: tuple[str, str, Any]) -> None:
        call = self.open[pick % len(self.open)]
        before = self.files()
        call.context.run(perform, call.handle, effect)
        for path in changed(before, self.files()):
            call.before.setdefault(path, before.get(path))

    @precondition(lambda self: self.open)
    @rule(pick=picks, good=st.booleans())
    def end(self, pick: int, good: bool) -> None:
        call = self.open.pop(pick % len(self.open))
        before = self.files()
        if not good:
            call.handle.fail("on purpose")
        call.context.run(call.handle.__exit__, None, None, None)
        if good:
            assert self.files() == before
        else:
            assert changed(before, self.files()) <= call.before.keys()
            self.check_gone(call)

    def check_gone(self, call: OpenCall) -> None:
        after = self.files()
        for path, was in call.before.items():
            if not any(touches(path, other) for other in call.disturbed):
                assert after.get(path) == was, path

    # Ways back.

    def calls(self) -> list[str]:
        with self.workspace.open_root.ledger.store.read() as tx:
            return [row.id for row in calls_of(tx, self.workspace.open_root, None) if row.status == "committed"]

    def owner_of(self, call: str) -> str | None:
        """The session whose call it is; None: somebody's edit."""
        with self.workspace.open_root.ledger.store.read() as tx:
            row = tx.get(CALLS, call)
        return None if row is None else row.session

    def go_back(self, way: Callable[..., UndoResult], *named: Any, mode: str = "merge") -> UndoResult | None:
        before = tree_of(self.root)
        try:
            planned = way(*named, on_conflict=mode, dry_run=True)
            assert tree_of(self.root) == before
            done = way(*named, on_conflict=mode)
        except MulliganError as error:
            assert error.code in EXPECTED, error
            assert tree_of(self.root) == before
            return None
        assert done.outcomes == planned.outcomes
        after = tree_of(self.root)
        moved = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        assert moved <= {one.path for one in done.outcomes if one.outcome in ("restored", "merged")}
        if mode == "refuse" and not done.ok:
            assert moved == set()
        return done

    @rule(session=sessions, mode=modes)
    def undo_newest(self, session: str, mode: str) -> None:
        self.go_back(self.session(session).undo, mode=mode)

    @precondition(lambda self: self.calls())
    @rule(session=sessions, pick=picks, mode=modes, verb=st.sampled_from(["undo", "restore", "rewind"]))
    def go_back_to_one(self, session: str, pick: int, mode: str, verb: str) -> None:
        calls = self.calls()
        chosen = calls[pick % len(calls)]
        if verb != "rewind":
            self.go_back(getattr(self.session(session), verb), chosen, mode=mode)
        elif (owner := self.owner_of(chosen)) is not None:
            self.go_back(self.session(owner).rewind, chosen, mode=mode)

    @precondition(lambda self: self.calls())
    @rule(session=sessions, pick=picks, path=places)
    def undo_a_part(self, session: str, pick: int, path: str) -> None:
        calls = self.calls()
        self.go_back(self.session(session).undo, calls[pick % len(calls)], [path])

    @rule(session=sessions)
    def undo_then_redo(self, session: str) -> None:
        before = tree_of(self.root)
        done = self.go_back(self.session(session).undo)
        if done is not None and done.call_id is not None:
            again = self.go_back(self.session(session).redo)
            assert again is not None and again.ok
            assert tree_of(self.root) == before

    @rule(session=sessions, mode=modes)
    def redo(self, session: str, mode: str) -> None:
        self.go_back(self.session(session).redo, mode=mode)

    @rule(session=sessions, wanted=st.lists(effects, min_size=2, max_size=3))
    def turn(self, session: str, wanted: list[tuple[str, str, Any]]) -> None:
        with self.session(session).turn():
            for effect in wanted:
                with self.session(session).call() as call:
                    perform(call, effect)

    @rule(session=sessions, mode=modes)
    def rollback(self, session: str, mode: str) -> None:
        self.go_back(self.session(session).rollback, mode=mode)

    # Forks with files of their own.

    @precondition(lambda self: len(self.forks) < 2 and not self.open)
    @rule(session=sessions)
    def fork(self, session: str) -> None:
        directory, self.forked = self.base / "forks" / str(self.forked), self.forked + 1
        made = fork_files(self.workspace.open_root, SessionId(session), str(directory))
        self.forks[made.session] = directory
        assert contents_of(directory) == self.files()

    @precondition(lambda self: self.forks)
    @rule(pick=picks, wanted=st.lists(effects, min_size=1, max_size=3), good=st.booleans())
    def work_in_a_fork(self, pick: int, wanted: list[tuple[str, str, Any]], good: bool) -> None:
        fork = sorted(self.forks)[pick % len(self.forks)]
        before, there_before = tree_of(self.root), tree_of(self.forks[fork])
        there = OpenRoot(self.workspace.open_root.ledger, HostDisk(str(self.forks[fork])))
        with DurableSession(there, SessionId(fork), Boundary(str(self.forks[fork]))).call() as call:
            for effect in wanted:
                perform(call, effect)
            if not good:
                call.fail("on purpose")
        there.close()
        assert tree_of(self.root) == before
        assert good or tree_of(self.forks[fork]) == there_before

    @precondition(lambda self: self.forks)
    @rule(pick=picks, path=paths, content=contents)
    def person_saves_in_a_fork(self, pick: int, path: str, content: bytes) -> None:
        target = self.forks[sorted(self.forks)[pick % len(self.forks)]] / path
        if not target.is_dir() and not any(parent.is_file() for parent in target.parents):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    @precondition(lambda self: self.forks)
    @rule(pick=picks, mode=modes)
    def merge(self, pick: int, mode: str) -> None:
        fork = sorted(self.forks)[pick % len(self.forks)]
        theirs = contents_of(self.forks[fork])
        merged = self.go_back(partial(merge_branch, self.workspace.open_root), fork, mode=mode)
        if merged is not None and merged.ok:
            taken = [one.path for one in merged.outcomes if one.outcome == "restored"]
            assert {path: self.files().get(path) for path in taken if path in theirs} == {
                path: theirs[path] for path in taken if path in theirs
            }
            del self.forks[fork]

    @precondition(lambda self: self.forks)
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        fork, before = sorted(self.forks)[pick % len(self.forks)], tree_of(self.root)
        directory = self.forks.pop(fork)
        drop_branch(self.workspace.open_root, fork)
        assert (directory.exists(), tree_of(self.root)) == (False, before)

    @precondition(lambda self: self.forks)
    @rule(pick=picks, at=st.integers(1, 10))
    def die_merging(self, pick: int, at: int) -> None:
        fork = sorted(self.forks)[pick % len(self.forks)]

        def merge() -> None:
            if merge_branch(self.workspace.open_root, fork).ok:
                del self.forks[fork]

        self.die_in(merge, at=at)

    # Deaths.

    @rule(session=sessions, wanted=st.lists(effects, min_size=1, max_size=3), at=st.integers(1, 14))
    def die_working(self, session: str, wanted: list[tuple[str, str, Any]], at: int) -> None:
        before = self.files()
        self.steps.left = at
        try:
            with self.session(session).call() as call:
                for effect in wanted:
                    perform(call, effect)
                raise Crash
        except Crash:
            pass
        self.reopen()
        if not self.open:
            assert self.files() == before
        self.after_death()

    @rule(session=sessions, at=st.integers(1, 10))
    def die_going_back(self, session: str, at: int) -> None:
        self.die_in(self.session(session).undo, at=at)

    @rule()
    def die_idle(self) -> None:
        self.reopen()
        self.after_death()

    def die_in(self, act: Callable[[], object], *, at: int) -> None:
        """Act, and die at the n-th step if there are so many: then the whole act has left no trace."""
        before = tree_of(self.root)
        self.steps.left = at
        died = False
        try:
            act()
        except Crash:
            died = True
        except MulliganError as error:
            assert error.code in EXPECTED, error
        self.steps.left = None
        if died:
            quiet = not self.open
            self.reopen()
            if quiet:
                assert tree_of(self.root) == before
            self.after_death()

    def reopen(self) -> None:
        """The process is gone: nobody holds its byte any more, and its store is opened by another."""
        self.steps.left = None
        with self.workspace.open_root.ledger.store.write() as tx:
            for row in tx.select(OPEN):
                tx.put(OPEN, replace(row, owner=1_000_000))
        self.workspace.close()
        self.workspace = open_temp_workspace(self.base, steps=self.steps)

    def after_death(self) -> None:
        for call in self.open:
            self.check_gone(call)
        self.open.clear()

    # What holds.

    @invariant()
    def nobodys_bytes_are_lost(self) -> None:
        on_disk = set(self.files().values())
        with self.workspace.open_root.ledger.store.read() as tx:
            self.unkept = {
                data for data in self.unkept if not self.workspace.open_root.ledger.blobs.has(tx, digest_of(data))
            }
        assert self.unkept <= on_disk

    def teardown(self) -> None:
        for call in self.open:
            call.context.run(call.handle.__exit__, None, None, None)
        store = self.workspace.open_root.ledger.store
        with store.read() as tx:
            assert (tx.select(OPEN), tx.select(TOUCHES), tx.select(CLAIMS)) == ([], [], [])
        assert [problem for problem in verify(store, SCHEMA) if problem.severity == "broken"] == []
        assert [path for path in tree_of(self.root) if ".mulligan" in path] == []
        self.workspace.close()
        shutil.rmtree(self.base)


def run(base: Path, examples: int, *phases: Phase) -> None:
    blank = open_temp_workspace(base)
    blank.close()
    Machine.blank = base / "home"
    chosen = settings(
        max_examples=examples,
        stateful_step_count=50,
        database=None,
        phases=phases,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=chosen)


@pytest.mark.req("D6.nobodys_bytes_dropped", "D6.only_changed_paths", "D6.no_git_clean", "D5.parallel_calls")
@pytest.mark.req("D19.stateful_machine")
def test_anything_in_any_order(tmp_path: Path) -> None:
    run(tmp_path, 200, Phase.generate)


@pytest.mark.slow
def test_anything_in_any_order_for_long(tmp_path: Path) -> None:
    run(tmp_path, 2_000, Phase.generate, Phase.shrink)
