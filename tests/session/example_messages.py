"""Messages for tests: by hand, and by chance in every shape that providers give them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calling(*ids: str, text: str | None = None, name: str = "shell") -> Message:
    calls = [{"id": one, "type": "function", "function": {"name": name, "arguments": '{"n":1}'}} for one in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(id: str, text: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


def using(*ids: str, text: str = "") -> Message:
    uses = [{"type": "tool_use", "id": one, "name": "shell", "input": {"n": 1}} for one in ids]
    return {"role": "assistant", "content": [*([{"type": "text", "text": text}] if text else []), *uses]}


def used(*ids: str, text: str = "") -> Message:
    blocks = [{"type": "tool_result", "tool_use_id": one, "content": "done"} for one in ids]
    return {"role": "user", "content": [*blocks, *([{"type": "text", "text": text}] if text else [])]}


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_ids = st.sampled_from(["call_1", "call_1_2", "call_2", "", "fc:é 1", "x" * 100])
_arguments = st.one_of(
    st.just("{}"), _texts, st.fixed_dictionaries({"path": _texts}), st.none(), st.lists(st.integers(0, 9))
)
_image = st.sampled_from(
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
    ]
)
_text_block = st.builds(lambda text: {"type": "text", "text": text}, _texts)
_use = st.builds(
    lambda id, arguments: {"type": "tool_use", "id": id, "name": "f", "input": arguments}, _ids, _arguments
)
_result_block = st.builds(
    lambda id, content, failed: {"type": "tool_result", "tool_use_id": id, "content": content, "is_error": failed},
    _ids,
    st.one_of(_texts, st.lists(_text_block, max_size=2), st.none()),
    st.booleans(),
)
_thinking = st.just({"type": "thinking", "thinking": "hm", "signature": "sig"})
_odd_block = st.sampled_from([{"type": "strange", "x": 1}, {"type": "text"}, {}])
_openai_call = st.builds(
    lambda id, arguments: {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}},
    _ids,
    _arguments,
)
_plain_call = st.builds(lambda id, arguments: {"id": id, "name": "f", "args": arguments}, _ids, _arguments)

_said = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system", "developer", "critic"]),
    st.one_of(_texts, st.lists(st.one_of(_text_block, _image, _odd_block), max_size=3), st.none()),
)
_calls = st.builds(
    lambda calls, content: {"role": "assistant", "content": content, "tool_calls": calls},
    st.lists(st.one_of(_openai_call, _plain_call), max_size=3),
    st.one_of(_texts, st.none()),
)
_uses = st.builds(
    lambda blocks: {"role": "assistant", "content": blocks},
    st.lists(st.one_of(_use, _text_block, _thinking), max_size=4),
)
_results = st.builds(
    lambda role, id, content: {"role": role, "tool_call_id": id, "content": content},
    st.sampled_from(["tool", "tool_result"]),
    _ids,
    st.one_of(_texts, st.lists(_text_block, max_size=2), st.none()),
)
_result_blocks = st.builds(
    lambda blocks: {"role": "user", "content": blocks},
    st.lists(st.one_of(_result_block, _text_block, _image), min_size=1, max_size=3),
)

any_message: st.SearchStrategy[Message] = st.one_of(_said, _calls, _uses, _results, _result_blocks)
talk: st.SearchStrategy[list[Message]] = st.lists(any_message, max_size=14)
