"""Claude through the Claude Agent SDK: the SDK's own loop, with Mulligan's tools instead of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator, Mapping
from contextvars import copy_context
from typing import Any

import claude_agent_sdk as sdk

from mulligan.agents.providers import Act, Ask, Reply, Said
from mulligan.agents.tools import ProviderToolCall, Tool
from mulligan.session.messages import as_text
from mulligan.values.canonical import encode
from mulligan.values.errors import MulliganError, fault
from mulligan.values.ids import SystemIds

_SERVER = "mulligan"
_PREFIX = f"mcp__{_SERVER}__"
_EARLIER = "Earlier messages of this conversation:"


class Claude:
    """Claude as a driver. `settings` go to the SDK's options, for example `env` and `cli_path`."""

    name = "claude"
    profile = "anthropic"

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._model, self._settings = model, settings

    def drive(self, ask: Ask, act: Act) -> Iterator[Said | Reply]:
        """Runs the SDK on another thread with its own event loop. Closing the iterator stops Claude."""
        conversation = _Conversation(act)
        options = self._options(ask, conversation)
        with _LoopThread(conversation.converse(ask.prompt, options), conversation.pieces) as running:
            yield from running

    def _options(self, ask: Ask, conversation: _Conversation) -> sdk.ClaudeAgentOptions:
        tools = [conversation.sdk_tool(tool) for tool in ask.tools]
        return sdk.ClaudeAgentOptions(
            **{
                "tools": [],
                "allowed_tools": [_PREFIX + tool.name for tool in ask.tools],
                "mcp_servers": {_SERVER: sdk.create_sdk_mcp_server(_SERVER, tools=tools)},
                "strict_mcp_config": True,
                "setting_sources": [],
                "system_prompt": _system_of(ask),
                "model": ask.model or self._model,
                "include_partial_messages": True,
                **self._settings,
                **ask.options,
            }
        )


def _system_of(ask: Ask) -> str | None:
    """The SDK takes one prompt, so earlier messages go into the system prompt."""
    rest = [message for message in ask.messages if message.get("role") != "system"]
    lines = [f"{one['role']}: {as_text(one.get('content') or one.get('tool_calls'))}" for one in rest[:-1]]
    earlier = "\n\n".join([_EARLIER, *lines]) if lines else None
    return "\n\n".join(part for part in (ask.system, earlier) if part) or None


class _Conversation:
    """Puts what Claude says into a queue, in order, and runs the tools it asks for."""

    def __init__(self, act: Act) -> None:
        self.pieces: queue.SimpleQueue[Said | Reply | BaseException | None] = queue.SimpleQueue()
        self._act = act
        self._announced_ids: dict[tuple[str, bytes], deque[str]] = defaultdict(deque)

    def sdk_tool(self, tool: Tool[Any, Any]) -> Any:
        async def handle(arguments: dict[str, Any]) -> dict[str, Any]:
            call = ProviderToolCall(self._id_of(tool.name, arguments), tool.name, arguments)
            result = await asyncio.to_thread(self._act, call)
            return {"content": [{"type": "text", "text": result.message}], "is_error": not result.success}

        return sdk.tool(tool.name, tool.description, dict(tool.parameters))(handle)

    def _id_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The id of a call. The SDK does not pass it to the tool, but an earlier message had it."""
        announced = self._announced_ids[(name, encode(arguments))]
        return announced.popleft() if announced else SystemIds().new()

    async def converse(self, prompt: str, options: sdk.ClaudeAgentOptions) -> None:
        try:
            async for message in sdk.query(prompt=prompt, options=options):
                self._handle_message(message)
        except sdk.ClaudeSDKError as error:
            raise fault("provider_failed", f"Claude did not answer: {error}", provider="claude") from error

    def _handle_message(self, message: Any) -> None:
        if isinstance(message, sdk.StreamEvent):
            delta = message.event.get("delta") or {}
            if delta.get("type") == "text_delta" and delta.get("text"):
                self.pieces.put(Said(delta["text"]))
        elif isinstance(message, sdk.AssistantMessage):
            for block in message.content:
                if isinstance(block, sdk.ToolUseBlock):
                    self._announced_ids[(block.name.removeprefix(_PREFIX), encode(block.input))].append(block.id)
        elif isinstance(message, sdk.ResultMessage):
            self.pieces.put(_reply_of(message))


def _reply_of(message: sdk.ResultMessage) -> Reply:
    if message.is_error:
        said = message.result or message.subtype
        raise fault("provider_failed", f"Claude ended with an error: {said}", provider="claude")
    usage = message.usage or {}
    return Reply(
        message.result or "",
        stop=message.subtype,
        input_tokens=usage.get("input_tokens") or 0,
        output_tokens=usage.get("output_tokens") or 0,
    )


class _LoopThread:
    """Runs a coroutine on another thread with its own loop. Iterating yields what it puts into the queue."""

    def __init__(
        self, work: Coroutine[Any, Any, None], pieces: queue.SimpleQueue[Said | Reply | BaseException | None]
    ) -> None:
        self._work, self._pieces = work, pieces
        self._loop = asyncio.new_event_loop()
        # The thread inherits the current turn and session.
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), daemon=True)

    def __enter__(self) -> _LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()
        self._loop.close()

    def __iter__(self) -> Iterator[Said | Reply]:
        while (pieces := self._pieces.get()) is not None:
            if isinstance(pieces, BaseException):
                raise pieces
            yield pieces

    def _run(self) -> None:
        ended: BaseException | None = None
        try:
            self._loop.run_until_complete(self._work)
        except (MulliganError, asyncio.CancelledError) as error:
            ended = error if isinstance(error, MulliganError) else None
        finally:
            self._pieces.put(ended)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
