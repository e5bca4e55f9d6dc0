"""Git's own files in a call: which changes an undo operation leaves alone, and what git's object store still has.

A repository that was there before a call and after it belongs to its owner: undo restores files, not commits. A
repository that the call itself made or removed is ordinary files. Objects are content-addressed and harmless, so no
undo removes them from a repository that was there before.

The git directory of a linked working tree is outside the root, where no capture strategy sees it. Mulligan reads
git's files there before the call and after it (`LinkedGit`). If HEAD, its branch or the index differ, a note in the
coverage of the call says so. The blob that the note names holds what undo with `git="restore"` needs: the earlier
bytes, and digests of the later ones. Such an undo writes a note of its own, the other way round, so that redo works by
the same rule (`plan_git`).

A baseline does not copy tracked files that git calls clean: git has their bytes (`clean_files`, `git_contents`).
"""

from __future__ import annotations

import os
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mulligan.exec.capture.scan import Stamp
from mulligan.files.disk import read_xattrs
from mulligan.files.git import (
    HEAD,
    INDEX,
    GitChange,
    GitError,
    GitFiles,
    GitReader,
    change_git_files,
    is_elsewhere,
    is_packed,
    oid_of,
    read_git_files,
    reading,
    summary_of,
)
from mulligan.values.canonical import decode, encode
from mulligan.values.digest import Digest
from mulligan.values.entries import Absent, Change, FileEntry
from mulligan.values.errors import MulliganError
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import (
    RepoPath,
    bytes_from_wire,
    is_inside,
    path_bytes,
    path_from_bytes,
    text_from_wire,
    to_wire,
)

if TYPE_CHECKING:
    from mulligan.history.call import Call

COMMIT_OUTSIDE = "commit_outside"
"""The reason in a note of coverage: the call made commits in a git directory outside the root."""
GIT_OUTSIDE = "git_outside"
"""The same, if the call changed the index there, or which branch is checked out, but made no commit."""
OUTSIDE = frozenset({COMMIT_OUTSIDE, GIT_OUTSIDE})

_GIT = ".git"
_LOCKED = ("HEAD", "index", "config", "packed-refs", "refs/")
_LOG_LINE = re.compile(rb"\A([0-9a-f]{40,64}) ([0-9a-f]{40,64}) ")
_OID = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")

Note = Mapping[str, str]


@fast_dataclass(slots=True, frozen=True)
class LeftAlone:
    """A repository that an undo operation leaves alone although the call changed it, and how its HEAD moved.

    `outside`: its git directory is not in the root, and Mulligan has no copy of git's files in it.
    """

    repository: RepoPath
    head: tuple[str, str] | None = None
    outside: bool = False

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"repository": to_wire(self.repository)}
        body |= {"outside": True} if self.outside else {}
        return body if self.head is None else body | {"head": {"before": self.head[0], "after": self.head[1]}}


def repository_of(path: RepoPath) -> RepoPath | None:
    """The innermost `.git` that a path is or is in."""
    names = path.split("/")
    if _GIT not in names:
        return None
    # The last `.git` of the path: a submodule is a repository inside another one's folder.
    depth = len(names) - names[::-1].index(_GIT)
    return RepoPath("/".join(names[:depth]))


def is_object(path: RepoPath) -> bool:
    """Whether a path is in the object store of a repository, or is that folder itself."""
    repository = repository_of(path)
    return repository is not None and f"{path}/".startswith(f"{repository}/objects/")


def is_locked_by_git(path: RepoPath) -> bool:
    """Whether git itself changes this path only while it holds `<path>.lock`."""
    repository = repository_of(path)
    if repository is None:
        return False
    return path[len(repository) + 1 :].startswith(_LOCKED) and not path.endswith(".lock")


def is_index(path: RepoPath) -> bool:
    """Whether a path may be an index of git's, of a repository or of one of its further working trees."""
    return path.endswith("/index") and repository_of(path) is not None


def without_new_objects(changes: Sequence[Change]) -> list[Change]:
    """The changes without new objects of repositories that were there before the call."""
    ordinary, in_repository = split_off_git(changes)
    return [
        *ordinary,
        *(one for one in in_repository if not (is_object(one.path) and isinstance(one.before, Absent))),
    ]


def split_off_git(changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Split changes: ordinary ones, and those inside repositories that were there before and after."""
    if not [one for one in changes if _GIT in one.path]:
        return list(changes), []
    made_or_removed = {one.path for one in changes if isinstance(one.before, Absent) or isinstance(one.after, Absent)}
    ordinary, in_repository = list[Change](), list[Change]()
    for change in changes:
        repository = repository_of(change.path)
        is_ordinary = repository is None or repository in made_or_removed
        (ordinary if is_ordinary else in_repository).append(change)
    return ordinary, in_repository


def left_alone(changes: Sequence[Change], read: Callable[[Digest], bytes]) -> list[LeftAlone]:
    """One for each repository in which the changes are, in path order."""
    found = sorted({repository for one in changes if (repository := repository_of(one.path)) is not None})
    return [LeftAlone(repository, _head_move(repository, changes, read)) for repository in found]


def _head_move(
    repository: RepoPath, changes: Iterable[Change], read: Callable[[Digest], bytes]
) -> tuple[str, str] | None:
    """Where HEAD was and is. Every commit, checkout and reset adds a line `old new who when what` to HEAD's log."""
    for change in changes:
        if change.path == f"{repository}/logs/HEAD" and isinstance(change.after, FileEntry):
            earlier = read(change.before.digest) if isinstance(change.before, FileEntry) else b""
            added = read(change.after.digest).removeprefix(earlier)
            lines = [match for line in added.splitlines() if (match := _LOG_LINE.match(line)) is not None]
            if not lines or lines[0][1] == lines[-1][2]:
                return None
            return lines[0][1].decode("ascii"), lines[-1][2].decode("ascii")
    return None


def left_outside(notes: Iterable[Note]) -> list[LeftAlone]:
    """The repositories outside the root that the notes of calls name, with how each HEAD moved in all of the calls."""
    moves: dict[str, dict[str, str]] = {}
    is_stored: dict[str, bool] = {}
    for note in notes:
        if note["reason"] in OUTSIDE:
            path = note["path"]
            moves.setdefault(path, {})
            if "head_before" in note:
                moves[path][note["head_before"]] = note["head_after"]
            is_stored[path] = is_stored.get(path, True) and "blob_ref" in note
    return [LeftAlone(RepoPath(path), _ends(one), not is_stored[path]) for path, one in moves.items()]


def _ends(moves: Mapping[str, str]) -> tuple[str, str] | None:
    """HEAD before all of the moves and after them. The moves come in no particular order."""
    if not moves:
        return None
    # The first HEAD is one to which no move leads; if there is none, the moves form a circle.
    before = after = next((one for one in moves if one not in moves.values()), next(iter(moves)))
    for _ in moves:
        after = moves.get(after, after)
    return before, after


# The git directory of a linked working tree.


class LinkedGit:
    """Git's files of the linked working tree at a root, as Mulligan last read them."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._files: GitFiles | None = None
        self.has_read = False

    def read(self) -> None:
        """Read git's files now; a later difference counts as made by the next call."""
        self._files, self.has_read = read_git_files(self._root), True

    def note(self, store: Callable[[bytes], Digest]) -> dict[str, str] | None:
        """Read again. Returns the note of coverage that says what differs, if anything does."""
        before, self._files = self._files, read_git_files(self._root)
        if before is None or self._files is None or before.git_dir != self._files.git_dir:
            return None
        return git_note(before, self._files, store)

    def restores(self, path: bytes) -> bool:
        """Whether undo with `git="restore"` restores this file, or has no need to: objects and logs only grow."""
        if self._files is None:
            return False
        git_dir, common_dir = self._files.git_dir, self._files.common_dir
        branch = self._files.branch or HEAD
        return (
            os.path.relpath(path, git_dir) in self._files.files
            or path in (os.path.join(common_dir, branch), os.path.join(common_dir, b"logs", branch))
            or is_inside(path, os.path.join(git_dir, b"logs"))
            or is_inside(path, os.path.join(common_dir, b"objects"))
        )


def git_note(before: GitFiles, after: GitFiles, store: Callable[[bytes], Digest]) -> dict[str, str] | None:
    """None if HEAD, its branch and the index say the same. Without a blob if the store has no space for it."""
    moved = before.commit != after.commit
    if before == after or not (moved or _digests(before, before, after) != _digests(after, before, after)):
        return None
    if moved and before.commit and after.commit:
        head = {"head_before": before.commit.decode("ascii"), "head_after": after.commit.decode("ascii")}
        note = {"path": _GIT, "reason": COMMIT_OUTSIDE, **head}
    else:
        note = {"path": _GIT, "reason": GIT_OUTSIDE}
    try:
        return note | {"blob_ref": store(_encode_note(before, after))}
    except MulliganError as error:
        if error.code != "no_space":
            raise
        return note


def _branches(before: GitFiles, after: GitFiles) -> list[bytes]:
    """The branches that this working tree had checked out."""
    return sorted({one for one in (before.branch, after.branch) if one is not None})


def _digests(files: GitFiles, before: GitFiles, after: GitFiles) -> dict[bytes, str | None]:
    """HEAD, the index and the branches: an undo operation goes on only if these are as the call left them."""
    branches = {name: _text(files.branches.get(name)) for name in _branches(before, after)}
    return {HEAD: _digest(HEAD, files.files.get(HEAD)), INDEX: _digest(INDEX, files.files.get(INDEX))} | branches


def _digest(name: bytes, data: bytes | None) -> str | None:
    if data is None:
        return None
    # Of an index, only what people staged counts: `git status` writes the rest anew.
    staged = summary_of(data) if name == INDEX else None
    return sha256(data if staged is None else staged).hexdigest()


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("ascii")


def _encode_note(before: GitFiles, after: GitFiles) -> bytes:
    # Only what differs: an index may be large, and the blob is kept as long as the call.
    names = sorted({*before.files, *after.files})
    changed = [name for name in names if before.files.get(name) != after.files.get(name)]
    branches = [name for name in _branches(before, after) if before.branches.get(name) != after.branches.get(name)]
    body = {
        "git_dir": to_wire(RepoPath(os.fsdecode(before.git_dir))),
        "index_ns": before.index_ns,
        "files": [
            {
                "name": _wire(name),
                "before": _encode_bytes(before.files.get(name)),
                "after": _digest(name, after.files.get(name)),
            }
            for name in changed
        ],
        "branches": [
            {
                "name": _wire(name),
                "before": _text(before.branches.get(name)),
                "after": _text(after.branches.get(name)),
            }
            for name in branches
        ],
    }
    return encode(body)


def _wire(name: bytes) -> str:
    return to_wire(path_from_bytes(name))


def _encode_bytes(data: bytes | None) -> dict[str, str] | None:
    if data is None:
        return None
    try:
        # Text stays text, so that redaction can find secrets in it.
        return {"text": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode("ascii")}


def _decode_bytes(encoded: Mapping[str, str] | None) -> bytes | None:
    if encoded is None:
        return None
    return b64decode(encoded["base64"]) if "base64" in encoded else encoded["text"].encode("utf-8")


@fast_dataclass(slots=True, frozen=True)
class GitMove:
    """What an undo operation does to git's files of a linked working tree.

    `overwrites`: another process or person has changed them since, and the undo replaces that.
    """

    path: RepoPath
    root: bytes
    now: GitFiles
    change: GitChange
    overwrites: bool = False

    def apply(self, verb: str, at: datetime) -> GitFiles:
        """Returns git's files as they are then. Raises `GitBusyError` and `GitLockedError`."""
        line = f"mulligan <mulligan@localhost> {int(at.timestamp())} +0000\tmulligan {verb}"
        return change_git_files(self.root, self.now, self.change, line=line.encode("ascii"))


class GitConflictError(Exception):
    """HEAD, its branch or the index is no longer as the calls left it."""


class GitNotStoredError(Exception):
    """The store has no copy of git's files."""


def plan_git(
    path: RepoPath, root: bytes, notes: Iterable[Note], read: Callable[[Digest], bytes], *, insist: bool
) -> GitMove | None:
    """Plan how to restore git's files to before the calls with these notes, which come newest first.

    None if there is nothing to do. Raises `GitConflictError`, unless `insist`, and `GitNotStoredError`.
    """
    now = read_git_files(root)
    if now is None:
        raise GitConflictError
    files, branches, index_ns, clashes = dict(now.files), dict(now.branches), 0, False
    # Newest first: each note takes the files one call back, so that the next one must fit.
    for note in notes:
        body = _decode_note(note, read)
        if path_bytes(RepoPath(text_from_wire(body["git_dir"]))) != now.git_dir:
            raise GitConflictError
        for one in body["files"]:
            name, before = bytes_from_wire(one["name"]), _decode_bytes(one["before"])
            is_same = _digest(name, files.get(name)) == one["after"]
            clashes |= not is_same and name in (HEAD, INDEX)
            # git compares the time of the index with times of files, so it is restored, too.
            index_ns = body["index_ns"] if name == INDEX else index_ns
            if is_same or insist:
                _set(files, name, before)
        for one in body["branches"]:
            name = bytes_from_wire(one["name"])
            clashes |= _text(branches.get(name)) != one["after"]
            _set(branches, name, None if one["before"] is None else one["before"].encode("ascii"))
    change = GitChange(_differing(now.files, files), _differing(now.branches, branches), index_ns)
    is_index_same = all(_digest(name, now.files.get(name)) == _digest(name, files.get(name)) for name in (HEAD, INDEX))
    if change.is_empty or (is_index_same and now.branches == branches):
        return None
    gone = [name for name, commit in change.branches.items() if commit is None]
    # A branch that another working tree has checked out cannot move. A packed one has no file to delete.
    if any(is_elsewhere(now, name) for name in change.branches) or any(is_packed(now, name) for name in gone):
        raise GitConflictError
    if clashes and not insist:
        raise GitConflictError
    return GitMove(path, root, now, change, overwrites=clashes)


def _decode_note(note: Note, read: Callable[[Digest], bytes]) -> dict[str, Any]:
    if "blob_ref" not in note:
        raise GitNotStoredError
    try:
        body: dict[str, Any] = decode(read(Digest(note["blob_ref"])))
    except MulliganError:
        raise GitNotStoredError from None
    return body


def _set(where: dict[bytes, bytes], name: bytes, value: bytes | None) -> None:
    if value is None:
        where.pop(name, None)
    else:
        where[name] = value


def _differing(now: Mapping[bytes, bytes], wanted: Mapping[bytes, bytes]) -> dict[bytes, bytes | None]:
    return {name: wanted.get(name) for name in sorted({*now, *wanted}) if now.get(name) != wanted.get(name)}


# What git's object store has, for a baseline.


def clean_files(root: bytes, stamps: Mapping[bytes, Stamp]) -> dict[bytes, str]:
    """Git's object ids of the tracked files below a root that have these stamps and whose bytes git has."""
    try:
        with reading(root) as git:
            return {} if git is None else _clean_files(git, root, stamps)
    except GitError:
        return {}


def _clean_files(git: GitReader, root: bytes, stamps: Mapping[bytes, Stamp]) -> dict[bytes, str]:
    # Each row of the status is two letters, a space and a path.
    dirty = {row[3:] for row in git.status(exact=True).split(b"\0") if row}
    tracked = [one for one in git.staged() if stat.S_ISREG(one.mode) and path_bytes(one.path) not in dirty]
    sizes = _object_sizes(git, [one.oid for one in tracked])
    paths = {os.path.join(root, path_bytes(one.path)): one.oid for one in tracked}
    # A clean file has another size than its object if attributes, such as line endings, change git's bytes.
    return {
        path: oid
        for path, oid in paths.items()
        if path in stamps and stamps[path][2] == sizes.get(oid) and _is_plain(path, stamps[path])
    }


def _is_plain(path: bytes, stamp: Stamp) -> bool:
    """Whether a path is a file with this stamp and without extended attributes, which git does not have."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        now = os.fstat(handle)
        is_same = (now.st_ctime_ns, now.st_mtime_ns, now.st_size) == stamp[:3]
        return stat.S_ISREG(now.st_mode) and is_same and not read_xattrs(handle)
    finally:
        os.close(handle)


def git_contents(root: bytes, oids: Mapping[bytes, str]) -> dict[bytes, bytes]:
    """The bytes of files by git's object ids: from git, or from the file itself if it still is that object."""
    try:
        with reading(root) as git:
            contents = {} if git is None else git.contents(list(oids.values()))
    except GitError:
        contents = {}
    found = {path: contents[oid] if oid in contents else _read_if_still(path, oid) for path, oid in oids.items()}
    return {path: data for path, data in found.items() if data is not None}


def _read_if_still(path: bytes, oid: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return data if oid_of(data, like=oid) == oid else None


def lost_objects(folder: bytes, names: Iterable[bytes]) -> bool:
    """Whether a repository has lost an object with these files of its object store. A packed object is not lost."""
    parts = [name.split(b"/") for name in names]
    if any(part[0] == b"pack" and part[-1].endswith(b".pack") for part in parts):
        return True
    oids = {b"".join(part).decode("ascii") for part in parts if len(part) == 2 and _OID.fullmatch(b"".join(part))}
    try:
        with reading(folder) as git:
            return bool(oids) and (git is None or len(_object_sizes(git, list(oids))) < len(oids))
    except GitError:
        return True


def _object_sizes(git: GitReader, oids: list[str]) -> dict[str, int]:
    """Of those that git has."""
    asked = "".join(f"{oid}\n" for oid in oids).encode("ascii")
    rows = [row.split(b" ") for row in git.run("cat-file", "--batch-check", "--buffer", stdin=asked).splitlines()]
    return {row[0].decode("ascii"): int(row[2]) for row in rows if len(row) == 3}


def move_git(acting: Call, move: GitMove, verb: str) -> None:
    """Change git's files outside the root, as a part of the call."""
    acting.commands.begin()
    now = move.apply(verb, acting.ledger.clock.now())
    note = git_note(move.now, now, acting.ledger.blobs.store)
    if note is not None:
        acting.note_git(note | {"path": to_wire(move.path)})
