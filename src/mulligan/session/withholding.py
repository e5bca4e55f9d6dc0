"""What a replay-only bundle may say: a list of what is let through, by place and form. Pure.

Everything else is withheld, whatever it is called, so a payload under a new key never passes. A key that the list does
not know is dropped without being named, because keys can be payload too. What is let through must also look like what
it claims to be: a word, an id, a time, a number, a digest. File paths become `path:1`, `path:2`, …, the same path
always the same number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mulligan.session.redaction import Redactor, step

WITHHELD = "[withheld]"
PAYLOAD = "prompt_or_tool_payload"

_WORD_FORM = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,63}\Z|\[withheld\]\Z")
_ID_FORM = re.compile(r"[A-Za-z0-9<][A-Za-z0-9_.:@#/+<>=-]{0,255}\Z|\[withheld\]\Z")
_TIME_FORM = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]{5,20}(?:Z|[+-]\d\d:\d\d)\Z")
_DIGEST_FORM = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MARK_FORM = re.compile(r"<[a-z]{1,16}(?::\d{1,6})?>\Z|\[redacted\]\Z")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that is let through if it has its form."""

    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Hidden:
    """A value that never passes. `dropped`: no text can stand for it, so its key goes too."""

    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Emptied:
    """A list or an object that must be there and of which nothing passes."""


@dataclass(frozen=True, slots=True)
class FilePath:
    """A path, which passes as a number."""


Shape: TypeAlias = "Leaf | Hidden | Emptied | FilePath | Mapping[str, Shape] | list[Shape]"


def _matching(form: re.Pattern[str]) -> Leaf:
    return Leaf(lambda value: isinstance(value, str) and form.match(value) is not None)


WORD, ID, TIME = _matching(_WORD_FORM), _matching(_ID_FORM), _matching(_TIME_FORM)
DIGEST, MARK = _matching(_DIGEST_FORM), _matching(_MARK_FORM)
NUMBER = Leaf(lambda value: isinstance(value, int | float))
TEXT, DROPPED, EMPTIED, PATH = Hidden(), Hidden(dropped=True), Emptied(), FilePath()


def _each(shape: Shape, names: str) -> dict[str, Shape]:
    """Several members of one shape."""
    return dict.fromkeys(names.split(), shape)


_TOOL_CALL: Shape = {
    **_each(ID, "id call_id name"),
    **_each(TEXT, "arguments input args"),
    "type": WORD,
    "index": NUMBER,
    "function": {"name": ID, "arguments": TEXT},
}
_BLOCK: Shape = {
    **_each(WORD, "type visibility"),
    **_each(ID, "id tool_use_id name"),
    **_each(TEXT, "text input content thinking source data signature"),
    "is_error": NUMBER,
}
MESSAGE: Shape = {
    **_each(WORD, "role visibility"),
    **_each(ID, "name tool_call_id tool_use_id id messageId"),
    **_each(TEXT, "reasoning text"),
    **_each([_TOOL_CALL], "tool_calls native_tool_calls"),
    "is_error": NUMBER,
    "content": [_BLOCK],
    "metadata": {"live_session": {"client_id": ID, "mode": WORD, "source": WORD}},
}
_EVENT_FACTS: Shape = {
    **_each(WORD, "action mode reason status strategy mount_mode"),
    **_each(ID, "client_id request_id previous_controller_id active_controller_id"),
    **_each(NUMBER, "version chars archived_messages kept_messages shortened_messages"),
}
_EVENT: Shape = {
    **_each(WORD, "kind role visibility"),
    "id": ID,
    "at": TIME,
    "text": TEXT,
    "metadata": _EVENT_FACTS,
    "message": MESSAGE,
}
_SOURCE: Shape = {
    **_each(WORD, "schema kind agent"),
    "session_id": ID,
    "label": TEXT,
    "provenance": EMPTIED,
}
_FACTS: Shape = {
    **_each(TEXT, "system_prompt summary"),
    **_each(ID, "pinned_model provider model"),
    **_each(DROPPED, "scratchpad pinned_reasoning_policy"),
    "tool_format": WORD,
    "scratchpad_version": NUMBER,
    "source": _SOURCE,
}
_ENTRY: Shape = {
    **_each(NUMBER, "size mode mtime_ns"),
    "link_group": ID,
    "kind": WORD,
    "digest": DIGEST,
    "target": TEXT,
    "xattrs": DROPPED,
}
_CHANGE: Shape = {**_each(PATH, "path from origin"), "kind": WORD, "before": _ENTRY, "after": _ENTRY}
_RECEIPT: Shape = {
    **_each(WORD, "status error_code strategy sandbox"),
    **_each(NUMBER, "exit_code created written_bytes started_at_ns ended_at_ns replacements"),
}
_RECORD: Shape = {
    **_each(ID, "call session turn root workspace label tool scope by"),
    **_each(WORD, "status reason verb"),
    **_each(NUMBER, "observed wseq"),
    "prompt": TEXT,
    "cause": {"verb": WORD, "of": [ID]},
    "changes": [_CHANGE],
    "effects": [{"effect": WORD, "params": TEXT, "receipt": _RECEIPT}],
    "coverage": [{"path": PATH, "reason": WORD, "blob_ref": DIGEST}],
}
_SECTION: Shape = {
    **_each(WORD, "label scope location"),
    "id": ID,
    "summary": TEXT,
    "assets": EMPTIED,
    "messages": [MESSAGE],
    "events": [_EVENT],
    "places": [{"id": ID, "event": NUMBER}],
    "metadata": _FACTS,
}
_CALL: Shape = {
    **_each(ID, "tool_name tool_use_id call_id"),
    **_each(NUMBER, "is_rejected duration_ms iteration"),
    "args_hash": DIGEST,
    "status": WORD,
    "timestamp": TIME,
    "result": {"message": NUMBER, "digest": DIGEST, "bytes": NUMBER},
}
_RUN: Shape = {
    **_each(TIME, "started_at finished_at"),
    **_each(NUMBER, "messages events calls"),
    "session_id": ID,
    "status": WORD,
}
_REPLAY: Shape = {
    "replay_fixture": {
        "_type": WORD,
        "message_digests": [DIGEST],
        "tool_results": [{"tool_use_id": ID, "args_hash": DIGEST, "result_digest": DIGEST}],
    },
    "run_record": _RUN,
    "verification_outcomes": [{"check": WORD, "ok": NUMBER}],
    "event_log_pointers": [{"topic": ID, "events": NUMBER}],
    "transitions": [{"kind": WORD, "at": TIME, "event": NUMBER}],
    "checkpoints": [{"turn": ID, "at": TIME, "ended_at": TIME}],
    "trace_spans": [{**_each(ID, "span_id parent_id name"), **_each(WORD, "kind status"), **_each(TIME, "start end")}],
    "deterministic_events": [{"kind": WORD, "at": TIME, "payload": _RECORD}],
}
BUNDLE: Shape = {
    **_each(EMPTIED, "attachments metadata"),
    "_type": WORD,
    "schema_version": NUMBER,
    "created_at": TIME,
    "producer": {"name": WORD, "version": ID, "schema_id": ID},
    "source": {
        **_each(WORD, "kind status"),
        **_each(ID, "session_id root_session_id parent_session_id"),
        **_each(TIME, "started_at finished_at"),
        **_each(NUMBER, "child_count branched_at_event_index"),
        "task": TEXT,
    },
    "runtime": {
        **_each(EMPTIED, "metadata usage"),
        "mulligan_version": ID,
        "provider_models": [{"provider": ID, "model": ID}],
    },
    "workspace": {
        "primary": MARK,
        "anchored_at": TIME,
        "policy": WORD,
        "additional_roots": [{"path": MARK, "mount_mode": WORD, "mounted_at": TIME}],
    },
    "transcript": {"sections": [_SECTION]},
    "tools": {"schemas": EMPTIED, "calls": [_CALL]},
    "permissions": [{**_each(WORD, "kind source"), **_each(ID, "request_id agent"), "payload": TEXT}],
    "replay": _REPLAY,
    "content": {"encoding": WORD, "blobs": [{"digest": DIGEST, "size": NUMBER, "missing": NUMBER}]},
}


def _keys(shape: Shape) -> set[str]:
    if isinstance(shape, list):
        return _keys(shape[0])
    if not isinstance(shape, Mapping):
        return set()
    return set(shape) | {key for inner in shape.values() for key in _keys(inner)}


FORM_KEYS = frozenset(_keys(BUNDLE))
"""The keys that a bundle has by its form."""


@dataclass(slots=True)
class Withholder:
    """One pass over a bundle; what it does is noted in the redactor's manifest."""

    redactor: Redactor
    _numbers: dict[str, str] = field(default_factory=dict)

    def apply(self, value: Any, shape: Shape, path: str = "$") -> Any:
        if value is None:
            return None
        if isinstance(shape, FilePath):
            return self._path(value, path)
        if isinstance(shape, Leaf):
            return value if shape.fits(value) else self._withhold(value, path)
        if isinstance(shape, Mapping) and isinstance(value, Mapping):
            return self._members(value, shape, path)
        if isinstance(shape, list) and isinstance(value, Sequence) and not isinstance(value, str):
            return [self.apply(item, shape[0], f"{path}[{index}]") for index, item in enumerate(value)]
        return self._withhold(value, path)

    def _members(self, value: Mapping[str, Any], shape: Mapping[str, Shape], path: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.items():
            known = shape.get(key)
            if known is None:
                self._note(f"{path}.*")
            elif isinstance(known, Hidden) and known.dropped:
                self._note(step(path, key))
            elif isinstance(known, Emptied):
                found[key] = self._emptied(item, step(path, key))
            else:
                found[key] = self.apply(item, known, step(path, key))
        return found

    def _emptied(self, value: Any, path: str) -> Any:
        if value:
            self._note(path)
        return [] if isinstance(value, list) else {}

    def _note(self, path: str) -> None:
        self.redactor.note(path, PAYLOAD, WITHHELD, "withheld")

    def _withhold(self, value: Any, path: str) -> Any:
        if value in ("", WITHHELD):
            return value
        self._note(path)
        return WITHHELD

    def _path(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or re.fullmatch(r"path:\d+", value):
            return str(value) if isinstance(value, str) else str(self._withhold(value, path))
        shown = self._numbers.setdefault(value, f"path:{len(self._numbers) + 1}")
        self.redactor.note(path, PAYLOAD, shown, "withheld")
        return shown
