"""The prompt behind a tool call, from the agent's own record of the conversation: one JSON document a line.

Only read, and only as far as the call. What cannot be made sense of is passed over: the format is the agent's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.values.canonical import decode
from mulligan.values.faults import MulliganError

_LINE_MAX = 16 * 1024 * 1024


def prompt_before(path: str, label: str) -> str | None:
    """What the person had last said when the call with that label was made; None if that is not to be found."""
    said: str | None = None
    try:
        with open(path, "rb") as file:
            while line := file.readline(_LINE_MAX):
                body = _document(line)
                said = _said(body) or said
                if label.encode() in line and not _said(body):
                    return said
    except OSError:
        return None
    return None


def _document(line: bytes) -> Mapping[str, Any]:
    try:
        body = decode(line)
    except MulliganError:
        return {}
    return body if isinstance(body, dict) else {}


def _said(body: Mapping[str, Any]) -> str | None:
    """What a person says in this line, if it is such a line."""
    payload = body.get("payload")
    if isinstance(payload, dict):
        said = _text(payload.get("content")) if payload.get("role") == "user" else None
        return None if said is None or said.startswith("<") else said
    message = body.get("message") if isinstance(body.get("message"), dict) else body
    is_theirs = body.get("type") == "user" and not body.get("isMeta")
    return _text(message.get("content")) if is_theirs and isinstance(message, dict) else None


def _text(content: object) -> str | None:
    if isinstance(content, str):
        return content or None
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) or None
