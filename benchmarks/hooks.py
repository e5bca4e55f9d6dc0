"""The cost of a hook: a pre-tool and a post-tool event with the background process running.

It takes turns with `python -c pass` of the same interpreter: both mostly start Python.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mulligan.hosts.settings import CLIENT

ROUNDS = 40
FILES = 500
LIMIT_MS = 40.0
LIMIT_RATIO = 2.5

PLAIN = [sys.executable, "-c", "pass"]
HOOK = [sys.executable, "-I", "-S", CLIENT, "claude"]


def event(name: str, root: Path, number: int, tool: str) -> bytes:
    body = {
        "session_id": "bench",
        "cwd": str(root),
        "hook_event_name": name,
        "prompt_id": "turn",
        "tool_name": tool,
        "tool_input": {"command": "true"} if tool == "Bash" else {"file_path": str(root / "f0.txt")},
        "tool_use_id": f"{tool}{number}",
    }
    return json.dumps(body).encode()


def timed_ms(command: list[str], given: bytes, env: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, input=given, env=env, check=True)
    return (time.perf_counter() - started) * 1000


def tree(folder: Path) -> Path:
    root = folder / "project"
    root.mkdir()
    for number in range(FILES):
        (root / f"f{number}.txt").write_text(f"line {number}\n" * 20)
    return root


def rounds(root: Path, env: dict[str, str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        for tool in ("Edit", "Bash"):
            found.setdefault("python -c pass", []).append(timed_ms(PLAIN, b"", env))
            pre = timed_ms(HOOK, event("PreToolUse", root, number, tool), env)
            (root / f"f{number % 7}.txt").write_text(f"{tool} {number}\n")
            post = timed_ms(HOOK, event("PostToolUse", root, number, tool), env)
            found.setdefault(f"{tool} pre-tool", []).append(pre)
            found.setdefault(f"{tool} post-tool", []).append(post)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = tree(Path(folder))
        env = {**os.environ, "MULLIGAN_HOME": str(Path(folder) / "store")}
        for name in ("SessionStart", "UserPromptSubmit"):
            timed_ms(HOOK, event(name, root, 0, "none"), env)
        found = rounds(root, env)
        subprocess.run(
            [sys.executable, "-m", "mulligan", "hooks", "uninstall", "claude", "--project", "--root", str(root)],
            env=env,
            check=True,
            capture_output=True,
        )
    plain = statistics.median(found["python -c pass"])
    print(f"{'median of ' + str(ROUNDS):<18}{'ms':>8}{'ratio':>8}")
    for name, values in found.items():
        median = statistics.median(values)
        verdict = (
            "" if name.startswith("python") or (median <= LIMIT_MS and median / plain <= LIMIT_RATIO) else "  OVER"
        )
        print(f"{name:<18}{median:>8.1f}{median / plain:>8.2f}{verdict}")


if __name__ == "__main__":
    main()
