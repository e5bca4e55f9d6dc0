"""Everything a Mulligan store holds, in one value."""

from __future__ import annotations

from mulligan.history.projection import PROJECTORS
from mulligan.history.tables import (
    BRANCHES,
    CALL_PARTS,
    CALLS,
    CAPTURES,
    CHANGES,
    KEPT,
    KEPT_ROOTS,
    OPEN,
    PINS,
    REDO,
    ROOTS,
    SCOPES,
    TAKEN_IN_PART,
    TOUCHES,
    TURNS,
    WATCH_WINDOWS,
)
from mulligan.session.graphs import GRAPH_TABLES
from mulligan.session.kept import SLICE_TABLES
from mulligan.session.projection import TALK_TABLES
from mulligan.session.roots import ASIDES, ENDED_ASIDES
from mulligan.session.tables import BOUNDARIES, CLIENTS, SESSIONS
from mulligan.session.tokens import SIGHTS, TOKENS
from mulligan.store.blobs import BLOBS, BODIES
from mulligan.store.claims import CLAIMS
from mulligan.store.journal import FORGOTTEN, HEADS, RECORDS, REFS, Schema
from mulligan.store.protocol import OWNERS
from mulligan.workspace.snapshots import LINEAGE, SNAPSHOTS
from mulligan.workspace.tables import LEASE_PATHS, LEASES

SCHEMA = Schema(
    tables=(
        *(RECORDS, HEADS, REFS, BLOBS, BODIES, OWNERS, CLAIMS),
        *(SESSIONS, BOUNDARIES, ROOTS, TURNS, CALLS, CALL_PARTS, TAKEN_IN_PART, CHANGES, REDO),
        *(PINS, BRANCHES, SCOPES, CAPTURES),
        *(OPEN, TOUCHES, KEPT, KEPT_ROOTS, WATCH_WINDOWS),
        *TALK_TABLES,
        *SLICE_TABLES,
        *GRAPH_TABLES,
        *(TOKENS, SIGHTS, CLIENTS, ASIDES, ENDED_ASIDES),
        *(SNAPSHOTS, LINEAGE, LEASES, LEASE_PATHS),
    ),
    projectors=PROJECTORS,
    unfolded=frozenset(
        {
            *("committed", "paths.evicted", "session.forked", "session.imported"),
            *("snapshot.bodies", "store.lost", "store.power_cut", FORGOTTEN),
        }
    ),
)
