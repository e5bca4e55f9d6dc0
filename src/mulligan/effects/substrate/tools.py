"""The eleven tools in one table, and the way of every request to one of them: check, act, check the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mulligan.boundary.capability import FsOp
from mulligan.effects.substrate import capturing, comparing, patching, reading, writing
from mulligan.effects.substrate.bench import Ask, Bench, Named
from mulligan.effects.substrate.failure import Failure, failure_of
from mulligan.effects.substrate.schemas import INPUTS, OUTPUTS, Schema, defaults_of
from mulligan.effects.substrate.shapes import misfit, with_whole_numbers
from mulligan.values.faults import MulliganError
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.lease import StaleLease, UnknownLease

Act = Callable[[Ask, Mapping[str, Any]], dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Tool:
    """`name` is S2's, with a dot. `op`: what a session must be allowed to do for it."""

    name: str
    act: Act
    op: FsOp
    about: str

    @property
    def read_only(self) -> bool:
        return self.op not in ("write", "patch")

    @property
    def input(self) -> Schema:
        return INPUTS[self.name]

    @property
    def output(self) -> Schema:
        return OUTPUTS[self.name]


TOOLS: tuple[Tool, ...] = (
    Tool(
        "snapshot.create",
        capturing.create,
        "read",
        "Capture files as an immutable snapshot: the given paths, or everything read under a lease.",
    ),
    Tool("snapshot.list", reading.list_entries, "list", "List a directory of the live tree or of a snapshot."),
    Tool("snapshot.file", reading.read_file, "read", "Read a file of the live tree or of a snapshot."),
    Tool("snapshot.grep", reading.grep, "search", "Search file contents by regular expression."),
    Tool("snapshot.diff", comparing.diff, "read", "Show changes as a unified diff that can be applied."),
    Tool("snapshot.changes", comparing.changes, "read", "List which files a snapshot has added, modified or deleted."),
    Tool("snapshot.info", comparing.info, "stat", "Say what a snapshot is of and how large it is."),
    Tool("snapshot.export", reading.export, "read", "Export files as a tar archive with reproducible bytes."),
    Tool(
        "workspace.apply_patch",
        patching.apply_patch,
        "patch",
        "Apply a unified diff exactly as it says, all files or none, to the live tree or to a snapshot.",
    ),
    Tool("workspace.write_file", writing.write_file, "write", "Write a file. The change can be undone."),
    Tool("workspace.delete", writing.delete, "write", "Delete a file, link or directory. The change can be undone."),
)

BY_NAME: Mapping[str, Tool] = {name: one for one in TOOLS for name in (one.name, one.name.replace(".", "_"))}


@plain(slots=True, frozen=True)
class Outcome:
    """What a tool answered. `call_id` is its call in the journal, if it changed something."""

    body: dict[str, Any]
    is_error: bool
    call_id: str | None = None


def run_tool(bench: Bench, tool: Tool, given: Mapping[str, Any], named: Named) -> Outcome:
    """One request. Every failure is an answer too; only what is broken in our own code raises."""
    ask: Ask | None = None
    given = with_whole_numbers(given)
    try:
        wrong = misfit(given, tool.input)
        if wrong is not None:
            raise Failure("INVALID_ARGUMENT", f"{wrong}.")
        ask = Ask.of(bench, tool.name, named, op=tool.op)
        body = tool.act(ask, {**defaults_of(tool.input), **given})
    except (Failure, StaleLease, UnknownLease, Refused, MulliganError, OSError) as error:
        body = failure_of(error).envelope()
    checked = _checked(tool, body)
    failed = "error" in checked or bool(checked.get("rejects"))
    return Outcome(checked, failed, None if ask is None or failed else ask.call_id)


def _checked(tool: Tool, body: dict[str, Any]) -> dict[str, Any]:
    """Answers keep their promise, the constant hints included, or say that they do not."""
    wrong = misfit(body, tool.output)
    if wrong is None:
        return body
    return Failure("INTERNAL", f"{tool.name} made an answer that is not of its own shape: {wrong}.").envelope()
