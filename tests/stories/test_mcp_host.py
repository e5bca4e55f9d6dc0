"""An agent host gives its model Mulligan's tools over MCP. A person edits files while the model works."""

from __future__ import annotations

from tests.servers.mcp.server_process import on_stdio
from tests.stories.user_project import UserProject


def test_the_model_edits_runs_a_command_and_undoes_its_own_mistake(project: UserProject) -> None:
    before = project.files()
    with on_stdio(project.root, project.state) as host:
        host.greet()
        edited = host.call("edit_file", path="src/app.py", old_string="first = 1", new_string="first = one")
        assert edited["isError"] is False
        host.call("shell", command="rm notes.txt")
        assert not (project.root / "notes.txt").exists()

        assert host.call("history_undo")["structuredContent"]["ok"] is True
        assert (project.root / "notes.txt").read_text() == "do not lose me\n"
        assert host.call("history_undo")["structuredContent"]["ok"] is True
    assert project.files() == before


def test_a_lease_tells_the_model_that_a_person_changed_what_it_read(project: UserProject) -> None:
    file = project.root / "src/app.py"
    with on_stdio(project.root, project.state) as host:
        host.greet()
        read = host.call("snapshot_file", path="src/app.py")["structuredContent"]
        file.write_text(file.read_text() + "mine = 6\n")

        refused = host.call("workspace_write_file", path="src/app.py", content="", lease_id=read["lease_id"])
        assert refused["isError"] is True
        error = refused["structuredContent"]["error"]
        assert (error["code"], error["details"]["changed_paths"]) == ("STALE_LEASE", ["src/app.py"])
    assert file.read_text().endswith("fifth = 5\nmine = 6\n")


def test_a_tool_that_fails_changes_nothing(project: UserProject) -> None:
    before = project.files()
    with on_stdio(project.root, project.state) as host:
        host.greet()
        missing = host.call("edit_file", path="src/app.py", old_string="sixth", new_string="6")
        assert (missing["isError"], missing["structuredContent"]["error_code"]) == (True, "edit_target_not_found")
        outside = host.call("write_file", path="../outside.txt", content="x")
        assert outside["isError"] is True
    assert project.files() == before
    assert not (project.root.parent / "outside.txt").exists()
