"""A directory is swapped for a link out of the root while effects run: none of them follows it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mulligan.testing import Link, plant, tree_of
from mulligan.values.canonical import encode
from tests.effects.directory_swapper import SWAPS_MIN
from tests.effects.effect_session import EffectSession, open_effect_session

SECRET = "SECRET-THAT-MUST-NOT-BE-SEEN"
ROUNDS = 60
PROGRAM = Path(__file__).with_name("directory_swapper.py")


def patch(verb: str, name: str, *lines: str) -> dict[str, object]:
    return {"patch": "\n".join(["*** Begin Patch", f"*** {verb} File: {name}", *lines, "*** End Patch"])}


def round_of(effects: EffectSession, at: int) -> list[str]:
    """One of everything, on paths below the directory that is being swapped; how each ended."""
    asked: list[tuple[str, dict[str, object]]] = [
        ("write_file", {"path": f"d/new{at}", "content": "x"}),
        ("write_file", {"path": "d/secret", "content": f"{at}\n"}),
        ("write_file", {"path": f"d/deep{at}/x", "content": "x", "create_parents": True}),
        ("edit_file", {"path": "d/text", "old_string": "one", "new_string": "one"}),
        ("apply_patch", patch("Add", f"d/patched{at}", "+x")),
        ("apply_patch", patch("Delete", f"d/new{at}")),
        ("move", {"path": f"d/patched{at}", "to": f"d/moved{at}"}),
        ("mkdir", {"path": f"d/made{at}"}),
        ("delete", {"path": "d/sub", "recursive": True}),
        ("read_file", {"path": "d/secret"}),
        ("list_dir", {"path": "d"}),
        ("stat", {"path": "d/only-outside"}),
        ("grep", {"pattern": "SECRET", "path": "d"}),
        ("glob", {"pattern": "**", "path": "d"}),
    ]
    found = []
    for effect, params in asked:
        receipt = effects.perform(effect, **params)
        assert SECRET.encode() not in encode(receipt) and b"only-outside" not in encode(receipt.get("entries", ""))
        found.append(str(receipt["status"]))
    return found


@pytest.mark.req("D18.check_use_race", "D3.judged_handle_is_acted_on", "D8.enforced_inside")
@pytest.mark.parametrize("engine", ["openat2", "walk"])
def test_no_effect_follows_a_directory_swapped_for_a_link(tmp_path: Path, engine: str) -> None:
    plant(tmp_path / "outside", {"secret": SECRET, "text": "one" + SECRET, "sub/x": SECRET, "only-outside": SECRET})
    before = tree_of(tmp_path / "outside")
    effects = open_effect_session(tmp_path)
    effects.plant({"d/secret": "mine\n", "d/text": "one\n", "d/sub/x": "", "link": Link("../outside")})
    if engine == "walk":
        disk = effects.workspace.open_root.disk
        disk.root = replace(disk.root, resolves_beneath=False)
    command = [sys.executable, str(PROGRAM), str(effects.root / "d"), str(effects.root / "link")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as swapper:
        ended = [status for at in range(ROUNDS) for status in round_of(effects, at)]
        counted, _ = swapper.communicate()
    assert int(counted) >= SWAPS_MIN
    assert tree_of(tmp_path / "outside") == before
    assert {"ok", "forbidden"} <= set(ended)
