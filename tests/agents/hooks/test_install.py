"""`mulligan install` and `uninstall`: files only, no host runs."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from mulligan.hosts.typed import NO_ANSWER
from tests.agents.hooks.hooked_workspace import HookedWorkspace

HOSTS = ("claude", "codex", "gemini", "opencode", "zed")
SETTINGS = {
    "claude": ".claude/settings.json",
    "codex": ".codex/hooks.json",
    "gemini": ".gemini/settings.json",
    "opencode": ".config/opencode/tui.json",
    "zed": ".config/zed/settings.json",
}
THEIRS = {
    "claude": '{\n\t"model": "opus",\n\t"hooks": {"Stop": [{"hooks": [{"type": "command", "command": "mine"}]}]}}',
    "codex": '{"hooks": {}}\n',
    "gemini": '{\n  // mine\n  "theme": "Dark",\n}\n',
    "opencode": '{"theme": "x", "plugin": ["mine"]}',
    "zed": '// Zed\n{\n  "agent_servers": {\n    "Mine": { "command": "x" },\n  },\n}\n',
}


def tree(folder: Path) -> dict[str, bytes]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"/" for path in paths}


def given(workspace: HookedWorkspace, host: str) -> None:
    """The host's settings, written by a person."""
    file = workspace.home / SETTINGS[host]
    file.parent.mkdir(parents=True)
    file.write_text(THEIRS[host])


@pytest.mark.req("D14.hosts.install", "D14.hosts.uninstall")
class TestInstall:
    @pytest.mark.parametrize("scope", ["--user", "--project"])
    @pytest.mark.parametrize("has_settings", [True, False])
    @pytest.mark.parametrize("host", HOSTS)
    def test_uninstall_leaves_every_file_as_it_was(
        self, workspace: HookedWorkspace, host: str, has_settings: bool, scope: str
    ) -> None:
        if has_settings:
            given(workspace, host)
        home, root = tree(workspace.home), tree(workspace.root)
        words = (host, scope, "--yes")
        done = workspace.mulligan("install", *words)
        if (host, scope) == ("gemini", "--project"):
            assert (done.returncode, "leave out --project" in done.stderr) == (2, True)
            return
        assert done.returncode == 0, done.stderr
        assert (tree(workspace.home), tree(workspace.root)) != (home, root)
        again = workspace.mulligan("install", *words)
        assert (again.returncode, again.stdout.splitlines()[0].endswith("everything is installed already.")) == (
            0,
            True,
        )
        assert workspace.mulligan("uninstall", *words).returncode == 0
        assert (tree(workspace.home), tree(workspace.root)) == (home, root)
        assert os.listdir(workspace.store / "hooks" / "packages") == []

    def test_the_chosen_store_is_in_each_command(self, workspace: HookedWorkspace, tmp_path: Path) -> None:
        chosen = str(tmp_path / "the store")
        for host in ("claude", "codex", "gemini"):
            assert workspace.mulligan("install", host, "--yes", "--store", chosen).returncode == 0
        files = (".claude/settings.json", ".codex/hooks.json", ".gemini/extensions/mulligan/hooks/hooks.json")
        for file in files:
            hooks = json.loads((workspace.home / file).read_text())["hooks"]
            for entry in (entry for entries in hooks.values() for entry in entries):
                (hook,) = entry["hooks"]
                assert shlex.split(hook["command"])[5:7] == [chosen, "commands"]
        assert workspace.mulligan("install", "zed", "--yes", "--store", chosen).returncode == 0
        zed = json.loads((workspace.home / ".config/zed/settings.json").read_text())["agent_servers"]["Mulligan"]
        assert zed["args"][2:5] == ["acp", "--store", chosen]
        prompt = json.loads((workspace.home / files[0]).read_text())["hooks"]["UserPromptSubmit"][0]["hooks"][0]
        assert prompt["timeout"] == 60

    def test_a_command_that_no_hook_answers_tells_the_model_to_do_nothing(self, workspace: HookedWorkspace) -> None:
        for host in ("claude", "codex", "gemini", "opencode"):
            assert workspace.mulligan("install", host, "--yes").returncode == 0
        commands = [*workspace.home.rglob("*.md"), *workspace.home.rglob("*.toml")]
        assert len(commands) == 10
        assert [path for path in commands if NO_ANSWER not in path.read_text()] == []

    def test_a_dry_run_and_a_missing_yes_change_nothing(self, workspace: HookedWorkspace) -> None:
        done = workspace.mulligan("install", "claude", "--dry-run")
        shown = [line.removeprefix("would write ") for line in done.stdout.splitlines()]
        folder = workspace.home / ".claude"
        names = ["settings.json", "commands/undo.md", "commands/redo.md", "commands/mulligan.md"]
        assert (done.returncode, shown) == (0, [str(folder / name) for name in names])
        refused = workspace.mulligan("install", "claude")
        assert (refused.returncode, "confirm with --yes" in refused.stderr) == (2, True)
        assert tree(workspace.home) == {}

    def test_a_command_file_of_the_person_is_not_replaced(self, workspace: HookedWorkspace) -> None:
        own = workspace.home / ".claude/commands/undo.md"
        own.parent.mkdir(parents=True)
        own.write_text("my own undo\n")
        before = tree(workspace.home)
        done = workspace.mulligan("install", "claude", "--yes")
        assert (done.returncode, "move it away first" in done.stderr) == (2, True)
        assert tree(workspace.home) == before

    def test_a_file_that_the_person_edited_since_stays(self, workspace: HookedWorkspace) -> None:
        assert workspace.mulligan("install", "claude", "--yes").returncode == 0
        own = workspace.home / ".claude/commands/undo.md"
        own.write_text("my own undo now\n")
        settings = workspace.home / ".claude/settings.json"
        settings.write_text(settings.read_text().replace("{", '{ "theme": "dark",', 1))
        done = workspace.mulligan("uninstall", "claude", "--yes")
        assert (done.returncode, f"left {own}: somebody has edited it" in done.stdout) == (0, True)
        assert own.read_text() == "my own undo now\n"
        assert json.loads(settings.read_text()) == {"theme": "dark"}
        assert sorted(tree(workspace.home)) == [
            ".claude",
            ".claude/commands",
            ".claude/commands/undo.md",
            ".claude/settings.json",
        ]

    def test_it_replaces_the_hooks_alone(self, workspace: HookedWorkspace) -> None:
        assert workspace.mulligan("hooks", "install", "claude").returncode == 0
        assert workspace.mulligan("install", "claude", "--yes").returncode == 0
        hooks = json.loads((workspace.home / ".claude/settings.json").read_text())["hooks"]
        assert {event: len(entries) for event, entries in hooks.items()} == dict.fromkeys(hooks, 1)


@pytest.mark.req("D14.hosts.uninstall")
def test_uninstall_takes_the_trust_of_codex_in_our_hooks_away_and_no_other(workspace: HookedWorkspace) -> None:
    folder = workspace.home / ".codex"
    folder.mkdir()
    theirs = {"hooks": {"Stop": [{"hooks": [{"type": "command", "command": "mine"}]}]}}
    (folder / "hooks.json").write_text(json.dumps(theirs))
    assert workspace.mulligan("install", "codex", "--yes").returncode == 0
    config = 'model = "mock"\n\n[hooks.state]\n\n'
    mine = f'[hooks.state."{folder}/hooks.json:stop:0:0"]\ntrusted_hash = "sha256:1"\n\n'
    ours = "".join(
        f'[hooks.state."{folder}/hooks.json:{key}"]\ntrusted_hash = "sha256:2"\n\n'
        for key in ("stop:1:0", "user_prompt_submit:0:0", "pre_tool_use:0:0")
    )
    rest = "[tui]\nx = 1\n"
    (folder / "config.toml").write_text(config + mine + ours + rest)
    assert workspace.mulligan("uninstall", "codex", "--yes").returncode == 0
    assert (folder / "config.toml").read_text() == config + mine + rest
    assert json.loads((folder / "hooks.json").read_text()) == theirs


@pytest.mark.req("D14.hosts.list")
def test_the_list_shows_versions_what_is_installed_and_what_is_missing(workspace: HookedWorkspace) -> None:
    programs = workspace.home / "bin"
    programs.mkdir()
    for name, words in (("claude", "2.1.325 (Claude Code)"), ("gemini", "0.61.0")):
        (programs / name).write_text(f"#!/bin/sh\necho '{words}'\n")
        (programs / name).chmod(0o755)
    workspace.extra["PATH"] = f"{programs}:/usr/bin:/bin"
    assert workspace.mulligan("install", "--yes").returncode == 0
    (workspace.home / ".gemini/extensions/mulligan/commands/redo.toml").unlink()
    listed = json.loads(workspace.mulligan("install", "--list", "--json").stdout)
    assert {(one["host"], one["version"], one["scope"], one["state"]) for one in listed} == {
        ("claude", "2.1.325", "user", "installed"),
        ("claude", "2.1.325", "project", "no"),
        ("codex", None, "user", "no"),
        ("codex", None, "project", "no"),
        ("gemini", "0.61.0", "user", "partly"),
        ("opencode", None, "user", "no"),
        ("opencode", None, "project", "no"),
        ("zed", None, "user", "no"),
        ("zed", None, "project", "no"),
    }
    assert "  missing: " in workspace.mulligan("install", "--list").stdout
