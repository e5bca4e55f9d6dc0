"""Changing paths: write_file, edit_file, delete, move, mkdir. Each is one `call.change`, wholly or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mulligan.boundary.capability import Capability
from mulligan.effects import params
from mulligan.effects.scene import Scene
from mulligan.history.intents import Intent, Plan
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, Absent, DirEntry, Entry, FileEntry
from mulligan.values.paths import RepoPath, is_below, join
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.edit import Edited, edit_text
from mulligan.workspace.writing import Wanted, creation_mode

Fields = dict[str, Any]

_LOOKS = 10


class LookAgain(Exception):
    """A file changed between looking at it and writing."""


def until_still(act: Callable[[], Fields]) -> Fields:
    """Look and act again while somebody else is quicker than we are."""
    for _ in range(_LOOKS):
        try:
            return act()
        except LookAgain:
            continue
    raise Refused("error", "path_busy", "The files keep changing; try again when they are quiet.")


def expecting(seen: Image, wanted: Wanted) -> Plan:
    """Only over what was looked at; anything else means somebody was quicker."""

    def plan(image: Image) -> Wanted:
        if not image.holds(seen.entry):
            raise LookAgain
        return wanted

    return plan


def write_file(scene: Scene, asked: params.WriteFile) -> Fields:
    given = params.inline_data(asked.content, code="invalid_content")
    path, missing = scene.real("write", asked.path, final=asked.mode != "create_new")
    data = scene.blob(given) if isinstance(given, str) else given
    check_size(scene.capability, len(data))
    if missing and not asked.create_parents:
        raise Refused("error", "parent_not_found", f"The directory of {asked.path} does not exist.")
    seen: list[Image] = []

    def plan(image: Image) -> Wanted:
        seen.append(image)
        _check_write(asked, scene.shown(path), image.entry)
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


def _check_write(asked: params.WriteFile, shown: str, entry: Entry) -> None:
    if asked.mode == "create_new" and not isinstance(entry, Absent):
        raise Refused("conflict", "file_exists", f"{shown} exists already.")
    if isinstance(entry, DirEntry):
        raise Refused("error", "is_directory", f"{shown} is a directory.")
    if asked.expected_digest is not None:
        current = entry.digest if isinstance(entry, FileEntry) else None
        if current != asked.expected_digest:
            words = f"{shown} is not what you saw any more."
            raise Refused("conflict", "stale_base", words, current_digest=current)


def check_size(capability: Capability, size_bytes: int) -> None:
    limit = capability.max_write_bytes
    if limit is not None and size_bytes > limit:
        words = f"{size_bytes} bytes are more than the {limit} this session may write."
        raise Refused("forbidden", "max_write_bytes_exceeded", words)


def file_like(entry: Entry, data: bytes) -> Wanted:
    """The data in the shape of what is there: mode and attributes kept, or a new file's."""
    if isinstance(entry, FileEntry):
        return Wanted(FileEntry(digest_of(data), len(data), entry.mode, xattrs=entry.xattrs), data)
    return Wanted(FileEntry(digest_of(data), len(data), creation_mode(0o666)), data)


def directories(paths: Iterable[RepoPath], *, leaving: frozenset[RepoPath] = frozenset()) -> list[Intent]:
    """Parents that have to be made first; one that somebody makes meanwhile is fine, and so is a file in the way that
    is `leaving` before its turn comes."""

    def intent(path: RepoPath) -> Intent:
        def plan(image: Image) -> Wanted:
            if isinstance(image.entry, DirEntry):
                return Wanted(image.entry)
            if not isinstance(image.entry, Absent) and path not in leaving:
                raise Refused("error", "not_directory", f"{path} is in the way of a directory.")
            return Wanted(DirEntry(creation_mode(0o777)))

        return Intent(path, plan)

    return [intent(path) for path in paths]


def edit_file(scene: Scene, asked: params.EditFile) -> Fields:
    path, missing = scene.real("edit", asked.path)
    if missing:
        raise _nothing_at(asked.path)
    made: list[Edited] = []

    def plan(image: Image) -> Wanted:
        text = _text(image, scene.shown(path))
        edited = edit_text(text, asked.old_string, asked.new_string, replace_all=asked.replace_all)
        _check_replacements(scene, edited.replacements)
        data = edited.text.encode("utf-8")
        check_size(scene.capability, len(data))
        made.append(edited)
        return file_like(image.entry, data)

    scene.call.change([Intent(path, plan)])
    count = made[-1].replacements
    return {
        "replacements": count,
        "applied": True,
        "match": made[-1].match,
        "summary_text": f"Updated {scene.shown(path)} ({count} replacement{'' if count == 1 else 's'})",
        "race_window": True if scene.call.race_window else None,
    }


def _text(image: Image, shown: str) -> str:
    if isinstance(image.entry, Absent):
        raise _nothing_at(shown)
    if image.any_content is None:
        raise Refused("error", "is_directory", f"{shown} is a directory.")
    try:
        return image.data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("error", "invalid_utf8", f"{shown} is not UTF-8 text.") from None


def _check_replacements(scene: Scene, count: int) -> None:
    limit = scene.capability.max_edit_replacements
    if limit is not None and count > limit:
        words = f"{count} replacements are more than the {limit} this session may make."
        raise Refused("forbidden", "max_edit_replacements_exceeded", words)


def delete(scene: Scene, asked: params.Delete) -> Fields:
    path, missing = scene.real("write", asked.path, final=False)
    found = [] if missing else _tree(scene, path)
    if not found:
        raise _nothing_at(asked.path)
    if len(found) > 1 and not asked.recursive:
        words = f"{scene.shown(path)} is not empty; ask with recursive to delete what is in it."
        raise Refused("error", "directory_not_empty", words)
    check_changed(scene.capability, len(found))
    scene.call.change([Intent(one, gone, deep=one == path and len(found) > 1) for one in reversed(found)])
    return {"deleted": True, "removed_paths": len(found), "summary_text": f"Deleted {scene.shown(path)}"}


def gone(_: Image) -> Wanted:
    return Wanted(ABSENT)


def _tree(scene: Scene, top: RepoPath) -> list[RepoPath]:
    """The path and everything below it, parents first, each of them judged; empty if there is nothing."""
    found: list[RepoPath] = []
    ahead = [top]
    while ahead:
        path = ahead.pop()
        scene.boundary.check_write("write", path)
        names = _names_in(scene, path)
        if names is None:
            continue
        found.append(path)
        ahead += reversed([join(path, name.decode("utf-8", "surrogateescape")) for name in names])
    return found


def _names_in(scene: Scene, path: RepoPath) -> list[bytes] | None:
    """What a directory holds, nothing for a file or link; None when there is nothing at the path."""
    with scene.desk.disk.resolve_exactly(path) as spot:
        image = scene.desk.disk.image(spot)
        if image.special:
            raise Refused("error", "special_file", f"{scene.shown(path)} is a device, FIFO or socket.")
        if isinstance(image.entry, Absent):
            return None
        return scene.desk.disk.children(spot) if isinstance(image.entry, DirEntry) else []


def check_changed(capability: Capability, count: int) -> None:
    limit = capability.max_changed_files
    if limit is not None and count > limit:
        words = f"{count} changed files are more than the {limit} this session may change at once."
        raise Refused("forbidden", "max_changed_files_exceeded", words)


def move(scene: Scene, asked: params.Move) -> Fields:
    source, missing = scene.real("write", asked.path, final=False)
    target, missing_above = scene.real("write", asked.to, final=False)
    if is_below(target, source):
        raise Refused("error", "invalid_path", f"{scene.shown(source)} cannot move into itself.")

    def act() -> Fields:
        return _moved(scene, source, target, overwrite=asked.overwrite)

    if missing or not _exists(scene, source):
        raise _nothing_at(asked.path)
    if missing_above:
        raise Refused("error", "parent_not_found", f"The directory of {asked.to} does not exist.")
    if target == source:
        return {"moved": False, "summary_text": f"{scene.shown(source)} stays where it is"}
    return until_still(act)


def _nothing_at(shown: str) -> Refused:
    return Refused("not_found", "path_not_found", f"{shown} does not exist.")


def _exists(scene: Scene, path: RepoPath) -> bool:
    image = scene.desk.image(path)
    return image.special or not isinstance(image.entry, Absent)


def _moved(scene: Scene, source: RepoPath, target: RepoPath, *, overwrite: bool) -> Fields:
    images = {path: scene.desk.image(path) for path in _tree(scene, source)}
    if not images:
        raise _nothing_at(scene.shown(source))
    places = {path: RepoPath(target + path[len(source) :]) for path in images}
    for place in places.values():
        scene.boundary.check_write("write", place)
    check_changed(scene.capability, 2 * len(images))
    arriving = [
        Intent(place, _arrival(images[path], scene.shown(place), overwrite=overwrite), origin=path, relinks=True)
        for path, place in places.items()
    ]
    leaving = [
        Intent(path, _departure(images[path]), deep=path == source and len(images) > 1) for path in reversed(images)
    ]
    in_the_way = [] if isinstance(images[source].entry, FileEntry) else _in_the_way(scene, target, overwrite=overwrite)
    scene.call.change([*in_the_way, *arriving, *leaving])
    words = f"Moved {scene.shown(source)} to {scene.shown(target)}"
    return {"moved": True, "moved_paths": len(images), "summary_text": words}


def _in_the_way(scene: Scene, target: RepoPath, *, overwrite: bool) -> list[Intent]:
    """A file that a directory or link takes the place of goes in a step of its own, which can be put back."""
    image = scene.desk.image(target)
    return [Intent(target, expecting(image, Wanted(ABSENT)))] if overwrite and image.replaceable else []


def _departure(seen: Image) -> Plan:
    """Directories lose their content one by one before they go; files must be what arrived elsewhere."""
    return gone if isinstance(seen.entry, DirEntry) else expecting(seen, Wanted(ABSENT))


def _arrival(image: Image, shown: str, *, overwrite: bool) -> Plan:
    """What was at the source, times and all, at a place that must be free or may be overwritten."""

    def plan(now: Image) -> Wanted:
        if not isinstance(now.entry, Absent) and not overwrite:
            raise Refused("conflict", "file_exists", f"{shown} exists already.")
        if isinstance(now.entry, DirEntry):
            raise Refused("conflict", "file_exists", f"{shown} is a directory.")
        return Wanted(image.entry, image.any_content)

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
            raise Refused("conflict", "file_exists", f"{scene.shown(path)} exists already.")
        created.append(True)
        return Wanted(DirEntry(creation_mode(0o777)))

    scene.call.change([*directories(missing), Intent(path, plan)])
    words = f"Made directory {scene.shown(path)}" if created[-1] else f"Directory {scene.shown(path)} was there already"
    return {"created": created[-1], "summary_text": words}
