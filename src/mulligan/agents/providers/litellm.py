"""Any model that LiteLLM knows, by its name for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import openai

# Its price list is of no use here, and fetching it would make importing wait for the network.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
import litellm

from mulligan.agents.providers.chat import read_chunks, tool_of
from mulligan.agents.speech import Ask, Reply, Said
from mulligan.values.faults import fault


class LiteLLM:
    """`model` as LiteLLM names it, such as `anthropic/claude-sonnet-4-5`; the keys come from its environment."""

    name = "litellm"

    def __init__(
        self, model: str, *, api_base: str | None = None, api_key: str | None = None, profile: str = "openai"
    ) -> None:
        self.profile = profile
        self._settings = {"model": model, "api_base": api_base, "api_key": api_key}

    def reply(self, ask: Ask) -> Iterator[Said | Reply]:
        """Ask once and stream. Raises `provider_failed`."""
        request: dict[str, Any] = {**self._settings, **ask.options}
        request |= {"model": ask.model} if ask.model else {}
        request |= {"tools": [tool_of(tool) for tool in ask.tools]} if ask.tools else {}
        messages = [dict(message) for message in ask.messages]
        try:
            stream: Any = litellm.completion(
                messages=messages, stream=True, stream_options={"include_usage": True}, **request
            )
            yield from read_chunks(stream)
        except openai.OpenAIError as error:
            # LiteLLM's own errors are all children of OpenAI's.
            raise fault("provider_failed", f"The model did not answer: {error}", provider=self.name) from error
