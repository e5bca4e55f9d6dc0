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


@dataclass(slots=True, frozen=True, kw_only=True)
class SnapshotTool:
    """`name` is S2's, with a dot. `op`: what a session must be allowed to do for it.

    `answers` are the fields of a success, by its cache hint.
    """

    name: str
    act: Act
    op: FsOp
    params: type[Params]
    answers: Answers
    about: str

    @property
    def read_only(self) -> bool:
        return self.op not in ("write", "patch")


def _immutable(fields: type[StrictModel]) -> Answers:
    return {"immutable": fields}


def _worktree(fields: type[StrictModel]) -> Answers:
    return {"until_dirty": fields}


def _hybrid(fields: type[StrictModel]) -> Answers:
    return _immutable(fields) | _worktree(fields)


TOOLS: tuple[SnapshotTool, ...] = (
    SnapshotTool(
        name="snapshot.create",
        act=read.create,
        op="read",
        params=models.CreateParams,
        answers=_immutable(models.CreateAnswer),
        about="Capture files as an immutable snapshot: the given paths, or everything read under a lease.",
    ),
    SnapshotTool(
        name="snapshot.list",
        act=read.list_entries,
        op="list",
        params=models.ListParams,
        answers=_hybrid(models.ListAnswer),
        about="List a directory of the live tree or of a snapshot.",
    ),
    SnapshotTool(
        name="snapshot.file",
        act=read.read_file,
        op="read",
        params=models.FileParams,
        answers=_hybrid(models.FileAnswer),
        about="Read a file of the live tree or of a snapshot.",
    ),
    SnapshotTool(
        name="snapshot.grep",
        act=read.grep,
        op="search",
        params=models.GrepParams,
        answers=_hybrid(models.GrepAnswer),
        about="Search file contents by regular expression.",
    ),
    SnapshotTool(
        name="snapshot.diff",
        act=read.diff,
        op="read",
        params=models.DiffParams,
        answers=_hybrid(models.DiffAnswer),
        about="Show changes as a unified diff that can be applied.",
    ),
    SnapshotTool(
        name="snapshot.changes",
        act=read.changes,
        op="read",
        params=models.ChangesParams,
        answers=_immutable(models.ChangesAnswer),
        about="List which files a snapshot has added, modified or deleted.",
    ),
    SnapshotTool(
        name="snapshot.info",
        act=read.info,
        op="stat",
        params=models.InfoParams,
        answers=_immutable(models.InfoAnswer),
        about="Say what a snapshot is of and how large it is.",
    ),
    SnapshotTool(
        name="snapshot.export",
        act=read.export,
        op="read",
        params=models.ExportParams,
        answers=_hybrid(models.ExportAnswer),
        about="Export files as a tar archive with reproducible bytes.",
    ),
    SnapshotTool(
        name="workspace.apply_patch",
        act=write.apply_patch,
        op="patch",
        params=models.PatchParams,
        answers={"immutable": models.PatchedSnapshotAnswer, "until_dirty": models.PatchAnswer},
        about="Apply a unified diff exactly as it says, all files or none, to the live tree or to a snapshot.",
    ),
    SnapshotTool(
        name="workspace.write_file",
        act=write.write_file,
        op="write",
        params=models.WriteParams,
        answers=_worktree(models.WriteAnswer),
        about="Write a file. The change can be undone.",
    ),
    SnapshotTool(
        name="workspace.delete",
        act=write.delete,
        op="write",
        params=models.DeleteParams,
        answers=_worktree(models.DeleteAnswer),
        about="Delete a file, link or directory. The change can be undone.",
    ),
)

BY_NAME: Mapping[str, SnapshotTool] = {name: one for one in TOOLS for name in (one.name, one.name.replace(".", "_"))}


@fast_dataclass(slots=True, frozen=True)
class ToolOutcome:
    """What a tool answered. `call_id` is its call in the journal, if it changed something."""

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
