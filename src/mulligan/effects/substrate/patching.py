"""workspace.apply_patch: a unified diff, exactly as it says, onto the live tree or onto a snapshot."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mulligan.effects.changes import LookAgain, check_changed, directories, expecting, file_like
from mulligan.effects.changes import check_size as check_written
from mulligan.effects.patching import check_format, check_patch_size, present
from mulligan.effects.scene import Scene
from mulligan.effects.substrate.bench import Ask
from mulligan.effects.substrate.failure import Failure
from mulligan.effects.substrate.reading import immutable, snapshot_id_of, until_dirty
from mulligan.effects.substrate.shelf import Snapshot
from mulligan.effects.substrate.writing import acted, as_seen, change, check_size
from mulligan.history.intents import Intent
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import ABSENT, DirEntry, FileEntry, SymlinkEntry
from mulligan.values.faults import MulliganError
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, path_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.census import Seen
from mulligan.workspace.disk import NOTHING, Image
from mulligan.workspace.lease import Lease
from mulligan.workspace.manifest import Captured, Manifest
from mulligan.workspace.patch.strict import HunkReject, Present, Reject, UnifiedStaged, stage_unified
from mulligan.workspace.patch.unified import FilePatch, parse_unified
from mulligan.workspace.writing import Wanted

Body = dict[str, Any]
Args = Mapping[str, Any]


class _Rejected(Exception):
    """The patch does not fit: the call it would have been ends without a trace."""


def apply_patch(ask: Ask, args: Args) -> Body:
    """workspace.apply_patch. A patch that does not fit is told by its rejects, and nothing of it is applied."""
    text = args["patch"].encode("utf-8", "surrogatepass")
    check_size(len(text))
    check_format(ask.capability, "unified")
    check_patch_size(ask.capability, text)
    try:
        patches = parse_unified(text, strip=args["strip"])
    except MulliganError as error:
        raise Failure("INVALID_ARGUMENT", error.message, reason=error.code) from None
    if args["mode"] == "snapshot":
        whole = ask.bench.shelf.get(snapshot_id_of(args))
        return _apply_to_snapshot(ask, whole, patches, dry_run=args["dry_run"])
    return _apply_to_tree(ask, patches, args)


def _told(staged: UnifiedStaged) -> Body:
    rejects = [
        {
            "path": to_wire(RepoPath(one.path)),
            "hunks": [{"index": hunk.index, "reason": hunk.reason} for hunk in one.hunks],
        }
        for one in staged.rejects
    ]
    return {"applied": [to_wire(path) for path in staged.applied], "rejects": rejects}


def _with_refused(staged: UnifiedStaged, refused: set[RepoPath]) -> UnifiedStaged:
    """A patch of which some paths may not be touched fits nowhere."""
    if not refused:
        return staged
    rejects = {one.path: one for one in staged.rejects}
    rejects |= {path: Reject(path, (HunkReject(0, "path_rejected"),)) for path in refused}
    ordered = sorted(rejects.values(), key=lambda one: one.path.encode("utf-8", "surrogateescape"))
    return UnifiedStaged(rejects=tuple(ordered))


def _check_result(ask: Ask, staged: UnifiedStaged) -> None:
    check_changed(ask.capability, len(staged.files))
    for now in staged.files.values():
        check_written(ask.capability, 0 if now is None else len(now.content))


# Onto a snapshot.


def _apply_to_snapshot(ask: Ask, snapshot: Snapshot, patches: Sequence[FilePatch], *, dry_run: bool) -> Body:
    shelf, known = ask.bench.shelf, snapshot.manifest.by_path
    refused: set[RepoPath] = set()

    def look(path: RepoPath) -> Present | None:
        if not ask.boundary.admits("patch", path) or ask.desk.disk.capture.withheld(path) is not None:
            refused.add(path)
            return None
        entry = known.get(path)
        if entry is None:
            return None
        return Present(shelf.read(entry.blob), entry.mode, kind=entry.kind)

    staged = _with_refused(stage_unified(patches, look), refused)
    _check_result(ask, staged)
    told = _told(staged)
    if staged.rejects or dry_run:
        return immutable({**told, "snapshot_id": snapshot.id})
    contents: dict[Digest, bytes] = {}
    entries = dict(known)
    for path, now in staged.files.items():
        if now is None:
            del entries[path]
            continue
        blob = digest_of(now.content)
        contents[blob] = now.content
        entries[path] = Captured(path, blob, len(now.content), now.mode, now.kind)
    manifest = Manifest.of(entries.values(), snapshot.manifest.empty_dirs, [*snapshot.manifest.scope, *staged.files])
    identifier = shelf.put(
        ask.named.session,
        snapshot.fingerprint,
        manifest,
        bytes_of=lambda entry: contents[entry.blob] if entry.blob in contents else shelf.read(entry.blob),
        derived_from=snapshot.id,
    )
    return immutable({**told, "snapshot_id": identifier})


# Onto the live tree.


def _apply_to_tree(ask: Ask, patches: Sequence[FilePatch], args: Args) -> Body:
    lease, state = ask.lease(args.get("lease_id"))
    told: Body = {}

    def act(scene: Scene) -> dict[RepoPath, Seen]:
        staging = _Staging(ask, scene, lease)
        staged = staging.staged(patches)
        _check_result(ask, staged)
        told.update(_told(staged))
        if staged.rejects:
            raise _Rejected
        return change(scene, staging.intents(staged), dry_run=args["dry_run"])

    try:
        state = acted(ask, lease, state, act)
    except LookAgain:
        raise Failure("REPO_CHANGED", "A patched file changed while it was being patched; try again.") from None
    except _Rejected:
        pass
    return until_dirty(lease, state.fingerprint, told)


@dataclass(slots=True)
class _Staging:
    """The files a patch names, as they were looked at."""

    ask: Ask
    scene: Scene
    lease: Lease
    images: dict[RepoPath, Image] = field(default_factory=dict)
    refused: set[RepoPath] = field(default_factory=set)

    def staged(self, patches: Sequence[FilePatch]) -> UnifiedStaged:
        return _with_refused(stage_unified(patches, self._look), self.refused)

    def _look(self, path: RepoPath) -> Present | None:
        """A path may not lead through links, or to where the session may not write: then the patch is refused there."""
        try:
            real, _ = self.scene.real("patch", to_wire(path), final=False)
            if real != path:
                raise Refused("forbidden", "symlink_not_allowed", f"{path} leads through a link.")
        except Refused as refused:
            if refused.status == "forbidden" and path != ROOT:
                self.refused.add(path)
            return None
        image = self.images[path] = self.scene.desk.image(path)
        return present(image)

    def intents(self, staged: UnifiedStaged) -> list[Intent]:
        """What goes, deepest first; then directories to be made; then what comes."""
        paths = sorted(staged.files, key=path_bytes)
        leaving = [path for path in reversed(paths) if staged.files[path] is None]
        coming = [path for path in paths if staged.files[path] is not None]
        return [
            *(self._intent(path, Wanted(ABSENT)) for path in leaving),
            *directories(self._missing_above(coming), leaving=frozenset(leaving)),
            *(self._intent(path, self._wanted(path, staged.files[path])) for path in coming),
        ]

    def _intent(self, path: RepoPath, wanted: Wanted) -> Intent:
        plan = expecting(self.images.get(path, NOTHING), wanted)
        return Intent(path, as_seen(self.ask, self.lease, path, plan))

    def _wanted(self, path: RepoPath, present: Present | None) -> Wanted:
        assert present is not None
        if present.kind == "symlink":
            return Wanted(SymlinkEntry(present.content.decode("utf-8", "surrogateescape")))
        before = self.images.get(path, NOTHING).entry
        made = file_like(before, present.content)
        assert isinstance(made.entry, FileEntry)
        return Wanted(_with_execute_bit(made.entry, present.mode), present.content)

    def _missing_above(self, paths: Sequence[RepoPath]) -> list[RepoPath]:
        above = {parent for path in paths for parent in ancestors_of(path) if parent != ROOT}
        now = {path: self.scene.desk.image(path).entry for path in sorted(above, key=path_bytes)}
        return [path for path, entry in now.items() if not isinstance(entry, DirEntry)]


def _with_execute_bit(entry: FileEntry, mode: int) -> FileEntry:
    """A diff speaks of the execute bit alone; the others are the file's own."""
    from dataclasses import replace

    if bool(entry.mode & stat.S_IXUSR) == bool(mode & stat.S_IXUSR):
        return entry
    readers = (entry.mode & 0o444) >> 2
    return replace(entry, mode=entry.mode | readers if mode & stat.S_IXUSR else entry.mode & ~0o111)
