"""list, file, grep and export: of the live tree under a lease, or of a snapshot."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mulligan.boundary.verdict import clamped
from mulligan.effects.substrate.bench import (
    SEARCHED_MAX_BYTES,
    Ask,
    Taken,
    parents_seen,
    parse_path,
    unique_paths,
)
from mulligan.effects.substrate.capturing import captured, touched_files, until_still
from mulligan.effects.substrate.failure import Failure
from mulligan.effects.substrate.shelf import Snapshot
from mulligan.values.canonical import encode
from mulligan.values.digest import Digest, digest_of
from mulligan.values.paths import ROOT, RepoPath, is_below, path_bytes, to_wire
from mulligan.workspace.bundle import tar_of
from mulligan.workspace.census import GONE, Seen
from mulligan.workspace.fingerprint import Fingerprint
from mulligan.workspace.lease import Lease
from mulligan.workspace.lines import looks_binary
from mulligan.workspace.listing import Listed, list_below
from mulligan.workspace.manifest import Captured, Manifest, rows_below
from mulligan.workspace.matching import Match, Matcher

Body = dict[str, Any]
Args = Mapping[str, Any]


def immutable(body: Body) -> Body:
    return {"cache_hint": "immutable", **body}


def until_dirty(lease: Lease, fingerprint: Fingerprint, body: Body) -> Body:
    return {"cache_hint": "until_dirty", "lease_id": lease.id, "fingerprint": fingerprint.to_json(), **body}


def snapshot_of(ask: Ask, args: Args) -> Snapshot | None:
    """The snapshot asked for; None for the live tree."""
    return None if args["mode"] == "worktree" else ask.snapshot(snapshot_id_of(args))


def snapshot_id_of(args: Args) -> str:
    if "snapshot_id" not in args:
        raise Failure("INVALID_ARGUMENT", "mode 'snapshot' needs a snapshot_id.")
    return str(args["snapshot_id"])


# list


def list_entries(ask: Ask, args: Args) -> Body:
    path = parse_path(args["path"])
    snapshot = snapshot_of(ask, args)
    if snapshot is None:
        return _list_live(ask, path, args)
    rows = rows_below(snapshot.manifest, path, depth=args["depth"])
    shown = _Fitting(ask)
    for row in _page(rows, args):
        entry = {"path": to_wire(row.path), "type": "dir"} if row.entry is None else _entry_of(row.entry)
        if not shown.add(entry):
            break
    return immutable({"entries": shown.items, **_extent(len(rows), args, shown)})


def _page(rows: Sequence[Any], args: Args) -> Sequence[Any]:
    return rows[args["offset"] : args["offset"] + args["limit"]]


def _extent(total: int, args: Args, shown: _Fitting) -> Body:
    return {"total": total, "truncated": shown.is_full or args["offset"] + args["limit"] < total}


class _Fitting:
    """The rows of an answer, as many as fit in `max_inline_bytes`."""

    def __init__(self, ask: Ask) -> None:
        self._room = ask.capability.max_inline_bytes
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


def _entry_of(entry: Captured) -> Body:
    return {"path": to_wire(entry.path), "type": entry.kind, "size": entry.size, "blob": entry.blob}


def _list_live(ask: Ask, path: RepoPath, args: Args) -> Body:
    lease, state = ask.lease(args.get("lease_id"))
    real = ask.real_path("list", path)
    rows = sorted(
        (one for one in _rows_live(ask, real, args) if one.kind != "special"), key=lambda one: path_bytes(one.path)
    )
    shown = _Fitting(ask)
    seen: dict[RepoPath, Seen] = {}
    with ask.looking() as handles:
        for one in _page(rows, args):
            now = ask.seen(handles, one.path)
            entry: Body = {"path": to_wire(one.path), "type": one.kind}
            if not shown.add(entry | ({} if now.digest is None else {"size": now.size, "blob": now.digest})):
                break
            seen[one.path] = now
        above = parents_seen([*seen, real], lambda parent: ask.seen(handles, parent))
    files = {one: now for one, now in seen.items() if now.kind != "dir"}
    ask.touch(lease, {**above, **files})
    return until_dirty(lease, state.fingerprint, {"entries": shown.items, **_extent(len(rows), args, shown)})


def _rows_live(ask: Ask, real: RepoPath, args: Args) -> Iterator[Listed]:
    with ask.looking() as handles:
        is_dir = ask.seen(handles, real).kind == "dir"
    if not is_dir:
        return ask.below("list", real)
    admits = ask.boundary.admits
    found = list_below(ask.desk.disk.root.handle, real, depth=args["depth"], include_ignored=args["include_ignored"])
    return (one for one in found if admits("list", one.path))


# file


def read_file(ask: Ask, args: Args) -> Body:
    path = parse_path(args["path"])
    snapshot = snapshot_of(ask, args)
    if snapshot is None:
        return _read_live(ask, path, args)
    entry = ask.bench.shelf.target_of(snapshot, path)
    if entry is None:
        raise Failure("NOT_FOUND", f"{args['path']} is not in the snapshot.")
    ask.check_shown(entry.path)
    ask.check_fits(entry.size)
    return immutable(_content(path, ask.bench.shelf.read(entry.blob), entry.blob))


def _read_live(ask: Ask, path: RepoPath, args: Args) -> Body:
    lease, state = ask.lease(args.get("lease_id"))
    real = ask.real_path("read", path)
    with ask.looking() as handles:
        seen = ask.seen(handles, real)
        if seen == GONE:
            raise Failure("NOT_FOUND", f"{args['path']} does not exist.")
        if seen.kind != "file" or seen.digest is None:
            raise Failure("INVALID_ARGUMENT", f"{args['path']} is not a file.")
        ask.check_shown(real)
        ask.check_fits(seen.size)
        data = ask.read(handles, real, seen)
    ask.touch(lease, {real: seen})
    return until_dirty(lease, state.fingerprint, _content(path, data, seen.digest))


def _content(path: RepoPath, data: bytes, blob: Digest) -> Body:
    text = text_of(data)
    encoded = text is None or text.startswith("base64:")
    return {
        "path": to_wire(path),
        "content": encode_bytes(data) if encoded else text,
        "size": len(data),
        "blob": blob,
        "eol": "none" if text is None else line_ends_of(data),
    }


def text_of(data: bytes) -> str | None:
    if looks_binary(data):
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def encode_bytes(data: bytes) -> str:
    return "base64:" + b64encode(data).decode("ascii")


def line_ends_of(data: bytes) -> str:
    windows, all_ends = data.count(b"\r\n"), data.count(b"\n")
    if not all_ends:
        return "none"
    if not windows:
        return "lf"
    return "crlf" if windows == all_ends else "mixed"


# grep


def grep(ask: Ask, args: Args) -> Body:
    matcher = Matcher(args["pattern"], case_insensitive=args["case_insensitive"])
    paths = unique_paths(args["paths"]) if "paths" in args else _allowed_paths(ask)
    snapshot = snapshot_of(ask, args)
    if snapshot is not None:
        files = [one for one in snapshot.manifest.entries if one.kind == "file" and one.size <= SEARCHED_MAX_BYTES]
        entries = [one for one in files if _is_at_or_below(one.path, paths) and ask.may_show(one.path)]
        texts = ((one.path, ask.bench.shelf.read(one.blob)) for one in entries)
        return immutable(_Found(matcher, args, ask).among(texts))
    lease, state = ask.lease(args.get("lease_id"))
    seen: dict[RepoPath, Seen] = {}
    found = _Found(matcher, args, ask)
    body = found.among(_live_texts(ask, paths, seen))
    touched = {path: now for path, now in seen.items() if path in found.searched}
    ask.touch(lease, touched)
    return until_dirty(lease, state.fingerprint, body)


def _allowed_paths(ask: Ask) -> list[RepoPath]:
    """What a search without paths searches: the whole root, or the parts of it that `fs_roots` allow."""
    allowed = ask.boundary.allowed_roots
    with ask.looking() as handles:
        return [path for path in allowed if len(allowed) == 1 or ask.seen(handles, path) != GONE] or [ROOT]


def _is_at_or_below(path: RepoPath, bases: Sequence[RepoPath]) -> bool:
    return any(path == base or is_below(path, base) for base in bases)


def _live_texts(ask: Ask, paths: Sequence[RepoPath], seen: dict[RepoPath, Seen]) -> Iterator[tuple[RepoPath, bytes]]:
    """Candidates in byte order with what they hold. What cannot be read is left out, as binary files are."""
    found = {one.path for path in paths for one in ask.below("search", ask.real_path("search", path))}
    with ask.looking() as handles:
        for path in sorted(filter(ask.may_show, found), key=path_bytes):
            try:
                now = ask.seen(handles, path)
                if now.kind != "file" or now.size > SEARCHED_MAX_BYTES:
                    continue
                data = ask.read(handles, path, now)
            except OSError:
                continue
            seen[path] = now
            yield path, data


class _Found:
    """Matches in files, up to the limits. Every candidate up to `max_files` counts, whatever has been found by then."""

    def __init__(self, matcher: Matcher, args: Args, ask: Ask) -> None:
        capability = ask.capability
        self._matcher = matcher
        self._shown = _Fitting(ask)
        self._max_files = clamped(args["max_files"], capability.max_scan_files) or 0
        self._max_matches = clamped(args["max_matches"], capability.max_grep_results) or 0
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


# export


def export(ask: Ask, args: Args) -> Body:
    snapshot = snapshot_of(ask, args)
    if snapshot is not None:
        chosen = snapshot.manifest
        if "paths" in args:
            paths = unique_paths(args["paths"])
            chosen = Manifest.of(
                (one for one in chosen.entries if _is_at_or_below(one.path, paths)),
                (one for one in chosen.empty_dirs if _is_at_or_below(one[0], paths)),
            )
        _check_export(ask, chosen)
        return immutable(_bundle(ask, chosen, {}))
    lease, _ = ask.lease(args.get("lease_id"))
    paths = unique_paths(args["paths"]) if "paths" in args else touched_files(lease)
    taken, contents = until_still(ask, lambda: _with_contents(ask, captured(ask, paths)))
    ask.touch(lease, taken.seen)
    return until_dirty(lease, taken.fingerprint, _bundle(ask, taken.manifest, contents))


def _check_export(ask: Ask, manifest: Manifest) -> None:
    """Before anything is read."""
    for entry in manifest.entries:
        ask.check_shown(entry.path)
    ask.check_fits(manifest.total_bytes)


def _with_contents(ask: Ask, taken: Taken) -> tuple[Taken, dict[Digest, bytes]]:
    _check_export(ask, taken.manifest)
    return taken, {blob: taken.bytes_of(entry) for blob, entry in taken.by_blob().items()}


def _bundle(ask: Ask, manifest: Manifest, contents: Mapping[Digest, bytes]) -> Body:
    data = tar_of(manifest, lambda blob: contents[blob] if blob in contents else ask.bench.shelf.read(blob))
    if ask.capability.max_inline_bytes is not None:
        ask.check_fits(len(data))
    return {"bundle": encode_bytes(data), "sha256": digest_of(data)}
