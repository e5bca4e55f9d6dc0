"""From what a hook sends to the recorder of the root it is about: one thread for each root, events in their order."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from mulligan.agents.hooks.events import HookEvent, parse_event
from mulligan.agents.hooks.recorder import Recorder
from mulligan.agents.hooks.spool import Spool
from mulligan.values.canonical import encode
from mulligan.values.clock import monotonic_s
from mulligan.values.faults import Broken, MulliganError
from mulligan.values.plain import plain

TROUBLE = "trouble.txt"
_ON_THE_WAY_S = 0.6
"""What is left of an agent's patience for the way to us and back."""

_TICK_S = 1.0
_SLICE_S = 0.05
_REMEMBERED_MAX = 1000
_SHELLS = frozenset({b"sh", b"bash", b"dash", b"zsh", b"ash", b"busybox"})

DONE, FAILED = b"0", b"1"

OpenRecorder = Callable[[HookEvent, str], Recorder]
"""The recorder of the root that an event belongs to, given the project folder the agent named; opened if need be."""


@plain(slots=True, frozen=True)
class Message:
    """What a hook sends: for which agent, from which project, who, when, how long it waits; and the agent's words."""

    identity: bytes
    agent: str
    project: str
    pid: int
    sent_ns: int
    wait_s: float
    raw: bytes

    @property
    def is_late(self) -> bool:
        """Whether the agent has gone on by now."""
        return time.clock_gettime_ns(time.CLOCK_REALTIME) - self.sent_ns > self.wait_s * 1e9

    @property
    def answer_s(self) -> float:
        return max(0.05, self.wait_s - _ON_THE_WAY_S)


def parse_message(data: bytes) -> Message | None:
    head, _, raw = data.partition(b"\n")
    fields = head.split(b" ")
    if len(fields) != 6 or fields[0] != b"1":
        return None
    try:
        project = b"" if fields[2] == b"-" else bytes.fromhex(fields[2].decode("ascii"))
        pid, sent_ns, wait_ms = map(int, fields[3:])
        return Message(head, fields[1].decode("ascii"), os.fsdecode(project), pid, sent_ns, wait_ms / 1000, raw)
    except ValueError:
        return None


@dataclass(slots=True)
class Job:
    """One event on its way to its recorder."""

    event: HookEvent
    until: float
    pid: int = 0
    late: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Station:
    """A recorder and the one thread that uses it: events in the order they came, reading on in between."""

    def __init__(self, recorder: Recorder, tell: Callable[[Exception], None]) -> None:
        self.recorder = recorder
        self._tell = tell
        self.busy = False
        self.broken = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mulligan-hooks", daemon=True)
        self._thread.start()

    def give(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, wait_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(wait_s)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._do(job)
        finally:
            self.recorder.close()

    def _next(self) -> Job | None:
        """The next job; while there is none, what else there is to do."""
        while True:
            try:
                return self._jobs.get(timeout=_TICK_S if self.recorder.is_settled or self.broken else 0)
            except queue.Empty:
                self._meanwhile()

    def _meanwhile(self) -> None:
        try:
            if not self.recorder.is_settled:
                self.recorder.go_on(monotonic_s() + _SLICE_S)
            elif self.busy:
                self.recorder.sweep()
                self.busy = self.recorder.has_open_calls()
        except (MulliganError, OSError) as error:
            self._tell(error)
            self.broken = True

    def _do(self, job: Job) -> None:
        try:
            self.recorder.handle(job.event, until=job.until, pid=job.pid, late=job.late)
            self.busy = True
        except Exception as error:  # noqa: BLE001  # the top of a server: whatever is broken, the next event is heard
            job.error, self.broken = error, isinstance(error, Broken | OSError) or self.broken
        job.done.set()


class Dispatcher:
    """From messages to recorders. For any thread."""

    def __init__(self, folder: str, open_recorder: OpenRecorder) -> None:
        self.folder = folder
        self.spool = Spool(folder)
        self._open_recorder = open_recorder
        self._stations: dict[int, Station] = {}
        self._handled: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._spooling = threading.Lock()
        self._outdated = False

    def take(self, data: bytes) -> bytes:
        """Deliver a message. FAILED only if it should be tried again later."""
        message = parse_message(data)
        if message is None:
            return DONE
        self.take_up_spool()
        return self._deliver(message, message.answer_s)

    def take_up_spool(self) -> None:
        """What could not be delivered when it was said, in its order; what still cannot be keeps the rest waiting."""
        with self._spooling:
            for name in self.spool.names():
                try:
                    message = parse_message(self.spool.read(name))
                except OSError:
                    continue
                if message is not None and self._deliver(message, None) != DONE:
                    return
                self.spool.remove(name)

    def _deliver(self, message: Message, wait_s: float | None) -> bytes:
        """Waits for it to be done: as long as told, else to the end."""
        try:
            if self._is_repeated(message):
                return DONE
            event = parse_event(message.agent, message.raw)
            if event is None:
                return DONE
            late = wait_s is None or message.is_late
            until = monotonic_s() + (wait_s or _SLICE_S)
            job = Job(event, until, 0 if late else agent_above(message.pid), late)
            with self._lock:
                station = self._station_of(event, message.project)
            station.give(job)
            if not job.done.wait(wait_s):
                return DONE
            return self._outcome(job.error, message)
        except (MulliganError, OSError) as error:
            return self._outcome(error, message)

    def _is_repeated(self, message: Message) -> bool:
        with self._lock:
            known = message.identity in self._handled
            self._handled[message.identity] = None
            while len(self._handled) > _REMEMBERED_MAX:
                self._handled.popitem(last=False)
        return known

    def _station_of(self, event: HookEvent, project: str) -> Station:
        recorder = self._open_recorder(event, project)
        station = self._stations.get(id(recorder))
        if station is None:
            station = self._stations[id(recorder)] = Station(recorder, self._tell)
        return station

    def _outcome(self, error: Exception | None, message: Message) -> bytes:
        if error is None:
            return DONE
        self._tell(error)
        if isinstance(error, Broken | OSError):
            with self._lock:
                self._handled.pop(message.identity, None)
            return FAILED + self._told_to_the_host(error)
        return DONE

    def _told_to_the_host(self, error: Exception) -> bytes:
        """What the agent shows to the person: that this version is too old for the store.

        This process then ends, and the next hook starts one of the version that is installed by then.
        """
        if not isinstance(error, MulliganError) or error.code != "store_newer":
            return b""
        self._outdated = True
        return encode({"systemMessage": f"mulligan: {error.message}"})

    def _tell(self, error: Exception) -> None:
        """For `hooks status`: the last thing that went wrong."""
        words = "".join(traceback.format_exception(error))
        if isinstance(error, MulliganError):
            words = f"{error.code}: {error.message}\n"
        with suppress(OSError):
            handle = os.open(os.path.join(self.folder, TROUBLE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(words)

    @property
    def is_busy(self) -> bool:
        return any(station.busy and not station.broken for station in self._stations.values())

    @property
    def is_broken(self) -> bool:
        return self._outdated or any(station.broken for station in self._stations.values())

    def settle(self) -> None:
        """Finish what is begun: for a process that lives for one event only."""
        for station in self._stations.values():
            while not station.recorder.is_settled and not station.broken:
                threading.Event().wait(_SLICE_S)

    def close(self) -> None:
        for station in self._stations.values():
            station.close(wait_s=5.0)


def agent_above(pid: int) -> int:
    """The process that runs the hook, past the shells it was started with."""
    for _ in range(3):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                head, _, rest = file.read().rpartition(b")")
        except OSError:
            return pid if _exists(pid) else 0
        if head.partition(b"(")[2] not in _SHELLS:
            return pid
        pid = int(rest.split()[1])
    return pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0 and not os.path.exists("/proc/self")
