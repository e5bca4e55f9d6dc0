"""Everything a coding agent does to files and to its own state, as a transaction: atomic, recorded, undoable.

The public Python API. Importing this loads nothing else; each name is fetched from its room when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing it would cost more than all the rest here

if TYPE_CHECKING:
    from mulligan import tokens as tokens
    from mulligan.agents.coding import coding_tools as coding_tools
    from mulligan.agents.loop import Bounds as Bounds
    from mulligan.agents.main_loop import MainLoop as MainLoop
    from mulligan.agents.main_loop import TranscriptState as TranscriptState
    from mulligan.agents.runner import ToolExecutionOutcome as ToolExecutionOutcome
    from mulligan.agents.runner import ToolRunner as ToolRunner
    from mulligan.agents.runner import tool_execution as tool_execution
    from mulligan.agents.tools import ProviderToolCall as ProviderToolCall
    from mulligan.agents.tools import Tool as Tool
    from mulligan.agents.tools import ToolContext as ToolContext
    from mulligan.agents.tools import tool as tool
    from mulligan.effects.receipt import Receipt as Receipt
    from mulligan.effects.replaying import ReplayRunner as ReplayRunner
    from mulligan.effects.session import DurableSession as DurableSession
    from mulligan.history.checkpoint import CheckpointStore as CheckpointStore
    from mulligan.history.checkpoint import ToolCheckpoint as ToolCheckpoint
    from mulligan.history.checkpoint import rollback_to_tool as rollback_to_tool
    from mulligan.history.composite import CompositeSnapshot as CompositeSnapshot
    from mulligan.history.composite import ExecutionState as ExecutionState
    from mulligan.looping import agent_loop as agent_loop
    from mulligan.opening import Mulligan as Mulligan
    from mulligan.opening import open as open
    from mulligan.session.bus import EventBus as EventBus
    from mulligan.session.known import Plan as Plan
    from mulligan.session.known import PromptExecuted as PromptExecuted
    from mulligan.session.known import PromptRendered as PromptRendered
    from mulligan.session.known import ToolInvoked as ToolInvoked
    from mulligan.session.known import ToolResult as ToolResult
    from mulligan.session.known import VisibilityOverrides as VisibilityOverrides
    from mulligan.session.known import WorkspaceDigest as WorkspaceDigest
    from mulligan.session.resources import BudgetSnapshot as BudgetSnapshot
    from mulligan.session.resources import BudgetTracker as BudgetTracker
    from mulligan.session.resources import Lazy as Lazy
    from mulligan.session.resources import ResourceRegistry as ResourceRegistry
    from mulligan.session.resources import Snapshotable as Snapshotable
    from mulligan.session.slices import SlicePolicy as SlicePolicy
    from mulligan.session.slices import append_all as append_all
    from mulligan.session.slices import reducer as reducer
    from mulligan.session.slices import replace_latest as replace_latest
    from mulligan.session.slices import upsert_by as upsert_by
    from mulligan.session.snapshot import Snapshot as Snapshot
    from mulligan.session.snapshot import SnapshotMetadata as SnapshotMetadata
    from mulligan.session.state import Session as Session
    from mulligan.session.state import SessionSnapshotAdapter as SessionSnapshotAdapter
    from mulligan.session.types import register_type as register_type
    from mulligan.values.clock import Clock as Clock
    from mulligan.values.clock import FixedClock as FixedClock
    from mulligan.values.clock import SystemClock as SystemClock
    from mulligan.values.faults import AskedWrongly as AskedWrongly
    from mulligan.values.faults import Broken as Broken
    from mulligan.values.faults import Family as Family
    from mulligan.values.faults import MayNot as MayNot
    from mulligan.values.faults import MulliganError as MulliganError
    from mulligan.values.faults import WorldChanged as WorldChanged
    from mulligan.values.state_faults import DeadlineExceededError as DeadlineExceededError
    from mulligan.values.state_faults import ExecutionStateError as ExecutionStateError
    from mulligan.values.state_faults import PromptEvaluationError as PromptEvaluationError
    from mulligan.values.state_faults import RestoreFailedError as RestoreFailedError
    from mulligan.values.state_faults import SnapshotMismatchError as SnapshotMismatchError
    from mulligan.values.state_faults import ToolValidationError as ToolValidationError
    from mulligan.values.state_faults import VisibilityExpansionRequired as VisibilityExpansionRequired
    from mulligan.workspace.filesystem import Filesystem as Filesystem
    from mulligan.workspace.filesystem import FilesystemSnapshot as FilesystemSnapshot
    from mulligan.workspace.filesystem import SnapshotableFilesystem as SnapshotableFilesystem
    from mulligan.workspace.host_filesystem import HostFilesystem as HostFilesystem
    from mulligan.workspace.memory_filesystem import InMemoryFilesystem as InMemoryFilesystem

_ROOMS = {
    "mulligan.agents.coding": ("coding_tools",),
    "mulligan.agents.loop": ("Bounds",),
    "mulligan.effects.receipt": ("Receipt",),
    "mulligan.effects.replaying": ("ReplayRunner",),
    "mulligan.effects.session": ("DurableSession",),
    "mulligan.looping": ("agent_loop",),
    "mulligan.opening": ("Mulligan", "open"),
    "mulligan.agents.main_loop": ("MainLoop", "TranscriptState"),
    "mulligan.agents.runner": ("ToolExecutionOutcome", "ToolRunner", "tool_execution"),
    "mulligan.agents.tools": ("ProviderToolCall", "Tool", "ToolContext", "tool"),
    "mulligan.history.checkpoint": ("CheckpointStore", "ToolCheckpoint", "rollback_to_tool"),
    "mulligan.history.composite": ("CompositeSnapshot", "ExecutionState"),
    "mulligan.session.bus": ("EventBus",),
    "mulligan.session.known": (
        "Plan",
        "PromptExecuted",
        "PromptRendered",
        "ToolInvoked",
        "ToolResult",
        "VisibilityOverrides",
        "WorkspaceDigest",
    ),
    "mulligan.session.resources": ("BudgetSnapshot", "BudgetTracker", "Lazy", "ResourceRegistry", "Snapshotable"),
    "mulligan.session.slices": ("SlicePolicy", "append_all", "reducer", "replace_latest", "upsert_by"),
    "mulligan.session.snapshot": ("Snapshot", "SnapshotMetadata"),
    "mulligan.session.state": ("Session", "SessionSnapshotAdapter"),
    "mulligan.session.types": ("register_type",),
    "mulligan.values.state_faults": (
        "DeadlineExceededError",
        "ExecutionStateError",
        "PromptEvaluationError",
        "RestoreFailedError",
        "SnapshotMismatchError",
        "ToolValidationError",
        "VisibilityExpansionRequired",
    ),
    "mulligan.workspace.filesystem": ("Filesystem", "FilesystemSnapshot", "SnapshotableFilesystem"),
    "mulligan.workspace.host_filesystem": ("HostFilesystem",),
    "mulligan.workspace.memory_filesystem": ("InMemoryFilesystem",),
    "mulligan.values.clock": ("Clock", "FixedClock", "SystemClock"),
    "mulligan.values.faults": ("AskedWrongly", "Broken", "Family", "MayNot", "MulliganError", "WorldChanged"),
}
_MODULES = ("tokens",)
_HOME_OF = {name: room for room, names in _ROOMS.items() for name in names}

_PUBLIC = sorted([*_HOME_OF, *_MODULES])

__all__ = [name for name in _PUBLIC if name != "open"]  # a star import must not replace Python's own `open`


def __getattr__(name: str) -> object:
    room = _HOME_OF.get(name)
    if room is None and name not in _MODULES:
        raise AttributeError(f"module 'mulligan' has no attribute {name!r}")
    from importlib import import_module

    if room is None:
        return import_module(f"mulligan.{name}")
    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
