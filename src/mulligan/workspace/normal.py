"""The one table of what counts as the same text when an exact match fails, shared by edits and patches.

Any run of white space equals any other; typographic quotes and dashes equal their plain forms. Nothing else is folded:
letters keep their case and their Unicode form, and a zero-width space is not white space.
"""

from __future__ import annotations

import re

WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space property. `str.strip()` without it would also take the separators U+001C to U+001F."""

LOOK_ALIKES = {
    " ": WHITE_SPACE,
    "'": "\u2018\u2019\u201a\u201b\u02bc",
    '"': "\u201c\u201d\u201e\u201f",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
}
"""Plain character: everything that equals it."""

SPACES = re.compile(" {2,}")
"""What is left to squeeze in folded text."""

_FOLD = str.maketrans({alike: plain for plain, alikes in LOOK_ALIKES.items() for alike in alikes})


def fold(text: str) -> str:
    """Every look-alike as its plain character. One to one, so offsets stay valid."""
    return text.translate(_FOLD)


def line_key(line: str) -> str:
    """Equal for two lines that differ only by the table; white space at the ends of a line does not count."""
    return SPACES.sub(" ", fold(line)).strip(" ")


def is_blank(text: str) -> bool:
    return not text.strip(WHITE_SPACE)
