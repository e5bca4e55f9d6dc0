"""`mulligan acp` as a client sees it: sessions, prompts, permissions, and S0's three ways back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.servers.acp.client import Body, Client, connected

AGENT = [sys.executable, str(Path(__file__).with_name("scripted_agent.py"))]
PROMPT = [{"type": "text", "text": "do it"}]


def wrote(path: str, content: str, id: str = "tc_1") -> dict[str, Any]:
    return {"tools": [{"tool": "write_file", "args": {"path": path, "content": content}, "id": id}]}


def edited(path: str, old: str, new: str, id: str = "tc_1") -> dict[str, Any]:
    return {"tools": [{"tool": "edit_file", "args": {"path": path, "old_string": old, "new_string": new}, "id": id}]}


class AgentWorkspace:
    def __init__(self, base: Path) -> None:
        self.root, self.home, self.script = base / "work", base / "home", base / "script"
        self.root.mkdir()

    def agent(self, *lines: object, mode: str = "auto", cwd: str | None = None) -> AbstractContextManager[Client]:
        self.script.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        return connected(self.home, command=[*AGENT, "--mode", mode], cwd=cwd, SCRIPT=str(self.script))

    def files(self) -> dict[str, str]:
        return {file.name: file.read_text() for file in sorted(self.root.iterdir())}


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[AgentWorkspace]:
    yield AgentWorkspace(Path(os.path.realpath(tmp_path)))


def new(client: Client, workspace: AgentWorkspace) -> str:
    found: str = client.ask("session/new", cwd=str(workspace.root), mcpServers=[])["sessionId"]
    return found


@pytest.mark.req(
    "S0.acp.capabilities_in_initialize",
    "S0.acp_capability.close",
    "S0.acp_capability.list",
    "S0.acp_capability.resume",
    "S0.acp_capability.rollback",
    "S0.acp_capability.redo",
    "S0.acp_capability.restore_tool_call",
    "S0.acp.capability_values_are_objects",
    "D14.acp.advertised",
)
def test_what_it_can_do_is_said_at_the_beginning(workspace: AgentWorkspace) -> None:
    with workspace.agent() as client:
        said = client.ask("initialize", protocolVersion=1, clientCapabilities={})
        able = said["agentCapabilities"]
        six = ("close", "list", "resume", "rollback", "redo", "restoreToolCall")
        assert {name: able["sessionCapabilities"].get(name) for name in six} == {name: {} for name in six}
        ours = ("rollback", "redo", "restoreToolCall", "rewind")
        assert able["_meta"]["mulligan"] == {name: {} for name in ours}
        assert (said["protocolVersion"], able["loadSession"]) == (1, True)


@pytest.mark.req("D14.acp.own_agent", "D14.acp.session_new")
def test_a_prompt_is_worked_on_and_shown_while_it_is(workspace: AgentWorkspace) -> None:
    with workspace.agent(wrote("a.txt", "one\n"), "All done.") as client:
        session = new(client, workspace)
        assert client.ask("session/prompt", sessionId=session, prompt=PROMPT) == {"stopReason": "end_turn"}
        (begun,) = client.updates("tool_call")
        assert (begun["toolCallId"], begun["kind"], begun["status"]) == ("tc_1", "edit", "in_progress")
        assert begun["locations"] == [{"path": str(workspace.root / "a.txt")}]
        (ended,) = client.updates("tool_call_update")
        diff = {"type": "diff", "path": str(workspace.root / "a.txt"), "oldText": None, "newText": "one\n"}
        assert (ended["status"], ended["content"][0]) == ("completed", diff)
        assert [one["content"]["text"] for one in client.updates("agent_message_chunk")] == ["All done."]
    assert workspace.files() == {"a.txt": "one\n"}


class TestGoingBack:
    @pytest.mark.req(
        "S0.acp.restore_method",
        "S0.acp.restore_goes_through_restore",
        "S0.acp.restore_update_frame",
        "S0.acp.restore_update_status",
        "S0.acp.restore_update_kind",
        "S0.acp.restore_update_paths",
        "D14.acp.s0_frames",
    )
    def test_a_tool_call_is_restored_with_the_documents_own_frames(self, workspace: AgentWorkspace) -> None:
        (workspace.root / "a.txt").write_text("before\n")
        with workspace.agent(wrote("a.txt", "after\n", "tc_42"), "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            answer = client.ask("session/restore_tool_call", sessionId=session, toolCallId="tc_42")
            path = str(workspace.root / "a.txt")
            assert answer == {"toolCallId": "tc_42", "restoredPaths": [path], "skippedPathsWithReasons": []}
            update = client.wait_for_update(lambda one: one.get("status") == "restored")
            assert update == {
                "sessionUpdate": "tool_call_update",
                "toolCallId": "tc_42",
                "status": "restored",
                "_meta": {"harn": {"kind": "tool_call_restored", "restoredPaths": [path]}},
            }
            assert "restoredPaths" in client.frames[-2]["result"], "the answer comes first"
        assert workspace.files() == {"a.txt": "before\n"}

    @pytest.mark.req("S0.acp.rollback_method", "S0.acp.redo_method", "S0.acp.rollback_uses_preimages")
    @pytest.mark.parametrize("prefix", ["", "_mulligan/"])
    def test_a_turn_is_undone_and_redone_with_its_transcript(self, workspace: AgentWorkspace, prefix: str) -> None:
        lines = [wrote("a.txt", "one\n"), "done", wrote("a.txt", "two\n"), wrote("b.txt", "x\n"), "done"]
        with workspace.agent(*lines) as client:
            session = new(client, workspace)
            for _ in range(2):
                client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            back = client.ask(f"{prefix}session/rollback", sessionId=session)
            assert (back["status"], back["beforeMessageCount"], back["afterMessageCount"]) == ("rolled_back", 10, 4)
            assert sorted(back["fsRestores"][0]["restoredPaths"]) == [
                str(workspace.root / n) for n in ("a.txt", "b.txt")
            ]
            assert workspace.files() == {"a.txt": "one\n"}
            assert client.ask(f"{prefix}session/redo", sessionId=session)["status"] == "redone"
            assert workspace.files() == {"a.txt": "two\n", "b.txt": "x\n"}
            for _ in range(2):
                client.ask(f"{prefix}session/rollback", sessionId=session)
            error = client.error(f"{prefix}session/rollback", sessionId=session)
            assert (error["code"], error["message"], error["data"]["status"]) == (
                -32000,
                "no_checkpoint",
                "no_checkpoint",
            )
        assert workspace.files() == {}

    @pytest.mark.req("D6.on_conflict_default_merge", "D14.acp.s0_frames")
    @pytest.mark.parametrize("prefix", ["", "_mulligan/"])
    def test_what_a_person_wrote_meanwhile_goes_neither_back_nor_forward(
        self, workspace: AgentWorkspace, prefix: str
    ) -> None:
        file = workspace.root / "a.txt"
        file.write_text("one\n2\n3\n4\nfive\n")
        with workspace.agent(edited("a.txt", "one", "ONE"), "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            file.write_text("ONE\n2\n3\n4\nmine\n")
            back = client.ask(f"{prefix}session/rollback", sessionId=session)
            assert (file.read_text(), back["fsRestores"][0]["skippedPathsWithReasons"]) == ("one\n2\n3\n4\nmine\n", [])
            client.ask(f"{prefix}session/redo", sessionId=session)
            assert file.read_text() == "ONE\n2\n3\n4\nmine\n"
            file.write_text("MINE\n2\n3\n4\nmine\n")
            kept = client.ask(f"{prefix}session/rollback", sessionId=session)
            skipped = [{"path": str(file), "reason": "same_lines"}]
            assert (kept["fsRestores"][0]["skippedPathsWithReasons"], file.read_text()[:5]) == (skipped, "MINE\n")
            told = client.updates()[-1]["_meta"]["mulligan" if prefix else "harn"]
            assert (told["restoredPaths"], told["skippedPathsWithReasons"]) == ([], skipped)
            forced = client.ask(f"{prefix}session/rollback", sessionId=session, onConflict="overwrite")
            assert (forced["overwrote_external"], file.read_text()[:4]) == ([str(file)], "one\n")
            assert client.updates()[-1]["_meta"]["mulligan" if prefix else "harn"]["overwrote_external"] == [str(file)]

    @pytest.mark.req("D6.overwrote_external", "D6.overwritten_is_rescued", "D14.acp.s0_frames")
    def test_the_documents_own_restore_says_whose_work_it_replaced(self, workspace: AgentWorkspace) -> None:
        file = workspace.root / "a.txt"
        with workspace.agent(wrote("a.txt", "after\n"), "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            file.write_text("mine\n")
            done = client.ask("session/restore_tool_call", sessionId=session, toolCallId="tc_1")
            assert (done["restoredPaths"], done["overwrote_external"], workspace.files()) == (
                [str(file)],
                [str(file)],
                {},
            )
            told = client.wait_for_update(lambda one: one.get("status") == "restored")["_meta"]["harn"]
            assert told["overwrote_external"] == [str(file)]
            client.ask("session/redo", sessionId=session)
        assert workspace.files() == {"a.txt": "mine\n"}

    @pytest.mark.parametrize("prefix", ["", "_mulligan/"])
    def test_a_restore_takes_the_paths_that_it_gives(self, workspace: AgentWorkspace, prefix: str) -> None:
        (workspace.root.parent / "link").symlink_to(workspace.root)
        a, b = str(workspace.root / "a.txt"), str(workspace.root / "b.txt")
        shell = {"tool": "shell", "args": {"command": "echo 1 > a.txt; echo 1 > b.txt"}, "id": "tc_1"}
        with workspace.agent({"tools": [shell]}, "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)

            def restored(*paths: str) -> Body:
                return client.ask(
                    f"{prefix}session/restore_tool_call", sessionId=session, toolCallId="tc_1", paths=list(paths)
                )

            outside = [{"path": "/nowhere/a.txt", "reason": "not_captured"}]
            assert restored("/nowhere/a.txt")["skippedPathsWithReasons"] == outside
            assert sorted(workspace.files()) == ["a.txt", "b.txt"]
            for given in (b, "b.txt", str(workspace.root.parent / "link/b.txt")):
                assert (restored(given)["restoredPaths"], list(workspace.files())) == ([b], ["a.txt"])
                client.ask(f"{prefix}session/redo", sessionId=session)
            assert (restored()["restoredPaths"], workspace.files()) == ([a, b], {})
            odd: list[Any] = ["b.txt", [1], {}, ["\0"]]
            for bad in odd:
                wanted = {"sessionId": session, "toolCallId": "tc_1", "paths": bad}
                error = client.error(f"{prefix}session/restore_tool_call", **wanted)
                assert (error["code"], error["data"]["status"]) == (-32602, "invalid_params")

    @pytest.mark.parametrize("prefix", ["", "_mulligan/"])
    def test_a_turn_has_one_checkpoint_however_often_it_is_undone_and_redone(
        self, workspace: AgentWorkspace, prefix: str
    ) -> None:
        lines = [wrote("a.txt", "1\n"), wrote("b.txt", "1\n", "tc_2"), wrote("a.txt", "2\n", "tc_3"), "done", "said"]
        with workspace.agent(*lines) as client:
            session = new(client, workspace)
            for _ in range(2):
                client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            said = [client.ask(f"{prefix}session/{way}", sessionId=session) for way in ("rollback", "redo", "rollback")]
            assert said[0]["checkpointId"] == said[1]["checkpointId"], "a turn that was only talk"
            assert [one["fsSnapshotIds"] for one in said] == [[], [], []]
            moves = [
                client.ask(f"{prefix}session/{way}", sessionId=session) for way in ("rollback", "redo", "rollback")
            ]
            (point,) = {one["checkpointId"] for one in moves}
            assert point != said[0]["checkpointId"]
            for one in moves:
                assert one["fsSnapshotIds"] == ["tc_1", "tc_2", "tc_3"]
                assert one["redoFsSnapshotIds"] == [f"{point}:redo:tc_{number}" for number in (1, 2, 3)]
                restores = {each["snapshotId"]: each["restoredPaths"] for each in one["fsRestores"]}
                a, b = (str(workspace.root / name) for name in ("a.txt", "b.txt"))
                assert restores == {"tc_1": [a], "tc_2": [b], "tc_3": []}

    def test_a_restored_call_takes_nothing_else_of_later_ones_with_it(self, workspace: AgentWorkspace) -> None:
        shell = {"tool": "shell", "args": {"command": "echo 2 > a.txt; echo 2 > b.txt"}, "id": "tc_2"}
        with workspace.agent(wrote("a.txt", "1\n"), {"tools": [shell]}, "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            answer = client.ask("session/restore_tool_call", sessionId=session, toolCallId="tc_1")
            assert answer["restoredPaths"] == [str(workspace.root / "a.txt")]
            assert answer["skippedPathsWithReasons"] == []
        assert workspace.files() == {"b.txt": "2\n"}

    @pytest.mark.req("D14.acp.strict_frames", "D14.acp.rewind", "D14.acp.on_conflict")
    def test_strict_clients_get_only_words_they_know(self, workspace: AgentWorkspace) -> None:
        (workspace.root / "a.txt").write_text("before\n")
        with workspace.agent(wrote("a.txt", "after\n"), "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            (workspace.root / "a.txt").write_text("mine\n")
            refused = client.ask(
                "_mulligan/session/restore_tool_call", sessionId=session, toolCallId="tc_1", onConflict="merge"
            )
            assert refused["skippedPathsWithReasons"][0]["reason"] == "same_lines"
            client.ask(
                "_mulligan/session/restore_tool_call", sessionId=session, toolCallId="tc_1", onConflict="overwrite"
            )
            assert workspace.files() == {"a.txt": "before\n"}
            inside = client.error("_mulligan/session/rewind", sessionId=session, to="tc_1")
            assert inside["data"]["status"] == "not_continuable"
            rewound = client.ask("_mulligan/session/rewind", sessionId=session, to="tc_1", talk=False)
            assert rewound["status"] == "rewound"
            kinds = {one["sessionUpdate"] for one in client.updates()}
            assert kinds <= {"tool_call", "tool_call_update", "agent_message_chunk", "session_info_update"}
            assert {one["status"] for one in client.updates("tool_call_update")} <= {"completed", "failed"}
            bad = client.error("_mulligan/session/rollback", sessionId=session, onConflict="guess")
            assert bad["code"] == -32602
            bad = client.error("_mulligan/session/rewind", sessionId=session, to="tc_1", side="middle")
            assert (bad["code"], bad["data"]["status"]) == (-32602, "invalid_params")

    def test_unknown_sessions_and_methods_are_distinguished(self, workspace: AgentWorkspace) -> None:
        with workspace.agent() as client:
            new(client, workspace)
            assert client.error("session/rollback", sessionId="none")["data"]["status"] == "unknown_session"
            assert client.error("session/rollback")["data"]["status"] == "invalid_params"
            assert client.error("session/nonsense")["code"] == -32601
            assert client.error("_mulligan/session/nonsense")["code"] == -32601
            assert client.error("session/close", sessionId="none")["code"] == -32004


class TestSessions:
    @pytest.mark.req("D14.acp.session_list", "D14.acp.session_resume", "D14.acp.session_load")
    def test_a_later_process_goes_on_where_the_first_stopped(self, workspace: AgentWorkspace) -> None:
        with workspace.agent(wrote("a.txt", "one\n"), "Remember the plum.") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
        with workspace.agent("I do.") as client:
            (listed,) = client.ask("session/list", cwd=str(workspace.root))["sessions"]
            assert (listed["sessionId"], listed["cwd"], listed["title"]) == (session, str(workspace.root), "do it")
            client.ask("session/resume", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            assert client.updates() == []
            client.ask("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            kinds = [one["sessionUpdate"] for one in client.updates()]
            assert kinds == ["user_message_chunk", "tool_call", "tool_call_update", "agent_message_chunk"]
            assert client.ask("session/rollback", sessionId=session)["status"] == "rolled_back"
        assert workspace.files() == {}

    def test_a_session_is_undone_in_its_own_folder_wherever_the_process_is(self, workspace: AgentWorkspace) -> None:
        with workspace.agent(wrote("a.txt", "one\n"), "done") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
        (elsewhere := workspace.root.parent / "elsewhere").mkdir()
        (elsewhere / "a.txt").write_text("another\n")
        with workspace.agent() as client:
            client.ask("session/new", cwd=str(elsewhere), mcpServers=[])
            back = client.ask("session/rollback", sessionId=session)
            assert back["fsRestores"][0]["restoredPaths"] == [str(workspace.root / "a.txt")]
        assert (workspace.files(), (elsewhere / "a.txt").read_text()) == ({}, "another\n")

    def test_around_the_store_there_is_no_workspace_and_sessions_are_found_all_the_same(
        self, workspace: AgentWorkspace
    ) -> None:
        around = str(workspace.home.parent)
        with workspace.agent(wrote("a.txt", "1\n"), "done", cwd=around) as client:
            assert client.ask("session/list")["sessions"] == []
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
        with workspace.agent("again", cwd=around) as client:
            assert [one["sessionId"] for one in client.ask("session/list")["sessions"]] == [session]
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
        for way in ("rollback", "rollback"):
            with workspace.agent(cwd=around) as client:
                client.ask(f"session/{way}", sessionId=session)
        assert workspace.files() == {}
        with workspace.agent(cwd=around) as client:
            assert client.ask("session/close", sessionId=session) == {}
            assert client.ask("session/delete", sessionId=session) == {}
            assert client.ask("session/list")["sessions"] == []

    @pytest.mark.req("D14.acp.close_keeps_delete_removes")
    def test_a_closed_session_stays_listed_and_loadable_and_a_deleted_one_does_not(
        self, workspace: AgentWorkspace
    ) -> None:
        def listed(client: Client) -> list[str]:
            return [one["sessionId"] for one in client.ask("session/list", cwd=str(workspace.root))["sessions"]]

        with workspace.agent("one", "two") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            assert client.ask("session/close", sessionId=session) == {}
            assert listed(client) == [session]
            client.ask("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            client.ask("session/close", sessionId=session)
        with workspace.agent() as client:
            assert listed(client) == [session]
            for _ in range(2):
                assert client.ask("session/delete", sessionId=session) == {}
                assert listed(client) == []
            assert client.ask("session/delete", sessionId="none") == {}
            error = client.error("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            assert error["data"]["status"] == "unknown_session"

    @pytest.mark.req("D14.acp.no_general_32000")
    def test_a_general_error_is_not_the_code_that_asks_to_authenticate(self, workspace: AgentWorkspace) -> None:
        with workspace.agent("one") as client:
            session = new(client, workspace)
            taken = client.error("session/fork", sessionId=session, id=session)
            assert (taken["code"], taken["data"]["status"]) == (-32602, "session_exists")
            for method, params in (
                ("rewind", {"to": "none"}),
                ("restore_tool_call", {"toolCallId": "none"}),
                ("rewind", {"to": -7}),
            ):
                error = client.error(f"_mulligan/session/{method}", sessionId=session, **params)
                assert (error["code"], bool(error["data"]["status"])) == (-32602, True)

    @pytest.mark.req("D11.close_semantics", "D14.acp.session_delete")
    def test_what_was_deleted_stays_deleted(self, workspace: AgentWorkspace) -> None:
        with workspace.agent("one") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            client.ask("session/delete", sessionId=session)
        with workspace.agent("two") as client:
            for method in ("session/load", "session/resume"):
                error = client.error(method, sessionId=session, cwd=str(workspace.root), mcpServers=[])
                assert (error["code"], error["data"]["status"]) == (-32004, "unknown_session")
            assert client.error("session/prompt", sessionId=session, prompt=PROMPT)["code"] == -32602
            assert client.updates() == []

    @pytest.mark.req("D14.acp.session_fork", "D14.acp.session_close", "D14.acp.session_delete")
    @pytest.mark.req("D14.acp.own_agent", "D14.acp.session_load")
    def test_a_plan_is_shown_as_one_and_is_undone_with_its_turn(self, workspace: AgentWorkspace) -> None:
        steps = [{"title": "look", "status": "done"}, {"title": "write", "status": "in_progress"}, {"title": "test"}]
        plan = {"tools": [{"tool": "update_plan", "args": {"steps": steps}, "id": "tc_p"}]}
        entries = [
            {"content": "look", "priority": "medium", "status": "completed"},
            {"content": "write", "priority": "medium", "status": "in_progress"},
            {"content": "test", "priority": "medium", "status": "pending"},
        ]
        with workspace.agent(plan, wrote("a.txt", "one\n"), "Done.", mode="ask") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            assert client.updates("plan") == [{"sessionUpdate": "plan", "entries": entries}]
            assert [one["toolCallId"] for one in client.updates("tool_call")] == ["tc_1"]
        with workspace.agent() as client:
            client.ask("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            shown = client.updates()
            assert [one for one in shown if one.get("toolCallId") == "tc_p"] == []
            assert shown[-1] == {"sessionUpdate": "plan", "entries": entries}
            client.ask("session/rollback", sessionId=session)
        with workspace.agent() as client:
            client.ask("session/load", sessionId=session, cwd=str(workspace.root), mcpServers=[])
            assert client.updates("plan") == []

    def test_sessions_fork_close_and_are_deleted(self, workspace: AgentWorkspace) -> None:
        with workspace.agent("one", "two") as client:
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            child = client.ask("session/fork", sessionId=session, cwd=str(workspace.root))["sessionId"]
            assert child != session
            assert client.ask("session/close", sessionId=child) == {}
            assert client.error("session/prompt", sessionId=child, prompt=PROMPT)["code"] == -32602
            assert client.ask("session/delete", sessionId=session) == {}
            listed = client.ask("session/list", cwd=str(workspace.root))["sessions"]
            assert [one["sessionId"] for one in listed] == [child]
            assert client.ask("session/delete", sessionId=child) == {}
            assert client.ask("session/list", cwd=str(workspace.root))["sessions"] == []


class TestPermission:
    def test_asking_first_does_nothing_that_was_not_allowed(self, workspace: AgentWorkspace) -> None:
        lines = [wrote("a.txt", "1"), wrote("b.txt", "2"), wrote("c.txt", "3"), "done"]
        with workspace.agent(*lines, mode="ask") as client:
            answers = iter(["reject_once", "allow_always"])
            client.allow = lambda asked: next(answers)
            session = new(client, workspace)
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
        assert workspace.files() == {"b.txt": "2", "c.txt": "3"}

    def test_a_mode_that_is_read_only_has_no_tool_that_changes(self, workspace: AgentWorkspace) -> None:
        with workspace.agent(wrote("a.txt", "1"), "done") as client:
            session = new(client, workspace)
            client.ask("session/set_mode", sessionId=session, modeId="read")
            assert client.error("session/set_mode", sessionId=session, modeId="fly")["code"] == -32602
            client.ask("session/prompt", sessionId=session, prompt=PROMPT)
            asked = [frame for frame in client.frames if frame.get("method") == "session/request_permission"]
            assert asked == [], "nobody is asked about what cannot be done"
        assert workspace.files() == {}

    def test_a_cancel_ends_a_running_command_and_puts_its_files_back(self, workspace: AgentWorkspace) -> None:
        shell = {"tools": [{"tool": "shell", "args": {"command": "echo x > a; sleep 1000"}, "id": "tc_1"}]}
        with workspace.agent(shell, "never") as client:
            session = new(client, workspace)
            asked = client.begin("session/prompt", sessionId=session, prompt=PROMPT)
            client.wait_for_update(lambda one: one["sessionUpdate"] == "tool_call")
            while not (workspace.root / "a").exists():
                os.sched_yield()
            busy = client.error("session/rollback", sessionId=session)
            assert busy["data"]["status"] == "prompt_active"
            client.notify("session/cancel", sessionId=session)
            assert client.answer(asked)["result"] == {"stopReason": "cancelled"}
        assert workspace.files() == {}
