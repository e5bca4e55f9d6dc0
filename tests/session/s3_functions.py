"""Talking through S3's own functions, and looking at what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mulligan import builtins as b
from mulligan.values.errors import MulliganError


def say(session: str, *texts: str) -> None:
    for number, text in enumerate(texts):
        b.agent_session_inject(session, {"role": "assistant" if number % 2 else "user", "content": text})


def contents(session: str) -> list[str]:
    found = b.agent_session_snapshot(session)
    assert found is not None
    return [message["content"] for message in found["messages"]]


def snapshot(session: str) -> dict[str, Any]:
    found = b.agent_session_snapshot(session)
    assert found is not None
    return found


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(MulliganError) as caught:
        act()
    return caught.value.code
