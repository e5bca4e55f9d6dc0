"""Everything that can go wrong, in one table, each with whose doing it was.

An expected outcome of an effect is a Receipt, whose `error_code` is in this table too. A fault is for the rest: a
mistake of the caller, a refusal, a world that moved, or a broken part of ours. Codes are stable; every surface (CLI
exit code, MCP error, ACP error, HTTP status) maps from `FAMILY_OF`, so a new code is one new line here and nothing
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar


class Family(StrEnum):
    """Whose doing a fault was."""

    ASKED_WRONGLY = "asked_wrongly"
    MAY_NOT = "may_not"
    WORLD_CHANGED = "world_changed"
    BROKEN = "broken"


class MulliganError(Exception):
    """Root of every exception of ours. `code` is stable, the message is for a person and says what to do next."""

    family: ClassVar[Family]

    def __init__(self, code: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details: Mapping[str, object] = MappingProxyType(dict(details))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.code, self.message, dict(self.details))


def _rebuild(kind: type[MulliganError], code: str, message: str, details: dict[str, object]) -> MulliganError:
    return kind(code, message, **details)


class AskedWrongly(MulliganError):
    """The request cannot mean anything. Asking again the same way gives the same answer."""

    family = Family.ASKED_WRONGLY


class MayNot(MulliganError):
    """The request is clear and refused by a boundary."""

    family = Family.MAY_NOT


class WorldChanged(MulliganError):
    """Somebody else got there first. Look again, then decide."""

    family = Family.WORLD_CHANGED


class Broken(MulliganError):
    """A part we stand on failed: disk, database, a corrupt byte. Nothing was acknowledged."""

    family = Family.BROKEN


_CODES: dict[type[MulliganError], str] = {
    AskedWrongly: """
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
        invalid_bundle unsupported_bundle_version no_provider tool_format_locked
    """,
    MayNot: """
        forbidden fs_op_not_allowed path_not_allowed symlink_not_allowed max_write_bytes_exceeded
        max_patch_bytes_exceeded patch_format_not_allowed max_changed_files_exceeded
        max_edit_replacements_exceeded sandbox_unavailable not_undoable permission_denied
        not_controller client_may_not untrusted_owner
        unredacted_secret transcript_budget_exceeded not_captured
    """,
    WorldChanged: """
        path_claimed stale_base conflict call_lost repo_changed path_not_found parent_not_found file_exists
        not_a_directory is_directory path_busy file_in_use deadline_exceeded cancelled evicted timeout nonzero_exit
        replay_diverged spawn_failed regex_timeout controller_present too_many_clients visibility_expansion_required
    """,
    Broken: """
        io_error no_space read_only_disk store_corrupt store_newer store_unreadable store_busy
        missing_cas_dependency blob_corrupt journal_broken sync_failed in_doubt output_store_failed
        restore_failed env_lost execution_state prompt_evaluation provider_failed forked_unsafely internal
    """,
}

FAMILY_OF: Mapping[str, type[MulliganError]] = MappingProxyType(
    {code: family for family, codes in _CODES.items() for code in codes.split()}
)

INTEGRITY_CODES = frozenset({"store_corrupt", "missing_cas_dependency", "blob_corrupt", "journal_broken"})
"""Codes that mean stored bytes are not what was written: exit code 3 on the command line."""


def fault(code: str, message: str, **details: object) -> MulliganError:
    """The exception for a code of the table; its class says the family."""
    return FAMILY_OF[code](code, message, **details)


def fault_of_os_error(error: OSError, doing: str) -> MulliganError:
    """What the operating system refused, as one of our codes."""
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
