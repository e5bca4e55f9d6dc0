"""The ways back: undo, restore, rollback, redo, rewind. Each finds what to take back, plans, and applies as a call.

Applying is itself a call, so it can be undone; whatever it replaces is in the store first. Either every move of the
plan happens, or none: a disk that fails half-way is put back as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from typing import Any, Literal, get_args

from mulligan.history.call import Call
from mulligan.history.current import current_call
from mulligan.history.desk import Desk
from mulligan.history.intents import Intent
from mulligan.history.ledger import newest_wseq
from mulligan.history.leftovers import Taken, taken_of, without_undone
from mulligan.history.lifting import is_shut, opened_up
from mulligan.history.log import (
    calls_of,
    change_from_row,
    coverage_of_call,
    find_call,
    newest_standing,
    verb_of,
    workspace_of,
)
from mulligan.history.plans import Move, OnConflict, Outcome, Planner, RestorePlan, check_choice
from mulligan.history.points import (
    TalkMove,
    find_point,
    move_of_redo,
    move_of_turn,
    move_of_undo,
    move_to,
    moved_talk,
    stretch_of_turn,
)
from mulligan.history.present import Present, content_for
from mulligan.history.repositories import left_alone, left_outside, split_off, without_objects
from mulligan.history.sites import (
    Places,
    Site,
    as_seen_from,
    counts_at,
    main_of,
    path_here,
    places_named,
    sites_of,
    together,
    upwards,
    with_parts,
)
from mulligan.history.tables import CALLS, CHANGES, REDO, ROOTS, WSEQ_END, CallRow, ChangeRow
from mulligan.history.turns import Sought, close_open_turns, last_turn, work_of
from mulligan.session.slices_back import Stretch, changes_slices, slices_back, take_back_in
from mulligan.store.protocol import Tx
from mulligan.values.clock import parse_timestamp
from mulligan.values.content import digest_of_beginning, whole
from mulligan.values.digest import digest_of
from mulligan.values.entries import Change, DirEntry, Entry, FileEntry, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.limits import MERGE_MAX_BYTES
from mulligan.values.paths import (
    RepoPath,
    ancestors_of,
    path_bytes,
    text_from_wire,
    to_wire,
)
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.quiet import is_quiet
from mulligan.workspace.writing import Wanted

_REPLAN_TRIES = 5
_MOVES_PER_EFFECT = 500
_LOOK_ENTRIES_MAX = 200


Git = Literal["leave", "restore"]
"""Whether a repository that was there before a call and after it goes back too."""

MayWrite = Callable[[Desk, RepoPath], None]
"""Asked of every path before any is touched; raises for one that is not for whoever asks to change."""


@plain(slots=True, frozen=True)
class WayBack:
    """What a way back came to. `call_id` is None for a dry run, and if there was nothing it could do.

    `cancelled`: the turns that were running, and were stopped for it.
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

    def to_json(self) -> dict[str, Any]:
        """`talk`, when the way back moves it: how many messages are in force, and how many were.

        `slices_left`: slices that something else has changed since, so that they are not as they were. `race_window`:
        a file was written in place, where a save of somebody's at that very moment may be lost.
        """
        left = [one.to_json() for one in self.plan.left_alone] if self.plan is not None else []
        gaps = [dict(gap) for gap in self.plan.coverage] if self.plan is not None else []
        return {
            "ok": self.ok,
            "call_id": self.call_id,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "overwrote_external": [to_wire(path) for path in self.overwrote_external],
            "rescue": self.call_id,
            **({"coverage": gaps} if gaps else {}),
            **({"git": left} if left else {}),
            **({"talk": dict(self.talk)} if self.talk else {}),
            **({"slices_left": list(self.slices_left)} if self.slices_left else {}),
            **({"race_window": True} if self.race_window else {}),
        }


@plain(slots=True, frozen=True)
class How:
    """What all ways back can be asked."""

    on_conflict: OnConflict = "merge"
    dry_run: bool = False
    session: SessionId | None = None
    git: Git = "leave"
    may_write: MayWrite | None = None
    anyones: bool = False
    """a whole id may name a call of another session"""

    def __post_init__(self) -> None:
        check_choice("on_conflict", self.on_conflict, get_args(OnConflict))
        check_choice("git", self.git, get_args(Git))


@plain(slots=True, frozen=True)
class _Target:
    """What a way back takes back: calls, newest first, and which of their paths count.

    `named`: the paths somebody asked for. `places`: where alone they count, through whichever root they were changed;
    None: everywhere. `taken`: what of the calls is back already. `stretch`: where slices go back too that were changed
    outside any call. `is_newest`: nobody has named it, so the next one like it goes on to what is older, even if all of
    this one is in conflict.
    """

    verb: str
    calls: tuple[CallRow, ...]
    named: Places | None = None
    session: str | None = None
    talk: TalkMove | None = None
    places: frozenset[bytes] | None = None
    taken: Taken = field(default_factory=Taken)
    turn: str | None = None
    stretch: Stretch | None = None
    is_newest: bool = False


class _WorldMoved(Exception):
    """Somebody changed a planned path between plan and act."""


class _InUse(Exception):
    """A program that has a planned path open has truncated or replaced it between plan and act."""

    def __init__(self, root: str, path: RepoPath) -> None:
        self.at = (root, path)


def undo(desk: Desk, call: str | None = None, *, paths: Sequence[RepoPath] | None = None, how: How) -> WayBack:
    """Take back one call; later ones stay. Without a name: the newest that still stands.

    A way back is a call too: undone, what it did to files, slices and talk is as if it had not been.
    """
    row = _newest(desk, how) if call is None else find_call(desk, call, how.session, anyones=how.anyones)
    talk = move_of_undo(desk, row) if paths is None and verb_of(row) is not None else None
    if how.git == "restore" and row.undone_by is not None:
        return _undo_git(desk, row, how)
    _check_standing(row)
    with desk.ledger.store.read() as tx:
        rows = tuple(one for one in with_parts(tx, [row]) if one.wseq is not None or one.id == row.id)
        taken = taken_of(tx, rows)
        named = None if paths is None else places_named(tx, desk, rows, paths)
    is_newest = call is None and paths is None
    target = _Target("undo", rows, named, talk=talk, places=_all_of(named), taken=taken, is_newest=is_newest)
    return _go(desk, target, how)


def _undo_git(desk: Desk, row: CallRow, how: How) -> WayBack:
    """Take back what an earlier undo of the call left in repositories: commits, branches, the index."""
    with desk.ledger.store.read() as tx:
        rows = tuple(one for one in with_parts(tx, [row]) if one.wseq is not None)
        kept = [change for one in rows for change in _in_repositories(tx, one)]
        undone = with_parts(tx, [by]) if (by := tx.get(CALLS, row.undone_by or "")) is not None else ()
        back = {change.place for one in undone for change in tx.select(CHANGES, {"call": one.id})}
        places = frozenset(change.place for change in kept) - back.union(*taken_of(tx, rows).places.values())
        outside = left_outside(note for _, note in _notes(tx, desk, rows))
    if not places and outside:
        words = "The git directory of this working tree is outside the root, so Mulligan has no copy of it;"
        head = outside[0].head
        assert head is not None, "each note has both ends"
        raise fault("nothing_to_undo", f"{words} `git reset {head[0]}` undoes the commit.", call=row.id)
    if not places:
        _check_standing(row)
    # Slices went back with the first undo.
    taken = Taken(slices=frozenset(one.id for one in rows))
    return _go(desk, _Target("undo", rows, places=places, taken=taken), how)


def _in_repositories(tx: Tx, call: CallRow) -> list[ChangeRow]:
    found = tx.select(CHANGES, {"call": call.id})
    changes = [change_from_row(row) for row in found]
    ordinary = {one.path for one in split_off(changes)[0]}
    kept = {path_bytes(one.path) for one in without_objects(changes) if one.path not in ordinary}
    return [row for row in found if row.path in kept]


def _all_of(named: Places | None) -> frozenset[bytes] | None:
    return None if named is None else frozenset().union(*named.values())


def _newest(desk: Desk, how: How) -> CallRow:
    with desk.ledger.store.read() as tx:
        row = newest_standing(tx, desk, how.session, on_conflict=how.on_conflict)
    if row is None:
        raise fault("nothing_to_undo", "There is nothing to undo here.")
    return row


def _check_standing(row: CallRow) -> None:
    """A way back counts even if it moved nothing: what it took back stands again without it."""
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    if row.undone_by is not None:
        raise fault("nothing_to_undo", f"Call {row.id} is undone already; `mulligan redo` brings it back.")
    if row.status != "committed" or (row.wseq is None and row.way_back is None):
        raise fault("nothing_to_undo", f"Call {row.id} changed nothing that stands.")


def restore(desk: Desk, call: str, *, paths: Sequence[RepoPath] | None = None, how: How) -> WayBack:
    """Put the call's paths back to what they were before it, later calls' changes of those paths included."""
    row = find_call(desk, call, how.session, anyones=how.anyones)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    with desk.ledger.store.read() as tx:
        rows = with_parts(tx, [row])
        named = None if paths is None else places_named(tx, desk, rows, paths)
        asked, places, calls = _all_of(named), set[bytes](), dict[str, CallRow]()
        for one in rows:
            there = {change.place for change in tx.select(CHANGES, {"call": one.id}) if counts_at(change.place, asked)}
            calls |= {each.id: each for each in (*_later_changers(tx, one, there), one)}
            places |= there
        back, taken = _newest_first(calls.values()), Taken(slices=taken_of(tx, tuple(calls.values())).slices)
    return _go(desk, _Target("restore", back, named, places=frozenset(places), taken=taken), how)


def _later_changers(tx: Tx, row: CallRow, places: Iterable[bytes]) -> list[CallRow]:
    """Everybody's later calls at these places, through whichever root. What a person did is not ours to drop.

    Those that are undone are among them, as their undoing is: taken back in order, they cancel each other out.
    """
    after = ("wseq", (row.wseq or 0) + 1, WSEQ_END)
    found = {change.call for place in places for change in tx.select(CHANGES, {"place": place}, between=after)}
    return [one for call in found if (one := tx.get(CALLS, call)) is not None and not one.external]


def _newest_first(rows: Iterable[CallRow]) -> tuple[CallRow, ...]:
    """By birth, whichever root they were at work in."""
    return tuple(sorted(rows, key=lambda row: row.id, reverse=True))


def rollback(desk: Desk, *, how: How, cancel_open: bool = False) -> WayBack:
    """Take the last completed turn back, call by call, newest first."""
    with desk.ledger.store.read() as tx:
        newest = next((row for row in calls_of(tx, desk, how.session) if not row.external), None)
    session = how.session or (SessionId(newest.session) if newest is not None and newest.session else None)
    cancelled = set[str]()
    if session is not None:
        cancelled = close_open_turns(desk, session, cancel=cancel_open, dry_run=how.dry_run)
    with desk.ledger.store.read() as tx:
        owner, turn = last_turn(tx, desk, Sought(how.session, session, how.on_conflict, cancelled))
    if owner != session:
        cancelled |= close_open_turns(desk, owner, cancel=cancel_open, dry_run=how.dry_run)
    with desk.ledger.store.read() as tx:
        calls = _newest_first(work_of(tx, desk, owner, turn))
        taken, stretch = taken_of(tx, calls), stretch_of_turn(tx, owner, turn, calls)
    talk = move_of_turn(desk, owner, turn)
    target = _Target("rollback", calls, None, owner, talk, taken=taken, turn=turn, stretch=stretch, is_newest=True)
    return replace(_go(desk, target, how), cancelled=tuple(sorted(cancelled)))


def rewind(
    desk: Desk, point: str | int, *, side: str = "before", files: bool = True, talk: bool = True, how: How
) -> WayBack:
    """Take back everything of a session after a call or a message, ways back included, and with `before` itself too.

    Talk goes along only to where a model could go on from: else `not_continuable`.
    """
    found = find_point(desk, point, how.session, side=side)
    own = found.call.id if found.call is not None and side == "after" else None
    calls = tuple(row for row in _newest_first(found.later) if main_of(row) != own) if files else ()
    move = move_to(desk, found) if talk else None
    stretch = found.since if files else None
    return _go(desk, _Target("rewind", calls, session=found.session, talk=move, stretch=stretch), how)


def redo(desk: Desk, *, how: How) -> WayBack:
    """Take the newest way back of a session back again."""
    with desk.ledger.store.read() as tx:
        workspace = workspace_of(tx, desk)
        stack = tx.select(REDO, {"session": how.session} if how.session else None)
        found = [row for one in stack if (row := tx.get(CALLS, one.call))]
        # A session's ways back count wherever they were; without a session, those of this workspace.
        rows = [row for row in found if how.session is not None or row.workspace == workspace]
        if not rows:
            raise fault("nothing_to_redo", "There is nothing to redo here.")
        newest = max(rows, key=lambda row: row.id)
        calls = with_parts(tx, [newest])
    return _go(desk, _Target("redo", calls, session=newest.session, talk=move_of_redo(desk, newest)), how)


def _go(desk: Desk, target: _Target, how: How) -> WayBack:
    """Plan and apply; if somebody changes a planned path in between, plan again."""
    sites, unknown = sites_of(desk, target.calls), _unknown(desk, target)
    talk = None if target.talk is None else target.talk.shown(desk)
    moves_slices, left = _slices(desk, target)
    in_use = set[tuple[str, RepoPath]]()
    for _ in range(_REPLAN_TRIES):
        plans = [
            _plan(
                site.desk,
                replace(target, calls=site.calls),
                how,
                {path for root, path in in_use if root == site.desk.root.id},
            )
            for site in sites
        ]
        stopped = _stops(plans, unknown, how)
        if stopped:
            plans = [plan.untouched() for plan in plans]
        for site, one in zip(sites, plans, strict=True):
            check_moves(site.desk, one, how.may_write)
        plan = together([as_seen_from(desk, site, one) for site, one in zip(sites, plans, strict=True)], unknown)
        if stopped:
            return WayBack(False, None, plan.outcomes, of=_ids(target), plan=plan)
        told = WayBack(plan.ok, None, plan.outcomes, plan.overwrote_external, _ids(target), plan, talk, left)
        if how.dry_run or not (plan.moves or talk or moves_slices or _counts_all_the_same(target, plan, how)):
            return told
        try:
            call = _apply(sites, target, plans, how)
            return replace(
                told, call_id=call.id, race_window=any(one.race_window for one in (call, *call.parts.values()))
            )
        except OSError:
            return WayBack(False, None, _failed(plan), of=_ids(target), plan=plan)
        except _WorldMoved:
            continue
        except _InUse as found:
            in_use.add(found.at)
    raise fault("path_busy", "The files keep changing while going back; try again when they are quiet.")


def _stops(plans: Sequence[RestorePlan], unknown: Sequence[Outcome], how: How) -> bool:
    """A path that fails in one of them leaves all of them alone; with `refuse`, whatever does not go back does."""
    refused = how.on_conflict == "refuse" and not (all(plan.ok for plan in plans) and not unknown)
    return refused or any(plan.stops(how.on_conflict) for plan in plans)


def _counts_all_the_same(target: _Target, plan: RestorePlan, how: How) -> bool:
    """Whether what moves nothing is on record: else what is below or before would never have its turn."""
    goes_on = target.is_newest and how.on_conflict == "merge"
    is_over = target.verb == "rollback" or any(call.way_back is not None for call in target.calls)
    return (plan.ok or goes_on) and (is_over or bool(plan.outcomes))


def check_moves(desk: Desk, plan: RestorePlan, may_write: MayWrite | None) -> None:
    """One path that may not be written refuses the whole plan, also if somebody only asks what would happen."""
    if may_write is not None:
        for move in plan.moves:
            may_write(desk, move.path)


def _ids(target: _Target) -> tuple[str, ...]:
    return tuple(call.id for call in target.calls)


def _plan(desk: Desk, target: _Target, how: How, in_use: Set[RepoPath] = frozenset()) -> RestorePlan:
    """`in_use`: paths that a program keeps changing, and that stay as they are."""
    present = Present(desk)
    with desk.ledger.store.read() as tx:
        split = [_split(_layer(tx, desk, call, target), target, how) for call in target.calls]
        layers = [ordinary for ordinary, _ in split]
        quiet = _nothing_recorded_since(tx, desk, target.calls) and _nothing_seen_since(desk, target.calls, layers)
        planner = Planner(
            lambda path: shut[path] if path in shut else present.entry(path),
            present.read,
            desk.children,
            how.on_conflict,
            keep_mtimes=quiet,
            has=lambda digest: present.has(tx, digest),
            is_held_open=present.is_held_open,
            is_lost=lambda digest: desk.ledger.blobs.is_lost(tx, digest),
        )
        kept = [change for _, part in split for change in part]
        unclear = [] if how.on_conflict == "overwrite" else _ambiguous(tx, desk, target.calls, layers)
        with _opened(desk, layers) as shut:
            unstored = _never_captured(tx, desk, target, layers)
            plan = planner.plan(layers, not_captured=unstored, ambiguous=unclear, in_use=in_use)
        gaps = _gaps(tx, desk, target)
        plan = plan.leaving([*left_alone(kept, present.read), *left_outside(gaps)])
        return replace(plan, coverage=tuple(gaps))


@contextmanager
def _opened(desk: Desk, layers: Sequence[Sequence[Change]]) -> Iterator[Mapping[RepoPath, Entry]]:
    """Folders as shut as the calls have left them are open for a look. What they are while they are shut."""
    left = {change.path: change.after for layer in reversed(layers) for change in layer}
    shut: dict[RepoPath, Entry] = {}
    with ExitStack() as closing:
        for path in sorted(left, key=path_bytes):
            if is_shut(desk.disk, path) and same_state(now := desk.entry(path), left[path]):
                shut[path] = now
                closing.enter_context(opened_up(desk.disk, path))
        yield shut


def _notes(tx: Tx, desk: Desk, calls: Iterable[CallRow]) -> Iterator[tuple[RepoPath, Mapping[str, str]]]:
    """What the calls say they could not capture, at the paths this desk has for it."""
    for call in calls:
        root = tx.get(ROOTS, call.root) or desk.root
        for note in coverage_of_call(tx, call):
            path = RepoPath(text_from_wire(note["path"]))
            yield (
                path_here(desk.root, root.place_of(path_bytes(path)), path) if root.id != desk.root.id else path,
                note,
            )


def _gaps(tx: Tx, desk: Desk, target: _Target) -> list[Mapping[str, str]]:
    """What is not captured at the paths that count; each once."""
    found: list[Mapping[str, str]] = []
    asked = _all_of(target.named)
    for path, note in _notes(tx, desk, target.calls):
        gap = {**note, "path": to_wire(path)}
        if gap not in found and counts_at(desk.root.place_of(path_bytes(path)), asked):
            found.append(gap)
    return found


def _never_captured(tx: Tx, desk: Desk, target: _Target, layers: Sequence[Sequence[Change]]) -> list[RepoPath]:
    """Paths that the calls changed and of which nothing but the name is on record."""
    known, asked = {change.path for layer in layers for change in layer}, _all_of(target.named)
    found = {path for path, note in _notes(tx, desk, target.calls) if note["reason"] == "not_captured"}
    return sorted(
        (path for path in found - known if counts_at(desk.root.place_of(path_bytes(path)), asked)), key=path_bytes
    )


def _ambiguous(tx: Tx, desk: Desk, calls: Sequence[CallRow], layers: Sequence[Sequence[Change]]) -> list[RepoPath]:
    """Paths that somebody else may have changed in the same window as a call."""
    unclear = {path for path, note in _notes(tx, desk, calls) if note["reason"] == "ambiguous"}
    return sorted({change.path for layer in layers for change in layer} & unclear, key=path_bytes)


def _split(layer: list[Change], target: _Target, how: How) -> tuple[list[Change], list[Change]]:
    """What to go back on, and what in repositories stays. A redo takes back whatever its way back did."""
    if how.git == "restore" or target.verb == "redo":
        return without_objects(layer), []
    return split_off(layer)


def _layer(tx: Tx, desk: Desk, call: CallRow, target: _Target) -> list[Change]:
    """A call's changes that count, as this desk sees their places."""
    rows = _rows(tx, call, target)
    if target.verb in ("undo", "rollback"):
        rows = [without_undone(tx, row) for row in rows]
    changes = [change_from_row(row) for row in rows]
    if call.root != desk.root.id:
        here = [path_here(desk.root, row.place, one.path) for one, row in zip(changes, rows, strict=True)]
        changes = [replace(one, path=path) for one, path in zip(changes, here, strict=True)]
    return sorted(changes, key=lambda change: path_bytes(change.path))


def _rows(tx: Tx, call: CallRow, target: _Target) -> list[ChangeRow]:
    back = target.taken.places.get(call.id, frozenset())
    found = tx.select(CHANGES, {"call": call.id})
    return [row for row in found if row.place not in back and counts_at(row.place, target.places)]


def _unknown(desk: Desk, target: _Target) -> tuple[Outcome, ...]:
    """Of paths somebody asked for that no change is at or below."""
    if target.named is None:
        return ()
    with desk.ledger.store.read() as tx:
        every = replace(target, taken=Taken())
        rows = [row for call in target.calls for row in _rows(tx, call, every)]
    known = {above for row in rows for above in upwards(row.place)}
    with desk.ledger.store.read() as tx:
        found = [path for path, note in _notes(tx, desk, target.calls) if note["reason"] == "not_captured"]
    known |= {above for path in found for above in upwards(desk.root.place_of(path_bytes(path)))}
    unknown = [path for path, places in target.named.items() if places.isdisjoint(known)]
    return tuple(Outcome(path, "skipped", "not_captured") for path in unknown)


def _nothing_recorded_since(tx: Tx, desk: Desk, calls: Sequence[CallRow]) -> bool:
    """Whether nothing in the workspace was recorded after the oldest of the calls but the calls themselves."""
    newest = newest_wseq(tx, workspace_of(tx, desk))
    places = [call.wseq for call in calls if call.wseq is not None]
    return bool(places) and newest - min(places) + 1 == len(places)


def _nothing_seen_since(desk: Desk, calls: Sequence[CallRow], layers: Sequence[Sequence[Change]]) -> bool:
    """Whether a short look finds nothing that changed since, on record or not: a build may have been run in between."""
    moments = [(_ns(call.started_at), _ns(call.ended_at or call.started_at)) for call in calls]
    top = desk.disk.root.path
    own = {path for layer in layers for change in layer for path in (change.path, *ancestors_of(change.path))}
    return is_quiet(
        top,
        since_ns=min(begun for begun, _ in moments),
        own={os.path.join(top, path_bytes(path)) for path in own},
        own_since_ns=max(ended for _, ended in moments),
        entries_max=_LOOK_ENTRIES_MAX,
    )


def _ns(moment: str) -> int:
    return round(parse_timestamp(moment).timestamp() * 1_000_000) * 1_000


def _apply(sites: Sequence[Site], target: _Target, plans: Sequence[RestorePlan], how: How) -> Call:
    """The call, which is where something moves. What happens in further roots are parts of it."""
    acts = sorted(zip(sites, plans, strict=True), key=lambda act: not act[1].moves)
    desk = acts[0][0].desk
    session = SessionId(how.session or target.session or target.calls[0].session or "default")
    _check_between_calls(session)
    call = desk.call(session, tool=target.verb, cause=_cause(desk, target, _in_conflict(sites, target, plans)))
    call.at_end.append(lambda tx, status: status == "committed" and _move_session(tx, desk, target, call.id))
    try:
        with call:
            for site, plan in acts:
                acting = call if site.desk is desk else site.desk.part_of_way_back(call, target.verb)
                for moves in _effects(plan):
                    acting.change([_intent(site.desk, move) for move in moves])
    except Refused as refused:
        if refused.code == "path_claimed":
            raise fault("path_claimed", refused.message) from None
        if refused.code == "file_in_use":
            raise _InUse(str(refused.fields["root"]), RepoPath(str(refused.fields["path"]))) from None
        raise _WorldMoved from None
    return call


def _check_between_calls(session: SessionId) -> None:
    """A way back is a call of its own: it would stand even if the one around it fails."""
    around = current_call()
    if around is not None and around.facts.session == session:
        raise fault("call_open", f"Call {around.id} is still open here; end it, and go back then.")


def _effects(plan: RestorePlan) -> Iterator[Sequence[Move]]:
    """The moves in portions; then directories get the times they had, as all is in them that changes these."""
    folders = [one for one in plan.moves if isinstance(one.target, DirEntry) and one.target.mtime_ns]
    for moves in (plan.moves, [replace(one, now=one.target) for one in folders]):
        for start in range(0, len(moves), _MOVES_PER_EFFECT):
            yield moves[start : start + _MOVES_PER_EFFECT]


def _move_session(tx: Tx, desk: Desk, target: _Target, call: str) -> bool:
    """Talk and slices go with the files. Whether slices did."""
    if target.talk is not None:
        target.talk.apply_in(tx, desk.ledger, target.verb, call)
    calls = _with_slices(target)
    return take_back_in(tx, desk.ledger.journal, calls, target.stretch, at=desk.ledger.now(), by=call)


def _with_slices(target: _Target) -> list[str]:
    """Restoring, or going back in some paths only, is about files."""
    if target.verb == "restore" or target.named is not None:
        return []
    return [call for call in _ids(target) if call not in target.taken.slices]


def _slices(desk: Desk, target: _Target) -> tuple[bool, tuple[str, ...]]:
    """Whether it is about slices at all, and which of them it cannot put back as they were."""
    calls = _with_slices(target)
    with desk.ledger.store.read() as tx:
        back = slices_back(tx, calls, target.stretch)
        return bool(back.changes) or changes_slices(tx, calls), back.left


def _failed(plan: RestorePlan) -> tuple[Outcome, ...]:
    moved = {move.path for move in plan.moves}
    return tuple(Outcome(one.path, "failed", "io_error") if one.path in moved else one for one in plan.outcomes)


def _cause(desk: Desk, target: _Target, in_conflict: Set[str]) -> dict[str, Any]:
    """On record: which calls are taken back wholly (`of`), which only in `part`, and which of these a conflict `left`.

    A redo is over once it was tried, whatever it could bring back.
    """
    asked = _asked_in_part(desk, target)
    whole = [call for call in target.calls if call.id not in asked]
    left = [call.id for call in whole if main_of(call) in in_conflict and target.verb != "redo"]
    part = [*(call for call, any_of_it in asked.items() if any_of_it), *left]
    body: dict[str, Any] = {"verb": target.verb, "of": [call.id for call in whole if call.id not in left]}
    more = {"part": part, "left": left, "turn": target.turn}
    return body | {name: value for name, value in more.items() if value}


def _asked_in_part(desk: Desk, target: _Target) -> dict[str, bool]:
    """The calls of which not everything counts, each with all its parts, and whether any of their paths does."""
    if target.places is None:
        return {}
    in_part = {main_of(call) for call in target.calls if moved_talk(desk, call)}
    with desk.ledger.store.read() as tx:
        every, family = replace(target, places=None), with_parts(tx, target.calls)
        counted = {call.id: len(_rows(tx, call, target)) for call in family}
        in_part |= {main_of(call) for call in family if len(_rows(tx, call, every)) != counted[call.id]}
        beside = [call for call in family if call.id not in target.taken.slices]
        in_part |= {main_of(call) for call in beside if changes_slices(tx, [call.id])}
    return {call.id: counted[call.id] > 0 for call in target.calls if main_of(call) in in_part}


def _in_conflict(sites: Sequence[Site], target: _Target, plans: Sequence[RestorePlan]) -> set[str]:
    """The calls, each with all its parts, that changed a path which a conflict leaves as it is."""
    found = set[str]()
    for site, plan in zip(sites, plans, strict=True):
        paths = {one.path for one in plan.outcomes if one.outcome == "conflicted"}
        if not paths:
            continue
        with site.desk.ledger.store.read() as tx:
            layers = [(main_of(call), _layer(tx, site.desk, call, target)) for call in site.calls]
        found |= {main for main, layer in layers if any(change.path in paths for change in layer)}
    return found


def _written_since(desk: Desk, move: Move, image: Image) -> bytes | None:
    """What a program that has the file open has written to its end since the plan; None if it is not that."""
    now = move.now
    if not isinstance(now, FileEntry) or not isinstance(image.entry, FileEntry) or image.entry.mode != now.mode:
        return None
    if image.entry.size > MERGE_MAX_BYTES or digest_of_beginning(image.data, now.size) != now.digest:
        return None
    return image.data[now.size :] if Present(desk).is_held_open(move.path) else None


def _intent(desk: Desk, move: Move) -> Intent:
    def plan(image: Image) -> Wanted:
        content = content_for(desk, move, image)
        if not image.special and (same_state(image.entry, move.now) or same_state(image.entry, move.target)):
            return Wanted(move.target, content)
        end = _written_since(desk, move, image)
        if end is None or content is None or not isinstance(move.target, FileEntry):
            raise _WorldMoved
        content = whole(content) + end
        return Wanted(replace(move.target, digest=digest_of(content), size=len(content), mtime_ns=0), content)

    return Intent(move.path, plan, lifts=True, relinks=True, spares_writers=True)
