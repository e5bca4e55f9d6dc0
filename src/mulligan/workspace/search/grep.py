"""Lines by what is in them: the same answer from every engine."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from mulligan.values.clock import monotonic_s
from mulligan.values.limits import GREP_RESULTS_DEFAULT, REGEX_TIMEOUT_S
from mulligan.values.paths import ROOT, RepoPath, name_of, to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.search import native, ripgrep
from mulligan.workspace.search.bases import SHARED_CACHE, refusing_bad_base
from mulligan.workspace.search.dialect import parse
from mulligan.workspace.search.findings import Job, Line, Selection
from mulligan.workspace.search.glob_pattern import GlobError, parse_glob
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.tree_cache import TreeCache
from mulligan.workspace.search.walk import Walk

Engine = Literal["ripgrep", "native"]


@dataclass(slots=True, frozen=True)
class GrepResult:
    """The matching lines by path bytes, then line. `truncated`: there are more, or a limit kept files unsearched.

    `files_searched` counts up to the file that holds the last line looked at; binary and unreadable files count too.
    """

    lines: tuple[Line, ...]
    truncated: bool
    engine: Engine
    files_searched: int
    unreadable: tuple[RepoPath, ...] = ()

    @property
    def match_count(self) -> int:
        return len(self.lines)
