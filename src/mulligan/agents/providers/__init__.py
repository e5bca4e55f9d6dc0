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
    """A provider by its name, or `name:model`, with its own settings. Raises `no_provider`, with what to install."""
    name, colon, model = name.partition(":")
    if colon:
        settings["model"] = model
    home = _HOMES.get(name)
    if home is None:
        raise fault("no_provider", f"There is no provider {name!r}; there are {', '.join(_HOMES)}.")
    try:
        made: Provider | Driver = getattr(import_module(home[0]), home[1])(**settings)
    except ModuleNotFoundError as error:
        words = f"The provider {name} needs {error.name}: pip install 'mulligan[{name}]'."
        raise fault("no_provider", words, missing_extra=name) from error
    except TypeError as error:
        raise fault("no_provider", f"The provider {name} does not take these settings: {error}.") from error
    return made
