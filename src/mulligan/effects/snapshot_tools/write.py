"""The snapshot tools that write: `workspace.write_file`, `workspace.delete` and `workspace.apply_patch`.

On the live tree each runs S1 effects in one call, so each can be undone; a lease guards every path (`LeasedChanges`).
A patch to a snapshot makes a new snapshot.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import Any

from mulligan.boundary.verdict import Boundary
from mulligan.effects import params, write
from mulligan.effects.arguments import inline_data
from mulligan.effects.context import EffectContext, check_limit
from mulligan.effects.patch import PatchTargets, as_patched_file, carried, check_format, commit_patch, reject_details
from mulligan.effects.snapshot_tools import models
from mulligan.effects.snapshot_tools.context import CONTENT_MAX_BYTES, ToolRequest, parse_path
from mulligan.effects.snapshot_tools.read import immutable, snapshot_id_of, until_dirty
from mulligan.effects.snapshot_tools.store import SnapshotToolError, StoredSnapshot
from mulligan.effects.write import FileChangedError, file_like
from mulligan.files.disk import Image
from mulligan.files.patch.unified import (
    FilePatch,
    HunkReject,
    PatchedFile,
    Reject,
    UnifiedStaged,
    parse_unified,
    stage_unified,
)
from mulligan.files.replace import TargetEntry
from mulligan.files.snapshot.fingerprint import TreeState
from mulligan.files.snapshot.lease import Lease, StaleLeaseError
from mulligan.files.snapshot.manifest import CapturedFile, Manifest
from mulligan.files.tree.index import GONE, PathState, link_state
from mulligan.history.undo_log import Intent, Plan
from mulligan.values.digest import Digest, digest_of
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, SymlinkEntry
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, to_wire

Body = dict[str, Any]


def write_file(request: ToolRequest, asked: models.WriteParams) -> Body:
    """workspace.write_file"""
    path = own_path(asked.path)
    content = _content_given(asked.content)
    lease, state = request.lease(asked.lease_id)
    wanted = params.WriteFile(path=to_wire(path), content=content, create_parents=asked.create_dirs)
    done: Body = {}

    def act(effect: EffectContext) -> None:
        done.update(write.write_file(effect, wanted))

    after = acted(request, lease, state, act, dry_run=asked.dry_run)
    body = {"path": to_wire(path), "written_bytes": done["written_bytes"], "created": done["created"]}
    return until_dirty(lease, after.fingerprint, body)


def own_path(text: str) -> RepoPath:
    path = parse_path(text)
    if path == ROOT:
        raise SnapshotToolError("PERMISSION_DENIED", "Tools cannot change the root itself.")
    return path


def _content_given(content: str) -> str | params.Payload:
    """The content as S1 takes it. Raises TOO_LARGE for more than S2 takes at once."""
    is_encoded = content.startswith("base64:")
    given = params.Payload(inline_bytes=params.InlineBytes(bytes=content)) if is_encoded else content
    check_size(len(inline_data(given, code="invalid_content")))
    return given


def check_size(size: int) -> None:
    if size > CONTENT_MAX_BYTES:
        raise SnapshotToolError(
            "TOO_LARGE", f"{size} bytes are more than the {CONTENT_MAX_BYTES} that one request may have."
        )


def delete(request: ToolRequest, asked: models.DeleteParams) -> Body:
    """workspace.delete. It deletes a link itself, never its target."""
    path = own_path(asked.path)
    lease, state = request.lease(asked.lease_id)

    def act(effect: EffectContext) -> None:
        real, missing = effect.real("write", to_wire(path), final=False)
        is_directory = not missing and isinstance(effect.open_root.image(real).entry, DirEntry)
        if is_directory and not asked.recursive:
            raise SnapshotToolError(
                "INVALID_ARGUMENT", f"{asked.path} is a directory; ask with recursive to delete it."
            )
        write.delete(effect, params.Delete(path=to_wire(path), recursive=asked.recursive))

    after = acted(request, lease, state, act, dry_run=asked.dry_run)
    return until_dirty(lease, after.fingerprint, {"path": to_wire(path), "deleted": not asked.dry_run})


def acted(
    request: ToolRequest, lease: Lease, before: TreeState, act: Callable[[EffectContext], None], *, dry_run: bool
) -> TreeState:
    """Run S1 effects in a call of their own, then renew the lease for the paths that they changed.

    Returns the state of the tree after that. A dry run plans each change and makes none.
    """
    with request.call() as effect:
        changes = LeasedChanges(request, lease, effect, dry_run=dry_run)
        effect.change_by = changes.make
        act(effect)
        own = {} if dry_run else changes.made
        effect.call.account.note_effect(request.tool, {"paths": [to_wire(path) for path in own]}, {"status": "ok"})
    return before if not own else request.context.leases.renew(lease, before, own)


@fast_dataclass(slots=True)
class LeasedChanges:
    """Changes paths for an effect. It refuses a path that has changed since the holder of the lease read it."""

    request: ToolRequest
    lease: Lease
    effect: EffectContext
    dry_run: bool
    made: dict[RepoPath, PathState] = field(default_factory=dict)

    def make(self, intents: Sequence[Intent]) -> list[Entry]:
        # The plan of an intent that is not blind gets the state of the path right before the change.
        checked = [replace(one, plan=self._checking(one), blind=False) for one in intents]
        if self.dry_run:
            return [one.plan(self.effect.open_root.image(one.path)).entry for one in checked]
        entries = self.effect.call.change(checked)
        self.made |= {one.path: seen_of(entry) for one, entry in zip(intents, entries, strict=True)}
        return entries

    def _checking(self, intent: Intent) -> Plan:
        known = self.lease.touched.get(intent.path)

        def plan(image: Image) -> TargetEntry:
            if known is not None and not _is(image, known):
                state = self.request.context.leases.fingerprints.state()
                raise StaleLeaseError(self.lease.id, state.fingerprint, [intent.path], expired=False)
            return intent.plan(image)

        return plan


def _is(image: Image, seen: PathState) -> bool:
    """Whether the image has this state. The mode of a directory does not count."""
    now = seen_of(image.entry)
    return now.kind == seen.kind if seen.kind == "dir" else now == seen


def seen_of(entry: Entry) -> PathState:
    if isinstance(entry, FileEntry):
        return PathState("file", entry.digest, entry.size, entry.mode)
    if isinstance(entry, SymlinkEntry):
        return link_state(entry.target.encode("utf-8", "surrogateescape"))
    return PathState("dir", mode=entry.mode) if isinstance(entry, DirEntry) else GONE


class _PatchRejectedError(Exception):
    """The patch does not fit. The exception rolls its call back."""


def apply_patch(request: ToolRequest, asked: models.PatchParams) -> Body:
    """workspace.apply_patch. If the patch does not fit, the answer has its rejects, and nothing is applied."""
    text = asked.patch.encode("utf-8", "surrogatepass")
    check_size(len(text))
    check_format(request.capability, "unified")
    check_limit(request.capability, "max_patch_bytes", len(text))
    try:
        patches = parse_unified(text, strip=asked.strip)
    except MulliganError as error:
        raise SnapshotToolError("INVALID_ARGUMENT", error.message, reason=error.code) from None
    if asked.mode == "snapshot":
        whole = request.context.snapshots.get(snapshot_id_of(asked))
        return _apply_to_snapshot(request, whole, patches, dry_run=asked.dry_run)
    return _apply_to_tree(request, patches, asked)


def _report(staged: UnifiedStaged) -> Body:
    rejects = [reject_details(to_wire(RepoPath(one.path)), one.hunks) for one in staged.rejects]
    return {"applied": [to_wire(path) for path in staged.applied], "rejects": rejects}


def _with_refused(staged: UnifiedStaged, refused: set[RepoPath]) -> UnifiedStaged:
    """The staged patch with a reject for each refused path. If a path is refused, nothing is applied."""
    if not refused:
        return staged
    rejects = {one.path: one for one in staged.rejects}
    rejects |= {path: Reject(path, (HunkReject(0, "path_rejected"),)) for path in refused}
    ordered = sorted(rejects.values(), key=lambda one: one.path.encode("utf-8", "surrogateescape"))
    return UnifiedStaged(rejects=tuple(ordered))


def _hidden_sources(boundary: Boundary, patches: Iterable[FilePatch]) -> set[RepoPath]:
    """Sources of renames and copies whose content the policy would show only at the target."""
    return {source for source, target in carried(patches) if not boundary.may_transfer(source, target)}


def _check_result(request: ToolRequest, staged: UnifiedStaged) -> None:
    check_limit(request.capability, "max_changed_files", len(staged.files))
    for now in staged.files.values():
        check_limit(request.capability, "max_write_bytes", 0 if now is None else len(now.content))


def _apply_to_snapshot(
    request: ToolRequest, snapshot: StoredSnapshot, patches: Sequence[FilePatch], *, dry_run: bool
) -> Body:
    snapshots, known = request.context.snapshots, snapshot.manifest.by_path
    refused: set[RepoPath] = set()

    def look(path: RepoPath) -> PatchedFile | None:
        if not request.boundary.allows("patch", path) or request.open_root.disk.capture.withheld(path) is not None:
            refused.add(path)
            return None
        entry = known.get(path)
        if entry is None:
            return None
        return PatchedFile(snapshots.read(entry.blob), entry.mode, kind=entry.kind)

    staged = _with_refused(stage_unified(patches, look), refused | _hidden_sources(request.boundary, patches))
    _check_result(request, staged)
    report = _report(staged)
    if staged.rejects or dry_run:
        return immutable({**report, "snapshot_id": snapshot.id})
    contents: dict[Digest, bytes] = {}
    entries = dict(known)
    for path, now in staged.files.items():
        if now is None:
            del entries[path]
            continue
        blob = digest_of(now.content)
        contents[blob] = now.content
        entries[path] = CapturedFile(path, blob, len(now.content), now.mode, now.kind)
    manifest = Manifest.of(entries.values(), snapshot.manifest.empty_dirs, [*snapshot.manifest.scope, *staged.files])
    identifier = snapshots.put(
        request.named.session,
        snapshot.fingerprint,
        manifest,
        bytes_of=lambda entry: contents[entry.blob] if entry.blob in contents else snapshots.read(entry.blob),
        derived_from=snapshot.id,
    )
    return immutable({**report, "snapshot_id": identifier})


def _apply_to_tree(request: ToolRequest, patches: Sequence[FilePatch], asked: models.PatchParams) -> Body:
    lease, state = request.lease(asked.lease_id)
    report: Body = {}

    def act(effect: EffectContext) -> None:
        staging = _Staging(effect, PatchTargets(effect))
        staged = staging.staged(patches)
        _check_result(request, staged)
        report.update(_report(staged))
        if staged.rejects:
            raise _PatchRejectedError
        wanted = {path: staging.wanted(path, present) for path, present in staged.files.items()}
        commit_patch(effect, staging.targets, wanted)

    try:
        state = acted(request, lease, state, act, dry_run=asked.dry_run)
    except FileChangedError:
        raise SnapshotToolError(
            "REPO_CHANGED", "A patched file changed while it was being patched; try again."
        ) from None
    except _PatchRejectedError:
        pass
    return until_dirty(lease, state.fingerprint, report)


@fast_dataclass(slots=True)
class _Staging:
    """Stages a patch on the live files that it names, as they were when they were first read."""

    effect: EffectContext
    targets: PatchTargets
    refused: set[RepoPath] = field(default_factory=set)

    def staged(self, patches: Sequence[FilePatch]) -> UnifiedStaged:
        staged = stage_unified(patches, self._look)
        return _with_refused(staged, self.refused | _hidden_sources(self.effect.boundary, patches))

    def _look(self, path: RepoPath) -> PatchedFile | None:
        """The file at a path. A path through a link, or one that the session may not write, is refused."""
        try:
            real, _ = self.effect.real("patch", to_wire(path), final=False)
            if real != path:
                raise Refused("forbidden", "symlink_not_allowed", f"{path} leads through a link.")
        except Refused as refused:
            if refused.status == "forbidden" and path != ROOT:
                self.refused.add(path)
            return None
        return as_patched_file(self.targets.image(path))

    def wanted(self, path: RepoPath, now: PatchedFile | None) -> TargetEntry:
        if now is None:
            return TargetEntry(ABSENT)
        if now.kind == "symlink":
            return TargetEntry(SymlinkEntry(now.content.decode("utf-8", "surrogateescape")))
        made = file_like(self.targets.image(path).entry, now.content)
        assert isinstance(made.entry, FileEntry)
        return TargetEntry(_with_execute_bit(made.entry, now.mode), now.content)


def _with_execute_bit(entry: FileEntry, mode: int) -> FileEntry:
    """The entry with the execute bit of a diff's mode. A diff has no other bits of a mode."""
    if bool(entry.mode & stat.S_IXUSR) == bool(mode & stat.S_IXUSR):
        return entry
    readers = (entry.mode & 0o444) >> 2
    return replace(entry, mode=entry.mode | readers if mode & stat.S_IXUSR else entry.mode & ~0o111)
