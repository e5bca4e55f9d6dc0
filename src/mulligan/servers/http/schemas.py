"""The shapes of the answers, for `/openapi.json`. Objects may gain keys; they never lose one that is listed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_BOOLEAN = {"type": "boolean"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_MAYBE_NUMBER = {"type": ["integer", "null"]}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "Any": {"type": "object"},
    "Error": _object(error=_object(code=_TEXT, message=_TEXT)),
    "Health": _object(ok=_BOOLEAN),
    "Me": _object(principal=_TEXT, role={"enum": ["observer", "controller"]}, csrf=_MAYBE_TEXT, version=_TEXT),
    "Roots": _object(
        roots=_list(_object(id=_TEXT, path=_TEXT, name=_TEXT, fork_of=_MAYBE_TEXT, title=_MAYBE_TEXT)), next=_MAYBE_TEXT
    ),
    "Session": _object(
        id=_TEXT,
        title=_MAYBE_TEXT,
        root_id=_TEXT,
        parent_id=_MAYBE_TEXT,
        created_at=_TEXT,
        closed_at=_MAYBE_TEXT,
        last_at=_TEXT,
        messages=_NUMBER,
        files=_MAYBE_TEXT,
        directory=_MAYBE_TEXT,
        redo=_NUMBER,
    ),
    "Sessions": _object(sessions=_list(_ref("Session")), next=_MAYBE_TEXT),
    "Transcript": _object(messages=_list(_object(id=_TEXT, at=_TEXT, role=_TEXT, text=_TEXT)), next=_MAYBE_NUMBER),
    "Change": _object(path=_TEXT, kind=_TEXT, added=_NUMBER, removed=_NUMBER),
    "Call": _object(
        id=_TEXT,
        sort=_TEXT,
        root_id=_TEXT,
        session_id=_MAYBE_TEXT,
        turn_id=_TEXT,
        prompt=_MAYBE_TEXT,
        tool=_MAYBE_TEXT,
        label=_MAYBE_TEXT,
        command=_MAYBE_TEXT,
        status={"enum": ["open", "committed", "aborted", "undone", "evicted"]},
        external=_BOOLEAN,
        verb=_MAYBE_TEXT,
        undone_by=_MAYBE_TEXT,
        reason=_MAYBE_TEXT,
        pinned=_BOOLEAN,
        started_at=_TEXT,
        ended_at=_MAYBE_TEXT,
        coverage=_list(_object(path=_TEXT, reason=_TEXT)),
        coverage_total=_NUMBER,
        changes=_list(_ref("Change")),
        files=_NUMBER,
        added=_MAYBE_NUMBER,
        removed=_MAYBE_NUMBER,
    ),
    "Calls": _object(calls=_list(_ref("Call")), next=_MAYBE_TEXT, event=_NUMBER),
    "Entry": _object(kind=_TEXT, size=_MAYBE_NUMBER, mode=_MAYBE_TEXT),
    "Line": _object(
        kind={"enum": [" ", "+", "-"]},
        text=_TEXT,
        old=_MAYBE_NUMBER,
        new=_MAYBE_NUMBER,
        words=_list(_list(_NUMBER)),
        spans=_list({"type": "array"}),
    ),
    "Hunk": _object(
        index=_NUMBER,
        old_start=_NUMBER,
        old_lines=_NUMBER,
        new_start=_NUMBER,
        new_lines=_NUMBER,
        lines=_list(_ref("Line")),
    ),
    "FileDiff": _object(
        path=_TEXT,
        before=_ref("Entry"),
        after=_ref("Entry"),
        state={"enum": ["text", "binary", "large", "evicted", "dir", "same"]},
        added=_NUMBER,
        removed=_NUMBER,
        hunks=_list(_ref("Hunk")),
        truncated=_BOOLEAN,
    ),
    "Diff": _object(files=_list(_ref("FileDiff")), total=_NUMBER),
    "Comparison": _object(files=_list(_ref("FileDiff")), total=_NUMBER, next=_MAYBE_TEXT),
    "Outcome": _object(path=_TEXT, outcome={"enum": ["restored", "merged", "conflicted", "skipped", "failed"]}),
    "Result": _object(
        ok=_BOOLEAN,
        call_id=_MAYBE_TEXT,
        outcomes=_list(_ref("Outcome")),
        overwrote_external=_list(_TEXT),
        rescue=_MAYBE_TEXT,
        dry_run=_BOOLEAN,
        digest=_MAYBE_TEXT,
        diffs=_list(_ref("FileDiff")),
    ),
    "Changed": _object(error=_object(code=_TEXT, message=_TEXT), plan=_ref("Result")),
    "Clients": _object(clients=_list({"type": "object"}), permissions=_list({"type": "object"})),
    "Tree": _object(
        path=_TEXT, entries=_list(_object(name=_TEXT, path=_TEXT, kind=_TEXT)), total=_NUMBER, next=_MAYBE_TEXT
    ),
    "File": _object(path=_TEXT, lines=_list(_object(text=_TEXT, spans=_list({"type": "array"}))), total=_NUMBER),
    "Found": _object(
        results=_list(_object(where=_TEXT, text=_TEXT, call_id=_MAYBE_TEXT, session_id=_MAYBE_TEXT)), next=_MAYBE_TEXT
    ),
    "Storage": _object(
        size=_NUMBER,
        cap=_NUMBER,
        sessions=_list(_object(session_id=_TEXT, calls=_NUMBER, bytes=_NUMBER, cap=_NUMBER)),
        next=_MAYBE_TEXT,
        would_evict=_list(_object(call_id=_TEXT, session_id=_TEXT, at=_TEXT, bytes=_NUMBER)),
        would_evict_more=_BOOLEAN,
        gc=_object(state=_TEXT, stage=_TEXT, done=_NUMBER, total=_NUMBER, blobs=_NUMBER, bytes=_NUMBER),
    ),
}
