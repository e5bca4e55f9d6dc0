"""What each tool takes and answers, as JSON Schemas.

An answer is a success or S2's error envelope. A success is immutable, or of the live tree; a hybrid tool has one shape
for each, and its `cache_hint` says which. The hints are constants, checked whenever a tool answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.effects.substrate.failure import CODES

Schema = dict[str, Any]

_HEX = "^[0-9a-f]*$"
_DIGEST = "^sha256:[0-9a-f]{64}$"

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53}
DIGEST: Schema = {"type": "string", "pattern": _DIGEST}
PATHS: Schema = {"type": "array", "items": TEXT}

FINGERPRINT: Schema = {
    "type": "object",
    "properties": {
        "head_oid": {"type": "string", "pattern": _HEX},
        "index_oid": {"type": "string", "pattern": _HEX},
        "status_hash": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
    "required": ["head_oid", "index_oid", "status_hash"],
    "additionalProperties": False,
}

STATS = {
    "type": "object",
    "properties": {"files": COUNT, "total_bytes": COUNT},
    "required": ["files", "total_bytes"],
    "additionalProperties": False,
}

ERROR: Schema = {
    "type": "object",
    "title": "Error",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"enum": list(CODES)}, "message": TEXT, "details": {"type": "object"}},
            "required": ["code", "message", "details"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


def closed(properties: Mapping[str, Schema], *, optional: tuple[str, ...] = (), title: str | None = None) -> Schema:
    """An object with these properties and no others."""
    body: Schema = {} if title is None else {"title": title}
    return body | {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _rows(properties: Mapping[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    return {"type": "array", "items": closed(properties, optional=optional)}


def immutable(properties: Mapping[str, Schema]) -> Schema:
    hint: dict[str, Schema] = {"cache_hint": {"const": "immutable"}}
    return closed({**hint, **properties}, title="ImmutableResponse")


def worktree(properties: Mapping[str, Schema]) -> Schema:
    hint: dict[str, Schema] = {"cache_hint": {"const": "until_dirty"}, "lease_id": TEXT, "fingerprint": FINGERPRINT}
    return closed({**hint, **properties}, title="WorktreeResponse")


def answer(success: Schema) -> Schema:
    return {"type": "object", "oneOf": [success, ERROR]}


def hybrid(properties: Mapping[str, Schema], *, frozen: Mapping[str, Schema] | None = None) -> Schema:
    """`frozen` are properties that only the immutable shape has."""
    both = [immutable({**properties, **(frozen or {})}), worktree(properties)]
    return answer({"oneOf": both})


ENTRIES = _rows(
    {"path": TEXT, "type": {"enum": ["file", "dir", "symlink"]}, "size": COUNT, "blob": DIGEST},
    optional=("size", "blob"),
)
SKIPPED = _rows({"path": TEXT, "reason": TEXT})
MATCHES = _rows({"path": TEXT, "line": COUNT, "col": COUNT, "text": TEXT})
CHANGES = _rows({"path": TEXT, "status": {"enum": ["added", "modified", "deleted"]}})
REJECTS = _rows({"path": TEXT, "hunks": _rows({"index": COUNT, "reason": TEXT})})

OUTPUTS: Mapping[str, Schema] = {
    "snapshot.create": answer(
        immutable({"snapshot_id": DIGEST, "fingerprint": FINGERPRINT, "manifest_stats": STATS, "skipped": SKIPPED})
    ),
    "snapshot.list": hybrid({"entries": ENTRIES, "total": COUNT, "truncated": FLAG}),
    "snapshot.file": hybrid(
        {
            "path": TEXT,
            "content": TEXT,
            "size": COUNT,
            "blob": DIGEST,
            "eol": {"enum": ["lf", "crlf", "mixed", "none"]},
        }
    ),
    "snapshot.grep": hybrid({"matches": MATCHES, "files_searched": COUNT, "truncated": FLAG}),
    "snapshot.diff": hybrid({"diff": TEXT}),
    "snapshot.changes": answer(immutable({"changes": CHANGES})),
    "snapshot.info": answer(immutable({"fingerprint": FINGERPRINT, "manifest_stats": STATS})),
    "snapshot.export": hybrid({"bundle": TEXT, "sha256": DIGEST}),
    "workspace.apply_patch": hybrid({"applied": PATHS, "rejects": REJECTS}, frozen={"snapshot_id": DIGEST}),
    "workspace.write_file": answer(worktree({"path": TEXT, "written_bytes": COUNT, "created": FLAG})),
    "workspace.delete": answer(worktree({"path": TEXT, "deleted": FLAG})),
}


def _said(schema: Schema, words: str, default: Any = None) -> Schema:
    body = {**schema, "description": words}
    return body if default is None else {**body, "default": default}


_MODE = _said({"type": "string", "enum": ["worktree", "snapshot"]}, "The live files, or a snapshot.", "worktree")
_SNAPSHOT = _said(DIGEST, "The snapshot to look at; needed in snapshot mode.")
_LEASE = _said(TEXT, "The lease of earlier reads: refuse with STALE_LEASE if what was seen has changed.")
_DRY = _said(FLAG, "Only say what would happen.", False)
_HYBRID = {"mode": _MODE, "snapshot_id": _SNAPSHOT, "lease_id": _LEASE}


def _path(words: str) -> Schema:
    return _said(TEXT, words)


def _input(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


INPUTS: Mapping[str, Schema] = {
    "snapshot.create": _input(
        {
            "lease_id": _said(TEXT, "Capture what was read under this lease, if no paths are given."),
            "paths": _said(PATHS, "Files and directories (with everything in them) to capture."),
        }
    ),
    "snapshot.list": _input(
        {
            **_HYBRID,
            "path": _said(TEXT, "The directory to list.", "."),
            "depth": _said({"type": "integer", "minimum": 1, "maximum": 64}, "How many levels down.", 1),
            "limit": _said({"type": "integer", "minimum": 0, "maximum": 100_000}, "At most so many entries.", 1000),
            "offset": _said(COUNT, "Skip so many entries.", 0),
            "include_ignored": _said(FLAG, "Also what ignore files leave out.", False),
        }
    ),
    "snapshot.file": _input({**_HYBRID, "path": _path("The file to read.")}, "path"),
    "snapshot.grep": _input(
        {
            **_HYBRID,
            "pattern": _said(TEXT, "A regular expression without look-around and back-references."),
            "paths": _said(PATHS, "Where to search; everywhere by default."),
            "case_insensitive": _said(FLAG, "Let case not matter.", False),
            "max_files": _said(COUNT, "Search at most so many files.", 10_000),
            "max_matches": _said(COUNT, "Return at most so many matching lines.", 1_000),
        },
        "pattern",
    ),
    "snapshot.diff": _input(
        {
            **_HYBRID,
            "path": _path("Only this file or directory."),
            "from_snapshot_id": _said(DIGEST, "Compare with this snapshot."),
            "against": _said({"type": "string", "enum": ["head", "index"]}, "Compare the live files with.", "head"),
        }
    ),
    "snapshot.changes": _input(
        {
            "snapshot_id": _said(DIGEST, "The snapshot."),
            "from_snapshot_id": _said(DIGEST, "Compare with this one; by default what it was made from, else HEAD."),
        },
        "snapshot_id",
    ),
    "snapshot.info": _input({"snapshot_id": _said(DIGEST, "The snapshot.")}, "snapshot_id"),
    "snapshot.export": _input(
        {**_HYBRID, "paths": _said(PATHS, "What to export; by default the whole snapshot, or what the lease touched.")}
    ),
    "workspace.apply_patch": _input(
        {
            **_HYBRID,
            "patch": _said(TEXT, "A unified diff. It applies exactly, at the stated lines, or not at all."),
            "strip": _said({"type": "integer", "minimum": 0, "maximum": 32}, "Leading directories to drop.", 1),
            "dry_run": _DRY,
        },
        "patch",
    ),
    "workspace.write_file": _input(
        {
            "path": _path("The file to write."),
            "content": _said(TEXT, "Its new content: text, or base64: and base64 for any bytes."),
            "lease_id": _LEASE,
            "create_dirs": _said(FLAG, "Make missing directories.", False),
            "dry_run": _DRY,
        },
        "path",
        "content",
    ),
    "workspace.delete": _input(
        {
            "path": _path("The file, link or directory to delete."),
            "lease_id": _LEASE,
            "recursive": _said(FLAG, "Also what is in a directory.", False),
            "dry_run": _DRY,
        },
        "path",
    ),
}


def defaults_of(schema: Schema) -> dict[str, Any]:
    return {name: one["default"] for name, one in schema["properties"].items() if "default" in one}
