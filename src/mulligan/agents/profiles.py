"""Tool profiles as each provider's API wants its tools listed."""

from __future__ import annotations

from mulligan.effects.profiles import PROFILES, Offer, Profile, Schema, declared, known_profile, offers

__all__ = ["PROFILES", "Profile", "ToolSpec", "listed", "tools"]


class ToolSpec(Offer):
    """One tool of a profile, in every provider's form."""

    __slots__ = ()

    def for_openai(self) -> Schema:
        """As chat completions, and those who copy them, list a tool."""
        return {"type": "function", "function": self._named("parameters")}

    def for_openai_responses(self) -> Schema:
        return {"type": "function", **self._named("parameters")}

    def for_anthropic(self) -> Schema:
        return self._named("input_schema")

    def for_gemini(self) -> Schema:
        """A function declaration."""
        return {**self._named("parameters"), "parameters": declared(self.parameters)}

    def _named(self, schema_key: str) -> Schema:
        return {"name": self.name, "description": self.description, schema_key: self.parameters}


def tools(profile: str) -> list[ToolSpec]:
    """The tools of a profile, in the order they are told to a model. Raises `invalid_params` for one nobody knows."""
    return [ToolSpec(one.name, one.effect, one.description, one.parameters, one.read_only) for one in offers(profile)]


def listed(profile: str) -> list[Schema]:
    """The tools as the provider's API takes them."""
    known = known_profile(profile)
    shapes = {"openai": ToolSpec.for_openai, "anthropic": ToolSpec.for_anthropic, "gemini": ToolSpec.for_gemini}
    all_of_them = [shapes[known](spec) for spec in tools(known)]
    return [{"functionDeclarations": all_of_them}] if known == "gemini" else all_of_them
