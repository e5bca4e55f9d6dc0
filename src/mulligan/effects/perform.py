"""The one way of every request: parameters, session, boundary, act in a call, receipt, record.

An effect that does not end well leaves nothing behind, whatever the call around it goes on to do: a tool changes files
by one `call.change`, which is all or nothing, and a command is put back by its savepoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mulligan.boundary.verdict import Boundary
from mulligan.effects.env import without_env_values
from mulligan.effects.hosting import hosted, is_known, open_session, signal_session
from mulligan.effects.mounts import anchored, mounted
from mulligan.effects.params import OpenSession, Params, SignalSession
from mulligan.effects.receipt import Receipt, refusal_receipt
from mulligan.effects.registry import BY_NAME, EFFECTS, Effect
from mulligan.effects.scene import Elsewhere, Scene
from mulligan.effects.substrate.shapes import with_whole_numbers
from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.store.fork_locks import no_fork
from mulligan.values.digest import Digest, digest_of
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from mulligan.values.refusal import Refused
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.reading import refusal_of

SESSION_EFFECTS = frozenset({"host.session.open", "host.session.signal"})
RECORDED_TEXT_BYTES = 2_048
RECORDED_DEPTH_MAX = 16

_COMMON_STATUSES = ("forbidden", "error")
_PATH_FIELDS = ("path", "to", "cwd")
_WITHHELD = {"withheld": True}


def effect_named(name: str) -> Effect:
    effect = BY_NAME.get(name) if isinstance(name, str) else None
    if effect is None:
        raise unknown_effect(name, [one.tool for one in EFFECTS])
    return effect


def unknown_effect(name: str, known: Iterable[str]) -> MulliganError:
    tools = sorted(known)
    words = f"There is no tool or effect {name!r}. The tools are {', '.join(tools)}."
    return fault("unknown_effect", words, name=name, tools=tools)


def perform(
    desk: Desk,
    call: Call,
    name: str,
    given: Mapping[str, Any],
    *,
    boundary: Boundary,
    sink: Sink | None = None,
    stdin_fd: int | None = None,
    deadline: datetime | None = None,
) -> Receipt:
    """Perform one effect inside a call. Expected outcomes are receipts; only broken things raise.

    A command is stopped at the `deadline`; anything else is so short that whoever asks looks at the clock.
    """
    effect = effect_named(name)
    given = with_whole_numbers(given)
    withheld = set[RepoPath]()
    try:
        asked = _parsed(effect.params, given)
        _check_session(desk, call, name, asked)
        with call.savepoint() if effect.op == "exec" else nullcontext():
            scene = _scene(desk, call, boundary, sink, writes=not effect.read_only, deadline=deadline)
            scene.stdin_fd = stdin_fd
            scene.withheld = withheld
            fields = _acted(scene, effect, asked)
        receipt = Receipt(effect.name, fields.pop("status", "ok"), fields)
    except Refused as refused:
        receipt = refusal_receipt(effect.name, _as_told(effect, refused))
    except OSError as error:
        receipt = refusal_receipt(effect.name, _as_told(effect, refusal_of(error, _what(given))))
    account = call.account
    if withheld:
        account.note_effect(effect.name, *_without_bytes(given, receipt))
        return receipt
    params = recorded(without_env_values(desk.ledger.store.secret_key, given))
    account.note_effect(effect.name, params, recorded(receipt.to_dict(), keep=account.keep))
    return receipt


def _without_bytes(given: Mapping[str, Any], receipt: Receipt) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is recorded of an effect on paths that are not captured: which paths, and how it ended."""
    params = {name: recorded(given[name]) for name in (*_PATH_FIELDS, "file_path") if name in given}
    told = {"status": receipt.status, "error_code": receipt.error_code}
    return params | _WITHHELD, {name: value for name, value in told.items() if value is not None} | _WITHHELD


def _what(given: Mapping[str, Any]) -> str:
    """What the effect is about, for a message."""
    path = given.get("path", given.get("file_path"))
    return str(path) if path is not None else "a file of the patch" if "patch" in given else "it"


def _as_told(effect: Effect, refused: Refused) -> Refused:
    """Under a status that the effect has. A path somebody else is changing is a conflict for write_file only."""
    status = refused.status
    if refused.code in ("path_claimed", "path_busy"):
        status = "conflict" if effect.tool == "write_file" else "error"
    elif status not in _COMMON_STATUSES and status not in effect.statuses:
        status = "error"
    return Refused(status, refused.code, refused.message, **refused.fields)


def _scene(
    desk: Desk, call: Call, boundary: Boundary, sink: Sink | None, *, writes: bool, deadline: datetime | None
) -> Scene:
    found = hosted(desk, call.facts.session, default=boundary)
    within = replace(found.boundary, folds_case=True) if desk.disk.root.folds_case else found.boundary
    scene = Scene(
        desk,
        call.facts.session,
        within,
        call,
        found.workdir,
        sink,
        found.env,
        found.network,
        writes=writes,
        deadline=deadline,
    )
    return scene if found.anchor is None else anchored(scene, found.anchor)


def _acted(scene: Scene, effect: Effect, asked: Params) -> dict[str, Any]:
    """In the primary root, or in the mounted one that its paths are in."""
    try:
        return _act(scene, effect, asked)
    except Elsewhere as elsewhere:
        return _act(mounted(scene, elsewhere.mount), effect, asked)


def _act(scene: Scene, effect: Effect, asked: Params) -> dict[str, Any]:
    _check_op(scene, effect, asked)
    return effect.act(scene, asked)


def _check_session(desk: Desk, call: Call, name: str, asked: Params) -> None:
    """A call belongs to one session, and a tool to the session it was given to: a model does not choose its own."""
    session = asked.session_id
    if session is None or session == call.facts.session:
        return
    if name == effect_named(name).tool:
        raise Refused("error", "invalid_params", "session_id: tools act in the session they were given to.")
    if not is_known(desk, SessionId(session)):
        raise Refused("error", "session_not_found", f"There is no session {session!r}.")
    raise Refused("error", "invalid_params", f"session_id: this call belongs to session {call.facts.session!r}.")


def _check_op(scene: Scene, effect: Effect, asked: Params) -> None:
    """The verdict on the operation; a path that means nothing or leads out of the root is told first."""
    try:
        scene.boundary.check_op(effect.op)
    except Refused:
        for text in (getattr(asked, name, None) for name in _PATH_FIELDS):
            if text is not None:
                scene.judge(text)
        raise


def _parsed(model: type[Params], given: Mapping[str, Any]) -> Any:
    if not model.__pydantic_complete__:
        # Built when first used, under one lock for all models, which a forked child must not inherit locked.
        with no_fork:
            model.model_rebuild()
    try:
        asked = model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "parameters"
        raise Refused("error", "invalid_params", f"{where}: {first['msg']}") from None
    asked.check()
    return asked


def perform_session_effect(desk: Desk, name: str, given: Mapping[str, Any], *, boundary: Boundary) -> Receipt:
    """host.session.open and host.session.signal: they make and end what calls live in, so they are not calls."""
    given = with_whole_numbers(given)
    try:
        if name == "host.session.open":
            opened = open_session(desk, _parsed(OpenSession, given), default=boundary)
            return Receipt(name, "ready", opened)
        return Receipt(name, "signaled", signal_session(desk, _parsed(SignalSession, given)))
    except Refused as refused:
        return refusal_receipt(name, refused)


Keep = Callable[[bytes], Digest]


def recorded(value: Any, depth: int = RECORDED_DEPTH_MAX, *, keep: Keep | None = None) -> Any:
    """What goes on record: everything, but long texts by their digest and what no record can hold by its type.

    `keep` is given the bytes of long texts that must be found again: those a replay answers with.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if _is_storable(value) else _short(value.encode("utf-8", "surrogatepass"), keep)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if depth > 0 and isinstance(value, Mapping):
        return {_recorded_key(name): recorded(item, depth - 1, keep=keep) for name, item in value.items()}
    if depth > 0 and isinstance(value, list | tuple):
        return [recorded(item, depth - 1, keep=keep) for item in value]
    return {"unrecorded": type(value).__name__}


def _recorded_key(name: object) -> str:
    text = str(name)
    return text if _is_storable(text) else "unrecorded"


def _is_storable(text: str) -> bool:
    if text.isascii():
        return len(text) <= RECORDED_TEXT_BYTES
    try:
        return len(text.encode("utf-8")) <= RECORDED_TEXT_BYTES
    except UnicodeEncodeError:
        return False


def _short(data: bytes, keep: Keep | None) -> dict[str, Any]:
    digest = digest_of(data) if keep is None else keep(data)
    return {"digest": digest, "size_bytes": len(data)}
