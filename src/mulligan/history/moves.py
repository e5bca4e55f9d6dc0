"""Which of a call's changes are moves, judged by all of them together once they are known. Pure.

1. A move is told only of what has left one path and is at another, when the call is over: what went back, or went on
   to a third path, counts by where it came from first and where it is last.
2. What a tool of ours says that it moved is believed as long as its source is gone, whatever was made of it since.
3. A command says nothing: a file that left one path and came to another with the same bytes was moved. Where several
   have the same bytes, or there are none, nobody can say, and nothing is told.
4. A folder that is gone was moved to where all those of its files went that are known to have moved, if that is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mulligan.values.digest import Digest
from mulligan.values.entries import Absent, Change, DirEntry, Entry, FileEntry
from mulligan.values.paths import RepoPath, join, name_of, parent_of


def with_moves(changes: Sequence[Change], *, guessed: bool) -> list[Change]:
    """The same changes, each with where it came from. `guessed`: a command may have moved any of them.

    Where a tool named a source that was only a halt on the way, the first one is looked for in any case.
    """
    if not guessed and all(change.renamed_from is None for change in changes):
        return list(changes)
    gone = {change.path: change.before for change in changes if isinstance(change.after, Absent)}
    origins = {one.path: one.renamed_from for one in changes if one.renamed_from in gone and one.path not in gone}
    left = _by_digest((was, path) for path, was in gone.items() if path not in set(origins.values()))
    came = _by_digest((one.after, one.path) for one in changes if _is_new(one) and one.path not in origins)
    asked = {change.path for change in changes if guessed or change.renamed_from is not None}
    found = {path: left[digest] for digest, path in came.items() if digest in left and path in asked} | origins
    if guessed:
        found = _folders(changes, found) | found
    return [replace(one, renamed_from=found.get(one.path)) for one in changes]


def _folders(changes: Iterable[Change], moved: Mapping[RepoPath, RepoPath]) -> dict[RepoPath, RepoPath]:
    """New folders, each with the one that is gone, from which everything came that was moved there under its name."""
    gone = {one.path for one in changes if isinstance(one.before, DirEntry) and isinstance(one.after, Absent)}
    new = {one.path for one in changes if isinstance(one.after, DirEntry) and _is_new(one)}
    sources: dict[RepoPath, set[RepoPath]] = {}
    for path, origin in moved.items():
        while name_of(path) == name_of(origin):
            path, origin = parent_of(path), parent_of(origin)
            if path not in new or origin not in gone:
                break
            sources.setdefault(path, set()).add(origin)
    times = Counter(origin for origins in sources.values() for origin in origins)
    found = {path: origin for path, (origin, *others) in sources.items() if not others and times[origin] == 1}
    for path in sorted(new - found.keys() - moved.keys()):
        above = found.get(parent_of(path))
        if above is not None and join(above, name_of(path)) in gone:
            found[path] = join(above, name_of(path))  # it had nothing in it that could tell
    return found


def _is_new(change: Change) -> bool:
    return isinstance(change.before, Absent)


def _by_digest(entries: Iterable[tuple[Entry, RepoPath]]) -> dict[Digest, RepoPath]:
    """Of files, but for what several have the same of: empty ones say nothing either."""
    files = [(entry.digest, path) for entry, path in entries if isinstance(entry, FileEntry) and entry.size]
    times = Counter(digest for digest, _ in files)
    return {digest: path for digest, path in files if times[digest] == 1}
