"""Commits whose connection breaks, servers that stop, and URLs that do not work: what the engine answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mulligan.store.postgres import PostgresStore
from mulligan.store.postgres_server import Step, parse_postgres_url, prepare_schema
from mulligan.store.postgres_server import connect as connect_to
from mulligan.testing.fault_proxy import Fault, FaultProxy
from mulligan.values.errors import MulliganError
from tests.contracts.tables import CONTRACT_SCHEMA, PARCELS, THINGS, Parcel, Thing
from tests.fleet.servers import PASSWORD, Postgres, PostgresTemplate, wait_for

pytestmark = pytest.mark.fleet

ROW = Thing("a", 1, "one")


@pytest.fixture
def schema(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"f{abs(hash(request.node.name)):x}"
    yield name
    postgres.run(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[FaultProxy]:
    with FaultProxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture
def store(postgres: Postgres, proxy: FaultProxy, schema: str, tmp_path: Path) -> Iterator[PostgresStore]:
    store = opened(postgres.url(port=proxy.port, schema=schema), tmp_path)
    yield store
    store.close()


def opened(url: str, folder: Path) -> PostgresStore:
    return PostgresStore(url, CONTRACT_SCHEMA, local=str(folder))


def things(store: PostgresStore) -> list[Thing]:
    with store.read() as tx:
        return tx.select(THINGS)


def fill(store: PostgresStore, *rows: Thing) -> None:
    with store.write() as tx:
        for row in rows:
            tx.put(THINGS, row)


def refusal(act: object, *arguments: object) -> tuple[str, object]:
    """The code of the error, and whether it says that trying again may help."""
    with pytest.raises(MulliganError) as refused:
        act(*arguments)  # type: ignore[operator]  # any function
    assert "\n" not in refused.value.message and PASSWORD not in refused.value.message
    return refused.value.code, refused.value.details.get("retry")


@pytest.mark.parametrize("fault", ["cut_before", "cut_half"])
def test_a_commit_that_the_server_did_not_get_raises_and_changes_nothing(
    store: PostgresStore, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.plan(b"COMMIT\0", fault)
    assert refusal(fill, store, ROW) == ("store_unreachable", True)
    assert (proxy.done, things(store)) == ([fault], [])
    fill(store, ROW)
    assert things(store) == [ROW]


@pytest.mark.parametrize("fault", ["lose_answer", "truncate_answer"])
def test_a_commit_whose_answer_is_lost_is_found_to_be_done(
    store: PostgresStore, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.plan(b"COMMIT\0", fault)
    fill(store, ROW)
    assert (proxy.done, things(store)) == ([fault], [ROW])


def test_while_an_outcome_is_unknown_nothing_is_read_and_later_it_is_known(
    store: PostgresStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mulligan.store.postgres.OUTCOME_LIMIT_S", 0.0)
    fill(store, Thing("a", 0))
    with pytest.raises(MulliganError) as unknown, store.write() as tx:
        tx.put(THINGS, ROW)
        proxy.plan(b"COMMIT\0", "lose_answer")
        proxy.refuses = True
    assert (unknown.value.code, proxy.done) == ("in_doubt", ["lose_answer"])
    assert refusal(things, store) == ("in_doubt", True)
    proxy.refuses = False
    assert things(store) == [Thing("a", 0), ROW]


def test_a_transaction_whose_connection_breaks_half_way_changes_nothing(
    store: PostgresStore, proxy: FaultProxy
) -> None:
    def work() -> None:
        with store.write() as tx:
            tx.put(THINGS, ROW)
            assert tx.select(THINGS) == [ROW]
            proxy.cut_all()
            tx.put(THINGS, Thing("a", 2))

    assert refusal(work) == ("store_unreachable", True)
    assert things(store) == []


def test_idle_connections_that_broke_are_replaced(store: PostgresStore, proxy: FaultProxy) -> None:
    fill(store, ROW)
    proxy.cut_all()
    assert things(store) == [ROW]
    proxy.cut_all()
    fill(store, Thing("a", 2))
    assert things(store) == [ROW, Thing("a", 2)]


def test_slow_answers_change_nothing(store: PostgresStore, proxy: FaultProxy) -> None:
    proxy.delay_s = 0.2
    fill(store, ROW)
    assert things(store) == [ROW]


def test_a_server_that_is_killed_and_started_again_has_each_transaction_whole_or_not_at_all(
    postgres_template: PostgresTemplate, tmp_path: Path
) -> None:
    with postgres_template.server("killed") as server:
        store, done = opened(server.url(), tmp_path), list[int]()
        enough = threading.Event()

        def work() -> int:
            number = 0
            while True:
                try:
                    fill(store, Thing("a", number), Thing("b", number))
                except MulliganError as error:
                    assert error.code in ("store_unreachable", "in_doubt"), error
                    return number
                done.append(number)
                number += 1
                if number == 20:
                    enough.set()

        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(work)
            assert enough.wait(60)
            server.stop(signal.SIGKILL)
            server.start()
            last = failed.result()
        numbers = [[row.number for row in things(store) if row.group == group] for group in "ab"]
        assert numbers[0] == numbers[1] and numbers[0] in (done, [*done, last])
        store.close()


def test_what_a_server_refuses_has_one_line_and_a_code(postgres_template: PostgresTemplate, tmp_path: Path) -> None:
    with postgres_template.server("refusing", max_connections="8", superuser_reserved_connections="0") as server:
        server.run(
            "CREATE ROLE guest LOGIN PASSWORD 'guest-word'",
            "CREATE DATABASE other",
            "CREATE SCHEMA taken; CREATE TABLE taken.calls (id int)",
        )
        guest = server.url(user="guest").replace(PASSWORD, "guest-word")
        wrong = server.url().replace(PASSWORD, "wrong")
        reader = opened(server.url(), tmp_path)
        fill(reader, ROW)
        assert {
            "password": refusal(opened, wrong, tmp_path),
            "database": refusal(opened, server.url(database="missing"), tmp_path),
            "rights": refusal(opened, guest, tmp_path),
            "foreign": refusal(opened, server.url(schema="taken"), tmp_path),
            "port": refusal(opened, server.url(port=1), tmp_path),
        } == {
            "password": ("store_unreadable", False),
            "database": ("store_unreadable", False),
            "rights": ("store_unreadable", False),
            "foreign": ("store_unreadable", False),
            "port": ("store_unreachable", True),
        }
        server.run("ALTER DATABASE postgres SET default_transaction_read_only = on")
        read_only = opened(server.url(), tmp_path)
        assert things(read_only) == [ROW]
        assert refusal(opened, server.url(schema="fresh"), tmp_path) == ("read_only_disk", False)
        server.run(
            "UPDATE mulligan.mulligan_store SET format = 1000",
            database="postgres",
            options="-cdefault_transaction_read_only=off",
        )
        assert refusal(opened, server.url(), tmp_path)[0] == "store_newer"
        assert refusal(fill, reader, ROW)[0] == "store_newer"
        taken = list[psycopg.Connection[Any] | PostgresStore]()
        with pytest.raises(psycopg.OperationalError):
            while True:
                taken.append(psycopg.connect(server.url()))
        assert refusal(opened, server.url(), tmp_path) == ("store_busy", True)
        for one in [*taken, reader, read_only]:
            one.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:pass@word@host/db",
        "postgresql://user:12/34@host/db",
        "postgresql://host:port/db",
        "postgresql://host/db?nonsense=1",
        "postgresql://host/db#part",
        "postgresql://host/db?schema=Robert'); DROP",
        "postgresql:host",
    ],
)
def test_a_malformed_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(MulliganError) as refused:
        parse_postgres_url(url)
    assert refused.value.code == "invalid_store_url"
    assert not any(part in refused.value.message for part in ("word@", "12", "34", "Robert"))


def test_two_processes_that_create_the_store_at_once_make_one(postgres: Postgres, schema: str, tmp_path: Path) -> None:
    url = postgres.url(schema=schema)
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda number: opened(url, tmp_path / str(number)), range(4)))
    assert len({store.id for store in stores}) == 1
    for store in stores:
        store.close()


def test_a_migration_runs_its_steps_once_and_keeps_the_rows(
    postgres: Postgres, store: PostgresStore, schema: str
) -> None:
    fill(store, ROW)
    ran = list[str]()

    def step(connection: psycopg.Connection[tuple[object, ...]], name: str) -> None:
        ran.append(name)
        connection.execute(f'ALTER TABLE "{name}"."things" ADD COLUMN "extra" int8'.encode())

    steps: dict[int, Step] = {900: step}
    postgres.run(f'UPDATE "{schema}".mulligan_store SET format = 900')
    for _ in range(2):
        link = connect_to(parse_postgres_url(postgres.url(schema=schema)))
        assert prepare_schema(link, schema, (), create=False, version=901, steps=steps).format == 901
        link.raw.close()
    assert ran == [schema]
    assert postgres.run(f'SELECT count(*), count(extra) FROM "{schema}".things') == [(1, 0)]


def test_a_forked_child_uses_connections_of_its_own(store: PostgresStore) -> None:
    fill(store, ROW)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fill(store, Thing("child", 1))
            status = 0 if things(store) == [ROW, Thing("child", 1)] else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert things(store) == [ROW, Thing("child", 1)]


def test_owners_of_another_directory_are_neither_alive_nor_dead(
    postgres: Postgres, schema: str, tmp_path: Path
) -> None:
    """Only a process that sees the lock file can tell: on another host the same path is another file."""
    one, other = (opened(postgres.url(schema=schema), tmp_path / name) for name in ("one", "other"))
    assert one.owner() != other.owner()
    assert (one.is_alive(one.owner()), one.is_alive(other.owner())) == (True, None)
    assert other.is_alive(one.owner()) is None
    one.close()
    other.close()


def test_large_bodies_are_in_the_store_if_there_is_no_object_store(store: PostgresStore) -> None:
    with store.write() as tx:
        tx.put(PARCELS, Parcel("big", b"x" * 3_000_000))
    wait_for(lambda: store.size_bytes() > 0, "a size")
    assert store.check() == []
    store.erase_deleted()
    with store.read() as tx:
        assert tx.get(PARCELS, "big") == Parcel("big", b"x" * 3_000_000)
