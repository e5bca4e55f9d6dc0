"""write_file and delete. On the live tree each is one call, so each can be undone."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mulligan.effects import params
from mulligan.effects.changes import check_size as check_written
from mulligan.effects.changes import delete as delete_effect
from mulligan.effects.changes import directories, file_like
from mulligan.effects.scene import Scene
from mulligan.effects.substrate.bench import CONTENT_MAX_BYTES, Ask, parse_path
from mulligan.effects.substrate.failure import Failure
from mulligan.effects.substrate.reading import until_dirty
from mulligan.history.intents import Intent, Plan
from mulligan.values.entries import Absent, DirEntry, Entry, FileEntry, SymlinkEntry
from mulligan.values.paths import ROOT, RepoPath, to_wire
from mulligan.workspace.census import GONE, Seen, link_seen
from mulligan.workspace.disk import Image
from mulligan.workspace.fingerprint import TreeState
from mulligan.workspace.lease import Lease, StaleLease
from mulligan.workspace.writing import Wanted

Body = dict[str, Any]
Args = Mapping[str, Any]


def write_file(ask: Ask, args: Args) -> Body:
    """workspace.write_file"""
    path = own_path(args["path"])
    data = _bytes_given(args["content"])
    lease, state = ask.lease(args.get("lease_id"))
    made: list[bool] = []

    def act(scene: Scene) -> dict[RepoPath, Seen]:
        check_written(ask.capability, len(data))
        real, missing = scene.real("write", to_wire(path))
        if missing and not args["create_dirs"]:
            raise Failure("NOT_FOUND", f"The directory of {args['path']} does not exist.")

        def plan(image: Image) -> Wanted:
            if isinstance(image.entry, DirEntry):
                raise Failure("INVALID_ARGUMENT", f"{args['path']} is a directory.")
            made.append(isinstance(image.entry, Absent))
            return file_like(image.entry, data)

        intents = [*directories(missing), Intent(real, as_seen(ask, lease, real, plan))]
        return change(scene, intents, dry_run=args["dry_run"])

    fingerprint = acted(ask, lease, state, act)
    body = {"path": to_wire(path), "written_bytes": len(data), "created": made[-1]}
    return until_dirty(lease, fingerprint.fingerprint, body)


def own_path(text: str) -> RepoPath:
    path = parse_path(text)
    if path == ROOT:
        raise Failure("PERMISSION_DENIED", "The root itself is not for tools to change.")
    return path


def _bytes_given(content: str) -> bytes:
    try:
        encoded = content.startswith("base64:")
        data = b64decode(content[len("base64:") :], validate=True) if encoded else content.encode("utf-8")
    except (binascii.Error, ValueError):
        raise Failure("INVALID_ARGUMENT", "content is UTF-8 text, or 'base64:' and base64.") from None
    check_size(len(data))
    return data


def check_size(size: int) -> None:
    if size > CONTENT_MAX_BYTES:
        raise Failure("TOO_LARGE", f"{size} bytes are more than the {CONTENT_MAX_BYTES} that are taken at once.")


def delete(ask: Ask, args: Args) -> Body:
    """workspace.delete: a link goes itself, never what it leads to."""
    path = own_path(args["path"])
    lease, state = ask.lease(args.get("lease_id"))

    def act(scene: Scene) -> dict[RepoPath, Seen]:
        real, missing = scene.real("write", to_wire(path), final=False)
        found = None if missing else scene.desk.image(real)
        if found is None or (isinstance(found.entry, Absent) and not found.special):
            raise Failure("NOT_FOUND", f"{args['path']} does not exist.")
        if isinstance(found.entry, DirEntry) and not args["recursive"]:
            raise Failure("INVALID_ARGUMENT", f"{args['path']} is a directory; ask with recursive to delete it.")
        as_seen(ask, lease, real, lambda image: Wanted(image.entry))(found)
        if args["dry_run"]:
            return {}
        delete_effect(scene, params.Delete(path=to_wire(real), recursive=args["recursive"]))
        return {change.path: seen_of(change.after) for change in scene.call.changes()}

    after = acted(ask, lease, state, act)
    return until_dirty(lease, after.fingerprint, {"path": to_wire(path), "deleted": not args["dry_run"]})


# What all of them share.


def acted(ask: Ask, lease: Lease, before: TreeState, act: Callable[[Scene], dict[RepoPath, Seen]]) -> TreeState:
    """Do it in a call of its own, then renew the lease for what it changed. The tree as it is then."""
    with ask.call() as scene:
        own = act(scene)
        scene.call.account.note_effect(ask.tool, {"paths": [to_wire(path) for path in own]}, {"status": "ok"})
    return before if not own else ask.bench.leases.renew(lease, before, own)


def as_seen(ask: Ask, lease: Lease, path: RepoPath, plan: Plan) -> Plan:
    """Only over what the holder of the lease saw there, if it looked."""

    def checked(image: Image) -> Wanted:
        known = lease.touched.get(path)
        if known is not None and not _is(image, known):
            raise StaleLease(lease.id, ask.bench.leases.fingerprints.state().fingerprint, [path], expired=False)
        return plan(image)

    return checked


def _is(image: Image, seen: Seen) -> bool:
    """Directories are what they are by name alone; their mode is no reason."""
    now = seen_of(image.entry)
    return now.kind == seen.kind if seen.kind == "dir" else now == seen


def seen_of(entry: Entry) -> Seen:
    if isinstance(entry, FileEntry):
        return Seen("file", entry.digest, entry.size, entry.mode)
    if isinstance(entry, SymlinkEntry):
        return link_seen(entry.target.encode("utf-8", "surrogateescape"))
    return Seen("dir", mode=entry.mode) if isinstance(entry, DirEntry) else GONE


def change(scene: Scene, intents: list[Intent], *, dry_run: bool) -> dict[RepoPath, Seen]:
    """Carry the intents out, or only ask each what it would do. What is there afterwards, by path."""
    if dry_run:
        for intent in intents:
            intent.plan(scene.desk.image(intent.path))
        return {}
    entries = scene.call.change(intents)
    own = {intent.path: seen_of(entry) for intent, entry in zip(intents, entries, strict=True)}
    return {path: replace(seen) for path, seen in own.items()}
