"""What passes between the loop and a model: everything said so far goes out, pieces of text and one reply come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, runtime_checkable

from mulligan.agents.tools import ProviderToolCall, Tool
from mulligan.session.known import ToolResult
from mulligan.values.plain import plain

Message = Mapping[str, Any]
Act = Callable[[ProviderToolCall], ToolResult[Any]]


@plain(slots=True, frozen=True)
class Ask:
    """`messages` are whole and in OpenAI's shape, the system text first; `options` go to the provider as they are."""

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
        """The last thing a user said, as text."""
        said = [one["content"] for one in self.messages if one.get("role") == "user"]
        return said[-1] if said and isinstance(said[-1], str) else ""


@plain(slots=True, frozen=True)
class Said:
    """A piece of the reply's text, as it comes."""

    text: str


@plain(slots=True, frozen=True)
class Reply:
    """What the model said in all. Without calls it is done."""

    text: str = ""
    calls: tuple[ProviderToolCall, ...] = ()
    stop: str = "stop"
    input_tokens: int = 0
    output_tokens: int = 0


class Provider(Protocol):
    """A model that is asked once per iteration.

    It may have a `name`, which is what records call it, and a `profile`: whose tools it is used to.
    """

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """Pieces of text, then exactly one Reply. Closing the iterator ends the request.

        Raises `provider_failed` if the model cannot be reached or refuses.
        """
        ...


@runtime_checkable
class Driver(Protocol):
    """An agent with a loop of its own, which calls our tools by itself. It may have a `name` and a `profile` too."""

    def drive(self, ask: Ask, act: Act) -> Iterator[Said | Reply]:
        """Pieces of text, then one Reply without calls; every tool call goes through `act`, which is thread-safe."""
        ...


def name_of(provider: Provider | Driver) -> str:
    return str(getattr(provider, "name", type(provider).__name__))


def profile_of(provider: Provider | Driver) -> str:
    """Any model can replace one text by another; patches are for those that were trained on them."""
    return str(getattr(provider, "profile", "anthropic"))
