"""An agent as its hooks make it known: real hook processes, against a store and a root of their own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mulligan.agents.hooks.client import COMMANDS
from mulligan.agents.hooks.socket import ask_background, background_folder
from mulligan.hosts.settings import CLIENT

Body = dict[str, Any]


@dataclass
class HookedWorkspace:
    """A root, a store and a home, and hooks that run there."""

    root: Path
    home: Path
    store: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        # More patience than agents have: how busy this machine is shall not decide what a test sees.
        ours = {"HOME": str(self.home), "MULLIGAN_HOME": str(self.store), "MULLIGAN_HOOKS_WAIT_S": "4.5"}
        return {**kept, **ours, **self.extra}

    @property
    def folder(self) -> str:
        return background_folder(str(self.store), self.env)

    def hook(self, name: str, *, agent: str = "claude", **fields: Any) -> subprocess.CompletedProcess[bytes]:
        """Run the hook as an agent does. It always ends well."""
        given = json.dumps(event(self.root, name, **fields)).encode()
        done = subprocess.run(
            [sys.executable, "-I", "-S", CLIENT, agent], input=given, env=self.env, capture_output=True
        )
        assert (done.returncode, done.stdout) == (0, b"")
        return done

    def prompt(self, text: str, turn: str, *, agent: str = "claude", name: str = "UserPromptSubmit") -> Body | None:
        """What the prompt hook that `mulligan install` installs answers; None: nothing."""
        given = json.dumps(event(self.root, name, prompt=text, prompt_id=turn)).encode()
        command = [sys.executable, "-I", "-S", CLIENT, agent, str(self.store), COMMANDS]
        done = subprocess.run(command, input=given, env=self.env, capture_output=True)
        assert done.returncode == 0, done.stderr
        answer: Body | None = json.loads(done.stdout) if done.stdout else None
        return answer

    def typed(self, text: str, turn: str = "typed") -> str:
        """The text that Claude Code shows for a typed command."""
        answer = self.prompt(text, turn)
        assert answer is not None and answer["decision"] == "block", answer
        return str(answer["reason"])

    def news(self, turn: str) -> str | None:
        """What the model learns with the next prompt."""
        answer = self.prompt("go on", turn)
        return None if answer is None else str(answer["hookSpecificOutput"]["additionalContext"])

    def tool(self, tool: str, given: Mapping[str, Any], label: str | None, act: Any) -> None:
        """One tool call: told before, done, told after."""
        told: Body = {"tool_name": tool, "tool_input": dict(given), **({} if label is None else {"tool_use_id": label})}
        self.hook("PreToolUse", **told)
        act()
        self.hook("PostToolUse", **told)

    def mulligan(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mulligan", *words]
        return subprocess.run(command, cwd=self.root, env=self.env, capture_output=True, text=True)

    def log(self) -> list[Body]:
        """Newest first."""
        done = self.mulligan("log", "--json")
        assert done.returncode == 0, done.stderr
        rows: list[Body] = json.loads(done.stdout)
        return rows

    def undo(self, *words: str) -> None:
        done = self.mulligan("undo", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def keeper_pid(self) -> int | None:
        answer = ask_background(self.folder, b"status")
        return int(json.loads(answer)["pid"]) if answer else None

    def stop(self) -> None:
        """Nothing of ours runs on when this returns."""
        pid = self.keeper_pid()
        if pid is not None:
            with gone(pid):
                ask_background(self.folder, b"stop")


@contextmanager
def gone(pid: int) -> Iterator[None]:
    """Wait at the end of the block until the process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield
        return
    try:
        yield
        # Unlike `select`, `poll` takes descriptors over 1 023, which a process of many tests may have.
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        assert ended.poll(60_000), "it does not end"
    finally:
        os.close(handle)


def event(root: Path, name: str, **fields: Any) -> Body:
    return {"session_id": "s1", "prompt_id": "p1", "cwd": str(root), "hook_event_name": name, **fields}
