"""Slices every session knows: what an agent works on (STATE), can compute again (CACHE), and did (LOG)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from mulligan.session.slices import SlicePolicy
from mulligan.session.types import TYPES
from mulligan.values.plain import plain

V = TypeVar("V")

StepStatus = Literal["pending", "in_progress", "done", "blocked"]
PlanStatus = Literal["active", "completed", "abandoned"]
Visibility = Literal["full", "summary", "hidden"]

UPDATE_PLAN = "update_plan"
"""The tool by which a model says what it is about."""
_UNDONE = "(The call was undone: it was not committed.)"


@plain(slots=True, frozen=True)
class PlanStep:
    title: str
    status: StepStatus = "pending"
    step_id: int = 0


@dataclass(slots=True, frozen=True)
class Plan:
    """What the agent is about, step by step."""

    objective: str
    status: PlanStatus = "active"
    steps: tuple[PlanStep, ...] = ()


@dataclass(slots=True, frozen=True)
class VisibilityOverrides:
    """Which sections of the prompt are shown otherwise than by default."""

    overrides: Mapping[str, Visibility] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class WorkspaceDigest:
    """A summary of some part of the workspace; stale as soon as files go back, so it is a cache."""

    section_key: str
    body: str
    summary: str = ""


@dataclass(slots=True, frozen=True)
class ToolResult(Generic[V]):
    """What a tool says. With `success` false the call never happened, but for its entry in the log."""

    message: str
    value: V | None = None
    success: bool = True


@dataclass(slots=True, frozen=True)
class ToolInvoked:
    """A tool was called, whatever came of it. `result.value` of a failed call is not kept, and long texts are cut:
    the transcript, and the record of what was done to files, have them whole."""

    name: str
    params: Mapping[str, Any]
    result: ToolResult[Any]
    created_at: datetime
    call_id: str = ""
    prompt_name: str = ""
    adapter: str = ""
    rendered_output: str = ""

    def as_undone(self) -> ToolInvoked:
        """What the log says if the call, or one that it was a part of, is undone after the tool had succeeded."""
        if not self.result.success:
            return self
        return replace(self, result=ToolResult(f"{self.result.message} {_UNDONE}".lstrip(), None, success=False))


@dataclass(slots=True, frozen=True)
class PromptRendered:
    """A prompt as it went to the model. A log entry: it stays when a call is taken back."""

    prompt_name: str
    rendered_prompt: str
    created_at: datetime
    adapter: str = ""


@dataclass(slots=True, frozen=True)
class PromptExecuted:
    """What came of a prompt, once the model was done. A log entry."""

    prompt_name: str
    result: Any
    created_at: datetime
    adapter: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)


DEFAULT_POLICIES: Mapping[type[Any], SlicePolicy] = MappingProxyType(
    {
        Plan: SlicePolicy.STATE,
        VisibilityOverrides: SlicePolicy.STATE,
        WorkspaceDigest: SlicePolicy.CACHE,
        ToolInvoked: SlicePolicy.LOG,
        PromptRendered: SlicePolicy.LOG,
        PromptExecuted: SlicePolicy.LOG,
    }
)

for _kind in (*DEFAULT_POLICIES, ToolResult, PlanStep):
    TYPES.register(_kind, f"mulligan:{_kind.__name__}")
