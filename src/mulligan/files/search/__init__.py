"""Finding files by name and by content, the same way wherever it runs: `glob`, `grep` and their ignore rules."""

from mulligan.workspace.search.glob import GlobResult, glob
from mulligan.workspace.search.grep import GrepOptions, GrepResult, grep, render
from mulligan.workspace.search.ignore import IgnoreRules, is_ignored

__all__ = ["GlobResult", "GrepOptions", "GrepResult", "IgnoreRules", "glob", "grep", "is_ignored", "render"]
