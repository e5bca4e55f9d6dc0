"""The call: one transaction over files.

Invariants, in the order they are kept:
1. Before a path changes, its claim, its preimage and what we mean to put there are in the store.
2. Each effect inside a call happens wholly or not at all; so does the call.
3. What somebody else saved meanwhile is recorded as theirs before ours takes its place, or ours gives way.
4. A call has exactly one begin and one end on record, whatever happened, even if it only read.
5. Abort puts back only what this call changed, newest first. A path someone changed after us stays as they left it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from mulligan.history.account import Account
from mulligan.history.closing import Closing
from mulligan.history.deeds import Deeds
from mulligan.history.intents import Intent, Step, as_it_is
from mulligan.history.ledger import Claimed, Facts, Ledger, entry_bytes, intending, touch_row
from mulligan.history.lifting import despite_modes
from mulligan.history.live import Touched
from mulligan.history.merge import Conflict, KeepOurs, WriteMerged, merge_entry
from mulligan.history.originals import keep_original
from mulligan.history.tables import RootRow, TouchRow
from mulligan.history.traits import Traits
from mulligan.session.tables import session_journal
from mulligan.store.blobs import SMALL_BYTES, Prepared, Vanished
from mulligan.store.claims import Wanted as Claim
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.journal import REFS
from mulligan.store.protocol import Tx
from mulligan.values.clock import monotonic_s
from mulligan.values.content import digest_of_content
from mulligan.values.digest import Digest, raw_digest
from mulligan.values.entries import Change, Entry, FileEntry, is_withheld, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import RootId, WorkspaceId
from mulligan.values.limits import CLAIM_WAIT_S
from mulligan.values.paths import RepoPath, path_bytes
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import DRAFT_PREFIX, NOTHING, Disk, Image
from mulligan.workspace.hard_links import HardLinks, staying_that_file
from mulligan.workspace.places import Spot
from mulligan.workspace.writing import Found, Swap, Swapped, Wanted, is_held_open, may_stay_one_file

Heal = Callable[[], bool]
"""Ends calls that dead processes left open; whether there were any."""

_CLAIM_NAP_S = 0.002
_BUSY_TRIES = 25


class _LookAgain(Exception):
    """What was captured before the claim is not what the store last saw; capture again under the claim."""


class Call(Closing):
    """Open until `commit` or `abort`. One thread at a time acts in it; the lock makes that so.

    `parts` are what it does in other roots: calls of their own that are published in one transaction with it, and put
    back with it.
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
        self._traits = Traits()
        self._times: dict[RepoPath, int] = {}
        self._originals: dict[bytes, RepoPath] = {}
        self._not_captured: set[RepoPath] = set()
        self._lock = fork_safe_lock()

    # In other roots.

    def part_at(self, disk: Disk, root: RootRow, make: Callable[[], Call]) -> Call:
        """What this call does in a root: the call itself, as long as it has done nothing elsewhere, else a part."""
        assert "part_of" not in (self.facts.cause or {}), "a part stays in the root it was made for"
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
        """Carry out one effect: all its intents in order, or none of them. What each path holds afterwards."""
        with self._lock, self.savepoint():
            self._check_open()
            steps = self._prepare(intents)
            aims = {step.intent.path: (step.image, step.wanted.entry) for step in steps}
            links = HardLinks(self.disk, aims, parts=any(intent.relinks for intent in intents))
            followers = links.all_followers()
            self.about_to_change(followers)
            for name in followers:
                if self.disk.capture.withheld(name) is not None:
                    self._keep_original(self._touched[name], self._images([name])[name])
            return [self._act_under_all_names(step, links) for step in steps]

    def _prepare(self, intents: Sequence[Intent], *, live: bool = False) -> list[Step]:
        """Claim every path; make its preimage and our intention durable. One transaction, if all is as last seen."""
        deadline = monotonic_s() + CLAIM_WAIT_S
        surprised = careful = False
        while True:
            try:
                steps = self._planned(intents)
                self._notice(steps)
                with self.ledger.store.write() as tx:
                    claimed = self._claim(tx, steps)
                    noted = {} if surprised else self._note(tx, steps, careful=careful, live=live)
                self._begun = True
                self._claimed |= claimed
                self.ledger.note_acting(self.facts.id, self._thread)
                if not surprised:
                    self._touched |= noted
                    return steps
                surprised, careful = False, True
            except Vanished:
                continue
            except _LookAgain:
                surprised = True
            except Claimed as claimed:
                if self.ledger.any_dead(claimed.by) and self._heal():
                    continue
                futile = not claimed.worth_waiting or self.ledger.acts_here(claimed.by)
                if futile or monotonic_s() > deadline:
                    words = f"Another call is changing the same files: {', '.join(claimed.by)}."
                    raise Refused("error", "path_claimed", words, claimed_by=list(claimed.by)) from None
                time.sleep(_CLAIM_NAP_S)

    def _planned(self, intents: Sequence[Intent]) -> list[Step]:
        """A refusal counts only if it is not of what somebody else is in the middle of doing there."""
        try:
            return [self._captured(intent) for intent in intents]
        except Refused:
            with self.ledger.store.read() as tx:
                wanted = [Claim(self._place(one.path), one.deep) for one in intents]
                self.ledger.check_free(tx, self.facts.id, wanted)
            raise

    def _claim(self, tx: Tx, steps: Sequence[Step]) -> set[Claim]:
        """The new ones: whoever holds a place holds it to the end."""
        if not self._begun:
            self.ledger.begin(tx, self.facts, self._owner)
        else:
            self.ledger.check_ours(tx, self.facts.id, self._owner)
        asked = {Claim(self._place(step.intent.path), step.deep) for step in steps} - self._claimed
        wanted = {one for one in asked if one.deep or Claim(one.place, deep=True) not in self._claimed | asked}
        if wanted:
            self.ledger.claim(tx, self.facts.id, list(wanted))
        return wanted

    def _captured(self, intent: Intent) -> Step:
        image = self._traits.with_group(self._found(intent))
        if image.special:
            raise Refused("error", "special_file", f"{intent.path} is a device, FIFO or socket.")
        if image.unstable:
            words = f"{intent.path} changed during every read, so there is no earlier content to keep; try again."
            raise Refused("conflict", "path_busy", words)
        wanted = intent.plan(image)
        if not intent.relinks:
            wanted = Wanted(staying_that_file(wanted.entry, image), wanted.content)
        wanted = self._as_captured(intent.path, wanted)
        in_use = intent.spares_writers and self._is_in_use(intent.path, image, wanted.entry)
        return Step(intent, image, wanted, self._bodies(image, wanted), in_use)

    def _is_in_use(self, path: RepoPath, image: Image, wanted: Entry) -> bool:
        """Whether another process has the file open for writing, and is not about to close it."""
        if not isinstance(image.entry, FileEntry) or not isinstance(wanted, FileEntry) or image.holds(wanted):
            return False
        if is_withheld(image.entry) or is_withheld(wanted):
            return False
        # In a folder that is shut, the kernel gives no lease before the call itself opens the folder.
        with suppress(FileNotFoundError, PermissionError), self._spot(path) as spot:
            return spot is not None and is_held_open(self.disk, spot, spot.name)
        return False

    def _as_captured(self, path: RepoPath, wanted: Wanted) -> Wanted:
        """With the entry that the disk will show there: what is moved may have come from a path with other rules."""
        entry, rules = wanted.entry, self.disk.capture
        if not isinstance(entry, FileEntry) or entry.withheld == rules.withheld(path):
            return wanted
        digest = entry.digest if wanted.content is None else digest_of_content(wanted.content)
        return Wanted(rules.named(path, replace(entry, digest=digest)), wanted.content)

    def _found(self, intent: Intent) -> Image:
        def look() -> Image:
            with self._spot(intent.path) as spot:
                return NOTHING if spot is None else self.disk.image(spot)

        return despite_modes(self.disk, intent.path, look, self._note_lift) if intent.lifts else look()

    def _bodies(self, image: Image, wanted: Wanted) -> list[Prepared]:
        """What the store must hold before the act: the bytes that are there, and those that shall be."""
        bodies, blobs = list[Prepared](), self.ledger.blobs
        if image.content is not None and isinstance(image.entry, FileEntry):
            bodies.append(blobs.prepare_seen(image.content, image.entry.digest))
        if wanted.content is not None and wanted.content is not image.content and not is_withheld(wanted.entry):
            assert isinstance(wanted.entry, FileEntry), "only files have content"
            after = None if len(wanted.content) <= SMALL_BYTES else image.content
            bodies.append(blobs.prepare(wanted.content, after=after, digest=wanted.entry.digest))
        return bodies

    def _note(self, tx: Tx, steps: Sequence[Step], *, careful: bool, live: bool) -> dict[RepoPath, Touched]:
        """Durable before the act: what was there, whose it was, and what we mean to put there."""
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
            self.ledger.touch(tx, row, step.bodies)
            noted[path] = known.noted_in(row)
        return noted

    def _first_touch(self, tx: Tx, step: Step, ordinal: int, careful: bool) -> Touched:
        path, before = step.intent.path, step.image.entry
        seen = self.ledger.last_seen(tx, self._place(path))
        if seen is not None and not same_state(seen, before):
            if not careful:
                raise _LookAgain
            self.ledger.external(tx, self.root, [Change(path, seen, before)], bodies=step.bodies)
        self._traits.note(path, step.image)
        # An ordinal once used may be on disk in a draft's name, so it is never used again for another path.
        row = touch_row(self.facts.id, path_bytes(path), self.root, ordinal=ordinal, before=before)
        return Touched(row, path, before, before, origin=step.intent.origin)

    def _act_under_all_names(self, step: Step, links: HardLinks) -> Entry:
        """What happens to a file under one of its names is our change under all of them."""
        path = step.intent.path
        names = [] if step.image.holds(step.wanted.entry) else links.followers(path)
        entry = self._act(step, links)
        if names:
            for name in names:
                self._follow(name, path, entry)
            self.absorb([path, *names])
        return entry

    def _follow(self, name: RepoPath, path: RepoPath, entry: Entry) -> None:
        """If a new file took the place of the one at `path`, which has this name too: it becomes one of the new."""
        touched = self._touched[name]
        with self._spot(name) as spot, self._spot(path) as placed:
            if spot is None or placed is None or not isinstance(entry, FileEntry):
                return
            if self.disk.link_group(spot) == self.disk.link_group(placed):
                return
            is_stored = not is_withheld(entry)
            content = self.ledger.blobs.content(entry.digest, entry.size) if is_stored else self.disk.image(placed).data
            wanted = self._as_captured(name, Wanted(entry, content))
            draft, rescue = self._draft(touched.row), partial(self._rescue, touched)
            Swap(self.disk, spot, draft, touched.after, wanted, rescue=rescue, same_as=placed).run()

    def _act(self, step: Step, links: HardLinks) -> Entry:
        for _ in range(_BUSY_TRIES):
            touched = self._touched[step.intent.path]
            if is_withheld(step.image.entry) or is_withheld(step.wanted.entry):
                self._keep_original(touched, step.image)
            if self._came_with_another_name(step):
                self._done.add(touched.path, step.image.entry)
                touched.after, touched.acted = step.wanted.entry, True
                return touched.after
            # On the list before it happens: an interrupt in the middle of it is put back too.
            self._done.add(touched.path, step.image.entry)
            touched.unsure = True
            outcome = self._swap_lifting(step, links) if step.intent.lifts else self._swap(step, links)
            touched.unsure = False
            if isinstance(outcome, Swapped):
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
        """Of a path that is not captured: what is there stays in a file beside it until the call ends."""
        name = keep_original(self.disk, touched.path, self._draft(touched.row), image)
        self._originals[name] = touched.path

    def _came_with_another_name(self, step: Step) -> bool:
        """A file with several names has changed under all of them when it was written under one."""
        if step.image.links < 2 or step.image.holds(step.wanted.entry):
            return False
        return self._image(step.intent.path).holds(step.wanted.entry)

    def _swap_lifting(self, step: Step, links: HardLinks) -> Swapped | Found:
        return despite_modes(self.disk, step.intent.path, lambda: self._swap(step, links), self._note_lift)

    def _swap(self, step: Step, links: HardLinks) -> Swapped | Found:
        touched = self._touched[step.intent.path]
        try:
            found = self.disk.resolve_exactly(step.intent.path)
        except (FileNotFoundError, NotADirectoryError):
            words = f"The directory of {step.intent.path} is not there."
            raise Refused("error", "parent_not_found", words) from None
        with found as spot, links.same_file(step.intent.path) as same_as:
            expected = step.image.entry
            return Swap(
                self.disk,
                spot,
                self._draft(touched.row),
                expected,
                step.wanted,
                rescue=lambda theirs: self._rescue(touched, theirs),
                # What another process saved there is not stored, so ours gives way.
                insist=step.intent.blind and not is_withheld(step.wanted.entry) and not is_withheld(expected),
                seen=step.image,
                inside=links.inside(step.intent.path),
                in_use=step.in_use,
                same_as=same_as,
            ).run()

    def _notice(self, steps: Sequence[Step]) -> None:
        """Somebody changed a path between two of our changes of it."""
        for step in steps:
            touched = self._touched.get(step.intent.path)
            if touched is not None and not same_state(touched.after, step.image.entry):
                self._rescue(touched, step.image)

    def _rescue(self, touched: Touched, theirs: Image) -> None:
        """Theirs is on record before ours may take its place."""
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
        """Whatever we put back from now on has their change in it."""
        touched.before = self._without_us(touched, theirs, touched.before)
        self._done.revise(touched.path, lambda was: self._without_us(touched, theirs, was))
        touched.row = replace(touched.row, before=entry_bytes(touched.before))
        touched.after = theirs

    def _without_us(self, touched: Touched, theirs: Entry, before: Entry) -> Entry:
        """What somebody made of our work, had we never touched it; theirs as it is, if that cannot be told."""
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
        """Only what this session has been handed, or has itself changed: a digest is not a key to others' work."""
        if digest in self.account.handed_out:
            return True
        with self.ledger.store.read() as tx:
            journal = session_journal(self.facts.session)
            return bool(tx.select(REFS, {"digest": raw_digest(digest), "journal": journal}, limit=1))

    # Finding.

    def _spot(self, path: RepoPath) -> Spot | nullcontext[None]:
        """The spot at a real path, or None while its directory is not there, or is a link that leads elsewhere."""
        try:
            return self.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return nullcontext()

    def _place(self, path: RepoPath) -> bytes:
        return self.disk.root.place_of(path)

    def _draft(self, row: TouchRow) -> bytes:
        return DRAFT_PREFIX + f"{self.facts.id[-12:]}-{row.ordinal}".encode("ascii")

    def _check_open(self) -> None:
        if self._is_elsewhere:
            raise fault("call_not_open", f"Call {self.facts.id} belongs to the process that this one was forked from.")
        if self.status != "open":
            raise fault("call_not_open", f"Call {self.facts.id} is {self.status}.")
