"""A state directory that another user owns, or can write, is refused."""

from __future__ import annotations

import json

import pytest

from mulligan.cli import run
from tests.exec.unprivileged_user import run_as_nobody


@pytest.mark.req("D4.state_directory_owner")
def test_only_an_own_directory_that_no_other_user_can_write_is_used() -> None:
    refused = "untrusted_owner"
    assert json.loads(run_as_nobody("tests.exec.home_owners")) == {
        "own": "opened",
        "shared": refused,
        "public": refused,
        "foreign": refused,
        "left": [[], False],
        "hooks": [[0, "", "mulligan:"]] * 3,
        "accepted": [[], [], []],
        "trusted": "opened",
    }


@pytest.mark.req("D4.state_directory_owner")
def test_doctor_shows_that_other_owners_are_trusted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for value in ("1", "0"):
        monkeypatch.setenv("MULLIGAN_TRUST_OWNER", value)
        run(["doctor", "--json"])
        findings = json.loads(capfd.readouterr().out)["findings"]
        shown.append(any("MULLIGAN_TRUST_OWNER" in one["value"] for one in findings))
    assert shown == [True, False]
