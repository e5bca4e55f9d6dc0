"""Content in pieces is the same content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import Content, Large, digest_of_beginning, digest_of_content, whole


@dataclass(frozen=True)
class Cut(Large):
    pieces: list[bytes]

    @property
    def digest(self) -> Digest:  # type: ignore[override]  # known when it is asked for
        return digest_of(b"".join(self.pieces))

    @property
    def size(self) -> int:  # type: ignore[override]
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pieces)


pieces = st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba"]), max_size=6)
contents = st.builds(Cut, pieces) | st.builds(b"".join, pieces)


@given(contents, st.integers(min_value=0, max_value=15))
def test_it_begins_as_its_bytes_do(content: Content, size: int) -> None:
    assert digest_of_beginning(content, size) == digest_of(whole(content)[:size])


@given(contents)
def test_it_has_the_digest_and_length_of_its_bytes(content: Content) -> None:
    assert (digest_of_content(content), len(content)) == (digest_of(whole(content)), len(whole(content)))
