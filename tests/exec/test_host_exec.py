"""host.exec and shell: what they take, what they answer, and what is left when they do not end well."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mulligan.boundary.capability import parse_capability
from mulligan.boundary.policy import parse_policy
from mulligan.testing import tree_of
from mulligan.values.digest import digest_of
from tests.exec.commands import bytes_of, execute, plant, repository, sh, text, told
from tests.history.killed_process import in_child
from tests.temp_workspace import TempWorkspace, open_temp_workspace

PYTHON = sys.executable


class TestReceipt:
    @pytest.mark.req("D7.exec_inside_call", "S1.effects.exec", "D7.exec_param.argv", "D7.exec_status.ok")
    @pytest.mark.req("D7.exec_receipt.exit_code", "D7.exec_receipt.status", "D7.exec_receipt.stdout")
    @pytest.mark.req("D7.exec_receipt.stderr", "D7.exec_receipt.strategy", "D7.exec_receipt.strategy_reason")
    @pytest.mark.req("D7.exec_receipt.sandbox", "D7.exec_receipt.changes", "D7.exec_receipt.coverage")
    @pytest.mark.req("D7.exec_receipt.started_at_ns", "D7.exec_receipt.ended_at_ns", "D7.strategy_named")
    @pytest.mark.req("D7.notify_default_linux", "D7.notify_true_attribution", "S1.output.exec_same_variants")
    def test_says_everything_about_a_command(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "echo out; echo err >&2; echo new > n; rm -f missing; exit 3").to_dict()
        started, ended = receipt.pop("started_at_ns"), receipt.pop("ended_at_ns")
        assert receipt == {
            "status": "ok",
            "exit_code": 3,
            "stdout": text("out\n"),
            "stderr": text("err\n"),
            "strategy": "notify",
            "strategy_reason": "default on Linux",
            "attribution": "call",
            "sandbox": "none",
            "changes": [{"path": "n", "kind": "created"}],
            "coverage": [],
        }
        assert 0 < started < ended

    def test_has_no_output_fields_when_there_was_none(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, ":").to_dict()
        assert "stdout" not in receipt and "stderr" not in receipt

    @pytest.mark.req("W23.stderr_is_not_failure", "D7.nonzero_commits")
    def test_of_a_command_that_fails_is_ok_and_its_files_stay(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "echo no >&2; echo report > r; exit 1")
        assert (receipt.status, receipt.exit_code, receipt.stderr) == ("ok", 1, text("no\n"))
        assert (workspace.root / "r").read_text() == "report\n"

    @pytest.mark.req("D7.exec_status.signaled")
    def test_of_a_command_that_a_signal_ended_is_signaled_and_its_files_stay(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "echo x > x; kill -SEGV $$")
        assert (receipt.status, receipt.exit_code) == ("signaled", -1)
        assert (workspace.root / "x").exists()

    @pytest.mark.req("D7.exec_argv_empty", "D7.exec_status.error", "D7.exec_receipt.error_code")
    @pytest.mark.req("D7.exec_receipt.error_message")
    def test_of_an_empty_argv(self, workspace: TempWorkspace) -> None:
        assert execute(workspace).to_dict() == {
            "status": "error",
            "error_code": "argv_empty",
            "error_message": "A command needs at least a program name.",
        }

    @pytest.mark.req("D7.exec_spawn_failed")
    def test_of_a_program_that_cannot_start(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"not-executable": "#!/bin/sh\n"})
        assert told(execute(workspace, "no-such-program-anywhere")) == ("error", "spawn_failed")
        assert told(execute(workspace, "./not-executable")) == ("error", "spawn_failed")

    def test_names_changes_by_path_and_kind(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"m": "1", "d": "1", "x": "1"})
        receipt = sh(workspace, "echo 2 > m; rm d; chmod 755 x; mkdir n; ln -s m l")
        assert receipt.changes == [
            {"path": "d", "kind": "deleted"},
            {"path": "l", "kind": "created"},
            {"path": "m", "kind": "modified"},
            {"path": "n", "kind": "created"},
            {"path": "x", "kind": "mode"},
        ]

    def test_of_a_second_command_in_a_call_names_only_its_own_changes(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            call.exec(["sh", "-c", "echo 1 > a"])
            assert call.exec(["sh", "-c", "echo 2 > b"]).changes == [{"path": "b", "kind": "created"}]

    @pytest.mark.req("D6.coverage.special_file")
    def test_lists_a_special_file_in_its_coverage(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "mkfifo p")
        assert receipt.coverage == [{"path": "p", "reason": "special_file"}]


class TestWords:
    @pytest.mark.parametrize(
        ("params", "code"),
        [
            ({"argv": "ls"}, "invalid_params"),
            ({"argv": ["a\0b"]}, "invalid_params"),
            ({"argv": ["\ud800"]}, "invalid_params"),
            ({"argv": ["true"], "env": {"A=B": "1"}}, "invalid_params"),
            ({"argv": ["true"], "env": {"": "1"}}, "invalid_params"),
            ({"argv": ["true"], "env": {"A": "\0"}}, "invalid_params"),
            ({"argv": ["true"], "stdin": "\ud800"}, "invalid_params"),
            ({"argv": ["true"], "stdin": "a", "stdin_ref": "sha256:" + "0" * 64}, "invalid_params"),
            ({"argv": ["true"], "timeout_ms": 0}, "invalid_params"),
            ({"argv": ["true"], "timeout_ns": 0}, "invalid_params"),
            ({"argv": ["true"], "strategy": "magic"}, "invalid_params"),
            ({"argv": ["true"], "rollback_on": "always"}, "invalid_params"),
            ({"argv": ["true"], "cwd": "missing"}, "not_a_directory"),
            ({"argv": ["true"], "cwd": ""}, "invalid_path"),
        ],
    )
    def test_that_cannot_be_are_refused(self, workspace: TempWorkspace, params: dict[str, Any], code: str) -> None:
        receipt, _ = workspace.session().perform("host.exec", params)
        assert told(receipt) == ("error", code)

    def test_are_a_list_for_python_too(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            assert told(call.exec("echo hi")) == ("error", "invalid_params")

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(words=st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")), max_size=4))
    def test_arrive_as_they_were_given(self, workspace: TempWorkspace, words: list[str]) -> None:
        receipt = execute(workspace, "printf", "%s\\n", "-", *words)
        assert receipt.stdout == text("".join(f"{word}\n" for word in ("-", *words)))


class TestSurroundings:
    @pytest.mark.req("D7.env_allowlist", "D7.env_added", "D7.exec_param.env_patch")
    def test_hold_only_the_allowed_variables_and_the_given_ones(
        self, workspace: TempWorkspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = ("HOME", "USER", "SHELL", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR")
        for name in (*kept, "OPENAI_API_KEY", "LD_PRELOAD_X", "PYTHONPATH"):
            monkeypatch.setenv(name, "/tmp")
        receipt = execute(workspace, "env", env_patch={"ADDED": "1", "TZ": "UTC"})
        found = dict(line.split("=", 1) for line in receipt.stdout["inline_text"]["text"].splitlines())
        call, home = found.pop("MULLIGAN_CALL"), found.pop("MULLIGAN_HOME")
        assert found == {**dict.fromkeys(kept, "/tmp"), "PATH": os.environ["PATH"], "ADDED": "1", "TZ": "UTC"}
        assert (len(call), home) == (36, str(workspace.home))

    @pytest.mark.req("D7.exec_param.cwd", "D7.cwd_inside")
    def test_begin_in_the_asked_folder_inside_the_root(self, workspace: TempWorkspace) -> None:
        (workspace.root / "a/b").mkdir(parents=True)
        os.symlink("/tmp", workspace.root / "out")
        os.symlink("a", workspace.root / "in")
        assert execute(workspace, "pwd", cwd="a/b").stdout == text(f"{workspace.root}/a/b\n")
        assert execute(workspace, "pwd", cwd=str(workspace.root / "a")).stdout == text(f"{workspace.root}/a\n")
        assert execute(workspace, "pwd", "-P", cwd="in").stdout == text(f"{workspace.root}/a\n")
        for outside in ("..", "/tmp", "a/../..", f"{workspace.root}-evil"):
            assert told(execute(workspace, "pwd", cwd=outside)) == ("forbidden", "path_not_allowed")
        assert told(execute(workspace, "pwd", cwd="out")) == ("forbidden", "symlink_not_allowed")

    @pytest.mark.req("S1.goal.one_boundary_for_all", "D7.session_open_shape", "S1.effects.session_open")
    def test_of_an_opened_session_hold_for_its_commands(self, workspace: TempWorkspace) -> None:
        (workspace.root / "sub").mkdir()
        local = {"workdir": "sub", "env": {"WHO": "session", "ONLY": "s"}, "network_mode": "none"}
        opened, _ = workspace.session().perform("host.session.open", {"target": {"local": local}, "labels": {"a": "b"}})
        assert opened.status == "ready" and opened.started_at_ns > 0
        receipt = execute(
            workspace, "sh", "-c", "pwd; echo $WHO $ONLY", env={"WHO": "me"}, session_id=opened.session_id
        )
        assert receipt.stdout == text(f"{workspace.root}/sub\nme s\n")
        assert receipt.sandbox == "none, network none"

    @pytest.mark.req("D7.session_ttl")
    def test_of_an_expired_session_admit_no_command(self, tmp_path: Path) -> None:
        from datetime import timedelta

        from mulligan.testing import SteppingClock

        clock = SteppingClock(step=timedelta(0))
        workspace = open_temp_workspace(tmp_path, clock=clock)
        opened, _ = workspace.session().perform("host.session.open", {"session_ttl_ns": 1_000_000})
        clock.advance(timedelta(seconds=1))
        assert told(execute(workspace, "true", session_id=opened.session_id)) == ("error", "session_expired")
        workspace.close()


class TestInput:
    def test_is_empty_unless_given(self, workspace: TempWorkspace) -> None:
        assert execute(workspace, "cat").to_dict().get("stdout") is None

    def test_comes_from_a_text(self, workspace: TempWorkspace) -> None:
        assert execute(workspace, "cat", stdin="häh\n").stdout == text("häh\n")

    @pytest.mark.req("D7.exec_stdin_ref", "D7.exec_param.stdin_ref")
    def test_comes_from_a_blob_of_the_session(self, workspace: TempWorkspace) -> None:
        large = execute(workspace, "head", "-c", "100000", "/dev/zero").stdout["blob"]["blob_ref"]
        counted = execute(workspace, "wc", "-c", stdin_ref=large)
        assert counted.stdout == text("100000\n")
        unknown = digest_of(b"never seen")
        assert told(execute(workspace, "cat", stdin_ref=unknown)) == ("error", "stdin_ref_not_found")
        for nonsense in ("nonsense", "sha256:00", ""):
            assert told(execute(workspace, "cat", stdin_ref=nonsense)) == ("error", "invalid_stdin_ref")

    @pytest.mark.req("AR.large_stdin_times_out", "D7.timeout_covers_pipes")
    def test_without_a_reader_does_not_outlive_the_deadline(self, workspace: TempWorkspace) -> None:
        receipt = execute(workspace, "sleep", "1000", stdin="x" * 5_000_000, timeout_ms=100)
        assert told(receipt) == ("timeout", "timeout")


class TestOutput:
    @pytest.mark.req("D7.output_bounded")
    def test_over_the_inline_limit_is_a_blob_with_head_and_tail(self, workspace: TempWorkspace) -> None:
        data = b"".join(b"%07d\n" % number for number in range(20_000))
        receipt = execute(workspace, "sh", "-c", "seq -f %07.0f 0 19999")
        blob = receipt.stdout["blob"]
        assert (blob["blob_ref"], blob["size_bytes"]) == (digest_of(data), len(data))
        assert bytes_of(blob["preview_bytes"]) == data[:512]
        assert bytes_of(blob["tail_bytes"]) == data[-512:]
        page, _ = workspace.session().perform(
            "blob.read", {"blob_ref": blob["blob_ref"], "offset_bytes": 80_000, "max_bytes": 16}
        )
        assert page.content == text("0010000\n0010001\n")

    @pytest.mark.parametrize("size", [16_384, 16_385])
    def test_is_inline_up_to_the_limit(self, workspace: TempWorkspace, size: int) -> None:
        receipt = execute(workspace, "head", "-c", str(size), "/dev/zero")
        assert ("blob" in receipt.stdout) == (size > 16_384)

    @pytest.mark.req("D7.exec_param.output_mode", "S1.verify.large_outputs_end_to_end")
    def test_that_must_be_inline_and_is_too_large_is_an_error_with_what_fits(self, workspace: TempWorkspace) -> None:
        script = "echo small; echo x > made; head -c 20000 /dev/zero >&2"
        receipt = sh(workspace, script, output_mode="require_inline")
        assert told(receipt) == ("error", "inline_required_too_large")
        assert (receipt.exit_code, receipt.stdout) == (0, text("small\n"))
        assert not (workspace.root / "made").exists()

    def test_that_is_no_text_is_bytes(self, workspace: TempWorkspace) -> None:
        receipt = execute(workspace, "printf", "\\377\\000")
        assert receipt.stdout == {"inline_bytes": {"bytes": "base64:/wA="}}

    def test_a_policy_keeps_out_of_answers_is_a_blob_without_preview(self, workspace: TempWorkspace) -> None:
        policy = parse_policy([{"ops": ["exec"], "paths": ["**"], "verdict": "allow", "output": "blob"}])
        session = workspace.session(policy=policy)
        for script in ("echo secret", "yes secret | head -n 9000"):
            receipt, _ = session.perform("host.exec", {"argv": ["sh", "-c", script]})
            assert "preview_bytes" not in receipt.stdout["blob"] and "tail_bytes" not in receipt.stdout["blob"]

    def test_reaches_a_listener_as_it_arrives(self, workspace: TempWorkspace) -> None:
        seen: list[tuple[str, bytes]] = []

        class Listener:
            def write(self, stream: str, data: bytes) -> None:
                seen.append((stream, data))

        script = "echo one; read line < gate; echo two"
        os.mkfifo(workspace.root / "gate")

        class Gate(Listener):
            def write(self, stream: str, data: bytes) -> None:
                super().write(stream, data)
                if data == b"one\n":
                    (workspace.root / "gate").write_bytes(b"go\n")

        workspace.session().perform("host.exec", {"argv": ["sh", "-c", script]}, sink=Gate())
        assert seen == [("stdout", b"one\n"), ("stdout", b"two\n")]

    def test_of_many_megabytes_takes_little_memory(self, tmp_path: Path) -> None:
        def work() -> int:
            workspace = open_temp_workspace(tmp_path)
            execute(workspace, "true")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            blob = execute(workspace, "head", "-c", str(256 << 20), "/dev/zero").stdout["blob"]
            page, _ = workspace.session().perform(
                "blob.read", {"blob_ref": blob["blob_ref"], "offset_bytes": 200 << 20, "max_bytes": 8}
            )
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert blob["size_bytes"] == page.size_bytes == 256 << 20
            assert grown_kib < 64 * 1024, grown_kib
            return 0

        assert in_child(work) == 0


class TestEndings:
    @pytest.mark.parametrize(
        "given",
        [{"timeout_ns": 50_000_000}, {"timeout_ns": 1, "timeout_ms": 9_000}, {"timeout_ms": 1, "timeout_ns": 2**40}],
    )
    def test_it_is_reported_in_nanoseconds_too_and_the_shorter_one_holds(
        self, workspace: TempWorkspace, given: dict[str, int]
    ) -> None:
        assert told(execute(workspace, "sleep", "1000", **given)) == ("timeout", "timeout")

    @pytest.mark.req("D7.exec_status.timeout", "D7.timeout_kills_all", "D7.exec_param.timeout_ms")
    @pytest.mark.req("D5.abort_on_deadline")
    def test_a_timeout_kills_everything_puts_back_and_keeps_the_output(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a": "before"})
        script = "echo so far; echo x > a; echo y > b; (setsid sleep 1000 &) ; echo $$ ; sleep 1000"
        receipt = sh(workspace, script, timeout_ms=400)
        assert (told(receipt), receipt.exit_code) == (("timeout", "timeout"), -1)
        assert receipt.stdout["inline_text"]["text"].startswith("so far\n")
        assert sorted(os.listdir(workspace.root)) == ["a"]
        assert (workspace.root / "a").read_text() == "before"

    @pytest.mark.req("AR.grandchild_holds_pipe")
    def test_a_grandchild_that_holds_the_pipe_does_not_outlive_the_deadline(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "(trap '' HUP; sleep 1000) & sleep 1000", timeout_ms=200)
        assert told(receipt) == ("timeout", "timeout")

    @pytest.mark.req("D7.ends_with_last_descendant", "D7.survivors_killed")
    def test_survivors_do_not_outlive_the_command(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "sleep 1000 & echo $!")
        pid = int(receipt.stdout["inline_text"]["text"])
        assert not os.path.exists(f"/proc/{pid}")

    @pytest.mark.req("D7.rollback_on_nonzero", "D7.exec_param.rollback_on")
    @pytest.mark.parametrize("isolate", [False, True])
    def test_a_failure_with_rollback_on_leaves_no_change(self, workspace: TempWorkspace, isolate: bool) -> None:
        plant(workspace.root, {"a": "before", "d/e": "1"})
        receipt = sh(
            workspace, "echo gone; echo x > a; rm -r d; mkdir -p n/m; exit 7", rollback_on="nonzero", isolate=isolate
        )
        assert (told(receipt), receipt.exit_code) == (("error", "nonzero_exit"), 7)
        assert receipt.stdout == text("gone\n")
        assert sorted(os.listdir(workspace.root)) == ["a", "d"]
        assert (workspace.root / "a").read_text() == "before" and (workspace.root / "d/e").read_text() == "1"

    def test_a_success_is_kept_although_failure_would_be_rolled_back(self, workspace: TempWorkspace) -> None:
        assert sh(workspace, "echo x > a", rollback_on="nonzero").ok
        assert (workspace.root / "a").exists()

    def test_a_failing_part_of_a_call_leaves_the_rest_of_it(self, workspace: TempWorkspace) -> None:
        with workspace.session().call() as call:
            call.exec(["sh", "-c", "echo 1 > a"])
            call.exec(["sh", "-c", "echo 2 > a; echo 2 > b; false"], rollback_on="nonzero")
        assert (workspace.root / "a").read_text() == "1\n" and not (workspace.root / "b").exists()

    @pytest.mark.req("D12.call_exec")
    def test_a_call_that_fails_takes_its_commands_back(self, workspace: TempWorkspace) -> None:
        plant(workspace.root, {"a": "0"})
        with workspace.session().call() as call:
            receipt = call.exec(["sh", "-c", "cat; echo 1 > a; mkdir d"], cwd=".", timeout_ms=9_000, env={}, stdin="i")
            assert receipt.stdout == text("i")
            call.fail("no good")
        assert sorted(os.listdir(workspace.root)) == ["a"] and (workspace.root / "a").read_text() == "0"


class TestWays:
    @pytest.mark.req("D7.exec_param.strategy", "D7.strategy_forced", "D7.window_attribution")
    @pytest.mark.parametrize(
        ("strategy", "attribution"), [("notify", "call"), ("scan", "window"), ("watch", "window"), ("overlay", "call")]
    )
    def test_can_be_forced_and_are_named(self, workspace: TempWorkspace, strategy: str, attribution: str) -> None:
        receipt = sh(workspace, "echo x > a", strategy=strategy)
        found = (receipt.strategy, receipt.strategy_reason, receipt.attribution)
        assert found == (strategy, "asked for", attribution)
        assert receipt.changes == [{"path": "a", "kind": "created"}]

    @pytest.mark.req("D7.overlay_isolate", "D7.exec_param.isolate")
    def test_isolation_is_named_with_its_reason(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "echo x > a", isolate=True)
        assert (receipt.strategy, receipt.strategy_reason) == ("overlay", "isolation asked for")

    @pytest.mark.parametrize("strategy", ["notify", "scan", "watch"])
    def test_isolation_by_a_way_that_cannot_is_refused(self, workspace: TempWorkspace, strategy: str) -> None:
        receipt = sh(workspace, "echo x > a", isolate=True, strategy=strategy)
        assert (told(receipt), list(workspace.root.iterdir())) == (("error", "invalid_params"), [])

    @pytest.mark.req("D7.nonzero_commits")
    def test_a_failure_that_is_not_to_be_rolled_back_is_kept_in_isolation_too(self, workspace: TempWorkspace) -> None:
        receipt = sh(workspace, "echo x > a; exit 3", isolate=True)
        assert (receipt.ok, receipt.exit_code, (workspace.root / "a").read_text()) == (True, 3, "x\n")

    @pytest.mark.req("D7.sandbox_named", "D7.exec_param.sandbox", "D7.exec_param.network", "D7.network_none")
    @pytest.mark.req("D7.sandbox_none", "D7.sandbox_workspace")
    def test_sandboxes_are_named_and_hold(self, workspace: TempWorkspace, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        free = sh(workspace, f"echo x > {outside}")
        assert (free.sandbox, outside.exists()) == ("none", True)
        outside.unlink()
        caged = sh(workspace, f"echo x > {outside}", sandbox="workspace", network="none")
        assert (caged.sandbox, outside.exists()) == ("workspace, network none", False)

    @pytest.mark.req("D7.shell_tool")
    def test_the_shell_tool_runs_a_line_of_shell(self, workspace: TempWorkspace) -> None:
        (workspace.root / "d").mkdir()
        receipt, _ = workspace.session().perform("shell", {"command": "pwd | wc -l; echo $0", "cwd": "d"})
        assert receipt.stdout == text("1\nsh\n")
        late, _ = workspace.session().perform("shell", {"command": "sleep 1000", "timeout_ms": 50})
        assert told(late) == ("timeout", "timeout")

    @pytest.mark.req("D8.op_exec", "S1.verify.denials_end_to_end")
    def test_a_session_without_the_right_runs_nothing(self, workspace: TempWorkspace) -> None:
        limited = workspace.session(capability=parse_capability({"allowed_fs_ops": ["read", "write"]}))
        for effect, params in (("host.exec", {"argv": ["touch", "x"]}), ("shell", {"command": "touch x"})):
            receipt, _ = limited.perform(effect, params)
            assert told(receipt) == ("forbidden", "fs_op_not_allowed")
        only = workspace.session(capability=parse_capability({"allowed_fs_ops": ["exec"]}))
        assert only.perform("host.exec", {"argv": ["true"]})[0].ok
        assert not (workspace.root / "x").exists()

    @pytest.mark.req("D8.op_exec", "S1.verify.denials_end_to_end")
    @pytest.mark.parametrize(
        ("denied", "params"),
        [
            ("**", {}),
            ("**", {"background": True}),
            ("**", {"cwd": "."}),
            ("src/**", {"cwd": "src/deep"}),
            ("src/**", {"cwd": "link"}),
        ],
        ids=str,
    )
    def test_a_policy_judges_the_folder_a_command_really_runs_in(
        self, workspace: TempWorkspace, denied: str, params: dict[str, Any]
    ) -> None:
        plant(workspace.root, {"src/deep/a.py": "a\n"})
        (workspace.root / "link").symlink_to("src/deep")
        session = workspace.session(policy=parse_policy([{"ops": ["exec"], "paths": [denied], "verdict": "deny"}]))
        receipt, _ = session.perform("host.exec", {"argv": ["touch", f"{workspace.root}/x"], **params})
        assert told(receipt) == ("forbidden", "path_not_allowed")
        if not params:
            assert told(session.perform("shell", {"command": "true"})[0]) == ("forbidden", "path_not_allowed")
        assert not (workspace.root / "x").exists()

    @pytest.mark.req("D8.op_exec", "S1.verify.denials_end_to_end")
    @pytest.mark.parametrize("way", ["notify", "overlay", "scan"])
    @pytest.mark.parametrize(
        ("capability", "script", "code"),
        [
            ({"fs_roots": ["src"]}, "echo x > src/ok; echo x > README", "path_not_allowed"),
            ({"max_changed_files": 2}, "touch one two three", "max_changed_files_exceeded"),
            ({"max_write_bytes": 10}, "echo short > a; echo longer than ten > b", "max_write_bytes_exceeded"),
        ],
        ids=str,
    )
    def test_a_command_may_not_write_what_its_session_may_not(
        self, workspace: TempWorkspace, way: str, capability: dict[str, Any], script: str, code: str
    ) -> None:
        plant(workspace.root, {"src/a.py": "a\n", "README": "read me\n"})
        before = tree_of(workspace.root)
        session = workspace.session(capability=parse_capability(capability))
        cwd = {"cwd": "src"} if "fs_roots" in capability else {}
        told_so, _ = session.perform(
            "host.exec", {"argv": ["sh", "-c", f"cd {workspace.root}; {script}"], "strategy": way, **cwd}
        )
        assert told(told_so) == ("forbidden", code) and told_so.exit_code == 0
        assert tree_of(workspace.root) == before

    @pytest.mark.req("S1.verify.one_session_flow")
    def test_files_and_commands_work_together_in_one_session(self, workspace: TempWorkspace) -> None:
        repository(workspace.root, {"src/app.py": "print('one')\n"})
        session = workspace.session()
        with session.call() as call:
            assert call.read_file("src/app.py").ok
            assert call.edit_file("src/app.py", "one", "two").ok
            assert call.exec([PYTHON, "src/app.py"]).stdout == text("two\n")
            assert call.write_file("notes", "n\n").ok
            patch = "*** Begin Patch\n*** Update File: notes\n@@\n-n\n+m\n*** End Patch\n"
            assert call.apply_patch(patch).ok
            assert call.exec(["cat", "notes"]).stdout == text("m\n")
            assert call.grep("two").ok and call.glob("**/*.py").ok
            assert call.exec(["git", "status", "--short"]).stdout == text(" M src/app.py\n?? notes\n")
        assert session.undo().ok
        assert (workspace.root / "src/app.py").read_text() == "print('one')\n" and not (
            workspace.root / "notes"
        ).exists()


class TestSignals:
    @pytest.mark.req("D7.signal_really_signals", "D7.signal.signaled", "S1.effects.session_signal")
    def test_of_a_session_reach_its_running_command(self, workspace: TempWorkspace) -> None:
        opened, _ = workspace.session().perform("host.session.open", {})
        other, _ = workspace.session().perform("host.session.open", {})
        os.mkfifo(workspace.root / "ready")
        found: list[Any] = []
        script = "trap 'echo caught > got; exit 5' TERM; echo up > ready; while :; do sleep 0.01; done"
        work = threading.Thread(target=lambda: found.append(sh(workspace, script, session_id=opened.session_id)))
        work.start()
        (workspace.root / "ready").read_text()
        elsewhere = {"session_id": other.session_id, "signal": "kill"}
        assert workspace.session().perform("host.session.signal", elsewhere)[0].status == "signaled"
        answer, _ = workspace.session().perform(
            "host.session.signal", {"session_id": opened.session_id, "signal": "term"}
        )
        work.join()
        assert answer.status == "signaled"
        assert (found[0].status, found[0].exit_code) == ("ok", 5)
        assert (workspace.root / "got").read_text() == "caught\n"

    @pytest.mark.req("D7.signal.not_found", "D7.signal.already_exited", "D7.signal.error")
    @pytest.mark.req("AR.sessions_survive_restart")
    def test_answer_by_the_state_of_the_session(self, tmp_path: Path) -> None:
        workspace = open_temp_workspace(tmp_path)
        opened, _ = workspace.session().perform("host.session.open", {})
        workspace.close()
        workspace = open_temp_workspace(tmp_path)

        def signaled(session: str, name: str = "term") -> str:
            return workspace.session().perform("host.session.signal", {"session_id": session, "signal": name})[0].status

        assert signaled("nobody") == "not_found"
        assert signaled(opened.session_id, "usr1") == "error"
        assert signaled(opened.session_id) == "signaled"
        assert signaled(opened.session_id) == "already_exited"
        assert told(execute(workspace, "true", session_id=opened.session_id)) == ("error", "session_closed")
        workspace.close()


def test_the_signal_numbers_are_the_systems() -> None:
    from mulligan.effects.running_commands import SIGNALS

    assert {
        "term": signal.SIGTERM,
        "kill": signal.SIGKILL,
        "int": signal.SIGINT,
        "hup": signal.SIGHUP,
    } == SIGNALS
