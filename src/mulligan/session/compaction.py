"""Compaction: replaces the older part of the context window by a summary. Pure, except for the callbacks.

1. The split never parts a tool result from its call: it moves back to a user's message, else to a sound place.
2. What is archived becomes one user message (a custom compactor may give several). Nothing leaves the journal.
3. With a hard limit, what is in force afterwards is estimated at no more tokens than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal, get_args

from mulligan.session.lifecycle import checked_count
from mulligan.session.messages import (
    calls_in,
    estimated_tokens,
    is_prompt,
    is_result,
    sound_cuts,
)
from mulligan.session.transcript_log import Message, check_message, text_of
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass

Strategy = Literal["llm", "truncate", "observation_mask", "custom"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

# A model, as compaction sees it: the archived messages in, a summary out.
Summarizer = Callable[[Sequence[Message]], str]

Compactor = Callable[[list[Message]], "str | Mapping[str, Any] | Sequence[Mapping[str, Any]]"]
Masker = Callable[[list[Message]], "str | Sequence[str | None] | None"]
Compressor = Callable[[dict[str, Any]], str]

KEEP_LAST = 12
TOOL_OUTPUT_MAX_CHARS = 16_000
_SHOWN_MESSAGES, _SHOWN_CHARS = 15, 500
_MASK_FROM_CHARS, _FIRST_LINE_CHARS = 500, 120
# A user's prompt is the agent's task, so the mask keeps it whole up to here, and both its ends beyond.
_PROMPT_MAX_CHARS = 4_000
_CHARS_PER_TOKEN = 4


@fast_dataclass(slots=True, frozen=True)
class Options:
    """The options of a compaction. Other options are refused."""

    keep_last: int = KEEP_LAST
    token_threshold: int | None = None
    tool_output_max_chars: int = TOOL_OUTPUT_MAX_CHARS
    compact_strategy: Strategy = "observation_mask"
    hard_limit_tokens: int | None = None
    hard_limit_strategy: Strategy = "llm"
    custom_compactor: Compactor | None = None
    mask_callback: Masker | None = None
    compress_callback: Compressor | None = None

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies that may run: the second one only with a hard limit, which may be zero."""
        harder = () if self.hard_limit_tokens is None else (self.hard_limit_strategy,)
        return (self.compact_strategy, *harder)


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """Raises `unknown_option` for an unknown key and `invalid_params` for a wrong value."""
    asked = {name: value for name, value in (given or {}).items() if value is not None}
    known = {one.name for one in fields(Options)}
    unknown = sorted(str(name) for name in (given or {}) if name not in known)
    if unknown:
        raise fault("unknown_option", f"Compaction has no option {unknown[0]!r}.", field=unknown[0])
    for name, value in asked.items():
        _CHECKS[name](name, value)
    if "custom_compactor" in asked:
        asked.setdefault("compact_strategy", "custom")
    options = Options(**asked)
    if (options.custom_compactor is not None) != ("custom" in options.strategies):
        words = "The strategy custom needs a custom_compactor, and a custom_compactor needs the strategy custom."
        raise fault("invalid_params", words, field="custom_compactor")
    return options


def _check_strategy(name: str, value: object) -> None:
    if value not in STRATEGIES:
        raise fault("invalid_params", f"{name} must be one of {', '.join(STRATEGIES)}.", field=name)


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise fault("invalid_params", f"{name} must be a function.", field=name)


_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    **dict.fromkeys(("keep_last", "token_threshold", "tool_output_max_chars", "hard_limit_tokens"), checked_count),
    **dict.fromkeys(("compact_strategy", "hard_limit_strategy"), _check_strategy),
    **dict.fromkeys(("custom_compactor", "mask_callback", "compress_callback"), _check_callable),
}


@fast_dataclass(slots=True, frozen=True)
class Compacted:
    """The window after a compaction: `summaries`, then the messages from `archived` on, some of them `shortened`."""

    archived: int
    strategy: str
    summaries: Sequence[Message]
    shortened: Mapping[int, Message] = field(default_factory=dict)

    def messages(self, before: Sequence[Message]) -> list[Message]:
        kept = [self.shortened.get(at, before[at]) for at in range(self.archived, len(before))]
        return [*self.summaries, *kept]


def compacted(messages: Sequence[Message], options: Options, summarize: Summarizer | None = None) -> Compacted | None:
    """None when there is nothing to do: too few messages, too few tokens, or no sound place to split."""
    if "llm" in options.strategies and summarize is None:
        raise fault("no_provider", "The strategy llm needs a model that writes the summary; none is set.")
    if options.token_threshold is not None and estimated_tokens(messages) <= options.token_threshold:
        return None
    split = split_at(messages, options.keep_last) if len(messages) > options.keep_last else 0
    work = _Compaction(messages, options, summarize)
    done = work.archive(split) if split else Compacted(0, options.compact_strategy, ())
    limit = options.hard_limit_tokens
    # The limit also holds for few messages, such as the summary of many prompts and the last steps.
    if limit is not None and estimated_tokens(done.messages(messages)) > limit:
        return work.archive_to_limit(done, limit)
    return done if split else None


def split_at(messages: Sequence[Message], keep_last: int) -> int:
    """How many messages to archive: at least the last `keep_last` stay, and no tool exchange is split."""
    naive = len(messages) - keep_last
    sound = sound_cuts(messages)
    prompts = [at for at in sound if 0 < at <= naive and at < len(messages) and is_prompt(messages[at])]
    if prompts:
        return prompts[-1]
    earlier = [at for at in sound if 0 < at <= naive]
    later = [at for at in sound if at > naive]
    return earlier[-1] if earlier else (later[0] if later else 0)


@fast_dataclass(slots=True)
class _Compaction:
    all: Sequence[Message]
    options: Options
    summarize: Summarizer | None
    _named: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The tool names by call id, the first if a provider repeats ids. Only the compressor needs them."""
        if self.options.compress_callback is not None:
            self._named = {call.id: call.name for one in reversed(self.all) for call in reversed(calls_in(one))}

    def archive(self, split: int) -> Compacted:
        strategy = self.options.compact_strategy
        summaries = self._summaries(strategy, self.all[:split])
        return Compacted(split, strategy, summaries, self._shortened(split))

    def archive_to_limit(self, done: Compacted, limit: int) -> Compacted:
        """Archive more messages until the rest is within the limit, with the strategy for the hard limit."""
        strategy = self.options.hard_limit_strategy
        # The summary gets a quarter of the limit, or more if the kept messages leave more.
        kept_tokens = self._kept_tokens(done)
        cuts = (at for at in sound_cuts(self.all) if at >= done.archived)
        split = next((at for at in cuts if kept_tokens[at] <= limit * 3 // 4), len(self.all))
        more = [done.shortened.get(at, self.all[at]) for at in range(done.archived, split)]
        archived = [*done.summaries, *more]
        room = (limit - kept_tokens[split]) * _CHARS_PER_TOKEN
        text = "\n\n".join(text_of(one) for one in self._summaries(strategy, archived))
        summaries = [_summary(_cut(text, room), strategy, split)] if room > 0 else []
        kept = {at: message for at, message in done.shortened.items() if at >= split}
        return Compacted(split, strategy, summaries, kept)

    def _kept_tokens(self, done: Compacted) -> dict[int, int]:
        """For each place where the window could be split, the tokens of the messages that would stay."""
        found, tokens = {len(self.all): 0}, 0
        for at in range(len(self.all) - 1, done.archived - 1, -1):
            tokens += estimated_tokens([done.shortened.get(at, self.all[at])]) + 1
            found[at] = tokens
        return found

    def _summaries(self, strategy: str, archived: Sequence[Message]) -> list[Message]:
        if strategy == "custom":
            assert self.options.custom_compactor is not None, "options are checked together"
            return _custom(self.options.custom_compactor, list(archived))
        writers: dict[str, Callable[[Sequence[Message]], str]] = {
            "llm": self._llm,
            "truncate": truncated,
            "observation_mask": self._masked,
        }
        return [_summary(writers[strategy](archived), strategy, len(archived))]

    def _llm(self, archived: Sequence[Message]) -> str:
        assert self.summarize is not None, "`compacted` checked it first"
        text = self.summarize(archived)
        return text if isinstance(text, str) and text.strip() else truncated(archived)

    def _masked(self, archived: Sequence[Message]) -> str:
        short = [self._shorter(one) or one for one in archived]
        chosen = self.options.mask_callback(list(short)) if self.options.mask_callback is not None else None
        if isinstance(chosen, str):
            return chosen
        masks = _masks(chosen)
        masks += [None] * (len(short) - len(masks))
        lines = [mask if isinstance(mask, str) else masked(one) for mask, one in zip(masks, short, strict=False)]
        return "\n".join([_header(len(archived)), *lines])

    def _shortened(self, split: int) -> dict[int, Message]:
        """Shorter versions of kept tool outputs that are too long. Only observation_mask changes kept messages."""
        if self.options.compact_strategy != "observation_mask":
            return {}
        found = ((at, self._shorter(self.all[at])) for at in range(split, len(self.all)))
        return {at: message for at, message in found if message is not None}

    def _shorter(self, message: Message) -> Message | None:
        """The message with its tool outputs cut to the limit; None if they are within it."""
        if not is_result(message):
            return None
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._output(message, content)} if self._is_long(content) else None
        if not isinstance(content, list) or not any(self._is_long(text_of({"content": one})) for one in content):
            return None
        return {**message, "content": [self._shorter_block(message, one) for one in content]}

    def _shorter_block(self, message: Message, block: Any) -> Any:
        text = text_of({"content": block})
        if not isinstance(block, dict) or not self._is_long(text):
            return block
        key = "text" if isinstance(block.get("text"), str) else "content"
        return {**block, key: self._output(message, text)}

    def _is_long(self, text: str) -> bool:
        return len(text) > self.options.tool_output_max_chars

    def _output(self, message: Message, text: str) -> str:
        limit = self.options.tool_output_max_chars
        if self.options.compress_callback is None:
            return _cut(text, limit)
        asked = {"tool_name": self._tool_name(message), "output": text, "max_chars": limit}
        made: object = self.options.compress_callback(asked)
        if not isinstance(made, str):
            raise fault("invalid_params", "A compress_callback must return a text.", field="compress_callback")
        return made

    def _tool_name(self, message: Message) -> str | None:
        named = message.get("name") or message.get("tool_name")
        if isinstance(named, str):
            return named
        wanted = message.get("tool_call_id") or message.get("tool_use_id")
        return self._named.get(wanted) if isinstance(wanted, str) else None


def _masks(chosen: object) -> list[str | None]:
    """One mask per message; None means the default mask."""
    masks = [] if chosen is None else chosen
    if not isinstance(masks, list | tuple) or not all(one is None or isinstance(one, str) for one in masks):
        raise fault("invalid_params", "A mask_callback must return a text or a list of texts.", field="mask_callback")
    return list(masks)


def _custom(compactor: Compactor, archived: list[Message]) -> list[Message]:
    """Runs the custom compactor. It returns a string, an object with `summary` or `text`, or messages."""
    count, made = len(archived), compactor(archived)
    if isinstance(made, Mapping):
        made = made.get("summary") or made.get("text") or ""
    if isinstance(made, str):
        if not made.strip():
            raise fault("invalid_params", "The custom compactor returned no summary.", field="custom_compactor")
        return [_summary(made, "custom", count)]
    if not isinstance(made, Sequence):
        words = "A custom compactor must return a text, {summary} or a list of messages."
        raise fault("invalid_params", words, field="custom_compactor")
    return [check_message(one) for one in made]


def _summary(text: str, strategy: str, archived: int) -> Message:
    note = {"compaction": {"strategy": strategy, "archived_messages": archived}}
    return {"role": "user", "content": text, "metadata": note}


def _header(count: int) -> str:
    return f"[{count} earlier messages were compacted.]"


def truncated(archived: Sequence[Message]) -> str:
    """The first messages, each cut, and the number of the others."""
    lines = [f"[{one['role']}] {_cut(text_of(one), _SHOWN_CHARS)}" for one in archived[:_SHOWN_MESSAGES]]
    more = len(archived) - len(lines)
    return "\n".join([_header(len(archived)), *lines, *([f"... and {more} more"] if more else [])])


def masked(message: Message) -> str:
    """Keeps the text of users, of the assistant and of earlier summaries; keeps the first line of long outputs."""
    if "compaction" in message.get("metadata", {}):
        return text_of(message)
    text = "\n".join([text_of(message), *(f"(called {call.name})" for call in calls_in(message))]).strip()
    if is_prompt(message):
        return f"[{message['role']}] {_beginning_and_end(text)}"
    if message["role"] == "assistant" or len(text) < _MASK_FROM_CHARS:
        return f"[{message['role']}] {text}"
    first = text.split("\n", 1)[0][:_FIRST_LINE_CHARS]
    return f"[{message['role']}] {first} … ({len(text.splitlines())} lines, {len(text)} characters in all)"


def _beginning_and_end(text: str) -> str:
    if len(text) <= _PROMPT_MAX_CHARS:
        return text
    half = _PROMPT_MAX_CHARS // 2
    return f"{text[:half]} … [{len(text) - 2 * half} characters cut] … {text[-half:]}"


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of a text, with a note between them, in at most that many characters."""
    if len(text) <= limit:
        return text
    note = f" … [{len(text)} characters, cut] … "
    room = limit - len(note)
    if room < 2:
        return text[:limit]
    head = room * 2 // 3
    return text[:head] + note + text[len(text) - (room - head) :]
