"""`python -m mulligan.cli` is `mulligan`."""

from __future__ import annotations

from mulligan.cli import main

main()
