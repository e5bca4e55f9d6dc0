"""Random edits of real source files, written down as V4A patches the way models write them.

Everything comes from one `random.Random`, so a seed names a case.
"""

from __future__ import annotations

import difflib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

_SOURCE_BYTES = range(400, 30_000)
_NEW_LINES = (
    "x = 1",
    "    return None",
    "",
    "\tpass",
    "# naïve café ✅",
    "}",
    "import os",
    "-- minus",
    "+ plus",
    "@@ at",
)
_ALIKES = str.maketrans({'"': "“", "'": "’", "-": "–"})


@dataclass(frozen=True, slots=True)
class Case:
    """A tree and a patch for it."""

    seed: int
    tree: dict[str, bytes]
    patch: str


@dataclass(frozen=True, slots=True)
class Style:
    """How a patch is written."""

    context: int
    anchor_chance: float
    deep_anchor: bool
    first_marker: bool
    end_marker: bool
    bare_blanks: bool
    smudge_chance: float
    crlf_file: bool
    crlf_patch: bool
    final_newline: bool
    typographic: bool
    wrapper: str


@cache
def sources() -> tuple[str, ...]:
    """The texts of the standard library's own modules, those of ordinary size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    contents = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return tuple(content.decode() for content in contents if len(content) in _SOURCE_BYTES and b"\r" not in content)


def make_case(seed: int) -> Case:
    random = Random(seed)
    style = _style(random)
    tree: dict[str, bytes] = {}
    parts: list[str] = []
    for number in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choice((f"m{number}.py", f"pkg/sub/m{number}.py", f"a b{number}.txt"))
        text = _as_file(random.choice(sources()), style)
        tree[name] = text.encode()
        parts += _operations(random, name, text, style)
    return Case(seed, tree, _wrapped(parts, style))


def _style(random: Random) -> Style:
    return Style(
        context=random.choice((0, 1, 2, 3, 3, 3, 5)),
        anchor_chance=random.choice((0.0, 0.3, 1.0)),
        deep_anchor=random.random() < 0.5,
        first_marker=random.random() < 0.7,
        end_marker=random.random() < 0.4,
        bare_blanks=random.random() < 0.5,
        smudge_chance=random.choice((0.0, 0.0, 0.1, 0.5)),
        crlf_file=random.random() < 0.2,
        crlf_patch=random.random() < 0.1,
        final_newline=random.random() < 0.9,
        typographic=random.random() < 0.1,
        wrapper=random.choice(("", "", "", "heredoc", "padded", "environment")),
    )


def _as_file(text: str, style: Style) -> str:
    lines = text.split("\n")
    if style.typographic:
        lines = [line.translate(_ALIKES) if index % 3 == 0 else line for index, line in enumerate(lines)]
    text = "\n".join(lines)
    text = text if style.final_newline else text.rstrip("\n")
    return text.replace("\n", "\r\n") if style.crlf_file else text


def _operations(random: Random, name: str, text: str, style: Style) -> list[str]:
    kind = random.choice(("update",) * 7 + ("add", "delete", "replace", "twice"))
    if kind == "delete":
        return [f"*** Delete File: {name}"]
    if kind in ("add", "replace"):
        return [
            f"*** Add File: {name if kind == 'replace' else 'new/' + name}",
            *_plus(random.choices(_NEW_LINES, k=4)),
        ]
    update = _update(random, name, text, style)
    if kind == "twice":
        update += ["*** Add File: second.txt", "+one", "+two", "*** Update File: second.txt", "@@", "-two", "+zwei"]
    return update


def _plus(lines: Sequence[str]) -> list[str]:
    return ["+" + line for line in lines]


def _update(random: Random, name: str, text: str, style: Style) -> list[str]:
    before = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    after = _edited(random, before)
    while after == before:
        after = _edited(random, before)
    head = [f"*** Update File: {name}"]
    if random.random() < 0.15:
        head.append(f"*** Move to: moved/{name}")
    hunks = [*_hunks(random, before, after, style)]
    if hunks and not style.first_marker and hunks[0][0] == "@@":
        hunks[0] = hunks[0][1:]
    return [*head, *(line for hunk in hunks for line in hunk)]


def _edited(random: Random, lines: Sequence[str]) -> list[str]:
    out = [*lines]
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        at = random.choice((random.randrange(len(out) + 1), len(out), 0)) if out else 0
        match random.choice(("insert", "delete", "replace", "tweak")):
            case "insert":
                out[at:at] = random.choices(_NEW_LINES, k=random.randint(1, 3))
            case "delete":
                del out[at : at + random.randint(1, 3)]
            case "replace":
                out[at : at + 2] = random.choices(_NEW_LINES, k=2)
            case _ if at < len(out):
                out[at] = out[at] + "  # changed"
    return out


def _hunks(random: Random, before: Sequence[str], after: Sequence[str], style: Style) -> Iterator[list[str]]:
    """Like a diff's hunks, with the style's context and anchors. Sometimes the context is not quite the file's."""
    groups = difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(style.context)
    for group in groups:
        start, end = group[0][1], group[-1][2]
        hunk = [*_marks(random, before, start, style)]
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                hunk += [_kept(random, line, style) for line in before[i1:i2]]
                continue
            hunk += ["-" + _smudged(random, line, style) for line in before[i1:i2]]
            hunk += _plus(after[j1:j2])
        if style.end_marker and end == len(before):
            hunk.append("*** End of File")
        yield hunk


def _marks(random: Random, before: Sequence[str], start: int, style: Style) -> Iterator[str]:
    above = [line for line in before[:start] if line.lstrip().startswith(("def ", "class "))]
    if not above or random.random() >= style.anchor_chance:
        yield "@@"
    else:
        yield "@@ " + (above[-1] if style.deep_anchor else above[-1].strip())


def _kept(random: Random, line: str, style: Style) -> str:
    if not line and style.bare_blanks:
        return ""
    return " " + _smudged(random, line, style)


def _smudged(random: Random, line: str, style: Style) -> str:
    """The line as a careless writer gives it."""
    if random.random() >= style.smudge_chance or not line:
        return line
    return random.choice((line + "  ", line.rstrip(), line.lstrip(), "  " + line, line.translate(_ALIKES)))


def _wrapped(parts: Sequence[str], style: Style) -> str:
    begin, end = "*** Begin Patch", "*** End Patch"
    lines = [begin, *parts, end]
    if style.wrapper == "heredoc":
        lines = ["<<'EOF'", *lines, "EOF"]
    elif style.wrapper == "padded":
        lines = ["", f"  {begin} ", *parts, f" {end}  ", ""]
    elif style.wrapper == "environment":
        lines = [begin, "*** Environment ID: local", *parts, end]
    return ("\r\n" if style.crlf_patch else "\n").join(lines)
