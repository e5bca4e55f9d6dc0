"""Canonical JSON, with the standard library as the judge of its bytes."""

from __future__ import annotations

import json
from decimal import Decimal
from enum import IntEnum, StrEnum
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.values.canonical import decode, encode
from mulligan.values.errors import MulliganError

texts = st.text(st.characters(exclude_categories=["Cs"]))
exact = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def judged(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.req(
    "S2.canonical.utf8",
    "S2.canonical.compact",
    "S2.canonical.arrays_keep_order",
    "S2.canonical.no_trailing_newline",
    "D4.canonical_integers",
)
@given(exact)
def test_the_bytes_are_the_standard_librarys(value: object) -> None:
    assert encode(value) == judged(value)
    assert decode(encode(value)) == value


@pytest.mark.req("D4.canonical_floats")
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_finite_shortest_and_round_trip(value: float) -> None:
    again = decode(encode(value))
    assert (again, type(again)) == (value, float)
    assert Decimal(encode(value).decode()) == Decimal(repr(value))


@pytest.mark.req("S2.canonical.keys_sorted_by_bytes")
@given(st.dictionaries(texts, st.none(), max_size=8))
def test_keys_are_in_order_of_their_bytes(value: dict[str, None]) -> None:
    keys = [key.encode() for key in decode(encode(value))]
    assert keys == sorted(keys)


@pytest.mark.req("S2.canonical.keys_sorted_by_bytes")
def test_key_order_is_by_bytes_where_utf_16_would_differ() -> None:
    assert encode({"\U0001f600": 1, "\uffff": 2}) == '{"\uffff":2,"\U0001f600":1}'.encode()


@pytest.mark.req("S2.canonical.standard_escapes")
def test_escapes_are_the_shortest_standard_ones() -> None:
    assert (
        encode('"\\/\b\f\n\r\t\x00\x1f\x7fé\u2028')
        == b'"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7f' + 'é\u2028"'.encode()
    )


def test_tuples_are_lists_and_names_are_texts() -> None:
    class Colour(StrEnum):
        RED = "red"

    assert encode((1, [2, ()], Colour.RED)) == b'[1,[2,[]],"red"]'


class Number(IntEnum):
    ONE = 1


class Shouting(str):
    __slots__ = ()


@pytest.mark.req("D4.canonical_integers", "D4.canonical_floats")
@pytest.mark.parametrize(
    "value",
    [
        *(nan, inf, -inf, 2**63, -(2**63) - 1, "\ud800", b"bytes", {1, 2}, object(), 1j, Number.ONE),
        *({1: "a"}, {None: 1}, {"\udfff": 1}, {Shouting("a"): 1}, {"a": {"b": [nan]}}),
    ],
)
def test_a_value_without_a_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(MulliganError) as refused:
        encode(value)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize("depth", [300, 5_000, 100_000])
def test_nesting_without_end_is_refused_and_not_a_crash(depth: int) -> None:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    with pytest.raises(MulliganError) as refused:
        encode(value)
    assert refused.value.code == "invalid_json"
    with pytest.raises(MulliganError):
        decode("[" * 100_000)


@pytest.mark.parametrize("data", [b"", b"{", b"nul", b"NaN", b"[1,]", b"\xff", b"'a'", b'"\\ud800"', b"1 2", "{"])
def test_text_that_is_no_json_is_refused(data: bytes | str) -> None:
    with pytest.raises(MulliganError) as refused:
        decode(data)
    assert refused.value.code == "invalid_json"
