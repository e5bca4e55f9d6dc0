"""The launcher: a small single-threaded process, one beside each of ours, that keeps the next warden ready.

Forking our own process would copy the page tables of whatever program embeds us (2.6 ms at 100 MB) while its other
threads hold locks; starting an interpreter for every command would cost 10 to 15 ms. This one starts once, holds 10 MB,
and forks the next warden and its command's process while the present one runs, so no command waits for a fork.
It lives until its channel closes, that is until we do.
"""

from __future__ import annotations

import gc
import os
import signal
import socket

from mulligan.workspace.exec import warden, wire

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from mulligan.workspace.exec import launcher; launcher.main(3)"
"""Run with `-I -S`: no site-packages, no user's start-up files, descriptor 3 is the channel."""

_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE)


def main(channel_fd: int) -> None:
    """For each request, one ready warden: its channel, and that of the process which will be the command.

    The terminal's signals are for the command: ignored here.
    """
    channel = socket.socket(fileno=channel_fd)
    channel.set_inheritable(False)
    os.closerange(channel_fd + 1, os.sysconf("SC_OPEN_MAX"))  # what our program left inheritable is not for commands
    os.chdir("/")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens report to the one who asked; nobody waits for them here
    gc.disable()
    gc.freeze()  # nothing is written to the pages that a fork shares
    while wire.receive(channel) is not None:
        given, kept = socket.socketpair()
        orders, ordered = socket.socketpair()
        if os.fork() == 0:
            channel.close()
            given.close()
            orders.close()
            _become_warden(kept, ordered)
        kept.close()
        ordered.close()
        _hand_over(channel, given, orders)


def _hand_over(channel: socket.socket, given: socket.socket, orders: socket.socket) -> None:
    with given, orders:
        try:
            wire.send(channel, ("ready",), (given.fileno(), orders.fileno()))
        except BrokenPipeError:
            return  # they ended meanwhile; the warden sees its channel close


def _become_warden(channel: socket.socket, ordered: socket.socket) -> None:
    status = 1
    try:
        warden.serve(channel, ordered)
        status = 0
    finally:
        os._exit(status)
