"""Everything a Mulligan store holds, in one value."""

from __future__ import annotations

from mulligan.history.projection import PROJECTORS
from mulligan.history.tables import BRANCHES, CALLS, CAPTURES, CHANGES, OPEN, PINS, REDO, ROOTS, SCOPES, TOUCHES, TURNS
from mulligan.session.tables import BOUNDARIES, SESSIONS
from mulligan.store.blobs import BLOBS, BODIES
from mulligan.store.claims import CLAIMS
from mulligan.store.journal import HEADS, RECORDS, REFS, Schema
from mulligan.store.protocol import OWNERS
from mulligan.workspace.lease import LEASE_PATHS, LEASES
from mulligan.workspace.snapshots import LINEAGE, SNAPSHOTS

SCHEMA = Schema(
    tables=(
        *(RECORDS, HEADS, REFS, BLOBS, BODIES, OWNERS, CLAIMS),
        *(SESSIONS, BOUNDARIES, ROOTS, TURNS, CALLS, CHANGES, REDO, PINS, BRANCHES, SCOPES, CAPTURES),
        *(OPEN, TOUCHES),
        *(SNAPSHOTS, LINEAGE, LEASES, LEASE_PATHS),
    ),
    projectors=PROJECTORS,
)
