"""The format of a bundle: one session as one canonical JSON document, and the checks of a foreign one. Pure.

`bundle_id` is the digest of the document without this field. Nothing in the document depends on the time or place of
the export, so the same session gives the same bundle, byte for byte, and so does a session imported from it.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
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


def _require_form(document: Document, now: datetime) -> None:
    """Checks what the import relies on: the types of values, and times that do not lie in the future."""
    if document["redaction"]["mode"] not in MODES:
        raise wrong_bundle("invalid_form", "$.redaction.mode", "its mode is unknown")
    _require_evidence(document, now)
    source = document["source"]
    _require_time(source["started_at"], "$.source.started_at", now)
    sections = document["transcript"]["sections"]
    if not isinstance(sections, list) or len(sections) != 1 or not isinstance(sections[0], dict):
        raise wrong_bundle("invalid_form", "$.transcript.sections", "it must have one section")
    section = sections[0]
    events = _listed(section, "events", "$.transcript.sections[0]")
    for index, event in enumerate(events):
        _require_event(event, f"$.transcript.sections[0].events[{index}]", now)
    messages = _listed(section, "messages", "$.transcript.sections[0]")
    places = _listed(section, "places", "$.transcript.sections[0]")
    if len(places) != len(messages):
        raise wrong_bundle("invalid_form", "$.transcript.sections[0].places", "each message needs its place")
    for index, (message, place) in enumerate(zip(messages, places, strict=True)):
        _require_message(message, f"$.transcript.sections[0].messages[{index}]")
        _require_place(place, events, f"$.transcript.sections[0].places[{index}]")
    named = [place["event"] for place in places if place["event"] is not None]
    if len(set(named)) < len(named):
        raise wrong_bundle("invalid_form", "$.transcript.sections[0].places", "a message has two places")


def _require_evidence(document: Document, now: datetime) -> None:
    """Checks what a later export of the imported session relies on."""
    for index, record in enumerate(_listed(document["replay"], "deterministic_events", "$.replay")):
        path = f"$.replay.deterministic_events[{index}]"
        fits = isinstance(record, dict) and isinstance(record.get("kind"), str)
        if not fits or not isinstance(record.get("payload"), dict):
            raise wrong_bundle("invalid_form", path, "a record is not well formed")
        _require_time(record.get("at"), f"{path}.at", now)
    _require_digests(document)
    for index, entry in enumerate(_listed(document["redaction"], "entries", "$.redaction")):
        if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
            raise wrong_bundle("invalid_form", f"$.redaction.entries[{index}]", "an entry is not well formed")
    workspace = document.get("workspace") or {}
    roots = workspace.get("additional_roots") or [] if isinstance(workspace, dict) else None
    if not isinstance(roots, list) or not all(
        isinstance(one, dict) and isinstance(one.get("path"), str) for one in roots
    ):
        raise wrong_bundle("invalid_form", "$.workspace", "the roots are not well formed")


def _require_digests(document: Document) -> None:
    """Each digest of a call, a result or a message is well formed or missing."""
    for index, call in enumerate(_listed(document["tools"], "calls", "$.tools")):
        path = f"$.tools.calls[{index}]"
        result = call.get("result") if isinstance(call, dict) else ""
        if not isinstance(call, dict) or not (result is None or isinstance(result, dict)):
            raise wrong_bundle("invalid_form", path, "a call is not well formed")
        _require_digest(call.get("args_hash"), f"{path}.args_hash")
        if result is not None:
            _require_digest(result.get("digest"), f"{path}.result.digest")
            _require_size(result.get("bytes"), f"{path}.result.bytes")
    fixture = document["replay"]["replay_fixture"]
    if fixture is None:
        return
    if not isinstance(fixture, dict):
        raise wrong_bundle("invalid_form", "$.replay.replay_fixture", "it is not an object")
    where = "$.replay.replay_fixture"
    for index, digest in enumerate(_listed(fixture, "message_digests", where)):
        _require_digest(digest, f"{where}.message_digests[{index}]")
    for index, result in enumerate(_listed(fixture, "tool_results", where)):
        path = f"{where}.tool_results[{index}]"
        if not isinstance(result, dict):
            raise wrong_bundle("invalid_form", path, "a result is not well formed")
        for name in ("args_hash", "result_digest"):
            _require_digest(result.get(name), f"{path}.{name}")


def _require_digest(value: object, path: str) -> None:
    if value is not None and not is_digest(value):
        raise wrong_bundle("invalid_digest", path, "a digest is not well formed")


def _require_size(value: object, path: str) -> None:
    if value is not None and (type(value) is not int or value < 0):
        raise wrong_bundle("invalid_size", path, "a size is not well formed")


def _listed(section: Document, name: str, path: str) -> list[Any]:
    found = section.get(name)
    if not isinstance(found, list):
        raise wrong_bundle("invalid_form", f"{path}.{name}", "a list is missing")
    return found


def _require_event(event: Any, path: str, now: datetime) -> None:
    fits = isinstance(event, dict) and all(isinstance(event.get(key), str) for key in ("id", "kind", "visibility"))
    if not fits or not event["kind"].strip() or not isinstance(event.get("metadata", {}), dict):
        raise wrong_bundle("invalid_form", path, "an event is not well formed")
    _require_time(event.get("at"), f"{path}.at", now)
    if is_message_event(event) and "message" in event:
        _require_message(event["message"], f"{path}.message")


def is_message_event(event: Mapping[str, Any]) -> bool:
    return event.get("kind") in ("message", "tool_result")


def _require_message(message: Any, path: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"].strip():
        raise wrong_bundle("invalid_form", path, "a message needs a role")


def _require_place(place: Any, events: list[Any], path: str) -> None:
    """The place of a message in the window: the index of its event, or none if a compaction inserted the message."""
    at = place.get("event", False) if isinstance(place, dict) else False
    is_event = type(at) is int and 0 <= at < len(events) and is_message_event(events[at])
    if not isinstance(place, dict) or not isinstance(place.get("id"), str) or not (at is None or is_event):
        raise wrong_bundle("invalid_form", path, "a place is not well formed")


def _require_time(value: Any, path: str, now: datetime) -> None:
    try:
        fits = isinstance(value, str) and _TIME.match(value) and parse_timestamp(value) <= now.astimezone(UTC) + _AHEAD
    except ValueError:
        fits = False
    if not fits:
        raise wrong_bundle("invalid_form", path, "a time is not well formed, or lies in the future")


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
        _require_size(blob.get("size"), path)
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
        raise wrong_bundle("invalid_digest", path, "a digest is not well formed")
    if blob.get("body") is None:
        return None
    try:
        return b64decode(blob["body"], validate=True)
    except (NotBase64, TypeError, ValueError):
        raise wrong_bundle("invalid_form", path, "a body is not base64") from None


def wrong_bundle(problem: str, path: str, words: str) -> MulliganError:
    return fault("invalid_bundle", f"This bundle cannot be imported: {words} ({path}).", problem=problem, path=path)
