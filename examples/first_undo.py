"""A transaction, a failure without a trace, and an undo that keeps your own edit.

Run it anywhere: it works in a throw-away folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mulligan


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        with mulligan.open(str(work), store=str(Path(folder) / "store")) as m:
            session = m.session()
            with session.call("first") as call:
                call.write_file("todo.txt", "milk\nbread\neggs\n")

            try:
                with session.call("wrong") as call:
                    call.delete("todo.txt")
                    raise RuntimeError("the tool crashed")
            except RuntimeError:
                print("after the crash: ", (work / "todo.txt").read_text().split())

            with session.call("second") as call:
                call.edit_file("todo.txt", "milk", "oat milk")
            (work / "todo.txt").write_text("oat milk\nbread\neggs\nmy own line\n")
            session.undo("second")
            print("after the undo:  ", (work / "todo.txt").read_text().splitlines())


if __name__ == "__main__":
    main()
