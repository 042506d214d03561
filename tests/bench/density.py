"""How many idle players one gateway holds: memory a connection, what an active player feels, a storm of reconnects.

    python -m tests.bench.density                    5,000 idle connections
    python -m tests.bench.density --connections 500

Real processes: a Redis-compatible server, a storyteller with a tiny model, a gateway, and the idle players in a process
of their own, which answers the gateway's pings. Prints what was measured beside what was promised, then one JSON line.
The exit code is 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import uvloop
from websockets.asyncio.client import ClientConnection, connect

from gateway import wire
from tests.checkpoints import make_checkpoint
from tests.processes import Gateway, metric, stack, wait_until

MOST_KIB = 20.0
"""Resident memory of the gateway a connection."""
MOST_SLOWER = 1.3
"""First text of an active player, beside what it is without the idle ones."""
AT_ONCE = 200
"""Handshakes on their way at once while the crowd gathers; a storm knows no such bound."""
ASKS = 500
"""Stories whose first text is measured."""


@dataclass(frozen=True)
class Measured:
    connections: int
    kib_per_connection: float
    first_text_ms_alone: float
    first_text_ms_among_idle: float
    storm_served: int
    storm_seconds: float
    log_errors: int

    @property
    def promises(self) -> list[tuple[str, bool]]:
        slower = self.first_text_ms_among_idle / self.first_text_ms_alone
        alone, among = self.first_text_ms_alone, self.first_text_ms_among_idle
        return [
            (f"{self.kib_per_connection:.1f} KiB a connection, promised below {MOST_KIB:g}",
             self.kib_per_connection < MOST_KIB),
            (f"first text {among:.1f} ms, {alone:.1f} without idle players: {slower:.2f} times, promised at most "
             f"{MOST_SLOWER:g}", slower <= MOST_SLOWER),
            (f"{self.storm_served} of {self.connections} served after reconnecting at once, within "
             f"{self.storm_seconds:.1f} s", self.storm_served == self.connections),
            (f"{self.log_errors} errors in the gateway's log, promised none", self.log_errors == 0),
        ]  # fmt: skip


async def enter(url: str) -> ClientConnection:
    socket = await connect(url, compression=None, ping_interval=None, proxy=None, open_timeout=60)
    await socket.send(wire.encode(wire.Hello(wire.PROTOCOL)))
    assert isinstance(wire.decode_server(await socket.recv()), wire.Welcome)
    return socket


async def crowd(url: str, size: int) -> None:
    """The idle players: gathers, says so, waits for a line, leaves without a word and comes back all at once."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def gather_one() -> ClientConnection:
        async with gate:
            return await enter(url)

    sockets = await asyncio.gather(*(gather_one() for _ in range(size)))
    sys.stdout.write("gathered\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    for socket in sockets:
        socket.transport.abort()
    started = time.monotonic()
    back = await asyncio.gather(*(enter(url) for _ in range(size)), return_exceptions=True)
    served = sum(isinstance(socket, ClientConnection) for socket in back)
    sys.stdout.write(f"{json.dumps([served, time.monotonic() - started])}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


async def first_text_ms(url: str) -> float:
    """Median over stories that one player asks for, one after the other."""
    socket, times = await enter(url), []
    for number in range(ASKS):
        asked = time.monotonic()
        await socket.send(wire.encode(wire.Ask(f"a{number}", words=("dragon",), max_tokens=4, ignore_end=True)))
        first = 0.0
        while not isinstance(frame := wire.decode_server(await socket.recv()), wire.Done):
            if isinstance(frame, wire.Text) and not first:
                first = (time.monotonic() - asked) * 1000
        times.append(first)
    await socket.close()
    return statistics.median(times)


def resident_kib(gateway: Gateway) -> float:
    return float(psutil.Process(gateway.process.pid).memory_info().rss) / 1024


def settled(read: Callable[[], float]) -> float:
    """A value once it stands still for a second."""
    before, since = read(), time.monotonic()

    def is_still() -> bool:
        nonlocal before, since
        now = read()
        if abs(now - before) > 64:
            before, since = now, time.monotonic()
        return time.monotonic() - since > 1

    wait_until(is_still, "a value that stands still", 30)
    return before


def measure(gateway: Gateway, size: int) -> Measured:
    asyncio.run(first_text_ms(gateway.url))  # code paths and pools are warm from here on
    alone = asyncio.run(first_text_ms(gateway.url))
    before = settled(lambda: resident_kib(gateway))
    players = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.density", "--crowd", gateway.url, "--connections", str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert players.stdin
    assert players.stdout
    try:
        assert players.stdout.readline() == "gathered\n"
        assert metric(gateway.metrics(), "gateway_connections") == size
        kib = (settled(lambda: resident_kib(gateway)) - before) / size
        among = asyncio.run(first_text_ms(gateway.url))
        players.stdin.write("come back\n")
        players.stdin.flush()
        served, seconds = json.loads(players.stdout.readline())
        wait_until(
            lambda: metric(gateway.metrics(), "gateway_connections") == served, "an honest count of connections", 60
        )
    finally:
        players.kill()
        players.wait()
    assert gateway.stop() == 0
    errors = len(re.findall(r'"level": "(ERROR|CRITICAL)"|Traceback', gateway.text()))
    return Measured(size, round(kib, 2), round(alone, 2), round(among, 2), served, round(seconds, 2), errors)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.density")
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--crowd", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.crowd:
        uvloop.run(crowd(options.crowd, options.connections))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with stack(folder, make_checkpoint(folder / "tiny")) as running:
            running.storyteller(STORYTELLER_THREADS="1")
            gateway = running.gateway()
            wait_until(gateway.is_ready, "a ready gateway")
            measured = measure(gateway, options.connections)
    for words, is_kept in measured.promises:
        sys.stdout.write(f"{'kept  ' if is_kept else 'BROKEN'}  {words}\n")
    sys.stdout.write(f"{msgspec.json.encode(measured).decode()}\n")
    return 0 if all(is_kept for _, is_kept in measured.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
