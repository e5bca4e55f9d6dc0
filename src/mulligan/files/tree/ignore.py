"""Tells which paths are ignored: git's rules, and `.ignore` files on top of them, as ripgrep reads these.

 * `.gitignore` of every directory, deepest first; within a file the last rule that matches wins.
 * `info/exclude` of the repository of every directory that has a `.git`, after all `.gitignore` files. `.git` may be a
   file that names the repository; linked worktrees share one `info/exclude`.
 * `.ignore` of every directory, deepest first, before all of git's rules: its verdict, either way, is final.
 * A rule cannot include again what is below an ignored directory.
 * No repository is needed. A nested one is a directory like any other, with its own `info/exclude`. But for a root
   inside a working tree the directories above it count too, up to the top of that tree.
 * Nothing else counts: no global ignore file, no configuration.

Rules compare bytes, and case matters. An ignore file that is a symlink, unreadable or too large counts as absent.

Git's patterns become regular expressions over bytes. Git matches bytes, not characters: `?` is one byte. No text can
make such an expression backtrack: what follows a `*` is searched from the left inside an atomic group, which is exact
for wildcards and takes at most quadratic time. A pattern that git would never match (an unclosed bracket, a stray
backslash) becomes None.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias

from mulligan.files.git import find_repository, read_small
from mulligan.files.kernel import real_path_of
from mulligan.files.tree.directories import OPEN_DIRECTORY, Handles, read_regular
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import ROOT, RepoPath, name_of

SPECIAL = frozenset(b"*?[\\")

_STAR, _ANY_DIRS, _ANYTHING = "*", "**/", "**"
_SLASH = ord("/")
_BYTES = range(256)

_CLASSES: dict[bytes, frozenset[int]] = {
    b"alnum": frozenset(b for b in range(128) if chr(b).isalnum()),
    b"alpha": frozenset(b for b in range(128) if chr(b).isalpha()),
    b"blank": frozenset(b" \t"),
    b"cntrl": frozenset([*range(32), 127]),
    b"digit": frozenset(b"0123456789"),
    b"graph": frozenset(range(33, 127)),
    b"lower": frozenset(range(ord("a"), ord("z") + 1)),
    b"print": frozenset(range(32, 127)),
    b"punct": frozenset(b for b in range(33, 127) if not chr(b).isalnum()),
    b"space": frozenset(b" \t\n\r\v\f"),
    b"upper": frozenset(range(ord("A"), ord("Z") + 1)),
    b"xdigit": frozenset(b"0123456789abcdefABCDEF"),
}


def literal_prefix(pattern: bytes) -> bytes:
    """The part of a pattern before its first special byte."""
    for at, byte in enumerate(pattern):
        if byte in SPECIAL:
            return pattern[:at]
    return pattern


def translate(pattern: bytes, after: bytes = b"") -> bytes | None:
    """Source of a regular expression that matches whole paths, `/` being special; None when nothing can match.

    `after` is what the expression will be put after. Wants the flag DOTALL. Holds no capturing groups.
    """
    try:
        fixed, wild = _Reader(pattern).split()
    except _NeverMatchesError:
        return None
    return _assemble(fixed, wild, after)


class _NeverMatchesError(Exception):
    """The pattern is malformed, so it matches nothing, as in git."""


class _Reader:
    def __init__(self, pattern: bytes) -> None:
        self.pattern = pattern
        self.at = 0

    def split(self) -> tuple[list[bytes], list[str]]:
        """The fixed parts, as regex source, and the wildcards between them."""
        fixed, wild = [b""], []
        while self.at < len(self.pattern):
            if self.pattern[self.at] == ord("*"):
                wild.append(self._wildcard())
                fixed.append(b"")
            else:
                fixed[-1] += self._one()
        return fixed, wild

    def _wildcard(self) -> str:
        start = self.at
        while self.pattern[self.at : self.at + 1] == b"*":
            self.at += 1
        rest = self.pattern[self.at :]
        opens = start == 0 or self.pattern[start - 1] == _SLASH
        if self.at - start == 1 or not opens or not (not rest or rest.startswith((b"/", b"\\/"))):
            return _STAR
        if rest.startswith(b"/"):
            self.at += 1
            return _ANY_DIRS
        return _ANYTHING

    def _one(self) -> bytes:
        """The regex of one byte of text, never a wildcard."""
        byte = self.pattern[self.at]
        self.at += 1
        if byte == ord("?"):
            return b"[^/]"
        if byte == ord("["):
            return self._bracket()
        if byte == ord("\\"):
            byte = self._next()
        return re.escape(bytes([byte]))

    def _next(self) -> int:
        if self.at >= len(self.pattern):
            raise _NeverMatchesError
        self.at += 1
        return self.pattern[self.at - 1]

    def _bracket(self) -> bytes:
        negated = self.pattern[self.at : self.at + 1] in (b"!", b"^")
        self.at += negated
        members: set[int] = set()
        byte, previous = self._next(), 0
        while True:
            previous = self._member(byte, previous, members)
            byte = self._next()
            if byte == ord("]"):
                break
        chosen = set(_BYTES) - members if negated else members
        return _byte_class(chosen - {_SLASH})

    def _member(self, byte: int, previous: int, members: set[int]) -> int:
        """Add what one item of a bracket names; returns the byte a following range would start from, or 0."""
        if byte == ord("\\"):
            byte = self._next()
        elif byte == ord("-") and previous and self.pattern[self.at : self.at + 1] not in (b"", b"]"):
            high = self._next()
            members.update(range(previous, (self._next() if high == ord("\\") else high) + 1))
            return 0
        elif byte == ord("[") and self.pattern[self.at : self.at + 1] == b":":
            named = self._named_class()
            if named is not None:
                members |= named
                return 0
        members.add(byte)
        return byte

    def _named_class(self) -> frozenset[int] | None:
        """`[:alpha:]`, the reader standing on its first colon; None when it is no class but plain members."""
        end = self.pattern.find(b"]", self.at + 1)
        if end < 0:
            raise _NeverMatchesError
        body = self.pattern[self.at + 1 : end]
        if not body.endswith(b":"):
            return None
        if body[:-1] not in _CLASSES:
            raise _NeverMatchesError
        self.at = end + 1
        return _CLASSES[body[:-1]]


def _byte_class(members: set[int]) -> bytes:
    if not members:
        return rb"[^\x00-\xff]"
    return b"[" + b"".join(b"\\x%02x" % byte for byte in sorted(members)) + b"]"


def _assemble(fixed: list[bytes], wild: list[str], after: bytes) -> bytes:
    """A star swallows, atomically, the fixed part after it; `**` everything up to the next `**`."""
    source, closing = fixed[0], b""
    for number, (kind, part) in enumerate(zip(wild, fixed[1:], strict=True), start=2):
        if kind != _STAR:
            source += closing + _OPENING[kind] + part
            closing = b")"
        elif number == len(fixed) and _opens_a_name(after + source) and b"/" not in part:
            source += b"[^/]*" + (b"(?<=" + part + b")" if part else b"")
        else:
            source += b"(?>[^/]*?" + part + (rb"\Z)" if number == len(fixed) else b")")
    return source + rb"\Z" + closing


_OPENING = {_ANY_DIRS: b"(?>(?:[^/]*/)*?", _ANYTHING: b"(?>.*?"}


def _opens_a_name(source: bytes) -> bool:
    """Whether what follows is matched from the start of a name, so that looking back from its end is safe and quick."""
    before = source.removesuffix(_OPENING[_ANY_DIRS]).rstrip(b")")
    return not before or before.endswith(b"/")


IGNORE_FILE_MAX_BYTES = MIB_BYTES
# Per file; compiling more would let a hostile repository block Mulligan. Rules without wildcards are not counted.
WILDCARD_RULES_MAX = 10_000

GIT_IGNORE = ".gitignore"
OWN_IGNORE = ".ignore"

_BOM = b"\xef\xbb\xbf"


@fast_dataclass(slots=True, frozen=True)
class IgnoreRule:
    """One line of an ignore file. `anchored`: matched against the whole path below the file's directory."""

    pattern: bytes
    negated: bool
    dirs_only: bool
    anchored: bool


@fast_dataclass(slots=True, frozen=True)
class IgnoreSources:
    """The bytes of a directory's ignore files, None where there is none."""

    git: bytes | None = None
    own: bytes | None = None
    exclude: bytes | None = None


NO_SOURCES = IgnoreSources()


def parse_rules(text: bytes) -> list[IgnoreRule]:
    """The rules of an ignore file in order. As git: NUL ends a line, one `\\r` before `\\n` is dropped."""
    lines = text.removeprefix(_BOM).split(b"\n")
    return [rule for line in lines if not line.startswith(b"#") and (rule := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> IgnoreRule | None:
    line = _trim_trailing_spaces(line.removesuffix(b"\r").partition(b"\0")[0])
    negated = line.startswith(b"!")
    pattern = line[negated:]
    dirs_only = pattern.endswith(b"/")
    if dirs_only:
        pattern = pattern[:-1]
    if not pattern:
        return None
    anchored = b"/" in pattern
    return IgnoreRule(pattern.removeprefix(b"/") if anchored else pattern, negated, dirs_only, anchored)


def _trim_trailing_spaces(line: bytes) -> bytes:
    """Without the spaces at the end, unless a backslash guards the first of them."""
    bare = line.rstrip(b" ")
    if bare == line:
        return line
    backslashes = len(bare) - len(bare.rstrip(b"\\"))
    return bare + b" " if backslashes % 2 else bare


class _Index:
    """The rules of one file for one kind of entry, in a form that finds the last match quickly."""

    def __init__(self, rules: Iterable[tuple[int, IgnoreRule]]) -> None:
        self._names: dict[str, int] = {}
        self._paths: dict[bytes, int] = {}
        self._suffixes: dict[str, int] = {}
        name_sources: dict[int, bytes] = {}
        path_sources: dict[int, bytes] = {}
        path_starts: set[bytes] = set()
        for number, rule in rules:
            prefix = literal_prefix(rule.pattern)
            if rule.anchored:
                path_starts.add(prefix)
            self._file(number, rule, prefix, path_sources if rule.anchored else name_sources)
        self._names_as_listed = {name + slash for name in self._names for slash in ("", "/")}
        self._endings = tuple(self._suffixes)
        self._name_match, self._name_numbers = _union(name_sources)
        self._path_match, self._path_numbers = _union(path_sources)
        self._path_starts = tuple(path_starts)
        self._on_the_way = {start[:end] for start in path_starts for end in _ends_of_names(start)}

    def _file(self, number: int, rule: IgnoreRule, prefix: bytes, sources: dict[int, bytes]) -> None:
        if prefix == rule.pattern and rule.anchored:
            self._paths[prefix] = number
        elif prefix == rule.pattern:
            self._names[prefix.decode("utf-8", "surrogateescape")] = number
        elif not rule.anchored and (endings := _endings(rule.pattern)):
            self._suffixes.update(dict.fromkeys(endings, number))
        elif len(sources) < WILDCARD_RULES_MAX and (source := _source(rule, prefix)) is not None:
            sources[number] = source

    def mentions(self, entries: Sequence[str], text: str, directory: bytes) -> set[str]:
        """The entries of a directory that some rule matches; `text` is all of them in a row.

        Most often there is none, and one search in `text` shows that without checking each entry.
        """
        found = self._names_as_listed.intersection(entries)
        for ending in self._endings:
            if ending in text:
                found.update(entry for entry in entries if entry.rstrip("/").endswith(ending))
        if self._name_numbers:
            found.update(entry for entry in entries if self._name_match(_raw(entry.rstrip("/"))))
        if self._path_starts and (directory in self._on_the_way or directory.startswith(self._path_starts)):
            found.update(entry for entry in entries if self._last_by_path(directory + _raw(entry.rstrip("/"))) >= 0)
        return found

    def last(self, name: str, path: bytes) -> int:
        """The number of the last rule that matches, -1 when none does."""
        best = self._names.get(name, -1)
        if name.endswith(self._endings):
            best = max(best, *(number for end, number in self._suffixes.items() if name.endswith(end)))
        if self._name_numbers and (hit := self._name_match(_raw(name))) is not None:
            best = max(best, self._name_numbers[hit.lastindex or 0])
        return max(best, self._last_by_path(path)) if self._path_starts else best

    def _last_by_path(self, path: bytes) -> int:
        best = self._paths.get(path, -1)
        if self._path_numbers and (hit := self._path_match(path)) is not None:
            best = max(best, self._path_numbers[hit.lastindex or 0])
        return best


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _ends_of_names(path: bytes) -> list[int]:
    """The end offsets of the directories in a path, slash included; the starting directory is one of them."""
    return [0, *(at for at, byte in enumerate(path, start=1) if byte == ord("/"))]


_ENDING = re.compile(rb"\*([^*?\[\\]+)|\*([^*?\[\\]*)\[([a-zA-Z0-9]+)\]([^*?\[\\]*)", re.DOTALL)


def _endings(pattern: bytes) -> list[str]:
    """The endings of the most common wildcards: `*.o` and `*.py[co]`.

    Only in ASCII: the bytes at the end of a name need not be whole characters.
    """
    found = _ENDING.fullmatch(pattern)
    if found is None or not pattern.isascii():
        return []
    if found[1]:
        return [found[1].decode()]
    return [(found[2] + bytes([letter]) + found[4]).decode() for letter in found[3]]


def _source(rule: IgnoreRule, prefix: bytes) -> bytes | None:
    """Git compares the part before the first wildcard by itself, so that a `**` right after it opens a pattern."""
    if not rule.anchored:
        return translate(rule.pattern)
    rest = translate(rule.pattern[len(prefix) :], after=prefix)
    return None if rest is None else re.escape(prefix) + rest


_Matcher: TypeAlias = Callable[[bytes], "re.Match[bytes] | None"]

_NOTHING = re.compile(rb"[^\x00-\xff]")


def _union(sources: dict[int, bytes]) -> tuple[_Matcher, list[int]]:
    """One expression for many, highest number first. The group that matches tells the number."""
    if not sources:
        return _NOTHING.match, []
    numbers = sorted(sources, reverse=True)
    joined = b"|".join(b"(" + sources[number] + b")" for number in numbers)
    return re.compile(joined, re.DOTALL).match, [-1, *numbers]


class RuleFile:
    """The rules of one ignore file, `base_length` being the length of its directory's path with its slash."""

    def __init__(self, text: bytes, base_length: int) -> None:
        self._rules = parse_rules(text)
        self._base_length = base_length

    def __bool__(self) -> bool:
        return bool(self._rules)

    def verdict(self, name: str, path: bytes, is_dir: bool) -> bool | None:
        """True: ignored; False: a `!` rule includes it again; None: no rule. `path` is from the root."""
        number = (self._for_dirs if is_dir else self._for_files).last(name, path[self._base_length :])
        return None if number < 0 else not self._rules[number].negated

    def mentions(self, entries: Sequence[str], text: str, prefix: bytes) -> set[str]:
        """Those entries of the directory with this prefix that some rule may be about."""
        return self._for_dirs.mentions(entries, text, prefix[self._base_length :])

    @cached_property
    def _for_dirs(self) -> _Index:
        return _Index(enumerate(self._rules))

    @cached_property
    def _for_files(self) -> _Index:
        return _Index((number, rule) for number, rule in enumerate(self._rules) if not rule.dirs_only)


@fast_dataclass(slots=True, frozen=True)
class IgnoreRules:
    """The rules that apply inside one directory. Immutable; `child` gives those of a directory inside it."""

    prefix: bytes = b""
    own: tuple[RuleFile, ...] = ()
    git: tuple[RuleFile, ...] = ()
    exclude: tuple[RuleFile, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.own or self.git or self.exclude)

    def ignores(self, name: str, is_dir: bool) -> bool:
        """Whether the entry `name` of this directory is ignored by a rule about itself."""
        path = self.prefix + _raw(name)
        for rules in (*self.own, *self.git, *self.exclude):
            verdict = rules.verdict(name, path, is_dir)
            if verdict is not None:
                return verdict
        return False

    def divide(self, entries: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The entries of this directory, those that are directories with a slash, into kept and ignored ones."""
        layers = self.own + self.git + self.exclude
        if not layers or not entries:
            return entries, ()
        text = "".join(entries)
        suspects = [entry for rules in layers for entry in rules.mentions(entries, text, self.prefix)]
        out = {entry for entry in suspects if self.ignores(entry.rstrip("/"), is_dir=entry[-1] == "/")}
        if not out:
            return entries, ()
        return tuple(one for one in entries if one not in out), tuple(one for one in entries if one in out)

    def child(self, name: str) -> IgnoreRules:
        """The rules inside the directory `name` of this one, before its own ignore files."""
        return IgnoreRules(self.prefix + _raw(name) + b"/", self.own, self.git, self.exclude)

    def inside(self, path: RepoPath) -> IgnoreRules:
        """The rules inside a directory, given those of the one that contains it; the root contains itself."""
        return self if path == ROOT else self.child(name_of(path))

    def with_sources(self, sources: IgnoreSources) -> IgnoreRules:
        """The rules of the same directory after its ignore files were read."""
        if sources is NO_SOURCES:
            return self
        length = len(self.prefix)
        return IgnoreRules(
            self.prefix,
            _layer(sources.own, length) + self.own,
            _layer(sources.git, length) + self.git,
            _layer(sources.exclude, length) + self.exclude,
        )


def _layer(text: bytes | None, base_length: int) -> tuple[RuleFile, ...]:
    rules = _rule_file(text, base_length) if text else None
    return (rules,) if rules else ()


_rule_file = lru_cache(maxsize=256)(RuleFile)
"""Parsing rules is slow, and many directories share their ignore files."""


def read_sources(dir_fd: int, names: Sequence[str]) -> IgnoreSources:
    """Read the ignore files of an open directory; `names` are those of its entries that matter here."""
    return IgnoreSources(
        git=read_regular(dir_fd, GIT_IGNORE, IGNORE_FILE_MAX_BYTES) if GIT_IGNORE in names else None,
        own=read_regular(dir_fd, OWN_IGNORE, IGNORE_FILE_MAX_BYTES) if OWN_IGNORE in names else None,
        exclude=_read_exclude(dir_fd) if ".git" in names else None,
    )


def _read_exclude(dir_fd: int) -> bytes | None:
    try:
        if stat.S_ISREG(os.stat(".git", dir_fd=dir_fd, follow_symlinks=False).st_mode):
            return _exclude_elsewhere(dir_fd)
        with Handles(dir_fd) as handles:
            return read_regular(handles.directory(".git/info"), "exclude", IGNORE_FILE_MAX_BYTES)
    except OSError:
        return None


def _exclude_elsewhere(dir_fd: int) -> bytes | None:
    """The `info/exclude` of a repository that may be anywhere, so it is read by path.

    It only gives rules and is never shown.
    """
    repository = find_repository(real_path_of(dir_fd))
    if repository is None:
        return None
    return read_small(os.path.join(repository.common_dir, b"info/exclude"), IGNORE_FILE_MAX_BYTES)


# The ignore files of the directories above a root, the outermost first, each with the name of the next directory.
Above: TypeAlias = tuple[tuple[str, IgnoreSources], ...]


def read_above(root_fd: int) -> Above:
    """The ignore files from the top of the working tree around the root down to its parent. Empty if there is none."""
    try:
        path = real_path_of(root_fd)
    except OSError:
        return ()
    names: list[bytes] = []
    while not os.path.lexists(os.path.join(path, b".git")):
        parent, _, name = path.rpartition(b"/")
        if not name:
            return ()
        names.append(name)
        path = parent or b"/"
    above: list[tuple[str, IgnoreSources]] = []
    for name in reversed(names):
        above.append((os.fsdecode(name), _sources_of(path)))
        path = os.path.join(path, name)
    return tuple(above)


def _sources_of(path: bytes) -> IgnoreSources:
    try:
        dir_fd = os.open(path, OPEN_DIRECTORY)
    except OSError:
        return NO_SOURCES
    try:
        return read_sources(dir_fd, (GIT_IGNORE, OWN_IGNORE, ".git"))
    finally:
        os.close(dir_fd)


def rules_inside(above: Above) -> IgnoreRules:
    """The rules that apply in a root, before its own ignore files."""
    rules = IgnoreRules()
    for name, sources in above:
        rules = rules.with_sources(sources).child(name)
    return rules
