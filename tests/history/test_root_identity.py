"""A root is a host, a path and a directory: two directories with one path are two roots, one directory is one root."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mulligan
from mulligan.agents.hooks.socket import ask_background, background_folder
from mulligan.history.projection import SCHEMA
from mulligan.hosts.settings import CLIENT
from mulligan.store.verify import verify
from mulligan.testing import contents_of, plant
from mulligan.values.errors import MulliganError, fault
from tests.mount_namespaces import Shell, after_boot, covering
from tests.mount_namespaces import container as container_of
from tests.old_formats import as_format_2

FIXTURES = Path(__file__).parents[1] / "fixtures" / "format"
BWRAP = ("bwrap", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--die-with-parent")

DIE_IN_A_CALL = """
import os, signal, sys, mulligan
with mulligan.open(".") as m, m.session("shared").call() as call:
    assert call.write_file("f", "half done").ok
    print("written", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

HOLD_A_CALL = """
import sys, mulligan
with mulligan.open(".") as m, m.session("shared").call() as call:
    assert call.write_file("f", "held").ok
    print("written", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def here(tmp_path: Path) -> Shell:
    """A plain shell in a folder with one file."""
    plant(tmp_path / "work", {"f": "plain\n"})
    return Shell(tmp_path / "work", tmp_path / "home")


@pytest.fixture
def container(here: Shell, tmp_path: Path) -> Shell:
    """A shell with the same state directory, in which the same path is another directory."""
    plant(tmp_path / "volume", {"f": "container\n"})
    return replace(here, around=container_of(tmp_path / "new", tmp_path / "volume", here.folder, here.home))


def run_hook(shell: Shell, name: str) -> None:
    """A hook of Claude Code around one shell command."""
    body = {"session_id": f"in {shell.around[:1]}", "prompt_id": "p", "cwd": str(shell.folder), "hook_event_name": name}
    tool = {"tool_name": "Bash", "tool_use_id": "t", "tool_input": {"command": "true"}}
    patient = replace(shell, environ={**shell.environ, "MULLIGAN_HOOKS_WAIT_S": "60"})
    process = patient.start(sys.executable, "-I", "-S", CLIENT, "claude")
    assert process.communicate(json.dumps(body | tool))[0] == "" and process.returncode == 0


def files_of(tmp_path: Path) -> list[dict[str, bytes]]:
    return [contents_of(tmp_path / name) for name in ("work", "volume")]


@pytest.mark.req("D4.root_identity", "D4.identities_never_crossed")
class TestTwoMountNamespaces:
    def test_have_two_histories_and_undo_in_one_never_touches_the_other(
        self, here: Shell, container: Shell, tmp_path: Path
    ) -> None:
        ours, theirs = here.write("f", "plain, changed\n"), container.write("f", "container, changed\n")
        assert (here.log(), container.log()) == ([ours], [theirs])
        assert here.log("--session", "default") == [theirs, ours]
        assert here("undo").code == 0
        assert files_of(tmp_path) == [{"f": b"plain\n"}, {"f": b"container, changed\n"}]
        assert here("undo").code == 2
        assert container("undo").code == 0
        assert files_of(tmp_path) == [{"f": b"plain\n"}, {"f": b"container\n"}]

    def test_do_not_take_each_others_content_for_a_persons_edit(self, here: Shell, container: Shell) -> None:
        for number in range(2):
            here.write("f", f"plain {number}\n")
            container.write("f", f"container {number}\n")
        assert [one["external"] for shell in (here, container) for one in shell.logged()] == [False] * 4

    def test_share_a_session_whose_undo_stays_in_the_directory_it_is_asked_in(
        self, here: Shell, container: Shell, tmp_path: Path
    ) -> None:
        here.write("f", "plain, changed\n")
        theirs = container.write("f", "container, changed\n")
        assert here("undo", "--session", "default").code == 0
        assert files_of(tmp_path) == [{"f": b"plain\n"}, {"f": b"container, changed\n"}]
        refused = here("undo", theirs, "--session", "default")
        assert (refused.code, files_of(tmp_path)[1]) == (2, {"f": b"container, changed\n"})
        for verb in ("redo", "rollback"):
            here(verb, "--session", "default", "--yes")
        assert files_of(tmp_path)[1] == {"f": b"container, changed\n"}

    def test_a_dead_call_is_rolled_back_by_the_next_process_that_sees_its_directory(
        self, here: Shell, container: Shell, tmp_path: Path
    ) -> None:
        here.write("g", "known\n")
        dying = container.start(sys.executable, "-c", DIE_IN_A_CALL)
        assert dying.communicate()[0] == "written\n" and dying.returncode == -signal.SIGKILL
        plain = {"f": b"plain\n", "g": b"known\n"}
        assert here("status").code == 0
        assert files_of(tmp_path) == [plain, {"f": b"half done"}]
        assert container("status").code == 0
        assert files_of(tmp_path) == [plain, {"f": b"container\n"}]

    def test_hooks_in_one_never_record_files_of_the_other(self, here: Shell, container: Shell, tmp_path: Path) -> None:
        # The container's hooks start no process of their own: a process here is the only one that they could reach.
        alone = replace(container, environ={"MULLIGAN_HOOKS_PROCESS": "off"})
        try:
            for shell, path in ((here, tmp_path / "work"), (alone, tmp_path / "volume")):
                run_hook(shell, "PreToolUse")
                (path / "f").write_text("changed by a command\n")
                run_hook(shell, "PostToolUse")
        finally:
            ask_background(background_folder(str(here.home)), b"stop")
        changed = [[one["path"] for call in shell.logged() for one in call["changes"]] for shell in (here, container)]
        assert changed == [["f"], ["f"]]
        assert container("undo").code == 0
        assert files_of(tmp_path) == [{"f": b"changed by a command\n"}, {"f": b"container\n"}]

    def test_a_claim_holds_in_its_own_directory_only(self, here: Shell, container: Shell) -> None:
        here.write("g", "known\n")
        holder = container.start(sys.executable, "-c", HOLD_A_CALL)
        assert holder.stdout is not None and holder.stdout.readline() == "written\n"
        here.write("f", "not held here\n")
        arguments = json.dumps({"path": "f", "content": "held there"})
        held = container("call", "write_file", "--args", arguments)
        assert (held.code, held.json["error_code"]) == (1, "path_claimed")
        holder.communicate("\n")
        assert holder.returncode == 0

    def test_folders_inside_and_around_keep_to_the_directory_that_is_there(
        self, here: Shell, container: Shell, tmp_path: Path
    ) -> None:
        plant(tmp_path, {"work/in/f": "1\n", "volume/in/f": "2\n"})
        inner, other_inner = (replace(shell, folder=here.folder / "in") for shell in (here, container))
        shown = container_of(tmp_path / "new", tmp_path / "volume" / "in", inner.folder, here.home)
        other_inner = replace(other_inner, around=shown)
        ours = [inner.write("f", "ours\n")]
        theirs = [other_inner.write("f", "theirs\n")]
        ours.insert(0, here.write("in/f", "ours again\n"))
        theirs.insert(0, container.write("in/f", "theirs again\n"))
        assert (here.log(), container.log()) == (ours, theirs)
        assert here("undo").code == 0 and container("undo").code == 0
        assert [(tmp_path / name / "in" / "f").read_text() for name in ("work", "volume")] == ["ours\n", "theirs\n"]


@pytest.mark.req("D4.root_identity")
class TestOneDirectory:
    @pytest.mark.hosts
    def test_is_one_history_in_a_plain_shell_and_in_bubblewrap(self, here: Shell) -> None:
        sandboxed = replace(here, around=BWRAP)
        calls = [shell.write("f", f"{number}\n") for number, shell in enumerate((here, sandboxed, here, sandboxed))]
        assert here.log() == sandboxed.log() == calls[::-1]
        assert here("undo").code == 0 and sandboxed("undo").code == 0
        assert (here.folder / "f").read_text() == "1\n"
        assert [one["external"] for one in here.logged()] == [False] * 6

    def test_is_one_history_under_another_path_of_another_namespace(self, here: Shell, tmp_path: Path) -> None:
        (tmp_path / "mnt").mkdir()
        elsewhere = replace(
            here,
            folder=tmp_path / "mnt",
            around=container_of(tmp_path / "new", here.folder, tmp_path / "mnt", here.home),
        )
        calls = [shell.write("f", f"{number}\n") for number, shell in enumerate((here, elsewhere, here, elsewhere))]
        assert here.log() == elsewhere.log() == calls[::-1]
        assert elsewhere("undo", calls[0]).code == 1 and here("undo").code == 0
        assert (here.folder / "f").read_text() == "2\n"
        assert not any(one["external"] for one in here.logged())

    @pytest.mark.req("D4.root_renamed")
    def test_keeps_its_history_when_it_is_renamed(self, here: Shell, tmp_path: Path) -> None:
        call = here.write("f", "changed\n")
        here.folder.rename(tmp_path / "renamed")
        there = replace(here, folder=tmp_path / "renamed")
        later = there.write("g", "new\n")
        assert there.log() == [later, call]
        assert there("undo").code == 0 and there("undo").code == 0
        assert contents_of(there.folder) == {"f": b"plain\n"}

    @pytest.mark.req("D4.root_replaced")
    def test_that_is_deleted_and_made_again_is_a_new_root_and_this_is_said_once(
        self, here: Shell, tmp_path: Path
    ) -> None:
        call = here.write("f", "changed\n")
        for _ in range(2):
            shutil.rmtree(here.folder)
            plant(here.folder, {"f": "cloned\n"})
        first = here("call", "write_file", "--args", json.dumps({"path": "g", "content": "1"}))
        second = here("call", "write_file", "--args", json.dumps({"path": "g", "content": "2"}))
        assert "mulligan store adopt" in first.err and second.err == ""
        assert here.log() == [second.json["call_id"], first.json["call_id"]]
        assert here("undo", call).code == 2
        assert contents_of(here.folder) == {"f": b"cloned\n", "g": b"2"}
        assert not any(one["external"] for one in here.logged())

    @pytest.mark.req("D4.root_adopted")
    @pytest.mark.parametrize("name", ["path", "id"])
    def test_that_is_made_again_adopts_the_history_of_the_one_before(self, here: Shell, name: str) -> None:
        call = here.write("f", "changed\n")
        roots = here("store", "--json").json["known_roots"]
        shutil.rmtree(here.folder)
        plant(here.folder, {"f": "changed\n"})
        later = here.write("g", "1")
        adopted = here("store", "adopt", str(here.folder) if name == "path" else roots[0]["id"])
        assert adopted.code == 0, adopted
        assert sorted(here.log()) == sorted([later, call])
        assert here("undo", call).code == 0
        assert contents_of(here.folder) == {"f": b"plain\n", "g": b"1"}
        assert here("verify").code == 0
        assert here("store", "adopt", str(here.folder)).code == 2

    def test_inside_a_known_root_that_is_made_again_begins_its_own_history(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
        inner = tmp_path / "work" / "in"
        plant(inner, {"f": "0"})
        with mulligan.open(tmp_path / "work") as outer:
            with mulligan.open(inner) as m, m.session("a").call() as first:
                first.write_file("f", "1")
            shutil.rmtree(inner)
            plant(inner, {"f": "cloned"})
            with mulligan.open(inner) as m:
                with m.session("a").call() as second, pytest.raises(MulliganError), outer.session("b").call() as other:
                    second.write_file("f", "2")
                    assert other.write_file("in/f", "claimed").error_code == "path_claimed"
                    raise fault("conflict", "The outer root shares its claims.")
                assert m.session("a").undo().ok
                with pytest.raises(MulliganError) as nothing:
                    m.session("a").undo()
            assert nothing.value.code == "nothing_to_undo"
            assert (inner / "f").read_text() == "cloned"
            assert list(verify(outer.store, SCHEMA, deep=True)) == []


class TestBoots:
    """The kernel's boot id and the device number are replaced for real, in a mount namespace."""

    @pytest.mark.req("D4.root_device_within_boot")
    def test_the_device_number_counts_only_within_one_boot(self, tmp_path: Path) -> None:
        shell = Shell(tmp_path / "disk" / "work", tmp_path / "home")
        plant(shell.folder, {"f": "0\n"})
        call = shell.write("f", "1\n")
        boots = [tmp_path / name for name in ("first", "second")]
        boots[0].write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
        boots[1].write_text("11111111-2222-4333-8444-555555555555\n")
        logs = [replace(shell, around=after_boot(tmp_path / "disk", boot)).log() for boot in boots]
        assert logs == [[], [call]]


class TestHosts:
    @pytest.fixture
    def work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("MULLIGAN_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("MULLIGAN_HOST", raising=False)
        plant(tmp_path / "work", {"f": "0"})
        return tmp_path / "work"

    def wrote(self, work: Path, content: str, session: str = "shared") -> str:
        with mulligan.open(work) as m, m.session(session).call() as call:
            assert call.write_file("f", content).ok
        return call.id

    @pytest.mark.req("D4.root_elsewhere", "D4.host_id", "D4.identities_never_crossed")
    def test_a_request_for_another_hosts_root_is_answered_with_root_elsewhere(
        self, work: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MULLIGAN_HOST", "first")
        theirs = self.wrote(work, "1")
        monkeypatch.setenv("MULLIGAN_HOST", "second")
        with mulligan.open(work) as m:
            for verb in (m.session("shared").undo, m.session("shared").restore):
                with pytest.raises(MulliganError) as refused:
                    verb(theirs)
                assert refused.value.code == "root_elsewhere"
            with pytest.raises(MulliganError) as nothing:
                m.session("shared").undo()
            assert nothing.value.code == "nothing_to_undo"
        ours = self.wrote(work, "2")
        assert (work / "f").read_text() == "2"
        monkeypatch.setenv("MULLIGAN_HOST", "first")
        with mulligan.open(work) as m:
            with pytest.raises(MulliganError) as refused:
                m.session("shared").undo(ours)
            assert refused.value.code == "root_elsewhere"

    @pytest.mark.req("D4.host_id")
    def test_the_host_id_is_kept_for_the_machine_and_for_the_boot(
        self, work: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        calls = [self.wrote(work, "1")]
        shell = Shell(work, tmp_path / "home")
        machine_id = tmp_path / "machine-id"
        for text in ("", "0123456789abcdef0123456789abcdef\n"):
            machine_id.write_text(text)
            calls.append(replace(shell, around=covering("/etc/machine-id", machine_id)).write("f", text))
        assert shell.log() == calls[::-1]


class TestGone:
    @pytest.mark.req("D4.root_gone_is_read")
    def test_the_log_of_a_deleted_root_is_read_by_its_path_and_by_its_id(self, here: Shell, tmp_path: Path) -> None:
        call = here.write("f", "changed\n")
        before, (root,) = here.logged(), here("store", "--json").json["known_roots"]
        shutil.rmtree(here.folder)
        outside = replace(here, folder=tmp_path)
        assert outside.logged("--root", str(here.folder)) == outside.logged("--root", root["id"]) == before
        assert outside("show", call, "--root", str(here.folder)).code == 0
        assert outside("log", "--root", str(tmp_path / "never")).code == 2
        assert not here.folder.exists()


class TestMigrated:
    @pytest.mark.req("D4.migrated_roots")
    def test_a_store_that_format_2_wrote_is_read_as_before(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        home.mkdir(mode=0o700)
        (home / "store.db").write_bytes(gzip.decompress((FIXTURES / "store-2.db.gz").read_bytes()))
        shell = Shell(tmp_path, home)
        assert shell.logged("--root", "/tmp/mulligan-format-2/work") == json.loads(
            (FIXTURES / "store-2-log.json").read_text("utf-8")
        )
        assert shell("verify").code == 0

    @pytest.mark.req("D4.migrated_roots")
    def test_a_directory_that_format_2_knew_goes_on_with_its_history(self, here: Shell, tmp_path: Path) -> None:
        call = here.write("f", "1\n")
        before = here.logged()
        as_format_2(here.home, tmp_path / "old")
        old = replace(here, home=tmp_path / "old")
        assert old.logged() == before
        later = old.write("f", "2\n")
        assert old.log() == [later, call]
        assert old("undo").code == old("undo").code == old("verify").code == 0
        assert contents_of(here.folder) == {"f": b"plain\n"}
