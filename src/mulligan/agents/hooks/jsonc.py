"""JSON with comments, read so that a change touches nothing else: where everything stands in the text is known.

Comments (`//`, `/* */`) and commas after the last item are accepted, as agents accept them in their settings. Nothing
is ever written anew: an insertion or a cut gives back all other characters as they were.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mulligan.values.canonical import decode
from mulligan.values.faults import MulliganError, fault

_SPACE = re.compile(r"(?:[ \t\r\n]|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_DEPTH_MAX = 200


@dataclass(slots=True)
class Node:
    """A value and where it stands. `items` of an object or array; an object's have keys."""

    value: Any
    start: int
    end: int
    items: list[Item] | None = None

    def get(self, key: str) -> Node | None:
        """An object's member; of two with one key the last counts."""
        found = [item.node for item in self.items or () if item.key == key]
        return found[-1] if found and isinstance(self.value, dict) else None


@dataclass(slots=True)
class Item:
    """A member of an object or an item of an array, from its first character; `comma` is where its comma ends."""

    key: str | None
    start: int
    node: Node
    comma: int | None = None


def parse(text: str) -> Node:
    """Raises `invalid_json`, saying where."""
    try:
        return _Reader(text).document()
    except MulliganError:
        raise
    except RecursionError:
        raise fault("invalid_json", "It is nested too deeply.") from None


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def document(self) -> Node:
        self._skip()
        node = self._value(0)
        self._skip()
        if self._at < len(self._text):
            raise self._wrong("something after the end")
        return node

    def _value(self, depth: int) -> Node:
        if depth > _DEPTH_MAX:
            raise self._wrong("it is nested too deeply")
        start, sign = self._at, self._text[self._at : self._at + 1]
        if sign == "{":
            return self._container(start, depth, close="}", keyed=True)
        if sign == "[":
            return self._container(start, depth, close="]", keyed=False)
        return self._plain(start, _STRING if sign == '"' else _SCALAR)

    def _plain(self, start: int, pattern: re.Pattern[str]) -> Node:
        found = pattern.match(self._text, start)
        if found is None:
            raise self._wrong("no JSON value")
        self._at = found.end()
        try:
            return Node(decode(found.group()), start, self._at)
        except MulliganError:
            self._at = start
            raise self._wrong("no JSON value") from None

    def _container(self, start: int, depth: int, *, close: str, keyed: bool) -> Node:
        self._at += 1
        items: list[Item] = []
        while True:
            self._skip()
            if self._take(close):
                values = [(item.key, item.node.value) for item in items]
                value = dict(values) if keyed else [value for _, value in values]
                return Node(value, start, self._at, items)
            if items and items[-1].comma is None:
                raise self._wrong(f"a comma or {close} is missing")
            items.append(self._item(depth, keyed=keyed))
            self._skip()
            if self._take(","):
                items[-1].comma = self._at

    def _item(self, depth: int, *, keyed: bool) -> Item:
        start, key = self._at, None
        if keyed:
            key = self._plain(start, _STRING).value
            self._skip()
            if not self._take(":"):
                raise self._wrong("a colon is missing")
            self._skip()
        return Item(key, start, self._value(depth + 1))

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _take(self, sign: str) -> bool:
        taken = self._text.startswith(sign, self._at)
        self._at += len(sign) if taken else 0
        return taken

    def _wrong(self, what: str) -> MulliganError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return fault("invalid_json", f"Line {line}, column {column}: {what}.", line=line, column=column)


def insert(text: str, container: Node, item: str) -> str:
    """The text with an item added at the end of an object or array, in the manner of the items before it."""
    items = container.items or []
    if not items:
        return _insert_first(text, container, item)
    last = items[-1]
    lead = text[_line_start(text, last.start) : last.start]
    own_line = not lead.strip() and "\n" in text[container.start : last.start]
    glue = _newline(text) + lead if own_line else " "
    if last.comma is not None:
        return text[: last.comma] + glue + _indented(item, lead if own_line else "", text) + "," + text[last.comma :]
    at = last.node.end
    return text[:at] + "," + glue + _indented(item, lead if own_line else "", text) + text[at:]


def _insert_first(text: str, container: Node, item: str) -> str:
    """Right after the bracket; whatever stood inside (white space, comments) stays before the closing one."""
    outer = text[_line_start(text, container.start) : container.start]
    outer = outer[: len(outer) - len(outer.lstrip())]
    inner = outer + _step(text)
    newline = _newline(text)
    rest = text[container.start + 1 : container.end - 1]
    tail = rest if rest.strip() else newline + outer
    at = container.start + 1
    return text[:at] + newline + inner + _indented(item, inner, text) + tail + text[container.end - 1 :]


def _indented(item: str, lead: str, text: str) -> str:
    """An item of several lines, every line but the first moved in; one step is what this text uses."""
    lines = [(_step(text) * ((len(line) - len(line.lstrip(" "))) // 2)) + line.lstrip(" ") for line in item.split("\n")]
    return (_newline(text) + lead).join(lines)


def _step(text: str) -> str:
    found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    if found is None:
        return "  "
    return "\t" if found.group(1).startswith("\t") else found.group(1)[:8]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _ends_line(text: str, at: int) -> bool:
    return text[at:].lstrip(" \t")[:1] in ("\r", "\n")


def cut(text: str, container: Node, index: int) -> str:
    """The text without one item: with its comma, or, of the last one, with the comma before it."""
    items = container.items or []
    item = items[index]
    start, end = item.start, item.comma if item.comma is not None else item.node.end
    if len(items) == 1 and not text[container.start + 1 : start].strip():
        # What `insert` made of an empty one: nothing before it, and after it what there was.
        rest = text[end : container.end - 1]
        return text[: container.start + 1] + (rest if rest.strip() else "") + text[container.end - 1 :]
    lead = _line_start(text, start)
    if not text[lead:start].strip() and lead > container.start and _ends_line(text, end):
        # Its whole line goes; a line that ends in a comment keeps its end, because this one's end stays.
        start = lead - (2 if text[lead - 2 : lead] == "\r\n" else 1)
    elif index and text[start - 1 : start] in (" ", "\t"):
        start -= 1
    text = text[:start] + text[end:]
    before = items[index - 1] if index else None
    if before is not None and index == len(items) - 1 and before.comma is not None and item.comma is None:
        text = text[: before.comma - 1] + text[before.comma :]
    return text
