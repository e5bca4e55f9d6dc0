"""What a model is sent, judged by the message types of the providers' own packages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from anthropic.types import MessageParam
from hypothesis import given, settings
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from mulligan.session.messages import NO_RESULT, OMITTED, for_model, is_continuable, sound_cuts
from mulligan.values.errors import RequestError
from tests.session.example_messages import Message, assistant, calling, result, talk, used, user, using

OPENAI: TypeAdapter[list[Any]] = TypeAdapter(list[ChatCompletionMessageParam])
ANTHROPIC: TypeAdapter[list[Any]] = TypeAdapter(list[MessageParam])


def check_openai(messages: list[dict[str, Any]]) -> None:
    """As the types say, and as the service does: each call answered at once, by exactly one result, and no other."""
    OPENAI.validate_python(messages)
    waiting: list[str] = []
    seen: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] in waiting
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting
        waiting = [call["id"] for call in message.get("tool_calls", ())]
        seen = distinct(waiting, seen)
        assert message["content"] or waiting
    assert not waiting


def distinct(ids: list[str], seen: set[str]) -> set[str]:
    assert all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", one) for one in ids)
    assert len(seen | set(ids)) == len(seen) + len(ids)
    return seen | set(ids)


def check_anthropic(messages: list[dict[str, Any]]) -> None:
    """As the types say, and as the service does: taking turns, a user first, no empty text, results at once."""
    ANTHROPIC.validate_python(messages)
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"] * (
        len(messages) % 2
    )
    asked: list[str] = []
    seen: set[str] = set()
    for message in messages:
        kinds = [block["type"] for block in message["content"]]
        answered = [block["tool_use_id"] for block in message["content"] if block["type"] == "tool_result"]
        assert kinds and answered == asked
        assert kinds[: len(answered)] == ["tool_result"] * len(answered)
        assert all(block["text"].strip() for block in message["content"] if block["type"] == "text")
        asked = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        seen = distinct(asked, seen)
    assert not asked


@settings(max_examples=400)
@given(talk)
def test_any_transcript_cut_anywhere_gives_a_valid_prompt(messages: list[Message]) -> None:
    for start in (0, len(messages) // 2):
        for stop in (len(messages), (len(messages) * 2) // 3):
            part = messages[start:stop]
            check_openai(for_model(part, "openai", system="x").messages)
            check_anthropic(for_model(part, "anthropic", system="x").messages)


@settings(max_examples=200)
@given(talk)
def test_at_a_sound_cut_no_result_is_invented_on_either_side(messages: list[Message]) -> None:
    whole = _made_up(messages)
    for cut in sound_cuts(messages):
        assert _made_up(messages[:cut]) + _made_up(messages[cut:]) == whole


def _made_up(messages: list[Message]) -> int:
    sent = for_model(messages, "openai").messages
    return sum(message["role"] == "tool" and message["content"] == NO_RESULT for message in sent)


def test_a_missing_result_is_replaced_by_one_that_says_so() -> None:
    assert for_model([user("go"), calling("a", "b"), result("a", "42"), user("stop")]).messages == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "shell", "arguments": '{"n":1}'}},
                {"id": "b", "type": "function", "function": {"name": "shell", "arguments": '{"n":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "tool", "tool_call_id": "b", "content": NO_RESULT},
        {"role": "user", "content": "stop"},
    ]


def test_a_result_without_its_call_becomes_text() -> None:
    sent = for_model([result("a", "42"), assistant("I see.")], "anthropic")
    assert sent.messages == [
        {"role": "user", "content": [{"type": "text", "text": "Result of an earlier tool call: 42"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
    ]


def test_a_late_result_comes_right_after_its_call() -> None:
    sent = for_model([calling("a"), user("hurry"), result("a", "42")]).messages
    assert [message["role"] for message in sent] == ["assistant", "tool", "user"]


def test_the_same_id_twice_is_two_exchanges() -> None:
    sent = for_model([calling("call_1"), result("call_1", "x"), calling("call_1"), result("call_1", "y")]).messages
    answers = [(message["tool_call_id"], message["content"]) for message in sent if message["role"] == "tool"]
    assert answers == [("call_1", "x"), ("call_1_2", "y")]


def test_shapes_are_translated_both_ways() -> None:
    openai = [user("go"), calling("a", text="ok"), result("a", "42")]
    anthropic = [user("go"), using("a", text="ok"), used("a")]
    assert for_model(openai, "anthropic").messages == [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "a", "name": "shell", "input": {"n": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "42"}]},
    ]
    assert for_model(anthropic, "openai").messages == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "ok",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": '{"n":1}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]


def test_system_texts_are_where_each_provider_expects_them() -> None:
    said = [{"role": "system", "content": "two"}, user("go")]
    assert for_model(said, "openai", system="one").messages[0] == {"role": "system", "content": "one"}
    sent = for_model(said, "anthropic", system="one")
    assert (sent.system, len(sent.messages)) == ("one\n\ntwo", 1)


def test_transcript_that_begins_with_the_assistant_gets_a_beginning() -> None:
    sent = for_model([assistant("so")], "anthropic").messages
    assert sent[0] == {"role": "user", "content": [{"type": "text", "text": OMITTED}]}


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(RequestError):
        for_model([], "morse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "before, after, can",
    [
        ([], [], True),
        ([user("a")], [], True),
        ([calling("a")], [result("a")], False),
        ([calling("a")], [], False),
        ([calling("a", "b"), result("a")], [result("b")], False),
        ([calling("a", "b"), result("a"), result("b")], [assistant("x")], True),
        ([calling("a"), user("never mind")], [assistant("x")], True),
        ([calling("a"), user("hurry")], [result("a")], False),
        ([using("a")], [used("a")], False),
        ([using("a"), used("a", text="and more")], [], True),
        ([calling("a"), result("a"), assistant("x"), user("y")], [], True),
    ],
)
def test_where_transcript_can_go_on(before: list[Message], after: list[Message], can: bool) -> None:
    assert is_continuable(before, after) is can
