"""Entries: what a path is at one moment. Changes: what it was and what it became.

Two entries are *the same content* when a person would see no difference in what the path holds (`same_content`), and
*the same* when mode and extended attributes agree too (`same_state`). Times are remembered, never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, TypeAlias

from mulligan.values.digest import Digest, parse_digest
from mulligan.values.faults import fault
from mulligan.values.paths import RepoPath, from_wire, to_wire
from mulligan.values.plain import plain

Xattrs: TypeAlias = tuple[tuple[str, str], ...]
"""Extended attributes as sorted (name, base64 value) pairs."""


@plain(slots=True, frozen=True)
class Absent:
    """Nothing is there."""


Withheld = Literal["digest_only", "never"]
"""The two settings of `capture` that keep the bytes of a path out of the store."""


@plain(slots=True, frozen=True)
class FileEntry:
    """`withheld`: the store does not have the bytes. With `never`, the digest is a keyed one that nobody can guess."""

    digest: Digest
    size: int
    mode: int
    mtime_ns: int = 0
    xattrs: Xattrs = ()
    link_group: str | None = None
    withheld: Withheld | None = field(default=None, compare=False)


@plain(slots=True, frozen=True)
class SymlinkEntry:
    target: str


@plain(slots=True, frozen=True)
class DirEntry:
    mode: int
    mtime_ns: int = 0
    xattrs: Xattrs = ()


Entry: TypeAlias = Absent | FileEntry | SymlinkEntry | DirEntry

ABSENT = Absent()

ChangeKind = Literal["created", "modified", "deleted", "renamed", "mode"]
EntryKind = Literal["absent", "file", "symlink", "dir"]


@plain(slots=True, frozen=True)
class Change:
    """One path's step from `before` to `after`. `renamed_from` is for display; the old path has its own change."""

    path: RepoPath
    before: Entry
    after: Entry
    renamed_from: RepoPath | None = None


def is_withheld(entry: Entry) -> bool:
    """Whether it is a file whose bytes the store does not have, because of a `capture` setting."""
    return isinstance(entry, FileEntry) and entry.withheld is not None


def is_change_withheld(change: Change) -> bool:
    return is_withheld(change.before) or is_withheld(change.after)


def is_never_recorded(change: Change) -> bool:
    """Whether the path is under `capture.never`, so that a record may name it and nothing more."""
    return any(isinstance(one, FileEntry) and one.withheld == "never" for one in (change.before, change.after))


def kind_of(entry: Entry) -> EntryKind:
    return _KIND_NAMES[type(entry)]


_KIND_NAMES: dict[type, EntryKind] = {Absent: "absent", FileEntry: "file", SymlinkEntry: "symlink", DirEntry: "dir"}


def group_of(entry: Entry) -> str | None:
    """What all names of a file with several have in common; None for a file with one name, and for anything else."""
    return entry.link_group if isinstance(entry, FileEntry) else None


def same_content(a: Entry, b: Entry) -> bool:
    """Equal but for mode, attributes and times."""
    if isinstance(a, FileEntry) and isinstance(b, FileEntry):
        return a.digest == b.digest
    if isinstance(a, DirEntry) and isinstance(b, DirEntry):
        return True
    return a == b


def same_state(a: Entry, b: Entry) -> bool:
    """Equal but for times and link groups."""
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
        body: dict[str, Any] = {
            "kind": "file",
            "digest": entry.digest,
            "size": entry.size,
            "mode": entry.mode,
            "mtime_ns": entry.mtime_ns,
        }
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
        xattrs=_xattrs_from_json(body),
        link_group=body.get("link_group"),
        withheld=body.get("withheld"),
    )


def _dir_from_json(body: Mapping[str, Any]) -> Entry:
    return DirEntry(mode=int(body["mode"]), mtime_ns=int(body["mtime_ns"]), xattrs=_xattrs_from_json(body))


def _xattrs_from_json(body: Mapping[str, Any]) -> Xattrs:
    return tuple((str(name), str(value)) for name, value in body.get("xattrs", ()))


_READERS = {
    "absent": lambda _: ABSENT,
    "file": _file_from_json,
    "symlink": lambda body: SymlinkEntry(_text_from_wire(body["target"])),
    "dir": _dir_from_json,
}


def change_to_json(change: Change) -> dict[str, Any]:
    body = {
        "path": to_wire(change.path),
        "before": entry_to_json(change.before),
        "after": entry_to_json(change.after),
    }
    if change.renamed_from is not None:
        body["from"] = to_wire(change.renamed_from)
    return body


def change_from_json(body: Mapping[str, Any]) -> Change:
    try:
        origin = body.get("from")
        return Change(
            path=from_wire(body["path"]),
            before=entry_from_json(body["before"]),
            after=entry_from_json(body["after"]),
            renamed_from=None if origin is None else from_wire(origin),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise fault("invalid_entry", f"Not a change: {error!r}") from None


def _text_to_wire(text: str) -> str:
    """A link target is any bytes at all; the same wire form as a path's, without a path's rules."""
    from base64 import b64encode

    raw = text.encode("utf-8", "surrogateescape")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + b64encode(raw).decode("ascii")
    return "base64:" + b64encode(raw).decode("ascii") if text.startswith("base64:") else text


def _text_from_wire(text: str) -> str:
    from base64 import b64decode

    if not text.startswith("base64:"):
        return text
    return b64decode(text[7:], validate=True).decode("utf-8", "surrogateescape")
