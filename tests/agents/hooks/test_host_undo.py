"""The host's own undo (`/rewind`, `/restore`, opencode's `/undo`) changes files and, mostly, tells no hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mulligan.history.observe import REVERTED, REVERTED_BY_HOST
from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.agents.hooks.test_recorder import Agent, agent, tree  # noqa: F401


def edit(agent: Agent, label: str, path: str, text: str) -> None:  # noqa: F811
    told: dict[str, Any] = {"label": label, "tool": "Write", "input": {"file_path": str(agent.root / path)}}
    agent.say("pre", **told)
    (agent.root / path).write_text(text)
    agent.say("post", **told)


def three_prompts(agent: Agent) -> None:  # noqa: F811
    for number, (path, text) in enumerate((("a.txt", "one\n"), ("b.txt", "made\n"), ("a.txt", "three\n")), 1):
        agent.say("prompt", turn=f"p{number}", prompt=f"prompt {number}")
        edit(agent, f"c{number}", path, text)
        agent.say("stop", turn=f"p{number}")


def outside(agent: Agent) -> list[tuple[str | None, set[str]]]:  # noqa: F811
    return [(row.get("reason"), {one["path"] for one in row["changes"]}) for row in agent.log() if row["external"]]


def statuses(agent: Agent) -> dict[str, str]:  # noqa: F811
    return {row["label"]: row["status"] for row in agent.log() if row["label"]}


@pytest.mark.req("D14.hooks.host_undo")
def test_files_that_the_host_has_reverted_are_one_outside_change_and_undo_skips_their_calls(agent: Agent) -> None:  # noqa: F811
    three_prompts(agent)
    # As `/rewind` does to the second prompt: later edits of its edit tools go back whole.
    (agent.root / "a.txt").write_text("one\n")
    (agent.root / "b.txt").unlink()
    agent.say("session_start")
    assert outside(agent) == [(REVERTED, {"a.txt", "b.txt"})]
    assert statuses(agent) == {"c1": "committed", "c2": "undone", "c3": "undone"}
    done = agent.undo()
    assert [one.path for one in done.outcomes] == ["a.txt"]
    assert (agent.root / "a.txt").read_text() == "one\ntwo\n" and not (agent.root / "b.txt").exists()


@pytest.mark.req("D14.hooks.host_undo")
def test_redo_does_not_overwrite_what_the_host_has_reverted(agent: Agent) -> None:  # noqa: F811
    three_prompts(agent)
    agent.undo("c3")
    (agent.root / "a.txt").write_text("one\ntwo\n")
    agent.say("stop", turn="p3")
    assert (statuses(agent)["c1"], statuses(agent)["c3"]) == ("undone", "undone")
    done = agent.opened.session("s1").redo()
    assert [(one.path, one.outcome) for one in done.outcomes] == [("a.txt", "conflicted")]
    assert (agent.root / "a.txt").read_text() == "one\ntwo\n"


@pytest.mark.req("D14.hooks.host_undo")
def test_calls_that_the_host_does_again_can_be_undone_again(agent: Agent) -> None:  # noqa: F811
    """opencode's `/undo` and `/redo`: its plugin reports both."""
    three_prompts(agent)
    after = tree(agent.root)
    (agent.root / "a.txt").write_text("one\n")
    agent.say("reverted")
    assert (outside(agent), statuses(agent)["c3"]) == ([(REVERTED_BY_HOST, {"a.txt"})], "undone")
    (agent.root / "a.txt").write_text("three\n")
    agent.say("reverted")
    assert (tree(agent.root), statuses(agent)["c3"]) == (after, "committed")
    agent.undo()
    assert (agent.root / "a.txt").read_text() == "one\n"


@pytest.mark.req("D14.hooks.host_undo")
def test_an_edit_of_a_person_is_no_revert(agent: Agent) -> None:  # noqa: F811
    three_prompts(agent)
    (agent.root / "a.txt").write_text("mine\n")
    agent.say("stop")
    assert outside(agent) == [(None, {"a.txt"})]
    assert statuses(agent) == {"c1": "committed", "c2": "committed", "c3": "committed"}


@pytest.mark.req("D14.hooks.host_undo")
def test_the_model_and_the_log_learn_of_the_revert(workspace: HookedWorkspace) -> None:
    target = workspace.root / "a.txt"
    assert workspace.prompt("first", "p1") is None
    workspace.tool("Write", {"file_path": str(target)}, "toolu_1", lambda: Path(target).write_text("new\n"))
    workspace.hook("Stop")
    target.write_text("one\ntwo\n")
    news = workspace.news("p2")
    assert news is not None and f"- {REVERTED}: a.txt" in news and "edited by" not in news
    log = workspace.mulligan("log").stdout
    assert REVERTED in log and workspace.typed("/undo") == "There is nothing to undo here."
