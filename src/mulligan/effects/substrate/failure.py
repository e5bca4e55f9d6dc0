"""S2's error model: every failure is one envelope, and every refusal of ours has a place in it."""

from __future__ import annotations

import errno
from typing import Any

from mulligan.effects.receipt import legible
from mulligan.values.faults import Family, MulliganError
from mulligan.values.paths import to_wire
from mulligan.values.refusal import Refused
from mulligan.workspace.lease import StaleLease, UnknownLease

CODES = (
    "NOT_FOUND",
    "INVALID_ARGUMENT",
    "REPO_CHANGED",
    "PERMISSION_DENIED",
    "TOO_LARGE",
    "INTERNAL",
    "STALE_LEASE",
    "CONFLICT",
)

_BY_CODE = {
    "path_not_found": "NOT_FOUND",
    "unknown_root": "NOT_FOUND",
    "parent_not_found": "NOT_FOUND",
    "path_claimed": "CONFLICT",
    "path_busy": "CONFLICT",
    "conflict": "CONFLICT",
    "file_exists": "CONFLICT",
    "repo_changed": "REPO_CHANGED",
    "unknown_blob": "NOT_FOUND",
    "evicted": "NOT_FOUND",
    "io_error": "INTERNAL",
    "no_space": "INTERNAL",
    "output_store_failed": "INTERNAL",
}
_BY_STATUS = {"forbidden": "PERMISSION_DENIED", "not_found": "NOT_FOUND", "conflict": "CONFLICT"}
_BY_FAMILY = {
    Family.ASKED_WRONGLY: "INVALID_ARGUMENT",
    Family.MAY_NOT: "PERMISSION_DENIED",
    Family.WORLD_CHANGED: "CONFLICT",
    Family.BROKEN: "INTERNAL",
}
_BY_ERRNO = {
    errno.ENOENT: "NOT_FOUND",
    errno.ENOTDIR: "NOT_FOUND",
    errno.EACCES: "PERMISSION_DENIED",
    errno.EPERM: "PERMISSION_DENIED",
    errno.ELOOP: "PERMISSION_DENIED",
    errno.ENAMETOOLONG: "INVALID_ARGUMENT",
}


class Failure(Exception):
    """A tool that did not do what it was asked; `details` are JSON."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def envelope(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": legible(self.message), "details": self.details}}


def failure_of(error: Exception) -> Failure:
    """What went wrong, in S2's words."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, StaleLease):
        return _stale(error)
    if isinstance(error, UnknownLease):
        return Failure("NOT_FOUND", "There is no such lease for this root.", lease_id=legible(str(error)))
    if isinstance(error, Refused):
        code = _BY_CODE.get(error.code) or _BY_STATUS.get(error.status, "INVALID_ARGUMENT")
        return Failure(code, error.message, reason=error.code)
    if isinstance(error, MulliganError):
        code = _BY_CODE.get(error.code) or _BY_FAMILY[error.family]
        return Failure(code, error.message, reason=error.code)
    if isinstance(error, OSError):
        return Failure(_BY_ERRNO.get(error.errno or 0, "INTERNAL"), error.strerror or "The disk refused.")
    return Failure("INTERNAL", "Something is broken on our side; nothing was changed.")


def _stale(error: StaleLease) -> Failure:
    words = "The lease expired." if error.expired else "What was seen under this lease is no longer so."
    return Failure(
        "STALE_LEASE",
        f"{words} Read again without a lease_id to get a new one.",
        fingerprint=error.fingerprint.to_json(),
        lease_id=error.lease,
        changed_paths=[to_wire(path) for path in error.changed],
    )
