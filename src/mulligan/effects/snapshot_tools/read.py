"""The snapshot tools that read: of the live tree, under a lease, or of a snapshot.

`create` and `export` need one state of many live files. They read the files, then check that nothing has changed since
they began; if something has, they try again a few times and then answer REPO_CHANGED (`retry_while_changing`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mulligan.boundary.capability import clamped
from mulligan.effects.snapshot_tools import models
from mulligan.effects.snapshot_tools.context import (
    SEARCHED_MAX_BYTES,
    CapturedTree,
    ToolRequest,
    changed_meanwhile,
    parents_seen,
    parse_path,
    unique_paths,
)
from mulligan.effects.snapshot_tools.store import SnapshotToolError, StoredSnapshot
from mulligan.files.diff import looks_binary, unified_diff
from mulligan.files.git import GitError, GitReader, Tracked, oid_of
from mulligan.files.read import Listed, list_below
from mulligan.files.search.native import Match, Matcher
from mulligan.files.snapshot.fingerprint import Fingerprint, TreeState
from mulligan.files.snapshot.lease import Lease
from mulligan.files.snapshot.manifest import CapturedFile, Manifest, changes_between, rows_below, tar_of
from mulligan.files.tree.index import GONE, PathState
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, is_within, path_bytes, path_from_bytes, to_wire
from mulligan.values.text import in_base64, is_utf8

T = TypeVar("T")

TRIES = 8
"""How often a tool reads a changing tree before it answers REPO_CHANGED."""


def create(request: ToolRequest, asked: models.CreateParams) -> dict[str, Any]:
    """snapshot.create"""
    if asked.paths is None and asked.lease_id is None:
        raise SnapshotToolError("INVALID_ARGUMENT", "Give paths to capture, or a lease_id whose files to capture.")
    lease = request.lease(asked.lease_id)[0] if asked.lease_id is not None else None
    paths = unique_paths(asked.paths) if asked.paths is not None else touched_files(lease)
    identifier, taken = retry_while_changing(request, lambda: _kept(request, captured(request, paths)))
    if lease is not None:
        request.add_read_paths(lease, taken.seen)
    return {
        "cache_hint": "immutable",
        "snapshot_id": identifier,
        "fingerprint": taken.fingerprint.to_json(),
        "manifest_stats": taken.manifest.stats(),
        "skipped": [{"path": to_wire(path), "reason": reason} for path, reason in taken.skipped],
    }


def _kept(request: ToolRequest, taken: CapturedTree) -> tuple[str, CapturedTree]:
    snapshots = request.context.snapshots
    return snapshots.put(request.named.session, taken.fingerprint, taken.manifest, bytes_of=taken.bytes_of), taken


def retry_while_changing(request: ToolRequest, act: Callable[[], T]) -> T:
    """Run `act` again, a few times, while other processes change the tree."""
    for _ in range(TRIES - 1):
        try:
            return act()
        except SnapshotToolError as failure:
            if failure.code != "REPO_CHANGED":
                raise
            request.context.last_capture = None
    return act()


def touched_files(lease: Lease | None) -> list[RepoPath]:
    """The files and links that were read or listed under a lease, in byte order."""
    touched = {} if lease is None else lease.touched
    return sorted((path for path, seen in touched.items() if seen.kind in ("file", "symlink")), key=os.fsencode)


def captured(request: ToolRequest, paths: Sequence[RepoPath]) -> CapturedTree:
    """Everything at and below the paths, links as links. Raises NOT_FOUND, or REPO_CHANGED if the tree changes.

    While nothing changes, the same request gets the same answer without reading again.
    """
    before = request.context.leases.fingerprints.state()
    wanted = (before.epoch, tuple(paths), request.boundary)
    if request.context.last_capture is not None and request.context.last_capture[0] == wanted:
        return request.context.last_capture[1]
    taken = _captured(request, paths, before)
    request.context.last_capture = (wanted, taken)
    return taken


def _captured(request: ToolRequest, paths: Sequence[RepoPath], before: TreeState) -> CapturedTree:
    seen, dirs, skipped = _read_states(request, paths)
    _check_unchanged(request, before, seen)
    entries = [
        CapturedFile(path, now.digest, now.size, now.mode, "symlink" if now.kind == "symlink" else "file")
        for path, now in seen.items()
        if now.digest is not None
    ]
    manifest = Manifest.of(entries, dirs.items(), paths)

    def bytes_of(entry: CapturedFile) -> bytes:
        with request.handles() as handles:
            return request.read(handles, entry.path, seen[entry.path])

    return CapturedTree(manifest, before.fingerprint, seen, tuple(sorted(skipped.items())), bytes_of)


def _read_states(
    request: ToolRequest, paths: Sequence[RepoPath]
) -> tuple[dict[RepoPath, PathState], dict[RepoPath, int], dict[RepoPath, str]]:
    seen: dict[RepoPath, PathState] = {}
    dirs: dict[RepoPath, int] = {}
    skipped: dict[RepoPath, str] = {}
    with request.handles() as handles:
        for path in paths:
            real = request.real_path("read", path, final=False)
            if ".git" in real.split("/"):
                skipped[real] = "git_directory"
                continue
            for one in request.below("read", real):
                reason = _why_skipped(request, one)
                if reason is not None:
                    skipped[one.path] = reason
                    continue
                try:
                    now = request.seen(handles, one.path)
                except PermissionError:
                    skipped[one.path] = "unreadable"
                    continue
                if now.kind == "dir":
                    dirs |= {one.path: now.mode} if one.empty else {}
                elif now == GONE or now.digest is None:
                    raise changed_meanwhile(one.path)
                else:
                    seen[one.path] = now
    return seen, dirs, skipped


def _why_skipped(request: ToolRequest, one: Listed) -> str | None:
    if one.kind == "file" and request.open_root.disk.capture.withheld(one.path) is not None:
        return "not_captured"
    return "special_file" if one.kind == "special" else None


def _check_unchanged(request: ToolRequest, before: TreeState, seen: Mapping[RepoPath, PathState]) -> None:
    """Check that all these states held at one moment: git reports no change, and every file is as it was read."""
    after = request.context.leases.fingerprints.state()
    if after.epoch == before.epoch:
        return
    if (after.fingerprint, after.facts) != (before.fingerprint, before.facts):
        raise SnapshotToolError("REPO_CHANGED", "The tree changed while it was being captured; try again.")
    with request.handles() as handles:
        for path, was in seen.items():
            if request.seen(handles, path) != was:
                raise changed_meanwhile(path)


Body = dict[str, Any]


def immutable(body: Body) -> Body:
    return {"cache_hint": "immutable", **body}


def until_dirty(lease: Lease, fingerprint: Fingerprint, body: Body) -> Body:
    return {"cache_hint": "until_dirty", "lease_id": lease.id, "fingerprint": fingerprint.to_json(), **body}


def snapshot_of(request: ToolRequest, asked: models.HybridParams) -> StoredSnapshot | None:
    """The requested snapshot; None for the live tree."""
    return None if asked.mode == "worktree" else request.snapshot(snapshot_id_of(asked))


def snapshot_id_of(asked: models.HybridParams) -> str:
    if asked.snapshot_id is None:
        raise SnapshotToolError("INVALID_ARGUMENT", "mode 'snapshot' needs a snapshot_id.")
    return str(asked.snapshot_id)


def list_entries(request: ToolRequest, asked: models.ListParams) -> Body:
    """snapshot.list"""
    path = parse_path(asked.path)
    snapshot = snapshot_of(request, asked)
    if snapshot is None:
        return _list_live(request, path, asked)
    rows = rows_below(snapshot.manifest, path, depth=asked.depth)
    shown = _Rows(request)
    for row in _page(rows, asked):
        entry = {"path": to_wire(row.path), "type": "dir"} if row.entry is None else _entry_of(row.entry)
        if not shown.add(entry):
            break
    return immutable({"entries": shown.items, **_extent(len(rows), asked, shown)})


def _page(rows: Sequence[Any], asked: models.ListParams) -> Sequence[Any]:
    return rows[asked.offset : asked.offset + asked.limit]


def _extent(total: int, asked: models.ListParams, shown: _Rows) -> Body:
    return {"total": total, "truncated": shown.is_full or asked.offset + asked.limit < total}


class _Rows:
    """The rows of an answer, as many as fit in `max_inline_bytes`."""

    def __init__(self, request: ToolRequest) -> None:
        self._room = request.capability.max_inline_bytes
        self.items: list[Body] = []
        self.is_full = False

    def add(self, item: Body) -> bool:
        """False if the row did not fit. Then no later row is added either."""
        if self._room is not None:
            self._room -= len(encode(item)) + 1
            self.is_full = self.is_full or self._room < 0
        if not self.is_full:
            self.items.append(item)
        return not self.is_full


def _entry_of(entry: CapturedFile) -> Body:
    return {"path": to_wire(entry.path), "type": entry.kind, "size": entry.size, "blob": entry.blob}


def _list_live(request: ToolRequest, path: RepoPath, asked: models.ListParams) -> Body:
    lease, state = request.lease(asked.lease_id)
    real = request.real_path("list", path)
    rows = sorted(
        (one for one in _rows_live(request, real, asked) if one.kind != "special"), key=lambda one: path_bytes(one.path)
    )
    shown = _Rows(request)
    seen: dict[RepoPath, PathState] = {}
    with request.handles() as handles:
        for one in _page(rows, asked):
            now = request.seen(handles, one.path)
            entry: Body = {"path": to_wire(one.path), "type": one.kind}
            if not shown.add(entry | ({} if now.digest is None else {"size": now.size, "blob": now.digest})):
                break
            seen[one.path] = now
        above = parents_seen([*seen, real], lambda parent: request.seen(handles, parent))
    files = {one: now for one, now in seen.items() if now.kind != "dir"}
    request.add_read_paths(lease, {**above, **files})
    return until_dirty(lease, state.fingerprint, {"entries": shown.items, **_extent(len(rows), asked, shown)})


def _rows_live(request: ToolRequest, real: RepoPath, asked: models.ListParams) -> Iterator[Listed]:
    with request.handles() as handles:
        is_dir = request.seen(handles, real).kind == "dir"
    if not is_dir:
        return request.below("list", real)
    admits = request.boundary.allows
    found = list_below(
        request.open_root.disk.root.handle, real, depth=asked.depth, include_ignored=asked.include_ignored
    )
    return (one for one in found if admits("list", one.path))


def read_file(request: ToolRequest, asked: models.FileParams) -> Body:
    """snapshot.file"""
    path = parse_path(asked.path)
    snapshot = snapshot_of(request, asked)
    if snapshot is None:
        return _read_live(request, path, asked)
    entry = request.context.snapshots.target_of(snapshot, path)
    if entry is None:
        raise SnapshotToolError("NOT_FOUND", f"{asked.path} is not in the snapshot.")
    request.check_shown(entry.path)
    request.check_fits(entry.size)
    return immutable(_content(path, request.context.snapshots.read(entry.blob), entry.blob))


def _read_live(request: ToolRequest, path: RepoPath, asked: models.FileParams) -> Body:
    lease, state = request.lease(asked.lease_id)
    real = request.real_path("read", path)
    with request.handles() as handles:
        seen = request.seen(handles, real)
        if seen == GONE:
            raise SnapshotToolError("NOT_FOUND", f"{asked.path} does not exist.")
        if seen.kind != "file" or seen.digest is None:
            raise SnapshotToolError("INVALID_ARGUMENT", f"{asked.path} is not a file.")
        request.check_shown(real)
        request.check_fits(seen.size)
        data = request.read(handles, real, seen)
    request.add_read_paths(lease, {real: seen})
    return until_dirty(lease, state.fingerprint, _content(path, data, seen.digest))


def _content(path: RepoPath, data: bytes, blob: Digest) -> Body:
    text = text_of(data)
    encoded = text is None or text.startswith("base64:")
    return {
        "path": to_wire(path),
        "content": in_base64(data) if encoded else text,
        "size": len(data),
        "blob": blob,
        "eol": "none" if text is None else line_ends_of(data),
    }


def text_of(data: bytes) -> str | None:
    return None if looks_binary(data) or not is_utf8(data) else data.decode("utf-8")


def line_ends_of(data: bytes) -> str:
    windows, all_ends = data.count(b"\r\n"), data.count(b"\n")
    if not all_ends:
        return "none"
    if not windows:
        return "lf"
    return "crlf" if windows == all_ends else "mixed"


def grep(request: ToolRequest, asked: models.GrepParams) -> Body:
    """snapshot.grep"""
    matcher = Matcher(asked.pattern, case_insensitive=asked.case_insensitive)
    paths = unique_paths(asked.paths) if asked.paths is not None else _allowed_paths(request)
    snapshot = snapshot_of(request, asked)
    if snapshot is not None:
        files = [one for one in snapshot.manifest.entries if one.kind == "file" and one.size <= SEARCHED_MAX_BYTES]
        entries = [one for one in files if any(is_within(one.path, base) for base in paths)]
        shown = (one for one in entries if request.may_show(one.path))
        texts = ((one.path, request.context.snapshots.read(one.blob)) for one in shown)
        return immutable(_Found(matcher, asked, request).among(texts))
    lease, state = request.lease(asked.lease_id)
    seen: dict[RepoPath, PathState] = {}
    found = _Found(matcher, asked, request)
    body = found.among(_live_texts(request, paths, seen))
    touched = {path: now for path, now in seen.items() if path in found.searched}
    request.add_read_paths(lease, touched)
    return until_dirty(lease, state.fingerprint, body)


def _allowed_paths(request: ToolRequest) -> list[RepoPath]:
    """What a search without paths searches: the whole root, or the parts of it that `fs_roots` and policy allow."""
    named = request.boundary.allowed_roots
    # If the policy denies all of them, the search is refused for what it denies.
    allowed = [path for path in named if request.boundary.allows("search", path)] or named
    with request.handles() as handles:
        return [path for path in allowed if len(allowed) == 1 or request.seen(handles, path) != GONE] or [ROOT]


def _live_texts(
    request: ToolRequest, paths: Sequence[RepoPath], seen: dict[RepoPath, PathState]
) -> Iterator[tuple[RepoPath, bytes]]:
    """The files to search in byte order, with their bytes. Files that cannot be read are left out."""
    found = {one.path for path in paths for one in request.below("search", request.real_path("search", path))}
    with request.handles() as handles:
        for path in sorted(filter(request.may_show, found), key=path_bytes):
            try:
                now = request.seen(handles, path)
                if now.kind != "file" or now.size > SEARCHED_MAX_BYTES:
                    continue
                data = request.read(handles, path, now)
            except OSError:
                continue
            seen[path] = now
            yield path, data


class _Found:
    """Finds matches in files, up to the limits."""

    def __init__(self, matcher: Matcher, asked: models.GrepParams, request: ToolRequest) -> None:
        capability = request.capability
        self._matcher = matcher
        self._shown = _Rows(request)
        self._max_files = clamped(asked.max_files, capability.max_scan_files) or 0
        self._max_matches = clamped(asked.max_matches, capability.max_grep_results) or 0
        self._max_bytes = capability.max_scan_bytes
        self.searched: set[RepoPath] = set()

    def among(self, texts: Iterator[tuple[RepoPath, bytes]]) -> Body:
        found = self._shown
        truncated, searched_bytes = False, 0
        for path, data in texts:
            if looks_binary(data):
                continue
            searched_bytes += len(data)
            too_many = self._max_bytes is not None and searched_bytes > self._max_bytes
            if len(self.searched) >= self._max_files or too_many:
                truncated = True
                break
            self.searched.add(path)
            for match in self._matcher.matches(data):
                if len(found.items) >= self._max_matches or not found.add(_match(path, match)):
                    truncated = True
                    break
            if found.is_full:
                break
        return {"matches": found.items, "files_searched": len(self.searched), "truncated": truncated}


def _match(path: RepoPath, match: Match) -> Body:
    return {"path": to_wire(path), "line": match.line, "col": match.col, "text": match.text}


def export(request: ToolRequest, asked: models.ExportParams) -> Body:
    """snapshot.export"""
    snapshot = snapshot_of(request, asked)
    if snapshot is not None:
        chosen = snapshot.manifest
        if asked.paths is not None:
            paths = unique_paths(asked.paths)
            chosen = Manifest.of(
                (one for one in chosen.entries if any(is_within(one.path, base) for base in paths)),
                (one for one in chosen.empty_dirs if any(is_within(one[0], base) for base in paths)),
            )
        _check_export(request, chosen)
        return immutable(_bundle(request, chosen, {}))
    lease, _ = request.lease(asked.lease_id)
    paths = unique_paths(asked.paths) if asked.paths is not None else touched_files(lease)
    taken, contents = retry_while_changing(request, lambda: _with_contents(request, captured(request, paths)))
    request.add_read_paths(lease, taken.seen)
    return until_dirty(lease, taken.fingerprint, _bundle(request, taken.manifest, contents))


def _check_export(request: ToolRequest, manifest: Manifest) -> None:
    """Check that the session may see every file and that all of them fit in an answer, before any is read."""
    for entry in manifest.entries:
        request.check_shown(entry.path)
    request.check_fits(manifest.total_bytes)


def _with_contents(request: ToolRequest, taken: CapturedTree) -> tuple[CapturedTree, dict[Digest, bytes]]:
    _check_export(request, taken.manifest)
    return taken, {blob: taken.bytes_of(entry) for blob, entry in taken.by_blob().items()}


def _bundle(request: ToolRequest, manifest: Manifest, contents: Mapping[Digest, bytes]) -> Body:
    data = tar_of(manifest, lambda blob: contents[blob] if blob in contents else request.context.snapshots.read(blob))
    if request.capability.max_inline_bytes is not None:
        request.check_fits(len(data))
    return {"bundle": in_base64(data), "sha256": digest_of(data)}


@fast_dataclass(slots=True, frozen=True)
class Side:
    """One side of a file's diff: its bytes (of a link, its target) and its mode, as git has it."""

    content: bytes
    mode: int


def info(request: ToolRequest, asked: models.InfoParams) -> Body:
    """snapshot.info"""
    snapshot = request.snapshot(asked.snapshot_id)
    return immutable({"fingerprint": snapshot.fingerprint.to_json(), "manifest_stats": snapshot.manifest.stats()})


def changes(request: ToolRequest, asked: models.ChangesParams) -> Body:
    """snapshot.changes"""
    snapshot = request.snapshot(asked.snapshot_id)
    base = asked.from_snapshot_id or request.context.snapshots.parent_of(snapshot.id)
    if base is not None:
        found = changes_between(request.snapshot(base).manifest, snapshot.manifest)
        rows = [(path, str(status)) for path, status in found]
    else:
        rows = _changes_since_commit(request, snapshot)
    return immutable({"changes": [{"path": to_wire(path), "status": status} for path, status in rows]})


def _changes_since_commit(request: ToolRequest, snapshot: StoredSnapshot) -> list[tuple[RepoPath, str]]:
    """The changes since the commit of the capture. A file of the commit is deleted if the captured paths cover it."""
    tracked = {one.path: one for one in _commit(request, snapshot.fingerprint.head_oid)}
    rows: list[tuple[RepoPath, str]] = []
    for entry in snapshot.manifest.entries:
        old = tracked.pop(entry.path, None)
        if old is None:
            rows.append((entry.path, "added"))
        elif (
            _kind(old.mode) != entry.kind or oid_of(request.context.snapshots.read(entry.blob), like=old.oid) != old.oid
        ):
            rows.append((entry.path, "modified"))
    admits = request.boundary.allows
    rows += [(path, "deleted") for path in tracked if snapshot.manifest.covers(path) and admits(request.op, path)]
    return sorted(rows, key=lambda row: path_bytes(row[0]))


def _commit(request: ToolRequest, oid: str) -> list[Tracked]:
    reader = request.context.leases.fingerprints.reader()
    if reader is None or not oid:
        return []
    try:
        return [one for one in reader.tree(commit=oid) if not one.is_submodule]
    except GitError:
        return []


def _kind(mode: int) -> str:
    return "symlink" if stat.S_ISLNK(mode) else "file"


def diff(request: ToolRequest, asked: models.DiffParams) -> Body:
    """snapshot.diff"""
    base = parse_path(asked.path) if asked.path is not None else ROOT
    if base != ROOT:
        request.boundary.check_path(request.op, base)
    snapshot = snapshot_of(request, asked)
    if snapshot is not None:
        return immutable({"diff": _diff_snapshots(request, snapshot, base, asked.from_snapshot_id)})
    lease, state = request.lease(asked.lease_id)
    reader = request.context.leases.fingerprints.reader()
    if asked.from_snapshot_id is None:
        old = _committed(reader, state, base, asked)
    else:
        old = _sides_of(request, request.snapshot(asked.from_snapshot_id).manifest.entries, base)
    old = {path: side for path, side in old.items() if request.may_show(path)}
    seen = _seen_now(request, [*old, *_paths_in_status(state, base)], base)
    text = _text(request, old, _sides_now(request, seen))
    request.add_read_paths(lease, seen)
    return until_dirty(lease, state.fingerprint, {"diff": text})


def _diff_snapshots(request: ToolRequest, snapshot: StoredSnapshot, base: RepoPath, other: str | None) -> str:
    origin = other or request.context.snapshots.parent_of(snapshot.id)
    old = {} if origin is None else _sides_of(request, request.snapshot(origin).manifest.entries, base)
    return _text(request, old, _sides_of(request, snapshot.manifest.entries, base))


def _sides_of(request: ToolRequest, entries: Iterable[CapturedFile], base: RepoPath) -> dict[RepoPath, Side]:
    below = [one for one in entries if is_within(one.path, base)]
    chosen = [one for one in below if request.may_show(one.path)]
    return {one.path: Side(request.context.snapshots.read(one.blob), _git_mode(one.kind, one.mode)) for one in chosen}


def _git_mode(kind: str, mode: int) -> int:
    return stat.S_IFLNK if kind == "symlink" else mode


def _paths_in_status(state: TreeState, base: RepoPath) -> list[RepoPath]:
    """The paths at or below the base that git's status reports."""
    paths = [path_from_bytes(path) for path in state.facts if not path.endswith(b"/")]
    return [path for path in paths if is_within(path, base)]


def _committed(
    reader: GitReader | None, state: TreeState, base: RepoPath, asked: models.DiffParams
) -> dict[RepoPath, Side]:
    """The committed or staged files among the base and the changed paths below it; none without git."""
    wanted = {base, *_paths_in_status(state, base)}
    if reader is None or wanted == {ROOT}:
        return {}
    try:
        source = reader.tree if asked.against == "head" else reader.staged
        rows = [one for one in source([base]) if one.path in wanted and not one.is_submodule]
        contents = reader.contents(sorted({one.oid for one in rows}))
    except GitError as error:
        raise SnapshotToolError("INTERNAL", f"git could not be read: {error}") from None
    sides = [one for one in rows if one.oid in contents]
    modes = {one.path: _git_mode(_kind(one.mode), stat.S_IMODE(one.mode)) for one in sides}
    return {one.path: Side(contents[one.oid], modes[one.path]) for one in sides}


def _seen_now(request: ToolRequest, paths: Sequence[RepoPath], base: RepoPath) -> dict[RepoPath, PathState]:
    """The present states of the paths. If the base is a file, its state is among them, even if git reports nothing."""
    seen: dict[RepoPath, PathState] = {}
    with request.handles() as handles:
        if base != ROOT:
            now = request.seen(handles, base)
            if now == GONE and not paths:
                raise SnapshotToolError("NOT_FOUND", f"{base} does not exist.")
            if now.kind in ("file", "symlink") and request.may_show(base):
                seen[base] = now
        for path in paths:
            if request.may_show(path):
                seen[path] = request.seen(handles, path)
    return {path: now for path, now in seen.items() if now.kind in ("file", "symlink", "absent")}


def _sides_now(request: ToolRequest, seen: Mapping[RepoPath, PathState]) -> dict[RepoPath, Side]:
    with request.handles() as handles:
        return {
            path: Side(request.read(handles, path, now), _git_mode(now.kind, now.mode))
            for path, now in seen.items()
            if now != GONE
        }


def _text(request: ToolRequest, old: Mapping[RepoPath, Side], new: Mapping[RepoPath, Side]) -> str:
    texts: list[str] = []
    size = 0
    for path in sorted({*old, *new}, key=path_bytes):
        texts.append(_one(path, old.get(path), new.get(path)))
        size += len(texts[-1].encode("utf-8", "surrogatepass"))
        request.check_fits(size)
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
