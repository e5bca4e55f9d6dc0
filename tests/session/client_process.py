"""Another process at a session, started by tests.

`python client_child.py HOME ROOT controller NAME COUNT`  take over and prompt so many times, telling each attempt
`python client_child.py HOME ROOT watch NAME COUNT`       so many observers, each told everything until the end
`python client_child.py HOME ROOT beat NAME 0`            attach, then come and go and beat for ever, telling each act
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import mulligan
from mulligan.effects.session import DurableSession
from mulligan.values.errors import MulliganError

SESSION = "shared"


def tell(*words: object) -> None:
    print(json.dumps(words), flush=True)


def controller(session: DurableSession, name: str, count: int) -> None:
    """Take over, prompt, lose control, and again; a prompt that was refused was never appended."""
    tell("ready")
    sys.stdin.readline()
    for number in range(count):
        session.takeover(name)
        try:
            session.client_inject_prompt(name, f"{name} {number}")
            tell("said", f"{name} {number}")
        except MulliganError as error:
            tell("refused", error.code)


def watch(session: DurableSession, name: str, count: int) -> None:
    """What each observer was told, in one line at the end: the sequence numbers and the kinds."""
    told: list[list[Any]] = [[] for _ in range(count)]
    done = threading.Barrier(count + 1)

    def follow(mine: list[Any]) -> None:
        def hear(event: dict[str, Any]) -> None:
            mine.append((event["seq"], event["kind"], event["text"]))
            if event["text"] == "the end":
                done.wait(600)

        session.subscribe(hear, after=0)

    for number, mine in enumerate(told):
        session.attach(f"{name}{number}")
        follow(mine)
    tell("ready")
    done.wait(600)
    tell("heard", told)


def beat(session: DurableSession, name: str, _: int) -> None:
    number = 0
    while True:
        number += 1
        session.attach(name, mode="controller", takeover=True, metadata={"n": number})
        tell("attached", number)
        session.heartbeat(name, metadata={"n": number, "beat": True})
        tell("beat", number)
        session.client_inject_prompt(name, f"prompt {number}")
        tell("said", number)


def main() -> None:
    home, root, what, name, count = sys.argv[1:]
    with mulligan.open(root, store=home) as opened:
        {"controller": controller, "watch": watch, "beat": beat}[what](opened.session(SESSION), name, int(count))


if __name__ == "__main__":
    main()
