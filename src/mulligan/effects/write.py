"""The effects write_file, edit_file, delete, move and mkdir. Each is one `call.change`, which does all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mulligan.effects.arguments import inline_data
from mulligan.effects.context import EffectContext, check_limit
from mulligan.files.disk import Image
from mulligan.files.edit import Edited, edit_text
from mulligan.files.replace import TargetEntry, creation_mode
from mulligan.history.undo_log import Intent, Plan
from mulligan.values.digest import digest_of
from mulligan.values.entries import ABSENT, Absent, DirEntry, Entry, FileEntry
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath, is_below, join

if TYPE_CHECKING:
    from mulligan.effects import params

Fields = dict[str, Any]

_TRIES = 10


class FileChangedError(Exception):
    """A file changed between the read and the write."""


def retry_while_changing(act: Callable[[], Fields]) -> Fields:
    """Run `act` again, a few times, while another process changes the files between its reads and writes."""
    for _ in range(_TRIES):
        try:
            return act()
        except FileChangedError:
            continue
    raise Refused("error", "path_busy", "Another process keeps changing the files; try again later.")


def only_if_unchanged(seen: Image, wanted: TargetEntry) -> Plan:
    """Write only over the image that was read; raise FileChangedError if the file has changed."""

    def plan(image: Image) -> TargetEntry:
        if not image.holds(seen.entry):
            raise FileChangedError
        return wanted

    return plan


def write_file(context: EffectContext, asked: params.WriteFile) -> Fields:
    given = inline_data(asked.content, code="invalid_content")
    path, missing = context.real("write", asked.path, final=asked.mode != "create_new")
    data = context.blob(given) if isinstance(given, str) else given
    check_limit(context.boundary.capability, "max_write_bytes", len(data))
    if missing and not asked.create_parents:
        raise Refused("error", "parent_not_found", f"The directory of {asked.path} does not exist.")
    seen: list[Image] = []

    def plan(image: Image) -> TargetEntry:
        seen.append(image)
        _check_write(context, asked, path, image.entry)
        return file_like(image.entry, data)

    blind = asked.expected_digest is None and asked.mode == "overwrite"
    write = Intent(path, plan, blind=blind)
    after = context.change([*directories(missing), write] if missing else [write])[-1]
    return {
        "written_bytes": len(data),
        "created": isinstance(seen[-1].entry, Absent),
        "new_mtime_ns": after.mtime_ns if isinstance(after, FileEntry) else None,
        "race_window": True if context.call.race_window else None,
    }


def _check_write(context: EffectContext, asked: params.WriteFile, path: RepoPath, entry: Entry) -> None:
    if asked.mode == "create_new" and not isinstance(entry, Absent):
        raise Refused("conflict", "file_exists", f"{context.shown(path)} exists already.")
    if isinstance(entry, DirEntry):
        raise Refused("error", "is_directory", f"{context.shown(path)} is a directory.")
    if asked.expected_digest is not None:
        current = entry.digest if isinstance(entry, FileEntry) else None
        if current != asked.expected_digest:
            words = f"{context.shown(path)} has changed since you read it."
            raise Refused("conflict", "stale_base", words, current_digest=current)


def file_like(entry: Entry, data: bytes) -> TargetEntry:
    """The data with the mode and attributes of the existing file, or with a new file's."""
    if isinstance(entry, FileEntry):
        return TargetEntry(FileEntry(digest_of(data), len(data), entry.mode, xattrs=entry.xattrs), data)
    return TargetEntry(FileEntry(digest_of(data), len(data), creation_mode(0o666)), data)


def directories(paths: Iterable[RepoPath], *, removed: frozenset[RepoPath] = frozenset()) -> list[Intent]:
    """The missing parents. It is fine if another process creates one meanwhile, or if a file in the place of one is in
    `removed`, because it is deleted first."""

    def intent(path: RepoPath) -> Intent:
        def plan(image: Image) -> TargetEntry:
            if isinstance(image.entry, DirEntry):
                return TargetEntry(image.entry)
            if not isinstance(image.entry, Absent) and path not in removed:
                raise Refused("error", "not_directory", f"{path} is in the way of a directory.")
            return TargetEntry(DirEntry(creation_mode(0o777)))

        return Intent(path, plan)

    return [intent(path) for path in paths]


def edit_file(context: EffectContext, asked: params.EditFile) -> Fields:
    path, missing = context.real("edit", asked.path)
    if missing:
        raise _nothing_at(asked.path)
    made: list[Edited] = []

    def plan(image: Image) -> TargetEntry:
        text = _text(image, context.shown(path))
        edited = edit_text(text, asked.old_string, asked.new_string, replace_all=asked.replace_all)
        check_limit(context.capability, "max_edit_replacements", edited.replacements)
        data = edited.text.encode("utf-8")
        check_limit(context.capability, "max_write_bytes", len(data))
        made.append(edited)
        return file_like(image.entry, data)

    context.change([Intent(path, plan)])
    count = made[-1].replacements
    return {
        "replacements": count,
        "applied": True,
        "match": made[-1].match,
        "summary_text": f"Updated {context.shown(path)} ({count} replacement{'' if count == 1 else 's'})",
        "race_window": True if context.call.race_window else None,
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


def delete(context: EffectContext, asked: params.Delete) -> Fields:
    path, missing = context.real("write", asked.path, final=False)
    found = [] if missing else _tree(context, path)
    if not found:
        raise _nothing_at(asked.path)
    if len(found) > 1 and not asked.recursive:
        words = f"{context.shown(path)} is not empty; set recursive to delete it with its content."
        raise Refused("error", "directory_not_empty", words)
    check_limit(context.capability, "max_changed_files", len(found))
    context.change([Intent(one, remove, deep=one == path and len(found) > 1) for one in reversed(found)])
    return {"deleted": True, "removed_paths": len(found), "summary_text": f"Deleted {context.shown(path)}"}


def remove(_: Image) -> TargetEntry:
    return TargetEntry(ABSENT)


def _tree(context: EffectContext, top: RepoPath) -> list[RepoPath]:
    """The path and everything below it, parents first, each checked against the boundary; empty if it is absent."""
    found: list[RepoPath] = []
    ahead = [top]
    while ahead:
        path = ahead.pop()
        context.boundary.check_write("write", path)
        names = _names_in(context, path)
        if names is None:
            continue
        found.append(path)
        ahead += reversed([join(path, name.decode("utf-8", "surrogateescape")) for name in names])
    return found


def _names_in(context: EffectContext, path: RepoPath) -> list[bytes] | None:
    """The names in a directory; none for a file or link; None if the path is absent."""
    with context.open_root.disk.resolve_exactly(path) as resolved:
        image = context.open_root.disk.image(resolved)
        if image.special:
            raise Refused("error", "special_file", f"{context.shown(path)} is a device, FIFO or socket.")
        if isinstance(image.entry, Absent):
            return None
        return context.open_root.disk.children(resolved) if isinstance(image.entry, DirEntry) else []


def move(context: EffectContext, asked: params.Move) -> Fields:
    source, missing = context.real("write", asked.path, final=False)
    target, missing_above = context.real("write", asked.to, final=False)
    if is_below(target, source):
        raise Refused("error", "invalid_path", f"{context.shown(source)} cannot move into itself.")

    def act() -> Fields:
        return _moved(context, source, target, overwrite=asked.overwrite)

    if missing or not _exists(context, source):
        raise _nothing_at(asked.path)
    if missing_above:
        raise Refused("error", "parent_not_found", f"The directory of {asked.to} does not exist.")
    if target == source:
        return {"moved": False, "summary_text": f"{context.shown(source)} stays where it is"}
    return retry_while_changing(act)


def _nothing_at(shown: str) -> Refused:
    return Refused("not_found", "path_not_found", f"{shown} does not exist.")


def _exists(context: EffectContext, path: RepoPath) -> bool:
    image = context.open_root.image(path)
    return image.special or not isinstance(image.entry, Absent)


def _moved(context: EffectContext, source: RepoPath, target: RepoPath, *, overwrite: bool) -> Fields:
    images = {path: context.open_root.image(path) for path in _tree(context, source)}
    if not images:
        raise _nothing_at(context.shown(source))
    places = {path: RepoPath(target + path[len(source) :]) for path in images}
    for path, place in places.items():
        context.boundary.check_write("write", place)
        context.boundary.check_transfer(path, place)
    check_limit(context.capability, "max_changed_files", 2 * len(images))
    arriving = [
        Intent(place, _arrival(images[path], context.shown(place), overwrite=overwrite), origin=path, relinks=True)
        for path, place in places.items()
    ]
    removed = [
        Intent(path, _removal(images[path]), deep=path == source and len(images) > 1) for path in reversed(images)
    ]
    # A directory or link cannot replace a file directly, so deleting that file is a step of its own: abort restores it.
    replaced: list[Intent] = []
    if overwrite and not isinstance(images[source].entry, FileEntry):
        image = context.open_root.image(target)
        if image.replaceable:
            replaced = [Intent(target, only_if_unchanged(image, TargetEntry(ABSENT)))]
    context.change([*replaced, *arriving, *removed])
    words = f"Moved {context.shown(source)} to {context.shown(target)}"
    return {"moved": True, "moved_paths": len(images), "summary_text": words}


def _removal(seen: Image) -> Plan:
    """The removal of a moved path. A directory is empty by then; a file must still be the one that was moved."""
    return remove if isinstance(seen.entry, DirEntry) else only_if_unchanged(seen, TargetEntry(ABSENT))


def _arrival(image: Image, shown: str, *, overwrite: bool) -> Plan:
    """The source's entry, with its times, at a target that must be free or may be overwritten."""

    def plan(now: Image) -> TargetEntry:
        if not isinstance(now.entry, Absent) and not overwrite:
            raise Refused("conflict", "file_exists", f"{shown} exists already.")
        if isinstance(now.entry, DirEntry):
            raise Refused("conflict", "file_exists", f"{shown} is a directory.")
        return TargetEntry(image.entry, image.any_content)

    return plan


def make_dir(context: EffectContext, asked: params.MakeDir) -> Fields:
    path, missing = context.real("write", asked.path, final=False)
    if missing and not asked.parents:
        raise Refused("error", "parent_not_found", f"The directory of {asked.path} does not exist.")
    created: list[bool] = []

    def plan(image: Image) -> TargetEntry:
        if isinstance(image.entry, DirEntry) and asked.parents:
            created.append(False)
            return TargetEntry(image.entry)
        if not isinstance(image.entry, Absent):
            raise Refused("conflict", "file_exists", f"{context.shown(path)} exists already.")
        created.append(True)
        return TargetEntry(DirEntry(creation_mode(0o777)))

    context.change([*directories(missing), Intent(path, plan)])
    words = (
        f"Made directory {context.shown(path)}" if created[-1] else f"Directory {context.shown(path)} was there already"
    )
    return {"created": created[-1], "summary_text": words}
