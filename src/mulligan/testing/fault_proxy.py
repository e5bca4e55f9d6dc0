"""A TCP proxy that breaks connections where a test says: to a database, or to an object store.

`plan` names what a request contains and what happens then, once: the proxy cuts the connection before the request
reaches the server or after half of it, or it lets the server answer and loses the answer or its second half.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

from mulligan.values.fast_dataclass import fast_dataclass

Fault = Literal["cut_before", "cut_half", "lose_answer", "truncate_answer"]

_CHUNK_BYTES = 65_536


@fast_dataclass(slots=True, frozen=True)
class _Plan:
    marker: bytes
    fault: Fault


class FaultProxy:
    """Forwards connections from a port of its own on loopback to `host:port`. Use it in a `with`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = host, port
        self._plans: list[_Plan] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._delayed = threading.Event()
        self.delay_s = 0.0
        """How long each request waits before it goes on."""
        self.refuses = False
        """Whether new connections are closed at once."""
        self.done: list[Fault] = []
        """The faults that have happened, in order."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="mulligan-fault-proxy", daemon=True).start()

    def plan(self, marker: bytes, fault: Fault) -> None:
        """When the next request that contains the marker comes, do this to it."""
        with self._lock:
            self._plans.append(_Plan(marker, fault))

    def cut_all(self) -> None:
        """Break every open connection."""
        with self._lock:
            for one in self._open:
                _break(one)

    def close(self) -> None:
        """Stop listening and break every connection."""
        self.refuses = True
        self._delayed.set()
        _break(self._listening)
        self._listening.close()
        self.cut_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        # OSError: the proxy was closed.
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.refuses:
                    client.close()
                    continue
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        answers = _Answers(client, server)
        back = threading.Thread(target=answers.forward, daemon=True)
        back.start()
        with suppress(OSError), client, server:
            self._forward(client, server, answers)
            with self._lock:
                self._open -= {client, server}
            _break(client)
            _break(server)
            back.join()

    def _forward(self, client: socket.socket, server: socket.socket, answers: _Answers) -> None:
        with suppress(OSError):
            while data := client.recv(_CHUNK_BYTES):
                if self.delay_s:
                    self._delayed.wait(self.delay_s)
                fault = self._fault_for(data)
                if fault == "cut_before":
                    break
                if fault is not None and fault != "cut_half":
                    answers.fault = fault
                server.sendall(data[: len(data) // 2] if fault == "cut_half" else data)
                if fault == "cut_half":
                    break

    def _fault_for(self, data: bytes) -> Fault | None:
        with self._lock:
            found = next((plan for plan in self._plans if plan.marker in data), None)
            if found is None:
                return None
            self._plans.remove(found)
            self.done.append(found.fault)
            return found.fault


class _Answers:
    """The server's answers on one connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client, self._server = client, server
        self.fault: Fault | None = None

    def forward(self) -> None:
        with suppress(OSError):
            while data := self._server.recv(_CHUNK_BYTES):
                if self.fault == "truncate_answer":
                    self._client.sendall(data[: len(data) // 2])
                if self.fault is not None:
                    break
                self._client.sendall(data)
        _break(self._client)
        _break(self._server)


def _break(one: socket.socket) -> None:
    # OSError: the other side has ended it.
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
