"""Opens the store and the root for a verb.

A command of a call may run a verb itself. The verb then joins that outer call, if it works in the same root: the outer
call sees every change and records it, so the verb records nothing. It works in a temporary store in memory; if the verb
fails, its changes are rolled back, and the outer call goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.options import Common
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import OwnerId
from mulligan.values.text import visible

if TYPE_CHECKING:
    from mulligan.api import Mulligan
    from mulligan.history.open_root import OpenRoot
    from mulligan.history.power_cuts import CutReport
    from mulligan.history.recovery import Recovered
    from mulligan.store.protocol import Store
    from mulligan.values.paths import RepoPath


def open_for_changes(common: Common, *, capability: Any = None, policy: Any = None) -> Mulligan:
    """Opens for changes: creates the store and registers the root if they are new."""
    import mulligan.api as api

    if common.root is not None:
        return _report_recovery(api.open(common.root, store=common.store, capability=capability, policy=policy))
    here = os.path.realpath(os.getcwd())
    nearest = api.open_nearest(here, store=common.store, record=True, capability=capability, policy=policy)
    return _report_recovery(nearest)


def open_for_reading(common: Common) -> Mulligan:
    """Opens for reading: creates nothing. Before the first call there is no store, so an empty one in memory serves."""
    import mulligan.api as api

    store = common.store if common.store is not None or api.has_store(None) else "memory:"
    if common.root is not None:
        return _report_recovery(api.open_for_reading(common.root, store=store))
    return _report_recovery(api.open_nearest(os.path.realpath(os.getcwd()), store=store, record=False))


def _report_recovery(opened: Mulligan) -> Mulligan:
    """Prints what recovery did: the first verb after a crash says so, whichever verb it is."""
    for path in opened.power_cut:
        click.echo(f"mulligan: {_power_cut_words(path)}", err=True)
    for one in opened.recovered:
        click.echo(f"mulligan: {_recovered_words(one)}", err=True)
    return opened


def _power_cut_words(found: CutReport) -> str:
    path = visible(found.path)
    if found.outcome == "put_back":
        return f"a power cut destroyed what was last written to {path}; Mulligan restored its earlier content"
    if found.outcome == "lost":
        return f"a power cut destroyed the content of {path}, and there is no earlier one"
    return f"a power cut destroyed the record of a change to {path}; the store has its earlier content: {found.digest}"


def _recovered_words(one: Recovered) -> str:
    name = one.call[-8:]
    if one.stuck is not None:
        why, what = one.stuck.rstrip("."), "recorded" if one.committed else "rolled back"
        return f"call {name} died half-way and could not be {what} yet: {why}. The next command tries again."
    if one.committed:
        return f"call {name} was cut short; Mulligan recorded its changes, and `mulligan undo {name}` undoes them"
    left = f", except {', '.join(map(visible, one.conflicts))}" if one.conflicts else ""
    return f"call {name} died half-way; Mulligan rolled its changes back{left}"


def root_folder(common: Common) -> str:
    """The given root, else the nearest known root that contains the current folder, else that folder."""
    if common.root is not None:
        return common.root
    here = os.path.realpath(os.getcwd())
    above = [root for root in known_roots(common.store) if here == root or here.startswith(root.rstrip("/") + "/")]
    return max(above, key=len, default=here)


def path_meant(opened: Mulligan, given: str) -> RepoPath:
    """The path that the user means: relative to this folder if it exists or ever existed there, else to the root.

    A path that is known in neither place is relative to this folder. Raises `invalid_path` outside the root.
    """
    from mulligan.values.errors import MulliganError
    from mulligan.values.paths import from_wire

    meant = _from_here(opened.open_root, given)
    try:
        meant.append(from_wire(given))
    except MulliganError:
        # Absolute, or with '..': relative to this folder it may still be in the root.
        if not meant:
            raise
    return next((path for path in meant if _is_known(opened.open_root, path)), meant[0])


def path_in_any_root(opened: Mulligan, given: str) -> RepoPath:
    """A path in the root, or an absolute path that may be in another root of the call."""
    from mulligan.values.errors import MulliganError
    from mulligan.values.paths import RepoPath, text_from_wire

    try:
        return path_meant(opened, given)
    except MulliganError:
        typed = text_from_wire(given)
        if not typed or "\0" in typed:
            raise
    folder, name = os.path.split(os.path.abspath(typed))
    return RepoPath(os.path.join(os.path.realpath(folder), name))


def _from_here(open_root: OpenRoot, given: str) -> list[RepoPath]:
    """The paths in the root that the user may mean: the path as written, and the path with its links followed."""
    from mulligan.values.paths import is_inside, text_from_wire

    root, typed = open_root.disk.root, text_from_wire(given)
    if not typed or "\0" in typed:
        return []
    try:
        whole = os.path.join(os.path.realpath(os.getcwd()), typed)
    except FileNotFoundError:  # this folder was deleted
        return []
    by_names = os.path.normpath(os.fsencode(whole))
    found = [root.below(by_names) if is_inside(by_names, root.path) else None, root.find(whole)]
    return [path for path in found if path is not None]


def _is_known(open_root: OpenRoot, path: RepoPath) -> bool:
    from mulligan.history.tables import CHANGES

    root = open_root.disk.root
    # A path through a link is really another path.
    if os.path.lexists(root.absolute(path)) and root.find(path) == path:
        return True
    with open_root.ledger.store.read() as tx:
        return bool(tx.select(CHANGES, {"place": root.place_of(path)}, limit=1))


@contextmanager
def opened_store(url: str | None, *, create: bool = False) -> Iterator[Store]:
    """The store of a URL, without a root. A missing store is created only with `create`."""
    from mulligan.api import open_store
    from mulligan.history.projection import SCHEMA
    from mulligan.values.clock import SystemClock

    store = open_store(url, SCHEMA, durability="process", clock=SystemClock(), create=create)
    try:
        yield store
    finally:
        store.close()


def known_roots(url: str | None) -> list[str]:
    """All roots in the store; none if there is no store yet."""
    import mulligan.api as api

    if not api.has_store(url):
        return []
    with opened_store(url) as store:
        return api.known_roots(store)


def usual_stores(common: Common) -> list[str]:
    """The directories of the stores that this user's settings may mean, this one first."""
    import mulligan.api as api

    home = {name: value for name, value in os.environ.items() if name in ("HOME", "XDG_STATE_HOME")}
    known = [
        api.store_directory(common.store, os.environ),
        api.state_directory(os.environ),
        api.state_directory(home),
        api.state_directory({name: value for name, value in home.items() if name == "HOME"}),
    ]
    return list(dict.fromkeys(os.path.realpath(one) for one in known if one is not None))


def stores_elsewhere(common: Common, root: str) -> list[str]:
    """Other stores of this user that have calls in this folder, or in one around it."""
    import mulligan.api as api

    own = os.path.realpath(api.store_directory(common.store, os.environ) or "/")
    found: list[str] = []
    for directory in usual_stores(common):
        # A store that does not open is no reason for a verb on another one to fail; `doctor` names it.
        with suppress(MulliganError):
            if directory != own and api.has_store(directory) and _has_calls(directory, os.fsencode(root)):
                found.append(directory)
    return found


def _has_calls(directory: str, root: bytes) -> bool:
    from mulligan.history.tables import CALLS, ROOTS
    from mulligan.values.paths import is_inside

    with opened_store(directory) as store, store.read() as tx:
        around = [row for row in tx.select(ROOTS) if is_inside(root, row.place or b"/")]
        return any(tx.select(CALLS, {"workspace": row.workspace}, limit=1) for row in around)


@fast_dataclass(slots=True, frozen=True)
class OuterCall:
    """The outer call, and the folder below its root in which the verb works."""

    call: str
    session: str | None
    turn: str
    root: str
    found_by: Mapping[str, str]

    @property
    def environment(self) -> dict[bytes, bytes]:
        """The environment that tells a command about the outer call."""
        told = {"MULLIGAN_CALL": self.call, **self.found_by}
        return {os.fsencode(name): os.fsencode(value) for name, value in told.items()}

    def check_names(self, *, session: str | None, turn: str | None, label: str | None) -> None:
        """Raises for a session, turn or label that is not the outer call's."""
        for name, given, own in (("session", session, self.session), ("turn", turn, self.turn), ("label", label, None)):
            if given is not None and given != own:
                words = f"This runs inside call {self.call} and joins it; it cannot have a --{name} of its own."
                raise fault("invalid_params", words, field=name, call=self.call)


def outer_call(common: Common) -> OuterCall | None:
    """The open call whose command started this process, if the verb's folder is in its root."""
    import mulligan.api as api
    from mulligan.history.tables import CALLS, OPEN, ROOTS
    from mulligan.session.tables import BOUNDARIES
    from mulligan.values.paths import is_inside

    call = api.outer_call(os.environ)
    if call is None or not api.has_store(common.store):
        return None
    root = os.path.realpath(root_folder(common))
    with opened_store(common.store) as store:
        with store.read() as tx:
            row, shown = tx.get(OPEN, call), tx.get(CALLS, call)
            place = None if row is None else tx.get(ROOTS, row.root)
            is_bounded = row is not None and tx.has(BOUNDARIES, row.session)
        if row is None or shown is None or place is None or not is_inside(os.fsencode(root), place.place or b"/"):
            return None
        # The process of the call may have died before its command. Inside a sandbox Mulligan cannot find that out.
        with suppress(MulliganError):
            if store.is_alive(OwnerId(row.owner)) is False:
                return None
        # The store in memory has no boundary of the session; the outer call enforces it.
        return OuterCall(call, None if is_bounded else row.session, shown.turn, root, store.environment)


def open_in_outer_call(common: Common, outer: OuterCall, *, capability: Any = None, policy: Any = None) -> Mulligan:
    """Opens for changes inside the outer call."""
    opened = open_for_changes(replace(common, root=outer.root, store="memory:"), capability=capability, policy=policy)
    opened.open_root.ledger.joins = outer.call, outer.found_by
    return opened
