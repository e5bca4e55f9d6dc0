"""The Python face: every method is its effect, and one flow over a real checkout under one session."""

from __future__ import annotations

import inspect
import subprocess
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mulligan.effects.handle import CallHandle
from mulligan.effects.receipt import FIELDS
from mulligan.testing import SteppingClock, as_tree
from mulligan.values.errors import MulliganError, PromptEvaluationError
from tests.effects.effect_session import EffectSession, denied, text
from tests.temp_workspace import open_temp_workspace

SIGNATURES = {
    "write_file": "(path, content, *, create_parents=False, mode='overwrite', expected_digest=None)",
    "edit_file": "(path, old_string, new_string, *, replace_all=False)",
    "apply_patch": "(patch, *, patch_format='v4a', dry_run=False)",
    "stat": "(path)",
    "exists": "(path)",
    "delete": "(path, *, recursive=False)",
    "move": "(path, to, *, overwrite=False)",
    "mkdir": "(path, *, parents=False)",
    "read_file": "(path, **params)",
    "grep": "(pattern, **params)",
    "glob": "(pattern, **params)",
    "list_dir": "(path='.', **params)",
}


@pytest.mark.req(
    "D12.call.read_file",
    "D12.call.write_file",
    "D12.call.edit_file",
    "D12.call.apply_patch",
    "D12.call.grep",
    "D12.call.glob",
    "D12.call.stat",
    "D12.call.exists",
    "D12.call.list_dir",
    "D12.call.delete",
    "D12.call.move",
    "D12.call.mkdir",
)
@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_have_the_signatures_of_the_design(name: str) -> None:
    signature = inspect.signature(getattr(CallHandle, name))
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in list(signature.parameters.values())[1:]]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


@pytest.mark.req("D12.receipt_attributes")
def test_each_method_performs_its_effect(effects: EffectSession) -> None:
    with effects.session.call("all of them") as call:
        assert call.mkdir("d/e", parents=True).created is True
        assert call.write_file("d/a", "one\n").written_bytes == 4
        assert call.write_file("d/bin", b"\xff").ok
        assert call.edit_file("d/a", "one", "two").replacements == 1
        assert call.apply_patch("*** Begin Patch\n*** Add File: n\n+x\n*** End Patch").changed_paths == ["n"]
        assert call.read_file("d/a", max_bytes=3).content == text("two")
        assert call.grep("two").matches == text("d/a:1:two")
        assert call.glob("*").paths == text("n")
        assert call.stat("d").is_dir is True
        assert call.exists("no").exists is False
        assert call.list_dir("d").entries == text("a\nbin\ne/")
        assert call.move("n", "m").moved is True
        assert call.delete("d/e").deleted is True
        missing = call.read_file("no")
        assert (missing.status, missing.error_code, missing.content) == ("not_found", "path_not_found", None)
        assert missing.error_message and missing.to_dict()["status"] == "not_found"
    assert effects.tree() == as_tree({"d/a": "two\n", "d/bin": b"\xff", "m": "x\n"})


@pytest.mark.req("D12.receipt_attributes")
def test_a_field_that_a_receipt_does_not_have_is_none_and_a_misspelt_one_an_error(effects: EffectSession) -> None:
    with effects.session.call() as call:
        receipts = [
            call.write_file("a", "one\n"),
            call.read_file("a"),
            call.grep("one"),
            call.list_dir(),
            call.stat("a"),
        ]
        receipts += [call.exec(["true"]), call.exists("b"), call.read_file("b"), call.mkdir("d"), call.move("a", "d/a")]
        receipts += [call.exec(["true"], isolate=True), call.delete("d", recursive=True), call.glob("*")]
    receipts.append(effects.session.perform("snapshot.list", {})[0])
    assert [set(one.to_dict()) - FIELDS for one in receipts] == [{"status"}] * len(receipts)
    written = receipts[0]
    assert (written.exit_code, hasattr(written, "exit_code"), hasattr(written, "writen_bytes")) == (None, True, False)
    with pytest.raises(AttributeError):
        written.writen_bytes  # noqa: B018  # a caller's mistake


def test_a_failing_block_leaves_no_changes(effects: EffectSession) -> None:
    effects.plant({"a": "1"})
    with pytest.raises(ZeroDivisionError), effects.session.call() as call:
        call.write_file("a", "2")
        call.mkdir("d")
        raise ZeroDivisionError
    with effects.session.call() as call:
        call.write_file("a", "3")
        call.fail("no good")
    assert effects.tree() == as_tree({"a": "1"})


def test_a_nested_call_fails_alone(effects: EffectSession) -> None:
    with effects.session.call() as outer:
        outer.write_file("a", "1")
        with effects.session.call() as inner:
            inner.write_file("a", "2")
            inner.write_file("b", "2")
            inner.fail("no good")
        assert outer.read_file("a").content == text("1")
    assert effects.tree() == as_tree({"a": "1"})


@pytest.mark.req("D12.deadline_raises", "D5.abort_on_deadline")
def test_a_call_past_its_deadline_is_aborted(tmp_path: Path) -> None:
    clock = SteppingClock(step=timedelta(0))
    workspace = open_temp_workspace(tmp_path, clock=clock)
    with pytest.raises(PromptEvaluationError), workspace.session().call(deadline=clock.now()) as call:
        call.write_file("a", "1")
        clock.advance(timedelta(seconds=1))
    assert not (workspace.root / "a").exists()
    workspace.close()


@pytest.mark.parametrize("timeout_ms", [None, 60_000])
def test_a_command_is_stopped_at_the_deadline_of_its_call(tmp_path: Path, timeout_ms: int | None) -> None:
    clock = SteppingClock(step=timedelta(0))
    workspace = open_temp_workspace(tmp_path, clock=clock)
    with workspace.session().call(deadline=clock.now() + timedelta(milliseconds=200)) as call:
        stopped = call.exec(["sh", "-c", "echo 1 > a; exec sleep 60"], timeout_ms=timeout_ms)
    assert (stopped.status, stopped.error_code) == ("timeout", "timeout")
    assert stopped.error_message == "The command ran longer than 200 ms."
    assert not (workspace.root / "a").exists()
    workspace.close()


@pytest.mark.parametrize("deadline", [datetime(2030, 1, 1), 5, "2030-01-01T00:00:00Z"])
def test_a_deadline_needs_a_time_zone(effects: EffectSession, deadline: Any) -> None:
    with pytest.raises(MulliganError) as caught:
        effects.session.call(deadline=deadline)
    assert (caught.value.code, caught.value.details["field"]) == ("invalid_params", "deadline")


def test_a_path_may_be_a_path_object_and_content_may_not(effects: EffectSession) -> None:
    with effects.session.call() as call:
        assert call.mkdir(Path("d")).ok
        assert call.write_file(Path("d/a"), "one\n").ok
        assert call.edit_file(Path("d/a"), "one", "two").ok
        assert call.move(Path("d/a"), Path("d/b")).ok
        assert call.grep("two", path=Path("d")).matches == text("d/b:1:two")
        assert call.exec(["cat", "b"], cwd=Path("d")).ok
        assert call.write_file("c", Path("d/b")).error_code == "invalid_params"  # type: ignore[arg-type]  # a caller's mistake
    assert effects.tree() == as_tree({"d/b": "two\n"})


@pytest.mark.parametrize("given", [{"argv": None}, {"argv": 3}, {"argv": b"ls"}, {"argv": ["true"], "env": ["A"]}])
def test_an_invalid_command_is_refused(effects: EffectSession, given: dict[str, Any]) -> None:
    with effects.session.call() as call:
        assert call.exec(**given).error_code == "invalid_params"


def test_an_unknown_effect_is_refused(effects: EffectSession) -> None:
    with effects.session.call() as call:
        for name in (3, ["read_file"]):
            with pytest.raises(MulliganError) as caught:
                call.perform(name)  # type: ignore[arg-type]  # a caller's mistake
            assert caught.value.code == "unknown_effect"
    for effect, params in (("read_file", None), ("read_file", ["a"]), (3, {})):
        with pytest.raises(MulliganError) as caught:
            effects.session.perform(effect, params)  # type: ignore[arg-type]  # a caller's mistake
        assert caught.value.code == "invalid_params"


def test_a_call_works_only_inside_its_single_with_block(effects: EffectSession) -> None:
    early = effects.session.call()
    with pytest.raises(MulliganError) as caught:
        early.write_file("a", "1")
    assert caught.value.code == "call_not_open"
    with effects.session.call() as call:
        with early:
            assert early.write_file("a", "1").ok
        for act in (early.__enter__, lambda: early.write_file("b", "1"), call.__enter__):
            with pytest.raises(MulliganError) as caught:
                act()
            assert caught.value.code == "call_not_open"
        with effects.session.call() as inner:
            assert inner.write_file("c", "1").ok
        with pytest.raises(MulliganError) as caught:
            inner.write_file("c", "2")
        assert caught.value.code == "call_not_open"
    assert effects.tree() == as_tree({"a": "1", "c": "1"})


def test_leaving_a_cancelled_call_raises(effects: EffectSession) -> None:
    for nested in (False, True):
        with pytest.raises(MulliganError) as caught, effects.session.call() as call:
            call.write_file("a", "1")
            with effects.session.call() if nested else nullcontext():
                effects.workspace.open_root.cancel(call.id)
        assert caught.value.code == "call_not_open"
    assert effects.tree() == {}


@pytest.mark.parametrize("how", ["committed", "aborted"])
def test_an_ended_call_performs_nothing(effects: EffectSession, how: str) -> None:
    effects.plant({"a": "1"})
    with effects.session.call() as call:
        if how == "aborted":
            call.fail("no good")
    assert call.status == how
    asked: list[tuple[str, dict[str, Any]]] = [
        ("read_file", {"path": "a"}),
        ("mkdir", {"path": "d"}),
        ("host.exec", {"argv": ["rm", "a"]}),
    ]
    for effect, params in asked:
        with pytest.raises(MulliganError) as caught:
            call.perform(effect, **params)
        assert caught.value.code == "call_not_open"
    assert effects.tree() == as_tree({"a": "1"})


def test_content_may_be_a_payload(effects: EffectSession) -> None:
    with effects.session.call() as call:
        assert call.write_file("a", text("one\n")).ok
        assert call.write_file("b", {"inline_bytes": {"bytes": "base64:AAE="}}).ok
        assert call.write_file("c", b"two").ok
        assert call.write_file("d", {"blob_ref": {"blob_ref": "sha256:" + "0" * 64}}).error_code == "invalid_content"
        assert call.write_file("d", {"text": "no such thing"}).error_code == "invalid_params"
        assert call.write_file("d", 5).error_code == "invalid_params"  # type: ignore[arg-type]  # a caller's mistake
        assert call.apply_patch(text("*** Begin Patch\n*** Delete File: b\n*** End Patch")).ok
    assert effects.tree() == as_tree({"a": "one\n", "c": "two"})


@pytest.mark.req("S1.goal.seven_tools", "S1.done.core_tools_exist", "S1.goal.session_scoped", "D3.request_path")
def test_one_session_uses_every_effect_on_a_real_checkout(effects: EffectSession) -> None:
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.com", "-C", str(effects.root)]
    effects.plant({"src/app.py": "def hello():\n    return 'hi'\n", ".gitignore": "*.pyc\n", "README.md": "# App\n"})
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    limits = {"fs_roots": ["src", "README.md"], "max_inline_bytes": 200}
    session = effects.perform("host.session.open", capability=limits)["session_id"]

    def act(effect: str, **params: Any) -> dict[str, Any]:
        return effects.perform(effect, session_id=session, **params)

    assert act("host.fs.read_file", path="src/app.py")["content"] == text("def hello():\n    return 'hi'\n")
    assert act("host.fs.edit_file", path="src/app.py", old_string="'hi'", new_string="'ho'")["replacements"] == 1
    assert act("host.fs.write_file", path="src/new.py", content="NEW = 1\n")["created"] is True
    patch = "*** Begin Patch\n*** Update File: README.md\n@@\n-# App\n+# The App\n*** End Patch"
    assert act("host.fs.apply_patch", patch=patch)["changed_paths"] == ["README.md"]
    assert act("host.fs.grep", pattern="ho'", path="src")["matches"] == text("src/app.py:2:    return 'ho'")
    assert act("host.fs.glob", pattern="*.py", path="src")["count"] == 2
    assert act("host.exec", argv=["git", "status", "--porcelain"], cwd="src")["exit_code"] == 0
    for path in ("setup.py", ".git/config", "../x"):
        found = act("host.fs.write_file", path=path, content="x")
        assert {name: found[name] for name in ("status", "error_code")} == denied("path_not_allowed")
    large = act("host.fs.write_file", path="src/big", content="x" * 500)
    assert large["status"] == "ok" and "blob" in act("host.fs.read_file", path="src/big")["content"]
    inline = act("host.fs.read_file", path="src/big", output_mode="require_inline")
    assert (inline["status"], inline["error_code"]) == ("error", "inline_required_too_large")
