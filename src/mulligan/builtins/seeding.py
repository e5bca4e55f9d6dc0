"""S3's name for making a session from a transcript file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.opening import innermost


def agent_session_seed_from_jsonl(jsonl_path: str, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Create a session from a transcript file. `{ok, session_id?, turns_loaded?, …, error?}`."""
    return innermost().sessions.seed_from_jsonl(jsonl_path, opts)
