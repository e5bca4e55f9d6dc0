"""Any order of verbs on any number of sessions does to the talk what it does to plain lists; no event is ever lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from mulligan.history.projection import SCHEMA
from mulligan.session.compaction import Options, compacted
from mulligan.session.lifecycle import SessionAccess, find_message
from mulligan.session.tables import SESSIONS
from mulligan.session.transcript import Transcript
from mulligan.session.transcript_log import Archive, head_of, number_at, seq_of, window_at, window_of
from mulligan.store.journal import Journal
from mulligan.store.memory import MemoryStore
from mulligan.store.verify import verify
from mulligan.testing import SeededIds, SteppingClock
from mulligan.values.ids import SessionId
from tests.session.example_messages import Message, any_message

_counts = st.integers(0, 12)


@dataclass
class Model:
    """A session as two lists."""

    messages: list[Message] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    branched_at: int | None = None
    where: list[int] = field(default_factory=list)
    """For each message in force, which event it is; -1 for a summary, which is none."""


class TranscriptMachine(RuleBasedStateMachine):
    sessions: Bundle[str] = Bundle("sessions")

    @initialize(target=sessions)
    def begin(self) -> str:
        self.store = MemoryStore(SCHEMA)
        self.archive = Archive(self.store, Journal(SCHEMA), SteppingClock(), SeededIds())
        with self.store.write() as tx:
            body = {"session": "root", "root": "r"}
            self.archive.journal.append(tx, "s:root", "session.opened", body, at=self.archive.now())
        self.models = {"root": Model()}
        self.marks: list[tuple[str, int, list[Message]]] = []
        return "root"

    def talk(self, session: str) -> Transcript:
        return Transcript(SessionAccess(self.archive, SessionId(session), "r"))

    @rule(session=sessions, message=any_message)
    def say(self, session: str, message: Message) -> None:
        self.talk(session).inject(message)
        model = self.models[session]
        model.where.append(len(model.events))
        model.messages.append(message)
        model.events.append("tool_result" if message["role"] == "tool_result" else "message")

    @rule(session=sessions)
    def tell(self, session: str) -> None:
        self.talk(session).emit("note")
        self.models[session].events.append("note")

    @rule(session=sessions)
    def other_records_come_between(self, session: str) -> None:
        with self.store.write() as tx:
            body = {"session": session, "turn": "t", "prompt": None}
            self.archive.journal.append(tx, f"s:{session}", "turn.opened", body, at=self.archive.now())

    @rule(session=sessions, count=_counts)
    def trim(self, session: str, count: int) -> None:
        model = self.models[session]
        start = max(0, len(model.messages) - count)
        model.messages, model.where = model.messages[start:], model.where[start:]
        assert self.talk(session).trim(count) == len(model.messages)

    @rule(session=sessions, count=_counts)
    def truncate(self, session: str, count: int) -> None:
        model = self.models[session]
        model.messages, model.where = model.messages[:count], model.where[:count]
        assert self.talk(session).truncate(count)["kept_turn_count"] == len(model.messages)

    @rule(session=sessions, count=_counts, chars=st.sampled_from([1, 16_000]))
    def compact(self, session: str, count: int, chars: int) -> None:
        model = self.models[session]
        done = compacted(model.messages, Options(keep_last=count, tool_output_max_chars=chars))
        if done is not None:
            kept = [-1 if at in done.shortened else model.where[at] for at in range(done.archived, len(model.where))]
            model.where = [-1] * len(done.summaries) + kept
            model.messages = done.messages(model.messages)
            model.events.append("compaction")
        assert self.talk(session).compact(None, {"keep_last": count, "tool_output_max_chars": chars}, None) == len(
            model.messages
        )

    @rule(session=sessions)
    def reset(self, session: str) -> None:
        self.talk(session).reset()
        self.models[session] = Model(branched_at=self.models[session].branched_at)

    @rule(target=sessions, session=sessions)
    def fork(self, session: str) -> str:
        child = self.talk(session).fork_talk()
        model = self.models[session]
        self.models[child] = Model([*model.messages], [*model.events], None, [*model.where])
        return child

    @rule(target=sessions, session=sessions, count=_counts)
    def fork_at(self, session: str, count: int) -> str:
        child = self.talk(session).fork_at(count)
        model = self.models[session]
        events = self._index(model, count)
        if events is None:
            events = self._view(child)["branched_at_event_index"]
        self.models[child] = Model(model.messages[:count], model.events[:events], events, model.where[:count])
        return child

    def _view(self, session: str) -> dict[str, Any]:
        with self.store.read() as tx:
            row = tx.get(SESSIONS, session)
            assert row is not None
            return self.talk(session).view_in(tx, row)

    def _index(self, model: Model, count: int) -> int | None:
        """None where the last kept message is a summary: then any place between its neighbours would do."""
        if count == 0 or count > len(model.messages):
            return min(count, 1) * len(model.events)
        return None if model.where[count - 1] < 0 else model.where[count - 1] + 1

    @rule(session=sessions)
    def mark(self, session: str) -> None:
        with self.store.read() as tx:
            self.marks.append((session, head_of(tx, SessionId(session)), [*self.models[session].messages]))

    @invariant()
    def all_is_as_in_the_lists(self) -> None:
        for session, model in self.models.items():
            talk = self.talk(session)
            view = self._view(session)
            assert view["messages"] == model.messages and talk.length() == len(model.messages)
            assert [event["kind"] for event in view["events"]] == model.events
            assert view["branched_at_event_index"] == model.branched_at

    @invariant()
    def every_earlier_state_can_be_found_again(self) -> None:
        with self.store.read() as tx:
            for session, seq, messages in self.marks:
                window = window_at(tx, SessionId(session), seq)
                assert sum(len(span) for span in window) == len(messages)

    @invariant()
    def numbers_records_and_names_agree(self) -> None:
        with self.store.read() as tx:
            for session in self.models:
                for place, name in enumerate(self.talk(session).message_ids()):
                    found = find_message(tx, self.archive, SessionId(session), name)
                    assert found is not None and found[2] == place
                for span in window_of(tx, SessionId(session)):
                    for number in range(span.start, span.stop):
                        seq = seq_of(tx, span.session, number)
                        assert number_at(tx, SessionId(span.session), seq) == number + 1
                        assert number_at(tx, SessionId(span.session), seq - 1) == number

    def teardown(self) -> None:
        problems: list[Any] = [one for one in verify(self.store, SCHEMA) if one.severity != "harmless"]
        assert problems == []


TranscriptMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTalkMachine = TranscriptMachine.TestCase
