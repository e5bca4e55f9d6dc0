"""`mulligan.agent_loop`: the loop, with what was not said chosen for it. A composition root, as `opening` is."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mulligan.opening import innermost
from mulligan.values.faults import MulliganError, fault
from mulligan.values.plain import plain

if TYPE_CHECKING:
    from mulligan.agents.loop import Bounds, LoopEvent, LoopResult, May, Tell
    from mulligan.agents.providers import Model
    from mulligan.agents.speech import Driver, Provider
    from mulligan.agents.tools import AnyTool, ProviderToolCall
    from mulligan.effects.session import Session
    from mulligan.history.composite import ExecutionState
    from mulligan.servers.acp.agent import Prompt, Shown


def agent_loop(
    prompt: str,
    *,
    session: Session | ExecutionState | str | None = None,
    provider: Model | None = None,
    system: str | None = None,
    tools: Sequence[AnyTool] | None = None,
    bounds: Bounds | None = None,
    permission: May | None = None,
    on_event: Tell | None = None,
) -> LoopResult:
    """Let a model work on a prompt until it is done, as one turn of a session: `session.rollback()` takes it back.

    `session` is one of `mulligan.open()`, its id, or its `execution_state()` if resources of your own take part.
    Without it neither the prompt nor any message is stored; what the model does to files is still recorded and can be
    undone.
    `provider` is one of ours (`openai`, `litellm`, `claude`, `mock`, or with a model, `openai:gpt-5.1`), an object, or
    a list of what to say, for tests; else $MULLIGAN_PROVIDER says.
    `tools` are plain functions or Tools; by default the coding tools of the provider's profile (see `coding_tools`).
    Each call is a transaction: a tool that raises leaves nothing behind, and the model is told why.
    `permission(call, tool)` is asked before a tool that may change something; `on_event` is told text and tool calls
    as they come. `bounds` are iterations, deadline, budget, and a way to cancel.

    Raises `no_provider`, `provider_failed`, PromptEvaluationError for a deadline, RestoreFailedError, and whatever
    `permission` raises. What was said and done until then stays. What `on_event` raises is logged and ends nothing.
    """
    from mulligan.agents.loop import Loop

    if session is None:
        found: Session | ExecutionState = innermost().sessions.anonymous()
    else:
        found = innermost().session(session) if isinstance(session, str) else session
    loop = Loop(
        found,
        chosen_provider(provider),
        tools=tools,
        bounds=bounds,
        may=permission,
        tell=None if on_event is None else _quietly(on_event),
        keeps_talk=session is not None,
    )
    return loop.run(prompt, system=system)


def _quietly(hear: Tell) -> Tell:
    from mulligan.session.bus import EventBus, publish_quietly

    bus = EventBus()
    bus.subscribe(object, hear)
    return lambda event: publish_quietly(bus, event)


def chosen_provider(given: Model | None) -> Provider | Driver:
    """The provider that was given, named, scripted, or is in the environment. Raises `no_provider`."""
    from mulligan.agents.providers import provider_of

    chosen = os.environ.get("MULLIGAN_PROVIDER") if given is None or given == "" else given
    if chosen is None or chosen == "":
        words = "Say which model to ask: provider='openai', 'litellm', 'claude' or 'mock', or set MULLIGAN_PROVIDER."
        raise fault("no_provider", words)
    return provider_of(chosen)


@plain(slots=True, frozen=True)
class PromptWork:
    """The loop as servers use it: one prompt of a session, shown while it is worked on."""

    provider: Provider | Driver

    def __call__(
        self, session: Session, prompt: Prompt, shown: Shown, *, only_look: bool, cancelled: threading.Event
    ) -> str:
        from mulligan.agents.coding import coding_tools
        from mulligan.agents.loop import Bounds, Loop
        from mulligan.agents.planning import PLANNING
        from mulligan.agents.speech import profile_of

        tools = coding_tools(session, profile_of(self.provider), cancelled=cancelled)
        loop = Loop(
            session,
            self.provider,
            tools=[PLANNING, *(tool for tool in tools if tool.read_only or not only_look)],
            bounds=Bounds(cancelled=cancelled),
            may=lambda call, tool: tool is PLANNING or shown.may(call.id, call.name, _arguments(call)),
            tell=lambda event: _show(event, shown),
        )
        return _STOPS[loop.run(prompt).stop_reason]


_STOPS = {
    "done": "end_turn",
    "max_iterations": "max_turn_requests",
    "budget": "max_tokens",
    "cancelled": "cancelled",
}


def _show(event: LoopEvent, shown: Shown) -> None:
    from mulligan.agents.loop import ToolEnded, ToolStarted
    from mulligan.agents.planning import PLANNING
    from mulligan.agents.speech import Said

    if isinstance(event, Said):
        shown.said(event.text)
    elif isinstance(event, ToolStarted | ToolEnded) and event.call.name == PLANNING.name:
        if isinstance(event, ToolEnded) and event.result.success:
            shown.planned()
    elif isinstance(event, ToolStarted):
        shown.began(event.call.id, event.call.name, _arguments(event.call))
    elif isinstance(event, ToolEnded):
        shown.ended(event.call.id, event.result.message, ok=event.result.success)


def _arguments(call: ProviderToolCall) -> Mapping[str, Any]:
    """Those that can be read; what cannot is the tool's to refuse."""
    try:
        return call.parsed()
    except MulliganError:
        return {}
