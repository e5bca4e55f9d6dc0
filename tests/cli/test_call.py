"""`mulligan call`: every tool and effect by every name, under a capability and a policy, with the right exit code."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mulligan.cli import run
from mulligan.effects.registry import EFFECTS
from mulligan.effects.snapshot_tools.tools import TOOLS
from mulligan.servers.mcp.dispatch import HISTORY

Call = Callable[..., tuple[int, dict[str, Any]]]

PATCH = "*** Begin Patch\n*** Add File: added\n+x\n*** End Patch"
DIFF = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-hello\n+bye\n"

ARGUMENTS: dict[str, dict[str, Any]] = {
    "read_file": {"path": "a.txt"},
    "write_file": {"path": "new", "content": "x"},
    "edit_file": {"path": "a.txt", "old_string": "hello", "new_string": "bye"},
    "apply_patch": {"patch": PATCH},
    "grep": {"pattern": "hel+o"},
    "glob": {"pattern": "**/*.txt"},
    "stat": {"path": "a.txt"},
    "exists": {"path": "a.txt"},
    "list_dir": {"path": "."},
    "delete": {"path": "a.txt"},
    "move": {"path": "a.txt", "to": "b.txt"},
    "mkdir": {"path": "made"},
    "exec": {"argv": ["true"]},
    "shell": {"command": "true"},
    "snapshot.create": {"paths": ["a.txt"]},
    "snapshot.list": {},
    "snapshot.file": {"path": "a.txt"},
    "snapshot.grep": {"pattern": "hello"},
    "snapshot.diff": {},
    "snapshot.export": {"paths": ["a.txt"]},
    "workspace.apply_patch": {"patch": DIFF},
    "workspace.write_file": {"path": "new", "content": "x"},
    "workspace.delete": {"path": "a.txt"},
    "history.log": {},
    "history.undo": {},
    "history.rollback": {},
    "history.fork": {},
}
OPS = ("read", "write", "edit", "patch", "search", "list", "stat", "exec")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.txt").write_text("hello\n")
    return tmp_path / "root"


@pytest.fixture
def call(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """The exit code and the JSON printed."""

    def call(
        tool: str, args: dict[str, Any], session: str | None = None, **files: object
    ) -> tuple[int, dict[str, Any]]:
        words = ["call", tool, "--args", json.dumps(args), "--root", str(root), "--store", str(tmp_path / "store")]
        words += [] if session is None else ["--session", session]
        for option, document in files.items():
            path = tmp_path / f"{option}.json"
            path.write_text(json.dumps(document))
            words += [f"--{option}", str(path)]
        code = run([*words, "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out or printed.err)

    return call


def content(root: Path, name: str) -> str:
    return (root / name).read_text()


@pytest.mark.req("D14.cli.call")
@pytest.mark.parametrize("effect", [one for one in EFFECTS if one.tool in ARGUMENTS], ids=lambda one: str(one.tool))
def test_every_effect_is_called_by_its_name_and_its_tool_name(effect: Any, call: Call, root: Path) -> None:
    code, by_tool = call(effect.tool, ARGUMENTS[effect.tool])
    assert (code, by_tool["status"]) == (0, "ok")
    assert call("history_undo", {})[0] in (0, 1)
    code, by_name = call(effect.name, ARGUMENTS[effect.tool])
    assert (code, by_name["status"]) == (0, "ok")
    assert by_tool.keys() == by_name.keys() >= {"call_id", "status"}
    assert by_tool["call_id"] != by_name["call_id"]


def test_a_background_command_is_refused(call: Call, root: Path) -> None:
    code, body = call("host.exec", {"argv": ["touch", "made"], "background": True})
    assert (code, body["error"]["code"]) == (2, "invalid_params")
    assert os.listdir(root) == ["a.txt"]


def test_every_effect_has_example_arguments_in_this_file() -> None:
    """But for those that need something to have happened before."""
    assert {effect.tool for effect in EFFECTS} - ARGUMENTS.keys() == {"read_blob", "exec_output", "exec_signal"}


@pytest.mark.req("D8.capability_forms")
@pytest.mark.parametrize("effect", [one for one in EFFECTS if one.tool in ARGUMENTS], ids=lambda one: str(one.tool))
def test_a_capability_file_is_applied(effect: Any, call: Call, root: Path) -> None:
    others = [op for op in OPS if op != effect.op]
    for allowed in (others, []):
        code, body = call(effect.tool, ARGUMENTS[effect.tool], capability={"allowed_fs_ops": allowed})
        assert (code, body["status"], body["error_code"]) == (1, "forbidden", "fs_op_not_allowed")
    assert sorted(os.listdir(root)) == ["a.txt"]
    assert content(root, "a.txt") == "hello\n"
    assert call(effect.tool, ARGUMENTS[effect.tool], capability={"allowed_fs_ops": [effect.op]})[0] == 0


CEILINGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("write_file", {"path": "n", "content": "four"}, {"max_write_bytes": 3}, "max_write_bytes_exceeded"),
    ("apply_patch", {"patch": PATCH}, {"max_patch_bytes": 3}, "max_patch_bytes_exceeded"),
    ("apply_patch", {"patch": PATCH}, {"allowed_patch_formats": ["unified"]}, "patch_format_not_allowed"),
    ("apply_patch", {"patch": PATCH}, {"max_changed_files": 0}, "max_changed_files_exceeded"),
    (
        "edit_file",
        {"path": "a.txt", "old_string": "l", "new_string": "L", "replace_all": True},
        {"max_edit_replacements": 1},
        "max_edit_replacements_exceeded",
    ),
    ("read_file", {"path": "a.txt"}, {"fs_roots": ["elsewhere"]}, "path_not_allowed"),
    ("read_file", {"path": "link"}, {"follow_symlinks": "deny"}, "symlink_not_allowed"),
]


@pytest.mark.parametrize(("tool", "args", "capability", "code"), CEILINGS, ids=lambda value: str(value)[:40])
def test_each_exceeded_limit_has_its_error_code(
    tool: str, args: dict[str, Any], capability: dict[str, Any], code: str, call: Call, root: Path
) -> None:
    (root / "link").symlink_to("a.txt")
    exit_code, body = call(tool, args, capability=capability)
    assert (exit_code, body["status"], body["error_code"]) == (1, "forbidden", code)
    assert content(root, "a.txt") == "hello\n"


def test_a_capability_may_be_given_inline(root: Path, tmp_path: Path) -> None:
    words = ["--root", str(root), "--store", str(tmp_path / "store"), "--json"]
    given = ["--args", json.dumps(ARGUMENTS["write_file"]), "--capability", ' {"allowed_fs_ops": ["read"]}']
    assert run(["call", "write_file", *given, *words]) == 1
    assert os.listdir(root) == ["a.txt"]


def test_a_policy_file_narrows_and_its_last_match_wins(call: Call) -> None:
    deny = {"paths": ["*.txt"], "verdict": "deny"}
    code, body = call("read_file", {"path": "a.txt"}, policy=[deny])
    assert (code, body["error_code"]) == (1, "path_not_allowed")
    assert call("read_file", {"path": "a.txt"}, policy=[deny, {"paths": ["a.txt"], "verdict": "allow"}])[0] == 0
    code, body = call("glob", {"pattern": "**"}, policy=[deny])
    assert (code, body["count"]) == (0, 0)
    code, body = call("read_file", {"path": "a.txt"}, policy=[{"verdict": "allow", "output": "blob"}])
    assert (code, body["content"].keys()) == (0, {"blob"})


@pytest.mark.parametrize(
    "files",
    [
        {"capability": {"no_such_field": 1}},
        {"capability": ["not an object"]},
        {"capability": {"max_write_bytes": -1}},
        {"policy": {"not": "a list"}},
        {"policy": [{"verdict": "perhaps"}]},
    ],
    ids=str,
)
def test_an_invalid_boundary_is_bad_usage(files: dict[str, Any], call: Call, root: Path) -> None:
    code, body = call("write_file", ARGUMENTS["write_file"], **files)
    assert (code, body["error"]["code"]) == (2, "invalid_params")
    assert os.listdir(root) == ["a.txt"]


@pytest.mark.parametrize("tool", [one.name for one in TOOLS if one.name in ARGUMENTS])
def test_every_snapshot_tool_is_called_by_both_spellings(tool: str, call: Call, root: Path) -> None:
    for spelling in (tool, tool.replace(".", "_")):
        code, body = call(spelling, ARGUMENTS[tool])
        assert code == 0 and "error" not in body
        if tool.startswith("workspace."):
            assert call("history_undo", {"call": body["call_id"]})[0] == 0
    assert content(root, "a.txt") == "hello\n"


def test_a_snapshot_made_by_one_process_is_read_by_the_next(call: Call, root: Path) -> None:
    made = call("snapshot_create", {"paths": ["a.txt"]})[1]["snapshot_id"]
    (root / "a.txt").write_text("changed\n")
    code, read = call("snapshot_file", {"mode": "snapshot", "snapshot_id": made, "path": "a.txt"})
    assert (code, read["content"]) == (0, "hello\n")
    assert call("snapshot_info", {"snapshot_id": made})[1]["manifest_stats"]["files"] == 1
    changed = call("snapshot_changes", {"snapshot_id": made, "from_snapshot_id": made})[1]
    assert changed["changes"] == []


def test_a_lease_outlives_the_process(call: Call, root: Path) -> None:
    lease = call("snapshot_file", {"path": "a.txt"})[1]["lease_id"]
    assert call("workspace_write_file", {"path": "n", "content": "x", "lease_id": lease})[0] == 0
    (root / "a.txt").write_text("somebody else\n")
    code, body = call("workspace_write_file", {"path": "n", "content": "y", "lease_id": lease})
    assert (code, body["error"]["code"]) == (1, "STALE_LEASE")


def test_snapshot_tools_obey_the_capability(call: Call, root: Path) -> None:
    code, body = call("workspace_write_file", {"path": "n", "content": "x"}, capability={"allowed_fs_ops": ["read"]})
    assert (code, body["error"]["code"]) == (1, "PERMISSION_DENIED")
    assert os.listdir(root) == ["a.txt"]


@pytest.mark.parametrize("tool", sorted(HISTORY))
def test_every_history_tool_is_called(tool: str, call: Call, root: Path) -> None:
    made = call("write_file", {"path": "a.txt", "content": "agent\n"})[1]["call_id"]
    arguments = {
        **{f"history_{verb}": {"call": made} for verb in ("show", "diff", "restore", "undo")},
        "history_rewind": {"to": made},
    }
    if tool == "history_redo":
        call("history_undo", {"call": made})
    code, body = call(tool, arguments.get(tool, {}))
    assert code == 0 and "error" not in body
    went_back = tool in ("history_undo", "history_restore", "history_rollback", "history_rewind")
    assert content(root, "a.txt") == ("hello\n" if went_back else "agent\n")


@pytest.fixture
def past(call: Call, root: Path) -> str:
    """One call that wrote a.txt and the secret; and `ro`, which may only read, and nothing of the secret."""
    made: str = call("shell", {"command": "echo agent > a.txt; echo hidden > secret"})[1]["call_id"]
    deny = {"paths": ["secret"], "verdict": "deny"}
    limits = {"capability": {"allowed_fs_ops": ["read"]}, "policy": [deny]}
    assert call("host.session.open", {"session_id": "ro", **limits})[0] == 0
    return made


class TestHistoryToolsObeyTheBoundary:
    def test_unreadable_paths_are_not_shown(self, past: str, call: Call) -> None:
        _, log = call("history_log", {}, session="ro")
        _, shown = call("history_show", {"call": past}, session="ro")
        for told in (shown, next(one for one in log["calls"] if one["id"] == past)):
            assert [change["path"] for change in told["changes"]] == ["a.txt"]
        diff = call("history_diff", {"call": past}, session="ro")[1]["diff"]
        assert "+agent" in diff and "hidden" not in diff and "secret" not in diff
        code, body = call("history_diff", {"call": past}, capability={"allowed_fs_ops": ["list"]})
        assert (code, body["error"]["code"]) == (1, "fs_op_not_allowed")
        shielded = call("history_diff", {"call": past}, policy=[{"verdict": "allow", "output": "blob"}])
        assert shielded == (0, {"diff": ""})

    @pytest.mark.parametrize("dry_run", [True, False])
    @pytest.mark.parametrize("verb", ["undo", "restore", "rewind"])
    def test_undo_writes_only_where_its_session_may(
        self, verb: str, dry_run: bool, past: str, call: Call, root: Path
    ) -> None:
        args = {"to" if verb == "rewind" else "call": past, "dry_run": dry_run}
        for code, boundary in (
            # A session takes back calls of its own.
            ("unknown_call", {"session": "ro"}),
            ("fs_op_not_allowed", {"capability": {"allowed_fs_ops": ["read"]}}),
            ("path_not_allowed", {"capability": {"fs_roots": ["a.txt"]}}),
            ("path_not_allowed", {"policy": [{"paths": ["secret"], "ops": ["write"], "verdict": "deny"}]}),
        ):
            failed, body = call(f"history_{verb}", args, **boundary)
            assert (failed, body["error"]["code"]) == (1, code)
            assert (content(root, "a.txt"), content(root, "secret")) == ("agent\n", "hidden\n")
        assert call(f"history_{verb}", args, policy=[{"paths": ["other"], "verdict": "deny"}])[0] == 0

    def test_rollback_and_redo_write_only_where_their_session_may(self, past: str, call: Call, root: Path) -> None:
        narrow = {"capability": {"allowed_fs_ops": ["read"]}}
        assert call("history_rollback", {}, **narrow)[1]["error"]["code"] == "fs_op_not_allowed"
        assert call("history_rollback", {})[0] == 0
        assert call("history_redo", {}, **narrow)[1]["error"]["code"] == "fs_op_not_allowed"
        assert content(root, "a.txt") == "hello\n"
        assert run(["redo", "--root", str(root), "--store", str(root.parent / "store")]) == 0

    def test_an_ended_session_cannot_use_history_tools(self, past: str, call: Call) -> None:
        assert call("host.session.signal", {"session_id": "ro", "signal": "term"})[0] == 0
        arguments = {name: {"call": past} for name in ("history_show", "history_diff", "history_restore")}
        for tool in sorted(HISTORY):
            code, body = call(tool, {"to": past} if tool == "history_rewind" else arguments.get(tool, {}), session="ro")
            assert (code, body["error"]["code"]) == (1, "session_closed")

    def test_a_copy_needs_the_right_to_read_everything(self, past: str, call: Call, tmp_path: Path) -> None:
        code, body = call("history_fork", {"files": "copy"}, session="ro")
        assert (code, body["error"]["code"]) == (1, "forbidden")
        assert not (tmp_path / "store/forks").exists()
        for place in ("../escaped", str(tmp_path / "escaped")):
            code, body = call("history_fork", {"files": "copy", "to": place})
            assert (code, body["error"]["code"]) == (1, "invalid_params")
            assert not (tmp_path / "escaped").exists()
        code, body = call("history_fork", {"files": "copy"}, capability={"allowed_fs_ops": ["read"], "fs_roots": ["."]})
        assert (code, Path(body["directory"]).parent) == (0, tmp_path / "store/forks")
        assert content(Path(body["directory"]), "secret") == "hidden\n"

    def test_a_child_has_at_most_its_parents_rights(self, past: str, call: Call) -> None:
        child = call("history_fork", {}, session="ro")[1]["session_id"]
        code, body = call("write_file", ARGUMENTS["write_file"], session=child)
        assert (code, body["error_code"]) == (1, "fs_op_not_allowed")
        assert call("read_file", {"path": "secret"}, session=child)[1]["error_code"] == "path_not_allowed"
        assert call("read_file", {"path": "a.txt"}, session=child)[0] == 0


def test_call_opens_and_ends_sessions(call: Call) -> None:
    code, opened = call("host.session.open", {"capability": {"allowed_fs_ops": ["read"]}})
    assert (code, opened["status"]) == (0, "ready")
    session = opened["session_id"]
    assert call("host.fs.read_file", {"path": "a.txt", "session_id": session})[0] == 0
    code, body = call("host.fs.write_file", {"path": "n", "content": "x", "session_id": session})
    assert (code, body["error_code"]) == (1, "fs_op_not_allowed")
    assert call("host.session.signal", {"session_id": session, "signal": "term"})[0] == 0
    code, body = call("host.fs.read_file", {"path": "a.txt", "session_id": session})
    assert (code, body["error_code"]) == (1, "session_closed")


def test_arguments_may_come_from_standard_input(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["call", "write_file", "--args", "-", "--root", str(root), "--store", str(tmp_path / "store")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"path":"n","content":"from a pipe"}')))
    assert run(words) == 0
    assert content(root, "n") == "from a pipe"
    assert json.loads(capsys.readouterr().out)["status"] == "ok"


@pytest.mark.parametrize("tool", ["nope", "host.fs.nope", "snapshot_nope", "history_nope", "", "read_file "])
def test_an_unknown_tool_is_bad_usage_and_creates_no_store(tool: str, call: Call, tmp_path: Path) -> None:
    assert call(tool, {})[0] == 2
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{'a': 1}", '{"path": NaN}'])
def test_arguments_must_be_an_object(text: str, root: Path, tmp_path: Path) -> None:
    words = ["--root", str(root), "--store", str(tmp_path / "store"), "--json"]
    assert run(["call", "read_file", "--args", text, *words]) == 2
    assert not (tmp_path / "store").exists()
