"""apply_patch: V4A and strict unified diffs, all files or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mulligan.boundary.capability import Capability
from mulligan.effects import params
from mulligan.effects.changes import (
    LookAgain,
    check_changed,
    check_size,
    directories,
    expecting,
    file_like,
    gone,
    until_still,
)
from mulligan.effects.receipt import legible
from mulligan.effects.scene import Scene
from mulligan.history.intents import Intent, Plan
from mulligan.values.entries import ABSENT, Absent, DirEntry, FileEntry, SymlinkEntry, same_state
from mulligan.values.paths import ROOT, RepoPath, ancestors_of, join, path_bytes, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image, Stamp
from mulligan.workspace.patch.strict import HunkReject, Present, UnifiedStaged, stage_unified
from mulligan.workspace.patch.unified import FilePatch, Reason, parse_unified
from mulligan.workspace.patch.v4a import Staged, stage_v4a
from mulligan.workspace.patch.v4a_parse import Delete, Operation, Update, parse_v4a
from mulligan.workspace.writing import Wanted, creation_mode

ERRORS_MAX = 20

Fields = dict[str, Any]


def apply_patch(scene: Scene, asked: params.ApplyPatch) -> Fields:
    check_format(scene.capability, asked.patch_format)
    patch = _patch_bytes(scene, asked)
    apply = _apply_v4a if asked.patch_format == "v4a" else _apply_unified

    def attempt() -> Fields:
        looking = _Looking(scene, names_rejects=asked.patch_format == "unified")
        try:
            return apply(looking, patch, dry_run=asked.dry_run)
        except Refused as refused:
            if refused.status == "reject":
                looking.check_free(refused)
            raise

    return until_still(attempt)


def _patch_bytes(scene: Scene, asked: params.ApplyPatch) -> bytes:
    given = params.inline_data(asked.patch, code="invalid_patch")
    patch = scene.blob(given, "invalid_patch") if isinstance(given, str) else given
    if not patch.strip():
        raise Refused("error", "invalid_patch_empty", "The patch is empty.")
    check_patch_size(scene.capability, patch)
    return patch


def check_format(capability: Capability, patch_format: str) -> None:
    allowed = capability.allowed_patch_formats
    if allowed is not None and patch_format not in allowed:
        raise Refused("forbidden", "patch_format_not_allowed", f"This session may not apply {patch_format} patches.")


def check_patch_size(capability: Capability, patch: bytes) -> None:
    limit = capability.max_patch_bytes
    if limit is not None and len(patch) > limit:
        words = f"A patch of {len(patch)} bytes is larger than the {limit} this session may apply."
        raise Refused("forbidden", "max_patch_bytes_exceeded", words)


@dataclass(slots=True)
class _Looking:
    """The real paths of the names in a patch, and what was there when we looked."""

    scene: Scene
    names_rejects: bool = False
    paths: dict[tuple[str, bool], RepoPath] = field(default_factory=dict)
    images: dict[RepoPath, Image] = field(default_factory=dict)

    def real(self, name: str, *, final: bool) -> RepoPath:
        known = self.paths.get((name, final))
        return self._judged(name, final=final) if known is None else known

    def _judged(self, name: str, *, final: bool) -> RepoPath:
        try:
            path, _ = self.scene.real("patch", name, final=final)
        except Refused as refused:
            status = "reject" if refused.code == "invalid_path" else refused.status
            raise Refused(status, refused.code, refused.message, errors=[legible(refused.message)]) from None
        self.paths[name, final] = path
        return path

    def image(self, path: RepoPath) -> Image:
        if path not in self.images:
            self.images[path] = self.scene.desk.image(path)
        return self.images[path]

    def plain_image(self, path: RepoPath) -> Image:
        image = self.image(path)
        if image.special:
            raise self.reject("not_a_file", path, f"{path} is a device, FIFO or socket.")
        return image

    def reject(self, code: str, path: RepoPath, words: str, reason: Reason = "target_exists") -> Refused:
        """Of the whole patch, for what is at one path. Of a diff, `rejects` says so too."""
        rejects = [_told(self.scene.shown(path), [HunkReject(0, reason)])] if self.names_rejects else None
        return Refused("reject", code, legible(words), errors=[legible(words)], rejects=rejects)

    def check_free(self, refused: Refused) -> None:
        """A refusal counts only if it is not of what somebody else is in the middle of doing there."""
        seen = {path: image.entry for path, image in self.images.items() if not image.special}

        def plan(_: Image) -> Wanted:
            if all(self.scene.desk.image(path).holds(entry) for path, entry in seen.items()):
                raise refused
            raise LookAgain

        if seen:
            self.scene.call.change([Intent(path, plan) for path in seen])


# V4A.


def _apply_v4a(looking: _Looking, patch: bytes, *, dry_run: bool) -> Fields:
    try:
        text = patch.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("error", "invalid_patch", "A V4A patch is UTF-8 text.") from None
    operations, scene = parse_v4a(text), looking.scene
    links = _links(looking, operations)

    def read(path: RepoPath) -> bytes | None:
        return _content(looking, path, links)

    def path_of(name: str) -> RepoPath:
        return links.get(name) or looking.real(name, final=True)

    check_changed(scene.capability, len(set(map(path_of, _names(operations)))))
    staged = stage_v4a(operations, read, path_of=path_of)
    wanted = {path: _wanted(scene, looking, staged, path) for path in staged.changed_paths}
    _commit(scene, looking, wanted, dry_run=dry_run)
    return _answer(scene, list(wanted), ops=dict(staged.ops), dry_run=dry_run)


def _names(operations: Iterable[Operation]) -> list[str]:
    moves = [one.move_to for one in operations if isinstance(one, Update) and one.move_to is not None]
    return [*(one.path for one in operations), *moves]


def _links(looking: _Looking, operations: Sequence[Operation]) -> dict[str, RepoPath]:
    """Names of links that the patch deletes: the link itself is meant, not what it leads to."""
    found = {}
    counted = Counter(_names(operations))
    for operation in operations:
        path = looking.real(operation.path, final=False)
        if not isinstance(looking.image(path).entry, SymlinkEntry):
            continue
        moves = isinstance(operation, Update) and operation.move_to is not None
        if moves or (isinstance(operation, Delete) and counted[operation.path] > 1):
            words = f"{operation.path} is a symbolic link; a patch can only delete it, or change what it leads to."
            raise looking.reject("not_a_file", path, words)
        if isinstance(operation, Delete):
            found[operation.path] = path
    return found


def _content(looking: _Looking, path: RepoPath, links: Mapping[str, RepoPath]) -> bytes | None:
    image = looking.plain_image(path)
    if isinstance(image.entry, SymlinkEntry) and path in links.values():
        return image.entry.target.encode("utf-8", "surrogateescape")
    return None if image.any_content is None else image.data


def _wanted(scene: Scene, looking: _Looking, staged: Staged, path: RepoPath) -> Wanted:
    data = staged.files[path]
    if data is None:
        return Wanted(ABSENT)
    check_size(scene.capability, len(data))
    return file_like(looking.image(staged.moves.get(path, path)).entry, data)


# Unified.


def _apply_unified(looking: _Looking, patch: bytes, *, dry_run: bool) -> Fields:
    patches, scene = parse_unified(patch), looking.scene
    _check_names(looking, patches)
    reals = {path: looking.real(to_wire(path), final=False) for path in _paths(patches)}
    check_changed(scene.capability, len(reals))

    def look(path: RepoPath) -> Present | None:
        return present(looking.plain_image(reals[path])) if path in reals else _above(scene, path)

    staged = stage_unified(patches, look)
    if staged.rejects:
        raise _rejected(staged)
    sections = {one.target: one for one in patches if one.target is not None}
    wanted = {
        reals[path]: _wanted_of(present, sections.get(path), looking, reals) for path, present in staged.files.items()
    }
    for one in wanted.values():
        check_size(scene.capability, len(one.content or b""))
    _commit(scene, looking, wanted, dry_run=dry_run)
    return _answer(scene, sorted(wanted, key=path_bytes), ops=_counts(patches), dry_run=dry_run)


def _check_names(looking: _Looking, patches: Iterable[FilePatch]) -> None:
    """A name that no file of a diff may have is told as a reject later; one that leads out, or into .git, is denied."""
    for one in patches:
        if one.refusal != "path_rejected":
            continue
        try:
            looking.real(to_wire(RepoPath(one.path)), final=False)
        except Refused as refused:
            if refused.status == "forbidden":
                raise


def _paths(patches: Iterable[FilePatch]) -> dict[RepoPath, None]:
    """Every path a section reads or writes, once; those that no file may have are told as rejects later."""
    return {path: None for one in patches if one.refusal is None for path in (one.source, one.target) if path}


def _above(scene: Scene, path: RepoPath) -> Present | None:
    """What is at a directory above a file of the patch. It is not judged: nothing changes there."""
    try:
        here = join(scene.workdir, path) if scene.mount is None else scene.path(path)
        return present(scene.desk.image(here))
    except Refused:
        return None


def present(image: Image) -> Present | None:
    """What the applier sees: files, and links as files that hold their target."""
    if isinstance(image.entry, FileEntry):
        return Present(image.data, image.entry.mode)
    if isinstance(image.entry, SymlinkEntry):
        return Present(image.entry.target.encode("utf-8", "surrogateescape"), 0o777, kind="symlink")
    return None


def _wanted_of(
    present: Present | None, section: FilePatch | None, looking: _Looking, reals: Mapping[RepoPath, RepoPath]
) -> Wanted:
    if present is None:
        return Wanted(ABSENT)
    if present.kind == "symlink":
        return Wanted(SymlinkEntry(present.content.decode("utf-8", "surrogateescape")))
    source = section.source if section is not None else None
    if source is None:
        executable = bool(present.mode & 0o100)
        wanted = file_like(ABSENT, present.content)
        mode = creation_mode(0o777 if executable else 0o666)
    else:
        wanted, mode = file_like(looking.image(reals[source]).entry, present.content), present.mode
    assert isinstance(wanted.entry, FileEntry)
    return Wanted(replace(wanted.entry, mode=mode), present.content)


def _counts(patches: Iterable[FilePatch]) -> dict[str, int]:
    """As for V4A: a move is an update too."""
    kinds = Counter(one.action for one in patches)
    return {
        "add": kinds["create"] + kinds["copy"],
        "update": kinds["modify"] + kinds["rename"],
        "delete": kinds["delete"],
        "move": kinds["rename"],
    }


def _rejected(staged: UnifiedStaged) -> Refused:
    rejects = [_told(Scene.one_line(RepoPath(one.path)), one.hunks) for one in staged.rejects]
    errors = [f"{one['path']}: {hunk['reason']}" for one in rejects for hunk in one["hunks"]]
    words = f"The patch does not apply: {errors[0]}."
    return Refused("reject", "hunk_rejected", words, rejects=rejects, errors=errors[:ERRORS_MAX])


def _told(shown: str, hunks: Iterable[HunkReject]) -> Fields:
    return {"path": shown, "hunks": [{"index": hunk.index, "reason": hunk.reason} for hunk in hunks]}


# Both.


def _commit(scene: Scene, looking: _Looking, wanted: Mapping[RepoPath, Wanted], *, dry_run: bool) -> None:
    """What leaves, deepest first; then the directories that are needed; then what comes."""
    paths = sorted(wanted, key=path_bytes)
    leaving = [path for path in reversed(paths) if wanted[path].entry == ABSENT]
    coming = [path for path in paths if wanted[path].entry != ABSENT]
    emptied = [folder for path in coming for folder in _emptied(scene, looking, path, leaving)]
    parents = _parents(scene, coming, leaving)
    _check_one_result(looking, {path: wanted[path] for path in coming})
    if dry_run or not paths:
        return
    scene.call.change(
        [
            *(Intent(path, expecting(looking.image(path), wanted[path])) for path in leaving),
            *(Intent(path, gone) for path in emptied),
            *directories(parents, leaving=frozenset(leaving)),
            *(Intent(path, _arriving(looking.image(path), wanted[path])) for path in coming),
        ]
    )


def _check_one_result(looking: _Looking, coming: Mapping[RepoPath, Wanted]) -> None:
    """A file with several names is written once; what a patch makes of it must be the same under each of them."""
    first: dict[Stamp, RepoPath] = {}
    for path, wanted in coming.items():
        stamp = looking.image(path).stamp
        if stamp is None or not isinstance(wanted.entry, FileEntry):
            continue
        other = first.setdefault(stamp, path)
        if not same_state(coming[other].entry, wanted.entry):
            shown = looking.scene.shown
            words = f"{shown(other)} and {shown(path)} are names of one file; the patch makes a different one of each."
            raise looking.reject("hunk_rejected", path, words, reason="context_mismatch")


def _arriving(seen: Image, wanted: Wanted) -> Plan:
    """A directory that a file replaces is removed as a step of its own, so that a failure after it can be put back."""
    if not isinstance(seen.entry, DirEntry):
        return expecting(seen, wanted)
    return lambda image: wanted if isinstance(image.entry, Absent | DirEntry) else expecting(seen, wanted)(image)


def _emptied(scene: Scene, looking: _Looking, path: RepoPath, leaving: Sequence[RepoPath]) -> list[RepoPath]:
    """A directory that a file replaces and those below it, deepest first. Everything else in it must be leaving."""
    if not isinstance(looking.image(path).entry, DirEntry):
        return []
    found = [path]
    ahead = [path]
    while ahead:
        folder = ahead.pop()
        for below in scene.desk.children(folder):
            if isinstance(scene.desk.entry(below), DirEntry):
                scene.boundary.check_write("patch", below)
                ahead.append(below)
                found.append(below)
            elif below not in leaving:
                raise looking.reject("not_a_file", path, f"{path} is a directory that is not empty.")
    return sorted(found, key=path_bytes, reverse=True)


def _parents(scene: Scene, paths: Sequence[RepoPath], leaving: Sequence[RepoPath]) -> list[RepoPath]:
    """The directories that have to be made, from the top down."""
    above = {parent for path in paths for parent in ancestors_of(path) if parent != ROOT}
    missing = []
    for path in sorted(above, key=path_bytes):
        entry = scene.desk.entry(path)
        if path in leaving or entry == ABSENT:
            missing.append(path)
        elif not isinstance(entry, DirEntry):
            words = f"{scene.shown(path)} is a file, so nothing can be below it."
            raise Refused("reject", "invalid_path", words, errors=[words])
    return missing


def _answer(scene: Scene, paths: Sequence[RepoPath], *, ops: Mapping[str, int], dry_run: bool) -> Fields:
    count = len(paths)
    files = f"{count} file{'' if count == 1 else 's'}"
    done = f"Patch dry-run: {files} would change" if dry_run else f"Applied patch: {files} changed"
    counts = " ".join(f"{name}={ops[name]}" for name in ("add", "update", "delete", "move"))
    return {
        "files_changed": count,
        "changed_paths": [scene.shown(path) for path in paths],
        "ops": dict(ops),
        "summary_text": f"{done} ({counts})",
        "race_window": True if scene.call.race_window and not dry_run else None,
    }
