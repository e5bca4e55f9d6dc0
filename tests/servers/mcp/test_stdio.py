"""The lean loop on stdio, spoken to as hosts do and as nobody should."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import mulligan
from mulligan.agents.coding_tools import PROFILES, tools
from mulligan.cli import run
from mulligan.effects.registry import EFFECTS
from mulligan.servers.mcp.dispatch import Toolbox
from mulligan.servers.mcp.protocol import FILE, TOOLSETS, RequestCancelledError, Running, read_table
from mulligan.servers.mcp.protocol import Peer as Revision
from mulligan.servers.mcp.table import whole
from mulligan.values.canonical import encode
from tests.servers.mcp.server_process import MODERN, SERVER, Body, Peer, environment, on_stdio


def status(root: Path, home: Path) -> list[Body]:
    """What the history of the root says, newest first."""
    from mulligan.history.log import log_view

    with mulligan.open(str(root), store=str(home)) as opened:
        return log_view(opened.open_root)


class TestRevisions:
    @pytest.mark.req(
        "D14.mcp.revision_2025_11_25",
        "D14.mcp.revision_2025_06_18",
        "D14.mcp.revision_2025_03_26",
        "D1.hosts_reach_mcp",
    )
    @pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18", "2025-11-25"])
    def test_a_handshake_gives_the_revision_asked_for(self, root: Path, tmp_path: Path, revision: str) -> None:
        with on_stdio(root, tmp_path / "home") as peer:
            assert peer.greet(revision)["protocolVersion"] == revision
            tools = peer.result("tools/list")["tools"]
            assert ("outputSchema" in tools[0]) == (revision != "2025-03-26")
            result = peer.call("snapshot_file", path="README.md")
            assert ("structuredContent" in result) == (revision != "2025-03-26")
            assert json.loads(result["content"][0]["text"])["content"] == "# Toy Repo"

    def test_an_unknown_revision_gets_the_newest_handshake(self, root: Path, tmp_path: Path) -> None:
        with on_stdio(root, tmp_path / "home") as peer:
            assert peer.greet("1999-01-01")["protocolVersion"] == "2025-11-25"

    @pytest.mark.req("D14.mcp.revision_2026_07_28")
    def test_the_newest_revision_needs_no_handshake(self, root: Path, tmp_path: Path) -> None:
        with on_stdio(root, tmp_path / "home") as peer:
            found = peer.result("server/discover", {"_meta": MODERN})
            assert found["supportedVersions"] == ["2026-07-28"]
            assert found["resultType"] == "complete"
            assert found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "mulligan"
            tools = peer.result("tools/list", {"_meta": MODERN})
            assert (tools["resultType"], tools["cacheScope"]) == ("complete", "public")
            assert tools["ttlMs"] > 0
            result = peer.call("snapshot_file", meta=MODERN, path="README.md")
            assert result["resultType"] == "complete"
            assert result["structuredContent"]["content"] == "# Toy Repo"

    def test_an_envelope_of_an_unknown_revision_is_reported_which_there_are(self, root: Path, tmp_path: Path) -> None:
        with on_stdio(root, tmp_path / "home") as peer:
            meta = {**MODERN, "io.modelcontextprotocol/protocolVersion": "2099-01-01"}
            error = peer.request("tools/list", {"_meta": meta})["error"]
            assert (error["code"], error["data"]) == (-32022, {"supported": ["2026-07-28"], "requested": "2099-01-01"})
            half = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
            assert peer.request("tools/list", {"_meta": half})["error"]["code"] == -32602
            assert peer.request("ping", {"_meta": MODERN})["error"]["code"] == -32601

    def test_methods_of_things_we_do_not_have_are_not_found(self, peer: Peer) -> None:
        for method in ("resources/list", "resources/read", "logging/setLevel", "nonsense", "server/discover"):
            assert peer.request(method)["error"]["code"] == -32601
        assert peer.result("ping") == {}


class TestTable:
    @pytest.mark.req("D14.mcp.names_without_dots", "D14.mcp.schemas_and_annotations")
    def test_every_tool_is_listed_in_words_every_host_takes(self, peer: Peer) -> None:
        found = peer.result("tools/list")["tools"]
        assert len({tool["name"] for tool in found}) == len(found)
        for tool in found:
            assert tool["name"].replace("_", "").isalnum()
            assert len(tool["name"]) <= 40
            assert "." in tool["title"]
            assert tool["inputSchema"]["type"] == tool["outputSchema"]["type"] == "object"
            assert set(tool["annotations"]) == {"readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"}

    @pytest.mark.req("D14.mcp.session_id_param")
    def test_every_tool_takes_a_session(self, peer: Peer) -> None:
        assert all("session_id" in tool["inputSchema"]["properties"] for tool in peer.result("tools/list")["tools"])

    @pytest.mark.req("D14.mcp.tool_sets")
    @pytest.mark.parametrize("sets", [*TOOLSETS, "history,substrate"])
    def test_sets_can_be_chosen(self, root: Path, tmp_path: Path, sets: str) -> None:
        with on_stdio(root, tmp_path / "home", "--tools", sets) as peer:
            peer.greet()
            listed = {tool["name"] for tool in peer.result("tools/list")["tools"]}
        assert listed == {tool["name"] for one in sets.split(",") for tool in read_table().tools[one]}

    @pytest.mark.req("D9.profiles")
    @pytest.mark.parametrize("profile", PROFILES)
    def test_coding_tools_can_be_those_of_a_providers_profile(self, root: Path, tmp_path: Path, profile: str) -> None:
        with on_stdio(root, tmp_path / "home", "--profile", profile) as peer:
            peer.greet()
            listed = {tool["name"]: tool["inputSchema"] for tool in peer.result("tools/list")["tools"]}
            unlisted = "edit_file" if profile == "openai" else "apply_patch"
            refused = peer.request("tools/call", {"name": unlisted, "arguments": {}})
        assert {"snapshot_create", "history_undo"} <= listed.keys()
        assert unlisted not in listed and refused["error"]["code"] == -32602
        for spec in tools(profile):
            own = spec.for_gemini()["parameters"] if profile == "gemini" else spec.parameters
            properties = {key: one for key, one in listed[spec.name]["properties"].items() if key != "session_id"}
            assert {**listed[spec.name], "properties": properties} == own
        effects = {effect.tool for effect in EFFECTS}
        assert listed.keys() & effects == {spec.name for spec in tools(profile)}

    @pytest.mark.parametrize("words", [("nobody",), ("openai", "--tools", "history"), ("openai", "--tools", "none")])
    def test_a_profile_that_makes_no_sense_is_bad_usage(
        self, root: Path, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        command = [*SERVER, "--root", str(root), "--profile", *words]
        done = subprocess.run(command, capture_output=True, env=environment(tmp_path / "home"), check=False)
        assert (done.returncode, done.stdout) == (2, b"")

    def test_the_file_beside_the_program_is_what_the_tools_say(self) -> None:
        assert Path(FILE).read_bytes() == encode(whole()) + b"\n", "run python -m mulligan.servers.mcp.table"

    @pytest.mark.req("D14.mcp.dotted_accepted")
    def test_a_tool_answers_to_its_dotted_name(self, peer: Peer) -> None:
        for name in ("snapshot.file", "snapshot_file", "host.fs.read_file"):
            assert peer.call(name, path="README.md")["isError"] is False

    @pytest.mark.req("D14.mcp.lean_stdio")
    def test_listing_loads_neither_the_sdk_nor_anything_heavy(self) -> None:
        script = (
            "import io, sys\n"
            "from mulligan.servers.mcp.stdio import StdioServer\n"
            'frames = b\'{"jsonrpc":"2.0","id":1,"method":"tools/list"}\\n\'\n'
            "out = io.BytesIO()\n"
            "server = StdioServer(lambda: None, ('coding',), (io.BytesIO(frames), out))\n"
            "server._start_workers = lambda: None\n"
            "server.serve()\n"
            "assert b'read_file' in out.getvalue()\n"
            "print(*sys.modules)\n"
        )
        loaded = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
        heavy = {
            "mcp",
            "pydantic",
            "click",
            "orjson",
            "apsw",
            "asyncio",
            "anyio",
            "mulligan.effects",
            "mulligan.history",
        }
        assert heavy & set(loaded) == set()


class TestCalls:
    @pytest.mark.req("D14.mcp.complete_twice", "C15.typed_mcp_errors")
    def test_a_result_is_complete_as_structure_and_as_text(self, peer: Peer) -> None:
        result = peer.call("snapshot_list", depth=3)
        assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
        assert [block["type"] for block in result["content"]] == ["text"]

    @pytest.mark.req("D14.mcp.failure_is_error", "D10.rejects_shape")
    def test_what_did_not_work_is_an_error_result(self, peer: Peer) -> None:
        missing = peer.call("snapshot_file", path="nope")
        assert (missing["isError"], missing["structuredContent"]["error"]["code"]) == (True, "NOT_FOUND")
        receipt = peer.call("read_file", path="nope")
        assert (receipt["isError"], receipt["structuredContent"]["status"]) == (True, "not_found")
        patch = "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-other\n+x\n"
        rejected = peer.call("workspace_apply_patch", patch=patch)
        assert (rejected["isError"], rejected["structuredContent"]["applied"]) == (True, [])
        nothing = peer.call("history_undo")
        assert (nothing["isError"], nothing["structuredContent"]["error"]["code"]) == (True, "nothing_to_undo")

    @pytest.mark.req(
        "D14.mcp.history_log",
        "D14.mcp.history_show",
        "D14.mcp.history_diff",
        "D14.mcp.history_undo",
        "D14.mcp.history_redo",
        "D14.mcp.history_restore",
        "D14.mcp.history_rollback",
        "D14.mcp.history_rewind",
        "D14.mcp.history_fork",
    )
    def test_history_is_undone_and_redone(self, peer: Peer, root: Path) -> None:
        readme = root / "README.md"
        written = peer.call("workspace_write_file", path="README.md", content="one\n")
        call = written["_meta"]["mulligan/callId"]
        assert peer.call("history_log", limit=1)["structuredContent"]["calls"][0]["id"] == call
        assert peer.call("history_show", call=call)["structuredContent"]["tool"] == "workspace_write_file"
        assert "+one" in peer.call("history_diff", call=call)["structuredContent"]["diff"]
        for verb, arguments, expected in [
            ("undo", {}, "# Toy Repo"),
            ("redo", {}, "one\n"),
            ("restore", {"call": call}, "# Toy Repo"),
            ("redo", {}, "one\n"),
            ("rollback", {}, "# Toy Repo"),
            ("redo", {}, "one\n"),
            ("rewind", {"to": call}, "# Toy Repo"),
        ]:
            result = peer.call(f"history_{verb}", **arguments)
            assert result["isError"] is False, result
            assert readme.read_text() == expected
        assert peer.call("history_fork")["structuredContent"]["parent_id"].startswith("mcp:tests:")

    @pytest.mark.req("D14.mcp.label_from_meta")
    def test_the_label_and_turn_come_from_the_host(self, peer: Peer, root: Path, tmp_path: Path) -> None:
        peer.call("write_file", meta={"claudecode/toolUseId": "toolu_1"}, path="a", content="1")
        codex = {"callId": "call_2", "x-codex-turn-metadata": {"turn_id": "turn-7"}}
        peer.call("write_file", meta=codex, path="b", content="2")
        peer.leave()
        newest, before = status(root, tmp_path / "home")[:2]
        assert (newest["label"], newest["turn_id"]) == ("call_2", "turn-7")
        assert before["label"] == "toolu_1"

    @pytest.mark.req("D14.mcp.session_id_param")
    def test_sessions_are_by_client_unless_named(self, peer: Peer) -> None:
        peer.call("write_file", path="a", content="1")
        peer.call("write_file", path="a", content="2", session_id="other")
        calls = peer.call("history_log")["structuredContent"]["calls"]
        assert calls[0]["session_id"] == "other"
        assert calls[1]["session_id"].startswith("mcp:tests:")
        assert peer.call("write_file", path="x", content="1", session_id="other")["isError"] is False

    @pytest.mark.req("D14.mcp.session_id_param")
    def test_the_log_of_a_named_session_is_of_that_session(self, peer: Peer) -> None:
        for session in ("one", "other"):
            peer.call("write_file", path=session, content="1", session_id=session)
        one: Body = {"session_id": "one"}
        named: tuple[Body, ...] = (one, {"session_id": "nobody"}, {**one, "everyone": True}, {})
        logs = [peer.call("history_log", **arguments)["structuredContent"]["calls"] for arguments in named]
        everyone = ["other", "one"]
        assert [[call["session_id"] for call in calls] for calls in logs] == [["one"], [], everyone, everyone]

    @pytest.mark.req("D14.mcp.session_id_param")
    def test_anybodys_call_can_be_read_and_only_ones_own_is_undone(self, peer: Peer, root: Path) -> None:
        made = peer.call("write_file", path="a", content="1", session_id="other")["_meta"]["mulligan/callId"]
        assert "+1" in peer.call("history_diff", call=made)["structuredContent"]["diff"]
        assert peer.call("history_show", call=made)["structuredContent"]["session_id"] == "other"
        for tool, named in (("undo", "call"), ("restore", "call"), ("rewind", "to"), ("fork", "at")):
            refused = peer.call(f"history_{tool}", **{named: made})["structuredContent"]
            assert refused["error"]["code"] == "unknown_call"
        assert (root / "a").read_text() == "1"
        assert peer.call("history_undo", call=made, session_id="other")["isError"] is False

    @pytest.mark.req("D14.mcp.history_fork")
    @pytest.mark.parametrize("files", ["share", "copy"])
    def test_a_fork_begins_at_the_point_it_is_asked_for(self, root: Path, tmp_path: Path, files: str) -> None:
        home = tmp_path / "home"
        with mulligan.open(str(root), store=str(home)) as opened:
            session = opened.session("talk")
            for word in ("one", "two", "three"):
                session.inject({"role": "user", "content": word})
            said = session.message_ids()
        with on_stdio(root, home) as peer:
            ask = partial(peer.call, "history_fork", session_id="talk", files=files)
            assert ask(at="no-such-point")["structuredContent"]["error"]["code"] == "unknown_call"
            child = ask(at=said[0])["structuredContent"]["session_id"]
        with mulligan.open(str(root), store=str(home)) as opened:
            assert [message["content"] for message in opened.sessions.get(child).messages()] == ["one"]

    @pytest.mark.parametrize("options", [["--capability", '{"allowed_fs_ops": ["read"]}'], ["--session", "ro"]])
    def test_no_session_a_client_names_is_wider_than_the_server(
        self, root: Path, tmp_path: Path, options: list[str]
    ) -> None:
        home = tmp_path / "home"
        with mulligan.open(str(root), store=str(home)) as opened:
            limits = {"session_id": "ro", "capability": {"allowed_fs_ops": ["read"]}}
            opened.session().perform("host.session.open", limits)
            made = opened.session("other").perform("write_file", {"path": "README.md", "content": "1"})[1]
        with on_stdio(root, home, *options) as peer:
            child = peer.call("history_fork")["structuredContent"]["session_id"]
            for session in ({}, {"session_id": "fresh"}, {"session_id": "other"}, {"session_id": child}):
                wrote = peer.call("write_file", path="a", content="1", **session)["structuredContent"]
                assert wrote["error_code"] == "fs_op_not_allowed"
                wrote = peer.call("workspace_write_file", path="a", content="1", **session)["structuredContent"]
                assert wrote["error"]["details"] == {"reason": "fs_op_not_allowed"}
                undone = peer.call("history_undo", call=made, **session)["structuredContent"]
                is_own = session == {"session_id": "other"}
                assert undone["error"]["code"] == ("fs_op_not_allowed" if is_own else "unknown_call")
                assert peer.call("read_file", path="README.md", **session)["isError"] is False
        assert (sorted(path.name for path in root.iterdir()), (root / "README.md").read_text()) == (
            [".git", "README.md", "src"],
            "1",
        )

    def test_the_end_of_its_session_is_the_end_of_all_a_server_may_do(self, root: Path, tmp_path: Path) -> None:
        home = tmp_path / "home"
        with mulligan.open(str(root), store=str(home)) as opened:
            opened.session().perform("host.session.open", {"session_id": "over"})
            opened.session().perform("host.session.signal", {"session_id": "over"})
        with on_stdio(root, home, "--session", "over") as peer:
            sessions: tuple[Body, ...] = ({}, {"session_id": "fresh"})
            for session in sessions:
                found = [peer.call(tool, **session) for tool in ("list_dir", "snapshot_list", "history_log")]
                receipt, failure, fault = (one["structuredContent"] for one in found)
                assert receipt["error_code"] == fault["error"]["code"] == "session_closed"
                assert failure["error"]["details"] == {"reason": "session_closed"}

    def test_a_boundary_that_makes_no_sense_is_refused_before_anything_is_served(
        self, root: Path, tmp_path: Path
    ) -> None:
        for option in (["--capability", '{"nonsense": 1}'], ["--policy", "[3]"], ["--policy", str(tmp_path / "no")]):
            asked = [*SERVER, "--root", str(root), *option]
            done = subprocess.run(
                asked, input=b"", capture_output=True, env=environment(tmp_path / "home"), check=False
            )
            assert (done.returncode, done.stdout) == (2, b"")

    def test_a_root_that_was_made_again_is_the_new_one(self, peer: Peer, root: Path, tmp_path: Path) -> None:
        lease = peer.call("snapshot_list")["structuredContent"]["lease_id"]
        root.rename(tmp_path / "old")
        gone = [peer.call(tool)["structuredContent"] for tool in ("snapshot_list", "shell", "history_log")]
        assert gone[0]["error"]["details"] == {"reason": "unknown_root"}
        assert (gone[1]["error_code"], gone[2]["error"]["code"]) == ("unknown_root", "unknown_root")
        root.mkdir()
        (root / "fresh").write_text("1")
        assert [one["path"] for one in peer.call("snapshot_list")["structuredContent"]["entries"]] == ["fresh"]
        assert peer.call("snapshot_list", lease_id=lease)["isError"] is True
        for tool in ("write_file", "workspace_write_file"):
            assert peer.call(tool, path=tool, content="1")["isError"] is False
        assert sorted(path.name for path in root.iterdir()) == ["fresh", "workspace_write_file", "write_file"]
        assert peer.call("shell", command="rm fresh")["isError"] is False
        assert peer.call("history_undo")["isError"] is False
        assert (root / "fresh").read_text() == "1"
        assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [".git", "README.md", "src"]

    def test_a_shell_command_is_undone_as_a_whole(self, peer: Peer, root: Path) -> None:
        result = peer.call("shell", command="rm -r src; echo new > made; echo done")
        assert result["structuredContent"]["stdout"]["inline_text"]["text"] == "done\n"
        assert peer.call("history_undo")["isError"] is False
        assert (root / "src/main.rs").exists()
        assert not (root / "made").exists()


def test_a_locale_that_is_not_utf8_changes_no_answer(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "ünï.txt").write_text("1")

    def answers(home: Path) -> list[Body]:
        with on_stdio(root, home) as peer:
            asked = (peer.call("snapshot_create", paths=["."]), peer.call("read_file", path="ünï.txt"))
            return [one["structuredContent"] for one in asked]

    plain = answers(tmp_path / "home")
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    assert answers(tmp_path / "home2") == plain


class TestCancelAndProgress:
    @pytest.mark.req("D14.mcp.cancel_open", "D14.mcp.progress")
    def test_cancelling_an_open_call_puts_everything_back(self, peer: Peer, root: Path, tmp_path: Path) -> None:
        # Without the environment that it was given: nothing of it says whose it is.
        command = "echo half > half; echo begun; exec env -i sleep 600"
        params = {"name": "shell", "arguments": {"command": command}, "_meta": {"progressToken": "p"}}
        identifier = peer.ask("tools/call", params)
        begun = peer.read()
        assert begun["method"] == "notifications/progress"
        assert (begun["params"]["progressToken"], begun["params"]["message"]) == ("p", "begun")
        peer.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": identifier}})
        assert peer.leave() == 0
        assert not (root / "half").exists()
        assert [call["status"] for call in status(root, tmp_path / "home")] == ["aborted"]

    @pytest.mark.req("D14.mcp.cancel_committed")
    def test_a_cancel_after_the_commit_changes_nothing(self, peer: Peer, root: Path, tmp_path: Path) -> None:
        identifier = peer.ask("tools/call", {"name": "write_file", "arguments": {"path": "a", "content": "kept"}})
        assert "result" in peer.answer(identifier)
        peer.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": identifier}})
        peer.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "never was"}})
        peer.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ["x"]}})
        assert peer.result("ping") == {}
        assert (root / "a").read_text() == "kept"
        peer.leave()
        assert [call["status"] for call in status(root, tmp_path / "home")] == ["committed"]

    @pytest.mark.req("D14.mcp.cancel_open", "D14.mcp.cancel_committed")
    def test_an_undo_operation_that_was_cancelled_in_time_goes_nowhere_and_one_that_was_not_is_answered(
        self, root: Path, tmp_path: Path
    ) -> None:
        """Spoken to below the wire: no client can tell when a way back begins."""
        with mulligan.open(str(root), store=str(tmp_path / "home")) as opened:
            toolbox = Toolbox(opened.open_root, opened.boundary)
            ask = partial(toolbox.call, meta={}, peer=Revision("2025-11-25"))
            ask("write_file", {"path": "README.md", "content": "1"}, running=Running())
            early, late = Running(), Running()
            early.cancel()
            with pytest.raises(RequestCancelledError):
                ask("history_undo", {}, running=early)
            assert (root / "README.md").read_text() == "1"
            assert ask("history_undo", {}, running=late)["isError"] is False
            assert late.cancel() is False
            toolbox.close()


class TestBadClients:
    @pytest.mark.parametrize(
        ("line", "code"),
        [
            (b"{", -32700),
            (b"\xff\xfe\x00", -32700),
            (b"[" * 100_000, -32700),
            (b"[]", -32600),
            (b"1", -32600),
            (b"{}", -32600),
            (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
            (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
            (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
            (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
            (b'{"jsonrpc":"2.0","id":1,"method":7}', -32600),
            (b'{"jsonrpc":"2.0","id":7}', -32600),
            (b'{"jsonrpc":"2.0"}', -32600),
        ],
    )
    def test_a_malformed_frame_gets_a_typed_answer_and_the_loop_goes_on(
        self, peer: Peer, line: bytes, code: int
    ) -> None:
        peer.send_bytes(line)
        frame = peer.read()
        assert (frame["id"], frame["error"]["code"]) == (None, code)
        assert peer.result("ping") == {}

    def test_frames_that_ask_nothing_are_passed_over(self, peer: Peer) -> None:
        for frame in (
            {"jsonrpc": "2.0", "id": 99, "result": {}},
            {"jsonrpc": "2.0", "id": 99, "error": {"code": 1, "message": ""}},
            {"jsonrpc": "2.0", "method": "notifications/unknown"},
            {"jsonrpc": "2.0", "method": "notifications/cancelled"},
            {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": []},
        ):
            peer.send(frame)
        peer.send_bytes(b"   ")
        assert peer.result("ping") == {}

    @pytest.mark.parametrize(
        "params",
        [
            {"name": "no_such_tool"},
            {},
            {"name": 7},
            {"name": ["snapshot_file"]},
            {"name": "read_file", "arguments": []},
            {"name": "read_file", "arguments": "text"},
            [],
            "text",
        ],
    )
    def test_what_is_no_tool_call_is_invalid_params(self, peer: Peer, params: object) -> None:
        assert peer.request("tools/call", params)["error"]["code"] == -32602

    def test_wrong_types_of_arguments_are_answers_of_the_tool(self, peer: Peer) -> None:
        assert peer.call("snapshot_file", path=7)["structuredContent"]["error"]["code"] == "INVALID_ARGUMENT"
        assert peer.call("read_file", path=7)["structuredContent"]["error_code"] == "invalid_params"
        assert peer.call("history_log", limit="x")["structuredContent"]["error"]["code"] == "invalid_params"

    @pytest.mark.parametrize("session", [7, "", "\ud800", "x" * 300])
    def test_a_session_that_cannot_be_one_is_an_answer_of_the_tool(self, peer: Peer, session: object) -> None:
        tools = ("snapshot_list", "read_file", "history_log")
        results = [peer.call(tool, path="README.md", session_id=session) for tool in tools]
        assert [result["isError"] for result in results] == [True] * 3
        listed, read, logged = (result["structuredContent"] for result in results)
        codes = (listed["error"]["code"], read["error_code"], logged["error"]["code"])
        assert codes == ("INVALID_ARGUMENT", "invalid_id", "invalid_id")

    def test_a_whole_number_may_be_written_with_a_point(
        self, peer: Peer, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        home = str(tmp_path / "other home")

        def over_mcp(tool: str, given: Body) -> Body:
            return dict(peer.call(tool, **given)["structuredContent"])

        def on_the_command_line(tool: str, given: Body) -> Body:
            run(["call", tool, "--args", json.dumps(given), "--root", str(root), "--store", home])
            return dict(json.loads(capsys.readouterr().out))

        def in_python(tool: str, given: Body) -> Body:
            with mulligan.open(str(root), store=home) as opened:
                return opened.session("a").perform(tool, given)[0].to_dict()

        own = {"lease_id": None, "call_id": None}
        effects = ("read_file", "path", "README.md", "max_lines"), ("glob", "pattern", "**", "max_results")
        others = ("snapshot_list", "path", ".", "depth"), ("history_log", "everyone", False, "limit")
        for ask in (over_mcp, on_the_command_line, in_python):
            for tool, key, value, count in effects if ask is in_python else (*effects, *others):
                plain, pointed, broken = (ask(tool, {key: value, count: number}) for number in (1, 1.0, 1.5))
                assert {**pointed, **own} == {**plain, **own}
                assert [bool(body.keys() & {"error", "error_code"}) for body in (plain, broken)] == [False, True]
        assert peer.call("history_log", limit=0.0)["isError"] is True

    def test_ten_megabytes_of_arguments(self, peer: Peer, root: Path) -> None:
        content = "x" * (10 * 1024 * 1024)
        assert peer.call("workspace_write_file", path="big", content=content)["isError"] is False
        assert (root / "big").stat().st_size == len(content)
        over = peer.call("workspace_write_file", path="big", content=content + "x")
        assert over["structuredContent"]["error"]["code"] == "TOO_LARGE"

    @pytest.mark.parametrize(
        ("tool", "arguments"),
        [
            ("snapshot_file", {"path": "\ud800"}),
            ("snapshot_file", {"path": "README.md", "lease_id": "\ud800"}),
            ("workspace_write_file", {"path": "a", "content": "\ud800"}),
            ("workspace_delete", {"path": "README.md", "lease_id": "\udc80"}),
            ("history_show", {"call": "\ud800"}),
            ("history_undo", {"call": "\udc80"}),
            ("history_rewind", {"to": "\ud800"}),
        ],
    )
    def test_lone_surrogates_are_answered(self, peer: Peer, tool: str, arguments: Body) -> None:
        assert peer.call(tool, **arguments)["isError"] is True

    def test_a_timeout_beyond_all_clocks_is_a_long_time(self, peer: Peer) -> None:
        for timeout_ms in (2**31, 2**70, 10**400):
            assert peer.call("shell", command="echo 1", timeout_ms=timeout_ms)["isError"] is False

    def test_an_id_in_use_is_refused_and_one_that_was_answered_can_be_used_again(self, peer: Peer, root: Path) -> None:
        long = {"name": "shell", "arguments": {"command": "exec sleep 600"}}
        short = {"name": "write_file", "arguments": {"path": "a", "content": "1"}}
        for params in (long, short):
            peer.send({"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": params})
        assert peer.read()["error"]["code"] == -32600
        assert not (root / "a").exists()
        peer.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "same"}})
        for _ in range(20):
            peer.send({"jsonrpc": "2.0", "id": "again", "method": "tools/call", "params": short})
            assert peer.read()["result"]["isError"] is False

    def test_a_client_that_leaves_in_the_middle_loses_nothing(self, peer: Peer, root: Path, tmp_path: Path) -> None:
        for number in range(20):
            peer.ask("tools/call", {"name": "write_file", "arguments": {"path": f"f{number}", "content": "1"}})
        assert peer.process.stdout is not None
        peer.process.stdout.close()
        assert peer.leave() == 0
        assert len([call for call in status(root, tmp_path / "home") if call["status"] == "committed"]) == 20
        assert all((root / f"f{number}").exists() for number in range(20))

    def test_no_traceback_reaches_the_client(self, root: Path, tmp_path: Path) -> None:
        with on_stdio(root, tmp_path / "home") as peer:
            peer.greet()
            root.rename(tmp_path / "elsewhere")
            receipt = peer.call("read_file", path="README.md")
            listed = peer.call("snapshot_list")
            (tmp_path / "elsewhere").rename(root)
            back = peer.call("read_file", path="README.md")
            peer.leave()
            assert peer.process.stderr is not None
            told = peer.process.stderr.read().splitlines()
        assert (receipt["isError"], receipt["structuredContent"]["error_code"]) == (True, "unknown_root")
        assert (listed["isError"], listed["structuredContent"]["error"]["code"]) == (True, "NOT_FOUND")
        assert back["isError"] is False
        assert len(told) == 1

    @pytest.mark.parametrize("more", [(), ("--http", "127.0.0.1:0"), ("--json",)])
    def test_a_root_that_is_not_there_is_refused_at_once(self, tmp_path: Path, more: tuple[str, ...]) -> None:
        command = [*SERVER, "--root", str(tmp_path / "nowhere"), *more]
        done = subprocess.run(command, capture_output=True, env=environment(tmp_path / "home"), check=False)
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
        assert b"unknown_root" in done.stdout if "--json" in more else done.stdout == b""
