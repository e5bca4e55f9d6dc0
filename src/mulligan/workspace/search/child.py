"""The process that searches where a search may have to be killed: reads a request, writes its findings, ends."""

from __future__ import annotations

import marshal
import sys

from mulligan.workspace.search.bases import admit_all
from mulligan.workspace.search.finders import Recipe, make_finder
from mulligan.workspace.search.native import FileSearch


def main() -> None:
    root_fd, recipe, paths, limit = marshal.loads(sys.stdin.buffer.read())
    found = FileSearch(root_fd, make_finder(Recipe(*recipe)), limit, admit_all, lambda: None).among(paths)
    rows = [(line.path, line.line_no, line.text, line.cut) for line in found]
    sys.stdout.buffer.write(marshal.dumps(rows))


if __name__ == "__main__":
    main()
