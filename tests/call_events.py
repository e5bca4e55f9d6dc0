"""Counts the calls of Mulligan's own functions in one warm request, and what it asks of SQLite. Run by tests in a
process of its own.

`python call_events.py write|undo|command`: prints the number of calls, of files that they are in, how often a store was
opened, and the numbers of transactions, of other statements, and of pages written to SQLite's log, as JSON. Imports are
left out: the third request is counted. Statements of other threads are, too.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, redirect_stdout
from types import FrameType

import apsw

import mulligan
from mulligan.cli import run

SOURCE = os.path.dirname(os.path.abspath(mulligan.__file__)) + os.sep
OPENED = (os.path.join("store", "sqlite.py"), "SqliteStore.__init__")


class Statements:
    """Counts the statements of one thread on every connection that is opened from now on."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        self._thread = threading.get_ident()
        apsw.connection_hooks.append(self._follow)

    def _follow(self, connection: apsw.Connection) -> None:
        connection.exec_trace = self._note

    def _note(self, _cursor: apsw.Cursor, sql: str, _values: object) -> bool:
        if self.seen is not None and threading.get_ident() == self._thread:
            self.seen.append(sql.split(maxsplit=1)[0])
        return True


STATEMENTS = Statements()


def log_pages() -> int:
    """The pages in the log of the store. A checkpoint may begin the log anew."""
    with closing(apsw.Connection(os.path.join(os.environ["MULLIGAN_HOME"], "store.db"))) as reader:
        # SQLite looks at the log only when it reads.
        reader.execute("SELECT 1 FROM sqlite_schema").fetchall()
        return max(0, reader.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0])


def counted(act: Callable[[], object]) -> dict[str, int]:
    calls: Counter[tuple[str, str]] = Counter()
    pages = log_pages()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE):
            calls[name[len(SOURCE) :], frame.f_code.co_qualname] += 1

    asked: list[str] = []
    STATEMENTS.seen = asked
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        STATEMENTS.seen = None
    return {
        "events": calls.total(),
        "files": len({file for file, _ in calls}),
        "stores_opened": calls[OPENED],
        "transactions": asked.count("BEGIN"),
        "statements": len(asked) - asked.count("BEGIN") - asked.count("COMMIT"),
        "pages": log_pages() - pages,
    }


def fewest(found: Iterable[dict[str, int]]) -> dict[str, int]:
    """Of several requests: the background thread of the store may have made one of them read rows again, and a page of
    an index may have become full in another.
    """
    all_of_them = list(found)
    least = min(all_of_them, key=lambda one: one["events"])
    return {**least, "pages": min(one["pages"] for one in all_of_them)}


def main(what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MULLIGAN_HOME"] = os.path.join(folder, "state")
        root = os.path.join(folder, "root")
        os.mkdir(root)
        with mulligan.open(root) as opened:
            session = opened.session("s")
            versions = iter(range(100))

            def write() -> None:
                with session.call("tool") as call:
                    call.write_file("a.txt", f"version {next(versions)}\n" * 50)

            for _ in range(5):
                write()
            if what == "write":
                print(json.dumps(fewest(counted(write) for _ in range(5))))
            if what == "undo":
                for _ in range(2):
                    session.undo()
                    write()
                found = list[dict[str, int]]()
                for _ in range(5):
                    write()
                    found.append(counted(session.undo))
                print(json.dumps(fewest(found)))
        if what == "command":
            os.chdir(root)
            with redirect_stdout(io.StringIO()):
                codes = [run(["undo", "--yes"]), run(["undo", "--yes"])]
                third = counted(lambda: codes.append(run(["undo", "--yes"])))
            os.chdir(folder)
            assert codes == [0, 0, 0], codes
            print(json.dumps(third))


if __name__ == "__main__":
    main(sys.argv[1])
