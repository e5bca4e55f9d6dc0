"""History in the store. Projected tables are folds of the journals (see `projection`); the others are coordination:
what open calls are about to do, so that anyone can put it back if they die."""

from __future__ import annotations

from typing import Any

from mulligan.store.tables import Table
from mulligan.values.canonical import decode
from mulligan.values.ids import OwnerId
from mulligan.values.plain import plain
from mulligan.workspace.identity import FOLDS
from mulligan.workspace.places import folded

WSEQ_END = 2**62
"""No change ever has so high a place."""


@plain(slots=True, frozen=True)
class RootRow:
    """A directory that a process opened on a host. Roots that overlap belong to one workspace.

    `identity` says which directory it is (see `workspace.identity`), and `place` is its path on that host. `key` begins
    the key of each file below it, by which claims and changes know the file. It is the path at which the root was first
    opened, unless another directory has had that path: then the id of a root comes first.
    """

    id: str
    workspace: str
    place: bytes
    identity: str
    host: str
    key: bytes

    def place_of(self, path: bytes) -> bytes:
        """The same as the open root's own: the one name of a file, through whichever root it is reached."""
        whole = self.key if path == b"." else self.key + b"/" + path
        return folded(whole) if self.identity.endswith(FOLDS) else whole

    @property
    def tree(self) -> bytes:
        """What comes before the path in a key. Roots of one workspace that differ in it share no files."""
        return self.key.partition(b"/")[0]


@plain(slots=True, frozen=True)
class TurnRow:
    """A prompt and what followed. `opened` by hand, or only by its calls naming it."""

    session: str
    id: str
    prompt: str | None
    opened: int
    started_at: str
    ended_at: str | None

    @property
    def is_open(self) -> bool:
        """Opened by hand and not ended. One with a call in progress is open too, which only the calls say."""
        return bool(self.opened) and self.ended_at is None


@plain(slots=True, frozen=True)
class CallRow:
    """One call, or (`external`) a change that nobody's call made.

    `cause` is JSON: what made it, if not work of its own. `way_back` is its verb, if it took other calls back.
    """

    id: str
    session: str | None
    turn: str
    label: str | None
    tool: str | None
    status: str
    cause: str | None
    observed: int
    external: int
    root: str
    workspace: str
    started_at: str
    ended_at: str | None = None
    wseq: int | None = None
    undone_by: str | None = None
    evicted: int = 0
    reason: str | None = None
    coverage: str = "[]"
    way_back: str | None = None

    @property
    def why(self) -> dict[str, Any]:
        """Its cause, read; empty for work of its own."""
        found: dict[str, Any] = decode(self.cause) if self.cause else {}
        return found


@plain(slots=True, frozen=True)
class TakenInPartRow:
    """A way back that took only a part of a call back."""

    call: str
    by: str


@plain(slots=True, frozen=True)
class CallPartRow:
    """What a call did in another root is a call of its own, published with it."""

    call: str
    part: str


@plain(slots=True, frozen=True)
class ChangeRow:
    """One path's step in one call. `place` and `wseq` give it its position among everybody's changes of that file."""

    call: str
    path: bytes
    place: bytes
    wseq: int
    before: bytes
    after: bytes
    origin: bytes | None


@plain(slots=True, frozen=True)
class RedoRow:
    """A way back that can be taken back, newest last."""

    session: str
    call: str


@plain(slots=True, frozen=True)
class ScopeRow:
    """A snapshot in S0's sense: preimages kept under an id somebody chose. `seq` is its place of insertion."""

    session: str
    scope: str
    taken_at_ms: int
    seq: int
    root: str


@plain(slots=True, frozen=True)
class CaptureRow:
    session: str
    scope: str
    path: bytes
    before: bytes


@plain(slots=True, frozen=True)
class PinRow:
    """A call whose bodies are never evicted."""

    call: str


@plain(slots=True, frozen=True)
class BranchRow:
    """A forked session with files of its own. `manifest` is the blob that says what the files were when it began."""

    session: str
    parent: str
    source: str
    root: str
    directory: bytes
    manifest: str
    created_at: str
    status: str


@plain(slots=True, frozen=True)
class OpenRow:
    """A call in progress and the process that owns it, or AGENT."""

    call: str
    owner: int
    session: str
    root: str
    observed: int


@plain(slots=True, frozen=True)
class TouchRow:
    """What an open call is about to do to a path, written before it does.

    `intended` lists every entry it ever meant to put there; `drafts` every draft name it may have left beside it.
    """

    call: str
    path: bytes
    ordinal: int
    place: bytes
    before: bytes
    intended: bytes
    drafts: bytes
    in_place: int


@plain(slots=True, frozen=True)
class KeptRow:
    """What a path below a watched root was when it was last looked at, so that a later change has a before.

    `stamp` is how the file system had it then. One of `entry` (its bytes are in the store) and `oid` (they are in
    git's) says what it held; neither means that nobody knows. `digest` repeats the entry's: it is not to be collected.
    """

    root: str
    path: bytes
    stamp: bytes
    entry: bytes | None
    oid: str | None
    digest: bytes | None


@plain(slots=True, frozen=True)
class KeptRootRow:
    """A root that is being watched between calls: when all of it was last looked at."""

    root: str
    taken_ns: int
    looked_at: str


AGENT = OwnerId(0)
"""Owns the calls that belong to somebody else's agent. No process of ours has this number."""


@plain(slots=True, frozen=True)
class WatchWindowRow:
    """A command whose changes are seen only afterwards: what was there before is in `kept` until it has ended.

    `since` is the workspace's newest record then; `mark` is the file that says when its last process ended.
    """

    call: str
    root: str
    since: int
    started_ns: int
    mark: str


ROOTS: Table[RootRow] = Table("roots", RootRow, key=("id",), indexes=(("workspace",), ("place",)), projected=True)
TURNS: Table[TurnRow] = Table("turns", TurnRow, key=("session", "id"), projected=True)
CALLS: Table[CallRow] = Table(
    "calls",
    CallRow,
    key=("id",),
    indexes=(
        ("session", "id"),
        ("workspace", "id"),
        ("session", "turn", "id"),
        ("label",),
    ),
    projected=True,
)
TAKEN_IN_PART: Table[TakenInPartRow] = Table("taken_in_part", TakenInPartRow, key=("call", "by"), projected=True)
CALL_PARTS: Table[CallPartRow] = Table("call_parts", CallPartRow, key=("call", "part"), projected=True)
CHANGES: Table[ChangeRow] = Table(
    "changes", ChangeRow, key=("call", "path"), indexes=(("place", "wseq"),), projected=True
)
REDO: Table[RedoRow] = Table("redo", RedoRow, key=("session", "call"), projected=True)
SCOPES: Table[ScopeRow] = Table("scopes", ScopeRow, key=("session", "scope"), projected=True)
CAPTURES: Table[CaptureRow] = Table("captures", CaptureRow, key=("session", "scope", "path"), projected=True)
PINS: Table[PinRow] = Table("pins", PinRow, key=("call",), projected=True)
BRANCHES: Table[BranchRow] = Table("branches", BranchRow, key=("session",), indexes=(("source",),), projected=True)
OPEN: Table[OpenRow] = Table("open_calls", OpenRow, key=("call",))
TOUCHES: Table[TouchRow] = Table("touches", TouchRow, key=("call", "path"))
KEPT: Table[KeptRow] = Table("kept", KeptRow, key=("root", "path"), indexes=(("digest",),))
KEPT_ROOTS: Table[KeptRootRow] = Table("kept_roots", KeptRootRow, key=("root",))
WATCH_WINDOWS: Table[WatchWindowRow] = Table("windows", WatchWindowRow, key=("call",), indexes=(("root",),))
