"""Ways back over several roots: each path is that of the root that holds it, and is told so."""

from __future__ import annotations

import pytest

from mulligan.history.going_back import WayBack
from mulligan.history.log import find_call
from mulligan.history.views import call_view, diff_view
from mulligan.values.faults import MulliganError
from mulligan.values.ids import CallId
from session.yards import Yard


def told(way: WayBack) -> dict[str, str]:
    return {one.path: one.reason or one.outcome for one in way.outcomes}


@pytest.mark.req("D11.mount_paths_absolute")
def test_a_path_is_that_of_the_root_that_holds_it(yard: Yard) -> None:
    before, call = yard.tree(), yard.work_in_two_roots()
    assert told(yard.session.undo(call, "new.txt")) == {"new.txt": "not_captured"}
    assert told(yard.session.restore(call, ["new.txt", "a.txt"], dry_run=True)) == {
        "a.txt": "restored",
        "new.txt": "not_captured",
    }
    assert told(yard.session.undo(call, ["a.txt"])) == {"a.txt": "restored"}
    assert yard.text("ext/a.txt") == "E\next two\n"
    assert told(yard.session.undo(call, yard.at("ext/new.txt"))) == {yard.at("ext/new.txt"): "restored"}
    assert told(yard.session.undo(call)) == {"b.txt": "restored", yard.at("ext/a.txt"): "restored"}
    assert yard.tree() == before
    with pytest.raises(MulliganError) as caught:
        yard.session.undo(call)
    assert caught.value.code == "nothing_to_undo"


@pytest.mark.parametrize("verb", ["undo", "restore"])
def test_what_is_aside_goes_by_the_name_of_its_root(yard: Yard, verb: str) -> None:
    with yard.session.call() as call:
        call.write_file("a.txt", "W\n")
        call.write_file(yard.at("box/a.txt"), "B\n")
    assert told(getattr(yard.session, verb)(call, yard.at("box"))) == {yard.at("box/a.txt"): "restored"}
    assert (yard.read(yard.at("box/a.txt")), yard.text("work/a.txt")) == ("box one\nbox two\n", "W\n")


@pytest.mark.parametrize("path", ["/etc/passwd", "{}/outside/a.txt", "{}/lib/a.txt", "{}/ext-not/a.txt", "/"])
def test_a_path_in_no_root_of_the_call_is_refused(yard: Yard, path: str) -> None:
    call, after = yard.work_in_two_roots(), yard.tree()
    with pytest.raises(MulliganError) as caught:
        yard.session.undo(call, ["a.txt", path.format(yard.base)])
    assert caught.value.code == "invalid_path" and yard.tree() == after


@pytest.mark.req("D11.mount_paths_absolute")
def test_what_it_did_in_another_root_is_shown_with_it(yard: Yard) -> None:
    call, desk = yard.work_in_two_roots(), yard.opened.desk
    paths = ["a.txt", "b.txt", yard.at("ext/a.txt"), yard.at("ext/new.txt")]
    with desk.ledger.store.read() as tx:
        view = call_view(desk, tx, desk.ledger.call_row(CallId(call)))
    assert [change["path"] for change in view["changes"]] == paths
    diff = diff_view(desk, desk.ledger.call_row(CallId(call))).splitlines()
    names = [path.lstrip("/") for path in paths]
    assert [line for line in diff if line[:4] == "diff"] == [f"diff --git a/{name} b/{name}" for name in names]


def test_a_label_is_that_of_the_call_and_not_of_what_it_did_elsewhere(yard: Yard) -> None:
    before, call = yard.tree(), yard.work_in_two_roots()
    assert find_call(yard.opened.desk, "both", yard.session.id).id == call
    assert yard.session.rewind("both").ok and yard.tree() == before


def test_ways_back_over_two_roots_stand_in_the_order_they_were_made(yard: Yard) -> None:
    for number in range(5):
        yard.opened.session("other").perform("write_file", {"path": "pad", "content": str(number)})
    _, first = yard.session.perform("write_file", {"path": "a.txt", "content": "W\n"})
    yard.perform("write_file", path=yard.at("ext/a.txt"), content="E\n")
    for _ in range(2):
        assert yard.session.rewind(first).ok and yard.session.redo().ok
    assert told(yard.session.undo()) == {yard.at("ext/a.txt"): "restored"}
    assert told(yard.session.rollback()) == {"a.txt": "restored"}
