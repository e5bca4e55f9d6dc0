"""Taking the state of live files as one consistent whole, or noticing that they would not hold still."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mulligan.effects.substrate.bench import Ask, Taken, moved, unique_paths
from mulligan.effects.substrate.failure import Failure
from mulligan.values.paths import RepoPath, to_wire
from mulligan.workspace.census import GONE, Seen
from mulligan.workspace.fingerprint import TreeState
from mulligan.workspace.lease import Lease
from mulligan.workspace.listing import Listed
from mulligan.workspace.manifest import Captured, Manifest

T = TypeVar("T")

TRIES = 8
"""How often a tree that moves is looked at before whoever asked is told so."""


def create(ask: Ask, args: Mapping[str, Any]) -> dict[str, Any]:
    """snapshot.create"""
    if "paths" not in args and "lease_id" not in args:
        raise Failure("INVALID_ARGUMENT", "Give paths to capture, or a lease_id whose files to capture.")
    lease = ask.lease(args["lease_id"])[0] if "lease_id" in args else None
    paths = unique_paths(args["paths"]) if "paths" in args else touched_files(lease)
    identifier, taken = until_still(ask, lambda: _kept(ask, captured(ask, paths)))
    if lease is not None:
        ask.touch(lease, taken.seen)
    return {
        "cache_hint": "immutable",
        "snapshot_id": identifier,
        "fingerprint": taken.fingerprint.to_json(),
        "manifest_stats": taken.manifest.stats(),
        "skipped": [{"path": to_wire(path), "reason": reason} for path, reason in taken.skipped],
    }


def _kept(ask: Ask, taken: Taken) -> tuple[str, Taken]:
    shelf = ask.bench.shelf
    return shelf.put(ask.named.session, taken.fingerprint, taken.manifest, bytes_of=taken.bytes_of), taken


def until_still(ask: Ask, act: Callable[[], T]) -> T:
    """Try a few times while others are at work in the tree: what is taken of it needs only a moment of rest."""
    for _ in range(TRIES - 1):
        try:
            return act()
        except Failure as failure:
            if failure.code != "REPO_CHANGED":
                raise
            ask.bench.last_capture = None
    return act()


def touched_files(lease: Lease | None) -> list[RepoPath]:
    """What was read or listed under a lease and is a file or link, in byte order."""
    touched = {} if lease is None else lease.touched
    return sorted((path for path, seen in touched.items() if seen.kind in ("file", "symlink")), key=os.fsencode)


def captured(ask: Ask, paths: Sequence[RepoPath]) -> Taken:
    """Everything at and below the paths, links as links. Raises Failure NOT_FOUND, or REPO_CHANGED if it moved.

    Asked again for the same while nothing at all has moved, the answer is the same.
    """
    before = ask.bench.leases.fingerprints.state()
    asked = (before.epoch, tuple(paths), ask.boundary)
    if ask.bench.last_capture is not None and ask.bench.last_capture[0] == asked:
        return ask.bench.last_capture[1]
    taken = _captured(ask, paths, before)
    ask.bench.last_capture = (asked, taken)
    return taken


def _captured(ask: Ask, paths: Sequence[RepoPath], before: TreeState) -> Taken:
    seen, dirs, skipped = _looked_at(ask, paths)
    _check_still(ask, before, seen)
    entries = [
        Captured(path, now.digest, now.size, now.mode, "symlink" if now.kind == "symlink" else "file")
        for path, now in seen.items()
        if now.digest is not None
    ]
    manifest = Manifest.of(entries, dirs.items(), paths)

    def bytes_of(entry: Captured) -> bytes:
        with ask.looking() as handles:
            return ask.read(handles, entry.path, seen[entry.path])

    return Taken(manifest, before.fingerprint, seen, tuple(sorted(skipped.items())), bytes_of)


def _looked_at(
    ask: Ask, paths: Sequence[RepoPath]
) -> tuple[dict[RepoPath, Seen], dict[RepoPath, int], dict[RepoPath, str]]:
    seen: dict[RepoPath, Seen] = {}
    dirs: dict[RepoPath, int] = {}
    skipped: dict[RepoPath, str] = {}
    with ask.looking() as handles:
        for path in paths:
            real = ask.real_path("read", path, final=False)
            if ".git" in real.split("/"):
                skipped[real] = "git_directory"
                continue
            for one in ask.below("read", real):
                reason = _why_skipped(ask, one)
                if reason is not None:
                    skipped[one.path] = reason
                    continue
                try:
                    now = ask.seen(handles, one.path)
                except PermissionError:
                    skipped[one.path] = "unreadable"
                    continue
                if now.kind == "dir":
                    dirs |= {one.path: now.mode} if one.empty else {}
                elif now == GONE or now.digest is None:
                    raise moved(one.path)
                else:
                    seen[one.path] = now
    return seen, dirs, skipped


def _why_skipped(ask: Ask, one: Listed) -> str | None:
    if one.kind == "file" and ask.desk.disk.capture.withheld(one.path) is not None:
        return "not_captured"
    return "special_file" if one.kind == "special" else None


def _check_still(ask: Ask, before: TreeState, seen: Mapping[RepoPath, Seen]) -> None:
    """Whether all of it was so at one moment: nothing git can tell has changed, and every file is as it was read."""
    after = ask.bench.leases.fingerprints.state()
    if after.epoch == before.epoch:
        return
    if (after.fingerprint, after.facts) != (before.fingerprint, before.facts):
        raise Failure("REPO_CHANGED", "The tree changed while it was being captured; try again.")
    with ask.looking() as handles:
        for path, was in seen.items():
            if ask.seen(handles, path) != was:
                raise moved(path)
