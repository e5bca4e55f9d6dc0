"""A plan that a model keeps while it works: part of the session's state, so it goes back with the turn that made it."""

from __future__ import annotations

from dataclasses import dataclass

from mulligan.agents.tools import Tool, ToolContext
from mulligan.session.known import UPDATE_PLAN, Plan, PlanStep, StepStatus


@dataclass(frozen=True)
class Step:
    title: str
    status: StepStatus = "pending"


def update_plan(steps: list[Step], context: ToolContext, objective: str = "") -> str:
    """Say what you are going to do, step by step, and how far you are.

    Give the whole plan each time, with at most one step in progress. Worth it for work of several steps.
    """
    numbered = tuple(PlanStep(step.title, step.status, number) for number, step in enumerate(steps, 1))
    is_done = bool(steps) and all(step.status == "done" for step in steps)
    context.session.broadcast(Plan(objective, "completed" if is_done else "active", numbered))
    return "The plan is noted."


PLANNING: Tool[object, object] = Tool(UPDATE_PLAN, str(update_plan.__doc__), update_plan)
