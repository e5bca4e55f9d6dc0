"""The one thing every test run says at its end: how far the requirements are met."""

from __future__ import annotations

import pytest

from requirements import summary


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(summary())
