"""`async with session.call()`: every effect of a call, awaited, and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.effects.handle import AsyncCallHandle, Effects
from mulligan.effects.registry import EFFECTS
from mulligan.history.log import calls_of
from mulligan.testing import FaultPlan, contents_of
from mulligan.values.errors import MulliganError
from mulligan.values.paths import RepoPath
from tests.effects.effect_session import EffectSession, open_effect_session

WAIT_S = 120
PATCH = "*** Begin Patch\n*** Add File: n\n+x\n*** End Patch"
STEPS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("mkdir", ["d/e"], {"parents": True}),
    ("write_file", ["d/a", "one\n"], {}),
    ("write_file", ["d/bin", b"\xff"], {}),
    ("edit_file", ["d/a", "one", "two"], {}),
    ("apply_patch", [PATCH], {}),
    ("read_file", ["d/a"], {"max_bytes": 3}),
    ("read_file", ["missing"], {}),
    ("grep", ["two"], {}),
    ("glob", ["*"], {}),
    ("stat", ["d"], {}),
    ("exists", ["no"], {}),
    ("list_dir", ["d"], {}),
    ("move", ["n", "m"], {}),
    ("delete", ["d/e"], {}),
    ("exec", [["sh", "-c", "echo out; echo more > made"]], {}),
    ("exec", [["sh", "-c", "echo x > gone; exit 3"]], {"rollback_on": "nonzero"}),
    ("read_blob", ["sha256:" + "0" * 64], {}),
    ("perform", ["host.shell"], {"command": "echo shell"}),
    ("perform", ["host.exec.output"], {"call_id": "none"}),
    ("perform", ["host.exec.signal"], {"call_id": "none", "signal": "term"}),
]
VARYING = {"new_mtime_ns", "mtime_ns", "started_at_ns", "ended_at_ns"}


def _same_in_every_run(receipt: mulligan.Receipt) -> dict[str, Any]:
    return {name: value for name, value in receipt.to_dict().items() if name not in VARYING}


def _statuses(effects: EffectSession) -> list[str]:
    with effects.workspace.open_root.ledger.store.read() as tx:
        return [row.status for row in calls_of(tx, effects.workspace.open_root, None)]


async def _until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_S)


async def _until_there(path: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while not path.exists():
            await asyncio.sleep(0.01)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.req("D12.async_every_effect")
def test_every_effect_gives_the_same_receipt_in_both_forms(tmp_path: Path) -> None:
    here, there = open_effect_session(tmp_path / "sync"), open_effect_session(tmp_path / "async")

    async def awaited() -> list[mulligan.Receipt]:
        async with there.session.call("all") as call:
            return [await getattr(call, name)(*args, **params) for name, args, params in STEPS]

    with here.session.call("all") as call:
        receipts = [getattr(call, name)(*args, **params) for name, args, params in STEPS]
    again = asyncio.run(awaited())
    assert {receipt.effect for receipt in receipts} == {effect.name for effect in EFFECTS}
    assert [_same_in_every_run(one) for one in again] == [_same_in_every_run(one) for one in receipts]
    assert contents_of(there.root) == contents_of(here.root) != {}
    here.workspace.close()
    there.workspace.close()


@pytest.mark.req("D12.async_every_effect")
def test_the_async_form_has_each_method_of_the_sync_one_with_its_signature() -> None:
    effects = {name for name, value in vars(Effects).items() if inspect.isfunction(value) and name[0] != "_"}
    assert effects == {name for name in effects if inspect.iscoroutinefunction(getattr(AsyncCallHandle, name, None))}
    for name in effects:
        theirs, ours = getattr(AsyncCallHandle, name), getattr(Effects, name)
        assert inspect.signature(theirs) == inspect.signature(ours)
        assert theirs.__doc__ == ours.__doc__


@pytest.mark.req("D12.async_loop_runs_on")
def test_the_event_loop_runs_while_a_command_does(effects: EffectSession) -> None:
    async def main() -> None:
        async with effects.session.call() as call:
            running = asyncio.create_task(call.exec(["sh", "-c", "touch begun; until [ -e go ]; do sleep 0.01; done"]))
            await _until_there(effects.root / "begun")
            (effects.root / "go").touch()
            assert (await running).exit_code == 0

    asyncio.run(main())


def test_an_event_loop_runs_more_commands_at_once_than_the_machine_has_cores(effects: EffectSession) -> None:
    async def command(number: int) -> None:
        async with effects.session.call() as call:
            line = f"touch {number}; until [ -e go ]; do sleep 0.05; done"
            assert (await call.exec(["sh", "-c", line])).exit_code == 0

    async def main() -> None:
        running = [asyncio.create_task(command(number)) for number in range(16)]
        for number in range(16):
            await _until_there(effects.root / str(number))
        async with effects.session.call() as call:
            await call.write_file("go", "")
        await asyncio.gather(*running)

    asyncio.run(main())
    assert _statuses(effects) == ["committed"] * 17


@pytest.mark.req("D12.async_cancellation_aborts", "D5.abort_on_cancellation")
def test_cancelling_a_command_kills_it_and_aborts_the_call(effects: EffectSession) -> None:
    pids = effects.root.parent / "pids"

    async def tool() -> None:
        async with effects.session.call() as call:
            await call.write_file("before", "x")
            await call.exec(
                ["sh", "-c", f"echo x > made; sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"]
            )

    async def main() -> None:
        task = asyncio.create_task(tool())
        await _until_there(pids)
        await _cancelled(task)

    asyncio.run(main())
    assert contents_of(effects.root) == {}
    assert _statuses(effects) == ["aborted"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.read_text().split())


@pytest.mark.req("D12.async_cancellation_aborts", "D5.abort_on_cancellation")
@pytest.mark.parametrize("at", range(1, 5))
def test_cancelling_during_a_write_aborts_the_call(tmp_path: Path, at: int) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(step: str, path: RepoPath) -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    effects = open_effect_session(tmp_path, steps=FaultPlan().act(wait, at=at))
    effects.plant({"a": "old"})

    async def tool() -> None:
        async with effects.session.call() as call:
            await call.write_file("a", "new")
            await call.write_file("deep/b", "new", create_parents=True)

    async def main() -> None:
        task = asyncio.create_task(tool())
        await _until(reached)
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done(), "the task waits until the thread no longer acts on files"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert contents_of(effects.root) == {"a": b"old"}
    assert _statuses(effects) == ["aborted"]
    effects.workspace.close()


@pytest.mark.req("D12.async_cancellation_aborts")
def test_a_call_whose_cancelled_effect_was_caught_still_aborts(effects: EffectSession) -> None:
    async def main() -> None:
        with pytest.raises(MulliganError) as at_the_end:
            async with effects.session.call() as call:
                await call.write_file("a", "x")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call.exec(["sleep", "600"]), 0.05)
                with pytest.raises(MulliganError) as later:
                    await call.write_file("b", "x")
                assert later.value.code == "call_not_open"
        assert at_the_end.value.code == "call_not_open"

    asyncio.run(main())
    assert contents_of(effects.root) == {}
    assert _statuses(effects) == ["aborted"]


@pytest.mark.req("D12.async_nested")
def test_nested_async_calls_are_parts_that_fail_alone_and_commit_together(effects: EffectSession) -> None:
    async def main() -> None:
        async with effects.session.call("outer") as outer:
            await outer.write_file("a", "1")
            async with effects.session.call("inner") as inner:
                await inner.write_file("b", "2")
                assert inner.id == outer.id
            assert inner.is_committed and outer.status == "open"
            with pytest.raises(LookupError):
                async with effects.session.call("failing") as failing:
                    await failing.write_file("a", "3")
                    await failing.exec(["sh", "-c", "echo x > c"])
                    raise LookupError
            with effects.session.call("sync") as sync:
                sync.write_file("d", "4")
        assert outer.status == "committed"

    asyncio.run(main())
    assert contents_of(effects.root) == {"a": b"1", "b": b"2", "d": b"4"}
    assert _statuses(effects) == ["committed"]


@pytest.mark.req("D12.async_nested")
def test_cancelling_the_inner_call_keeps_the_work_of_the_outer_call(effects: EffectSession) -> None:
    async def inner() -> None:
        async with effects.session.call("inner") as call:
            await call.write_file("b", "2")
            await call.exec(["sh", "-c", "touch begun; sleep 600"])

    async def main() -> None:
        async with effects.session.call("outer") as outer:
            await outer.write_file("a", "1")
            task = asyncio.create_task(inner())
            await _until_there(effects.root / "begun")
            await _cancelled(task)

    asyncio.run(main())
    assert contents_of(effects.root) == {"a": b"1"}
    assert _statuses(effects) == ["committed"]


def test_calls_of_two_tasks_are_separate(effects: EffectSession) -> None:
    async def tool(name: str, fails: bool) -> None:
        async with effects.session.call(name) as call:
            await asyncio.gather(*(call.write_file(f"{name}{number}", name) for number in range(4)))
            if fails:
                call.fail("not this one")

    async def main() -> None:
        await asyncio.gather(tool("a", False), tool("b", True))

    asyncio.run(main())
    assert contents_of(effects.root) == {f"a{number}": b"a" for number in range(4)}
    assert sorted(_statuses(effects)) == ["aborted", "committed"]


def test_an_effect_still_running_when_its_block_fails_is_stopped_and_undone(effects: EffectSession) -> None:
    async def failing() -> None:
        await _until_there(effects.root / "begun")
        raise LookupError

    async def main() -> None:
        with pytest.raises(LookupError):
            async with effects.session.call() as call:
                await asyncio.gather(call.exec(["sh", "-c", "touch begun; sleep 600"]), failing())

    asyncio.run(main())
    assert contents_of(effects.root) == {}
    assert _statuses(effects) == ["aborted"]


def test_an_effect_that_its_block_does_not_await_is_part_of_the_call(effects: EffectSession) -> None:
    async def main() -> None:
        async with effects.session.call() as call:
            started = asyncio.create_task(call.write_file("a", "x"))
            await asyncio.sleep(0)
        assert (await started).ok

    asyncio.run(main())
    assert contents_of(effects.root) == {"a": b"x"}


def test_undo_takes_the_handle_of_an_async_call(effects: EffectSession) -> None:
    async def main() -> AsyncCallHandle:
        async with effects.session.call() as call:
            await call.write_file("a", "x")
        return call

    effects.session.undo(asyncio.run(main()))
    assert contents_of(effects.root) == {}


def test_a_program_with_async_calls_is_replayed(effects: EffectSession) -> None:
    async def main(session: Any) -> None:
        async with session.call("write") as call:
            await call.write_file("a", "x")
            assert (await call.read_file("a")).text == "x"

    def program(session: Any) -> None:
        coroutine: Coroutine[Any, Any, None] = main(session)
        asyncio.run(coroutine)

    program(effects.session)
    assert mulligan.ReplayRunner(effects.session).run(program) == 2


def test_a_call_is_entered_once_sync_or_async(effects: EffectSession) -> None:
    async def main() -> None:
        call = effects.session.call()
        async with call as inside:
            await inside.write_file("a", "x")
        with pytest.raises(MulliganError) as again:
            async with call:
                pass
        with pytest.raises(MulliganError) as later:
            await inside.write_file("a", "x")
        assert (again.value.code, later.value.code) == ("call_not_open", "call_not_open")

    asyncio.run(main())
