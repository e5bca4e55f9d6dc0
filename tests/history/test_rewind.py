"""Turns, the redo stack, rewinding, and the mixed repository in which all of it must hold together."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from mulligan.effects.session import DurableSession
from mulligan.history.tables import CALLS, REDO
from mulligan.history.undo import UndoOptions, rollback
from mulligan.store.sqlite import SqliteStore
from mulligan.testing import Dir, File, Link, Tree, contents_of, plant, tree_of
from mulligan.values.errors import MulliganError
from tests.history.killed_process import KILLED, die_in
from tests.temp_workspace import TempWorkspace

LINES = [f"line {i}\n" for i in range(20)]


def text(**changed: str) -> str:
    return "".join(changed.get(f"l{i}", line.rstrip("\n")) + "\n" for i, line in enumerate(LINES))


def write(session: DurableSession, path: str, content: str | bytes) -> str:
    with session.call() as call:
        assert call.write_file(path, content, create_parents=True).ok
    return call.id


def fails_with(code: str) -> _Fails:
    return _Fails(code)


class _Fails:
    def __init__(self, code: str) -> None:
        self._code = code
        self._raises = pytest.raises(MulliganError)

    def __enter__(self) -> None:
        self._caught = self._raises.__enter__()

    def __exit__(self, *told: object) -> bool:
        handled = self._raises.__exit__(*told)  # type: ignore[arg-type]  # passed on as they came
        assert self._caught.value.code == self._code
        return handled


def reads_of(workspace: TempWorkspace, act: Callable[[], object]) -> int:
    """How many statements the store runs meanwhile."""
    store, seen = workspace.open_root.ledger.store, list[str]()
    assert isinstance(store, SqliteStore)

    def note(_: apsw.Cursor, sql: str, __: object) -> bool:
        seen.append(sql)
        return True

    with store._connection() as connection:
        connection.exec_trace = note
    act()
    with store._connection() as connection:
        connection.exec_trace = None
    return len(seen)


def test_rewinding_asks_no_more_of_a_long_session_than_of_a_short_one(workspace: TempWorkspace) -> None:
    session, counts = workspace.session(), list[tuple[int, int]]()
    for turns in (4, 40):
        for number in range(turns):
            with session.turn():
                write(session, f"{number}.txt", "x\n" * number)
                session.perform("stat", {"path": "."})
        counts.append((reads_of(workspace, session.rollback), reads_of(workspace, session.undo)))
    (rolling, undoing), later = counts
    assert later[0] <= rolling + 10 and later[1] <= undoing + 10


@pytest.mark.parametrize("way", ["undo", "redo", "rollback"])
def test_a_word_that_says_nothing_about_conflicts_is_refused_and_changes_nothing(
    workspace: TempWorkspace, way: str
) -> None:
    session = workspace.session()
    with session.call() as call:
        call.write_file("a", "agent")
    with pytest.raises(MulliganError) as caught:
        getattr(session, way)(on_conflict="forse")
    assert (caught.value.code, caught.value.details["field"]) == ("invalid_params", "on_conflict")
    assert contents_of(workspace.root) == {"a": b"agent"}


class TestRollback:
    @pytest.mark.req("D6.rollback_call_by_call", "D6.rollback_spares_other_sessions")
    def test_one_sessions_turn_goes_and_the_others_lines_between_stay(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a.txt": text()})
        one, two = workspace.session("one"), workspace.session("two")
        with one.turn():
            write(one, "a.txt", text(l1="one"))
            write(two, "a.txt", text(l1="one", l5="two"))
            write(one, "a.txt", text(l1="one", l5="two", l9="one"))
            write(two, "a.txt", text(l1="one", l5="two", l9="one", l13="two"))
        done = one.rollback()
        assert [one.outcome for one in done.outcomes] == ["merged"]
        assert contents_of(workspace.root) == {"a.txt": text(l5="two", l13="two").encode()}
        assert one.redo().ok
        assert contents_of(workspace.root) == {"a.txt": text(l1="one", l5="two", l9="one", l13="two").encode()}
        assert two.undo().ok
        assert contents_of(workspace.root) == {"a.txt": text(l1="one", l5="two", l9="one").encode()}

    @pytest.mark.req("H8.redo_fresh_each_time", "D6.redo_stack")
    def test_turns_are_undone_one_by_one_and_redone_again_without_limit(self, workspace: TempWorkspace) -> None:
        session, states = workspace.session(), [contents_of(workspace.root)]
        for number in range(6):
            with session.turn():
                for path in ("a.txt", f"{number}.txt"):
                    write(session, path, f"turn {number}")
            states.append(contents_of(workspace.root))
        for _ in range(2):
            for state in reversed(states[:-1]):
                assert session.rollback().ok
                assert contents_of(workspace.root) == state
            with fails_with("nothing_to_undo"):
                session.rollback()
            for state in states[1:]:
                assert session.redo().ok
                assert contents_of(workspace.root) == state
            with fails_with("nothing_to_redo"):
                session.redo()

    @pytest.mark.req("H5.failed_turns_undoable", "D5.cancelled_turns_count")
    def test_a_turn_that_ended_badly_can_be_rolled_back(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        with pytest.raises(KeyboardInterrupt), session.turn():
            write(session, "a.txt", "kept by its own call")
            with session.call() as call:
                call.write_file("b.txt", "never")
                raise KeyboardInterrupt
        assert contents_of(workspace.root) == {"a.txt": b"kept by its own call"}
        assert session.rollback().ok
        assert contents_of(workspace.root) == {}

    def idle_turn(self, session: DurableSession, kind: str) -> None:
        """A turn of which nothing stands."""
        with session.turn():
            if kind == "looked":
                with session.call() as call:
                    call.read_file("a.txt")
            elif kind == "undone":
                session.undo(write(session, "b.txt", "second"))
            else:
                with pytest.raises(ZeroDivisionError), session.call() as call:
                    call.write_file("a.txt", "second")
                    raise ZeroDivisionError

    @pytest.mark.req("D5.cancelled_turns_count")
    @pytest.mark.parametrize("kind", ["failed", "looked", "undone"])
    def test_a_turn_without_effect_is_the_last_one_all_the_same(self, workspace: TempWorkspace, kind: str) -> None:
        session = workspace.session()
        with session.turn():
            write(session, "a.txt", "first")
        self.idle_turn(session, kind)
        planned, done = session.rollback(dry_run=True), session.rollback()
        assert (planned.ok, planned.outcomes, done.ok, done.outcomes) == (True, (), True, ())
        assert contents_of(workspace.root) == {"a.txt": b"first"}
        assert session.rollback().ok and contents_of(workspace.root) == {}
        with fails_with("nothing_to_undo"):
            session.rollback()
        assert session.redo().ok and contents_of(workspace.root) == {"a.txt": b"first"}
        assert session.redo().ok and session.rollback().outcomes == ()
        assert contents_of(workspace.root) == {"a.txt": b"first"}

    def test_a_rewind_to_an_earlier_point_passes_it(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        write(session, "a.txt", "first")
        second = write(session, "b.txt", "second")
        self.idle_turn(session, "failed")
        assert session.rewind(second).ok
        assert session.rollback().ok and contents_of(workspace.root) == {}

    def test_a_call_outside_any_turn_that_did_nothing_is_none(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        write(session, "a.txt", "first")
        with session.call() as call:
            call.read_file("a.txt")
        assert session.rollback().ok and contents_of(workspace.root) == {}

    @pytest.mark.req("D6.rollback_turn_open")
    def test_a_turn_that_is_still_running_is_not_rolled_back_nor_the_one_before(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        with session.turn():
            write(session, "a.txt", "first")
        with session.turn(), fails_with("turn_open"):
            session.rollback()
        with session.call() as call, fails_with("turn_open"):
            call.write_file("b.txt", "second")
            session.rollback()
        assert contents_of(workspace.root) == {"a.txt": b"first", "b.txt": b"second"}

    @pytest.mark.req("D6.rollback_cancel_open")
    def test_cancelling_aborts_the_open_calls_first(self, workspace: TempWorkspace) -> None:
        session, begun, go_on = workspace.session(), threading.Event(), threading.Event()
        told: list[str] = []
        write(session, "a.txt", "first")

        def work() -> None:
            with pytest.raises(MulliganError) as caught, session.turn(), session.call() as call:
                call.write_file("b.txt", "second")
                begun.set()
                go_on.wait()
                call.write_file("c.txt", "third")
            told.append(caught.value.code)

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        done = session.rollback(cancel_open=True)
        go_on.set()
        thread.join()
        assert done.ok and told == ["call_not_open"]
        assert contents_of(workspace.root) == {}

    @pytest.mark.req("D6.rollback_cancel_open", "D6.dry_run")
    @pytest.mark.parametrize("says", [None, "hello"])
    def test_a_dry_run_says_what_would_go_and_cancels_nothing(self, workspace: TempWorkspace, says: str | None) -> None:
        session = workspace.session()
        with session.turn("one"):
            session.inject({"role": "user", "content": "one"})
            write(session, "a.txt", "first")
        with session.turn("two"):
            if says is not None:
                session.inject({"role": "user", "content": says})
            with session.call() as call:
                call.write_file("b.txt", "second")
                planned = session.rollback(dry_run=True, cancel_open=True)
            assert call.status == "committed" and contents_of(workspace.root).keys() == {"a.txt", "b.txt"}
            before = session.rollback(dry_run=True, cancel_open=True)
            done = session.rollback(cancel_open=True)
            assert (before.outcomes, before.talk) == (done.outcomes, done.talk)
        assert [one.path for one in planned.outcomes] == ([] if says else ["a.txt"])
        assert planned.talk == {"messages": 1 if says else 0, "messages_before": 2 if says else 1}
        assert [one.path for one in done.outcomes] == ["b.txt"]

    @pytest.mark.req("D5.turn_complete")
    @pytest.mark.parametrize("in_call", [False, True])
    def test_a_turn_whose_process_died_is_over(self, workspace: TempWorkspace, in_call: bool) -> None:
        session = workspace.session()

        def die(there: TempWorkspace) -> None:
            with there.session().turn():
                write(there.session(), "a.txt", "of the dead")
                if in_call:
                    with there.session().call() as call:
                        call.write_file("b.txt", "half")
                        os._exit(KILLED)
                os._exit(KILLED)

        assert die_in(workspace.root.parent, die, at=None)
        with session.turn():
            write(session, "later.txt", "later")
        assert session.rollback().ok and contents_of(workspace.root).keys() - {"b.txt"} == {"a.txt"}
        assert session.rollback().ok and contents_of(workspace.root) == {}

    @pytest.mark.req("D6.rollback_turn_open")
    def test_of_the_whole_root_it_is_not_one_that_another_session_is_still_in(self, workspace: TempWorkspace) -> None:
        running, other = workspace.session("running"), workspace.session("other")
        with running.turn():
            write(running, "half.txt", "half")
            write(other, "z.txt", "z")
            assert rollback(workspace.open_root, how=UndoOptions()).ok
            with fails_with("turn_open"):
                rollback(workspace.open_root, how=UndoOptions())
            assert contents_of(workspace.root) == {"half.txt": b"half"}
            assert (
                rollback(workspace.open_root, how=UndoOptions(), cancel_open=True).ok
                and contents_of(workspace.root) == {}
            )

    def test_several_roots_and_sessions_are_rolled_back_apart(self, workspace: TempWorkspace) -> None:
        one, two = workspace.session("one"), workspace.session("two")
        write(one, "one.txt", "1")
        write(two, "two.txt", "2")
        assert one.rollback().ok
        assert contents_of(workspace.root) == {"two.txt": b"2"}


class TestRedo:
    def stack(self, workspace: TempWorkspace) -> int:
        with workspace.open_root.ledger.store.read() as tx:
            return tx.count(REDO)

    @pytest.mark.req("D6.redo_survives_own_calls", "D6.redo_stack")
    def test_undo_operations_of_all_kinds_share_one_stack(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        calls = [write(session, f"{i}.txt", str(i)) for i in range(4)]
        full = contents_of(workspace.root)
        session.undo(calls[1])
        session.restore(calls[3])
        session.rollback()
        session.rewind(calls[0])
        assert contents_of(workspace.root) == {} and self.stack(workspace) == 4
        sizes = []
        for _ in range(4):
            assert session.redo().ok
            sizes.append(len(contents_of(workspace.root)))
        assert sizes == [1, 2, 3, 4]
        assert contents_of(workspace.root) == full and self.stack(workspace) == 0

    @pytest.mark.req("D6.redo_ends_with_new_work")
    def test_new_work_of_the_session_ends_it_and_reading_or_failing_does_not(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        write(session, "a.txt", "1")
        session.undo()
        with session.call() as call:
            call.list_dir(".")
        with session.call() as call:
            call.write_file("b.txt", "never")
            call.fail("no")
        assert self.stack(workspace) == 1
        write(session, "b.txt", "new work")
        with fails_with("nothing_to_redo"):
            session.redo()

    @pytest.mark.req("D6.redo_survives_others")
    def test_others_edits_never_end_it_they_are_merged(self, workspace: TempWorkspace) -> None:
        session, other = workspace.session("one"), workspace.session("two")
        plant(workspace.root, {"a.txt": text()})
        write(session, "a.txt", text(l1="agent"))
        session.undo()
        write(other, "a.txt", text(l9="other"))
        (workspace.root / "a.txt").write_text(text(l9="other", l15="person"))
        done = session.redo()
        assert done.ok and [one.outcome for one in done.outcomes] == ["merged"]
        assert contents_of(workspace.root) == {"a.txt": text(l1="agent", l9="other", l15="person").encode()}

    @pytest.mark.req("D6.redo_survives_others")
    def test_or_they_make_it_conflict_and_stay(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        plant(workspace.root, {"a.txt": text()})
        write(session, "a.txt", text(l1="agent"))
        session.undo()
        (workspace.root / "a.txt").write_text(text(l1="person"))
        done = session.redo()
        assert not done.ok and done.call_id is None
        assert contents_of(workspace.root) == {"a.txt": text(l1="person").encode()}
        (workspace.root / "a.txt").write_text(text())
        assert session.redo().ok
        assert contents_of(workspace.root) == {"a.txt": text(l1="agent").encode()}


class TestRewind:
    @pytest.mark.req("D6.rewind", "D6.rewind.side_before", "D6.rewind.side_after")
    def test_to_before_or_after_a_call_undo_operations_included(self, workspace: TempWorkspace) -> None:
        session = workspace.session()
        calls = [write(session, "a.txt", str(i)) for i in range(4)]
        assert session.rewind(calls[2]).ok
        assert contents_of(workspace.root) == {"a.txt": b"1"}
        assert session.redo().ok
        assert session.rewind(calls[2], "after").ok
        assert contents_of(workspace.root) == {"a.txt": b"2"}
        undone = session.undo(calls[2]).call_id
        last = write(session, "b.txt", "b")
        assert contents_of(workspace.root) == {"a.txt": b"1", "b.txt": b"b"}
        assert undone is not None and session.rewind(undone).ok
        assert contents_of(workspace.root) == {"a.txt": b"2"}
        with workspace.open_root.ledger.store.read() as tx:
            row, gone = tx.get(CALLS, calls[2]), tx.get(CALLS, last)
        assert row is not None and row.undone_by is None
        assert gone is not None and gone.undone_by is not None


NS = 1_500_000_000_000_000_000
GIT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent", "PATH": os.environ["PATH"]}
WHO = ("-c", "user.name=p", "-c", "user.email=p@example.org")
MIXED: dict[str, File | Link | Dir | str | None] = {
    "tracked.py": File(text().encode(), mtime_ns=NS),
    "dirty.py": File(text().encode(), mtime_ns=NS),
    "staged.py": File(text().encode(), mtime_ns=NS),
    ".gitignore": "*.log\nnode_modules/\n",
    ".gitattributes": "* text=auto\n",
    "crlf.txt": File(b"one\r\ntwo\r\nthree\r\n", mtime_ns=NS),
    "run.sh": File(b"#!/bin/sh\necho\n", 0o755, NS),
    "private.key": File(b"secret\n", 0o640, NS),
    "link": Link("tracked.py"),
    "image.bin": File(bytes(range(256)) * 64, mtime_ns=NS),
    "old/name.py": File(b"rename me\n", mtime_ns=NS),
}
UNTRACKED: dict[str, File | Link | Dir | str | None] = {
    "untracked.txt": File(b"untracked\n", mtime_ns=NS),
    "big.dat": File(os.urandom(1024) * 3072, mtime_ns=NS),
    "debug.log": File(b"ignored\n", mtime_ns=NS),
    "node_modules/m/index.js": File(b"ignored too\n", mtime_ns=NS),
    "empty/dir": Dir(0o750),
}


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", *WHO, *words], cwd=root, env=GIT, check=True, capture_output=True)


def mixed_repository(root: Path) -> None:
    plant(root, MIXED)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    plant(root, {"vendor/lib.c": File(b"int lib;\n", mtime_ns=NS), "vendor/mine.c": File(b"int mine;\n", mtime_ns=NS)})
    git(root / "vendor", "init", "-q", "-b", "main")
    git(root / "vendor", "add", "lib.c")
    git(root / "vendor", "commit", "-q", "-m", "nested")
    plant(root, UNTRACKED)
    (root / "staged.py").write_text(text(l2="staged"))
    git(root, "add", "staged.py")
    (root / "dirty.py").write_text(text(l3="dirty before"))
    (root / "staged.py").write_text(text(l2="staged", l4="and dirty"))


def agents_turn(workspace: TempWorkspace, session: DurableSession) -> list[str]:
    """Edits, creations, deletions, renames and a mode change, with a person at work in between."""
    root = workspace.root
    calls = []
    with session.turn("improve everything"):
        with session.call() as call:
            assert call.edit_file("tracked.py", "line 1\n", "agent 1\n").ok
            assert call.edit_file("dirty.py", "line 10\n", "agent 10\n").ok
            assert call.edit_file("staged.py", "line 12\n", "agent 12\n").ok
        calls.append(call.id)
        (root / "tracked.py").write_text((root / "tracked.py").read_text().replace("line 8\n", "person 8\n"))
        with session.call() as call:
            assert call.write_file("debug.log", "agent log\n").ok
            assert call.write_file("untracked.txt", "agent\n").ok
            assert call.write_file("crlf.txt", b"one\r\ntwo agent\r\nthree\r\n").ok
            (root / "tracked.py").write_text((root / "tracked.py").read_text().replace("line 12\n", "person 12\n"))
            assert call.edit_file("tracked.py", "line 16\n", "agent 16\n").ok
            assert call.write_file("image.bin", b"\0agent").ok
        calls.append(call.id)
        with session.call() as call:
            assert call.move("old", "new").ok
            assert call.delete("link").ok
            assert call.delete("private.key").ok
            assert call.delete("empty", recursive=True).ok
            assert call.delete("big.dat").ok
            assert call.delete("node_modules", recursive=True).ok
            assert call.write_file("gen/deep/out.txt", "generated\n", create_parents=True).ok
            assert call.write_file("vendor/lib.c", "int agent;\n").ok
            assert call.write_file("vendor/new.c", "int new;\n").ok
            assert call.delete("run.sh").ok
            assert call.write_file("run.sh", "#!/bin/sh\nagent\n").ok
        calls.append(call.id)
        (root / "gen/notes.txt").write_text("the person's notes\n")
    (root / "dirty.py").write_text((root / "dirty.py").read_text().replace("line 17\n", "person 17\n"))
    (root / "person.txt").write_text("new by the person\n")
    return calls


def persons_part(before: Tree) -> Tree:
    """What must be there when all of the agent's part is gone."""
    expected = dict(before)
    expected["tracked.py"] = File(text(l8="person 8", l12="person 12").encode())
    expected["dirty.py"] = File(text(l3="dirty before", l17="person 17").encode())
    expected["person.txt"] = File(b"new by the person\n")
    expected["gen"], expected["gen/notes.txt"] = Dir(), File(b"the person's notes\n")
    return expected


class TestMixedRepository:
    @pytest.fixture
    def repository(self, workspace: TempWorkspace) -> TempWorkspace:
        mixed_repository(workspace.root)
        return workspace

    @pytest.mark.req("D6.untouched_mtimes_kept", "D6.nested_repos_restored", "D6.ignored_restored", "D6.no_git_clean")
    @pytest.mark.req("D6.modes_restored", "D6.symlinks_restored", "D6.empty_dirs_restored", "D6.binary_restored")
    @pytest.mark.req("W1.ignored_files_survive", "W2.ignored_edit_restored", "W4.nested_repo_undone")
    @pytest.mark.req("W7.crlf_kept_with_attributes", "D6.only_changed_paths", "D1.never_destroys_own_edits")
    @pytest.mark.parametrize("way", ["rollback", "one by one", "oldest first"])
    def test_exactly_the_agents_part_goes(self, repository: TempWorkspace, way: str) -> None:
        session, root = repository.session(), repository.root
        before, stamps = tree_of(root), times(root)
        calls = agents_turn(repository, session)
        if way == "rollback":
            assert session.rollback().ok
        for call in {"rollback": [], "one by one": reversed(calls), "oldest first": calls}[way]:
            done = session.undo(call)
            assert done.ok, done
        after = tree_of(root)
        assert differing(after, persons_part(before)) == []
        untouched = [path for path in stamps if path.startswith((".git/", "vendor/.git/")) or path in UNTOUCHED]
        assert {path: times(root)[path] for path in untouched} == {path: stamps[path] for path in untouched}

    @pytest.mark.req("D6.redo_stack")
    def test_and_comes_back_with_redo(self, repository: TempWorkspace) -> None:
        session, root = repository.session(), repository.root
        agents_turn(repository, session)
        with_agent = tree_of(root)
        assert session.rollback().ok
        assert session.redo().ok
        assert differing(tree_of(root), with_agent) == []


UNTOUCHED = (".gitignore", ".gitattributes", "vendor/mine.c")


def times(root: Path) -> dict[str, int]:
    return {path: node.mtime_ns for path, node in tree_of(root, times=True).items() if isinstance(node, File)}


def differing(one: Tree, other: Tree) -> list[str]:
    return [path for path in sorted(one.keys() | other.keys()) if one.get(path) != other.get(path)]
