"""The coding tools of a profile as tools of the loop: each acts on the files of one session."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mulligan.agents.profiles import ToolSpec
from mulligan.agents.profiles import tools as specs
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import AnyTool, Tool, ToolContext, as_tool, by_name
from mulligan.effects.handle import CallHandle
from mulligan.effects.receipt import Receipt, text_of
from mulligan.effects.session import Session
from mulligan.history.composite import ExecutionState
from mulligan.session.known import ToolResult
from mulligan.session.resources import ResourceRegistry
from mulligan.values.canonical import encode
from mulligan.values.faults import fault
from mulligan.workspace.filesystem import Filesystem

_LOOK_EVERY_S = 0.05
_COMMAND = "host.shell"
_PAYLOADS = ("content", "matches", "paths", "entries")


def coding_tools(
    session: Session, profile: str = "anthropic", *, cancelled: threading.Event | None = None
) -> list[Tool[Any, Any]]:
    """Reading, writing, editing, searching and running commands, described as models of that profile know them.

    A tool whose receipt is not ok fails, so its call leaves nothing behind; so does one during which `cancelled` was
    set: a command is killed then, and at the deadline of the run. Raises `invalid_params` for a profile nobody knows.
    """
    return [_tool(session, spec, cancelled) for spec in specs(profile)]


def state_of(given: Session | ExecutionState) -> ExecutionState:
    """A session as the state of a run: with its files. A state is one already, with whatever else takes part in it."""
    if isinstance(given, ExecutionState):
        return given
    return ExecutionState(given, ResourceRegistry.build({Filesystem: given.files}), given.clock)


def session_of(given: Session | ExecutionState) -> Session:
    """The durable session behind it. Raises `invalid_params` for a state that lives in memory."""
    found = given.session if isinstance(given, ExecutionState) else given
    if not isinstance(found, Session):
        raise fault("invalid_params", "This needs a session of mulligan.open(), not one in memory.", field="session")
    return found


def runner_of(
    given: Session | ExecutionState, tools: Iterable[AnyTool] | None, *, adapter: str, profile: str = "anthropic"
) -> ToolRunner:
    """Runs tools as calls of a session, for somebody else's loop: those given, else the coding tools of a profile."""
    own = coding_tools(session_of(given), profile) if tools is None else [as_tool(one) for one in tools]
    return ToolRunner(state_of(given), by_name(own), adapter=adapter)


def _tool(session: Session, spec: ToolSpec, cancelled: threading.Event | None) -> Tool[Any, Any]:
    watched = cancelled if spec.effect == _COMMAND else None

    def act(tool_context: ToolContext | None = None, /, **params: Any) -> ToolResult[dict[str, Any]]:
        deadline = None if tool_context is None else tool_context.deadline
        # Part of the runner's own call, which carries the provider's id.
        with session.call(spec.name, deadline=deadline) as call, _stopping(call, watched):
            receipt = call.perform(spec.effect, **params)
        return ToolResult(said(receipt), _facts(receipt), receipt.ok and not (cancelled and cancelled.is_set()))

    return Tool(spec.name, spec.description, act, read_only=spec.read_only, schema=spec.parameters)


@contextmanager
def _stopping(call: CallHandle, when: threading.Event | None) -> Iterator[None]:
    """The block's command is killed once the event is set."""
    if when is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_EVERY_S):
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
    """What a model is told: the text where there is nothing but text, the summary where there is none, else the fields.

    In the fields, payloads are plain text, and what did not fit is the beginning of it and a reference to page through.
    """
    body = receipt.to_dict()
    shown = {name: _legible(value) for name, value in body.items()}
    texts = [shown[name] for name in _PAYLOADS if name in body]
    if not receipt.ok or body.get("truncated") or not all(isinstance(text, str) for text in texts):
        return encode(shown).decode("utf-8")
    if texts == [""] or not texts:
        return str(shown.get("summary_text") or (texts[0] if texts else encode(shown).decode("utf-8")))
    return str(texts[0])


def _facts(receipt: Receipt) -> dict[str, Any]:
    """What there is to know besides the text, which is in the message: logs would hold it twice."""
    return {name: value for name, value in receipt.to_dict().items() if name not in (*_PAYLOADS, "stdout", "stderr")}


def _legible(value: Any) -> Any:
    """A payload as a model can read it; anything else as it is."""
    if not isinstance(value, dict):
        return value
    if "blob" in value:
        blob = dict(value["blob"])
        beginning = b64decode(str(blob.pop("preview_bytes", "")).removeprefix("base64:"))
        return {**blob, "preview": beginning.decode("utf-8", "replace"), "read_on_with": "read_blob"}
    text = text_of(value)
    return value if text is None else text
