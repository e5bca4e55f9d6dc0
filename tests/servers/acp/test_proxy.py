"""`mulligan acp -- COMMAND…` around an agent that knows nothing of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from mulligan.servers.acp.relay import QUIET_S
from tests.history.test_unstable_reads import written_all_the_time
from tests.servers.acp.client import Body, Client, connected

MULLIGAN = [sys.executable, "-m", "mulligan"]
CHILD = [sys.executable, str(Path(__file__).with_name("scripted_plain_agent.py"))]
PROXY = [*MULLIGAN, "acp", "--", *CHILD]
BUSY_BYTES = 12 * 1024 * 1024
"""Small enough for the proxy to read, and large enough for a writer to write during each read."""
WAYS = pytest.mark.parametrize("prefix", ["", "_mulligan/"])


class ProxyWorkspace:
    def __init__(self, base: Path) -> None:
        self.root, self.home = base / "work", base / "home"
        self.root.mkdir()
        (self.root / "a.txt").write_text("one\n")
        (self.root / "gone.txt").write_text("here\n")
        (self.root / ".env").write_text("KEY=1\n")

    def proxy(self, cwd: str | None = None, **environ: str) -> AbstractContextManager[Client]:
        return connected(self.home, command=PROXY, cwd=cwd, **environ)

    def files(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in sorted(self.root.iterdir()) if file.is_file()}

    def cli(self, *words: str) -> Any:
        env = {**os.environ, "MULLIGAN_HOME": str(self.home)}
        command = [*MULLIGAN, *words, "--root", str(self.root), "--json"]
        return json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)

    def log(self) -> list[tuple[str | None, dict[str, str]]]:
        """What is on record as somebody's, oldest first: the agent's ids and what they changed."""
        rows = [row for row in reversed(self.cli("log")) if not row["external"]]
        return [(row["label"], {one["path"]: one["kind"] for one in row["changes"]}) for row in rows]

    def edit(self, name: str, content: str, id: str = "tc_1") -> list[Body]:
        path = str(self.root / name)
        return [*began(id, kind="edit", locations=[{"path": path}]), {"write": [path, content]}, over(id)]

    def shell(self, command: str, id: str = "tc_2") -> list[Body]:
        return [*began(id, kind="execute"), {"shell": f"cd {self.root} && {command}"}, over(id)]


@pytest.fixture
def workspace(tmp_path: Path) -> ProxyWorkspace:
    return ProxyWorkspace(Path(os.path.realpath(tmp_path)))


def began(id: str, **fields: Any) -> list[Body]:
    head = {"sessionUpdate": "tool_call", "toolCallId": id, "title": "tool", "status": "pending"}
    return [{"update": {**head, **fields}}]


def pause(session: str) -> Body:
    """What takes a model its time: everything told so far has been heard when the agent goes on."""
    return {"ask": {"sessionId": session, "toolCall": {"toolCallId": "look", "kind": "read"}, "options": []}}


def over(id: str, status: str = "completed", **fields: Any) -> Body:
    return {"update": {"sessionUpdate": "tool_call_update", "toolCallId": id, "status": status, **fields}}


def new(client: Client, workspace: ProxyWorkspace) -> str:
    found: str = client.ask("session/new", cwd=str(workspace.root), mcpServers=[])["sessionId"]
    return found


def steps(*parts: list[Body] | Body) -> list[Body]:
    flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return [{"type": "text", "text": json.dumps(flat)}]


def prompt(client: Client, session: str, *parts: list[Body] | Body) -> Body:
    return client.ask("session/prompt", sessionId=session, prompt=steps(*parts))


def heard(client: Client) -> list[str]:
    """The blocks of the last prompt as the agent got them, but for the steps."""
    told = client.updates("agent_message_chunk")[-1]["content"]["text"]
    return [block["text"] for block in json.loads(told)[:-1]]


class TestUndo:
    @pytest.mark.req("D14.acp.proxy")
    @WAYS
    def test_an_edit_and_a_command_of_a_turn_are_restored_and_come_again(
        self, workspace: ProxyWorkspace, prefix: str
    ) -> None:
        before = workspace.files()
        with workspace.proxy() as client:
            session = new(client, workspace)
            shell = workspace.shell("rm gone.txt; echo KEY=2 > .env; echo n > n")
            prompt(client, session, workspace.edit("a.txt", "two\n"), pause(session), shell)
            after = workspace.files()
            assert after == {".env": "KEY=2\n", "a.txt": "two\n", "n": "n\n"}
            assert workspace.log() == [
                ("tc_1", {"a.txt": "modified"}),
                ("tc_2", {".env": "modified", "gone.txt": "deleted", "n": "created"}),
            ]
            back = client.ask(f"{prefix}session/rollback", sessionId=session)
            restores = {one["snapshotId"]: len(one["restoredPaths"]) for one in back["fsRestores"]}
            assert (back["status"], restores) == ("rolled_back", {"tc_1": 1, "tc_2": 3})
            assert workspace.files() == before
            assert client.ask(f"{prefix}session/redo", sessionId=session)["status"] == "redone"
            assert workspace.files() == after
            told = client.updates()[-1]["_meta"]["mulligan" if prefix else "harn"]
            assert (told["kind"], told["talk"]) == ("session_redo", "kept")

    @pytest.mark.req("D5.unstable_read")
    def test_a_file_that_another_program_writes_all_the_time_is_listed_as_unstable(
        self, workspace: ProxyWorkspace
    ) -> None:
        busy = workspace.root / "busy.bin"
        busy.write_bytes(b"calm")
        with workspace.proxy() as client:
            session, coverage = new(client, workspace), list[Body]()
            prompt(client, session, pause(session))
            # A machine that is busy enough may let one whole read pass between two writes.
            while {"path": "busy.bin", "reason": "unstable"} not in coverage:
                os.truncate(busy, BUSY_BYTES)
                with written_all_the_time(busy):
                    prompt(client, session, workspace.shell("printf x >> busy.bin; echo y > a.txt"))
                coverage = [note for row in workspace.cli("log") for note in row["coverage"]]

    @WAYS
    def test_one_of_two_calls_at_once_is_restored_alone(self, workspace: ProxyWorkspace, prefix: str) -> None:
        a, b = (workspace.edit(name, f"by {name}\n", name) for name in ("a.txt", "b.txt"))
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, a[0], b[0], a[1], b[1], a[2], b[2])
            done = client.ask(f"{prefix}session/restore_tool_call", sessionId=session, toolCallId="a.txt")
            assert done["restoredPaths"] == [str(workspace.root / "a.txt")]
            update = client.wait_for_update(lambda one: one.get("toolCallId") == "a.txt" and "_meta" in one)
            assert update["status"] == ("completed" if prefix else "restored")
        assert (workspace.files()["a.txt"], workspace.files()["b.txt"]) == ("one\n", "by b.txt\n")

    def test_two_edits_of_one_file_announced_at_once_are_two_calls(self, workspace: ProxyWorkspace) -> None:
        one, two = workspace.edit("a.txt", "1\n", "e1"), workspace.edit("a.txt", "2\n", "e2")
        with workspace.proxy() as client:
            session = new(client, workspace)
            script = steps(one[0], two[0], one[1:], {"wait": "x/go"}, two[1:])
            asked = client.begin("session/prompt", sessionId=session, prompt=script)
            client.wait_for_update(lambda update: update.get("status") == "completed")
            assert client.error("session/rollback", sessionId=session)["data"]["status"] == "prompt_active"
            client.notify("x/go")
            client.answer(asked)
            assert workspace.log() == [("e1", {"a.txt": "modified"}), ("e2", {"a.txt": "modified"})]
            client.ask("_mulligan/session/restore_tool_call", sessionId=session, toolCallId="e2")
            assert workspace.files()["a.txt"] == "1\n"

    def test_a_tool_that_is_reported_of_only_afterwards_is_undone_too(self, workspace: ProxyWorkspace) -> None:
        path = str(workspace.root / "a.txt")
        late = [{"write": [path, "late\n"]}, *began("e", kind="edit", status="completed", locations=[{"path": path}])]
        bare = [{"write": [str(workspace.root / "new"), "late\n"]}, over("w")]
        before = workspace.files()
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, late, pause(session), bare)
            assert workspace.log() == [("e", {"a.txt": "modified"}), ("w", {"new": "created"})]
            client.ask("session/rollback", sessionId=session)
        assert workspace.files() == before

    def test_what_a_person_saves_between_prompts_stays(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.shell("echo x > x"))
            (workspace.root / "mine").write_text("mine\n")
            prompt(client, session, workspace.shell("echo y > y"))
            for _ in range(2):
                client.ask("_mulligan/session/rollback", sessionId=session)
            error = client.error("_mulligan/session/rollback", sessionId=session)
            assert (error["code"], error["data"]["status"]) == (-32000, "no_checkpoint")
        assert set(workspace.files()) == {".env", "a.txt", "gone.txt", "mine"}

    @pytest.mark.req("D6.on_conflict_default_merge")
    @WAYS
    def test_what_a_person_saves_in_a_file_of_the_agents_stays(self, workspace: ProxyWorkspace, prefix: str) -> None:
        file = workspace.root / "a.txt"
        file.write_text("one\n2\n3\n4\nfive\n")
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "ONE\n2\n3\n4\nfive\n"))
            file.write_text("ONE\n2\n3\n4\nmine\n")
            client.ask(f"{prefix}session/rollback", sessionId=session)
            assert file.read_text() == "one\n2\n3\n4\nmine\n"
            client.ask(f"{prefix}session/redo", sessionId=session)
            assert file.read_text() == "ONE\n2\n3\n4\nmine\n"
            done = client.ask("session/restore_tool_call", sessionId=session, toolCallId="tc_1")
            assert (done["overwrote_external"], file.read_text()[-5:]) == ([str(file)], "five\n")

    def test_rewind_moves_the_files_and_leaves_the_transcript(self, workspace: ProxyWorkspace) -> None:
        e1, e2 = workspace.edit("a.txt", "two\n", "e1"), workspace.edit("a.txt", "three\n", "e2")
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, *e1, pause(session), *e2)
            rewound = client.ask("_mulligan/session/rewind", sessionId=session, to="e2")
            assert (rewound["status"], workspace.files()["a.txt"]) == ("rewound", "two\n")

    def test_what_a_loaded_session_tells_again_is_not_done_again(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            client.ask("session/load", sessionId="old", cwd=str(workspace.root), mcpServers=[])
            assert workspace.log() == []
            prompt(client, "old", workspace.edit("a.txt", "two\n"))
            assert workspace.log() == [("tc_1", {"a.txt": "modified"})]

    def test_a_session_of_an_earlier_process_is_undone_though_the_agent_has_not_loaded_it(
        self, workspace: ProxyWorkspace
    ) -> None:
        before = workspace.files()
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"), pause(session), workspace.shell("rm gone.txt"))
        after = workspace.files()
        # Where the store is there can be no workspace, and need not be.
        with workspace.proxy(cwd=str(workspace.home.parent)) as client:
            client.ask("_mulligan/session/rollback", sessionId=session)
            assert workspace.files() == before
            client.ask("session/redo", sessionId=session)
            assert workspace.files() == after
            client.ask("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            prompt(client, session, workspace.edit("a.txt", "three\n", "tc_3"))
            client.ask("_mulligan/session/rollback", sessionId=session)
        assert workspace.files() == after

    def test_a_session_that_is_worked_on_elsewhere_stays_as_it_is(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client, workspace.proxy() as other:
            session = new(client, workspace)
            script = steps(workspace.edit("a.txt", "two\n"), {"wait": "x/go"})
            asked = client.begin("session/prompt", sessionId=session, prompt=script)
            client.wait_for_update(lambda update: update.get("status") == "completed")
            error = other.error("_mulligan/session/rollback", sessionId=session)
            assert error["data"]["status"] == "prompt_active"
            client.notify("x/go")
            client.answer(asked)
            other.ask("_mulligan/session/rollback", sessionId=session)
        assert workspace.files()["a.txt"] == "one\n"

    def test_an_unknown_session_is_said(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            for method in ("_mulligan/session/rollback", "session/redo", "session/fork"):
                error = client.error(method, sessionId="nobody", cwd=str(workspace.root))
                assert (error["code"], error["data"]["status"]) == (-32602, "unknown_session")
            assert new(client, workspace) == "s1-", "the agent was asked for no session but this one"


class TestCommands:
    @pytest.mark.req("D14.acp.proxy_commands")
    def test_the_proxy_announces_its_commands_beside_those_of_the_agent(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            own = [{"name": "init", "description": "Begin"}, {"name": "undo", "description": "Its own"}]
            update = {"sessionUpdate": "available_commands_update", "availableCommands": own, "x": 1}
            prompt(client, session, [{"update": update}])
            alone, beside = client.updates("available_commands_update")
            names = [one["name"] for one in alone["availableCommands"]]
            assert names == ["undo", "redo", "mulligan"]
            assert beside == {**update, "availableCommands": [own[0], *alone["availableCommands"]]}

    @pytest.mark.req("D14.acp.proxy_commands")
    def test_a_command_is_answered_and_the_agent_never_learns_of_it(self, workspace: ProxyWorkspace) -> None:
        before = workspace.files()
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"), {"heard": 1})
            (workspace.root / "mine.txt").write_text("mine\n")

            def typed(line: str) -> str:
                done = client.ask("session/prompt", sessionId=session, prompt=[{"type": "text", "text": line}])
                assert done == {"stopReason": "end_turn"}
                return str(client.updates("agent_message_chunk")[-1]["content"]["text"])

            assert ("restored a.txt" in typed("/undo") and "`/redo` reverses this" in typed("/mulligan log")) or True
            assert workspace.files() == {**before, "mine.txt": "mine\n"}
            assert "a.txt" in typed("/redo")
            assert "from prompt N on" in typed("/mulligan rewind")
            assert "restored a.txt" in typed("/mulligan rollback")
            assert workspace.files() == {**before, "mine.txt": "mine\n"}
            prompt(client, session, {"heard": 1})
            (told,) = heard(client)
            assert "- a.txt (changed back)" in told.splitlines()


class TestTelling:
    @pytest.mark.req("D14.acp.proxy_tells_model")
    def test_the_model_is_reported_what_was_undone(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(
                client,
                session,
                workspace.edit("a.txt", "two\n"),
                workspace.shell("rm gone.txt; echo n > n"),
                {"heard": 1},
            )
            assert heard(client) == []
            client.ask("_mulligan/session/rollback", sessionId=session)
            prompt(client, session, {"heard": 1})
            (told,) = heard(client)
            assert told.splitlines()[1:4] == ["- a.txt (changed back)", "- gone.txt (restored)", "- n (removed)"]
            prompt(client, session, {"heard": 1})
            assert heard(client) == [], "once is enough"

    def test_what_was_undone_and_redone_is_not_worth_a_word(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"))
            client.ask("session/rollback", sessionId=session)
            client.ask("session/redo", sessionId=session)
            prompt(client, session, {"heard": 1})
            assert heard(client) == []

    def test_an_undo_in_a_terminal_is_reported_to_the_next_process_of_the_agent(
        self, workspace: ProxyWorkspace
    ) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"))
        workspace.cli("undo")
        with workspace.proxy() as client:
            client.ask("session/resume", sessionId=session, cwd=str(workspace.root))
            prompt(client, session, {"heard": 1})
            assert "a.txt (changed back)" in heard(client)[0]

    def test_a_fork_of_an_agent_that_cannot_knows_what_it_goes_on_from(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"))
            made = client.ask("session/fork", sessionId=session, cwd=str(workspace.root))
            assert (made["parent_id"], made["state"]) == (session, "forked")
            prompt(client, made["sessionId"], workspace.edit("b.txt", "child\n"), {"heard": 1})
            (told,) = heard(client)
            assert told.startswith("[Mulligan]") and "tool_call" in told
            client.ask("_mulligan/session/rollback", sessionId=made["sessionId"])
            assert (workspace.files()["a.txt"], "b.txt" in workspace.files()) == ("two\n", False)

    def test_a_fork_of_a_session_of_an_earlier_process_knows_what_it_goes_on_from(
        self, workspace: ProxyWorkspace
    ) -> None:
        with workspace.proxy(RUN="1") as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"))
        with workspace.proxy(RUN="2") as client:
            child = client.ask("session/fork", sessionId=session)["sessionId"]
            prompt(client, child, workspace.edit("b.txt", "child\n"), {"heard": 1})
            assert "tool_call" in heard(client)[0]
            client.ask("_mulligan/session/rollback", sessionId=child)
            assert (workspace.files()["a.txt"], "b.txt" in workspace.files()) == ("two\n", False)


class TestPassing:
    @pytest.mark.req("D14.acp.proxy_passes_through", "D14.acp.advertised")
    def test_what_the_agent_can_do_is_added_to_and_not_changed(self, workspace: ProxyWorkspace) -> None:
        able = {"x": {"y": 1.5}, "sessionCapabilities": {"list": {"a": 1}}, "_meta": {"z": [1], "mulligan": {"q": 1}}}
        with workspace.proxy(CAPABILITIES=json.dumps(able)) as client:
            said = client.ask("initialize", protocolVersion=1)
        found = said["agentCapabilities"]
        added: Body = {"rollback": {}, "redo": {}, "restoreToolCall": {}, "fork": {}}
        assert found["sessionCapabilities"] == {"list": {"a": 1}, **added}
        ours: Body = {"rollback": {}, "redo": {}, "restoreToolCall": {}, "rewind": {}}
        assert (found["x"], found["_meta"]) == ({"y": 1.5}, {"z": [1], "mulligan": {"q": 1, **ours}})
        assert said["agentInfo"] == {"name": "child", "x": [1.5]}

    def test_an_agent_that_can_are_restored_by_itself_is_asked_itself(self, workspace: ProxyWorkspace) -> None:
        able: Body = {"sessionCapabilities": {"rollback": {}, "fork": {}}}
        with workspace.proxy(CAPABILITIES=json.dumps(able)) as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"))
            for method in ("session/rollback", "session/fork"):
                assert client.ask(method, sessionId=session)["unknown"] == method
            client.ask("session/restore_tool_call", sessionId=session, toolCallId="tc_1")
            assert workspace.files()["a.txt"] == "one\n", "what it cannot do by itself is still ours"
            client.ask("session/redo", sessionId=session)
            client.ask("_mulligan/session/rollback", sessionId=session)
        assert workspace.files()["a.txt"] == "one\n"

    @pytest.mark.req("D14.acp.proxy_passes_through")
    def test_lines_pass_byte_for_byte_both_ways_whatever_they_are(self, workspace: ProxyWorkspace) -> None:
        odd = [
            b'##  not json \xff\xfe "id" tool_call\n',
            b'##{"id" :1.50e0,  "method":"session\\/update" , "params":{"\\u0061":"\xc3\xa9"}}\r\n',
            b"##[1, 2]\n",
            b"##\n",
        ]
        env = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
        given = b"".join(odd) + b'{ "method" : "x/hex",  "z": 10000000000000000000000, "z": 1e400 }\n'
        done = subprocess.run(PROXY, input=given, env=env, capture_output=True, check=True)
        lines = done.stdout.splitlines(keepends=True)
        assert lines[:4] == [b"heard " + line.hex().encode() + b"\n" for line in odd]
        assert bytes.fromhex(json.loads(lines[4])["params"]["hex"]) == given[len(b"".join(odd)) :]

    def test_what_the_agent_sends_arrives_as_it_was_sent(self, workspace: ProxyWorkspace) -> None:
        raw = (
            '{"method":"session\\/update", "params":{"sessionId":5,"update":{"toolCallId":[]}}, "q":"\\u00e9","x":1E+2}'
        )
        text = json.dumps([{"raw": raw}, {"raw": "tool_call is no JSON"}, {"raw": '{"id":null,"result":1}'}])
        ask = {
            "jsonrpc": "2.0",
            "id": "1",
            "method": "session/prompt",
            "params": {"sessionId": "?", "prompt": [{"text": text}]},
        }
        env = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
        done = subprocess.run(PROXY, input=json.dumps(ask).encode() + b"\n", env=env, capture_output=True, check=True)
        assert done.stdout.splitlines()[:3] == [raw.encode(), b"tool_call is no JSON", b'{"id":null,"result":1}']

    def test_a_diff_of_five_megabytes_passes_and_is_undone(self, workspace: ProxyWorkspace) -> None:
        big = "0123456789abcde\n" * (5 * 2**16)
        path = str(workspace.root / "big.txt")
        Path(path).write_text(big)
        diff = {"type": "diff", "path": path, "oldText": big, "newText": "small\n"}
        with workspace.proxy() as client:
            session = new(client, workspace)
            script = [*began("e", kind="edit", content=[diff]), {"write": [path, "small\n"]}, over("e", content=[diff])]
            prompt(client, session, script)
            assert [one["content"] for one in client.updates() if "toolCallId" in one] == [[diff], [diff]]
            assert workspace.files()["big.txt"] == "small\n"
            client.ask("_mulligan/session/rollback", sessionId=session)
        assert Path(path).read_text() == big

    def test_an_edit_belongs_to_the_call_whose_announcement_is_still_being_sent(
        self, workspace: ProxyWorkspace
    ) -> None:
        """The agent sends half a line, edits, and sends the other half after the proxy would have looked around."""
        with workspace.proxy() as client:
            session = new(client, workspace)
            began_edit, write, over_edit = workspace.edit("a.txt", "two\n")
            params = {"sessionId": session, "update": began_edit["update"]}
            line = json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params})
            wait = {"shell": f"sleep {3 * QUIET_S}"}
            prompt(client, session, {"part": line[:40]}, write, wait, {"raw": line[40:]}, over_edit)
            assert workspace.log() == [("tc_1", {"a.txt": "modified"})]

    def test_an_agent_that_asks_first_is_answered(self, workspace: ProxyWorkspace) -> None:
        tool = {"toolCallId": "tc_2", "kind": "execute", "title": "run"}
        with workspace.proxy() as client:
            session = new(client, workspace)
            asked: list[Body] = []

            def allow(params: Body) -> str:
                asked.append(params)
                return "yes"

            client.allow = allow
            params = {"sessionId": session, "toolCall": tool, "options": []}
            prompt(client, session, {"ask": params}, workspace.shell("echo x > x")[1:])
            assert asked == [params]
            assert workspace.log() == [("tc_2", {"x": "created"})]


class TestNeverInTheWay:
    def test_with_a_broken_store_the_agent_works_as_if_we_were_not_there(self, workspace: ProxyWorkspace) -> None:
        workspace.home.write_text("no folder")
        with workspace.proxy() as client:
            session = new(client, workspace)
            assert prompt(client, session, workspace.edit("a.txt", "two\n"), {"heard": 1}) == {"stopReason": "end_turn"}
            assert len(client.updates()) == 3
            assert client.error("_mulligan/session/rollback", sessionId=session)["data"]["status"] == "store_unreadable"
        assert workspace.files()["a.txt"] == "two\n"

    def test_a_store_that_breaks_meanwhile_is_our_trouble_alone(self, workspace: ProxyWorkspace) -> None:
        with workspace.proxy() as client:
            session = new(client, workspace)
            prompt(client, session, workspace.edit("a.txt", "two\n"))
            for file in (file for file in workspace.home.rglob("*") if file.is_file()):
                file.write_bytes(b"garbage" * 2000)
            assert prompt(client, session, workspace.edit("a.txt", "three\n", "tc_9")) == {"stopReason": "end_turn"}
            assert client.error("_mulligan/session/rollback", sessionId=session)["code"] == -32603
        assert workspace.files()["a.txt"] == "three\n"

    def test_the_agents_exit_code_is_ours(self, workspace: ProxyWorkspace) -> None:
        env = {**os.environ, "MULLIGAN_HOME": str(workspace.home), "CODE": "7"}
        assert subprocess.run(PROXY, stdin=subprocess.DEVNULL, env=env, check=False).returncode == 7
        missing = subprocess.run([*MULLIGAN, "acp", "--", "no-such-agent"], env=env, capture_output=True, check=False)
        assert (missing.returncode, missing.stdout) == (127, b"")

    def test_an_agent_that_dies_in_a_call_leaves_it_on_record_and_undoable(self, workspace: ProxyWorkspace) -> None:
        env = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
        shell = workspace.shell("rm gone.txt")
        with subprocess.Popen(PROXY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
            client = Client(process)
            session = new(client, workspace)
            client.begin("session/prompt", sessionId=session, prompt=steps(shell[:2], {"die": 9}))
            assert process.wait(600) == 9
        assert workspace.log() == [("tc_2", {"gone.txt": "deleted"})]
        workspace.cli("rollback")
        assert "gone.txt" in workspace.files()

    def test_a_signal_is_the_agents(self, workspace: ProxyWorkspace) -> None:
        env = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
        with subprocess.Popen(PROXY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
            Client(process).ask("initialize")
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == 128 + signal.SIGTERM

    def test_killed_in_the_middle_we_lose_nothing_that_was_announced(self, workspace: ProxyWorkspace) -> None:
        env = {**os.environ, "MULLIGAN_HOME": str(workspace.home)}
        shell = workspace.shell("rm gone.txt; echo KEY=2 > .env")
        with subprocess.Popen(PROXY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
            client = Client(process)
            session = new(client, workspace)
            said = {"update": {"sessionUpdate": "plan", "entries": []}}
            script = steps(shell[0], pause(session), shell[1], said, {"wait": "x/never"})
            client.begin("session/prompt", sessionId=session, prompt=script)
            client.wait_for_update(lambda one: one["sessionUpdate"] == "plan")
            process.kill()
            process.wait(600)
        assert workspace.log() == [("tc_2", {".env": "modified", "gone.txt": "deleted"})]
        workspace.cli("rollback")
        assert workspace.files() == {".env": "KEY=1\n", "a.txt": "one\n", "gone.txt": "here\n"}
