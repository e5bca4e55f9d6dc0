"""Our entries in other programs' settings: in without harm, out without a trace."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.hosts.settings import HOSTS, MARK, Host, Settings, command_for, parse
from mulligan.values.errors import MulliganError
from tests.agents.hooks.hooked_workspace import HookedWorkspace
from tests.agents.hooks.test_jsonc import documents

COMMENTED = b"""// my settings
{
\t"model": "opus", // the good one
\t"hooks": {
\t\t/* do not touch */
\t\t"PreToolUse": [
\t\t\t{"matcher": "Bash", "hooks": [{"type": "command", "command": "./mine.sh"}]},
\t\t],
\t},
}
"""
ODD = [
    COMMENTED,
    COMMENTED.replace(b"\n", b"\r\n"),
    b"{}",
    b"{ }\n",
    b"",
    b"\n",
    b'{"a":1}',
    b'\xef\xbb\xbf{"a": 1}\n',
    b'{"hooks": {}, "z": [1, 2 ]}',
    b'{"hooks": {"Stop": []}}',
    b'{\n    "hooks": {\n        "Stop": [\n            { "hooks": [] }\n        ]\n    }\n}',
    b"{ /* nothing yet */ }\n",
]


@pytest.fixture(params=sorted(HOSTS))
def host(request: pytest.FixtureRequest) -> Host:
    return HOSTS[request.param]


def settings(folder: Path, host: Host = HOSTS["claude"]) -> Settings:
    return Settings(host, str(folder / "agent" / "settings.json"), str(folder / "memory"))


def with_file(folder: Path, data: bytes, host: Host = HOSTS["claude"]) -> tuple[Settings, Path]:
    (folder / "agent").mkdir()
    file = folder / "agent" / "settings.json"
    file.write_bytes(data)
    return settings(folder, host), file


def commands(file: Path) -> dict[str, list[str]]:
    hooks = parse(file.read_bytes().decode("utf-8-sig")).value["hooks"]
    return {
        name: [hook.get("command", "") for group in groups for hook in group["hooks"]] for name, groups in hooks.items()
    }


@pytest.mark.req("D14.hooks.install_claude", "D14.hooks.install_gemini", "D14.hooks.install_codex", "D14.hooks.status")
def test_install_adds_our_hook_to_every_event(tmp_path: Path, host: Host) -> None:
    found = settings(tmp_path, host)
    assert not found.installed().is_installed
    assert found.install()
    file = tmp_path / "agent" / "settings.json"
    assert commands(file) == {event: [command_for(host.name)] for event in host.events}
    assert found.installed().is_installed
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.req("D14.hooks.uninstall")
def test_uninstall_removes_the_file_and_folder_that_install_created(tmp_path: Path, host: Host) -> None:
    found = settings(tmp_path, host)
    found.install()
    assert found.uninstall()
    assert not (tmp_path / "agent").exists()
    assert not found.uninstall()


@pytest.mark.req("D14.hooks.settings_kept", "D14.hooks.uninstall")
@pytest.mark.parametrize("before", ODD)
def test_unusual_settings_are_restored_byte_for_byte(tmp_path: Path, before: bytes, host: Host) -> None:
    found, file = with_file(tmp_path, before, host)
    file.chmod(0o640)
    assert found.install()
    merged = parse(file.read_bytes().decode("utf-8-sig")).value
    original = parse(before.decode("utf-8-sig").strip() or "{}").value
    assert {key: value for key, value in merged.items() if key != "hooks"} == {
        key: value for key, value in original.items() if key != "hooks"
    }
    for event, groups in original.get("hooks", {}).items():
        assert merged["hooks"][event][: len(groups)] == groups
    assert found.installed().is_installed
    assert not found.install()
    assert found.uninstall()
    assert file.read_bytes() == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "agent") == ["settings.json"]


def test_comments_and_formatting_of_the_file_stay(tmp_path: Path) -> None:
    found, file = with_file(tmp_path, COMMENTED)
    found.install()
    text = file.read_text()
    for line in COMMENTED.decode().splitlines():
        assert line in text
    assert '\n\t\t\t{\n\t\t\t\t"matcher"' in text
    assert commands(file)["PreToolUse"] == ["./mine.sh", command_for("claude")]


@pytest.mark.req("D14.hooks.uninstall")
@pytest.mark.parametrize("before", ODD)
def test_uninstall_removes_only_our_entries_from_a_file_edited_since(tmp_path: Path, before: bytes) -> None:
    found, file = with_file(tmp_path, before)
    found.install()
    text = file.read_bytes().decode()
    at = text.rindex("}")
    comma = "" if text[:at].rstrip().endswith(("{", ",")) else ","
    file.write_bytes((text[:at] + comma + '"mine": [1] // new\n' + text[at:]).encode())
    assert found.uninstall()
    left = parse(file.read_bytes().decode("utf-8-sig")).value
    original = parse(before.decode("utf-8-sig").strip() or "{}").value
    assert left == {**original, "mine": [1]}
    assert MARK not in file.read_text()
    assert "// new" in file.read_text()


@pytest.mark.req("D14.hooks.settings_kept", "D14.hooks.uninstall")
@pytest.mark.parametrize("remembers", [True, False])
def test_uninstall_keeps_comments_in_empty_lists(tmp_path: Path, remembers: bool) -> None:
    before = '{\n  "hooks": {\n    // one\n    "PreToolUse": [ /* two */ ], // three\n  },\n  // four\n}\n'
    found, file = with_file(tmp_path, before.encode())
    found.install()
    file.write_text("// new\n" + file.read_text())
    if not remembers:
        found = Settings(HOSTS["claude"], str(file), str(tmp_path / "elsewhere"))
    assert found.uninstall()
    assert "".join(file.read_text().split()) == "".join(("// new\n" + before).split())


@pytest.mark.req("D14.hooks.uninstall")
@pytest.mark.parametrize("more", ['"hooks": {}', '"hooks": {"Stop": []}'])
@pytest.mark.parametrize("first", [True, False])
def test_our_entry_is_found_under_either_of_two_equal_keys(tmp_path: Path, more: str, first: bool) -> None:
    found, file = with_file(tmp_path, b'{"a": 1}')
    found.install()
    text = file.read_text()
    file.write_text("{" + more + "," + text[1:] if first else text.rstrip()[:-1] + "," + more + "}")
    assert found.uninstall()
    assert MARK not in file.read_text() and more in file.read_text()


@pytest.mark.req("D14.hooks.settings_kept")
@pytest.mark.parametrize(
    ("before", "code"),
    [
        (b'{"hooks": {', "invalid_json"),
        (b"[]", "unsupported_target"),
        (b'{"hooks": []}', "unsupported_target"),
        (b'{"hooks": {"Stop": {}}}', "unsupported_target"),
        (b'{"a": "\xff"}', "unsupported_target"),
    ],
)
def test_settings_that_cannot_be_merged_are_refused_and_unchanged(tmp_path: Path, before: bytes, code: str) -> None:
    found, file = with_file(tmp_path, before)
    with pytest.raises(MulliganError) as caught:
        found.install()
    assert caught.value.code == code
    assert file.read_bytes() == before
    assert os.listdir(tmp_path / "agent") == ["settings.json"]


@pytest.mark.req("D14.hooks.settings_kept")
def test_a_read_only_file_is_refused_and_unchanged(tmp_path: Path) -> None:
    found, file = with_file(tmp_path, b"{}")
    file.chmod(0o444)
    with pytest.raises(MulliganError) as caught:
        found.install()
    assert caught.value.code == "forbidden"
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"{}", 0o444)


def test_a_link_to_the_settings_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "dotfiles").mkdir()
    real = tmp_path / "dotfiles" / "claude.json"
    real.write_text('{"a": 1}\n')
    (tmp_path / "agent" / "settings.json").symlink_to(real)
    found = settings(tmp_path)
    found.install()
    assert (tmp_path / "agent" / "settings.json").is_symlink()
    assert MARK in real.read_text()
    found.uninstall()
    assert real.read_text() == '{"a": 1}\n'


def test_uninstall_finds_our_entries_without_the_saved_state(tmp_path: Path) -> None:
    found, file = with_file(tmp_path, COMMENTED)
    found.install()
    elsewhere = Settings(HOSTS["claude"], str(file), str(tmp_path / "other memory"))
    assert elsewhere.uninstall()
    assert file.read_bytes() == COMMENTED


@given(documents(st.dictionaries(st.text(max_size=4), st.integers(-(2**63), 2**63 - 1), max_size=3)))
def test_install_and_uninstall_restore_any_settings(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    value, text = document
    found, file = with_file(tmp_path_factory.mktemp("any"), text.encode())
    if "hooks" in value:
        return
    found.install()
    merged = parse(file.read_text("utf-8")).value
    assert {key: merged[key] for key in value} == value
    found.uninstall()
    assert file.read_bytes() == text.encode()


def test_the_hook_command_succeeds_after_mulligan_was_uninstalled(tmp_path: Path) -> None:
    command = command_for("claude").replace("client.py", "missing.py")
    done = subprocess.run(["sh", "-c", command], input=b"{}", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.req("D14.cli.hooks")
@pytest.mark.parametrize("scope", ["--user", "--project"])
@pytest.mark.parametrize("agent", sorted(HOSTS))
def test_install_status_and_uninstall_on_the_command_line(workspace: HookedWorkspace, agent: str, scope: str) -> None:
    before = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    done = workspace.mulligan("hooks", "install", agent, scope, "--json")
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert path.is_relative_to(workspace.home if scope == "--user" else workspace.root)
    states = json.loads(workspace.mulligan("hooks", "status", agent, "--json").stdout)["hooks"]
    assert {(one["scope"], one["state"]) for one in states} == {
        ("user", "installed" if scope == "--user" else "no"),
        ("project", "installed" if scope == "--project" else "no"),
    }
    assert workspace.mulligan("hooks", "uninstall", agent, scope).returncode == 0
    assert {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()} == before
    assert list(workspace.home.iterdir()) == []


def test_a_refusal_names_the_reason_and_exits_with_2(workspace: HookedWorkspace) -> None:
    (workspace.home / ".claude").mkdir()
    (workspace.home / ".claude" / "settings.json").write_text("{ nonsense")
    done = workspace.mulligan("hooks", "install", "claude")
    assert (done.returncode, done.stdout) == (2, "")
    assert "settings.json" in done.stderr


@pytest.mark.req("D14.hooks.status")
def test_status_works_where_no_store_can_be(workspace: HookedWorkspace) -> None:
    workspace.store.parent.mkdir(exist_ok=True)
    workspace.store.write_text("a file")
    body = json.loads(workspace.mulligan("hooks", "status", "claude", "--json").stdout)
    assert (body["process"], body["undelivered"], {one["state"] for one in body["hooks"]}) == (None, 0, {"no"})
