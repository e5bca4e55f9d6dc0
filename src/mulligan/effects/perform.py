"""The one way of every request: parameters, session, boundary, act in a call, receipt, record.

An effect that does not end well leaves nothing behind, whatever the call around it goes on to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mulligan.boundary.verdict import Boundary
from mulligan.effects.hosting import hosted, open_session, signal_session
from mulligan.effects.params import OpenSession, Params, SignalSession
from mulligan.effects.receipt import Receipt, refusal_receipt
from mulligan.effects.registry import BY_NAME, Effect
from mulligan.effects.scene import Scene
from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.values.digest import digest_of
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.reading import refusal_of

RECORDED_TEXT_BYTES = 2_048


def effect_named(name: str) -> Effect:
    effect = BY_NAME.get(name)
    if effect is None:
        raise fault("unknown_effect", f"There is no tool or effect {name!r}.", name=name)
    return effect


def perform(
    desk: Desk, call: Call, name: str, given: Mapping[str, Any], *, boundary: Boundary, sink: Sink | None = None
) -> Receipt:
    """Perform one effect inside a call. Expected outcomes are receipts; only broken things raise."""
    effect = effect_named(name)
    try:
        with call.savepoint():
            fields = _act(desk, call, effect, given, boundary, sink=sink)
            receipt = Receipt(effect.name, fields.pop("status", "ok"), fields)
    except Refused as refused:
        receipt = refusal_receipt(effect.name, _as_claimed(effect, refused))
    except OSError as error:
        receipt = refusal_receipt(effect.name, refusal_of(error, str(given.get("path", ""))))
    call.note_effect(effect.name, _recorded(given), _recorded(receipt.to_dict()))
    return receipt


def _as_claimed(effect: Effect, refused: Refused) -> Refused:
    """A place somebody else is changing is a conflict for write_file, and an error for everything else."""
    if refused.code == "path_claimed" and effect.tool == "write_file":
        return Refused("conflict", refused.code, refused.message, **refused.fields)
    if refused.code == "path_busy" and effect.tool != "write_file":
        return Refused("error", refused.code, refused.message, **refused.fields)
    return refused


def _act(
    desk: Desk, call: Call, effect: Effect, given: Mapping[str, Any], boundary: Boundary, *, sink: Sink | None
) -> dict[str, Any]:
    asked = _parsed(effect.params, given)
    session = SessionId(asked.session_id) if asked.session_id is not None else call.facts.session
    found = hosted(desk, session, default=boundary, must_exist=asked.session_id is not None)
    found.boundary.check_op(effect.op)
    return effect.act(Scene(desk, session, found.boundary, call, found.workdir, sink), asked)


def _parsed(model: type[Params], given: Mapping[str, Any]) -> Any:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "parameters"
        raise Refused("error", "invalid_params", f"{where}: {first['msg']}") from None


def perform_session_effect(desk: Desk, name: str, given: Mapping[str, Any], *, boundary: Boundary) -> Receipt:
    """host.session.open and host.session.signal: they make and end what calls live in, so they are not calls."""
    try:
        if name == "host.session.open":
            opened = open_session(desk, _parsed(OpenSession, given), default=boundary)
            return Receipt(name, "ready", opened)
        return Receipt(name, "signaled", signal_session(desk, _parsed(SignalSession, given)))
    except Refused as refused:
        return refusal_receipt(name, refused)


SESSION_EFFECTS = frozenset({"host.session.open", "host.session.signal"})


def _recorded(value: Any) -> Any:
    """What goes on record: everything, but long texts by their digest."""
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return value if _storable(value, data) else _short(data)
    if isinstance(value, Mapping):
        return {str(name): _recorded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_recorded(item) for item in value]
    return value


def _storable(text: str, data: bytes) -> bool:
    return len(data) <= RECORDED_TEXT_BYTES and not any("\ud800" <= char <= "\udfff" for char in text)


def _short(data: bytes) -> dict[str, Any]:
    return {"digest": digest_of(data), "size_bytes": len(data)}
