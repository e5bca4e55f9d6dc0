"""`python -m mulligan`: the command line, with a short way to the one verb that other programs wait for."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mulligan.opening import Mulligan
    from mulligan.servers.mcp.door import Asked


def open_asked(asked: Asked) -> Mulligan:
    from mulligan.cli.doors import work
    from mulligan.cli.options import Common

    return work(Common(asked.root, asked.session, asked.store, as_json=False))


def _in_utf8() -> None:
    """Names of files are UTF-8 here, whatever the locale says: under another one Python is started again, told so.

    By an option, which only this process sees; commands that it runs would inherit a variable.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _with_streams() -> None:
    """Streams that were closed before us lead nowhere. Else the store would be opened as our output, and written to."""
    for handle, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), handle)
            setattr(sys, name, os.fdopen(handle, "w" if handle else "r", encoding="utf-8"))


def main() -> None:
    _with_streams()
    _in_utf8()
    if sys.argv[1:2] == ["mcp"]:
        from mulligan.servers.mcp.door import parse_plain, serve_plain

        asked = parse_plain(sys.argv[2:])
        if asked is not None and os.path.isdir(asked.root or "."):
            serve_plain(asked, open_asked)
            return
    from mulligan.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
