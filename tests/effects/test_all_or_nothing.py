"""An effect happens wholly or not at all, on the disk too, whatever fails on the way."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mulligan.testing import File, Link, Tree, tree_of
from mulligan.testing.builders import Sketch
from mulligan.testing.faults import FaultPlan
from tests.effects.effect_session import EffectSession, open_effect_session

BEFORE: Sketch = {"a": "1\n", "b": File(b"2\n", 0o755), "c/d": "3\n", "gone": "x\n", "e/f": "y\n", "link": Link("a")}

PATCH = """\
*** Begin Patch
*** Update File: a
@@
-1
+one
*** Update File: b
*** Move to: moved/b
@@
-2
+two
*** Delete File: gone
*** Delete File: link
*** Add File: new/deep/file
+new
*** Update File: c/d
@@
-3
+three
*** Delete File: e/f
*** Add File: e
+file
*** End Patch"""

UNIFIED = """\
--- a/a
+++ b/a
@@ -1 +1 @@
-1
+one
diff --git a/b b/z/b
similarity index 50%
rename from b
rename to z/b
--- a/b
+++ b/z/b
@@ -1 +1 @@
-2
+two
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git a/made b/made
new file mode 120000
--- /dev/null
+++ b/made
@@ -0,0 +1 @@
+a
\\ No newline at end of file
"""

EFFECTS: dict[str, dict[str, object]] = {
    "v4a": {"effect": "apply_patch", "patch": PATCH},
    "unified": {"effect": "apply_patch", "patch": UNIFIED, "patch_format": "unified"},
    "delete": {"effect": "delete", "path": "c", "recursive": True},
    "move": {"effect": "move", "path": "c", "to": "z"},
    "move over": {"effect": "move", "path": "c", "to": "b", "overwrite": True},
    "link over": {"effect": "move", "path": "link", "to": "b", "overwrite": True},
    "write": {"effect": "write_file", "path": "p/q/r", "content": "x", "create_parents": True},
    "overwrite": {"effect": "write_file", "path": "b", "content": "x"},
    "edit": {"effect": "edit_file", "path": "b", "old_string": "2", "new_string": "3"},
    "mkdir": {"effect": "mkdir", "path": "p/q/r", "parents": True},
}


def perform(effects: EffectSession, name: str) -> dict[str, object]:
    params = dict(EFFECTS[name])
    return effects.perform(str(params.pop("effect")), **params)


def staged(base: Path, plan: FaultPlan) -> EffectSession:
    effects = open_effect_session(base, steps=plan)
    effects.plant(BEFORE)
    return effects


def run(base: Path, name: str, plan: FaultPlan) -> tuple[dict[str, object], Tree, list[str]]:
    effects = staged(base, plan)
    receipt = perform(effects, name)
    steps = [step for step, _ in plan.reached]
    tree = effects.tree()
    effects.workspace.close()
    return receipt, tree, steps


@pytest.mark.req("D9.patch_all_or_none", "S1.apply_patch.no_partial_writes", "AR.no_leftover_temp")
@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_failure_at_any_step_leaves_every_file_as_it_was(tmp_path: Path, name: str, number: int) -> None:
    receipt, after, steps = run(tmp_path / "undisturbed", name, FaultPlan())
    assert receipt["status"] == "ok" and len(steps) >= 1
    before = tree_of(staged(tmp_path / "before", FaultPlan()).root)
    for at in range(1, len(steps) + 1):
        plan = FaultPlan().fail(number, at=at)
        receipt, tree, _ = run(tmp_path / f"fails-{at}", name, plan)
        assert tree == (after if receipt["status"] == "ok" else before), (at, steps[at - 1], receipt)


@pytest.mark.req("D16.outcomes_are_receipts")
@pytest.mark.parametrize("step", ["exchange", "place", "set_aside"])
def test_a_failure_at_each_file_of_a_patch(tmp_path: Path, step: str) -> None:
    _, _, steps = run(tmp_path / "undisturbed", "v4a", FaultPlan())
    before = tree_of(staged(tmp_path / "before", FaultPlan()).root)
    assert steps.count(step) >= 2
    for at in range(1, steps.count(step) + 1):
        receipt, tree, _ = run(tmp_path / f"{step}-{at}", "v4a", FaultPlan().fail(errno.EIO, at=at, step=step))
        assert (receipt["status"], receipt["error_code"]) == ("error", "io_error")
        assert tree == before


def test_a_failing_effect_keeps_the_other_effects_of_its_call(tmp_path: Path) -> None:
    effects = open_effect_session(tmp_path)
    with effects.session.call() as call:
        assert call.write_file("a", "1\n").ok
        assert not call.apply_patch("*** Begin Patch\n*** Add File: b\n+x\n*** Delete File: no\n*** End Patch").ok
        assert call.write_file("c", "3\n").ok
    assert sorted(effects.tree()) == ["a", "c"]


@pytest.mark.parametrize("name", ["v4a", "move", "edit"])
def test_a_persons_save_during_an_effect_is_never_lost(tmp_path: Path, name: str) -> None:
    """Somebody saves one of the files just before each step in turn: it ends up where the effect put the file."""
    path = {"v4a": "c/d", "move": "c/d", "edit": "b"}[name]
    _, _, steps = run(tmp_path / "undisturbed", name, FaultPlan())
    for at in range(1, len(steps) + 1):
        base = tmp_path / f"saved-{at}"
        saved = base / "work" / path

        happened: list[str] = []

        def save(step: str, _: str, saved: Path = saved, happened: list[str] = happened) -> None:
            if saved.exists():
                saved.write_bytes(saved.read_bytes() + b"theirs\n")
                happened.append(step)

        receipt, tree, _ = run(base, name, FaultPlan().act(save, at=at))
        kept = [path for path, node in tree.items() if isinstance(node, File) and b"theirs" in node.content]
        assert kept or not happened, (at, steps[at - 1], receipt)
