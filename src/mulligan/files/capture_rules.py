"""The paths that are not captured: `capture.never` and `capture.digest_only`.

Both are lists of patterns as in a `.gitignore`, relative to the root. They come from the user's `config.toml` and from
`.mulligan.toml` in the root. Mulligan applies each file by itself, so the project's file can add paths, but cannot
remove one that the user's file names. `never` wins over `digest_only`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from mulligan.values.digest import Digest
from mulligan.values.entries import FileEntry, Withheld
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.limits import MIB_BYTES
from mulligan.values.paths import RepoPath

if TYPE_CHECKING:
    from mulligan.files.tree.ignore import RuleFile

PROJECT_FILE = ".mulligan.toml"
CONFIG_MAX_BYTES = MIB_BYTES
PATCH_HEADERS = ("*** ", "--- ", "+++ ", "diff ", "rename ", "copy ")
"""How lines of a patch begin that name files."""

_NAME_MAX_CHARS = 4_096
"""The longest path that the kernel takes."""

SETTINGS: tuple[Withheld, ...] = ("never", "digest_only")

EXAMPLE = """\
# [capture]
# Paths whose bytes, digests and metadata Mulligan never stores. Patterns are those of a .gitignore.
# never = [".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519", ".ssh/", ".aws/credentials", ".netrc"]
# Paths of which Mulligan stores digest and metadata, but no bytes.
# digest_only = [".aws/", ".config/gcloud/", ".kube/config", "*.p12", "*.kdbx"]
"""


class DigestKey(Protocol):
    """Makes keyed digests. A store's `SecretKey` is one."""

    def keyed_digest(self, digest: Digest) -> Digest: ...


def user_file(environ: Mapping[str, str]) -> str:
    """`$XDG_CONFIG_HOME/mulligan/config.toml`; a relative variable is ignored, as XDG says."""
    config = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(config):
        config = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return os.path.join(config, "mulligan", "config.toml")


@fast_dataclass(slots=True, frozen=True)
class Patterns:
    """The patterns of one file, by setting."""

    never: RuleFile
    digest_only: RuleFile

    def matches(self, setting: Withheld, path: RepoPath) -> bool:
        """Whether a pattern matches the path or a directory above it.

        A `!` pattern has no effect below a matched directory.
        """
        rules = self.never if setting == "never" else self.digest_only
        names = path.split("/")
        for depth, name in enumerate(names, start=1):
            is_last = depth == len(names)
            whole = "/".join(names[:depth]).encode("utf-8", "surrogateescape")
            if rules.verdict(name, whole, is_dir=not is_last):
                return True
        return False


def parse_patterns(data: bytes, shown: str) -> Patterns | None:
    """The patterns of a file; None if it has no `capture` table. Raises `invalid_config`."""
    # Imported here, because most roots have neither of the two files, and every start opens a root.
    import tomllib

    from mulligan.files.tree.ignore import RuleFile

    try:
        section = tomllib.loads(data.decode("utf-8")).get("capture", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise fault("invalid_config", f"{shown} is no TOML: {error}.", file=shown) from None
    if not isinstance(section, dict):
        raise fault("invalid_config", f"{shown}: capture is a table, with never and digest_only.", file=shown)
    unknown = sorted(section.keys() - set(SETTINGS))
    if unknown:
        raise fault("invalid_config", f"{shown}: capture has never and digest_only, not {unknown[0]!r}.", file=shown)
    if not any(section.values()):
        return None
    return Patterns(*(RuleFile(_text_of(section.get(name, []), name, shown), 0) for name in SETTINGS))


def _text_of(patterns: Any, name: str, shown: str) -> bytes:
    from mulligan.files.tree.ignore import parse_rules

    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise fault("invalid_config", f"{shown}: capture.{name} is a list of patterns.", file=shown)
    lines = [one.encode("utf-8") for one in patterns]
    for line in lines:
        if b"\n" in line or b"\0" in line or not parse_rules(line):
            raise fault("invalid_config", f"{shown}: {line.decode()!r} in capture.{name} is no pattern.", file=shown)
    return b"\n".join(lines)


_Stamp = tuple[int, int, int] | None


class CaptureRules:
    """The capture patterns of one root. `refresh` reads changed files again."""

    def __init__(self, files: Sequence[str] = (), key: DigestKey | None = None) -> None:
        self._files = tuple(files)
        self._key = key
        self._stamps: list[_Stamp] = []
        self._patterns: tuple[Patterns, ...] = ()
        self.any = False
        """Whether there is any pattern at all."""

    def withheld(self, path: RepoPath) -> Withheld | None:
        if not self._patterns:
            return None
        for setting in SETTINGS:
            if any(patterns.matches(setting, path) for patterns in self._patterns):
                return setting
        return None

    def named(self, path: RepoPath, entry: FileEntry) -> FileEntry:
        """The entry of a path as the store may have it. `entry.digest` is the SHA-256 of its bytes."""
        setting = self.withheld(path)
        if setting != "never" or self._key is None:
            return replace(entry, withheld=setting)
        return replace(entry, withheld=setting, digest=self._key.keyed_digest(entry.digest))

    def load(self) -> None:
        """Read the files. Raises `invalid_config`, also for a file that exists and cannot be read."""
        stamps = self._stamps_now()
        found = [parse_patterns(data, name) for name in self._files if (data := _read(name)) is not None]
        self._patterns = tuple(one for one in found if one is not None)
        self.any = bool(self._patterns)
        self._stamps = stamps

    def refresh(self) -> None:
        """Read changed files again.

        While a file is invalid, its old patterns stay, because an agent may be in the middle of writing it.
        """
        if self._stamps_now() != self._stamps:
            with suppress(MulliganError):
                self.load()

    def _stamps_now(self) -> list[_Stamp]:
        """The stamps of the files, in one loop, because every call checks them."""
        stamps: list[_Stamp] = []
        for name in self._files:
            try:
                status = os.stat(name)
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return stamps


NO_RULES = CaptureRules()


def names_not_captured(rules: CaptureRules, given: Mapping[str, Any]) -> bool:
    """Whether parameters name a path that is not captured. For requests that were refused before a path was resolved.

    Only the names count: `../.env` leads to no path of the root, and a patch may have a mistake in its first line.
    """
    if not rules.any:
        return False
    texts = [given.get(name) for name in ("path", "file_path", "to")]
    named = [text for text in texts if isinstance(text, str)]
    patch = given.get("patch")
    inline = patch.get("inline_text") if isinstance(patch, Mapping) else None
    patch = inline.get("text") if isinstance(inline, Mapping) else patch
    for line in patch.splitlines() if isinstance(patch, str) else ():
        if line.startswith(PATCH_HEADERS):
            named += [line.partition(": ")[2], *line.split()]
    return any(_is_withheld_somewhere(rules, one) for one in named)


def _is_withheld_somewhere(rules: CaptureRules, text: str) -> bool:
    """Whether a pattern matches the end of the text, as a file or as a directory."""
    if len(text) > _NAME_MAX_CHARS:
        return True
    names = [name for name in text.split("/") if name not in ("", ".", "..")]
    ends = ["/".join(names[start:]) for start in range(len(names))]
    return any(rules.withheld(RepoPath(one)) or rules.withheld(RepoPath(f"{one}/-")) for one in ends)


def _read(name: str) -> bytes | None:
    try:
        with open(name, "rb") as file:
            data = file.read(CONFIG_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise fault("invalid_config", f"{name} cannot be read: {error.strerror}.", file=name) from error
    if len(data) > CONFIG_MAX_BYTES:
        raise fault("invalid_config", f"{name} is larger than {CONFIG_MAX_BYTES} bytes.", file=name)
    return data
