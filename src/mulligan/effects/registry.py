"""Every effect in one table: its name, its name as a tool, its parameters, its function and its operation.

The tool profiles at the end say which effects the models of each provider get as tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mulligan.boundary.capability import FsOp
from mulligan.effects import exec, params, patch, read, write
from mulligan.effects.context import EffectContext
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass

Act = Callable[[EffectContext, Any], dict[str, Any]]


@dataclass(slots=True, frozen=True, kw_only=True)
class Effect:
    """One effect. `statuses` are its outcomes besides ok, forbidden and error; any other status becomes an error."""

    name: str
    tool: str
    params: type[params.Params]
    op: FsOp
    act: Act
    about: str
    read_only: bool = False
    statuses: tuple[str, ...] = ()


EFFECTS: tuple[Effect, ...] = (
    Effect(
        name="host.fs.read_file",
        tool="read_file",
        params=params.ReadFile,
        op="read",
        act=read.read_file,
        read_only=True,
        statuses=("not_found", "is_directory"),
        about="Read a file or a part of it, by bytes or by lines.",
    ),
    Effect(
        name="host.fs.write_file",
        tool="write_file",
        params=params.WriteFile,
        op="write",
        act=write.write_file,
        statuses=("conflict",),
        about="Write a whole file.",
    ),
    Effect(
        name="host.fs.edit_file",
        tool="edit_file",
        params=params.EditFile,
        op="edit",
        act=write.edit_file,
        statuses=("not_found", "ambiguous"),
        about="Replace text in a file. old_string must be found exactly once, unless replace_all is set.",
    ),
    Effect(
        name="host.fs.apply_patch",
        tool="apply_patch",
        params=params.ApplyPatch,
        op="patch",
        act=patch.apply_patch,
        statuses=("parse_error", "reject", "not_found"),
        about="Apply a patch to one or more files, all or nothing: '*** Begin Patch' format, or patch_format unified.",
    ),
    Effect(
        name="host.fs.grep",
        tool="grep",
        params=params.Grep,
        op="search",
        act=read.grep_files,
        read_only=True,
        statuses=("not_found", "invalid_regex"),
        about="Search the contents of files by regular expression. Answers with lines of path:line:text.",
    ),
    Effect(
        name="host.fs.glob",
        tool="glob",
        params=params.Glob,
        op="list",
        act=read.glob_files,
        read_only=True,
        statuses=("not_found", "invalid_pattern"),
        about="Find files by a pattern such as **/*.py, newest first.",
    ),
    Effect(
        name="host.fs.stat",
        tool="stat",
        params=params.Stat,
        op="stat",
        act=read.stat_answer,
        read_only=True,
        statuses=("not_found",),
        about="Whether a path is a file or a directory, its size and its time.",
    ),
    Effect(
        name="host.fs.exists",
        tool="exists",
        params=params.Exists,
        op="stat",
        act=read.exists,
        read_only=True,
        about="Whether a path exists.",
    ),
    Effect(
        name="host.fs.list_dir",
        tool="list_dir",
        params=params.ListDir,
        op="list",
        act=read.list_dir,
        read_only=True,
        statuses=("not_found",),
        about="The names in a directory, directories with a trailing slash.",
    ),
    Effect(
        name="host.fs.delete",
        tool="delete",
        params=params.Delete,
        op="write",
        act=write.delete,
        statuses=("not_found", "conflict"),
        about="Delete a file, a link or a directory.",
    ),
    Effect(
        name="host.fs.move",
        tool="move",
        params=params.Move,
        op="write",
        act=write.move,
        statuses=("not_found", "conflict"),
        about="Move a file, a link or a directory.",
    ),
    Effect(
        name="host.fs.mkdir",
        tool="mkdir",
        params=params.MakeDir,
        op="write",
        act=write.make_dir,
        statuses=("conflict",),
        about="Make a directory.",
    ),
    Effect(
        name="host.exec",
        tool="exec",
        params=params.Exec,
        op="exec",
        act=exec.execute,
        statuses=("timeout", "signaled"),
        about="Run a program.",
    ),
    Effect(
        name="host.exec.output",
        tool="exec_output",
        params=params.ExecOutput,
        op="exec",
        act=exec.output,
        read_only=True,
        statuses=("not_found",),
        about="Page through the output of a command in the background, and see whether it has ended.",
    ),
    Effect(
        name="host.exec.signal",
        tool="exec_signal",
        params=params.ExecSignal,
        op="exec",
        act=exec.send_signal,
        statuses=("not_found", "already_exited", "signaled"),
        about="Send a signal to a command in the background.",
    ),
    Effect(
        name="host.shell",
        tool="shell",
        params=params.Shell,
        op="exec",
        act=exec.shell,
        statuses=("timeout", "signaled"),
        about="Run a shell command with sh -c.",
    ),
    Effect(
        name="blob.read",
        tool="read_blob",
        params=params.ReadBlob,
        op="read",
        act=read.read_blob,
        read_only=True,
        about="Page through an answer that was too large to be given inline.",
    ),
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
