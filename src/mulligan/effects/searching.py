"""grep and glob, under the boundary's limits."""

from __future__ import annotations

import os
from typing import Any

from mulligan.boundary.capability import FsOp
from mulligan.boundary.verdict import clamped
from mulligan.effects import params
from mulligan.effects.scene import Scene
from mulligan.values.limits import GLOB_RESULTS_DEFAULT, GREP_RESULTS_DEFAULT
from mulligan.values.paths import RepoPath, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.search.glob import glob
from mulligan.workspace.search.grep import grep, render

Fields = dict[str, Any]


def _base(scene: Scene, op: FsOp, text: str | None) -> RepoPath:
    with scene.spot(op, text or ".") as spot:
        try:
            os.lstat(spot.name, dir_fd=spot.parent)
        except FileNotFoundError:
            raise Refused("not_found", "path_not_found", f"{text} does not exist.") from None
        return spot.path


def grep_files(scene: Scene, asked: params.Grep) -> Fields:
    base = _base(scene, "search", asked.path)
    wanted = GREP_RESULTS_DEFAULT if asked.max_results is None else asked.max_results
    found = grep(
        scene.desk.disk.root.handle,
        base,
        asked.pattern,
        glob_filter=asked.glob_filter,
        case_insensitive=asked.case_insensitive,
        max_results=clamped(wanted, scene.capability.max_grep_results) or 0,
        max_scan_files=scene.capability.max_scan_files,
        max_scan_bytes=scene.capability.max_scan_bytes,
        admits=lambda path: _admits(scene, "search", path),
    )
    count = found.match_count
    limit = scene.boundary.inline_limit("search", base)
    return {
        "matches": scene.answer(render(found).encode("utf-8", "surrogateescape"), limit=limit, mode=asked.output_mode),
        "match_count": count,
        "truncated": found.truncated,
        "engine": found.engine,
        "summary_text": f"{count} match{'' if count == 1 else 'es'}" if count else "No matches found",
    }


def glob_files(scene: Scene, asked: params.Glob) -> Fields:
    base = _base(scene, "list", asked.path)
    wanted = GLOB_RESULTS_DEFAULT if asked.max_results is None else asked.max_results
    found = glob(
        scene.desk.disk.root.handle,
        base,
        asked.pattern,
        include_ignored=asked.include_ignored,
        max_results=clamped(wanted, scene.capability.max_glob_results) or 0,
        max_scan_files=scene.capability.max_scan_files,
        admits=lambda path: _admits(scene, "list", path),
    )
    count = len(found.paths)
    text = "\n".join(to_wire(path) for path in found.paths)
    limit = scene.boundary.inline_limit("list", base)
    return {
        "paths": scene.answer(text.encode("utf-8"), limit=limit, mode=asked.output_mode),
        "count": count,
        "truncated": found.truncated,
        "summary_text": f"{count} path{'' if count == 1 else 's'} matched" if count else "No files matched",
    }


def _admits(scene: Scene, op: FsOp, path: RepoPath) -> bool:
    """Files this session may not see are not there for it."""
    try:
        scene.boundary.check_path(op, path)
    except Refused:
        return False
    return True
