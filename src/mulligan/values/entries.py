"""Entries: the state of a path at one moment. Changes: the entry before and the entry after.

Two entries have *the same content* (`same_content`) if the path holds the same bytes or link target, and *the same
state* (`same_state`) if mode and extended attributes are equal too. Times are recorded and never compared.

`Content` is the content of a file: bytes, or a `Large` that yields its bytes in pieces because they would take too much
memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from hashlib import sha256
from typing import Any, ClassVar, Literal, TypeAlias

from mulligan.values.digest import Digest, digest_from_raw, digest_of, parse_digest
from mulligan.values.errors import fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, to_wire
from mulligan.values.text import from_base64, in_base64, is_utf8

# Extended attributes as sorted (name, base64 value) pairs.
Xattrs: TypeAlias = tuple[tuple[str, str], ...]


@fast_dataclass(slots=True, frozen=True)
class Absent:
    """The path does not exist."""

    # Every kind of entry has these two attributes, so callers need not check the kind first.
    withheld: ClassVar[None] = None
    link_group: ClassVar[None] = None


# The two settings of `capture` that keep the bytes of a path out of the store.
Withheld = Literal["digest_only", "never"]


@fast_dataclass(slots=True, frozen=True)
class FileEntry:
    """A regular file. `withheld`: the store does not have the bytes, because of a `capture` setting.

    With `never`, the digest is a keyed one, so that nobody can confirm a guess of the content.
    """

    digest: Digest
    size: int
    mode: int
    mtime_ns: int = 0
    xattrs: Xattrs = ()
    link_group: str | None = None
    withheld: Withheld | None = field(default=None, compare=False)


@fast_dataclass(slots=True, frozen=True)
class SymlinkEntry:
    target: str
    withheld: ClassVar[None] = None
    link_group: ClassVar[None] = None


@fast_dataclass(slots=True, frozen=True)
class DirEntry:
    mode: int
    mtime_ns: int = 0
    xattrs: Xattrs = ()
    withheld: ClassVar[None] = None
    link_group: ClassVar[None] = None


Entry: TypeAlias = Absent | FileEntry | SymlinkEntry | DirEntry

ABSENT = Absent()

ChangeKind = Literal["created", "modified", "deleted", "renamed", "mode"]
EntryKind = Literal["absent", "file", "symlink", "dir"]


@fast_dataclass(slots=True, frozen=True)
class Change:
    """The entries of one path before and after. `renamed_from` is for display; the old path has its own change."""

    path: RepoPath
    before: Entry
    after: Entry
    renamed_from: RepoPath | None = None


def is_withheld(entry: Entry) -> bool:
    """Whether this is a file whose bytes the store does not have, because of a `capture` setting."""
    return entry.withheld is not None


def is_change_withheld(change: Change) -> bool:
    return change.before.withheld is not None or change.after.withheld is not None


def is_never_recorded(change: Change) -> bool:
    """Whether the path is under `capture.never`: a record may name it and must contain nothing else about it."""
    return "never" in (change.before.withheld, change.after.withheld)


def kind_of(entry: Entry) -> EntryKind:
    return _KIND_NAMES[type(entry)]


_KIND_NAMES: dict[type, EntryKind] = {Absent: "absent", FileEntry: "file", SymlinkEntry: "symlink", DirEntry: "dir"}


def same_content(a: Entry, b: Entry) -> bool:
    """Whether two entries are equal apart from mode, attributes and times."""
    if isinstance(a, FileEntry) and isinstance(b, FileEntry):
        return a.digest == b.digest
    if isinstance(a, DirEntry) and isinstance(b, DirEntry):
        return True
    return a == b


def same_state(a: Entry, b: Entry) -> bool:
    """Whether two entries are equal apart from times and link groups."""
    # Most questions are about an entry and itself.
    if a is b:
        return True
    if isinstance(a, FileEntry) and isinstance(b, FileEntry):
        return a.digest == b.digest and a.mode == b.mode and a.xattrs == b.xattrs
    if isinstance(a, DirEntry) and isinstance(b, DirEntry):
        return a.mode == b.mode and a.xattrs == b.xattrs
    return a == b


def kind_of_change(change: Change) -> ChangeKind:
    if change.renamed_from is not None:
        return "renamed"
    if isinstance(change.before, Absent):
        return "created"
    if isinstance(change.after, Absent):
        return "deleted"
    return "mode" if same_content(change.before, change.after) else "modified"


def entry_to_json(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, FileEntry):
        body: dict[str, Any] = {"kind": "file", "digest": entry.digest, "size": entry.size, "mode": entry.mode}
        body["mtime_ns"] = entry.mtime_ns
        if entry.link_group is not None:
            body["link_group"] = entry.link_group
        if entry.withheld is not None:
            body["withheld"] = entry.withheld
        return body if not entry.xattrs else body | {"xattrs": [list(pair) for pair in entry.xattrs]}
    if isinstance(entry, SymlinkEntry):
        return {"kind": "symlink", "target": _text_to_wire(entry.target)}
    if isinstance(entry, DirEntry):
        body = {"kind": "dir", "mode": entry.mode, "mtime_ns": entry.mtime_ns}
        return body if not entry.xattrs else body | {"xattrs": [list(pair) for pair in entry.xattrs]}
    return {"kind": "absent"}


@lru_cache(maxsize=1_024)
def entry_from_bytes(raw: bytes) -> Entry:
    """Parse an entry from the bytes in the store."""
    # Imported here, because it imports orjson and `mulligan --help` should not wait for that.
    from mulligan.values.canonical import decode

    return entry_from_json(decode(raw))


def entry_from_json(body: Mapping[str, Any]) -> Entry:
    try:
        return _READERS[body["kind"]](body)
    except (KeyError, TypeError, ValueError) as error:
        raise fault("invalid_entry", f"Not an entry: {error!r}") from None


def _file_from_json(body: Mapping[str, Any]) -> Entry:
    return FileEntry(
        digest=parse_digest(body["digest"]),
        size=int(body["size"]),
        mode=int(body["mode"]),
        mtime_ns=int(body["mtime_ns"]),
        xattrs=_xattrs_of(body) if "xattrs" in body else (),
        link_group=body.get("link_group"),
        withheld=body.get("withheld"),
    )


def _xattrs_of(body: Mapping[str, Any]) -> Xattrs:
    return tuple((str(name), str(value)) for name, value in body["xattrs"])


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Entry]] = {
    "absent": lambda _: ABSENT,
    "file": _file_from_json,
    "symlink": lambda body: SymlinkEntry(_text_from_wire(body["target"])),
    "dir": lambda body: DirEntry(
        int(body["mode"]), int(body["mtime_ns"]), _xattrs_of(body) if "xattrs" in body else ()
    ),
}


def change_to_json(change: Change) -> dict[str, Any]:
    before, after = entry_to_json(change.before), entry_to_json(change.after)
    body = {"path": to_wire(change.path), "before": before, "after": after}
    if change.renamed_from is not None:
        body["from"] = to_wire(change.renamed_from)
    return body


def _text_to_wire(text: str) -> str:
    """A link target in its wire form. Targets may be any bytes, so the rules for paths do not apply."""
    raw = text.encode("utf-8", "surrogateescape")
    return in_base64(raw) if text.startswith("base64:") or not is_utf8(raw) else text


def _text_from_wire(text: str) -> str:
    return from_base64(text).decode("utf-8", "surrogateescape") if text.startswith("base64:") else text


class Large(ABC):
    """Bytes that are too large to hold in memory. Each iteration yields them from the start, in pieces."""

    digest: Digest
    size: int

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]: ...

    def __len__(self) -> int:
        return self.size


Content: TypeAlias = bytes | Large

# Stores bytes of any length, piece by piece. When it returns, they are in the store.
KeepLarge: TypeAlias = Callable[[Iterable[bytes]], Large]


def digest_of_content(content: Content) -> Digest:
    return digest_of(content) if isinstance(content, bytes) else content.digest


def pieces_of(content: Content) -> Iterable[bytes]:
    return (content,) if isinstance(content, bytes) else content


def digest_of_beginning(content: Content, size: int) -> Digest:
    """The digest of the first `size` bytes, or of all bytes if there are fewer."""
    seen = sha256()
    for piece in pieces_of(content):
        seen.update(piece[:size])
        size -= min(size, len(piece))
        if not size:
            break
    return digest_from_raw(seen.digest())


def whole(content: Content) -> bytes:
    """All bytes in memory, for callers that cannot work with pieces."""
    return b"".join(pieces_of(content))
