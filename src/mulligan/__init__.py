"""Everything a coding agent does to files and to its own state, as a transaction: atomic, recorded, undoable.

This module is the public Python API. Importing it loads nothing else; Python imports each name from its module when a
program uses it first. Read `docs/architecture.md` first; `api` has `open` and the class `Mulligan`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing it would cost more than all the rest here

if TYPE_CHECKING:
    from mulligan import tokens as tokens
    from mulligan.agents.coding_tools import coding_tools as coding_tools
    from mulligan.agents.loop import Bounds as Bounds
    from mulligan.agents.loop import MainLoop as MainLoop
    from mulligan.agents.loop import TranscriptState as TranscriptState
    from mulligan.agents.runner import ToolExecutionOutcome as ToolExecutionOutcome
    from mulligan.agents.runner import ToolRunner as ToolRunner
    from mulligan.agents.runner import tool_execution as tool_execution
    from mulligan.agents.tools import ProviderToolCall as ProviderToolCall
    from mulligan.agents.tools import Tool as Tool
    from mulligan.agents.tools import ToolContext as ToolContext
    from mulligan.agents.tools import tool as tool
    from mulligan.api import Mulligan as Mulligan
    from mulligan.api import agent_loop as agent_loop
    from mulligan.api import open as open
    from mulligan.effects.receipt import Receipt as Receipt
    from mulligan.effects.replay_runner import ReplayRunner as ReplayRunner
    from mulligan.effects.session import DurableSession as DurableSession
    from mulligan.files.filesystems import Filesystem as Filesystem
    from mulligan.files.filesystems import FilesystemSnapshot as FilesystemSnapshot
    from mulligan.files.filesystems import HostFilesystem as HostFilesystem
    from mulligan.files.filesystems import InMemoryFilesystem as InMemoryFilesystem
    from mulligan.files.filesystems import SnapshotableFilesystem as SnapshotableFilesystem
    from mulligan.history.checkpoint import CheckpointStore as CheckpointStore
    from mulligan.history.checkpoint import CompositeSnapshot as CompositeSnapshot
    from mulligan.history.checkpoint import ExecutionState as ExecutionState
    from mulligan.history.checkpoint import ToolCheckpoint as ToolCheckpoint
    from mulligan.history.checkpoint import rollback_to_tool as rollback_to_tool
    from mulligan.session.state.resources import BudgetSnapshot as BudgetSnapshot
    from mulligan.session.state.resources import BudgetTracker as BudgetTracker
    from mulligan.session.state.resources import Lazy as Lazy
    from mulligan.session.state.resources import ResourceRegistry as ResourceRegistry
    from mulligan.session.state.resources import Snapshotable as Snapshotable
    from mulligan.session.state.session import Session as Session
    from mulligan.session.state.session import SessionSnapshotAdapter as SessionSnapshotAdapter
    from mulligan.session.state.session import Snapshot as Snapshot
    from mulligan.session.state.session import SnapshotMetadata as SnapshotMetadata
    from mulligan.session.state.slices import Plan as Plan
    from mulligan.session.state.slices import PromptExecuted as PromptExecuted
    from mulligan.session.state.slices import PromptRendered as PromptRendered
    from mulligan.session.state.slices import SlicePolicy as SlicePolicy
    from mulligan.session.state.slices import ToolInvoked as ToolInvoked
    from mulligan.session.state.slices import ToolResult as ToolResult
    from mulligan.session.state.slices import VisibilityOverrides as VisibilityOverrides
    from mulligan.session.state.slices import WorkspaceDigest as WorkspaceDigest
    from mulligan.session.state.slices import append_all as append_all
    from mulligan.session.state.slices import reducer as reducer
    from mulligan.session.state.slices import replace_latest as replace_latest
    from mulligan.session.state.slices import upsert_by as upsert_by
    from mulligan.session.state.types import register_type as register_type
    from mulligan.session.subscribers import EventBus as EventBus
    from mulligan.values.clock import Clock as Clock
    from mulligan.values.clock import FixedClock as FixedClock
    from mulligan.values.clock import SystemClock as SystemClock
    from mulligan.values.errors import ConflictError as ConflictError
    from mulligan.values.errors import DeadlineExceededError as DeadlineExceededError
    from mulligan.values.errors import ExecutionStateError as ExecutionStateError
    from mulligan.values.errors import Family as Family
    from mulligan.values.errors import ForbiddenError as ForbiddenError
    from mulligan.values.errors import InternalError as InternalError
    from mulligan.values.errors import MulliganError as MulliganError
    from mulligan.values.errors import PromptEvaluationError as PromptEvaluationError
    from mulligan.values.errors import RequestError as RequestError
    from mulligan.values.errors import RestoreFailedError as RestoreFailedError
    from mulligan.values.errors import SnapshotMismatchError as SnapshotMismatchError
    from mulligan.values.errors import ToolValidationError as ToolValidationError
    from mulligan.values.errors import VisibilityExpansionRequired as VisibilityExpansionRequired

_NAMES_IN = {
    "mulligan.agents.coding_tools": "coding_tools",
    "mulligan.agents.loop": "Bounds MainLoop TranscriptState",
    "mulligan.agents.runner": "ToolExecutionOutcome ToolRunner tool_execution",
    "mulligan.agents.tools": "ProviderToolCall Tool ToolContext tool",
    "mulligan.api": "Mulligan agent_loop open",
    "mulligan.effects.receipt": "Receipt",
    "mulligan.effects.replay_runner": "ReplayRunner",
    "mulligan.effects.session": "DurableSession",
    "mulligan.files.filesystems": (
        "Filesystem FilesystemSnapshot HostFilesystem InMemoryFilesystem SnapshotableFilesystem"
    ),
    "mulligan.history.checkpoint": "CheckpointStore CompositeSnapshot ExecutionState ToolCheckpoint rollback_to_tool",
    "mulligan.session.state.resources": "BudgetSnapshot BudgetTracker Lazy ResourceRegistry Snapshotable",
    "mulligan.session.state.session": "Session SessionSnapshotAdapter Snapshot SnapshotMetadata",
    "mulligan.session.state.slices": (
        "Plan PromptExecuted PromptRendered SlicePolicy ToolInvoked ToolResult VisibilityOverrides "
        "WorkspaceDigest append_all reducer replace_latest upsert_by"
    ),
    "mulligan.session.state.types": "register_type",
    "mulligan.session.subscribers": "EventBus",
    "mulligan.values.clock": "Clock FixedClock SystemClock",
    "mulligan.values.errors": (
        "ConflictError DeadlineExceededError ExecutionStateError Family ForbiddenError InternalError "
        "MulliganError PromptEvaluationError RequestError RestoreFailedError SnapshotMismatchError "
        "ToolValidationError VisibilityExpansionRequired"
    ),
}
_MODULES = ("tokens",)
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names.split()}

_PUBLIC = sorted([*_MODULE_OF, *_MODULES])

__all__ = [name for name in _PUBLIC if name != "open"]  # a star import must not replace Python's own `open`


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None and name not in _MODULES:
        raise AttributeError(f"module 'mulligan' has no attribute {name!r}")
    from importlib import import_module

    if module is None:
        return import_module(f"mulligan.{name}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
