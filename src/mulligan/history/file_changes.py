"""How an open call changes files itself.

The order of each effect: capture all paths, store their preimages and what we mean to put there, then change one path
after another. If one of them cannot be changed, the effect's savepoint rolls back the others.

A path may change between any two of these steps, because people and other programs do not take our claims. So each
change is an exchange that shows what was at the path at that moment (`files.replace`). If that is not what we planned
on, the path is planned again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

from mulligan.files.disk import NOTHING, Image
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
from mulligan.history.abort import keep_original
from mulligan.history.ledger import Claimed, entry_bytes, intending
from mulligan.history.merge import Conflict, KeepOurs, WriteMerged, merge_entry
from mulligan.history.permissions import despite_modes
from mulligan.history.tables import TOUCHES, TouchRow
from mulligan.history.undo_log import CallState, Intent, IntentStep, Savepoint, Touched, as_it_is
from mulligan.store.blobs import SMALL_BYTES, BlobVanishedError, Prepared
from mulligan.store.protocol import Claim, Tx
from mulligan.values.clock import monotonic_s
from mulligan.values.entries import Change, DirEntry, Entry, FileEntry, digest_of_content, is_withheld, same_state
from mulligan.values.errors import Refused
from mulligan.values.limits import CLAIM_WAIT_S
from mulligan.values.paths import RepoPath, path_bytes

Heal = Callable[[], bool]
"""Aborts calls that dead processes left open; answers whether there were any."""

_CLAIM_NAP_S = 0.002
_BUSY_TRIES = 25


class _CaptureAgain(Exception):
    """What was captured before the claim is not what the store last saw; capture again under the claim."""


class FileChanges:
    """Changes the files of one root for one call."""

    def __init__(self, state: CallState, heal: Heal) -> None:
        self._state = state
        self._ledger = state.ledger
        self._heal = heal

    def change(self, intents: Sequence[Intent]) -> list[Entry]:
        """Carry out one effect: all its intents in order, or none. Answers what each path holds afterwards."""
        # The lock first: another thread that acts in this call must not see half of an effect. The savepoint puts back
        # what the effect has done so far if one of its paths cannot be changed.
        with self._state.lock, Savepoint(_state=self._state):
            self._state.check_open()
            steps = self._prepare(intents)
            links: HardLinks | None = None
            for step in steps:
                if step.image.inode is not None or step.wanted.entry.link_group is not None:
                    links = self._hard_links(steps)
                    break
            done: list[Entry] = []
            # The store now has what each path held and what it shall hold, so files may change.
            for step in steps:
                done.append(self._act(step, None) if links is None else self._act_under_all_names(step, links))
            return done

    def _hard_links(self, steps: Sequence[IntentStep]) -> HardLinks:
        """The hard links of the changed files. Claims all their names."""
        aims = {step.intent.path: (step.image, step.wanted.entry) for step in steps}
        links = HardLinks(self._state.disk, aims, parts=any(step.intent.relinks for step in steps))
        followers = links.all_followers()
        # The kernel changes the file under all of its names at once, so each of them needs its own preimage.
        self.keep_preimages([name for name in followers if name not in self._state.touched])
        for name in followers:
            if self._state.disk.capture.withheld(name) is not None:
                self._keep_original(self._state.touched[name], self._state.images([name])[name])
        return links

    def keep_preimages(self, paths: Sequence[RepoPath], *, going: bool = False) -> None:
        """Claim paths that another writer is about to change, and store their preimages. `going`: see `Intent.deep`."""
        for step in self._prepare([Intent(path, as_it_is, deep=going) for path in paths], live=True) if paths else ():
            self._state.log.add(step.intent.path, step.image.entry)
            # The path may change at any moment from now on.
            self._state.touched[step.intent.path].unsure = True

    def _prepare(self, intents: Sequence[Intent], *, live: bool = False) -> list[IntentStep]:
        """Claim every path, and store its preimage and our intention.

        One transaction, if no path changed since it was recorded.
        """
        deadline: float | None = None
        surprised = careful = False
        while True:
            try:
                # Looking and hashing happen before the transaction, so that other writers do not wait for a disk.
                # What the look has missed is found under the claim (`_CaptureAgain`).
                steps = self._planned(intents, live=live)
                if self._state.touched:
                    self._notice(steps)
                with self._ledger.store.write() as tx:
                    claimed = self._claim(tx, steps)
                    noted = {} if surprised else self._note(tx, steps, careful=careful, live=live)
                # Set after the commit, because an interrupt before it leaves nothing of the call in the store.
                self._state.has_begun = True
                self._state.claimed |= claimed
                self._ledger.acting[self._state.facts.id] = self._state.thread
                if not surprised:
                    self._state.touched |= noted
                    return steps
                surprised, careful = False, True
            except BlobVanishedError:
                continue
            except _CaptureAgain:
                surprised = True
            except Claimed as claimed:
                if self._ledger.any_dead(claimed.by) and self._heal():
                    continue
                futile = not claimed.worth_waiting or self._ledger.acts_here(claimed.by)
                deadline = monotonic_s() + CLAIM_WAIT_S if deadline is None else deadline
                if futile or monotonic_s() > deadline:
                    words = f"Another call is changing the same files: {', '.join(claimed.by)}."
                    raise Refused("error", "path_claimed", words, claimed_by=list(claimed.by)) from None
                time.sleep(_CLAIM_NAP_S)

    def _planned(self, intents: Sequence[Intent], *, live: bool) -> list[IntentStep]:
        """Plan every path. A refusal counts only if no other call is changing that path right now."""
        steps: list[IntentStep] = []
        try:
            for intent in intents:
                steps.append(self._captured(intent, live=live))
            return steps
        except Refused:
            with self._ledger.store.read() as tx:
                wanted = [Claim(self._state.disk.root.place_of(one.path), one.deep) for one in intents]
                self._ledger.check_free(tx, self._state.facts.id, wanted)
            raise

    def _claim(self, tx: Tx, steps: Sequence[IntentStep]) -> set[Claim]:
        """The claims that the call does not have yet; it holds each claim to its end."""
        if not self._state.has_begun:
            self._ledger.begin(tx, self._state.facts, self._state.owner)
        else:
            self._ledger.check_ours(tx, self._state.facts.id, self._state.owner)
        asked: set[Claim] = set()
        for step in steps:
            asked.add(Claim(self._state.disk.root.place_of(step.intent.path), step.deep))
        asked -= self._state.claimed
        # A deep claim that the call has or takes now covers the paths below it.
        wanted: set[Claim] = set()
        for one in asked:
            whole = one if one.deep else Claim(one.place, deep=True)
            if one.deep or (whole not in self._state.claimed and whole not in asked):
                wanted.add(one)
        if wanted:
            self._ledger.claim(tx, self._state.facts.id, list(wanted))
        return wanted

    def _captured(self, intent: Intent, *, live: bool) -> IntentStep:
        try:
            image = self._look(intent.path)
        except PermissionError as refused:
            if not intent.lifts:
                raise
            image = despite_modes(
                self._state.disk, intent.path, lambda: self._look(intent.path), self._state.note_lift, refused=refused
            )
        if self._state.lost_metadata.groups:
            image = self._state.lost_metadata.with_group(image)
        if image.special:
            raise Refused("error", "special_file", f"{intent.path} is a device, FIFO or socket.")
        if live:
            # A command may write such a file, because it is not Mulligan that writes it. The coverage lists the path.
            self._state.note_gaps({intent.path: image})
        elif image.unstable:
            words = f"{intent.path} changed during every read, so there is no earlier content to keep; try again."
            raise Refused("conflict", "path_busy", words)
        wanted = intent.plan(image)
        if not intent.relinks and wanted.entry.link_group != image.entry.link_group:
            wanted = TargetEntry(staying_that_file(wanted.entry, image), wanted.content)
        if self._state.disk.capture.any or wanted.entry.withheld is not None:
            wanted = self._as_captured(intent.path, wanted)
        in_use = intent.spares_writers and self._is_in_use(intent.path, image, wanted.entry)
        deep = intent.deep or (isinstance(image.entry, DirEntry) and not isinstance(wanted.entry, DirEntry))
        return IntentStep(intent, image, wanted, self._bodies(image, wanted), in_use, deep)

    def _is_in_use(self, path: RepoPath, image: Image, wanted: Entry) -> bool:
        """Whether another process has the file open for writing and keeps it open."""
        if not isinstance(image.entry, FileEntry) or not isinstance(wanted, FileEntry) or image.holds(wanted):
            return False
        if image.entry.withheld is not None or wanted.withheld is not None:
            return False
        # The kernel gives no lease in a folder that we may not enter before the call itself opens it.
        with suppress(FileNotFoundError, PermissionError), self._state.resolved(path) as spot:
            return spot is not None and is_held_open(self._state.disk, spot, spot.name)
        return False

    def _as_captured(self, path: RepoPath, wanted: TargetEntry) -> TargetEntry:
        """The wanted entry as the disk will show it: a moved file may come from a path with other capture rules."""
        entry, rules = wanted.entry, self._state.disk.capture
        if not isinstance(entry, FileEntry) or entry.withheld == rules.withheld(path):
            return wanted
        digest = entry.digest if wanted.content is None else digest_of_content(wanted.content)
        return TargetEntry(rules.named(path, replace(entry, digest=digest)), wanted.content)

    def _look(self, path: RepoPath) -> Image:
        """The image of a real path; empty if its directory is missing, or is now a link that leads elsewhere."""
        try:
            spot = self._state.disk.resolve_exactly(path)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return NOTHING
        try:
            return self._state.disk.image(spot)
        finally:
            spot.close()

    def _bodies(self, image: Image, wanted: TargetEntry) -> list[Prepared]:
        """The blobs that the store must have before the change: the present bytes, and the new ones."""
        bodies, blobs = list[Prepared](), self._ledger.blobs
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
        ordinal = len(self._state.touched)
        for step in steps:
            path = step.intent.path
            known = noted.get(path) or self._state.touched.get(path)
            if known is None:
                known = self._first_touch(tx, step, ordinal, careful)
                ordinal += 1
            else:
                # A copy, because the transaction may fail and then the store has the earlier row.
                known = replace(known, seen=None)
            stays = live or step.in_use or may_stay_one_file(step.image, step.wanted.entry)
            row, step.draft = known.row, self._state.draft(known.row)
            for entry in step.passing():
                row = intending(row, entry, step.draft, in_place=stays)
            for body in step.bodies:
                self._ledger.blobs.put(tx, body)
            tx.put(TOUCHES, row)
            known.row = row
            noted[path] = known
        return noted

    def _first_touch(self, tx: Tx, step: IntentStep, ordinal: int, careful: bool) -> Touched:
        path, before = step.intent.path, step.image.entry
        place = self._state.disk.root.place_of(path)
        seen = self._ledger.last_seen(tx, place)
        if seen is not None and not same_state(seen, before):
            if not careful:
                raise _CaptureAgain
            self._ledger.external(tx, self._state.root, [Change(path, seen, before)], bodies=step.bodies)
        if step.image.links > 1 or is_unlike_ours(step.image):
            self._state.lost_metadata.note(path, step.image)
        # A used ordinal may be part of a draft's name on disk, so no other path of the call may get it.
        row = TouchRow(self._state.facts.id, path_bytes(path), ordinal, place, entry_bytes(before), b"[]", b"[]", 0)
        return Touched(row, path, before, before, origin=step.intent.origin)

    def _act_under_all_names(self, step: IntentStep, links: HardLinks) -> Entry:
        """Change a file, and note the change for all its names."""
        path = step.intent.path
        names = [] if step.image.holds(step.wanted.entry) else links.followers(path)
        entry = self._act(step, links)
        if names:
            for name in names:
                self._follow(name, path, entry)
            self._state.absorb([path, *names])
        return entry

    def _follow(self, name: RepoPath, path: RepoPath, entry: Entry) -> None:
        """If a new file replaced the one at `path`, make this other name of the old file a name of the new one."""
        touched = self._state.touched[name]
        with self._state.resolved(name) as spot, self._state.resolved(path) as placed:
            if spot is None or placed is None or not isinstance(entry, FileEntry):
                return
            if self._state.disk.link_group(spot) == self._state.disk.link_group(placed):
                return
            is_stored = entry.withheld is None
            content = (
                self._ledger.blobs.content(entry.digest, entry.size)
                if is_stored
                else self._state.disk.image(placed).data
            )
            wanted = self._as_captured(name, TargetEntry(entry, content))
            draft, rescue = self._state.draft(touched.row), partial(self._rescue, touched)
            Replacement(self._state.disk, spot, draft, touched.after, wanted, rescue=rescue, same_as=placed).run()

    def _act(self, step: IntentStep, links: HardLinks | None) -> Entry:
        for _ in range(_BUSY_TRIES):
            touched = self._state.touched[step.intent.path]
            if step.image.entry.withheld is not None or step.wanted.entry.withheld is not None:
                self._keep_original(touched, step.image)
            if step.image.links > 1 and self._came_with_another_name(step):
                self._state.log.add(touched.path, step.image.entry)
                touched.after, touched.acted = step.wanted.entry, True
                return touched.after
            # Listed before it happens, so that abort also restores a change that an interrupt cut short.
            self._state.log.add(touched.path, step.image.entry)
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
                    self._ledger.blobs.store(outcome.content)
                touched.becomes(outcome.entry)
                touched.acted = True
                self._state.race_window |= outcome.race_window
                return outcome.entry
            self._state.log.drop_last()
            if outcome.in_use:
                words = f"{touched.path} is open in another program, and that program truncated or replaced it."
                raise Refused("conflict", "file_in_use", words, path=touched.path, root=self._state.root.id)
            (step,) = self._prepare([step.intent])
        words = f"{step.intent.path} changes so often that Mulligan found no moment to change it; try again later."
        raise Refused("conflict", "path_busy", words)

    def _keep_original(self, touched: Touched, image: Image) -> None:
        """Copy an uncaptured path to a file beside it, which stays until the call ends."""
        name = keep_original(self._state.disk, touched.path, self._state.draft(touched.row), image)
        self._state.originals[name] = touched.path

    def _came_with_another_name(self, step: IntentStep) -> bool:
        """Whether the path changed already, because the call wrote the file under another of its names."""
        if step.image.holds(step.wanted.entry):
            return False
        return self._state.image(step.intent.path).holds(step.wanted.entry)

    def _swap_lifting(
        self, step: IntentStep, links: HardLinks | None, refused: PermissionError
    ) -> Swapped | FoundEntry:
        return despite_modes(
            self._state.disk, step.intent.path, lambda: self._swap(step, links), self._state.note_lift, refused=refused
        )

    def _swap(self, step: IntentStep, links: HardLinks | None) -> Swapped | FoundEntry:
        touched = self._state.touched[step.intent.path]
        try:
            found = self._state.disk.resolve_exactly(step.intent.path)
        except (FileNotFoundError, NotADirectoryError):
            words = f"The directory of {step.intent.path} does not exist."
            raise Refused("error", "parent_not_found", words) from None
        with found as spot, nullcontext() if links is None else links.same_file(step.intent.path) as same_as:
            expected = step.image.entry
            return Replacement(
                self._state.disk,
                spot,
                step.draft,
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
            touched = self._state.touched.get(step.intent.path)
            if touched is not None and not same_state(touched.after, step.image.entry):
                self._rescue(touched, step.image)

    def _rescue(self, touched: Touched, theirs: Image) -> None:
        """Record another process's save before our content may replace it."""
        if theirs.content is not None:
            self._ledger.blobs.store(theirs.content)
        if theirs.special:
            return
        change = Change(touched.path, touched.after, theirs.entry)
        self._make_room_for(touched, theirs.entry)
        with self._ledger.store.write() as tx:
            self._ledger.external(tx, self._state.root, [change])
            self._ledger.touch(tx, touched.row, ())

    def _make_room_for(self, touched: Touched, theirs: Entry) -> None:
        """Add another process's change to the preimage, so that abort restores it too."""
        touched.before = self._without_us(touched, theirs, touched.before)
        self._state.log.revise(touched.path, lambda was: self._without_us(touched, theirs, was))
        touched.row = replace(touched.row, before=entry_bytes(touched.before))
        touched.after = theirs

    def _without_us(self, touched: Touched, theirs: Entry, before: Entry) -> Entry:
        """What the path would hold with the other process's change but without ours; theirs as it is, if that cannot be
        told.
        """
        if any(map(is_withheld, (touched.after, theirs, before))):
            return theirs
        merged = merge_entry(touched.after, theirs, before, self._ledger.blobs.read) if touched.acted else None
        if merged is None or isinstance(merged, Conflict | KeepOurs):
            return theirs
        if isinstance(merged, WriteMerged) and merged.content is not None:
            self._ledger.blobs.store(merged.content)
        return merged.entry
