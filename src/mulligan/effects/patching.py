"""apply_patch: V4A and strict unified diffs, all files or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.effects import params
from mulligan.effects.changes import check_size, directories, file_like
from mulligan.effects.scene import Scene
from mulligan.history.call import Intent
from mulligan.values.entries import ABSENT, DirEntry, Entry, FileEntry, SymlinkEntry
from mulligan.values.paths import RepoPath, ancestors_of, path_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.patch.strict import Present, UnifiedStaged, stage_unified
from mulligan.workspace.patch.unified import parse_unified
from mulligan.workspace.patch.v4a import Staged, stage_v4a
from mulligan.workspace.patch.v4a_parse import Delete, parse_v4a
from mulligan.workspace.writing import Wanted

FORMATS = ("v4a", "unified")
_RESTAGE_TRIES = 10

Fields = dict[str, Any]


class _Restage(Exception):
    """A file changed between staging and writing."""


def apply_patch(scene: Scene, asked: params.ApplyPatch) -> Fields:
    if asked.patch_format not in FORMATS:
        raise Refused("error", "unsupported_patch_format", f"patch_format is one of {', '.join(FORMATS)}.")
    allowed = scene.capability.allowed_patch_formats
    if allowed is not None and asked.patch_format not in allowed:
        words = f"This session may not apply {asked.patch_format} patches."
        raise Refused("forbidden", "patch_format_not_allowed", words)
    patch = _patch_bytes(scene, asked)
    apply = _apply_v4a if asked.patch_format == "v4a" else _apply_unified
    for _ in range(_RESTAGE_TRIES):
        try:
            return apply(scene, patch, dry_run=asked.dry_run)
        except _Restage:
            continue
    raise Refused("error", "path_busy", "The patched files keep changing; try again when they are quiet.")


def _patch_bytes(scene: Scene, asked: params.ApplyPatch) -> bytes:
    given = params.inline_data(asked.patch, code="invalid_patch")
    patch = scene.blob(given, "invalid_patch") if isinstance(given, str) else given
    if not patch.strip():
        raise Refused("error", "invalid_patch_empty", "The patch is empty.")
    limit = scene.capability.max_patch_bytes
    if limit is not None and len(patch) > limit:
        words = f"A patch of {len(patch)} bytes is larger than the {limit} this session may apply."
        raise Refused("forbidden", "max_patch_bytes_exceeded", words)
    return patch


# V4A.


def _apply_v4a(scene: Scene, patch: bytes, *, dry_run: bool) -> Fields:
    try:
        text = patch.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("error", "invalid_patch", "A V4A patch is UTF-8 text.") from None
    operations = parse_v4a(text)
    deleted = {operation.path for operation in operations if isinstance(operation, Delete)}
    images: dict[RepoPath, Image] = {}

    def path_of(name: str) -> RepoPath:
        return _real(scene, name, final=name not in deleted)

    def read(path: RepoPath) -> bytes | None:
        image = images[path] = scene.desk.image(path)
        _check_patchable(path, image)
        return image.content

    staged = stage_v4a(operations, read, path_of=path_of)
    wanted = {path: _wanted(scene, images, staged, path) for path in staged.changed_paths}
    _commit(scene, wanted, {path: images.get(path) for path in wanted}, dry_run=dry_run)
    counts = " ".join(f"{name}={staged.ops[name]}" for name in ("add", "update", "delete", "move"))
    return _answer(list(wanted), ops=dict(staged.ops), note=f" ({counts})", dry_run=dry_run)


def _real(scene: Scene, name: str, *, final: bool) -> RepoPath:
    try:
        return scene.real("patch", name, final=final)[0]
    except Refused as refused:
        if refused.code == "invalid_path":
            raise Refused("reject", "invalid_path", refused.message) from None
        raise


def _check_patchable(path: RepoPath, image: Image) -> None:
    if image.special or isinstance(image.entry, DirEntry):
        raise Refused("reject", "not_a_file", f"{path} is not a file.")


def _wanted(scene: Scene, images: Mapping[RepoPath, Image], staged: Staged, path: RepoPath) -> Wanted:
    data = staged.files[path]
    if data is None:
        return Wanted(ABSENT)
    check_size(scene, data)
    origin = staged.moves.get(path, path)
    return file_like((images[origin] if origin in images else scene.desk.image(origin)).entry, data)


# Unified.


def _apply_unified(scene: Scene, patch: bytes, *, dry_run: bool) -> Fields:
    patches = parse_unified(patch)
    images: dict[RepoPath, Image] = {}

    def look(path: RepoPath) -> Present | None:
        real = _real(scene, to_wire(path), final=False)
        image = images[path] = scene.desk.image(real)
        return present_of(image)

    staged = stage_unified(patches, look)
    if staged.rejects:
        raise _rejected(staged)
    wanted = {path: wanted_of(present, images.get(path)) for path, present in staged.files.items()}
    for one in wanted.values():
        check_size(scene, one.content or b"")
    _commit(scene, wanted, {path: images.get(path) for path in wanted}, dry_run=dry_run)
    return _answer(sorted(wanted, key=path_bytes), ops=None, note="", dry_run=dry_run)


def present_of(image: Image) -> Present | None:
    """What the applier sees: files, and links as files that hold their target."""
    if isinstance(image.entry, FileEntry):
        return Present(image.content or b"", image.entry.mode)
    if isinstance(image.entry, SymlinkEntry):
        return Present(image.entry.target.encode("utf-8", "surrogateescape"), 0o777, kind="symlink")
    return None


def wanted_of(present: Present | None, image: Image | None) -> Wanted:
    if present is None:
        return Wanted(ABSENT)
    if present.kind == "symlink":
        return Wanted(SymlinkEntry(present.content.decode("utf-8", "surrogateescape")))
    before: Entry = image.entry if image is not None else ABSENT
    wanted = file_like(before, present.content)
    return Wanted(_with_mode(wanted.entry, before, present.mode), present.content)


def _with_mode(entry: Entry, before: Entry, mode: int) -> Entry:
    """A patch only speaks of the executable bit; the rest of the mode is the file's own."""
    from dataclasses import replace

    assert isinstance(entry, FileEntry)
    if isinstance(before, FileEntry) and bool(before.mode & 0o100) == bool(mode & 0o100):
        return entry
    readable = (entry.mode & 0o444) >> 2
    return replace(entry, mode=entry.mode | readable if mode & 0o100 else entry.mode & ~0o111)


def _rejected(staged: UnifiedStaged) -> Refused:
    rejects = [
        {
            "path": to_wire(RepoPath(one.path)),
            "hunks": [{"index": hunk.index, "reason": hunk.reason} for hunk in one.hunks],
        }
        for one in staged.rejects
    ]
    errors = [f"{one['path']}: {hunk['reason']}" for one in rejects for hunk in one["hunks"]][:20]  # type: ignore[index]
    words = f"The patch does not apply: {errors[0]}." if errors else "The patch does not apply."
    return Refused("reject", "hunk_rejected", words, rejects=rejects, errors=errors)


# Both.


def _commit(
    scene: Scene, wanted: Mapping[RepoPath, Wanted], images: Mapping[RepoPath, Image | None], *, dry_run: bool
) -> None:
    limit = scene.capability.max_changed_files
    if limit is not None and len(wanted) > limit:
        words = f"{len(wanted)} changed files are more than the {limit} this session may change at once."
        raise Refused("forbidden", "max_changed_files_exceeded", words)
    if dry_run or not wanted:
        return
    paths = sorted(wanted, key=path_bytes)
    leaving = [path for path in reversed(paths) if wanted[path].entry == ABSENT]
    coming = [path for path in paths if wanted[path].entry != ABSENT]
    parents = directories(_parents(scene, coming))
    scene.call.change(
        [
            *(Intent(path, _expecting(images.get(path), wanted[path])) for path in leaving),
            *parents,
            *(Intent(path, _expecting(images.get(path), wanted[path])) for path in coming),
        ]
    )


def _parents(scene: Scene, paths: list[RepoPath]) -> list[RepoPath]:
    above = {parent for path in paths for parent in ancestors_of(path) if parent != "."}
    return [path for path in sorted(above, key=path_bytes) if scene.desk.entry(path) == ABSENT]


def _expecting(seen: Image | None, wanted: Wanted) -> Any:
    """Write only over what was staged on; anything else means somebody was quicker."""

    def plan(image: Image) -> Wanted:
        if seen is not None and not image.holds(seen.entry):
            raise _Restage
        return wanted

    return plan


def _answer(paths: list[RepoPath], *, ops: dict[str, int] | None, note: str, dry_run: bool) -> Fields:
    count = len(paths)
    files = f"{count} file{'' if count == 1 else 's'}"
    done = f"Patch dry-run: {files} would change" if dry_run else f"Applied patch: {files} changed"
    return {
        "files_changed": count,
        "changed_paths": [to_wire(path) for path in paths],
        "ops": ops,
        "summary_text": done + note,
    }
