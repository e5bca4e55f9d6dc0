"""The current call is a context variable, and contexts do not end when calls do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from benches import Bench
from mulligan import Plan
from mulligan.history.current import current_call, current_turn
from mulligan.session.active import current_id
from mulligan.testing import contents_of


def test_a_generator_that_others_close_ends_the_call_and_leaves_nothing_behind(bench: Bench) -> None:
    session = bench.session()

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
    assert contents_of(bench.root) == {"later.txt": b"x"} and session[Plan].all() == (Plan("later"),)
    assert session.rollback().ok and contents_of(bench.root) == {}


def test_a_task_that_outlives_the_call_it_was_started_in_works_for_itself(bench: Bench) -> None:
    session = bench.session()

    async def main() -> None:
        over = asyncio.Event()

        async def later() -> None:
            await over.wait()
            assert current_call() is None
            session.files.write("alone.txt", "x")
            with session.call() as call:
                assert call.write_file("own.txt", "x").ok
                session[Plan].append(Plan("later"))

        with session.call() as call:
            task = asyncio.create_task(later())
            call.fail("no good")
        over.set()
        await task

    asyncio.run(main())
    assert sorted(contents_of(bench.root)) == ["alone.txt", "own.txt"]
    assert session[Plan].all() == (Plan("later"),)
