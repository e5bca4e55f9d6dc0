"""Bytes that went from the disk when a call was put back, though they may have been anybody's.

They are in the store, and the coverage of the call says where they were: `blob_ref` is what was at the path.
"""

from __future__ import annotations

from mulligan.history.tables import CallRow
from mulligan.values.canonical import decode
from mulligan.values.digest import Digest
from mulligan.values.paths import RepoPath, from_wire, to_wire


def rescue_note(path: RepoPath, digest: Digest) -> dict[str, str]:
    return {"path": to_wire(path), "reason": "rescued", "blob_ref": digest}


def rescued_in(call: CallRow) -> list[tuple[RepoPath, Digest]]:
    """The same path more than once, if the call was put back there in parts; the last comes last."""
    if '"blob_ref"' not in call.coverage:
        return []
    notes = [note for note in decode(call.coverage) if "blob_ref" in note]
    return [(from_wire(note["path"]), Digest(note["blob_ref"])) for note in notes]
