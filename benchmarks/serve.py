"""What the HTTP server costs: pages of a long history, events to many readers, and its start. Ratios in one run.

    python benchmarks/serve.py [--full] [--calls N] [--records N] [--readers N] [--seconds S] [--store DIR]

Goals: a page of 100 calls from a long session at most 1.5 times the same from 500 calls, and at most 3 times `log` in
process; p99 delivery to many readers at most 3 times that to one, and no event lost; memory at the end at most 1.2
times that after the first minute; an agent's calls with readers attached at most 1.3 times those without; `/healthz`
answers within 2 times `python -c "import starlette.applications, uvicorn"`. The goals are for 50 000 calls and
1 000 000 records, 200 readers and ten minutes: `--full`. A plain run is shorter. `--store` keeps the sessions in a
folder and uses them again, because making them takes longer than measuring.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from timing import quantile

import mulligan
from mulligan.history.log import log_view
from mulligan.history.rewind import archive_of
from mulligan.history.tables import CALLS
from mulligan.session.tables import session_journal
from mulligan.session.transcript_log import append_message_in, pack_message
from mulligan.store.journal import HEADS
from mulligan.values.ids import SessionId

TURN = 10
PAGE_CALLS = 100
KEY = "a-static-key-of-the-benchmark"


def line(what: str, value: float, goal: float, unit: str = "times") -> None:
    print(f"{what:<66} {value:>9.2f} {unit:<6} goal {goal:<5} {'ok' if value <= goal else 'MISSED'}", flush=True)


def make_session(root: Path, home: Path, name: str, calls: int, records: int) -> None:
    """Calls in turns of ten, and after each turn messages, up to a number of records. Goes on where it was stopped."""
    with mulligan.open(root, store=home) as opened:
        session, archive = opened.session(name), archive_of(opened.open_root.ledger)
        with archive.store.read() as tx:
            done = tx.count(CALLS, {"session": name})
        for start in range(done - done % TURN, calls, TURN):
            with session.turn(f"step {start}"):
                for number in range(start, min(start + TURN, calls)):
                    with session.call("write_file") as call:
                        call.write_file(f"{name}-{number % 50}.txt", f"{number}\n")
            with archive.store.write() as tx:
                head = tx.get(HEADS, session_journal(name))
                missing = records * (start + TURN) // calls - (0 if head is None else head.seq)
                for number in range(max(0, missing)):
                    said = pack_message(archive, {"role": "assistant", "content": f"{start}/{number}"})
                    append_message_in(tx, archive, SessionId(name), said)
    print(f"  the session {name!r} has {calls} calls and {_records_of(root, home, name)} records", flush=True)


def _records_of(root: Path, home: Path, name: str) -> int:
    with mulligan.open(root, store=home) as opened, opened.open_root.ledger.store.read() as tx:
        head = tx.get(HEADS, session_journal(name))
        return 0 if head is None else head.seq


@contextmanager
def server(home: Path) -> Iterator[tuple[str, subprocess.Popen[str], float]]:
    """The address, the process, and the seconds until `/healthz` answered."""
    keys = home.parent / "keys"
    keys.write_text(KEY + "\n")
    port = 20_000 + os.getpid() % 20_000
    command = [sys.executable, "-m", "mulligan", "serve", "--port", str(port), "--api-key-file", str(keys)]
    base, began = f"http://127.0.0.1:{port}", time.perf_counter()
    environment = {**os.environ, "MULLIGAN_HOME": str(home)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=home.parent)
    try:
        while True:
            try:
                httpx.get(f"{base}/healthz")
                break
            except httpx.TransportError:
                time.sleep(0.002)
        healthy = time.perf_counter() - began
        assert process.stdout is not None and re.search("code=", process.stdout.readline())
        yield base, process, healthy
    finally:
        process.terminate()
        process.wait()


def headers() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


def seconds_of(act: Any, times: int = 15) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return quantile(sorted(found), 0.5)


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Processor time of all threads that the process has now. Other work on the machine hardly changes it."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def read_pages(client: httpx.Client, name: str, number: int) -> None:
    """The newest pages of a session, one after the other."""
    query = dict[str, str]()
    for _ in range(number):
        answer = client.get(f"/api/v1/sessions/{name}/calls", params=query).json()
        assert len(answer["calls"]) == PAGE_CALLS, answer
        query = {"before": answer["next"]}


def pages(base: str, process: subprocess.Popen[str], root: Path, home: Path, calls: int) -> None:
    def computed(act: Callable[[], None]) -> float:
        before = cpu_seconds(process)
        act()
        return cpu_seconds(process) - before

    number = min(200, calls // PAGE_CALLS)
    with httpx.Client(base_url=base, headers=headers(), timeout=120) as client:
        client.get("/api/v1/calls", params={"limit": 1})
        new = {name: computed(lambda name=name: read_pages(client, name, 5)) / 5 for name in ("short", "long")}
        again = {name: computed(lambda name=name: read_pages(client, name, 5)) / 5 for name in ("short", "long")}
        many = computed(lambda: read_pages(client, "long", number)) / number
    with mulligan.open(root, store=home) as opened:
        before = time.process_time()
        log_view(opened.open_root, SessionId("long"), limit=PAGE_CALLS * number)
        in_process = (time.process_time() - before) / number
    words = f"the second time {1000 * again['long']:.1f} ms, `log` of the same calls {1000 * in_process:.1f} ms"
    print(f"  processor time of a page: {1000 * many:.1f} ms, {words}")
    line("a page of the long session / of the short one", new["long"] / new["short"], 1.5)
    line("the same pages read again", again["long"] / again["short"], 1.5)
    line("pages over HTTP / `log` of the same calls in process", many / in_process, 3)


AGENT = """
import sys, time, mulligan
root, home, seconds, rate = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
with mulligan.open(root, store=home) as opened:
    session = opened.session("agent")
    began, number, spent = time.time(), 0, []
    while time.time() - began < seconds:
        at = time.perf_counter()
        with session.call(f"{time.time():.6f}") as call:
            call.write_file("agent.txt", f"{number}")
        spent.append(time.perf_counter() - at)
        number += 1
        time.sleep(max(0.0, began + number / rate - time.time()))
    print(number, sorted(spent)[number // 2], time.process_time() / number)
"""


LABEL = re.compile(rb'"label":"([0-9.]+)"')


async def read_events(port: int, until: asyncio.Event, delays: list[float]) -> int:
    """How many ends of calls one reader hears. The delay counts from the begin of the newest call in each piece.

    On a bare socket: a reader must cost less than the server that it measures.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
    count, rest = 0, b""
    ended = asyncio.ensure_future(until.wait())
    while True:
        piece = asyncio.ensure_future(reader.read(1 << 18))
        await asyncio.wait({piece, ended}, return_when="FIRST_COMPLETED")
        if not piece.done():
            piece.cancel()
            writer.close()
            return count
        now, data = time.time(), rest + piece.result()
        whole, _, rest = data.rpartition(b"\n")
        count += whole.count(b'"kind":"call_ended"')
        if labels := LABEL.findall(whole[-4_000:]):
            delays.append(now - float(labels[-1]))


async def deliver(base: str, root: Path, home: Path, readers: int, seconds: float, rate: float) -> dict[str, float]:
    until, delays = asyncio.Event(), list[float]()
    port = int(base.rpartition(":")[2])
    reading = [asyncio.ensure_future(read_events(port, until, delays)) for _ in range(readers)]
    await asyncio.sleep(1)
    words = [sys.executable, "-c", AGENT, str(root), str(home), str(seconds), str(rate)]
    agent = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await agent.communicate()
    made, spent, computed = out.split()
    await asyncio.sleep(2)
    until.set()
    heard = await asyncio.gather(*reading)
    lost = sum(abs(int(made) - one) for one in heard)
    p99 = quantile(sorted(delays), 0.99) if delays else 0.0
    return {"p99": p99, "lost": lost, "call": float(spent), "computed": float(computed), "made": float(made)}


def memory_bytes(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def events(base: str, process: subprocess.Popen[str], root: Path, home: Path, asked: argparse.Namespace) -> None:
    alone = asyncio.run(deliver(base, root, home, 0, 5, asked.rate))
    one = asyncio.run(deliver(base, root, home, 1, 5, asked.rate))
    early = asyncio.run(deliver(base, root, home, asked.readers, min(60.0, asked.seconds), asked.rate))
    before = memory_bytes(process)
    many = asyncio.run(deliver(base, root, home, asked.readers, asked.seconds, asked.rate))
    print(
        f"  p99 of delivery: one reader {1000 * one['p99']:.0f} ms, {asked.readers} readers {1000 * many['p99']:.0f} ms"
    )
    line(f"p99 of delivery to {asked.readers} readers / to one", many["p99"] / one["p99"], 3)
    line("events lost", one["lost"] + early["lost"] + many["lost"], 0, "events")
    line("memory at the end / after the first part", memory_bytes(process) / before, 1.2)
    line("an agent's calls with readers / without", many["call"] / alone["call"], 1.3)


def starts(home: Path) -> None:
    words = [sys.executable, "-c", "import starlette.applications, uvicorn"]
    base = seconds_of(lambda: subprocess.run(words, check=True), 5)
    found = []
    for _ in range(5):
        with server(home) as (_, _, healthy):
            found.append(healthy)
    print(f"  /healthz after {1000 * quantile(sorted(found), 0.5):.0f} ms, the imports alone {1000 * base:.0f} ms")
    line("start to /healthz / import of Starlette and uvicorn", quantile(sorted(found), 0.5) / base, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=3_000)
    parser.add_argument("--records", type=int, default=30_000)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--full", action="store_true", help="the size of the goals: an hour on two idle cores")
    parser.add_argument("--store", help="a folder to make the sessions in, or that has them from an earlier run")
    asked = parser.parse_args()
    if asked.full:
        asked.calls, asked.records, asked.readers, asked.seconds = 50_000, 1_000_000, 200, 600.0
    with ExitStack() as made:
        folder = asked.store or made.enter_context(tempfile.TemporaryDirectory())
        root, home = Path(folder) / "root", Path(folder) / "home"
        root.mkdir(parents=True, exist_ok=True)
        make_session(root, home, "short", 500, 5_000)
        make_session(root, home, "long", asked.calls, asked.records)
        starts(home)
        with server(home) as (base, process, _):
            pages(base, process, root, home, asked.calls)
            events(base, process, root, home, asked)


if __name__ == "__main__":
    main()
