"""Which root a directory is, and the keys by which its files are known.

1. A root is a host, a path and the identity of a directory. The same directory under another path is the same root.
2. Another directory at a known path of the same host is a new root: a new clone, or another container's mount.
3. Roots share a workspace if one is inside the other *and* this process sees both directories where the paths say.
4. A file has one key, through whichever of these roots it is reached. Two files never have one key, on one host or two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mulligan.files.identity import same_directory
from mulligan.history.tables import ROOTS, RootRow
from mulligan.store.protocol import Tx
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import is_inside

IdentityAt = Callable[[bytes], str | None]
"""The identity of the directory that this process sees at a path; None if it sees none there."""


@fast_dataclass(slots=True, frozen=True)
class FoundRoot:
    """A directory that a process has opened: host, path and identity, and a function that identifies other paths."""

    host: str
    place: bytes
    identity: str
    identity_at: IdentityAt

    def is_on_host(self, row: RootRow) -> bool:
        """Rows from before roots had hosts belong to the host that opens them first."""
        return row.host in ("", self.host)

    def sees(self, row: RootRow) -> bool:
        """Whether the row's directory is at the row's path, as this process sees it."""
        if not self.is_on_host(row):
            return False
        now = self.identity if row.place == self.place else self.identity_at(row.place)
        return now is not None and same_directory(row.identity, now)

    def known_in(self, rows: Iterable[RootRow]) -> RootRow | None:
        """The root of this directory, if the store knows it."""
        same = [row for row in rows if self.is_on_host(row) and same_directory(row.identity, self.identity)]
        here = [row for row in same if row.place == self.place]
        if here:
            return max(here, key=lambda row: row.id)
        moved = [row for row in same if same_directory(row.identity, self.identity, surely=True)]
        # Copies of a disk have equal identities. If the store knows two of them, none can be told to be this one.
        return moved[0] if len({row.workspace for row in moved}) == 1 else None

    def replaced_in(self, rows: Iterable[RootRow]) -> list[RootRow]:
        """The roots that had this path on this host and are other directories, oldest first."""
        others = (row for row in rows if self.is_on_host(row) and row.place == self.place)
        return [row for row in others if not same_directory(row.identity, self.identity)]


@fast_dataclass(slots=True, frozen=True)
class Opening:
    """The changes of the store's roots when a process opens a directory: its own row, and other roots that change."""

    row: RootRow
    joined: Sequence[str]
    """the workspaces that are one from now on"""
    keys: dict[str, bytes]
    """other roots that get another key"""


def plan_opening(found: FoundRoot, rows: Sequence[RootRow], new_id: Callable[[], str]) -> Opening:
    """Plan the opening.

    Pure, except that it reads the identities at other roots' paths. The caller chooses which workspace continues.
    """
    known = found.known_in(rows)
    others = [row for row in rows if known is None or row.id != known.id]
    shared = [row for row in others if _overlap(row.place, found.place) and found.sees(row)]
    joined = sorted({row.workspace for row in (*shared, *([known] if known else []))})
    workspace = joined[0] if joined else new_id()
    row = RootRow(
        id=new_id() if known is None else known.id,
        workspace=workspace,
        place=found.place,
        identity=found.identity,
        host=found.host,
        key=found.place if known is None else known.key,
    )
    strangers = [one for one in others if one not in shared]
    return _with_keys(Opening(row, joined, {}), shared, strangers, is_new=known is None)


def _with_keys(opening: Opening, shared: Sequence[RootRow], strangers: Sequence[RootRow], *, is_new: bool) -> Opening:
    row, keys = opening.row, dict[str, bytes]()
    around = [one for one in shared if is_inside(row.place, one.place)]
    if around:
        outer = max(around, key=lambda one: len(one.place))
        row = replace(row, key=outer.key + row.place[len(outer.place) :])
        # A missing directory, or one of another mount namespace, keeps its changes under its own key.
        keys = {one.id: _key_of_its_own(one) for one in strangers if is_inside(one.key, row.key)}
    elif is_new and any(_overlap(one.key, row.key) for one in strangers):
        row = replace(row, key=_key_of_its_own(row))
    for one in shared:
        wanted = row.key + one.place[len(row.place) :]
        if is_inside(one.place, row.place) and one.key != wanted:
            keys[one.id] = wanted
    return replace(opening, row=row, keys=keys)


def _key_of_its_own(row: RootRow) -> bytes:
    return row.id.encode("ascii") + b":" + row.place


def _overlap(one: bytes, other: bytes) -> bool:
    return is_inside(one, other) or is_inside(other, one)


def named_root(tx: Tx, name: str, host: str) -> RootRow | None:
    """The root with this id, or the newest one that had this path; one of this host, if there is one."""
    by_id = tx.get(ROOTS, name)
    if by_id is not None:
        return by_id
    rows = tx.select(ROOTS, {"place": os.fsencode(os.path.realpath(name)).rstrip(b"/")})
    return max(rows, key=lambda row: (row.host in ("", host), row.id), default=None)


def unrecorded(found: FoundRoot) -> RootRow:
    """A row for reading a directory that is no root. It has no history, not even that of its path."""
    return RootRow("", "", found.place, found.identity, found.host, b"unrecorded:" + found.place)


def root_elsewhere(row: RootRow, host: str) -> MulliganError:
    """The answer to a request for a root whose directory this process does not see."""
    path = row.place.decode("utf-8", "backslashreplace") or "/"
    details: dict[str, Any] = {"root": row.id, "path": path, "host": row.host}
    if row.host not in ("", host):
        words = f"Root {row.id} ({path}) belongs to host {row.host}, and this is host {host}. Ask there."
    else:
        words = (
            f"Root {row.id} had the path {path}, where another directory is now. If that one continues the first, "
            f"`mulligan store adopt {row.id}` joins their histories."
        )
    return fault("root_elsewhere", words, **details)
