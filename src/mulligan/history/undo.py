"""The undo operations: undo, restore, rollback, redo, rewind. Each finds calls, plans, and applies the plan as a call.

That call can be undone too; the store has every byte that it replaces before it replaces it. Either every change of the
plan happens, or none: if the disk fails half-way, the call is rolled back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import field, replace
from typing import Any, Literal, get_args

from mulligan.files.disk import Image
from mulligan.files.git import GitBusyError, GitLockedError
from mulligan.files.replace import TargetEntry
from mulligan.history.call import Call, current_call
from mulligan.history.cause import UndoOperation
from mulligan.history.git_changes import (
    OUTSIDE,
    GitConflictError,
    GitNotStoredError,
    LeftAlone,
    left_alone,
    left_outside,
    move_git,
    plan_git,
    split_off_git,
    without_new_objects,
)
from mulligan.history.ledger import newest_wseq
from mulligan.history.log import (
    calls_of,
    can_be_undone,
    coverage_of_call,
    find_call,
    has_lost_bodies,
    newest_to_undo,
    workspace_of,
)
from mulligan.history.multi_root import (
    NOTHING_SHUT,
    CurrentTree,
    PlacesByPath,
    RootPart,
    combined_plan,
    content_for,
    is_at_or_below,
    main_of,
    nothing_seen_since,
    opened_folders,
    parts_by_root,
    path_in_root,
    place_and_above,
    places_of_paths,
    plan_as_shown,
    with_parts,
    written_since,
)
from mulligan.history.open_root import OpenRoot
from mulligan.history.partial_undo import (
    Chosen,
    UndoneParts,
    hunks_of_later,
    layers_in_hunks,
    undone_parts_of,
    without_undone,
)
from mulligan.history.plan import (
    OnConflict,
    Outcome,
    PlannedChange,
    Planner,
    RestorePlan,
    check_choice,
    checked_digest,
    in_batches,
)
from mulligan.history.rewind import (
    TranscriptMove,
    TurnQuery,
    close_open_turns,
    find_point,
    last_turn,
    move_of_redo,
    move_of_turn,
    move_of_undo,
    move_to,
    moved_transcript,
    stretch_of_turn,
    work_of,
)
from mulligan.history.tables import CALLS, CHANGES, REDO, ROOTS, WSEQ_END, CallRow, ChangeRow, change_from_row
from mulligan.history.undo_log import Intent
from mulligan.session.state.slice_rows import JournalRange, changes_slices, plan_slice_undo, undo_slices_in
from mulligan.store.protocol import Tx
from mulligan.values.digest import digest_of
from mulligan.values.entries import Change, DirEntry, FileEntry, same_state, whole
from mulligan.values.errors import Refused, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import RepoPath, path_bytes, text_from_wire, to_wire

# An editor saves once; a program that still changes the same files after five plans does not stop by itself.
_REPLAN_TRIES = 5


Git = Literal["leave", "restore"]
"""Whether undo also restores a repository that existed before a call and after it."""

_ON_CONFLICT, _GIT_CHOICES = get_args(OnConflict), get_args(Git)

MayWrite = Callable[[OpenRoot, RepoPath], None]
"""Checks that the caller may write a path; runs for every path before the first write. Raises `ForbiddenError`."""


@fast_dataclass(slots=True, frozen=True)
class UndoResult:
    """The result of an undo operation. `call_id` is None for a dry run, and if there was nothing to undo.

    `cancelled`: the running turns that it stopped. `digest`, of a dry run, identifies the plan and what its paths hold:
    with `if_match`, the operation is carried out only if the plan still has that digest.
    """

    ok: bool
    call_id: str | None
    outcomes: tuple[Outcome, ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    of: tuple[str, ...] = ()
    plan: RestorePlan | None = None
    talk: Mapping[str, int] | None = None
    slices_left: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    race_window: bool = False
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON. `talk`, if the operation changed the context window: the number of its messages after and
        before.

        `slices_left`: slices that something else has changed since, so that they are not restored. `race_window`: a
        file was written in place, so another process's save at that very moment may be lost.
        """
        left = [one.to_json() for one in self.plan.left_alone] if self.plan is not None else []
        gaps = [dict(gap) for gap in self.plan.coverage] if self.plan is not None else []
        return {
            "ok": self.ok,
            "call_id": self.call_id,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "overwrote_external": [to_wire(path) for path in self.overwrote_external],
            "rescue": self.call_id,
            **({"digest": self.digest} if self.digest is not None else {}),
            **({"coverage": gaps} if gaps else {}),
            **({"git": left} if left else {}),
            **({"talk": dict(self.talk)} if self.talk else {}),
            **({"slices_left": list(self.slices_left)} if self.slices_left else {}),
            **({"race_window": True} if self.race_window else {}),
        }


@fast_dataclass(slots=True, frozen=True)
class UndoOptions:
    """Options that undo, restore, rollback, redo and rewind share."""

    on_conflict: OnConflict = "merge"
    dry_run: bool = False
    session: SessionId | None = None
    git: Git = "leave"
    may_write: MayWrite | None = None
    anyones: bool = False
    """a whole id may name a call of another session"""
    check: Callable[[RestorePlan], None] | None = None
    """runs for each plan that is about to be applied; raises to apply nothing"""
    if_match: str | None = None
    """the digest of the plan that the caller has seen; another plan is a `conflict`"""
    progress: Callable[[int, int], None] | None = None
    """hears how many more of how many paths are done"""

    def __post_init__(self) -> None:
        if self.on_conflict not in _ON_CONFLICT or self.git not in _GIT_CHOICES:
            check_choice("on_conflict", self.on_conflict, _ON_CONFLICT)
            check_choice("git", self.git, _GIT_CHOICES)


@fast_dataclass(slots=True, frozen=True)
class _Target:
    """The target of an undo operation: calls, newest first, and which of their paths count.

    `named`: the paths that the caller named. `places`: the only places that count, through whichever root they were
    changed; None: all. `undone`: the parts of the calls that are restored already. `stretch`: the part of the journal
    whose slice changes outside calls are undone too. `is_newest`: the caller named no call, so the next such operation
    continues with older ones, even if this one ends in conflicts.
    """

    verb: str
    calls: tuple[CallRow, ...]
    named: PlacesByPath | None = None
    session: str | None = None
    transcript: TranscriptMove | None = None
    places: frozenset[bytes] | None = None
    undone: UndoneParts = field(default_factory=UndoneParts)
    turn: str | None = None
    stretch: JournalRange | None = None
    is_newest: bool = False
    hunks: Mapping[tuple[str, bytes], Chosen] = field(default_factory=dict)
    """by call and place: the hunks that count; a change that is not listed counts whole"""


class _FilesChanged(Exception):
    """Another process changed a planned path between plan and act."""


class _InUse(Exception):
    """A program that has a planned path open has truncated or replaced it between plan and act."""

    def __init__(self, root: str, path: RepoPath) -> None:
        self.at = (root, path)


Hunks = Mapping[RepoPath, Chosen]
"""Indexes into `files.diff.hunks_of` of a call's change, by path."""


def undo(
    open_root: OpenRoot,
    call: str | None = None,
    *,
    paths: Sequence[RepoPath] | None = None,
    hunks: Hunks | None = None,
    how: UndoOptions,
) -> UndoResult:
    """Undo one call; later ones stay. Without a call id: the newest call that is not undone.

    `paths` and `hunks` together choose a part of it: some paths whole, of others only these hunks. An undo operation is
    a call too: undone, it leaves files, slices and transcript as if it had not been.
    """
    paths = _with_hunks(paths, hunks)
    with open_root.ledger.store.read() as tx:
        if call is not None:
            row = find_call(open_root, call, how.session, anyones=how.anyones)
        else:
            newest = newest_to_undo(tx, open_root, how.session, on_conflict=how.on_conflict)
            if newest is None:
                raise fault("nothing_to_undo", "There is nothing to undo here.")
            row = newest
        family = with_parts(tx, [row])
        if row.undone_by is not None:
            # A process that the call left running may have gone on after the undo.
            row = next((one for one in family if one.undone_by is None and can_be_undone(one)), row)
        # A call that is undone already may still have commits, which the first undo left; `git="restore"` undoes those.
        if how.git != "restore" or row.undone_by is None:
            _check_can_be_undone(row, family, shared=_written_with_others(tx, open_root, family))
        kept = {row.id} if row.cause is None else {row.id, main_of(row)}
        rows = tuple([one for one in family if one.undone_by is None and (one.wseq is not None or one.id in kept)])
        undone = undone_parts_of(tx, rows)
        is_undone = row.undone_by is not None
        named = None if paths is None or is_undone else places_of_paths(tx, open_root, rows, paths)
        chosen = {} if named is None else _chosen(rows, named, hunks)
    if is_undone:
        return _undo_git(open_root, row, how)
    # Only an undo operation has moved messages; the undo of an agent's own call leaves the transcript alone.
    transcript = move_of_undo(open_root, row) if paths is None and row.why.verb is not None else None
    places = None if named is None else _all_of(named)
    is_newest = call is None and paths is None
    target = _Target(
        "undo", rows, named, transcript=transcript, places=places, undone=undone, is_newest=is_newest, hunks=chosen
    )
    return _plan_and_apply(open_root, target, how)


def _with_hunks(paths: Sequence[RepoPath] | None, hunks: Hunks | None) -> Sequence[RepoPath] | None:
    """All chosen paths. A path that is in both arguments counts whole."""
    if hunks is None:
        return paths
    return [*(paths or ()), *(path for path in hunks if path not in (paths or ()))]


def _chosen(rows: Sequence[CallRow], named: PlacesByPath, hunks: Hunks | None) -> dict[tuple[str, bytes], Chosen]:
    return {(row.id, place): some for path, some in (hunks or {}).items() for place in named[path] for row in rows}


def _undo_git(open_root: OpenRoot, row: CallRow, how: UndoOptions) -> UndoResult:
    """Undo what an earlier undo of the call left in repositories: commits, branches, the index."""
    with open_root.ledger.store.read() as tx:
        rows = tuple(one for one in with_parts(tx, [row]) if one.wseq is not None)
        kept = [change for one in rows for change in _in_repositories(tx, one)]
        earlier = with_parts(tx, [by]) if (by := tx.get(CALLS, row.undone_by or "")) is not None else ()
        # Places in repositories that the first undo did change are not left over.
        back = {change.place for one in earlier for change in tx.select(CHANGES, {"call": one.id})}
        places = frozenset(change.place for change in kept) - back.union(*undone_parts_of(tx, rows).places.values())
        outside = left_outside(note.gap for note in _notes(tx, open_root, rows))
    _check_copy(row, outside)
    if not places and not outside:
        _check_can_be_undone(row)
    # The first undo restored the slices.
    undone = UndoneParts(slices=frozenset(one.id for one in rows))
    done = _plan_and_apply(open_root, _Target("undo", rows, places=places, undone=undone), how)
    if not done.outcomes:
        _check_can_be_undone(row)
    return done


def _check_copy(row: CallRow, outside: Sequence[LeftAlone]) -> None:
    """Raise if Mulligan has no copy of a git directory outside the root: it was too large, or the store was full."""
    for head in (one.head for one in outside if one.outside and one.head is not None):
        words = "The git directory of this working tree is outside the root, and Mulligan has no copy of its files;"
        raise fault("nothing_to_undo", f"{words} `git reset {head[0]}` undoes the commit.", call=row.id)


def _in_repositories(tx: Tx, call: CallRow) -> list[ChangeRow]:
    found = tx.select(CHANGES, {"call": call.id})
    changes = [change_from_row(row) for row in found]
    ordinary = {one.path for one in split_off_git(changes)[0]}
    kept = {path_bytes(one.path) for one in without_new_objects(changes) if one.path not in ordinary}
    return [row for row in found if row.path in kept]


def _all_of(named: PlacesByPath) -> frozenset[bytes]:
    return frozenset().union(*named.values())


def _check_can_be_undone(row: CallRow, family: Sequence[CallRow] = (), *, shared: Sequence[_Note] = ()) -> None:
    """Raise if there is nothing to undo. An undo operation without changes has still marked calls as undone."""
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    if row.undone_by is not None:
        raise fault("nothing_to_undo", f"Call {row.id} is undone already; `mulligan redo` reverses that.")
    has_changes = row.wseq is not None or row.way_back is not None or bool(shared)
    has_changes = has_changes or any(one.wseq is not None for one in family)
    if row.status != "committed" or not has_changes:
        raise fault("nothing_to_undo", f"Call {row.id} has no changes to undo.")


def restore(
    open_root: OpenRoot,
    call: str,
    *,
    paths: Sequence[RepoPath] | None = None,
    hunks: Hunks | None = None,
    how: UndoOptions,
) -> UndoResult:
    """Restore the call's paths to what they were before it, and so undo later changes of those paths too.

    Of `hunks`, it restores the lines that the call wrote there, with what later calls made of these lines.
    """
    row = find_call(open_root, call, how.session, anyones=how.anyones)
    paths = _with_hunks(paths, hunks)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    with open_root.ledger.store.read() as tx:
        rows = with_parts(tx, [row])
        named = None if paths is None else places_of_paths(tx, open_root, rows, paths)
        asked = None if named is None else _all_of(named)
        places, calls = set[bytes](), dict[str, CallRow]()
        for one in rows:
            there = {
                change.place for change in tx.select(CHANGES, {"call": one.id}) if is_at_or_below(change.place, asked)
            }
            calls |= {each.id: each for each in (*_later_changers(tx, one, there), one)}
            places |= there
        back, undone = (
            _newest_first(calls.values()),
            UndoneParts(slices=undone_parts_of(tx, tuple(calls.values())).slices),
        )
        chosen = {} if named is None else _chosen(rows, named, hunks)
        # A later call may have rewritten the chosen lines, so its hunks that touch them are undone too.
        for place in {place for _, place in chosen}:
            changed = [one for call in back for one in tx.select(CHANGES, {"call": call.id}) if one.place == place]
            changes = {one.call: change_from_row(one) for one in sorted(changed, key=lambda one: one.wseq)}
            own = {call: some for (call, at), some in chosen.items() if at == place}
            later = hunks_of_later(changes, own, open_root.ledger.blobs.read)
            chosen |= {(call, place): some for call, some in later.items()}
    target = _Target("restore", back, named, places=frozenset(places), undone=undone, hunks=chosen)
    return _plan_and_apply(open_root, target, how)


def _later_changers(tx: Tx, row: CallRow, places: Iterable[bytes]) -> list[CallRow]:
    """All later calls that changed these places, through whichever root. External changes are not among them: undo must
    not drop them.

    Undone calls and their undo operations are among them: undone in order, they cancel each other out.
    """
    # By position among all changes of the file, because calls overlap: one that began earlier may have written later.
    after = ("wseq", (row.wseq or 0) + 1, WSEQ_END)
    found = {change.call for place in places for change in tx.select(CHANGES, {"place": place}, between=after)}
    return [one for call in found if (one := tx.get(CALLS, call)) is not None and not one.external]


def _newest_first(rows: Iterable[CallRow]) -> tuple[CallRow, ...]:
    """The calls by begin, newest first, whichever root they worked in."""
    return tuple(sorted(rows, key=lambda row: row.id, reverse=True))


def rollback(open_root: OpenRoot, *, how: UndoOptions, cancel_open: bool = False) -> UndoResult:
    """Undo the last completed turn, call by call, newest first."""
    if cancel_open and how.if_match is not None and not how.dry_run:
        # A plan that does not match must stop no turn.
        rollback(open_root, how=replace(how, dry_run=True), cancel_open=True)
    with open_root.ledger.store.read() as tx:
        newest = next((row for row in calls_of(tx, open_root, how.session) if not row.external), None)
    session = how.session or (SessionId(newest.session) if newest is not None and newest.session else None)
    # Open turns end first: else the last completed turn would be looked for while a newer one still writes.
    cancelled = set[str]()
    if session is not None:
        cancelled = close_open_turns(open_root, session, cancel=cancel_open, dry_run=how.dry_run)
    with open_root.ledger.store.read() as tx:
        owner, turn = last_turn(tx, open_root, TurnQuery(how.session, session, how.on_conflict, cancelled))
    # The turn may belong to another session of the root, whose running turns must stop as well.
    if owner != session:
        cancelled |= close_open_turns(open_root, owner, cancel=cancel_open, dry_run=how.dry_run)
    with open_root.ledger.store.read() as tx:
        calls = _newest_first(work_of(tx, open_root, owner, turn))
        undone, stretch = undone_parts_of(tx, calls), stretch_of_turn(tx, owner, turn, calls)
    transcript = move_of_turn(open_root, owner, turn)
    target = _Target(
        "rollback", calls, None, owner, transcript, undone=undone, turn=turn, stretch=stretch, is_newest=True
    )
    return replace(_plan_and_apply(open_root, target, how), cancelled=tuple(sorted(cancelled)))


def rewind(
    open_root: OpenRoot,
    point: str | int,
    *,
    side: str = "before",
    files: bool = True,
    transcript: bool = True,
    how: UndoOptions,
) -> UndoResult:
    """Undo everything of a session after a call or a message, undo operations included, and with `before` that call
    itself too.

    It changes the transcript only to a point from which a model could continue: else `not_continuable`.
    """
    found = find_point(open_root, point, how.session, side=side)
    # A part of the call that began later must stay with it.
    own = found.call.id if found.call is not None and side == "after" else None
    calls = tuple(row for row in _newest_first(found.later) if main_of(row) != own) if files else ()
    move = move_to(open_root, found) if transcript else None
    stretch = found.since if files else None
    return _plan_and_apply(
        open_root, _Target("rewind", calls, session=found.session, transcript=move, stretch=stretch), how
    )


def redo(open_root: OpenRoot, *, how: UndoOptions) -> UndoResult:
    """Undo the newest undo operation of a session."""
    with open_root.ledger.store.read() as tx:
        workspace = workspace_of(tx, open_root)
        stack = tx.select(REDO, {"session": how.session} if how.session else None)
        found = [row for one in stack if (row := tx.get(CALLS, one.call))]
        # A session's undo operations count in every root; without a session, only those of this workspace.
        # A root has no history of other workspaces, so a redo there would change files that the user does not see.
        rows = [row for row in found if how.session is not None or row.workspace == workspace]
        if not rows:
            raise fault("nothing_to_redo", "There is nothing to redo here.")
        newest = max(rows, key=lambda row: row.id)
        calls = with_parts(tx, [newest])
    return _plan_and_apply(
        open_root, _Target("redo", calls, session=newest.session, transcript=move_of_redo(open_root, newest)), how
    )


def _plan_and_apply(open_root: OpenRoot, target: _Target, how: UndoOptions) -> UndoResult:
    """Plan and apply; if another process changes a planned path in between, plan again."""
    root_parts = parts_by_root(open_root, target.calls)
    transcript = None if target.transcript is None else target.transcript.shown(open_root)
    in_use = set[tuple[str, RepoPath]]()
    # No lock is held between plan and act, because a person may save a planned file at any moment. Then the act
    # notices, rolls back what it has done, and this plans again from the present files.
    for _ in range(_REPLAN_TRIES):
        plans: list[RestorePlan] = []
        # One read transaction, so that the whole plan comes from one moment of the store.
        with open_root.ledger.store.read() as tx:
            unknown = () if target.named is None else _unknown(tx, open_root, target, target.named)
            moves_slices, left = _slices(tx, target)
            for root_part in root_parts:
                # A plan for one root must not contain the calls that worked in others.
                here = target if len(target.calls) == 1 else replace(target, calls=root_part.calls)
                kept = {path for root, path in in_use if root == root_part.open_root.root.id} if in_use else frozenset()
                plans.append(_plan(tx, root_part.open_root, here, how=how, in_use=kept))
        stopped = _stops(plans, unknown, how)
        # All roots or none: a plan that stops in one of them empties the others.
        if stopped:
            plans = [plan.untouched() for plan in plans]
        # Before the dry run returns, so that it refuses exactly what the real run would refuse.
        if how.may_write is not None:
            for root_part, one in zip(root_parts, plans, strict=True):
                check_moves(root_part.open_root, one, how.may_write)
        plan = (
            plans[0]
            if plans and root_parts[0].open_root is open_root and len(plans) == 1 and not unknown
            else combined_plan(
                [
                    plan_as_shown(open_root, root_part.open_root, one)
                    for root_part, one in zip(root_parts, plans, strict=True)
                ],
                unknown,
            )
        )
        result = UndoResult(plan.ok, None, plan.outcomes, plan.overwrote_external, _ids(target), plan, transcript, left)
        if how.dry_run or how.if_match is not None:
            digest = checked_digest(result, open_root.entry, how.if_match)
            result = replace(result, digest=digest if how.dry_run else None)
        if stopped:
            return UndoResult(False, None, plan.outcomes, of=_ids(target), plan=plan, digest=result.digest)
        moves = plan.moves or plan.git_moves or transcript or moves_slices
        if how.dry_run or not (moves or _counts_all_the_same(target, plan, how)):
            return result
        if how.check is not None:
            how.check(plan)
        try:
            call = _apply(root_parts, target, plans, how)
            race_window = call.race_window or any(one.race_window for one in call.parts.values())
            return replace(result, call_id=call.id, race_window=race_window)
        # The call has rolled back what it had restored, so nothing is half done.
        except OSError:
            return UndoResult(False, None, _failed(plan), of=_ids(target), plan=plan)
        except _FilesChanged:
            continue
        except _InUse as found:
            in_use.add(found.at)
    raise fault("path_busy", "The files keep changing during the undo; try again when no program writes them.")


def _stops(plans: Sequence[RestorePlan], unknown: Sequence[Outcome], how: UndoOptions) -> bool:
    """Whether nothing may be applied: a path fails, or, with `refuse`, one cannot be restored."""
    if how.on_conflict == "refuse" and not (all(plan.ok for plan in plans) and not unknown):
        return True
    return any(plan.stops(how.on_conflict) for plan in plans)


def _counts_all_the_same(target: _Target, plan: RestorePlan, how: UndoOptions) -> bool:
    """Whether to record the operation although it changes no file: else a second one would find the same call."""
    # With `merge`, a conflict is an answer, and the next undo goes on with an older call.
    goes_on = target.is_newest and how.on_conflict == "merge"
    is_over = target.verb == "rollback" or any(call.way_back is not None for call in target.calls)
    return (plan.ok or goes_on) and (is_over or bool(plan.outcomes))


def check_moves(open_root: OpenRoot, plan: RestorePlan, may_write: MayWrite | None) -> None:
    """Check that the caller may write every path of the plan; also for a dry run."""
    if may_write is not None:
        for path in (*(move.path for move in plan.moves), *(move.path for move in plan.git_moves)):
            may_write(open_root, path)


def _ids(target: _Target) -> tuple[str, ...]:
    return tuple([call.id for call in target.calls])


def _plan(
    tx: Tx, open_root: OpenRoot, target: _Target, *, how: UndoOptions, in_use: Set[RepoPath] = frozenset()
) -> RestorePlan:
    """Plan in one root. `in_use`: paths that a program keeps changing, and that stay as they are."""
    present, blobs = CurrentTree(open_root), open_root.ledger.blobs
    layers, kept = list[list[Change]](), list[Change]()
    for call in target.calls:
        ordinary, in_repositories = _split(_layer(tx, open_root, call, target), call, how)
        layers.append(ordinary)
        kept += in_repositories
    contents: list[bytes] = []
    if target.hunks:
        layers, contents = layers_in_hunks(target.calls, layers, target.hunks, root=open_root.root, read=blobs.read)
    changed = {change.path for layer in layers for change in layer}
    # Read once, because four steps of the plan need the gaps.
    notes = _notes(tx, open_root, target.calls)
    quiet = _nothing_recorded_since(tx, open_root, target.calls) and nothing_seen_since(
        open_root, target.calls, changed
    )
    # Most plans have no folders, and looking for locked ones costs a system call each.
    has_folders = DirEntry in {type(change.after) for layer in layers for change in layer}
    with opened_folders(open_root, layers) if has_folders else nullcontext(NOTHING_SHUT) as shut:
        planner = Planner(
            (lambda path: shut[path] if path in shut else present.entry(path)) if shut else present.entry,
            present.read,
            open_root.children,
            how.on_conflict,
            keep_mtimes=quiet,
            has_root=open_root.disk.root.handle >= 0,
            has=lambda digest: present.has(tx, digest),
            is_held_open=present.is_held_open,
            is_lost=lambda digest: blobs.is_lost(tx, digest),
            withheld={note.path for note in notes if note.gap["reason"] == "not_captured"},
        )
        for content in contents:
            planner.know(content)
        unstored, unclear = list[RepoPath](), list[RepoPath]()
        if notes:
            unstored = _never_captured(open_root, target, notes, changed)
            if how.on_conflict != "overwrite":
                unclear = sorted(_ambiguous(tx, open_root, target, notes, changed=changed), key=path_bytes)
        plan = planner.plan(layers, not_captured=unstored, ambiguous=unclear, in_use=in_use)
    if not notes and not kept:
        # A shortcut: nearly every undo of a file tool concerns no repository and has no gaps.
        return plan
    moving = [note for note in notes if _moves_git(note.call, how)]
    outside = [gap for gap in _gaps(open_root, target, moving) if gap["reason"] in OUTSIDE]
    gaps = [gap for gap in _gaps(open_root, target, notes) if gap not in outside]
    plan = _with_git(plan, open_root, outside, how)
    plan = plan.leaving([*left_alone(kept, present.read), *left_outside(gaps)])
    return replace(plan, coverage=tuple(gaps))


def _with_git(
    plan: RestorePlan, open_root: OpenRoot, notes: Sequence[Mapping[str, str]], how: UndoOptions
) -> RestorePlan:
    """The plan with the changes of git's files outside the root. The notes come newest first."""
    # All notes of one git directory make one plan, because each takes its files one call further back.
    for wire in dict.fromkeys(note["path"] for note in notes):
        path = RepoPath(text_from_wire(wire))
        root = os.path.dirname(open_root.disk.root.absolute(path))
        here = [note for note in notes if note["path"] == wire]
        try:
            move = plan_git(path, root, here, open_root.ledger.blobs.read, insist=how.on_conflict == "overwrite")
        except GitConflictError:
            plan = plan.moving_git(None, Outcome(path, "conflicted", "git_changed"))
        except GitNotStoredError:
            plan = plan.moving_git(None, Outcome(path, "skipped", "not_captured"))
        else:
            plan = plan if move is None else plan.moving_git(move, Outcome(path, "restored"))
    return plan


@fast_dataclass(slots=True, frozen=True)
class _Note:
    """A gap of a call, with its path as this open root shows it."""

    call: CallRow
    path: RepoPath
    gap: Mapping[str, str]

    def is_of_others(self, calls: Set[str]) -> bool:
        """Whether a call beside these may have made the change; a gap that names no calls says so."""
        named = self.gap.get("calls")
        return named is None or not calls >= set(named.split())


def _ambiguous(
    tx: Tx, open_root: OpenRoot, target: _Target, notes: Sequence[_Note], *, changed: Set[RepoPath]
) -> set[RepoPath]:
    """Paths that another call, or another process, may have changed in the same window."""
    unclear = [note for note in notes if note.gap["reason"] == "ambiguous"]
    mains = {main_of(call) for call in target.calls}
    if target.verb != "undo" and any("calls" in note.gap for note in unclear):
        # A whole turn is undone, with its calls that changed nothing while they ran.
        turns = {(call.session, call.turn) for call in target.calls}
        mains |= {row.id for session, turn in turns for row in tx.select(CALLS, {"session": session, "turn": turn})}
    found = {note.path for note in unclear if note.is_of_others(mains)} & changed
    shared = _written_with_others(tx, open_root, target.calls) if target.verb == "undo" else ()
    return found | {note.path for note in shared if _is_asked(open_root, target, note.path)}


def _written_with_others(tx: Tx, open_root: OpenRoot, calls: Sequence[CallRow]) -> list[_Note]:
    """Notes of later calls: what they, or a process that one of these calls has left running, may have changed."""
    leavers = {main_of(call) for call in calls if '"background"' in call.coverage}
    if not leavers:
        return []
    later = calls_of(tx, open_root, None, after=min(leavers))
    notes = _notes(tx, open_root, [row for row in later if any(call in row.coverage for call in leavers)])
    mains = {main_of(call) for call in calls}
    return [note for note in notes if "calls" in note.gap and note.is_of_others(mains)]


def _notes(tx: Tx, open_root: OpenRoot, calls: Iterable[CallRow]) -> list[_Note]:
    found: list[_Note] = []
    has_lost = has_lost_bodies(tx)
    for call in calls:
        # Nearly every call has no gaps, so this saves reading its root and its changes.
        if call.coverage == "[]" and not has_lost:
            continue
        root = tx.get(ROOTS, call.root) or open_root.root
        for gap in coverage_of_call(tx, call):
            path = RepoPath(text_from_wire(gap["path"]))
            if root.id != open_root.root.id:
                path = path_in_root(open_root.root, root.place_of(path_bytes(path)), path)
            found.append(_Note(call, path, gap))
    return found


def _gaps(open_root: OpenRoot, target: _Target, notes: Iterable[_Note]) -> list[Mapping[str, str]]:
    """The gaps at the paths that count; each once."""
    found: list[Mapping[str, str]] = []
    for note in notes:
        gap = {**note.gap, "path": to_wire(note.path)}
        if gap not in found and _is_asked(open_root, target, note.path):
            found.append(gap)
    return found


def _is_asked(open_root: OpenRoot, target: _Target, path: RepoPath) -> bool:
    """Whether a path counts: the caller named it or a folder above it, or named no path."""
    return target.named is None or is_at_or_below(open_root.root.place_of(path_bytes(path)), _all_of(target.named))


def _never_captured(
    open_root: OpenRoot, target: _Target, notes: Iterable[_Note], changed: Set[RepoPath]
) -> list[RepoPath]:
    """Paths that the calls changed and of which the record has only the name."""
    found = {note.path for note in notes if note.gap["reason"] == "not_captured"} - changed
    return sorted((path for path in found if _is_asked(open_root, target, path)), key=path_bytes)


def _split(layer: list[Change], call: CallRow, how: UndoOptions) -> tuple[list[Change], list[Change]]:
    """Split a call's changes: those to undo, and those in repositories that stay."""
    return (without_new_objects(layer), []) if _moves_git(call, how) else split_off_git(layer)


def _moves_git(call: CallRow, how: UndoOptions) -> bool:
    """Whether git's files count. An undo operation that restored them is undone as a whole, with them."""
    return how.git == "restore" or call.way_back is not None


def _layer(tx: Tx, open_root: OpenRoot, call: CallRow, target: _Target) -> list[Change]:
    """A call's changes that count, at the paths that this open root shows, in path order."""
    undoes = target.verb in ("undo", "rollback")
    changes: dict[RepoPath, Change] = {}
    for row in _rows(tx, call, target):
        change = change_from_row(without_undone(tx, row) if undoes else row)
        if call.root != open_root.root.id:
            change = replace(change, path=path_in_root(open_root.root, row.place, change.path))
        changes[change.path] = change
    return [changes[path] for path in sorted(changes, key=path_bytes)]


def _rows(tx: Tx, call: CallRow, target: _Target) -> list[ChangeRow]:
    """The changes of a call below the chosen places, without those that an earlier undo has restored."""
    # A place that an earlier undo of this call has restored already counts as done.
    back = target.undone.places.get(call.id, frozenset())
    found = tx.select(CHANGES, {"call": call.id})
    if not back and target.places is None:
        return found
    return [row for row in found if row.place not in back and is_at_or_below(row.place, target.places)]


def _unknown(tx: Tx, open_root: OpenRoot, target: _Target, named: PlacesByPath) -> tuple[Outcome, ...]:
    """Outcomes for named paths at or below which the calls changed nothing."""
    # A path that is restored already is known all the same; only a wrong name is an error.
    every = replace(target, undone=UndoneParts())
    known = {above for call in target.calls for row in _rows(tx, call, every) for above in place_and_above(row.place)}
    for note in _notes(tx, open_root, target.calls):
        if note.gap["reason"] == "not_captured":
            known.update(place_and_above(open_root.root.place_of(path_bytes(note.path))))
    unknown = [path for path, places in named.items() if places.isdisjoint(known)]
    return tuple(Outcome(path, "skipped", "not_captured") for path in unknown)


def _nothing_recorded_since(tx: Tx, open_root: OpenRoot, calls: Sequence[CallRow]) -> bool:
    """Whether nothing in the workspace was recorded after the oldest of the calls but the calls themselves."""
    places = [call.wseq for call in calls if call.wseq is not None]
    return bool(places) and newest_wseq(tx, workspace_of(tx, open_root)) - min(places) + 1 == len(places)


def _apply(root_parts: Sequence[RootPart], target: _Target, plans: Sequence[RestorePlan], how: UndoOptions) -> Call:
    """Apply the plans in one call in a root where files change; changes in further roots are its parts."""
    acts = list(zip(root_parts, plans, strict=True))
    if len(acts) > 1:
        # The call belongs to a root in which something changes; the other roots get its parts.
        acts.sort(key=lambda act: not (act[1].moves or act[1].git_moves))
    open_root = acts[0][0].open_root
    session = SessionId(how.session or target.session or target.calls[0].session or "default")
    _check_between_calls(session)
    call = open_root.call(session, tool=target.verb, cause=_cause(open_root, root_parts, target, plans))
    # In the transaction of the call, so that files and transcript never disagree, even after a crash.
    call.at_end.append(lambda tx, status: status == "committed" and _move_session(tx, open_root, target, call.id))
    try:
        with call:
            for root_part, plan in acts:
                acting = (
                    call if root_part.open_root is open_root else root_part.open_root.part_of_undo(call, target.verb)
                )
                for moves in _effects(plan):
                    acting.change([_intent(root_part.open_root, move) for move in moves])
                    if how.progress is not None:
                        how.progress(len(moves), len(plan.moves))
                for git_move in plan.git_moves:
                    # Last: if the store fails after this, the files are rolled back and the user can repeat the undo.
                    move_git(acting, git_move, target.verb)
    # A git command that runs right now is another writer: plan again when it is done.
    except GitBusyError:
        raise _FilesChanged from None
    except GitLockedError as locked:
        words = f"Another git command runs here, or one left {locked} behind when it died; nothing was changed."
        raise fault("path_busy", words) from None
    except Refused as refused:
        # An open call of an agent works on the file. The user can decide to wait for it; another plan would not help.
        if refused.code == "path_claimed":
            raise fault("path_claimed", refused.message) from None
        if refused.code == "file_in_use":
            raise _InUse(str(refused.fields["root"]), RepoPath(str(refused.fields["path"]))) from None
        raise _FilesChanged from None
    return call


def _check_between_calls(session: SessionId) -> None:
    """Raise inside an open call: an undo operation is a separate call, and would stay even if the outer one failed."""
    around = current_call()
    if around is not None and around.session == session:
        raise fault("call_open", f"Call {around.id} is still open here; end it, then undo.")


def _effects(plan: RestorePlan) -> Iterator[Sequence[PlannedChange]]:
    """The changes in batches; then the directories' times, which the changes in them have set."""
    folders = [
        replace(one, now=one.target) for one in plan.moves if isinstance(one.target, DirEntry) and one.target.mtime_ns
    ]
    yield from in_batches(plan.moves)
    yield from in_batches(folders)


def _move_session(tx: Tx, open_root: OpenRoot, target: _Target, call: str) -> bool:
    """Change the context window and the slices together with the files. Answers whether slices changed."""
    if target.transcript is not None:
        # The window is computed here again, because a message may have come since the plan.
        target.transcript.apply_in(tx, open_root.ledger, target.verb, call)
    calls, at = _with_slices(target), open_root.ledger.now()
    if target.stretch is None and not changes_slices(tx, calls):
        return False
    return undo_slices_in(tx, open_root.ledger.journal, calls, target.stretch, at=at, by=call)


def _with_slices(target: _Target) -> list[str]:
    """The calls whose slices are undone: none for a restore, or for an undo of some paths."""
    if target.verb == "restore" or target.named is not None:
        return []
    return [call.id for call in target.calls if call.id not in target.undone.slices]


def _slices(tx: Tx, target: _Target) -> tuple[bool, tuple[str, ...]]:
    """Whether the operation concerns slices, and which of them it cannot restore."""
    calls = _with_slices(target)
    if target.stretch is None and not changes_slices(tx, calls):
        return False, ()
    back = plan_slice_undo(tx, calls, target.stretch)
    return bool(back.changes) or changes_slices(tx, calls), back.left


def _failed(plan: RestorePlan) -> tuple[Outcome, ...]:
    moved = {move.path for move in plan.moves}
    return tuple(Outcome(one.path, "failed", "io_error") if one.path in moved else one for one in plan.outcomes)


def _cause(
    open_root: OpenRoot, root_parts: Sequence[RootPart], target: _Target, plans: Sequence[RestorePlan]
) -> UndoOperation:
    """The cause in the record. A redo counts as done once it was tried, whatever it could restore."""
    # A call of which a conflict left something is not undone as a whole, and the record says so.
    in_conflict = _in_conflict(root_parts, target, plans)
    if target.places is None and not in_conflict:
        return UndoOperation(target.verb, _ids(target), turn=target.turn)
    asked = _asked_in_part(open_root, target)
    whole = [call for call in target.calls if call.id not in asked]
    left = [call.id for call in whole if main_of(call) in in_conflict and target.verb != "redo"]
    part = [*(call for call, any_of_it in asked.items() if any_of_it), *left]
    of = tuple([call.id for call in whole if call.id not in left])
    return UndoOperation(target.verb, of, tuple(part), tuple(left), target.turn, hunks=bool(target.hunks))


def _asked_in_part(open_root: OpenRoot, target: _Target) -> dict[str, bool]:
    """The calls of which not everything counts, each with all its parts, and whether any of their paths does."""
    if target.places is None:
        return {}
    # Hunks never undo a call wholly: its other hunks stay.
    in_part = {main_of(call) for call in target.calls if target.hunks or moved_transcript(open_root, call)}
    with open_root.ledger.store.read() as tx:
        every, family = replace(target, places=None), with_parts(tx, target.calls)
        counted = {call.id: len(_rows(tx, call, target)) for call in family}
        in_part |= {main_of(call) for call in family if len(_rows(tx, call, every)) != counted[call.id]}
        beside = [call for call in family if call.id not in target.undone.slices]
        in_part |= {main_of(call) for call in beside if changes_slices(tx, [call.id])}
    return {call.id: counted[call.id] > 0 for call in target.calls if main_of(call) in in_part}


def _in_conflict(root_parts: Sequence[RootPart], target: _Target, plans: Sequence[RestorePlan]) -> set[str]:
    """The calls, each with all its parts, that changed a path which a conflict leaves as it is."""
    found = set[str]()
    for root_part, plan in zip(root_parts, plans, strict=True):
        if plan.ok:
            continue
        paths = {one.path for one in plan.outcomes if one.outcome == "conflicted"}
        with root_part.open_root.ledger.store.read() as tx:
            layers = [(main_of(call), _layer(tx, root_part.open_root, call, target)) for call in root_part.calls]
        found |= {main for main, layer in layers if any(change.path in paths for change in layer)}
    return found


def _intent(open_root: OpenRoot, move: PlannedChange) -> Intent:
    def plan(image: Image) -> TargetEntry:
        content = content_for(open_root, move, image)
        if not image.special and (same_state(image.entry, move.now) or same_state(image.entry, move.target)):
            return TargetEntry(move.target, content)
        # A program that has its log file open may append to it at any moment; its lines stay below the restored text.
        end = written_since(open_root, move, image)
        if end is None or content is None or not isinstance(move.target, FileEntry):
            raise _FilesChanged
        content = whole(content) + end
        return TargetEntry(replace(move.target, digest=digest_of(content), size=len(content), mtime_ns=0), content)

    return Intent(move.path, plan, lifts=True, relinks=True, spares_writers=True)
