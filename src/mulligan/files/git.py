"""Reads a repository whose owner may be hostile. It runs nothing that the repository configures, and writes nothing
into it.

Git reads its configuration from the common directory of a repository. Mulligan gives it another one: a shadow in a
temporary directory, with a configuration of its own and links to the refs of the real one. So no setting of the
repository has any effect: no fsmonitor, hook, filter, textconv, merge driver, alias, remote or include, whatever its
name, and no setting of the user or the system either. New objects (`write-tree` makes some) go into the shadow; the
index is copied if a command might rewrite it. A repository counts only if it is at the root itself, not above it.

`have_same_entries` compares two indexes of git. `git status` rewrites the index with new times and inodes of the files,
though no file was staged. Two indexes count as equal if they have the same entries: paths, modes, ids, stages and the
marks that people set.

`read_git_files` and `change_git_files` read and replace git's own files of a linked working tree, whose git directory
is outside the root. `.git` is then a file that names the git directory. That directory has the state of this working
tree alone (HEAD, the index, the state of a merge); the common directory has the branches of all working trees. Only the
branch that HEAD names belongs to this working tree: git lets no other one check it out. So Mulligan changes no other
branch.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import new as new_hash
from struct import Struct, error
from types import TracebackType

from mulligan.values.clock import monotonic_s
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes

TIMEOUT_S = 120.0

_POINTER_MAX_BYTES = 8_192
_CONFIG_MAX_BYTES = 4 * 1024 * 1024
_OID = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_SHARED = ("refs", "packed-refs", "info", "shallow", "reftable")
_OWN_FILES = (b"HEAD", b"index")
_COMMON_FILES = (
    b"packed-refs",
    b"shallow",
    b"info/exclude",
    b"info/attributes",
    b"info/sparse-checkout",
    b"objects/info/alternates",
)
_KEPT_SETTINGS = re.compile(rb"objectformat|refstorage|sparse", re.IGNORECASE)
_KEPT_KEYS = frozenset(
    {
        b"core.repositoryformatversion",
        b"core.sparsecheckout",
        b"core.sparsecheckoutcone",
        b"extensions.objectformat",
        b"extensions.refstorage",
        b"index.sparse",
    }
)

# Every setting that changes git's output, with its default value.
PINNED_SETTINGS: Mapping[str, str] = {
    "core.attributesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.checkStat": "default",
    "core.eol": "lf",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.ignoreCase": "false",
    "core.precomposeUnicode": "false",
    "core.protectHFS": "false",
    "core.quotePath": "true",
    "core.safecrlf": "false",
    "core.symlinks": "true",
    "core.trustctime": "true",
    "core.untrackedCache": "false",
    "diff.renameLimit": "1000",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "status.renameLimit": "1000",
    "submodule.recurse": "false",
}

STATUS_FLAGS = (
    "--porcelain=v1",
    "-z",
    "--no-column",
    "--no-branch",
    "--no-show-stash",
    "--ignored=no",
    "--ignore-submodules=dirty",
)


class GitError(Exception):
    """Git is not installed, or cannot read this repository."""


@fast_dataclass(slots=True, frozen=True)
class Repository:
    """The git directory of this working tree, and the common directory of all its working trees."""

    root: bytes
    git_dir: bytes
    common_dir: bytes


@fast_dataclass(slots=True, frozen=True)
class Tracked:
    """A tracked file: its mode with the type bits, and the id of its content."""

    path: RepoPath
    mode: int
    oid: str

    @property
    def is_submodule(self) -> bool:
        return stat.S_IFMT(self.mode) not in (stat.S_IFREG, stat.S_IFLNK)


def find_repository(root: bytes) -> Repository | None:
    """The repository whose working tree is exactly this directory."""
    git_dir = _git_dir(root)
    if git_dir is None or not os.path.lexists(os.path.join(git_dir, b"HEAD")):
        return None
    pointer = _first_line(os.path.join(git_dir, b"commondir"))
    common = git_dir if pointer is None else os.path.normpath(os.path.join(git_dir, pointer))
    if not os.path.isdir(os.path.join(common, b"objects")):
        return None
    read = [os.path.join(git_dir, name) for name in _OWN_FILES] + [os.path.join(common, name) for name in _COMMON_FILES]
    return Repository(root, git_dir, common) if all(map(_is_plain, read)) else None


def _is_plain(path: bytes) -> bool:
    """Whether the path is a regular file or missing. Opening a FIFO would wait for a writer that never comes."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _git_dir(root: bytes) -> bytes | None:
    entry = os.path.join(root, b".git")
    if os.path.isdir(entry):
        return entry
    pointer = _first_line(entry)
    if pointer is None or not pointer.startswith(b"gitdir: "):
        return None
    target = os.path.normpath(os.path.join(root, pointer[len(b"gitdir: ") :]))
    return target if os.path.isdir(target) else None


def _first_line(path: bytes) -> bytes | None:
    data = read_small(path, _POINTER_MAX_BYTES)
    return None if data is None else data.split(b"\n", 1)[0].rstrip(b"\r")


def oid_of(data: bytes, *, like: str) -> str:
    """The id that git gives these bytes, in the hash function of the id `like`."""
    hashed = new_hash("sha256" if len(like) == 64 else "sha1", b"blob %d\0" % len(data), usedforsecurity=False)
    hashed.update(data)
    return hashed.hexdigest()


def read_small(path: bytes, max_bytes: int) -> bytes | None:
    """The bytes of a regular file that is not too large; None for anything else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        data = os.read(handle, max_bytes + 1)
    except OSError:
        return None
    finally:
        os.close(handle)
    return data if len(data) <= max_bytes else None


class GitReader:
    """Runs git commands on one repository through its shadow. Close it: the shadow is a temporary directory."""

    def __init__(self, repository: Repository) -> None:
        # Most runs of the program start no git.
        import shutil
        import tempfile

        program = shutil.which("git")
        if program is None:
            raise GitError("git is not installed")
        self.repository = repository
        self._program = program
        self._shadow = os.fsencode(tempfile.mkdtemp(prefix="mulligan-git-"))
        self._env = _environment(repository, self._shadow)
        os.mkdir(os.path.join(self._shadow, b"objects"))
        for name in map(os.fsencode, _SHARED):
            with suppress(FileExistsError):
                os.symlink(os.path.join(repository.common_dir, name), os.path.join(self._shadow, name))
        self._write_settings({})
        self._write_settings(self._kept_settings())

    def close(self) -> None:
        import shutil

        shutil.rmtree(self._shadow, ignore_errors=True)

    def __enter__(self) -> GitReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Reading.

    def head_oid(self) -> str:
        """The commit HEAD names; empty when there is none yet."""
        return self._line("rev-parse", "--verify", "--quiet", "HEAD")

    def index_oid(self) -> str:
        """The id of the tree that a commit of the index would have; empty if git cannot write it."""
        import shutil
        import tempfile

        copy = os.path.join(self._shadow, b"index")
        with suppress(FileNotFoundError):
            os.unlink(copy)
        with suppress(FileNotFoundError):
            # Copy it with its times: git checks a file again if it is as new as the index.
            shutil.copy2(os.path.join(self.repository.git_dir, b"index"), copy)
        # With access to the real objects, git would update the times of those that it finds there instead of writing
        # them.
        with tempfile.TemporaryDirectory(dir=os.fsdecode(self._shadow)) as scratch:
            objects = os.fsencode(scratch)
            env = {b"GIT_INDEX_FILE": copy, b"GIT_OBJECT_DIRECTORY": objects, b"GIT_ALTERNATE_OBJECT_DIRECTORIES": b""}
            return self._line("write-tree", "--missing-ok", env=env)

    def status(self, *, exact: bool = False) -> bytes:
        """`git status --porcelain=v1 -z`. When `exact`, every untracked file by its name and no renames."""
        how = ("--untracked-files=all", "--no-renames") if exact else ("--untracked-files=normal", "--find-renames=50%")
        return self.run("status", *STATUS_FLAGS, *how)

    def tree(self, paths: Sequence[RepoPath] = (), *, commit: str | None = None) -> Iterator[Tracked]:
        """The files of a commit, HEAD by default: all, or those at and below the paths; none before the first one."""
        chosen = self.head_oid() if commit is None else commit
        if not chosen:
            return
        for row in self.run("ls-tree", "-r", "-z", "--full-tree", chosen, *_pathspecs(paths)).split(b"\0")[:-1]:
            facts, _, name = row.partition(b"\t")
            mode, _, oid = facts.split(b" ")
            yield Tracked(path_from_bytes(name), int(mode, 8), oid.decode("ascii"))

    def staged(self, paths: Sequence[RepoPath] = ()) -> Iterator[Tracked]:
        """The files of the index, without those in conflict."""
        for row in self.run("ls-files", "--stage", "-z", *_pathspecs(paths)).split(b"\0")[:-1]:
            facts, _, name = row.partition(b"\t")
            mode, oid, stage = facts.split(b" ")
            if stage == b"0":
                yield Tracked(path_from_bytes(name), int(mode, 8), oid.decode("ascii"))

    def contents(self, oids: Sequence[str]) -> dict[str, bytes]:
        """The bytes of these blobs, as they are stored; those that are missing are left out."""
        answer = self.run("cat-file", "--batch", "--buffer", stdin="".join(f"{oid}\n" for oid in oids).encode("ascii"))
        found: dict[str, bytes] = {}
        at = 0
        while at < len(answer):
            end = answer.index(b"\n", at)
            words = answer[at:end].split(b" ")
            at = end + 1
            if len(words) == 3:
                size = int(words[2])
                found[words[0].decode("ascii")] = answer[at : at + size]
                at += size + 1
        return found

    # Running git.

    def run(self, *words: str | bytes, stdin: bytes | None = None, env: Mapping[bytes, bytes] | None = None) -> bytes:
        """The output of a git command. Raises GitError if it fails or takes too long."""
        import subprocess

        try:
            done = subprocess.run(
                [self._program, "--no-pager", "--literal-pathspecs", *words],
                cwd=self.repository.root,
                env={**self._env, **(env or {})},
                input=b"" if stdin is None else stdin,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GitError(str(error)) from None
        if done.returncode != 0:
            raise GitError(done.stderr.decode("utf-8", "replace").strip())
        return done.stdout

    def _line(self, *words: str, env: Mapping[bytes, bytes] | None = None) -> str:
        try:
            answer = self.run(*words, env=env).strip()
        except GitError:
            return ""
        return answer.decode("ascii") if _OID.match(answer) else ""

    def _kept_settings(self) -> dict[str, str]:
        """The few settings that describe the repository's format, without which git could not read it."""
        path = os.path.join(self.repository.common_dir, b"config")
        text = read_small(path, _CONFIG_MAX_BYTES)
        if text is None or not _KEPT_SETTINGS.search(text):
            return {}
        rows = self.run("config", "--file", path, "--no-includes", "--null", "--list").split(b"\0")
        pairs = [row.partition(b"\n") for row in rows]
        return {key.decode(): value.decode("utf-8", "replace") for key, _, value in pairs if key in _KEPT_KEYS}

    def _write_settings(self, kept: Mapping[str, str]) -> None:
        lines = []
        for key, value in {**kept, **PINNED_SETTINGS}.items():
            section, _, name = key.partition(".")
            quoted = re.sub(r'(["\\])', r"\\\1", value).replace("\n", "\\n")
            lines.append(f'[{section}]\n\t{name} = "{quoted}"\n')
        with open(os.path.join(self._shadow, b"config"), "w", encoding="utf-8") as file:
            file.write("".join(lines))


def _pathspecs(paths: Sequence[RepoPath]) -> list[bytes]:
    return [b"--", *(path_bytes(path) for path in paths)] if paths and "." not in paths else []


def _environment(repository: Repository, shadow: bytes) -> dict[bytes, bytes]:
    """The environment of git: nothing of our own environment except the PATH."""
    return {
        b"PATH": os.environb.get(b"PATH", os.defpath.encode()),
        b"HOME": shadow,
        b"XDG_CONFIG_HOME": shadow,
        b"LC_ALL": b"C",
        b"TZ": b"UTC",
        b"GIT_DIR": repository.git_dir,
        b"GIT_COMMON_DIR": shadow,
        b"GIT_WORK_TREE": repository.root,
        b"GIT_OBJECT_DIRECTORY": os.path.join(shadow, b"objects"),
        b"GIT_ALTERNATE_OBJECT_DIRECTORIES": _quoted(os.path.join(repository.common_dir, b"objects")),
        b"GIT_OPTIONAL_LOCKS": b"0",
        b"GIT_CONFIG_NOSYSTEM": b"1",
        b"GIT_CONFIG_SYSTEM": b"/dev/null",
        b"GIT_CONFIG_GLOBAL": b"/dev/null",
        b"GIT_ATTR_NOSYSTEM": b"1",
        b"GIT_ALLOW_PROTOCOL": b"none",
        b"GIT_NO_LAZY_FETCH": b"1",
        b"GIT_NO_REPLACE_OBJECTS": b"1",
        b"GIT_TERMINAL_PROMPT": b"0",
        b"GIT_PAGER": b"cat",
    }


def _quoted(path: bytes) -> bytes:
    """A path in a list with colons between the paths."""
    escaped = path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"' + escaped + b'"'


@contextmanager
def reading(root: bytes) -> Iterator[GitReader | None]:
    """A reader of the repository at the root; None when there is none, or no git."""
    repository = find_repository(root)
    try:
        reader = None if repository is None else GitReader(repository)
    except GitError:
        reader = None
    try:
        yield reader
    finally:
        if reader is not None:
            reader.close()


_HEADER = Struct(">4sII")
_STAT_AND_MODE = Struct(">24xI12x")
_SHORT = Struct(">H")
_EXTENSION = Struct(">4sI")
_SUMS = (("sha1", 20), ("sha256", 32))
_ASSUMED_AND_STAGE = 0xB000
_EXTENDED = 0x4000
# Extensions that can be computed again.
_QUICKER = frozenset({b"TREE", b"UNTR", b"FSMN", b"EOIE", b"IEOT"})


@fast_dataclass(slots=True, frozen=True)
class _Entry:
    path: bytes
    mode: int
    oid: bytes
    # The stage with the bit `assume unchanged`; the bits `intent to add` and `skip worktree`.
    marks: tuple[int, int]


def have_same_entries(one: bytes, other: bytes) -> bool:
    """Whether both are indexes with the same entries. An unreadable index equals none."""
    found = summary_of(one)
    return found is not None and found == summary_of(other)


def summary_of(data: bytes) -> bytes | None:
    """A summary that is equal for two indexes with the same entries. None for an unreadable index.

    The ids of an index are as long as the checksum at its end.
    """
    for algorithm, oid_size in _SUMS:
        summed = new_hash(algorithm, data[:-oid_size], usedforsecurity=False).digest()
        try:
            if data[-oid_size:] in (summed, bytes(oid_size)):
                return b"\n".join(map(_summary, _parts(data, oid_size)))
        except (error, ValueError, IndexError):
            continue
    return None


def _summary(part: object) -> bytes:
    if isinstance(part, _Entry):
        return b"%o %s %x %x %s" % (part.mode, part.oid.hex().encode(), *part.marks, part.path.hex().encode())
    assert isinstance(part, tuple)
    return b" ".join(one.hex().encode() for one in part)


def _parts(data: bytes, oid_size: int) -> Iterator[object]:
    magic, version, count = _HEADER.unpack_from(data)
    if magic != b"DIRC" or version not in (2, 3, 4):
        raise ValueError("not an index")
    at, path = _HEADER.size, b""
    for _ in range(count):
        entry, at = _entry(data, at, oid_size, None if version < 4 else path)
        path = entry.path
        yield entry
    end = len(data) - oid_size
    while at < end:
        name, size = _EXTENSION.unpack_from(data, at)
        at += _EXTENSION.size
        if name not in _QUICKER:
            yield name, data[at : at + size]
        at += size
    if at != end:
        raise ValueError("it ends elsewhere")


def _entry(data: bytes, start: int, oid_size: int, previous: bytes | None) -> tuple[_Entry, int]:
    """One entry, and the offset of the next. `previous`: the path before it, if paths are compressed against that."""
    (mode,) = _STAT_AND_MODE.unpack_from(data, start)
    at = start + _STAT_AND_MODE.size
    oid = data[at : at + oid_size]
    (flags,) = _SHORT.unpack_from(data, at + oid_size)
    at += oid_size + _SHORT.size
    more = 0
    if flags & _EXTENDED:
        (more,) = _SHORT.unpack_from(data, at)
        at += _SHORT.size
    kept = b""
    if previous is not None:
        less, at = _offset(data, at)
        kept = previous[: len(previous) - less]
    nul = data.index(b"\0", at)
    entry = _Entry(kept + data[at:nul], mode, oid, (flags & _ASSUMED_AND_STAGE, more))
    padded = start + (nul - start + 8) // 8 * 8
    return entry, padded if previous is None else nul + 1


def _offset(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = (value + 1 << 7) | (data[at] & 0x7F)
    return value, at + 1


HEAD = b"HEAD"
INDEX = b"index"
_BRANCHES = b"refs/heads/"
_SYMBOLIC = b"ref: "
_NO_COMMIT = b"0" * 40
# The folders in which git keeps a rebase or a cherry-pick that is not finished.
_IN_PROGRESS = (b"rebase-merge", b"rebase-apply", b"sequencer")

_NOT_OURS = frozenset(
    {b"commondir", b"gitdir", b"locked", b"config", b"config.worktree", b"description", b"packed-refs", b"shallow"}
)
_LOCK = b".lock"
_LOCK_WAIT_S = 2.0
_LOCK_NAP_S = 0.005
_FILE_MAX_BYTES = 1024 * 1024
_INDEX_MAX_BYTES = 64 * 1024 * 1024
_FILES_MAX = 1_000


@fast_dataclass(slots=True, frozen=True)
class GitFiles:
    """Git's own files of one linked working tree at one moment.

    `files`: by their name in the git directory. `branches`: the commit of each branch by its full name. `index_ns`: the
    time of the index. Git compares it with the times of files, to find those that changed in the same second.
    """

    git_dir: bytes
    common_dir: bytes
    files: Mapping[bytes, bytes]
    branches: Mapping[bytes, bytes]
    index_ns: int = 0

    @property
    def branch(self) -> bytes | None:
        """The branch that HEAD names; None if HEAD is detached."""
        head = self.files.get(HEAD, b"").strip()
        name = head.removeprefix(_SYMBOLIC)
        return name if name != head and name.startswith(_BRANCHES) and _is_inside(name) else None

    @property
    def commit(self) -> bytes | None:
        """The commit that is checked out; None before the first one."""
        head = self.files.get(HEAD, b"").strip()
        return self.branches.get(self.branch or b"") or (head if _OID.match(head) else None)


class GitBusyError(Exception):
    """Another process has changed git's files since Mulligan read them."""


class GitLockedError(Exception):
    """Another process holds one of git's locks for long, or left it behind. The argument is the path of the lock."""


def read_git_files(root: bytes) -> GitFiles | None:
    """Read git's files; None if the root is no linked working tree, or they cannot be read."""
    if not stat.S_ISREG(_file_mode(os.path.join(root, b".git"))):
        return None
    found = find_repository(root)
    if found is None or os.path.isdir(os.path.join(found.common_dir, b"reftable")):
        return None
    try:
        files = dict(_files(found.git_dir))
        index_ns = os.stat(os.path.join(found.git_dir, INDEX)).st_mtime_ns if INDEX in files else 0
        return GitFiles(found.git_dir, found.common_dir, files, _branches(found.common_dir), index_ns)
    except OSError:
        return None


def _file_mode(path: bytes) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _is_inside(name: bytes) -> bool:
    return not {b"", b".", b".."} & set(name.split(b"/")) and b"\0" not in name and not name.endswith(_LOCK)


def _files(git_dir: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Git's files without the logs, which only grow, and without the git directories of submodules."""
    count = 0
    for folder in (b"", *_IN_PROGRESS):
        for name in _names(os.path.join(git_dir, folder)):
            whole = os.path.join(folder, name)
            data = None if name in _NOT_OURS or name.endswith(_LOCK) else _read(os.path.join(git_dir, whole), name)
            if data is not None:
                yield whole, data
                count += 1
            if count > _FILES_MAX:
                raise OSError("too many files")


def _names(folder: bytes) -> list[bytes]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: bytes, name: bytes) -> bytes | None:
    """The bytes of a regular file; None for anything else. Raises OSError for one that is too large."""
    most = _INDEX_MAX_BYTES if name == INDEX else _FILE_MAX_BYTES
    if not stat.S_ISREG(_file_mode(path)):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError("too large")
    return data


def _branches(common_dir: bytes) -> dict[bytes, bytes]:
    """The commits of all branches. A branch's own file wins over its line in `packed-refs`."""
    found: dict[bytes, bytes] = {}
    packed = os.path.join(common_dir, b"packed-refs")
    if stat.S_ISREG(_file_mode(packed)):
        with open(packed, "rb") as file:
            for line in file:
                commit, _, name = line.rstrip(b"\n").partition(b" ")
                if name.startswith(_BRANCHES) and _OID.match(commit):
                    found[name] = commit
    folders = [_BRANCHES.rstrip(b"/")]
    while folders:
        folder = folders.pop()
        for entry in _entries(os.path.join(common_dir, folder)):
            name = folder + b"/" + entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(name)
            elif not name.endswith(_LOCK):
                commit = (_read(entry.path, entry.name) or b"").strip()
                if _OID.match(commit):
                    found[name] = commit
    return found


def _entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


@fast_dataclass(slots=True, frozen=True)
class GitChange:
    """The changes of git's files: `None` removes a file or a branch. Others stay.

    `index_ns`: the time that a new index gets.
    """

    files: Mapping[bytes, bytes | None]
    branches: Mapping[bytes, bytes | None]
    index_ns: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.files and not self.branches


def change_git_files(root: bytes, seen: GitFiles, change: GitChange, *, line: bytes) -> GitFiles:
    """Replace git's files while Mulligan holds git's own locks. Returns the files after that.

    Raises `GitLockedError` if another process holds a lock for long, `GitBusyError` if anything differs from `seen`.
    As git does, Mulligan writes the new bytes into the locks and then renames these: either all bytes are there, or
    nothing is replaced. HEAD and the index are always locked, so that no git command runs in the middle of this. `line`
    ends each new line of git's logs: who, when and why.
    """
    branches = {
        os.path.join(seen.common_dir, name): commit and commit + b"\n" for name, commit in change.branches.items()
    }
    files = {os.path.join(seen.git_dir, name): data for name, data in sorted(change.files.items())}
    wanted = branches | files
    always = (os.path.join(seen.git_dir, HEAD), os.path.join(seen.git_dir, INDEX))
    with ExitStack() as locks:
        for path in sorted({*wanted, *always}):
            locks.enter_context(_lock(path, wanted.get(path)))
        if change.index_ns and INDEX in change.files:
            os.utime(os.path.join(seen.git_dir, INDEX) + _LOCK, ns=(change.index_ns, change.index_ns))
        if read_git_files(root) != seen or any(is_elsewhere(seen, name) for name in change.branches):
            raise GitBusyError
        for path in (*(path for path in wanted if path not in always), *(path for path in always if path in wanted)):
            _put(path, wanted[path])
        for folder in _IN_PROGRESS:
            with suppress(OSError):
                os.rmdir(os.path.join(seen.git_dir, folder))
        now = read_git_files(root)
        if now is None:
            raise OSError("git's files cannot be read")
        _log(seen, now, change, line)
        return now


def is_packed(seen: GitFiles, branch: bytes) -> bool:
    """Whether `packed-refs` names the branch, so that deleting its own file does not delete it."""
    try:
        with open(os.path.join(seen.common_dir, b"packed-refs"), "rb") as file:
            return any(line.rstrip(b"\n").partition(b" ")[2] == branch for line in file)
    except FileNotFoundError:
        return False


def is_elsewhere(seen: GitFiles, branch: bytes) -> bool:
    """Whether another working tree of the repository has the branch checked out."""
    trees = os.path.join(seen.common_dir, b"worktrees")
    heads = [seen.common_dir, *(os.path.join(trees, name) for name in _names(trees))]
    others = (path for path in heads if os.path.realpath(path) != os.path.realpath(seen.git_dir))
    with suppress(OSError):
        return any((_read(os.path.join(path, HEAD), HEAD) or b"").strip() == _SYMBOLIC + branch for path in others)
    return True


@contextmanager
def _lock(path: bytes, data: bytes | None) -> Iterator[None]:
    """Hold git's lock of a file; the lock has the new bytes."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, until = None, monotonic_s() + _LOCK_WAIT_S
    while fd is None:
        try:
            fd = os.open(path + _LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if monotonic_s() > until:
                raise GitLockedError(os.fsdecode(path + _LOCK)) from None
            time.sleep(_LOCK_NAP_S)
    try:
        with open(fd, "wb") as file:
            file.write(data or b"")
            file.flush()
            os.fsync(fd)
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path + _LOCK)


def _put(path: bytes, data: bytes | None) -> None:
    """Rename the lock, or remove the file. Git makes the index and all refs with the mode that the umask leaves."""
    if data is not None:
        os.rename(path + _LOCK, path)
        return
    with suppress(FileNotFoundError):
        os.unlink(path)


def _log(seen: GitFiles, now: GitFiles, change: GitChange, line: bytes) -> None:
    """Add lines to git's logs of HEAD and branches, so that `git gc` keeps the commits and redo finds them."""
    _append(os.path.join(seen.git_dir, b"logs", HEAD), seen.commit, now.commit, line)
    for name in change.branches:
        log = os.path.join(seen.common_dir, b"logs", name)
        if name in now.branches:
            _append(log, seen.branches.get(name), now.branches[name], line)
        else:
            with suppress(OSError):
                os.unlink(log)


def _append(path: bytes, before: bytes | None, after: bytes | None, line: bytes) -> None:
    """Append to a log only if it exists, because git decides which logs there are."""
    if before == after or not stat.S_ISREG(_file_mode(path)):
        return
    with open(path, "ab") as file:
        file.write(b"%s %s %s\n" % (before or _NO_COMMIT, after or _NO_COMMIT, line))
