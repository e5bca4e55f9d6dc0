"""The path of every request: parameters, session, boundary, action in a call, receipt, record.

A failed effect leaves no change, whatever its call does afterwards: a tool changes files with one `call.change`, which
does all or nothing, and a savepoint rolls a command's changes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects.arguments import Rules, by_model, by_table, parsed, with_whole_numbers
from mulligan.effects.context import EffectContext, session_boundary
from mulligan.effects.receipt import Receipt, refusal_receipt
from mulligan.effects.registry import BY_NAME, EFFECTS, Effect, unknown_effect
from mulligan.effects.running_commands import ENV_PARAMS, without_env_values
from mulligan.effects.session_boundary import is_known, open_session, signal_session
from mulligan.exec.command import Sink
from mulligan.files.capture_rules import names_not_captured
from mulligan.files.read import refusal_of
from mulligan.history.call import Call
from mulligan.history.open_root import OpenRoot
from mulligan.values.digest import Digest, digest_of
from mulligan.values.errors import Refused
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath

SESSION_EFFECTS = frozenset({"host.session.open", "host.session.signal"})
RECORDED_TEXT_BYTES = 2_048
RECORDED_DEPTH_MAX = 16

_COMMON_STATUSES = ("forbidden", "error")
_PATH_FIELDS = ("path", "to", "cwd")
_WITHHELD = {"withheld": True}


def perform(
    open_root: OpenRoot,
    call: Call,
    name: str,
    given: Mapping[str, Any],
    *,
    boundary: Boundary,
    sink: Sink | None = None,
    stdin_fd: int | None = None,
    deadline: datetime | None = None,
) -> Receipt:
    """Perform one effect inside a call. Expected outcomes are receipts; only defects raise.

    Mulligan stops a command at the `deadline`. Other effects are short, so the caller checks the deadline after them.
    """
    effect = BY_NAME.get(name) if isinstance(name, str) else None
    if effect is None:
        raise unknown_effect(name, [one.tool for one in EFFECTS])
    if float in map(type, given.values()):
        given = with_whole_numbers(given)
    not_captured = set[RepoPath]()
    try:
        asked: Any = by_table(effect.params, given) or by_model(effect.params, given)
        if asked.session_id is not None and asked.session_id != call.session:
            raise _wrong_session(open_root, call, asked.session_id, is_tool=name == effect.tool)
        with call.savepoint() if effect.op == "exec" else nullcontext():
            context = _effect_context(open_root, call, boundary, writes=not effect.read_only)
            context.sink, context.stdin_fd = sink, stdin_fd
            context.deadline, context.not_captured = deadline, not_captured
            if context.anchor is not None:
                context = context.in_root_of(_path_texts(asked))
            allowed = context.boundary.capability.allowed_fs_ops
            if allowed is not None and effect.op not in allowed:
                _refuse_op(context, effect, asked)
            fields = effect.act(context, asked)
        receipt = Receipt(effect.name, fields.pop("status", "ok"), fields)
    except Refused as refused:
        receipt = refusal_receipt(effect.name, _with_known_status(effect, refused))
    except OSError as error:
        receipt = refusal_receipt(effect.name, _with_known_status(effect, refusal_of(error, _subject(given))))
    account = call.account
    if not_captured or (receipt.status != "ok" and names_not_captured(open_root.disk.capture, given)):
        account.note_effect(effect.name, *_without_bytes(given, receipt))
        return receipt
    if not ENV_PARAMS.isdisjoint(given):
        given = without_env_values(open_root.ledger.store.secret_key, given)
    params = recorded(given)
    account.effects.append(
        {"effect": effect.name, "params": params, "receipt": recorded(receipt.to_dict(), keep=account.keep)}
    )
    return receipt


def _without_bytes(given: Mapping[str, Any], receipt: Receipt) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of an effect on paths that are not captured: only the paths and the outcome."""
    params = {name: recorded(given[name]) for name in (*_PATH_FIELDS, "file_path") if name in given}
    outcome = {"status": receipt.status, "error_code": receipt.error_code}
    return params | _WITHHELD, {name: value for name, value in outcome.items() if value is not None} | _WITHHELD


def _subject(given: Mapping[str, Any]) -> str:
    """The path or subject of the effect, for a message."""
    path = given.get("path", given.get("file_path"))
    return str(path) if path is not None else "a file of the patch" if "patch" in given else "it"


def _with_known_status(effect: Effect, refused: Refused) -> Refused:
    """The refusal with a status that the effect knows. A path that another call is changing is a conflict only for
    write_file."""
    status = refused.status
    if refused.code in ("path_claimed", "path_busy"):
        status = "conflict" if effect.tool == "write_file" else "error"
    elif status not in _COMMON_STATUSES and status not in effect.statuses:
        status = "error"
    return Refused(status, refused.code, refused.message, **refused.fields)


def _effect_context(open_root: OpenRoot, call: Call, boundary: Boundary, *, writes: bool) -> EffectContext:
    session = call.session
    found = session_boundary(open_root, session, default=boundary)
    within = replace(found.boundary, folds_case=True) if open_root.disk.root.folds_case else found.boundary
    here = call if not writes or call.root.id == open_root.root.id else open_root.part_of(call)
    context = EffectContext(
        open_root, session, within, call, here, found.workdir, env=found.env, network=found.network, writes=writes
    )
    return context if found.anchor is None else context.anchored(found.anchor)


def _wrong_session(open_root: OpenRoot, call: Call, session: str, *, is_tool: bool) -> Refused:
    """The refusal of another session's id. A call belongs to one session, and a model must not choose its session."""
    if is_tool:
        return Refused("error", "invalid_params", "session_id: a tool acts in the session that offers it.")
    if not is_known(open_root, SessionId(session)):
        return Refused("error", "session_not_found", f"There is no session {session!r}.")
    return Refused("error", "invalid_params", f"session_id: this call belongs to session {call.session!r}.")


def _path_texts(asked: Rules) -> list[str]:
    """The paths that the parameters name. Those in a patch are named by the patch itself."""
    return [text for text in (getattr(asked, name, None) for name in _PATH_FIELDS) if text is not None]


def _refuse_op(context: EffectContext, effect: Effect, asked: Rules) -> None:
    """Refuse the operation as not allowed, after an invalid path or a path out of the root, which comes first."""
    for text in _path_texts(asked):
        context.check_resolves(text)
    context.boundary.check_op(effect.op)


def perform_session_effect(open_root: OpenRoot, name: str, given: Mapping[str, Any], *, boundary: Boundary) -> Receipt:
    """host.session.open and host.session.signal. They create and end sessions, so they are not calls themselves."""
    given = with_whole_numbers(given)
    try:
        if name == "host.session.open":
            opened = open_session(open_root, parsed("OpenSession", given), default=boundary)
            return Receipt(name, "ready", opened)
        return Receipt(name, "signaled", signal_session(open_root, parsed("SignalSession", given)))
    except Refused as refused:
        return refusal_receipt(name, refused)


Keep = Callable[[bytes], Digest]


def recorded(value: Any, depth: int = RECORDED_DEPTH_MAX, *, keep: Keep | None = None) -> Any:
    """A value as a record holds it: long texts as digests, values without a JSON form as their type.

    `keep` stores the bytes of long texts that a replay must return.
    """
    if depth > 0 and isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str and len(key) <= RECORDED_TEXT_BYTES and key.isascii() else _recorded_key(key)
            # Most values are plain; we check the others a second time, because they are rare.
            is_plain = item is None or item is True or item is False or (type(item) is int and abs(item) < 2**62)
            if is_plain or (type(item) is str and len(item) <= RECORDED_TEXT_BYTES and item.isascii()):
                found[name] = item
            else:
                found[name] = recorded(item, depth - 1, keep=keep)
        return found
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if _is_storable(value) else _short(value.encode("utf-8", "surrogatepass"), keep)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if depth > 0 and isinstance(value, list | tuple):
        return [recorded(item, depth - 1, keep=keep) for item in value]
    return {"unrecorded": type(value).__name__}


def _recorded_key(name: object) -> str:
    text = str(name)
    return text if _is_storable(text) else "unrecorded"


def _is_storable(text: str) -> bool:
    """Whether a record may hold the text as it is."""
    try:
        return len(text.encode("utf-8")) <= RECORDED_TEXT_BYTES
    except UnicodeEncodeError:
        return False


def _short(data: bytes, keep: Keep | None) -> dict[str, Any]:
    digest = digest_of(data) if keep is None else keep(data)
    return {"digest": digest, "size_bytes": len(data)}
