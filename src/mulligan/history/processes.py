"""Processes of agents: whether an agent still runs, and what its commands have left running.

A process that a command leaves behind is found by its ancestry. As long as the command's shell runs, the process is
below the agent. When the shell has ended, the kernel gives the process to a reaper above the agent; then its session
and its terminal say that no person has started it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.paths import is_inside

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OWN_COMMAND = re.compile(rb"mulligan/agents/hooks/client\.py|(?:\A|[\0/])mulligan\0")
"""Found in the command line of a hook, of the process behind the hooks, or of `mulligan` itself."""
_STATE, _PARENT, _GROUP, _SESSION, _TERMINAL, _START_TICKS = 0, 1, 2, 3, 4, 19
"""Fields of /proc/<pid>/stat, counted after the name of the program."""
_NO_TERMINAL, _INIT = 0, 1
_NOTED_MAX = 20


@fast_dataclass(slots=True, frozen=True)
class Process:
    """A process. `born` tells it from a later one with the same id; `group` and `session` outlive its parent."""

    pid: int
    parent: int
    group: int
    session: int
    terminal: int
    born: str

    @property
    def is_alive(self) -> bool:
        return start_time_of(self.pid) == self.born


def is_agent_running(pid: int | None, born: str | None) -> bool:
    """Whether the agent's process still runs. An agent that did not name its process may run."""
    return pid is None or start_time_of(pid) == born


def start_time_of(pid: int) -> str | None:
    """When a process began, as far as this system says; None if there is no such process."""
    found = _process(pid)
    if found is not None or os.path.exists("/proc/self/stat"):
        return None if found is None else found.born
    # A system without /proc says only whether the process exists.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return "alive" if isinstance(error, PermissionError) else None
    return "alive"


def descends_from(caller: int, ancestor: int) -> bool:
    """Whether a process is another one, or one of its descendants, as far as this system says."""
    while caller != ancestor:
        found = _process(caller)
        if found is None or found.parent == caller:
            return False
        caller = found.parent
    return True


def left_running(agent: int | None, command: str | None, folder: bytes, *, since_s: float) -> list[Process]:
    """The processes of this user that a command of the agent started at or after `since_s` (seconds since the boot).

    For an agent that did not name its process: those that work in the folder. Hooks of Mulligan do not count. Without
    /proc the list is empty.
    """
    every = _every_process()
    fresh = {one.pid: one for one in every.values() if _began_since(one, since_s) and _is_countable(one.pid)}
    if agent is None or agent not in every:
        return [one for one in fresh.values() if _works_in(one.pid, folder)]
    found = list[Process]()
    for one in fresh.values():
        top = one
        while top.parent in fresh:
            top = fresh[top.parent]
        if _is_below(agent, top, every):
            # An agent starts processes for itself, too: language servers, servers of MCP.
            found += [one] if _is_of_command(top.pid, command) else []
        elif _is_orphan(top, every[agent], every, fresh) and _works_in(one.pid, folder):
            found.append(one)
    return found


def with_descendants(known: Collection[Process], agent: int | None) -> list[Process]:
    """Those of the processes that still run, and what they and the ended ones have started."""
    every = _every_process()
    own = every.get(agent) if agent is not None else None
    oldest = min((int(one.born) for one in known), default=0)

    def is_fresh(leader: int) -> bool:
        """Whether a session or group is the command's own. Other programs may be in the agent's, or in an older one."""
        if leader in every:
            return int(every[leader].born) >= oldest
        return own is not None and leader not in (own.session, own.group)

    sessions = {one.session for one in known if is_fresh(one.session)}
    groups = {one.group for one in known if is_fresh(one.group)}
    pids = {one.pid for one in known if one.is_alive}
    found = {pid: every[pid] for pid in pids if pid in every}
    for one in sorted(every.values(), key=lambda each: int(each.born)):
        related = one.parent in found or one.session in sessions or one.group in groups
        if related and int(one.born) >= oldest and _is_countable(one.pid):
            found[one.pid] = one
    return list(found.values())


def processes_to_text(processes: Iterable[Process]) -> str:
    """The processes in a note of coverage."""
    rows = sorted(processes, key=lambda one: one.pid)[:_NOTED_MAX]
    return " ".join(f"{one.pid}:{one.group}:{one.session}:{one.born}" for one in rows)


def processes_from_text(text: str) -> list[Process]:
    fields = [one.split(":") for one in text.split()]
    return [Process(int(one[0]), 0, int(one[1]), int(one[2]), 0, one[3]) for one in fields if len(one) == 4]


def _every_process() -> dict[int, Process]:
    with suppress(OSError):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return {pid: one for pid in pids if (one := _process(pid)) is not None}
    return {}


def _process(pid: int) -> Process | None:
    """None for a process that is gone, or is a zombie: in a container no parent may reap it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[_STATE] in (b"Z", b"X"):
        return None
    parent, group, session, terminal = (int(fields[at]) for at in (_PARENT, _GROUP, _SESSION, _TERMINAL))
    return Process(pid, parent, group, session, terminal, fields[_START_TICKS].decode("ascii"))


def _began_since(process: Process, since_s: float) -> bool:
    # The kernel rounds down to a tick; one tick more, so that a process of the very first tick counts.
    return (int(process.born) + 1) / _TICKS_PER_S >= since_s


def _is_countable(pid: int) -> bool:
    """Whether the process is another one of this user, and neither a hook nor Mulligan."""
    if pid == os.getpid():
        return False
    with suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid() and not _OWN_COMMAND.search(_command_line(pid))
    return False


def _command_line(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def _is_below(agent: int, process: Process, every: Mapping[int, Process]) -> bool:
    above = process.parent
    # Ids of ended processes are used again, so what was read may even be a circle.
    for _ in range(len(every)):
        if above == agent:
            return True
        if above not in every:
            return False
        above = every[above].parent
    return False


def _is_of_command(pid: int, command: str | None) -> bool:
    """Whether a process is the shell of a command, or the program that the shell has become.

    Agents wrap commands in words and quotes of their own, so only letters and digits are compared.
    """
    if command is None:
        return False
    with suppress(OSError):
        ours, theirs = _letters(command.encode("utf-8", "surrogateescape")), _letters(_command_line(pid))
        return bool(ours and theirs) and (ours in theirs or theirs in ours)
    return False


def _letters(words: bytes) -> bytes:
    return re.sub(rb"[^0-9A-Za-z]", b"", words)


def _is_orphan(top: Process, agent: Process, every: Mapping[int, Process], fresh: Collection[int]) -> bool:
    """Whether a process has lost its parent and may be the agent's: no terminal or session of a person has it."""
    is_reaped = top.parent == _INIT or (top.parent in every and _is_below(top.parent, agent, every))
    own_terminal = top.terminal in (_NO_TERMINAL, agent.terminal)
    # The leader of the session may have ended. An older leader that still runs is another program's.
    own_session = top.session == agent.session or top.session not in every or top.session in fresh
    return is_reaped and own_terminal and own_session


def _works_in(pid: int, folder: bytes) -> bool:
    """Whether the folder is that of the process, or was when it began, or the process has a file in it open: a daemon
    changes to another folder before it works.
    """
    with suppress(OSError):
        return any(is_inside(path, folder) for path in _paths_of(pid))
    return False


def _paths_of(pid: int) -> Iterator[bytes]:
    """The folder that a process is in, the one in which its shell started it, and the files that it has open."""
    process = f"/proc/{pid}".encode()
    yield os.readlink(process + b"/cwd")
    with open(process + b"/environ", "rb") as file:
        yield from (word[4:] for word in file.read().split(b"\0") if word.startswith(b"PWD="))
    for name in os.listdir(process + b"/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(process + b"/fd/" + name)
