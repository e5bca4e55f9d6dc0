"""A pattern's tree, spelled for each engine. The spellings mean the same, set for set and place for place.

The end of a line takes an optional `\\r` with it, so that files with it are searched like files without. Ripgrep sees
files from their first byte, so for it the beginning of a line takes an optional byte order mark; whoever asks it has to
look again at lines that have one. Greed is not spelled: it cannot change whether a line matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from types import MappingProxyType

from mulligan.values.plain import plain
from mulligan.workspace.search.expression import Alt, Anchor, Chars, Node, Repeat, Seq, is_found_inside


@plain(slots=True, frozen=True)
class _Style:
    character: Callable[[int], str]
    anchors: MappingProxyType[str, str]


def _braced(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _pythonic(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\U{code:08x}"


_RE2 = _Style(
    _braced,
    MappingProxyType(
        {"start": r"(?m:^)", "end": r"(?:\r?(?m:$))", "word": r"\b", "not_word": r"\B"},
    ),
)
_RUST = _Style(
    _braced,
    MappingProxyType(
        _RE2.anchors | {"start": r"(?:(?m:^)\x{feff}?)", "word": r"(?-u:\b)", "not_word": r"(?-u:\B)"},
    ),
)
_PYTHON = _Style(
    _pythonic,
    MappingProxyType({"start": "^", "end": r"(?:\r?$)", "word": r"\b", "not_word": r"\B"}),
)
_SEVERAL_BYTES = r"[\x80-\ud7ff\ue000-\U0010ffff]"


def for_re2(tree: Node) -> str:
    """For RE2 in its default, UTF-8 mode."""
    return _spell(tree, _RE2)


def for_rust(tree: Node) -> str:
    """For ripgrep's default engine, whatever its flags say about lines. Finds more in lines that begin with U+FEFF."""
    return _spell(tree, _RUST)


def for_python(tree: Node) -> str:
    """For `re` on text decoded with `surrogateescape`; wants the flags ASCII and MULTILINE.

    The others go byte by byte, so a pattern that is nothing but `\\B` is found inside a character of several bytes.
    """
    spelled = _spell(tree, _PYTHON)
    return f"(?:{spelled})|{_SEVERAL_BYTES}" if is_found_inside(tree) else spelled


def required_literal(tree: Node) -> bytes:
    """The longest text found that every matching line holds; empty when there is none to be sure of."""
    return max(_literal_runs(tree), key=len, default="").encode()


def _literal_runs(node: Node) -> list[str]:
    if isinstance(node, Repeat):
        return _literal_runs(node.item) if node.low else []
    items = node.items if isinstance(node, Seq) else (node,)
    runs = [""]
    for item in items:
        if isinstance(item, Chars) and item.is_single:
            runs[-1] += chr(item.members[0][0])
        else:
            runs += [*(_literal_runs(item) if isinstance(item, Seq | Repeat) else []), ""]
    return runs


def _spell(node: Node, style: _Style) -> str:
    if isinstance(node, Chars):
        return _spell_chars(node, style)
    if isinstance(node, Anchor):
        return style.anchors[node.kind]
    if isinstance(node, Seq):
        items = _starts_first(node.items)
        return "".join(_grouped(item, style) if isinstance(item, Alt) else _spell(item, style) for item in items)
    if isinstance(node, Alt):
        return "|".join(_spell(branch, style) for branch in node.branches)
    item = _spell(node.item, style) if isinstance(node.item, Chars) else _grouped(node.item, style)
    return item + _spell_bounds(node)


def _starts_first(items: tuple[Node, ...]) -> Iterator[Node]:
    """Anchors side by side hold at one place, in any order: that behind the mark which ripgrep's `start` steps over."""
    for _, run in groupby(items, key=lambda item: isinstance(item, Anchor)):
        yield from sorted(run, key=lambda item: isinstance(item, Anchor) and item.kind != "start")


def _grouped(node: Node, style: _Style) -> str:
    return f"(?:{_spell(node, style)})"


def _spell_chars(node: Chars, style: _Style) -> str:
    if node.is_single:
        return style.character(node.members[0][0])
    if not node.members:
        return f"[^{style.character(0)}-{style.character(0x10FFFF)}]"
    return "[" + "".join(_spell_range(low, high, style) for low, high in node.members) + "]"


def _spell_range(low: int, high: int, style: _Style) -> str:
    return style.character(low) if low == high else f"{style.character(low)}-{style.character(high)}"


def _spell_bounds(node: Repeat) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    if short:
        return short
    if node.high is None:
        return f"{{{node.low},}}"
    return f"{{{node.low}}}" if node.low == node.high else f"{{{node.low},{node.high}}}"
