"""S0's own function names, letter for letter.

They act on the innermost `mulligan.open`, else on the current folder. Requests may be given as one mapping, as the
documents write them, or as keywords.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from mulligan.history import captures
from mulligan.history.bounds import drop_session, set_cap
from mulligan.history.current import current_call
from mulligan.history.desk import Desk
from mulligan.history.scopes import before_of, size_of
from mulligan.opening import Mulligan, innermost
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.limits import SESSION_CAP_BYTES
from mulligan.values.paths import RepoPath, parse_repo_path
from mulligan.values.refusal import Refused

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
    """An absolute path, or one relative to the process's folder, as a path below the root, through no link."""
    whole = os.path.normpath(os.path.join(os.getcwd(), text))
    for root in {opened.root, opened.boundary.root}:
        if whole.startswith(root.rstrip("/") + "/"):
            return parse_repo_path(whole[len(root.rstrip("/")) + 1 :])
    raise fault("forbidden", f"{text} is outside the workspace {opened.root}.")


def _check_root(opened: Mulligan, root: object) -> None:
    """The root is the workspace's: a request may name it, and may not choose another."""
    if root is not None and (not isinstance(root, str) or os.path.realpath(root) != os.path.realpath(opened.root)):
        raise fault("invalid_params", f"This workspace is {opened.root}, not {root}.", field="root")


def _paths(opened: Mulligan, paths: object) -> list[RepoPath] | None:
    """Of some paths, or of one: a text is a path and not a path for each of its letters."""
    if not paths:
        return None
    given = [paths] if isinstance(paths, str) else paths
    if not isinstance(given, list | tuple) or not all(isinstance(path, str) for path in given):
        raise fault("invalid_params", "paths: Give a list of paths.", field="paths")
    return [_real(opened.desk, _path(opened, path)) for path in given]


def _real(desk: Desk, path: RepoPath) -> RepoPath:
    """What is below a linked folder is known by that folder's own name. A link at the end is meant itself."""
    try:
        with desk.disk.resolve(path, final=False) as spot:
            return spot.path
    except (FileNotFoundError, NotADirectoryError):
        return path
    except Refused as refused:
        raise fault("forbidden", refused.message) from None


def _shown(desk: Desk, paths: Sequence[RepoPath]) -> list[str]:
    return [captures.absolute(desk, path) for path in paths]


def hostlib_fs_snapshot(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Register a snapshot under `scope_id` and capture `paths`. Without paths it stays open for what is written."""
    fields = _fields(request, given, "session_id scope_id paths root")
    session, scope = SessionId(_required(fields, "session_id")), _required(fields, "scope_id")
    opened = innermost()
    _check_root(opened, fields.get("root"))
    found = captures.register(opened.desk, session, scope, _paths(opened, fields.get("paths")))
    return {
        "snapshot_id": scope,
        "captured_paths": _shown(opened.desk, found.paths),
        "byte_count": found.byte_count,
    }


def hostlib_fs_restore(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Write captured preimages back; delete what was absent. What is replaced is kept and can be undone."""
    fields = _fields(request, given, "session_id snapshot_id paths")
    session, scope = SessionId(_required(fields, "session_id")), _required(fields, "snapshot_id")
    opened = innermost()
    done = captures.restore_scope(opened.desk, session, scope, _paths(opened, fields.get("paths")))
    return {
        "snapshot_id": scope,
        "restored_paths": _shown(done.there, done.restored),
        "skipped_paths_with_reasons": [
            {"path": captures.absolute(done.there, path), "reason": reason} for path, reason in done.skipped
        ],
        "overwrote_external": _shown(done.there, done.overwrote_external),
    }


def hostlib_fs_list_snapshots(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """The session's snapshots by capture time; none for an unknown session."""
    fields = _fields(request, given, "session_id")
    session = SessionId(_required(fields, "session_id"))
    opened = innermost()
    return {
        "snapshots": [
            {
                "snapshot_id": row.scope,
                "scope_id": row.scope,
                "taken_at_ms": row.taken_at_ms,
                "captured_paths": [captures.whole(opened.desk, row, one) for one in found],
                "byte_count": size_of(map(before_of, found)),
            }
            for row, found in captures.scopes_of(opened.desk, session)
        ]
    }


def hostlib_fs_drop_snapshot(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Forget a snapshot; `dropped` is false if there was none."""
    fields = _fields(request, given, "session_id snapshot_id")
    session, scope = SessionId(_required(fields, "session_id")), _required(fields, "snapshot_id")
    return {"snapshot_id": scope, "dropped": captures.drop_scope(innermost().desk, session, scope)}


def drop_session_snapshots(session_id: str) -> list[str]:
    """Forget every snapshot of a session, and what its calls replaced: they can no longer be undone. The snapshots."""
    desk, session = innermost().desk, SessionId(session_id)
    dropped = captures.drop_scopes(desk, session)
    drop_session(desk.ledger, session)
    return dropped


def configure_session_byte_cap(session_id: str, cap_bytes: int) -> int:
    """How many bytes a session's snapshots may hold; the oldest go at once if they hold more. The previous cap."""
    desk = innermost().desk
    previous = set_cap(desk.ledger, SessionId(session_id), cap_bytes)
    captures.apply_cap(desk, SessionId(session_id))
    return previous


def hostlib_tools_write_file(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Write a file as a call, or in the current one, whose open snapshot takes what it changes."""
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
        "path": captures.absolute(opened.desk, path),
        "bytes_written": receipt["written_bytes"],
        "created": receipt["created"],
    }


def hostlib_tools_delete_file(request: Request | None = None, /, **given: Any) -> dict[str, Any]:
    """Delete a path as a call, or in the current one, whose open snapshot takes what it changes."""
    fields = _fields(request, given, "path recursive session_id")
    opened, session = innermost(), _session(fields)
    path = _path(opened, _required(fields, "path"))
    receipt = _perform(
        opened, session, "delete", {"path": path, "recursive": fields.get("recursive", False)}, absent_is_fine=True
    )
    return {"path": captures.absolute(opened.desk, path), "removed": receipt is not None}


def _session(fields: Request) -> SessionId:
    call = current_call()
    return SessionId(fields.get("session_id") or (call.facts.session if call is not None else "default"))


def _content(fields: Request) -> Any:
    text, encoding = fields.get("content"), fields.get("encoding", "utf-8")
    if not isinstance(text, str):
        raise fault("invalid_params", "content must be given, and be text.", field="content")
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
    """In the current call, or, if that is another session's, in one under the same label."""
    current = current_call()
    label = current.facts.label if current is not None else None
    with opened.session(session).call(tool, tool_call_id=label) as call:
        receipt = call.perform(tool, **params)
        if receipt.status == "not_found" and absent_is_fine:
            return None
        if not receipt.ok:
            raise fault(receipt.error_code, receipt.error_message, receipt=receipt.to_dict())
        return receipt.to_dict()
