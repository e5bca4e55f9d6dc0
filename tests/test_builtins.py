"""S0's own functions, by their own names and shapes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan.api as api
from mulligan import builtins
from mulligan.history import observe
from mulligan.history.projection import SCHEMA
from mulligan.store.verify import verify
from mulligan.testing import Dir, File, Link, contents_of, plant, tree_of
from mulligan.testing.builders import Node
from mulligan.values.errors import MulliganError, RequestError
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath

S = "sess_abc"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[api.Mulligan]:
    (tmp_path / "work").mkdir()
    with api.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


@pytest.fixture
def work(opened: api.Mulligan) -> Path:
    return Path(opened.root)


def snapshot(scope: str, *paths: Path, session: str = S) -> dict[str, Any]:
    request: dict[str, Any] = {"session_id": session, "scope_id": scope}
    if paths:
        request["paths"] = [str(path) for path in paths]
    return builtins.hostlib_fs_snapshot(request)


def restore(scope: str, *paths: Path, session: str = S) -> dict[str, Any]:
    wanted = [str(path) for path in paths] or None
    return builtins.hostlib_fs_restore(session_id=session, snapshot_id=scope, paths=wanted)


def listed(session: str = S) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = builtins.hostlib_fs_list_snapshots({"session_id": session})["snapshots"]
    return found


@pytest.mark.req(
    "S0.snapshot.registers_scope",
    "S0.snapshot.precapture_optional",
    "S0.capture.explicit_at_once",
    "S0.capture.explicit_params",
    "D11.hostlib.snapshot_shape",
    "D11.hostlib.paths_absolute",
    "S0.hostlib.names_exist",
    "D11.builtin_hostlib",
)
def test_a_snapshot_answers_what_it_newly_captured(work: Path) -> None:
    file = work / "lib.rs"
    file.write_text("one")
    first = snapshot("tc_42", file, work / "new.rs")
    again = snapshot("tc_42", file)
    assert first == {"snapshot_id": "tc_42", "captured_paths": [str(file), str(work / "new.rs")], "byte_count": 3}
    assert again == {"snapshot_id": "tc_42", "captured_paths": [], "byte_count": 0}


@pytest.mark.req(
    "S0.restore.writes_preimage",
    "S0.restore.deletes_absent",
    "S0.restore.leaves_other_work",
    "D11.hostlib.restore_shape",
    "D6.s0_names_overwrite",
    "D11.hostlib_explicit_counts_as_touched",
)
def test_restore_puts_captured_bytes_back_and_deletes_what_was_absent(work: Path, opened: api.Mulligan) -> None:
    file, new, other = work / "lib.rs", work / "new.rs", work / "other.rs"
    file.write_text("one")
    file.chmod(0o640)
    snapshot("tc_42", file, new)
    file.write_text("two")
    file.chmod(0o600)
    new.write_text("new")
    other.write_text("untouched")
    answer = restore("tc_42")
    assert answer == {
        "snapshot_id": "tc_42",
        "restored_paths": [str(file), str(new)],
        "skipped_paths_with_reasons": [],
        "overwrote_external": [str(file), str(new)],
    }
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("one", 0o640)
    assert not new.exists()
    assert other.read_text() == "untouched"
    opened.session(S).redo()
    assert (file.read_text(), new.read_text()) == ("two", "new")


@pytest.mark.req("H21.unknown_paths_reported")
def test_restore_names_paths_it_does_not_hold(work: Path) -> None:
    (work / "a").write_text("a")
    snapshot("tc", work / "a")
    (work / "a").write_text("b")
    answer = restore("tc", work / "a", work / "never")
    assert answer["restored_paths"] == [str(work / "a")]
    assert answer["skipped_paths_with_reasons"] == [{"path": str(work / "never"), "reason": "not_captured"}]


def test_a_restored_snapshot_can_be_restored_again(work: Path) -> None:
    (work / "a").write_text("a")
    snapshot("tc", work / "a")
    for text in ("b", "c"):
        (work / "a").write_text(text)
        restore("tc")
        assert (work / "a").read_text() == "a"


def test_a_directory_in_the_place_of_an_absent_path_goes_with_its_content(work: Path) -> None:
    snapshot("tc", work / "d")
    (work / "d" / "e").mkdir(parents=True)
    (work / "d" / "e" / "f").write_text("x")
    restore("tc")
    assert not (work / "d").exists()


@pytest.mark.req(
    "S0.capture.open_without_paths",
    "S0.capture.auto_write_file",
    "S0.capture.auto_delete_file",
    "S0.capture.lazy_per_path",
    "S0.capture.binds_current_call",
    "S0.capture.one_registration_enough",
    "S0.snapshot.scope_is_tool_call_id",
)
def test_an_open_snapshot_captures_what_its_tool_call_writes_and_deletes(work: Path, opened: api.Mulligan) -> None:
    kept, gone = work / "kept", work / "gone"
    kept.write_text("before")
    gone.write_text("gone")
    snapshot("tc_7")
    with opened.session(S).call(tool_call_id="tc_7"):
        wrote = builtins.hostlib_tools_write_file({"path": str(kept), "content": "after"})
        builtins.hostlib_tools_write_file(path=str(work / "d" / "new"), content="new")
        deleted = builtins.hostlib_tools_delete_file(path=str(gone))
    assert wrote == {"path": str(kept), "bytes_written": 5, "created": False}
    assert deleted == {"path": str(gone), "removed": True}
    assert listed()[0]["captured_paths"] == [str(work / "d"), str(work / "d/new"), str(gone), str(kept)]
    restore("tc_7")
    assert contents_of(work) == {"kept": b"before", "gone": b"gone"}


TREE: dict[str, Node | str] = {"t/x": File(b"x", 0o640), "t/y/z": "z", "t/y/empty": Dir(0o750), "t/link": Link("x")}


@pytest.mark.req("H3.capture_fails_closed")
def test_a_directory_is_captured_with_everything_below_it(work: Path) -> None:
    plant(work, TREE)
    before, below = tree_of(work), [str(work / path) for path in sorted(tree_of(work))]
    assert snapshot("tc", work / "t") == {"snapshot_id": "tc", "captured_paths": below, "byte_count": 2}
    shutil.rmtree(work / "t")
    assert restore("tc")["restored_paths"] == below
    assert tree_of(work) == before


def test_a_tree_of_many_files_is_captured_and_restored(work: Path) -> None:
    plant(work, {f"t/{number % 7}/{number}": str(number) for number in range(520)})
    before = tree_of(work)
    snapshot("tc", work / "t")
    shutil.rmtree(work / "t")
    restore("tc")
    assert tree_of(work) == before


@pytest.mark.req("H3.capture_fails_closed")
def test_a_directory_asked_for_stands_for_what_was_captured_below_it(work: Path) -> None:
    plant(work, TREE)
    snapshot("tc", work / "t")
    for path in ("t/x", "t/y/z"):
        (work / path).write_text("changed")
    assert restore("tc", work / "t" / "y")["skipped_paths_with_reasons"] == []
    assert contents_of(work) == {"t/x": b"changed", "t/y/z": b"z"}


@pytest.mark.req("H3.capture_fails_closed")
def test_what_cannot_be_captured_below_a_directory_refuses_all_of_it(work: Path) -> None:
    plant(work, TREE)
    os.mkfifo(work / "t" / "pipe")
    with pytest.raises(RequestError) as error:
        snapshot("tc", work / "t")
    assert (error.value.code, listed()) == ("invalid_params", [])


@pytest.mark.req("H3.capture_fails_closed")
def test_a_tree_that_was_deleted_comes_back_whole(work: Path, opened: api.Mulligan) -> None:
    plant(work, TREE)
    before = tree_of(work)
    snapshot("tc")
    with opened.session(S).call(tool_call_id="tc"):
        builtins.hostlib_tools_delete_file(path=str(work / "t"), recursive=True)
    assert tree_of(work) == {}
    restore("tc")
    assert tree_of(work) == before


def test_what_is_captured_through_a_linked_folder_comes_back_where_it_is(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"d/x": "precious", "linked": Link("d")})
    taken = snapshot("k", work / "linked/x")
    assert (taken["captured_paths"], taken["byte_count"]) == ([str(work / "d/x")], 8)
    (work / "d/x").unlink()
    assert restore("k", work / "linked/x")["restored_paths"] == [str(work / "d/x")]
    assert (work / "d/x").read_text() == "precious"


def test_what_was_written_through_a_link_comes_back_where_it_is(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"a": "a", "ln": Link("a"), "d/f": "f", "to_d": Link("d")})
    before = tree_of(work)
    snapshot("tc")
    with opened.session(S).call(tool_call_id="tc"):
        for path in ("ln", "to_d/f"):
            builtins.hostlib_tools_write_file(path=str(work / path), content="through")
    assert restore("tc")["restored_paths"] == [str(work / "a"), str(work / "d/f")]
    assert tree_of(work) == before


@pytest.mark.req("S0.capture.binds_current_call", "S0.capture.one_registration_enough")
def test_an_open_snapshot_captures_whatever_its_call_does(work: Path, opened: api.Mulligan) -> None:
    plant(work, {**TREE, "a": "a", "b": "b", "shell": "s", "m": "m"})
    before = tree_of(work)
    snapshot("tc")
    with opened.session(S).call("work", tool_call_id="tc") as call:
        for receipt in (
            call.write_file("a", "A"),
            call.edit_file("b", "b", "B"),
            call.delete("t", recursive=True),
            call.move("m", "moved"),
            call.exec(["sh", "-c", "echo more >> shell; echo new > made"]),
        ):
            assert receipt.ok
    restored = restore("tc")
    assert tree_of(work) == before
    paths = [*before, "made", "moved"]
    assert restored["restored_paths"] == [str(work / path) for path in sorted(paths)]
    assert (restored["skipped_paths_with_reasons"], restored["overwrote_external"]) == ([], [])
    assert list(verify(opened.store, SCHEMA)) == []


def test_a_call_that_is_still_open_shows_what_it_has_captured(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"a": "abc"})
    snapshot("tc")
    snapshot("other")
    with opened.session(S).call(tool_call_id="tc") as call:
        assert call.write_file("a", "A").ok
        assert [(row["captured_paths"], row["byte_count"]) for row in listed()] == [([str(work / "a")], 3), ([], 0)]


def test_a_call_that_failed_leaves_nothing_in_its_snapshot(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"a": "a"})
    snapshot("tc")
    with opened.session(S).call(tool_call_id="tc") as call:
        builtins.hostlib_tools_write_file(path=str(work / "a"), content="failed")
        call.fail("changed its mind")
    (work / "a").write_text("a person's")
    assert restore("tc")["restored_paths"] == []
    assert (work / "a").read_text() == "a person's"


def test_a_call_of_another_agent_goes_into_its_open_snapshot_too(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"a": "a"})
    snapshot("tc")
    told = observe.Observed(SessionId(S), "Edit", label="tc", paths=[RepoPath("a")])
    call = observe.begin(opened.open_root, told)
    (work / "a").write_text("edited")
    observe.finish(opened.open_root, call)
    restore("tc")
    assert contents_of(work) == {"a": b"a"}


def test_a_tool_that_names_another_session_goes_into_the_snapshot_there(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"a": "a"})
    snapshot("tc", session="child")
    with opened.session(S).call(tool_call_id="tc"):
        builtins.hostlib_tools_write_file(path=str(work / "a"), content="A", session_id="child")
    assert restore("tc", session="child")["restored_paths"] == [str(work / "a")]
    assert (work / "a").read_text() == "a"


@pytest.mark.req("H16.created_parents_removed")
def test_restore_takes_directories_away_that_the_call_had_made(work: Path, opened: api.Mulligan) -> None:
    snapshot("tc")
    with opened.session(S).call(tool_call_id="tc"):
        builtins.hostlib_tools_write_file(path=str(work / "deep/new/f"), content="f")
    restore("tc")
    assert tree_of(work) == {}


@pytest.mark.req("H16.created_parents_removed", "S0.restore.leaves_other_work")
def test_a_directory_the_call_had_made_stays_with_what_others_put_there(work: Path, opened: api.Mulligan) -> None:
    snapshot("tc")
    with opened.session(S).call(tool_call_id="tc"):
        builtins.hostlib_tools_write_file(path=str(work / "deep/new/f"), content="f")
    plant(work, {"deep/mine": "a person's"})
    answer = restore("tc")
    assert answer["restored_paths"] == [str(work / "deep/new"), str(work / "deep/new/f")]
    assert answer["skipped_paths_with_reasons"] == [{"path": str(work / "deep"), "reason": "not_captured"}]
    assert list(tree_of(work)) == ["deep", "deep/mine"]


def test_restore_makes_the_directories_that_are_missing(work: Path) -> None:
    plant(work, {"deep/q/f": "f", "d": Dir()})
    snapshot("tc", work / "deep/q/f", work / "d/absent")
    shutil.rmtree(work / "deep")
    (work / "d").rmdir()
    assert restore("tc") == {
        "snapshot_id": "tc",
        "restored_paths": [str(work / "d/absent"), str(work / "deep/q/f")],
        "skipped_paths_with_reasons": [],
        "overwrote_external": [str(work / "deep/q/f")],
    }
    assert list(tree_of(work)) == ["deep", "deep/q", "deep/q/f"]


def test_restore_leaves_a_directory_that_holds_what_cannot_be_kept(work: Path) -> None:
    snapshot("tc", work / "d")
    (work / "d").mkdir()
    os.mkfifo(work / "d" / "pipe")
    answer = restore("tc")
    assert answer["skipped_paths_with_reasons"] == [{"path": str(work / "d"), "reason": "not_captured"}]
    assert (answer["restored_paths"], (work / "d" / "pipe").exists()) == ([], True)


def test_restore_leaves_a_pipe_in_the_place_of_a_directory(work: Path) -> None:
    plant(work, {"deep/f": "f"})
    snapshot("tc", work / "deep")
    shutil.rmtree(work / "deep")
    os.mkfifo(work / "deep")
    reasons = [(one["path"], one["reason"]) for one in restore("tc")["skipped_paths_with_reasons"]]
    assert reasons == [(str(work / "deep"), "type_changed"), (str(work / "deep/f"), "type_changed")]


@pytest.mark.parametrize("in_the_way", [File(b"a person's"), Link("elsewhere")])
def test_restore_leaves_what_took_the_place_of_a_directory(work: Path, in_the_way: File | Link) -> None:
    plant(work, {"deep/f": "f", "a": "a", "elsewhere/f": "not ours"})
    snapshot("tc", work / "deep/f", work / "a")
    shutil.rmtree(work / "deep")
    plant(work, {"deep": in_the_way, "a": "changed"})
    answer = restore("tc")
    assert answer["skipped_paths_with_reasons"] == [{"path": str(work / "deep/f"), "reason": "type_changed"}]
    assert answer["restored_paths"] == [str(work / "a")]
    assert tree_of(work)["deep"] == in_the_way
    assert ((work / "a").read_text(), (work / "elsewhere/f").read_text()) == ("a", "not ours")


def test_restore_is_refused_while_a_call_is_changing_the_path(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"a": "a"})
    snapshot("tc", work / "a")
    with opened.session("other").call() as call:
        assert call.write_file("a", "theirs").ok
        with pytest.raises(MulliganError) as error:
            restore("tc")
    assert (error.value.code, (work / "a").read_text()) == ("path_claimed", "theirs")


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"content": None},
        {"content": 5},
        {"content": "x", "encoding": "zz"},
        {"content": "!!", "encoding": "base64"},
        {"content": "x", "create_parents": "perhaps"},
    ],
)
def test_a_write_that_means_nothing_changes_nothing(work: Path, request_: dict[str, Any]) -> None:
    plant(work, {"k": "keep"})
    with pytest.raises(RequestError) as error:
        builtins.hostlib_tools_write_file({"path": str(work / "k"), **request_})
    assert (error.value.code, contents_of(work)) == ("invalid_params", {"k": b"keep"})


@pytest.mark.parametrize(
    ("path", "request_", "code"),
    [
        ("no/such", {"create_parents": False}, "parent_not_found"),
        ("d/f", {"overwrite": False}, "file_exists"),
        ("d", {}, "is_directory"),
        (".git/config", {}, "path_not_allowed"),
    ],
)
def test_a_write_that_is_refused_says_why(work: Path, path: str, request_: dict[str, Any], code: str) -> None:
    plant(work, {"d/f": "f"})
    with pytest.raises(MulliganError) as error:
        builtins.hostlib_tools_write_file({"path": str(work / path), "content": "x", **request_})
    assert (error.value.code, contents_of(work)) == (code, {"d/f": b"f"})


def test_a_directory_that_is_not_empty_is_deleted_only_on_request(work: Path) -> None:
    plant(work, {"d/f": "f"})
    with pytest.raises(MulliganError) as error:
        builtins.hostlib_tools_delete_file(path=str(work / "d"))
    assert (error.value.code, contents_of(work)) == ("directory_not_empty", {"d/f": b"f"})


def test_interleaved_tool_calls_on_one_thread_each_capture_for_themselves(work: Path, opened: api.Mulligan) -> None:
    session = opened.session(S)

    async def tool(scope: str) -> None:
        snapshot(scope)
        async with session.call(tool_call_id=scope):
            await asyncio.sleep(0)
            builtins.hostlib_tools_write_file(path=str(work / scope), content=scope)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(tool("one"), tool("two"))

    asyncio.run(both())
    assert {row["scope_id"]: row["captured_paths"] for row in listed()} == {
        "one": [str(work / "one")],
        "two": [str(work / "two")],
    }


@pytest.mark.req(
    "S0.list.of_session",
    "S0.list.sorted_by_capture_time",
    "S0.scope.session_scoped",
    "D11.hostlib.list_shape",
    "S0.storage.manifest_fields",
)
def test_list_has_a_sessions_own_snapshots_by_capture_time(work: Path) -> None:
    (work / "a").write_text("abc")
    snapshot("z", work / "a")
    snapshot("a")
    snapshot("elsewhere", session="another")
    rows = listed()
    assert [row["snapshot_id"] for row in rows] == ["z", "a"]
    assert rows[0] == {
        "snapshot_id": "z",
        "scope_id": "z",
        "taken_at_ms": rows[0]["taken_at_ms"],
        "captured_paths": [str(work / "a")],
        "byte_count": 3,
    }
    assert listed("unknown") == []


@pytest.mark.req("S0.drop.removes_everything", "D11.hostlib.drop_shape")
def test_drop_forgets_and_is_idempotent(work: Path) -> None:
    snapshot("tc", work / "a")
    answers = [builtins.hostlib_fs_drop_snapshot(session_id=S, snapshot_id="tc") for _ in range(2)]
    assert answers == [{"snapshot_id": "tc", "dropped": True}, {"snapshot_id": "tc", "dropped": False}]
    assert listed() == []
    with pytest.raises(RequestError) as error:
        restore("tc")
    assert error.value.code == "unknown_call"


@pytest.mark.req("S0.cap.default_1_gib", "S0.cap.configurable", "S0.cap.evicts_oldest_first")
def test_over_the_cap_the_oldest_snapshots_go_first(work: Path) -> None:
    assert builtins.DEFAULT_SESSION_BYTE_CAP == 2**30
    for name, letter in (("one", "1"), ("two", "2"), ("three", "3")):
        (work / name).write_text(letter * 100)
        snapshot(name, work / name)
    assert builtins.configure_session_byte_cap(S, 150) == 2**30
    assert [row["snapshot_id"] for row in listed()] == ["three"]
    assert builtins.configure_session_byte_cap(S, 2**30) == 150


@pytest.mark.req("S0.cap.unique_bytes")
def test_the_cap_counts_bytes_that_several_snapshots_share_once(work: Path) -> None:
    for name in ("one", "two", "three"):
        (work / name).write_text("the same " * 10)
        snapshot(name, work / name)
    (work / "other").write_text("o" * 100)
    snapshot("other", work / "other")
    builtins.configure_session_byte_cap(S, 190)
    assert [row["snapshot_id"] for row in listed()] == ["one", "two", "three", "other"]
    builtins.configure_session_byte_cap(S, 189)
    assert [row["snapshot_id"] for row in listed()] == ["other"]
    builtins.configure_session_byte_cap(S, 2**30)


def test_what_calls_change_counts_towards_the_cap(work: Path, opened: api.Mulligan) -> None:
    plant(work, {"one": "x" * 100, "two": "y" * 100})
    builtins.configure_session_byte_cap(S, 150)
    for name in ("one", "two"):
        snapshot(name)
        with opened.session(S).call(tool_call_id=name) as call:
            assert call.write_file(name, "short").ok
    assert [(row["snapshot_id"], row["byte_count"]) for row in listed()] == [("two", 100)]


def test_a_snapshot_larger_than_the_cap_is_kept_while_it_is_the_newest(work: Path) -> None:
    (work / "big").write_text("x" * 1000)
    builtins.configure_session_byte_cap(S, 10)
    snapshot("big", work / "big")
    assert [row["snapshot_id"] for row in listed()] == ["big"]
    builtins.configure_session_byte_cap(S, 2**30)


@pytest.mark.parametrize("cap", [2e9, "9", None])
def test_a_cap_is_a_whole_number_of_bytes(work: Path, cap: Any) -> None:
    with pytest.raises(RequestError) as error:
        builtins.configure_session_byte_cap(S, cap)
    assert error.value.code == "invalid_params"
    snapshot("one", work / "a")
    assert builtins.configure_session_byte_cap(S, 2**30) == 2**30


def test_one_path_is_one_path(work: Path) -> None:
    path = str(work / "a")
    assert builtins.hostlib_fs_snapshot(session_id=S, scope_id="one", paths=path)["captured_paths"] == [path]
    with pytest.raises(RequestError) as error:
        builtins.hostlib_fs_snapshot(session_id=S, scope_id="two", paths=3)
    assert error.value.code == "invalid_params"


@pytest.mark.req("S0.close.drops_snapshots")
def test_dropping_a_sessions_snapshots_leaves_none(work: Path) -> None:
    snapshot("one", work / "a")
    snapshot("two")
    assert sorted(builtins.drop_session_snapshots(S)) == ["one", "two"]
    assert listed() == []


@pytest.mark.req("D11.hostlib.blank_ids")
@pytest.mark.parametrize("request_", [{"session_id": " ", "scope_id": "x"}, {"session_id": "x", "scope_id": ""}, {}])
def test_blank_ids_are_refused(opened: api.Mulligan, request_: dict[str, str]) -> None:
    with pytest.raises(RequestError) as error:
        builtins.hostlib_fs_snapshot(request_)
    assert error.value.code == "invalid_params"


@pytest.mark.req("H12.dot_ids")
@pytest.mark.parametrize("name", ["..", ".", "a/b", "/etc", "x" * 200])
def test_ids_are_keys_and_never_file_names(work: Path, tmp_path: Path, name: str) -> None:
    before = sorted(os.listdir(tmp_path))
    (work / "a").write_text("a")
    snapshot(name, work / "a", session=name)
    (work / "a").write_text("b")
    restore(name, session=name)
    builtins.hostlib_fs_drop_snapshot(session_id=name, snapshot_id=name)
    assert (work / "a").read_text() == "a"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.req("H4.history_survives_restart")
def test_snapshots_survive_a_restart(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a").write_text("a")
    with api.open(str(work), store=str(tmp_path / "home")):
        snapshot("tc", work / "a")
    (work / "a").write_text("b")
    with api.open(str(work), store=str(tmp_path / "home")):
        restore("tc")
    assert (work / "a").read_text() == "a"
