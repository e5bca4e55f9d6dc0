"""A command inside a call: what it changes is captured before or after it does, and is the call's own change.

The command's changes are observed, not made by us, so they are put back by the rules of recovery: what is there
when the call is aborted is kept in the store, then the preimage returns. New objects in git's store are not captured
and not removed where the repository was there before: a commit made inside a command is never lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from mulligan.history.call import Call
from mulligan.history.desk import Desk
from mulligan.history.lifting import is_shut, opened_up
from mulligan.history.repositories import LinkedHead, is_object, repository_of
from mulligan.history.tables import CHANGES, WSEQ_END
from mulligan.history.taking_over import Start, take_over
from mulligan.history.windows import Window, lookout_of
from mulligan.values.entries import ABSENT, Absent
from mulligan.values.faults import MulliganError
from mulligan.values.paths import RepoPath, is_inside, path_bytes, path_from_bytes, to_wire
from mulligan.values.plain import plain
from mulligan.workspace.exec.capture import Capture, Caught, Coverage, Notify
from mulligan.workspace.exec.choose import Means, run_caught
from mulligan.workspace.exec.command import Command
from mulligan.workspace.exec.ledger import below
from mulligan.workspace.exec.output import Sink
from mulligan.workspace.exec.overlay import Overlay
from mulligan.workspace.exec.pump import Handle
from mulligan.workspace.exec.run import Ran

Strategy = Literal["notify", "watch", "scan", "overlay", "bare"]


@plain(slots=True, frozen=True)
class How:
    """How a command is to be run. `only_success`: what an isolated command did is dropped unless it exits with 0."""

    strategy: Strategy | None = None
    isolate: bool = False
    deadline: float | None = None
    handle: Handle | None = None
    only_success: bool = False


class CallWitness:
    """Told by the supervisor before a command changes a path; returns when the call has it safe."""

    def __init__(self, desk: Desk, call: Call, root: bytes) -> None:
        self._desk = desk
        self._call = call
        self._root = root

    def about_to_change(self, paths: Sequence[bytes], *, going: bool = False) -> None:
        """A new object of git's is not kept: nobody will want it gone."""
        below_root = paths_below(self._root, paths)
        kept = [path for path in below_root if not is_object(path) or self._is_there(path)]
        try:
            self._call.about_to_change(kept, going=going)
        except MulliganError as error:
            # The kernel refuses the command's change, and the call goes on.
            self._call.note_if_store_was_full(error)
            raise

    def has(self, path: bytes) -> bool:
        """What was not kept will not go back either."""
        befores = {inner: self._call.before_of(inner) for inner in paths_below(self._root, [path])}
        return all(one is None or self._desk.image(inner).holds(one) for inner, one in befores.items())

    def _is_there(self, path: RepoPath) -> bool:
        return os.path.lexists(os.path.join(self._root, path_bytes(path)))


def paths_below(root: bytes, paths: Iterable[bytes]) -> list[RepoPath]:
    """Absolute paths as paths below the root, without the root itself, in byte order."""
    inner = sorted(path[len(root) :].lstrip(b"/") for path in paths)
    return [path_from_bytes(path) for path in inner if path]


def run_in_call(desk: Desk, call: Call, command: Command, *, sink: Sink, how: How) -> Ran:
    """Run to the end. What it changed is then part of the call; nothing is committed or put back here."""
    if how.strategy not in ("watch", "scan"):  # a window begins it together with itself
        call.begin()
    start = Start.now(desk, call) if how.isolate or how.strategy == "overlay" else None
    begun: list[Capture] = []
    means = Means(
        CallWitness(desk, call, command.root),
        window=lambda name: Window(desk, call, name),
        is_watching=lookout_of(desk).is_watching,
        begun=begun.append,
    )
    over = False
    linked = LinkedHead(command.root)
    try:
        ran, capture = run_caught(
            command,
            means,
            strategy=how.strategy,
            isolate=how.isolate,
            sink=sink,
            handle=how.handle,
            deadline=how.deadline,
        )
        over = True
    finally:
        if not over:
            _absorb_unfinished(call, command.root, begun)
    _cover(call, command.root, ran.coverage)
    if (note := linked.note()) is not None:
        call.coverage.append(note)
    if isinstance(capture, Overlay):
        assert start is not None, "nobody isolates unasked"
        try:
            if _stands(ran, how):
                ran = replace(ran, given_way=take_over(desk, call, capture.changes, start=start))
        finally:
            capture.close()
    elif isinstance(capture, Window):
        capture.take(stands=_stands(ran, how))
        _name_ambiguous(desk, call, capture)
    elif isinstance(capture, Notify):
        _absorb_all(call, command.root, capture, keep=_stands(ran, how))
    return ran


def _stands(ran: Ran, how: How) -> bool:
    return not (ran.timed_out or ran.cancelled or (how.only_success and ran.exit_code != 0))


def _left_behind(call: Call, root: bytes) -> list[RepoPath]:
    """What a command nobody watched to its end may have changed: all it was about to, and all that is new below."""
    found = dict.fromkeys(call.live_paths())
    for path in list(found):
        if isinstance(call.before_of(path), Absent):
            with opened_up(call.disk, path):
                found |= dict.fromkeys(paths_below(root, below(os.path.join(root, path_bytes(path)))))
    return sorted(found, key=path_bytes)


def _absorb_unfinished(call: Call, root: bytes, begun: Iterable[Capture]) -> None:
    """It was interrupted or broke: what it has done so far is the call's, which will be put back."""
    for capture in begun:
        if isinstance(capture, Notify):
            _cover(call, root, capture.caught.coverage)
            _absorb_all(call, root, capture, keep=True)
            _absorb_lifting(call, _left_behind(call, root))
        elif isinstance(capture, Window) and capture.is_open:
            _cover(call, root, capture.look())
            capture.take(stands=False)


def _absorb_all(call: Call, root: bytes, capture: Notify, *, keep: bool) -> None:
    """Whoever came before we had looked may be in what we saw."""
    _absorb(call, root, capture.caught, keep=keep)
    late = capture.late()
    _absorb(call, root, Caught(late, shared=late), keep=True)


def _absorb(call: Call, root: bytes, caught: Caught, *, keep: bool) -> None:
    """What somebody else wrote at too is left there, whatever becomes of the command."""
    paths = paths_below(root, caught.touched)
    every = frozenset(paths)
    ours = [path for path in paths if not _is_new_object(call, path, every)]
    _absorb_lifting(call, ours, keep=keep or bool(caught.shared))
    _name_shared(call, paths_below(root, caught.shared))


def _absorb_lifting(call: Call, paths: Sequence[RepoPath], *, keep: bool = True) -> None:
    """Folders that the command has shut, parents first, are open while what is in them is read."""
    shut = set[RepoPath]()
    with ExitStack() as closing:
        for path in paths:
            if is_shut(call.disk, path):
                shut.add(path)
                closing.callback(call.absorb, [path], keep=keep)  # when it is shut again
                closing.enter_context(opened_up(call.disk, path))
        call.absorb([path for path in paths if path not in shut], keep=keep)


def _is_new_object(call: Call, path: RepoPath, touched: frozenset[RepoPath]) -> bool:
    """An object that a command added to a repository that was there before it."""
    repository = repository_of(path)
    if repository is None or not is_object(path) or not isinstance(call.before_of(path) or ABSENT, Absent):
        return False
    made = repository in touched and isinstance(call.before_of(repository) or ABSENT, Absent)
    return not made


def _name_shared(call: Call, paths: Sequence[RepoPath]) -> None:
    """Somebody else wrote there too: whose the bytes are nobody can say, so nobody's are taken away unasked."""
    changed = {change.path for change in call.changes()}
    call.let_be(paths)
    call.coverage += [{"path": to_wire(path), "reason": "ambiguous"} for path in paths if path in changed]


def _name_ambiguous(desk: Desk, call: Call, window: Window) -> None:
    """A window sees no writer: where somebody else was on record meanwhile, nobody can say whose the change is."""
    with desk.ledger.store.read() as tx:
        for path in window.paths() if window.has_company(tx) else ():
            place = desk.disk.root.place_of(path)
            if tx.select(CHANGES, {"place": place}, between=("wseq", window.since + 1, WSEQ_END), limit=1):
                call.coverage.append({"path": to_wire(path), "reason": "ambiguous"})


def _cover(call: Call, root: bytes, coverage: Coverage) -> None:
    for path, reason in coverage:
        inner = is_inside(path, root) and path != root
        shown = path_from_bytes(path[len(root) :].lstrip(b"/")) if inner else RepoPath(os.fsdecode(path))
        call.coverage.append({"path": to_wire(shown), "reason": reason})
