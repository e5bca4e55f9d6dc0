"""Tools: a name, a description for the model, and a function whose signature gives the parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast, get_type_hints, overload

from mulligan.files.filesystems import Filesystem
from mulligan.history.checkpoint import ExecutionState
from mulligan.session.state.resources import ResourceRegistry
from mulligan.session.state.session import Session
from mulligan.session.state.slices import ToolResult
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock
from mulligan.values.errors import DeadlineExceededError, ExecutionStateError, MulliganError, ToolValidationError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")
Handler = Callable[..., Any]

_CONTEXT_NAMES = frozenset({"context", "ctx", "tool_context"})
_STATE_NAMES = frozenset({"execution_state", "state"})
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(slots=True, frozen=True)
class ProviderToolCall:
    """A tool call that a model asks for. `arguments` are JSON text, as providers send them, or an object."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The arguments as JSON text."""
        return self.arguments if isinstance(self.arguments, str) else encode(dict(self.arguments)).decode("utf-8")

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object. Raises ToolValidationError for anything else."""
        if not isinstance(self.arguments, str):
            return dict(self.arguments)
        try:
            body = decode(self.arguments) if self.arguments.strip() else {}
        except MulliganError as error:
            raise ToolValidationError(f"The arguments of {self.name} are not JSON: {error.message}") from None
        if not isinstance(body, dict):
            raise ToolValidationError(f"The arguments of {self.name} are not a JSON object.")
        return body


@dataclass(slots=True, frozen=True)
class ToolContext:
    """What a handler can know about its run: the state, the call, the deadline, the other tools."""

    execution_state: ExecutionState
    tool_call_id: str = ""
    prompt_name: str = ""
    adapter: str = ""
    deadline: datetime | None = None
    tools: Mapping[str, Tool[Any, Any]] = field(default_factory=dict)

    @property
    def session(self) -> Session:
        """The session of the call, with its slices."""
        return self.execution_state.session

    @property
    def resources(self) -> ResourceRegistry:
        """The resources of the run, by type."""
        return self.execution_state.resources

    @property
    def filesystem(self) -> Filesystem:
        """The run's file system. Raises ExecutionStateError if the run has none."""
        found = self.execution_state.resources.get(Filesystem)
        if found is None:
            raise ExecutionStateError("This run has no file system; give it one as a resource, under Filesystem.")
        return found

    @property
    def clock(self) -> Clock:
        """The clock of the run; a handler that uses it can be replayed."""
        return self.execution_state.clock

    @property
    def rng(self) -> Random | None:
        """The random generator of the run, which a failed call restores; None if the run has none."""
        return self.execution_state.rng

    def check_deadline(self) -> None:
        """Raises DeadlineExceededError after the deadline; long handlers may call it now and then."""
        if self.deadline is not None and self.clock.now() >= self.deadline:
            raise DeadlineExceededError(f"The deadline {self.deadline.isoformat()} has passed.")


@dataclass(frozen=True)
class Tool(Generic[ParamsT, ResultT]):
    """A tool. `handler` is sync or async and takes `(params, *, context)`, keyword arguments, or nothing.

    `params` is the dataclass or pydantic model of the arguments, if the handler has no annotations. A `read_only` tool
    promises to change nothing, so several may run in parallel.
    """

    name: str
    description: str
    handler: Handler
    params: type[ParamsT] | None = None
    read_only: bool = False
    schema: Mapping[str, Any] | None = None

    @cached_property
    def _shape(self) -> _Shape:
        return _shape_of(self.handler, self.params)

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, for a model."""
        return self.schema if self.schema is not None else self._shape.schema()

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        return inspect.iscoroutinefunction(_function(self.handler))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the handler without a transaction, for tests and for other tools."""
        return self.handler(*args, **kwargs)

    def bound(self, arguments: Mapping[str, Any], context: ToolContext) -> Callable[[], Any]:
        """The handler with its arguments bound. Raises ToolValidationError for arguments that do not fit."""
        positional, named = self._shape.bind(self.name, arguments, context)
        return lambda: self.handler(*positional, **named)


@overload
def tool(function: Handler, /) -> Tool[Any, Any]: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, read_only: bool = False
) -> Callable[[Handler], Tool[Any, Any]]: ...
def tool(
    function: Handler | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    read_only: bool = False,
) -> Tool[Any, Any] | Callable[[Handler], Tool[Any, Any]]:
    """Makes a tool from a function: its name, its docstring as the description, its annotations as the parameters.

    `Annotated[str, Field(description=…)]` describes a parameter. The runner fills in parameters that are annotated as
    ToolContext or ExecutionState; the model does not see them. Raises ToolValidationError for a name that providers
    refuse.
    """

    def made(handler: Handler) -> Tool[Any, Any]:
        if not callable(handler):
            raise ToolValidationError(f"A tool is made from a function; {handler!r} cannot be called.")
        called = name or str(getattr(handler, "__name__", ""))
        if not _NAME.fullmatch(called):
            words = f"{called or handler!r} is not a valid tool name; use at most 64 letters, digits, - and _."
            raise ToolValidationError(words)
        return Tool(called, description or inspect.getdoc(_function(handler)) or "", handler, read_only=read_only)

    return made if function is None else made(function)


AnyTool: TypeAlias = Tool[Any, Any] | Handler


def as_tool(given: AnyTool) -> Tool[Any, Any]:
    """The tool itself, or a tool made from a function."""
    return given if isinstance(given, Tool) else tool(given)


def by_name(tools: Iterable[Tool[Any, Any]]) -> dict[str, Tool[Any, Any]]:
    """The tools as a mapping. Raises ToolValidationError if two have the same name."""
    found: dict[str, Tool[Any, Any]] = {}
    for tool in tools:
        if tool.name in found:
            raise ToolValidationError(f"There are two tools {tool.name!r}.")
        found[tool.name] = tool
    return found


def registry_of(tools: Mapping[str, AnyTool] | Iterable[AnyTool]) -> Mapping[str, Tool[Any, Any]]:
    """Tools as a mapping. A plain function becomes a tool with its key as name, or with its own name.

    A mapping that holds only tools is used as it is, so that its owner can add tools later.
    """
    if not isinstance(tools, Mapping):
        return by_name(as_tool(one) for one in tools)
    if all(isinstance(one, Tool) for one in tools.values()):
        return cast("Mapping[str, Tool[Any, Any]]", tools)
    return {name: one if isinstance(one, Tool) else tool(name=name)(one) for name, one in tools.items()}


def as_result(value: object) -> ToolResult[Any]:
    """A handler's return value as a result: any value that is not a ToolResult is a success."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult("" if value is None else str(value), value)


@dataclass(frozen=True)
class _Shape:
    """The signature of a handler: `whole` is the one parameter that takes all arguments, `named` are the others."""

    context: tuple[inspect.Parameter, ...]
    state: tuple[inspect.Parameter, ...]
    whole: inspect.Parameter | None
    kind: Any
    named: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    takes_any: bool

    def bind(self, tool: str, arguments: Mapping[str, Any], context: ToolContext) -> tuple[list[Any], dict[str, Any]]:
        given: dict[str, Any] = {one.name: context for one in self.context}
        given |= {one.name: context.execution_state for one in self.state}
        if self.whole is not None:
            given[self.whole.name] = _parsed(tool, self.kind, arguments)
        else:
            given |= self._by_name(tool, arguments)
        parameters = (*self.context, *self.state, *self.named.values(), *((self.whole,) if self.whole else ()))
        only = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY and one.name in given]
        return [given.pop(name) for name in only], given

    def _by_name(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [] if self.takes_any else sorted(arguments.keys() - self.named.keys())
        missing = sorted(n for n, one in self.named.items() if one.default is one.empty and n not in arguments)
        if unknown or missing:
            raise ToolValidationError(f"{tool} takes {sorted(self.named)}; unknown: {unknown}, missing: {missing}.")
        return {name: _parsed(tool, self.hints.get(name), value, name) for name, value in arguments.items()}

    def schema(self) -> Mapping[str, Any]:
        if self.whole is not None:
            adapter = _adapter(self.kind)
            return _ANYTHING if adapter is None else adapter.json_schema()
        properties, shared = self._properties()
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name, one in self.named.items() if one.default is one.empty],
            "additionalProperties": self.takes_any,
            **shared,
        }

    def _properties(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """One schema for each argument, and the type definitions that they share."""
        from pydantic import TypeAdapter

        adapters = {name: _adapter(self.hints.get(name)) for name in self.named}
        known = [(name, "validation", one) for name, one in adapters.items() if one is not None]
        made, shared = TypeAdapter.json_schemas(known)  # type: ignore[arg-type]  # the mode is one of its two words
        schemas = {name: made.get((name, "validation"), {}) for name in self.named}
        for name, one in self.named.items():
            if isinstance(one.default, str | int | float | bool):
                schemas[name] = {**schemas[name], "default": one.default}
        return schemas, shared


def _shape_of(handler: Handler, params: type[Any] | None) -> _Shape:
    try:
        found = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        found = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_ONLY)]
    hints = _hints_of(handler)
    context = tuple(one for one in found if one.name in _CONTEXT_NAMES or _is(hints.get(one.name), ToolContext))
    state = tuple(one for one in found if one.name in _STATE_NAMES or _is(hints.get(one.name), ExecutionState))
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    rest = [one for one in found if one not in (*context, *state) and one.kind not in several]
    whole = rest[0] if len(rest) == 1 and _takes_whole(rest[0], hints.get(rest[0].name), params) else None
    kind = params or (None if whole is None else hints.get(whole.name))
    return _Shape(
        context=context,
        state=state,
        whole=whole,
        kind=kind,
        named={} if whole is not None else {one.name: one for one in rest},
        hints=hints,
        takes_any=any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found),
    )


def _takes_whole(parameter: inspect.Parameter, hint: Any, params: type[Any] | None) -> bool:
    """Whether the only parameter of a handler takes all arguments together, rather than one argument."""
    if params is not None or parameter.name in ("params", "arguments", "args", "_", "input"):
        return True
    return is_dataclass(hint) or hasattr(hint, "model_validate") or getattr(hint, "__origin__", hint) in (dict, Mapping)


def _function(handler: Handler) -> Any:
    """The handler, or the `__call__` of a callable object."""
    return handler if inspect.isroutine(handler) else type(handler).__call__


def _hints_of(handler: Handler) -> Mapping[str, Any]:
    function = _function(handler)
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        # A name that exists only inside a function or for type checkers: keep the annotation as text.
        return dict(getattr(function, "__annotations__", {}))


def _is(hint: Any, kind: type[Any]) -> bool:
    return hint is kind or (isinstance(hint, str) and hint.rpartition(".")[2] == kind.__name__)


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    """None for `Any`, and for a type that pydantic does not support."""
    if kind is None or kind is Any or isinstance(kind, str):
        return None
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(kind)
    except (PydanticUserError, NameError):
        return None


def _parsed(tool: str, kind: Any, value: Any, *argument: str) -> Any:
    """The value, validated strictly, except that JSON has no tuples and dates: a list and a text will do.

    `argument` is the name of the argument, if the value is one of several.
    """
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        _check_fields(tool, kind, value)
    adapter = _adapter(kind)
    if adapter is None:
        return kind(**value) if is_dataclass(kind) and isinstance(kind, type) else value
    from pydantic import ValidationError

    try:
        return adapter.validate_json(encode(value), strict=True)
    except ValidationError as error:
        found = [(".".join(map(str, (*argument, *one["loc"]))), one["msg"]) for one in error.errors()]
        words = "; ".join(f"{where or 'its arguments'}: {what}" for where, what in found)
        raise ToolValidationError(f"{tool}: {words}") from None


def _check_fields(tool: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    known = {one.name: one for one in fields(kind) if one.init}
    unknown = sorted(given.keys() - known.keys())
    needed = [n for n, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    missing = sorted(set(needed) - given.keys())
    if unknown or missing:
        raise ToolValidationError(f"{tool} takes {sorted(known)}; unknown: {unknown}, missing: {missing}.")


def needs_extra(adapter: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error of an adapter whose framework is not installed. It names the extra to install."""
    return ModuleNotFoundError(f"{adapter} needs {error.name}: pip install 'mulligan[{extra}]'.", name=error.name)
