"""S2's eleven tools in one table, and the path of a request to one of them: check, act, check the answer.

An answer is a success or S2's error envelope. A success is immutable, or of the live tree; a hybrid tool has one shape
for each, and its `cache_hint` says which. `models.py` declares parameters and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mulligan.boundary.capability import FsOp
from mulligan.effects.params import Params, StrictModel, built, first_problem, parsed_exactly
from mulligan.effects.snapshot_tools import models, read, write
from mulligan.effects.snapshot_tools.context import RequestInfo, SnapshotContext, ToolRequest
from mulligan.effects.snapshot_tools.store import SnapshotToolError, failure_of
from mulligan.files.snapshot.lease import StaleLeaseError, UnknownLeaseError
from mulligan.values.errors import MulliganError, Refused
from mulligan.values.fast_dataclass import fast_dataclass

Act = Callable[[ToolRequest, Any], dict[str, Any]]
Answers = dict[models.CacheHint, type[StrictModel]]


@dataclass(slots=True, frozen=True)
class SnapshotTool:
    """`name` is S2's, with a dot. `op`: what a session must be allowed to do for it.

    `answers` are the fields of a success, by its cache hint.
    """

    name: str
    act: Act
    op: FsOp
    params: type[Params]
    answers: Answers

    @property
    def about(self) -> str:
        return self.params.about

    @property
    def read_only(self) -> bool:
        return self.op not in ("write", "patch")


def _hybrid(fields: type[StrictModel]) -> Answers:
    return {"immutable": fields, "until_dirty": fields}


TOOLS: tuple[SnapshotTool, ...] = (
    SnapshotTool("snapshot.create", read.create, "read", models.CreateParams, {"immutable": models.CreateAnswer}),
    SnapshotTool("snapshot.list", read.list_entries, "list", models.ListParams, _hybrid(models.ListAnswer)),
    SnapshotTool("snapshot.file", read.read_file, "read", models.FileParams, _hybrid(models.FileAnswer)),
    SnapshotTool("snapshot.grep", read.grep, "search", models.GrepParams, _hybrid(models.GrepAnswer)),
    SnapshotTool("snapshot.diff", read.diff, "read", models.DiffParams, _hybrid(models.DiffAnswer)),
    SnapshotTool("snapshot.changes", read.changes, "read", models.ChangesParams, {"immutable": models.ChangesAnswer}),
    SnapshotTool("snapshot.info", read.info, "stat", models.InfoParams, {"immutable": models.InfoAnswer}),
    SnapshotTool("snapshot.export", read.export, "read", models.ExportParams, _hybrid(models.ExportAnswer)),
    SnapshotTool(
        "workspace.apply_patch",
        write.apply_patch,
        "patch",
        models.PatchParams,
        {"immutable": models.PatchedSnapshotAnswer, "until_dirty": models.PatchAnswer},
    ),
    SnapshotTool(
        "workspace.write_file", write.write_file, "write", models.WriteParams, {"until_dirty": models.WriteAnswer}
    ),
    SnapshotTool("workspace.delete", write.delete, "write", models.DeleteParams, {"until_dirty": models.DeleteAnswer}),
)

BY_NAME: Mapping[str, SnapshotTool] = {name: one for one in TOOLS for name in (one.name, one.name.replace(".", "_"))}


@fast_dataclass(slots=True, frozen=True)
class ToolOutcome:
    """The answer of a tool. `call_id` is its call in the journal, if it changed something."""

    body: dict[str, Any]
    is_error: bool
    call_id: str | None = None


def run_tool(context: SnapshotContext, tool: SnapshotTool, given: Mapping[str, Any], named: RequestInfo) -> ToolOutcome:
    """One request. Every failure is an answer too; only what is broken in our own code raises."""
    request: ToolRequest | None = None
    try:
        asked = parsed_exactly(tool.params, given)
        request = ToolRequest.of(context, tool.name, named, op=tool.op)
        body = tool.act(request, asked)
        check_answer(tool, body)
    except (SnapshotToolError, StaleLeaseError, UnknownLeaseError, Refused, MulliganError, OSError) as error:
        body = failure_of(error).envelope()
    failed = "error" in body or bool(body.get("rejects"))
    return ToolOutcome(body, failed, None if request is None or failed else request.call_id)


def check_answer(tool: SnapshotTool, body: dict[str, Any]) -> None:
    """Raises if an answer does not have the shape that the tool declares for its cache hint."""
    shapes = [models.answer_model(fields, hint) for hint, fields in tool.answers.items() if hint == body["cache_hint"]]
    try:
        problem = None if shapes else "cache_hint: the tool has no such answer"
        for shape in shapes:
            built(shape).model_validate(body)
    except ValidationError as error:
        problem = first_problem(error, of="the answer")
    if problem is not None:
        raise SnapshotToolError("INTERNAL", f"{tool.name} made an answer of another shape than it declares: {problem}.")
