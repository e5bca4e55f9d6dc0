"""Session files of Codex ("rollouts"): items of the Responses API, each in an envelope of its own. Pure.

What follows each other on the model's side (reasoning, text, calls of tools) becomes one assistant message; each output
becomes a tool message. A compaction replaces all before it; a rollback takes whole turns from the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mulligan.session.seed_records import Message, Record, Seed, is_said
from mulligan.values.canonical import encode

AGENT = "codex"
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("local_shell_call", "local_shell_call_output", "web_search_call", "tool_search_call"),
)
_NOT_TYPED = ("<environment_context", "<user_instructions", "<turn_aborted", "<skill", "<user_shell", "# AGENTS.md")
"""How what Codex itself says in a user's name begins."""


def is_codex_file(records: Sequence[Record]) -> bool:
    first = records[0] if records else {}
    return first.get("type") == "session_meta" or ("instructions" in first and "timestamp" in first)


def seed_of_codex(records: Sequence[Record]) -> Seed:
    seed = Seed(records=len(records), agent=AGENT)
    items: list[Record] = []
    for record in records:
        payload = record.get("payload")
        body: Record = payload if isinstance(payload, Mapping) else record
        kind = record.get("type")
        if kind == "response_item" or (kind in _ITEMS and payload is None):
            items.append(body)
        elif kind == "compacted":
            items = _replacement(body)
        elif kind == "event_msg" and body.get("type") == "thread_rolled_back":
            items = _rolled_back(items, body.get("num_turns"))
        else:
            _take_metadata(seed, kind, body)
    seed.messages = [message for message in _messages(items) if is_said(message)]
    return seed


def _replacement(body: Record) -> list[Record]:
    history = body.get("replacement_history")
    if isinstance(history, list):
        return [one.get("item", one) if isinstance(one, Mapping) else {} for one in history]
    return [{"type": "message", "role": "user", "content": body.get("message")}]


def _rolled_back(items: list[Record], turns: object) -> list[Record]:
    starts = [at for at, item in enumerate(items) if _is_prompt(item)]
    count = turns if isinstance(turns, int) else 1
    return items[: starts[-count]] if 0 < count <= len(starts) else items if count <= 0 else items[: starts[0]]


def _is_prompt(item: Record) -> bool:
    return item.get("role") == "user" and not _text(item.get("content")).lstrip().startswith(_NOT_TYPED)


def _messages(items: Sequence[Record]) -> list[Message]:
    found: list[Message] = []
    for item in items:
        kind = item.get("type")
        if kind == "message" and item.get("role") != "assistant":
            found.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif str(kind).endswith("_output"):
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))})
        elif kind in _ITEMS:
            _say(_answer_at_end(found), item)
    return found


def _answer_at_end(found: list[Message]) -> Message:
    """The assistant message that is being put together."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _say(message: Message, item: Record) -> None:
    kind = item.get("type")
    if kind == "message":
        message["content"] = "\n\n".join(filter(None, [message["content"], _text(item.get("content"))]))
    elif kind == "reasoning":
        text = _text(item.get("summary")) or _text(item.get("content"))
        if text:
            message["reasoning"] = "\n\n".join(filter(None, [message.get("reasoning", ""), text]))
    else:
        message.setdefault("tool_calls", []).append(_tool_call(item))


def _tool_call(item: Record) -> dict[str, Any]:
    given: Any = next((item[key] for key in ("arguments", "input", "action") if item.get(key) is not None), {})
    arguments = given if isinstance(given, str) else encode(given).decode("utf-8")
    name = item.get("name") or str(item.get("type")).removesuffix("_call")
    return {
        "id": item.get("call_id") or item.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _output(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("content", value)
    if isinstance(value, str):
        return value
    return _text(value) or encode(value).decode("utf-8")


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [one["text"] for one in content if isinstance(one, Mapping) and isinstance(one.get("text"), str)]
    return "\n".join(texts)


def _take_metadata(seed: Seed, kind: object, body: Record) -> None:
    if kind == "session_meta" or (kind is None and "instructions" in body):
        seed.agent_session_id = _string(body.get("id")) or seed.agent_session_id
        seed.provider = _string(body.get("model_provider")) or seed.provider
        instructions = body.get("base_instructions")
        text = instructions.get("text") if isinstance(instructions, Mapping) else body.get("instructions")
        seed.system_prompt = _string(text) or seed.system_prompt
        for name in ("cwd", "cli_version", "originator"):
            if isinstance(body.get(name), str):
                seed.provenance[name] = body[name]
    elif kind == "turn_context":
        seed.model = _string(body.get("model")) or seed.model


def _string(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
