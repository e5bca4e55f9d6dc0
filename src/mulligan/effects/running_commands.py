"""Running commands of an open root, and the environments of commands.

`RunningCommands` lets other threads page through a command's output and send it signals.

A record holds the names of environment variables and an HMAC of each value, never a value. A session that was opened
with an environment passes it to every later command, in other processes too: its boundary holds the values, encrypted
with the key of the state directory. Without that key they are lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any
from weakref import WeakKeyDictionary

from mulligan.effects.receipt import refusal_receipt
from mulligan.exec.command import Spools
from mulligan.exec.pump import CommandHandle
from mulligan.history.open_root import OpenRoot
from mulligan.store.fork_locks import fork_safe_lock
from mulligan.store.secret_key import SecretKey
from mulligan.values.canonical import decode, encode
from mulligan.values.errors import Refused
from mulligan.values.fast_dataclass import fast_dataclass
from mulligan.values.ids import SessionId
from mulligan.values.text import from_base64, in_base64

SIGNALS: dict[str, int] = {
    "term": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
}
ENDED_KEPT = 64
"""How many ended background commands keep their output."""


@fast_dataclass(slots=True, eq=False)
class TrackedCommand:
    """A background command: its call, its stored output, and its receipt once it has ended."""

    call: str
    session: SessionId
    handle: CommandHandle
    spools: Spools | None = None
    receipt: dict[str, Any] | None = None
    thread: threading.Thread | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class RunningCommands:
    """The commands of one open root. Thread-safe. `close` stops running commands, and their changes are rolled back."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._background_command: list[TrackedCommand] = []

    def find(self, call: str) -> TrackedCommand | None:
        """The background command of this call; None if there is none."""
        with self._lock:
            return next((one for one in self._background_command if one.call == call and one.thread is not None), None)

    @contextmanager
    def running(self, call: str, session: SessionId) -> Iterator[CommandHandle]:
        """A block in which a foreground command runs. A call may have several at once."""
        with CommandHandle() as handle:
            command = TrackedCommand(call, session, handle)
            with self._lock:
                self._background_command.append(command)
            try:
                yield handle
            finally:
                with self._lock:
                    command.ended.set()
                    self._background_command.remove(command)

    def start(self, command: TrackedCommand, work: Callable[[CommandHandle], dict[str, Any]]) -> None:
        """Run `work` in the background; it returns the receipt."""

        def run() -> None:
            words = "Mulligan failed while the command ran; see the error output of this process."
            receipt = refusal_receipt("host.exec", Refused("error", "internal", words)).to_dict()
            try:
                receipt = work(command.handle)
            finally:
                with self._lock:
                    command.receipt = receipt
                    command.ended.set()
                    command.handle.close()

        command.thread = threading.Thread(target=run, name=f"mulligan-exec-{command.call[-8:]}", daemon=True)
        with self._lock:
            self._background_command.append(command)
            self._forget_oldest()
        command.thread.start()

    def _forget_oldest(self) -> None:
        for one in [one for one in self._background_command if one.ended.is_set()][:-ENDED_KEPT]:
            self._background_command.remove(one)
            if one.spools is not None:
                one.spools.close()

    def signal(self, command: TrackedCommand, number: int) -> bool:
        """Send a signal. False if the command has ended."""
        with self._lock:
            if command.ended.is_set():
                return False
            command.handle.signal(number)
            return True

    def stop(self, call: str) -> None:
        """Kill the call's foreground commands and their descendants; they fail as `cancelled`."""
        with self._lock:
            for command in self._background_command:
                if command.call == call and command.thread is None and not command.ended.is_set():
                    command.handle.cancel()

    def signal_session(self, session: SessionId, number: int) -> int:
        """Send a signal to every running command of a session. Returns how many there were."""
        with self._lock:
            found = [one for one in self._background_command if one.session == session and not one.ended.is_set()]
        return sum(self.signal(one, number) for one in found)

    def close(self) -> None:
        with self._lock:
            left = list(self._background_command)
            for command in left:
                if command.thread is not None and not command.ended.is_set():
                    command.handle.cancel()
        for command in left:
            if command.thread is not None:
                command.thread.join()
            if command.spools is not None:
                command.spools.close()


_RUNNING_COMMANDS: WeakKeyDictionary[OpenRoot, RunningCommands] = WeakKeyDictionary()
_RUNNING_COMMANDS_LOCK = fork_safe_lock()


def running_commands_of(open_root: OpenRoot) -> RunningCommands:
    """The running commands shared by all roots reached through one open root, so that each of them finds a command."""
    open_root = open_root.opener
    with _RUNNING_COMMANDS_LOCK:
        if open_root not in _RUNNING_COMMANDS:
            _RUNNING_COMMANDS[open_root] = commands = RunningCommands()
            open_root.at_close(commands.close)
        return _RUNNING_COMMANDS[open_root]


ENV_PARAMS = frozenset({"env", "env_patch"})
"""The parameters whose values are secret."""
_SEALED = "env_sealed"


def without_env_values(key: SecretKey, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """An effect's parameters without secret values, for the record."""
    return {**params, **{name: _named_values(key, params[name]) for name in ENV_PARAMS if name in params}}


def sealed_env(key: SecretKey, env: Mapping[str, str]) -> dict[str, Any]:
    """A session's environment, encrypted for its boundary."""
    if not env:
        return {"env": {}}
    return {"env": _named_values(key, env), _SEALED: in_base64(key.seal(encode(dict(env))))}


def _named_values(key: SecretKey, env: object) -> Any:
    """Each variable with an HMAC of its value. The effect refuses other types; the record then has only the type."""
    if env is None:
        return None
    if not isinstance(env, Mapping):
        return {"unrecorded": type(env).__name__}
    # A name with `=` is refused: what follows may be a value in the wrong place, so the record ends the name there.
    named = [(str(name).partition("=")[0], value) for name, value in env.items()]
    return {name: key.hmac("env", _raw(name), _raw(str(value))) for name, value in named}


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@fast_dataclass(slots=True, frozen=True)
class SessionEnv:
    """The environment that a session was opened with; decrypted only when a command needs it."""

    session: str = ""
    body: Mapping[str, Any] | None = None
    key: SecretKey | None = None

    def values(self) -> Mapping[str, str]:
        """The decrypted values. Refuses with `env_lost` if the state directory's key is gone or has changed."""
        if self.body is None or self.key is None:
            return {}
        sealed = self.body.get(_SEALED)
        if sealed is None:
            # A session of an earlier version: its boundary holds the values themselves.
            values: Mapping[str, str] = self.body["env"]
            return values
        data = self.key.unseal(from_base64(sealed))
        if data is None:
            words = f"The key for the environment of session {self.session!r} is gone. Open a new session."
            raise Refused("error", "env_lost", words, names=sorted(self.body["env"]))
        found: Mapping[str, str] = decode(data)
        return found


NO_ENV = SessionEnv()
