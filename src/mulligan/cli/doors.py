"""How a verb reaches its workspace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from mulligan.cli.options import Common
from mulligan.cli.output import visible

if TYPE_CHECKING:
    from mulligan.history.desk import Desk
    from mulligan.history.power_cuts import Found
    from mulligan.history.recovery import Recovered
    from mulligan.opening import Mulligan
    from mulligan.values.paths import RepoPath


def work(common: Common, *, capability: Any = None, policy: Any = None) -> Mulligan:
    """Open for work: the store and the root are made known if they are new."""
    import mulligan.opening as opening

    return _told(opening.open(root_folder(common), store=common.store, capability=capability, policy=policy))


def look(common: Common) -> Mulligan:
    """Open for looking: nothing is made. Before the first call there is no store yet, and so nothing to see in it."""
    import mulligan.opening as opening

    store = common.store if common.store is not None or has_store(None) else "memory:"
    return _told(opening.look(root_folder(common), store=store))


def _told(opened: Mulligan) -> Mulligan:
    """Whoever comes first after a crash learns what became of it, whatever he came for."""
    for path in opened.power_cut:
        click.echo(f"mulligan: {_power_cut_words(path)}", err=True)
    for one in opened.recovered:
        click.echo(f"mulligan: {_recovered_words(one)}", err=True)
    return opened


def _power_cut_words(found: Found) -> str:
    path = visible(found.path)
    if found.outcome == "put_back":
        return f"a power cut took what was last written to {path}; its earlier content is back"
    if found.outcome == "lost":
        return f"a power cut took the content of {path}, and there is no earlier one"
    return f"a power cut took the record of a change to {path}; its earlier content is in the store as {found.digest}"


def _recovered_words(one: Recovered) -> str:
    name = one.call[-8:]
    if one.stuck is not None:
        why = one.stuck.rstrip(".")
        return f"{name} had died half-way and could not be put back yet: {why}. The next command tries again."
    if one.stands:
        return f"{name} was cut short; what it had done is on record, `mulligan undo {name}` takes it back"
    left = f", but for {', '.join(map(visible, one.conflicts))}" if one.conflicts else ""
    return f"{name} had died half-way; its changes were put back{left}"


def root_folder(common: Common) -> str:
    """The root asked for, else the nearest known one above the current folder, else that folder."""
    if common.root is not None:
        return common.root
    here = os.path.realpath(os.getcwd())
    above = [root for root in known_roots(common.store) if here == root or here.startswith(root.rstrip("/") + "/")]
    return max(above, key=len, default=here)


def path_meant(opened: Mulligan, given: str) -> RepoPath:
    """The path a person means: from this folder if something is there, or ever was; else from the root.

    Of what is known in neither place, the one in this folder. Raises `invalid_path` for one that is not in the root.
    """
    from mulligan.values.faults import MulliganError
    from mulligan.values.paths import from_wire

    meant = _from_here(opened.desk, given)
    try:
        meant.append(from_wire(given))
    except MulliganError:
        # Absolute, or climbing with '..': as typed here it may well be in the root.
        if not meant:
            raise
    return next((path for path in meant if _is_known(opened.desk, path)), meant[0])


def path_in_any_root(opened: Mulligan, given: str) -> RepoPath:
    """A path in the root, or the whole path of one that may be in another root where a call was at work."""
    from mulligan.values.faults import MulliganError
    from mulligan.values.paths import RepoPath, text_from_wire

    try:
        return path_meant(opened, given)
    except MulliganError:
        typed = text_from_wire(given)
        if not typed or "\0" in typed:
            raise
    folder, name = os.path.split(os.path.abspath(typed))
    return RepoPath(os.path.join(os.path.realpath(folder), name))


def _from_here(desk: Desk, given: str) -> list[RepoPath]:
    """What a path typed in this folder may be, if that is in the root: by its names alone, and with links followed."""
    from mulligan.values.paths import is_inside, text_from_wire

    root, typed = desk.disk.root, text_from_wire(given)
    if not typed or "\0" in typed:
        return []
    try:
        whole = os.path.join(os.path.realpath(os.getcwd()), typed)
    except FileNotFoundError:  # this folder was deleted
        return []
    by_names = os.path.normpath(os.fsencode(whole))
    found = [root.below(by_names) if is_inside(by_names, root.path) else None, root.find(whole)]
    return [path for path in found if path is not None]


def _is_known(desk: Desk, path: RepoPath) -> bool:
    from mulligan.history.tables import CHANGES

    root = desk.disk.root
    # What is there through a link on the way is really another path.
    if os.path.lexists(root.absolute(path)) and root.find(path) == path:
        return True
    with desk.ledger.store.read() as tx:
        return bool(tx.select(CHANGES, {"place": root.place_of(path)}, limit=1))


def has_store(store: str | None) -> bool:
    """Whether there is a store on disk under that name.

    Yes also where nobody may look, where something else is, and where only a part of one is left: opening it says what
    is wrong.
    """
    from mulligan.opening import store_directory
    from mulligan.store.sqlite import DATABASE
    from mulligan.store.sqlite_file import is_there

    directory = store_directory(store, os.environ)
    try:
        if directory is not None and os.path.exists(directory) and not os.path.isdir(directory):
            return True
        return directory is not None and any(is_there(os.path.join(directory, DATABASE + end)) for end in ("", "-wal"))
    except OSError:
        return True


def known_roots(store: str | None) -> list[str]:
    """Every root the store knows; none, if there is no store yet."""
    from mulligan.history.schema import SCHEMA
    from mulligan.history.tables import ROOTS
    from mulligan.opening import open_store
    from mulligan.store.machine import known_host
    from mulligan.values.clock import SystemClock

    if not has_store(store):
        return []
    opened = open_store(store, SCHEMA, durability="process", clock=SystemClock(), create=False)
    try:
        with opened.read() as tx:
            here = ("", known_host(tx, os.environ))
            return [os.fsdecode(row.place) or "/" for row in tx.select(ROOTS) if row.host in here]
    finally:
        opened.close()
