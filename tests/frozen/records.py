"""The bytes of journals and exports after one scripted session of work, with seeded ids and a stepping clock."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

import mulligan
from mulligan import DurableSession, Plan
from mulligan.testing import SeededIds, SteppingClock

# What differs from machine to machine: paths, directories' identities, times of files, the version that runs; and the
# hashes over them.
CHANCE = (
    (re.compile(r'"prev":"[^"]*"'), '"prev":"<hash>"'),
    (re.compile(r'"(bundle_id|head|hash|root_digest)": ?"[^"]*"'), r'"\1":"<hash>"'),
    (re.compile(r'"identity":"[^"]*"'), '"identity":"<identity>"'),
    (re.compile(r'"(mtime|mtime_ns|new_mtime_ns)":\d+'), r'"\1":0'),
    (re.compile(r"\b\d{19}\b"), "<ns>"),
    (re.compile(r'"host":"[^"]*"'), '"host":"<host>"'),
    (re.compile(r'"version":"[^"]*"'), '"version":"<version>"'),
)


@contextmanager
def worked(base: Path) -> Iterator[DurableSession]:
    """A session that wrote, edited, moved and deleted, failed, went back and forth, and talked."""
    root = base / "work"
    root.mkdir()
    (root / "old.txt").write_text("old\n")
    with mulligan.open(root, store=base / "home", clock=SteppingClock(), ids=SeededIds(7)) as product:
        session = product.session("frozen")
        session.inject({"role": "user", "content": "Please tidy up."})
        with session.call(tool_call_id="t1") as call:
            call.write_file("a.txt", "one\ntwo\n")
            call.edit_file("a.txt", "two", "three")
            session[Plan].append(Plan("tidy up"))
        with session.call(tool_call_id="t2") as call:
            call.move("old.txt", "new.txt")
            call.delete("a.txt")
        with session.call() as call:
            call.write_file("b.txt", "never")
            call.fail("it went wrong")
        session.undo("t2")
        session.redo()
        session.undo("t1", paths=["a.txt"])
        session.inject({"role": "assistant", "content": "Done."})
        session.fork().close()
        yield session


def journals(base: Path) -> str:
    with worked(base):
        pass
    connection = apsw.Connection(str(base / "home" / "store.db"), flags=apsw.SQLITE_OPEN_READONLY)
    rows: list[Any] = connection.execute(
        "SELECT journal, seq, body FROM records WHERE journal <> 'seals' ORDER BY ordinal"
    ).fetchall()
    connection.close()
    return _steady("".join(f"{journal} {seq} {bytes(body).decode()}\n" for journal, seq, body in rows), base)


def exports(base: Path) -> str:
    with worked(base) as session:
        modes = [("sanitized", None), ("local", True), ("replay_only", None)]
        documents = [session.export(mode, content=content) for mode, content in modes]
    return _steady("".join(json.dumps(document, indent=1, ensure_ascii=False) + "\n" for document in documents), base)


def _steady(text: str, base: Path) -> str:
    for pattern, instead in CHANCE:
        text = pattern.sub(instead, text)
    return text.replace(str(base), "<base>")
