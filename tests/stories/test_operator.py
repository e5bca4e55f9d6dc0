"""An operator looks after a machine on which agents work: crashes, checks, space and exports."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from tests.stories.user_project import MULLIGAN, UserProject


def test_the_next_command_rolls_back_a_command_that_was_killed(project: UserProject) -> None:
    before = project.files()
    script = "rm notes.txt; echo begun; read line"
    command = [*MULLIGAN, "exec", "--", "sh", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=project.root, env=project.env, stdin=pipe, stdout=pipe) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"begun\n"
        assert "notes.txt" not in project.files()
        os.kill(agent.pid, signal.SIGKILL)

    (row,) = project.json("log")
    assert row["status"] == "aborted"
    assert project.files() == before
    project.mulligan("verify")


def test_verify_finds_a_flipped_byte(project: UserProject) -> None:
    project.mulligan("exec", "--", "sh", "-c", "head -c 300000 /dev/urandom > large.bin")
    project.mulligan("verify")
    (body,) = [path for path in (project.state / "blobs").rglob("*") if path.is_file()]
    content = bytearray(body.read_bytes())
    content[len(content) // 2] ^= 1
    os.chmod(body, 0o600)
    body.write_bytes(content)
    project.mulligan("verify", code=3)


def test_an_export_for_sharing_holds_no_secret(project: UserProject) -> None:
    secret = "ghp_" + "a1B2c3D4e5" * 4
    project.mulligan("call", "write_file", "--args", json.dumps({"path": "a.txt", "content": f"token {secret}"}))
    document = project.mulligan("export", "default")
    assert '"redaction' in document
    assert secret not in document


def test_gc_gives_space_back_and_keeps_what_undo_needs(project: UserProject) -> None:
    before = project.files()
    project.mulligan("exec", "--", "sh", "-c", "rm -r src notes.txt")
    project.mulligan("gc", code=2)
    project.mulligan("gc", "--yes")
    project.mulligan("undo")
    assert project.files() == before
    assert project.json("du")
