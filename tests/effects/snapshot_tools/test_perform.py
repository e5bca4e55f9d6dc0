"""The snapshot and workspace tools from Python: `session.perform("snapshot.list", …)`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mulligan
from mulligan.api import Mulligan
from mulligan.values.errors import MulliganError

pytestmark = pytest.mark.req("D12.perform_snapshot_tools")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one\n")
    with mulligan.open(tmp_path / "work", store=tmp_path / "home") as found:
        yield found


def test_a_reading_tool_returns_its_fields_and_makes_no_call(opened: Mulligan) -> None:
    receipt, call = opened.session("s").perform("snapshot.list", {})
    assert (receipt.status, call) == ("ok", "")
    assert [entry["path"] for entry in receipt.entries] == ["a.txt"]
    assert receipt.lease_id


def test_a_lease_is_valid_for_the_next_tool(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("s")
    lease = session.perform("snapshot.file", {"path": "a.txt"})[0].lease_id
    (tmp_path / "work" / "a.txt").write_text("two\n")
    receipt, call = session.perform("workspace.write_file", {"path": "a.txt", "content": "three\n", "lease_id": lease})
    assert (receipt.status, receipt.error_code, call) == ("error", "STALE_LEASE", "")
    assert receipt.error["details"]["changed_paths"] == ["a.txt"]
    assert (tmp_path / "work" / "a.txt").read_text() == "two\n"


def test_a_writing_tool_is_a_call_that_can_be_undone(opened: Mulligan, tmp_path: Path) -> None:
    session = opened.session("s")
    receipt, call = session.perform("workspace.write_file", {"path": "b.txt", "content": "new\n"})
    assert receipt.ok and receipt.created and call
    assert session.undo(call).ok
    assert not (tmp_path / "work" / "b.txt").exists()


def test_a_patch_that_does_not_apply_is_not_ok(opened: Mulligan) -> None:
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-other\n+new\n"
    receipt, _ = opened.session("s").perform("workspace.apply_patch", {"patch": patch})
    assert not receipt.ok and receipt.rejects[0]["path"] == "a.txt"


def test_a_capability_of_the_workspace_holds(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with mulligan.open(tmp_path / "work", store=tmp_path / "home", capability={"allowed_fs_ops": ["list"]}) as found:
        session = found.session("s")
        assert session.perform("snapshot.list", {})[0].ok
        assert session.perform("snapshot.grep", {"pattern": "x"})[0].error_code == "PERMISSION_DENIED"


def test_a_tool_that_does_not_exist_is_refused(opened: Mulligan) -> None:
    with pytest.raises(MulliganError) as caught:
        opened.session("s").perform("snapshot.nothing", {})
    assert caught.value.code == "unknown_effect"
