"""Looking at single paths: read_file, stat, exists, list_dir, blob.read."""

from __future__ import annotations

import os
import stat
from typing import Any

from mulligan.boundary.verdict import clamped
from mulligan.effects import params
from mulligan.effects.scene import Scene
from mulligan.values.limits import LIST_RESULTS_DEFAULT
from mulligan.values.paths import RepoPath, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.reading import Slice, opened, read_bytes, read_lines, refusal_of

Fields = dict[str, Any]


def read_file(scene: Scene, asked: params.ReadFile) -> Fields:
    if asked.encoding not in (None, "utf8", "bytes"):
        raise Refused("error", "invalid_encoding", "encoding is 'utf8' or 'bytes'.")
    by_lines = asked.offset_lines is not None or asked.max_lines is not None
    if by_lines and asked.offset_bytes is not None:
        raise Refused("error", "invalid_params", "Read by bytes or by lines, not both.")
    limit = clamped(asked.max_bytes, scene.capability.max_read_bytes)
    with scene.spot("read", asked.path) as spot, opened(spot) as handle:
        if by_lines:
            found = read_lines(handle, asked.offset_lines or 0, asked.max_lines, limit)
        else:
            found = read_bytes(handle, asked.offset_bytes or 0, limit, whole_characters=asked.encoding != "bytes")
        return _read_answer(scene, asked, spot.path, found)


def _read_answer(scene: Scene, asked: params.ReadFile, path: RepoPath, found: Slice) -> Fields:
    _check_encoding(asked, found)
    text = False if asked.encoding == "bytes" else None
    limit = scene.boundary.inline_limit("read", path)
    return {
        "content": scene.answer(found.data, limit=limit, mode=asked.output_mode, text=text),
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
        return {"offset_lines": found.lines[0], "lines": found.lines[1]}
    start = min(asked.offset_bytes or 0, found.size_bytes)
    widened = found.offset != start or (asked.max_bytes is not None and len(found.data) > asked.max_bytes)
    return {"offset_bytes": found.offset, "length_bytes": len(found.data)} if widened else None


def stat_path(scene: Scene, asked: params.Stat) -> Fields:
    with scene.spot("stat", asked.path) as spot:
        try:
            status = os.stat(spot.name, dir_fd=spot.parent, follow_symlinks=False)
        except OSError as error:
            raise _absent(error, asked.path) from None
    is_dir = stat.S_ISDIR(status.st_mode)
    return {
        "exists": True,
        "is_dir": is_dir,
        "size_bytes": 0 if is_dir else status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "mode": stat.S_IMODE(status.st_mode),
    }


def _absent(error: OSError, path: str) -> Refused:
    refused = refusal_of(error, path)
    if refused.status == "not_found":
        refused.fields["exists"] = False
    return refused


def exists(scene: Scene, asked: params.Exists) -> Fields:
    try:
        stat_path(scene, params.Stat(path=asked.path))
    except Refused as refused:
        if refused.status != "not_found":
            raise
        return {"exists": False}
    return {"exists": True}


def list_dir(scene: Scene, asked: params.ListDir) -> Fields:
    most = asked.max_results if asked.max_results is not None else LIST_RESULTS_DEFAULT
    with scene.spot("list", asked.path or ".") as spot:
        try:
            handle = os.open(spot.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=spot.parent)
        except NotADirectoryError:
            raise Refused("error", "not_directory", f"{spot.path} is not a directory.") from None
        except OSError as error:
            raise refusal_of(error, spot.path) from None
        try:
            names = _names(handle)
        finally:
            os.close(handle)
        shown = names[:most]
        limit = scene.boundary.inline_limit("list", spot.path)
    text = "\n".join(shown)
    return {
        "entries": scene.answer(text.encode("utf-8"), limit=limit, mode=asked.output_mode),
        "count": len(shown),
        "truncated": len(names) > most,
        "summary_text": f"{len(shown)} {'entry' if len(shown) == 1 else 'entries'}",
    }


def _names(handle: int) -> list[str]:
    """Names in byte order, directories with a trailing slash; a bad link is just a name."""
    with os.scandir(handle) as found:
        raw = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in found]
    return [
        to_wire(RepoPath(name.decode("utf-8", "surrogateescape"))) + ("/" if is_dir else "")
        for name, is_dir in sorted(raw)
    ]


def read_blob(scene: Scene, asked: params.ReadBlob) -> Fields:
    data = scene.blob(asked.blob_ref, "unknown_blob")
    limit = clamped(asked.max_bytes, scene.capability.max_read_bytes)
    inline = scene.boundary.inline_limit("read", RepoPath("."))
    most = inline if limit is None else min(limit, inline)
    part = data[asked.offset_bytes : asked.offset_bytes + most]
    return {
        "content": scene.answer(part, limit=max(inline, len(part)), mode="require_inline"),
        "size_bytes": len(data),
        "truncated": asked.offset_bytes + len(part) < len(data),
    }
