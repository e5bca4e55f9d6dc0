"""What a tool's call leaves in the state and the log of a durable session, and who is told of it when."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import (
    DeadlineExceededError,
    EventBus,
    Plan,
    PromptEvaluationError,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession
from mulligan.history.log import calls_of
from mulligan.history.tables import CALLS
from mulligan.testing import contents_of, execute_tool
from tests.session.state.example_slices import Note


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


Ending = Callable[[], Any]


def fails() -> ToolResult[Plan]:
    return ToolResult("no", Plan("of the failed one"), success=False)


def raises(error: BaseException) -> Ending:
    def end() -> Any:
        raise error

    return end


BAD_ENDS = [
    pytest.param(fails, None, id="success=False"),
    pytest.param(raises(RuntimeError("boom")), None, id="exception"),
    pytest.param(raises(ToolValidationError("bad")), None, id="validation"),
    pytest.param(raises(VisibilityExpansionRequired("more")), VisibilityExpansionRequired, id="visibility"),
    pytest.param(raises(DeadlineExceededError("late")), PromptEvaluationError, id="deadline"),
    pytest.param(raises(asyncio.CancelledError()), asyncio.CancelledError, id="cancelled"),
    pytest.param(raises(KeyboardInterrupt()), KeyboardInterrupt, id="interrupt"),
]


def run(session: DurableSession, end: Ending, raised: type[BaseException] | None = None) -> None:
    """A tool that changes files and state, and then ends so."""

    def handler(context: ToolContext) -> Any:
        assert context.filesystem is not None
        context.filesystem.write("a.txt", "changed")
        context.session.broadcast(Plan("changed"))
        return end()

    tool: Tool[Any, Any] = Tool("tool", "Changes things.", handler)
    if raised is None:
        execute_tool(tool, session.execution_state())
        return
    with pytest.raises(raised):
        execute_tool(tool, session.execution_state())


@pytest.mark.req("D5.failed_value_not_in_state", "D5.tool_invoked_always", "D5.abort_on_visibility_expansion")
@pytest.mark.parametrize(("end", "raised"), BAD_ENDS)
def test_a_failed_call_is_in_the_log_once_and_its_value_in_no_state(
    opened: Mulligan, end: Ending, raised: type[BaseException] | None
) -> None:
    session = opened.session("s")
    session[Plan].seed(Plan("before"))
    run(session, end, raised)
    again = opened.session("s")
    assert again[Plan].all() == (Plan("before"),)
    assert [(entry.name, entry.result.success, entry.result.value) for entry in again[ToolInvoked].all()] == [
        ("tool", False, None)
    ]
    assert contents_of(opened.root) == {}


@pytest.mark.req("D5.tool_invoked_always")
def test_a_good_call_is_in_the_log_too_and_its_value_in_the_state(opened: Mulligan) -> None:
    session = opened.session("s")
    run(session, lambda: ToolResult("yes", Plan("value")))
    again = opened.session("s")
    assert again[Plan].all() == (Plan("changed"), Plan("value"))
    assert [entry.result.success for entry in again[ToolInvoked].all()] == [True]


class _Unwritable:
    """Cannot be copied, pickled or turned into anything."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("somebody serialises it")

    __deepcopy__ = __copy__ = __reduce_ex__


@pytest.mark.req("D5.slices_share_structure")
def test_a_call_takes_the_state_of_slices_without_reading_them() -> None:
    session, items = mulligan.Session(), [_Unwritable() for _ in range(100)]
    session[_Unwritable].seed(items)
    for fails_at_end in (False, True):
        try:
            with session.attempt("tool", str(fails_at_end)):
                session[Note].append(Note("beside"))
                if fails_at_end:
                    raise LookupError
        except LookupError:
            pass
        assert all(now is was for now, was in zip(session[_Unwritable].all(), items, strict=True))
    assert len(session[Note]) == 1


class TestTelling:
    """Events go out when all is published; whoever hears them can neither stop nor undo it."""

    @pytest.mark.req("D3.events_after_commit")
    def test_a_listener_finds_the_call_committed(self, opened: Mulligan) -> None:
        session, seen = opened.session("s"), list[tuple[str, dict[str, bytes], int]]()

        def look(event: ToolInvoked) -> None:
            with opened.open_root.ledger.store.read() as tx:
                row = next(calls_of(tx, opened.open_root, session.id))
            seen.append((row.status, contents_of(opened.root), len(opened.session("s")[ToolInvoked])))

        session.bus.subscribe(ToolInvoked, look)
        run(session, lambda: "fine")
        assert seen == [("committed", {"a.txt": b"changed"}, 1)]

    @pytest.mark.req("D3.events_after_commit")
    def test_while_a_call_is_open_listeners_hear_nothing_of_it(self, opened: Mulligan) -> None:
        session, heard = opened.session("s"), list[object]()
        session.bus.subscribe(object, heard.append)
        with session.call("work"):
            session.broadcast(Plan("not yet"))
            assert heard == []
        assert heard == [Plan("not yet")]

    @pytest.mark.req("S4.telemetry.best_effort", "S4.telemetry.logged")
    @pytest.mark.parametrize("broken", ["listener", "bus"])
    def test_a_failing_one_undoes_nothing_and_is_logged_with_its_traceback(
        self, opened: Mulligan, caplog: pytest.LogCaptureFixture, broken: str
    ) -> None:
        session = opened.session("s")
        if broken == "listener":
            session.bus.subscribe(ToolInvoked, lambda event: 1 / 0)
        else:
            session.bus = _DeadBus()
        with caplog.at_level(logging.WARNING, logger="mulligan.events"):
            run(session, lambda: ToolResult("yes", Plan("value")))
        with opened.open_root.ledger.store.read() as tx:
            assert [row.status for row in tx.select(CALLS)] == ["committed"]
        assert opened.session("s")[Plan].all() == (Plan("changed"), Plan("value"))
        assert contents_of(opened.root) == {"a.txt": b"changed"}
        warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert warnings and all(one.exc_info is not None for one in warnings)
        assert "ZeroDivisionError" in caplog.text and "Traceback" in caplog.text


class _DeadBus(EventBus):
    def publish(self, event: object) -> Any:
        return 1 / 0
