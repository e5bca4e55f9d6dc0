"""The models that the agent loop can use: `provider_named` finds one by its name.

A `Provider` gets an `Ask` (the messages and tools) and streams `Said` pieces, then one `Reply`. A `Driver` has its own
loop. `Mock` replies from a script, for tests and demonstrations; `openai` and `claude` have the real models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from importlib import import_module
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from mulligan.agents.tools import ProviderToolCall, Tool
from mulligan.session.state.slices import ToolResult
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass

Message = Mapping[str, Any]
Act = Callable[[ProviderToolCall], ToolResult[Any]]


@fast_dataclass(slots=True, frozen=True)
class Ask:
    """A request to a model. `messages` are in OpenAI's form, the system text first; `options` go to the provider."""

    messages: Sequence[Message]
    tools: Sequence[Tool[Any, Any]] = ()
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def system(self) -> str | None:
        """The system text; None if there is none."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @property
    def prompt(self) -> str:
        """The text of the user's last message."""
        said = [one["content"] for one in self.messages if one.get("role") == "user"]
        return said[-1] if said and isinstance(said[-1], str) else ""


@fast_dataclass(slots=True, frozen=True)
class Said:
    """A piece of the reply's text, as it arrives."""

    text: str


@fast_dataclass(slots=True, frozen=True)
class Reply:
    """The model's complete reply. Without calls, the model is done."""

    text: str = ""
    calls: tuple[ProviderToolCall, ...] = ()
    stop: str = "stop"
    input_tokens: int = 0
    output_tokens: int = 0


class Provider(Protocol):
    """A model that the loop asks once in each round.

    It may have a `name`, for the records, and a `profile`: the form of the coding tools that it knows.
    """

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """Yields pieces of text, then exactly one Reply. Closing the iterator ends the request.

        Raises `provider_failed` if the model does not answer or refuses.
        """
        ...


@runtime_checkable
class Driver(Protocol):
    """An agent with its own loop, which calls Mulligan's tools. It may have a `name` and a `profile` too."""

    def drive(self, ask: Ask, act: Act) -> Iterator[Said | Reply]:
        """Yields pieces of text, then one Reply without calls. It runs tools through `act`, which is thread-safe."""
        ...


def name_of(provider: Provider | Driver) -> str:
    return str(getattr(provider, "name", type(provider).__name__))


def profile_of(provider: Provider | Driver) -> str:
    """The provider's tool profile. The default edits files by replacing text, which every model can do."""
    return str(getattr(provider, "profile", "anthropic"))


_HOMES = {
    "mock": ("mulligan.agents.providers", "Mock"),
    "openai": ("mulligan.agents.providers.openai", "OpenAI"),
    "litellm": ("mulligan.agents.providers.openai", "LiteLLM"),
    "claude": ("mulligan.agents.providers.claude", "Claude"),
}
_SPELLINGS = {"anthropic": ("claude", ""), "google": ("litellm", "gemini/")}
"""Names in session files of other agents: Mulligan's provider, and the prefix of its model names."""


# `Sequence[Any]` is a script for `Mock`. A more precise type would force users to annotate every list variable.
Model: TypeAlias = Provider | Driver | str | Sequence[Any]


def provider_of(given: Model) -> Provider | Driver:
    """A provider from its name, from a script for `Mock`, or as it is. Raises `no_provider`."""
    if isinstance(given, str):
        return provider_named(given)
    if isinstance(given, list | tuple):
        return provider_named("mock", script=given)
    return cast("Provider | Driver", given)


def provider_named(name: str, **settings: Any) -> Provider | Driver:
    """The provider `name` or `name:model`, with its own settings. Raises `no_provider`, with what to install.

    `anthropic` means `claude`; `google:MODEL` means `litellm:gemini/MODEL`.
    """
    asked, colon, model = name.partition(":")
    name, prefix = _SPELLINGS.get(asked, (asked, ""))
    if colon:
        settings["model"] = prefix + model
    home = _HOMES.get(name)
    if home is None:
        known = ", ".join([*_HOMES, *_SPELLINGS])
        raise fault("no_provider", f"There is no provider {asked!r}; there are {known}.", known=[*_HOMES, *_SPELLINGS])
    if name == "litellm" and "model" not in settings:
        raise fault("no_provider", f"The provider {asked} needs the name of a model: {asked}:MODEL.")
    try:
        made: Provider | Driver = getattr(import_module(home[0]), home[1])(**settings)
    except ModuleNotFoundError as error:
        words = f"The provider {name} needs {error.name}: pip install 'mulligan[{name}]'."
        raise fault("no_provider", words, missing_extra=name) from error
    except TypeError as error:
        raise fault("no_provider", f"The provider {name} does not take these settings: {error}.") from error
    return made


Line: TypeAlias = str | Reply | Mapping[str, Any] | Callable[[Ask], "Line"]


class Mock:
    """A model that replies from a script, one line for each request.

    A text is a reply that ends the turn. `{"tool": NAME, "args": {…}}`, or a list of such under `"tools"`, asks for
    tools, with `"text"` before them. A function gets the request and returns a line. After the script, or without one,
    it repeats the user's prompt.
    """

    name = "mock"

    def __init__(self, script: Sequence[Line] = (), *, profile: str = "anthropic") -> None:
        self.profile = profile
        self.asked: list[Ask] = []
        self._script = list(script)
        self._lock = threading.RLock()

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """Replies with the next line of the script. `asked` collects the requests."""
        with self._lock:
            number = len(self.asked)
            self.asked.append(ask)
        line = self._script[number] if number < len(self._script) else f"You said: {ask.prompt}"
        said = _read(line, ask, number)
        if said.text:
            yield Said(said.text)
        yield said


def _read(line: Line, ask: Ask, number: int) -> Reply:
    while callable(line):
        line = line(ask)
    if isinstance(line, Reply):
        return line
    words = len(str(ask.messages)) // 4
    if isinstance(line, str):
        return Reply(line, input_tokens=words, output_tokens=len(line) // 4 + 1)
    if not isinstance(line, Mapping) or not ({"tool", "tools", "text"} & line.keys()):
        raise fault("invalid_params", "A line of a script is a text, a Reply, or an object with tool, tools or text.")
    asked = line.get("tools") or ([line] if "tool" in line else [])
    calls = tuple(
        ProviderToolCall(one.get("id") or f"call_{number}_{at}", one["tool"], one.get("args", {}))
        for at, one in enumerate(asked)
    )
    return Reply(line.get("text", ""), calls, "tool_calls" if calls else "stop", words, 1)
