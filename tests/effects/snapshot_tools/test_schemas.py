"""The shapes of answers: checked with jsonschema here, and with the models whenever a tool answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mulligan.effects.snapshot_tools.context import RequestInfo
from mulligan.effects.snapshot_tools.store import CODES, SnapshotToolError
from mulligan.effects.snapshot_tools.tools import BY_NAME, TOOLS, check_answer, run_tool
from mulligan.servers.mcp.table import answer_schema, table
from mulligan.values.ids import SessionId
from tests.effects.snapshot_tools.snapshot_workspace import SnapshotWorkspace

HYBRID = [
    "snapshot.list",
    "snapshot.file",
    "snapshot.grep",
    "snapshot.diff",
    "snapshot.export",
    "workspace.apply_patch",
]
FROZEN = ["snapshot.create", "snapshot.info", "snapshot.changes"]


OUTPUTS = {tool.name: answer_schema(tool) for tool in TOOLS}


def branches(name: str) -> list[dict[str, Any]]:
    success, error = OUTPUTS[name]["oneOf"]
    assert error["required"] == ["error"]
    return list(success.get("oneOf", [success]))


@pytest.mark.req(
    "S2.schema.hybrid_one_of", "S2.schema.immutable_hint", "S2.schema.worktree_hint", "S2.schema.hint_const"
)
@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_tool_has_exactly_an_immutable_and_a_worktree_shape(name: str) -> None:
    frozen, live = branches(name)
    assert frozen["properties"]["cache_hint"] == {"const": "immutable"}
    assert live["properties"]["cache_hint"] == {"const": "until_dirty"}
    assert {"cache_hint", "lease_id", "fingerprint"} <= set(live["required"])


@pytest.mark.req("S2.schema.snapshot_only", "S2.schema.immutable_hint")
@pytest.mark.parametrize("name", FROZEN)
def test_a_snapshot_tool_has_one_immutable_shape(name: str) -> None:
    (only,) = branches(name)
    assert only["properties"]["cache_hint"] == {"const": "immutable"}


@pytest.mark.req("S2.error.envelope", "S2.error.internal")
def test_the_error_codes_are_those_of_the_document_and_conflict() -> None:
    assert set(CODES) == {
        *("NOT_FOUND", "INVALID_ARGUMENT", "REPO_CHANGED", "PERMISSION_DENIED"),
        *("TOO_LARGE", "INTERNAL", "STALE_LEASE", "CONFLICT"),
    }


def test_all_schemas_are_valid_json_schemas() -> None:
    listed = table()["substrate"]
    assert [one["title"] for one in listed] == [tool.name for tool in TOOLS]
    for one in listed:
        jsonschema.Draft202012Validator.check_schema(one["inputSchema"])
        jsonschema.Draft202012Validator.check_schema(one["outputSchema"])


@pytest.mark.parametrize(
    "wrong", [{"path": None}, {"session_id": "other"}, {"deep": 1}, {"depth": True}, {"limit": "1"}]
)
def test_a_parameter_that_the_schema_does_not_allow_is_refused(repo: SnapshotWorkspace, wrong: dict[str, Any]) -> None:
    assert repo.code("snapshot.list", **wrong) == "INVALID_ARGUMENT"


@pytest.mark.req("S2.encoding.utf8_json", "S2.order.path_maps")
def test_answers_fit_their_schemas_by_jsonschema_and_by_the_models(repo: SnapshotWorkspace) -> None:
    taken = repo.snapshot(".")
    patch = "--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    asked: list[tuple[str, dict[str, Any]]] = [
        ("snapshot.create", {"paths": ["."]}),
        ("snapshot.create", {}),
        ("snapshot.list", {}),
        ("snapshot.list", {"mode": "snapshot", "snapshot_id": taken}),
        ("snapshot.file", {"path": "README.md"}),
        ("snapshot.file", {"path": "README.md", "mode": "snapshot", "snapshot_id": taken}),
        ("snapshot.grep", {"pattern": "o"}),
        ("snapshot.diff", {}),
        ("snapshot.changes", {"snapshot_id": taken}),
        ("snapshot.info", {"snapshot_id": taken}),
        ("snapshot.export", {"paths": ["."]}),
        ("snapshot.export", {"mode": "snapshot", "snapshot_id": taken}),
        ("workspace.apply_patch", {"patch": patch, "mode": "snapshot", "snapshot_id": taken}),
        ("workspace.apply_patch", {"patch": patch}),
        ("workspace.write_file", {"path": "w", "content": "x"}),
        ("workspace.delete", {"path": "w"}),
        ("workspace.delete", {"path": "w"}),
    ]
    for name, args in asked:
        body = repo.ask(name, **args)
        jsonschema.validate(body, OUTPUTS[name], cls=jsonschema.Draft202012Validator)
        if "error" in body:
            continue
        check_answer(BY_NAME[name], body)
        for key in body:
            broken = {**body, key: ["wrong"]}
            assert fits_models(broken, name) == jsonschema.Draft202012Validator(OUTPUTS[name]).is_valid(broken)


def fits_models(body: dict[str, Any], name: str) -> bool:
    try:
        check_answer(BY_NAME[name], body)
    except SnapshotToolError as error:
        assert error.code == "INTERNAL"
        return False
    return True


@pytest.mark.req("S2.schema.hint_const")
def test_an_answer_that_does_not_fit_its_schema_is_an_internal_error(repo: SnapshotWorkspace) -> None:
    honest = BY_NAME["snapshot.list"]
    lying = replace(honest, act=lambda ask, args: {**honest.act(ask, args), "cache_hint": "forever"})
    body = run_tool(repo.context, lying, {}, RequestInfo(SessionId("tests"))).body
    assert body["error"]["code"] == "INTERNAL"
