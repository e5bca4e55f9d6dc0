"""S3's `agent_loop` and `workflow_execute`, by their own names. Unknown options raise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mulligan.agents.loop import Bounds
from mulligan.looping import agent_loop as loop
from mulligan.opening import innermost
from mulligan.session.facts import fact
from mulligan.session.options import checked_options
from mulligan.session.seeding import MODEL
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

_LOOP_OPTIONS: Mapping[str, type] = {
    "session_id": str,
    "provider": str,
    "model": str,
    "max_iterations": int,
}
_STAGE_KEYS: Mapping[str, type] = {"name": str, "prompt": str, "system": str, "model_policy": dict}


def agent_loop(prompt: str, system: str | None = None, opts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Let a model work on a prompt. With `session_id` earlier talk goes first and everything said is kept under it.

    Without a provider in `opts` it is $MULLIGAN_PROVIDER, else `mock`.
    """
    chosen = checked_options("agent_loop", opts, _LOOP_OPTIONS)
    _check_said(prompt, system, chosen)
    provider = chosen.get("provider") or os.environ.get("MULLIGAN_PROVIDER") or "mock"
    model = chosen.get("model") or _seeded_model(chosen.get("session_id"), provider)
    named = provider if model is None else f"{provider}:{model}"
    bounds = Bounds(chosen["max_iterations"]) if "max_iterations" in chosen else None
    done = loop(prompt, session=chosen.get("session_id"), provider=named, system=system, bounds=bounds)
    return {**asdict(done), "provider": provider}


def _seeded_model(session: str | None, provider: str) -> str | None:
    """The model that a session file of Gemini CLI named, because `google` has no model of its own."""
    if session is None or provider != "google":
        return None
    archive = innermost().session(session).archive
    with archive.store.read() as tx:
        found = fact(tx, SessionId(session), MODEL)
    return found if isinstance(found, str) else None


def _check_said(prompt: object, system: object, chosen: Mapping[str, Any]) -> None:
    if not isinstance(prompt, str):
        raise fault("invalid_params", "A prompt is a text.", field="prompt")
    if system is not None and not isinstance(system, str):
        raise fault("invalid_params", "A system prompt is a text.", field="system")
    if chosen.get("max_iterations", 1) < 1:
        raise fault("invalid_params", "max_iterations is one or more.", field="max_iterations")


def workflow_execute(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Run stages one after the other. Those that name the same session share its talk; one that names none gets
    a session of its own, named after the workflow and the stage."""
    if isinstance(stages, str | Mapping) or not isinstance(stages, Sequence):
        raise fault("invalid_params", "The stages of a workflow are a list of objects.", field="stages")
    workflow = innermost().desk.ledger.ids.new()
    planned = [_stage(workflow, one) for one in stages]
    return {"workflow_id": workflow, "stages": [_run(**stage) for stage in planned]}


def _stage(workflow: str, stage: Mapping[str, Any]) -> dict[str, Any]:
    """Read before anything runs: a bad stage means that none of them did."""
    read = checked_options("workflow_execute", stage, _STAGE_KEYS)
    if not read.get("name") or "prompt" not in read:
        raise fault("invalid_params", "A stage has a name and a prompt.", field="stages")
    policy = checked_options("model_policy", read.get("model_policy"), _LOOP_OPTIONS)
    _check_said(read["prompt"], read.get("system"), policy)
    policy.setdefault("session_id", f"{workflow}:{read['name']}")
    return {"name": read["name"], "prompt": read["prompt"], "system": read.get("system"), "policy": policy}


def _run(name: str, prompt: str, system: str | None, policy: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, **agent_loop(prompt, system, policy)}
