"""grep and glob, under the boundary's limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mulligan.boundary.capability import FsOp
from mulligan.boundary.verdict import clamped
from mulligan.effects import params
from mulligan.effects.scene import Scene
from mulligan.history.repositories import repository_of
from mulligan.values.limits import GLOB_RESULTS_DEFAULT, GREP_RESULTS_DEFAULT
from mulligan.values.paths import ROOT, RepoPath, parse_repo_path
from mulligan.values.refusal import Refused
from mulligan.workspace.search.bases import admit_all
from mulligan.workspace.search.findings import Line
from mulligan.workspace.search.glob import glob
from mulligan.workspace.search.grep import GrepResult, grep

Fields = dict[str, Any]


def _base(scene: Scene, op: FsOp, text: str | None) -> RepoPath:
    """Where a search begins. Without a path it is the working directory, or the parts of the root that are allowed."""
    if text is None and not scene.boundary.admits(op, scene.workdir):
        allowed = scene.boundary.allowed_roots
        if len(allowed) > 1:
            return parse_repo_path(os.path.commonpath(allowed) or ROOT)
        text = f"{scene.boundary.root}/{allowed[0]}" if allowed else "."
    with scene.spot(op, "." if text is None else text) as spot:
        if spot.outside:
            words = f"{spot.path!r} leads out of the root; a search stays inside it."
            raise Refused("forbidden", "symlink_not_allowed", words)
        return spot.path


def _admitting(scene: Scene, op: FsOp, base: RepoPath) -> Callable[[RepoPath], bool]:
    """Files this session may not see are not there for it; git's own are there for no search."""
    if repository_of(base) is not None:
        return lambda _: False
    is_free = not scene.boundary.has_policy and scene.boundary.admits(op, base)
    return admit_all if is_free else (lambda path: scene.boundary.admits(op, path))


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
        admits=_admitting(scene, "search", base),
    )
    for path in {line.path for line in found.lines} if scene.desk.disk.capture.any else ():
        scene.note_withheld(path)
    text = "\n".join(_shown_line(scene, line) for line in found.lines).encode("utf-8")
    count = found.match_count
    return {
        "matches": scene.answer(text, op="search", path=_most_guarded(scene, base, found), mode=asked.output_mode),
        "match_count": count,
        "truncated": found.truncated,
        "engine": found.engine,
        "summary_text": _summary(count, ("match", "matches"), "No matches found", truncated=found.truncated),
    }


def _summary(count: int, forms: tuple[str, str], none: str, *, truncated: bool) -> str:
    """A search that was cut short has not shown that there is nothing."""
    if count:
        return f"{count} {forms[count != 1]}"
    return "The search was cut short before it found anything" if truncated else none


def _most_guarded(scene: Scene, base: RepoPath, found: GrepResult) -> RepoPath:
    """A path whose content a policy keeps out of answers, if there is one in this answer; else the base."""
    paths = dict.fromkeys(line.path for line in found.lines) if scene.boundary.has_policy else ()
    return next((path for path in paths if scene.boundary.keeps_out_of_answers("search", path)), base)


def _shown_line(scene: Scene, line: Line) -> str:
    return f"{scene.shown(line.path)}:{line.line_no}:{line.shown}"


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
        admits=_admitting(scene, "list", base),
    )
    count = found.count
    text = "\n".join(scene.shown(path) for path in found.paths).encode("utf-8")
    return {
        "paths": scene.answer(text, op="list", path=base, mode=asked.output_mode),
        "count": count,
        "truncated": found.truncated,
        "summary_text": _summary(
            count, ("path matched", "paths matched"), "No files matched", truncated=found.truncated
        ),
    }
