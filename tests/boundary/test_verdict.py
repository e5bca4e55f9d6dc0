"""Capability and policy: how they are read, what they admit, and that two of them admit no more than each one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mulligan.boundary.capability import FOLLOW, FS_OPS, PATCH_FORMATS, UNLIMITED, Capability, clamped, parse_capability
from mulligan.boundary.policy import NO_POLICY, Policy, parse_policy
from mulligan.boundary.verdict import Boundary
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.paths import RepoPath, parse_repo_path

COUNTS = [field.name for field in fields(Capability) if field.name.startswith("max_")]
NAMES = st.sampled_from(["a", "b", "ab", "A", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
RULES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"verdict": st.sampled_from(["allow", "deny"])},
    optional={
        "ops": st.lists(st.sampled_from(FS_OPS), max_size=3),
        "paths": st.lists(PATHS | st.sampled_from(["**", "*", "a/*", "**/b", "/a"]), max_size=2),
        "output": st.just("blob"),
    },
)
CAPABILITIES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "allowed_fs_ops": st.lists(st.sampled_from(FS_OPS), max_size=4),
        "fs_roots": st.lists(
            PATHS | st.sampled_from([".", "/repo", "/repo/a", "/", "/etc", "../x", "a/../b"]), max_size=3
        ),
        "allowed_patch_formats": st.lists(st.sampled_from(PATCH_FORMATS), max_size=2),
        "follow_symlinks": st.sampled_from(FOLLOW),
        **{name: st.integers(0, 9) for name in COUNTS},
    },
)


def code_of(body: object, parse: Any = parse_capability) -> str:
    with pytest.raises(MulliganError) as caught:
        parse(body)
    return caught.value.code


@given(CAPABILITIES, st.lists(RULES, max_size=3), st.sampled_from(FS_OPS), PATHS)
def test_an_operation_admitted_everywhere_is_admitted_on_every_path(
    capability: dict[str, Any], rules: list[dict[str, Any]], op: Any, path: str
) -> None:
    boundary = Boundary("/repo", parse_capability(capability), parse_policy(rules))
    if boundary.allows_everywhere(op):
        boundary.check_op(op)
        boundary.check_path(op, RepoPath(path))


@pytest.mark.parametrize(
    ("capability", "rules", "everywhere"),
    [
        ({}, [], True),
        ({"allowed_fs_ops": ["read"], "fs_roots": ["."]}, [{"verdict": "allow"}], True),
        ({"fs_roots": ["/repo", "a"]}, [{"ops": ["write"], "paths": ["a"], "verdict": "deny"}], True),
        ({"allowed_fs_ops": ["write"]}, [], False),
        ({"fs_roots": ["a"]}, [], False),
        ({}, [{"paths": ["a"], "verdict": "deny"}], False),
    ],
)
def test_which_boundaries_admit_an_operation_everywhere(
    capability: dict[str, Any], rules: list[dict[str, Any]], everywhere: bool
) -> None:
    boundary = Boundary("/repo", parse_capability(capability), parse_policy(rules))
    assert boundary.allows_everywhere("read") is everywhere
    assert Boundary("/repo").narrowed(boundary.capability, boundary.policy).allows_everywhere("read") is everywhere


def verdict(boundary: Boundary, op: Any, path: str) -> bool:
    return boundary.allows(op, RepoPath(path))


class TestCapability:
    @pytest.mark.req("D8.capability_forms", "S1.cap.follow_symlinks")
    def test_a_capability_has_fourteen_fields_without_limits_by_default(self) -> None:
        assert len(fields(Capability)) == 14
        assert parse_capability({}) == UNLIMITED
        assert UNLIMITED.to_json() == {"follow_symlinks": "within_root_only"}

    @given(CAPABILITIES)
    def test_a_boundary_is_parsed_as_written(self, body: dict[str, Any]) -> None:
        parsed = parse_capability(body)
        assert parse_capability(parsed.to_json()) == parsed
        assert parsed.to_json() == {"follow_symlinks": "within_root_only", **body}

    @pytest.mark.req("A5.every_limit_enforced")
    @pytest.mark.parametrize(
        "body",
        [
            [],
            "read",
            None,
            {"max_read_byte": 1},
            {"allowed_fs_ops": "read"},
            {"allowed_fs_ops": ["reed"]},
            {"allowed_fs_ops": ["READ"]},
            {"allowed_fs_ops": [1]},
            {"fs_roots": "src"},
            {"fs_roots": {"src": 1}},
            {"allowed_patch_formats": ["ed"]},
            {"follow_symlinks": "bogus"},
            {"follow_symlinks": True},
            *({name: value} for name in COUNTS for value in (-1, 1.5, "1", True, 2**63)),
        ],
    )
    def test_an_invalid_capability_is_refused(self, body: object) -> None:
        assert code_of(body) == "invalid_params"

    def test_a_request_is_cut_to_the_ceiling(self) -> None:
        assert [clamped(asked, cap) for asked, cap in ((None, None), (3, None), (None, 2), (3, 2), (1, 2), (1, 0))] == [
            None, 3, 2, 2, 1, 0,
        ]  # fmt: skip


class TestRoots:
    @pytest.mark.req("D8.sibling_prefix", "D8.contained_by_component", "A2.root_by_component")
    @pytest.mark.parametrize(
        ("root", "inside", "outside"),
        [
            ("src", ["src", "src/a"], ["srcs", "src-evil/a", ".", "a/src"]),
            ("./src/", ["src/a"], ["b"]),
            ("/repo/src", ["src", "src/a"], ["src-evil", "."]),
            ("/repo", [".", "a"], []),
            ("/repo/", [".", "a"], []),
            ("/", [".", "a"], []),
            (".", [".", "a"], []),
            ("/repo-evil", [], [".", "a"]),
            ("/repo/../etc", [], [".", "a", "etc"]),
            ("..", [], [".", "a"]),
            ("", [], [".", "a"]),
        ],
    )
    def test_roots_match_whole_names(self, root: str, inside: list[str], outside: list[str]) -> None:
        boundary = Boundary("/repo", Capability(fs_roots=(root,)))
        assert [verdict(boundary, "read", path) for path in inside] == [True] * len(inside)
        assert [verdict(boundary, "read", path) for path in outside] == [False] * len(outside)

    def test_roots_ignore_case_on_case_insensitive_file_systems(self) -> None:
        boundary = Boundary("/Repo", Capability(fs_roots=("Src",)), folds_case=True)
        assert verdict(boundary, "read", "sRC/x") and not verdict(boundary, "read", "lib")
        policy = parse_policy([{"paths": ["Secret/**"], "verdict": "deny"}, {"paths": ["/repo/É"], "verdict": "deny"}])
        boundary = Boundary("/Repo", UNLIMITED, policy, folds_case=True)
        for path in ("SECRET/x", "secret/X", "e\u0301", "É/x"):
            assert not verdict(boundary, "read", path)
        assert verdict(Boundary("/Repo", UNLIMITED, policy), "read", "SECRET/x")


class TestPolicy:
    @pytest.mark.req("D8.policy_file")
    @given(st.lists(RULES, max_size=4))
    def test_a_boundary_is_parsed_as_written(self, body: list[dict[str, Any]]) -> None:
        assert parse_policy(body).to_json() == body

    @pytest.mark.parametrize(
        "body",
        [
            {},
            "deny",
            None,
            [3],
            [{}],
            [{"verdict": "maybe"}],
            [{"verdict": "deny", "path": ["a"]}],
            [{"verdict": "deny", "ops": ["frob"]}],
            [{"verdict": "deny", "ops": "read"}],
            [{"verdict": "deny", "paths": "a"}],
            [{"verdict": "deny", "paths": [1]}],
            [{"verdict": "deny", "paths": [""]}],
            [{"verdict": "deny", "paths": ["["]}],
            [{"verdict": "deny", "paths": ["../x"]}],
            [{"verdict": "deny", "paths": ["a\0b"]}],
            [{"verdict": "allow", "output": "inline"}],
        ],
    )
    def test_an_invalid_rule_is_refused(self, body: object) -> None:
        assert code_of(body, parse_policy) == "invalid_params"

    @pytest.mark.req("D8.policy_last_wins")
    @given(st.lists(RULES, max_size=5), st.sampled_from(FS_OPS), PATHS)
    def test_the_last_matching_rule_decides(self, body: list[dict[str, Any]], op: Any, path: str) -> None:
        alone = [Boundary("/repo", UNLIMITED, parse_policy([rule])) for rule in body]
        speaking = [rule for rule, one in zip(body, alone, strict=True) if one.policy.decide(op, path, f"/repo/{path}")]
        expected = not speaking or speaking[-1]["verdict"] == "allow"
        assert verdict(Boundary("/repo", UNLIMITED, parse_policy(body)), op, path) is expected

    @pytest.mark.parametrize(
        ("pattern", "yes", "no"),
        [
            ("src", ["src", "src/a/b"], ["srcs", "a/src"]),
            ("src/*", ["src/a", "src/a/b"], ["src", "a"]),
            ("src/**", ["src/a", "src/a/b"], ["src"]),
            ("**/*.key", ["a.key", "d/e/a.key", "a.key/x"], ["a.keys"]),
            ("*", [".", "a", "a/b"], []),
            ("**", [".", "a", "a/b"], []),
            (".", [".", "a", "a/b"], []),
            ("/src", ["src", "src/a"], ["a/src"]),
            ("/repo/src", ["src", "src/a"], ["a/repo/src", "repo"]),
            ("{a,b}/x", ["a/x", "b/x"], ["c/x"]),
        ],
    )
    def test_path_patterns_of_a_rule(self, pattern: str, yes: list[str], no: list[str]) -> None:
        boundary = Boundary("/repo", UNLIMITED, parse_policy([{"paths": [pattern], "verdict": "deny"}]))
        assert [path for path in yes if verdict(boundary, "read", path)] == []
        assert [path for path in no if not verdict(boundary, "read", path)] == []


class TestIntersection:
    @given(CAPABILITIES, CAPABILITIES, st.lists(RULES, max_size=2), st.lists(RULES, max_size=2), PATHS)
    def test_two_boundaries_together_admit_only_what_both_admit(
        self, one: dict[str, Any], two: dict[str, Any], rules: list[Any], more: list[Any], path: str
    ) -> None:
        outer = Boundary("/repo", parse_capability(one), parse_policy(rules))
        inner = Boundary("/repo", parse_capability(two), parse_policy(more))
        both = outer.narrowed(inner.capability, inner.policy)
        for op in FS_OPS:
            assert verdict(both, op, path) is (verdict(outer, op, path) and verdict(inner, op, path))
            assert allows(both, op) is (allows(outer, op) and allows(inner, op))
        for name in COUNTS:
            limits = [body[name] for body in (one, two) if name in body]
            assert getattr(both.capability, name) == min(limits, default=None)
        follow = [FOLLOW.index(edge.capability.follow_symlinks) for edge in (outer, inner)]
        assert both.capability.follow_symlinks == FOLLOW[min(follow)]

    def test_an_empty_boundary_narrows_nothing(self) -> None:
        boundary = Boundary("/repo").narrowed(UNLIMITED, NO_POLICY)
        assert boundary.capability == UNLIMITED and not boundary.has_policy

    @pytest.mark.req("D8.policy_blob_output")
    def test_a_policy_with_output_blob_withholds_content(self) -> None:
        rule = parse_policy([{"paths": ["k"], "verdict": "allow", "output": "blob"}])
        for boundary in (Boundary("/repo", UNLIMITED, rule), Boundary("/repo").narrowed(UNLIMITED, rule)):
            assert boundary.keeps_out_of_answers("read", RepoPath("k/x"))
            assert not boundary.keeps_out_of_answers("read", RepoPath("a"))


def allows(boundary: Boundary, op: Any) -> bool:
    try:
        boundary.check_op(op)
    except Refused as refused:
        assert (refused.status, refused.code) == ("forbidden", "fs_op_not_allowed")
        return False
    return True


@pytest.mark.req("D6.tools_never_write_git")
@pytest.mark.parametrize(
    "name", [".git", ".GIT", "a/.git/b", ".git.", ".git ...", "git~1", ".g\u200dit", ".git:x", "."]
)
def test_file_tools_never_write_git_directories(name: str) -> None:
    with pytest.raises(Refused) as caught:
        Boundary("/repo").check_write("write", parse_repo_path(name))
    assert (caught.value.status, caught.value.code) == ("forbidden", "path_not_allowed")


@pytest.mark.parametrize("name", [".gitignore", ".github/x", "git", "a.git", ".git-x", "git~10", ".gitmodules"])
def test_names_similar_to_git_are_ordinary(name: str) -> None:
    Boundary("/repo").check_write("write", parse_repo_path(name))


def test_an_empty_policy_has_no_verdict() -> None:
    assert Policy().decide("read", "a") is None
