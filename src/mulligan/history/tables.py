"""The tables of history.

Projected tables are folds of the journals (see `projection`). The others are coordination: they say what open calls are
about to do, so that any process can roll a dead process's call back.
"""

from __future__ import annotations

from functools import lru_cache

from mulligan.files.identity import FOLDS
from mulligan.files.resolve import folded
from mulligan.history.cause import WORK, Cause, cause_from_text
from mulligan.store.protocol import Table, Tx
from mulligan.values.entries import Change, Entry, entry_from_bytes
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import OwnerId
from mulligan.values.paths import path_from_bytes

WSEQ_END = 2**62
"""Higher than the position of any change."""


@lru_cache(maxsize=256)
def workspace_journal(workspace: str) -> str:
    return f"w:{workspace}"


@fast_dataclass(slots=True, frozen=True)
class RootRow:
    """A directory that a process opened on a host. Roots that overlap belong to one workspace.

    `identity` identifies the directory (see `files.identity`), and `place` is its path on that host. `key` is the
    prefix of the keys of the files below it, by which claims and changes know a file. It is the path at which the root
    was first opened, unless another directory has had that path: then the id of a root comes first.
    """

    id: str
    workspace: str
    place: bytes
    identity: str
    host: str
    key: bytes

    def place_of(self, path: bytes) -> bytes:
        """The key of a file: the same through whichever root it is reached."""
        whole = self.key if path == b"." else self.key + b"/" + path
        # On a case-insensitive file system, two spellings are one file and must share one key.
        return folded(whole) if self.identity.endswith(FOLDS) else whole

    @property
    def tree(self) -> bytes:
        """The part of a key before the path. Roots of one workspace with different prefixes share no files."""
        return self.key.partition(b"/")[0]


@fast_dataclass(slots=True, frozen=True)
class TurnRow:
    """A prompt and what followed. `opened`: a caller opened the turn; else only its calls name it."""

    session: str
    id: str
    prompt: str | None
    opened: int
    started_at: str
    ended_at: str | None

    @property
    def is_open(self) -> bool:
        """Whether a caller opened the turn and has not ended it.

        A turn with an open call is open too; the calls' rows tell that.
        """
        return bool(self.opened) and self.ended_at is None


@fast_dataclass(slots=True, frozen=True)
class CallRow:
    """One call, or (`external`) a change that no call made.

    `cause` is JSON; None for an agent's own work. `way_back` is the verb of an undo operation.
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
    def why(self) -> Cause:
        """The cause of the call."""
        return WORK if self.cause is None else cause_from_text(self.cause)


@fast_dataclass(slots=True, frozen=True)
class TakenInPartRow:
    """An undo operation that undid only a part of a call."""

    call: str
    by: str


@fast_dataclass(slots=True, frozen=True)
class CallPartRow:
    """A part of a call: what it did in another root, published with it."""

    call: str
    part: str


@fast_dataclass(slots=True, frozen=True)
class ChangeRow:
    """One path's change in one call. `place` and `wseq` give its position among all changes of that file."""

    call: str
    path: bytes
    place: bytes
    wseq: int
    before: bytes
    after: bytes
    origin: bytes | None


def change_from_row(row: ChangeRow) -> Change:
    return Change(
        path=path_from_bytes(row.path),
        before=entry_from_bytes(row.before),
        after=entry_from_bytes(row.after),
        renamed_from=None if row.origin is None else path_from_bytes(row.origin),
    )


@fast_dataclass(slots=True, frozen=True)
class RedoRow:
    """An undo operation that redo can undo, newest last."""

    session: str
    call: str


@fast_dataclass(slots=True, frozen=True)
class ScopeRow:
    """A snapshot in S0's sense: preimages under an id that the caller chose. `seq` orders scopes by insertion."""

    session: str
    scope: str
    taken_at_ms: int
    seq: int
    root: str


@fast_dataclass(slots=True, frozen=True)
class CaptureRow:
    session: str
    scope: str
    path: bytes
    before: bytes


def before_of(capture: CaptureRow) -> Entry:
    return entry_from_bytes(capture.before)


@fast_dataclass(slots=True, frozen=True)
class PinRow:
    """A call whose bodies are never evicted."""

    call: str


@fast_dataclass(slots=True, frozen=True)
class BranchRow:
    """A forked session with its own files. `manifest` is the blob that lists the files of its copy at the start."""

    session: str
    parent: str
    source: str
    root: str
    directory: bytes
    manifest: str
    created_at: str
    status: str


OBSERVED = 1
OBSERVED_WHILE_FULL = 2
"""The store was full during an agent's call: the process that ends the call says so in its coverage."""


@fast_dataclass(slots=True, frozen=True)
class OpenRow:
    """An open call and the process that owns it, or AGENT. `observed` is 0, OBSERVED or OBSERVED_WHILE_FULL."""

    call: str
    owner: int
    session: str
    root: str
    observed: int


@fast_dataclass(slots=True, frozen=True)
class TouchRow:
    """A change of a path that an open call is about to make, written before it happens.

    `intended` lists every entry that the call ever intended to put there; `drafts` every draft name that it may have
    left beside it.
    """

    call: str
    path: bytes
    ordinal: int
    place: bytes
    before: bytes
    intended: bytes
    drafts: bytes
    in_place: int


@fast_dataclass(slots=True, frozen=True)
class KeptRow:
    """A path of a baseline: what it was at the last scan, so that a later change has a preimage.

    `stamp` is its stamp then. Either `entry` (its bytes are in the store) or `oid` (its bytes are in git) says what it
    held; if both are missing, that is unknown. `digest` repeats the entry's, so that gc does not collect it.
    """

    root: str
    path: bytes
    stamp: bytes
    entry: bytes | None
    oid: str | None
    digest: bytes | None


@fast_dataclass(slots=True, frozen=True)
class KeptRootRow:
    """A root with a complete baseline, and the time of its last full scan."""

    root: str
    taken_ns: int
    looked_at: str


AGENT = OwnerId(0)
"""The owner of observed calls, which belong to another program's agent. No process of ours has this number."""


@fast_dataclass(slots=True, frozen=True)
class WatchWindowRow:
    """An open capture window: the preimages are in the table `kept` until the command has ended.

    `since` is the workspace's newest record at its begin; `mark` is the file in which init notes when the command's
    last process ended.
    """

    call: str
    root: str
    since: int
    started_ns: int
    mark: str


ROOTS: Table[RootRow] = Table("roots", RootRow, key=("id",), indexes=(("workspace",), ("place",)), projected=True)
TURNS: Table[TurnRow] = Table("turns", TurnRow, key=("session", "id"), projected=True)
# The indexes serve the questions of each undo: calls of a session, of a workspace, of a turn, by label.
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
# By place and position: the newest change of a file is one row of the index.
CHANGES: Table[ChangeRow] = Table(
    "changes", ChangeRow, key=("call", "path"), indexes=(("place", "wseq"),), projected=True
)
REDO: Table[RedoRow] = Table("redo", RedoRow, key=("session", "call"), projected=True)
SCOPES: Table[ScopeRow] = Table("scopes", ScopeRow, key=("session", "scope"), projected=True)
CAPTURES: Table[CaptureRow] = Table("captures", CaptureRow, key=("session", "scope", "path"), projected=True)
PINS: Table[PinRow] = Table("pins", PinRow, key=("call",), projected=True)
BRANCHES: Table[BranchRow] = Table("branches", BranchRow, key=("session",), indexes=(("source",),), projected=True)
# From here on coordination, not projections: `verify` does not rebuild these.
OPEN: Table[OpenRow] = Table("open_calls", OpenRow, key=("call",))
TOUCHES: Table[TouchRow] = Table("touches", TouchRow, key=("call", "path"))
KEPT: Table[KeptRow] = Table("kept", KeptRow, key=("root", "path"), indexes=(("digest",),))
KEPT_ROOTS: Table[KeptRootRow] = Table("kept_roots", KeptRootRow, key=("root",))
WATCH_WINDOWS: Table[WatchWindowRow] = Table("windows", WatchWindowRow, key=("call",), indexes=(("root",),))


def changes_of(tx: Tx, call: str) -> list[Change]:
    return [change_from_row(row) for row in tx.select(CHANGES, {"call": call})]
