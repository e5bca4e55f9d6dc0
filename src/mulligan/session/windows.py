"""Windows: which messages are in force, as a short list of spans. Pure.

A message never moves: it has one number in the journal of the session it was written in. What a session has in force
is a list of spans of such numbers, its own and those of sessions it was forked from. Forking, cutting, compacting and
going back only make another list; no message is copied and none is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mulligan.values.canonical import decode, encode


class Span(NamedTuple):
    """Messages `start` up to, not including, `stop` of one session's journal."""

    session: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Window = tuple[Span, ...]


def normal(spans: Iterable[Span]) -> Window:
    """The same messages in the fewest spans."""
    found: list[Span] = []
    for span in spans:
        if span.stop <= span.start:
            continue
        last = found[-1] if found else None
        if last is not None and last.session == span.session and last.stop == span.start:
            found[-1] = Span(span.session, last.start, span.stop)
        else:
            found.append(span)
    return tuple(found)


def length(window: Window) -> int:
    return sum(len(span) for span in window)


def part(window: Window, start: int, stop: int) -> Window:
    """Places `start` up to `stop` of the window."""
    return normal(_part(window, start, stop))


def _part(window: Window, start: int, stop: int) -> Iterator[Span]:
    at = 0
    for span in window:
        first, last = max(start - at, 0), min(stop - at, len(span))
        yield Span(span.session, span.start + first, span.start + max(first, last))
        at += len(span)


def without(window: Window, gone: Span) -> Window:
    """The window with the messages of one span taken out, wherever they are."""
    return normal(_without(window, gone))


def _without(window: Window, gone: Span) -> Iterator[Span]:
    for span in window:
        if span.session != gone.session:
            yield span
            continue
        yield Span(span.session, span.start, min(span.stop, gone.start))
        yield Span(span.session, max(span.start, gone.stop), span.stop)


def place_of(window: Window, session: str, number: int) -> int | None:
    """Where in the window a message is; None if it is not in force."""
    at = 0
    for span in window:
        if span.session == session and span.start <= number < span.stop:
            return at + number - span.start
        at += len(span)
    return None


def at_place(window: Window, place: int) -> tuple[str, int]:
    """The session and number of the message at a place of the window."""
    for span in window:
        if place < len(span):
            return span.session, span.start + place
        place -= len(span)
    raise IndexError(place)


def to_text(window: Window) -> str:
    return encode([list(span) for span in window]).decode("utf-8")


def from_text(text: str) -> Window:
    return from_json(decode(text))


def from_json(body: Sequence[Sequence[str | int]]) -> Window:
    return tuple(Span(str(session), int(start), int(stop)) for session, start, stop in body)


def to_json(window: Window) -> list[list[str | int]]:
    return [list(span) for span in window]
