"""Calls of asyncio tasks: side by side, and cancelled in the middle of a command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import mulligan


async def draft(session: mulligan.DurableSession, name: str) -> str:
    async with session.call("draft") as call:  # each task has a call of its own
        await call.write_file(name, "first draft")
    return call.id


async def revise(session: mulligan.DurableSession, name: str) -> None:
    async with session.call("revise") as call:
        await call.write_file(name, "second draft")
        await call.exec(["sleep", "600"])  # the event loop goes on meanwhile


async def work(session: mulligan.DurableSession, root: Path) -> None:
    first, _ = await asyncio.gather(draft(session, "one.txt"), draft(session, "two.txt"))
    print("written side by side:", names(root))

    try:
        await asyncio.wait_for(revise(session, "one.txt"), timeout=0.5)
    except TimeoutError:  # the command was killed, and nothing of the call is left
        print(f"cancelled:            {names(root)}, {(root / 'one.txt').read_text()!r}")

    session.undo(first)
    print("undone:              ", names(root))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


with TemporaryDirectory() as place:
    root = Path(place, "work")
    root.mkdir()
    with mulligan.open(root, store=str(Path(place, "store"))) as m:
        asyncio.run(work(m.session(), root))
