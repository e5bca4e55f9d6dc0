"""Three ideas tried at once from one point: each in its own thread, with its own files; a test says which is best.

Run it anywhere: it works in a throw-away folder, with models that follow a script.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mulligan

IDEAS = ["n * n // 2", "n * (n + 1) // 2", "n + 1"]
TEST = "from total import total; print(sum(total(n) == sum(range(n + 1)) for n in range(100)))"


def explore(branch: mulligan.DurableSession, idea: str) -> int:
    """Let an agent write the function its way. How many of a hundred cases come out right is the score."""
    write = {"path": "total.py", "content": f"def total(n):\n    return {idea}\n"}
    mulligan.agent_loop("Add up the numbers to n.", session=branch, provider=[{"tool": "write_file", "args": write}])
    with branch.call("test") as call:
        return int(call.exec([sys.executable, "-c", TEST]).text or 0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        (work / "total.py").write_text("def total(n): ...\n")
        with mulligan.open(str(work), store=str(Path(folder) / "store")) as m:
            session = m.session("main")
            branches = [session.fork(files="copy") for _ in IDEAS]
            with ThreadPoolExecutor() as pool:
                scores = list(pool.map(explore, branches, IDEAS))
            print("scores:  ", scores)

            best = branches[scores.index(max(scores))]
            best.merge()
            for branch in branches:
                branch.drop()
            print("merged:  ", (work / "total.py").read_text().split("return ")[1].strip())

            session.undo()
            print("or not:  ", (work / "total.py").read_text().strip())


if __name__ == "__main__":
    main()
