"""The difference of two texts, told as a unified diff that git and our own strict applier both apply exactly. Pure."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from mulligan.values.paths import RepoPath, path_bytes
from mulligan.values.plain import plain
from mulligan.workspace.lines import is_utf8, looks_binary, match_blocks, split_lines
from mulligan.workspace.patch.names import quote


class Edit(NamedTuple):
    """Lines `a_lo:a_hi` of the one text stand where lines `b_lo:b_hi` of the other do."""

    a_lo: int
    a_hi: int
    b_lo: int
    b_hi: int


def edits(before: Sequence[bytes], after: Sequence[bytes]) -> list[Edit]:
    """What lies between the matching blocks of two texts, in order. No two edits touch."""
    found = []
    a_lo = b_lo = 0
    for a_hi, b_hi, length in [*match_blocks(before, after), (len(before), len(after), 0)]:
        if a_lo < a_hi or b_lo < b_hi:
            found.append(Edit(a_lo, a_hi, b_lo, b_hi))
        a_lo, b_lo = a_hi + length, b_hi + length
    return found


def line_counts(before: bytes, after: bytes) -> tuple[int, int]:
    """Lines added and lines removed; none for binaries, which have no lines."""
    if looks_binary(before) or looks_binary(after):
        return 0, 0
    found = edits(split_lines(before), split_lines(after))
    return sum(edit.b_hi - edit.b_lo for edit in found), sum(edit.a_hi - edit.a_lo for edit in found)


def unified_diff(
    before: bytes,
    after: bytes,
    *,
    path_before: RepoPath | None,
    path_after: RepoPath | None,
    context: int = 3,
    mode_before: int = 0o644,
    mode_after: int = 0o644,
    only_utf8: bool = False,
) -> str:
    """A git diff of one file, or "" when nothing differs. A path of None says that the file is not there on that side.

    Modes are permission bits, or `stat.S_IFLNK` for a symbolic link, whose content is its target. A file that becomes a
    link is told as a deletion and a creation: no single diff says it.

    Bytes that are not UTF-8 come as lone surrogates (`surrogateescape`), so that encoding gives them back. With
    `only_utf8`, for readers whose text cannot hold those, a file with such bytes counts as binary.
    """
    if path_before is not None and path_after is not None and stat.S_ISLNK(mode_before) != stat.S_ISLNK(mode_after):
        whole = partial(unified_diff, context=context, only_utf8=only_utf8)
        gone = whole(before, b"", path_before=path_before, path_after=None, mode_before=mode_before)
        return gone + whole(b"", after, path_before=None, path_after=path_after, mode_after=mode_after)
    sides = _Sides(path_before, path_after)
    header = sides.header(mode_before, mode_after)
    is_binary = any(looks_binary(side) or (only_utf8 and not is_utf8(side)) for side in (before, after))
    body = _differ(before, after, sides) if is_binary else _body(before, after, sides, context)
    return sides.first_line() + header + body if header or body else ""


@plain(slots=True, frozen=True)
class _Sides:
    before: RepoPath | None
    after: RepoPath | None

    def first_line(self) -> str:
        names = [name for name in (self.before, self.after) if name is not None]
        return f"diff --git {_name('a/', names[0])} {_name('b/', names[-1])}\n" if names else ""

    def header(self, mode_before: int, mode_after: int) -> str:
        old, new = _git_mode(mode_before), _git_mode(mode_after)
        if self.before is None or self.after is None:
            return self._one_sided(old, new)
        lines = f"old mode {old}\nnew mode {new}\n" if old != new else ""
        if self.before != self.after:
            lines += f"rename from {_name('', self.before)}\nrename to {_name('', self.after)}\n"
        return lines

    def _one_sided(self, old: str, new: str) -> str:
        if self.after is not None:
            return f"new file mode {new}\n"
        return f"deleted file mode {old}\n" if self.before is not None else ""

    def names(self) -> tuple[str, str]:
        return _name("a/", self.before), _name("b/", self.after)


def _git_mode(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & 0o100 else "100644"


def _name(prefix: str, path: RepoPath | None) -> str:
    return "/dev/null" if path is None else quote(prefix.encode() + path_bytes(path))


def _differ(before: bytes, after: bytes, sides: _Sides) -> str:
    old, new = sides.names()
    return "" if before == after else f"Binary files {old} and {new} differ\n"


def _body(before: bytes, after: bytes, sides: _Sides, context: int) -> str:
    if before == after:
        return ""
    old, new = sides.names()
    # A name with a space ends with a tab, so that readers do not take the rest of it for a time stamp.
    header = "".join(
        f"{mark} {name}\t\n" if " " in name else f"{mark} {name}\n" for mark, name in (("---", old), ("+++", new))
    )
    a, b = split_lines(before), split_lines(after)
    hunks = b"".join(_hunk(a, b, group, context) for group in _groups(edits(a, b), context))
    return header + hunks.decode("utf-8", "surrogateescape")


def _groups(found: Sequence[Edit], context: int) -> Iterator[list[Edit]]:
    """Edits whose context would touch share a hunk."""
    group: list[Edit] = []
    for edit in found:
        if group and edit.a_lo - group[-1].a_hi > 2 * context:
            yield group
            group = []
        group.append(edit)
    if group:
        yield group


def _hunk(a: Sequence[bytes], b: Sequence[bytes], group: Sequence[Edit], context: int) -> bytes:
    lead = min(context, group[0].a_lo)
    trail = min(context, len(a) - group[-1].a_hi)
    a_lo, a_hi = group[0].a_lo - lead, group[-1].a_hi + trail
    b_lo, b_hi = group[0].b_lo - lead, group[-1].b_hi + trail
    lines = [f"@@ -{_span(a_lo, a_hi)} +{_span(b_lo, b_hi)} @@\n".encode()]
    at = a_lo
    for edit in group:
        lines += _marked(b" ", a[at : edit.a_lo])
        lines += _marked(b"-", a[edit.a_lo : edit.a_hi])
        lines += _marked(b"+", b[edit.b_lo : edit.b_hi])
        at = edit.a_hi
    lines += _marked(b" ", a[at:a_hi])
    return b"".join(lines)


def _span(lo: int, hi: int) -> str:
    """A range of lines as hunk headers have it: from 1, the count left out when it is one, an empty one by its end."""
    count = hi - lo
    if count == 1:
        return str(lo + 1)
    return f"{lo + 1 if count else lo},{count}"


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"
