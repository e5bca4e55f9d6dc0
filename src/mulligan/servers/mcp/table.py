"""The one table of tools, made from the tools themselves. Run as a program it writes `tools.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.effects.perform import effect_named
from mulligan.effects.profiles import Offer, declared, offers
from mulligan.effects.registry import EFFECTS, Effect
from mulligan.effects.substrate.tools import TOOLS, Tool
from mulligan.servers.mcp.listing import FILE, PROFILES
from mulligan.values.canonical import encode

Schema = dict[str, Any]
HistoryRow = tuple[str, str, Mapping[str, Any], list[str], Schema]
"""Verb, what it is about, properties, which of them are required, and the answer."""

SESSION: Schema = {"type": "string", "description": "The session to act in; by default one for this root and client."}
_OPEN_WORLD = frozenset({"exec", "shell"})
_RECEIPT: Schema = {
    "type": "object",
    "properties": {
        "status": {"type": "string", "description": "ok, or why not."},
        "error_code": {"type": "string"},
        "error_message": {"type": "string"},
    },
    "required": ["status"],
}
_ON_CONFLICT: Schema = {
    "type": "string",
    "enum": ["merge", "overwrite", "refuse"],
    "default": "merge",
    "description": "When somebody changed the same file since.",
}
_DRY: Schema = {"type": "boolean", "default": False, "description": "Only say what would happen."}
_CALL: Schema = {"type": "string", "description": "A call: its id, its label, or a unique part of its id."}
_PATHS: Schema = {"type": "array", "items": {"type": "string"}, "description": "Only these paths."}
_WAY: Mapping[str, Schema] = {"on_conflict": _ON_CONFLICT, "dry_run": _DRY}
_WAY_BACK: Schema = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "call_id": {"type": "string", "description": "The call that went back, if there is one."},
        "outcomes": {"type": "array", "items": {"type": "object"}},
        "overwrote_external": {"type": "array", "items": {"type": "string"}},
        "rescue": {"type": "string", "description": "The call that undoes it, if there is one."},
        "error": {"type": "object"},
    },
}
_OPEN_OBJECT: Schema = {"type": "object"}


def table() -> dict[str, list[Schema]]:
    return {
        "substrate": [_substrate(tool) for tool in TOOLS],
        "coding": [_coding(effect) for effect in EFFECTS],
        "history": [_history(row) for row in _HISTORY],
        **{profile: [_offered(offer, profile) for offer in offers(profile)] for profile in PROFILES},
    }


def _listed(name: str, title: str, about: str, *, given: Schema, answered: Schema) -> Schema:
    properties = {**given["properties"], "session_id": SESSION}
    return {
        "name": name,
        "title": title,
        "description": about,
        "inputSchema": {**given, "properties": properties},
        "outputSchema": answered,
        "_meta": {"mulligan/name": title},
    }


def _annotations(*, read_only: bool, destructive: bool = False, again: bool = False, world: bool = False) -> Schema:
    return {
        "readOnlyHint": read_only,
        "destructiveHint": destructive,
        "idempotentHint": again or read_only,
        "openWorldHint": world,
    }


def _substrate(tool: Tool) -> Schema:
    body = _listed(tool.name.replace(".", "_"), tool.name, tool.about, given=tool.input, answered=tool.output)
    hints = _annotations(
        read_only=tool.read_only, destructive=not tool.read_only, again=tool.name == "workspace.write_file"
    )
    return {**body, "annotations": hints}


def _coding(effect: Effect) -> Schema:
    given = portable(effect.params.model_json_schema())
    given["properties"].pop("session_id", None)
    hints = _annotations(
        read_only=effect.read_only,
        destructive=not effect.read_only,
        again=effect.tool in ("write_file", "mkdir"),
        world=effect.tool in _OPEN_WORLD,
    )
    return {**_listed(effect.tool, effect.name, effect.about, given=given, answered=_RECEIPT), "annotations": hints}


def _offered(offer: Offer, profile: str) -> Schema:
    """A tool of `coding` with the parameters that the models of one provider are given."""
    given = declared(offer.parameters) if profile == "gemini" else offer.parameters
    listed = _coding(effect_named(offer.name))
    return {**listed, "inputSchema": {**given, "properties": {**given["properties"], "session_id": SESSION}}}


def portable(schema: Schema) -> Schema:
    """A model's schema in the words every host's API takes: no references, no alternatives, no titles."""
    definitions = schema.get("$defs", {})
    properties = {name: _plain(one, definitions) for name, one in schema.get("properties", {}).items()}
    return {
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


def _plain(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The simplest form of a value: of several, text before anything else, and leaving it out instead of null."""
    body = {name: value for name, value in schema.items() if name not in ("title", "anyOf", "$ref")}
    if "$ref" in schema:
        return {**_plain(definitions[schema["$ref"].rpartition("/")[2]], definitions), **body}
    if "anyOf" in schema:
        options = [one for one in schema["anyOf"] if one.get("type") != "null"]
        chosen = next((one for one in options if one.get("type") == "string"), options[0])
        body = {name: value for name, value in body.items() if name != "default" or value is not None}
        return {**_plain(chosen, definitions), **body}
    if "properties" in body:
        body["properties"] = {name: _plain(one, definitions) for name, one in body["properties"].items()}
    if isinstance(body.get("items"), dict):
        body["items"] = _plain(body["items"], definitions)
    if isinstance(body.get("additionalProperties"), dict):
        body["additionalProperties"] = _plain(body["additionalProperties"], definitions)
    return body


def _history(row: HistoryRow) -> Schema:
    verb, about, properties, required, answered = row
    given = {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }
    looks = verb in ("log", "show", "diff")
    hints = _annotations(read_only=looks, destructive=not looks and verb != "fork")
    return {
        **_listed(f"history_{verb}", f"history.{verb}", about, given=given, answered=answered),
        "annotations": hints,
    }


_HISTORY: tuple[HistoryRow, ...] = (
    (
        "log",
        "List recorded calls and outside edits of this root, newest first.",
        {
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20},
            "everyone": {
                "type": "boolean",
                "description": "All sessions of the root; so by default, unless a session_id is given.",
            },
        },
        [],
        {"type": "object", "properties": {"calls": {"type": "array", "items": _OPEN_OBJECT}}},
    ),
    ("show", "Show one call and what it changed.", {"call": _CALL}, ["call"], _OPEN_OBJECT),
    (
        "diff",
        "Show what a call changed, as a unified diff.",
        {"call": _CALL},
        ["call"],
        {"type": "object", "properties": {"diff": {"type": "string"}}},
    ),
    (
        "undo",
        "Take back one call and leave later work alone; without a call, this session's newest that stands.",
        {"call": _CALL, "paths": _PATHS, **_WAY},
        [],
        _WAY_BACK,
    ),
    ("redo", "Bring back what the last way back of this session took away.", _WAY, [], _WAY_BACK),
    (
        "restore",
        "Put the paths of a call back to what they were before it.",
        {"call": _CALL, "paths": _PATHS, **_WAY},
        ["call"],
        _WAY_BACK,
    ),
    (
        "rollback",
        "Take back the last completed turn of this session.",
        {**_WAY, "cancel_open": {"type": "boolean", "default": False, "description": "Cancel a turn that still runs."}},
        [],
        _WAY_BACK,
    ),
    (
        "rewind",
        "Take back everything of a session from a call on.",
        {"to": _CALL, "side": {"type": "string", "enum": ["before", "after"], "default": "before"}, **_WAY},
        ["to"],
        _WAY_BACK,
    ),
    (
        "fork",
        "Start a child session, sharing the files or with a copy of all of them, beside the store.",
        {"at": _CALL, "files": {"type": "string", "enum": ["share", "copy"], "default": "share"}},
        [],
        {
            "type": "object",
            "properties": {
                "session_id": {"type": "string"},
                "parent_id": {"type": "string"},
                "directory": {"type": "string", "description": "Where its files are, if not shared."},
                "coverage": {"type": "array", "items": _OPEN_OBJECT},
                "error": {"type": "object"},
            },
        },
    ),
)


def whole() -> Schema:
    """What `tools.json` holds."""
    from importlib.metadata import version

    return {"server": {"name": "mulligan", "title": "Mulligan", "version": version("mulligan")}, "tools": table()}


def main() -> None:
    with open(FILE, "wb") as file:
        file.write(encode(whole()) + b"\n")


if __name__ == "__main__":
    main()
