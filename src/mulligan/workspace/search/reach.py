"""Whether a walk would come across a file, asked for a few without walking."""

from __future__ import annotations

from types import TracebackType

from mulligan.values.paths import ROOT, RepoPath, name_of, parent_of
from mulligan.workspace.search.handles import Handles
from mulligan.workspace.search.ignore import IgnoreRules, read_sources
from mulligan.workspace.search.listings import MARKS
from mulligan.workspace.search.walk import WalkPlan


class Reach:
    """Answers for one plan. The ignore files on the way are read once."""

    def __init__(self, root_fd: int, plan: WalkPlan) -> None:
        self._handles = Handles(root_fd)
        self._plan = plan
        self._inside: dict[str, IgnoreRules | None] = {}

    def __enter__(self) -> Reach:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handles.__exit__(kind, error, tb)

    def holds(self, path: RepoPath) -> bool:
        """Whether nothing on the way from the base to this file is ignored, nor the file. It may still be no file."""
        rules = self._rules_in(parent_of(path))
        return rules is not None and not rules.ignores(name_of(path), is_dir=False)

    def _rules_in(self, directory: RepoPath) -> IgnoreRules | None:
        """The rules inside a directory; None when a walk would not enter it."""
        missing = [directory]
        while missing[-1] not in self._inside and missing[-1] != self._plan.base:
            missing.append(parent_of(missing[-1]))
        for one in reversed(missing):
            if one not in self._inside:
                self._inside[one] = self._read_rules(one)
        return self._inside[directory]

    def _read_rules(self, directory: RepoPath) -> IgnoreRules | None:
        if directory == self._plan.base:
            inside = self._plan.rules if directory == ROOT else self._plan.rules.child(name_of(directory))
        else:
            above = self._inside[parent_of(directory)]
            if above is None or above.ignores(name_of(directory), is_dir=True):
                return None
            inside = above.child(name_of(directory))
        try:
            return inside.with_sources(read_sources(self._handles.directory(directory), MARKS))
        except OSError:
            return None
