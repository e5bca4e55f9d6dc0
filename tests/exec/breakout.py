"""Run inside the sandbox: tries to get out in every way it knows, and prints the name of each way that worked.

Stands alone: it is copied into the root and run there. Words: a folder outside, a TCP port, a Unix socket outside, the
name of an abstract socket.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable

OUTSIDE, PORT, UNIX_SOCKET, ABSTRACT = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
KEPT = f"{OUTSIDE}/kept"
PARENT = os.getppid()
LIBC = ctypes.CDLL(None, use_errno=True)


def _call(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _write(path: str) -> None:
    with open(path, "a") as file:
        file.write("escaped")


def _through_a_symlink() -> None:
    os.symlink(OUTSIDE, "out")
    _write("out/kept")


def _through_a_hard_link() -> None:
    os.link(KEPT, "linked")
    _write("linked")


def _through_the_parents_root() -> None:
    _write(f"/proc/{PARENT}/root{KEPT}")


def _through_a_descriptor_of_the_parent() -> None:
    for name in os.listdir(f"/proc/{PARENT}/fd"):
        os.open(f"/proc/{PARENT}/fd/{name}", os.O_RDONLY)


def _through_a_new_user_namespace() -> None:
    _call(LIBC.unshare(0x10000000 | 0x00020000))
    _call(LIBC.mount(b"none", b"/", None, 0x20 | 0x1000, None))
    _write(KEPT)


def _remount() -> None:
    _call(LIBC.mount(b"none", b"/", None, 0x20 | 0x1000, None))


def _unmount() -> None:
    _call(LIBC.umount2(b"/tmp", 2))


def _bind_over() -> None:
    _call(LIBC.mount(os.fsencode(OUTSIDE), os.fsencode(os.getcwd()), None, 0x1000, None))


def _chroot_and_back() -> None:
    os.chroot(".")
    _write("/../../../../../.." + KEPT)


def _move_git_away() -> None:
    os.rename(".git", "git-moved")


def _io_uring() -> None:
    _call(LIBC.syscall(425, 8, ctypes.create_string_buffer(120)))


def _new_network() -> None:
    _call(LIBC.setns(os.open("/proc/1/ns/net", os.O_RDONLY), 0))


def _loopback() -> None:
    socket.create_connection(("127.0.0.1", PORT), timeout=2)


def _elsewhere() -> None:
    socket.create_connection(("192.0.2.1", 80), timeout=2)


def _unix_socket() -> None:
    socket.socket(socket.AF_UNIX).connect(UNIX_SOCKET)


def _abstract_socket() -> None:
    socket.socket(socket.AF_UNIX).connect("\0" + ABSTRACT)


def _attach_to_the_parent() -> None:
    _call(LIBC.ptrace(0x4206, PARENT, 0, 0))


def _raw_socket() -> None:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)


WAYS: dict[str, Callable[[], object]] = {
    "append outside": lambda: _write(KEPT),
    "create outside": lambda: _write(f"{OUTSIDE}/new"),
    "climb out": lambda: _write("../" * 20 + KEPT),
    "through a symlink": _through_a_symlink,
    "through a hard link": _through_a_hard_link,
    "truncate outside": lambda: os.truncate(KEPT, 0),
    "chmod outside": lambda: os.chmod(KEPT, 0o777),
    "times outside": lambda: os.utime(KEPT, (0, 0)),
    "attribute outside": lambda: os.setxattr(KEPT, "user.escaped", b"1"),
    "remove outside": lambda: os.unlink(KEPT),
    "move out": lambda: os.rename("inside", f"{OUTSIDE}/moved"),
    "move in": lambda: os.rename(KEPT, "taken"),
    "mkdir outside": lambda: os.mkdir(f"{OUTSIDE}/folder"),
    "hook": lambda: _write(".git/hooks/pre-commit"),
    "git config": lambda: _write(".git/config"),
    "replace git config": lambda: os.rename("inside", ".git/config"),
    "move .git": _move_git_away,
    "parent's root": _through_the_parents_root,
    "parent's descriptors": _through_a_descriptor_of_the_parent,
    "init's root": lambda: _write(f"/proc/1/root{KEPT}"),
    "ptrace": _attach_to_the_parent,
    "signal the parent": lambda: os.kill(PARENT, signal.SIGTERM),
    "user namespace": _through_a_new_user_namespace,
    "remount": _remount,
    "unmount": _unmount,
    "bind": _bind_over,
    "chroot": _chroot_and_back,
    "device": lambda: os.mknod("device", 0o060600, os.makedev(8, 0)),
    "memory device": lambda: _write("/dev/mem"),
    "kernel setting": lambda: _write("/proc/sys/kernel/hostname"),
    "io_uring": _io_uring,
    "network of init": _new_network,
    "loopback": _loopback,
    "elsewhere": _elsewhere,
    "unix socket": _unix_socket,
    "abstract socket": _abstract_socket,
    "raw socket": _raw_socket,
}


def _works(way: Callable[[], object]) -> bool:
    """In a process of its own, so that no attempt spoils the next."""
    pid = os.fork()
    if pid == 0:
        try:
            way()
            os._exit(0)
        except OSError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def main() -> None:
    for name, way in WAYS.items():
        if _works(way):
            print(name)
    _write("written")
    _write(f"/tmp/{ABSTRACT}")
    _write("/dev/null")
    with open(KEPT) as file:
        file.read()
    socket.socketpair()
    print("done")


if __name__ == "__main__":
    main()
