"""The roots of a session: its primary root, and additional roots with their mount modes.

Relative paths start at the primary root. Paths in additional roots are absolute. The mount mode limits what a session
may do there: `read_only` allows reads, `extend` allows writes, `sandboxed` writes to a copy until the copy is merged.
`effects.context` applies the modes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from mulligan.session.lifecycle import SessionAccess, checked_options, fact, set_facts_in
from mulligan.session.tables import FACTS, SESSIONS, FactRow
from mulligan.session.transcript_log import event_body
from mulligan.store.journal import Record
from mulligan.store.protocol import Table, Tx
from mulligan.values.canonical import decode
from mulligan.values.errors import MulliganError, fault
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.paths import is_inside

ANCHOR, POLICY = "workspace_anchor", "workspace_policy"
MountMode = Literal["read_only", "extend", "sandboxed"]
MOUNT_MODES: tuple[MountMode, ...] = get_args(MountMode)
DEFAULT_POLICY = {"default_mount_mode": "read_only"}
ROOTS_MAX = 256

Json = dict[str, Any]


@fast_dataclass(slots=True, frozen=True)
class Mount:
    """One additional root, by its real path."""

    path: str
    mode: MountMode
    mounted_at: str

    def to_json(self) -> Json:
        return {"path": self.path, "mount_mode": self.mode, "mounted_at": self.mounted_at}


@fast_dataclass(slots=True, frozen=True)
class WorkspaceAnchor:
    primary: str
    mounts: tuple[Mount, ...]
    anchored_at: str

    def to_json(self) -> Json:
        roots = [mount.to_json() for mount in self.mounts]
        return {"primary": self.primary, "additional_roots": roots, "anchored_at": self.anchored_at}

    def mount(self, path: str) -> Mount | None:
        return next((one for one in self.mounts if one.path == path), None)

    def copied_to(self, directory: str) -> WorkspaceAnchor:
        """The anchor for a session in a copy of the primary root. Roots mounted inside it move into the copy."""
        own = len(self.primary.rstrip("/"))
        inside = [one for one in self.mounts if is_inside(one.path, self.primary)]
        beside = [one for one in self.mounts if one not in inside]
        moved = (replace(one, path=directory + one.path[own:]) for one in inside)
        return replace(self, primary=directory, mounts=(*beside, *moved))

    def without(self, path: str) -> WorkspaceAnchor:
        return replace(self, mounts=tuple(one for one in self.mounts if one.path != path))


@fast_dataclass(slots=True, frozen=True)
class SandboxedRootRow:
    """A sandboxed root with writes that are not merged yet.

    `directory` is the copy. `source` and `root` are the root ids of the original and of the copy; `manifest` is the
    blob that lists the files as they were copied.
    """

    session: str
    path: str
    directory: str
    source: str
    root: str
    manifest: str
    created_at: str


@fast_dataclass(slots=True, frozen=True)
class EndedSandboxedRootRow:
    """The root of a copy that was merged or dropped. Its calls cannot be undone any more."""

    root: str
    session: str
    path: str
    status: str


ENDED_SANDBOXED_ROOTS: Table[EndedSandboxedRootRow] = Table(
    "ended_asides", EndedSandboxedRootRow, key=("root",), projected=True
)
SANDBOXED_ROOTS: Table[SandboxedRootRow] = Table("asides", SandboxedRootRow, key=("session", "path"), projected=True)


def project_sandboxed_root(tx: Tx, record: Record) -> None:
    body = record.payload
    names = ("session", "path", "directory", "source", "root", "manifest")
    tx.put(SANDBOXED_ROOTS, SandboxedRootRow(**{name: body[name] for name in names}, created_at=record.at))


def project_sandboxed_root_ended(tx: Tx, record: Record) -> None:
    body = record.payload
    row = tx.get(SANDBOXED_ROOTS, body["session"], body["path"])
    if row is not None:
        tx.put(ENDED_SANDBOXED_ROOTS, EndedSandboxedRootRow(row.root, row.session, row.path, body["status"]))
        tx.delete(SANDBOXED_ROOTS, row.session, row.path)


def anchor_in(tx: Tx, session: SessionId) -> WorkspaceAnchor | None:
    """The anchor that was set; None for a session in the root it was opened on, without additional roots."""
    row = tx.get(FACTS, session, ANCHOR)
    return None if row is None else anchor_of(row)


def anchor_of(row: FactRow) -> WorkspaceAnchor | None:
    body = decode(row.value)
    if body is None:
        return None
    mounts = [Mount(one["path"], one["mount_mode"], one["mounted_at"]) for one in body["additional_roots"]]
    return WorkspaceAnchor(body["primary"], tuple(mounts), body["anchored_at"])


def mount_holding(anchor: WorkspaceAnchor, path: str) -> Mount | None:
    """The innermost mounted root that contains an absolute, normalised path."""
    holding = [one for one in anchor.mounts if is_inside(path, one.path)]
    return max(holding, key=lambda one: len(one.path), default=None)


class Roots:
    """The roots of one session. `opened_at` is the real path of the root that the session was opened on."""

    def __init__(self, access: SessionAccess, opened_at: str) -> None:
        self.id = access.id
        self._access = access
        self._archive = access.archive
        self._opened_at = opened_at

    # The anchor.

    def workspace_anchor(self) -> Json:
        """The roots of the session: `{primary, additional_roots, anchored_at}`."""
        with self._access.read("workspace_anchor") as tx:
            return self._anchor(tx).to_json()

    def set_workspace_anchor(self, anchor: str | Mapping[str, Any] | None) -> bool:
        """Set the roots: a directory, or `{primary, additional_roots?}`. None: the root that the session was opened on.

        Refused while a sandboxed root has writes that are not merged.
        """
        now = self._archive.now()
        with self._access.write("set_workspace_anchor") as tx:
            before = self._anchor(tx)
            after = self._parsed(tx, anchor, now) if anchor is not None else WorkspaceAnchor(self._opened_at, (), now)
            self._refuse_unmerged(tx, None)
            details = {"previous": before.to_json(), "anchor": after.to_json()}
            self._put(tx, {ANCHOR: None if anchor is None else after.to_json()}, "AnchorChanged", details)
        return True

    def view_in(self, tx: Tx) -> Json:
        """The roots' part of a session's view."""
        return {"workspace_anchor": self._anchor(tx).to_json(), "workspace_policy": self._policy(tx)}

    def _anchor(self, tx: Tx) -> WorkspaceAnchor:
        found, row = anchor_in(tx, self.id), tx.get(SESSIONS, self.id)
        return found or WorkspaceAnchor(self._opened_at, (), "" if row is None else row.created_at)

    def _parsed(self, tx: Tx, given: str | Mapping[str, Any], now: str) -> WorkspaceAnchor:
        body = {"primary": given} if isinstance(given, str) else given
        kinds = {"primary": str, "additional_roots": list, "anchored_at": str}
        options = checked_options("a workspace anchor", body, kinds)
        if "primary" not in options:
            raise fault("invalid_params", "A workspace anchor needs its primary root.", field="primary")
        found = [self._parsed_mount(tx, one, now) for one in options.get("additional_roots", [])]
        mounts = tuple({one.path: one for one in found}.values())
        if len(mounts) > ROOTS_MAX:
            raise fault("invalid_params", f"A session may have at most {ROOTS_MAX} additional roots.", field="roots")
        return WorkspaceAnchor(self._directory(options["primary"]), mounts, now)

    def _parsed_mount(self, tx: Tx, given: object, now: str) -> Mount:
        body = {"path": given} if isinstance(given, str) else given
        options = checked_options("a root", body, {"path": str, "mount_mode": str, "mounted_at": str})
        if "path" not in options:
            raise fault("invalid_params", "An additional root needs its path.", field="path")
        return Mount(self._directory(options["path"]), self._mode(tx, options.get("mount_mode")), now)

    def _directory(self, path: str) -> str:
        """The real path of a directory that this process can read."""
        real = _real(path)
        if not os.path.isdir(real):
            raise fault("invalid_path", f"{path!r} is not a directory.")
        if not os.access(real, os.R_OK | os.X_OK):
            raise fault("invalid_path", f"{path!r} cannot be read.")
        store = self._archive.store.directory
        state = None if store is None else os.path.realpath(store)
        if state is not None and (is_inside(state, real) or is_inside(real, state)):
            raise fault("store_inside_workspace", f"{path!r} contains the store or is a part of it.")
        return real

    # The policy.

    def workspace_policy(self) -> Json:
        """The defaults for roots that will be mounted."""
        with self._access.read("workspace_policy") as tx:
            return self._policy(tx)

    def set_workspace_policy(self, policy: Mapping[str, Any]) -> bool:
        """Update the defaults: `default_mount_mode` applies to roots that are mounted later without a mode."""
        given = checked_options("a workspace policy", policy, {"default_mount_mode": str})
        with self._access.write("set_workspace_policy") as tx:
            after = {**self._policy(tx), **given}
            _checked_mode(after["default_mount_mode"])
            self._put(tx, {POLICY: after}, "WorkspacePolicyChanged", {"policy": after})
        return True

    def _policy(self, tx: Tx) -> Json:
        return {**DEFAULT_POLICY, **(fact(tx, self.id, POLICY) or {})}

    def _mode(self, tx: Tx, given: str | None) -> MountMode:
        return _checked_mode(self._policy(tx)["default_mount_mode"] if given is None else given)

    # Roots.

    def add_root(self, root: str, opts: Mapping[str, Any] | None = None, /, **given: Any) -> Json:
        """Mount a root, or change its mount mode. `mount_mode` defaults to the policy's.

        Returns `{ok: False, error}` for a root that cannot be mounted.
        """
        kinds = {"mount_mode": str}
        asked = {**checked_options("add_root", opts, kinds), **checked_options("add_root", given, kinds)}
        if "mount_mode" in asked:
            _checked_mode(asked["mount_mode"])
        try:
            return {"ok": True, "mounted_at": self._mounted(root, asked.get("mount_mode"))}
        except MulliganError as error:
            return {"ok": False, "error": error.message}

    def _mounted(self, root: str, asked: str | None) -> str:
        path, now = self._directory(root), self._archive.now()
        with self._access.write("add_root") as tx:
            anchor, mount = self._anchor(tx), Mount(path, self._mode(tx, asked), now)
            if path == anchor.primary:
                raise fault("invalid_path", f"{root!r} is the primary root.")
            known = anchor.mount(path)
            if known is not None and known.mode != mount.mode:
                self._refuse_unmerged(tx, path)
            if known is None and len(anchor.mounts) >= ROOTS_MAX:
                raise fault("invalid_params", f"A session may have at most {ROOTS_MAX} additional roots.")
            after = replace(anchor, mounts=(*anchor.without(path).mounts, mount))
            self._put(tx, {ANCHOR: after.to_json()}, "RootMounted", mount.to_json())
        return now

    def remove_root(self, root: str) -> Json:
        """Unmount a root; does nothing if it is not mounted. Refused while it has writes that are not merged."""
        try:
            self._unmounted(root)
        except MulliganError as error:
            return {"ok": False, "error": error.message}
        return {"ok": True}

    def _unmounted(self, root: str) -> None:
        real = _real(root)
        with self._access.write("remove_root") as tx:
            anchor = anchor_in(tx, self.id)
            if anchor is None:
                return
            # If the directory is gone, it has no real path, so we also compare the path it was mounted under.
            mount = anchor.mount(real) or anchor.mount(root)
            if mount is None:
                return
            self._refuse_unmerged(tx, mount.path)
            after = anchor.without(mount.path)
            self._put(tx, {ANCHOR: after.to_json()}, "RootUnmounted", mount.to_json())

    def mounted_path(self, root: str, verb: str) -> str:
        """The real path of a mounted root. Raises `unknown_root`."""
        real = _real(root)
        with self._access.read(verb) as tx:
            anchor = anchor_in(tx, self.id)
        found = None if anchor is None else anchor.mount(real) or anchor.mount(root)
        if found is None:
            raise fault("unknown_root", f"{verb}: {root!r} is not mounted in session {self.id!r}.", path=root)
        return found.path

    def list_roots(self) -> Json:
        """The roots of the session: `{primary, additional}`."""
        with self._access.read("list_roots") as tx:
            anchor = self._anchor(tx)
        return {"primary": anchor.primary, "additional": [mount.to_json() for mount in anchor.mounts]}

    # Internal.

    def _refuse_unmerged(self, tx: Tx, path: str | None) -> None:
        """Refuse to unmount a root with unmerged writes, because unmounting would lose them."""
        where = {"session": self.id} if path is None else {"session": self.id, "path": path}
        waiting: Sequence[SandboxedRootRow] = tx.select(SANDBOXED_ROOTS, where)
        if waiting:
            words = f"{waiting[0].path} has writes that are not merged; use merge_root or drop_root first."
            raise fault("conflict", words, path=waiting[0].path)

    def _put(self, tx: Tx, facts: Json, kind: str, details: Json) -> None:
        set_facts_in(tx, self._archive, self.id, facts, event=event_body(kind, details))


def _checked_mode(mode: str) -> MountMode:
    for known in MOUNT_MODES:
        if mode == known:
            return known
    raise fault("invalid_params", f"mount_mode must be one of {', '.join(MOUNT_MODES)}.", field="mount_mode")


def _real(path: object) -> str:
    """The real path, symlinks resolved. Raises `invalid_path` if it is not a path or not UTF-8."""
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise fault("invalid_path", "A root must be the path of a directory.")
    try:
        real = os.path.realpath(path)
        real.encode("utf-8")
    except UnicodeEncodeError:
        raise fault("invalid_path", "A root whose path is not UTF-8 cannot be mounted.") from None
    return real
