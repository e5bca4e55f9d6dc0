"""What could not be captured is said on the call, and again in every plan to take it back."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mulligan import Plan
from mulligan.effects.session import DurableSession
from mulligan.history.log import calls_of
from mulligan.history.projection import SCHEMA
from mulligan.history.retention import evict_over
from mulligan.history.tables import CALLS, changes_of
from mulligan.store.verify import verify
from mulligan.testing import contents_of, plant, tree_of
from mulligan.values.canonical import decode
from mulligan.values.ids import SessionId
from tests.temp_workspace import TempWorkspace, open_temp_workspace

SESSION = SessionId("default")
SOMEBODY = 12_345
ACL = "system.posix_acl_access"
# Only root can make a file somebody else's.
TRAITS = ["owner", "access_list"] if os.geteuid() == 0 else ["access_list"]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[TempWorkspace]:
    workspace = open_temp_workspace(tmp_path)
    plant(workspace.root, {"a": "a\n", "b": "b\n"})
    yield workspace
    assert [one for one in verify(workspace.open_root.ledger.store, SCHEMA) if one.severity == "broken"] == []
    workspace.close()


def access_list() -> bytes:
    """The owner writes, one more user reads."""
    nobody = 0xFFFFFFFF
    rows = [(0x01, 6, nobody), (0x02, 4, SOMEBODY), (0x04, 4, nobody), (0x10, 4, nobody), (0x20, 0, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


def give(workspace: TempWorkspace, path: str, trait: str) -> None:
    """Something that a file of our making could not have."""
    if trait == "owner":
        os.chown(workspace.root / path, SOMEBODY, SOMEBODY)
    else:
        os.setxattr(workspace.root / path, ACL, access_list())


def trait_of(workspace: TempWorkspace, path: str) -> tuple[bool, bool]:
    """Whether it is somebody's, and whether it has an access list."""
    return os.stat(workspace.root / path).st_uid == SOMEBODY, ACL in os.listxattr(workspace.root / path)


def coverage(workspace: TempWorkspace) -> list[dict[str, str]]:
    with workspace.open_root.ledger.store.read() as tx:
        return list(decode(next(calls_of(tx, workspace.open_root, None)).coverage))


@pytest.mark.req("D2.unsettable_to_coverage")
@pytest.mark.parametrize("trait", TRAITS)
class TestWhatWeMayNotSet:
    def test_is_said_when_the_file_it_was_on_goes(self, workspace: TempWorkspace, trait: str) -> None:
        give(workspace, "a", trait)
        with workspace.session().call() as call:
            assert call.delete("a").ok and call.delete("b").ok
        told = [{"path": "a", "reason": trait}]
        assert coverage(workspace) == told
        session = workspace.session()
        assert session.undo(dry_run=True).to_json()["coverage"] == told
        done = session.undo()
        assert done.ok and done.to_json()["coverage"] == told
        assert (workspace.root / "a").read_text() == "a\n" and trait_of(workspace, "a") == (False, False)

    def test_is_said_when_it_is_moved_or_created_again(self, workspace: TempWorkspace, trait: str) -> None:
        give(workspace, "a", trait)
        give(workspace, "b", trait)
        with workspace.session().call() as call:
            assert call.move("a", "c").ok
            assert call.delete("b").ok and call.write_file("b", "anew").ok
        assert coverage(workspace) == [{"path": "a", "reason": trait}, {"path": "b", "reason": trait}]

    def test_stays_where_a_file_is_written_and_undone_and_nothing_is_said(
        self, workspace: TempWorkspace, trait: str
    ) -> None:
        give(workspace, "a", trait)
        before = trait_of(workspace, "a")
        assert any(before)
        with workspace.session().call() as call:
            assert call.write_file("a", "new\n").ok
        assert (coverage(workspace), trait_of(workspace, "a")) == ([], before)
        done = workspace.session().undo()
        assert "coverage" not in done.to_json() and trait_of(workspace, "a") == before
        assert (workspace.root / "a").read_text() == "a\n"

    def test_is_said_of_a_command_too(self, workspace: TempWorkspace, trait: str) -> None:
        give(workspace, "a", trait)
        with workspace.session().call() as call:
            assert call.exec(["rm", "a"]).ok
        assert coverage(workspace) == [{"path": "a", "reason": trait}]


class TestOtherNames:
    """A file with several names changes under all of them; one that is made again has none of them."""

    @pytest.fixture(autouse=True)
    def linked(self, workspace: TempWorkspace) -> None:
        (workspace.root / "d").mkdir()
        os.link(workspace.root / "a", workspace.root / "d" / "also")

    def write(self, workspace: TempWorkspace, how: str) -> None:
        with workspace.session().call("write") as call:
            if how == "write_file":
                assert call.write_file("a", "a\nmore\n").ok
            else:
                assert call.exec(["sh", "-c", "echo more >> a"], strategy=how).ok

    @pytest.mark.parametrize("how", ["write_file", "overlay", "notify", "watch", "scan"])
    def test_are_changes_too_and_come_back_though_the_link_is_gone_by_then(
        self, workspace: TempWorkspace, how: str
    ) -> None:
        self.write(workspace, how)
        with workspace.session().call() as call:
            assert call.exec(["sed", "-i", "s/more/MORE/", "a"]).ok
        lost = [{"path": "a", "reason": "hard_link"}]
        assert coverage(workspace) == lost
        assert contents_of(workspace.root) == {"a": b"a\nMORE\n", "b": b"b\n", "d/also": b"a\nmore\n"}
        session = workspace.session()
        assert session.undo().to_json()["coverage"] == lost
        done = session.undo("write")
        assert [(one.path, one.outcome) for one in done.outcomes] == [("a", "restored"), ("d/also", "restored")]
        assert contents_of(workspace.root) == {"a": b"a\n", "b": b"b\n", "d/also": b"a\n"}

    @pytest.mark.parametrize("how", ["write_file", "overlay", "notify", "watch", "scan"])
    def test_elsewhere_are_said(self, workspace: TempWorkspace, tmp_path: Path, how: str) -> None:
        os.link(workspace.root / "a", tmp_path / "elsewhere")
        self.write(workspace, how)
        parted = ["a", "d/also"] if how in ("write_file", "overlay") else ["a"]
        assert coverage(workspace) == [{"path": path, "reason": "hard_link"} for path in parted]
        with workspace.open_root.ledger.store.read() as tx:
            assert {one.path for one in changes_of(tx, next(calls_of(tx, workspace.open_root, None)).id)} == {
                "a",
                "d/also",
            }

    @pytest.mark.parametrize("how", ["notify", "watch", "scan"])
    def test_are_said_when_one_is_replaced_by_another_file(self, workspace: TempWorkspace, how: str) -> None:
        with workspace.session().call() as call:
            assert call.exec(["sed", "-i", "s/a/A/", "a"], strategy=how).ok
        assert coverage(workspace) == [{"path": "a", "reason": "hard_link"}]
        assert contents_of(workspace.root) == {"a": b"A\n", "b": b"b\n", "d/also": b"a\n"}

    @pytest.mark.parametrize("how", ["delete", "overlay", "notify", "watch", "scan"])
    def test_are_said_when_one_goes_and_a_folder_is_named_once(self, workspace: TempWorkspace, how: str) -> None:
        os.link(workspace.root / "b", workspace.root / "d" / "b")
        with workspace.session().call() as call:
            if how == "delete":
                assert call.delete("d", recursive=True).ok
            else:
                assert call.exec(["rm", "-r", "d"], strategy=how).ok
        assert coverage(workspace) == [{"path": "d", "reason": "hard_link"}]

    def test_are_of_one_file_again_when_a_call_is_rolled_back(self, workspace: TempWorkspace) -> None:
        with pytest.raises(LookupError), workspace.session().call() as call:
            assert call.write_file("a", "new\n").ok and call.delete("d/also").ok
            raise LookupError
        assert (coverage(workspace), os.stat(workspace.root / "a").st_nlink) == ([], 2)
        assert contents_of(workspace.root) == {"a": b"a\n", "b": b"b\n", "d/also": b"a\n"}

    def test_stay_when_a_call_is_rolled_back_and_nothing_is_said(self, workspace: TempWorkspace) -> None:
        with pytest.raises(LookupError), workspace.session().call() as call:
            assert call.write_file("a", "new\n").ok
            assert call.write_file("d/also", "newer\n").ok
            raise LookupError
        assert (coverage(workspace), os.stat(workspace.root / "a").st_nlink) == ([], 2)
        assert contents_of(workspace.root) == {"a": b"a\n", "b": b"b\n", "d/also": b"a\n"}

    def test_of_what_an_isolated_command_changed_under_both(self, workspace: TempWorkspace) -> None:
        before = tree_of(workspace.root)
        with workspace.session().call() as call:
            receipt = call.exec(["sh", "-c", "echo more >> d/also; chmod 600 a"], isolate=True)
        assert (receipt.ok, receipt.coverage) == (True, [])
        assert {path.read_text() for path in (workspace.root / "a", workspace.root / "d/also")} == {"a\nmore\n"}
        assert stat.S_IMODE(os.stat(workspace.root / "a").st_mode) == 0o600
        done = workspace.session().undo()
        assert [(one.path, one.outcome) for one in done.outcomes] == [("a", "restored"), ("d/also", "restored")]
        assert tree_of(workspace.root) == before and os.stat(workspace.root / "a").st_nlink == 2


@pytest.mark.req("D6.coverage_listed")
class TestListing:
    def work(self, workspace: TempWorkspace) -> tuple[DurableSession, list[dict[str, str]]]:
        """A turn whose command left a FIFO and wrote outside the workspace; what nobody can take back of it."""
        session = workspace.session()
        with session.turn("t"), session.call("work") as call:
            assert call.exec(["sh", "-c", "mkfifo pipe; echo 2 > a"]).ok
        gaps = coverage(workspace)
        assert gaps == [{"path": "pipe", "reason": "special_file"}]
        return session, gaps

    @pytest.mark.parametrize("verb", ["undo", "restore", "rollback", "rewind"])
    def test_every_undo_operation_says_it_before_and_after(self, workspace: TempWorkspace, verb: str) -> None:
        session, gaps = self.work(workspace)
        named: list[Any] = ["work"] if verb in ("restore", "rewind") else []
        planned = getattr(session, verb)(*named, dry_run=True)
        assert planned.to_json()["coverage"] == gaps and [dict(gap) for gap in planned.plan.coverage] == gaps
        done = getattr(session, verb)(*named)
        assert done.to_json()["coverage"] == gaps
        assert (workspace.root / "a").read_text() == "a\n" and (workspace.root / "pipe").is_fifo()

    def test_of_some_paths_only_what_is_about_them_is_said(self, workspace: TempWorkspace) -> None:
        session, gaps = self.work(workspace)
        assert "coverage" not in session.undo(paths=["a"], dry_run=True).to_json()
        assert session.undo(paths=["pipe"], dry_run=True).to_json()["coverage"] == gaps


@pytest.mark.req("D6.state_never_evicted")
def test_eviction_takes_bodies_of_files_and_never_state(workspace: TempWorkspace, tmp_path: Path) -> None:
    workspace.open_root.ledger.session(SESSION, workspace.open_root.root)
    session, large = workspace.session(), "words " * 50_000
    for number in range(3):
        with session.turn(str(number)):
            session.inject({"role": "user", "content": f"{number} {large}"})
            with session.call("work") as call:
                call.write_file("a", os.urandom(50_000))
                session[Plan].append(Plan(f"{number} {large}"))
    said, plans = session.messages(), session[Plan].all()
    evict_over(workspace.open_root.ledger, SESSION, 0)
    with workspace.open_root.ledger.store.read() as tx:
        assert [bool(row.evicted) for row in tx.select(CALLS) if not row.external] == [True, True, False]
    workspace.close()
    again = open_temp_workspace(tmp_path)
    session = again.session()
    assert (session.messages(), session[Plan].all()) == (said, plans)
    assert session.rollback().ok
    assert (session.messages(), session[Plan].all()) == (said[:2], plans[:2])
    again.close()
