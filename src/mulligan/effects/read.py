"""Looking at single paths: read_file, stat, exists, list_dir, blob.read."""

from __future__ import annotations

import os
import stat
from typing import Any

from mulligan.boundary.verdict import clamped
from mulligan.effects import params
from mulligan.effects.receipt import inline
from mulligan.effects.scene import Scene, too_large
from mulligan.values.limits import LIST_RESULTS_DEFAULT
from mulligan.values.paths import RepoPath, join
from mulligan.values.refusal import Refused
from mulligan.workspace.places import Spot
from mulligan.workspace.reading import Slice, opened, read_bytes, read_lines, refusal_of, whole_page

Fields = dict[str, Any]

_CHARACTER_SLACK_BYTES = 8
"""How much longer than asked a read can get by not cutting characters, and a little more."""


def read_file(scene: Scene, asked: params.ReadFile) -> Fields:
    with scene.spot("read", asked.path) as spot, opened(spot) as handle:
        return _read_answer(scene, asked, spot.path, _read(scene, asked, handle))


def _read(scene: Scene, asked: params.ReadFile, handle: int) -> Slice:
    """No more than is returned: what must be inline is not read beyond the limit that would refuse it anyway."""
    fits, cap = scene.boundary.inline_limit, scene.capability.max_read_bytes
    limit = clamped(asked.max_bytes, cap)
    if asked.output_mode == "require_inline":
        limit = clamped(limit, fits + _CHARACTER_SLACK_BYTES)
    whole = asked.encoding != "bytes"
    # Whoever asks for no more than fits inline gets it inline, a character less rather than one more.
    ceiling = clamped(cap, fits) if limit is not None and limit <= fits else cap
    if asked.by_lines:
        first = asked.offset_lines or 0
        return read_lines(handle, first, asked.max_lines, limit, whole_characters=whole, ceiling=ceiling)
    return read_bytes(handle, asked.offset_bytes or 0, limit, whole_characters=whole, ceiling=ceiling)


def _read_answer(scene: Scene, asked: params.ReadFile, path: RepoPath, found: Slice) -> Fields:
    _check_encoding(asked, found)
    text = False if asked.encoding == "bytes" else None
    try:
        content = scene.answer(found.data, op="read", path=path, mode=asked.output_mode, text=text)
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


def _check_encoding(asked: params.ReadFile, found: Slice) -> None:
    if asked.encoding != "utf8":
        return
    try:
        found.data.decode("utf-8")
    except UnicodeDecodeError:
        words = f"{asked.path} is not UTF-8 there."
        raise Refused("error", "invalid_utf8", words, size_bytes=found.size_bytes) from None


def _range(asked: params.ReadFile, found: Slice) -> Fields | None:
    """Said when what is returned is not what was asked for to the byte."""
    if found.lines is not None:
        lines = {"offset_lines": found.lines[0], "lines": found.lines[1]}
        widened = asked.max_bytes is not None and len(found.data) > asked.max_bytes
        return {**lines, "length_bytes": len(found.data)} if widened else lines
    start = min(asked.offset_bytes or 0, found.size_bytes)
    left = found.size_bytes - start
    length = left if asked.max_bytes is None else min(asked.max_bytes, left)
    as_asked = found.offset == start and len(found.data) == length
    return None if as_asked else {"offset_bytes": found.offset, "length_bytes": len(found.data)}


def stat_path(scene: Scene, asked: params.Stat) -> Fields:
    with scene.spot("stat", asked.path) as spot:
        try:
            status = os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False)
        except OSError as error:
            raise refusal_of(error, scene.shown(spot.path)) from None
    is_dir = stat.S_ISDIR(status.st_mode)
    return {
        "exists": True,
        "is_dir": is_dir,
        "size_bytes": 0 if is_dir else status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "mode": stat.S_IMODE(status.st_mode),
    }


def stat_answer(scene: Scene, asked: params.Stat) -> Fields:
    try:
        return stat_path(scene, asked)
    except Refused as refused:
        if refused.status == "not_found":
            refused.fields["exists"] = False
        raise


def exists(scene: Scene, asked: params.Exists) -> Fields:
    try:
        stat_path(scene, params.Stat(path=asked.path))
    except Refused as refused:
        if refused.status != "not_found":
            raise
        return {"exists": False}
    return {"exists": True}


def list_dir(scene: Scene, asked: params.ListDir) -> Fields:
    most = LIST_RESULTS_DEFAULT if asked.max_results is None else asked.max_results
    with scene.spot("list", "." if asked.path is None else asked.path) as spot:
        names = _names(scene, spot)
        shown = names[:most]
        text = "\n".join(shown).encode("utf-8")
        return {
            "entries": scene.answer(text, op="list", path=spot.path, mode=asked.output_mode),
            "count": len(shown),
            "truncated": len(names) > most,
            "summary_text": f"{len(shown)} {'entry' if len(shown) == 1 else 'entries'}",
        }


def _names(scene: Scene, spot: Spot) -> list[str]:
    """Names in byte order, directories with a trailing slash. A bad link is just a name; a hidden path is none."""
    try:
        handle = os.open(spot.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=spot.parent)
    except NotADirectoryError:
        raise Refused("error", "not_directory", f"{scene.shown(spot.path)} is not a directory.") from None
    except OSError as error:
        raise refusal_of(error, scene.shown(spot.path)) from None
    try:
        with os.scandir(handle) as found:
            raw = sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in found)
    finally:
        os.close(handle)
    names = [(RepoPath(name.decode("utf-8", "surrogateescape")), is_dir) for name, is_dir in raw]
    return [
        scene.one_line(name) + ("/" if is_dir else "")
        for name, is_dir in names
        if scene.boundary.admits("list", join(spot.path, name))
    ]


def read_blob(scene: Scene, asked: params.ReadBlob) -> Fields:
    """A page of a blob, always inline: the way to what was too large to be."""
    ceiling = clamped(scene.boundary.inline_limit, scene.capability.max_read_bytes) or 0
    most = clamped(asked.max_bytes, ceiling) or 0
    digest = scene.blob_named(asked.blob_ref, "unknown_blob")
    size = scene.desk.ledger.blobs.size_of(digest)
    wanted = min(asked.offset_bytes, size)
    window = max(0, wanted - _CHARACTER_SLACK_BYTES)
    data = scene.blob_page(digest, window, most + 2 * _CHARACTER_SLACK_BYTES)
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
