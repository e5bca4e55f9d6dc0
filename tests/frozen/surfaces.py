"""What other people's programs rely on, as text: signatures, options of the command line, tools, tables, JSON shapes.

`python -m tests.frozen.surfaces` writes the goldens anew, for a change that is meant. Sentences are not frozen.
"""

from __future__ import annotations

import enum
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import click

import mulligan
from mulligan.cli import cli
from tests.frozen.hook_frames import hook_frames
from tests.frozen.json_shapes import json_shapes
from tests.frozen.records import exports, journals
from tests.servers.mcp.server_process import CLIENT, on_stdio

GOLDEN = Path(__file__).parent.parent / "golden"


def signatures() -> str:
    """Each public name: a function with its signature, a class with its public members, a value with its type."""
    return "".join(f"{line}\n" for name in sorted({*mulligan.__all__, "open"}) for line in _lines_of(name))


def _lines_of(name: str) -> Iterator[str]:
    value = getattr(mulligan, name)
    if inspect.isclass(value):
        yield f"class {name}{_signature(value)}"
        if issubclass(value, enum.Enum):
            yield from (f"    {one.name} = {one.value!r}" for one in value)
        yield from (f"    {line}" for line in _members(value))
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(owner: type) -> Iterator[str]:
    for name in sorted(vars_of(owner)):
        value = inspect.getattr_static(owner, name)
        if isinstance(value, property):
            yield f"{name}: property"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} {name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}{_signature(value)}"


def vars_of(owner: type) -> set[str]:
    """Public names of the class and of those of its bases that are ours."""
    ours = [one for one in owner.__mro__ if one.__module__.startswith("mulligan")]
    return {name for one in ours for name in vars(one) if not name.startswith("_")}


def _signature(value: Callable[..., object]) -> str:
    """Names, kinds and defaults. Annotations are left to the type checker's own tests."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        one.replace(
            annotation=inspect.Parameter.empty,
            default=one.default
            if _is_plain(one.default)
            else inspect.Parameter.empty
            if one.default is one.empty
            else ...,
        )
        for one in found.parameters.values()
        if not one.name.startswith("_")
    ]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def command_line() -> str:
    """Each verb with its arguments and options, as `--help` shows them, and their defaults and choices."""
    return "".join(
        f"{line}\n" for line in _command_lines(cli, click.Context(cli, info_name="mulligan", **cli.context_settings))
    )


def _command_lines(command: click.Command, context: click.Context) -> Iterator[str]:
    hidden = " (hidden)" if command.hidden else ""
    yield context.command_path + hidden
    for parameter in command.get_params(context):
        yield f"    {_parameter(parameter, context)}"
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _command_lines(inner, click.Context(inner, info_name=name, parent=context))


def _parameter(parameter: click.Parameter, context: click.Context) -> str:
    record = parameter.get_help_record(context)
    form = record[0] if record is not None else parameter.make_metavar(context)
    facts = parameter.to_info_dict()
    shown = {
        name: facts[name]
        for name in ("required", "multiple", "nargs", "is_flag", "flag_value", "hidden")
        if facts.get(name)
    }
    if facts.get("nargs") == 1:
        del shown["nargs"]
    if _is_plain(facts.get("default")) and facts.get("default") not in (None, False):
        shown["default"] = facts["default"]
    choices = facts["type"].get("choices")
    if choices is not None:
        shown["choices"] = sorted(map(str, choices))
    return form + "".join(f"  {name}={json.dumps(value, default=str)}" for name, value in sorted(shown.items()))


def mcp_tools() -> str:
    """Names and schemas of the tools as a host gets them; descriptions are sentences, and are left out."""
    with (
        tempfile.TemporaryDirectory() as root,
        tempfile.TemporaryDirectory() as home,
        on_stdio(Path(root), Path(home)) as peer,
    ):
        peer.request("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": CLIENT})
        tools = peer.request("tools/list", {})["result"]["tools"]
    return json.dumps({one["name"]: _without_sentences(one) for one in tools}, indent=1, sort_keys=True) + "\n"


def _without_sentences(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_sentences(one)
            for name, one in value.items()
            if not (name in ("description", "title") and isinstance(one, str))
        }
    return [_without_sentences(one) for one in value] if isinstance(value, list) else value


def tables() -> str:
    """Each column of each table of a new store, with its type."""
    with tempfile.TemporaryDirectory() as base:
        with mulligan.open(base, store=f"{base}-store"):
            pass
        connection = apsw.Connection(f"{base}-store/store.db", flags=apsw.SQLITE_OPEN_READONLY)
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(name, row[1], row[2]) for name in names for row in connection.execute(f"PRAGMA table_info({name})")]
        connection.close()
        shutil.rmtree(f"{base}-store")
    return "".join(f"{' '.join(one).rstrip()}\n" for one in sorted(columns))


def shapes(base: Path) -> str:
    return json.dumps(json_shapes(base), indent=1, sort_keys=True) + "\n"


def _in_folder(make: Callable[[Path], str]) -> Callable[[], str]:
    def made() -> str:
        with tempfile.TemporaryDirectory() as base:
            return make(Path(base))

    return made


SURFACES: dict[str, Callable[[], str]] = {
    "signatures.txt": signatures,
    "command_line.txt": command_line,
    "mcp_tools.json": mcp_tools,
    "tables.txt": tables,
    "json_shapes.json": _in_folder(shapes),
    "journals.txt": _in_folder(journals),
    "exports.json.txt": _in_folder(exports),
    "hook_frames.txt": _in_folder(hook_frames),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or SURFACES:
        (GOLDEN / name).write_text(SURFACES[name](), "utf-8")
