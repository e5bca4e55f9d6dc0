"""An editor runs an agent through `mulligan acp -- AGENT`. The agent knows nothing of Mulligan."""

from __future__ import annotations

from tests.servers.acp.client import connected
from tests.servers.acp.test_proxy import PROXY, began, heard, over, pause, steps
from tests.stories.user_project import UserProject


def test_the_editor_rolls_back_a_prompt_and_mulligan_tells_the_model(project: UserProject) -> None:
    before = project.files()
    command = f"cd {project.root} && rm notes.txt && echo KEY=2 > .env"
    prompt = steps(began("tool_1", kind="execute"), {"shell": command}, over("tool_1"))
    with connected(project.state, command=PROXY) as editor:
        session = editor.ask("session/new", cwd=str(project.root), mcpServers=[])["sessionId"]
        editor.ask("session/prompt", sessionId=session, prompt=prompt)
        after = project.files()
        assert "notes.txt" not in after

        assert editor.ask("_mulligan/session/rollback", sessionId=session)["status"] == "rolled_back"
        assert project.files() == before

        editor.ask("session/prompt", sessionId=session, prompt=steps({"heard": 1}))
        (told,) = heard(editor)
        assert "- .env (changed back)" in told and "- notes.txt (restored)" in told


def test_the_editor_restores_one_tool_call_of_two(project: UserProject) -> None:
    def write(name: str, text: str, id: str) -> list[dict[str, object]]:
        path = str(project.root / name)
        return [*began(id, kind="edit", locations=[{"path": path}]), {"write": [path, text]}, over(id)]

    with connected(project.state, command=PROXY) as editor:
        session = editor.ask("session/new", cwd=str(project.root), mcpServers=[])["sessionId"]
        prompt = steps(write("notes.txt", "lost\n", "tool_1"), pause(session), write("new.txt", "new\n", "tool_2"))
        editor.ask("session/prompt", sessionId=session, prompt=prompt)
        editor.ask("_mulligan/session/restore_tool_call", sessionId=session, toolCallId="tool_1")
    assert project.files()["notes.txt"] == "do not lose me\n"
    assert project.files()["new.txt"] == "new\n"
