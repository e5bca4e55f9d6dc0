"""The call: one transaction over files.

Invariants, in the order they are kept:
1. Before a path changes, its claim, its preimage and what we mean to put there are in the store.
2. Each effect inside a call happens wholly or not at all; so does the call.
3. What somebody else saved meanwhile is recorded as theirs before ours takes its place, or ours gives way.
4. A call has exactly one begin and one end on record, whatever happened, even if it only read.
5. Abort puts back only what this call changed, newest first. A path someone changed after us stays as they left it.

Which call is being made right now, for code that has no call in its hands.

A context variable: asyncio tasks and `asyncio.to_thread` carry it along by themselves, and two calls that interleave on
one thread each see their own. A thread started by hand carries it with `contextvars.copy_context().run`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from mulligan.files.disk import DRAFT_PREFIX, NOTHING, Disk, Image
from mulligan.files.replace import (
    FoundEntry,
    HardLinks,
    Replacement,
    Swapped,
    TargetEntry,
    is_held_open,
    is_unlike_ours,
    may_stay_one_file,
    staying_that_file,
)
from mulligan.files.resolve import ResolvedPath
from mulligan.history.abort import keep_original
from mulligan.history.cause import PartOfCall
from mulligan.history.commit import Account, Closing, Savepoint
from mulligan.history.ledger import Claimed, Facts, Ledger, entry_bytes, intending
from mulligan.history.merge import Conflict, KeepOurs, WriteMerged, merge_entry
from mulligan.history.permissions import LostMetadata, despite_modes
from mulligan.history.tables import TOUCHES, RootRow, TouchRow
from mulligan.history.undo_log import Deeds, Intent, IntentStep, Touched, as_it_is
from mulligan.session.tables import session_journal
from mulligan.store.blobs import SMALL_BYTES, BlobVanishedError, Prepared
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.journal import REFS
from mulligan.store.protocol import Claim, Tx
from mulligan.values.clock import monotonic_s
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.entries import Change, Entry, FileEntry, digest_of_content, is_withheld, same_state
from mulligan.values.errors import Refused, fault
from mulligan.values.ids import RootId, TurnId, WorkspaceId
from mulligan.values.limits import CLAIM_WAIT_S
from mulligan.values.paths import RepoPath, path_bytes
from mulligan.values.scoped_var import ScopedVar

Heal = Callable[[], bool]
"""Aborts calls that dead processes left open; answers whether there were any."""

_CLAIM_NAP_S = 0.002
_BUSY_TRIES = 25


class _LookAgain(Exception):
    """What was captured before the claim is not what the store last saw; capture again under the claim."""


class Call(Closing):
    """One transaction over files, open until `commit` or `abort`. A lock lets one thread at a time work in it.

    `parts` are its changes in other roots: calls of their own that commit in one transaction with it, and abort with
    it.
    """

    def __init__(self, ledger: Ledger, disk: Disk, root: RootRow, facts: Facts, *, heal: Heal = bool) -> None:
        self.ledger = ledger
        self.disk = disk
        self.root = root
        self.facts = facts
        self.status = "open"
        self.exit_held = self._watched = None
        self.strict = False
        self.race_window = False
        self.conflicts: list[RepoPath] = []
        self.coverage: list[dict[str, str]] = []
        self.at_end = []
        self.parts: dict[str, Call] = {}
        self.home = root.id
        self._owner = ledger.store.owner()
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self.account = Account(ledger.blobs)
        self._begun = self._stuck = self._has_commands = False
        self._reason = "in_doubt"
        self._heal = heal
        self._claimed: set[Claim] = set()
        self._touched: dict[RepoPath, Touched] = {}
        self._done = Deeds()
        self._shared: set[RepoPath] = set()
        self._anybodys: dict[tuple[RepoPath, Digest], int] = {}
        self._traits = LostMetadata()
        self._times: dict[RepoPath, int] = {}
        self._originals: dict[bytes, RepoPath] = {}
        self._not_captured: set[RepoPath] = set()
        self._lock = fork_safe_lock()

    # In other roots.

    def part_at(self, disk: Disk, root: RootRow, make: Callable[[], Call]) -> Call:
        """The call or part that works in a root: the call itself, if it has done nothing in another root yet, else a
        part.
        """
        assert not isinstance(self.facts.cause, PartOfCall), "a part stays in the root it was made for"
        with self._lock:
            if not (self._begun or self._touched or self.parts):
                self.disk, self.root = disk, root
                self.facts = replace(self.facts, root=RootId(root.id), workspace=WorkspaceId(root.workspace))
            if self.root.id == root.id:
                return self
            if root.id not in self.parts:
                self.parts[root.id] = make()
            return self.parts[root.id]

    # Acting.

    def change(self, intents: Sequence[Intent]) -> list[Entry]:
        """Carry out one effect: all its intents in order, or none. Answers what each path holds afterwards."""
        # The lock first: another thread that acts in this call must not see half of an effect. The savepoint puts back
        # what the effect has done so far if one of its paths cannot be changed.
        with self._lock, Savepoint(_call=self):
            self._check_open()
            steps = self._prepare(intents)
            links = self._hard_links(steps)
            done: list[Entry] = []
            # The store now has what each path held and what it shall hold, so files may change.
            for step in steps:
                done.append(self._act(step, None) if links is None else self._act_under_all_names(step, links))
            return done

    def _hard_links(self, steps: Sequence[IntentStep]) -> HardLinks | None:
        """The hard links of the changed files; None if no file has several names. Claims all their names."""
        for step in steps:
            if step.image.inode is not None or step.wanted.entry.link_group is not None:
                break
        else:
            return None
        aims = {step.intent.path: (step.image, step.wanted.entry) for step in steps}
        links = HardLinks(self.disk, aims, parts=any(step.intent.relinks for step in steps))
        followers = links.all_followers()
        self.about_to_change(followers)
        for name in followers:
            if self.disk.capture.withheld(name) is not None:
                self._keep_original(self._touched[name], self._images([name])[name])
        return links

    def _prepare(self, intents: Sequence[Intent], *, live: bool = False) -> list[IntentStep]:
        """Claim every path, and store its preimage and our intention.

        One transaction, if no path changed since it was recorded.
        """
        deadline: float | None = None
        surprised = careful = False
        while True:
            try:
                # Looking and hashing happen before the transaction, so that other writers do not wait for a disk.
                # What the look has missed is found under the claim (`_LookAgain`).
                steps = self._planned(intents)
                if self._touched:
                    self._notice(steps)
                with self.ledger.store.write() as tx:
                    claimed = self._claim(tx, steps)
                    noted = {} if surprised else self._note(tx, steps, careful=careful, live=live)
                # Set after the commit, because an interrupt before it leaves nothing of the call in the store.
                self._begun = True
                self._claimed |= claimed
                self.ledger.acting[self.facts.id] = self._thread
                if not surprised:
                    self._touched |= noted
                    return steps
                surprised, careful = False, True
            except BlobVanishedError:
                continue
            except _LookAgain:
                surprised = True
            except Claimed as claimed:
                if self.ledger.any_dead(claimed.by) and self._heal():
                    continue
                futile = not claimed.worth_waiting or self.ledger.acts_here(claimed.by)
                deadline = monotonic_s() + CLAIM_WAIT_S if deadline is None else deadline
                if futile or monotonic_s() > deadline:
                    words = f"Another call is changing the same files: {', '.join(claimed.by)}."
                    raise Refused("error", "path_claimed", words, claimed_by=list(claimed.by)) from None
                time.sleep(_CLAIM_NAP_S)

    def _planned(self, intents: Sequence[Intent]) -> list[IntentStep]:
        """Plan every path. A refusal counts only if no other call is changing that path right now."""
        steps: list[IntentStep] = []
        try:
            for intent in intents:
                steps.append(self._captured(intent))
            return steps
        except Refused:
            with self.ledger.store.read() as tx:
                wanted = [Claim(self.disk.root.place_of(one.path), one.deep) for one in intents]
                self.ledger.check_free(tx, self.facts.id, wanted)
            raise

    def _claim(self, tx: Tx, steps: Sequence[IntentStep]) -> set[Claim]:
        """The claims that the call does not have yet; it holds each claim to its end."""
        if not self._begun:
            self.ledger.begin(tx, self.facts, self._owner)
        else:
            self.ledger.check_ours(tx, self.facts.id, self._owner)
        asked: set[Claim] = set()
        for step in steps:
            asked.add(Claim(self.disk.root.place_of(step.intent.path), step.deep))
        asked -= self._claimed
        # A deep claim that the call has or takes now covers the paths below it.
        wanted: set[Claim] = set()
        for one in asked:
            whole = one if one.deep else Claim(one.place, deep=True)
            if one.deep or (whole not in self._claimed and whole not in asked):
                wanted.add(one)
        if wanted:
            self.ledger.claim(tx, self.facts.id, list(wanted))
        return wanted

    def _captured(self, intent: Intent) -> IntentStep:
        try:
            image = self._look(intent.path)
        except PermissionError as refused:
            if not intent.lifts:
                raise
            image = despite_modes(
                self.disk, intent.path, lambda: self._look(intent.path), self._note_lift, refused=refused
            )
        if self._traits.groups:
            image = self._traits.with_group(image)
        if image.special:
            raise Refused("error", "special_file", f"{intent.path} is a device, FIFO or socket.")
        if image.unstable:
            words = f"{intent.path} changed during every read, so there is no earlier content to keep; try again."
            raise Refused("conflict", "path_busy", words)
        wanted = intent.plan(image)
        if not intent.relinks and wanted.entry.link_group != image.entry.link_group:
            wanted = TargetEntry(staying_that_file(wanted.entry, image), wanted.content)
        if self.disk.capture.any or wanted.entry.withheld is not None:
            wanted = self._as_captured(intent.path, wanted)
        in_use = intent.spares_writers and self._is_in_use(intent.path, image, wanted.entry)
        return IntentStep(intent, image, wanted, self._bodies(image, wanted), in_use)

    def _is_in_use(self, path: RepoPath, image: Image, wanted: Entry) -> bool:
        """Whether another process has the file open for writing and keeps it open."""
        if not isinstance(image.entry, FileEntry) or not isinstance(wanted, FileEntry) or image.holds(wanted):
            return False
        if image.entry.withheld is not None or wanted.withheld is not None:
            return False
        # The kernel gives no lease in a folder that we may not enter before the call itself opens it.
        with suppress(FileNotFoundError, PermissionError), self._spot(path) as spot:
            return spot is not None and is_held_open(self.disk, spot, spot.name)
        return False

    def _as_captured(self, path: RepoPath, wanted: TargetEntry) -> TargetEntry:
        """The wanted entry as the disk will show it: a moved file may come from a path with other capture rules."""
        entry, rules = wanted.entry, self.disk.capture
        if not isinstance(entry, FileEntry) or entry.withheld == rules.withheld(path):
            return wanted
        digest = entry.digest if wanted.content is None else digest_of_content(wanted.content)
        return TargetEntry(rules.named(path, replace(entry, digest=digest)), wanted.content)

    def _look(self, path: RepoPath) -> Image:
        """The image of a real path; empty if its directory is missing, or is now a link that leads elsewhere."""
        try:
            spot = self.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING
        try:
            return self.disk.image(spot)
        finally:
            spot.close()

    def _bodies(self, image: Image, wanted: TargetEntry) -> list[Prepared]:
        """The blobs that the store must have before the change: the present bytes, and the new ones."""
        bodies, blobs = list[Prepared](), self.ledger.blobs
        if image.content is not None and isinstance(image.entry, FileEntry):
            bodies.append(blobs.prepare_scanned(image.content, image.entry.digest))
        if wanted.content is not None and wanted.content is not image.content and wanted.entry.withheld is None:
            assert isinstance(wanted.entry, FileEntry), "only files have content"
            after = None if len(wanted.content) <= SMALL_BYTES else image.content
            bodies.append(blobs.prepare(wanted.content, after=after, digest=wanted.entry.digest))
        return bodies

    def _note(self, tx: Tx, steps: Sequence[IntentStep], *, careful: bool, live: bool) -> dict[RepoPath, Touched]:
        """Store, before the change, what the path held, who changed it last, and what we intend to write."""
        noted: dict[RepoPath, Touched] = {}
        ordinal = len(self._touched)
        for step in steps:
            path = step.intent.path
            known = noted.get(path) or self._touched.get(path)
            if known is None:
                known = self._first_touch(tx, step, ordinal, careful)
                ordinal += 1
            stays = live or step.in_use or may_stay_one_file(step.image, step.wanted.entry)
            row = known.row
            for entry in step.passing():
                row = intending(row, entry, self._draft(row), in_place=stays)
            for body in step.bodies:
                self.ledger.blobs.put(tx, body)
            tx.put(TOUCHES, row)
            noted[path] = known.noted_in(row)
        return noted

    def _first_touch(self, tx: Tx, step: IntentStep, ordinal: int, careful: bool) -> Touched:
        path, before = step.intent.path, step.image.entry
        place = self.disk.root.place_of(path)
        seen = self.ledger.last_seen(tx, place)
        if seen is not None and not same_state(seen, before):
            if not careful:
                raise _LookAgain
            self.ledger.external(tx, self.root, [Change(path, seen, before)], bodies=step.bodies)
        if step.image.links > 1 or is_unlike_ours(step.image):
            self._traits.note(path, step.image)
        # A used ordinal may be part of a draft's name on disk, so no other path of the call may get it.
        row = TouchRow(self.facts.id, path_bytes(path), ordinal, place, entry_bytes(before), b"[]", b"[]", 0)
        return Touched(row, path, before, before, origin=step.intent.origin)

    def _act_under_all_names(self, step: IntentStep, links: HardLinks) -> Entry:
        """Change a file, and note the change for all its names."""
        path = step.intent.path
        names = [] if step.image.holds(step.wanted.entry) else links.followers(path)
        entry = self._act(step, links)
        if names:
            for name in names:
                self._follow(name, path, entry)
            self.absorb([path, *names])
        return entry

    def _follow(self, name: RepoPath, path: RepoPath, entry: Entry) -> None:
        """If a new file replaced the one at `path`, make this other name of the old file a name of the new one."""
        touched = self._touched[name]
        with self._spot(name) as spot, self._spot(path) as placed:
            if spot is None or placed is None or not isinstance(entry, FileEntry):
                return
            if self.disk.link_group(spot) == self.disk.link_group(placed):
                return
            is_stored = entry.withheld is None
            content = self.ledger.blobs.content(entry.digest, entry.size) if is_stored else self.disk.image(placed).data
            wanted = self._as_captured(name, TargetEntry(entry, content))
            draft, rescue = self._draft(touched.row), partial(self._rescue, touched)
            Replacement(self.disk, spot, draft, touched.after, wanted, rescue=rescue, same_as=placed).run()

    def _act(self, step: IntentStep, links: HardLinks | None) -> Entry:
        for _ in range(_BUSY_TRIES):
            touched = self._touched[step.intent.path]
            if step.image.entry.withheld is not None or step.wanted.entry.withheld is not None:
                self._keep_original(touched, step.image)
            if step.image.links > 1 and self._came_with_another_name(step):
                self._done.add(touched.path, step.image.entry)
                touched.after, touched.acted = step.wanted.entry, True
                return touched.after
            # Listed before it happens, so that abort also restores a change that an interrupt cut short.
            self._done.add(touched.path, step.image.entry)
            touched.unsure = True
            try:
                outcome = self._swap(step, links)
            except PermissionError as refused:
                if not step.intent.lifts:
                    raise
                outcome = self._swap_lifting(step, links, refused)
            touched.unsure = False
            if isinstance(outcome, Swapped):
                if links is not None:
                    links.was_placed(touched.path)
                if outcome.content is not None:
                    self.ledger.blobs.store(outcome.content)
                touched.becomes(outcome.entry)
                touched.acted = True
                self.race_window |= outcome.race_window
                return outcome.entry
            self._done.drop_last()
            if outcome.in_use:
                words = f"{touched.path} is open in another program, which has truncated or replaced it meanwhile."
                raise Refused("conflict", "file_in_use", words, path=touched.path, root=self.root.id)
            (step,) = self._prepare([step.intent])
        words = f"{step.intent.path} is being written so fast by somebody else that no moment was found to change it."
        raise Refused("conflict", "path_busy", words)

    def _keep_original(self, touched: Touched, image: Image) -> None:
        """Copy an uncaptured path to a file beside it, which stays until the call ends."""
        name = keep_original(self.disk, touched.path, self._draft(touched.row), image)
        self._originals[name] = touched.path

    def _came_with_another_name(self, step: IntentStep) -> bool:
        """Whether the path changed already, because the call wrote the file under another of its names."""
        if step.image.holds(step.wanted.entry):
            return False
        return self._image(step.intent.path).holds(step.wanted.entry)

    def _swap_lifting(
        self, step: IntentStep, links: HardLinks | None, refused: PermissionError
    ) -> Swapped | FoundEntry:
        return despite_modes(
            self.disk, step.intent.path, lambda: self._swap(step, links), self._note_lift, refused=refused
        )

    def _swap(self, step: IntentStep, links: HardLinks | None) -> Swapped | FoundEntry:
        touched = self._touched[step.intent.path]
        try:
            found = self.disk.resolve_exactly(step.intent.path)
        except (FileNotFoundError, NotADirectoryError):
            words = f"The directory of {step.intent.path} is not there."
            raise Refused("error", "parent_not_found", words) from None
        with found as spot, nullcontext() if links is None else links.same_file(step.intent.path) as same_as:
            expected = step.image.entry
            return Replacement(
                self.disk,
                spot,
                self._draft(touched.row),
                expected,
                step.wanted,
                rescue=lambda theirs: self._rescue(touched, theirs),
                # The bytes of another process's save may not be stored here, so our write must not replace them.
                insist=step.intent.blind and step.wanted.entry.withheld is None and expected.withheld is None,
                seen=step.image,
                inside=1 if links is None else links.inside(step.intent.path),
                in_use=step.in_use,
                same_as=same_as,
            ).run()

    def _notice(self, steps: Sequence[IntentStep]) -> None:
        """Record a change that another process made between two changes of this call."""
        for step in steps:
            touched = self._touched.get(step.intent.path)
            if touched is not None and not same_state(touched.after, step.image.entry):
                self._rescue(touched, step.image)

    def _rescue(self, touched: Touched, theirs: Image) -> None:
        """Record another process's save before our content may replace it."""
        if theirs.content is not None:
            self.ledger.blobs.store(theirs.content)
        if theirs.special:
            return
        change = Change(touched.path, touched.after, theirs.entry)
        self._make_room_for(touched, theirs.entry)
        with self.ledger.store.write() as tx:
            self.ledger.external(tx, self.root, [change])
            self.ledger.touch(tx, touched.row, ())

    def _make_room_for(self, touched: Touched, theirs: Entry) -> None:
        """Add another process's change to the preimage, so that abort restores it too."""
        touched.before = self._without_us(touched, theirs, touched.before)
        self._done.revise(touched.path, lambda was: self._without_us(touched, theirs, was))
        touched.row = replace(touched.row, before=entry_bytes(touched.before))
        touched.after = theirs

    def _without_us(self, touched: Touched, theirs: Entry, before: Entry) -> Entry:
        """What the path would hold with the other process's change but without ours; theirs as it is, if that cannot be
        told.
        """
        if any(map(is_withheld, (touched.after, theirs, before))):
            return theirs
        merged = merge_entry(touched.after, theirs, before, self.ledger.blobs.read) if touched.acted else None
        if merged is None or isinstance(merged, Conflict | KeepOurs):
            return theirs
        if isinstance(merged, WriteMerged) and merged.content is not None:
            self.ledger.blobs.store(merged.content)
        return merged.entry

    def _keep_carefully(self, paths: Sequence[RepoPath], *, going: bool) -> None:
        for step in self._prepare([Intent(path, as_it_is, deep=going) for path in paths], live=True):
            self._done.add(step.intent.path, step.image.entry)
            self._touched[step.intent.path].unsure = True

    def may_read_blob(self, digest: Digest) -> bool:
        """Whether the session may read a blob: only one that it got in an answer or wrote itself.

        A digest alone gives no access.
        """
        if digest in self.account.handed_out:
            return True
        with self.ledger.store.read() as tx:
            journal = session_journal(self.facts.session)
            return bool(tx.select(REFS, {"digest": raw_digest(digest), "journal": journal}, limit=1))

    # Finding.

    def _spot(self, path: RepoPath) -> ResolvedPath | nullcontext[None]:
        """The resolved path, or None if its directory is missing, or is now a link that leads elsewhere."""
        try:
            return self.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return nullcontext()

    def _draft(self, row: TouchRow) -> bytes:
        return DRAFT_PREFIX + f"{self.facts.id[-12:]}-{row.ordinal}".encode("ascii")

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise fault("call_not_open", f"Call {self.facts.id} belongs to the process that this one was forked from.")
        if self.status != "open":
            raise fault("call_not_open", f"Call {self.facts.id} is {self.status}.")


_call: ScopedVar[Call] = ScopedVar("mulligan_call")
_turn: ScopedVar[TurnId] = ScopedVar("mulligan_turn")


def current_call() -> Call | None:
    """The innermost open call of this context, or None."""
    call = _call.now()
    return call if call is not None and call.is_open_here else None


def current_turn() -> TurnId | None:
    return _turn.now()


making = _call.block
"""Enters a block that runs as part of the call."""

during = _turn.block
"""Enters a block that runs as part of the turn."""
