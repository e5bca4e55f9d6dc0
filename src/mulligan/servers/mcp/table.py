"""Makes the table of MCP tools from the tools themselves. `make mcp-table` runs it, and it writes `tools.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.effects.params import Params, StrictModel, built
from mulligan.effects.registry import EFFECTS, Effect, Offer, declared, effect_named, offers
from mulligan.effects.snapshot_tools import models
from mulligan.effects.snapshot_tools.store import CODES
from mulligan.effects.snapshot_tools.tools import TOOLS, SnapshotTool
from mulligan.servers.mcp.dispatch import HISTORY, HistoryTool
from mulligan.servers.mcp.protocol import FILE, PROFILES
from mulligan.values import VERSION
from mulligan.values.canonical import encode

Schema = dict[str, Any]

SESSION: Schema = {"type": "string", "description": "The session to act in; by default one for this root and client."}
_OPEN_WORLD = frozenset({"exec", "shell"})
_ERROR: Schema = {
    "type": "object",
    "title": "Error",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"enum": list(CODES)},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
            "required": ["code", "message", "details"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}
_RECEIPT: Schema = {
    "type": "object",
    "properties": {
        "status": {"type": "string", "description": "ok, or why not."},
        "error_code": {"type": "string"},
        "error_message": {"type": "string"},
    },
    "required": ["status"],
}


def table() -> dict[str, list[Schema]]:
    return {
        "substrate": [_substrate(tool) for tool in TOOLS],
        "coding": [_coding(effect) for effect in EFFECTS],
        "history": [_history(name, tool) for name, tool in HISTORY.items()],
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


def _substrate(tool: SnapshotTool) -> Schema:
    given, answered = _input_of(tool.params), answer_schema(tool)
    body = _listed(tool.name.replace(".", "_"), tool.name, tool.about, given=given, answered=answered)
    hints = _annotations(
        read_only=tool.read_only, destructive=not tool.read_only, again=tool.name == "workspace.write_file"
    )
    return {**body, "annotations": hints}


def answer_schema(tool: SnapshotTool) -> Schema:
    """A success of one of the tool's shapes, or S2's error envelope."""
    shapes = [_answer_shape(models.answer_model(fields, hint)) for hint, fields in tool.answers.items()]
    return {"type": "object", "oneOf": [shapes[0] if len(shapes) == 1 else {"oneOf": shapes}, _ERROR]}


def _answer_shape(model: type[StrictModel]) -> Schema:
    schema = built(model).model_json_schema()
    return {**_without_enum_types(portable(schema)), "title": schema["title"]}


def _without_enum_types(schema: Schema) -> Schema:
    """An answer's constants name their type by their value."""
    body = {name: _without_enum_types(one) if isinstance(one, dict) else one for name, one in schema.items()}
    if "const" in body or isinstance(body.get("enum"), list):
        body.pop("type", None)
    return body


def _coding(effect: Effect) -> Schema:
    given = _input_of(effect.model)
    hints = _annotations(
        read_only=effect.read_only,
        destructive=not effect.read_only,
        again=effect.tool in ("write_file", "mkdir"),
        world=effect.tool in _OPEN_WORLD,
    )
    return {**_listed(effect.tool, effect.name, effect.about, given=given, answered=_RECEIPT), "annotations": hints}


def _offered(offer: Offer, profile: str) -> Schema:
    """A tool of `coding` with the parameters of one provider's profile."""
    given = declared(offer.parameters) if profile == "gemini" else offer.parameters
    listed = _coding(effect_named(offer.name))
    return {**listed, "inputSchema": {**given, "properties": {**given["properties"], "session_id": SESSION}}}


def portable(schema: Schema) -> Schema:
    """A model's schema in the subset that every host's API accepts: no references, no alternatives, no titles."""
    definitions = schema.get("$defs", {})
    properties = {name: _plain(one, definitions) for name, one in schema.get("properties", {}).items()}
    return {
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


def _plain(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The simplest form of a value: of alternatives the string or the first; optional instead of nullable."""
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


def _history(name: str, tool: HistoryTool) -> Schema:
    hints = _annotations(read_only=tool.read_only, destructive=tool.destructive and not tool.read_only)
    title = name.replace("_", ".", 1)
    return {
        **_listed(name, title, tool.about, given=_input_of(tool.params), answered=tool.answer),
        "annotations": hints,
    }


def _input_of(params: type[Params]) -> Schema:
    given = portable(params.model_json_schema())
    given["properties"].pop("session_id", None)
    return given


def whole() -> Schema:
    """The content of `tools.json`."""
    return {"server": {"name": "mulligan", "title": "Mulligan", "version": VERSION}, "tools": table()}


def main() -> None:
    with open(FILE, "wb") as file:
        file.write(encode(whole()) + b"\n")


if __name__ == "__main__":
    main()
