"""Values of `env`: no record, row, log or export holds one, and a durable session still has them in another process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.effects.replay_runner import ReplayRunner
from tests.state_search import files_holding

GIVEN = "given-to-exec-qXv81LmZr0"
OPENED = "given-to-open-Hb72KsWt5e"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def open_session(m: mulligan.Mulligan, **env: str) -> str:
    local = {"env": env}
    receipt, _ = m.session("opener").perform("host.session.open", {"target": {"local": local}})
    assert receipt.status == "ready"
    return str(receipt.session_id)


def printed(m: mulligan.Mulligan, session: str, words: str, **params: Any) -> Any:
    """What a command of the session prints, made so that the output is not the value itself."""
    receipt, _ = m.session(session).perform("host.exec", {"argv": ["sh", "-c", words], **params})
    return receipt


@pytest.mark.req("D18.env_values", "D18.secrets_in_journals")
def test_no_value_of_env_is_anywhere_in_the_state_directory_or_in_an_export(home: Path, tmp_path: Path) -> None:
    with mulligan.open(tmp_path / "work") as m:
        session = open_session(m, TOKEN=OPENED)
        count = 'printf %s "$TOKEN$KEY" | wc -c'
        assert int(printed(m, session, count, env={"KEY": GIVEN}).stdout["inline_text"]["text"]) == len(OPENED + GIVEN)
        printed(m, session, "true", env_patch={"KEY": GIVEN})
        printed(m, session, "true", env={"KEY": [GIVEN]})
        printed(m, session, "true", env=[GIVEN])
        printed(m, session, "true", env={f"KEY={GIVEN}": ""})
        printed(m, session, "exit 3", env={"KEY": GIVEN}, rollback_on="nonzero")
        printed(m, session, "true", env={"KEY": GIVEN}, background=True)
        child = m.session(session).fork()
        assert printed(m, child.id, 'test "$TOKEN" = ' + OPENED[:5] + "*").status == "ok"
    exports = [
        subprocess.run(
            [sys.executable, "-m", "mulligan", "export", session, "--mode", mode, "--root", str(tmp_path / "work")],
            capture_output=True,
            check=True,
        ).stdout
        for mode in ("sanitized", "local", "replay_only")
    ]
    for value in (GIVEN, OPENED):
        assert files_holding(home, value.encode()) == []
        assert [value.encode() in export for export in exports] == [False] * 3


@pytest.mark.req("D18.env_values")
def test_the_record_of_an_exec_names_the_variables_with_an_hmac_of_each_value(home: Path, tmp_path: Path) -> None:
    with mulligan.open(tmp_path / "work") as m:
        first, again, other = (
            printed(m, "s", "true", env={"KEY": value}) and _recorded_env(m) for value in (GIVEN, GIVEN, OPENED)
        )
    assert first.keys() == {"KEY"} and first["KEY"].startswith("hmac-sha256:")
    assert first == again != other


def _recorded_env(m: mulligan.Mulligan) -> dict[str, str]:
    with m.store.read() as tx:
        from mulligan.history.replay import steps_of
        from mulligan.values.ids import SessionId

        steps = [step for step in steps_of(tx, SessionId("s"), whole=True) if "did" in step]
    found: dict[str, str] = steps[-1]["params"]["env"]
    return found


@pytest.mark.req("D18.env_values")
def test_a_session_has_its_environment_in_another_process(home: Path, tmp_path: Path) -> None:
    with mulligan.open(tmp_path / "work") as m:
        session = open_session(m, TOKEN=OPENED)
    program = (
        "import mulligan, sys\n"
        "with mulligan.open(sys.argv[1]) as m:\n"
        "    argv = ['sh', '-c', 'printf %s \"$TOKEN\"']\n"
        "    print(m.session(sys.argv[2]).perform('host.exec', {'argv': argv})[0].stdout)"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "work"), session]
    assert OPENED in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert stat.S_IMODE(os.stat(home / "secret.key").st_mode) == 0o600


@pytest.mark.req("D18.env_lost")
@pytest.mark.parametrize("becomes", ["missing", "another"])
def test_without_its_key_a_session_answers_env_lost(home: Path, tmp_path: Path, becomes: str) -> None:
    with mulligan.open(tmp_path / "work") as m:
        session = open_session(m, TOKEN=OPENED)
        (home / "secret.key").unlink()
        if becomes == "another":
            open_session(m, TOKEN=OPENED)
        lost = printed(m, session, "true")
        assert (lost.status, lost.error_code, lost.names) == ("error", "env_lost", ["TOKEN"])
        written, _ = m.session(session).perform("host.fs.write_file", {"path": "a", "content": "a"})
        assert written.status == "ok"


@pytest.mark.req("D18.env_values")
def test_a_replay_with_another_value_diverges(home: Path, tmp_path: Path) -> None:
    with mulligan.open(tmp_path / "work") as m:
        printed(m, "s", "true", env={"KEY": GIVEN})
        runner = ReplayRunner(m.session("s"))
        argv = ["sh", "-c", "true"]
        assert runner.run(lambda s: s.perform("host.exec", {"argv": argv, "env": {"KEY": GIVEN}})) == 1
        with pytest.raises(mulligan.MulliganError) as diverged:
            runner.run(lambda s: s.perform("host.exec", {"argv": argv, "env": {"KEY": OPENED}}))
        assert OPENED not in diverged.value.message
