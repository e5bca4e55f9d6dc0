"""What `mulligan hooks install` writes for each host, and what a hook then sends to the background process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

from mulligan.hosts.settings import CLIENT
from tests.agents.hooks.hooked_workspace import HookedWorkspace

HOSTS = ("claude", "codex", "gemini")
EVENT = {"session_id": "s1", "cwd": "/work", "hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {}}


def hook_frames(base: Path) -> str:
    return "".join(_settings(base / host, host) + _message(base / host, host) for host in HOSTS)


def _site(base: Path) -> HookedWorkspace:
    workspace = HookedWorkspace(base / "work", base / "home", base / "state")
    for folder in (workspace.root, workspace.home):
        folder.mkdir(parents=True, exist_ok=True)
    return workspace


def _settings(base: Path, host: str) -> str:
    """Each file that the installation made."""
    workspace = _site(base)
    done = workspace.mulligan("hooks", "install", host, "--store", str(workspace.store))
    assert done.returncode == 0, done.stderr
    made = sorted(path for path in workspace.home.rglob("*") if path.is_file())
    texts = [f"== {path.relative_to(workspace.home)}\n{path.read_text('utf-8')}\n" for path in made]
    steady = re.sub(r"[^\s\"']+ -I -S [^\s\"']+", "<python> -I -S <client>", "".join(texts))
    return steady.replace(str(base), "<base>")


def _message(base: Path, host: str) -> str:
    """The frame of one event: its length in eight bytes, a line of fields, and the host's own words."""
    workspace = _site(base)
    os.makedirs(workspace.folder, mode=0o700)
    for folder in (workspace.store, workspace.store / "hooks"):
        folder.chmod(0o700)
    frames: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(workspace.folder)
        try:
            listener.bind("keeper.sock")
        finally:
            os.chdir(before)
        os.chmod(os.path.join(workspace.folder, "keeper.sock"), 0o600)
        listener.listen()
        hearing = threading.Thread(target=lambda: frames.append(_heard(listener)))
        hearing.start()
        command = [sys.executable, "-I", "-S", CLIENT, host]
        subprocess.run(command, input=json.dumps(EVENT).encode(), env=workspace.env, check=True)
        hearing.join()
    size, text = int.from_bytes(frames[0][:8], "big"), frames[0][8:]
    assert size == len(text)
    return f"== frame of {host}\n" + re.sub(r"\d+ \d{19} (\d+)", r"<pid> <ns> \1", text.decode()) + "\n"


def _heard(listener: socket.socket) -> bytes:
    speaker, _ = listener.accept()
    with speaker:
        data = speaker.recv(8)
        while len(data) < 8 + int.from_bytes(data[:8], "big"):
            data += speaker.recv(1 << 16)
        speaker.sendall(b"0")
        return data
