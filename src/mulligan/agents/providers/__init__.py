"""Models to run the loop with, by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias, cast

from mulligan.agents.speech import Driver, Provider
from mulligan.values.faults import fault

_HOMES = {
    "mock": ("mulligan.agents.providers.mock", "Mock"),
    "openai": ("mulligan.agents.providers.openai", "OpenAI"),
    "litellm": ("mulligan.agents.providers.litellm", "LiteLLM"),
    "claude": ("mulligan.agents.providers.claude", "Claude"),
}
_SPELLINGS = {"anthropic": ("claude", ""), "google": ("litellm", "gemini/")}
"""Names that session files of other agents use: our provider, and what comes before the model's name there."""


# A script is a list of lines of `Mock`; named as such, every list that a variable holds would need an annotation.
Model: TypeAlias = Provider | Driver | str | Sequence[Any]


def provider_of(given: Model) -> Provider | Driver:
    """A provider by its name, or by what it shall say, or as it is. Raises `no_provider`."""
    if isinstance(given, str):
        return provider_named(given)
    if isinstance(given, list | tuple):
        return provider_named("mock", script=given)
    return cast("Provider | Driver", given)


def provider_named(name: str, **settings: Any) -> Provider | Driver:
    """A provider by its name, or `name:model`, with its own settings. Raises `no_provider`, with what to install.

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
