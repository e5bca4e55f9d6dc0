"""Values as JSON and back, and what hostile JSON cannot do."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan import (
    CompositeSnapshot,
    MulliganError,
    Plan,
    RestoreFailedError,
    Session,
    SlicePolicy,
    Snapshot,
    SnapshotMismatchError,
    ToolInvoked,
    ToolValidationError,
    VisibilityExpansionRequired,
    WorkspaceDigest,
    register_type,
)
from mulligan.session.state.types import TYPES, Types
from mulligan.values.canonical import decode, encode
from tests.session.state.example_slices import Added, Count, Note, counting, invoked


class Colour(Enum):
    RED = 1
    BLUE = "blue"


@dataclass(slots=True, frozen=True)
class Inner:
    at: datetime
    colour: Colour


@dataclass(slots=True, frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    anything: Any = None
    derived: int = field(default=0, init=False)


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
PLAIN: tuple[Any, ...] = (
    None, True, 0, -1, 2**63 - 1, 2**100, 1.5, float("inf"), "", "ä", b"\0\xff", (), (1, (2,)), [], [1, [2]],
    {}, {"a": 1}, {"$": "int"}, {1: "a", (1, 2): "b"}, {1, 2}, frozenset({"a"}), NOON, date(2026, 1, 1),
    timedelta(days=-1, microseconds=3), UUID(int=7), Decimal("1.10"), PurePosixPath("a/b"), Colour.RED,
    Inner(NOON, Colour.BLUE), Outer((Inner(NOON, Colour.RED),), {"deep": [Plan("p")]}), Plan,
)  # fmt: skip

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.datetimes()
    | st.uuids() | st.timedeltas() | st.decimals(allow_nan=False) | st.sampled_from(Colour)
    | st.builds(Note, st.text()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    body = decode(encode(TYPES.to_json(value)))
    back = TYPES.from_json(body)
    assert (back, type(back)) == (value, type(value))


@given(VALUES)
def test_any_value_comes_back_as_it_was(value: object) -> None:
    assert TYPES.from_json(decode(encode(TYPES.to_json(value)))) == value


@pytest.mark.parametrize("value", [object(), lambda: 0, open, {object(): 1}])
def test_a_value_without_a_json_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        TYPES.to_json(value)


def test_a_registered_type_brings_the_types_of_its_fields() -> None:
    types = Types()
    types.register(Outer, "outer")
    made = types.from_json({"$": "outer", "v": {"inner": {"$": "tuple", "v": []}, "anything": None}})
    assert made == Outer(())
    assert types.knows(f"{__name__}:Inner") and types.knows(f"{__name__}:Colour")


def test_a_name_of_ones_own_outlives_the_class() -> None:
    types = Types()
    types.register(Note, "note")
    stored = types.to_json(Note("a"))
    assert stored == {"$": "note", "v": {"text": "a"}}


HOSTILE = (
    {"$": "os:system", "v": {"command": "touch /tmp/owned"}},
    {"$": "subprocess:Popen", "v": {"args": ["true"]}},
    {"$": "builtins:eval", "v": "1"},
    {"$": "mulligan.files.filesystems:HostFilesystem", "v": {"_root": "/"}},
    {"$": "mulligan:Filesystem", "v": {}},
    {"$": "type", "v": "os:system"},
    {"$": "mulligan:Plan", "v": {"objective": "x", "no_such_field": 1}},
    {"$": "mulligan:Plan", "v": ["x"]},
    {"$": "mulligan:Plan", "v": {}},
    {"$": "bytes", "v": "not base64!"},
    {"$": "uuid", "v": 3},
    {"$": "timedelta", "v": [10**30]},
    {"$": "int", "v": "x"},
    {"$": ["a"], "v": 1},
    {"$": None},
)


@pytest.mark.req("D12.types_by_registry", "D18.json_types")
@pytest.mark.parametrize("body", HOSTILE, ids=repr)
def test_json_never_makes_mulligan_import_or_create_anything(body: dict[str, Any]) -> None:
    raw = json.dumps(_snapshot_of(body))
    before = set(sys.modules)
    with pytest.raises(SnapshotMismatchError):
        Snapshot.from_json(raw)
    assert set(sys.modules) - before == set()


def _snapshot_of(item: object) -> dict[str, Any]:
    session = Session()
    session[Plan].seed(Plan("x"))
    body = session.snapshot().to_body()
    body["slices"][0]["items"] = [item]
    return body


@pytest.mark.req("D12.types_by_registry")
def test_a_type_that_this_process_never_used_is_unknown_to_it() -> None:
    session = counting(Session())
    session.dispatch(Added())
    raw = session.snapshot().to_json()
    code = (
        "import sys, mulligan\n"
        "try:\n    mulligan.Snapshot.from_json(sys.stdin.read())\n"
        "except mulligan.SnapshotMismatchError:\n    print('unknown', 'tests' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=raw, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "unknown False\n"


BROKEN = ("", "no json", "[]", "3", "{}", '{"version":"2"}', '{"version":"1","slices":3}', "[" * 2000, '{"a":' * 2000)


@pytest.mark.parametrize("raw", BROKEN)
def test_text_that_is_no_snapshot_raises_snapshot_mismatch(raw: str) -> None:
    for kind in (Snapshot, CompositeSnapshot):
        with pytest.raises(SnapshotMismatchError):
            kind.from_json(raw)


@given(st.data())
def test_broken_pieces_of_a_real_snapshot_never_raise_anything_else(data: st.DataObject) -> None:
    body = _snapshot_of({"$": "mulligan:Plan", "v": {"objective": "x"}})
    name = data.draw(st.sampled_from(sorted(body)))
    body[name] = data.draw(st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2))
    with suppress(SnapshotMismatchError):
        Snapshot.from_json(json.dumps(body))


@pytest.mark.req("S4.session.snapshot_json")
def test_a_snapshot_comes_back_with_its_policies() -> None:
    session = counting(Session(tags={"a": "b"}))
    session.dispatch(Added(3))
    session[Plan].seed(Plan("x"))
    session[ToolInvoked].append(invoked())
    session[WorkspaceDigest].append(WorkspaceDigest("k", "b"))
    taken = session.snapshot(include_all=True)
    back = Snapshot.from_json(taken.to_json())
    assert back == taken
    assert back.policies[ToolInvoked] is SlicePolicy.LOG
    other = counting(Session())
    other.rollback(back)
    assert (other[Count].all(), other[Plan].all(), len(other[ToolInvoked])) == ((Count(3),), (Plan("x"),), 0)


def test_an_item_without_a_form_makes_no_json() -> None:
    @dataclass(slots=True, frozen=True)
    class Odd:
        thing: object

    session = Session()
    session[Odd].append(Odd(object()))
    taken = session.snapshot()
    with pytest.raises(SnapshotMismatchError):
        taken.to_json()
    session.rollback(taken)


@pytest.mark.req(
    "S4.error.execution_state_error",
    "S4.error.restore_failed",
    "D12.name.mulligan_error",
    "D12.name.execution_state_error",
    "D12.name.restore_failed_error",
    "D12.name.tool_validation_error",
    "D12.name.deadline_exceeded_error",
)
def test_the_exceptions_are_one_family_made_from_a_message() -> None:
    from mulligan import DeadlineExceededError, ExecutionStateError, PromptEvaluationError

    assert issubclass(SnapshotMismatchError, ExecutionStateError) and issubclass(
        RestoreFailedError, ExecutionStateError
    )
    assert issubclass(ExecutionStateError, MulliganError) and issubclass(ExecutionStateError, RuntimeError)
    assert issubclass(ToolValidationError, ValueError)
    for kind in (ToolValidationError, VisibilityExpansionRequired, DeadlineExceededError, PromptEvaluationError):
        error = kind("words", extra=1)
        assert isinstance(error, MulliganError)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.details) == (kind, "words", {"extra": 1})


def test_register_type_is_a_decorator_too() -> None:
    @register_type
    @dataclass(slots=True, frozen=True)
    class Local:
        x: int = 1

    assert TYPES.from_json(TYPES.to_json(Local(2))) == Local(2)
