"""Hiding who and where: home directories, user names, host names and roots, wherever in a string they stand.

A root becomes `<root>` (further ones `<root:1>`, …), a home `<home>`, anybody else's home below /home, /Users or
C:\\Users keeps its place and loses its name, a user name by itself becomes `<user>` and the machine's `<host>`. The
longest match wins, so a root inside a home is a root. Escaped (`\\/`) and URL-encoded (`%2F`) separators count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mulligan.session.secret_kinds import START

_SEPARATOR = r"(?:\\{0,16}+/|\\{1,16}+|%2[Ff]|%5[Cc])"
"""Bounded, so that a long run of backslashes is not read again from each of them."""
_ANY_HOME = re.compile(
    rf"(?:{START}|(?<=-[A-Za-z]))(?P<place>(?:{_SEPARATOR}mnt{_SEPARATOR}[a-z]|[A-Za-z](?::|%3[Aa]))?{_SEPARATOR}(?:home|Users){_SEPARATOR})"
    r"(?P<who>[^\s/\\\"'`%:;,<>|&(){}\[\]*?$#=]{1,64})"
)
_GENERIC = """
    root user users admin administrator ubuntu debian fedora dev developer runner vscode node app test tests
    default guest home codespace gitpod docker container nobody git www-data ec2-user vagrant build builder ci
    main src local localhost server machine desktop laptop shared public python agent assistant system tool
    tools session sessions call calls message messages model content role event events turn claude codex gemini
    opencode mulligan open closed
"""
NOBODY = frozenset(_GENERIC.split())
"""Account names that tell nothing about anybody and are words of other things too."""

_NAME_CHARS = 3
_LONG_NAME_CHARS = 5
_WORD = START.replace("_-]", "]")
_WORD_END = r"(?![A-Za-z0-9])"
_SHORT_WORD = START.replace("_-]", "_]")
_SHORT_WORD_END = r"(?![A-Za-z0-9_])"


@dataclass(frozen=True)
class PrivateNames:
    """The names of one machine. All are optional: homes in their usual places are known without them."""

    roots: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def hide(self, text: str) -> tuple[str, list[str]]:
        """The text with private names replaced, and the replacements in order of appearance, each once."""
        used: dict[str, None] = {}

        def known(found: re.Match[str]) -> str:
            replacement = self._table[(found.lastindex or 1) - 1][1]
            used[replacement] = None
            return replacement

        def anyone(found: re.Match[str]) -> str:
            used[f"{found['place']}<user>"] = None
            return f"{found['place']}<user>"

        if self._table:
            text = self._known.sub(known, text)
        if "home" in text or "Users" in text:
            text = _ANY_HOME.sub(anyone, text)
        return text, list(used)

    @cached_property
    def _table(self) -> list[tuple[str, str]]:
        """What to look for and what to put there, longest path first."""
        named = [(root, "<root>" if number == 0 else f"<root:{number}>") for number, root in enumerate(self.roots)]
        named += [(home, "<home>") for home in self.homes]
        paths = sorted(((path.rstrip("/\\"), shown) for path, shown in named), key=lambda one: -len(one[0]))
        table = [(_path_pattern(path), shown) for path, shown in paths if path]
        return table + _words(self.users, "<user>") + _words(self.hosts, "<host>")

    @cached_property
    def _known(self) -> re.Pattern[str]:
        return re.compile("|".join(f"({pattern})" for pattern, _ in self._table))


def _path_pattern(path: str) -> str:
    """The path with any separators between its names; also run together with dashes, as some agents name folders."""
    names = [re.escape(name) for name in re.split(r"[/\\]+", path) if name]
    lead = _SEPARATOR if path[0] in "/\\" else _WORD
    plain = lead + _SEPARATOR.join(names) + r"(?![A-Za-z0-9_-])"
    dashed = "-" + "-".join(names) + _WORD_END
    return f"{plain}|{dashed}" if len(names) > 1 else plain


def _words(words: Iterable[str], shown: str) -> list[tuple[str, str]]:
    """Names as whole words. A short one is often a part of other names (`max` of `max_size`), so it stands alone."""
    chosen = sorted({word for word in words if len(word) >= _NAME_CHARS and word.lower() not in NOBODY})
    return [(_bounded(word), shown) for word in chosen]


def _bounded(word: str) -> str:
    is_long = len(word) >= _LONG_NAME_CHARS
    start, end = (_WORD, _WORD_END) if is_long else (_SHORT_WORD, _SHORT_WORD_END)
    return start + re.escape(word) + end
