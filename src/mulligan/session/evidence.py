"""What a bundle shows of a session besides its talk: calls of tools, permissions, spans, a replay's needs. Pure.

Digests stand for arguments and results, so that a replay elsewhere can be compared without either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mulligan.session.messages import ToolCall, ToolResult, as_text, calls_in, paired
from mulligan.session.transcript import Message
from mulligan.values.canonical import encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import digest_of

Json = dict[str, Any]
Listed = Sequence[Mapping[str, Any]]

_LIFECYCLE = (
    "compaction",
    "agent_session_closed",
    "AnchorChanged",
    "RootMounted",
    "RootUnmounted",
    "transcript_budget",
)


def tool_calls_in(messages: Sequence[Message], records: Listed) -> list[Json]:
    """Every call the talk asked for, in order, with what became of it; then calls the talk knows nothing of."""
    by_label: dict[str, list[Json]] = {}
    for done in _calls_done(records):
        by_label.setdefault(str(done["tool_use_id"]), []).append(done)
    found = []
    pairs = paired(messages)
    for place, answers in pairs.answers.items():
        for call, answer in zip(calls_in(messages[place]), answers, strict=True):
            mine = by_label[call.id].pop(0) if call.id and by_label.get(call.id) else {}
            found.append({**mine, **_asked(call, place), "result": _result(answer), **_refusal(answer, mine)})
    return found + [done for left in by_label.values() for done in left]


def _asked(call: ToolCall, place: int) -> Json:
    return {
        "tool_name": call.name,
        "tool_use_id": call.id or None,
        "args_hash": digest_of(as_text(call.arguments).encode("utf-8", "surrogatepass")),
        "iteration": place,
    }


def _result(answer: tuple[int, ToolResult] | None) -> Json | None:
    if answer is None:
        return None
    data = as_text(answer[1].content).encode("utf-8", "surrogatepass")
    return {"message": answer[0], "digest": digest_of(data), "bytes": len(data)}


def _refusal(answer: tuple[int, ToolResult] | None, done: Mapping[str, Any]) -> Json:
    return {"is_rejected": (answer is not None and answer[1].failed) or bool(done.get("is_rejected"))}


def _calls_done(records: Listed) -> list[Json]:
    """Calls as transactions: begun, ended, and how."""
    begun: dict[str, Json] = {}
    for record in records:
        body = record["payload"]
        if record["kind"] == "call.begun" and isinstance(body.get("call"), str):
            begun[body["call"]] = {
                "tool_name": body.get("tool"),
                "tool_use_id": body.get("label"),
                "call_id": body["call"],
                "args_hash": None,
                "iteration": None,
                "timestamp": record["at"],
                "duration_ms": None,
                "status": "open",
                "is_rejected": False,
                "result": None,
            }
        elif record["kind"] == "call.ended" and str(body.get("call")) in begun:
            call = begun[body["call"]]
            took = _milliseconds(call["timestamp"], record["at"])
            call |= {
                "status": body.get("status"),
                "duration_ms": took,
                "is_rejected": body.get("status") != "committed",
            }
    return list(begun.values())


def _milliseconds(start: str, end: str) -> int:
    return int((parse_timestamp(end) - parse_timestamp(start)).total_seconds() * 1000)


def permissions_in(events: Listed) -> list[Json]:
    """Who was asked for what: every event about a permission, an approval, or a person in the loop."""
    return [_permission(event) for event in events if _is_permission(str(event["kind"]))]


def _is_permission(kind: str) -> bool:
    return "permission" in kind or "approval" in kind or kind.startswith("hitl_")


def _permission(event: Mapping[str, Any]) -> Json:
    told = event.get("metadata") or {}
    request = told.get("request")
    identifier = told.get("request_id") or (request.get("id") if isinstance(request, Mapping) else None)
    return {
        "kind": event["kind"],
        "source": "transcript_event",
        "request_id": identifier,
        "agent": told.get("client_id") or told.get("agent"),
        "payload": dict(told),
    }


def replay_of(
    messages: Sequence[Message], events: Listed, *, records: Listed, calls: Listed, source: Mapping[str, Any]
) -> Json:
    return {
        "replay_fixture": _fixture(messages, calls),
        "run_record": {
            **{name: source[name] for name in ("session_id", "status", "started_at", "finished_at")},
            "messages": len(messages),
            "events": len(events),
            "calls": len(calls),
        },
        "verification_outcomes": [],
        "event_log_pointers": [{"topic": f"s:{source['session_id']}", "events": len(events)}],
        "transitions": [
            {"kind": event["kind"], "at": event["at"], "event": index}
            for index, event in enumerate(events)
            if event["kind"] in _LIFECYCLE
        ],
        "checkpoints": _turns(records),
        "trace_spans": _spans(records),
        "deterministic_events": list(records),
    }


def _fixture(messages: Sequence[Message], calls: Listed) -> Json:
    return {
        "_type": "mulligan_replay_fixture",
        "message_digests": [digest_of(encode(message)) for message in messages],
        "tool_results": [
            {
                "tool_use_id": call["tool_use_id"],
                "args_hash": call["args_hash"],
                "result_digest": (call["result"] or {}).get("digest"),
            }
            for call in calls
            if call["args_hash"] is not None
        ],
    }


def _turns(records: Listed) -> list[Json]:
    found: dict[str, Json] = {}
    for record in records:
        turn = record["payload"].get("turn")
        if record["kind"] == "turn.opened" and isinstance(turn, str):
            found[turn] = {"turn": turn, "at": record["at"], "ended_at": None}
        elif record["kind"] == "turn.ended" and str(turn) in found:
            found[str(turn)]["ended_at"] = record["at"]
    return list(found.values())


def _spans(records: Listed) -> list[Json]:
    """Turns, and calls within them."""
    spans = [
        {
            "span_id": one["turn"],
            "parent_id": None,
            "kind": "turn",
            "name": "turn",
            "start": one["at"],
            "end": one["ended_at"],
        }
        for one in _turns(records)
    ]
    begun: dict[str, Json] = {}
    for record in records:
        body = record["payload"]
        if record["kind"] == "call.begun" and isinstance(body.get("call"), str):
            begun[body["call"]] = {
                "span_id": body["call"],
                "parent_id": body.get("turn"),
                "kind": "call",
                "name": body.get("tool"),
                "start": record["at"],
                "end": None,
            }
        elif record["kind"] == "call.ended" and str(body.get("call")) in begun:
            begun[body["call"]] |= {"end": record["at"], "status": body.get("status")}
    return [*spans, *begun.values()]
