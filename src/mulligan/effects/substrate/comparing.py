"""diff, changes and info: one state of files beside another."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mulligan.effects.substrate.bench import Ask, parse_path
from mulligan.effects.substrate.failure import Failure
from mulligan.effects.substrate.reading import immutable, snapshot_of, until_dirty
from mulligan.effects.substrate.shelf import Snapshot
from mulligan.values.paths import ROOT, RepoPath, is_below, path_bytes, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.census import GONE, Seen
from mulligan.workspace.diffing import unified_diff
from mulligan.workspace.fingerprint import TreeState
from mulligan.workspace.git import GitFailed, GitReader, Tracked, oid_of
from mulligan.workspace.manifest import Captured, changes_between

Body = dict[str, Any]
Args = Mapping[str, Any]


@plain(slots=True, frozen=True)
class Side:
    """One side of a file's diff: its bytes (of a link, its target) and its mode, as git counts them."""

    content: bytes
    mode: int


def info(ask: Ask, args: Args) -> Body:
    """snapshot.info"""
    snapshot = ask.snapshot(args["snapshot_id"])
    return immutable({"fingerprint": snapshot.fingerprint.to_json(), "manifest_stats": snapshot.manifest.stats()})


# changes


def changes(ask: Ask, args: Args) -> Body:
    """snapshot.changes"""
    snapshot = ask.snapshot(args["snapshot_id"])
    base = args.get("from_snapshot_id") or ask.bench.shelf.parent_of(snapshot.id)
    if base is not None:
        found = changes_between(ask.snapshot(base).manifest, snapshot.manifest)
        rows = [(path, str(status)) for path, status in found]
    else:
        rows = _changes_since_commit(ask, snapshot)
    return immutable({"changes": [{"path": to_wire(path), "status": status} for path, status in rows]})


def _changes_since_commit(ask: Ask, snapshot: Snapshot) -> list[tuple[RepoPath, str]]:
    """Against the commit the snapshot was taken at. A file is deleted if it would be here, had it existed."""
    tracked = {one.path: one for one in _commit(ask, snapshot.fingerprint.head_oid)}
    rows: list[tuple[RepoPath, str]] = []
    for entry in snapshot.manifest.entries:
        old = tracked.pop(entry.path, None)
        if old is None:
            rows.append((entry.path, "added"))
        elif _kind(old.mode) != entry.kind or oid_of(ask.bench.shelf.read(entry.blob), like=old.oid) != old.oid:
            rows.append((entry.path, "modified"))
    admits = ask.boundary.admits
    rows += [(path, "deleted") for path in tracked if snapshot.manifest.covers(path) and admits(ask.op, path)]
    return sorted(rows, key=lambda row: path_bytes(row[0]))


def _commit(ask: Ask, oid: str) -> list[Tracked]:
    reader = ask.bench.leases.fingerprints.reader()
    if reader is None or not oid:
        return []
    try:
        return [one for one in reader.tree(commit=oid) if not one.is_submodule]
    except GitFailed:
        return []


def _kind(mode: int) -> str:
    return "symlink" if stat.S_ISLNK(mode) else "file"


# diff


def diff(ask: Ask, args: Args) -> Body:
    """snapshot.diff"""
    base = parse_path(args["path"]) if "path" in args else ROOT
    if base != ROOT:
        ask.boundary.check_path(ask.op, base)
    snapshot = snapshot_of(ask, args)
    if snapshot is not None:
        return immutable({"diff": _diff_snapshots(ask, snapshot, base, args.get("from_snapshot_id"))})
    lease, state = ask.lease(args.get("lease_id"))
    reader = ask.bench.leases.fingerprints.reader()
    old = _committed(reader, state, base, args) if "from_snapshot_id" not in args else _kept(ask, args, base)
    old = {path: side for path, side in old.items() if ask.may_show(path)}
    seen = _seen_now(ask, [*old, *_told(state, base)], base)
    text = _text(ask, old, _sides_now(ask, seen))
    ask.touch(lease, seen)
    return until_dirty(lease, state.fingerprint, {"diff": text})


def _diff_snapshots(ask: Ask, snapshot: Snapshot, base: RepoPath, other: str | None) -> str:
    origin = other or ask.bench.shelf.parent_of(snapshot.id)
    old = {} if origin is None else _sides_of(ask, ask.snapshot(origin).manifest.entries, base)
    return _text(ask, old, _sides_of(ask, snapshot.manifest.entries, base))


def _sides_of(ask: Ask, entries: Iterable[Captured], base: RepoPath) -> dict[RepoPath, Side]:
    below = [one for one in entries if one.path == base or is_below(one.path, base)]
    chosen = [one for one in below if ask.may_show(one.path)]
    return {one.path: Side(ask.bench.shelf.read(one.blob), _git_mode(one.kind, one.mode)) for one in chosen}


def _kept(ask: Ask, args: Args, base: RepoPath) -> dict[RepoPath, Side]:
    return _sides_of(ask, ask.snapshot(args["from_snapshot_id"]).manifest.entries, base)


def _git_mode(kind: str, mode: int) -> int:
    return stat.S_IFLNK if kind == "symlink" else mode


def _told(state: TreeState, base: RepoPath) -> list[RepoPath]:
    """The paths git has something to say about, at or below the base."""
    paths = [path_from_bytes(path) for path in state.facts if not path.endswith(b"/")]
    return [path for path in paths if path == base or is_below(path, base)]


def _committed(reader: GitReader | None, state: TreeState, base: RepoPath, args: Args) -> dict[RepoPath, Side]:
    """What git has of the base, and of the paths it says have changed below it; nothing without git."""
    wanted = {base, *_told(state, base)}
    if reader is None or wanted == {ROOT}:
        return {}
    try:
        source = reader.tree if args["against"] == "head" else reader.staged
        rows = [one for one in source([base]) if one.path in wanted and not one.is_submodule]
        contents = reader.contents(sorted({one.oid for one in rows}))
    except GitFailed as error:
        raise Failure("INTERNAL", f"git could not be read: {error}") from None
    return {one.path: Side(contents[one.oid], _tracked_mode(one)) for one in rows if one.oid in contents}


def _tracked_mode(one: Tracked) -> int:
    return stat.S_IFLNK if stat.S_ISLNK(one.mode) else stat.S_IMODE(one.mode)


def _seen_now(ask: Ask, paths: Sequence[RepoPath], base: RepoPath) -> dict[RepoPath, Seen]:
    """What the paths hold. A base that is named and is a file is looked at even if nothing is said of it."""
    seen: dict[RepoPath, Seen] = {}
    with ask.looking() as handles:
        if base != ROOT:
            now = ask.seen(handles, base)
            if now == GONE and not paths:
                raise Failure("NOT_FOUND", f"{base} does not exist.")
            if now.kind in ("file", "symlink") and ask.may_show(base):
                seen[base] = now
        for path in paths:
            if ask.may_show(path):
                seen[path] = ask.seen(handles, path)
    return {path: now for path, now in seen.items() if now.kind in ("file", "symlink", "absent")}


def _sides_now(ask: Ask, seen: Mapping[RepoPath, Seen]) -> dict[RepoPath, Side]:
    with ask.looking() as handles:
        return {
            path: Side(ask.read(handles, path, now), _git_mode(now.kind, now.mode))
            for path, now in seen.items()
            if now != GONE
        }


def _text(ask: Ask, old: Mapping[RepoPath, Side], new: Mapping[RepoPath, Side]) -> str:
    texts: list[str] = []
    size = 0
    for path in sorted({*old, *new}, key=path_bytes):
        texts.append(_one(path, old.get(path), new.get(path)))
        size += len(texts[-1].encode("utf-8", "surrogatepass"))
        ask.check_fits(size)
    return "".join(texts)


def _one(path: RepoPath, old: Side | None, new: Side | None) -> str:
    return unified_diff(
        b"" if old is None else old.content,
        b"" if new is None else new.content,
        path_before=None if old is None else path,
        path_after=None if new is None else path,
        mode_before=0o644 if old is None else old.mode,
        mode_after=0o644 if new is None else new.mode,
        only_utf8=True,
    )
