"""A command that fails under `rollback_on`: all of it goes back, whoever is at work and whatever breaks meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mulligan.effects.receipt import Receipt
from mulligan.history.abort import rescued_in
from mulligan.history.log import calls_of, status_shown
from mulligan.history.projection import SCHEMA
from mulligan.history.retention import collect_garbage, evict_over, session_usage
from mulligan.history.tables import TOUCHES
from mulligan.store.blobs import BLOBS
from mulligan.store.verify import verify
from mulligan.testing import FaultPlan
from mulligan.values.digest import digest_of, raw_digest
from mulligan.values.errors import MulliganError
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from tests.exec.commands import plant, sh, told
from tests.exec.trees import tree
from tests.temp_workspace import TempWorkspace, closing_workspaces, open_temp_workspace

WAYS = pytest.mark.parametrize("way", ["notify", "watch", "scan"])
WINDOWS = pytest.mark.parametrize("way", ["watch", "scan"])
FILES = {"a": "a\n", "b": "bb\n", "d/x": "x\n", "d/y": "y\n", "gone/z": "z\n", "mode": "m\n"}
COMMAND = "echo 2 >> a; echo 3 > d/x; rm -r gone; mkdir n; echo n > n/n; chmod 600 mode; ln -sf b link; rm b"


def failing(workspace: TempWorkspace, text: str, way: str) -> Receipt:
    return sh(workspace, f"{text}; exit 1", strategy=way, rollback_on="nonzero")


def everything(workspace: TempWorkspace) -> object:
    return tree(os.fsencode(workspace.root))


@WAYS
def test_it_leaves_the_tree_as_it_was_however_often(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    before = everything(workspace)
    for _ in range(4):
        assert told(failing(workspace, COMMAND, way)) == ("error", "nonzero_exit")
        assert everything(workspace) == before
    assert sh(workspace, COMMAND, strategy=way).ok
    assert everything(workspace) != before
    assert workspace.session().undo().ok
    assert everything(workspace) == before


@WAYS
def test_a_folder_that_was_removed_has_its_time_again(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, {"d/e/x": "x", "d/y": "y"})
    times = {"d/e": 3 * 10**18 // 2, "d": 10**18}
    for name, moment_ns in times.items():
        os.utime(workspace.root / name, ns=(moment_ns, moment_ns))
    assert told(failing(workspace, "rm -r d", way)) == ("error", "nonzero_exit")
    assert {name: (workspace.root / name).stat().st_mtime_ns for name in times} == times
    assert sh(workspace, "rm -r d", strategy=way).ok and workspace.session().undo().ok
    assert {name: (workspace.root / name).stat().st_mtime_ns for name in times} == times


def test_bytes_that_no_call_needs_are_not_kept(workspace: TempWorkspace) -> None:
    plant(workspace.root, FILES)
    failing(workspace, "echo nobody wants this > a", "notify")
    with workspace.open_root.ledger.store.read() as tx:
        assert tx.get(BLOBS, raw_digest(digest_of(b"nobody wants this\n"))) is None


SAVES = (
    "echo mine > new; seq 9000 > d/x; chmod 600 mode; cp a b; cat mode > y; for i in $(seq 250); do echo $i > n$i; done"
)


def saved() -> dict[str, bytes]:
    """What the record has to name of that: all that was not there before."""
    many = {f"n{number}": f"{number}\n".encode() for number in range(1, 251)}
    return {"new": b"mine\n", "d/x": "".join(f"{i}\n" for i in range(1, 9001)).encode(), **many} | {
        "b": b"a\n",
        "y": b"m\n",
    }


def rescued(workspace: TempWorkspace) -> list[dict[str, bytes]]:
    """What each call says was there when it was put back, gone through the collection of garbage long after."""
    ledger = workspace.open_root.ledger
    with ledger.store.write() as tx:
        for blob in tx.select(BLOBS):
            tx.update(BLOBS, blob.digest, touched_ms=0)
    collect_garbage(ledger)
    with ledger.store.read() as tx:
        found = [rescued_in(row) for row in calls_of(tx, workspace.open_root, None)]
    return [{path: ledger.blobs.read(digest) for path, digest in one} for one in found]


@WINDOWS
@pytest.mark.parametrize("ending", [{"rollback_on": "nonzero"}, {"timeout_ms": 3_000}])
def test_bytes_of_an_unknown_writer_are_rescued_and_reported(
    workspace: TempWorkspace, way: str, ending: dict[str, Any]
) -> None:
    plant(workspace.root, FILES)
    before = everything(workspace)
    script = f"{SAVES}; " + ("exit 1" if "rollback_on" in ending else "exec sleep 60")
    assert not sh(workspace, script, strategy=way, **ending).ok
    assert everything(workspace) == before
    assert rescued(workspace) == [saved()]


@WINDOWS
def test_bytes_of_an_unknown_writer_are_rescued_if_the_call_fails_later(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    before = everything(workspace)
    with suppress(LookupError), workspace.session().call() as call:
        call.exec(["sh", "-c", SAVES], strategy=way)
        call.write_file("new", "the agent's")
        raise LookupError
    assert everything(workspace) == before
    assert rescued(workspace) == [saved()]


@WINDOWS
def test_a_committed_call_reports_what_a_rolled_back_part_of_it_rescued(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    with workspace.session().call() as call:
        call.exec(["sh", "-c", "echo 1 > new; echo 2 > other; exit 1"], strategy=way, rollback_on="nonzero")
        call.exec(["sh", "-c", "echo 2 > other"], strategy=way)
    assert rescued(workspace) == [{"new": b"1\n"}]


@WINDOWS
def test_a_command_that_succeeds_rescues_nothing(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    assert sh(workspace, SAVES, strategy=way).ok
    assert rescued(workspace) == [{}]


@WINDOWS
def test_rescued_bytes_are_evicted_when_the_session_is_over_its_cap(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    failing(workspace, "head -c 100000 /dev/urandom > a", way)
    sh(workspace, "echo 2 > b", strategy=way)
    ledger = workspace.open_root.ledger
    assert len(evict_over(ledger, SessionId("default"), 1_000)) == 1
    with ledger.store.read() as tx:
        assert [status_shown(row) for row in calls_of(tx, workspace.open_root, None)] == ["committed", "aborted"]
        assert session_usage(tx, SessionId("default")).bytes < 1_000
    assert [one for one in verify(ledger.store, SCHEMA) if one.severity == "broken"] == []


@WAYS
def test_changes_that_the_store_cannot_hold_are_rolled_back(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    before = everything(workspace)
    (workspace.home / "blobs").write_text("in the way of every blob that is not small")
    with pytest.raises(MulliganError):
        sh(workspace, f"{COMMAND}; head -c 200000 /dev/urandom > large", strategy=way)
    assert everything(workspace) == before
    with workspace.open_root.ledger.store.read() as tx:
        assert [row.status for row in calls_of(tx, workspace.open_root, None)] == ["aborted"]


@WAYS
def test_a_failed_restore_leaves_the_call_open(workspace: TempWorkspace, way: str) -> None:
    plant(workspace.root, FILES)
    with pytest.raises(MulliganError) as caught:
        failing(workspace, f"rm -rf {workspace.root}", way)
    assert caught.value.code == "restore_failed"
    with workspace.open_root.ledger.store.read() as tx:
        assert [row.status for row in calls_of(tx, workspace.open_root, None)] == ["open"]
        assert {row.path.decode() for row in tx.select(TOUCHES)} >= FILES.keys()


def save_in_place(path: Path) -> None:
    path.write_text("person\n")


def save_by_rename(path: Path) -> None:
    draft = path.with_name("person's draft")
    draft.write_text("person\n")
    draft.rename(path)


def save_with_the_old_time(path: Path) -> None:
    """The same size and time as what is there: nothing but the bytes and the kernel's own stamp tells."""
    status, data = path.stat(), b"P" * path.stat().st_size
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def rename_with_the_old_time(path: Path) -> None:
    status, draft = path.stat(), path.with_name("person's draft")
    draft.write_bytes(b"P" * status.st_size)
    draft.chmod(status.st_mode & 0o777)
    os.utime(draft, ns=(status.st_atime_ns, status.st_mtime_ns))
    draft.rename(path)


def remove(path: Path) -> None:
    path.unlink()


def change_mode(path: Path) -> None:
    path.chmod(0o640)


PERSONS = [save_in_place, save_by_rename, save_with_the_old_time, rename_with_the_old_time, remove, change_mode]


@WAYS
@pytest.mark.parametrize("person", PERSONS)
def test_a_persons_later_change_is_not_the_calls(
    workspace: TempWorkspace, way: str, person: Callable[[Path], None]
) -> None:
    plant(workspace.root, FILES)
    failing(workspace, COMMAND, way)
    person(workspace.root / "a")
    person(workspace.root / "d" / "x")
    theirs = everything(workspace)
    failing(workspace, "rm -f a; echo 9 > d/x; echo more >> d/y", way)
    assert everything(workspace) == theirs
    assert sh(workspace, "echo 9 > a; echo 9 > d/x", strategy=way).ok
    assert workspace.session().undo().ok
    assert everything(workspace) == theirs


def steps_of(base: Path, way: str) -> int:
    """How many steps it takes to put everything back."""
    plan = FaultPlan()
    workspace = open_temp_workspace(base, steps=plan)
    plant(workspace.root, FILES)
    failing(workspace, COMMAND, way)
    workspace.close()
    return len(plan.reached)


@WAYS
@pytest.mark.parametrize("save", [save_in_place, save_by_rename])
def test_a_person_who_saves_during_the_rollback_loses_nothing(
    tmp_path: Path, way: str, save: Callable[[Path], None]
) -> None:
    """At every step, into the very file that is on its way; and what they saved is theirs for the next command, too."""
    with closing_workspaces():
        for at in range(1, steps_of(tmp_path / "dry", way) + 1):
            base = tmp_path / str(at)
            saved: list[Path] = []

            def act(_: str, path: str, root: Path = base / "work", saved: list[Path] = saved) -> None:
                if (root / path).is_file() and not (root / path).is_symlink():
                    save(root / path)
                    saved.append(root / path)

            workspace = open_temp_workspace(base, steps=FaultPlan().act(act, at=at))
            plant(workspace.root, FILES)
            failing(workspace, COMMAND, way)
            assert [path.read_text() for path in saved] == ["person\n"] * len(saved)
            for path in saved:
                failing(workspace, f"echo agent > {path}", way)
                assert path.read_text() == "person\n"
            workspace.close()


@WAYS
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "It broke")], ids=["interrupt", "io"])
def test_whatever_breaks_in_the_middle_of_it_the_rest_is_rolled_back_later(
    tmp_path: Path, way: str, error: BaseException
) -> None:
    def fail(_: str, __: str) -> None:
        raise error

    with closing_workspaces():
        for at in range(1, steps_of(tmp_path / "dry", way) + 1):
            base = tmp_path / str(at)
            workspace = open_temp_workspace(base, steps=FaultPlan().act(fail, at=at))
            plant(workspace.root, FILES)
            before = everything(workspace)
            with suppress(KeyboardInterrupt, MulliganError):
                failing(workspace, COMMAND, way)
            workspace.close()
            again = open_temp_workspace(base)
            assert everything(again) == before, at
            again.close()


def test_bytes_of_a_call_that_ended_before_its_command_are_rescued_and_reported(workspace: TempWorkspace) -> None:
    plant(workspace.root, {"f": "old\n"})
    call = workspace.open_root.call(SessionId("default"))
    call.commands.about_to_change([RepoPath("f")])
    plant(workspace.root, {"f": "person's\n"})
    call.abort("cancelled")
    assert (workspace.root / "f").read_text() == "old\n"
    with workspace.open_root.ledger.store.read() as tx:
        (row,) = calls_of(tx, workspace.open_root, None)
    assert rescued_in(row) == [("f", digest_of(b"person's\n"))]
    assert workspace.open_root.ledger.blobs.read(digest_of(b"person's\n")) == b"person's\n"
