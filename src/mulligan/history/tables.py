"""The tables of history.

Projected tables are folds of the journals (see `projection`). The others are coordination: they say what open calls are
about to do, so that any process can roll a dead process's call back.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from zlib import crc32

from mulligan.files.identity import FOLDS
from mulligan.files.resolve import folded
from mulligan.history.cause import WORK, Cause, UndoOperation, cause_from_text
from mulligan.store.protocol import Table, Tx
from mulligan.values.canonical import decode
from mulligan.values.digest import Digest
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


_UNDOES_NOTHING = UndoOperation("")


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

    @property
    def undoes(self) -> UndoOperation:
        """What the call undid; a call that is no undo operation undid nothing."""
        return cause if isinstance(cause := self.why, UndoOperation) else _UNDOES_NOTHING


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
REDO: Table[RedoRow] = Table("redo", RedoRow, key=("session", "call"), projected=True, sparse=True)
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


# The spool of a call: rows of `touches`, with the bytes of files, for a command that changes very many paths. Appending
# to a file is as safe against kill -9 as a transaction, and takes a tenth of the time (decision 28).

_FOLDER = "spools"
_COUNTER = struct.Struct("<Q")
_RECORD = struct.Struct("<IIIIIII")
# The largest number says that there is none, as an ordinal and as a length.
_NONE = 0xFFFFFFFF
_READ_BYTES = 1 << 20


@fast_dataclass(slots=True, frozen=True)
class SpooledPreimage:
    """One record of a spool: the row that the table of touches would have, and the bytes of a file.

    `withdrawn`: it takes back the record before it, which has the same path.
    """

    row: TouchRow
    content: bytes | None
    withdrawn: bool = False


def spool_path(directory: str, call: str) -> str:
    return os.path.join(directory, _FOLDER, call)


def spooled_calls(directory: str) -> list[str]:
    """The calls that have a spool, those of dead processes included."""
    try:
        return os.listdir(os.path.join(directory, _FOLDER))
    except FileNotFoundError:
        return []


class PreimageSpool:
    """Preimages of one open call, each appended to a file before the command changes the path. For one thread.

    A preimage in the spool is also a claim. A process that wants to claim places raises the counter at the start of
    the file first, and reads the claims after that. The spool appends first and reads the counter after that. So
    either the other process reads the new claim, or the spool sees the new counter. Then the caller must claim the
    path in a transaction, in which one of the two waits for the other.
    """

    def __init__(self, directory: str, call: str) -> None:
        self.path = spool_path(directory, call)
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._seen = bytes(_COUNTER.size)
        self._end = os.write(self._file, self._seen)
        self._stored = self._end

    def append(self, row: TouchRow, content: bytes | None) -> bool:
        """Append a preimage. False: another process has claimed something since `renew`, so this one does not count."""
        self._write(_encoded(row, content))
        if not self.is_stale():
            return True
        self._write(_encoded(replace(row, ordinal=_NONE), None))
        return False

    def _write(self, record: bytes) -> None:
        written = os.write(self._file, record)
        if written != len(record):
            os.ftruncate(self._file, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._end += written

    def renew(self) -> None:
        """Note the counter. Only in a write transaction, in which no other process can claim anything."""
        self._seen = os.pread(self._file, _COUNTER.size, 0)

    def is_stale(self) -> bool:
        """Whether another process has claimed something since `renew`."""
        return os.pread(self._file, _COUNTER.size, 0) != self._seen

    def unstored(self) -> Iterator[SpooledPreimage]:
        """The preimages since the last `set_stored`."""
        return standing_in(self.path, self._stored)

    def set_stored(self) -> None:
        """Note that the store has everything that was appended so far."""
        self._stored = self._end

    def contents(self) -> SpooledContents:
        """For a rollback while the store is full: the bytes of files, which the store could not take."""
        return SpooledContents(self._file, self.path)

    def close(self) -> None:
        """Only after the call has ended: until then the file holds its claims."""
        os.close(self._file)
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class SpooledContents:
    """The bytes of files in a spool, by digest. Only where they are is in memory."""

    def __init__(self, file: int, path: str) -> None:
        self._file = file
        self._at: dict[str, tuple[int, int]] = {}
        for one, end in read_spool(path):
            if one.content is not None:
                size = len(one.content)
                self._at[decode(one.row.before)["digest"]] = size, end - size

    def read(self, digest: Digest) -> bytes | None:
        found = self._at.get(digest)
        return None if found is None else os.pread(self._file, *found)


def _encoded(row: TouchRow, content: bytes | None) -> bytes:
    lengths = len(row.path), len(row.place), len(row.before), len(row.drafts)
    size = _NONE if content is None else len(content)
    body = b"".join((row.path, row.place, row.before, row.drafts, content or b""))
    return _RECORD.pack(crc32(body), row.ordinal, *lengths, size) + body


def read_spool(path: str, start: int = _COUNTER.size) -> Iterator[tuple[SpooledPreimage, int]]:
    """The records from an offset on, each with the offset after it.

    Ends at a record that a process is writing, or was killed in the middle of: its change has not happened.
    """
    call = os.path.basename(path)
    with suppress(FileNotFoundError), open(path, "rb", buffering=_READ_BYTES) as file:
        file.seek(start)
        while len(head := file.read(_RECORD.size)) == _RECORD.size:
            checksum, ordinal, *lengths, size = _RECORD.unpack(head)
            body = file.read(sum(lengths) + (0 if size == _NONE else size))
            # A power cut may leave zeros, which have a right checksum and no path.
            if crc32(body) != checksum or not lengths[0]:
                return
            start += _RECORD.size + len(body)
            parts, at = list[bytes](), 0
            for length in lengths:
                parts.append(body[at : at + length])
                at += length
            key, place, before, drafts = parts
            row = TouchRow(call, key, ordinal, place, before, b"[" + before + b"]", drafts, 1)
            yield SpooledPreimage(row, None if size == _NONE else body[at:], withdrawn=ordinal == _NONE), start


def standing_in(path: str, start: int = _COUNTER.size) -> Iterator[SpooledPreimage]:
    """The preimages in a spool that were not withdrawn."""
    last: SpooledPreimage | None = None
    for one, _ in read_spool(path, start):
        if last is not None and not one.withdrawn:
            yield last
        last = None if one.withdrawn else one
    if last is not None:
        yield last


class OtherSpools:
    """The claims in the spools of other calls, read from each file only once. For one process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._read: dict[str, tuple[int, set[bytes]]] = {}

    def claims_of(self, call: str) -> set[bytes]:
        """The places that a call has claimed in its spool. Only in a write transaction, which then may claim others."""
        path = spool_path(self._directory, call)
        existing = spooled_calls(self._directory)
        self._read = {known: read for known, read in self._read.items() if known in existing}
        _announce_claims(path)
        start, places = self._read.get(call, (_COUNTER.size, set[bytes]()))
        for one, end in read_spool(path, start):
            start = end
            (places.discard if one.withdrawn else places.add)(one.row.place)
        self._read[call] = start, places
        return places


def _announce_claims(path: str) -> None:
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            (count,) = _COUNTER.unpack(os.pread(file, _COUNTER.size, 0))
            os.pwrite(file, _COUNTER.pack(count + 1), 0)
        finally:
            os.close(file)
