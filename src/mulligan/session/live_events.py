"""The events that subscribers and attached clients receive for one record of a session's journal.

The transcript's own events (`transcript.event_in`) come unchanged. A record that changes the session in another way is
described here, so that a client can follow the whole session: the transcript was cut, a call began, ended or was
undone. These descriptions are made when they are read; the journal stores nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mulligan.session.transcript import Archive, Event, event_body, event_in, event_of, id_of
from mulligan.store.journal import Record
from mulligan.store.protocol import Tx

_CUTS = frozenset({"reset", "trim", "truncate"})
_PATHS_SHOWN = 50


def live_events_in(tx: Tx, archive: Archive, record: Record) -> list[Event]:
    """The events of one record, in the order in which they happened. Most records have one, some have none."""
    written = event_in(tx, archive, record)
    if written is not None:
        return [written]
    # Several events of one record need ids of their own.
    return [
        {**event_of(record, event_body(kind, metadata)), "id": f"{id_of(record)}/{kind}"}
        for kind, metadata in _described(record)
    ]


def _described(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    body = record.payload
    if record.kind == "window.changed" and body["verb"] in _CUTS:
        yield body["verb"], {"messages": sum(stop - start for _, start, stop in body["spans"])}
    elif record.kind == "session.forked":
        yield "fork", {"child_id": body["child"]}
    elif record.kind == "call.begun":
        named = {"label": body.get("label"), "tool": body.get("tool")}
        yield "call_begun", {"call_id": body["call"], "turn_id": body["turn"], **_given(named)}
    elif record.kind == "call.ended":
        yield "call_ended", {"call_id": body["call"], "status": body["status"], **_paths(body["changes"])}
        yield from _undo_operation(body)


def _undo_operation(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Undo, restore, rollback, redo and rewind are calls; the record of their end names the calls they acted on."""
    cause = body.get("cause")
    if cause is None or body["status"] != "committed":
        return
    yield cause["verb"], {"call_id": body["call"], "of": cause["of"]}
    if cause["of"] and cause["verb"] != "redo":
        yield "call_undone", {"call_ids": cause["of"], "by": body["call"]}


def _paths(changes: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {"changes": len(changes), "paths": [change["path"] for change in changes[:_PATHS_SHOWN]]}


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
