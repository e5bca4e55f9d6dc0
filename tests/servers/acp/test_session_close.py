"""`session/close`: nothing of a closed session stays for ever, and until room is needed its work can be undone."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.builtins import hostlib_fs_list_snapshots, hostlib_fs_snapshot
from mulligan.history.projection import SCHEMA
from mulligan.history.retention import set_store_cap
from mulligan.store.blobs import BLOBS, READABLE
from mulligan.store.verify import verify
from mulligan.values.digest import digest_of, raw_digest
from tests.servers.acp import test_agent, test_proxy
from tests.servers.acp.client import Client


def noise(name: str) -> str:
    """Nothing that would be packed against anything else."""
    return f"{name} {os.urandom(5000).hex()}\n"


class OurAgent:
    def __init__(self, base: Path) -> None:
        self._workspace = test_agent.AgentWorkspace(base)
        self.root, self.home = self._workspace.root, self._workspace.home

    def connected(self, *files: str) -> AbstractContextManager[Client]:
        """Each prompt writes the next of the files."""
        lines = [line for name in files for line in (test_agent.wrote(name, noise(name), name), "done")]
        return self._workspace.agent(*lines)

    def prompt(self, client: Client, session: str, name: str) -> None:
        client.ask("session/prompt", sessionId=session, prompt=test_agent.PROMPT)


class Proxy:
    def __init__(self, base: Path) -> None:
        self._workspace = test_proxy.ProxyWorkspace(base)
        self.root, self.home = self._workspace.root, self._workspace.home

    def connected(self, *files: str) -> AbstractContextManager[Client]:
        return self._workspace.proxy()

    def prompt(self, client: Client, session: str, name: str) -> None:
        test_proxy.prompt(client, session, self._workspace.edit(name, noise(name), name))


Interface = OurAgent | Proxy
BOTH_INTERFACES = pytest.mark.parametrize("made", [OurAgent, Proxy])


def worked(workspace: Interface, client: Client, *files: str) -> str:
    session: str = client.ask("session/new", cwd=str(workspace.root), mcpServers=[])["sessionId"]
    for name in files:
        workspace.prompt(client, session, name)
    return session


def opened(workspace: Interface) -> Mulligan:
    return mulligan.open(str(workspace.root), store=str(workspace.home))


def is_kept(found: Mulligan, content: bytes) -> bool:
    with found.store.read() as tx:
        row = tx.get(BLOBS, raw_digest(digest_of(content)))
    return row is not None and row.place in READABLE


@pytest.mark.req("S0.close.acp_close_leaks_nothing", "D14.acp.session_close")
@BOTH_INTERFACES
def test_nothing_of_a_closed_session_stays_for_ever(tmp_path: Path, made: Callable[[Path], Interface]) -> None:
    workspace = made(Path(os.path.realpath(tmp_path)))
    (workspace.root / "mine").write_text(noise("mine"))
    by_hand = (workspace.root / "mine").read_bytes()
    with workspace.connected("a", "a", "b") as client:
        closed = worked(workspace, client, "a")
        first = (workspace.root / "a").read_bytes()
        workspace.prompt(client, closed, "a")
        last = (workspace.root / "a").read_bytes()
        with opened(workspace) as found:
            hostlib_fs_snapshot(session_id=closed, scope_id="by hand", paths=[str(workspace.root / "mine")])
            assert is_kept(found, by_hand)
        client.ask("session/close", sessionId=closed)
        worked(workspace, client, "b")
    others = (workspace.root / "b").read_bytes()
    # What the proxy knows of files that it watches is needed for their next change, whoever makes it.
    watched = made is Proxy
    with opened(workspace) as found:
        assert hostlib_fs_list_snapshots(session_id=closed)["snapshots"] == []
        assert is_kept(found, by_hand) == watched
        assert is_kept(found, first), "it can be undone as long as there is room"
        set_store_cap(found.open_root.ledger, 1)
        assert [is_kept(found, one) for one in (first, last, others)] == [False, watched, True]
        broken = [problem for problem in verify(found.store, SCHEMA) if problem.severity == "broken"]
        assert broken == []


@pytest.mark.req("D11.close_semantics", "D14.acp.session_load")
@BOTH_INTERFACES
def test_a_closed_session_is_loaded_again_and_is_undone(tmp_path: Path, made: Callable[[Path], Interface]) -> None:
    workspace = made(Path(os.path.realpath(tmp_path)))
    with workspace.connected("one") as client:
        session = worked(workspace, client, "one")
        client.ask("session/close", sessionId=session)
        error = client.error("_mulligan/session/rollback", sessionId=session)
        assert error["data"]["status"] == "unknown_session"
        client.ask("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
        client.ask("_mulligan/session/rollback", sessionId=session)
    assert not (workspace.root / "one").exists()
