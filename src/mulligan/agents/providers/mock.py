"""A model that says what its script says: for tests, demonstrations and dry runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from mulligan.agents.speech import Ask, Reply, Said
from mulligan.agents.tools import ProviderToolCall
from mulligan.values.faults import fault

Line: TypeAlias = str | Reply | Mapping[str, Any] | Callable[[Ask], "Line"]


class Mock:
    """One line of the script for each time it is asked.

    A text is said and ends the turn. `{"tool": NAME, "args": {…}}`, or a list of such under `"tools"`, asks for tools,
    with `"text"` said before. A function is given the request and returns a line. When the script is over, or without
    one, it repeats what the user said.
    """

    name = "mock"

    def __init__(self, script: Sequence[Line] = (), *, profile: str = "anthropic") -> None:
        self.profile = profile
        self.asked: list[Ask] = []
        self._script = list(script)
        self._lock = threading.RLock()

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """The next line of the script. What was asked is in `asked`."""
        with self._lock:
            number = len(self.asked)
            self.asked.append(ask)
        line = self._script[number] if number < len(self._script) else f"You said: {ask.prompt}"
        said = _read(line, ask, number)
        if said.text:
            yield Said(said.text)
        yield said


def _read(line: Line, ask: Ask, number: int) -> Reply:
    while callable(line):
        line = line(ask)
    if isinstance(line, Reply):
        return line
    words = len(str(ask.messages)) // 4
    if isinstance(line, str):
        return Reply(line, input_tokens=words, output_tokens=len(line) // 4 + 1)
    if not isinstance(line, Mapping) or not ({"tool", "tools", "text"} & line.keys()):
        raise fault("invalid_params", "A line of a script is a text, a Reply, or an object with tool, tools or text.")
    asked = line.get("tools") or ([line] if "tool" in line else [])
    calls = tuple(
        ProviderToolCall(one.get("id") or f"call_{number}_{at}", one["tool"], one.get("args", {}))
        for at, one in enumerate(asked)
    )
    return Reply(line.get("text", ""), calls, "tool_calls" if calls else "stop", words, 1)
