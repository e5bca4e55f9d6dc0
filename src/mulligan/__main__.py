"""`python -m mulligan`: the command line. `mulligan mcp` starts without click, because agent hosts wait for it."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing it from `typing` takes as long as the rest of a quick verb

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.servers.mcp.stdio import McpOptions


def open_asked(asked: McpOptions) -> Mulligan:
    from mulligan.api import hide_secrets, refuse_secret
    from mulligan.cli.open_root import open_for_changes
    from mulligan.cli.options import Common

    hide_secrets()
    refuse_secret(asked.store)
    return open_for_changes(Common(asked.root, asked.session, asked.store, as_json=False))


def _in_utf8() -> None:
    """File names are UTF-8, so under another locale this starts Python again in UTF-8 mode.

    It uses an option, not a variable, because commands would inherit a variable.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _with_streams() -> None:
    """Opens /dev/null for closed streams. Otherwise the store could get descriptor 1, and output would overwrite it."""
    for handle, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), handle)
            setattr(sys, name, os.fdopen(handle, "w" if handle else "r", encoding="utf-8"))


def main() -> None:
    _with_streams()
    _in_utf8()
    if sys.argv[1:2] == ["mcp"]:
        from mulligan.servers.mcp.stdio import parse_plain, serve_plain

        asked = parse_plain(sys.argv[2:])
        # The command line refuses a password in the URL of a server, and says so in one line.
        is_plain = asked is not None and not (asked.store or "").startswith("postgres")
        if asked is not None and is_plain and os.path.isdir(asked.root or "."):
            serve_plain(asked, open_asked)
            return
    from mulligan.command_client import run_in_background

    code = run_in_background(sys.argv[1:])
    if code is not None:
        sys.exit(code)
    from mulligan.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
