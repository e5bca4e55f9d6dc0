"""The function names of the source documents S0 and S3, letter for letter, over the public API.

They act on the innermost `mulligan.open`, else on the current folder. S3's session functions raise for an unknown id,
except `exists`, `snapshot`, `ancestry`, and the two that add and remove roots. Unknown options raise. S0's functions
take a request as one mapping, as the document writes it, or as keywords.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mulligan.agents.loop import Bounds
from mulligan.api import Mulligan, innermost
from mulligan.api import agent_loop as loop
from mulligan.effects.session import DurableSession
from mulligan.history import scopes
from mulligan.history.call import current_call
from mulligan.history.open_root import OpenRoot
from mulligan.history.retention import drop_session, set_cap
from mulligan.history.scopes import size_of
from mulligan.history.tables import before_of
from mulligan.session.importers import MODEL
from mulligan.session.lifecycle import checked_options, fact
from mulligan.session.subscribers import Callback, Subscription, current_id
from mulligan.values.errors import MulliganError, Refused, fault
from mulligan.values.ids import SessionId
from mulligan.values.limits import SESSION_CAP_BYTES
from mulligan.values.paths import RepoPath, is_inside, parse_repo_path

Options = Mapping[str, Any] | None


def session_named(id: str, verb: str) -> DurableSession:
    """The open session with this id in the innermost workspace; the error names the function `verb`."""
    return innermost().sessions.get(id, verb)


def agent_session_open(id: str | None = None, opts: Options = None) -> str:
    """Opens or resumes a session and returns its id; without an id the new session gets a UUIDv7."""
    return innermost().sessions.open(id, opts).id


def agent_session_exists(id: str) -> bool:
    """Whether there is an open session with this id."""
    return innermost().sessions.exists(id)


def agent_session_current_id() -> str | None:
    """The id of the innermost session that is active on this thread, or None."""
    return current_id()


def agent_session_length(id: str) -> int:
    """The number of messages in the context window."""
    return session_named(id, "agent_session_length").length()


def agent_session_snapshot(id: str) -> dict[str, Any] | None:
    """Everything about a session as one object; None for an unknown id."""
    return innermost().sessions.snapshot(id)


def agent_session_ancestry(id: str) -> dict[str, Any] | None:
    """Parent, children and root of a session; None for an unknown id."""
    return innermost().sessions.ancestry(id)


def agent_session_reset(id: str) -> None:
    """Empties the transcript of the session."""
    session_named(id, "agent_session_reset").reset()


def agent_session_fork(src: str, dst: str | None = None) -> str:
    """Forks a session with its whole transcript; the child shares the files. Returns the child's id."""
    return session_named(src, "agent_session_fork").fork(dst=dst).id


def agent_session_fork_at(src: str, keep_first: int, dst: str | None = None) -> str:
    """Forks a session with the first messages of its transcript. Returns the child's id."""
    return session_named(src, "agent_session_fork_at").fork_at(keep_first, dst)


def agent_session_scratchpad(id: str) -> dict[str, Any] | None:
    """The agent's scratchpad; None if there is none."""
    return session_named(id, "agent_session_scratchpad").scratchpad()


def agent_session_set_scratchpad(id: str, scratchpad: Mapping[str, Any], opts: Options = None) -> dict[str, Any]:
    """Replaces the scratchpad: `{ok, version, scratchpad}`."""
    return session_named(id, "agent_session_set_scratchpad").set_scratchpad(scratchpad, opts)


def agent_session_clear_scratchpad(id: str, opts: Options = None) -> dict[str, Any]:
    """Removes the scratchpad: `{ok, version, scratchpad}`."""
    return session_named(id, "agent_session_clear_scratchpad").clear_scratchpad(opts)


def agent_session_trim(id: str, keep_last: int) -> int:
    """Keeps only the last messages in the context window. Returns their number."""
    return session_named(id, "agent_session_trim").trim(keep_last)


def agent_session_truncate(id: str, keep_first: int) -> dict[str, Any]:
    """Keeps only the first messages in the context window. Returns what was cut."""
    return session_named(id, "agent_session_truncate").truncate(keep_first)


def agent_session_compact(id: str, opts: Options = None) -> int:
    """Replaces older messages by a summary. Returns the number of messages then."""
    return session_named(id, "agent_session_compact").compact(opts)


def agent_session_inject(id: str, message: Mapping[str, Any]) -> None:
    """Appends one message, which must have a role."""
    session_named(id, "agent_session_inject").inject(message)


def agent_session_close(id: str, status: str | Mapping[str, Any] | None = None) -> None:
    """Closes the session, with a reason. Its history is kept; opening it again continues it."""
    session_named(id, "agent_session_close").close(status)


def agent_subscribe(id: str, cb: Callback) -> Subscription:
    """Calls `cb` with every event of the session from now on. Inside `cb`, the session is the current one."""
    return session_named(id, "agent_subscribe").subscribe(cb)


_LOOP_OPTIONS: Mapping[str, type] = {
    "session_id": str,
    "provider": str,
    "model": str,
    "max_iterations": int,
}
_STAGE_KEYS: Mapping[str, type] = {"name": str, "prompt": str, "system": str, "model_policy": dict}


def agent_loop(prompt: str, system: str | None = None, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Runs a model on a prompt. With `session_id` the model sees that session's transcript, and new messages go there.

    Without a provider in `opts` it is $MULLIGAN_PROVIDER, else `mock`.
    """
    chosen = checked_options("agent_loop", opts, _LOOP_OPTIONS)
    _check_prompts(prompt, system, chosen)
    provider = chosen.get("provider") or os.environ.get("MULLIGAN_PROVIDER") or "mock"
    model = chosen.get("model") or _seeded_model(chosen.get("session_id"), provider)
    named = provider if model is None else f"{provider}:{model}"
    bounds = Bounds(chosen["max_iterations"]) if "max_iterations" in chosen else None
    done = loop(prompt, session=chosen.get("session_id"), provider=named, system=system, bounds=bounds)
    return {**asdict(done), "provider": provider}


def _seeded_model(session: str | None, provider: str) -> str | None:
    """The model in an imported session file of Gemini CLI, because `google` has no default model."""
    if session is None or provider != "google":
        return None
    archive = innermost().session(session).archive
    with archive.store.read() as tx:
        found = fact(tx, SessionId(session), MODEL)
    return found if isinstance(found, str) else None


def _check_prompts(prompt: object, system: object, chosen: Mapping[str, Any]) -> None:
    if not isinstance(prompt, str):
        raise fault("invalid_params", "A prompt is a text.", field="prompt")
    if system is not None and not isinstance(system, str):
        raise fault("invalid_params", "A system prompt is a text.", field="system")
    if chosen.get("max_iterations", 1) < 1:
        raise fault("invalid_params", "max_iterations is one or more.", field="max_iterations")


def workflow_execute(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs stages in order. Stages with the same session share its transcript.

    A stage without a session gets its own, named after the workflow and the stage.
    """
    if isinstance(stages, str | Mapping) or not isinstance(stages, Sequence):
        raise fault("invalid_params", "The stages of a workflow are a list of objects.", field="stages")
    workflow = innermost().open_root.ledger.ids.new()
    planned = [_stage(workflow, one) for one in stages]
    return {"workflow_id": workflow, "stages": [_run(**stage) for stage in planned]}


def _stage(workflow: str, stage: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a stage before any stage runs."""
    read = checked_options("workflow_execute", stage, _STAGE_KEYS)
    if not read.get("name") or "prompt" not in read:
        raise fault("invalid_params", "A stage has a name and a prompt.", field="stages")
    policy = checked_options("model_policy", read.get("model_policy"), _LOOP_OPTIONS)
    _check_prompts(read["prompt"], read.get("system"), policy)
    policy.setdefault("session_id", f"{workflow}:{read['name']}")
    return {"name": read["name"], "prompt": read["prompt"], "system": read.get("system"), "policy": policy}


def _run(name: str, prompt: str, system: str | None, policy: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, **agent_loop(prompt, system, policy)}


Json = dict[str, Any]


def agent_session_attach(id: str, client_id: str, opts: Options = None) -> Json:
    """Attaches a live client as observer or controller; a second controller needs `takeover`."""
    return session_named(id, "agent_session_attach").attach(client_id, opts)


def agent_session_takeover(id: str, client_id: str, opts: Options = None) -> Json:
    """Makes a client the controller; the previous controller becomes an observer."""
    return session_named(id, "agent_session_takeover").takeover(client_id, opts)


def agent_session_detach(id: str, client_id: str, opts: Options = None) -> Json:
    """Detaches a client; after a controller leaves, the session has no controller."""
    return session_named(id, "agent_session_detach").detach(client_id, opts)


def agent_session_heartbeat(id: str, client_id: str, opts: Options = None) -> Json:
    """Marks a client as alive."""
    return session_named(id, "agent_session_heartbeat").heartbeat(client_id, opts)


def agent_session_live_clients(id: str) -> list[Json]:
    """The attached clients, by id, and whether each is stale."""
    return session_named(id, "agent_session_live_clients").live_clients()


def agent_session_client_inject_prompt(id: str, client_id: str, content: object, opts: Options = None) -> None:
    """Appends a user prompt, if the client is the controller and may do so."""
    session_named(id, "agent_session_client_inject_prompt").client_inject_prompt(client_id, content, opts)


def agent_session_route_permission(id: str, client_id: str, request: object, opts: Options = None) -> Json:
    """Records that the controller answers a permission request."""
    return session_named(id, "agent_session_route_permission").route_permission(client_id, request, opts)


_NO_SESSION = ("session_not_found", "session_closed", "invalid_id")


def agent_session_workspace_anchor(id: str) -> Json:
    """The primary root of the session and the roots mounted beside it."""
    return session_named(id, "agent_session_workspace_anchor").workspace_anchor()


def agent_session_set_workspace_anchor(id: str, anchor: str | Mapping[str, Any] | None) -> bool:
    """Sets the primary root; None means the folder in which the session was opened."""
    return session_named(id, "agent_session_set_workspace_anchor").set_workspace_anchor(anchor)


def agent_session_workspace_policy(id: str) -> Json:
    """The defaults for roots that are mounted later."""
    return session_named(id, "agent_session_workspace_policy").workspace_policy()


def agent_session_set_workspace_policy(id: str, policy: Mapping[str, Any]) -> bool:
    """Changes these defaults; unknown keys raise."""
    return session_named(id, "agent_session_set_workspace_policy").set_workspace_policy(policy)


def agent_session_add_root(id: str, root: str, opts: Options = None) -> Json:
    """Mounts a root: `{ok, mounted_at?, error?}`. An unknown session is an error in the answer, not an exception."""
    return _with_session(id, "agent_session_add_root", lambda session: session.add_root(root, opts))


def agent_session_remove_root(id: str, root: str) -> Json:
    """Unmounts a root: `{ok, error?}`. A root that is not mounted is no error."""
    return _with_session(id, "agent_session_remove_root", lambda session: session.remove_root(root))


def agent_session_list_roots(id: str) -> Json:
    """The primary root and the additional ones."""
    return session_named(id, "agent_session_list_roots").list_roots()


def _with_session(id: str, verb: str, act: Callable[[DurableSession], Json]) -> Json:
    try:
        session = session_named(id, verb)
    except MulliganError as error:
        if error.code not in _NO_SESSION:
            raise
        return {"ok": False, "error": error.message}
    return act(session)


def agent_session_seed_from_jsonl(jsonl_path: str, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Creates a session from a transcript file. `{ok, session_id?, turns_loaded?, …, error?}`."""
    return innermost().sessions.seed_from_jsonl(jsonl_path, opts)


DEFAULT_SESSION_BYTE_CAP = SESSION_CAP_BYTES

Request = Mapping[str, Any]


def _fields(request: Request | None, given: Request, allowed: str) -> dict[str, Any]:
    fields = {name: value for name, value in {**(request or {}), **given}.items() if value is not None}
    unknown = sorted(set(fields) - set(allowed.split()))
    if unknown:
        raise fault("invalid_params", f"There is no parameter {unknown[0]!r}.", field=unknown[0])
    return fields


def _required(fields: Request, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise fault("invalid_params", f"{name} must not be empty.", field=name)
    return value


def _path(opened: Mulligan, text: str) -> RepoPath:
    """An absolute path, or one relative to the current folder, as a path below the root; follows no links."""
    whole = os.path.normpath(os.path.join(os.getcwd(), text))
    for root in {opened.root, opened.boundary.root}:
        if whole != root and is_inside(whole, root):
            return parse_repo_path(whole[len(root.rstrip("/")) + 1 :])
    raise fault("forbidden", f"{text} is outside the workspace {opened.root}.")


def _check_root(opened: Mulligan, root: object) -> None:
    """A request may name the root of the workspace, and no other root."""
    if root is not None and (not isinstance(root, str) or os.path.realpath(root) != os.path.realpath(opened.root)):
        raise fault("invalid_params", f"This workspace is {opened.root}, not {root}.", field="root")


def _paths(opened: Mulligan, paths: object) -> list[RepoPath] | None:
    """A list of paths, or one path as text."""
    if not paths:
        return None
    given = [paths] if isinstance(paths, str) else paths
    if not isinstance(given, list | tuple) or not all(isinstance(path, str) for path in given):
        raise fault("invalid_params", "paths is a list of paths.", field="paths")
    return [_real(opened.open_root, _path(opened, path)) for path in given]


def _real(open_root: OpenRoot, path: RepoPath) -> RepoPath:
    """The path with links to folders resolved; a link at the end is not followed."""
    try:
        with open_root.disk.resolve(path, final=False) as resolved:
            return resolved.path
    except (FileNotFoundError, NotADirectoryError):
        return path
    except Refused as refused:
        raise fault("forbidden", refused.message) from None


def _shown(open_root: OpenRoot, paths: Sequence[RepoPath]) -> list[str]:
    return [scopes.absolute(open_root, path) for path in paths]


def hostlib_fs_snapshot(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Registers a snapshot under `scope_id` and captures `paths`. Without paths it captures what is written later."""
    fields = _fields(request, given, "session_id scope_id paths root")
    session, scope = SessionId(_required(fields, "session_id")), _required(fields, "scope_id")
    opened = innermost()
    _check_root(opened, fields.get("root"))
    found = scopes.register(opened.open_root, session, scope, _paths(opened, fields.get("paths")))
    return {
        "snapshot_id": scope,
        "captured_paths": _shown(opened.open_root, found.paths),
        "byte_count": found.byte_count,
    }


def hostlib_fs_restore(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Writes the captured preimages back and deletes paths that did not exist. This can be undone."""
    fields = _fields(request, given, "session_id snapshot_id paths")
    session, scope = SessionId(_required(fields, "session_id")), _required(fields, "snapshot_id")
    opened = innermost()
    done = scopes.restore_scope(opened.open_root, session, scope, _paths(opened, fields.get("paths")))
    return {
        "snapshot_id": scope,
        "restored_paths": _shown(done.there, done.restored),
        "skipped_paths_with_reasons": [
            {"path": scopes.absolute(done.there, path), "reason": reason} for path, reason in done.skipped
        ],
        "overwrote_external": _shown(done.there, done.overwrote_external),
    }


def hostlib_fs_list_snapshots(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """The session's snapshots, oldest first; none for an unknown session."""
    fields = _fields(request, given, "session_id")
    session = SessionId(_required(fields, "session_id"))
    opened = innermost()
    return {
        "snapshots": [
            {
                "snapshot_id": row.scope,
                "scope_id": row.scope,
                "taken_at_ms": row.taken_at_ms,
                "captured_paths": [scopes.whole(opened.open_root, row, one) for one in found],
                "byte_count": size_of(map(before_of, found)),
            }
            for row, found in scopes.scopes_of(opened.open_root, session)
        ]
    }


def hostlib_fs_drop_snapshot(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Drops a snapshot; `dropped` is false if there was none."""
    fields = _fields(request, given, "session_id snapshot_id")
    session, scope = SessionId(_required(fields, "session_id")), _required(fields, "snapshot_id")
    return {"snapshot_id": scope, "dropped": scopes.drop_scope(innermost().open_root, session, scope)}


def drop_session_snapshots(session_id: str) -> list[str]:
    """Drops all snapshots of a session and the preimages of its calls, which can then no longer be undone.

    Returns the ids of the snapshots.
    """
    open_root, session = innermost().open_root, SessionId(session_id)
    dropped = scopes.drop_scopes(open_root, session)
    drop_session(open_root.ledger, session)
    return dropped


def configure_session_byte_cap(session_id: str, cap_bytes: int) -> int:
    """Sets how many bytes a session's snapshots may hold and evicts the oldest above that. Returns the previous cap."""
    open_root = innermost().open_root
    previous = set_cap(open_root.ledger, SessionId(session_id), cap_bytes)
    scopes.apply_cap(open_root, SessionId(session_id))
    return previous


def hostlib_tools_write_file(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Writes a file as a call, or in the current call, whose open snapshot captures the preimage."""
    fields = _fields(request, given, "path content encoding create_parents overwrite session_id")
    opened, session = innermost(), _session(fields)
    path = _path(opened, _required(fields, "path"))
    params = {
        "path": path,
        "content": _content(fields),
        "create_parents": fields.get("create_parents", True),
        "mode": "overwrite" if fields.get("overwrite", True) else "create_new",
    }
    receipt = _perform(opened, session, "write_file", params)
    return {
        "path": scopes.absolute(opened.open_root, path),
        "bytes_written": receipt["written_bytes"],
        "created": receipt["created"],
    }


def hostlib_tools_delete_file(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Deletes a path as a call, or in the current call, whose open snapshot captures the preimage."""
    fields = _fields(request, given, "path recursive session_id")
    opened, session = innermost(), _session(fields)
    path = _path(opened, _required(fields, "path"))
    receipt = _perform(
        opened, session, "delete", {"path": path, "recursive": fields.get("recursive", False)}, absent_is_fine=True
    )
    return {"path": scopes.absolute(opened.open_root, path), "removed": receipt is not None}


def _session(fields: Request) -> SessionId:
    call = current_call()
    return SessionId(fields.get("session_id") or (call.session if call is not None else "default"))


def _content(fields: Request) -> Any:
    text, encoding = fields.get("content"), fields.get("encoding", "utf-8")
    if not isinstance(text, str):
        raise fault("invalid_params", "content is missing, or is not text.", field="content")
    if encoding not in ("utf-8", "base64"):
        raise fault("invalid_params", "encoding is 'utf-8' or 'base64'.", field="encoding")
    if encoding == "utf-8":
        return text
    try:
        b64decode(text, validate=True)
    except ValueError:
        raise fault("invalid_params", "content is not base64.", field="content") from None
    return {"inline_bytes": {"bytes": f"base64:{text}"}}


def _perform(opened: Mulligan, session: SessionId, tool: str, params: Request, *, absent_is_fine: bool = False) -> Any:
    """Performs a tool in the current call; if that belongs to another session, in a new call with the same label."""
    current = current_call()
    label = current.facts.label if current is not None else None
    with opened.session(session).call(tool, tool_call_id=label) as call:
        receipt = call.perform(tool, **params)
        if receipt.status == "not_found" and absent_is_fine:
            return None
        if not receipt.ok:
            raise fault(receipt.error_code, receipt.error_message, receipt=receipt.to_dict())
        return receipt.to_dict()


__all__ = [
    "DEFAULT_SESSION_BYTE_CAP",
    "agent_loop",
    "agent_session_add_root",
    "agent_session_ancestry",
    "agent_session_attach",
    "agent_session_clear_scratchpad",
    "agent_session_client_inject_prompt",
    "agent_session_close",
    "agent_session_compact",
    "agent_session_current_id",
    "agent_session_detach",
    "agent_session_exists",
    "agent_session_fork",
    "agent_session_fork_at",
    "agent_session_heartbeat",
    "agent_session_inject",
    "agent_session_length",
    "agent_session_list_roots",
    "agent_session_live_clients",
    "agent_session_open",
    "agent_session_remove_root",
    "agent_session_reset",
    "agent_session_route_permission",
    "agent_session_scratchpad",
    "agent_session_seed_from_jsonl",
    "agent_session_set_scratchpad",
    "agent_session_set_workspace_anchor",
    "agent_session_set_workspace_policy",
    "agent_session_snapshot",
    "agent_session_takeover",
    "agent_session_trim",
    "agent_session_truncate",
    "agent_session_workspace_anchor",
    "agent_session_workspace_policy",
    "agent_subscribe",
    "configure_session_byte_cap",
    "drop_session_snapshots",
    "hostlib_fs_drop_snapshot",
    "hostlib_fs_list_snapshots",
    "hostlib_fs_restore",
    "hostlib_fs_snapshot",
    "hostlib_tools_delete_file",
    "hostlib_tools_write_file",
    "workflow_execute",
]
