"""Every effect in one table: its name, what tools call it, its parameters, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mulligan.boundary.capability import FsOp
from mulligan.effects import changes, executing, files, params, patching, searching
from mulligan.effects.scene import Scene

Act = Callable[[Scene, Any], dict[str, Any]]


@dataclass(slots=True, frozen=True, kw_only=True)
class Effect:
    """`statuses` are its outcomes besides ok, forbidden and error; one of any other name is told as an error."""

    name: str
    tool: str
    params: type[params.Params]
    op: FsOp
    act: Act
    about: str
    read_only: bool = False
    statuses: tuple[str, ...] = ()


EFFECTS: tuple[Effect, ...] = (
    Effect(
        name="host.fs.read_file",
        tool="read_file",
        params=params.ReadFile,
        op="read",
        act=files.read_file,
        read_only=True,
        statuses=("not_found", "is_directory"),
        about="Read a file or a part of it, by bytes or by lines.",
    ),
    Effect(
        name="host.fs.write_file",
        tool="write_file",
        params=params.WriteFile,
        op="write",
        act=changes.write_file,
        statuses=("conflict",),
        about="Write a whole file.",
    ),
    Effect(
        name="host.fs.edit_file",
        tool="edit_file",
        params=params.EditFile,
        op="edit",
        act=changes.edit_file,
        statuses=("not_found", "ambiguous"),
        about="Replace text in a file. old_string must be found exactly once, unless replace_all is set.",
    ),
    Effect(
        name="host.fs.apply_patch",
        tool="apply_patch",
        params=params.ApplyPatch,
        op="patch",
        act=patching.apply_patch,
        statuses=("parse_error", "reject", "not_found"),
        about="Apply a patch to one or more files, all or nothing: '*** Begin Patch' format, or patch_format unified.",
    ),
    Effect(
        name="host.fs.grep",
        tool="grep",
        params=params.Grep,
        op="search",
        act=searching.grep_files,
        read_only=True,
        statuses=("not_found", "invalid_regex"),
        about="Search the contents of files by regular expression. Answers with lines of path:line:text.",
    ),
    Effect(
        name="host.fs.glob",
        tool="glob",
        params=params.Glob,
        op="list",
        act=searching.glob_files,
        read_only=True,
        statuses=("not_found", "invalid_pattern"),
        about="Find files by a pattern such as **/*.py, newest first.",
    ),
    Effect(
        name="host.fs.stat",
        tool="stat",
        params=params.Stat,
        op="stat",
        act=files.stat_answer,
        read_only=True,
        statuses=("not_found",),
        about="Whether a path is a file or a directory, its size and its time.",
    ),
    Effect(
        name="host.fs.exists",
        tool="exists",
        params=params.Exists,
        op="stat",
        act=files.exists,
        read_only=True,
        about="Whether a path exists.",
    ),
    Effect(
        name="host.fs.list_dir",
        tool="list_dir",
        params=params.ListDir,
        op="list",
        act=files.list_dir,
        read_only=True,
        statuses=("not_found",),
        about="The names in a directory, directories with a trailing slash.",
    ),
    Effect(
        name="host.fs.delete",
        tool="delete",
        params=params.Delete,
        op="write",
        act=changes.delete,
        statuses=("not_found", "conflict"),
        about="Delete a file, a link or a directory.",
    ),
    Effect(
        name="host.fs.move",
        tool="move",
        params=params.Move,
        op="write",
        act=changes.move,
        statuses=("not_found", "conflict"),
        about="Move a file, a link or a directory.",
    ),
    Effect(
        name="host.fs.mkdir",
        tool="mkdir",
        params=params.MakeDir,
        op="write",
        act=changes.make_dir,
        statuses=("conflict",),
        about="Make a directory.",
    ),
    Effect(
        name="host.exec",
        tool="exec",
        params=params.Exec,
        op="exec",
        act=executing.execute,
        statuses=("timeout", "signaled"),
        about="Run a program.",
    ),
    Effect(
        name="host.exec.output",
        tool="exec_output",
        params=params.ExecOutput,
        op="exec",
        act=executing.output,
        read_only=True,
        statuses=("not_found",),
        about="Page through the output of a command in the background, and see whether it has ended.",
    ),
    Effect(
        name="host.exec.signal",
        tool="exec_signal",
        params=params.ExecSignal,
        op="exec",
        act=executing.send_signal,
        statuses=("not_found", "already_exited", "signaled"),
        about="Send a signal to a command in the background.",
    ),
    Effect(
        name="host.shell",
        tool="shell",
        params=params.Shell,
        op="exec",
        act=executing.shell,
        statuses=("timeout", "signaled"),
        about="Run a shell command with sh -c.",
    ),
    Effect(
        name="blob.read",
        tool="read_blob",
        params=params.ReadBlob,
        op="read",
        act=files.read_blob,
        read_only=True,
        about="Page through an answer that was too large to be given inline.",
    ),
)

BY_NAME: dict[str, Effect] = {name: effect for effect in EFFECTS for name in (effect.name, effect.tool)}
