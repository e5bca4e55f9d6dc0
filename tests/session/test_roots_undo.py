"""Ways back over several roots: each path is that of the root that holds it, and is told so."""

from __future__ import annotations

import pytest

from mulligan.history.log import call_view, diff_view, find_call
from mulligan.history.undo import UndoResult
from mulligan.values.errors import MulliganError
from mulligan.values.ids import CallId
from tests.session.mounted_roots import MountedRoots


def told(way: UndoResult) -> dict[str, str]:
    return {one.path: one.reason or one.outcome for one in way.outcomes}


@pytest.mark.req("D11.mount_paths_absolute")
def test_a_path_is_that_of_the_root_that_holds_it(mounted: MountedRoots) -> None:
    before, call = mounted.tree(), mounted.work_in_two_roots()
    assert told(mounted.session.undo(call, "new.txt")) == {"new.txt": "not_captured"}
    assert told(mounted.session.restore(call, ["new.txt", "a.txt"], dry_run=True)) == {
        "a.txt": "restored",
        "new.txt": "not_captured",
    }
    assert told(mounted.session.undo(call, ["a.txt"])) == {"a.txt": "restored"}
    assert mounted.text("ext/a.txt") == "E\next two\n"
    assert told(mounted.session.undo(call, mounted.at("ext/new.txt"))) == {mounted.at("ext/new.txt"): "restored"}
    assert told(mounted.session.undo(call)) == {"b.txt": "restored", mounted.at("ext/a.txt"): "restored"}
    assert mounted.tree() == before
    with pytest.raises(MulliganError) as caught:
        mounted.session.undo(call)
    assert caught.value.code == "nothing_to_undo"


@pytest.mark.parametrize("verb", ["undo", "restore"])
def test_files_in_the_copy_are_named_by_their_root(mounted: MountedRoots, verb: str) -> None:
    with mounted.session.call() as call:
        call.write_file("a.txt", "W\n")
        call.write_file(mounted.at("box/a.txt"), "B\n")
    assert told(getattr(mounted.session, verb)(call, mounted.at("box"))) == {mounted.at("box/a.txt"): "restored"}
    assert (mounted.read(mounted.at("box/a.txt")), mounted.text("work/a.txt")) == ("box one\nbox two\n", "W\n")


@pytest.mark.parametrize("path", ["/etc/passwd", "{}/outside/a.txt", "{}/lib/a.txt", "{}/ext-not/a.txt", "/"])
def test_a_path_in_no_root_of_the_call_is_refused(mounted: MountedRoots, path: str) -> None:
    call, after = mounted.work_in_two_roots(), mounted.tree()
    with pytest.raises(MulliganError) as caught:
        mounted.session.undo(call, ["a.txt", path.format(mounted.base)])
    assert caught.value.code == "invalid_path" and mounted.tree() == after


@pytest.mark.req("D11.mount_paths_absolute")
def test_a_call_shows_its_changes_in_another_root(mounted: MountedRoots) -> None:
    call, open_root = mounted.work_in_two_roots(), mounted.opened.open_root
    paths = ["a.txt", "b.txt", mounted.at("ext/a.txt"), mounted.at("ext/new.txt")]
    with open_root.ledger.store.read() as tx:
        view = call_view(open_root, tx, open_root.ledger.call_row(CallId(call)))
    assert [change["path"] for change in view["changes"]] == paths
    diff = diff_view(open_root, open_root.ledger.call_row(CallId(call))).splitlines()
    names = [path.lstrip("/") for path in paths]
    assert [line for line in diff if line[:4] == "diff"] == [f"diff --git a/{name} b/{name}" for name in names]


def test_a_label_is_that_of_the_call_and_not_of_what_it_did_elsewhere(mounted: MountedRoots) -> None:
    before, call = mounted.tree(), mounted.work_in_two_roots()
    assert find_call(mounted.opened.open_root, "both", mounted.session.id).id == call
    assert mounted.session.rewind("both").ok and mounted.tree() == before


def test_undo_and_rollback_follow_the_order_of_calls_over_two_roots(mounted: MountedRoots) -> None:
    for number in range(5):
        mounted.opened.session("other").perform("write_file", {"path": "pad", "content": str(number)})
    _, first = mounted.session.perform("write_file", {"path": "a.txt", "content": "W\n"})
    mounted.perform("write_file", path=mounted.at("ext/a.txt"), content="E\n")
    for _ in range(2):
        assert mounted.session.rewind(first).ok and mounted.session.redo().ok
    assert told(mounted.session.undo()) == {mounted.at("ext/a.txt"): "restored"}
    assert told(mounted.session.rollback()) == {"a.txt": "restored"}
