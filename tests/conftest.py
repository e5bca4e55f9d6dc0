"""What every test run does: close what a test left open, and say at the end how far the requirements are met."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.requirements import summary
from tests.temp_workspace import closing_workspaces

# The contract suites are not test modules: without this, pytest does not show the values of their failed assertions.
pytest.register_assert_rewrite("tests.contracts")

# How long something takes is measured in `benchmarks`, and says nothing here: a machine may be busy.
settings.register_profile("mulligan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mulligan")

# Tests start many short processes, each with a store of its own; the tests of the background process turn it on.
os.environ["MULLIGAN_BACKGROUND"] = "off"


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    with closing_workspaces():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(summary())


# A shell starts a background job with SIGINT ignored, and programs that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
