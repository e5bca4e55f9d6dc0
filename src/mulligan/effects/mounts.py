"""What mounted roots mean for an effect: which desk it takes place on, and whether it may write there.

An effect takes place in one root. Reading in another root is part of the same call. Writing there is too: the call
moves over if it has done nothing yet, else it gets a part in that root which commits and goes back with it.
"""

from __future__ import annotations

import os
from dataclasses import replace

from mulligan.boundary.verdict import Boundary
from mulligan.effects.scene import Scene
from mulligan.history.asides import aside_of, set_aside
from mulligan.history.desk import Desk
from mulligan.session.roots import Anchor, Mount
from mulligan.values.ids import SessionId
from mulligan.values.paths import ROOT, RepoPath, is_inside, parse_repo_path
from mulligan.values.refusal import Refused
from mulligan.workspace.reading import refusal_of


def anchored(scene: Scene, anchor: Anchor) -> Scene:
    """The scene at the session's primary root, which may be another one than it was opened on."""
    here = scene.desk
    walls = _walls(anchor, anchor.primary)
    if os.fsencode(anchor.primary) == here.disk.root.path:
        return replace(scene, anchor=anchor, boundary=replace(scene.boundary, walls=walls))
    desk = _elsewhere(here, anchor.primary, record=scene.writes)
    boundary = _moved(scene.boundary, desk, anchor.primary, walls)
    return replace(scene, desk=desk, boundary=boundary, workdir=ROOT, anchor=anchor)


def mounted(scene: Scene, mount: Mount) -> Scene:
    """The scene at a mounted root. Refuses to write where that is not what the root was mounted for."""
    if scene.writes and mount.mode == "read_only":
        raise Refused("forbidden", "path_not_allowed", f"{mount.path} is mounted read only.")
    assert scene.anchor is not None, "what is mounted is said by the anchor"
    desk = _desk_of(scene.desk, scene.session, mount, writes=scene.writes)
    boundary = _moved(scene.boundary, desk, mount.path, _walls(scene.anchor, mount.path))
    return replace(scene, desk=desk, boundary=boundary, mount=mount)


def _desk_of(desk: Desk, session: SessionId, mount: Mount, *, writes: bool) -> Desk:
    """The root itself; for a sandboxed one its copy, as soon as there is something to keep aside."""
    if mount.mode != "sandboxed":
        return _elsewhere(desk, mount.path, record=writes)
    if writes:
        return _elsewhere(desk, set_aside(desk.opener, session, mount.path).directory, record=True)
    with desk.ledger.store.read() as tx:
        aside = aside_of(tx, session, mount.path)
    return _elsewhere(desk, mount.path if aside is None else aside.directory, record=False)


def _elsewhere(desk: Desk, directory: str, *, record: bool) -> Desk:
    try:
        return desk.opener.elsewhere(os.fsencode(directory), record=record)
    except OSError as error:
        raise refusal_of(error, directory) from None


def _moved(boundary: Boundary, desk: Desk, root: str, walls: tuple[RepoPath, ...]) -> Boundary:
    return replace(boundary.moved_to(root, walls), folds_case=desk.disk.root.folds_case)


def _walls(anchor: Anchor, root: str) -> tuple[RepoPath, ...]:
    """Roots mounted inside this one that may not be written through it."""
    inner = [one for one in anchor.mounts if one.mode != "extend" and one.path != root and is_inside(one.path, root)]
    return tuple(parse_repo_path(one.path[len(root.rstrip("/")) + 1 :]) for one in inner)
