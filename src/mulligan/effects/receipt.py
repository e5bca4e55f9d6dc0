"""Receipts: the recorded outcome of one effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.values.digest import Digest
from mulligan.values.errors import Refused
from mulligan.values.limits import PREVIEW_BYTES
from mulligan.values.text import in_base64, legible

_FIELDS_TEXT = """
applied attribution blob bundle cache_hint call_id changed_paths changes claimed_by content count coverage created
current_digest deleted diff digest ended_at_ns engine entries eol error error_code error_message errors exec_id exists
exit_code expires_at_ns files_changed files_searched fingerprint is_dir lease_id manifest_stats match_count matches
mode moved moved_paths mtime_ns new_mtime_ns offset_bytes path paths race_window range rejects removed_paths
replacements rescued result running sandbox session_id sha256 signal size size_bytes skipped snapshot_id started_at_ns
stderr stdout strategy strategy_reason summary_text total truncated withheld written_bytes
"""
FIELDS = frozenset(_FIELDS_TEXT.split())
"""The fields that receipts of the documented effects and tools can have, besides `status`."""


class Receipt:
    """The outcome of an effect: `status` and the effect's own fields as attributes.

    A field of another effect, or one that this receipt does not need, is None. A name that no receipt has raises
    AttributeError. A failure always has an `error_code` and an `error_message`.
    """

    __slots__ = ("_fields", "effect", "status")

    def __init__(self, effect: str, status: str, fields: Mapping[str, Any]) -> None:
        self.effect = effect
        self.status = status
        self._fields = dict(fields)
        if None in self._fields.values():
            self._fields = {name: value for name, value in fields.items() if value is not None}

    @property
    def ok(self) -> bool:
        """Whether the effect succeeded."""
        return self.status in ("ok", "ready", "signaled")

    @property
    def text(self) -> str | None:
        """The text of the answer: a file's text, the matches of a search, or a command's standard output.

        None if there is none, if it is not text, or if it is too long to be inline; then it is a blob to page through.
        """
        payloads = (self._fields.get(name) for name in ("content", "matches", "paths", "entries", "stdout"))
        found = next((one for one in payloads if one is not None), None)
        return "" if found is None and "exit_code" in self._fields else text_of(found)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._fields or name in FIELDS:
            return self._fields.get(name)
        raise AttributeError(f"No receipt has a field {name!r}; this one has: {', '.join(self.to_dict())}.")

    def to_dict(self) -> dict[str, Any]:
        """Every field, as it is recorded and sent."""
        return {"status": self.status, **self._fields}

    def __repr__(self) -> str:
        return f"Receipt({self.effect}, {self.to_dict()})"


def refusal_receipt(effect: str, refused: Refused) -> Receipt:
    fields = {**refused.fields, "error_code": refused.code, "error_message": legible(refused.message)}
    return Receipt(effect, refused.status, fields)


def snapshot_tool_receipt(tool: str, body: Mapping[str, Any], *, failed: bool) -> Receipt:
    """The answer of a snapshot or workspace tool: its own fields, and on failure the code and message of its error."""
    if not failed:
        return Receipt(tool, "ok", body)
    error = body.get("error", {"code": "REJECTED", "message": "The patch does not apply; `rejects` says where."})
    return Receipt(tool, "error", {**body, "error_code": error["code"], "error_message": error["message"]})


def inline_text(text: str) -> dict[str, Any]:
    return {"inline_text": {"text": text}}


def inline_bytes(data: bytes) -> dict[str, Any]:
    return {"inline_bytes": {"bytes": in_base64(data)}}


def inline(data: bytes, *, text: bool | None = None) -> dict[str, Any]:
    """The data as text if it is UTF-8, unless `text` is false."""
    if text is False:
        return inline_bytes(data)
    try:
        return inline_text(data.decode("utf-8"))
    except UnicodeDecodeError:
        return inline_bytes(data)


def blob_payload(digest: Digest, data: bytes, *, preview: bool = True) -> dict[str, Any]:
    body: dict[str, Any] = {"blob_ref": digest, "size_bytes": len(data)}
    if preview:
        body["preview_bytes"] = in_base64(data[:PREVIEW_BYTES])
    return {"blob": body}


def text_of(payload: Mapping[str, Any] | None) -> str | None:
    """The text of an inline payload, for people and tests."""
    return None if not payload or "inline_text" not in payload else str(payload["inline_text"]["text"])
