"""What a user without privileges may take back inside folders that he has shut to himself, printed as JSON."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mulligan.history.tables import OPEN, TOUCHES
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath
from tests.exec.commands import plant, sh
from tests.exec.trees import Seen, tree
from tests.exec.unprivileged import WAYS
from tests.history.killed_process import die_in, die_opening
from tests.temp_workspace import TempWorkspace, open_temp_workspace

LOOKING = ("notify", "watch", "scan")
WINDOWS = ("watch", "scan")
FILES = {"ro/f": "1\n", "deep/x/q": "q\n"}
SHUT = {"ro": 0o555, "deep/x": 0o555, "deep": 0o500}
SCRIPT = """
chmod -R u+w ro deep; rm -r ro deep
mkdir -p cache/a/b; echo 1 > cache/a/b/f; chmod -R a-w cache
"""
LEFT = """
echo 2 > open/f; rm open/g; echo 3 > open/h; chmod 000 open
mkdir -p new/in; echo 4 > new/in/f; chmod 000 new/in; chmod 000 new
"""
RO, INNER = RepoPath("ro"), RepoPath("ro/f")


class Failed(Exception):
    """Whatever lets a call fail."""


def seen(root: Path) -> dict[bytes, Seen]:
    return tree(os.fsencode(root))


def scene(base: Path) -> TempWorkspace:
    workspace = open_temp_workspace(base)
    plant(workspace.root, FILES)
    for name, mode in SHUT.items():
        (workspace.root / name).chmod(mode)
    return workspace


def there_and_back_twice(base: Path, way: str) -> str:
    workspace = scene(base)
    before = seen(workspace.root)
    receipt = sh(workspace, SCRIPT, strategy=way)
    if not receipt.ok:
        return f"{receipt.error_code} {receipt.error_message}"
    after = seen(workspace.root)
    for back, wanted in (
        (workspace.session().undo, before),
        (workspace.session().redo, after),
        (workspace.session().undo, before),
    ):
        done = back()
        if not done.ok or seen(workspace.root) != wanted:
            return f"{done}"
    return "back"


def rolled_back(base: Path, way: str) -> str:
    workspace = scene(base)
    before = seen(workspace.root)
    receipt = sh(workspace, f"{SCRIPT}\nexit 3", strategy=way, rollback_on="nonzero")
    return str(receipt.error_code) if seen(workspace.root) == before else f"not put back: {receipt}"


def left_shut(base: Path, way: str) -> str:
    """What a command did in folders that it then shut to everybody is known, and comes back."""
    workspace = open_temp_workspace(base)
    plant(workspace.root, {"open/f": "1\n", "open/g": "g\n"})
    before = seen(workspace.root)
    failed = sh(workspace, f"{LEFT}\nexit 3", strategy=way, rollback_on="nonzero")
    if failed.error_code != "nonzero_exit" or seen(workspace.root) != before:
        return f"not put back: {failed}"
    receipt = sh(workspace, LEFT, strategy=way)
    changed = " ".join(f"{one['kind']}:{one['path']}" for one in receipt.changes)
    modes = [modes_of(workspace, "open", "new")]
    done = [workspace.session().undo()]
    back = [seen(workspace.root) == before]
    done.append(workspace.session().redo())
    modes.append(modes_of(workspace, "open", "new"))
    done.append(workspace.session().undo())
    back.append(seen(workspace.root) == before)
    fine = all(one.ok for one in done) and all(back) and modes == [[0, 0], [0, 0]] and receipt.coverage == []
    return changed if fine else f"{done} {back} {receipt} {modes}"


def modes_of(workspace: TempWorkspace, *names: str) -> list[int]:
    return [(workspace.root / name).lstat().st_mode & 0o777 for name in names]


def shut_by_person(base: Path) -> list[Any]:
    """A folder that a person has shut since stays so: what is in it is not taken back, and nothing is opened."""
    workspace = open_temp_workspace(base)
    sh(workspace, "mkdir d; echo 1 > d/f")
    (workspace.root / "d").chmod(0)
    before = (workspace.root / "d").lstat()
    done = workspace.session().undo()
    return [done.ok, [(one.path, one.outcome) for one in done.outcomes], (workspace.root / "d").lstat() == before]


def shut_between(base: Path, way: str) -> list[Any]:
    """A folder that a person shuts between two commands is neither opened nor blamed on the next."""
    workspace = open_temp_workspace(base)
    plant(workspace.root, {"p/f": "1\n"})
    sh(workspace, ":", strategy=way)
    (workspace.root / "p").chmod(0)
    before = (workspace.root / "p").lstat()
    receipt = sh(workspace, "echo 2 > a", strategy=way)
    untouched = (workspace.root / "p").lstat() == before
    opened = sh(workspace, "chmod 700 p; echo 3 > p/f", strategy=way)
    return [untouched, receipt.coverage, [tuple(one.values()) for one in opened.coverage]]


def shut_all_along(base: Path, way: str, script: str) -> list[Any]:
    """What nobody could see before is not said to be new; if it is not there any more, that is said.

    What is left of it when the command was undone comes last.
    """
    workspace = open_temp_workspace(base)
    plant(workspace.root, {"p/f": "1\n"})
    (workspace.root / "p").chmod(0)
    receipt = sh(workspace, script, strategy=way)
    told = [[(one["kind"], one["path"]) for one in receipt.changes], [tuple(one.values()) for one in receipt.coverage]]
    if receipt.changes:
        workspace.session().undo()
    for folder in workspace.root.iterdir():
        folder.chmod(0o700)
    return [*told, [str(one.relative_to(workspace.root)) for one in workspace.root.rglob("f")]]


def tools(base: Path) -> list[str | None]:
    """They keep to the modes that people gave."""
    workspace = scene(base)
    with workspace.session().call("tools") as call:
        return [call.write_file("ro/new", "x").error_code, call.delete("ro", recursive=True).error_code]


def closed(base: Path) -> list[Any]:
    """What cannot even be looked at: said, and nothing of the call is taken back."""
    workspace = scene(base)
    sh(workspace, "echo 2 > a; echo 2 > b")
    (workspace.root / "b").chmod(0)
    done = workspace.session().undo()
    return [done.ok, [(one.path, one.outcome, one.reason) for one in done.outcomes], (workspace.root / "a").exists()]


def undo(workspace: TempWorkspace) -> None:
    workspace.session().undo()


def failing(workspace: TempWorkspace, *, mode_too: bool) -> None:
    """A command that empties a shut folder, and removes it or shuts it again."""
    try:
        with workspace.open_root.call(SessionId("default")) as call:
            paths = [INNER, RO] if mode_too else [INNER]
            call.commands.about_to_change(paths, going=True)
            (workspace.root / "ro").chmod(0o755)
            (workspace.root / "ro/f").unlink()
            (workspace.root / "ro").rmdir() if mode_too else (workspace.root / "ro").chmod(0o555)
            call.commands.absorb(paths)
            raise Failed
    except Failed:
        return


def deaths(
    base: Path, act: Callable[[TempWorkspace], object], *, until: dict[bytes, Seen] | None = None
) -> list[dict[bytes, Seen]]:
    """Die at every point, and while that is put back: what is there after each recovery, and at last undisturbed.

    Or until all is done, if whoever dies after that would find nothing more to do.
    """
    found: list[dict[bytes, Seen]] = []
    at, died = 1, True
    while died and (until is None or until not in found):
        died = die_in(base, act, at=at)
        if at % 3 == 0:
            die_opening(base, at=at % 5 + 1)
        workspace = open_temp_workspace(base)
        with workspace.open_root.ledger.store.read() as tx:
            assert not tx.select(OPEN) and not tx.select(TOUCHES), "something is left of a call that has ended"
        workspace.close()
        found.append(seen(workspace.root))
        at += 1
    return found


def dead_undo(base: Path) -> str:
    workspace = scene(base)
    before = seen(workspace.root)
    assert sh(workspace, SCRIPT, strategy="notify").ok
    after = seen(workspace.root)
    workspace.close()
    *died, last = deaths(base, undo, until=before)
    fine = last == before and all(one == after for one in died) and len(died) > len(FILES)
    return "whole or not at all" if fine else f"{died} {last}"


def dead_abort(base: Path, *, mode_too: bool) -> str:
    workspace = scene(base)
    before = seen(workspace.root)
    workspace.close()
    found = deaths(base, lambda workspace: failing(workspace, mode_too=mode_too))
    return "put back" if all(one == before for one in found) and len(found) > len(FILES) else f"{found}"


def fresh(base: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=base))


def session(base: Path) -> dict[str, Any]:
    return {
        "undo": {way: there_and_back_twice(fresh(base), way) for way in WAYS},
        "rollback": {way: rolled_back(fresh(base), way) for way in WAYS},
        "left shut": {way: left_shut(fresh(base), way) for way in LOOKING},
        "opened": {way: shut_all_along(fresh(base), way, "chmod 700 p; echo 2 > p/f") for way in LOOKING},
        "opened and shut": {
            way: shut_all_along(fresh(base), way, "chmod 700 p; echo 2 > p/f; chmod 000 p") for way in LOOKING
        },
        "emptied": {way: shut_all_along(fresh(base), way, "chmod 700 p; rm p/f") for way in WINDOWS},
        "removed": {way: shut_all_along(fresh(base), way, "chmod 700 p; rm -r p") for way in WINDOWS},
        "moved": {way: shut_all_along(fresh(base), way, "chmod 700 p; mv p q; echo 2 > q/f") for way in WINDOWS},
        "moved, still shut": {way: shut_all_along(fresh(base), way, "mv p q") for way in WINDOWS},
        "moved into a shut one": {
            way: shut_all_along(fresh(base), way, "mkdir q; chmod 700 p; mv p q/p; chmod 000 q") for way in WINDOWS
        },
        "shut by a person": shut_by_person(fresh(base)),
        "shut between": {way: shut_between(fresh(base), way) for way in WINDOWS},
        "tools": tools(fresh(base)),
        "closed": closed(fresh(base)),
        "dead undo": dead_undo(fresh(base)),
        "dead abort": [dead_abort(fresh(base), mode_too=mode_too) for mode_too in (True, False)],
    }


def main() -> None:
    base = Path(os.path.realpath(tempfile.mkdtemp()))
    try:
        print(json.dumps(session(base)))
    finally:
        for folder, _, _ in os.walk(base):
            os.chmod(folder, 0o700)
            for inner in os.scandir(folder):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
