"""What every test run does: close what a test left open, and say at the end how far the requirements are met."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benches import closing_all
from requirements import summary


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    with closing_all():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(summary())
