"""Running tools in tests: a state to run them on, one call at a time, and the same call through a provider's path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from mulligan.agents.main_loop import calls_wanted
from mulligan.agents.runner import ToolRunner
from mulligan.agents.speech import Ask, Driver, Message, Provider, Reply, name_of
from mulligan.agents.tools import ProviderToolCall, Tool, ToolContext, as_tool
from mulligan.history.checkpoint import CheckpointStore
from mulligan.history.composite import ExecutionState, snapshots_equivalent
from mulligan.session.bus import Isolated
from mulligan.session.known import ToolResult
from mulligan.session.resources import BudgetTracker, ResourceRegistry
from mulligan.session.state import Session
from mulligan.testing.mock_model import mock_model
from mulligan.values.clock import Clock, SystemClock
from mulligan.workspace.filesystem import Filesystem
from mulligan.workspace.memory_filesystem import InMemoryFilesystem

__all__ = [
    "create_execution_state",
    "execute_tool",
    "execute_via_claude_sdk",
    "execute_via_litellm",
    "execute_via_openai",
    "snapshots_equivalent",
]

AnyTool = Tool[Any, Any] | Callable[..., Any]
Api = Literal["responses", "chat"]


def create_execution_state(
    resources: Mapping[type[Any], object] | None = None, *, session: Session | None = None, clock: Clock | None = None
) -> ExecutionState:
    """A run in memory: a session, files, a budget and checkpoints. Any of its resources may be given instead."""
    now = clock or SystemClock()
    ours: dict[type[Any], object] = {Filesystem: InMemoryFilesystem(clock=now), BudgetTracker: BudgetTracker()}
    registry = ResourceRegistry.build({**ours, **(resources or {})})
    return ExecutionState(session or Session(clock=now), registry, now, checkpoints=CheckpointStore())


def call_id_of(tool: Tool[Any, Any]) -> str:
    """`call_b` for a tool named `tool_b` or `b`."""
    return "call_" + tool.name.removeprefix("tool_")


def execute_tool(
    tool: AnyTool,
    execution_state: ExecutionState,
    params: Mapping[str, Any] | None = None,
    *,
    tool_call_id: str | None = None,
    context: ToolContext | None = None,
) -> ToolResult[Any]:
    """One call through the runner, as every provider makes it. Its id is `call_` and the tool's name, if not given."""
    known = as_tool(tool)
    call = ProviderToolCall(tool_call_id or call_id_of(known), known.name, params or {})
    return ToolRunner(execution_state, {known.name: known}, "test").execute(call, context=context)


def execute_via_openai(
    tool: AnyTool, execution_state: ExecutionState, params: Mapping[str, Any] | None = None, *, api: Api = "responses"
) -> ToolResult[Any]:
    """The same call asked for by a model on loopback through OpenAI's SDK, over `responses` or `chat`."""
    from mulligan.agents.providers.openai import OpenAI

    def made(url: str) -> OpenAI:
        return OpenAI("mock", api=api, base_url=f"{url}/v1", api_key="k")

    return _asked(tool, execution_state, params, made)


def execute_via_litellm(
    tool: AnyTool, execution_state: ExecutionState, params: Mapping[str, Any] | None = None
) -> ToolResult[Any]:
    """The same through LiteLLM."""
    from mulligan.agents.providers.litellm import LiteLLM

    return _asked(tool, execution_state, params, lambda url: LiteLLM("openai/mock", api_base=f"{url}/v1", api_key="k"))


def execute_via_claude_sdk(
    tool: AnyTool, execution_state: ExecutionState, params: Mapping[str, Any] | None = None
) -> ToolResult[Any]:
    """The same through the Claude Agent SDK, whose own loop calls our tool in-process."""
    from tempfile import TemporaryDirectory

    from mulligan.agents.providers.claude import Claude

    with TemporaryDirectory(prefix="mulligan-claude-") as home:

        def made(url: str) -> Claude:
            env = {**_QUIET, "ANTHROPIC_BASE_URL": url, "CLAUDE_CONFIG_DIR": home, "HOME": home}
            return Claude("claude-sonnet-4-5", env=env, cwd=home)

        return _asked(tool, execution_state, params, made)


_QUIET = {
    "ANTHROPIC_API_KEY": "k",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def _asked(
    tool: AnyTool,
    state: ExecutionState,
    params: Mapping[str, Any] | None,
    made: Callable[[str], Provider | Driver],
) -> ToolResult[Any]:
    """Let a model ask for the tool once, and give what came of it, or raise what the runner raised."""
    known = as_tool(tool)
    with mock_model(known.name, dict(params or {})) as model:
        provider = made(model.address)
        asking = _Asking(ToolRunner(state, {known.name: known}, "test", name_of(provider)))
        ask = Ask(({"role": "user", "content": f"Use {known.name}."},), (known,))
        if isinstance(provider, Driver):
            list(provider.drive(ask, asking.act))
        else:
            asking.through(provider, ask)
    return asking.outcome()


class _Asking:
    def __init__(self, runner: ToolRunner) -> None:
        self._runner = runner
        self._results: list[ToolResult[Any]] = []
        self._errors: list[Exception] = []

    def act(self, call: ProviderToolCall) -> ToolResult[Any]:
        """An SDK would swallow what a tool raises, so it is kept for the end."""
        with Isolated(self._errors):
            result = self._runner.execute(call)
            self._results.append(result)
            return result
        return ToolResult(str(self._errors[-1]), success=False)

    def through(self, provider: Provider, ask: Ask) -> None:
        messages: list[Message] = list(ask.messages)
        for _ in range(2):
            (reply,) = [one for one in provider.reply(Ask(messages, ask.tools)) if isinstance(one, Reply)]
            messages.append({"role": "assistant", "content": reply.text, **calls_wanted(reply)})
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self.act(call).message})

    def outcome(self) -> ToolResult[Any]:
        if self._errors:
            raise self._errors[0]
        # Some SDKs look at the arguments themselves and never ask us.
        return self._results[-1] if self._results else ToolResult("The call never reached the tool.", success=False)
