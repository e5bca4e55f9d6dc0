"""A conversation that can be forked, undone together with its files, compacted, and sent to any model.

Run it anywhere: it works in a throw-away folder and asks no model.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mulligan


def turn(session: Any, prompt: str, file: str) -> None:
    """One prompt, one tool call, one answer."""
    with session.turn(prompt):
        session.inject({"role": "user", "content": prompt})
        ask = {"id": f"call-{file}", "type": "function", "function": {"name": "write", "arguments": "{}"}}
        session.inject({"role": "assistant", "content": None, "tool_calls": [ask]})
        with session.call("write", tool_call_id=f"call-{file}") as call:
            call.write_file(file, prompt + "\n")
        session.inject({"role": "tool", "tool_call_id": f"call-{file}", "content": "written"})
        session.inject({"role": "assistant", "content": f"{file} is there."})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        with mulligan.open(str(work), store=str(Path(folder) / "store")) as m:
            session = m.session("plan")
            heard: list[str] = []
            told = session.subscribe(lambda event: heard.append(event["kind"]))
            turn(session, "make a list", "list.txt")
            turn(session, "now a budget", "budget.txt")

            branch = session.fork(at=4)
            branch.inject({"role": "user", "content": "what if we made a map instead?"})
            print("the branch:     ", branch.length(), "messages, from", branch.ancestry().root_id)

            session.rollback()
            print("after rollback: ", session.length(), "messages,", sorted(p.name for p in work.iterdir()))
            session.redo()
            print("after redo:     ", session.length(), "messages,", sorted(p.name for p in work.iterdir()))

            session.trim(7)
            roles = [message["role"] for message in session.for_model("openai").messages]
            print("a model is sent:", roles)
            print("compacted to:   ", session.compact(keep_last=2), "messages")
            told.wait()
            print("told in order:  ", heard[:4], "and", len(heard) - 4, "more")


if __name__ == "__main__":
    main()
