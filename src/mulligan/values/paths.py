"""Paths relative to the root: POSIX bytes decoded with `surrogateescape`, `/` between names, `.` for the root itself.

A `RepoPath` is never empty or absolute, and contains no empty, `.` or `..` name. On the wire, a path that is not UTF-8
is `base64:<its bytes>`. A path that itself begins with `base64:` is encoded the same way, so the two forms never
collide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import AnyStr, NewType

from mulligan.values.errors import fault
from mulligan.values.limits import MAX_PATH_BYTES
from mulligan.values.text import from_base64, in_base64

RepoPath = NewType("RepoPath", str)

ROOT = RepoPath(".")

_SLASHES = ("/", b"/")

_WIRE_PREFIX = "base64:"


def parse_repo_path(text: object) -> RepoPath:
    """Parse a relative path. `a//b/./c/` becomes `a/b/c`; `..` and absolute paths raise `invalid_path`."""
    if not isinstance(text, str) or not text:
        raise fault("invalid_path", "A path is a non-empty string.")
    return _parsed(text)


# Every step of a call parses and encodes the same paths again, so these functions cache their results.
@lru_cache(maxsize=4_096)
def _parsed(text: str) -> RepoPath:
    _check_no_nul(text)
    if text.startswith("/"):
        raise fault("invalid_path", f"{text!r} is absolute; paths here are relative to the root.", absolute=True)
    names = [name for name in text.split("/") if name not in ("", ".")]
    if ".." in names:
        raise fault("invalid_path", f"{text!r} climbs with '..'.", climbs=True)
    if not names:
        return ROOT
    path = "/".join(names)
    if len(path_bytes(RepoPath(path))) > MAX_PATH_BYTES:
        raise fault("invalid_path", f"A path has at most {MAX_PATH_BYTES} bytes.")
    return RepoPath(path)


def _check_no_nul(text: str) -> None:
    if "\0" in text:
        raise fault("invalid_path", "A path cannot contain NUL.")


@lru_cache(maxsize=4_096)
def parse_below(base: RepoPath, text: str) -> RepoPath:
    """Parse a path that a user typed in the directory `base`.

    `..` drops a name; leaving the root raises `invalid_path`.
    """
    names: list[str] = []
    _check_no_nul(text)
    for name in f"{base}/{text}".split("/"):
        if name != "..":
            names += [name] if name not in ("", ".") else []
        elif names:
            names.pop()
        else:
            raise fault("invalid_path", f"{text!r} leads out of the root.", climbs=True)
    return parse_repo_path("/".join(names) or ".")


@lru_cache(maxsize=4_096)
def path_bytes(path: RepoPath) -> bytes:
    """The bytes of the path in the file system; they are also its sort key."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise fault("invalid_path", "A path cannot contain lone surrogates that do not represent a byte.") from None


@lru_cache(maxsize=4_096)
def path_from_bytes(raw: bytes) -> RepoPath:
    return parse_repo_path(raw.decode("utf-8", "surrogateescape"))


def parent_of(path: RepoPath) -> RepoPath:
    head, _, _ = path.rpartition("/")
    return RepoPath(head) if head else ROOT


def name_of(path: RepoPath) -> str:
    return path.rpartition("/")[2]


def join(base: RepoPath, name: str) -> RepoPath:
    return RepoPath(name) if base == ROOT else RepoPath(f"{base}/{name}")


def is_below(path: RepoPath, base: RepoPath) -> bool:
    """Whether the path is strictly inside `base`. Whole names are compared."""
    return path != ROOT if base == ROOT else path.startswith(base + "/")


def is_within(path: RepoPath, base: RepoPath) -> bool:
    """Whether the path is `base` or below it."""
    return path == base or is_below(path, base)


def is_inside(real: AnyStr, folder: AnyStr) -> bool:
    """Whether an absolute path is inside a folder. Whole names are compared: `/repo-evil` is not in `/repo`.

    A folder is inside itself.
    """
    rest = real[len(folder) :]
    return real.startswith(folder) and (not rest or rest[:1] in _SLASHES or folder[-1:] in _SLASHES)


def ancestors_of(path: RepoPath) -> list[RepoPath]:
    """All directories above the path, nearest first, the root included and last."""
    found = []
    while path != ROOT:
        path = parent_of(path)
        found.append(path)
    return found


@lru_cache(maxsize=4_096)
def to_wire(path: RepoPath, *, one_line: bool = False) -> str:
    """The wire form of a path.

    With `one_line`, a path that contains a line break is base64 too, so that a list can be parsed.
    """
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return in_base64(path_bytes(path))
    return in_base64(path_bytes(path)) if path.startswith(_WIRE_PREFIX) or (one_line and "\n" in path) else path


def from_wire(text: object) -> RepoPath:
    return parse_repo_path(text_from_wire(text) if isinstance(text, str) else text)


@lru_cache(maxsize=4_096)
def bytes_from_wire(text: str) -> bytes:
    """The bytes of a path that a record contains."""
    return path_bytes(from_wire(text))


def paths_from_wire(given: object) -> list[RepoPath] | None:
    """Parse a list of paths or a single path; a text is one path, not a path for each letter.

    The paths are in the form that history uses: paths in other roots are absolute.
    """
    if given is None:
        return None
    one = as_text(given)
    texts = [one] if isinstance(one, str) else given
    if not isinstance(texts, Iterable):
        raise fault("invalid_params", "paths: Give a list of paths.", field="paths")
    return [_history_path(as_text(text)) for text in texts]


def hunks_from_wire(given: Mapping[str, Sequence[int]] | None) -> dict[RepoPath, list[int]] | None:
    """By path: indexes of hunks, as `mulligan diff CALL --json` lists them."""
    return None if given is None else {_history_path(path): list(some) for path, some in given.items()}


def _history_path(text: object) -> RepoPath:
    path = text_from_wire(text) if isinstance(text, str) else ""
    return RepoPath("/" + parse_below(ROOT, path)) if path.startswith("/") else from_wire(text)


def as_text(path: object) -> object:
    """A `Path` as text, the form that tools take; any other value unchanged."""
    to_text = getattr(path, "__fspath__", None)
    return path if to_text is None else to_text()


def text_from_wire(text: str) -> str:
    """The decoded text, before it is checked to be a path."""
    if not text.startswith(_WIRE_PREFIX):
        return text
    body = text[len(_WIRE_PREFIX) :]
    # Listings add a slash to directories. Base64 contains slashes too, but its length is a multiple of four.
    if len(body) % 4 == 1:
        body = body.removesuffix("/")
    try:
        return from_base64(_WIRE_PREFIX + body).decode("utf-8", "surrogateescape")
    except ValueError:
        raise fault("invalid_path", "A path that begins with 'base64:' must be base64.") from None
