"""The effects that only read: read_file, stat, exists, list_dir, grep, glob and blob.read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mulligan.boundary.capability import FsOp, clamped
from mulligan.effects import arguments
from mulligan.effects.context import EffectContext, too_large
from mulligan.effects.receipt import inline
from mulligan.files.read import Slice, opened, read_bytes, read_lines, refusal_of, whole_page
from mulligan.files.resolve import ResolvedPath
from mulligan.files.search.glob import glob
from mulligan.files.search.grep import GrepOptions, GrepResult, grep
from mulligan.files.search.native import admit_all
from mulligan.files.tree.directories import OPEN_DIRECTORY
from mulligan.history.git_changes import repository_of
from mulligan.values.errors import Refused
from mulligan.values.limits import RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath, join, parse_repo_path, to_wire
from mulligan.values.text import is_utf8

if TYPE_CHECKING:
    from mulligan.effects import params

Fields = dict[str, Any]

_CHARACTER_SLACK_BYTES = 8
"""A read may be longer than requested by this much, because it does not cut a character."""


def read_file(context: EffectContext, asked: params.ReadFile) -> Fields:
    with context.resolved("read", asked.path) as resolved, opened(resolved) as handle:
        return _read_answer(context, asked, resolved.path, _read(context, asked, handle))


def _read(context: EffectContext, asked: params.ReadFile, handle: int) -> Slice:
    """Read no more than the answer holds. With `require_inline`, stop at the limit that refuses the answer."""
    fits, cap = context.boundary.inline_limit, context.capability.max_read_bytes
    limit = clamped(asked.max_bytes, cap)
    if asked.output_mode == "require_inline":
        limit = clamped(limit, fits + _CHARACTER_SLACK_BYTES)
    whole = asked.encoding != "bytes"
    # A request that fits inline is answered inline, with one character less rather than one more.
    ceiling = clamped(cap, fits) if limit is not None and limit <= fits else cap
    if asked.by_lines:
        first = asked.offset_lines or 0
        return read_lines(handle, first, asked.max_lines, limit, whole_characters=whole, ceiling=ceiling)
    return read_bytes(handle, asked.offset_bytes or 0, limit, whole_characters=whole, ceiling=ceiling)


def _read_answer(context: EffectContext, asked: params.ReadFile, path: RepoPath, found: Slice) -> Fields:
    if asked.encoding == "utf8" and not is_utf8(found.data):
        words = f"This part of {asked.path} is not UTF-8."
        raise Refused("error", "invalid_utf8", words, size_bytes=found.size_bytes)
    text = False if asked.encoding == "bytes" else None
    try:
        content = context.answer(found.data, op="read", path=path, mode=asked.output_mode, text=text)
    except Refused as refused:
        refused.fields["size_bytes"] = found.size_bytes
        raise
    return {
        "content": content,
        "truncated": found.truncated,
        "size_bytes": found.size_bytes,
        "mtime_ns": found.mtime_ns,
        "range": _range(asked, found),
    }


def _range(asked: params.ReadFile, found: Slice) -> Fields | None:
    """The byte range of the answer, if it differs from the requested one."""
    if found.lines is not None:
        lines = {"offset_lines": found.lines[0], "lines": found.lines[1]}
        widened = asked.max_bytes is not None and len(found.data) > asked.max_bytes
        return {**lines, "length_bytes": len(found.data)} if widened else lines
    start = min(asked.offset_bytes or 0, found.size_bytes)
    left = found.size_bytes - start
    length = left if asked.max_bytes is None else min(asked.max_bytes, left)
    as_asked = found.offset == start and len(found.data) == length
    return None if as_asked else {"offset_bytes": found.offset, "length_bytes": len(found.data)}


def stat_path(context: EffectContext, asked: params.Stat) -> Fields:
    with context.resolved("stat", asked.path) as resolved:
        try:
            status = os.stat(resolved.name, dir_fd=resolved.parent, follow_symlinks=False)
        except OSError as error:
            raise refusal_of(error, context.shown(resolved.path)) from None
    is_dir = stat.S_ISDIR(status.st_mode)
    return {
        "exists": True,
        "is_dir": is_dir,
        "size_bytes": 0 if is_dir else status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "mode": stat.S_IMODE(status.st_mode),
    }


def stat_answer(context: EffectContext, asked: params.Stat) -> Fields:
    try:
        return stat_path(context, asked)
    except Refused as refused:
        if refused.status == "not_found":
            refused.fields["exists"] = False
        raise


def exists(context: EffectContext, asked: params.Exists) -> Fields:
    try:
        stat_path(context, arguments.parsed("Stat", {"path": asked.path}))
    except Refused as refused:
        if refused.status != "not_found":
            raise
        return {"exists": False}
    return {"exists": True}


def list_dir(context: EffectContext, asked: params.ListDir) -> Fields:
    most = RESULTS_DEFAULT if asked.max_results is None else asked.max_results
    with context.resolved("list", "." if asked.path is None else asked.path) as resolved:
        names = _names(context, resolved)
        shown = names[:most]
        text = "\n".join(shown).encode("utf-8")
        return {
            "entries": context.answer(text, op="list", path=resolved.path, mode=asked.output_mode),
            "count": len(shown),
            "truncated": len(names) > most,
            "summary_text": f"{len(shown)} {'entry' if len(shown) == 1 else 'entries'}",
        }


def _names(context: EffectContext, resolved: ResolvedPath) -> list[str]:
    """Names in byte order, directories with a trailing slash. Broken links are included, hidden paths are not."""
    try:
        handle = os.open(resolved.name, OPEN_DIRECTORY, dir_fd=resolved.parent)
    except NotADirectoryError:
        raise Refused("error", "not_directory", f"{context.shown(resolved.path)} is not a directory.") from None
    except OSError as error:
        raise refusal_of(error, context.shown(resolved.path)) from None
    try:
        with os.scandir(handle) as found:
            raw = sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in found)
    finally:
        os.close(handle)
    names = [(RepoPath(name.decode("utf-8", "surrogateescape")), is_dir) for name, is_dir in raw]
    return [
        to_wire(name, one_line=True) + ("/" if is_dir else "")
        for name, is_dir in names
        if context.boundary.allows("list", join(resolved.path, name))
    ]


def read_blob(context: EffectContext, asked: params.ReadBlob) -> Fields:
    """A page of a blob, always inline."""
    ceiling = clamped(context.boundary.inline_limit, context.capability.max_read_bytes) or 0
    most = clamped(asked.max_bytes, ceiling) or 0
    digest = context.blob_named(asked.blob_ref, "unknown_blob")
    size = context.open_root.ledger.blobs.size_of(digest)
    wanted = min(asked.offset_bytes, size)
    window = max(0, wanted - _CHARACTER_SLACK_BYTES)
    data = context.blob_page(digest, window, most + 2 * _CHARACTER_SLACK_BYTES)
    if most == 0 and asked.max_bytes != 0 and asked.offset_bytes < size:
        raise too_large(0)
    begin, page = whole_page(data, wanted - window, most, ceiling=ceiling)
    start = window + begin
    as_asked = start == wanted and len(page) in (asked.max_bytes, size - start)
    return {
        "content": inline(page),
        "size_bytes": size,
        "truncated": start + len(page) < size,
        "range": None if as_asked else {"offset_bytes": start, "length_bytes": len(page)},
    }


def _base(context: EffectContext, op: FsOp, text: str | None) -> RepoPath:
    """The folder where a search begins. Default: the working directory, or the allowed parts of the root."""
    if text is None and not context.boundary.allows(op, context.workdir):
        allowed = context.boundary.allowed_roots
        if len(allowed) > 1:
            return parse_repo_path(os.path.commonpath(allowed) or ROOT)
        text = f"{context.boundary.root}/{allowed[0]}" if allowed else "."
    with context.resolved(op, "." if text is None else text) as resolved:
        if resolved.outside:
            words = f"{resolved.path!r} leads out of the root; a search must stay inside it."
            raise Refused("forbidden", "symlink_not_allowed", words)
        return resolved.path


def _admitting(context: EffectContext, op: FsOp, base: RepoPath) -> Callable[[RepoPath], bool]:
    """A filter for the files of a search: it hides git's own files, and files that the session may not read."""
    if repository_of(base) is not None:
        return lambda _: False
    is_free = not context.boundary.has_policy and context.boundary.allows(op, base)
    return admit_all if is_free else (lambda path: context.boundary.allows(op, path))


def grep_files(context: EffectContext, asked: params.Grep) -> Fields:
    base = _base(context, "search", asked.path)
    wanted = RESULTS_DEFAULT if asked.max_results is None else asked.max_results
    found = grep(
        context.open_root.disk.root.handle,
        base,
        asked.pattern,
        GrepOptions(
            glob_filter=asked.glob_filter,
            case_insensitive=asked.case_insensitive,
            max_results=clamped(wanted, context.capability.max_grep_results) or 0,
            max_scan_files=context.capability.max_scan_files,
            max_scan_bytes=context.capability.max_scan_bytes,
            admits=_admitting(context, "search", base),
        ),
    )
    for path in {line.path for line in found.lines} if context.open_root.disk.capture.any else ():
        context.note_not_captured(path)
    text = "\n".join(f"{context.shown(line.path)}:{line.line_no}:{line.shown}" for line in found.lines).encode("utf-8")
    count = found.match_count
    return {
        "matches": context.answer(text, op="search", path=_most_guarded(context, base, found), mode=asked.output_mode),
        "match_count": count,
        "truncated": found.truncated,
        "engine": found.engine,
        "summary_text": _summary(count, ("match", "matches"), "No matches found", truncated=found.truncated),
    }


def _summary(count: int, forms: tuple[str, str], none: str, *, truncated: bool) -> str:
    """The summary of a search. A search that was cut short does not say that there is no match."""
    if count:
        return f"{count} {forms[count != 1]}"
    return "The search was cut short before it found anything" if truncated else none


def _most_guarded(context: EffectContext, base: RepoPath, found: GrepResult) -> RepoPath:
    """A path in this answer whose content a policy keeps out of answers; else the base."""
    paths = dict.fromkeys(line.path for line in found.lines) if context.boundary.has_policy else ()
    return next((path for path in paths if context.boundary.keeps_out_of_answers("search", path)), base)


def glob_files(context: EffectContext, asked: params.Glob) -> Fields:
    base = _base(context, "list", asked.path)
    wanted = RESULTS_DEFAULT if asked.max_results is None else asked.max_results
    found = glob(
        context.open_root.disk.root.handle,
        base,
        asked.pattern,
        include_ignored=asked.include_ignored,
        max_results=clamped(wanted, context.capability.max_glob_results) or 0,
        max_scan_files=context.capability.max_scan_files,
        admits=_admitting(context, "list", base),
    )
    count = found.count
    text = "\n".join(context.shown(path) for path in found.paths).encode("utf-8")
    return {
        "paths": context.answer(text, op="list", path=base, mode=asked.output_mode),
        "count": count,
        "truncated": found.truncated,
        "summary_text": _summary(
            count, ("path matched", "paths matched"), "No files matched", truncated=found.truncated
        ),
    }
