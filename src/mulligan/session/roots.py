"""Where a session works: its anchor, the roots mounted beside it, and how they may be used.

The primary root is where relative paths begin. Paths in additional roots are absolute. Their mount mode says what may
be done there: `read_only` looking, `extend` writing too, `sandboxed` writing to a copy that stays aside until merged.
What effects make of this is in `effects.mounts`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from mulligan.session.facts import fact, set_facts_in
from mulligan.session.options import checked_options
from mulligan.session.standing import Standing
from mulligan.session.subscribers import poke
from mulligan.session.transcript import event_body
from mulligan.store.journal import Record
from mulligan.store.protocol import Tx
from mulligan.store.tables import Table
from mulligan.values.faults import MulliganError, fault
from mulligan.values.ids import SessionId
from mulligan.values.paths import is_inside
from mulligan.values.plain import plain

ANCHOR, POLICY = "workspace_anchor", "workspace_policy"
MountMode = Literal["read_only", "extend", "sandboxed"]
MOUNT_MODES: tuple[MountMode, ...] = get_args(MountMode)
DEFAULT_POLICY = {"default_mount_mode": "read_only"}
ROOTS_MAX = 256

Json = dict[str, Any]


@plain(slots=True, frozen=True)
class Mount:
    """One additional root, by its real path."""

    path: str
    mode: MountMode
    mounted_at: str

    def to_json(self) -> Json:
        return {"path": self.path, "mount_mode": self.mode, "mounted_at": self.mounted_at}


@plain(slots=True, frozen=True)
class Anchor:
    primary: str
    mounts: tuple[Mount, ...]
    anchored_at: str

    def to_json(self) -> Json:
        roots = [mount.to_json() for mount in self.mounts]
        return {"primary": self.primary, "additional_roots": roots, "anchored_at": self.anchored_at}

    def mount(self, path: str) -> Mount | None:
        return next((one for one in self.mounts if one.path == path), None)

    def copied_to(self, directory: str) -> Anchor:
        """For whoever works in a copy of the primary root: what is mounted inside of it is in the copy as well."""
        own = len(self.primary.rstrip("/"))
        inside = (
            replace(one, path=directory + one.path[own:]) for one in self.mounts if is_inside(one.path, self.primary)
        )
        beside = (one for one in self.mounts if not is_inside(one.path, self.primary))
        return replace(self, primary=directory, mounts=(*beside, *inside))

    def without(self, path: str) -> Anchor:
        return replace(self, mounts=tuple(one for one in self.mounts if one.path != path))


@plain(slots=True, frozen=True)
class AsideRow:
    """A sandboxed root with writes that are not merged yet: where its copy is, and what it was made from.

    `source` and `root` are the roots of the original and of the copy; `manifest` is the blob that says how it began.
    """

    session: str
    path: str
    directory: str
    source: str
    root: str
    manifest: str
    created_at: str


@plain(slots=True, frozen=True)
class EndedAsideRow:
    """The root of a copy that is gone, merged or dropped: nothing can be put back there any more."""

    root: str
    session: str
    path: str
    status: str


ENDED_ASIDES: Table[EndedAsideRow] = Table("ended_asides", EndedAsideRow, key=("root",), projected=True)
ASIDES: Table[AsideRow] = Table("asides", AsideRow, key=("session", "path"), projected=True)


def project_set_aside(tx: Tx, record: Record) -> None:
    body = record.payload
    tx.put(
        ASIDES,
        AsideRow(
            session=body["session"],
            path=body["path"],
            directory=body["directory"],
            source=body["source"],
            root=body["root"],
            manifest=body["manifest"],
            created_at=record.at,
        ),
    )


def project_aside_ended(tx: Tx, record: Record) -> None:
    body = record.payload
    row = tx.get(ASIDES, body["session"], body["path"])
    if row is not None:
        tx.put(ENDED_ASIDES, EndedAsideRow(row.root, row.session, row.path, body["status"]))
        tx.delete(ASIDES, row.session, row.path)


def anchor_in(tx: Tx, session: SessionId) -> Anchor | None:
    """The anchor somebody set; None for a session that works where it was opened, with nothing mounted."""
    body = fact(tx, session, ANCHOR)
    if body is None:
        return None
    mounts = [Mount(one["path"], one["mount_mode"], one["mounted_at"]) for one in body["additional_roots"]]
    return Anchor(body["primary"], tuple(mounts), body["anchored_at"])


def mount_holding(anchor: Anchor, path: str) -> Mount | None:
    """The innermost mounted root that an absolute, normal path is in, by whole names."""
    holding = [one for one in anchor.mounts if is_inside(path, one.path)]
    return max(holding, key=lambda one: len(one.path), default=None)


class Roots(Standing, ABC):
    """The verbs of a session about where it works."""

    @abstractmethod
    def _opened_at(self) -> str:
        """The real path of the root that the session was opened on."""

    @abstractmethod
    def _state_place(self) -> str | None:
        """The directory of the store, which no root may hold or be in; None for one that is not on a disk."""

    # The anchor.

    def workspace_anchor(self) -> Json:
        """Where the session works: `{primary, additional_roots, anchored_at}`."""
        with self._archive.store.read() as tx:
            row = self._check_open(tx, "workspace_anchor")
            return self._anchor(tx, row.created_at).to_json()

    def set_workspace_anchor(self, anchor: str | Mapping[str, Any] | None) -> bool:
        """Work somewhere else: a directory, or `{primary, additional_roots?}`. None: where the session was opened.

        Refused while a sandboxed root has writes that are not merged.
        """
        now = self._archive.now()
        with self._archive.store.write() as tx:
            row = self._check_open(tx, "set_workspace_anchor")
            before = self._anchor(tx, row.created_at)
            after = self._parsed(tx, anchor, now) if anchor is not None else Anchor(self._opened_at(), (), now)
            self._refuse_unmerged(tx, None)
            told = {"previous": before.to_json(), "anchor": after.to_json()}
            self._put(tx, {ANCHOR: None if anchor is None else after.to_json()}, "AnchorChanged", told)
        poke(self._archive.store)
        return True

    def _anchor(self, tx: Tx, since: str) -> Anchor:
        return anchor_in(tx, self.id) or Anchor(self._opened_at(), (), since)

    def _parsed(self, tx: Tx, given: str | Mapping[str, Any], now: str) -> Anchor:
        body = {"primary": given} if isinstance(given, str) else given
        kinds = {"primary": str, "additional_roots": list, "anchored_at": str}
        options = checked_options("a workspace anchor", body, kinds)
        if "primary" not in options:
            raise fault("invalid_params", "A workspace anchor needs its primary root.", field="primary")
        found = [self._parsed_mount(tx, one, now) for one in options.get("additional_roots", [])]
        mounts = tuple({one.path: one for one in found}.values())
        if len(mounts) > ROOTS_MAX:
            raise fault("invalid_params", f"A session has at most {ROOTS_MAX} additional roots.", field="roots")
        return Anchor(self._directory(options["primary"]), mounts, now)

    def _parsed_mount(self, tx: Tx, given: object, now: str) -> Mount:
        body = {"path": given} if isinstance(given, str) else given
        options = checked_options("a root", body, {"path": str, "mount_mode": str, "mounted_at": str})
        if "path" not in options:
            raise fault("invalid_params", "An additional root needs its path.", field="path")
        return Mount(self._directory(options["path"]), self._mode(tx, options.get("mount_mode")), now)

    def _directory(self, path: str) -> str:
        """The real path of a directory we can look into."""
        real = _real(path)
        if not os.path.isdir(real):
            raise fault("invalid_path", f"{path!r} is not a directory.")
        if not os.access(real, os.R_OK | os.X_OK):
            raise fault("invalid_path", f"{path!r} cannot be read.")
        state = self._state_place()
        if state is not None and (is_inside(state, real) or is_inside(real, state)):
            raise fault("store_inside_workspace", f"{path!r} holds the store, or is part of it.")
        return real

    # The policy.

    def workspace_policy(self) -> Json:
        """The defaults for roots that are mounted from now on."""
        with self._archive.store.read() as tx:
            self._check_open(tx, "workspace_policy")
            return self._policy(tx)

    def set_workspace_policy(self, policy: Mapping[str, Any]) -> bool:
        """Update the defaults: `default_mount_mode`, for roots mounted from now on without a mode of their own."""
        given = checked_options("a workspace policy", policy, {"default_mount_mode": str})
        with self._archive.store.write() as tx:
            self._check_open(tx, "set_workspace_policy")
            after = {**self._policy(tx), **given}
            _checked_mode(after["default_mount_mode"])
            self._put(tx, {POLICY: after}, "WorkspacePolicyChanged", {"policy": after})
        poke(self._archive.store)
        return True

    def _policy(self, tx: Tx) -> Json:
        return {**DEFAULT_POLICY, **(fact(tx, self.id, POLICY) or {})}

    def _mode(self, tx: Tx, given: str | None) -> MountMode:
        return _checked_mode(self._policy(tx)["default_mount_mode"] if given is None else given)

    # Roots.

    def add_root(self, root: str, opts: Mapping[str, Any] | None = None, /, **given: Any) -> Json:
        """Mount one more root, or change how it is mounted. `mount_mode` defaults to what the policy says.

        What cannot be mounted is told as `{ok: False, error}`.
        """
        asked = {
            **checked_options("add_root", opts, {"mount_mode": str}),
            **checked_options("add_root", given, {"mount_mode": str}),
        }
        if "mount_mode" in asked:
            _checked_mode(asked["mount_mode"])
        try:
            return {"ok": True, "mounted_at": self._mounted(root, asked.get("mount_mode"))}
        except MulliganError as error:
            return {"ok": False, "error": error.message}

    def _mounted(self, root: str, asked: str | None) -> str:
        path, now = self._directory(root), self._archive.now()
        with self._archive.store.write() as tx:
            row = self._check_open(tx, "add_root")
            anchor, mount = self._anchor(tx, row.created_at), Mount(path, self._mode(tx, asked), now)
            if path == anchor.primary:
                raise fault("invalid_path", f"{root!r} is the primary root.")
            known = anchor.mount(path)
            if known is not None and known.mode != mount.mode:
                self._refuse_unmerged(tx, path)
            if known is None and len(anchor.mounts) >= ROOTS_MAX:
                raise fault("invalid_params", f"A session has at most {ROOTS_MAX} additional roots.")
            after = replace(anchor, mounts=(*anchor.without(path).mounts, mount))
            self._put(tx, {ANCHOR: after.to_json()}, "RootMounted", mount.to_json())
        poke(self._archive.store)
        return now

    def remove_root(self, root: str) -> Json:
        """Unmount a root; one that is not mounted is fine. Refused while it has writes that are not merged."""
        try:
            self._unmounted(root)
        except MulliganError as error:
            return {"ok": False, "error": error.message}
        return {"ok": True}

    def _unmounted(self, root: str) -> None:
        real = _real(root)
        with self._archive.store.write() as tx:
            self._check_open(tx, "remove_root")
            anchor = anchor_in(tx, self.id)
            if anchor is None:
                return
            # By its real path, or by the one it was mounted under should it be gone by now.
            mount = anchor.mount(real) or anchor.mount(root)
            if mount is None:
                return
            self._refuse_unmerged(tx, mount.path)
            after = anchor.without(mount.path)
            self._put(tx, {ANCHOR: after.to_json()}, "RootUnmounted", mount.to_json())
        poke(self._archive.store)

    def _mounted_path(self, root: str, verb: str) -> str:
        """The real path of a root that is mounted here, or `unknown_root`."""
        real = _real(root)
        with self._archive.store.read() as tx:
            self._check_open(tx, verb)
            anchor = anchor_in(tx, self.id)
        found = None if anchor is None else anchor.mount(real) or anchor.mount(root)
        if found is None:
            raise fault("unknown_root", f"{verb}: {root!r} is not mounted in session {self.id!r}.", path=root)
        return found.path

    def list_roots(self) -> Json:
        """Where the session works: `{primary, additional}`."""
        with self._archive.store.read() as tx:
            row = self._check_open(tx, "list_roots")
            anchor = self._anchor(tx, row.created_at)
        return {"primary": anchor.primary, "additional": [mount.to_json() for mount in anchor.mounts]}

    # Inside.

    def _refuse_unmerged(self, tx: Tx, path: str | None) -> None:
        """Nobody's writes are dropped by unmounting: they are merged or dropped by name first."""
        where = {"session": self.id} if path is None else {"session": self.id, "path": path}
        waiting: Sequence[AsideRow] = tx.select(ASIDES, where)
        if waiting:
            words = f"{waiting[0].path} has writes aside; merge_root or drop_root first."
            raise fault("conflict", words, path=waiting[0].path)

    def _put(self, tx: Tx, facts: Json, kind: str, told: Json) -> None:
        set_facts_in(tx, self._archive, self.id, facts, event=event_body(kind, told))


def _checked_mode(mode: str) -> MountMode:
    for known in MOUNT_MODES:
        if mode == known:
            return known
    raise fault("invalid_params", f"mount_mode is one of {', '.join(MOUNT_MODES)}.", field="mount_mode")


def _real(path: object) -> str:
    """Where a path leads. Raises `invalid_path` for what cannot be one, or has no form in UTF-8."""
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise fault("invalid_path", "A root is the path of a directory.")
    try:
        real = os.path.realpath(path)
        real.encode("utf-8")
    except UnicodeEncodeError:
        raise fault("invalid_path", "A root whose path is not UTF-8 cannot be mounted.") from None
    return real
