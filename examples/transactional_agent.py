"""An agent whose tools leave no trace when they fail: files and typed state go back together.

Run it anywhere: it works in a throw-away folder, with a model that follows a script.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mulligan
from mulligan import MainLoop, Plan, Tool, ToolContext, ToolInvoked
from mulligan.agents.providers.mock import Mock


def write(path: str, text: str, *, context: ToolContext) -> str:
    context.filesystem.write(path, text)
    context.session.broadcast(Plan(f"check {path}"))
    if "import os" in text:
        raise ValueError("not allowed to touch the system")
    return f"wrote {path}"


SCRIPT = [
    {"tool": "write", "args": {"path": "hello.py", "text": "print('hello')\n"}},
    {"tool": "write", "args": {"path": "hello.py", "text": "import os\n"}},
    "done",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        with mulligan.open(str(work), store=str(Path(folder) / "store")) as m:
            state = m.session("agent").execution_state()
            MainLoop(Mock(SCRIPT), tools=[Tool("write", "Write a file.", write)]).execute("Say hello.", state)
            print("the file: ", (work / "hello.py").read_text().strip())
            print("the plan: ", [plan.objective for plan in state.session[Plan].all()])
            print("the log:  ", [entry.result.success for entry in state.session[ToolInvoked].all()])
            state.session.rollback()
            print("rolled back: ", sorted(path.name for path in work.iterdir()), state.session[Plan].all())


if __name__ == "__main__":
    main()
