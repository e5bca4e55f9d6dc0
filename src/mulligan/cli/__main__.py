"""`python -m mulligan.cli` is `mulligan`."""

from __future__ import annotations

from mulligan.__main__ import main

main()
