"""One regular-expression language, whichever engine runs: what it accepts, refuses and means."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from mulligan.files.search.native import BOM, LiteralFinder, Re2Finder, finder_for, without_bom
from mulligan.files.search.pattern import (
    ANY,
    COST_MAX,
    SCRIPTS,
    charset,
    contains,
    cost_of,
    fold,
    for_re2,
    for_rust,
    minus,
    negate,
    parse,
    required_literal,
    single,
    union,
)
from mulligan.files.search.ripgrep import find_ripgrep
from mulligan.values.errors import Refused

RG = find_ripgrep() or ""

ACCEPTED = [
    "",
    "foo",
    "a|b",
    "a||b",
    "(a|)",
    "()",
    "(?:a)",
    "(?P<n>a)",
    "(?<n>b)",
    "a*",
    "a+?",
    "a{2}",
    "a{2,}",
    "a{0,1000}",
    "^a$",
    r"\bfoo\b",
    r"\Bo",
    r"\Aa",
    r"c\z",
    ".",
    "a.c",
    "[abc]",
    "[^abc]",
    "[]a]",
    "[^]a]",
    "[a-c-e]",
    "[-a]",
    "[a-]",
    r"[\w-]",
    r"[\]\\-]",
    "[[:alpha:]_]",
    "[[:^digit:]]",
    r"\d\w\s\D\W\S",
    r"\pL",
    r"\p{Lu}",
    r"\P{Nd}",
    r"\p{Greek}",
    r"\x61",
    r"\x{1F600}",
    r"\.\*\-\/\_\ ",
    r"\t",
    "(?i)straße",
    "(?i:a)b",
    "(?-i)a",
    "(?ims)a",
    "(?U)a+",
    "a]",
    "a}",
    "(?:(?:a{2}){3})",
    r"\b{2}a",
    "^*a",
    "é+",
    r"[\x{400}-\x{4ff}]",
    "(?i)[k-s]",
    "(?i)[^k]",
    r"[^\s\w]",
    "#!",
    "&&",
    "--",
]
REFUSED = {
    "look-ahead": "a(?=b)",
    "negative look-ahead": "a(?!b)",
    "look-behind": "(?<=a)b",
    "negative look-behind": "(?<!a)b",
    "back-reference": r"(a)\1",
    "named back-reference": "(?P<n>a)(?P=n)",
    "named reference": r"(?<n>a)\k<n>",
    "atomic group": "(?>a)",
    "conditional": "(a)?(?(1)b)",
    "comment": "(?#x)a",
    "recursion": "(?R)",
    "verbose": "(?x)a b",
    "Unicode flag": "(?u)a",
    "CRLF flag": "(?R:a)",
    "more than 1000": "x{1001}",
    "product over 1000": "(?:x{40}){40}",
    "stacked": "a**",
    "possessive": "a++",
    "stacked counts": "a{2}{3}",
    "half a count": "a{",
    "open low count": "a{,3}",
    "spaced count": "a{1, 2}",
    "reversed count": "a{3,2}",
    "nothing to repeat": "*a",
    "nothing in a branch": "a|*",
    "brace first": "{2}",
    "unclosed group": "(a",
    "unopened group": "a)",
    "unclosed set": "[a",
    "empty set": "[]",
    "reversed range": "[z-a]",
    "nested set": "[a[b]]",
    "intersection": "[a&&b]",
    "difference": "[a--b]",
    "symmetric difference": "[a~~b]",
    "class in a range": r"[\w-z]",
    "range to a class": r"[a-\w]",
    "boundary in a set": r"[\b]",
    "range from bracket": "[]-a]",
    "any byte": r"\C",
    "quoted": r"\Qa\E",
    "end of text": r"a\Z",
    "word start": r"\<a",
    "special boundary": r"\b{start}",
    "octal": r"\07",
    "short Unicode": r"\u0041",
    "newline": "a\nb",
    "escaped newline": r"a\nb",
    "set of newline": r"[\n]",
    "not a character": r"\x{110000}",
    "bad hex": r"\xzz",
    "lone surrogate": "\udc80",
    "half an escape": "\\",
    "unknown property": r"\p{Klingon}",
    "property on which engines differ": r"\p{C}",
    "negated in braces": r"\p{^L}",
    "unknown class": "[[:foo:]]",
    "two names": "(?<n>a)(?<n>b)",
    "bad name": "(?<1>a)",
    "no flags": "(?)",
    "no flags off": "(?-:a)",
    "too deep": "(" * 120 + ")" * 120,
    "too large": r"(?:\p{L}{100}){10}",
    "too long": "a" * 10_001,
    "absent operator": "(?~a)",
    "inline recursion": "(?P>n)",
}
TEXT = (
    "foo\nfoobar\n foo \nFOO\nstrasse STRASSE straße STRAẞE\nαβγ ΑΒΓ ς σ\nК к Кириллица\nKelvin \u212a long ſ\n"
    "café cafe\u0301\n\n\t\na.c abc a-c a_c\n[]{}()\\/ .*+?^$|\n😀 emoji 😀\n日本語 text\n1 22 333 ٣ ½\n"
    "x\u00a0y\u2028z\n_a_ -a- a1\n&& -- ~~ ]]\nnaïve\n"
).encode()
ODD = (
    b"\xef\xbb\xbffoo at bom\r\nfoo\r\n\r\nbar \r\nmid\rdle\r\n\xff\xfe foo\nfoo\xe9\n\xe9foo\n\xed\xa0\x80 cesu\n"
    b"nul\x00 foo\n\xc3\n\xf0\x9f\x98 cut\n\xe2\xc3\xa9\nno end foo"
)
BLOCKS = [TEXT, ODD, b"", b"\n", b"\n\n", b"foo", b"foo\n", b"\r\n", b"a\r", b"\xef\xbb\xbf"]


def numbers_by_ripgrep(spelled: str, folder: Path, block: bytes) -> list[int] | None:
    """The lines that match, or None when the pattern is refused."""
    file = folder / "block"
    file.write_bytes(block)
    command = [
        RG,
        "--no-config",
        "--text",
        "--encoding=none",
        "--line-number",
        "--no-mmap",
        f"--regexp={spelled}",
        "--",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, check=False)
    return None if done.returncode == 2 else [int(row.split(b":", 1)[0]) for row in done.stdout.split(b"\n")[:-1]]


def numbers_from(starts: list[int], block: bytes) -> list[int]:
    return [block.count(b"\n", 0, start) + 1 for start in starts]


def accepted_by_re2(pattern: str) -> bool:
    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options)
    except re2.error:
        return False
    return True


@pytest.mark.parametrize("pattern", ACCEPTED)
def test_re2_and_ripgrep_accept_every_pattern_that_we_accept(pattern: str, tmp_path: Path) -> None:
    parse(pattern)
    assert accepted_by_re2(pattern)
    assert numbers_by_ripgrep(pattern, tmp_path, b"x\n") is not None


@pytest.mark.req("D9.grep_dialect")
@pytest.mark.parametrize("pattern", REFUSED.values(), ids=REFUSED.keys())
def test_a_pattern_outside_the_language_is_invalid_regex(pattern: str) -> None:
    with pytest.raises(Refused) as refused:
        parse(pattern)
    assert (refused.value.status, refused.value.code) == ("invalid_regex", "invalid_regex")


@pytest.mark.req("D9.grep_engines_agree")
@pytest.mark.parametrize("pattern", ACCEPTED)
@pytest.mark.parametrize("case_insensitive", [False, True], ids=["case", "nocase"])
def test_every_engine_finds_the_same_lines_in_odd_text(pattern: str, case_insensitive: bool, tmp_path: Path) -> None:
    tree = parse(pattern, case_insensitive=case_insensitive)
    literal = required_literal(tree)
    for block in BLOCKS:
        text = without_bom(block)
        found = numbers_from([*Re2Finder(for_re2(tree), literal).starts(text)], text)
        assert numbers_from([*finder_for(tree).starts(text)], text) == found
        by_ripgrep = numbers_by_ripgrep(for_rust(tree), tmp_path, block)
        assert by_ripgrep is not None
        to_be_asked_again = {1} if block.startswith(BOM) else set()
        assert set(by_ripgrep) >= set(found)
        assert set(by_ripgrep) - to_be_asked_again == set(found) - to_be_asked_again


PIECES = [
    "a",
    "b",
    "K",
    "é",
    "σ",
    ".",
    "[a-k]",
    "[^b]",
    "[^é]",
    r"\w",
    r"\W",
    r"\d",
    r"\s",
    r"\S",
    r"\b",
    r"\B",
    "^",
    "$",
    r"\r",
    r"\x{2028}",
    r"\pL",
    "ſ",
    r"\t",
    "[[:punct:]]",
]
ATOMS = st.sampled_from(PIECES)


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "{2,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda body: f"(?i:{body})"),
    )


PATTERNS = st.recursive(ATOMS, _grow, max_leaves=8)
LINES = st.lists(
    st.sampled_from(
        [
            b"a",
            b"b",
            b"k",
            b"K",
            "\u212a".encode(),
            "é".encode(),
            "É".encode(),
            b"\xe9",
            b"\xff",
            "ς".encode(),
            b" ",
            b"\t",
            b"\r",
            b"\n",
            b"\r\n",
            b"_",
            b"0",
            "ſ".encode(),
            b"\xef\xbb\xbf",
            b"\0",
            b"-",
        ]
    ),
    max_size=24,
).map(b"".join)


@given(PATTERNS, LINES)
def test_a_line_matches_by_itself_exactly_when_it_matches_among_others(pattern: str, block: bytes) -> None:
    tree = parse(pattern)
    finder = Re2Finder(for_re2(tree), required_literal(tree))
    alone, at = [], 0
    for line in block.splitlines(keepends=True) if b"\r" not in block else [row + b"\n" for row in block.split(b"\n")]:
        if [*finder.starts(line)] and at < len(block):
            alone.append(at)
        at += len(line)
    assert [*finder.starts(block)] == alone


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), min_size=1, max_size=6), LINES)
def test_plain_text_is_found_wherever_it_is(text: str, block: bytes) -> None:
    literal = text.encode()
    expected = [at for at, line in _lines(block) if literal in line]
    assert [*LiteralFinder(literal).starts(block)] == expected


def _lines(block: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    for line in block.split(b"\n"):
        found.append((at, line))
        at += len(line) + 1
    return found


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}{22}",
        r"(?:[a-z]{30}){30}",
        r"(?i)" + "kelvin|" * 500 + "x",
        r".{1000}",
        "(?:" * 99 + "a" + ")" * 99,
        r"\pL" * 8,
        r"(?:a?){500}a{500}",
    ],
    ids=["wide set", "long product", "many branches", "long dot", "deep", "sets", "optional"],
)
def test_the_largest_patterns_we_accept_compile_everywhere(pattern: str, tmp_path: Path) -> None:
    tree = parse(pattern)
    assert cost_of(tree) <= COST_MAX
    assert [*Re2Finder(for_re2(tree), b"").starts(b"")] == []
    assert numbers_by_ripgrep(for_rust(tree), tmp_path, b"x\n") is not None


class TestMeaning:
    @pytest.mark.parametrize(
        ("pattern", "line", "matches"),
        [
            (r"foo$", b"foo\r\n", True),
            (r"^$", b"\r\n", True),
            (r"\s+$", b"foo\r\n", False),
            (r"foo.$", b"foo\r\n", False),
            (r"\r$", b"foo\r\n", True),
            (r"foo$", b"foo\rx\n", False),
            (r"x.y", b"x\ry\n", False),
            (r"x[\r\s]y", b"x\ry\n", True),
            (r"^foo", b"\xef\xbb\xbffoo\n", False),
            (r"\w", "é".encode(), False),
            (r"\bfoo\b", "éfoo".encode(), True),
            (r"\d", "٣".encode(), False),
            (r"(?i)k", "\u212a".encode(), True),
            (r"(?i)ß", "ẞ".encode(), True),
            (r"(?i)ss", "ß".encode(), False),
            (r"(?i)i", "İ".encode(), False),
            (r"(?i)I", "ı".encode(), False),
            (r"^.$", b"\xff", False),
            (r"^.$", "😀".encode(), True),
            (r"[^a]", b"\xff", False),
            (r"\xe9", "é".encode(), True),
            (r"\xe9", b"\xe9", False),
            (r"a\z", b"a\n", True),
            (r"(?s)a.", b"a\n", False),
            (r"[\r\n]", b"a\r\n", True),
            (r"[\x00-\x1f]", b"a\r\n", False),
            (r"\x00", b"a\0b", True),
            (r"(?i)[^k]", "\u212a".encode(), False),
            (r"\P{Lu}", b"A", False),
        ],
    )
    def test_a_rule(self, pattern: str, line: bytes, matches: bool) -> None:
        tree = parse(pattern)
        assert [*Re2Finder(for_re2(tree), b"").starts(line)] == ([0] if matches else [])

    def test_flags_end_with_their_group(self) -> None:
        assert parse("(?:(?i)a)a") == parse("[aA]a")
        assert parse("a(?i)a|a") == parse("a[aA]|[aA]")

    def test_greed_and_group_names_leave_no_trace(self) -> None:
        assert parse("(?P<x>a+?)(b)") == parse("(?:a+)(?:b)")


CODES = st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code <= 0xDFFF)
SETS = st.lists(st.tuples(CODES, CODES).map(lambda pair: (min(pair), max(pair))), max_size=4).map(charset)


class TestCharSets:
    @given(SETS, SETS, CODES)
    def test_they_are_sets(self, a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...], code: int) -> None:
        assert contains(negate(a), code) is not contains(a, code)
        assert contains(union(a, b), code) is (contains(a, code) or contains(b, code))
        assert contains(minus(a, b), code) is (contains(a, code) and not contains(b, code))
        assert negate(negate(a)) == a

    @given(SETS)
    def test_folding_twice_is_folding_once(self, members: tuple[tuple[int, int], ...]) -> None:
        assert fold(fold(members)) == fold(members)

    def test_no_set_holds_surrogates(self) -> None:
        assert not contains(ANY, 0xD800)
        assert not contains(ANY, 0xDFFF)

    def test_folding_is_re2s_on_every_letter_that_re2_knows_as_we_do(self) -> None:
        ours = {code for code in range(0x250) if contains(fold(single("s", "k", "å", "ÿ", "µ")), code)}
        regex = re2.compile("(?i)[skåÿµ]")
        assert ours == {code for code in range(0x250) if regex.search(chr(code))}

    @pytest.mark.parametrize("name", sorted(SCRIPTS))
    def test_a_script_of_ours_is_within_the_engines_own(self, name: str) -> None:
        regex = re2.compile(rf"\A\p{{{name}}}*\z")
        assert regex.search("".join(chr(code) for low, high in SCRIPTS[name] for code in range(low, high + 1)))
