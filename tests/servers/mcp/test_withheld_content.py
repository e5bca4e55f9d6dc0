"""One policy and one capability hold for every tool: no byte of any answer is content that they keep back."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mulligan
from tests.effects.snapshot_tools.snapshot_workspace import git, known_repository
from tests.servers.mcp.server_process import on_stdio

DENIED, ONLY_BLOB = "MARKdeniedMARKdenied", "MARKblobMARKblob"
POLICY = [
    {"paths": ["secret"], "verdict": "deny"},
    {"paths": ["keys"], "verdict": "allow", "output": "blob"},
]
CAPABILITY = {
    "allowed_fs_ops": ["read", "write", "edit", "patch", "search", "list", "stat"],
    "max_inline_bytes": 16_000,
    "max_read_bytes": 16_000,
}
TARGETS = ("secret/file", "keys/file", "to_secret", "to_keys", "folder/file", "secret", "keys", ".", "src/main.rs")
ABSENT = "sha256:" + "0" * 64

McpOptions = Iterator[tuple[str, dict[str, Any]]]


class Setting:
    """A root in which a session without limits has worked with files that another may not see."""

    def __init__(self, folder: Path) -> None:
        self.root, self.home = known_repository(folder / "root"), folder / "home"
        for name, text in (("secret/file", DENIED), ("keys/file", ONLY_BLOB)):
            (self.root / name).parent.mkdir()
            (self.root / name).write_text(f"{text} in the commit\n")
        for link, target in (("to_secret", "secret/file"), ("to_keys", "keys/file"), ("folder", "secret")):
            (self.root / link).symlink_to(target)
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", "more")
        self.calls: list[str] = []
        with mulligan.open(self.root, store=str(self.home)) as opened:
            session = opened.session("without limits")
            for turn in range(2):
                with session.call("works") as call:
                    self.calls.append(call.id)
                    for name, text in (("secret/file", DENIED), ("keys/file", ONLY_BLOB)):
                        receipt = call.write_file(name, f"{text} of turn {turn}\n" * 3)
                        assert receipt.ok
                    call.write_file("src/main.rs", "fn main() {}\n" * (turn + 1))
        self.digests = [self.digest(name) for name in ("secret/file", "keys/file")]
        with on_stdio(self.root, self.home) as peer:
            peer.greet()
            self.snapshots: list[str] = []
            for turn in range(2):
                made = peer.call("snapshot_create", paths=["."], session_id="without limits")
                self.snapshots.append(made["structuredContent"]["snapshot_id"])
                (self.root / "secret/file").write_text(f"{DENIED} after snapshot {turn}\n")
                (self.root / "keys/file").write_text(f"{ONLY_BLOB} after snapshot {turn}\n")

    def digest(self, name: str) -> str:
        from hashlib import sha256

        return "sha256:" + sha256((self.root / name).read_bytes()).hexdigest()

    # What is asked of each tool: about every target, in every way that shows content.

    def substrate(self) -> McpOptions:
        older, newer = self.snapshots
        for way in ({}, {"mode": "snapshot", "snapshot_id": newer}):
            for path in TARGETS:
                yield "snapshot_list", {"path": path, "depth": 9, **way}
                yield "snapshot_file", {"path": path, **way}
                yield "snapshot_grep", {"pattern": "M.RK", "paths": [path], **way}
                yield "snapshot_diff", {"path": path, **way}
                yield "snapshot_diff", {"path": path, "from_snapshot_id": older, **way}
                yield "snapshot_export", {"paths": [path], **way}
            yield "snapshot_grep", {"pattern": "M.RK", **way}
            yield "snapshot_diff", way
            yield "snapshot_diff", {"from_snapshot_id": older, **way}
        yield "snapshot_diff", {"against": "index"}
        yield "snapshot_export", {"mode": "snapshot", "snapshot_id": newer}
        for snapshot in self.snapshots:
            yield "snapshot_changes", {"snapshot_id": snapshot}
            yield "snapshot_info", {"snapshot_id": snapshot}
        yield "snapshot_changes", {"snapshot_id": newer, "from_snapshot_id": older}
        for path in TARGETS:
            yield "snapshot_create", {"paths": [path]}
            yield "workspace_write_file", {"path": path, "content": "x", "dry_run": True}
            yield "workspace_delete", {"path": path, "recursive": True, "dry_run": True}
            for way in ({}, {"mode": "snapshot", "snapshot_id": newer}):
                patch = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-wrong\n+x\n"
                yield "workspace_apply_patch", {"patch": patch, "dry_run": True, **way}

    def coding(self) -> McpOptions:
        for path in TARGETS:
            for mode in ("auto", "require_inline"):
                yield "read_file", {"path": path, "output_mode": mode}
            yield "read_file", {"path": path, "max_lines": 1}
            yield "grep", {"pattern": "M.RK", "path": path}
            yield "glob", {"pattern": "**", "path": path}
            yield "list_dir", {"path": path}
            for tool in ("stat", "exists"):
                yield tool, {"path": path}
            yield "edit_file", {"path": path, "old_string": "no such text", "new_string": "x"}
            update = f"*** Begin Patch\n*** Update File: {path}\n@@\n-no such text\n+x\n*** End Patch\n"
            yield "apply_patch", {"patch": update, "dry_run": True}
        yield "grep", {"pattern": "M.RK"}
        yield "glob", {"pattern": "**"}
        for digest in (*self.digests, ABSENT):
            yield "read_blob", {"blob_ref": digest}
        yield "exec", {"argv": ["cat", "secret/file", "keys/file"]}
        yield "shell", {"command": "cat secret/file keys/file"}
        yield "exec_output", {"exec_id": "none"}
        yield "exec_signal", {"exec_id": "none", "signal": "TERM"}
        yield "mkdir", {"path": "secret/made"}
        yield "move", {"path": "secret/file", "to": "public"}
        yield "delete", {"path": "secret/file"}
        yield "write_file", {"path": "secret/file", "content": "x", "mode": "create_new"}

    def history(self) -> McpOptions:
        for call in self.calls:
            yield "history_show", {"call": call}
            yield "history_diff", {"call": call}
            yield "history_undo", {"call": call, "session_id": "without limits", "dry_run": True}
            yield "history_restore", {"call": call, "session_id": "without limits", "dry_run": True}
            yield "history_rewind", {"to": call, "session_id": "without limits", "dry_run": True}
        yield "history_log", {}
        for tool in ("history_rollback", "history_redo"):
            yield tool, {"session_id": "without limits", "dry_run": True}
        for files in ("share", "copy"):
            yield "history_fork", {"session_id": "without limits", "files": files}


def shown(body: Any) -> Iterator[bytes]:
    """Every text in an answer as bytes, and what base64 in it stands for."""
    if isinstance(body, Mapping):
        for key, value in body.items():
            yield from shown(key)
            yield from shown(value)
    elif isinstance(body, list):
        for value in body:
            yield from shown(value)
    elif isinstance(body, str):
        yield body.encode("utf-8", "surrogatepass")
        for run in re.findall(r"[A-Za-z0-9+/_-]{16,}", body):
            data = base64.urlsafe_b64decode(run.replace("+", "-").replace("/", "_")[: len(run) // 4 * 4])
            yield data
            try:
                yield zlib.decompress(data, wbits=47)
            except zlib.error:
                continue


@pytest.mark.req("D8.every_tool_every_byte", "D8.substrate_blob_output")
def test_no_byte_of_any_tools_answer_is_content_that_a_policy_keeps_back(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    options = ("--capability", json.dumps(CAPABILITY), "--policy", json.dumps(POLICY))
    asked = [*setting.substrate(), *setting.coding(), *setting.history()]
    leaks: list[str] = []
    succeeded: set[str] = set()
    with on_stdio(setting.root, setting.home, *options) as peer:
        peer.greet()
        listed = {tool["name"] for tool in peer.result("tools/list")["tools"]}
        for tool, arguments in asked:
            answer = peer.call(tool, **arguments)
            if not answer["isError"]:
                succeeded.add(tool)
            if any(text.encode() in data for data in shown(answer) for text in (DENIED, ONLY_BLOB)):
                leaks.append(f"{tool} {arguments}")
    assert listed == {tool for tool, _ in asked}
    assert leaks == []
    reading = {tool for tool in listed if tool.startswith("snapshot_")} | {"read_file", "grep", "glob", "history_diff"}
    assert succeeded >= reading, "a tool that answers nothing shows nothing"
