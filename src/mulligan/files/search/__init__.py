"""Finding files by name and by content, the same way wherever it runs: `glob`, `grep` and their ignore rules."""

from mulligan.files.search.glob import GlobResult, glob
from mulligan.files.search.grep import GrepOptions, GrepResult, grep, render
from mulligan.files.tree.ignore import IgnoreRules, is_ignored

__all__ = ["GlobResult", "GrepOptions", "GrepResult", "IgnoreRules", "glob", "grep", "is_ignored", "render"]
