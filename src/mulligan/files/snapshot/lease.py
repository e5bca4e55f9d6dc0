"""Leases: a reader's claim that what it read has not changed.

1. A lease goes stale when HEAD or the index changes, when git reports another status for a path that the holder did not
write, or when a path that the holder read has changed. The fingerprint alone does not show the last of these.
2. The holder's writes renew the lease for those paths and for no others: a change that another program made at the same
time still makes it stale.
3. A lease belongs to one root, outlives the process, and ends after an hour without use.
4. Mulligan never refreshes a lease by itself. It is stale as long as the tree differs from what the holder read, and
valid again only if the tree is exactly as it was.

Leases are coordination, not history: no journal has their rows.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from datetime import timedelta

from mulligan.files.resolve import Root
from mulligan.files.snapshot.fingerprint import Fingerprint, Fingerprints, TreeState, changed_facts, parse_status
from mulligan.files.snapshot.manifest import LEASE_PATHS, LEASES, LeasePathRow, LeaseRow
from mulligan.files.tree.directories import Handles
from mulligan.files.tree.index import DigestCache, PathState
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.protocol import Store
from mulligan.values.canonical import decode, encode
from mulligan.values.clock import Clock, FixedClock, parse_timestamp, timestamp
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import IdSource
from mulligan.values.paths import RepoPath, name_of, path_bytes, path_from_bytes

IDLE_LIMIT = timedelta(hours=1)
_FORGET_AFTER = timedelta(days=1)
_USE_NOTED_EVERY = timedelta(minutes=1)
_FORGET_BATCH = 20
_FACTS_KEPT_BYTES = 256 * 1024
_REMEMBERED_LEASES = 256
_RULE_FILES = frozenset({".gitignore", ".ignore", ".gitattributes"})


class UnknownLeaseError(Exception):
    """No such lease, or it belongs to another root."""


class StaleLeaseError(Exception):
    """The tree differs from what the holder read. `changed` are the paths known to differ, in byte order."""

    def __init__(self, lease: str, fingerprint: Fingerprint, changed: Iterable[RepoPath], *, expired: bool) -> None:
        super().__init__(lease)
        self.lease = lease
        self.fingerprint = fingerprint
        self.changed = sorted(set(changed), key=path_bytes)
        self.expired = expired


@fast_dataclass(slots=True)
class Lease:
    """A lease in memory, as of `row.version`. `verified`: the epoch in which it was last found valid."""

    row: LeaseRow
    touched: dict[RepoPath, PathState] = field(default_factory=dict)
    own: set[RepoPath] = field(default_factory=set)
    verified: tuple[object, ...] | None = None

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(**decode(self.row.fingerprint))


class Leases:
    """The leases of one root. For any thread."""

    def __init__(self, store: Store, root_id: str, root: Root, *, clock: Clock, ids: IdSource) -> None:
        self.digests = DigestCache(root, clock)
        self.fingerprints = Fingerprints(root, clock)
        self._store = store
        self._root_id = root_id
        self._root = root
        self._clock = clock
        self._ids = ids
        self._lock = fork_safe_lock()
        self._memory: OrderedDict[str, Lease] = OrderedDict()

    def close(self) -> None:
        self.fingerprints.close()

    # The life of a lease.

    def issue(self, state: TreeState) -> Lease:
        fingerprint = encode(state.fingerprint.to_json()).decode("utf-8")
        now = timestamp(self._clock)
        row = LeaseRow(self._ids.new(), self._root_id, fingerprint, state.facts_hash, _packed(state.facts), now, 1)
        with self._lock, self._store.write() as tx:
            tx.put(LEASES, row)
            cutoff = _before(self._clock, _FORGET_AFTER)
            for old in tx.select(LEASES, between=("used_at", "", cutoff), order=("used_at",), limit=_FORGET_BATCH):
                tx.delete(LEASES, old.id)
                for path in tx.select(LEASE_PATHS, {"lease": old.id}):
                    tx.delete(LEASE_PATHS, path.lease, path.path)
        return self._remember(Lease(row, verified=state.epoch))

    def check(self, lease_id: str) -> tuple[Lease, TreeState]:
        """The lease and the present state, if the lease is valid. Raises UnknownLeaseError or StaleLeaseError."""
        with self._lock:
            lease = self._find(lease_id)
            state = self.fingerprints.state()
            if parse_timestamp(lease.row.used_at) + IDLE_LIMIT < self._clock.now():
                raise StaleLeaseError(lease_id, state.fingerprint, (), expired=True)
            if lease.verified != state.epoch:
                self._check_current(lease, state)
            self._note_use(lease)
            return lease, state

    def add_read_paths(self, lease: Lease, seen: Mapping[RepoPath, PathState]) -> None:
        """Add paths that the holder has read. Raises StaleLeaseError if one differs from what it read there before."""
        with self._lock:
            known = self._find(lease.id)
            changed = [path for path, now in seen.items() if known.touched.get(path, now) != now]
            if changed:
                raise StaleLeaseError(lease.id, self.fingerprints.state().fingerprint, changed, expired=False)
            fresh = {path: now for path, now in seen.items() if path not in known.touched}
            if fresh:
                self._write(known, fresh, own=())

    def renew(self, lease: Lease, before: TreeState, own: Mapping[RepoPath, PathState]) -> TreeState:
        """Renew the lease for paths that the holder wrote. Answers the state of the tree after that."""
        with self._lock:
            known = self._find(lease.id)
            after = self.fingerprints.state()
            # New ignore rules change git's status of other files; then the lease takes the whole present state.
            base = after if any(name_of(path) in _RULE_FILES for path in own) else before
            known.own |= own.keys()
            facts = {path: fact for path, fact in base.facts.items() if path_from_bytes(path) not in known.own}
            hashed = base.facts_hash_without(known.own)
            now = timestamp(self._clock)
            known.row = replace(known.row, facts_hash=hashed, facts=_packed(facts), used_at=now)
            known.verified = None
            self._write(known, own, own=own)
            return after

    # What makes a lease stale.

    def _check_current(self, lease: Lease, state: TreeState) -> None:
        base, now = lease.fingerprint, state.fingerprint
        commit_changed = (base.head_oid, base.index_oid) != (now.head_oid, now.index_oid)
        status_changed = state.facts_hash_without(lease.own) != lease.row.facts_hash
        changed = self._changed_on_disk(lease)
        if status_changed:
            changed += self._changed_in_status(lease, state)
        if commit_changed or changed or status_changed:
            raise StaleLeaseError(lease.id, now, changed, expired=False)
        lease.verified = state.epoch

    def _changed_on_disk(self, lease: Lease) -> list[RepoPath]:
        found: list[RepoPath] = []
        with Handles(self._root.handle) as handles:
            for path, seen in sorted(lease.touched.items(), key=lambda item: path_bytes(item[0])):
                try:
                    same = self.digests.look(handles, path) == seen
                except OSError:
                    same = False
                if not same:
                    found.append(path)
        return found

    @staticmethod
    def _changed_in_status(lease: Lease, state: TreeState) -> list[RepoPath]:
        if lease.row.facts is None:
            return []
        own = {path_bytes(path) for path in lease.own}
        now = {path: fact for path, fact in state.facts.items() if path not in own}
        return changed_facts(parse_status(zlib.decompress(lease.row.facts)), now)

    # Memory and store.

    def _find(self, lease_id: str) -> Lease:
        if not lease_id.isascii():
            # Mulligan makes only ASCII ids, and a store may be unable to search for others.
            raise UnknownLeaseError(lease_id)
        with self._store.read() as tx:
            row = tx.get(LEASES, lease_id)
            if row is None or row.root != self._root_id:
                raise UnknownLeaseError(lease_id)
            known = self._memory.get(lease_id)
            if known is not None and known.row.version == row.version:
                known.row = row
                return known
            rows = tx.select(LEASE_PATHS, {"lease": lease_id})
        lease = Lease(row)
        for one in rows:
            path = path_from_bytes(one.path)
            lease.touched[path] = PathState.from_json(decode(one.seen))
            if one.own:
                lease.own.add(path)
        return self._remember(lease)

    def _remember(self, lease: Lease) -> Lease:
        self._memory[lease.id] = lease
        self._memory.move_to_end(lease.id)
        while len(self._memory) > _REMEMBERED_LEASES:
            self._memory.popitem(last=False)
        return lease

    def _write(self, lease: Lease, seen: Mapping[RepoPath, PathState], *, own: Iterable[RepoPath]) -> None:
        mine, row, now_at = set(own), lease.row, timestamp(self._clock)
        lease.touched |= seen
        with self._store.write() as tx:
            stored = tx.get(LEASES, lease.id) or row
            lease.row = replace(row, used_at=now_at, version=stored.version + 1)
            tx.put(LEASES, lease.row)
            for path, now in seen.items():
                owned = int(path in mine or path in lease.own)
                tx.put(LEASE_PATHS, LeasePathRow(lease.id, path_bytes(path), encode(now.to_json()), owned))
        if stored.version != row.version:
            # Another process wrote to the same lease meanwhile, so the next use reads all of it again.
            self._memory.pop(lease.id, None)

    def _note_use(self, lease: Lease) -> None:
        """Note the use of a lease, but not each time, because that would be a write for every read."""
        if lease.row.used_at >= _before(self._clock, _USE_NOTED_EVERY):
            return
        with self._store.write() as tx:
            row = tx.get(LEASES, lease.id)
            if row is not None:
                lease.row = replace(row, used_at=timestamp(self._clock))
                tx.put(LEASES, lease.row)


def _before(clock: Clock, span: timedelta) -> str:
    """The time that long ago, as a column has it."""
    return timestamp(FixedClock(clock.now() - span))


def _packed(facts: Mapping[bytes, bytes]) -> bytes | None:
    text = b"".join(facts[path] + b" " + path + b"\0" for path in sorted(facts) if facts[path][:1] not in b"RC")
    packed = zlib.compress(text, 1)
    return packed if len(packed) <= _FACTS_KEPT_BYTES else None
