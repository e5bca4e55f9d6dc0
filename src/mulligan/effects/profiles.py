"""Tool profiles: which of our effects a model gets as tools, and with which parameters.

Every profile reads, writes, searches, lists and runs commands. OpenAI's models are trained on patches and get
`apply_patch`; Anthropic's and Gemini's get `edit_file`. Schemas are made from the parameters of the effects, without
what is not a model's to choose: its session, and whether answers come inline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mulligan.effects.perform import effect_named
from mulligan.values.faults import fault
from mulligan.values.plain import plain

Profile = Literal["openai", "anthropic", "gemini"]
Schema = dict[str, Any]

PROFILES: tuple[Profile, ...] = ("openai", "anthropic", "gemini")

_CHANGING: Mapping[Profile, str] = {"openai": "apply_patch", "anthropic": "edit_file", "gemini": "edit_file"}
_BEFORE = ("read_file", "write_file")
_AFTER = ("grep", "glob", "list_dir", "shell", "read_blob")
_NOT_FOR_MODELS = frozenset({"session_id", "output_mode"})
_KEPT = ("type", "description", "enum", "const", "minimum", "exclusiveMinimum", "default", "items")


@plain(slots=True, frozen=True)
class Offer:
    """One tool of a profile. Those that are `read_only` may run side by side."""

    name: str
    effect: str
    description: str
    parameters: Schema
    read_only: bool


def offers(profile: str) -> list[Offer]:
    """The tools of a profile, in the order they are told to a model. Raises `invalid_params` for one nobody knows."""
    return [_offer(name) for name in (*_BEFORE, _CHANGING[known_profile(profile)], *_AFTER)]


def known_profile(profile: str) -> Profile:
    for known in PROFILES:
        if profile == known:
            return known
    raise fault("invalid_params", f"There is no profile {profile!r}; there are {', '.join(PROFILES)}.")


def declared(parameters: Schema) -> Schema:
    """Parameters as Gemini declares functions: its schemas know no `additionalProperties` and no `default`."""
    properties = {
        name: {key: value for key, value in body.items() if key not in ("default", "exclusiveMinimum")}
        for name, body in parameters["properties"].items()
    }
    return {"type": "object", "properties": properties, "required": parameters["required"]}


def _offer(name: str) -> Offer:
    effect = effect_named(name)
    schema = effect.params.model_json_schema(by_alias=True)
    properties = {name: _plain(body) for name, body in schema["properties"].items() if name not in _NOT_FOR_MODELS}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name in schema.get("required", ()) if name in properties],
        "additionalProperties": False,
    }
    return Offer(effect.tool, effect.name, effect.about, parameters, effect.read_only)


def _plain(body: Schema) -> Schema:
    """The one form that a model should use: text for a payload, and no null where leaving out says the same."""
    options = [option for option in body.get("anyOf", [body]) if option.get("type") not in (None, "null")]
    merged = {**options[0], **{key: value for key, value in body.items() if key not in ("anyOf", "default")}}
    if body.get("default") is not None:
        merged["default"] = body["default"]
    return {key: merged[key] for key in _KEPT if key in merged}
