"""V4A patches judged by the Codex program: wherever Codex applies a patch, we give the same tree.

`EXCEPTIONS` is the whole list of where we do not, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from mulligan.files.edit import line_key
from mulligan.files.patch.v4a import UpdateFile, parse_v4a
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath
from tests.oracles.codex import Tree, codex_apply
from tests.oracles.v4a_files import patch_of, stage
from tests.oracles.v4a_patches import Case, make_case

pytestmark = pytest.mark.hosts

BATCHES = 8
BATCH_SIZE = 80
BATCH_AGREED_MIN = 60


def ours(tree: Mapping[str, bytes], patch: str) -> Tree | Refused:
    """The tree after the patch by our own rules, or why not."""
    try:
        files = stage(tree, patch).files
    except Refused as refused:
        return refused
    after = {**{RepoPath(name): content for name, content in tree.items()}, **files}
    return {name: content for name, content in after.items() if content is not None}


@dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    codex: Tree | None
    ours: Tree | Refused

    @property
    def agreed(self) -> bool:
        return self.codex is not None and self.ours == self.codex

    @property
    def is_wrong(self) -> bool:
        """Codex applies it, we do not give the same, and no exception says so."""
        return self.codex is not None and not self.agreed and not self._is_ambiguous

    @property
    def _is_ambiguous(self) -> bool:
        refused = isinstance(self.ours, Refused) and self.ours.code == "ambiguous_matches"
        return refused and has_repeated_block(self.case)


def judge(seed: int) -> Judged:
    case = make_case(seed)
    return Judged(case, codex_apply(case.tree, case.patch), ours(case.tree, case.patch))


def has_repeated_block(case: Case) -> bool:
    """Whether some hunk's old lines are in its file more than once, found the slow and simple way."""
    updates = [operation for operation in parse_v4a(case.patch) if isinstance(operation, UpdateFile)]
    blocks = [(update.path, [line_key(line) for line in hunk.old]) for update in updates for hunk in update.hunks]
    return any(occurrences(case.tree.get(path, b""), block) > 1 for path, block in blocks if block)


def occurrences(content: bytes, block: list[str]) -> int:
    lines = [line_key(line) for line in content.decode().split("\n")]
    return sum(lines[at : at + len(block)] == block for at in range(len(lines)))


@pytest.mark.req("S1.apply_patch.shared_library", "S1.apply_patch.native")
@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in range(1, BATCHES))])
def test_random_edits_of_real_files_come_out_as_codex_makes_them(batch: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        judged = [*pool.map(judge, range(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE))]
    assert [(each.case.seed, each.ours) for each in judged if each.is_wrong] == []
    assert sum(each.agreed for each in judged) >= BATCH_AGREED_MIN


FILE = b"import os\n\nclass A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n\nx = 1\n"
CRLF = FILE.replace(b"\n", b"\r\n")
WORDS = b"one\ntwo\nthree\n"

SAME: dict[str, tuple[Tree, str]] = {
    "add": ({}, "*** Add File: a/b.txt\n+x\n+\n+  y"),
    "add an empty file": ({}, "*** Add File: a.txt"),
    "add over a file": ({"a": b"old"}, "*** Add File: a\n+new"),
    "add a line that looks like a marker": ({}, "*** Add File: a\n+*** End Patch\n+@@"),
    "delete": ({"a": b"x", "b": b"y"}, "*** Delete File: a"),
    "delete bytes that are not text": ({"a": b"\xff\xfe"}, "*** Delete File: a"),
    "move": ({"a": WORDS}, "*** Update File: a\n*** Move to: d/b\n@@\n-two\n+2"),
    "move over a file": ({"a": WORDS, "b": b"z"}, "*** Update File: a\n*** Move to: b\n@@\n-two\n+2"),
    "move, then change what was moved": (
        {"a": WORDS},
        "*** Update File: a\n*** Move to: b\n@@\n-two\n+2\n*** Update File: b\n@@\n-2\n+zwei",
    ),
    "move away, then add anew": (
        {"a": WORDS},
        "*** Update File: a\n*** Move to: b\n@@\n-two\n+2\n*** Add File: a\n+fresh",
    ),
    "add, change, delete": ({}, "*** Add File: a\n+x\n*** Update File: a\n@@\n-x\n+y\n*** Delete File: a"),
    "change the same file twice": ({"a": WORDS}, "*** Update File: a\n@@\n-one\n+1\n*** Update File: a\n@@\n-1\n+eins"),
    "dots and slashes in a path": ({"a/b": WORDS}, "*** Update File: ./a//b\n@@\n-two\n+2"),
    "no marker on the first hunk": ({"a": WORDS}, "*** Update File: a\n one\n-two\n+2"),
    "a marker with text": (
        {"a": FILE},
        "*** Update File: a\n@@     def g(self):\n-        return 2\n+        return 3",
    ),
    "a marker without its indent": (
        {"a": FILE},
        "*** Update File: a\n@@ def g(self):\n+        y = 1\n         return 2",
    ),
    "the nearest place below the marker": (
        {"a": b"f\nx\ny\nx\ng\nx\n"},
        "*** Update File: a\n@@ f\n-x\n+X",
    ),
    "the only place below a marker that is there twice": (
        {"a": b"f\nx\nf\ny\n"},
        "*** Update File: a\n@@ f\n-y\n+Y",
    ),
    "hunks in order over repeated lines": ({"a": b"x\nx\n"}, "*** Update File: a\n@@\n-x\n+1\n@@\n-x\n+2"),
    "a repeated line pinned by the next hunk": ({"a": b"x\ny\nx\n"}, "*** Update File: a\n@@\n-x\n+1\n@@\n-y\n+2"),
    "insert without context": ({"a": WORDS}, "*** Update File: a\n@@\n+four"),
    "insert below a marker alone": ({"a": WORDS}, "*** Update File: a\n@@ one\n+four"),
    "insert without context, then change": ({"a": WORDS}, "*** Update File: a\n@@\n+four\n@@\n-three\n+3"),
    "insert without context, then behind the last line": ({"a": WORDS}, "*** Update File: a\n@@\n+4\n@@\n three\n+5"),
    "insert into an empty file": ({"a": b""}, "*** Update File: a\n@@\n+x"),
    "insert behind a blank last line": ({"a": b"x\n\n"}, "*** Update File: a\n@@\n+y"),
    "the end of the file": ({"a": b"x\ny\nx\n"}, "*** Update File: a\n@@\n-x\n+z\n*** End of File"),
    "the end of the file, then a blank": (
        {"a": b"x\ny\nx\n"},
        "*** Update File: a\n@@\n-x\n+z\n*** End of File\n",
    ),
    "the end marker before any hunk": ({"a": WORDS}, "*** Update File: a\n*** End of File\n@@\n-two\n+2"),
    "a bare blank line is a blank kept line": ({"a": b"x\n\ny\n"}, "*** Update File: a\n@@\n x\n\n-y\n+z"),
    "a blank line too many": ({"a": WORDS}, "*** Update File: a\n@@\n-two\n+2\n\n*** Add File: b\n+x"),
    "a blank line too many, added and kept": ({"a": b"x\n"}, "*** Update File: a\n@@\n x\n\n+y\n+"),
    "a removed blank line too many": ({"a": b"x\ny\n"}, "*** Update File: a\n@@\n y\n-"),
    "two blank lines where there is one": ({"a": b"x\n\n"}, "*** Update File: a\n@@\n x\n \n-"),
    "only blank lines": ({"a": b"x\n\ny\n"}, "*** Update File: a\n\n*** Add File: b\n+x"),
    "only blank lines, and none in the file": ({"a": b"x\ny"}, "*** Update File: a\n@@\n"),
    "only blank lines below a marker": ({"a": b"x\n\ny\n"}, "*** Update File: a\n@@ x\n "),
    "only kept lines": ({"a": b"x\ny"}, "*** Update File: a\n@@\n y"),
    "remove the only line": ({"a": b"x\n"}, "*** Update File: a\n@@\n-x"),
    "remove the only, unfinished line": ({"a": b"x"}, "*** Update File: a\n@@\n-x"),
    "an unfinished last line": ({"a": b"x\ny"}, "*** Update File: a\n@@\n-x\n+z"),
    "CRLF": ({"a": CRLF}, "*** Update File: a\n@@ class A:\n-        return 1\n+        y\n+        z"),
    "CR": ({"a": b"one\rtwo\rthree\r"}, "*** Update File: a\n@@\n-two\n+2\n+\n+zwei"),
    "mixed endings": ({"a": b"one\r\ntwo\rthree\nfour"}, "*** Update File: a\n@@\n one\n two\n-three\n+3\n four"),
    "kept lines of other white space": (
        {"a": b"  one \n\ttwo\nthree\t\n"},
        "*** Update File: a\n@@\n one\n-two\n+2\n three",
    ),
    "typographic characters": (
        {"a": "say “hi” – it’s\u00a0ok\n".encode()},
        '*** Update File: a\n@@\n-say "hi" - it\'s ok\n+x',
    ),
    "separators are no white space": ({"a": b"x\x1f\nx \n"}, "*** Update File: a\n@@\n-x\n+y"),
    "an exact place beats a fuzzy one": ({"a": b" x\nx\n"}, "*** Update File: a\n@@\n-x\n+y"),
    "a fuzzy place beats a fuzzier one": ({"a": b" x\nx \n"}, "*** Update File: a\n@@\n-x\n+y"),
    "a byte-order mark that is spoken of": ({"a": b"\xef\xbb\xbfx\n"}, "*** Update File: a\n@@\n-\ufeffx\n+y"),
    "a byte-order mark that is not": ({"a": b"\xef\xbb\xbfx\ny\n"}, "*** Update File: a\n@@\n-y\n+z"),
    "lines that begin like operators": ({"a": b"-x\n+y\n @@\n"}, "*** Update File: a\n@@\n--x\n+-X\n +y"),
    "a kept line that looks like a marker": (
        {"a": b"*** Update File: b\nx\n"},
        "*** Update File: a\n@@\n *** Update File: b\n-x\n+y",
    ),
    "padded markers": ({"a": WORDS}, "  *** Update File: a  \n@@   \n-two\n+2"),
    "an environment": ({"a": WORDS}, "*** Environment ID: local\n*** Update File: a\n@@\n-two\n+2"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_codex_applies_we_apply_alike(name: str) -> None:
    tree, body = SAME[name]
    expected = codex_apply(tree, patch_of(body))
    assert expected is not None
    assert ours(tree, patch_of(body)) == expected


@pytest.mark.parametrize("wrapper", ["<<EOF\n{}\nEOF", "<<'EOF'\n{}\nEOF\n", '<<"EOF"\n{}\nEOF', "\n\n  {}  \n\n"])
def test_wrappers_that_codex_takes_off_we_take_off(wrapper: str) -> None:
    patch = wrapper.format(patch_of("*** Update File: a\n@@\n-two\n+2"))
    assert ours({"a": WORDS}, patch) == codex_apply({"a": WORDS}, patch) == {"a": b"one\n2\nthree\n"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A patch that Codex applies in another way, what we do, and why."""

    tree: Tree
    body: str
    ours: Tree | tuple[str, str]
    reason: str


EXCEPTIONS: dict[str, Difference] = {
    "several equally good places": Difference(
        tree={"a": b"x\ny\nx\n"},
        body="*** Update File: a\n@@\n-x\n+z",
        ours=("reject", "ambiguous_matches"),
        reason="Codex takes the first; the contract refuses to guess.",
    ),
    "several equally good places below several anchors": Difference(
        tree={"a": b"f\nx\nf\nx\n"},
        body="*** Update File: a\n@@ f\n-x\n+z",
        ours=("reject", "ambiguous_matches"),
        reason="The same, one level up.",
    ),
    "several equally good places for a later hunk": Difference(
        tree={"a": b"h\nx\nx\n"},
        body="*** Update File: a\n@@\n-h\n@@\n-x\n+z",
        ours=("reject", "ambiguous_matches"),
        reason="The same for hunks that follow others.",
    ),
    "an insertion beside a blank line that is nowhere": Difference(
        tree={"a": WORDS},
        body="*** Update File: a\n@@\n+four\n",
        ours={"a": WORDS + b"four\n"},
        reason="Codex inserts at the top; the contract puts an insertion without context at the end.",
    ),
    "a move onto itself": Difference(
        tree={"a": WORDS},
        body="*** Update File: a\n*** Move to: a\n@@\n-two\n+2",
        ours={"a": b"one\n2\nthree\n"},
        reason="Codex writes the file and then removes it as the origin: all of it is lost.",
    ),
    "a path that climbs": Difference(
        tree={"a": WORDS},
        body="*** Update File: b/../a\n@@\n-two\n+2",
        ours=("reject", "invalid_path"),
        reason="One parser of paths for all, and it takes no '..'.",
    ),
    "a move and a blank line": Difference(
        tree={"a": b"unfinished"},
        body="*** Update File: a\n*** Move to: b\n",
        ours={"b": b"unfinished"},
        reason="Codex takes the blank line for a hunk and ends the last line; here a move alone keeps every byte.",
    ),
    "an end before a move": Difference(
        tree={"a": WORDS},
        body="*** Update File: a\n*** End of File\n*** Move to: b\n-two\n+2",
        ours=("parse_error", "patch_parse_error"),
        reason="The move is the first line of an update or it is none.",
    ),
}


@pytest.mark.req("D9.v4a_ambiguous", "D9.v4a_insert_at_end", "A10.adds_only_hunk")
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_is_one_and_is_what_the_table_says(name: str) -> None:
    row = EXCEPTIONS[name]
    outcome = ours(row.tree, patch_of(row.body))
    told = (outcome.status, outcome.code) if isinstance(outcome, Refused) else outcome
    assert told == row.ours
    codex = codex_apply(row.tree, patch_of(row.body))
    assert codex is not None
    assert codex != row.ours
