"""Sessions to export, and what to look for in a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mulligan.api as api
from mulligan.effects.session import DurableSession
from tests.session.bundle.example_secrets import secrets

Json = dict[str, Any]
CORPUS = list(secrets(11))


def call_of(identifier: str, arguments: object) -> Json:
    return {"id": identifier, "type": "function", "function": {"name": "run", "arguments": json.dumps(arguments)}}


def talk(session: DurableSession, texts: list[str]) -> None:
    """Each text in a prompt, a tool's arguments and its output."""
    for number, text in enumerate(texts):
        session.inject({"role": "user", "content": text})
        calls = [call_of(f"c{number}", {"command": text, "env": {"NOTE": text}})]
        session.inject({"role": "assistant", "content": "On it.", "tool_calls": calls})
        session.inject({"role": "tool", "tool_call_id": f"c{number}", "content": f"$ run\n{text}\n"})


def full(session: DurableSession) -> None:
    """A session with a bit of everything."""
    session.set_system_prompt("Be careful with names.")
    talk(session, ["first", "second", "third"])
    with session.turn("do it"), session.call("write", tool_call_id="c1") as call:
        call.write_file("notes.txt", "plain words\n")
    session.set_scratchpad({"goals": ["ship"]})
    session.attach("tui", mode="controller")
    session.route_permission("tui", {"id": "p1", "tool": "rm"})


def section_of(bundle: Json) -> Json:
    found: Json = bundle["transcript"]["sections"][0]
    return found


def elsewhere(tmp_path: Path, name: str = "other") -> api.Mulligan:
    (tmp_path / name).mkdir()
    return api.open(str(tmp_path / name), store=str(tmp_path / f"{name}-home"))


def survivors(bundle: Json) -> list[str]:
    texts = texts_in(bundle)
    whole = "\n".join(texts) + json.dumps(bundle)
    return [one.kind for one in CORPUS if any(_is_in(part, whole) for part in one.parts)]


def _is_in(part: str, whole: str) -> bool:
    return part in whole or json.dumps(part)[1:-1] in whole


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *texts_in(item))]
    return [text for item in value for text in texts_in(item)] if isinstance(value, list) else []
