"""The parameters of effects at run time: checked against a table, without pydantic.

`params` declares them as pydantic models. `arguments.json` is generated from the models (`make mcp-table`), because to
import pydantic and to build the models takes longer than all the rest of a command. The table accepts only what it
certainly knows to be right. Everything else goes to the model, which accepts it or explains what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mulligan.boundary.capability import PATCH_FORMATS
from mulligan.values.canonical import decode
from mulligan.values.digest import parse_digest
from mulligan.values.errors import MulliganError, Refused

if TYPE_CHECKING:
    from mulligan.effects.params import Payload

FILE = os.path.join(os.path.dirname(__file__), "arguments.json")

OUTPUT_MODES = ("auto", "require_inline")
ENCODINGS = ("utf8", "bytes")
WRITE_MODES = ("overwrite", "create_new")

TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "strings": list,
    "mapping": dict,
}
"""The types of fields: `strings` is a list of texts, `mapping` has texts as names and values."""


# What the models and the table check alike: values of the right type, each with an error code of its own. The methods
# have no annotations for `self`, because pydantic would take annotations of a base class for fields.


class Rules:
    def check(self) -> None:
        """Refuse invalid values of the right type, each with its own code."""


class OutputRules(Rules):
    def check(self: Any) -> None:
        _require(self.output_mode, OUTPUT_MODES, "invalid_output_mode", "output_mode")


class ReadFileRules(OutputRules):
    def check(self: Any) -> None:
        OutputRules.check(self)
        if self.encoding is not None:
            _require(self.encoding, ENCODINGS, "invalid_encoding", "encoding")
        if self.by_lines and self.offset_bytes is not None:
            raise Refused("error", "invalid_params", "Give offset_bytes or offset_lines, not both.")

    @property
    def by_lines(self: Any) -> bool:
        return self.offset_lines is not None or self.max_lines is not None


class WriteFileRules(Rules):
    def check(self: Any) -> None:
        if self.mode not in WRITE_MODES:
            _require(self.mode, WRITE_MODES, "invalid_mode", "mode")
        if self.expected_digest is not None:
            try:
                parse_digest(self.expected_digest)
            except MulliganError as error:
                raise Refused("error", "invalid_params", f"expected_digest: {error.message}") from None


class EditFileRules(Rules):
    def check(self: Any) -> None:
        if not self.old_string:
            raise Refused("error", "invalid_input_empty_old_string", "old_string must not be empty.")


class ApplyPatchRules(Rules):
    def check(self: Any) -> None:
        _require(self.patch_format, PATCH_FORMATS, "unsupported_patch_format", "patch_format")


class ExecRules(OutputRules):
    @property
    def limit_ms(self: Any) -> int | None:
        in_ms = None if self.timeout_ns is None else max(1, self.timeout_ns // 1_000_000)
        return min((limit for limit in (self.timeout_ms, in_ms) if limit is not None), default=None)


def _require(value: str, known: tuple[str, ...], code: str, name: str) -> None:
    if value not in known:
        raise Refused("error", code, f"{name} is {' or '.join(map(repr, known))}.")


_RULES: Mapping[str, type[Rules]] = {
    "ReadFile": ReadFileRules,
    "WriteFile": WriteFileRules,
    "EditFile": EditFileRules,
    "ApplyPatch": ApplyPatchRules,
    "Exec": ExecRules,
    **dict.fromkeys(("Grep", "Glob", "ListDir"), OutputRules),
}


class Field(NamedTuple):
    """A parameter. `least` and `most` bound numbers; `choices` are all values of a text, if it is not free."""

    name: str
    type: str
    nullable: bool
    least: int | None
    most: int | None
    choices: list[str] | None


class Shape(NamedTuple):
    """The parameters of one effect. `keys` has each field under its name and its aliases."""

    made: type[Rules]
    keys: Mapping[str, Field]
    defaults: Mapping[str, Any]
    required: frozenset[str]


@cache
def shapes() -> Mapping[str, Shape]:
    with open(FILE, "rb") as file:
        return {name: _shape(name, body) for name, body in decode(file.read()).items()}


def _shape(name: str, body: Mapping[str, Any]) -> Shape:
    keys = {key: Field(*field) for *field, aliases in body["fields"] for key in (field[0], *aliases)}
    return Shape(type(name, (_RULES.get(name, Rules),), {}), keys, body["defaults"], frozenset(body["required"]))


def parsed(name: str, given: Mapping[str, Any]) -> Any:
    """The parameters that a caller gave. Raises Refused `invalid_params`, or a more specific code of the model."""
    return by_table(name, given) or by_model(name, given)


def by_model(name: str, given: Mapping[str, Any]) -> Any:
    """The parameters by their pydantic model, which explains what is wrong, and knows forms that the table does not."""
    from mulligan.effects import params

    return params.parsed_params(getattr(params, name), given)


def by_table(name: str, given: Mapping[str, Any]) -> Rules | None:
    """The parameters, checked; None if only the model can say whether they are right."""
    shape = shapes().get(name)
    if shape is None:
        return None
    keys, values = shape.keys, {}
    for key, value in given.items():
        field, kind = keys.get(key), type(value)
        if field is None or field.name in values:
            return None
        if value is None:
            if not field.nullable:
                return None
        elif kind is not TYPES[field.type]:
            return None
        elif field.type == "string":
            if not (value.isascii() or _is_text(value)) or (field.choices is not None and value not in field.choices):
                return None
        elif field.type == "integer":
            if (field.least is not None and value < field.least) or (field.most is not None and value > field.most):
                return None
        elif field.type == "strings":
            if set(map(type, value)) - {str} or not _is_text("".join(value)):
                return None
            value = list(value)
        elif field.type == "mapping":
            texts = [*value, *value.values()]
            if set(map(type, texts)) - {str} or not _is_text("".join(texts)):
                return None
            value = dict(value)
        values[field.name] = value
    if not shape.required <= values.keys():
        return None
    asked = shape.made()
    vars(asked).update(shape.defaults, **values)
    asked.check()
    return asked


def _is_text(value: str) -> bool:
    """Whether the text has a form in UTF-8, as pydantic demands."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_whole_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with 1.0 as 1: JSON Schema counts it as an integer, and no argument of a tool is a fraction."""
    return {name: _whole(value) for name, value in given.items()}


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def inline_data(content: str | Payload, *, code: str) -> bytes | str:
    """The inline bytes, or the reference of the blob that has them."""
    if isinstance(content, str):
        return content.encode("utf-8") if content.isascii() else utf8_bytes(content, code)
    from mulligan.effects.params import payload_data  # The table knows only texts, so the models are loaded already.

    return payload_data(content, code)


def utf8_bytes(text: str, code: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("error", code, "The text has lone surrogates, so it is not UTF-8.") from None
