"""apply_patch: V4A and strict unified diffs, all files or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from mulligan.boundary.capability import Capability
from mulligan.effects.arguments import inline_data
from mulligan.effects.context import EffectContext, check_limit
from mulligan.effects.write import (
    FileChangedError,
    directories,
    file_like,
    only_if_unchanged,
    remove,
    retry_while_changing,
)
from mulligan.files.disk import Image, Stamp
from mulligan.files.patch.unified import (
    FilePatch,
    HunkReject,
    PatchedFile,
    Reason,
    UnifiedStaged,
    parse_unified,
    stage_unified,
)
from mulligan.files.patch.v4a import DeleteFile, Operation, Staged, UpdateFile, parse_v4a, stage_v4a
from mulligan.files.replace import TargetEntry, creation_mode
from mulligan.history.undo_log import Intent, Plan
from mulligan.values.entries import ABSENT, Absent, DirEntry, FileEntry, SymlinkEntry, same_state
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, join, path_bytes, to_wire
from mulligan.values.text import legible

if TYPE_CHECKING:
    from mulligan.effects import params

ERRORS_MAX = 20

Fields = dict[str, Any]


def apply_patch(context: EffectContext, asked: params.ApplyPatch) -> Fields:
    check_format(context.capability, asked.patch_format)
    patch = _patch_bytes(context, asked)
    if context.anchor is not None:
        context = context.in_root_of(_names_in(patch, asked.patch_format))
    apply = _apply_v4a if asked.patch_format == "v4a" else _apply_unified

    def attempt() -> Fields:
        targets = PatchTargets(context, names_rejects=asked.patch_format == "unified")
        try:
            return apply(targets, patch, dry_run=asked.dry_run)
        except Refused as refused:
            if refused.status == "reject":
                targets.check_free(refused)
            raise

    return retry_while_changing(attempt)


def _patch_bytes(context: EffectContext, asked: params.ApplyPatch) -> bytes:
    given = inline_data(asked.patch, code="invalid_patch")
    patch = context.blob(given, "invalid_patch") if isinstance(given, str) else given
    if not patch.strip():
        raise Refused("error", "invalid_patch_empty", "The patch is empty.")
    check_limit(context.capability, "max_patch_bytes", len(patch))
    return patch


def _names_in(patch: bytes, patch_format: str) -> list[str]:
    """The file names in a patch; none if it cannot be parsed, which is refused later."""
    with suppress(Refused, UnicodeDecodeError):
        if patch_format == "v4a":
            return _names(parse_v4a(patch.decode("utf-8")))
        paths = [path for one in parse_unified(patch) for path in (one.path, one.source, one.target)]
        return [to_wire(RepoPath(path)) for path in paths if path]
    return []


def check_format(capability: Capability, patch_format: str) -> None:
    allowed = capability.allowed_patch_formats
    if allowed is not None and patch_format not in allowed:
        raise Refused("forbidden", "patch_format_not_allowed", f"This session may not apply {patch_format} patches.")


@fast_dataclass(slots=True)
class PatchTargets:
    """The real paths of the names in a patch, and their content when the effect first read them."""

    context: EffectContext
    names_rejects: bool = False
    paths: dict[tuple[str, bool], RepoPath] = field(default_factory=dict)
    images: dict[RepoPath, Image] = field(default_factory=dict)

    def real(self, name: str, *, final: bool) -> RepoPath:
        known = self.paths.get((name, final))
        return self._resolved(name, final=final) if known is None else known

    def _resolved(self, name: str, *, final: bool) -> RepoPath:
        try:
            path, _ = self.context.real("patch", name, final=final)
        except Refused as refused:
            status = "reject" if refused.code == "invalid_path" else refused.status
            raise Refused(status, refused.code, refused.message, errors=[legible(refused.message)]) from None
        self.paths[name, final] = path
        return path

    def image(self, path: RepoPath) -> Image:
        if path not in self.images:
            self.images[path] = self.context.open_root.image(path)
        return self.images[path]

    def plain_image(self, path: RepoPath) -> Image:
        image = self.image(path)
        if image.special:
            raise self.reject("not_a_file", path, f"{path} is a device, FIFO or socket.")
        return image

    def reject(self, code: str, path: RepoPath, words: str, reason: Reason = "target_exists") -> Refused:
        """A refusal of the whole patch because of one path. For a unified diff it is in `rejects` too."""
        rejects = [reject_details(self.context.shown(path), [HunkReject(0, reason)])] if self.names_rejects else None
        return Refused("reject", code, legible(words), errors=[legible(words)], rejects=rejects)

    def check_free(self, refused: Refused) -> None:
        """Raise `path_busy` instead of this refusal if another call is changing the path."""
        seen = {path: image.entry for path, image in self.images.items() if not image.special}

        def plan(_: Image) -> TargetEntry:
            if all(self.context.open_root.image(path).holds(entry) for path, entry in seen.items()):
                raise refused
            raise FileChangedError

        if seen:
            self.context.change([Intent(path, plan) for path in seen])


# V4A.


def _apply_v4a(targets: PatchTargets, patch: bytes, *, dry_run: bool) -> Fields:
    try:
        text = patch.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("error", "invalid_patch", "A V4A patch must be UTF-8 text.") from None
    operations, context = parse_v4a(text), targets.context
    links = _links(targets, operations)

    def read(path: RepoPath) -> bytes | None:
        return _content(targets, path, links)

    def path_of(name: str) -> RepoPath:
        return links.get(name) or targets.real(name, final=True)

    check_limit(context.capability, "max_changed_files", len(set(map(path_of, _names(operations)))))
    staged = stage_v4a(operations, read, path_of=path_of)
    for target, source in staged.moves.items():
        context.boundary.check_transfer(source, target)
    wanted = {path: _wanted(context, targets, staged, path) for path in staged.changed_paths}
    commit_patch(context, targets, wanted, dry_run=dry_run)
    return _answer(context, list(wanted), ops=dict(staged.ops), dry_run=dry_run)


def _names(operations: Iterable[Operation]) -> list[str]:
    moves = [one.move_to for one in operations if isinstance(one, UpdateFile) and one.move_to is not None]
    return [*(one.path for one in operations), *moves]


def _links(targets: PatchTargets, operations: Sequence[Operation]) -> dict[str, RepoPath]:
    """The links that the patch deletes. A deletion means the link itself and not its target."""
    found = {}
    counted = Counter(_names(operations))
    for operation in operations:
        path = targets.real(operation.path, final=False)
        if not isinstance(targets.image(path).entry, SymlinkEntry):
            continue
        moves = isinstance(operation, UpdateFile) and operation.move_to is not None
        if moves or (isinstance(operation, DeleteFile) and counted[operation.path] > 1):
            words = f"{operation.path} is a symbolic link; a patch can only delete it, or change its target file."
            raise targets.reject("not_a_file", path, words)
        if isinstance(operation, DeleteFile):
            found[operation.path] = path
    return found


def _content(targets: PatchTargets, path: RepoPath, links: Mapping[str, RepoPath]) -> bytes | None:
    image = targets.plain_image(path)
    if isinstance(image.entry, SymlinkEntry) and path in links.values():
        return image.entry.target.encode("utf-8", "surrogateescape")
    return None if image.any_content is None else image.data


def _wanted(context: EffectContext, targets: PatchTargets, staged: Staged, path: RepoPath) -> TargetEntry:
    data = staged.files[path]
    if data is None:
        return TargetEntry(ABSENT)
    check_limit(context.capability, "max_write_bytes", len(data))
    return file_like(targets.image(staged.moves.get(path, path)).entry, data)


# Unified.


def _apply_unified(targets: PatchTargets, patch: bytes, *, dry_run: bool) -> Fields:
    patches, context = parse_unified(patch), targets.context
    _check_names(targets, patches)
    reals = {path: targets.real(to_wire(path), final=False) for path in _paths(patches)}
    check_limit(context.capability, "max_changed_files", len(reals))
    for source, target in carried(patches):
        context.boundary.check_transfer(reals[source], reals[target])

    def look(path: RepoPath) -> PatchedFile | None:
        return as_patched_file(targets.plain_image(reals[path])) if path in reals else _above(context, path)

    staged = stage_unified(patches, look)
    if staged.rejects:
        raise _rejected(staged)
    sections = {one.target: one for one in patches if one.target is not None}
    wanted = {reals[path]: _wanted_of(file, sections.get(path), targets, reals) for path, file in staged.files.items()}
    for one in wanted.values():
        check_limit(context.capability, "max_write_bytes", len(one.content or b""))
    commit_patch(context, targets, wanted, dry_run=dry_run)
    return _answer(context, sorted(wanted, key=path_bytes), ops=_counts(patches), dry_run=dry_run)


def _check_names(targets: PatchTargets, patches: Iterable[FilePatch]) -> None:
    """Deny names that lead out of the root or into .git. Other invalid names become rejects later."""
    for one in patches:
        if one.refusal != "path_rejected":
            continue
        try:
            targets.real(to_wire(RepoPath(one.path)), final=False)
        except Refused as refused:
            if refused.status == "forbidden":
                raise


def _paths(patches: Iterable[FilePatch]) -> dict[RepoPath, None]:
    """Every path that a section reads or writes, once. Invalid paths are left out; they become rejects later."""
    return {path: None for one in patches if one.refusal is None for path in (one.source, one.target) if path}


def carried(patches: Iterable[FilePatch]) -> Iterator[tuple[RepoPath, RepoPath]]:
    """Source and target of each section that renames or copies."""
    for one in patches:
        if one.refusal is None and one.source and one.target and one.source != one.target:
            yield one.source, one.target


def _above(context: EffectContext, path: RepoPath) -> PatchedFile | None:
    """The entry at a directory above a file of the patch. No boundary check, because nothing changes there."""
    try:
        here = join(context.workdir, path) if context.mount is None else context.path(path)
        return as_patched_file(context.open_root.image(here))
    except Refused:
        return None


def as_patched_file(image: Image) -> PatchedFile | None:
    """The image in the applier's form: files, and links as files that contain their target."""
    if isinstance(image.entry, FileEntry):
        return PatchedFile(image.data, image.entry.mode)
    if isinstance(image.entry, SymlinkEntry):
        return PatchedFile(image.entry.target.encode("utf-8", "surrogateescape"), 0o777, kind="symlink")
    return None


def _wanted_of(
    file: PatchedFile | None,
    section: FilePatch | None,
    targets: PatchTargets,
    reals: Mapping[RepoPath, RepoPath],
) -> TargetEntry:
    if file is None:
        return TargetEntry(ABSENT)
    if file.kind == "symlink":
        return TargetEntry(SymlinkEntry(file.content.decode("utf-8", "surrogateescape")))
    source = section.source if section is not None else None
    if source is None:
        executable = bool(file.mode & 0o100)
        wanted = file_like(ABSENT, file.content)
        mode = creation_mode(0o777 if executable else 0o666)
    else:
        wanted, mode = file_like(targets.image(reals[source]).entry, file.content), file.mode
    assert isinstance(wanted.entry, FileEntry)
    return TargetEntry(replace(wanted.entry, mode=mode), file.content)


def _counts(patches: Iterable[FilePatch]) -> dict[str, int]:
    """Counts of operations, as for V4A: a move counts as an update."""
    kinds = Counter(one.action for one in patches)
    return {
        "add": kinds["create"] + kinds["copy"],
        "update": kinds["modify"] + kinds["rename"],
        "delete": kinds["delete"],
        "move": kinds["rename"],
    }


def _rejected(staged: UnifiedStaged) -> Refused:
    rejects = [reject_details(to_wire(RepoPath(one.path), one_line=True), one.hunks) for one in staged.rejects]
    errors = [f"{one['path']}: {hunk['reason']}" for one in rejects for hunk in one["hunks"]]
    words = f"The patch does not apply: {errors[0]}."
    return Refused("reject", "hunk_rejected", words, rejects=rejects, errors=errors[:ERRORS_MAX])


def reject_details(shown: str, hunks: Iterable[HunkReject]) -> Fields:
    return {"path": shown, "hunks": [{"index": hunk.index, "reason": hunk.reason} for hunk in hunks]}


# Both.


def commit_patch(
    context: EffectContext, targets: PatchTargets, wanted: Mapping[RepoPath, TargetEntry], *, dry_run: bool = False
) -> None:
    """Apply in this order: deletions, deepest first; then new directories; then new content."""
    paths = sorted(wanted, key=path_bytes)
    removed = [path for path in reversed(paths) if wanted[path].entry == ABSENT]
    written = [path for path in paths if wanted[path].entry != ABSENT]
    replaced = [folder for path in written for folder in _directories_to_replace(context, targets, path, removed)]
    parents = _parents(context, written, removed)
    _check_one_result(targets, {path: wanted[path] for path in written})
    if dry_run or not paths:
        return
    context.change(
        [
            *(Intent(path, only_if_unchanged(targets.image(path), wanted[path])) for path in removed),
            *(Intent(path, remove) for path in replaced),
            *directories(parents, removed=frozenset(removed)),
            *(Intent(path, _place(targets.image(path), wanted[path])) for path in written),
        ]
    )


def _check_one_result(targets: PatchTargets, written: Mapping[RepoPath, TargetEntry]) -> None:
    """Refuse a patch that gives different content to two names of one file, because the file is written once."""
    first: dict[Stamp, RepoPath] = {}
    for path, wanted in written.items():
        stamp = targets.image(path).stamp
        if stamp is None or not isinstance(wanted.entry, FileEntry):
            continue
        other = first.setdefault(stamp, path)
        if not same_state(written[other].entry, wanted.entry):
            shown = targets.context.shown
            words = f"{shown(other)} and {shown(path)} are names of one file; the patch gives them different content."
            raise targets.reject("hunk_rejected", path, words, reason="context_mismatch")


def _place(seen: Image, wanted: TargetEntry) -> Plan:
    """The plan for new content. A directory in its place is removed in a step of its own, so that abort restores it."""
    if not isinstance(seen.entry, DirEntry):
        return only_if_unchanged(seen, wanted)
    return lambda image: (
        wanted if isinstance(image.entry, Absent | DirEntry) else only_if_unchanged(seen, wanted)(image)
    )


def _directories_to_replace(
    context: EffectContext, targets: PatchTargets, path: RepoPath, removed: Sequence[RepoPath]
) -> list[RepoPath]:
    """A directory that a file replaces and those below it, deepest first. The patch must delete everything in it."""
    if not isinstance(targets.image(path).entry, DirEntry):
        return []
    found = [path]
    ahead = [path]
    while ahead:
        folder = ahead.pop()
        for below in context.open_root.children(folder):
            if isinstance(context.open_root.entry(below), DirEntry):
                context.boundary.check_write("patch", below)
                ahead.append(below)
                found.append(below)
            elif below not in removed:
                raise targets.reject("not_a_file", path, f"{path} is a directory that is not empty.")
    return sorted(found, key=path_bytes, reverse=True)


def _parents(context: EffectContext, paths: Sequence[RepoPath], removed: Sequence[RepoPath]) -> list[RepoPath]:
    """The missing directories, from the top down."""
    above = {parent for path in paths for parent in ancestors_of(path) if parent != ROOT}
    missing = []
    for path in sorted(above, key=path_bytes):
        entry = context.open_root.entry(path)
        if path in removed or entry == ABSENT:
            missing.append(path)
        elif not isinstance(entry, DirEntry):
            words = f"{context.shown(path)} is a file, so nothing can be below it."
            raise Refused("reject", "invalid_path", words, errors=[words])
    return missing


def _answer(context: EffectContext, paths: Sequence[RepoPath], *, ops: Mapping[str, int], dry_run: bool) -> Fields:
    count = len(paths)
    files = f"{count} file{'' if count == 1 else 's'}"
    done = f"Patch dry-run: {files} would change" if dry_run else f"Applied patch: {files} changed"
    counts = " ".join(f"{name}={ops[name]}" for name in ("add", "update", "delete", "move"))
    return {
        "files_changed": count,
        "changed_paths": [context.shown(path) for path in paths],
        "ops": dict(ops),
        "summary_text": f"{done} ({counts})",
        "race_window": True if context.call.race_window and not dry_run else None,
    }
