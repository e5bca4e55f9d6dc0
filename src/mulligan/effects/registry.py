"""Every effect in one table: its name, its name as a tool, its parameters, its function and its operation.

The tool profiles at the end say which effects the models of each provider get as tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from mulligan.boundary.capability import FsOp
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass

if TYPE_CHECKING:
    from mulligan.effects.context import EffectContext
    from mulligan.effects.params import Params


@dataclass(frozen=True)
class Effect:
    """One effect. `statuses` are its outcomes besides ok, forbidden and error; any other status becomes an error.

    `params` is the name of its model, `function` is its module and its function there.
    """

    name: str
    tool: str
    params: str
    op: FsOp
    function: str
    statuses: tuple[str, ...]
    read_only: bool

    @cached_property
    def act(self) -> Callable[[EffectContext, Any], dict[str, Any]]:
        # Loaded at the first use, because a process uses few effects, and some need much.
        module, _, name = self.function.partition(".")
        found: Callable[[EffectContext, Any], dict[str, Any]] = getattr(
            import_module(f"mulligan.effects.{module}"), name
        )
        return found

    @property
    def model(self) -> type[Params]:
        from mulligan.effects import params

        model: type[Params] = getattr(params, self.params)
        return model

    @property
    def about(self) -> str:
        return self.model.about


def _changing(name: str, declared: str, op: FsOp, act: str, *statuses: str) -> Effect:
    tool = _TOOL_NAMES.get(name) or name.removeprefix("host.").removeprefix("fs.").replace(".", "_")
    return Effect(name, tool, declared, op, act, statuses, read_only=False)


def _reading(name: str, declared: str, op: FsOp, act: str, *statuses: str) -> Effect:
    return replace(_changing(name, declared, op, act, *statuses), read_only=True)


_TOOL_NAMES = {"blob.read": "read_blob"}
"""The tools that are not named after their effect."""

EFFECTS: tuple[Effect, ...] = (
    _reading("host.fs.read_file", "ReadFile", "read", "read.read_file", "not_found", "is_directory"),
    _changing("host.fs.write_file", "WriteFile", "write", "write.write_file", "conflict"),
    _changing("host.fs.edit_file", "EditFile", "edit", "write.edit_file", "not_found", "ambiguous"),
    _changing("host.fs.apply_patch", "ApplyPatch", "patch", "patch.apply_patch", "parse_error", "reject", "not_found"),
    _reading("host.fs.grep", "Grep", "search", "read.grep_files", "not_found", "invalid_regex"),
    _reading("host.fs.glob", "Glob", "list", "read.glob_files", "not_found", "invalid_pattern"),
    _reading("host.fs.stat", "Stat", "stat", "read.stat_answer", "not_found"),
    _reading("host.fs.exists", "Exists", "stat", "read.exists"),
    _reading("host.fs.list_dir", "ListDir", "list", "read.list_dir", "not_found"),
    _changing("host.fs.delete", "Delete", "write", "write.delete", "not_found", "conflict"),
    _changing("host.fs.move", "Move", "write", "write.move", "not_found", "conflict"),
    _changing("host.fs.mkdir", "MakeDir", "write", "write.make_dir", "conflict"),
    _changing("host.exec", "Exec", "exec", "exec.execute", "timeout", "signaled"),
    _reading("host.exec.output", "ExecOutput", "exec", "exec.output", "not_found"),
    _changing("host.exec.signal", "ExecSignal", "exec", "exec.send_signal", "not_found", "already_exited", "signaled"),
    _changing("host.shell", "Shell", "exec", "exec.shell", "timeout", "signaled"),
    _reading("blob.read", "ReadBlob", "read", "read.read_blob"),
)

BY_NAME: dict[str, Effect] = {name: effect for effect in EFFECTS for name in (effect.name, effect.tool)}


def effect_named(name: str) -> Effect:
    effect = BY_NAME.get(name) if isinstance(name, str) else None
    if effect is None:
        raise unknown_effect(name, [one.tool for one in EFFECTS])
    return effect


def unknown_effect(name: str, known: Iterable[str]) -> MulliganError:
    tools = sorted(known)
    words = f"There is no tool or effect {name!r}. The tools are {', '.join(tools)}."
    return fault("unknown_effect", words, name=name, tools=tools)


# Tool profiles: which effects a model gets as tools, and with which parameters.
#
# Every profile reads, writes, searches, lists and runs commands. OpenAI's models are trained on patches and get
# `apply_patch`; Anthropic's and Gemini's get `edit_file`. Schemas are made from the parameters of the effects, without
# what a model must not choose: its session, and whether answers come inline.

Profile = Literal["openai", "anthropic", "gemini"]
Schema = dict[str, Any]

PROFILES: tuple[Profile, ...] = ("openai", "anthropic", "gemini")

_CHANGING: Mapping[Profile, str] = {"openai": "apply_patch", "anthropic": "edit_file", "gemini": "edit_file"}
_BEFORE = ("read_file", "write_file")
_AFTER = ("grep", "glob", "list_dir", "shell", "read_blob")
_NOT_FOR_MODELS = frozenset({"session_id", "output_mode"})
_KEPT = ("type", "description", "enum", "const", "minimum", "exclusiveMinimum", "default", "items")


@fast_dataclass(slots=True, frozen=True)
class Offer:
    """One tool of a profile. Those that are `read_only` may run side by side."""

    name: str
    effect: str
    description: str
    parameters: Schema
    read_only: bool


def offers(profile: str) -> list[Offer]:
    """The tools of a profile, in the order in which a model gets them. Raises `invalid_params`."""
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
    schema = effect.model.model_json_schema(by_alias=True)
    properties = {name: _model_form(body) for name, body in schema["properties"].items() if name not in _NOT_FOR_MODELS}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name in schema.get("required", ()) if name in properties],
        "additionalProperties": False,
    }
    return Offer(effect.tool, effect.name, effect.about, parameters, effect.read_only)


def _model_form(body: Schema) -> Schema:
    """The one form that a model should use: text for a payload, and no null where leaving out says the same."""
    options = [option for option in body.get("anyOf", [body]) if option.get("type") not in (None, "null")]
    merged = {**options[0], **{key: value for key, value in body.items() if key not in ("anyOf", "default")}}
    if body.get("default") is not None:
        merged["default"] = body["default"]
    return {key: merged[key] for key in _KEPT if key in merged}
