"""Writes the API reference in `docs/reference/` from the docstrings: `python docs/reference.py`, or `make docs`.

A page is a title, a few words, and names: of functions, of classes with their public methods, and of modules. Every
public name is on exactly one page; a test says which is missing, and whether the pages are as this would write them.
With `--look` it writes nothing, and tells that test what it has found.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

from mulligan.values.canonical import encode

PLACE = Path(__file__).parent / "reference"
INDEX = "index.md"
_WIDTH = 96
_GIVEN = (
    *("Mulligan", "Sessions", "DurableSession", "CallHandle", "AsyncCallHandle"),
    *("Receipt", "UndoResult", "Outcome"),
    *("SliceAccessor", "Items", "SessionFilesystem"),
)
"""Classes that users do not construct themselves; the reference leaves out their constructors."""
_WORDS = 3


@dataclass(frozen=True)
class Page:
    """`names` are dotted; those of `mulligan` itself are given without it, and a module means everything in it."""

    title: str
    about: str
    names: Sequence[str]
    shows_members: bool = True


PAGES: Mapping[str, Page] = {
    "opening": Page(
        "Opening a workspace",
        "A folder, the sessions on it, and calls: transactions over its files.",
        (
            *("open", "Mulligan", "mulligan.effects.sessions.Sessions"),
            *("DurableSession", "mulligan.effects.handle.CallHandle"),
            "mulligan.effects.handle.AsyncCallHandle",
            *("Receipt", "mulligan.history.undo.UndoResult"),
            *("mulligan.history.plan.Outcome", "ReplayRunner"),
        ),
    ),
    "agents": Page(
        "Agents and tools",
        "A whole agent in one call, and its parts.",
        (
            *("agent_loop", "Bounds", "mulligan.agents.loop.LoopResult", "mulligan.agents.loop.ToolStarted"),
            *("mulligan.agents.loop.ToolEnded", "mulligan.agents.loop.IterationEnded", "tool", "Tool", "coding_tools"),
            *("ToolContext", "ToolResult", "ProviderToolCall", "ToolRunner", "tool_execution", "ToolExecutionOutcome"),
            *("MainLoop", "mulligan.agents.loop.PromptResponse", "TranscriptState"),
        ),
    ),
    "providers": Page(
        "Providers",
        "The models an agent can be run with, and what one of your own has to do.",
        (
            *(
                "mulligan.agents.providers.provider_of",
                "mulligan.agents.providers.provider_named",
                "mulligan.agents.providers.openai.OpenAI",
            ),
            *("mulligan.agents.providers.openai.LiteLLM", "mulligan.agents.providers.claude.Claude"),
            *("mulligan.agents.providers.Mock", "mulligan.agents.providers.Provider"),
            *(
                "mulligan.agents.providers.Driver",
                "mulligan.agents.providers.Ask",
                "mulligan.agents.providers.Said",
            ),
            "mulligan.agents.providers.Reply",
        ),
    ),
    "adapters": Page(
        "Adapters",
        "Our tools and our store under other people's loops.",
        (
            *("mulligan.agents.openai_agents.tools_for", "mulligan.agents.openai_agents.AgentsSession"),
            "mulligan.agents.pydantic_ai.tools_for",
            *("mulligan.agents.langgraph.tools_for", "mulligan.agents.langgraph.MulliganSaver"),
        ),
    ),
    "state": Page(
        "Typed state",
        "Slices: what an agent keeps in mind, by type, changed by events.",
        (
            *("Session", "mulligan.session.state.session.SliceAccessor", "SlicePolicy", "append_all"),
            *(
                "replace_latest",
                "upsert_by",
                "reducer",
                "mulligan.session.state.slices.Items",
                "mulligan.session.state.slices.Append",
                "mulligan.session.state.slices.Extend",
            ),
            *(
                "mulligan.session.state.slices.Replace",
                "mulligan.session.state.slices.Clear",
                "register_type",
                "EventBus",
            ),
            *("mulligan.session.subscribers.DispatchResult", "Plan", "VisibilityOverrides", "WorkspaceDigest"),
            *("ToolInvoked", "PromptRendered", "PromptExecuted"),
        ),
    ),
    "snapshots": Page(
        "Snapshots, checkpoints and resources",
        "Everything a run can be put back to, and what takes part in that.",
        (
            *("ExecutionState", "CompositeSnapshot", "Snapshot", "SnapshotMetadata", "SessionSnapshotAdapter"),
            *("CheckpointStore", "ToolCheckpoint", "rollback_to_tool", "ResourceRegistry", "Snapshotable", "Lazy"),
            *("BudgetTracker", "BudgetSnapshot", "Clock", "SystemClock", "FixedClock"),
        ),
    ),
    "files": Page(
        "File systems",
        "Files as a resource of an agent: on the disk, in memory, or a durable session's own.",
        (
            *("Filesystem", "SnapshotableFilesystem", "FilesystemSnapshot", "HostFilesystem", "InMemoryFilesystem"),
            "mulligan.effects.session_filesystem.SessionFilesystem",
        ),
    ),
    "errors": Page(
        "Errors",
        "Whose doing it was, and what to do next. Every one is a `MulliganError` with a stable `code`.",
        (
            *(
                "MulliganError",
                "Family",
                "RequestError",
                "ForbiddenError",
                "ConflictError",
                "InternalError",
                "ExecutionStateError",
            ),
            *("SnapshotMismatchError", "RestoreFailedError", "ToolValidationError", "VisibilityExpansionRequired"),
            *("DeadlineExceededError", "PromptEvaluationError"),
        ),
    ),
    "tokens": Page("Tokens", "Bearer tokens of a store.", ("tokens",)),
    "testing": Page("Testing", "What `mulligan.testing` has for tests of your own.", ("mulligan.testing",), False),
    "builtins": Page("Builtins", "Sessions and snapshots by the names of the documents.", ("mulligan.builtins",)),
}


@dataclass(frozen=True)
class Entry:
    """One documented thing under the name a user writes."""

    name: str
    value: Any
    shows_members: bool = True

    @property
    def doc(self) -> str:
        """Its own words: not those of a base class, nor those that a dataclass makes up."""
        own = "" if isinstance(self.value, GenericAlias) else inspect.cleandoc(self.value.__doc__ or "")
        made_up = inspect.isclass(self.value) and own.startswith(f"{self.value.__name__}(")
        return "" if made_up or own == inspect.getdoc(type(self.value)) else own

    @cached_property
    def members(self) -> list[Entry]:
        """The public methods and properties of a class, also those it inherits from other classes of ours."""
        if not self.shows_members or not inspect.isclass(self.value) or issubclass(self.value, BaseException):
            return []
        ours = [kind for kind in self.value.__mro__ if kind.__module__.startswith("mulligan")]
        names = dict.fromkeys(name for kind in ours for name in vars(kind) if not name.startswith("_"))
        found = [Entry(name, inspect.getattr_static(self.value, name)) for name in names]
        return [one for one in found if _is_method(one.value)]

    def lines(self, level: int) -> Iterator[str]:
        yield from (f"{'#' * level} {self.name}", "", "```python", self.signature, "```", "")
        if self.doc:
            yield from (_as_markdown(self.doc), "")
        for member in self.members:
            yield from Entry(f"{self.name.rpartition('.')[2]}.{member.name}", member.value).lines(level + 1)

    @property
    def signature(self) -> str:
        value = _plain(self.value)
        short = self.name.rpartition(".")[2]
        if isinstance(self.value, property | cached_property):
            given = getattr(value, "__annotations__", {}).get("return", "")
            return f"{self.name}: {given}"
        if not callable(value) or isinstance(value, GenericAlias):
            plain = isinstance(value, str | int | float | GenericAlias)
            return f"{short} = {value!r}" if plain else f"{short}: {type(value).__name__}"
        if inspect.isclass(value):
            made = "" if short in _GIVEN else _of_class(value)
            return "\n".join([f"class {short}{made}", *_values(value)])
        kind = "async def" if inspect.iscoroutinefunction(value) else "def"
        return f"{kind} {short}{_spelled(_signature(value), bound='.' in self.name and self.value is not value)}"


def _is_method(value: object) -> bool:
    plain = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
    return plain or isinstance(value, property | cached_property)


def _plain(value: Any) -> Any:
    """The function behind a property or a class method."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, cached_property):
        return value.func
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def _values(kind: type[Any]) -> list[str]:
    """The members of an enumeration."""
    return [f"    {one.name} = {one.value!r}" for one in kind] if issubclass(kind, Enum) else []


def _of_class(kind: type[Any]) -> str:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object and base.__name__ != "Generic")
    if issubclass(kind, BaseException) or getattr(kind, "_is_protocol", False) or issubclass(kind, Enum):
        return f"({bases})" if bases else ""
    return _spelled(_signature(kind.__init__), bound=True, result=False)


def _signature(value: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


class _Word:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _spelled(signature: inspect.Signature | None, *, bound: bool = False, result: bool = True) -> str:
    """A signature as in the source, on several lines if it is long."""
    if signature is None:
        return "(…)"
    given = [_shown(one) for one in signature.parameters.values()]
    if given and given[0].name in ("self", "cls"):
        given = given[1:]
    empty = inspect.Signature.empty
    returned = (
        _annotation(signature.return_annotation) if result and signature.return_annotation is not empty else empty
    )
    whole = str(inspect.Signature(given, return_annotation=returned))
    if len(whole) <= _WIDTH:
        return whole
    tail = whole.rpartition(")")[2]
    words = [str(one) for one in given]
    at = next((i for i, one in enumerate(given) if one.kind is one.KEYWORD_ONLY), None)
    if at is not None and not any(one.kind is one.VAR_POSITIONAL for one in given):
        words.insert(at, "*")
    positional = [i for i, one in enumerate(given) if one.kind is one.POSITIONAL_ONLY]
    if positional:
        words.insert(positional[-1] + 1, "/")
    return "(\n    " + ",\n    ".join(words) + f",\n){tail}"


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if default is not parameter.empty and not isinstance(default, str | int | float | bool | bytes | tuple | None):
        default = _Word(getattr(default, "__name__", "…"))
    elif isinstance(default, str):
        default = _Word(f'"{default}"')
    return parameter.replace(annotation=_annotation(parameter.annotation), default=default)


def _annotation(given: Any) -> Any:
    return _Word(given) if isinstance(given, str) else given


def _as_markdown(doc: str) -> str:
    """Indented examples become code."""
    out: list[str] = []
    inside = False
    for line in doc.splitlines():
        code = line.startswith("    ")
        if code and not inside:
            out.append("```python")
        elif inside and not code and line:
            out += ["```", ""]
        inside = code or (inside and not line)
        out.append(line.removeprefix("    ") if inside else line)
    return "\n".join([*out, "```"] if inside else out)


def entries(page: Page) -> list[Entry]:
    """What a page documents, a module resolved into its names."""
    named = [one for name in page.names for one in _named(name if "." in name else f"mulligan.{name}")]
    return [Entry(name, value, page.shows_members) for name, value in named]


def _named(name: str) -> Iterator[tuple[str, Any]]:
    value = _found(name)
    if isinstance(value, ModuleType):
        yield from ((f"{name}.{public}", getattr(value, public)) for public in _public(value))
    else:
        yield name, value


def _found(name: str) -> Any:
    home, _, last = name.rpartition(".")
    module = import_module(home)
    return getattr(module, last) if hasattr(module, last) else import_module(name)


def _public(module: ModuleType) -> Sequence[str]:
    listed: Sequence[str] | None = getattr(module, "__all__", None)
    if listed is not None:
        return listed
    own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
    return sorted(name for name in own if not name.startswith("_"))


def weak(entry: Entry) -> Iterator[str]:
    """Names in it that do not say what they promise. What a constant is, its page and its value say."""
    says_itself = isinstance(entry.value, GenericAlias) or not callable(_plain(entry.value))
    if not says_itself and len(entry.doc.split()) < _WORDS:
        yield entry.name
    for member in entry.members:
        yield from (f"{entry.name}.{name}" for name in weak(member))


def written() -> dict[str, str]:
    """Every page by its file name."""
    pages = {f"{name}.md": _page(page) for name, page in PAGES.items()}
    return {INDEX: _index(), **pages}


def _page(page: Page) -> str:
    lines = [f"# {page.title}", "", page.about, "", *(line for one in entries(page) for line in one.lines(2))]
    return "\n".join(lines).rstrip() + "\n"


def _index() -> str:
    lines = [
        "# Reference",
        "",
        "Made from the docstrings by `make docs`. The [guide](../guides/python.md) comes first.",
        "",
    ]
    for name, page in PAGES.items():
        lines += [f"- **[{page.title}]({name}.md)**: {', '.join(f'`{label}`' for label in _labels(entries(page)))}"]
    return "\n".join(lines) + "\n"


def _labels(listed: Sequence[Entry]) -> list[str]:
    """The last word of a name, or the last two where several end alike."""
    short = [one.name.rpartition(".")[2] for one in listed]
    longer = [".".join(one.name.split(".")[-2:]) for one in listed]
    return [last if short.count(last) == 1 else more for last, more in zip(short, longer, strict=True)]


def found() -> dict[str, Any]:
    """Everything a test wants to know: the pages, the names on them, and those that do not say what they promise."""
    listed = [entry for page in PAGES.values() for entry in entries(page)]
    return {
        "pages": written(),
        "names": [entry.name for entry in listed],
        "members": sum(len(entry.members) for entry in listed),
        "weak": [name for entry in listed for name in weak(entry)],
    }


def write(pages: Mapping[str, str]) -> None:
    PLACE.mkdir(exist_ok=True)
    for old in PLACE.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        (PLACE / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    if "--look" in arguments:
        sys.stdout.write(encode(found()).decode("utf-8"))
    else:
        write(written())


if __name__ == "__main__":
    main(sys.argv[1:])
