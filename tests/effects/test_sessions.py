"""host.session.open and host.session.signal: what they attach, how it ends, and whose session an effect acts in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mulligan import open as opened
from mulligan.testing import Link, SteppingClock, contents_of
from mulligan.values.errors import Family, MulliganError
from mulligan.values.ids import CallId
from tests.effects.effect_session import EffectSession, Fields, denied, failed, text
from tests.temp_workspace import open_temp_workspace

SECOND_NS = 1_000_000_000


class Hosted:
    """A effects whose clock moves when it is told to, and one session opened on it."""

    def __init__(self, base: Path) -> None:
        self.clock = SteppingClock(step=timedelta(0))
        workspace = open_temp_workspace(base, clock=self.clock)
        self.effects = EffectSession(workspace, workspace.session())

    def open(self, **params: Any) -> str:
        body = self.effects.perform("host.session.open", **params)
        assert body["status"] == "ready"
        return str(body["session_id"])

    def now_ns(self) -> int:
        return int(self.clock.now().timestamp() * 1_000_000) * 1_000

    def exists(self, session: str) -> Fields:
        body = self.effects.perform("host.fs.exists", path=".", session_id=session)
        body.pop("error_message", None)
        return body


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    made = Hosted(tmp_path)
    yield made
    made.effects.workspace.close()


class TestOpen:
    def test_open_creates_a_session(self, hosted: Hosted) -> None:
        found = hosted.effects.perform("host.session.open")
        assert found == {"status": "ready", "session_id": found["session_id"], "started_at_ns": hosted.now_ns()}
        assert hosted.exists(found["session_id"]) == {"status": "ok", "exists": True}

    def test_open_takes_a_name_and_a_time_to_live(self, hosted: Hosted) -> None:
        found = hosted.effects.perform("host.session.open", session_id="mine", session_ttl_ns=SECOND_NS)
        times = {"started_at_ns": hosted.now_ns(), "expires_at_ns": hosted.now_ns() + SECOND_NS}
        assert found == {"status": "ready", "session_id": "mine", **times}

    @pytest.mark.parametrize(
        ("params", "code"),
        [
            ({"target": {"sandbox": {"image": "x"}}}, "unsupported_target"),
            ({"target": {}}, "unsupported_target"),
            ({"target": {"moon": {}}}, "invalid_params"),
            ({"target": {"local": {"mounts": [{"host_path": "/a", "guest_path": "/b"}]}}}, "unsupported_target"),
            ({"target": {"local": {"workdir": "no"}}}, "invalid_workdir"),
            ({"target": {"local": {"workdir": ".."}}}, "invalid_workdir"),
            ({"target": {"local": {"workdir": "/etc"}}}, "invalid_workdir"),
            ({"target": {"local": {"workdir": "f"}}}, "invalid_workdir"),
            ({"target": {"local": {"workdir": "out"}}}, "invalid_workdir"),
            ({"target": {"local": {"workdir": "a\0b"}}}, "invalid_workdir"),
            ({"target": {"local": {"workdir": ""}}}, "invalid_workdir"),
            ({"session_ttl_ns": 0}, "invalid_params"),
            ({"session_ttl_ns": 2**63}, "invalid_params"),
            ({"session_id": ""}, "invalid_params"),
            ({"session_id": "a\nb"}, "invalid_params"),
            ({"capability": {"max_read_byte": 3}}, "invalid_params"),
            ({"capability": {"follow_symlinks": "bogus"}}, "invalid_params"),
            ({"policy": [{"verdict": "maybe"}]}, "invalid_params"),
            ({"policy": "deny"}, "invalid_params"),
        ],
    )
    def test_invalid_targets_are_refused(self, hosted: Hosted, params: Fields, code: str) -> None:
        hosted.effects.plant({"f": "", "out": Link("/etc")})
        assert hosted.effects.refused("host.session.open", **params) == failed(code)

    @pytest.mark.parametrize("workdir", ["d", "./d/", "link"])
    def test_the_working_directory_is_where_paths_begin(self, hosted: Hosted, workdir: str) -> None:
        hosted.effects.plant({"d/a": "inner", "a": "outer", "link": Link("d")})
        for given in (workdir, str(hosted.effects.root / workdir)):
            session = hosted.open(target={"local": {"workdir": given}})
            read = hosted.effects.perform("host.fs.read_file", path="a", session_id=session)
            assert read["content"] == text("inner")
            found = hosted.effects.perform("host.fs.list_dir", session_id=session)
            assert found["entries"] == text("a")
            wrote = hosted.effects.perform("host.fs.edit_file", path="a", old_string="inner", new_string="inner",
                                         session_id=session)  # fmt: skip
            assert wrote["summary_text"] == "Updated a (1 replacement)"
            read = hosted.effects.perform("host.fs.read_file", path="../a", session_id=session)
            assert read["content"] == text("outer")
            refusal = hosted.effects.refused("host.fs.read_file", path="../../a", session_id=session)
            assert refusal == denied("path_not_allowed")

    def test_an_open_session_keeps_its_boundary(self, hosted: Hosted) -> None:
        hosted.open(session_id="mine", capability={"allowed_fs_ops": ["read"]})
        assert hosted.effects.refused("host.session.open", session_id="mine") == failed("session_exists")
        assert hosted.exists("mine") == denied("fs_op_not_allowed")

    def test_an_opened_session_has_at_most_the_rights_of_its_opener(self, hosted: Hosted) -> None:
        hosted.effects.plant({"src/a": "x" * 100, "b": "x"})
        narrow = hosted.effects.within(
            {"allowed_fs_ops": ["read", "list"], "fs_roots": ["src"], "max_read_bytes": 10},
            [{"paths": ["src/secret"], "verdict": "deny"}],
        )
        wide = {"capability": {"max_read_bytes": 50, "fs_roots": ["."]}, "policy": [{"verdict": "allow"}]}
        session = narrow.perform("host.session.open", **wide)["session_id"]
        read = narrow.perform("host.fs.read_file", path="src/a", session_id=session)
        assert read["content"] == text("x" * 10)
        for effect, params, code in (
            ("host.fs.read_file", {"path": "b"}, "path_not_allowed"),
            ("host.fs.read_file", {"path": "src/secret"}, "path_not_allowed"),
            ("host.fs.write_file", {"path": "src/a", "content": ""}, "fs_op_not_allowed"),
        ):
            assert narrow.refused(effect, session_id=session, **params) == denied(code)


@pytest.mark.req("D9.session_codes", "S1.adapter.session_resolved", "S1.params.session_id", "S1.goal.session_scoped")
class TestEnding:
    def test_an_unknown_session_is_refused(self, hosted: Hosted) -> None:
        assert hosted.exists("nobody") == failed("session_not_found")
        assert hosted.exists("nobody") == failed("session_not_found")
        found = hosted.effects.refused("host.session.signal", session_id="nobody", signal="term")
        assert found == failed("session_not_found", "not_found")

    def test_a_signal_closes_the_session(self, hosted: Hosted) -> None:
        session = hosted.open()
        found = hosted.effects.perform("host.session.signal", session_id=session, signal="term")
        assert found == {"status": "signaled", "ended_at_ns": hosted.now_ns()}
        assert hosted.exists(session) == failed("session_closed")
        again = hosted.effects.refused("host.session.signal", session_id=session, signal="kill")
        assert again == failed("session_closed", "already_exited", ended_at_ns=hosted.now_ns())

    def test_a_closed_session_can_be_opened_again(self, hosted: Hosted) -> None:
        hosted.open(session_id="mine")
        hosted.effects.perform("host.session.signal", session_id="mine")
        assert hosted.exists("mine") == failed("session_closed")
        hosted.open(session_id="mine")
        assert hosted.exists("mine") == {"status": "ok", "exists": True}

    def test_a_session_expires(self, hosted: Hosted) -> None:
        session = hosted.open(session_ttl_ns=SECOND_NS)
        hosted.clock.advance(timedelta(seconds=1))
        assert hosted.exists(session) == {"status": "ok", "exists": True}
        hosted.clock.advance(timedelta(milliseconds=1))
        assert hosted.exists(session) == failed("session_expired")
        assert hosted.exists(session) == failed("session_closed")

    def test_an_ended_session_changes_no_files(self, hosted: Hosted) -> None:
        hosted.effects.plant({"a": "x"})
        session = hosted.open()
        hosted.effects.perform("host.session.signal", session_id=session)
        for effect, params in EVERY_CHANGE.items():
            assert hosted.effects.refused(effect, session_id=session, **params) == failed("session_closed")
        assert hosted.effects.bytes_of("a") == b"x"

    @pytest.mark.parametrize("params", [{"signal": "sing"}, {}, {"session_id": 3}])
    def test_invalid_signals_are_refused(self, hosted: Hosted, params: Fields) -> None:
        hosted.open(session_id="mine")
        if "signal" in params:
            params = {"session_id": "mine", **params}
        assert hosted.effects.refused("host.session.signal", **params) == failed("invalid_params")


EVERY_CHANGE: dict[str, Fields] = {
    "host.fs.write_file": {"path": "a", "content": "y"},
    "host.fs.edit_file": {"path": "a", "old_string": "x", "new_string": "y"},
    "host.fs.apply_patch": {"patch": "*** Begin Patch\n*** Delete File: a\n*** End Patch"},
    "host.fs.delete": {"path": "a"},
    "host.fs.move": {"path": "a", "to": "b"},
    "host.fs.mkdir": {"path": "d"},
}


class TestUndoOperations:
    """The ways back of a session are within its boundary, attached or given by whoever opened the workspace."""

    @pytest.mark.parametrize("attached", [True, False])
    def test_every_undo_operation_writes_only_where_the_session_may(self, hosted: Hosted, attached: bool) -> None:
        hosted.effects.plant({"a": "x"})
        limits: Fields = {"allowed_fs_ops": ["read"], "fs_roots": []}
        with (free := hosted.effects.workspace.session("limited")).turn(), free.call("made") as call:
            call.write_file("a", "y")
        if attached:
            hosted.open(session_id="limited", capability=limits)
        session = free if attached else hosted.effects.within(limits).session
        ways: list[Callable[[], object]] = [
            session.undo,
            partial(session.undo, dry_run=True),
            partial(session.undo, paths=["a"]),
            partial(session.restore, "made"),
            session.rollback,
            partial(session.rewind, "made"),
        ]
        for way in ways:
            with pytest.raises(MulliganError) as caught:
                way()
            assert (caught.value.code, caught.value.family) == ("fs_op_not_allowed", Family.FORBIDDEN)
        assert hosted.effects.bytes_of("a") == b"y"
        assert session.rewind("made", files=False).ok
        if attached:
            hosted.effects.perform("host.session.signal", session_id="limited")
            with pytest.raises(MulliganError):
                session.undo("made")
        assert hosted.effects.session.undo(call.id).ok and hosted.effects.bytes_of("a") == b"x"

    def test_one_denied_path_refuses_the_whole_undo(self, hosted: Hosted, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        deny = [{"paths": ["secret", str(other / "deep")], "ops": ["write"], "verdict": "deny"}]
        free, bound = hosted.effects.workspace.session("limited"), hosted.effects.within(policy=deny).session
        with free.turn():
            assert free.add_root(str(other), mount_mode="extend")["ok"]
        for label, paths in {"both": ["a", "secret"], "other": [f"{other}/b"], "deep": [f"{other}/deep"]}.items():
            with free.call(label) as call:
                assert all(call.write_file(path, "1").ok for path in paths)
        for label in ("both", "deep"):
            with pytest.raises(MulliganError) as caught:
                bound.undo(label)
            assert caught.value.code == "path_not_allowed"
        assert bound.undo("both", paths=["a"]).ok and not (hosted.effects.root / "a").exists()
        assert bound.undo("other").ok and sorted(path.name for path in other.iterdir()) == ["deep"]
        assert hosted.effects.bytes_of("secret") == b"1"


class TestForks:
    def test_option_to_requires_files_copy(self, hosted: Hosted, tmp_path: Path) -> None:
        assert hosted.effects.perform("host.fs.write_file", path="a", content="1")["status"] == "ok"
        with pytest.raises(MulliganError) as caught:
            hosted.effects.session.fork(to=str(tmp_path / "copy"))
        assert (caught.value.code, caught.value.details["field"]) == ("invalid_params", "to")
        assert not (tmp_path / "copy").exists()

    def test_every_kind_of_child_has_its_parents_rights(self, hosted: Hosted) -> None:
        hosted.effects.plant({"src/a": "x", "secret": "x"})
        secret = str(hosted.effects.root / "secret")
        limits = {"allowed_fs_ops": ["read", "stat"], "fs_roots": [str(hosted.effects.root)]}
        deny = {"paths": [secret], "verdict": "deny"}
        hosted.open(session_id="s", capability=limits, policy=[deny], session_ttl_ns=SECOND_NS)
        parent = hosted.effects.workspace.session("s")
        children = [parent.fork(), parent.fork(files="copy"), parent.fork().fork()]
        children += [hosted.effects.workspace.session(one) for one in (parent.fork_at(0), parent.fork_talk())]
        wanted: dict[str, tuple[Fields, str | None]] = {
            "read_file": ({"path": "src/a"}, None),
            "stat": ({"path": "secret"}, "path_not_allowed"),
            "write_file": ({"path": "src/a", "content": ""}, "fs_op_not_allowed"),
        }
        for child in children:
            found = {tool: child.perform(tool, params)[0].error_code for tool, (params, _) in wanted.items()}
            assert found == {tool: code for tool, (_, code) in wanted.items()}
        hosted.clock.advance(timedelta(seconds=2))
        assert {child.perform("read_file", {"path": "src/a"})[0].error_code for child in children} == {
            "session_expired"
        }

    def test_a_copy_opened_by_its_path_has_the_same_boundary(self, hosted: Hosted, tmp_path: Path) -> None:
        hosted.effects.plant({"a": "x", "secret": "x"})
        root = hosted.effects.root
        limits, deny = {"fs_roots": [str(root)]}, {"paths": [f"{root}/secret"], "verdict": "deny"}
        hosted.open(session_id="s", capability=limits, policy=[deny])
        child = hosted.effects.workspace.session("s").fork(files="copy", dst="child")
        there = opened(child.root, store=str(hosted.effects.workspace.home))
        with there:
            read = [there.session("child").perform("read_file", {"path": path})[0].status for path in ("a", "secret")]
        assert read == ["ok", "forbidden"]

    @pytest.mark.parametrize("attached", [True, False])
    @pytest.mark.parametrize("wholly_named", [True, False])
    def test_a_merge_writes_only_where_the_session_may(
        self, hosted: Hosted, attached: bool, wholly_named: bool
    ) -> None:
        effects, prefix = hosted.effects, f"{hosted.effects.root}/" if wholly_named else ""
        effects.plant({"src/a": "x", "src/kept": "x", "secret": "x"})
        limits = {"fs_roots": [f"{prefix}src"]}
        deny = [{"paths": [f"{prefix}src/kept"], "ops": ["write"], "verdict": "deny"}]
        hosted.open(session_id="limited", **({"capability": limits, "policy": deny} if attached else {}))
        session = effects.workspace.session("limited") if attached else effects.within(limits, policy=deny).session
        child = session.fork(files="copy", dst="child")
        assert child.perform("write_file", {"path": "src/a", "content": "y"})[0].ok
        for path in ("src/kept", "secret"):
            Path(child.root, path).write_text("somebody's")
            for dry_run in (True, False):
                with pytest.raises(MulliganError) as caught:
                    child.merge(on_conflict="overwrite", dry_run=dry_run)
                assert (caught.value.code, caught.value.family) == ("path_not_allowed", Family.FORBIDDEN)
            assert contents_of(effects.root) == {"src/a": b"x", "src/kept": b"x", "secret": b"x"}
            Path(child.root, path).write_text("x")
        assert child.merge().ok and effects.bytes_of("src/a") == b"y"
        if attached:
            hosted.open(session_id="reader", capability={"allowed_fs_ops": ["read"]})
            reader = effects.workspace.session("reader").fork(files="copy")
            Path(reader.root, "src/a").write_text("z")
            with pytest.raises(MulliganError) as caught:
                reader.merge()
            assert caught.value.code == "fs_op_not_allowed" and effects.bytes_of("src/a") == b"y"

    def test_a_sandboxed_root_is_merged_only_where_the_session_may_write(self, hosted: Hosted, tmp_path: Path) -> None:
        box = tmp_path / "box"
        box.mkdir()
        deny = [{"paths": [f"{box}/secret"], "ops": ["write"], "verdict": "deny"}]
        free, bound = hosted.effects.workspace.session("limited"), hosted.effects.within(policy=deny).session
        with free.turn():
            assert free.add_root(str(box), mount_mode="sandboxed")["ok"]
        assert all(
            free.perform("write_file", {"path": f"{box}/{name}", "content": ""})[0].ok for name in ("a", "secret")
        )
        with pytest.raises(MulliganError) as caught:
            bound.merge_root(str(box))
        assert caught.value.code == "path_not_allowed" and list(box.iterdir()) == []
        assert free.merge_root(str(box)).ok and len(list(box.iterdir())) == 2


class TestSessionOfAnEffect:
    def test_an_effect_is_recorded_in_the_session_it_names(self, hosted: Hosted) -> None:
        session = hosted.open()
        _, call = hosted.effects.session.perform(
            "host.fs.write_file", {"path": "a", "content": "x", "session_id": session}
        )
        assert hosted.effects.workspace.open_root.ledger.call_row(CallId(call)).session == session

    @pytest.mark.req("D9.tool_params")
    def test_a_tool_cannot_choose_its_session(self, hosted: Hosted) -> None:
        session = hosted.open()
        found = hosted.effects.refused("write_file", path="a", content="x", session_id=session)
        assert found == failed("invalid_params")

    def test_a_call_belongs_to_one_session(self, hosted: Hosted) -> None:
        session = hosted.open()
        with hosted.effects.session.call() as call:
            receipt = call.perform("host.fs.write_file", path="a", content="x", session_id=session)
            assert (receipt.status, receipt.error_code) == ("error", "invalid_params")

    def test_an_unknown_effect_is_an_error(self, hosted: Hosted) -> None:
        with pytest.raises(MulliganError) as caught:
            hosted.effects.perform("host.fs.frobnicate")
        tools = caught.value.details["tools"]
        assert caught.value.code == "unknown_effect" and isinstance(tools, list) and "read_file" in tools
