"""Windows are lists of messages, written as spans: each operation against the same one on a plain list."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mulligan.session.tables import (
    MessageSpan,
    Window,
    at_place,
    length,
    normal,
    part,
    place_of,
    spans_from_text,
    spans_to_text,
    without,
)

_span = st.builds(
    lambda session, start, size: MessageSpan(session, start, start + size),
    st.sampled_from(["a", "b"]),
    st.integers(0, 20),
    st.integers(0, 5),
)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """A message is in force at most once."""
    found: list[MessageSpan] = []
    for span in draw(st.lists(_span, max_size=6)):
        if not set(listed((span,))) & set(listed(tuple(found))):
            found.append(span)
    return normal(found)


def listed(window: Window) -> list[tuple[str, int]]:
    return [(span.session, number) for span in window for number in range(span.start, span.stop)]


@given(st.lists(_span, max_size=6))
def test_the_normal_form_has_the_same_messages_in_the_fewest_spans(spans: list[MessageSpan]) -> None:
    found = normal(spans)
    assert listed(found) == listed(tuple(spans))
    assert normal(found) == found and all(len(span) > 0 for span in found)
    assert not any(one.session == next_one.session and one.stop == next_one.start for one, next_one in pairwise(found))


@given(windows(), st.integers(0, 30), st.integers(0, 30))
def test_a_part_is_a_slice(window: Window, start: int, stop: int) -> None:
    assert listed(part(window, start, stop)) == listed(window)[start:stop]
    assert length(window) == len(listed(window))


@given(windows(), _span)
def test_taking_out_a_span_takes_out_its_messages(window: Window, gone: MessageSpan) -> None:
    out = set(listed((gone,)))
    assert listed(without(window, gone)) == [one for one in listed(window) if one not in out]


@given(windows())
def test_places_are_found_both_ways(window: Window) -> None:
    for place, (session, number) in enumerate(listed(window)):
        assert at_place(window, place) == (session, number)
        assert place_of(window, session, number) == place
    assert place_of(window, "c", 0) is None


@given(windows())
def test_it_is_written_and_read(window: Window) -> None:
    assert spans_from_text(spans_to_text(window)) == window
