"""The coding tools as a model meets them: what it is told, what it can do with that, a whole flow in a repository."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import Bounds, PromptEvaluationError, ProviderToolCall, ToolContext, ToolRunner, agent_loop, coding_tools
from mulligan.agents.coding_tools import PROFILES
from mulligan.agents.providers import Ask, Line, Mock
from mulligan.api import Mulligan
from mulligan.effects.registry import effect_named
from mulligan.effects.session import DurableSession
from mulligan.history.retention import collect_garbage
from mulligan.session.state.slices import ToolResult
from mulligan.session.tables import session_journal
from mulligan.store.journal import records_of
from mulligan.testing import contents_of
from mulligan.values.canonical import decode
from mulligan.values.clock import SystemClock
from mulligan.values.digest import parse_digest
from mulligan.values.errors import MulliganError

FILE_TOOLS = ("read_file", "write_file", "edit_file", "apply_patch", "grep", "glob")
SUBAGENT_TOOLS = ("spawn_agent", "send_input", "wait", "close_agent")
ADD = "*** Begin Patch\n*** Add File: p.txt\n+x\n*** End Patch"
UNIFIED = "--- /dev/null\n+++ b/u.txt\n@@ -0,0 +1 @@\n+x\n"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


def run(session: DurableSession, name: str, profile: str = "anthropic", **params: Any) -> ToolResult[Any]:
    tools = {tool.name: tool for tool in coding_tools(session, profile)}
    return ToolRunner(session.execution_state(), tools).execute(ProviderToolCall(f"call_{name}", name, params))


class TestStoppedCommand:
    """It tells of itself through a pipe, would write outside the workspace in the end, and leaves nothing."""

    @pytest.fixture
    def command(self, tmp_path: Path) -> str:
        os.mkfifo(tmp_path / "begun")
        return f"echo half > half.txt; echo > {tmp_path}/begun; sleep 25; echo late > {tmp_path}/late"

    @staticmethod
    def gone(tmp_path: Path) -> bool:
        return contents_of(tmp_path / "work") == {} and not (tmp_path / "late").exists()

    @pytest.mark.req("D12.async_handlers")
    def test_by_cancelling_the_task_leaves_no_trace(self, opened: Mulligan, tmp_path: Path, command: str) -> None:
        session = opened.session("s")
        tools = {tool.name: tool for tool in coding_tools(session)}
        runner = ToolRunner(session.execution_state(), tools)

        async def work() -> None:
            task = asyncio.create_task(runner.aexecute(ProviderToolCall("1", "shell", {"command": command})))
            await asyncio.to_thread((tmp_path / "begun").read_bytes)
            task.cancel()
            await task

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(work())
        assert self.gone(tmp_path)

    @pytest.mark.req("D12.deadline_raises")
    def test_by_the_deadline_leaves_no_trace(self, opened: Mulligan, tmp_path: Path) -> None:
        command = f"echo half > half.txt; sleep 25; echo late > {tmp_path}/late"
        bounds = Bounds(deadline=SystemClock().now() + timedelta(seconds=1))
        script: list[Line] = [{"tool": "shell", "args": {"command": command}}, "done"]
        with pytest.raises(PromptEvaluationError):
            agent_loop("go", session=opened.session("s"), provider=Mock(script), bounds=bounds)
        assert self.gone(tmp_path)

    def test_by_cancelling_the_run_leaves_no_trace(self, opened: Mulligan, tmp_path: Path, command: str) -> None:
        bounds = Bounds()

        def cancel() -> None:
            (tmp_path / "begun").read_bytes()
            bounds.cancelled.set()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        script: list[Line] = [{"tool": "shell", "args": {"command": command}}, "done"]
        result = agent_loop("go", session=opened.session("s"), provider=Mock(script), bounds=bounds)
        canceller.join()
        assert result.stop_reason == "cancelled" and self.gone(tmp_path)


class TestToolTable:
    @pytest.mark.req("S1.tools.map_to_effects")
    @pytest.mark.parametrize("name", FILE_TOOLS)
    def test_a_file_tool_is_the_effect_of_the_same_name(self, name: str) -> None:
        assert effect_named(name) is effect_named(f"host.fs.{name}")
        assert effect_named(name).name == f"host.fs.{name}"

    @pytest.mark.req("S1.tools.shell_is_exec")
    def test_shell_is_exec_of_sh(self, opened: Mulligan, tmp_path: Path) -> None:
        with opened.session("s").call("both") as call:
            shown = call.perform("shell", command="echo out; echo err >&2; exit 3").to_dict()
            ran = call.exec(["sh", "-c", "echo out; echo err >&2; exit 3"]).to_dict()
        timed = {"started_at_ns", "ended_at_ns"}
        assert {key: shown[key] for key in shown.keys() - timed} == {key: ran[key] for key in ran.keys() - timed}
        forbidden = {"allowed_fs_ops": ["read"]}
        with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "other"), capability=forbidden) as bounded:
            codes = [bounded.session("s").perform(name, params)[0].error_code for name, params in SAME_COMMAND]
        assert codes == ["fs_op_not_allowed", "fs_op_not_allowed"]

    @pytest.mark.req("S1.tools.no_subagent_effects")
    def test_an_agent_can_start_others_and_no_effect_is_needed_for_it(self, opened: Mulligan, tmp_path: Path) -> None:
        session = opened.session("lead")

        def spawn_agent(task: str, context: ToolContext) -> str:
            """Let another agent do it."""
            write = {"tool": "write_file", "args": {"path": f"{task}.txt", "content": task}}
            return agent_loop(task, session=opened.session(f"helper-{task}"), provider=[write, f"{task} done"]).text

        asked = {"tools": [{"tool": "spawn_agent", "args": {"task": task}} for task in ("a", "b")]}
        agent_loop("do both", session=session, provider=[asked, "all done"], tools=[spawn_agent])
        told = [message["content"] for message in session.messages() if message["role"] == "tool"]
        assert (told, contents_of(tmp_path / "work")) == (["a done", "b done"], {"a.txt": b"a", "b.txt": b"b"})
        for name in SUBAGENT_TOOLS:
            with pytest.raises(MulliganError) as caught:
                effect_named(name)
            assert caught.value.code == "unknown_effect"


SAME_COMMAND: list[tuple[str, dict[str, Any]]] = [
    ("shell", {"command": "true"}),
    ("host.exec", {"argv": ["sh", "-c", "true"]}),
]


class TestToolResults:
    @pytest.mark.req("S1.edit_file.summary_as_success_text")
    def test_an_edit_returns_its_summary(self, opened: Mulligan, tmp_path: Path) -> None:
        (tmp_path / "work" / "a.txt").write_text("one one\n")
        given: dict[str, Any] = {"path": "a.txt", "old_string": "one", "new_string": "two", "replace_all": True}
        assert run(opened.session("s"), "edit_file", **given).message == "Updated a.txt (2 replacements)"

    @pytest.mark.req("S1.apply_patch.summary_as_success_text")
    def test_a_patch_returns_its_summary(self, opened: Mulligan) -> None:
        told = run(opened.session("s"), "apply_patch", "openai", patch=ADD).message
        assert told == "Applied patch: 1 file changed (add=1 update=0 delete=0 move=0)"

    def test_a_failure_returns_its_receipt(self, opened: Mulligan) -> None:
        failed = run(opened.session("s"), "edit_file", path="a.txt", old_string="x", new_string="y")
        assert not failed.success
        assert decode(failed.message)["error_code"] == "path_not_found"

    def test_text_is_returned_as_text_and_an_empty_result_as_a_sentence(self, opened: Mulligan, tmp_path: Path) -> None:
        (tmp_path / "work" / "a.txt").write_text('say "hi"\n')
        (tmp_path / "work" / "empty.txt").write_text("")
        session = opened.session("s")
        assert run(session, "read_file", path="a.txt").message == 'say "hi"\n'
        assert run(session, "grep", pattern="hi").message == 'a.txt:1:say "hi"'
        assert run(session, "grep", pattern="nobody").message == "No matches found"
        assert run(session, "glob", pattern="*.rs").message == "No files matched"
        assert run(session, "read_file", path="empty.txt").message == ""

    def test_truncated_output_says_so(self, opened: Mulligan, tmp_path: Path) -> None:
        (tmp_path / "work" / "a.txt").write_text("one\ntwo\nthree\n")
        told = decode(run(opened.session("s"), "read_file", path="a.txt", max_lines=2).message)
        assert (told["content"], told["truncated"]) == ("one\ntwo\n", True)

    def test_a_command_returns_its_output_as_text(self, opened: Mulligan) -> None:
        told = decode(run(opened.session("s"), "shell", command="echo out; echo err >&2; exit 3").message)
        assert (told["exit_code"], told["stdout"], told["stderr"]) == (3, "out\n", "err\n")

    @pytest.mark.req("AR.patch_described_truly")
    def test_the_patch_tool_names_the_formats_it_takes(self, opened: Mulligan) -> None:
        session = opened.session("s")
        (tool,) = [tool for tool in coding_tools(session, "openai") if tool.name == "apply_patch"]
        assert "'*** Begin Patch' format" in tool.description and "patch_format unified" in tool.description
        assert tool.parameters["properties"]["patch_format"]["enum"] == ["v4a", "unified"]
        assert run(session, "apply_patch", "openai", patch=ADD).success
        assert run(session, "apply_patch", "openai", patch=UNIFIED, patch_format="unified").success
        refused = run(session, "apply_patch", "openai", patch=UNIFIED)
        assert decode(refused.message)["status"] == "parse_error"

    @pytest.mark.req("AR.model_pages_blobs")
    @pytest.mark.parametrize("profile", PROFILES)
    def test_a_model_can_page_an_output_that_did_not_fit(self, opened: Mulligan, profile: str) -> None:
        whole = "".join(f"{number}\n" for number in range(1, 9001))
        read: list[str] = []

        def page(ask: Ask) -> Line:
            told = str(ask.messages[-1]["content"])
            if not read:
                shown = decode(told)["stdout"]
                assert (shown["size_bytes"], shown["read_on_with"]) == (len(whole), "read_blob")
                assert whole.startswith(shown["preview"])
                read.append(shown["blob_ref"])
            else:
                body = decode(told) if told.startswith("{") else {"content": told}
                read.append(body["content"])
            have = sum(len(part) for part in read[1:])
            given = {"blob_ref": read[0], "offset_bytes": have, "max_bytes": 10_000}
            return "read it all" if have == len(whole) else {"tool": "read_blob", "args": given}

        script: list[Line] = [{"tool": "shell", "args": {"command": "seq 1 9000"}}, *[page] * 9]
        done = agent_loop("count", session="s", provider=Mock(script, profile=profile))
        assert (done.text, "".join(read[1:])) == ("read it all", whole)


def refs_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["blob_ref"]} if isinstance(value.get("blob_ref"), str) else set()
        return own.union(*(refs_in(one) for one in value.values()))
    return set().union(*(refs_in(one) for one in value)) if isinstance(value, list) else set()


@pytest.mark.req("S1.verify.refs_reachable")
def test_every_blob_a_receipt_names_is_reachable_from_the_journal(opened: Mulligan, tmp_path: Path) -> None:
    (tmp_path / "work" / "big.txt").write_text("line of text\n" * 9000)
    for number in range(2000):
        (tmp_path / "work" / f"file-with-a-long-name-{number}").touch()
    session = opened.session("s")
    named: set[str] = set()
    with session.call("look") as call:
        for receipt in (
            call.read_file("big.txt"),
            call.grep("line", max_results=9000),
            call.glob("*", max_results=5000),
            call.list_dir(".", max_results=5000),
            call.exec(["sh", "-c", "cat big.txt; cat big.txt >&2"]),
        ):
            assert receipt.ok and refs_in(receipt.to_dict())
            named |= refs_in(receipt.to_dict())
    (tmp_path / "work" / "big.txt").unlink()
    with opened.store.read() as tx:
        records = list(records_of(tx, session_journal(session.id)))
    assert named <= {str(ref) for record in records for ref in record.refs}
    collect_garbage(opened.open_root.ledger)
    for ref in named:
        assert opened.open_root.ledger.blobs.read(parse_digest(ref))


BUG = "def total(numbers):\n    result = 0\n    for number in numbers:\n        result = number\n    return result\n"
TEST = "from shop.cart import total\n\nassert total([1, 2, 3]) == 6\nprint('green')\n"
FIXES: dict[str, Line] = {
    "apply_patch": {
        "tool": "apply_patch",
        "args": {
            "patch": "*** Begin Patch\n*** Update File: shop/cart.py\n@@ def total(numbers):\n"
            "     for number in numbers:\n-        result = number\n+        result += number\n*** End Patch"
        },
    },
    "edit_file": {
        "tool": "edit_file",
        "args": {"path": "shop/cart.py", "old_string": "result = number", "new_string": "result += number"},
    },
}


def git(work: Path, *words: str) -> str:
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
    command = ["git", *who, *words]
    return subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, check=True).stdout


def repository(work: Path) -> None:
    (work / "shop").mkdir()
    (work / "tests").mkdir()
    (work / "shop" / "__init__.py").touch()
    (work / "shop" / "cart.py").write_text(BUG)
    (work / "tests" / "check.py").write_text(TEST)
    (work / ".gitignore").write_text("__pycache__/\n")
    git(work, "init", "-q")
    git(work, "add", ".")
    git(work, "commit", "-qm", "a shop")


@pytest.mark.req("S1.done.end_to_end_on_real_repo")
@pytest.mark.parametrize("profile", PROFILES)
def test_an_agent_fixes_a_bug_in_a_real_repository(opened: Mulligan, tmp_path: Path, profile: str) -> None:
    """It looks, finds, runs, edits, runs again and writes; and all of it can be taken back."""
    work = tmp_path / "work"
    repository(work)
    before = contents_of(work)
    check = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=. {sys.executable} tests/check.py"
    script: list[Line] = [
        {"tools": [{"tool": "list_dir", "args": {}}, {"tool": "glob", "args": {"pattern": "**/*.py"}}]},
        {"tool": "shell", "args": {"command": check}},
        {"tool": "grep", "args": {"pattern": "def total", "glob_filter": "*.py"}},
        {"tool": "read_file", "args": {"path": "shop/cart.py"}},
        FIXES["apply_patch" if profile == "openai" else "edit_file"],
        {"tool": "shell", "args": {"command": check}},
        {"tool": "write_file", "args": {"path": "CHANGES.md", "content": "total() adds up.\n"}},
        {"tool": "shell", "args": {"command": "git status --porcelain"}},
        "Fixed: total() kept only the last number.",
    ]
    session = opened.session("fix")
    done = agent_loop("The cart's total is wrong.", session=session, provider=Mock(script, profile=profile))
    assert (done.stop_reason, done.tool_calls) == ("done", 9)
    told = [str(message["content"]) for message in session.messages() if message["role"] == "tool"]
    ran = [decode(one)["exit_code"] for one in (told[2], told[6])]
    assert (ran, told[3]) == ([1, 0], "shop/cart.py:1:def total(numbers):")
    assert decode(told[8])["stdout"] == " M shop/cart.py\n?? CHANGES.md\n"
    assert git(work, "diff", "--stat").splitlines()[0].strip().startswith("shop/cart.py")
    assert session.rollback().ok
    after = contents_of(work)
    assert {path: after[path] for path in after if not path.startswith(".git/")} == {
        path: before[path] for path in before if not path.startswith(".git/")
    }
    assert git(work, "status", "--porcelain") == ""
    assert session.messages() == []
