"""One file is one thing, by whichever way it is reached; two files are two, whatever they are called."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mulligan import api as opening
from mulligan import builtins
from mulligan.boundary.capability import UNLIMITED
from mulligan.boundary.verdict import Boundary
from mulligan.effects.session import DurableSession
from mulligan.exec.command import Stream
from mulligan.files.disk import HostDisk
from mulligan.history.baseline import Baseline
from mulligan.history.log import calls_of, diff_view
from mulligan.history.observe import Observed, begin, finish, record_changes
from mulligan.history.open_root import OpenRoot
from mulligan.history.tables import CAPTURES
from mulligan.history.undo import UndoResult
from mulligan.testing import contents_of, plant
from mulligan.values.canonical import decode
from mulligan.values.digest import digest_of
from mulligan.values.errors import MulliganError
from mulligan.values.ids import CallId, SessionId
from tests.temp_workspace import TempWorkspace


def session_at(workspace: TempWorkspace, root: Path, *, name: str = "default", folds: bool = False) -> DurableSession:
    """A session in another root of the same store, or in the same one."""
    disk = HostDisk(str(root))
    if folds:
        disk.root = replace(disk.root, folds_case=True)
    open_root = OpenRoot(workspace.open_root.ledger, disk)
    workspace.open_root.at_close(open_root.close)
    return DurableSession(open_root, SessionId(name), Boundary(str(root), UNLIMITED))


def is_refused(session: DurableSession, path: str) -> bool:
    """Whether another call is at work there."""
    with session.call() as call:
        receipt = call.write_file(path, "from another call")
        if not receipt.ok:
            assert receipt.error_code == "path_claimed"
            call.fail("somebody is there")
    return not receipt.ok


def wrote(session: DurableSession, path: str, content: str) -> str:
    receipt, call = session.perform("write_file", {"path": path, "content": content})
    assert receipt.ok
    return call


def told(way: UndoResult) -> dict[str, str]:
    return {one.path: one.reason or one.outcome for one in way.outcomes}


class Editing:
    """Somebody acts when a command prints something."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def write(self, stream: Stream, data: bytes) -> None:
        self._act()


def externals(workspace: TempWorkspace) -> int:
    with workspace.open_root.ledger.store.read() as tx:
        return sum(bool(row.external) for row in calls_of(tx, workspace.open_root, None))


@pytest.mark.req("D4.file_identity")
class TestOfAFile:
    """By its real place, which stands for device, inode of the parent and name (see decision 6)."""

    def test_claims_hold_by_every_way_to_it_and_for_no_other_of_its_name(
        self, workspace: TempWorkspace, tmp_path: Path
    ) -> None:
        plant(workspace.root, {"in/ner/f": "1", "in/f": "2", "f": "3"})
        os.symlink("in/ner", workspace.root / "short")
        os.symlink(workspace.root, tmp_path / "alias")
        inner = session_at(workspace, workspace.root / "in" / "ner", name="other")
        alias = session_at(workspace, tmp_path / "alias", name="other")
        with workspace.session().call() as call:
            assert call.write_file("in/ner/f", "claimed").ok
            ways = [(inner, "f"), (alias, "in/ner/f"), (alias, "short/f"), (workspace.session("other"), "short/f")]
            assert [is_refused(session, path) for session, path in ways] == [True] * 4
            assert [is_refused(alias, path) for path in ("in/f", "f")] == [False, False]
        assert [is_refused(session, path) for session, path in ways] == [False] * 4

    def test_what_was_last_seen_there_is_known_by_every_way_to_it(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"in/f": "1"})
        with workspace.session().call() as call:
            call.write_file("in/f", "ours")
        (workspace.root / "in" / "f").write_text("a person's")
        with session_at(workspace, workspace.root / "in").call() as call:
            call.write_file("f", "ours again")
        assert externals(workspace) == 1


@pytest.mark.req("D4.file_identity_case_folded")
class TestOfARoot:
    @pytest.mark.req("D4.file_identity")
    def test_one_that_was_moved_has_its_history_there_and_back_again(self, workspace: TempWorkspace) -> None:
        home, away = workspace.root, workspace.root.with_name("away")
        with workspace.session().call() as call:
            call.write_file("a", "1\n")
        for place in (away, home):
            (home if place is away else away).rename(place)
            session = session_at(workspace, place)
            with session.call() as later:
                later.write_file("a", f"{place.name}\n")
            assert session.undo(later.id).ok and (place / "a").read_text() == "1\n"
            with workspace.open_root.ledger.store.read() as tx:
                listed = [row.id for row in calls_of(tx, session._open_root, None)]
            assert (listed[-1], externals(workspace)) == (call.id, 0)
        assert session.restore(call.id).ok and not (home / "a").exists()

    @pytest.mark.req("D4.root_identity")
    def test_another_one_in_its_place_has_a_history_of_its_own_and_takes_it_along(
        self, workspace: TempWorkspace
    ) -> None:
        home, aside, away = (workspace.root.with_name(name) for name in (workspace.root.name, "aside", "away"))
        first = wrote(session_at(workspace, home), "a", "1\n")
        home.rename(aside)
        home.mkdir()
        second = wrote(session_at(workspace, home), "b", "1\n")
        (aside / "b").write_text("1\n")
        third = wrote(session_at(workspace, aside), "c", "1\n")
        with workspace.open_root.ledger.store.read() as tx:
            assert [row.id for row in calls_of(tx, session_at(workspace, home)._open_root, None)] == [second]
            assert [row.id for row in calls_of(tx, session_at(workspace, aside)._open_root, None)] == [third, first]
        home.rename(away)
        assert session_at(workspace, away).undo(second).ok and not (away / "b").exists()
        assert (aside / "b").exists()

    @pytest.mark.req("D4.roots_overlap_share")
    def test_undo_operations_speak_of_the_paths_of_the_root_they_are_asked_in(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"sub/a": "0\n", "b": "0\n"})
        inner = session_at(workspace, workspace.root / "sub")
        with inner.call() as first:
            first.write_file("a", "1\n")
        outer = session_at(workspace, workspace.root)
        with outer.call() as second:
            second.write_file("sub/a", "2\n")
            second.write_file("b", "2\n")
        whole = str(workspace.root / "b")
        for session, a, b in ((inner, "a", whole), (outer, "sub/a", "b")):
            for paths in (None, [a]):
                assert told(session.restore(first, paths, dry_run=True)) == {a: "restored"}
                assert told(session.undo(first, paths, on_conflict="overwrite", dry_run=True)) == {a: "restored"}
            assert told(session.undo(second, [a], dry_run=True)) == {a: "restored"}
            assert told(session.undo(second, dry_run=True)) == {a: "restored", b: "restored"}
            assert told(session.undo(second, [b], dry_run=True)) == {b: "restored"}
            diff = diff_view(session._open_root, workspace.open_root.ledger.call_row(CallId(first.id)))
            assert diff.startswith(f"diff --git a/{a} b/{a}\n")
        assert told(inner.restore(first, ["a"])) == {"a": "restored"}
        assert contents_of(workspace.root) == {"sub/a": b"0\n", "b": b"2\n"}

    @pytest.mark.req("D4.roots_overlap_share")
    def test_one_that_is_open_goes_on_in_the_history_of_one_that_is_opened_around_it(
        self, workspace: TempWorkspace, tmp_path: Path
    ) -> None:
        plant(tmp_path / "outer", {"inner/f": "0\n", "other/f": "0\n"})
        inner, other = (session_at(workspace, tmp_path / "outer" / name, name=name) for name in ("inner", "other"))
        for session, count in ((inner, 1), (other, 9)):
            assert all(wrote(session, "f", f"{number}\n") for number in range(1, count + 1))
        outer = session_at(workspace, tmp_path / "outer", name="outer")
        newest = wrote(inner, "f", "2\n")
        with workspace.open_root.ledger.store.read() as tx:
            assert next(calls_of(tx, outer._open_root, None)).id == newest

        tree = Baseline(inner._open_root)
        record_changes(inner._open_root, tree)
        call = begin(inner._open_root, Observed(SessionId("agent"), "bash"), tree)
        (tmp_path / "outer/inner/f").write_text("3\n")
        assert finish(inner._open_root, call, tree)
        tree.close()
        assert workspace.open_root.ledger.call_row(call).coverage == "[]"

        os.mkfifo(tmp_path / "go")
        command = ["sh", "-c", f"echo reached; read x < {tmp_path}/go; echo mine >> f"]
        edit = Editing(lambda: wrote(outer, "inner/f", "theirs\n") and (tmp_path / "go").write_text("\n"))
        ran, _ = inner.perform("exec", {"argv": command, "strategy": "scan"}, sink=edit)
        assert ran.coverage == [{"path": "f", "reason": "ambiguous"}]


class TestWhereCaseFolds:
    """Names that differ only in case are one. The disk below does not fold, so each name is a file here."""

    @pytest.fixture
    def folding(self, workspace: TempWorkspace) -> Path:
        return Path(plant(workspace.root / "Folding", {}))

    def test_a_claim_holds_for_all_spellings(self, workspace: TempWorkspace, folding: Path) -> None:
        plant(folding, {"Read.Me": "1", "read.me": "2"})
        one, other = (
            session_at(workspace, folding, folds=True),
            session_at(workspace, folding, name="other", folds=True),
        )
        with one.call() as call:
            assert call.write_file("Read.Me", "claimed").ok
            assert is_refused(other, "read.me") and is_refused(other, "READ.ME")
            assert not is_refused(other, "else")
        assert not is_refused(other, "read.me")

    def test_so_does_what_was_last_seen(self, workspace: TempWorkspace, folding: Path) -> None:
        session = session_at(workspace, folding, folds=True)
        plant(folding, {"Folder/Read.Me": "1"})
        with session.call() as call:
            call.write_file("Folder/Read.Me", "ours")
        (folding / "Folder" / "Read.Me").write_text("a person's")
        with session.call() as call:
            call.write_file("Folder/Read.Me", "ours again")
        assert externals(workspace) == 1
        assert session.undo().ok
        assert contents_of(folding) == {"Folder/Read.Me": b"a person's"}

    def test_a_nested_root_agrees(self, workspace: TempWorkspace, folding: Path) -> None:
        plant(folding, {"Sub/A": "1"})
        outer = session_at(workspace, folding, folds=True)
        inner = session_at(workspace, folding / "Sub", name="other", folds=True)
        with outer.call() as call:
            assert call.write_file("Sub/A", "2").ok
            assert is_refused(inner, "a")
        with inner.call() as call:
            assert call.write_file("A", "3").ok
        assert session_at(workspace, folding, name="other", folds=True).undo(call.id).ok
        assert contents_of(folding) == {"Sub/A": b"2"}

    def test_elsewhere_they_are_two(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"A": "1", "a": "2"})
        with workspace.session().call() as call:
            assert call.write_file("A", "claimed").ok
            assert not is_refused(workspace.session("other"), "a")


class TestOfASnapshot:
    @pytest.mark.req("H13.root_belongs_to_session")
    def test_one_scope_in_two_roots_is_refused_and_mixes_nothing(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            plant(tmp_path / name, {"f": name, "g": name})
        store = str(tmp_path / "home")
        with opening.open(str(tmp_path / "one"), store=store):
            builtins.hostlib_fs_snapshot(session_id="s", scope_id="tc", paths=[str(tmp_path / "one" / "f")])
        with opening.open(str(tmp_path / "two"), store=store) as second:
            with pytest.raises(MulliganError) as caught:
                builtins.hostlib_fs_snapshot(session_id="s", scope_id="tc", paths=[str(tmp_path / "two" / "g")])
            assert caught.value.code == "invalid_params"
            with second.session("s").call(tool_call_id="tc"):
                builtins.hostlib_tools_write_file(path=str(tmp_path / "two" / "g"), content="new")
            (tmp_path / "one" / "f").write_text("changed")
            (listed,) = builtins.hostlib_fs_list_snapshots(session_id="s")["snapshots"]
            done = builtins.hostlib_fs_restore(session_id="s", snapshot_id="tc")
        assert listed["captured_paths"] == done["restored_paths"] == [str(tmp_path / "one" / "f")]
        assert contents_of(tmp_path / "one") == {"f": b"one", "g": b"one"}
        assert contents_of(tmp_path / "two") == {"f": b"two", "g": b"new"}

    @pytest.mark.req("H13.root_belongs_to_session")
    def test_a_request_may_name_its_root_and_not_choose_another(self, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        with opening.open(str(tmp_path / "one"), store=str(tmp_path / "home")) as opened:
            assert builtins.hostlib_fs_snapshot(session_id="s", scope_id="a", root=opened.root)["snapshot_id"] == "a"
            with pytest.raises(MulliganError) as caught:
                builtins.hostlib_fs_snapshot(session_id="s", scope_id="b", root=str(tmp_path))
            assert caught.value.code == "invalid_params"

    @pytest.mark.req("S0.storage.entry_kinds")
    def test_its_entries_are_files_with_digest_and_mode_or_absent(self, tmp_path: Path) -> None:
        work = tmp_path / "work"
        plant(work, {"f": "bytes"})
        (work / "f").chmod(0o640)
        with opening.open(str(work), store=str(tmp_path / "home")) as opened:
            builtins.hostlib_fs_snapshot(session_id="s", scope_id="tc", paths=[str(work / "f"), str(work / "none")])
            with opened.open_root.ledger.store.read() as tx:
                rows = tx.select(CAPTURES, {"session": "s", "scope": "tc"})
                entries = {row.path: decode(row.before) for row in rows}
                body = opened.open_root.ledger.blobs.read_in(tx, entries[b"f"]["digest"])
        file = entries[b"f"]
        assert (file["kind"], file["digest"], file["mode"], body) == ("file", digest_of(b"bytes"), 0o640, b"bytes")
        assert entries[b"none"] == {"kind": "absent"}
