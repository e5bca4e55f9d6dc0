"""The ways back: undo, restore, rollback, redo, rewind. Each finds what to take back, plans, and applies as a call.

Applying is itself a call, so it can be undone; whatever it replaces is in the store first. Either every move of the
plan happens, or none: a disk that fails half-way is put back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mulligan.history.call import Intent
from mulligan.history.desk import Desk
from mulligan.history.families import Span, newest_with_children, span_of, work_of_children
from mulligan.history.log import (
    calls_of,
    can_be_undone,
    change_from_row,
    changes_of,
    find_call,
    is_open_turn,
    is_reachable,
    newest_standing,
    open_calls_of,
    verb_of,
    workspace_of,
)
from mulligan.history.plans import Move, OnConflict, Outcome, Planner, RestorePlan, restricted
from mulligan.history.points import (
    TalkMove,
    began_at,
    find_point,
    last_turn_with_talk,
    move_of_redo,
    move_of_turn,
    move_of_undo,
    move_to,
)
from mulligan.history.repositories import left_alone, split_off, without_objects
from mulligan.history.sites import Site, as_seen_from, holds, main_of, sites_of, together, with_parts
from mulligan.history.tables import CALLS, CHANGES, REDO, TURNS, CallRow, ChangeRow, RootRow
from mulligan.session.kept import changes_slices, take_back_in
from mulligan.session.tables import session_journal
from mulligan.store.journal import HEADS
from mulligan.store.protocol import Tx
from mulligan.values.canonical import decode
from mulligan.values.digest import Digest
from mulligan.values.entries import Change, Entry, FileEntry, same_state
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import (
    RepoPath,
    ancestors_of,
    from_wire,
    is_below,
    join,
    path_bytes,
    path_from_bytes,
    text_from_wire,
    to_wire,
)
from mulligan.values.refusal import Refused
from mulligan.workspace.disk import Image
from mulligan.workspace.writing import Wanted

_REPLAN_TRIES = 5
_MOVES_PER_EFFECT = 500
_WSEQ_END = 2**62


Git = Literal["leave", "restore"]
"""Whether a repository that was there before a call and after it goes back too."""


@dataclass(slots=True, frozen=True)
class WayBack:
    """What a way back came to. `call_id` is None for a dry run, and if there was nothing it could do."""

    ok: bool
    call_id: str | None
    outcomes: tuple[Outcome, ...]
    overwrote_external: tuple[RepoPath, ...] = ()
    of: tuple[str, ...] = ()
    plan: RestorePlan | None = None
    talk: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """`talk`, when the way back moves it: how many messages are in force, and how many were."""
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
        }


@dataclass(slots=True, frozen=True)
class How:
    """What all ways back can be asked."""

    on_conflict: OnConflict = "merge"
    dry_run: bool = False
    session: SessionId | None = None
    git: Git = "leave"


@dataclass(slots=True, frozen=True)
class _Target:
    """What a way back takes back: calls, newest first, and which of their paths count.

    `places`: where alone they do, through whichever root they were changed; None: everywhere.
    """

    verb: str
    calls: tuple[CallRow, ...]
    paths: Sequence[RepoPath] | None = None
    session: str | None = None
    talk: TalkMove | None = None
    places: frozenset[bytes] | None = None


class _WorldMoved(Exception):
    """Somebody changed a planned path between plan and act."""


def undo(desk: Desk, call: str | None = None, *, paths: Sequence[RepoPath] | None = None, how: How) -> WayBack:
    """Take back one call; later ones stay. Without a name: the newest that still stands.

    A way back is a call too: undone, what it did to files, slices and talk is as if it had not been.
    """
    row = _newest(desk, how.session) if call is None else find_call(desk, call, how.session)
    talk = move_of_undo(desk, row) if paths is None and verb_of(row) is not None else None
    _check_standing(row, moved_talk=talk is not None)
    with desk.ledger.store.read() as tx:
        rows = tuple(one for one in with_parts(tx, [row]) if one.wseq is not None or one.id == row.id)
    return _go(desk, _Target("undo", rows, paths, talk=talk), how)


def _newest(desk: Desk, session: SessionId | None) -> CallRow:
    with desk.ledger.store.read() as tx:
        row = newest_standing(tx, desk, session)
    if row is None:
        raise fault("nothing_to_undo", "There is nothing to undo here.")
    return row


def _check_standing(row: CallRow, *, moved_talk: bool) -> None:
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    if row.undone_by is not None:
        raise fault("nothing_to_undo", f"Call {row.id} is undone already; `mulligan redo` brings it back.")
    if row.status != "committed" or (row.wseq is None and not moved_talk):
        raise fault("nothing_to_undo", f"Call {row.id} changed nothing that stands.")


def restore(desk: Desk, call: str, *, paths: Sequence[RepoPath] | None = None, how: How) -> WayBack:
    """Put the call's paths back to what they were before it, later calls' changes of those paths included."""
    row = find_call(desk, call, how.session)
    if row.status == "open":
        raise fault("call_open", f"Call {row.id} is still running.")
    with desk.ledger.store.read() as tx:
        touched: list[RepoPath] = []
        places = set[bytes]()
        calls: dict[str, CallRow] = {}
        for one in with_parts(tx, [row]):
            own = [change.path for change in restricted(changes_of(tx, one.id), paths)]
            there = _places_of(tx, one, own)
            calls |= {each.id: each for each in (*_later_changers(tx, one, there), one)}
            touched += own
            places |= there
    named = sorted({*touched, *_unknown(touched, paths)}, key=path_bytes)
    calls_back = tuple(calls.values())
    return _go(desk, _Target("restore", calls_back, None if paths is None else named, places=frozenset(places)), how)


def _places_of(tx: Tx, row: CallRow, paths: Iterable[RepoPath]) -> set[bytes]:
    return {change.place for path in paths if (change := tx.get(CHANGES, row.id, path_bytes(path))) is not None}


def _later_changers(tx: Tx, row: CallRow, places: Iterable[bytes]) -> list[CallRow]:
    """Everybody's later calls at these places, through whichever root. What a person did is not ours to drop.

    Those that are undone are among them, as their undoing is: taken back in order, they cancel each other out.
    """
    after = ("wseq", (row.wseq or 0) + 1, _WSEQ_END)
    found = {change.call for place in places for change in tx.select(CHANGES, {"place": place}, between=after)}
    rows = [one for call in found if (one := tx.get(CALLS, call)) is not None and not one.external]
    return _newest_first(rows)


def _newest_first(rows: Iterable[CallRow]) -> list[CallRow]:
    return sorted(rows, key=lambda row: row.wseq or 0, reverse=True)


def rollback(desk: Desk, *, how: How, cancel_open: bool = False) -> WayBack:
    """Take the last completed turn back, call by call, newest first."""
    with desk.ledger.store.read() as tx:
        newest = next((row for row in calls_of(tx, desk, how.session) if not row.external), None)
    session = how.session or (SessionId(newest.session) if newest is not None and newest.session else None)
    if session is not None:
        _close_open_turns(desk, session, cancel=cancel_open)
    return _go(desk, _last_turn(desk, session, how), how)


def _last_turn(desk: Desk, session: SessionId | None, how: How) -> _Target:
    """The newest completed turn of which something stands: work of its calls, or messages in force."""
    with desk.ledger.store.read() as tx:
        last = newest_standing(tx, desk, how.session)
        said = None if session is None else last_turn_with_talk(tx, session)
        if said is not None and (last is None or last.session != session or began_at(tx, last) <= said[1]):
            assert session is not None
            own = (session, said[0])
        elif last is not None and last.session is not None:
            own = (SessionId(last.session), last.turn)
        else:
            own = None
        found = _later_turn(tx, own, session, None if session is None else newest_with_children(tx, desk, session))
        if found is None:
            raise fault("nothing_to_undo", "There is no completed turn to roll back.")
        owner, turn = found
        rows = [*tx.select(CALLS, {"session": owner, "turn": turn}), *_of_children(tx, desk, owner, turn)]
        rows = [row for row in rows if is_reachable(tx, row)]
    talk = move_of_turn(desk, owner, turn)
    calls = tuple(_newest_first(row for row in rows if can_be_undone(row)))
    return _Target("rollback", calls, session=owner, talk=talk)


def _later_turn(
    tx: Tx, own: tuple[SessionId, str] | None, session: SessionId | None, delegated: Span | None
) -> tuple[SessionId, str] | None:
    """The turn with work of the session's own, or a later one in which only its children did something."""
    if session is None or delegated is None:
        return own
    span = None if own is None else span_of(tx, *own)
    return own if span is not None and span.started_at >= delegated.started_at else (session, delegated.turn)


def _of_children(tx: Tx, desk: Desk, session: SessionId, turn: str) -> list[CallRow]:
    span = span_of(tx, session, turn)
    return [] if span is None else work_of_children(tx, desk, session, span)


def _close_open_turns(desk: Desk, session: SessionId, *, cancel: bool) -> None:
    """A turn that is still running is cancelled first, or nothing is rolled back."""
    with desk.ledger.store.read() as tx:
        running = open_calls_of(tx, session)
        turns = {row.id for row in tx.select(TURNS, {"session": session}) if is_open_turn(tx, session, row.id)}
        turns |= {row.turn for row in running}
    if not turns:
        return
    if not cancel or not all(desk.cancel(row.id) for row in running):
        raise fault("turn_open", "The newest turn is still running; stop it first, or ask to cancel it.")
    ledger = desk.ledger
    with ledger.store.write() as tx:
        for turn in sorted(turns):
            if is_open_turn(tx, session, turn):
                body = {"session": session, "turn": turn, "reason": "cancelled"}
                ledger.journal.append(tx, session_journal(session), "turn.ended", body, at=ledger.now())


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
    return _go(desk, _Target("rewind", calls, session=found.session, talk=move), how)


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
    sites = sites_of(desk, target.calls)
    talk = None if target.talk is None else target.talk.shown(desk)
    for _ in range(_REPLAN_TRIES):
        plans = _plans(sites, target, how)
        plan = together([as_seen_from(desk, site, one) for site, one in zip(sites, plans, strict=True)])
        if how.dry_run:
            return WayBack(plan.ok, None, plan.outcomes, plan.overwrote_external, _ids(target), plan, talk)
        # A redo is on record even if it moves nothing: else the ones below it would never have their turn.
        counts = target.verb == "redo" or plan.outcomes or talk or _moves_slices(desk, target)
        if not plan.moves and not (plan.ok and counts):
            return WayBack(plan.ok, None, plan.outcomes, of=_ids(target), plan=plan)
        try:
            call = _apply(sites, target, plans, how)
        except OSError:
            return WayBack(False, None, _failed(plan), of=_ids(target), plan=plan)
        except _WorldMoved:
            continue
        return WayBack(plan.ok, call, plan.outcomes, plan.overwrote_external, _ids(target), plan, talk)
    raise fault("path_busy", "The files keep changing while going back; try again when they are quiet.")


def _plans(sites: Sequence[Site], target: _Target, how: How) -> list[RestorePlan]:
    """One for each site. With `refuse`, a conflict in one of them leaves all of them alone."""
    plans = [_plan(site.desk, replace(target, calls=site.calls), how) for site in sites]
    if how.on_conflict == "refuse" and not all(plan.ok for plan in plans):
        return [replace(plan, moves=()) for plan in plans]
    return plans


def _ids(target: _Target) -> tuple[str, ...]:
    return tuple(call.id for call in target.calls)


def _plan(desk: Desk, target: _Target, how: How) -> RestorePlan:
    contents: dict[Digest, bytes] = {}

    def now(path: RepoPath) -> Entry | None:
        image = desk.image(path)
        if isinstance(image.content, bytes) and isinstance(image.entry, FileEntry):
            contents[image.entry.digest] = image.content
        return None if image.special else image.entry

    def read(digest: Digest) -> bytes:
        return contents[digest] if digest in contents else desk.ledger.blobs.read(digest)

    with desk.ledger.store.read() as tx:
        split = [_split(_layer(tx, desk, call, target), target, how) for call in target.calls]
        layers = [ordinary for ordinary, _ in split]
        quiet = _is_quiet_since(tx, desk, target.calls)
        planner = Planner(
            now,
            read,
            _children(desk),
            how.on_conflict,
            keep_mtimes=quiet,
            has=lambda digest: digest in contents or desk.ledger.blobs.has(tx, digest),
        )
        named = _unknown([change.path for both in split for part in both for change in part], target.paths)
        kept = [change for _, part in split for change in part]
        unclear = [] if how.on_conflict == "overwrite" else _ambiguous(target.calls, layers)
        plan = planner.plan(layers, not_captured=named, ambiguous=unclear).leaving(left_alone(kept, read))
    return replace(plan, coverage=tuple(_gaps(target)))


def _gaps(target: _Target) -> list[Mapping[str, str]]:
    """What the calls say they could not capture, at the paths that count; each once."""
    found: list[Mapping[str, str]] = []
    for gap in (gap for call in target.calls for gap in decode(call.coverage)):
        path = RepoPath(text_from_wire(gap["path"]))
        counts = target.paths is None or any(path == one or is_below(path, one) for one in target.paths)
        if counts and gap not in found:
            found.append(gap)
    return found


def _ambiguous(calls: Sequence[CallRow], layers: Sequence[Sequence[Change]]) -> list[RepoPath]:
    """Paths that somebody else may have changed in the same window as a call."""
    unclear = {
        from_wire(note["path"]) for call in calls for note in decode(call.coverage) if note["reason"] == "ambiguous"
    }
    return sorted({change.path for layer in layers for change in layer} & unclear, key=path_bytes)


def _split(layer: list[Change], target: _Target, how: How) -> tuple[list[Change], list[Change]]:
    """What to go back on, and what in repositories stays. A redo takes back whatever its way back did."""
    if how.git == "restore" or target.verb == "redo":
        return without_objects(layer), []
    return split_off(layer)


def _layer(tx: Tx, desk: Desk, call: CallRow, target: _Target) -> list[Change]:
    """A call's changes that count, as this desk sees their places."""
    rows = [row for row in tx.select(CHANGES, {"call": call.id}) if _counts(row.place, target.places)]
    changes = [change_from_row(row) for row in rows]
    if call.root != desk.root.id:
        changes = [replace(one, path=_path_here(desk.root, row)) for one, row in zip(changes, rows, strict=True)]
    return sorted(restricted(changes, target.paths), key=lambda change: path_bytes(change.path))


def _counts(place: bytes, places: frozenset[bytes] | None) -> bool:
    """Whether it is one of the places, or below one."""
    return places is None or any(place[:end] in places for end in (*_slashes(place), len(place)))


def _slashes(place: bytes) -> Iterator[int]:
    return (at for at, byte in enumerate(place) if byte == ord("/"))


def _path_here(root: RootRow, row: ChangeRow) -> RepoPath:
    below = len(root.place_of(b".")) + 1
    return path_from_bytes(row.place[below:] if holds(root, row.place) else row.path)


def _unknown(touched: Iterable[RepoPath], paths: Sequence[RepoPath] | None) -> list[RepoPath]:
    """Paths somebody asked for that no change is at or below."""
    known = {above for path in touched for above in (path, *ancestors_of(path))}
    return [path for path in paths or () if path not in known]


def _children(desk: Desk) -> Callable[[RepoPath], list[RepoPath]]:
    def children(path: RepoPath) -> list[RepoPath]:
        with desk.disk.resolve_exactly(path) as spot:
            return [join(path, name.decode("utf-8", "surrogateescape")) for name in desk.disk.children(spot)]

    return children


def _is_quiet_since(tx: Tx, desk: Desk, calls: Sequence[CallRow]) -> bool:
    """Whether nothing in the workspace was recorded after the oldest of the calls but the calls themselves."""
    head = tx.get(HEADS, f"w:{workspace_of(tx, desk)}")
    places = [call.wseq for call in calls if call.wseq is not None]
    return head is not None and bool(places) and head.seq - min(places) + 1 == len(places)


def _apply(sites: Sequence[Site], target: _Target, plans: Sequence[RestorePlan], how: How) -> str:
    """The id of the call. What happens in further roots are parts of it."""
    desk = sites[0].desk
    session = SessionId(how.session or target.session or target.calls[0].session or "default")
    call = desk.call(session, tool=target.verb, cause=_cause(desk, target))
    call.at_end.append(lambda tx, status: status == "committed" and _move_session(tx, desk, target, call.id))
    try:
        with call:
            for site, plan in zip(sites, plans, strict=True):
                acting = call if site is sites[0] else site.desk.part_of_way_back(call, target.verb)
                for start in range(0, len(plan.moves), _MOVES_PER_EFFECT):
                    some = plan.moves[start : start + _MOVES_PER_EFFECT]
                    acting.change([_intent(site.desk, move) for move in some])
    except Refused as refused:
        if refused.code == "path_claimed":
            raise fault("path_claimed", refused.message) from None
        raise _WorldMoved from None
    return call.id


def _move_session(tx: Tx, desk: Desk, target: _Target, call: str) -> bool:
    """Talk and slices go with the files. Whether slices did."""
    if target.talk is not None:
        target.talk.apply_in(tx, desk.ledger, target.verb, call)
    return _takes_slices(target) and take_back_in(tx, desk.ledger.journal, _ids(target), at=desk.ledger.now(), by=call)


def _takes_slices(target: _Target) -> bool:
    """Restoring, or going back in some paths only, is about files."""
    return target.verb != "restore" and target.paths is None


def _moves_slices(desk: Desk, target: _Target) -> bool:
    with desk.ledger.store.read() as tx:
        return _takes_slices(target) and changes_slices(tx, _ids(target))


def _failed(plan: RestorePlan) -> tuple[Outcome, ...]:
    moved = {move.path for move in plan.moves}
    return tuple(Outcome(one.path, "failed", "io_error") if one.path in moved else one for one in plan.outcomes)


def _cause(desk: Desk, target: _Target) -> dict[str, Any]:
    """On record: which calls are taken back wholly (`of`), and which only in some paths (`part`)."""
    if target.paths is None and target.places is None:
        return {"verb": target.verb, "of": list(_ids(target))}
    with desk.ledger.store.read() as tx:
        all_of = replace(target, paths=None, places=None)
        layers = {call.id: (_layer(tx, desk, call, all_of), _layer(tx, desk, call, target)) for call in target.calls}
    whole = [call for call, (every, taken) in layers.items() if len(every) == len(taken)]
    part = [call for call, (every, taken) in layers.items() if taken and len(every) != len(taken)]
    body: dict[str, Any] = {"verb": target.verb, "of": whole}
    return body | {"part": part} if part else body


def _intent(desk: Desk, move: Move) -> Intent:
    def plan(image: Image) -> Wanted:
        if image.special or not (same_state(image.entry, move.now) or same_state(image.entry, move.target)):
            raise _WorldMoved
        content = move.content
        if content is None and isinstance(move.target, FileEntry):
            content = desk.ledger.blobs.content(move.target.digest, move.target.size)
        return Wanted(move.target, content)

    return Intent(move.path, plan)
