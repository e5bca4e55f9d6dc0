"""Many processes on one SQLite store, and processes that die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mulligan.store.journal import records_of
from mulligan.store.sqlite import SqliteStore
from mulligan.values.ids import OwnerId
from tests.contracts.journal_contract import broken_journals
from tests.contracts.tables import CONTRACT_SCHEMA, SUMS

CHILD = str(Path(__file__).with_name("store_process.py"))
FORK_CHILD = str(Path(__file__).with_name("fork_process.py"))
FORKED_INSIDE_A_CALL = {"said": ["ok"], "wrong": []}


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, CHILD, *arguments]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def said_by(*arguments: str) -> object:
    done = subprocess.run([sys.executable, CHILD, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.req("D15.sqlite_many_processes")
def test_eight_processes_write_one_store_at_once(tmp_path: Path) -> None:
    names, count = [f"p{n}" for n in range(8)], 30
    children = [start("write", str(tmp_path), name, str(count)) for name in names]
    assert {line_of(child) for child in children} == {"ready"}
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.communicate()[0] and child.wait() for child in children] == [""] * 8
    assert {child.returncode for child in children} == {0}
    store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    with store.read() as tx:
        assert (store.check(), broken_journals(tx)) == ([], [])
        shared = list(records_of(tx, "shared"))
        assert Counter(record.payload["by"] for record in shared) == dict.fromkeys(names, count)
        for name in names:
            own = [record.payload["amount"] for record in records_of(tx, name)]
            assert own == [r.payload["amount"] for r in shared if r.payload["by"] == name] == list(range(count))
        assert sum(row.total for row in tx.select(SUMS)) == 2 * 8 * sum(range(count))
    store.close()


@pytest.mark.req("D5.durability_process", "D15.sqlite_many_processes")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("durability", ["process", "power"])
def test_what_was_acknowledged_survives_kill_9_at_any_moment(tmp_path: Path, durability: str, seed: int) -> None:
    outcome = said_by("kill", str(tmp_path), durability, "100", str(seed))
    assert isinstance(outcome, dict) and outcome.pop("acknowledged") > 100
    assert outcome == {"points": 100}


@pytest.mark.req("D5.owner_lock_per_process")
def test_an_owner_is_alive_until_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    children = [start("own", str(tmp_path)) for _ in range(4)]
    owners = [OwnerId(int(line_of(child))) for child in children]
    store = SqliteStore(str(tmp_path), CONTRACT_SCHEMA)
    assert len({*owners, store.owner()}) == 5
    assert [store.is_alive(owner) for owner in owners] == [True] * 4
    children[0].kill()
    children[1].communicate("\n")
    children[0].communicate()
    assert [store.is_alive(owner) for owner in owners] == [False, False, True, True]
    # Opening and closing the store again in this process must not let go of our own byte.
    SqliteStore(str(tmp_path), CONTRACT_SCHEMA).close()
    assert said_by("ask", str(tmp_path), str(store.owner())) == ["[true]"] * 4
    assert said_by("ask", str(tmp_path), str(owners[0])) == ["[false]"] * 4
    for child in children[2:]:
        child.communicate("\n")
    store.close()


def test_children_forked_while_other_threads_write_can_write_at_once(tmp_path: Path) -> None:
    assert said_by("beside", str(tmp_path)) == [["null"], 30, []]


@pytest.mark.req("D5.fork_never_hangs")
def test_threads_that_fork_and_open_stores_beside_each_other_do_not_wait_for_ever(tmp_path: Path) -> None:
    assert said_by("many", str(tmp_path), "50", "5") == [["null"], 50 * 4 * 5]


@pytest.mark.slow
@pytest.mark.req("D5.fork_never_hangs")
@pytest.mark.parametrize("part", range(10))
def test_no_child_hangs_in_a_thousand_runs_of_threads_that_fork(tmp_path: Path, part: int) -> None:
    assert said_by("many", str(tmp_path), "100", "15") == [["null"], 100 * 4 * 15]


def said_by_fork_child(*arguments: str) -> object:
    done = subprocess.run([sys.executable, FORK_CHILD, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.req("D5.fork_never_hangs")
def test_threads_that_fork_inside_an_open_call_get_children_that_work(tmp_path: Path) -> None:
    assert said_by_fork_child("calls", str(tmp_path), "50") == FORKED_INSIDE_A_CALL | {"children": 200}


@pytest.mark.slow
@pytest.mark.req("D5.fork_never_hangs")
@pytest.mark.parametrize("part", range(10))
def test_no_child_hangs_in_a_thousand_runs_of_threads_that_fork_inside_a_call(tmp_path: Path, part: int) -> None:
    assert said_by_fork_child("calls", str(tmp_path), "100") == FORKED_INSIDE_A_CALL | {"children": 400}


@pytest.mark.req("D5.fork_never_hangs")
def test_a_process_that_was_interrupted_anywhere_in_a_call_can_still_fork(tmp_path: Path) -> None:
    assert said_by_fork_child("interrupted", str(tmp_path)) == {"after_threads": ["ok"], "after_garbage": ["ok"]}


@pytest.mark.req("D5.fork_never_hangs")
def test_a_child_that_inherits_a_lock_of_sqlite_gets_an_error_that_says_spawn(tmp_path: Path) -> None:
    said = said_by_fork_child("foreign", str(tmp_path))
    assert isinstance(said, list)
    assert said[0] == "forked_unsafely"
    assert "spawn" in said[1]


@pytest.mark.req("D5.fork_never_hangs")
def test_a_fork_waits_for_an_import_of_another_thread(tmp_path: Path) -> None:
    assert said_by_fork_child("importing", str(tmp_path)) == "imported"


@pytest.mark.req("D5.fork_never_hangs")
def test_a_lock_that_another_thread_held_at_the_fork_is_free_in_the_child(tmp_path: Path) -> None:
    assert said_by_fork_child("locked", str(tmp_path)) is True


@pytest.mark.req("D5.fork_never_hangs")
def test_a_child_forked_in_the_middle_of_another_threads_transaction_gets_an_error_that_says_spawn(
    tmp_path: Path,
) -> None:
    said = said_by("held", str(tmp_path))
    assert isinstance(said, list)
    code, message = said[0]
    assert (code, said[1:]) == ("forked_unsafely", [[], []])
    assert "spawn" in message


@pytest.mark.req("D5.fork_never_hangs")
def test_a_fork_does_not_wait_for_an_ended_thread_whose_ident_another_thread_has(tmp_path: Path) -> None:
    assert said_by("ended", str(tmp_path)) == ["null", ["child"], []]


@pytest.mark.req("D5.fork_never_hangs")
def test_a_fork_closes_a_connection_that_an_interrupt_took_from_its_thread(tmp_path: Path) -> None:
    assert said_by("lost", str(tmp_path)) == ["null", 0, ["child"], []]


@pytest.mark.req("D5.owner_after_fork")
def test_a_forked_child_is_another_owner_and_can_use_the_store_at_once(tmp_path: Path) -> None:
    own = json.dumps([True, True, True])
    shelves = json.dumps(["child", "parent"])
    assert said_by("fork", str(tmp_path)) == [own, True, False, shelves, ["child", "parent"], []]
