"""Files with several names. What Mulligan does never changes a file outside the root; names inside stay one file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.testing import contents_of

State = tuple[int, bytes, int, int, list[str]]


class Scene:
    """A root with a file that has other names: two inside, `a` and `d/also`, and one outside in a cache."""

    def __init__(self, base: Path) -> None:
        self.base, self.root, self.cache = base, base / "work", base / "cache"
        (self.root / "d").mkdir(parents=True)
        self.cache.mkdir()
        for version in ("1", "2"):
            (self.cache / version).write_text(f"version {version}\n")
            os.utime(self.cache / version, ns=(10**18, 10**18))
        os.link(self.cache / "1", self.root / "a")
        os.link(self.cache / "1", self.root / "d" / "also")
        (self.root / "z").write_text("z\n")
        self.store = str(base / "home")
        self.m = mulligan.open(str(self.root), store=self.store)
        self.session = self.m.session("s")

    def run(self, command: str, **more: Any) -> Any:
        with self.session.call() as call:
            receipt = call.exec(["sh", "-c", command], **more)
        assert receipt.ok, receipt
        return receipt

    def outside(self) -> dict[str, State]:
        return {path.name: state_of(path) for path in sorted(self.cache.iterdir())}

    def child(self, program: str) -> None:
        """In a process of its own, which may kill itself."""
        subprocess.run([sys.executable, "-c", program, str(self.root), self.store], check=False)


def state_of(path: Path) -> State:
    status = os.stat(path)
    return status.st_ino, path.read_bytes(), status.st_mode, status.st_mtime_ns, os.listxattr(path)


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    scene = Scene(tmp_path)
    yield scene
    scene.m.close()


class Leaving(Exception):
    pass


def by_file_tool(act: Callable[[Any], Any]) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        with scene.session.call() as call:
            assert act(call).ok
        assert scene.session.undo().ok
        assert scene.session.redo().ok

    return run


def aborted(act: Callable[[Any], Any]) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        with pytest.raises(Leaving), scene.session.call() as call:
            assert act(call).ok
            raise Leaving

    return run


def merge_of_a_fork(scene: Scene) -> None:
    child = scene.session.fork(files="copy", to=str(scene.base / "copy"))
    with child.call() as call:
        assert call.write_file("a", "by the child\n").ok
    assert child.merge().ok
    assert (scene.root / "a").read_text() == "by the child\n"


def write_the_same(scene: Scene) -> None:
    with scene.session.call() as call:
        assert call.write_file("a", "version 1\n").ok


def failed_effect(scene: Scene) -> None:
    patch = PATCH.replace("*** End", "*** Update File: z\n@@\n-no\n+yes\n*** End")
    with scene.session.call() as call:
        assert not call.apply_patch(patch).ok
        assert call.write_file("z", "more").ok


def recovery_of_a_file_tool(scene: Scene) -> None:
    scene.child(
        "import mulligan, os, signal, sys\n"
        "m = mulligan.open(sys.argv[1], store=sys.argv[2])\n"
        "with m.session('s').call() as call:\n"
        "    assert call.write_file('a', 'half done').ok\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    mulligan.open(str(scene.root), store=scene.store).close()
    assert (scene.root / "a").read_text() == "version 1\n" == (scene.root / "d/also").read_text()


def restored_files_of_the_host(scene: Scene) -> None:
    files = mulligan.HostFilesystem(str(scene.root))
    before = files.snapshot()
    files.write("a", "changed")
    files.restore(before)


PATCH = "*** Begin Patch\n*** Update File: a\n@@\n-version 1\n+patched\n*** End Patch"

OURS: dict[str, Callable[[Scene], None]] = {
    "write": by_file_tool(lambda call: call.write_file("a", "new\n")),
    "write the same bytes": lambda scene: write_the_same(scene),
    "edit": by_file_tool(lambda call: call.edit_file("a", "version", "edited")),
    "patch": by_file_tool(lambda call: call.apply_patch(PATCH)),
    "delete": by_file_tool(lambda call: call.delete("a")),
    "delete the folder": by_file_tool(lambda call: call.delete("d", recursive=True)),
    "move": by_file_tool(lambda call: call.move("a", "b")),
    "move over": by_file_tool(lambda call: call.move("z", "a", overwrite=True)),
    "move the folder": by_file_tool(lambda call: call.move("d", "e")),
    "abort of a write": aborted(lambda call: call.write_file("a", "new\n")),
    "abort of a move": aborted(lambda call: call.move("a", "b")),
    "a failed effect": failed_effect,
    "an isolated command": lambda scene: scene.run("echo more >> a; chmod 700 d/also", isolate=True) and None,
    "merge of a fork": merge_of_a_fork,
    "recovery of a write": recovery_of_a_file_tool,
    "restore of a host snapshot": restored_files_of_the_host,
}


@pytest.mark.req("D5.hard_links_outside_kept")
@pytest.mark.parametrize("case", OURS)
def test_what_mulligan_itself_does_changes_no_file_outside_the_root(scene: Scene, case: str) -> None:
    before = scene.outside()
    OURS[case](scene)
    assert scene.outside() == before


COMMANDS = {
    "in place": "echo more >> a",
    "another version of the cache": "rm a d/also; ln ../cache/2 a; ln ../cache/2 d/also",
    "linked over": "ln -f ../cache/2 a",
    "mode": "chmod 700 a",
    "time": "touch -d @1 a",
    "bytes and back": 'old=$(cat a); echo more >> a; echo "$old" > a',
    "attribute": "setfattr -n user.note -v mine a",
    "new link to the cache": "ln ../cache/2 new",
    "removed": "rm a",
    "moved": "mv d e",
    "replaced by a folder": "rm a; mkdir a; ln ../cache/2 a/inner",
    "unreadable": "chmod 0 a; echo x > z",
}
NOTHING_TO_UNDO = ("time",)
BACK: dict[str, Callable[[Any, str], Any]] = {
    "undo": lambda session, call: session.undo(),
    "undo of a path": lambda session, call: session.undo(call, paths=["a"]),
    "restore": lambda session, call: session.restore(call),
    "overwriting restore": lambda session, call: session.restore(call, on_conflict="overwrite"),
    "rollback": lambda session, call: session.rollback(),
    "rewind": lambda session, call: session.rewind(call),
    "undo, redo, undo": lambda session, call: (session.undo(), session.redo(), session.undo()),
}


@pytest.mark.req("D5.hard_links_outside_kept")
@pytest.mark.parametrize("how", BACK)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_undo_operation_after_a_command_changes_a_file_outside_the_root(
    scene: Scene, command: str, how: str
) -> None:
    (scene.root / "z").write_text("z\n")
    with scene.session.call("command") as call:
        assert call.exec(["sh", "-c", COMMANDS[command]]).ok
    before = scene.outside()
    with suppress(mulligan.MulliganError):
        BACK[how](scene.session, "command")
    assert scene.outside() == before
    if command not in NOTHING_TO_UNDO and how != "undo of a path":
        assert contents_of(scene.root) == {"a": b"version 1\n", "d/also": b"version 1\n", "z": b"z\n"}


@pytest.mark.req("D5.hard_links_outside_kept")
@pytest.mark.parametrize("strategy", ["notify", "scan", "overlay"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_aborted_command_leaves_files_outside_as_it_had_made_them(scene: Scene, command: str, strategy: str) -> None:
    seen: list[dict[str, State]] = []
    with pytest.raises(Leaving), scene.session.call() as call:
        assert call.exec(["sh", "-c", COMMANDS[command]], strategy=strategy).ok
        seen.append(scene.outside())
        raise Leaving
    assert [scene.outside()] == seen


@pytest.mark.req("D5.hard_links_outside_kept")
@pytest.mark.parametrize("command", COMMANDS)
def test_recovery_of_a_killed_command_changes_no_file_outside_the_root(scene: Scene, command: str) -> None:
    scene.child(
        "import mulligan, os, signal, sys\n"
        "m = mulligan.open(sys.argv[1], store=sys.argv[2])\n"
        "with m.session('s').call() as call:\n"
        f"    assert call.exec(['sh', '-c', {COMMANDS[command]!r}]).ok\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before, files = scene.outside(), contents_of(scene.root)
    again = mulligan.open(str(scene.root), store=scene.store)
    again.close()
    assert scene.outside() == before
    assert contents_of(scene.root) == {"a": b"version 1\n", "d/also": b"version 1\n", "z": b"z\n"}, files


@pytest.mark.req("D5.hard_links_outside_kept")
def test_an_update_of_a_package_that_is_linked_from_a_cache_is_undone_without_touching_the_cache(
    tmp_path: Path,
) -> None:
    """As uv installs: each file of a package is a hard link to a cache that all projects of the user share."""
    root, cache = tmp_path / "work", tmp_path / "cache"
    site = root / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    for version in ("1.16.0", "1.17.0"):
        package = cache / version
        package.mkdir(parents=True)
        (package / "six.py").write_text(f"__version__ = {version!r}\n")
        (package / "RECORD").write_text(f"six.py,{version}\n")
    for name in ("six.py", "RECORD"):
        os.link(cache / "1.16.0" / name, site / name)
    caches = {version: contents_of(cache / version) for version in ("1.16.0", "1.17.0")}
    run = [sys.executable, "-m", "mulligan"]
    environ = {**os.environ, "MULLIGAN_HOME": str(tmp_path / "home")}
    install = "cd .venv/lib/site-packages && for f in six.py RECORD; do rm $f; ln ../../../../cache/1.17.0/$f $f; done"
    subprocess.run([*run, "exec", "--", "sh", "-c", install], cwd=root, env=environ, check=True)
    assert (site / "six.py").read_text() == "__version__ = '1.17.0'\n"
    subprocess.run([*run, "undo"], cwd=root, env=environ, check=True)
    assert (site / "six.py").read_text() == "__version__ = '1.16.0'\n"
    assert {version: contents_of(cache / version) for version in caches} == caches
    subprocess.run([*run, "redo"], cwd=root, env=environ, check=True)
    assert (site / "six.py").read_text() == "__version__ = '1.17.0'\n"
    assert {version: contents_of(cache / version) for version in caches} == caches


class TestNamesInside:
    """All names are in the root: they stay one file."""

    @pytest.fixture(autouse=True)
    def only_inside(self, scene: Scene) -> None:
        os.unlink(scene.cache / "1")

    def are_one(self, scene: Scene, *names: str) -> bool:
        return len({os.stat(scene.root / name).st_ino for name in names}) == 1

    @pytest.mark.req("D5.hard_links_in_place")
    @pytest.mark.parametrize("command", ["echo more >> a", "chmod 700 a", "echo more > d/also"])
    def test_stay_the_same_file_through_undo_and_redo_and_abort(self, scene: Scene, command: str) -> None:
        inode = os.stat(scene.root / "a").st_ino
        before = contents_of(scene.root)
        scene.run(command)
        after = contents_of(scene.root)
        for act, expected in ((scene.session.undo, before), (scene.session.redo, after), (scene.session.undo, before)):
            assert act().ok
            assert contents_of(scene.root) == expected
            assert {os.stat(scene.root / name).st_ino for name in ("a", "d/also")} == {inode}
        with pytest.raises(Leaving), scene.session.call() as call:
            assert call.exec(["sh", "-c", command]).ok
            raise Leaving
        assert contents_of(scene.root) == before
        assert {os.stat(scene.root / name).st_ino for name in ("a", "d/also")} == {inode}

    @pytest.mark.req("D5.hard_links_in_place")
    @pytest.mark.parametrize("how", ["write", "edit", "patch"])
    def test_stay_the_same_file_when_a_file_tool_writes(self, scene: Scene, how: str) -> None:
        inode = os.stat(scene.root / "a").st_ino
        with scene.session.call() as call:
            if how == "write":
                receipt = call.write_file("a", "new\n")
            elif how == "edit":
                receipt = call.edit_file("a", "version", "edited")
            else:
                receipt = call.apply_patch(PATCH)
        assert receipt.ok and receipt.race_window is True
        assert {os.stat(scene.root / name).st_ino for name in ("a", "d/also")} == {inode}
        assert (scene.root / "a").read_bytes() == (scene.root / "d/also").read_bytes() != b"version 1\n"

    @pytest.mark.req("D5.hard_links_restored")
    @pytest.mark.parametrize(
        "command",
        [
            *(
                "rm d/also",
                "sed -i s/version/changed/ a",
                "rm a d/also",
                "rm -r d",
                "mv d e",
                "rm a; mkdir a",
                "ln -f z a",
            ),
            *("chmod 600 a; sed -i s/version/changed/ a", "chmod 600 d/also; sed -i s/version/changed/ d/also"),
            *("chmod 600 a; cp a b; mv b a", "cp a b; mv b a; chmod 600 a"),
        ],
    )
    @pytest.mark.parametrize("how", ["undo", "abort"])
    def test_are_one_file_again_when_the_command_that_parted_them_is_undone(
        self, scene: Scene, command: str, how: str
    ) -> None:
        before = contents_of(scene.root)
        if how == "undo":
            scene.run(command)
            assert scene.session.undo().ok
        else:
            with pytest.raises(Leaving), scene.session.call() as call:
                assert call.exec(["sh", "-c", command]).ok
                raise Leaving
        assert contents_of(scene.root) == before
        assert self.are_one(scene, "a", "d/also")
        assert not self.are_one(scene, "a", "z")

    @pytest.mark.req("D5.hard_links_restored")
    @pytest.mark.parametrize("command", ["ln z y", "ln -f z a", "ln z y; echo more >> y"])
    def test_that_a_command_made_are_one_file_again_after_redo(self, scene: Scene, command: str) -> None:
        before = contents_of(scene.root)
        scene.run(command)
        after = contents_of(scene.root)
        other = "y" if "y" in after else "a"
        assert scene.session.undo().ok
        assert contents_of(scene.root) == before
        assert scene.session.redo().ok
        assert contents_of(scene.root) == after
        assert self.are_one(scene, "z", other)

    @pytest.mark.req("D5.hard_links_restored")
    def test_stay_names_of_one_file_when_a_file_tool_moves_one(self, scene: Scene) -> None:
        with scene.session.call() as call:
            assert call.move("a", "b").ok
        assert self.are_one(scene, "b", "d/also")
        assert scene.session.undo().ok
        assert self.are_one(scene, "a", "d/also")


@pytest.mark.req("D5.hard_links_outside_kept")
def test_names_inside_stay_one_file_when_another_is_outside(scene: Scene) -> None:
    inode = os.stat(scene.cache / "1").st_ino
    with scene.session.call() as call:
        assert call.write_file("a", "new\n").ok
    assert contents_of(scene.root) == {"a": b"new\n", "d/also": b"new\n", "z": b"z\n"}
    statuses = [os.stat(scene.root / name) for name in ("a", "d/also")]
    assert len({status.st_ino for status in statuses}) == 1 and statuses[0].st_ino != inode
    assert statuses[0].st_nlink == 2
    assert scene.session.undo().ok
    assert contents_of(scene.root) == {"a": b"version 1\n", "d/also": b"version 1\n", "z": b"z\n"}
    assert os.stat(scene.root / "a").st_ino == os.stat(scene.root / "d/also").st_ino
