"""Arguments of the wrong kind: the error says what is wrong, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import ExecutionState, MulliganError, Plan, Session, append_all


@pytest.fixture(params=["memory", "durable"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Without a type, so that a test can ask wrongly."""
    if request.param == "memory":
        yield Session()
        return
    with mulligan.open(tmp_path, store="memory:") as opened:
        yield opened.session("s")


def test_a_slice_that_is_named_by_text_is_refused(session: Any) -> None:
    with pytest.raises(MulliganError) as refused:
        session["Plan"]
    assert refused.value.code == "invalid_params"


@pytest.mark.parametrize(
    ("event", "reducer"),
    [(Plan, "x"), ("Plan", append_all)],
)
def test_a_reducer_that_is_no_function_and_an_event_that_is_no_class_are_refused(
    session: Any, event: Any, reducer: Any
) -> None:
    with pytest.raises(MulliganError) as refused:
        session[Plan].register(event, reducer)
    assert refused.value.code == "invalid_params"
    assert session.broadcast(Plan("tea")).errors == ()
    assert session[Plan].all() == (Plan("tea"),)


def test_a_class_is_no_event(session: Any) -> None:
    for send in (session.broadcast, session.dispatch):
        with pytest.raises(MulliganError) as refused:
            send(Plan)
        assert refused.value.code == "invalid_params"
    assert (session[Plan].all(), session[type].all()) == ((), ())


def test_a_run_on_the_name_of_a_session_is_refused() -> None:
    wrong: Any = "x"
    with pytest.raises(MulliganError) as refused:
        ExecutionState(session=wrong)
    assert refused.value.code == "invalid_params"
