"""The current call is a context variable, and contexts do not end when calls do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from mulligan import MulliganError, Plan
from mulligan.history.call import current_call, current_turn
from mulligan.session.subscribers import current_id
from mulligan.testing import contents_of
from tests.temp_workspace import TempWorkspace


def test_a_generator_that_others_close_ends_the_call_and_leaves_nothing_behind(workspace: TempWorkspace) -> None:
    session = workspace.session()

    async def steps() -> AsyncGenerator[None, None]:
        with session.turn(), session.call() as call:
            assert call.write_file("half.txt", "x").ok
            yield
            yield

    async def main() -> None:
        generator = steps()
        async for _ in generator:
            break
        # In a context of its own, as the event loop does it for a generator that is not closed by hand.
        await asyncio.create_task(generator.aclose())
        assert (current_call(), current_turn(), current_id()) == (None, None, None)
        with session.call() as call:
            assert call.write_file("later.txt", "x").ok
            session[Plan].append(Plan("later"))

    asyncio.run(main())
    assert contents_of(workspace.root) == {"later.txt": b"x"} and session[Plan].all() == (Plan("later"),)
    assert session.rollback().ok and contents_of(workspace.root) == {}


def test_a_task_that_outlives_a_committed_call_works_for_itself_and_one_of_a_failed_call_is_refused(
    workspace: TempWorkspace,
) -> None:
    session = workspace.session()

    async def main(fails: bool) -> list[str]:
        over, told = asyncio.Event(), list[str]()

        def write() -> None:
            with session.call() as call:
                assert call.write_file("own.txt", "x").ok

        async def later() -> None:
            await over.wait()
            assert current_call() is None
            acts = (lambda: session.files.write("alone.txt", "x"), write, lambda: session[Plan].append(Plan("late")))
            for act in acts:
                try:
                    act()
                    told.append("done")
                except MulliganError as error:
                    told.append(error.code)

        with session.call() as call:
            task = asyncio.create_task(later())
            if fails:
                call.fail("no good")
        over.set()
        await task
        return told

    assert asyncio.run(main(True)) == ["call_not_open"] * 3
    assert (contents_of(workspace.root), session[Plan].all()) == ({}, ())
    assert asyncio.run(main(False)) == ["done"] * 3
    assert sorted(contents_of(workspace.root)) == ["alone.txt", "own.txt"]
    assert session[Plan].all() == (Plan("late"),)
