"""Reading a repository whose owner may wish us ill. Nothing it configures runs, and nothing of it is written.

Git takes its configuration from the common directory of a repository. We give it another one: a shadow in a temporary
directory, with a configuration of our own and links to the refs of the real one. So no setting of the repository is in
force at all: no fsmonitor, hook, filter, textconv, merge driver, alias, remote or include, whatever its name, and no
setting of the user or the system either. New objects (`write-tree` makes some) go into the shadow; the index is copied
where a command might rewrite it.

A repository is one only at the root itself: what lies above the root is none of our business.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import new as new_hash
from types import TracebackType

from mulligan.values.paths import RepoPath, path_bytes, path_from_bytes
from mulligan.values.plain import plain

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
"""Everything that could change what git says, at the value it has when nobody has set it."""

STATUS_FLAGS = (
    "--porcelain=v1",
    "-z",
    "--no-column",
    "--no-branch",
    "--no-show-stash",
    "--ignored=no",
    "--ignore-submodules=dirty",
)


class GitFailed(Exception):
    """Git is not there, or this is nothing it can read."""


@plain(slots=True, frozen=True)
class Repository:
    """Where a repository keeps what belongs to this working tree, and what all of its working trees share."""

    root: bytes
    git_dir: bytes
    common_dir: bytes


@plain(slots=True, frozen=True)
class Tracked:
    """A file as git knows it: its mode with the type bits, and the id of its content."""

    path: RepoPath
    mode: int
    oid: str

    @property
    def is_submodule(self) -> bool:
        return stat.S_IFMT(self.mode) not in (stat.S_IFREG, stat.S_IFLNK)


def find_repository(root: bytes) -> Repository | None:
    """The repository whose working tree is at this very directory."""
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
    """A regular file, or nothing. Whoever opens a FIFO waits for a writer that never comes."""
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
    """The name that git has for the bytes of a file, in the hash of its other names."""
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
    """Asks git about one repository through a shadow of it. Close it: the shadow is a temporary directory."""

    def __init__(self, repository: Repository) -> None:
        program = shutil.which("git")
        if program is None:
            raise GitFailed("git is not installed")
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
        shutil.rmtree(self._shadow, ignore_errors=True)

    def __enter__(self) -> GitReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # What can be asked.

    def head_oid(self) -> str:
        """The commit HEAD names; empty when there is none yet."""
        return self._line("rev-parse", "--verify", "--quiet", "HEAD")

    def index_oid(self) -> str:
        """The tree the index would be committed as; empty when it cannot be."""
        copy = os.path.join(self._shadow, b"index")
        with suppress(FileNotFoundError):
            os.unlink(copy)
        with suppress(FileNotFoundError):
            # With its times: git takes a file that is as old as the index for one that may have changed since.
            shutil.copy2(os.path.join(self.repository.git_dir, b"index"), copy)
        # In sight of the real objects git would set the times of those it wants to write and finds there.
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

    # How it is asked.

    def run(self, *words: str | bytes, stdin: bytes | None = None, env: Mapping[bytes, bytes] | None = None) -> bytes:
        """What a git command prints. Raises GitFailed when it fails or takes too long."""
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
            raise GitFailed(str(error)) from None
        if done.returncode != 0:
            raise GitFailed(done.stderr.decode("utf-8", "replace").strip())
        return done.stdout

    def _line(self, *words: str, env: Mapping[bytes, bytes] | None = None) -> str:
        try:
            answer = self.run(*words, env=env).strip()
        except GitFailed:
            return ""
        return answer.decode("ascii") if _OID.match(answer) else ""

    def _kept_settings(self) -> dict[str, str]:
        """The few settings that say how the repository is laid out: without them it could not be read."""
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
    """All that git is told about the world: nothing of our own environment but where programs are."""
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
    """A path in a list that colons divide."""
    escaped = path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"' + escaped + b'"'


@contextmanager
def reading(root: bytes) -> Iterator[GitReader | None]:
    """A reader of the repository at the root; None when there is none, or no git."""
    repository = find_repository(root)
    try:
        reader = None if repository is None else GitReader(repository)
    except GitFailed:
        reader = None
    try:
        yield reader
    finally:
        if reader is not None:
            reader.close()
