"""All errors: the exceptions, the table of their codes, and the refusals that become receipts.

An expected outcome of an effect is a Receipt; its `error_code` is in this table too. An exception is for the rest: a
wrong request, a refusal, files or state that changed meanwhile, or a failure inside Mulligan. Codes are stable. Every
interface (CLI exit code, MCP error, ACP error, HTTP status) maps from `FAMILY_OF`, so a new code is one new line here.

`Refused` carries an expected outcome other than `ok` from where an effect finds it to where it becomes a Receipt. The
last classes are S4's exceptions; a tool raises them with a message alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import ClassVar


class Family(StrEnum):
    """The cause of an error."""

    REQUEST = "request"
    FORBIDDEN = "forbidden"
    CONFLICT = "conflict"
    INTERNAL = "internal"


class MulliganError(Exception):
    """The base of all our exceptions. `code` is stable; the message is for people and says what to do next."""

    family: ClassVar[Family]

    def __init__(self, code: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details: Mapping[str, object] = MappingProxyType(dict(details))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.code, self.message, **self.details), ()


class RequestError(MulliganError):
    """The request is wrong. The same request will fail again."""

    family = Family.REQUEST


class ForbiddenError(MulliganError):
    """The request is valid, and the caller may not do it."""

    family = Family.FORBIDDEN


class ConflictError(MulliganError):
    """Files or state changed in the meantime. Read them again, then decide."""

    family = Family.CONFLICT


class InternalError(MulliganError):
    """A part that Mulligan needs has failed: the disk, the database, stored bytes. Nothing was acknowledged."""

    family = Family.INTERNAL


_CODES: dict[type[MulliganError], str] = {
    RequestError: """
        invalid_params invalid_path invalid_id invalid_digest invalid_json invalid_entry invalid_store_url
        unknown_call unknown_session unknown_turn unknown_blob unknown_effect unknown_root root_elsewhere unknown_point
        session_not_found session_closed session_expired workspace_closed nothing_to_undo nothing_to_redo call_not_open
        call_open turn_open not_continuable nested_transaction store_inside_workspace network_store
        snapshot_mismatch tool_validation
        unsupported_strategy unsupported_target bad_usage session_exists unknown_option token_exists weak_token
        client_not_attached invalid_config
        invalid_output_mode invalid_encoding invalid_mode invalid_content invalid_utf8 invalid_workdir
        invalid_patch invalid_patch_empty invalid_pattern invalid_regex invalid_glob_filter
        invalid_input_empty_old_string unsupported_patch_format patch_parse_error hunk_rejected not_a_file
        edit_target_not_found ambiguous_matches update_target_not_found update_target_non_utf8
        delete_target_not_found inline_required_too_large not_directory directory_not_empty special_file
        argv_empty invalid_stdin_ref stdin_ref_not_found exec_not_found already_exited ripgrep_not_found
        invalid_bundle unsupported_bundle_version no_provider tool_format_locked several_sessions
    """,
    ForbiddenError: """
        forbidden fs_op_not_allowed path_not_allowed symlink_not_allowed max_write_bytes_exceeded
        max_patch_bytes_exceeded patch_format_not_allowed max_changed_files_exceeded
        max_edit_replacements_exceeded sandbox_unavailable not_undoable permission_denied
        not_controller client_may_not untrusted_owner
        unredacted_secret transcript_budget_exceeded not_captured
    """,
    ConflictError: """
        path_claimed stale_base conflict call_lost repo_changed path_not_found parent_not_found file_exists
        not_a_directory is_directory path_busy file_in_use deadline_exceeded cancelled evicted timeout nonzero_exit
        replay_diverged spawn_failed regex_timeout controller_present too_many_clients visibility_expansion_required
    """,
    InternalError: """
        io_error no_space read_only_disk store_corrupt store_newer store_unreadable store_busy
        missing_cas_dependency blob_corrupt journal_broken sync_failed in_doubt store_unreachable output_store_failed
        restore_failed env_lost execution_state prompt_evaluation provider_failed forked_unsafely internal
    """,
}

FAMILY_OF: Mapping[str, type[MulliganError]] = MappingProxyType(
    {code: family for family, codes in _CODES.items() for code in codes.split()}
)

# The stored bytes are not the bytes that were written: exit code 3 on the command line.
INTEGRITY_CODES = frozenset({"store_corrupt", "missing_cas_dependency", "blob_corrupt", "journal_broken"})


def fault(code: str, message: str, **details: object) -> MulliganError:
    """The exception for a code of the table; the code decides its class."""
    return FAMILY_OF[code](code, message, **details)


def fault_of_os_error(error: OSError, doing: str) -> MulliganError:
    """The exception for an error of the operating system, with the matching code."""
    import errno

    codes = {
        errno.ENOSPC: "no_space",
        errno.EDQUOT: "no_space",
        errno.EROFS: "read_only_disk",
        errno.ENOENT: "path_not_found",
        errno.EEXIST: "file_exists",
        errno.ENOTDIR: "not_a_directory",
        errno.EISDIR: "is_directory",
        errno.EACCES: "forbidden",
        errno.EPERM: "forbidden",
    }
    code = codes.get(error.errno or 0, "io_error")
    return fault(code, f"{doing}: {error.strerror or error}", errno=error.errno)


class Refused(Exception):
    """Ends an effect, which then leaves no trace.

    `fields` are further fields of the receipt (`replacements`, `errors`, …).
    """

    def __init__(self, status: str, code: str, message: str, **fields: object) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.fields = fields


class _MessageError(MulliganError):
    """An error that authors of tools raise with a message alone; its class has the code."""

    own_code: ClassVar[str]

    def __init__(self, message: str = "", **details: object) -> None:
        super().__init__(self.own_code, message, **details)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.message, **self.details), ()


class ExecutionStateError(_MessageError, RuntimeError):
    """The state of a run does not allow the operation."""

    family = Family.INTERNAL
    own_code = "execution_state"


class SnapshotMismatchError(ExecutionStateError):
    """A snapshot does not fit what it should be restored into. Nothing was changed."""

    family = Family.REQUEST
    own_code = "snapshot_mismatch"


class RestoreFailedError(ExecutionStateError):
    """A participant could not be restored. All of them are as they were before the attempt, unless `stuck` names some.

    If a tool's failure was the reason for restoring, that error is the cause of this one.
    """

    own_code = "restore_failed"


class CallNotOpenError(ExecutionStateError):
    """The call that this operation belongs to has ended. Nothing was changed."""

    family = Family.REQUEST
    own_code = "call_not_open"


class ToolValidationError(_MessageError, ValueError):
    """The arguments of a tool call do not match the tool's parameters."""

    family = Family.REQUEST
    own_code = "tool_validation"


class VisibilityExpansionRequired(_MessageError):
    """The model asked for sections that it cannot see yet. The caller shows them and evaluates the prompt again.

    `requested_overrides` maps section keys to the visibility that the tool asked for, if it named any.
    """

    family = Family.CONFLICT
    own_code = "visibility_expansion_required"

    @property
    def requested_overrides(self) -> object:
        return self.details.get("requested_overrides", {})


class DeadlineExceededError(_MessageError, RuntimeError):
    """A tool noticed that the deadline of its evaluation has passed."""

    family = Family.CONFLICT
    own_code = "deadline_exceeded"


class PromptEvaluationError(_MessageError, RuntimeError):
    """The evaluation of a prompt failed. `prompt_name` and `phase` say where."""

    family = Family.INTERNAL
    own_code = "prompt_evaluation"

    @property
    def prompt_name(self) -> str:
        return str(self.details.get("prompt_name", ""))

    @property
    def phase(self) -> str:
        return str(self.details.get("phase", "tool"))
