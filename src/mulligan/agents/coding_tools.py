"""The coding tools: `coding_tools` makes them for one session, `listed` lists them in the form of a provider's API."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import AnyTool, Tool, ToolContext, as_tool, by_name
from mulligan.effects.handle import CallHandle
from mulligan.effects.receipt import Receipt, text_of
from mulligan.effects.registry import PROFILES, Offer, Profile, Schema, declared, known_profile, offers
from mulligan.effects.session import DurableSession
from mulligan.files.filesystems import Filesystem
from mulligan.history.checkpoint import ExecutionState
from mulligan.session.state.resources import ResourceRegistry
from mulligan.session.state.slices import ToolResult
from mulligan.values.canonical import encode
from mulligan.values.errors import fault

__all__ = ["PROFILES", "Profile", "ToolSpec", "listed", "tools"]


class ToolSpec(Offer):
    """One tool of a profile, in every provider's form."""

    __slots__ = ()

    def for_openai(self) -> Schema:
        """In the form of chat completions."""
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
    """The tools of a profile, in the order a model sees them. Raises `invalid_params` for an unknown profile."""
    return [ToolSpec(one.name, one.effect, one.description, one.parameters, one.read_only) for one in offers(profile)]


def listed(profile: str) -> list[Schema]:
    """The tools in the form of the provider's API."""
    known = known_profile(profile)
    shapes = {"openai": ToolSpec.for_openai, "anthropic": ToolSpec.for_anthropic, "gemini": ToolSpec.for_gemini}
    all_of_them = [shapes[known](spec) for spec in tools(known)]
    return [{"functionDeclarations": all_of_them}] if known == "gemini" else all_of_them


_POLL_S = 0.05
_COMMAND = "host.shell"
_PAYLOADS = ("content", "matches", "paths", "entries")


def coding_tools(
    session: DurableSession, profile: str = "anthropic", *, cancelled: threading.Event | None = None
) -> list[Tool[Any, Any]]:
    """Tools to read, write, edit and search files and to run commands, in the form that models of the profile know.

    A tool fails, and its call is rolled back, if its receipt is not ok or if `cancelled` was set while it ran. Mulligan
    kills a command when `cancelled` is set and at the deadline. Raises `invalid_params` for an unknown profile.
    """
    return [_tool(session, spec, cancelled) for spec in tools(profile)]


def state_of(given: DurableSession | ExecutionState) -> ExecutionState:
    """A session as the state of a run, with its files as a resource. A state is returned as it is."""
    if isinstance(given, ExecutionState):
        return given
    return ExecutionState(given, ResourceRegistry.build({Filesystem: given.files}), given.clock)


def session_of(given: DurableSession | ExecutionState) -> DurableSession:
    """The durable session. Raises `invalid_params` for a state in memory."""
    found = given.session if isinstance(given, ExecutionState) else given
    if not isinstance(found, DurableSession):
        raise fault("invalid_params", "This needs a session of mulligan.open(), not one in memory.", field="session")
    return found


def runner_of(
    given: DurableSession | ExecutionState, tools: Iterable[AnyTool] | None, *, adapter: str, profile: str = "anthropic"
) -> ToolRunner:
    """A runner for another framework's loop, with the given tools or with the coding tools of a profile."""
    own = coding_tools(session_of(given), profile) if tools is None else [as_tool(one) for one in tools]
    return ToolRunner(state_of(given), by_name(own), adapter=adapter)


def _tool(session: DurableSession, spec: ToolSpec, cancelled: threading.Event | None) -> Tool[Any, Any]:
    watched = cancelled if spec.effect == _COMMAND else None

    def act(tool_context: ToolContext | None = None, /, **params: Any) -> ToolResult[dict[str, Any]]:
        deadline = None if tool_context is None else tool_context.deadline
        # Joins the runner's call, which has the provider's id as its label.
        with session.call(spec.name, deadline=deadline) as call, _stop_when_set(call, watched):
            receipt = call.perform(spec.effect, **params)
        return ToolResult(
            said(receipt), _without_payloads(receipt), receipt.ok and not (cancelled and cancelled.is_set())
        )

    return Tool(spec.name, spec.description, act, read_only=spec.read_only, schema=spec.parameters)


@contextmanager
def _stop_when_set(call: CallHandle, when: threading.Event | None) -> Iterator[None]:
    """Kills the command of the block when the event is set."""
    if when is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_S):
            if when.is_set():
                call.stop()

    watcher = threading.Thread(target=watch, name="mulligan-cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def said(receipt: Receipt) -> str:
    """What the model sees of a receipt: its text, a summary if the text is empty, or the fields if there is more.

    In the fields, payloads are plain text; one that does not fit is its beginning and a reference for `read_blob`.
    """
    body = receipt.to_dict()
    shown = {name: _as_text(value) for name, value in body.items()}
    texts = [shown[name] for name in _PAYLOADS if name in body]
    if not receipt.ok or body.get("truncated") or not all(isinstance(text, str) for text in texts):
        return encode(shown).decode("utf-8")
    if texts == [""] or not texts:
        return str(shown.get("summary_text") or (texts[0] if texts else encode(shown).decode("utf-8")))
    return str(texts[0])


def _without_payloads(receipt: Receipt) -> dict[str, Any]:
    """The receipt without its text, which is in the message: the log must not hold it twice."""
    return {name: value for name, value in receipt.to_dict().items() if name not in (*_PAYLOADS, "stdout", "stderr")}


def _as_text(value: Any) -> Any:
    """A payload as text for a model; other values unchanged."""
    if not isinstance(value, dict):
        return value
    if "blob" in value:
        blob = dict(value["blob"])
        beginning = b64decode(str(blob.pop("preview_bytes", "")).removeprefix("base64:"))
        return {**blob, "preview": beginning.decode("utf-8", "replace"), "read_on_with": "read_blob"}
    text = text_of(value)
    return value if text is None else text
