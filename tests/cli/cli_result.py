"""A command line that has run: what it said, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


def write(run: Run, path: str, content: str, *options: str) -> str:
    """The id of a call that wrote a file."""
    done = run("call", "write_file", "--args", json.dumps({"path": path, "content": content}), *options)
    assert done.code == 0, done
    return str(done.json["call_id"])
