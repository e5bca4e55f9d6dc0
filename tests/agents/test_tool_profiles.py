"""Tool profiles: what each provider is told, and that what it was told is what effects take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from mulligan.agents.coding_tools import PROFILES, ToolSpec, listed, tools
from mulligan.values.canonical import encode
from mulligan.values.errors import MulliganError
from tests.effects.effect_session import open_effect_session

SHARED = {"read_file", "write_file", "grep", "glob", "list_dir", "shell", "read_blob"}

GOOD: dict[str, list[dict[str, Any]]] = {
    "read_file": [{"path": "a"}, {"path": "a", "offset_lines": 0, "max_lines": 1, "encoding": "utf8"}],
    "write_file": [{"path": "n", "content": "x", "create_parents": True, "mode": "overwrite"}],
    "edit_file": [{"path": "a", "old_string": "x", "new_string": "y", "replace_all": True}],
    "apply_patch": [{"patch": "*** Begin Patch\n*** Add File: p\n+x\n*** End Patch", "patch_format": "v4a"}],
    "grep": [{"pattern": "x"}, {"pattern": "x", "path": ".", "glob_filter": "*", "case_insensitive": True}],
    "glob": [{"pattern": "*", "max_results": 3, "include_ignored": True}],
    "list_dir": [{}, {"path": ".", "max_results": 1}],
    "shell": [{"command": "true", "timeout_ms": 60_000}],
}
BAD: dict[str, list[dict[str, Any]]] = {
    "read_file": [{}, {"path": 1}, {"path": "a", "max_bytes": -1}, {"path": "a", "output_mode": "auto"}],
    "write_file": [{"path": "a"}, {"path": "a", "content": "x", "mode": "append"}],
    "edit_file": [{"path": "a", "old_string": "x"}],
    "apply_patch": [{}, {"patch": "x", "patch_format": "ed"}],
    "grep": [{"path": "a"}, {"pattern": "x", "session_id": "other"}],
    "glob": [{"pattern": "x", "max_results": "3"}],
    "list_dir": [{"paths": []}],
    "shell": [{"command": "true", "timeout_ms": 0}],
}


@pytest.mark.req("D9.profiles", "S1.profile.openai_apply_patch", "S1.profile.anthropic_gemini_edit")
@pytest.mark.parametrize(
    ("profile", "changing"), [("openai", "apply_patch"), ("anthropic", "edit_file"), ("gemini", "edit_file")]
)
def test_each_profile_has_its_own_edit_tool(profile: str, changing: str) -> None:
    assert {spec.name for spec in tools(profile)} == {*SHARED, changing}


@pytest.mark.req("D9.tool_names")
@pytest.mark.parametrize("profile", PROFILES)
def test_names_are_unique_and_of_the_form_every_provider_takes(profile: str) -> None:
    names = [spec.name for spec in tools(profile)]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)] == []


def test_read_only_tools_are_marked() -> None:
    reading = {spec.name for profile in PROFILES for spec in tools(profile) if spec.read_only}
    assert reading == {"read_file", "grep", "glob", "list_dir", "read_blob"}


@pytest.mark.parametrize("profile", PROFILES)
def test_schemas_are_valid_and_do_not_expose_the_session(profile: str) -> None:
    for spec in tools(profile):
        Draft202012Validator.check_schema(spec.parameters)
        assert not {"session_id", "output_mode"} & set(spec.parameters["properties"])
        assert spec.description.strip()
        for body in spec.parameters["properties"].values():
            assert body["type"] in ("string", "integer", "boolean")
            assert not {"anyOf", "$ref", "title"} & set(body)


@pytest.mark.parametrize("profile", PROFILES)
def test_arguments_that_fit_a_schema_are_accepted_by_the_effect(profile: str, tmp_path: Path) -> None:
    effects = open_effect_session(tmp_path)
    for spec in tools(profile):
        for params in GOOD.get(spec.name, []):
            effects.plant({"a": "x\n"})
            Draft202012Validator(spec.parameters).validate(params)
            assert effects.perform(spec.name, **params)["status"] == "ok"
        for params in BAD.get(spec.name, []):
            with pytest.raises(ValidationError):
                Draft202012Validator(spec.parameters).validate(params)


def test_every_required_parameter_is_one_the_effect_requires() -> None:
    for spec in {spec.name: spec for profile in PROFILES for spec in tools(profile)}.values():
        assert set(spec.parameters["required"]) <= set(spec.parameters["properties"])
        assert spec.parameters["additionalProperties"] is False


class TestListings:
    def test_openai(self) -> None:
        first = listed("openai")[0]
        spec = tools("openai")[0]
        body = {"name": "read_file", "description": spec.description, "parameters": spec.parameters}
        assert first == {"type": "function", "function": body}
        assert spec.for_openai_responses() == {"type": "function", **body}

    def test_anthropic(self) -> None:
        spec = tools("anthropic")[0]
        body = {"name": "read_file", "description": spec.description, "input_schema": spec.parameters}
        assert listed("anthropic")[0] == body

    def test_gemini(self) -> None:
        ((declarations),) = [entry["functionDeclarations"] for entry in listed("gemini")]
        assert [one["name"] for one in declarations] == [spec.name for spec in tools("gemini")]
        for one in declarations:
            assert sorted(one["parameters"]) == ["properties", "required", "type"]
            for body in one["parameters"]["properties"].values():
                assert set(body) <= {"type", "description", "enum", "minimum"}

    @pytest.mark.parametrize("profile", PROFILES)
    def test_listings_are_json(self, profile: str) -> None:
        assert encode(listed(profile))

    def test_an_unknown_profile_is_refused(self) -> None:
        with pytest.raises(MulliganError) as caught:
            tools("grok")
        assert caught.value.code == "invalid_params"


def test_a_spec_names_its_effect() -> None:
    spec = next(spec for spec in tools("openai") if spec.name == "shell")
    assert isinstance(spec, ToolSpec) and spec.effect == "host.shell"
