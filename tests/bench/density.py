"""How many idle players one gateway holds: memory a connection, what an active player feels, a storm of reconnects.

    python -m tests.bench.density                    5,000 idle connections
    python -m tests.bench.density --connections 500

Real processes: a Redis-compatible server, a storyteller with a tiny model, the gateway, an empty one beside it for
comparison, and the idle players in a process of their own, which answers the gateway's pings. Prints what was measured
beside what was promised, then one JSON line. The exit code is 1 where a promise was broken.
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
from typing import cast
from urllib.parse import urlsplit

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
STORM_S = 60
ASKS = 400
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


class Idle(asyncio.Protocol):
    """An idle player as cheap as can be, so that the processors are the gateway's: says hello, answers pings."""

    def __init__(self) -> None:
        self.is_welcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._received = b""
        self._is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        self.transport.write(b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + key)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._is_open and b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._is_open = head.startswith(b"HTTP/1.1 101 ")
            if not self._is_open:
                self.transport.abort()
                return
            self._send(0x81, wire.encode(wire.Hello(wire.PROTOCOL)).encode())
        while self._is_open and (frame := self._next()):
            opcode, payload = frame
            if opcode == 0x89:
                self._send(0x8A, payload)
            elif opcode == 0x81 and not self.is_welcome.done():
                self.is_welcome.set_result(b'"welcome"' in payload)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_welcome.done():
            self.is_welcome.set_result(False)

    def _next(self) -> tuple[int, bytes] | None:
        """The next whole frame: one byte, a length of one or three bytes, the payload."""
        if len(self._received) < 2:
            return None
        opcode, length, start = self._received[0], self._received[1], 2
        if length == 126:
            length, start = int.from_bytes(self._received[2:4], "big"), 4
        if len(self._received) < start + length:
            return None
        payload, self._received = self._received[start : start + length], self._received[start + length :]
        return opcode, payload

    def _send(self, opcode: int, payload: bytes) -> None:
        self.transport.write(bytes((opcode, 0x80 | len(payload), 0, 0, 0, 0)) + payload)  # masked with zeros


async def come(url: str, size: int, at_once: int) -> list[asyncio.Transport]:
    """So many idle players; those that were welcomed."""
    gate = asyncio.Semaphore(at_once)
    host, _, port = urlsplit(url).netloc.rpartition(":")

    async def come_one() -> asyncio.Transport | None:
        async with gate:
            loop = asyncio.get_running_loop()
            try:
                _, player = await loop.create_connection(Idle, host, int(port))
                return player.transport if await asyncio.wait_for(player.is_welcome, STORM_S) else None
            except (OSError, TimeoutError):
                return None

    came = await asyncio.gather(*(come_one() for _ in range(size)))
    return [transport for transport in came if transport is not None]


async def crowd(url: str, size: int) -> None:
    """The idle players: gathers, says so, waits for a line, leaves without a word and comes back all at once."""
    players = await come(url, size, AT_ONCE)
    sys.stdout.write(f"{len(players)}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    for transport in players:
        transport.abort()
    started = time.monotonic()
    players = await come(url, size, size)
    sys.stdout.write(f"{json.dumps([len(players), time.monotonic() - started])}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


async def enter(url: str) -> ClientConnection:
    socket = await connect(url, compression=None, ping_interval=None, proxy=None)
    await socket.send(wire.encode(wire.Hello(wire.PROTOCOL)))
    assert isinstance(wire.decode_server(await socket.recv()), wire.Welcome)
    return socket


async def first_text_ms(*urls: str) -> list[float]:
    """Medians over stories that one player asks for, in turn at each of the gateways: noise meets all alike."""
    sockets = [await enter(url) for url in urls]
    times: list[list[float]] = [[] for _ in urls]
    for number in range(ASKS):
        for socket, found in zip(sockets, times, strict=True):
            asked, first = time.monotonic(), 0.0
            await socket.send(wire.encode(wire.Ask(f"a{number}", words=("dragon",), max_tokens=4, ignore_end=True)))
            while not isinstance(frame := wire.decode_server(await socket.recv()), wire.Done):
                if isinstance(frame, wire.Text) and not first:
                    first = (time.monotonic() - asked) * 1000
            found.append(first)
    for socket in sockets:
        await socket.close()
    return [statistics.median(found) for found in times]


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


def measure(gateway: Gateway, empty: Gateway, size: int) -> Measured:
    asyncio.run(first_text_ms(gateway.url, empty.url))  # code paths and pools are warm from here on
    before = settled(lambda: resident_kib(gateway))
    players = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.density", "--crowd", gateway.url, "--connections", str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert players.stdin
    assert players.stdout
    try:
        assert int(players.stdout.readline()) == size
        assert metric(gateway.metrics(), "gateway_connections") == size
        kib = (settled(lambda: resident_kib(gateway)) - before) / size
        among, alone = asyncio.run(first_text_ms(gateway.url, empty.url))
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
            gateway, empty = running.gateway(), running.gateway()
            wait_until(lambda: gateway.is_ready() and empty.is_ready(), "ready gateways")
            measured = measure(gateway, empty, options.connections)
    for words, is_kept in measured.promises:
        sys.stdout.write(f"{'kept  ' if is_kept else 'BROKEN'}  {words}\n")
    sys.stdout.write(f"{msgspec.json.encode(measured).decode()}\n")
    return 0 if all(is_kept for _, is_kept in measured.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
