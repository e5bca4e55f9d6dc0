"""The effects as methods: what a call in life and a call in replay have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mulligan.effects.receipt import Receipt, inline_bytes
from mulligan.values.paths import as_text

StrPath = str | os.PathLike[str]

_PATHS = frozenset({"path", "file_path", "to", "cwd"})


class Effects(ABC):
    """Each method performs one effect and answers with its Receipt. `AsyncEffects` has the same ones, to be awaited."""

    @abstractmethod
    def perform(self, effect: str, /, **params: Any) -> Receipt:
        """Any effect or tool by its name."""

    def read_file(self, /, path: StrPath, **params: Any) -> Receipt:
        """A file, its text in `receipt.text`; or a part: `offset_bytes`, `max_bytes`, `offset_lines`, `max_lines`."""
        return self.perform("read_file", path=path, **params)

    def write_file(
        self,
        path: StrPath,
        content: str | bytes | dict[str, Any],
        *,
        create_parents: bool = False,
        mode: str = "overwrite",
        expected_digest: str | None = None,
    ) -> Receipt:
        """Write a whole file: its text, its bytes, or a payload such as `{"blob_ref": {"blob_ref": …}}`.

        `create_new` never replaces; `expected_digest` replaces only what has that digest.
        """
        return self.perform(
            "write_file",
            path=path,
            content=_payload(content),
            create_parents=create_parents,
            mode=mode,
            expected_digest=expected_digest,
        )

    def edit_file(self, path: StrPath, old_string: str, new_string: str, *, replace_all: bool = False) -> Receipt:
        """Replace text that is there once, or with `replace_all` everywhere; white space and quotes may differ."""
        return self.perform(
            "edit_file", path=path, old_string=old_string, new_string=new_string, replace_all=replace_all
        )

    def apply_patch(
        self, patch: str | bytes | dict[str, Any], *, patch_format: str = "v4a", dry_run: bool = False
    ) -> Receipt:
        """Change several files, all or none: `v4a` (`*** Begin Patch`) or `unified`."""
        return self.perform("apply_patch", patch=_payload(patch), patch_format=patch_format, dry_run=dry_run)

    def grep(self, /, pattern: str, **params: Any) -> Receipt:
        """Lines that match a regular expression, as `path:line:text`.

        `path`, `glob_filter`, `case_insensitive` and `max_results` say where to look and for how much.
        """
        return self.perform("grep", pattern=pattern, **params)

    def glob(self, /, pattern: str, **params: Any) -> Receipt:
        """Files that match a pattern such as `**/*.py`, newest first; `path`, `max_results`, `include_ignored`."""
        return self.perform("glob", pattern=pattern, **params)

    def stat(self, path: StrPath) -> Receipt:
        """Whether a path is a file or a directory, its size and its time."""
        return self.perform("stat", path=path)

    def exists(self, path: StrPath) -> Receipt:
        """Whether there is anything at the path, in `receipt.exists`."""
        return self.perform("exists", path=path)

    def list_dir(self, /, path: StrPath = ".", **params: Any) -> Receipt:
        """The names in a directory, directories with a trailing slash."""
        return self.perform("list_dir", path=path, **params)

    def delete(self, path: StrPath, *, recursive: bool = False) -> Receipt:
        """Delete a file, a link, or a directory: one with something in it only if `recursive`."""
        return self.perform("delete", path=path, recursive=recursive)

    def move(self, path: StrPath, to: StrPath, *, overwrite: bool = False) -> Receipt:
        """Move a file, a link or a directory; onto something else only with `overwrite`."""
        return self.perform("move", path=path, to=to, overwrite=overwrite)

    def mkdir(self, path: StrPath, *, parents: bool = False) -> Receipt:
        """Make a directory, with `parents` those around it too."""
        return self.perform("mkdir", path=path, parents=parents)

    def exec(
        self,
        /,
        argv: Sequence[str],
        *,
        cwd: StrPath | None = None,
        timeout_ms: int | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        **how: Any,
    ) -> Receipt:
        """Run a program; `how` takes rollback_on, isolate, sandbox, network and strategy."""
        given = {"cwd": cwd, "timeout_ms": timeout_ms, "env": _plain(env), "stdin": stdin}
        return self.perform("host.exec", argv=_plain(argv), **given, **how)

    def read_blob(self, blob_ref: str, *, offset_bytes: int = 0, max_bytes: int | None = None) -> Receipt:
        """Page through an answer that was too large to be inline."""
        return self.perform("blob.read", blob_ref=blob_ref, offset_bytes=offset_bytes, max_bytes=max_bytes)


class CallWithId(ABC):
    """A call that a block has made, wherever its id is asked for."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The call's own id, which `undo` and `restore` take."""


def asked(params: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with each path as the text that effects take."""
    given = {name: value for name, value in params.items() if value is not None}
    return {name: as_text(value) if name in _PATHS else value for name, value in given.items()}


def _payload(content: str | bytes | dict[str, Any]) -> str | dict[str, Any]:
    return inline_bytes(content) if isinstance(content, bytes | bytearray | memoryview) else content


def _plain(given: object) -> object:
    """A mapping as a dict, words as a list; one text is no list of its letters, and what is neither is for the effect
    to refuse."""
    if isinstance(given, Mapping):
        return dict(given)
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else given
