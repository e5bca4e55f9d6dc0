"""Claims: who may change a place on disk right now.

A place is the real path of a file, bind mounts taken back (see `workspace.places`), as bytes.
1. At most one open call claims a place.
2. A deep claim (deleting or renaming a directory) also claims everything below its place.
3. An effect claims all its places in one transaction, or none.
4. Whoever finds a place taken waits only for younger calls; an older one makes it give up at once (`wait-die`). Waits
   therefore always point from older to younger, and no circle of waiting calls can exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.ids import CallId
from mulligan.values.plain import plain


@plain(slots=True, frozen=True)
class ClaimRow:
    """`deep` is 1 or None: an index of the deep ones holds nothing else, and a plain claim is one row in one place."""

    place: bytes
    call: str
    deep: int | None = None


CLAIMS: Table[ClaimRow] = Table("claims", ClaimRow, key=("place",), indexes=(("deep",),))


@plain(slots=True, frozen=True, order=True)
class Wanted:
    place: bytes
    deep: bool = False


def blockers(tx: Tx, call: CallId, wanted: Iterable[Wanted]) -> list[ClaimRow]:
    """Claims of other calls that stand in the way, in order of place."""
    deep_claims = [claim for claim in tx.select(CLAIMS, {"deep": 1}) if claim.call != call]
    found: dict[bytes, ClaimRow] = {}
    for one in wanted:
        same = tx.get(CLAIMS, one.place)
        below = tx.select(CLAIMS, between=("place", one.place + b"/", one.place + b"0")) if one.deep else []
        above = [claim for claim in deep_claims if one.place.startswith(claim.place + b"/")]
        found.update(
            (claim.place, claim) for claim in [*below, *above, *([same] if same else [])] if claim.call != call
        )
    return [found[place] for place in sorted(found)]


def claim(tx: Tx, call: CallId, wanted: Iterable[Wanted]) -> None:
    """Take the places. The caller has seen in this transaction that there are no blockers, and has none as deep yet."""
    for one in sorted(wanted):
        tx.put(CLAIMS, ClaimRow(one.place, call, 1 if one.deep else None))


def release(tx: Tx, call: CallId) -> None:
    """By looking at every claim there is: only for a call that nobody remembers the claims of."""
    for mine in tx.select(CLAIMS, {"call": call}):
        tx.delete(CLAIMS, mine.place)


def may_wait(call: CallId, blocking: Iterable[ClaimRow]) -> bool:
    """Older calls wait, younger ones give up. Call ids sort by birth."""
    return all(call < claim.call for claim in blocking)
