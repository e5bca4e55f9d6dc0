"""Compaction: every option, every strategy, and what never happens to a tool exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mulligan.effects.session import DurableSession
from mulligan.session.compaction import Options, compacted, parse_options, split_at
from mulligan.session.messages import estimated_tokens, paired, sound_cuts
from mulligan.session.transcript_log import text_of
from mulligan.values.errors import MulliganError
from tests.session.example_messages import Message, assistant, calling, result, talk, used, user, using


def fill(session: DurableSession, count: int) -> list[Message]:
    said = [user(f"q{number}") if number % 2 == 0 else assistant(f"a{number}") for number in range(count)]
    for message in said:
        session.inject(message)
    return said


def code_of(session: DurableSession, opts: Any) -> str:
    before = session.view()
    with pytest.raises(MulliganError) as caught:
        session.compact(opts)
    assert session.view() == before
    return caught.value.code


@pytest.mark.req("S3.compact.keep_last_default_12", "S3.compact.returns_int", "D11.compaction_default")
def test_by_default_the_last_twelve_stay_and_the_rest_is_one_masked_message(session: DurableSession) -> None:
    said = fill(session, 20)
    assert session.compact() == 13
    summary, *kept = session.messages()
    assert kept == said[8:]
    assert summary["role"] == "user"
    assert summary["metadata"] == {"compaction": {"strategy": "observation_mask", "archived_messages": 8}}
    assert summary["content"].splitlines()[1:] == [f"[{message['role']}] {message['content']}" for message in said[:8]]
    view = session.view()
    assert view["summary"] == summary["content"]
    assert view["events"][-1]["kind"] == "compaction"
    assert view["events"][-1]["metadata"] == {
        "strategy": "observation_mask",
        "archived_messages": 8,
        "kept_messages": 12,
        "shortened_messages": 0,
    }


@pytest.mark.parametrize("count", [0, 5, 12])
def test_a_short_transcript_is_not_compacted(session: DurableSession, count: int) -> None:
    fill(session, count)
    before = session.view()
    assert session.compact() == count
    assert session.view() == before


@pytest.mark.req("S3.compact.unknown_keys_raise", "S3.loud.compact_unknown_key")
@pytest.mark.parametrize("key", ["keep_first", "strategy", "keepLast", "", "provider"])
def test_an_unknown_option_is_refused(session: DurableSession, key: str) -> None:
    fill(session, 20)
    assert code_of(session, {key: 1}) == "unknown_option"
    assert code_of(session, {key: None}) == "unknown_option"


@pytest.mark.parametrize(
    "opts",
    [
        {"keep_last": -1},
        {"keep_last": 1.0},
        {"keep_last": True},
        {"token_threshold": "many"},
        {"tool_output_max_chars": -5},
        {"hard_limit_tokens": -1},
        {"compact_strategy": "best"},
        {"hard_limit_strategy": "best"},
        {"custom_compactor": "text"},
        {"mask_callback": 1},
        {"compress_callback": []},
        {"compact_strategy": "custom"},
        {"hard_limit_tokens": 0, "hard_limit_strategy": "custom"},
        {"compact_strategy": "truncate", "custom_compactor": len},
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(session: DurableSession, opts: dict[str, Any]) -> None:
    fill(session, 20)
    assert code_of(session, opts) == "invalid_params"


@pytest.mark.parametrize("opts", ["keep_last", 7, ["keep_last"]])
def test_options_that_are_no_object_are_refused(session: DurableSession, opts: Any) -> None:
    fill(session, 20)
    assert code_of(session, opts) == "invalid_params"


def test_keys_that_are_no_text_are_unknown_too(session: DurableSession) -> None:
    assert code_of(session, {1: 2, "other": 3}) == "unknown_option"


@pytest.mark.req("S3.compact.token_threshold")
def test_a_transcript_below_the_token_threshold_is_not_compacted(session: DurableSession) -> None:
    said = fill(session, 20)
    tokens = estimated_tokens(said)
    assert session.compact(token_threshold=tokens) == 20
    assert session.compact(token_threshold=tokens - 1) == 13


class TestStrategies:
    @pytest.mark.req("S3.compact_strategy.truncate")
    def test_truncate_shows_the_first_fifteen_cut_short(self, session: DurableSession) -> None:
        for number in range(30):
            session.inject(user(f"{number}:" + "x" * 700))
        assert session.compact(compact_strategy="truncate", keep_last=10) == 11
        lines = session.messages()[0]["content"].splitlines()
        assert lines[0] == "[20 earlier messages were compacted.]"
        assert len(lines) == 17 and lines[-1] == "... and 5 more"
        assert all(line.startswith("[user] ") and len(line) <= 507 and "cut" in line for line in lines[1:-1])

    @pytest.mark.req("S3.compact_strategy.observation_mask")
    def test_the_mask_keeps_the_assistants_text_and_hides_long_outputs(self, session: DurableSession) -> None:
        output = "line one " + "z" * 300 + "\n" + "rest\n" * 100
        for message in (user("go"), calling("c", text="Looking."), result("c", output), assistant("y" * 900)):
            session.inject(message)
        fill(session, 4)
        session.compact(keep_last=4)
        lines = session.messages()[0]["content"].splitlines()
        assert lines[1:3] == ["[user] go", "[assistant] Looking."]
        assert lines[3] == "(called shell)"
        assert lines[4].startswith("[tool] line one zzz") and lines[4].endswith("(101 lines, 809 characters in all)")
        assert lines[5] == "[assistant] " + "y" * 900
        assert "rest" not in session.messages()[0]["content"]

    @pytest.mark.req("D11.compaction_keeps_the_task")
    def test_the_mask_keeps_prompts_whole_up_to_4000_characters_and_both_ends_of_longer_ones(
        self, session: DurableSession
    ) -> None:
        task, long_task = "Do this.\n" + "t" * 3_991, "BEGIN" + "l" * 6_000 + "END"
        session.inject(user(task))
        session.inject(user(long_task))
        fill(session, 4)
        session.compact(keep_last=4)
        summary = session.messages()[0]["content"]
        assert f"[user] {task}\n" in summary
        assert f"[user] {long_task[:2000]} … [2008 characters cut] … {long_task[-2000:]}" in summary

    @pytest.mark.req("D11.compaction_keeps_the_task")
    def test_a_task_outlives_any_number_of_compactions(self, session: DurableSession) -> None:
        session.inject(user("The task: paint the fence blue."))
        for _ in range(5):
            fill(session, 6)
            session.compact(keep_last=2)
        assert session.messages()[0]["content"].count("The task: paint the fence blue.") == 1

    @pytest.mark.req("D11.compaction_keeps_the_task")
    def test_a_hard_limit_wins_over_prompts_and_earlier_summaries_and_the_summary_says_so(
        self, session: DurableSession
    ) -> None:
        session.inject(user("t" * 3_000))
        fill(session, 6)
        session.compact(keep_last=4)
        fill(session, 4)
        session.compact(keep_last=4, hard_limit_tokens=200, hard_limit_strategy="observation_mask")
        assert estimated_tokens(session.messages()) <= 200
        assert "cut]" in session.messages()[0]["content"]

    @pytest.mark.req("S3.compact_strategy.llm")
    def test_llm_asks_the_model_it_is_given(self, session: DurableSession) -> None:
        said = fill(session, 20)
        asked: list[Sequence[Message]] = []

        def model(messages: Sequence[Message]) -> str:
            asked.append(list(messages))
            return "They greeted each other."

        assert session.compact({"compact_strategy": "llm"}, provider=model) == 13
        assert asked == [said[:8]]
        assert session.messages()[0]["content"] == "They greeted each other."

    def test_an_empty_summary_of_a_model_is_replaced_by_truncation(self, session: DurableSession) -> None:
        fill(session, 20)
        session.summarizer = lambda messages: "  "
        session.compact(compact_strategy="llm")
        assert session.messages()[0]["content"].startswith("[8 earlier messages were compacted.]\n[user] q0")

    @pytest.mark.req("D11.compaction_llm_needs_provider")
    @pytest.mark.parametrize("opts", [{"compact_strategy": "llm"}, {"hard_limit_tokens": 5}, {"hard_limit_tokens": 0}])
    def test_llm_without_a_model_is_refused(self, session: DurableSession, opts: dict[str, Any]) -> None:
        fill(session, 20)
        assert code_of(session, opts) == "no_provider"

    @pytest.mark.req("S3.compact_strategy.custom", "S3.compact.custom_compactor")
    @pytest.mark.parametrize("made", ["short", {"summary": "short"}, {"text": "short"}])
    def test_custom_replaces_the_scheme(self, session: DurableSession, made: Any) -> None:
        said = fill(session, 20)
        seen: list[list[Message]] = []

        def compactor(archived: list[Message]) -> Any:
            seen.append(list(archived))
            archived.clear()
            return made

        assert session.compact({"compact_strategy": "custom", "custom_compactor": compactor, "keep_last": 4}) == 5
        assert seen == [said[:16]]
        assert [text_of(message) for message in session.messages()] == ["short", "q16", "a17", "q18", "a19"]

    def test_custom_may_give_whole_messages_and_needs_no_strategy(self, session: DurableSession) -> None:
        fill(session, 20)
        made = [user("first"), assistant("second")]
        assert session.compact(custom_compactor=lambda archived: made) == 14
        assert session.messages()[:2] == made
        session.inject(user("next"))
        assert session.length() == 15 and session.messages()[-1] == user("next")

    @pytest.mark.parametrize("made", ["", None, 7, {"other": "x"}, [{"content": "no role"}]])
    def test_an_empty_summary_of_a_custom_compactor_is_refused(self, session: DurableSession, made: Any) -> None:
        fill(session, 20)
        assert code_of(session, {"custom_compactor": lambda archived: made}) == "invalid_params"

    @pytest.mark.parametrize("made", [7, {"a": "b"}, ["text", 7]])
    def test_a_mask_that_is_no_text_is_refused(self, session: DurableSession, made: Any) -> None:
        fill(session, 20)
        before = session.view()
        assert code_of(session, {"mask_callback": lambda archived: made}) == "invalid_params"
        assert session.view() == before

    def test_an_output_compressed_to_no_text_is_refused(self, session: DurableSession) -> None:
        session.inject(calling("c"))
        session.inject(result("c", "x" * 100))
        fill(session, 20)
        opts: dict[str, Any] = {"compress_callback": lambda asked: None, "tool_output_max_chars": 10}
        assert code_of(session, opts) == "invalid_params"

    def test_an_error_of_a_callback_is_raised_and_nothing_changes(self, session: DurableSession) -> None:
        fill(session, 20)
        before = session.view()

        def broken(archived: list[Message]) -> str:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            session.compact(custom_compactor=broken)
        assert session.view() == before


class TestMaskPath:
    @pytest.mark.req("S3.compact.mask_callback")
    def test_the_mask_callback_chooses_per_message(self, session: DurableSession) -> None:
        said = fill(session, 16)
        seen: list[list[Message]] = []

        def mask(archived: list[Message]) -> list[str | None]:
            seen.append(archived)
            return ["[hidden]", None]

        session.compact(mask_callback=mask)
        lines = session.messages()[0]["content"].splitlines()
        assert lines[1:] == ["[hidden]", "[assistant] a1", "[user] q2", "[assistant] a3"]
        assert seen == [said[:4]]

    def test_or_for_all_of_them(self, session: DurableSession) -> None:
        fill(session, 16)
        session.compact(mask_callback=lambda archived: "all hidden")
        assert session.messages()[0]["content"] == "all hidden"

    @pytest.mark.req("S3.compact.tool_output_max_chars")
    def test_long_outputs_among_the_kept_are_cut_and_the_journal_keeps_them(self, session: DurableSession) -> None:
        fill(session, 4)
        long = "head" + "x" * 5_000 + "tail"
        kept = [user("go"), calling("c"), result("c", long), using("d"), used("d"), result("c", "short")]
        for message in kept:
            session.inject(message)
        assert session.compact(keep_last=6, tool_output_max_chars=200) == 7
        shown = session.messages()[1:]
        assert [*shown[:2], *shown[3:]] == [*kept[:2], *kept[3:]]
        assert shown[2] | {"content": ""} == kept[2] | {"content": ""}
        text = shown[2]["content"]
        assert len(text) <= 200 and text.startswith("head") and text.endswith("tail") and "5008 characters" in text
        assert [event["text"] for event in session.events() if event["text"] == long] == [long]

    @pytest.mark.req("S3.compact.compress_callback")
    def test_the_compress_callback_cuts_instead(self, session: DurableSession) -> None:
        fill(session, 4)
        session.inject(calling("c", name="grep"))
        session.inject(result("c", "x" * 100))
        session.inject({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "e", "content": "y" * 100}]})
        asked: list[dict[str, Any]] = []

        def compress(output: dict[str, Any]) -> str:
            asked.append(output)
            return "small"

        session.compact(keep_last=3, tool_output_max_chars=50, compress_callback=compress)
        assert asked == [
            {"tool_name": "grep", "output": "x" * 100, "max_chars": 50},
            {"tool_name": None, "output": "y" * 100, "max_chars": 50},
        ]
        assert [text_of(message) for message in session.messages()][-2:] == ["small", "small"]

    @pytest.mark.req("S3.compact.mask_callback", "S3.compact.compress_callback")
    @pytest.mark.parametrize("strategy", ["truncate", "custom", "llm"])
    def test_neither_touches_the_other_strategies(self, session: DurableSession, strategy: str) -> None:
        fill(session, 4)
        session.inject(calling("c"))
        session.inject(result("c", "x" * 100))

        def never(_: object) -> str:
            raise AssertionError

        opts: dict[str, Any] = {"custom_compactor": lambda _: "s"} if strategy == "custom" else {}
        session.compact(
            {"compact_strategy": strategy, "keep_last": 2, "tool_output_max_chars": 5, **opts},
            provider=lambda _: "s",
            mask_callback=never,
            compress_callback=never,
        )
        assert session.messages()[-1] == result("c", "x" * 100)


class TestHardLimit:
    @pytest.mark.req("S3.compact.hard_limit_tokens", "S3.compact.hard_limit_strategy")
    @pytest.mark.parametrize("strategy", ["truncate", "observation_mask", "custom", "llm"])
    @pytest.mark.parametrize("limit", [400, 60])
    def test_the_context_window_fits(self, session: DurableSession, strategy: str, limit: int) -> None:
        for number in range(30):
            session.inject(user(f"{number} " + "x" * 400))
        opts: dict[str, Any] = {"custom_compactor": lambda _: "s" * 9_000} if strategy == "custom" else {}
        opts |= {"hard_limit_tokens": limit, "hard_limit_strategy": strategy, "compact_strategy": "observation_mask"}
        count = session.compact(opts, provider=lambda _: "l" * 9_000)
        assert session.length() == count
        assert estimated_tokens(session.messages()) <= limit
        assert session.view()["events"][-1]["metadata"]["strategy"] == strategy

    @pytest.mark.req("S3.compact.hard_limit_tokens", "D11.compaction_keeps_the_task")
    def test_few_messages_fit_too(self, session: DurableSession) -> None:
        for number in range(6):
            session.inject(user(f"{number} " + "x" * 3_000))
        for limit in (2_000, 500):
            session.compact(hard_limit_tokens=limit, hard_limit_strategy="observation_mask")
            assert estimated_tokens(session.messages()) <= limit
        before = session.view()
        session.compact(hard_limit_tokens=500, hard_limit_strategy="observation_mask")
        assert session.view() == before

    def test_a_limit_that_is_kept_anyway_changes_nothing_else(self, session: DurableSession) -> None:
        fill(session, 20)
        session.compact(hard_limit_tokens=10_000, hard_limit_strategy="truncate")
        assert session.view()["events"][-1]["metadata"]["strategy"] == "observation_mask"

    def test_each_message_is_read_a_few_times_however_many_there_are(self) -> None:
        class Looked(list[Message]):
            looks = 0

            def __getitem__(self, at: Any) -> Any:
                self.looks += 1
                return super().__getitem__(at)

        messages = Looked(user("x" * 400) for _ in range(400))
        options = Options(keep_last=399, hard_limit_tokens=500, hard_limit_strategy="truncate")
        assert compacted(messages, options) is not None
        assert messages.looks <= 10 * len(messages)


class TestSplit:
    @pytest.mark.req("D11.compaction_no_orphans")
    @settings(max_examples=300)
    @given(talk, st.integers(0, 8))
    def test_no_result_is_ever_parted_from_its_call(self, messages: list[Message], keep_last: int) -> None:
        split = split_at(messages, min(keep_last, len(messages)))
        assert split in sound_cuts(messages)
        pairs = paired(messages)
        for at, answers in pairs.answers.items():
            assert all(found is None or (at < split) == (found[0] < split) for found in answers)

    @settings(max_examples=200)
    @given(talk, st.sampled_from(["truncate", "observation_mask"]), st.integers(0, 8), st.integers(1, 60))
    def test_whatever_is_compacted_the_pairs_that_stay_are_whole(
        self, messages: list[Message], strategy: Any, keep_last: int, limit: int
    ) -> None:
        options = Options(
            keep_last=keep_last, compact_strategy=strategy, hard_limit_tokens=limit, hard_limit_strategy="truncate"
        )
        done = compacted(messages, options)
        if done is not None:
            after = done.messages(messages)
            assert len(paired(after).orphans) <= len(paired(messages).orphans)
            assert estimated_tokens(after) <= limit or estimated_tokens(done.summaries) == 0

    def test_a_split_moves_back_to_a_users_message(self) -> None:
        said = [user("a"), assistant("b"), user("c"), calling("x"), result("x"), assistant("d")]
        assert split_at(said, 2) == 2

    def test_or_to_the_nearest_sound_place(self) -> None:
        said = [user("a"), calling("x"), result("x"), calling("y"), result("y"), assistant("d")]
        assert split_at(said, 2) == 3
        assert split_at([calling("x"), result("x")], 1) == 2

    def test_one_exchange_is_kept_or_archived_whole(self, session: DurableSession) -> None:
        for message in (calling("a", "b", "c"), result("a"), result("b"), result("c")):
            session.inject(message)
        assert session.compact(keep_last=2) == 1
        assert session.messages()[0]["metadata"]["compaction"]["archived_messages"] == 4


def test_a_message_that_arrives_while_a_model_summarises_stays(session: DurableSession) -> None:
    fill(session, 20)

    def model(messages: Sequence[Message]) -> str:
        session.inject(user("meanwhile"))
        return "sum"

    assert session.compact(compact_strategy="llm", provider=model) == 14
    assert session.messages()[-1] == user("meanwhile")


def test_another_writers_change_of_the_window_makes_it_try_again(session: DurableSession) -> None:
    fill(session, 20)
    tries: list[int] = []

    def model(messages: Sequence[Message]) -> str:
        tries.append(len(messages))
        if len(tries) == 1:
            session.trim(16)
        return "sum"

    assert session.compact(compact_strategy="llm", provider=model) == 13
    assert tries == [8, 4]


def test_compacting_again_folds_the_summary_in(session: DurableSession) -> None:
    fill(session, 20)
    session.compact(keep_last=4)
    fill(session, 4)
    session.compact(keep_last=4)
    assert session.length() == 5
    assert session.messages()[0]["metadata"]["compaction"]["archived_messages"] == 5


def test_the_defaults_are_those_of_the_document() -> None:
    assert parse_options(None) == Options(
        keep_last=12,
        token_threshold=None,
        tool_output_max_chars=16_000,
        compact_strategy="observation_mask",
        hard_limit_tokens=None,
        hard_limit_strategy="llm",
    )
