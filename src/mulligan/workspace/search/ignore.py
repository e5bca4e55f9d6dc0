"""Which paths are ignored: git's rules, and `.ignore` files on top of them as ripgrep reads them.

 * `.gitignore` of every directory, deepest first; within a file the last rule that matches wins.
 * `.git/info/exclude` of every directory that has a `.git` directory, after all `.gitignore` files.
 * `.ignore` of every directory, deepest first, before all of git's: what it says, either way, is final.
 * Nothing below an ignored directory can be taken back.
 * Nothing outside the root counts: no global ignore file, no configuration, no directory above. No repository is
   needed. A nested repository is a directory like any other, its own `info/exclude` included.

Matching is by bytes and by case. An ignore file that is a symlink, unreadable or over a size limit counts as absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import ROOT
from mulligan.workspace.search.handles import Handles, read_regular
from mulligan.workspace.search.wildmatch import literal_prefix, translate

IGNORE_FILE_MAX_BYTES = MIB_BYTES
WILDCARD_RULES_MAX = 10_000
"""Per file; compiling more would let a hostile repository stop us. Rules without wildcards are not counted."""

GIT_IGNORE = ".gitignore"
OWN_IGNORE = ".ignore"

_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True, frozen=True)
class Rule:
    """One line of an ignore file. `anchored`: matched against the whole path below the file's directory."""

    pattern: bytes
    negated: bool
    dirs_only: bool
    anchored: bool


@dataclass(slots=True, frozen=True)
class IgnoreSources:
    """What a directory has to say: the bytes of its ignore files, None where there is none."""

    git: bytes | None = None
    own: bytes | None = None
    exclude: bytes | None = None


NO_SOURCES = IgnoreSources()


def parse_rules(text: bytes) -> list[Rule]:
    """The rules of an ignore file in order. As git: NUL ends a line, one `\\r` before `\\n` is dropped."""
    lines = text.removeprefix(_BOM).split(b"\n")
    return [rule for line in lines if not line.startswith(b"#") and (rule := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> Rule | None:
    line = _trim_trailing_spaces(line.removesuffix(b"\r").partition(b"\0")[0])
    negated = line.startswith(b"!")
    pattern = line[negated:]
    dirs_only = pattern.endswith(b"/")
    if dirs_only:
        pattern = pattern[:-1]
    if not pattern:
        return None
    anchored = b"/" in pattern
    return Rule(pattern.removeprefix(b"/") if anchored else pattern, negated, dirs_only, anchored)


def _trim_trailing_spaces(line: bytes) -> bytes:
    """Without the spaces at the end, unless a backslash guards the first of them."""
    bare = line.rstrip(b" ")
    if bare == line:
        return line
    backslashes = len(bare) - len(bare.rstrip(b"\\"))
    return bare + b" " if backslashes % 2 else bare


class _Index:
    """The rules of one file that may speak about one kind of entry, arranged for quick lookup of the last match."""

    def __init__(self, rules: Iterable[tuple[int, Rule]]) -> None:
        self._names: dict[bytes, int] = {}
        self._paths: dict[bytes, int] = {}
        self._suffixes: dict[bytes, int] = {}
        self._path_starts: set[bytes] = set()
        name_sources: dict[int, bytes] = {}
        path_sources: dict[int, bytes] = {}
        for number, rule in rules:
            self._file(number, rule, path_sources if rule.anchored else name_sources)
        self._endings = tuple(self._suffixes)
        self._name_match, self._name_numbers = _union(name_sources)
        self._path_match, self._path_numbers = _union(path_sources)
        self._needs_path = bool(self._paths or self._path_numbers)

    def _file(self, number: int, rule: Rule, sources: dict[int, bytes]) -> None:
        prefix = literal_prefix(rule.pattern)
        if rule.anchored:
            self._path_starts.add(prefix)
        if prefix == rule.pattern:
            (self._paths if rule.anchored else self._names)[prefix] = number
        elif not rule.anchored and (endings := _endings(rule.pattern)):
            self._suffixes.update(dict.fromkeys(endings, number))
        elif len(sources) < WILDCARD_RULES_MAX and (source := _source(rule, prefix)) is not None:
            sources[number] = source

    def mentions(self, names: Sequence[bytes], directory: bytes) -> list[int]:
        """Which of the names of a directory some rule matches, by their places. One pass, for whole listings."""
        known, endings, match = self._names, self._endings, self._name_match
        found: list[int] = []
        if self._name_numbers:
            found += [at for at, name in enumerate(names) if name in known or name.endswith(endings) or match(name)]
        elif known or endings:
            found += [at for at, name in enumerate(names) if name in known or name.endswith(endings)]
        if self._path_starts and self._speaks_of(directory):
            paths, path_match = self._paths, self._path_match
            rels = (directory + name for name in names)
            found += [at for at, rel in enumerate(rels) if rel in paths or path_match(rel)]
        return found

    def _speaks_of(self, directory: bytes) -> bool:
        """Whether a rule about paths may match inside the directory, by the part before its first wildcard."""
        return any(directory.startswith(start) or start.startswith(directory) for start in self._path_starts)

    def last(self, name: bytes, path: bytes) -> int:
        """The number of the last rule that matches, -1 when none does."""
        best = self._names.get(name, -1)
        if self._endings and name.endswith(self._endings):
            best = max(best, *(number for end, number in self._suffixes.items() if name.endswith(end)))
        if self._name_numbers and (hit := self._name_match(name)) is not None:
            best = max(best, self._name_numbers[hit.lastindex or 0])
        if self._needs_path:
            best = max(best, self._paths.get(path, -1))
            if self._path_numbers and (hit := self._path_match(path)) is not None:
                best = max(best, self._path_numbers[hit.lastindex or 0])
        return best


_ENDING = re.compile(rb"\*([^*?\[\\]+)|\*([^*?\[\\]*)\[([a-zA-Z0-9]+)\]([^*?\[\\]*)", re.DOTALL)


def _endings(pattern: bytes) -> list[bytes]:
    """What a name must end in, for the commonest wildcards of all: `*.o` and `*.py[co]`."""
    found = _ENDING.fullmatch(pattern)
    if found is None:
        return []
    if found[1]:
        return [found[1]]
    return [found[2] + bytes([letter]) + found[4] for letter in found[3]]


def _source(rule: Rule, prefix: bytes) -> bytes | None:
    """Git compares the part before the first wildcard by itself, so that a `**` right after it opens a pattern."""
    if not rule.anchored:
        return translate(rule.pattern)
    rest = translate(rule.pattern[len(prefix) :], after=prefix)
    return None if rest is None else re.escape(prefix) + rest


_Matcher: TypeAlias = Callable[[bytes], "re.Match[bytes] | None"]

_NOTHING = re.compile(rb"[^\x00-\xff]")


def _union(sources: dict[int, bytes]) -> tuple[_Matcher, list[int]]:
    """One expression for many, highest number first; the group that took part says which."""
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

    def verdict(self, name: bytes, path: bytes, is_dir: bool) -> bool | None:
        """True: ignored; False: taken back; None: not mentioned. `path` is from the root."""
        number = (self._for_dirs if is_dir else self._for_files).last(name, path[self._base_length :])
        return None if number < 0 else not self._rules[number].negated

    def mentions(self, names: Sequence[bytes], prefix: bytes) -> list[int]:
        """The places of the names, of the directory with this prefix, that some rule may be about."""
        return self._for_dirs.mentions(names, prefix[self._base_length :])

    @cached_property
    def _for_dirs(self) -> _Index:
        return _Index(enumerate(self._rules))

    @cached_property
    def _for_files(self) -> _Index:
        return _Index((number, rule) for number, rule in enumerate(self._rules) if not rule.dirs_only)


@dataclass(slots=True, frozen=True, eq=False)
class IgnoreRules:
    """The rules in force inside one directory. Immutable; `child` gives those of a directory inside it."""

    prefix: bytes = b""
    own: tuple[RuleFile, ...] = ()
    git: tuple[RuleFile, ...] = ()
    exclude: tuple[RuleFile, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        return not (self.own or self.git or self.exclude)

    def ignores(self, name: str, is_dir: bool) -> bool:
        """Whether the entry `name` of this directory is ignored by a rule about itself."""
        raw = name.encode("utf-8", "surrogateescape")
        path = self.prefix + raw
        for files in (self.own, self.git, self.exclude):
            for rules in files:
                verdict = rules.verdict(raw, path, is_dir)
                if verdict is not None:
                    return verdict
        return False

    def divide(self, entries: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The entries of this directory, those that are directories with a slash, into kept and ignored ones."""
        if self.is_empty or not entries:
            return entries, ()
        joined = "\0".join((*entries, "")).replace("/\0", "\0")
        names = joined.encode("utf-8", "surrogateescape").split(b"\0")[:-1]
        suspects: set[int] = set()
        for rules in (*self.own, *self.git, *self.exclude):
            suspects.update(rules.mentions(names, self.prefix))
        if not suspects:
            return entries, ()
        out = {entries[at] for at in suspects if self.ignores(entries[at].rstrip("/"), entries[at][-1] == "/")}
        if not out:
            return entries, ()
        return tuple(one for one in entries if one not in out), tuple(one for one in entries if one in out)

    def child(self, name: str, sources: IgnoreSources = NO_SOURCES) -> IgnoreRules:
        """The rules inside the directory `name` of this one."""
        prefix = self.prefix + name.encode("utf-8", "surrogateescape") + b"/"
        if sources is NO_SOURCES:
            return IgnoreRules(prefix, self.own, self.git, self.exclude)
        return self._at(prefix, sources)

    def with_sources(self, sources: IgnoreSources) -> IgnoreRules:
        """The same directory with its ignore files read."""
        return self if sources is NO_SOURCES else self._at(self.prefix, sources)

    def _at(self, prefix: bytes, sources: IgnoreSources) -> IgnoreRules:
        length = len(prefix)
        return IgnoreRules(
            prefix,
            _layer(sources.own, length) + self.own,
            _layer(sources.git, length) + self.git,
            _layer(sources.exclude, length) + self.exclude,
        )


def _layer(text: bytes | None, base_length: int) -> tuple[RuleFile, ...]:
    rules = _rule_file(text, base_length) if text else None
    return (rules,) if rules else ()


@lru_cache(maxsize=256)
def _rule_file(text: bytes, base_length: int) -> RuleFile:
    return RuleFile(text, base_length)


def read_sources(dir_fd: int, names: Sequence[str]) -> IgnoreSources:
    """Read the ignore files of an open directory; `names` are those of its entries that matter here."""
    return IgnoreSources(
        git=read_regular(dir_fd, GIT_IGNORE, IGNORE_FILE_MAX_BYTES) if GIT_IGNORE in names else None,
        own=read_regular(dir_fd, OWN_IGNORE, IGNORE_FILE_MAX_BYTES) if OWN_IGNORE in names else None,
        exclude=_read_exclude(dir_fd) if ".git" in names else None,
    )


def _read_exclude(dir_fd: int) -> bytes | None:
    """`.git` may be a file that points out of the root; then there is nothing for us to read."""
    with Handles(dir_fd) as handles:
        try:
            return read_regular(handles.directory(".git/info"), "exclude", IGNORE_FILE_MAX_BYTES)
        except OSError:
            return None


def is_ignored(root: str | bytes | os.PathLike[str], path: str, is_dir: bool) -> bool:
    """Whether `path` below `root` is ignored, by itself or by a directory above it."""
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return is_ignored_below(root_fd, path, is_dir)
    finally:
        os.close(root_fd)


def is_ignored_below(root_fd: int, path: str, is_dir: bool) -> bool:
    """`is_ignored` for a root that is already open."""
    *above, name = [name for name in path.split("/") if name not in ("", ".")] or [ROOT]
    with Handles(root_fd) as handles:
        rules = IgnoreRules().with_sources(_sources_at(handles, "."))
        for depth, directory in enumerate(above):
            if rules.ignores(directory, is_dir=True):
                return True
            rules = rules.child(directory, _sources_at(handles, "/".join(above[: depth + 1])))
    return rules.ignores(name, is_dir)


def _sources_at(handles: Handles, directory: str) -> IgnoreSources:
    try:
        return read_sources(handles.directory(directory), (GIT_IGNORE, OWN_IGNORE, ".git"))
    except OSError:
        return NO_SOURCES
