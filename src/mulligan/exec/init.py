"""The launcher process, the init process of one command, and the messages between them and Mulligan.

The launcher is a small single-threaded process, one for each process that uses Mulligan. Forking that process itself
would copy its page tables (2.6 ms at 100 MB) while its other threads hold locks; starting an interpreter for every
command would cost 10 to 15 ms. The launcher starts once, holds 10 MB, and forks the next init process and the process
that becomes the command while the present command runs, so no command waits for a fork. It lives until its channel
closes, that is until our process ends.

The init process is the parent of one command. It adopts and reaps all descendants of the command, and kills them. It is
a process of its own so that adopting orphans (PR_SET_CHILD_SUBREAPER) never changes the program that embeds Mulligan,
and so that the command is killed even when that program dies by `kill -9`: the channel closes, and init kills them all.

Before a confined command starts, init moves itself: namespaces, the overlay, the mounts of the sandbox (they must cover
the overlay), then Landlock, in this order. Each step that the machine refuses has a name, so that the caller can say
why. Landlock allows writing only below named folders; reading and executing stay free. The read-only mounts cover what
Landlock cannot: chmod, chown, times, attributes.

A message is a length, a marshalled value, and descriptors beside it. Both ends are the same interpreter and neither is
the command, so `marshal` is safe here and costs no import.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import gc
import marshal
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from mulligan.files import kernel

_HEADER_BYTES = 4
_FDS_MAX = 8


def send_message(channel: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send a message. Its descriptors go with the first byte, so the receiver has them before the rest arrives."""
    body = marshal.dumps(message)
    head = len(body).to_bytes(_HEADER_BYTES, "little")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    packet = head + body
    sent = channel.sendmsg([packet], rights)
    if sent < len(packet):
        channel.sendall(packet[sent:])


def receive_message(channel: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its descriptors (close-on-exec); None when the other process has closed the channel."""
    try:
        head, fds = _first_bytes(channel)
        if len(head) < _HEADER_BYTES:
            return None
        body = _exactly(channel, int.from_bytes(head, "little"))
    except ConnectionResetError:
        return None
    return None if body is None else (marshal.loads(body), fds)


def _first_bytes(channel: socket.socket) -> tuple[bytes, list[int]]:
    received = array.array("i")
    head, ancillary, _, _ = channel.recvmsg(
        _HEADER_BYTES, socket.CMSG_SPACE(_FDS_MAX * received.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    fds = list(received)
    if head and len(head) < _HEADER_BYTES:
        head += _exactly(channel, _HEADER_BYTES - len(head)) or b""
    return head, fds


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def close_all(fds: list[int] | tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


_WRITE_FILE = 1 << 1
_REMOVE_FOLDER, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_CHAR, _MAKE_FOLDER, _MAKE_FILE, _MAKE_SOCKET, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYMLINK = (
    1 << n for n in range(6, 13)
)
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_DEVICES = _MAKE_CHAR | _MAKE_BLOCK
_ORDINARY = (
    _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _MAKE_SOCKET | _MAKE_FIFO | _MAKE_SYMLINK
)

_SCOPE_ABSTRACT_SOCKETS = 1 << 0
_SCOPE_SIGNALS = 1 << 1

_VERSION_QUERY = 1
_RULE_PATH_BENEATH = 1

_HARMLESS_DEVICES = (
    *(b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom", b"/dev/tty", b"/dev/ptmx"),
    b"/dev/pts",
)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_fs", ctypes.c_uint64),
        ("handled_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """The kernel's Landlock ABI. Raises OSError where there is none."""
    return kernel.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, None, 0, _VERSION_QUERY)


def ruleset(writable: list[bytes]) -> int:
    """A ruleset that allows writing only below `writable` and to harmless devices such as /dev/null."""
    abi = version()
    newer = (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    attributes = _Ruleset(_ORDINARY | _DEVICES | newer, 0, scoped)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8  # an older kernel refuses fields it does not know
    fd = kernel.syscall(kernel.SYS_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    for path in writable:
        _allow(fd, path, _ORDINARY | newer)
    for path in _HARMLESS_DEVICES:
        if os.path.exists(path):
            _allow(fd, path, _WRITE_FILE | (newer & _TRUNCATE))
    return fd


def restrict_self(fd: int) -> None:
    kernel.syscall(kernel.SYS_LANDLOCK_RESTRICT_SELF, fd, 0)


def _allow(ruleset_fd: int, path: bytes, access: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(access, parent)
        kernel.syscall(kernel.SYS_LANDLOCK_ADD_RULE, ruleset_fd, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(parent)


# The capabilities chown, dac_override, fowner, fsetid, kill, setgid, setuid and net_bind_service, which root needs for
# its own files and servers.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


class StepError(Exception):
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
        raise StepError(name, error.errno or 0) from error


class SandboxRules:
    """Restrictions that the process puts on itself just before it executes the command's program."""

    def __init__(self) -> None:
        self.ruleset: int | None = None
        self.without_network = False
        self.has_own_network = False

    def apply_to_self(self) -> None:
        """Apply the restrictions to this process. It cannot undo them."""
        if self.ruleset is None:
            return
        # Root could undo the mounts with its capabilities; a user in a namespace loses them with exec.
        if os.geteuid() == 0:
            _drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        restrict_self(self.ruleset)


def enter(confinement: dict[str, Any], channel: socket.socket) -> SandboxRules:
    """Move this process into the namespaces and mounts that the command gets."""
    rules = SandboxRules()
    overlay, sandbox = confinement.get("overlay"), confinement.get("sandbox")
    rules.without_network = no_network = confinement.get("no_network", False)
    if overlay or sandbox:
        with step("namespace" if overlay else "sandbox"):
            rules.has_own_network = _leave_namespaces(kernel.CLONE_NEWNS, network=no_network)
            kernel.mount(b"none", b"/", b"", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    elif no_network:
        rules.has_own_network = _leave_namespaces(0, network=True)
    if overlay:
        with step("overlay"):
            _mount_overlay(overlay, channel)
    if sandbox:
        with step("sandbox"):
            _mount_sandbox(sandbox)
            rules.ruleset = ruleset(sandbox["writable"] + sandbox["temporary"])
    return rules


def _leave_namespaces(flags: int, *, network: bool) -> bool:
    """Whether the process has a new network namespace.

    If the machine refuses one, the system call filter denies sockets.
    """
    if network:
        with suppress(OSError):
            _unshare(flags | kernel.CLONE_NEWNET)
            _raise_loopback()
            return True
    if flags:
        _unshare(flags)
    return False


def _unshare(flags: int) -> None:
    """Enter new namespaces.

    Root may do this directly; other users, and a root without the capability, need a new user namespace.
    """
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
    """Bring up the loopback device of the new network, so that servers of a test suite work.

    The host's stay unreachable.
    """
    with step("network"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _mount_overlay(wanted: dict[str, Any], channel: socket.socket) -> None:
    """An overlay over the root itself, so the command sees its usual path.

    The upper layer is a tmpfs of its own, first mounted on the root too and then covered by the overlay: nothing else
    in the tree is hidden. Layers are named by descriptor, so odd characters in a path cannot become options.
    """
    root: bytes = wanted["root"]
    lower = _open_folder(root)
    size = b"size=%d,mode=0700" % wanted["size_bytes"]
    # Mount the tmpfs on the root itself: at any other path it could hide files that the command needs.
    kernel.mount(b"mulligan", root, b"tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data=size)
    os.mkdir(root + b"/upper")
    os.mkdir(root + b"/work")
    _copy_attributes(root + b"/upper", lower)
    upper = os.open(root + b"/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    layers = (lower, b"/proc/self/fd/%d" % upper, _open_folder(root + b"/work"))
    kernel.mount(
        b"mulligan", root, b"overlay", data=b"lowerdir=%b,upperdir=%b,workdir=%b" % layers + _overlay_options()
    )
    send_message(channel, ("upper",), (upper,))


def _open_folder(path: bytes) -> bytes:
    """A path of a folder that stays valid when something is mounted over it, while this process lives."""
    return b"/proc/self/fd/%d" % os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _overlay_options() -> bytes:
    """Overlay options. Without redirects a folder of the lower layer cannot be renamed, and `mv` copies it (EXDEV)."""
    mapped_ids = _read("/proc/self/uid_map").split()[2]
    return b",volatile,userxattr" if mapped_ids == "1" else b",volatile,redirect_dir=on,metacopy=off,index=off"


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _copy_attributes(path: bytes, model: bytes) -> None:
    status = os.stat(model)
    os.chmod(path, status.st_mode & 0o7777)
    if os.geteuid() == 0:
        os.chown(path, status.st_uid, status.st_gid)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _mount_sandbox(wanted: dict[str, Any]) -> None:
    """Mount everything read-only but the writable roots, and empty temporary folders for the command, which end with
    it.
    """
    writable: list[bytes] = wanted["writable"]
    held = {path: _open_folder(path) for path in writable}
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


_DEFAULTED = (
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP, signal.SIGTERM),
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2),
)
_FREEZE_ROUNDS_MAX = 1000
_KILL_RETRY_S = 0.02
# The terminal sends an interrupt to our whole group, and Mulligan may forward the same one. Within this time the two
# count as one.
_SAME_INTERRUPT_S = 1.0


class Order:
    """The command that a waiting process becomes, as Mulligan sent it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.argv: list[bytes] = body["argv"]
        self.env: dict[bytes, bytes] = body["env"]
        self.root: bytes = body["root"]
        self.cwd: bytes = body["cwd"]
        self.program: bytes | None = body["program"]
        self.program_without_sockets: bytes | None = body["program_without_sockets"]
        self.listens: bool = body["listens"]
        self.new_session: bool = body["new_session"]


def serve(channel: socket.socket, ordered: socket.socket) -> None:
    """Hold a process ready to become the command, and reap and kill its descendants until the last one is gone.

    Mulligan sends the order straight to that process. Init receives only `linger_s` and the confinement. A confined
    command needs another process, forked after init has moved into its namespaces; init sends its channel back.
    """
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, _ignore)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    pid = _fork_command_process(ordered, SandboxRules())
    received = receive_message(channel)
    if received is None:
        return  # Mulligan closed the channel unused. The waiting process sees its own channel close and ends.
    (linger_s, confinement), marks = received
    if confinement:
        _end(pid)
        try:
            pid = _fork_confined(confinement, channel)
        except StepError as failure:
            send_message(channel, ("failed", failure.step, failure.errno))
            return
    ProcessReaper(channel, pid, linger_s, marks).until_all_are_gone()


def _ignore(_signal: int, _frame: object) -> None:
    """A handler instead of SIG_IGN, because only handlers write to the wake-up descriptor, and with SIG_IGN for SIGCHLD
    the kernel would reap children itself.
    """


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _fork_confined(confinement: dict[str, Any], channel: socket.socket) -> int:
    rules = enter(confinement, channel)
    orders, ordered = socket.socketpair()
    pid = _fork_command_process(ordered, rules)
    send_message(channel, ("standby",), (orders.fileno(),))
    orders.close()
    return pid


def _fork_command_process(ordered: socket.socket, rules: SandboxRules) -> int:
    """Fork the process of the command. It waits for the order that says what to run."""
    pid = os.fork()
    if pid == 0:
        _become_command(ordered, rules)
    ordered.close()
    return pid


def _become_command(ordered: socket.socket, rules: SandboxRules) -> NoReturn:
    """Execute the command in this process.

    The closed channel tells Mulligan that this worked; else an answer names the failed step.
    """
    step = "start"
    try:
        # The launcher ignores these signals, and ignored signals stay ignored after exec.
        for number in _DEFAULTED:
            signal.signal(number, signal.SIG_DFL)
        received = receive_message(ordered)
        if received is None:
            os._exit(0)
        order, stdio = Order(received[0]), received[1]
        if order.new_session:
            os.setsid()
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        step = "cwd"
        _enter(order)
        step = "sandbox"
        rules.apply_to_self()
        step = "seccomp"
        _filter_self(order, ordered, rules)
        step = "exec"
        _execute(order)
    except OSError as error:
        send_message(ordered, ("failed", step, error.errno or 0))
    finally:
        os._exit(127)


def _enter(order: Order) -> None:
    """Enter the folder, then check it: one above it may have become a link since Mulligan checked the path."""
    os.chdir(order.cwd)
    if not (os.getcwdb() + b"/").startswith(order.root.rstrip(b"/") + b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def _execute(order: Order) -> None:
    """As execvp: execute the first file on the command's own PATH that can be executed, else raise the most telling
    error.
    """
    program = order.argv[0]
    if b"/" in program:
        os.execve(program, order.argv, order.env)
    # As execvp(3): a file that exists but cannot run says more than "not found".
    failure = OSError(2, os.strerror(2))
    for folder in order.env.get(b"PATH", os.defpath.encode()).split(b":"):
        try:
            os.execve((folder or b".") + b"/" + program, order.argv, order.env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    raise failure


def _filter_self(order: Order, channel: socket.socket, rules: SandboxRules) -> None:
    """Install the system call filter last, so that the supervisor does not stop our own system calls."""
    program = order.program if rules.has_own_network else order.program_without_sockets or order.program
    if program is None:
        if order.listens or rules.without_network:
            raise OSError(38, "no filter for this machine")
        return
    if not order.listens:
        _install(program, 0)
        return
    # The kernel would write a core file without a system call that the filter sees.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    flags = kernel.SECCOMP_FILTER_FLAG_NEW_LISTENER
    try:
        listener = _install(program, flags | kernel.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)
    except OSError as error:
        if error.errno != 22:  # EINVAL: before Linux 5.19 a signal may restart a stopped call; the stop comes twice
            raise
        listener = _install(program, flags)
    send_message(channel, ("listener",), (listener,))
    os.close(listener)


def _install(program: bytes, flags: int) -> int:
    """Install a filter. As root without no_new_privs, which it does not need, so that setuid programs keep working."""
    try:
        return kernel.install_filter(program, flags)
    except PermissionError:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        return kernel.install_filter(program, flags)


class ProcessReaper:
    """Reaps the command and all its descendants, and carries out orders (kill, signal) that come over the channel."""

    def __init__(self, channel: socket.socket, main_pid: int, linger_s: float | None, marks: list[int]) -> None:
        self._channel = channel
        self._marks = marks
        self._main_pid = main_pid
        self._linger_s = linger_s
        self._main_running = True
        self._status = 0
        self._kill_at: float | None = None
        self._killing = False
        self._survivors = 0
        self._interrupts = 0
        self._interrupted_at = 0.0
        self._woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker)
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(self._woken, select.POLLIN)

    def until_all_are_gone(self) -> None:
        while self._reap():
            for fd, _ in self._poller.poll(self._wait_ms()):
                if fd == self._woken:
                    self._wake()
                else:
                    self._carry_out_order()
            if self._killing or (self._kill_at is not None and time.monotonic() >= self._kill_at):
                self._kill()
        for mark in self._marks:
            os.pwrite(mark, b"%d" % time.clock_gettime_ns(time.CLOCK_REALTIME), 0)
        try:
            send_message(self._channel, ("gone", self._status, self._survivors))
        except (BrokenPipeError, ConnectionResetError):
            return  # Mulligan ended before the command did

    def _wake(self) -> None:
        """Read the numbers of the signals that ended the wait; Python writes them into the pipe."""
        try:
            interrupts = os.read(self._woken, 4096).count(signal.SIGINT)
        except BlockingIOError:
            return
        if interrupts:
            self._interrupts, self._interrupted_at = self._interrupts + interrupts, time.monotonic()

    def _reap(self) -> bool:
        """Collect all processes that ended; False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._main_pid and self._main_running:
                self._main_ended(status)

    def _main_ended(self, status: int) -> None:
        self._main_running = False
        self._status = status
        if self._linger_s is not None:
            self._kill_at = time.monotonic() + self._linger_s

    def _wait_ms(self) -> float | None:
        if self._killing:
            return _KILL_RETRY_S * 1000
        if self._kill_at is None:
            return None
        return max(0.0, self._kill_at - time.monotonic()) * 1000 + 1

    def _carry_out_order(self) -> None:
        received = receive_message(self._channel)
        if received is None:
            self._poller.unregister(self._channel)
            self._killing = True
            return
        order = received[0]
        if order[0] == "kill":
            self._killing = True
        elif order[0] == "signal" and not (order[1] == signal.SIGINT and self._has_come_to_all()):
            _signal_each(_stopped_descendants() if order[1] == signal.SIGKILL else _descendants(), order[1])

    def _has_come_to_all(self) -> bool:
        """Whether the terminal sent the interrupt to our whole process group, so that the command already got it."""
        self._wake()
        if time.monotonic() - self._interrupted_at > _SAME_INTERRUPT_S:
            self._interrupts = 0
        if not self._interrupts or not self._main_running or os.getpgid(self._main_pid) != os.getpgrp():
            return False
        self._interrupts -= 1
        return True

    def _kill(self) -> None:
        """Kill all descendants. None of them can fork a child that this would miss."""
        self._killing = True
        frozen = _stopped_descendants()
        self._survivors = max(self._survivors, len(frozen) - self._main_running)
        _signal_each(frozen, signal.SIGKILL)


def _stopped_descendants() -> set[int]:
    """Stop all descendants, so that none can fork a child that the caller would miss, and return them."""
    stopped: set[int] = set()
    for _ in range(_FREEZE_ROUNDS_MAX):
        fresh = _descendants() - stopped
        if not fresh:
            break
        # A process may fork after we read /proc and before it stops, so read again until no process is new.
        _signal_each(fresh, signal.SIGSTOP)
        stopped |= fresh
    return stopped


def _signal_each(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _descendants() -> set[int]:
    """All living descendants of this process, whatever session or group they moved to."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_parent_of(name), []).append(int(name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), ()):
            found.add(child)
            queue.append(child)
    return found


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b") ")[2].split(b" ", 2)[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


# Run with `-I -S`: no site-packages, no user's start-up files, descriptor 3 is the channel.
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from mulligan.exec import init; init.main(3)"

_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE)


def main(channel_fd: int) -> None:
    """For each request, send the channels of a ready init process and of the process that becomes the command.

    The terminal's signals are for the command, so the launcher ignores them.
    """
    channel = socket.socket(fileno=channel_fd)
    channel.set_inheritable(False)
    # The embedding program may have opened inheritable descriptors; commands must not get them.
    os.closerange(channel_fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # An init process reports over its channel; the launcher never waits for it, so the kernel reaps it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()
    # The garbage collector would write to the pages that a fork shares, and so make the kernel copy them.
    gc.freeze()
    while receive_message(channel) is not None:
        given, kept = socket.socketpair()
        orders, ordered = socket.socketpair()
        if os.fork() == 0:
            channel.close()
            given.close()
            orders.close()
            _become_init(kept, ordered)
        kept.close()
        ordered.close()
        _hand_over(channel, given, orders)


def _hand_over(channel: socket.socket, given: socket.socket, orders: socket.socket) -> None:
    with given, orders:
        try:
            send_message(channel, ("ready",), (given.fileno(), orders.fileno()))
        except BrokenPipeError:
            return  # Mulligan ended meanwhile; the init process sees its channel close


def _become_init(channel: socket.socket, ordered: socket.socket) -> None:
    status = 1
    try:
        serve(channel, ordered)
        status = 0
    finally:
        os._exit(status)
