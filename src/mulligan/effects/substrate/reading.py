"""list, file, grep and export: of the live tree under a lease, or of a snapshot."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mulligan.boundary.capability import Capability
from mulligan.boundary.verdict import clamped
from mulligan.effects.substrate.bench import (
    CONTENT_MAX_BYTES,
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
from mulligan.values.digest import Digest, digest_of
from mulligan.values.paths import RepoPath, is_below, path_bytes, to_wire
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
    shown = [
        {"path": to_wire(row.path), "type": "dir"} if row.entry is None else _entry_of(row.entry)
        for row in _page(rows, args)
    ]
    return immutable({"entries": shown, **_extent(len(rows), args)})


def _page(rows: Sequence[Any], args: Args) -> Sequence[Any]:
    return rows[args["offset"] : args["offset"] + args["limit"]]


def _extent(total: int, args: Args) -> Body:
    return {"total": total, "truncated": args["offset"] + args["limit"] < total}


def _entry_of(entry: Captured) -> Body:
    return {"path": to_wire(entry.path), "type": entry.kind, "size": entry.size, "blob": entry.blob}


def _list_live(ask: Ask, path: RepoPath, args: Args) -> Body:
    lease, state = ask.lease(args.get("lease_id"))
    real = ask.real_path("list", path)
    rows = sorted(
        (one for one in _rows_live(ask, real, args) if one.kind != "special"), key=lambda one: path_bytes(one.path)
    )
    shown: list[Body] = []
    seen: dict[RepoPath, Seen] = {}
    with ask.looking() as handles:
        for one in _page(rows, args):
            seen[one.path] = now = ask.seen(handles, one.path)
            entry: Body = {"path": to_wire(one.path), "type": one.kind}
            shown.append(entry | ({} if now.digest is None else {"size": now.size, "blob": now.digest}))
        above = parents_seen([*seen, real], lambda parent: ask.seen(handles, parent))
    files = {one: now for one, now in seen.items() if now.kind != "dir"}
    ask.touch(lease, {**above, **files})
    return until_dirty(lease, state.fingerprint, {"entries": shown, **_extent(len(rows), args)})


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
    _check_shown(ask, entry.path, entry.size)
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
        _check_shown(ask, real, seen.size)
        data = ask.read(handles, real, seen)
    ask.touch(lease, {real: seen})
    return until_dirty(lease, state.fingerprint, _content(path, data, seen.digest))


def _check_shown(ask: Ask, path: RepoPath, size: int) -> None:
    _check_size(ask, size)
    if ask.boundary.keeps_out_of_answers("read", path):
        raise Failure("PERMISSION_DENIED", f"The policy keeps {path} out of answers.", reason="path_not_allowed")


def _check_size(ask: Ask, size: int) -> None:
    """Whole or not at all: half a file would not be what its digest says."""
    limit = clamped(CONTENT_MAX_BYTES, ask.capability.max_read_bytes) or 0
    if size > limit:
        raise Failure("TOO_LARGE", f"{size} bytes are more than the {limit} that fit in an answer.")


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
    paths = unique_paths(args.get("paths", ["."]))
    snapshot = snapshot_of(ask, args)
    if snapshot is not None:
        entries = [one for one in snapshot.manifest.entries if one.kind == "file" and _is_at_or_below(one.path, paths)]
        texts = ((one.path, ask.bench.shelf.read(one.blob)) for one in entries if one.size <= SEARCHED_MAX_BYTES)
        return immutable(_Found(matcher, args, ask.capability).among(texts))
    lease, state = ask.lease(args.get("lease_id"))
    seen: dict[RepoPath, Seen] = {}
    found = _Found(matcher, args, ask.capability)
    body = found.among(_live_texts(ask, paths, seen))
    touched = {path: now for path, now in seen.items() if path in found.searched}
    ask.touch(lease, touched)
    return until_dirty(lease, state.fingerprint, body)


def _is_at_or_below(path: RepoPath, bases: Sequence[RepoPath]) -> bool:
    return any(path == base or is_below(path, base) for base in bases)


def _live_texts(ask: Ask, paths: Sequence[RepoPath], seen: dict[RepoPath, Seen]) -> Iterator[tuple[RepoPath, bytes]]:
    """Candidates in byte order with what they hold. What cannot be read is left out, as binary files are."""
    found = {one.path for path in paths for one in ask.below("search", ask.real_path("search", path))}
    with ask.looking() as handles:
        for path in sorted(found, key=path_bytes):
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

    def __init__(self, matcher: Matcher, args: Args, capability: Capability) -> None:
        self._matcher = matcher
        self._max_files = clamped(args["max_files"], capability.max_scan_files) or 0
        self._max_matches = clamped(args["max_matches"], capability.max_grep_results) or 0
        self._max_bytes = capability.max_scan_bytes
        self.searched: set[RepoPath] = set()

    def among(self, texts: Iterator[tuple[RepoPath, bytes]]) -> Body:
        found: list[Body] = []
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
                if len(found) >= self._max_matches:
                    truncated = True
                    break
                found.append(_match(path, match))
        return {"matches": found, "files_searched": len(self.searched), "truncated": truncated}


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
        return immutable(_bundle(ask, chosen, {}))
    lease, _ = ask.lease(args.get("lease_id"))
    paths = unique_paths(args["paths"]) if "paths" in args else touched_files(lease)
    taken, contents = until_still(ask, lambda: _with_contents(captured(ask, paths)))
    ask.touch(lease, taken.seen)
    return until_dirty(lease, taken.fingerprint, _bundle(ask, taken.manifest, contents))


def _with_contents(taken: Taken) -> tuple[Taken, dict[Digest, bytes]]:
    return taken, {blob: taken.bytes_of(entry) for blob, entry in taken.by_blob().items()}


def _bundle(ask: Ask, manifest: Manifest, contents: Mapping[Digest, bytes]) -> Body:
    _check_size(ask, manifest.total_bytes)
    data = tar_of(manifest, lambda blob: contents[blob] if blob in contents else ask.bench.shelf.read(blob))
    return {"bundle": encode_bytes(data), "sha256": digest_of(data)}
