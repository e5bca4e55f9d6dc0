"""`mulligan acp -- …` that holds lines back for minutes, if need be, until what they depend on is on record.

The proxy that people use goes on after two seconds, so that a slow disk never stops the editor. On a busy machine the
agent would then change a file before the proxy has read the folder for the first time.
"""

from __future__ import annotations

from mulligan.cli import main
from mulligan.servers.acp import recorder, relay

_MINUTES_S = 600.0

if __name__ == "__main__":
    relay.HOLD_MAX_S = _MINUTES_S
    recorder._FIRST_READING_S = _MINUTES_S
    main()
