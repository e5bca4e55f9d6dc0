"""Settings with comments are changed without touching anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.hosts.settings import cut, insert, parse
from mulligan.values.errors import MulliganError

SPACES = st.lists(st.sampled_from([" ", "\n", "\t", "\r\n", "// a, ] }\n", "/* b { */"]), max_size=3).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def written(value: Any, draw: Any) -> str:
    """The value as somebody with odd habits would write it."""

    def gap() -> str:
        return str(draw(SPACES))

    def trailing() -> str:
        return str(draw(st.sampled_from(["", ","])))

    if isinstance(value, dict) and value:
        rows = [f"{gap()}{json.dumps(key)}{gap()}:{gap()}{written(one, draw)}{gap()}" for key, one in value.items()]
        return "{" + ",".join(rows) + trailing() + gap() + "}"
    if isinstance(value, list) and value:
        rows = [gap() + written(one, draw) + gap() for one in value]
        return "[" + ",".join(rows) + trailing() + gap() + "]"
    return json.dumps(value)


@st.composite
def documents(draw: Any, kind: Any = VALUES) -> tuple[Any, str]:
    value = draw(kind)
    return value, draw(SPACES) + written(value, draw) + draw(SPACES)


@given(documents())
def test_jsonc_that_we_write_is_parsed_back(document: tuple[Any, str]) -> None:
    value, text = document
    assert parse(text).value == value


@given(documents(st.lists(VALUES, max_size=4)), VALUES)
def test_an_item_is_added_and_nothing_else_changes(document: tuple[Any, str], item: Any) -> None:
    value, text = document
    fresh = insert(text, parse(text), json.dumps(item))
    assert parse(fresh).value == [*value, item]
    assert _is_subsequence(text, fresh)


@given(documents(st.dictionaries(st.text(max_size=4), VALUES, min_size=1, max_size=4)), st.data())
def test_removing_a_member_keeps_the_others(document: tuple[Any, str], data: st.DataObject) -> None:
    value, text = document
    index = data.draw(st.integers(0, len(value) - 1))
    fresh = cut(text, parse(text), index)
    assert parse(fresh).value == {key: one for i, (key, one) in enumerate(value.items()) if i != index}


@given(documents(st.lists(VALUES, max_size=3)), VALUES)
def test_adding_and_removing_a_member_restores_the_values(document: tuple[Any, str], item: Any) -> None:
    value, text = document
    added = insert(text, parse(text), json.dumps(item))
    assert parse(cut(added, parse(added), len(value))).value == value


def _is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(char in rest for char in part if char not in " \t\r\n")


@pytest.mark.parametrize(
    "text", ["", "{", '{"a" 1}', "{'a': 1}", "[1 2]", "{} x", '{"a": tru}', '["\n"]', "[01]", "[" * 300 + "]" * 300]
)
def test_invalid_jsonc_is_refused_with_its_position(text: str) -> None:
    with pytest.raises(MulliganError) as caught:
        parse(text)
    assert caught.value.code == "invalid_json"


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text)
    except MulliganError as error:
        assert error.code == "invalid_json"
