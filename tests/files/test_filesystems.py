"""File systems as resources: one contract for all of them, and what a folder on disk must survive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mulligan
from mulligan import (
    ExecutionState,
    Filesystem,
    FilesystemSnapshot,
    HostFilesystem,
    InMemoryFilesystem,
    ResourceRegistry,
    RestoreFailedError,
    Session,
    SnapshotableFilesystem,
    SnapshotMismatchError,
)
from mulligan.testing import Dir, File, Link, contents_of, plant, tree_of
from mulligan.values.paths import RepoPath

AnyFilesystem = InMemoryFilesystem | HostFilesystem
STEPS = ("stage.create", "exchange", "place", "set_aside", "discard", "make_dir", "metadata")
Acted = tuple[str, str, str]
KINDS = ("memory", "host", "session")


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SnapshotableFilesystem]:
    root = tmp_path / "root"
    root.mkdir()
    if request.param == "memory":
        yield InMemoryFilesystem()
    elif request.param == "host":
        with HostFilesystem(_root=str(root)) as host:
            yield host
    else:
        with mulligan.open(str(root), store=str(tmp_path / "store")) as m:
            yield m.session().files


class TestContract:
    @pytest.mark.req("D12.name.filesystem", "D12.name.snapshotable_filesystem")
    def test_every_file_system_has_the_protocol(self, files: SnapshotableFilesystem) -> None:
        assert isinstance(files, Filesystem) and isinstance(files, SnapshotableFilesystem)

    @pytest.mark.req("S4.fs.write_snapshot_restore", "S4.snapshotable.host_filesystem", "D12.name.filesystem_snapshot")
    def test_a_file_written_after_a_snapshot_has_its_old_content_again(self, files: SnapshotableFilesystem) -> None:
        files.write("config.py", "DEBUG = True")
        taken = files.snapshot(tag="before-edit")
        assert isinstance(taken, FilesystemSnapshot) and taken.tag == "before-edit"
        files.write("config.py", "DEBUG = False")
        files.write("new/deep/file.txt", "x")
        files.restore(taken)
        assert files.read("config.py").content == "DEBUG = True"
        assert files.glob("**") == ("config.py",)
        assert not files.exists("new")

    def test_deleted_files_and_directories_come_back(self, files: SnapshotableFilesystem) -> None:
        files.write("a/b.txt", "b")
        files.mkdir("empty/inside")
        taken = files.snapshot()
        files.delete("a", recursive=True)
        files.delete("empty", recursive=True)
        files.write("a", "now a file")
        files.restore(taken)
        assert files.read("a/b.txt").content == "b"
        assert [(one.path, one.is_directory) for one in files.list("empty")] == [("empty/inside", True)]

    def test_a_later_snapshot_can_be_restored_after_an_earlier_one(self, files: SnapshotableFilesystem) -> None:
        files.write("a", "1")
        first = files.snapshot()
        files.write("a", "2")
        second = files.snapshot()
        files.restore(first)
        files.restore(second)
        assert files.read("a").content == "2"
        files.restore(first)
        assert files.read("a").content == "1"

    @pytest.mark.req("W27.read_keeps_crlf", "W27.negative_offset")
    def test_reading_is_by_lines_and_changes_no_byte(self, files: SnapshotableFilesystem) -> None:
        files.write("a", "one\r\ntwo\nthree\n")
        whole = files.read("a")
        assert (whole.content, whole.total_lines, whole.truncated) == ("one\r\ntwo\nthree\n", 3, False)
        part = files.read("a", offset=1, limit=1)
        assert (part.content, part.offset, part.limit, part.truncated) == ("two\n", 1, 1, True)
        assert files.read_bytes("a", offset=3, limit=2).content == b"\r\n"
        for wrong in ({"offset": -1}, {"limit": -1}):
            with pytest.raises(ValueError):
                files.read("a", **wrong)  # type: ignore[arg-type]  # that is the point
            with pytest.raises(ValueError):
                files.read_bytes("a", **wrong)

    def test_bytes_of_any_kind_and_size_are_kept(self, files: SnapshotableFilesystem) -> None:
        body = bytes(range(256)) * 400
        files.write_bytes("b", body)
        assert files.read_bytes("b").content == body
        with pytest.raises(ValueError):
            files.read("b")

    def test_modes_of_writing(self, files: SnapshotableFilesystem) -> None:
        assert files.write("a", "1", mode="create").bytes_written == 1
        with pytest.raises(FileExistsError):
            files.write("a", "2", mode="create")
        files.write("a", "23", mode="append")
        assert files.read("a").content == "123"
        with pytest.raises(FileNotFoundError):
            files.write("no/such/dir", "x", create_parents=False)
        with pytest.raises(ValueError):
            files.write("a", "x", mode="truncate")  # type: ignore[arg-type]  # that is the point

    def test_mistakes_are_ordinary_exceptions(self, files: SnapshotableFilesystem) -> None:
        files.write("dir/file", "x")
        with pytest.raises(FileNotFoundError):
            files.read("missing")
        with pytest.raises(IsADirectoryError):
            files.read("dir")
        with pytest.raises(IsADirectoryError):
            files.write("dir", "x")
        with pytest.raises(NotADirectoryError):
            files.write("dir/file/below", "x")
        with pytest.raises(NotADirectoryError):
            files.list("dir/file")
        with pytest.raises(IsADirectoryError):
            files.delete("dir")
        with pytest.raises(FileNotFoundError):
            files.delete("missing")
        with pytest.raises(FileExistsError):
            files.mkdir("dir/file")

    @pytest.mark.parametrize("path", ["../out", "a/../../out", "/etc/passwd"])
    def test_nothing_leads_out_of_the_root(self, files: SnapshotableFilesystem, path: str) -> None:
        for act in (files.read, files.delete, files.exists, lambda one: files.write(one, "x")):
            with pytest.raises(PermissionError):
                act(path)

    @pytest.mark.req("W27.glob_top_level")
    def test_glob_crosses_directories_only_with_two_stars(self, files: SnapshotableFilesystem) -> None:
        for path in ("a.py", "b/c.py", "b/d/e.py", "b/x.txt"):
            files.write(path, "")
        assert files.glob("**/*.py") == ("a.py", "b/c.py", "b/d/e.py")
        assert files.glob("*.py") == ("a.py",)
        assert files.glob("*", "b") == ("b/c.py", "b/x.txt")

    def test_the_snapshot_of_another_kind_is_refused(self, files: SnapshotableFilesystem) -> None:
        files.write("a", "1")
        strange = InMemoryFilesystem().snapshot() if not isinstance(files, InMemoryFilesystem) else None
        with pytest.raises(SnapshotMismatchError):
            files.restore(strange)  # type: ignore[arg-type]  # that is the point
        assert files.read("a").content == "1"


@pytest.mark.parametrize("allowed", ["read", "write", "list", None])
@pytest.mark.parametrize("attached", [True, False])
def test_a_sessions_files_ask_for_what_they_do_and_for_nothing_else(
    tmp_path: Path, allowed: str | None, attached: bool
) -> None:
    root = tmp_path / "root"
    plant(root, {"a": "1"})
    limits = {"allowed_fs_ops": [] if allowed is None else [allowed]}
    with mulligan.open(str(root), store=str(tmp_path / "store"), capability=None if attached else limits) as m:
        if attached:
            m.session().perform("host.session.open", {"session_id": "s", "capability": limits})
        files = m.session("s").files
        acts: dict[str, Callable[[], object]] = {
            "read": lambda: files.read("a").content,
            "write": lambda: files.write("new/b", "2").path,
            "list": lambda: files.glob("a"),
        }
        for op, act in acts.items():
            if op == allowed:
                assert act() in ("1", "new/b", ("a",))
            else:
                with pytest.raises(PermissionError):
                    act()


NAMES = st.sampled_from(["a", "b", "c/d", "c/e", "c/f/g"])
ACTS = st.lists(st.tuples(st.sampled_from(["write", "delete", "mkdir"]), NAMES, st.text(max_size=4)), max_size=12)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=ACTS, after=ACTS)
@pytest.mark.parametrize("kind", ["memory", "host"])
def test_a_restore_after_any_change_gives_the_same_tree(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    before: list[tuple[str, str, str]],
    after: list[tuple[str, str, str]],
) -> None:
    root = tmp_path_factory.mktemp("tree")
    with HostFilesystem(root) as host:
        files = host if kind == "host" else InMemoryFilesystem()
        _do(files, before)
        taken, was = files.snapshot(), _seen(files)
        _do(files, after)
        files.restore(taken)
        assert _seen(files) == was
        assert files.snapshot().commit_ref == taken.commit_ref


def _do(files: AnyFilesystem, acts: list[Acted]) -> None:
    for verb, path, text in acts:
        try:
            if verb == "write":
                files.write(path, text)
            elif verb == "mkdir":
                files.mkdir(path)
            else:
                files.delete(path, recursive=True)
        except OSError:
            continue


def _seen(files: AnyFilesystem) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    waiting = ["."]
    while waiting:
        for one in files.list(waiting.pop()):
            found[one.path] = files.read_bytes(one.path).content if one.is_file else None
            waiting += [one.path] if one.is_directory else []
    return found


class TestInMemory:
    @pytest.mark.req("S4.snapshotable.in_memory_filesystem", "D12.name.in_memory_filesystem")
    def test_snapshots_share_files_until_they_change(self) -> None:
        files = InMemoryFilesystem({"a": "1", "b": b"2"})
        first, second = files.snapshot(), files.snapshot()
        files.write("a", "changed")
        third = files.snapshot()
        assert first.files["b"] is second.files["b"] is third.files["b"]
        assert (first.files["a"], third.files["a"]) == (b"1", b"changed")
        with pytest.raises(TypeError):
            first.files["a"] = b""  # type: ignore[index]  # that is the point

    @pytest.mark.req("W28.memory_snapshots_pruned")
    def test_a_snapshot_without_a_holder_is_released(self) -> None:
        body = os.urandom(1000)
        files = InMemoryFilesystem()
        files.write_bytes("a", body)
        alone = sys.getrefcount(body)
        taken = []
        for i in range(200):
            taken.append(files.snapshot())
            files.write("b", str(i))
        assert sys.getrefcount(body) >= alone + 200
        del taken
        gc.collect()
        assert sys.getrefcount(body) == alone

    def test_equal_trees_have_the_same_commit_ref(self) -> None:
        one, other = InMemoryFilesystem(), InMemoryFilesystem()
        one.write("a", "1")
        one.write("b", "2")
        other.write("b", "other")
        other.write("c", "gone")
        other.write("b", "2")
        other.delete("c")
        other.write("a", "1")
        assert one.snapshot().commit_ref == other.snapshot().commit_ref
        one.write("a", "2")
        assert one.snapshot().commit_ref != other.snapshot().commit_ref


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    return folder


@pytest.fixture
def host(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as opened:
        yield opened


class TestHost:
    """Each row W of the reference, the other way round."""

    @pytest.mark.req("W1.ignored_files_survive", "W2.ignored_edit_restored", "W3.empty_dir_survives")
    def test_ignored_files_and_empty_directories_are_files_like_any_other(
        self, host: HostFilesystem, root: Path
    ) -> None:
        plant(
            root, {".gitignore": ".env\nnode_modules/\n", ".env": "SECRET=1", "node_modules/m/i.js": "x", "empty": None}
        )
        before, taken = tree_of(root), host.snapshot()
        (root / ".env").write_text("A=2")
        (root / "node_modules/m/new.js").write_text("y")
        (root / "empty").rmdir()
        host.restore(taken)
        assert tree_of(root) == before

    @pytest.mark.req("W4.nested_repo_undone", "W5.nested_repo_without_commits", "W6.cloned_repo_removed")
    def test_nested_repositories_are_captured_as_files(self, host: HostFilesystem, root: Path) -> None:
        for name in ("with", "without"):
            (root / name).mkdir()
            subprocess.run(["git", "init", "-q"], cwd=root / name, check=True)
        (root / "with/a.txt").write_text("a")
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "add", "-A"], cwd=root / "with", check=True)
        subprocess.run(["git", *who, "commit", "-qm", "one"], cwd=root / "with", check=True)
        before, taken = tree_of(root), host.snapshot()
        (root / "with/a.txt").write_text("edited")
        (root / "with/new.txt").write_text("new")
        subprocess.run(["git", "clone", "-q", str(root / "with"), str(root / "cloned")], check=True)
        host.restore(taken)
        assert tree_of(root) == before

    @pytest.mark.req("W7.crlf_kept_with_attributes", "W8.autocrlf_ignored", "W9.modes_exact", "W10.mtime_handled")
    def test_bytes_modes_and_times_are_exact(self, host: HostFilesystem, root: Path) -> None:
        hour = 3_600_000_000_000
        plant(
            root,
            {
                ".gitattributes": "* text=auto\n",
                "crlf.txt": b"a\r\nb\r\n",
                "secret": File(b"s", 0o600, hour),
                "tool": File(b"#!", 0o750, 2 * hour),
                "only-mode": File(b"m", 0o640, 3 * hour),
                "link": Link("secret"),
                "dir": Dir(0o710, 4 * hour),
            },
        )
        before, taken = tree_of(root, times=True), host.snapshot()
        for name in ("crlf.txt", "secret", "tool"):
            (root / name).write_bytes(b"changed\n")
        (root / "only-mode").chmod(0o644)
        (root / "dir/inside").write_text("x")
        (root / "link").unlink()
        host.restore(taken)
        assert tree_of(root, times=True) == before

    @pytest.mark.req(
        "D12.host_filesystem_without_git", "D12.name.host_filesystem", "W11.git_hooks_do_not_run", "W12.git_not_needed"
    )
    def test_no_program_is_run(self, host: HostFilesystem, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr(subprocess, "Popen", None)
        host.write("a", "1")
        taken = host.snapshot()
        host.write("a", "2")
        host.restore(taken)
        assert contents_of(root) == {"a": b"1"}

    @pytest.mark.req("W13.parallel_snapshots")
    def test_snapshots_from_many_threads_all_work(self, host: HostFilesystem) -> None:
        host.write("a", "1")
        taken: list[FilesystemSnapshot] = []
        threads = [threading.Thread(target=lambda: taken.append(host.snapshot())) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(taken), len({one.commit_ref for one in taken}), len({one.snapshot_id for one in taken})) == (
            24,
            1,
            24,
        )

    @pytest.mark.req("W22.snapshot_of_other_root")
    def test_the_snapshot_of_another_root_is_refused(self, host: HostFilesystem, root: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        plant(other, {"theirs": "x"})
        host.write("ours", "y")
        with HostFilesystem(other) as strange, pytest.raises(SnapshotMismatchError):
            host.restore(strange.snapshot())
        assert contents_of(root) == {"ours": b"y"}

    @pytest.mark.req("W25.delete_symlink_itself")
    def test_deleting_a_link_deletes_the_link(self, host: HostFilesystem, root: Path) -> None:
        plant(root, {"target": "x", "link": Link("target"), "dangling": Link("nowhere"), "out": Link("/etc")})
        for name in ("link", "dangling", "out"):
            host.delete(name)
        assert contents_of(root) == {"target": b"x"}

    @pytest.mark.req("W26.symlinked_or_relative_root")
    def test_a_root_may_be_relative_or_a_link(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plant(root, {"a.py": "x"})
        (root.parent / "link").symlink_to(root)
        monkeypatch.chdir(root.parent)
        for name in ("host", "link"):
            with HostFilesystem(name) as files:
                assert files.glob("**/*.py") == ("a.py",)
                files.restore(files.snapshot())

    @pytest.mark.req("W31.no_leaked_temp_dirs")
    def test_write_snapshot_and_restore_leave_no_other_files(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scratch = tmp_path / "tmp"
        scratch.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(scratch))
        files = HostFilesystem(root)
        files.write("a", "1")
        files.restore(files.snapshot())
        assert list(scratch.iterdir()) == []
        assert contents_of(root) == {"a": b"1"}

    def test_links_lead_nowhere_outside(self, host: HostFilesystem, root: Path, tmp_path: Path) -> None:
        plant(tmp_path / "outside", {"secret": "x"})
        plant(root, {"way": Link(str(tmp_path / "outside"))})
        for act in (lambda: host.read("way/secret"), lambda: host.write("way/new", "x")):
            with pytest.raises(PermissionError):
                act()
        assert contents_of(tmp_path / "outside") == {"secret": b"x"}

    def test_writing_through_a_link_inside_keeps_the_link(self, host: HostFilesystem, root: Path) -> None:
        plant(root, {"target": "x", "link": Link("target")})
        host.write("link", "y")
        assert (root / "link").is_symlink()
        assert (root / "target").read_text() == "y"

    def test_special_files_are_left_alone(self, host: HostFilesystem, root: Path) -> None:
        taken = host.snapshot()
        os.mkfifo(root / "pipe")
        host.write("a", "1")
        host.restore(taken)
        assert os.listdir(root) == ["pipe"]

    def test_a_snapshot_reads_only_what_has_changed(self, root: Path) -> None:
        kept: list[bytes] = []

        class Counting(dict[str, bytes]):
            def store(self, data: bytes) -> str:
                from mulligan.values.digest import digest_of

                kept.append(data)
                self[digest_of(data)] = data
                return digest_of(data)

            def read(self, digest: str) -> bytes:
                return self[digest]

        old = 1_000_000_000
        for i in range(20):
            (root / f"f{i}").write_text(str(i))
            os.utime(root / f"f{i}", ns=(old, old))
        with HostFilesystem(root, bodies=Counting()) as files:  # type: ignore[arg-type]  # a digest is text
            files.snapshot()
            files.snapshot()
        # Twenty files and a manifest; the second time their stamps vouch for those that had been at rest.
        assert len(kept) >= 21

    LATER = """
import sys
from mulligan import *
root, kept, text = sys.argv[1:]
with HostFilesystem(root, bodies=kept or None) as files:
    state = ExecutionState(session=Session(), resources=ResourceRegistry.build({Filesystem: files}))
    try:
        state.restore(CompositeSnapshot.from_json(text))
    except RestoreFailedError:
        print("not kept")
"""

    @pytest.mark.parametrize(("kept", "told", "found"), [("kept", "", b"old"), ("", "not kept\n", b"new")])
    def test_json_is_restored_by_a_later_process_from_a_folder(
        self, root: Path, tmp_path: Path, kept: str, told: str, found: bytes
    ) -> None:
        folder = str(tmp_path / kept) if kept else ""
        with HostFilesystem(root, bodies=folder or None) as files:
            state = ExecutionState(session=Session(), resources=ResourceRegistry.build({Filesystem: files}))
            files.write("a", "old")
            text = state.snapshot().to_json()
            files.write("a", "new")
        command = [sys.executable, "-c", self.LATER, str(root), folder, text]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == told
        assert contents_of(root) == {"a": found}

    def test_bytes_that_are_not_what_was_kept_are_not_restored(self, root: Path, tmp_path: Path) -> None:
        with HostFilesystem(root, bodies=tmp_path / "kept") as files:
            files.write("a", "old")
            taken = files.snapshot()
            files.write("a", "new")
            for file in (tmp_path / "kept").rglob("*"):
                if file.is_file() and file.read_bytes() == b"old":
                    file.write_bytes(b"odd")
            with pytest.raises(RestoreFailedError):
                files.restore(taken)
        assert contents_of(root) == {"a": b"new"}

    @pytest.mark.parametrize("place", ["", "kept"])
    def test_snapshots_are_not_kept_in_what_they_are_of(self, root: Path, place: str) -> None:
        with pytest.raises(mulligan.MulliganError) as caught:
            HostFilesystem(root, bodies=root / place)
        assert caught.value.code == "store_inside_workspace"
        assert os.listdir(root) == []

    @pytest.mark.req("S4.error.restore_failed")
    @pytest.mark.parametrize(
        "step", ["stage.create", "exchange", "place", "set_aside", "discard", "make_dir", "metadata"]
    )
    def test_a_restore_that_fails_half_way_leaves_everything_as_it_was(self, root: Path, step: str) -> None:
        broken = _Breaking(step)
        with HostFilesystem(root, steps=broken) as files:
            plant(root, {"a": "1", "b": "2", "d/e": "3", "mode": File(b"m", 0o600)})
            taken = files.snapshot()
            for path in ("a", "b", "n"):
                (root / path).write_text("changed")
            (root / "d/e").unlink()
            (root / "d").rmdir()
            (root / "mode").chmod(0o644)
            was = tree_of(root)
            broken.armed = True
            with pytest.raises((RestoreFailedError, OSError)):
                files.restore(taken)
            assert tree_of(root) == was
            files.restore(taken)
            assert contents_of(root) == {"a": b"1", "b": b"2", "d/e": b"3", "mode": b"m"}


@pytest.mark.parametrize("step", ["stage.half", "place"])
def test_a_write_that_fails_leaves_nothing(root: Path, step: str) -> None:
    broken = _Breaking(step)
    with HostFilesystem(root, steps=broken) as files:
        broken.armed = True
        with pytest.raises(OSError):
            files.write("a", "1")
        assert tree_of(root) == {}


class _Breaking:
    """Fails once at a step, when armed."""

    def __init__(self, step: str) -> None:
        self._step = step
        self.armed = False

    def reach(self, step: str, path: RepoPath) -> None:
        if self.armed and step == self._step:
            self.armed = False
            raise OSError(5, "disk on fire")


@pytest.mark.req("W27.glob_top_level")
def test_glob_continues_after_a_file_that_another_process_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"a.py": File(b"1"), "c.py": File(b"1"), "d/e.py": File(b"1")})
    real_listdir = os.listdir

    def listing_before_removal(folder: int) -> list[str]:
        return [*real_listdir(folder), "b.py"]

    with HostFilesystem(_root=str(tmp_path)) as files:
        monkeypatch.setattr(os, "listdir", listing_before_removal)
        assert files.glob("**") == ("a.py", "c.py", "d/e.py")
