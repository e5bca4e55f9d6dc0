"""The parameters of every effect, as S1 names them. JSON Schemas for tools are generated from these models.

So is the table by which `arguments` checks parameters at run time. Few programs import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from mulligan.boundary.capability import COUNT_MAX, PATCH_FORMATS
from mulligan.effects.arguments import (
    ENCODINGS,
    FILE,
    OUTPUT_MODES,
    WRITE_MODES,
    ApplyPatchRules,
    EditFileRules,
    ExecRules,
    OutputRules,
    ReadFileRules,
    Rules,
    WriteFileRules,
    utf8_bytes,
    with_whole_numbers,
)
from mulligan.store.fork_locks import no_fork
from mulligan.values.canonical import encode
from mulligan.values.errors import Refused
from mulligan.values.text import from_base64

TTL_MAX_NS = 2**62

Count = Annotated[int, Field(ge=0, le=COUNT_MAX, strict=True)]
PathText = Annotated[
    str,
    Field(
        validation_alias=AliasChoices("path", "file_path"),
        description="Relative to the working directory, or absolute inside the workspace.",
    ),
]


def one_of(known: tuple[str, ...]) -> dict[str, Any]:
    """The values for the schema only; another value gets an error code of its own."""
    return {"enum": list(known)}


class StrictModel(BaseModel):
    """Refuses unknown fields and converts nothing. pydantic builds a model at its first use, because a process uses
    only a few."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True, defer_build=True)


class Params(Rules, StrictModel):
    about: ClassVar[str] = ""
    """What the tool with these parameters does, in a sentence for a model."""

    session_id: str | None = Field(default=None, description="The session whose boundary applies.")


class InlineText(StrictModel):
    text: str


class InlineBytes(StrictModel):
    bytes: str


class BlobRef(StrictModel):
    blob_ref: str


class Payload(StrictModel):
    """Exactly one of the three."""

    inline_text: InlineText | None = None
    inline_bytes: InlineBytes | None = None
    blob_ref: BlobRef | None = None


def _shaped(value: object, check: ValidatorFunctionWrapHandler) -> str | Payload:
    try:
        return cast("str | Payload", check(value))
    except ValidationError:
        raise PydanticCustomError("payload", _SHAPES) from None


_SHAPES = (
    'Give a string, {"inline_text": {"text": "…"}}, {"inline_bytes": {"bytes": "base64:…"}} '
    'or {"blob_ref": {"blob_ref": "sha256:…"}}'
)

Given = Annotated[str | Payload, WrapValidator(_shaped)]


class Outputting(OutputRules, Params):
    output_mode: str = Field(
        default="auto", description="Whether a blob is a good answer.", json_schema_extra=one_of(OUTPUT_MODES)
    )


class ReadFile(ReadFileRules, Outputting):
    about: ClassVar[str] = "Read a file or a part of it, by bytes or by lines."

    path: PathText
    offset_bytes: Count | None = Field(default=None, description="First byte to return, counted from 0.")
    max_bytes: Count | None = Field(default=None, description="Return at most this many bytes.")
    offset_lines: Count | None = Field(default=None, description="First line to return, counted from 0.")
    max_lines: Count | None = Field(default=None, description="Return at most this many lines.")
    encoding: str | None = Field(
        default=None, description="By default text where it is UTF-8.", json_schema_extra=one_of(ENCODINGS)
    )


class WriteFile(WriteFileRules, Params):
    about: ClassVar[str] = "Write a whole file."

    path: PathText
    content: Given = Field(description="All of the file.")
    create_parents: bool = Field(default=False, description="Make directories that are missing.")
    mode: str = Field(
        default="overwrite", description="What to do with a file that is there.", json_schema_extra=one_of(WRITE_MODES)
    )
    expected_digest: str | None = Field(default=None, description="Write only if the file still has this digest.")


class EditFile(EditFileRules, Params):
    about: ClassVar[str] = "Replace text in a file. old_string must be found exactly once, unless replace_all is set."

    path: PathText
    old_string: str = Field(description="The text to replace, with enough around it to be unique.")
    new_string: str = Field(description="What to put in its place.")
    replace_all: bool = Field(default=False, description="Replace every occurrence.")


class ApplyPatch(ApplyPatchRules, Params):
    about: ClassVar[str] = (
        "Apply a patch to one or more files, all or nothing: '*** Begin Patch' format, or patch_format unified."
    )

    patch: Given = Field(description="The whole patch, from '*** Begin Patch' to '*** End Patch'.")
    patch_format: str = Field(
        default="v4a", description="v4a is the '*** Begin Patch' form.", json_schema_extra=one_of(PATCH_FORMATS)
    )
    dry_run: bool = Field(default=False, description="Only say what would change.")


class Searching(Outputting):
    path: str | None = Field(
        default=None,
        validation_alias=AliasChoices("path", "file_path"),
        description="Where to look; by default the working directory.",
    )
    max_results: Count | None = Field(default=None, description="By default 100.")


class Grep(Searching):
    about: ClassVar[str] = "Search the contents of files by regular expression. Answers with lines of path:line:text."

    pattern: str = Field(description="A regular expression, without look-around and back-references.")
    glob_filter: str | None = Field(default=None, description="Search only files that match this, such as *.rs.")
    case_insensitive: bool = False


class Glob(Searching):
    about: ClassVar[str] = "Find files by a pattern such as **/*.py, newest first."

    pattern: str = Field(description="Such as **/*.ts: * stays within a name, ** crosses directories.")
    include_ignored: bool = Field(default=False, description="Also files that .gitignore leaves out.")


class Stat(Params):
    about: ClassVar[str] = "Whether a path is a file or a directory, its size and its time."

    path: PathText


class Exists(Params):
    about: ClassVar[str] = "Whether a path exists."

    path: PathText


class ListDir(Searching):
    about: ClassVar[str] = "The names in a directory, directories with a trailing slash."


class Delete(Params):
    about: ClassVar[str] = "Delete a file, a link or a directory."

    path: PathText
    recursive: bool = False


class Move(Params):
    about: ClassVar[str] = "Move a file, a link or a directory."

    path: PathText
    to: str
    overwrite: bool = False


class MakeDir(Params):
    about: ClassVar[str] = "Make a directory."

    path: PathText
    parents: bool = False


class Exec(ExecRules, Outputting):
    about: ClassVar[str] = "Run a program."

    argv: list[str] = Field(description="The program and its arguments.")
    cwd: str | None = Field(default=None, description="Where to run, below the root.")
    timeout_ms: Annotated[int, Field(gt=0)] | None = None
    timeout_ns: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="As timeout_ms; the shorter holds."
    )
    env: dict[str, str] | None = Field(default=None, validation_alias=AliasChoices("env", "env_patch"))
    stdin: str | None = None
    stdin_ref: str | None = None
    rollback_on: Literal["nonzero"] | None = None
    isolate: bool = False
    sandbox: Literal["none", "workspace"] = "none"
    network: Literal["none", "full"] = "full"
    strategy: Literal["notify", "watch", "scan", "overlay"] | None = None
    background: bool = Field(default=False, description="Answer at once with an exec_id; the command goes on.")


class ExecOutput(Params):
    about: ClassVar[str] = "Page through the output of a command in the background, and see whether it has ended."

    exec_id: str = Field(description="The exec_id of a command in the background.")
    stream: Literal["stdout", "stderr"] = "stdout"
    offset_bytes: Count = 0
    max_bytes: Count | None = None


class ExecSignal(Params):
    about: ClassVar[str] = "Send a signal to a command in the background."

    exec_id: str = Field(description="The exec_id of a command in the background.")
    signal: str = Field(default="term", description="term, kill, int or hup.")


class Shell(Params):
    about: ClassVar[str] = "Run a shell command with sh -c."

    command: str = Field(description="Runs with sh -c.")
    cwd: str | None = None
    timeout_ms: Annotated[int, Field(gt=0)] | None = None


class ReadBlob(Params):
    about: ClassVar[str] = "Page through an answer that was too large to be given inline."

    blob_ref: str = Field(description="The blob_ref of an answer given to this session.")
    offset_bytes: Count = 0
    max_bytes: Count | None = None


class LocalTarget(StrictModel):
    workdir: str | None = None
    mounts: list[dict[str, Any]] | None = None
    env: dict[str, str] | None = None
    network_mode: Literal["none", "full"] | None = None


class Target(StrictModel):
    local: LocalTarget | None = None
    sandbox: dict[str, Any] | None = None


class OpenSession(Params):
    target: Target = Field(default_factory=lambda: Target(local=LocalTarget()))
    session_ttl_ns: Annotated[int, Field(gt=0, le=TTL_MAX_NS)] | None = None
    labels: dict[str, str] | None = None
    capability: dict[str, Any] | None = None
    policy: list[dict[str, Any]] | None = None


class SignalSession(Params):
    signal: str = "term"
    grace_timeout_ns: Count | None = None


Model = TypeVar("Model", bound=StrictModel)


def built(model: type[Model]) -> type[Model]:
    """The model, built at its first use, because a process uses only a few."""
    if not model.__pydantic_complete__:
        # Under one lock for all models, which a forked child must not inherit locked.
        with no_fork:
            model.model_rebuild()
    return model


def parsed_params(model: type[Params], given: Mapping[str, Any]) -> Any:
    """The parameters that a caller gave. Raises Refused `invalid_params`, or a more specific code of the model."""
    try:
        asked = (model if model.__pydantic_complete__ else built(model)).model_validate(dict(given))
    except ValidationError as error:
        raise Refused("error", "invalid_params", first_problem(error, of="parameters")) from None
    asked.check()
    return asked


def parsed_exactly(model: type[Params], given: Mapping[str, Any]) -> Any:
    """As `parsed_params`, for tools whose schemas allow no null and whose callers take `session_id` out before."""
    if "session_id" in given:
        raise Refused("error", "invalid_params", "session_id is not known here.")
    nulls = [name for name, value in given.items() if value is None]
    if nulls:
        raise Refused("error", "invalid_params", f"{nulls[0]} is null; leave it out instead.")
    return parsed_params(model, with_whole_numbers(given))


def first_problem(error: ValidationError, *, of: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or of
    return f"{where}: {first['msg']}"


def payload_data(content: Payload, code: str) -> bytes | str:
    """The inline bytes, or the reference of the blob that has them."""
    given = [part for part in (content.inline_text, content.inline_bytes, content.blob_ref) if part is not None]
    if len(given) != 1:
        raise Refused("error", code, "Give exactly one of inline_text, inline_bytes and blob_ref.")
    (part,) = given
    if isinstance(part, InlineText):
        return utf8_bytes(part.text, code)
    if isinstance(part, BlobRef):
        return part.blob_ref
    try:
        return from_base64(part.bytes)
    except ValueError:
        raise Refused("error", code, "inline_bytes.bytes must be 'base64:' and base64.") from None


# The table of `arguments`, generated from the models of effects.


def table() -> dict[str, Any]:
    """The content of `arguments.json`. A model with a field of a type that the table does not know is left out."""
    classes = [one for one in globals().values() if isinstance(one, type) and issubclass(one, Params)]
    models = [one for one in classes if not any(issubclass(other, one) for other in classes if other is not one)]
    made = {model.__name__: _table_of(model) for model in models}
    return {name: body for name, body in made.items() if body is not None}


def _table_of(model: type[Params]) -> dict[str, Any] | None:
    schema = built(model).model_json_schema(by_alias=False)
    fields = {name: _field(body) for name, body in schema["properties"].items()}
    if None in fields.values():
        return None
    return {
        "fields": [[name, *(field or ()), _aliases(model, name)] for name, field in fields.items()],
        "defaults": {name: body["default"] for name, body in schema["properties"].items() if "default" in body},
        "required": schema.get("required", []),
    }


def _aliases(model: type[Params], name: str) -> list[str]:
    alias = model.model_fields[name].validation_alias
    return [str(one) for one in alias.choices if one != name] if isinstance(alias, AliasChoices) else []


def _field(body: Mapping[str, Any]) -> list[Any] | None:
    """The type of a field as `arguments.Field` has it. The forms of a payload other than text are left out."""
    options = [option for option in body.get("anyOf", [body]) if "$ref" not in option]
    kinds = [option for option in options if option.get("type") != "null"]
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    known = {"string": "string", "integer": "integer", "boolean": "boolean", "array": "strings", "object": "mapping"}
    texts = {"type": "string"}
    plain = kind.get("items", texts) == texts and kind.get("additionalProperties", texts) == texts
    if kind.get("type") not in known or not plain:
        return None
    least = kind.get("minimum", kind["exclusiveMinimum"] + 1 if "exclusiveMinimum" in kind else None)
    choices = [kind["const"]] if "const" in kind else kind.get("enum", body.get("enum"))
    return [known[kind["type"]], kinds != options, least, kind.get("maximum"), choices]


def main() -> None:
    with open(FILE, "wb") as file:
        file.write(encode(table()) + b"\n")


if __name__ == "__main__":
    main()
