"""The form of a bundle: one session as one canonical JSON document, and how a foreign one is judged. Pure.

`bundle_id` is the digest of the document without it, and nothing in the document depends on when or where it was
exported; so the same session gives the same bundle, byte for byte, and so does what was imported from it.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

from mulligan.session.redaction import refuse_survivors
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import parse_timestamp
from mulligan.values.digest import digest_of, is_digest
from mulligan.values.faults import MulliganError, fault
from mulligan.values.limits import MIB_BYTES

BUNDLE_TYPE = "mulligan_session_bundle"
SCHEMA_VERSION = 1
SCHEMA_ID = "mulligan.session_bundle.v1"
BUNDLE_MAX_BYTES = 64 * MIB_BYTES
"""A larger document is neither written nor read: it takes several times its size in memory."""

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
        raise fault("invalid_params", f"The mode of a bundle is one of {', '.join(MODES)}.", field="mode")
    return next(known for known in MODES if known == mode)


def sealed(document: Mapping[str, Any]) -> Document:
    """The document with its own id."""
    body = {key: value for key, value in document.items() if key != "bundle_id"}
    return {**body, "bundle_id": digest_of(encode(body))}


def parse_bundle(data: bytes | str | Mapping[str, Any], *, now: datetime) -> Document:
    """A bundle that may be imported, judged in this order: what must be there, the type, the version, secrets, form.

    Raises `invalid_bundle`, `unsupported_bundle_version` or `unredacted_secret`; none shows what the bundle holds.
    """
    document = _document(data)
    _require_fields(document)
    if document["_type"] != BUNDLE_TYPE:
        raise wrong_bundle("invalid_type", "$._type", f"its _type is not {BUNDLE_TYPE}")
    _require_version(document["schema_version"])
    if document["redaction"]["mode"] != "local":
        refuse_survivors(document, doing="Importing this bundle")
    _require_form(document, now)
    if sealed(document)["bundle_id"] != document["bundle_id"]:
        raise wrong_bundle("digest_mismatch", "$.bundle_id", "it was changed since it was made")
    _require_blobs(document.get("content"))
    return document


def _document(data: bytes | str | Mapping[str, Any]) -> Document:
    if not isinstance(data, Mapping):
        check_bundle_size(len(data))
    try:
        value = data if isinstance(data, Mapping) else decode(data)
        if isinstance(value, Mapping):
            # Through canonical bytes: a copy of our own, and a refusal of what has no canonical form.
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
            f"This bundle has a schema version that is not supported; 1 to {SCHEMA_VERSION} are.",
            found=shown,
            supported=SCHEMA_VERSION,
        )


def _require_form(document: Document, now: datetime) -> None:
    """What importing relies on: each thing of its kind, and times that this store can go on from."""
    if document["redaction"]["mode"] not in MODES:
        raise wrong_bundle("invalid_form", "$.redaction.mode", "its mode is not known")
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
    """What an export of the imported session relies on."""
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
    """Each digest of a call, a result or a message is one, or is left out."""
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
    """A message in force is that of one of the events, or, without one, was put in by a compaction."""
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
        raise wrong_bundle("invalid_form", path, "a time is not well formed, or lies ahead")


def _require_blobs(content: Any) -> None:
    """Every digest is one, every size is a size, and every body has the digest and the size that are given."""
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
            raise wrong_bundle("digest_mismatch", path, "a body is not what its digest says")
        if blob.get("size") not in (None, len(body)):
            raise wrong_bundle("size_mismatch", path, "a body has another size than it says")


def body_of(blob: Any, path: str = "$.content.blobs") -> bytes | None:
    """The bytes a bundle carries for a blob, if it carries them."""
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
