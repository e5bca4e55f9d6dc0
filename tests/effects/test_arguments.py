"""The table of parameters accepts what the pydantic models accept, and makes the same of it."""

from __future__ import annotations

import string
from random import Random
from typing import Any

import pytest

from mulligan.effects import arguments, params
from mulligan.effects.registry import EFFECTS
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import Refused

INPUTS = 1_000
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**40, 2**70, 1.0, 2.5, "", "a", "é", "\ud800", "auto", "utf8", "overwrite", "v4a",
    "none", "nonzero", "notify", "stdout", [], ["a", "é"], ["a", 1], ["\ud800"], {}, {"A": "b"}, {"A": 1},
    {"inline_text": {"text": "x"}}, {"blob_ref": "x"}, b"bytes",
)  # fmt: skip


def _generated(random: Random, model: type[params.Params]) -> dict[str, Any]:
    """Mostly right parameters of a model, with wrong, unknown, repeated and missing ones among them."""
    schema = model.model_json_schema(by_alias=False)
    given: dict[str, Any] = {}
    for name, body in schema["properties"].items():
        if name in schema.get("required", ()) or random.random() < 0.3:
            given[name] = _value(random, body) if random.random() < 0.85 else random.choice(_VALUES)
    if random.random() < 0.2 and "path" in given:
        given["file_path"] = given["path"] if random.random() < 0.3 else given.pop("path")
    if random.random() < 0.05:
        given[random.choice(["env_patch", "unknown", "about", "check"])] = random.choice(_VALUES)
    if random.random() < 0.05 and given:
        del given[random.choice(sorted(given))]
    return given


def _value(random: Random, body: dict[str, Any]) -> Any:
    option = random.choice(body.get("anyOf", [body]))
    choices = [option["const"]] if "const" in option else option.get("enum", body.get("enum"))
    if choices is not None and option.get("type") != "null":
        return random.choice(choices)
    text = "".join(random.choices(string.ascii_letters + "é\n/", k=random.randrange(8)))
    made: dict[Any, Any] = {
        "string": text,
        "integer": random.randrange(100),
        "boolean": random.random() < 0.5,
        "array": [text, "b"],
        "object": {"NAME": text},
    }
    return made.get(option.get("type"))


def _outcome(parse: Any, given: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "made", parse(given)
    except Refused as refused:
        return refused.code, refused.message


@pytest.mark.req("D17.params_table")
@pytest.mark.parametrize("model", sorted(arguments.shapes()))
def test_the_table_and_the_model_agree_on_generated_parameters(model: str) -> None:
    random, declared = Random(f"19 {model}"), getattr(params, model)
    by_table = 0
    for _ in range(INPUTS):
        given = _generated(random, declared)
        expected, found = (
            _outcome(lambda given: params.parsed_params(declared, given), given),
            _outcome(lambda given: arguments.parsed(model, given), given),
        )
        if expected[0] != "made":
            assert (found, given) == (expected, given)
            continue
        values = {name: getattr(expected[1], name) for name in declared.model_fields}
        assert (found[0], {name: getattr(found[1], name) for name in values}, given) == ("made", values, given)
        by_table += arguments.by_table(model, given) is not None
    assert by_table > INPUTS / 4


@pytest.mark.req("D17.params_table")
def test_the_table_is_generated_from_the_models_and_has_every_effect() -> None:
    with open(arguments.FILE, "rb") as file:
        assert decode(file.read()) == decode(encode(params.table()))
    assert {effect.params for effect in EFFECTS} <= arguments.shapes().keys()
