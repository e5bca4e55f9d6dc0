"""S3's session functions, by their own names. Each acts on the session of that id; unknown ids raise, but for four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mulligan.effects.session import Session
from mulligan.opening import innermost
from mulligan.session.active import current_id
from mulligan.session.subscribers import Callback, Subscription

Options = Mapping[str, Any] | None


def session_named(id: str, verb: str) -> Session:
    """The open session of that id, in the innermost workspace; the error names the function that was called."""
    return innermost().sessions.get(id, verb)


def agent_session_open(id: str | None = None, opts: Options = None) -> str:
    """Open or resume a session; without an id a new one gets a UUIDv7. Its id."""
    return innermost().sessions.open(id, opts).id


def agent_session_exists(id: str) -> bool:
    """Whether there is an open session of that id. Never raises for an unknown one."""
    return innermost().sessions.exists(id)


def agent_session_current_id() -> str | None:
    """The innermost session at work on this thread, or None."""
    return current_id()


def agent_session_length(id: str) -> int:
    """How many messages are in force. Raises for an unknown id."""
    return session_named(id, "agent_session_length").length()


def agent_session_snapshot(id: str) -> dict[str, Any] | None:
    """Everything about a session as one object; None for an unknown id."""
    return innermost().sessions.snapshot(id)


def agent_session_ancestry(id: str) -> dict[str, Any] | None:
    """Parent, children and root of a session; None for an unknown id."""
    return innermost().sessions.ancestry(id)


def agent_session_reset(id: str) -> None:
    """Begin the transcript anew under the same id. Raises for an unknown id."""
    session_named(id, "agent_session_reset").reset()


def agent_session_fork(src: str, dst: str | None = None) -> str:
    """A child with all of the talk, sharing the files. Its id."""
    return session_named(src, "agent_session_fork").fork(dst=dst).id


def agent_session_fork_at(src: str, keep_first: int, dst: str | None = None) -> str:
    """A child with the first messages of the talk. Its id."""
    return session_named(src, "agent_session_fork_at").fork_at(keep_first, dst)


def agent_session_scratchpad(id: str) -> dict[str, Any] | None:
    """What the agent keeps for itself; None if nothing."""
    return session_named(id, "agent_session_scratchpad").scratchpad()


def agent_session_set_scratchpad(id: str, scratchpad: Mapping[str, Any], opts: Options = None) -> dict[str, Any]:
    """Keep an object beside the talk, instead of the one before: `{ok, version, scratchpad}`."""
    return session_named(id, "agent_session_set_scratchpad").set_scratchpad(scratchpad, opts)


def agent_session_clear_scratchpad(id: str, opts: Options = None) -> dict[str, Any]:
    """Keep nothing beside the talk any more: `{ok, version, scratchpad}`."""
    return session_named(id, "agent_session_clear_scratchpad").clear_scratchpad(opts)


def agent_session_trim(id: str, keep_last: int) -> int:
    """Leave only the last messages in force. How many there are then."""
    return session_named(id, "agent_session_trim").trim(keep_last)


def agent_session_truncate(id: str, keep_first: int) -> dict[str, Any]:
    """Leave only the first messages in force, and say what was cut."""
    return session_named(id, "agent_session_truncate").truncate(keep_first)


def agent_session_compact(id: str, opts: Options = None) -> int:
    """Replace older messages by a summary. How many messages there are then; unknown options raise."""
    return session_named(id, "agent_session_compact").compact(opts)


def agent_session_inject(id: str, message: Mapping[str, Any]) -> None:
    """Append one message, which must have a role."""
    session_named(id, "agent_session_inject").inject(message)


def agent_session_close(id: str, status: str | Mapping[str, Any] | None = None) -> None:
    """End the live session and say why. Its history stays; opening it again goes on with it."""
    session_named(id, "agent_session_close").close(status)


def agent_subscribe(id: str, cb: Callback) -> Subscription:
    """Tell `cb` every event of the session from now on. Inside it, the session is the current one."""
    return session_named(id, "agent_subscribe").subscribe(cb)
