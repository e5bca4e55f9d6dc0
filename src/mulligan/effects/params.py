"""The parameters of every effect, as S1 names them. JSON Schemas for tools are generated from these models."""

from __future__ import annotations

import binascii
from base64 import b64decode
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from mulligan.boundary.capability import COUNT_MAX, PATCH_FORMATS
from mulligan.values.digest import parse_digest
from mulligan.values.faults import MulliganError
from mulligan.values.refusal import Refused

OUTPUT_MODES = ("auto", "require_inline")
ENCODINGS = ("utf8", "bytes")
WRITE_MODES = ("overwrite", "create_new")
TTL_MAX_NS = 2**62

Count = Annotated[int, Field(ge=0, le=COUNT_MAX, strict=True)]
PathText = Annotated[
    str,
    Field(
        validation_alias=AliasChoices("path", "file_path"),
        description="Path relative to the workspace root, or absolute inside it.",
    ),
]


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)

    session_id: str | None = Field(default=None, description="The session whose boundary applies.")

    def check(self) -> None:
        """Refuse values of the right type that mean nothing, each with a code of its own."""


def _require(value: str, known: tuple[str, ...], code: str, name: str) -> None:
    if value not in known:
        raise Refused("error", code, f"{name} is {' or '.join(map(repr, known))}.")


class InlineText(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    text: str


class InlineBytes(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    bytes: str


class BlobRef(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    blob_ref: str


class Payload(BaseModel):
    """Exactly one of the three."""

    model_config = ConfigDict(extra="forbid", strict=True)
    inline_text: InlineText | None = None
    inline_bytes: InlineBytes | None = None
    blob_ref: BlobRef | None = None


class Outputting(Params):
    output_mode: str = Field(default="auto", description="'auto' or 'require_inline'.")

    def check(self) -> None:
        _require(self.output_mode, OUTPUT_MODES, "invalid_output_mode", "output_mode")


class ReadFile(Outputting):
    path: PathText
    offset_bytes: Count | None = None
    max_bytes: Count | None = None
    offset_lines: Count | None = Field(default=None, description="First line to return, counted from 0.")
    max_lines: Count | None = None
    encoding: str | None = Field(default=None, description="'utf8' or 'bytes'; by default text where it is UTF-8.")

    def check(self) -> None:
        super().check()
        if self.encoding is not None:
            _require(self.encoding, ENCODINGS, "invalid_encoding", "encoding")
        if self.by_lines and self.offset_bytes is not None:
            raise Refused("error", "invalid_params", "Read from a byte or from a line, not both.")

    @property
    def by_lines(self) -> bool:
        return self.offset_lines is not None or self.max_lines is not None


class WriteFile(Params):
    path: PathText
    content: str | Payload
    create_parents: bool = False
    mode: str = Field(default="overwrite", description="'overwrite' or 'create_new'.")
    expected_digest: str | None = Field(default=None, description="Write only if the file still has this digest.")

    def check(self) -> None:
        _require(self.mode, WRITE_MODES, "invalid_mode", "mode")
        if self.expected_digest is not None:
            try:
                parse_digest(self.expected_digest)
            except MulliganError as error:
                raise Refused("error", "invalid_params", f"expected_digest: {error.message}") from None


class EditFile(Params):
    path: PathText
    old_string: str
    new_string: str
    replace_all: bool = False

    def check(self) -> None:
        if not self.old_string:
            raise Refused("error", "invalid_input_empty_old_string", "old_string must not be empty.")


class ApplyPatch(Params):
    patch: str | Payload
    patch_format: str = Field(default="v4a", description="'v4a' ('*** Begin Patch') or 'unified'.")
    dry_run: bool = Field(default=False, description="Only say what would change.")

    def check(self) -> None:
        _require(self.patch_format, PATCH_FORMATS, "unsupported_patch_format", "patch_format")


class Grep(Outputting):
    pattern: str
    path: str | None = Field(default=None, validation_alias=AliasChoices("path", "file_path"))
    glob_filter: str | None = None
    case_insensitive: bool = False
    max_results: Count | None = None


class Glob(Outputting):
    pattern: str
    path: str | None = Field(default=None, validation_alias=AliasChoices("path", "file_path"))
    max_results: Count | None = None
    include_ignored: bool = False


class Stat(Params):
    path: PathText


class Exists(Params):
    path: PathText


class ListDir(Outputting):
    path: str | None = Field(default=None, validation_alias=AliasChoices("path", "file_path"))
    max_results: Count | None = None


class Delete(Params):
    path: PathText
    recursive: bool = False


class Move(Params):
    path: PathText
    to: str
    overwrite: bool = False


class MakeDir(Params):
    path: PathText
    parents: bool = False


class Exec(Outputting):
    argv: list[str] = Field(description="The program and its arguments.")
    cwd: str | None = Field(default=None, description="Where to run, below the root.")
    timeout_ms: Annotated[int, Field(gt=0)] | None = None
    env: dict[str, str] | None = Field(default=None, validation_alias=AliasChoices("env", "env_patch"))
    stdin: str | None = None
    stdin_ref: str | None = None
    rollback_on: Literal["nonzero"] | None = None
    isolate: bool = False
    sandbox: Literal["none", "workspace"] = "none"
    network: Literal["none", "full"] = "full"
    strategy: Literal["notify", "watch", "scan", "overlay"] | None = None


class Shell(Params):
    command: str = Field(description="Runs with sh -c.")
    cwd: str | None = None
    timeout_ms: Annotated[int, Field(gt=0)] | None = None


class ReadBlob(Params):
    blob_ref: str
    offset_bytes: Count = 0
    max_bytes: Count | None = None


class LocalTarget(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    workdir: str | None = None
    mounts: list[dict[str, Any]] | None = None
    env: dict[str, str] | None = None
    network_mode: Literal["none", "full"] | None = None


class Target(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
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


def inline_data(content: str | Payload, *, code: str) -> bytes | str:
    """The bytes given inline, or the reference of the blob that holds them."""
    if isinstance(content, str):
        return _utf8(content, code)
    given = [part for part in (content.inline_text, content.inline_bytes, content.blob_ref) if part is not None]
    if len(given) != 1:
        raise Refused("error", code, "Give exactly one of inline_text, inline_bytes and blob_ref.")
    (part,) = given
    if isinstance(part, InlineText):
        return _utf8(part.text, code)
    if isinstance(part, BlobRef):
        return part.blob_ref
    try:
        return b64decode(part.bytes.removeprefix("base64:"), validate=True)
    except (binascii.Error, ValueError):
        raise Refused("error", code, "inline_bytes.bytes is 'base64:' and base64.") from None


def _utf8(text: str, code: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("error", code, "The text holds lone surrogates, which no UTF-8 file can.") from None
