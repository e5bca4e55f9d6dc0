"""What the warden does to itself before the command starts: namespaces, mounts, capabilities, Landlock.

Runs in the launcher's bare interpreter. Each step that the machine refuses is named, so that the caller can say why.
The order matters: namespaces, the overlay, the mounts of the sandbox (they must cover the overlay), then rules.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mulligan.workspace.exec import kernel, landlock, wire

_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service: what root needs on its own files."""

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


class StepFailed(Exception):
    """The machine refused `step` with `errno`; nothing was run."""

    def __init__(self, step: str, errno: int) -> None:
        super().__init__(step)
        self.step = step
        self.errno = errno


@contextmanager
def step(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StepFailed(name, error.errno or 0) from error


class Rules:
    """What the command's own process must still do to itself just before it becomes the program."""

    def __init__(self) -> None:
        self.ruleset: int | None = None
        self.without_network = False
        self.has_own_network = False

    def apply_to_self(self) -> None:
        """Give up what the sandbox takes away. Irreversible."""
        if self.ruleset is None:
            return
        if os.geteuid() == 0:
            _drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict_self(self.ruleset)


def enter(confinement: dict[str, Any], channel: socket.socket) -> Rules:
    """Move this process where the command shall live."""
    rules = Rules()
    overlay, cage = confinement.get("overlay"), confinement.get("cage")
    rules.without_network = wants_network_gone = confinement.get("no_network", False)
    if overlay or cage:
        with step("namespace" if overlay else "sandbox"):
            rules.has_own_network = _leave_namespaces(kernel.CLONE_NEWNS, network=wants_network_gone)
            kernel.mount(b"none", b"/", b"", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    elif wants_network_gone:
        rules.has_own_network = _leave_network()
    if overlay:
        with step("overlay"):
            _mount_overlay(overlay, channel)
    if cage:
        with step("sandbox"):
            _mount_cage(cage)
            rules.ruleset = landlock.ruleset(cage["writable"] + cage["temporary"])
    return rules


def _leave_namespaces(flags: int, *, network: bool) -> bool:
    """True if the network went too. It may stay: then the system call filter denies every socket instead."""
    if network:
        try:
            _unshare(flags | kernel.CLONE_NEWNET)
        except OSError:
            _unshare(flags)
            return False
        _raise_loopback()
        return True
    _unshare(flags)
    return False


def _leave_network() -> bool:
    try:
        _unshare(kernel.CLONE_NEWNET)
    except OSError:
        return False
    _raise_loopback()
    return True


def _unshare(flags: int) -> None:
    """As root directly; otherwise, or as a root without the right to, inside a user namespace of our own."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            kernel.unshare(flags)
        except PermissionError:
            pass
        else:
            return
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _raise_loopback() -> None:
    """A loopback of its own: servers that a test suite starts and asks work, ours are out of reach."""
    with step("network"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _mount_overlay(wanted: dict[str, Any], channel: socket.socket) -> None:
    """An overlay over the root itself, so the command sees its usual path.

    The upper layer is a tmpfs of its own, first mounted on the root too and then covered by the overlay: nothing else
    in the tree is hidden. Layers are named by descriptor, so odd characters in a path cannot become options.
    """
    root: bytes = wanted["root"]
    lower = _hold(root)
    size = b"size=%d,mode=0700" % wanted["size_bytes"]
    kernel.mount(b"mulligan", root, b"tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data=size)
    os.mkdir(root + b"/upper")
    os.mkdir(root + b"/work")
    _dress_like(root + b"/upper", lower)
    upper = os.open(root + b"/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    layers = (lower, b"/proc/self/fd/%d" % upper, _hold(root + b"/work"))
    kernel.mount(
        b"mulligan", root, b"overlay", data=b"lowerdir=%b,upperdir=%b,workdir=%b" % layers + _overlay_options()
    )
    wire.send(channel, ("upper",), (upper,))


def _hold(path: bytes) -> bytes:
    """A name for a folder that stays good when something is mounted over it, as long as this process lives."""
    return b"/proc/self/fd/%d" % os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _overlay_options() -> bytes:
    """Folders of the lower layer can be renamed only where redirects are allowed; elsewhere `mv` copies (EXDEV)."""
    mapped_ids = _read("/proc/self/uid_map").split()[2]
    return b",volatile,userxattr" if mapped_ids == "1" else b",volatile,redirect_dir=on,metacopy=off,index=off"


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _dress_like(path: bytes, model: bytes) -> None:
    status = os.stat(model)
    os.chmod(path, status.st_mode & 0o7777)
    if os.geteuid() == 0:
        os.chown(path, status.st_uid, status.st_gid)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _mount_cage(wanted: dict[str, Any]) -> None:
    """All read-only but the writable roots and temporary folders of its own, which start empty and end with it."""
    writable: list[bytes] = wanted["writable"]
    held = {path: _hold(path) for path in writable}
    for folder in wanted["temporary"]:
        kernel.mount(b"mulligan", folder, b"tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data=b"mode=1777")
    for path, name in held.items():
        os.makedirs(path, exist_ok=True)  # a root below /tmp gets its path back inside the new, empty one
        _bind(name, path)
    inner = [path for path in wanted["guarded_folders"] if os.path.isdir(path)]
    fixed = [path for path in wanted["guarded"] if os.path.lexists(path) and not os.path.islink(path)]
    for path in inner + fixed:
        _bind(path, path)
    kernel.set_mount_read_only(b"/", read_only=True, recursive=True)
    for path in writable + inner + wanted["temporary"]:
        kernel.set_mount_read_only(path, read_only=False, recursive=False)


def _bind(source: bytes, target: bytes) -> None:
    kernel.mount(source, target, b"", flags=kernel.MS_BIND | kernel.MS_REC)


def _drop_capabilities() -> None:
    last = int(_read("/proc/sys/kernel/cap_last_cap"))
    for number in range(last + 1):
        if number not in _KEPT_CAPABILITIES:
            kernel.prctl(kernel.PR_CAPBSET_DROP, number)
