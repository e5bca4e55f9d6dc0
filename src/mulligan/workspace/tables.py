"""The tables of leases. Apart from what works with them: whoever opens a store needs only these."""

from __future__ import annotations

from mulligan.store.tables import Table
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class LeaseRow:
    """`facts_hash` and `facts` (packed, unless too many) say what git said of all paths but the holder's own."""

    id: str
    root: str
    fingerprint: str
    facts_hash: str
    facts: bytes | None
    used_at: str
    version: int


@plain(slots=True, frozen=True)
class LeasePathRow:
    """A touched path and what was seen there; `own` if the holder wrote it."""

    lease: str
    path: bytes
    seen: bytes
    own: int


LEASES: Table[LeaseRow] = Table("leases", LeaseRow, key=("id",), indexes=(("used_at",),))
LEASE_PATHS: Table[LeasePathRow] = Table("lease_paths", LeasePathRow, key=("lease", "path"))
