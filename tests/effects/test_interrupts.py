"""What comes between: an interrupt at any line of a call, a fork inside one, calls side by side in one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mulligan.effects.handle import CallHandle
from mulligan.effects.session import DurableSession
from mulligan.testing import as_tree
from mulligan.values.errors import MulliganError
from tests.effects.effect_session import EffectSession
from tests.history.killed_process import in_child


def write(effects: EffectSession, content: str) -> None:
    with effects.session.call() as call:
        assert call.write_file("a", content).ok


def test_a_forked_childs_write_is_its_own_call(effects: EffectSession) -> None:
    session = effects.session

    def child() -> int:
        with pytest.raises(MulliganError) as refused:
            call.write_file("b", "in the parent's")
        session.files.write("c", "of the child")
        return 0 if refused.value.code == "call_not_open" else 1

    with session.call("outer") as call:
        call.write_file("a", "of the parent")
        assert in_child(child) == 0
    assert sorted(os.listdir(effects.root)) == ["a", "c"]
    session.undo()
    session.undo()
    assert os.listdir(effects.root) == []
    write(effects, "again")


class Beside:
    """Two nested calls side by side: the first acts, then the second, then the first ends and then the second."""

    def __init__(self, session: DurableSession) -> None:
        self._session = session

    def run(self, first: Callable[[CallHandle], object], second: Callable[[CallHandle], object]) -> None:
        asyncio.run(self._both(first, second))

    async def _both(self, first: Callable[[CallHandle], object], second: Callable[[CallHandle], object]) -> None:
        acted, ended = (asyncio.Event(), asyncio.Event()), asyncio.Event()

        async def one() -> None:
            with self._session.call("one") as call:
                first(call)
                acted[0].set()
                await acted[1].wait()
            ended.set()

        async def two() -> None:
            await acted[0].wait()
            with self._session.call("two") as call:
                second(call)
                acted[1].set()
                await ended.wait()

        await asyncio.gather(one(), two())


def failing(act: Callable[[CallHandle], object]) -> Callable[[CallHandle], object]:
    def both(call: CallHandle) -> None:
        act(call)
        call.fail("it went wrong")

    return both


def writing(**files: str) -> Callable[[CallHandle], object]:
    return lambda call: [call.write_file(path, content, create_parents=True) for path, content in files.items()]


def test_parallel_nested_calls_fail_alone(effects: EffectSession) -> None:
    with effects.session.call("outer") as outer:
        Beside(effects.session).run(failing(writing(bad="1", shared="bad")), writing(good="1", shared="good"))
    assert effects.tree() == as_tree({"good": "1", "shared": "good"})
    assert outer.conflicts == ["shared"]
    effects.session.undo(outer.id)
    assert os.listdir(effects.root) == []


def test_parallel_nested_calls_that_fail_leave_no_changes(effects: EffectSession) -> None:
    effects.plant({"f": "before"})
    with effects.session.call("outer"):
        Beside(effects.session).run(failing(writing(f="one")), failing(writing(f="two")))
        Beside(effects.session).run(failing(lambda call: call.mkdir("d")), failing(writing(**{"d/x": "two"})))
    assert effects.tree() == as_tree({"f": "before"})


def test_if_the_outer_call_fails_its_parallel_parts_are_undone(effects: EffectSession) -> None:
    effects.plant({"f": "before"})
    with effects.session.call("outer") as outer:
        Beside(effects.session).run(failing(writing(f="one", **{"d/x": "one"})), writing(f="two", **{"d/y": "two"}))
        outer.fail("all of it")
    assert effects.tree() == as_tree({"f": "before"})


def test_changes_of_a_thread_in_a_nested_call_fail_with_it(effects: EffectSession) -> None:
    with effects.session.call("outer"), ThreadPoolExecutor(1) as pool, effects.session.call("inner") as inner:
        pool.submit(inner.write_file, "f", "1").result()
        pool.submit(inner.exec, ["sh", "-c", "echo x > g"]).result()
        inner.fail("it went wrong")
    assert os.listdir(effects.root) == []


def test_a_forked_child_that_leaves_a_nested_call_undoes_nothing(effects: EffectSession) -> None:
    session = effects.session

    def child() -> int:
        with pytest.raises(MulliganError):
            outer.exec(["true"])
        nested.__exit__(SystemExit, SystemExit(0), None)
        return 0

    with session.call("outer") as outer:
        nested = session.call("inner")
        with nested:
            nested.write_file("a", "of the parent")
            assert in_child(child) == 0
    assert effects.bytes_of("a") == b"of the parent"


def test_an_older_call_waits_for_a_younger_one_that_another_thread_ends(effects: EffectSession) -> None:
    def end(_: float) -> None:
        younger.__exit__(None, None, None)

    older, younger = effects.session.call("older"), effects.session.call("younger")
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch, older as early:
        younger.__enter__()
        younger.write_file("a", "1")
        patch.setattr("mulligan.history.file_changes.time.sleep", end)
        assert pool.submit(early.write_file, "a", "2").result().ok


def test_a_thread_does_not_wait_for_a_younger_call_that_it_holds_itself(effects: EffectSession) -> None:
    older, younger = effects.session.call("older"), effects.session.call("younger")
    with younger as late:
        late.write_file("a", "1")
        asked: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mulligan.history.file_changes.time.sleep", asked.append)
            with older as early:
                assert early.write_file("a", "2").error_code == "path_claimed"
    assert asked == []
