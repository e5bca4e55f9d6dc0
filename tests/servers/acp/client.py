"""A client of the protocol on the other end of an agent's pipes. Every frame it is sent is kept in order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Body = dict[str, Any]

PATIENCE_S = 600
"""Long for a busy machine: an agent that does not answer is found all the same."""

AGENT = [sys.executable, "-m", "mulligan", "acp"]


class Client:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.frames: list[Body] = []
        self.allow: Callable[[Body], str] = lambda asked: "allow_once"
        self._answers: dict[int, Body] = {}
        self._came = threading.Condition()
        self._next = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            frame = json.loads(line)
            with self._came:
                self.frames.append(frame)
                if "method" not in frame:
                    self._answers[frame["id"]] = frame
                self._came.notify_all()
            if frame.get("method") == "session/request_permission":
                chosen = self.allow(frame["params"])
                outcome = {"outcome": "selected", "optionId": chosen} if chosen else {"outcome": "cancelled"}
                self.send({"jsonrpc": "2.0", "id": frame["id"], "result": {"outcome": outcome}})
        with self._came:
            self._answers[-1] = {}
            self._came.notify_all()

    def send(self, frame: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(frame).encode() + b"\n")
        self.process.stdin.flush()

    def notify(self, method: str, **params: Any) -> None:
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def begin(self, method: str, **params: Any) -> int:
        self._next += 1
        self.send({"jsonrpc": "2.0", "id": self._next, "method": method, "params": params})
        return self._next

    def answer(self, number: int) -> Body:
        with self._came:
            assert self._came.wait_for(lambda: number in self._answers or -1 in self._answers, timeout=PATIENCE_S)
            return self._answers[number]

    def ask(self, method: str, **params: Any) -> Body:
        frame = self.answer(self.begin(method, **params))
        assert "result" in frame, frame
        found: Body = frame["result"]
        return found

    def error(self, method: str, **params: Any) -> Body:
        found: Body = self.answer(self.begin(method, **params))["error"]
        return found

    def wait_for_update(self, matches: Callable[[Body], bool]) -> Body:
        def found() -> Body | None:
            return next((one for one in self.updates() if matches(one)), None)

        with self._came:
            assert self._came.wait_for(lambda: found() is not None, timeout=PATIENCE_S)
            update = found()
        assert update is not None
        return update

    def updates(self, kind: str | None = None) -> list[Body]:
        all_of_them = [frame["params"]["update"] for frame in self.frames if frame.get("method") == "session/update"]
        return [one for one in all_of_them if kind in (None, one["sessionUpdate"])]


@contextmanager
def connected(
    home: Path, *options: str, command: list[str] | None = None, cwd: str | None = None, **environ: str
) -> Iterator[Client]:
    env = {**os.environ, "MULLIGAN_HOME": str(home), **environ}
    with subprocess.Popen(
        command or [*AGENT, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=cwd
    ) as process:
        client = Client(process)
        try:
            client.ask("initialize", protocolVersion=1, clientCapabilities={})
            yield client
        except BaseException:
            process.kill()
            raise
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0
