"""Every effect in one table: its name, what tools call it, its parameters, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mulligan.boundary.capability import FsOp
from mulligan.effects import changes, executing, files, params, patching, searching
from mulligan.effects.scene import Scene

Act = Callable[[Scene, Any], dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Effect:
    name: str
    tool: str
    params: type[params.Params]
    op: FsOp
    act: Act
    read_only: bool
    about: str


EFFECTS: tuple[Effect, ...] = (
    Effect("host.fs.read_file", "read_file", params.ReadFile, "read", files.read_file, True, "Read a file, or a part."),
    Effect("host.fs.write_file", "write_file", params.WriteFile, "write", changes.write_file, False, "Write a file."),
    Effect(
        "host.fs.edit_file",
        "edit_file",
        params.EditFile,
        "edit",
        changes.edit_file,
        False,
        "Replace text in a file. old_string must be found exactly once, unless replace_all is set.",
    ),
    Effect(
        "host.fs.apply_patch",
        "apply_patch",
        params.ApplyPatch,
        "patch",
        patching.apply_patch,
        False,
        "Apply a patch to one or more files, all or nothing ('*** Begin Patch' format, or patch_format 'unified').",
    ),
    Effect("host.fs.grep", "grep", params.Grep, "search", searching.grep_files, True, "Search file contents by regex."),
    Effect(
        "host.fs.glob", "glob", params.Glob, "list", searching.glob_files, True, "Find files by name, newest first."
    ),
    Effect("host.fs.stat", "stat", params.Stat, "stat", files.stat_path, True, "What a path is."),
    Effect("host.fs.exists", "exists", params.Exists, "stat", files.exists, True, "Whether a path exists."),
    Effect("host.fs.list_dir", "list_dir", params.ListDir, "list", files.list_dir, True, "The names in a directory."),
    Effect("host.fs.delete", "delete", params.Delete, "write", changes.delete, False, "Delete a file or directory."),
    Effect("host.fs.move", "move", params.Move, "write", changes.move, False, "Move a file or directory."),
    Effect("host.fs.mkdir", "mkdir", params.MakeDir, "write", changes.make_dir, False, "Make a directory."),
    Effect("host.exec", "exec", params.Exec, "exec", executing.execute, False, "Run a program."),
    Effect("host.shell", "shell", params.Shell, "exec", executing.shell, False, "Run a shell command."),
    Effect("blob.read", "read_blob", params.ReadBlob, "read", files.read_blob, True, "Page through a large answer."),
)

BY_NAME: dict[str, Effect] = {name: effect for effect in EFFECTS for name in (effect.name, effect.tool)}
