"""The format of a bundle: one session as one canonical JSON document, and the checks of a foreign one. Pure.

`bundle_id` is the digest of the document without this field. Nothing in the document depends on the time or place of
the export, so the same session gives the same bundle, byte for byte, and so does a session imported from it.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from mulligan.session.bundle.redaction import refuse_secrets
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import digest_of, is_digest
from mulligan.values.errors import MulliganError, fault
from mulligan.values.limits import MIB_BYTES

BUNDLE_TYPE = "mulligan_session_bundle"
SCHEMA_VERSION = 1
SCHEMA_ID = "mulligan.session_bundle.v1"
# Mulligan neither writes nor reads a larger document, because it needs several times its size in memory.
BUNDLE_MAX_BYTES = 64 * MIB_BYTES

Mode = Literal["sanitized", "local", "replay_only"]
MODES: tuple[Mode, ...] = get_args(Mode)
Document = dict[str, Any]

TOP_LEVEL = (
    *("_type", "schema_version", "bundle_id", "created_at", "producer", "source", "runtime", "transcript", "tools"),
    *("permissions", "replay", "redaction", "metadata"),
)
NESTED: Mapping[str, tuple[str, ...]] = {
    "producer": ("name", "version", "schema_id"),
    "source": ("kind", "session_id", "status", "started_at"),
    "transcript": ("sections",),
    "tools": ("schemas", "calls"),
    "replay": ("replay_fixture", "deterministic_events"),
    "redaction": ("mode", "policy", "placeholder", "entries", "unsafe_secret_markers_rejected"),
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z")
_AHEAD = timedelta(days=1)
_WRONG_DIGEST, _WRONG_SIZE = "a digest is not well formed", "a size is not well formed"
_ONE_SECTION = "it must have one section"


def parse_mode(mode: object) -> Mode:
    if mode not in MODES:
        raise fault("invalid_params", f"The mode of a bundle must be one of {', '.join(MODES)}.", field="mode")
    return next(known for known in MODES if known == mode)


def with_bundle_id(document: Mapping[str, Any]) -> Document:
    """The document with its `bundle_id`."""
    body = {key: value for key, value in document.items() if key != "bundle_id"}
    return {**body, "bundle_id": digest_of(encode(body))}


def parse_bundle(data: bytes | str | Mapping[str, Any], *, now: datetime) -> Document:
    """Parse a bundle and check, in this order: required fields, type, version, secrets, form.

    Raises `invalid_bundle`, `unsupported_bundle_version` or `unredacted_secret`; no error shows the bundle's content.
    """
    document = _document(data)
    _require_fields(document)
    if document["_type"] != BUNDLE_TYPE:
        raise wrong_bundle("invalid_type", "$._type", f"its _type is not {BUNDLE_TYPE}")
    _require_version(document["schema_version"])
    if document["redaction"]["mode"] != "local":
        refuse_secrets(document, doing="Importing this bundle")
    _require_form(document, now)
    if with_bundle_id(document)["bundle_id"] != document["bundle_id"]:
        raise wrong_bundle("digest_mismatch", "$.bundle_id", "it was changed after the export")
    _require_blobs(document.get("content"))
    return document


def _document(data: bytes | str | Mapping[str, Any]) -> Document:
    if not isinstance(data, Mapping):
        check_bundle_size(len(data))
    try:
        value = data if isinstance(data, Mapping) else decode(data)
        if isinstance(value, Mapping):
            # Encoding and decoding gives us a copy, and refuses values without a canonical form.
            canonical = encode(dict(value))
            check_bundle_size(len(canonical))
            value = decode(canonical)
    except MulliganError as error:
        if error.code == "invalid_bundle":
            raise
        raise wrong_bundle("invalid_json", "$", "it is not valid JSON") from None
    if not isinstance(value, dict):
        raise wrong_bundle("invalid_json", "$", "it is not a JSON object")
    return value


def check_bundle_size(size_bytes: int) -> None:
    """Raises `invalid_bundle` for a document that is too large."""
    if size_bytes > BUNDLE_MAX_BYTES:
        raise wrong_bundle("too_large", "$", f"it has more than {BUNDLE_MAX_BYTES // MIB_BYTES} MiB")


def _require_fields(document: Document) -> None:
    for name in TOP_LEVEL:
        if name not in document:
            raise wrong_bundle("missing_required", f"$.{name}", "a part is missing")
    for name, members in NESTED.items():
        part = document[name]
        for member in members:
            if not isinstance(part, dict) or member not in part:
                raise wrong_bundle("missing_required", f"$.{name}.{member}", "a part is missing")


def _require_version(found: object) -> None:
    if type(found) is not int or not 1 <= found <= SCHEMA_VERSION:
        shown = found if type(found) is int else None
        raise fault(
            "unsupported_bundle_version",
            f"This bundle has an unsupported schema version; Mulligan reads 1 to {SCHEMA_VERSION}.",
            found=shown,
            supported=SCHEMA_VERSION,
        )


Fits = Callable[[Any], object]


def _require_form(document: Document, now: datetime) -> None:
    """Checks what the import, and a later export of the imported session, rely on."""
    section, record, fixture = "transcript.sections[]", "replay.deterministic_events[]", "replay.replay_fixture"

    def is_time(value: Any) -> object:
        """Whether it is a time that does not lie in the future."""
        with suppress(ValueError):
            return isinstance(value, str) and _TIME.match(value) and parse_timestamp(value) <= now + _AHEAD
        return False

    time = is_time, "a time is not well formed, or lies in the future"
    digest = (lambda value: value is None or is_digest(value)), _WRONG_DIGEST
    rules: tuple[tuple[str, tuple[Fits, str]], ...] = (
        ("redaction.mode", (lambda mode: mode in MODES, "its mode is unknown")),
        (record, (_fits_record, "a record is not well formed")),
        (f"{record}.at", time),
        ("tools.calls[]", (_fits_call, "a call is not well formed")),
        ("tools.calls[].args_hash", digest),
        ("tools.calls[].result.digest", digest),
        ("tools.calls[].result.bytes", (_fits_size, _WRONG_SIZE)),
        (fixture, (lambda found: found is None or isinstance(found, dict), "it is not an object")),
        (f"{fixture}.message_digests[]", digest),
        (f"{fixture}.tool_results[]", (lambda result: isinstance(result, dict), "a result is not well formed")),
        (f"{fixture}.tool_results[].args_hash", digest),
        (f"{fixture}.tool_results[].result_digest", digest),
        ("redaction.entries[]", (_fits_entry, "an entry is not well formed")),
        ("workspace", (_fits_workspace, "the roots are not well formed")),
        ("source.started_at", time),
        ("transcript.sections", (lambda sections: isinstance(sections, list) and len(sections) == 1, _ONE_SECTION)),
        (section, (lambda found: isinstance(found, dict), _ONE_SECTION)),
        (f"{section}.events[]", (_fits_event, "an event is not well formed")),
        (f"{section}.events[].at", time),
        (f"{section}.messages[]", (_fits_message, "a message needs a role")),
    )
    for pattern, (fits, words) in rules:
        for path, value in _values_at(document, pattern.split("."), "$"):
            if not fits(value):
                problem = {_WRONG_DIGEST: "invalid_digest", _WRONG_SIZE: "invalid_size"}.get(words, "invalid_form")
                raise wrong_bundle(problem, path, words)
    _require_places(document["transcript"]["sections"][0])


def _values_at(value: Any, names: Sequence[str], path: str) -> Iterator[tuple[str, Any]]:
    """The values at a path, each with its own path. A name with `[]` is a list, and stands for each of its items."""
    if not names:
        yield path, value
    elif value is not None:
        name, *rest = names
        key = name.removesuffix("[]")
        inner, where = value.get(key), f"{path}.{key}"
        if key == name:
            yield from _values_at(inner, rest, where)
        elif not isinstance(inner, list):
            raise wrong_bundle("invalid_form", where, "a list is missing")
        else:
            for index, item in enumerate(inner):
                yield from _values_at(item, rest, f"{where}[{index}]")


def _fits_record(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("payload"), dict)


def _fits_call(call: Any) -> bool:
    return isinstance(call, dict) and (call.get("result") is None or isinstance(call["result"], dict))


def _fits_size(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _fits_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())


def _fits_workspace(workspace: Any) -> bool:
    roots = (workspace or {}).get("additional_roots") or [] if isinstance(workspace or {}, dict) else None
    return isinstance(roots, list) and all(isinstance(one, dict) and isinstance(one.get("path"), str) for one in roots)


def _fits_event(event: Any) -> bool:
    if not isinstance(event, dict) or not all(isinstance(event.get(key), str) for key in ("id", "kind", "visibility")):
        return False
    if is_message_event(event) and "message" in event and not _fits_message(event["message"]):
        return False
    return bool(event["kind"].strip()) and isinstance(event.get("metadata", {}), dict)


def is_message_event(event: Mapping[str, Any]) -> bool:
    return event.get("kind") in ("message", "tool_result")


def _fits_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and bool(message["role"].strip())


def _require_places(section: Document) -> None:
    """Checks the place of each message: the index of its event, or none if a compaction inserted the message."""
    events, where = section["events"], "$.transcript.sections[0].places"
    places = [place for _, place in _values_at(section, ["places[]"], "$.transcript.sections[0]")]
    if len(places) != len(section["messages"]):
        raise wrong_bundle("invalid_form", where, "each message needs its place")
    named: list[int] = []
    for index, place in enumerate(places):
        at = place.get("event", False) if isinstance(place, dict) and isinstance(place.get("id"), str) else False
        is_event = type(at) is int and 0 <= at < len(events) and is_message_event(events[at])
        if not (at is None or is_event):
            raise wrong_bundle("invalid_form", f"{where}[{index}]", "a place is not well formed")
        named += [] if at is None else [at]
    if len(set(named)) < len(named):
        raise wrong_bundle("invalid_form", where, "a message has two places")


def _require_blobs(content: Any) -> None:
    """Every digest and size is well formed, and every body has its digest and size."""
    if content is None:
        return
    blobs = content.get("blobs") if isinstance(content, dict) else None
    if not isinstance(blobs, list):
        raise wrong_bundle("invalid_form", "$.content.blobs", "a list is missing")
    for index, blob in enumerate(blobs):
        path = f"$.content.blobs[{index}]"
        body = body_of(blob, path)
        if not _fits_size(blob.get("size")):
            raise wrong_bundle("invalid_size", path, _WRONG_SIZE)
        if body is None:
            continue
        if digest_of(body) != blob["digest"]:
            raise wrong_bundle("digest_mismatch", path, "a body does not have its digest")
        if blob.get("size") not in (None, len(body)):
            raise wrong_bundle("size_mismatch", path, "a body does not have its size")


def body_of(blob: Any, path: str = "$.content.blobs") -> bytes | None:
    """The bytes that a bundle has for a blob, if it has them."""
    if not isinstance(blob, dict):
        raise wrong_bundle("invalid_form", path, "a blob is not well formed")
    if not is_digest(blob.get("digest")):
        raise wrong_bundle("invalid_digest", path, _WRONG_DIGEST)
    if blob.get("body") is None:
        return None
    try:
        return b64decode(blob["body"], validate=True)
    except (NotBase64, TypeError, ValueError):
        raise wrong_bundle("invalid_form", path, "a body is not base64") from None


def wrong_bundle(problem: str, path: str, words: str) -> MulliganError:
    return fault("invalid_bundle", f"This bundle cannot be imported: {words} ({path}).", problem=problem, path=path)
