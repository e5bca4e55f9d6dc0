"""The official conformance suite against our HTTP stack. It needs Node and the suite in `.tools/mcp`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.mcp.server_process import listening

pytestmark = pytest.mark.hosts

HERE = Path(__file__).parent
BINARIES = HERE.parent.parent / ".tools/mcp/node_modules/.bin"
INSTALL = "make test-hosts installs it"
PATIENCE_MS = 600_000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("conformance")
    (folder / "root").mkdir()
    command = [sys.executable, "-m", "tests.hosts.mcp_conformance_server", str(folder / "root"), str(folder / "store")]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as process:
        try:
            yield listening(process).address
        finally:
            process.terminate()


@pytest.mark.req("D19.foreign_programs")
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
def test_every_scenario_for_a_server_of_tools_passes(address: str, revision: str, tmp_path: Path) -> None:
    assert (BINARIES / "conformance").exists(), f"the suite is missing: {INSTALL}"
    command = [
        *(str(BINARIES / "conformance"), "server", "--url", address, "--suite", "all", "--spec-version", revision),
        *("--timeout", str(PATIENCE_MS)),
        *("--expected-failures", str(HERE / "mcp_expected_failures.yml"), "--output-dir", str(tmp_path)),
    ]
    env = {**os.environ, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    failed = re.findall(r"^✗ .*$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, "\n".join([*failed, done.stdout[-2000:], done.stderr[-2000:]])
