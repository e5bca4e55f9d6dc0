"""Typed state against a plain model: transactions that nest, overlap, fail and commit in any order, and snapshots."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from mulligan import Session, Snapshot
from mulligan.session.state.session import Attempt
from tests.session.state.example_slices import Added, Note, Seen, counting, number


@dataclass
class Open:
    """A transaction in a context of its own, and what the model thinks it has done."""

    attempt: Attempt
    context: contextvars.Context
    added: int = 0
    notes: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)


class Slices(RuleBasedStateMachine):
    attempts = Bundle("attempts")
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.session = counting(Session())
        self.total = 0
        self.notes: list[str] = []
        self.logs: list[str] = []
        self.running = 0

    @rule(by=st.integers(-5, 5), text=st.text(max_size=3))
    def outside(self, by: int, text: str) -> None:
        self.session.dispatch(Added(by))
        self.session.dispatch(Note(text))
        self.total += by
        self.notes.append(text)

    @rule(target=attempts)
    def begin(self) -> Open:
        context = contextvars.copy_context()
        attempt = self.session.attempt("tool", "1")
        context.run(attempt.__enter__)
        self.running += 1
        return Open(attempt, context)

    @rule(one=attempts, by=st.integers(-5, 5), text=st.text(max_size=3))
    def inside(self, one: Open, by: int, text: str) -> None:
        for event in (Added(by), Note(text), Seen(text)):
            assert one.context.run(self.session.dispatch, event)
        one.added += by
        one.notes.append(text)
        one.logs.append(text)

    @rule(one=consumes(attempts))
    def commit(self, one: Open) -> None:
        one.context.run(one.attempt.__exit__, None, None, None)
        self.running -= 1
        self.total += one.added
        self.notes += one.notes
        self.logs += one.logs

    @rule(one=consumes(attempts), by_word=st.booleans())
    def abort(self, one: Open, by_word: bool) -> None:
        if by_word:
            one.attempt.fail("no")
        error = None if by_word else RuntimeError()
        one.context.run(one.attempt.__exit__, None, error, None)
        self.running -= 1
        self.logs += one.logs

    @precondition(lambda self: self.running == 0)
    @rule(target=snapshots)
    def take(self) -> tuple[Snapshot, int, list[str]]:
        return self.session.snapshot(), self.total, list(self.notes)

    @precondition(lambda self: self.running == 0)
    @rule(taken=snapshots, through_json=st.booleans())
    def put_back(self, taken: tuple[Snapshot, int, list[str]], through_json: bool) -> None:
        snapshot, self.total, notes = taken
        self.notes = list(notes)
        self.session.rollback(Snapshot.from_json(snapshot.to_json()) if through_json else snapshot)

    @invariant()
    def what_is_published_is_what_the_model_says(self) -> None:
        assert number(self.session) == self.total
        assert [note.text for note in self.session[Note].all()] == self.notes
        assert [seen.text for seen in self.session[Seen].all()] == self.logs


Slices.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSlices = Slices.TestCase
