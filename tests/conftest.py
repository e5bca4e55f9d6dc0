"""What every test run does: close what a test left open, and say at the end how far the requirements are met."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from benches import closing_all
from requirements import summary

# How long something takes is measured in `benchmarks`, and says nothing here: a machine may be busy.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    with closing_all():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(summary())
