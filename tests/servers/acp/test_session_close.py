"""`session/close`: nothing of a closed session stays for ever, and until room is needed its work can be undone."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import mulligan
from acp_client import test_agent, test_proxy
from acp_client.client import Client
from mulligan.builtins import hostlib_fs_list_snapshots, hostlib_fs_snapshot
from mulligan.history.bounds import set_store_cap
from mulligan.history.schema import SCHEMA
from mulligan.opening import Mulligan
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.verify import verify
from mulligan.values.digest import digest_of, raw_digest


def noise(name: str) -> str:
    """Nothing that would be packed against anything else."""
    return f"{name} {os.urandom(5000).hex()}\n"


class OurAgent:
    def __init__(self, base: Path) -> None:
        self._stage = test_agent.Stage(base)
        self.root, self.home = self._stage.root, self._stage.home

    def connected(self, *files: str) -> AbstractContextManager[Client]:
        """Each prompt writes the next of the files."""
        lines = [line for name in files for line in (test_agent.wrote(name, noise(name), name), "done")]
        return self._stage.agent(*lines)

    def prompt(self, client: Client, session: str, name: str) -> None:
        client.ask("session/prompt", sessionId=session, prompt=test_agent.PROMPT)


class Proxied:
    def __init__(self, base: Path) -> None:
        self._stage = test_proxy.Stage(base)
        self.root, self.home = self._stage.root, self._stage.home

    def connected(self, *files: str) -> AbstractContextManager[Client]:
        return self._stage.proxy()

    def prompt(self, client: Client, session: str, name: str) -> None:
        test_proxy.prompt(client, session, self._stage.edit(name, noise(name), name))


Site = OurAgent | Proxied
SITES = pytest.mark.parametrize("made", [OurAgent, Proxied])


def worked(site: Site, client: Client, *files: str) -> str:
    session: str = client.ask("session/new", cwd=str(site.root), mcpServers=[])["sessionId"]
    for name in files:
        site.prompt(client, session, name)
    return session


def opened(site: Site) -> Mulligan:
    return mulligan.open(str(site.root), store=str(site.home))


def is_kept(found: Mulligan, content: bytes) -> bool:
    with found.store.read() as tx:
        row = tx.get(BLOBS, raw_digest(digest_of(content)))
    return row is not None and row.place in READABLE


@pytest.mark.req("S0.close.acp_close_leaks_nothing", "D14.acp.session_close")
@SITES
def test_nothing_of_a_closed_session_stays_for_ever(tmp_path: Path, made: Callable[[Path], Site]) -> None:
    site = made(Path(os.path.realpath(tmp_path)))
    (site.root / "mine").write_text(noise("mine"))
    by_hand = (site.root / "mine").read_bytes()
    with site.connected("a", "a", "b") as client:
        closed = worked(site, client, "a")
        first = (site.root / "a").read_bytes()
        site.prompt(client, closed, "a")
        last = (site.root / "a").read_bytes()
        with opened(site) as found:
            hostlib_fs_snapshot(session_id=closed, scope_id="by hand", paths=[str(site.root / "mine")])
            assert is_kept(found, by_hand)
        client.ask("session/close", sessionId=closed)
        worked(site, client, "b")
    others = (site.root / "b").read_bytes()
    # What the proxy knows of files that it watches is needed for their next change, whoever makes it.
    watched = made is Proxied
    with opened(site) as found:
        assert hostlib_fs_list_snapshots(session_id=closed)["snapshots"] == []
        assert is_kept(found, by_hand) == watched
        assert is_kept(found, first), "it can be undone as long as there is room"
        set_store_cap(found.desk.ledger, 1)
        assert [is_kept(found, one) for one in (first, last, others)] == [False, watched, True]
        broken = [problem for problem in verify(found.store, SCHEMA) if problem.severity == "broken"]
        assert broken == []


@pytest.mark.req("D11.close_semantics", "D14.acp.session_load")
@SITES
def test_a_closed_session_is_loaded_again_and_goes_back(tmp_path: Path, made: Callable[[Path], Site]) -> None:
    site = made(Path(os.path.realpath(tmp_path)))
    with site.connected("one") as client:
        session = worked(site, client, "one")
        client.ask("session/close", sessionId=session)
        error = client.error("_mulligan/session/rollback", sessionId=session)
        assert error["data"]["status"] == "unknown_session"
        client.ask("session/load", sessionId=session, cwd=str(site.root), mcpServers=[])
        client.ask("_mulligan/session/rollback", sessionId=session)
    assert not (site.root / "one").exists()
