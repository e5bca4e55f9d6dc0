"""Three-way merge: of texts, of modes, of entries. Pure but for reading blobs; never a marker.

Undo asks it with base = the entry after the call, theirs = the entry before it, ours = the entry now; whatever happened
to the path since stays, unless it happened in the same place.

Two sides merge where their changes are at least one unchanged line apart, or leave the very same lines; everything else
is a conflict. `git merge-file` has the same rule; the two can still differ where equal lines may be aligned in several
ways. It would go on to shrink a conflict to the lines that really differ, which only helps a person who reads markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias, TypeVar

from mulligan.files.diff import Edit, edits, looks_binary, split_lines
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import Absent, DirEntry, Entry, FileEntry, Xattrs, kind_of, same_content, same_state
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MERGE_MAX_BYTES

ConflictReason = Literal[
    "same_lines", "binary", "mode", "type_changed", "deleted_externally", "not_captured", "file_in_use"
]
Read: TypeAlias = Callable[[Digest], bytes]
T = TypeVar("T")


@fast_dataclass(slots=True, frozen=True)
class Conflict:
    """Both sides changed the same thing, so the path stays as it is."""

    reason: ConflictReason


@fast_dataclass(slots=True, frozen=True)
class Merged:
    content: bytes


@fast_dataclass(slots=True, frozen=True)
class KeepOurs:
    """The path stays. `already`: it is what it should become; `unchanged`: the other side changed nothing."""

    why: Literal["already", "unchanged"]


@fast_dataclass(slots=True, frozen=True)
class TakeTheirs:
    """The path becomes the other side's entry."""

    entry: Entry


@fast_dataclass(slots=True, frozen=True)
class WriteMerged:
    """The path becomes an entry that neither side had.

    `content` is the bytes of its digest; None when one side had that content already and only mode or attributes are
    the other's.
    """

    entry: FileEntry | DirEntry
    content: bytes | None


MergedEntry: TypeAlias = KeepOurs | TakeTheirs | WriteMerged | Conflict


def merge_text(base: bytes, ours: bytes, theirs: bytes) -> Merged | Conflict:
    """Merge both sides' changes of `base`, line by line. A line's end is part of it, so a final newline is content."""
    settled = _three_way(base, ours, theirs)
    # Also for binary files: if one side changed nothing, there is nothing to merge.
    if settled is not None:
        return Merged(settled)
    if any(looks_binary(side) for side in (base, ours, theirs)):
        return Conflict("binary")
    return _merge_lines(*map(split_lines, (base, ours, theirs)))


def merge_mode(base: int, ours: int, theirs: int) -> int | Conflict:
    settled = _three_way(base, ours, theirs)
    return Conflict("mode") if settled is None else settled


def _three_way(base: T, ours: T, theirs: T) -> T | None:
    """The value that results from two sides' changes; None if all three differ."""
    if theirs == base or ours == theirs:
        return ours
    return theirs if ours == base else None


@fast_dataclass(slots=True)
class _Region:
    """Base lines `lo:hi` with the changes of each side in them. Around them neither side changed anything."""

    lo: int
    hi: int
    changes: tuple[list[Edit], list[Edit]]


def _merge_lines(base: list[bytes], ours: list[bytes], theirs: list[bytes]) -> Merged | Conflict:
    merged: list[bytes] = []
    done = 0
    for region in _regions(edits(base, ours), edits(base, theirs)):
        sides = zip((ours, theirs), region.changes, strict=True)
        versions = [_version(lines, changes, region) for lines, changes in sides if changes]
        if versions[0] != versions[-1]:
            return Conflict("same_lines")
        merged += base[done : region.lo]
        merged += versions[0]
        done = region.hi
    return Merged(b"".join(merged + base[done:]))


def _regions(ours: Sequence[Edit], theirs: Sequence[Edit]) -> Iterator[_Region]:
    """Group changes that overlap or touch into one region. Changes of one side never touch each other."""
    # In the order of the base, so that one pass finds what overlaps.
    told = sorted([(edit, 0) for edit in ours] + [(edit, 1) for edit in theirs])
    region: _Region | None = None
    for edit, side in told:
        # Changes that only touch count as one region: no rule says which of them comes first.
        if region is None or edit.a_lo > region.hi:
            if region is not None:
                yield region
            region = _Region(edit.a_lo, edit.a_hi, ([], []))
        region.hi = max(region.hi, edit.a_hi)
        region.changes[side].append(edit)
    if region is not None:
        yield region


def _version(lines: list[bytes], changes: Sequence[Edit], region: _Region) -> list[bytes]:
    """One side's lines for a region: its changes, and the unchanged base lines around them."""
    first, last = changes[0], changes[-1]
    return lines[first.b_lo - (first.a_lo - region.lo) : last.b_hi + (region.hi - last.a_hi)]


def merge_entry(base: Entry, ours: Entry, theirs: Entry, read: Read) -> MergedEntry:
    """What a path that is `ours` becomes, when `base` should become `theirs`.

    Content, mode and attributes are merged each on its own, so a person's chmod survives an undo of content. `read` is
    asked only for texts that all differ. Which of two sides conflict does not depend on which one is ours.
    """
    if same_state(ours, theirs):
        return KeepOurs("already")
    if same_state(base, theirs):
        return KeepOurs("unchanged")
    if same_state(ours, base):
        return TakeTheirs(theirs)
    # A file that was deleted since is not created again; `overwrite` does that.
    if isinstance(ours, Absent):
        return Conflict("deleted_externally")
    if len({kind_of(entry) for entry in (base, ours, theirs)} - {"absent"}) > 1:
        return Conflict("type_changed")
    return _merge_same_kind(base, ours, theirs, read)


def _merge_same_kind(base: Entry, ours: Entry, theirs: Entry, read: Read) -> MergedEntry:
    if isinstance(base, FileEntry) and isinstance(ours, FileEntry) and isinstance(theirs, FileEntry):
        return _merge_files(base, ours, theirs, read)
    if isinstance(base, DirEntry) and isinstance(ours, DirEntry) and isinstance(theirs, DirEntry):
        return _merge_dirs(base, ours, theirs)
    return Conflict(_clash(ours, base if isinstance(theirs, Absent) else theirs, read))


def _clash(ours: Entry, other: Entry, read: Read) -> ConflictReason:
    """The conflict reason of two versions of a link, or of a path that one side created or deleted."""
    if same_content(ours, other):
        return "mode"
    files = [entry for entry in (ours, other) if isinstance(entry, FileEntry)]
    return "binary" if any(_is_binary(entry, read) for entry in files) else "same_lines"


def _is_binary(entry: FileEntry, read: Read) -> bool:
    """Whether the entry is binary. A file that is too large to read whole counts as binary."""
    return entry.size > MERGE_MAX_BYTES or looks_binary(read(entry.digest))


def _merge_files(base: FileEntry, ours: FileEntry, theirs: FileEntry, read: Read) -> MergedEntry:
    content = _merge_contents(base, ours, theirs, read)
    if isinstance(content, Conflict):
        return content
    metadata = _merge_metadata(base, ours, theirs)
    if isinstance(metadata, Conflict):
        return metadata
    mode, xattrs = metadata
    entry = FileEntry(content.digest, content.size, mode, xattrs=xattrs, link_group=ours.link_group)
    return _named(entry, content.fresh, ours, theirs)


def _merge_dirs(base: DirEntry, ours: DirEntry, theirs: DirEntry) -> MergedEntry:
    metadata = _merge_metadata(base, ours, theirs)
    if isinstance(metadata, Conflict):
        return metadata
    mode, xattrs = metadata
    return _named(DirEntry(mode, xattrs=xattrs), None, ours, theirs)


def _named(entry: FileEntry | DirEntry, content: bytes | None, ours: Entry, theirs: Entry) -> MergedEntry:
    """The result of a merge. It may equal one of the sides."""
    if same_state(entry, ours):
        return KeepOurs("already")
    return TakeTheirs(theirs) if same_state(entry, theirs) else WriteMerged(entry, content)


@fast_dataclass(slots=True, frozen=True)
class _Content:
    """Merged content; `fresh` holds its bytes when no side has them."""

    digest: Digest
    size: int
    fresh: bytes | None = None


def _merge_contents(base: FileEntry, ours: FileEntry, theirs: FileEntry, read: Read) -> _Content | Conflict:
    # If one side has the content of the base, no bytes have to be read.
    digest = _three_way(base.digest, ours.digest, theirs.digest)
    if digest is not None:
        return _Content(digest, ours.size if digest == ours.digest else theirs.size)
    if max(base.size, ours.size, theirs.size) > MERGE_MAX_BYTES:
        return Conflict("binary")
    merged = merge_text(read(base.digest), read(ours.digest), read(theirs.digest))
    if isinstance(merged, Conflict):
        return merged
    digest = digest_of(merged.content)
    # Both sides may have made the same change in different steps.
    known = digest in (ours.digest, theirs.digest)
    return _Content(digest, len(merged.content), None if known else merged.content)


_WithMetadata = TypeVar("_WithMetadata", FileEntry, DirEntry)


def _merge_metadata(base: _WithMetadata, ours: _WithMetadata, theirs: _WithMetadata) -> tuple[int, Xattrs] | Conflict:
    """Extended attributes are access rules as much as a mode is, so they share its reason."""
    mode = merge_mode(base.mode, ours.mode, theirs.mode)
    xattrs = _three_way(base.xattrs, ours.xattrs, theirs.xattrs)
    if isinstance(mode, Conflict) or xattrs is None:
        return Conflict("mode")
    return mode, xattrs
