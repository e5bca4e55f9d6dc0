"""Changing single paths: write_file, edit_file, delete, move, mkdir."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mulligan.effects import params
from mulligan.effects.scene import Scene
from mulligan.history.call import Intent
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, Absent, DirEntry, Entry, FileEntry
from mulligan.values.paths import RepoPath, is_below, join
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.edit import Edited, edit_text
from mulligan.workspace.writing import Wanted, creation_mode

Fields = dict[str, Any]


def write_file(scene: Scene, asked: params.WriteFile) -> Fields:
    if asked.mode not in ("overwrite", "create_new"):
        raise Refused("error", "invalid_mode", "mode is 'overwrite' or 'create_new'.")
    given = params.inline_data(asked.content, code="invalid_content")
    data = scene.blob(given) if isinstance(given, str) else given
    check_size(scene, data)
    path, missing = scene.real("write", asked.path)
    if missing and not asked.create_parents:
        raise Refused("error", "parent_not_found", f"The directory of {asked.path} does not exist.")
    seen: list[Image] = []

    def plan(image: Image) -> Wanted:
        seen.append(image)
        _check_write(asked, path, image.entry)
        return file_like(image.entry, data)

    blind = asked.expected_digest is None and asked.mode == "overwrite"
    entries = scene.call.change([*directories(missing), Intent(path, plan, blind=blind)])
    after = entries[-1]
    return {
        "written_bytes": len(data),
        "created": isinstance(seen[-1].entry, Absent),
        "new_mtime_ns": after.mtime_ns if isinstance(after, FileEntry) else None,
        "race_window": True if scene.call.race_window else None,
    }


def _check_write(asked: params.WriteFile, path: RepoPath, entry: Entry) -> None:
    if isinstance(entry, DirEntry):
        raise Refused("error", "is_directory", f"{path} is a directory.")
    if asked.mode == "create_new" and not isinstance(entry, Absent):
        raise Refused("conflict", "file_exists", f"{path} exists already.")
    if asked.expected_digest is not None:
        current = entry.digest if isinstance(entry, FileEntry) else None
        if current != asked.expected_digest:
            words = f"{path} is not what you saw any more."
            raise Refused("conflict", "stale_base", words, current_digest=current)


def check_size(scene: Scene, data: bytes) -> None:
    limit = scene.capability.max_write_bytes
    if limit is not None and len(data) > limit:
        words = f"{len(data)} bytes are more than the {limit} this session may write."
        raise Refused("forbidden", "max_write_bytes_exceeded", words)


def file_like(entry: Entry, data: bytes, *, executable: bool | None = None) -> Wanted:
    """The data in the shape of what is there: mode and attributes kept, or a new file's."""
    if isinstance(entry, FileEntry):
        return Wanted(FileEntry(digest_of(data), len(data), entry.mode, xattrs=entry.xattrs), data)
    return Wanted(FileEntry(digest_of(data), len(data), creation_mode(0o777 if executable else 0o666)), data)


def directories(paths: Iterable[RepoPath]) -> list[Intent]:
    """Parents that have to be made first; one that somebody makes meanwhile is fine."""

    def plan(image: Image) -> Wanted:
        if isinstance(image.entry, DirEntry):
            return Wanted(image.entry)
        if not isinstance(image.entry, Absent):
            raise Refused("error", "not_directory", "A file is in the way of a directory.")
        return Wanted(DirEntry(creation_mode(0o777)))

    return [Intent(path, plan) for path in paths]


def edit_file(scene: Scene, asked: params.EditFile) -> Fields:
    if not asked.old_string:
        raise Refused("error", "invalid_input_empty_old_string", "old_string must not be empty.")
    path, missing = scene.real("edit", asked.path)
    if missing:
        raise Refused("not_found", "path_not_found", f"{asked.path} does not exist.")
    made: list[Edited] = []

    def plan(image: Image) -> Wanted:
        edited = edit_text(_text(image, path), asked.old_string, asked.new_string, replace_all=asked.replace_all)
        _check_replacements(scene, edited.replacements)
        data = edited.text.encode("utf-8")
        check_size(scene, data)
        made.append(edited)
        return file_like(image.entry, data)

    scene.call.change([Intent(path, plan)])
    count = made[-1].replacements
    return {
        "replacements": count,
        "applied": True,
        "match": made[-1].match,
        "summary_text": f"Updated {path} ({count} replacement{'' if count == 1 else 's'})",
        "race_window": True if scene.call.race_window else None,
    }


def _text(image: Image, path: RepoPath) -> str:
    if isinstance(image.entry, Absent):
        raise Refused("not_found", "path_not_found", f"{path} does not exist.")
    if image.content is None:
        raise Refused("error", "is_directory", f"{path} is a directory.")
    try:
        return image.content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("error", "invalid_utf8", f"{path} is not UTF-8 text.") from None


def _check_replacements(scene: Scene, count: int) -> None:
    limit = scene.capability.max_edit_replacements
    if limit is not None and count > limit:
        words = f"{count} replacements are more than the {limit} this session may make."
        raise Refused("forbidden", "max_edit_replacements_exceeded", words)


def delete(scene: Scene, asked: params.Delete) -> Fields:
    path, missing = scene.real("write", asked.path, final=False)
    found = [] if missing else _tree(scene, path)
    if not found:
        raise Refused("not_found", "path_not_found", f"{asked.path} does not exist.")
    if len(found) > 1 and not asked.recursive:
        words = f"{path} is not empty; ask with recursive to delete what is in it."
        raise Refused("error", "directory_not_empty", words)
    _check_changed(scene, len(found))
    scene.call.change([Intent(one, _gone, deep=one == path and len(found) > 1) for one in reversed(found)])
    return {"deleted": True, "removed_paths": len(found), "summary_text": f"Deleted {path}"}


def _gone(image: Image) -> Wanted:
    return Wanted(ABSENT)


def _tree(scene: Scene, path: RepoPath) -> list[RepoPath]:
    """The path and everything below it, parents first; empty if there is nothing."""
    with scene.desk.disk.resolve_exactly(path) as spot:
        image = scene.desk.disk.image(spot)
        if image.special:
            raise Refused("error", "special_file", f"{path} is a device, FIFO or socket.")
        if isinstance(image.entry, Absent):
            return []
        names = scene.desk.disk.children(spot) if isinstance(image.entry, DirEntry) else []
    found = [path]
    for name in names:
        found += _tree(scene, join(path, name.decode("utf-8", "surrogateescape")))
    return found


def _check_changed(scene: Scene, count: int) -> None:
    limit = scene.capability.max_changed_files
    if limit is not None and count > limit:
        words = f"{count} changed files are more than the {limit} this session may change at once."
        raise Refused("forbidden", "max_changed_files_exceeded", words)


def move(scene: Scene, asked: params.Move) -> Fields:
    source, missing = scene.real("write", asked.path, final=False)
    target, missing_above = scene.real("write", asked.to, final=False)
    found = [] if missing else _tree(scene, source)
    if not found:
        raise Refused("not_found", "path_not_found", f"{asked.path} does not exist.")
    if missing_above:
        raise Refused("error", "parent_not_found", f"The directory of {asked.to} does not exist.")
    if is_below(target, source):
        raise Refused("error", "invalid_path", f"{source} cannot move into itself.")
    if target == source:
        return {"moved": False, "summary_text": f"{source} stays where it is"}
    _check_changed(scene, 2 * len(found))
    scene.call.change([*_arrivals(scene, source, target, found, asked), *_departures(source, found)])
    return {"moved": True, "moved_paths": len(found), "summary_text": f"Moved {source} to {target}"}


def _departures(source: RepoPath, found: list[RepoPath]) -> list[Intent]:
    return [Intent(one, _gone, deep=one == source and len(found) > 1) for one in reversed(found)]


def _arrivals(
    scene: Scene, source: RepoPath, target: RepoPath, found: list[RepoPath], asked: params.Move
) -> list[Intent]:
    return [
        Intent(there, _arrival(scene.desk.image(one), there, asked), origin=one)
        for one in found
        for there in [RepoPath(target + one[len(source) :])]
    ]


def _arrival(image: Image, there: RepoPath, asked: params.Move) -> Any:
    """What was at the source, times and all, at a place that must be free or may be overwritten."""

    def plan(now: Image) -> Wanted:
        if not isinstance(now.entry, Absent) and not asked.overwrite:
            raise Refused("conflict", "file_exists", f"{there} exists already.")
        if isinstance(now.entry, DirEntry):
            raise Refused("conflict", "file_exists", f"{there} is a directory.")
        return Wanted(image.entry, image.content)

    return plan


def make_dir(scene: Scene, asked: params.MakeDir) -> Fields:
    path, missing = scene.real("write", asked.path, final=False)
    if missing and not asked.parents:
        raise Refused("error", "parent_not_found", f"The directory of {asked.path} does not exist.")
    created: list[bool] = []

    def plan(image: Image) -> Wanted:
        if isinstance(image.entry, DirEntry) and asked.parents:
            created.append(False)
            return Wanted(image.entry)
        if not isinstance(image.entry, Absent):
            raise Refused("conflict", "file_exists", f"{path} exists already.")
        created.append(True)
        return Wanted(DirEntry(creation_mode(0o777)))

    scene.call.change([*directories(missing), Intent(path, plan)])
    return {"created": created[-1], "summary_text": f"Made directory {path}"}
