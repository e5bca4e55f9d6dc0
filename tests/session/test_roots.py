"""Where a session works: its anchor, its policy, and the roots mounted beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan import builtins
from mulligan.api import Mulligan
from mulligan.effects.session import DurableSession
from mulligan.session.roots import ROOTS_MAX
from mulligan.values.errors import MulliganError
from tests.session.manual_clock import HandClock

Json = dict[str, Any]


class Land:
    """A workspace, some folders beside it, and a clock that a test sets."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.clock = HandClock()
        for name in ("work", "lib", "other"):
            (base / name).mkdir()
        self.work, self.lib, self.other = (str(base / name) for name in ("work", "lib", "other"))
        self.opened: Mulligan = mulligan.open(self.work, store=str(base / "home"), clock=self.clock)
        self.session: DurableSession = self.opened.session("s")

    def events(self, kind: str) -> list[Json]:
        return [one["metadata"] for one in self.session.events() if one["kind"] == kind]

    def refused(self, act: Callable[[], object]) -> str:
        before = self.opened.sessions.snapshot("s")
        with pytest.raises(MulliganError) as caught:
            act()
        assert self.opened.sessions.snapshot("s") == before
        return caught.value.code


@pytest.fixture
def land(tmp_path: Path) -> Iterator[Land]:
    found = Land(tmp_path)
    yield found
    found.opened.close()


class TestAnchor:
    @pytest.mark.req("S3.anchor.read_and_replace")
    def test_it_is_where_the_session_was_opened_until_replaced(self, land: Land) -> None:
        came = land.clock.text
        assert builtins.agent_session_workspace_anchor("s") == {
            "primary": land.work,
            "additional_roots": [],
            "anchored_at": came,
        }
        land.clock.pass_by(minutes=1)
        wanted = {"primary": land.other, "additional_roots": [{"path": land.lib, "mount_mode": "extend"}]}
        assert builtins.agent_session_set_workspace_anchor("s", wanted) is True
        now = land.clock.text
        mounted = {"path": land.lib, "mount_mode": "extend", "mounted_at": now}
        expected = {"primary": land.other, "additional_roots": [mounted], "anchored_at": now}
        assert builtins.agent_session_workspace_anchor("s") == expected
        (told,) = land.events("AnchorChanged")
        assert (told["previous"]["primary"], told["anchor"]) == (land.work, expected)
        assert builtins.agent_session_set_workspace_anchor("s", None) is True
        assert builtins.agent_session_workspace_anchor("s")["primary"] == land.work

    def test_a_path_alone_will_do_and_is_made_real(self, land: Land) -> None:
        os.symlink(land.lib, land.base / "link")
        assert land.session.set_workspace_anchor(str(land.base / "link"))
        assert land.session.workspace_anchor()["primary"] == land.lib

    @pytest.mark.parametrize(
        ("anchor", "code"),
        [
            ({}, "invalid_params"),
            ({"primary": 7}, "invalid_params"),
            ({"primary": "/nowhere/at/all"}, "invalid_path"),
            ({"primary": ""}, "invalid_path"),
            ({"primary": "a\0b"}, "invalid_path"),
            ({"primary": "WORK", "colour": 1}, "unknown_option"),
            ({"primary": "WORK", "additional_roots": [{"mount_mode": "extend"}]}, "invalid_params"),
            ({"primary": "WORK", "additional_roots": [{"path": "LIB", "mount_mode": "rw"}]}, "invalid_params"),
            ({"primary": "WORK", "additional_roots": ["/nowhere"]}, "invalid_path"),
            ({"primary": "HOME"}, "store_inside_workspace"),
            ({"primary": "BASE"}, "store_inside_workspace"),
            ([1], "invalid_params"),
        ],
    )
    def test_an_invalid_value_is_refused(self, land: Land, anchor: Any, code: str) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: real(item) for name, item in value.items()}
            if isinstance(value, list):
                return [real(item) for item in value]
            places = {"WORK": land.work, "LIB": land.lib, "HOME": str(land.base / "home"), "BASE": str(land.base)}
            return places.get(value, value) if isinstance(value, str) else value

        assert land.refused(lambda: land.session.set_workspace_anchor(real(anchor))) == code

    @pytest.mark.req("S3.open.opts")
    def test_it_can_be_given_when_opening(self, land: Land) -> None:
        opts = {
            "workspace_anchor": {"primary": land.other, "additional_roots": [land.lib]},
            "workspace_policy": {"default_mount_mode": "extend"},
        }
        name = builtins.agent_session_open("t", opts)
        roots = builtins.agent_session_list_roots(name)
        assert (roots["primary"], roots["additional"][0]["mount_mode"]) == (land.other, "extend")
        view = builtins.agent_session_snapshot(name)
        assert view is not None
        assert view["workspace_anchor"] == builtins.agent_session_workspace_anchor(name)
        assert view["workspace_policy"] == {"default_mount_mode": "extend"}
        with pytest.raises(MulliganError):
            builtins.agent_session_open("u", {"workspace": 1})


class TestPolicy:
    @pytest.mark.req("S3.policy.read_and_update", "S3.policy.default_mount_mode", "D11.mount_modes")
    def test_the_default_mount_mode_is_read_only_until_changed(self, land: Land) -> None:
        assert builtins.agent_session_workspace_policy("s") == {"default_mount_mode": "read_only"}
        land.session.add_root(land.lib)
        assert builtins.agent_session_set_workspace_policy("s", {"default_mount_mode": "sandboxed"}) is True
        land.session.add_root(land.other)
        modes = [one["mount_mode"] for one in land.session.list_roots()["additional"]]
        assert modes == ["read_only", "sandboxed"]
        assert land.events("WorkspacePolicyChanged") == [{"policy": {"default_mount_mode": "sandboxed"}}]
        assert builtins.agent_session_set_workspace_policy("s", {}) is True
        assert builtins.agent_session_workspace_policy("s") == {"default_mount_mode": "sandboxed"}

    @pytest.mark.parametrize(
        ("policy", "code"),
        [
            ({"default_mount_mode": "rw"}, "invalid_params"),
            ({"default_mount_mode": 1}, "invalid_params"),
            ({"mount_mode": "extend"}, "unknown_option"),
            ("extend", "invalid_params"),
        ],
    )
    def test_an_invalid_value_is_refused(self, land: Land, policy: Any, code: str) -> None:
        assert land.refused(lambda: land.session.set_workspace_policy(policy)) == code


class TestRoots:
    @pytest.mark.req("S3.roots.add", "S3.roots.add_returns", "S3.roots.list", "S3.roots.remove", "D11.mount_modes")
    def test_mounted_listed_changed_and_unmounted(self, land: Land) -> None:
        first = land.clock.text
        assert builtins.agent_session_add_root("s", land.lib) == {"ok": True, "mounted_at": first}
        land.clock.pass_by(seconds=1)
        done = builtins.agent_session_add_root("s", land.other, {"mount_mode": "extend"})
        assert done == {"ok": True, "mounted_at": land.clock.text}
        lib = {"path": land.lib, "mount_mode": "read_only", "mounted_at": first}
        other = {"path": land.other, "mount_mode": "extend", "mounted_at": land.clock.text}
        assert builtins.agent_session_list_roots("s") == {"primary": land.work, "additional": [lib, other]}
        assert land.events("RootMounted") == [lib, other]
        land.clock.pass_by(seconds=1)
        assert land.session.add_root(land.lib, mount_mode="extend")["ok"]
        again = {"path": land.lib, "mount_mode": "extend", "mounted_at": land.clock.text}
        assert land.session.list_roots()["additional"] == [other, again]
        assert builtins.agent_session_remove_root("s", land.lib) == {"ok": True}
        assert builtins.agent_session_remove_root("s", land.lib) == {"ok": True}
        assert land.session.list_roots()["additional"] == [other]
        assert land.events("RootUnmounted") == [again]

    @pytest.mark.req("S3.roots.add_returns")
    def test_a_root_that_cannot_be_mounted_is_an_error_in_the_answer(self, land: Land) -> None:
        (land.base / "file").write_text("x")
        places = ["/nowhere", str(land.base / "file"), "", land.work, str(land.base / "home"), str(land.base), 7]
        for place in places:
            answer = builtins.agent_session_add_root("s", place)  # type: ignore[arg-type]  # that is the point
            assert set(answer) == {"ok", "error"} and answer["ok"] is False and answer["error"].strip()
        for place in ("\ud800", "a\0b", [], " "):
            for act in (builtins.agent_session_add_root, builtins.agent_session_remove_root):
                assert act("s", place)["ok"] is False  # type: ignore[arg-type]  # that is the point
        assert land.session.list_roots()["additional"] == []
        for act in (builtins.agent_session_add_root, builtins.agent_session_remove_root):
            answer = act("ghost", land.lib)
            assert answer["ok"] is False and "ghost" in answer["error"]

    @pytest.mark.req("S3.session.unknown_input_raises")
    def test_invalid_arguments_raise(self, land: Land) -> None:
        assert land.refused(lambda: land.session.add_root(land.lib, {"mode": "extend"})) == "unknown_option"
        assert land.refused(lambda: land.session.add_root(land.lib, mount_mode="rw")) == "invalid_params"
        for verb in ("workspace_anchor", "workspace_policy", "list_roots"):
            with pytest.raises(MulliganError) as caught:
                getattr(builtins, f"agent_session_{verb}")("ghost")
            assert caught.value.code == "session_not_found"

    def test_a_root_is_known_by_its_real_path(self, land: Land) -> None:
        os.symlink(land.lib, land.base / "link")
        assert land.session.add_root(str(land.base / "link"))["ok"]
        assert land.session.list_roots()["additional"][0]["path"] == land.lib
        assert land.session.remove_root(str(land.base / "link")) == {"ok": True}
        assert land.session.list_roots()["additional"] == []

    def test_one_that_is_gone_can_still_be_unmounted(self, land: Land) -> None:
        land.session.add_root(land.lib)
        os.rmdir(land.lib)
        assert land.session.remove_root(land.lib) == {"ok": True}
        assert land.session.list_roots()["additional"] == []

    def test_there_is_a_limit(self, land: Land) -> None:
        many = []
        for number in range(ROOTS_MAX + 1):
            (land.base / f"r{number}").mkdir()
            many.append(str(land.base / f"r{number}"))
        land.session.set_workspace_anchor({"primary": land.work, "additional_roots": many[:-1]})
        assert land.session.add_root(many[-1])["ok"] is False
        assert land.session.add_root(many[0])["ok"] is True
        assert (
            land.refused(lambda: land.session.set_workspace_anchor({"primary": land.work, "additional_roots": many}))
            == "invalid_params"
        )

    @pytest.mark.req("D11.fork_copies")
    def test_a_fork_has_the_same_roots_and_then_its_own(self, land: Land) -> None:
        land.session.set_workspace_policy({"default_mount_mode": "extend"})
        land.session.add_root(land.lib)
        child = land.session.fork()
        assert child.list_roots() == land.session.list_roots()
        assert child.workspace_policy() == {"default_mount_mode": "extend"}
        child.remove_root(land.lib)
        assert len(land.session.list_roots()["additional"]) == 1

    def test_they_are_there_after_reopening(self, land: Land) -> None:
        land.session.add_root(land.lib, mount_mode="sandboxed")
        before = land.session.list_roots()
        with mulligan.open(land.work, store=str(land.base / "home")) as again:
            assert again.session("s").list_roots() == before
