"""`mulligan acp` with a model whose script is in a file: one JSON line for each time it is asked."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mulligan.agents import providers
from mulligan.agents.providers import Mock
from mulligan.cli import run

script = [json.loads(line) for line in Path(os.environ["SCRIPT"]).read_text("utf-8").splitlines()]
providers._HOMES["scripted"] = (__name__, "Scripted")


class Scripted(Mock):
    def __init__(self) -> None:
        super().__init__(script)


sys.modules.setdefault(__name__, sys.modules["__main__"])
sys.exit(run(["acp", "--provider", "scripted", *sys.argv[1:]]))
